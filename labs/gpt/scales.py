"""The handout's table of scales: the largest models that one and two cards can train.

    python -m labs.gpt.scales --data wos/                          # on the GPUs of this machine
    python -m labs.gpt.scales --data wos/ --memory_gib 0.5         # on a CPU: "cards" of 0.5 GiB

The planner finds the deepest model of each scale. A scale that this machine can hold is trained;
one that needs more cards or memory is a row with the planner's figures, marked "planned". The
handout leaves scales 3 and 4 open: here they are two cards with every technique, and the 1.6B model
of the handout on simple networks on four cards. The table grows with each row that ends, in
runs/scales-SIZE-PRECISION-CARD/. Started again, the command runs all rows again.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine.config import flag, parse_flags
from engine.errors import run_script


@dataclass
class Config:
    """Every setting of the table."""

    data: str = flag("random", "text file or folder; random ids show no learning", "Scales")
    preset: str = flag(
        "", "preset for width and sequence; default: 1.6b, on a CPU mini (mini|124m|1.6b)", "Scales"
    )
    memory_gib: float = flag(
        0.0,
        "memory of a card; 0: its free memory less 1 GiB, or 0.25 on a CPU",
        "Scales",
        min=0,
        max=2**12,
    )
    max_steps: int = flag(300, "steps of each row", "Scales", min=5)
    precision: str = flag("auto", "of matrix products (auto|fp32|bf16|fp16)", "Scales")


if __name__ == "__main__":
    config = parse_flags(Config, "train each scale of the handout that this machine can hold")

import math

import torch

from engine import distributed
from engine.memory import GIB
from engine.precision import choose_precision
from labs.gpt import plan
from labs.gpt.__main__ import SUCCESS_BELOW, resolved, sizes_of
from labs.gpt.__main__ import Config as TrainConfig
from labs.gpt.data import read_documents
from labs.gpt.rows import Table

HEAD = (
    "scale",
    "cards",
    "width",
    "heads",
    "layers",
    "sequence",
    "vocabulary",
    "parameters",
    "batch",
    "learning rate",
    "steps",
    "memory a card",
    "minutes",
    "final loss",
    "loss < 7",
)


class Scale(NamedTuple):
    """A row; where `settings` has no number of layers, it is the deepest model that fits."""

    name: str
    cards: int
    settings: dict


EVERY_TECHNIQUE = {"data_parallel": "zero3", "recompute": True}
SCALES = [
    Scale("1: one card", 1, {}),
    Scale("2: two cards, naive data parallel", 2, {}),
    # Without micro-batches one card computes while the other waits.
    Scale("2: two cards, naive pipeline", 2, {"pipe": 2, "accumulate": 1}),
    Scale("3: two cards, ZeRO-3 + recomputation", 2, EVERY_TECHNIQUE),
    Scale(
        "4: the handout's 1.6B model", 4, {**EVERY_TECHNIQUE, "preset": "1.6b", "num_layers": 48}
    ),
]


def plan_scale(
    scale: Scale, config: Config, precision: str, device_type: str
) -> tuple[dict, float]:
    """The settings of a row, its number of layers among them, and the GiB it needs on a card."""
    settings = {"preset": config.preset, "data": config.data, "precision": precision}
    settings |= {"max_steps": config.max_steps, "memory_gib": config.memory_gib, "keep": 0}
    settings |= scale.settings
    training = resolved(TrainConfig(**settings), scale.cards)
    if "num_layers" not in settings:
        sizes = sizes_of(training)
        deepest = plan.most_layers(training, sizes, scale.cards, config.memory_gib, device_type)
        training.num_layers = max(deepest, training.pipe)  # planned even if no depth fits
        settings["num_layers"] = training.num_layers
    need = plan.memory(training, sizes_of(training), scale.cards, device_type)
    return settings, need.total / GIB


def cells_of(scale: Scale, settings: dict, need_gib: float, outcome: dict) -> list:
    """The cells of a row."""
    sizes = sizes_of(TrainConfig(**settings))
    cells = [
        scale.name,
        scale.cards,
        sizes.d_model,
        sizes.nhead,
        sizes.num_layers,
        sizes.seq_length,
        # A small text may have fewer tokens than the preset's vocabulary.
        f"{outcome.get('vocab_size', sizes.vocab_size):,}",
        f"{outcome.get('parameters', sizes.parameters):,}",
        sizes.batch_size,
        f"{sizes.lr:g}",
        settings["max_steps"],
    ]
    planned = f"{need_gib:.2f} GiB planned"
    if "planned" in outcome:
        return [*cells, planned, "planned", outcome["planned"], "–"]
    if "failed" in outcome:
        return [*cells, planned, outcome["failed"], "", "–"]
    reached = "yes" if outcome["loss"] < SUCCESS_BELOW else "no"
    if outcome["data"] == "random ids":
        reached = "– (random ids)"
    elif math.log(outcome["vocab_size"]) < SUCCESS_BELOW:
        reached = "– (a guess passes)"
    cells += [f"{max(outcome['peak_gib']):.2f} GiB", f"{outcome['minutes']:.1f}"]
    return [*cells, f"{outcome['loss']:.2f}", reached]


def main(config: Config) -> None:
    """Plan every scale, train those that fit, and write the table after each one."""
    device = distributed.init("auto").device
    on_gpu = device.type == "cuda"
    precision = choose_precision(device, config.precision, training=True).name
    cards = torch.cuda.device_count() if on_gpu else 2
    if not config.memory_gib:
        config.memory_gib = 0.25
        if on_gpu:
            config.memory_gib = torch.cuda.mem_get_info()[0] / GIB - 1
    if not config.preset:
        config.preset = "1.6b" if on_gpu else "mini"
    if config.data != "random":
        read_documents(Path(config.data).expanduser())  # wrong data fail now, not in every row
    about = f"{config.max_steps} steps, {precision}, {config.memory_gib:.2f} GiB per card"
    table = Table("scales", config.preset, precision, HEAD, about)
    table.log(f"{cards} card(s) of {config.memory_gib:.2f} GiB, {precision}")
    if config.data == "random":
        table.log("data: random ids, not text: no row can show learning; name a text with --data")
    for scale in SCALES:
        settings, need_gib = plan_scale(scale, config, precision, device.type)
        if scale.cards > cards:
            outcome = {"planned": f"needs {scale.cards} cards"}
        elif need_gib > config.memory_gib:
            outcome = {"planned": f"does not fit in {config.memory_gib:.2f} GiB"}
        else:
            flags = [f"--{name}={value}" for name, value in settings.items()]
            outcome = table.train(flags, scale.cards)
        table.add(cells_of(scale, settings, need_gib, outcome), outcome)
    table.log(f"table: {table.folder / 'table.md'}")


if __name__ == "__main__":
    run_script(lambda: main(config))
