"""Measure side by side: contestants take turns (A B C, A B C, …), so that a slow minute of the machine hits all alike.

    rows = measure("title", ["plain", "cached"], config, turn=lambda name: {"tokens_per_second": …}, figure="tokens_per_second")

prints every turn and a table of medians, and writes all turns to config.out.

Token accounting, the same for everybody: a sentence of n subwords counts as n + 1 tokens on either side (the end token, which
the model reads or has to predict), padding never counts.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch

from engine.errors import UserError
from engine.files import atomic_write
from engine.memory import GIB

ROOT = Path(__file__).resolve().parents[1]
QUIET = 0.05  # cores taken by others, from which on a run is marked as disturbed


@dataclass
class Run:
    """One contestant's turn."""

    contestant: str
    round: int
    figures: dict[str, float]
    seconds: float  # of the whole turn, loading included
    others: float | None = (
        None  # cores that other processes kept busy meanwhile, on average; None: not known here
    )

    @property
    def disturbed(self) -> bool:
        """Whether others kept the machine noticeably busy."""
        return self.others is not None and self.others > QUIET

    def __str__(self) -> str:
        figures = (f"{name} {shown(value)}" for name, value in self.figures.items())
        others = (
            ""
            if self.others is None
            else f"  [others {self.others:.2f} cores{', DISTURBED' * self.disturbed}]"
        )
        return f"round {self.round}  {self.contestant}: {'  '.join(figures)}  ({self.seconds:.0f} s){others}"


@dataclass
class Row:
    """What several turns of one contestant come to."""

    contestant: str
    median: float
    least: float
    most: float
    runs: int
    disturbed: int  # turns in which others took more than `QUIET` cores
    more: dict[str, float]  # medians of the other figures
    ratio: float | None = None  # the median over the baseline's median


def measure(
    title: str, names: Iterable[str], config, turn: Callable, figure: str, baseline=""
) -> list[Row]:
    """Everybody's turns, `config.rounds` of each, kept in the file `config.out`, then the table by one figure; → its rows.

    `turn(name)` returns figures, None if this one cannot take part.
    """
    print(f"{title}\n{describe_machine()}", flush=True)
    names, runs = list(names), []
    for number in range(1, config.rounds + 1):
        for name in list(names):
            begun, before = time.perf_counter(), others_seconds()
            figures = turn(name)
            seconds = time.perf_counter() - begun
            if figures is None:
                names.remove(name)
                continue
            others = None if before is None else max(0.0, others_seconds() - before) / seconds
            runs.append(Run(name, number, figures, seconds, others))
            print(runs[-1], flush=True)
    write_json(ROOT / config.out, runs, title=title, settings=asdict(config))
    rows = compare(runs, figure, baseline)
    print_table(rows, f"{title}: {figure}")
    return rows


def call(script: str, flags: dict, **environment: str) -> None:
    """Run one of the root's scripts; what it prints goes through. Raises `UserError` if it fails or a signal ends it."""
    words = [f"--{name}={value}" for name, value in flags.items()]
    with subprocess.Popen(
        [sys.executable, script, *words], cwd=ROOT, env=os.environ | environment
    ) as process:
        try:
            process.wait()
        except KeyboardInterrupt:  # train.py got it too, and saves what it has
            process.wait()
            raise
    log = read(Path(flags.get("run", flags.get("resume", "")), "train.log")).splitlines()
    if process.returncode or any("to resume:" in line for line in log[-1:]):
        raise UserError(f"{script} {' '.join(words)} did not end; its lines stand above")


def in_new_process(function: Callable, *arguments, **environment: str):
    """The function's result, from a process that has done nothing before and has these environment variables."""
    with (
        patch.dict(os.environ, environment),
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
    ):
        return pool.submit(function, *arguments).result()


def others_seconds() -> float | None:
    """CPU seconds that all but this process and its ended children took since the machine was started; None without /proc."""
    # user nice system idle iowait irq softirq steal, in clock ticks; what a hypervisor took away (steal) others took
    ticks = list(map(int, read("/proc/stat").partition("\n")[0].split()[1:9]))
    busy = (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4]) if ticks else None


def tokens_of(sentences: Iterable) -> int:
    """Tokens of sentences given without begin and end: the end token counts, padding does not."""
    return sum(len(sentence) + 1 for sentence in sentences)


