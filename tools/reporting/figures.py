"""Curves and hardware use: matplotlib figures of one run, or of several in the same axes.

Every panel is a figure of its own, 4.8 inches wide, so that it can be read on a telephone too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from tools.reporting.fonts import families
from tools.reporting.reading import RunFiles
from tools.reporting.words import Words, in_language

WIDTH = 4.8  # inches
LONGEST_LEGEND = 6  # runs beside the curves; of more the legend is below them
STYLE = {
    "text.parse_math": False,  # a $ in a run's name is no mathematics
    "figure.constrained_layout.use": True,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
# One for each run; the seventh has the first again, dashed.
COLOURS = ("#1f5fa8", "#d1495b", "#3a8d5c", "#8a5aab", "#e08e1b", "#4d4d4d")
DASHES = ("-", "--", ":")
# Of the curves in a panel, where there is only one run: colour, width, marker.
STYLES = {
    "train": ("#9db8d6", 1.0, ""),
    "smoothed": ("#a8a8a8", 0.8, ""),
    "valid": ("#d1495b", 1.6, "o"),
    "test": ("#3a8d5c", 1.6, "s"),
    "other": ("#1f5fa8", 1.2, ""),
}
LINES = {"train": ":", "test": "--"}  # where there are several runs
SPLITS: dict[str, Words] = {
    "train": ("training", "训练"),
    "valid": ("validation", "验证"),
    "test": ("test", "测试"),
    "smoothed": ("training, smoothed", "训练（标签平滑）"),
}
STEP: Words = ("step", "步")


@dataclass(frozen=True)
class Panel:
    """What a group of curves shows."""

    label: Words  # of the axis, which the caption repeats
    shown: Callable[[float], float] = float  # a value in the unit of the axis


def percent(share: float) -> float:
    """A share of 1 in %."""
    return 100 * share


def percent_wrong(accuracy: float) -> float:
    """Accuracies of 99.1 % and 99.3 % cannot be told apart, errors of 0.9 % and 0.7 % can."""
    return 100 - 100 * accuracy


# The curves train/loss and valid/loss are in the panel "loss", and so on, in this order. The tables
# use the same units.
PANELS = {
    "loss": Panel(("loss (nats per token)", "损失（nat/词元）")),
    "perplexity": Panel(("perplexity", "困惑度")),
    "bleu": Panel(("BLEU (smoothed, some rows)", "验证 BLEU（平滑，部分行）")),
    "accuracy": Panel(("error rate (%)", "错误率（%）"), percent_wrong),
    "learning_rate": Panel(("learning rate", "学习率")),
    "gradient_norm": Panel(("gradient norm", "梯度范数")),
    "tokens_per_second": Panel(("tokens per second", "每秒词元数")),
    "images_per_second": Panel(("images per second", "每秒图片数")),
    "model_flops_utilisation": Panel(
        ("model FLOPs utilisation (%)", "模型算力利用率 MFU（%）"), percent
    ),
    "padding_share": Panel(("padding (%)", "填充比例（%）"), percent),
    "wait_share": Panel(("waiting for data (%)", "等待数据的时间（%）"), percent),
    "bubble_share": Panel(("bubble of the pipeline (%)", "流水线气泡（%）"), percent),
    "loss_scale": Panel(("loss scale", "损失缩放")),
    "different_segments": Panel(("different segments", "不同片段数")),
    "weight": Panel(("weight of dynamic sampling", "动态采样的权重")),
}
LOSS_OF_IMAGES: Words = ("loss (nats per image)", "损失（nat/图片）")
TOGETHER = {"smoothed_loss": "loss"}
# The hardware has a figure of its own.
NOT_SHOWN = ("epoch", "cpu/", "gpu/", "memory/", "result/", "speed/target", "test/errors")
QUANTITIES: dict[str, Words] = {
    "utilisation_percent": ("utilisation (%)", "利用率（%）"),
    "memory_gib": ("memory (GiB)", "内存（GiB）"),
    "power_watt": ("power (W)", "功率（W）"),
    "temperature_celsius": ("temperature (°C)", "温度（°C）"),
}
WIDE_RANGE = 30  # largest / smallest value from which a scale is logarithmic


def panels_of(runs: list[RunFiles]) -> dict[str, list[str]]:
    """The tags in each panel, panels in reading order."""
    panels: dict[str, list[str]] = {name: [] for name in PANELS}
    for tag in dict.fromkeys(tag for run in runs for tag in run.tags()):
        if not tag.startswith(NOT_SHOWN):
            name = tag.rpartition("/")[2]
            panels.setdefault(TOGETHER.get(name, name), []).append(tag)
    return {name: tags for name, tags in panels.items() if tags}


def label_of(runs: list[RunFiles], name: str) -> Words:
    """The text of a panel's axis."""
    if name == "loss" and any("images_per_second" in tag for run in runs for tag in run.tags()):
        return LOSS_OF_IMAGES
    return PANELS[name].label if name in PANELS else name.replace("_", " ")


