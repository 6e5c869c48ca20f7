"""The training pass on a CPU: the loss of `model.SummedLoss` with fewer passes over memory between the products.

At a model width of 256 a product over a few thousand tokens takes about as long as reading and writing its result a dozen
times, and that is what biases, dropout, residuals, norms, softmax and casts do one after another. Here everything between two
products is one kernel (`fast/kernels.py`), with its gradient.
N = `rows_for` B·S or B·T tokens, D model width. "Wide" is fp32, "narrow" the format of the products.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fast import kernels
from fast.cross_entropy import linear_cross_entropy

# A model made of other parts, with more or fewer weights in them, or with hooks, is computed as it says itself.
PARTS = {"source_embedding", "target_embedding", "dropout", "transformer", "output"}
WEIGHTS = {
    nn.Transformer: set(),
    nn.TransformerEncoder: set(),
    nn.TransformerDecoder: set(),
    nn.ModuleList: set(),
    nn.TransformerEncoderLayer: set(),
    nn.TransformerDecoderLayer: set(),
    nn.Dropout: set(),
    nn.Linear: {"weight", "bias"},
    NonDynamicallyQuantizableLinear: {"weight", "bias"},
    nn.LayerNorm: {"weight", "bias"},
    nn.Embedding: {"weight"},
    nn.MultiheadAttention: {"in_proj_weight", "in_proj_bias"},
}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class KernelLoss(nn.Module):
    """`SummedLoss` of a model for which `why_not` has no objection."""

    def __init__(self, model: nn.Module, label_smoothing: float, dtype: torch.dtype):
        super().__init__()
        self.model, self.label_smoothing, self.dtype = model, label_smoothing, dtype

    def forward(self, src: Tensor, src_pad: Tensor, tgt_in: Tensor, real: Tensor, tgt_out: Tensor):
        """(B, S), (B, S), (B, T), (R,), (R,) → the loss to minimise and the unsmoothed one, scalars. R real target tokens."""
        with torch.autocast(
            "cpu", enabled=False
        ):  # the kernels know what is wide and what is narrow
            memory = encode(self.model, src, src_pad, self.dtype)
            hidden = decode(self.model, memory, src_pad, tgt_in, self.dtype).index_select(
                0, real
            )  # (R, D)
        output = self.model.output
        return linear_cross_entropy(
            hidden, output.weight, output.bias, tgt_out, self.label_smoothing, self.dtype
        )


class SlicedLoss(nn.Module):
    """`SummedLoss` whose logits are never all in memory, on a GPU; the layers are those of PyTorch."""

    def __init__(self, model: nn.Module, label_smoothing: float, dtype: torch.dtype):
        super().__init__()
        self.model, self.label_smoothing, self.dtype = model, label_smoothing, dtype

    def forward(self, src: Tensor, src_pad: Tensor, tgt_in: Tensor, real: Tensor, tgt_out: Tensor):
        """As `KernelLoss`."""
        hidden, output = self.model.hidden(src, src_pad, tgt_in, real), self.model.output  # (R, D)
        return linear_cross_entropy(
            hidden, output.weight, output.bias, tgt_out, self.label_smoothing, self.dtype
        )


def why_not(model: nn.Module, dtype: torch.dtype) -> str:
    """Why the kernels do not compute this model; '' if they do: stock layers with ReLU, in fp32, on a CPU."""
    sizes, layers = (
        model.config,
        [*model.transformer.encoder.layers, *model.transformer.decoder.layers],
    )
    parts = [part for layer in layers for part in layer.modules()]
    if any(type(part) not in WEIGHTS for part in parts):
        return "the layers are not those of PyTorch"
    if any(getattr(part, hooks) for part in model.modules() for hooks in HOOKS):
        return "a module has a hook, which the kernels would not call"
    if any(layer.activation is not F.relu for layer in layers):
        return "the kernels need layers with ReLU"
    if sizes.d_model // sizes.nhead % 16:
        return "the width of a head is not a multiple of 16"
    if not is_known(model):
        return "the model has a part or a weight that the kernels do not know, or lacks one"
    if any(weight.dtype != torch.float32 for weight in model.parameters()):
        return "the weights are not fp32"
    if not kernels.kernels(dtype):
        return "the kernels are not compiled"
    return (
        ""
        if agrees(model, dtype)
        else "model.py was changed: it computes something else than they do"
    )


def agrees(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the model's own methods, which a reader may have changed, give on a toy batch what is computed here."""
    training, ids, pad = (
        model.training,
        torch.tensor([[0, 1, 2], [2, 1, 0]]),
        torch.zeros(2, 3, dtype=torch.bool),
    )
    pad[1, 2] = True
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        ours = model.output(
            decode(model, encode(model, ids, pad, dtype), pad, ids, dtype)[: ids.numel()]
        )
        theirs = model(ids, pad, ids).flatten(0, 1)
    model.train(training)
    limit = (
        1e-3 if dtype == torch.float32 else 0.1
    )  # bf16 rounds to 8 bits in every product: 1 to 3 % in all
    return bool((ours - theirs).norm() <= limit * theirs.norm())


def is_known(model: nn.Module) -> bool:
    """Whether the model's parts are those of model.py, whatever its attentions do with their weights; for decoding.py too.

    A weight more would get no gradient, and one less has no address.
    """
    for module in model.modules():
        kind = nn.MultiheadAttention if isinstance(module, nn.MultiheadAttention) else type(module)
        known = set() if module is model else WEIGHTS.get(kind)
        weights = {name for name, _ in module.named_parameters(recurse=False)}
        if weights != known or getattr(module, "add_zero_attn", False):
            return False
    coders = model.transformer.encoder, model.transformer.decoder
    return {name for name, _ in model.named_children()} == PARTS and all(
        coder.norm for coder in coders
    )


