"""Attention as a `torch.autograd.Function`.

B sequences, H heads, S queries, T keys, D width of queries and keys, W width of values. The
formulas leave out B and H: Q (S, D), K (T, D), V (T, W), bias M (S, T) with -inf where a query may
not look.

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

P is kept between forward and backward: S·T numbers per head. PyTorch's own attention keeps one
number per query, and computes P again block by block (Rabe and Staats 2021; Dao et al. 2022).

A query that may see nothing gets zeros and passes no gradient on.
"""

import math

import torch
from torch import Tensor

from engine.errors import UserError


class Attention(torch.autograd.Function):
    """O, and the gradients of its three inputs."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        factors: Tensor | None,
    ) -> Tensor:
        """Q (B, H, S, D), K (B, H, T, D), V (B, H, T, W) → O (B, H, S, W)

        The bias M and the dropout factors Z have shapes that broadcast to (B, H, S, T).
        """
        scale = 1 / math.sqrt(q.size(-1))
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
    def backward(ctx, grad: Tensor):
        """∂O → ∂Q, ∂K, ∂V; the other inputs have no gradient."""
        refuse_second_derivative("attention")
        q, k, v, factors, weights, out = ctx.saved_tensors
        grad_v = dropped(weights, factors).mT @ grad  # (B, H, T, W)
        grad_weights = dropped(grad @ v.mT, factors)  # (B, H, S, T)
        delta = (grad * out).sum(-1, keepdim=True)  # (B, H, S, 1)
        grad_scores = (grad_weights - delta) * weights
        grad_q = grad_scores @ k * ctx.scale
        grad_k = grad_scores.mT @ q * ctx.scale
        return grad_q, grad_k, grad_v, None, None


def dropped(weights: Tensor, factors: Tensor | None) -> Tensor:
    """P ∘ Z"""
    return weights if factors is None else weights * factors


def refuse_second_derivative(operator: str) -> None:
    """For a backward pass whose own derivative nobody wrote. Raises `UserError`.

    PyTorch's `once_differentiable` raises only where the gradient that comes in depends on an
    input. That of `out.sum()` is constant, so a second derivative would be wrong without an error.
    """
    if torch.is_grad_enabled():
        raise UserError(
            f"{operator}: this implementation has no second derivative; leave out create_graph=True"
        )
