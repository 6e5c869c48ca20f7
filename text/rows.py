"""Find parallel text on disk, whatever its form, and stream its rows in flat memory.

    >>> from text.rows import default_path, find_text
    >>> text = find_text(default_path())
    >>> first_chunk = next(text.rows("train"))     # [("你好。", "Hello."), …], at most 10,000 pairs

Accepted without a flag: a directory of parquet, arrow, json, csv or tsv shards as `datasets.load_dataset` would read
it, a directory written by `save_to_disk`, one such file, or a hub id such as `wmt/wmt19`. A row holds the two texts as
`{"translation": {"zh": …, "en": …}}` or flat as `{"zh": …, "en": …}` (csv and tsv: flat only); other columns are left
alone, and a null becomes "". Also pairs of files, one a language: Moses's `train.zh` and `train.en`, and WMT's test sets,
`X-src.zh.sgm` and `X-ref.en.sgm` or one `.xml`. What the user can correct (a wrong path, a damaged file, …) raises a
one-line `UserError`.
"""

import csv
import hashlib
import html
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from engine.errors import UserError

Rows = Iterator[list[tuple[str, str]]]

CHUNK = 10_000  # pairs
CHUNK_BYTES = 2**26  # and so many bytes, about: a line may be a megabyte
KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
# The order counts: of a directory with several forms, the first is read.
FORMS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".xml": "xml",
}
PAIRED = ("sgm", "moses")  # forms of two files; they come last
NOT_DATA = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}


@dataclass(frozen=True)
class ParallelText:
    path: str  # as the user gave it
    form: str  # "parquet", "arrow", "save_to_disk", "json", "csv", "tsv", "xml", "sgm", "moses" or "hub"
    source: str  # "zh"
    target: str  # "en"
    files: dict[str, list[Path]]  # split → its shards in order; of a paired form source, target, source, …

    def rows(self, split: str) -> Rows:
        """All (source, target) pairs of a split, file by file, in chunks of at most 10,000; UserError on a bad row."""
        if split not in self.files:
            raise UserError(f"{self.path} has no {split} split; add a file with {split} in its name")
        readers = {"parquet": _read_parquet, "json": _read_json, "csv": _read_csv, "tsv": _read_csv, "xml": _read_xml,
                   "sgm": _read_pair, "moses": _read_pair}  # fmt: skip
        read = readers.get(self.form, _read_arrow)
        for file in self.files[split][:: 2 if self.form in PAIRED else 1]:
            try:
                yield from read(file, self.source, self.target)
            except UnicodeDecodeError as error:
                files = (file, _partner(file, self.source, self.target)) if self.form in PAIRED else (file,)
                file, line = next(((path, line) for path in files if (line := _first_line_not_utf8(path))), (file, 0))
                raise UserError(f"{file}, line {line}: not UTF-8; convert it: iconv -f gb18030 -t utf-8") from error
            except (OSError, ValueError, LookupError, TypeError, NotImplementedError, MemoryError) as error:
                # What pyarrow raises for a damaged file.
                raise UserError(f"cannot read {file}: {_short(error)}; if it is damaged, get it again") from error

    def fingerprint(self) -> str:
        """Hex hash over the content of all files; a copy elsewhere has the same, one changed byte gives another."""
        digest = hashlib.blake2b(digest_size=16)
        for split, files in self.files.items():
            for file in files:
                digest.update(repr((self.form, self.source, self.target, split, file.name)).encode())
                # The size keeps apart two files whose bytes, one after the other, are the same.
                digest.update(str(file.stat().st_size).encode() + b"\n")
                with file.open("rb") as stream:
                    while block := stream.read(1 << 22):
                        digest.update(block)
        return digest.hexdigest()


def default_path() -> str:
    """The course's `/opt/minidataset` where it exists, else the repository's own `sample/`."""
    if os.path.isdir("/opt/minidataset"):
        return "/opt/minidataset"
    return str(Path(__file__).resolve().parents[1] / "sample")


