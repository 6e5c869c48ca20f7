"""Contestant "marian": Hugging Face's MarianMTModel with scaled-dot-product attention.

A plain loop over the project's own `BucketSampler`, so the batches are the same as ours; the model,
its loss over padded logits and Adam are what a user of the library writes. `--variant tuned` adds
products by oneDNN (on a GPU TF32, and bf16 by autocast). To decode: `generate` with its own cache,
sentences sorted by length.
Not like for like: Marian has no layer norm behind the last layer, and decodes with random weights
of its own.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR
from transformers import MarianConfig, MarianMTModel

from benchmarks.corpus import Corpus, as_ids, as_words
from benchmarks.peers.contest import (
    LABEL_SMOOTHING,
    LEARNING_RATE,
    Task,
    TrainingClock,
    run_peer,
    time_decoding,
)
from benchmarks.peers.handout import cut, labels
from data import Batch, BucketSampler, Collate
from engine.files import atomic_write
from engine.precision import choose_precision

BETAS = (0.9, 0.98)


def build(sizes: dict, corpus: Corpus) -> MarianMTModel:
    """A model of these sizes."""
    source, target = corpus.source_ids, corpus.target_ids
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
        dropout=sizes["dropout"],
        attention_dropout=sizes["dropout"],
        activation_dropout=sizes["dropout"],
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


def make_step(
    task: Task, corpus: Corpus, model: MarianMTModel, optimizer: Adam, autocast: Callable, clip=0.0
) -> Callable[[Batch], None]:
    """A function that trains on one batch. clip: the largest norm of the gradient; 0: any."""
    pad = corpus.target_ids["pad"]
    criterion = nn.CrossEntropyLoss(ignore_index=pad, label_smoothing=LABEL_SMOOTHING)

    def take_step(batch: Batch) -> None:
        batch = batch.to(torch.device(task.device))
        inputs = dict(input_ids=batch.src, attention_mask=(~batch.src_pad).long())
        with autocast():
            output = model(**inputs, decoder_input_ids=batch.tgt_in, use_cache=False)
            loss = criterion(output.logits.flatten(0, 1), labels(batch, pad).flatten())
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        loss.item()

    return take_step


def batches_of(task: Task, corpus: Corpus) -> Iterator[Batch]:
    """Batches of pairs of similar length, without end."""
    collate = Collate(corpus.source_ids, corpus.target_ids)
    for rows in BucketSampler(corpus.lengths, task.tokens_per_batch):
        yield collate([corpus.train[row] for row in rows])


def train(task: Task, corpus: Corpus) -> None:
    """Measure the speed of training."""
    tuned = task.variant == "tuned"
    torch.set_float32_matmul_precision("medium" if tuned else "highest")
    model = build(task.sizes, corpus).to(task.device).train()
    optimizer = Adam(model.parameters(), lr=LEARNING_RATE, betas=BETAS)
    in_bf16 = tuned and task.device != "cpu"
    autocast = partial(torch.autocast, "cuda", torch.bfloat16, enabled=in_bf16)
    take_step = make_step(task, corpus, model, optimizer, autocast)
    clock = TrainingClock(task.seconds)
    for batch in batches_of(task, corpus):
        clock.step(batch.source_tokens, batch.target_tokens)
        take_step(batch)


def learn(task: Task, corpus: Corpus) -> None:
    """Train without end; every `task.every` steps translate valid.src into TIME.out.

    Both files are in the folder `task.outputs`. The number format is the one that ours takes. The
    variant is "RATE STEPS": the rate rises to RATE in STEPS steps and then falls as 1/√step.
    """
    folder = Path(task.outputs)
    sources = as_ids((folder / "valid.src").read_text(encoding="utf-8").splitlines())
    precision = choose_precision(torch.device(task.device), training=True)
    torch.set_float32_matmul_precision("medium")  # for the translations
    rate, warmup = map(float, task.variant.split())
    torch.manual_seed(1)
    model = build(task.sizes, corpus).train()
    optimizer = Adam(model.parameters(), lr=rate, betas=BETAS)
    factor = lambda step: min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)  # noqa: E731
    schedule = LambdaLR(optimizer, factor)
    take_step = make_step(task, corpus, model, optimizer, precision.autocast, clip=1.0)
    for step, batch in enumerate(batches_of(task, corpus), start=1):
        take_step(batch)
        schedule.step()
        if step % task.every == 0:
            outputs = translate(task, corpus, model.eval(), sources)
            outputs = [cut(ids, len(ids), corpus.target_ids["eos"]) for ids in outputs]
            atomic_write(folder / f"{time.time()}.out", as_words(outputs, "tgt"))
            model.train()


def translate(task: Task, corpus: Corpus, model: MarianMTModel, sources: list) -> list[list[int]]:
    """The ids that `generate` puts behind the begin token, until all of a batch have ended."""
    collate = Collate(corpus.source_ids, corpus.target_ids)
    outputs = [[]] * len(sources)
    order = sorted(range(len(sources)), key=lambda row: -len(sources[row]))
    for first in range(0, len(order), task.batch):
        rows = order[first : first + task.batch]
        src, src_pad = collate.pad_sources([sources[row] for row in rows])
        generated = model.generate(
            input_ids=src.to(task.device),
            attention_mask=(~src_pad).long().to(task.device),
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
def decode(task: Task, corpus: Corpus) -> None:
    """Greedy, with random weights: they do not change the time of outputs of a given length."""
    if not task.length:
        raise RuntimeError("it has no trained weights, and so takes no part at real lengths")
    model = build(task.sizes, corpus).eval().to(task.device)
    sources = [source for source, _ in corpus.test]
    on_gpu = task.device != "cpu"  # where ours computes in bf16 too
    with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
        time_decoding(task, corpus, lambda: translate(task, corpus, model, sources))


if __name__ == "__main__":
    run_peer(train, decode, learn)
