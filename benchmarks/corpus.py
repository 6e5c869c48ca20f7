"""The sentences that all contestants train on, cleaned and tokenised by data.py.

folder = prepare_corpus(data="", vocabulary=16000)   # tokenised once, kept in runs/.cache
corpus = load_corpus(folder)                         # the same sample in every process
source, target = corpus.train[0]                     # token ids without begin and end
"""

import os
from pathlib import Path

import numpy as np

from benchmarks.measuring import ROOT
from data import Prepared, TextSettings, load_prepared, prepare
from text.reading import absolute_path, default_path, find_text

LONGEST = 126  # tokens of a side; with begin or end at most 127


def data_path(data: str) -> str:
    """The flag --data; without it what MINIDATASET names, or else train.py's default."""
    return absolute_path(data or os.environ.get("MINIDATASET") or default_path())


def prepare_corpus(data: str, vocabulary: int) -> Path:
    """Tokenise the data of `data_path`; returns the folder.

    Little text gives smaller vocabularies; 0: as train.py chooses.
    """
    text = find_text(data_path(data))
    settings = TextSettings(source_vocab=vocabulary, target_vocab=vocabulary)
    return prepare(text, ROOT / "runs" / ".cache", settings).folder


def load_corpus(folder: str | Path, pairs: int = 20000) -> Prepared:
    """The data in the folder; `train` is a random sample of `pairs` that are not too long."""
    corpus = load_prepared(Path(folder))
    lengths = corpus.train.lengths
    fits = np.flatnonzero(np.maximum(lengths["source"], lengths["target"]) <= LONGEST)
    rows = np.random.default_rng(1).permutation(fits)[:pairs]
    corpus.train = corpus.train.subset(rows)
    return corpus


def describe(corpus: Prepared) -> str:
    """One line for the head of a table."""
    source, target = (corpus.train.lengths[side].mean() + 1 for side in ("source", "target"))
    return (
        f"{len(corpus.train):,} training pairs of {corpus.summary['path']}, "
        f"mean {source:.1f} source and {target:.1f} target tokens (end token counted), "
        f"vocabularies of {len(corpus.source_tokenizer):,} and {len(corpus.target_tokenizer):,}"
    )
