"""Tables in Markdown, and text that is no Markdown."""

import re
import unicodedata
from collections.abc import Iterable, Sequence

# Characters with a meaning, inside a line, in GitHub's Markdown and in TensorBoard's. Both know
# these backslashes; only entities hide the others from both.
ESCAPED: dict[str, str | int | None] = {character: f"\\{character}" for character in "\\`*_{}[]#"}
ESCAPED |= {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "~": "&#126;", "$": "&#36;"}


class Markdown(str):
    """Text that is Markdown already, and breaks no table."""


def plain(text: str) -> Markdown:
    """The text on one line, so that Markdown shows it as it is: `<pad>`, a * and a |, too."""
    return Markdown(" ".join(text.split()).translate(str.maketrans(ESCAPED)))


def code(text: str) -> Markdown:
    """The text on one line as code, such as a flag: -- stays two hyphens."""
    text = " ".join(text.split()).replace("|", "\\|")
    # More backticks around it than it has in a row.
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return Markdown(f"{fence}{space}{text}{space}{fence}" if text else "")


def as_cell(value) -> str:
    """Text that cannot break a table: one line, without special characters."""
    if isinstance(value, Markdown):
        return value
    return " ".join(str(value).split()).replace("\\", "\\\\").replace("|", "\\|")


def columns_of(text: str) -> int:
    """How many columns of a terminal the text takes; a Chinese character takes two."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def padded_to(columns: int, text: str) -> str:
    """The text with spaces up to this number of columns."""
    return text + " " * (columns - columns_of(text))


def markdown_row(cells: Iterable[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def markdown_table(rows: Iterable[Sequence], padded: bool = False) -> str:
    """A table whose first row is its head; `padded`, its columns are straight in a terminal too."""
    rows = [[as_cell(value) for value in row] for row in rows]
    if padded:
        widths = [max(3, *map(columns_of, column)) for column in zip(*rows)]
        rows = [list(map(padded_to, widths, row)) for row in rows]
    rows.insert(1, ["-" * (columns_of(cell) if padded else 3) for cell in rows[0]])
    return "\n".join(map(markdown_row, rows))
