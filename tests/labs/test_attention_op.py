"""Attention and GELU by hand: PyTorch's results and derivatives, in every implementation, and where they are refused."""

import copy
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import UserError
from labs.attention_op import MultiHeadAttention, attention, checks, cpp, gelu, use_in
from labs.attention_op import module as attention_module
from labs.attention_op.attention_python import SCORES_AT_ONCE, dropout_factors, slices_of_all
from model import ModelConfig, Translator

can_build = shutil.which(os.environ.get("CXX", "c++")) and shutil.which("ninja")
needs_compiler = pytest.mark.skipif(not can_build, reason="no C++ compiler or no ninja")
CPP = pytest.param("cpp", marks=needs_compiler)
BACKENDS = [
    "python",
    "recompute",
    CPP,
]  # the library is built by the first test that needs it, and kept for later sessions
KINDS = ["none", "tanh"]


def qkv(*sizes, dtype=torch.float64):
    """(B, H, S, T, D, W) → q, k, v that want gradients"""
    return [x.requires_grad_() for x in checks.random_inputs(sizes, dtype)]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(*bounds) for bounds in [(0, 3), (1, 3), (0, 9), (0, 9), (1, 5), (1, 5)]]),
    masked=st.sampled_from(["", "padding", "all", "numbers"]),
    causal=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_attention_is_pytorchs_at_any_shape(backend, sizes, masked, causal, dtype):
    b, h, s, t, *_ = sizes
    mask = {"": None, "padding": torch.rand(b, 1, 1, t) < 0.5, "all": torch.rand(b, h, s, t) < 0.5,
            "numbers": torch.rand(h, 1, t) < 0.5}[masked]  # fmt: skip
    given_mask = torch.zeros(mask.shape).masked_fill(mask, -torch.inf) if masked == "numbers" else mask

    def ours(q, k, v):
        return attention(q, k, v, given_mask, causal, backend=backend)

    errors = checks.compare(
        ours, lambda *x: checks.reference_attention(*x, mask, causal), checks.random_inputs(sizes, dtype)
    )
    assert max(errors) <= checks.ALLOWED[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(1, 2, 700, 600, 8, 16), (3, 2, 400, 300, 4, 4), (70, 8, 30, 40, 4, 4)])
