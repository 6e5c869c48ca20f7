"""The device of a process, and the lines about GPUs that it cannot use."""

import re
import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from engine import devices
from engine.devices import choose_device, hidden_gpus
from engine.errors import UserError

ENVIRONMENT = (
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    *("SLURM_LOCALID", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"),
)


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(count)`: torch sees this number of GPUs; returns a list of those selected later."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)

    def gpus(count: int) -> list:
        selected = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", selected.append)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        return selected

    return gpus


def test_a_machine_without_gpus(gpus, monkeypatch):
    gpus(0)
    monkeypatch.setattr(devices, "hidden_gpus", lambda: None)  # nor any that PyTorch cannot use
    assert choose_device("auto", 3) == choose_device("cpu", 0) == torch.device("cpu")


@pytest.mark.parametrize(
    "name, local_rank, index",
    [("auto", 0, 0), ("auto", 1, 1), ("cuda", 1, 1), ("cuda:1", 0, 1), ("cuda:0", 1, 0)],
)
def test_each_rank_has_its_gpu(gpus, name, local_rank, index):
    selected = gpus(2)
    device = torch.device("cuda", index)
    assert choose_device(name, local_rank) == device
    assert selected == [device]
    assert choose_device("cpu", local_rank) == torch.device("cpu")
    assert selected == [device]


@pytest.mark.parametrize(
    "visible, processes, name, message",
    [
        (2, 1, "mps", "--device mps: Apple's GPU has no float64"),
        (2, 1, "gpu", "unknown device; choose auto, cpu, cuda or cuda:N"),
        (2, 1, "", "unknown device; choose auto, cpu, cuda or cuda:N"),
        (0, 1, "cuda", "--device cuda: PyTorch sees no GPU on this machine; --device auto"),
        (0, 1, "cuda:0", "--device cuda:0: PyTorch sees no GPU on this machine; --device auto"),
        (2, 1, "cuda:2", "GPU 2 was requested, but 2 can be seen"),
        (2, 1, "cuda:-1", "GPU -1 was requested, but 2 can be seen"),
        (2, 1, "cuda:x", "GPU x was requested, but 2 can be seen"),
        (2, 3, "auto", "3 processes but 2 visible GPU(s); start at most 2"),
        (2, 2, "cuda:1", "--device cuda:1 gives all processes the same GPU"),
    ],
)
def test_a_device_that_is_not_there(gpus, monkeypatch, visible, processes, name, message):
    selected = gpus(visible)
    monkeypatch.setattr(devices, "hidden_gpus", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    for rank in range(processes):  # each rank raises it, so that none waits for the others
        with pytest.raises(UserError, match=re.escape(message)):
            choose_device(name, rank)
    assert not selected


def test_a_gpu_that_other_processes_have_filled(gpus, monkeypatch):
    gpus(2)
    full = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be …")
    monkeypatch.setattr(torch.cuda, "synchronize", Mock(side_effect=full))
    message = r"^GPU 1 cannot be used \(CUDA error: out of memory\); .*CUDA_VISIBLE_DEVICES"
    with pytest.raises(UserError, match=message):
        choose_device("cuda:1", 0)


def test_srun_with_one_gpu_per_task(gpus, monkeypatch):
    selected = gpus(1)
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_device("auto", 1) == torch.device("cuda", 0)
    assert len(selected) == 1


@pytest.mark.parametrize(
    "variable, value",
    [
        pytest.param("SLURM_GPUS_ON_NODE", "1", id="two tasks with one card together"),
        pytest.param("TORCHELASTIC_RUN_ID", "none", id="torchrun in a batch script"),
    ],
)
def test_more_processes_of_slurm_than_gpus(gpus, monkeypatch, variable, value):
    gpus(1)
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match="2 processes but 1 visible GPU"):
        choose_device("auto", 1)


# ---------------------------------------------------------------- GPUs that PyTorch cannot use


@pytest.fixture
def driver(tmp_path, gpus, monkeypatch):
    """`driver(580)`: a folder where it describes three GPUs that PyTorch does not see."""
    gpus(0)
    monkeypatch.setattr(torch, "__version__", "2.13.0+x")

    def driver(version: int) -> Path:
        for card in range(3):
            (tmp_path / f"nvidia/gpus/0000:{card:02}:00.0").mkdir(parents=True)
        text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}.65.06\n"
        (tmp_path / "nvidia/version").write_text(text)
        return tmp_path / "nvidia"

    return driver


@pytest.mark.parametrize("visible", ["", "-1", "7"])
def test_hidden_gpus_are_named(driver, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    message = f"CUDA_VISIBLE_DEVICES={visible!r} hides all 3 GPU(s) of this machine"
    assert hidden_gpus(driver(580)) == message


PIP = f"type `{shlex.quote(sys.executable)} -m pip install torch==2.13.0+"
INDEX = "--index-url https://download.pytorch.org/whl/"


@pytest.mark.parametrize(
    "cuda, version, visible, remedy",
    [
        ("13.0", 470, "0", "the NVIDIA driver 470 is too old; update it to 580 or later"),
        ("13.0", 525, "1", f"{PIP}cu126 {INDEX}cu126`"),
        ("13.0", 579, "2,7", "CUDA 13.0 needs a newer driver than 579"),
        (None, 579, "GPU-8932f937-d72c", f"a build for CPUs; {PIP}cu126 "),
        (None, 580, "0", f"{PIP}cu130 {INDEX}cu130`"),
        ("13.0", 580, "0", "has no access to them; a container needs --gpus all"),
        ("12.6", 525, "0", "has no access to them"),
    ],
)
def test_gpus_that_pytorch_cannot_use(driver, monkeypatch, cuda, version, visible, remedy):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    message = hidden_gpus(driver(version))
    assert message.startswith("PyTorch 2.13.0+x can use none of the 3 GPU(s) of this machine: ")
    assert remedy in message and "\n" not in message


def test_no_line_without_a_driver_or_with_a_gpu_that_works(tmp_path, driver, gpus):
    assert hidden_gpus(tmp_path / "none") is None
    gpus(1)
    assert hidden_gpus(driver(580)) is None


@pytest.mark.parametrize("name", ["auto", "cuda"])
@pytest.mark.parametrize("visible", [None, "7"])
def test_gpus_that_pytorch_cannot_use_are_an_error(gpus, monkeypatch, name, visible):
    gpus(0)
    monkeypatch.setattr(devices, "hidden_gpus", lambda: "they cannot be used")
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError, match=r"^they cannot be used; or give --device cpu$"):
        choose_device(name, 0)
    assert choose_device("cpu", 0).type == "cpu"


def test_gpus_that_the_user_hides_are_no_error(gpus, monkeypatch):
    gpus(0)
    monkeypatch.setattr(devices, "hidden_gpus", lambda: "they are hidden")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto", 0).type == "cpu"
    with pytest.raises(UserError, match=r"--device cuda: they are hidden; .* would use the CPU"):
        choose_device("cuda", 0)
