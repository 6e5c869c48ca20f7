"""The decoding step in C++ chooses what the plain step chooses; in 8 bits, what an emulation in PyTorch does."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from data import Collate
from decoding import pack, search, start, step
from engine.native.build import call, library
from fast import packed
from fast.compiled import CompiledTranslator, is_possible
from fast.packed import PackedTranslator
from model import ModelConfig, Translator

PAD, BOS, EOS = 0, 1, 2
IDS = {"pad": PAD, "bos": BOS, "eos": EOS}
COLLATE = Collate(IDS, IDS)
SIZES = [  # d_model, heads, feed-forward, vocabulary: one and several vectors a head, whole and broken panels
    (32, 2, 48, 40),
    (64, 1, 144, 1000),
    (96, 2, 64, 64),
    (256, 8, 1024, 300),
]


def make_model(sizes=SIZES[0], norm_first=False, seed=0, scale=2.0) -> Translator:
    """Random weights, blown up so that its choices are lively."""
    torch.manual_seed(seed)
    width, heads, wide, vocabulary = sizes
    model = Translator(ModelConfig(60, vocabulary, width, heads, 2, 2, wide, 0.1, norm_first, 64)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
        model.output.bias.normal_()
    return model


def make_batch(rows: int, longest: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (rows,), generator=generator).tolist()
    return COLLATE.pad_sources([torch.randint(3, 60, (length,), generator=generator).tolist() for length in lengths])


needs_compiler = pytest.mark.skipif(not is_possible(make_model()), reason="no compiler")
needs_int8 = pytest.mark.skipif(not is_possible(make_model(), int8=True), reason="no compiler or no VNNI")


def far_choices(chosen: Tensor, logits: Tensor, gap: float) -> int:
    """How many chosen tokens (B,) have a logit that is clearly less than the largest one."""
    return int((logits.amax(1) - logits.gather(1, chosen[:, None])[:, 0] > gap).sum())


@torch.inference_mode()
def forced_steps(model: Translator, native: CompiledTranslator, src: Tensor, src_pad: Tensor, leave: bool = False):
    """Feed both the same tokens for 40 steps; → (chosen (B,), float64 logits (B, V)) of each step."""
    exact = Translator(model.config).double().eval()
    exact.load_state_dict(model.state_dict())
    ours, plain = native.start(src, src_pad), start(exact, src, src_pad, 40)
    generator, rows = torch.Generator().manual_seed(1), len(src)
    for position in range(40):
        if leave and position % 7 == 6 and rows > 1:
            keep = torch.randperm(rows, generator=generator)[: rows - 1 - rows // 4].sort().values
            ours.select(keep)
            plain.select(keep)
            rows = len(keep)
        tokens = torch.randint(0, model.config.target_vocab, (rows,), generator=generator)
        yield native.next_tokens(ours, tokens, position), step(exact, plain, tokens, position)


@needs_compiler
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_step_chooses_the_largest_logit(sizes, rows, norm_first):
    model = make_model(sizes, norm_first)
    for chosen, logits in forced_steps(model, CompiledTranslator(model), *make_batch(rows, 50), leave=True):
        assert far_choices(chosen, logits, 1e-3) == 0


@needs_compiler
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 9))
def test_search_chooses_the_tokens_of_the_other_ways(seed, norm_first, rows):
    """Against PyTorch's products in fp32: after a near tie two outputs may go apart, so few may differ."""
    model = make_model(norm_first=norm_first, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    sources = [torch.randint(3, 40, (1 + i % 9,), generator=generator).tolist() for i in range(12)]
    ours = search(model, sources, COLLATE, rows_per_batch=rows, packed=CompiledTranslator(model))
    other = search(model, sources, COLLATE, rows_per_batch=rows, packed=PackedTranslator(model))
    assert sum(map(list.__ne__, ours.tokens, other.tokens)) <= 1


@needs_compiler
@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=needs_int8)])
def test_threads_and_batches_change_nothing(int8):
    """Every row is computed alone: neither its neighbours nor other threads matter, to the last bit."""
    model, sources = make_model(SIZES[1]), [[3 + i % 50] * (1 + i * 7 % 30) for i in range(40)]
    native, threads, found = CompiledTranslator(model, int8), torch.get_num_threads(), {}
    try:
        for count, rows in ((1, 40), (2, 7), (3, 1), (2, 20)):
            torch.set_num_threads(count)
            found[count, rows] = search(model, sources, COLLATE, rows_per_batch=rows, packed=native).tokens
    finally:
        torch.set_num_threads(threads)
    assert all(tokens == found[1, 40] for tokens in found.values())
    assert len(set(map(tuple, found[1, 40]))) > 10


@needs_compiler
@pytest.mark.parametrize("vocabulary", [7, 64, 65, 1000])
def test_the_first_of_equals(vocabulary):
    model = make_model((32, 2, 48, vocabulary))
    with torch.no_grad():
        model.output.weight.zero_()
        model.output.bias.zero_()
        model.output.bias[5:] = 1
    native = CompiledTranslator(model)
    cache = native.start(*make_batch(9, 5))
    assert native.next_tokens(cache, torch.zeros(9, dtype=torch.long), 0).tolist() == [5] * 9
    with torch.no_grad():
        model.output.bias.fill_(-1e9)  # a token that is forbidden so is still a token
    native = CompiledTranslator(model)
    assert native.next_tokens(native.start(*make_batch(9, 5)), torch.zeros(9, dtype=torch.long), 0).tolist() == [0] * 9


