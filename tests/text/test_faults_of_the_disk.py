"""The cache when the disk fails at any call: one line, exit code 2, nothing left behind, and the next start makes it whole."""

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANGS, ROOT, reversed_digits, write_pairs

from engine.checkpoint import verify_files

HERE = Path(__file__).parent
FAULTS = {"full disk": errno.ENOSPC, "I/O error": errno.EIO, "kill": 0}


def tokenise(data: Path, cache: Path) -> None:
    from engine.errors import run_script
    from text.prepare import prepare
    from text.rows import find_text

    run_script(
        lambda: prepare(
            find_text(str(data)), cache, source_vocab=300, target_vocab=300, say=lambda _: None
        )
    )


def sweep(data: Path, folder: Path, fault: str, step: int) -> None:
    """In a process with the preloaded library: each Nth call fails in a copy of this process."""
    tokenise(data, folder / "first")  # all imports are done now
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    os.environ["FAULTY_FOLDER"] = str(folder / "faulty")
    library.arm(ctypes.c_long(-1), 0)
    tokenise(data, folder / "faulty")
    calls = library.count()
    for nth in range(1, calls + 1, step):
        cache, errors = folder / f"faulty-{nth}", folder / "errors"
        child = os.fork()
        if not child:
            os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
            library.arm(ctypes.c_long(nth), FAULTS[fault])
            tokenise(data, cache)
            os._exit(0)
        code, said = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), errors.read_text()
        if fault == "kill":
            assert code == -signal.SIGKILL, (nth, code)
        elif (
            code != 0
        ):  # what can be done without may fail: a lock, a name that another process has taken
            assert code == 2 and said.startswith("error: ") and said.count("\n") == 1, (
                nth,
                code,
                said,
            )
            assert not list(cache.glob(".building-*")), (nth, said)
        for building in cache.glob(".building-*"):
            os.utime(building, (0, 0))
        library.arm(ctypes.c_long(-1), 0)
        tokenise(data, cache)
        left = list(cache.iterdir())
        assert verify_files(next(cache.glob("[!.]*"))) is None and len(left) == 1, (nth, left)
    print(f"{calls} calls")


@pytest.mark.parametrize(
    "fault, step",
    [
        ("full disk", 61),
        ("I/O error", 61),
        ("kill", 61),
        *[pytest.param(fault, 1, marks=pytest.mark.slow) for fault in FAULTS],
    ],
)
def test_the_disk_fails_while_the_cache_is_made(fault, step, tmp_path):
    if sys.platform != "linux" or not shutil.which("cc"):
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path / "faulty_disk.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, HERE / "faulty_disk.c", "-ldl"], check=True
    )
    data = write_pairs(
        tmp_path / "data", reversed_digits(80), {"train": slice(0, 70), "validation": slice(70, 80)}
    )
    # LD_PRELOAD is cut at spaces, which a path may hold.
    folders = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    environment = {
        **os.environ,
        "LD_PRELOAD": library.name,
        "LD_LIBRARY_PATH": folders,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests",
    }
    words = [sys.executable, __file__, data, tmp_path, fault, str(step)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-2]) > 50


if __name__ == "__main__":
    sweep(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
