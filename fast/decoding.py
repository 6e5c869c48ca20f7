"""A translator's weights laid out for decoding.cpp, and greedy decoding with them: the whole step in one call.

    if is_possible(model):
        cache = CompiledSteps(model).start(src, src_pad, longest)                # or int8=True
        tokens = cache.next_tokens(tokens, position)

`step` of the decoding.py in the root is the plain version of the same. Python's lock is free during a call, so threads with a
batch each do not wait for one another. Letters as in decoding.cpp.
In int8 a weight is w ≈ scale · q with q in −127…127 and a scale for every output; inputs are rounded at every call with a scale
for every row, multiplied as integers, and the product is scaled back to fp32. An integer product does up to four times the
multiplications of an fp32 one in the same time, and a weight is a byte to read instead of four. What it costs is measured, not
assumed: score the same checkpoint with and without.
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

from fast.build import call, library
from fast.training import is_known

TOKENS_PER_BLOCK = LANES = 16  # kTokens and kLanes


# The structs of decoding.cpp, field for field; there stand the shapes behind the addresses.
class Linear(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("weight", "bias", "scale", "start")),
        *((name, c_int64) for name in ("inputs", "outputs", "zero")),
    ]


class Norm(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("epsilon", c_double)]


class Layer(ctypes.Structure):
    _fields_ = [
        *(
            (name, Linear)
            for name in (
                "own",
                "own_out",
                "source_query",
                "source",
                "source_out",
                "widen",
                "narrow",
            )
        ),
        ("norms", Norm * 3),
    ]


class Weights(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("source_embedding", "target_embedding", "positions")),
        *((name, POINTER(Layer)) for name in ("encoder", "decoder")),
        *(
            (name, c_int64)
            for name in ("encoder_layers", "decoder_layers", "heads", "width", "norm_first")
        ),
        *((name, Norm) for name in ("encoder_norm", "decoder_norm")),
        ("output", Linear),
    ]


class CacheAddresses(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("own", "source", "source_first", "source_length")]


def is_possible(model: nn.Module, int8: bool = False) -> bool:
    """Whether the compiled functions are there and are for such a model: of known parts, fp32, ReLU, all sizes whole vectors."""
    sizes = model.config
    widths = (sizes.d_model, sizes.dim_feedforward, sizes.d_model // sizes.nhead)
    layers = [*model.transformer.encoder.layers, *model.transformer.decoder.layers]
    if not is_known(model):
        return False
    if any(width % LANES for width in widths) or any(
        x.dtype != torch.float32 for x in model.parameters()
    ):
        return False
    if any(layer.activation is not F.relu for layer in layers):
        return False
    if not all(
        x.isfinite().all() for x in model.parameters()
    ):  # the largest of logits with nan is another question
        return False
    if int8 and not torch.cpu._is_vnni_supported():
        return False
    return bool(kernels(int8))


def kernels(int8: bool) -> ctypes.CDLL | None:
    """The compiled functions, or None."""
    return library(Path(__file__).with_suffix(".cpp"), **({"INT8": "1"} if int8 else {}))


@torch.inference_mode()
def agrees(steps: "CompiledSteps", model: nn.Module) -> bool:
    """Whether the model's own methods, which a reader may have changed, find likeliest what fp32 `steps` choose."""
    config, training = model.config, model.training
    src = torch.arange(24).view(4, 6) % config.source_vocab
    src_pad, tokens = (
        torch.arange(6) > torch.arange(2, 6)[:, None],
        [torch.arange(4) % config.target_vocab],
    )
    cache = steps.start(src, src_pad, 4)
    for position in range(3):
        tokens.append(cache.next_tokens(tokens[-1], position))
    logits = model.eval()(src, src_pad, torch.stack(tokens[:-1], 1))  # (4, 3, V)
    model.train(training)
    best, chosen = logits.amax(-1), logits.gather(-1, torch.stack(tokens[1:], 1)[..., None])[..., 0]
    return bool(
        (best - chosen).mean() <= 1e-3 * (best - logits.mean(-1)).mean()
    )  # a near tie costs nothing


def check_ids(tokens: Tensor, vocabulary: int) -> None:
    """Raises `IndexError` for ids outside the vocabulary: in C++ they would be places in foreign memory."""
    if bool(((tokens < 0) | (tokens >= vocabulary)).any()):
        raise IndexError(
            f"token ids from {tokens.min()} to {tokens.max()}, but the vocabulary has {vocabulary}"
        )


@dataclass
class CompiledCache:
    """Keys and values in blocks of 16 tokens. A row that leaves the batch leaves its slot empty: nothing is moved."""

    steps: "CompiledSteps"
    slots: Tensor  # (B,) where each row's keys and values are
    source: Tensor
    source_first: Tensor  # (slots,) a row's first block in `source`
    source_length: Tensor  # (slots,)
    block_shape: tuple[int, ...]
    own: list[Tensor] = field(default_factory=list)
    shrink_at: ClassVar[float] = 0.0  # as in `decoding.Cache`: rows may leave one by one

    def next_tokens(self, tokens: Tensor, position: int) -> Tensor:
        """Feed (B,) tokens at one position; → (B,) the likeliest next ones. The cache grows by one token."""
        tokens = tokens.long().contiguous()
        if position == 0:  # from then on they are what C++ chose itself
            check_ids(tokens, self.steps.config.target_vocab)
        if position % TOKENS_PER_BLOCK == 0:
            self.own.append(self.source.new_empty(self.block_shape))
        chosen = torch.empty_like(tokens)
        call(
            self.steps.kernels.decode_tokens,
            self.steps.weights,
            self.addresses(),
            tokens,
            self.slots,
            len(tokens),
            position,
            chosen,
        )
        return chosen

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self.slots = self.slots[rows]

    def addresses(self) -> CacheAddresses:
        """Where the cache lies now; good for one call, since new tokens may add blocks."""
        own = (c_void_p * len(self.own))(*(block.data_ptr() for block in self.own))
        tensors = (self.source, self.source_first, self.source_length)
        return CacheAddresses(ctypes.cast(own, c_void_p), *map(Tensor.data_ptr, tensors))


