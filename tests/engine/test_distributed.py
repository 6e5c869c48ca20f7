"""Alone nothing is waited for; together every rank gets the same; a wrong device is said before anything is loaded."""

import json
import os
import socket
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, free_port

from engine import distributed
from engine.distributed import World, choose_device, hidden_gpus, start
from engine.errors import UserError

SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "1"}  # fmt: skip
VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


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
        return selected

    return gpus


# ---------------------------------------------------------------- alone


def check_alone(world):
    assert world == World(0, 1, torch.device("cpu")) and world.is_main and not dist.is_initialized()
    values = torch.tensor([1.0, -2.0])
    assert world.sum(values) is values and values.tolist() == [1.0, -2.0]
    assert world.maximum(0.25, -3) == [0.25, -3]
    value = object()
    assert world.from_main(value) is value and world.gather(value) == [value]
    world.stop()


@pytest.mark.parametrize("variables", [{}, VARIABLES])
def test_alone(environment, variables):
    environment(**variables)
    check_alone(start("cpu"))


def test_a_half_set_environment_is_named(environment):
    for present in (set(names) for count in range(1, 5) for names in combinations(VARIABLES, count)):
        environment(**{name: VARIABLES[name] for name in present})
        if not present & {"RANK", "WORLD_SIZE"}:
            check_alone(start("cpu"))
            continue
        with pytest.raises(UserError, match=r"missing in the environment; start with torchrun") as error:
            start("cpu")
        assert str(error.value).split(" missing")[0].split(", ") == [name for name in VARIABLES if name not in present]


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
    assert {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")} == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu07",
    }  # fmt: skip
    assert 10_000 <= int(found["MASTER_PORT"]) < 30_000
    # Another task of the same step reckons the same meeting place; another step, another port.
    other, later = dict(SRUN, SLURM_PROCID="0", SLURM_LOCALID="0"), dict(SRUN, SLURM_STEP_ID="2")
    distributed.adopt_srun(other)
    distributed.adopt_srun(later)
    assert other["MASTER_PORT"] == found["MASTER_PORT"] != later["MASTER_PORT"]
    place = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}  # one that the user set stays
    distributed.adopt_srun(found := SRUN | place)
    assert place.items() <= found.items()


@pytest.mark.parametrize("change", [
    {"SLURM_STEP_NUM_TASKS": "1"},                      # srun with one task
    {"RANK": "0", "WORLD_SIZE": "2"},                   # torchrun, itself started by srun
    {"SLURM_STEP_NUM_TASKS": None, "SLURM_NTASKS": "4"},  # the batch script itself, outside srun
])  # fmt: skip
def test_srun_is_left_alone(change):
    found = {name: value for name, value in {**SRUN, **change}.items() if value is not None}
    before = dict(found)
    distributed.adopt_srun(found)
    assert found == before


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"])
def test_half_of_what_srun_sets(name):
    with pytest.raises(UserError, match=f"srun started 4 tasks, but {name} missing"):
        distributed.adopt_srun({other: value for other, value in SRUN.items() if other != name})


@pytest.mark.parametrize("nodes, first", [
    ("gpu01", "gpu01"), ("a,b", "a"), ("gpu[03-05,9],cpu1", "gpu03"), ("n[7,9]", "n7"),
    ("rack-2-node[010-011]", "rack-2-node010"),
    ("a[1-2]b,c", "a1b"), ("node-1,node-2", "node-1"),
])  # fmt: skip
def test_the_first_host_of_a_list(nodes, first):
    assert distributed.first_host(nodes) == first


# ---------------------------------------------------------------- grids


def test_a_grid_of_one():
    world = World(0, 1, torch.device("cpu"))
    mesh = world.mesh(data=1, pipe=1)
    try:
        assert mesh.mesh_dim_names == ("data", "pipe") and dist.get_world_size(mesh["data"].get_group()) == 1
    finally:
        world.stop()
    assert not dist.is_initialized()


@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 3, "pipe": 2}, {"data": -1, "pipe": -4}, {"data": 0}])
def test_a_grid_that_does_not_fit(sizes):
    with pytest.raises(UserError, match="4 processes do not form a grid of data"):
        World(0, 4, torch.device("cpu")).mesh(**sizes)


