"""A single process waits for nothing; several get the same results; SLURM's variables are read."""

import gc
import os
import random
import socket
import weakref
from datetime import timedelta
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Forked, fork_ranks, free_port

from engine import distributed
from engine.distributed import World, adopt_srun, first_machine, init, process_grid
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
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.fixture
def environment(monkeypatch):
    """`environment(RANK="0")`: exactly these variables of torchrun and SLURM are set."""

    def environment(**values):
        for name in (*TORCHRUN, *SRUN, "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    environment()
    return environment


# ---------------------------------------------------------------- one process


@pytest.mark.parametrize("variables", [{}, TORCHRUN])
def test_a_single_process(environment, variables):
    environment(**variables)
    world = init("cpu")
    assert world == World(0, 1, torch.device("cpu")) and world.is_main and not dist.is_initialized()
    values = torch.tensor([1.0, -2.0])
    assert world.sum(values) is values and values.tolist() == [1.0, -2.0]
    assert world.maximum(0.25, -3) == [0.25, -3]
    value = object()
    assert world.on_main(lambda: value) is value and world.gather(value) == [value]
    world.stop()


def test_an_incomplete_environment_is_named(environment):
    environment(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    with pytest.raises(UserError, match=r"^LOCAL_RANK, MASTER_PORT missing in the environment; "):
        init("cpu")
    environment(LOCAL_RANK="0", MASTER_PORT="1")  # another program's
    assert init("cpu").size == 1


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_an_environment_without_numbers(environment, name):
    for value in ("", "two", "-1"):
        environment(**{**TORCHRUN, name: value})
        with pytest.raises(UserError, match=f"must be numbers, not .*{value}.*; use torchrun"):
            init("cpu")


def test_a_rank_beyond_the_world_size(environment):
    environment(**{**TORCHRUN, "RANK": "2", "WORLD_SIZE": "2"})
    with pytest.raises(UserError, match="RANK 2 must be below WORLD_SIZE 2"):
        init("cpu")


# ---------------------------------------------------------------- SLURM


def test_srun_sets_what_torchrun_would():
    found = dict(SRUN)
    adopt_srun(found)
    assert found["RANK"] == "3"
    assert found["WORLD_SIZE"] == "4"
    assert found["LOCAL_RANK"] == "1"
    assert found["LOCAL_WORLD_SIZE"] == "2"
    assert found["MASTER_ADDR"] == "gpu07"
    assert 10_000 <= int(found["MASTER_PORT"]) < 30_000
    # All tasks of a step compute the same meeting place; another step has another port.
    other_task = dict(SRUN, SLURM_PROCID="0", SLURM_LOCALID="0")
    other_step = dict(SRUN, SLURM_STEP_ID="2")
    adopt_srun(other_task)
    adopt_srun(other_step)
    assert other_task["MASTER_PORT"] == found["MASTER_PORT"] != other_step["MASTER_PORT"]


def test_steps_that_run_at_once_have_ports_of_their_own():
    """A user's jobs have numbers that follow each other, and each a few steps."""
    ports = set()
    for job, step in product(range(1234, 1244), range(7)):
        found = SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        adopt_srun(found)
        ports.add(found["MASTER_PORT"])
    assert len(ports) == 10 * 7


@pytest.mark.parametrize("tasks, most", [("2(x3),1", "2"), ("1,3(x2)", "3"), ("4", "4")])
def test_machines_with_unlike_numbers_of_tasks(tasks, most):
    found = SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks}
    adopt_srun(found)
    assert found["LOCAL_WORLD_SIZE"] == most


def test_the_users_own_meeting_place_stays():
    place = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    found = SRUN | place
    adopt_srun(found)
    assert place.items() <= found.items()


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, id="one task"),
        pytest.param(SRUN | {"RANK": "0", "WORLD_SIZE": "2"}, id="torchrun started by srun"),
        pytest.param({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, id="a batch script outside srun"),
    ],
)
def test_slurm_without_several_tasks_of_srun(found):
    before = dict(found)
    adopt_srun(found)
    assert found == before


def test_an_incomplete_environment_of_srun():
    found = {name: value for name, value in SRUN.items() if name != "SLURM_LOCALID"}
    with pytest.raises(UserError, match="srun started 4 tasks, but SLURM_LOCALID missing"):
        adopt_srun(found)


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("gpu01", "gpu01"),
        ("a,b", "a"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("rack-2-node[010-011]", "rack-2-node010"),
        ("a[1-2]b,c", "a1b"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("rack[01,3]node[007-9]x,cpu1", "rack01node007x"),
        ("node-1,node-2", "node-1"),
    ],
)
def test_the_first_machine_of_a_list(nodes, first):
    assert first_machine(nodes) == first


# ---------------------------------------------------------------- seeds


def test_seeds_differ_between_ranks_steps_and_runs():
    """In the numbers drawn: torch's generator on the CPU uses only a part of the seed."""
    drawn = {"torch": set(), "Python": set(), "NumPy": set()}
    for rank, seed, step in product(range(8), (0, 1, 2**40), (1, 2, 65_537, 10**6)):
        World(rank, 8, torch.device("cpu")).set_seed(seed, step)
        drawn["torch"].add(torch.rand(4).numpy().tobytes())
        drawn["Python"].add(random.random())
        drawn["NumPy"].add(np.random.rand())
    assert {name: len(numbers) for name, numbers in drawn.items()} == dict.fromkeys(
        drawn, 8 * 3 * 4
    )


