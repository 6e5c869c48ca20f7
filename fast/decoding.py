"""Decoding in C++: a translator's weights laid out for decoding.cpp, one call per step.

    if not why_not(model):
        cache = CompiledDecoder(model).start(src, src_pad)            # int8=True: in 8 bits
        tokens = cache.next_tokens(tokens, position)

The plain version is `step` in decoding.py of the root. Python's lock is free during a call, so
threads with a batch each do not wait for one another. Letters are those of decoding.cpp.

int8: a weight is w ≈ scale · q with q from −127 to 127 and one scale for each output. Inputs are
rounded in every call with one scale for each row, multiplied as integers, and the product is scaled
back to fp32. An integer product does up to four times as many multiplications in the same time, and
a weight is one byte to read instead of four. To see what it costs, score a checkpoint with and
without it.
"""

import ctypes
import math
from ctypes import POINTER, c_double, c_int64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fast import build
from fast.build import call, library, round_up
from fast.training import has_layers_and_positions, is_known

WIDTH_MULTIPLE = 16  # all widths are multiples of the numbers in the largest vector
TOKENS_PER_BLOCK = 16  # kTokens: of the cache of keys and values


# The structs of decoding.cpp, field for field; the shapes behind the addresses are given there.
class Linear(ctypes.Structure):
    """A packed matrix with its bias."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("scale", c_void_p),
        ("start", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("zero", c_int64),
    ]


class Norm(ctypes.Structure):
    """A layer norm."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("epsilon", c_double)]


class Layer(ctypes.Structure):
    """One layer of the encoder or the decoder."""

    _fields_ = [
        ("own", Linear),
        ("own_out", Linear),
        ("source_query", Linear),
        ("source", Linear),
        ("source_out", Linear),
        ("linear1", Linear),
        ("linear2", Linear),
        ("norms", Norm * 3),
    ]


class Weights(ctypes.Structure):
    """All weights of a model, and its sizes."""

    _fields_ = [
        ("source_embedding", c_void_p),
        ("target_embedding", c_void_p),
        ("positions", c_void_p),
        ("encoder", POINTER(Layer)),
        ("decoder", POINTER(Layer)),
        ("encoder_layers", c_int64),
        ("decoder_layers", c_int64),
        ("heads", c_int64),
        ("width", c_int64),
        ("norm_first", c_int64),
        ("encoder_norm", Norm),
        ("decoder_norm", Norm),
        ("output", Linear),
    ]


class CacheAddresses(ctypes.Structure):
    """Where the keys and values of a cache lie."""

    _fields_ = [
        ("own", c_void_p),
        ("own_slots", c_void_p),
        ("source", c_void_p),
        ("source_first", c_void_p),
        ("source_length", c_void_p),
    ]


def compiled_functions(int8: bool) -> ctypes.CDLL | None:
    """The compiled functions, or None."""
    source = Path(__file__).with_suffix(".cpp")
    return library(source, INT8="1") if int8 else library(source)


