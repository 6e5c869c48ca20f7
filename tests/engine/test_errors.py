"""A user's mistake is one line and exit code 2; a bug keeps its traceback."""

import contextlib
import errno
import io
import os
import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import HANGS, ROOT
from hypothesis import example, given
from hypothesis import strategies as st

import train
from engine.errors import UserError, explain, run_script, stop
from engine.telemetry import Log


def ended_by(error: BaseException, capsys) -> tuple[int, str]:
    """The exit code and stderr of a script whose `main` raises the error."""

    def main():
        raise error

    with pytest.raises(SystemExit) as ended:
        run_script(main)
    return ended.value.code, capsys.readouterr().err


@given(st.text(st.characters(codec="utf-8")))
@example("first\n  second\r\n\tthird ")
def test_any_message_is_one_line(message):
    stderr = io.StringIO()  # hypothesis must not share pytest's capture between examples
    with contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as ended:
        stop(message)
    error = stderr.getvalue().removesuffix("\n")
    assert ended.value.code == 2 and len(error.splitlines()) == 1
    assert error.startswith("error:") and error.split()[1:] == message.split()


NO_SPACE = "cannot write /x: No space left on device; free some space"
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize(
    "error, line",
    [
        (RuntimeError("CUDA error: no kernel image is available for …"), "this GPU is too old for"),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors …"),
            "CUDA out of memory; choose",
        ),
        (RuntimeError(CUBLAS), "choose a free GPU"),
        (MemoryError(), "the machine's memory is full; "),
        (RuntimeError("Failed to find C compiler. Please specify …"), "--compile needs a C and"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), NO_SPACE),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "choose another place"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "cannot use /x: Permission "),
        # write() does not know the name of its file: the working directory stands for it.
        (OSError(errno.ENOSPC, "full"), "cannot write a file: No space left on device"),
        (PermissionError(errno.EPERM, "Not permitted", "/x"), "cannot use /x: Operation not"),
        (OSError("1000 requested and 0 written"), "No space left on device"),  # numpy
        (RuntimeError("No space left on device (os error 28)"), "free some space"),  # safetensors
    ],
)
def test_errors_of_the_machine_are_one_line(error, line, capsys):
    code, message = ended_by(error, capsys)
    assert code == 2
    assert message.startswith("error: ") and line in message and message.count("\n") == 1


def test_a_full_memory_names_only_flags_that_the_script_has(capsys):
    remedies = {"train": train.SMALLER_PARTS}
    for name in ("evaluate", "translate", "labs.gpt.__main__"):
        source = Path(import_module(name).__file__).read_text(encoding="utf-8")
        (remedies[name],) = re.findall(r'when_full="(.+?)"', source)
    for name, remedy in remedies.items():
        flags = re.findall(r"--(\w+)", remedy)
        known = {field.name for field in fields(import_module(name).Config)} | {"resume"}
        assert flags and set(flags) <= known, name
    full = RuntimeError("CUDA error: out of memory")
    with pytest.raises(SystemExit):
        run_script(Mock(side_effect=full), train.SMALLER_PARTS)
    line = capsys.readouterr().err
    assert line.startswith("error: CUDA out of memory; ") and line.count("\n") == 1
    assert "`--resume RUN --accumulate N`" in line and "--tokens_per_batch" in line
    assert "--" not in ended_by(full, capsys)[1]  # a script that has not said what helps


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


def test_one_of_several_ranks_names_itself_and_leaves_at_once():
    """Before Python's exit handlers: a destructor that waits for other ranks would never end."""
    program = """
import atexit
from engine.errors import stop
atexit.register(print, "late")
print("begun")
stop("wrong")
"""
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3", "WORLD_SIZE": "4"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert (done.returncode, done.stdout, done.stderr) == (2, "begun\n", "error (rank 3): wrong\n")


