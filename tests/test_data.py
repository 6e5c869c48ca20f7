"""From texts to batches: no pair lost or repeated, one plan for all ranks, no damaged cache."""

import errno
import os
import pickle
import shutil
from collections import Counter
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, reversed_digits, write_pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertTokenizerFast

import data
from data import (
    BucketSampler,
    Collate,
    Prepared,
    TextSettings,
    _cut_batches,
    default_tokens_per_batch,
    find_and_prepare,
    prepare,
)
from engine.errors import UserError
from text.cleaning import held_out_rows
from text.reading import find_text
from text.rows import TokenizedPairs, TokenWriter, flatten
from text.subwords import decode, encode

IDS = {"pad": 0, "bos": 1, "eos": 2}


# ------------------------------------------------------------------------ load, clean, tokenise


def quiet(line: str) -> None:
    """A log for what the test does not look at."""


@pytest.fixture
def toy(tmp_path) -> Path:
    splits = {"train": slice(0, 70), "validation": slice(70, 80)}
    return write_pairs(tmp_path / "toy", reversed_digits(80), splits)


def prepare_toy(toy: Path, cache: Path, log=quiet, **settings) -> Prepared:
    settings = {"source_vocab": 300, "target_vocab": 300} | settings
    return prepare(find_text(str(toy)), cache, TextSettings(**settings), log)


def test_prepare(toy, tmp_path, monkeypatch):
    assert data.LINES_AT_ONCE % 2 == 0  # a pair is two lines
    monkeypatch.setattr(data, "LINES_AT_ONCE", 50)  # so that 70 pairs are read in three parts
    lines = []
    prepared = prepare_toy(toy, tmp_path / "cache", lines.append)
    assert any("70 rows read; dropped none; 70 kept" in line for line in lines)
    assert prepared.validation_rows == held_out_rows(find_text(str(toy)))["validation"]
    assert prepared.summary["unknown"] == 0
    for row, (source, target) in enumerate(reversed_digits(70)):
        ids = prepared.train[row]
        assert decode(prepared.source_tokenizer, [ids[0]]) == [source]
        assert decode(prepared.target_tokenizer, [ids[1]]) == [target]
        assert ids[1].tolist() == encode(prepared.target_tokenizer, [target])[0]


@pytest.mark.parametrize("pairs, size", [(380, 1000), (10_000, 2000), (10**6, 16000)])
def test_automatic_sizes_of_the_vocabularies(pairs, size):
    assert TextSettings().for_pairs(pairs) == TextSettings(size, size)
    assert TextSettings(300, 0, max_length=9).for_pairs(pairs) == TextSettings(300, size, "", 9)


def test_the_tokenizers_learn_from_pairs_from_all_over(toy, tmp_path, monkeypatch):
    samples, train_tokenizer = [], data.train_tokenizer

    def train(lines, size):
        samples.append(list(lines))
        return train_tokenizer(samples[-1], size)

    monkeypatch.setattr(data, "TOKENIZER_LINES", 25)
    monkeypatch.setattr(data, "train_tokenizer", train)
    prepare_toy(toy, tmp_path / "cache")
    assert list(zip(*samples)) == reversed_digits(80)[:70:3]


def test_overlong_and_lopsided_pairs_are_dropped_and_counted(tmp_path):
    bad = [
        ("一" * 30, " ".join(["one"] * 30)),
        ("二", " ".join(["three"] * 15)),
        ("三" * 10**5, "x" * 10**5),
    ]
    pairs = reversed_digits(60) + bad
    splits = {"train": slice(5, None), "validation": slice(0, 5), "test": slice(0, 1)}
    log = []
    folder = write_pairs(tmp_path / "d", pairs, splits)
    prepared = prepare_toy(
        folder, tmp_path / "cache", log.append, source_vocab=0, target_vocab=0, max_length=16
    )
    assert len(prepared.train) == prepared.summary["counts"]["kept"] == 55
    dropped = "dropped 2 of --max_length tokens or more, 1 with very different lengths; 55 kept"
    assert any(f"58 rows read; {dropped}" in line for line in log)


