"""PyTorch's encoder, decoder and output layer for decoding on a CPU, each in C++.

    encoder = CompiledEncoder.of(model.transformer.encoder)      # the arguments of PyTorch's
    decoder = CompiledDecoder.of(model.transformer.decoder)      # one token a call; keeps a cache
    output = CompiledOutput(model.output)                        # the largest logits of each row

decoding.py of the root puts them into a copy of the model, whose own code calls them. The weights
are copied when such a module is made, laid out for decoding.cpp. Python's lock is free during a
call, so threads with a batch each do not wait for one another. Letters are those of decoding.cpp.

int8: a weight is w ≈ scale · q with q from −127 to 127 and one scale for each output. Inputs are
rounded in every call with one scale for each row, multiplied as integers, and the product is scaled
back to fp32. An integer product does up to four times as many multiplications in the same time, and
a weight is one byte to read instead of four. To see what it costs, score a checkpoint with and
without it.
"""

import ctypes
import math
from ctypes import POINTER, c_double, c_int64, c_void_p
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fast import build
from fast.build import call, has_vnni, library, round_up
from fast.layers import has_hooks, is_padding, unknown_part

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


class Stack(ctypes.Structure):
    """All layers of an encoder or a decoder, and its sizes."""

    _fields_ = [
        ("layers", POINTER(Layer)),
        ("count", c_int64),
        ("heads", c_int64),
        ("width", c_int64),
        ("norm_first", c_int64),
        ("norm", Norm),
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


def compiled_functions(int8: bool = False) -> ctypes.CDLL | None:
    """The compiled functions, or None."""
    source = Path(__file__).with_suffix(".cpp")
    return library(source, INT8="1") if int8 else library(source)


def why_not(module: nn.Module, int8: bool = False) -> str:
    """Why C++ cannot compute this encoder, decoder or output layer; empty if it can."""
    if isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)):
        reason = unknown_part(module)
    else:
        reason = unknown_output(module)
    if reason:
        return reason
    for weight in module.parameters():
        if weight.device.type != "cpu":
            return "it is not on a CPU"
        # With nan among the logits, the largest one is not defined.
        if not weight.isfinite().all():
            return "a weight is not finite"
    if int8 and not has_vnni():
        return "the CPU has no AVX-512 VNNI"
    if compiled_functions(int8) is None:
        return build.why_not() or "the C++ code is not compiled"
    return ""


def unknown_output(output: nn.Module) -> str:
    """What this output layer has that C++ does not know; empty if there is nothing."""
    if type(output) is not nn.Linear or has_hooks(output):
        return "the output layer is not PyTorch's nn.Linear"
    if output.bias is None or output.in_features % 16:
        return "the output layer has no bias, or a width that is not a multiple of 16"
    if output.weight.shape != (output.out_features, output.in_features):
        return "the weight of the output layer has another shape than the layer says"
    if output.weight.dtype != torch.float32 or output.bias.dtype != torch.float32:
        return f"its weights are not fp32: {output.weight.dtype}"
    return ""


class Packed:
    """Weights laid out for C++, and the tensors that own their memory."""

    def __init__(self, int8: bool):
        self.int8 = int8
        self.functions = compiled_functions(int8)
        self.panel = self.functions.outputs_in_a_panel()
        self.tensors = []  # keeps alive what C++ has the address of

    def keep(self, tensor: Tensor) -> int:
        """The address of a tensor, which now lives as long as this object."""
        self.tensors.append(tensor.contiguous())
        return self.tensors[-1].data_ptr()

    @torch.inference_mode()
    def stack(self, coder: nn.Module) -> Stack:
        """All layers of an encoder or a decoder, with its sizes."""
        layers = (Layer * len(coder.layers))(*map(self.layer, coder.layers))
        first = coder.layers[0]
        attention = first.self_attn
        return Stack(
            layers=layers,
            count=len(layers),
            heads=attention.num_heads,
            width=attention.embed_dim,
            norm_first=first.norm_first,
            norm=self.norm(coder.norm),
        )

    def layer(self, layer: nn.Module) -> Layer:
        """One layer; only those of the decoder have `multihead_attn`."""
        own = layer.self_attn
        packed = Layer(
            own=self.projection(own, "qkv"),
            own_out=self.linear(own.out_proj.weight, own.out_proj.bias),
            linear1=self.linear(layer.linear1.weight, layer.linear1.bias),
            # Its inputs are not negative: they come from ReLU.
            linear2=self.linear(layer.linear2.weight, layer.linear2.bias, zero=0),
        )
        packed.norms[0] = self.norm(layer.norm1)
        packed.norms[1] = self.norm(layer.norm2)
        source = getattr(layer, "multihead_attn", None)
        if source is not None:
            packed.norms[2] = self.norm(layer.norm3)
            packed.source_query = self.projection(source, "q")
            packed.source = self.projection(source, "kv")
            packed.source_out = self.linear(source.out_proj.weight, source.out_proj.bias)
        return packed

    def norm(self, norm: nn.LayerNorm) -> Norm:
        """Copies of its weight and bias, kept alive."""
        return Norm(self.keep(norm.weight.clone()), self.keep(norm.bias.clone()), norm.eps)

    def projection(self, attention: nn.MultiheadAttention, which: str) -> Linear:
        """`which` of query, key and value: "q", "kv" or "qkv". The query is multiplied by 1/√W."""
        width = attention.embed_dim
        weight, bias = attention.in_proj_weight.clone(), attention.in_proj_bias.clone()
        weight[:width] /= math.sqrt(attention.head_dim)
        bias[:width] /= math.sqrt(attention.head_dim)
        first = "qkv".index(which[0]) * width
        wanted = slice(first, first + len(which) * width)
        return self.linear(weight[wanted], bias[wanted])

    def linear(self, weight: Tensor, bias: Tensor, zero: int = 128) -> Linear:
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


