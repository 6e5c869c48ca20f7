"""How fast texts become batches: by stage, the start of an epoch over ten million pairs, and the loader alone.

    python -m benchmarks.data_pipeline                              # all three on MINIDATASET, /opt/minidataset or sample/
    python -m benchmarks.data_pipeline --part stages --vocab 16000
    python -m benchmarks.data_pipeline --part epoch --pairs 10000000
    python -m benchmarks.data_pipeline --part loader --out loader.json

The epoch's pairs are made up (random lengths, random ids); every start is measured in a process of its own, from opening the
store to the first batch out of the DataLoader, and so is its memory: what the process holds at most beyond its imports.
"""

import os
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

import data
from benchmarks.measuring import Run, compare, interleave, print_table, write_json
from data import BucketSampler, Collate, TokenizedPairs, TokenWriter, collate_for, prepare
from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from text.cleaning import clean_pairs, held_out_rows
from text.rows import default_path, find_text

IDS = {"pad": 0, "bos": 1, "eos": 2}
STARTS = {"epoch 1": 0.0, "epoch 3": 2.0, "middle of epoch 3": 2.5}  # epochs that are already done


@dataclass
class Config:
    """Every setting of this benchmark."""

    part: str = flag("all", "what to measure (all|stages|epoch|loader)", "What")
    data: str = flag("", "parallel text; MINIDATASET, else /opt/minidataset, else sample/", "What")
    vocab: int = flag(8000, "tokens in each vocabulary", "What")
    pairs: int = flag(10_000_000, "made-up pairs of the epoch", "What")
    seconds: float = flag(5.0, "of each turn of the loader", "How")
    rounds: int = flag(3, "turns of each", "How")
    out: str = flag("runs/benchmarks/data_pipeline.json", "where the figures go", "How")

    def __post_init__(self):
        if self.part not in ("all", "stages", "epoch", "loader"):
            raise UserError(f"--part {self.part} is unknown; choose all, stages, epoch or loader")


def main(config: Config) -> None:
    """Measure, print, write."""
    text = find_text(config.data or os.environ.get("MINIDATASET") or default_path())
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        if config.part in ("all", "stages"):
            stages = time_stages(text, config.vocab, Path(folder) / "stages")
            runs += interleave(stages, 1, lambda name: stages[name]())
            print_table(compare(runs, "pairs_per_second", more=["seconds"]), "pairs/s")
        if config.part in ("all", "epoch"):
            store = Path(folder) / "store"
            make_store(store, config.pairs)
            starts = interleave(STARTS, config.rounds, lambda name: in_new_process(start_epoch, store, STARTS[name]))
            print_table(compare(starts, "seconds", more=["peak_gib", "growth_gib"]), "s", decimals=2)
            runs += starts
        if config.part in ("all", "loader"):
            prepared = prepare(text, Path("runs/.cache"), source_vocab=config.vocab, target_vocab=config.vocab)
            names = {f"loader, {budget:,} tokens a batch": budget for budget in (4096, 16384)}
            loads = interleave(names, config.rounds, lambda name: time_loader(prepared, names[name], config.seconds))
            more = ["padding_source", "padding_target", "padding_both"]
            print_table(compare(loads, "target_tokens_per_second", more=more), "target tokens/s")
            runs += loads
    write_json(config.out, runs, title="texts to batches")


