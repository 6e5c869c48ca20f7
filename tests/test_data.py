"""From rows to batches: nothing lost, nothing twice, the same plan on every rank, the cache trusted only when it is right."""

import json
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import reversed_digits, write_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from data import BucketSampler, Collate, TokenizedPairs, TokenWriter, collate_for, cut_batches, order_by_length, prepare
from engine.errors import UserError
from text.cleaning import held_out_rows
from text.rows import find_text
from text.subwords import decode, encode

IDS = {"pad": 0, "bos": 1, "eos": 2}
lengths_of_pairs = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=6, max_size=200)


def as_lengths(pairs):
    source, target = np.array(pairs, np.int32).T
    return {"source": source, "target": target}


@settings(deadline=None)
@given(lengths_of_pairs, st.integers(1, 300), st.integers(1, 3), st.integers(1, 2), st.integers(0, 5))
def test_every_epoch_deals_every_pair_once(pairs, budget, world_size, accumulate, seed):
    lengths = as_lengths(pairs)
    options = dict(seed=seed, world_size=world_size, accumulate=accumulate)
    samplers = [BucketSampler(lengths, budget, rank=rank, **options) for rank in range(world_size)]
    steps = samplers[0].steps_per_epoch
    assert all(sampler.steps_per_epoch == steps for sampler in samplers)
    streams, tokens = [iter(sampler) for sampler in samplers], samplers[0].target_tokens(0)
    for _epoch in range(2):
        seen = []
        for _step in range(steps):
            micro_batches = [[next(stream) for _ in range(accumulate)] for stream in streams]
            step = [row for one_rank in micro_batches for rows in one_rank for row in rows]
            assert all(rows for one_rank in micro_batches for rows in one_rank)  # no rank without work
            assert next(tokens) == sum(lengths["target"][row] + 1 for row in step)
            widest = max(max(pairs[row]) + 1 for row in step)
            # The budget holds, but for steps that have hardly a pair for each micro-batch.
            assert len(step) * widest <= budget or len(step) < 2 * world_size * accumulate
            seen += step
        assert Counter(seen) == Counter(range(len(pairs)))


def test_the_step_that_asks_most_of_the_memory():
    sampler = BucketSampler(as_lengths([(9, 3)] * 40 + [(19, 3)] * 10 + [(39, 39)]), 200)
    # 40 × 10 places in two steps, 10 × 20 in one, and one long pair: 20·10², 10·20², 1·40².
    assert sorted(sampler.widest_step()) == list(range(40, 50))
    longer = BucketSampler(as_lengths([(9, 3)] * 40 + [(39, 3)] * 5), 200)
    assert sorted(longer.widest_step()) == list(range(40, 45))


@given(lengths_of_pairs, st.integers(20, 200), st.integers(0, 30), st.integers(1, 3))
def test_a_restored_sampler_goes_on_where_the_other_was(pairs, budget, step, accumulate):
    lengths = as_lengths(pairs)
    whole = BucketSampler(lengths, budget, seed=3, accumulate=accumulate)
    stream = iter(whole)
    for _ in range(step * accumulate):
        next(stream)
    rest = BucketSampler(lengths, budget, seed=3, accumulate=accumulate)
    rest.load_state_dict(json.loads(json.dumps({"step": step})))
    other = iter(rest)
    assert [next(stream) for _ in range(10)] == [next(other) for _ in range(10)]


def test_epochs_differ_and_seeds_differ():
    lengths = as_lengths([(n % 7 + 3, n % 5 + 3) for n in range(300)])
    plans = {(seed, epoch): [tuple(batch) for batch in BucketSampler(lengths, 50, seed=seed).epoch_plan(epoch)]
             for seed in (0, 1) for epoch in (0, 1)}  # fmt: skip
    assert len({tuple(plan) for plan in plans.values()}) == 4
    assert (
        len({frozenset(map(frozenset, plan)) for plan in plans.values()}) == 4
    )  # other batches, not the same reordered