def twin(module: nn.Module, kind: type) -> nn.Module:
    """A module of another class with the same parts and weights."""
    copy = kind.__new__(kind)
    copy.__dict__ = dict(module.__dict__)
    return copy


class CompiledEncoder(nn.TransformerEncoder):
    """`nn.TransformerEncoder` in C++, which computes nothing for padding."""

    packed: Packed
    stack: Stack

    @classmethod
    def of(cls, encoder: nn.TransformerEncoder, int8: bool = False) -> "CompiledEncoder":
        """The same encoder; `why_not` must have no objection to it."""
        compiled = twin(encoder, cls)
        compiled.packed = Packed(int8)
        compiled.stack = compiled.packed.stack(encoder)
        return compiled

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """(B, S, D) → (B, S, D), 0 at padding. With other masks, PyTorch computes it.

        Raises `ValueError` for inputs of other shapes or formats.
        """
        if mask is not None or is_causal or not is_padding(src_key_padding_mask, src):
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        check_input(src, (len(src), src.size(1), self.stack.width))
        real = real_tokens(src, src_key_padding_mask)  # (B, S)
        x = src[real]  # a copy: (all tokens, D)
        lengths = real.sum(1)
        call(self.packed.functions.encode_sources, self.stack, x, lengths, len(lengths))
        memory = torch.zeros_like(src)
        memory[real] = x
        return memory


class CompiledDecoder(nn.TransformerDecoder):
    """`nn.TransformerDecoder` in C++ for one token of each row a call.

    It keeps keys and values of all tokens in blocks of 16. A row has a slot in every block. Rows
    that continue the same hypothesis share the slots of full blocks. In the last block, which is
    being written, each has its own. Nothing else is copied.
    """

    packed: Packed
    stack: Stack
    drop_at = 0.0  # rows may leave one by one: nothing large is copied
    source: (
        Tensor | None
    )  # (blocks, layers, 2 · 16 · D), of all sentences; None before the first token
    source_first: Tensor  # (N,) the first block of each row's sentence
    source_length: Tensor  # (N,) tokens
    own_slots: Tensor  # (blocks, N)
    own: list[Tensor]  # blocks: (slots, layers, 2 · 16 · D) each
    length: int  # tokens so far

    @classmethod
    def of(cls, decoder: nn.TransformerDecoder, int8: bool = False) -> "CompiledDecoder":
        """The same decoder; `why_not` must have no objection to it."""
        compiled = twin(decoder, cls)
        compiled.packed = Packed(int8)
        compiled.stack = compiled.packed.stack(decoder)
        return compiled.empty()

    def empty(self) -> "CompiledDecoder":
        """This decoder with a cache of its own, for another batch."""
        other = twin(self, CompiledDecoder)
        other.source = None
        other.own = []
        other.length = 0
        return other

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """The next token of each row, (N, 1, D) → (N, 1, D).

        tgt_mask (1, tokens so far and this one): the row of the mask. `memory` and its padding are
        read with the first token only. Raises `NotImplementedError` for other masks, `ValueError`
        for inputs that do not fit the cache.
        """
        others = (memory_mask, tgt_key_padding_mask)
        if memory_is_causal or any(mask is not None for mask in others):
            raise NotImplementedError("the compiled decoder knows padding and tgt_mask only")
        if self.source is None:
            self.keep_source(memory, memory_key_padding_mask)
        check_input(tgt, (len(self.source_length), 1, self.stack.width))
        hidden = row_of_mask(tgt_mask, tgt_is_causal, self.length + 1)
        if self.length % TOKENS_PER_BLOCK == 0:
            self.own.append(self.source.new_empty(len(tgt), *self.source.shape[1:]))
            self.own_slots = torch.cat([self.own_slots, torch.arange(len(tgt))[None]])
        x = tgt.clone(memory_format=torch.contiguous_format)
        inputs = (self.stack, self.addresses(), hidden, x, len(x), self.length)
        call(self.packed.functions.decode_token, *inputs)
        self.length += 1
        return x

    def keep_source(self, memory: Tensor, padding: Tensor | None) -> None:
        """Keys and values of the memory (B, S, D) in all layers."""
        check_input(memory, (len(memory), memory.size(1), self.stack.width))
        real = real_tokens(memory, padding)  # (B, S)
        lengths = real.sum(1)
        blocks = (lengths + TOKENS_PER_BLOCK - 1) // TOKENS_PER_BLOCK
        per_block = (self.stack.count, 2 * TOKENS_PER_BLOCK * self.stack.width)
        dtype = torch.bfloat16 if self.packed.int8 else torch.float32
        self.source = torch.empty(int(blocks.sum()), *per_block, dtype=dtype)
        self.source_first = blocks.cumsum(0) - blocks
        self.source_length = lengths
        self.own_slots = torch.empty(0, len(memory), dtype=torch.long)
        keep_sources = self.packed.functions.keep_sources
        call(keep_sources, self.stack, self.addresses(), memory[real], len(memory))

    def select(self, rows: Tensor) -> None:
        """Continue with these rows, (sentences, hypotheses); as `CachedDecoder.select`."""
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
        copy_shared_slots = self.packed.functions.copy_shared_slots
        call(copy_shared_slots, last, bytes_per_slot, len(last), self.own_slots[-1], len(rows))

    def addresses(self) -> CacheAddresses:
        """The cache for one call; the next one may have more blocks."""
        own = (c_void_p * len(self.own))(*(block.data_ptr() for block in self.own))
        tensors = (self.own_slots, self.source, self.source_first, self.source_length)
        return CacheAddresses(ctypes.cast(own, c_void_p), *map(Tensor.data_ptr, tensors))


