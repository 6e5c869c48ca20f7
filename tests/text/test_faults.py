"""Text that is damaged, hostile or of an odd size: never other rows or ids than those on the disk, never foreign code."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import HANGS, ROOT, reversed_digits, write_pairs

from engine.errors import UserError
from text import prepare as under_test
from text import formats, subwords
from text.prepare import prepare
from text.rows import find_text
from text.store import TokenWriter
from text.subwords import encode, load_tokenizer, train_tokenizer


def read(path: Path) -> dict[str, list]:
    text = find_text(str(path))
    return {split: [pair for chunk in text.rows(split) for pair in chunk] for split in text.files}


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(path)
    return str(caught.value)


# Rows.


def test_a_quote_in_a_tsv_is_a_character(tmp_path):
    pairs = [('"他说', '"He said "fine"'), ("二", '"two'), ("三", 'three"'), ('"四"', '"four"')]
    lines = "".join(f"{source}\t{target}\r\n" for source, target in pairs)
    (tmp_path / "test.tsv").write_text("zh\ten\r\n" + lines, encoding="utf-8", newline="")
    assert read(tmp_path / "test.tsv") == {"test": pairs}


def test_a_short_row_is_an_error_that_names_its_line(tmp_path):
    (tmp_path / "x.tsv").write_text("zh\ten\n一\tone\n二\n三\tthree\n", encoding="utf-8")
    assert "x.tsv, line 3: 1 fields, the header has 2" in refused(tmp_path / "x.tsv")
    (tmp_path / "x.csv").write_text('zh,en\n"一\n行",one\n\n二\n', encoding="utf-8")
    assert "x.csv, line 5: 1 fields, the header has 2" in refused(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_text('zh,en\n一,"one" 1\n', encoding="utf-8")
    assert "x.csv, line 2" in refused(tmp_path / "x.csv")


def test_links_that_lead_back_are_not_followed(tmp_path):
    data = write_pairs(tmp_path / "data/inner", reversed_digits(3)).parent
    expected = read(data)
    (data / "loop").symlink_to(".")
    (data / "inner/up").symlink_to("..")
    (data / "inner/root").symlink_to("/")
    assert read(data) == expected
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/elsewhere").symlink_to(data)  # others are
    assert read(tmp_path / "linked") == expected


def test_a_damaged_arrow_file_is_an_error(tmp_path):
    """Offsets that lead out of the file were a segmentation fault, hence a process of its own."""
    table = pyarrow.table({"zh": ["一" * n for n in range(1, 60)], "en": ["one " * n for n in range(1, 60)]})
    with pyarrow.ipc.new_file(tmp_path / "good.arrow", table.schema) as writer:
        writer.write_table(table)
    content = (tmp_path / "good.arrow").read_bytes()
    script = """
import sys
from engine.errors import UserError
from text.rows import find_text
content = open(sys.argv[1], "rb").read()
for place in range(8, len(content), 29):
    spoiled = bytearray(content)
    spoiled[place : place + 4] = b"\\x7f\\xff\\xff\\x7f"
    open(sys.argv[2], "wb").write(spoiled)
    try:
        sum(len(a) + len(b) for chunk in find_text(sys.argv[2]).rows("train") for a, b in chunk)
    except UserError as error:
        print(error)
