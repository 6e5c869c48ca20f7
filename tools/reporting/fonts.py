"""Chinese characters in pictures and on the page, on machines that have no Chinese font.

NotoSansCJKsc-subset.otf, which lies here, has the 7,445 characters of GB 2312 (OFL.txt beside it says how it was cut). For
others, traditional ones say, any installed font that has them.
"""

import base64
import functools
import io
from pathlib import Path

OWN = Path(__file__).with_name("NotoSansCJKsc-subset.otf")
LATIN = "DejaVu Sans"  # for all that is not Chinese; matplotlib brings it


def families(text: str) -> list[str]:
    """The fonts that draw `text`, for matplotlib's `family=`: for each character it takes the first that has it."""
    from matplotlib import font_manager

    missing = frozenset(ord(c) for c in text if not c.isspace()) - characters_of(own_family()[1])
    names, latin = [LATIN, own_family()[0]], characters_of(font_manager.findfont(LATIN))
    for font in (
        font_manager.fontManager.ttflist if missing - latin else []
    ):  # all that are on this machine
        if (
            font.style == "normal"
            and missing & characters_of(font.fname)
            and font.name not in names
        ):
            names.append(font.name)
            missing -= characters_of(font.fname)
    return names


@functools.cache
def own_family() -> tuple[str, str]:
    """The name by which matplotlib knows the font that lies here, and its path."""
    from matplotlib import font_manager

    font_manager.fontManager.addfont(OWN)
    return font_manager.get_font(OWN).family_name, str(OWN)


@functools.lru_cache(maxsize=1000)
def characters_of(path: str) -> frozenset[int]:
    """The Unicode numbers that a font can draw."""
    from matplotlib import font_manager

    try:
        return frozenset(font_manager.get_font(path).get_charmap())
    except (OSError, RuntimeError):  # listed, but gone or damaged
        return frozenset()


def embedded(text: str) -> str:
    """CSS that brings the characters of `text` with the page, as the font "own": no machine shows boxes for them."""
    from fontTools import subset

    font = subset.load_font(str(OWN), subset.Options())
    cutter = subset.Subsetter(subset.Options(notdef_outline=True))
    cutter.populate(text="".join(set(text)))
    cutter.subset(font)
    file = io.BytesIO()
    font.save(file)
    encoded = base64.b64encode(file.getvalue()).decode()
    return f"@font-face {{ font-family: own; font-display: block; src: url(data:font/otf;base64,{encoded}) }}"
