"""Attention as `torch.autograd.Function`s: first with every weight kept, then with the weights computed again.

B rows, H heads, S queries, T keys, D width of queries and keys, W width of values. All of it is per row and head, so B and H
are left out here: Q (S, D), K (T, D), V (T, W), bias M (S, T) with -inf where a query may not look.

Forward (Vaswani et al. 2017, section 3.2.1), s = 1/√D:

    A = s Q Kᵀ + M                     scores (S, T)
    P = softmax(A)                     weights, each row sums to 1
    O = (P ∘ Z) V                      output (S, W); Z is dropout: 0 with probability p, else 1/(1 − p)

Backward: ∂X stands for ∂L/∂X, which has the shape of X. Given is ∂O. A product Y = X C gives ∂X = ∂Y Cᵀ and ∂C = Xᵀ ∂Y, so

    ∂V = (P ∘ Z)ᵀ ∂O
    ∂P = (∂O Vᵀ) ∘ Z

The softmax of one row, p = softmax(a), has ∂p_j/∂a_i = p_j ([i = j] − p_i). Hence ∂a_i = Σ_j ∂p_j ∂p_j/∂a_i, or

    ∂A = P ∘ (∂P − δ)                  δ_i = Σ_j P_ij ∂P_ij, one number a row
    ∂Q = s ∂A K
    ∂K = s ∂Aᵀ Q

δ needs no weights: Σ_j P_ij Z_ij Σ_w ∂O_iw V_jw = Σ_w ∂O_iw O_iw, the row sums of ∂O ∘ O.

`Attention` keeps P (S·T numbers a head, and what is dropped) between forward and backward. `RecomputedAttention` keeps ℓ_i =
log Σ_j exp(A_ij) of each row and gets the weights again from P = exp(A − ℓ). It does so for a few queries at a time, so that
there are never S·T numbers at once: memory grows with S + T (Rabe and Staats 2021; Dao et al. 2022, who also go through the
keys in parts, which fast memory of a few hundred KiB asks for). Kept are the two parts of ℓ, the largest score m and
log Σ exp(A − m): where a row is masked by -1e9 throughout, their sum would be rounded to m, and every weight would be exp(0).

A row that may look nowhere has O = 0 and hands no gradient on.
"""

import functools
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from labs.attention_op.gelu_python import in_type, in_wide

# Scores that `RecomputedAttention` makes at a time: 1 MiB in fp32, a core's cache; a GPU needs more to be busy.
SCORES_AT_ONCE = {"cpu": 2**18, "cuda": 2**25}
FEWEST_QUERIES = 32  # at a time, however many keys there are: a product with fewer rows is slow


def without_autocast(method):
    """Inside, products run in the type of their factors, whatever autocast says outside."""

    @functools.wraps(method)
    def wrapped(ctx, tensor: Tensor, *rest):
        with torch.autocast(tensor.device.type, enabled=False):
            return method(ctx, tensor, *rest)

    return wrapped


def once(backward):
    """A `backward` that refuses to be differentiated itself.

    PyTorch's own `once_differentiable` lets a second derivative be 0 in silence where ∂O is a constant.
    """

    @functools.wraps(backward)
    def wrapped(ctx, *grads: Tensor):
        if torch.is_grad_enabled():  # only with create_graph=True
            raise RuntimeError(
                "this attention can be differentiated once; take F.scaled_dot_product_attention for more"
            )
        return backward(ctx, *grads)

    return wrapped


