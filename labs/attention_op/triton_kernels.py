"""Attention for an NVIDIA GPU in Triton: `RecomputedAttention` with a program for each block (Dao et al. 2022; Tillet et al.
2019). The formulas are derived in attention_python.py.

N rows times heads (n: one of them), S queries, T keys, D width of queries and keys, W width of values. In a kernel
own_…: of the block that its program is for; some_…: of the block that its loop is at.

A GPU has no megabyte of fast memory for a core, so the keys too are gone through in blocks, and the softmax is made on the way:
with the scores seen so far it has a largest one m, a sum l = Σ exp(a − m) and an output Σ exp(a − m) v; a larger m′ multiplies
both sums by exp(m − m′) (Milakov and Gimelshein 2018). At the end the output is divided by l; kept are m and log l, the two
parts of ℓ.

Backward there are two kernels, so that no two programs add to the same number: one walks over the keys and sums ∂Q, the other
walks over the queries and sums ∂K and ∂V. Each makes the weights anew.

TRITON_INTERPRET=1 runs all of it on a CPU, slowly: so the tests check the arithmetic without a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import UserError
from labs.attention_op.attention_python import once, threshold

if torch.cuda.is_available():
    triton.runtime.driver.active.get_current_device()  # begins here, where it can be said that a compiler is missing

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
TYPES = (torch.float32, torch.float16, torch.bfloat16)


class TritonAttention(torch.autograd.Function):
    """Kept are the output and ℓ."""

    @staticmethod
    def forward(
        ctx, q, k, v, bias, causal: bool, scale: float, dropout: float, seed: Tensor | None
    ) -> Tensor:
        """As `Attention.forward`, contiguous tensors."""
        out = q.new_empty(*q.shape[:3], v.size(3))
        log_sum = q.new_empty(*q.shape[:2], 2, q.size(2), dtype=torch.float32)
        call = arguments(q, k, v, bias, causal, scale, dropout, seed)
        launch(forward_kernel, q, q.size(2), q, k, v, out, log_sum, **call)
        ctx.save_for_backward(q, k, v, bias, seed, out, log_sum)
        ctx.settings = causal, scale, dropout
        return out

    @staticmethod
    @once
    def backward(ctx, grad: Tensor):
        """As `Attention.backward`."""
        q, k, v, bias, seed, out, log_sum = ctx.saved_tensors
        grad = grad.contiguous()
        delta = (grad.float() * out.float()).sum(-1)  # (B, H, S)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        call = arguments(q, k, v, bias, *ctx.settings, seed)
        launch(grad_q_kernel, q, q.size(2), q, k, v, grad, log_sum, delta, grad_q, **call)
        own = block(q, v, min=8)
        launch(
            grad_kv_kernel,
            q,
            k.size(2),
            q,
            k,
            v,
            grad,
            log_sum,
            delta,
            grad_k,
            grad_v,
            **call,
            OWN=own,
        )
        return grad_q, grad_k, grad_v, None, None, None, None, None


def triton_attention(
    q, k, v, bias, causal: bool, scale: float, dropout: float, seed: Tensor | None
) -> Tensor:
    """`attention` in Triton. Raises `UserError` where it cannot run."""
    if not q.is_cuda and not triton.knobs.runtime.interpret:
        raise UserError(
            f"attention: 'triton' needs an NVIDIA GPU, the input is on {q.device}; choose 'cpp'"
        )
    if q.dtype not in TYPES:
        raise UserError(
            f"attention: 'triton' computes in fp32, fp16 and bf16, not in {q.dtype}; choose 'recompute'"
        )
    return TritonAttention.apply(
        q.contiguous(), k.contiguous(), v.contiguous(), bias, causal, scale, dropout, seed
    )


def arguments(
    q, k, v, bias, causal: bool, scale: float, dropout: float, seed: Tensor | None
) -> dict:
    """What all three kernels are told beside their tensors."""
    b, h, s, t = *q.shape[:3], k.size(2)
    strides = (0, 0, 0, 0) if bias is None else bias.expand(b, h, s, t).stride()
    return dict(
        bias=q if bias is None else bias,  # a tensor that is not read still has to be one
        seed=q if seed is None else seed,
        bias_b=strides[0],
        bias_h=strides[1],
        bias_s=strides[2],
        bias_t=strides[3],
        H=h,
        S=s,
        T=t,
        D=q.size(3),
        W=v.size(3),
        scale=scale,
        threshold=threshold(dropout),
        kept=1 / (1 - dropout),
        HAS_BIAS=bias is not None,
        CAUSAL=causal,
        DROPS=dropout > 0,
        BLOCK=block(q, v),
        WIDE_D=wide(q.size(3)),
        WIDE_W=wide(v.size(3)),
    )


def wide(width: int) -> int:
    """Blocks have powers of two, at least 16, as their widths."""
    return max(16, triton.next_power_of_2(width))


def block(q: Tensor, v: Tensor, least: int = 16) -> int:
    """Queries, and keys, of a block: 64, less where the factors of the products need more of the memory that a program shares
    (64 KiB on a 2080 Ti, 99 on a 3090, 163 on an A100). Sums over a block need 16 numbers; the keys that own the sums do not."""
    widest = max(wide(q.size(3)), wide(v.size(3)))
    small_card = q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0)
    halvings = (q.dtype == torch.float32) + small_card + (widest > 64) + (widest > 128)
    return max(least, 64 >> halvings)


def launch(kernel, q: Tensor, length: int, *tensors: Tensor, **call) -> None:
    """A program for every block of `length` of every row and head."""
    blocks = triton.cdiv(length, call.get("OWN", call["BLOCK"]))
    if q.size(0) * q.size(1) * blocks:
        with torch.cuda.device_of(
            q
        ):  # Triton takes the current GPU, whose memory the tensors may not be in
            kernel[(q.size(0) * q.size(1) * blocks,)](*tensors, **call)


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    out,
    log_sum,
    bias,
    seed,
    bias_b,
    bias_h,
    bias_s,
    bias_t,
    H,
    S,
    T,
    D,
    W,
    scale,
    threshold,
    kept,
    HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_W: tl.constexpr,
):
    """The output, m and log l of a block of queries."""
    n, first = whose_block(S, BLOCK)
    rows = first + tl.arange(0, BLOCK)
    own_q = load_block(q, n, rows, S, D, WIDE_D)
    bias_of_head = bias + n // H * bias_b + n % H * bias_h
    peak = tl.full((BLOCK,), LOWEST, tl.float32)  # not -inf: -inf − -inf is nan
    total = tl.zeros((BLOCK,), tl.float32)
    seen = tl.zeros((BLOCK, WIDE_W), tl.float32)
    last = tl.minimum(T, first + BLOCK) if CAUSAL else T
    for key in range(0, last, BLOCK):
        cols = key + tl.arange(0, BLOCK)
        a = scores(
            own_q,
            load_block(k, n, cols, T, D, WIDE_D),
            bias_of_head,
            bias_s,
            bias_t,
            rows,
            cols,
            S,
            T,
            scale,
            HAS_BIAS,
            CAUSAL,
        )
        higher = tl.maximum(peak, tl.max(a, 1))
        weights = tl.exp(a - higher[:, None])
        shrink = tl.exp(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        if DROPS:
            weights *= factors(seed, n, rows, cols, S, threshold, kept)
        some_v = load_block(v, n, cols, T, W, WIDE_W)
        seen = seen * shrink[:, None] + tl.dot(
            weights.to(some_v.dtype), some_v, input_precision="ieee"
        )
        peak = higher
    total = tl.where(total > 0, total, 1.0)  # a row that sees nothing gets 0 / 1
    store_block(out, n, rows, S, W, WIDE_W, seen / total[:, None])
    tl.store(log_sum + 2 * n * S + rows, peak, mask=rows < S)
    tl.store(log_sum + (2 * n + 1) * S + rows, tl.log(total), mask=rows < S)


@triton.jit
def grad_q_kernel(
    q,
    k,
    v,
    grad,
    log_sum,
    delta,
    grad_q,
    bias,
    seed,
    bias_b,
    bias_h,
    bias_s,
    bias_t,
    H,
    S,
    T,
    D,
    W,
    scale,
    threshold,
    kept,
    HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_W: tl.constexpr,
):
    """∂Q of a block of queries."""
    n, first = whose_block(S, BLOCK)
    rows = first + tl.arange(0, BLOCK)
    own_q, own_grad = load_block(q, n, rows, S, D, WIDE_D), load_block(grad, n, rows, S, W, WIDE_W)
    own_peak, own_log = load_row(log_sum, 2 * n, rows, S), load_row(log_sum, 2 * n + 1, rows, S)
    own_delta = load_row(delta, n, rows, S)
    bias_of_head = bias + n // H * bias_b + n % H * bias_h
    sum_q = tl.zeros((BLOCK, WIDE_D), tl.float32)
    last = tl.minimum(T, first + BLOCK) if CAUSAL else T
    for key in range(0, last, BLOCK):
        cols = key + tl.arange(0, BLOCK)
        some_k, some_v = load_block(k, n, cols, T, D, WIDE_D), load_block(v, n, cols, T, W, WIDE_W)
        a = scores(
            own_q, some_k, bias_of_head, bias_s, bias_t, rows, cols, S, T, scale, HAS_BIAS, CAUSAL
        )
        weights = tl.exp(a - own_peak[:, None] - own_log[:, None])
        grad_p = tl.dot(own_grad, tl.trans(some_v), input_precision="ieee")
        if DROPS:
            grad_p *= factors(seed, n, rows, cols, S, threshold, kept)
        grad_a = weights * (grad_p - own_delta[:, None]) * scale
        sum_q += tl.dot(grad_a.to(some_k.dtype), some_k, input_precision="ieee")
    store_block(grad_q, n, rows, S, D, WIDE_D, sum_q)


@triton.jit
def grad_kv_kernel(
    q,
    k,
    v,
    grad,
    log_sum,
    delta,
    grad_k,
    grad_v,
    bias,
    seed,
    bias_b,
    bias_h,
    bias_s,
    bias_t,
    H,
    S,
    T,
    D,
    W,
    scale,
    threshold,
    kept,
    HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    DROPS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE_D: tl.constexpr,
    WIDE_W: tl.constexpr,
    OWN: tl.constexpr,
):
    """∂K and ∂V of a block of keys."""
    n, first = whose_block(T, OWN)
    cols = first + tl.arange(0, OWN)
    own_k, own_v = load_block(k, n, cols, T, D, WIDE_D), load_block(v, n, cols, T, W, WIDE_W)
    bias_of_head = bias + n // H * bias_b + n % H * bias_h
    sum_k, sum_v = tl.zeros((OWN, WIDE_D), tl.float32), tl.zeros((OWN, WIDE_W), tl.float32)
    begin = first if CAUSAL else 0  # earlier queries do not see these keys
    for query in range(begin, S, BLOCK):
        rows = query + tl.arange(0, BLOCK)
        some_q, some_grad = (
            load_block(q, n, rows, S, D, WIDE_D),
            load_block(grad, n, rows, S, W, WIDE_W),
        )
        a = scores(
            some_q, own_k, bias_of_head, bias_s, bias_t, rows, cols, S, T, scale, HAS_BIAS, CAUSAL
        )
        some_peak, some_log = (
            load_row(log_sum, 2 * n, rows, S),
            load_row(log_sum, 2 * n + 1, rows, S),
        )
        weights = tl.exp(a - some_peak[:, None] - some_log[:, None])
        grad_p = tl.dot(some_grad, tl.trans(own_v), input_precision="ieee")
        grad_a = weights * scale
        if DROPS:
            z = factors(seed, n, rows, cols, S, threshold, kept)
            grad_p *= z
            weights *= z
        grad_a *= grad_p - load_row(delta, n, rows, S)[:, None]
        # Queries beyond the last have been read as zeros, and so has their ∂O: they add nothing.
        sum_v += tl.dot(tl.trans(weights.to(some_grad.dtype)), some_grad, input_precision="ieee")
        sum_k += tl.dot(tl.trans(grad_a.to(some_q.dtype)), some_q, input_precision="ieee")
    store_block(grad_k, n, cols, T, D, WIDE_D, sum_k)
    store_block(grad_v, n, cols, T, W, WIDE_W, sum_v)


@triton.jit
def whose_block(length, BLOCK: tl.constexpr):
    """Which row and head this program works for, and its first query or key."""
    blocks = tl.cdiv(length, BLOCK)
    number = tl.program_id(0)
    return (number // blocks).to(
        tl.int64
    ), number % blocks * BLOCK  # 64 bits: addresses are multiples of it


@triton.jit
def scores(
    q,
    k,
    bias,
    bias_s,
    bias_t,
    rows,
    cols,
    S,
    T,
    scale,
    HAS_BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """s Q Kᵀ + M of a block, -inf beyond the last key."""
    a = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # "ieee": no TF32 for fp32
    inside = (cols < T)[None, :]
    if HAS_BIAS:
        where = rows[:, None].to(tl.int64) * bias_s + cols[None, :] * bias_t
        a += tl.load(bias + where, mask=(rows < S)[:, None] & inside, other=0.0)
    if CAUSAL:
        inside = inside & (cols[None, :] <= rows[:, None])
    return tl.where(inside, a, float("-inf"))


@triton.jit
def factors(seed, n, rows, cols, S, threshold, kept):
    """Z of a block: see `dropout_factors` in attention_python.py, which draws the same."""
    first, second = (
        tl.load(seed).to(tl.uint32, bitcast=True),
        tl.load(seed + 1).to(tl.uint32, bitcast=True),
    )
    row_key = mix(mix((n * S + rows).to(tl.uint32) + first) ^ second)
    draw = mix(row_key[:, None] ^ cols[None, :].to(tl.uint32))
    return tl.where(draw.to(tl.int32, bitcast=True) >= threshold, kept, 0.0)


@triton.jit
def mix(x):
    """lowbias32"""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def load_block(x, n, rows, length, width, WIDE: tl.constexpr):
    """Rows of x (N, length, width), zeros beyond its edges: (BLOCK, WIDE)"""
    columns = tl.arange(0, WIDE)
    where = (n * length + rows)[:, None] * width + columns[None, :]
    return tl.load(x + where, mask=(rows < length)[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def store_block(x, n, rows, length, width, WIDE: tl.constexpr, block):
    """The reverse."""
    columns = tl.arange(0, WIDE)
    where = (n * length + rows)[:, None] * width + columns[None, :]
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    tl.store(x + where, block.to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_row(x, n, rows, length):
    """Numbers of x (N, length), zeros beyond its edge: (BLOCK,)"""
    return tl.load(x + n * length + rows, mask=rows < length, other=0.0)
