"""The folder of a run, and what every training script does with it: begin or go on, lock, save, stop when asked.

with Run.start(config, "lenet", world, may_change={"epochs"}) as run:     # config has the fields `run` and `resume`
    run.log("…")                                                          # data, model, optimiser: mistakes end here
    state = run.restore(model, optimizer, precision) or {"step": 0}
    run.begin()                                                           # from here on the folder is a run
    while not run.stop_asked():
        run.scalars(step, {"train/loss": 0.3}); run.save(step, model, optimizer, state, precision)
    run.close("all epochs are done")

runs/<name>/config.json  environment.json  metrics.jsonl  events.out.tfevents.*  train.log  checkpoints/{step-N/, best, last}
"""

import contextlib
import fcntl
import json
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from torch.utils._pytree import tree_map

from engine import checkpoint
from engine.config import as_json, atomic_write, checked, command, load_config
from engine.distributed import World, distribute_like, full_tensor, hidden_gpus
from engine.errors import UserError
from engine.memory import GIB
from engine.precision import Precision
from engine.telemetry import GpuSampler, Log, ProcessMeter, Telemetry, nvml_of

INTERRUPTED = "interrupted"
SIGNALS = [
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
]  # asked to stop, Ctrl-C, the terminal was closed


class Run(contextlib.AbstractContextManager):
    """One run of a training script, fresh or resumed; a context manager that puts everything away at its end.

    config      the settings; of a resumed run those it began with, except for flags that may change
    folder      runs/<name>
    state       what was saved with the last checkpoint; None if there is none
    """

    @classmethod
    def start(cls, config, kind: str, world: World, may_change: set[str] | None = None) -> "Run":
        """Make runs/<time>-<kind> or runs/<config.run>, or resume `config.resume`.

        A resumed run takes its settings from its folder. Flags may change them, except for those marked `fixed`;
        with `may_change` only the settings it names.
        """
        run = cls()
        run.world, run.at_end, run.started = world, contextlib.ExitStack(), time.perf_counter()
        run.config = checked(after_restart(saved_settings(config, may_change), world))
        resume = run.config.resume

        def open_folder() -> tuple[Path, Path | None]:
            """The folder, and the checkpoint that a run goes on from."""
            try:
                if resume:
                    folder = Path(resume)
                    run.at_end.enter_context(lock(folder))
                else:
                    folder = run.at_end.enter_context(new_folder(config.run, kind))
            except OSError as error:
                place = resume or folder_of(config.run)
                raise UserError(
                    f"cannot write to {place}: {error.strerror}; choose another --run PATH/NAME"
                ) from None
            return folder, checkpoint.mend(folder / "checkpoints") if resume else None

        run.folder, run.checkpoint = world.on_main(open_folder)
        run.state = checkpoint.load_state(run.checkpoint) if run.checkpoint else None
        run.best_step = run.state["best_step"] if run.state else None
        run.cache = Path(os.path.abspath(run.folder)).parent / ".cache"  # of all runs beside it
        run.log = Log(run.folder)
        run.log(f"run: {run.folder}" + (f", {world.size} processes" if world.size > 1 else ""))
        if hidden := hidden_gpus():
            run.log(f"note: {hidden}")
        return run

    def restore(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        precision: Precision | None = None,
    ) -> dict | None:
        """The last checkpoint put in place: weights, optimizer, loss scaler; → the state saved with them, None if fresh."""
        if not self.checkpoint:
            return None
        load_weights_into(model, checkpoint.load_weights(self.checkpoint), self.checkpoint)
        if optimizer:
            moments = checkpoint.load_tensors(self.checkpoint / "optimizer.pt")
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            for number, values in moments["state"].items():
                values |= {
                    name: distribute_like(value, weights[number])
                    for name, value in values.items()
                    if name != "step"
                }
            optimizer.load_state_dict(moments)
        if precision and self.state.get("scaler"):  # empty if the run was not in fp16 until now
            precision.scaler.load_state_dict(self.state["scaler"])
        self.log(
            f"resumed after step {self.state['step']:,} from {self.checkpoint}; figures of speed begin anew"
        )
        return self.state

    def begin(self, gpu_seconds: float = 5.0) -> None:
        """Everything is ready: write the settings, which make the folder a run, open the curves, catch signals.

        A GPU is asked every `gpu_seconds` how busy it is.
        """
        if self.world.is_main:
            # A kill in between leaves none: settings that differ from their checksum would be refused for ever.
            (self.folder / "checksums.json").unlink(missing_ok=True)
            settled = replace(self.config, resume="")
            atomic_write(self.folder / "config.json", as_json(asdict(settled)))
            values = (
                (field.name, getattr(settled, field.name), field.default)
                for field in fields(settled)
            )
            told = ", ".join(
                f"{name} {value}" for name, value, default in values if value != default
            )
            self.log(f"settings: {told + '; the rest' if told else 'all'} as by default")
            patterns = (
                "config.json",
                "model.json",
                "tokenizer/**/*",
            )  # the files that say what the run is
            files = [
                path for pattern in patterns for path in self.folder.glob(pattern) if path.is_file()
            ]
            checkpoint.write_checksums(
                self.folder, [str(path.relative_to(self.folder)) for path in files]
            )
            self.note_environment()
        last_step = (
            self.state["step"] if self.state else 0
        )  # 0: stopped before its first checkpoint
        self.telemetry = Telemetry(
            self.folder,
            last_step if self.config.resume else None,
            self.state.get("validated") if self.state else None,
        )
        self.at_end.callback(self.telemetry.close)
        self.process, self.gpu = ProcessMeter(), None
        if self.world.is_main and self.world.device.type == "cuda":
            self.gpu = GpuSampler(self.world.device, gpu_seconds, say=self.log)
            self.gpu.start()
            self.at_end.callback(self.gpu.ended.set)
        self.interrupted = self.at_end.enter_context(caught_signals())

    def note_environment(self) -> None:
        """Write what this run is made on into its folder, now and, with the seconds it took, at its end."""
        path, sessions = self.folder / "environment.json", []
        with contextlib.suppress(
            OSError, ValueError, TypeError
        ):  # of an older version, or damaged: it begins anew
            sessions = [*json.loads(path.read_text(encoding="utf-8"))] if self.config.resume else []
        sessions.append(environment(self.world))
        told = {name: value for name, value in sessions[-1].items() if value is not None}
        self.log("environment: " + ", ".join(f"{name} {value}" for name, value in told.items()))

        def write(seconds: float | None) -> None:
            sessions[-1]["seconds"] = seconds
            with contextlib.suppress(OSError):  # a full disk ends no training
                atomic_write(path, as_json(sessions))

        write(None)
        self.at_end.callback(lambda: write(round(time.perf_counter() - self.started, 1)))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Curves, and with them the figures of the CPU and the GPU since the last call."""
        self.telemetry.scalars(
            step, values | self.process.read() | (self.gpu.read() if self.gpu else {})
        )

    def save(
        self,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict,
        precision: Precision | None = None,
        best: bool = False,
        keep: int = 5,
    ) -> None:
        """A checkpoint of this step, by rank 0; `state` is any JSON. Never of weights after a step that was not finite."""
        if precision:
            precision.check_finite()
            state = state | {"scaler": precision.scaler.state_dict()}
        self.best_step = step if best else self.best_step

        def gather(value):
            """A tensor that lies in pieces on all ranks, put together on rank 0's CPU; anything else as it is."""
            together = full_tensor(value)
            return value if together is value else together.cpu() if self.world.is_main else None

        weights, moments = tree_map(gather, (model.state_dict(), optimizer.state_dict()))
        self.world.on_main(lambda: require_finite(weights, step))
        if self.world.is_main:
            checkpoint.save(
                self.folder / "checkpoints", step, weights, moments, state, keep, self.best_step
            )

    def stop_asked(self) -> bool:
        """Whether a signal came to any rank. All ranks ask together, so that all stop at the same step."""
        return bool(self.world.maximum(self.interrupted())[0])

    def close(self, why: str, step: int | None = None) -> None:
        """The last words, and the way to go on if the run was interrupted."""
        self.log(f"time: {(time.perf_counter() - self.started) / 60:,.1f} minutes")
        self.log(f"stopped{'' if step is None else f' after step {step:,}'}: {why}")
        if why == INTERRUPTED:
            place = str(self.folder)
            if "/" not in place:
                place = f"./{place}"  # --run ./a: without the ./ it would be runs/a
            self.log(f"to go on: {command()} --resume {shlex.quote(place)}")

    def __exit__(self, kind, error, traceback) -> None:
        self.at_end.close()
        if (
            error is None
        ):  # else other ranks may wait at another place, and a goodbye would wait for them
            self.world.stop()