@pytest.mark.parametrize(
    "split, content, error",
    [
        (None, "", "no tokenizer can be read"),
        ("validation", "\n", "the validation split has no rows; add rows"),
        ("test", "\n", "the test split has no rows; add rows"),
        (
            "validation",
            '{"zh": "一", "en": ""}\n',
            "every row of the validation split has an empty",
        ),
        ("test", '{"zh": " ", "en": "one"}\n', "every row of the test split has an empty side"),
    ],
)
def test_what_is_wrong_from_the_start_fails_before_the_cleaning(
    toy, tmp_path, monkeypatch, split, content, error
):
    settings = {}
    if split:
        (toy / f"{split}.jsonl").write_text(content, encoding="utf-8")
    else:
        settings = {"tokenizer": str(tmp_path)}
    monkeypatch.setattr(data, "clean_pairs", lambda *_: pytest.fail("cleaned"))
    with pytest.raises(UserError, match=error):
        prepare_toy(toy, tmp_path / "cache", **settings)


# ---- the cache


def test_the_cache_is_used_only_for_the_same_data_and_settings(toy, tmp_path, monkeypatch):
    cache, log = tmp_path / "cache", []
    first = prepare_toy(toy, cache)
    assert prepare_toy(toy, cache, log.append).folder == first.folder
    assert len(log) == 2 and "tokenised earlier" in log[0] and "rows read; dropped" in log[1]
    settings = [
        TextSettings(300, 300),
        TextSettings(300, 301),
        TextSettings(301, 300),
        TextSettings(300, 300, max_length=100),
        TextSettings(300, 300, tokenizer=str(first.folder / "tokenizer/source")),
    ]
    text = find_text(str(toy))
    keys = {data._cache_key(text, each) for each in settings}
    keys.add(data._cache_key(replace(text, source="en", target="zh"), settings[0]))
    assert len(keys) == 6 and first.folder.name in keys
    with monkeypatch.context() as patch:  # the code has changed
        patch.setattr(data, "FORMAT", data.FORMAT + 1)
        assert data._cache_key(text, settings[0]) not in keys
    file = toy / "train.jsonl"
    file.write_text(file.read_text(encoding="utf-8").replace("one", "two", 1), encoding="utf-8")
    assert prepare_toy(toy, cache).folder != first.folder


@pytest.mark.parametrize(
    "name, left",
    [
        ("train/source.lengths.npy", 0.7),
        ("train/target.ids.npy", 0.7),
        ("validation.jsonl", 0.7),
        ("summary.json", 0.0),
        ("tokenizer/source/tokenizer.json", 0.7),
    ],
)
def test_a_cache_with_a_file_cut_short_is_made_again(toy, tmp_path, name, left):
    folder = prepare_toy(toy, tmp_path / "cache").folder
    content = (folder / name).read_bytes()
    os.truncate(folder / name, int(left * len(content)))
    log = []
    prepare_toy(toy, tmp_path / "cache", log.append)
    assert "is damaged and made again" in log[0] and "\n" not in log[0]
    assert (folder / name).read_bytes() == content


@pytest.mark.parametrize("name, left", [("validation.jsonl", "{"), ("", "")])
def test_a_link_to_a_damaged_or_missing_cache_gives_way_to_an_own_folder(toy, tmp_path, name, left):
    shared = prepare_toy(toy, tmp_path / "shared").folder
    link = tmp_path / "cache" / shared.name
    link.parent.mkdir()
    link.symlink_to(shared)
    assert prepare_toy(toy, link.parent).folder.resolve() == shared  # intact: it is used
    if name:
        (shared / name).write_text(left)
    else:
        shutil.rmtree(shared)
    log = []
    own = prepare_toy(toy, link.parent, log.append).folder
    assert own == link and own.is_dir() and not own.is_symlink()
    assert "replaces the link" in log[0] and "\n" not in log[0]
    assert not name or (shared / name).read_text() == left


