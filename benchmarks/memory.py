"""Peak memory of a training step: the plain path against the project's, and what each part of it saves.

    python -m benchmarks.memory                       # 8,192 target tokens, a vocabulary of 32,000, the lab's model
    python -m benchmarks.memory --vocab 16000 --tokens 4096

Each variant is a process of its own that takes three steps on the same random batch (sentences of 32 tokens). Counted is the
most memory the process ever held (resident set), less what it held with model, optimizer and batch before the first step.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.measuring import compare, peak_rss_gib, pinned, print_table
from benchmarks.peers.contest import DROPOUT, LAB, LABEL_SMOOTHING
from benchmarks.peers.contestants import ROOT, take_turns
from engine.allocator import keep_freed_memory
from engine.attention import BatchedAttention
from engine.config import flag, parse_flags
from engine.cross_entropy import SlicedCrossEntropy
from engine.dropout import ByteDropout
from engine.errors import UserError, run_script
from engine.native.training import Kernels
from engine.precision import Precision
from model import ModelConfig, SummedLoss, Translator

VARIANTS = {  # name: (fast layers, sliced cross-entropy, memory kept, precision)
    "plain": (False, False, False, "fp32"),
    "plain, memory kept": (False, False, True, "fp32"),
    "fast layers": (True, False, True, "fp32"),
    "sliced cross-entropy": (False, True, True, "fp32"),
    "ours fp32": (True, True, True, "fp32"),
    "ours bf16": (True, True, True, "bf16"),
}
LENGTH = 32  # tokens of every sentence, about the mean of real ones


@dataclass
class Config:
    """Every setting of this benchmark."""

    vocab: int = flag(32000, "tokens in each vocabulary", "Benchmark")
    tokens: int = flag(8192, "target tokens in the batch", "Benchmark")
    threads: int = flag(2, "compute threads", "Benchmark")
    out: str = flag("runs/benchmarks/memory.json", "file for the figures", "Benchmark")
    variant: str = flag("", "measure this one alone, in this process", "Benchmark")


def measure(config: Config) -> dict[str, float]:
    """Three steps of one variant; → GiB."""
    fast, sliced, kept, name = VARIANTS[config.variant]
    ByteDropout.enabled = BatchedAttention.enabled = Kernels.enabled = fast
    SlicedCrossEntropy.enabled = sliced
    torch.set_float32_matmul_precision("medium")
    if kept:
        keep_freed_memory()
    precision = Precision(torch.device("cpu"), name, "")
    torch.manual_seed(1)
    model = Translator(ModelConfig(config.vocab, config.vocab, **LAB, dropout=DROPOUT)).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    ids = torch.randint(config.vocab, (config.tokens // LENGTH, LENGTH))
    batch = ids, torch.zeros_like(ids, dtype=torch.bool), ids, torch.arange(ids.numel()), ids.flatten()
    loss_of, before = SummedLoss(model, LABEL_SMOOTHING), resident_gib()
    for step in range(1, 4):
        with precision.autocast():
            loss = loss_of(*batch) / config.tokens
        precision.backward(loss)
        precision.step(optimizer, parameters, 1.0, step)
    return {"step_gib": peak_rss_gib() - before, "process_gib": peak_rss_gib(), "loss": loss.item()}


def resident_gib() -> float:
    """What this process holds now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        raise UserError("this benchmark reads /proc/self/statm, which only Linux has") from None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


def start(name: str, config: Config) -> dict | None:
    """One variant in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.memory", "--variant", name, "--vocab", config.vocab,
             "--tokens", config.tokens]  # fmt: skip
    environment = {**os.environ, **pinned(config.threads)}
    done = subprocess.run([*map(str, words)], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: {done.stderr.strip().splitlines()[-1]}")
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(config: Config) -> None:
    """Every variant once: memory does not scatter."""
    if config.variant:
        print(json.dumps(measure(config)))
        return
    runs = take_turns(
        "peak memory of a training step", list(VARIANTS), 1, lambda name: start(name, config), ROOT / Path(config.out),
        append=False, vocab=config.vocab, tokens=config.tokens,
    )  # fmt: skip
    print(f"\nGiB above model, optimizer and batch; {config.tokens:,} target tokens, vocabulary {config.vocab:,}")
    print_table(compare(runs, "step_gib", "plain", ["process_gib", "loss"]), "GiB", decimals=2)


if __name__ == "__main__":
    settings = parse_flags(Config, "peak memory of a training step")
    run_script(lambda: main(settings))
