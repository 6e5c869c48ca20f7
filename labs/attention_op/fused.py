"""The loops of fused.cpp as `torch.autograd.Function`s. Compiled at first use; for the CPU only."""

import math

from torch import Tensor, autograd

from labs.attention_op.attention_python import dropped, refuse_second_derivative
from labs.attention_op.cpp import library


class FusedGelu(autograd.Function):
    """`gelu_python.Gelu` as one loop forward and one backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        """Any shape → the same shape."""
        ctx.save_for_backward(x)
        return library("fused").gelu(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        """∂L/∂y → ∂L/∂x"""
        refuse_second_derivative("gelu")
        return library("fused").gelu_backward(grad, *ctx.saved_tensors)


class FusedAttention(autograd.Function):
    """`attention_python.Attention` with one loop for everything between its matrix products."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        factors: Tensor | None,
    ) -> Tensor:
        """As `Attention.forward`."""
        ctx.scale = 1 / math.sqrt(q.size(-1))
        weights = (q * ctx.scale) @ k.mT  # the scores (B, H, S, T)
        library("fused").softmax_(weights, bias)
        # O is not needed: the loop computes δ from P and ∂P, which it reads in any case.
        ctx.save_for_backward(q, k, v, factors, weights)
        return dropped(weights, factors) @ v

    @staticmethod
    def backward(ctx, grad: Tensor):
        """∂O → ∂Q, ∂K, ∂V; the other inputs have no gradient."""
        refuse_second_derivative("attention")
        q, k, v, factors, weights = ctx.saved_tensors
        grad_v = dropped(weights, factors).mT @ grad  # (B, H, T, W)
        grad_scores = dropped(grad @ v.mT, factors)  # ∂P (B, H, S, T)
        library("fused").softmax_backward_(grad_scores, weights)
        grad_q = grad_scores @ k * ctx.scale
        grad_k = grad_scores.mT @ q * ctx.scale
        return grad_q, grad_k, grad_v, None, None
