"""Measure side by side: contestants take turns (A B C, A B C, …), so that a slow minute of the machine hits all alike.

    runs = interleave(["plain", "cached"], rounds=3, run=lambda name: {"tokens_per_second": …})
    print_table(compare(runs, "tokens_per_second", baseline="plain"))
    write_json("runs/benchmarks/NAME.json", runs, title="…")

Token accounting, the same for everybody: a sentence of n subwords counts as n + 1 tokens on either side (the end token, which
the model reads or has to predict), padding never counts. `tokens_of` does it.
"""

import json
import os
import re
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch

from engine.config import write_whole

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
QUIET = 0.05  # cores taken by others, from which on a run is marked as disturbed


@dataclass
class Run:
    """One contestant's turn."""

    contestant: str
    round: int
    figures: dict[str, float]
    seconds: float  # of the whole turn, loading included
    others: float | None = None  # cores that other processes kept busy meanwhile, on average; None: not known here

    @property
    def disturbed(self) -> bool:
        """Whether others kept the machine noticeably busy."""
        return self.others is not None and self.others > QUIET


@dataclass
class Row:
    """What several turns of one contestant come to."""

    contestant: str
    median: float
    least: float
    most: float
    runs: int
    ratio: float | None = None  # the median over the baseline's median
    disturbed: int = 0  # turns in which others took more than `QUIET` cores
    more: dict[str, float] = field(default_factory=dict)  # medians of further figures


def interleave(contestants: Iterable[str], rounds: int, run: Callable[[str], dict | None], first: int = 1) -> list[Run]:
    """Give every contestant a turn, `rounds` times over. `run` returns the figures of a turn, None if it cannot take part."""
    runs, contestants = [], list(contestants)
    for number in range(first, first + rounds):
        for contestant in list(contestants):
            watch = OthersWatch()
            figures = run(contestant)
            if figures is None:
                contestants.remove(contestant)
                continue
            runs.append(Run(contestant, number, figures, *watch.stop()))
            print(describe_run(runs[-1]), flush=True)
    return runs


def take_turns(title: str, names: list[str], rounds: int, run: Callable, out: str, append=False, **facts) -> list[Run]:
    """Interleave, keep every turn in the file `out` (beside those of earlier calls with `append`), → all turns."""
    print(f"{title}\n{describe_machine()}", flush=True)
    out = ROOT / out
    earlier = read_json(out) if append else []
    first = 1 + max((run.round for run in earlier if run.contestant in names), default=0)
    runs = earlier + interleave(names, rounds, run, first)
    write_json(out, runs, title=title, **facts)
    return runs


def in_new_process(function: Callable, *arguments, **environment: str):
    """The function's result, from a process that has done nothing before and has these environment variables."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


def describe_run(run: Run) -> str:
    """One line while the measurement goes on."""
    numbers = {name: value for name, value in run.figures.items() if isinstance(value, int | float)}
    figures = "  ".join(f"{name} {value:,.{'4g' if abs(value) < 100 else '0f'}}" for name, value in numbers.items())
    others = "" if run.others is None else f"  [others {run.others:.2f} cores{', DISTURBED' * run.disturbed}]"
    return f"round {run.round}  {run.contestant}: {figures}  ({run.seconds:.0f} s){others}"


class OthersWatch:
    """How busy everybody else kept the machine between its making and `stop`: all CPU time but ours and our children's.

    Time that a hypervisor took away (steal) counts as somebody else's. Children count when they have ended.
    """

    def __init__(self):
        self.begun, self.busy, self.own = time.perf_counter(), busy_seconds(), own_seconds()

    def stop(self) -> tuple[float, float | None]:
        """→ (seconds since the start, cores of others or None where /proc/stat is missing)"""
        seconds = max(time.perf_counter() - self.begun, 1e-9)
        if self.busy is None:
            return seconds, None
        others = (busy_seconds() - self.busy) - (own_seconds() - self.own)
        return seconds, max(0.0, others / seconds)


def busy_seconds() -> float | None:
    """CPU seconds that this machine has not been idle since it was started, all cores together; None without /proc."""
    user_to_steal = list(map(int, read("/proc/stat").partition("\n")[0].split()[1:9]))
    # user nice system idle iowait irq softirq steal, in clock ticks
    return (sum(user_to_steal) - sum(user_to_steal[3:5])) / os.sysconf("SC_CLK_TCK") if user_to_steal else None


def own_seconds() -> float:
    """CPU seconds of this process and its ended children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def held_gib(which: str = "VmHWM") -> float:
    """Memory of this process: VmRSS now, VmHWM at most; nan where /proc is missing.

    Not getrusage's ru_maxrss: that counts what the parent process held, too.
    """
    held = re.search(rf"{which}:\s+(\d+)", read("/proc/self/status"))
    return int(held[1]) / 2**20 if held else float("nan")


