"""Contestant "ours": this project, as train.py trains and evaluate.py decodes.

`--variant` is a precision (fp32, bf16, fp16 or int8), perhaps with words before it: plain- does
without fast/, muon- trains with train.py's own optimizer, where all others have Adam. Example:
plain-bf16. To decode, its Python threads must not be pinned by GOMP_CPU_AFFINITY: each decodes a
batch of its own.
"""

import sys
from functools import partial
from unittest.mock import patch

import torch

import decoding
import fast
from benchmarks.corpus import Corpus
from benchmarks.peers.contest import (
    LABEL_SMOOTHING,
    LEARNING_RATE,
    Task,
    TrainingClock,
    run_peer,
    time_decoding,
)
from data import BucketSampler, Collate, batches_of
from engine.devices import choose_device
from engine.meters import measured_peak_flops
from engine.optimizer import make_optimizer
from engine.precision import choose_precision
from model import ModelConfig, SummedLoss, Translator

CLIP = 1.0  # train.py's default; the other contestants do not clip


def train(task: Task, corpus: Corpus) -> None:
    """The loop of train.py without its log and checkpoints."""
    *words, name = task.variant.split("-")
    device = choose_device(task.device, 0)
    precision = choose_precision(device, name, training=True)
    dtype = precision.dtype

    use_fast = "plain" not in words
    torch.manual_seed(1)
    if use_fast:
        fast.keep_tensors_together(device)
    sizes = ModelConfig(corpus.source_vocab, corpus.target_vocab, **task.sizes)
    model = Translator(sizes).to(device).train()
    loss_of = None
    if use_fast:
        loss_of = fast.loss(model, LABEL_SMOOTHING, dtype, partial(print, file=sys.stderr))
    if loss_of is None:
        loss_of = SummedLoss(model, LABEL_SMOOTHING)
    name = "muon" if "muon" in words else "adamw"
    optimizer = make_optimizer(name, model, model.transformer, LEARNING_RATE, dtype)
    weights = list(model.parameters())

    sampler = BucketSampler(corpus.lengths, task.tokens_per_batch)
    # Lists, because arrays are slow to join.
    pairs = [(source.tolist(), target.tolist()) for source, target in corpus.train]
    batches = batches_of(pairs, sampler, Collate(corpus.source_ids, corpus.target_ids), 0, device)
    more = {}
    if device.type == "cuda":
        more["peak_tflops"] = measured_peak_flops(device, dtype) / 1e12
    clock = TrainingClock(task.seconds, **more)
    for step, batch in enumerate(batches, start=1):
        clock.step(batch.source_tokens, batch.target_tokens)
        batch = batch.to(device)
        with precision.autocast():
            smoothed, _ = loss_of(*batch.inputs)
        precision.backward(smoothed / batch.target_tokens)
        precision.step(optimizer, weights, CLIP, step)


def decode(task: Task, corpus: Corpus) -> None:
    """Greedy `decoding.search`, as in evaluate.py; loading the weights is not timed."""
    *words, name = task.variant.split("-")
    device = choose_device(task.device, 0)
    precision = choose_precision(device, "fp32" if name == "int8" else name)
    sizes = ModelConfig(corpus.source_vocab, corpus.target_vocab, **task.sizes)
    model = Translator(sizes).eval().requires_grad_(False)
    model.load_state_dict(torch.load(f"{task.weights}/weights.pt"))
    limit = decoding.output_limit
    if task.length:  # no output ends earlier or later
        model.output.bias[corpus.target_ids["eos"]] = -1e9
        limit = lambda tokens, max_length: torch.full_like(tokens, task.length)  # noqa: E731
    model.to(device)
    with precision.autocast():
        decoder = None if "plain" in words else fast.decoder(model, int8=name == "int8")
    collate, sources = (
        Collate(corpus.source_ids, corpus.target_ids),
        [source.tolist() for source, _ in corpus.test],
    )
    # 0: as many sentences at once as evaluate.py takes.
    batches = decoding.plan_batches(list(map(len, sources)), task.batch) if task.batch else None

    def once() -> list[list[int]]:
        with precision.autocast(), patch.object(decoding, "output_limit", limit):
            found = decoding.search(model, sources, collate, batches=batches, decoder=decoder)
        return [hypotheses[0].tokens for hypotheses in found]

    time_decoding(task, corpus, once)


if __name__ == "__main__":
    run_peer(train, decode)
