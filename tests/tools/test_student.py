"""What a student writes into report.md survives every new report, whatever it is."""

import html
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.reporting import student
from tools.reporting.page import Page

FOLDERS = iter(range(10**6))
# Markdown, HTML, Chinese, marks of other places, ends of comments, lines of a Windows editor.
ODD = st.sampled_from(
    [
        "**bold** and `--dropout 0`",
        "<script>alert(1)</script> <pad> & </section>",
        "在 8×A100 上训练，损失 < 2",
        "　　缩进的一段",
        "```python\nx = '<b>'\n```",
        "| a | b |\n|---|---|\n| 1 | 2 |",
        "<!-- name --> <!-- report.py 0 -->",
        "> ✎ quoted",
        "--- # 1. - * \\ $x_1$ ~~no~~ ![]() [a](b",
        "\n\n",
        "\x00\u2028\x85",
    ]
)
TEXTS = st.lists(ODD | st.text(st.characters(codec="utf-8")), max_size=4).map("\n".join)


@pytest.fixture(autouse=True)
def _no_fonts(monkeypatch):
    monkeypatch.setattr("tools.reporting.page.embedded", lambda text: "")


def page_in(folder: Path, language: str = "en") -> Page:
    """A small report with two kinds of places."""
    page = Page(("Report", "报告"), language, folder)
    page.cover({"name": ("Name", "姓名"), "date": ("Date", "日期")})
    page.heading("Setup", "设置")
    page.to_write("setup", "Describe `--lr` here.", "在此描述。")
    page.write()
    return page


def fill_in(folder: Path, **words: str) -> None:
    """What a student does: write between the marks."""
    file = folder / "report.md"
    text = file.read_bytes().decode()
    for name, own in words.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(start)
        text = before + start + own + end + rest.partition(end)[2]
    file.write_bytes(text.encode())


def visible(page: str) -> str:
    """The text that a browser shows, without spaces."""
    body = page.partition("<body>")[2]
    return re.sub(r"\s", "", html.unescape(re.sub("<[^>]*>", "", body)))


@given(name=TEXTS, setup=TEXTS)
def test_words_are_kept_as_they_are(tmp_path_factory, name, setup):
    folder = tmp_path_factory.mktemp("report")
    page_in(folder)
    fill_in(folder, name=name, setup=setup)
    expected = {"name": name, "setup": setup}
    # Of Windows' line ends, and of lines without words at both ends, nothing need stay.
    expected = {
        place: text.replace("\r\n", "\n").strip("\n")
        for place, text in expected.items()
        if text.strip()
    }
    for language in ("en", "zh", "en"):
        assert page_in(folder, language).words == expected
    assert not list(folder.glob("report-*.md"))  # nothing was changed elsewhere


def test_words_are_on_the_page_and_the_request_is_gone(tmp_path):
    page_in(tmp_path)
    empty = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Describe <code>--lr</code> here." in empty and 'class="own"' not in empty
    fill_in(
        tmp_path, name="张三", setup="\n\nIt **works** with `--dropout 0`: <pad> is <b>9</b>.\n"
    )
    page_in(tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<b>张三</b>" in page and "Describe" not in page
    own = page.partition('<section class="own">')[2].partition("</section>")[0]
    assert "<strong>works</strong>" in own and "<code>--dropout 0</code>" in own
    assert "&lt;pad&gt; is &lt;b&gt;9&lt;/b&gt;" in own


@given(TEXTS)
def test_no_tag_of_a_student_is_obeyed(text):
    shown = student.as_html(text)
    tags = set(re.findall(r"<(\w+)", shown))
    assert not tags & {"script", "section", "pad", "b", "iframe"}


def test_words_outside_the_places_are_kept_beside(tmp_path, capsys):
    page_in(tmp_path)
    fill_in(tmp_path, setup="kept")
    with (tmp_path / "report.md").open("a", encoding="utf-8") as file:
        file.write("elsewhere")
    page = page_in(tmp_path)
    (kept,) = tmp_path.glob("report-*.md")
    assert kept.read_text(encoding="utf-8").endswith("elsewhere")
    assert page.words == {"setup": "kept"}
    assert f"the old one is now {kept}" in capsys.readouterr().out


def test_words_of_a_place_that_the_new_report_lacks_are_kept_beside(tmp_path):
    page_in(tmp_path)
    fill_in(tmp_path, setup="of a translation")
    page = Page(("Report", "报告"), "en", tmp_path)
    page.cover({"name": ("Name", "姓名")})
    page.write()
    (kept,) = tmp_path.glob("report-*.md")
    assert "of a translation" in kept.read_text(encoding="utf-8")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "gb18030"])
def test_the_file_of_a_windows_editor(tmp_path, encoding):
    page_in(tmp_path, "zh")
    fill_in(tmp_path, name="李四", setup="第一行\n第二行")
    file = tmp_path / "report.md"
    lines = [line.rstrip() for line in file.read_text(encoding="utf-8").splitlines()]
    file.write_bytes("\r\n".join(lines).encode(encoding))
    assert page_in(tmp_path, "zh").words == {"name": "李四", "setup": "第一行\n第二行"}
