"""Cached decoding finds what re-running the stock model finds; beam search scores as that model."""

import math

import pytest
import random_models
import torch
import torch.nn.functional as F
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from random_models import BOS, COLLATE, EOS, beam_search, make_sources, nearly_tie

import decoding
from decoding import (
    Decoder,
    Hypothesis,
    Steps,
    greedy,
    map_in_threads,
    output_limit,
    plan_batches,
)
from model import Translator


def make_model(norm_first=False, dtype=torch.float64, scale=3.0, seed=0) -> Translator:
    """Random weights, blown up so that choices vary and sentences end now and then."""
    sizes = TINY | {"norm_first": norm_first}
    return random_models.make_model(seed, scale=scale, end=3.0, **sizes).to(dtype).eval()


def batch_of(model, sources):
    """Padded sources, their padding, and the most tokens of each output."""
    src, src_pad = COLLATE.pad_sources(sources)
    return src, src_pad, output_limit((~src_pad).sum(1), model.config.max_length)


def search(model, sources, collate, **options):
    """With a cache, and without the C++ of fast/."""
    return decoding.search(Decoder(model, compiled=False), sources, collate, **options)


def best_tokens(model, sources, **options) -> list[list[int]]:
    return [hypotheses[0].tokens for hypotheses in search(model, sources, COLLATE, **options)]


def batches_of(sources, rows: int) -> list[list[int]]:
    return plan_batches(list(map(len, sources)), rows, 10_000)


# ---------------------------------------------------------------- greedy search


def greedy_by_the_stock_model(model, source: list[int]) -> list[int]:
    """One sentence, no cache, no batch: the whole prefix again for every token."""
    src, src_pad, limits = batch_of(model, [source])
    output = []
    with torch.no_grad():
        for _ in range(limits.item()):
            logits = model(src, src_pad, torch.tensor([[BOS, *output]]))[0, -1]
            token = logits.argmax().item()
            if token == EOS:
                break
            output.append(token)
    return output


@pytest.mark.parametrize("seed, norm_first", [(0, False), (1, True)])
def test_cached_greedy_equals_the_stock_model_in_float64(seed, norm_first):
    model = make_model(norm_first, seed=seed, scale=2.0 + seed)
    sources = make_sources(seed, 12, 14)
    # Batches of unlike lengths, which rows leave one by one.
    found = best_tokens(model, sources, batches=batches_of(sources, 1 + 6 * seed))
    expected = [greedy_by_the_stock_model(model, source) for source in sources]
    assert found == expected
    assert len({len(row) for row in expected}) > 3  # a test of many lengths, not of one


def test_in_float32_only_near_ties_differ():
    model, exact = make_model(dtype=torch.float32), make_model()
    exact.load_state_dict(model.state_dict())
    sources = make_sources(0, 20, 14)
    for source, tokens in zip(sources, best_tokens(model, sources)):
        expected = greedy_by_the_stock_model(exact, source)
        assert tokens == expected or nearly_tie(exact, source, tokens, expected)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_as_it_is_needs_no_note(scale, dtype):
    """Changed models are in tests/fast/test_edits.py."""
    notes = []
    with torch.autocast("cpu", torch.bfloat16):
        Decoder(make_model(scale=scale, dtype=dtype), compiled=False, log=notes.append)
    assert not notes


@torch.inference_mode()
def test_a_decoder_leaves_the_model_as_it_was():
    torch.set_float32_matmul_precision("high")  # which a fixture takes back
    model = make_model(dtype=torch.float32).train()
    model.transformer.encoder.eval()  # a part that does not learn
    classes = [type(module) for module in model.modules()]
    modes = [module.training for module in model.modules()]
    state = Decoder(model).start(*COLLATE.pad_sources(make_sources(0, 2, 5)))
    state.next_tokens(torch.tensor([BOS, BOS]), 0)
    assert torch.get_float32_matmul_precision() == "high"
    assert [type(module) for module in model.modules()] == classes
    assert [module.training for module in model.modules()] == modes


# ---------------------------------------------------------------- beam search


def test_beam_of_one_is_greedy():
    model = make_model()
    sources = make_sources(0, 12, 14)
    expected = search(model, sources, COLLATE)
    found = search(model, sources, COLLATE, nbest=1, length_penalty=0.6)
    assert all(hypotheses[0].score is None for hypotheses in expected)
    for greedy_ones, beam_ones in zip(expected, found, strict=True):
        assert (greedy_ones[0].tokens, greedy_ones[0].ended) == (
            beam_ones[0].tokens,
            beam_ones[0].ended,
        )


