"""Rows out of one file of parallel text: a reader for each form, and the lines that bad rows and damaged files end in."""

import csv
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

from engine.errors import UserError

Pairs = Iterator[tuple[str, str]]

CHUNK = 10_000  # pairs
CHUNK_BYTES = 2**26  # and so many bytes, about: a line may be a megabyte


def read_chunks(
    form: str, files: list[Path], source: str, target: str
) -> Iterator[list[tuple[str, str]]]:
    """The pairs of a file, or of two that belong together, in lists of at most `CHUNK`; UserError if one cannot be read."""
    try:
        pairs = READERS.get(form, _read_arrow)(
            *files, source, target
        )  # some read the whole file here
        # A character has up to four bytes.
        yield from groups_of(
            pairs, lambda pair: len(pair[0]) + len(pair[1]), CHUNK_BYTES // 4, CHUNK
        )
    except UnicodeDecodeError as error:
        file, line = next(
            ((file, line) for file in files if (line := _first_line_not_utf8(file))), (files[0], 0)
        )
        with file.open("rb") as stream:  # what Windows calls Unicode begins so
            encoding = "utf-16" if stream.read(2) in (b"\xff\xfe", b"\xfe\xff") else "gb18030"
        others = "look at the result: Traditional Chinese may be big5, English from Windows cp1252"
        raise UserError(
            f"{file}, line {line}: not UTF-8; convert it: iconv -f {encoding} -t utf-8, and {others}"
        ) from error
    except (OSError, ValueError, LookupError, TypeError, NotImplementedError, MemoryError) as error:
        # What pyarrow raises for a damaged file.
        raise UserError(
            f"cannot read {files[0]}: {short(error)}; if it is damaged, get it again"
        ) from error


def groups_of(
    items: Iterable, size_of: Callable, together: int, count: int | None = None
) -> Iterator[list]:
    """Lists of at most `count` items whose sizes add up to at most `together`; a larger item is alone in its list."""
    group, sizes = [], 0
    for item in items:
        size = size_of(item)
        if group and (len(group) == count or sizes + size > together):
            yield group
            group, sizes = [], 0
        group.append(item)
        sizes += size
    if group:
        yield group


def _first_line_not_utf8(file: Path) -> int:
    """Its number, from 1; 0 if there is none. What decoding ignores is missing when the line is encoded again."""
    with file.open("rb") as stream:
        return next(
            (
                n
                for n, line in enumerate(stream, 1)
                if line.decode(errors="ignore").encode() != line
            ),
            0,
        )


def _wrong_columns(where, columns: list[str], source: str, target: str) -> UserError:
    spelled = {name.lower(): name for name in columns}
    hint = "name the two columns with --source and --target (of csv and tsv line 1 must hold their names)"
    if source.lower() in spelled and target.lower() in spelled:
        hint = f"use --source {spelled[source.lower()]} --target {spelled[target.lower()]}"
    return UserError(
        f"{where}: wanted the columns {source} and {target}, found {short(', '.join(columns))}; {hint}"
    )


def short(reason) -> str:
    """On one line of at most 200 characters."""
    line = " ".join(str(reason).split())
    return line if len(line) <= 200 else line[:199] + "…"


# Columns: parquet, and arrow as a stream or as a file.


def _read_parquet(file: Path, source: str, target: str) -> Pairs:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20) as parquet:
        prefix = _column_prefix(parquet.schema_arrow, source, target, file)
        groups = [parquet.metadata.row_group(index) for index in range(parquet.num_row_groups)]
        sizes = [
            _rows_at_once(group.total_byte_size, group.num_rows)
            for group in groups
            if group.num_rows
        ]
        at_once = min(sizes, default=CHUNK)
        batches = parquet.iter_batches(at_once, columns=[prefix + source, prefix + target])
        yield from _pairs_of_batches(batches, prefix, source, target, file)


