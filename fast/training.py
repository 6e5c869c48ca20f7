"""The loss of `model.SummedLoss` on a CPU, with fewer passes over memory between matrix products.

At a model width of 256, a product over a few thousand tokens takes about as long as reading and
writing its result a dozen times. Biases, dropout, residuals, norms, softmax and casts do just that,
one after another. Everything between two products is one C++ function, see fast/kernels.py.
N = `rows_for(B·S)` or `rows_for(B·T)` rows, D model width. "Wide" is fp32, "narrow" the format of
the products.
"""

import contextlib
import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import skip_init

from decoding import restoring_modes
from fast import build, kernels
from fast.cross_entropy import linear_cross_entropy
from model import SummedLoss

# The children of a `Translator`, and the weights of every module in it. A model that has others
# runs its own code.
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


class SlicedLoss(nn.Module):
    """`SummedLoss` with PyTorch's layers, but never all logits in memory at once."""

    def __init__(self, model: nn.Module, label_smoothing: float, dtype: torch.dtype):
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing
        self.dtype = dtype

    def hidden(self, src: Tensor, src_pad: Tensor, tgt_in: Tensor, positions: Tensor) -> Tensor:
        """The input of the output projection: (number of target tokens, D)"""
        return self.model.hidden(src, src_pad, tgt_in, positions)

    def forward(
        self,
        src: Tensor,
        src_pad: Tensor,
        tgt_in: Tensor,
        target_positions: Tensor,
        tgt_out: Tensor,
    ):
        """As `SummedLoss.forward`: (smoothed, plain)"""
        hidden = self.hidden(src, src_pad, tgt_in, target_positions)
        output = self.model.output
        return linear_cross_entropy(
            hidden, output.weight, output.bias, tgt_out, self.label_smoothing, self.dtype
        )


class KernelLoss(SlicedLoss):
    """`SlicedLoss` on a CPU, by kernels.cpp, for a model to which `why_not` does not object."""

    def hidden(self, src: Tensor, src_pad: Tensor, tgt_in: Tensor, positions: Tensor) -> Tensor:
        """As in `SlicedLoss`. The kernels choose the format of every tensor themselves."""
        with torch.autocast("cpu", enabled=False):
            memory = encode(self.model, src, src_pad, self.dtype)
            hidden = decode(self.model, memory, src_pad, tgt_in, self.dtype)
            return hidden.index_select(0, positions)


def why_not(model: nn.Module, dtype: torch.dtype) -> str:
    """Why `KernelLoss` cannot compute this model; empty if it can.

    It can for PyTorch's own layers with ReLU, in fp32, on a CPU.
    """
    if not has_layers_and_positions(model):
        return "model.py was changed: its layers or positions are different"
    layers = [*model.transformer.encoder.layers, *model.transformer.decoder.layers]
    parts = [part for layer in layers for part in layer.modules()]
    if any(type(part) not in WEIGHTS for part in parts):
        return "the layers are not those of PyTorch"
    if any(getattr(part, hooks) for part in model.modules() for hooks in HOOKS):
        return "a module has a hook, which the kernels would not call"
    if any(layer.activation is not F.relu for layer in layers):
        return "the kernels need layers with ReLU"
    sizes = model.config
    if sizes.d_model // sizes.nhead % 16 or sizes.dim_feedforward % 16:
        return "the width of a head or of the feed-forward layers is not a multiple of 16"
    if not is_known(model):
        return "the model has a part or a weight that the kernels do not know, or lacks one"
    if any(weight.dtype != torch.float32 for weight in model.parameters()):
        return "the weights are not fp32"
    if dtype not in kernels.NUMBERS:
        return f"there are no kernels for {dtype}"
    if not kernels.compiled(dtype):
        return build.why_not() or "the kernels are not compiled"
    if not agrees(model, dtype) or not loss_is_known():
        return "model.py was changed: it computes something else"
    return ""


def has_layers_and_positions(model: nn.Module) -> bool:
    """Whether it has PyTorch's encoder and decoder, and `positions` for every position.

    C++ reads a row of this table, (max_length, D), for each token, and checks no bounds.
    """
    transformer = getattr(model, "transformer", None)
    coders = [getattr(transformer, name, None) for name in ("encoder", "decoder")]
    if [*map(type, coders)] != [nn.TransformerEncoder, nn.TransformerDecoder]:
        return False
    positions = getattr(model, "positions", None)
    sizes = model.config
    return isinstance(positions, Tensor) and positions.shape == (sizes.max_length, sizes.d_model)


