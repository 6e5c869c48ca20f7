"""The two operators: they check their inputs and choose the implementation.

B sequences, H heads, S queries, T keys, D width of queries and keys, W width of values.
"""

import torch
from torch import Tensor

from engine.errors import UserError
from labs.attention_op.attention_python import Attention
from labs.attention_op.cpp import CppAttention, CppGelu
from labs.attention_op.fused import FusedAttention, FusedGelu
from labs.attention_op.gelu_python import Gelu

GELU = {"python": Gelu, "cpp": CppGelu, "fused": FusedGelu}
ATTENTION = {"python": Attention, "cpp": CppAttention, "fused": FusedAttention}
BACKENDS = tuple(ATTENTION)
HALF_PRECISION = (torch.float16, torch.bfloat16)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    backend: str = "python",
) -> Tensor:
    """softmax(QKᵀ / √D + mask) V: (B, H, S, D), (B, H, T, D), (B, H, T, W) → (B, H, S, W)

    mask:    boolean, True = ignore (the opposite of `F.scaled_dot_product_attention`), or numbers
             that are added to the scores. Broadcastable to (B, H, S, T): a padding mask of the keys
             is (B, 1, 1, T). It gets no gradient.
    causal:  query i sees the keys 0…i, also when S ≠ T. Can be combined with a mask.
    dropout: probability of setting a weight to 0; the others are divided by 1 − dropout.
             Pass 0 outside training.
    backend: "python"; "cpp", the same functions called from C++; "fused", loops in C++ (CPU only).

    A query that may see nothing gets zeros. Half precision is computed in fp32 and rounded at the
    end, also under autocast. Can be differentiated once. Raises `UserError`.
    """
    check_backend("attention", backend, q)
    check_inputs(q, k, v, mask, dropout)
    dtype = q.dtype
    if dtype in HALF_PRECISION:
        q, k, v = q.float(), k.float(), v.float()
    bias = None
    if mask is not None:
        bias = as_bias(mask, q.dtype)
    if causal:
        later = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).triu(1)
        causal_bias = as_bias(later, q.dtype)
        bias = causal_bias if bias is None else bias + causal_bias
    factors = None
    if dropout:
        kept = q.new_empty(*q.shape[:3], k.size(2)).bernoulli_(1 - dropout)
        factors = kept / (1 - dropout)
    with torch.autocast(q.device.type, enabled=False):
        return ATTENTION[backend].apply(q, k, v, bias, factors).to(dtype)


def gelu(x: Tensor, backend: str = "python") -> Tensor:
    """x Φ(x) of every element, as `F.gelu` without approximation. Any shape → the same shape.

    Half precision is computed in fp32 and rounded at the end. Raises `UserError`.
    """
    check_backend("gelu", backend, x)
    if not x.is_floating_point():
        raise UserError(f"gelu: the input is {x.dtype}; pass floating-point numbers")
    wide = x.float() if x.dtype in HALF_PRECISION else x
    return GELU[backend].apply(wide).to(x.dtype)


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers that are added to the scores: -inf where a boolean mask is True."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)


def check_backend(operator: str, backend: str, x: Tensor | None = None) -> None:
    """Raises `UserError` for an unknown backend, or one that cannot compute where `x` is."""
    if backend not in BACKENDS:
        raise UserError(f"{operator}: unknown backend {backend!r}; choose {', '.join(BACKENDS)}")
    if backend == "fused" and x is not None and x.device.type != "cpu":
        raise UserError(
            f"{operator}: the backend 'fused' is for the CPU, and the input is on {x.device}; "
            "choose cpp or python"
        )


def check_inputs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> None:
    """Raises `UserError`, in one line, for shapes and types that do not fit together."""
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise UserError(f"attention: q, k and v need the axes (B, H, length, width); {shapes}")
    if not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise UserError(f"attention: q, k and v need the same batch and heads; {shapes}")
    if q.size(3) != k.size(3) or q.size(3) == 0:
        raise UserError(f"attention: queries and keys need the same width, at least 1; {shapes}")
    if k.size(2) != v.size(2) or k.size(2) == 0:
        raise UserError(f"attention: as many values as keys are needed, at least one; {shapes}")
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        types = f"got {q.dtype}, {k.dtype} and {v.dtype}"
        raise UserError(f"attention: q, k and v need one floating-point type; {types}")
    if not 0 <= dropout < 1:
        raise UserError(f"attention: dropout={dropout} must be at least 0 and below 1")
    if mask is not None:
        check_mask(mask, (*q.shape[:3], k.size(2)))


def check_mask(mask: Tensor, shape: tuple[int, ...]) -> None:
    """Raises `UserError` unless the mask has a usable type and broadcasts to (B, H, S, T)."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise UserError(
            f"attention: the mask is {mask.dtype}; pass torch.bool (True = ignore) or floats to add"
        )
    if mask.requires_grad:
        raise UserError("attention: the mask gets no gradient; pass mask.detach()")
    try:
        mask.expand(shape)
    except RuntimeError:
        raise UserError(
            f"attention: a mask of shape {tuple(mask.shape)} does not broadcast to the scores' "
            f"(B, H, S, T) = {shape}; a padding mask of the keys is (B, 1, 1, T)"
        ) from None
