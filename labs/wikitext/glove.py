"""GloVe vectors (Pennington et al. 2014): the beginning of the model's embedding.

vectors, known = load_glove(Path("glove.6B.50d.txt"), text.vocabulary.tokens)
"""

from pathlib import Path

import torch
from torch import Tensor

from engine.errors import UserError
from labs.wikitext.text import EOS, UNK


def load_glove(path: Path, tokens: list[str]) -> tuple[Tensor, Tensor]:
    """Vectors (V, G) of these tokens and whether the file has them (V,).

    The file is text, a word and its G numbers per line (Pennington et al. 2014,
    https://nlp.stanford.edu/projects/glove/). A word it lacks is looked up in lower case. The
    vectors found are scaled to variance 1/G; tokens without one get N(0, 1/G) of a fixed seed.
    """
    wanted = {form for token in tokens for form in (token, token.lower())} - {UNK, EOS}
    table, size = read_vectors(path, wanted)
    vectors = torch.randn(len(tokens), size, generator=torch.Generator().manual_seed(0))
    vectors *= size**-0.5
    known = torch.zeros(len(tokens), dtype=torch.bool)
    for id, token in enumerate(tokens):
        row = table.get(token, table.get(token.lower()))
        if row is not None:
            vectors[id] = torch.tensor(row)
            known[id] = True
    if not known.any():
        raise UserError(
            f"--glove {path}: none of its words is in the vocabulary; is it of this language?"
        )
    deviation = vectors[known].std(correction=0).clamp_min(1e-8)
    vectors[known] *= size**-0.5 / deviation
    return vectors, known


def read_vectors(path: Path, wanted: set[str]) -> tuple[dict[str, list[float]], int]:
    """word → its numbers, for the wanted words, and how many numbers a word has."""
    table, size = {}, 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                words = line.rstrip().split(" ")
                size = size or len(words) - 1
                if size < 2:
                    raise ValueError("line 1 is not a word and its numbers; delete a header line")
                if len(words) <= size:
                    raise ValueError(
                        f"line {number} has {len(words) - 1} numbers instead of {size}"
                    )
                # A few words of the largest files have spaces within.
                word = " ".join(words[:-size])
                if word in wanted and word not in table:
                    table[word] = [float(value) for value in words[-size:]]
        if not size:
            raise ValueError("it is empty")
    except OSError as error:
        raise UserError(
            f"--glove {path}: {error.strerror}; give a text file such as glove.6B.50d.txt"
        ) from None
    except ValueError as error:  # not UTF-8 is one of them
        raise UserError(
            f"--glove {path} is not a file of vectors ({error}); unpack the .zip, or fetch it again"
        ) from None
    return table, size
