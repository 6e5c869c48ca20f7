"""Attention and GELU by hand: PyTorch's results and derivatives, in every implementation, and where they are refused."""

import copy
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from conftest import HANGS, ROOT, LargestTensor
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labs.attention_op import MultiHeadAttention, attention, checks, cpp, gelu, use_in
from labs.attention_op import __main__ as script
from labs.attention_op import module as attention_module
from labs.attention_op.attention_python import SCORES_AT_ONCE, dropout_factors, slices_of_all

can_build = shutil.which(os.environ.get("CXX", "c++")) and shutil.which("ninja")
needs_compiler = pytest.mark.skipif(not can_build, reason="no C++ compiler or no ninja")
CPP = pytest.param(
    "cpp", marks=needs_compiler
)  # built by the first test that needs it, kept for later sessions
BACKENDS = ["python", "recompute", CPP]
KINDS = ["none", "tanh"]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(1)


def qkv(*sizes, dtype=torch.float64):
    """(B, H, S, T, D, W) → q, k, v that want gradients"""
    return [x.requires_grad_() for x in checks.random_inputs(sizes, dtype)]


def close(ours, theirs, terms: int) -> bool:
    """Whether pairs of tensors differ only by rounding `terms` additions; the type of `theirs` rounds."""
    return all(
        checks.error(x, y) <= checks.allowed("", y.dtype, terms)
        for x, y in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25)
@given(
    sizes=st.tuples(
        *[st.integers(*bounds) for bounds in [(0, 3), (1, 3), (0, 9), (0, 9), (1, 5), (1, 5)]]
    ),
    masked=st.sampled_from(["", "padding", "all", "numbers"]),
    causal=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_attention_is_pytorchs_at_any_shape(backend, sizes, masked, causal, dtype, seed):
    torch.manual_seed(seed)
    b, h, s, t, *_ = sizes
    mask = {
        "": None,
        "padding": torch.rand(b, 1, 1, t) < 0.5,
        "all": torch.rand(b, h, s, t) < 0.5,
        "numbers": torch.rand(h, 1, t) < 0.5,
    }[masked]
    given_mask = (
        torch.zeros(mask.shape).masked_fill(mask, -torch.inf) if masked == "numbers" else mask
    )
    errors = checks.compare(
        lambda q, k, v: attention(q, k, v, given_mask, causal, backend=backend),
        lambda q, k, v: checks.reference_attention(q, k, v, mask, causal),
        checks.random_inputs(sizes, dtype),
    )
    # 28 terms, those of the largest shape: the few operations beside the sums weigh more in the smallest ones. The largest
    # error of 1,500 draws was a quarter of what this allows.
    assert max(errors) <= checks.allowed(backend, dtype, checks.terms_of((3, 3, 9, 9, 5, 5)))


def test_a_number_that_is_none_is_the_largest_error():
    assert max(1e-7, checks.error(torch.tensor([1.0, math.nan]), torch.ones(2))) == math.inf


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "sizes, threads",
    [
        ((1, 2, 700, 600, 8, 16), 1),
        ((3, 2, 400, 300, 4, 4), 1),
        ((70, 8, 30, 40, 4, 4), 1),
        ((2, 5, 90, 90, 8, 8), 3),
    ],
)
def test_attention_is_pytorchs_in_several_blocks_and_threads(backend, sizes, threads):
    torch.set_num_threads(threads)  # which a fixture takes back
    for dtype in (torch.float32, torch.float64):
        errors = checks.check_attention(backend, sizes, dtype)
        assert max(errors) <= checks.allowed(backend, dtype, checks.terms_of(sizes))
    with torch.inference_mode():  # which is a thread's own affair
        attention(*checks.random_inputs(sizes, torch.float32), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_keys_there_is_nothing_to_see(backend):
    q, k, v = torch.zeros(1, 1, 3, 8).bfloat16(), *torch.zeros(2, 1, 1, 0, 8).bfloat16()
    assert attention(q, k, v, backend=backend).count_nonzero() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_visible(backend):
    q, k, v = qkv(1, 1, 3, 3, 2, 2)
    with torch.no_grad():
        k[0, 0, 1] = torch.nan
    mask = torch.tensor([True, False, False])
    assert attention(q, k, v, mask, backend=backend).isnan().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["recompute", CPP])
