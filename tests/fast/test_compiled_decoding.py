"""Decoding in C++ equals plain decoding; in 8 bits, plain decoding with the same roundings."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import (
    BOS,
    COLLATE,
    EOS,
    WORDS,
    make_batch,
    make_model,
    make_sources,
    nearly_tie,
    needs_compiler,
)
from torch import Tensor

import decoding
import fast
from decoding import CachedDecoder, Decoder, plan_batches, search
from engine.errors import UserError
from fast import build
from fast.decoding import Packed, compiled_functions
from model import Translator

SIZES = [  # one and several vectors a head, whole and broken panels
    (dict(d_model=32, nhead=2, dim_feedforward=48), 40),
    (dict(d_model=64, nhead=1, dim_feedforward=144), 1000),
    (dict(d_model=96, nhead=2, dim_feedforward=64), 64),
    (dict(d_model=256, nhead=8, dim_feedforward=1024), 300),
]
NO_INT8 = not build.has_vnni() or compiled_functions(int8=True) is None
needs_int8 = pytest.mark.skipif(NO_INT8, reason="no compiler or no VNNI")
seeds = st.integers(0, 2**31)


def lively_model(sizes, seed=0, **options) -> Translator:
    """Evaluated, with weights twice the usual size."""
    return make_model(seed, words=sizes[1], **(dict(scale=2.0) | options), **sizes[0]).eval()


def compiled(model: Translator, int8: bool = False) -> Decoder:
    """All in C++."""
    decoder = Decoder(model, int8=int8)
    kinds = {fast.CompiledEncoder, fast.CompiledDecoder}
    assert set(map(type, decoder.replaced.values())) == kinds and decoder.output
    return decoder


def next_rows(rows: int, position: int, generator: torch.Generator) -> Tensor:
    """(sentences, hypotheses) to continue with: 3 of each, and sometimes one sentence less."""
    width = 1 if position == 0 else 3
    sentences = torch.arange(rows // width)
    if position % 7 == 6 and len(sentences) > 1:
        sentences = sentences[torch.arange(len(sentences)) != position % len(sentences)]
    parents = torch.randint(0, width, (len(sentences), 3), generator=generator)
    return sentences[:, None] * width + parents


@needs_compiler
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@torch.inference_mode()
def test_every_step_finds_the_largest_log_probabilities(sizes, norm_first):
    """The plain step in float64 gives the same, while hypotheses fork and sentences leave."""
    model = lively_model(sizes, norm_first=norm_first)
    exact = Decoder(copy.deepcopy(model).double())
    batch = make_batch(0, 5, 50)
    ours, plain = compiled(model).start(*batch), exact.start(*batch)
    generator, rows = torch.Generator().manual_seed(0), 5
    for position in range(40):
        tokens = torch.randint(0, sizes[1], (rows,), generator=generator)
        found, ids = ours.top_tokens(tokens, position, 6)
        log_probabilities = plain.logits(plain.hidden(tokens, position)).log_softmax(-1)
        best = log_probabilities.topk(6).values
        # Logits of size 10 are sums of up to 1,024 terms, each rounded by 6·10⁻⁸, through four
        # layers: below 10⁻⁴.
        assert (found - best).abs().max() < 1e-3
        assert (log_probabilities.gather(1, ids) - best).abs().max() < 1e-3
        assert all(len(set(row)) == 6 for row in ids.tolist())
        chosen = next_rows(rows, position, generator)
        ours.select(chosen)
        plain.select(chosen)
        rows = chosen.numel()


@needs_compiler
def test_beam_search_finds_what_the_plain_search_finds():
    """Both in fp32, in which near ties may come out differently."""
    total = differ = 0
    for seed in range(6):
        model = lively_model(SIZES[0], seed, norm_first=seed % 2 == 0, end=seed % 3)
        sources = make_sources(seed, 24, 9)
        batches = plan_batches(list(map(len, sources)), 1 + 4 * seed, 10_000)
        options = dict(beam=5, nbest=5, batches=batches)
        ours = search(compiled(model), sources, COLLATE, **options)
        plain = search(Decoder(model, compiled=False), sources, COLLATE, **options)
        for found, wanted in zip(ours, plain, strict=True):
            assert math.isclose(found[0].score, wanted[0].score, rel_tol=1e-4, abs_tol=1e-4)
            differ += [one.tokens for one in found] != [one.tokens for one in wanted]
            total += 1
    assert differ <= 0.005 * total + 1


@needs_compiler
def test_greedy_search_finds_what_the_plain_search_finds():
    model, sources = lively_model(SIZES[1]), make_sources(1, 30, 20)
    ours = search(compiled(model), sources, COLLATE)
    plain = search(Decoder(model, compiled=False), sources, COLLATE)
    exact = copy.deepcopy(model).double()
    for source, found, wanted in zip(sources, ours, plain, strict=True):
        same = found[0].tokens == wanted[0].tokens
        assert same or nearly_tie(exact, source, found[0].tokens, wanted[0].tokens)


@needs_compiler
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=needs_int8)])
def test_threads_and_batches_change_nothing(int8, beam):
    """Every row is computed alone: neighbours and other threads change no bit of it."""
    model, sources = lively_model(SIZES[1]), make_sources(0, 40, 30)
    decoder, outputs = compiled(model, int8), []
    for count, rows in ((1, 40), (3, 1), (2, 7)):
        torch.set_num_threads(count)  # which a fixture takes back
        batches = plan_batches(list(map(len, sources)), rows, 10_000)
        options = dict(beam=beam, nbest=beam, batches=batches)
        outputs.append(search(decoder, sources, COLLATE, **options))
    assert outputs[0] == outputs[1] == outputs[2]
    assert len({tuple(hypotheses[0].tokens) for hypotheses in outputs[0]}) > 10


@needs_compiler
def test_memory_of_a_beam():
    """Hypotheses share full blocks: no more memory than if each had its own keys and values."""
    model = lively_model(SIZES[0], max_length=128)
    model.output.bias.data[EOS] = -1e9  # never ends
    batches = decoding.plan_for(model, [100] * 128, beam=8)
    decoder, states = compiled(model), []
    start = decoder.start
    decoder.start = lambda *batch: states.append(start(*batch)) or states[-1]
    sources = [[5] * 100 for _ in range(128)]
    search(decoder, sources, COLLATE, beam=8, batches=batches[:1])
    elements = sum(block.numel() for block in states[0].decoders[0].own)
    sizes = model.config
    assert elements <= len(batches[0]) * 8 * 128 * 2 * sizes.num_decoder_layers * sizes.d_model


def first_tokens(model: Translator, int8: bool = False) -> list[int]:
    """After BOS, of nine sentences."""
    cache = compiled(model, int8).start(*make_batch(0, 9, 5))
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
        cache = compiled(model).start(*make_batch(0, 9, 5))
        log_probabilities, ids = cache.top_tokens(torch.full((9,), BOS), 0, 8)
        expected = [5, 6, *range(5)] if vocabulary == 7 else list(range(5, 13))
        assert ids.tolist() == [expected] * 9  # all seven, or the first eight
        wanted = model.output.bias.log_softmax(0)[expected]
        assert torch.allclose(log_probabilities, wanted.expand(9, -1), atol=1e-5)
        model.output.bias.fill_(-1e9)  # a token that is forbidden so is still a token
        assert first_tokens(model) == [0] * 9


@needs_compiler
@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=needs_int8)])
def test_never_a_token_that_is_not_there(int8):
    """Even where a number overflows on the way."""
    output = fast.CompiledOutput(lively_model(SIZES[0]).output, int8)
    hidden = torch.full((9, 32), math.nan)
    assert all(0 <= token < 40 for token in output.largest(hidden).tolist())
    _, ids = output.most_probable(hidden, 10)
    assert ids.min() >= 0 and ids.max() < 40


@needs_compiler
def test_weights_that_are_not_finite_are_left_to_pytorch():
    model = lively_model(SIZES[0])
    model.transformer.decoder.layers[0].linear1.weight.data[0, 0] = math.nan
    assert "not finite" in fast.why_not_compiled(model.transformer.decoder)
    assert not fast.why_not_compiled(model.transformer.encoder)


@needs_compiler
def test_after_training_a_new_decoder_has_the_new_weights():
    model, sources = lively_model(SIZES[0]), make_sources(0, 8, 9)
    before = search(compiled(model), sources, COLLATE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    assert search(compiled(model), sources, COLLATE) != before


@needs_compiler
@pytest.mark.parametrize("wrong", [WORDS, -1, 2**40])
def test_ids_outside_the_vocabulary_are_refused(wrong):
    model = lively_model(SIZES[1])  # more words to write than to read
    decoder, (src, src_pad) = compiled(model), make_batch(0, 3, 9)
    src[1, 0] = wrong
    with pytest.raises(IndexError):
        decoder.start(src, src_pad)
    src[1, 0] = WORDS - 1
    cache = decoder.start(src, src_pad)
    begin = torch.full((3,), BOS)
    begin[2] = wrong if wrong != WORDS else 1000
    with pytest.raises(IndexError):
        cache.next_tokens(begin, 0)


@needs_compiler
def test_inputs_that_do_not_fit_are_refused_not_read_from_foreign_memory():
    """C++ checks nothing, and a model may be changed after it was prepared."""
    model, (src, src_pad) = lively_model(SIZES[0]), make_batch(0, 3, 9)
    tokens = torch.full((3,), BOS)
    cache = compiled(model).start(src, src_pad)
    cache.next_tokens(tokens, 0)
    with pytest.raises(
        ValueError, match=r"needs \(3, 1, 32\) in fp32 on the CPU, not \(5, 1, 32\)"
    ):
        cache.next_tokens(torch.full((5,), BOS), 1)
    with pytest.raises(NotImplementedError, match=r"tgt_mask \(1, 2\), not \(1, 3\)"):
        cache.next_tokens(tokens, 2)  # a position is left out
    for change in (torch.nn.Module.double, torch.nn.Module.bfloat16):
        model = lively_model(SIZES[0])
        decoder = compiled(model)
        change(model)
        with pytest.raises(
            ValueError, match=r"in fp32 on the CPU, not .* in torch\.(float64|bfloat16)"
        ):
            decoder.start(src, src_pad)
    output = fast.CompiledOutput(lively_model(SIZES[0]).output)
    with pytest.raises(ValueError, match="needs"):
        output.largest(torch.zeros(3, 16))


@needs_compiler
@torch.inference_mode()
def test_padding_may_stand_anywhere():
    model, (src, src_pad) = lively_model(SIZES[0]), make_batch(0, 5, 9)
    src, src_pad = src.flip(1), src_pad.flip(1)
    states = [Decoder(model, compiled=is_compiled).start(src, src_pad) for is_compiled in (1, 0)]
    found, expected = (state.hidden(torch.full((5,), BOS), 0) for state in states)
    assert torch.allclose(found, expected, atol=1e-5)


@needs_compiler
def test_too_long_is_an_error_not_a_read_behind_the_end():
    decoder = compiled(lively_model(SIZES[0], max_length=64))
    with pytest.raises(ValueError, match="65 tokens are more than the 64"):
        decoder.start(torch.full((1, 65), 5), torch.zeros(1, 65, dtype=torch.bool))


# ---------------------------------------------------------------- int8


def rounded_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(out,) scales and (out, in) whole numbers."""
    scale = weight.abs().amax(1).clamp(min=1e-30) / 127
    return scale, (weight / scale[:, None]).round().double()


