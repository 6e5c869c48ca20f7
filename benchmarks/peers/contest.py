"""Who takes part: how each contestant is started, and what their processes share: task, clock, the line of JSON they end with.

Each contestant is a file of this folder, started as `python -m benchmarks.peers.NAME TASK`, the task in JSON, in an environment
of its own, with the same threads on the same cores; so this file needs the standard library, numpy and torch alone.
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
from model import PRESETS

TINY = dict(
    d_model=32, nhead=2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=64, dropout=0.1
)
SIZES = {
    "lab": PRESETS["lab"],
    "big": PRESETS["big"],
    "tiny": TINY,
}  # of the model; tiny: to try a command
LABEL_SMOOTHING = 0.1
LEARNING_RATE = 1e-4
WARM_STEPS = 3  # not counted: cold caches, first allocations
ENVIRONMENTS = ROOT / "benchmarks" / ".envs"  # of the toolkits; made by benchmarks/peers/install.sh
OLD_LOAD = {
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"
}  # `torch.load` reads pickles, as it did before torch 2.6
# glibc gives large blocks back to the system at once and takes them again page by page; with these it keeps them.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


@dataclass(frozen=True)
class Contestant:
    module: str  # benchmarks/peers/MODULE.py
    settings: dict = field(default_factory=dict)  # of its `Task`
    toolkit: str = ""  # its environment; "": the project's own
    environment: dict[str, str] = field(default_factory=dict)
    pin: bool = True  # each compute thread to a core of its own


TOOLKITS = {
    name: Contestant("toolkits", {"what": name}, name, OLD_LOAD) for name in ("opennmt", "fairseq")
}


@dataclass
class Task:
    what: str  # train or decode; marian: learn; toolkits: which
    corpus: str  # folder made by benchmarks.corpus
    seconds: float = 20.0  # of measuring, after the warm-up
    threads: int = 2
    device: str = "cpu"
    sizes: dict = field(default_factory=lambda: SIZES["lab"])  # of the model
    tokens_per_batch: int = 4096  # target tokens, where it counts tokens
    variant: str = ""  # of this contestant: fp32, int8, …
    weights: str = ""  # decode: folder with weights.pt, the project's
    length: int = 0  # tokens of every output, end suppressed; 0: to the end
    rows: int = 0  # decode only so many test sentences; 0: all
    batch: int = 64  # sentences decoded at once; ours: 0 as evaluate.py
    outputs: str = ""  # file for the decoded words, a sentence a line; learn: folder
    every: int = 0  # learn: steps between translations


def choose(
    names: str, known: Iterable[str], flag: str = "--contestants", between: str = ","
) -> list[str]:
    """ "a,b" → ["a", "b"]. Raises `UserError` for an unknown name."""
    chosen = [name.strip() for name in names.split(between) if name.strip()]
    if unknown := [name for name in chosen if name not in known]:
        raise UserError(f"{flag} {unknown[0]}: unknown; choose from {between.join(known)}")
    return chosen


def command(contestant: Contestant, task: Task) -> tuple[list[str], dict[str, str]]:
    """The words and environment variables that start a contestant on a task."""
    python = (
        str(ENVIRONMENTS / contestant.toolkit / "bin/python")
        if contestant.toolkit
        else sys.executable
    )
    job = json.dumps(asdict(replace(task, **contestant.settings)))
    cores = pinned(
        task.threads, contestant.pin and task.device == "cpu"
    )  # a GPU's threads want cores of their own
    words = [python, "-m", f"benchmarks.peers.{contestant.module}", job]
    return words, {**os.environ, **cores, **contestant.environment}


def start(name: str, contestant: Contestant, task: Task, timeout: float = 600) -> dict | None:
    """One turn of one contestant; → its figures, None with one line that says why if it cannot take part."""
    if contestant.toolkit and not (ENVIRONMENTS / contestant.toolkit / "complete").exists():
        print(
            f"{name}: left out; to install it: bash benchmarks/peers/install.sh {contestant.toolkit}",
            flush=True,
        )
        return None
    words, environment = command(contestant, task)
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
        )
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        figures = [line for line in done.stdout.splitlines() if line.startswith("{")]
        reason = (
            "" if figures and not done.returncode else f"it ended with {done.returncode}: {last}"
        )
    except subprocess.TimeoutExpired:
        reason = f"no result after {timeout:.0f} s"
    if reason:
        print(f"{name}: left out, {reason}; {' '.join(words)}", flush=True)
        return None
    return json.loads(figures[-1])


def run_peer(*tasks: Callable) -> None:
    """The main program of a contestant: do its task. Everything it prints meanwhile goes to stderr."""
    task = Task(**json.loads(sys.argv[1]))
    corpus = read_corpus(task.corpus, task.rows)
    with contextlib.redirect_stdout(sys.stderr):
        {function.__name__: function for function in tasks}[task.what](task, corpus)


def wait_for_gpu() -> None:
    """Until the GPU has done what it was given, if this process has one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def memory_gib(which: str = "VmHWM") -> float:
    """The most that this process, or its tensors on a GPU, held so far; with VmRSS what they hold now."""
    if torch.cuda.is_initialized():
        return (
            torch.cuda.max_memory_allocated() if which == "VmHWM" else torch.cuda.memory_allocated()
        ) / GIB
    return held_gib(which)