def test_a_cache_of_another_user_is_one_line(toy, tmp_path, monkeypatch):
    folder = prepare_toy(toy, tmp_path / "cache").folder
    (folder / "summary.json").write_text("{")  # so that it has to be made again

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(UserError, match=r"cannot write to .*cache: Perm.*; choose another --run"):
        prepare_toy(toy, tmp_path / "cache")


# ---- what train.py names


def flags(**changes) -> SimpleNamespace:
    defaults = dict(data="", source="zh", target="en")
    return SimpleNamespace(**defaults | asdict(TextSettings(300, 300)) | changes)


def test_a_tokenizer_folder_serves_both_sides(toy, tmp_path, monkeypatch):
    trained = prepare_toy(toy, tmp_path / "cache")
    trained.target_tokenizer.save_pretrained(tmp_path / "joint")
    monkeypatch.chdir(tmp_path)
    log = []
    config = flags(data="toy", tokenizer="joint")
    folder, found, tokenizer = find_and_prepare(config, tmp_path / "cache", log.append)
    # Absolute, for a resumed run, wherever it is started.
    assert (found, tokenizer) == (str(toy), str(tmp_path / "joint"))
    assert any("have no effect" in line for line in log)
    prepared = data.load_prepared(folder)
    line = "three two one"
    expected = encode(trained.target_tokenizer, [line])
    assert encode(prepared.source_tokenizer, [line]) == expected
    assert encode(prepared.target_tokenizer, [line]) == expected


def test_the_settings_reach_the_preparation(toy, tmp_path, monkeypatch):
    seen = []

    def note(text, cache, settings, log):
        seen.append(settings)
        return SimpleNamespace(folder="")

    monkeypatch.setattr(data, "prepare", note)
    settings = dict(source_vocab=301, target_vocab=302, max_length=16)
    find_and_prepare(flags(data=str(toy), **settings), tmp_path, quiet)
    assert asdict(seen[0]) == settings | {"tokenizer": ""}


def test_a_tokenizer_is_known_by_its_content(toy, tmp_path):
    prepare_toy(toy, tmp_path / "cache").target_tokenizer.save_pretrained(tmp_path / "mine")
    shutil.copytree(tmp_path / "mine", tmp_path / "copy")
    text = find_text(str(toy))

    def key(name: str) -> str:
        return data._cache_key(text, TextSettings(tokenizer=str(tmp_path / name)))

    before = key("mine")
    assert key("copy") == before
    file = tmp_path / "mine/tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert key("mine") != before


def test_a_working_directory_whose_name_is_not_utf8(toy, tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"\xd6\xd0")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system has only names in UTF-8")
    shutil.copytree(toy, folder / "toy")
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="is not UTF-8; rename the folder"):
        find_and_prepare(flags(data="toy"), tmp_path / "cache", quiet)


def test_links_are_read_by_their_own_names_and_from_where_they_lead(toy, tmp_path, monkeypatch):
    """As in the hub's cache, whose files are links to names without an ending."""
    (tmp_path / "far" / "near").mkdir(parents=True)
    (toy / "train.jsonl").rename(tmp_path / "far" / "blob")
    (tmp_path / "far" / "pairs.jsonl").symlink_to("blob")
    (tmp_path / "link").symlink_to(tmp_path / "far" / "near")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "prepare", lambda text, *_, **__: SimpleNamespace(folder=text))
    text, found, _ = find_and_prepare(flags(data="link/../pairs.jsonl"), tmp_path, quiet)
    assert os.path.isabs(found) and found.endswith("pairs.jsonl")
    assert os.path.samefile(found, tmp_path / "far" / "blob") and text.files["train"]


