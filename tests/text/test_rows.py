"""Every form of parallel text gives the same rows, and every mistake one line that says what, where and what to do."""

import csv
import html
import json
import os
import shutil
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UserError
from text import formats
from text.rows import default_path, find_text

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
VALIDATION = [("验证", "validation"), ("二", "two")]
TEST = [("测试", "test")]
SPLITS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}


def one_line(pairs):
    """What a TSV can hold: no text has a tab or a line end."""
    return [tuple(text.replace("\t", " ").replace("\n", " ") for text in pair) for pair in pairs]


# Writers of one file: (path, pairs), and for most whether the two texts stand in a `translation` column.


def as_dicts(pairs, nested):
    flat = [{"zh": source, "en": target} for source, target in pairs]
    return [{"id": 7, "translation": row} if nested else row | {"id": 7} for row in flat]


def as_table(pairs, nested=False):
    return pyarrow.Table.from_pylist(as_dicts(pairs, nested))


def write_parquet(path, pairs, nested=False):
    pyarrow.parquet.write_table(as_table(pairs, nested), path, row_group_size=3)


def write_arrow_stream(path, pairs, nested=False):
    with pyarrow.ipc.new_stream(path, as_table(pairs, nested).schema) as writer:
        writer.write_table(as_table(pairs, nested), max_chunksize=4)


def write_arrow_file(path, pairs, nested=False):
    with pyarrow.ipc.new_file(path, as_table(pairs, nested).schema) as writer:
        writer.write_table(as_table(pairs, nested), max_chunksize=4)


def write_jsonl(path, pairs, nested=False):
    lines = [json.dumps(row, ensure_ascii=nested) for row in as_dicts(pairs, nested)]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")


def write_json_array(path, pairs, nested=False):
    path.write_text(json.dumps(as_dicts(pairs, nested), ensure_ascii=False, indent=1), encoding="utf-8")


def write_json_data(path, pairs, nested=False):
    path.write_text(json.dumps({"data": as_dicts(pairs, nested)}), encoding="utf-8")


def write_json_data_indented(path, pairs, nested=False):
    path.write_text(json.dumps({"version": 1, "data": as_dicts(pairs, nested)}, indent=2), encoding="utf-8")


def write_csv(path, pairs, separator=",", encoding="utf-8"):
    with path.open("w", newline="", encoding=encoding) as stream:
        writer = csv.writer(stream, delimiter=separator)
        writer.writerows([("id", "zh", "en"), *((7, *pair) for pair in pairs)])


def write_tsv(path, pairs):
    lines = ["id\tzh\ten", *("\t".join(("7", *pair)) for pair in one_line(pairs))]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def write_moses(path, pairs):
    for side, language in enumerate(("zh", "en")):
        lines = "".join(pair[side] + "\n" for pair in one_line(pairs))
        path.with_name(f"{path.name}.{language}").write_text(lines, encoding="utf-8")


def segments(pairs, side):
    return "".join(f'<seg id="{n}"> {html.escape(pair[side])}\n</seg>\n' for n, pair in enumerate(pairs, 1))


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


