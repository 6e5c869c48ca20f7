"""What a pipeline run reports at its end: bubble, memory, and a picture of the schedule."""

from statistics import median

import torch

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

MIB = 2**20
KINDS = {  # of work: name, colour
    "F": ("forward", "#4C78A8"),
    "B": ("backward", "#54A24B"),
    "I": ("backward, inputs", "#72B7B2"),
    "W": ("backward, weights", "#F2A541"),
}


def report(
    pipeline: Pipeline, run: Run, recorded: list[list[Event]], speeds: list[float], step: int
) -> None:
    """Log bubble, speed and memory and draw the schedule.

    All ranks call it. `recorded` has the events of all ranks in each recorded step (on rank 0;
    elsewhere it is empty), `speeds` the tokens per second between two log lines. A short session
    records nothing.
    """
    weights = sum(weight.numel() for weight in pipeline.parameters.values())
    peak = 0
    if run.world.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(run.world.device)
    memory = run.world.gather((weights, peak))
    if memory is None:  # only rank 0 has it
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
    for rank, (weights, peak) in enumerate(memory):
        stages = ", ".join(map(str, stages_of_rank(rank, ranks, config)))
        line = f"rank {rank} (stage {stages}): {weights:,} weights"
        if events:
            held = most_held(events, rank)
            line += f", activations of at most {held} forward passes at a time"
        if peak:
            line += f", peak memory {peak / MIB:.2f} MiB"
        run.log(line)
    if not events:
        return
    title = (
        f"{config.schedule}, ranks: {ranks}, stages per rank: {config.stages_per_rank}, "
        f"micro-batches: {config.micro_batches}, bubble: {bubble_share(events, ranks):.1%}"
    )
    figure = draw(events, ranks, title)
    figure.savefig(run.folder / "schedule.png", dpi=100)
    run.telemetry.figure("pipeline/schedule", step, figure)
    run.telemetry.hyperparameters(config, {"result/bubble_share": median(shares)})
    run.log(f"picture: {run.folder / 'schedule.png'}")


def log_bubble(run: Run, events: list[Event], shares: list[float]) -> None:
    """The bubble's `shares` of the recorded steps, in theory, and of the simulated `events`."""
    config, ranks = run.config, run.world.size
    theory = bubble_in_theory(config.schedule, ranks, config.stages_per_rank, config.micro_batches)
    if theory is None:  # no formula: this order with F = I = W
        equal_times = simulate(events, lambda kind, stage: 2.0 if kind == "B" else 1.0)
        theory = bubble_share(equal_times, ranks)
    simulated = bubble_share(simulate(events, mean_seconds(events)), ranks)
    run.log(
        f"bubble: measured {median(shares):.1%}, the median of {len(shares)} steps; in theory "
        f"{theory:.1%}; this order simulated with the measured times of its parts {simulated:.1%}"
    )


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
