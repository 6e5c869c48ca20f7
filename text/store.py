"""Token ids of sentence pairs on disk: written as a stream, read through a memory map.

    writer = TokenWriter(folder, {"source": 8000, "target": 8000})
    for side, rows in (("source", [[5, 6], [8]]), ("target", [[7], [9, 10]])): writer.write(side, *flatten(rows))
    writer.close()
    source, target = TokenizedPairs(folder)[1]                  # array([8]), array([9, 10])

For each side a folder holds the ids of all sentences one after another and the number of ids in each sentence.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset

from engine.errors import UserError


class Rows(NamedTuple):
    """Token ids of sentences, one after another, (N,), and the number of ids in each sentence, (rows,)."""

    ids: np.ndarray
    lengths: np.ndarray


class TokenizedPairs(Dataset):
    """Sentence pairs as token ids, without begin and end: `pairs[i]` is (source ids, target ids), two numpy arrays.

    The ids stay on disk until they are asked for; the memory holds 12 bytes a sentence, its length and its place, and 8
    for its number where only some are chosen.
    """

    def __init__(self, folder: Path, rows: np.ndarray | slice = slice(None)):
        self.folder, self.rows = (
            folder,
            rows,
        )  # the numbers of the rows that are there; all, if not named
        lengths = {side: np.load(folder / f"{side}.lengths.npy") for side in ("source", "target")}
        self.lengths = {side: of_all[rows] for side, of_all in lengths.items()}
        self._starts = {side: starts_of(of_all)[:-1][rows] for side, of_all in lengths.items()}
        # As plain arrays over the maps: a slice of a `memmap` costs ten times as much.
        self._ids = {
            side: np.asarray(np.load(folder / f"{side}.ids.npy", mmap_mode="r"))
            for side in self.lengths
        }

    def __len__(self) -> int:
        return len(self.lengths["source"])

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return tuple(
            self._ids[side][starts[index] : starts[index] + self.lengths[side][index]]
            for side, starts in self._starts.items()
        )

    def __getitems__(self, rows: np.ndarray) -> tuple[Rows, Rows]:
        """Both sides of these pairs, for a DataLoader: without a loop over sentences."""
        return self._gather("source", rows), self._gather("target", rows)

    def parts(self, size: int = 20_000) -> Iterator[tuple[Rows, Rows]]:
        """Both sides of all pairs, so many pairs at a time: all ids at once might not fit into memory."""
        for first in range(0, len(self), size):
            yield self.__getitems__(np.arange(first, min(first + size, len(self))))

    def only(self, rows: np.ndarray) -> "TokenizedPairs":
        """These pairs alone, by their numbers here."""
        stored = np.arange(len(np.load(self.folder / "source.lengths.npy", mmap_mode="r")))[
            self.rows
        ]
        return TokenizedPairs(self.folder, stored[rows])

    def _gather(self, side: str, rows: np.ndarray) -> Rows:
        lengths = self.lengths[side][rows].astype(np.int64)
        return Rows(self._ids[side][places_of(lengths, self._starts[side][rows])], lengths)

    def __reduce__(self):
        return TokenizedPairs, (self.folder, self.rows)  # a worker process maps the files anew


class TokenWriter:
    """Writes what `TokenizedPairs` reads, as a stream: the memory holds one chunk."""

    def __init__(self, folder: Path, vocabularies: dict[str, int]):
        folder.mkdir(parents=True)
        self.folder, self.vocabularies = folder, vocabularies
        self.dtypes = {
            side: np.dtype(np.uint16 if size <= 2**16 else np.int32)
            for side, size in vocabularies.items()
        }
        self.files = {side: open(folder / f"{side}.ids", "wb") for side in vocabularies}
        self.lengths = {side: [] for side in vocabularies}

    def write(self, side: str, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append sentences to a side: their ids one after another, (N,), and the number of ids in each, (sentences,)."""
        if (
            len(ids) and ids.max() >= self.vocabularies[side]
        ):  # the model has no such token, and 16 bits would wrap
            raise UserError(
                f"the {side} tokenizer gives the id {ids.max()}, but has {self.vocabularies[side]} tokens; "
                "choose another --tokenizer"
            )
        self.lengths[side].append(lengths.astype(np.int32))
        self.files[side].write(ids.astype(self.dtypes[side]))

    def close(self) -> None:
        """Finish the files."""
        for side, file in self.files.items():
            file.close()
            lengths = np.concatenate([np.zeros(0, np.int32), *self.lengths[side]])
            np.save(self.folder / f"{side}.lengths.npy", lengths)
            # Through a map, so that not all ids are in memory; numpy maps no empty file.
            raw = (
                np.memmap(file.name, self.dtypes[side], "r")
                if lengths.sum()
                else np.zeros(0, self.dtypes[side])
            )
            np.save(self.folder / f"{side}.ids.npy", raw)
            os.remove(file.name)


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """Where each sentence begins in a row of all ids, and the end: (n,) → (n + 1,)"""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def places_of(lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """start, start + 1, … for each row, as many as it is long: (rows,), (rows,) → (N,)"""
    before = np.cumsum(lengths) - lengths  # what the rows above hold
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def flatten(rows: Iterable[Sequence[int]]) -> Rows:
    """Lists of ids → `Rows`."""
    rows = list(rows)
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return Rows(np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths)