def report(figures: dict) -> None:
    """Print the figures for the process that started this one."""
    print(json.dumps(figures | {"peak_gib": memory_gib()}), file=sys.__stdout__, flush=True)


class TrainingClock:
    """Counts real tokens over the measured seconds.

    `step(source_tokens, target_tokens)` is called at the start of every optimiser step and so counts everything from there to
    the next one: loading, forward, backward, update, logging. Once `seconds` are over it reports and ends the process.
    `step_gib`: what the steps took beside what was there before the first. `more`: further figures to report.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter, **more: float):
        self.seconds, self.now, self.more = seconds, now, more
        self.steps, self.source, self.target, self.begun = -WARM_STEPS, 0, 0, 0.0

    def step(self, source_tokens: int, target_tokens: int) -> None:
        """A step over so many real tokens (end tokens counted, padding not) begins now."""
        if self.steps == -WARM_STEPS:
            self.held = memory_gib("VmRSS")
        elif self.steps == 0:
            wait_for_gpu()
            self.begun = self.now()
        elif self.steps > 0 and self.now() - self.begun >= self.seconds:
            wait_for_gpu()  # only here: in between the host runs ahead of the GPU
            seconds = self.now() - self.begun  # of all steps but the one that begins now
            report(
                {
                    "target_tokens_per_second": self.target / seconds,
                    "tokens_per_second": (self.source + self.target) / seconds,
                    "seconds_per_step": seconds / self.steps,
                    "target_tokens_per_step": self.target / self.steps,
                    "steps": self.steps,
                    "step_gib": memory_gib() - self.held,
                    **self.more,
                }
            )
            sys.stderr.flush()
            os._exit(0)  # some toolkits would now write checkpoints
        self.steps += 1
        if self.steps > 0:
            self.source, self.target = (
                self.source + int(source_tokens),
                self.target + int(target_tokens),
            )


def time_decoding(
    task: Task, corpus: Corpus, decode: Callable, warm: bool = True, read: Callable = list
) -> None:
    """Decode the test sentences once to warm up, then again and again for `task.seconds`, and report the median.

    `read(decode())` are the output ids of every sentence without begin and end; the reading is not timed. Each sentence
    counts its tokens, and one more for its end where that was not suppressed.
    """
    passes = []
    while len(passes) < 1 + warm or sum(passes[warm:]) < task.seconds:
        begun = time.perf_counter()
        outputs = decode()
        passes.append(time.perf_counter() - begun)
    outputs = read(outputs)
    lengths = [len(output) for output in outputs]
    if len(lengths) != len(corpus.test) or (task.length and set(lengths) != {task.length}):
        raise RuntimeError(f"{len(lengths)} outputs of {min(lengths)} to {max(lengths)} tokens")
    if task.outputs:
        Path(task.outputs).write_text(as_words(outputs, "tgt"), encoding="utf-8")
    seconds = statistics.median(passes[warm:])
    tokens = sum(lengths) + (0 if task.length else len(lengths))
    report(
        {
            "tokens_per_second": tokens / seconds,
            "sentences_per_second": len(lengths) / seconds,
            "seconds": seconds,
            "first_seconds": passes[0],
            "tokens": tokens,
            "sentences": len(lengths),
            "passes": len(passes) - warm,
        }
    )