def time_stages(text, vocab: int, folder: Path) -> dict:
    """The stages of `data.prepare`, one function each, to be called in this order."""
    folder.mkdir()
    counts, lines, tokenizers = Counter(), folder / "clean.txt", {}

    def read() -> int:
        return sum(map(len, text.rows("train")))

    def clean() -> int:
        with open(lines, "w", encoding="utf-8") as file:
            for source, target in clean_pairs(text, held_out_rows(text), 512, counts):
                file.write(f"{source}\n{target}\n")
                counts["kept"] += 1
        return counts["read"]

    def train_tokenizers() -> int:
        tokenizers.update(data._make_tokenizers(lines, counts["kept"], "", [vocab, vocab], lambda line: None))
        return -(-counts["kept"] // -(-counts["kept"] // data.TOKENIZER_LINES))

    def tokenise() -> int:
        pairs = counts["kept"]
        data._write_train(lines, folder / "train", tokenizers, 512, counts)
        return pairs

    def timed(stage):
        def run() -> dict:
            begun = time.perf_counter()
            pairs = stage()
            seconds = time.perf_counter() - begun
            return {"pairs_per_second": pairs / seconds, "seconds": seconds, "pairs": pairs}

        return run

    stages = {"reading": read, "reading and cleaning": clean, "training two tokenizers": train_tokenizers}
    return {name: timed(stage) for name, stage in (stages | {"tokenising and writing": tokenise}).items()}


def make_store(folder: Path, pairs: int, seed: int = 1, longest: int = 200, vocab: int = 8000) -> None:
    """Made-up pairs as `TokenizedPairs` reads them: lengths like those of text (log-normal, median 20), ids at random."""
    random = np.random.default_rng(seed)
    writer = TokenWriter(folder, {"source": vocab, "target": vocab})
    some_ids = random.integers(3, vocab, 2**20, dtype=np.uint16)
    for first in range(0, pairs, 10**6):
        count = min(10**6, pairs - first)
        meaning = random.normal(3.0, 0.6, count)  # what both sides have to say, as the logarithm of its length
        for side in ("source", "target"):
            lengths = np.exp(meaning + random.normal(0, 0.15, count)).clip(1, longest).astype(np.int32)
            writer.write_flat(side, np.resize(some_ids, lengths.sum()), lengths)
    writer.close()


def start_epoch(store: Path, epochs_done: float, tokens_per_batch: int = 4096) -> dict:
    """Seconds from opening the store to the first batch of a run that has done so many epochs, and the memory it took."""
    before = held_gib("VmRSS")
    begun = time.perf_counter()
    pairs = TokenizedPairs(store)
    sampler = BucketSampler(pairs.lengths, tokens_per_batch)
    step = int(epochs_done * sampler.steps_per_epoch)
    sampler.load_state_dict({"step": step})
    next(sampler.target_tokens(step))
    next(iter(DataLoader(pairs, batch_sampler=sampler, collate_fn=Collate(IDS, IDS))))
    seconds = time.perf_counter() - begun
    peak = held_gib("VmHWM")
    return {"seconds": seconds, "peak_gib": peak, "growth_gib": peak - before, "pairs": len(pairs)}


def held_gib(which: str) -> float:
    """Memory of this process: VmRSS now, VmHWM at most. (ru_maxrss would count what the parent process had held.)"""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(which)) / 2**20


def in_new_process(function, *arguments):
    """The function's result, from a process that has done nothing before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def time_loader(prepared, tokens_per_batch: int, seconds: float) -> dict:
    """Real target tokens a second out of the loader, in this process alone, and the share of padding in a whole epoch."""
    sampler = BucketSampler(prepared.train.lengths, tokens_per_batch)
    batches = iter(DataLoader(prepared.train, batch_sampler=sampler, collate_fn=collate_for(prepared)))
    next(batches)
    tokens, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        tokens += next(batches).target_tokens
    figures = {"target_tokens_per_second": tokens / (time.perf_counter() - begun)}
    return figures | padding_shares(prepared.train.lengths, sampler)


def padding_shares(lengths: dict[str, np.ndarray], sampler: BucketSampler) -> dict[str, float]:
    """The share of padding among the places of the source side, the target side and both, over the first epoch."""
    real, places = Counter(), Counter()
    for pairs in sampler.epoch_plan(0):
        for side in ("source", "target"):
            widths = lengths[side][pairs] + 1
            real[side] += int(widths.sum())
            places[side] += int(len(pairs) * widths.max())
    shares = {f"padding_{side}": 1 - real[side] / places[side] for side in real}
    return shares | {"padding_both": 1 - real.total() / places.total()}


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "reading, cleaning, tokenising, batching")))
