"""Pictures of a table of runs: where the memory goes, and the loss curves of all layouts."""

import json
from pathlib import Path

# Parts of `plan.Need`, in the order of the bars, with their colours.
PARTS = {
    "weights": "#4C78A8",
    "gradients": "#72B7B2",
    "optimizer": "#F2A541",
    "activations": "#54A24B",
    "logits": "#B279A2",
    "process": "#BAB0AC",
}


def draw_memory(names: list[str], outcomes: list[dict], path: Path) -> None:
    """Stacked bars of the planned memory of the fullest rank, and what was measured.

    A bar may be longer than the plan's peak, a black line: gradients may replace activations.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.36 * len(names)), layout="constrained")
    axes = figure.subplots()
    for number, outcome in enumerate(outcomes):
        if "failed" in outcome:
            continue
        left = 0.0
        for part, colour in PARTS.items():
            width = outcome["planned_parts"][part]
            axes.barh(number, width, left=left, color=colour, height=0.7)
            left += width
        line = dict(height=0.84, color="black", width=0.004 * left)
        axes.barh(number, left=outcome["planned_gib"], **line)
        axes.plot(max(outcome["peak_gib"]), number, "o", color="#E45756")
    for part, colour in PARTS.items():
        axes.barh(0, 0, color=colour, label=part)
    axes.plot([], [], "o", color="#E45756", label="measured peak")
    axes.barh(0, 0, color="black", label="planned peak")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("GiB on the fullest rank; the last word of a name: processes")
    figure.legend(ncols=4, loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=100)


def draw_losses(names: list[str], runs: list[Path], path: Path) -> None:
    """The training loss of each step, one curve for each run that has one.

    Where layouts agree the curves lie on each other, so each is drawn thinner than the one before.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, run) in enumerate(zip(names, runs)):
        curve = training_losses(run)
        if curve:
            width = 1 + 0.8 * (len(names) - number)
            axes.plot(*zip(*curve), label=name, linewidth=width)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats)")
    axes.grid(alpha=0.3)
    if axes.lines:
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)


def training_losses(run: Path) -> list[tuple[int, float]]:
    """(step, loss) of a run's metrics.jsonl; [] if it has none."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return []
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [(each["step"], each["train/loss"]) for each in records if "train/loss" in each]
