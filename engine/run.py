"""The folder of a run, and what every training script does with it.

    config = saved_settings(config)                    # it has the flags --run and --resume
    with Run(config, "lenet", world) as run:           # its kind, for the report
        run.log("…")                                   # then data and model: an error leaves no run
        state = run.restore(model, optimizer, precision) or {"step": 0}
        run.record_start(config)                       # from now on the folder is a run
        while not run.stop_asked():
            run.scalars(step, {"train/loss": 0.3})
            run.save(step, model, optimizer, state, precision)
        run.close("finished")

runs/NAME/config.json  environment.json  metrics.jsonl  events.out.tfevents.*  train.log
          checkpoints/step-N/  checkpoints/best  checkpoints/last  nvidia-smi.txt
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch.utils._pytree import tree_map

from engine import checkpoint
from engine.config import changed_names, checked, command, given_names, load_config
from engine.devices import hidden_gpus
from engine.distributed import World, distribute_like, full_tensor
from engine.environment import environment
from engine.errors import UserError
from engine.files import as_argument, as_json, atomic_write
from engine.gpu_evidence import keep_nvidia_smi
from engine.meters import GpuSampler, ProcessMeter
from engine.precision import Precision
from engine.signals import caught_signals
from engine.telemetry import Log, Telemetry

INTERRUPTED = "interrupted"
GPU_SHOWN_AFTER = 5.0  # seconds of training; LeNet-5 on a fast GPU takes less than 20 in all


class Run(contextlib.AbstractContextManager):
    """One run of a training script, new or resumed."""

    def __init__(self, config, kind: str, world: World, name: str = ""):
        """Make runs/<config.run> or runs/<time>-<name>, or open `config.resume`.

        `config` comes from `saved_settings`. `kind` names what is trained, such as "translation";
        it is saved in environment.json, and is the `name` where none is given. Raises `UserError`
        if the folder cannot be used.
        """
        self.world = world
        self.kind = kind
        self.started = time.perf_counter()
        # Closed when the run ends; holds the lock of the folder, among others.
        self.at_end = contextlib.ExitStack()
        self.config = config
        self.folder, self.checkpoint = world.on_main(lambda: self.open_folder(name or kind))
        # What was saved with the last checkpoint; None if there is none.
        self.saved_state = None
        self.best_step = None
        if self.checkpoint:
            self.saved_state = checkpoint.load_state(self.checkpoint)
            self.best_step = self.saved_state["best_step"]
        # A folder that all runs beside this one share.
        self.cache = Path(os.path.abspath(self.folder)).parent / ".cache"
        # Prints a line and appends it to train.log.
        self.log = Log(self.folder)
        processes = f", {world.size} processes" if world.size > 1 else ""
        self.log(f"run: {self.folder}{processes}")
        if hidden := hidden_gpus():
            self.log(f"note: {hidden}")

    def open_folder(self, name: str) -> tuple[Path, Path | None]:
        """The folder, locked, and the checkpoint to resume from, if any."""
        config = self.config
        try:
            if not config.resume:
                return self.at_end.enter_context(new_run_folder(config.run, name)), None
            folder = Path(config.resume)
            self.at_end.enter_context(lock_run(folder))
            return folder, checkpoint.repair(folder / "checkpoints")
        except OSError as error:
            place = config.resume or folder_of(config.run)
            remedy = "choose another --run PATH/NAME"
            if config.resume:
                remedy = "make it writable, or copy the run to another place and resume it there"
            raise UserError(f"cannot write to {place}: {error.strerror}; {remedy}") from None

    def restore(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        precision: Precision | None = None,
    ) -> dict | None:
        """Load the last checkpoint's weights, optimizer state and loss scale.

        Returns the state that `save` was given, or None if nothing is saved yet.
        """
        if self.checkpoint is None or self.saved_state is None:
            if self.config.resume:
                self.log(f"note: {self.folder} has no checkpoint: training starts at step 0 again")
            return None
        load_weights_into(model, checkpoint.load_weights(self.checkpoint), self.checkpoint)
        if optimizer:
            moments = checkpoint.load_tensors(self.checkpoint / "optimizer.pt")
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            for number, values in moments["state"].items():
                for name, value in values.items():
                    if name != "step":
                        values[name] = distribute_like(value, weights[number])
            optimizer.load_state_dict(moments)
        scaler = self.saved_state.get("scaler")  # empty if the run was not in fp16 until now
        if precision and scaler:
            precision.scaler.load_state_dict(scaler)
        self.log(f"resumed after step {self.saved_state['step']:,} from {self.checkpoint}")
        added_by_save = {"scaler", "best_step", "metrics_bytes"}
        return {
            name: value for name, value in self.saved_state.items() if name not in added_by_save
        }

    def record_start(
        self, config, precision: Precision | None = None, gpu_seconds: float = 5.0
    ) -> None:
        """Everything is ready: write the settings, open the curves, catch signals.

        `config` has the values that are used; automatic ones are resolved. Its file makes the
        folder a run. A GPU's load is sampled every `gpu_seconds`.
        """
        self.config = config
        if self.world.is_main:
            self.write_settings()
            self.write_environment(precision)
        resume_step = None
        length = 0
        if config.resume:
            resume_step = self.saved_state["step"] if self.saved_state else 0
        if self.saved_state:
            length = self.saved_state["metrics_bytes"]
        self.telemetry = Telemetry(self.folder, resume_step, length)
        self.at_end.callback(self.telemetry.close)
        self.process = ProcessMeter()
        self.gpu = None
        self.gpu_shown = False  # nvidia-smi's output is kept after some seconds, and at the end
        self.training_started = time.perf_counter()
        if self.world.is_main and self.world.device.type == "cuda":
            self.gpu = GpuSampler(self.world.device, gpu_seconds, self.log)
            self.gpu.start()
            self.at_end.callback(self.gpu.ended.set)
        self._got_signal = self.at_end.enter_context(caught_signals())

    def write_settings(self) -> None:
        """config.json, and a log line of the settings that differ from their defaults."""
        settings = replace(self.config, resume="")
        atomic_write(self.folder / "config.json", as_json(asdict(settings)))
        changed = [f"{name} {getattr(settings, name)}" for name in changed_names(settings)]
        self.log(f"settings: {', '.join([*changed, 'all others'])} at their defaults")

    def write_environment(self, precision: Precision | None) -> None:
        """Write environment.json: a list of the run's sessions, the last without its seconds."""
        path = self.folder / "environment.json"
        sessions = []
        if self.config.resume:
            with contextlib.suppress(OSError, ValueError, TypeError):  # missing or damaged
                sessions = list(json.loads(path.read_text(encoding="utf-8")))
        session = {"kind": self.kind, **environment(self.world, precision)}
        sessions.append(session)
        known = [f"{name} {value}" for name, value in session.items() if value is not None]
        self.log(f"environment: {', '.join(known)}")

        def write() -> None:
            """Write all sessions of the run."""
            with contextlib.suppress(OSError):  # a full disk need not end the training
                atomic_write(path, as_json(sessions))

        def write_seconds() -> None:
            """Note how long this session has lasted, and write."""
            session["seconds"] = round(time.perf_counter() - self.started, 1)
            write()

        write()
        self.at_end.callback(write_seconds)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Points of curves; with them the load of the CPU and the GPU since the last call."""
        values = values | self.process.read()
        if self.gpu:
            values |= self.gpu.read()
            if not self.gpu_shown and time.perf_counter() - self.training_started > GPU_SHOWN_AFTER:
                self.gpu_shown = keep_nvidia_smi(self.folder, f"step {step:,}")
        self.telemetry.scalars(step, values)

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
        """A checkpoint of this step, written by rank 0; all ranks must call.

        `state` is a dict that can be written as JSON.

        Raises `UserError` instead of saving weights that are not finite.
        """
        if precision:
            precision.check_finite()
            state = state | {"scaler": precision.scaler.state_dict()}
        if best:
            self.best_step = step
        # A resumed run cuts its curves here: what was written later is written again.
        state = state | {"metrics_bytes": self.telemetry.sync()}

        def gather(value):
            """A sharded tensor as one tensor on rank 0's CPU; anything else as it is."""
            gathered = full_tensor(value)
            if gathered is value:
                return value
            return gathered.cpu() if self.world.is_main else None

        weights, moments = tree_map(gather, (model.state_dict(), optimizer.state_dict()))
        # Buffers may be infinite, such as a mask of numbers that are added.
        names = dict(model.named_parameters())
        self.world.on_main(lambda: require_finite({name: weights[name] for name in names}, step))
        if self.world.is_main:
            checkpoint.save(
                self.folder / "checkpoints", step, weights, moments, state, keep, self.best_step
            )

    def stop_asked(self) -> bool:
        """Whether any rank received a signal.

        All ranks ask together, so that all stop at the same step.
        """
        return bool(self.world.maximum(self._got_signal())[0])

    def close(self, why: str, step: int | None = None) -> None:
        """The last lines of the log; of an interrupted run the command that resumes it."""
        minutes = (time.perf_counter() - self.started) / 60
        after = "" if step is None else f" after step {step:,}"
        if self.gpu:
            keep_nvidia_smi(self.folder, f"stopped{after}: {why}")
        self.log(f"time: {minutes:,.1f} minutes")
        self.log(f"stopped{after}: {why}")
        if why == INTERRUPTED:
            self.log(f"to resume: {command()} --resume {as_argument(self.folder)}")

    def write_outcome(self, outcome: str, notice: str = "") -> None:
        """One line of JSON in the file that RUN_OUTCOME names, if it is set: for run.sh.

        `outcome` is "finished" or "interrupted"; `notice` is what must stand beside the result.
        """
        path = os.environ.get("RUN_OUTCOME")
        if not path or not self.world.is_main:
            return
        known = {
            "folder": str(self.folder),
            "outcome": outcome,
            "device": self.config.device,
            "notice": notice,
        }
        Path(path).write_text(json.dumps(known, ensure_ascii=False) + "\n", encoding="utf-8")

    def __exit__(self, kind, error, traceback) -> None:
        self.at_end.close()
        if error is None:  # after an error other ranks may be in another collective: do not wait
            self.world.stop()


