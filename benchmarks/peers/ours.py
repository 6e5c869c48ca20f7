"""Contestant "ours": this project, as train.py trains and evaluate.py decodes.

`--variant fp32|bf16|int8` is train.py's and evaluate.py's `--precision` (int8: evaluate.py's alone).
Its Python threads must not be pinned to a core by GOMP_CPU_AFFINITY when it decodes: each takes a batch of its own.
"""

import torch
from torch.utils.data import DataLoader

import decoding
from benchmarks.peers.contest import (
    DROPOUT,
    LAB,
    LABEL_SMOOTHING,
    LEARNING_RATE,
    TOKENS_PER_BATCH,
    TrainingClock,
    run_peer,
    time_decoding,
)
from data import BucketSampler, Collate
from engine.allocator import keep_freed_memory
from engine.precision import choose_precision
from model import ModelConfig, SummedLoss, Translator

CLIP = 1.0  # train.py's default; the other contestants do not clip


def build(corpus) -> Translator:
    """The lab's model."""
    return Translator(ModelConfig(corpus.source_vocab, corpus.target_vocab, **LAB, dropout=DROPOUT))


def train(task, corpus) -> None:
    """The loop of train.py without its log and checkpoints."""
    device = torch.device("cpu")
    precision = choose_precision(device, task.variant)
    keep_freed_memory()
    model = build(corpus).train()
    runner, parameters = SummedLoss(model, LABEL_SMOOTHING), list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    sampler = BucketSampler(corpus.lengths, TOKENS_PER_BATCH)
    collate = Collate(corpus.source_ids, corpus.target_ids)
    tokens_of_steps = sampler.target_tokens(0)
    clock = TrainingClock(task.seconds)
    for step, batch in enumerate(DataLoader(corpus.train, batch_sampler=sampler, collate_fn=collate), 1):
        clock.step(batch.source_tokens, batch.target_tokens)
        with precision.autocast():
            loss = runner(batch.src, batch.src_pad, batch.tgt_in, batch.real, batch.tgt_out) / next(tokens_of_steps)
        precision.backward(loss)
        precision.step(optimizer, parameters, CLIP, step)


@torch.inference_mode()
def decode(task, corpus) -> None:
    """Greedy `decoding.search`, as evaluate.py calls it; the weights are laid out beforehand, as the others' are loaded."""
    precision = choose_precision(torch.device("cpu"), "bf16" if task.variant == "bf16" else "fp32")
    keep_freed_memory()
    model = build(corpus).eval()
    if task.weights:
        model.load_state_dict(torch.load(f"{task.weights}/weights.pt"))
    if task.length:  # no output may end before it
        model.output.bias[corpus.target_ids["eos"]] = -1e9
        decoding.output_limit = lambda tokens, max_length: torch.full_like(tokens, task.length)
    collate = Collate(corpus.source_ids, corpus.target_ids)
    sources = [source.tolist() for source, _ in corpus.test]

    with precision.autocast():
        packed = decoding.pack(model, int8=task.variant == "int8")

    def once() -> list[list[int]]:
        with precision.autocast():
            return decoding.search(model, sources, collate, rows_per_batch=task.batch, packed=packed).tokens

    time_decoding(task, corpus, once)


if __name__ == "__main__":
    run_peer(train, decode)
