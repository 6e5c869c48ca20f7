"""The benchmark's corpus: the same sequences as ids and as words."""

import numpy as np
import pytest

from benchmarks import corpus
from benchmarks.corpus import as_ids, as_words, load_corpus, read_corpus


def test_sizes(small):
    assert len(small.train) == 50 and len(small.test) == 20
    assert max(len(row) for pair in small.train + small.test for row in pair) <= 30
    assert all(pair[0].max() < small.source_vocab and pair[1].max() < small.target_vocab for pair in small.train)


def test_words_say_the_same_as_ids(small):
    lines = (small.folder / "train.tgt").read_text().splitlines()
    assert [row.tolist() for row in as_ids(lines)] == [target.tolist() for _, target in small.train]
    assert lines[0].split()[0] == f"t{small.train[0][1][0]}"


def test_words_and_ids_round_trip():
    rows = [np.array([1, 20, 3]), np.array([], np.int64)]
    text = as_words(rows, "src")
    assert text == "s1 s20 s3\n\n"
    assert [row.tolist() for row in as_ids(text.splitlines())] == [[1, 20, 3], []]


def test_every_word_is_in_every_vocabulary(small):
    for side in ("src", "tgt"):
        words = set((small.folder / f"train.{side}").read_text().split())
        words |= set((small.folder / f"test.{side}").read_text().split())
        for name in (f"joeynmt.{side}", f"opennmt.{side}", f"dict.{side}.txt"):
            known = [line.split()[0] for line in (small.folder / name).read_text().splitlines()]
            assert words <= set(known) and len(known) == len(set(known))
    special = set(small.source_ids.values())
    assert len((small.folder / "opennmt.src").read_text().splitlines()) == small.source_vocab - len(special)


def test_the_sample_is_always_the_same(small, toy_data, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "ROOT", tmp_path)
    again = load_corpus(str(toy_data), vocab=300, pairs=50, test_rows=20, longest=30)
    assert [source.tolist() for source, _ in again.train] == [source.tolist() for source, _ in small.train]


def test_it_is_read_from_the_cache(small, toy_data, monkeypatch):
    monkeypatch.setattr(corpus, "ROOT", small.folder.parents[2])
    monkeypatch.setattr(corpus, "write_corpus", lambda *_: pytest.fail("written again"))
    load_corpus(str(toy_data), vocab=300, pairs=50, test_rows=20, longest=30)
    assert read_corpus(small.folder).lengths["source"].shape == (50,)


def test_the_environment_names_the_data(small, toy_data, monkeypatch):
    monkeypatch.setattr(corpus, "ROOT", small.folder.parents[2])
    monkeypatch.setenv("MINIDATASET", str(toy_data))
    assert load_corpus(vocab=300, pairs=50, test_rows=20, longest=30).folder == small.folder
