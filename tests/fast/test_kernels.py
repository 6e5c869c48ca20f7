"""The kernels of a training step: their dropout, their edges, their threads.

test_training.py holds results and gradients of all of them against PyTorch's.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import needs_compiler

from fast import kernels as native


def numbers(seed, *shapes):
    """A random tensor for each shape."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def results(function, *inputs):
    """The output of a function and the gradients of its inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    (out * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum().backward()
    return [out, *(x.grad for x in inputs)]


@given(st.integers(0, 10**6))
def test_few_numbers_of_rows(tokens):
    rows = native.rows_for(tokens)
    assert tokens <= rows <= tokens * 9 / 8
    assert native.rows_for(rows) == rows
    assert len({native.rows_for(count) for count in range(2049, 4097)}) == 8


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_behind_the_tokens_are_zero_and_change_nothing(dtype):
    batch, length, keys, d = 3, 23, 12, 32  # 69 tokens have 72 rows
    mask = torch.zeros(batch, keys)
    mask[-1, 6:] = torch.finfo(torch.float32).min / 2
    words, kv, bias = numbers(0, (batch, length, d), (batch * keys, 2 * d), (3 * d,))
    words.requires_grad_()
    wide, x = native.pad_rows(words, dtype)
    assert len(wide) == len(x) == 72
    assert wide[69:].eq(0).all() and x[69:].eq(0).all()
    assert torch.equal(native.unpad_rows(wide, words.shape), words)
    assert torch.equal(x[:69], words.flatten(0, 1).to(dtype))
    (native.unpad_rows(wide, words.shape).sum() + 3 * x.float().sum()).backward()
    assert words.grad.eq(4).all()
    longer_kv = torch.cat([kv, torch.full((5, 2 * d), 7.0)]).to(dtype)

    def outputs(q, kv):
        """Both attentions, and the gradients of their inputs."""
        qkv, q, kv = (y.detach().clone().requires_grad_() for y in (q.repeat(1, 3), q, kv))
        own = native.self_attention(qkv, bias, None, (batch, length), 2, True, 0.0)
        other = native.cross_attention(q, kv, bias, mask, (batch, length, keys), 2, 0.0)
        (own.float().square().sum() + other.float().square().sum()).backward()
        return own, other, qkv.grad, q.grad, kv.grad

    both = zip(outputs(x, longer_kv), outputs(x[:69], kv.to(dtype)), strict=True)
    for found, expected in both:
        assert expected.ne(0).any()
        assert torch.equal(found[: len(expected)], expected)
        assert found[len(expected) :].eq(0).all()


@needs_compiler
def test_dropout_of_attention_is_the_same_forward_and_backward():
    """Values of the identity show the weights; the factors found so give PyTorch's result."""
    batch, heads, width, length, p = 2, 2, 48, 41, 0.3
    d = heads * width
    bias = torch.zeros(3 * d)
    (qkv,) = numbers(0, (batch * length, 3 * d))
    identity = torch.zeros(batch, length, heads, width)
    identity[:, torch.arange(length), :, torch.arange(length)] = 1
    probe = torch.cat([qkv[:, : 2 * d], identity.view(batch * length, d)], 1)

    def kernel(x, p=p):
        torch.manual_seed(7)
        return native.self_attention(x, bias, None, (batch, length), heads, True, p)

    def weights_at(rate):
        """(B, H, T, S)"""
        with torch.no_grad():
            weights = kernel(probe, rate).view(batch, length, heads, width)
        return weights[..., :length].transpose(1, 2)

    weights = weights_at(0.0)
    factors = torch.where(weights > 0, weights_at(p) / weights, 0.0)
    found = factors[weights > 1e-6]
    assert ((found == 0) | ((found - 1 / (1 - p)).abs() < 1e-4)).all()
    assert (found == 0).double().mean().item() == pytest.approx(p, abs=0.02)

    def plain(x):
        """The definition of causal attention, with these factors of the weights."""
        q, k, v = x.view(batch, length, 3, heads, width).permute(2, 0, 3, 1, 4)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ k.mT / width**0.5).masked_fill(future, -torch.inf)
        return ((scores.softmax(-1) * factors) @ v).transpose(1, 2).reshape(batch * length, d)

    for found, expected in zip(results(kernel, qkv), results(plain, qkv), strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("p, dtype", [(0.1, torch.float32), (0.9, torch.bfloat16)])
def test_dropout_rate_and_mask(p, dtype):
    """The input is 1 everywhere, so the output and the gradient are the factors."""
    tokens, width = 208, 336  # `rows_for` adds none

    def call(x):
        return native.relu_dropout(x.clone(), torch.zeros(width), p)

    torch.manual_seed(3)
    x = torch.ones(tokens, width, dtype=dtype).requires_grad_()
    y = call(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    factor = torch.tensor(1 / (1 - p)).to(dtype).item()
    assert set(y.detach().unique().tolist()) == {0.0, factor}
    dropped = (y == 0).double()
    spread = (p * (1 - p)) ** 0.5
    assert dropped.mean().item() == pytest.approx(p, abs=4 * spread / y.numel() ** 0.5)
    # No row or column is preferred.
    assert (dropped.mean(0) - p).abs().max() < 5 * spread / tokens**0.5
    assert (dropped.mean(1) - p).abs().max() < 5 * spread / width**0.5
    assert 0 < (call(x) == y).double().mean() < 1  # another call, another seed


@needs_compiler
def test_dropout_of_a_branch():
    norm = torch.nn.LayerNorm(96)
    p = 0.25
    residual, branch, bias = (x.requires_grad_() for x in numbers(5, (50, 96), (50, 96), (96,)))
    torch.manual_seed(5)
    _, y, _ = native.add_norm(residual, branch, bias, norm, p, torch.float32)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    factors = branch.grad / residual.grad  # the sum passes the same gradient to both
    assert ((factors == 0) | ((factors - 1 / (1 - p)).abs() < 1e-5)).all()
    assert 0.2 < (factors == 0).double().mean() < 0.3
    assert torch.allclose(y, norm(residual + (branch + bias) * factors), atol=1e-5)
    assert torch.allclose(bias.grad, branch.grad.sum(0), atol=1e-5)


@needs_compiler
def test_a_row_of_logits_that_begins_far_below_its_end():
    bias = torch.zeros(20)
    bias[0] = -1e10
    logits = torch.full((1, 20), -10.0)
    logits[0, 17] = 150
    losses, _ = native.softmax_loss(logits, bias, torch.tensor([17]), 0.0)
    assert losses.item() == 0
    assert logits[0, 17] == 1


@needs_compiler
def test_nan_is_kept():
    x = torch.tensor([[1.0, torch.nan, -torch.inf, torch.inf] * 4])
    y = native.relu_dropout(x, torch.zeros(16), 0.0)
    assert y.isnan().tolist() == [[False, True, False, False] * 4]
    # Rounding to bf16 must not carry the bits of a NaN into the exponent or the sign.
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF] * 8, dtype=torch.int32)
    nan = bits.view(torch.float32).view(1, 1, 16)
    _, narrow = native.pad_rows(nan, torch.bfloat16)
    assert narrow.isnan().all()
    (qkv,) = numbers(0, (5, 48))
    qkv[0, 3] = torch.nan
    assert native.self_attention(qkv, torch.zeros(48), None, (1, 5), 1, False, 0.0).isnan().any()


@needs_compiler
def test_as_many_threads_as_pytorch_has():
    """The number of threads changes sums over tokens by rounding, and nothing else."""
    inputs = numbers(0, (3 * 40, 96), (96,))

    def kernel(x, bias):
        torch.manual_seed(2)
        return native.self_attention(x, bias, None, (3, 40), 2, False, 0.2)

    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)  # a fixture resets it
        found.append(results(kernel, *inputs))
    first_out, first_grad, first_bias_grad = found[0]
    for out, grad, bias_grad in found[1:]:
        assert torch.equal(out, first_out)
        assert torch.equal(grad, first_grad)
        # A sum of 120 terms of size 1, in another order: 120 · 6·10⁻⁸.
        assert torch.allclose(bias_grad, first_bias_grad, atol=1e-4)