@given(st.lists(st.integers(1, 50), min_size=1, max_size=100), st.integers(1, 200), st.integers(1, 6))
def test_cut_batches(widths, budget, smallest):
    widths = np.sort(np.array(widths))
    bounds = cut_batches(widths, budget, smallest)
    assert bounds[0] == 0 and bounds[-1] == len(widths) and bounds == sorted(set(bounds))
    sizes = np.diff(bounds)
    assert len(sizes) == 1 or sizes.min() >= smallest
    for first, size in zip(bounds, sizes):
        assert size * widths[first : first + size].max() <= budget or size < 2 * smallest


def plainly_cut(widths, budget, smallest):
    """Pair by pair: as many as fit, but at least `smallest`."""
    bounds = [0]
    while bounds[-1] < len(widths):
        last = bounds[-1] + 1
        while last < len(widths) and (last + 1 - bounds[-1]) * max(widths[bounds[-1] : last + 1]) <= budget:
            last += 1
        bounds.append(min(len(widths), max(last, bounds[-1] + smallest)))
    return bounds


@given(st.lists(st.integers(1, 50), min_size=1, max_size=100), st.integers(1, 300), st.integers(1, 4))
def test_batches_are_cut_as_if_pair_by_pair(widths, budget, smallest):
    plain, cut = plainly_cut(widths, budget, smallest), cut_batches(np.array(widths), budget, smallest)
    assert cut[:-2] == plain[: len(cut) - 2]  # the last bounds move where the rest is too small to stand alone


def padding_share(lengths, sampler):
    real = places = 0
    for rows in sampler.epoch_plan(0):
        for side in ("source", "target"):
            widths = lengths[side][rows] + 1
            real, places = real + widths.sum(), places + len(rows) * widths.max()
    return 1 - real / places


@pytest.mark.parametrize("pairs, budget", [(100_000, 4096), (400_000, 16384)])
def test_similar_lengths_share_a_batch(pairs, budget):
    random = np.random.default_rng(0)
    meaning = random.normal(3.1, 0.7, (pairs, 1)) + random.normal(0, 0.2, (pairs, 2))  # as in text: the sides differ
    lengths = as_lengths(np.exp(meaning).clip(1, 200).astype(np.int32))
    assert padding_share(lengths, BucketSampler(lengths, budget)) < 0.05


@given(lengths_of_pairs)
def test_neighbours_are_alike_and_equal_pairs_keep_their_order(pairs):
    source, target = np.array(pairs, np.int16).T
    order = order_by_length(source, target)
    longer = np.maximum(source, target)[order]
    assert (np.diff(longer) >= 0).all()
    for length in np.unique(longer):
        step = np.diff((source - target)[order][longer == length])
        assert (step <= 0).all() if length % 2 else (step >= 0).all()
    same = np.diff(order)[(np.diff(source[order]) == 0) & (np.diff(target[order]) == 0)]
    assert (same > 0).all()


@pytest.mark.parametrize("longest", [126, 127, 32766, 32767])
def test_lengths_at_the_edge_of_their_bits(longest):
    lengths = as_lengths([(longest, 1), (1, longest), (longest, longest), (5, 5)])
    sampler = BucketSampler(lengths, longest + 1)
    rows = [row for batch in sampler.epoch_plan(0) for row in batch.tolist()]
    assert sorted(rows) == [0, 1, 2, 3]
    tokens = sampler.target_tokens(0)
    assert sum(next(tokens) for _ in range(sampler.steps_per_epoch)) == 2 * (longest + 1) + 2 + 6


def test_an_epoch_is_planned_once_and_in_16_bits(monkeypatch):
    """What makes ten million pairs start in seconds: radix-sorted lengths, one plan for batches and token counts."""
    lengths, calls = as_lengths([(n % 50 + 1, n % 41 + 1) for n in range(2000)]), []
    sampler = BucketSampler(lengths, 200)
    assert sampler.source.itemsize <= 2 and sampler.target.itemsize <= 2
    monkeypatch.setattr("data.order_by_length", lambda *sides: calls.append(1) or order_by_length(*sides))
    batches, tokens = iter(sampler), sampler.target_tokens(0)
    for _ in range(sampler.steps_per_epoch + 1):
        rows = next(batches)
        assert next(tokens) == (lengths["target"][rows] + 1).sum()
    assert len(calls) == 2  # two epochs were begun