class Attention(torch.autograd.Function):
    """Every weight is kept for the backward pass."""

    @staticmethod
    @without_autocast
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        causal: bool,
        scale: float,
        dropout: float,
        seed: Tensor | None,
    ) -> Tensor:
        """(B, H, S, D), (B, H, T, D), (B, H, T, W), bias broadcastable to (B, H, S, T) → (B, H, S, W)"""
        a = scores(in_wide(q), in_wide(k), bias, causal, scale)  # (B, H, S, T)
        weights = a.softmax(-1)
        if (
            bias is not None
        ):  # exp(-inf) / Σ exp(-inf) is nan; without a bias every query sees the first key
            weights.masked_fill_(a.amax(-1, keepdim=True) == -torch.inf, 0.0)
        factors = (
            dropout_factors(weights, slices_of_all(weights), dropout, seed) if dropout else None
        )
        out = in_type(dropped(weights, factors) @ in_wide(v), q.dtype)  # (B, H, S, W)
        ctx.save_for_backward(q, k, v, weights, factors, out)
        ctx.scale = scale
        return out

    @staticmethod
    @once
    @without_autocast
    def backward(ctx, grad: Tensor):
        """∂O → ∂Q, ∂K, ∂V, and nothing for the other arguments of `forward`"""
        q, k, v, weights, factors, out = ctx.saved_tensors
        grad = in_wide(grad)
        grad_v = dropped(weights, factors).mT @ grad  # (B, H, T, W)
        grad_p = dropped(grad @ in_wide(v).mT, factors)  # (B, H, S, T)
        delta = (grad * in_wide(out)).sum(-1, keepdim=True)  # (B, H, S, 1)
        grad_a = grad_p.sub_(delta).mul_(weights)
        grad_q, grad_k = grad_a @ (in_wide(k) * ctx.scale), grad_a.mT @ (in_wide(q) * ctx.scale)
        return (
            grad_q.to(q.dtype),
            grad_k.to(k.dtype),
            grad_v.to(v.dtype),
            None,
            None,
            None,
            None,
            None,
        )


