"""Contestant "ours": this project, as train.py trains and evaluate.py decodes. Other benchmarks time its steps too.

`--variant` is a precision, fp32, bf16, fp16 or int8, with words before it: plain- does without fast/, random- has batches of 128
sentences of any length, muon- trains by train.py's own optimiser, where all others
have Adam. For example plain-bf16.
Its Python threads must not be pinned to a core by GOMP_CPU_AFFINITY when it decodes: each takes a batch of its own.
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from unittest.mock import patch

import numpy as np
import torch

import decoding
import fast
from benchmarks.peers.contest import (
    LABEL_SMOOTHING,
    LEARNING_RATE,
    WARM_STEPS,
    TrainingClock,
    run_peer,
    time_decoding,
)
from data import Batch, BucketSampler, Collate, batches_of
from engine.distributed import choose_device
from engine.optimizer import make_optimizer
from engine.precision import Precision, choose_precision
from engine.telemetry import measured_peak_flops
from model import ModelConfig, SummedLoss, Translator

CLIP = 1.0  # train.py's default; the other contestants do not clip


def make_trainer(
    sizes: ModelConfig,
    precision: Precision,
    plain=False,
    optimizer: str = "adamw",
) -> Callable:
    """A fresh model, always the same, and train.py's loss; → a function that takes one step. The peers have AdamW."""
    torch.manual_seed(1)
    plain or fast.keep_tensors_together(precision.device)
    model = Translator(sizes).to(precision.device).train()
    loss_of = (
        None
        if plain
        else fast.loss(model, LABEL_SMOOTHING, precision.dtype, partial(print, file=sys.stderr))
    )
    loss_of = loss_of or SummedLoss(model, LABEL_SMOOTHING)
    parameters = list(model.parameters())
    optimizer = make_optimizer(optimizer, model, model.transformer, LEARNING_RATE, precision.dtype)
    steps = count(1)

    def take_step(batch: Batch) -> None:
        batch = batch.to(precision.device)
        with precision.autocast():
            smoothed, _ = loss_of(batch.src, batch.src_pad, batch.tgt_in, batch.real, batch.tgt_out)
        precision.backward(smoothed / batch.target_tokens)
        precision.step(optimizer, parameters, CLIP, next(steps))

    return take_step


def time_steps(step: Callable[[], int], steps: int) -> dict[str, float]:
    """So many steps after the warm-up; `step` takes one and tells its target tokens."""
    for _ in range(WARM_STEPS):
        step()
    begun = time.perf_counter()
    tokens = sum(step() for _ in range(steps))
    seconds = time.perf_counter() - begun
    return {"target_tokens_per_second": tokens / seconds, "seconds_per_step": seconds / steps}


def train(task, corpus) -> None:
    """The loop of train.py without its log and checkpoints."""
    *words, name = task.variant.split("-")
    device = choose_device(task.device, 0)
    precision = choose_precision(device, name, training=True)
    more = (
        {"peak_tflops": measured_peak_flops(device, precision.dtype) / 1e12}
        if device.type == "cuda"
        else {}
    )
    sizes = ModelConfig(corpus.source_vocab, corpus.target_vocab, **task.sizes)
    optimizer = "muon" if "muon" in words else "adamw"
    take_step = make_trainer(sizes, precision, "plain" in words, optimizer)
    batches = BucketSampler(corpus.lengths, task.tokens_per_batch)
    if "random" in words:
        batches = random_batches(len(corpus.train))
    pairs = [
        (source.tolist(), target.tolist()) for source, target in corpus.train
    ]  # lists: arrays are slow to join
    batches = batches_of(pairs, batches, Collate(corpus.source_ids, corpus.target_ids), 0, device)
    if device.type == "cuda":
        more |= ask_of_gpu(take_step, batches)
    clock = TrainingClock(task.seconds, **more)
    for batch in batches:
        clock.step(batch.source_tokens, batch.target_tokens)
        take_step(batch)


def ask_of_gpu(take_step: Callable, batches: Iterator[Batch], steps: int = 10) -> dict[str, float]:
    """What a step asks: CPU time, and time waited for data.

    A GPU whose step takes less than the CPU's waits for Python. A wait for the GPU that PyTorch knows of is an error here.
    """
    for batch in islice(batches, WARM_STEPS):
        take_step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    waited, cpu = 0.0, time.process_time()
    for _ in range(steps):
        begun = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - begun
        take_step(batch)
    torch.cuda.set_sync_debug_mode("default")
    return {"cpu_ms": 1e3 * (time.process_time() - cpu) / steps, "wait_ms": 1e3 * waited / steps}


def random_batches(pairs: int) -> Iterator[list[int]]:
    """Batches of 128 sentences of any length, without end."""
    random = np.random.default_rng(1)
    while True:
        yield from (
            rows.tolist() for rows in np.array_split(random.permutation(pairs), -(-pairs // 128))
        )


def decode(task, corpus) -> None:
    """Greedy `decoding.search`, as evaluate.py calls it; the weights are laid out beforehand, as the others' are loaded."""
    *words, name = task.variant.split("-")
    device = choose_device(task.device, 0)
    precision = choose_precision(device, "fp32" if name == "int8" else name)
    sizes = ModelConfig(corpus.source_vocab, corpus.target_vocab, **task.sizes)
    model = Translator(sizes).eval().requires_grad_(False)
    model.load_state_dict(torch.load(f"{task.weights}/weights.pt"))
    limit = decoding.output_limit
    if task.length:  # no output may end before it, and none goes on after
        model.output.bias[corpus.target_ids["eos"]] = -1e9
        limit = lambda tokens, max_length: torch.full_like(tokens, task.length)  # noqa: E731
    model.to(device)
    with precision.autocast():
        steps = None if "plain" in words else fast.steps(model, int8=name == "int8")
    collate, sources = (
        Collate(corpus.source_ids, corpus.target_ids),
        [source.tolist() for source, _ in corpus.test],
    )
    # 0: as many sentences at once as evaluate.py takes.
    batches = decoding.plan_batches(list(map(len, sources)), task.batch) if task.batch else None

    def once() -> list[list[int]]:
        with precision.autocast(), patch.object(decoding, "output_limit", limit):
            return decoding.search(model, sources, collate, batches=batches, steps=steps).tokens

    time_decoding(task, corpus, once)


if __name__ == "__main__":
    run_peer(train, decode)
