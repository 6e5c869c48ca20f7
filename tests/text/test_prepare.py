"""From rows to token ids on disk: nothing lost, and a cache that is used only when it is right."""

import hashlib
import os
import pickle
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, reversed_digits, write_pairs

from data import collate_for
from engine.errors import UserError
from text.cleaning import _scores, held_out_rows
from text.prepare import Prepared, _worth_keeping, find_and_prepare, prepare, vocabulary_size
from text.rows import find_text
from text.store import TokenizedPairs, TokenWriter, flatten
from text.subwords import decode, encode, tokenizer_key, train_tokenizer


def test_token_store_round_trip(tmp_path):
    pairs = [([5, 6], [7]), ([8], [9, 10, 11]), ([300, 3], [4])]
    writer = TokenWriter(tmp_path / "store", {"source": 400, "target": 70000})
    writer.write("source", *flatten([source for source, _ in pairs]))
    writer.write("target", *flatten([target for _, target in pairs[:2]]))
    writer.write("target", *flatten([pairs[2][1]]))
    writer.close()
    store = TokenizedPairs(tmp_path / "store")
    assert [
        (source.tolist(), target.tolist())
        for source, target in map(store.__getitem__, range(len(store)))
    ] == pairs
    assert (
        store[0][0].dtype == np.uint16 and store[0][1].dtype == np.int32
    )  # as small as the vocabulary allows
    assert pickle.loads(pickle.dumps(store))[1][1].tolist() == [
        9,
        10,
        11,
    ]  # as a DataLoader worker gets it
    assert all(isinstance(ids.base, np.memmap) for ids in store._ids.values())  # they stay on disk


@pytest.fixture
def toy_text(tmp_path):
    pairs = reversed_digits(400)
    return find_text(
        str(
            write_pairs(
                tmp_path / "toy", pairs, {"train": slice(0, 380), "validation": slice(380, 400)}
            )
        )
    )


def test_prepare(toy_text, tmp_path):
    lines = []
    prepared = prepare(toy_text, tmp_path / "cache", say=lines.append)
    assert any("evaluate.py scores validation" in line for line in lines) and any(
        "380 rows read" in line for line in lines
    )
    held_out = held_out_rows(toy_text)
    assert prepared.validation_rows == held_out["validation"] == reversed_digits(400)[380:]
    assert len(prepared.train) == 380 and prepared.summary["unknown"] == 0
    texts = {
        decode(prepared.target_tokenizer, [target])[0]
        for _, target in map(prepared.train.__getitem__, range(50))
    }
    assert texts <= {target for _, target in reversed_digits(400)}
    assert [vocabulary_size(-1, pairs) for pairs in (380, 10_000, 100_000)] == [1000, 2000, 16000]
    assert [vocabulary_size(asked, 100_000) for asked in (0, 300)] == [
        8000,
        300,
    ]  # 0: of older runs
    batch = collate_for(prepared)([prepared.train[0], prepared.train[1]])
    assert batch.src.max() < len(prepared.source_tokenizer)