def encode(model: nn.Module, src: Tensor, src_pad: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, S) → narrow memory (N, D)"""
    stream, mask = (
        Stream(model, model.source_embedding, src, model.transformer.encoder, dtype),
        added_mask(src_pad),
    )
    for layer in model.transformer.encoder.layers:
        own = layer.self_attn
        stream.add(
            attend_own(own, stream.narrow, mask, src.shape, causal=False),
            own.out_proj,
            layer.dropout1,
        )
        stream.add(widen(layer, stream.narrow), layer.linear2, layer.dropout2)
    return stream.end()[1]


def decode(
    model: nn.Module, memory: Tensor, src_pad: Tensor, tgt_in: Tensor, dtype: torch.dtype
) -> Tensor:
    """Narrow (N, D), (B, S), (B, T) → wide hidden (N, D)"""
    stream, mask = (
        Stream(model, model.target_embedding, tgt_in, model.transformer.decoder, dtype),
        added_mask(src_pad),
    )
    for layer in model.transformer.decoder.layers:
        own, other = layer.self_attn, layer.multihead_attn
        stream.add(
            attend_own(own, stream.narrow, None, tgt_in.shape, causal=True),
            own.out_proj,
            layer.dropout1,
        )
        stream.add(
            attend_source(other, stream.narrow, memory, mask, tgt_in.shape),
            other.out_proj,
            layer.dropout2,
        )
        stream.add(widen(layer, stream.narrow), layer.linear2, layer.dropout3)
    return stream.end()[0]


class Stream:
    """What flows through the layers, (N, D): `x`, wide, to which each sub-layer adds, and `narrow`, which the next one takes.

    Post-norm: both are the norm of the sum. Pre-norm: `x` is the sum alone, and `narrow` is its norm by the sub-layer that
    comes. So in either a sum and the norm behind it are one kernel.
    """

    def __init__(
        self,
        model: nn.Module,
        embedding: nn.Embedding,
        ids: Tensor,
        coder: nn.Module,
        dtype: torch.dtype,
    ):
        norms = (
            part
            for layer in coder.layers
            for part in layer.children()
            if isinstance(part, nn.LayerNorm)
        )
        self.norms, self.norm_first = itertools.chain(norms, [coder.norm]), model.config.norm_first
        self.x, self.narrow = embed(model, embedding, ids, dtype)
        if self.norm_first:
            self.normalise()

    def add(self, inner: Tensor, out: nn.Linear, dropout: nn.Dropout) -> None:
        """The end of a sub-layer: its last product, dropout, residual and norm."""
        self.normalise(linear(inner, out.weight), out.bias, dropout.p if dropout.training else 0.0)

    def normalise(
        self, branch: Tensor | None = None, bias: Tensor | None = None, p: float = 0.0
    ) -> None:
        """`x` plus what there is to add, and the next norm of it."""
        total, self.wide, self.narrow = kernels.add_norm(
            self.x, branch, bias, next(self.norms), p, self.narrow.dtype
        )
        self.x = total if self.norm_first else self.wide

    def end(self) -> tuple[Tensor, Tensor]:
        """Behind the last norm: wide and narrow (N, D)."""
        if not self.norm_first:
            self.normalise()
        return self.wide, self.narrow


def embed(
    model: nn.Module, embedding: nn.Embedding, ids: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(B, T) → wide and narrow (N, D), as `Translator.embed`."""
    positions = model.positions[: model.check_length(ids)]
    return kernels.embed(
        embedding(ids), positions, math.sqrt(model.config.d_model), drop(model), dtype
    )


def added_mask(pad: Tensor) -> Tensor:
    """True = padding → a number to add to the scores: 0, or far below all others.

    Half of the lowest number instead of -inf: a row that may see nothing then sees all alike, and is no row of nan.
    """
    return torch.zeros_like(pad, dtype=torch.float32).masked_fill(
        pad, torch.finfo(torch.float32).min / 2
    )


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """(N, in), (out, in) → (N, out) in the format of x, without a bias: the kernel that follows adds it."""
    return F.linear(x, weight.to(x.dtype))


def attend_own(
    attention: nn.MultiheadAttention,
    x: Tensor,
    mask: Tensor | None,
    shape: torch.Size,
    causal: bool,
) -> Tensor:
    """Self-attention of (B, T) tokens without its last product: (N, D) → (N, D)"""
    qkv = linear(x, attention.in_proj_weight)  # (N, 3·D)
    return kernels.self_attention(
        qkv, attention.in_proj_bias, mask, shape, attention.num_heads, causal, drop(attention)
    )


def attend_source(
    attention: nn.MultiheadAttention, x: Tensor, memory: Tensor, mask: Tensor, shape: torch.Size
) -> Tensor:
    """Attention of (B, T) tokens over the source without its last product: (N, D), (N, D), added mask (B, S) → (N, D)"""
    for_query, for_source = attention.in_proj_weight.split(
        [attention.embed_dim, 2 * attention.embed_dim]
    )
    q, kv = linear(x, for_query), linear(memory, for_source)
    return kernels.cross_attention(
        q, kv, attention.in_proj_bias, mask, shape, attention.num_heads, drop(attention)
    )


def widen(layer: nn.Module, x: Tensor) -> Tensor:
    """The inner half of the feed-forward part: (N, D) → (N, feed-forward)"""
    return kernels.relu_dropout(linear(x, layer.linear1.weight), layer.linear1.bias, drop(layer))


def drop(module: nn.Module) -> float:
    """The dropout of an attention, of a feed-forward part or of the embeddings, as things are."""
    whose, p = (
        (module.dropout, module.dropout.p)
        if isinstance(module.dropout, nn.Module)
        else (module, module.dropout)
    )
    return p if whose.training else 0.0