def environment(world: World) -> dict:
    """Machine, versions, commit and command of this process; None for what cannot be found out."""
    facts = {
        "begun": time.strftime("%Y-%m-%d %H:%M:%S"),
        "seconds": None,
    }  # seconds: written at the end
    facts |= {
        "command": f"{command()} {shlex.join(sys.argv[1:])}".strip(),
        "commit": None,
        "driver": None,
    }
    facts |= {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    facts |= {"system": platform.platform(), "cpu": platform.processor(), "cores": os.cpu_count()}
    facts |= {
        "threads": torch.get_num_threads(),
        "processes": world.size,
        "gpu": None,
        "gpu_memory_gib": None,
    }
    with contextlib.suppress(
        OSError, subprocess.SubprocessError
    ):  # "-dirty": files were changed since that commit
        words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        told = subprocess.run(
            words, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=True
        )
        facts["commit"] = told.stdout.strip()
    with contextlib.suppress(OSError, IndexError):  # Linux alone tells the processor's name so
        facts["cpu"] = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].split("\n")[0]
    if world.device.type == "cuda":
        card = torch.cuda.get_device_properties(world.device)
        facts |= {"gpu": card.name, "gpu_memory_gib": round(card.total_memory / GIB, 1)}
        with contextlib.suppress(Exception):  # no package, no permission: a run does not need it
            facts["driver"] = nvml_of(world.device)[0].nvmlSystemGetDriverVersion()
    return facts


