"""Contestants take turns (A B C, A B C, …), so that a slow minute of the machine hits all of them.

    rows = measure("title", ["plain", "fast"], turn, "tokens_per_second", rounds=3)

prints every turn and a table of medians. `add_rows` adds them to a table of docs/results/, from
which `python -m tools.results` makes a page.

Tokens are counted alike for all contestants: a sentence of n tokens counts n + 1 on either side,
because the model also reads or predicts its end token. Padding never counts.
"""

import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from engine.config import command
from engine.devices import cpuinfo
from engine.environment import commit, cpu_name
from engine.errors import UserError
from engine.files import atomic_write
from engine.tables import markdown_table

ROOT = Path(__file__).resolve().parents[1]
# /proc/cpuinfo's name, English, Chinese; the first that a CPU has
INSTRUCTIONS = (
    ("amx_bf16", "AMX", "AMX"),
    ("avx512f", "AVX-512", "AVX-512"),
    ("avx2", "AVX2 only", "仅 AVX2"),
)
Figures = dict[str, float]


@dataclass
class Row:
    """All turns of one contestant."""

    contestant: str
    figures: Figures  # medians
    least: float  # of the figure that is compared
    most: float
    turns: int
    ratio: float | None  # its median over the baseline's


def measure(
    title: str,
    names: Iterable[str],
    turn: Callable[[str], Figures | None],
    figure: str,
    rounds: int,
    baseline: str = "",
) -> list[Row]:
    """Take `rounds` turns of every contestant and print a table of `figure`.

    `turn(name)` returns the figures of one turn, or None if the contestant cannot take part.
    """
    load = os.getloadavg()[0]
    print(f"{title}\n{describe_machine()}; load {load:.1f}", flush=True)
    names = list(names)
    turns: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(1, rounds + 1):
        for name in list(names):
            figures = turn(name)
            if figures is None:
                names.remove(name)
                continue
            turns[name].append(figures)
            line = "  ".join(f"{key} {shown(value)}" for key, value in figures.items())
            print(f"round {number}  {name}: {line}", flush=True)
    rows = compare(turns, figure, baseline)
    if not rows:
        raise UserError("no contestant could be measured")
    print(f"\n{title}: {figure}\n{as_table(rows, figure)}", flush=True)
    return rows


def compare(turns: dict[str, list[Figures]], figure: str, baseline: str = "") -> list[Row]:
    """The turns of each contestant in one row, and its ratio to the baseline."""
    rows = []
    for name, all_figures in turns.items():
        if not all_figures:
            continue
        medians = {
            key: statistics.median(figures[key] for figures in all_figures)
            for key in all_figures[0]
        }
        values = [figures[figure] for figures in all_figures]
        rows.append(Row(name, medians, min(values), max(values), len(values), None))
    bases = [row.figures[figure] for row in rows if row.contestant == baseline]
    for row in rows:
        row.ratio = row.figures[figure] / bases[0] if bases else None
    return rows


def as_table(rows: list[Row], figure: str) -> str:
    """One line for each contestant, in Markdown."""
    more = list(dict.fromkeys(key for row in rows for key in row.figures if key != figure))
    cells = [["contestant", "median", "least", "most", "ratio", "turns", *more]]
    for row in rows:
        values = [shown(value) for value in (row.figures[figure], row.least, row.most)]
        ratio = f"{row.ratio:.2f}" if row.ratio else ""
        others = [shown(row.figures[key]) if key in row.figures else "" for key in more]
        cells.append([row.contestant, *values, ratio, f"{row.turns}", *others])
    return markdown_table(cells, padded=True)


def shown(value: float) -> str:
    """12,345 or 12.35"""
    return f"{value:,.4g}" if abs(value) < 100 else f"{value:,.0f}"


# ---------------------------------------------------------------- rows for the pages


def check_table(path: str, keys: Iterable[str]) -> None:
    """Raise `UserError` now, before hours of measuring, if `add_rows` could not add such rows."""
    if not path or not Path(path).exists():
        return
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
        columns = [key for key, _, _ in table["columns"]]
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(
            f"--json {path} is not a table like those in docs/results/; choose another file"
        ) from None
    if columns != list(keys):
        raise UserError(
            f"--json {path} has the columns {', '.join(columns)}, not {', '.join(keys)}; "
            "choose another file"
        )


def add_rows(path: str, rows: list[dict]) -> None:
    """Add rows and this command to a table in the form of docs/results/; "": to none.

    A new file gets their keys as columns; its title, text and notes are left to the author.
    """
    if not path:
        return
    file = Path(path)
    if file.exists():
        table = json.loads(file.read_text(encoding="utf-8"))
    else:
        nothing: dict = {"en": [], "zh": []}
        columns = [[key, key, key] for key in rows[0]]
        table = {"title": {"en": file.stem, "zh": file.stem}, "text": nothing, "commands": []}
        table |= {"columns": columns, "rows": [], "notes": nothing}
    line = f"{command()} {shlex.join(sys.argv[1:])}".strip()
    if line not in table["commands"]:
        table["commands"].append(line)
    table["rows"] += rows
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, json.dumps(table, indent=1, ensure_ascii=False) + "\n")


# ---------------------------------------------------------------- the machine


def hardware(threads: int, device: str = "cpu") -> dict[str, str]:
    """What the figures depend on, for a table: "2 cores, AMD EPYC (AVX2 only)"."""
    if device != "cpu":
        name = torch.cuda.get_device_name(device)
        return {"en": name, "zh": name}
    words = cpuinfo().partition("\n\n")[0].split()
    known = [(english, chinese) for flag, english, chinese in INSTRUCTIONS if flag in words]
    english, chinese = known[0] if known else ("", "")
    cores = "1 core" if threads == 1 else f"{threads} cores"
    return {
        "en": f"{cores}, {cpu_name()}" + (f" ({english})" if english else ""),
        "zh": f"{threads} 核，{cpu_name()}" + (f"（{chinese}）" if chinese else ""),
    }


def describe_machine() -> str:
    """CPU, its cores, PyTorch and commit in one line."""
    facts = [hardware(os.cpu_count() or 1)["en"], f"torch {torch.__version__}"]
    if commit():
        facts.append(commit())
    return "; ".join(facts)


def in_new_process(function: Callable, *arguments):
    """The result of the function, called in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