def model_score(model, source: list[int], tokens: list[int], ended: bool = True) -> float:
    """Log-probability of an output by the stock model."""
    src, src_pad = COLLATE.pad_sources([source])
    with torch.no_grad():
        logits = model(src, src_pad, torch.tensor([[BOS, *tokens]]))
    log_probabilities = F.log_softmax(logits, -1)[0]
    wanted = [*tokens, EOS] if ended else tokens
    return sum(log_probabilities[place, token].item() for place, token in enumerate(wanted))


@pytest.mark.parametrize("norm_first", [False, True])
def test_every_hypothesis_has_the_score_that_the_stock_model_gives_it(norm_first):
    model = make_model(norm_first, scale=2.0)
    sources = make_sources(0, 10, 14)
    found = search(model, sources, COLLATE, beam=4, nbest=3, length_penalty=0.8)
    for source, hypotheses in zip(sources, found, strict=True):
        assert len({tuple(hypothesis.tokens) for hypothesis in hypotheses}) == 3
        scores = [hypothesis.score for hypothesis in hypotheses]
        assert scores == sorted(scores, reverse=True)
        for hypothesis in hypotheses:
            length = len(hypothesis.tokens) + hypothesis.ended
            expected = model_score(model, source, hypothesis.tokens, hypothesis.ended)
            assert math.isclose(hypothesis.score, expected / length**0.8, rel_tol=1e-9)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_beam_search_finds_the_best_of_a_tiny_space(length_penalty):
    """With as many beams as there are prefixes, beam search is exhaustive."""
    model = make_model(scale=2.0, seed=5)
    source = [5, 6, 7]
    src, src_pad = COLLATE.pad_sources([source])
    limits = torch.tensor([2])
    _, scores = beam_search(model, src, src_pad, limits, beam=40, length_penalty=length_penalty)
    words = [word for word in range(40) if word != EOS]
    with torch.no_grad():
        prefixes = torch.tensor([[BOS, a] for a in words])
        logits = model(src.expand(39, -1), src_pad.expand(39, -1), prefixes)
    first, second = F.log_softmax(logits, -1).unbind(1)  # (39, 40) each, of one and two tokens
    best_of_length = [
        first[0, EOS],  # the end at once
        (first[0, words] + second[:, EOS]).max(),  # one token and the end
        (first[0, words, None] + second[:, words]).max(),  # two tokens, cut at the limit
    ]
    lengths = [1, 2, 2]
    best = max(
        (total / length**length_penalty).item() for total, length in zip(best_of_length, lengths)
    )
    assert math.isclose(scores.item(), best, rel_tol=1e-9)


@pytest.mark.parametrize("length_penalty", [0.0, 2.0])
def test_other_sentences_of_the_batch_change_nothing(length_penalty):
    """Sentences that are done leave; those that stay go on as if they were alone."""
    model = make_model(scale=2.0)
    sources = make_sources(0, 12, 14)
    src, src_pad, limits = batch_of(model, sources)
    options = dict(beam=3, length_penalty=length_penalty)
    together, scores = beam_search(model, src, src_pad, limits, **options)
    for row, limit in enumerate(limits):
        alone, score = beam_search(model, *batch_of(model, [sources[row]]), **options)
        assert together[row, :limit].tolist() == alone[0].tolist()
        assert (together[row, limit:] == EOS).all()
        assert math.isclose(scores[row].item(), score.item(), rel_tol=1e-9)


def test_looking_seldom_finds_the_same(monkeypatch):
    """On a GPU sentences that are done stay in the batch for some steps."""
    model = make_model(scale=2.0)
    batch = batch_of(model, make_sources(0, 12, 14))
    tokens, scores = beam_search(model, *batch, beam=3, length_penalty=1.0)
    at_once = greedy(Decoder(model).start(*batch[:2]), batch[2], BOS, EOS)
    monkeypatch.setattr(decoding, "should_check", lambda position, device: position % 8 == 7)
    later, later_scores = beam_search(model, *batch, beam=3, length_penalty=1.0)
    assert torch.equal(tokens, later) and torch.allclose(scores, later_scores, rtol=1e-9)
    assert torch.equal(at_once, greedy(Decoder(model).start(*batch[:2]), batch[2], BOS, EOS))


