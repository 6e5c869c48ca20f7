"""Curves, hardware over time, length histogram: matplotlib figures of a run, or of several in the same axes.

Every panel is a figure of its own, 4.8 inches wide: on a telephone they stand one below the other and can still be read.
"""

import math
import statistics

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from tools.reporting.fonts import families
from tools.reporting.reading import RunFiles, is_pause

SIZE, COLUMNS = (4.8, 2.9), 3  # inches; of the overview
COLOURS = (
    "#1f5fa8 #d1495b #3a8d5c #8a5aab #e08e1b #4d4d4d".split()
)  # one a run, again from the first after six
STYLES = {  # of one run's curves in a panel: colour where the run is alone, line, width, marker
    "train": ("#9db8d6", "-", 1.0, ""),
    "smoothed": ("#a8a8a8", "-", 0.8, ""),
    "valid": ("#d1495b", "-", 1.6, "o"),
    "test": ("#3a8d5c", "-", 1.6, "s"),
    "other": ("#1f5fa8", "-", 1.2, ""),
}
NAMES = {"train": "training", "valid": "validation", "smoothed": "training, smoothed"}
# Panels in the order they are read in; a curve is in the panel of the last part of its tag.
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
NOT_SHOWN = (
    "cpu/",
    "gpu/",
    "memory/",
    "result/",
    "speed/target",
    "test/errors",
)  # hardware: a figure of its own
WIDE_RANGE = 30  # largest / smallest value from which a scale is logarithmic


def panels_of(runs: list[RunFiles]) -> dict[str, list[str]]:
    """The tags in each panel, panels in reading order; the hardware has a figure of its own."""
    panels = {name: [] for name in PANELS}
    for tag in dict.fromkeys(tag for run in runs for tag in run.tags()):
        if not tag.startswith(NOT_SHOWN):
            name = tag.rpartition("/")[2]
            panels.setdefault(TOGETHER.get(name, name), []).append(tag)
    return {name: tags for name, tags in panels.items() if tags}


def curves(runs: list[RunFiles], name: str, tags: list[str], say) -> Figure:
    """One panel as a figure."""
    figure = Figure(figsize=SIZE, layout="constrained")
    draw_curves(figure.subplots(), runs, name, tags, say)
    return figure


def overview(runs: list[RunFiles], panels: dict[str, list[str]], say) -> Figure:
    """All panels in one picture, for a slide or a page of the docs."""
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(COLUMNS * SIZE[0], rows * SIZE[1]), layout="constrained")
    places = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axes, (name, tags) in zip(places, panels.items()):
        draw_curves(axes, runs, name, tags, say)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    return figure


def draw_curves(axes, runs: list[RunFiles], name: str, tags: list[str], say) -> None:
    """All runs and all tags of a panel over the steps."""
    name_axes(axes, say("error rate" if name == "accuracy" else name), say("step"))
    if len(runs) > 1:
        tags = [tag for tag in tags if "smoothed" not in tag]  # enough lines without
    low, high = float("inf"), float("-inf")
    for number, run in enumerate(runs):
        for tag in tags:
            steps, values = run.series(tag)
            if name == "accuracy":  # 99.1 and 99.3 % look alike, 0.9 and 0.7 % do not
                values = [1 - value for value in values]
            split = (
                "smoothed"
                if "smoothed" in tag
                else tag.partition("/")[0].replace("validation", "valid")
            )
            colour, line, width, marker = STYLES.get(split, STYLES["other"])
            colour = STYLES["other"][0] if len(tags) == 1 else colour
            label = say(NAMES.get(split, split))
            if len(runs) > 1:
                colour, label = (
                    COLOURS[number % len(COLOURS)],
                    f"{run.name}, {label}" if len(tags) > 1 else run.name,
                )
                line = (
                    ":" if split == "train" and len(tags) > 1 else "--" if split == "test" else "-"
                )
            marker = marker or ("o" if len(values) == 1 else "")
            axes.plot(
                steps,
                values,
                line,
                color=colour,
                linewidth=width,
                marker=marker,
                markersize=3,
                label=label,
            )
            low, high = min([low, *values]), max([high, *values])
    if low > 0 and high / low > WIDE_RANGE and name != "learning_rate":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if len(tags) > 1 or len(runs) > 1:
        legend(axes, [run.name for run in runs], say)


