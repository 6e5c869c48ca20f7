"""Weak scaling of data parallel training: twice the processes, twice the pairs a step; and where communication hides.

    python -m benchmarks.scaling                   # 1 process, 2 that talk, 2 that do not; three rounds
    python -m benchmarks.scaling --processes 4     # on a machine with four cores
    python -m benchmarks.scaling --profile         # also a picture of one step of rank 0: what overlaps what

Each process has one thread on a core of its own and 4,096 target tokens a step of the lab's model, so a perfect machine would
train N times as many tokens a second with N processes. "apart" are N processes that never talk: what they lose is the
machine's (they share memory and cache); what the talking ones lose beyond that is communication's.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from benchmarks.corpus import load_corpus, read_corpus
from benchmarks.measuring import ROOT, compare, print_table, take_turns
from benchmarks.peers.contest import SIZES, WARM_STEPS
from benchmarks.peers.ours import make_trainer
from data import BucketSampler, Collate
from engine import distributed
from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from engine.precision import choose_precision
from model import ModelConfig


@dataclass
class Config:
    """Every setting of this benchmark."""

    processes: int = flag(2, "processes that train together", "Benchmark", least=2)
    rounds: int = flag(3, "turns of each", "Benchmark", least=1)
    steps: int = flag(10, "optimiser steps measured in each turn", "Benchmark", least=1)
    tokens: int = flag(4096, "target tokens a step and process", "Benchmark", least=64)
    precision: str = flag("auto", "as train.py's (auto|fp32|bf16)", "Benchmark")
    preset: str = flag("lab", "model size (lab|big|tiny)", "Benchmark")
    profile: bool = flag(False, "draw one step of rank 0", "Benchmark")
    data: str = flag("", "as train.py's --data; MINIDATASET, else as there", "Benchmark")
    out: str = flag("runs/benchmarks/scaling.json", "file for all turns; the picture lies beside it", "Benchmark")


def main(config: Config) -> None:
    """Take turns, print the table, draw."""
    if config.processes > (cores := len(os.sched_getaffinity(0))):
        raise UserError(f"--processes {config.processes}, but this process may use {cores} cores; each needs one")
    corpus = load_corpus(config.data)
    together, apart = f"{config.processes} together", f"{config.processes} apart"
    launches = {"1 process": [(1, 0)], together: [(config.processes, 0)]}  # (processes, the first one's core)
    launches[apart] = [(1, core) for core in range(config.processes)]

    def turn(name: str) -> dict:
        figures = [wait() for wait in [start(size, core, corpus.folder, config) for size, core in launches[name]]]
        speed = sum(figure["target_tokens_per_second"] for figure in figures)
        return {"target_tokens_per_second": speed, "seconds_per_step": max(f["seconds_per_step"] for f in figures)}

    runs = take_turns("weak scaling", list(launches), config.rounds, turn, config.out, corpus=corpus.describe())
    print(f"\n{corpus.describe()}\nreal target tokens a second, all processes together")
    rows = compare(runs, "target_tokens_per_second", "1 process", ["seconds_per_step"])
    print_table(rows, "tokens/s")
    for row in rows[1:]:
        print(f"{row.contestant}: {row.ratio / config.processes:.1%} of {config.processes} times one process")
    if config.profile:
        picture = (ROOT / config.out).with_suffix(".png")
        seconds = start(config.processes, 0, corpus.folder, config, profile=str(picture))()
        print(f"\none step of rank 0, drawn in {picture}: backward pass {seconds['backward']:.3f} s; a bucket of gradients was "
              f"on its way for {seconds['communication']:.3f} s, {seconds['both'] / seconds['communication']:.0%} of it while "
              "the backward pass still ran")  # fmt: skip


def start(size: int, first_core: int, corpus: Path, config: Config, profile: str = "") -> Callable[[], dict]:
    """torchrun with `size` processes of this file; → a function that waits for the figures."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size)]
    task = dict(corpus=str(corpus), core=first_core, profile=profile)
    task |= {name: getattr(config, name) for name in ("steps", "tokens", "precision", "preset")}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SCALING_TASK": json.dumps(task)}
    process = subprocess.Popen(
        [*words, "-m", "benchmarks.scaling"], cwd=ROOT, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def wait() -> dict:
        output, errors = process.communicate()
        if process.returncode:
            lines = errors.strip().splitlines() or ["without a word"]
            reason = next((line for line in lines if line.startswith("error")), lines[-1])
            raise UserError(f"a worker ended with {process.returncode}: {reason}")
        return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])

    return wait