def _read_arrow(file: Path, source: str, target: str) -> Pairs:
    import pyarrow

    def slices(batches):
        for batch in batches:
            batch.validate(
                full=True
            )  # the offsets of a damaged file would lead out of the memory of this process
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
    from pyarrow import types

    flat = {field.name: field.type for field in schema}
    struct = flat.get("translation")
    nested = {side.name: side.type for side in struct} if struct and types.is_struct(struct) else {}
    for prefix, columns in (("translation.", nested), ("", flat)):
        if source in columns and target in columns:
            for name in (source, target):
                # Dictionary-encoded texts are numbers into a list of texts: the type of the list counts.
                kind = (
                    columns[name].value_type
                    if types.is_dictionary(columns[name])
                    else columns[name]
                )
                if str(kind) not in ("string", "large_string", "string_view", "null"):
                    raise UserError(f"{file}, row 1: column {prefix + name} holds {kind}, not text")
            return prefix
    raise _wrong_columns(file, [*flat, *nested], source, target)


def _pairs_of_batches(batches, prefix: str, source: str, target: str, file: Path) -> Pairs:
    from pyarrow import RecordBatch

    rows_before = 0
    for batch in batches:
        if prefix:
            # A translation that is null becomes two texts that are. RecordBatch.from_struct_array forgets in pyarrow 21
            # that the batch is a slice.
            struct = batch.column("translation")
            batch = RecordBatch.from_arrays(struct.flatten(), [side.name for side in struct.type])
        try:
            sides = batch.column(source).to_pylist(), batch.column(target).to_pylist()
        except UnicodeDecodeError as error:
            rows = f"rows {rows_before + 1} to {rows_before + batch.num_rows}"
            raise UserError(f"{file}, {rows}: a text is not UTF-8; write the file again") from error
        yield from ((a or "", b or "") for a, b in zip(*sides))
        rows_before += batch.num_rows


# JSON: a row a line, or one array.


def _read_json(file: Path, source: str, target: str) -> Pairs:
    for where, row in _json_rows(file):
        if not isinstance(row, dict):
            wanted = f"write an object with {source} and {target}"
            raise UserError(f"{where}: a {type(row).__name__}, not an object; {wanted}")
        inner = row.get("translation", {})
        if inner is None:
            inner = {source: None, target: None}
        row = row | inner if isinstance(inner, dict) else row
        if source not in row or target not in row:
            raise _wrong_columns(where, list(row), source, target)
        for name in (source, target):
            if not isinstance(row[name], str | None):
                raise UserError(
                    f"{where}: {name} is of type {type(row[name]).__name__}, not text; put it in quotes"
                )
        pair = (row[source] or "", row[target] or "")
        try:
            "".join(pair).encode()
        except (
            UnicodeEncodeError
        ) as error:  # "\ud800" is valid JSON but no text: no tokenizer takes it
            raise UserError(f"{where}: half of a surrogate pair; remove this character") from error
        yield pair


def _json_rows(file: Path) -> Iterator[tuple[str, object]]:
    """(where, row) for one row a line (streamed), or for one array or {"data": array} (.json only; held in memory)."""
    number = 1
    try:
        with file.open("rb") as stream:
            start = stream.read(4096).removeprefix(b"\xef\xbb\xbf")
            stream.seek(0)
            if file.suffix.lower() == ".json" and re.match(
                rb'\s*(\[|\{\s*"data"\s*:|\{\s*\n)', start
            ):
                rows = json.loads(stream.read().decode("utf-8-sig"))
                rows = rows.get("data") if isinstance(rows, dict) else rows
                if not isinstance(rows, list):
                    raise UserError(
                        f'{file} is one object without a list under "data"; write one row a line'
                    )
                yield from ((f"{file}, row {index}", row) for index, row in enumerate(rows, 1))
            else:
                for number, line in enumerate(stream, 1):
                    if text := line.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                        yield f"{file}, line {number}", json.loads(text)
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        raise UserError(
            f"{file}, line {line}: broken JSON ({error.msg}); repair it or get the file again"
        ) from error
    except RecursionError:
        raise UserError(
            f"{file}, line {number}: too many brackets inside one another; write one row a line"
        ) from None


# Lines: csv, tsv, and Moses's pair of files.


