"""Find parallel text on disk, whatever its form, and read its pairs one after another.

    text = find_text("/opt/minidataset")
    for source, target in text.pairs("train"): ...

Recognised by what is there: a directory of parquet, arrow, json, csv or tsv shards, one written by
`save_to_disk`, one such file, the name of a data set on the hub. A row holds two texts,
`{"translation": {"zh": …, "en": …}}` or `{"zh": …, "en": …}`; null becomes "". Also pairs of files,
one a language: `train.zh` with `train.en` (Moses), `X-src.zh.sgm` with `X-ref.en.sgm` (WMT).

`datasets` reads the columnar forms and the hub. It could read json, csv and tsv as well, but
(version 5.2) it takes the text "2009-01-01" of a json file for a date, fills a missing csv field
with "", and names no row; so these have short readers here, as the pairs of files have.

Memory stays flat. A row that cannot be right raises a `UserError` with its file and its number.
"""

import contextlib
import csv
import glob
import hashlib
import html
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

from engine.errors import UserError

Pairs = Iterator[tuple[str, str]]

SAMPLE = Path(__file__).resolve().parents[1] / "sample"
KEYWORDS = {
    "train": ("train", "training", "训练", "訓練"),
    "validation": ("validation", "valid", "dev", "val", "验证", "驗證"),
    "test": ("test", "testing", "eval", "evaluation", "测试", "測試"),
}
FORMS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "tsv",
}
# If a directory holds several forms, the first of these is read: json beside a corpus mostly
# describes it, and sgm is a test set of WMT.
ORDER = ("parquet", "arrow", "csv", "tsv", "moses", "json", "sgm")
PAIRED = ("moses", "sgm")  # two files belong together
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
NOT_DATA = ("config.json", "dataset_info.json", "dataset_infos.json", "state.json")
ROWS_AT_ONCE = 10_000  # of the columnar forms
# Names of a Chinese column: by its language or country code, in English, in Chinese.
CHINESE = re.compile("(.*[^a-z])?(zh|chinese|cmn|cn(?![a-z]))|.*[中汉漢]")


@dataclass(frozen=True)
class ParallelText:
    """What `find_text` found: the files of each split and how to read them."""

    path: str  # as the user gave it
    form: str  # "parquet", "arrow", "json", "csv", "tsv", "moses", "sgm", "save_to_disk", "hub"
    source: str  # "zh"
    target: str  # "en"
    files: dict[str, list[Path]]  # split -> shards in order; if paired: source, target, source, …

    def pairs(self, split: str) -> Pairs:
        """All (source, target) texts of a split, in order. Raises `UserError` for a bad row."""
        if split not in self.files:
            raise UserError(
                f"{self.path} has no {split} split; add a file with {split} in its name"
            )
        files = self.files[split]
        together = 2 if self.form in PAIRED else 1
        for first in range(0, len(files), together):
            yield from read_pairs(
                self.form, files[first : first + together], self.source, self.target
            )

    def fingerprint(self) -> str:
        """A hash of the names and contents of all files, the same wherever they lie."""
        digest = hashlib.blake2b(digest_size=16)
        for split, files in self.files.items():
            for file in files:
                facts = (self.form, self.source, self.target, split, file.name)
                digest.update(f"{facts} {file.stat().st_size}\n".encode())
                with file.open("rb") as stream:
                    while block := stream.read(1 << 22):
                        digest.update(block)
        return digest.hexdigest()


def default_path() -> str:
    """The course's `/opt/minidataset` where it exists, else the repository's own `sample/`."""
    course = "/opt/minidataset"
    return course if os.path.isdir(course) else str(SAMPLE)


def sample_notice(path: str) -> str:
    """For log and card: what a score on the bundled sample is worth; "" for all other data."""
    if Path(os.path.realpath(os.path.expanduser(path))).is_relative_to(SAMPLE):
        return "bundled sample, not WMT19: this score says only that the program works"
    return ""


def fingerprint_of(rows: list[tuple[str, str]]) -> str:
    """A hash of all texts, in order: scores are comparable if their rows have the same."""
    return hashlib.blake2b("".join(map(repr, rows)).encode(), digest_size=4).hexdigest()


