"""Who takes part, and how each is started: as a process in its own environment, with the same threads on the same cores."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field

from benchmarks.measuring import ROOT, pinned
from benchmarks.peers.install import is_installed, python_of
from engine.errors import UserError

# glibc gives large blocks back to the system at once and takes them again page by page; with these it keeps them.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "268435456"}


@dataclass(frozen=True)
class Contestant:
    """How to start one."""

    module: str  # benchmarks/peers/MODULE.py
    variant: str = ""
    toolkit: str = ""  # its environment; "": the project's own
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    pin: bool = True  # each compute thread to a core of its own

    def command(self, *arguments) -> list[str]:
        """The words of its command line."""
        python = python_of(self.toolkit) if self.toolkit else sys.executable
        variant = ["--variant", self.variant] if self.variant else []
        return [*map(str, (python, "-m", f"benchmarks.peers.{self.module}", *arguments)), *variant, *self.arguments]


def choose(names: str, known: dict[str, Contestant]) -> list[str]:
    """ "a,b" → ["a", "b"]. Raises `UserError` for an unknown name."""
    chosen = [name for name in names.split(",") if name]
    for name in chosen:
        if name not in known:
            raise UserError(f"--contestants {name}: unknown; choose from {','.join(known)}")
    return chosen


def start(name: str, contestant: Contestant, threads: int, *arguments, timeout: float = 600) -> dict | None:
    """One turn of one contestant; → its figures, None with one line that says why if it cannot take part."""
    if contestant.toolkit and not is_installed(contestant.toolkit):
        print(f"{name}: left out; to install it: python -m benchmarks.peers.install {contestant.toolkit}", flush=True)
        return None
    environment = {**os.environ, **pinned(threads, contestant.pin), **contestant.environment}
    words = contestant.command(*arguments, "--threads", threads)
    try:
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        print(f"{name}: left out, no result after {timeout:.0f} s; {' '.join(words)}", flush=True)
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{name}: left out, it ended with {done.returncode}: {last}; {' '.join(words)}", flush=True)
        return None
    return json.loads(lines[-1])
