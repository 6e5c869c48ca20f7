"""What a run says about its machine and its code."""

import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from engine import environment
from engine.precision import Precision


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_a_copy_inside_another_repository_has_no_commit(tmp_path, monkeypatch):
    # Neither the user's settings nor, in a hook of git, the user's repository.
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")

    def git(*words):
        subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)

    lab = tmp_path / "lab"
    lab.mkdir()
    (lab / "environment.py").touch()
    monkeypatch.setattr(environment, "__file__", str(lab / "environment.py"))
    git("init")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    git(*identity, "commit", "--allow-empty", "-m", "notes of a student")
    assert environment.commit() is None
    git("add", ".")
    git(*identity, "commit", "-m", "the lab")
    head = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True)
    assert head.stdout.decode().startswith(environment.commit())


def test_the_cores_that_may_be_used_and_the_number_format(monkeypatch):
    monkeypatch.setattr(environment, "cores", lambda: 3)  # of a job on a larger machine
    device = torch.device("cpu")
    world = SimpleNamespace(device=device, size=2)
    facts = environment.environment(world, Precision(device, "bf16", ""))
    assert (facts["cores"], facts["processes"], facts["precision"]) == (3, 2, "bf16")
    assert environment.environment(world)["precision"] is None
