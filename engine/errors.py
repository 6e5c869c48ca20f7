"""A user's mistake ends in one line on stderr — what, where, what to do — and exit code 2; a bug keeps its traceback."""

import errno
import io
import os
import re
import signal
import sys
import threading

# What gloo, NCCL and the store say when the process at the other end is gone or silent.
_PEER_LOST = (
    r"[Cc]onnection (was )?(closed|reset)|Connection refused|Broken pipe|Timed out waiting|[Tt]imed out after|wait timeout"
    r"|ncclRemoteError|NCCL communicator was aborted|[Ff]ailed to recv|recvValue failed"
)


class UserError(Exception):
    """Something the user can mend. The message is one line: what is wrong, where, what to do."""


def prepare_process() -> None:
    """What a script does first, before the imports that take seconds: streams that can be written to, Ctrl-C in silence."""
    if sys.platform == "win32":
        stop("this needs Linux, macOS or WSL (the Linux inside Windows: https://aka.ms/wsl)")
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if (
            getattr(sys, name) is None
        ):  # closed (`>&-`): the next file that is opened would take its place
            setattr(sys, name, open(os.devnull, mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal in ASCII or Latin-1
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends without a traceback; until `run_script`


def run_script(main) -> None:
    """Call `main()`; turn a `UserError`, or a disk that is full, read-only or forbidden, into one line and exit code 2."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a KeyboardInterrupt again
    # TensorBoard writes in a thread, whose error the next write raises here again: one traceback too many.
    threading.excepthook = lambda args: (
        None if _disk_error(args.exc_value) else threading.__excepthook__(args)
    )
    try:
        main()
    except UserError as error:
        stop(str(error))
    except BrokenPipeError:  # `… | head` has seen enough
        os._exit(0)
    except Exception as error:
        # torch's, which is not imported here; on a card that others have filled it is CUDA's own.
        full = r"CUDA error: out of memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
        on_gpu = type(error).__name__ == "OutOfMemoryError" or re.search(full, str(error))
        if on_gpu or isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            first = (
                "GPU's memory is full; choose a free GPU, or"
                if on_gpu
                else "machine's memory is full;"
            )
            stop(
                f"the {first} train with a smaller --preset or --size, a larger --accumulate; decode with less --beam"
            )
        if "no kernel image" in str(error):
            stop(
                "this GPU is too old for this build of PyTorch; see docs/troubleshooting.md, or give --device cpu"
            )
        if "C++ compile error" in str(error):
            stop(_compile_remedy(str(error)))
        if re.search(r"C(\+\+)? compiler", str(error)):  # torch.compile's, or Triton's
            stop(
                "--compile needs a C and C++ compiler (gcc, g++) and Python's headers; install them, or leave it out"
            )
        many = os.environ.get("WORLD_SIZE", "1") != "1"
        if (
            many and not isinstance(error, OSError) and re.search(_PEER_LOST, str(error))
        ):  # a download's is an OSError
            stop(
                "another process of this run has ended or does not answer; its own message says why"
            )
        number = _disk_error(error)
        if number is None:
            raise
        where = getattr(error, "filename", None) or os.getcwd()
        elsewhere, verb = (
            number in (errno.EROFS, errno.EACCES),
            "use" if number == errno.EACCES else "write",
        )
        remedy = (
            "choose another place" if elsewhere else "free some space (`df -h` shows on which disk)"
        )
        stop(
            f"cannot {verb} {where}: {os.strerror(number)}; {remedy} and run the same command again"
        )
    except KeyboardInterrupt:
        stop("interrupted", code=130)


def _compile_remedy(message: str) -> str:
    """One line for an error of torch.compile, whose message holds the compiler's whole output."""
    # PyTorch (2.13) does not quote the paths in the compiler's command.
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")  # torch.compile sets it
    if " " in cache:
        return (
            f"--compile cannot write C++ files to {cache!r}, whose path has a space; set "
            "TORCHINDUCTOR_CACHE_DIR to a folder without one, or leave --compile out"
        )
    if " " in sys.prefix:
        return (
            f"--compile cannot use the PyTorch in {sys.prefix!r}, whose path has a space; install "
            "the packages elsewhere (VENV=/tmp/venv bash run.sh), or leave --compile out"
        )
    errors = [line for line in message.splitlines() if "error:" in line]
    reason = errors[0] if errors else "no reason given"
    return f"--compile: the C++ compiler failed ({reason}); install a newer g++, or leave it out"


def _disk_error(error: BaseException | None) -> int | None:
    """The number of the error if a disk is full, read-only, forbidden or broken, whatever library says so, else None."""
    # What is forbidden and has no name may be no file.
    number = (
        error.errno
        if isinstance(error, OSError) and (error.filename or error.errno != errno.EACCES)
        else None
    )
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # a library in Rust
        number = int(found[1])
    elif number is None and re.search(r"\d+ requested and \d+ written", str(error)):  # numpy
        number = errno.ENOSPC
    return (
        number
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
        else None
    )


def stop(message: str, code: int = 2) -> None:
    """Print the one line and leave."""
    rank = os.environ.get("RANK")
    who = f" (rank {rank})" if rank and os.environ.get("WORLD_SIZE", "1") != "1" else ""
    sys.stdout.flush()
    print(f"error{who}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    # os._exit, not sys.exit: a rank that leaves with an error must not wait for the others in a destructor.
    os._exit(code) if who else sys.exit(code)
