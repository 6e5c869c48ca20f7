"""How far training is from the machine's limit: its matrix products alone, and the peak of one large product.

    python -m benchmarks.limits
    python -m benchmarks.limits --ours runs/benchmarks/training.json     # with the shares that "ours" reaches

The limit of a model's shapes is the speed of a step that did nothing but its matrix products, forward and backward, at their own
sizes; everything else (attention scores, norms, dropout, softmax, the update) comes on top. Model FLOPs utilisation is the
other measure: counted FLOPs of a step over what one large product of the same number format reaches on this machine.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.corpus import load_corpus
from benchmarks.measuring import compare, describe_machine, interleave, print_table, read_json, tokens_of, write_json
from benchmarks.peers.contest import LAB, TOKENS_PER_BATCH
from engine.allocator import keep_freed_memory
from engine.config import flag, parse_flags
from engine.errors import run_script
from model import ModelConfig, training_flops

FORMATS = {  # name: (number format, fp32 products by oneDNN or MKL)
    "fp32, MKL": (torch.float32, "highest"),
    "fp32, oneDNN": (torch.float32, "medium"),
    "bf16": (torch.bfloat16, "medium"),
}
LARGE = 2048  # rows, columns and depth of the large product


@dataclass
class Config:
    """Every setting of this benchmark."""

    rounds: int = flag(2, "turns of each number format", "Benchmark")
    threads: int = flag(2, "compute threads", "Benchmark")
    data: str = flag("", "as train.py's --data; MINIDATASET, else as there", "Benchmark")
    ours: str = flag("", "a file of benchmarks.training: the share of the limit that ours-* reach", "Benchmark")
    out: str = flag("runs/benchmarks/limits.json", "file for all turns", "Benchmark")


def products(sizes: ModelConfig, source: int, target: int) -> list[tuple[int, int, int]]:
    """(rows, in, out) of every linear map of a forward pass over so many tokens."""
    d, ff = sizes.d_model, sizes.dim_feedforward
    encoder = [(source, d, 3 * d), (source, d, d), (source, d, ff), (source, ff, d)]
    own = [(target, d, 3 * d), (target, d, d)]
    cross = [(target, d, d), (source, d, 2 * d), (target, d, d)]
    decoder = own + cross + [(target, d, ff), (target, ff, d)]
    layers = encoder * sizes.num_encoder_layers + decoder * sizes.num_decoder_layers
    return [*layers, (target, d, sizes.target_vocab)]


def seconds_of(rows: int, width: int, out: int, dtype: torch.dtype) -> float:
    """One linear map: the product forward and the two backward, the fastest of several times."""
    x, weight, gradient = (torch.randn(shape).to(dtype) for shape in ((rows, width), (out, width), (rows, out)))
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        _ = x @ weight.t(), gradient @ weight, gradient.t() @ x
        best = min(best, time.perf_counter() - begun)
    return best


def measure(name: str, sizes: ModelConfig, source: int, target: int) -> dict[str, float]:
    """The limits in one number format."""
    dtype, setting = FORMATS[name]
    torch.set_float32_matmul_precision(setting)
    cost = {shape: seconds_of(*shape, dtype) for shape in set(products(sizes, source, target))}
    seconds = sum(cost[shape] for shape in products(sizes, source, target))
    flops = training_flops(sizes, source, target)
    peak = 3 * 2 * LARGE**3 / seconds_of(LARGE, LARGE, LARGE, dtype)
    return {"target_tokens_per_second": target / seconds, "gflops": flops / seconds / 1e9, "peak_gflops": peak / 1e9,
            "gflop_per_target_token": flops / target / 1e9}  # fmt: skip


def main(config: Config) -> None:
    """Both limits, and how near "ours" comes."""
    torch.set_num_threads(config.threads)
    keep_freed_memory()
    corpus = load_corpus(config.data)
    sizes = ModelConfig(corpus.source_vocab, corpus.target_vocab, **LAB)
    sources, targets = (tokens_of(rows) for rows in zip(*corpus.train))
    source = round(TOKENS_PER_BATCH * sources / targets)
    print(f"limits of training\n{describe_machine()}\n{corpus.describe()}")
    runs = interleave(FORMATS, config.rounds, lambda name: measure(name, sizes, source, TOKENS_PER_BATCH))
    write_json(config.out, runs, corpus=corpus.describe(), threads=config.threads)
    print("\nmatrix products alone: real target tokens a second")
    rows = compare(runs, "target_tokens_per_second", "fp32, oneDNN", ["gflops", "peak_gflops"])
    print_table(rows, "tokens/s")
    if config.ours:
        shares(rows, read_json(Path(config.ours)), training_flops(sizes, source, TOKENS_PER_BATCH) / TOKENS_PER_BATCH)


def shares(limits: list, runs: list, flops_per_token: float) -> None:
    """What "ours" reaches of either limit."""
    limit = {row.contestant: row for row in limits}
    for row in compare(runs, "target_tokens_per_second"):
        name = {"ours-fp32": "fp32, oneDNN", "ours-bf16": "bf16"}.get(row.contestant)
        if name:
            utilisation = row.median * flops_per_token / 1e9 / limit[name].more["peak_gflops"]
            print(f"{row.contestant}: {row.median:,.0f} target tokens/s, {row.median / limit[name].median:.0%} of the matrix "
                  f"products alone; model FLOPs utilisation {utilisation:.0%}")  # fmt: skip


if __name__ == "__main__":
    settings = parse_flags(Config, "the limits of training")
    run_script(lambda: main(settings))
