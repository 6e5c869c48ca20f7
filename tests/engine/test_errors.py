"""A user's mistake is one line and exit code 2; a bug keeps its traceback."""

import contextlib
import errno
import io
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import UserError, run_script, stop


def run_program(body: str, **environment) -> subprocess.CompletedProcess:
    """`run_script` of a `main` with this body, in a process of its own."""
    program = f"from engine.errors import UserError, run_script\ndef main():\n    {body}\nrun_script(main)\n"
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    variables |= {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=60)


def ended_by(error: BaseException, capsys) -> tuple[int, str]:
    def main():
        raise error

    with pytest.raises(SystemExit) as ended:
        run_script(main)
    return ended.value.code, capsys.readouterr().err


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@given(st.text(st.characters(codec="utf-8")))
@example("first\n  second\r\n\tthird ")
def test_any_message_is_one_line(message):
    written = io.StringIO()  # not pytest's capture, which hypothesis may not share between examples
    with contextlib.redirect_stderr(written), pytest.raises(SystemExit) as ended:
        stop(message)
    error = written.getvalue().removesuffix("\n")
    assert ended.value.code == 2 and len(error.splitlines()) == 1
    assert error.startswith("error:") and error.split()[1:] == message.split()


def test_a_script_without_mistake_just_ends():
    result = run_program("print('done')")
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_a_card_that_others_have_filled(capsys):
    code, said = ended_by(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), capsys)
    assert code == 2 and said.startswith("error: the GPU's memory is full; ") and said.count("\n") == 1


@pytest.mark.parametrize("number, remedy", [
    (errno.ENOSPC, "free some space"), (errno.EDQUOT, "free some space"), (errno.EROFS, "choose another place"),
])  # fmt: skip
def test_a_disk_that_takes_nothing(capsys, number, remedy):
    code, line = ended_by(OSError(number, os.strerror(number), "/runs/x/file"), capsys)
    assert code == 2 and line.count("\n") == 1
    assert line.startswith(f"error: cannot write /runs/x/file: {os.strerror(number)}; {remedy}")
    code, line = ended_by(OSError(number, os.strerror(number)), capsys)  # write() knows no file name
    assert code == 2 and f"cannot write {os.getcwd()}: " in line


def test_a_full_disk_in_the_words_of_numpy(capsys):
    code, line = ended_by(OSError("1000 requested and 0 written"), capsys)
    assert code == 2 and "No space left on device; free some space" in line and line.count("\n") == 1


@pytest.mark.parametrize("bug", ["1 / 0", "open('/no/such/file')"])
def test_a_bug_keeps_its_traceback(bug):
    result = run_program(bug)
    assert result.returncode == 1 and "Traceback" in result.stderr and "in main" in result.stderr
    assert not result.stderr.startswith("error")


def test_interrupted(capsys):
    assert ended_by(KeyboardInterrupt(), capsys) == (130, "error: interrupted\n")


def test_one_of_many_says_its_rank_and_leaves_at_once():
    # A destructor that waits for the others would hold the process for ever.
    body = "import atexit, time; atexit.register(time.sleep, 1000); print('begun'); raise UserError('wrong')"
    result = run_program(body, RANK="3", WORLD_SIZE="4")
    assert (result.returncode, result.stdout, result.stderr) == (2, "begun\n", "error (rank 3): wrong\n")


@pytest.mark.parametrize("words", [
    "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?", "Broken pipe",
    "[../gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:1: Connection reset by peer", "wait timeout after 3000ms",
])  # fmt: skip
def test_a_process_that_is_gone_is_one_line(words, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, said = ended_by(RuntimeError(words), capsys)
    assert code == 2 and said.startswith("error: another process of this run has ended") and said.count("\n") == 1


@pytest.mark.parametrize("environment", [{"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0"}, {"WORLD_SIZE": "4"}])
def test_no_rank_is_said_where_there_is_one_process(capsys, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ended_by(UserError("wrong"), capsys) == (2, "error: wrong\n")