def folder_of(name: str) -> Path:
    """What --run NAME makes: runs/NAME, or a path as it is."""
    return Path(name) if "/" in name else Path("runs") / name


def find_run(path: str | Path, runs: Path = Path("runs")) -> Path:
    """Where --ckpt and --resume lead: with a `/` it is a path, as for --run.

    A name is runs/NAME if that is a run, or if nothing here is called NAME; else the path itself.
    """
    if "/" in str(path):
        return Path(path)
    named = runs / path
    return (
        named
        if (named / "config.json").exists() or (named.exists() and not Path(path).exists())
        else Path(path)
    )


@contextlib.contextmanager
def new_folder(name: str, kind: str) -> Iterator[Path]:
    """The folder of a fresh run, locked; removed in the end if no run has begun in it.

    One that is named may be there already. Who does not get its lock leaves it as it is.
    """
    given, name = name, name or time.strftime(f"%Y-%m-%d_%H-%M-%S-{kind}")
    run = folder_of(name)
    if Path(name).name in ("..", "") or "\n" in name:
        raise UserError(f"--run {name!r} is no name for a run; choose letters, digits, - and _")
    refuse_begun(run)
    run.parent.mkdir(parents=True, exist_ok=True)
    while not given:
        with contextlib.suppress(FileExistsError):
            run.mkdir()
            break
        run = run.with_name(run.name + "+")  # another run was started in the same second
    run.mkdir(exist_ok=True)
    found_there = {file.name for file in run.iterdir()}
    with lock(run):
        refuse_begun(run)  # another process may have made a run of it until now
        (run / ".job").write_text(job_name(), encoding="utf-8")
        yield run
        if not (run / "config.json").exists():  # a mistake: leave no folder behind
            with contextlib.suppress(OSError):  # one that was there before may hold other things
                for name in {".job", ".lock", "train.log"} - found_there:
                    (run / name).unlink(missing_ok=True)
                run.rmdir()


def refuse_begun(run: Path) -> None:
    """Raises `UserError` if a run has begun in this folder."""
    if (run / "config.json").exists():
        place = shlex.quote(str(run))
        raise UserError(f"run {run} exists; choose another --run, or go on with --resume {place}")


