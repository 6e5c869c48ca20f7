"""Contestant "handout": the lab as a student writes it straight from the course's handout.

Stock `nn.Transformer`, batches of 32 random sentences padded to 128 tokens, `ignore_index` for the
padding, plain Adam. Not like for like: 32 sentences hold fewer real tokens than the 4,096 of the
others, and the output layer does not share the target embedding's weights.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.corpus import load_corpus
from benchmarks.peers.contest import LABEL_SMOOTHING, LEARNING_RATE, wait_for_gpu
from benchmarks.peers.turn import Task, TrainingClock, run_peer
from data import Batch, Prepared, collate_for
from model import sinusoids

LENGTH = 128
SENTENCES = 32


class Seq2Seq(nn.Module):
    """Embeddings, sinusoidal positions, `nn.Transformer`, output layer."""

    def __init__(self, sizes: dict, source_vocab: int, target_vocab: int):
        super().__init__()
        width = sizes["d_model"]
        self.width = width
        self.source_embedding = nn.Embedding(source_vocab, width)
        self.target_embedding = nn.Embedding(target_vocab, width)
        self.transformer = nn.Transformer(**sizes, batch_first=True)
        self.output = nn.Linear(width, target_vocab)
        self.dropout = nn.Dropout(sizes["dropout"])
        self.register_buffer("positions", sinusoids(LENGTH, width), persistent=False)

    def embed(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        """(B, T) → (B, T, D)"""
        return self.dropout(embedding(ids) * math.sqrt(self.width) + self.positions[: ids.size(1)])

    def forward(self, src: Tensor, tgt_in: Tensor, src_pad: Tensor, tgt_pad: Tensor) -> Tensor:
        """(B, S), (B, T) and their padding → logits (B, T, V)"""
        length = tgt_in.size(1)
        causal = torch.ones(length, length, dtype=torch.bool, device=tgt_in.device).triu(1)
        hidden = self.transformer(
            self.embed(self.source_embedding, src),
            self.embed(self.target_embedding, tgt_in),
            tgt_mask=causal,
            src_key_padding_mask=src_pad,
            tgt_key_padding_mask=tgt_pad,
            memory_key_padding_mask=src_pad,
        )
        return self.output(hidden)


def labels(batch: Batch, pad: int) -> Tensor:
    """(B, T) target tokens to predict, with padding after each sentence."""
    places = torch.full_like(batch.tgt_in, pad)
    places.view(-1)[batch.target_positions] = batch.tgt_out
    return places


def padded_pairs(corpus: Prepared) -> TensorDataset:
    """All pairs, padded to 128 tokens beforehand, as the handout's tokenizer call does."""
    collate = collate_for(corpus)
    batch = collate(corpus.train.take(np.arange(len(corpus.train))))
    source_pad, target_pad = collate.source_ids["pad"], collate.target_ids["pad"]
    return TensorDataset(
        padded(batch.src, source_pad),
        padded(batch.tgt_in, target_pad),
        padded(labels(batch, target_pad), target_pad),
    )


def padded(ids: Tensor, pad: int) -> Tensor:
    """(B, T) ids with a width that is a multiple of 128."""
    return nn.functional.pad(ids, (0, -ids.size(1) % LENGTH), value=pad)


def train(task: Task) -> dict:
    """Random batches of 32 sentences."""
    corpus = load_corpus(task.folder)
    collate = collate_for(corpus)
    source_pad, target_pad = collate.source_ids["pad"], collate.target_ids["pad"]
    loader = DataLoader(padded_pairs(corpus), SENTENCES, shuffle=True)
    vocabularies = (len(corpus.source_tokenizer), len(corpus.target_tokenizer))
    model = Seq2Seq(task.sizes, *vocabularies).to(task.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    criterion = nn.CrossEntropyLoss(ignore_index=target_pad, label_smoothing=LABEL_SMOOTHING)
    clock = TrainingClock(task.seconds, wait_for_gpu)
    while True:
        for src, tgt_in, tgt_out in loader:
            if not clock.starts((src != source_pad).sum(), (tgt_out != target_pad).sum()):
                return clock.figures()
            src, tgt_in, tgt_out = (ids.to(task.device) for ids in (src, tgt_in, tgt_out))
            logits = model(src, tgt_in, src == source_pad, tgt_in == target_pad)
            loss = criterion(logits.flatten(0, 1), tgt_out.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()


if __name__ == "__main__":
    run_peer(train)
