"""The process of one turn: its task, its clock and its figures.

A contestant is a file of this folder. It runs as `python -m benchmarks.peers.NAME TASK`, the task
in JSON, and prints its figures as one line of JSON. This file needs the standard library alone, so
that the memory of a contestant is its own.
"""

import json
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

WARM_STEPS = 3  # training steps that do not count: cold caches, first allocations
WARM_SENTENCES = 64  # decoded once before the clock starts


@dataclass
class Task:
    """What one process does."""

    what: str  # the function to call: train or decode
    variant: str = ""  # of this contestant: fp32, int8, …
    threads: int = 2  # for computing
    device: str = "cpu"
    folder: str = ""  # the tokenised corpus, or the model and the sentences to decode
    sizes: dict = field(default_factory=dict)  # of the model
    # train
    seconds: float = 20.0  # to measure, after the warm-up
    tokens_per_batch: int = 4096  # padded tokens a side
    # decode
    source_ids: dict = field(default_factory=dict)  # {"pad": …, "bos": …, "eos": …}
    target_ids: dict = field(default_factory=dict)
    beam: int = 1
    length_penalty: float = 1.0
    part: int = 1  # decode every N-th sentence only


def run_peer(*functions: Callable[[Task], dict]) -> None:
    """The main program of a contestant: call the function that the task names, print its figures.

    Whatever else is printed stands before them.
    """
    task = Task(**json.loads(sys.argv[1]))
    by_name = {function.__name__: function for function in functions}
    figures = by_name[task.what](task)
    print(json.dumps(figures), flush=True)


class TrainingClock:
    """Counts steps and real tokens: end tokens count, padding does not.

    `wait` waits for a GPU. The clock calls it only at the start and at the end: in between the CPU
    runs ahead of the GPU.
    """

    def __init__(
        self, seconds: float, wait: Callable = lambda: None, now: Callable = time.perf_counter
    ):
        self.seconds = seconds
        self.wait = wait
        self.now = now
        self.steps = -WARM_STEPS
        self.source_tokens = 0
        self.target_tokens = 0

    def starts(self, source_tokens: int, target_tokens: int) -> bool:
        """Whether a step with these tokens is to be taken; False when the time is over.

        The time from one call to the next includes loading, both passes, update and logging.
        """
        if self.steps == 0:
            self.wait()
            self.begun = self.now()
        elif self.steps > 0 and self.now() - self.begun >= self.seconds:
            return False
        self.steps += 1
        if self.steps > 0:
            self.source_tokens += int(source_tokens)
            self.target_tokens += int(target_tokens)
        return True

    def figures(self) -> dict:
        """Of the steps after the warm-up."""
        self.wait()
        seconds = self.now() - self.begun
        return {
            "target_tokens_per_second": self.target_tokens / seconds,
            "tokens_per_second": (self.source_tokens + self.target_tokens) / seconds,
            "seconds_per_step": seconds / self.steps,
            "steps": self.steps,
            "peak_gib": peak_gib(),
        }


def time_decoding(task: Task, translate: Callable[[list[list[int]]], list[list[int]]]) -> dict:
    """Translate the sentences in `task.folder` once, after a warm-up; keep the outputs there.

    `translate` takes and returns token ids without begin and end.
    """
    folder = Path(task.folder)
    sources = json.loads((folder / "sources.json").read_text(encoding="utf-8"))[:: task.part]
    translate(sources[:WARM_SENTENCES])
    begun = time.perf_counter()
    outputs = translate(sources)
    seconds = time.perf_counter() - begun
    (folder / "outputs.json").write_text(json.dumps(outputs), encoding="utf-8")
    return {"seconds": seconds, "peak_gib": peak_gib()}


def peak_gib() -> float:
    """The most memory that this process has held, or its tensors on a GPU."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    status = Path("/proc/self/status")
    text = status.read_text(encoding="utf-8") if status.exists() else ""
    if found := re.search(r"VmHWM:\s+(\d+)", text):
        return int(found[1]) / 2**20
    # In bytes on macOS, in KiB on Linux, where gVisor has a /proc without VmHWM.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
