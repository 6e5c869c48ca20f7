"""How fast do texts become batches, how long until the first step, does the cost grow as it should, what does watching cost?

    python -m benchmarks.data                                        # stages, epoch and loader
    python -m benchmarks.data --part growth --steps 15 --rounds 1    # or another part
    python -m benchmarks.data --part telemetry --steps 200

stages     reading, cleaning, training tokenizers, tokenising, one after the other, once
epoch      from opening the store to the first batch out of the loader, over made-up pairs (random lengths, random ids); every
           start in a process of its own, and so is its memory: what the process holds at most beyond its imports
loader     real target tokens a second out of the loader alone, and the share of padding
startup    train.py to its first step, evaluate.py to the score of 128 rows, as a user starts them; the data is tokenised already
growth     training by number of pairs (it should not change) and by their length (as the FLOPs say); lab's model, made-up pairs
telemetry  the time that log, curves, meters and samplers take of steps of train.py, once
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

import train
from benchmarks.corpus import text_at
from benchmarks.measuring import ROOT, in_new_process, measure
from benchmarks.peers.contest import SIZES
from benchmarks.peers.ours import make_trainer, time_steps
from data import Batch, BucketSampler, Collate, batches_of, collate_for
from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from engine.memory import held_gib
from engine.precision import Precision, choose_precision
from engine.telemetry import GpuSampler, Log, Meter, ProcessMeter, Telemetry
from model import ModelConfig, training_flops
from text.cleaning import clean_pairs, held_out_rows
from text.prepare import TOKENIZER_LINES, _make_tokenizers, _write_train, prepare
from text.store import TokenizedPairs, TokenWriter

CPU = torch.device("cpu")
IDS = {"pad": 0, "bos": 1, "eos": 2}
STARTS = {"epoch 1": 0.0, "epoch 3": 2.0, "middle of epoch 3": 2.5}  # epochs that are already done
GROWTH_VOCAB, TOKENS = 8000, 4096  # of growth: the vocabularies, padded tokens a side in a step
LAB = ModelConfig(GROWTH_VOCAB, GROWTH_VOCAB, **SIZES["lab"])
PAIRS, LENGTHS = (10_000, 100_000, 1_000_000), (16, 32, 64, 128, 256)
WATCHING = [(Log, "__call__"), (Telemetry, "scalars"), (Meter, "add"), (Meter, "end_step"), (Meter, "read"),
            (ProcessMeter, "read"), (GpuSampler, "read"), (GpuSampler, "_sample")]  # fmt: skip
WARM = 20  # steps of train.py before the clock of `WATCHING` starts


@dataclass
class Config:
    part: str = flag("all", "what to measure (all|stages|epoch|loader|startup|growth|telemetry)", "What")
    data: str = flag("", "parallel text; MINIDATASET, else /opt/minidataset, else sample/", "What")
    vocab: int = flag(8000, "tokens in each vocabulary", "What", least=300, most=60000)
    pairs: int = flag(10_000_000, "made-up pairs of the epoch, and at most of growth", "What", least=100)
    steps: int = flag(30, "growth, telemetry: steps of a turn", "How", least=1)
    seconds: float = flag(5.0, "loader: of each turn", "How", above=0)
    rounds: int = flag(3, "turns of each", "How", least=1)
    out: str = flag("runs/benchmarks/data", "folder for all turns, a file PART.json each", "How")


def main(config: Config) -> None:
    """One part, or the first three."""
    parts = dict(stages=time_stages, epoch=time_epoch, loader=time_loader, startup=time_startup, growth=time_growth,
                 telemetry=time_telemetry)  # fmt: skip
    for part in [config.part] if config.part != "all" else ["stages", "epoch", "loader"]:
        with tempfile.TemporaryDirectory() as folder:
            parts[part](replace(config, out=f"{config.out}/{part}.json"), Path(folder))


def time_stages(config: Config, folder: Path) -> None:
    """The stages of `text.prepare`, once, in order: each needs what the one before it left."""
    text, lines, counts, tokenizers = text_at(config.data), folder / "clean.txt", Counter(), {}

    def clean() -> int:
        with open(lines, "w", encoding="utf-8") as file:
            for source, target in clean_pairs(text, held_out_rows(text), 512, counts):
                file.write(f"{source}\n{target}\n")
                counts["kept"] += 1
        return counts["read"]

    def train_tokenizers() -> int:
        tokenizers.update(_make_tokenizers(lines, counts["kept"], "", [config.vocab] * 2, lambda line: None))
        return -(-counts["kept"] // -(-counts["kept"] // TOKENIZER_LINES))

    def tokenise() -> int:
        pairs = counts["kept"]
        _write_train(lines, folder / "train", tokenizers, 512, counts)
        return pairs

    stages = {"reading": lambda: sum(map(len, text.rows("train"))), "reading and cleaning": clean,
              "training two tokenizers": train_tokenizers, "tokenising and writing": tokenise}  # fmt: skip

    def turn(name: str) -> dict:
        begun = time.perf_counter()
        pairs = stages[name]()
        seconds = time.perf_counter() - begun
        return {"pairs_per_second": pairs / seconds, "seconds": seconds, "pairs": pairs}

    measure("text to tokens", stages, replace(config, rounds=1), turn, "pairs_per_second")


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
        meaning = random.normal(3.0, 0.6, count)  # what both sides have to say, as the logarithm of its length
        for side in ("source", "target"):
            lengths = np.exp(meaning + random.normal(0, 0.15, count)).clip(1, 200).astype(np.int32)
            writer.write_flat(side, np.resize(ids, lengths.sum()), lengths)
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
    prepared = prepare(text_at(config.data), ROOT / "runs/.cache", source_vocab=config.vocab, target_vocab=config.vocab)
    names = {f"loader, {budget:,} tokens a batch": budget for budget in (4096, 16384)}

    def turn(name: str) -> dict:
        sampler = BucketSampler(prepared.train.lengths, names[name])
        batches = batches_of(prepared.train, sampler, collate_for(prepared), 0, CPU)
        next(batches)
        counts, begun = np.zeros(4), time.perf_counter()  # of each side: tokens, places
        while time.perf_counter() - begun < config.seconds:
            batch = next(batches)
            counts += batch.source_tokens, batch.target_tokens, batch.src.numel(), batch.tgt_in.numel()
        speed = counts[1] / (time.perf_counter() - begun)
        source, target = 1 - counts[:2] / counts[2:]
        return {"target_tokens_per_second": speed, "padding_source": source, "padding_target": target}

    measure("the loader alone", names, config, turn, "target_tokens_per_second")


def time_startup(config: Config, folder: Path) -> None:
    """Both scripts, as a user starts them: to the first step, to the score of a first batch of sentences."""
    data = Path(text_at(config.data).path).resolve()
    commands = {
        "train.py": (r"step +1 .* loss", "--data", data, "--max_steps", 1, "--log_every", 1, "--run", "first"),
        "evaluate.py": ("BLEU", "--ckpt", "runs/first", "--limit", 128),
    }

    def turn(script: str) -> dict:
        if script == "train.py":
            shutil.rmtree(folder / "runs" / "first", ignore_errors=True)
        return {"seconds": seconds_to(script, *commands[script], cwd=folder)}

    turn("train.py")  # which fills the cache
    measure("from the command to the first step or score", commands, config, turn, "seconds")


def seconds_to(script: str, pattern: str, *arguments, cwd: Path) -> float:
    """From the command to the first line like `pattern`; the script goes on to its end. `UserError` if it fails."""
    words, begun, times = [sys.executable, str(ROOT / script), *map(str, arguments)], time.perf_counter(), []
    options = dict(cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8")
    with subprocess.Popen(words, **options) as process:
        for line in process.stdout:
            times += [time.perf_counter()] * bool(re.match(pattern, line))
    if process.returncode:
        raise UserError(f"{' '.join(words)} failed; the last it said was: {line.strip()}")
    return times[0] - begun


def time_growth(config: Config, folder: Path) -> None:
    """Training speed by number of pairs and by length."""
    stores = {f"{pairs:,} pairs": folder / str(pairs) for pairs in PAIRS if pairs <= config.pairs}
    for store in stores.values():
        make_store(store, int(store.name))
    lengths = {f"length {length}": length for length in LENGTHS}

    def turn(name: str) -> dict:
        if name in stores:  # from opening the store on
            pairs = TokenizedPairs(stores[name])
            batches = batches_of(pairs, BucketSampler(pairs.lengths, TOKENS), Collate(IDS, IDS), 0, CPU)
            return speed_of(batches, config.steps)
        length = lengths[name]  # one batch again and again; begin or end are among the tokens
        ids = np.random.default_rng(length).integers(3, GROWTH_VOCAB, (TOKENS // length, 2, length - 1))
        predicted = flops_per_token(LAB, LENGTHS[0]) / flops_per_token(LAB, length)
        return speed_of(repeat(Collate(IDS, IDS)(list(ids))), config.steps) | {"predicted_ratio": predicted}

    measure("cost by pairs", stores, config, turn, "target_tokens_per_second", next(iter(stores), ""))
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


def time_telemetry(config: Config, folder: Path) -> None:
    """The time inside each method of `WATCHING`, of the sampler's thread its computing. Runs differ by more than that takes.

    On a GPU a log line also waits for the loss, which is not in it.
    """
    spent, times, take_step = Counter(), [], Precision.step  # times: when the clock started and stopped

    def counted(owner: type, name: str):
        method, clock = getattr(owner, name), time.thread_time if name == "_sample" else time.perf_counter

        def call(*arguments, **flags):
            begun, result = clock(), method(*arguments, **flags)
            spent[f"{owner.__name__}.{name}"] += (clock() - begun) * (len(times) == 1)
            return result

        return patch.object(owner, name, call)

    def timed(*arguments):
        norm = take_step(*arguments)
        if arguments[-1] in (WARM, WARM + config.steps):  # the step's number
            norm.item()  # what was only sent to a GPU belongs to the time before
            times.append(time.perf_counter())
        return norm

    def turn(_) -> dict:
        with ExitStack() as patches:
            for owner, name in WATCHING:  # none of them calls another
                patches.enter_context(counted(owner, name))
            patches.enter_context(patch.object(Precision, "step", timed))
            data, run, steps = text_at(config.data).path, f"{folder}/run", WARM + config.steps + 1
            train.train(train.Config(data=data, run=run, max_steps=steps, eval_every=10**9))
        seconds = times[1] - times[0]
        return {"share": sum(spent.values()) / seconds, "seconds": seconds, **spent}

    measure("time spent watching", ["telemetry"], replace(config, rounds=1), turn, "share")


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "texts to batches, to the first step, cost of growth and of watching")))
