"""Attention and GELU by hand: PyTorch's results and derivatives, and what they refuse."""

import copy
import math
import pickle
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY_FLAGS, forked
from helpers import handout_commands, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fast import build
from labs.attention_op import (
    MultiHeadAttention,
    attention,
    attention_python,
    checks,
    cpp,
    exercise,
    exercise_checks,
    gelu,
    gelu_python,
    use_in,
)
from labs.attention_op import __main__ as script
from labs.attention_op import module as attention_module
from labs.lenet import mnist

needs_compiler = pytest.mark.skipif(bool(build.why_not()), reason="no C++ compiler")
CPP = pytest.param("cpp", marks=needs_compiler)
FUSED = pytest.param("fused", marks=needs_compiler)
BACKENDS = ["python", CPP, FUSED]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(1)


def close(ours, theirs, terms: int) -> bool:
    """Whether pairs of tensors differ only by the rounding of `terms` additions."""
    return all(
        checks.error(x, y) <= checks.allowed(y.dtype, terms)
        for x, y in zip(ours, theirs, strict=True)
    )


def sizes_up_to(*largest: int):
    return st.tuples(*[st.integers(1, size) for size in largest])


# ---------------------------------------------------------------- results and derivatives


@needs_compiler
@pytest.mark.parametrize("masked", [False, True])
def test_the_cpp_operators_are_registered_correctly(masked):
    q, k, v = (torch.randn(2, 2, 3, 4, requires_grad=True) for _ in range(3))
    bias = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1) > 0, -torch.inf)
    factors = torch.full((2, 2, 3, 3), 1.25)
    operators, fused = cpp.library("operators"), cpp.library("fused")
    torch.library.opcheck(operators.gelu.default, (q,))
    options = (bias, factors) if masked else (None, None)
    torch.library.opcheck(operators.attention.default, (q, k, v, *options))
    q, scores = q.detach().mT, torch.randn(2, 2, 3, 3)
    torch.library.opcheck(fused.gelu.default, (q,))
    torch.library.opcheck(fused.gelu_backward.default, (q, q))
    torch.library.opcheck(fused.softmax_.default, (scores, bias if masked else None))
    torch.library.opcheck(fused.softmax_backward_.default, (scores, factors))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20)
