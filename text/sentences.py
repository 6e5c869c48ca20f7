"""A line → its sentences, and their translations → a line again: for pasted paragraphs, in Chinese or English.

A model learns from sentences: it translates a paragraph better, and past its longest length only, piece by piece.
"""

import re
from collections.abc import Iterable

PAIRS = '（） () 【】 [] 「」 『』 《》 “” ‘’ ""'  # nothing is cut inside one
LONGEST_PAIR = 80  # characters inside; a longer one is a speech, or was never closed, and is cut like other text
QUOTES = '”’」』"'
STOPS = "。！？!?．."
HAN = "\u3000-\u303f\u3400-\u9fff\uff00-\uffef"  # characters, Chinese punctuation, full-width forms
ABBREVIATIONS = "Mr Mrs Ms Dr Prof St Sr Jr Gen Gov Sen Rep Rev Hon Col Lt Capt vs No Vol Fig pp al approx e.g i.e"

_PAIR = "|".join(f"{re.escape(a)}[^{re.escape(a + b)}]{{1,{LONGEST_PAIR}}}{re.escape(b)}" for a, b in PAIRS.split())
_UNIT = re.compile(rf"(?P<pair>{_PAIR})|(?P<stop>[{STOPS}]+)|[^{STOPS}{re.escape(PAIRS)}]+|.", re.DOTALL)
_CLOSING = re.compile(r"[）)】\]」』》”’]*(?:[\"']+(?=\s|$))?\s*")  # what a sentence takes along behind its stop
_WORD = re.compile(r"\w")
# "Mr. Li", "U.S. dollars", "3. The third": a full stop that ends no sentence.
_NO_END = re.compile(rf"(?:^|[^\w.])(?:{'|'.join(map(re.escape, ABBREVIATIONS.split()))}|[A-Z](?:\.[A-Z])*)$|^\W*\d+$")


def sentences(line: str) -> list[str]:
    """The sentences of a line, each with the spaces behind it: joined they are the line. Of one sentence: [line]."""
    pieces, first, at = [], 0, 0
    while at < len(line):
        unit = _UNIT.match(line, at)
        at, end = unit.end(), _CLOSING.match(line, unit.end()).end()
        if ends(line, first, unit, end) and _WORD.search(line, first, at):
            pieces.append(line[first:end])
            first = at = end
    if pieces and not _WORD.search(line, first):  # nothing but signs behind the last sentence
        pieces[-1] += line[first:]
        return pieces
    return [*pieces, line[first:]]


def ends(line: str, first: int, unit: re.Match, end: int) -> bool:
    """Whether the sentence that begins at `first` ends with this unit; `end`: where the next would begin."""
    text, follows = unit[0], line[end : end + 1]
    if unit["pair"]:
        # 他说：“好。”然后 has two sentences, “好。”他说 one.
        spoken = text[-1] in QUOTES and text[-2] in STOPS
        return (
            spoken
            and not follows.islower()
            and (not follows or follows in PAIRS or bool(line[first : unit.start()].strip()))
        )
    if not unit["stop"] or text[-1] in "。！？．":
        return bool(unit["stop"])
    spaced = not follows or line[end - 1].isspace() or bool(re.match(f"[{HAN}]", follows))  # not 3.14, not a.com
    if not spaced or follows.islower():
        return False
    return not (text == "." and _NO_END.search(line[max(first, unit.start() - 20) : unit.start()]))


def join(translations: Iterable[str]) -> str:
    """The translations of a line's sentences as one line, a space between them where the language has spaces."""
    line = ""
    for text in filter(None, translations):
        line += " " * bool(re.search(f"[^{HAN}]$", line)) + text
    return line
