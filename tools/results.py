"""Write three pages of measured numbers from the tables in docs/results/.

    python -m tools.results

docs/results/results-*.json make docs/results.md and docs/results.zh-CN.md; performance-*.json and
what_did_not_help-*.json make the pages of these names. A file holds one table: its title, sentences
above and below it, columns (key, English header, Chinese header) and rows. Measured numbers are
entered there and nowhere else. Rows may hold more than the columns show: each has its commit.
more-*.json are measurements that no page shows.
"""

import argparse
import json
from pathlib import Path

from engine.tables import markdown_table

FOLDER = Path(__file__).parent.parent / "docs"
PAGES = ("results", "performance", "what_did_not_help")
SUFFIXES = {"en": ".md", "zh": ".zh-CN.md"}

TITLES = {
    "results": {"en": "Results", "zh": "结果"},
    "performance": {"en": "Performance", "zh": "性能"},
    "what_did_not_help": {"en": "What did not help", "zh": "没有帮助的做法"},
}
# Between two sentences; a line break in Chinese would be shown as a gap.
SEPARATORS = {"en": "\n", "zh": ""}
OTHER_LANGUAGE = {"en": "[中文]({page}.zh-CN.md)", "zh": "[English]({page}.md)"}
ENDINGS = {
    "en": "Written by `python -m tools.results` from `docs/results/{page}-*.json`.",
    "zh": "本页由 `python -m tools.results` 根据 `docs/results/{page}-*.json` 生成。",
}


def as_page(page: str, language: str) -> str:
    """A page in "en" or "zh", as Markdown."""
    paragraphs = [
        f"# {TITLES[page][language]}",
        OTHER_LANGUAGE[language].format(page=page),
    ]
    separator = SEPARATORS[language]
    for table in read_tables(page):
        paragraphs.append(f"## {table['title'][language]}")
        paragraphs.append(separator.join(table["text"][language]))
        if table.get("commands"):
            paragraphs.append("\n".join(["```bash", *table["commands"], "```"]))
        paragraphs.append(as_table(table, language))
        paragraphs.append(separator.join(table["notes"][language]))
    paragraphs.append(ENDINGS[language].format(page=page))
    return "\n\n".join(text for text in paragraphs if text) + "\n"


def as_table(table: dict, language: str) -> str:
    """The columns and rows of a table, as Markdown."""
    keys = [key for key, _, _ in table["columns"]]
    headers = [english if language == "en" else chinese for _, english, chinese in table["columns"]]
    rows = [[as_text(row[key], language) for key in keys] for row in table["rows"]]
    return markdown_table([headers, *rows])


def as_text(value, language: str) -> str:
    """A cell: 10001 → "10,001"; {"en": …, "zh": …} → the text in the language."""
    if isinstance(value, dict):
        return value[language]
    return f"{value:,}" if isinstance(value, int) else str(value)


def read_tables(page: str) -> list[dict]:
    """The tables of a page, in the order of their files' names."""
    files = sorted((FOLDER / "results").glob(f"{page}-*.json"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def main() -> None:
    """Write all pages."""
    argparse.ArgumentParser(description="write the pages of measured numbers").parse_args()
    for page in PAGES:
        for language, suffix in SUFFIXES.items():
            file = FOLDER / f"{page}{suffix}"
            file.write_text(as_page(page, language), encoding="utf-8")


if __name__ == "__main__":
    main()
