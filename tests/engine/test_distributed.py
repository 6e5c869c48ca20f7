"""Alone nothing is waited for; together every rank gets the same; a wrong device is said before anything is loaded."""

import os
import re
import socket
import sys
from datetime import timedelta
from itertools import combinations, product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Forked, fork_ranks, free_port

from engine import distributed
from engine.distributed import World, choose_device, hidden_gpus, start
from engine.errors import UserError

SRUN = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "1",
}
VARIABLES = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.fixture
def environment(monkeypatch):
    """Exactly these of torchrun's variables are set."""

    def environment(**values):
        for name in (*VARIABLES, *SRUN, "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    environment()
    return environment


@pytest.fixture
def gpus(monkeypatch):
    """As if torch saw so many GPUs; the list names what is selected."""

    def gpus(count: int) -> list:
        selected = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", selected.append)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        return selected

    return gpus


# ---------------------------------------------------------------- alone


def check_alone(world):
    assert world == World(0, 1, torch.device("cpu")) and world.is_main and not dist.is_initialized()
    values = torch.tensor([1.0, -2.0])
    assert world.sum(values) is values and values.tolist() == [1.0, -2.0]
    assert world.maximum(0.25, -3) == [0.25, -3]
    value = object()
    assert world.on_main(lambda: value) is value and world.gather(value) == [value]
    world.stop()


@pytest.mark.parametrize("variables", [{}, VARIABLES])
def test_alone(environment, variables):
    environment(**variables)
    check_alone(start("cpu"))


def test_a_half_set_environment_is_named(environment):
    for present in (
        set(names) for count in range(1, 5) for names in combinations(VARIABLES, count)
    ):
        environment(**{name: VARIABLES[name] for name in present})
        if not present & {"RANK", "WORLD_SIZE"}:
            check_alone(start("cpu"))
            continue
        with pytest.raises(
            UserError, match=r"missing in the environment; start with torchrun"
        ) as error:
            start("cpu")
        assert str(error.value).split(" missing")[0].split(", ") == [
            name for name in VARIABLES if name not in present
        ]


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_an_environment_that_holds_no_numbers(environment, name):
    for value in ("", "two", "-1"):
        environment(**{**VARIABLES, name: value})
        with pytest.raises(UserError, match=f"must be numbers, not .*{value}.*; use torchrun"):
            start("cpu")
    environment(**{**VARIABLES, "RANK": "2", "WORLD_SIZE": "2"})
    with pytest.raises(UserError, match="RANK 2 must be below WORLD_SIZE 2"):
        start("cpu")


# ---------------------------------------------------------------- SLURM


def test_srun_tells_what_torchrun_would():
    found = dict(SRUN)
    distributed.adopt_srun(found)
    assert {
        name: found[name]
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    } == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
    }
    assert 10_000 <= int(found["MASTER_PORT"]) < 30_000
    # Another task of the same step reckons the same meeting place; another step, another port.
    other, later = dict(SRUN, SLURM_PROCID="0", SLURM_LOCALID="0"), dict(SRUN, SLURM_STEP_ID="2")
    distributed.adopt_srun(other)
    distributed.adopt_srun(later)
    assert other["MASTER_PORT"] == found["MASTER_PORT"] != later["MASTER_PORT"]
    place = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}  # one that the user set stays
    distributed.adopt_srun(found := SRUN | place)
    assert place.items() <= found.items()


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun with one task
        {"RANK": "0", "WORLD_SIZE": "2"},  # torchrun, itself started by srun
        {
            "SLURM_STEP_NUM_TASKS": None,
            "SLURM_NTASKS": "4",
        },  # the batch script itself, outside srun
    ],
)
def test_srun_is_left_alone(change):
    found = {name: value for name, value in {**SRUN, **change}.items() if value is not None}
    before = dict(found)
    distributed.adopt_srun(found)
    assert found == before