def hardware(run: RunFiles, say) -> Figure | None:
    """How busy, full, thirsty and hot the GPU was over the minutes, as nvidia-smi shows it; CPU and memory likewise."""
    names = {
        "utilisation_percent": "%",
        "memory_gib": "GiB",
        "power_watt": "W",
        "temperature_celsius": "°C",
    }
    tags = [f"{device}/{name}" for device in ("gpu", "cpu") for name in names]
    tags = [tag for tag in tags if run.series(tag)[1]]
    if not tags:
        return None
    figure = Figure(figsize=(SIZE[0], 1.3 * len(tags) + 0.7), layout="constrained")
    figure.suptitle(run.name, fontsize=10, family=families(run.name), parse_math=False)
    for axes, tag in zip(figure.subplots(len(tags), sharex=True, squeeze=False)[:, 0], tags):
        device, name = tag.split("/")
        values = run.series(tag)[1]
        top = 100 if tag == "gpu/utilisation_percent" else 1.15 * max(values)
        minutes, values = with_pauses(run.minutes(tag), values)
        colour = COLOURS[2] if device == "gpu" else COLOURS[0]
        axes.fill_between(minutes, values, color=colour, alpha=0.25, linewidth=0)
        axes.plot(
            minutes,
            values,
            color=colour,
            linewidth=1.2,
            marker="." if len(values) < 3 or math.nan in values else "",
        )
        axes.set_ylim(0, max(top, 1e-6))
        title = f"{device.upper()} {say(name)} ({names[name]})"
        axes.set_title(title, fontsize=9, loc="left", family=families(title))
        axes.grid(alpha=0.25)
    axes.set_xlabel(say("minutes"), family=families(say("minutes")))
    return figure


def with_pauses(minutes: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """The same with a NaN in each pause between two starts of the run, over which no line may go."""
    steps = [after - before for before, after in zip(minutes, minutes[1:])]
    usual = statistics.median(steps or [0])
    for place in reversed([n for n, step in enumerate(steps, 1) if is_pause(step, usual)]):
        minutes.insert(place, minutes[place])
        values.insert(place, math.nan)
    return minutes, values


def lengths(runs: list[RunFiles], say) -> Figure | None:
    """How many training sentences have how many tokens."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    name_axes(axes, say("sentence lengths"), say("tokens"))
    for number, run in enumerate(run for run in runs if run.data.get("lengths")):
        for side, line in (("source", "-"), ("target", "--")):
            counts = run.data["lengths"].get(side, [])
            # A few very long sentences would make the rest a stroke at the left: up to where 99.5 % end.
            fewest = 0.995 * sum(counts)
            shown = next(
                (n for n in range(1, len(counts) + 1) if sum(counts[:n]) >= fewest), len(counts)
            )
            label = f"{run.name}, {say(side)}" if len(runs) > 1 else say(side)
            axes.plot(
                range(shown),
                counts[:shown],
                line,
                color=COLOURS[number % len(COLOURS)],
                label=label,
            )
    if not axes.lines:
        return None
    axes.set_ylabel(say("sentences"), family=families(say("sentences")))
    legend(axes, [run.name for run in runs], say)
    return figure


def name_axes(axes, title: str, x: str) -> None:
    """Title, label of the x axis, grid; in fonts that have these characters."""
    axes.set_title(title, fontsize=11, family=families(title), parse_math=False)
    axes.set_xlabel(x, family=families(x))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def legend(axes, names: list[str], say) -> None:
    """The legend of what is drawn, in fonts that have the characters of these names of runs."""
    text = (
        "".join(names)
        + say("training")
        + say("validation")
        + say("source")
        + say("training, smoothed")
    )
    for entry in axes.legend(
        fontsize=8, frameon=False, prop={"family": families(text), "size": 8}
    ).get_texts():
        entry.set_parse_math(False)
