"""The decoding step in C++ chooses what the plain step chooses; in 8 bits, what the plain step with the same roundings does."""

import copy
import math
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import (
    BOS,
    COLLATE,
    OTHER_WEIGHTS,
    WORDS,
    layer_of,
    make_batch,
    make_model,
    make_sources,
    nearly_tie,
    needs_compiler,
)
from torch import Tensor, nn

import decoding
import fast
from decoding import plan_batches, search
from engine.errors import UserError
from fast import build
from fast.decoding import CompiledSteps
from labs.attention_op import use_in
from model import Translator

SIZES = [  # one and several vectors a head, whole and broken panels
    (dict(d_model=32, nhead=2, dim_feedforward=48), 40),
    (dict(d_model=64, nhead=1, dim_feedforward=144), 1000),
    (dict(d_model=96, nhead=2, dim_feedforward=64), 64),
    (dict(d_model=256, nhead=8, dim_feedforward=1024), 300),
]
NO_INT8 = bool(build.why_not()) or not torch.cpu._is_vnni_supported()
needs_int8 = pytest.mark.skipif(NO_INT8, reason="no compiler or no VNNI")
seeds = st.integers(0, 2**31)


def lively_model(sizes, seed=0, **options) -> Translator:
    """Evaluated, with weights twice the usual size."""
    return make_model(seed, words=sizes[1], **(dict(scale=2.0) | options), **sizes[0]).eval()


@needs_compiler
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("sizes", SIZES)
@torch.inference_mode()
def test_every_step_chooses_the_largest_logit(sizes, rows, norm_first):
    """As the plain steps in float64, when both are fed the same 40 tokens while rows leave."""
    model = lively_model(sizes, seed=rows, norm_first=norm_first)
    ours, batch = CompiledSteps(model), make_batch(rows, rows, 50)
    exact = copy.deepcopy(model).double()
    steps, plain = ours.start(*batch, 40), decoding.start(exact, *batch, 40)
    generator = torch.Generator().manual_seed(rows)
    for position in range(40):
        if position % 7 == 6 and rows > 1:
            keep = torch.randperm(rows, generator=generator)[: rows - 1 - rows // 4].sort().values
            steps.select(keep)
            plain.select(keep)
            rows = len(keep)
        tokens = torch.randint(0, sizes[1], (rows,), generator=generator)
        chosen, logits = (
            steps.next_tokens(tokens, position),
            decoding.step(exact, plain, tokens, position),
        )
        # Logits of size 10 are sums of up to 1,024 terms, each rounded by 6·10⁻⁸, through four layers: below 10⁻⁴.
        assert (logits.amax(1) - logits.gather(1, chosen[:, None])[:, 0] <= 1e-3).all()


@needs_compiler
@settings(max_examples=20, deadline=None)
@given(seeds, st.booleans(), st.integers(1, 9))
def test_search_finds_what_the_plain_search_finds(seed, norm_first, rows):
    """Both in fp32: after a near tie two outputs may go apart."""
    model, sources = lively_model(SIZES[0], seed, norm_first=norm_first), make_sources(seed, 12, 9)
    batches = plan_batches(list(map(len, sources)), rows)
    ours = search(model, sources, COLLATE, batches=batches, steps=fast.steps(model))
    plain = search(model, sources, COLLATE, batches=batches)
    exact = copy.deepcopy(model).double()
    for source, found, wanted in zip(sources, ours.tokens, plain.tokens, strict=True):
        assert found == wanted or nearly_tie(exact, source, found, wanted)


@needs_compiler
@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=needs_int8)])
def test_threads_and_batches_change_nothing(int8):
    """Every row is computed alone: neither its neighbours nor other threads matter, to the last bit."""
    model, sources = lively_model(SIZES[1]), make_sources(0, 40, 30)
    steps, outputs = fast.steps(model, int8), []
    for count, rows in ((1, 40), (2, 7), (3, 1), (2, 20)):
        torch.set_num_threads(count)  # which a fixture takes back
        batches = plan_batches(list(map(len, sources)), rows)
        outputs.append(search(model, sources, COLLATE, batches=batches, steps=steps).tokens)
    assert all(tokens == outputs[0] for tokens in outputs) and len(set(map(tuple, outputs[0]))) > 10


def first_tokens(model: Translator, int8: bool = False) -> list[int]:
    """After BOS, of nine sentences."""
    cache = CompiledSteps(model, int8).start(*make_batch(0, 9, 5), 10)
    return cache.next_tokens(torch.full((9,), BOS), 0).tolist()