def test_attention_is_pytorchs_in_several_blocks(backend, sizes):
    for dtype, allowed in checks.ALLOWED.items():
        # PyTorch's own gradients, sums of hundreds of terms, are as far as 1e-6 from those of fp64.
        assert max(checks.check_attention(backend, sizes, dtype)) <= 4 * allowed


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_with_several_threads(backend):
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert max(checks.check_attention(backend, (2, 5, 90, 90, 8, 8), torch.float64)) <= 1e-12
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives_of_attention(backend):
    assert checks.gradcheck_attention(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_nothing_gets_zeros_and_hands_nothing_on(backend):
    q, k, v = qkv(2, 1, 3, 4, 2, 2)
    mask = torch.tensor([True, False])[:, None, None, None].expand(2, 1, 3, 4)
    out = attention(q, k, v, mask, backend=backend)
    out.sum().backward()
    assert (out[0] == 0).all() and (out[1] != 0).all()
    assert all((x.grad[0] == 0).all() and (x.grad[1] != 0).any() and x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_visible(backend):
    q, k, v = qkv(1, 1, 3, 3, 2, 2)
    with torch.no_grad():
        k[0, 0, 1] = torch.nan
    mask = torch.tensor([True, False, False])
    assert attention(q, k, v, mask, backend=backend).isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_scale_and_other_memory_layout(backend):
    q, k, v = (x.transpose(1, 2) for x in checks.random_inputs((2, 5, 3, 3, 4, 4)))  # heads second last in memory
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.1)
    assert checks.error(attention(q, k, v, scale=0.1, backend=backend), expected) <= 1e-12
    last = torch.rand(2, 3, 5, 1) < 0.5  # the same for all keys
    expected = checks.reference_attention(q, k, v, last)
    assert checks.error(attention(q, k, v, last, backend=backend), expected) <= 1e-12


# Dropout


@pytest.mark.parametrize("backend", ["recompute", CPP])
@pytest.mark.parametrize("sizes", [(2, 3, 5, 7, 4, 4), (1, 2, 700, 600, 4, 4)])
def test_every_implementation_drops_the_same_weights(backend, sizes):
    results = []
    for each in ("python", backend):
        torch.manual_seed(7)
        q, k, v = qkv(*sizes)
        out = attention(q, k, v, causal=True, dropout=0.3, backend=each)
        out.sin().sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    assert all(checks.error(ours, theirs) <= 1e-12 for ours, theirs in zip(*results))


def test_dropout_drops_its_share_and_keeps_the_mean():
    torch.manual_seed(0)
    keys = 1000
    q, k, v = torch.zeros(8, 4, 50, 2), torch.zeros(8, 4, keys, 2), torch.ones(8, 4, keys, 1)
    for dropout in (0.1, 0.5):
        seed = torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32)
        weights = torch.empty(8, 4, 50, keys)
        z = dropout_factors(weights, slices_of_all(weights), dropout, seed)
        kept = z > 0
        assert (
            abs(kept.float().mean() - (1 - dropout)) < 5 * (dropout / kept.numel()) ** 0.5
        )  # five standard deviations
        assert z[kept].unique().tolist() == pytest.approx([1 / (1 - dropout)])
        for axis in range(4):  # neighbours in no direction drop together
            one, other = (kept.narrow(axis, first, kept.size(axis) - 1).float() for first in (0, 1))
            assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 5 / one.numel() ** 0.5
        mean = attention(q, k, v, dropout=dropout).mean()
        assert abs(mean - 1) < 5 * (dropout / (1 - dropout) / kept.numel()) ** 0.5
    assert not torch.equal(attention(q, k, v, dropout=0.5), attention(q, k, v, dropout=0.5))  # every call draws anew


# GELU


@pytest.mark.parametrize("approximate", KINDS)
@pytest.mark.parametrize("backend", ["python", CPP])
def test_gelu_is_pytorchs(backend, approximate):
    for dtype, allowed in checks.ALLOWED.items():
        assert max(checks.check_gelu(backend, approximate, dtype)) <= allowed
    assert checks.gradcheck_gelu(backend, approximate)


@pytest.mark.parametrize("backend", ["python", CPP])
@settings(max_examples=20, deadline=None)
@given(shape=st.lists(st.integers(0, 5), max_size=4), approximate=st.sampled_from(KINDS), flipped=st.booleans())
def test_gelu_of_any_shape(backend, shape, approximate, flipped):
    x = torch.randn(shape, dtype=torch.float64)
    x = x.mT if flipped and x.dim() > 1 else x  # not contiguous

    errors = checks.compare(
        lambda x: gelu(x, approximate, backend), lambda x: F.gelu(x, approximate=approximate), [x]
    )  # fmt: skip
    assert max(errors) <= 1e-12 and gelu(x, approximate, backend).shape == x.shape


