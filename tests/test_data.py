"""From rows to batches: nothing lost, nothing twice, the same plan on every rank, the cache trusted only when it is right."""

import sys
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data import (
    BucketSampler,
    Collate,
    batches_of,
    collate_for,
    cut_batches,
    default_tokens_per_batch,
    order_by_length,
)
from engine.errors import UserError
from text.prepare import prepare
from text.rows import find_text
from text.store import TokenizedPairs, TokenWriter, flatten

IDS = {"pad": 0, "bos": 1, "eos": 2}
lengths_of_pairs = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=6, max_size=200
)


def as_lengths(pairs):
    source, target = np.array(pairs, np.int32).T
    return {"source": source, "target": target}


@given(
    lengths_of_pairs, st.integers(1, 300), st.integers(1, 3), st.integers(1, 2), st.integers(0, 5)
)
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
            assert all(
                len(rows) for one_rank in micro_batches for rows in one_rank
            )  # no rank without work
            assert next(tokens) == sum(lengths["target"][row] + 1 for row in step)
            widest = max(max(pairs[row]) + 1 for row in step)
            # The budget holds, but for steps that have hardly a pair for each micro-batch.
            assert len(step) * widest <= budget or len(step) < 2 * world_size * accumulate
            seen += step
        assert Counter(seen) == Counter(range(len(pairs)))


@pytest.mark.parametrize(
    "tokens, on_cpu, on_gpu", [(10**4, 1024, 1024), (3 * 10**5, 3000, 3000), (10**7, 4096, 16384)]
)
def test_the_automatic_size_of_a_step(tokens, on_cpu, on_gpu):
    prepared = SimpleNamespace(train=SimpleNamespace(lengths={"target": np.array([tokens])}))
    sizes = [default_tokens_per_batch(prepared, torch.device(name)) for name in ("cpu", "cuda")]
    assert sizes == [on_cpu, on_gpu]


@given(lengths_of_pairs, st.integers(20, 300))
def test_the_steps_that_ask_most_of_the_memory(pairs, budget):
    def loads(step: list[int]) -> list[int]:
        """Places, target tokens, places of attention matrices."""
        source, target = ([pairs[row][side] + 1 for row in step] for side in (0, 1))
        return [
            len(step) * (max(source) + max(target)),
            sum(target),
            len(step) * max(source + target) ** 2,
        ]

    sampler = BucketSampler(as_lengths(pairs), budget)
    heaviest, steps = sampler.heaviest_steps(), islice(sampler, sampler.steps_per_epoch)
    most = [max(column) for column in zip(*map(loads, steps))]
    assert [max(column) for column in zip(*map(loads, heaviest))] == most and len(heaviest) <= 3
    assert loads(heaviest[0])[0] == most[0]
    for step in heaviest:  # its first rows are the widest, whatever share of it is tried
        widths = [max(pairs[row]) for row in step]
        assert widths == sorted(widths, reverse=True)


@given(lengths_of_pairs, st.integers(20, 200), st.integers(0, 30), st.integers(1, 3))
def test_a_restored_sampler_goes_on_where_the_other_was(pairs, budget, step, accumulate):
    lengths = as_lengths(pairs)
    whole = BucketSampler(lengths, budget, seed=3, accumulate=accumulate)
    stream = iter(whole)
    for _ in range(step * accumulate):
        next(stream)
    rest = BucketSampler(lengths, budget, seed=3, accumulate=accumulate)
    rest.step = step
    other = iter(rest)
    assert all(np.array_equal(next(stream), next(other)) for _ in range(10))