def round_to_int8(x: Tensor, weight: Tensor, bias: Tensor, zero: int | None = None) -> Tensor:
    """(rows, in) → (rows, out) with the roundings of the C++ and exact products in float64."""
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
    bias = torch.randn(outputs * 16)
    x = torch.randn(rows, inputs * 16) * torch.logspace(-2, 3, rows)[:, None]
    if zero == 0:
        x = x.relu()
    x[0] = 0
    packed = Packed(int8=True)
    y = torch.full((rows, outputs * 16), math.nan)
    build.call(packed.functions.multiply_rows, packed.linear(weight, bias, zero), x, rows, y)
    error = (y - round_to_int8(x, weight, bias, zero)).abs()
    # One step of an input, times the largest weight.
    step = x.abs().amax(1, keepdim=True) / 127 * weight.abs().amax(1)
    # Whole numbers are summed exactly, then scaled in fp32.
    rounding = 1e-6 * (x.abs() @ weight.abs().T + bias.abs())
    assert (error <= 1.01 * step + rounding).all()
    # Half-way between two numbers the last bit of a product decides: seldom in so few rows.
    assert (error > rounding).any(1).sum() <= 1
    # Each of `in` terms is rounded by up to 1/254 of the largest weight or input, three times the
    # usual one: 2 % of |x|·|w|.
    lengths = x.norm(dim=1)[:, None] * weight.norm(dim=1)  # the products themselves may be near 0
    assert (y - x @ weight.T - bias).norm() < 0.04 * lengths.norm() + 1e-3