def one_file_a_split(write, names, **options):
    def layout(folder):
        for name, pairs in zip(names, SPLITS.values()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write(folder / name, pairs, **options)
        return SPLITS

    return layout


def many_shards(write, suffix, names=None):
    names = names or [f"train-{index:05d}-of-00010{suffix}" for index in range(10)]

    def layout(folder):
        for name, pair in zip(names, TRAIN):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write(folder / name, [pair])
        return {"train": TRAIN}

    return layout


def with_bom(write, name):
    def layout(folder):
        write(folder / name, TRAIN)
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
        return {"train": TRAIN}

    return layout


def saved_dict(names):
    def layout(folder):
        splits = {name: datasets.Dataset.from_list(as_dicts(p, True)) for name, p in zip(names, SPLITS.values())}
        datasets.DatasetDict(splits).save_to_disk(folder, num_shards={name: 1 + (name == "train") for name in names})
        return SPLITS

    return layout


def saved_dataset(split, expected):
    def layout(folder):
        whole = datasets.Dataset.from_list(as_dicts(TRAIN, False), split=split)
        whole.select(range(9, -1, -1)).select(range(9, -1, -1)).save_to_disk(folder, num_shards=2)
        return {expected: TRAIN}

    return layout


def with_strays(folder):
    for name in ("README.md", "LICENSE", "dataset_infos.json", ".hidden.parquet", ".git/x.parquet", "_SUCCESS"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return one_file_a_split(write_parquet, ["train.parquet", "dev.parquet", "test.parquet"])(folder)


def nulls_in_columns(write):
    def layout(folder):
        fields = [("zh", pyarrow.string()), ("en", pyarrow.string())]
        table = pyarrow.table(
            {"translation": pyarrow.array([None, {"zh": None, "en": "a"}], type=pyarrow.struct(fields))}
        )
        write(table, folder)
        return {"train": [("", ""), ("", "a")]}

    return layout


def nulls_in_jsonl(folder):
    (folder / "x.jsonl").write_text('{"translation": null}\n{"zh": null, "en": "a"}\n')
    return {"train": [("", ""), ("", "a")]}


def other_string_types(folder):
    zh = pyarrow.array(["甲", None, "甲"], type=pyarrow.large_string())
    en = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"zh": zh, "en": en}), folder / "x.parquet")
    return {"train": [("甲", "a"), ("", "b"), ("甲", "a")]}


LAYOUTS = {
    "parquet struct": one_file_a_split(
        write_parquet,
        ["train-00000-of-00001.parquet", "validation-00000-of-00001.parquet", "test-00000-of-00001.parquet"],
        nested=True,
    ),
    "parquet flat": one_file_a_split(write_parquet, ["train.parquet", "val.parquet", "wmt_eval.parquet"]),
    "parquet in folders": one_file_a_split(
        write_parquet, ["data/train/x.parquet", "data/valid/x.parquet", "data/testing/x.parquet"]
    ),
    "parquet shards": many_shards(write_parquet, ".parquet"),
    "shards in natural order": many_shards(write_parquet, "", [f"part{index}.parquet" for index in range(1, 11)]),
    "shards in a split's folder": many_shards(write_csv, "", [f"train/{index}.csv" for index in range(10)]),
    "no keyword is train": many_shards(write_csv, "", ["newtrainer.csv"] + [f"x{index}.csv" for index in range(9)]),
    "capitals": one_file_a_split(write_parquet, ["Train.PARQUET", "Dev.PARQUET", "TEST.PARQUET"]),
    "large strings and dictionaries": other_string_types,
    "arrow stream": one_file_a_split(write_arrow_stream, ["x-train.arrow", "x-validation.arrow", "x-test.arrow"]),
    "arrow stream struct": one_file_a_split(
        write_arrow_stream, ["train.arrow", "dev.arrow", "test.arrow"], nested=True
    ),
    "arrow file": one_file_a_split(write_arrow_file, ["train.arrow", "dev.arrow", "evaluation.arrow"]),
    "save_to_disk dict": saved_dict(["train", "validation", "test"]),
    "save_to_disk dict, other names": saved_dict(["train", "dev", "eval"]),
    "save_to_disk dataset": saved_dataset(None, "train"),
    "save_to_disk dataset of a split": saved_dataset("test", "test"),
    "jsonl": one_file_a_split(write_jsonl, ["train.jsonl", "valid.jsonl", "test.ndjson"]),
    "jsonl translation": one_file_a_split(write_jsonl, ["train.jsonl", "valid.jsonl", "test.jsonl"], nested=True),
    "json, one row a line": one_file_a_split(write_jsonl, ["train.json", "valid.json", "test.json"], nested=True),
    "json array": one_file_a_split(write_json_array, ["train.json", "valid.json", "test.json"]),
    "json array translation": one_file_a_split(write_json_array, ["train.json", "dev.json", "test.json"], nested=True),
    "json data": one_file_a_split(write_json_data, ["train.json", "valid.json", "test.json"]),
    "json data indented": one_file_a_split(write_json_data_indented, ["train.json", "valid.json", "test.json"]),
    "csv": one_file_a_split(write_csv, ["training.csv", "news.dev.csv", "news-test-2017.csv"]),
    "tsv": one_file_a_split(write_tsv, ["train.tsv", "dev.tsv", "test.tsv"]),
    "moses": one_file_a_split(write_moses, ["train", "dev", "test"]),
    "moses, other names": one_file_a_split(write_moses, ["corpus.tc", "valid.tc", "test2017.zh-en"]),
    "sgm": one_file_a_split(write_sgm, ["train-zhen", "valid-zhen", "test-zhen"]),
    "xml": one_file_a_split(write_xml, ["train.zh-en.xml", "validation.zh-en.xml", "test.zh-en.xml"]),
    "csv with BOM": with_bom(write_csv, "x.csv"),
    "jsonl with BOM": with_bom(write_jsonl, "x.jsonl"),
    "json lines with BOM": with_bom(write_jsonl, "x.json"),
    "json array with BOM": with_bom(write_json_array, "x.json"),
    "stray files": with_strays,
    "nulls in parquet": nulls_in_columns(
        lambda table, folder: pyarrow.parquet.write_table(table, folder / "x.parquet")
    ),
    "nulls in jsonl": nulls_in_jsonl,
}