@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"]
)
def test_half_of_what_srun_sets(name):
    with pytest.raises(UserError, match=f"srun started 4 tasks, but {name} missing"):
        distributed.adopt_srun({other: value for other, value in SRUN.items() if other != name})


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("gpu01", "gpu01"),
        ("a,b", "a"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("n[7,9]", "n7"),
        ("rack-2-node[010-011]", "rack-2-node010"),
        ("a[1-2]b,c", "a1b"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("rack[01,3]node[007-9]x,cpu1", "rack01node007x"),
        ("a[1,3]-b,c", "a1-b"),
        ("node-1,node-2", "node-1"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    distributed.adopt_srun(found := SRUN | {"SLURM_STEP_NODELIST": nodes})
    assert found["MASTER_ADDR"] == first


# ---------------------------------------------------------------- seeds


def test_seeds_differ_between_ranks_steps_and_runs(monkeypatch):
    """In what is drawn from them, and not in the number alone. torch.manual_seed would take several times as long."""
    monkeypatch.setattr(torch, "manual_seed", Mock(side_effect=AssertionError))
    worlds = [World(rank, 8, torch.device("cpu")) for rank in range(8)]
    drawn = set()
    for world, seed, step in product(worlds, (0, 1, 2**40), (1, 2, 65_537, 10**6)):
        world.set_seed(seed, step)
        drawn.add(torch.rand(4).numpy().tobytes())
    assert len(drawn) == 8 * 3 * 4


def test_a_seed_reaches_the_cpu_and_the_gpu_of_the_rank(monkeypatch):
    """With the numbers that torch.manual_seed would give: a run of an earlier version goes on as it was."""
    gpus = [torch.Generator() for _ in range(2)]
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    World(1, 2, torch.device("cuda", 1)).set_seed(7, 3)
    mixed = int(np.random.SeedSequence((7, 3, 1)).generate_state(1, np.uint64)[0])
    assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(mixed)))
    assert [gpu.initial_seed() == mixed for gpu in gpus] == [False, True]


# ---------------------------------------------------------------- together


def check_a_rank() -> None:
    """In each of three processes."""

    def refuse():
        raise UserError("no")

    world = start("cpu")
    rank, is_main = int(os.environ["RANK"]), os.environ["RANK"] == "0"
    assert (world.rank, world.size, world.device, world.is_main) == (
        rank,
        3,
        torch.device("cpu"),
        is_main,
    )
    assert "gloo" in dist.get_backend()
    tensor = torch.tensor([rank + 1.0, 10.0 * rank, 0.1], dtype=torch.float64)
    assert world.sum(tensor) is tensor and tensor.tolist() == pytest.approx([6, 30, 0.3], rel=1e-15)
    assert world.maximum(rank, -rank, rank == 1, 0.1 * rank) == [
        2,
        0,
        1,
        0.2,
    ]  # doubles, not floats
    assert world.on_main(lambda: {"path": Path("/a") / str(rank), "none": None}) == {
        "path": Path("/a/0"),
        "none": None,
    }
    assert world.gather(["r"] * rank) == ([[], ["r"], ["r", "r"]] if is_main else None)
    assert [world.on_main(lambda: f"made by {world.rank}"), world.on_main(lambda: 2)] == [
        "made by 0",
        2,
    ]
    with pytest.raises(UserError, match="no"):
        world.on_main(refuse)
    world.stop()
    assert not dist.is_initialized()


def test_every_rank_gets_the_same(tmp_path):
    ranks = fork_ranks(
        3, "engine/__init__.py", cwd=tmp_path, first=(check_a_rank,)
    )  # a script that does nothing more
    assert [rank.wait() for rank in ranks] == [0, 0, 0], [rank.output for rank in ranks]


def wait_a_second() -> None:
    distributed.JOIN = timedelta(seconds=1)


def check_it_meets_nobody(rank: int, port: int, folder: Path) -> str:
    """One of two processes ends with one line, which is returned; torch may say more about its sockets."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    script = Forked(
        "train.py",
        cwd=folder,
        first=(wait_a_second,),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        **place,
    )
    assert script.wait() == 2 and "Traceback" not in script.output, script.output
    (line,) = [line for line in script.output.splitlines() if line.startswith("error")]
    assert f"rank {rank} cannot meet the others at 127.0.0.1:{port}: " in line
    return line


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_in_use_ends_every_rank_with_one_line(tmp_path, rank):
    """Rank 0 cannot open it; rank 1 finds a program there that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = check_it_meets_nobody(rank, taken.getsockname()[1], tmp_path)
    assert rank == 1 or "the port is in use by another program" in said


def test_a_process_that_never_comes_is_not_waited_for_without_end(tmp_path):
    check_it_meets_nobody(0, free_port(), tmp_path)


# ---------------------------------------------------------------- devices


def test_without_gpu(gpus):
    gpus(0)
    assert choose_device("auto", 3) == choose_device("cpu", 0) == torch.device("cpu")


@pytest.mark.parametrize(
    "name, local_rank, index",
    [
        ("auto", 0, 0),
        ("auto", 1, 1),
        ("cuda", 1, 1),
        ("cuda:1", 0, 1),
        ("cuda:0", 1, 0),
    ],
)
def test_each_rank_has_its_gpu(gpus, name, local_rank, index):
    selected = gpus(2)
    device = torch.device("cuda", index)
    assert choose_device(name, local_rank) == device and selected == [device]
    assert choose_device("cpu", local_rank) == torch.device("cpu") and selected == [device]


@pytest.mark.parametrize(
    "seen, processes, name, said",
    [
        *(
            (2, 1, name, "unknown device; choose auto, cpu, cuda or cuda:N")
            for name in ("gpu", "cuda1", "mps", "", "CPU")
        ),
        *(
            (0, 1, name, f"--device {name}: PyTorch sees no GPU on this machine; --device auto")
            for name in ("cuda", "cuda:0")
        ),
        *(
            (2, 1, f"cuda:{name}", f"GPU {name} was asked for but 2 can be seen")
            for name in ("2", "x", "-1")
        ),
        (2, 3, "auto", "3 processes but 2 visible GPU(s); start at most 2"),
        (2, 2, "cuda:1", "--device cuda:1 gives all processes the same GPU"),
    ],
)
def test_a_device_that_is_not_there(gpus, monkeypatch, seen, processes, name, said):
    selected = gpus(seen)
    monkeypatch.setattr(distributed, "hidden_gpus", lambda: None)
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(variable, str(processes))
    for rank in range(processes):  # every one says it
        with pytest.raises(UserError, match=re.escape(said)):
            choose_device(name, rank)
    assert not selected


def test_a_gpu_that_others_have_filled(gpus, monkeypatch):
    gpus(2)
    full = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be …")
    monkeypatch.setattr(torch.cuda, "synchronize", Mock(side_effect=full))
    with pytest.raises(
        UserError,
        match=r"^GPU 1 cannot be used \(CUDA error: out of memory\); .*CUDA_VISIBLE_DEVICES",
    ):
        choose_device("cuda:1", 0)


def test_a_task_of_srun_that_sees_its_own_card_alone(gpus, monkeypatch):
    selected = gpus(1)
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_device("auto", 1) == torch.device("cuda", 0) and len(selected) == 1
    # Two tasks that were given one card together; torchrun in a batch script.
    for name, value in (("SLURM_GPUS_ON_NODE", "1"), ("TORCHELASTIC_RUN_ID", "none")):
        with (
            monkeypatch.context() as patch,
            pytest.raises(UserError, match="2 processes but 1 visible GPU"),
        ):
            patch.setenv(name, value)
            choose_device("auto", 1)


@pytest.fixture
def driver(tmp_path, gpus, monkeypatch):
    """The driver of a machine whose GPUs PyTorch does not see; → the folder where it describes itself."""
    gpus(0)
    monkeypatch.setattr(torch, "__version__", "2.13.0+x")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def driver(version: int, cards: int = 3) -> Path:
        for card in range(cards):
            (tmp_path / f"nvidia/gpus/0000:{card:02}:00.0").mkdir(parents=True)
        text = (
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}.65.06  Release\n"
        )
        (tmp_path / "nvidia/version").write_text(text)
        return tmp_path / "nvidia"

    return driver


@pytest.mark.parametrize("visible", ["", "-1", "7"])
def test_hidden_gpus_are_named(driver, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hidden_gpus(driver(580)) == (
        f"CUDA_VISIBLE_DEVICES={visible!r} hides all 3 GPU(s) of this machine"
    )


PIP = f"type `{sys.executable} -m pip install torch==2.13.0+"
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


def test_no_line_about_gpus_without_a_driver_or_with_a_gpu_that_works(tmp_path, driver, gpus):
    assert hidden_gpus(tmp_path / "none") is None
    gpus(1)
    assert hidden_gpus(driver(580)) is None


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_gpus_that_cannot_be_used_are_an_error_unless_the_user_hid_them(gpus, monkeypatch, name):
    gpus(0)
    monkeypatch.setattr(distributed, "hidden_gpus", lambda: "they cannot be used")
    for visible in (None, "7"):
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        else:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        with pytest.raises(UserError, match=r"^they cannot be used; or give --device cpu$"):
            choose_device(name, 0)
        assert choose_device("cpu", 0).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if name == "auto":
        assert choose_device("auto", 0).type == "cpu"
    else:
        with pytest.raises(UserError, match=r"--device cuda: they cannot .* takes the CPU then"):
            choose_device("cuda", 0)
