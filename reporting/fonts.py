"""Chinese characters in pictures and on the page, on machines that have no Chinese font.

NotoSansCJKsc-subset.otf, which lies here, has the 7,445 characters of GB 2312 (OFL.txt beside it says how it was cut). For
others, traditional ones say, any installed font that has them.
"""

import base64
import functools
import io
from pathlib import Path

OWN = Path(__file__).with_name("NotoSansCJKsc-subset.otf")
LATIN = "DejaVu Sans"  # which matplotlib brings


def families(text: str) -> list[str]:
    """The fonts that draw `text`, for matplotlib's `family=`: for each character it takes the first that has it."""
    missing = frozenset(ord(c) for c in text if not c.isspace()) - characters_of(own_family()[1])
    names = [LATIN, own_family()[0]]
    for name, path in installed() if missing - characters_of(latin_path()) else []:
        if missing & characters_of(path) and name not in names:
            names.append(name)
            missing -= characters_of(path)
    return names


@functools.cache
def own_family() -> tuple[str, str]:
    """The name by which matplotlib knows the font that lies here, and its path."""
    from matplotlib import font_manager

    font_manager.fontManager.addfont(OWN)
    return font_manager.get_font(OWN).family_name, str(OWN)


def latin_path() -> str:
    """The font of everything that is not Chinese."""
    from matplotlib import font_manager

    return font_manager.findfont(LATIN)


def installed() -> list[tuple[str, str]]:
    """Names and paths of all fonts that matplotlib found on this machine."""
    from matplotlib import font_manager

    return [(font.name, font.fname) for font in font_manager.fontManager.ttflist if font.style == "normal"]


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
