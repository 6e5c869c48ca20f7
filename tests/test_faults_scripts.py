"""Scripts on machines and streams that are not as usual: one line each, never a traceback."""

import ctypes
import io
import os
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY_FLAGS, forked

from engine.config import checked, nearest, parse_flags
from engine.errors import UserError, prepare_process, run_script
from evaluate import Config


@pytest.mark.parametrize(
    "typed, meant",
    [("batch", "tokens_per_batch"), ("learning-rate", "lr"), ("max_step", "max_steps")],
)
def test_flags_by_their_names_elsewhere(typed, meant):
    names = ["lr", "max_steps", "tokens_per_batch"]
    assert nearest(typed, names, "--") == f"; did you mean --{meant}?"


def test_a_path_with_bytes_that_are_not_utf8():
    with pytest.raises(UserError, match=r"--out 'a.udcff' holds a NUL character, or is not UTF-8"):
        checked(Config(out=os.fsdecode(b"a\xff")))


@pytest.mark.parametrize("name", ["train", "evaluate", "translate"])
def test_wrong_settings_made_in_python(name, monkeypatch):
    monkeypatch.setattr("engine.distributed.init", None)  # it is not called
    script = import_module(name)
    with pytest.raises(UserError, match="--precision fp8 is unknown; choose auto, fp32, bf16"):
        getattr(script, name)(script.Config(precision="fp8"))


@pytest.mark.parametrize("work", [lambda: torch.empty(2**50), lambda: np.ones(2**50)])
def test_out_of_memory(work, capsys):
    with pytest.raises(SystemExit):
        run_script(work)
    errors = capsys.readouterr().err
    assert errors.startswith("error: the machine's memory is full; ") and errors.count("\n") == 1


def test_a_terminal_in_latin_1(monkeypatch):
    """As over an old ssh."""
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", latin)
    prepare_process()
    print("scale 0–100", flush=True)
    assert latin.buffer.getvalue() == b"scale 0\\u2013100\n"


def test_windows_users_learn_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(SystemExit):
        parse_flags(object)
    assert "Linux, macOS or WSL" in capsys.readouterr().err


def as_on_macos() -> None:
    """Another name of the system, no mallopt, no /proc."""
    exists = Path.exists
    sys.platform = "darwin"
    del ctypes.CDLL.__getattr__
    Path.exists = lambda path: not str(path).startswith("/proc") and exists(path)


def test_training_without_what_only_linux_has(toy_data, tmp_path):
    flags = ["--data", toy_data, *TINY_FLAGS, "--max_steps", 1, "--run", "mac"]
    output = forked("train.py", *flags, cwd=tmp_path, first=(as_on_macos,))
    assert "the C++ functions need Linux" in output and "stopped after step 1: finished" in output
