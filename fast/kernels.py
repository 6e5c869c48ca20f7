"""What a training step computes between two products with weights, each as one C++ function.

Every function's docstring gives the PyTorch code that computes the same. Tensors are on the CPU.
"Wide" tensors are fp32; "narrow" ones have the format of the matrix products, fp32 or bf16. A
result that is the input of a product is returned in both. Dropout draws one seed from PyTorch's
generator for each call; masks follow from the seed and are never stored.

N tokens, D width, B sentences, T queries, S keys, V vocabulary. D, the width of a head and that of
the feed-forward layers are multiples of 16, which C++ does not check. There may be more than B·T
rows (see `rows_for`): the additional ones are 0 where they come from `pad_rows` or an attention,
their gradients are 0, and nothing reads them.
"""

import ctypes

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fast.build import FOLDER, call, library, round_up

# Formats of matrix products, and their names in C++.
NUMBERS = {torch.float32: "float", torch.bfloat16: "bf16"}


def compiled(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled functions for products in this format; None if there are none."""
    if dtype not in NUMBERS:
        return None
    return library(FOLDER / "kernels.cpp", NARROW=NUMBERS[dtype])


def rows_for(tokens: int) -> int:
    """The number of rows to allocate for `tokens` tokens: at most an eighth more.

    oneDNN compiles code for every new shape of a product, which would take a seventh to a quarter
    of a step. Between n and 2 n there are only 8 different results.
    """
    step = max(1, (1 << (tokens - 1).bit_length()) // 16)
    return round_up(tokens, step)


def pad_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`F.pad(x.flatten(0, 1), …)`: wide (B, T, D) → wide and narrow (`rows_for(B·T)`, D)

    The additional rows are 0.
    """
    return PadRows.apply(x, dtype)


def unpad_rows(rows: Tensor, shape: torch.Size) -> Tensor:
    """`rows[: B · T].view(shape)`: wide (N, D) → (B, T, D)"""
    return UnpadRows.apply(rows, shape)


def add_norm(
    residual: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    norm: torch.nn.LayerNorm,
    p: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`total = residual + dropout(branch + bias, p)` and `norm(total)`

    Wide (N, D), narrow (N, D), (D,) → total, wide; its norm, wide and narrow
    """
    return AddNorm.apply(residual, branch, bias, norm.weight, norm.bias, norm.eps, float(p), dtype)


def relu_dropout(x: Tensor, bias: Tensor, p: float) -> Tensor:
    """`dropout(relu(x + bias), p)`; x, narrow (N, D), is overwritten by it."""
    return ReluDropout.apply(x, bias, float(p))


def self_attention(
    qkv: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    shape: tuple[int, int],
    heads: int,
    causal: bool,
    p: float,
) -> Tensor:
    """`scaled_dot_product_attention` of all heads, which are then put side by side.

    Query, key and value without their bias, narrow (B·T, 3·D); their bias (3·D,); the mask that is
    added to the scores (B, T) → narrow (B·T, D). `shape` is (B, T).
    """
    return Attention.apply(qkv, None, bias, mask, (*shape, shape[1]), heads, causal, float(p))


def cross_attention(
    q: Tensor,
    kv: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    shape: tuple[int, int, int],
    heads: int,
    p: float,
) -> Tensor:
    """As `self_attention`: narrow (B·T, D), narrow (B·S, 2·D), (3·D,), (B, S) → narrow (B·T, D)

    `shape` is (B, T, S).
    """
    return Attention.apply(q, kv, bias, mask, shape, heads, False, float(p))


def softmax_loss(
    logits: Tensor, bias: Tensor, target: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Narrow (N, V) logits without bias, (V,), (N,) → losses (N,), sum of probabilities (V,)

    A loss is logsumexp − (1 − smoothing) · logit of the target. The logits are overwritten by their
    softmax, from which the caller makes the gradient; rows without a target stay as they are.
    """
    threads = torch.get_num_threads()
    tokens, vocabulary = len(target), logits.size(1)
    losses = bias.new_empty(tokens)
    sums = bias.new_zeros(threads, vocabulary)
    function = compiled(logits.dtype).softmax_loss
    inputs = (logits, bias, target.contiguous())
    call(function, *inputs, losses, sums, tokens, vocabulary, float(smoothing), threads)
    return losses, sums.sum(0)


def new_seed(p: float) -> int:
    """The seed of one dropout; nothing is drawn if nothing is dropped."""
    return int(torch.randint(2**63 - 1, ())) if p else 0


def narrow_like(wide: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A narrow tensor for the same values, and where the C++ function writes it.

    With fp32 products both formats share one memory, and the function writes no second one.
    """
    if dtype == wide.dtype:
        return wide.detach(), None
    narrow = torch.empty_like(wide, dtype=dtype)
    return narrow, narrow


def contiguous(x: Tensor | None) -> Tensor | None:
    """As `Tensor.contiguous`; None stays None."""
    return None if x is None else x.contiguous()


class PadRows(Function):
    """See `pad_rows`."""

    @staticmethod
    def forward(ctx, x, dtype):
        """→ the rows, wide and narrow"""
        width = x.size(-1)
        wide = x.new_empty(rows_for(x.numel() // width), width)
        narrow, written = narrow_like(wide, dtype)
        ctx.shape = x.shape
        ctx.kernels = compiled(dtype)
        copy_rows(ctx.kernels, x.contiguous(), None, wide, written)
        ctx.set_materialize_grads(False)
        return wide, narrow

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, narrow_grad):
        """→ the gradient of x, the sum of both"""
        x_grad = torch.empty(ctx.shape, dtype=torch.float32)
        rows = x_grad.view(-1, ctx.shape[-1])
        copy_rows(ctx.kernels, contiguous(grad), contiguous(narrow_grad), rows, None)
        return x_grad, None


class UnpadRows(Function):
    """See `unpad_rows`."""

    @staticmethod
    def forward(ctx, rows, shape):
        """→ (B, T, D)"""
        ctx.rows = len(rows)
        return rows[: shape[0] * shape[1]].view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """→ the gradient of the rows, 0 for the additional ones"""
        width = grad.size(-1)
        if grad.numel() == ctx.rows * width:
            return grad.reshape(ctx.rows, width), None
        rows_grad = grad.new_empty(ctx.rows, width)
        copy_rows(compiled(torch.float32), grad.contiguous(), None, rows_grad, None)
        return rows_grad, None


def copy_rows(functions, wide, narrow, to, narrow_to) -> None:
    """The sum of `wide` and `narrow`, one of which may be None, → `to` and, if given, `narrow_to`.

    If there are fewer rows than in `to`, the others become 0.
    """
    width = to.size(-1)
    given = wide if wide is not None else narrow
    rows = min(len(to), given.numel() // width)
    sizes = (rows, len(to), width, torch.get_num_threads())
    call(functions.copy_rows, wide, narrow, to, narrow_to, *sizes)


class AddNorm(Function):
    """See `add_norm`."""

    @staticmethod
    def forward(ctx, residual, branch, bias, gain, shift, epsilon, p, dtype):
        """→ the sum; its norm, wide and narrow"""
        residual, branch = residual.contiguous(), contiguous(branch)
        total, wide = torch.empty_like(residual), torch.empty_like(residual)
        moments = residual.new_empty(len(residual), 2)  # mean and 1 / standard deviation of a row
        narrow, written = narrow_like(wide, dtype)
        ctx.has_branch = branch is not None
        ctx.dtype = dtype
        ctx.kernels = compiled(dtype)
        ctx.settings = (p, new_seed(p))
        tensors = (residual, branch, bias, gain, shift, total, moments, wide, written)
        numbers = (*residual.shape, epsilon, *ctx.settings)
        call(ctx.kernels.add_norm, *tensors, *numbers, torch.get_num_threads())
        ctx.save_for_backward(total, moments, gain)
        ctx.set_materialize_grads(False)
        return total, wide, narrow

    @staticmethod
    @once_differentiable
    def backward(ctx, sum_grad, grad, narrow_grad):
        """→ the gradients of residual, branch, its bias, and the norm's gain and shift"""
        total, moments, gain = ctx.saved_tensors
        threads = torch.get_num_threads()
        residual_grad = torch.empty_like(total)
        branch_grad = torch.empty_like(total, dtype=ctx.dtype) if ctx.has_branch else None
        sums = total.new_zeros(threads, 3, total.size(1))
        upstream = (contiguous(sum_grad), contiguous(grad), contiguous(narrow_grad))
        tensors = (*upstream, total, moments, gain, residual_grad, branch_grad, sums)
        call(ctx.kernels.add_norm_backward, *tensors, *total.shape, *ctx.settings, threads)
        bias_grad, gain_grad, shift_grad = sums.sum(0)
        if not ctx.has_branch:
            bias_grad = None
        return residual_grad, branch_grad, bias_grad, gain_grad, shift_grad, None, None, None


class ReluDropout(Function):
    """See `relu_dropout`."""

    @staticmethod
    def forward(ctx, x, bias, p):
        """→ x, overwritten"""
        if not x.is_contiguous():
            raise ValueError("relu_dropout overwrites its input, which must be contiguous")
        ctx.kernels = compiled(x.dtype)
        call(ctx.kernels.relu_dropout, x, bias, *x.shape, p, new_seed(p), torch.get_num_threads())
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.p = p
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """→ the gradients of x and the bias"""
        (y,) = ctx.saved_tensors
        threads = torch.get_num_threads()
        x_grad = torch.empty_like(y)
        sums = torch.zeros(threads, y.size(1), dtype=torch.float32)
        tensors = (grad.contiguous(), y, x_grad, sums)
        call(ctx.kernels.relu_dropout_backward, *tensors, *y.shape, ctx.p, threads)
        return x_grad, sums.sum(0), None


class AttentionTask(ctypes.Structure):
    """The struct `Attention` of kernels.cpp."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("kv_stride", ctypes.c_int64),
        ("q_bias", ctypes.c_void_p),
        ("k_bias", ctypes.c_void_p),
        ("v_bias", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("queries", ctypes.c_int64),
        ("keys", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("causal", ctypes.c_int64),
        ("p", ctypes.c_double),
        ("seed", ctypes.c_int64),
    ]


def split(first: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, (rows, D) each, from (rows, 3·D), or from (rows, D) and (rows, 2·D)."""
    if second is None:
        return first.chunk(3, 1)
    return first, *second.chunk(2, 1)


class Attention(Function):
    """See `self_attention` and `cross_attention`.

    The attention weights are not kept: the backward pass computes them again from the largest score
    and the sum of each query.
    """

    @staticmethod
    def forward(ctx, first, second, bias, mask, shape, heads, causal, p):
        """→ the result, narrow (B·T, D)"""
        batch, queries, keys = shape
        width = len(bias) // 3
        ctx.settings = (batch, heads, queries, keys, width // heads, causal, p, new_seed(p))
        ctx.kernels = compiled(first.dtype)
        out = first.new_empty(len(first), width)
        stats = bias.new_empty(batch, heads, 2, queries)
        first, second, mask = first.contiguous(), contiguous(second), contiguous(mask)
        task = Attention.task(ctx, first, second, bias, mask)
        call(ctx.kernels.attention, task, out, stats, torch.get_num_threads())
        out[batch * queries :] = 0
        ctx.save_for_backward(first, second, bias, mask, stats)
        return out

    @staticmethod
    def task(ctx, first, second, bias, mask) -> AttentionTask:
        """The arguments of both C++ functions."""
        q, k, v = split(first, second)
        addresses = [tensor.data_ptr() for tensor in (q, k, v)]
        bias_addresses = [part.data_ptr() for part in bias.chunk(3)]
        mask_address = None if mask is None else mask.data_ptr()
        strides = (q.stride(0), k.stride(0))
        return AttentionTask(*addresses, *strides, *bias_addresses, mask_address, *ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """→ the gradients of query, key and value, side by side as they came, and of the bias"""
        first, second, bias, mask, stats = ctx.saved_tensors
        threads = torch.get_num_threads()
        task = Attention.task(ctx, first, second, bias, mask)
        first_grad = torch.empty_like(first)
        second_grad = None if second is None else torch.empty_like(second)
        sums = bias.new_zeros(threads, len(bias))
        gradients = split(first_grad, second_grad)
        function = ctx.kernels.attention_backward
        call(function, task, grad.contiguous(), stats, *gradients, sums, threads)
        batch, _, queries, keys, *_ = ctx.settings
        first_grad[batch * queries :] = 0
        if second_grad is not None:
            second_grad[batch * keys :] = 0
        return first_grad, second_grad, sums.sum(0), None, None, None, None, None
