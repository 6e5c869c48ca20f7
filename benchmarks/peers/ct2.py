"""Contestant "ctranslate2": CTranslate2 4.8, a decoder in C++, with this project's weights.

The variant is "KIND WORKERS THREADS BATCH": compute type (float32, int8), workers that decode a
batch each, threads of each worker, sentences of a batch.

It computes what our model computes, so its outputs can be compared with ours token by token. Our
outputs end at 1.5 × source + 10 tokens. CTranslate2 has one limit for each call, so it gets a call
for every batch, all at once; sentences are sorted by length, and the limit is that of the longest
in the batch. What is longer than the limit of its own sentence is cut off.
"""

from pathlib import Path

import ctranslate2

from benchmarks.peers.turn import Task, run_peer, time_decoding


def decode(task: Task) -> dict:
    """Search as `task` says."""
    kind, workers, threads, batch = task.variant.split()
    translator = ctranslate2.Translator(
        str(Path(task.folder) / "ctranslate2"),
        device=task.device,
        compute_type=kind,
        inter_threads=int(workers),
        intra_threads=int(threads),
    )
    names = {"pad": "<pad>", "bos": "<s>", "eos": "</s>"}  # as to_ctranslate2.name_special has them
    special = {names[name]: token for name, token in task.target_ids.items() if name in names}

    def translate(sources: list[list[int]]) -> list[list[int]]:
        """Token ids in, token ids out."""
        # As decoding.output_limit, which needs torch.
        longest = task.sizes["max_length"]
        limits = [min((len(source) + 1) * 3 // 2 + 10, longest) for source in sources]
        order = sorted(range(len(sources)), key=lambda row: -len(sources[row]))
        calls = {}  # sentence: its result to come
        for first in range(0, len(order), int(batch)):
            rows = order[first : first + int(batch)]
            results = translator.translate_batch(
                [[str(token) for token in sources[row]] for row in rows],
                beam_size=task.beam,
                length_penalty=task.length_penalty,
                max_input_length=0,
                max_decoding_length=limits[rows[0]],
                asynchronous=True,
            )
            calls.update(zip(rows, results))
        outputs = []
        for row, limit in enumerate(limits):
            words = calls[row].result().hypotheses[0]
            ids = [special[word] if word in special else int(word) for word in words[:limit]]
            outputs.append(ids)
        return outputs

    return time_decoding(task, translate)


if __name__ == "__main__":
    run_peer(decode)
