"""Cross-attention of one translation, in words that can be read: as a picture for TensorBoard and for the page.

Tokens may be single bytes of a character; those that make one together are joined: a target token that looks at a
character looks at all of its bytes, so their columns are added; its rows are averaged.
"""

import textwrap
from dataclasses import dataclass

import numpy as np

from tools.reporting.fonts import families

LONGEST_GROUP = 5  # tokens: a space and the bytes of a character in UTF-8
END = "end"


@dataclass
class Attention:
    """Which source words (columns) the model looked at for each target word (rows); a row sums to 1."""

    source: str
    translation: str
    source_words: list[str]
    target_words: list[str]
    weights: np.ndarray  # (rows, columns)


def in_words(source: str, translation: str, tokenizers, ids, weights: np.ndarray) -> Attention:
    """(T, S) weights of tokens, the end tokens included → those of readable words; of a text that was cut its beginning."""
    lengths = weights.shape[1] - 1, weights.shape[0] - 1
    texts = list(map(beginning, (source, translation), tokenizers, ids, lengths))
    ids = [own[:length] for own, length in zip(ids, lengths)]
    source_groups, target_groups = (group_characters(*pair) for pair in zip(tokenizers, ids))
    weights = np.stack([weights[:, group].sum(1) for group, _ in source_groups], 1)
    weights = np.stack([weights[group].mean(0) for group, _ in target_groups])
    words = [[word for _, word in groups] for groups in (source_groups, target_groups)]
    return Attention(*texts, *words, weights)


def beginning(text: str, tokenizer, ids: list[int], length: int) -> str:
    """The text, or what its first `length` tokens say if it has more."""
    return text if len(ids) <= length else f"{tokenizer.decode(ids[:length]).strip()} …"


def group_characters(tokenizer, ids: list[int]) -> list[tuple[list[int], str]]:
    """The places of tokens that make whole characters together, and their text; the end token's place is the last."""
    groups, places = [], []
    for place in range(len(ids)):
        places.append(place)
        text = tokenizer.decode([ids[place] for place in places])
        # U+FFFD stands for bytes that are no character yet; a real one is in some texts.
        is_whole = text.strip() and "\ufffd" not in text  # a space alone goes to the word behind it
        if is_whole or len(places) == LONGEST_GROUP or place == len(ids) - 1:
            groups.append((places, text.strip()))
            places = []
    return [*groups, ([len(ids)], END)]


def picture(attention: Attention):
    """A matplotlib figure; colours from 0 to 1 in every picture, so that those of two steps can be compared."""
    from matplotlib.figure import Figure

    rows, columns = attention.weights.shape
    title = "\n".join(textwrap.fill(text, 60) for text in (attention.source, attention.translation))
    family = families(title + "".join(attention.source_words + attention.target_words))
    figure = Figure(figsize=(2.5 + 0.3 * columns, 2 + 0.25 * rows), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(attention.weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_title(title, fontsize=9, family=family, parse_math=False)
    axes.set_xticks(
        range(columns), attention.source_words, fontsize=8, family=family, parse_math=False
    )
    axes.set_yticks(
        range(rows), attention.target_words, fontsize=8, family=family, parse_math=False
    )
    if (
        max(map(len, attention.source_words[:-1]), default=0) > 2
    ):  # most Chinese words can stand upright
        axes.tick_params(axis="x", rotation=90)
    figure.colorbar(image, shrink=0.6)
    return figure