def test_weak_hypotheses_that_end_early_do_not_cut_off_a_strong_one():
    """Ending has probability 0.1 at each of four steps and then 1."""
    steps = [{5: 0.9, EOS: 0.1}] * 4 + [{EOS: 1.0}] * 6
    tokens, scores = found_on(steps, limit=10, beam=2, penalty=0.0)
    assert tokens[0][:5] == [5, 5, 5, 5, EOS]
    assert scores[0] == pytest.approx(0.9**4)


def test_memory_of_a_beam(monkeypatch):
    """Source keys are not copied per hypothesis; the rows and tokens of a batch are bounded."""
    model = make_model()
    sources = [[5] * 60 for _ in range(128)]
    shapes = []
    take_step = Steps.hidden

    def spy(steps, tokens, position):
        hidden = take_step(steps, tokens, position)
        (decoder,) = steps.decoders
        shapes.append((len(tokens), decoder.own_keys[0].size(2), len(decoder.source_keys[0])))
        return hidden

    monkeypatch.setattr(Steps, "hidden", spy)
    search(model, sources, COLLATE, beam=8, batches=decoding.plan_for(model, [60] * 128, 8)[:1])
    rows, room, source_rows = zip(*shapes)
    assert max(rows) <= 128
    assert max(source_rows) <= 128 / 8
    assert max(room) <= len(shapes) + decoding.CACHE_ROOM
    long = decoding.plan_for(model, [511] * 128, 8)
    assert max(map(len, long)) * 8 * 512 <= 2**15


# ---------------------------------------------------------------- both


@pytest.mark.parametrize("beam", [1, 3])
def test_decodes_under_autocast(beam):
    """bf16 products: the cache is bf16 then, the scores stay float32."""
    model, sources = make_model(dtype=torch.float32, scale=1.0), make_sources(0, 8, 14)
    src, src_pad = COLLATE.pad_sources(sources)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        state = Decoder(model).start(src, src_pad)
        hidden = state.hidden(torch.full((8,), BOS), 0)
        logits = state.logits(hidden)
        found = best_tokens(model, sources, beam=beam)
    assert state.decoders[0].own_keys[0].dtype is torch.bfloat16
    assert hidden.dtype is logits.dtype is torch.float32
    assert len(found) == 8 and all(0 <= token < 40 for row in found for token in row)


def test_a_model_in_training_keeps_no_graph_of_what_it_decodes():
    model = make_model(dtype=torch.float32)
    sources = COLLATE.pad_sources(make_sources(0, 2, 5))
    state = Decoder(model, compiled=False).start(*sources)
    greedy(state, torch.tensor([3, 3]), BOS, EOS)
    assert all(weight.requires_grad for weight in model.parameters())
    (decoder,) = state.decoders
    assert not any(keys.requires_grad for keys in decoder.source_keys + decoder.own_values)


def test_order_empty_sources_and_the_cap():
    model = make_model()
    with torch.no_grad():
        model.output.bias[EOS] = -1e9  # never ends
    sources = [[], [5], [6] * 30, [], [7] * 40]
    for beam in (1, 2):
        found = [hypotheses[0] for hypotheses in search(model, sources, COLLATE, beam=beam)]
        # 1.5 × (source + end) + 10, and 64 positions
        assert [len(hypothesis.tokens) for hypothesis in found] == [0, 13, 56, 0, 64]
        assert sum(not hypothesis.ended for hypothesis in found) == 3
    model.output.bias.data[EOS] = 1e9  # ends at once
    assert best_tokens(model, sources) == [[]] * 5


def test_no_step_once_all_have_ended(monkeypatch):
    model, positions, take_step = make_model(), [], Steps.hidden
    model.output.bias.data[EOS] = 1e9
    decoder = Decoder(model, compiled=False)
    spy = lambda *given: positions.append(given[2]) or take_step(*given)  # noqa: E731
    monkeypatch.setattr(Steps, "hidden", spy)
    for beam in (1, 3):
        decoding.search(decoder, make_sources(0, 8, 14), COLLATE, beam=beam)
    assert max(positions) <= 1  # the limits are 13 and more


# ---------------------------------------------------------------- threads and batches


def test_threads_keep_the_order_the_autocast_and_the_errors():
    def task(number):
        if number == 13:
            raise ValueError("thirteen")
        return number, torch.is_autocast_enabled("cpu")

    with torch.autocast("cpu", torch.bfloat16):
        assert list(map_in_threads(task, list(range(9)), 3)) == [(n, True) for n in range(9)]
    threads = torch.get_num_threads()
    with pytest.raises(ValueError, match="thirteen"):
        list(map_in_threads(task, list(range(20)), 2))
    assert torch.get_num_threads() == threads


