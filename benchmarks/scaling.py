"""Weak scaling of data parallel training: twice the processes, twice the pairs a step.

    python -m benchmarks.scaling                   # 1 process, 2 that talk, 2 that do not; three rounds
    python -m benchmarks.scaling --processes 4     # on a machine with four cores

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
from dataclasses import asdict, dataclass

import torch
from torch.utils.data import DataLoader

from benchmarks.corpus import Corpus, load_corpus, read_corpus
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
    data: str = flag("", "as train.py's --data; MINIDATASET, else as there", "Benchmark")
    out: str = flag("runs/benchmarks/scaling.json", "file for all turns", "Benchmark")


def main(config: Config) -> None:
    """Take turns, print the table."""
    if config.processes > (cores := len(os.sched_getaffinity(0))):
        raise UserError(f"--processes {config.processes}, but this process may use {cores} cores; each needs one")
    corpus = load_corpus(config.data)
    together, apart = f"{config.processes} together", f"{config.processes} apart"
    launches = {"1 process": [(1, 0)], together: [(config.processes, 0)]}  # (processes, the first one's core)
    launches[apart] = [(1, core) for core in range(config.processes)]

    def turn(name: str) -> dict:
        figures = [wait() for wait in [start(size, core, corpus, config) for size, core in launches[name]]]
        speed = sum(figure["target_tokens_per_second"] for figure in figures)
        return {"target_tokens_per_second": speed, "seconds_per_step": max(f["seconds_per_step"] for f in figures)}

    runs = take_turns("weak scaling", list(launches), config.rounds, turn, config.out, corpus=corpus.describe())
    print(f"\n{corpus.describe()}\nreal target tokens a second, all processes together")
    rows = compare(runs, "target_tokens_per_second", "1 process", ["seconds_per_step"])
    print_table(rows, "tokens/s")
    for row in rows[1:]:
        print(f"{row.contestant}: {row.ratio / config.processes:.1%} of {config.processes} times one process")


def start(size: int, first_core: int, corpus: Corpus, config: Config) -> Callable[[], dict]:
    """torchrun with `size` processes of this file; → a function that waits for the figures."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size)]
    task = json.dumps(asdict(config) | {"corpus": str(corpus.folder), "core": first_core})
    process = subprocess.Popen(
        [*words, "-m", "benchmarks.scaling"], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "SCALING_TASK": task},
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
    begun = time.perf_counter()
    tokens = sum(next(steps) for _ in range(task["steps"]))
    seconds = world.maximum(time.perf_counter() - begun)[0]
    if world.is_main:
        figures = {"target_tokens_per_second": tokens / seconds, "seconds_per_step": seconds / task["steps"]}
        print(json.dumps(figures), flush=True)
    world.stop()


def training_steps(task: dict, world: distributed.World) -> Iterator[int]:
    """Endless optimiser steps; yields the target tokens of each, over all ranks."""
    corpus = read_corpus(task["corpus"])
    precision = choose_precision(world.device, task["precision"], training=True)
    sizes = ModelConfig(corpus.source_vocab, corpus.target_vocab, **SIZES[task["preset"]])
    take_step = make_trainer(sizes, precision, wrap=world.data_parallel)
    sampler = BucketSampler(corpus.lengths, task["tokens"] * world.size, rank=world.rank, world_size=world.size)
    batches = DataLoader(corpus.train, batch_sampler=sampler, collate_fn=Collate(corpus.source_ids, corpus.target_ids))
    for batch, tokens in zip(batches, sampler.target_tokens(0)):
        take_step(batch, tokens / world.size)  # DDP takes the mean of the gradients
        yield tokens


if __name__ == "__main__":
    task = os.environ.get("SCALING_TASK")
    settings = None if task else parse_flags(Config, "weak scaling of data parallel training")
    run_script(lambda: work(json.loads(task)) if task else main(settings))
