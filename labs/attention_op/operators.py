"""The two operators: what they accept, and which implementation answers.

B rows, H heads, S queries, T keys, D width of queries and keys, W width of values.
"""

import math

import torch
from torch import Tensor

from engine.errors import UserError
from labs.attention_op.gelu_python import Gelu, GeluTanh

ATTENTION_BACKENDS = ("python", "recompute", "cpp", "triton")
GELU_BACKENDS = ("python", "cpp")


def gelu(x: Tensor, approximate: str = "none", backend: str = "python") -> Tensor:
    """GELU of every number, as `F.gelu`: the exact one, or with `approximate="tanh"` the approximation.

    Half precision is computed in fp32 and rounded once. It can be differentiated once. Raises `UserError`.
    """
    if approximate not in ("none", "tanh"):
        raise UserError(f"gelu: approximate={approximate!r} is unknown; choose 'none' or 'tanh'")
    check_backend("gelu", backend, GELU_BACKENDS)
    if not x.is_floating_point():
        raise UserError(f"gelu: the input is {x.dtype}; give floating-point numbers")
    if backend == "cpp":
        from labs.attention_op.cpp import cpp_gelu

        return cpp_gelu(x, approximate)
    return (Gelu if approximate == "none" else GeluTanh).apply(x)


def check_backend(operator: str, backend: str, known: tuple[str, ...]) -> None:
    """Raises `UserError` for one that does not exist."""
    if backend not in known:
        raise UserError(f"{operator}: backend={backend!r} is unknown; choose {', '.join(known)}")