def test_the_tokenizers_learn_from_a_part_from_all_over(toy_text, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("text.prepare.TOKENIZER_LINES", 100)
    monkeypatch.setattr(
        "text.prepare.train_tokenizer",
        lambda lines, size: seen.append(list(lines)) or train_tokenizer(seen[-1], size),
    )
    prepare(toy_text, tmp_path / "cache", say=lambda line: None)
    source, target = seen
    assert 80 < len(source) == len(target) <= 100 and set(zip(source, target)) <= set(
        reversed_digits(400)
    )


def test_the_rows_of_validation_are_from_all_over(toy_text, tmp_path, monkeypatch):
    monkeypatch.setattr("text.prepare.VALIDATION_ROWS", 8)
    prepared = prepare(toy_text, tmp_path / "cache", say=lambda line: None)
    rows, picked = reversed_digits(400)[380:], (0, 2, 5, 7, 10, 12, 15, 17)
    assert (
        prepared.validation_rows == [rows[number] for number in picked]
        and len(prepared.validation) == 8
    )


def test_the_cache_is_used_only_for_the_same_data_and_settings(toy_text, tmp_path):
    cache, said = tmp_path / "cache", []
    first = prepare(toy_text, cache, say=lambda line: None)
    again = prepare(toy_text, cache, say=said.append)
    assert again.folder == first.folder and "tokenised earlier" in said[0] and len(said) == 1
    assert prepare(toy_text, cache, target_vocab=500, say=lambda line: None).folder != first.folder
    assert prepare(toy_text, cache, source_vocab=500, say=lambda line: None).folder != first.folder
    assert prepare(toy_text, cache, max_length=100, say=lambda line: None).folder != first.folder
    file = toy_text.files["train"][0]
    file.write_text(file.read_text(encoding="utf-8").replace("one", "two", 1), encoding="utf-8")
    assert prepare(toy_text, cache, say=lambda line: None).folder != first.folder


def test_over_long_and_lopsided_pairs_are_dropped_and_counted(tmp_path):
    good = reversed_digits(60)
    bad = [
        ("一" * 30, " ".join(["one"] * 30)),
        ("二", " ".join(["three"] * 15)),
        ("三" * 10**5, "x" * 10**5),
    ]
    text = find_text(
        str(
            write_pairs(
                tmp_path / "d",
                good + bad,
                {"train": slice(5, None), "validation": slice(0, 5), "test": slice(0, 1)},
            )
        )
    )
    said = []
    prepared = prepare(text, tmp_path / "cache", max_length=16, say=said.append)
    assert len(prepared.train) == prepared.summary["counts"]["kept"] == 55
    report = (
        "58 rows read; dropped 2 longer than --max_length, 1 with very different lengths; 55 kept"
    )
    assert any(report in line for line in said)


def test_the_longest_pair_that_is_kept():
    """A sentence and its begin or end fill the model's positions exactly."""
    counts, lengths = Counter(), np.array([15, 16, 15, 1])
    assert _worth_keeping(lengths, np.array([15, 15, 16, 1]), 16, counts).tolist() == [
        True,
        False,
        False,
        True,
    ]
    assert counts == {"kept": 2, "too long": 2}


def stored(folder: Path, train: list[tuple], validation: list[tuple]) -> Prepared:
    """`Prepared` of pairs of token ids; the vocabularies have 400."""
    for split, pairs in {"train": train, "validation": validation}.items():
        writer = TokenWriter(folder / split, {"source": 400, "target": 400})
        for side, rows in zip(("source", "target"), zip(*pairs)):
            writer.write(side, *flatten(rows))
        writer.close()
    vocabulary, splits = (
        range(400),
        [TokenizedPairs(folder / split) for split in ("train", "validation")],
    )
    return Prepared(folder, vocabulary, vocabulary, *splits, [], {"counts": {"kept": len(train)}})


def test_train_becomes_as_long_for_its_sources_as_validation(tmp_path, monkeypatch):
    """Every fifth pair has half a target: they go, and a worker process has the same rows."""
    train = [([row + 3] * 8, [row + 3] * (4 if row % 5 == 0 else 8)) for row in range(100)]
    for rows in (199, 200):  # with fewer rows the gap may be chance
        said, prepared = [], stored(tmp_path / str(rows), train, [([3] * 8, [3] * 8)] * rows)
        monkeypatch.setattr("text.prepare.like_validation", lambda pairs, *_: range(len(pairs)))
        prepared.select_like_validation(said.append)
        assert len(prepared.train) == (80 if rows == 200 else 100)
        prepared.select_like_validation(said.append)  # there is no gap any more
        assert len(said) == (rows == 200)
    assert said == ["data: 20 of 100 pairs are left out: with a short target (--select)"]
    assert prepared.summary["counts"] == {"kept": 80, "short target": 20}
    for pairs in (prepared.train, pickle.loads(pickle.dumps(prepared.train))):
        expected = [row + 3 for row in range(100) if row % 5]
        assert [[ids.tolist() for ids in pairs[row]] for row in range(80)] == [
            [[id] * 8] * 2 for id in expected
        ]
        assert pairs.__getitems__(np.array([0, 79]))[1].ids.tolist() == [4] * 8 + [102] * 8
        chosen = pairs.only(np.array([1, 79]))  # of those that were chosen
        assert [ids.tolist() for ids, _ in chosen] == [[5] * 8, [102] * 8]


def words(draw: np.random.Generator, first: int, pairs: int) -> list[tuple]:
    """Pairs of 4 to 30 ids a side, drawn from the 100 that begin with `first`, frequent ones first."""
    lengths = draw.integers(4, 31, pairs)
    return [
        tuple((first + np.minimum(draw.geometric(0.05, (2, n)) - 1, 99)).tolist()) for n in lengths
    ]


@pytest.mark.parametrize(("foreign", "expected"), [(0.3, 0.3), (0.8, 0.5), (0.0, 0.0)])
def test_pairs_in_other_words_than_validation_are_left_out(
    foreign, expected, tmp_path, monkeypatch
):
    """The other words' pairs go, half of all at most; of data in validation's words all stay, though 1 % are under the bar."""
    draw, other = np.random.default_rng(0), round(foreign * 1000)
    train = words(draw, 100, other) + words(draw, 0, 1000 - other)
    prepared = stored(tmp_path, train, words(draw, 0, 300))
    monkeypatch.setattr(
        "text.prepare.without_short_targets", lambda lengths, _: range(len(lengths["source"]))
    )
    prepared.select_like_validation(print)
    left_out = prepared.summary["counts"].get("unlike validation", 0)
    chance = 20 if foreign == 0.3 else 0  # 1 % of the 700 pairs in the same words: 7 ± 3
    assert abs(left_out - 1000 * expected) <= chance
    assert all(ids[0] < 100 for ids, _ in prepared.train) == (foreign <= 0.5)
    assert len(prepared.train) == prepared.summary["counts"]["kept"] == 1000 - left_out


def test_a_pair_scores_the_mean_gain_of_its_tokens_on_each_side(tmp_path):
    draw = np.random.default_rng(0)
    pairs, gains = words(draw, 0, 50), draw.normal(size=(2, 400))
    train = stored(tmp_path, pairs, pairs[:1]).train
    plain = [gains[0][source].mean() + gains[1][target].mean() for source, target in pairs]
    np.testing.assert_allclose(
        _scores(train, gains), plain, rtol=0, atol=1e-12
    )  # sums of up to 1,500 numbers near 1
    some = [part[0].ids.tolist() for part in train.parts(size=20)]  # 20, 20 and 10 pairs
    assert len(some) == 3 and [id for ids in some for id in ids] == [
        id for source, _ in pairs for id in source
    ]


def test_a_vocabulary_beside_a_tokenizer_is_said_to_have_no_effect(toy_text, tmp_path):
    prepare(toy_text, tmp_path / "cache", say=lambda line: None).target_tokenizer.save_pretrained(
        tmp_path / "joint"
    )
    said, sizes = [], dict(source_vocab=0, target_vocab=400, max_length=512)
    config = SimpleNamespace(
        data=toy_text.path, source="zh", target="en", tokenizer=str(tmp_path / "joint"), **sizes
    )
    find_and_prepare(config, tmp_path / "cache", said.append)
    assert any("have no effect" in line for line in said)


def test_a_working_directory_whose_name_is_not_utf8(toy_text, tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"\xd6\xd0")
    folder.mkdir()
    shutil.copytree(toy_text.path, folder / "toy")
    monkeypatch.chdir(folder)
    sizes = dict(source_vocab=0, target_vocab=0, max_length=512)
    config = SimpleNamespace(data="toy", source="zh", target="en", tokenizer="", **sizes)
    with pytest.raises(UserError, match="is not UTF-8; rename the folder"):
        find_and_prepare(config, tmp_path / "cache", lambda line: None)


def test_links_are_read_by_their_own_names_and_from_where_they_lead(tmp_path, monkeypatch):
    """As in the hub's cache, whose files are links to names without an ending."""
    (tmp_path / "far" / "near").mkdir(parents=True)
    table = "zh\ten\n" + "".join(f"{n}一\t{n} one\n" for n in range(400))
    (tmp_path / "far" / "blob").write_text(table, encoding="utf-8")
    (tmp_path / "far" / "pairs.tsv").symlink_to("blob")
    (tmp_path / "link").symlink_to(tmp_path / "far" / "near")
    monkeypatch.chdir(tmp_path)
    sizes = dict(source_vocab=300, target_vocab=300, max_length=512)
    config = SimpleNamespace(
        data="link/../pairs.tsv", source="zh", target="en", tokenizer="", **sizes
    )
    _, found, _ = find_and_prepare(config, tmp_path / "cache", lambda line: None)
    assert (
        os.path.isabs(found)
        and found.endswith("pairs.tsv")
        and os.path.samefile(found, tmp_path / "far" / "blob")
    )


def test_an_own_tokenizer_folder_serves_both_sides(toy_text, tmp_path, monkeypatch):
    trained = prepare(toy_text, tmp_path / "cache", say=lambda line: None)
    folder = tmp_path / "joint"
    trained.target_tokenizer.save_pretrained(folder)
    prepared = prepare(toy_text, tmp_path / "cache", tokenizer=str(folder), say=lambda line: None)
    assert prepared.folder != trained.folder
    assert [tokenizer_key(name) for name in ("", "bert-base-chinese")] == ["", "bert-base-chinese"]
    before = tokenizer_key(str(folder))
    (folder / "model.safetensors").write_bytes(bytes(2**25))  # weights, which are not read at once
    content = b"".join(file.read_bytes() for file in sorted(folder.iterdir()))
    tracemalloc.start()
    key = tokenizer_key(str(folder))
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    assert key == hashlib.blake2b(content, digest_size=8).hexdigest() != before
    monkeypatch.chdir(tmp_path)
    said = dict(
        data=str(toy_text.path),
        source="zh",
        target="en",
        source_vocab=-1,
        target_vocab=-1,
        max_length=512,
    )
    where = find_and_prepare(
        SimpleNamespace(tokenizer="joint", **said), tmp_path / "cache", lambda line: None
    )
    assert where[2] == str(folder)  # for a resumed run, wherever it is started
    line = "three two one"
    assert encode(prepared.source_tokenizer, [line]) == encode(prepared.target_tokenizer, [line])


@pytest.mark.parametrize("given", [True, False])
def test_training_on_the_sample_says_so(tmp_path, monkeypatch, given):
    sample = str(ROOT / "sample")
    monkeypatch.setattr("text.prepare.default_path", lambda: sample)

    def stop(*_, **__):
        raise UserError("far enough")

    monkeypatch.setattr("text.prepare.prepare", stop)
    settings = dict(source="zh", target="en", source_vocab=-1, target_vocab=-1, tokenizer="")
    config, lines = SimpleNamespace(data=sample if given else "", max_length=512, **settings), []
    with pytest.raises(UserError, match="far enough"):
        find_and_prepare(config, tmp_path, lines.append)
    assert lines[0].endswith(
        "bundled sample, not WMT19: this score says only that the program works"
    )
    assert ("no --data given, using" in lines[0]) == (not given)
