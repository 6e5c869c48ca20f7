"""The folder of a run: begun, gone on with exactly, locked, stopped when asked."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from engine import run as run_module
from engine.config import command, flag
from engine.distributed import World
from engine.errors import UserError
from engine.run import INTERRUPTED, Run

ALONE = World(0, 1, torch.device("cpu"))


@dataclass
class Config:
    run: str = flag("", "", "Run")
    resume: str = flag("", "", "Run")
    steps: int = flag(6, "", "Run")
    lr: float = flag(0.1, "", "Run")


def config(**settings) -> Config:
    made = Config(**settings)
    made.given = set(settings)
    return made


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened, telemetry = [], run_module.Telemetry
    monkeypatch.setattr(run_module, "Telemetry", lambda *a, **k: opened.append(telemetry(*a, **k)) or opened[-1])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for writer in opened:  # or its thread goes on writing to a folder that is gone
        writer.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def train(settings: Config, kill_after: int = 0) -> tuple[Run, torch.nn.Module]:
    """A linear model; the data of a step are a function of the step. `kill_after`: leave without a word."""
    run = Run.start(settings, "toy", ALONE, may_change={"steps"})
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.config.lr)
    state = run.restore(model, optimizer) or {"step": 0, "total": 0.0}
    for step in range(state["step"] + 1, run.config.steps + 1):
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state |= {"step": step, "total": state["total"] + loss.item()}
        run.telemetry.scalars(step, {"train/loss": loss.item()})
        run.save(step, model, optimizer, state)
        if step == kill_after:
            run.locked[0].close()  # a killed process leaves no lock
            return run, model
        if run.stop_asked():
            run.close(INTERRUPTED)
            return run, model
    run.close("all steps are done")
    run.locked[0].close()
    return run, model


def test_a_run_that_goes_on_equals_an_uninterrupted_one():
    _, whole = train(config(run="whole"))
    train(config(run="parted"), kill_after=3)
    run, parted = train(config(resume="runs/parted"))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parted.parameters()))
    whole_lines, parted_lines = ((Path("runs") / name / "metrics.jsonl").read_text() for name in ("whole", "parted"))
    losses = [[line.split('"train/loss"')[1] for line in lines.splitlines()] for lines in (whole_lines, parted_lines)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert "resumed after step 3" in (run.folder / "train.log").read_text()


def test_going_on_keeps_the_settings_and_refuses_others():
    train(config(run="a", lr=0.02), kill_after=2)
    run, _ = train(config(resume="runs/a", steps=7))
    assert run.config.lr == 0.02 and run.config.steps == 7
    with pytest.raises(UserError, match="another --lr"):
        Run.start(config(resume="runs/a", lr=0.5), "toy", ALONE, may_change={"steps"})


def test_another_models_checkpoint_is_refused():
    train(config(run="a"), kill_after=2)
    run = Run.start(config(resume="runs/a"), "toy", ALONE)
    with pytest.raises(UserError, match="does not fit"):
        run.restore(torch.nn.Linear(5, 1))


def test_a_run_killed_before_its_first_checkpoint_begins_again():
    Run.start(config(run="a"), "toy", ALONE).locked[0].close()
    run = Run.start(config(resume="runs/a"), "toy", ALONE)
    assert run.restore(torch.nn.Linear(3, 1)) is None


def test_two_processes_do_not_write_to_one_run():
    first = Run.start(config(run="a"), "toy", ALONE)
    assert first.folder.is_dir()
    with pytest.raises(UserError, match="being written"):
        Run.start(config(resume="runs/a"), "toy", ALONE)


def test_a_killed_process_leaves_no_lock_with_its_copies(tmp_path):
    """As the processes of a loader are, who live on for some seconds."""
    reading, writing = os.pipe()
    locker = os.fork()
    if not locker:
        (tmp_path / "run").mkdir()
        held = run_module.lock(tmp_path / "run")
        if not os.fork():
            os.write(writing, b"x")
            time.sleep(30)
            os._exit(0)
        time.sleep(30)
        os._exit(held is None)
    os.read(reading, 1)
    with pytest.raises(UserError, match="being written"):
        run_module.lock(tmp_path / "run")
    os.kill(locker, signal.SIGKILL)
    os.waitpid(locker, 0)
    assert run_module.lock(tmp_path / "run")  # though the copy is still there


RESTART = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
from engine import distributed
from engine.run import after_restart
from test_run import config
world = distributed.start("cpu")
found = after_restart(config(run="r"), world)
print(world.from_main("said"), found.resume, flush=True)
world.stop()
"""


@pytest.mark.parametrize("counts, resumed", [((0, 0), ""), ((1, 1), "runs/r"), ((1, 0), "runs/r"), ((0, 1), "runs/r")])
def test_all_ranks_know_of_a_restart(tmp_path, monkeypatch, counts, resumed):
    """On several machines each torchrun counts for itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    Run.start(config(run="r"), "toy", ALONE).locked[0].close()
    code = RESTART.format(root=str(ROOT), here=str(Path(__file__).parent))
    common = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
              "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
                         env=common | {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(count)})
        for rank, count in enumerate(counts)
    ]  # fmt: skip
    assert [rank.communicate(timeout=90)[0].split() for rank in ranks] == [["said", *resumed.split()]] * 2


@pytest.mark.parametrize(
    "settings, words", [({"run": "a"}, "run runs/a exists"), ({"resume": "runs/none"}, "no such run")]
)
def test_names_that_cannot_be(settings, words):
    Run.start(config(run="a"), "toy", ALONE)
    with pytest.raises(UserError, match=words):
        Run.start(config(**settings), "toy", ALONE)


def test_runs_started_in_the_same_second_get_folders_of_their_own(monkeypatch):
    monkeypatch.setattr(run_module.time, "strftime", lambda _: "now")
    assert len({run_module.new_folder("", "toy") for _ in range(3)}) == 3


SCRIPT = """
import sys, time
sys.path[:0] = [{root!r}, {here!r}]
from engine import distributed
from engine.run import INTERRUPTED, Run
from test_run import config
run = Run.start(config(run="s"), "toy", distributed.start("cpu"))
print("ready", flush=True)
while not run.stop_asked():
    time.sleep(0.05)
run.close(INTERRUPTED)
"""


def test_a_signal_ends_the_step_and_names_the_way_back(tmp_path):
    code = SCRIPT.format(root=str(ROOT), here=str(Path(__file__).parent))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert any("ready" in line for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "to go on:" in output and "--resume runs/s" in output


@pytest.mark.parametrize("environment, typed", [
    ({}, "python script.py"),
    ({"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, "python script.py"),
    ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "7"}, "torchrun --nproc_per_node 2 -- script.py"),
    ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "python script.py"),  # srun
])  # fmt: skip
def test_the_way_back_is_what_was_typed(monkeypatch, environment, typed):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["/somewhere/script.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert command() == typed
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="labs.toy.__main__"))
    assert command() == typed.replace("-- script.py", "-m -- labs.toy").replace(
        "python script.py", "python -m labs.toy"
    )