@pytest.mark.parametrize("given", [True, False])
def test_training_on_the_sample_says_so(tmp_path, monkeypatch, given):
    sample, log = str(ROOT / "sample"), []
    monkeypatch.setattr(data, "default_path", lambda: sample)
    monkeypatch.setattr(data, "prepare", lambda text, *_, **__: SimpleNamespace(folder=text))
    find_and_prepare(flags(data=sample if given else ""), tmp_path, log.append)
    assert "data: bundled sample, not WMT19: this score says only that the program works" in log
    assert (log[0] == f"data: no --data given, using {sample}") == (not given)


# ---- selection


def store(folder: Path, pairs: list[tuple]) -> TokenizedPairs:
    """`TokenizedPairs` of these ids."""
    writer = TokenWriter(folder, {"source": range(400), "target": range(400)})
    for side, rows in zip(("source", "target"), zip(*pairs)):
        writer.write(side, flatten(rows))
    writer.close()
    return TokenizedPairs(folder)


def prepared_of(folder: Path, train: list[tuple], validation: list[tuple]) -> Prepared:
    """`Prepared` of pairs of token ids; the vocabularies have 400."""
    splits = store(folder / "train", train), store(folder / "validation", validation)
    counts = {"counts": {"kept": len(train)}}
    return Prepared(folder, range(400), range(400), *splits, [], counts)


@pytest.mark.parametrize("rows", [199, 200])  # with fewer rows the gap may be chance
def test_train_becomes_as_long_for_its_sources_as_validation(tmp_path, monkeypatch, rows):
    """Every fifth pair has half a target: they go, and a worker process has the same rows."""
    train = [([row + 3] * 8, [row + 3] * (4 if row % 5 == 0 else 8)) for row in range(100)]
    log, prepared = [], prepared_of(tmp_path, train, [([3] * 8, [3] * 8)] * rows)
    monkeypatch.setattr(data, "like_validation", lambda pairs, *_: range(len(pairs)))
    prepared.select_like_validation(log.append)
    prepared.select_like_validation(log.append)  # now there is no gap any more
    if rows < 200:
        assert len(prepared.train) == 100 and log == []
        return
    assert log == ["data: 20 of 100 pairs are left out: with a short target (--select)"]
    assert prepared.summary["counts"] == {"kept": 80, "short target": 20}
    expected = [row + 3 for row in range(100) if row % 5]
    for pairs in (prepared.train, pickle.loads(pickle.dumps(prepared.train))):
        assert [pairs[row][0].tolist() for row in range(80)] == [[id] * 8 for id in expected]
        assert pairs.take(np.array([0, 79]))[1].ids.tolist() == [4] * 8 + [102] * 8
        chosen = pairs.subset(np.array([1, 79]))  # of those that were chosen
        assert [chosen[row][0].tolist() for row in range(2)] == [[5] * 8, [102] * 8]


def test_an_epoch_takes_the_steps_in_random_order():
    sampler = BucketSampler(as_lengths([(n, n) for n in range(1, 100)]), 200)
    orders = [[int(rows.min()) for rows in sampler.epoch_plan(epoch)] for epoch in (0, 1)]
    assert orders[0] != orders[1] and sorted(orders[0]) not in orders


def test_micro_batches_of_a_step_have_similar_lengths():
    lengths = as_lengths([(n, n) for n in range(1, 100)])
    ranks = [iter(BucketSampler(lengths, 600, rank=rank, world_size=2)) for rank in (0, 1)]
    for _ in range(8):
        widest = [lengths["source"][next(rank)].max() for rank in ranks]
        assert abs(widest[0] - widest[1]) == 1


def test_pad_and_eos_may_be_one_id():
    """As in GPT-2's tokenizer."""
    one = {"pad": 2, "bos": 1, "eos": 2}
    batch = Collate(one, one)([([5, 6], [7]), ([8], [9, 10])])
    assert batch.src_pad.tolist() == [[False, False, False], [False, False, True]]
    assert batch.tgt_out.tolist() == [7, 2, 9, 10, 2] and batch.source_tokens == 5


