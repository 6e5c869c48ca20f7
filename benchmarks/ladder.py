"""What each trick of training brings: the plain way first, then one trick more on every rung, side by side.

    python -m benchmarks.ladder
    python -m benchmarks.ladder --seconds 30 --rounds 3

Every rung is a process of its own with the lab's model and the same token sequences, about 4,096 target tokens a step. Before
its clock starts it takes a few steps without dropout on the same batches as all the others; the loss after them is in the
table, and must be the same but for rounding: a trick that changes it is a mistake. (On the rungs above the first, too: the
batches of these steps are always the bucketed ones.)
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from benchmarks.corpus import load_corpus
from benchmarks.measuring import compare, peak_rss_gib, pinned, print_table
from benchmarks.peers.contest import DROPOUT, LAB, LABEL_SMOOTHING, LEARNING_RATE, TOKENS_PER_BATCH, WARM_STEPS
from benchmarks.peers.contestants import ROOT, take_turns
from data import BucketSampler, Collate
from engine.allocator import keep_freed_memory
from engine.attention import BatchedAttention
from engine.config import flag, parse_flags
from engine.cross_entropy import SlicedCrossEntropy
from engine.dropout import ByteDropout
from engine.errors import run_script
from engine.native.training import Kernels
from engine.precision import Precision
from model import ModelConfig, SummedLoss, Translator

RUNGS = (
    "random batches",  # 128 sentences each, padded to the longest
    "length buckets",
    "oneDNN products",  # instead of MKL's, for fp32
    "memory kept",
    "dropout by bytes",
    "batched attention",
    "sliced cross-entropy",
    "kernels in C++",  # which do what dropout by bytes and batched attention do, and more
    "bf16",
)
PARITY_STEPS = 5


@dataclass
class Config:
    """Every setting of this benchmark."""

    rounds: int = flag(2, "turns of each rung", "Benchmark")
    seconds: float = flag(15.0, "measured in each turn", "Benchmark")
    threads: int = flag(2, "compute threads", "Benchmark")
    data: str = flag("", "as train.py's --data; MINIDATASET, else as there", "Benchmark")
    out: str = flag("runs/benchmarks/ladder.json", "file for all turns", "Benchmark")
    append: bool = flag(False, "add to the turns that are in --out", "Benchmark")
    rung: int = flag(-1, "climb this one alone, in this process", "Benchmark")


def climb(rung: int, corpus, seconds: float) -> dict[str, float]:
    """Train with all tricks up to this one; → its figures."""
    tricks = RUNGS[: rung + 1]
    torch.set_float32_matmul_precision("medium" if "oneDNN products" in tricks else "highest")
    if "memory kept" in tricks:
        keep_freed_memory()
    ByteDropout.enabled = "dropout by bytes" in tricks
    BatchedAttention.enabled = "batched attention" in tricks
    SlicedCrossEntropy.enabled = "sliced cross-entropy" in tricks
    Kernels.enabled = "kernels in C++" in tricks
    precision = Precision(torch.device("cpu"), "bf16" if "bf16" in tricks else "fp32", "")

    collate = Collate(corpus.source_ids, corpus.target_ids)
    buckets = BucketSampler(corpus.lengths, TOKENS_PER_BATCH, seed=1)
    take_step = trainer(corpus, precision, dropout=0.0)
    for rows in islice(buckets, PARITY_STEPS):
        loss = take_step(collate([corpus.train[row] for row in rows]))

    rows_of_batches = iter(buckets) if "length buckets" in tricks else random_rows(len(corpus.train))
    take_step = trainer(corpus, precision, DROPOUT)
    tokens = steps = 0
    for step, rows in enumerate(rows_of_batches, 1 - WARM_STEPS):
        if step == 1:
            begun = time.perf_counter()
        batch = collate([corpus.train[row] for row in rows])
        take_step(batch)
        if step >= 1:
            tokens, steps = tokens + batch.target_tokens, step
            if time.perf_counter() - begun >= seconds:
                break
    passed = time.perf_counter() - begun
    return {"target_tokens_per_second": tokens / passed, "seconds_per_step": passed / steps, "loss": loss,
            "peak_gib": peak_rss_gib()}  # fmt: skip


def trainer(corpus, precision: Precision, dropout: float):
    """A fresh model, always the same; → a function that takes one step on a batch and returns its loss a token."""
    torch.manual_seed(1)
    model = Translator(ModelConfig(corpus.source_vocab, corpus.target_vocab, **LAB, dropout=dropout)).train()
    loss_of, parameters = SummedLoss(model, LABEL_SMOOTHING), list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)

    def take_step(batch) -> float:
        with precision.autocast():
            loss = loss_of(batch.src, batch.src_pad, batch.tgt_in, batch.real, batch.tgt_out) / batch.target_tokens
        precision.backward(loss)
        precision.step(optimizer, parameters, 1.0, step=1)
        return loss.item()

    return take_step


def random_rows(pairs: int):
    """Batches of 128 sentences of any length, without end."""
    random = np.random.default_rng(1)
    while True:
        yield from (rows.tolist() for rows in np.array_split(random.permutation(pairs), -(-pairs // 128)))


def start(name: str, config: Config) -> dict | None:
    """One turn of one rung in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.ladder", "--rung", RUNGS.index(name), "--seconds", config.seconds]
    words += ["--data", config.data] if config.data else []
    environment = pinned(config.threads)
    done = subprocess.run([*map(str, words)], cwd=ROOT, env={**os.environ, **environment},
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        print(f"{name}: {done.stderr.strip().splitlines()[-1]}")
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(config: Config) -> None:
    """Take turns, print the table."""
    corpus = load_corpus(config.data)
    if config.rung >= 0:
        print(json.dumps(climb(config.rung, corpus, config.seconds)))
        return
    names = list(RUNGS)
    runs = take_turns(
        "training, one trick more on every rung", names, config.rounds, lambda name: start(name, config),
        ROOT / Path(config.out), config.append, corpus=corpus.describe(), threads=config.threads,
    )  # fmt: skip
    print("\nreal target tokens a second; loss after the steps without dropout")
    rows = compare(runs, "target_tokens_per_second", RUNGS[0], ["seconds_per_step", "loss", "peak_gib"])
    print_table(rows, "tokens/s")


if __name__ == "__main__":
    settings = parse_flags(Config, "what each trick of training brings")
    run_script(lambda: main(settings))