def test_all_ranks_have_work():
    for ranks in (1, 2, 4):
        batches = decoding.plan_for(make_model(), [20] * 300, ranks=ranks)
        shares = [sum(map(len, batches[rank::ranks])) for rank in range(ranks)]
        assert max(shares) - min(shares) <= len(batches)


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 10))
def test_every_sentence_is_in_exactly_one_batch(lengths, rows):
    batches = plan_batches(lengths, rows, 100)
    widths = [lengths[row] for batch in batches for row in batch]
    assert widths == sorted(widths, reverse=True)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * (lengths[batch[0]] + 1) <= 100
        assert len(batch) <= math.ceil(1.5 * rows)  # rather one larger batch than a tiny last one
    not_empty = [row for row, length in enumerate(lengths) if length]
    assert sorted(row for batch in batches for row in batch) == not_empty


# ---------------------------------------------------------------- beam search on known numbers


def found_on(steps: list[dict], limit: int, beam: int, penalty: float) -> tuple[list, list[float]]:
    """Beam search where position i has the probabilities steps[i], {token: p}: tokens and scores.

    {"after 5": {…}} are those behind token 5.
    """

    class Scripted:
        def top_tokens(self, tokens, position, count):
            probabilities = torch.full((len(tokens), 40), 1e-9, dtype=torch.float64)
            for row, last in enumerate(tokens.tolist()):
                following = steps[position].get(f"after {last}", steps[position])
                for token, probability in following.items():
                    if isinstance(token, int):
                        probabilities[row, token] = probability
            return probabilities.log().topk(count)

        def select(self, rows):
            pass

    tokens, scores = decoding.beam_search(
        Scripted(), torch.tensor([limit]), BOS, EOS, beam, penalty
    )
    return tokens[0].tolist(), scores[0].exp().tolist()


def test_an_end_that_is_not_among_the_k_best_is_none():
    spread = {token: 0.2 for token in (5, 6, 7, 8, 9)}
    _, scores = found_on([{5: 0.5, 6: 0.3, EOS: 0.15}, spread], limit=2, beam=2, penalty=0.0)
    assert scores == pytest.approx([0.1, 0.1])


def test_places_that_no_hypothesis_has_taken_are_left_out():
    ids = torch.tensor([[[5, EOS], [6, 7]]])
    scores = torch.tensor([[-0.5, -math.inf]])
    found = decoding.to_hypotheses(ids, scores, torch.tensor([2]), EOS)
    assert found == [[Hypothesis([5], -0.5, ended=True)]]


def test_an_end_takes_no_place_of_those_that_go_on():
    words = {token: 0.1 for token in range(10, 20)}
    steps = [{5: 0.5, EOS: 0.3, 6: 0.2}, {"after 5": words, "after 6": {EOS: 0.95}}]
    _, scores = found_on(steps, limit=2, beam=2, penalty=0.0)
    assert scores == pytest.approx([0.3, 0.19], rel=1e-3)


def test_the_search_goes_on_while_a_longer_one_has_a_better_mean():
    steps = [{5: 0.6, EOS: 0.3}, {5: 0.55, EOS: 0.4}, {EOS: 0.99}, {EOS: 0.99}]
    tokens, means = found_on(steps, limit=4, beam=2, penalty=1.0)
    assert tokens[0] == [5, 5, EOS, EOS]
    assert means[0] == pytest.approx((0.6 * 0.55 * 0.99) ** (1 / 3))


# On a GPU the search looks only now and then whether it is done; what it finds is the same.
@pytest.mark.parametrize("looks_at", [range(4), [3]])
def test_the_search_ends_when_the_best_cannot_be_beaten(looks_at, monkeypatch):
    monkeypatch.setattr(decoding, "should_check", lambda position, device: position in looks_at)
    steps = [{5: 0.85, EOS: 0.1}, {6: 0.4, EOS: 0.5}, {EOS: 0.99}, {EOS: 0.99}]
    _, scores = found_on(steps, limit=4, beam=2, penalty=0.0)
    assert scores == pytest.approx([0.425, 0.1])


def test_a_model_in_training_decodes_without_dropout():
    model, sources = make_model(), make_sources(0, 12, 14)
    expected = best_tokens(model, sources)
    assert best_tokens(model.train(), sources) == expected
