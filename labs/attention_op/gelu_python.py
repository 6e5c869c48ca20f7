"""GELU as a `torch.autograd.Function` (Hendrycks and Gimpel 2016), x of any shape.

GELU passes x on with the probability that a standard normal number is below x:

    y = x Φ(x)        Φ(x) = (1 + erf(x/√2)) / 2        φ(x) = Φ'(x) = exp(−x²/2) / √(2π)

By the product rule dy/dx = Φ(x) + x φ(x). For a loss L the chain rule gives, number by number, ∂L/∂x = ∂L/∂y · dy/dx.

The tanh approximation of the same paper (its section 2) replaces Φ(x) by (1 + t)/2 with

    t = tanh(u)       u = √(2/π) (x + 0.044715 x³)      t' = (1 − t²) u'      u' = √(2/π) (1 + 3 · 0.044715 x²)

so that dy/dx = (1 + t)/2 + x t'/2.

Both backward passes are made of differentiable operations on x, so PyTorch can differentiate them once more.
"""

import math

import torch
from torch import Tensor

CUBIC = 0.044715
ROOT_2_OVER_PI = math.sqrt(2 / math.pi)


class Gelu(torch.autograd.Function):
    """y = x Φ(x)"""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        """Any shape → the same shape."""
        ctx.save_for_backward(x)  # Φ is computed again in the backward pass: a tensor less to keep
        return in_type(x * below(x), x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        """∂L/∂y → ∂L/∂x"""
        (x,) = ctx.saved_tensors
        wide = in_wide(x)
        density = torch.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)  # φ(x)
        return (grad * (below(x) + wide * density)).to(x.dtype)


class GeluTanh(torch.autograd.Function):
    """y = x (1 + tanh u) / 2"""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        """Any shape → the same shape."""
        ctx.save_for_backward(x)
        wide = in_wide(x)
        return in_type(0.5 * wide * (1 + torch.tanh(inner(wide))), x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        """∂L/∂y → ∂L/∂x"""
        (x,) = ctx.saved_tensors
        wide = in_wide(x)
        t = torch.tanh(inner(wide))
        slope = (1 - t * t) * ROOT_2_OVER_PI * (1 + 3 * CUBIC * wide * wide)  # t'
        return (grad * (0.5 * (1 + t) + 0.5 * wide * slope)).to(x.dtype)


def below(x: Tensor) -> Tensor:
    """Φ(x)"""
    return 0.5 * (1 + torch.erf(in_wide(x) * math.sqrt(0.5)))


def inner(x: Tensor) -> Tensor:
    """u(x)"""
    return ROOT_2_OVER_PI * x * (1 + CUBIC * x * x)


def in_wide(x: Tensor) -> Tensor:
    """Half precision as fp32: computed there and rounded once, at the end."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def in_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this type. Never `x.to` its own type: behind that, torch.compile of torch 2.11 loses a Function's gradient."""
    return x if x.dtype == dtype else x.to(dtype)