def test_validation_rows_are_cleaned_and_cut_for_the_loss(tmp_path):
    pairs = reversed_digits(60)
    pairs[:2] = [("一" * 30, "one"), ("二\u200b 三", "three two\x00")]
    splits = {"train": slice(5, None), "validation": slice(0, 5), "test": slice(0, 1)}
    log, folder = [], write_pairs(tmp_path / "d", pairs, splits)
    prepared = prepare_toy(folder, tmp_path / "cache", log.append, max_length=16)
    assert "validation: 1 source sentences are cut to 15 tokens for the loss" in log
    assert prepared.validation.lengths["source"].max() == 15
    source, target = prepared.validation[1]
    assert decode(prepared.source_tokenizer, [source]) == ["二 三"]
    assert decode(prepared.target_tokenizer, [target]) == ["three two"]
    assert prepared.validation_rows == pairs[:5]


def test_a_large_validation_split_is_thinned_out(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "VALIDATION_ROWS", 4)
    prepared = prepare_toy(toy, tmp_path / "cache")
    rows = reversed_digits(80)[70:]
    assert prepared.validation_rows == [rows[place] for place in (0, 2, 5, 7)]
    assert len(prepared.validation) == 4


def test_one_pair_is_too_few(tmp_path):
    splits = {"train": slice(5, 6), "validation": slice(5), "test": slice(5)}
    folder = write_pairs(tmp_path / "d", reversed_digits(6), splits)
    with pytest.raises(UserError, match="1 training pairs left, at least 2 are needed"):
        prepare_toy(folder, tmp_path / "cache")


def test_pairs_that_are_too_long_in_tokens_may_leave_too_few(tmp_path):
    digits = [source for source, _ in reversed_digits(30)]
    target = "one two three four five six seven eight nine"
    pairs = [("".join(three), target) for three in zip(digits, digits[1:], digits[2:])]
    splits = {"train": slice(5, None), "validation": slice(5), "test": slice(5)}
    folder = write_pairs(tmp_path / "d", pairs, splits)
    with pytest.raises(UserError, match="0 training pairs left, at least 2 are needed"):
        prepare_toy(folder, tmp_path / "cache", max_length=8)


def words(draw: np.random.Generator, first: int, pairs: int) -> list[tuple]:
    """Pairs of 4 to 30 ids a side, drawn from the 100 after `first`, frequent ones first."""
    rows = []
    for length in draw.integers(4, 31, pairs):
        places = np.minimum(draw.geometric(0.05, (2, length)) - 1, 99)
        rows.append(tuple((first + places).tolist()))
    return rows


@pytest.mark.parametrize("foreign, expected", [(0.1, 0.1), (0.3, 0.3), (0.8, 0.5), (0.0, 0.0)])
def test_pairs_in_other_words_than_validation_are_left_out(
    foreign, expected, tmp_path, monkeypatch
):
    """Half of all pairs at most. Of data in validation's words all stay, though 1 % are below."""
    draw, other = np.random.default_rng(0), round(foreign * 1000)
    train = words(draw, 100, other) + words(draw, 0, 1000 - other)
    prepared = prepared_of(tmp_path, train, words(draw, 0, 300))
    monkeypatch.setattr(data, "without_short_targets", lambda sides, _: range(len(sides["source"])))
    prepared.select_like_validation(quiet)
    left_out = prepared.summary["counts"].get("unlike validation", 0)
    chance = 20 if 0 < foreign < 0.5 else 0  # 1 % of the pairs in the same words: 7 ± 3
    assert abs(left_out - 1000 * expected) <= chance
    first_ids = [prepared.train[row][0][0] for row in range(len(prepared.train))]
    assert (max(first_ids) < 100) == (foreign <= 0.5)
    assert len(prepared.train) == prepared.summary["counts"]["kept"] == 1000 - left_out