def _lines(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8-sig", newline="\n") as stream:
        yield from (line.rstrip("\r\n") for line in stream)


def _read_tsv(file: Path, source: str, target: str) -> Pairs:
    # A quote is a character like any other: TSV knows no quoting.
    rows = ((number, line.split("\t")) for number, line in enumerate(_lines(file), 1) if line)
    return _below_header(rows, file, source, target, "a text cannot hold a tab")


def _read_csv(file: Path, source: str, target: str) -> Pairs:
    return _below_header(
        _csv_rows(file), file, source, target, "put a text that holds a comma in quotes"
    )


def _csv_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """(first line, fields) of every row that is not empty; in quotes a field may hold commas, quotes and line ends."""
    csv.field_size_limit(2**31 - 1)
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader, first_line = csv.reader(stream, strict=True), 1
        try:
            for fields in reader:
                if fields:
                    yield first_line, fields
                first_line = reader.line_num + 1
        except csv.Error as error:
            reason = (
                "a quote is opened and never closed" if "unexpected end" in str(error) else error
            )
            raise UserError(
                f"{file}, line {first_line}: {reason}; in quotes, a quote is written twice"
            ) from error


def _below_header(
    rows: Iterator[tuple[int, list[str]]], file: Path, source: str, target: str, remedy: str
) -> Pairs:
    """The two columns that the first of these (line, fields) names; every row must have as many fields."""
    line, columns = next(rows, (1, []))
    columns = [name.strip() for name in columns]
    if not columns:
        raise UserError(f"{file} has no header line; its first line must name the columns")
    if source not in columns or target not in columns:
        raise _wrong_columns(f"{file}, line {line}", columns, source, target)
    places = columns.index(source), columns.index(target)
    for line, fields in rows:
        if len(fields) != len(columns):
            raise UserError(
                f"{file}, line {line}: {len(fields)} fields, the header has {len(columns)}; {remedy}"
            )
        yield fields[places[0]], fields[places[1]]


def _read_moses(sources: Path, targets: Path, *_) -> Pairs:
    return _together(_lines(sources), _lines(targets), f"{sources} has", targets)


# Segments: WMT's test sets.


def _segments(markup: str) -> Iterator[str]:
    """The texts of <seg>. By a pattern: SGM is no XML, its & and < need not be escaped."""
    found = re.findall(r"<seg\b[^>]*>(.*?)</seg>", markup, re.DOTALL | re.IGNORECASE)
    return (" ".join(html.unescape(text).split()) for text in found)


def _read_sgm(sources: Path, targets: Path, *_) -> Pairs:
    sides = (_segments(file.read_text(encoding="utf-8-sig")) for file in (sources, targets))
    return _together(*sides, f"{sources} has", targets)


def _read_xml(file: Path, source: str, target: str) -> Pairs:
    """Since 2021: in each <doc> a <src> and the <ref> of one translator or more, of whom the first counts."""
    text, pairs = file.read_text(encoding="utf-8-sig"), []
    for doc in re.findall(r"<doc\b.*?</doc>", text, re.DOTALL):
        sides = [
            re.search(rf"<{tag}\b[^>]*\blang=\"{re.escape(language)}\".*?</{tag}>", doc, re.DOTALL)
            for tag, language in (("src", source), ("ref", target))
        ]
        if all(sides):  # a document of a test suite has no reference
            pairs += _together(
                *(_segments(side[0]) for side in sides), f"a <src> of {file} has", "its <ref>"
            )
    if not pairs:
        languages = f"a <src lang={source!r}> and a <ref lang={target!r}>"
        raise UserError(f"{file} has no <doc> with {languages}; is it a WMT test set?")
    return pairs


def _together(sources: Iterator[str], targets: Iterator[str], first: str, second) -> Pairs:
    """Pairs of two equally long iterators. Raises `UserError` if they are not."""
    for count, pair in enumerate(zip_longest(sources, targets)):
        if None in pair:
            longer = count + 1 + sum(1 for _ in (sources if pair[1] is None else targets))
            lengths = (longer, count) if pair[1] is None else (count, longer)
            raise UserError(
                f"{first} {lengths[0]:,} sentences, {second} {lengths[1]:,}; the n-th here must be the "
                "translation of the n-th there"
            )
        yield pair


# Every other form is read as arrow: "arrow", "save_to_disk" and "hub", whose cache is arrow files.
READERS = {
    "parquet": _read_parquet,
    "json": _read_json,
    "csv": _read_csv,
    "tsv": _read_tsv,
    "xml": _read_xml,
    "sgm": _read_sgm,
    "moses": _read_moses,
}
