"""The kernels of a training step: what they compute, their gradients and their dropout."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import needs_compiler

from fast import kernels as native

few = settings(max_examples=25, deadline=None)
sizes = dict(seed=st.integers(0, 2**31), tokens=st.integers(1, 9), width=st.integers(1, 70))


def numbers(seed, *shapes):
    """A random tensor for each shape."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def results(function, *inputs, dtype=torch.float32):
    """The outputs of a function and the gradients of its inputs, in float64; the inputs are rounded to float32."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [torch.linspace(-1, 2, out.numel()).view(out.shape).to(out.dtype) for out in outputs]
    sum((out * weight).sum() for out, weight in zip(outputs, weights)).backward()
    return [x.double() for x in (*outputs, *(x.grad for x in inputs))]


def agree(kernel, plain, *inputs, within=2e-6):
    """Outputs and gradients of a kernel in float32 are those of plain PyTorch in float64, by norm.

    A number is a sum of at most 100 terms, each rounded by 6·10⁻⁸: at random 6·10⁻⁷, and `within` leaves room for two more sums.
    """
    exact = results(plain, *inputs, dtype=torch.float64)
    largest = max(
        wanted.norm() for wanted in exact
    )  # a gradient that is 0 in truth has the rounding of the others
    for found, wanted in zip(results(kernel, *inputs), exact, strict=True):
        assert found.shape == wanted.shape
        assert (found - wanted).norm() <= within * max(wanted.norm(), 0.1 * largest)


@needs_compiler
@few
@given(**sizes, alone=st.booleans())
def test_add_norm(seed, tokens, width, alone):
    norm, rows = torch.nn.LayerNorm(width), (tokens, width)
    tensors = numbers(seed, rows, *([] if alone else [rows, (width,)]), (width,), (width,))

    def kernel(residual, *rest):
        *branch, gain, shift = rest
        norm.weight, norm.bias = torch.nn.Parameter(gain), torch.nn.Parameter(shift)
        return native.AddNorm.apply(
            residual, *(branch or (None, None)), gain, shift, norm.eps, 0.0, torch.float32
        )

    def plain(residual, *rest):
        *branch, gain, shift = rest
        total = sum(branch, residual)
        y = F.layer_norm(total, (width,), gain, shift, norm.eps)
        return total, y, y

    # A row of one number has no spread: both divide rounding by √ε there.
    agree(kernel, plain, *tensors, within=2e-6 if width > 2 else 1e-2)


def heads_of(x, bias, batch, heads, parts):
    """(B·T, parts·D) + bias → parts tensors (B, H, T, W)"""
    return (
        (x + bias).view(batch, -1, parts, heads, x.size(1) // parts // heads).permute(2, 0, 3, 1, 4)
    )


def attend(q, k, v, mask, causal, factors=1.0):
    """The definition: (B, H, T, W) … → (B·T, D)"""
    scores = q @ k.mT / q.size(-1) ** 0.5
    if mask is not None:
        scores = scores + mask[:, None, None].to(scores.dtype)
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf
        )
    return ((scores.softmax(-1) * factors) @ v).transpose(1, 2).flatten(0, 1).flatten(1)


def padding(batch, keys):
    """An added mask (B, S): the second half of the last row may not be seen."""
    mask = torch.zeros(batch, keys)
    mask[-1, max(1, keys // 2) :] = torch.finfo(torch.float32).min / 2
    return mask


shapes = dict(seed=st.integers(0, 2**31), batch=st.integers(1, 3), heads=st.integers(1, 3))
shapes |= dict(width=st.sampled_from([16, 32, 48]))


@needs_compiler
@few
@given(**shapes, length=st.integers(1, 100), causal=st.booleans(), masked=st.booleans())
def test_self_attention(seed, batch, heads, width, length, causal, masked):
    mask, d = padding(batch, length) if masked else None, heads * width

    def plain(qkv, bias):
        return attend(*heads_of(qkv, bias, batch, heads, 3), mask, causal)

    agree(
        lambda qkv, bias: native.self_attention(
            qkv, bias, mask, (batch, length), heads, causal, 0.0
        ),
        plain,
        *numbers(seed, (batch * length, 3 * d), (3 * d,)),
        within=1e-5,  # the bias of the keys has no gradient but rounding
    )


@needs_compiler
@few
@given(**shapes, queries=st.integers(1, 70), keys=st.integers(1, 70))
def test_cross_attention(seed, batch, heads, width, queries, keys):
    mask, d = padding(batch, keys), heads * width

    def plain(q, kv, bias):
        (q,) = heads_of(q, bias[:d], batch, heads, 1)
        return attend(q, *heads_of(kv, bias[d:], batch, heads, 2), mask, causal=False)

    agree(
        lambda q, kv, bias: native.cross_attention(q, kv, bias, mask, (batch, queries), heads, 0.0),
        plain,
        *numbers(seed, (batch * queries, d), (batch * keys, 2 * d), (3 * d,)),
        within=1e-5,
    )


@given(st.integers(0, 10**6))
def test_few_numbers_of_rows(tokens):
    rows = native.rows_for(tokens)
    assert tokens <= rows <= tokens * 9 / 8 and native.rows_for(rows) == rows
    assert len({native.rows_for(count) for count in range(2049, 4097)}) == 8


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_behind_the_tokens_are_zero_and_change_nothing(dtype):
    batch, length, keys, d = 3, 23, 12, 32  # 69 tokens have 72 rows
    mask = padding(batch, keys)
    rows, positions, kv, bias = numbers(
        0, (batch, length, d), (length, d), (batch * keys, 2 * d), (3 * d,)
    )
    x = native.embed(rows, positions, 2.0, 0.0, dtype)[1]
    assert len(x) == 72 and x[69:].eq(0).all() and x[:69].ne(0).any(1).all()
    more = torch.cat([kv, torch.full((5, 2 * d), 7.0)]).to(dtype)

    def outputs(q, kv):
        """Both attentions, and the gradients of what goes in."""
        qkv, q, kv = (y.detach().clone().requires_grad_() for y in (q.repeat(1, 3), q, kv))
        own = native.self_attention(qkv, bias, None, (batch, length), 2, True, 0.0)
        other = native.cross_attention(q, kv, bias, mask, (batch, length), 2, 0.0)
        (own.float().square().sum() + other.float().square().sum()).backward()
        return own, other, qkv.grad, q.grad, kv.grad

    for found, wanted in zip(outputs(x, more), outputs(x[:69], kv.to(dtype)), strict=True):
        assert (
            torch.equal(found[: len(wanted)], wanted)
            and found[len(wanted) :].eq(0).all()
            and wanted.ne(0).any()
        )


@needs_compiler
def test_dropout_of_attention_is_the_same_forward_and_backward():
    """With V = 1 the output shows the weights; the factors found there give the plain result for any V."""
    batch, heads, width, length, p = 2, 2, 48, 41, 0.3
    d, bias = heads * width, torch.zeros(3 * heads * width)
    (qkv,), shown = numbers(0, (batch * length, 3 * d)), torch.zeros(batch, length, heads, width)
    shown[:, torch.arange(length), :, torch.arange(length)] = 1
    probe = torch.cat([qkv[:, : 2 * d], shown.view(batch * length, d)], 1)

    def kernel(x, p=p):
        torch.manual_seed(7)
        return native.self_attention(x, bias, None, (batch, length), heads, True, p)

    with torch.no_grad():
        dropped, weights = (
            kernel(probe, rate).view(batch, length, heads, width) for rate in (p, 0.0)
        )
    dropped, weights = (x[..., :length].transpose(1, 2) for x in (dropped, weights))
    factors = torch.where(weights > 0, dropped / weights, 0.0)
    kept = factors[weights > 1e-6]
    assert ((kept == 0) | ((kept - 1 / (1 - p)).abs() < 1e-4)).all()
    assert (kept == 0).double().mean().item() == pytest.approx(p, abs=0.02)
    agree(
        kernel,
        lambda x: attend(*heads_of(x, 0, batch, heads, 3), None, True, factors.to(x.dtype)),
        qkv,
        within=1e-4,
    )


@needs_compiler
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_rate_and_mask(p, dtype):
    """Of what goes in as ones: as many are dropped as p says, the rest scaled, and the gradient knows which."""
    tokens, width = 208, 333  # of which `rows_for` adds none
    calls = {
        "embed": lambda x: native.embed(x.float()[None], torch.zeros(tokens, width), 1.0, p, dtype)[
            1
        ],
        "relu": lambda x: native.relu_dropout(x.clone(), torch.zeros(width), p),
    }
    for call in calls.values():
        torch.manual_seed(3)
        x = torch.ones(tokens, width, dtype=dtype).requires_grad_()
        y = call(x)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())  # both 0 or 1 / (1 − p)
        assert set(y.detach().unique().tolist()) == {
            0.0,
            torch.tensor(1 / (1 - p)).to(dtype).item(),
        }
        rate = (y == 0).double().mean().item()
        assert rate == pytest.approx(p, abs=4 * (p * (1 - p) / y.numel()) ** 0.5)
        again = call(x)
        assert 0 < (again == y).double().mean() < 1  # another call, another seed
        columns, rows = (
            (y == 0).double().mean(0),
            (y == 0).double().mean(1),
        )  # no place is preferred
        assert (columns - p).abs().max() < 5 * (p * (1 - p) / tokens) ** 0.5
        assert (rows - p).abs().max() < 5 * (p * (1 - p) / width) ** 0.5


@needs_compiler
def test_dropout_of_a_branch():
    norm, p = torch.nn.LayerNorm(96), 0.25
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
@few
@given(**sizes, scale=st.sampled_from([1.0, 30.0, 1e4]))
def test_softmax_loss(seed, tokens, width, scale):
    logits, bias = numbers(seed, (tokens, width), (width,))
    logits, target = scale * logits, torch.arange(tokens) % width
    exact = (logits + bias).double()
    losses, sums = native.softmax_loss(logits, bias, target, 0.1)
    assert torch.allclose(logits.double(), exact.softmax(1), rtol=1e-5, atol=1e-7)
    assert torch.allclose(sums.double(), exact.softmax(1).sum(0), rtol=1e-5, atol=1e-6)
    wanted = exact.logsumexp(1) - 0.9 * exact.gather(1, target[:, None])[:, 0]
    assert torch.allclose(losses.double(), wanted, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_a_row_of_logits_that_begins_far_below_its_end():
    bias = torch.zeros(20)
    bias[0] = -1e10
    logits = torch.full((1, 20), -10.0)
    logits[0, 17] = 150
    losses, _ = native.softmax_loss(logits, bias, torch.tensor([17]), 0.0)
    assert losses.item() == 0 and logits[0, 17] == 1


@needs_compiler
def test_what_is_no_number_stays_none():
    x = torch.tensor([[1.0, torch.nan, -torch.inf, torch.inf]])
    assert native.relu_dropout(x, torch.zeros(4), 0.0).isnan().tolist() == [
        [False, True, False, False]
    ]
    (qkv,) = numbers(0, (5, 48))
    qkv[0, 3] = torch.nan
    assert native.self_attention(qkv, torch.zeros(48), None, (1, 5), 1, False, 0.0).isnan().any()


@needs_compiler
def test_bfloat16_rounds_and_nothing_else():
    """Every narrow result is the wide one, rounded to the nearest."""
    rows, positions, bias, x = numbers(0, (1, 40, 33), (40, 33), (33,), (40, 33))
    wide, narrow = native.embed(rows, positions, 2.0, 0.0, torch.bfloat16)
    assert torch.equal(wide.bfloat16(), narrow)
    _, wide, narrow = native.add_norm(
        wide, narrow, bias, torch.nn.LayerNorm(33), 0.0, torch.bfloat16
    )
    assert torch.equal(wide.bfloat16(), narrow)
    x = x.bfloat16()
    assert torch.equal(
        native.relu_dropout(x.clone(), bias, 0.0), F.relu(x.float() + bias).bfloat16()
    )
    qkv, bias = numbers(1, (2 * 37, 96), (96,))
    qkv = qkv.bfloat16()
    found = native.self_attention(qkv, bias, None, (2, 37), 2, True, 0.0)
    wanted = native.self_attention(qkv.float(), bias, None, (2, 37), 2, True, 0.0)
    assert torch.equal(found, wanted.bfloat16())


@needs_compiler
def test_as_many_threads_as_pytorch_has():
    """The number of threads changes sums over tokens by rounding, and nothing else."""
    inputs = numbers(0, (3 * 40, 96), (96,))
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)  # which a fixture takes back
        torch.manual_seed(2)
        found.append(
            results(lambda x, b: native.self_attention(x, b, None, (3, 40), 2, False, 0.2), *inputs)
        )
    # A gradient of the bias is a sum of 120 terms of size 1, in another order: 120 · 6·10⁻⁸.
    for other in found[1:]:
        assert torch.equal(found[0][0], other[0]) and torch.equal(found[0][1], other[1])
        assert torch.allclose(found[0][2], other[2], atol=1e-4)