class CompiledSteps:
    """A model's weights as they are now, for greedy decoding on a CPU; later changes of the model do not reach it."""

    @torch.inference_mode()
    def __init__(self, model: nn.Module, int8: bool = False):
        self.kernels, self.int8, self.config = kernels(int8), int8, model.config
        self.panel = self.kernels.outputs_in_a_panel()
        self.tensors = []  # kept alive for C++
        stacks = model.transformer.encoder, model.transformer.decoder
        layers = [
            (Layer * len(stack.layers))(*map(self.pack_layer, stack.layers)) for stack in stacks
        ]
        scale = math.sqrt(self.config.d_model)
        self.weights = Weights(
            self.keep(model.source_embedding.weight * scale),
            self.keep(model.target_embedding.weight * scale),
            self.keep(model.positions.clone()),
            *layers,
            *map(len, layers),
            self.config.nhead,
            self.config.d_model,
            self.config.norm_first,
            *(self.pack_norm(stack.norm) for stack in stacks),
            self.pack_linear(model.output.weight, model.output.bias),
        )

    def keep(self, tensor: Tensor) -> int:
        """The address of a tensor that now lives as long as this object."""
        self.tensors.append(tensor.contiguous())
        return self.tensors[-1].data_ptr()

    def pack_layer(self, layer: nn.Module) -> Layer:
        """A layer of the encoder (without `multihead_attn`) or of the decoder."""
        own, source = layer.self_attn, getattr(layer, "multihead_attn", None)
        packed = Layer(
            own=self.pack_projection(own, "qkv"),
            own_out=self.pack_linear(own.out_proj.weight, own.out_proj.bias),
            widen=self.pack_linear(layer.linear1.weight, layer.linear1.bias),
            narrow=self.pack_linear(layer.linear2.weight, layer.linear2.bias, zero=0),  # after ReLU
            norms=(Norm * 3)(
                *(
                    self.pack_norm(getattr(layer, name))
                    for name in ("norm1", "norm2", "norm3")[: 2 + bool(source)]
                )
            ),
        )
        if source:
            packed.source_query = self.pack_projection(source, "q")
            packed.source = self.pack_projection(source, "kv")
            packed.source_out = self.pack_linear(source.out_proj.weight, source.out_proj.bias)
        return packed

    def pack_norm(self, norm: nn.LayerNorm) -> Norm:
        return Norm(self.keep(norm.weight.clone()), self.keep(norm.bias.clone()), norm.eps)

    def pack_projection(self, attention: nn.MultiheadAttention, which: str) -> Linear:
        """The wanted ones of query, key and value, which stand one below the other; the query times 1/√W."""
        width = attention.embed_dim
        weight, bias = attention.in_proj_weight.clone(), attention.in_proj_bias.clone()
        weight[:width] /= math.sqrt(attention.head_dim)
        bias[:width] /= math.sqrt(attention.head_dim)
        wanted = slice("qkv".index(which[0]) * width, ("qkv".index(which[-1]) + 1) * width)
        return self.pack_linear(weight[wanted], bias[wanted])

    def pack_linear(self, weight: Tensor, bias: Tensor, zero: int = 128) -> Linear:
        """(out, in), (out,) in panels. int8: inputs are numbers 0…255 that stand for x = scale · (number − zero)."""
        outputs, inputs = weight.shape
        missing = -outputs % self.panel
        weight, bias = F.pad(weight, (0, 0, 0, missing)), F.pad(bias, (0, missing), value=-math.inf)
        group, scale, start = 1, None, None
        if self.int8:
            group, scale = 4, weight.abs().amax(1).clamp(min=1e-30) / 127
            weight = (weight / scale[:, None]).round().to(torch.int8)
            start = self.keep(-zero * weight.sum(1, dtype=torch.int32))
            scale = self.keep(scale)
        panels = weight.view(-1, self.panel, inputs // group, group).transpose(
            1, 2
        )  # (panels, in / 4, panel, 4)
        return Linear(
            self.keep(panels),
            self.keep(bias),
            scale,
            start,
            inputs,
            -(-outputs // LANES) * LANES,
            zero,
        )

    def start(self, src: Tensor, src_pad: Tensor, length: int) -> CompiledCache:
        """Encode (B, S), padded behind, for outputs of up to `length` tokens; the cache grows with them."""
        config, rows, longest = self.config, len(src), max(src.size(1), length)
        if longest > config.max_length:
            raise ValueError(
                f"{longest} tokens are more than the {config.max_length} this model has positions for"
            )
        lengths = (~src_pad).sum(1)
        blocks = (lengths + TOKENS_PER_BLOCK - 1) // TOKENS_PER_BLOCK
        # Of keys and values of all heads, in all layers.
        block_shape = (rows, config.num_decoder_layers, 2 * TOKENS_PER_BLOCK * config.d_model)
        source = torch.empty(
            int(blocks.sum()),
            *block_shape[1:],
            dtype=torch.bfloat16 if self.int8 else torch.float32,
        )
        cache = CompiledCache(
            self, torch.arange(rows), source, blocks.cumsum(0) - blocks, lengths, block_shape
        )
        tokens = src[~src_pad].long()  # (N,)
        check_ids(tokens, config.source_vocab)
        call(self.kernels.encode_sources, self.weights, cache.addresses(), tokens, rows)
        return cache