# ---------------------------------------------------------------- in a worker


def work(task: dict) -> None:
    """Train as train.py does, and print the speed of all ranks together."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[task["core"] + int(os.environ["LOCAL_RANK"])]})
    torch.set_num_threads(1)
    world = distributed.start("cpu")
    steps = training_steps(task, world)
    for _ in range(WARM_STEPS):
        next(steps)
    world.maximum(0)  # all begin together
    begun, tokens = time.perf_counter(), 0
    for _ in range(task["steps"]):
        tokens += next(steps)
    seconds = world.maximum(time.perf_counter() - begun)[0]
    figures = {"target_tokens_per_second": tokens / seconds, "seconds_per_step": seconds / task["steps"]}
    if task["profile"]:
        figures |= profile_step(steps, world, Path(task["profile"]))
    if world.is_main:
        print(json.dumps(figures), flush=True)
    world.stop()


def training_steps(task: dict, world: distributed.World) -> Iterator[int]:
    """Endless optimiser steps; yields the target tokens of each, over all ranks."""
    corpus = read_corpus(task["corpus"])
    precision = choose_precision(world.device, task["precision"], training=True)
    sizes = ModelConfig(corpus.source_vocab, corpus.target_vocab, **SIZES[task["preset"]])
    take_step = make_trainer(sizes, precision, wrap=world.data_parallel)
    sampler = BucketSampler(corpus.lengths, task["tokens"] * world.size, rank=world.rank, world_size=world.size)
    collate, tokens_of_steps = Collate(corpus.source_ids, corpus.target_ids), sampler.target_tokens(0)
    for batch in DataLoader(corpus.train, batch_sampler=sampler, collate_fn=collate):
        tokens = next(tokens_of_steps)
        take_step(batch, tokens / world.size)  # DDP takes the mean of the gradients
        yield tokens


def profile_step(steps: Iterator[int], world: distributed.World, picture: Path) -> dict:
    """One step under torch.profiler: the seconds of the backward pass, of communication, and of both at once."""

    world.maximum(0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        next(steps)
    spans = [(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6) for event in profiler.events()]
    backward = merge((start, end) for name, start, end in spans if name.startswith("autograd::engine::evaluate"))
    communication = merge((start, end) for name, start, end in spans if name.startswith("gloo:all_reduce"))
    if not communication:
        raise UserError("the profile holds no gloo:all_reduce; does this torch call it otherwise?")
    if world.is_main:
        begun = min(start for _, start, _ in spans)
        draw(backward, communication, begun, max(end for _, _, end in spans), picture)
    whole = [(backward[0][0], backward[-1][1])]
    return {"backward": length(whole), "communication": length(communication), "both": overlap(whole, communication)}


def merge(spans) -> list[tuple[float, float]]:
    """Spans that touch become one."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(spans: list[tuple[float, float]]) -> float:
    """Seconds that the spans cover."""
    return sum(end - start for start, end in spans)


def overlap(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    """Seconds that lie in both; within each list no two spans touch."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in left for b in right)


def draw(backward, communication, begun: float, ended: float, picture: Path) -> None:
    """Two rows over time: what the process computes, when gradients travel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 2.2), layout="constrained")
    for row, (spans, colour) in enumerate([(communication, "#c44e52"), (backward, "#4c72b0")]):
        axes.broken_barh([(start - begun, end - start) for start, end in spans], (row - 0.35, 0.7), color=colour)
    axes.set(yticks=[0, 1], yticklabels=["all-reduce", "backward"], xlim=(0, ended - begun), ylim=(-0.6, 1.6))
    axes.set_xlabel("seconds since the step began; before the blue: forward, after it: clip and update")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    task = os.environ.get("SCALING_TASK")
    settings = None if task else parse_flags(Config, "weak scaling of data parallel training")
    run_script(lambda: work(json.loads(task)) if task else main(settings))
