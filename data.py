"""The data of the lab, from files of text to batches of token ids.

load       which files, which rows                 text/reading.py; `datasets` where it can
clean      drop what is no translation             text/cleaning.py
tokenise   texts -> token ids                      text/subwords.py
Dataset    ids in flat arrays on disk              TokenizedPairs
batches    pairs of similar length, padded         BucketSampler, Collate

    text = find_text("/opt/minidataset")               # load
    prepared = prepare(text, Path("runs/.cache"))      # clean, tokenise: once, then from the cache
    sampler = BucketSampler(prepared.train.lengths, tokens_per_batch=4096)
    batches = batches_of(prepared.train, sampler, collate_for(prepared), 0, torch.device("cpu"))
    batch = next(batches)                              # a Batch; batch.src is (B, S)

Shapes: B pairs of a batch, S and T tokens of its longest source and target, N real target tokens.
"""

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from engine.cache import lock_folder, new_folder
from engine.checkpoint import load_state
from engine.errors import UserError
from engine.signals import leave_signals_to_main
from engine.telemetry import progress
from text.cleaning import (
    REASONS,
    TELLING_ROWS,
    absurd_ratio,
    clean_pairs,
    held_out_rows,
    like_validation,
    missing_splits,
    normalise,
    report,
    split_to_score,
    without_short_targets,
)
from text.reading import ParallelText, default_path, find_text, sample_notice, short
from text.subwords import encode, load_tokenizer, special_ids, tokenizer_key, train_tokenizer

FORMAT = 3  # of the cache; raise it when the same data and settings give other content
TOKENIZER_LINES = 200_000  # sentences a tokenizer is trained on; more of them change little
LINES_AT_ONCE = 40_000  # lines (20,000 pairs) in memory while tokenising
VALIDATION_ROWS = 4000  # at most, for validation while training; evaluate.py scores all rows


# ------------------------------------------------------------------------ load, clean, tokenise


@dataclass
class Prepared:
    """Everything that training needs of the data."""

    folder: Path
    source_tokenizer: object
    target_tokenizer: object
    train: "TokenizedPairs"
    validation: "TokenizedPairs"
    validation_rows: list[tuple[str, str]]  # raw texts, in the order of `validation`
    summary: dict  # path, counts of dropped pairs, share of unknown tokens, cache key

    def select_like_validation(self, log: Callable) -> None:
        """Leave out of `train` what is unlike validation: pairs in other words, short targets.

        A model learns from its data what to write about, and how much to leave out. With a small
        validation split nothing is left out: the difference may be chance.
        """
        if len(self.validation) < TELLING_ROWS:
            return
        sizes = [len(self.source_tokenizer), len(self.target_tokenizer)]
        self._keep(like_validation(self.train, self.validation, sizes), "unlike validation", log)
        rows = without_short_targets(self.train.lengths, self.validation.lengths)
        self._keep(rows, "short target", log)

    def _keep(self, rows: np.ndarray, reason: str, log: Callable) -> None:
        """Keep these rows of `train`; log and count the others under a key of `REASONS`."""
        total = len(self.train)
        left_out = total - len(rows)
        if left_out == 0:
            return
        log(f"data: {left_out:,} of {total:,} pairs are left out: {REASONS[reason]}")
        self.summary["counts"].update({reason: left_out, "kept": len(rows)})
        self.train = self.train.only(rows)

    def describe(self) -> dict:
        """Facts about the data for JSON; `lengths` counts the sentences of 0, 1, 2, … tokens."""
        return {
            "path": self.summary["path"],
            "counts": self.summary["counts"],
            "unknown": self.summary["unknown"],
            "vocabulary": {
                "source": len(self.source_tokenizer),
                "target": len(self.target_tokenizer),
            },
            "validation_rows": len(self.validation_rows),
            "tokens": {side: int(n.sum()) for side, n in self.train.lengths.items()},
            "lengths": {side: np.bincount(n).tolist() for side, n in self.train.lengths.items()},
        }


