"""The pages of measured numbers are those that the command writes."""

import sys

import pytest

from tools import results
from tools.results import FOLDER, PAGES, SUFFIXES, as_page, read_tables


@pytest.mark.parametrize("language", SUFFIXES)
@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_the_one_that_the_command_writes(page, language):
    written = (FOLDER / f"{page}{SUFFIXES[language]}").read_text(encoding="utf-8")
    assert written == as_page(page, language), "run python -m tools.results"


def test_help_writes_no_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["results", "--help"])
    with pytest.raises(SystemExit):
        results.main()
    assert "write the pages" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize("page", PAGES)
def test_every_row_names_its_commit_and_has_a_cell_for_every_column(page):
    for table in read_tables(page):
        keys = {key for key, _, _ in table["columns"]}
        for row in table["rows"]:
            assert row.keys() >= keys, (table["title"], row)
            assert row["commit"]
