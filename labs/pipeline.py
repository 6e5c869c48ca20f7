"""Pipeline parallelism: one decoder-only Transformer cut into stages that run in different processes.

python -m labs.pipeline                                        # one process, one stage; zero flags work
torchrun --nproc_per_node 2 -m labs.pipeline                   # two stages, on two GPUs or, with gloo, on the CPU
torchrun --nproc_per_node 4 -m labs.pipeline -- --schedule zbv --stages_per_rank 2
torchrun --nproc_per_node 2 -m labs.pipeline -- --data wikitext-2/ --length 128 --batch_size 16 --epochs 1
tensorboard --logdir runs                                      # loss, bubble, the picture of the schedule

The loss, the gradients and so the weights are those of one process that sees the whole batch, whatever the schedule.
"""

from dataclasses import dataclass

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script

ONE_STAGE, MANY_STAGES = ("gpipe", "1f1b"), ("interleaved", "zb", "zbv")  # schedules by the stages a rank may have


@dataclass
class Config:
    """Every setting of a run."""

    data: str = flag("", "text file, or folder of .txt files; the handout's toy sequences", "Data")
    tokens: str = flag("bytes", "what a text is cut into (bytes|words)", "Data")
    vocab: int = flag(10000, "most frequent words that are told apart", "Data")
    length: int = flag(0, "tokens that the model sees; 0: 9 of the toy sequences, 128 of text", "Data")
    sequences: int = flag(12, "toy sequences; number n is full of n", "Data")

    d_model: int = flag(64, "model width", "Model")
    nhead: int = flag(4, "attention heads", "Model")
    dim_feedforward: int = flag(256, "", "Model")
    num_layers: int = flag(8, "layers, shared out over the stages", "Model")
    causal: bool = flag(True, "False: the handout's missing mask, to see what it does", "Model")

    schedule: str = flag("gpipe", "order of the work (gpipe|1f1b|interleaved|zb|zbv)", "Pipeline")
    stages_per_rank: int = flag(1, "interleaved: 2 or more; zbv: 2; zb: any", "Pipeline")
    micro_batches: int = flag(4, "parts that a batch is cut into", "Pipeline")
    build: str = flag("traced", "how the model is cut: by pipeline() or by hand (traced|by_hand)", "Pipeline")

    batch_size: int = flag(4, "sequences in one optimizer step", "Training")
    epochs: int = flag(30, "passes over the data", "Training")
    max_steps: int = flag(0, "stop after so many steps; 0: by epochs", "Training")
    optimizer: str = flag("adamw", "adamw|sgd", "Training")
    lr: float = flag(3e-3, "learning rate", "Training")

    run: str = flag("", "name of the run (folder runs/NAME); the date and time", "Run")
    resume: str = flag("", "run folder to go on with, also on another number of processes", "Run")
    log_every: int = flag(0, "steps between lines of the log; 0: an epoch, at most 50", "Run")
    save_every: int = flag(100, "steps between checkpoints", "Run")
    seed: int = flag(1, "", "Run")
    device: str = flag("auto", "auto|cpu|cuda", "Run")

    def __post_init__(self):
        for name in ("vocab", "sequences", "d_model", "nhead", "dim_feedforward", "num_layers", "stages_per_rank",
                     "micro_batches", "batch_size", "epochs", "save_every"):  # fmt: skip
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)} must be at least 1")
        for name in ("length", "max_steps", "log_every"):
            if getattr(self, name) < 0:
                raise UserError(f"--{name} {getattr(self, name)} must not be negative")
        for name, choices in {"schedule": ONE_STAGE + MANY_STAGES, "build": ("traced", "by_hand"),
                              "tokens": ("bytes", "words"), "optimizer": ("adamw", "sgd")}.items():  # fmt: skip
            if getattr(self, name) not in choices:
                raise UserError(f"--{name} {getattr(self, name)}: choose {', '.join(choices[:-1])} or {choices[-1]}")
        if self.d_model % self.nhead or self.d_model % 2:
            raise UserError(f"--d_model {self.d_model} must be even and a multiple of --nhead {self.nhead}")
        if not self.resume:  # else these flags join the saved ones first
            self.check_together()

    def check_together(self) -> None:
        """What makes sense only in the light of another setting."""
        if self.batch_size % self.micro_batches:
            raise UserError(
                f"--micro_batches {self.micro_batches} does not divide --batch_size {self.batch_size}; a batch is cut "
                "into equal parts (a short last batch is filled up without changing the loss)"
            )
        if self.schedule in ONE_STAGE and self.stages_per_rank != 1:
            raise UserError(f"--schedule {self.schedule} has one stage a rank; leave --stages_per_rank out")
        if self.schedule in ("interleaved", "zbv") and self.stages_per_rank == 1:
            raise UserError(f"--schedule {self.schedule} needs several stages a rank; give --stages_per_rank 2")
        if self.schedule == "zbv" and self.stages_per_rank != 2:
            raise UserError(
                f"--schedule zbv has two stages a rank, one on each leg of the V, not {self.stages_per_rank}"
            )

    def check_ranks(self, ranks: int) -> None:
        """What can only be checked when the number of processes is known."""
        stages = ranks * self.stages_per_rank
        if stages > self.num_layers:
            raise UserError(
                f"{ranks} processes with {self.stages_per_rank} stages each make {stages} stages, more than "
                f"--num_layers {self.num_layers}; give fewer processes or more layers"
            )
        if self.schedule == "1f1b" and self.micro_batches < stages:
            raise UserError(
                f"--schedule 1f1b needs as many micro-batches as stages, {stages}, not --micro_batches {self.micro_batches}"
            )
        rounds = max(1, self.micro_batches // ranks)
        if self.schedule in ("interleaved", "zb") and self.micro_batches % rounds:
            raise UserError(
                f"--schedule {self.schedule} takes micro-batches in rounds of about one a process: {self.micro_batches} do "
                f"not divide into {rounds} equal rounds; give --micro_batches {rounds * ranks} or {rounds * ranks + rounds}"
            )


if __name__ == "__main__":
    config = parse_flags(Config, "A Transformer trained in pipeline stages.")

import math
import os
import time
import zlib
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import checkpoint, distributed
from engine.run import INTERRUPTED, Run, load_weights, saved_settings
from labs.pipeline_schedule import (
    HeldBytes,
    bubble_in_theory,
    bubble_share,
    draw,
    mean_seconds,
    order_of,
    own_bubble_share,
    simulate,
)
from labs.pipeline_stages import NOTHING, LanguageModel, Pipeline, stages_of_rank

MIB = 2**20
MAY_CHANGE = {"schedule", "stages_per_rank", "micro_batches", "build", "epochs", "max_steps", "log_every", "save_every",
              "device"}  # fmt: skip


def load(config: Config) -> tuple[Tensor, int]:
    """The sequences, (N, S+1) with NOTHING behind the end of a text, and the size of the vocabulary."""
    if not config.data:
        length = config.length or 9
        return torch.arange(config.sequences).unsqueeze(1).expand(-1, length + 1), max(100, config.sequences)
    content = read_text(Path(config.data).expanduser())
    if config.tokens == "bytes":
        tokens, vocab = torch.frombuffer(bytearray(content), dtype=torch.uint8).int(), 256
    else:
        tokens, vocab = words(content, config.vocab)
    if len(tokens) < 2:
        raise UserError(f"--data {config.data} holds {len(tokens)} {config.tokens}; a text needs at least two")
    length = config.length or 128
    rows = -(-(len(tokens) - 1) // length)  # each token but the first is a target once; the last row may be short
    tokens = F.pad(tokens, (0, rows * length + 1 - len(tokens)), value=NOTHING)
    return tokens.unfold(0, length + 1, length), vocab


def read_text(path: Path) -> bytes:
    """The bytes of a file, or of all .txt files in a folder in the order of their names."""
    try:
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"--data {path}: no .txt file in this folder; give a text file or a folder of them")
        return b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise UserError(f"--data {path}: {error.strerror}; give a text file or a folder of .txt files") from None


def words(content: bytes, vocab: int) -> tuple[Tensor, int]:
    """Numbers of the words between white space, 0 for all but the `vocab` most frequent; the size of the vocabulary."""
    try:
        text = content.decode("utf-8").split()
    except UnicodeDecodeError as error:
        raise UserError(f"--data is not UTF-8 at byte {error.start}; give --tokens bytes") from None
    numbers = {word: number for number, (word, _) in enumerate(Counter(text).most_common(vocab), start=1)}
    return torch.tensor([numbers.get(word, 0) for word in text], dtype=torch.int32), len(numbers) + 1


@lru_cache(maxsize=1)
def order_of_epoch(rows: int, seed: int, epoch: int) -> Tensor:
    """All rows once, shuffled."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


def batch_of_step(sequences: Tensor, step: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Token ids and targets, (batch_size, S) each; every epoch in another order, a function of seed and step alone.

    The last batch of an epoch may be short: it is filled up with rows of NOTHING, which change neither loss nor
    gradient, since the stages exchange tensors of one size.
    """
    steps_per_epoch = -(-len(sequences) // batch_size)
    epoch, number = divmod(step, steps_per_epoch)
    order = order_of_epoch(len(sequences), seed, epoch)
    rows = sequences[order[number * batch_size : (number + 1) * batch_size]].long()
    rows = F.pad(rows, (0, 0, 0, batch_size - len(rows)), value=NOTHING)  # (batch_size, S+1)
    return rows[:, :-1].clamp(min=0), rows[:, 1:]


def make_optimizer(config: Config, parameters) -> torch.optim.Optimizer:
    """Each rank has one, for its own stages."""
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=0.01)


def whole(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> tuple[dict, dict] | None:
    """On rank 0: the weights of all stages and the optimizer's state of each, by the whole model's names."""
    weights = {name: weight.detach().cpu() for name, weight in pipeline.parameters.items()}
    states = {name: {key: value.cpu() for key, value in optimizer.state[weight].items() if value is not None}
              for name, weight in pipeline.parameters.items()}  # fmt: skip
    gathered = pipeline.world.gather((weights, states))
    return tuple({k: v for part in parts for k, v in part.items()} for parts in zip(*gathered)) if gathered else None


def restore_optimizer(saved: dict, pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """This rank's part of what `whole` gathered, however many ranks there were."""
    states = {number: saved[name] for number, name in enumerate(pipeline.parameters) if saved[name]}
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


class Measured:
    """What the pipeline did in the steps that were looked at: one list of events a step, on rank 0."""

    def __init__(self, world: distributed.World, pipeline: Pipeline):
        self.world, self.pipeline, self.steps, self.memory = world, pipeline, [], None
        self.held = HeldBytes(pipeline.parameters.values())

    def add_step(self) -> float | None:
        """All ranks' events of the last step together; → the bubble's share, on rank 0."""
        gathered = self.world.gather(self.pipeline.recorder.take())
        if gathered:
            self.steps.append([event for events in gathered for event in events])
            return bubble_share(self.steps[-1], self.world.size)

    def counting(self):
        """Measures the peak memory of the step that is done in it."""
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.world.device)
            return nullcontext()
        return self.held.counting()

    def add_memory(self) -> None:
        """After that step: each rank's peak in bytes, on rank 0."""
        on_gpu = self.world.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.world.device) if on_gpu else self.held.peak
        weights = sum(weight.numel() for weight in self.pipeline.parameters.values())
        self.memory = self.world.gather((peak, weights))

    def typical(self) -> list:
        """The step whose bubble is the median."""
        return sorted(self.steps, key=lambda events: bubble_share(events, self.world.size))[len(self.steps) // 2]


def report(measured: Measured, config: Config, run: Run, step: int) -> None:
    """Bubble and memory in words, and the schedule as a picture; on rank 0, where the events are."""
    if not measured.steps:
        return
    ranks, events = run.world.size, measured.typical()
    order = order_of(events)
    theory = bubble_in_theory(config.schedule, ranks, config.stages_per_rank, config.micro_batches)
    equal = bubble_share(simulate(order, lambda kind, stage: 2.0 if kind == "B" else 1.0), ranks)
    own_times = bubble_share(simulate(order, mean_seconds(events)), ranks)
    share = median(bubble_share(events, ranks) for events in measured.steps)
    own = median(own_bubble_share(events, ranks) for events in measured.steps)
    run.log(f"bubble: measured {share:.1%}, the median of {len(measured.steps)} steps ({own:.1%} between each rank's own "
            f"first and last work); in theory {equal if theory is None else theory:.1%}; this order simulated with the "
            f"measured times of its parts {own_times:.1%}")  # fmt: skip
    what = (
        "peak of all tensors" if run.world.device.type == "cuda" else "peak of activations kept for the backward pass"
    )
    for rank, (peak, weights) in enumerate(measured.memory or []):
        stages = ", ".join(map(str, stages_of_rank(rank, ranks, config)))
        run.log(f"rank {rank} (stage {stages}): {weights:,} parameters, {what} {peak / MIB:.2f} MiB")
    title = (f"{config.schedule}, {ranks} rank{'s' * (ranks > 1)} × {config.stages_per_rank} stage"
             f"{'s' * (config.stages_per_rank > 1)}, {config.micro_batches} micro-batches: "
             f"bubble {bubble_share(events, ranks):.1%}")  # fmt: skip
    figure = draw(events, ranks, title)
    figure.savefig(run.folder / "schedule.png", dpi=100)
    run.telemetry.figure("pipeline/schedule", step, figure)
    run.telemetry.hyperparameters(asdict(config), {"result/bubble_share": share})
    run.log(f"picture: {run.folder / 'schedule.png'}")


def train(config: Config) -> None:
    """The whole run."""
    config = saved_settings(config, MAY_CHANGE) if config.resume else config
    # Everything is checked before the processes meet: who leaves while others are still joining leaves them with errors.
    distributed.adopt_srun()
    ranks = os.environ.get("WORLD_SIZE", "")
    if ranks == "1":
        raise UserError("a pipeline under torchrun needs two processes: torchrun --nproc_per_node 2 -m labs.pipeline; "
                        "one stage alone is `python -m labs.pipeline`")  # fmt: skip
    config.check_together()
    config.check_ranks(int(ranks) if ranks.isdecimal() else 1)
    sequences, vocab = load(config)
    world = distributed.start(config.device)
    run = Run.start(config, "pipeline", world, MAY_CHANGE)
    torch.manual_seed(config.seed)  # every rank makes the same whole model on the CPU, and keeps its stages
    model = LanguageModel(vocab, sequences.shape[1] - 1, config)
    state = {
        "step": 0,
        "loss": 0.0,
        "targets": 0,
        "data": [*sequences.shape, zlib.crc32(sequences.contiguous().numpy())],
    }
    if run.checkpoint:
        optimizer_state, saved = checkpoint.load_training_state(run.checkpoint)
        if saved["data"] != state["data"]:
            raise UserError(f"--resume {run.folder}: --data {config.data} is not what the run began with; put it back")
        load_weights(model, run.checkpoint)
        state = saved
    example = torch.zeros(config.batch_size // config.micro_batches, sequences.shape[1] - 1, dtype=torch.long)
    pipeline = Pipeline(model, example, config, world)
    optimizer = make_optimizer(config, pipeline.parameters.values())
    if run.checkpoint:
        restore_optimizer(optimizer_state, pipeline, optimizer)
    del model, example
    run.log(f"data: {len(sequences):,} sequences of {sequences.shape[1] - 1} tokens, vocabulary {vocab:,}; model: "
            f"{config.num_layers} layers, stages: {world.size * config.stages_per_rank}")  # fmt: skip
    if config.data and config.tokens == "words":
        run.log(f"words outside the vocabulary: {(sequences == 0).sum() / (sequences >= 0).sum():.1%}")
    loop(run, config, sequences, pipeline, optimizer, state)


def loop(run: Run, config: Config, sequences: Tensor, pipeline: Pipeline, optimizer, state: dict) -> None:
    """Step after step until all are done or a signal came."""
    steps_per_epoch = -(-len(sequences) // config.batch_size)
    last = config.max_steps or config.epochs * steps_per_epoch
    log_every = config.log_every or min(steps_per_epoch, 50)
    begun, why, measured = state["step"], "all steps are done", Measured(run.world, pipeline)
    since = time.perf_counter()
    while state["step"] < last:
        tokens, target = batch_of_step(sequences, state["step"], config.batch_size, config.seed)
        counted = state["step"] == min(begun + 1, last - 1)  # by then the optimizer's state is there
        optimizer.zero_grad()
        with measured.counting() if counted else nullcontext():
            loss = pipeline.forward_backward(tokens, target)
        if not math.isfinite(loss):  # on all ranks alike
            raise UserError(f"the loss is {loss} at step {state['step'] + 1}; go on from the last checkpoint, or give "
                            f"a smaller --lr than {config.lr:g}")  # fmt: skip
        state["loss"] += loss
        state["targets"] += int((target != NOTHING).sum())
        optimizer.step()
        state["step"] = step = state["step"] + 1
        if counted:
            measured.add_memory()
        if step % log_every == 0 or step == last:
            mean = state["loss"] / state["targets"]
            bubble = measured.add_step() if step > begun + 2 else None
            speed = state["targets"] / (time.perf_counter() - since)
            run.log(f"step {step:>6,}  epoch {step / steps_per_epoch:6.2f}  loss {mean:.4f}  {speed:,.0f} tokens/s"
                    + (f"  bubble {bubble:.1%}" if bubble is not None else ""))  # fmt: skip
            values = {"train/loss": mean, "speed/tokens_per_second": speed}
            run.telemetry.scalars(step, values | ({} if bubble is None else {"pipeline/bubble_share": bubble}))
            state |= {"loss": 0.0, "targets": 0}
            since = time.perf_counter()
        pipeline.recorder.take()
        stopped = run.stop_asked()
        if stopped or step % config.save_every == 0 or step == last:
            parts = whole(pipeline, optimizer)
            if parts:
                checkpoint.save(run.folder / "checkpoints", step, *parts, state)
        if stopped and step < last:
            why = INTERRUPTED
            break
    report(measured, config, run, state["step"])
    run.close(why)


if __name__ == "__main__":
    run_script(lambda: train(config))
