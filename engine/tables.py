"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def markdown_row(cells: Iterable) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def markdown_table(rows: Iterable[Sequence], padded: bool = False) -> str:
    """A table whose first row is its head; `padded`, its columns are straight in a terminal too."""
    rows = [[str(cell) for cell in row] for row in rows]
    if padded:
        widths = [max(3, *map(len, column)) for column in zip(*rows)]
        rows = [[cell.ljust(width) for cell, width in zip(row, widths)] for row in rows]
    rows.insert(1, ["-" * (len(cell) if padded else 3) for cell in rows[0]])
    return "\n".join(map(markdown_row, rows))
