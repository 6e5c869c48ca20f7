"""How fast do texts become batches, and does the cost of training grow as it should?

    python -m benchmarks.data                                        # epoch and loader
    python -m benchmarks.data --part growth --steps 15 --rounds 1    # or another part

epoch      from opening the store to the first batch out of the loader, over made-up pairs (random lengths, random ids); every
           start in a process of its own, and so is its memory: what the process holds at most beyond its imports
loader     real target tokens a second out of the loader alone, and the share of padding
growth     training by number of pairs (it should not change) and by their length (as the FLOPs say); lab's model, made-up pairs
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

import numpy as np
import torch

from benchmarks.corpus import text_at
from benchmarks.measuring import ROOT, in_new_process, measure
from benchmarks.peers.contest import SIZES
from benchmarks.peers.ours import make_trainer, time_steps
from data import (
    Batch,
    BucketSampler,
    Collate,
    Rows,
    TokenizedPairs,
    TokenWriter,
    batches_of,
    collate_for,
    prepare,
)
from engine.config import flag, parse_flags
from engine.errors import run_script
from engine.memory import held_gib
from engine.precision import choose_precision
from model import ModelConfig, training_flops

CPU = torch.device("cpu")
IDS = {"pad": 0, "bos": 1, "eos": 2}
STARTS = {"epoch 1": 0.0, "epoch 3": 2.0, "middle of epoch 3": 2.5}  # epochs that are already done
GROWTH_VOCAB, TOKENS = 8000, 4096  # of growth: the vocabularies, padded tokens a side in a step
LAB = ModelConfig(GROWTH_VOCAB, GROWTH_VOCAB, **SIZES["lab"])
PAIRS, LENGTHS = (10_000, 100_000, 1_000_000), (16, 32, 64, 128, 256)


@dataclass
class Config:
    part: str = flag("all", "what to measure (all|epoch|loader|growth)", "What")
    data: str = flag("", "parallel text; MINIDATASET, else /opt/minidataset, else sample/", "What")
    vocab: int = flag(8000, "tokens in each vocabulary", "What", min=300, max=60000)
    pairs: int = flag(
        10_000_000, "made-up pairs of the epoch, and at most of growth", "What", min=100
    )
    steps: int = flag(30, "growth: steps of a turn", "How", min=1)
    seconds: float = flag(5.0, "loader: of each turn", "How", above=0)
    rounds: int = flag(3, "turns of each", "How", min=1)
    out: str = flag("runs/benchmarks/data", "folder for all turns, a file PART.json each", "How")


def main(config: Config) -> None:
    """One part, or the first two."""
    parts = dict(epoch=time_epoch, loader=time_loader, growth=time_growth)
    for part in [config.part] if config.part != "all" else ["epoch", "loader"]:
        with tempfile.TemporaryDirectory() as folder:
            parts[part](replace(config, out=f"{config.out}/{part}.json"), Path(folder))


def time_epoch(config: Config, folder: Path) -> None:
    """The start of an epoch over many pairs."""
    make_store(folder / "store", config.pairs)
    turn = lambda name: in_new_process(start_epoch, folder / "store", STARTS[name])  # noqa: E731
    measure(f"start of an epoch over {config.pairs:,} pairs", STARTS, config, turn, "seconds")


def make_store(folder: Path, pairs: int) -> None:
    """Made-up pairs as `TokenizedPairs` reads them: lengths like those of text (log-normal, median 20), ids at random."""
    random = np.random.default_rng(1)
    writer = TokenWriter(folder, {"source": GROWTH_VOCAB, "target": GROWTH_VOCAB})
    ids = random.integers(3, GROWTH_VOCAB, 2**20, dtype=np.uint16)
    for first in range(0, pairs, 10**6):
        count = min(10**6, pairs - first)
        meaning = random.normal(
            3.0, 0.6, count
        )  # what both sides have to say, as the logarithm of its length
        for side in ("source", "target"):
            lengths = np.exp(meaning + random.normal(0, 0.15, count)).clip(1, 200).astype(np.int32)
            writer.write(side, Rows(np.resize(ids, lengths.sum()), lengths))
    writer.close()


def start_epoch(store: Path, epochs_done: float) -> dict:
    """Seconds from opening the store to the first batch of a run that has done so many epochs, and the memory it took."""
    before, begun = held_gib("VmRSS"), time.perf_counter()
    pairs = TokenizedPairs(store)
    sampler = BucketSampler(pairs.lengths, TOKENS)
    sampler.step = int(epochs_done * sampler.steps_per_epoch)
    next(sampler.target_tokens(sampler.step))
    next(batches_of(pairs, sampler, Collate(IDS, IDS), 0, CPU))
    seconds, peak = time.perf_counter() - begun, held_gib()
    return {"seconds": seconds, "peak_gib": peak, "growth_gib": peak - before, "pairs": len(pairs)}


def time_loader(config: Config, folder: Path) -> None:
    """The loader alone, at two sizes of a batch."""
    prepared = prepare(
        text_at(config.data),
        ROOT / "runs/.cache",
        source_vocab=config.vocab,
        target_vocab=config.vocab,
    )
    names = {f"loader, {budget:,} tokens a batch": budget for budget in (4096, 16384)}

    def turn(name: str) -> dict:
        sampler = BucketSampler(prepared.train.lengths, names[name])
        batches = batches_of(prepared.train, sampler, collate_for(prepared), 0, CPU)
        next(batches)
        counts, begun = np.zeros(4), time.perf_counter()  # of each side: tokens, places
        while time.perf_counter() - begun < config.seconds:
            batch = next(batches)
            counts += (
                batch.source_tokens,
                batch.target_tokens,
                batch.src.numel(),
                batch.tgt_in.numel(),
            )
        speed = counts[1] / (time.perf_counter() - begun)
        source, target = 1 - counts[:2] / counts[2:]
        return {
            "target_tokens_per_second": speed,
            "padding_source": source,
            "padding_target": target,
        }

    measure("the loader alone", names, config, turn, "target_tokens_per_second")


def time_growth(config: Config, folder: Path) -> None:
    """Training speed by number of pairs and by length."""
    stores = {f"{pairs:,} pairs": folder / str(pairs) for pairs in PAIRS if pairs <= config.pairs}
    for store in stores.values():
        make_store(store, int(store.name))
    lengths = {f"length {length}": length for length in LENGTHS}

    def turn(name: str) -> dict:
        if name in stores:  # from opening the store on
            pairs = TokenizedPairs(stores[name])
            batches = batches_of(
                pairs, BucketSampler(pairs.lengths, TOKENS), Collate(IDS, IDS), 0, CPU
            )
            return speed_of(batches, config.steps)
        length = lengths[name]  # one batch again and again; begin or end are among the tokens
        ids = np.random.default_rng(length).integers(
            3, GROWTH_VOCAB, (TOKENS // length, 2, length - 1)
        )
        predicted = flops_per_token(LAB, LENGTHS[0]) / flops_per_token(LAB, length)
        return speed_of(repeat(Collate(IDS, IDS)(list(ids))), config.steps) | {
            "predicted_ratio": predicted
        }

    measure(
        "cost by pairs", stores, config, turn, "target_tokens_per_second", next(iter(stores), "")
    )
    config = replace(config, out=config.out.removesuffix(".json") + "-length.json")
    measure("cost by length", lengths, config, turn, "target_tokens_per_second", "length 16")


def speed_of(batches: Iterator[Batch], steps: int) -> dict:
    """Of the loop of train.py without its log and checkpoints, in fp32."""
    take_step = make_trainer(LAB, choose_precision(CPU, "fp32"))

    def step() -> int:
        take_step(batch := next(batches))
        return batch.target_tokens

    return time_steps(step, steps)


def flops_per_token(model: ModelConfig, length: int) -> float:
    """Training FLOPs for each target token and its source token, attention scores included.

    Scores and their weighted sum cost 2·length·d_model each a token forward, and twice that backward: in each encoder layer
    once, in each decoder layer twice (itself and the source; the triangle that causality cuts off is computed as well).
    """
    attentions = model.num_encoder_layers + 2 * model.num_decoder_layers
    return training_flops(model, 1, 1) + 3 * 4 * length * model.d_model * attentions


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "from texts to batches, cost of growth")))