def test_a_row_masked_by_large_numbers_sees_all_keys_alike(backend, causal):
    """In fp32 the log of their number is nothing beside a score of -1e9."""
    mask, sizes = torch.full((1, 1, 1, 8), -1e9), (2, 3, 8, 8, 4, 4)
    errors = checks.compare(
        lambda *x: attention(*x, mask, causal, backend=backend),
        lambda *x: attention(*x, mask, causal),
        checks.random_inputs(sizes, torch.float32),
    )
    assert max(errors) <= checks.allowed(backend, torch.float32, checks.terms_of(sizes))


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_scale_and_other_memory_layout(backend):
    q, k, v = (
        x.transpose(1, 2) for x in checks.random_inputs((2, 5, 3, 3, 4, 4))
    )  # heads second last in memory
    last = torch.rand(2, 3, 5, 1) < 0.5  # the same for all keys
    ours = attention(q, k, v, scale=0.1, backend=backend), attention(q, k, v, last, backend=backend)
    theirs = (
        F.scaled_dot_product_attention(q, k, v, scale=0.1),
        checks.reference_attention(q, k, v, last),
    )
    assert close(ours, theirs, terms=checks.terms_of((2, 3, 5, 5, 4, 4)))


# Dropout


@pytest.mark.parametrize("backend", ["recompute", CPP])
@pytest.mark.parametrize("sizes", [(2, 3, 5, 7, 4, 4), (1, 2, 700, 600, 4, 4)])
def test_every_implementation_drops_the_same_weights(backend, sizes):
    inputs, results = qkv(*sizes), []
    for each in ("python", backend):
        torch.manual_seed(7)
        out = attention(*inputs, causal=True, dropout=0.3, backend=each)
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    assert close(*results, terms=checks.terms_of(sizes))


def test_dropout_drops_its_share_and_keeps_the_mean():
    keys = 1000
    q, k, v = torch.zeros(8, 4, 50, 2), torch.zeros(8, 4, keys, 2), torch.ones(8, 4, keys, 1)
    for dropout in (0.1, 0.5):
        seed = torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32)
        weights = torch.empty(8, 4, 50, keys)
        z = dropout_factors(weights, slices_of_all(weights), dropout, seed)
        kept = z > 0
        # Five standard deviations, here and below.
        assert abs(kept.float().mean() - (1 - dropout)) < 5 * (dropout / kept.numel()) ** 0.5
        assert z[kept].unique().tolist() == pytest.approx([1 / (1 - dropout)])
        for axis in range(4):  # neighbours in no direction drop together
            neighbours = [
                kept.narrow(axis, first, kept.size(axis) - 1).float().flatten() for first in (0, 1)
            ]
            assert (
                abs(torch.corrcoef(torch.stack(neighbours))[0, 1])
                < 5 / neighbours[0].numel() ** 0.5
            )
        mean = attention(q, k, v, dropout=dropout).mean()
        assert abs(mean - 1) < 5 * (dropout / (1 - dropout) / kept.numel()) ** 0.5
    assert not torch.equal(
        attention(q, k, v, dropout=0.5), attention(q, k, v, dropout=0.5)
    )  # every call draws anew


# GELU


