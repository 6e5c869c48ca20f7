"""Pipeline parallelism: one decoder-only Transformer cut into stages that run in different processes.

python -m labs.pipeline                                        # one process, one stage; zero flags work
torchrun --nproc_per_node 2 -m labs.pipeline                   # two stages, on two GPUs or, with gloo, on the CPU
torchrun --nproc_per_node 4 -m labs.pipeline -- --schedule zbv --stages_per_rank 2
torchrun --nproc_per_node 2 -m labs.pipeline -- --preset handout       # its sizes, optimizer, epochs
torchrun --nproc_per_node 2 -m labs.pipeline -- --data wikitext-2/ --length 128 --batch_size 16 --epochs 1
tensorboard --logdir runs                                      # loss, bubble, the picture of the schedule

The loss, the gradients and so the weights are those of one process that sees the whole batch, whatever the schedule.
"""

from dataclasses import dataclass

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script

ONE_STAGE = ("gpipe", "1f1b")  # schedules with one stage a rank
HANDOUT = dict(
    d_model=12,
    nhead=4,
    dim_feedforward=24,
    num_layers=2,
    post_norm=True,
    dropout=0.1,
    micro_batches=2,
    epochs=200,
    optimizer="sgd",
    momentum=0.0,
    lr=0.01,
)


