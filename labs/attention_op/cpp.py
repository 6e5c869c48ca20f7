"""The functions of operators.cpp as `torch.autograd.Function`s. They are compiled at first use."""

import functools
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import UserError
from fast import build
from labs.attention_op.attention_python import refuse_second_derivative

# File -> the namespace in `torch.ops` where it registers its functions.
NAMESPACES = {"operators": "attention_op", "fused": "attention_op_fused"}


class CppGelu(torch.autograd.Function):
    """`gelu_python.Gelu` in C++."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        """Any shape → the same shape."""
        ctx.save_for_backward(x)
        return library("operators").gelu(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        """∂L/∂y → ∂L/∂x"""
        refuse_second_derivative("gelu")
        return library("operators").gelu_backward(grad, *ctx.saved_tensors)


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
        out, weights = library("operators").attention(q, k, v, bias, factors)
        ctx.save_for_backward(q, k, v, factors, weights, out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        """∂O → ∂Q, ∂K, ∂V; the other inputs have no gradient."""
        refuse_second_derivative("attention")
        grads = library("operators").attention_backward(grad, *ctx.saved_tensors)
        return *grads, None, None


@functools.cache
def load(name: str) -> bool:
    """Compile NAME.cpp unless that was done before, and register its functions with PyTorch.

    Raises `UserError` where it cannot be compiled or loaded.
    """
    reason = build.why_not()
    if not reason:
        try:
            torch.ops.load_library(build.compiled(Path(__file__).with_name(f"{name}.cpp")))
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            reason = build.reason_of(error)
    if reason:
        raise UserError(f"{name}.cpp cannot be compiled: {reason}; choose the backend 'python'")
    return True


@torch.compiler.assume_constant_result
def ensure_loaded(name: str) -> bool:
    """`load(name)` at the first call. torch.compile cannot trace it: for it this is a constant."""
    return load(name)


def library(name: str):
    """The functions of NAME.cpp."""
    ensure_loaded(name)
    return getattr(torch.ops, NAMESPACES[name])
