"""Exercise: write the backward passes. Replace each `raise NotImplementedError`, then run

    python -m labs.attention_op.exercise

which compares every function with the gradient that autograd finds, and says which are right.

B sequences, H heads, S queries, T keys, D width of queries and keys, W width of values. `out_grad`
is ∂L/∂O, and so on: a gradient has the shape of what it is the gradient of. The page of the lab
(README.md) derives the formulas; our solutions are in gelu_python.py and attention_python.py.
"""

import math

import torch
from torch import Tensor


def normal_cdf(x: Tensor) -> Tensor:
    """Φ(x)"""
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_grad(y_grad: Tensor, x: Tensor) -> Tensor:
    """1. y = x Φ(x): ∂y and x, of any shape → ∂x. Φ is `normal_cdf` above."""
    raise NotImplementedError


def values_grad(out_grad: Tensor, weights: Tensor) -> Tensor:
    """2. O = P V: ∂O (B, H, S, W), P (B, H, S, T) → ∂V (B, H, T, W)"""
    raise NotImplementedError


def weights_grad(out_grad: Tensor, v: Tensor) -> Tensor:
    """3. O = P V: ∂O (B, H, S, W), V (B, H, T, W) → ∂P (B, H, S, T)"""
    raise NotImplementedError


def scores_grad(weights_grad: Tensor, weights: Tensor) -> Tensor:
    """4. P = softmax(A) over the keys: ∂P and P → ∂A, all (B, H, S, T)

    O is not given: here δ is Σ_j P_ij ∂P_ij.
    """
    raise NotImplementedError


def queries_grad(scores_grad: Tensor, k: Tensor, scale: float) -> Tensor:
    """5. A = scale Q Kᵀ: ∂A (B, H, S, T), K (B, H, T, D) → ∂Q (B, H, S, D)"""
    raise NotImplementedError


def keys_grad(scores_grad: Tensor, q: Tensor, scale: float) -> Tensor:
    """6. A = scale Q Kᵀ: ∂A (B, H, S, T), Q (B, H, S, D) → ∂K (B, H, T, D)"""
    raise NotImplementedError


if __name__ == "__main__":
    from labs.attention_op.exercise_checks import main

    main()
