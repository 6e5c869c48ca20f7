"""Compare contestants that take turns (A B C, A B C, …): a slow minute of the machine hits all.

    rows = measure("title", ["plain", "fast"], config, turn, figure="tokens_per_second")

prints every turn and a table of medians, and writes all turns to the file `config.out`.

Tokens are counted alike for all contestants: a sentence of n tokens counts n + 1 on either side,
because the model also reads or predicts its end token. Padding never counts.
"""

import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from engine.files import atomic_write
from engine.memory import GIB

ROOT = Path(__file__).resolve().parents[1]
QUIET = 0.05  # a turn is disturbed if other processes keep more cores than this busy


@dataclass
class Run:
    """One turn of one contestant."""

    contestant: str
    round: int
    figures: dict[str, float]
    seconds: float  # of the turn, loading included
    others: float | None = None  # cores that other processes kept busy; None: unknown

    @property
    def disturbed(self) -> bool:
        """Whether other processes kept the machine busy."""
        return self.others is not None and self.others > QUIET

    def __str__(self) -> str:
        figures = "  ".join(f"{name} {shown(value)}" for name, value in self.figures.items())
        line = f"round {self.round}  {self.contestant}: {figures}  ({self.seconds:.0f} s)"
        if self.others is not None:
            line += f"  [others {self.others:.2f} cores]"
        if self.disturbed:
            line += " DISTURBED"
        return line


@dataclass
class Row:
    """All turns of one contestant."""

    contestant: str
    median: float
    least: float
    most: float
    runs: int
    disturbed: int
    more: dict[str, float]  # medians of the other figures
    ratio: float | None = None  # the median over the baseline's median


def measure(
    title: str,
    names: Iterable[str],
    config,
    turn: Callable[[str], dict[str, float] | None],
    figure: str,
    baseline: str = "",
) -> list[Row]:
    """Take `config.rounds` turns of every contestant and print a table of `figure`.

    `turn(name)` returns the figures of one turn, or None if the contestant cannot take part.
    """
    print(f"{title}\n{describe_machine()}", flush=True)
    names = list(names)
    runs = []
    for number in range(1, config.rounds + 1):
        for name in list(names):
            before = seconds_of_others()
            begun = time.perf_counter()
            figures = turn(name)
            seconds = time.perf_counter() - begun
            if figures is None:
                names.remove(name)
                continue
            run = Run(name, number, figures, seconds)
            if before is not None:
                run.others = max(0.0, seconds_of_others() - before) / seconds
            runs.append(run)
            print(run, flush=True)
    write_json(ROOT / config.out, runs, title=title, settings=asdict(config))
    rows = compare(runs, figure, baseline)
    print_table(rows, f"{title}: {figure}")
    return rows


def in_new_process(function: Callable, *arguments):
    """The result of the function, called in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def seconds_of_others() -> float | None:
    """CPU seconds since the machine was started, less those of this process and its children.

    None without /proc.
    """
    # user nice system idle iowait irq softirq steal, in clock ticks; see proc(5)
    ticks = [int(word) for word in read("/proc/stat").partition("\n")[0].split()[1:9]]
    if not ticks:
        return None
    idle = sum(ticks[3:5])
    busy = (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])


def tokens_of(sentences: Iterable) -> int:
    """Tokens of sentences that are given without begin and end; their ends count."""
    return sum(len(sentence) + 1 for sentence in sentences)


def compare(runs: list[Run], figure: str, baseline: str = "") -> list[Row]:
    """The turns of each contestant in one row, and its ratio to the baseline."""
    rows = []
    for name in dict.fromkeys(run.contestant for run in runs if figure in run.figures):
        turns = [run for run in runs if run.contestant == name and figure in run.figures]
        medians = {
            key: statistics.median(turn.figures[key] for turn in turns)
            for key in turns[0].figures
            if all(key in turn.figures for turn in turns)
        }
        values = [turn.figures[figure] for turn in turns]
        median = medians.pop(figure)
        disturbed = sum(turn.disturbed for turn in turns)
        rows.append(Row(name, median, min(values), max(values), len(turns), disturbed, medians))
    bases = [row.median for row in rows if row.contestant == baseline]
    for row in rows:
        row.ratio = row.median / bases[0] if bases else None
    return rows


def print_table(rows: list[Row], title: str) -> None:
    """One line for each contestant."""
    more = list(dict.fromkeys(name for row in rows for name in row.more))
    cells = [["contestant", "median", "least", "most", "ratio", "runs", *more]]
    for row in rows:
        values = [shown(value) for value in (row.median, row.least, row.most)]
        ratio = f"{row.ratio:.2f}" if row.ratio else ""
        runs = f"{row.runs} ({row.disturbed} disturbed)" if row.disturbed else f"{row.runs}"
        others = [shown(row.more[name]) if name in row.more else "" for name in more]
        cells.append([row.contestant, *values, ratio, runs, *others])
    print(f"\n{title}\n{markdown(cells)}", flush=True)


def shown(value: float) -> str:
    """12,345 or 12.35"""
    return f"{value:,.4g}" if abs(value) < 100 else f"{value:,.0f}"


def markdown(cells: list[list[str]]) -> str:
    """A Markdown table with aligned columns; the first row is its head."""
    head, *body = cells
    cells = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for first, *others in cells:
        padded = [first.ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def write_json(path: Path | str, runs: list[Run], **facts) -> None:
    """Write all turns, the machine and further facts to one file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    content = {**facts, "machine": machine(), "runs": [asdict(run) for run in runs]}
    atomic_write(Path(path), json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path | str) -> list[Run]:
    """The turns of an earlier measurement; [] if there is none."""
    text = read(path)
    return [Run(**run) for run in json.loads(text)["runs"]] if text else []


def machine() -> dict:
    """What the figures depend on."""
    # Imported when called: the environment of a toolkit lacks what these modules need.
    from engine.distributed import World
    from engine.environment import environment

    cpu = read("/proc/cpuinfo").partition("\n\n")[0]
    extensions = re.findall(r"\b(?:avx2|avx512f|avx512_vnni|avx512_bf16|amx_bf16)\b", cpu)
    family = re.findall(r"(?m)^(?:cpu family|model)\s*: (\d+)", cpu)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return environment(World(0, 1, torch.device("cpu"))) | {
        "flags": sorted(set(extensions)),
        "family": "/".join(family),  # and model: the name of a virtual CPU is vague
        "memory_gib": round(memory, 1),
    }


def describe_machine() -> str:
    """`machine` in one line."""
    facts = machine()
    return (
        f"{facts['cpu']} ({facts['family']}), {facts['cores']} cores, {' '.join(facts['flags'])}; "
        f"{facts['memory_gib']} GiB; torch {facts['torch']}; commit {facts['commit']}"
    )


def read(path: Path | str) -> str:
    """The text of a file; empty if there is none, as /proc on other systems."""
    path = Path(path)
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def pinned(threads: int, pin: bool = True) -> dict[str, str]:
    """Environment variables for a child process with this number of compute threads.

    pin: bind each thread to a core.
    """
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if pin and hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))[:threads]
        variables["GOMP_CPU_AFFINITY"] = " ".join(map(str, cores))
    return variables
