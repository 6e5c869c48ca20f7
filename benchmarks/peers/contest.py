"""How a contestant is started, and what all of them share: the task, the clock, the result.

A contestant is a file of this folder. It runs as `python -m benchmarks.peers.NAME TASK`, the task
in JSON, with the same number of threads on the same cores as the others, and prints its figures as
one line of JSON. A toolkit runs in its own environment, so this file needs the standard library,
numpy and torch alone.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.corpus import Corpus, as_words, read_corpus
from benchmarks.measuring import ROOT, pinned
from engine.errors import UserError
from engine.memory import GIB, held_gib
from model import PRESETS, ModelConfig

TINY = {  # to try a command
    "d_model": 32,
    "nhead": 2,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "dim_feedforward": 64,
    "dropout": 0.1,
}
DEFAULTS = {name: getattr(ModelConfig, name) for name in TINY}
SIZES = {name: DEFAULTS | PRESETS[name] for name in ("lab", "big")} | {"tiny": TINY}
LABEL_SMOOTHING = 0.1
LEARNING_RATE = 1e-4
WARM_STEPS = 3  # steps that do not count: cold caches, first allocations
ENVIRONMENTS = ROOT / "benchmarks" / ".envs"  # made by benchmarks/peers/install.sh
# The toolkits' `torch.load` reads pickles, which torch refuses by default since 2.6.
OLD_LOAD = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
# By default glibc gives large blocks back to the system and takes them again page by page.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


@dataclass(frozen=True)
class Contestant:
    """How to start one of the files in this folder."""

    module: str  # benchmarks/peers/MODULE.py
    settings: dict = field(default_factory=dict)  # fields of its `Task`
    toolkit: str = ""  # whose environment; empty: the project's own
    environment: dict[str, str] = field(default_factory=dict)
    pin: bool = True  # bind each compute thread to a core


TOOLKITS = {
    name: Contestant("toolkits", {"what": name}, name, OLD_LOAD) for name in ("opennmt", "fairseq")
}


@dataclass
class Task:
    """What one process is to do."""

    what: str  # the function to call: train, decode, learn, …
    corpus: str  # folder made by benchmarks.corpus
    seconds: float = 20.0  # to measure, after the warm-up
    threads: int = 2
    device: str = "cpu"
    sizes: dict = field(default_factory=lambda: SIZES["lab"])  # of the model
    tokens_per_batch: int = 4096  # target tokens, padding included
    variant: str = ""  # of this contestant: fp32, int8, …
    weights: str = ""  # decode: folder with the project's weights.pt
    length: int = 0  # decode: tokens of every output; 0: up to its end token
    rows: int = 0  # decode: number of test sentences; 0: all
    batch: int = 64  # decode: sentences at once; for ours 0 means as evaluate.py
    outputs: str = ""  # decode: file for the outputs; learn: folder
    every: int = 0  # learn: steps between translations


def choose(names: str, known: Iterable[str], flag: str = "--contestants") -> list[str]:
    """ "a,b" → ["a", "b"]. Raises `UserError` for an unknown name."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in known:
            raise UserError(f"{flag} {name}: unknown; choose from {','.join(known)}")
    return chosen


def command(contestant: Contestant, task: Task) -> tuple[list[str], dict[str, str]]:
    """The command and the environment variables that start a contestant on a task."""
    python = sys.executable
    if contestant.toolkit:
        python = str(ENVIRONMENTS / contestant.toolkit / "bin/python")
    job = json.dumps(asdict(replace(task, **contestant.settings)))
    # With a GPU, the threads that feed it must not share one core.
    cores = pinned(task.threads, contestant.pin and task.device == "cpu")
    words = [python, "-m", f"benchmarks.peers.{contestant.module}", job]
    return words, {**os.environ, **cores, **contestant.environment}


def is_installed(toolkit: str) -> bool:
    """Whether benchmarks/peers/install.sh has made its environment."""
    return (ENVIRONMENTS / toolkit / "complete").exists()


