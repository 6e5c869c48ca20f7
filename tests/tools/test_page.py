"""A page, its Markdown and its print say the same; nothing is clipped."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.tables import markdown_table, plain
from tools.reporting.page import STYLE, Page
from tools.reporting.reading import Fact

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
PICTURE = b"PNG"


@pytest.fixture(autouse=True)
def _no_fonts(monkeypatch):
    monkeypatch.setattr("tools.reporting.page.embedded", lambda text: "")


def write(page: Page) -> tuple[str, str]:
    """The page and its Markdown."""
    page.write()
    texts = (page.folder / f"report.{end}" for end in ("html", "md"))
    return tuple(text.read_text(encoding="utf-8") for text in texts)


@pytest.fixture
def page(tmp_path) -> Page:
    page = Page(("Report", "报告"), "en", tmp_path / "report")
    page.cover({"name": ("Name", "姓名")})
    return page


def test_sections_are_numbered_listed_and_left_out_where_empty(page):
    page.heading("First", "一")
    page.paragraph("text", "字")
    page.heading("Empty", "空")
    page.heading("Part", "部分", level=3)
    page.heading("Last", "末")
    page.heading("Nothing here", "无", level=3)
    page.heading("Full", "满", level=3)
    page.paragraph("end", "完")
    shown, markdown = write(page)
    assert re.findall("<h2 .*?>(.*?)</h2>", shown) == ["1 First", "2 Last"]
    assert re.findall("<h3>(.*?)</h3>", shown) == ["Full"]
    links = re.findall('<a href="#(.*?)">(.*?)</a>', shown)
    assert links == [("section-1", "1 First"), ("section-2", "2 Last")]
    assert all(f'id="{to}"' in shown and f'id="{to}"' in markdown for to, _ in links)
    assert "- [1 First](#section-1)\n- [2 Last](#section-2)\n" in markdown


def test_figures_are_numbered_and_have_captions(page):
    page.figures({"loss": (PICTURE, ("the loss", "损失"))})
    page.figures({"a b": (PICTURE, "`a.png`")}, "large")
    shown, markdown = write(page)
    captions = re.findall("<figcaption>(.*?)</figcaption>", shown)
    assert captions == ["<b>Figure 1</b> the loss", "<b>Figure 2</b> <code>a.png</code>"]
    assert "![loss](loss.png)\n\n**Figure 1** the loss" in markdown
    assert "![a b](a%20b.png)\n\n**Figure 2** `a.png`" in markdown
    assert (page.folder / "a b.png").read_bytes() == PICTURE


def test_flags_are_code_and_texts_of_a_run_are_no_markup(page):
    texts = "‹…> <unk> a|b *c* _d_ `e` ~~f~~ $g$ &amp; [h](i) \\"
    page.table(["`--lr 0`", ""], [["x", Fact(1, texts, "run/file")]])
    page.bullets([("use `--ckpt R`", "用 `--ckpt R`")])
    page.facts([["command", Fact("a --b 'c|d'", "a --b 'c|d'", "run/file", is_code=True)]])
    shown, markdown = write(page)
    assert "<code>--lr 0</code>" in shown and "use <code>--ckpt R</code>" in shown
    assert html.escape(texts) in shown.replace("<wbr>", "")
    assert "`--ckpt R`" in markdown and "`a --b 'c\\|d'`" in markdown
    body = markdown.partition("# Report")[2]
    assert "‹…>" not in body and "<unk" not in body
    outside = re.sub("`[^`]*`|<!--.*?-->|^[| -]+$", "", body, flags=re.MULTILINE)
    assert "--" not in outside


@pytest.mark.parametrize("columns", [1, 6, 7, 8, 15])
def test_many_runs_are_several_tables_and_no_value_is_lost(page, columns):
    values = [f"value{number}" for number in range(columns)]
    page.table(["run", *(f"run{number}" for number in range(columns))], [["label", *values]])
    shown, markdown = write(page)
    tables = re.findall("<table>(.*?)</table>", shown)
    assert len(tables) == -(-columns // 7)
    for table in tables:
        assert table.count("<td") <= 7 and ">label</th>" in table
    assert [value in shown and value in markdown for value in values] == [True] * columns


def rules_of(selector: str) -> str:
    """The declarations of a selector, when the page is printed."""
    printed = STYLE.partition("@media print {")[2]
    return "".join(re.findall(rf"^\s*{re.escape(selector)} {{(.*?)}}", printed, re.MULTILINE))


def test_nothing_is_clipped_on_paper():
    """What cuts text off in print: boxes that scroll, lines that do not wrap, closed parts."""
    assert "size: A4" in STYLE
    assert "overflow: visible" in rules_of(".wide")
    assert "overflow-wrap: anywhere" in rules_of("td, th")
    assert "content-visibility: visible" in rules_of("details::details-content")
    assert not re.search(
        "overflow(-x|-y)?: (auto|hidden|scroll)", STYLE.partition("@media print")[2]
    )
    everywhere = STYLE.partition("@media")[0]
    assert "white-space: pre-wrap" in re.search("^pre {(.*?)}", everywhere, re.M | re.S)[1]
    scrolling = re.findall(r"^(.*?) {[^}]*overflow(?:-x)?: auto", everywhere, re.MULTILINE)
    assert scrolling == [".wide"]  # which print undoes
    assert re.search("^img {[^}]*max-width: 100%", everywhere, re.MULTILINE)


def words_of_pdf(file: Path) -> set[str]:
    text = subprocess.run(["pdftotext", "-raw", file, "-"], capture_output=True, text=True).stdout
    return {re.sub(r"\s", "", text)}


@pytest.mark.skipif(
    not (CHROMIUM and shutil.which("pdftotext")), reason="needs Chromium and pdftotext"
)
def test_the_pdf_has_all_words_of_the_page(page):
    """Ten columns, a long command, a folded part: each was cut off once."""
    page.heading("Tables", "表")
    names = [f"experiment-{number}-with-a-long-name" for number in range(10)]
    rows = [[f"label {n}", *(f"{n}.{number}00001" for number in range(10))] for n in range(60)]
    page.table(["run", *names], rows)
    path = "/very/long/path" * 20
    page.facts([["command", Fact(path, f"python train.py --data {path}", "x", is_code=True)]])
    page.verbatim("print(" + "wide" * 60 + ")", "file")
    page.folded("folded", "折叠")
    page.facts([[f"`--flag{n}`", f"value{n}"] for n in range(40)])
    page.end_folded()
    shown, _ = write(page)
    pdf = page.folder / "report.pdf"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
    command += [f"--print-to-pdf={pdf}", (page.folder / "report.html").as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    body = re.sub('<p class="hint">.*?</p>', "", shown.partition("<body>")[2])
    # Words as they stand in the HTML; in the PDF a word may go on in the next line.
    words = html.unescape(re.sub("<[^>]*>", " ", body.replace("<wbr>", ""))).split()
    (printed,) = words_of_pdf(pdf)
    missing = [word for word in words if word not in printed]
    assert len(words) > 700 and not missing


def test_a_table_for_tensorboard_shows_texts_as_they_are():
    import markdown

    text = "<pad> a|b *c* `d` & $5 ~~x~~ [e](f) _g_"
    table = markdown.markdown(markdown_table([("head",), (plain(text),)]), extensions=["tables"])
    (cell,) = re.findall("<td>(.*?)</td>", table)
    assert html.unescape(cell) == text
