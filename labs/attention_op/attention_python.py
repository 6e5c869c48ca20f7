"""Attention as a `torch.autograd.Function`, twice: weights kept, and weights recomputed.

B rows, H heads, S queries, T keys, D width of queries and keys, W width of values. The formulas
leave out B and H: Q (S, D), K (T, D), V (T, W), bias M (S, T) with -inf where a query may not look.

Forward (Vaswani et al. 2017, section 3.2.1), s = 1/√D:

    A = s Q Kᵀ + M                     scores (S, T)
    P = softmax(A)                     weights, each row sums to 1
    O = (P ∘ Z) V                      output (S, W)

with the dropout factors Z: 0 with probability p, else 1/(1 − p).

Backward: ∂X stands for ∂L/∂X, which has the shape of X. ∂O is given. A product Y = X C has the
gradients ∂X = ∂Y Cᵀ and ∂C = Xᵀ ∂Y, so

    ∂V = (P ∘ Z)ᵀ ∂O
    ∂P = (∂O Vᵀ) ∘ Z

The softmax of one row, p = softmax(a), has ∂p_j/∂a_i = p_j ([i = j] − p_i). Hence
∂a_i = Σ_j ∂p_j ∂p_j/∂a_i, or

    ∂A = P ∘ (∂P − δ)                  δ_i = Σ_j P_ij ∂P_ij, one number per row
    ∂Q = s ∂A K
    ∂K = s ∂Aᵀ Q

δ needs no weights: Σ_j P_ij Z_ij Σ_w ∂O_iw V_jw = Σ_w ∂O_iw O_iw, the row sums of ∂O ∘ O.

`Attention` keeps P between forward and backward: S·T numbers per head. `RecomputedAttention` keeps
two numbers per row, the largest score m and the sum Σ_j exp(A_ij − m), and computes P again, for a
few queries at a time. There are never S·T numbers at once, so memory grows with S + T (Rabe and
Staats 2021; Dao et al. 2022, who also split the keys to fit a GPU's fast memory).

A query that may see nothing gets zeros and passes no gradient on.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SCORES_AT_ONCE = 2**20  # of RecomputedAttention: 4 MiB in fp32


class Attention(torch.autograd.Function):
    """Keeps every weight for the backward pass."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        factors: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Q (B, H, S, D), K (B, H, T, D), V (B, H, T, W) → O (B, H, S, W)

        The bias M and the dropout factors Z have shapes that broadcast to (B, H, S, T).
        """
        scores = (q * scale) @ k.mT  # (B, H, S, T)
        if bias is not None:
            scores += bias
        weights = scores.softmax(-1)
        # The softmax of a row of -inf is nan.
        weights.masked_fill_(scores.amax(-1, keepdim=True) == -torch.inf, 0.0)
        out = dropped(weights, factors) @ v
        ctx.save_for_backward(q, k, v, factors, weights, out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """∂O → ∂Q, ∂K, ∂V; the other inputs have no gradient."""
        q, k, v, factors, weights, out = ctx.saved_tensors
        grad_v = dropped(weights, factors).mT @ grad  # (B, H, T, W)
        grad_weights = dropped(grad @ v.mT, factors)  # (B, H, S, T)
        delta = (grad * out).sum(-1, keepdim=True)  # (B, H, S, 1)
        grad_scores = (grad_weights - delta) * weights
        grad_q = grad_scores @ k * ctx.scale
        grad_k = grad_scores.mT @ q * ctx.scale
        return grad_q, grad_k, grad_v, None, None, None


class RecomputedAttention(torch.autograd.Function):
    """Keeps two numbers per query; computes the weights again in the backward pass, by blocks."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        causal: bool,
        dropout: float,
        seed: int,
        scale: float,
    ) -> Tensor:
        """As `Attention.forward`, but the causal mask and dropout factors are made per block."""
        generator = torch.Generator(q.device).manual_seed(seed) if dropout else None
        out = q.new_empty(*q.shape[:3], v.size(-1))
        peaks = q.new_empty(*q.shape[:3], 1)
        sums = q.new_empty(*q.shape[:3], 1)
        for queries, keys in blocks(q, k, causal):
            scores = block_scores(q, k, bias, causal, scale, queries, keys)  # (B, H, s, t)
            # Without subtracting the peak, exp would overflow. Where the peak is -inf, the lowest
            # finite number takes its place: -inf − -inf is nan.
            peak = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
            weights = (scores - peak).exp()
            # A row with a visible key has the term exp(0) = 1, so only the sum of a row without
            # one is changed, from 0.
            total = weights.sum(-1, keepdim=True).clamp_min(1.0)
            factors = dropout_factors(weights, dropout, generator) if dropout else None
            out[:, :, queries] = dropped(weights, factors) @ v[:, :, keys] / total
            peaks[:, :, queries] = peak
            sums[:, :, queries] = total
        ctx.save_for_backward(q, k, v, bias, out, peaks, sums)
        ctx.causal, ctx.dropout, ctx.seed, ctx.scale = causal, dropout, seed, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """∂O → ∂Q, ∂K, ∂V; the other inputs have no gradient."""
        q, k, v, bias, out, peaks, sums = ctx.saved_tensors
        # The same seed and the same order of blocks give the same dropout factors again.
        generator = torch.Generator(q.device).manual_seed(ctx.seed) if ctx.dropout else None
        delta = (grad * out).sum(-1, keepdim=True)  # (B, H, S, 1)
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
        for queries, keys in blocks(q, k, ctx.causal):
            scores = block_scores(q, k, bias, ctx.causal, ctx.scale, queries, keys)
            weights = (scores - peaks[:, :, queries]).exp() / sums[:, :, queries]
            factors = dropout_factors(weights, ctx.dropout, generator) if ctx.dropout else None
            block_grad = grad[:, :, queries]  # ∂O
            grad_v[:, :, keys] += dropped(weights, factors).mT @ block_grad
            grad_weights = dropped(block_grad @ v[:, :, keys].mT, factors)
            grad_scores = (grad_weights - delta[:, :, queries]) * weights
            grad_q[:, :, queries] = grad_scores @ k[:, :, keys] * ctx.scale
            grad_k[:, :, keys] += grad_scores.mT @ q[:, :, queries] * ctx.scale
        return grad_q, grad_k, grad_v, None, None, None, None, None


def blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """(B, H, S, D), (B, H, T, D) → slices of queries, each with that of the keys they may see."""
    batch, heads, queries, _ = q.shape
    keys = k.size(2)
    step = max(1, SCORES_AT_ONCE // max(1, batch * heads * keys))
    for first in range(0, queries, step):
        last = min(first + step, queries)
        yield slice(first, last), slice(0, min(keys, last) if causal else keys)


def block_scores(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    queries: slice,
    keys: slice,
) -> Tensor:
    """The scores (B, H, s, t) of s queries and t keys."""
    scores = (q[:, :, queries] * scale) @ k[:, :, keys].mT
    if bias is not None:
        scores += bias.expand(*q.shape[:3], k.size(2))[:, :, queries, keys]
    if causal:
        query_positions = torch.arange(queries.start, queries.stop, device=q.device)
        key_positions = torch.arange(keys.stop, device=q.device)
        scores.masked_fill_(key_positions > query_positions[:, None], -torch.inf)
    return scores


def dropout_factors(
    like: Tensor, dropout: float, generator: torch.Generator | None = None
) -> Tensor:
    """Z with the shape of `like`: 0 with probability `dropout`, else 1 / (1 − dropout)."""
    kept = torch.empty_like(like).bernoulli_(1 - dropout, generator=generator)
    return kept / (1 - dropout)


def dropped(weights: Tensor, factors: Tensor | None) -> Tensor:
    """P ∘ Z"""
    return weights if factors is None else weights * factors
