"""One report as a page that opens without network and prints on A4, as Markdown, and as pictures.

page = Page(("Training report", "实验报告"), "zh", Path("runs/NAME/report"))
page.heading("Speed", "速度")
page.table(["", "a run"], [[("time", "总用时"), fact]])
page.figures({"loss": (figure, ("loss", "损失"))})
page.write()

A cell of a table is a text (see words.py), a `Fact`, or None (—). In a text, `…` is code.
"""

import base64
import html
import io
import math
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from engine.errors import UserError
from engine.files import atomic_write
from engine.tables import Markdown, code, markdown_table, plain
from tools.reporting import student
from tools.reporting.fonts import embedded
from tools.reporting.reading import Fact
from tools.reporting.words import Words, in_language

DOTS_PER_INCH = 150
COLUMNS = 7  # beside each other; of more a second table is made
SHORT = 12  # characters up to which a text in a table stays on one line
LONG = 24  # characters from which a text in a table may break inside a word
STYLE = (Path(__file__).with_name("style.css")).read_text(encoding="utf-8")
PENCIL = "✎"


@dataclass
class Block:
    """A part of the report, in both forms; a heading is `html` and `markdown` of its text alone."""

    html: str
    markdown: str
    level: int = 0  # of a heading


class Page:
    """Blocks in the order they are added, in HTML and in Markdown."""

    def __init__(self, title: tuple[str, str], language: str, folder: str | Path):
        self.language = language
        self.folder = Path(folder)
        if (self.folder / "config.json").exists():  # its own pictures would count as the run's
            raise UserError(f"{self.folder} is a run itself; name another folder with --out DIR")
        self.title = self.text(title)
        self.blocks: list[Block] = []
        self.figure_count = 0
        self.pictures: dict[str, bytes] = {}
        # What the student wrote, by the names of the places; and the places of this report.
        self.words = student.read_words(self.folder / "report.md")
        self.places: set[str] = set()

    # ---------------------------------------------------------------- texts

    def text(self, cell: Words | Fact | None) -> str:
        """A text in the language of the page, or the text of a cell."""
        if cell is None:
            return "—"
        return in_language(cell.text if isinstance(cell, Fact) else cell, self.language)

    def as_html(self, cell: Words | Fact | None, breaks: bool = False) -> str:
        """The cell or text, escaped; `…` in a text of the program is code.

        With `breaks` names such as layers.norm may break after a point or a stroke.
        """
        escaped = html.escape(self.text(cell))
        if breaks:
            escaped = re.sub(r"(?<=\w[./_])(?=[A-Za-z*])", "<wbr>", escaped)
        if not isinstance(cell, Fact):
            return re.sub("`([^`]+)`", r"<code>\1</code>", escaped)
        shown = f"<code>{escaped}</code>" if cell.is_code else escaped
        title = html.escape(cell.source)
        return f'<data value="{html.escape(str(cell.value))}" title="{title}">{shown}</data>'

    def as_markdown(self, cell: Words | Fact | None) -> Markdown:
        """Likewise for report.md."""
        text = self.text(cell)
        if isinstance(cell, Fact):
            return code(text) if cell.is_code else plain(text)
        parts = re.split("(`[^`]+`)", text)
        return Markdown("".join(code(p[1:-1]) if p[:1] == "`" else plain(p) for p in parts))

    # ---------------------------------------------------------------- blocks

    def add(self, as_html: str, as_markdown: str) -> None:
        """The same block in both forms; `as_html` is escaped already."""
        self.blocks.append(Block(as_html, f"{as_markdown}\n"))

    def heading(self, *words: str, level: int = 2) -> None:
        """A heading; level 2 begins a section, which is numbered and in the list of contents.

        If nothing follows it, it is left out.
        """
        self.blocks.append(Block(self.as_html(words), self.as_markdown(words), level))

    def paragraph(self, *words: str) -> None:
        """A paragraph."""
        self.add(f"<p>{self.as_html(words)}</p>", self.as_markdown(words))

    def note(self, *words: str) -> None:
        """A line in small print."""
        self.add(f"<p><small>{self.as_html(words)}</small></p>", self.as_markdown(words))

    def hint(self, *words: str) -> None:
        """A line on how to use the page, which is neither printed nor in report.md."""
        self.blocks.append(Block(f'<p class="hint">{self.as_html(words)}</p>', ""))

    def warning(self, *words: str) -> None:
        """What a reader must know first, in red."""
        self.add(
            f'<p class="warning">{self.as_html(words)}</p>', f"> **{self.as_markdown(words)}**"
        )

    def to_add(self, *words: str) -> None:
        """What the student must still do outside report.md."""
        text = f"{PENCIL} {self.text(words)}"
        self.add(f'<p class="missing">{self.as_html(text)}</p>', f"> {self.as_markdown(text)}")

    def to_write(self, name: str, *words: str) -> None:
        """The place `name` for the student's words: these, or if there are none what to write."""
        self.places.add(name)
        own = self.words.get(name, "")
        if own:
            shown = f'<section class="own">{student.as_html(own)}</section>'
            self.add(shown, student.place(name, own))
        else:
            self.to_add(*words)
            self.blocks.append(Block("", f"{student.place(name, '')}\n"))

    def cover(self, fields: dict[str, Words]) -> None:
        """One line of places, such as name and date: name of the place → its text."""
        shown, lines = [], []
        for name, words in fields.items():
            self.places.add(name)
            own = self.words.get(name, "")
            value = f"<b>{html.escape(own.strip())}</b>"
            if not own:
                value = f'<span class="missing">{PENCIL}</span>'
            shown.append(f"<span>{self.as_html(words)} {value}</span>")
            lines.append(f"- **{self.text(words)}** {student.place(name, own, is_line=True)}")
        self.add(f'<p class="cover">{"".join(shown)}</p>', "\n".join(lines))

    def bullets(self, items: list[Words], kind: str = "") -> None:
        """A list; `kind`: "missing" for what the reader must see, "sources" for references."""
        lines = "".join(f"<li>{self.as_html(words)}</li>" for words in items)
        self.add(
            f'<ul class="{kind}">{lines}</ul>',
            "\n".join(f"- {self.as_markdown(words)}" for words in items),
        )

    def verbatim(self, text: str, source: str) -> None:
        """Text of the file `source` as it is."""
        self.add(
            f'<pre title="{html.escape(source)}">{html.escape(text)}</pre>',
            f"```\n{text}\n```",
        )

    def folded(self, *words: str) -> None:
        """What follows, until `end_folded`, is shown on a click, and when the page is printed."""
        text = self.as_html(words)
        self.add(f"<details><summary>{text}</summary>", f"<details><summary>{text}</summary>\n")

    def end_folded(self) -> None:
        """The end of what `folded` began."""
        self.add("</details>", "</details>")

    def table(self, header: list, rows: list[list], mark: set[int] = frozenset()) -> None:
        """A table without the rows that have no value. `mark`: rows to be coloured.

        The columns after the first are at most `COLUMNS`; the others form further tables.
        """
        shown = [n for n, row in enumerate(rows) if any(cell is not None for cell in row[1:])]
        if not shown:
            return
        tables = math.ceil((len(header) - 1) / COLUMNS)
        width = math.ceil((len(header) - 1) / tables)
        for first in range(1, len(header), width):
            columns = [0, *range(first, min(first + width, len(header)))]
            texts = [[header[column] for column in columns]]
            lines = ["<tr>" + "".join(self.cell(cell, "th") for cell in texts[0]) + "</tr>"]
            for n in shown:
                label, *values = [rows[n][column] for column in columns]
                texts.append([label, *values])
                cells = self.cell(label, "th") + "".join(self.cell(v, "td") for v in values)
                lines.append(f"<tr{' class=mark' if n in mark else ''}>{cells}</tr>")
            markdown = markdown_table([[self.as_markdown(cell) for cell in row] for row in texts])
            self.add(f'<div class="wide"><table>{"".join(lines)}</table></div>', markdown)

    def facts(self, rows: list[list]) -> None:
        """Labels and their values, in two columns where there is room; those without are left out.

        Each row is [label, value].
        """
        rows = [row for row in rows if row[1] is not None]
        if not rows:
            return
        items = []
        for label, value in rows:
            kind = ' class="long"' if len(self.text(value)) > LONG else ""
            term, value = self.as_html(label), self.as_html(value)
            items.append(f"<div{kind}><dt>{term}</dt><dd>{value}</dd></div>")
        markdown = markdown_table([["", ""], *(map(self.as_markdown, row) for row in rows)])
        self.add(f'<dl class="facts">{"".join(items)}</dl>', markdown)

    def cell(self, cell: Words | Fact | None, tag: str) -> str:
        """The HTML of a table cell; a fact's source is shown under the mouse."""
        length = len(self.text(cell))
        kind = ' class="text"' if length > LONG else ' class="short"' if length <= SHORT else ""
        return f"<{tag}{kind}>{self.as_html(cell, breaks=True)}</{tag}>"

    def figures(self, figures: dict[str, tuple[object, Words]], kind: str = "") -> None:
        """Numbered pictures: name of the file → figure and caption. `kind`: "" or "large".

        Large ones are as wide as the page, others stand beside each other.
        """
        tags, lines = [], []
        for name, (figure, caption) in figures.items():
            encoded = base64.b64encode(self.keep(name, figure)).decode()
            self.figure_count += 1
            number = self.text((f"Figure {self.figure_count}", f"图 {self.figure_count}"))
            tags.append(
                f'<figure><img alt="{html.escape(name)}" src="data:image/png;base64,{encoded}">'
                f"<figcaption><b>{number}</b> {self.as_html(caption)}</figcaption></figure>"
            )
            picture = f"![{plain(name)}]({quote(file_name(name))})"
            lines.append(f"{picture}\n\n**{number}** {self.as_markdown(caption)}\n")
        self.add(f'<div class="figures {kind}">{"".join(tags)}</div>', "\n".join(lines))

    def keep(self, name: str, figure) -> bytes:
        """Keep a matplotlib figure, or the bytes of a PNG file, for `write`; returns its bytes."""
        if not isinstance(figure, bytes):
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=DOTS_PER_INCH)
            figure = file.getvalue()
        self.pictures[file_name(name)] = figure
        return figure

    # ---------------------------------------------------------------- the files

    def finished(self) -> list[Block]:
        """All blocks, their sections numbered, and before the first one the list of contents."""
        kept: list[Block] = []
        for block in reversed(self.blocks):
            next_level = kept[-1].level if kept else 1
            is_empty = block.level and 0 < next_level <= block.level
            if not is_empty:
                kept.append(block)
        blocks, items, lines = [], [], []
        for block in reversed(kept):
            if block.level == 2:
                number = len(items) + 1
                to = f"section-{number}"
                items.append(f'<li><a href="#{to}">{number} {block.html}</a></li>')
                lines.append(f"- [{number} {block.markdown}](#{to})\n")
                as_html = f'<h2 id="{to}">{number} {block.html}</h2>'
                block = Block(as_html, f'## <a id="{to}"></a>{number} {block.markdown}\n')
            elif block.level:
                tag = f"h{block.level}"
                mark = "#" * block.level
                block = Block(f"<{tag}>{block.html}</{tag}>", f"{mark} {block.markdown}\n")
            blocks.append(block)
        first = next((n for n, block in enumerate(blocks) if "<h2" in block.html), len(blocks))
        contents = Block(f"<nav><ul>{''.join(items)}</ul></nav>", "".join(lines))
        return [*blocks[:first], contents, *blocks[first:]]

    def write(self) -> Path:
        """Write report.html, report.md and the pictures into the folder; returns the page."""
        how = (
            "Write between the marks only, such as <!-- setup --> and <!-- /setup -->. "
            "The next `python report.py` keeps your text and shows it in report.html.",
            "只在成对的记号之间写字，例如 <!-- setup --> 与 <!-- /setup -->。"
            "再运行一次 `python report.py`，文字会保留，并出现在 report.html 中。",
        )
        top = Block(
            f"<h1>{html.escape(self.title)}</h1>",
            # No viewer shows it; "--" and ">" would end it.
            f"<!-- {self.text(how).replace('<!-- ', '‹').replace(' -->', '›')} -->\n\n"
            f"# {self.title}\n",
        )
        blocks = [top, *self.finished()]
        body = "\n".join(block.html for block in blocks if block.html)
        markdown = "\n".join(block.markdown for block in blocks if block.markdown)
        head = (
            '<meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{html.escape(self.title)}</title>"
            f"<style>{STYLE}\n{embedded(body)}</style>"
        )
        page = (
            f'<!doctype html><html lang="{self.language}"><head>{head}</head>'
            f"<body>{body}</body></html>\n"
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            student.keep_edited(self.folder / "report.md", self.places)
            atomic_write(self.folder / "report.md", student.signed(markdown))
            atomic_write(self.folder / "report.html", page)
            for name, content in self.pictures.items():
                (self.folder / name).write_bytes(content)
        except OSError as error:
            raise UserError(
                f"cannot write to {self.folder}: {error.strerror}; choose another --out DIR"
            ) from None
        return self.folder / "report.html"


def file_name(name: str) -> str:
    """Of a picture; runs of the same name go by their path."""
    return name.replace("/", "-") + ".png"