@needs_int8
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[2]])
@torch.inference_mode()
def test_int8_steps_are_plain_steps_with_the_roundings(sizes, norm_first, monkeypatch):
    """A sum that differs in its last bit may be rounded to another number, and a choice differ."""
    attend = F.scaled_dot_product_attention

    def attend_to_bf16(query, keys, values, *arguments, **named):
        keys, values = (x.bfloat16().to(query.dtype) for x in (keys, values))
        return attend(query, keys, values, *arguments, **named)

    model, (src, src_pad) = lively_model(sizes, norm_first=norm_first), make_batch(0, 5, 50)
    cache = compiled(model, int8=True).start(src, src_pad)
    steps = Decoder(model, compiled=False)
    monkeypatch.setattr(F, "linear", round_to_int8)  # every linear layer looks it up there
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend_to_bf16)
    # PyTorch's fused encoder layer would not call either.
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)
    plain = steps.start(src, src_pad)
    generator, rows = torch.Generator().manual_seed(0), 5
    total = differ = 0
    for position in range(40):
        tokens = torch.randint(0, sizes[1], (rows,), generator=generator)
        found, ids = cache.top_tokens(tokens, position, 4)
        wanted, wanted_ids = plain.top_tokens(tokens, position, 4)
        differ += int((ids[:, 0] != wanted_ids[:, 0]).sum())
        total += rows
        assert (found - wanted).abs().mean() < 0.1
        chosen = next_rows(rows, position, generator)
        cache.select(chosen)
        plain.select(chosen)
        rows = chosen.numel()
    assert differ <= 0.04 * total