def test_more_micro_batches_than_pairs_is_an_error():
    with pytest.raises(UserError, match="3 training pairs cannot be dealt to 2 processes × 2"):
        BucketSampler(as_lengths([(3, 3)] * 3), 100, world_size=2, accumulate=2)


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.lists(st.integers(3, 99), min_size=1, max_size=20)] * 2), min_size=1, max_size=8))
def test_collate(pairs):
    batch = Collate(IDS, IDS)([(np.array(source), np.array(target)) for source, target in pairs])
    assert batch.src_pad.dtype == torch.bool and torch.equal(batch.src_pad, batch.src == IDS["pad"])
    flat_in = batch.tgt_in.flatten()
    for row, (source, target) in enumerate(pairs):
        assert batch.src[row][~batch.src_pad[row]].tolist() == [*source, IDS["eos"]]
        assert batch.tgt_in[row, : len(target) + 1].tolist() == [IDS["bos"], *target]
        assert (batch.tgt_in[row, len(target) + 1 :] == IDS["pad"]).all()
    assert batch.tgt_out.tolist() == [token for _, target in pairs for token in [*target, IDS["eos"]]]
    assert (flat_in[batch.real] != IDS["pad"]).all() and len(batch.real) == (flat_in != IDS["pad"]).sum()
    assert batch.source_tokens == sum(len(source) + 1 for source, _ in pairs)
    assert batch.target_tokens == len(batch.tgt_out)


def test_collate_rounds_lengths_up():
    batch = Collate(IDS, IDS, pad_multiple=16)([(np.arange(3, 20), np.arange(3, 6))])
    assert batch.src.shape == (1, 32) and batch.tgt_in.shape == (1, 16)


def test_token_store_round_trip(tmp_path):
    pairs = [([5, 6], [7]), ([8], [9, 10, 11]), ([300, 3], [4])]
    writer = TokenWriter(tmp_path / "store", {"source": 400, "target": 70000})
    writer.write("source", [source for source, _ in pairs])
    writer.write("target", [target for _, target in pairs[:2]])
    writer.write("target", [pairs[2][1]])
    writer.close()
    store = TokenizedPairs(tmp_path / "store")
    assert [(source.tolist(), target.tolist()) for source, target in map(store.__getitem__, range(len(store)))] == pairs
    assert store[0][0].dtype == np.uint16 and store[0][1].dtype == np.int32  # as small as the vocabulary allows
    assert pickle.loads(pickle.dumps(store))[1][1].tolist() == [9, 10, 11]  # as a DataLoader worker gets it


def test_flat_and_nested_sentences_are_written_alike(tmp_path):
    nested, flat = (TokenWriter(tmp_path / name, {"source": 400}) for name in ("nested", "flat"))
    nested.write("source", [[5, 6], [], [300]])
    flat.write_flat("source", np.array([5, 6, 300]), np.array([2, 0, 1]))
    for writer in (nested, flat):
        writer.close()
    for name in ("source.ids.npy", "source.lengths.npy"):
        assert (tmp_path / "nested" / name).read_bytes() == (tmp_path / "flat" / name).read_bytes()


@pytest.fixture
def toy_text(tmp_path):
    pairs = reversed_digits(400)
    return find_text(str(write_pairs(tmp_path / "toy", pairs, {"train": slice(0, 380), "validation": slice(380, 400)})))