def find_text(path: str, source: str = "zh", target: str = "en") -> ParallelText:
    """Sort the files at `path` into splits and read the first rows of each.

    So a wrong column in the last split is an error now, not after an hour. Raises `UserError`.
    """
    path = os.fspath(path)
    root = Path(os.path.expanduser(path))
    if not path or not os.path.exists(root):
        form, files = "hub", hub_files(path, source, target)
    elif root.is_file():
        form, files = form_of(root, source), split_files([root], root.parent)
        if form is None:
            endings = f"{' '.join(FORMS)}, .{source} or -src.{source}.sgm"
            raise UserError(f"{path}: unknown type of file; its name must end in {endings}")
    elif (root / "dataset_dict.json").exists() or (root / "state.json").exists():
        form, files = "save_to_disk", saved_files(root)
    else:
        form, files = directory_files(root, source)
    if form in PAIRED:
        files = {
            split: [part for file in shards for part in (file, partner(file, source, target))]
            for split, shards in files.items()
        }
    for file in (file for shards in files.values() for file in shards):
        if not os.path.exists(file):
            raise UserError(f"{file} is missing; get it again")
        if os.path.getsize(file) == 0:
            raise UserError(f"{file} is empty (0 bytes); get it again or remove it")
    text = ParallelText(path, form, source, target, files)
    for split in files:
        refuse_swapped(text, list(islice(text.pairs(split), 1000)))
    return text


def refuse_swapped(text: ParallelText, rows: list[tuple[str, str]]) -> None:
    """Raise `UserError` if the column named Chinese is not Chinese, but the other one is."""
    chinese = [bool(CHINESE.match(name.lower())) for name in (text.source, text.target)]
    if sum(chinese) != 1 or not rows:
        return
    shares = [
        sum(bool(re.search("[\u4e00-\u9fff]", line)) for line in side) / len(rows)
        for side in zip(*rows)
    ]
    names = [text.source, text.target]
    if chinese[1]:
        shares.reverse()
        names.reverse()
    if shares[0] < 0.5 < shares[1]:
        raise UserError(
            f"the languages are swapped: {shares[1]:.0%} of the texts under {names[1]!r} are "
            f"Chinese, {shares[0]:.0%} of those under {names[0]!r}; exchange the names in "
            f"{text.path}"
        )


# ------------------------------------------------------------------------ files and splits


def form_of(file: Path, source: str) -> str | None:
    """The form of a file, by its name. Of two paired files the source stands for both."""
    if file.name.endswith(f"-src.{source}.sgm"):
        return "sgm"
    if file.suffix == f".{source}":
        return "moses"
    return FORMS.get(file.suffix.lower())


def partner(file: Path, source: str, target: str) -> Path:
    """Where the translations of a source file lie: train.zh -> train.en."""
    if file.suffix == ".sgm":
        stem = file.name.removesuffix(f"-src.{source}.sgm")
        return file.with_name(f"{stem}-ref.{target}.sgm")
    return file.with_suffix(f".{target}")


def directory_files(root: Path, source: str) -> tuple[str, dict[str, list[Path]]]:
    """The form that is read, and its files by split."""

    def refuse(error: OSError):
        raise UserError(f"cannot list {error.filename}: {error.strerror}; check its permissions")

    by_form: dict[str, list[Path]] = {}
    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=False):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            unpacked = file.with_suffix("")
            if name.startswith(".") or name in NOT_DATA:
                continue
            if form := form_of(file, source):
                by_form.setdefault(form, []).append(file)
            elif file.suffix in COMPRESSED and form_of(unpacked, source) and not unpacked.exists():
                raise UserError(f"{file} is compressed; unpack it, or move it elsewhere")
    form = next((form for form in ORDER if form in by_form), None)
    if form is None:
        raise UserError(
            f"{root} holds no parquet, arrow, json, csv or tsv file, nor one ending in .{source} "
            "beside its translation; point to the directory of the shards"
        )
    if len(by_form) > 1:
        print(f"{root} holds {', '.join(sorted(by_form))} files; only the {form} files are read")
    return form, split_files(by_form[form], root)


