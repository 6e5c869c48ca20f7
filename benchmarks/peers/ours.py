"""Contestant "ours": this project, as train.py trains and evaluate.py decodes.

`--variant fp32|bf16` is train.py's and evaluate.py's `--precision`.
"""

import torch
from torch.utils.data import DataLoader

from benchmarks.peers.contest import (
    DROPOUT,
    LAB,
    LABEL_SMOOTHING,
    LEARNING_RATE,
    TOKENS_PER_BATCH,
    TrainingClock,
    run_peer,
    time_decoding,
)  # fmt: skip
from data import BucketSampler, Collate
from engine.precision import choose_precision
from model import ModelConfig, Translator, summed_loss

CLIP = 1.0  # train.py's default; the other contestants do not clip


def build(corpus) -> Translator:
    """The lab's model."""
    return Translator(ModelConfig(corpus.source_vocab, corpus.target_vocab, **LAB, dropout=DROPOUT))


def train(task, corpus) -> None:
    """The loop of train.py without its log and checkpoints."""
    device = torch.device("cpu")
    precision = choose_precision(device, task.variant)
    model = build(corpus).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    sampler = BucketSampler(corpus.lengths, TOKENS_PER_BATCH)
    collate = Collate(corpus.source_ids, corpus.target_ids)
    tokens_of_steps = sampler.target_tokens(0)
    clock = TrainingClock(task.seconds)
    for step, batch in enumerate(DataLoader(corpus.train, batch_sampler=sampler, collate_fn=collate), 1):
        clock.step(batch.source_tokens, batch.target_tokens)
        with precision.autocast():
            logits = model(batch.src, batch.src_pad, batch.tgt_in, batch.real)
            loss = summed_loss(logits, batch.tgt_out, LABEL_SMOOTHING) / next(tokens_of_steps)
        precision.backward(loss)
        precision.step(optimizer, parameters, CLIP, step)


def decode(task, corpus) -> None:
    raise NotImplementedError


if __name__ == "__main__":
    run_peer(train, decode)
