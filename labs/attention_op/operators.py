"""The two operators: what they accept, and which implementation answers.

B rows, H heads, S queries, T keys, D width of queries and keys, W width of values.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import UserError
from labs.attention_op.attention_python import Attention, RecomputedAttention
from labs.attention_op.gelu_python import Gelu, GeluTanh

ATTENTION_BACKENDS = ("python", "recompute", "cpp")
GELU_BACKENDS = ("python", "cpp")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    backend: str = "python",
) -> Tensor:
    """softmax(scale · QKᵀ + mask) V: (B, H, S, D), (B, H, T, D), (B, H, T, W) → (B, H, S, W)

    mask:    boolean, True = ignore (the opposite of `F.scaled_dot_product_attention`), or numbers added to the scores;
             broadcastable to (B, H, S, T): padding of keys is (B, 1, 1, T). It gets no gradient.
    causal:  query i sees the keys 0…i, also when S ≠ T. May be given beside a mask.
    dropout: share of the weights set to 0, the others divided by 1 − dropout. Give 0 when not training.
    scale:   1/√D unless given.
    backend: "python" keeps all weights for the backward pass; "recompute" makes them again, block by block; "cpp" (CPU) does the
             same compiled. All drop the same weights after the same `torch.manual_seed`.

    A query that may see nothing gets zeros. Half precision is computed in fp32 and rounded at the end of
    the forward pass, and again at the end of the backward pass, which starts from the rounded output;
    autocast applies as to PyTorch's own. It can be differentiated once. Raises `UserError`.
    """
    check_backend("attention", backend, ATTENTION_BACKENDS)
    check_inputs(q, k, v, mask, dropout)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    scale = 1 / math.sqrt(max(1, q.size(-1))) if scale is None else scale
    bias = None if mask is None else as_bias(mask, q)
    if (
        k.size(2) == 0
    ):  # no keys are one key that nobody may see: then no implementation has to know
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        bias = as_bias(torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device), q)
    seed = (
        torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32, device=q.device)
        if dropout
        else None
    )
    return implementation(backend)(q, k, v, bias, causal, scale, dropout, seed)


def implementation(backend: str):
    """The function (q, k, v, bias, causal, scale, dropout, seed) → output. Compiled ones are built at first use."""
    if backend == "cpp":
        from labs.attention_op.cpp import cpp_attention

        return cpp_attention
    return {"python": Attention.apply, "recompute": RecomputedAttention.apply}[backend]


def gelu(x: Tensor, approximate: str = "none", backend: str = "python") -> Tensor:
    """GELU of every number, as `F.gelu`: the exact one, or with `approximate="tanh"` the approximation.

    Half precision is computed in fp32 and rounded once. Raises `UserError`.
    """
    if approximate not in ("none", "tanh"):
        raise UserError(f"gelu: approximate={approximate!r} is unknown; choose 'none' or 'tanh'")
    check_backend("gelu", backend, GELU_BACKENDS)
    if not x.is_floating_point():
        raise UserError(f"gelu: the input is {x.dtype}; give floating-point numbers")
    if backend == "cpp":
        from labs.attention_op.cpp import cpp_gelu

        return cpp_gelu(x, approximate)
    return (Gelu if approximate == "none" else GeluTanh).apply(x)


def as_bias(mask: Tensor, q: Tensor) -> Tensor:
    """A mask as numbers to add to the scores, four axes, its keys side by side in memory."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
            mask, -torch.inf
        )
    else:
        bias = mask.to(dtype)
    return bias.reshape((1,) * (4 - bias.dim()) + bias.shape).contiguous()


def check_backend(operator: str, backend: str, known: tuple[str, ...]) -> None:
    """Raises `UserError` for one that does not exist."""
    if backend not in known:
        raise UserError(f"{operator}: backend={backend!r} is unknown; choose {', '.join(known)}")


def check_inputs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> None:
    """Raises `UserError`, in one line, for shapes and types that do not fit."""
    named = {"q": q, "k": k, "v": v}
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
    if any(x.dim() != 4 for x in named.values()):
        raise UserError(
            f"attention: q, k and v have four axes (batch, heads, length, width); got {shapes}"
        )
    if not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise UserError(f"attention: batch and heads differ: {shapes}; expand them first")
    if q.size(3) != k.size(3):
        raise UserError(
            f"attention: queries of width {q.size(3)} do not fit keys of width {k.size(3)}: {shapes}"
        )
    if k.size(2) != v.size(2):
        raise UserError(f"attention: {k.size(2)} keys but {v.size(2)} values: {shapes}")
    kinds = {(x.dtype, x.device) for x in named.values()}
    autocast = torch.is_autocast_enabled(q.device.type)  # which makes the types equal afterwards
    if not q.is_floating_point() or (len(kinds) > 1 and not autocast):
        raise UserError(
            "attention: q, k and v need one floating-point type and device; got "
            + ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in named.items())
        )
    if not 0 <= dropout < 1:
        raise UserError(f"attention: dropout={dropout} must be in [0, 1)")
    if mask is not None:
        check_mask(mask, (*q.shape[:3], k.size(2)), q.device)


def check_mask(mask: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raises `UserError` unless the mask is here, of a usable type and broadcastable to (B, H, S, T)."""
    if mask.device != device:
        raise UserError(
            f"attention: the mask is on {mask.device}, the queries are on {device}; move it there"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise UserError(
            f"attention: the mask is {mask.dtype}; give torch.bool with True = ignore, or numbers to add"
        )
    if mask.requires_grad:
        raise UserError(
            "attention: the mask requires a gradient, which this operator does not compute; detach it"
        )
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dim() > 4 or any(size not in (1, whole) for size, whole in zip(sizes, shape)):
        raise UserError(
            f"attention: a mask of shape {tuple(mask.shape)} does not fit scores (batch, heads, queries, keys) "
            f"{shape}; padding of keys is (batch, 1, 1, keys)"
        )
