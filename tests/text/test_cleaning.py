"""Text becomes one clean line, held-out rows stay apart, every dropped row is counted once."""

import unicodedata
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from text.cleaning import (
    LONGEST_TOKEN,
    REASONS,
    absurd_ratio,
    clean_pairs,
    hash_of_pair,
    held_out_rows,
    missing_splits,
    normalise,
    normalise_pair,
    split_of_pair,
    split_to_score,
    worth_keeping,
)

INVISIBLE = (
    "\u00ad\u200b\u200e\u200f\u2060\ufeff\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)
SPACES = " \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2009\u2028\u2029\u202f\u205f\u3000"
# Any character, lone surrogates too, and often those that need care.
any_text = st.text(
    st.characters() | st.sampled_from(SPACES + INVISIBLE + "\0\x7f\ud800\udfff�\u200c\u200d▁_好")
)
GENERAL = ["你好", "Hello", " Hello ", "", " ", "一二", "two", "2", "A", "你\u200b好"]
# An emoji and a Persian word that are spelled with joiners.
JOINED = "👨\u200d👩\u200d👧 \u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
row_lists = st.lists(st.tuples(st.sampled_from(GENERAL), st.sampled_from(GENERAL)), max_size=30)


def text_of(**splits) -> SimpleNamespace:
    """A data set in memory."""
    return SimpleNamespace(files=splits, pairs=lambda split: iter(splits[split]))


def cleaned(text, max_length: int = 512) -> tuple[list[tuple[str, str]], Counter]:
    counts = Counter()
    return list(clean_pairs(text, held_out_rows(text), max_length, counts)), counts


def numbers(count: int, start: int = 0) -> list[tuple[str, str]]:
    return [(f"数 {number}", f"number {number}") for number in range(start, start + count)]


# ---------------------------------------------------------------- normalise


@pytest.mark.parametrize(
    "text, expected",
    [
        ("  你好 ,  World!  ", "你好 , World!"),
        ("a\tb\nc\r\nd", "a b c d"),
        ("a\u3000b\xa0c\u2028d\u202fe", "a b c d e"),
        ("a\0b", "a b"),
        ("a\x07b\x7fc\x9fd\x85e", "a b c d e"),
        ("zero\u200bwidth\ufeff", "zerowidth"),
        ("\u202eright\u202c to left\u200f", "right to left"),
        (f"soft{INVISIBLE}hyphen", "softhyphen"),
        ("a\ud800b\udfff", "a�b�"),
        ("\u200b \u200b", ""),
        ("", ""),
        ("▁x▁", "_x_"),
        # No character is replaced by a like one.
        ("Ⅳ “Q”—…！ Ａ １ ﬁ É E\u0301", "Ⅳ “Q”—…！ Ａ １ ﬁ É E\u0301"),
        (JOINED, JOINED),
    ],
)
def test_normalise(text, expected):
    assert normalise(text) == expected


@given(any_text)
def test_normalised_text_is_one_clean_line(text):
    clean = normalise(text)
    assert clean == " ".join(clean.split()) and "\n" not in clean and len(clean.splitlines()) <= 1
    assert not any(unicodedata.category(character) in ("Cc", "Cs") for character in clean)
    assert not set(clean) & set(INVISIBLE)
    clean.encode("utf-8")
    assert normalise(clean) == clean

    def stays(character):
        changed = character in INVISIBLE + "�▁_" or unicodedata.category(character) in ("Cc", "Cs")
        return not character.isspace() and not changed

    assert [*filter(stays, clean)] == [*filter(stays, text)]


# ---------------------------------------------------------------- held-out rows


def test_given_splits_are_untouched():
    rows = [("b ", "B"), ("", ""), ("b ", "B"), ("", "x"), ("same", "same"), ("x", "y\n\u200b")]
    text = text_of(train=numbers(50), validation=rows, test=rows)
    assert held_out_rows(text) == {"validation": rows, "test": rows}


def test_the_cut_depends_on_the_pair_alone():
    rows = numbers(5000)
    whole = held_out_rows(text_of(train=rows))
    for split in ("validation", "test"):
        assert whole[split] == sorted(whole[split], key=rows.index)
        assert held_out_rows(text_of(train=rows[::-1]))[split] == whole[split][::-1]
        half = [row for row in whole[split] if row in rows[::2]]
        assert held_out_rows(text_of(train=rows[::2]))[split] == half
    repeated = [(f" {source}\u200b", target) for source, target in rows]
    # A pair is cut once, as it first stood.
    assert held_out_rows(text_of(train=rows + repeated)) == whole
    assert all(map(whole.get, whole))


def test_the_cut_is_disjoint_from_the_training_pairs():
    rows = numbers(5000)
    text = text_of(train=rows + rows)
    held_out = held_out_rows(text)
    kept, counts = cleaned(text)
    cut = held_out["validation"] + held_out["test"]
    assert sorted(kept + cut) == sorted(rows)  # nothing is lost, nothing stands on two sides
    assert counts["held out"] == 2 * len(cut) and counts["duplicate"] == len(kept)


def test_only_what_is_missing_is_held_back():
    rows, given_rows = numbers(5000), [("甲", "a")]
    both = held_out_rows(text_of(train=rows))
    text = text_of(train=rows, test=given_rows)
    assert held_out_rows(text) == {"validation": both["validation"], "test": given_rows}
    kept, _ = cleaned(text)
    assert set(kept) == set(rows) - set(both["validation"])
    # The course's data are such: validation is scored, and train keeps every row.
    text = text_of(train=rows, validation=given_rows)
    assert held_out_rows(text) == {"validation": given_rows}
    kept, counts = cleaned(text)
    assert kept == rows and counts == {"read": 5000}


@pytest.mark.parametrize(
    "splits, scored, cut",
    [
        ("train validation test", "test", []),
        ("train test", "test", ["validation"]),
        ("train validation", "validation", []),
        ("train", "test", ["validation", "test"]),
    ],
)
def test_which_split_is_scored_and_which_are_cut_from_train(splits, scored, cut):
    text = text_of(**{split: [] for split in splits.split()})
    assert (split_to_score(text), missing_splits(text)) == (scored, cut)


def test_nothing_to_cut():
    assert held_out_rows(text_of(test=numbers(3))) == {"test": numbers(3), "validation": []}
    rows = [("", f"number {number}") for number in range(2000)] + [
        (f"word {n}", f"word {n}") for n in range(2000)
    ]
    assert held_out_rows(text_of(train=rows)) == {"validation": [], "test": []}
    _, counts = cleaned(text_of(train=rows))
    assert counts == {"read": 4000, "empty": 2000, "identical": 2000}


# ---------------------------------------------------------------- training pairs


def test_each_row_is_dropped_for_its_reason():
    train = [
        ("你好", "Hello"),
        (" 你好\u200b", "Hello\n"),  # kept, duplicate
        ("你好", "Hello!"),  # another pair, kept
        ("", "x"),
        ("x", "\u3000"),
        ("\0", "\u200b"),  # empty
        ("not translated", "not  translated"),
        ("Ｂ", "Ｂ"),  # identical
        ("1998", "1998"),
        ("……", "……"),  # equal without a letter: kept
        ("验证", "new"),
        ("new", "Valid."),
        ("测试 ", "new"),
        ("new", "Test"),  # a side stands in validation or test
        ("验证", "验证"),  # counted once, for the first reason
        ("长" * 33, "long"),
        ("长" * 33, "long"),
        ("short", "l" * 33),  # too long, not duplicates
        ("长" * 32, "l" * 32),
        ("长" * 32 + " ", "two"),  # just fits
    ]
    text = text_of(
        train=train, validation=[("验证 ", "Valid.")], test=[("测试", " Test"), ("", "")]
    )
    kept, counts = cleaned(text, max_length=2)
    assert kept == [
        ("你好", "Hello"),
        ("你好", "Hello!"),
        ("1998", "1998"),
        ("……", "……"),
        ("长" * 32, "l" * 32),
        ("长" * 32, "two"),
    ]
    assert LONGEST_TOKEN == 16
    dropped = {"empty": 3, "identical": 3, "duplicate": 1, "in validation or test": 4}
    assert counts == {"read": len(train), "too long": 3, **dropped}


@given(row_lists, row_lists)
@example([("你好", "Hello"), ("你好", "Hello")], [])
def test_the_counts_add_up(train, validation):
    kept, counts = cleaned(text_of(train=train, validation=validation))
    dropped = {reason: number for reason, number in counts.items() if reason != "read"}
    assert counts["read"] == len(train) == len(kept) + sum(dropped.values())
    assert dropped.keys() <= REASONS.keys() and len(set(kept)) == len(kept)
    held = [normalise_pair(row) for row in validation]
    sources, targets = {source for source, _ in held}, {target for _, target in held}
    assert all(source not in sources and target not in targets for source, target in kept)
    # In the order of the rows.
    order = [normalise_pair(row) for row in train]
    assert [order.index(pair) for pair in kept] == sorted(map(order.index, kept))


# ---------------------------------------------------------------- figures


def test_the_hash_of_a_pair_is_the_same_everywhere():
    # Another value would move pairs between the splits, and make old scores incomparable.
    pair = ("今天天气怎么样？", "What's the weather like today?")
    assert hash_of_pair(*pair) == 14059339316595186768
    pairs = [("", ""), ("a", "b"), ("ab", ""), ("", "ab"), ("b", "a")]
    assert len({hash_of_pair(*pair) for pair in pairs}) == 5


@pytest.mark.parametrize("short, longest", [(0, 10), (1, 14), (5, 30), (100, 410)])
def test_the_length_ratio(short, longest):
    assert not absurd_ratio(short, longest) and not absurd_ratio(longest, short)
    assert absurd_ratio(short, longest + 1) and absurd_ratio(longest + 1, short)


def test_each_cut_is_a_hundredth():
    hashes = [hash_of_pair(f"{number}", "x") for number in range(40_000)]
    splits = [split_of_pair(of_pair, ["validation", "test"]) for of_pair in hashes]
    for split in ("validation", "test"):
        assert splits.count(split) == pytest.approx(400, abs=60)


def test_the_longest_pair_that_is_kept():
    """A sentence and its begin or end fill the model's positions exactly."""
    counts = Counter()
    source, target = np.array([15, 16, 15, 1]), np.array([15, 15, 16, 1])
    assert worth_keeping(source, target, 16, counts).tolist() == [True, False, False, True]
    assert counts == {"kept": 2, "too long": 2}


def test_a_side_without_tokens_is_counted():
    counts = Counter()
    kept = worth_keeping(np.array([0, 5, 3]), np.array([5, 0, 3]), 16, counts)
    assert kept.tolist() == [False, False, True] and counts == {"empty": 2, "kept": 1}
