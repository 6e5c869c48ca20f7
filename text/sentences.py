"""A line → its sentences, and their translations → a line again: for pasted paragraphs, in Chinese or English.

A model learns from sentences: it translates a paragraph better, and past its longest length only, piece by piece.
"""

import re
from collections.abc import Iterable
from itertools import pairwise

PAIRS = '（） () 【】 [] 「」 『』 《》 “” ‘’ ""'  # nothing is cut inside one
LONGEST_PAIR = 80  # characters inside; a longer one is a speech, or was never closed, and is cut like other text
QUOTES = '”’」』"'
STOPS = "。！？!?．."
HAN = "\u3000-\u303f\u3400-\u9fff\uff00-\uffef"  # characters, Chinese punctuation, full-width forms
ABBREVIATIONS = (
    "Mr Mrs Ms Dr Prof St Sr Jr Gen Gov Sen Rep Rev Hon Col Lt Capt vs No Vol Fig pp al approx e.g i.e a.m p.m Ph.D Inc Corp "
    "Co Ltd Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec"
)

_PAIR = "|".join(
    f"{re.escape(a)}[^{re.escape(a + b)}]{{1,{LONGEST_PAIR}}}{re.escape(b)}"
    for a, b in PAIRS.split()
)
# What is read at once: a pair with its inside, a run of stops, a run of other characters, or one character.
_UNIT = re.compile(
    rf"(?P<pair>{_PAIR})|(?P<stop>[{STOPS}]+)|[^{STOPS}{re.escape(PAIRS)}]+|.", re.DOTALL
)
_CLOSING = re.compile(
    r"[）)】\]」』》”’]*(?:[\"']+(?=\s|$))?\s*"
)  # what a sentence takes along behind its stop
_WORD = re.compile(r"\w")
# "Mr. Li", "U.S. dollars", "作家J.K.罗琳", "3. The third", "两点：1.快；2.好": a full stop that ends no sentence.
_SHORT = "|".join(map(re.escape, ABBREVIATIONS.split()))
_NUMBER = r"^\W*[\d一二三四五六七八九十]+|\D[：；，、:;,]\s*\d\d?"  # of an item in a list
_NO_END = re.compile(rf"(?:(?:^|[^\w.]|[{HAN}])(?:{_SHORT}|[A-Z](?:\.[A-Z])*)|{_NUMBER})$")


def sentences(line: str) -> list[str]:
    """The sentences of a line, each with the spaces behind it: joined they are the line. Of one sentence: [line]."""
    pieces, first, at, has_word = (
        [],
        0,
        0,
        False,
    )  # first: where the sentence begins; at: how far it is read
    while at < len(line):
        unit = _UNIT.match(line, at)
        at, has_word = unit.end(), has_word or bool(_WORD.search(unit[0]))
        if has_word and (end := end_at(line, first, unit)):
            pieces.append(line[first:end])
            first, at, has_word = end, end, False
    if pieces and not has_word:  # nothing but signs behind the last sentence
        pieces[-1] += line[first:]
        return pieces
    return [*pieces, line[first:]]


def end_at(line: str, first: int, unit: re.Match) -> int:
    """Where the next sentence begins, if the one that begins at `first` ends with this unit; else 0."""
    text = unit[0]
    if not unit["stop"] and not (unit["pair"] and text[-1] in QUOTES and text[-2] in STOPS):
        return 0
    end = _CLOSING.match(line, unit.end()).end()
    follows = line[end : end + 1]
    if unit["pair"]:  # 他说：“好。”然后 has two sentences, “好。”他说 one
        if not follows or follows in PAIRS:
            return end
        joined = follows == "的" or (
            follows in "和与或等" and text[-2] in "！？!?"
        )  # 喊着“加油！”的口号
        goes_on = not follows.isalnum() or follows.islower() or joined
        return end if line[first : unit.start()].strip() and not goes_on else 0
    if text[-1] in "。！？":
        return end
    ellipsis = text[-2:] in ("..", "．．")  # 我...我不知道
    in_chinese = not ellipsis and re.match(f"(?![０-ｚ])[{HAN}]", follows)  # not ３．１４
    spaced = not follows or line[end - 1].isspace() or bool(in_chinese)  # not 3.14, not a.com
    if not spaced or follows.islower():
        return 0
    # 20: longer than any abbreviation; an x for what is cut off, so that it does not look like the sentence's beginning.
    before = "x" * (unit.start() - first > 20) + line[max(first, unit.start() - 20) : unit.start()]
    return 0 if text in ".．" and _NO_END.search(before) else end


def join(translations: Iterable[str]) -> str:
    """The translations of a line's sentences as one line, a space between them where the language has spaces."""
    texts = [*filter(None, translations), ""]
    apart = re.compile(
        f"[^{HAN}]{{2}}"
    )  # not where a Chinese sentence ends in a quotation mark or dots of its own
    return "".join(
        text + " " * bool(apart.match(text[-1] + after[:1])) for text, after in pairwise(texts)
    )