@pytest.mark.parametrize("approximate", KINDS)
@pytest.mark.parametrize("backend", ["python", CPP])
def test_gelu_is_pytorchs_of_any_shape_and_far_out(backend, approximate):
    ours, theirs = (
        (lambda x: gelu(x, approximate, backend)),
        (lambda x: F.gelu(x, approximate=approximate)),
    )
    for shape in [(), (0,), (3, 0, 2), (1,), (5,), (2, 3, 4, 5)]:
        x = torch.randn(shape, dtype=torch.float64)
        for layout in [x, x.mT] if x.dim() > 1 else [x]:  # and not contiguous
            assert max(checks.compare(ours, theirs, [layout])) <= checks.allowed(
                backend, x.dtype, checks.GELU_TERMS
            )
    far = torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30, torch.nan])
    torch.testing.assert_close(ours(far), theirs(far), equal_nan=True)


@pytest.mark.parametrize("approximate", KINDS)
def test_gelu_in_python_can_be_differentiated_twice(approximate):
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: gelu(x, approximate), [x])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_derivative_is_refused_not_wrong(backend):
    q, k, v = qkv(1, 1, 2, 2, 2, 2)
    outs = [attention(q, k, v, backend=backend)] + [gelu(q, backend="cpp")] * (backend == "cpp")
    for out in outs:
        with pytest.raises(RuntimeError, match="differentiated once"):
            torch.autograd.grad(out.sum(), q, create_graph=True)[0].sum().backward()


# Number formats


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_fp32_rounded_once(backend, dtype):
    halves = [x.to(dtype).requires_grad_() for x in checks.random_inputs((2, 2, 9, 9, 8, 8))]
    wide = [x.detach().float().requires_grad_() for x in halves]
    results = [attention(*x, causal=True, backend=backend) for x in (halves, wide)]
    assert results[0].dtype == dtype and torch.equal(results[0], results[1].to(dtype))
    half_grads, grads = (
        torch.autograd.grad(y, x, torch.ones_like(y)) for x, y in zip((halves, wide), results)
    )
    # The output, of which a part of the gradient is made, is rounded to half precision, and so is the gradient; eps of each.
    rounding = 2 * torch.finfo(dtype).eps
    assert all(
        g.dtype == dtype and checks.error(g.float(), w) <= rounding
        for g, w in zip(half_grads, grads)
    )


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


def test_recomputation_keeps_and_makes_no_square():
    def largest(length: int, backend: str) -> tuple[int, int]:
        """Numbers kept for the backward pass, and numbers of the largest tensor."""
        q, k, v = qkv(1, 1, length, length, 2, 2, dtype=torch.float32)
        kept = []
        keeping = torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(x.numel()) or x, lambda x: x
        )
        with keeping, LargestTensor() as made:
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
    out, log_sum = torch.zeros(2, 3, 4, 7), torch.zeros(2, 3, 4, 2)
    arguments = [out, q, k, v, None, out, log_sum, False, 0.5, 0.0, None]
    for position, value in changed:
        arguments[position] = value
    if name == "attention":
        arguments = arguments[1:5] + arguments[7:]
    return getattr(cpp.library(), name)(*arguments)


@needs_compiler
@pytest.mark.parametrize("name", ["attention", "attention_backward"])
@pytest.mark.parametrize(
    "changed, says",
    [
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
    ],
)
def test_operators_refuse_what_would_read_foreign_memory(name, changed, says):
    raw(name)  # right as it is
    with pytest.raises(RuntimeError, match=says):
        raw(name, *changed)


@needs_compiler
def test_the_backward_operator_refuses_another_forward_pass():
    for position, value in [
        (0, torch.zeros(2, 3, 4, 6)),
        (5, torch.zeros(2, 3, 3, 7)),
        (6, torch.zeros(2, 3, 5, 2)),
        (6, torch.zeros(2, 3, 4, 2).double()),
    ]:
        with pytest.raises(RuntimeError, match="what the forward pass gave"):
            raw("attention_backward", (position, value))