def one_spaced(pairs):
    """What a <seg> can hold: runs of white space are one space."""
    return [tuple(" ".join(text.split()) for text in pair) for pair in pairs]


LINES_ALONE = {"tsv": one_line, "moses": one_line, "sgm": one_spaced, "xml": one_spaced}  # what these forms can hold


def read(text):
    return {split: [pair for chunk in text.rows(split) for pair in chunk] for split in text.files}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_form_gives_the_same_rows(name, tmp_path, monkeypatch):
    expected = LAYOUTS[name](tmp_path)
    for chunk in (10_000, 2):
        monkeypatch.setattr(formats, "CHUNK", chunk)
        text = find_text(str(tmp_path))
        keep = LINES_ALONE.get(name.split(",")[0], list)
        assert read(text) == {split: keep(pairs) for split, pairs in expected.items()}
        assert all(0 < len(part) <= chunk for split in text.files for part in text.rows(split))
    assert text.path == str(tmp_path) and text.form == ("save_to_disk" if name.startswith("save") else text.form)


SINGLE_FILES = {
    "x.parquet": write_parquet,
    "x.arrow": write_arrow_stream,
    "x.json": write_json_array,
    "x.jsonl": write_jsonl,
    "x.ndjson": write_jsonl,
    "x.csv": write_csv,
    "x.tsv": write_tsv,
}


@pytest.mark.parametrize("name", SINGLE_FILES)
@pytest.mark.parametrize(("prefix", "split"), [("", "train"), ("my-valid.", "validation"), ("test_", "test")])
def test_single_file(tmp_path, name, prefix, split):
    SINGLE_FILES[name](tmp_path / (prefix + name), TRAIN)
    assert read(find_text(str(tmp_path / (prefix + name)))) == {split: one_line(TRAIN) if "tsv" in name else TRAIN}


def test_what_load_dataset_reads(tmp_path):
    """The one outside judge: `datasets` itself gives the same splits and rows (it takes a csv's NA for a null)."""
    for name in (
        "parquet struct",
        "parquet in folders",
        "shards in natural order",
        "jsonl",
        "json array",
        "arrow stream",
    ):
        folder = tmp_path / name
        folder.mkdir()
        LAYOUTS[name](folder)
        theirs = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
        theirs = {split: [row.get("translation") or row for row in data] for split, data in theirs.items()}
        ours = read(find_text(str(folder)))
        assert {split: sorted(pairs) for split, pairs in ours.items()} == {
            split: sorted((row["zh"], row["en"]) for row in data) for split, data in theirs.items()
        }


def test_unnamed_file_next_to_train_is_not_train(tmp_path, capsys):
    write_csv(tmp_path / "train.csv", TRAIN)
    write_csv(tmp_path / "newstest2019.csv", TEST)
    assert read(find_text(str(tmp_path))) == {"train": TRAIN}
    assert capsys.readouterr().out.count("\n") == 1


def test_mixed_forms_are_said(tmp_path, capsys):
    write_csv(tmp_path / "train.csv", TEST)
    write_parquet(tmp_path / "train.parquet", TRAIN)
    text = find_text(str(tmp_path))
    assert text.form == "parquet" and read(text) == {"train": TRAIN}
    assert capsys.readouterr().out == f"{tmp_path} holds csv, parquet files; only the parquet files are read\n"


