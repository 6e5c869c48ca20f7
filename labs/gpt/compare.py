"""The handout's comparison: every technique on this machine with the same amount of data.

    python -m labs.gpt.compare                              # sharding pays: a wide model
    python -m labs.gpt.compare --size deep                  # recomputation pays: a deep model
    python -m labs.gpt.compare --size 124m --processes 1    # on a GPU
    python -m labs.gpt.compare --size 1.6b --processes 4

Each row is a run in processes of its own. A finished row is not repeated: after an interruption the
same command continues. The table is in runs/compare-SIZE-CARD/: table.md, table.json, table.png.
docs/gpt.md explains the techniques.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine.config import flag, parse_flags
from engine.errors import run_script
from engine.telemetry import Log
from labs.gpt.rows import run_row


@dataclass
class Config:
    """Every setting of the table."""

    size: str = flag("wide", "preset of labs.gpt (toy|mini|wide|deep|124m|355m|774m|1.6b)", "Table")
    data: str = flag("random", "text file or folder, or random ids", "Table")
    batch_size: int = flag(
        0, "sequences per step, of all processes together; 0: the preset's", "Table", min=0
    )
    steps: int = flag(8, "steps of each row", "Table", min=5)
    processes: int = flag(
        0, "most processes; 0: the GPUs of this machine, or 4 on a CPU", "Table", min=0, max=64
    )
    precision: str = flag("fp32", "where a row names none (fp32|bf16|fp16)", "Table")
    minutes: float = flag(10.0, "time limit of a row", "Table", above=0)
    folder: str = flag("", "folder of the table; default: runs/compare-SIZE-CARD", "Table")


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
    Row("chunked loss", 1, "--chunked_loss"),
    Row("torch.compile", 1, "--compile"),
    Row("offload optimizer", 1, "--offload optimizer"),
    Row("offload parameters", 1, "--data_parallel zero3 --offload parameters"),
    Row("DDP", 2, ""),
    Row("ZeRO-1", 2, "--data_parallel zero1"),
    Row("FSDP2, ZeRO-2", 2, "--data_parallel zero2"),
    Row("FSDP2, ZeRO-3", 2, "--data_parallel zero3"),
    Row("tensor", 2, "--tensor 2"),
    Row("pipe, GPipe", 2, "--pipe 2 --schedule gpipe"),
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
    "communication",
    "loss",
)


def table(rows: list[Row], outcomes: list[dict]) -> str:
    """Markdown; `outcomes` in the order of the rows: {"failed": why} or the figures."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for row, outcome in zip(rows, outcomes):
        name = f"{row.name}<br>`{row.flags}`" if row.flags else row.name
        if "failed" in outcome:
            cells = [name, row.processes, outcome["failed"].replace("|", "/")]
            cells += [""] * (len(HEAD) - len(cells))
        else:
            communication = outcome["communication_share"]
            cells = [
                name,
                row.processes,
                f"{outcome['tokens_per_second']:,.0f}",
                f"{outcome['step_seconds'] * 1000:,.0f} ms",
                f"{outcome['tflops']:.3g}",
                f"{outcome['share_of_peak']:.1%}",
                f"{max(outcome['peak_gib']):.2f} GiB",
                "–" if communication is None else f"{communication:.0%}",
                f"{outcome['loss']:.4f}",
            ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[Row], outcomes: list[dict], path: Path) -> None:
    """Speed and memory, a bar for each row that succeeded."""
    from matplotlib.figure import Figure

    shown = [pair for pair in zip(rows, outcomes) if "failed" not in pair[1]][::-1]
    if not shown:
        return
    names = [f"{row.name} ({row.processes})" for row, _ in shown]
    figure = Figure(figsize=(11, 0.35 * len(shown) + 1.2), layout="constrained")
    speed, memory = figure.subplots(1, 2, sharey=True)
    speed.barh(names, [outcome["tokens_per_second"] for _, outcome in shown])
    speed.set_xlabel("tokens/s")
    memory.barh(names, [max(outcome["peak_gib"]) for _, outcome in shown], color="tab:orange")
    memory.set_xlabel("peak memory of the fullest rank, GiB")
    figure.savefig(path, dpi=100)


def main(config: Config) -> None:
    """Run the rows that are missing, and write the table after each one."""
    import torch

    gpus = torch.cuda.device_count()
    most = config.processes or gpus or 4
    card = torch.cuda.get_device_name().replace(" ", "-") if gpus else "cpu"
    folder = Path(config.folder or f"runs/compare-{config.size}-{card}")
    folder.mkdir(parents=True, exist_ok=True)
    log = Log()
    if config.data == "random":
        log("data: random ids, not text: compare speed and memory; the losses only agree")
    common = ["--size", config.size, "--data", config.data, "--precision", config.precision]
    common += ["--batch_size", config.batch_size, "--max_steps", config.steps]
    common += ["--eval_every", config.steps, "--keep", 0, "--trace"]
    rows = [row for row in ROWS if row.processes <= most and (gpus or "fp16" not in row.flags)]
    outcomes = []
    for number, row in enumerate(rows):
        # The row's flags come last: they replace common ones.
        flags = [*map(str, common), *row.flags.split()]
        outcome = run_row(flags, row.processes, folder / f"row-{number}", config.minutes)
        outcomes.append(outcome)
        if "failed" in outcome:
            figures = outcome["failed"]
        else:
            figures = f"{outcome['tokens_per_second']:,.0f} tokens/s, "
            figures += f"{max(outcome['peak_gib']):.2f} GiB"
        log(f"{row.name:20} {row.processes}  {figures}")
        (folder / "table.md").write_text(table(rows, outcomes), encoding="utf-8")
        named = [{**row._asdict(), **outcome} for row, outcome in zip(rows, outcomes)]
        text = json.dumps(named, indent=2, ensure_ascii=False) + "\n"
        (folder / "table.json").write_text(text, encoding="utf-8")
    draw(rows, outcomes, folder / "table.png")
    log(f"table: {folder / 'table.md'}")


if __name__ == "__main__":
    config = parse_flags(Config, "compare all techniques; finished rows are not repeated")
    run_script(lambda: main(config))