class RecomputedAttention(torch.autograd.Function):
    """Kept are two numbers for each query; the weights are made again in the backward pass, a block at a time."""

    @staticmethod
    @without_autocast
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        causal: bool,
        scale: float,
        dropout: float,
        seed: Tensor | None,
    ) -> Tensor:
        """As `Attention.forward`."""
        out = q.new_empty(*q.shape[:3], v.size(-1))  # (B, H, S, W)
        peaks, logs = in_wide(q).new_empty(2, *q.shape[:3], 1)  # ℓ in two parts, (B, H, S, 1) each
        for queries, keys in blocks(q, k, causal):
            a = block_of_scores(
                q, k, bias, causal, scale, queries, keys
            )  # (b, h, s, t), here and in all of the loop
            # Less the largest score, or exp overflows. The lowest number instead of -inf: -inf − -inf is nan.
            peak = a.amax(-1, keepdim=True).clamp_min_(torch.finfo(a.dtype).min)
            weights = a.sub_(peak).exp_()
            # A row that sees anything has a term exp(0) = 1, so only the sum of one that sees nothing is changed, from 0.
            total = weights.sum(-1, keepdim=True).clamp_min_(1.0)
            peaks[queries], logs[queries] = peak, total.log()
            if dropout:
                weights *= dropout_factors(weights, (*queries, q.shape[1:3]), dropout, seed)
            out[queries] = (weights @ in_wide(v[keys])).div_(total)  # S·W divisions instead of S·T
        ctx.save_for_backward(q, k, v, bias, seed, out, peaks, logs)
        ctx.causal, ctx.scale, ctx.dropout = causal, scale, dropout
        return out

    @staticmethod
    @once
    @without_autocast
    def backward(ctx, grad: Tensor):
        """As `Attention.backward`."""
        q, k, v, bias, seed, out, peaks, logs = ctx.saved_tensors
        delta = (in_wide(grad) * in_wide(out)).sum(-1, keepdim=True)  # (B, H, S, 1)
        grad_q, grad_k, grad_v = (torch.zeros_like(in_wide(x)) for x in (q, k, v))
        for queries, keys in blocks(q, k, ctx.causal):
            a = block_of_scores(q, k, bias, ctx.causal, ctx.scale, queries, keys)
            weights = a.sub_(peaks[queries]).sub_(logs[queries]).exp_()  # P
            block_grad = in_wide(grad[queries])  # ∂O
            grad_p = block_grad @ in_wide(v[keys]).mT
            if ctx.dropout:
                factors = dropout_factors(weights, (*queries, q.shape[1:3]), ctx.dropout, seed)
                grad_v[keys] += (weights * factors).mT @ block_grad
                grad_p *= factors
            else:
                grad_v[keys] += weights.mT @ block_grad
            grad_a = grad_p.sub_(delta[queries]).mul_(weights)
            grad_q[queries] = grad_a @ in_wide(k[keys])
            grad_k[keys] += grad_a.mT @ in_wide(q[queries])
        grad_q, grad_k = grad_q.mul_(ctx.scale), grad_k.mul_(ctx.scale)
        return (
            grad_q.to(q.dtype),
            grad_k.to(k.dtype),
            grad_v.to(v.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def scores(
    q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float, first: int = 0
) -> Tensor:
    """(…, S, D), (…, T, D) → s Q Kᵀ + M (…, S, T); the queries stand at positions first, first + 1, …"""
    a = (q * scale) @ k.mT  # s goes to Q: S·D multiplications instead of S·T
    if bias is not None:
        a += bias
    if causal:
        later = torch.ones(a.shape[-2:], dtype=torch.bool, device=a.device).triu(
            1 + first
        )  # key j > query first + i
        a.masked_fill_(later, -torch.inf)
    return a


def block_of_scores(q, k, bias, causal: bool, scale: float, queries: tuple, keys: tuple) -> Tensor:
    """The scores of some queries of some heads of some rows."""
    bias = None if bias is None else bias.expand(*q.shape[:3], k.size(2))[queries][..., keys[2]]
    return scores(
        in_wide(q[queries]), in_wide(k[keys]), bias, causal, scale, first=queries[2].start
    )


def blocks(
    q: Tensor, k: Tensor, causal: bool
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """(B, H, S, D), (B, H, T, D) → slices of rows, heads, queries; and of rows, heads, the keys that these may see."""
    (rows, heads, queries), keys = q.shape[:3], k.size(2)
    room = SCORES_AT_ONCE.get(q.device.type, 2**18)
    # Whole rows if several fit, else whole heads of one row, else some queries of one head.
    rows_at_once = max(1, room // max(1, heads * queries * keys))
    heads_at_once = min(heads, max(1, room // max(1, queries * keys)))
    queries_at_once = min(queries, max(FEWEST_QUERIES, room // keys))
    for row, head, query in product(
        range(0, rows, rows_at_once),
        range(0, heads, max(1, heads_at_once)),
        range(0, queries, max(1, queries_at_once)),
    ):
        last = min(queries, query + queries_at_once)
        where = slice(row, row + rows_at_once), slice(head, head + heads_at_once)
        seen = min(keys, last) if causal else keys  # no query of this block may see a later one
        yield (*where, slice(query, last)), (*where, slice(0, seen))


def dropped(weights: Tensor, factors: Tensor | None) -> Tensor:
    """P ∘ Z"""
    return weights if factors is None else weights * factors


def slices_of_all(weights: Tensor) -> tuple:
    """What `dropout_factors` is told when the block is everything."""
    return (
        slice(0, weights.size(0)),
        slice(0, weights.size(1)),
        slice(0, weights.size(2)),
        weights.shape[1:3],
    )


def dropout_factors(weights: Tensor, where: tuple, dropout: float, seed: Tensor) -> Tensor:
    """Z of a block (b, h, s, t): 0 with probability `dropout`, else 1 / (1 − dropout). The keys begin with the first.

    A pure function of the seed (two int32) and the position in (B, H, S, T): so the backward pass gets the same Z without
    keeping it, and every implementation, whatever its blocks are, drops the same weights. `where`: slices of rows, heads and
    queries, and the sizes (H, S).
    """
    rows, heads, queries, (heads_in_all, queries_in_all) = where
    b, h, s, t = weights.shape
    device = weights.device
    number = torch.arange(rows.start, rows.start + b, device=device).view(b, 1, 1, 1) * heads_in_all
    number = (
        number + torch.arange(heads.start, heads.start + h, device=device).view(h, 1, 1)
    ) * queries_in_all
    number = number + torch.arange(queries.start, queries.start + s, device=device).view(
        s, 1
    )  # of the row, in all
    row_key = mix(mix(number.to(torch.int32) + seed[0]) ^ seed[1])  # (b, h, s, 1)
    draw = mix(
        row_key ^ torch.arange(t, dtype=torch.int32, device=device)
    )  # (b, h, s, t), all int32 alike
    return (draw >= threshold(dropout)).to(weights.dtype).mul_(1 / (1 - dropout))


def threshold(dropout: float) -> int:
    """The share `dropout` of all int32 lies below it."""
    return round(dropout * 2**32) - 2**31


def mix(x: Tensor) -> Tensor:
    """Scramble int32 numbers in place: "lowbias32" of Chris Wellons's hash prospector. PyTorch's >> copies the sign bit,
    so the shifted number is masked; a product wraps around, and − 2**32 makes its factor an int32 of the same bits."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    return x
