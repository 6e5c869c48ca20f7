"""Contestant "ctranslate2": CTranslate2 4.8, a decoder in C++, with this project's own weights.

It computes what our model computes, so that its outputs can be compared with ours word for word. `--variant` is its
compute type (float32, bfloat16, int8, int8_float32, …), a number behind it how many batches it works on at once: int8x2 has two
workers with one thread each. It sorts the sentences by length itself.
Like for like: the same weights, the same tokens, greedy search, a cache. It only decodes.
"""

import sys
from pathlib import Path

import numpy as np

from benchmarks.peers.contest import restore_torch_load, run_peer, time_decoding, work_folder
from model import sinusoids


def convert(weights: dict[str, np.ndarray], sizes: dict, corpus, folder: Path) -> None:
    """Write the project's weights as a CTranslate2 model."""
    from ctranslate2.specs import TransformerSpec

    layers = (sizes["num_encoder_layers"], sizes["num_decoder_layers"])
    # "Before" keeps the norm behind the last layer, which nn.Transformer has in either order; then the order is put right.
    spec = TransformerSpec.from_config(layers, sizes["nhead"], pre_norm=True)
    for side, vocabulary in (("encoder", "source"), ("decoder", "target")):
        stack = getattr(spec, side)
        stack.pre_norm = False
        embeddings = stack.embeddings[0] if side == "encoder" else stack.embeddings
        embeddings.weight = weights[f"{vocabulary}_embedding.weight"]
        stack.position_encodings.encodings = sinusoids(512, sizes["d_model"]).numpy()
        fill(stack.layer_norm, weights, f"transformer.{side}.norm")
        for index, layer in enumerate(stack.layer):
            fill_layer(layer, weights, f"transformer.{side}.layers.{index}")
    fill(spec.decoder.projection, weights, "output")
    spec.register_source_vocabulary(names(corpus.source_vocab, corpus.source_ids, "s"))
    spec.register_target_vocabulary(names(corpus.target_vocab, corpus.target_ids, "t"))
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "<s>", "</s>", "<pad>"
    spec.config.decoder_start_token, spec.config.add_source_eos = "<s>", True
    spec.validate()
    spec.optimize()
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))


def fill_layer(layer, weights: dict[str, np.ndarray], name: str) -> None:
    """One encoder or decoder layer. Norms stand in the order of nn.Transformer: norm1, norm2 and, in a decoder, norm3."""
    norms = [layer.self_attention.layer_norm, layer.ffn.layer_norm]
    own, parts = layer.self_attention.linear, [("linear1", layer.ffn.linear_0), ("linear2", layer.ffn.linear_1)]
    own[0].weight, own[0].bias = (weights[f"{name}.self_attn.in_proj_{kind}"] for kind in ("weight", "bias"))
    parts.append(("self_attn.out_proj", own[1]))
    if hasattr(layer, "attention"):  # to the source: the query apart from key and value
        cross = layer.attention.linear
        for kind in ("weight", "bias"):
            query, *others = np.split(weights[f"{name}.multihead_attn.in_proj_{kind}"], 3)
            setattr(cross[0], kind, query), setattr(cross[1], kind, np.concatenate(others))
        parts.append(("multihead_attn.out_proj", cross[2]))
        norms.insert(1, layer.attention.layer_norm)
    for part_name, part in parts + [(f"norm{number}", norm) for number, norm in enumerate(norms, 1)]:
        fill(part, weights, f"{name}.{part_name}")


def fill(part, weights: dict[str, np.ndarray], name: str) -> None:
    """Weight and bias of a linear layer or a norm."""
    for kind, norms in (("weight", "gamma"), ("bias", "beta")):
        setattr(part, norms if hasattr(part, "gamma") else kind, weights[f"{name}.{kind}"])


def names(size: int, special: dict[str, int], letter: str) -> list[str]:
    """A word for every token id."""
    words = [f"{letter}{id}" for id in range(size)]
    for name, id in zip(("<pad>", "<s>", "</s>"), (special["pad"], special["bos"], special["eos"])):
        words[id] = name
    return words


def decode(task, corpus) -> None:
    """All test sentences in one call."""
    import ctranslate2
    import torch

    restore_torch_load()
    folder = Path(task.weights or work_folder(corpus, "random")) / "ctranslate2"
    if not (folder / "model.bin").exists():
        weights = {name: tensor.float().numpy() for name, tensor in torch.load(folder.parent / "weights.pt").items()}
        convert(weights, task.sizes, corpus, folder)
    kind, _, workers = task.variant.partition("x")
    workers = int(workers or 1)
    threads = dict(inter_threads=workers, intra_threads=max(1, task.threads // workers))
    translator = ctranslate2.Translator(str(folder), device=task.device, compute_type=kind, **threads)
    print("computes in", translator.compute_type, "of", ctranslate2.get_supported_compute_types("cpu"), file=sys.stderr)
    lines = (corpus.folder / "test.src").read_text(encoding="utf-8").splitlines()[: len(corpus.test)]
    sources = [line.split() for line in lines]
    limits = [task.length or (len(source) + 1) * 3 // 2 + 10 for source in sources]

    def once():
        return translator.translate_batch(
            sources, beam_size=1, max_batch_size=task.batch, min_decoding_length=task.length or 1,
            max_decoding_length=max(limits),
        )  # fmt: skip

    def read(results) -> list[list[int]]:
        rows = ([int(word[1:]) if word[0] == "t" else 0 for word in each.hypotheses[0]] for each in results)
        return [row[:limit] for row, limit in zip(rows, limits)]

    time_decoding(task, corpus, once, read=read)


if __name__ == "__main__":
    run_peer(decode=decode)
