"""Contestant "marian": Hugging Face's MarianMTModel with scaled-dot-product attention, in a plain loop over length buckets.

The loop uses the project's own `BucketSampler`, so batches are the same as ours; the model, its loss over padded logits and
Adam are what the library's user writes. `--variant tuned` adds one line, products by oneDNN (on a GPU TF32, and bf16 by
autocast); its caller adds the allocator's settings. To decode: `generate`, sentences sorted by length, its own cache.
Not like for like: Marian has no layer norm behind the last layer, and decodes with random weights of its own.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR
from transformers import MarianConfig, MarianMTModel

from benchmarks.corpus import as_ids, as_words
from benchmarks.peers.contest import (
    LABEL_SMOOTHING,
    LEARNING_RATE,
    TrainingClock,
    run_peer,
    time_decoding,
)
from benchmarks.peers.handout import cut, labels
from data import BucketSampler, Collate
from engine.files import atomic_write
from engine.precision import choose_precision

BETAS = (0.9, 0.98)


def build(sizes: dict, corpus) -> MarianMTModel:
    """A model of these sizes."""
    source, target = corpus.source_ids, corpus.target_ids
    dropout = dict.fromkeys(
        ("dropout", "attention_dropout", "activation_dropout"), sizes["dropout"]
    )
    config = MarianConfig(
        vocab_size=corpus.source_vocab,
        decoder_vocab_size=corpus.target_vocab,
        share_encoder_decoder_embeddings=False,
        d_model=sizes["d_model"],
        encoder_layers=sizes["num_encoder_layers"],
        decoder_layers=sizes["num_decoder_layers"],
        encoder_attention_heads=sizes["nhead"],
        decoder_attention_heads=sizes["nhead"],
        encoder_ffn_dim=sizes["dim_feedforward"],
        decoder_ffn_dim=sizes["dim_feedforward"],
        activation_function="relu",
        **dropout,
        max_position_embeddings=512,
        scale_embedding=True,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        forced_eos_token_id=None,
        pad_token_id=source["pad"],
        bos_token_id=target["bos"],
        eos_token_id=target["eos"],
        decoder_start_token_id=target["bos"],
    )
    return MarianMTModel(config)


def make_step(task, corpus, model, optimizer, autocast: Callable, clip: float = 0.0) -> Callable:
    """→ a function that tells `begin` the real tokens of these rows and takes one step: padded places count nothing."""
    collate, pad = Collate(corpus.source_ids, corpus.target_ids), corpus.target_ids["pad"]
    criterion = nn.CrossEntropyLoss(ignore_index=pad, label_smoothing=LABEL_SMOOTHING)

    def take_step(rows, begin: Callable = lambda source_tokens, target_tokens: None) -> None:
        batch = collate([corpus.train[row] for row in rows])
        begin(batch.source_tokens, batch.target_tokens)
        batch = batch.to(torch.device(task.device))
        with autocast():
            attended = (~batch.src_pad).long()
            logits = model(
                batch.src, attention_mask=attended, decoder_input_ids=batch.tgt_in, use_cache=False
            ).logits
            loss = criterion(logits.flatten(0, 1), labels(batch, pad).flatten())
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        loss.item()

    return take_step


def train(task, corpus) -> None:
    """Batches of similar length."""
    tuned = task.variant == "tuned"
    torch.set_float32_matmul_precision("medium" if tuned else "highest")
    model = build(task.sizes, corpus).to(task.device).train()
    optimizer = Adam(model.parameters(), lr=LEARNING_RATE, betas=BETAS)
    autocast = partial(
        torch.autocast, "cuda", torch.bfloat16, enabled=tuned and task.device != "cpu"
    )
    take_step = make_step(task, corpus, model, optimizer, autocast)
    clock = TrainingClock(task.seconds)
    for rows in BucketSampler(corpus.lengths, task.tokens_per_batch):
        take_step(rows, clock.step)


def learn(task, corpus) -> None:
    """Train without end, and every `task.every` steps translate valid.src, in the folder `task.outputs`, into TIME.out there.

    In the number format that ours takes. The variant is the highest rate and the steps up to it; then it falls as 1/√step.
    """
    precision = choose_precision(torch.device(task.device), training=True)
    torch.set_float32_matmul_precision("medium")  # of the translations
    rate, warmup = map(float, task.variant.split())
    torch.manual_seed(1)
    model, folder = build(task.sizes, corpus).train(), Path(task.outputs)
    optimizer = Adam(model.parameters(), lr=rate, betas=BETAS)
    schedule = LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)
    )
    take_step = make_step(task, corpus, model, optimizer, precision.autocast, clip=1.0)
    sources = as_ids((folder / "valid.src").read_text().splitlines())
    for step, rows in enumerate(BucketSampler(corpus.lengths, task.tokens_per_batch), 1):
        take_step(rows)
        schedule.step()
        if step % task.every == 0:
            outputs = translate(task, corpus, model.eval(), sources)
            outputs = [cut(ids, len(ids), corpus.target_ids["eos"]) for ids in outputs]
            atomic_write(folder / f"{time.time()}.out", as_words(outputs, "tgt"))
            model.train()


def translate(task, corpus, model, sources) -> list[list[int]]:
    """`generate`, greedy, sentences sorted by length; → ids behind the begin token, until all of a batch have ended."""
    collate, outputs = Collate(corpus.source_ids, corpus.target_ids), [[]] * len(sources)
    order = sorted(range(len(sources)), key=lambda row: -len(sources[row]))
    for rows in (order[first : first + task.batch] for first in range(0, len(order), task.batch)):
        src, src_pad = (
            tensor.to(task.device) for tensor in collate.pad_sources([sources[row] for row in rows])
        )
        generated = model.generate(
            input_ids=src,
            attention_mask=(~src_pad).long(),
            num_beams=1,
            do_sample=False,
            use_cache=True,
            min_new_tokens=task.length,
            max_new_tokens=task.length or min(512, src.size(1) * 3 // 2 + 10),
        )
        for row, ids in zip(rows, generated[:, 1:].tolist()):  # the first is the begin token
            outputs[row] = ids
    return outputs


@torch.inference_mode()
def decode(task, corpus) -> None:
    """Greedy, with weights of its own: they change nothing in the time of outputs of a given length."""
    if not task.length:
        raise RuntimeError("it has no trained weights, and so takes no part at real lengths")
    model, sources = (
        build(task.sizes, corpus).eval().to(task.device),
        [source for source, _ in corpus.test],
    )
    with torch.autocast("cuda", torch.bfloat16, enabled=task.device != "cpu"):  # as ours there
        time_decoding(task, corpus, lambda: translate(task, corpus, model, sources))


if __name__ == "__main__":
    run_peer(train, decode, learn)
