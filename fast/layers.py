"""PyTorch's encoder and decoder, trained on a CPU with fewer passes over memory.

    use_kernels(model, dtype, log)    # model.py runs as written; only these two parts are faster

At a model width of 256, a product over a few thousand tokens takes about as long as reading and
writing its result a dozen times. Biases, dropout, residuals, norms, softmax and casts do just that,
one after another. Between two products, one C++ function does it all, see fast/kernels.py.
N = `rows_for(B·S)` or `rows_for(B·T)` rows, D model width. "Wide" is fp32, "narrow" the format of
the products.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fast import build, kernels

# The parts of PyTorch's layers. One of another class, a subclass too, may compute something else.
PARTS = {
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.MultiheadAttention,
    nn.Linear,
    NonDynamicallyQuantizableLinear,
    nn.LayerNorm,
    nn.Dropout,
}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class KernelEncoder(nn.TransformerEncoder):
    """`nn.TransformerEncoder` with another `forward`; its weights are where they were."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """(B, S, D) → (B, S, D). What the kernels cannot compute, PyTorch does."""
        dtype = product_dtype()
        known_masks = mask is None and not is_causal and is_padding(src_key_padding_mask, src)
        if not known_masks or not takes(self, src, dtype):
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        with torch.autocast("cpu", enabled=False):  # the kernels choose all formats themselves
            stream = Stream(src, self, dtype)
            padding = added_mask(src_key_padding_mask)
            for layer in self.layers:
                attention = layer.self_attn
                attended = attend_self(attention, stream.narrow, padding, src.shape, causal=False)
                stream.add(attended, attention.out_proj, layer.dropout1)
                stream.add(feed_forward_inner(layer, stream.narrow), layer.linear2, layer.dropout2)
            return stream.end()


class KernelDecoder(nn.TransformerDecoder):
    """`nn.TransformerDecoder` with another `forward`; its weights are where they were."""

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
        """(B, T, D), (B, S, D) → (B, T, D). What the kernels cannot compute, PyTorch does."""
        dtype = product_dtype()
        causal = is_causal(tgt_mask, tgt_is_causal, tgt)
        known_masks = (
            causal is not None
            and memory_mask is None
            and not memory_is_causal
            and tgt_key_padding_mask is None
            and is_padding(memory_key_padding_mask, memory)
        )
        if not known_masks or not takes(self, tgt, dtype) or not is_batch(memory, len(tgt)):
            return super().forward(
                tgt,
                memory,
                tgt_mask,
                memory_mask,
                tgt_key_padding_mask,
                memory_key_padding_mask,
                tgt_is_causal,
                memory_is_causal,
            )
        with torch.autocast("cpu", enabled=False):
            stream = Stream(tgt, self, dtype)
            _, narrow_memory = kernels.pad_rows(memory, dtype)
            padding = added_mask(memory_key_padding_mask)
            shape = (*tgt.shape[:2], memory.size(1))
            for layer in self.layers:
                attention = layer.self_attn
                attended = attend_self(attention, stream.narrow, None, tgt.shape, causal)
                stream.add(attended, attention.out_proj, layer.dropout1)
                attention = layer.multihead_attn
                attended = attend_source(attention, stream.narrow, narrow_memory, padding, shape)
                stream.add(attended, attention.out_proj, layer.dropout2)
                stream.add(feed_forward_inner(layer, stream.narrow), layer.linear2, layer.dropout3)
            return stream.end()


# ---------------------------------------------------------------- which modules are replaced

REPLACEMENTS = {nn.TransformerEncoder: KernelEncoder, nn.TransformerDecoder: KernelDecoder}


def use_kernels(
    model: nn.Module, dtype: torch.dtype, log: Callable[[str], None] = lambda line: None
) -> None:
    """From now on the model's encoders and decoders of PyTorch compute with the kernels.

    Only the class of these modules changes: their weights, names and arguments do not. `log`
    receives a line for each one on a CPU that cannot use them with products in `dtype`.
    """
    for name, module in coders(model):
        if next(module.parameters()).device.type != "cpu":
            continue
        reason = why_not(module, dtype)
        if reason:
            log(f"note: {name} is slower than it could be: fast/ is not used ({reason})")
        else:
            module.__class__ = REPLACEMENTS.get(type(module), type(module))


def coders(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Encoders and decoders that are PyTorch's own, replaced or not, and their names."""
    known = (*REPLACEMENTS, *REPLACEMENTS.values())
    return ((name, module) for name, module in model.named_modules() if type(module) in known)


def why_not(coder: nn.Module, dtype: torch.dtype) -> str:
    """Why the kernels cannot compute this encoder or decoder; empty if they can."""
    reason = unknown_part(coder)
    if reason:
        return reason
    if next(coder.parameters()).device.type != "cpu":
        return "it is not on a CPU"
    if dtype not in kernels.NUMBERS:
        return f"there are no kernels for {dtype}"
    if not kernels.compiled(dtype):
        return build.why_not() or "the kernels are not compiled"
    return ""