def folder_of(name: str) -> Path:
    """The folder that --run NAME makes: runs/NAME, or a path as it is."""
    return Path(name) if "/" in name else Path("runs") / name


def find_run(path: str | Path) -> Path:
    """The folder that --ckpt and --resume mean; with a `/` it is a path, as for --run.

    A name is runs/NAME if that is a run, or if there is no ./NAME; else ./NAME.
    """
    if "/" in str(path):
        return Path(path)
    named = Path("runs") / path
    if (named / "config.json").exists():
        return named
    return Path(path) if Path(path).exists() else named


@contextlib.contextmanager
def new_run_folder(run_name: str, default_name: str) -> Iterator[Path]:
    """The folder of a new run, locked. Removed at the end if no run has begun in it.

    The folder that `run_name` gives may exist already, as long as no run has begun there: then it
    stays, and of its content all but what this program wrote.
    """
    if run_name:
        if Path(run_name).name in ("..", "") or "\n" in run_name:
            raise UserError(f"invalid --run {run_name!r}: use letters, digits, - and _")
        run = folder_of(run_name)
        refuse_begun(run)
        existed = run.exists()
        run.mkdir(parents=True, exist_ok=True)
    else:
        existed = False
        run = new_folder_named_by_time(default_name)
    # All that is written before the file of settings. What is not there yet will be ours.
    names = (".lock", "train.log", "layers.json")
    ours = [run / name for name in names if not (run / name).exists()]
    with lock_run(run):
        refuse_begun(run)  # another process may have begun one until now
        yield run
        if not (run / "config.json").exists():
            for file in ours:
                file.unlink(missing_ok=True)
            if not existed:
                with contextlib.suppress(OSError):  # the user may have put files there meanwhile
                    run.rmdir()