def test_data_of_the_shape_of_the_course(tmp_path):
    """Half of train are short titles, validation are sentences: only the sentences are kept."""
    places = [
        (f"{a}{b}{c}", f"{d} {e} {f}")
        for a, d in zip("东西南北中", "East West South North Central".split())
        for b, e in zip("红白黑黄", "Red White Black Yellow".split())
        for c, f in zip("山河城镇村", "Mountain River City Town Village".split())
    ]
    sentences = reversed_digits(320, shortest=8, longest=20)
    pairs = sentences[:100] + places + sentences[100:]
    splits = {"train": slice(200), "validation": slice(200, None)}
    folder = write_pairs(tmp_path / "d", pairs, splits)
    prepared = prepare_toy(folder, tmp_path / "c", source_vocab=0, target_vocab=0)
    assert len(prepared.train) == 200 and len(prepared.validation_rows) == 220
    prepared.select_like_validation(quiet)
    assert prepared.summary["counts"]["unlike validation"] == 100
    kept = [prepared.train[row][0] for row in range(len(prepared.train))]
    assert decode(prepared.source_tokenizer, kept) == [source for source, _ in sentences[:100]]


# ------------------------------------------------------------------------ batches


lengths_of_pairs = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=6, max_size=200
)


def as_lengths(pairs):
    source, target = np.array(pairs, np.int32).T
    return {"source": source, "target": target}


@settings(max_examples=40)
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
            # No rank is without work.
            assert all(len(rows) for one_rank in micro_batches for rows in one_rank)
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


@settings(max_examples=40)
@given(lengths_of_pairs, st.integers(20, 300))
def test_the_steps_that_ask_most_of_the_memory(pairs, budget):
    def loads(step: list[int]) -> list[int]:
        """Places, target tokens, places of attention matrices."""
        source, target = ([pairs[row][side] + 1 for row in step] for side in (0, 1))
        layers = len(step) * (max(source) + max(target))
        return [layers, sum(target), len(step) * max(source + target) ** 2]

    sampler = BucketSampler(as_lengths(pairs), budget)
    heaviest, steps = sampler.heaviest_steps(), islice(sampler, sampler.steps_per_epoch)
    most = [max(column) for column in zip(*map(loads, steps))]
    assert [max(column) for column in zip(*map(loads, heaviest))] == most and len(heaviest) <= 3
    assert loads(heaviest[0])[0] == most[0]
    for step in heaviest:  # its first rows are the widest, whatever share of it is tried
        widths = [max(pairs[row]) for row in step]
        assert widths == sorted(widths, reverse=True)


@settings(max_examples=40)
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
    plans = set()
    for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        plan = BucketSampler(lengths, 50, seed=seed).epoch_plan(epoch)
        plans.add(frozenset(frozenset(batch.tolist()) for batch in plan))
    assert len(plans) == 4  # other batches, not the same in another order


@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(1, 50), st.integers(1, 6), st.randoms(use_true_random=False))
def test_cut_batches(pairs, budget, smallest, random):
    widths = np.sort([random.randint(1, 9) for _ in range(pairs)])
    bounds = _cut_batches(widths, budget, smallest)
    assert bounds[0] == 0 and bounds[-1] == len(widths) and bounds == sorted(set(bounds))
    sizes = np.diff(bounds)
    assert len(sizes) == 1 or sizes.min() >= smallest
    for first, size in zip(bounds, sizes):
        assert size * widths[first : first + size].max() <= budget or size < 2 * smallest
    # The last bounds move where the rest is too small to stand alone.
    for first, size in zip(bounds[:-3], sizes):
        more = widths[first : first + size + 1]
        assert len(more) * more.max() > budget or size == smallest, "one more would fit"


