"""What a training step does between two matrix products with weights, each in one pass over memory, with its gradient.

Every function has the plain PyTorch that computes the same beside it in its docstring. Tensors are on the CPU; "wide" ones are
fp32, "narrow" ones have the format of the matrix products, fp32 or bf16: results that go on to a product are given in both.
Dropout draws one seed from PyTorch's generator; masks follow from it and are never stored.

N tokens, D width, B sentences, T queries, S keys, V vocabulary. There may be more than B·T rows (see `rows_for`): those behind
the tokens are 0 where they come from an embedding or an attention, their gradients are 0, and nobody looks at them.
"""

import ctypes

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fast.build import FOLDER, call, library

NUMBERS = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
}  # formats of matrix products, and their names in C++


def kernels(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled functions for products in this format; None without a compiler, and for other formats."""
    return library(FOLDER / "kernels.cpp", NARROW=NUMBERS[dtype]) if dtype in NUMBERS else None


def rows_for(tokens: int) -> int:
    """How many rows to give so many tokens: at most an eighth more, and only 8 different numbers up to twice as many.

    oneDNN compiles code for each new shape of a product, and every batch of sentences would have a new one: a seventh to a
    quarter of a step.
    """
    step = max(1, (1 << (tokens - 1).bit_length()) // 16)
    return -(-tokens // step) * step


def embed(
    rows: Tensor, positions: Tensor, factor: float, p: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(B, T, D) rows of an embedding, (T, D) → wide and narrow (`rows_for` B·T, D): `dropout(rows * factor + positions, p)`."""
    return Embed.apply(rows, positions, float(factor), float(p), dtype)


def add_norm(
    residual: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    norm: torch.nn.LayerNorm,
    p: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Wide (N, D), narrow (N, D) → the sum `residual + dropout(branch + bias, p)`, wide, and its norm, wide and narrow."""
    return AddNorm.apply(residual, branch, bias, norm.weight, norm.bias, norm.eps, float(p), dtype)


def relu_dropout(x: Tensor, bias: Tensor, p: float) -> Tensor:
    """Narrow (N, D), which is overwritten → narrow (N, D): `dropout(relu(x + bias), p)`."""
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
    """Narrow (B·T, 3·D), query, key and value without their bias (3·D,); added mask (B, T) or None → narrow (B·T, D).

    `scaled_dot_product_attention` of the heads, put side by side again. `shape` is (B, T).
    """
    return Attention.apply(qkv, None, bias, mask, (*shape, shape[1]), heads, causal, float(p))


def cross_attention(
    q: Tensor, kv: Tensor, bias: Tensor, mask: Tensor, shape: tuple[int, int], heads: int, p: float
) -> Tensor:
    """Narrow (B·T, D), narrow (B·S, 2·D), (3·D,), added mask (B, S) → narrow (B·T, D), as `self_attention`."""
    return Attention.apply(q, kv, bias, mask, (*shape, mask.size(1)), heads, False, float(p))


def softmax_loss(
    logits: Tensor, bias: Tensor, target: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Narrow (N, V) without bias, overwritten by its softmax; (V,), (N,) → losses (N,) and sum of probabilities (V,), wide.

    A loss is logsumexp − (1 − smoothing) · logit of the target. No gradient: who calls makes it from the softmax. Rows of
    logits without a target stay as they are.
    """
    threads, tokens, vocabulary = torch.get_num_threads(), len(target), logits.size(1)
    losses, sums = bias.new_empty(tokens), bias.new_zeros(threads, vocabulary)
    call(
        kernels(logits.dtype).softmax_loss,
        logits,
        bias,
        target.contiguous(),
        losses,
        sums,
        tokens,
        vocabulary,
        float(smoothing),
        threads,
    )
    return losses, sums.sum(0)


def new_seed(p: float) -> int:
    """For the dropout of one call; nothing is drawn if nothing is dropped."""
    return int(torch.randint(2**63 - 1, ())) if p else 0


def both(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Two outputs for one result, and where the kernel writes the narrow one: with fp32 products both are the same memory."""
    return (
        (x.detach(), None)
        if dtype == x.dtype
        else (narrow := torch.empty_like(x, dtype=dtype), narrow)
    )


class Embed(Function):
    """See `embed`."""

    @staticmethod
    def forward(ctx, rows, positions, factor, p, dtype):
        """Both formats of the result."""
        width = rows.size(-1)
        tokens = rows.numel() // width
        wide = rows.new_empty(rows_for(tokens), width)
        narrow, written = both(wide, dtype)
        ctx.settings = (factor, p, new_seed(p))
        ctx.shape, ctx.kernels = rows.shape, kernels(dtype)
        call(
            ctx.kernels.embed,
            rows.contiguous(),
            positions.contiguous(),
            wide,
            written,
            tokens,
            len(positions),
            width,
            *ctx.settings,
            torch.get_num_threads(),
        )
        wide[tokens:] = narrow[tokens:] = 0
        ctx.set_materialize_grads(False)
        return wide, narrow

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, narrow_grad):
        """Of the rows."""
        rows_grad = torch.empty(ctx.shape, dtype=torch.float32)
        width = ctx.shape[-1]
        call(
            ctx.kernels.embed_backward,
            contiguous(grad),
            contiguous(narrow_grad),
            rows_grad,
            rows_grad.numel() // width,
            width,
            *ctx.settings,
            torch.get_num_threads(),
        )
        return rows_grad, None, None, None, None


class AddNorm(Function):
    """See `add_norm`."""

    @staticmethod
    def forward(ctx, residual, branch, bias, gain, shift, epsilon, p, dtype):
        """The sum, and both formats of its norm."""
        residual, branch = residual.contiguous(), contiguous(branch)
        total, wide = torch.empty_like(residual), torch.empty_like(residual)
        moments = residual.new_empty(
            len(residual), 2
        )  # mean and 1 / standard deviation of each row
        narrow, written = both(wide, dtype)
        ctx.settings, ctx.alone = (p, new_seed(p)), branch is None
        ctx.dtype, ctx.kernels = dtype, kernels(dtype)
        call(
            ctx.kernels.add_norm,
            residual,
            branch,
            bias,
            gain,
            shift,
            total,
            moments,
            wide,
            written,
            *residual.shape,
            epsilon,
            *ctx.settings,
            torch.get_num_threads(),
        )
        ctx.save_for_backward(total, moments, gain)
        ctx.set_materialize_grads(False)
        return total, wide, narrow

    @staticmethod
    @once_differentiable
    def backward(ctx, sum_grad, grad, narrow_grad):
        """Of the residual, the branch, its bias, the norm's gain and shift."""
        total, moments, gain = ctx.saved_tensors
        threads = torch.get_num_threads()
        residual_grad = torch.empty_like(total)
        branch_grad = None if ctx.alone else torch.empty_like(total, dtype=ctx.dtype)
        sums = total.new_zeros(threads, 3, total.size(1))
        call(
            ctx.kernels.add_norm_backward,
            contiguous(sum_grad),
            contiguous(grad),
            contiguous(narrow_grad),
            total,
            moments,
            gain,
            residual_grad,
            branch_grad,
            sums,
            *total.shape,
            *ctx.settings,
            threads,
        )
        bias_grad, gain_grad, shift_grad = sums.sum(0)
        return (
            residual_grad,
            branch_grad,
            None if ctx.alone else bias_grad,
            gain_grad,
            shift_grad,
            None,
            None,
            None,
        )


class ReluDropout(Function):
    """See `relu_dropout`."""

    @staticmethod
    def forward(ctx, x, bias, p):
        """In place."""
        if not x.is_contiguous():
            raise ValueError("relu_dropout overwrites its input, which must be contiguous")
        ctx.kernels = kernels(x.dtype)
        call(ctx.kernels.relu_dropout, x, bias, *x.shape, p, new_seed(p), torch.get_num_threads())
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.p = p
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Of x and its bias."""
        (y,) = ctx.saved_tensors
        threads = torch.get_num_threads()
        x_grad, sums = torch.empty_like(y), torch.zeros(threads, y.size(1), dtype=torch.float32)
        call(
            ctx.kernels.relu_dropout_backward,
            grad.contiguous(),
            y,
            x_grad,
            sums,
            *y.shape,
            ctx.p,
            threads,
        )
        return x_grad, sums.sum(0), None


class AttentionTask(ctypes.Structure):
    """`Attention` in kernels.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("q", "k", "v")]
    _fields_ += [(name, ctypes.c_int64) for name in ("q_stride", "kv_stride")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("q_bias", "k_bias", "v_bias", "mask")]
    _fields_ += [
        (name, ctypes.c_int64) for name in ("batch", "heads", "queries", "keys", "width", "causal")
    ]
    _fields_ += [("p", ctypes.c_double), ("seed", ctypes.c_int64)]


def split(first: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, (rows, D) each, of (rows, 3·D), or of (rows, D) and (rows, 2·D)."""
    return first.chunk(3, 1) if second is None else (first, *second.chunk(2, 1))


class Attention(Function):
    """See `self_attention` and `cross_attention`."""

    @staticmethod
    def forward(ctx, first, second, bias, mask, shape, heads, causal, p):
        """The weights themselves are not kept: the backward pass makes them again from the largest scores and the sums."""
        batch, queries, keys = shape
        ctx.settings = (
            batch,
            heads,
            queries,
            keys,
            len(bias) // 3 // heads,
            causal,
            p,
            new_seed(p),
        )
        out = first.new_empty(len(first), len(bias) // 3)
        stats = bias.new_empty(batch, heads, 2, queries)
        first, second, mask = first.contiguous(), contiguous(second), contiguous(mask)
        task = Attention.task(ctx, first, second, bias, mask)
        ctx.kernels = kernels(first.dtype)
        call(ctx.kernels.attention, task, out, stats, torch.get_num_threads())
        out[batch * queries :] = 0
        ctx.save_for_backward(first, second, bias, mask, stats)
        return out

    @staticmethod
    def task(ctx, first, second, bias, mask):
        """What the kernels are told."""
        q, k, v = split(first, second)
        addresses = (tensor.data_ptr() for tensor in (q, k, v))
        biases = (part.data_ptr() for part in bias.chunk(3))
        return AttentionTask(
            *addresses,
            q.stride(0),
            k.stride(0),
            *biases,
            None if mask is None else mask.data_ptr(),
            *ctx.settings,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Of query, key and value where they lie side by side, and of their bias."""
        first, second, bias, mask, stats = ctx.saved_tensors
        threads = torch.get_num_threads()
        first_grad, second_grad = (
            torch.empty_like(first),
            None if second is None else torch.empty_like(second),
        )
        sums = bias.new_zeros(threads, len(bias))
        call(
            ctx.kernels.attention_backward,
            Attention.task(ctx, first, second, bias, mask),
            grad.contiguous(),
            stats,
            *split(first_grad, second_grad),
            sums,
            threads,
        )
        batch, _, queries, keys, *_ = ctx.settings
        first_grad[batch * queries :] = 0
        if second_grad is not None:
            second_grad[batch * keys :] = 0
        return first_grad, second_grad, sums.sum(0), None, None, None, None, None


def contiguous(x: Tensor | None) -> Tensor | None:
    """As `Tensor.contiguous`, for what may be missing."""
    return None if x is None else x.contiguous()
