"""Output projection and cross-entropy in one, a slice of rows at a time.

The logits are never all in memory at once.
N tokens, D model width, V vocabulary, R rows of one slice.
"""

import operator
from collections.abc import Callable
from functools import lru_cache
from threading import get_ident

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from fast import kernels
from fast.layers import has_hooks

LOGITS_AT_ONCE = {"cpu": 2**25, "cuda": 2**26}  # numbers in one slice: in fp32 128 and 256 MiB


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy in nats of the logits `hidden @ weight.T + bias`: (smoothed, plain).

    (N, D), (V, D), (V,), (N,) → two scalars; the plain one has no gradient. The same as

        log_p = F.linear(hidden, weight, bias).float().log_softmax(-1)
        plain = F.nll_loss(log_p, target, reduction="sum")
        smoothed = torch.lerp(plain, -log_p.mean(-1).sum(), label_smoothing)

    Products are in the format of autocast, if it is on. PyTorch's own `F.linear_cross_entropy`
    (since 2.13) keeps all logits if there is label smoothing.
    """
    dtype = autocast_dtype(hidden)
    needs_gradient = torch.is_grad_enabled()  # inside a Function it is always off
    with torch.autocast(hidden.device.type, enabled=False):
        return SlicedCrossEntropy.apply(
            hidden, weight, bias, target, label_smoothing, dtype, needs_gradient
        )


def is_cross_entropy(loss_of: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]) -> bool:
    """Whether `loss_of(logits, target, label_smoothing)` is the loss of `linear_cross_entropy`.

    It is asked for an example with 48 tokens, each of which is a target: both losses and the
    gradient must be right. A function that fails there, because it knows the real tokens, is
    another one.
    """
    tokens = 48
    with torch.inference_mode(False), torch.enable_grad():
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(2 * tokens, tokens, generator=generator, device="cpu").requires_grad_()
        target = torch.arange(2 * tokens, device="cpu") % tokens
        log_p = logits.log_softmax(-1)
        plain = F.nll_loss(log_p, target, reduction="sum")
        smoothed = torch.lerp(plain, -log_p.mean(-1).sum(), 0.1)
        (gradient,) = torch.autograd.grad(smoothed, logits)
        try:
            found = loss_of(logits, target, 0.1)
            found += torch.autograd.grad(found[0], logits)
            torch.testing.assert_close(found, (smoothed, plain, gradient), rtol=1e-4, atol=1e-4)
        except Exception:  # whatever a reader's function raises
            return False
    return True


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The format of matrix products with x: that of autocast where it is on, else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def can_slice(logits: Callable[[Tensor], Tensor], output: nn.Module) -> bool:
    """Whether `linear_cross_entropy` with the weights of `output` is the loss of these `logits`.

    It is where `logits(hidden)` is `output(hidden)` and nothing else, and `output` a plain
    `nn.Linear`. To see that, `logits` is called, and `F.linear` recorded instead of computed.

    Not in fp16, where gradients must be scaled before they are computed. Not for weights of 16
    bits, in which sums would be made. Not for FSDP2's sharded
    weights, which only `forward` of the whole model gathers. Not under torch.compile, which fuses
    the plain operations itself.
    """
    if torch.compiler.is_compiling() or type(output) is not nn.Linear or has_hooks(output):
        return False
    weight = output.weight
    is_sharded = hasattr(weight, "device_mesh")
    if is_sharded or output.bias is None:
        return False
    if autocast_dtype(weight) == torch.float16 or weight.dtype in (torch.float16, torch.bfloat16):
        return False
    hidden = weight.new_empty(1, output.in_features)
    with torch.no_grad(), RecordedLinear(hidden, output) as recorded:
        try:
            return logits(hidden) is recorded.result
        except MoreThanLinear:
            return False


class MoreThanLinear(Exception):
    """`logits` computes something else, too."""


class RecordedLinear(TorchFunctionMode):
    """Inside, `F.linear(hidden, weight, bias)` with just these tensors returns empty memory.

    All other functions of PyTorch raise `MoreThanLinear`: nothing is computed with made-up numbers,
    which a BatchNorm of the reader's would remember.
    """

    def __init__(self, hidden: Tensor, output: nn.Linear):
        super().__init__()
        self.inputs = (hidden, output.weight, output.bias)
        self.result = hidden.new_empty(1, output.out_features)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Called for every function of PyTorch."""
        if function is F.linear and len(args) == 3 and all(map(operator.is_, args, self.inputs)):
            return self.result
        raise MoreThanLinear


