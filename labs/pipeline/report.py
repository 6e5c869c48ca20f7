"""What a pipeline run reports at its end: bubble, memory, and a picture of the schedule."""

from statistics import median

import torch

from engine import memory
from engine.meters import peak_memory_gib
from engine.run import Run
from labs.pipeline.schedule import (
    Event,
    bubble_in_theory,
    bubble_share,
    mean_seconds,
    most_held,
    simulate,
)
from labs.pipeline.stages import Pipeline, stages_of_rank

KINDS = {  # of work: name, colour
    "F": ("forward", "#4C78A8"),
    "B": ("backward", "#54A24B"),
    "I": ("backward, inputs", "#72B7B2"),
    "W": ("backward, weights", "#F2A541"),
}


class Memory:
    """The most memory that training holds: of tensors on a GPU, of the process on a CPU.

    On a CPU what the process held before it had a model, PyTorch among others, is not counted. Nor
    is a checkpoint: for it rank 0 gathers the complete model.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.before = self.peak = 0.0  # GiB
        if device.type == "cpu":
            memory.forget_peak()
            self.before = memory.held_gib("VmRSS")

    def pause(self) -> None:
        """Until `resume` the memory is not that of training."""
        self.peak = max(self.peak, peak_memory_gib(self.device))

    def resume(self) -> None:
        """The peak counts from now on."""
        if self.device.type == "cpu":
            memory.forget_peak()
        else:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_mib(self) -> float:
        """The peak in MiB."""
        return 1024 * (max(self.peak, peak_memory_gib(self.device)) - self.before)


def report(
    pipeline: Pipeline,
    run: Run,
    recorded: list[list[Event]],
    speeds: list[float],
    step: int,
    peak_mib: float,
) -> None:
    """Log bubble, speed and memory and draw the schedule.

    All ranks call it. `recorded` has the events of all ranks in each recorded step (on rank 0;
    elsewhere it is empty), `speeds` the tokens per second between two log lines, `peak_mib` this
    rank's memory. A short session records nothing.
    """
    weights = sum(weight.numel() for weight in pipeline.parameters.values())
    of_ranks = run.world.gather((weights, peak_mib))
    if of_ranks is None:  # only rank 0 has it
        return
    config, ranks = run.config, run.world.size
    recorded = sorted(recorded, key=lambda events: bubble_share(events, ranks))
    shares = [bubble_share(events, ranks) for events in recorded]
    events = recorded[len(recorded) // 2] if recorded else []  # the step with the median bubble
    if events:
        log_bubble(run, events, shares)
    else:
        run.log("bubble: not measured, no log line after the first two steps")
    if speeds:
        run.log(f"speed: {median(speeds):,.0f} tokens/s, the median of {len(speeds)} lines")
    for rank, (weights, peak) in enumerate(of_ranks):
        stages = ", ".join(map(str, stages_of_rank(rank, ranks, config)))
        line = f"rank {rank} (stage {stages}): {weights:,} weights"
        if events:
            held = most_held(events, rank)
            forward = sum(event.kind == "F" and event.rank == rank for event in events)
            line += f", activations of at most {held} of {forward} forward passes at a time"
        run.log(f"{line}, peak memory {peak:.0f} MiB")
    if not events:
        return
    figure = draw_both(events, config, ranks)
    figure.savefig(run.folder / "schedule.png", dpi=100)
    run.telemetry.figure("pipeline/schedule", step, figure)
    run.telemetry.hyperparameters(config, {"result/bubble_share": median(shares)})
    run.log(f"picture: {run.folder / 'schedule.png'}")


def log_bubble(run: Run, events: list[Event], shares: list[float]) -> None:
    """The bubble's `shares` of the recorded steps, in theory, and of the simulated `events`."""
    config, ranks = run.config, run.world.size
    theory = bubble_in_theory(config.schedule, ranks, config.stages_per_rank, config.micro_batches)
    if theory is None:  # no formula for this order
        theory = bubble_share(ideal(events), ranks)
    simulated = bubble_share(simulate(events, mean_seconds(events)), ranks)
    run.log(
        f"bubble: measured {median(shares):.1%}, the median of {len(shares)} steps; in theory "
        f"{theory:.1%}; this order simulated with the measured times of its parts {simulated:.1%}"
    )


def ideal(events: list[Event]) -> list[Event]:
    """The same order with equally fast stages, free messages and F = I = W, each 1."""
    return simulate(events, lambda kind, stage: 2.0 if kind == "B" else 1.0)


def draw_both(events: list[Event], config, ranks: int):
    """A figure of two pictures: the ideal schedule above the measured one."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 2 * (1.2 + 0.55 * ranks)), layout="constrained")
    upper, lower = figure.subplots(2)
    title = (
        f"{config.schedule}, ranks: {ranks}, stages per rank: {config.stages_per_rank}, "
        f"micro-batches: {config.micro_batches}"
    )
    perfect = ideal(events)
    draw(upper, perfect, ranks)
    upper.set_title(f"{title}. Ideal: bubble {bubble_share(perfect, ranks):.1%}", loc="left")
    upper.set_xlabel("units of one forward pass; numbers: micro-batches, white: bubble")
    milliseconds = []
    for event in events:
        times = dict(start=1000 * event.start, end=1000 * event.end)
        milliseconds.append(event._replace(**times))
    draw(lower, milliseconds, ranks)
    lower.set_title(f"Measured: bubble {bubble_share(events, ranks):.1%}", loc="left")
    label = "milliseconds"
    if config.stages_per_rank > 1:
        label += "; darker: a rank's later stage"
    lower.set_xlabel(label)
    used = {event.kind for event in events}
    handles = [
        Patch(color=colour, label=name) for kind, (name, colour) in KINDS.items() if kind in used
    ]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center", frameon=False)
    return figure


def draw(axes, events: list[Event], ranks: int) -> None:
    """One row per rank, from the first event to the last; micro-batches are numbered from 1.

    The later stages of a rank are drawn darker.
    """
    from matplotlib.colors import to_rgb

    zero = min(event.start for event in events)
    span = max(event.end for event in events) - zero
    stages = [sorted({e.stage for e in events if e.rank == rank}) for rank in range(ranks)]
    most_stages = max(map(len, stages))
    for event in events:
        turn = stages[event.rank].index(event.stage)
        shade = 1 - 0.25 * turn / max(1, most_stages - 1)
        colour = [shade * part for part in to_rgb(KINDS[event.kind][1])]
        left = event.start - zero
        width = event.end - event.start
        box = dict(height=0.86, color=colour, edgecolor="white", linewidth=0.6)
        axes.barh(event.rank, width, left=left, **box)
        if width > 0.011 * span:  # wide enough for a number
            text = dict(ha="center", va="center", color="white", fontsize=8, clip_on=True)
            axes.text(left + width / 2, event.rank, str(event.micro_batch + 1), **text)
    names = [f"rank {rank}\nstage {', '.join(map(str, stages[rank]))}" for rank in range(ranks)]
    axes.set_yticks(range(ranks), names)
    axes.set_ylim(ranks - 0.45, -0.55)
    axes.set_xlim(0, span)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
