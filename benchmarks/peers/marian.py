"""Contestant "marian": Hugging Face's MarianMTModel with scaled-dot-product attention.

A plain loop over the project's own `BucketSampler`, so the batches are the same as ours; the model,
its loss over padded logits and Adam are what a user of the library writes. The variant "tuned" adds
products by oneDNN (on a GPU TF32, and bf16 by autocast). Not like for like: Marian has no layer
norm after the last layer, and its output layer does not share the target embedding's weights.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.optim import Adam
from transformers import MarianConfig, MarianMTModel

from benchmarks.corpus import load_corpus
from benchmarks.peers.contest import LABEL_SMOOTHING, LEARNING_RATE, wait_for_gpu
from benchmarks.peers.handout import labels
from benchmarks.peers.turn import Task, TrainingClock, run_peer
from data import Batch, BucketSampler, Prepared, batches_of, collate_for

BETAS = (0.9, 0.98)


def build(sizes: dict, corpus: Prepared) -> MarianMTModel:
    """A model of these sizes."""
    collate = collate_for(corpus)
    target = collate.target_ids
    config = MarianConfig(
        vocab_size=len(corpus.source_tokenizer),
        decoder_vocab_size=len(corpus.target_tokenizer),
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
        pad_token_id=collate.source_ids["pad"],
        bos_token_id=target["bos"],
        eos_token_id=target["eos"],
        decoder_start_token_id=target["bos"],
    )
    return MarianMTModel(config)


def make_step(
    model: MarianMTModel, pad: int, optimizer: Adam, autocast: Callable
) -> Callable[[Batch], None]:
    """A function that trains on one batch."""
    criterion = nn.CrossEntropyLoss(ignore_index=pad, label_smoothing=LABEL_SMOOTHING)

    def take_step(batch: Batch) -> None:
        """Forward pass, backward pass, update."""
        inputs = dict(input_ids=batch.src, attention_mask=(~batch.src_pad).long())
        with autocast():
            output = model(**inputs, decoder_input_ids=batch.tgt_in, use_cache=False)
            loss = criterion(output.logits.flatten(0, 1), labels(batch, pad).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return take_step


def train(task: Task) -> dict:
    """Measure the speed of training."""
    tuned = task.variant == "tuned"
    torch.set_float32_matmul_precision("medium" if tuned else "highest")
    corpus = load_corpus(task.folder)
    collate = collate_for(corpus)
    model = build(task.sizes, corpus).to(task.device).train()
    optimizer = Adam(model.parameters(), lr=LEARNING_RATE, betas=BETAS)
    in_bf16 = tuned and task.device != "cpu"
    autocast = partial(torch.autocast, "cuda", torch.bfloat16, enabled=in_bf16)
    take_step = make_step(model, collate.target_ids["pad"], optimizer, autocast)
    sampler = BucketSampler(corpus.train.lengths, task.tokens_per_batch)
    clock = TrainingClock(task.seconds, wait_for_gpu)
    for batch in batches_of(corpus.train, sampler, collate, 0, torch.device(task.device)):
        if not clock.starts(batch.source_tokens, batch.target_tokens):
            break
        take_step(batch)
    return clock.figures()


if __name__ == "__main__":
    run_peer(train)
