"""What a run of the pipeline tells in the end: its bubble, its memory, and a picture of the schedule."""

from collections import defaultdict
from contextlib import contextmanager, nullcontext
from statistics import median

import torch

from engine.distributed import World
from engine.run import Run
from labs.pipeline.schedule import (
    Event,
    bubble_in_theory,
    bubble_share,
    mean_seconds,
    order_of,
    own_bubble_share,
    simulate,
)
from labs.pipeline.stages import Pipeline, stages_of_rank

MIB = 2**20
COLOURS = {"F": "#4C78A8", "B": "#54A24B", "I": "#72B7B2", "W": "#F2A541"}
NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


class Measured:
    """What the pipeline did in the steps that were looked at: one list of events a step, on rank 0."""

    def __init__(self, world: World, pipeline: Pipeline):
        self.world, self.pipeline, self.memory = world, pipeline, None
        self.steps, self.speeds = [], []
        self.held = HeldBytes(pipeline.parameters.values())

    def add_step(self, tokens_per_second: float = 0.0) -> float | None:
        """All ranks' events of the last step together, and its speed; → the bubble's share, on rank 0."""
        self.speeds.append(tokens_per_second)
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
        return sorted(self.steps, key=lambda events: bubble_share(events, self.world.size))[
            len(self.steps) // 2
        ]


def report(measured: Measured, run: Run, step: int) -> None:
    """Bubble and memory in words, and the schedule as a picture; on rank 0, where the events are."""
    if not measured.steps:
        return
    config, ranks, events = run.config, run.world.size, measured.typical()
    order = order_of(events)
    theory = bubble_in_theory(config.schedule, ranks, config.stages_per_rank, config.micro_batches)
    # The order with F = I = W: what is called theory below where no formula holds.
    equal = bubble_share(simulate(order, lambda kind, stage: 2.0 if kind == "B" else 1.0), ranks)
    own_times = bubble_share(simulate(order, mean_seconds(events)), ranks)
    share = median(bubble_share(events, ranks) for events in measured.steps)
    own = median(own_bubble_share(events, ranks) for events in measured.steps)
    run.log(
        f"bubble: measured {share:.1%}, the median of {len(measured.steps)} steps ({own:.1%} between each rank's own "
        f"first and last work); in theory {equal if theory is None else theory:.1%}; this order simulated with the "
        f"measured times of its parts {own_times:.1%}"
    )
    run.log(
        f"speed: {median(measured.speeds):,.0f} tokens/s, the median of {len(measured.speeds)} lines"
    )
    what = (
        "peak of all tensors"
        if run.world.device.type == "cuda"
        else "peak of activations kept for the backward pass"
    )
    for rank, (peak, weights) in enumerate(measured.memory or []):
        stages = ", ".join(map(str, stages_of_rank(rank, ranks, config)))
        run.log(f"rank {rank} (stage {stages}): {weights:,} weights, {what} {peak / MIB:.2f} MiB")
    title = (
        f"{config.schedule}, {ranks} rank{'s' * (ranks > 1)} × {config.stages_per_rank} stage"
        f"{'s' * (config.stages_per_rank > 1)}, {config.micro_batches} micro-batches: "
        f"bubble {bubble_share(events, ranks):.1%}"
    )
    figure = draw(events, ranks, title)
    figure.savefig(run.folder / "schedule.png", dpi=100)
    run.telemetry.figure("pipeline/schedule", step, figure)
    run.telemetry.hyperparameters(config, {"result/bubble_share": share})
    run.log(f"picture: {run.folder / 'schedule.png'}")


def draw(events: list[Event], ranks: int, title: str):
    """One row a rank, time in milliseconds, micro-batches numbered from 1; a rank's later stages are darker. → figure"""
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    zero = min(event.start for event in events)
    span = max(event.end for event in events) - zero
    stages = {
        rank: sorted({event.stage for event in events if event.rank == rank})
        for rank in range(ranks)
    }
    figure = Figure(figsize=(12, 1.4 + 0.62 * ranks), layout="constrained")
    axes = figure.subplots()
    for event in events:
        shade = 1 - 0.25 * stages[event.rank].index(event.stage) / max(
            1, len(stages[event.rank]) - 1
        )
        colour = [shade * part for part in to_rgb(COLOURS[event.kind])]
        width = event.end - event.start
        axes.barh(
            event.rank,
            1000 * width,
            left=1000 * (event.start - zero),
            height=0.86,
            color=colour,
            edgecolor="white",
            linewidth=0.6,
        )
        if width > 0.011 * span:
            axes.text(
                1000 * (event.start - zero + width / 2),
                event.rank,
                str(event.micro_batch + 1),
                ha="center",
                va="center",
                color="white",
                fontsize=8,
                clip_on=True,
            )
    kinds = [kind for kind in COLOURS if any(event.kind == kind for event in events)]
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds],
        ncols=len(kinds),
        loc="outside lower center",
        frameon=False,
    )
    axes.set_yticks(
        range(ranks), [f"rank {r}\nstage {', '.join(map(str, stages[r]))}" for r in range(ranks)]
    )
    axes.set_ylim(ranks - 0.45, -0.55)
    axes.set_xlim(0, 1000 * span)
    darker = ", darker: a rank's later stage" if max(map(len, stages.values())) > 1 else ""
    axes.set_xlabel(f"milliseconds; numbers: micro-batches, white: bubble{darker}")
    axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


class HeldBytes:
    """Counts the bytes of the tensors that autograd keeps for the backward pass; `peak` is the most at one time.

    with held.counting():  forward and backward passes
    Weights are not counted (they are there anyway), and a tensor that several operations keep counts once.
    """

    def __init__(self, parameters):
        self.parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self.now = self.peak = 0
        self.uses = defaultdict(int)  # by storage

    @contextmanager
    def counting(self):
        """Whatever is computed here is counted, until the graph lets go of it."""
        self.peak = self.now
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Kept(tensor, self), lambda kept: kept.tensor
        ):
            yield

    def _change(self, storage: torch.UntypedStorage, by: int) -> None:
        address = storage.data_ptr()
        if address in self.parameters:
            return
        self.uses[address] += by
        if self.uses[address] == (1 if by > 0 else 0):  # the first use, or the last
            self.now += by * storage.nbytes()
            self.peak = max(self.peak, self.now)


class _Kept:
    """A saved tensor; autograd drops it with the node of the graph that saved it."""

    def __init__(self, tensor, counter):
        # Detached: an operation that saves its own result would otherwise hold itself, through what holds that result.
        self.tensor, self.counter = tensor.detach(), counter
        counter._change(tensor.untyped_storage(), +1)

    def __del__(self):
        self.counter._change(self.tensor.untyped_storage(), -1)