def test_seeds_differ_between_ranks_steps_and_runs():
    """In what is drawn from them, and not in the number alone."""
    worlds = [World(rank, 8, torch.device("cpu")) for rank in range(8)]
    drawn = set()
    for world, seed, step in product(worlds, (0, 1, 2**40), (1, 2, 65_537, 10**6)):
        world.set_seed(seed, step)
        drawn.add(torch.rand(4).numpy().tobytes())
    assert len(drawn) == 8 * 3 * 4


# ---------------------------------------------------------------- together

PROGRAM = """
import json, os, sys
from multiprocessing import get_context
from pathlib import Path
import torch
import torch.distributed as dist
from engine import distributed
from engine.errors import UserError

def refuse():
    raise UserError("no")

def work(rank):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    world = distributed.start("cpu")
    tensor = torch.tensor([rank + 1.0, 10.0 * rank, 0.1], dtype=torch.float64)
    returned = world.sum(tensor)
    found = {
        "world": [world.rank, world.size, str(world.device), world.is_main],
        "backend": dist.get_backend(),
        "sum": returned.tolist(),
        "in place": returned is tensor,
        "maximum": world.maximum(rank, -rank, rank == 1, 0.1 * rank),
        "from_main": str(world.from_main({"path": Path("/a") / str(rank), "none": None})),
        "gather": world.gather(["r"] * rank),
        "on_main": [world.on_main(lambda: f"made by {world.rank}"), world.on_main(lambda: 2)],
    }
    world.set_seed(1, 2)
    found["seed"] = torch.initial_seed()
    try:
        world.on_main(refuse)
    except UserError as error:
        found["refused"] = str(error)
    mesh = world.mesh(data=1, pipe=world.size)
    found["columns"] = [dist.get_rank(mesh["data"].get_group()), dist.get_rank(mesh["pipe"].get_group())]
    world.stop()
    found["left"] = not dist.is_initialized()
    Path(f"{rank}.json").write_text(json.dumps(found))

if __name__ == "__main__":
    context = get_context("fork")  # one import of torch for all
    ranks = [context.Process(target=work, args=(rank,)) for rank in range(int(os.environ["WORLD_SIZE"]))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))
"""


def test_every_rank_gets_the_same(tmp_path):
    size = 3
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": str(size)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "program.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    for rank in range(size):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["world"] == [rank, size, "cpu", rank == 0]
        assert "gloo" in found["backend"] and found["left"] and found["in place"]
        assert found["sum"] == pytest.approx([size * (size + 1) / 2, 5.0 * size * (size - 1), 0.1 * size], rel=1e-15)
        assert found["maximum"] == [size - 1, 0, 1, 0.1 * (size - 1)]  # doubles, not floats
        assert found["from_main"] == str({"path": Path("/a/0"), "none": None})
        assert found["on_main"] == ["made by 0", 2] and found["refused"] == "no"
        World(rank, size, torch.device("cpu")).set_seed(1, 2)
        assert found["columns"] == [0, rank] and found["seed"] == torch.initial_seed()
        assert found["gather"] == ([["r"] * other for other in range(size)] if rank == 0 else None)


MEETING = """
import sys
from datetime import timedelta
from engine import distributed
from engine.errors import run_script
distributed.JOIN = timedelta(seconds=float(sys.argv[1]))
run_script(lambda: distributed.start("cpu"))
"""


