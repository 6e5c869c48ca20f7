"""Greedy decoding on a CPU by PyTorch's own operations, with weights laid out for it once: what `decoding.step` computes, in
less time. fast/compiled.py is faster still; this one is for where there is no C++ compiler, and for other formats.

    packed = PackedTranslator(model)                    # or int8=True
    cache = packed.start(src, src_pad)
    tokens = packed.next_tokens(cache, tokens, position)

`decoding.step` is the plain version, and the tests hold this one to it. What differs, and why:
 - the weights are constant, so they are copied once into the blocks that the CPU's matrix product reads (or rounded to 8 bits);
 - query, key and value of a head stand side by side, so that one product gives all three without a copy;
 - the 1/√W of attention and the √D of the embedding are folded into the weights;
 - one query a row is too little work for a fused attention kernel: two batched products and a softmax are faster;
 - the source is encoded a few sentences at a time, each part padded to its own longest only;
 - the cache grows by blocks of 16 tokens, one vector of 16 floats in a softmax, and only what is filled is ever copied;
 - the likeliest token is found piece by piece, while a piece of the logits is still in a cache.
Letters in shape comments as in `decoding`; R = B·H rows and heads, L tokens of cache in use.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.quantized import pack_int8
from model import Translator

TOKENS_PER_BLOCK = 16
VOCABULARY_PIECE = 4096  # logits computed at once: 128 rows of them are 2 MiB
SEARCH_BLOCK = 64  # `argmax` takes one number at a time, `amax` 16: find the block first, then the place in it
ROWS_ENCODED = 32  # sentences encoded at once: neighbours in length, so that they need little padding
TYPICAL_ROWS = 128  # a layout good for this many rows is good for others


@dataclass
class PackedCache:
    """Keys and values of every decoder layer, each (R, tokens, W)."""

    heads: int
    own_mask: Tensor  # (longest,) 0 = seen, -inf = not yet
    source_mask: Tensor  # (R, 1, S) 0 = look here, -inf = padding; added to the scores
    source_keys: list[Tensor] = field(default_factory=list)
    source_values: list[Tensor] = field(default_factory=list)
    own_keys: list[Tensor] = field(default_factory=list)
    own_values: list[Tensor] = field(default_factory=list)

    def grow(self) -> None:
        """Room for another block of tokens. Zeros, because what is masked is multiplied all the same."""
        for tensors in (self.own_keys, self.own_values):
            for index, old in enumerate(tensors):
                tensors[index] = torch.cat([old, old.new_zeros(len(old), TOKENS_PER_BLOCK, old.size(2))], 1)

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        for tensors in (self.own_keys, self.own_values, self.source_keys, self.source_values):
            tensors[:] = [self.pick(tensor, rows) for tensor in tensors]
        self.source_mask = self.pick(self.source_mask, rows)

    def pick(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """(R, …) → the R of these rows"""
        return tensor.unflatten(0, (-1, self.heads)).index_select(0, rows).flatten(0, 1)


class PackedTranslator:
    """A model's weights as they are now, for greedy decoding on a CPU; later changes of the model do not reach it."""

    @torch.inference_mode()
    def __init__(self, model: Translator, int8: bool = False):
        self.model = model
        self.pack = pack_int8 if int8 else pack_linear
        self.encoder = [self.pack_layer(layer) for layer in model.transformer.encoder.layers]
        self.decoder = [self.pack_layer(layer) for layer in model.transformer.decoder.layers]
        self.target_embedding = model.target_embedding.weight * math.sqrt(model.config.d_model)
        self.output = list(self.pack_output(model.output))

    def pack_layer(self, layer: nn.Module) -> dict[str, Callable]:
        """Every linear map of an encoder or decoder layer, by name, and the layer itself for its norms."""
        own, other = layer.self_attn, getattr(layer, "multihead_attn", None)
        linears = {"own_out": own.out_proj, "widen": layer.linear1, "narrow": layer.linear2}
        packed = {"layer": layer, "own": self.pack_heads(own, "qkv")}
        if other is not None:
            linears["source_out"] = other.out_proj
            packed |= {"source_query": self.pack_heads(other, "q"), "source": self.pack_heads(other, "kv")}
        return packed | {name: self.pack(linear.weight, linear.bias) for name, linear in linears.items()}

    def pack_heads(self, attention: nn.MultiheadAttention, which: str) -> Callable:
        """(rows, D) → (rows, H, 1–3, W) flattened: the wanted ones of query (already times 1/√W), key, value."""
        heads, width = attention.num_heads, attention.head_dim
        weight = attention.in_proj_weight.unflatten(0, (3, heads, width)).clone()  # (3, H, W, D)
        bias = attention.in_proj_bias.unflatten(0, (3, heads, width)).clone()  # (3, H, W)
        weight[0] /= math.sqrt(width)
        bias[0] /= math.sqrt(width)
        wanted = ["qkv".index(letter) for letter in which]
        return self.pack(weight[wanted].transpose(0, 1).flatten(0, 2), bias[wanted].transpose(0, 1).flatten())

    def pack_output(self, output: nn.Linear):
        """The output projection in pieces: (first token, function). The last is filled up with tokens never chosen."""
        pieces = zip(output.weight.split(VOCABULARY_PIECE), output.bias.split(VOCABULARY_PIECE))
        for number, (weight, bias) in enumerate(pieces):
            missing = -len(weight) % SEARCH_BLOCK
            weight, bias = F.pad(weight, (0, 0, 0, missing)), F.pad(bias, (0, missing), value=-math.inf)
            yield number * VOCABULARY_PIECE, self.pack(weight, bias)

    def start(self, src: Tensor, src_pad: Tensor) -> PackedCache:
        """Encode (B, S), padded behind; of what is in order of length the least padding is computed."""
        config = self.model.config
        heads, (batch, length) = config.nhead, src.shape
        mask = self.target_embedding.new_zeros(src.shape).masked_fill_(src_pad, -math.inf)
        mask = mask[:, None].repeat_interleave(heads, 0)  # (R, 1, S)
        cache = PackedCache(heads, mask.new_full((config.max_length + TOKENS_PER_BLOCK,), -math.inf), mask)
        # Zeros, because what is masked is multiplied all the same.
        sources = [mask.new_zeros(2, batch, heads, length, config.d_model // heads) for _ in self.decoder]
        for first in range(0, batch, ROWS_ENCODED):
            rows = slice(first, first + ROWS_ENCODED)
            longest = int((~src_pad[rows]).sum(1).max())
            memory = self.encode(src[rows, :longest], src_pad[rows, :longest])  # (rows·longest, D)
            for layer, source in zip(self.decoder, sources):
                both = layer["source"](memory).view(-1, longest, heads, 2, source.size(-1))
                source[:, rows, :, :longest] = both.permute(3, 0, 2, 1, 4)
        for source in sources:
            keys, values = source.flatten(1, 2)  # (R, S, W) each
            cache.source_keys.append(keys)
            cache.source_values.append(values)
            cache.own_keys.append(keys[:, :0])
            cache.own_values.append(values[:, :0])
        return cache

    def encode(self, src: Tensor, src_pad: Tensor) -> Tensor:
        """(B, S) → (B·S, D)"""
        model = self.model
        x = model.embed(model.source_embedding, src).flatten(0, 1)  # (B·S, D)
        mask = x.new_zeros(src.shape).masked_fill_(src_pad, -math.inf)[:, None]  # (B, 1, S)
        mask = mask.repeat_interleave(model.config.nhead, 0)  # (R, 1, S)
        for layer in self.encoder:
            x = add_and_norm(layer, "norm1", x, attend_each_other, mask)
            x = add_and_norm(layer, "norm2", x, feed_forward)
        return model.transformer.encoder.norm(x)

    def next_tokens(self, cache: PackedCache, tokens: Tensor, position: int) -> Tensor:
        """Feed (B,) tokens at one position; → (B,) the likeliest next ones. The cache grows by one token."""
        if position % TOKENS_PER_BLOCK == 0:
            cache.grow()
        cache.own_mask[position] = 0
        x = F.embedding(tokens, self.target_embedding) + self.model.positions[position]  # (B, D)
        for index, layer in enumerate(self.decoder):
            x = add_and_norm(layer, "norm1", x, attend_own, cache, index, position)
            x = add_and_norm(layer, "norm2", x, attend_source, cache, index)
            x = add_and_norm(layer, "norm3", x, feed_forward)
        return self.likeliest(self.model.transformer.decoder.norm(x))

    def likeliest(self, x: Tensor) -> Tensor:
        """(B, D) → (B,) the token with the largest logit; of equal ones the first, as `argmax` has it."""
        rows, best, token = torch.arange(len(x)), None, None
        for first, linear in self.output:
            blocks = linear(x).view(len(rows), -1, SEARCH_BLOCK)
            largest, block = blocks.amax(-1).max(-1)  # (B,) each
            found = blocks[rows, block].argmax(-1).add_(block, alpha=SEARCH_BLOCK).add_(first)
            if best is None:
                best, token = largest, found
            else:
                better = largest > best
                best, token = torch.where(better, largest, best), torch.where(better, found, token)
        return token


def add_and_norm(layer: dict, norm: str, x: Tensor, sublayer: Callable, *arguments) -> Tensor:
    """A sublayer with its residual and its norm, before or after."""
    norm = getattr(layer["layer"], norm)
    if layer["layer"].norm_first:
        return x + sublayer(layer, norm(x), *arguments)
    return norm(x + sublayer(layer, x, *arguments))


def attend_each_other(layer: dict, x: Tensor, mask: Tensor) -> Tensor:
    """Self-attention of the encoder: (B·S, D), added mask (R, 1, S) → (B·S, D)"""
    heads, length = layer["layer"].self_attn.num_heads, mask.size(-1)
    split = layer["own"](x).view(-1, length, heads, 3, x.size(-1) // heads)  # (B, S, H, 3, W)
    query, key, value = split.permute(3, 0, 2, 1, 4).flatten(1, 2)  # (R, S, W) each
    seen = attend(query, key, value, mask).unflatten(0, (-1, heads))  # (B, H, S, W)
    return layer["own_out"](seen.transpose(1, 2).reshape(x.shape))


def attend_own(layer: dict, x: Tensor, cache: PackedCache, index: int, position: int) -> Tensor:
    """Self-attention of the newest token over itself and all before it: (B, D) → (B, D)"""
    keys, values = cache.own_keys[index], cache.own_values[index]
    heads = layer["own"](x).view(len(keys), 3, -1)  # (R, 3, W)
    keys[:, position], values[:, position] = heads[:, 1], heads[:, 2]
    return layer["own_out"](attend(heads[:, :1], keys, values, cache.own_mask[: keys.size(1)]).view_as(x))


def attend_source(layer: dict, x: Tensor, cache: PackedCache, index: int) -> Tensor:
    """Attention over the encoded source: (B, D) → (B, D)"""
    keys, values = cache.source_keys[index], cache.source_values[index]
    query = layer["source_query"](x).view(len(keys), 1, -1)  # (R, 1, W)
    return layer["source_out"](attend(query, keys, values, cache.source_mask).view_as(x))


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """(R, T, W), (R, L, W), (R, L, W), added mask → (R, T, W); T is 1 in the decoder"""
    scores = torch.baddbmm(mask, query, keys.transpose(1, 2))  # (R, T, L)
    return torch.bmm(scores.softmax(-1), values)


def feed_forward(layer: dict, x: Tensor) -> Tensor:
    """(rows, D) → (rows, D)"""
    return layer["narrow"](layer["widen"](x).relu_())


@contextmanager
def small_products() -> Iterator[None]:
    """The many small products of attention go to MKL instead of oneDNN; packed weights do not care."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


def pack_linear(weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
    """(out, in), (out,) → a function (rows, in) → (rows, out) in the same precision.

    oneDNN multiplies fp32 from blocks of its own layout, and would make them anew at every call. Other formats, and builds
    without oneDNN, take the ordinary product.
    """
    weight, bias = weight.contiguous(), bias.contiguous()
    if weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return lambda x: F.linear(x, weight, bias)
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, blocks, bias, "none", [], "")
