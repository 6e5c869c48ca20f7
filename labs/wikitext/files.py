"""Plain text files: their lines, their split, where a WikiText article begins."""

import re
from pathlib import Path

from engine.errors import UserError
from text.reading import KEYWORDS

# The title line of a WikiText article, ` = Title = `; ` = = Section = = ` is not one.
TITLE = re.compile(r"\s*= [^=].* =\s*")


def read_lines(file: Path) -> list[str]:
    """The lines of a text file, or of the column `text` of a parquet file.

    Hugging Face offers WikiText as parquet only. A row there is a line, or a text of several.
    """
    if file.suffix == ".parquet":
        lines = []
        for row in read_column(file):
            lines += (row or "").splitlines() or [""]  # an empty row is an empty line
        return lines
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; give another text file") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 (byte {error.start}); convert it first, e.g. with iconv"
        ) from None


def read_column(file: Path) -> list[str]:
    """The column `text` of a parquet file. Raises `UserError` if there is none."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(file, columns=["text"]).column("text").to_pylist()
    except (KeyError, OSError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{file} is not a parquet file with a column text ({str(error)[:80]}); "
            "download it again"
        ) from None


def split_of(file: Path) -> str:
    """The split that a file name tells: wiki.train.tokens -> "train"; "" if it tells none."""
    words = re.split("[^a-z]+", file.name.lower())
    words = {re.sub("(set|data)$", "", word) for word in words}  # testset, traindata
    for split, names in KEYWORDS.items():
        if words & set(names):
            return split
    return ""