@torch.no_grad()
def agrees(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the model's own methods, which a reader may have changed, give the same here.

    They may differ in one mode only, by `if self.training`.
    """
    config = model.config
    longest = min(32, config.max_length)
    lengths = torch.linspace(longest, 1, 8).long()  # (8,) of the rows
    ids = torch.arange(8 * longest).view(8, longest) % min(config.source_vocab, config.target_vocab)
    pad = torch.arange(longest) >= lengths[:, None]
    # bf16 rounds to 8 bits in every product, which adds up to 0.7 % at most.
    limit = 1e-3 if dtype == torch.float32 else 0.03
    with restoring_modes(model), without_dropout(model), torch.autocast("cpu", enabled=False):
        for mode in (True, False):
            model.train(mode)
            hidden = decode(model, encode(model, ids, pad, dtype), pad, ids, dtype)
            ours = model.output(hidden[: ids.numel()])
            try:
                theirs = model(ids, pad, ids).flatten(0, 1)
            except Exception:  # it takes other arguments
                return False
            if theirs.shape != ours.shape or not (ours - theirs).norm() <= limit * theirs.norm():
                return False
    return True


class OutputAlone(nn.Module):
    """What a loss needs of a model: here, three tokens of width 2 and a vocabulary of five."""

    def __init__(self):
        super().__init__()
        self.output = skip_init(nn.Linear, 2, 5, dtype=torch.float64)  # draws no random numbers
        self.output.weight.data = torch.arange(10, dtype=torch.float64).sin().view(5, 2)
        self.output.bias.data = torch.arange(5, dtype=torch.float64).cos()

    def hidden(self, *inputs) -> Tensor:
        """(3, 2), whatever the inputs"""
        return torch.tensor([[1.0, 2.0], [-3.0, 4.0], [5.0, -6.0]], dtype=torch.float64)

    def forward(self, *inputs) -> Tensor:
        """Logits (3, 5)"""
        return self.output(self.hidden())


@torch.no_grad()
def loss_is_known() -> bool:
    """Whether `SummedLoss`, which a reader may have changed, gives the same as `SlicedLoss`."""
    model = OutputAlone()
    src = torch.zeros(3, 1, dtype=torch.long)
    positions = torch.arange(3)
    inputs = (src, src > 0, src, positions, positions + 1)
    ours = SlicedLoss(model, 0.1, torch.float64)(*inputs)
    try:
        theirs = torch.stack(SummedLoss(model, 0.1)(*inputs))
    except Exception:  # it needs more of the model, or returns something else
        return False
    return theirs.shape == (2,) and torch.allclose(torch.stack(ours), theirs.double(), rtol=1e-5)


@contextlib.contextmanager
def without_dropout(model: nn.Module):
    """All dropout rates are 0 for a while; then no random number is drawn."""
    rates = []  # (module, attribute, rate)
    for module in model.modules():
        for attribute in ("p", "dropout"):  # of nn.Dropout and of nn.MultiheadAttention
            rate = getattr(module, attribute, None)
            if isinstance(rate, float):
                rates.append((module, attribute, rate))
                setattr(module, attribute, 0.0)
    try:
        yield
    finally:
        for module, attribute, rate in rates:
            setattr(module, attribute, rate)


def is_known(model: nn.Module) -> bool:
    """Whether the model has exactly the modules and weights of model.py, in its sizes.

    An additional weight would get no gradient, a missing one has no address, and the memory of the
    C++ functions is allocated for the sizes of the whole model. Subclasses of
    `nn.MultiheadAttention` are allowed: decoding does not care how they compute.
    """
    sizes = model.config
    for module in model.modules():
        if module is model:
            known = set()
        elif isinstance(module, nn.MultiheadAttention):
            known = WEIGHTS[nn.MultiheadAttention]
        else:
            known = WEIGHTS.get(type(module))
        weights = {name for name, _ in module.named_parameters(recurse=False)}
        if weights != known or getattr(module, "add_zero_attn", False):
            return False
    if {name for name, _ in model.named_children()} != PARTS:
        return False
    for layer in (*model.transformer.encoder.layers, *model.transformer.decoder.layers):
        if layer.linear1.out_features != sizes.dim_feedforward:
            return False
        attentions = [part for part in layer.children() if isinstance(part, nn.MultiheadAttention)]
        if any(part.num_heads != sizes.nhead for part in attentions):
            return False
    if not all(weight.is_contiguous() for weight in model.parameters()):
        return False
    return bool(model.transformer.encoder.norm and model.transformer.decoder.norm)


def encode(model: nn.Module, src: Tensor, src_pad: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, S), (B, S) → narrow memory (N, D)"""
    encoder = model.transformer.encoder
    stream = Stream(model, model.source_embedding, src, encoder, dtype)
    mask = added_mask(src_pad)
    for layer in encoder.layers:
        attention = layer.self_attn
        attended = attend_self(attention, stream.narrow, mask, src.shape, causal=False)
        stream.add(attended, attention.out_proj, layer.dropout1)
        stream.add(feed_forward_inner(layer, stream.narrow), layer.linear2, layer.dropout2)
    _, narrow = stream.end()
    return narrow


def decode(
    model: nn.Module, memory: Tensor, src_pad: Tensor, tgt_in: Tensor, dtype: torch.dtype
) -> Tensor:
    """Narrow (N, D), (B, S), (B, T) → wide hidden (N, D)"""
    decoder = model.transformer.decoder
    stream = Stream(model, model.target_embedding, tgt_in, decoder, dtype)
    mask = added_mask(src_pad)
    for layer in decoder.layers:
        attention = layer.self_attn
        attended = attend_self(attention, stream.narrow, None, tgt_in.shape, causal=True)
        stream.add(attended, attention.out_proj, layer.dropout1)
        attention = layer.multihead_attn
        attended = attend_source(attention, stream.narrow, memory, mask, tgt_in.shape)
        stream.add(attended, attention.out_proj, layer.dropout2)
        stream.add(feed_forward_inner(layer, stream.narrow), layer.linear2, layer.dropout3)
    wide, _ = stream.end()
    return wide


class Stream:
    """The residual stream (N, D): `x`, wide, and `narrow`, the input of the next sub-layer.

    Post-norm: both are the norm of the last sum. Pre-norm: `x` is the sum itself, and `narrow` its
    norm by the next sub-layer. In both cases a sum and the norm after it are one C++ function.
    """

    def __init__(
        self,
        model: nn.Module,
        embedding: nn.Embedding,
        ids: Tensor,
        coder: nn.Module,
        dtype: torch.dtype,
    ):
        parts = (part for layer in coder.layers for part in layer.children())
        norms = (part for part in parts if isinstance(part, nn.LayerNorm))
        self.norms = itertools.chain(norms, [coder.norm])
        self.norm_first = model.config.norm_first
        self.x, self.narrow = embed(model, embedding, ids, dtype)
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

    def end(self) -> tuple[Tensor, Tensor]:
        """The output of the last norm, wide and narrow (N, D)."""
        if not self.norm_first:
            self.normalise()
        return self.wide, self.narrow


def embed(
    model: nn.Module, embedding: nn.Embedding, ids: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `Translator.embed`: (B, T) → wide and narrow (N, D)"""
    positions = model.positions[: model.check_length(ids)]
    scale = math.sqrt(model.config.d_model)
    return kernels.embed(embedding(ids), positions, scale, dropout_of(model), dtype)


def added_mask(pad: Tensor) -> Tensor:
    """True = padding → the number to add to the scores.

    Half the lowest number instead of -inf: a row in which everything is padding then sees all
    positions alike, and does not become nan.
    """
    mask = torch.zeros_like(pad, dtype=torch.float32)
    return mask.masked_fill(pad, torch.finfo(torch.float32).min / 2)


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
    return kernels.self_attention(qkv, bias, mask, shape, heads, causal, p)


def attend_source(
    attention: nn.MultiheadAttention, x: Tensor, memory: Tensor, mask: Tensor, shape: torch.Size
) -> Tensor:
    """Attention of (B, T) tokens over the source without its last product.

    (N, D), (N, D), mask (B, S) → (N, D)
    """
    width = attention.embed_dim
    query_weight, source_weight = attention.in_proj_weight.split([width, 2 * width])
    q, kv = linear(x, query_weight), linear(memory, source_weight)
    bias, heads, p = attention.in_proj_bias, attention.num_heads, dropout_of(attention)
    return kernels.cross_attention(q, kv, bias, mask, shape, heads, p)


def feed_forward_inner(layer: nn.Module, x: Tensor) -> Tensor:
    """The first half of the feed-forward part: (N, D) → (N, dim_feedforward)"""
    inner = linear(x, layer.linear1.weight)
    return kernels.relu_dropout(inner, layer.linear1.bias, dropout_of(layer))


def dropout_of(module: nn.Module) -> float:
    """The current dropout rate of an attention, a feed-forward part or the embeddings."""
    dropout = module.dropout
    if isinstance(dropout, nn.Module):
        return dropout.p if dropout.training else 0.0
    return dropout if module.training else 0.0  # nn.MultiheadAttention keeps a number