def tokens_of(sentences: Iterable) -> int:
    """Tokens of sentences given without begin and end: the end token counts, padding does not."""
    return sum(len(sentence) + 1 for sentence in sentences)


def compare(runs: list[Run], figure: str, baseline: str = "", more: Iterable[str] = ()) -> list[Row]:
    """Median, least and most of a figure for every contestant, in their order, and the ratio to the baseline's median."""
    by_name = {}
    for run in runs:
        if figure in run.figures:
            by_name.setdefault(run.contestant, []).append(run)
    rows = []
    for name, turns in by_name.items():
        values = [turn.figures[figure] for turn in turns]
        told = [key for key in more if all(turn.figures.get(key) is not None for turn in turns)]
        known = {key: statistics.median(turn.figures[key] for turn in turns) for key in told}
        disturbed = sum(turn.disturbed for turn in turns)
        rows.append(Row(name, statistics.median(values), min(values), max(values), len(values), None, disturbed, known))
    base = next((row.median for row in rows if row.contestant == baseline), None)
    for row in rows:
        row.ratio = row.median / base if base else None
    return rows


def print_table(rows: list[Row], unit: str = "", decimals: int = 0) -> None:
    """The rows as a Markdown table, which reads well on a terminal too."""
    more = list(dict.fromkeys(name for row in rows for name in row.more))
    cells = [["contestant", f"median {unit}".strip(), "least", "most", "ratio", "runs", *more]]
    cells.append(["---", *["---:"] * (len(cells[0]) - 1)])
    for row in rows:
        figures = [f"{value:,.{decimals}f}" for value in (row.median, row.least, row.most)]
        runs = f"{row.runs}" + (f" ({row.disturbed} disturbed)" if row.disturbed else "")
        extra = [f"{row.more[name]:,.4g}" if name in row.more else "" for name in more]
        cells.append([row.contestant, *figures, f"{row.ratio:.2f}" if row.ratio else "", runs, *extra])
    widths = [max(map(len, column)) for column in zip(*cells)]
    for first, *others in cells:
        padded = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        print("| " + " | ".join(padded) + " |", flush=True)


def write_json(path: Path | str, runs: list[Run], **facts) -> None:
    """All turns, the machine and whatever else a reader must know, as one file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    content = {**facts, "machine": machine(), "runs": [asdict(run) for run in runs]}
    write_whole(Path(path), json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path | str) -> list[Run]:
    """The turns of an earlier measurement; [] if there is none."""
    if not Path(path).exists():
        return []
    return [Run(**run) for run in json.loads(Path(path).read_text(encoding="utf-8"))["runs"]]


def machine() -> dict:
    """What the figures depend on."""
    from engine.distributed import World  # here, because a contestant's own environment has torch and numpy alone
    from engine.environment import environment

    cpu = read("/proc/cpuinfo").partition("\n\n")[0]
    facts = {"flags": sorted(set(re.findall(r"\b(?:avx2|avx512f|avx512_vnni|avx512_bf16|amx_bf16)\b", cpu)))}
    facts["family"] = "/".join(re.findall(r"(?m)^(?:cpu family|model)\s*: (\d+)", cpu))  # and model: names are vague
    facts["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1)
    return environment(World(0, 1, torch.device("cpu"))) | facts


def describe_machine() -> str:
    """The same as one line."""
    facts = machine()
    return (f"{facts['cpu']} ({facts['family']}), {facts['cores']} cores, {' '.join(facts['flags'])}; {facts['memory_gib']} GiB; "
            f"torch {facts['torch']}; commit {facts['commit']}")  # fmt: skip


def read(path: str) -> str:
    """A file of /proc; "" where there is none."""
    return Path(path).read_text(encoding="utf-8", errors="replace") if Path(path).exists() else ""


def pinned(threads: int, pin: bool = True) -> dict[str, str]:
    """Environment variables that give a child process so many compute threads, each bound to a core of its own."""
    count = str(threads)
    variables = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false"}
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else []
    return variables | ({"GOMP_CPU_AFFINITY": " ".join(map(str, cores))} if pin and cores else {})
