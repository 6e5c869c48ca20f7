"""Does the cost of training grow as it should: not with the number of pairs, and with their length as the FLOPs say?

    python -m benchmarks.linearity                       # both tables
    python -m benchmarks.linearity --part pairs --steps 40
    python -m benchmarks.linearity --part lengths --out lengths.json

The lab's model on made-up pairs. Sizes and lengths take turns. Real target tokens a second, padding not counted; what the FLOPs
predict is relative to the shortest length.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.data_pipeline import IDS, make_store
from benchmarks.measuring import compare, interleave, print_table, write_json
from data import Batch, BucketSampler, Collate, TokenizedPairs
from engine.allocator import keep_freed_memory
from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from engine.precision import choose_precision
from model import PRESETS, ModelConfig, SummedLoss, Translator, training_flops

VOCAB = 8000
WARM_UP = 3  # steps before the clock runs


@dataclass
class Config:
    """Every setting of this benchmark."""

    part: str = flag("all", "what to measure (all|pairs|lengths)", "What")
    pairs: str = flag("10000,100000,1000000", "sizes of the data, in pairs", "What")
    lengths: str = flag("16,32,64,128,256", "lengths of both sides, in tokens", "What")
    tokens_per_batch: int = flag(4096, "padded tokens a side in a step", "How")
    steps: int = flag(30, "steps of a turn", "How")
    rounds: int = flag(3, "turns of each", "How")
    out: str = flag("runs/benchmarks/linearity.json", "where the figures go", "How")

    def __post_init__(self):
        if self.part not in ("all", "pairs", "lengths"):
            raise UserError(f"--part {self.part} is unknown; choose all, pairs or lengths")


def main(config: Config, sizes: dict | None = None) -> None:
    """Measure, print, write."""
    keep_freed_memory()
    runs = []
    model = ModelConfig(VOCAB, VOCAB, **(sizes or PRESETS["lab"]))
    with tempfile.TemporaryDirectory() as folder:
        if config.part in ("all", "pairs"):
            stores = {f"{int(pairs):,} pairs": Path(folder) / pairs for pairs in config.pairs.split(",")}
            for store in stores.values():
                make_store(store, int(store.name))
            found = interleave(stores, config.rounds, lambda name: train_on_store(model, stores[name], config))
            print_table(compare(found, "target_tokens_per_second", baseline=next(iter(stores))), "target tokens/s")
            runs += found
        if config.part in ("all", "lengths"):
            lengths = {f"length {length}": int(length) for length in config.lengths.split(",")}
            shortest = min(lengths.values())

            def run(name: str) -> dict:
                figures = train_on_length(model, lengths[name], config)
                predicted = flops_per_token(model, shortest) / flops_per_token(model, lengths[name])
                return figures | {"predicted_ratio": predicted}

            found = interleave(lengths, config.rounds, run)
            more = ["predicted_ratio", "gflops"]
            rows = compare(found, "target_tokens_per_second", baseline=f"length {shortest}", more=more)
            print_table(rows, "target tokens/s")
            runs += found
    write_json(config.out, runs, title="cost by pairs and by length")


def train_on_store(model: ModelConfig, store: Path, config: Config) -> dict:
    """Steps over the pairs of a store, from opening it on."""
    pairs = TokenizedPairs(store)
    sampler = BucketSampler(pairs.lengths, config.tokens_per_batch)
    return time_steps(model, iter(DataLoader(pairs, batch_sampler=sampler, collate_fn=Collate(IDS, IDS))), config.steps)


def train_on_length(model: ModelConfig, length: int, config: Config) -> dict:
    """Steps over one batch of pairs with `length` tokens a side, begin or end included."""
    ids = np.random.default_rng(length).integers(3, VOCAB, (config.tokens_per_batch // length, 2, length - 1))
    figures = time_steps(model, repeat(Collate(IDS, IDS)([(source, target) for source, target in ids])), config.steps)
    flops = flops_per_token(model, length) * figures["target_tokens_per_second"]
    return figures | {"gflops": flops / 1e9}


def time_steps(sizes: ModelConfig, batches: Iterator[Batch], steps: int) -> dict:
    """Real target tokens a second of the loop of train.py without its log and checkpoints."""
    torch.manual_seed(1)
    precision = choose_precision(torch.device("cpu"), "fp32")
    model = Translator(sizes).train()
    runner, parameters = SummedLoss(model, 0.1), list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    tokens = 0
    for step in range(-WARM_UP, steps):
        if step == 0:
            tokens, begun = 0, time.perf_counter()
        batch = next(batches)
        loss = runner(batch.src, batch.src_pad, batch.tgt_in, batch.real, batch.tgt_out) / batch.target_tokens
        precision.backward(loss)
        precision.step(optimizer, parameters, 1.0, step + WARM_UP + 1)
        tokens += batch.target_tokens
    seconds = time.perf_counter() - begun
    return {"target_tokens_per_second": tokens / seconds, "milliseconds_a_step": 1000 * seconds / steps}


def flops_per_token(model: ModelConfig, length: int) -> float:
    """Training FLOPs for each target token and its source token, attention scores included.

    Scores and their weighted sum cost 2·length·d_model each a token forward, and twice that backward: in each encoder layer
    once, in each decoder layer twice (itself and the source; the triangle that causality cuts off is computed as well).
    """
    attentions = model.num_encoder_layers + 2 * model.num_decoder_layers
    return training_flops(model, 1, 1) + 3 * 4 * length * model.d_model * attentions


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "training speed by number of pairs and by length")))
