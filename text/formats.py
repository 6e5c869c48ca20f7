"""Read the pairs of one file, or of two that belong together. Which files: text/reading.py.

    read_pairs("parquet", [Path("train.parquet")], "zh", "en")    # ("你好", "Hello"), …

A row holds two texts: `{"translation": {"zh": …, "en": …}}` or `{"zh": …, "en": …}`; null becomes
"". All other texts stay as they are: "None", "007", quotes in a tsv.

`datasets` reads parquet and arrow. It could read json, csv and tsv as well, but (version 5.2) it
takes the text "2009-01-01" of a json file for a date, fills a missing csv field with "", and names
no row; so these have short readers here, as the pairs of files have.

Memory use stays flat. A row that cannot be right raises a `UserError` with its file and its number.
"""

import csv
import html
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

from engine.errors import UserError

Pairs = Iterator[tuple[str, str]]

ROWS_AT_ONCE = 10_000  # of parquet and arrow
PAIRED = ("moses", "sgm")  # two files belong together


def read_pairs(form: str, files: list[Path], source: str, target: str) -> Pairs:
    """The pairs of a file, or of two that belong together. Raises `UserError`."""
    # A new form is added here, and in text/reading.py to FORMS and ORDER.
    readers = {
        "parquet": read_columns,
        "arrow": read_columns,
        "save_to_disk": read_columns,  # a folder of arrow files
        "hub": read_columns,  # arrow files in the cache of `datasets`
        "json": read_json,
        "csv": read_csv,
        "tsv": read_tsv,
    }
    try:
        if form == "moses":
            yield from together(read_lines(files[0]), read_lines(files[1]), *files)
        elif form == "sgm":
            yield from read_sgm(*files)
        else:
            yield from readers[form](files[0], source, target)
    except UnicodeDecodeError as error:
        raise not_utf8(files) from error


# ------------------------------------------------------------------------ parquet, arrow


