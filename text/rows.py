"""Token ids of many sentences in one flat array instead of a list of lists, in memory or on disk.

numpy then works on all sentences at once, and a file of ids needs no parsing.

    rows = flatten([[5, 6], [8]])                  # Rows(ids=[5, 6, 8], lengths=[2, 1])
    padded = np.zeros((2, 3), int)                 # 2 sentences, padded to 3 tokens
    padded.ravel()[places_of(rows.lengths, np.array([0, 3]))] = rows.ids
    padded                                         # [[5, 6, 0], [8, 0, 0]]
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset

from engine.errors import UserError

# The two sides of a pair: the keys of every dict with an entry for each side.
SIDES = ("source", "target")


class Rows(NamedTuple):
    """Token ids of sentences, one after another, (N,), and the number in each, (sentences,)."""

    ids: np.ndarray
    lengths: np.ndarray


def flatten(sentences: Iterable[Sequence[int]]) -> Rows:
    """[[5, 6], [8]] -> Rows(ids=[5, 6, 8], lengths=[2, 1])"""
    sentences = list(sentences)
    lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
    ids = np.fromiter(chain.from_iterable(sentences), np.int32, int(lengths.sum()))
    return Rows(ids, lengths)


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """Where each sentence begins in the array of all ids: (n,) -> (n,)"""
    return np.cumsum(lengths) - lengths


def places_of(lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """start, start + 1, … of each row, `length` of them: (rows,), (rows,) -> (lengths.sum(),)

    >>> places_of(np.array([2, 3]), np.array([10, 50]))
    array([10, 11, 50, 51, 52])
    """
    # A running number over all places is right for the first row. In a later row it is too high by
    # the number of places in the rows before it.
    before = starts_of(lengths)
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def add_token(rows: Rows, token: int, at_start: bool = False) -> Rows:
    """The rows with `token` added at the end or the start of each."""
    lengths = rows.lengths + 1
    starts = starts_of(lengths)
    if at_start:
        starts += 1
    ids = np.full(lengths.sum(), token, np.int64)
    ids[places_of(rows.lengths, starts)] = rows.ids
    return Rows(ids, lengths)


class TokenWriter:
    """Writes a folder for `TokenizedPairs` chunk by chunk, so that memory use stays flat."""

    def __init__(self, folder: Path, tokenizers: dict):
        folder.mkdir(parents=True)
        self.folder = folder
        self.tokenizers = tokenizers  # of each side; the length of one is its number of tokens
        self.dtypes = {}
        self.files = {}
        self.lengths: dict[str, list[np.ndarray]] = {}
        for side, tokenizer in tokenizers.items():
            self.dtypes[side] = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.int32)
            self.files[side] = open(folder / f"{side}.ids", "wb")
            self.lengths[side] = []

    def write(self, side: str, rows: Rows) -> None:
        """Append sentences to a side. Raises `UserError` for an id beyond the vocabulary."""
        size = len(self.tokenizers[side])
        highest = rows.ids.max(initial=0)
        if highest >= size:  # 16 bits would wrap around
            raise UserError(
                f"the {side} tokenizer gives the id {highest}, but has {size} tokens; "
                "choose another --tokenizer"
            )
        self.lengths[side].append(rows.lengths.astype(np.int32))
        self.files[side].write(rows.ids.astype(self.dtypes[side]))

    def close(self) -> None:
        """Turn the raw ids into .npy files and write the lengths."""
        for side, file in self.files.items():
            file.close()
            lengths = np.concatenate([np.zeros(0, np.int32), *self.lengths[side]])
            np.save(self.folder / f"{side}.lengths.npy", lengths)
            ids = np.zeros(0, self.dtypes[side])
            if lengths.sum():  # through a map: all ids might not fit into memory
                ids = np.memmap(file.name, self.dtypes[side], "r")
            np.save(self.folder / f"{side}.ids.npy", ids)
            os.remove(file.name)


class TokenizedPairs(Dataset):
    """Pairs as token ids without begin and end: `pairs[i]` is (source ids, target ids).

    For each side, the folder holds the ids of all sentences in one array, and their lengths. The
    ids stay on disk, mapped into memory. Memory holds 12 bytes for each sentence: its length (4)
    and its place (8), and 8 for the number of each pair if some are left out. So 26 million pairs
    fit into memory.
    """

    def __init__(self, folder: Path, stored: np.ndarray | slice = slice(None)):
        # The sentences [5, 6], [8] and [7, 9] are stored as
        #     ids      5 6 8 7 9
        #     lengths  2 1 2
        # and begin at the places 0, 2 and 3 of ids.
        self.folder = folder
        self.stored = stored  # indices of the stored pairs that belong to this Dataset
        self.lengths = {}  # side -> (pairs,) tokens of each sentence
        self._starts = {}  # side -> (pairs,) place of its first token in ids
        self._ids = {}  # side -> (tokens,) of all stored sentences
        for side in SIDES:
            lengths = np.load(folder / f"{side}.lengths.npy")
            self.lengths[side] = lengths[stored]
            self._starts[side] = starts_of(lengths)[stored]
            ids = np.load(folder / f"{side}.ids.npy", mmap_mode="r")
            # A plain array over the map: slicing an np.memmap object costs ten times as much.
            self._ids[side] = np.asarray(ids)
            if len(ids) != lengths.sum():
                raise ValueError(f"{side}.ids.npy and {side}.lengths.npy do not fit together")

    def __len__(self) -> int:
        return len(self.lengths["source"])

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        source, target = self.take(np.array([index]))
        return source.ids, target.ids

    def take(self, indices: np.ndarray) -> tuple[Rows, Rows]:
        """Both sides of these pairs."""
        return self._gather("source", indices), self._gather("target", indices)

    __getitems__ = take  # the name by which the DataLoader asks for a whole batch

    def chunks(self, size: int = 20_000) -> Iterator[tuple[Rows, Rows]]:
        """Both sides of all pairs, `size` pairs at a time: all ids might not fit into memory."""
        for first in range(0, len(self), size):
            end = min(first + size, len(self))
            yield self.take(np.arange(first, end))

    def subset(self, indices: np.ndarray) -> "TokenizedPairs":
        """A Dataset of these pairs alone; the indices are those of this Dataset."""
        all_stored = np.arange(len(np.load(self.folder / "source.lengths.npy", mmap_mode="r")))
        return TokenizedPairs(self.folder, all_stored[self.stored][indices])

    def _gather(self, side: str, indices: np.ndarray) -> Rows:
        lengths = self.lengths[side][indices].astype(np.int64)
        places = places_of(lengths, self._starts[side][indices])
        return Rows(self._ids[side][places], lengths)

    def __reduce__(self):
        # For pickle: a worker process gets the folder's name and maps the files itself.
        return TokenizedPairs, (self.folder, self.stored)
