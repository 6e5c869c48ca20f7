"""The handout's comparison: every technique on this machine with the same amount of data.

    python -m labs.gpt.compare                              # sharding pays: a wide model
    python -m labs.gpt.compare --preset deep                  # recomputation pays: a deep model
    python -m labs.gpt.compare --preset 124m --processes 1    # on a GPU
    python -m labs.gpt.compare --preset 1.6b --processes 4

Each row is a run in processes of its own, on random ids. The table grows with each row that ends,
in runs/compare-SIZE-PRECISION-CARD/. Started again, the command runs all rows again.
"""

from dataclasses import dataclass
from typing import NamedTuple

from engine.config import flag, parse_flags
from engine.errors import run_script


@dataclass
class Config:
    """Every setting of the table."""

    preset: str = flag(
        "wide", "preset of labs.gpt (toy|mini|wide|deep|124m|355m|774m|1.5b|1.6b)", "Table"
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
    Row("data × pipe", 4, "--pipe 2"),
    Row("pipe, 1F1B", 4, "--pipe 4"),
]
HEAD = (
    "technique",
    "processes",
    "tokens/s",
    "step",
    "TFLOP/s",
    "of measured peak",
    "memory a rank",
    "loss",
)


def cells_of(row: Row, outcome: dict) -> list:
    """The row's cells from what `Table.train` returned."""
    name = f"{row.name}<br>`{row.flags}`" if row.flags else row.name
    if "failed" in outcome:
        cells = [name, row.processes, outcome["failed"]]
        return cells + [""] * (len(HEAD) - len(cells))
    return [
        name,
        row.processes,
        f"{outcome['tokens_per_second']:,.0f}",
        f"{outcome['step_seconds'] * 1000:,.0f} ms",
        f"{outcome['tflops']:.3g}",
        f"{outcome['share_of_peak']:.1%}",
        f"{max(outcome['peak_gib']):.2f} GiB",
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
        f"{config.preset}: {sizes.parameters:,} parameters, {sizes.flops_per_token():,.0f} FLOPs per "
        f"training token; each row {config.max_steps} steps of {batch_size} × {sizes.seq_length} tokens; "
        f"{config.precision} where a row names no other"
    )
    table = Table("compare", config.preset, config.precision, HEAD, about)
    table.log("data: random ids, not text: compare speed and memory; the losses only agree")
    flags = ["--preset", config.preset, "--precision", config.precision]
    flags += ["--batch_size", str(config.batch_size), "--max_steps", str(config.max_steps)]
    flags += ["--eval_every", str(config.max_steps), "--keep", "0"]
    for row in ROWS:
        if row.processes > most or ("fp16" in row.flags and not gpus):
            continue
        # The row's flags come last: they replace those of all rows.
        row_flags = [*flags, *row.flags.split()]
        if "--pipe" in row_flags and config.precision == "fp16":
            row_flags += ["--precision", "fp32"]  # a pipeline has no loss scaler
        outcome = table.train(row_flags, row.processes)
        table.add(cells_of(row, outcome), outcome)
    table.log(f"table: {table.folder / 'table.md'}")


if __name__ == "__main__":
    run_script(lambda: main(config))
