"""GELU as a `torch.autograd.Function` (Hendrycks and Gimpel 2016).

GELU multiplies x by the probability that a standard normal number is below x:

    y = x Φ(x)        Φ(x) = (1 + erf(x/√2)) / 2        φ(x) = Φ'(x) = exp(−x²/2) / √(2π)

By the product rule dy/dx = Φ(x) + x φ(x). For a loss L the chain rule gives, element by element,
∂L/∂x = ∂L/∂y · dy/dx.
"""

import math

import torch
from torch import Tensor


class Gelu(torch.autograd.Function):
    """y = x Φ(x). Made of differentiable operations, so second derivatives exist too."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        """Any shape → the same shape."""
        # Only x is saved. Φ is computed again in the backward pass, which needs less memory.
        ctx.save_for_backward(x)
        return x * normal_cdf(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        """∂L/∂y → ∂L/∂x"""
        (x,) = ctx.saved_tensors
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)  # φ(x)
        return grad * (normal_cdf(x) + x * density)


def normal_cdf(x: Tensor) -> Tensor:
    """Φ(x)"""
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