def find_text(path: str, source: str = "zh", target: str = "en") -> ParallelText:
    """Look at what is at `path`, sort its files into splits and check the first rows of each; UserError if unusable."""
    path = os.fspath(path)
    root = Path(os.path.expanduser(path))
    if not path or not os.path.exists(root):
        form, files = "hub", _hub_files(path, source, target)
    elif root.is_file():
        form, files = _form_of(root, source), _split_files([(root.name, root)])
        if form is None:
            ends = f"{' '.join(FORMS)}, -src.{source}.sgm or .{source}"
            raise UserError(f"{path} is not a known type of file; its name must end in one of {ends}")
    elif os.path.exists(root / "dataset_dict.json") or os.path.exists(root / "state.json"):
        form, files = "save_to_disk", _saved_files(root)
    else:
        form, files = _directory_files(root, source)
    if form in PAIRED:
        files = {split: [part for file in shards for part in (file, _partner(file, source, target))]
                 for split, shards in files.items()}  # fmt: skip
    for file in (file for shards in files.values() for file in shards):
        # os.path.exists, not Path.exists: in a closed folder it says no instead of raising PermissionError.
        if not os.path.exists(file) or os.path.getsize(file) == 0:
            state = "empty (0 bytes)" if os.path.exists(file) else "missing"
            raise UserError(f"{file} is {state}; get it again or remove it")
    text = ParallelText(path, form, source, target, files)
    for split in files:
        # Wrong columns in the last split are an error now, not after an hour of reading the first.
        next(text.rows(split), None)
    return text


def fingerprint_of(rows: list[tuple[str, str]]) -> str:
    """A hash of all texts, in order: equal scores are of equal rows."""
    digest = hashlib.blake2b(digest_size=4)
    for row in rows:
        digest.update(repr(row).encode())
    return digest.hexdigest()


# Which files, and which split each belongs to.


def _form_of(file: Path, source: str) -> str | None:
    """By its name; of two files that belong together the one with the sources stands for both."""
    if file.name.endswith(f"-src.{source}.sgm"):
        return "sgm"
    return FORMS.get(file.suffix.lower()) or ("moses" if file.suffix == f".{source}" else None)


def _partner(file: Path, source: str, target: str) -> Path:
    """Where the translations of a file of sources lie: train.zh → train.en, X-src.zh.sgm → X-ref.en.sgm."""
    if file.suffix == ".sgm":
        return file.with_name(f"{file.name.removesuffix(f'src.{source}.sgm')}ref.{target}.sgm")
    return file.with_suffix(f".{target}")


def _directory_files(root: Path, source: str) -> tuple[str, dict[str, list[Path]]]:
    def stop(error: OSError):
        raise UserError(f"cannot list {error.filename}: {error.strerror}; check its permissions")

    by_form: dict[str, list[tuple[str, Path]]] = {}
    for folder, subfolders, names in os.walk(root, onerror=stop, followlinks=True):
        subfolders[:] = [
            name for name in subfolders if not name.startswith(".") and not _leads_back(root, Path(folder, name))
        ]
        for file in (Path(folder, name) for name in names if not name.startswith(".") and name not in NOT_DATA):
            if form := _form_of(file, source):
                by_form.setdefault(form, []).append((str(file.relative_to(root)), file))
    if not by_form:
        raise UserError(f"{root} holds no parquet, arrow, json, csv or tsv file, nor one ending in .{source} beside its "
                        "translation; point to the directory of the shards")  # fmt: skip
    form = next(form for form in (*FORMS.values(), *PAIRED) if form in by_form)
    if len(by_form) > 1:
        print(f"{root} holds {', '.join(sorted(by_form))} files; only the {form} files are read")
    return form, _split_files(sorted(by_form[form], key=lambda named: _natural(named[0])))


def _leads_back(root: Path, folder: Path) -> bool:
    """Whether this is a link to a folder that it lies in: following it would read every file again and again."""
    if not folder.is_symlink():
        return False
    leads_to = Path(os.path.realpath(folder))
    above = [Path(os.path.realpath(parent)) for parent in folder.parents if parent == root or root in parent.parents]
    return any(leads_to == parent or leads_to in parent.parents for parent in above)


def _natural(name: str) -> list:
    # Odd places hold the numbers, so that an int never meets a str.
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", name))]


def _split_of(name: str) -> str | None:
    words = re.findall(r"[^\W\d_]+", name.lower())
    splits = [split for split, keywords in KEYWORDS.items() if any(word in keywords for word in words)]
    return splits[0] if len(splits) == 1 else None  # "train-test-corpus" says nothing


