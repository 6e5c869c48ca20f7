"""One corpus for all contestants: the same token sequences, for the project as ids, for the toolkits as words.

    corpus = load_corpus()              # MINIDATASET, /opt/minidataset or sample/
    corpus.train[0]                     # (source ids, target ids), two numpy arrays without begin and end

The texts are cleaned and cut into tokens by the project's own `data.prepare`; a seeded sample of the training pairs is the
benchmark's corpus. Token 123 of the source is written as the word s123, token 45 of the target as t45, so that every toolkit,
told to split at spaces, works on exactly the same sequences.

    train.src  train.tgt  test.src  test.tgt       one sentence a line
    opennmt.src  dict.src.txt  …                   the vocabulary as OpenNMT-py and fairseq want it
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.measuring import ROOT

SIDES = ("src", "tgt")  # a word is the first letter of its side and the number of its token


@dataclass
class Corpus:
    """Token ids, without begin and end, and the folder where they stand as words."""

    folder: Path
    train: list[tuple[np.ndarray, np.ndarray]]
    test: list[tuple[np.ndarray, np.ndarray]]
    source_vocab: int
    target_vocab: int
    source_ids: dict[str, int]  # {"pad": …, "bos": …, "eos": …}, as `data.Collate` takes them
    target_ids: dict[str, int]
    data: str  # where the texts came from

    @property
    def lengths(self) -> dict[str, np.ndarray]:
        """Tokens of each training sentence, as `data.BucketSampler` takes them."""
        sides = zip(("source", "target"), zip(*self.train))
        return {side: np.array([len(row) for row in rows], np.int32) for side, rows in sides}

    def describe(self) -> str:
        """One line for the head of a table."""
        source, target = (np.mean([len(row) + 1 for row in rows]) for rows in zip(*self.train))
        return (
            f"{len(self.train):,} training pairs of {self.data}, mean {source:.1f} source and {target:.1f} target tokens "
            f"(end token counted), {len(self.test)} test sentences, vocabularies of {self.source_vocab:,} and "
            f"{self.target_vocab:,}"
        )


def text_at(data: str = "", *columns: str):
    """The parallel text of --data, else of the environment variable MINIDATASET, else /opt/minidataset or sample/."""
    from text.reading import default_path, find_text

    return find_text(str(data or os.environ.get("MINIDATASET") or default_path()), *columns)


def load_corpus(
    data="", vocab=16000, pairs=20000, test_rows=500, longest=126, run: dict | None = None
) -> Corpus:
    """A random sample of `pairs` training pairs of at most `longest` tokens a side, and the first such `test_rows` test rows.

    Little text gives smaller vocabularies and fewer pairs. With `run`, the config.json of a trained run, in its tokens.
    Everything is kept in runs/.cache, beside the token store it was drawn from, for the next time.
    """
    from data import prepare

    text = text_at(run["data"], run["source"], run["target"]) if run else text_at(data)
    settings = {"source_vocab": vocab, "target_vocab": vocab}
    if run:
        settings = {
            name: run[name] for name in ("source_vocab", "target_vocab", "tokenizer", "max_length")
        }
    prepared = prepare(text, ROOT / "runs" / ".cache", **settings, log=lambda line: None)
    folder = prepared.folder.with_name(
        f"{prepared.folder.name}-benchmark-{pairs}-{test_rows}-{longest}"
    )
    if not (folder / "corpus.json").exists():
        write_corpus(folder, prepared, text, pairs, test_rows, longest)
    return replace(
        read_corpus(folder), data=str(text.path)
    )  # the same files may lie elsewhere by now


def write_corpus(folder: Path, prepared, text, pairs: int, test_rows: int, longest: int) -> None:
    """Draw the sample and write all files; the folder gets its name when it is complete."""
    from engine.cache import lock_folder, new_folder
    from text.cleaning import held_out_rows, normalise_pair, split_to_score
    from text.subwords import encode, special_ids

    tokenizers, lengths = (
        (prepared.source_tokenizer, prepared.target_tokenizer),
        prepared.train.lengths,
    )
    fits = np.flatnonzero(np.maximum(lengths["source"], lengths["target"]) <= longest)
    train = [prepared.train[int(row)] for row in np.random.default_rng(1).permutation(fits)[:pairs]]
    scored = held_out_rows(text)[split_to_score(text)]
    sides = zip(tokenizers, zip(*map(normalise_pair, scored)))
    test = zip(*(map(np.array, encode(tokenizer, lines)) for tokenizer, lines in sides))
    test = [pair for pair in test if all(1 <= len(ids) <= longest for ids in pair)][:test_rows]
    facts = {"data": str(text.path)}
    with lock_folder(folder), new_folder(folder) as building:
        for name, rows in (("train", train), ("test", test)):
            for side, sentences in zip(SIDES, zip(*rows)):
                (building / f"{name}.{side}").write_text(
                    as_words(sentences, side), encoding="utf-8"
                )
        for index, (side, name) in enumerate(zip(SIDES, ("source", "target"))):
            size, special = len(tokenizers[index]), special_ids(tokenizers[index])
            facts |= {f"{name}_vocab": size, f"{name}_ids": special}
            counts = np.bincount(
                np.concatenate([pair[index] for pair in train]), minlength=size
            ).clip(1)
            for vocabulary, gap in (
                (f"opennmt.{side}", "\t"),
                (f"dict.{side}.txt", " "),
            ):  # they add the special words
                lines = (
                    f"{side[0]}{id}{gap}{counts[id]}\n"
                    for id in range(size)
                    if id not in special.values()
                )
                (building / vocabulary).write_text("".join(lines), encoding="utf-8")
        (building / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def as_words(sentences: Iterable[np.ndarray], side: str) -> str:
    """[[1, 2]] → "s1 s2\\n" """
    return "".join(" ".join(f"{side[0]}{token}" for token in ids) + "\n" for ids in sentences)


def as_ids(lines: Iterable[str]) -> list[np.ndarray]:
    """["s1 s2"] → [array([1, 2])]"""
    return [np.array([int(word[1:]) for word in line.split()], np.int64) for line in lines]


def read_corpus(folder: Path | str, test_rows: int = 0) -> Corpus:
    """What `write_corpus` left in `folder`, with so many test rows (0: all); needs numpy alone."""
    folder = Path(folder)
    facts = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    train, test = (
        list(
            zip(
                *(
                    as_ids((folder / f"{name}.{side}").read_text(encoding="utf-8").splitlines())
                    for side in SIDES
                )
            )
        )
        for name in ("train", "test")
    )
    return Corpus(folder, train, test[: test_rows or None], **facts)
