"""What the student writes into report.md: it is read back, kept, and shown on the page.

A place is between two marks, which a Markdown viewer does not show:

    <!-- setup -->
    The student's own Markdown
    <!-- /setup -->
"""

import hashlib
import html
import re
import time
from pathlib import Path

from engine.tables import Markdown

PLACE = re.compile(r"<!-- (\w+) -->(.*?)<!-- /\1 -->", re.DOTALL)
SIGNATURE = "\n<!-- report.py "


def read_words(file: Path) -> dict[str, str]:
    """What is written in each place of report.md; {} if there is no such file."""
    found = PLACE.findall(read(file))
    return {name: text.strip("\n") for name, text in found if text.strip()}


def read(file: Path) -> str:
    """The text of report.md, also as a Chinese Windows writes it; "" if there is no such file."""
    if not file.exists():
        return ""
    content = file.read_bytes().replace(b"\r\n", b"\n")
    for encoding in ("utf-8-sig", "gb18030"):
        try:
            return content.decode(encoding)
        except UnicodeDecodeError:
            pass
    return content.decode("utf-8", errors="replace")


def place(name: str, text: str, is_line: bool = False) -> Markdown:
    """The marks of a place and what is written in it; `is_line`: within a line, such as a name."""
    around = "" if is_line else "\n\n"
    return Markdown(f"<!-- {name} -->{around}{text}{around if text else ''}<!-- /{name} -->")


def as_html(text: str) -> str:
    """The student's Markdown as HTML. Tags are shown, not obeyed: a text may be about <pad>."""
    import markdown

    converter = markdown.Markdown(extensions=["tables", "fenced_code", "sane_lists"])
    converter.preprocessors.deregister("html_block")
    converter.inlinePatterns.deregister("html")
    try:
        return converter.convert(text)
    except Exception:  # of the converter, on a text that it cannot take
        return f"<pre>{html.escape(text)}</pre>"


def signed(text: str) -> str:
    """The text and a hash of all that is outside the places, which a viewer does not show."""
    # Many editors strip spaces at the ends of lines.
    outside = "\n".join(line.rstrip() for line in PLACE.sub(r"\1", text).splitlines())
    digest = hashlib.blake2b(outside.encode(), digest_size=8).hexdigest()
    return f"{text}{SIGNATURE}{digest} -->\n"


def keep_edited(file: Path, shown: set[str]) -> None:
    """Rename report.md to report-DATE.md if words in it would be lost.

    They would if they stand outside the places, or in places that the new report has not `shown`.
    """
    if not file.exists():
        return
    text = read(file)
    generated = text.rpartition(SIGNATURE)[0]
    if text == signed(generated) and read_words(file).keys() <= shown:
        return
    kept = file.with_name(f"{file.stem}-{time.strftime('%Y-%m-%d_%H-%M-%S')}.md")
    file.rename(kept)
    print(f"note: {file} was changed outside its marked places; the old one is now {kept}")