@needs_compiler
@pytest.mark.parametrize("grad", [torch.zeros(5), torch.zeros(6).double()])
def test_the_backward_of_gelu_refuses_another_shape_or_type(grad):
    with pytest.raises(RuntimeError, match="gelu: the gradient needs the shape and the type of x"):
        cpp.library().gelu_backward(grad, torch.zeros(6), False)


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_survives_compiling_as_one_graph(backend, compiler):
    mask = checks.random_padding(2, 5)

    def both(q, k, v, x):
        seen = attention(q, k, v, mask, causal=True, backend=backend)
        return seen, gelu(x, backend="cpp" if backend == "cpp" else "python")

    inputs = [*qkv(2, 2, 4, 5, 3, 3), torch.randn(7, dtype=torch.float64, requires_grad=True)]
    results = []
    for function in (both, torch.compile(both, backend=compiler, fullgraph=True)):
        out, y = function(*inputs)
        results.append([out, y, *torch.autograd.grad(out.sin().sum() + y.sin().sum(), inputs)])
    assert close(
        *reversed(results), terms=checks.GELU_TERMS
    )  # more than the 16 of attention at this size


def test_no_forward_pass_converts_to_the_type_it_has(monkeypatch):
    """torch.compile of torch 2.11 would lose the gradient, without a word."""
    q, k, v = qkv(2, 2, 4, 5, 3, 3)
    monkeypatch.setattr(torch.Tensor, "to", lambda *_: pytest.fail("a conversion"))
    assert all(
        y.requires_grad for y in (attention(q, k, v, backend="python"), gelu(q), gelu(q, "tanh"))
    )


# The module


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options", [dict(batch_first=True), dict(), dict(bias=False), dict(kdim=6, vdim=10)], ids=str
)
def test_module_with_the_stock_ones_weights(backend, options):
    stock = nn.MultiheadAttention(8, 2, dtype=torch.float64, **options)
    ours = MultiHeadAttention(8, 2, dtype=torch.float64, backend=backend, **options)
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())
    first = options.get("batch_first", False)
    batch, queries, keys = (4, 5, 3) if first else (5, 4, 4)
    terms = 4 * 10 + checks.terms_of(
        (batch, 2, queries, keys, 4, 4)
    )  # four projections of up to 10 numbers
    query, key, value = (
        torch.randn(*((batch, length) if first else (length, batch)), width, dtype=torch.float64)
        for length, width in ((queries, 8), (keys, stock.kdim), (keys, stock.vdim))
    )
    padding = torch.arange(keys) >= torch.randint(1, keys + 1, (batch, 1))
    square = torch.rand(queries, keys) < 0.3
    square[:, 0] = False
    per_head = square.repeat(2 * batch, 1, 1)
    numbers = torch.randn(queries, keys).double()
    as_numbers = torch.zeros(padding.shape).double().masked_fill(padding, -torch.inf)
    for masks in (
        dict(),
        dict(key_padding_mask=padding),
        dict(attn_mask=square),
        dict(attn_mask=per_head),
        dict(attn_mask=numbers),
        dict(attn_mask=square, key_padding_mask=padding),
        dict(attn_mask=numbers, key_padding_mask=as_numbers),
    ):
        expected = stock(query, key, value, need_weights=False, **masks)[0]
        assert close([ours(query, key, value, **masks)[0]], [expected], terms)
    want = ours(query, key, value, need_weights=True)
    assert all(map(torch.equal, want, stock(query, key, value, need_weights=True)))
    if first:
        alone = query[0], key[0], value[0]
        expected = stock(*alone, padding[0], need_weights=False)[0]
        assert close([ours(*alone, padding[0])[0]], [expected], terms)


