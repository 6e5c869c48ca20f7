"""Training and decoding speed on one device, a turn at a time; what `benchmarks.gpu` measures."""

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader

import decoding
from benchmarks.corpus import encode_test
from benchmarks.measuring import Run, interleave
from data import BucketSampler, Collate, Prepared, collate_for
from engine.precision import Precision, choose_precision
from engine.telemetry import measured_peak_flops, peak_memory_gib
from fast.captured import CapturedTranslator
from model import PRESETS, ModelConfig, SummedLoss, Translator, training_flops
from text.rows import find_text
from text.subwords import special_ids
from trained import Trained

TINY = dict(d_model=32, nhead=4, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=64, dropout=0.1)
FIXED_LENGTH = 40  # tokens of every output of random weights
MOST_PASSES = 5  # over the test split in one turn
WAYS = ("plain", "captured", "kept")  # every step asked for; graphs made anew in every pass; graphs of the pass before
EPOCH_PAIRS = 432_000  # of the course's data, which the target of an epoch is about


@dataclass
class Bench:
    """What all parts work with, and what they have found so far."""

    config: object  # settings of benchmarks.gpu
    device: torch.device
    prepared: Prepared
    sources: list[list[int]]  # of the test split
    compile: bool
    checks: list = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # what could not be done, and why

    def sizes(self, preset: str, **changed) -> ModelConfig:
        """The sizes of a preset for this data."""
        vocabularies = len(self.prepared.source_tokenizer), len(self.prepared.target_tokenizer)
        return ModelConfig(*vocabularies, **((TINY if self.config.tiny else PRESETS[preset]) | changed))

    def attempt(self, name: str, work: Callable):
        """`work()`, or None if it fails: who has a GPU for an hour wants all that does work."""
        try:
            return work()
        except Exception as error:
            self.failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            print(f"FAILED  {name}: {self.failures[name]}", flush=True)
        finally:
            self.clear()

    def clear(self) -> None:
        """Leave the next turn what the last one held: memory, compiled code, the memory's peak."""
        torch.compiler.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measure(self, contestants: dict[str, Callable]) -> None:
        """A turn for each, kept as soon as it is over."""
        for one in contestants:
            self.runs += interleave([one], 1, lambda name: self.attempt(name, contestants[name]))


def train(bench: Bench, preset: str, precision_name: str, mode: str, tokens_per_batch: int) -> dict[str, float]:
    """One turn; → its figures."""
    config, device, sizes = bench.config, bench.device, bench.sizes(preset)
    precision = choose_precision(device, precision_name, training=True)
    peak_flops = measured_peak_flops(device, precision.dtype)
    one_step = trainer(bench, sizes, precision, mode == "compiled", tokens_per_batch)
    for _ in range(config.warm_steps):
        one_step()
    bench.wait()
    graphs, counts, begun = compiled_graphs(), Counter(), time.perf_counter()
    while time.perf_counter() - begun < config.seconds:
        counts.update(one_step())
    bench.wait()  # only here: in between the host runs ahead of the device, as in train.py
    seconds = time.perf_counter() - begun
    precision.check_finite()
    return figures_of(bench, sizes, counts, seconds, peak_flops) | {"recompiled": compiled_graphs() - graphs}


def trainer(bench: Bench, sizes: ModelConfig, precision: Precision, compiled: bool, tokens_per_batch: int) -> Callable:
    """A fresh model with train.py's optimizer and loader; → a function that takes a step and counts its tokens."""
    torch.manual_seed(1)
    model = Translator(sizes).to(bench.device).train()
    runner, parameters = SummedLoss(model, 0.1), list(model.parameters())
    if compiled:
        runner = torch.compile(runner, dynamic=True)
    # A constant learning rate, low enough to need no warm-up.
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    sampler = BucketSampler(bench.prepared.train.lengths, tokens_per_batch, seed=1)
    collate = collate_for(bench.prepared, pad_multiple=16 if compiled else 1)
    loader = DataLoader(bench.prepared.train, batch_sampler=sampler, collate_fn=collate,
                        num_workers=bench.config.workers, pin_memory=bench.device.type == "cuda")  # fmt: skip
    batches = iter(loader)

    def one_step() -> dict[str, float]:
        begun = time.perf_counter()
        batch = next(batches).to(bench.device)
        waited = time.perf_counter() - begun
        with precision.autocast():
            loss = runner(batch.src, batch.src_pad, batch.tgt_in, batch.real, batch.tgt_out) / batch.target_tokens
        precision.backward(loss)
        precision.step(optimizer, parameters, 1.0, 1)
        return {"source": batch.source_tokens, "target": batch.target_tokens, "steps": 1, "wait": waited}

    return one_step


