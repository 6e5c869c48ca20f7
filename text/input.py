"""What to translate: the arguments, the lines of standard input, or what is typed at a prompt."""

import sys
from collections.abc import Iterator
from itertools import islice

from engine.errors import UserError

LINES_AT_ONCE = 2000  # of a file: enough to sort by length, few enough to see results soon


def groups_of_lines(texts: list[str]) -> Iterator[list[str]]:
    """What to translate, as much at once as is there."""
    if texts:
        yield texts
    elif sys.stdin.isatty():
        print("an empty line ends the program", file=sys.stderr)
        while line := prompt():
            yield [line]
    else:
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
        try:
            while group := list(islice(sys.stdin, LINES_AT_ONCE)):
                yield group
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not UTF-8 ({error.reason}); convert it with iconv first") from None


def prompt() -> str:
    """A line typed at the terminal; '' at its end."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""
