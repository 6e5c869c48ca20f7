"""What to translate: the arguments, the lines of standard input, or what is typed at a prompt."""

import os
import sys
from collections.abc import Iterator
from itertools import islice

from engine.errors import UserError

LINES_AT_ONCE = 2000  # of a file: enough to sort by length, few enough to see results soon


def groups_of_lines(texts: list[str]) -> Iterator[list[str]]:
    """What to translate, as much at once as is there."""
    if texts:
        if any(
            text != text.encode(errors="ignore").decode() for text in texts
        ):  # surrogates stand for other bytes
            raise UserError(
                "the text is not UTF-8; set the terminal to UTF-8, or convert the text with iconv"
            )
        if name := next(filter(os.path.isfile, texts), None):
            raise UserError(f"{name} is a file; give its lines on standard input: < {name}")
        yield texts
    elif sys.stdin.isatty():
        print("Ctrl-D ends the program", file=sys.stderr)
        while (line := prompt()) is not None:
            if line:  # a pasted text may have empty lines
                yield [line]
    else:
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
        try:
            while group := list(islice(sys.stdin, LINES_AT_ONCE)):
                yield group
        except UnicodeDecodeError as error:
            raise UserError(
                f"standard input is not UTF-8 ({error.reason}); convert it with iconv first"
            ) from None


def prompt() -> str | None:
    """A line typed at the terminal; None at its end."""
    while True:
        try:
            line = input(
                "> " if sys.stdout.isatty() else ""
            ).strip()  # in a file there are translations alone
            line.encode()  # in some locales other bytes come as surrogates
            return line
        except EOFError:
            return None
        except UnicodeError:
            print("note: this line is not UTF-8; set the terminal to UTF-8", file=sys.stderr)