class CompiledOutput:
    """An output layer in C++: no logit is ever stored, only the largest ones are returned."""

    def __init__(self, output: nn.Linear, int8: bool = False):
        """`why_not` must have no objection to `output`."""
        self.packed = Packed(int8)
        with torch.inference_mode():
            self.linear = self.packed.linear(output.weight, output.bias)
        self.outputs = output.out_features

    def largest(self, hidden: Tensor) -> Tensor:
        """(N, D) → the output with the largest logit (N,), of equal ones the first."""
        check_input(hidden, (len(hidden), self.linear.inputs))
        hidden = hidden.contiguous()
        chosen = torch.empty(len(hidden), dtype=torch.long)
        call(self.packed.functions.largest, self.linear, hidden, len(hidden), chosen)
        return chosen

    def most_probable(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(N, D) → the largest log-probabilities (N, C) and their outputs, best first.

        C is `count`, at most the number of outputs.
        """
        check_input(hidden, (len(hidden), self.linear.inputs))
        hidden = hidden.contiguous()
        count = min(count, self.outputs)
        chosen = torch.empty(len(hidden), count, dtype=torch.long)
        log_probabilities = torch.empty(len(hidden), count)
        inputs = (self.linear, hidden, len(hidden), count, log_probabilities, chosen)
        call(self.packed.functions.most_probable, *inputs)
        return log_probabilities, chosen


def check_input(x: Tensor, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` unless x is in fp32 on the CPU and has this shape: C++ does not ask."""
    if x.shape != shape or x.dtype != torch.float32 or x.device.type != "cpu":
        found = f"{tuple(x.shape)} in {x.dtype} on {x.device}"
        raise ValueError(f"compiled decoding needs {tuple(shape)} in fp32 on the CPU, not {found}")


def real_tokens(x: Tensor, padding: Tensor | None) -> Tensor:
    """True where x (B, S, D) is no padding: (B, S)"""
    if padding is None:
        return torch.ones(x.shape[:2], dtype=torch.bool)
    if padding.dtype != torch.bool or padding.shape != x.shape[:2]:
        raise NotImplementedError("compiled decoding needs a boolean mask (B, S) of the padding")
    return ~padding


def row_of_mask(mask: Tensor | None, is_causal: bool | None, length: int) -> Tensor | None:
    """The row of the target's mask for the newest of `length` tokens; None if it sees them all.

    With `is_causal`, PyTorch does not read the mask. Without a mask, earlier tokens would see this
    one: their keys and values could not be kept.
    """
    if mask is None:
        raise NotImplementedError("without a causal mask there is nothing to keep")
    if is_causal:
        return None
    if mask.dtype != torch.bool or mask.shape != (1, length):
        found = f"{tuple(mask.shape)} in {mask.dtype}"
        raise NotImplementedError(f"a cache needs a boolean tgt_mask (1, {length}), not {found}")
    return mask.contiguous()