# ---------------------------------------------------------------- where it is not used


@needs_compiler
def test_no_compiled_decoder_for_other_models():
    def reason(change=lambda model: None, **sizes) -> str:
        model = make_model(0, **sizes)
        change(model.transformer.decoder)
        return fast.why_not_compiled(model.transformer.decoder)

    def use_gelu(decoder):
        decoder.layers[0].activation = F.gelu

    def hook(decoder):
        decoder.layers[1].linear2.register_forward_hook(lambda module, inputs, output: None)

    def wider_norm(decoder):
        decoder.layers[1].norm3 = torch.nn.LayerNorm(128)

    assert not reason()
    assert "multiple of 16" in reason(d_model=24, nhead=2)  # heads of 12
    assert "multiple of 16" in reason(dim_feedforward=50)
    assert "activation" in reason(use_gelu)
    assert "hook" in reason(hook)
    assert "another shape" in reason(wider_norm)
    assert "float64" in reason(lambda decoder: decoder.double())


def test_autocast_and_int8_that_cannot_be(monkeypatch):
    monkeypatch.setattr(build, "has_vnni", lambda: False)
    monkeypatch.setattr("fast.decoding.has_vnni", lambda: False)
    with pytest.raises(
        UserError, match=r"--precision int8: fast/ is not used for transformer\.encoder \("
    ):
        Decoder(make_model(0), int8=True)
    notes = []
    Decoder(make_model(0), log=notes.append)  # fp32 needs no VNNI
    assert bool(notes) == bool(build.why_not())
    with torch.autocast("cpu", torch.bfloat16):
        Decoder(make_model(0), log=notes.append)
    assert "the precision is not fp32" in notes[-1]


def test_a_slower_decoder_says_why():
    notes = []
    Decoder(make_model(0, d_model=24, nhead=2), log=notes.append)
    (note,) = notes
    assert note.startswith("note: decoding is slower than it could be: fast/ is not used for tr")


def test_without_a_compiler(monkeypatch):
    """Plain decoding, and int8 is refused with the reason, on every processor."""
    monkeypatch.setenv("CXX", "none")
    build.library.cache_clear()
    try:
        decoder = Decoder(make_model(0))
        assert decoder.output is None
        assert set(map(type, decoder.replaced.values())) == {CachedDecoder}
        (hypotheses,) = search(decoder, make_sources(0, 1, 9), COLLATE)
        assert hypotheses[0].tokens
        with pytest.raises(
            UserError, match=r"--precision int8: .* needs Linux, .*; use --precision fp32"
        ):
            Decoder(make_model(0), int8=True)
    finally:
        build.library.cache_clear()