@dataclass
class Config:
    """Every setting of a run."""

    data: str = flag(
        "", "text file, or folder of .txt files, read as bytes; the handout's toy sequences", "Data"
    )
    length: int = flag(
        0, "tokens that the model sees; 0: 9 of the toy sequences, 128 of text", "Data", min=0
    )
    sequences: int = flag(12, "toy sequences; number n is full of n", "Data", min=1)

    preset: str = flag(
        "lab", "handout: its sizes and settings, for the flags left out (lab|handout)", "Model"
    )
    d_model: int = flag(64, "model width", "Model", min=1)
    nhead: int = flag(4, "attention heads", "Model", min=1)
    dim_feedforward: int = flag(256, "width of the feed-forward layers", "Model", min=1)
    num_layers: int = flag(8, "layers, shared out over the stages", "Model", min=1)
    post_norm: bool = flag(
        False, "layer norm behind attention and feed-forward net, not before them", "Model"
    )
    dropout: float = flag(
        0.0, "share of activations dropped; each process draws its own", "Model", min=0, below=1
    )
    causal: bool = flag(True, "False: the handout's missing mask, to see what it does", "Model")

    schedule: str = flag("gpipe", "order of the work (gpipe|1f1b|interleaved|zb|zbv)", "Pipeline")
    stages_per_rank: int = flag(1, "interleaved: 2 or more; zbv: 2; zb: any", "Pipeline", min=1)
    micro_batches: int = flag(4, "parts that a batch is cut into", "Pipeline", min=1)
    build: str = flag(
        "traced", "how the model is cut: by pipeline() or by hand (traced|by_hand)", "Pipeline"
    )

    batch_size: int = flag(4, "sequences in one optimizer step", "Training", min=1)
    epochs: int = flag(30, "passes over the data", "Training", min=1)
    max_steps: int = flag(0, "stop after so many steps; 0: by epochs", "Training", min=0)
    optimizer: str = flag("adamw", "(adamw|sgd)", "Training")
    momentum: float = flag(0.9, "of sgd", "Training", min=0, below=1)
    lr: float = flag(3e-3, "learning rate", "Training", above=0)

    run: str = flag("", "name of the run (folder runs/NAME); the date and time", "Run")
    resume: str = flag("", "run folder to go on with, also on another number of processes", "Run")
    log_every: int = flag(
        0, "steps between lines of the log; 0: an epoch, at most 50", "Run", min=0
    )
    save_every: int = flag(100, "steps between checkpoints", "Run", min=1)
    seed: int = flag(1, "of the weights and the order of sequences", "Run", min=0)
    device: str = flag("auto", "auto, cpu or cuda", "Run")

    def fill_in(self) -> "Config":
        """The preset's values where no flag was given."""
        for name in HANDOUT.keys() - self.given if self.preset == "handout" else ():
            setattr(self, name, HANDOUT[name])
        return self

    def check(self, ranks: int) -> None:
        """What makes sense only in the light of another setting, or of the number of processes."""
        stages, rounds = ranks * self.stages_per_rank, max(1, self.micro_batches // ranks)
        if self.d_model % self.nhead or self.d_model % 2:
            raise UserError(
                f"--d_model {self.d_model} must be even and a multiple of --nhead {self.nhead}"
            )
        if self.batch_size % self.micro_batches:
            raise UserError(
                f"--micro_batches {self.micro_batches} does not divide --batch_size {self.batch_size}; a batch is cut "
                "into equal parts (a short last batch is filled up without changing the loss)"
            )
        if self.schedule in ONE_STAGE and self.stages_per_rank != 1:
            raise UserError(
                f"--schedule {self.schedule} has one stage a rank; leave --stages_per_rank out"
            )
        if self.schedule == "interleaved" and self.stages_per_rank == 1:
            raise UserError(
                "--schedule interleaved needs several stages a rank; give --stages_per_rank 2"
            )
        if self.schedule == "zbv" and self.stages_per_rank != 2:
            raise UserError(
                "--schedule zbv has two stages a rank, one on each leg of the V; give --stages_per_rank 2"
            )
        if stages > self.num_layers:
            raise UserError(
                f"{ranks} processes with {self.stages_per_rank} stages each make {stages} stages, more than "
                f"--num_layers {self.num_layers}; give fewer processes or more layers"
            )
        if self.schedule == "1f1b" and self.micro_batches < stages:
            raise UserError(
                f"--schedule 1f1b needs as many micro-batches as stages, {stages}, not --micro_batches "
                f"{self.micro_batches}"
            )
        if self.schedule in ("interleaved", "zb") and self.micro_batches % rounds:
            fit = [
                n
                for n in range(1, self.batch_size + 1)
                if not (self.batch_size % n or n % max(1, n // ranks))
            ]
            nearest = min(fit, key=lambda n: abs(n - self.micro_batches))
            raise UserError(
                f"--schedule {self.schedule} takes micro-batches in rounds of about one a process: {self.micro_batches} do "
                f"not divide into {rounds} equal rounds; give --micro_batches {nearest}"
            )


if __name__ == "__main__":
    config = parse_flags(Config, "A Transformer trained in pipeline stages.").fill_in()

import math
import os
import time
import zlib
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine import checkpoint, distributed
from engine.run import INTERRUPTED, Run, saved_settings
from labs.pipeline.data import batch_of_step, load
from labs.pipeline.report import Measured, report
from labs.pipeline.stages import NOTHING, LanguageModel, Pipeline

MAY_CHANGE = {
    "data",
    "schedule",
    "stages_per_rank",
    "micro_batches",
    "build",
    "epochs",
    "max_steps",
    "log_every",
    "save_every",
    "device",
}


def train(config: Config) -> None:
    """The whole run."""
    config = saved_settings(config, MAY_CHANGE)
    # Everything is checked before the processes meet: who leaves while others are still joining leaves them with errors.
    distributed.adopt_srun()
    ranks = os.environ.get("WORLD_SIZE", "")
    if ranks == "1":
        raise UserError(
            "a pipeline under torchrun needs two processes: torchrun --nproc_per_node 2 -m labs.pipeline; "
            "one stage alone is `python -m labs.pipeline`"
        )
    config.check(int(ranks) if ranks.isdecimal() else 1)
    sequences, vocab = load(config)
    world = distributed.start(config.device)
    with Run.start(config, "pipeline", world, MAY_CHANGE) as run:
        torch.manual_seed(
            config.seed
        )  # every rank makes the same whole model on the CPU, and keeps its stages
        model = LanguageModel(vocab, sequences.shape[1] - 1, config)
        data = [*sequences.shape, zlib.crc32(sequences.contiguous().numpy())]
        if run.state and run.state["data"] != data:
            raise UserError(
                f"--resume {run.folder}: --data {config.data} is not what the run began with; put it back"
            )
        state = run.restore(model) or {"step": 0, "loss": 0.0, "targets": 0, "data": data}
        run.log(str(model))
        parameters = sum(weight.numel() for weight in model.parameters())
        # MATH: attention by plain matrix products, which the counter knows.
        with (
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            model(sequences[:1, :-1])
        flops = (
            3 * counter.get_total_flops() // (sequences.shape[1] - 1)
        )  # backward costs twice what forward does
        pipeline = Pipeline(model, config, world)
        del model
        optimizer = make_optimizer(config, pipeline.parameters.values())
        if run.checkpoint:
            restore_optimizer(
                checkpoint.load_tensors(run.checkpoint / "optimizer.pt"), pipeline, optimizer
            )
        run.log(
            f"data: {len(sequences):,} sequences of {sequences.shape[1] - 1} tokens, vocabulary {vocab:,}"
        )
        stages = world.size * config.stages_per_rank
        run.log(
            f"model: {config.num_layers} layers, {parameters:,} parameters, {flops:,} FLOPs a training token, "
            f"stages: {stages}"
        )
        run.begin()
        loop(run, sequences, pipeline, optimizer, state)


def loop(
    run: Run, sequences: Tensor, pipeline: Pipeline, optimizer: torch.optim.Optimizer, state: dict
) -> None:
    """Step after step until all are done or a signal came."""
    config, measured = run.config, Measured(run.world, pipeline)
    steps_per_epoch = math.ceil(len(sequences) / config.batch_size)
    last = config.max_steps or config.epochs * steps_per_epoch
    log_every = config.log_every or min(steps_per_epoch, 50)
    begun, why = state["step"], "all steps are done"
    since, before = (
        time.perf_counter(),
        state["targets"],
    )  # targets before `since`: those of an interrupted run
    while state["step"] < last:
        tokens, target = batch_of_step(sequences, state["step"], config.batch_size, config.seed)
        memory_step = state["step"] == min(
            begun + 1, last - 1
        )  # the second: by then the optimizer's state is there
        line_due = (state["step"] + 1) % log_every == 0 or state["step"] + 1 == last
        pipeline.recorder.on = (
            line_due  # looking at the clock makes a GPU wait: only in steps that a line tells of
        )
        run.world.set_seed(
            config.seed, state["step"]
        )  # dropout: a resumed run draws what it would have drawn
        optimizer.zero_grad()
        with measured.counting() if memory_step else nullcontext():
            loss = pipeline.forward_backward(tokens, target)
        if not math.isfinite(loss):  # on all ranks alike
            raise UserError(
                f"the loss is {loss} at step {state['step'] + 1}; go on from the last checkpoint, or give "
                f"a smaller --lr than {config.lr:g}"
            )
        state["loss"] += loss
        state["targets"] += int((target != NOTHING).sum())
        optimizer.step()
        state["step"] = step = state["step"] + 1
        if memory_step:
            measured.add_memory()
        if line_due:
            mean = state["loss"] / state["targets"]
            speed = (state["targets"] - before) / (time.perf_counter() - since)
            bubble = measured.add_step(speed) if step > begun + 2 else None
            run.log(
                f"step {step:>6,}  epoch {step / steps_per_epoch:6.2f}  loss {mean:.4f}  {speed:,.0f} tokens/s"
                + (f"  bubble {bubble:.1%}" if bubble is not None else "")
            )
            values = {"train/loss": mean, "speed/tokens_per_second": speed}
            run.scalars(
                step, values if bubble is None else values | {"pipeline/bubble_share": bubble}
            )
            state |= {"loss": 0.0, "targets": 0}
            since, before = time.perf_counter(), 0
        pipeline.recorder.take()
        stopped = run.stop_asked()
        if stopped or step % config.save_every == 0 or step == last:
            save(run, step, pipeline, optimizer, state)
        if stopped and step < last:
            why = INTERRUPTED
            break
    report(measured, run, state["step"])
    run.close(why)


def make_optimizer(config: Config, parameters) -> torch.optim.Optimizer:
    """Each rank has one, for its own stages."""
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=0.01)


def whole(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> tuple[dict, dict] | None:
    """On rank 0: the weights of all stages and the optimizer's state of each, by the whole model's names."""
    weights = {name: weight.detach().cpu() for name, weight in pipeline.parameters.items()}
    states = {
        name: {
            key: value.cpu() for key, value in optimizer.state[weight].items() if value is not None
        }
        for name, weight in pipeline.parameters.items()
    }
    gathered = pipeline.world.gather(
        (weights, states)
    )  # a pair of dicts for each rank → one pair for all
    return (
        tuple({k: v for part in parts for k, v in part.items()} for parts in zip(*gathered))
        if gathered
        else None
    )


def save(
    run: Run, step: int, pipeline: Pipeline, optimizer: torch.optim.Optimizer, state: dict
) -> None:
    """A checkpoint of the whole model. Not by `run.save`: that one takes rank 0's model for the whole."""
    parts = whole(pipeline, optimizer)
    if parts:
        checkpoint.save(run.folder / "checkpoints", step, *parts, state)


def restore_optimizer(saved: dict, pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """This rank's part of what `whole` gathered, however many ranks there were."""
    states = {number: saved[name] for number, name in enumerate(pipeline.parameters) if saved[name]}
    optimizer.load_state_dict(
        {"state": states, "param_groups": optimizer.state_dict()["param_groups"]}
    )


if __name__ == "__main__":
    run_script(lambda: train(config))
