"""The sample data set: made again it is the same, its splits are disjoint, and its sentences are well formed.

pytest tests/sample
"""

import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

SAMPLE = Path(__file__).parents[2] / "sample"
SPLITS = ["train", "validation", "test"]


def parquet_file(folder, split):
    return folder / f"{split}-00000-of-00001.parquet"


def read_split(split):
    rows = parquet.read_table(parquet_file(SAMPLE, split)).column("translation").to_pylist()
    return [(row["zh"], row["en"]) for row in rows]


@pytest.fixture(scope="module")
def splits():
    return {split: read_split(split) for split in SPLITS}


@pytest.fixture(scope="module")
def pairs(splits):
    return [pair for split in SPLITS for pair in splits[split]]


@pytest.fixture(scope="module")
def hand_written():
    return set(runpy.run_path(str(SAMPLE / "sentences.py"))["SENTENCES"])


@pytest.fixture(scope="module")
def made(pairs, hand_written):
    return [pair for pair in pairs if pair not in hand_written]


def test_written_again_it_is_the_same(tmp_path):
    command = [sys.executable, str(SAMPLE / "write_sample.py"), "--out", str(tmp_path / "new")]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)  # from another directory
    for split in SPLITS:
        committed, written = parquet_file(SAMPLE, split), parquet_file(tmp_path / "new", split)
        assert parquet.read_table(committed).equals(parquet.read_table(written)), split
        if parquet.read_metadata(committed).created_by == parquet.read_metadata(written).created_by:
            assert committed.read_bytes() == written.read_bytes(), split


def test_form_is_that_of_wmt19():
    for split in SPLITS:
        schema = parquet.read_schema(parquet_file(SAMPLE, split))
        assert schema.names == ["translation"]
        assert str(schema.field("translation").type) == "struct<zh: string, en: string>"


def test_sizes(splits, pairs, hand_written):
    assert len(splits["validation"]) == len(splits["test"]) == 300
    assert 5500 <= len(splits["train"]) <= 7500
    assert len(hand_written) >= 300 and hand_written <= set(splits["train"])
    assert 8 <= sum(len(zh) for zh, _ in pairs) / len(pairs) <= 14
    assert max(len(zh) for zh, _ in pairs) <= 30
    assert sum(parquet_file(SAMPLE, split).stat().st_size for split in SPLITS) < 1_000_000


def test_every_sentence_stands_once(pairs):
    """No overlap of splits, no duplicate, and one translation for each sentence in both directions."""
    assert len({zh for zh, _ in pairs}) == len({en for _, en in pairs}) == len(pairs)


def test_form_of_sentences(pairs):
    for zh, en in pairs:
        assert re.fullmatch(r"[\u4e00-\u9fff，。？！、：；]+[。？！]", zh), zh
        assert re.fullmatch(r"[A-Z][A-Za-zé0-9 ,.?!'-]*[.?!]", en), en
        assert "  " not in en and " ," not in en and " ." not in en, en


def test_questions_are_questions_on_both_sides(pairs):
    assert [pair for pair in pairs if pair[0].endswith("？") != pair[1].endswith("?")] == []


@pytest.mark.parametrize(
    "flaw",
    [
        r"\b[Aa] (?!un?i|one|use)[aeiou]",
        r"\b[Aa]n (?!hour)[^aeiouEAO]",
        r"(?i)\b(\w+) \1\b",
        r"^(He|She|Tom|Anna|My mother|His older brother) (am|are|have|do|like|want|go|play|study|know|hope|think|speak|work|"
        r"live|come|plan|get)\b",
        r"^(I|We|They) (is|has|does|likes|wants|goes|plays|studies|knows|hopes)\b",
        r"\b(I|we|they) (is|has|does)\b|\b(I are|we am|they am|I were|he were|she were)\b",
        r"\b(do|does|did|can|cannot|will|should|must) (not )?\w+ed\b",
        r"\b(to|by|with|told|called|gave) (I|he|she|we|they)\b|\bthan (I|he|she|we|they)\.",  # but: "than I had expected"
        r"\b(two|three|four|five|ten) (book|cup|bowl|piece|shirt|GPU|hour|day|year|yuans)\b",
    ],
)
def test_grammar(pairs, flaw):
    assert [en for _, en in pairs if re.search(flaw, en)] == []


def test_no_doubled_characters(pairs):
    assert [zh for zh, _ in pairs if re.search(r"的的|了了|一一|在在|把把|吗吗", zh)] == []


@pytest.mark.parametrize(
    "chinese, english",
    [
        (r"昨天晚上", r"last night"),
        (r"^我们", r"\b([Ww]e|[Oo]ur|us)\b"),
        (r"没去过", r"never been to"),
        (r"百分之", r" percent\."),
        (r"^如果", r"^If "),
        (r"^因为.*所以", r"^Because "),
        (r"^虽然.*但是", r"^Although "),
        (r"正在?.*。$", r"ing\b"),
    ],
)
def test_constructions(made, chinese, english):
    matching = [(zh, en) for zh, en in made if re.search(chinese, zh)]
    assert len(matching) >= 10
    assert [pair for pair in matching if not re.search(english, pair[1])] == []


def test_held_out_words_are_taught(splits):
    """Every character and word of validation and test occurs several times in train."""

    def parts(pair):
        return [*pair[0], *re.findall(r"[\w'-]+", pair[1].lower())]

    taught = Counter(part for pair in splits["train"] for part in parts(pair))
    asked = {
        part for split in ("validation", "test") for pair in splits[split] for part in parts(pair)
    }
    assert {part: taught[part] for part in asked if taught[part] < 5} == {}