def curves(runs: list[RunFiles], name: str, tags: list[str], language: str) -> Figure:
    """One panel: all runs and all its tags over the steps."""
    if len(runs) > 1:
        tags = [tag for tag in tags if "smoothed" not in tag]
    names = "".join(run.name for run in runs)
    with matplotlib.rc_context({**STYLE, "font.family": families(names)}):
        is_crowded = len(runs) > LONGEST_LEGEND
        figure = Figure(figsize=(WIDTH, 2.9 + 0.1 * len(runs) * is_crowded))
        axes = figure.subplots()
        axes.set_ylabel(in_language(label_of(runs, name), language))
        axes.set_xlabel(in_language(STEP, language))
        axes.spines[["top", "right"]].set_visible(False)
        drawn = []
        for number, run in enumerate(runs):
            for tag in tags:
                steps, values = run.series(tag)
                if name in PANELS:
                    values = [PANELS[name].shown(value) for value in values]
                split = split_of(tag)
                colour, width, marker = STYLES.get(split, STYLES["other"])
                line = "-"
                label = in_language(SPLITS.get(split, split), language)
                if len(runs) > 1:
                    colour = COLOURS[number % len(COLOURS)]
                    line = DASHES[number // len(COLOURS) % len(DASHES)]
                    if len(tags) > 1:
                        line = LINES.get(split, "-")
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
        if is_crowded:
            figure.legend(loc="outside lower left", ncols=2)
        elif len(tags) > 1 or len(runs) > 1:
            axes.legend()
    return figure


def split_of(tag: str) -> str:
    """The split that a curve is of, as a key of STYLES."""
    if "smoothed" in tag:
        return "smoothed"
    return tag.partition("/")[0]


def choose_scale(axes, values: list[float]) -> None:
    """A logarithmic scale if values are positive and differ much."""
    low, high = min(values, default=0), max(values, default=0)
    if low <= 0 or high / low <= WIDE_RANGE:
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def hardware(run: RunFiles, language: str) -> Figure | None:
    """Utilisation, memory, power and temperature of GPU and CPU over the steps."""
    tags = [f"{device}/{name}" for device in ("gpu", "cpu") for name in QUANTITIES]
    tags = [tag for tag in tags if run.series(tag)[1]]
    if not tags:
        return None
    with matplotlib.rc_context({**STYLE, "font.family": families(run.name)}):
        figure = Figure(figsize=(WIDTH, 1.3 * len(tags) + 0.7))
        for axes, tag in zip(figure.subplots(len(tags), sharex=True, squeeze=False)[:, 0], tags):
            device, name = tag.split("/")
            steps, values = run.series(tag)
            colour = COLOURS[2] if device == "gpu" else COLOURS[0]
            axes.fill_between(steps, values, color=colour, alpha=0.25, linewidth=0)
            marker = "." if len(values) < 3 else ""
            axes.plot(steps, values, color=colour, linewidth=1.2, marker=marker)
            top = 100 if tag == "gpu/utilisation_percent" else 1.15 * max(values)
            axes.set_ylim(0, max(top, 1e-6))
            title = f"{device.upper()} {in_language(QUANTITIES[name], language)}"
            axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel(in_language(STEP, language))
    return figure
