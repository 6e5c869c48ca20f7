"""The checker of exercise.py."""

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from labs.attention_op import attention_python, checks, exercise

SIZES = (2, 3, 5, 7, 4, 8)  # B, H, S, T, D, W: all different, B·H too, so that a wrong axis is seen
SCALE = 0.5  # 1/√D
TERMS = checks.terms_of(SIZES)


def steps() -> list[tuple[str, str, Callable, list[Tensor], Tensor]]:
    """(name, formula, the student's function, its arguments, what autograd finds) of each step."""
    torch.manual_seed(1)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    q, k, v = (tensor.requires_grad_() for tensor in checks.random_inputs(SIZES))
    scores = SCALE * q @ k.mT
    weights = scores.softmax(-1)
    out = weights @ v
    y = F.gelu(x)

    y_grad = torch.randn_like(y)
    out_grad = torch.randn_like(out)
    (x_grad,) = torch.autograd.grad(y, x, y_grad)
    grads = torch.autograd.grad(out, [v, weights, scores, q, k], out_grad)
    v_grad, weights_grad, scores_grad, q_grad, k_grad = grads
    q, k, v, x, weights = (tensor.detach() for tensor in (q, k, v, x, weights))
    return [
        ("gelu_grad", "y = x Φ(x)", exercise.gelu_grad, [y_grad, x], x_grad),
        ("values_grad", "O = P V", exercise.values_grad, [out_grad, weights], v_grad),
        ("weights_grad", "O = P V", exercise.weights_grad, [out_grad, v], weights_grad),
        (
            "scores_grad",
            "P = softmax(A)",
            exercise.scores_grad,
            [weights_grad, weights],
            scores_grad,
        ),
        ("queries_grad", "A = s Q Kᵀ", exercise.queries_grad, [scores_grad, k, SCALE], q_grad),
        ("keys_grad", "A = s Q Kᵀ", exercise.keys_grad, [scores_grad, q, SCALE], k_grad),
    ]


def verdict(function: Callable, arguments: list[Tensor], expected: Tensor) -> str:
    """ "right", "not written yet", or what is wrong, in one line."""
    # Copies: a function that writes to its arguments must not spoil those of the next one.
    arguments = [each.clone() if isinstance(each, Tensor) else each for each in arguments]
    try:
        found = function(*arguments)
    except NotImplementedError:
        return "not written yet"
    except Exception as error:  # whatever a student's line may raise
        line = str(error).partition("\n")[0]
        return f"WRONG  {type(error).__name__}: {line}"
    if not isinstance(found, Tensor):
        return f"WRONG  it returns {type(found).__name__}; return a tensor"
    if found.shape != expected.shape:
        return f"WRONG  its shape is {tuple(found.shape)}; expected {tuple(expected.shape)}"
    error = checks.error(found, expected)
    if error <= checks.allowed(torch.float64, TERMS):
        return f"right  (largest error {error:.0e})"
    place = (found - expected).abs().nan_to_num(torch.inf).argmax()
    index = tuple(int(axis) for axis in torch.unravel_index(place, expected.shape))
    return f"WRONG  at {index} it is {found[index]:.4f}; autograd finds {expected[index]:.4f}"


class AttentionOfExercise(torch.autograd.Function):
    """Our forward pass and the student's steps 2 to 6."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """As `attention_python.Attention.forward`, without dropout."""
        return attention_python.Attention.forward(ctx, q, k, v, bias, None)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """∂O → ∂Q, ∂K, ∂V"""
        q, k, v, _, weights, _ = ctx.saved_tensors
        grad_v = exercise.values_grad(grad, weights)
        grad_weights = exercise.weights_grad(grad, v)
        grad_scores = exercise.scores_grad(grad_weights, weights)
        grad_q = exercise.queries_grad(grad_scores, k, ctx.scale)
        grad_k = exercise.keys_grad(grad_scores, q, ctx.scale)
        return grad_q, grad_k, grad_v, None


def gradients_of_all_steps() -> bool:
    """gradcheck of steps 2 to 6 together; the first query of all sees no key."""
    torch.manual_seed(2)
    inputs = [tensor.requires_grad_() for tensor in checks.random_inputs(SIZES)]
    bias = torch.zeros(SIZES[2], SIZES[3], dtype=torch.float64)
    bias[0] = -torch.inf

    def operator(*qkv: Tensor) -> Tensor:
        """Attention as a function of its three inputs alone."""
        return AttentionOfExercise.apply(*qkv, bias)

    return torch.autograd.gradcheck(operator, inputs, raise_exception=False)


def main() -> None:
    """Print a line per step. Exits with 1 unless all steps are right."""
    argparse.ArgumentParser(
        "python -m labs.attention_op.exercise",
        description="check the functions of exercise.py against autograd",
    ).parse_args()
    print(
        "Each function beside the gradient that autograd finds for its formula: random numbers in"
        f"\nfp64, (B, H, S, T, D, W) = {SIZES}. right: no number differs by more than"
        f"\n{checks.allowed(torch.float64, TERMS):.0e} of the largest.\n"
    )
    all_right = True
    for number, (name, formula, function, arguments, expected) in enumerate(steps(), 1):
        line = verdict(function, arguments, expected)
        print(f"{number}  {name:<14}{formula:<16}{line}")
        all_right = all_right and line.startswith("right")
    line = "waits for the steps above"
    if all_right:
        all_right = gradients_of_all_steps()
        line = "right  (gradcheck: numerical derivatives, one query that sees no key)"
        if not all_right:
            line = "WRONG  gradcheck finds other numerical derivatives"
    print(f"7  {'2 to 6 together':<30}{line}")
    sys.exit(0 if all_right else 1)