def read_columns(file: Path, source: str, target: str) -> Pairs:
    """Parquet or arrow, streamed by `datasets`, without a copy in its cache."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors become our one line
    builder = "parquet" if file.suffix.lower() == ".parquet" else "arrow"
    first_row = 1
    # A cache directory of its own: not even a lock file goes to the user's home.
    with tempfile.TemporaryDirectory() as cache:
        try:
            if builder == "parquet" and pyarrow.parquet.read_metadata(file).num_rows == 0:
                return  # `datasets` (version 5.2) would raise an error about its batch size
            # A link with a plain name: `datasets` would take "*" and "::" in a path for patterns.
            link = Path(cache, f"rows.{builder}")
            link.symlink_to(file.absolute())
            rows = datasets.load_dataset(
                builder,
                data_files=[str(link)],
                split="train",
                streaming=True,
                cache_dir=cache,
            )
            for table in rows.with_format("arrow").iter(ROWS_AT_ONCE):
                table = table.flatten()  # translation: {zh, en} -> translation.zh, translation.en
                columns = text_columns(table, file, source, target)
                last_row = first_row + table.num_rows - 1
                try:
                    sources, targets = [column.to_pylist() for column in columns]
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{file}, rows {first_row} to {last_row}: a text is not UTF-8; "
                        "write the file again"
                    ) from error
                for source_text, target_text in zip(sources, targets):
                    yield source_text or "", target_text or ""
                first_row = last_row + 1
        except (OSError, ValueError, TypeError, LookupError, pyarrow.ArrowException) as error:
            raise UserError(
                f"cannot read {file}: {short(error)}; if it is damaged, get it again"
            ) from error


def text_columns(table, file: Path, source: str, target: str) -> list:
    """The two columns of texts of a flattened table."""
    for prefix in ("translation.", ""):
        names = [prefix + source, prefix + target]
        if not all(name in table.column_names for name in names):
            continue
        for name in names:
            kind = str(table.schema.field(name).type)
            if kind not in ("string", "large_string", "string_view", "null"):
                raise UserError(f"{file}, row 1: column {name} holds {kind}, not text")
        return [table.column(name) for name in names]
    raise wrong_columns(file, table.column_names, source, target)


# ------------------------------------------------------------------------ json


def read_json(file: Path, source: str, target: str) -> Pairs:
    """One object per line, streamed, or one array of objects, held in memory."""
    for where, row in json_rows(file):
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise UserError(f"{where}: a {kind}; write an object with {source} and {target}")
        texts = row.get("translation", row)
        if texts is None:
            texts = {source: None, target: None}
        if not isinstance(texts, dict):
            kind = type(texts).__name__
            raise UserError(
                f"{where}: translation is a {kind}; write an object with {source} and {target}"
            )
        if source not in texts or target not in texts:
            raise wrong_columns(where, list(texts), source, target)
        for name in (source, target):
            if not isinstance(texts[name], str | None):
                kind = type(texts[name]).__name__
                raise UserError(
                    f"{where}: {name} is of type {kind}, not text; write a text in quotes"
                )
        pair = (texts[source] or "", texts[target] or "")
        try:
            "".join(pair).encode()
        except UnicodeEncodeError as error:  # "\ud800" is valid json, but no tokenizer takes it
            raise UserError(f"{where}: half of a surrogate pair; remove this character") from error
        yield pair


def json_rows(file: Path) -> Iterator[tuple[str, object]]:
    """Yield each row with its place, for error messages."""
    number = 1
    try:
        with file.open(encoding="utf-8-sig") as stream:
            is_array = stream.read(4096).lstrip().startswith("[")
            stream.seek(0)
            if is_array:
                for number, row in enumerate(json.load(stream), 1):
                    yield f"{file}, row {number}", row
                return
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield f"{file}, line {number}", json.loads(line.strip())
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        raise UserError(
            f"{file}, line {line}: neither one JSON object per line nor one array of objects "
            f"({error.msg}); write it in one of these forms"
        ) from error
    except UnicodeDecodeError:
        raise  # `read_pairs` finds the line
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{file}, line {number}: {short(error)}; repair it") from error
    except RecursionError:
        raise UserError(
            f"{file}, line {number}: too many brackets inside one another; write one row per line"
        ) from None


# ------------------------------------------------------------------------ csv, tsv


def read_tsv(file: Path, source: str, target: str) -> Pairs:
    """A quote is a character like any other: tsv knows no quoting."""
    lines = enumerate(read_lines(file), 1)
    rows = ((number, line.split("\t")) for number, line in lines if line)
    return below_header(rows, file, source, target, "separate fields by exactly one tab")


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
    if columns.count(source) > 1 or columns.count(target) > 1:
        raise UserError(f"{file}, line {line}: two columns of one name; rename one of them")
    source_column = columns.index(source)
    target_column = columns.index(target)
    for line, fields in rows:
        if len(fields) != len(columns):
            raise UserError(
                f"{file}, line {line}: {len(fields)} field(s), the header has {len(columns)}; "
                f"{advice}"
            )
        yield fields[source_column], fields[target_column]


# ------------------------------------------------------------------------ pairs of files


def read_lines(file: Path) -> Iterator[str]:
    """Lines that end in \\n or \\r\\n alone; U+2028 and its like are characters of a text."""
    with file.open(encoding="utf-8-sig", newline="\n") as stream:
        for line in stream:
            yield line.rstrip("\r\n")


def together(sources: Iterator[str], targets: Iterator[str], *files: Path) -> Pairs:
    """Pairs of two equally long iterators. Raises `UserError` if they are not."""
    source_count = 0
    target_count = 0
    for source, target in zip_longest(sources, targets):  # None after the end of the shorter one
        source_count += source is not None
        target_count += target is not None
        if source_count == target_count:
            yield source, target
    if source_count != target_count:
        raise UserError(
            f"{files[0]} has {source_count:,} sentences, {files[1]} {target_count:,}; line n of "
            "one must be the translation of line n of the other"
        )


# ------------------------------------------------------------------------ sgm

# Not an XML parser: in sgm, & and < need not be escaped.
DOCUMENT_OR_SEGMENT = re.compile(
    r"<doc\b(?P<document>[^>]*)>|<seg\b(?P<segment>[^>]*)>(?P<text>.*?)</seg>",
    re.DOTALL | re.IGNORECASE,
)


def read_sgm(source_file: Path, target_file: Path) -> Pairs:
    """The segments of two files, paired by document and `seg id`, in the order of the sources."""
    sources = read_segments(source_file)
    targets = read_segments(target_file)
    for segment in (*sources, *targets):
        if segment not in sources or segment not in targets:
            complete, other = source_file, target_file
            if segment in targets:
                complete, other = other, complete
            raise UserError(f"{other} has no {segment}, but {complete.name} has; complete it")
    for segment, source in sources.items():
        yield source, targets[segment]


def read_segments(file: Path) -> dict[str, str]:
    """The texts of <seg>; a key is "segment 3 of document x". What has no name is counted."""
    markup = file.read_text(encoding="utf-8-sig")
    texts: dict[str, str] = {}
    documents = 0
    segments = 0  # of the document
    document = "1"
    for found in DOCUMENT_OR_SEGMENT.finditer(markup):
        if found["document"] is not None:
            documents += 1
            segments = 0
            document = attribute(found["document"], "docid") or str(documents)
            continue
        segments += 1
        number = attribute(found["segment"], "id") or str(segments)
        key = f"segment {number} of document {document}"
        if key in texts:
            raise UserError(f"{file}: {key} occurs twice; keep one of the two")
        texts[key] = " ".join(html.unescape(found["text"]).split())
    return texts


def attribute(tag: str, name: str) -> str:
    """The value of an attribute, as in id="3"; "" without it."""
    found = re.search(rf"""\b{name}\s*=\s*("[^"]*"|'[^']*'|[^\s>]+)""", tag, re.IGNORECASE)
    return found[1].strip("\"'") if found else ""


# ------------------------------------------------------------------------ errors


def wrong_columns(where, columns: Iterable[str], source: str, target: str) -> UserError:
    """The error for a row or file that lacks one of the two columns."""
    hint = "name them with --source and --target (in line 1 of csv and tsv, in each row of json)"
    spelled = {name.lower(): name for name in columns}
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