def split_files(files: list[Path], root: Path) -> dict[str, list[Path]]:
    """Sort files into splits by a keyword in the file's name, else in the nearest folder's.

    If no name tells train, files without a keyword are train; else they are not read.
    """
    splits: dict[str | None, list[Path]] = {split: [] for split in (*KEYWORDS, None)}
    for file in sorted(files, key=lambda file: natural(str(file.relative_to(root)))):
        parts = reversed(file.relative_to(root).parts)
        splits[next(filter(None, map(split_of, parts)), None)].append(file)
    unnamed = splits.pop(None)
    names = short(", ".join(map(str, unnamed)))
    if not splits["train"]:
        splits["train"] = unnamed
        if len(unnamed) > 1:  # a newstest2019 may be among them
            print(f"no file's name contains train, so all are read as train: {names}")
    elif unnamed:
        print(f"not read, for no train, validation or test is in their names: {names}")
    return {split: files for split, files in splits.items() if files}


def split_of(name: str) -> str | None:
    """The one split whose keyword is a word of the name: newstest-dev.tsv -> "validation"."""
    # Chinese has no spaces: 中英训练集 is not one word.
    words = re.findall("[^\\W\\d_\u4e00-\u9fff]+|训练|訓練|验证|驗證|测试|測試", name.lower())
    words = {re.sub("(data)?(set)?$", "", word) for word in words}  # testset, traindata
    splits = [split for split, keywords in KEYWORDS.items() if words & {*keywords}]
    return splits[0] if len(splits) == 1 else None  # "train-test-corpus" tells nothing


def natural(name: str) -> list:
    """A key for sorting: shards 1, 2, 10. Odd places hold numbers, so int never meets str."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", name))]


def saved_files(root: Path) -> dict[str, list[Path]]:
    """The arrow files of a folder written by `save_to_disk`, by split."""
    from datasets import Dataset, load_from_disk

    try:
        saved = load_from_disk(str(root))
    except Exception as error:  # of damaged files the library raises what it happens to meet
        raise UserError(
            f"{root} was not fully written by save_to_disk: {short(error)}; save it again"
        ) from error
    if isinstance(saved, Dataset):
        saved = {str(saved.split or "train"): saved}
    return cached_files(saved)


def cached_files(dataset_dict) -> dict[str, list[Path]]:
    """The arrow files behind each split, under our names: "dev" is validation."""
    files = {}
    for name, dataset in dataset_dict.items():
        split = split_of(name) or name
        files[split] = [Path(cached["filename"]) for cached in dataset.cache_files]
    if "train" not in files and len(files) == 1 and not split_of(next(iter(files))):
        files = {"train": next(iter(files.values()))}
    return files


def hub_files(path: str, source: str, target: str) -> dict[str, list[Path]]:
    """The arrow files that `load_dataset` leaves in its cache for a name on the hub."""
    # data/train.csv looks like a hub id, owner/name, but is a file that is missing.
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) or form_of(Path(path), source):
        raise UserError(f"{path or '(an empty path)'} does not exist; check the path")
    import huggingface_hub
    from datasets import load_dataset

    failure = None
    try:
        huggingface_hub.HfApi().dataset_info(path, timeout=10)
    except Exception as error:
        failure = error
    # Without a network load_dataset would retry for half a minute; offline, it uses its cache.
    with offline() if failure else contextlib.nullcontext():
        for config in (f"{source}-{target}", f"{target}-{source}", None):
            try:
                return cached_files(load_dataset(path, config))
            except Exception as error:
                if config is None or not isinstance(
                    error, ValueError
                ):  # ValueError: no such config
                    failure = failure or error
                    break
    raise UserError(
        f"{path} does not exist on disk, and the hub cannot be reached or does not have it "
        f"({type(failure).__name__}: {short(failure)})"
    )


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Inside, `datasets` and `huggingface_hub` send no request; afterwards they do as before."""
    import datasets
    import huggingface_hub

    holders = (datasets.config, huggingface_hub.constants)
    before = [holder.HF_HUB_OFFLINE for holder in holders]
    for holder in holders:
        holder.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder.HF_HUB_OFFLINE = value


# ------------------------------------------------------------------------ pairs of one file


