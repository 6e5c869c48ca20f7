"""Who takes part, and how each is started: as a process in its own environment, with the same threads on the same cores."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace

from benchmarks.measuring import ROOT, pinned
from benchmarks.peers.contest import Task
from engine.errors import UserError

ENVIRONMENTS = ROOT / "benchmarks" / ".envs"  # of the toolkits; made by benchmarks/peers/install.sh
# glibc gives large blocks back to the system at once and takes them again page by page; with these it keeps them.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "268435456"}


@dataclass(frozen=True)
class Contestant:
    """How to start one."""

    module: str  # benchmarks/peers/MODULE.py
    settings: dict = field(default_factory=dict)  # of its `Task`
    toolkit: str = ""  # its environment; "": the project's own
    environment: dict[str, str] = field(default_factory=dict)
    pin: bool = True  # each compute thread to a core of its own


def choose(names: str, known: dict[str, Contestant]) -> list[str]:
    """ "a,b" → ["a", "b"]. Raises `UserError` for an unknown name."""
    chosen = [name for name in names.split(",") if name]
    if unknown := [name for name in chosen if name not in known]:
        raise UserError(f"--contestants {unknown[0]}: unknown; choose from {','.join(known)}")
    return chosen


def start(name: str, contestant: Contestant, task: Task, timeout: float = 600) -> dict | None:
    """One turn of one contestant; → its figures, None with one line that says why if it cannot take part."""
    home = ENVIRONMENTS / contestant.toolkit
    if contestant.toolkit and not (home / "complete").exists():
        print(f"{name}: left out; to install it: bash benchmarks/peers/install.sh {contestant.toolkit}", flush=True)
        return None
    python = str(home / "bin/python") if contestant.toolkit else sys.executable
    threads, task = task.threads, json.dumps(asdict(replace(task, **contestant.settings)))
    words = [python, "-m", f"benchmarks.peers.{contestant.module}", task]
    environment = {**os.environ, **pinned(threads, contestant.pin), **contestant.environment}
    try:
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        figures = [line for line in done.stdout.splitlines() if line.startswith("{")]
        reason = "" if figures and not done.returncode else f"it ended with {done.returncode}: {last}"
    except subprocess.TimeoutExpired:
        reason = f"no result after {timeout:.0f} s"
    if reason:
        print(f"{name}: left out, {reason}; {' '.join(words)}", flush=True)
        return None
    return json.loads(figures[-1])
