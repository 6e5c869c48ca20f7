"""Contestant "ctranslate2": CTranslate2 4.8, a decoder in C++, with this project's own weights.

It computes what our model computes, so its outputs can be compared with ours token by token.
`--variant` is its compute type (float32, bfloat16, int8, int8_float32, …); int8x2 has two workers
with one thread each. It sorts the sentences by length itself.
Not like for like at real lengths: it has one limit for all sentences, so an output without end goes
on to the longest limit; what is too long is cut and not counted.
"""

import sys
from pathlib import Path

import ctranslate2
import torch

from benchmarks.corpus import Corpus
from benchmarks.peers.contest import Task, run_peer, time_decoding
from tools.serving.to_ctranslate2 import convert, name_special


def decode(task: Task, corpus: Corpus) -> None:
    """All test sentences in one call."""
    folder = Path(task.weights) / "ctranslate2"
    if not (folder / "model.bin").exists():
        state = torch.load(folder.parent / "weights.pt")
        weights = {name: tensor.float().numpy() for name, tensor in state.items()}
        sizes = {"norm_first": False, **task.sizes, "max_length": 512}
        sources = name_special([f"s{i}" for i in range(corpus.source_vocab)], corpus.source_ids)
        targets = name_special([f"t{i}" for i in range(corpus.target_vocab)], corpus.target_ids)
        convert(weights, sizes, sources, targets, folder)
    kind, _, workers = task.variant.partition("x")
    workers = int(workers or 1)
    translator = ctranslate2.Translator(
        str(folder),
        device=task.device,
        compute_type=kind,
        inter_threads=workers,
        intra_threads=max(1, task.threads // workers),
    )
    print("computes in", translator.compute_type, file=sys.stderr)
    sources = [[f"s{id}" for id in source] for source, _ in corpus.test]
    limits = [task.length or (len(source) + 1) * 3 // 2 + 10 for source in sources]

    def once():
        return translator.translate_batch(
            sources,
            beam_size=1,
            max_batch_size=task.batch,
            min_decoding_length=task.length or 1,
            max_decoding_length=max(limits),
        )

    def read(results) -> list[list[int]]:
        outputs = []
        for result, limit in zip(results, limits):
            words = result.hypotheses[0][:limit]
            outputs.append([int(word[1:]) if word[0] == "t" else 0 for word in words])
        return outputs

    time_decoding(task, corpus, once, read=read)


if __name__ == "__main__":
    run_peer(decode)