def takes(coder: nn.Module, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels compute this encoder or decoder as it is now, for this (B, T, D) input.

    Asked in every call, because C++ checks nothing: a reader may change a layer, a format or a
    hook at any time.
    """
    width = coder.layers[0].self_attn.embed_dim
    return (
        is_batch(x, len(x)) and x.size(2) == width and x.numel() > 0 and not why_not(coder, dtype)
    )


def is_batch(x: Tensor, batch: int) -> bool:
    """Whether x is (batch, T, D) in fp32 on a CPU."""
    return x.dim() == 3 and len(x) == batch and x.dtype == torch.float32 and x.device.type == "cpu"


def unknown_part(coder: nn.Module) -> str:
    """What this encoder or decoder has that C++ does not know; empty if there is nothing.

    Known are PyTorch's layers with ReLU, biases, fp32 and widths that are whole vectors.
    """
    if coder.norm is None:
        return "it has no norm at its end"
    first = coder.layers[0].self_attn
    for layer in coder.layers:
        parts = list(layer.modules())
        others = [type(part).__name__ for part in parts if type(part) not in PARTS]
        if others:
            return f"its layers are not those of PyTorch: {others[0]}"
        if layer.activation is not F.relu:
            return "its layers have another activation than F.relu"
        attentions = [part for part in parts if type(part) is nn.MultiheadAttention]
        if any(unlike(attention, first) for attention in attentions):
            return "its attentions have additional keys, other sizes or (T, B, D) inputs"
        width, inner = first.embed_dim, len(layer.linear1.weight)
        if inner % 16 or width % first.num_heads or width // first.num_heads % 16:
            return "the width of a head or of the feed-forward layers is not a multiple of 16"
        if sizes_of(layer) != expected_sizes(layer, width, inner):
            return "a weight has another shape than its layer says"
        if layer.norm_first != coder.layers[0].norm_first:
            return "its layers are pre-norm and post-norm"
    if type(coder.norm) is not nn.LayerNorm or coder.norm.normalized_shape != (first.embed_dim,):
        return f"its norm is {coder.norm}"
    for part in coder.modules():
        if has_hooks(part):
            return "a module has a hook, which the kernels would not call"
        own = [name for name, value in vars(part).items() if callable(value)]
        if any(hasattr(type(part), name) for name in own):
            return f"a method of {type(part).__name__} was replaced: {own[0]}"
        for name in ("weight", "bias", "in_proj_weight", "in_proj_bias"):
            if not hasattr(part, name):
                continue
            weight = part._parameters.get(name)
            if weight is None:
                return "a layer has no bias" if name == "bias" else f"a {name} is no parameter"
            if weight.dtype != torch.float32 or not weight.is_contiguous():
                return f"its weights are not all contiguous and fp32: {weight.dtype}"
    return ""


def sizes_of(layer: nn.Module) -> list[torch.Size]:
    """The shapes of all weights that C++ reads of this layer, in a fixed order."""
    attentions = [part for part in layer.children() if isinstance(part, nn.MultiheadAttention)]
    tensors = []
    for attention in attentions:
        tensors += [attention.in_proj_weight, attention.in_proj_bias]
        tensors += [attention.out_proj.weight, attention.out_proj.bias]
    for part in (layer.linear1, layer.linear2, *norms_of(layer)):
        tensors += [part.weight, part.bias]
    return [getattr(tensor, "shape", None) for tensor in tensors]


def expected_sizes(layer: nn.Module, width: int, inner: int) -> list[torch.Size]:
    """What `sizes_of` must be for a layer of this width and width of its feed-forward part."""
    attention = [(3 * width, width), (3 * width,), (width, width), (width,)]
    attentions = sum(isinstance(part, nn.MultiheadAttention) for part in layer.children())
    feed_forward = [(inner, width), (inner,), (width, inner), (width,)]
    norms = [(width,), (width,)] * len(norms_of(layer))
    return [torch.Size(size) for size in (*attention * attentions, *feed_forward, *norms)]


def unlike(attention: nn.MultiheadAttention, first: nn.MultiheadAttention) -> bool:
    """Whether this attention has parts that C++ does not know, or sizes unlike those of `first`."""
    return (
        attention.in_proj_weight is None
        or attention.in_proj_bias is None
        or attention.bias_k is not None
        or attention.add_zero_attn
        or not attention.batch_first
        or attention.num_heads != first.num_heads
        or attention.embed_dim != first.embed_dim
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether calling this module calls something else as well."""
    everywhere = torch.nn.modules.module
    return any(getattr(module, hooks) or getattr(everywhere, f"_global{hooks}") for hooks in HOOKS)


def product_dtype() -> torch.dtype:
    """The format of matrix products on a CPU: fp32, or what autocast says."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return torch.float32


# ---------------------------------------------------------------- masks


def is_padding(mask: Tensor | None, x: Tensor) -> bool:
    """Whether this is None or a boolean mask (B, S) of the padding of x, (B, S, D).

    Every sentence must have a token: of attention to nothing, PyTorch makes zeros.
    """
    if mask is None:
        return True
    return mask.dtype == torch.bool and mask.shape == x.shape[:2] and not mask.all(1).any()


def added_mask(padding: Tensor | None) -> Tensor | None:
    """True = padding → the number to add to the scores."""
    if padding is None:
        return None
    return torch.zeros_like(padding, dtype=torch.float32).masked_fill(padding, -math.inf)


def is_causal(mask: Tensor | None, hint: bool | None, x: Tensor) -> bool | None:
    """Whether self-attention is causal; None for a mask that is neither that nor absent.

    `hint` is PyTorch's `tgt_is_causal`: with True, PyTorch does not read the mask either.
    """
    if mask is None:
        return None if hint else False
    length = x.size(1)
    if mask.dtype != torch.bool or mask.shape != (length, length):
        return None
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return True if hint or torch.equal(mask, future) else None


# ---------------------------------------------------------------- what the layers compute


class Stream:
    """The residual stream (N, D): `x`, wide, and `narrow`, the input of the next sub-layer.

    Post-norm: both are the norm of the last sum. Pre-norm: `x` is the sum itself, and `narrow` its
    norm by the next sub-layer. In both cases a sum and the norm after it are one C++ function.
    """

    def __init__(self, x: Tensor, coder: nn.Module, dtype: torch.dtype):
        norms = [norm for layer in coder.layers for norm in norms_of(layer)]
        self.norms = iter([*norms, coder.norm])
        self.norm_first = coder.layers[0].norm_first
        self.shape = x.shape
        self.x, self.narrow = kernels.pad_rows(x, dtype)
        if self.norm_first:
            self.normalise()

    def add(self, inner: Tensor, out: nn.Linear, dropout: nn.Dropout) -> None:
        """The end of a sub-layer: its last product, dropout, residual and norm."""
        p = dropout.p if dropout.training else 0.0
        self.normalise(linear(inner, out.weight), out.bias, p)

    def normalise(
        self, branch: Tensor | None = None, bias: Tensor | None = None, p: float = 0.0
    ) -> None:
        """Add `dropout(branch + bias, p)` to `x`, if given, and apply the next norm."""
        norm = next(self.norms)
        dtype = self.narrow.dtype
        total, self.wide, self.narrow = kernels.add_norm(self.x, branch, bias, norm, p, dtype)
        self.x = total if self.norm_first else self.wide

    def end(self) -> Tensor:
        """The output of the last norm: (B, T, D)"""
        if not self.norm_first:
            self.normalise()
        return kernels.unpad_rows(self.wide, self.shape)


def norms_of(layer: nn.Module) -> list[nn.LayerNorm]:
    """The norms of a layer in the order of its sub-layers; a decoder's has three."""
    norms = [layer.norm1, layer.norm2]
    if isinstance(layer, nn.TransformerDecoderLayer):
        norms.append(layer.norm3)
    return norms


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """(N, in), (out, in) → (N, out) in the format of x. The next kernel adds the bias."""
    return F.linear(x, weight.to(x.dtype))


def attend_self(
    attention: nn.MultiheadAttention,
    x: Tensor,
    mask: Tensor | None,
    shape: torch.Size,
    causal: bool,
) -> Tensor:
    """Self-attention of (B, T) tokens without its last product: (N, D) → (N, D)"""
    qkv = linear(x, attention.in_proj_weight)  # (N, 3·D)
    bias, heads, p = attention.in_proj_bias, attention.num_heads, dropout_of(attention)
    return kernels.self_attention(qkv, bias, mask, shape[:2], heads, causal, p)


def attend_source(
    attention: nn.MultiheadAttention,
    x: Tensor,
    memory: Tensor,
    mask: Tensor | None,
    shape: tuple[int, int, int],
) -> Tensor:
    """Attention of (B, T) tokens to S tokens of the source, without its last product.

    (N, D), (N, D), mask (B, S), (B, T, S) → (N, D)
    """
    width = attention.embed_dim
    query_weight, source_weight = attention.in_proj_weight.split([width, 2 * width])
    q, kv = linear(x, query_weight), linear(memory, source_weight)
    bias, heads, p = attention.in_proj_bias, attention.num_heads, dropout_of(attention)
    return kernels.cross_attention(q, kv, bias, mask, shape, heads, p)


def feed_forward_inner(layer: nn.Module, x: Tensor) -> Tensor:
    """The first half of the feed-forward part: (N, D) → (N, dim_feedforward)"""
    inner = linear(x, layer.linear1.weight)
    p = layer.dropout.p if layer.dropout.training else 0.0
    return kernels.relu_dropout(inner, layer.linear1.bias, p)


def dropout_of(attention: nn.MultiheadAttention) -> float:
    """The current dropout rate of its attention weights."""
    return attention.dropout if attention.training else 0.0