def test_similar_lengths_share_a_batch():
    random = np.random.default_rng(0)
    # As in text: pairs have different lengths, and so have their sides.
    logarithms = random.normal(3.1, 0.7, (100_000, 1)) + random.normal(0, 0.2, (100_000, 2))
    lengths = as_lengths(np.exp(logarithms).clip(1, 200).astype(np.int32))
    sampler = BucketSampler(lengths, 4096)
    real = padded = 0  # tokens
    for rows in sampler.epoch_plan(0):
        for widths in (sampler.source[rows], sampler.target[rows]):
            real += widths.sum()
            padded += len(rows) * widths.max()
    assert real / padded > 0.95


sentence = st.lists(st.integers(3, 99), min_size=1, max_size=20)


@settings(max_examples=40)
@given(st.lists(st.tuples(sentence, sentence), min_size=1, max_size=8))
def test_collate(pairs):
    batch = Collate(IDS, IDS)([(np.array(source), np.array(target)) for source, target in pairs])
    assert batch.src_pad.dtype == torch.bool and torch.equal(batch.src_pad, batch.src == IDS["pad"])
    flat_in = batch.tgt_in.flatten()
    for row, (source, target) in enumerate(pairs):
        assert batch.src[row][~batch.src_pad[row]].tolist() == [*source, IDS["eos"]]
        assert batch.tgt_in[row, : len(target) + 1].tolist() == [IDS["bos"], *target]
        assert (batch.tgt_in[row, len(target) + 1 :] == IDS["pad"]).all()
    predicted = [token for _, target in pairs for token in [*target, IDS["eos"]]]
    assert batch.tgt_out.tolist() == predicted
    assert (flat_in[batch.target_positions] != IDS["pad"]).all()
    assert len(batch.target_positions) == (flat_in != IDS["pad"]).sum()
    assert batch.source_tokens == sum(len(source) + 1 for source, _ in pairs)
    assert batch.target_tokens == len(batch.tgt_out)
    sources, targets = zip(*pairs)
    longest = max(map(len, sources)) + max(map(len, targets)) + 2  # with the end tokens
    assert batch.padded_tokens == len(pairs) * longest


def test_a_batch_is_pinned_whole(monkeypatch):
    """Otherwise a copy to the GPU waits."""
    batch = Collate(IDS, IDS)([(np.array([5, 6]), np.array([7]))])
    # A copy in fp64 marks what was pinned.
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.double)
    pinned = batch.pin_memory()
    for name, value in vars(batch).items():
        if torch.is_tensor(value):
            copy = getattr(pinned, name)
            assert copy.dtype == torch.double and torch.equal(copy, value.double())


@pytest.mark.parametrize("unknown", [0, 1, 20])
def test_a_tokenizer_that_does_not_know_the_language(tmp_path, unknown):
    """One unknown character is below 1 % of the tokens of 60 pairs, 20 are some 4 %."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    english = "zero one two three four five six seven eight nine".split()
    vocabulary = [*special, *english, *"零一二三四五六七八九"]
    bert = BertTokenizerFast(vocab={word: index for index, word in enumerate(vocabulary)})
    bert.save_pretrained(tmp_path / "bert")
    pairs = reversed_digits(70)
    pairs[:unknown] = [("龘", target) for _, target in pairs[:unknown]]
    folder = write_pairs(tmp_path / "d", pairs, {"train": slice(60), "validation": slice(60, None)})
    options = dict(tokenizer=str(tmp_path / "bert"), source_vocab=0, target_vocab=0)
    if unknown > 1:
        with pytest.raises(UserError, match=r"does not know [3-5]\..% of the tokens"):
            prepare_toy(folder, tmp_path / "cache", **options)
        return
    summary = prepare_toy(folder, tmp_path / "cache", **options).summary
    assert 0.001 * unknown <= summary["unknown"] < 0.01 and summary["is_sample"] is False


def test_rows_with_an_empty_side_are_counted(toy, tmp_path):
    with (toy / "validation.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"zh": "一", "en": "\u200b"}\n')
    log = []
    prepare_toy(toy, tmp_path / "cache", log.append)
    assert "data: 1 of 11 rows of validation have an empty side" in log
