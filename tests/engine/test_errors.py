"""A user's mistake is one line and exit code 2; a bug keeps its traceback."""

import contextlib
import errno
import io
import os
import subprocess
import sys

import pytest
from conftest import HANGS, ROOT
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import UserError, run_script, stop


def ended_by(error: BaseException, capsys) -> tuple[int, str]:
    def main():
        raise error

    with pytest.raises(SystemExit) as ended:
        run_script(main)
    return ended.value.code, capsys.readouterr().err


@given(st.text(st.characters(codec="utf-8")))
@example("first\n  second\r\n\tthird ")
def test_any_message_is_one_line(message):
    written = io.StringIO()  # not pytest's capture, which hypothesis may not share between examples
    with contextlib.redirect_stderr(written), pytest.raises(SystemExit) as ended:
        stop(message)
    error = written.getvalue().removesuffix("\n")
    assert ended.value.code == 2 and len(error.splitlines()) == 1
    assert error.startswith("error:") and error.split()[1:] == message.split()


FULL, ELSEWHERE = "free some space", "choose another place"


@pytest.mark.parametrize(
    "error, said",
    [
        (
            RuntimeError("CUDA error: no kernel image is available for execution on the device"),
            "this GPU is too old for",
        ),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be …"),
            "the GPU's memory is full; ",
        ),  # by others
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            "choose a free GPU",
        ),
        (
            RuntimeError("Failed to find C compiler. Please specify …"),
            "--compile needs a C and C++ compiler",
        ),
        *(
            (
                OSError(number, os.strerror(number), "/x/file"),
                f"cannot write /x/file: {os.strerror(number)}; {remedy}",
            )
            for number, remedy in (
                (errno.ENOSPC, FULL),
                (errno.EDQUOT, FULL),
                (errno.EROFS, ELSEWHERE),
                (errno.EIO, FULL),
            )
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x"),
            f"cannot use /x: Permission denied; {ELSEWHERE}",
        ),
        (
            OSError(errno.ENOSPC, "full"),
            "cannot write /",
        ),  # write() knows no file name: the working directory
        (
            OSError("1000 requested and 0 written"),
            "No space left on device; free some space",
        ),  # numpy's words
    ],
)
def test_what_the_machine_does_not_give_is_one_line(error, said, capsys):
    code, line = ended_by(error, capsys)
    assert code == 2 and line.startswith("error: ") and said in line and line.count("\n") == 1


@pytest.mark.parametrize(
    "bug",
    [
        ZeroDivisionError(),
        FileNotFoundError(errno.ENOENT, "No such file", "/no/such/file"),
        PermissionError(errno.EACCES, "Permission denied"),  # no file: a semaphore, in a container
    ],
)
def test_a_bug_keeps_its_traceback(bug, capsys):
    with pytest.raises(type(bug)):
        ended_by(bug, capsys)
    assert capsys.readouterr().err == ""


def test_a_path_that_torch_compile_cannot_use_is_named_in_one_line(monkeypatch, capsys):
    error = RuntimeError("CppCompileError: C++ compile error\n\nCommand:\n…\nx.h:1: error: no y\n")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/a")
    monkeypatch.setattr(sys, "prefix", "/b")
    assert "the C++ compiler failed (x.h:1: error: no y)" in ended_by(error, capsys)[1]
    monkeypatch.setattr(sys, "prefix", "/my courses")
    assert "PyTorch in '/my courses', whose path has a space" in ended_by(error, capsys)[1]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/a b")
    code, line = ended_by(error, capsys)
    assert code == 2 and "'/a b', whose path has a space" in line and line.count("\n") == 1


def test_interrupted(capsys):
    assert ended_by(KeyboardInterrupt(), capsys) == (130, "error: interrupted\n")


def test_one_of_many_says_its_rank_and_leaves_at_once():
    """Before anything that Python does at its end: a destructor that waits for the others would hold the process for ever."""
    program = """
import atexit
from engine.errors import stop
atexit.register(print, "late")
print("begun")
stop("wrong")
"""
    words = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3", "WORLD_SIZE": "4"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert (done.returncode, done.stdout, done.stderr) == (2, "begun\n", "error (rank 3): wrong\n")


@pytest.mark.parametrize(
    "words",
    [
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "Broken pipe",
        "[../gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:1: Connection reset by peer",
        "wait timeout after 3000ms",
    ],
)
def test_a_process_that_is_gone_is_one_line(words, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, said = ended_by(RuntimeError(words), capsys)
    assert (
        code == 2
        and said.startswith("error: another process of this run has ended")
        and said.count("\n") == 1
    )


@pytest.mark.parametrize(
    "environment", [{"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0"}, {"WORLD_SIZE": "4"}]
)
def test_no_rank_is_said_where_there_is_one_process(capsys, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ended_by(UserError("wrong"), capsys) == (2, "error: wrong\n")