def new_folder_named_by_time(name: str) -> Path:
    """runs/<time>-<name>; with + if another run was started in the same second."""
    run = folder_of(time.strftime(f"%Y-%m-%d_%H-%M-%S-{name}"))
    run.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            run.mkdir()
            return run
        except FileExistsError:
            run = run.with_name(run.name + "+")


def refuse_begun(run: Path) -> None:
    """Raises `UserError` if a run has begun in this folder."""
    if (run / "config.json").exists():
        raise UserError(
            f"run {run} exists; choose another --run, or continue it with --resume "
            f"{as_argument(run)}"
        )


@contextlib.contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Keep a second process from writing to the same run. The lock ends with this process."""
    file_lock = FileLock(run / ".lock", timeout=0)
    try:
        file_lock.acquire()
    except Timeout:
        raise UserError(f"run {run} is in use by another process; wait for it to end") from None
    try:
        yield
    finally:
        file_lock.release()


def require_finite(weights: dict[str, torch.Tensor], step: int) -> None:
    """Raises `UserError` if a weight is NaN or infinite: such a model is never saved."""
    for name, weight in weights.items():
        if weight.is_floating_point() and not weight.isfinite().all():
            raise UserError(
                f"step {step:,}: the weights of {name} are not finite, so nothing is saved; "
                "--resume the last checkpoint, or start a new run with a lower --lr"
            )


def saved_settings(config):
    """The settings; on --resume those of the run, changed by the flags that may change.

    Raises `UserError` for a setting out of bounds, a folder that is no run, and a flag that would
    change a `fixed` setting.
    """
    checked(config)
    if not config.resume:
        return config
    run = find_run(config.resume)
    if not (run / "config.json").exists():
        raise UserError(
            f"--resume {run}: no such run (it has no config.json); `ls runs` lists the runs"
        )
    saved = load_config(type(config), run / "config.json")
    given = {
        name
        for name in given_names(config)
        if name != "resume" and getattr(config, name) != getattr(saved, name)
    }
    fixed = {field.name for field in fields(config) if field.metadata["fixed"]}
    for name in sorted(given):
        asked = getattr(config, name)
        if name in fixed:
            raise UserError(
                f"--resume {run}: --{name} {asked!r} would change a fixed setting "
                f"({getattr(saved, name)!r} in this run); leave the flag out, or start a new run"
            )
        setattr(saved, name, asked)
    saved.given = given
    saved.resume = str(run)
    return saved


def with_values(config, **values):
    """A copy of the settings with other values; which ones the user chose stays known."""
    changed = replace(config, **values)
    changed.given = given_names(config)
    return changed


def load_weights_into(model: torch.nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """The weights from `path` into the model; `UserError` if they are another model's."""
    current = model.state_dict()
    shares = {name: distribute_like(weight, current.get(name)) for name, weight in weights.items()}
    try:
        model.load_state_dict(shares)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()[:150]
        raise UserError(f"{path} does not contain the weights of this model: {reason}") from None
