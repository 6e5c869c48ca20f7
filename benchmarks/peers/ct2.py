"""Contestant "ctranslate2": CTranslate2 4.8, a decoder in C++, with this project's own weights.

It computes what our model computes, so that its outputs can be compared with ours word for word. `--variant` is its
compute type (float32, bfloat16, int8, int8_float32, …), a number behind it how many batches it works on at once: int8x2 has two
workers with one thread each. It sorts the sentences by length itself.
Like for like: the same weights, the same tokens, greedy search, a cache. It only decodes. Not like for like at real lengths: it
has one limit for all, so an output that does not end goes on to the longest's; what is too long is cut and not counted.
"""

import sys
from pathlib import Path

import ctranslate2
import torch

from benchmarks.peers.contest import run_peer, time_decoding
from tools.serving.to_ctranslate2 import convert, name_special


def decode(task, corpus) -> None:
    """All test sentences in one call."""
    folder = Path(task.weights) / "ctranslate2"
    if not (folder / "model.bin").exists():
        weights = {
            name: tensor.float().numpy()
            for name, tensor in torch.load(folder.parent / "weights.pt").items()
        }
        sizes = {"norm_first": False, **task.sizes, "max_length": 512}
        source_words = name_special(
            [f"s{id}" for id in range(corpus.source_vocab)], corpus.source_ids
        )
        target_words = name_special(
            [f"t{id}" for id in range(corpus.target_vocab)], corpus.target_ids
        )
        convert(weights, sizes, source_words, target_words, folder)
    kind, _, workers = task.variant.partition("x")
    workers = int(workers or 1)
    threads = dict(inter_threads=workers, intra_threads=max(1, task.threads // workers))
    translator = ctranslate2.Translator(
        str(folder), device=task.device, compute_type=kind, **threads
    )
    print(
        "computes in",
        translator.compute_type,
        "of",
        ctranslate2.get_supported_compute_types("cpu"),
        file=sys.stderr,
    )
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
        rows = (
            [int(word[1:]) if word[0] == "t" else 0 for word in each.hypotheses[0]]
            for each in results
        )
        return [row[:limit] for row, limit in zip(rows, limits)]

    time_decoding(task, corpus, once, read=read)


if __name__ == "__main__":
    run_peer(decode)
