"""Contestant "tutorial": as PyTorch's tutorial on language translation with `nn.Transformer` does it.

128 random sentences a batch, padded to the longest of them; masks for everything, built at every step; Adam. To decode, one
sentence at a time: the encoder once, then the whole decoder for every new token.
Not like for like: about the same real tokens a batch as the others, but lengths are mixed, so half of each batch is padding.
"""

import math

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.peers.contest import LABEL_SMOOTHING, LEARNING_RATE, TrainingClock, run_peer, time_decoding
from benchmarks.peers.handout import Seq2Seq, cut, load_weights

SENTENCES = 128


def train(task, corpus) -> None:
    """Random batches of 128, padded to their longest sentence."""
    source, target = corpus.source_ids, corpus.target_ids

    def collate(pairs):
        src = [torch.tensor([*s.tolist(), source["eos"]]) for s, _ in pairs]
        tgt = [torch.tensor([target["bos"], *t.tolist(), target["eos"]]) for _, t in pairs]
        return pad_sequence(src, True, source["pad"]), pad_sequence(tgt, True, target["pad"])

    loader = torch.utils.data.DataLoader(corpus.train, SENTENCES, shuffle=True, collate_fn=collate)
    model = Seq2Seq(corpus)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), eps=1e-9)
    criterion = nn.CrossEntropyLoss(ignore_index=target["pad"], label_smoothing=LABEL_SMOOTHING)
    clock = TrainingClock(task.seconds)
    while True:
        for src, tgt in loader:
            clock.step((src != source["pad"]).sum(), (tgt[:, 1:] != target["pad"]).sum())
            tgt_in, tgt_out = tgt[:, :-1], tgt[:, 1:]
            logits = model(src, tgt_in, src == source["pad"], tgt_in == target["pad"])
            optimizer.zero_grad()
            loss = criterion(logits.reshape(-1, logits.size(-1)), tgt_out.reshape(-1))
            loss.backward()
            optimizer.step()
            loss.item()


@torch.no_grad()
def decode(task, corpus) -> None:
    """One sentence after another, without a cache."""
    source, target = corpus.source_ids, corpus.target_ids
    model = Seq2Seq(corpus).eval()
    load_weights(model, task.weights)

    def translate(ids: list[int]) -> list[int]:
        src = torch.tensor([[*ids, source["eos"]]])  # (1, S)
        memory = model.transformer.encoder(model.embed(model.source_embedding, src))
        limit = task.length or src.size(1) * 3 // 2 + 10
        tgt = torch.tensor([[target["bos"]]])
        for _ in range(limit):
            causal = torch.triu(torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool), 1)
            hidden = model.transformer.decoder(model.embed(model.target_embedding, tgt), memory, tgt_mask=causal)
            logits = model.output(hidden[:, -1])
            if task.length:
                logits[:, target["eos"]] = -math.inf
            tgt = torch.cat([tgt, logits.argmax(-1, keepdim=True)], 1)
            if tgt[0, -1] == target["eos"]:
                break
        return cut(tgt[0, 1:].tolist(), limit, target["eos"])

    time_decoding(task, corpus, lambda: [translate(source.tolist()) for source, _ in corpus.test], warm=False)


if __name__ == "__main__":
    run_peer(train, decode)