def start(name: str, contestant: Contestant, task: Task, timeout: float = 600) -> dict | None:
    """The figures of one turn. If there are none, a line says why."""
    if contestant.toolkit and not is_installed(contestant.toolkit):
        install = f"bash benchmarks/peers/install.sh {contestant.toolkit}"
        print(f"{name}: left out; to install it: {install}", flush=True)
        return None
    words, environment = command(contestant, task)
    options = dict(cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    try:
        process = subprocess.run(words, **options)
    except subprocess.TimeoutExpired:
        reason = f"no result after {timeout:.0f} s"
    else:
        figures = [line for line in process.stdout.splitlines() if line.startswith("{")]
        if figures and process.returncode == 0:
            return json.loads(figures[-1])
        messages = process.stderr.strip().splitlines() or ["no message"]
        reason = f"it ended with {process.returncode}: {messages[-1]}"
    print(f"{name}: left out, {reason}; {' '.join(words)}", flush=True)
    return None


def run_peer(*tasks: Callable[[Task, Corpus], None]) -> None:
    """The main program of a contestant: do the task on the command line.

    Everything that it prints goes to stderr, stdout is for the result.
    """
    task = Task(**json.loads(sys.argv[1]))
    corpus = read_corpus(task.corpus, task.rows)
    functions = {function.__name__: function for function in tasks}
    with contextlib.redirect_stdout(sys.stderr):
        functions[task.what](task, corpus)


def wait_for_gpu() -> None:
    """Wait until the GPU has finished, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def peak_gib() -> float:
    """The most memory of this process so far, or of its tensors on a GPU."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / GIB
    return held_gib()


def current_gib() -> float:
    """The memory of this process now, or of its tensors on a GPU."""
    if torch.cuda.is_initialized():
        return torch.cuda.memory_allocated() / GIB
    return held_gib("VmRSS")


def report(figures: dict) -> None:
    """Print the figures for `start`, which started this process."""
    print(json.dumps(figures | {"peak_gib": peak_gib()}), file=sys.__stdout__, flush=True)


class TrainingClock:
    """Counts steps and real tokens for `seconds`, then reports and ends the process.

    Call `step` at the start of every optimizer step: the time up to the next call includes loading,
    forward and backward pass, update and logging. `more` are further figures to report. `step_gib`
    is the memory that the steps took in addition to what was held before the first.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter, **more: float):
        self.seconds = seconds
        self.now = now
        self.more = more
        self.steps = -WARM_STEPS
        self.source = 0
        self.target = 0

    def step(self, source_tokens: int, target_tokens: int) -> None:
        """A step begins. Its tokens: end tokens count, padding does not."""
        if self.steps == -WARM_STEPS:
            self.held = current_gib()
        elif self.steps == 0:
            wait_for_gpu()
            self.begun = self.now()
        elif self.steps > 0 and self.now() - self.begun >= self.seconds:
            self.finish()
        self.steps += 1
        if self.steps > 0:
            self.source += int(source_tokens)
            self.target += int(target_tokens)

    def finish(self) -> None:
        """Report all steps but the one that begins now."""
        wait_for_gpu()  # only here and at the start: in between the CPU runs ahead of the GPU
        seconds = self.now() - self.begun
        report(
            {
                "target_tokens_per_second": self.target / seconds,
                "tokens_per_second": (self.source + self.target) / seconds,
                "seconds_per_step": seconds / self.steps,
                "target_tokens_per_step": self.target / self.steps,
                "steps": self.steps,
                "step_gib": peak_gib() - self.held,
                **self.more,
            }
        )
        sys.stderr.flush()
        os._exit(0)  # some toolkits would write checkpoints now


def time_decoding(
    task: Task, corpus: Corpus, decode: Callable, warm: bool = True, read: Callable = list
) -> None:
    """Decode the test sentences for `task.seconds`, at least once, and report the median pass.

    `read(decode())` are the output ids of every sentence without begin and end; reading them is not
    timed. With `warm` the first pass does not count. A sentence counts its tokens, and one more for
    its end unless `task.length` suppresses that.
    """
    uncounted = 1 if warm else 0
    passes = []
    while len(passes) <= uncounted or sum(passes[uncounted:]) < task.seconds:
        begun = time.perf_counter()
        outputs = decode()
        passes.append(time.perf_counter() - begun)
    outputs = read(outputs)
    lengths = [len(output) for output in outputs]
    if len(lengths) != len(corpus.test) or (task.length and set(lengths) != {task.length}):
        raise RuntimeError(f"{len(lengths)} outputs of {min(lengths)} to {max(lengths)} tokens")
    if task.outputs:
        Path(task.outputs).write_text(as_words(outputs, "tgt"), encoding="utf-8")
    seconds = statistics.median(passes[uncounted:])
    tokens = sum(lengths) if task.length else sum(lengths) + len(lengths)
    report(
        {
            "tokens_per_second": tokens / seconds,
            "sentences_per_second": len(lengths) / seconds,
            "seconds": seconds,
            "first_seconds": passes[0],
            "tokens": tokens,
            "sentences": len(lengths),
            "passes": len(passes) - uncounted,
        }
    )
