"""Tables in Markdown, narrow for a page and straight for a terminal."""

from engine.tables import markdown_table

ROWS = [("who", "n"), ("alpha", 12)]


def test_a_table():
    assert markdown_table(ROWS) == "| who | n |\n| --- | --- |\n| alpha | 12 |"


def test_a_padded_table():
    assert markdown_table(ROWS, padded=True) == (
        "| who   | n   |\n| ----- | --- |\n| alpha | 12  |"
    )


def test_text_that_would_break_a_table():
    table = markdown_table([("a|b\nc",), ("a\\|b",)])
    assert table == "| a\\|b c |\n| --- |\n| a\\\\\\|b |"
