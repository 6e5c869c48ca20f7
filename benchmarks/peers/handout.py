"""Contestant "handout": the lab as a student writes it straight from the course's handout.

Stock `nn.Transformer`, batches of 32 random sentences padded to 128 tokens, `ignore_index` for the
padding, plain Adam. To decode, the whole model runs again for every new token.
Not like for like: 32 sentences hold fewer real tokens than the 4,096 of the others.
"""

import math

import torch
from torch import Tensor, nn

from benchmarks.corpus import Corpus
from benchmarks.peers.contest import (
    LABEL_SMOOTHING,
    LEARNING_RATE,
    Task,
    TrainingClock,
    run_peer,
    time_decoding,
)
from data import Batch, Collate
from model import sinusoids

LENGTH = 128
SENTENCES = 32


class Seq2Seq(nn.Module):
    """Embeddings, sinusoidal positions, `nn.Transformer`, output layer."""

    def __init__(self, sizes: dict, corpus: Corpus):
        super().__init__()
        width = sizes["d_model"]
        self.width = width
        self.source_embedding = nn.Embedding(corpus.source_vocab, width)
        self.target_embedding = nn.Embedding(corpus.target_vocab, width)
        self.transformer = nn.Transformer(**sizes, batch_first=True)
        self.output = nn.Linear(width, corpus.target_vocab)
        self.dropout = nn.Dropout(sizes["dropout"])
        self.register_buffer("positions", sinusoids(512, width), persistent=False)

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
    """(B, T) target tokens to predict, with padding behind each sentence."""
    places = torch.full_like(batch.tgt_in, pad)
    places.view(-1)[batch.target_positions] = batch.tgt_out
    return places


def train(task: Task, corpus: Corpus) -> None:
    """Random batches of 32, padded to 128 beforehand, as the handout's tokenizer call does."""
    source, target = corpus.source_ids, corpus.target_ids
    every = Collate(source, target, pad_multiple=LENGTH)(corpus.train)
    pairs = torch.utils.data.TensorDataset(every.src, every.tgt_in, labels(every, target["pad"]))
    loader = torch.utils.data.DataLoader(pairs, SENTENCES, shuffle=True)
    model = Seq2Seq(task.sizes, corpus).to(task.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    criterion = nn.CrossEntropyLoss(ignore_index=target["pad"], label_smoothing=LABEL_SMOOTHING)
    clock = TrainingClock(task.seconds)
    while True:
        for src, tgt_in, tgt_out in loader:
            clock.step((src != source["pad"]).sum(), (tgt_out != target["pad"]).sum())
            src, tgt_in, tgt_out = (ids.to(task.device) for ids in (src, tgt_in, tgt_out))
            logits = model(src, tgt_in, src == source["pad"], tgt_in == target["pad"])
            loss = criterion(logits.flatten(0, 1), tgt_out.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()


@torch.no_grad()
def decode(task: Task, corpus: Corpus) -> None:
    """The whole model, encoder too, once for every token until all sentences have ended."""
    collate = Collate(corpus.source_ids, corpus.target_ids, pad_multiple=LENGTH)
    eos = corpus.target_ids["eos"]
    model = Seq2Seq(task.sizes, corpus).eval()
    # The project's own weights fit: the modules have the same names.
    model.load_state_dict(torch.load(f"{task.weights}/weights.pt"))
    model.to(task.device)

    def once() -> list[list[int]]:
        outputs = []
        for first in range(0, len(corpus.test), SENTENCES):
            sources = [source for source, _ in corpus.test[first : first + SENTENCES]]
            src, src_pad = (tensor.to(task.device) for tensor in collate.pad_sources(sources))
            tgt = torch.full((len(src), 1), corpus.target_ids["bos"], device=task.device)
            limits = [task.length or (len(source) + 1) * 3 // 2 + 10 for source in sources]
            for _ in range(max(limits)):
                logits = model(src, tgt, src_pad, tgt == corpus.target_ids["pad"])[:, -1]
                if task.length:
                    logits[:, eos] = -math.inf
                tgt = torch.cat([tgt, logits.argmax(-1, keepdim=True)], 1)
                if not task.length and (tgt == eos).any(1).all():
                    break
            outputs += [cut(ids, limit, eos) for ids, limit in zip(tgt[:, 1:].tolist(), limits)]
        return outputs

    time_decoding(task, corpus, once, warm=False)


def cut(ids: list[int], limit: int, eos: int) -> list[int]:
    """The tokens before the end token, at most `limit`."""
    ids = ids[:limit]
    return ids[: ids.index(eos)] if eos in ids else ids


if __name__ == "__main__":
    run_peer(train, decode)