class SlicedCrossEntropy(torch.autograd.Function):
    """Computes the gradient of a slice of logits in the forward pass, uses it and drops it.

    With smoothing s, the loss of a token is −log p(target) + s · (logit of the target − mean
    logit), so the gradient of its logits is p − (1 − s) · [target] − s / V. The mean logit is the
    logit of the mean weight: it needs no pass over the logits.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, smoothing, dtype, needs_gradient):
        """Matrix products in `dtype`, sums in the format of the weights."""
        target = target.long()
        target_weight = F.embedding(target, weight)  # (N, D); raises for an id outside V
        narrow, narrow_weight = hidden.to(dtype), weight.to(dtype)
        loss_of = softmax_loss
        if hidden.device.type == "cpu" and bias.dtype == torch.float32 and kernels.compiled(dtype):
            loss_of = compiled_softmax_loss
            # Few different shapes for oneDNN; the additional rows are 0.
            narrow = F.pad(narrow, (0, 0, 0, kernels.rows_for(len(narrow)) - len(narrow)))

        mean_weight = weight.mean(0)  # (D,)
        hidden_sum = hidden.sum(0, dtype=weight.dtype)  # (D,)
        mean_logits = hidden_sum @ mean_weight + len(hidden) * bias.mean()  # summed over N tokens
        loss = torch.zeros_like(mean_logits)
        if needs_gradient:
            share = smoothing / len(weight)
            hidden_grad = torch.empty_like(narrow)  # (N, D)
            weight_grad = (-share * hidden_sum).repeat(len(weight), 1)  # (V, D)
            bias_grad = torch.full_like(bias, -share * len(hidden))  # (V,)

        rows = max(1, LOGITS_AT_ONCE[hidden.device.type] // len(weight))
        for first in range(0, len(hidden), rows):
            part = narrow[first : first + rows]  # (R, D)
            part_target = target[first : first + rows, None]  # (R, 1)
            p, p_sum, part_loss = loss_of(part, narrow_weight, bias, part_target, smoothing)
            loss += part_loss
            if needs_gradient:
                torch.mm(p, narrow_weight, out=hidden_grad[first : first + rows])
                weight_grad = add_product(weight_grad, p.t(), part)
                bias_grad += p_sum

        target_logits = (target_weight * hidden).sum(dtype=weight.dtype) + bias[target].sum()
        plain = loss - smoothing * target_logits
        smoothed = loss - smoothing * mean_logits
        ctx.mark_non_differentiable(plain)
        if needs_gradient:
            # The target's part is added in the format of the weights: bf16 would round 0.9 by
            # 0.2 %, for every token in the same direction.
            hidden_grad = hidden_grad[: len(hidden)]
            hidden_grad = hidden_grad - (1 - smoothing) * target_weight - smoothing * mean_weight
            weight_grad.index_add_(0, target, hidden.to(weight.dtype), alpha=smoothing - 1)
            ones = torch.ones_like(target, dtype=bias.dtype)
            bias_grad.index_add_(0, target, ones, alpha=smoothing - 1)
            ctx.save_for_backward(hidden_grad.to(hidden.dtype), weight_grad, bias_grad)
        return smoothed, plain

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, _):
        """The loss is a scalar: its gradient is a factor of all others."""
        gradients = (gradient * upstream for gradient in ctx.saved_tensors)
        return *gradients, None, None, None, None


def softmax_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(R, D), (V, D), (V,), (R, 1) → softmax (R, V), its sum over rows (V,), the loss.

    The loss is Σ −log p(target) + smoothing · logit of the target.
    """
    logits = F.linear(hidden, weight, bias.to(hidden.dtype))  # (R, V)
    loss = smoothing * logits.gather(1, target).sum(dtype=bias.dtype)
    p = logits.softmax(-1)  # (R, V)
    target_p = p.gather(1, target).clamp_min(torch.finfo(p.dtype).tiny)
    loss -= target_p.to(bias.dtype).log().sum()
    return p, p.sum(0, dtype=bias.dtype), loss


def compiled_softmax_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `softmax_loss`, by kernels.cpp.

    `hidden` may have more rows than `target`. These are 0 and add nothing to a gradient.
    """
    logits = torch.mm(hidden, weight.t(), out=workspace(len(hidden), len(weight), hidden.dtype))
    losses, p_sum = kernels.softmax_loss(logits, bias, target, smoothing)
    return logits, p_sum, losses.sum()


def workspace(rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """(R, V) of memory that every call reuses; the system would clear new memory page by page."""
    numbers = max(LOGITS_AT_ONCE["cpu"], vocabulary)
    # A tensor made in inference mode could not be written to outside it.
    with torch.inference_mode(False):
        memory = kept_memory(numbers, dtype, get_ident())
        return memory[: rows * vocabulary].view(rows, vocabulary)


@lru_cache(maxsize=1)
def kept_memory(numbers: int, dtype: torch.dtype, thread: int) -> Tensor:
    """The memory of the last thread that asked; another size, format or thread replaces it."""
    return torch.empty(numbers, dtype=dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, in place."""
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)