"""
    words = [sys.executable, "-c", script, tmp_path / "good.arrow", tmp_path / "bad.arrow"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) > 10 and "get it again" in done.stdout and len(content) > 5000


def test_columns_with_a_dot_in_their_names(tmp_path):
    flat = pyarrow.table({"translation.zh": ["一"], "translation.en": ["one"]})
    pyarrow.parquet.write_table(flat, tmp_path / "x.parquet")
    assert "found translation.zh, translation.en" in refused(tmp_path / "x.parquet")
    text = find_text(str(tmp_path / "x.parquet"), "translation.zh", "translation.en")
    assert [pair for chunk in text.rows("train") for pair in chunk] == [("一", "one")]


def test_brackets_without_end(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"zh": "一", "en": "one"}\n' + "[" * 200_000)
    assert "x.jsonl, line 2: too many brackets" in refused(tmp_path / "x.jsonl")


def test_long_lines_come_in_small_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK_BYTES", 100_000)
    pairs = [("长" * 20_000, "long " * 4000)] * 12
    for name in ("x.jsonl", "x.tsv", "x.parquet", "x.arrow"):
        write(tmp_path / name, pairs)
        chunks = list(find_text(str(tmp_path / name)).rows("train"))
        assert [pair for chunk in chunks for pair in chunk] == pairs and max(map(len, chunks)) <= 2, name


def write(path: Path, pairs) -> None:
    table = pyarrow.table({"zh": [source for source, _ in pairs], "en": [target for _, target in pairs]})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    elif path.suffix == ".arrow":
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".tsv":
        path.write_text("zh\ten\n" + "".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps({"zh": s, "en": t}) + "\n" for s, t in pairs), encoding="utf-8")


# Tokenizers and ids.


def test_long_lines_are_encoded_in_groups_and_cut(monkeypatch):
    tokenizer = train_tokenizer(["一二三 four five"] * 20, 300)
    lines = ["一二三 four", "", "五" * 50, "four five", "一"]
    plain = encode(tokenizer, lines)
    monkeypatch.setattr(subwords, "CHARACTERS_AT_ONCE", 12)
    assert encode(tokenizer, lines) == plain and encode(tokenizer, []) == []
    assert encode(tokenizer, lines, 3) == [ids[:3] for ids in plain]


def test_training_a_tokenizer_shows_how_far_it_is(monkeypatch):
    from tokenizers import trainers

    real, shown = trainers.BpeTrainer, []

    def trainer(**options):
        shown.append(options["show_progress"])
        return real(**options | {"show_progress": False})

    monkeypatch.setattr(trainers, "BpeTrainer", trainer)
    for is_terminal in (True, False):
        monkeypatch.setattr(
            subwords, "progress", lambda is_terminal=is_terminal: SimpleNamespace(disable=not is_terminal)
        )
        train_tokenizer(["一二三 four five"] * 20, 300)
    assert shown == [True, False]


def test_a_tokenizer_that_brings_code_is_refused_without_a_question(tmp_path, monkeypatch):
    train_tokenizer(["一二三 four five"] * 20, 300).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["code.Planted", "code.Planted"]}
    settings["tokenizer_class"] = "Planted"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'hacked')!r}, 'w')\nclass Planted: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(UserError, match="no tokenizer can be read"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "hacked").exists()


def test_any_damage_to_a_tokenizer_is_one_line(tmp_path):
    train_tokenizer(["一二三 four five"] * 20, 300).save_pretrained(tmp_path)
    whole, random = (tmp_path / "tokenizer.json").read_bytes(), np.random.default_rng(0)
    for _ in range(40):
        spoiled = bytearray(whole)
        spoiled[random.integers(len(whole))] ^= 1 << random.integers(8)
        (tmp_path / "tokenizer.json").write_bytes(spoiled)
        with contextlib.suppress(UserError):
            load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("id", [60_000, 65_537])
def test_ids_beyond_the_vocabulary_do_not_wrap(tmp_path, id):
    writer = TokenWriter(tmp_path / "store", {"source": 60_000, "target": 60_000})
    writer.write("source", [[1, 59_999]])
    with pytest.raises(UserError, match=f"the target tokenizer gives the id {id}, but has 60000 tokens"):
        writer.write("target", [[id]])


# The cache.


@pytest.fixture
def data(tmp_path):
    return write_pairs(tmp_path / "data", reversed_digits(80), {"train": slice(0, 70), "validation": slice(70, 80)})


def cached(data: Path, cache: Path) -> tuple[Path, str]:
    """→ the folder of this data in the cache, and what was said."""
    said = []
    prepared = prepare(find_text(str(data)), cache, source_vocab=300, target_vocab=300, say=said.append)
    return prepared.folder, "\n".join(said)


@pytest.mark.parametrize("name", ["train/source.lengths.npy", "train/target.ids.npy", "validation.jsonl", "summary.json",
                                  "tokenizer/source/tokenizer.json", "checksums.json"])  # fmt: skip
def test_a_flipped_bit_in_the_cache_is_found(data, tmp_path, name):
    folder, said = cached(data, tmp_path / "cache")
    assert "tokenising into" in said
    content = bytearray((folder / name).read_bytes())
    content[-3] ^= 1
    (folder / name).write_bytes(content)
    again, said = cached(data, tmp_path / "cache")
    assert again == folder and "is made again: check" in said
    assert "tokenised earlier" in cached(data, tmp_path / "cache")[1]


def test_a_cache_of_an_older_version_is_made_again(data, tmp_path):
    folder, _ = cached(data, tmp_path / "cache")
    (folder / "checksums.json").unlink()
    again, said = cached(data, tmp_path / "cache")
    assert again == folder and said.count("is made again: checksums.json is missing") == 1


def test_what_killed_builds_left_is_removed_and_living_ones_are_left_alone(data, tmp_path):
    cache = tmp_path / "cache"
    for name, age in (("dead", 60), ("young", 0), ("older-version", 7200)):
        (cache / f".building-{name}").mkdir(parents=True)
        if name != "older-version":
            (cache / f".building-{name}/.lock").touch()
        os.utime(cache / f".building-{name}", (0, time.time() - age))
    with under_test._made_whole(cache / "other") as living:
        os.utime(living, (0, 0))
        folder, _ = cached(data, cache)
        assert {path.name for path in cache.iterdir()} == {folder.name, ".building-young", living.name}
        (living / "summary.json").write_text("{}")
    assert (cache / "other/checksums.json").exists()


def test_two_builds_of_the_same_data(data, tmp_path):
    """The second waits for the first; without locks each makes its own, and the first to be ready is used."""
    folder, _ = cached(data, tmp_path / "first")
    cache, said = tmp_path / "cache", []
    with under_test._made_whole(cache_of(cache) / folder.name) as building:
        second = threading.Thread(target=lambda: said.append(cached(data, cache)[1]))
        second.start()
        shutil.copytree(folder, building, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checksums.json", ".lock"))
        time.sleep(0.5)
        assert second.is_alive()
    second.join(60)
    assert "waiting for it" in said[0] and "tokenised earlier" in said[0]
    with under_test._made_whole(cache / folder.name) as building:
        (building / "summary.json").write_text("{}")
    assert "tokenised earlier" in cached(data, cache)[1] and not list(cache.glob(".building*"))


def cache_of(folder: Path) -> Path:
    folder.mkdir()
    return folder