def figures_of(
    bench: Bench, sizes: ModelConfig, counts: Counter, seconds: float, peak_flops: float
) -> dict[str, float]:
    """Speeds. `data_wait_share` is the host's: the device need not have been idle meanwhile."""
    speed = (counts["source"] + counts["target"]) / seconds
    lengths, pairs = bench.prepared.train.lengths, len(bench.prepared.train)
    epoch = (sum(int(side.sum()) for side in lengths.values()) + 2 * pairs) / speed  # each sentence has an end token
    flops = training_flops(sizes, counts["source"], counts["target"]) / seconds
    return {"tokens_per_second": speed, "model_flops_utilisation": flops / peak_flops, "peak_tflops": peak_flops / 1e12,
            "step_ms": 1000 * seconds / counts["steps"], "data_wait_share": counts["wait"] / seconds,
            "peak_gib": peak_memory_gib(bench.device), "epoch_seconds": epoch,
            "seconds_432k_pairs": epoch * EPOCH_PAIRS / pairs}  # fmt: skip


def compiled_graphs() -> int:
    """How many graphs torch.compile has made so far: one made while the clock runs spoils the turn."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def decode_random(bench: Bench, preset: str, precision: str, rows: int, way: str) -> dict[str, float]:
    """No output may end before `FIXED_LENGTH` tokens, and none goes on after."""
    torch.manual_seed(1)
    model, collate = Translator(bench.sizes(preset)), collate_for(bench.prepared)
    with torch.no_grad():
        model.output.bias[collate.target_ids["eos"]] = -1e9
    limit = lambda tokens, max_length: torch.full_like(tokens, FIXED_LENGTH)  # noqa: E731
    with patch.object(decoding, "output_limit", limit):
        return time_search(bench, model, bench.sources, collate, precision, rows, way)


def decode_run(bench: Bench, trained: Trained, precision: str, rows: int, way: str) -> dict[str, float]:
    """A trained run on the test split of its own data, in its own tokens."""
    tokenizers = {"src": trained.source_tokenizer, "tgt": trained.target_tokenizer}
    text = find_text(trained.config["data"], trained.config["source"], trained.config["target"])
    sources = sources_of(text, tokenizers, bench.config.test_rows, trained.model.config.max_length)
    collate = Collate(*map(special_ids, tokenizers.values()))
    return time_search(bench, trained.model, sources, collate, precision, rows, way)


def time_search(
    bench: Bench, model: Translator, sources, collate, precision_name: str, rows: int, way: str
) -> dict[str, float]:
    """Passes over all sources in one of the `WAYS`; → the median one. The first is not counted among them."""
    precision, seconds = choose_precision(bench.device, precision_name), []
    model.to(bench.device)
    with precision.autocast(), patch.object(CapturedTranslator, "enabled", way != "plain"):
        kept = CapturedTranslator(model) if way == "kept" else None
        while len(seconds) < 2 or (sum(seconds[1:]) < bench.config.seconds and len(seconds) <= MOST_PASSES):
            begun = time.perf_counter()
            found = decoding.search(model, sources, collate, rows_per_batch=rows,  # ends with ids on the host
                                    packed=CapturedTranslator(model) if way == "captured" else kept)  # fmt: skip
            seconds.append(time.perf_counter() - begun)
        if way != "plain" and not CapturedTranslator.enabled:
            raise RuntimeError("the captured step failed: see the note")
    tokens = sum(len(row) + 1 for row in found.tokens) - found.capped  # end tokens, where there was one
    middle = statistics.median(seconds[1:])
    return {"pass_seconds": middle, "output_tokens_per_second": tokens / middle, "tokens": tokens, "capped": found.capped,
            "sentences_per_second": len(sources) / middle, "passes": len(seconds) - 1, "first_pass_seconds": seconds[0],
            "peak_gib": peak_memory_gib(bench.device)}  # fmt: skip


def sources_of(text, tokenizers: dict, rows: int, max_length: int) -> list[list[int]]:
    """Token ids of the first test sentences that fit the model."""
    return [source.tolist() for source, _ in encode_test(text, tokenizers, rows, max_length - 1)]