def meet(rank: int, port: int, seconds: float, tmp_path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (tmp_path / "meeting.py").write_text(MEETING)
    command = [sys.executable, str(tmp_path / "meeting.py"), str(seconds)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_in_use_ends_every_rank_with_one_line(tmp_path, rank):
    """Rank 0 cannot open it; rank 1 finds a program there that does not answer."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = meet(rank, taken.getsockname()[1], 1, tmp_path)
        _, error = process.communicate(timeout=90)
    assert process.returncode == 2 and error.count("error") == 1 and "Traceback" not in error
    assert f"rank {rank} cannot meet the others at 127.0.0.1:" in error
    assert rank == 1 or "the port is in use by another program" in error


def test_a_process_that_never_comes_is_not_waited_for_without_end(tmp_path):
    process = meet(0, free_port(), 1, tmp_path)
    _, error = process.communicate(timeout=90)
    assert process.returncode == 2 and "cannot meet the others" in error and "Traceback" not in error


# ---------------------------------------------------------------- devices


def test_without_gpu(gpus):
    gpus(0)
    assert choose_device("auto", 3) == choose_device("cpu", 0) == torch.device("cpu")


@pytest.mark.parametrize("hidden, said", [(None, "PyTorch sees no GPU on this machine"), ("they are hidden",) * 2])
def test_a_gpu_that_is_not_there(gpus, monkeypatch, hidden, said):
    gpus(0)
    monkeypatch.setattr(distributed, "hidden_gpus", lambda: hidden)
    for name in ("cuda", "cuda:0"):
        with pytest.raises(UserError, match=f"--device {name}: {said}; leave the flag out"):
            choose_device(name, 0)


@pytest.mark.parametrize("name", ["gpu", "cud", "cuda1", "mps", "", "CPU"])
def test_an_unknown_device(name):
    with pytest.raises(UserError, match=f"--device {name}: unknown device; choose auto, cpu, cuda or cuda:N"):
        choose_device(name, 0)


@pytest.mark.parametrize("name, local_rank, index", [
    ("auto", 0, 0), ("auto", 1, 1), ("cuda", 1, 1), ("cuda:1", 0, 1), ("cuda:0", 1, 0),
])  # fmt: skip
def test_each_rank_has_its_gpu(gpus, name, local_rank, index):
    selected = gpus(2)
    device = torch.device("cuda", index)
    assert choose_device(name, local_rank) == device and selected == [device]
    assert choose_device("cpu", local_rank) == torch.device("cpu") and selected == [device]


@pytest.mark.parametrize("name, local_rank, world_size, said", [
    ("cuda:2", 0, "1", "GPU 2 was asked for but 2 can be seen"), ("cuda:x", 0, "1", "GPU x was asked for"),
    ("cuda:-1", 0, "1", "GPU -1 was asked for"),
    *(("auto", rank, "3", r"3 processes but 2 visible GPU\(s\); start at most 2") for rank in range(3)),  # every rank says it
])  # fmt: skip
def test_more_gpus_than_there_are(gpus, monkeypatch, name, local_rank, world_size, said):
    selected = gpus(2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", world_size)
    with pytest.raises(UserError, match=said):
        choose_device(name, local_rank)
    assert not selected


def test_a_task_of_srun_that_sees_its_own_card_alone(gpus, monkeypatch):
    selected = gpus(1)
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_device("auto", 1) == torch.device("cuda", 0) and len(selected) == 1
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")  # two tasks that were given one card together
    with pytest.raises(UserError, match="2 processes but 1 visible GPU"):
        choose_device("auto", 1)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun in a batch script
    with pytest.raises(UserError, match="2 processes but 1 visible GPU"):
        choose_device("auto", 1)


@pytest.fixture
def three_cards(tmp_path):
    for place in ("0000:01:00.0", "0000:41:00.0", "0000:81:00.0"):
        (tmp_path / "gpus" / place).mkdir(parents=True)
    return tmp_path / "gpus"


@pytest.mark.parametrize("visible", ["", "-1", "7"])
def test_hidden_gpus_are_said(three_cards, gpus, monkeypatch, visible):
    gpus(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hidden_gpus(three_cards) == f"CUDA_VISIBLE_DEVICES={visible!r} hides all 3 GPU(s) of this machine"


def test_no_gpu_is_hidden(three_cards, tmp_path, gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gpus(0)
    (tmp_path / "empty").mkdir()
    assert hidden_gpus(tmp_path / "empty") is hidden_gpus(tmp_path / "none") is None  # no card
    gpus(1)
    assert hidden_gpus(three_cards) is None  # one is seen
    gpus(0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    # Not by this variable: an old driver, or a build of torch without CUDA. Said as well, in other words.
    assert "can use none of the 3 GPU(s)" in hidden_gpus(three_cards)