def test_prepare(toy_text, tmp_path):
    lines = []
    prepared = prepare(toy_text, tmp_path / "cache", say=lines.append)
    assert any("no test split; " in line for line in lines) and any("380 rows read" in line for line in lines)
    held_out = held_out_rows(toy_text)
    assert prepared.validation_rows == held_out["validation"] == reversed_digits(400)[380:]
    assert len(prepared.train) + len(held_out["test"]) == 380
    texts = {decode(prepared.target_tokenizer, [target])[0] for _, target in map(prepared.train.__getitem__, range(50))}
    assert texts <= {target for _, target in reversed_digits(400)}
    batch = collate_for(prepared)([prepared.train[0], prepared.train[1]])
    assert batch.src.max() < len(prepared.source_tokenizer)


def test_the_cache_is_used_only_for_the_same_data_and_settings(toy_text, tmp_path):
    cache, said = tmp_path / "cache", []
    first = prepare(toy_text, cache, say=lambda line: None)
    again = prepare(toy_text, cache, say=said.append)
    assert again.folder == first.folder and "tokenised earlier" in said[0] and len(said) == 1
    assert prepare(toy_text, cache, target_vocab=500, say=lambda line: None).folder != first.folder
    assert prepare(toy_text, cache, max_length=100, say=lambda line: None).folder != first.folder
    file = toy_text.files["train"][0]
    file.write_text(file.read_text(encoding="utf-8").replace("one", "two", 1), encoding="utf-8")
    assert prepare(toy_text, cache, say=lambda line: None).folder != first.folder


def test_a_damaged_cache_is_made_again(toy_text, tmp_path):
    first = prepare(toy_text, tmp_path / "cache", say=lambda line: None)
    ids = first.train[7][0].tolist()
    file = first.folder / "train" / "source.ids.npy"
    file.write_bytes(file.read_bytes()[:-10])
    said = []
    again = prepare(toy_text, tmp_path / "cache", say=said.append)
    assert "damaged" in said[0] and again.train[7][0].tolist() == ids


def test_over_long_and_lopsided_pairs_are_dropped_and_counted(tmp_path):
    good = reversed_digits(60)
    bad = [("一" * 30, " ".join(["one"] * 30)), ("二", " ".join(["three"] * 15)), ("三" * 10**5, "x" * 10**5)]
    text = find_text(str(write_pairs(tmp_path / "d", good + bad, {"train": slice(5, None), "validation": slice(0, 5),
                                                                   "test": slice(0, 1)})))  # fmt: skip
    said = []
    prepared = prepare(text, tmp_path / "cache", max_length=16, say=said.append)
    assert len(prepared.train) == prepared.summary["counts"]["kept"] == 55
    assert any(
        "58 rows read; dropped 2 longer than --max_length, 1 with very different lengths; 55 kept" in line for line in said
    )


def test_an_own_tokenizer_folder_serves_both_sides(toy_text, tmp_path):
    trained = prepare(toy_text, tmp_path / "cache", say=lambda line: None)
    folder = tmp_path / "joint"
    trained.target_tokenizer.save_pretrained(folder)
    prepared = prepare(toy_text, tmp_path / "cache", tokenizer=str(folder), say=lambda line: None)
    assert prepared.folder != trained.folder
    line = "three two one"
    assert encode(prepared.source_tokenizer, [line]) == encode(prepared.target_tokenizer, [line])


@pytest.mark.slow
def test_real_data(real_data, tmp_path):
    """All pairs of the course's data: cleaned, tokenised, and losslessly so."""
    said = []
    prepared = prepare(
        find_text(str(real_data)), tmp_path / "cache", source_vocab=1000, target_vocab=1000, say=said.append
    )
    counts = prepared.summary["counts"]
    assert counts["read"] == sum(counts[key] for key in counts if key != "read")
    assert len(prepared.train) == counts["kept"] > 0.9 * counts["read"]
    assert prepared.summary["unknown"] == 0
    sampler = BucketSampler(prepared.train.lengths, 4096)
    batch = collate_for(prepared)([prepared.train[row] for row in next(iter(sampler))])
    places = batch.src.numel() + batch.tgt_in.numel()
    assert 1 - (batch.source_tokens + batch.target_tokens) / places < 0.1
    for budget in (4096, 16384):
        assert padding_share(prepared.train.lengths, BucketSampler(prepared.train.lengths, budget)) < 0.05
