"""Cached decoding gives, token for token, what re-running the stock model gives; beams are at least as good as greedy."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from random_models import BOS, COLLATE, EOS, beam_search, make_sources, nearly_tie

import decoding
from decoding import greedy, map_in_threads, output_limit, plan_batches, search
from model import ModelConfig, Translator


def make_model(norm_first=False, dtype=torch.float64, scale=3.0, seed=0) -> Translator:
    """Random weights, blown up so that its choices are lively and sentences end now and then."""
    torch.manual_seed(seed)
    model = (
        Translator(ModelConfig(40, 40, **TINY, dropout=0.1, norm_first=norm_first)).to(dtype).eval()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
            if parameter.dim() == 1:  # biases and norms, or one norm would be like another
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.output.bias[EOS] += 3.0
    return model


def batches_of(sources, rows: int) -> list[list[int]]:
    return plan_batches(list(map(len, sources)), rows)


def greedy_by_the_stock_model(model, source: list[int]) -> list[int]:
    """One sentence, no cache, no batch: the whole prefix again for every token."""
    src, src_pad = COLLATE.pad_sources([source])
    output = []
    with torch.no_grad():
        for _ in range(output_limit(torch.tensor(src.size(1)), model.config.max_length)):
            logits = model(src, src_pad, torch.tensor([[BOS, *output]]))[0, -1]
            token = logits.argmax().item()
            if token == EOS:
                break
            output.append(token)
    return output


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_cached_greedy_equals_the_stock_model_in_float64(norm_first, seed):
    model = make_model(norm_first, seed=seed, scale=2.0 + seed % 3)
    sources = make_sources(seed, 20, 14)
    found = search(
        model, sources, COLLATE, batches=batches_of(sources, 1 + 3 * seed)
    )  # ragged; rows leave one by one
    expected = [greedy_by_the_stock_model(model, source) for source in sources]
    assert found.tokens == expected
    assert len({len(row) for row in expected}) > 3  # a test of many lengths, not of one


@pytest.mark.parametrize("norm_first", [False, True])
def test_in_float32_only_near_ties_differ(norm_first):
    model, exact = make_model(norm_first, torch.float32), make_model(norm_first)
    exact.load_state_dict(model.state_dict())
    sources = make_sources(0, 60, 14)
    for source, tokens in zip(sources, search(model, sources, COLLATE).tokens):
        expected = greedy_by_the_stock_model(exact, source)
        assert tokens == expected or nearly_tie(exact, source, tokens, expected)


@pytest.mark.parametrize("beam", [1, 2])
def test_threads_change_nothing(beam):
    model, sources, found = make_model(), make_sources(0, 30, 14), {}
    for count in (1, 2, 3):
        torch.set_num_threads(count)  # which a fixture takes back
        found[count] = search(model, sources, COLLATE, beam=beam, batches=batches_of(sources, 7))
        assert torch.get_num_threads() == count
    assert found[1] == found[2] == found[3]


def test_threads_keep_the_order_the_autocast_and_the_errors():
    def task(number):
        if number == 13:
            raise ValueError("thirteen")
        return number, torch.is_autocast_enabled("cpu"), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    with torch.autocast("cpu", torch.bfloat16):
        assert list(map_in_threads(task, list(range(9)), 3)) == [
            (n, True, torch.bfloat16) for n in range(9)
        ]
    threads = torch.get_num_threads()
    with pytest.raises(ValueError, match="thirteen"):
        list(map_in_threads(task, list(range(20)), 2))
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_beam_of_one_is_greedy(seed, length_penalty):
    model = make_model(seed=seed)
    src, src_pad = COLLATE.pad_sources(make_sources(seed, 12, 14))
    limits = output_limit((~src_pad).sum(1), model.config.max_length)
    expected = greedy(model, src, src_pad, limits, BOS, EOS)
    found, _ = beam_search(
        model, src, src_pad, limits, BOS, EOS, beam=1, length_penalty=length_penalty
    )
    for row, limit in enumerate(limits.tolist()):
        ended = EOS in expected[row, :limit]
        length = expected[row].tolist().index(EOS) if ended else limit
        assert found[row, :length].tolist() == expected[row, :length].tolist()


def model_score(model, source: list[int], tokens: list[int], ended: bool = True) -> float:
    """Log-probability of an output by the stock model."""
    src, src_pad = COLLATE.pad_sources([source])
    with torch.no_grad():
        log_probabilities = F.log_softmax(model(src, src_pad, torch.tensor([[BOS, *tokens]])), -1)[
            0
        ]
    wanted = [*tokens, EOS] if ended else tokens
    return sum(log_probabilities[place, token].item() for place, token in enumerate(wanted))


def test_beam_scores_are_the_model_s():
    model = make_model(scale=2.0)
    sources = make_sources(0, 10, 14)
    src, src_pad = COLLATE.pad_sources(sources)
    limits = output_limit((~src_pad).sum(1), model.config.max_length)
    found, scores = beam_search(model, src, src_pad, limits, BOS, EOS, beam=3, length_penalty=0.8)
    for source, row, score, limit in zip(sources, found.tolist(), scores.tolist(), limits.tolist()):
        ended = EOS in row[:limit]
        tokens = row[: row.index(EOS)] if ended else row[:limit]
        expected = (
            model_score(model, source, tokens, ended) / ((5 + len(tokens) + ended) / 6) ** 0.8
        )
        assert math.isclose(score, expected, rel_tol=1e-9)


def test_beam_search_finds_the_best_of_a_tiny_space():
    """With as many beams as there are prefixes, beam search is exhaustive."""
    model = make_model(scale=2.0, seed=5)
    source = [5, 6, 7]
    src, src_pad = COLLATE.pad_sources([source])
    _, scores = beam_search(
        model, src, src_pad, torch.tensor([2]), BOS, EOS, beam=20, length_penalty=0.0
    )
    every = [([], True)] + [([a], True) for a in range(40) if a != EOS]
    every += [([a, b], False) for a in range(40) for b in range(40) if EOS not in (a, b)]
    best = max(model_score(model, source, tokens, ended) for tokens, ended in every)
    assert math.isclose(scores.item(), best, rel_tol=1e-9)


@pytest.mark.parametrize("length_penalty", [0.0, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_what_else_is_in_the_batch_changes_no_beam(seed, length_penalty):
    """A sentence that is done, by its limit or because nothing better can come, stays as it is while longer ones go on."""
    model = make_model(scale=2.0, seed=seed)
    sources = make_sources(seed, 12, 14)
    src, src_pad = COLLATE.pad_sources(sources)
    limits = output_limit((~src_pad).sum(1), model.config.max_length)
    together, scores = beam_search(
        model, src, src_pad, limits, BOS, EOS, beam=3, length_penalty=length_penalty
    )
    for row, limit in enumerate(limits):
        options = dict(beam=3, length_penalty=length_penalty)
        alone, score = beam_search(
            model, *COLLATE.pad_sources([sources[row]]), limit[None], BOS, EOS, **options
        )
        assert (
            together[row, :limit].tolist() == alone[0].tolist()
            and (together[row, limit:] == EOS).all()
        )
        assert math.isclose(scores[row].item(), score.item(), rel_tol=1e-9)


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("norm_first", [False, True])
def test_decodes_under_autocast(beam, norm_first):
    """bf16 products: the cache is bf16 then, the scores stay float32."""
    model, sources = make_model(norm_first, torch.float32, scale=1.0), make_sources(0, 8, 14)
    src, src_pad = COLLATE.pad_sources(sources)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cache = decoding.start(model, src, src_pad, 4)
        scores = decoding.step(model, cache, torch.full((8,), BOS), 0)
        found = search(model, sources, COLLATE, beam=beam)
    assert cache.own_keys[0].dtype is torch.bfloat16 and scores.dtype is torch.float32
    assert len(found.tokens) == 8 and all(0 <= token < 40 for row in found.tokens for token in row)


def test_weak_hypotheses_that_end_early_do_not_cut_off_a_strong_one(monkeypatch):
    """Ending has probability 0.1 at each of four steps and then 1: two poor ends come long before the good one."""

    def scripted(model, cache, tokens, position):
        probabilities = torch.full((len(tokens), 40), 1e-9, dtype=torch.float64)
        probabilities[:, 5], probabilities[:, EOS] = (0.9, 0.1) if position < 4 else (1e-9, 1.0)
        return probabilities.log()

    monkeypatch.setattr(decoding, "step", scripted)
    model, (src, src_pad) = make_model(), COLLATE.pad_sources([[7, 8, 9]])
    found, scores = beam_search(
        model, src, src_pad, torch.tensor([10]), BOS, EOS, beam=2, length_penalty=0.0
    )
    assert found[0, :5].tolist() == [5, 5, 5, 5, EOS] and math.isclose(
        scores.item(), 4 * math.log(0.9), rel_tol=1e-6
    )


def test_order_empty_sources_and_the_cap():
    model = make_model()
    with torch.no_grad():
        model.output.bias[EOS] = -1e9  # never ends
    sources = [[], [5], [6] * 30, [], [7] * 40]
    found = search(model, sources, COLLATE)
    assert [len(row) for row in found.tokens] == [
        0,
        13,
        56,
        0,
        64,
    ]  # 1.5 × (source + end) + 10, and 64 positions
    assert found.capped == 3
    model.output.bias.data[EOS] = 1e9  # ends at once
    assert search(model, sources, COLLATE).tokens == [[]] * 5


def test_no_step_once_all_have_ended(monkeypatch):
    model, positions, step = make_model(), [], decoding.step
    model.output.bias.data[EOS] = 1e9
    monkeypatch.setattr(decoding, "step", lambda *given: positions.append(given[3]) or step(*given))
    for beam in (1, 3):
        search(model, make_sources(0, 8, 14), COLLATE, beam=beam)
    assert max(positions) <= 1  # the limits are 13 and more


def test_all_ranks_have_work():
    for ranks in (1, 2, 4):
        batches = decoding.plan_for(make_model(), [20] * 300, ranks=ranks)
        shares = [sum(map(len, batches[rank::ranks])) for rank in range(ranks)]
        assert max(shares) - min(shares) <= len(batches)


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 10), st.integers(1, 3))
def test_every_sentence_is_in_exactly_one_batch(lengths, rows, copies):
    with patch.object(decoding, "TOKENS_PER_BATCH", 100):
        batches = plan_batches(lengths, rows, copies=copies)
    widths = [lengths[row] for batch in batches for row in batch]
    assert widths == sorted(widths, reverse=True)
    assert all(
        len(batch) == 1 or copies * len(batch) * (lengths[batch[0]] + 1) <= 100 for batch in batches
    )
    assert sorted(row for batch in batches for row in batch) == [
        row for row, length in enumerate(lengths) if length
    ]
    assert all(
        len(batch) <= math.ceil(1.5 * rows) for batch in batches
    )  # rather one larger batch than a tiny last one
