"""How far training is from the machine's limit: its matrix products alone, and the peak of one large product.

    python -m benchmarks.limits
    python -m benchmarks.limits --ours runs/benchmarks/speed.json     # with the shares that "ours" reaches
    python -m benchmarks.limits --device cuda --preset big --tokens_per_batch 65536

The limit of a model's shapes is the speed of a step that did nothing but its matrix products, forward and backward, at their own
sizes; everything else (attention scores, norms, dropout, softmax, the update) comes on top. Model FLOPs utilisation is the
other measure: counted FLOPs of a step over what one large product of the same number format reaches on this machine.
"""

import time
from collections import Counter
from dataclasses import asdict, dataclass

import torch

from benchmarks.corpus import load_corpus
from benchmarks.measuring import ROOT, compare, print_table, read_json, take_turns, tokens_of
from benchmarks.peers.contest import SIZES, wait_for_gpu
from engine.config import flag, parse_flags
from engine.distributed import choose_device
from engine.errors import run_script
from model import ModelConfig, training_flops

FORMATS = {  # name: (number format, how fp32 products are computed)
    "cpu": {"fp32, MKL": (torch.float32, "highest"), "fp32, oneDNN": (torch.float32, "medium"),
            "bf16": (torch.bfloat16, "medium")},
    "cuda": {"fp32": (torch.float32, "highest"), "fp32 as TF32": (torch.float32, "high"),
             "bf16": (torch.bfloat16, "high"), "fp16": (torch.float16, "high")},
}  # fmt: skip
OURS = {"ours-fp32": ("fp32, oneDNN", "fp32 as TF32"), "ours-bf16": ("bf16",), "ours-fp16": ("fp16",)}  # their formats


@dataclass
class Config:
    """Every setting of this benchmark."""

    preset: str = flag("lab", "model size (lab|big|tiny)", "What")
    tokens_per_batch: int = flag(4096, "target tokens in a step", "What", least=64)
    large: int = flag(2048, "rows, columns and depth of the large product", "What", least=1)
    data: str = flag("", "as train.py's --data; MINIDATASET, else as there", "What")
    ours: str = flag("", "a file of benchmarks.training: the share of the limit that ours-* reach", "What")
    device: str = flag("cpu", "cpu, cuda or cuda:N", "How")
    rounds: int = flag(2, "turns of each number format", "How", least=1)
    threads: int = flag(2, "compute threads", "How", least=1)
    out: str = flag("runs/benchmarks/limits.json", "file for all turns", "How")


def main(config: Config) -> None:
    """Both limits, and how near "ours" comes."""
    torch.set_num_threads(config.threads)
    device = choose_device(config.device, 0)
    corpus = load_corpus(config.data)
    sizes = ModelConfig(corpus.source_vocab, corpus.target_vocab, **SIZES[config.preset])
    sources, targets = (tokens_of(rows) for rows in zip(*corpus.train))
    target = config.tokens_per_batch
    source = round(target * sources / targets)
    flops = training_flops(sizes, source, target)

    def turn(name: str) -> dict[str, float]:
        dtype, setting = FORMATS[device.type][name]
        torch.set_float32_matmul_precision(setting)
        shapes = Counter(products(sizes, source, target))
        seconds = sum(count * seconds_of(*shape, dtype, device) for shape, count in shapes.items())
        peak = 3 * 2 * config.large**3 / seconds_of(*[config.large] * 3, dtype, device)
        return {
            "target_tokens_per_second": target / seconds,
            "gflops": flops / seconds / 1e9,
            "peak_gflops": peak / 1e9,
        }

    runs = take_turns("limits of training", list(FORMATS[device.type]), config.rounds, turn, config.out,
                      corpus=corpus.describe(), settings=asdict(config))  # fmt: skip
    print(f"\nmatrix products alone, {flops / target / 1e6:.1f} MFLOP a target token: real target tokens a second")
    rows = compare(runs, "target_tokens_per_second", "", ["gflops", "peak_gflops"])
    print_table(rows, "tokens/s")
    for ours in compare(read_json(ROOT / config.ours) if config.ours else [], "target_tokens_per_second"):
        for row in (row for row in rows if row.contestant in OURS.get(ours.contestant, ())):
            utilisation = ours.median * flops / target / 1e9 / row.more["peak_gflops"]
            print(f"{ours.contestant}: {ours.median:,.0f} target tokens/s, {ours.median / row.median:.0%} of the matrix "
                  f"products alone; model FLOPs utilisation {utilisation:.0%}")  # fmt: skip


def products(sizes: ModelConfig, source: int, target: int) -> list[tuple[int, int, int]]:
    """(rows, in, out) of every linear map of a forward pass over so many tokens."""
    d, ff = sizes.d_model, sizes.dim_feedforward
    encoder = [(source, d, 3 * d), (source, d, d), (source, d, ff), (source, ff, d)]
    own = [(target, d, 3 * d), (target, d, d)]
    cross = [(target, d, d), (source, d, 2 * d), (target, d, d)]
    decoder = own + cross + [(target, d, ff), (target, ff, d)]
    layers = encoder * sizes.num_encoder_layers + decoder * sizes.num_decoder_layers
    return [*layers, (target, d, sizes.target_vocab)]


def seconds_of(rows: int, width: int, out: int, dtype: torch.dtype, device: torch.device) -> float:
    """One linear map: the product forward and the two backward, the fastest of several times."""
    shapes = ((rows, width), (out, width), (rows, out))
    x, weight, gradient = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    best = float("inf")
    for _ in range(5):
        wait_for_gpu()
        begun = time.perf_counter()
        _ = x @ weight.t(), gradient @ weight, gradient.t() @ x
        wait_for_gpu()
        best = min(best, time.perf_counter() - begun)
    return best


if __name__ == "__main__":
    settings = parse_flags(Config, "the limits of training")
    run_script(lambda: main(settings))
