"""The handout's comparison: every technique on this machine with the same amount of data.

    python -m labs.gpt.compare                              # sharding pays: a wide model
    python -m labs.gpt.compare --preset deep                # recomputation pays: a deep model
    python -m labs.gpt.compare --preset 124m --processes 1  # on a GPU
    python -m labs.gpt.compare --preset 1.6b --processes 4

Each row is a run in processes of its own, on random ids. The table and its two pictures, the memory
and the losses, grow with each row that ends, in runs/compare-PRESET-PRECISION-CARD/. Started again,
the command runs all rows again.
"""

from dataclasses import dataclass
from typing import NamedTuple

from engine.config import flag, parse_flags
from engine.errors import run_script


@dataclass
class Config:
    """Every setting of the table."""

    preset: str = flag(
        "wide", "sizes of labs.gpt (toy|mini|wide|deep|124m|355m|774m|1.5b|1.6b)", "Table"
    )
    batch_size: int = flag(
        0, "sequences per step, of all processes together; 0: the preset's", "Table", min=0
    )
    max_steps: int = flag(8, "steps of each row", "Table", min=5)
    processes: int = flag(
        0, "most processes; 0: the GPUs of this machine, or its cores", "Table", min=0, max=64
    )
    precision: str = flag("fp32", "where a row names none (fp32|bf16|fp16)", "Table")


if __name__ == "__main__":
    config = parse_flags(Config, "compare all techniques")

import torch

from engine.devices import choose_device
from engine.meters import cores
from engine.precision import choose_precision
from labs.gpt import pictures
from labs.gpt.measure import percent
from labs.gpt.rows import Table
from labs.gpt.sizes import PRESETS


class Row(NamedTuple):
    """One run of the table."""

    name: str
    processes: int
    flags: str


ROWS = [
    Row("one process", 1, ""),
    Row("Hugging Face", 1, "--model hf"),
    Row("bf16", 1, "--precision bf16"),
    Row("fp16 + loss scaling", 1, "--precision fp16"),  # on a GPU only
    Row("accumulate 4", 1, "--accumulate 4"),
    Row("recompute", 1, "--recompute"),
    Row("torch.compile", 1, "--compile"),
    Row("offload", 1, "--data_parallel zero3 --offload"),
    Row("DDP", 2, ""),
    Row("ZeRO-1", 2, "--data_parallel zero1"),
    Row("FSDP2, ZeRO-2", 2, "--data_parallel zero2"),
    Row("FSDP2, ZeRO-3", 2, "--data_parallel zero3"),
    Row("tensor", 2, "--tensor 2"),
    Row("pipe, 1F1B", 2, "--pipe 2"),
    Row("DDP", 4, ""),
    Row("FSDP2 × tensor", 4, "--data_parallel zero3 --tensor 2"),
    Row("FSDP2 × pipe", 4, "--data_parallel zero3 --pipe 2"),
    Row("tensor × pipe", 4, "--tensor 2 --pipe 2"),
    Row("pipe, 1F1B", 4, "--pipe 4"),
]
HEAD = (
    "technique",
    "processes",
    "tokens/s",
    "× row 1",
    "× DDP",
    "CPU time a step",
    "TFLOP/s",
    "of measured peak",
    "memory a rank",
    "× row 1",
    "loss",
)
ABOUT_COLUMNS = (
    "× row 1: against one process, which uses all cores of a CPU but only one of several GPUs. "
    "× DDP: against DDP with as many processes, which shows what a technique costs. CPU time: of "
    "all processes together, for a step; it hardly depends on other programs."
)


def times(value: float, base: float | None) -> str:
    """A value as a multiple of another row's; "–" if that row failed or is not there."""
    return f"{value / base:.2f}" if base else "–"


def cells_of(row: Row, outcome: dict, before: list[tuple[Row, dict]]) -> list:
    """The row's cells from what `Table.train` returned; `before`: the rows above it."""
    name = f"{row.name}<br>`{row.flags}`" if row.flags else row.name
    if "failed" in outcome:
        cells = [name, row.processes, outcome["failed"]]
        return cells + [""] * (len(HEAD) - len(cells))
    first, ddp = {}, {}  # the outcomes of row 1, and of DDP with as many processes
    for other, result in [*before, (row, outcome)]:
        if other == ROWS[0]:
            first = result
        if other.name == "DDP" and other.processes == row.processes:
            ddp = result
    speed, memory = outcome["tokens_per_second"], max(outcome["peak_gib"])
    cpu_time = "–"
    if outcome["device"] == "cpu":
        cpu_time = f"{outcome['cpu_seconds_per_step']:.2f} s"
    return [
        name,
        row.processes,
        f"{speed:,.0f}",
        times(speed, first.get("tokens_per_second")),
        times(speed, ddp.get("tokens_per_second")),
        cpu_time,
        f"{outcome['tflops']:.3g}",
        percent(outcome["share_of_peak"]),
        f"{memory:.2f} GiB",
        times(memory, max(first.get("peak_gib", [0.0]))),
        f"{outcome['loss']:.4f}",
    ]


def main(config: Config) -> None:
    """Run every row that this machine has processes for, and write the table after each one."""
    # A format that this machine lacks is refused now, not in every row.
    choose_precision(choose_device("auto", 0), config.precision, training=True)
    gpus = torch.cuda.device_count()
    most = config.processes or gpus or cores()
    sizes = PRESETS[config.preset]
    batch_size = config.batch_size or sizes.batch_size
    about = (
        f"{ABOUT_COLUMNS} {config.preset}: {sizes.parameters:,} parameters, "
        f"{sizes.flops_per_token():,.0f} FLOPs per training token; each row {config.max_steps} "
        f"steps of {batch_size} × {sizes.seq_length} tokens; {config.precision} where a row names "
        "no other"
    )
    table = Table("compare", config.preset, config.precision, HEAD, about)
    table.log("data: random ids, not text: compare speed and memory; the losses only agree")
    flags = ["--preset", config.preset, "--precision", config.precision]
    flags += ["--batch_size", str(config.batch_size), "--max_steps", str(config.max_steps)]
    flags += ["--eval_every", str(config.max_steps), "--log_every", "1", "--keep", "0"]
    rows: list[tuple[Row, dict]] = []
    for row in ROWS:
        if row.processes > most or ("fp16" in row.flags and not gpus):
            continue
        # The row's flags come last: they replace those of all rows.
        outcome = table.train([*flags, *row.flags.split()], row.processes)
        table.add(cells_of(row, outcome, rows), outcome)
        rows.append((row, outcome))
        names = [f"{other.name}, {other.processes}" for other, _ in rows]
        pictures.draw_memory(names, [outcome for _, outcome in rows], table.folder / "memory.png")
        pictures.draw_losses(names, table.row_folders(), table.folder / "losses.png")
    table.log(f"table: {table.folder / 'table.md'}; pictures: memory.png, losses.png beside it")


if __name__ == "__main__":
    run_script(lambda: main(config))
