"""Pipeline parallelism: a decoder-only Transformer in stages that run in several processes.

torchrun --nproc_per_node 2 -m labs.pipeline                   # two stages, on GPUs or on the CPU
python -m labs.pipeline                                        # one process, one stage
torchrun --nproc_per_node 4 -m -- labs.pipeline --schedule zbv --stages_per_rank 2
torchrun --nproc_per_node 2 -m -- labs.pipeline --preset handout    # the handout's settings
python -m labs.pipeline.mistakes                               # the handout's four mistakes
tensorboard --logdir runs                                      # loss, bubble, schedule

Without dropout, loss, gradients and weights equal those of one process that sees the whole batch,
under every schedule.
"""

from dataclasses import dataclass

from engine.config import fill_in, flag, parse_flags
from engine.errors import UserError, run_script

HANDOUT = dict(
    sequences=12,
    seq_length=9,  # its DATASET_LENGTH is 10: 9 inputs and the last target
    batch_size=4,
    d_model=12,
    nhead=4,
    dim_feedforward=24,
    num_layers=2,
    post_norm=True,
    dropout=0.1,
    micro_batches=2,
    epochs=200,
    optimizer="sgd",
    lr=0.01,
)


@dataclass
class Config:
    """Every setting. `fixed`: --resume cannot change it."""

    # These sizes make a piece of work so long that messages and Python are little beside it.
    sequences: int = flag(
        32, "number of sequences; sequence n is filled with n", "Data", min=1, fixed=True
    )
    seq_length: int = flag(128, "tokens per sequence", "Data", min=1, fixed=True)

    preset: str = flag(
        "lab", "handout: its values where no flag is given (lab|handout)", "Model", fixed=True
    )
    d_model: int = flag(256, "model width", "Model", min=1, fixed=True)
    nhead: int = flag(4, "attention heads", "Model", min=1, fixed=True)
    dim_feedforward: int = flag(
        1024, "width of the feed-forward layers", "Model", min=1, fixed=True
    )
    num_layers: int = flag(8, "layers, shared among the stages", "Model", min=1, fixed=True)
    post_norm: bool = flag(False, "layer norm after each sub-layer", "Model", fixed=True)
    dropout: float = flag(0.0, "dropout rate", "Model", min=0, below=1, fixed=True)
    causal: bool = flag(True, "causal mask; False: the handout's mistake", "Model", fixed=True)

    schedule: str = flag("gpipe", "order of the work (gpipe|1f1b|interleaved|zb|zbv)", "Pipeline")
    stages_per_rank: int = flag(
        1, "stages per process; interleaved: 2 or more; zbv: 2", "Pipeline", min=1
    )
    micro_batches: int = flag(4, "parts that a batch is cut into", "Pipeline", min=1)
    build: str = flag(
        "traced", "cut the model by torch's pipeline() or by hand (traced|by_hand)", "Pipeline"
    )

    batch_size: int = flag(8, "sequences per optimizer step", "Training", min=1, fixed=True)
    epochs: int = flag(5, "passes over the data", "Training", min=1)
    max_steps: int = flag(0, "stop after this many steps; 0: use --epochs", "Training", min=0)
    optimizer: str = flag("adamw", "optimizer (adamw|sgd)", "Training", fixed=True)
    lr: float = flag(1e-3, "learning rate", "Training", above=0, fixed=True)

    run: str = flag("", "name of the run (folder runs/NAME); default: the time", "Run")
    resume: str = flag("", "run folder to continue", "Run")
    log_every: int = flag(0, "steps between log lines; 0: an epoch, at most 50", "Run", min=0)
    save_every: int = flag(100, "steps between checkpoints", "Run", min=1)
    seed: int = flag(1, "seed of weights, dropout and data order", "Run", min=0, fixed=True)
    device: str = flag("auto", "auto, cpu or cuda", "Run")

    def check(self, ranks: int) -> None:
        """Settings that depend on each other or on the number of processes. Raises `UserError`."""
        if self.d_model % self.nhead or self.d_model % 2:
            raise UserError(
                f"--d_model {self.d_model} must be even and a multiple of --nhead {self.nhead}"
            )
        per_rank = self.stages_per_rank
        possible = {  # a schedule that is not listed works with any number
            "gpipe": per_rank == 1,
            "1f1b": per_rank == 1,
            "interleaved": per_rank > 1,
            "zb": True,
            "zbv": per_rank == 2,  # one on each leg of the V
        }
        if not possible.get(self.schedule, True):
            raise UserError(
                f"--schedule {self.schedule} does not work with --stages_per_rank {per_rank}; "
                "gpipe and 1f1b need 1, zbv 2, interleaved 2 or more"
            )
        stages = ranks * self.stages_per_rank
        if stages > self.num_layers:
            raise UserError(
                f"{ranks} processes with {self.stages_per_rank} stage(s) each need {stages} "
                f"layers, more than --num_layers {self.num_layers}; "
                "start fewer processes or add layers"
            )
        if self.batch_size % self.micro_batches:
            raise UserError(
                f"--micro_batches {self.micro_batches} does not divide "
                f"--batch_size {self.batch_size}; a batch is cut into equal parts"
            )
        if self.schedule == "1f1b" and self.micro_batches < stages:
            raise UserError(
                "--schedule 1f1b needs at least as many micro-batches as stages, "
                f"{stages}, not --micro_batches {self.micro_batches}"
            )
        rounds = max(1, self.micro_batches // ranks)
        if self.schedule in ("interleaved", "zb") and self.micro_batches % rounds:
            raise UserError(
                f"--schedule {self.schedule} works in {rounds} rounds of equally many "
                f"micro-batches, not {self.micro_batches}; "
                f"set --micro_batches to a multiple of {ranks}"
            )


# Before the heavy imports, so that --help and a wrong flag answer at once.
if __name__ == "__main__":
    config = parse_flags(Config, "train a Transformer in pipeline stages")

import math
import time
from pathlib import Path

import torch

from engine import checkpoint, distributed
from engine.layers import save_layers
from engine.run import INTERRUPTED, Run, saved_settings
from labs.pipeline.data import batches, load
from labs.pipeline.report import Memory, report
from labs.pipeline.schedule import bubble_share
from labs.pipeline.stages import PADDING, LanguageModel, Pipeline


def train(config: Config) -> Path:
    """Train from the first step to the last checkpoint; returns the run's folder."""
    if config.preset == "handout":
        fill_in(config, HANDOUT)
    config = saved_settings(config)
    world = distributed.init(config.device)
    config.check(world.size)
    dataset, vocabulary = load(config)
    memory = Memory(world.device)
    with Run(config, "pipeline", world) as run:
        config, log = run.config, run.log

        # -------- model: every rank builds the whole model on the CPU and keeps its own stages
        step = run.saved_state["step"] if run.saved_state else 0  # steps done
        torch.manual_seed(config.seed)
        model = LanguageModel(vocabulary, config.seq_length, config)
        run.restore(model)
        log(str(model))
        if world.is_main:
            save_layers(run.folder, model, dataset[0][None, :-1])
        log(
            f"data: {len(dataset):,} sequences of {config.seq_length} tokens, "
            f"vocabulary {vocabulary}"
        )
        log(
            f"model: {config.num_layers} layers, "
            f"{sum(weight.numel() for weight in model.parameters()):,} parameters, "
            f"stages: {world.size * config.stages_per_rank}"
        )

        # -------- this rank's stages, and an optimizer for their weights
        pipeline = Pipeline(model, config, world)
        del model  # its other stages need no memory here
        memory.resume()
        optimizer = make_optimizer(config, pipeline.parameters.values())
        if run.checkpoint:
            saved = checkpoint.load_tensors(run.checkpoint / "optimizer.pt")
            restore_optimizer(saved, pipeline, optimizer)
        steps_per_epoch = math.ceil(len(dataset) / config.batch_size)
        total_steps = config.max_steps or config.epochs * steps_per_epoch
        log_every = config.log_every or min(steps_per_epoch, 50)
        run.record_start(config)

        # -------- the loop
        recorded, speeds = [], []  # events of all ranks (on rank 0), tokens per second
        first_step = saved_step = step
        loss_sum, target_count = 0.0, 0  # since the last log line
        batch = batches(dataset, step + 1, config.batch_size, config.seed)
        log_time = time.perf_counter()
        while True:
            # Between two steps: is the run over? A signal to any rank stops all of them.
            interrupted = run.stop_asked()
            finished = step >= total_steps
            save_due = finished or interrupted or step % config.save_every == 0
            if save_due and step > saved_step:
                save_time = time.perf_counter()
                memory.pause()
                save(run, pipeline, optimizer, step)
                memory.resume()
                saved_step = step
                log_time += time.perf_counter() - save_time  # not counted in the speed
            if finished or interrupted:
                break

            step += 1
            log_due = step % log_every == 0 or step == total_steps
            # Reading the clock makes a GPU wait, so only steps with a log line are recorded.
            pipeline.recorder.on = log_due

            tokens, target = next(batch)
            world.set_seed(config.seed, step)  # a resumed run draws the same dropout
            optimizer.zero_grad()
            loss = pipeline.forward_backward(tokens, target)
            if not math.isfinite(loss):  # on all ranks alike
                raise UserError(
                    f"the loss is {loss} at step {step}; start a new run with a smaller --lr than "
                    f"{config.lr:g}"
                )
            optimizer.step()
            loss_sum += loss
            target_count += int((target != PADDING).sum())

            if log_due:
                mean = loss_sum / target_count
                speed = target_count / (time.perf_counter() - log_time)
                values = {"train/loss": mean, "speed/tokens_per_second": speed}
                line = f"step {step:>6,}  epoch {step / steps_per_epoch:6.2f}  loss {mean:.4f}"
                line += f"  {speed:,.0f} tokens/s"
                # The first two steps of a session warm up.
                if step - log_every >= first_step + 2:
                    speeds.append(speed)
                if step > first_step + 2:
                    gathered = world.gather(pipeline.recorder.take())
                    if world.is_main:
                        recorded.append([event for events in gathered for event in events])
                        bubble = bubble_share(recorded[-1], world.size)
                        values["pipeline/bubble_share"] = bubble
                        line += f"  bubble {bubble:.1%}"
                log(line)
                run.scalars(step, values)
                loss_sum, target_count = 0.0, 0
                log_time = time.perf_counter()
            pipeline.recorder.take()  # the events of this step are used or dropped

        report(pipeline, run, recorded, speeds, step, memory.peak_mib())
        run.close("finished" if finished else INTERRUPTED, step)
        return run.folder


def make_optimizer(config: Config, parameters) -> torch.optim.Optimizer:
    """The optimizer for this rank's stages."""
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr)
    return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=0.01)


def gather_model(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> tuple[dict, dict] | None:
    """On rank 0 the weights and the optimizer's moments of all stages, by name; elsewhere None."""
    weights, moments = {}, {}
    for name, weight in pipeline.parameters.items():
        weights[name] = weight.detach().cpu()
        moments[name] = {key: value.cpu() for key, value in optimizer.state[weight].items()}
    gathered = pipeline.world.gather((weights, moments))
    if gathered is None:
        return None
    for other_weights, other_moments in gathered[1:]:
        weights |= other_weights
        moments |= other_moments
    return weights, moments


def save(run: Run, pipeline: Pipeline, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save the model of all ranks as one checkpoint (`run.save` would save rank 0's part only)."""
    gathered = gather_model(pipeline, optimizer)
    if gathered:
        state = {"metrics_bytes": run.telemetry.sync()}
        checkpoint.save(run.folder / "checkpoints", step, *gathered, state)


def restore_optimizer(saved: dict, pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer the saved moments of this rank's weights."""
    moments = {n: saved[name] for n, name in enumerate(pipeline.parameters) if saved[name]}
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": settings})


if __name__ == "__main__":
    run_script(lambda: train(config))
