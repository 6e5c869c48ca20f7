"""Chinese characters in pictures and on the page, on machines that have no Chinese font.

NotoSansCJKsc-subset.otf in this folder has the 7,445 characters of GB 2312 (OFL.txt says how it was
cut). For others, such as traditional ones, any installed font that has them is used.
"""

import base64
import functools
import io
from pathlib import Path

OWN = Path(__file__).with_name("NotoSansCJKsc-subset.otf")
FIRST_CHINESE = 0x2E80  # in Unicode: from here on, radicals, punctuation and characters
LATIN = "DejaVu Sans"  # for all that is not Chinese; matplotlib brings it


def families(text: str) -> list[str]:
    """Fonts for matplotlib's `family=`; for each character it takes the first that has it."""
    from matplotlib import font_manager

    own_name, own_path = own_family()
    names = [LATIN, own_name]
    missing = {ord(character) for character in text if not character.isspace()}
    missing -= characters_of(own_path) | characters_of(font_manager.findfont(LATIN))
    if not missing:
        return names
    for font in font_manager.fontManager.ttflist:  # all fonts of this machine
        found = missing & characters_of(font.fname)
        if font.style == "normal" and found and font.name not in names:
            names.append(font.name)
            missing -= found
    return names


@functools.cache
def own_family() -> tuple[str, str]:
    """The name of the font in this folder in matplotlib, and its path."""
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
    """CSS with the Chinese characters of `text` as the font "own", so no machine shows boxes."""
    from fontTools import subset

    cutter = subset.Subsetter(subset.Options(notdef_outline=True))
    cutter.populate(unicodes={ord(letter) for letter in text if ord(letter) >= FIRST_CHINESE})
    file = io.BytesIO()
    with subset.load_font(str(OWN), subset.Options()) as font:
        cutter.subset(font)
        font.save(file)
    encoded = base64.b64encode(file.getvalue()).decode()
    source = f"url(data:font/otf;base64,{encoded})"
    return f"@font-face {{ font-family: own; font-display: block; src: {source} }}"
