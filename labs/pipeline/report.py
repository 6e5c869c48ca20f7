"""What a pipeline run reports at its end: bubble, memory, and a picture of the schedule."""

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
KINDS = {  # of work: name, colour
    "F": ("forward", "#4C78A8"),
    "B": ("backward", "#54A24B"),
    "I": ("backward, inputs", "#72B7B2"),
    "W": ("backward, weights", "#F2A541"),
}


class Measured:
    """The recorded steps of all ranks, on rank 0: `steps` has a list of events for each."""

    def __init__(self, world: World, pipeline: Pipeline):
        self.world = world
        self.pipeline = pipeline
        self.steps = []
        self.speeds = []  # tokens per second
        self.memory = None  # for each rank (peak in bytes, number of weights)
        self.held = HeldBytes(pipeline.parameters.values())

    def add_step(self, tokens_per_second: float = 0.0) -> float | None:
        """Collect all ranks' events of the last step. Returns the bubble's share on rank 0."""
        self.speeds.append(tokens_per_second)
        gathered = self.world.gather(self.pipeline.recorder.take())
        if gathered is None:
            return None
        self.steps.append([event for events in gathered for event in events])
        return bubble_share(self.steps[-1], self.world.size)

    def counting(self):
        """A context that measures the peak memory of the step inside."""
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.world.device)
            return nullcontext()
        return self.held.counting()

    def add_memory(self) -> None:
        """Collect each rank's peak after that step."""
        peak = self.held.peak
        if self.world.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.world.device)
        weights = sum(weight.numel() for weight in self.pipeline.parameters.values())
        self.memory = self.world.gather((peak, weights))

    def typical(self) -> list[Event]:
        """The step with the median bubble."""
        by_bubble = sorted(self.steps, key=lambda events: bubble_share(events, self.world.size))
        return by_bubble[len(by_bubble) // 2]


def report(measured: Measured, run: Run, step: int) -> None:
    """Log bubble and memory and draw the schedule; on rank 0, which has the events."""
    if not measured.steps:
        return
    config, ranks = run.config, run.world.size
    shares = [bubble_share(events, ranks) for events in measured.steps]
    own_shares = [own_bubble_share(events, ranks) for events in measured.steps]
    events = measured.typical()
    order = order_of(events)
    theory = bubble_in_theory(config.schedule, ranks, config.stages_per_rank, config.micro_batches)
    if theory is None:  # no formula: this order with F = I = W
        equal_times = simulate(order, lambda kind, stage: 2.0 if kind == "B" else 1.0)
        theory = bubble_share(equal_times, ranks)
    simulated = bubble_share(simulate(order, mean_seconds(events)), ranks)
    run.log(
        f"bubble: measured {median(shares):.1%}, the median of {len(shares)} steps "
        f"({median(own_shares):.1%} between each rank's own first and last work); in theory "
        f"{theory:.1%}; this order simulated with the measured times of its parts {simulated:.1%}"
    )
    speeds = measured.speeds
    run.log(f"speed: {median(speeds):,.0f} tokens/s, the median of {len(speeds)} lines")
    what = "peak of activations kept for the backward pass"
    if run.world.device.type == "cuda":
        what = "peak of all tensors"
    for rank, (peak, weights) in enumerate(measured.memory or []):
        stages = ", ".join(map(str, stages_of_rank(rank, ranks, config)))
        run.log(f"rank {rank} (stage {stages}): {weights:,} weights, {what} {peak / MIB:.2f} MiB")
    title = (
        f"{config.schedule}, ranks: {ranks}, stages per rank: {config.stages_per_rank}, "
        f"micro-batches: {config.micro_batches}, bubble: {bubble_share(events, ranks):.1%}"
    )
    figure = draw(events, ranks, title)
    figure.savefig(run.folder / "schedule.png", dpi=100)
    run.telemetry.figure("pipeline/schedule", step, figure)
    run.telemetry.hyperparameters(config, {"result/bubble_share": median(shares)})
    run.log(f"picture: {run.folder / 'schedule.png'}")


def draw(events: list[Event], ranks: int, title: str):
    """A figure with one row per rank and time in ms; micro-batches are numbered from 1.

    The later stages of a rank are drawn darker.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    zero = min(event.start for event in events)
    span = max(event.end for event in events) - zero
    stages = [sorted({e.stage for e in events if e.rank == rank}) for rank in range(ranks)]
    most_stages = max(map(len, stages))
    figure = Figure(figsize=(12, 1.4 + 0.62 * ranks), layout="constrained")
    axes = figure.subplots()
    for event in events:
        turn = stages[event.rank].index(event.stage)
        shade = 1 - 0.25 * turn / max(1, most_stages - 1)
        colour = [shade * part for part in to_rgb(KINDS[event.kind][1])]
        left = 1000 * (event.start - zero)
        width = 1000 * (event.end - event.start)
        box = dict(height=0.86, color=colour, edgecolor="white", linewidth=0.6)
        axes.barh(event.rank, width, left=left, **box)
        if width > 11 * span:  # 1.1 % of the picture: wide enough for a number
            text = dict(ha="center", va="center", color="white", fontsize=8, clip_on=True)
            axes.text(left + width / 2, event.rank, str(event.micro_batch + 1), **text)
    used = {event.kind for event in events}
    handles = [
        Patch(color=colour, label=name) for kind, (name, colour) in KINDS.items() if kind in used
    ]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", frameon=False)
    names = [f"rank {rank}\nstage {', '.join(map(str, stages[rank]))}" for rank in range(ranks)]
    axes.set_yticks(range(ranks), names)
    axes.set_ylim(ranks - 0.45, -0.55)
    axes.set_xlim(0, 1000 * span)
    label = "milliseconds; numbers: micro-batches, white: bubble"
    if most_stages > 1:
        label += ", darker: a rank's later stage"
    axes.set_xlabel(label)
    axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


class HeldBytes:
    """Counts the bytes that autograd keeps for the backward pass; `peak` is the most at one time.

    with held.counting():  forward and backward passes
    Weights are not counted, and storage that several operations keep counts once.
    """

    def __init__(self, parameters):
        self.parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self.now = self.peak = 0
        self.uses = defaultdict(int)  # address of a storage → how many saved tensors use it

    @contextmanager
    def counting(self):
        """Count what is computed inside, until autograd releases it."""
        self.peak = self.now
        pack = lambda tensor: _Kept(tensor, self)  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            yield

    def add(self, storage: torch.UntypedStorage) -> None:
        """Autograd has saved a tensor of this storage."""
        address = storage.data_ptr()
        if address not in self.parameters:
            if not self.uses[address]:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
            self.uses[address] += 1

    def remove(self, storage: torch.UntypedStorage) -> None:
        """Autograd has released it."""
        address = storage.data_ptr()
        if address not in self.parameters:
            self.uses[address] -= 1
            if not self.uses[address]:
                self.now -= storage.nbytes()


class _Kept:
    """A saved tensor; autograd drops it with the node of the graph that saved it."""

    def __init__(self, tensor, counter: HeldBytes):
        # Detached: an operation that saves its own result would otherwise keep itself alive.
        self.tensor = tensor.detach()
        self.counter = counter
        counter.add(tensor.untyped_storage())

    def __del__(self):
        self.counter.remove(self.tensor.untyped_storage())
