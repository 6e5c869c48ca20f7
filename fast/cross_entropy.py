"""The output projection and its cross-entropy in one, some rows at a time: all logits at once are never in memory.

N tokens, D model width, V vocabulary, R rows of one slice.
"""

from functools import lru_cache
from threading import get_ident

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fast import kernels

LOGITS_AT_ONCE = {"cpu": 2**25, "cuda": 2**26}  # numbers in one slice: 128 MiB, 256 MiB in fp32


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    target: Tensor,
    smoothing: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats of the logits `hidden @ weight.T + bias`, summed: (N, D), (V, D), (V,), (N,) → scalars.

    → the loss with label smoothing, and without (which has no gradient). The same as `F.cross_entropy` of `F.linear` with
    `reduction="sum"`; matrix products are in `dtype`. PyTorch's own `F.linear_cross_entropy` (since 2.13) holds all logits as
    soon as there is label smoothing.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return SlicedCrossEntropy.apply(
            hidden, weight, bias, target, smoothing, dtype, torch.is_grad_enabled()
        )


class SlicedCrossEntropy(torch.autograd.Function):
    """The gradient of a slice of logits follows from their softmax, so it is made, used and dropped in the forward pass.

    With smoothing s a token's loss is −log p(truth) + s · (logit of the truth − mean logit), so the gradient of its logits is
    p − (1 − s) · [truth] − s / V. The mean logit is the logit of the mean weight: it needs no pass over the logits.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, smoothing, dtype, wants_gradient):
        """Matrix products in `dtype`, sums in the format of the weights."""
        target = target.long()
        of_truth = F.embedding(target, weight)  # (N, D); raises if there is no such token
        narrow, narrow_weight = hidden.to(dtype), weight.to(dtype)
        compiled = (
            hidden.device.type == "cpu" and bias.dtype == torch.float32 and kernels.kernels(dtype)
        )
        loss_of = compiled_softmax_loss if compiled else softmax_loss
        if compiled:  # products of few different shapes; rows behind the tokens are 0
            narrow = F.pad(narrow, (0, 0, 0, kernels.rows_for(len(narrow)) - len(narrow)))
        share, mean_weight = smoothing / len(weight), weight.mean(0)  # (D,)
        hidden_sum = hidden.sum(0, dtype=weight.dtype)  # (D,)
        loss = -smoothing * (hidden_sum @ mean_weight + len(hidden) * bias.mean())
        if wants_gradient:
            hidden_grad = torch.empty_like(narrow)  # (N, D)
            weight_grad = (-share * hidden_sum).repeat(len(weight), 1)  # (V, D)
            bias_grad = torch.full_like(bias, -share * len(hidden))  # (V,)
        rows = max(1, LOGITS_AT_ONCE[hidden.device.type] // len(weight))
        for first in range(0, len(hidden), rows):
            slice_hidden, truth = (
                narrow[first : first + rows],
                target[first : first + rows, None],
            )  # (R, D), (R, 1)
            p, p_sum, slice_loss = loss_of(slice_hidden, narrow_weight, bias, truth, smoothing)
            loss += slice_loss
            if wants_gradient:
                torch.mm(p, narrow_weight, out=hidden_grad[first : first + rows])
                weight_grad = add_product(weight_grad, p.t(), slice_hidden)
                bias_grad += p_sum
        # What smoothing took from the truth, and gave to all tokens alike.
        truth_logits = (of_truth * hidden).sum(dtype=weight.dtype) + bias[target].sum()
        unsmoothed = loss - smoothing * (
            truth_logits - hidden_sum @ mean_weight - len(hidden) * bias.mean()
        )
        ctx.mark_non_differentiable(unsmoothed)
        if wants_gradient:
            # The truth's part apart, in the format of the weights: bf16 would round 0.9 by 0.2 % in every token alike.
            hidden_grad = (
                hidden_grad[: len(hidden)] - (1 - smoothing) * of_truth - smoothing * mean_weight
            )
            weight_grad.index_add_(0, target, hidden.to(weight.dtype), alpha=smoothing - 1)
            bias_grad.index_add_(
                0, target, torch.ones_like(target, dtype=bias.dtype), alpha=smoothing - 1
            )
            ctx.save_for_backward(hidden_grad.to(hidden.dtype), weight_grad, bias_grad)
        return loss, unsmoothed

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, _):
        """The gradients wait; a loss is a scalar, so they only need its own gradient as a factor."""
        return *(gradient * upstream for gradient in ctx.saved_tensors), None, None, None, None


def softmax_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor, truth: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(R, D), (V, D), (V,), (R, 1) → softmax (R, V), its sum over rows (V,), Σ −log p(truth) + smoothing · logit of the truth."""
    logits = F.linear(hidden, weight, bias.to(hidden.dtype))  # (R, V)
    loss = smoothing * logits.gather(1, truth).sum(dtype=bias.dtype)
    p = logits.softmax(-1)  # (R, V)
    loss -= p.gather(1, truth).clamp_min(torch.finfo(p.dtype).tiny).to(bias.dtype).log().sum()
    return p, p.sum(0, dtype=bias.dtype), loss


def compiled_softmax_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor, truth: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by kernels.cpp; of rows without a truth only the logits."""
    logits = torch.mm(hidden, weight.t(), out=workspace(len(hidden), len(weight), hidden.dtype))
    losses, p_sum = kernels.softmax_loss(logits, bias, truth, smoothing)
    return logits, p_sum, losses.sum()


def workspace(rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """(R, V) of memory that is used again and again; new memory the system would clear first, page by page."""
    numbers = max(LOGITS_AT_ONCE["cpu"], vocabulary)
    with torch.inference_mode(False):  # what is made inside could not be written to outside
        return kept_memory(numbers, dtype, get_ident())[: rows * vocabulary].view(rows, vocabulary)


@lru_cache(maxsize=1)
def kept_memory(numbers: int, dtype: torch.dtype, thread: int) -> Tensor:
    """The memory of the thread that asked last; another size, format or thread gets a new one, and the old one goes."""
    return torch.empty(numbers, dtype=dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, in place where the formats are the same."""
    return total.addmm_(left, right) if total.dtype == left.dtype else total.add_(left @ right)
