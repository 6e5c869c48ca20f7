"""Measure side by side: contestants take turns (A B C, A B C, …), so that a slow minute of the machine hits all alike.

    runs = interleave(["plain", "cached"], rounds=3, run=lambda name: {"tokens_per_second": …})
    print_table(compare(runs, "tokens_per_second", baseline="plain"))
    write_json("runs/benchmarks/NAME.json", runs, title="…")

Token accounting, the same for everybody: a sentence of n subwords counts as n + 1 tokens on either side (the end token, which
the model reads or has to predict), padding never counts. `tokens_of` does it.
"""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

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
    figures = "  ".join(f"{name} {value:,.4g}" if abs(value) < 100 else f"{name} {value:,.0f}"
                        for name, value in run.figures.items() if isinstance(value, int | float))  # fmt: skip
    others = (
        "" if run.others is None else f"  [others {run.others:.2f} cores{', DISTURBED' if is_disturbed(run) else ''}]"
    )
    return f"round {run.round}  {run.contestant}: {figures}  ({run.seconds:.0f} s){others}"


def is_disturbed(run: Run) -> bool:
    """Whether others kept the machine noticeably busy during this turn."""
    return run.others is not None and run.others > QUIET


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
    """CPU seconds that this machine has not been idle since it was started, all cores together."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    user_to_steal = list(map(int, fields))  # user nice system idle iowait irq softirq steal, in clock ticks
    return (sum(user_to_steal) - sum(user_to_steal[3:5])) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds of this process and its ended children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def held_gib(which: str = "VmHWM") -> float:
    """Memory of this process: VmRSS now, VmHWM at most; nan where /proc is missing.

    Not getrusage's ru_maxrss: that counts what the parent process held, too.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return float("nan")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(which)) / 2**20


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
        known = {
            key: statistics.median(turn.figures[key] for turn in turns)
            for key in more
            if all(turn.figures.get(key) is not None for turn in turns)
        }
        disturbed = sum(map(is_disturbed, turns))
        rows.append(Row(name, statistics.median(values), min(values), max(values), len(values), None, disturbed, known))
    base = next((row.median for row in rows if row.contestant == baseline), None)
    for row in rows:
        row.ratio = row.median / base if base else None
    return rows


def print_table(rows: list[Row], unit: str = "", decimals: int = 0) -> None:
    """The rows as a Markdown table, which reads well on a terminal too."""
    more = list(dict.fromkeys(name for row in rows for name in row.more))
    head = ["contestant", f"median{' ' + unit if unit else ''}", "least", "most", "ratio", "runs", *more]
    cells = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        figures = [f"{value:,.{decimals}f}" for value in (row.median, row.least, row.most)]
        runs = f"{row.runs}" + (f" ({row.disturbed} disturbed)" if row.disturbed else "")
        extra = [f"{row.more[name]:,.4g}" if name in row.more else "" for name in more]
        cells.append([row.contestant, *figures, f"{row.ratio:.2f}" if row.ratio else "", runs, *extra])
    widths = [max(map(len, column)) for column in zip(*cells)]
    for line in cells:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))
        ]
        print("| " + " | ".join(padded) + " |", flush=True)


def write_json(path: Path | str, runs: list[Run], **facts) -> None:
    """All turns, the machine and whatever else a reader must know, as one file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**facts, "command": [Path(sys.argv[0]).name, *sys.argv[1:]], "machine": machine()}
    content |= {"runs": [asdict(run) for run in runs]}
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_json(path: Path | str) -> list[Run]:
    """The turns of an earlier measurement; [] if there is none."""
    if not Path(path).exists():
        return []
    return [Run(**run) for run in json.loads(Path(path).read_text(encoding="utf-8"))["runs"]]


def machine() -> dict:
    """What the figures depend on."""
    cpu = cpu_facts()
    flags = set(cpu.get("flags", "").split())
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
    return {
        "cpu": cpu.get("model name", platform.processor() or "unknown"),
        "family and model": f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "flags": [flag for flag in wanted if flag in flags],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in ("torch", "numpy", "transformers")},
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "commit": commit(),
    }


def describe_machine() -> str:
    """The same as one line."""
    facts = machine()
    return (f"{facts['cpu']} ({facts['family and model']}), {facts['cores']} cores, {' '.join(facts['flags'])}; "
            f"{facts['memory_gib']} GiB; torch {facts['packages']['torch']}; commit {facts['commit']}")  # fmt: skip


def cpu_facts() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; {} where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def version_of(package: str) -> str | None:
    """The installed version, without importing the package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The checked-out commit, with "+" if files differ from it."""
    words = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def pinned(threads: int, pin: bool = True) -> dict[str, str]:
    """Environment variables that give a child process so many compute threads, each bound to a core of its own."""
    count = str(threads)
    variables = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false"}
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else []
    return variables | ({"GOMP_CPU_AFFINITY": " ".join(map(str, cores))} if pin and cores else {})
