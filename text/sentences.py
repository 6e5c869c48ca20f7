"""Cut a line into its sentences, and join their translations again. For Chinese and English.

A model is trained on sentences: it translates a paragraph better piece by piece, and one beyond its
longest length in no other way.
"""

import re
from collections.abc import Iterable
from itertools import pairwise

BRACKETS = '（） () 【】 [] 「」 『』 《》 “” ‘’ ""'  # nothing is cut inside one
# Characters inside brackets. A longer text is a speech, or was never closed, and is cut like other
# text.
LONGEST_BRACKETED = 80
QUOTES = '”’」』"'
STOPS = "。！？!?．."
HAN = "\u3000-\u303f\u3400-\u9fff\uff00-\uffef"  # with Chinese punctuation and full-width forms
ABBREVIATIONS = (
    "Mr Mrs Ms Dr Prof St Sr Jr Gen Gov Sen Rep Rev Hon Col Lt Capt vs No Vol Fig pp al approx "
    "e.g i.e a.m p.m Ph.D Inc Corp Co Ltd Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec"
)

# What is read at once: brackets with their inside, a run of stops, a run of other characters, or
# one character.
_BRACKETED = "|".join(
    f"{re.escape(pair[0])}[^{re.escape(pair)}]{{1,{LONGEST_BRACKETED}}}{re.escape(pair[1])}"
    for pair in BRACKETS.split()
)
_UNIT = re.compile(
    rf"(?P<pair>{_BRACKETED})|(?P<stop>[{STOPS}]+)|[^{STOPS}{re.escape(BRACKETS)}]+|.", re.DOTALL
)
# What a sentence takes along after its stop: closing marks and spaces.
_CLOSING = re.compile(r"[）)】\]」』》”’]*(?:[\"']+(?=\s|$))?\s*")
_WORD = re.compile(r"\w")
# A full stop that ends no sentence: "Mr. Li", "U.S. dollars", "作家J.K.罗琳", and the number of an
# item in a list: "3. The third", "两点：1.快；2.好".
_SHORT = "|".join(map(re.escape, ABBREVIATIONS.split()))
_NUMBER = r"^\W*[\d一二三四五六七八九十]+|\D[：；，、:;,]\s*\d\d?"
_NO_END = re.compile(rf"(?:(?:^|[^\w.]|[{HAN}])(?:{_SHORT}|[A-Z](?:\.[A-Z])*)|{_NUMBER})$")


def sentences(line: str) -> list[str]:
    """The sentences of a line, each with the spaces after it. Joined they are the line."""
    pieces = []
    first = 0  # where the sentence begins
    at = 0  # how far the line is read
    has_word = False
    while at < len(line):
        unit = _UNIT.match(line, at)
        assert unit  # its last alternative matches any character
        at = unit.end()
        has_word = has_word or bool(_WORD.search(unit[0]))
        end = end_at(line, first, unit) if has_word else 0
        if end:
            pieces.append(line[first:end])
            first = at = end
            has_word = False
    if pieces and not has_word:  # nothing but signs after the last sentence
        pieces[-1] += line[first:]
        return pieces
    return [*pieces, line[first:]]


def end_at(line: str, first: int, unit: re.Match) -> int:
    """Where the next sentence begins if the one from `first` on ends with this unit, else 0."""
    text = unit[0]
    if not unit["stop"] and not (unit["pair"] and text[-1] in QUOTES and text[-2] in STOPS):
        return 0
    closing = _CLOSING.match(line, unit.end())
    assert closing  # it matches an empty text as well
    end = closing.end()
    follows = line[end : end + 1]
    if unit["pair"]:
        if not follows or follows in BRACKETS:
            return end
        # 他说：“好。”然后 is two sentences; “好。”他说 and 喊着“加油！”的口号 are one.
        begins_line = not line[first : unit.start()].strip()
        joined = follows == "的" or (follows in "和与或等" and text[-2] in "！？!?")
        if begins_line or joined or not follows.isalnum() or follows.islower():
            return 0
        return end
    if text[-1] in "。！？":
        return end
    ellipsis = text[-2:] in ("..", "．．")  # 我...我不知道
    in_chinese = not ellipsis and re.match(f"(?![０-ｚ])[{HAN}]", follows)  # not ３．１４
    spaced = not follows or line[end - 1].isspace() or bool(in_chinese)  # not 3.14, not a.com
    if not spaced or follows.islower():
        return 0
    # 20 characters are longer than any abbreviation. An x in front: the sentence begins earlier.
    before = line[max(first, unit.start() - 20) : unit.start()]
    if unit.start() - first > 20:
        before = "x" + before
    return 0 if text in ".．" and _NO_END.search(before) else end


def join(translations: Iterable[str]) -> str:
    """The translations of a line's sentences as one line.

    With spaces between them, but not where Chinese characters or punctuation stand on either side.
    """
    texts = [*filter(None, translations), ""]
    apart = re.compile(f"[^{HAN}]{{2}}")
    line = ""
    for text, following in pairwise(texts):
        line += text
        if apart.match(text[-1] + following[:1]):
            line += " "
    return line