def job_name() -> str:
    """What the processes have in common that one torchrun starts again and again; '' without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return (
        name if name != "none" else f"{socket.gethostname()}-{os.getppid()}"
    )  # without --standalone and --rdzv_id


def after_restart(config, world: World):
    """The settings; if torchrun --max-restarts has started the script anew, those of the run it began, to go on with."""
    # On several machines torchrun counts for each, so the largest count is asked for.
    if config.resume or not world.maximum(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))[0]:
        return config
    folder = world.on_main(lambda: run_of_this_job(config.run))
    if not folder:  # it did not get so far
        return config
    config.resume, config.given = str(folder), set()  # the flags are those it was begun with
    return saved_settings(config, set())


def run_of_this_job(name: str) -> Path | None:
    """The newest run that this torchrun began: among runs/, or the one of this name."""
    folders = [folder_of(name)] if name else list(Path("runs").glob("*"))
    marks = [
        folder / ".job"
        for folder in folders
        if (folder / "config.json").exists() and (folder / ".job").exists()
    ]
    ours = [mark for mark in marks if mark.read_text(encoding="utf-8") == job_name()]
    return max(ours, key=lambda mark: mark.stat().st_mtime).parent if ours else None


def lock(run: Path):
    """Keep a second process from writing to the same run: an open file. The lock goes with this process, however it ends."""
    file = open(
        run / ".lock", "a"
    )  # not "w": through a link that somebody put there it would empty a file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"run {run} is in use by another process; wait for it, or choose another --run"
        ) from None
    except OSError:
        pass  # a file system without locks
    # A loader's process is a copy of this one, with the file open: it would keep the lock when this one is killed.
    held = weakref.ref(file)
    os.register_at_fork(after_in_child=lambda: held() and held().close())
    return file


def require_finite(weights: dict[str, torch.Tensor], step: int) -> None:
    """Raises `UserError` if a weight is NaN or infinite: such a model is never saved."""
    for name, weight in weights.items():
        if weight.is_floating_point() and not weight.isfinite().all():
            raise UserError(
                f"step {step:,}: the weights of {name} are not finite, so nothing is saved; "
                "--resume the last checkpoint, or start a new run with a lower --lr"
            )


def saved_settings(config, may_change: set[str] | None = None):
    """The settings; on --resume those the run was started with, changed by the flags that may change."""
    if not config.resume:
        return config
    if may_change is None:
        may_change = {field.name for field in fields(config) if not field.metadata["fixed"]}
    run = find_run(config.resume)
    differing = {
        field.name for field in fields(config) if getattr(config, field.name) != field.default
    }
    given = getattr(
        config, "given", differing
    )  # settings made in Python do not know which of them were given
    if not (run / "config.json").exists():
        raise UserError(
            f"--resume {run}: no such run (it has no config.json); `ls runs` lists the runs"
        )
    if (run / "checksums.json").exists() and (damage := checkpoint.verify_files(run)):
        raise UserError(
            f"--resume {run}: {damage}; put the file back as it was, or start a new run"
        )
    saved, may_change = load_config(type(config), run / "config.json"), {*may_change, "resume"}
    given = {name for name in given if getattr(config, name) != getattr(saved, name)}
    if changed := sorted(given - may_change):
        asked, has = (getattr(settings, changed[0]) for settings in (config, saved))
        raise UserError(
            f"--resume {run} with another --{changed[0]} ({asked!r}, the run has {has!r}); leave the flag out, "
            "or start a new run"
        )
    for name in given & may_change:
        setattr(saved, name, getattr(config, name))
    saved.given, saved.resume = given, str(run)  # `given`: what was asked for and is new
    return saved


def load_weights_into(model: torch.nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """The weights from `path` into the model; `UserError` if they are another model's."""
    here = model.state_dict()
    weights = {name: distribute_like(weight, here.get(name)) for name, weight in weights.items()}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()[:150]
        raise UserError(f"{path} does not contain the weights of this model: {reason}") from None


@contextlib.contextmanager
def caught_signals():
    """Inside, the first signal is noted and not obeyed; yields a function that tells whether one came."""
    came = []

    def remember(number, _frame):
        came.append(number)
        signal.signal(number, signal.SIG_DFL)  # the second one ends the process at once

    # `nohup python train.py` ignores SIGHUP, so that the run outlives the terminal: leave it so.
    numbers = [
        number
        for number in SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, remember) for number in numbers}
    try:
        yield lambda: bool(came)
    finally:
        # A rank that ends by an error has still to say so when torchrun, which saw the first one die, asks it to stop.
        if os.environ.get("WORLD_SIZE", "1") == "1" or not sys.exc_info()[0]:
            for number, handler in before.items():
                signal.signal(number, handler)


def leave_signals_to_main(_worker: int) -> None:
    """For a loader's processes: a worker ends when the loader says so, never in the middle of a step."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
