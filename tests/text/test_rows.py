"""Every form of parallel text gives the same rows, and every mistake one line that says what, where and what to do."""

import csv
import html
import json
import os
import shutil
from functools import partial

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, run_code
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UserError
from text import formats
from text.rows import default_path, find_text, fingerprint_of, sample_notice

TRAIN = [
    ("你好，世界。", "Hello, world."),
    ("他说“好”。", 'He said "fine", then left.'),
    ("第一行\n第二行", "line one\nline two"),
    ("制表\t符", "a\ttab"),
    ("None", "NA"),
    ("null", "nan"),
    ("1,000", "007"),
    ("", "empty source"),
    ("🙂 é\u2028x", "ünïcode"),
    ("末", "last"),
]
SPLITS = {
    "train": TRAIN,
    "validation": [("验证", "validation"), ("二", "two")],
    "test": [("测试", "test")],
}


def one_line(pairs):
    """What a TSV can hold: no text has a tab or a line end."""
    return [tuple(text.replace("\t", " ").replace("\n", " ") for text in pair) for pair in pairs]


def one_spaced(pairs):
    """What a <seg> can hold: runs of white space are one space."""
    return [tuple(" ".join(text.split()) for text in pair) for pair in pairs]


CAN_HOLD = {"tsv": one_line, "moses": one_line, "sgm": one_spaced, "xml": one_spaced}

# Writers of one file: (path, pairs), and for most whether the two texts stand in a `translation` column.


def as_dicts(pairs, nested=False):
    flat = [{"zh": source, "en": target} for source, target in pairs]
    return [{"id": 7, "translation": row} if nested else row | {"id": 7} for row in flat]


def as_table(pairs, nested=False):
    return pyarrow.Table.from_pylist(as_dicts(pairs, nested))


def write_parquet(path, pairs, nested=False):
    pyarrow.parquet.write_table(as_table(pairs, nested), path, row_group_size=3, compression="none")


def write_arrow(path, pairs, nested=False, new=pyarrow.ipc.new_stream):
    with new(path, as_table(pairs, nested).schema) as writer:
        writer.write_table(as_table(pairs, nested), max_chunksize=4)


def write_arrow_file(path, pairs, nested=False):
    write_arrow(path, pairs, nested, pyarrow.ipc.new_file)


def write_jsonl(path, pairs, nested=False, encoding="utf-8"):
    lines = [json.dumps(row, ensure_ascii=nested) for row in as_dicts(pairs, nested)]
    path.write_text("\n".join(lines) + "\n\n", encoding=encoding)


def write_json(path, pairs, nested=False, around=lambda rows: rows, indent=None, encoding="utf-8"):
    path.write_text(
        json.dumps(around(as_dicts(pairs, nested)), ensure_ascii=nested, indent=indent),
        encoding=encoding,
    )


def write_csv(path, pairs, encoding="utf-8"):
    with path.open("w", newline="", encoding=encoding) as stream:
        csv.writer(stream).writerows([("id", "zh", "en"), *((7, *pair) for pair in pairs)])


def write_tsv(path, pairs):
    lines = ["id\tzh\ten", *("\t".join(("7", *pair)) for pair in one_line(pairs))]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def write_moses(path, pairs):
    for side, language in enumerate(("zh", "en")):
        lines = "".join(pair[side] + "\n" for pair in one_line(pairs))
        path.with_name(f"{path.name}.{language}").write_text(lines, encoding="utf-8")


def segments(pairs, side):
    return "".join(
        f'<seg id="{n}"> {html.escape(pair[side])}\n</seg>\n' for n, pair in enumerate(pairs, 1)
    )


def write_sgm(path, pairs):
    for side, part in enumerate(("src.zh", "ref.en")):
        text = f'<{part[:3]}set setid="x" trglang="en"><doc docid="a">\n{segments(pairs, side)}</doc></{part[:3]}set>'
        path.with_name(f"{path.name}-{part}.sgm").write_text(text, encoding="utf-8")


def write_xml(path, pairs):
    docs = "".join(
        f'<doc origlang="zh"><src lang="zh"><p>{segments([pair], 0)}</p></src><ref lang="de"><seg>x</seg></ref>'
        f'<ref lang="en" translator="A">{segments([pair], 1)}</ref><ref lang="en" translator="B"><seg>x</seg></ref></doc>'
        for pair in pairs
    )
    suite = '<doc testsuite="x"><src lang="zh"><seg>x</seg></src></doc>'  # without a reference
    path.write_text(f"<dataset><collection>{docs}{suite}</collection></dataset>", encoding="utf-8")


# Layouts: (folder) → what the splits must hold.


def splits_in(names, write, **options):
    """A file for each split, in this order."""

    def layout(folder):
        for name, pairs in zip(names.split(), SPLITS.values()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write(folder / name, pairs, **options)
        return SPLITS

    return layout


def shards_in(names, write):
    """A file for each of the ten training pairs."""

    def layout(folder):
        for name, pair in zip(names, TRAIN, strict=True):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write(folder / name, [pair])
        return {"train": TRAIN}

    return layout


def saved_dict(*names):
    def layout(folder):
        splits = {
            name: datasets.Dataset.from_list(as_dicts(p, True))
            for name, p in zip(names, SPLITS.values())
        }
        datasets.DatasetDict(splits).save_to_disk(
            folder, num_shards={name: 1 + (name == "train") for name in names}
        )
        return SPLITS

    return layout


def saved_dataset(split, expected):
    def layout(folder):
        whole = datasets.Dataset.from_list(as_dicts(TRAIN), split=split)
        whole.select(range(9, -1, -1)).select(range(9, -1, -1)).save_to_disk(folder, num_shards=2)
        return {expected: TRAIN}

    return layout


def with_strays(folder):
    for name in (
        "README.md",
        "LICENSE",
        "dataset_infos.json",
        ".hidden.parquet",
        ".git/x.parquet",
        "_SUCCESS",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return splits_in("train.parquet dev.parquet test.parquet", write_parquet)(folder)


JSON = "train.json valid.json test.json"
LAYOUTS = {
    "parquet struct": splits_in(
        "train-0-of-1.parquet validation-0-of-1.parquet test-0-of-1.parquet",
        write_parquet,
        nested=True,
    ),
    "parquet flat": splits_in("train.parquet val.parquet wmt_eval.parquet", write_parquet),
    "parquet in folders": splits_in(
        "data/train/x.parquet data/valid/x.parquet data/testing/x.parquet", write_parquet
    ),
    "parquet shards": shards_in(
        [f"train-{index:05d}-of-00010.parquet" for index in range(10)], write_parquet
    ),
    "shards in natural order": shards_in(
        [f"part{index}.parquet" for index in range(1, 11)], write_parquet
    ),
    "shards in a split's folder": shards_in(
        [f"train/{index}.csv" for index in range(10)], write_csv
    ),
    "no keyword is train": shards_in(
        ["newtrainer.csv", *(f"x{index}.csv" for index in range(9))], write_csv
    ),
    "capitals": splits_in("Train.PARQUET Dev.PARQUET TEST.PARQUET", write_parquet),
    "arrow stream": splits_in("x-train.arrow x-validation.arrow x-test.arrow", write_arrow),
    "arrow stream struct": splits_in("train.arrow dev.arrow test.arrow", write_arrow, nested=True),
    "arrow file": splits_in("train.arrow dev.arrow evaluation.arrow", write_arrow_file),
    "save_to_disk dict": saved_dict("train", "validation", "test"),
    "save_to_disk dict, other names": saved_dict("train", "dev", "eval"),
    "save_to_disk dataset": saved_dataset(None, "train"),
    "save_to_disk dataset of a split": saved_dataset("test", "test"),
    "jsonl": splits_in("train.jsonl valid.jsonl test.ndjson", write_jsonl),
    "jsonl translation": splits_in("train.jsonl valid.jsonl test.jsonl", write_jsonl, nested=True),
    "json, one row a line": splits_in(JSON, write_jsonl, nested=True),
    "json array": splits_in(JSON, write_json, indent=1),
    "json array translation": splits_in(JSON, write_json, nested=True),
    "json data": splits_in(JSON, write_json, around=lambda rows: {"data": rows}),
    "json data indented": splits_in(
        JSON, write_json, around=lambda rows: {"v": 1, "data": rows}, indent=2
    ),
    "csv": splits_in("training.csv news.dev.csv news-test-2017.csv", write_csv),
    "tsv": splits_in("train.tsv dev.tsv test.tsv", write_tsv),
    "moses": splits_in("train dev test", write_moses),
    "moses, other names": splits_in("corpus.tc valid.tc test2017.zh-en", write_moses),
    "sgm": splits_in("train-zhen valid-zhen test-zhen", write_sgm),
    "xml": splits_in("train.zh-en.xml validation.zh-en.xml test.zh-en.xml", write_xml),
    "csv with BOM": splits_in("train.csv dev.csv test.csv", write_csv, encoding="utf-8-sig"),
    "jsonl with BOM": splits_in(
        "train.jsonl dev.jsonl test.jsonl", write_jsonl, encoding="utf-8-sig"
    ),
    "json lines with BOM": splits_in(JSON, write_jsonl, encoding="utf-8-sig"),
    "json array with BOM": splits_in(JSON, write_json, encoding="utf-8-sig"),
    "stray files": with_strays,
}


def read(text):
    return {split: [pair for chunk in text.rows(split) for pair in chunk] for split in text.files}


def read_path(path):
    return read(find_text(str(path)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_form_gives_the_same_rows(name, tmp_path, monkeypatch):
    expected = LAYOUTS[name](tmp_path)
    for chunk in (10_000, 2):
        monkeypatch.setattr(formats, "CHUNK", chunk)
        text = find_text(str(tmp_path))
        keep = CAN_HOLD.get(name.split(",")[0], list)
        assert read(text) == {split: keep(pairs) for split, pairs in expected.items()}
        assert all(0 < len(part) <= chunk for split in text.files for part in text.rows(split))
    assert text.path == str(tmp_path) and text.form == (
        "save_to_disk" if name.startswith("save") else text.form
    )


def test_null_is_no_text_and_every_string_is_one(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"translation": null}\n{"zh": null, "en": "a"}\n')
    assert read_path(tmp_path) == {"train": [("", ""), ("", "a")]}
    pair = pyarrow.struct([("zh", pyarrow.string()), ("en", pyarrow.string())])
    rows = pyarrow.array([{"zh": "甲", "en": "b"}, None, {"zh": None, "en": "a"}], type=pair)
    pyarrow.parquet.write_table(pyarrow.table({"translation": rows}), tmp_path / "x.parquet")
    assert read_path(tmp_path / "x.parquet") == {"train": [("甲", "b"), ("", ""), ("", "a")]}
    zh, en = (
        pyarrow.array(["甲", None], type=pyarrow.large_string()),
        pyarrow.array(["a", "b"]).dictionary_encode(),
    )
    pyarrow.parquet.write_table(pyarrow.table({"zh": zh, "en": en}), tmp_path / "x.parquet")
    assert read_path(tmp_path / "x.parquet") == {"train": [("甲", "a"), ("", "b")]}


@pytest.mark.parametrize(
    "name",
    [
        "parquet struct",
        "parquet in folders",
        "shards in natural order",
        "jsonl",
        "json array",
        "arrow stream",
    ],
)
def test_what_load_dataset_reads(tmp_path, name):
    """The one outside judge: `datasets` itself gives the same splits and rows (it takes a csv's NA for a null)."""
    (tmp_path / "data").mkdir()
    LAYOUTS[name](tmp_path / "data")
    theirs = datasets.load_dataset(str(tmp_path / "data"), cache_dir=str(tmp_path / "cache"))
    theirs = {
        split: [row.get("translation") or row for row in data] for split, data in theirs.items()
    }
    assert {split: sorted(pairs) for split, pairs in read_path(tmp_path / "data").items()} == {
        split: sorted((row["zh"], row["en"]) for row in data) for split, data in theirs.items()
    }


def test_files_that_are_not_read_are_named(tmp_path, capsys):
    write_csv(tmp_path / "train.csv", TRAIN)
    write_csv(tmp_path / "newstest2019.csv", SPLITS["test"])
    assert read_path(tmp_path) == {"train": TRAIN}
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and str(tmp_path / "newstest2019.csv") in said
    write_parquet(tmp_path / "train.parquet", SPLITS["test"])
    assert read_path(tmp_path) == {"train": SPLITS["test"]}
    assert (
        capsys.readouterr().out
        == f"{tmp_path} holds csv, parquet files; only the parquet files are read\n"
    )


def test_a_json_file_beside_a_corpus_is_not_the_corpus(tmp_path):
    write_tsv(tmp_path / "train.tsv", [("你好", "hello")])
    (tmp_path / "stats.json").write_text('{"pairs": 3}')
    assert read_path(tmp_path) == {"train": [("你好", "hello")]}


def test_swapped_columns_are_refused(tmp_path):
    """Chinese or not is seen in the characters; half of one side may be names or numbers."""
    write_jsonl(tmp_path / "train.jsonl", [("hello", "你好"), ("3", "三"), ("GPU 卡", "GPU card")])
    with pytest.raises(
        UserError, match="swapped: 67% of the texts under 'en' are Chinese, 33% of those under 'zh'"
    ):
        find_text(str(tmp_path))
    write_jsonl(tmp_path / "train.jsonl", [("hello", "你好"), ("三", "3"), ("GPU 卡", "GPU card")])
    assert find_text(str(tmp_path)).files


def test_other_languages(tmp_path):
    (tmp_path / "x.tsv").write_text("EN\tde\nHello\tHallo\n")
    assert read(find_text(str(tmp_path), "de", "EN")) == {"train": [("Hallo", "Hello")]}


@pytest.mark.parametrize(
    "name", ["parquet shards", "jsonl", "csv", "save_to_disk dict", "arrow file", "moses"]
)
def test_fingerprint_is_of_the_content(tmp_path, name):
    (tmp_path / "here").mkdir()
    LAYOUTS[name](tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there" / "copy")
    here, there = find_text(str(tmp_path / "here")), find_text(str(tmp_path / "there" / "copy"))
    assert here.fingerprint() == here.fingerprint() == there.fingerprint()
    assert find_text(str(tmp_path / "here"), "en", "zh").fingerprint() != here.fingerprint()
    for shards in there.files.values():
        content, before = bytearray(shards[-1].read_bytes()), there.fingerprint()
        content[len(content) // 2] ^= 1
        shards[-1].write_bytes(content)
        assert there.fingerprint() not in (before, here.fingerprint())


def test_fingerprint_of_rows():
    assert fingerprint_of(SPLITS["validation"]) == "fad62455"  # scores on disk have it
    assert fingerprint_of(SPLITS["validation"][::-1]) != fingerprint_of(SPLITS["validation"])


any_text = st.text(st.characters(exclude_categories=["Cs"]))


@settings(deadline=None, max_examples=60)
@given(pairs=st.lists(st.tuples(any_text, any_text), min_size=1, max_size=5), nested=st.booleans())
def test_any_text_survives(tmp_path_factory, pairs, nested):
    folder = tmp_path_factory.mktemp("any")
    for name, write in (
        ("x.parquet", write_parquet),
        ("x.jsonl", write_jsonl),
        ("x.arrow", write_arrow_file),
    ):
        write(folder / name, pairs, nested)
        assert read_path(folder / name) == {"train": pairs}


def test_a_quote_in_a_tsv_is_a_character(tmp_path):
    pairs = [('"他说', '"He said "fine"'), ("二", '"two'), ("三", 'three"'), ('"四"', '"four"')]
    lines = "".join(f"{source}\t{target}\r\n" for source, target in pairs)
    (tmp_path / "test.tsv").write_text("zh\ten\r\n" + lines, encoding="utf-8", newline="")
    assert read_path(tmp_path / "test.tsv") == {"test": pairs}


def test_links_that_lead_back_are_not_followed(tmp_path):
    (tmp_path / "data/inner").mkdir(parents=True)
    write_csv(tmp_path / "data/inner/train.csv", TRAIN)
    (tmp_path / "data/loop").symlink_to(".")
    (tmp_path / "data/inner/up").symlink_to("..")
    (tmp_path / "data/inner/root").symlink_to("/")
    assert read_path(tmp_path / "data") == {"train": TRAIN}
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/elsewhere").symlink_to(tmp_path / "data")  # others are
    assert read_path(tmp_path / "linked") == {"train": TRAIN}


def test_columns_with_a_dot_in_their_names(tmp_path):
    flat = pyarrow.table({"translation.zh": ["一"], "translation.en": ["one"]})
    pyarrow.parquet.write_table(flat, tmp_path / "x.parquet")
    check_error(tmp_path / "x.parquet", ["found translation.zh, translation.en"])
    assert read(find_text(str(tmp_path), "translation.zh", "translation.en")) == {
        "train": [("一", "one")]
    }


@pytest.mark.parametrize(
    "name, write",
    [
        ("x.jsonl", write_jsonl),
        ("x.tsv", write_tsv),
        ("x.parquet", write_parquet),
        ("x.arrow", write_arrow_file),
        ("nested.arrow", partial(write_arrow, nested=True)),
    ],
)
def test_long_lines_come_in_small_chunks(tmp_path, monkeypatch, name, write):
    real, read_at_once = formats._pairs_of_batches, []

    def recording(batches, *rest):
        return real((read_at_once.append(batch.num_rows) or batch for batch in batches), *rest)

    monkeypatch.setattr(formats, "CHUNK_BYTES", 100_000)
    monkeypatch.setattr(formats, "_pairs_of_batches", recording)
    pairs = [
        (f"{n}" + "长" * 12_000, "long " * 2400) for n in range(12)
    ]  # 48 kB, 24,000 characters
    write(tmp_path / name, pairs)
    chunks = list(find_text(str(tmp_path / name)).rows("train"))
    assert chunks == [[pair] for pair in pairs]
    assert max(read_at_once, default=1) <= 2


@pytest.mark.parametrize(
    "names, form, splits",
    [
        (
            "corpus newstest2017-zhen",
            "moses",
            {"train": 2},
        ),  # WMT's test set in sgm lies beside the corpus
        ("训练集.tsv 验证集.tsv 测试集.tsv", "tsv", {"train": 1, "validation": 1, "test": 1}),
        ("训练数据.tsv 中英驗證集.tsv 测试-1.tsv", "tsv", {"train": 1, "validation": 1, "test": 1}),
        (
            "trainset.tsv UNv1.0.devset.tsv TestData.tsv",
            "tsv",
            {"train": 1, "validation": 1, "test": 1},
        ),
        (
            "training_data/train.tsv training_data/dev.tsv test/0.tsv",
            "tsv",
            {"train": 1, "validation": 1, "test": 1},
        ),
        ("a.tsv b.tsv", "tsv", {"train": 2}),
    ],
)
def test_which_files_are_which_split(names, form, splits, tmp_path, capsys):
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        make = (
            write_sgm if "newstest" in name else write_tsv if name.endswith("tsv") else write_moses
        )
        make(tmp_path / name, [("你好", "hello")])
    text = find_text(str(tmp_path))
    assert (
        text.form == form and {split: len(files) for split, files in text.files.items()} == splits
    )
    assert ("so all are read as train: a.tsv, b.tsv" in capsys.readouterr().out) == (
        names[0] == "a"
    )


def test_a_compressed_shard_is_not_passed_over(tmp_path, capsys):
    write_jsonl(tmp_path / "train-1.jsonl", [("你好", "hello")])
    (tmp_path / "train-1.jsonl.gz").touch()  # from which it was unpacked
    assert find_text(str(tmp_path)).files
    (tmp_path / "raw.csv.gz").touch()  # of another form than what is read
    assert (
        find_text(str(tmp_path)).files
        and "not read, because compressed: " in capsys.readouterr().out
    )
    (tmp_path / "train-0.jsonl.gz").touch()
    with pytest.raises(UserError, match=r"train-0\.jsonl\.gz is compressed; unpack it first"):
        find_text(str(tmp_path))


def test_an_empty_row_group_makes_no_small_batches(tmp_path, monkeypatch):
    read_at_once, real = [], formats._pairs_of_batches
    record = lambda batches: (read_at_once.append(batch.num_rows) or batch for batch in batches)  # noqa: E731
    monkeypatch.setattr(
        formats, "_pairs_of_batches", lambda batches, *rest: real(record(batches), *rest)
    )
    schema = pyarrow.schema([("zh", pyarrow.string()), ("en", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(tmp_path / "train.parquet", schema) as writer:
        for count in (3, 0, 2):
            writer.write_table(
                pyarrow.table({"zh": ["你好"] * count, "en": ["hello"] * count}, schema=schema)
            )
    assert [len(chunk) for chunk in find_text(str(tmp_path)).rows("train")] == [5] and {
        *read_at_once
    } == {5}


# Mistakes: name → (files, of which the first is read; what the one line must say).

GOOD = '{"zh": "a", "en": "b"}\n'
FAR = "a,b\n" * 25_000  # beyond the first chunk, line numbers still count from the top

MISTAKES = {
    "unknown type": ({"x.txt": b"a\tb"}, ["x.txt", "not a known type of file", ".parquet"]),
    "blank in the header": (
        {"x.csv": "zh, en\n你好,Hello,more\n"},
        ["line 2: 3 fields, the header has 2"],
    ),
    "zero bytes": ({"x.csv": b""}, ["x.csv", "empty (0 bytes)"]),
    "no header": ({"x.csv": b"\n\n"}, ["x.csv", "header"]),
    "not parquet": ({"x.parquet": b"PAR1 and then something else"}, ["x.parquet", "get it again"]),
    "not arrow": ({"x.arrow": b"something else altogether"}, ["x.arrow", "get it again"]),
    "wrong columns": (
        {"x.csv": "src,tgt\na,b\n"},
        ["line 1", "found src, tgt", "zh and en", "--source and --target"],
    ),
    "wrong case": ({"x.csv": "ZH,En\na,b\n"}, ["found ZH, En", "--source ZH --target En"]),
    "wrong language": (
        {"x.jsonl": '{"translation": {"en": "a", "de": "b"}}'},
        ["line 1", "en, de", "zh and en"],
    ),
    "csv with dicts": (
        {"x.csv": "translation\n\"{'zh': 'a', 'en': 'b'}\"\n"},
        ["found translation", "zh and en"],
    ),
    "missing later key": ({"x.jsonl": GOOD + '{"zh": "a"}\n'}, ["line 2", "found zh;"]),
    "broken jsonl": ({"x.jsonl": GOOD + '{"zh": "a", "e'}, ["x.jsonl, line 2", "broken JSON"]),
    "broken json array": (
        {"x.json": '[{"zh": "a", "en": "b"},\n{"zh": "a"'},
        ["x.json, line 2", "broken JSON"],
    ),
    "brackets without end": (
        {"x.jsonl": GOOD + "[" * 200_000},
        ["x.jsonl, line 2: too many brackets"],
    ),
    "array without rows": ({"x.json": '{\n"rows": []}'}, ["x.json", "one row a line"]),
    "row is a list": ({"x.jsonl": GOOD + '\n["a", "b"]\n'}, ["line 3", "a list, not an object"]),
    "row is a string": ({"x.json": '["a", "b"]'}, ["row 1", "a str, not an object"]),
    "number in json": (
        {"x.jsonl": '{"zh": "a", "en": 5}'},
        ["line 1", "en is of type int", "not text"],
    ),
    "list in json": (
        {"x.json": '[{"zh": "a", "en": "b"}, {"zh": ["a"], "en": "b"}]'},
        ["row 2", "zh is of type list"],
    ),
    "half a surrogate": ({"x.jsonl": '{"zh": "\\ud800", "en": "b"}'}, ["line 1", "surrogate"]),
    "GBK csv": (
        {"x.csv": b"zh,en\na,b\n" + "你好,b\n".encode("gbk")},
        ["x.csv, line 3: not UTF-8", "iconv -f gb18030"],
    ),
    "GBK jsonl": (
        {"x.jsonl": '{"zh": "你好", "en": "b"}'.encode("gbk")},
        ["x.jsonl, line 1", "not UTF-8"],
    ),
    "UTF-16 tsv": (
        {"x.tsv": "zh\ten\na\tb\n".encode("utf-16")},
        ["x.tsv, line 1", "not UTF-8", "iconv -f utf-16"],
    ),
    "too many fields": (
        {"x.csv": "zh,en\na,b\na,b,c\n"},
        ["x.csv, line 3: 3 fields, the header has 2"],
    ),
    "too many fields at once": (
        {"x.csv": "zh,en\na,b,c\nd,e,f\n"},
        ["x.csv, line 2: 3 fields, the header has 2"],
    ),
    "too few fields": (
        {"x.csv": 'zh,en\n"一\n行",one\n\n二\n'},
        ["x.csv, line 5: 1 fields, the header has 2"],
    ),
    "too few fields, tsv": (
        {"x.tsv": "zh\ten\n一\tone\n二\n三\tthree\n"},
        ["x.tsv, line 3: 1 fields, the header has 2"],
    ),
    "open quote": (
        {"x.csv": 'zh,en\na,"b\nc,d\n'},
        ["x.csv, line 2", "a quote is opened and never closed"],
    ),
    "text behind a quote": (
        {"x.csv": 'zh,en\n一,"one" 1\n'},
        ["x.csv, line 2", "a quote is written twice"],
    ),
    "far down, csv": ({"x.csv": "zh,en\n" + FAR + "a,b,c\n"}, ["line 25002"]),
    "far down, bytes": (
        {"x.csv": ("zh,en\n" + FAR).encode() + b"\xff,b\n" + FAR.encode()},
        ["line 25002", "UTF-8"],
    ),
    "far down, jsonl": (
        {"x.jsonl": GOOD * 25_000 + '{"zh": 1, "en": "b"}\n'},
        ["line 25001", "int"],
    ),
    "more sources": (
        {"train.zh": "甲\n乙\n丙\n", "train.en": "a\n"},
        ["train.zh has 3 ", "train.en 1;"],
    ),
    "more targets": ({"train.zh": "甲\n", "train.en": "a\nb"}, ["train.zh has 1 ", "train.en 2;"]),
    "no partner": ({"train.zh": "甲\n"}, ["train.en is missing"]),
    "partner in GBK": (
        {"train.zh": "甲\n", "train.en": "a\n你好\n".encode("gbk")},
        ["train.en, line 2: not UTF-8"],
    ),
    "GBK sgm": (
        {"x-src.zh.sgm": "<seg>a</seg>", "x-ref.en.sgm": "\n你好".encode("gbk")},
        ["ref.en.sgm, line 2: not UTF-8"],
    ),
    "GBK xml": ({"x.xml": "<doc>\n你好".encode("gbk")}, ["x.xml, line 2: not UTF-8"]),
    "sgm": (
        {"x-src.zh.sgm": "<seg>a</seg>", "x-ref.en.sgm": "<doc></doc>"},
        ["src.zh.sgm has 1 ", "ref.en.sgm 0;"],
    ),
    "references alone": (
        {"x-ref.en.sgm": "<seg>a</seg>"},
        ["not a known type of file", "-src.zh.sgm"],
    ),
    "xml of other languages": (
        {"x.xml": '<doc><src lang="zh"></src></doc>'},
        ["x.xml has no <doc>", "'en'"],
    ),
    "xml of unequal sides": (
        {"x.xml": '<doc><src lang="zh"><seg>a</seg></src><ref lang="en"></ref></doc>'},
        ["x.xml has 1 ", "<ref> 0;"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_file(tmp_path, name):
    files, said = MISTAKES[name]
    for file, content in files.items():
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    check_error(tmp_path / next(iter(files)), said)


def check_error(path, said):
    with pytest.raises(UserError) as caught:
        read_path(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    assert all(part in message for part in said), message


@pytest.mark.parametrize(
    "name, write",
    [("x.parquet", write_parquet), ("x.arrow", write_arrow), ("y.arrow", write_arrow_file)],
)
def test_truncated_columns(tmp_path, name, write):
    write(tmp_path / name, TRAIN)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    check_error(tmp_path / name, [name])


def test_a_damaged_arrow_file_is_an_error(tmp_path):
    """Offsets that lead out of the file were a segmentation fault, hence a process of its own."""
    write_arrow_file(tmp_path / "good.arrow", [("一" * n, "one " * n) for n in range(1, 60)])
    script = """
import sys
from engine.errors import UserError
from text.rows import find_text
content = open(sys.argv[1], "rb").read()
for place in range(8, len(content), 61):
    spoiled = bytearray(content)
    spoiled[place : place + 4] = b"\\x7f\\xff\\xff\\x7f"
    open(sys.argv[2], "wb").write(spoiled)
    try:
        sum(len(a) + len(b) for chunk in find_text(sys.argv[2]).rows("train") for a, b in chunk)
    except UserError as error:
        print(error)
"""
    said = run_code(script, tmp_path / "good.arrow", tmp_path / "bad.arrow")
    assert len(said.splitlines()) > 10 and "get it again" in said


@pytest.mark.parametrize(
    "columns, said",
    [
        ({"zh": ["a"], "en": [5]}, ["x.parquet, row 1", "en holds int64, not text"]),
        ({"translation": [{"zh": ["a"], "en": "b"}]}, ["translation.zh holds list<", "not text"]),
        ({"translation": [{"fr": "a", "en": "b"}]}, ["found translation, fr, en", "--source"]),
        (
            {"zh": ["a", "b"], "en": pyarrow.array([b"a", b"\xff"]).view(pyarrow.string())},
            ["x.parquet, rows 1 to 2", "not UTF-8"],
        ),
    ],
)
def test_columns_that_are_no_text(tmp_path, columns, said):
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    check_error(tmp_path, said)


def test_mistakes_of_paths(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    check_error(tmp_path, [str(tmp_path), "holds no parquet"])
    for path in ("", "data/nowhere.csv", "./data/nowhere"):
        check_error(path, [f"{path or '(an empty path)'} does not exist"])
    (tmp_path / "dangling.csv").symlink_to(tmp_path / "gone.csv")
    check_error(tmp_path, ["dangling.csv is missing"])


def test_wrong_columns_in_the_last_split_are_found_at_once(tmp_path):
    write_csv(tmp_path / "train.csv", TRAIN)
    (tmp_path / "test.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        UserError, match=r"test\.csv, line 1: wanted the columns zh and en, found a, b"
    ):
        find_text(str(tmp_path))


def test_interrupted_save_to_disk(tmp_path):
    LAYOUTS["save_to_disk dict"](tmp_path)
    shard = next((tmp_path / "train").glob("*.arrow"))
    shard.unlink()
    check_error(tmp_path, [str(shard), "missing"])
    (tmp_path / "train" / "state.json").unlink()
    check_error(tmp_path, [str(tmp_path), "save it again"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_directory_without_permission(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    try:
        check_error(tmp_path, [str(tmp_path / "closed"), "permissions"])
    finally:
        (tmp_path / "closed").chmod(0o700)


def no_name_service(*_, **__):
    raise OSError("no name service")


@pytest.mark.parametrize("offline", [True, False])
def test_hub_out_of_reach_is_not_remembered(monkeypatch, offline):
    """Told to stay offline, or as on a lab node: the first request fails, and no second one is tried."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("socket.getaddrinfo", no_name_service)
    told, load_dataset = [], datasets.load_dataset

    def loading(*words):
        told.extend([datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE])
        return load_dataset(*words)

    monkeypatch.setattr(datasets, "load_dataset", loading)
    check_error(
        "wmt/no-such-data", ["wmt/no-such-data does not exist on disk", "hub cannot be reached"]
    )
    assert told and all(told)
    # What comes later, a tokenizer say, may find the hub again.
    assert datasets.config.HF_HUB_OFFLINE is offline
    assert huggingface_hub.constants.HF_HUB_OFFLINE is offline


@pytest.mark.parametrize("available", ["zh-en", "en-zh", None])
def test_hub_configurations(tmp_path, monkeypatch, available):
    """What `load_dataset` gives is read from its cached arrow files, under the first configuration that exists."""
    for split, pairs in SPLITS.items():
        write_arrow(tmp_path / f"{split}.arrow", pairs, nested=True)

    def load_dataset(path, config):
        if config != available:
            raise ValueError(f"BuilderConfig '{config}' not found.")
        return datasets.DatasetDict(
            {name: datasets.Dataset.from_file(f"{tmp_path}/{name}.arrow") for name in SPLITS}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    text = find_text("wmt/wmt19")
    assert text.form == "hub" and read(text) == SPLITS and len(text.fingerprint()) == 32


def test_default_path(monkeypatch):
    monkeypatch.setattr("os.path.isdir", lambda path: path == "/opt/minidataset")
    assert default_path() == "/opt/minidataset"
    monkeypatch.setattr("os.path.isdir", lambda path: False)
    assert default_path() == str(ROOT / "sample")


def test_only_the_sample_is_called_the_sample(tmp_path):
    (tmp_path / "link").symlink_to(ROOT / "sample")
    for path in (ROOT / "sample", ROOT / "sample/README.md", tmp_path / "link"):
        assert sample_notice(str(path)).startswith("bundled sample, not WMT19")
    for path in ("/opt/minidataset", str(tmp_path), "wmt/wmt19", str(ROOT)):
        assert sample_notice(path) == ""


@pytest.mark.skipif(
    not os.path.isdir(os.environ.get("MINIDATASET", "")), reason="MINIDATASET names no directory"
)
def test_the_course_data():
    text = find_text(os.environ["MINIDATASET"])
    counts = {split: sum(map(len, text.rows(split))) for split in text.files}
    assert counts == {"train": 432103, "validation": 3981, "test": 2001}
