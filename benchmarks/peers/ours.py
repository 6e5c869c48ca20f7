"""Contestant "ours": this project, as train.py trains and evaluate.py decodes.

The variant is a precision (fp32, bf16, fp16 or int8), with words before it if wanted: plain- does
without fast/, muon- trains with train.py's own optimizer, where all others have Adam or AdamW.
Example: plain-bf16.
"""

from engine import devices  # before PyTorch, whose threads read their settings once

# isort: split
from functools import partial
from pathlib import Path

import torch

import decoding
import fast
from benchmarks.corpus import load_corpus
from benchmarks.peers.contest import LABEL_SMOOTHING, LEARNING_RATE, wait_for_gpu
from benchmarks.peers.turn import Task, TrainingClock, run_peer, time_decoding
from data import BucketSampler, Collate, batches_of, collate_for
from engine.meters import measured_peak_flops
from engine.optimizer import make_optimizer
from engine.precision import choose_precision
from model import ModelConfig, SummedLoss, make_translator

CLIP = 1.0  # train.py's default; the other contestants do not clip


def train(task: Task) -> dict:
    """The loop of train.py without its log and checkpoints."""
    *words, name = task.variant.split("-")
    device = devices.choose_device(task.device, 0)
    precision = choose_precision(device, name, training=True)
    corpus = load_corpus(task.folder)

    use_fast = "plain" not in words
    torch.manual_seed(1)
    if use_fast:
        fast.keep_tensors_together(device)
    vocabularies = (len(corpus.source_tokenizer), len(corpus.target_tokenizer))
    model = make_translator(ModelConfig(*vocabularies, **task.sizes)).to(device).train()
    if use_fast:
        fast.use_kernels(model, precision.dtype, print)
    loss_of = SummedLoss(model, LABEL_SMOOTHING, sliced=use_fast)
    algorithm = "muon" if "muon" in words else "adamw"
    optimizer = make_optimizer(algorithm, model, model.transformer, LEARNING_RATE, precision.dtype)
    weights = list(model.parameters())

    sampler = BucketSampler(corpus.train.lengths, task.tokens_per_batch)
    batches = batches_of(corpus.train, sampler, collate_for(corpus), 0, device)
    figures = {}
    if device.type == "cuda":
        figures["peak_tflops"] = measured_peak_flops(device, precision.dtype) / 1e12
    clock = TrainingClock(task.seconds, wait_for_gpu)
    for step, batch in enumerate(batches, start=1):
        if not clock.starts(batch.source_tokens, batch.target_tokens):
            break
        with precision.autocast():
            smoothed, _ = loss_of(*batch.inputs)
        precision.backward(smoothed / batch.target_tokens)
        precision.step(optimizer, weights, CLIP, step)
    return clock.figures() | figures


def decode(task: Task) -> dict:
    """`decoding.search`, as in evaluate.py; loading the weights is not timed."""
    *words, name = task.variant.split("-")
    device = devices.choose_device(task.device, 0)
    precision = choose_precision(device, "fp32" if name == "int8" else name)
    model = make_translator(ModelConfig(**task.sizes)).eval().requires_grad_(False)
    model.load_state_dict(torch.load(Path(task.folder) / "weights.pt"))
    model.to(device)
    with precision.autocast():
        decoder = decoding.Decoder(model, compiled="plain" not in words, int8=name == "int8")
    search = partial(
        decoding.search,
        decoder,
        collate=Collate(task.source_ids, task.target_ids),
        beam=task.beam,
        length_penalty=task.length_penalty,
    )

    def translate(sources: list[list[int]]) -> list[list[int]]:
        """Token ids in, token ids out."""
        with precision.autocast():
            return [hypotheses[0].tokens for hypotheses in search(sources)]

    return time_decoding(task, translate)


if __name__ == "__main__":
    run_peer(train, decode)