def test_a_seed_reaches_the_cpu_and_the_gpu_of_the_rank(monkeypatch):
    gpus = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    monkeypatch.setattr(torch, "manual_seed", Mock(side_effect=AssertionError("slow")))
    World(1, 2, torch.device("cuda", 1)).set_seed(7, 3)
    seed = int(np.random.SeedSequence((7, 3, 1)).generate_state(1, np.uint64)[0])
    assert torch.default_generator.initial_seed() == seed
    assert [gpu.initial_seed() == seed for gpu in gpus] == [False, True]


# ---------------------------------------------------------------- several processes


@pytest.fixture
def two_worlds(monkeypatch) -> list[World]:
    """Ranks 0 and 1, which share a store and send nothing. Neither waits long for the other."""
    monkeypatch.setattr(distributed, "WORK", timedelta(milliseconds=50))
    monkeypatch.setattr(dist, "gather_object", lambda *_, **__: None)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_, **__: None)
    store = dist.HashStore()
    return [World(rank, 2, torch.device("cpu"), store) for rank in range(2)]


def test_every_gather_waits_for_all_ranks(two_worlds):
    rank_0, rank_1 = two_worlds
    with pytest.raises(dist.DistStoreError):
        rank_1.gather("here first")
    rank_0.gather("now both are here")
    with pytest.raises(dist.DistStoreError):
        rank_0.gather("while rank 1 is still at work")


def test_every_call_of_on_main_waits_for_rank_0(two_worlds):
    rank_0, rank_1 = two_worlds
    rank_0.on_main(lambda: None)
    rank_1.on_main(lambda: None)
    with pytest.raises(dist.DistStoreError):
        rank_1.on_main(lambda: None)


def test_a_restart_by_torchrun_does_not_see_the_keys_of_the_dead(environment, monkeypatch):
    """torchrun keeps its store. Rank 1 would take an old key for rank 0's new one."""
    kept = dist.HashStore()
    monkeypatch.setattr(distributed, "rendezvous", lambda *_, **__: iter([(kept, 1, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(distributed, "KEPT_GROUPS", [])
    environment(**TORCHRUN, LOCAL_WORLD_SIZE="2")
    stores = []
    for attempt in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        stores.append(distributed.join(1, 2, torch.device("cpu")))
    stores[0].set("on_main/0", "")
    assert stores[0].check(["on_main/0"]) and not stores[1].check(["on_main/0"])


def test_sharding_gathers_one_layer_at_a_time(monkeypatch):
    """Without it the whole model would be gathered at once, which is what sharding is to avoid."""
    sharded = []
    monkeypatch.setattr(
        "torch.distributed.fsdp.fully_shard", lambda part, mesh: sharded.append(part)
    )
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", lambda *_: None)
    layer = torch.nn.TransformerEncoderLayer(8, 2)
    inside = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), inside)
    World(0, 2, torch.device("cpu")).shard(model, print)
    assert sharded == [*inside.layers, model]


def check_collectives() -> None:
    """Runs in each of three processes."""

    def refuse():
        raise UserError("no")

    world = init("cpu")
    rank = int(os.environ["RANK"])
    assert (world.rank, world.size, world.is_main) == (rank, 3, rank == 0)
    assert "gloo" in dist.get_backend()
    tensor = torch.tensor([rank + 1.0, 10.0 * rank, 0.1], dtype=torch.float64)
    assert world.sum(tensor) is tensor
    assert tensor.tolist() == pytest.approx([6, 30, 0.3], rel=1e-15)
    # float64: in float32, 0.2 would come back as 0.2000000030.
    assert world.maximum(rank, -rank, rank == 1, 0.1 * rank) == [2, 0, 1, 0.2]
    assert world.on_main(lambda: {"path": Path("/a") / str(rank)}) == {"path": Path("/a/0")}
    assert world.on_main(lambda: 2) == 2
    gathered = world.gather(["r"] * rank)
    assert gathered == ([[], ["r"], ["r", "r"]] if rank == 0 else None)
    with pytest.raises(UserError, match="no"):
        world.on_main(refuse)
    world.stop()
    assert not dist.is_initialized()


def test_every_rank_gets_the_same(tmp_path):
    empty_script = "engine/__init__.py"
    ranks = fork_ranks(3, empty_script, cwd=tmp_path, first=(check_collectives,))
    assert [rank.wait() for rank in ranks] == [0, 0, 0], [rank.output for rank in ranks]


def wait_a_second_at_most() -> None:
    distributed.JOIN = timedelta(seconds=1)


def error_of_a_rank_alone(rank: int, port: int, folder: Path) -> str:
    """Start one of two ranks; return the line with which it ends. torch may print more lines."""
    script = Forked(
        "train.py",
        cwd=folder,
        first=(wait_a_second_at_most,),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    assert script.wait() == 2 and "Traceback" not in script.output, script.output
    (line,) = [line for line in script.output.splitlines() if line.startswith("error")]
    assert f"rank {rank} cannot connect to the others at 127.0.0.1:{port}: " in line
    return line


def test_another_program_has_the_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as program:
        port = program.getsockname()[1]
        assert "the port is in use by another program" in error_of_a_rank_alone(0, port, tmp_path)
        error_of_a_rank_alone(1, port, tmp_path)  # the program does not answer it


def test_a_process_that_never_comes(tmp_path):
    error_of_a_rank_alone(0, free_port(), tmp_path)


def test_process_groups_are_never_freed():
    """Whoever frees gloo's group last, such as DDP, may wait for ever for its threads."""
    world = World(0, 1, torch.device("cpu"))
    group = weakref.ref(process_grid(world, data=1).get_group())
    world.stop()
    gc.collect()
    assert group() is not None