@given(
    sizes=sizes_up_to(3, 3, 9, 40, 5, 5),  # 40 keys: more than a vector of C++, and a rest
    masked=st.sampled_from(["", "padding", "queries", "all", "numbers"]),
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
        "queries": torch.rand(1, h, s, 1) < 0.5,
        "all": torch.rand(b, h, s, t) < 0.5,
        "numbers": torch.rand(h, 1, t) < 0.5,
    }[masked]
    given_mask = mask
    if masked == "numbers":
        given_mask = torch.zeros(mask.shape).masked_fill(mask, -torch.inf)
    errors = checks.compare(
        lambda q, k, v: attention(q, k, v, given_mask, causal, backend=backend),
        lambda q, k, v: checks.reference_attention(q, k, v, mask, causal),
        checks.random_inputs(sizes, dtype),
    )
    # The terms of the largest shape: in the smallest ones the few operations beside the sums weigh
    # more.
    assert max(errors) <= checks.allowed(dtype, checks.terms_of((3, 3, 9, 40, 5, 5)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradients_are_the_numerical_ones_with_dropout_and_masks_too(backend):
    assert checks.gradcheck_attention(backend)


def test_kept_memory_is_that_of_the_tensors_for_the_backward_pass():
    q, k, v = (x.requires_grad_() for x in checks.random_inputs((2, 3, 5, 7, 4, 6)))
    # Q, K, V, P and O, in fp64
    inputs_and_weights = 2 * 3 * (5 * 4 + 7 * 4 + 7 * 6 + 5 * 7)
    output = 2 * 3 * 5 * 6
    assert script.kept_bytes(attention, [q, k, v]) == 8 * (inputs_and_weights + output)
    # PyTorch's math kernel keeps P for the softmax and for the product, but has it only once.
    math_kernel = partial(script.kernel_alone, "math")
    assert script.kept_bytes(math_kernel, [q, k, v]) == 8 * inputs_and_weights


@needs_compiler
def test_fused_attention_keeps_no_output_for_the_backward_pass():
    q, k, v = (x.requires_grad_() for x in checks.random_inputs((2, 3, 5, 7, 4, 6)))
    kept = script.kept_bytes(lambda *qkv: attention(*qkv, backend="fused"), [q, k, v])
    assert kept == 8 * 2 * 3 * (5 * 4 + 7 * 4 + 7 * 6 + 5 * 7)  # Q, K, V and P


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_visible(backend):
    q, k, v = checks.random_inputs((1, 1, 3, 3, 2, 2))
    k[0, 0, 1] = torch.nan
    assert attention(q, k, v, torch.tensor([True, False, False]), backend=backend).isnan().all()
    assert checks.error(torch.tensor([1.0, math.nan]), torch.ones(2)) == math.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_memory_layout(backend):
    q, k, v = (x.transpose(1, 2) for x in checks.random_inputs((2, 5, 3, 3, 4, 4)))
    ours = attention(q, k, v, backend=backend)
    theirs = F.scaled_dot_product_attention(q, k, v)
    assert close([ours], [theirs], checks.terms_of((2, 3, 5, 5, 4, 4)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gelu_is_pytorchs_of_any_shape_and_far_out(backend):
    for shape in [(), (0,), (3, 0, 2), (2, 3, 4, 5)]:
        x = torch.randn(shape, dtype=torch.float64)
        for layout in [x, x.mT] if x.dim() > 1 else [x]:
            errors = checks.compare(lambda x: gelu(x, backend), F.gelu, [layout])
            assert max(errors) <= checks.allowed(x.dtype, checks.GELU_TERMS)
    far = torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30, torch.nan])
    torch.testing.assert_close(gelu(far, backend), F.gelu(far), equal_nan=True)
    assert checks.gradcheck_gelu(backend)


def test_gelu_in_python_can_be_differentiated_twice():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(gelu, [x])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", [lambda out: out.sum(), lambda out: (out * out).sum()])
def test_a_second_derivative_is_refused_not_wrong(backend, loss):
    """Also that of `out.sum()`, whose gradient with respect to `out` is a constant."""
    q, k, v = (x.requires_grad_() for x in checks.random_inputs((1, 1, 2, 2, 2, 2)))
    with refused("attention: this implementation has no second derivative"):
        torch.autograd.grad(loss(attention(q, k, v, backend=backend)), q, create_graph=True)
    if backend != "python":
        with refused("gelu: this implementation has no second derivative"):
            torch.autograd.grad(loss(gelu(q, backend)), q, create_graph=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_drops_its_share_and_keeps_the_mean(backend):
    """With equal weights and values of 1 an output is the share of weights kept / (1 − dropout)."""
    keys, dropout = 1000, 0.3
    q, k, v = torch.zeros(4, 4, 50, 2), torch.zeros(4, 4, keys, 2), torch.ones(4, 4, keys, 1)
    out = attention(q, k, v, dropout=dropout, backend=backend)
    deviation = (dropout / (1 - dropout) / keys) ** 0.5
    assert abs(out.mean() - 1) < 5 * deviation / out.numel() ** 0.5
    assert abs(out.std() / deviation - 1) < 0.1
    again = attention(q, k, v, dropout=dropout, backend=backend)
    assert not torch.equal(out, again)  # every call draws anew


# ---------------------------------------------------------------- number formats, compiling


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_computed_in_fp32(backend):
    dtype = torch.bfloat16
    halves = [x.to(dtype).requires_grad_() for x in checks.random_inputs((2, 2, 9, 9, 8, 8))]
    wide = [x.detach().float().requires_grad_() for x in halves]
    out, expected = (attention(*x, causal=True, backend=backend) for x in (halves, wide))
    assert out.dtype == dtype and torch.equal(out, expected.to(dtype))
    grads, expected_grads = (
        torch.autograd.grad(y, x, torch.ones_like(y)) for x, y in ((halves, out), (wide, expected))
    )
    assert all(map(torch.equal, grads, (grad.to(dtype) for grad in expected_grads)))
    with torch.autocast("cpu", torch.bfloat16):  # changes nothing inside
        assert torch.equal(attention(*halves, causal=True, backend=backend), out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gelu_in_half_precision(backend):
    x = torch.randn(50).bfloat16().requires_grad_()
    y = gelu(x, backend=backend)
    assert torch.equal(y, F.gelu(x.float()).bfloat16())
    assert torch.autograd.grad(y.sum(), x)[0].dtype == torch.bfloat16


@needs_compiler
@pytest.mark.parametrize("backend", ["cpp", "fused"])
def test_the_operators_in_cpp_survive_compiling_as_one_graph(backend):
    mask = checks.random_padding(2, 5)

    def both(q, k, v, x):
        out = attention(q, k, v, mask, causal=True, backend=backend)
        return out, gelu(x, backend=backend)

    inputs = [*checks.random_inputs((2, 2, 4, 5, 3, 3)), torch.randn(7, dtype=torch.float64)]
    inputs = [x.requires_grad_() for x in inputs]
    results = []
    for function in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        out, y = function(*inputs)
        results.append([out, y, *torch.autograd.grad(out.sin().sum() + y.sin().sum(), inputs)])
    assert close(*reversed(results), terms=checks.GELU_TERMS)


# ---------------------------------------------------------------- the module


@pytest.mark.parametrize("options", [dict(batch_first=True), dict(), dict(bias=False)], ids=str)
def test_module_with_the_stock_ones_weights(options):
    stock = nn.MultiheadAttention(8, 2, dtype=torch.float64, **options)
    ours = MultiHeadAttention(8, 2, dtype=torch.float64, **options)
    ours.load_state_dict(stock.state_dict())
    first = options.get("batch_first", False)
    batch, queries, keys = (4, 5, 3) if first else (5, 4, 4)
    # four projections of 8 numbers beside the attention
    terms = 4 * 8 + checks.terms_of((batch, 2, queries, keys, 4, 4))
    query, key, value = (
        torch.randn(*((batch, length) if first else (length, batch)), 8, dtype=torch.float64)
        for length in (queries, keys, keys)
    )
    padding = torch.arange(keys) >= torch.randint(1, keys + 1, (batch, 1))
    square = torch.rand(queries, keys) < 0.3
    square[:, 0] = False
    numbers = torch.randn(queries, keys).double()
    as_numbers = torch.zeros(padding.shape).double().masked_fill(padding, -torch.inf)
    for masks in (
        dict(),
        dict(key_padding_mask=padding),
        dict(attn_mask=square.repeat(2 * batch, 1, 1)),  # one per head
        dict(attn_mask=square, key_padding_mask=padding),
        dict(attn_mask=numbers, key_padding_mask=as_numbers),
    ):
        expected = stock(query, key, value, need_weights=False, **masks)[0]
        assert close([ours(query, key, value, **masks)[0]], [expected], terms)


def test_in_a_transformer(monkeypatch):
    options = dict(dim_feedforward=64, dropout=0.0, batch_first=True)
    stock = nn.Transformer(32, 4, 2, 2, **options).double()
    ours = copy.deepcopy(stock)
    assert use_in(ours, "python") == 6
    padding = torch.arange(9) >= torch.tensor([9, 1, 4])[:, None]
    src, tgt = (torch.randn(3, length, 32, dtype=torch.float64) for length in (9, 7))
    masks = dict(
        tgt_mask=torch.ones(7, 7).triu(1) > 0,
        tgt_is_causal=True,
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    calls = []

    def counted(*args, **options):
        calls.append(1)
        return attention(*args, **options)

    monkeypatch.setattr(attention_module, "attention", counted)
    results = []
    for model in (ours, stock):
        out = model(src, tgt, **masks)
        results.append([out, *torch.autograd.grad(out.sin().sum(), list(model.parameters()))])
    # A gradient has come through 4 layers, each with about four sums over widths of 32 or 64;
    # those of weights are sums over 3 · 9 places.
    assert len(calls) == 6 and close(*results, terms=4 * 4 * 64 + 27)
    ours.eval()
    stock.eval()
    ours = pickle.loads(pickle.dumps(ours))
    with torch.no_grad():  # where the stock encoder bypasses its attention, and packs padded rows
        assert close([ours(src, tgt, **masks)], [stock(src, tgt, **masks)], terms=4 * 4 * 64)
    assert len(calls) == 12


def test_use_in_keeps_modules_parameters_and_random_numbers():
    stock = nn.MultiheadAttention(8, 2, bias=False)
    model = nn.ModuleDict({"a": nn.ModuleList([stock])}).eval()
    names, parameters, numbers = [*model.state_dict()], [*model.parameters()], torch.get_rng_state()
    assert use_in(model, "python") == 1 and model["a"][0] is stock
    assert type(stock) is MultiHeadAttention and not stock.training
    assert [*model.state_dict()] == names
    # the very parameters that an optimizer has
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(torch.get_rng_state(), numbers)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda q, k, v: attention(q[0], k, v), "(B, H, length, width); got q (3, 4, 6)"),
        (lambda q, k, v: attention(q, k, v[:, :, 1:]), "as many values as keys"),
        (lambda q, k, v: attention(q, k.double(), v), "one floating-point type; got torch.float32"),
        (lambda q, k, v: attention(q, k, v, torch.zeros(2, 5).bool()), "a mask of shape (2, 5)"),
        (lambda q, k, v: attention(q, k, v, torch.zeros(5, requires_grad=True)), "mask.detach()"),
        (lambda q, k, v: attention(q, k, v, dropout=1.0), "dropout=1.0 must be"),
        (lambda q, k, v: attention(q, k, v, backend="c"), "unknown backend 'c'; choose python, "),
        (
            lambda *qkv: attention(*(x.to("meta") for x in qkv), backend="fused"),
            "the backend 'fused' is for the CPU, and the input is on meta; choose cpp or python",
        ),
        (lambda *_: gelu(torch.zeros(3).long()), "floating-point"),
        (lambda *_: use_in(nn.Linear(2, 2), "python"), "no nn.MultiheadAttention"),
        (lambda *_: MultiHeadAttention(4, 2, add_zero_attn=True), "add_zero_attn"),
        (lambda *_: MultiHeadAttention(4, 2, kdim=6), "kdim"),
    ],
)
def test_mistakes_are_one_clear_line(call, message):
    with refused(message):
        call(*checks.random_inputs((2, 3, 4, 5, 6, 7), torch.float32))


def test_without_a_compiler_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for compiler, message in (("/nonexistent", "no compiler"), (shutil.which("false"), "cannot")):
        monkeypatch.setenv("CXX", compiler)
        with refused(message) as error:
            cpp.load.__wrapped__("operators")  # not the cached result
        assert "choose the backend 'python'" in str(error.value)


# ---------------------------------------------------------------- the exercise

SOLUTIONS = dict(
    gelu_grad=lambda grad, x: (
        grad * (gelu_python.normal_cdf(x) + x * (-x * x / 2).exp() / math.sqrt(2 * math.pi))
    ),
    values_grad=lambda grad, weights: weights.mT @ grad,
    weights_grad=lambda grad, v: grad @ v.mT,
    scores_grad=lambda grad, weights: weights * (grad - (weights * grad).sum(-1, keepdim=True)),
    queries_grad=lambda grad, k, scale: grad @ k * scale,
    keys_grad=lambda grad, q, scale: grad.mT @ q * scale,
)
MISTAKES = [
    ("gelu_grad", lambda grad, x: grad * gelu_python.normal_cdf(x), "WRONG  at ("),
    ("values_grad", lambda grad, weights: weights @ grad, "WRONG  RuntimeError: "),
    ("weights_grad", lambda grad, v: v @ grad.mT, "its shape is (2, 3, 7, 5); expected (2, 3, 5, "),
    ("scores_grad", lambda grad, weights: weights * grad, "autograd finds"),
    ("queries_grad", lambda grad, k, scale: grad @ k, "autograd finds"),
    ("queries_grad", lambda grad, k, scale: grad @ k * (scale + 1e-9), "autograd finds"),
    ("keys_grad", lambda grad, q, scale: None, "it returns NoneType; return a tensor"),
]


def checked_exercise(monkeypatch, capsys, **functions) -> tuple[int, list[str]]:
    """The exit code, and the lines of the seven steps, with these functions filled in."""
    for name, function in functions.items():
        monkeypatch.setattr(exercise, name, function)
    monkeypatch.setattr(sys, "argv", ["exercise"])
    with pytest.raises(SystemExit) as end:
        exercise_checks.main()
    return end.value.code, capsys.readouterr().out.splitlines()[-7:]


def test_the_exercise_begins_empty_and_ends_right(monkeypatch, capsys):
    code, lines = checked_exercise(monkeypatch, capsys)
    assert code == 1 and all(line.endswith("not written yet") for line in lines[:6])
    code, lines = checked_exercise(monkeypatch, capsys, **SOLUTIONS)
    assert code == 0 and all("right  (" in line for line in lines)


def test_the_exercise_has_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["exercise", "--help"])
    with pytest.raises(SystemExit) as end:
        exercise_checks.main()
    assert end.value.code == 0 and "usage: python -m labs.attention_op" in capsys.readouterr().out


@pytest.mark.parametrize("name, mistake, message", MISTAKES)
def test_the_exercise_names_a_wrong_step(monkeypatch, capsys, name, mistake, message):
    code, lines = checked_exercise(monkeypatch, capsys, **(SOLUTIONS | {name: mistake}))
    [wrong] = [line for line in lines[:6] if "right  (" not in line]
    assert code == 1 and f" {name} " in wrong and message in wrong and "waits" in lines[6]


def test_the_code_beside_the_derivation_is_that_of_the_operators():
    """The page shows lines of the Python operators, word for word."""
    page = (ROOT / "labs/attention_op/README.md").read_text(encoding="utf-8")
    derivation = page.split("## Why")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", derivation, re.DOTALL)
    shown = "".join(blocks).splitlines()
    source = set()
    for module in (attention_python, gelu_python):
        lines = Path(module.__file__).read_text(encoding="utf-8").splitlines()
        source |= {line.strip() for line in lines}
    assert len(shown) == 11 and set(shown) <= source


# ---------------------------------------------------------------- the commands


def test_a_wrong_operator_is_named(monkeypatch, capsys):
    def wrong(*qkv, **settings):
        return 1.001 * attention(*qkv, **settings)

    # It would stay for all tests.
    monkeypatch.setattr(script, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(checks, "gradcheck_attention", lambda backend: True)
    monkeypatch.setattr(checks, "attention", wrong)
    with refused("an operator differs from PyTorch's"):
        script.main(script.Config(backend="python", seq_length=8, turns=1))
    lines = capsys.readouterr().out.splitlines()
    verdicts = {line[:27].split()[-1]: line.split()[-1] for line in lines if "passes" in line}
    assert verdicts == {"math": "WRONG", "flash": "WRONG", "F.gelu": "right"}


def test_attention_is_compared_with_both_kernels_of_pytorch():
    """Only flash needs queries and values of one width, and it is what PyTorch takes by default."""
    used = []
    for kernel, sizes in script.CHECKED_SIZES.items():
        with torch.profiler.profile() as profile:
            checks.reference_attention(*checks.random_inputs(sizes), kernel=kernel)
        names = {event.key for event in profile.key_averages()}
        used.append({name for name in names if name.startswith("aten::_scaled")})
    assert used == [
        {"aten::_scaled_dot_product_attention_math"},
        {"aten::_scaled_dot_product_flash_attention_for_cpu"},
    ]


def test_an_operator_that_fails_gradcheck_is_wrong(capsys):
    """Also where its numbers are PyTorch's."""
    assert script.report("mine", "math", lambda dtype: (0.0, 0.0), 16, passed=True)
    assert not script.report("mine", "math", lambda dtype: (0.0, 0.0), 16, passed=False)
    right, wrong = capsys.readouterr().out.splitlines()
    assert right.endswith("passes     right") and wrong.endswith("FAILS      WRONG")


def test_the_race_says_how_much_faster_than_python(capsys):
    """An operator that computes 30 times as often is slower, on any machine."""

    def slow(x):
        for _ in range(30):
            y = gelu(x)
        return y

    script.race({"python": gelu, "slow": slow}, [torch.randn(200_000)], turns=3)
    python, slower = (line.split() for line in capsys.readouterr().out.splitlines())
    assert python[3] == "1.00" and float(slower[3]) < 0.5
    assert float(python[4]) == 0.8  # MiB: 200,000 numbers of 4 bytes


def test_heads_that_do_not_divide_the_model_are_refused():
    with refused("--d_model 10 cannot be divided among --nhead 4 heads"):
        script.main(script.Config(d_model=10, nhead=4))


def draw_few_digits() -> None:
    mnist.DRAWN = {"train": (300, 1), "test": (100, 2)}
    mnist.PLACES = ()


SMALLER = {
    "labs.attention_op": ["--seq_length", 8, "--turns", 1],
    "labs.lenet": ["--epochs", 1, "--run", "digits"],
    "labs.attention_op.train": [*TINY_FLAGS, "--max_steps", 2, "--run", "translator"],
}


@needs_compiler
def test_the_commands_that_meet_the_handout(toy_data, tmp_path):
    commands = handout_commands(ROOT / "labs/attention_op/README.md")
    # Without --backend the first command runs every backend.
    commands = [(module, flags) for module, flags in commands if "--backend" not in flags]
    assert sorted(module for module, _ in commands) == sorted(SMALLER)
    for module, flags in commands:
        path = f"{module.replace('.', '/')}/__main__.py"
        if module == "labs.attention_op.train":
            path = "labs/attention_op/train.py"
            flags = [*flags, "--data", toy_data]
        flags = ["drawn" if flag == "DIR" else flag for flag in flags]
        out = forked(path, *flags, *SMALLER[module], cwd=tmp_path, first=(draw_few_digits,))
        if module == "labs.attention_op":
            assert sum(line.endswith("right") for line in out.splitlines()) == 9
