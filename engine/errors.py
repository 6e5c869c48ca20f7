"""A user's mistake ends in one line on stderr (what is wrong, where, what to do) and exit code 2.

A bug keeps its traceback.
"""

import errno
import io
import os
import re
import shlex
import signal
import sys
import threading
from pathlib import Path

# Messages of gloo, NCCL and the key-value store when another process has ended or is silent.
PEER_LOST = (
    r"[Cc]onnection (was )?(closed|reset)|Connection refused|Broken pipe"
    r"|Timed out waiting|[Tt]imed out after|wait timeout|[Ff]ailed to recv|recvValue failed"
    r"|ncclRemoteError|NCCL communicator was aborted"
)
# Messages of CUDA and cuBLAS on a GPU whose memory other processes have filled.
GPU_FULL = r"CUDA error: out of memory|CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
SMALLER = "use a smaller batch or model"  # what helps any script when memory is full

ROOT = Path(__file__).resolve().parents[1]  # of the repository
FORBIDDEN = (errno.EACCES, errno.EPERM)
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, *FORBIDDEN, errno.EIO)


class UserError(Exception):
    """Something that the user can fix. The message is one line: what, where, what to do."""


def prepare_process() -> None:
    """Make the standard streams usable and Ctrl-C quiet, before the imports that take seconds."""
    if sys.platform == "win32":
        stop("this needs Linux, macOS or WSL (the Linux inside Windows: https://aka.ms/wsl)")
    # Python has None for a stream that the shell closed: `>&-`.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    # A terminal in ASCII or Latin-1 shows \u4e2d instead of raising an error.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Until `run_script`, Ctrl-C ends the process without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_script(main, when_full: str = SMALLER) -> None:
    """Call `main()`; turn errors that the user can fix into one line and exit code 2.

    `when_full`: what helps this script when memory is full.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        # Ctrl-C raises KeyboardInterrupt again.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.excepthook = print_unless_disk_error
    try:
        main()
    except KeyboardInterrupt:
        stop("interrupted", code=130)
    except BrokenPipeError:
        # `python train.py | head` has read enough.
        os._exit(0)
    except Exception as error:
        message = explain(error, when_full)
        if message is None:
            raise
        stop(message)


def stop(message: str, code: int = 2) -> None:
    """Print the message as one line on stderr and leave with the exit code."""
    who = ""
    if several_processes() and os.environ.get("RANK"):
        who = f" (rank {os.environ['RANK']})"
    one_line = " ".join(message.split())
    try:
        sys.stdout.flush()
    except OSError as error:
        discard_output(error)
    print(f"error{who}: {one_line}", file=sys.stderr, flush=True)
    if who:
        # Not sys.exit: a destructor might wait for the other ranks.
        os._exit(code)
    sys.exit(code)


def discard_output(error: OSError) -> None:
    """Standard output cannot be written any more: from now on it goes to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    if error.errno == errno.EIO:  # the terminal is gone, and standard error with it
        os.dup2(nowhere, sys.stderr.fileno())


def explain(error: Exception, when_full: str = SMALLER) -> str | None:
    """One line for an error that the user can fix; None for a bug. `when_full`: see run_script."""
    message = str(error)
    if isinstance(error, UserError):
        return message
    if isinstance(error, ModuleNotFoundError):
        return explain_missing_package(error)

    # The class by its name, because torch is not imported here.
    if type(error).__name__ == "OutOfMemoryError" or re.search(GPU_FULL, message):
        return f"CUDA out of memory; choose a free GPU (`nvidia-smi` shows which), or {when_full}"
    if isinstance(error, MemoryError) or "can't allocate memory" in message:
        return f"the machine's memory is full; {when_full}"
    if "can't start new thread" in message:
        return "the limit on processes or memory is reached (see `ulimit -a`); raise it"
    if "no kernel image" in message:
        return (
            "this GPU is too old for this build of PyTorch; see "
            "docs/troubleshooting.md#gpu, or give --device cpu"
        )

    if "C++ compile error" in message:
        return explain_compiler_error(message)
    if re.search(r"C(\+\+)? compiler", message):
        return (
            "--compile needs a C and C++ compiler (gcc, g++) and Python's headers; "
            "install them, or leave it out"
        )

    # An OSError is not a lost rank but, for example, a download that failed.
    if several_processes() and not isinstance(error, OSError) and re.search(PEER_LOST, message):
        return (
            "another process of this run has ended or does not answer; its own message says why "
            "(docs/training.md#several-gpus-several-machines)"
        )
    return explain_disk_error(error)


def explain_missing_package(error: ModuleNotFoundError) -> str | None:
    """One line with the command that helps; None if the module is one of this repository."""
    package = (error.name or "").partition(".")[0]
    if not package or (ROOT / package).exists() or (ROOT / f"{package}.py").exists():
        return None
    activate = ROOT / ".venv" / "bin" / "activate"
    if activate.exists() and Path(sys.prefix) != ROOT / ".venv":
        remedy = f"type `source {shlex.quote(str(activate))}`"
    else:
        requirements = shlex.quote(str(ROOT / "requirements.txt"))
        remedy = (
            "activate the environment in which it is installed (`source …/bin/activate`), or type "
            f"`{shlex.quote(sys.executable)} -m pip install -r {requirements}`"
        )
    return f"{sys.executable} has no package {package}; {remedy}"


def explain_failed_import(kind, error, traceback) -> None:
    """A `sys.excepthook`, for the imports before `run_script`: a missing package is one line."""
    message = explain(error) if isinstance(error, ModuleNotFoundError) else None
    if message is None:
        sys.__excepthook__(kind, error, traceback)
    else:
        stop(message)


def several_processes() -> bool:
    """Whether this process is one of several that torchrun started."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def explain_compiler_error(message: str) -> str:
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
    if not errors:
        return "--compile: the C++ compiler failed or was stopped; try again, or leave it out"
    return f"--compile: the C++ compiler failed ({errors[0]}); install a newer g++, or leave it out"


def explain_disk_error(error: Exception) -> str | None:
    """One line for a disk that is full, read-only, forbidden or broken; None for other errors."""
    number = disk_error_number(error)
    if number is None:
        return None
    # A failed write, unlike open(), names no file; see `names_place` in engine/files.py.
    where = getattr(error, "filename", None) or getattr(error, "place", None) or "a file"
    verb = "use" if number in FORBIDDEN else "write"
    if number in (errno.EROFS, *FORBIDDEN):
        remedy = "choose another place"
    else:
        remedy = "free some space (`df -h` shows on which disk)"
    reason = os.strerror(number)
    return f"cannot {verb} {where}: {reason}; {remedy} and run the same command again"


def disk_error_number(error: BaseException | None) -> int | None:
    """The `errno` of an error of the disk, whichever library reports it; None for other errors."""
    number = None
    if isinstance(error, OSError):
        number = error.errno
        # Without a file name, "permission denied" may be about something other than a file.
        if number in FORBIDDEN and not error.filename:
            number = None
    written_in_rust = re.search(r"\(os error (\d+)\)", str(error))
    if written_in_rust:
        number = int(written_in_rust[1])
    written_by_numpy = re.search(r"\d+ requested and \d+ written", str(error))
    if number is None and written_by_numpy:
        number = errno.ENOSPC
    return number if number in DISK_ERRORS else None


def print_unless_disk_error(failure) -> None:
    """A `threading.excepthook`. The next write of TensorBoard raises its thread's error again."""
    if disk_error_number(failure.exc_value) is None:
        threading.__excepthook__(failure)