def test_other_languages(tmp_path):
    (tmp_path / "x.tsv").write_text("EN\tde\nHello\tHallo\n")
    assert read(find_text(str(tmp_path), "de", "EN")) == {"train": [("Hallo", "Hello")]}


@pytest.mark.parametrize("name", ["parquet shards", "jsonl", "csv", "save_to_disk dict", "arrow file", "moses"])
def test_fingerprint_is_of_the_content(tmp_path, name):
    (tmp_path / "here").mkdir()
    LAYOUTS[name](tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there" / "copy")
    here, there = find_text(str(tmp_path / "here")), find_text(str(tmp_path / "there" / "copy"))
    assert here.fingerprint() == here.fingerprint() == there.fingerprint()
    swapped = find_text(str(tmp_path / "here"), "en", "zh")
    assert swapped.fingerprint() != here.fingerprint()
    for shards in there.files.values():
        content = bytearray(shards[-1].read_bytes())
        content[len(content) // 2] ^= 1
        before = there.fingerprint()
        shards[-1].write_bytes(content)
        assert there.fingerprint() not in (before, here.fingerprint())


any_text = st.text(st.characters(exclude_categories=["Cs"]))


@settings(deadline=None, max_examples=60)
@given(pairs=st.lists(st.tuples(any_text, any_text), min_size=1, max_size=5), nested=st.booleans())
def test_any_text_survives(tmp_path_factory, pairs, nested):
    folder = tmp_path_factory.mktemp("any")
    for name, write in (("x.parquet", write_parquet), ("x.jsonl", write_jsonl), ("x.arrow", write_arrow_file)):
        write(folder / name, pairs, nested)
        assert read(find_text(str(folder / name))) == {"train": pairs}


# Mistakes: name → (file to write, its content, what the one line must say).

HEADER = "zh,en\n"
MISTAKES = {
    "unknown type": ("x.txt", b"a\tb", ["x.txt", "not a known type of file", ".parquet"]),
    "zero bytes": ("x.csv", b"", ["x.csv", "empty (0 bytes)"]),
    "no header": ("x.csv", b"\n\n", ["x.csv", "header"]),
    "not parquet": ("x.parquet", b"PAR1 and then something else", ["x.parquet", "get it again"]),
    "not arrow": ("x.arrow", b"something else altogether", ["x.arrow", "get it again"]),
    "wrong columns": ("x.csv", b"src,tgt\na,b\n", ["line 1", "found src, tgt", "zh and en", "--source and --target"]),
    "wrong case": ("x.csv", b"ZH,En\na,b\n", ["found ZH, En", "--source ZH --target En"]),
    "wrong language": ("x.jsonl", b'{"translation": {"en": "a", "de": "b"}}', ["line 1", "en, de", "zh and en"]),
    "csv with dicts": ("x.csv", b"translation\n\"{'zh': 'a', 'en': 'b'}\"\n", ["found translation", "zh and en"]),
    "missing later key": ("x.jsonl", b'{"zh": "a", "en": "b"}\n{"zh": "a"}\n', ["line 2", "found zh;"]),
    "broken jsonl": ("x.jsonl", b'{"zh": "a", "en": "b"}\n{"zh": "a", "e', ["x.jsonl, line 2", "broken JSON"]),
    "broken json array": ("x.json", b'[{"zh": "a", "en": "b"},\n{"zh": "a"', ["x.json, line 2", "broken JSON"]),
    "array without rows": ("x.json", b'{\n"rows": []}', ["x.json", "one row a line"]),
    "row is a list": ("x.jsonl", b'{"zh": "a", "en": "b"}\n\n["a", "b"]\n', ["line 3", "a list, not an object"]),
    "row is a string": ("x.json", b'["a", "b"]', ["row 1", "a str, not an object"]),
    "number in json": ("x.jsonl", b'{"zh": "a", "en": 5}', ["line 1", "en is of type int", "not text"]),
    "list in json": ("x.json", b'[{"zh": "a", "en": "b"}, {"zh": ["a"], "en": "b"}]', ["row 2", "zh is of type list"]),
    "half a surrogate": ("x.jsonl", b'{"zh": "\\ud800", "en": "b"}', ["line 1", "surrogate"]),
    "GBK csv": (
        "x.csv",
        HEADER.encode() + b"a,b\n" + "你好,b\n".encode("gbk"),
        ["x.csv, line 3", "not UTF-8", "iconv"],
    ),
    "GBK jsonl": ("x.jsonl", '{"zh": "你好", "en": "b"}'.encode("gbk"), ["x.jsonl, line 1", "not UTF-8"]),
    "UTF-16 tsv": ("x.tsv", "zh\ten\na\tb\n".encode("utf-16"), ["x.tsv, line 1", "not UTF-8"]),
    "too many fields": ("x.csv", b"zh,en\na,b\na,b,c\n", ["x.csv, line 3: 3 fields, the header has 2"]),
    "too many fields at once": ("x.csv", b"zh,en\na,b,c\nd,e,f\n", ["x.csv, line 2: 3 fields, the header has 2"]),
    "open quote": ("x.csv", b'zh,en\na,"b\nc,d\n', ["x.csv, line 2", "a quote is opened and never closed"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_file(tmp_path, name):
    file, content, said = MISTAKES[name]
    (tmp_path / file).write_bytes(content)
    check_error(tmp_path / file, said)


MISTAKES_OF_PAIRS = {
    "more sources": ("train.zh", {"train.zh": "甲\n乙\n丙\n", "train.en": "a\n"}, ["train.zh has 3 ", "train.en 1;"]),
    "more targets": ("", {"train.zh": "甲\n", "train.en": "a\nb"}, ["train.zh has 1 ", "train.en 2;"]),
    "no partner": ("", {"train.zh": "甲\n"}, ["train.en is missing"]),
    "partner in GBK": ("", {"train.zh": "甲\n", "train.en": "a\n你好\n".encode("gbk")}, ["train.en, line 2: not UTF-8"]),
    "sgm": ("", {"x-src.zh.sgm": "<seg>a</seg>", "x-ref.en.sgm": "<doc></doc>"}, ["src.zh.sgm has 1 ", "ref.en.sgm 0;"]),
    "references alone": ("x-ref.en.sgm", {"x-ref.en.sgm": "<seg>a</seg>"}, ["not a known type of file", "-src.zh.sgm"]),
    "xml of other languages": ("x.xml", {"x.xml": '<doc><src lang="zh"></src></doc>'}, ["x.xml has no <doc>", "'en'"]),
    "xml of unequal sides": (
        "", {"x.xml": '<doc><src lang="zh"><seg>a</seg></src><ref lang="en"></ref></doc>'}, ["x.xml has 1 ", "<ref> 0;"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES_OF_PAIRS)
def test_mistakes_in_a_pair_of_files(tmp_path, name):
    data, files, said = MISTAKES_OF_PAIRS[name]
    for file, content in files.items():
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    check_error(tmp_path / data, said)


def check_error(path, said):
    with pytest.raises(UserError) as caught:
        read(find_text(str(path)))
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in said), message


def test_mistake_far_down(tmp_path):
    """Beyond the first chunk, line numbers still count from the top of the file."""
    good = "a,b\n" * 25_000
    (tmp_path / "x.csv").write_text(HEADER + good + "a,b,c\n")
    check_error(tmp_path / "x.csv", ["line 25002"])
    (tmp_path / "x.csv").write_bytes((HEADER + good).encode() + b"\xff,b\n" + good.encode())
    check_error(tmp_path / "x.csv", ["line 25002", "UTF-8"])
    (tmp_path / "x.jsonl").write_text('{"zh": "a", "en": "b"}\n' * 25_000 + '{"zh": 1, "en": "b"}\n')
    check_error(tmp_path / "x.jsonl", ["line 25001", "int"])


def test_truncated_columns(tmp_path):
    for name, write in (("x.parquet", write_parquet), ("x.arrow", write_arrow_stream), ("y.arrow", write_arrow_file)):
        write(tmp_path / name, TRAIN)
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        check_error(tmp_path / name, [name])


def test_damaged_parquet_page(tmp_path):
    pairs = [(f"{index}好", f"{index} fine") for index in range(5000)]
    pyarrow.parquet.write_table(as_table(pairs), tmp_path / "x.parquet")
    content = bytearray((tmp_path / "x.parquet").read_bytes())
    content[100:4000] = bytes(3900)
    (tmp_path / "x.parquet").write_bytes(content)
    check_error(tmp_path / "x.parquet", ["x.parquet", "get it again"])


def test_columns_that_are_no_text(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"zh": ["a"], "en": [5]}), tmp_path / "x.parquet")
    check_error(tmp_path, ["x.parquet, row 1", "en holds int64, not text"])
    pyarrow.parquet.write_table(pyarrow.table({"translation": [{"zh": ["a"], "en": "b"}]}), tmp_path / "x.parquet")
    check_error(tmp_path, ["translation.zh holds list<", "not text"])
    pyarrow.parquet.write_table(pyarrow.table({"translation": [{"fr": "a", "en": "b"}]}), tmp_path / "x.parquet")
    check_error(tmp_path, ["found translation, fr, en", "--source"])
    invalid = pyarrow.array([b"a", b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"zh": ["a", "b"], "en": invalid}), tmp_path / "x.parquet")
    check_error(tmp_path, ["x.parquet, rows 1 to 2", "not UTF-8"])


def test_mistakes_of_paths(tmp_path):
    check_error(tmp_path, [str(tmp_path), "holds no parquet"])
    (tmp_path / "notes.txt").write_text("x")
    check_error(tmp_path, [str(tmp_path), "holds no parquet"])
    check_error(tmp_path / "nowhere", [f"{tmp_path}/nowhere does not exist"])
    check_error("", ["does not exist"])
    check_error("data/nowhere.csv", ["data/nowhere.csv does not exist"])
    check_error("./data/nowhere", ["does not exist"])
    (tmp_path / "dangling.csv").symlink_to(tmp_path / "gone.csv")
    check_error(tmp_path, ["dangling.csv is missing"])


def test_wrong_columns_in_the_last_split_are_found_at_once(tmp_path):
    write_csv(tmp_path / "train.csv", TRAIN)
    (tmp_path / "test.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"test\.csv, line 1: wanted the columns zh and en, found a, b"):
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


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_hub_out_of_reach(offline):
    check_error("wmt/no-such-data", ["wmt/no-such-data does not exist on disk", "hub cannot be reached"])


def test_hub_when_there_is_no_name_service(monkeypatch):
    """As on a lab node: the first request fails, and no second one is tried."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", no_name_service)
    check_error("wmt/no-such-data", ["wmt/no-such-data does not exist on disk", "hub cannot be reached"])


def no_name_service(*_, **__):
    raise OSError("no name service")


@pytest.mark.parametrize("available", ["zh-en", "en-zh", None])
def test_hub_configurations(tmp_path, monkeypatch, available):
    """What `load_dataset` gives is read from its cached arrow files, under the first configuration that exists."""
    for split, pairs in SPLITS.items():
        write_arrow_stream(tmp_path / f"{split}.arrow", pairs, nested=True)

    def load_dataset(path, config):
        if config != available:
            raise ValueError(f"BuilderConfig '{config}' not found.")
        return datasets.DatasetDict(
            {split: datasets.Dataset.from_file(f"{tmp_path}/{split}.arrow") for split in SPLITS}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    text = find_text("wmt/wmt19")
    assert text.form == "hub" and read(text) == SPLITS and len(text.fingerprint()) == 32


def test_default_path(monkeypatch):
    monkeypatch.setattr("os.path.isdir", lambda path: path == "/opt/minidataset")
    assert default_path() == "/opt/minidataset"
    monkeypatch.setattr("os.path.isdir", lambda path: False)
    assert default_path() == str(Path(__file__).resolve().parents[2] / "sample")


@pytest.mark.skipif(not os.path.isdir(os.environ.get("MINIDATASET", "")), reason="MINIDATASET names no directory")
def test_the_course_data():
    text = find_text(os.environ["MINIDATASET"])
    counts = {split: sum(map(len, text.rows(split))) for split in text.files}
    assert counts == {"train": 432103, "validation": 3981, "test": 2001}
