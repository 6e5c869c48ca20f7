"""Cross-attention of one translation, in words that can be read, as a picture.

Tokens may be single bytes of a character; those that form one are joined. A target token that looks
at a character looks at all of its bytes, so their columns are added; its rows are averaged.
"""

import textwrap
from dataclasses import dataclass

import numpy as np

from data import Collate
from engine.tables import columns_of
from model import Translator, cross_attention
from text.cleaning import normalise
from text.subwords import encode, special_ids
from tools.reporting.fonts import families

WIDEST = 60  # tokens of a sentence in a picture
LONGEST_GROUP = 5  # tokens: a space and the bytes of a character in UTF-8
END = "end"
WIDTH = 6.5  # inches
TITLE = 75  # letters of this width


@dataclass
class Attention:
    """How much the model looked at each source word for each target word."""

    source: str
    translation: str
    source_words: list[str]
    target_words: list[str]
    weights: np.ndarray  # (target words, source words); each row sums to 1


def attention_of(
    model: Translator, tokenizers: tuple, source: str, translation: str, widest: int = WIDEST
) -> Attention | None:
    """Which source words the last decoder layer looked at for each word of the translation.

    Both texts are cut to `widest` tokens, and to what the model has positions for. None if
    `cross_attention` finds no weights.
    """
    texts = (normalise(source), translation)
    longest = min(widest, model.config.longest_sentence)
    # One token more than is used: it shows `in_words` that the text was cut.
    ids = [encode(tokenizer, [text], longest + 1)[0] for tokenizer, text in zip(tokenizers, texts)]
    source_ids, target_ids = map(special_ids, tokenizers)
    collate = Collate(source_ids, target_ids)
    device = next(model.parameters()).device
    batch = collate([tuple(side[:longest] for side in ids)]).to(device)
    weights = cross_attention(model, batch.src, batch.src_pad, batch.tgt_in)  # (1, T, S)
    if weights is None:
        return None
    return in_words(*texts, tokenizers, ids, weights[0].float().cpu().numpy())


def in_words(source: str, translation: str, tokenizers, ids, weights: np.ndarray) -> Attention:
    """From (T, S) weights of tokens, with the end tokens, to those of words.

    `tokenizers` and `ids` are those of source and target. Of a text that was cut, its beginning.
    """
    texts, words, groups = [], [], []
    lengths = (weights.shape[1] - 1, weights.shape[0] - 1)
    for text, tokenizer, tokens, length in zip((source, translation), tokenizers, ids, lengths):
        texts.append(beginning(text, tokenizer, tokens, length))
        grouped = group_characters(tokenizer, tokens[:length])
        groups.append([positions for positions, _ in grouped])
        words.append([word for _, word in grouped])
    weights = np.stack([weights[:, positions].sum(1) for positions in groups[0]], 1)
    weights = np.stack([weights[positions].mean(0) for positions in groups[1]])
    return Attention(*texts, *words, weights)


def beginning(text: str, tokenizer, ids: list[int], length: int) -> str:
    """The text, or if it has more tokens than `length` the text of its first ones."""
    return text if len(ids) <= length else f"{tokenizer.decode(ids[:length]).strip()} …"


def group_characters(tokenizer, ids: list[int]) -> list[tuple[list[int], str]]:
    """The positions of tokens that form whole characters together, and their text.

    The end token has the last position.
    """
    groups = []
    positions = []
    for position in range(len(ids)):
        positions.append(position)
        text = tokenizer.decode([ids[position] for position in positions])
        # U+FFFD stands for bytes that are no character yet; a real one is in some texts. A space
        # goes to the word after it.
        is_complete = text.strip() and "\ufffd" not in text
        if is_complete or len(positions) == LONGEST_GROUP or position == len(ids) - 1:
            groups.append((positions, text.strip()))
            positions = []
    return [*groups, ([len(ids)], END)]


def fill(text: str) -> str:
    """The text in lines as wide as the picture; a Chinese character is as wide as two others."""
    if not text:
        return ""
    letters = TITLE * len(text) // columns_of(text)  # of this text, in a line
    return textwrap.fill(text, letters)


def picture(attention: Attention):
    """A matplotlib figure. Colours are from 0 to 1 in all of them, so that two can be compared."""
    from matplotlib.figure import Figure

    rows, columns = attention.weights.shape
    title = "\n".join(map(fill, (attention.source, attention.translation)))
    family = families(title + "".join(attention.source_words + attention.target_words))
    style = dict(family=family, parse_math=False)
    # As wide as the page, so that letters have the same size in all of them.
    figure = Figure(figsize=(WIDTH, 1.5 + 0.23 * rows), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(attention.weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_title(title, fontsize=10, **style)
    axes.set_xticks(range(columns), attention.source_words, fontsize=9, **style)
    axes.set_yticks(range(rows), attention.target_words, fontsize=9, **style)
    longest = max(map(len, attention.source_words[:-1]), default=0)
    if longest > 2:  # most Chinese words can stand upright
        axes.tick_params(axis="x", rotation=90)
    figure.colorbar(image, shrink=0.6)
    return figure
