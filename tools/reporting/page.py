"""One report as a page that opens without network, as Markdown, and as PNG pictures.

page = Page(("Training report", "实验报告"), "zh", Path("runs/NAME/report"))
page.heading("Speed", "速度")
page.table(["", "a run"], [[("time", "总用时"), fact]])
page.figures({"loss": figure})
page.write()

A cell of a table is a text (see words.py), a `Fact`, or None (—).
"""

import base64
import hashlib
import html
import io
import time
from pathlib import Path
from urllib.parse import quote

from engine.errors import UserError
from engine.tables import markdown_table
from tools.reporting.fonts import embedded
from tools.reporting.reading import Fact
from tools.reporting.words import Words, in_language

DOTS_PER_INCH = 130
STYLE = """
body { font: 15px/1.55 own, system-ui, sans-serif; color: #1c2530; max-width: 1180px;
  margin: 0 auto; padding: 0 16px 48px }
h1 { font-size: 1.6em }
h2 { font-size: 1.2em; margin: 2em 0 .5em; border-bottom: 2px solid #1f5fa8 }
h3 { font-size: 1em }
small { color: #5a6673 }
.missing, tr.mark { background: #fff3cf }
p.missing { padding: .4em .7em }
pre { overflow-x: auto; background: #f4f6f8; padding: .8em; font-size: 12px }
.wide { overflow-x: auto; margin: .5em 0 }
table { border-collapse: collapse }
td, th { padding: .25em .7em; text-align: left; vertical-align: top;
  border-bottom: 1px solid #dde3ea }
th { min-width: 6em }
td { min-width: 5em }
tr { background: #fff }
tr > :first-child { position: sticky; left: 0; background: inherit }
.text { min-width: 13em; overflow-wrap: anywhere }
.figures { display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)) }
.large { grid-template-columns: 1fr; overflow-x: auto }
figure { margin: 0 }
img { max-width: 100%; height: auto }
.large img { max-width: none; zoom: .75 }
@media (min-width: 600px) { th { white-space: nowrap } }
""".strip()