@pytest.mark.parametrize("backend", ["python", CPP])
@pytest.mark.parametrize("approximate", KINDS)
def test_gelu_far_out(backend, approximate):
    x = torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30, torch.nan], requires_grad=True)
    expected = F.gelu(x, approximate=approximate)
    assert torch.equal(gelu(x, approximate, backend).isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.allclose(gelu(x, approximate, backend)[finite], expected[finite])


def test_gelu_in_python_can_be_differentiated_twice():
    for approximate in KINDS:
        x = torch.randn(5, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(lambda x, a=approximate: gelu(x, a), [x])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_derivative_is_refused_not_wrong(backend):
    q, k, v = qkv(1, 1, 2, 2, 2, 2)
    with pytest.raises(RuntimeError, match="differentiated once"):
        (grad,) = torch.autograd.grad(attention(q, k, v, backend=backend).sum(), q, create_graph=True)
        grad.sum().backward()


@needs_compiler
def test_a_second_derivative_of_gelu_in_cpp_is_refused():
    x = torch.randn(3, requires_grad=True)
    (grad,) = torch.autograd.grad(gelu(x, backend="cpp").sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        grad.sum().backward()


# Number formats


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_fp32_rounded_once(backend, dtype):
    halves = [x.to(dtype).requires_grad_() for x in checks.random_inputs((2, 2, 9, 9, 8, 8))]
    wide = [x.detach().float().requires_grad_() for x in halves]
    results = [attention(*x, causal=True, backend=backend) for x in (halves, wide)]
    assert results[0].dtype == dtype and torch.equal(results[0], results[1].to(dtype))
    half_grads, grads = (torch.autograd.grad(y, x, torch.ones_like(y)) for x, y in zip((halves, wide), results))
    rounding = 2 * torch.finfo(dtype).eps  # a part of the gradient comes from the output, which is rounded already
    assert all(g.dtype == dtype and checks.error(g.float(), w) <= rounding for g, w in zip(half_grads, grads))


@pytest.mark.parametrize("backend", ["python", CPP])
def test_gelu_in_half_precision(backend):
    x = torch.randn(50).bfloat16().requires_grad_()
    y = gelu(x, backend=backend)
    assert torch.equal(y, F.gelu(x.float()).bfloat16())
    assert torch.autograd.grad(y.sum(), x)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_applies_as_to_pytorchs_own(backend):
    q, k, v = qkv(2, 2, 6, 6, 4, 4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, backend=backend)
        assert out.dtype == F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        out.sum().backward()  # autocast is not to reach into the backward pass either
    halves = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    expected = attention(*halves, backend=backend)
    expected.sum().backward()
    assert torch.equal(out, expected)
    assert all(torch.equal(x.grad, half.grad.float()) for x, half in zip((q, k, v), halves))


# Memory


class LargestTensor(TorchDispatchMode):
    """Remembers how many numbers the largest tensor had that was made inside."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x._base is None:
                self.numbers = max(self.numbers, x.numel())
        return result


def test_recomputation_keeps_and_makes_no_square():
    def largest(length: int, backend: str) -> tuple[int, int]:
        q, k, v = qkv(1, 1, length, length, 2, 2, dtype=torch.float32)
        kept = []
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x),
            LargestTensor() as made,
        ):
            attention(q, k, v, causal=True, backend=backend).sum().backward()
        return sum(kept), made.numbers

    length = 4096
    assert largest(length, "python") >= (length**2, length**2)
    kept, made = largest(length, "recompute")
    assert kept <= 10 * length and made <= SCORES_AT_ONCE["cpu"] < length**2 / 10


# What the C++ operators are to PyTorch


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_registered_in_full(dtype):
    operators = cpp.library()
    q, k, v = (x.to(dtype).requires_grad_() for x in checks.random_inputs((2, 3, 4, 5, 4, 2)))
    bias, seed = torch.randn(2, 1, 1, 5), torch.tensor([3, -4], dtype=torch.int32)
    settings = False, 0.5, 0.25
    torch.library.opcheck(operators.attention, (q, k, v, bias, *settings, seed))
    torch.library.opcheck(operators.attention, (q, k, v, None, True, 0.5, 0.0, None))
    out, log_sum = operators.attention(q, k, v, bias, *settings, seed)
    detached = [x.detach() for x in (torch.ones_like(out), q, k, v, bias, out, log_sum)]
    torch.library.opcheck(operators.attention_backward, (*detached, *settings, seed))
    for tanh in (False, True):
        x = torch.randn(3, 4, dtype=dtype)
        torch.library.opcheck(operators.gelu, (x.clone().requires_grad_(), tanh))
        torch.library.opcheck(operators.gelu_backward, (x, x, tanh))


def raw(name: str, *changed):
    """Calls an operator of torch.ops with right arguments, but for those (position, value) that are changed."""
    q, k, v = checks.random_inputs((2, 3, 4, 5, 6, 7), torch.float32)
    out, log_sum = torch.zeros(2, 3, 4, 7), torch.zeros(2, 3, 4)
    arguments = [out, q, k, v, None, out, log_sum, False, 0.5, 0.0, None]
    for position, value in changed:
        arguments[position] = value
    if name == "attention":
        arguments = arguments[1:5] + arguments[7:]
    return getattr(cpp.library(), name)(*arguments)


@needs_compiler
@pytest.mark.parametrize("name", ["attention", "attention_backward"])
@pytest.mark.parametrize("changed, says", [
    ([(1, torch.zeros(3, 4, 6))], "four axes"),
    ([(1, torch.zeros(1, 3, 4, 6))], "batch and heads differ"),
    ([(2, torch.zeros(2, 3, 5, 5))], "differ in width"),
    ([(2, torch.zeros(2, 3, 5, 6).double())], "one floating-point type"),
    ([(3, torch.zeros(2, 3, 6, 7))], "as many values as keys"),
    ([(2, torch.zeros(2, 3, 0, 6)), (3, torch.zeros(2, 3, 0, 7))], "no keys"),
    ([(4, torch.zeros(4, 5))], "bias has four axes"),
    ([(4, torch.zeros(2, 3, 4, 4))], "bias does not fit"),
    ([(4, torch.zeros(2, 3, 4, 5).double())], "bias needs the type"),
    ([(9, 0.5)], "seed of two int32"),
    ([(9, 0.5), (10, torch.zeros(1, dtype=torch.int32))], "seed of two int32"),
    ([(9, 0.5), (10, torch.zeros(2, dtype=torch.int64))], "seed of two int32"),
    ([(9, 1.0), (10, torch.zeros(2, dtype=torch.int32))], "dropout is in"),
])  # fmt: skip
def test_operators_refuse_what_would_read_foreign_memory(name, changed, says):
    raw(name)  # right as it is
    with pytest.raises(RuntimeError, match=says):
        raw(name, *changed)


@needs_compiler
@pytest.mark.parametrize("position, value", [
    (0, torch.zeros(2, 3, 4, 6)), (5, torch.zeros(2, 3, 3, 7)), (6, torch.zeros(2, 3, 5)), (6, torch.zeros(2, 3, 4).double())
])  # fmt: skip
def test_the_backward_operator_refuses_another_forward_pass(position, value):
    with pytest.raises(RuntimeError, match="what the forward pass gave"):
        raw("attention_backward", (position, value))


@needs_compiler
def test_log_sums_take_no_gradient():
    q, k, v = qkv(1, 2, 3, 4, 5, 6)
    out, log_sum = cpp.library().attention(q, k, v, None, False, 0.5, 0.0, None)
    assert out.requires_grad and not log_sum.requires_grad
    assert checks.error(log_sum, (q @ k.mT * 0.5).logsumexp(-1).detach()) <= 1e-12


def compiled_is_plain(backend: str, compiler: str) -> None:
    mask = checks.random_padding(2, 5)

    def both(q, k, v, x):
        return attention(q, k, v, mask, causal=True, backend=backend), gelu(
            x, backend="cpp" if backend == "cpp" else "python"
        )

    inputs = [*qkv(2, 2, 4, 5, 3, 3), torch.randn(7, dtype=torch.float64, requires_grad=True)]
    results = []
    for function in (both, torch.compile(both, backend=compiler, fullgraph=True)):
        out, y = function(*inputs)
        results.append([out, y, *torch.autograd.grad(out.sin().sum() + y.sin().sum(), inputs)])
    assert all(checks.error(ours, plain) <= 1e-12 for ours, plain in zip(*results))


@pytest.mark.parametrize("backend", BACKENDS)
def test_survives_tracing_as_one_graph(backend):
    compiled_is_plain(backend, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_survives_inductor_as_one_graph(backend):
    compiled_is_plain(backend, "inductor")


# The module


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [dict(batch_first=True), dict(), dict(bias=False), dict(kdim=6, vdim=10)], ids=str)
def test_module_with_the_stock_ones_weights(backend, options):
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(8, 2, dtype=torch.float64, **options)
    ours = MultiHeadAttention(8, 2, dtype=torch.float64, backend=backend, **options)
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())
    first = options.get("batch_first", False)
    query, key, value = (
        torch.randn(4, 5, 8).double(),
        torch.randn(4, 3, stock.kdim).double(),
        torch.randn(4, 3, stock.vdim).double(),
    )
    batch = 4 if first else 5
    queries, keys = (5, 3) if first else (4, 4)
    if not first:
        key, value = (torch.randn(4, 5, width).double() for width in (stock.kdim, stock.vdim))
    padding = torch.arange(keys) >= torch.randint(1, keys + 1, (batch, 1))
    square = torch.rand(queries, keys) < 0.3
    square[:, 0] = False
    per_head = square.repeat(2 * batch, 1, 1)
    numbers = torch.randn(queries, keys).double()
    as_numbers = torch.zeros(padding.shape).double().masked_fill(padding, -torch.inf)
    for masks in (dict(), dict(key_padding_mask=padding), dict(attn_mask=square), dict(attn_mask=per_head),
                  dict(attn_mask=numbers), dict(attn_mask=square, key_padding_mask=padding),
                  dict(attn_mask=numbers, key_padding_mask=as_numbers)):  # fmt: skip
        expected = stock(query, key, value, need_weights=False, **masks)[0]
        assert checks.error(ours(query, key, value, **masks)[0], expected) <= 1e-12
    want = ours(query, key, value, need_weights=True)
    assert all(map(torch.equal, want, stock(query, key, value, need_weights=True)))
    if first:
        alone = query[0], key[0], value[0]
        expected = stock(*alone, padding[0], need_weights=False)[0]
        assert checks.error(ours(*alone, padding[0])[0], expected) <= 1e-12


def translators(backend: str, dtype=torch.float64, dropout=0.0):
    """A stock translator, its twin with our attention, and a batch with padding."""
    torch.manual_seed(0)
    plain = Translator(ModelConfig(40, 50, **TINY, dropout=dropout)).to(dtype)
    for module in plain.modules():  # the module is compared with PyTorch's own, not with another rewrite of it
        if isinstance(module, nn.MultiheadAttention):
            module.__class__ = nn.MultiheadAttention
    ours = copy.deepcopy(plain)
    assert use_in(ours, backend) == 6
    src_pad = torch.arange(9) >= torch.tensor([9, 1, 4])[:, None]
    return plain, ours, (torch.randint(40, (3, 9)), src_pad, torch.randint(50, (3, 7)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_the_translator(backend, monkeypatch):
    plain, ours, batch = translators(backend)
    assert list(plain.state_dict()) == list(ours.state_dict())
    calls = []
    operator = attention_module.attention
    monkeypatch.setattr(attention_module, "attention", lambda *a, **k: calls.append(1) or operator(*a, **k))
    results = []
    for model in (plain, ours):
        logits = model(*batch)
        results.append([logits, *torch.autograd.grad(logits.sin().sum(), list(model.parameters()))])
    assert len(calls) == 6 and all(checks.error(x, y) <= 1e-12 for x, y in zip(*reversed(results)))
    plain.eval(), ours.eval()
    with torch.no_grad():  # where the stock encoder layer has a way around its attention
        assert checks.error(ours(*batch), plain(*batch)) <= 1e-12 and len(calls) == 12


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_the_translator_with_dropout_and_bf16(backend):
    _, ours, batch = translators(backend, torch.float32, dropout=0.2)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16):
            loss = ours(*batch).float().logsumexp(-1).mean()
        ours.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in ours.parameters())
        losses.append(loss.item())
    assert losses[0] == losses[1] != losses[2]


def test_use_in_can_be_called_again():
    _, ours, _ = translators("python")
    use_in(ours, "recompute")
    attentions = [m for m in ours.modules() if isinstance(m, MultiHeadAttention)]
    assert {m.backend for m in attentions} == {"recompute"} and all(len(m._forward_pre_hooks) == 1 for m in attentions)


# Mistakes


def mistake(call):
    return lambda: call(*checks.random_inputs((2, 3, 4, 5, 6, 7), torch.float32))


@pytest.mark.parametrize("call, says", [
    (mistake(lambda q, k, v: attention(q[0], k, v)), "four axes.*q \\(3, 4, 6\\)"),
    (mistake(lambda q, k, v: attention(q[:1], k, v)), "batch and heads differ"),
    (mistake(lambda q, k, v: attention(q[..., :5], k, v)), "width 5 do not fit keys of width 6"),
    (mistake(lambda q, k, v: attention(q, k, v[:, :, 1:])), "5 keys but 4 values"),
    (mistake(lambda q, k, v: attention(q, k.double(), v)), "one floating-point type.*k torch.float64"),
    (mistake(lambda q, k, v: attention(q.long(), k.long(), v.long())), "floating-point"),
    (mistake(lambda q, k, v: attention(q, k, v, torch.zeros(4, 5).int())), "mask is torch.int32; give torch.bool"),
    (mistake(lambda q, k, v: attention(q, k, v, torch.zeros(2, 5).bool())), "mask of shape \\(2, 5\\) does not fit"),
    (mistake(lambda q, k, v: attention(q, k, v, torch.zeros(5, requires_grad=True))), "requires a gradient"),
    (mistake(lambda q, k, v: attention(q, k, v, torch.zeros(5, device="meta"))), "mask is on meta, the queries are on cpu"),
    (mistake(lambda q, k, v: attention(q, k, v, dropout=1.0)), "dropout=1.0 must be in"),
    (mistake(lambda q, k, v: attention(q, k, v, backend="cuda")), "backend='cuda' is unknown; choose python, recompute"),
    (mistake(lambda q, k, v: attention(q, k, v, backend="triton")), "triton"),
    (lambda: gelu(torch.zeros(3), backend="triton"), "backend='triton' is unknown; choose python, cpp"),
    (lambda: gelu(torch.zeros(3), approximate="erf"), "approximate='erf' is unknown"),
    (lambda: gelu(torch.zeros(3).long()), "floating-point"),
    (lambda: use_in(nn.Linear(2, 2), "python"), "no nn.MultiheadAttention"),
    (lambda: use_in(nn.MultiheadAttention(4, 2, add_zero_attn=True), "python"), "add_zero_attn"),
    (lambda: MultiHeadAttention(4, 2, backend="c"), "backend='c' is unknown"),
])  # fmt: skip
def test_mistakes_are_one_clear_line(call, says):
    with pytest.raises(UserError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, value, says", [("CXX", "/nonexistent", "no compiler '/nonexistent'"), ("PATH", "", "no ninja")]
)
def test_without_a_compiler_the_command_says_so(tmp_path, name, value, says):
    if name == "PATH" and not can_build:
        pytest.skip("no compiler either")
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": shutil.which("true"), name: value}
    done = command("--backend", "cpp", **environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and says in done.stderr


@needs_compiler
def test_a_compiler_that_fails_is_named(tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\ncase $1 in -v|--version) echo g++;; *) echo 'x.cpp:1: error: no such thing' >&2; exit 1;; esac\n"
    )
    compiler.chmod(0o755)
    done = command("--backend", "cpp", TORCH_EXTENSIONS_DIR=str(tmp_path / "built"), CXX=str(compiler))
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: the C++ operators cannot be built")
    assert "no such thing" in done.stderr and "Traceback" not in done.stderr


@needs_compiler
def test_a_library_that_does_not_load_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    file = cpp.library_file(cpp.compiler_flags())
    file.parent.mkdir()
    file.write_text("no library")
    done = command("--backend", "cpp")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "cannot be loaded" in done.stderr and f"remove {file.parent}" in done.stderr


@needs_compiler
def test_a_build_killed_while_it_links_leaves_no_library(tmp_path):
    compiler = tmp_path / "c++"  # makes empty objects, and links for ever
    compiler.write_text("""#!/bin/bash
case $1 in -v|--version) echo g++; exit;; esac
while [ "$1" ]; do [ "$1" = -o ] && out=$2; [ "$1" = -shared ] && links=1; shift; done
echo half > "$out"
[ -z "$links" ] || sleep 100
""")
    compiler.chmod(0o755)
    build = start_build(tmp_path / "built", CXX=str(compiler))
    while not list(tmp_path.glob("built/*/scratch/*.so")):
        assert build.poll() is None, build.communicate()
        time.sleep(0.05)
    os.killpg(build.pid, signal.SIGKILL)
    build.wait()
    assert not list(tmp_path.glob("built/*/*.so"))


# The command


def command(*flags, **environment) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    words = [sys.executable, "-m", "labs.attention_op", *map(str, flags)]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_the_command_checks_and_times(tmp_path):
    done = command("--seq", 32, "--turns", 1, **({} if can_build else {"TORCH_EXTENSIONS_DIR": str(tmp_path)}))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.endswith("passes")]
    assert len(lines) == (7 if can_build else 4) and "F.gelu" in done.stdout and "FAILS" not in done.stdout


def test_pytorchs_own_is_timed_on_every_device_of_ours(monkeypatch):
    from labs.attention_op import __main__ as script

    monkeypatch.setattr(script, "device_of", lambda backend: "cuda" if backend == "triton" else "cpu")
    devices = {name: device for name, (device, _) in script.attention_contestants(["python", "cpp", "triton"]).items()}
    assert devices == {"F.scaled_dot_product_attention, cpu": "cpu", "F.scaled_dot_product_attention, cuda": "cuda",
                       "python": "cpu", "cpp": "cpu", "triton": "cuda"}  # fmt: skip


@pytest.mark.parametrize(
    "flags, says", [(["--backend", "x"], "--backend x"), (["--seq", 0], "--seq 0"), (["--turn", 1], "--turns")]
)
def test_wrong_flags(flags, says):
    done = command(*flags)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and says in done.stderr


def start_build(folder, **environment) -> subprocess.Popen:
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), "OMP_NUM_THREADS": "1", **environment}
    code = "from labs.attention_op import cpp; print(cpp.load())"
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip


@pytest.mark.slow
@needs_compiler
def test_processes_that_start_at_once_build_once_even_after_a_killed_one(tmp_path):
    killed = start_build(tmp_path)
    while not list(tmp_path.glob("*/scratch/lock")):  # PyTorch's own lock: the compiler is at work
        assert killed.poll() is None
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    processes = [start_build(tmp_path) for _ in range(3)]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert sum("building" in errors for _, errors in outputs) == 1 and len({out for out, _ in outputs}) == 1


# Triton


triton_is_here = importlib.util.find_spec("triton")

TRITON_CHECK = """
import torch
from labs.attention_op import attention, checks
for sizes in [(2, 3, 5, 7, 4, 6), (1, 1, 1, 1, 1, 1), (1, 1, 70, 66, 20, 8), (1, 1, 40, 40, 80, 80), (0, 1, 2, 2, 4, 4),
              (2, 1, 3, 0, 4, 4)]:
    errors = checks.check_attention("triton", sizes, torch.float32, DEVICE)
    assert max(errors) <= checks.allowed("triton", torch.float32), (sizes, errors)
results = []
for backend in ("python", "triton"):
    torch.manual_seed(3)
    q, k, v = (x.requires_grad_() for x in checks.random_inputs((2, 2, 70, 80, 16, 16), torch.float32, DEVICE))
    out = attention(q, k, v, torch.randn(2, 1, 70, 80, device=DEVICE), dropout=0.3, backend=backend)
    results.append([out, *torch.autograd.grad(out.sin().sum(), (q, k, v))])
assert all(checks.error(ours, plain) <= 3 * checks.allowed("triton", torch.float32) for ours, plain in zip(*results))
for dtype in [torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"):  # the interpreter multiplies no bf16
    inputs = [x.to(dtype) for x in checks.random_inputs((2, 2, 70, 80, 32, 32), torch.float32, DEVICE)]
    exact = attention(*(x.float() for x in inputs), backend="python")
    assert checks.error(attention(*inputs, backend="triton").float(), exact) <= 4 * torch.finfo(dtype).eps
print("right")
"""


@pytest.mark.skipif(not triton_is_here, reason="triton is not installed")
def test_triton_arithmetic_in_its_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    code = "DEVICE = 'cpu'\n" + TRITON_CHECK
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_triton_on_the_gpu():
    code = "DEVICE = 'cuda'\n" + TRITON_CHECK
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr
