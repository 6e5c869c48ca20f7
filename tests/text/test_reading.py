"""Every form of parallel text gives the same rows; every mistake is one line that says where."""

import csv
import html
import json
import re
import shutil

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UserError
from text import formats
from text.reading import default_path, find_text, fingerprint_of, hash_of_files, is_sample

TRAIN = [
    ("你好，世界。", "Hello, world."),
    ("他说“好”。", 'He said "fine", then left.'),
    ("第一行\n第二行", "line one\nline two"),
    ("制表\t符", "a\ttab"),
    ("None", "NA"),
    ("null", "nan"),
    ("1,000", "007"),
    ("2009-01-01", "2009-01-01 10:00:00"),
    ("", "empty source"),
    ("🙂 é\u2028x", "ünïcode"),
]
SPLITS = {
    "train": TRAIN,
    "validation": [("2009-01-01", "2009-01-01"), ("二", "two")],
    "test": [("测试", "test")],
}


def one_line(pairs):
    """What a tsv can hold: no text has a tab or a line end."""
    return [tuple(text.replace("\t", " ").replace("\n", " ") for text in pair) for pair in pairs]


def one_spaced(pairs):
    """What a <seg> can hold: runs of white space are one space."""
    return [tuple(" ".join(text.split()) for text in pair) for pair in pairs]


CAN_HOLD = {"tsv": one_line, "moses": one_line, "sgm": one_spaced}

# ---- writers of one file: (path, pairs, whether the texts stand in a `translation` column)


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


def write_json(path, pairs, nested=False, encoding="utf-8"):
    text = json.dumps(as_dicts(pairs, nested), ensure_ascii=nested, indent=1)
    path.write_text(text, encoding=encoding)


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


def write_sgm(path, pairs):
    for side, part in enumerate(("src.zh", "ref.en")):
        segments = "".join(
            f'<seg id="{n}"> {html.escape(pair[side])}\n</seg>\n' for n, pair in enumerate(pairs)
        )
        text = f'<{part[:3]}set setid="x"><doc docid="a">\n{segments}</doc></{part[:3]}set>'
        path.with_name(f"{path.name}-{part}.sgm").write_text(text, encoding="utf-8")


# ---- layouts: (folder) -> what the splits must hold


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


def saved_dict(folder):
    splits = {
        name: datasets.Dataset.from_list(as_dicts(pairs, True))
        for name, pairs in zip(("train", "dev", "eval"), SPLITS.values())
    }
    datasets.DatasetDict(splits).save_to_disk(folder, num_shards={"train": 2, "dev": 1, "eval": 1})
    return SPLITS


def saved_under_two_names(folder):
    names = {"train_a": TRAIN[:6], "train_b": TRAIN[6:], "dev": TRAIN[:1], "validation": TRAIN[1:]}
    splits = {name: datasets.Dataset.from_list(as_dicts(rows)) for name, rows in names.items()}
    datasets.DatasetDict(splits).save_to_disk(folder)
    return {"train": TRAIN, "validation": TRAIN}


def saved_with_another(folder):
    """A split that is neither train nor validation nor test is not read."""
    names = {"train": TRAIN, "backtranslated": TRAIN[:3]}
    splits = {name: datasets.Dataset.from_list(as_dicts(rows)) for name, rows in names.items()}
    datasets.DatasetDict(splits).save_to_disk(folder)
    return {"train": TRAIN}


def saved_dataset(split, expected):
    def layout(folder):
        rows = datasets.Dataset.from_list(as_dicts(TRAIN), split=split)
        rows.select(range(9, -1, -1)).select(range(9, -1, -1)).save_to_disk(folder, num_shards=2)
        return {expected: TRAIN}

    return layout


def with_strays(folder):
    for name in "README.md dataset_infos.json .hidden.parquet .git/x.parquet _SUCCESS".split():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return splits_in("train.parquet dev.parquet test.parquet", write_parquet)(folder)


JSON = "train.json valid.json test.json"
JSONL = "train.jsonl dev.jsonl test.ndjson"
LAYOUTS = {
    "parquet struct": splits_in(
        "train-0-of-1.parquet validation-0-of-1.parquet test-0-of-1.parquet",
        write_parquet,
        nested=True,
    ),
    "parquet in folders": splits_in(
        "data/train/x.parquet data/valid/x.parquet data/testing/x.parquet", write_parquet
    ),
    "shards in natural order": shards_in([f"part{n}.parquet" for n in range(1, 11)], write_parquet),
    "no keyword is train": shards_in(
        ["newtrainer.csv", *(f"x{n}.csv" for n in range(9))], write_csv
    ),
    "capitals": splits_in("Train.PARQUET Dev.PARQUET TEST.PARQUET", write_parquet),
    "odd names": splits_in(
        "[1]*::a/train.parquet [1]*::a/dev.parquet [1]*::a/test?.parquet", write_parquet
    ),
    "odd names, arrow": splits_in("a::b/train.arrow a::b/dev.arrow a::b/test*.arrow", write_arrow),
    "arrow stream": splits_in("train.arrow dev.arrow x-test.arrow", write_arrow, nested=True),
    "arrow file": splits_in("train.arrow dev.arrow evaluation.arrow", write_arrow_file),
    "save_to_disk dict": saved_dict,
    "save_to_disk, two names for a split": saved_under_two_names,
    "save_to_disk, one name more": saved_with_another,
    "save_to_disk dataset": saved_dataset(None, "train"),
    "save_to_disk dataset of a split": saved_dataset("test", "test"),
    "jsonl": splits_in(JSONL, write_jsonl, encoding="utf-8-sig"),
    "jsonl translation": splits_in(JSONL, write_jsonl, nested=True),
    "json array": splits_in(JSON, write_json, encoding="utf-8-sig"),
    "csv": splits_in("training.csv news.dev.csv test.csv", write_csv, encoding="utf-8-sig"),
    "tsv": splits_in("train.tsv dev.tsv news-test-2017.tsv", write_tsv),
    "moses": splits_in("corpus.tc valid.tc test2017.zh-en", write_moses),
    "sgm": splits_in("train-zhen valid-zhen test-zhen", write_sgm),
    "stray files": with_strays,
}


def read(text):
    return {split: list(text.pairs(split)) for split in text.files}


def read_path(path):
    return read(find_text(str(path)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_form_gives_the_same_rows(name, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "ROWS_AT_ONCE", 2)
    expected = LAYOUTS[name](tmp_path)
    keep = CAN_HOLD.get(name, list)
    text = find_text(str(tmp_path))
    assert read(text) == {split: keep(pairs) for split, pairs in expected.items()}
    assert text.path == str(tmp_path) and (text.form == "save_to_disk") == ("save" in name)


def test_what_load_dataset_reads(tmp_path):
    """The outside judge: `datasets` finds the same splits and rows in the directory."""
    (tmp_path / "data").mkdir()
    LAYOUTS["parquet struct"](tmp_path / "data")
    theirs = datasets.load_dataset(str(tmp_path / "data"), cache_dir=str(tmp_path / "cache"))
    texts = {split: [row.get("translation") or row for row in theirs[split]] for split in theirs}
    pairs = {split: [(row["zh"], row["en"]) for row in rows] for split, rows in texts.items()}
    assert read_path(tmp_path / "data") == pairs


def test_null_is_an_empty_text(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"translation": null}\n{"zh": null, "en": "a"}\n')
    assert read_path(tmp_path) == {"train": [("", ""), ("", "a")]}
    pair = pyarrow.struct([("zh", pyarrow.large_string()), ("en", pyarrow.string())])
    rows = pyarrow.array([{"zh": "甲", "en": "b"}, None, {"zh": None, "en": "a"}], type=pair)
    pyarrow.parquet.write_table(pyarrow.table({"translation": rows}), tmp_path / "x.parquet")
    assert read_path(tmp_path / "x.parquet") == {"train": [("甲", "b"), ("", ""), ("", "a")]}


def test_an_empty_file_has_no_rows(tmp_path):
    text = pyarrow.array([], pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"zh": text, "en": text}), tmp_path / "x.parquet")
    assert read_path(tmp_path) == {"train": []}


any_text = st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=10)
@given(pairs=st.lists(st.tuples(any_text, any_text), min_size=1, max_size=5), nested=st.booleans())
def test_any_text_survives(tmp_path_factory, pairs, nested):
    folder = tmp_path_factory.mktemp("any")
    for name, write in (("x.parquet", write_parquet), ("x.jsonl", write_jsonl)):
        write(folder / name, pairs, nested)
        assert read_path(folder / name) == {"train": pairs}


def test_a_quote_in_a_tsv_is_a_character(tmp_path):
    pairs = [('"他说', '"He said "fine"'), ("二", '"two'), ("三", 'three"'), ('"四"', '"four"')]
    write_tsv(tmp_path / "x.tsv", pairs)
    assert read_path(tmp_path) == {"train": pairs}


def test_segments_are_paired_by_document_and_number(tmp_path):
    source = """<doc docid="a b"><seg id="1">甲</seg><seg id="2">乙</seg></doc>
        <doc DOCID='c'><seg id='1'>丙</seg></doc><doc><seg>丁</seg></doc>"""
    target = """<DOC sysid="r" docid=c><seg id=1>C</seg></DOC>
        <doc docid="a b"><seg id="2">B</seg><seg id="1">A &amp; x</seg></doc>
        <doc><seg>D</seg></doc>"""
    (tmp_path / "x-src.zh.sgm").write_text(source, encoding="utf-8")
    (tmp_path / "x-ref.en.sgm").write_text(target, encoding="utf-8")
    pairs = [("甲", "A & x"), ("乙", "B"), ("丙", "C"), ("丁", "D")]
    assert read_path(tmp_path) == {"train": pairs}


def test_other_languages(tmp_path):
    (tmp_path / "x.tsv").write_text("EN\tde\nHello\tHallo\n")
    assert read(find_text(str(tmp_path), "de", "EN")) == {"train": [("Hallo", "Hello")]}


def test_swapped_columns_are_refused(tmp_path):
    """Chinese or not is seen in the characters; half of one side may be names or numbers."""
    write_jsonl(tmp_path / "train.jsonl", [("hello", "你好"), ("3", "三"), ("GPU 卡", "GPU card")])
    error = "swapped: 67% of the texts under 'en' are Chinese, 33% of those under 'zh'"
    with pytest.raises(UserError, match=error):
        find_text(str(tmp_path))
    write_jsonl(tmp_path / "train.jsonl", [("hello", "你好"), ("三", "3"), ("GPU 卡", "GPU card")])
    assert find_text(str(tmp_path)).files


# ---- files and splits


ONE_EACH = {"train": 1, "validation": 1, "test": 1}


@pytest.mark.parametrize(
    "names, form, splits",
    [
        ("corpus newstest2017-zhen", "moses", {"train": 2}),  # a sgm test set beside the corpus
        ("训练集.tsv 验证集.tsv 测试集.tsv", "tsv", ONE_EACH),
        ("训练数据.tsv 中英驗證集.tsv 测试-1.tsv", "tsv", ONE_EACH),
        ("trainset.tsv UNv1.0.devset.tsv TestData.tsv", "tsv", ONE_EACH),
        ("training_data/train.tsv training_data/dev.tsv test/0.tsv", "tsv", ONE_EACH),
        ("a.tsv b.tsv", "tsv", {"train": 2}),
    ],
)
def test_which_files_are_which_split(names, form, splits, tmp_path, capsys):
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write = write_tsv if name.endswith("tsv") else write_moses
        write = write_sgm if "newstest" in name else write
        write(tmp_path / name, [("你好", "hello")])
    text = find_text(str(tmp_path))
    assert text.form == form
    assert {split: len(files) for split, files in text.files.items()} == splits
    assert ("all of these are read as train" in capsys.readouterr().out) == (names[0] == "a")


def test_files_that_are_not_read_are_named(tmp_path):
    write_csv(tmp_path / "train.csv", TRAIN)
    write_csv(tmp_path / "newstest2019.csv", SPLITS["test"])
    (tmp_path / "stats.json").write_text('{"pairs": 3}')  # about the corpus, not the corpus
    lines = []
    assert read(find_text(str(tmp_path), log=lines.append)) == {"train": TRAIN}
    assert lines[0] == f"data: {tmp_path} holds csv, json files; only the csv files are read"
    assert lines[1].startswith("data: not read") and lines[1].endswith(": newstest2019.csv")


def test_a_folder_that_is_a_link_is_read_once(tmp_path):
    for name, pairs in (("data", TRAIN), ("elsewhere", SPLITS["test"])):
        (tmp_path / name).mkdir()
        split = "train" if name == "data" else "test"
        write_jsonl(tmp_path / name / f"{split}.jsonl", pairs)
    (tmp_path / "data/test").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/circle").symlink_to(tmp_path / "data")
    assert read_path(tmp_path / "data") == {"train": TRAIN, "test": SPLITS["test"]}


def test_a_compressed_shard_is_not_passed_over(tmp_path):
    write_jsonl(tmp_path / "train-1.jsonl", [("你好", "hello")])
    (tmp_path / "train-1.jsonl.gz").touch()  # from which it was unpacked
    assert find_text(str(tmp_path)).files
    (tmp_path / "train-0.jsonl.gz").touch()
    with pytest.raises(UserError, match=r"train-0\.jsonl\.gz is compressed; unpack it"):
        find_text(str(tmp_path))


@pytest.mark.parametrize("name", ["parquet in folders", "moses"])
def test_fingerprint_is_of_the_content(tmp_path, name):
    (tmp_path / "a").mkdir()
    LAYOUTS[name](tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b" / "copy")
    text, copy = find_text(str(tmp_path / "a")), find_text(str(tmp_path / "b" / "copy"))
    before = text.fingerprint()
    assert copy.fingerprint() == before and before.keys() == text.files.keys()
    assert len(set(before.values())) == len(before)
    for split, shards in copy.files.items():
        content = bytearray(shards[-1].read_bytes())
        content[len(content) // 2] ^= 1
        shards[-1].write_bytes(content)
        changed = copy.fingerprint().pop(split)
        assert changed != before[split]


def test_fingerprint_is_not_of_the_names(tmp_path):
    for name in ("pairs.tsv", "corpus.tsv", "x-train-1.tsv"):
        write_tsv(tmp_path / name, TRAIN)
    texts = [find_text(str(tmp_path / name)) for name in ("pairs.tsv", "corpus.tsv")]
    assert texts[0].fingerprint() == texts[1].fingerprint()
    # Where one file ends is part of it.
    (tmp_path / "halves").mkdir()
    content = (tmp_path / "pairs.tsv").read_bytes()
    (tmp_path / "halves/train-1.tsv").write_bytes(content[:100])
    (tmp_path / "halves/train-2.tsv").write_bytes(content[100:])
    halves = sorted((tmp_path / "halves").iterdir())
    assert hash_of_files(halves) != texts[0].fingerprint()["train"]


def test_fingerprint_of_rows():
    rows = [("验证", "validation"), ("二", "two")]
    assert fingerprint_of(rows) == "fad62455"  # scores on disk have it
    assert fingerprint_of(rows[::-1]) != fingerprint_of(rows)
    many = [(str(number), "x") for number in range(1000)]
    assert fingerprint_of([*many, rows[0]]) != fingerprint_of([*many, rows[1]])


def test_default_path(monkeypatch):
    monkeypatch.setattr("os.path.isdir", lambda path: path == "/opt/minidataset")
    assert default_path() == "/opt/minidataset"
    monkeypatch.setattr("os.path.isdir", lambda path: False)
    assert default_path() == str(ROOT / "sample")


def test_only_the_sample_and_copies_of_it_are_called_the_sample(tmp_path):
    shutil.copytree(ROOT / "sample", tmp_path / "copy")
    (tmp_path / "file").mkdir()
    shutil.copy(ROOT / "sample/test-00000-of-00001.parquet", tmp_path / "file/news.parquet")
    for path in (ROOT / "sample", tmp_path / "copy", tmp_path / "file"):
        assert is_sample(find_text(str(path)))
    write_jsonl(tmp_path / "x.jsonl", TRAIN)
    assert not is_sample(find_text(str(tmp_path / "x.jsonl")))


# ---- mistakes: name -> (files, of which the first is read; parts of the one line)

GOOD = '{"zh": "a", "en": "b"}\n'

MISTAKES = {
    "unknown type": ({"x.txt": b"a\tb"}, ["x.txt: unknown type of file", ".parquet"]),
    "zero bytes": ({"x.csv": b""}, ["x.csv is empty (0 bytes)"]),
    "no header": ({"x.csv": b"\n\n"}, ["x.csv, line 1: no columns zh and en, but none"]),
    "not parquet": ({"x.parquet": b"PAR1 and something else"}, ["x.parquet", "get it again"]),
    "not arrow": ({"x.arrow": b"something else altogether"}, ["x.arrow", "get it again"]),
    "wrong columns": ({"x.csv": "src,tgt\na,b\n"}, ["line 1", "but src, tgt", "--source"]),
    "wrong case": ({"x.csv": "ZH,En\na,b\n"}, ["but ZH, En", "--source ZH --target En"]),
    "missing later key": ({"x.jsonl": GOOD + '{"zh": "a"}\n'}, ["line 2", "but zh;"]),
    "broken jsonl": (
        {"x.jsonl": GOOD + '{"zh": "a", "e'},
        ["x.jsonl, line 2", "neither one JSON object per line"],
    ),
    "one object over lines": (
        {"x.json": '{\n"data": []}'},
        ["x.json, line 1", "write it in one of these forms"],
    ),
    "brackets without end": ({"x.jsonl": GOOD + "[" * 200_000}, ["x.jsonl, line 2: too many"]),
    "row is a list": ({"x.jsonl": GOOD + '\n["a", "b"]\n'}, ["line 3: a list; write an object"]),
    "long number": ({"x.jsonl": GOOD + '{"zh": ' + "1" * 5000 + "}"}, ["line 2", "repair it"]),
    "two columns of one name": ({"x.csv": "zh,en,en\na,b,c\n"}, ["line 1: two columns of one"]),
    "number in json": ({"x.jsonl": '{"zh": "a", "en": 5}'}, ["line 1: en is of type int"]),
    "a list of translations": ({"x.jsonl": '{"translation": ["a", "b"]}'}, ["line 1", "a list"]),
    "half a surrogate": ({"x.jsonl": '{"zh": "\\ud800", "en": "b"}'}, ["line 1", "surrogate"]),
    "GBK csv": (
        {"x.csv": b"zh,en\na,b\n" + "你好,b\n".encode("gbk")},
        ["x.csv, line 3: not UTF-8", "iconv -f gb18030"],
    ),
    "GBK jsonl": (
        {"x.jsonl": b'{"zh": "a", "en": "b"}\n' * 1000 + '{"zh": "你好"}'.encode("gbk")},
        ["x.jsonl, line 1001: not UTF-8", "iconv -f gb18030"],
    ),
    "UTF-16 tsv": ({"x.tsv": "zh\ten\n".encode("utf-16")}, ["x.tsv, line 1", "iconv -f utf-16"]),
    "too many fields": ({"x.csv": "zh,en\na,b,c\n"}, ["line 2: 3 field(s), the header has 2"]),
    "too few fields": (
        {"x.csv": 'zh,en\n"一\n行",one\n\n二\n'},
        ["x.csv, line 5: 1 field(s), the header has 2"],
    ),
    "too few fields, tsv": ({"x.tsv": "zh\ten\n一\tone\n二\n"}, ["x.tsv, line 3: 1 field(s)"]),
    "open quote": ({"x.csv": 'zh,en\na,"b\nc,d\n'}, ["x.csv, line 2: a quote is never closed"]),
    "text behind a quote": ({"x.csv": 'zh,en\n一,"one" 1\n'}, ["x.csv, line 2", "written twice"]),
    "more sources": (
        {"train.zh": "甲\n乙\n丙\n", "train.en": "a\n"},
        ["train.zh has 3 sentences", "train.en 1;"],
    ),
    "no partner": ({"train.zh": "甲\n"}, ["train.en is missing"]),
    "partner in GBK": (
        {"train.zh": "甲\n", "train.en": "a\n你好\n".encode("gbk")},
        ["train.en, line 2: not UTF-8"],
    ),
    "sgm": (
        {"x-src.zh.sgm": "<seg>a</seg>", "x-ref.en.sgm": "<doc></doc>"},
        ["x-ref.en.sgm has no segment 1 of document 1, but x-src.zh.sgm has"],
    ),
    "sgm, other numbers": (
        {
            "x-src.zh.sgm": '<doc docid="n 1"><seg id="1">a</seg><seg id="2">b</seg></doc>',
            "x-ref.en.sgm": '<doc docid="n 1"><seg id="2">B</seg><seg id="3">C</seg></doc>',
        },
        ["x-ref.en.sgm has no segment 1 of document n 1"],
    ),
    "sgm, one more": (
        {
            "x-src.zh.sgm": '<seg id="1">a</seg>',
            "x-ref.en.sgm": '<seg id="1">A</seg><seg id="2">B</seg>',
        },
        ["x-src.zh.sgm has no segment 2 of document 1, but x-ref.en.sgm has"],
    ),
    "sgm, two references": (
        {"x-src.zh.sgm": "<seg id=1>a</seg>", "x-ref.en.sgm": "<seg id=1>A</seg>" * 2},
        ["x-ref.en.sgm: segment 1 of document 1 occurs twice"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_file(tmp_path, name):
    files, parts = MISTAKES[name]
    for file, content in files.items():
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    check_error(tmp_path / next(iter(files)), parts)


def check_error(path, parts):
    with pytest.raises(UserError) as caught:
        read_path(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("name, write", [("x.parquet", write_parquet), ("x.arrow", write_arrow)])
def test_truncated_columns(tmp_path, name, write):
    write(tmp_path / name, TRAIN)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    check_error(tmp_path / name, [name])


@pytest.mark.parametrize(
    "columns, parts",
    [
        ({"zh": ["a"], "en": [5]}, ["x.parquet, row 1: column en holds int64, not text"]),
        ({"translation": [{"zh": ["a"], "en": "b"}]}, ["translation.zh holds list<", "not text"]),
        ({"translation": [{"fr": "a", "en": "b"}]}, ["but translation.fr, translation.en"]),
        (
            {"zh": ["a", "b"], "en": pyarrow.array([b"a", b"\xff"]).view(pyarrow.string())},
            ["x.parquet, rows 1 to 2: a text is not UTF-8"],
        ),
    ],
)
def test_columns_that_are_no_text(tmp_path, columns, parts):
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    check_error(tmp_path, parts)


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
    with pytest.raises(UserError, match=r"test\.csv, line 1: no columns zh and en, but a, b"):
        find_text(str(tmp_path))


def test_interrupted_save_to_disk(tmp_path):
    saved_dict(tmp_path)
    next((tmp_path / "train").glob("*.arrow")).unlink()
    check_error(tmp_path, [str(tmp_path), ".arrow is missing; save"])
    (tmp_path / "train/state.json").write_text("{")
    check_error(tmp_path, [str(tmp_path), "not fully written by save_to_disk", "save it again"])


def test_a_saved_set_without_rows(tmp_path):
    """`datasets` can save it, but not load it again."""
    empty = datasets.Dataset.from_dict({"zh": [], "en": []})
    empty.save_to_disk(tmp_path / "empty")
    check_error(tmp_path / "empty", ["empty: train has no rows"])
    splits = {"train": datasets.Dataset.from_list(as_dicts(TRAIN)), "test": empty}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "dict")
    check_error(tmp_path / "dict", ["dict: test has no rows; save it with rows, or without test"])


# ---- the hub


def test_hub_out_of_reach(monkeypatch):
    """As on a lab node: the first request fails, and load_dataset does not retry for a minute."""

    def no_name_service(*_, **__):
        raise OSError("no name service")

    monkeypatch.setattr("socket.getaddrinfo", no_name_service)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("tried"))
    check_error("wmt/no-such-data", ["does not exist on disk", "hub cannot be reached"])


@pytest.mark.parametrize("available", ["en-zh", None])
def test_hub_configurations(tmp_path, monkeypatch, available):
    """`load_dataset` gives cached arrow files, under the first configuration that exists."""
    for split, pairs in SPLITS.items():
        write_arrow(tmp_path / f"{split}.arrow", pairs, nested=True)
    load_dataset = datasets.load_dataset

    def load(path, config=None, **options):
        if path != "wmt/wmt19":
            return load_dataset(path, config, **options)
        if config != available:
            raise ValueError(f"BuilderConfig '{config}' not found.")
        return datasets.DatasetDict(
            {name: datasets.Dataset.from_file(f"{tmp_path}/{name}.arrow") for name in SPLITS}
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    text = find_text("wmt/wmt19")
    assert (
        text.form == "hub" and read(text) == SPLITS and text.fingerprint().keys() == SPLITS.keys()
    )


# ---- real data


def test_the_course_data(real_data):
    text = find_text(str(real_data))
    assert {"train", "validation"} <= set(text.files)
    for split in text.files:
        sources, targets = zip(*text.pairs(split))
        assert len(sources) > 1000
        chinese = sum(bool(re.search("[\u4e00-\u9fff]", source)) for source in sources)
        english = sum(bool(re.search("[A-Za-z]", target)) for target in targets)
        assert min(chinese, english) > 0.9 * len(sources)
