"""Data parallel training: twice the processes, and twice the pairs a step (weak scaling) or as many (strong scaling).

    python -m benchmarks.scaling                   # 1 process, 2 that talk, 2 that do not; three rounds
    python -m benchmarks.scaling --processes 4     # on a machine with four cores

Each process has one thread on a core of its own; a step has 4,096 target tokens of each, or of all ("one batch"). A perfect
machine would train N times as many tokens a second with N processes. "apart" are N processes that never talk: what they lose
is the machine's (they share memory and cache); what the talking ones lose beyond that is communication's.
"""

import os
import socket
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.corpus import load_corpus, read_corpus
from benchmarks.measuring import measure
from benchmarks.peers.contest import SIZES
from benchmarks.peers.ours import make_trainer, time_steps
from data import BucketSampler, Collate, batches_of
from engine import distributed
from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from engine.precision import choose_precision
from model import ModelConfig


@dataclass
class Config:
    processes: int = flag(2, "processes that train together", "Benchmark", least=2)
    rounds: int = flag(3, "turns of each", "Benchmark", least=1)
    steps: int = flag(10, "optimiser steps measured in each turn", "Benchmark", least=1)
    tokens: int = flag(4096, "target tokens a step, of each process or of all", "Benchmark", least=64)
    preset: str = flag("lab", "model size (lab|big|tiny)", "Benchmark")
    data: str = flag("", "as train.py's --data; MINIDATASET, else as there", "Benchmark")
    out: str = flag("runs/benchmarks/scaling.json", "file for all turns", "Benchmark")


def main(config: Config) -> None:
    """Take turns, print the table."""
    if config.processes > (cores := len(os.sched_getaffinity(0))):
        raise UserError(f"--processes {config.processes}, but this process may use {cores} cores; each needs one")
    corpus = load_corpus(config.data)
    tokens, count = config.tokens, config.processes
    launches = {  # target tokens of a step; (processes, the first one's core) of each job
        "1 process": (tokens, [(1, 0)]), f"{count} together": (tokens * count, [(count, 0)]),
        f"{count} on one batch": (tokens, [(count, 0)]), f"{count} apart": (tokens, [(1, core) for core in range(count)]),
    }  # fmt: skip

    def turn(name: str) -> dict:
        (tokens, jobs), tasks = launches[name], []
        for size, first_core in jobs:
            with socket.create_server(("127.0.0.1", 0)) as free:  # a port that nobody uses
                port = free.getsockname()[1]
            tasks += [(first_core + rank, rank, size, port) for rank in range(size)]
        with ProcessPoolExecutor(len(tasks), mp_context=get_context("spawn")) as pool:
            figures = list(filter(None, pool.map(partial(work, config, corpus.folder, tokens), *zip(*tasks))))
        speed = sum(figure["target_tokens_per_second"] for figure in figures)
        return {"target_tokens_per_second": speed, "seconds_per_step": max(f["seconds_per_step"] for f in figures)}

    title = f"data parallel training, all processes together; {corpus.describe()}"
    rows = measure(title, launches, config, turn, "target_tokens_per_second", "1 process")
    for row in rows[1:]:
        print(f"{row.contestant}: {row.ratio / config.processes:.1%} of {config.processes} times one process")


def work(config: Config, folder: Path, tokens: int, core: int, rank: int, size: int, port: int) -> dict | None:
    """In a process of its own: train as train.py does; → the speed of all ranks together, from rank 0."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})
    torch.set_num_threads(1)
    place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    world, corpus = distributed.start("cpu"), read_corpus(folder)
    sizes = ModelConfig(corpus.source_vocab, corpus.target_vocab, **SIZES[config.preset])
    take_step = make_trainer(sizes, choose_precision(world.device, training=True), wrap=world.data_parallel)
    sampler = BucketSampler(corpus.lengths, tokens, rank=rank, world_size=size)
    collate = Collate(corpus.source_ids, corpus.target_ids)
    batches, tokens_of_steps = batches_of(corpus.train, sampler, collate, 0, world.device), sampler.target_tokens(0)

    def step() -> int:
        real = next(tokens_of_steps)  # over all ranks
        take_step(next(batches), real / size)  # DDP takes the mean of the gradients
        return real

    figures = time_steps(step, config.steps, lambda seconds: world.maximum(seconds)[0])
    world.stop()
    return figures if world.is_main else None


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "speed of data parallel training")))
