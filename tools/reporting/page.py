"""One report as a page that opens without network, as Markdown, and as PNG pictures.

page = Page("Training report", "zh", Path("runs/NAME/report"))
page.heading("Speed"); page.table(["", "a run"], [["time", fact]]); page.figures({"loss": figure}); page.write()

A cell is a label (translated), a `Fact` (written as it is, with the place it is from), or None (—).
"""

import base64
import html
import io
import re
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from engine.errors import UserError
from tools.reporting.attention import END, Attention
from tools.reporting.fonts import embedded
from tools.reporting.reading import Fact
from tools.reporting.words import CHINESE, ENGLISH

DOTS_PER_INCH = 130
STYLE = """
body { font: 15px/1.55 own, system-ui, sans-serif; color: #1c2530; max-width: 1180px; margin: 0 auto; padding: 0 16px 48px }
h1 { font-size: 1.6em } h2 { font-size: 1.2em; margin: 2em 0 .5em; border-bottom: 2px solid #1f5fa8 } h3 { font-size: 1em }
small { color: #5a6673 } .missing { background: #fff3cf }
pre { overflow-x: auto; background: #f4f6f8; padding: .8em; font-size: 12px }
.wide { overflow-x: auto; margin: .5em 0 } table { border-collapse: collapse }
td, th { padding: .25em .7em; text-align: left; vertical-align: top; border-bottom: 1px solid #dde3ea }
th { min-width: 6em } td { min-width: 5em; overflow-wrap: anywhere } .text { min-width: 13em }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); gap: 14px }
figure { margin: 0 } img { max-width: 100%; height: auto }
.attention td, .attention th { min-width: 1.7em; padding: .1em .3em; border: 1px solid #e6eaef; text-align: center }
.attention th { font-weight: normal; white-space: nowrap }
tr > :first-child { position: sticky; left: 0; background: inherit } tr { background: #fff } tr.mark { background: #fff3cf }
.attention tr > :first-child { text-align: right } .flag { white-space: nowrap }
""".strip()


