"""One process or many, on one machine or several, killed or not: the same run."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY_FLAGS, run_ranks, run_script, write_pairs
from test_train import SAME, assert_close_run, assert_same_run, records, start_training, wait_for_step

LONGER = "--max_steps 60 --eval_every 10 --log_every 7 --tokens_per_batch 300 --precision fp32".split()


@pytest.fixture(scope="module")
def alone(toy_data, tmp_path_factory):
    """One process, 24 steps without dropout."""
    folder = tmp_path_factory.mktemp("alone")
    done = run_script("train.py", "--data", toy_data, *TINY_FLAGS, *SAME, "--run", "alone", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs/alone"


@pytest.fixture(scope="module")
def together(toy_data, tmp_path_factory):
    """Two processes, 60 steps with dropout."""
    folder = tmp_path_factory.mktemp("together")
    done = run_ranks(2, "train.py", "--data", toy_data, *TINY_FLAGS, *LONGER, "--run", "r", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs/r"


def start_ranks(count: int, *arguments, cwd: Path, torchrun=("--standalone",)) -> subprocess.Popen:
    words = [sys.executable, "-m", "torch.distributed.run", *torchrun, "--nproc_per_node", str(count), "--"]
    words += [str(ROOT / "train.py"), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(words, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def pid_of_rank(launcher: subprocess.Popen, rank: int) -> int:
    """Among torchrun's children the one whose environment has this RANK."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    found = [int(pid) for pid in children if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text()]
    assert len(found) == 1, children
    return found[0]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_job_with_one_clear_line(toy_data, tmp_path, victim):
    words = ["--data", toy_data, *TINY_FLAGS, "--max_steps", 10**5, "--log_every", 5, "--run", "r"]
    process = start_ranks(2, *words, cwd=tmp_path)
    wait_for_step(tmp_path / "runs/r", 10, process)
    killed = time.monotonic()
    os.kill(pid_of_rank(process, victim), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - killed < 30 and process.returncode != 0
    lines = [line for line in errors.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and f"error (rank {1 - victim}): another process of this run has ended" in lines[0]
    assert errors.count("Traceback (most recent call last)") == 1  # torchrun's own, after our line


def test_restarted_by_torchrun_it_goes_on_from_the_last_checkpoint(together, toy_data, tmp_path):
    words = [
        "--data",
        toy_data,
        *TINY_FLAGS,
        *LONGER,
    ]  # no --run: the new processes find the run that the old ones began
    process = start_ranks(2, *words, cwd=tmp_path, torchrun=("--standalone", "--max_restarts", "1"))
    while not (found := list(tmp_path.glob("runs/*/config.json"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    run = found[0].parent
    wait_for_step(run, 28, process)
    os.kill(pid_of_rank(process, 1), signal.SIGKILL)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert re.search(r"resumed after step [2345]0 from", output)
    assert len([folder for folder in tmp_path.glob("runs/*") if not folder.name.startswith(".")]) == 1
    assert_same_run(together, run)


@pytest.mark.parametrize("before, after", [(1, 2), (2, 3), (3, 1)])
def test_resumed_with_more_or_fewer_processes(alone, toy_data, tmp_path, before, after):
    words = ["--data", toy_data, *TINY_FLAGS, *SAME, "--run", "r"]
    process = start_ranks(before, *words, cwd=tmp_path) if before > 1 else start_training(tmp_path, *words)
    wait_for_step(tmp_path / "runs/r", 9, process)
    os.kill(pid_of_rank(process, 0) if before > 1 else process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert max(records(tmp_path / "runs/r")) < 24
    resume = ["train.py", "--resume", "runs/r"]
    done = run_ranks(after, *resume, cwd=tmp_path) if after > 1 else run_script(*resume, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"note: {before} processes before, {after} from here on" in done.stdout
    assert_close_run(alone, tmp_path / "runs/r")


def test_two_machines(alone, toy_data, tmp_path):
    """Two torchruns that meet, as on two machines; here both are this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = ["--nnodes", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}", "--rdzv_id", "7"]
    words = ["--data", toy_data, *TINY_FLAGS, *SAME, "--run", "r"]
    machines = [start_ranks(1, *words, cwd=tmp_path, torchrun=meeting) for _ in range(2)]
    outputs = [machine.communicate(timeout=120) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert "".join(output for output, _ in outputs).count("run: runs/r, 2 processes") == 1
    assert_close_run(alone, tmp_path / "runs/r")


def test_started_by_srun(alone, toy_data, tmp_path):
    """As SLURM starts them: nothing but its own variables, the same on both tasks but for the number."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }
    environment |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
    words = [sys.executable, str(ROOT / "train.py"), "--data", str(toy_data), *TINY_FLAGS, *SAME, "--run", "r"]
    tasks = [
        subprocess.Popen(
            words, cwd=tmp_path, env={**environment, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) for rank in range(2)
    ]  # fmt: skip
    outputs = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert "2 processes" in outputs[0][0] and not outputs[1][0]  # rank 0 alone speaks
    assert_close_run(alone, tmp_path / "runs/r")


@pytest.mark.parametrize("count", [2, 3])
def test_a_mistake_is_said_by_every_rank_and_nobody_waits(tmp_path, count):
    begun = time.monotonic()
    process = start_ranks(count, "--data", "nowhere", cwd=tmp_path)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - begun < 40 and process.returncode != 0
    lines = [line for line in errors.splitlines() if line.startswith("error (rank")]
    assert any("nowhere" in line for line in lines)
    assert all("nowhere" in line or "another process of this run has ended" in line for line in lines)
    assert "exitcode  : 2" in errors and "rank0]: Traceback" not in errors


def test_more_processes_than_pairs(tmp_path):
    pairs = [(f"句子{i}", f"sentence {i}") for i in range(6)]
    data = write_pairs(tmp_path / "few", pairs, {"train": slice(0, 2), "validation": slice(2, 4), "test": slice(4, 6)})
    done = run_ranks(3, "train.py", "--data", data, *TINY_FLAGS, cwd=tmp_path)
    assert done.returncode != 0 and "2 training pairs cannot be dealt to 3 processes" in done.stderr
