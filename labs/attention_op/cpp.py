"""The functions of operators.cpp as `torch.autograd.Function`s. They are compiled at first use."""

import functools
import subprocess
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.errors import UserError
from fast import build

SOURCE = Path(__file__).with_name("operators.cpp")


class CppGelu(torch.autograd.Function):
    """`gelu_python.Gelu` in C++."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        """Any shape → the same shape."""
        ctx.save_for_backward(x)
        return library().gelu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        """∂L/∂y → ∂L/∂x"""
        return library().gelu_backward(grad, *ctx.saved_tensors)


class CppAttention(torch.autograd.Function):
    """`attention_python.Attention` in C++."""

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
        out, weights = library().attention(q, k, v, bias, factors)
        ctx.save_for_backward(q, k, v, factors, weights, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """∂O → ∂Q, ∂K, ∂V; the other inputs have no gradient."""
        grads = library().attention_backward(grad, *ctx.saved_tensors)
        return *grads, None, None


@functools.cache
def load() -> bool:
    """Compile operators.cpp unless that was done before, and register its functions with PyTorch.

    Raises `UserError` where it cannot be compiled or loaded.
    """
    reason = build.why_not()
    if not reason:
        try:
            torch.ops.load_library(build.compiled(SOURCE))
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            reason = build.reason_of(error)
    if reason:
        raise UserError(f"operators.cpp cannot be compiled: {reason}; choose the backend 'python'")
    return True


@torch.compiler.assume_constant_result
def ensure_loaded() -> bool:
    """`load()` at the first call. For torch.compile, which cannot trace it, it is a constant."""
    return load()


def library():
    """`torch.ops.attention_op`"""
    ensure_loaded()
    return torch.ops.attention_op
