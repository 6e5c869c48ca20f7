"""Texts in the two languages of the report.

A text is a pair, English and Chinese: ("Speed", "速度"). What is the same in both, such as the name
of a run, a file or a flag, is a plain `str` or a tuple of one. Every text stands where it is used.
"""

Words = str | tuple[str, ...]


def in_language(words: Words, language: str) -> str:
    """The text in "en" or "zh"."""
    if isinstance(words, str):
        return words
    return words[-1] if language == "zh" else words[0]
