"""What the README tells people to type exists, and the commands without flags run as typed."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

import evaluate
import train
import translate

README = (ROOT / "README.md").read_text(encoding="utf-8")
FLAGS = {name: {field.name for field in dataclasses.fields(script.Config)}
         for name, script in (("train.py", train), ("evaluate.py", evaluate), ("translate.py", translate))}  # fmt: skip


def commands() -> list[tuple[str, list[str]]]:
    """(script, flags after it) of every command in the README."""
    found = re.findall(r"(?:python|--|2) (train\.py|evaluate\.py|translate\.py)([^\n]*)", README)
    return [(script, re.findall(r"--(\w+)", re.split("[#`]", rest)[0])) for script, rest in found]


def test_every_flag_in_the_readme_exists():
    assert len(commands()) > 15 and {script for script, _ in commands()} == set(FLAGS)
    for script, flags in commands():
        assert set(flags) <= FLAGS[script] | {"help"}, script


def test_every_file_in_the_readme_exists():
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", README):
        assert (ROOT / name).exists() or name in ("runs/",) or name.startswith(("runs/", "my_corpus")), name
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_without_flags(ranks, tmp_path):
    """`python train.py` and `torchrun --nproc_per_node 2 train.py`: the first steps, then Ctrl-C."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*launcher, str(ROOT / "train.py")], cwd=tmp_path, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not any("train/loss" in file.read_text() for file in tmp_path.glob("runs/*/metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    typed = "python train.py" if ranks == 1 else "torchrun --nproc_per_node 2 -- train.py"
    assert f"to go on: {typed} --resume runs/" in output
    assert output.count("no --data given") == output.count("device: ") == 1