def transformers(backend: str, dropout=0.0):
    """PyTorch's Transformer, its twin with our attention, and a call of either with padding."""
    options = dict(dim_feedforward=64, dropout=dropout, batch_first=True)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, **options), 2, enable_nested_tensor=False
    )
    stock = nn.Transformer(32, 4, num_decoder_layers=2, custom_encoder=encoder, **options).double()
    ours = copy.deepcopy(stock)
    assert use_in(ours, backend) == 6
    pad = torch.arange(9) >= torch.tensor([9, 1, 4])[:, None]
    src, tgt = (torch.randn(3, length, 32, dtype=torch.float64) for length in (9, 7))
    triangle = torch.ones(7, 7).triu(1) > 0
    masks = dict(
        tgt_mask=triangle, tgt_is_causal=True, src_key_padding_mask=pad, memory_key_padding_mask=pad
    )
    return stock, ours, lambda model: model(src, tgt, **masks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_a_transformer(backend, monkeypatch):
    stock, ours, call = transformers(backend)
    calls, operator, results = [], attention_module.attention, []
    monkeypatch.setattr(
        attention_module, "attention", lambda *a, **k: calls.append(1) or operator(*a, **k)
    )
    for model in (ours, stock):
        out = call(model)
        results.append([out, *torch.autograd.grad(out.sin().sum(), list(model.parameters()))])
    # A gradient has come through 4 layers, each with about four sums over widths of 32 or 64; those of weights are sums over
    # 3 · 9 places.
    assert len(calls) == 6 and close(*results, terms=4 * 4 * 64 + 27)
    stock.eval(), ours.eval()
    with torch.no_grad():  # where the stock encoder layer has a way around its attention
        assert close([call(ours)], [call(stock)], terms=4 * 4 * 64) and len(calls) == 12


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_in_a_transformer(backend):
    _, ours, call = transformers(backend, dropout=0.2)
    for module in ours.modules():
        if isinstance(module, nn.Dropout):  # what is left is that of attention
            module.p = 0.0
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(call(ours).logsumexp(-1).mean().item())
    assert losses[0] == losses[1] != losses[2]


def test_use_in_leaves_parameters_names_places_and_random_numbers_as_they_are():
    shared, own = (
        nn.MultiheadAttention(8, 2),
        nn.MultiheadAttention(8, 2, bias=False, kdim=4, vdim=6),
    )
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([own, shared])}).eval()
    model["c"] = model["b"]  # a parent in two places
    names, parameters, numbers = [*model.state_dict()], [*model.parameters()], torch.get_rng_state()
    for backend in ("python", "recompute"):  # and it may be called again
        assert use_in(model, backend) == 2 and [*model.state_dict()] == names
        # The very ones that an optimizer has.
        assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
        assert model["a"] is model["b"][1] is model["c"][1]
        for module in (model["a"], model["b"][0]):
            assert (type(module), module.backend, module.training) == (
                MultiHeadAttention,
                backend,
                False,
            )
    assert torch.equal(torch.get_rng_state(), numbers)


# Mistakes