def compare(runs: list[Run], figure: str, baseline: str = "") -> list[Row]:
    """Median, least and most of a figure for every contestant, in their order, and the ratio to the baseline's median."""
    rows, counted = [], [run for run in runs if figure in run.figures]
    for name in dict.fromkeys(run.contestant for run in counted):
        turns = [run for run in counted if run.contestant == name]
        known = [key for key in turns[0].figures if all(key in turn.figures for turn in turns)]
        medians = {key: statistics.median(turn.figures[key] for turn in turns) for key in known}
        values, disturbed = (
            [turn.figures[figure] for turn in turns],
            sum(turn.disturbed for turn in turns),
        )
        rows.append(
            Row(name, medians.pop(figure), min(values), max(values), len(turns), disturbed, medians)
        )
    base = next((row.median for row in rows if row.contestant == baseline), None)
    for row in rows:
        row.ratio = row.median / base if base else None
    return rows


def print_table(rows: list[Row], title: str) -> None:
    """The rows, a contestant each."""
    more = list(dict.fromkeys(name for row in rows for name in row.more))
    cells = [["contestant", "median", "least", "most", "ratio", "runs", *more]]
    for row in rows:
        ratio = f"{row.ratio:.2f}" if row.ratio else ""
        runs = f"{row.runs}" + f" ({row.disturbed} disturbed)" * (row.disturbed > 0)
        extra = (shown(row.more[name]) if name in row.more else "" for name in more)
        cells.append(
            [row.contestant, *map(shown, (row.median, row.least, row.most)), ratio, runs, *extra]
        )
    print(f"\n{title}\n{markdown(cells)}", flush=True)


def shown(value: float) -> str:
    """12,345 or 12.35"""
    return f"{value:,.{'4g' if abs(value) < 100 else '0f'}}"


def markdown(cells: list[list[str]]) -> str:
    """A table, its head first, as Markdown that reads well on a terminal too."""
    cells = [cells[0], ["---", *["---:"] * (len(cells[0]) - 1)], *cells[1:]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    padded = (
        [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])] for first, *others in cells
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def write_json(path: Path | str, runs: list[Run], **facts) -> None:
    """All turns, the machine and whatever else a reader must know, as one file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    content = {**facts, "machine": machine(), "runs": [asdict(run) for run in runs]}
    atomic_write(Path(path), json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path | str) -> list[Run]:
    """The turns of an earlier measurement; [] if there is none."""
    told = read(path)
    return [Run(**run) for run in json.loads(told)["runs"]] if told else []


def machine() -> dict:
    """What the figures depend on."""
    from engine.distributed import (
        World,
    )  # here, because a contestant's own environment has torch and numpy alone
    from engine.run import environment

    cpu = read("/proc/cpuinfo").partition("\n\n")[0]
    facts = {
        "flags": sorted(
            set(re.findall(r"\b(?:avx2|avx512f|avx512_vnni|avx512_bf16|amx_bf16)\b", cpu))
        )
    }
    facts["family"] = "/".join(
        re.findall(r"(?m)^(?:cpu family|model)\s*: (\d+)", cpu)
    )  # and model: names are vague
    facts["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1)
    return environment(World(0, 1, torch.device("cpu"))) | facts


def describe_machine() -> str:
    """The same as one line."""
    facts = machine()
    return (
        f"{facts['cpu']} ({facts['family']}), {facts['cores']} cores, {' '.join(facts['flags'])}; {facts['memory_gib']} GiB; "
        f"torch {facts['torch']}; commit {facts['commit']}"
    )


def read(path: Path | str) -> str:
    """A text; "" where there is no such file, as /proc on another system."""
    return Path(path).read_text(encoding="utf-8", errors="replace") if Path(path).exists() else ""


def pinned(threads: int, pin: bool = True) -> dict[str, str]:
    """Environment variables that give a child process so many compute threads, each bound to a core of its own."""
    count = str(threads)
    variables = {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
    }
    cores = (
        sorted(os.sched_getaffinity(0))[:threads]
        if pin and hasattr(os, "sched_getaffinity")
        else []
    )
    return variables | ({"GOMP_CPU_AFFINITY": " ".join(map(str, cores))} if cores else {})