@needs_compiler
@pytest.mark.parametrize("vocabulary", [7, 64, 65, 1000])
def test_the_first_of_equals(vocabulary):
    model = lively_model((SIZES[0][0], vocabulary))
    with torch.no_grad():
        model.output.weight.zero_()
        model.output.bias.zero_()
        model.output.bias[5:] = 1
        assert first_tokens(model) == [5] * 9
        model.output.bias.fill_(-1e9)  # a token that is forbidden so is still a token
        assert first_tokens(model) == [0] * 9


@needs_compiler
@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=needs_int8)])
def test_never_a_token_that_is_not_there(int8):
    model = lively_model(SIZES[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    assert all(0 <= token < 40 for token in first_tokens(model, int8))


@needs_compiler
def test_the_weights_are_those_at_the_start():
    model, sources = lively_model(SIZES[0]), make_sources(0, 8, 9)
    steps = fast.steps(model)
    before = search(model, sources, COLLATE, steps=steps).tokens
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    assert search(model, sources, COLLATE, steps=steps).tokens == before
    assert search(model, sources, COLLATE, steps=fast.steps(model)).tokens != before


@needs_compiler
@pytest.mark.parametrize("wrong", [WORDS, -1, 2**40])
def test_ids_outside_the_vocabulary_are_refused_not_read_from_foreign_memory(wrong):
    model = lively_model(SIZES[1])  # more words to write than to read
    steps, (src, src_pad) = CompiledSteps(model), make_batch(0, 3, 9)
    src[1, 0] = wrong
    with pytest.raises(IndexError, match=f"but the vocabulary has {WORDS}"):
        steps.start(src, src_pad, 10)
    src[1, 0] = WORDS - 1
    src[src_pad] = wrong  # padding is never read
    cache = steps.start(src, src_pad, 10)
    begin = torch.full((3,), BOS)
    begin[2] = wrong if wrong != WORDS else 1000
    with pytest.raises(IndexError, match="but the vocabulary has 1000"):
        cache.next_tokens(begin, 0)
    with pytest.raises(IndexError):  # as the plain search
        search(model, [[5, 10**6]], COLLATE, steps=steps.start)


@needs_compiler
def test_ids_of_another_width_and_layout():
    steps, (src, src_pad), begin = (
        CompiledSteps(lively_model(SIZES[0])),
        make_batch(0, 9, 5),
        torch.arange(3, 12),
    )
    usual = steps.start(src, src_pad, 10).next_tokens(begin, 0)
    narrow, apart = begin.int(), begin.repeat_interleave(2)[::2]
    for ids in (narrow, apart):
        assert torch.equal(steps.start(src.to(ids.dtype), src_pad, 10).next_tokens(ids, 0), usual)


@needs_compiler
def test_too_long_is_an_error_not_a_read_behind_the_end():
    steps = CompiledSteps(lively_model(SIZES[0], max_length=64))
    for source, output in ((65, 10), (10, 65)):
        with pytest.raises(ValueError, match="65 tokens are more than the 64"):
            steps.start(
                torch.full((1, source), 5), torch.zeros(1, source, dtype=torch.bool), output
            )
    steps.start(torch.full((1, 64), 5), torch.zeros(1, 64, dtype=torch.bool), 64)


# ----------------------------------------------------------------------------------------------------------------------- int8


def rounded_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(out,) scales and (out, in) whole numbers."""
    scale = weight.abs().amax(1).clamp(min=1e-30) / 127
    return scale, (weight / scale[:, None]).round().double()


def round_to_int8(x: Tensor, weight: Tensor, bias: Tensor, zero: int | None = None) -> Tensor:
    """(rows, in) → (rows, out) with the roundings of the C++, and products that are exact in float64."""
    scale, rounded = rounded_weight(weight)
    steps = 255 if zero == 0 or (zero is None and (x >= 0).all()) else 127
    bound = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    numbers = (x.double() * (steps / bound).double()).round()
    return ((numbers @ rounded.T) * ((bound / steps) * scale) + bias).to(x.dtype)


@needs_int8
@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.sampled_from([0, 128]))
def test_int8_products_are_those_of_the_roundings(seed, rows, inputs, outputs, zero):
    torch.manual_seed(seed)
    weight = torch.randn(outputs * 16, inputs * 16) * torch.logspace(-3, 1, outputs * 16)[:, None]
    bias, x = (
        torch.randn(outputs * 16),
        torch.randn(rows, inputs * 16) * torch.logspace(-2, 3, rows)[:, None],
    )
    x = x.relu() if zero == 0 else x
    x[0] = 0
    steps, y = CompiledSteps(make_model(0), int8=True), torch.full((rows, outputs * 16), math.nan)
    build.call(steps.kernels.multiply_rows, steps.pack_linear(weight, bias, zero), x, rows, y)
    error = (y - round_to_int8(x, weight, bias, zero)).abs()
    step = (
        x.abs().amax(1, keepdim=True) / 127 * weight.abs().amax(1)
    )  # of one input, times the largest weight
    rounding = 1e-6 * (
        x.abs() @ weight.abs().T + bias.abs()
    )  # whole numbers are summed exactly, then scaled in fp32
    assert (error <= 1.01 * step + rounding).all()
    # Half-way between two numbers the last bit of a product decides which it is: seldom in so few rows.
    assert (error > rounding).any(1).sum() <= 1
    # Each of `in` terms is rounded by up to 1/254 of the largest weight or input, three times the usual one: 2 % of |x|·|w|.
    lengths = x.norm(dim=1)[:, None] * weight.norm(dim=1)  # the products themselves may be near 0
    assert (y - x @ weight.T - bias).norm() < 0.04 * lengths.norm() + 1e-3


@needs_int8
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_int8_steps_are_plain_steps_with_the_roundings(sizes, norm_first, monkeypatch):
    """A sum that differs in its last bit can fall on the other side of a rounding, so a choice may differ now and then."""
    attend = F.scaled_dot_product_attention

    def attend_to_bf16(query, keys, values, *arguments, **named):
        keys, values = (x.bfloat16().to(query.dtype) for x in (keys, values))
        return attend(query, keys, values, *arguments, **named)

    kept, round_anew = {}, rounded_weight

    def round_once(weight):
        key = weight.data_ptr(), weight.shape
        return kept[key] if key in kept else kept.setdefault(key, round_anew(weight))

    monkeypatch.setattr(
        sys.modules[__name__], "rounded_weight", round_once
    )  # which saves most of the time
    model, (src, src_pad) = lively_model(sizes, norm_first=norm_first), make_batch(0, 17, 50)
    cache = CompiledSteps(model, int8=True).start(src, src_pad, 40)
    monkeypatch.setattr(F, "linear", round_to_int8)  # of every layer: both look it up here
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend_to_bf16)
    monkeypatch.setattr(
        torch.backends.mha, "get_fastpath_enabled", lambda: False
    )  # PyTorch's own encoder in one call
    generator, differ = torch.Generator().manual_seed(0), 0
    with torch.inference_mode():
        plain = decoding.start(model, src, src_pad, 40)
        for position in range(40):
            tokens = torch.randint(0, sizes[1], (17,), generator=generator)
            differ += int(
                (plain.next_tokens(tokens, position) != cache.next_tokens(tokens, position)).sum()
            )
    assert differ <= 0.04 * 40 * 17


# --------------------------------------------------------------------------------------------------------------- where it is not


def test_no_faster_steps_for_other_models():
    assert not fast.steps(make_model(0).double())
    assert not fast.steps(make_model(0, d_model=24, nhead=2))  # heads of 12
    assert not fast.steps(make_model(0, dim_feedforward=50))
    gelu = make_model(0)
    gelu.transformer.decoder.layers[0].activation = F.gelu
    assert not fast.steps(gelu)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fast.steps(make_model(0))


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        *OTHER_WEIGHTS,
        lambda model: setattr(layer_of(model), "linear2", nn.Sequential(layer_of(model).linear2)),
    ],
)
def test_no_faster_steps_for_a_changed_model(change):
    model = make_model(0)
    assert fast.steps(model)
    use_in(model, "python")  # the same weights, and the same results
    assert fast.steps(model)
    change(model)
    assert not fast.steps(model)


@needs_compiler
@pytest.mark.parametrize(
    "name, method",
    [
        (
            "embed",
            lambda model, embedding, ids, first=0: (
                embedding(ids) + model.positions[first : first + ids.size(1)]
            ),
        ),
        (
            "encode",
            lambda model, src, src_pad: Translator.encode(model, src, torch.zeros_like(src_pad)),
        ),
    ],
)
def test_no_faster_steps_for_a_changed_model_py(name, method):
    model = make_model(0, scale=3.0)
    assert fast.steps(model)
    setattr(model, name, partial(method, model))
    assert not fast.steps(model) and model.training
    if not NO_INT8:
        with pytest.raises(UserError, match=r"model\.py as it is"):
            fast.steps(model, int8=True)


def test_int8_that_cannot_be_is_a_mistake(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(UserError, match=r"--precision int8 needs a CPU with AVX-512 VNNI, g\+\+"):
        fast.steps(make_model(0), int8=True)
    assert fast.steps(make_model(0)) or build.why_not()  # fp32 needs no VNNI


def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "none")
    build.library.cache_clear()
    try:
        assert fast.steps(make_model(0)) is None
        with pytest.raises(
            UserError,
            match=r"\(cpu, (CXX=none|the C++ functions need Linux)\); use --precision fp32",
        ):
            fast.steps(make_model(0), int8=True)
    finally:
        build.library.cache_clear()
