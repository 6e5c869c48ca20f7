"""What to translate: the arguments, the lines of standard input, or what is typed at a prompt."""

import os
import sys
from collections.abc import Iterator
from itertools import islice

from engine.errors import UserError

LINES_AT_ONCE = 2000  # of a file: enough to sort by length, few enough to see results soon


def groups_of_lines(texts: list[str]) -> Iterator[list[str]]:
    """What to translate, in groups of lines that are available together."""
    if texts:
        for text in texts:
            # Python reads bytes that are not UTF-8 as surrogates, which cannot be encoded.
            if text != text.encode(errors="ignore").decode():
                raise UserError(
                    "the text is not UTF-8; set the terminal to UTF-8, or convert the text with "
                    "iconv"
                )
            if os.path.isfile(text):
                raise UserError(f"{text} is a file; give its lines on standard input: < {text}")
        yield texts
    elif sys.stdin.isatty():
        print("Ctrl-D ends the program", file=sys.stderr)
        while (line := prompt()) is not None:
            if line:  # a pasted text may have empty lines
                yield [line]
    else:
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
        lines_done = 0
        try:
            while group := list(islice(sys.stdin, LINES_AT_ONCE)):
                yield group
                lines_done += len(group)
        except UnicodeDecodeError as error:
            raise UserError(
                f"standard input after line {lines_done:,} is not UTF-8 ({error.reason}); convert "
                "it with iconv first"
            ) from None


def prompt() -> str | None:
    """A line typed at the terminal; None at its end."""
    # If the output goes to a file, it holds translations alone.
    sign = "> " if sys.stdout.isatty() else ""
    while True:
        try:
            line = input(sign).strip()
            line.encode()  # in some locales other bytes come as surrogates
            return line
        except EOFError:
            return None
        except UnicodeError:
            print("note: this line is not UTF-8; set the terminal to UTF-8", file=sys.stderr)
