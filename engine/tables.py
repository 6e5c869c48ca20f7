"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def as_cell(value) -> str:
    """Text that cannot break a table: one line, without special characters."""
    return " ".join(str(value).split()).replace("\\", "\\\\").replace("|", "\\|")


def markdown_row(cells: Iterable[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def markdown_table(rows: Iterable[Sequence], padded: bool = False) -> str:
    """A table whose first row is its head; `padded`, its columns are straight in a terminal too."""
    rows = [[as_cell(value) for value in row] for row in rows]
    if padded:
        widths = [max(3, *map(len, column)) for column in zip(*rows)]
        rows = [[cell.ljust(width) for cell, width in zip(row, widths)] for row in rows]
    rows.insert(1, ["-" * (len(cell) if padded else 3) for cell in rows[0]])
    return "\n".join(map(markdown_row, rows))