@pytest.mark.parametrize("variables", [{"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0"}])
def test_a_single_process_does_not_name_its_rank(capsys, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ended_by(UserError("wrong"), capsys) == (2, "error: wrong\n")


@pytest.mark.parametrize(
    "message",
    [
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?",
        "Broken pipe",
        "[../gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:1: Connection reset by peer",
        "wait timeout after 3000ms",
    ],
)
def test_a_lost_process_is_one_line(message, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, line = ended_by(RuntimeError(message), capsys)
    assert code == 2 and line.count("\n") == 1
    assert line.startswith("error: another process of this run has ended")


@pytest.mark.parametrize(
    "end, code, said", [("pass", 0, ""), ("raise UserError('no')", 2, "error: no\n")]
)
def test_the_reader_of_a_pipe_may_leave(end, code, said):
    """As in `python train.py | head`, with the buffer that standard output has by default."""
    script = (
        "from engine.errors import UserError, run_script\n"
        "from engine.telemetry import Log\n"
        "def main():\n"
        "    Log()('a line')\n"
        f"    {end}\n"
        "run_script(main)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONUNBUFFERED", None)
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-c", script], stdout=writing, stderr=subprocess.PIPE, env=environment
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr.decode()) == (code, said)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_training_outlives_its_terminal_and_a_full_disk(number, monkeypatch, tmp_path):
    """train.log has every line; standard error of a lost terminal is lost, too."""
    discarded = []

    def fail(*_):
        raise OSError(number, "no")

    monkeypatch.setattr("engine.telemetry.tqdm.write", fail)
    monkeypatch.setattr(os, "dup2", lambda _, place: discarded.append(place))
    streams = {"stdout": 1, "stderr": 2}
    for name, place in streams.items():
        stream = SimpleNamespace(fileno=lambda place=place: place, isatty=lambda: True)
        monkeypatch.setattr(sys, name, stream)
    Log(tmp_path)("step 1")
    assert discarded == ([1, 2] if number == errno.EIO else [1])
    assert (tmp_path / "train.log").read_text().endswith("step 1\n")


def test_streams_that_the_shell_closed():
    """Python has None for them, and whatever prints would fail."""
    code = (
        "import sys; from engine.errors import prepare_process; prepare_process(); "
        "print('out'); print('err', file=sys.stderr); sys.exit(len(sys.stdin.read()))"
    )
    command = f'exec "{sys.executable}" -c "{code}" <&- >&- 2>&-'
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


# ---------------------------------------------------------------- without the packages

LABS = sorted(path.parent.name for path in ROOT.glob("labs/*/__main__.py"))
COMMANDS = [f"{name}.py" for name in ("train", "evaluate", "translate", "report")]
COMMANDS += [f"-m labs.{lab}" for lab in LABS]


@pytest.mark.parametrize("command", [*COMMANDS, "-m labs.gpt.generate", "-m tools.reporting.masks"])
def test_without_the_packages_the_command_that_helps(command):
    """Python with -S has the standard library alone, like one outside the virtual environment."""
    words = [sys.executable, "-S", *command.split()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert re.match(r"error: \S+ has no package (torch|numpy); .*`source ", done.stderr)


def test_the_environment_of_this_repository_is_named_if_there_is_one(tmp_path, monkeypatch):
    missing = ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")
    monkeypatch.setattr("engine.errors.ROOT", tmp_path)
    assert f"{sys.executable} -m pip install -r {tmp_path}/requirements.txt" in explain(missing)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    assert explain(missing).endswith(
        f"no package torch; type `source {tmp_path}/.venv/bin/activate`"
    )
    monkeypatch.setattr("sys.prefix", str(tmp_path / ".venv"))  # which lacks it
    assert "-m pip install" in explain(missing)


def test_a_module_of_our_own_that_is_missing_is_a_bug():
    for name in ("engine.no_such", "train.no_such", None):
        assert explain(ModuleNotFoundError("No module named", name=name)) is None