def read_pairs(form: str, files: list[Path], source: str, target: str) -> Pairs:
    """The pairs of a file, or of two that belong together. Raises `UserError`."""
    readers = {"json": read_json, "csv": read_csv, "tsv": read_tsv}
    try:
        if form == "moses":
            yield from together(read_lines(files[0]), read_lines(files[1]), *files)
        elif form == "sgm":
            yield from together(read_segments(files[0]), read_segments(files[1]), *files)
        elif form in readers:
            yield from readers[form](files[0], source, target)
        else:  # save_to_disk and the hub's cache are arrow files
            builder = "parquet" if form == "parquet" else "arrow"
            yield from read_columns(builder, files[0], source, target)
    except UnicodeDecodeError as error:
        raise not_utf8(files) from error


def read_columns(builder: str, file: Path, source: str, target: str) -> Pairs:
    """Parquet or arrow, streamed by `datasets`, without a copy in its cache."""
    import datasets
    import pyarrow

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors become our one line
    number = 1
    # A cache directory of its own: not even a lock file goes to the user's home.
    with tempfile.TemporaryDirectory() as cache:
        try:
            rows = datasets.load_dataset(
                builder,
                data_files=[glob.escape(str(file))],
                split="train",
                streaming=True,
                cache_dir=cache,
            )
            for table in rows.with_format("arrow").iter(ROWS_AT_ONCE):
                table = table.flatten()  # translation: {zh, en} -> translation.zh, translation.en
                sources, targets = text_columns(table, file, source, target)
                try:
                    pairs = list(zip(sources.to_pylist(), targets.to_pylist()))
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{file}, rows {number} to {number + table.num_rows - 1}: a text is not "
                        "UTF-8; write the file again"
                    ) from error
                yield from ((a or "", b or "") for a, b in pairs)
                number += table.num_rows
        except (OSError, ValueError, TypeError, LookupError, pyarrow.ArrowException) as error:
            raise UserError(
                f"cannot read {file}: {short(error)}; if it is damaged, get it again"
            ) from error


def text_columns(table, file: Path, source: str, target: str) -> list:
    """The two columns of texts of a flattened table."""
    for prefix in ("translation.", ""):
        names = [prefix + source, prefix + target]
        if all(name in table.column_names for name in names):
            for name in names:
                kind = str(table.schema.field(name).type)
                if kind not in ("string", "large_string", "string_view", "null"):
                    raise UserError(f"{file}, row 1: column {name} holds {kind}, not text")
            return [table.column(name) for name in names]
    raise wrong_columns(file, table.column_names, source, target)


def read_json(file: Path, source: str, target: str) -> Pairs:
    """One object a line, streamed, or one array of objects, held in memory."""
    for where, row in json_rows(file):
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise UserError(f"{where}: a {kind}; write an object with {source} and {target}")
        texts = row.get("translation", row)
        if texts is None:
            texts = {source: None, target: None}
        if source not in texts or target not in texts:
            raise wrong_columns(where, list(texts), source, target)
        for name in (source, target):
            if not isinstance(texts[name], str | None):
                kind = type(texts[name]).__name__
                raise UserError(f"{where}: {name} is of type {kind}, not text; put it in quotes")
        pair = (texts[source] or "", texts[target] or "")
        try:
            "".join(pair).encode()
        except UnicodeEncodeError as error:  # "\ud800" is valid json, but no tokenizer takes it
            raise UserError(f"{where}: half of a surrogate pair; remove this character") from error
        yield pair


def json_rows(file: Path) -> Iterator[tuple[str, object]]:
    """(where it stands, row)"""
    number = 1
    try:
        with file.open(encoding="utf-8-sig") as stream:
            if stream.read(4096).lstrip()[:1] == "[":
                stream.seek(0)
                for number, row in enumerate(json.load(stream), 1):
                    yield f"{file}, row {number}", row
                return
            stream.seek(0)
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield f"{file}, line {number}", json.loads(line.strip())
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        raise UserError(
            f"{file}, line {line}: broken JSON ({error.msg}); repair it or get the file again"
        ) from error
    except RecursionError:
        raise UserError(
            f"{file}, line {number}: too many brackets inside one another; write one row a line"
        ) from None


def read_tsv(file: Path, source: str, target: str) -> Pairs:
    """A quote is a character like any other: tsv knows no quoting."""
    rows = ((number, line.split("\t")) for number, line in enumerate(read_lines(file), 1) if line)
    return below_header(rows, file, source, target, "a text cannot hold a tab")


