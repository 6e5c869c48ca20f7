"""One corpus for all contestants: for this project as token ids, for the toolkits as words.

    corpus = load_corpus()              # MINIDATASET, /opt/minidataset or sample/
    corpus.train[0]                     # (source ids, target ids), two arrays without begin and end

`data.prepare` cleans and tokenises the texts; the corpus is a random sample of the training pairs,
the same each time. Token 123 of the source is the word s123, token 45 of the target the word t45:
a toolkit that splits at spaces gets exactly the same sequences.

    train.src  train.tgt  test.src  test.tgt       one sentence a line
    opennmt.src  dict.src.txt  …                   vocabularies for OpenNMT-py and fairseq
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
    """Token ids, without begin and end, and the folder with the same sentences as words."""

    folder: Path
    train: list[tuple[np.ndarray, np.ndarray]]
    test: list[tuple[np.ndarray, np.ndarray]]
    source_vocab: int
    target_vocab: int
    source_ids: dict[str, int]  # {"pad": …, "bos": …, "eos": …}, for `data.Collate`
    target_ids: dict[str, int]
    data: str  # where the texts came from

    @property
    def lengths(self) -> dict[str, np.ndarray]:
        """Tokens of each training sentence, for `data.BucketSampler`."""
        sources, targets = zip(*self.train)
        return {
            "source": np.array([len(ids) for ids in sources], np.int32),
            "target": np.array([len(ids) for ids in targets], np.int32),
        }

    def describe(self) -> str:
        """One line for the head of a table."""
        source, target = (lengths.mean() + 1 for lengths in self.lengths.values())
        return (
            f"{len(self.train):,} training pairs of {self.data}, "
            f"mean {source:.1f} source and {target:.1f} target tokens (end token counted), "
            f"{len(self.test)} test sentences, "
            f"vocabularies of {self.source_vocab:,} and {self.target_vocab:,}"
        )


def load_corpus(
    data: str = "",
    vocab: int = 16000,
    pairs: int = 20000,
    test_rows: int = 500,
    longest: int = 126,
    run: dict | None = None,
) -> Corpus:
    """`pairs` training pairs and `test_rows` test rows of at most `longest` tokens a side.

    Little text gives smaller vocabularies and fewer pairs. run: the config.json of a trained run,
    whose data and tokens are then used. The result is kept in runs/.cache.
    """
    from data import prepare
    from text.reading import default_path, find_text

    if run:
        text = find_text(run["data"], run["source"], run["target"])
        names = ("source_vocab", "target_vocab", "tokenizer", "max_length")
        settings = {name: run[name] for name in names}
    else:
        text = find_text(str(data or os.environ.get("MINIDATASET") or default_path()))
        settings = {"source_vocab": vocab, "target_vocab": vocab}
    prepared = prepare(text, ROOT / "runs" / ".cache", **settings, log=lambda line: None)
    name = f"{prepared.folder.name}-benchmark-{pairs}-{test_rows}-{longest}"
    folder = prepared.folder.with_name(name)
    if not (folder / "corpus.json").exists():
        write_corpus(folder, prepared, text, pairs, test_rows, longest)
    # The same files may have moved since.
    return replace(read_corpus(folder), data=str(text.path))


def write_corpus(folder: Path, prepared, text, pairs: int, test_rows: int, longest: int) -> None:
    """Draw the sample and write all files."""
    from engine.cache import lock_folder, new_folder
    from text.cleaning import held_out_rows, normalise_pair, split_to_score
    from text.subwords import encode, special_ids

    lengths = prepared.train.lengths
    fits = np.flatnonzero(np.maximum(lengths["source"], lengths["target"]) <= longest)
    chosen = np.random.default_rng(1).permutation(fits)[:pairs]
    train = [prepared.train[int(row)] for row in chosen]

    scored = held_out_rows(text)[split_to_score(text)]
    sources, targets = zip(*map(normalise_pair, scored))
    source_ids = encode(prepared.source_tokenizer, sources)
    target_ids = encode(prepared.target_tokenizer, targets)
    test = list(zip(map(np.array, source_ids), map(np.array, target_ids)))
    test = [pair for pair in test if all(1 <= len(ids) <= longest for ids in pair)][:test_rows]

    facts = {"data": str(text.path)}
    with lock_folder(folder), new_folder(folder) as building:
        for name, rows in (("train", train), ("test", test)):
            for side, sentences in zip(SIDES, zip(*rows)):
                file = building / f"{name}.{side}"
                file.write_text(as_words(sentences, side), encoding="utf-8")
        tokenizers = (prepared.source_tokenizer, prepared.target_tokenizer)
        names = ("source", "target")
        for side, name, tokenizer, sentences in zip(SIDES, names, tokenizers, zip(*train)):
            facts[f"{name}_vocab"] = len(tokenizer)
            facts[f"{name}_ids"] = special_ids(tokenizer)
            write_vocabularies(building, side, tokenizer, sentences)
        (building / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def write_vocabularies(folder: Path, side: str, tokenizer, sentences: Iterable) -> None:
    """Every token with its count, for OpenNMT-py and fairseq, which add the special tokens."""
    from text.subwords import special_ids

    special = set(special_ids(tokenizer).values())
    counts = np.bincount(np.concatenate(sentences), minlength=len(tokenizer)).clip(1)
    words = [(f"{side[0]}{id}", counts[id]) for id in range(len(tokenizer)) if id not in special]
    for file, gap in ((f"opennmt.{side}", "\t"), (f"dict.{side}.txt", " ")):
        lines = (f"{word}{gap}{count}\n" for word, count in words)
        (folder / file).write_text("".join(lines), encoding="utf-8")


def as_words(sentences: Iterable[np.ndarray], side: str) -> str:
    r"""[[1, 2]] → "s1 s2\n" """
    return "".join(" ".join(f"{side[0]}{token}" for token in ids) + "\n" for ids in sentences)


def as_ids(lines: Iterable[str]) -> list[np.ndarray]:
    """["s1 s2"] → [array([1, 2])]"""
    return [np.array([int(word[1:]) for word in line.split()], np.int64) for line in lines]


def read_corpus(folder: Path | str, test_rows: int = 0) -> Corpus:
    """The corpus in `folder`, with its first `test_rows` test rows; 0: all.

    This needs numpy alone, because toolkits call it in their own environments.
    """
    folder = Path(folder)
    facts = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    splits = []
    for name in ("train", "test"):
        files = [(folder / f"{name}.{side}").read_text(encoding="utf-8") for side in SIDES]
        sources, targets = (as_ids(text.splitlines()) for text in files)
        splits.append(list(zip(sources, targets)))
    train, test = splits
    return Corpus(folder, train, test[: test_rows or None], **facts)