def test_epochs_differ_and_seeds_differ():
    lengths = as_lengths([(n % 7 + 3, n % 5 + 3) for n in range(300)])
    plans = {
        (seed, epoch): [
            tuple(batch) for batch in BucketSampler(lengths, 50, seed=seed).epoch_plan(epoch)
        ]
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    # Other batches, not the same in another order.
    assert len({frozenset(map(frozenset, plan)) for plan in plans.values()}) == 4


@given(st.integers(1, 60), st.integers(1, 50), st.integers(1, 6), st.randoms(use_true_random=False))
def test_cut_batches(pairs, budget, smallest, random):
    widths = [random.randint(1, 9) for _ in range(pairs)]
    widths = np.array(widths)
    bounds = cut_batches(widths, budget, smallest)
    assert bounds[0] == 0 and bounds[-1] == len(widths) and bounds == sorted(set(bounds))
    sizes = np.diff(bounds)
    assert len(sizes) == 1 or sizes.min() >= smallest
    for first, size in zip(bounds, sizes):
        assert size * widths[first : first + size].max() <= budget or size < 2 * smallest
    for first, size in zip(
        bounds[:-3], sizes
    ):  # the last bounds move where the rest is too small to stand alone
        more = widths[first : first + size + 1]
        assert len(more) * more.max() > budget or size == smallest, "one more would fit"


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
    meaning = random.normal(3.1, 0.7, (pairs, 1)) + random.normal(
        0, 0.2, (pairs, 2)
    )  # as in text: the sides differ
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
    monkeypatch.setattr(
        "data.order_by_length", lambda *sides: calls.append(1) or order_by_length(*sides)
    )
    batches, tokens = iter(sampler), sampler.target_tokens(0)
    for _ in range(sampler.steps_per_epoch + 1):
        rows = next(batches)
        assert next(tokens) == (lengths["target"][rows] + 1).sum()
    assert len(calls) == 2  # two epochs were begun


def test_more_micro_batches_than_pairs_is_an_error():
    with pytest.raises(UserError, match="3 training pairs are too few for 2 processes × 2"):
        BucketSampler(as_lengths([(3, 3)] * 3), 100, world_size=2, accumulate=2)


@given(
    st.lists(
        st.tuples(*[st.lists(st.integers(3, 99), min_size=1, max_size=20)] * 2),
        min_size=1,
        max_size=8,
    )
)
def test_collate(pairs):
    batch = Collate(IDS, IDS)([(np.array(source), np.array(target)) for source, target in pairs])
    assert batch.src_pad.dtype == torch.bool and torch.equal(batch.src_pad, batch.src == IDS["pad"])
    flat_in = batch.tgt_in.flatten()
    for row, (source, target) in enumerate(pairs):
        assert batch.src[row][~batch.src_pad[row]].tolist() == [*source, IDS["eos"]]
        assert batch.tgt_in[row, : len(target) + 1].tolist() == [IDS["bos"], *target]
        assert (batch.tgt_in[row, len(target) + 1 :] == IDS["pad"]).all()
    assert batch.tgt_out.tolist() == [
        token for _, target in pairs for token in [*target, IDS["eos"]]
    ]
    assert (flat_in[batch.real] != IDS["pad"]).all() and len(batch.real) == (
        flat_in != IDS["pad"]
    ).sum()
    assert batch.source_tokens == sum(len(source) + 1 for source, _ in pairs)
    assert batch.target_tokens == len(batch.tgt_out)


def test_collate_rounds_lengths_up():
    batch = Collate(IDS, IDS, pad_multiple=16)([(np.arange(3, 20), np.arange(3, 6))])
    assert batch.src.shape == (1, 32) and batch.tgt_in.shape == (1, 16)
    batch = Collate(IDS, IDS, pad_multiple=16, longest=20)([(np.arange(3, 20), np.arange(3, 6))])
    assert batch.src.shape == (1, 20)  # the model has no more positions


def test_a_batch_is_made_without_a_loop_over_sentences(tmp_path):
    """A hundred times as many take no more lines of Python, whatever file they are in."""
    writer, ran = TokenWriter(tmp_path / "pairs", dict(source=50, target=50)), Counter()
    for side in ("source", "target"):
        writer.write(side, *flatten([range(3, 7)] * 1600))
    writer.close()
    pairs, tracing = TokenizedPairs(tmp_path / "pairs"), sys.gettrace()

    def trace(frame, event, _):
        ran[size] += event == "line"
        return trace

    for size in (8, 800):  # sentences of 5 tokens with the end token
        batches = batches_of(
            pairs, BucketSampler(pairs.lengths, 5 * size), Collate(IDS, IDS), 0, torch.device("cpu")
        )
        next(batches)  # plans the epoch
        sys.settrace(trace)
        try:
            batch = next(batches)
        finally:
            sys.settrace(tracing)
        assert len(batch.src) == size
    assert 0 < ran[800] < ran[8] + 100  # the garbage collector may run, and Python in it


@pytest.mark.slow
def test_real_data(real_data, tmp_path):
    """All pairs of the course's data: cleaned, tokenised, and losslessly so."""
    said = []
    text = find_text(str(real_data))
    prepared = prepare(
        text, tmp_path / "cache", source_vocab=1000, target_vocab=1000, say=said.append
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
        assert (
            padding_share(prepared.train.lengths, BucketSampler(prepared.train.lengths, budget))
            < 0.05
        )