def read_csv(file: Path, source: str, target: str) -> Pairs:
    """In quotes a field may hold commas, line ends, and quotes that are written twice."""
    advice = "put a text that holds a comma in quotes"
    return below_header(csv_rows(file), file, source, target, advice)


def csv_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """(its first line, fields) of every row that is not empty."""
    csv.field_size_limit(2**31 - 1)
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        first_line = 1
        try:
            for fields in reader:
                if fields:
                    yield first_line, fields
                first_line = reader.line_num + 1
        except csv.Error as error:
            reason = "a quote is never closed" if "unexpected end" in str(error) else error
            raise UserError(
                f"{file}, line {first_line}: {reason}; in quotes, a quote is written twice"
            ) from error


def below_header(
    rows: Iterator[tuple[int, list[str]]], file: Path, source: str, target: str, advice: str
) -> Pairs:
    """The two columns that the first row names. Every row must have as many fields."""
    line, columns = next(rows, (1, []))
    columns = [name.strip() for name in columns]
    if source not in columns or target not in columns:
        raise wrong_columns(f"{file}, line {line}", columns, source, target)
    places = columns.index(source), columns.index(target)
    for line, fields in rows:
        if len(fields) != len(columns):
            raise UserError(
                f"{file}, line {line}: {len(fields)} fields, the header has {len(columns)}; "
                f"{advice}"
            )
        yield fields[places[0]], fields[places[1]]


def read_lines(file: Path) -> Iterator[str]:
    """Lines that end in \\n or \\r\\n alone; U+2028 and its like are characters of a text."""
    with file.open(encoding="utf-8-sig", newline="\n") as stream:
        yield from (line.rstrip("\r\n") for line in stream)


def read_segments(file: Path) -> Iterator[str]:
    """The texts of <seg>. By a pattern: sgm is not XML, & and < need not be escaped."""
    markup = file.read_text(encoding="utf-8-sig")
    for text in re.findall(r"<seg\b[^>]*>(.*?)</seg>", markup, re.DOTALL | re.IGNORECASE):
        yield " ".join(html.unescape(text).split())


def together(sources: Iterator[str], targets: Iterator[str], *files: Path) -> Pairs:
    """Pairs of two equally long iterators. Raises `UserError` if they are not."""
    for count, pair in enumerate(zip_longest(sources, targets)):
        if None in pair:
            rest = sum(1 for _ in (targets if pair[0] is None else sources))
            lengths = [count, count + 1 + rest]
            if pair[1] is None:
                lengths.reverse()
            raise UserError(
                f"{files[0]} has {lengths[0]:,} sentences, {files[1]} {lengths[1]:,}; line n of "
                "one must be the translation of line n of the other"
            )
        yield pair


# ------------------------------------------------------------------------ errors


def wrong_columns(where, columns: Iterable[str], source: str, target: str) -> UserError:
    """The error for a row or file that lacks one of the two columns."""
    spelled = {name.lower(): name for name in columns}
    hint = "name them with --source and --target (line 1 of csv and tsv must hold their names)"
    if source.lower() in spelled and target.lower() in spelled:
        hint = f"use --source {spelled[source.lower()]} --target {spelled[target.lower()]}"
    found = short(", ".join(columns)) or "none"
    return UserError(f"{where}: no columns {source} and {target}, but {found}; {hint}")


def not_utf8(files: list[Path]) -> UserError:
    """The error for the first line that is not UTF-8."""
    for file in files:
        with file.open("rb") as stream:
            # What Windows calls Unicode begins with one of these marks.
            encoding = "utf-16" if stream.read(2) in (b"\xff\xfe", b"\xfe\xff") else "gb18030"
            stream.seek(0)
            for number, line in enumerate(stream, 1):
                if line.decode(errors="ignore").encode() != line:
                    return UserError(
                        f"{file}, line {number}: not UTF-8; convert it (iconv -f {encoding} -t "
                        "utf-8) and look at the result: Traditional Chinese may be big5, English "
                        "from Windows cp1252"
                    )
    return UserError(f"{files[0]} is not UTF-8; convert it with iconv")


def short(reason) -> str:
    """On one line of at most 200 characters."""
    line = " ".join(str(reason).split())
    return line if len(line) <= 200 else line[:199] + "…"
