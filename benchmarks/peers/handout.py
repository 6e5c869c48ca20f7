"""Contestant "handout": the lab as a student writes it straight from the course's handout.

Stock `nn.Transformer`, every sentence padded to 128 tokens, 32 random sentences a batch, `ignore_index` for the padding, plain
Adam; to decode, the whole model runs again for every new token.
Not like for like: 32 sentences hold fewer real tokens than the 4,096 of the others.
"""

import math

import torch
from torch import nn

from benchmarks.peers.contest import LABEL_SMOOTHING, LEARNING_RATE, TrainingClock, run_peer, time_decoding
from model import sinusoids

LENGTH = 128
SENTENCES = 32


class Seq2Seq(nn.Module):
    """Embeddings, sinusoidal positions, `nn.Transformer`, output layer."""

    def __init__(self, sizes: dict, corpus):
        super().__init__()
        self.width = width = sizes["d_model"]
        self.source_embedding = nn.Embedding(corpus.source_vocab, width)
        self.target_embedding = nn.Embedding(corpus.target_vocab, width)
        self.transformer = nn.Transformer(**sizes, batch_first=True)
        self.output = nn.Linear(width, corpus.target_vocab)
        self.dropout = nn.Dropout(sizes["dropout"])
        self.register_buffer("positions", sinusoids(512, width), persistent=False)

    def embed(self, embedding, ids):
        """(B, T) → (B, T, D)"""
        return self.dropout(embedding(ids) * math.sqrt(self.width) + self.positions[: ids.size(1)])

    def forward(self, src, tgt_in, src_pad, tgt_pad):
        """→ logits (B, T, V)"""
        causal = torch.triu(torch.ones(tgt_in.size(1), tgt_in.size(1), dtype=torch.bool, device=tgt_in.device), 1)
        hidden = self.transformer(
            self.embed(self.source_embedding, src), self.embed(self.target_embedding, tgt_in), tgt_mask=causal,
            src_key_padding_mask=src_pad, tgt_key_padding_mask=tgt_pad, memory_key_padding_mask=src_pad,
        )  # fmt: skip
        return self.output(hidden)


def padded(rows, pad: int, length: int) -> torch.Tensor:
    """(B, length) ids"""
    out = torch.full((len(rows), length), pad)
    for row, ids in zip(out, rows):
        row[: len(ids)] = torch.as_tensor(ids)
    return out


def train(task, corpus) -> None:
    """Random batches of 32, padded to 128 beforehand as the handout's tokenizer call does."""
    source, target = corpus.source_ids, corpus.target_ids
    src = padded([[*s.tolist(), source["eos"]] for s, _ in corpus.train], source["pad"], LENGTH)
    tgt = padded([[target["bos"], *t.tolist(), target["eos"]] for _, t in corpus.train], target["pad"], LENGTH + 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(src, tgt), SENTENCES, shuffle=True)
    model = Seq2Seq(task.sizes, corpus).to(task.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    criterion = nn.CrossEntropyLoss(ignore_index=target["pad"], label_smoothing=LABEL_SMOOTHING)
    clock = TrainingClock(task.seconds)
    while True:
        for src, tgt in loader:
            clock.step((src != source["pad"]).sum(), (tgt[:, 1:] != target["pad"]).sum())
            src, tgt = src.to(task.device), tgt.to(task.device)
            tgt_in, tgt_out = tgt[:, :-1], tgt[:, 1:]
            logits = model(src, tgt_in, src == source["pad"], tgt_in == target["pad"])
            loss = criterion(logits.flatten(0, 1), tgt_out.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()


@torch.no_grad()
def decode(task, corpus) -> None:
    """The whole model, encoder too, once for every token, until all sentences of the batch have ended."""
    source, target = corpus.source_ids, corpus.target_ids
    model = Seq2Seq(task.sizes, corpus).eval()
    # The project's own: the names are the same, for the parts are.
    model.load_state_dict(torch.load(f"{task.weights}/weights.pt"))
    model.to(task.device)

    def once() -> list[list[int]]:
        outputs = []
        for first in range(0, len(corpus.test), SENTENCES):
            rows = [[*s.tolist(), source["eos"]] for s, _ in corpus.test[first : first + SENTENCES]]
            src = padded(rows, source["pad"], LENGTH).to(task.device)
            tgt = torch.full((len(rows), 1), target["bos"], device=task.device)
            limits = [task.length or len(row) * 3 // 2 + 10 for row in rows]
            for _ in range(max(limits)):
                logits = model(src, tgt, src == source["pad"], tgt == target["pad"])[:, -1]
                if task.length:
                    logits[:, target["eos"]] = -math.inf
                tgt = torch.cat([tgt, logits.argmax(-1, keepdim=True)], 1)
                if not task.length and (tgt == target["eos"]).any(1).all():
                    break
            outputs += [cut(ids, limit, target["eos"]) for ids, limit in zip(tgt[:, 1:].tolist(), limits)]
        return outputs

    time_decoding(task, corpus, once, warm=False)


def cut(ids: list[int], limit: int, eos: int) -> list[int]:
    """Up to the end token, and no more than `limit`."""
    ids = ids[:limit]
    return ids[: ids.index(eos)] if eos in ids else ids


if __name__ == "__main__":
    run_peer(train, decode)