def find_and_prepare(config, cache: Path, log: Callable) -> tuple[Path, str, str]:
    """Prepare the data that the flags of train.py name.

    Returns the folder for `load_prepared`, and the paths of data and tokenizer made absolute, so
    that a resumed run finds them from any working directory.
    """
    data = config.data or default_path()
    given = "" if config.data else "no --data given, using "
    if notice := sample_notice(data):
        log(f"data: {given}{data}; {notice}")
    elif not config.data:
        log(f"data: {given}{data}")
    if config.tokenizer and (config.source_vocab > 0 or config.target_vocab > 0):
        log("note: --source_vocab and --target_vocab have no effect with --tokenizer")

    if os.path.exists(os.path.expanduser(data)):  # otherwise it is the name of a hub data set
        # Not realpath: the target of a link may have another name. Not abspath: it takes the `..`
        # of `link/..` for the folder that holds the link.
        data = str(Path(os.getcwd(), os.path.expanduser(data)))
    if data != data.encode(errors="ignore").decode():
        raise UserError(f"the path {data!r} is not UTF-8; rename the folder")
    tokenizer = config.tokenizer
    if tokenizer and Path(tokenizer).is_dir():
        tokenizer = str(Path(tokenizer).absolute())

    text = find_text(data, config.source, config.target)
    for split, files in text.files.items():
        log(f"data: {split} is {short(', '.join(file.name for file in files))}")
    prepared = prepare(
        text,
        cache,
        source_vocab=config.source_vocab,
        target_vocab=config.target_vocab,
        tokenizer=tokenizer,
        max_length=config.max_length,
        log=log,
    )
    return prepared.folder, data, tokenizer


def prepare(
    text: ParallelText,
    cache: Path,
    *,
    source_vocab: int = 0,
    target_vocab: int = 0,
    tokenizer: str = "",
    max_length: int = 512,
    log: Callable = print,
) -> Prepared:
    """Clean and tokenise `text`, or read what an earlier call with the same input left in `cache`.

    The cache key is a hash of the files' content and of every setting that changes the ids.
    Raises `UserError` if no pair is left or the cache cannot be written.
    """
    key = cache_key(text, source_vocab, target_vocab, tokenizer, max_length)
    folder = cache / key
    try:
        if folder.exists():
            try:
                prepared = load_prepared(folder)
                log(f"data: {text.path} ({text.form}), tokenised earlier in {folder}")
                return prepared
            except (OSError, EOFError, ValueError, LookupError, UserError) as damage:
                log(f"data: {folder} is damaged and made again: {short(damage)}")
                shutil.rmtree(folder)
        with lock_folder(folder, log):
            if not folder.exists():  # another process may have made it while we waited
                languages = f"{text.source}→{text.target}"
                log(f"data: {text.path} ({text.form}), {languages}; tokenising into {folder}")
                with new_folder(folder) as building:
                    summary = clean_and_tokenise(
                        text, building, source_vocab, target_vocab, tokenizer, max_length, log
                    )
                    content = json.dumps(summary | {"key": key}, ensure_ascii=False, indent=1)
                    (building / "summary.json").write_text(content, encoding="utf-8")
    except PermissionError as error:  # the cache may belong to another user
        raise UserError(
            f"cannot write to {cache}: {error.strerror}; choose another --run PATH/NAME"
        ) from None
    return load_prepared(folder)


