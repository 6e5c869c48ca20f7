"""Curves and hardware use: matplotlib figures of one run, or of several in the same axes.

Every panel is a figure of its own, 4.8 inches wide, so that it can be read on a telephone too.
"""

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from tools.reporting.fonts import families
from tools.reporting.reading import RunFiles

SIZE = (4.8, 2.9)  # inches
# One for each run; the seventh has the first again.
COLOURS = ("#1f5fa8", "#d1495b", "#3a8d5c", "#8a5aab", "#e08e1b", "#4d4d4d")
# Of the curves in a panel, where there is only one run: colour, width, marker.
STYLES = {
    "train": ("#9db8d6", 1.0, ""),
    "smoothed": ("#a8a8a8", 0.8, ""),
    "valid": ("#d1495b", 1.6, "o"),
    "test": ("#3a8d5c", 1.6, "s"),
    "other": ("#1f5fa8", 1.2, ""),
}
LINES = {"train": ":", "test": "--"}  # where there are several runs
NAMES = {"train": "training", "valid": "validation", "smoothed": "training, smoothed"}
# Panels in reading order; a curve is in the panel of the last part of its tag.
PANELS = [
    "loss",
    "perplexity",
    "bleu",
    "accuracy",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
    "images_per_second",
    "model_flops_utilisation",
    "padding_share",
    "wait_share",
]
TOGETHER = {"smoothed_loss": "loss"}
# The hardware has a figure of its own.
NOT_SHOWN = ("cpu/", "gpu/", "memory/", "result/", "speed/target", "test/errors")
QUANTITIES = ("utilisation_percent", "memory_gib", "power_watt", "temperature_celsius")
WIDE_RANGE = 30  # largest / smallest value from which a scale is logarithmic


def panels_of(runs: list[RunFiles]) -> dict[str, list[str]]:
    """The tags in each panel, panels in reading order."""
    panels = {name: [] for name in PANELS}
    for tag in dict.fromkeys(tag for run in runs for tag in run.tags()):
        if not tag.startswith(NOT_SHOWN):
            name = tag.rpartition("/")[2]
            panels.setdefault(TOGETHER.get(name, name), []).append(tag)
    return {name: tags for name, tags in panels.items() if tags}


def curves(runs: list[RunFiles], name: str, tags: list[str], translate) -> Figure:
    """One panel: all runs and all its tags over the steps. `translate` translates labels."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    # Errors of 0.9 % and 0.7 % can be told apart, accuracies of 99.1 % and 99.3 % cannot.
    title = translate("error rate" if name == "accuracy" else name)
    axes.set_title(title, fontsize=11, family=families(title), parse_math=False)
    axes.set_xlabel(translate("step"), family=families(translate("step")))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(runs) > 1:
        tags = [tag for tag in tags if "smoothed" not in tag]
    drawn = []
    for number, run in enumerate(runs):
        for tag in tags:
            steps, values = run.series(tag)
            if name == "accuracy":
                values = [1 - value for value in values]
            split = split_of(tag)
            colour, width, marker = STYLES.get(split, STYLES["other"])
            line = "-"
            label = translate(NAMES.get(split, split))
            if len(runs) > 1:
                colour = COLOURS[number % len(COLOURS)]
                line = LINES.get(split, "-") if len(tags) > 1 else "-"
                label = f"{run.name}, {label}" if len(tags) > 1 else run.name
            elif len(tags) == 1:
                colour = STYLES["other"][0]
            if len(values) == 1:
                marker = "o"
            style = dict(color=colour, linewidth=width, marker=marker, markersize=3)
            axes.plot(steps, values, line, label=label, **style)
            drawn += values
    # All panels have the same steps, also those with few points.
    axes.set_xlim(0, 1.02 * max(run.records[-1]["step"] for run in runs if run.records))
    if name == "bleu":
        axes.set_ylim(0, 1.1 * max(drawn) or 1)
    elif name != "learning_rate":
        choose_scale(axes, drawn)
    if len(tags) > 1 or len(runs) > 1:
        labels = "".join(axes.get_legend_handles_labels()[1])
        font = {"family": families(labels), "size": 8}
        for entry in axes.legend(frameon=False, prop=font).get_texts():
            entry.set_parse_math(False)
    return figure


def split_of(tag: str) -> str:
    """The split that a curve is of, as a key of STYLES."""
    if "smoothed" in tag:
        return "smoothed"
    return tag.partition("/")[0].replace("validation", "valid")


def choose_scale(axes, values: list[float]) -> None:
    """A logarithmic scale if values are positive and differ much."""
    low, high = min(values, default=0), max(values, default=0)
    if low <= 0 or high / low <= WIDE_RANGE:
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def hardware(run: RunFiles, translate) -> Figure | None:
    """Utilisation, memory, power and temperature of GPU and CPU over the steps."""
    tags = [f"{device}/{name}" for device in ("gpu", "cpu") for name in QUANTITIES]
    tags = [tag for tag in tags if run.series(tag)[1]]
    if not tags:
        return None
    figure = Figure(figsize=(SIZE[0], 1.3 * len(tags) + 0.7), layout="constrained")
    figure.suptitle(run.name, fontsize=10, family=families(run.name), parse_math=False)
    for axes, tag in zip(figure.subplots(len(tags), sharex=True, squeeze=False)[:, 0], tags):
        device, name = tag.split("/")
        steps, values = run.series(tag)
        colour = COLOURS[2] if device == "gpu" else COLOURS[0]
        axes.fill_between(steps, values, color=colour, alpha=0.25, linewidth=0)
        marker = "." if len(values) < 3 else ""
        axes.plot(steps, values, color=colour, linewidth=1.2, marker=marker)
        top = 100 if tag == "gpu/utilisation_percent" else 1.15 * max(values)
        axes.set_ylim(0, max(top, 1e-6))
        title = f"{device.upper()} {translate(name)}"
        axes.set_title(title, fontsize=9, loc="left", family=families(title))
        axes.grid(alpha=0.25)
    axes.set_xlabel(translate("step"), family=families(translate("step")))
    return figure
