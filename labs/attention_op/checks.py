"""Are the operators right? Against PyTorch's own, and against numerical derivatives.

B rows, H heads, S queries, T keys, D width of queries and keys, W width of values.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.attention_op.operators import attention, gelu

GELU_TERMS = 32  # a dozen operations; (1 − t²) · x u' of the tanh kind then loses some digits more


def terms_of(sizes: tuple[int, ...]) -> int:
    """(B, H, S, T, D, W) → how many numbers are added up, one sum after another, on the way to a gradient of attention."""
    _, _, s, t, d, w = sizes
    return d + w + 2 * max(s, t)


def allowed(backend: str, dtype: torch.dtype, terms: int) -> float:
    """The largest `error` of results on whose way so many numbers are added up in another order than PyTorch's.

    Each addition rounds by half an eps, in ours and in PyTorch's. Twice that, for numbers that cancel are larger than their
    sum.
    """
    return 2 * terms * torch.finfo(dtype).eps


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """`F.scaled_dot_product_attention` with our conventions: True = ignore, and `causal` beside a mask."""
    ignored = torch.zeros(*q.shape[:3], k.size(2), dtype=torch.bool, device=q.device)
    if mask is not None:
        ignored = ignored | mask
    if causal:
        ignored = ignored | torch.ones(ignored.shape[-2:], dtype=torch.bool, device=q.device).triu(
            1
        )
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~ignored)


def error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest number where that is above 1; 0 if there are no numbers."""
    if not theirs.numel():
        return 0.0
    difference = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1.0)
    return difference.nan_to_num(torch.inf).item()  # of several errors `max` would pass over nan


def compare(ours: Callable, theirs: Callable, inputs: list[Tensor]) -> tuple[float, float]:
    """The error of the output, and the largest one of the gradients, for the same random ∂L/∂output."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out, expected = ours(*inputs), theirs(*inputs)
    grad = torch.randn_like(expected)
    grads, expected_grads = (torch.autograd.grad(y, inputs, grad) for y in (out, expected))
    return error(out, expected), max(map(error, grads, expected_grads))


def random_inputs(sizes: tuple[int, ...], dtype=torch.float64, device="cpu") -> list[Tensor]:
    """(B, H, S, T, D, W) → q, k, v of N(0, 1)"""
    b, h, s, t, d, w = sizes
    return [
        torch.randn(b, h, n, width, dtype=dtype, device=device)
        for n, width in ((s, d), (t, d), (t, w))
    ]


def random_padding(rows: int, keys: int, device="cpu") -> Tensor:
    """(B, 1, 1, T) True = padding at the end; the first row is nothing else."""
    real = torch.randint(1, max(2, keys + 1), (rows, 1), device=device)
    real[:1] = 0
    return (torch.arange(keys, device=device) >= real)[:, None, None]


def check_attention(
    backend: str, sizes: tuple[int, ...], dtype, device="cpu"
) -> tuple[float, float]:
    """Errors of output and gradients, the largest over no mask, padding, causal, and both."""
    mask = random_padding(sizes[0], sizes[3], device)
    errors = []
    for settings in ((None, False), (mask, False), (None, True), (mask, True)):
        inputs = random_inputs(sizes, dtype, device)
        errors.append(
            compare(
                lambda *x, s=settings: attention(*x, *s, backend=backend),
                lambda *x, s=settings: reference_attention(*x, *s),
                inputs,
            )
        )
    return tuple(map(max, zip(*errors)))


def check_gelu(backend: str, approximate: str, dtype, count: int = 10_000) -> tuple[float, float]:
    """Errors of output and gradient from −12 to 12."""
    x = torch.linspace(-12, 12, count, dtype=dtype)
    return compare(
        lambda x: gelu(x, approximate, backend), lambda x: F.gelu(x, approximate=approximate), [x]
    )


def gradcheck_attention(backend: str) -> bool:
    """Hand-written against numerical derivatives: mask, a row that sees nothing, causal, dropout, uneven sizes."""
    inputs = [x.requires_grad_() for x in random_inputs((2, 2, 3, 5, 4, 3))]
    mask = random_padding(2, 5)

    def operator(*x):
        torch.manual_seed(0)  # the same weights dropped at every call
        return attention(*x, mask, causal=True, dropout=0.3, backend=backend)

    return torch.autograd.gradcheck(operator, inputs)


def gradcheck_gelu(backend: str, approximate: str) -> bool:
    """The same."""
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    return torch.autograd.gradcheck(lambda x: gelu(x, approximate, backend), [x])
