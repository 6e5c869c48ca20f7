"""Are the operators right? Compared with PyTorch's own, and with numerical derivatives.

B sequences, H heads, S queries, T keys, D width of queries and keys, W width of values.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from labs.attention_op.operators import attention, gelu

# PyTorch has two kernels for attention on a CPU. "math" is made of operations like ours. "flash"
# goes block by block (Dao et al. 2022); it needs D = W, and PyTorch takes it wherever it can.
KERNELS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}

GELU_TERMS = 16  # GELU sums nothing, but its dozen operations round too


def terms_of(sizes: tuple[int, ...]) -> int:
    """(B, H, S, T, D, W) → the number of terms summed on the way to a gradient of attention."""
    _, _, s, t, d, w = sizes
    return d + w + 2 * max(s, t)


def allowed(dtype: torch.dtype, terms: int) -> float:
    """The largest `error` of results that sum this number of terms in another order than PyTorch.

    Each addition rounds by half an eps, in ours and in PyTorch's. Twice that, because numbers that
    cancel are larger than their sum.
    """
    return 2 * terms * torch.finfo(dtype).eps


def error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest number where that is above 1."""
    if not theirs.numel():
        return 0.0
    difference = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1.0)
    # max() of several errors would skip a nan
    return difference.nan_to_num(torch.inf).item()


def compare(ours: Callable, theirs: Callable, inputs: list[Tensor]) -> tuple[float, float]:
    """The error of the output, and the largest one of the gradients, for one random ∂L/∂output."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out, expected = ours(*inputs), theirs(*inputs)
    grad = torch.randn_like(expected)
    grads = torch.autograd.grad(out, inputs, grad)
    expected_grads = torch.autograd.grad(expected, inputs, grad)
    return error(out, expected), max(map(error, grads, expected_grads))


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    kernel: str = "math",
) -> Tensor:
    """`F.scaled_dot_product_attention` with our masks: True = ignore, `causal` beside a mask.

    kernel: "math" or "flash".
    """
    ignored = torch.zeros(*q.shape[:3], k.size(2), dtype=torch.bool, device=q.device)
    if mask is not None:
        ignored = ignored | mask
    if causal:
        ignored = ignored | torch.ones_like(ignored[0, 0]).triu(1)
    with sdpa_kernel(KERNELS[kernel]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~ignored)


def random_inputs(sizes: tuple[int, ...], dtype=torch.float64) -> list[Tensor]:
    """(B, H, S, T, D, W) → q, k, v of N(0, 1)"""
    b, h, s, t, d, w = sizes
    shapes = ((s, d), (t, d), (t, w))
    return [torch.randn(b, h, *shape, dtype=dtype) for shape in shapes]


def random_padding(sequences: int, keys: int) -> Tensor:
    """(B, 1, 1, T) True = padding, at the end; the first sequence is padding only."""
    real = torch.randint(1, max(2, keys + 1), (sequences, 1))
    real[:1] = 0
    return (torch.arange(keys) >= real)[:, None, None]


def check_attention(
    backend: str, kernel: str, sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[float, float]:
    """Errors of output and gradients, the largest over no mask, padding, causal, and both."""
    padding = random_padding(sizes[0], sizes[3])
    errors = []
    for mask, causal in ((None, False), (padding, False), (None, True), (padding, True)):
        settings = dict(mask=mask, causal=causal)
        errors.append(
            compare(
                lambda *qkv, s=settings: attention(*qkv, **s, backend=backend),
                lambda *qkv, s=settings: reference_attention(*qkv, **s, kernel=kernel),
                random_inputs(sizes, dtype),
            )
        )
    outputs, gradients = zip(*errors)
    return max(outputs), max(gradients)


def check_gelu(backend: str, dtype: torch.dtype) -> tuple[float, float]:
    """Errors of output and gradient from −12 to 12."""
    x = torch.linspace(-12, 12, 10_000, dtype=dtype)
    return compare(lambda x: gelu(x, backend), F.gelu, [x])


def gradcheck_attention(backend: str) -> bool:
    """The backward pass against numerical derivatives.

    With masks, dropout and a sequence that sees nothing.
    """
    inputs = [x.requires_grad_() for x in random_inputs((2, 1, 3, 4, 2, 3))]
    mask = random_padding(2, 4)

    def operator(*qkv: Tensor) -> Tensor:
        """Attention as a function of its three inputs alone."""
        torch.manual_seed(0)  # drops the same weights in every call
        return attention(*qkv, mask, causal=True, dropout=0.3, backend=backend)

    return torch.autograd.gradcheck(operator, inputs, raise_exception=False)


def gradcheck_gelu(backend: str) -> bool:
    """The same for GELU."""
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    return torch.autograd.gradcheck(lambda x: gelu(x, backend), [x], raise_exception=False)