@pytest.mark.parametrize(
    "call, says",
    [
        (
            lambda q, k, v: attention(q[0], k, v),
            "four axes (batch, heads, length, width); got q (3, 4, 6)",
        ),
        (lambda q, k, v: attention(q[:1], k, v), "batch and heads differ"),
        (lambda q, k, v: attention(q[..., :5], k, v), "width 5 do not fit keys of width 6"),
        (lambda q, k, v: attention(q, k, v[:, :, 1:]), "5 keys but 4 values"),
        (
            lambda q, k, v: attention(q, k.double(), v),
            "type and device; got q torch.float32 on cpu, k torch.float64",
        ),
        (lambda q, k, v: attention(q.long(), k.long(), v.long()), "floating-point"),
        (
            lambda q, k, v: attention(q, k, v, torch.zeros(4, 5).int()),
            "mask is torch.int32; give torch.bool",
        ),
        (
            lambda q, k, v: attention(q, k, v, torch.zeros(2, 5).bool()),
            "mask of shape (2, 5) does not fit",
        ),
        (
            lambda q, k, v: attention(q, k, v, torch.zeros(5, requires_grad=True)),
            "requires a gradient",
        ),
        (
            lambda q, k, v: attention(q, k, v, torch.zeros(5, device="meta")),
            "mask is on meta, the queries are on cpu",
        ),
        (lambda q, k, v: attention(q, k, v, dropout=1.0), "dropout=1.0 must be in"),
        (
            lambda q, k, v: attention(q, k, v, backend="cuda"),
            "backend='cuda' is unknown; choose python, recompute",
        ),
        (
            lambda *_: gelu(torch.zeros(3), backend="c"),
            "backend='c' is unknown; choose python, cpp",
        ),
        (lambda *_: gelu(torch.zeros(3), approximate="erf"), "approximate='erf' is unknown"),
        (lambda *_: gelu(torch.zeros(3).long()), "floating-point"),
        (lambda *_: use_in(nn.Linear(2, 2), "python"), "no nn.MultiheadAttention"),
        (
            lambda *_: use_in(nn.MultiheadAttention(4, 2, add_zero_attn=True), "python"),
            "add_zero_attn",
        ),
        (lambda *_: use_in(nn.MultiheadAttention(4, 2), "python"), "that it is a part of"),
        (lambda *_: MultiHeadAttention(4, 2, backend="c"), "backend='c' is unknown"),
    ],
)
def test_mistakes_are_one_clear_line(call, says):
    with refused(says):
        call(*checks.random_inputs((2, 3, 4, 5, 6, 7), torch.float32))


def built_in(folder, monkeypatch, **environment):
    """Load the C++ operators anew, from `folder`; → the error in one line."""
    for name, value in dict(TORCH_EXTENSIONS_DIR=str(folder), **environment).items():
        monkeypatch.setenv(name, value)
    with refused("the C++ operators") as error:
        cpp.load.__wrapped__()  # not what is kept since the first time
    return str(error.value)


def test_without_a_compiler_or_ninja_the_error_says_so(tmp_path, monkeypatch):
    assert "no compiler '/nonexistent'" in built_in(tmp_path, monkeypatch, CXX="/nonexistent")
    assert "no ninja" in built_in(tmp_path, monkeypatch, CXX=shutil.which("true"), PATH="")


@needs_compiler
def test_a_compiler_that_fails_is_named(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    fails = "echo 'x.cpp:1: error: no such thing' >&2; exit 1"
    compiler.write_text(f"#!/bin/sh\ncase $1 in -v|--version) echo g++;; *) {fails};; esac\n")
    compiler.chmod(0o755)
    error = built_in(tmp_path / "built", monkeypatch, CXX=str(compiler))
    assert error.startswith("the C++ operators cannot be built") and "no such thing" in error


def test_a_library_that_does_not_load_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    file = cpp.library_file(cpp.compiler_flags())
    file.parent.mkdir()
    file.write_text("no library")
    error = built_in(tmp_path, monkeypatch)
    assert "cannot be loaded" in error and f"remove {file.parent}" in error


# The command


def test_the_command_checks_and_times(monkeypatch, capsys):
    monkeypatch.setattr(
        script, "keep_freed_memory", lambda: None
    )  # not in the process of all tests
    script.main(script.Config(seq=32, turns=1))
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.endswith("passes")]
    assert (
        len(lines) == (4 if "cpp: left out" in out else 7)
        and "F.gelu" in out
        and "FAILS" not in out
    )


def test_an_operator_that_is_wrong_is_named(monkeypatch, capsys):
    monkeypatch.setattr(
        checks, "attention", lambda *inputs, **options: 1.001 * attention(*inputs, **options)
    )
    assert not script.check_attention("python")
    assert capsys.readouterr().out.rstrip().endswith("WRONG")


def start_build(folder, **environment) -> subprocess.Popen:
    environment = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    code = "from labs.attention_op import cpp; print(cpp.load())"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


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
    outputs = [process.communicate(timeout=HANGS) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert (
        sum("building" in errors for _, errors in outputs) == 1
        and len({out for out, _ in outputs}) == 1
    )
