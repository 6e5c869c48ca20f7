"""Several processes, on one machine or more, interrupted or not, train the same run as one."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import HANGS, TINY_FLAGS, Forked, fork_ranks, free_port, records, torchrun
from test_train import SAME, assert_close_run, signal_at_step

from engine import distributed


def kill_rank_at_step(launcher: subprocess.Popen, rank: int, folder: Path, step: int) -> None:
    """Wait until the run in `folder` has logged `step`, then kill torchrun's child of this rank."""
    while True:
        files = list(folder.glob("runs/*/metrics.jsonl"))
        has_started = files and "train/loss" in files[0].read_text()
        if has_started and max(records(files[0].parent)) >= step:
            break
        assert launcher.poll() is None, launcher.communicate(timeout=HANGS)
        time.sleep(0.05)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    for child in children:
        if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text():
            os.kill(int(child), signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_killed_rank_ends_the_others_with_one_line(toy_data, tmp_path):
    flags = ["--data", toy_data, *TINY_FLAGS, "--max_steps", 10**5, "--log_every", 5]
    launcher = torchrun(2, "train.py", *flags, cwd=tmp_path)
    kill_rank_at_step(launcher, 1, tmp_path, 10)
    _, stderr = launcher.communicate(timeout=HANGS)
    assert launcher.returncode != 0
    (line,) = [line for line in stderr.splitlines() if line.startswith("error")]
    assert line.startswith("error (rank 0): another process of this run has ended")
    assert stderr.count("Traceback (most recent call last)") == 1  # torchrun's own, after our line


def test_started_by_srun(whole_run, long_data, here, tmp_path):
    """SLURM sets only its own variables, the same for both tasks except for their numbers."""
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
    assert "2 processes" in tasks[0].output and not tasks[1].output  # only rank 0 prints
    assert_close_run(whole_run, here)


def signal_one_rank(step: int, rank: int) -> None:
    # A rank that the others have left alone says so after minutes instead of a quarter of an hour.
    distributed.ANSWER = distributed.ANSWER / 5
    signal_at_step(signal.SIGTERM, step, rank=str(rank))


def test_a_signal_to_one_rank_stops_all_and_another_number_resumes(
    whole_run, long_data, here, tmp_path
):
    """One process, then three with shards and micro-batches, then one again.

    Some weights cannot be divided equally among three. Steps are multiples of --log_every: the
    first mean loss after a resume has only its own steps.
    """
    run = ["--data", long_data, *TINY_FLAGS, *SAME, "--run", here]
    sharded = ["--shard", "--accumulate", "2"]
    sessions = [(1, [], 9), (3, sharded, 21), (1, [], 0)]  # processes, flags, last step
    done = 0
    for size, flags, stop in sessions:
        signal_last_rank = (signal_one_rank, stop - done, size - 1) if stop else ()
        ranks = fork_ranks(size, "train.py", *run, *flags, cwd=tmp_path, first=signal_last_rank)
        assert [rank.wait() for rank in ranks] == [0] * size, [rank.output for rank in ranks]
        if stop:
            assert f"stopped after step {stop}: interrupted" in ranks[0].output
        run = ["--resume", here]
        done = stop
    assert "note: --shard has no effect" in ranks[0].output
    assert_close_run(whole_run, here)


def test_every_rank_reports_a_mistake_and_none_waits(tmp_path):
    ranks = fork_ranks(2, "train.py", "--data", "nowhere", cwd=tmp_path)
    assert [rank.wait() for rank in ranks] == [2, 2]
    output = "".join(rank.output for rank in ranks)
    assert "Traceback" not in output and "nowhere" in output
    for line in output.splitlines():
        if line.startswith("error (rank"):
            assert "nowhere" in line or "another process of this run has ended" in line