def _split_files(named: list[tuple[str, Path]]) -> dict[str, list[Path]]:
    """Sort (name, file) into splits by the keyword in a folder's name, the nearest first, else in the file's."""
    splits: dict[str | None, list[Path]] = {split: [] for split in (*KEYWORDS, None)}
    for name, file in named:
        *folders, last = Path(name).parts
        of_parts = [_split_of(part) for part in (*reversed(folders), last)]
        splits[next((split for split in of_parts if split), None)].append(file)
    unnamed = splits.pop(None)
    if not splits["train"]:
        splits["train"] = unnamed
    elif unnamed:
        # As load_dataset does: next to train.csv, a newstest2019.csv must not end up among the training pairs.
        names = _short(", ".join(str(file) for file in unnamed))
        print(f"not read, because their names contain no split (train, validation or test): {names}")
    return {split: files for split, files in splits.items() if files}


def _saved_files(root: Path) -> dict[str, list[Path]]:
    try:
        named = []
        if (root / "dataset_dict.json").exists():
            folders = json.loads((root / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        else:
            folders = [""]
        for folder in folders:
            state = json.loads((root / folder / "state.json").read_text(encoding="utf-8"))
            name = folder or state.get("_split") or "data"
            named += [(name, root / folder / shard["filename"]) for shard in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{root} was not fully written by save_to_disk: {_short(error)}; save it again") from error
    return _split_files(named)


def _hub_files(path: str, source: str, target: str) -> dict[str, list[Path]]:
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) or _form_of(Path(path), source):
        raise UserError(f"{path or '(an empty path)'} does not exist; check the path")
    import datasets
    import huggingface_hub

    failure = None
    try:
        huggingface_hub.HfApi().dataset_info(path, timeout=10)
    except Exception as error:
        failure = error
        # Without a network load_dataset would retry for half a minute; told to stay offline, it looks into its cache.
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    for config in (f"{source}-{target}", f"{target}-{source}", None):
        try:
            splits = datasets.load_dataset(path, config)
            shards = [(split, shard) for split, rows in splits.items() for shard in rows.cache_files]
            return _split_files([(split, Path(shard["filename"])) for split, shard in shards])
        except Exception as error:
            if config is None or not isinstance(error, ValueError):  # a ValueError: there is no such config
                failure = failure or error
                break
    reason = f"{type(failure).__name__}: {_short(failure)}"
    raise UserError(f"{path} does not exist on disk, and the hub cannot be reached or does not have it ({reason})")


# The readers, one for each form: (file, source, target) → chunks of pairs.


def _read_parquet(file: Path, source: str, target: str) -> Rows:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20) as parquet:
        prefix = _column_prefix(parquet.schema_arrow, source, target, file)
        groups = [parquet.metadata.row_group(index) for index in range(parquet.num_row_groups)]
        at_once = min((_rows_at_once(group.total_byte_size, group.num_rows) for group in groups), default=CHUNK)
        batches = parquet.iter_batches(at_once, columns=[prefix + source, prefix + target])
        yield from _pairs_of_batches(batches, prefix, source, target, file)


def _read_arrow(file: Path, source: str, target: str) -> Rows:
    import pyarrow

    def slices(batches):
        for batch in batches:
            batch.validate(full=True)  # the offsets of a damaged file would lead out of the memory of this process
            at_once = _rows_at_once(batch.nbytes, batch.num_rows)
            yield from (batch.slice(start, at_once) for start in range(0, batch.num_rows, at_once))

    with pyarrow.memory_map(str(file)) as memory:
        if memory.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(memory)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            memory.seek(0)
            batches = reader = pyarrow.ipc.open_stream(memory)
        prefix = _column_prefix(reader.schema, source, target, file)
        yield from _pairs_of_batches(slices(batches), prefix, source, target, file)


def _rows_at_once(size: int, rows: int) -> int:
    """How many rows make a chunk, where `rows` of them have this size in bytes."""
    return max(1, min(CHUNK, CHUNK_BYTES * rows // max(size, 1)))


def _column_prefix(schema, source: str, target: str, file: Path) -> str:
    """What stands before the texts' names: "translation." (a struct column) or "" (flat columns); else UserError."""
    import pyarrow

    flat = {field.name: field.type for field in schema}
    struct = flat.get("translation")
    nested = {side.name: side.type for side in struct} if struct and pyarrow.types.is_struct(struct) else {}
    for prefix, types in (("translation.", nested), ("", flat)):
        if source in types and target in types:
            for name in (source, target):
                kind = types[name]
                kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
                if str(kind) not in ("string", "large_string", "string_view", "null"):
                    raise UserError(f"{file}, row 1: column {prefix + name} holds {kind}, not text")
            return prefix
    raise _wrong_columns(file, [*flat, *nested], source, target)


def _pairs_of_batches(batches, prefix: str, source: str, target: str, file: Path) -> Rows:
    rows_before = 0
    for batch in batches:
        if prefix:
            struct = batch.column("translation")
            # flatten, unlike field, makes both texts null where the whole translation is null.
            columns = dict(zip((side.name for side in struct.type), struct.flatten()))
        else:
            columns = {name: batch.column(name) for name in (source, target)}
        try:
            yield [(a or "", b or "") for a, b in zip(columns[source].to_pylist(), columns[target].to_pylist())]
        except UnicodeDecodeError as error:
            rows = f"rows {rows_before + 1} to {rows_before + batch.num_rows}"
            raise UserError(f"{file}, {rows}: a text is not UTF-8; write the file again") from error
        rows_before += batch.num_rows


def _read_json(file: Path, source: str, target: str) -> Rows:
    return _chunks(_pair_of(row, where, source, target) for where, row in _json_rows(file))


def _pair_of(row, where: str, source: str, target: str) -> tuple[str, str]:
    """The two texts of one JSON value."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: a {type(row).__name__}, not an object; write an object with {source} and {target}")
    inner = row.get("translation", {})
    if inner is None:
        inner = {source: None, target: None}
    row = row | inner if isinstance(inner, dict) else row
    if source not in row or target not in row:
        raise _wrong_columns(where, list(row), source, target)
    for name in (source, target):
        if not isinstance(row[name], str | None):
            raise UserError(f"{where}: {name} is of type {type(row[name]).__name__}, not text; put it in quotes")
    pair = (row[source] or "", row[target] or "")
    try:
        "".join(pair).encode()
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON but no text: no tokenizer takes it
        raise UserError(f"{where}: half of a surrogate pair; remove this character") from error
    return pair


def _chunks(pairs: Iterator[tuple[str, str]]) -> Rows:
    chunk, characters = [], 0
    for pair in pairs:
        chunk.append(pair)
        characters += len(pair[0]) + len(pair[1])
        if len(chunk) == CHUNK or characters > CHUNK_BYTES // 4:  # up to four bytes each
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _json_rows(file: Path) -> Iterator[tuple[str, object]]:
    """(where, row) for one row a line (streamed), or for one array or {"data": array} (.json only; held in memory)."""
    name, number = str(file), 1
    try:
        with file.open("rb") as stream:
            start = stream.read(4096).removeprefix(b"\xef\xbb\xbf")
            stream.seek(0)
            if file.suffix.lower() == ".json" and re.match(rb'\s*(\[|\{\s*"data"\s*:|\{\s*\n)', start):
                rows = json.loads(stream.read().decode("utf-8-sig"))
                rows = rows.get("data") if isinstance(rows, dict) else rows
                if not isinstance(rows, list):
                    raise UserError(f'{file} is one object without a list under "data"; write one row a line')
                yield from ((f"{name}, row {index}", row) for index, row in enumerate(rows, 1))
            else:
                for number, line in enumerate(stream, 1):
                    if text := line.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                        yield f"{name}, line {number}", json.loads(text)
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        raise UserError(f"{file}, line {line}: broken JSON ({error.msg}); repair it or get the file again") from error
    except RecursionError:
        raise UserError(f"{file}, line {number}: too many brackets inside one another; write one row a line") from None


def _read_csv(file: Path, source: str, target: str) -> Rows:
    is_tsv = file.suffix.lower() == ".tsv"
    with file.open(encoding="utf-8-sig", newline="\n" if is_tsv else "") as stream:
        rows = _tsv_rows(stream) if is_tsv else _csv_rows(stream, file)
        line, columns = next(rows, (1, []))
        if not columns:
            raise UserError(f"{file} has no header line; its first line must name the columns")
        if source not in columns or target not in columns:
            raise _wrong_columns(f"{file}, line {line}", columns, source, target)
        places = columns.index(source), columns.index(target)

        def pairs() -> Iterator[tuple[str, str]]:
            for line, fields in rows:
                if len(fields) != len(columns):
                    remedy = "a text cannot hold a tab" if is_tsv else "put a text that holds a comma in quotes"
                    raise UserError(
                        f"{file}, line {line}: {len(fields)} fields, the header has {len(columns)}; {remedy}"
                    )
                yield fields[places[0]], fields[places[1]]

        yield from _chunks(pairs())


def _tsv_rows(stream) -> Iterator[tuple[int, list[str]]]:
    """(line, fields) of every line that is not empty. A quote is a character like any other: TSV knows no quoting."""
    for number, line in enumerate(stream, 1):
        if line := line.rstrip("\r\n"):
            yield number, line.split("\t")


def _csv_rows(stream, file: Path) -> Iterator[tuple[int, list[str]]]:
    """(first line, fields) of every row that is not empty; in quotes a field may hold commas, quotes and line ends."""
    csv.field_size_limit(2**31 - 1)
    reader, first_line = csv.reader(stream, strict=True), 1
    try:
        for fields in reader:
            if fields:
                yield first_line, fields
            first_line = reader.line_num + 1
    except csv.Error as error:
        reason = "a quote is opened and never closed" if "unexpected end" in str(error) else error
        raise UserError(f"{file}, line {first_line}: {reason}; in quotes, a quote is written twice") from error


def _read_pair(file: Path, source: str, target: str) -> Rows:
    """Moses: line n of one file translates line n of the other; sgm: the n-th <seg> the n-th."""
    files = file, _partner(file, source, target)
    sides = (
        _segments(part.read_text(encoding="utf-8-sig")) if part.suffix == ".sgm" else _lines(part) for part in files
    )
    yield from _chunks(_together(*sides, f"{file} has", files[1]))


def _lines(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8-sig", newline="\n") as stream:
        yield from (line.rstrip("\r\n") for line in stream)


def _segments(markup: str) -> Iterator[str]:
    """The texts of <seg>. By a pattern: SGM is no XML, its & and < need not be escaped."""
    found = re.findall(r"<seg\b[^>]*>(.*?)</seg>", markup, re.DOTALL | re.IGNORECASE)
    return (" ".join(html.unescape(text).split()) for text in found)


def _read_xml(file: Path, source: str, target: str) -> Rows:
    """WMT's test sets since 2021: in each <doc> a <src> and the <ref> of one translator or more, of whom the first counts."""
    text, pairs = file.read_text(encoding="utf-8-sig"), []
    for doc in re.findall(r"<doc\b.*?</doc>", text, re.DOTALL):
        sides = [re.search(rf"<{tag}\b[^>]*\blang=\"{re.escape(language)}\".*?</{tag}>", doc, re.DOTALL)
                 for tag, language in (("src", source), ("ref", target))]  # fmt: skip
        if all(sides):  # a document of a test suite has no reference
            pairs += _together(*(_segments(side[0]) for side in sides), f"a <src> of {file} has", "its <ref>")
    if not pairs:
        raise UserError(
            f"{file} has no <doc> with a <src lang={source!r}> and a <ref lang={target!r}>; is it a WMT test set?"
        )
    yield from _chunks(iter(pairs))


def _together(sources: Iterator[str], targets: Iterator[str], first: str, second) -> Iterator[tuple[str, str]]:
    """Pairs of two equally long iterators. Raises `UserError` if they are not."""
    for count, pair in enumerate(zip_longest(sources, targets)):
        if None in pair:
            longer = count + 1 + sum(1 for _ in (sources if pair[1] is None else targets))
            lengths = (longer, count) if pair[1] is None else (count, longer)
            raise UserError(f"{first} {lengths[0]:,} sentences, {second} {lengths[1]:,}; the n-th here must be the "
                            "translation of the n-th there")  # fmt: skip
        yield pair


# Error messages.


def _wrong_columns(where, columns: list[str], source: str, target: str) -> UserError:
    spelled = {name.lower(): name for name in columns}
    hint = "name the two columns with --source and --target"
    if source.lower() in spelled and target.lower() in spelled:
        hint = f"use --source {spelled[source.lower()]} --target {spelled[target.lower()]}"
    return UserError(f"{where}: wanted the columns {source} and {target}, found {_short(', '.join(columns))}; {hint}")


def _first_line_not_utf8(file: Path) -> int:
    with file.open("rb") as stream:
        return next((n for n, line in enumerate(stream, 1) if line.decode(errors="ignore").encode() != line), 0)


def _short(reason) -> str:
    line = " ".join(str(reason).split())
    return line if len(line) <= 200 else line[:199] + "…"