class Page:
    """Blocks in the order they are added, in HTML and in Markdown."""

    def __init__(self, title: tuple[str, str], language: str, folder: str | Path):
        self.language = language
        self.folder = Path(folder)
        self.blocks: list[tuple[str, str]] = []  # in HTML and in Markdown
        self.pictures: dict[str, bytes] = {}
        if (self.folder / "config.json").exists():  # its own pictures would count as the run's
            raise UserError(f"{self.folder} is a run itself; name a folder of its own by --out DIR")
        self.title = self.text(title)
        self.heading(*title, level=1)

    def text(self, cell: Words | Fact | None) -> str:
        """A text in the language of the page, or the text of a cell."""
        if cell is None:
            return "—"
        return in_language(cell.text if isinstance(cell, Fact) else cell, self.language)

    def add(self, as_html: str, as_markdown: str) -> None:
        """The same block in both forms; `as_html` is escaped already."""
        self.blocks.append((as_html, as_markdown + "\n"))

    def heading(self, *words: str, level: int = 2) -> None:
        """A heading; level 2 begins a section."""
        text = self.text(words)
        self.add(f"<h{level}>{html.escape(text)}</h{level}>", f"{'#' * level} {text}")

    def paragraph(self, *words: str) -> None:
        """A paragraph."""
        text = self.text(words)
        self.add(f"<p>{html.escape(text)}</p>", text)

    def note(self, *words: str) -> None:
        """A line in small print."""
        text = self.text(words)
        self.add(f"<p><small>{html.escape(text)}</small></p>", text)

    def hint_for_html(self, *words: str) -> None:
        """A line in small print on how to use the page; Markdown has nothing of the kind."""
        text = self.text(words)
        self.blocks.append((f"<p><small>{html.escape(text)}</small></p>", ""))

    def to_write(self, *words: str) -> None:
        """A marked place where the student must write."""
        text = f"✎ {self.text(words)}"
        self.add(f'<p class="missing">{html.escape(text)}</p>', f"> **{text}**")

    def bullets(self, items: list[Words], kind: str = "") -> None:
        """A list; `kind`: "missing" for what the reader must see."""
        texts = [self.text(words) for words in items]
        lines = "".join(f"<li>{html.escape(text)}</li>" for text in texts)
        self.add(f'<ul class="{kind}">{lines}</ul>', "\n".join(f"- {text}" for text in texts))

    def verbatim(self, text: str, source: str) -> None:
        """Text of the file `source` as it is."""
        self.add(
            f'<pre title="{html.escape(source)}">{html.escape(text)}</pre>',
            f"```\n{text}\n```",
        )

    def table(self, header: list, rows: list[list], mark: set[int] = frozenset()) -> None:
        """A table without the rows that have no value. `mark`: rows to be coloured."""
        shown = [n for n, row in enumerate(rows) if any(cell is not None for cell in row[1:])]
        if not shown:
            return
        lines = ["<tr>" + "".join(self.cell(cell, "th") for cell in header) + "</tr>"]
        texts = [header]
        for n in shown:
            label, *values = rows[n]
            cells = self.cell(label, "th") + "".join(self.cell(value, "td") for value in values)
            start = "<tr class=mark>" if n in mark else "<tr>"
            lines.append(f"{start}{cells}</tr>")
            texts.append(rows[n])
        table = "".join(lines)
        markdown = markdown_table([[self.text(cell) for cell in row] for row in texts])
        self.add(f'<div class="wide"><table>{table}</table></div>', markdown)

    def cell(self, cell: Words | Fact | None, tag: str) -> str:
        """The HTML of a table cell; a fact's source is shown under the mouse."""
        text = html.escape(self.text(cell))
        if not isinstance(cell, Fact):
            return f"<{tag}>{text}</{tag}>"
        value = html.escape(str(cell.value))
        source = html.escape(cell.source)
        kind = ' class="text"' if len(cell.text) > 30 else ""
        return f'<{tag}{kind}><data value="{value}" title="{source}">{text}</data></{tag}>'

    def figures(self, figures: dict[str, object], kind: str = "") -> None:
        """Pictures by the names of their files, on the page and beside it; `kind`: "" or "large".

        Large ones stand below each other, in their own size.
        """
        tags, lines = [], []
        for name, figure in figures.items():
            encoded = base64.b64encode(self.keep(name, figure)).decode()
            tags.append(
                f'<figure><img alt="{html.escape(name)}" src="data:image/png;base64,{encoded}">'
                "</figure>"
            )
            lines.append(f"![{name}]({quote(file_name(name))})")
        self.add(f'<div class="figures {kind}">{"".join(tags)}</div>', "\n".join(lines))

    def keep(self, name: str, figure) -> bytes:
        """Keep a matplotlib figure, or the bytes of a PNG file, for `write`; returns its bytes."""
        if not isinstance(figure, bytes):
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=DOTS_PER_INCH)
            figure = file.getvalue()
        self.pictures[file_name(name)] = figure
        return figure

    def write(self) -> Path:
        """Write report.html, report.md and the pictures into the folder; returns the page."""
        body = "\n".join(as_html for as_html, _ in self.blocks)
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
        markdown = signed("\n".join(as_markdown for _, as_markdown in self.blocks if as_markdown))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            keep_edited(self.folder / "report.md")
            (self.folder / "report.html").write_text(page, encoding="utf-8")
            (self.folder / "report.md").write_text(markdown, encoding="utf-8")
            for name, content in self.pictures.items():
                (self.folder / name).write_bytes(content)
        except OSError as error:
            raise UserError(
                f"cannot write to {self.folder}: {error.strerror}; choose another --out DIR"
            ) from None
        return self.folder / "report.html"


def signed(markdown: str) -> str:
    """The text with a hash of itself at the end, which a Markdown viewer does not show."""
    digest = hashlib.blake2b(markdown.encode(), digest_size=8).hexdigest()
    return f"{markdown}\n<!-- report.py {digest} -->\n"


def keep_edited(file: Path) -> None:
    """Rename report.md to report-DATE.md if a student has written in it."""
    if not file.exists():
        return
    text = file.read_text(encoding="utf-8", errors="replace")
    written, _, _ = text.rpartition("\n<!-- report.py ")
    if text != signed(written):
        date = time.strftime("%Y-%m-%d_%H-%M-%S")
        kept = file.rename(file.with_name(f"{file.stem}-{date}.md"))
        print(f"note: you have written in {file}; it is now {kept}")


def file_name(name: str) -> str:
    """Of a picture; runs of the same name go by their path."""
    return name.replace("/", "-") + ".png"
