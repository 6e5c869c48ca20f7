"""A model as two ONNX graphs: the encoder, run once a sentence, and the decoder step, run once a token.

    encoder.onnx   src (B, S) int64, src_pad (B, S) bool → source_keys, source_values (L, B, H, S, W)
    decoder.onnx   tokens (B,) int64, own_keys, own_values (L, B, H, T, W), source_keys, source_values, src_pad
                   → logits (B, V), own_keys, own_values (L, B, H, T + 1, W)

L decoder layers, H heads of width W; batch, S and T are free, T is 0 at the first token. decoding.py says what each is for.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from onnxruntime import InferenceSession
from torch import Tensor, nn

from decoding import Cache, project, step
from loading import Trained
from text.subwords import special_ids
from tools.serving.loaders.onnx import greedy


class Encoder(nn.Module):
    """Source ids → what each decoder layer attends to."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, src: Tensor, src_pad: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S), (B, S) → (L, B, H, S, W) twice"""
        memory = self.model.encode(src, src_pad)
        layers = [
            project(layer.multihead_attn, memory, "kv")
            for layer in self.model.transformer.decoder.layers
        ]
        keys, values = zip(*layers)
        return torch.stack(keys), torch.stack(values)


class GrowingCache(Cache):
    """A cache that makes new tensors: a graph of ONNX writes into none."""

    def append(
        self, index: int, position: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `Cache.append`."""
        self.own_keys[index] = torch.cat([self.own_keys[index], key], 2)
        self.own_values[index] = torch.cat([self.own_values[index], value], 2)
        return self.own_keys[index], self.own_values[index]


class DecoderStep(nn.Module):
    """`decoding.step` with the cache as inputs and outputs."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens, own_keys, own_values, source_keys, source_values, src_pad):
        """The shapes stand at the top of the file."""
        layers = (
            list(tensor.unbind()) for tensor in (own_keys, own_values, source_keys, source_values)
        )
        cache = GrowingCache(self.model, *layers, ~src_pad[:, None, None, :])
        logits = step(self.model, cache, tokens, own_keys.size(3))
        return logits, torch.stack(cache.own_keys), torch.stack(cache.own_values)


def to_onnx(trained: Trained, folder: Path) -> Callable[[list[list[int]]], list[list[int]]]:
    """Write both graphs; → a function that translates with them, greedily, one sentence after another."""
    model, sizes = trained.model, trained.model.config
    # Small inputs to follow through the model; no size of them may be 1 or like another, or it would be taken for fixed.
    src, src_pad = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 7, dtype=torch.bool)
    source = torch.zeros(sizes.num_decoder_layers, 2, sizes.nhead, 7, sizes.d_model // sizes.nhead)
    own = source[:, :, :, :4].clone()
    batch, words = torch.export.Dim("batch"), torch.export.Dim("source", max=sizes.max_length)
    past = torch.export.Dim("target", max=sizes.max_length - 1)
    with_source, with_past = {1: batch, 3: words}, {1: batch, 3: past}
    write(
        Encoder(model),
        (src, src_pad),
        {"src": {0: batch, 1: words}, "src_pad": {0: batch, 1: words}},
        ["source_keys", "source_values"],
        folder / "encoder.onnx",
    )
    inputs = {
        "tokens": {0: batch},
        "own_keys": with_past,
        "own_values": with_past,
        "source_keys": with_source,
        "source_values": with_source,
        "src_pad": {0: batch, 1: words},
    }
    write(
        DecoderStep(model),
        (src[:, 0], own, own.clone(), source, source.clone(), src_pad),
        inputs,
        ["logits", "new_keys", "new_values"],
        folder / "decoder.onnx",
    )
    encoder, decoder = (
        InferenceSession(folder / f"{name}.onnx") for name in ("encoder", "decoder")
    )
    source_eos, ids = (
        special_ids(trained.source_tokenizer)["eos"],
        special_ids(trained.target_tokenizer),
    )
    search = partial(
        greedy, encoder, decoder, bos=ids["bos"], eos=ids["eos"], longest=sizes.max_length
    )
    return lambda sources: [search([*source, source_eos]) for source in sources]


def write(module: nn.Module, example: tuple, inputs: dict, outputs: list[str], file: Path) -> None:
    """One graph, in silence: the exporter tells its steps, and warns of packages and names that do not matter here."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # whose fused layers ONNX does not know
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module.eval(),
                example,
                file,
                dynamo=True,
                dynamic_shapes=inputs,
                input_names=list(inputs),
                output_names=outputs,
                external_data=False,
            )
    finally:
        logging.disable(logging.NOTSET)
        torch.backends.mha.set_fastpath_enabled(fast_path)
