"""One process or many, on one machine or several, killed or not: the same run."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import (
    HANGS,
    TINY_FLAGS,
    Forked,
    fork_ranks,
    free_port,
    records,
    torchrun,
)
from test_train import SAME, assert_close_run, signal_at_step

from engine import distributed


def kill_rank_at_step(launcher: subprocess.Popen, rank: int, folder: Path, step: int) -> Path:
    """Wait until the run in `folder` has logged `step`, and kill the child of torchrun with this RANK; → the run."""
    while not any(
        "train/loss" in file.read_text() and max(records(file.parent)) >= step
        for file in folder.glob("runs/*/metrics.jsonl")
    ):
        assert launcher.poll() is None, launcher.communicate(timeout=HANGS)
        time.sleep(0.05)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (child,) = [
        int(pid)
        for pid in children
        if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text()
    ]
    os.kill(child, signal.SIGKILL)
    return next(folder.glob("runs/*/metrics.jsonl")).parent


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_ends_the_job_with_one_clear_line(toy_data, tmp_path, victim):
    flags = ["--data", toy_data, *TINY_FLAGS, "--max_steps", 10**5, "--log_every", 5]
    process = torchrun(2, "train.py", *flags, cwd=tmp_path)
    kill_rank_at_step(process, victim, tmp_path, 10)
    _, errors = process.communicate(timeout=HANGS)
    assert process.returncode != 0
    lines = [line for line in errors.splitlines() if line.startswith("error")]
    assert (
        len(lines) == 1
        and f"error (rank {1 - victim}): another process of this run has ended" in lines[0]
    )
    assert errors.count("Traceback (most recent call last)") == 1  # torchrun's own, after our line


@pytest.mark.slow
def test_two_machines(whole_run, long_data, here, tmp_path):
    """Two torchruns that meet, as on two machines; here both are this one."""
    meeting = f"--nnodes 2 --rdzv_backend c10d --rdzv_endpoint localhost:{free_port()} --rdzv_id 7".split()
    flags = ["--data", long_data, *TINY_FLAGS, *SAME, "--run", here]
    machines = [torchrun(1, "train.py", *flags, cwd=tmp_path, own=meeting) for _ in range(2)]
    outputs = [machine.communicate(timeout=HANGS) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert "".join(output for output, _ in outputs).count(f"run: {here}, 2 processes") == 1
    assert_close_run(whole_run, here)


def test_started_by_srun(whole_run, long_data, here, tmp_path):
    """As SLURM starts them: nothing but its own variables, the same on both tasks but for the number."""
    slurm = dict(
        SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_NODELIST="localhost",
        SLURM_STEP_TASKS_PER_NODE="2",
        SLURM_JOB_ID="7",
        SLURM_STEP_ID="0",
        MASTER_PORT=str(free_port()),
    )
    flags = ["train.py", "--data", long_data, *TINY_FLAGS, *SAME, "--run", here]
    tasks = [
        Forked(*flags, cwd=tmp_path, SLURM_PROCID=rank, SLURM_LOCALID=rank, **slurm)
        for rank in ("0", "1")
    ]
    assert [task.wait() for task in tasks] == [0, 0], [task.output for task in tasks]
    assert "2 processes" in tasks[0].output and not tasks[1].output  # rank 0 alone speaks
    assert_close_run(whole_run, here)


def signal_and_wait_less(number: int, step: int, rank: str) -> None:
    """So that a rank that is left alone says so in minutes."""
    distributed.ANSWER = distributed.ANSWER / 5
    signal_at_step(number, step, rank=rank)


@pytest.mark.parametrize(
    "before, step, after",
    [
        ((1,), 10, (2,)),
        ((2,), 20, (3,)),
        pytest.param((3,), 20, (1,), marks=pytest.mark.slow),
        ((2, "--shard", "--accumulate", "2"), 20, (1,)),
        ((1,), 10, (3, "--shard")),  # three parts of a weight differ in size
    ],
)
def test_a_signal_to_one_rank_stops_all_and_more_or_fewer_go_on(
    whole_run, long_data, here, tmp_path, before, step, after
):
    """Sharded or not, with validations on the way; before or after pairs are left out."""
    (size, *flags), (later, *more) = before, after
    flags += ["--data", long_data, *TINY_FLAGS, *SAME, "--run", here]
    stop = signal_and_wait_less, signal.SIGTERM, step, str(size - 1)
    ranks = fork_ranks(size, "train.py", *flags, cwd=tmp_path, first=stop)
    assert [rank.wait() for rank in ranks] == [0] * size, [rank.output for rank in ranks]
    assert f"stopped after step {step}: interrupted" in ranks[0].output
    ranks = fork_ranks(later, "train.py", "--resume", here, *more, cwd=tmp_path)
    assert [rank.wait() for rank in ranks] == [0] * later, [rank.output for rank in ranks]
    parts = 2 if "--accumulate" in before else 1
    assert (
        f"note: {size} processes × {parts} micro-batches before, {later} × {parts} from now on"
        in ranks[0].output
    )
    assert more or not any(rank.output for rank in ranks[1:])
    assert ("note: --shard has no effect" in ranks[0].output) == ("--shard" in before)
    assert_close_run(whole_run, here)


def test_a_mistake_is_said_by_every_rank_and_nobody_waits(tmp_path):
    ranks = fork_ranks(2, "train.py", "--data", "nowhere", cwd=tmp_path)
    assert [rank.wait() for rank in ranks] == [2, 2]
    lines = [
        line
        for rank in ranks
        for line in rank.output.splitlines()
        if line.startswith("error (rank")
    ]
    assert any("nowhere" in line for line in lines) and not any(
        "Traceback" in rank.output for rank in ranks
    )
    assert all(
        "nowhere" in line or "another process of this run has ended" in line for line in lines
    )
