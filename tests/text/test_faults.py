"""Tokenizers and caches that are damaged, hostile or of an odd size: never other ids, never foreign code."""

import errno
import json
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import HANGS, reversed_digits, write_pairs

from engine.errors import UserError
from text import prepare as under_test
from text import subwords
from text.prepare import prepare
from text.rows import find_text
from text.store import TokenWriter, flatten
from text.subwords import encode, load_tokenizer, train_tokenizer

# Tokenizers and ids.


def test_long_lines_are_encoded_in_groups_and_cut(monkeypatch):
    tokenizer = train_tokenizer(["一二三 four five"] * 20, 300)
    lines = ["一二三 four", "", "五" * 50, "four five", "一"]
    plain = encode(tokenizer, lines)
    monkeypatch.setattr(subwords, "CHARACTERS_AT_ONCE", 12)
    assert encode(tokenizer, lines) == plain and encode(tokenizer, []) == []
    assert encode(tokenizer, lines, 3) == [ids[:3] for ids in plain]


def test_a_tokenizer_that_brings_code_is_refused_without_a_question(tmp_path, monkeypatch):
    train_tokenizer(["一二三 four five"] * 20, 300).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["code.Planted", "code.Planted"]}
    settings["tokenizer_class"] = "Planted"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(
        f"open({str(tmp_path / 'hacked')!r}, 'w')\nclass Planted: pass\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(UserError, match="no tokenizer can be read"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "hacked").exists()


def test_any_damage_to_a_tokenizer_is_one_line(tmp_path):
    train_tokenizer(["一二三 four five"] * 20, 300).save_pretrained(tmp_path)
    whole, random = (tmp_path / "tokenizer.json").read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(40):
        spoiled = bytearray(whole)
        spoiled[random.integers(len(whole))] ^= 1 << random.integers(8)
        (tmp_path / "tokenizer.json").write_bytes(spoiled)
        try:
            load_tokenizer(str(tmp_path))
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 5  # the others changed a letter of a token


@pytest.mark.parametrize("id", [60_000, 65_537])
def test_ids_beyond_the_vocabulary_do_not_wrap(tmp_path, id):
    writer = TokenWriter(tmp_path / "store", {"source": 60_000, "target": 60_000})
    writer.write("source", *flatten([[1, 59_999]]))
    with pytest.raises(
        UserError, match=f"the target tokenizer gives the id {id}, but has 60000 tokens"
    ):
        writer.write("target", *flatten([[id]]))


# The cache.


@pytest.fixture
def data(tmp_path):
    return write_pairs(
        tmp_path / "data", reversed_digits(80), {"train": slice(0, 70), "validation": slice(70, 80)}
    )


def cached(data: Path, cache: Path, said=None) -> tuple[Path, str]:
    """→ the folder of this data in the cache, and what was said, which is added to `said` at once."""
    said = [] if said is None else said
    prepared = prepare(
        find_text(str(data)), cache, source_vocab=300, target_vocab=300, say=said.append
    )
    return prepared.folder, "\n".join(said)


@pytest.mark.parametrize(
    "name",
    [
        "train/source.lengths.npy",
        "train/target.ids.npy",
        "validation.jsonl",
        "summary.json",
        "tokenizer/source/tokenizer.json",
        "checksums.json",
    ],
)
def test_a_flipped_bit_in_the_cache_is_found(data, tmp_path, name):
    folder, said = cached(data, tmp_path / "cache")
    assert "tokenising into" in said
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    again, said = cached(data, tmp_path / "cache")
    assert (
        again == folder and "is made again: check" in said and (folder / name).read_bytes() == whole
    )
    assert "tokenised earlier" in cached(data, tmp_path / "cache")[1]
    (folder / "checksums.json").unlink()  # as in an older version's cache
    assert "is made again: checksums.json is missing" in cached(data, tmp_path / "cache")[1]


@pytest.mark.parametrize("call", ["pathlib.Path.mkdir", "pathlib.Path.exists", "shutil.rmtree"])
def test_a_cache_that_is_somebody_else_s_is_one_line(data, tmp_path, monkeypatch, call):
    folder, _ = cached(data, tmp_path / "cache")
    (folder / "summary.json").write_text("{}")  # so that it has to be made again

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(call, refuse)
    with pytest.raises(
        UserError,
        match=r"cannot write to .*cache: Permission denied; choose another --run PATH/NAME",
    ):
        cached(data, tmp_path / "cache")


def test_what_killed_builds_left_is_removed_and_living_ones_are_left_alone(data, tmp_path):
    cache = tmp_path / "cache"
    for name, age in (
        ("dead", 900),
        ("young", -3600),
        ("older-version", 7200),
    ):  # seconds; young, however slow this is
        (cache / f".building-{name}").mkdir(parents=True)
        if name != "older-version":
            (cache / f".building-{name}/.lock").touch()
        for path in (*(cache / f".building-{name}").iterdir(), cache / f".building-{name}"):
            os.utime(path, (0, time.time() - age))
    with under_test.made_whole(cache / "other") as living:
        os.utime(living, (0, 0))
        folder, _ = cached(data, cache)
        assert {path.name for path in cache.iterdir()} == {
            folder.name,
            ".building-young",
            living.name,
        }
        (living / "summary.json").write_text("{}")
    assert (cache / "other/checksums.json").exists()


def test_two_builds_of_the_same_data(data, tmp_path):
    """The second waits for the first; without locks each makes its own, and the first to be ready is used."""
    folder, _ = cached(data, tmp_path / "first")
    cache, said = tmp_path / "cache", []
    cache.mkdir()
    with under_test.made_whole(cache / folder.name) as building:
        second = threading.Thread(target=cached, args=(data, cache, said))
        second.start()
        shutil.copytree(
            folder,
            building,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("checksums.json", ".lock"),
        )
        while not said:
            assert second.is_alive()
            time.sleep(0.01)
    second.join(HANGS)
    assert ["waiting for it" in said[0], "tokenised earlier" in said[1]] == [True, True]
    with under_test.made_whole(cache / folder.name) as building:
        (building / "summary.json").write_text("{}")
    assert "tokenised earlier" in cached(data, cache)[1] and not list(cache.glob(".building*"))


def test_a_drive_that_renames_no_folder_with_an_open_file(data, tmp_path, monkeypatch):
    """Windows' under WSL; the lock is such a file."""
    replace, opened = os.replace, []

    def rename(old, new):
        if Path(old).is_dir() and not opened.append(old) and len(opened) == 1:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), old)
        replace(old, new)

    monkeypatch.setattr("os.replace", rename)
    assert cached(data, tmp_path / "cache")[0].is_dir() and len(opened) == 2


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda text: dict(tokenizer="no/such"), "tokenizer no/such"),
        (
            lambda text: text.files["validation"][0].write_text("zh\ten\n") and {},
            "the validation split has no rows; add rows",
        ),
    ],
)
def test_what_is_wrong_from_the_start_is_said_before_the_cleaning(
    tmp_path, monkeypatch, change, said
):
    for split in ("train", "validation"):
        (tmp_path / f"{split}.tsv").write_text("zh\ten\n一\tone\n", encoding="utf-8")
    text = find_text(str(tmp_path))
    monkeypatch.setattr(under_test, "clean_pairs", lambda *_: pytest.fail("cleaned"))
    with pytest.raises(UserError, match=said):
        prepare(text, tmp_path / "cache", say=lambda line: None, **change(text))
