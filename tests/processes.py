"""Scripts in processes of their own: as a user types them, or forked from one with all imports."""

import multiprocessing
import os
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
HANGS = 1800  # seconds after which a process is taken to wait for something that never comes

# Python and all imports take seconds to start. These processes are forked from one that has
# done it, also for what the scripts import on demand. It looks for modules in PYTHONPATH.
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    [
        "conftest",
        "train",
        "evaluate",
        "translate",
        "report",
        "tensorboard",
        "torch.utils.tensorboard",
        "torch._dynamo",
        "transformers.models.auto.tokenization_auto",
        "matplotlib.pyplot",
        "matplotlib.backends.backend_agg",
        "nltk.translate.bleu_score",
        "sacrebleu.metrics",
        "pyarrow.parquet",
    ]
)
os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))


# ---------------------------------------------------------------- as typed


def run_script(
    *arguments, cwd: Path, threads: int = 1, stdin="", **environment
) -> subprocess.CompletedProcess:
    """`python script.py …` in `cwd`, with `stdin` on its standard input."""
    return subprocess.run(
        [sys.executable, str(ROOT / arguments[0]), *map(str, arguments[1:])],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), **environment},
        capture_output=True,
        text=True,
        input=stdin,
        timeout=HANGS,
    )


def run_code(code: str, *arguments, **environment) -> str:
    """The output of a short program, which must end with exit code 0."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def torchrun(count: int, *arguments, cwd: Path) -> subprocess.Popen:
    """A script under torchrun with `count` processes."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc_per_node", str(count)]
    # Without the "--", torchrun takes our --run for an abbreviation of its own --run-path.
    words += ["--", str(ROOT / arguments[0]), *map(str, arguments[1:])]
    # On the CPU, also where GPUs are: a GPU for each process is seldom there.
    return subprocess.Popen(
        words,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def in_this_process(*words) -> int | None:
    """Run a script as __main__ in this process; returns its exit code, None at its normal end."""
    script, *flags = map(str, words)
    arguments = sys.argv
    # The two handlers that scripts replace.
    hook = threading.excepthook
    handler = signal.getsignal(signal.SIGINT)
    sys.argv = [script, *flags]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as leaving:
        return leaving.code
    finally:
        sys.argv = arguments
        threading.excepthook = hook
        signal.signal(signal.SIGINT, handler)
    return None


# ---------------------------------------------------------------- forked


class Forked:
    """`python script.py …` in a forked process, with one thread; `output`: stdout and stderr.

    `first` is called in that process before the script: a function of a module, with its arguments.
    """

    def __init__(self, *arguments, cwd: Path, first: tuple[Callable, ...] = (), **environment):
        self.file = Path(cwd) / f"output-{secrets.token_hex(8)}.txt"
        words = list(map(str, arguments))
        self.process = FORKING.Process(
            target=_run_forked, args=(words, str(cwd), str(self.file), environment, first)
        )
        self.process.start()

    def wait(self) -> int:
        """The exit code; negative: the number of the signal that ended the process."""
        self.process.join(HANGS)
        assert self.process.exitcode is not None, f"it still runs: {self.output}"
        return self.process.exitcode

    def wait_for(self, words: str) -> str:
        """The output as soon as it contains these words."""
        end = time.monotonic() + HANGS
        while words not in self.output:
            assert self.process.is_alive() and time.monotonic() < end, self.output
            time.sleep(0.05)
        return self.output

    @property
    def output(self) -> str:
        """What the process has written so far."""
        return self.file.read_text(encoding="utf-8") if self.file.exists() else ""


def _run_forked(arguments, cwd, file, environment, first) -> None:
    os.setsid()
    # As in a terminal: a shell's background jobs, perhaps these tests, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)
    # The DataLoader's processes start as they do for a user, not from a server of their own.
    multiprocessing.set_start_method(None, force=True)
    os.chdir(cwd)
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", **environment})
    torch.set_num_threads(1)
    if first:
        function, *values = first
        function(*values)
    sys.argv = arguments
    runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")


def forked(*arguments, **options) -> str:
    """The output of a script, which must end with exit code 0."""
    script = Forked(*arguments, **options)
    assert script.wait() == 0, script.output
    return script.output


def free_port(count: int = 1) -> int:
    """The first of `count` free ports in a row, below those of outgoing connections."""
    while True:
        # By chance, so that test processes side by side rarely choose the same.
        port = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError), ExitStack() as opened:
            for number in range(port, port + count):
                opened.enter_context(socket.create_server(("127.0.0.1", number)))
            return port


def fork_ranks(count: int, *arguments, **options) -> list[Forked]:
    """`count` ranks, as torchrun would start them."""
    common = dict(
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    return [
        Forked(*arguments, RANK=str(rank), LOCAL_RANK=str(rank), **common, **options)
        for rank in range(count)
    ]


def forked_ranks(count: int, *arguments, **options) -> str:
    """The output of rank 0; all ranks must end with exit code 0, the others without output."""
    ranks = fork_ranks(count, *arguments, **options)
    codes = [rank.wait() for rank in ranks]
    assert codes == [0] * count, [rank.output for rank in ranks]
    assert not any(rank.output for rank in ranks[1:]), [rank.output for rank in ranks[1:]]
    return ranks[0].output