def why_not(model: nn.Module, int8: bool = False) -> str:
    """Why the compiled functions cannot decode with this model; empty if they can.

    They need the modules of model.py with ReLU, fp32 and sizes of whole vectors.
    """
    if not has_layers_and_positions(model):
        return "model.py was changed: its layers or positions are different"
    if not is_known(model):
        return "the model has a part or a weight that the C++ code does not know, or lacks one"
    sizes = model.config
    widths = (sizes.d_model, sizes.dim_feedforward, sizes.d_model // sizes.nhead)
    if any(width % WIDTH_MULTIPLE for width in widths):
        names = "the model, of its feed-forward layers or of a head"
        return f"the width of {names} is not a multiple of {WIDTH_MULTIPLE}"
    layers = [*model.transformer.encoder.layers, *model.transformer.decoder.layers]
    if any(layer.activation is not F.relu for layer in layers):
        return "the C++ code needs layers with ReLU"
    for weight in model.parameters():
        if weight.dtype != torch.float32:
            return "the weights are not fp32"
        # With nan among the logits, the largest one is not defined.
        if not weight.isfinite().all():
            return "a weight is not finite"
    if int8 and not torch.cpu._is_vnni_supported():
        return "the CPU has no AVX-512 VNNI"
    if compiled_functions(int8) is None:
        return build.why_not() or "the C++ code is not compiled"
    return ""


def check_ids(tokens: Tensor, vocabulary: int) -> None:
    """Raises `IndexError` for ids outside the vocabulary: C++ would read foreign memory."""
    if bool(((tokens < 0) | (tokens >= vocabulary)).any()):
        found = f"token ids from {tokens.min()} to {tokens.max()}"
        raise IndexError(f"{found}, but the vocabulary has {vocabulary}")


def check_length(tokens: int, limit: int) -> None:
    """Raises `ValueError` for positions that the model does not have."""
    if tokens > limit:
        raise ValueError(f"{tokens} tokens are more than the {limit} this model has positions for")


@dataclass
class CompiledCache:
    """Keys and values in blocks of 16 tokens, and the decoder's steps over them.

    A row has a slot in every block. Rows that continue the same hypothesis share the slots of full
    blocks. In the last block, which is being written, each has its own. Nothing else is copied.
    """

    decoder: "CompiledDecoder"
    source: Tensor  # (blocks, layers, 2 · 16 · D), of all sentences
    source_first: Tensor  # (N,) the first block of each row's sentence
    source_length: Tensor  # (N,) tokens
    own_slots: Tensor  # (blocks, N)
    own: list[Tensor] = field(default_factory=list)  # blocks: (slots, layers, 2 · 16 · D) each
    length: int = 0  # tokens so far
    drop_at: ClassVar[float] = 0.0  # as in `decoding.Cache`: rows may leave one by one

    def next_tokens(self, tokens: Tensor, position: int) -> Tensor:
        """Feed (N,) tokens at one position; returns the (N,) likeliest next ones."""
        tokens = self.prepare(tokens, position)
        chosen = torch.empty_like(tokens)
        self.call("next_tokens", tokens, len(tokens), position, chosen)
        return chosen

    def top_tokens(self, tokens: Tensor, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Feed (N,) tokens at one position; returns the likeliest next ones, best first.

        Log-probabilities (N, C) and ids (N, C), where C is `count` or at most the vocabulary.
        """
        tokens = self.prepare(tokens, position)
        count = min(count, self.decoder.config.target_vocab)
        ids = tokens.new_empty(len(tokens), count)
        log_probabilities = torch.empty(len(tokens), count)
        self.call("top_tokens", tokens, len(tokens), position, count, log_probabilities, ids)
        return log_probabilities, ids

    def prepare(self, tokens: Tensor, position: int) -> Tensor:
        """Check the input, which C++ does not, and make room for one more token."""
        config = self.decoder.config
        check_length(position + 1, config.max_length)
        rows = len(self.source_length)
        if position != self.length or len(tokens) != rows:
            raise ValueError(
                f"{len(tokens)} tokens at position {position}, but the cache has {rows} rows "
                f"of {self.length} tokens"
            )
        tokens = tokens.long().contiguous()
        check_ids(tokens, config.target_vocab)
        if position % TOKENS_PER_BLOCK == 0:
            self.own.append(self.source.new_empty(len(tokens), *self.source.shape[1:]))
            new_slots = torch.arange(len(tokens))[None]
            self.own_slots = torch.cat([self.own_slots, new_slots])
        self.length = position + 1
        return tokens

    def call(self, name: str, *arguments) -> None:
        """Call a function of decoding.cpp that takes the weights and the cache."""
        function = getattr(self.decoder.functions, name)
        call(function, self.decoder.weights, self.addresses(), *arguments)

    def select(self, rows: Tensor) -> None:
        """Continue with these rows, (sentences, hypotheses); see `decoding.Cache.select`."""
        rows = rows.flatten()
        self.source_first = self.source_first[rows]
        self.source_length = self.source_length[rows]
        self.own_slots = self.own_slots.index_select(1, rows)
        if self.length % TOKENS_PER_BLOCK == 0:
            return  # the last block is full: nothing more is written to it
        last = self.own[-1]
        if len(rows) > len(last):
            self.own[-1] = last.new_empty(len(rows), *last.shape[1:])
            self.own[-1][: len(last)] = last
            last = self.own[-1]
        bytes_per_slot = last.stride(0) * last.element_size()
        copy_shared_slots = self.decoder.functions.copy_shared_slots
        call(copy_shared_slots, last, bytes_per_slot, len(last), self.own_slots[-1], len(rows))

    def addresses(self) -> CacheAddresses:
        """The cache for one call; the next one may have more blocks."""
        own = (c_void_p * len(self.own))(*(block.data_ptr() for block in self.own))
        tensors = (self.own_slots, self.source, self.source_first, self.source_length)
        return CacheAddresses(ctypes.cast(own, c_void_p), *map(Tensor.data_ptr, tensors))


class CompiledDecoder:
    """A copy of a model's current weights for decoding on a CPU."""

    @torch.inference_mode()
    def __init__(self, model: nn.Module, int8: bool = False):
        self.functions = compiled_functions(int8)
        self.int8 = int8
        self.config = model.config
        self.panel = self.functions.outputs_in_a_panel()
        self.tensors = []  # keeps alive what C++ has the address of
        encoder, decoder = model.transformer.encoder, model.transformer.decoder
        scale = math.sqrt(self.config.d_model)
        self.weights = Weights(
            source_embedding=self.keep(model.source_embedding.weight * scale),
            target_embedding=self.keep(model.target_embedding.weight * scale),
            positions=self.keep(model.positions.clone()),
            encoder=self.pack_layers(encoder),
            decoder=self.pack_layers(decoder),
            encoder_layers=len(encoder.layers),
            decoder_layers=len(decoder.layers),
            heads=self.config.nhead,
            width=self.config.d_model,
            norm_first=self.config.norm_first,
            encoder_norm=self.pack_norm(encoder.norm),
            decoder_norm=self.pack_norm(decoder.norm),
            output=self.pack_linear(model.output.weight, model.output.bias),
        )

    def keep(self, tensor: Tensor) -> int:
        """The address of a tensor, which now lives as long as this object."""
        self.tensors.append(tensor.contiguous())
        return self.tensors[-1].data_ptr()

    def pack_layers(self, coder: nn.Module) -> ctypes.Array:
        """All layers of the encoder or the decoder."""
        return (Layer * len(coder.layers))(*map(self.pack_layer, coder.layers))

    def pack_layer(self, layer: nn.Module) -> Layer:
        """One layer; only those of the decoder have `multihead_attn`."""
        own = layer.self_attn
        packed = Layer(
            own=self.pack_projection(own, "qkv"),
            own_out=self.pack_linear(own.out_proj.weight, own.out_proj.bias),
            linear1=self.pack_linear(layer.linear1.weight, layer.linear1.bias),
            # Its inputs are not negative: they come from ReLU.
            linear2=self.pack_linear(layer.linear2.weight, layer.linear2.bias, zero=0),
        )
        packed.norms[0] = self.pack_norm(layer.norm1)
        packed.norms[1] = self.pack_norm(layer.norm2)
        source = getattr(layer, "multihead_attn", None)
        if source is not None:
            packed.norms[2] = self.pack_norm(layer.norm3)
            packed.source_query = self.pack_projection(source, "q")
            packed.source = self.pack_projection(source, "kv")
            packed.source_out = self.pack_linear(source.out_proj.weight, source.out_proj.bias)
        return packed

    def pack_norm(self, norm: nn.LayerNorm) -> Norm:
        """Copies of its weight and bias, kept alive."""
        return Norm(self.keep(norm.weight.clone()), self.keep(norm.bias.clone()), norm.eps)

    def pack_projection(self, attention: nn.MultiheadAttention, which: str) -> Linear:
        """`which` of query, key and value: "q", "kv" or "qkv". The query is multiplied by 1/√W."""
        width = attention.embed_dim
        weight, bias = attention.in_proj_weight.clone(), attention.in_proj_bias.clone()
        weight[:width] /= math.sqrt(attention.head_dim)
        bias[:width] /= math.sqrt(attention.head_dim)
        first = "qkv".index(which[0]) * width
        wanted = slice(first, first + len(which) * width)
        return self.pack_linear(weight[wanted], bias[wanted])

    def pack_linear(self, weight: Tensor, bias: Tensor, zero: int = 128) -> Linear:
        """(out, in), (out,) → panels of outputs.

        int8: an input is a number from 0 to 255 that stands for x = scale · (number − zero).
        """
        outputs, inputs = weight.shape
        missing = round_up(outputs, self.panel) - outputs
        weight = F.pad(weight, (0, 0, 0, missing))
        bias = F.pad(bias, (0, missing), value=-math.inf)
        group, scale, start = 1, None, None
        if self.int8:
            group = 4
            scales = weight.abs().amax(1).clamp(min=1e-30) / 127
            weight = (weight / scales[:, None]).round().to(torch.int8)
            start = self.keep(-zero * weight.sum(1, dtype=torch.int32))
            scale = self.keep(scales)
        # (panels, in / group, panel, group)
        panels = weight.view(-1, self.panel, inputs // group, group).transpose(1, 2)
        return Linear(self.keep(panels), self.keep(bias), scale, start, inputs, outputs, zero)

    @torch.inference_mode()
    def start(self, src: Tensor, src_pad: Tensor) -> CompiledCache:
        """Encode (B, S) sources, padded at the end; returns a cache with one row for each."""
        config = self.config
        check_length(src.size(1), config.max_length)
        if (src_pad[:, :-1] & ~src_pad[:, 1:]).any():
            raise ValueError("there is padding before a token; pad sources at the end")
        lengths = (~src_pad).sum(1)
        blocks = (lengths + TOKENS_PER_BLOCK - 1) // TOKENS_PER_BLOCK
        # Keys and values of all heads, in all layers.
        per_block = (config.num_decoder_layers, 2 * TOKENS_PER_BLOCK * config.d_model)
        dtype = torch.bfloat16 if self.int8 else torch.float32
        cache = CompiledCache(
            self,
            source=torch.empty(int(blocks.sum()), *per_block, dtype=dtype),
            source_first=blocks.cumsum(0) - blocks,
            source_length=lengths,
            own_slots=torch.empty(0, len(src), dtype=torch.long),
        )
        tokens = src[~src_pad].long()  # of all sentences, one after the other
        check_ids(tokens, config.source_vocab)
        cache.call("encode_sources", tokens, len(src))
        return cache
