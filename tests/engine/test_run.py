"""The folder of a run: begun, gone on with exactly, locked, stopped when asked."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from engine import run as run_module
from engine.checkpoint import steps
from engine.config import beside, command, flag
from engine.distributed import World
from engine.errors import UserError
from engine.precision import Precision
from engine.run import INTERRUPTED, Run
from engine.signals import SIGNALS, caught_signals

ALONE = World(0, 1, torch.device("cpu"))


@dataclass
class Config:
    run: str = flag("", "", "Run")
    resume: str = flag("", "", "Run")
    steps: int = flag(6, "", "Run")
    lr: float = flag(0.1, "", "Run", above=0, below=1, fixed=True)


def config(**settings) -> Config:
    made = Config(**settings)
    made.given = set(settings)
    return made


def start(**settings) -> Run:
    return open_run(config(**settings))


def open_run(settings: Config, world: World = ALONE) -> Run:
    return Run(run_module.saved_settings(settings), "toy", world)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Killed(Exception):
    """Leaves the `with` block as a mistake does: of a run that has begun everything stays."""


def train(kill_after: int = 0, **settings) -> tuple[Run, torch.nn.Module]:
    """A linear model; the data of a step are a function of the step."""
    with contextlib.suppress(Killed), start(**settings) as run:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=run.config.lr, fused=True)
        precision = Precision(ALONE.device, "fp32", "")
        state = run.restore(model, optimizer, precision) or {"step": 0, "total": 0.0}
        run.record_start(run.config)
        for step in range(state["step"] + 1, run.config.steps + 1):
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            loss = model(inputs).square().mean()
            precision.backward(loss)
            precision.step(optimizer, list(model.parameters()), 0.0, step)
            state |= {"step": step, "total": state["total"] + loss.item()}
            run.scalars(step, {"train/loss": loss.item()})
            run.save(step, model, optimizer, state, precision)
            if step == kill_after:
                raise Killed
        run.close("all steps are done", state["step"])
    return run, model


def metrics(name: str) -> list[dict]:
    lines = [
        json.loads(line)
        for line in (Path("runs") / name / "metrics.jsonl").read_text().splitlines()
    ]
    # Not what the clock says, nor how busy the CPU was, which is told once a second has passed.
    return [
        {tag: value for tag, value in line.items() if tag != "time" and tag[:4] != "cpu/"}
        for line in lines
    ]


def test_a_resumed_run_equals_an_uninterrupted_one():
    _, whole = train(run="whole")
    train(run="parted", kill_after=3)
    run, parted = train(resume="runs/parted")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parted.parameters()))
    assert metrics("whole") == metrics("parted") and len(metrics("whole")) == 6
    log = (run.folder / "train.log").read_text()
    assert " settings: run parted, all others at their defaults\n" in log
    assert "resumed after step 3" in log and "stopped after step 6: all steps are done" in log
    assert "to resume" not in log
    first, second = json.loads((run.folder / "environment.json").read_text())
    assert first["kind"] == second["kind"] == "toy"
    # Not None: rounded to a tenth, they may be 0.
    assert first["seconds"] >= 0 and second["seconds"] >= 0


def test_the_log_of_a_run_with_no_setting_of_its_own_on_a_machine_of_hidden_gpus(monkeypatch):
    monkeypatch.setattr(run_module, "hidden_gpus", lambda: "they are hidden")
    log = (train()[0].folder / "train.log").read_text()
    assert " settings: all others at their defaults\n" in log and " note: they are hidden\n" in log


def test_going_on_keeps_the_settings_and_refuses_others():
    train(run="a", lr=0.02, kill_after=2)
    Path("a").mkdir()  # no run, but of its name
    run, _ = train(resume="a", steps=7)
    assert (
        run_module.load_config(Config, run.folder / "config.json").resume == ""
    )  # a settings file for others
    assert run.config.lr == 0.02 and run.config.steps == 7
    with pytest.raises(
        UserError, match=r"--lr 0.5 would change a fixed setting \(0.02 in this run\)"
    ):
        start(resume="runs/a", lr=0.5)
    made_in_python = Config(resume="runs/a", steps=8)  # it does not know what was given
    assert open_run(made_in_python).config.steps == 8


def test_settings_made_in_python_keep_to_the_bounds():
    with pytest.raises(UserError, match=r"--lr 2\.0 must be above 0 and below 1"):
        open_run(Config(run="b", lr=2.0))
    assert not Path("runs/b").exists()


def test_the_best_checkpoint_of_an_earlier_session_stays():
    """However many are saved after it, and although no later one is better."""
    sessions = [({"run": "a"}, range(1, 4)), ({"resume": "runs/a"}, range(4, 9))]
    for settings, numbers in sessions:
        with start(**settings) as run:
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.AdamW(model.parameters())
            run.restore(model, optimizer)
            run.record_start(run.config)
            for step in numbers:
                run.save(step, model, optimizer, {}, best=step == 2, keep=2)
    assert steps(run.folder / "checkpoints") == [2, 7, 8]
    assert os.readlink(run.folder / "checkpoints/best") == "step-2"


def test_the_record_of_every_session_stays():
    train(run="a", kill_after=1)
    for step in (2, 3):
        train(resume="runs/a", kill_after=step)
    sessions = json.loads(Path("runs/a/environment.json").read_text())
    assert len(sessions) == 3 and all(session["seconds"] is not None for session in sessions)


@pytest.mark.parametrize("error", [None, UserError("a mistake"), RuntimeError()])
def test_a_rank_with_an_error_does_not_wait_for_the_others(error, monkeypatch):
    """They may be in another collective, where they wait for it."""
    stopped = []
    monkeypatch.setattr(World, "stop", lambda world: stopped.append(world.rank))
    with contextlib.suppress(UserError, RuntimeError), start(run="a"):
        if error:
            raise error
    assert stopped == ([] if error else [0])


@pytest.mark.parametrize("rank", [0, 1])
def test_the_outcome_for_run_sh(rank, monkeypatch, tmp_path):
    with start(run="a") as run:
        run.config.device = "cuda:1"
        run.world = World(rank, 2, ALONE.device)
        run.write_outcome("finished")  # nobody asked
        monkeypatch.setenv("RUN_OUTCOME", str(tmp_path / "outcome.json"))
        run.write_outcome("interrupted", "only a sample")
    if rank:
        assert not (tmp_path / "outcome.json").exists()
        return
    (line,) = (tmp_path / "outcome.json").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {
        "folder": "runs/a",
        "outcome": "interrupted",
        "device": "cuda:1",
        "notice": "only a sample",
    }


def test_weights_that_are_not_finite_are_never_saved():
    """The gradient was finite, the optimizer spoilt the weights: the checkpoint before is kept."""

    def spoil(precision, optimizer, parameters, clip, step):
        if step == 3:
            parameters[0].data[0, 0] = float("nan")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=r"step 3: .*weight"):
        patch.setattr(Precision, "step", spoil)
        train(run="spoilt")
    assert steps(Path("runs/spoilt/checkpoints")) == [1, 2]


def test_another_models_checkpoint_is_refused():
    train(run="a", kill_after=2)
    with (
        start(resume="runs/a") as run,
        pytest.raises(UserError, match="does not contain the weights of this model"),
    ):
        run.restore(torch.nn.Linear(5, 1))
    assert Path(
        "runs/a/checkpoints/step-2"
    ).is_dir()  # a mistake on the way back takes nothing away


def test_a_run_killed_before_its_first_checkpoint_begins_again():
    with start(run="a") as run:
        run.record_start(run.config)
    with start(resume="runs/a") as run:
        assert run.restore(torch.nn.Linear(3, 1)) is run.saved_state is None


# ---------------------------------------------------------------- the folder


def test_a_mistake_before_the_beginning_leaves_no_folder():
    for name in ("a", "elsewhere/b", ""):
        with pytest.raises(UserError, match="no data"), start(run=name):
            raise UserError("no data")
    assert not list(Path("runs").iterdir()) and not list(Path("elsewhere").iterdir())


@pytest.mark.parametrize("name", [".", "..", "a/..", "./", "a\nb"])
def test_invalid_run_names(name):
    with pytest.raises(UserError, match="invalid --run"):
        start(run=name)


def test_runs_started_in_the_same_second_get_folders_of_their_own(monkeypatch):
    monkeypatch.setattr(run_module.time, "strftime", lambda _: "now")
    assert len({run_module.new_run_folder("", "toy").__enter__() for _ in range(3)}) == 3


def test_a_name_with_a_slash_is_a_path_for_every_flag():
    for folder in ("q/r", "runs/q/r", "a", "runs/a"):
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").touch()
    for name in ("q/r", "./a", "runs/a"):
        assert run_module.find_run(name) == run_module.folder_of(name) == Path(name)
    assert run_module.find_run("a") == run_module.folder_of("a") == Path("runs/a")
    assert run_module.find_run("q") == Path("q")  # no run, but a folder here


# ---------------------------------------------------------------- the lock


def test_two_processes_do_not_write_to_one_run():
    with start(run="a") as run:
        run.record_start(run.config)
        with pytest.raises(UserError, match="in use by another process"):
            start(resume="runs/a")
    with start(resume="runs/a"):  # the end of the block unlocks it
        pass


def test_a_second_start_of_one_name_leaves_the_folder_of_the_first():
    with start(run="a") as run:
        run.log("prepares its data")
        kept = {path.name: path.read_bytes() for path in Path("runs/a").iterdir()}
        with pytest.raises(UserError, match="in use by another process"):
            start(run="a")
        assert {path.name: path.read_bytes() for path in Path("runs/a").iterdir()} == kept
        run.record_start(run.config)
    assert Path("runs/a/config.json").exists()


def test_what_fails_before_the_run_begins_takes_only_what_it_wrote(capsys):
    """Neither what was there nor what the user puts there meanwhile."""
    there = Path("runs/a")
    there.mkdir(parents=True)
    for name in ("notes.txt", "train.log"):
        (there / name).write_text("mine\n")
    Path("runs/empty").mkdir()
    for name in ("a", "b", "c", "empty"):
        with pytest.raises(UserError), start(run=name) as run:
            run.log("hello")
            (run.folder / "layers.json").touch()
            if name != "c":
                (run.folder / "later").mkdir()
                (run.folder / "later" / "x").touch()
            if name == "empty":
                shutil.rmtree(run.folder / "later")
            raise UserError("no data")
    assert {path.name for path in there.iterdir()} == {"notes.txt", "train.log", "later"}
    assert (there / "train.log").read_text().startswith("mine\n")
    assert (there / "later" / "x").exists()
    assert [path.name for path in Path("runs/b").iterdir()] == ["later"]
    assert not Path("runs/c").exists() and not list(Path("runs/empty").iterdir())


def test_the_command_to_continue_means_this_run():
    with start(run="./my run") as run:
        run.record_start(run.config)
    with pytest.raises(UserError, match=r"run my run exists; .* with --resume './my run'$"):
        start(run="./my run")


def test_the_lock_ends_with_its_process(tmp_path):
    reading, writing = os.pipe()
    locker = os.fork()
    if not locker:
        with run_module.lock_run(tmp_path):
            os.write(writing, b"x")
            signal.pause()
    assert os.read(reading, 1)
    with pytest.raises(UserError, match="in use by another process"), run_module.lock_run(tmp_path):
        pass
    os.kill(locker, signal.SIGKILL)
    os.waitpid(locker, 0)
    with run_module.lock_run(tmp_path):
        pass


# ---------------------------------------------------------------- signals


def handlers() -> list:
    return [signal.getsignal(number) for number in SIGNALS]


# Under nohup SIGHUP is ignored, and a run leaves it so.
@pytest.mark.parametrize("number", [n for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN])
def test_a_signal_asks_the_run_to_stop_and_the_handlers_come_back(number):
    before = handlers()
    with start(run="a") as run:
        assert handlers() == before
        run.record_start(run.config)
        assert not run.stop_asked()
        signal.raise_signal(number)
        assert (
            run.stop_asked() and signal.getsignal(number) == signal.SIG_DFL
        )  # a second one ends the process
        run.close(INTERRUPTED, 7)
    assert handlers() == before
    log = Path("runs/a/train.log").read_text()
    assert "stopped after step 7: interrupted" in log and "--resume runs/a" in log
    with pytest.raises(UserError), start(run="b") as run:
        run.record_start(run.config)
        raise UserError("a mistake")
    assert handlers() == before and Path("runs/b/config.json").exists()  # what has begun stays


def test_a_run_under_nohup_outlives_its_terminal():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with start(run="a") as run:
        run.record_start(run.config)
        signal.raise_signal(signal.SIGHUP)
        assert not run.stop_asked()


@pytest.mark.parametrize(
    "environment, typed",
    [
        ({}, "python script.py"),
        ({"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, "python script.py"),
        (
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "7"},
            "torchrun --nproc_per_node 2 -- script.py",
        ),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "python script.py"),  # srun
    ],
)
def test_the_resume_command_names_the_launcher(monkeypatch, environment, typed):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["some where/script.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    as_typed = typed.replace("script.py", "'some where/script.py'")
    assert command() == as_typed
    assert beside("other.py") == "python 'some where/other.py'"
    monkeypatch.setattr(
        sys.modules["__main__"], "__spec__", SimpleNamespace(name="labs.toy.__main__")
    )
    of_a_lab = typed.replace("-- script.py", "-m -- labs.toy").replace(
        "python script.py", "python -m labs.toy"
    )
    assert command() == of_a_lab
    assert beside("other.py") == "python other.py"


@pytest.mark.parametrize("world_size, lives", [("2", True), ("1", False)])
def test_a_rank_that_ends_by_an_error_outlives_the_request_to_stop(world_size, lives, monkeypatch):
    """torchrun sends SIGTERM as soon as it sees the first rank die.

    The others have then still to say what they saw.
    """
    monkeypatch.setenv("WORLD_SIZE", world_size)
    before = handlers()
    with pytest.raises(RuntimeError), caught_signals():
        raise RuntimeError
    assert (handlers() != before) == lives
    with caught_signals():
        caught = handlers()
    assert handlers() != caught


def test_a_gpus_load_is_among_the_curves_and_nvidia_smi_is_kept(monkeypatch, tmp_path):
    sampler = Mock(**{"read.return_value": {"gpu/utilisation_percent": 97.0}})
    monkeypatch.setattr(run_module, "GpuSampler", lambda *_, **__: sampler)
    monkeypatch.setattr(run_module, "environment", lambda world, precision: {})
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho NVIDIA-SMI 575\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    with open_run(config(run="a"), World(0, 1, torch.device("cuda", 0))) as run:
        run.record_start(run.config)
        for step, seconds in enumerate((0, 5.1, 9), start=1):
            run.training_started = time.perf_counter() - seconds
            run.scalars(step, {"train/loss": 1.0})
        run.close("finished", 3)
    assert metrics("a")[0] == {"step": 1, "train/loss": 1.0, "gpu/utilisation_percent": 97.0}
    assert sampler.start.called and sampler.ended.set.called
    kept = (run.folder / "nvidia-smi.txt").read_text()
    assert kept.count("NVIDIA-SMI 575") == 2
    assert "step 2 (" in kept and "stopped after step 3: finished (" in kept


def test_the_cache_lies_beside_the_run_wherever_one_stands(monkeypatch):
    run, _ = train()
    monkeypatch.chdir(run.folder)
    with start(resume=".") as again:
        assert again.cache == run.cache.absolute() == Path.cwd().parent / ".cache"