def load_prepared(folder: Path) -> Prepared:
    """What `prepare` left in `folder`. The errors of a damaged folder are left to the caller."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lines = (folder / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [tuple(json.loads(line)) for line in lines]
    tokenizers = [load_tokenizer(str(folder / "tokenizer" / side)) for side in ("source", "target")]
    train, validation = (TokenizedPairs(folder / split) for split in ("train", "validation"))
    if len(rows) != len(validation):
        raise ValueError(f"validation.jsonl has {len(rows)} rows, not {len(validation)}")
    return Prepared(folder, *tokenizers, train, validation, rows, summary)


def cache_key(
    text: ParallelText, source_vocab: int, target_vocab: int, tokenizer: str, max_length: int
) -> str:
    """A hash of everything that the token ids depend on: 16 hexadecimal digits."""
    settings = {
        "format": FORMAT,
        "data": text.fingerprint(),
        "source_vocab": source_vocab,
        "target_vocab": target_vocab,
        "tokenizer": tokenizer_key(tokenizer),
        "max_length": max_length,
    }
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


def began_with(checkpoint: Path, config: dict, text: ParallelText) -> bool:
    """Whether the run of this checkpoint was trained on exactly these files, wherever they lie."""
    folder = checkpoint.parent if checkpoint.is_file() else checkpoint
    names = ("source_vocab", "target_vocab", "tokenizer", "max_length")
    try:
        return load_state(folder)["data_key"] == cache_key(text, *(config[name] for name in names))
    except (OSError, ValueError, KeyError):  # weights without the state of their run
        return False


def clean_and_tokenise(
    text: ParallelText,
    folder: Path,
    source_vocab: int,
    target_vocab: int,
    tokenizer: str,
    max_length: int,
    log: Callable,
) -> dict:
    """The work of `prepare`: write tokenizers and token ids into `folder`. Returns a summary."""
    tokenizers = {}
    if tokenizer:  # one for both sides; a wrong name fails now, not after the cleaning
        tokenizers = dict.fromkeys(("source", "target"), load_tokenizer(tokenizer))

    # Load all rows of validation and test: training pairs that repeat them are dropped below.
    held_out = held_out_rows(text)
    if "validation" in text.files and not held_out["validation"]:
        raise UserError(
            f"{text.path}: the validation split has no rows; add rows, or remove the file: "
            "then it is cut from train"
        )
    for split in missing_splits(text):
        count = len(held_out[split])
        log(f"data: no {split} split; {count:,} pairs are cut from train by a hash of the pair")
    if split_to_score(text) == "validation":
        log("data: no test split; evaluate.py scores validation, and train keeps its rows")

    # Clean. Of each pair the source and the target are a line each; clean text has no line ends.
    counts = Counter()
    clean_file = folder / "clean.txt"
    with clean_file.open("w", encoding="utf-8") as file:
        pairs = clean_pairs(text, held_out, max_length, counts)
        for source, target in progress(pairs, desc="cleaning", unit=" pairs"):
            file.write(f"{source}\n{target}\n")
            counts["kept"] += 1
    require_pairs(text, counts)

    # Tokenise.
    if not tokenizers:
        vocabularies = {
            "source": vocabulary_size(source_vocab, counts["kept"]),
            "target": vocabulary_size(target_vocab, counts["kept"]),
        }
        tokenizers = train_tokenizers(clean_file, counts["kept"], vocabularies, log)
    for side, side_tokenizer in tokenizers.items():
        side_tokenizer.save_pretrained(folder / "tokenizer" / side)
    unknown = tokenise_train(clean_file, folder / "train", tokenizers, max_length, counts)
    clean_file.unlink()
    require_pairs(text, counts)
    if unknown > 0.01:
        raise UserError(
            f"tokenizer {tokenizer} does not know {unknown:.1%} of the tokens of {text.path}; "
            f"choose one made for {text.source} and {text.target}, or leave --tokenizer out"
        )
    rows = spread(held_out["validation"], VALIDATION_ROWS)
    if not rows:
        raise UserError(
            f"{text.path}: {counts['kept']:,} pairs are too few to cut 1 % off for validation; "
            "add pairs, or a validation file"
        )
    tokenise_validation(rows, folder, tokenizers, max_length, log)

    log(report(counts))
    sizes = ", ".join(f"{side} vocabulary {len(of):,}" for side, of in tokenizers.items())
    log(f"tokens: {sizes}, unknown {unknown:.2%}")
    return {"counts": dict(counts), "path": text.path, "unknown": unknown}


def require_pairs(text: ParallelText, counts: Counter) -> None:
    """Raise `UserError` if fewer than two training pairs are left."""
    if counts["kept"] < 2:
        raise UserError(
            f"{text.path}: {counts['kept']} training pairs left, at least 2 are needed; "
            f"{report(counts)}"
        )


def vocabulary_size(asked: int, pairs: int) -> int:
    """Tokens of a vocabulary. Automatic if `asked` is 0: a fifth of the pairs.

    So each token is seen often enough to be learned. At least 1,000, at most 16,000.
    """
    return asked or min(16000, max(1000, pairs // 5))


def spread(rows: list, count: int) -> list:
    """At most `count` of the rows, evenly from all over: corpora stand one behind another."""
    count = min(count, len(rows))
    return [rows[number * len(rows) // count] for number in range(count)]


def train_tokenizers(clean_file: Path, pairs: int, vocabularies: dict[str, int], log) -> dict:
    """A tokenizer for each side, trained on at most TOKENIZER_LINES lines from all over."""
    every = math.ceil(pairs / TOKENIZER_LINES)  # one pair in `every` is read
    tokenizers = {}
    for first, (side, size) in enumerate(vocabularies.items()):
        log(f"tokens: training the {side} tokenizer on {math.ceil(pairs / every):,} sentences")
        with clean_file.open(encoding="utf-8") as file:
            lines = islice(file, first, None, 2 * every)  # a pair has two lines
            tokenizers[side] = train_tokenizer((line.rstrip("\n") for line in lines), size)
    return tokenizers


def tokenise_train(
    clean_file: Path, folder: Path, tokenizers: dict, max_length: int, counts: Counter
) -> float:
    """Write the ids of all clean pairs but those too long or too unlike in length.

    Returns the share of unknown tokens.
    """
    writer = TokenWriter(folder, {side: len(of) for side, of in tokenizers.items()})
    unknown = total = 0
    bar = progress(total=counts["kept"], desc="tokenising", unit=" pairs")
    counts["kept"] = 0
    with clean_file.open(encoding="utf-8") as file:
        while lines := [line.rstrip("\n") for line in islice(file, LINES_AT_ONCE)]:
            encoded = {
                "source": encode_rows(tokenizers["source"], lines[0::2]),
                "target": encode_rows(tokenizers["target"], lines[1::2]),
            }
            kept = worth_keeping(
                encoded["source"].lengths, encoded["target"].lengths, max_length, counts
            )
            for side, rows in encoded.items():
                ids = rows.ids[np.repeat(kept, rows.lengths)]
                writer.write(side, Rows(ids, rows.lengths[kept]))
                total += len(ids)
                if tokenizers[side].unk_token_id is not None:
                    unknown += int((ids == tokenizers[side].unk_token_id).sum())
            bar.update(len(kept))
    bar.close()
    writer.close()
    return unknown / max(total, 1)


def worth_keeping(
    source: np.ndarray, target: np.ndarray, max_length: int, counts: Counter
) -> np.ndarray:
    """Which pairs of these lengths to keep, (pairs,) bool. Counts the others, by reason."""
    too_long = np.maximum(source, target) >= max_length  # begin or end needs one place
    lopsided = absurd_ratio(source, target) & ~too_long
    empty = (np.minimum(source, target) == 0) & ~too_long & ~lopsided
    kept = ~(too_long | lopsided | empty)
    reasons = {"too long": too_long, "length ratio": lopsided, "empty": empty, "kept": kept}
    for reason, pairs in reasons.items():
        if pairs.any():
            counts[reason] += int(pairs.sum())
    return kept


def tokenise_validation(rows, folder: Path, tokenizers: dict, max_length: int, log) -> None:
    """Write the validation rows, raw and as ids. No row is dropped; over-long ones are cut."""
    longest = max_length - 1  # begin or end needs one place
    writer = TokenWriter(folder / "validation", {side: len(of) for side, of in tokenizers.items()})
    for index, side in enumerate(("source", "target")):
        encoded = encode(tokenizers[side], [normalise(row[index]) for row in rows], max_length)
        cut = sum(len(ids) > longest for ids in encoded)
        if cut:
            log(f"validation: {cut} {side} sentences are cut to {longest} tokens for the loss")
        writer.write(side, flatten([ids[:longest] for ids in encoded]))
    writer.close()
    with (folder / "validation.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


# ------------------------------------------------------------------------ Dataset


class Rows(NamedTuple):
    """Token ids of sentences, one after another, (N,), and the number in each, (sentences,)."""

    ids: np.ndarray
    lengths: np.ndarray


class TokenizedPairs(Dataset):
    """Pairs as token ids without begin and end: `pairs[i]` is (source ids, target ids).

    A folder holds for each side the ids of all sentences in one array, and their lengths. The ids
    stay on disk, mapped into memory; 12 bytes a sentence are held: its length and its place, and 8
    for its number if `rows` chooses some. So 26 million pairs fit, and a batch is one look-up.
    """

    def __init__(self, folder: Path, rows: np.ndarray | slice = slice(None)):
        self.folder = folder
        self.rows = rows  # numbers of the stored pairs that this Dataset has
        self.lengths, self._starts, self._ids = {}, {}, {}
        for side in ("source", "target"):
            lengths = np.load(folder / f"{side}.lengths.npy")
            self.lengths[side] = lengths[rows]
            self._starts[side] = starts_of(lengths)[:-1][rows]
            # A plain array over the map: slices of np.memmap objects cost ten times as much.
            self._ids[side] = np.asarray(np.load(folder / f"{side}.ids.npy", mmap_mode="r"))
            if len(self._ids[side]) != lengths.sum():
                raise ValueError(f"{side}.ids.npy and {side}.lengths.npy do not fit together")

    def __len__(self) -> int:
        return len(self.lengths["source"])

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._sentence("source", index), self._sentence("target", index)

    def __getitems__(self, rows: np.ndarray) -> tuple[Rows, Rows]:
        """Both sides of these pairs. The DataLoader calls it: no loop over sentences."""
        return self._gather("source", rows), self._gather("target", rows)

    def parts(self, size: int = 20_000) -> Iterator[tuple[Rows, Rows]]:
        """Both sides of all pairs, `size` pairs at a time: all ids might not fit into memory."""
        for first in range(0, len(self), size):
            yield self.__getitems__(np.arange(first, min(first + size, len(self))))

    def only(self, rows: np.ndarray) -> "TokenizedPairs":
        """A Dataset of these pairs alone, by their numbers in this one."""
        stored = np.load(self.folder / "source.lengths.npy", mmap_mode="r")
        numbers = np.arange(len(stored))[self.rows]
        return TokenizedPairs(self.folder, numbers[rows])

    def _sentence(self, side: str, index: int) -> np.ndarray:
        start = self._starts[side][index]
        return self._ids[side][start : start + self.lengths[side][index]]

    def _gather(self, side: str, rows: np.ndarray) -> Rows:
        lengths = self.lengths[side][rows].astype(np.int64)
        return Rows(self._ids[side][places_of(lengths, self._starts[side][rows])], lengths)

    def __reduce__(self):
        # Pickled for a worker process: by name, so that the worker maps the files itself.
        return TokenizedPairs, (self.folder, self.rows)


class TokenWriter:
    """Writes a folder for `TokenizedPairs` chunk by chunk, so that memory stays flat."""

    def __init__(self, folder: Path, vocabularies: dict[str, int]):
        folder.mkdir(parents=True)
        self.folder = folder
        self.vocabularies = vocabularies
        self.dtypes = {
            side: np.dtype(np.uint16 if size <= 2**16 else np.int32)
            for side, size in vocabularies.items()
        }
        self.files = {side: open(folder / f"{side}.ids", "wb") for side in vocabularies}
        self.lengths = {side: [] for side in vocabularies}

    def write(self, side: str, rows: Rows) -> None:
        """Append sentences to a side. Raises `UserError` for an id beyond the vocabulary."""
        size = self.vocabularies[side]
        if len(rows.ids) and rows.ids.max() >= size:  # 16 bits would wrap around
            raise UserError(
                f"the {side} tokenizer gives the id {rows.ids.max()}, but has {size} tokens; "
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


def encode_rows(tokenizer, lines: Sequence[str]) -> Rows:
    """The ids of these lines, without begin and end."""
    return flatten(encode(tokenizer, lines))


def flatten(rows: Iterable[Sequence[int]]) -> Rows:
    """[[5, 6], [8]] -> Rows(ids=[5, 6, 8], lengths=[2, 1])"""
    rows = list(rows)
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return Rows(np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths)


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """Where each sentence begins in the array of all ids, and the end: (n,) -> (n + 1,)"""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def places_of(lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """start, start + 1, … of each row, `length` of them: (rows,), (rows,) -> (lengths.sum(),)

    >>> places_of(np.array([2, 3]), np.array([10, 50]))
    array([10, 11, 50, 51, 52])
    """
    before = np.cumsum(lengths) - lengths  # what the rows above hold
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


# ------------------------------------------------------------------------ batches


def default_tokens_per_batch(prepared: Prepared, device: torch.device) -> int:
    """4,096 tokens on a CPU, 16,384 on a GPU; fewer for little data: about 100 steps an epoch."""
    most = 4096 if device.type == "cpu" else 16384
    return int(min(most, max(1024, prepared.train.lengths["target"].sum() // 100)))


class BucketSampler(Sampler[np.ndarray]):
    """Endless batches of pairs of similar length, under a budget of tokens, planned for all ranks.

    `tokens_per_batch` bounds the padded tokens of either side in one optimiser step, over all ranks
    and micro-batches. The pairs of a step are dealt to `world_size` · `accumulate` micro-batches;
    this rank's come out one after another. Every epoch holds every pair once, in an order drawn
    from (seed, epoch). The batches depend on the step alone, so a resumed run sets `step`.
    """

    def __init__(
        self,
        lengths: dict[str, np.ndarray],
        tokens_per_batch: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
    ):
        # Lengths with begin or end, in the smallest signed type that holds them and their
        # difference: less memory, and numpy sorts 16-bit integers in linear time.
        longest = 1 + max(int(side.max(initial=0)) for side in lengths.values())
        dtype = np.min_scalar_type(-longest - 1)
        self.source = lengths["source"].astype(dtype) + dtype.type(1)
        self.target = lengths["target"].astype(dtype) + dtype.type(1)
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.accumulate = accumulate
        self.parts = world_size * accumulate  # micro-batches of a step, over all ranks
        if len(self.source) < self.parts:
            raise UserError(
                f"{len(self.source)} training pairs are too few for {world_size} processes × "
                f"{accumulate} micro-batches; use fewer"
            )
        # A step is a slice of the pairs in order of length. Where the slices begin and end depends
        # on the lengths alone, so it is the same in every epoch.
        widths = np.maximum(self.source, self.target)
        self.bounds = cut_batches(np.sort(widths, kind="stable"), tokens_per_batch, self.parts)
        self.step = 0  # optimiser steps handed out; set it to continue from there
        self._planned = (None, None, None)  # an epoch, its pairs by length, the order of its steps

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps in which every pair comes once, over all ranks."""
        return len(self.bounds) - 1

    def epoch_plan(self, epoch: int) -> Iterator[np.ndarray]:
        """The pairs of each step of an epoch, over all ranks."""
        if self._planned[0] != epoch:
            random = np.random.default_rng((self.seed, epoch))
            # Shuffle, then sort: pairs of equal lengths stand in random order, so that batches
            # have other pairs in every epoch.
            pairs = random.permutation(np.arange(len(self.source), dtype=np.int32))
            order = pairs[order_by_length(self.source[pairs], self.target[pairs])]
            self._planned = (epoch, order, random.permutation(self.steps_per_epoch))
        _, order, steps = self._planned
        for step in steps:
            yield order[self.bounds[step] : self.bounds[step + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        """This rank's micro-batches, from the current step on, without end."""
        while True:
            epoch, done = divmod(self.step, self.steps_per_epoch)
            for pairs in islice(self.epoch_plan(epoch), done, None):
                self.step += 1
                for micro_batch in range(self.accumulate):
                    yield pairs[micro_batch * self.world_size + self.rank :: self.parts]

    def target_tokens(self, step: int) -> Iterator[int]:
        """Real target tokens, over all ranks, of the steps after `step`: divisors of the loss."""
        while True:
            epoch, done = divmod(step, self.steps_per_epoch)
            for pairs in islice(self.epoch_plan(epoch), done, None):
                step += 1
                yield int(self.target[pairs].sum())

    def steps_by_length(self) -> list[np.ndarray]:
        """The pairs of each step, the shortest first."""
        return np.split(order_by_length(self.source, self.target), self.bounds[1:-1])

    def heaviest_steps(self) -> list[np.ndarray]:
        """The steps that need most memory for layers, for logits, for attention matrices.

        Of each the pairs, the longest first. A trial of these shows whether all steps fit.
        """
        steps = self.steps_by_length()
        loads = []
        for step in steps:
            source, target = self.source[step].astype(int), self.target[step].astype(int)
            layers = len(step) * (source.max() + target.max())
            attention = len(step) * max(source.max(), target.max()) ** 2
            loads.append((layers, target.sum(), attention))
        heaviest = np.argmax(loads, axis=0).tolist()  # by each of the three
        return [steps[number][::-1] for number in dict.fromkeys(heaviest)]


def order_by_length(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """An order of the pairs in which neighbours are alike in both lengths, (n,) row numbers.

    By the longer side; within it by how much the source is longer, rising and falling in turn. So
    the other side has no jump where one length ends and the next begins, and a batch across that
    place has little padding. Pairs of equal lengths keep their order.
    """
    longer = np.maximum(source, target)
    difference = source - target
    zigzag = np.where(longer % 2, -difference, difference)
    return np.lexsort((zigzag, longer))  # the last key counts first


def cut_batches(widths: np.ndarray, budget: int, smallest: int = 1) -> list[int]:
    """Cut a row of sentence widths so that pairs · widest <= budget in each piece.

    Returns the bounds, one more than pieces. No piece has fewer than `smallest` pairs, whatever the
    budget.
    """
    bounds = [0]
    while bounds[-1] < len(widths):
        first = bounds[-1]
        most = max(budget // int(widths[first]), smallest)  # if all were as narrow as the first
        # widest[i] · (i + 1): padded tokens of a piece of i + 1 pairs. It rises with i.
        widest = np.maximum.accumulate(widths[first : first + most])
        padded = widest * np.arange(1, len(widest) + 1)
        fits = int(np.searchsorted(padded, budget, side="right"))
        bounds.append(min(len(widths), first + max(fits, smallest)))
    # A last piece that is too small takes pairs from the piece before it, or joins it if that would
    # then be too small itself.
    if len(bounds) > 2 and bounds[-1] - bounds[-2] < smallest:
        bounds[-2] = bounds[-1] - smallest
        if bounds[-2] - bounds[-3] < smallest:
            del bounds[-2]
    return bounds


@dataclass
class Batch:
    """B pairs padded to S source and T target tokens, with N real target tokens.

    The target needs no padding mask: its padding stands behind the sentence, where the causal mask
    hides it, and `real` leaves out what the decoder predicts there.
    """

    src: torch.Tensor  # (B, S) ids; each row ends with eos
    src_pad: torch.Tensor  # (B, S) bool, True = padding
    tgt_in: torch.Tensor  # (B, T) the decoder's input (teacher forcing): bos, then the target
    tgt_out: torch.Tensor  # (N,) what it is to predict, row after row: the target, then eos
    real: torch.Tensor  # (N,) positions in the flattened (B · T) tgt_in that predict tgt_out
    source_tokens: int  # real tokens, eos included
    target_tokens: int  # N

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The arguments of `SummedLoss`."""
        return self.src, self.src_pad, self.tgt_in, self.real, self.tgt_out

    @property
    def places(self) -> int:
        """Tokens of both sides with their padding: B · (S + T)."""
        return self.src.numel() + self.tgt_in.numel()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> tensor."""
        return {name: value for name, value in vars(self).items() if torch.is_tensor(value)}

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; from pinned memory the copy overlaps with computing."""
        moved = {n: tensor.to(device, non_blocking=True) for n, tensor in self.tensors().items()}
        return replace(self, **moved)

    def pin_memory(self) -> "Batch":
        """The same batch in pinned memory. The DataLoader calls it."""
        return replace(self, **{name: t.pin_memory() for name, t in self.tensors().items()})


@dataclass
class Collate:
    """Pairs -> `Batch`. Lengths are padded to a multiple of `pad_multiple`, at most `longest`.

    A multiple gives a compiler fewer shapes.
    """

    source_ids: dict[str, int]  # {"pad": …, "bos": …, "eos": …}
    target_ids: dict[str, int]
    pad_multiple: int = 1
    longest: int = 2**31

    def __call__(
        self, pairs: tuple[Rows, Rows] | list[tuple[Sequence[int], Sequence[int]]]
    ) -> Batch:
        if isinstance(pairs, tuple):  # by TokenizedPairs.__getitems__
            source, target = pairs
        else:
            source, target = (flatten(side) for side in zip(*pairs))
        src, src_pad = self.pad_sources(source)
        lengths = target.lengths + 1  # with bos or eos
        width = self._round_up(lengths.max())
        real = places_of(lengths, np.arange(len(lengths)) * width)  # row r: r·T, r·T + 1, …
        tgt_in = np.full((len(lengths), width), self.target_ids["pad"], np.int64)
        tgt_in.ravel()[real] = insert(target, self.target_ids["bos"], before=True)
        tgt_out = insert(target, self.target_ids["eos"])
        return Batch(
            src=src,
            src_pad=src_pad,
            tgt_in=torch.from_numpy(tgt_in),
            tgt_out=torch.from_numpy(tgt_out),
            real=torch.from_numpy(real),
            source_tokens=int(source.lengths.sum()) + len(source.lengths),
            target_tokens=len(real),
        )

    def pad_sources(self, sources: Rows | list[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Source ids -> (src, src_pad), each (B, S); eos is added to each row.

        The one place where a padding mask is made. It follows PyTorch: bool, True = padding, which
        attention ignores. (The `attention_mask` of Hugging Face is the opposite: 1 = keep.)
        """
        rows = sources if isinstance(sources, Rows) else flatten(sources)
        lengths = rows.lengths + 1  # with eos
        width = self._round_up(lengths.max())
        real = places_of(lengths, np.arange(len(lengths)) * width)
        src = np.full((len(lengths), width), self.source_ids["pad"], np.int64)
        src.ravel()[real] = insert(rows, self.source_ids["eos"])
        # Set by the lengths, not by `src == pad`: some tokenizers use one id for pad and eos.
        src_pad = np.ones(src.shape, bool)
        src_pad.ravel()[real] = False
        return torch.from_numpy(src), torch.from_numpy(src_pad)

    def _round_up(self, width: np.int64) -> int:
        return min(math.ceil(width / self.pad_multiple) * self.pad_multiple, self.longest)


def collate_for(prepared: Prepared, pad_multiple: int = 1, longest: int = 2**31) -> Collate:
    """The `Collate` that knows the special ids of these tokenizers."""
    source_ids = special_ids(prepared.source_tokenizer)
    target_ids = special_ids(prepared.target_tokenizer)
    return Collate(source_ids, target_ids, pad_multiple, longest)


def insert(rows: Rows, token: int, before: bool = False) -> np.ndarray:
    """The ids with `token` at the end of each row, or at its beginning: (N,) -> (N + rows,)"""
    result = np.full(len(rows.ids) + len(rows.lengths), token, np.int64)
    starts = starts_of(rows.lengths + 1)[:-1]
    if before:
        starts = starts + 1
    result[places_of(rows.lengths, starts)] = rows.ids
    return result


def batches_of(
    pairs: Dataset, sampler: BucketSampler, collate: Collate, workers: int, device: torch.device
) -> Iterator[Batch]:
    """The sampler's micro-batches on the device, without end. `close()` ends worker processes."""
    loader = DataLoader(
        pairs,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=leave_signals_to_main,
    )
    # iter(loader) draws a seed from torch's generator. It runs now, not at the first batch, when
    # the generator is dropout's.
    batches = (batch.to(device) for batch in loader)
    return one_ahead(batches, device) if device.type == "cuda" else batches


def one_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches; a thread makes each and sends it to the GPU while the one before is used."""
    # Without set_device the thread would take GPU 0, on every rank.
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,)) as thread:
        coming = thread.submit(next, batches)
        while True:
            batch = coming.result()
            coming = thread.submit(next, batches)
            yield batch