def test_never_a_token_that_is_not_there():
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    for int8 in (False, True):
        if is_possible(model, int8):
            native = CompiledTranslator(model, int8)
            chosen = native.next_tokens(native.start(*make_batch(9, 5)), torch.zeros(9, dtype=torch.long), 0)
            assert ((chosen >= 0) & (chosen < 40)).all()


# ----------------------------------------------------------------------------------------------------------------------- int8


def emulate_int8(weight: Tensor, bias: Tensor, zero: int | None = None):
    """(rows, in) → (rows, out) with the roundings of the C++, and products that are exact in float64."""
    scale = weight.abs().amax(1).clamp(min=1e-30) / 127
    rounded = (weight / scale[:, None]).round().double()

    def linear(x: Tensor) -> Tensor:
        steps = 255 if zero == 0 or (zero is None and (x >= 0).all()) else 127
        bound = x.abs().amax(1, keepdim=True).clamp(min=1e-30)
        numbers = (x.double() * (steps / bound).double()).round()
        return ((numbers @ rounded.T) * ((bound / steps) * scale) + bias).to(x.dtype)

    return linear


@needs_int8
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.sampled_from([0, 128]))
def test_int8_products_are_those_of_the_emulation(seed, rows, inputs, outputs, zero):
    torch.manual_seed(seed)
    weight, bias = (
        torch.randn(outputs * 16, inputs * 16) * torch.logspace(-3, 1, outputs * 16)[:, None],
        torch.randn(outputs * 16),
    )
    x = torch.randn(rows, inputs * 16) * torch.logspace(-2, 3, rows)[:, None]
    x = x.relu() if zero == 0 else x
    x[0] = 0
    native, y = CompiledTranslator(make_model(), int8=True), torch.full((rows, outputs * 16), math.nan)
    call(native.kernels.multiply_rows, native.pack_linear(weight, bias, zero), x, rows, y)
    error = (y - emulate_int8(weight, bias, zero)(x)).abs()
    step = x.abs().amax(1, keepdim=True) / 127 * weight.abs().amax(1)  # of one input, times the largest weight
    assert (error <= 1.01 * step + 1e-5).all()
    # Half-way between two numbers the last bit of a product decides which it is: seldom in so few rows.
    assert (error > 1e-4 * step * inputs + 1e-5).any(1).sum() <= 1
    lengths = x.norm(dim=1)[:, None] * weight.norm(dim=1)  # the products themselves may be near 0
    assert (y - x @ weight.T - bias).norm() < 0.04 * lengths.norm() + 1e-3


@needs_int8
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_int8_steps_are_those_of_the_emulation(sizes, norm_first, monkeypatch):
    """A sum that differs in its last bit can fall on the other side of a rounding, so a choice may differ now and then."""

    def attend(query, keys, values, mask):
        keys, values = (x.bfloat16().to(query.dtype) for x in (keys, values))
        return torch.baddbmm(mask, query, keys.transpose(1, 2)).softmax(-1) @ values

    monkeypatch.setattr(packed, "attend", attend)
    monkeypatch.setattr(packed, "pack_linear", emulate_int8)
    model, (src, src_pad) = make_model(sizes, norm_first), make_batch(17, 50)
    emulated, native = PackedTranslator(model), CompiledTranslator(model, int8=True)
    differ = 0
    with torch.inference_mode():
        theirs, ours = emulated.start(src, src_pad), native.start(src, src_pad)
        for position in range(40):
            tokens = torch.randint(0, sizes[-1], (17,))
            differ += int(
                (emulated.next_tokens(theirs, tokens, position) != native.next_tokens(ours, tokens, position)).sum()
            )
    assert differ <= 0.04 * 40 * 17


@needs_int8
def test_int8_chooses_nearly_what_fp32_does():
    model = make_model(SIZES[3], scale=1.0)
    for chosen, logits in forced_steps(model, CompiledTranslator(model, int8=True), *make_batch(17, 30)):
        assert far_choices(chosen, logits, 0.05 * logits.std().item()) == 0


# --------------------------------------------------------------------------------------------------------------- where it is not


def test_other_models_take_another_way():
    assert type(pack(make_model().double())) is PackedTranslator
    assert type(pack(make_model((24, 2, 48, 40)))) is PackedTranslator  # heads of 12
    assert type(pack(make_model((32, 2, 50, 40)))) is PackedTranslator
    with torch.autocast("cpu", torch.bfloat16):
        assert pack(make_model()) is None


def test_without_a_compiler(monkeypatch):
    model, sources = make_model(), [[5, 6, 7], [8] * 20]
    expected = search(model, sources, COLLATE).tokens
    monkeypatch.setenv("CXX", "none")
    library.cache_clear()
    try:
        assert type(pack(model)) is PackedTranslator
        assert search(model, sources, COLLATE).tokens == expected
    finally:
        library.cache_clear()


def test_too_long_is_an_error_not_a_read_behind_the_end():
    model = make_model()
    for packed_model in (pack(model), PackedTranslator(model)):
        with pytest.raises(ValueError, match="65 tokens"):
            packed_model.start(torch.full((1, 65), 5), torch.zeros(1, 65, dtype=torch.bool))