class Page:
    """Blocks in the order they are added, in HTML and in Markdown."""

    def __init__(self, title: str, language: str, folder: str | Path):
        self.language, self.folder, self.html, self.markdown = language, Path(folder), [], []
        self.words = CHINESE if language == "zh" else ENGLISH
        self.pictures: dict[str, bytes] = {}
        self.last: tuple[list, list] = ([], [])  # see `later`
        if (self.folder / "config.json").exists():  # its own pictures would count as the run's
            raise UserError(f"{self.folder} is a run itself; name a folder of its own by --out DIR")
        self.title = self.say(title)
        self.add(f"<h1>{html.escape(self.title)}</h1>", f"# {self.title}")

    def say(self, words: str) -> str:
        """A label in the language of the page; names of curves are labels too, names of files and flags stay."""
        return self.words.get(words, words.replace("_", " ") if words.isidentifier() else words)

    def add(self, as_html: str, as_markdown: str) -> None:
        """The same piece in both forms of the page; `as_html` is escaped already."""
        self.html.append(as_html)
        self.markdown.append(as_markdown + "\n")

    @contextmanager
    def later(self):
        """What is added inside stands behind what is added afterwards."""
        before = self.html, self.markdown
        self.html, self.markdown = self.last
        yield
        self.html, self.markdown = before

    def heading(self, words: str, level: int = 2) -> None:
        """A heading, in the language of the page."""
        words = self.say(words)
        self.add(f"<h{level}>{html.escape(words)}</h{level}>", f"{'#' * level} {words}")

    def note(self, words: str) -> None:
        """A line in small print, in the language of the page."""
        words = self.say(words)
        self.add(f"<p><small>{html.escape(words)}</small></p>", words)

    def prose(self, words: str) -> None:
        """A paragraph, in the language of the page."""
        words = self.say(words)
        self.add(f"<p>{html.escape(words)}</p>", words)

    def bullets(self, *items: str) -> None:
        """A list, in the language of the page."""
        items = [self.say(words) for words in items]
        lines = "".join(f"<li>{html.escape(words)}</li>" for words in items)
        self.add(f"<ul>{lines}</ul>", "\n".join(f"- {words}" for words in items))

    def to_write(self, words: str) -> None:
        """A marked place where the student must write."""
        words = f"✎ {self.say(words)}"
        self.add(f'<p class="missing">{html.escape(words)}</p>', f"> **{words}**")

    def missing(self, lacks: list[tuple[str, ...]]) -> None:
        """What is not there: a place, then words about it."""
        lines = [" · ".join(self.words.get(words, words) for words in lack) for lack in lacks]
        items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
        self.add(f'<ul class="missing">{items}</ul>', "\n".join(f"- {line}" for line in lines))

    def verbatim(self, fact: Fact) -> None:
        """Text of a file as it is."""
        self.add(
            f'<pre title="{html.escape(fact.source)}">{html.escape(fact.text)}</pre>',
            f"```\n{fact.text}\n```",
        )

    def table(self, header: list, rows: list[list], mark: set[int] = frozenset()) -> None:
        """`mark`: rows to be coloured. Rows without any value are left out."""
        numbered = [
            (n, row) for n, row in enumerate(rows) if any(cell is not None for cell in row[1:])
        ]
        if not numbered:
            return
        lines = ["<tr>" + "".join(self.cell(cell, "th") for cell in header) + "</tr>"]
        for number, (first, *rest) in numbered:
            cells = self.cell(first, "th") + "".join(self.cell(cell, "td") for cell in rest)
            lines.append(f"<tr{' class=mark' if number in mark else ''}>{cells}</tr>")
        width = len(header)
        in_markdown = [header, ["---"] * width, *(row for _, row in numbered)]
        text = "\n".join(
            "| " + " | ".join(map(self.markdown_cell, row)) + " |" for row in in_markdown
        )
        self.add(f'<div class="wide"><table>{"".join(lines)}</table></div>', text)

    def cell(self, cell, tag: str) -> str:
        """A `Fact`, a label or None (—) as the HTML of one table cell; a fact's source shows under the mouse."""
        if isinstance(cell, Fact):
            value = html.escape(str(cell.value), quote=True)
            kind = ' class="text"' if len(cell.text) > 30 else ""
            source = html.escape(cell.source, quote=True)
            return f'<{tag}{kind}><data value="{value}" title="{source}">{html.escape(cell.text)}</data></{tag}>'
        words = html.escape("—" if cell is None else self.say(cell))
        words = re.sub(
            r"--\w+", r'<span class="flag">\g<0></span>', words
        )  # a flag's name stays on its line
        return f"<{tag}>{words}</{tag}>"

    def markdown_cell(self, cell) -> str:
        """The same for a Markdown table: one line, | escaped."""
        text = cell.text if isinstance(cell, Fact) else "—" if cell is None else self.say(cell)
        return " ".join(text.split()).replace("|", "\\|")

    def keep(self, name: str, figure) -> bytes:
        """A matplotlib figure, or the bytes of a PNG file, to lie beside the page; → its bytes."""
        name = file_name(name)
        if not isinstance(figure, bytes):
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=DOTS_PER_INCH)
            figure = file.getvalue()
        self.pictures[name] = figure
        return figure

    def figures(self, figures: dict[str, object]) -> None:
        """Pictures by the names of their files: on the page and beside it."""
        tags, lines = [], []
        for name, figure in figures.items():
            encoded = base64.b64encode(self.keep(name, figure)).decode()
            alternative = html.escape(self.say(name), quote=True)
            tags.append(
                f'<figure><img alt="{alternative}" src="data:image/png;base64,{encoded}"></figure>'
            )
            lines.append(f"![{self.say(name)}]({quote(file_name(name))})")
        self.add(f'<div class="figures">{"".join(tags)}</div>', "\n".join(lines))

    def attention(self, attention: Attention, name: str, figure) -> None:
        """Words as they are, weights as colours; in Markdown, which has no colours, the picture."""
        sides = (
            [*words[:-1], self.say(END)]
            for words in (attention.source_words, attention.target_words)
        )
        source_words, target_words = (list(map(html.escape, words)) for words in sides)
        head = "".join(f"<th>{word}</th>" for word in source_words)
        lines = [f"<tr><th></th>{head}</tr>"]
        for word, weights in zip(target_words, attention.weights):
            cells = "".join(
                f'<td style="background: rgba(31, 95, 168, {weight:.3f})" title="{weight:.3f}"></td>'
                for weight in weights
            )
            lines.append(f"<tr><th>{word}</th>{cells}</tr>")
        self.keep(name, figure)
        table = f'<div class="wide"><table class="attention">{"".join(lines)}</table></div>'
        self.add(table, f"![{name}]({quote(file_name(name))})")

    def write(self) -> Path:
        """report.html, report.md and the pictures in the folder; → the page."""
        body, markdown = (
            "\n".join(blocks + last) for blocks, last in zip((self.html, self.markdown), self.last)
        )
        head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        style = f"<style>{STYLE}\n{embedded(body)}</style>"
        page = f'<!doctype html><html lang="{self.language}"><head>{head}<title>{html.escape(self.title)}</title>{style}</head>'
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "report.html").write_text(
                f"{page}<body>{body}</body></html>\n", encoding="utf-8"
            )
            (self.folder / "report.md").write_text(markdown, encoding="utf-8")
            for name, content in self.pictures.items():
                (self.folder / name).write_bytes(content)
        except OSError as error:
            place = f"cannot write to {self.folder}: {error.strerror}"
            raise UserError(f"{place}; choose another place with --out DIR") from None
        return self.folder / "report.html"


def file_name(name: str) -> str:
    """Of a picture; runs of the same name go by their path."""
    return name.replace("/", "-") + ".png"
