"""The data of the lab, from text files to batches of token ids. Read it from top to bottom.

load       find the files, read their rows         text/reading.py, text/formats.py, `datasets`
clean      drop pairs that are not translations    text/cleaning.py, text/selection.py
tokenise   texts -> token ids                      text/subwords.py
Dataset    token ids in flat arrays on disk        TokenizedPairs in text/rows.py
cache      keep all this for later runs            prepare, Prepared
batches    pairs of similar length, padded         BucketSampler, Collate

    text = find_text("/opt/minidataset")               # load
    # clean, tokenise: once, then from the cache
    prepared = prepare(text, Path("runs/.cache"), TextSettings())
    sampler = BucketSampler(prepared.train.lengths, tokens_per_batch=4096)
    batches = batches_of(prepared.train, sampler, collate_for(prepared), 0, torch.device("cpu"))
    batch = next(batches)                              # a Batch; batch.src is (B, S)

Shapes: B pairs of a batch, S and T tokens of its longest source and target, N real target tokens.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from engine.cache import lock_folder, make_way, new_folder
from engine.errors import UserError
from engine.meters import Announcer
from engine.signals import leave_signals_to_main
from engine.telemetry import progress_bar
from text.cleaning import (
    REASONS,
    clean_pairs,
    describe_counts,
    held_out_rows,
    missing_splits,
    normalise,
    split_to_score,
    worth_keeping,
)
from text.reading import (
    SAMPLE_NOTICE,
    ParallelText,
    absolute_path,
    count_rows,
    default_path,
    find_text,
    is_sample,
    short,
)
from text.rows import SIDES, Rows, TokenizedPairs, TokenWriter, add_token, flatten, pad
from text.selection import (
    MIN_VALIDATION_ROWS,
    evenly_spaced,
    like_validation,
    without_short_targets,
)
from text.subwords import (
    encode,
    load_tokenizer,
    load_tokenizers,
    special_ids,
    tokenizer_key,
    train_tokenizer,
)

FORMAT = 4  # of the cache; raise it when the same data and settings give other pairs or ids
TOKENIZER_LINES = 200_000  # sentences a tokenizer is trained on; more of them change little
LINES_AT_ONCE = 40_000  # lines (two for each pair) in memory while tokenising
VALIDATION_ROWS = 4000  # at most, for validation while training; evaluate.py scores all rows
UNKNOWN = 0.01  # the largest share of unknown tokens


@dataclass(frozen=True)
class TextSettings:
    """What token ids depend on besides the text: flags of train.py, and part of the cache key."""

    source_vocab: int = 0  # tokens; 0: automatic
    target_vocab: int = 0
    tokenizer: str = ""  # a pretrained one for both sides, a folder or a name; "": train two
    max_length: int = 512  # tokens; a pair with as many on a side is left out

    @classmethod
    def of(cls, config) -> "TextSettings":
        """Taken from the settings of train.py, which have the same names."""
        values = {}
        for field in fields(cls):
            values[field.name] = getattr(config, field.name)
        return cls(**values)

    def for_pairs(self, pairs: int) -> "TextSettings":
        """The same with automatic vocabulary sizes filled in, for this number of training pairs.

        A fifth of the pairs, so that each token is seen often enough to be learned; at least 1,000
        and at most 16,000.
        """
        automatic = min(16000, max(1000, pairs // 5))
        return replace(
            self,
            source_vocab=self.source_vocab or automatic,
            target_vocab=self.target_vocab or automatic,
        )


# ------------------------------------------------------------------------ load, clean, tokenise


def _clean_and_tokenise(
    text: ParallelText, folder: Path, settings: TextSettings, log: Callable
) -> None:
    """Write tokenizers, token ids and a summary of `text` to `folder`.

    `prepare` calls it once for the same data and settings.
    """
    tokenizers = {}
    if settings.tokenizer:
        # Loaded first, so that a wrong name fails before the cleaning.
        tokenizers = load_tokenizers(settings.tokenizer)

    # -------- load: all rows of validation and test, raw
    held_out = _load_held_out(text, log)

    # -------- clean: this also drops training pairs that share a side with a held-out row
    counts: Counter[str] = Counter()  # rows read, rows kept, rows dropped for each of `REASONS`
    clean_file = folder / "clean.txt"
    pairs = clean_pairs(text, held_out, settings.max_length, counts)
    announce = Announcer("cleaning", count_rows(text), log)
    with clean_file.open("w", encoding="utf-8") as file:
        # The source on one line, the target on the next: clean text has no line breaks.
        for source, target in progress_bar(pairs, desc="cleaning", unit=" pairs"):
            file.write(f"{source}\n{target}\n")
            counts["kept"] += 1
            announce(counts["read"])
    _require_pairs(text, counts)

    # -------- tokenise
    if not tokenizers:
        tokenizers = _train_tokenizers(clean_file, counts["kept"], settings, log)
    for side in SIDES:
        tokenizers[side].save_pretrained(folder / "tokenizer" / side)
    train = folder / "train"
    announce = Announcer("tokenising", counts["kept"], log)
    unknown = _tokenise_train(clean_file, train, tokenizers, settings.max_length, counts, announce)
    clean_file.unlink()
    _require_pairs(text, counts)  # again: tokenising drops pairs that are too long in tokens
    if unknown > UNKNOWN:
        raise UserError(
            f"tokenizer {settings.tokenizer} does not know {unknown:.1%} of the tokens of "
            f"{text.path}; choose one made for {text.source} and {text.target}, or leave "
            "--tokenizer out"
        )
    rows = evenly_spaced(held_out["validation"], VALIDATION_ROWS)
    if not rows:
        raise UserError(
            f"{text.path}: {counts['kept']:,} pairs are too few to cut 1 % off for validation; "
            "add pairs, or a validation file"
        )
    _tokenise_validation(rows, folder, tokenizers, settings.max_length, log)

    log(describe_counts(counts))
    log(
        f"tokens: source vocabulary {len(tokenizers['source']):,}, "
        f"target vocabulary {len(tokenizers['target']):,}, unknown {unknown:.2%}"
    )
    summary = {
        "counts": counts,
        "path": text.path,
        "fingerprint": text.fingerprint(),  # by which evaluate.py knows the data again
        "is_sample": is_sample(text),
        "unknown": unknown,
    }
    content = json.dumps(summary, ensure_ascii=False, indent=1)
    (folder / "summary.json").write_text(content, encoding="utf-8")


def _load_held_out(text: ParallelText, log: Callable) -> dict[str, list[tuple[str, str]]]:
    """The raw rows of validation and test; those of `missing_splits` are cut from train.

    Raises `UserError` for a file without rows, or without a row that has both sides. This includes
    the test file, which is scored only after the training.
    """
    held_out = held_out_rows(text)
    for split, rows in held_out.items():
        if split not in text.files:
            continue
        if not rows:
            raise UserError(
                f"{text.path}: the {split} split has no rows; add rows, or remove the file: "
                "then another split takes its place"
            )
        empty = 0
        for source, target in rows:
            if not normalise(source) or not normalise(target):
                empty += 1
        if empty == len(rows):
            raise UserError(
                f"{text.path}: every row of the {split} split has an empty side; add the texts"
            )
        if empty:
            log(f"data: {empty:,} of {len(rows):,} rows of {split} have an empty side")
    return held_out


def _require_pairs(text: ParallelText, counts: Counter) -> None:
    """Raise `UserError` if fewer than two training pairs are left."""
    if counts["kept"] < 2:
        raise UserError(
            f"{text.path}: {counts['kept']} training pairs left, at least 2 are needed; "
            f"{describe_counts(counts)}"
        )


def _train_tokenizers(clean_file: Path, pairs: int, settings: TextSettings, log: Callable) -> dict:
    """A tokenizer for each side, trained on at most TOKENIZER_LINES evenly spaced sentences."""
    sizes = asdict(settings.for_pairs(pairs))
    step = math.ceil(pairs / TOKENIZER_LINES)  # one pair in this many is read
    count = math.ceil(pairs / step)
    tokenizers = {}
    for first_line, side in enumerate(SIDES):
        log(f"tokens: training the {side} tokenizer on {count:,} sentences")
        with clean_file.open(encoding="utf-8") as file:
            # A pair has two lines, so the next pair that is read begins 2 * step lines later.
            lines = islice(file, first_line, None, 2 * step)
            sentences = [line.rstrip("\n") for line in lines]
        size = sizes[f"{side}_vocab"]
        tokenizers[side] = train_tokenizer(sentences, size)
    return tokenizers


def _tokenise_train(
    clean_file: Path,
    folder: Path,
    tokenizers: dict,
    max_length: int,
    counts: Counter,
    announce: Callable,
) -> float:
    """Write the ids of the clean pairs, except those that `worth_keeping` rejects.

    Returns the share of unknown tokens.
    """
    writer = TokenWriter(folder, tokenizers)
    unknown = 0  # tokens
    total = 0
    bar = progress_bar(total=counts["kept"], desc="tokenising", unit=" pairs")
    done = 0  # pairs
    counts["kept"] = 0  # counted anew by `worth_keeping`
    with clean_file.open(encoding="utf-8") as file:
        # In chunks, so that memory use does not grow with the data.
        while lines := [line.rstrip("\n") for line in islice(file, LINES_AT_ONCE)]:
            encoded = {}
            for first_line, side in enumerate(SIDES):
                sentences = encode(tokenizers[side], lines[first_line::2])
                encoded[side] = flatten(sentences)
            source_lengths = encoded["source"].lengths
            target_lengths = encoded["target"].lengths
            kept = worth_keeping(source_lengths, target_lengths, max_length, counts)  # (pairs,)
            for side, rows in encoded.items():
                kept_tokens = np.repeat(kept, rows.lengths)  # (tokens,) bool
                ids = rows.ids[kept_tokens]
                writer.write(side, Rows(ids, rows.lengths[kept]))
                total += len(ids)
                # Our own tokenizers spell unknown characters in bytes and have no such token.
                unknown_id = tokenizers[side].unk_token_id
                if unknown_id is not None:
                    unknown += np.count_nonzero(ids == unknown_id)
            bar.update(len(kept))
            done += len(kept)
            announce(done)
    bar.close()
    writer.close()
    return unknown / max(total, 1)


def _tokenise_validation(
    rows: list[tuple[str, str]],
    folder: Path,
    tokenizers: dict,
    max_length: int,
    log: Callable,
) -> None:
    """Write the validation rows, raw and as ids. No row is dropped; overlong ones are cut."""
    longest = max_length - 1  # bos or eos needs one position
    writer = TokenWriter(folder / "validation", tokenizers)
    for side, texts in zip(SIDES, zip(*rows)):
        # One token more than is kept shows which sentences are cut.
        lines = [normalise(text) for text in texts]
        encoded = encode(tokenizers[side], lines, max_length)
        shortened = [ids[:longest] for ids in encoded]
        writer.write(side, flatten(shortened))
        cut = sum(len(ids) > longest for ids in encoded)
        if cut:
            log(f"validation: {cut} {side} sentences are cut to {longest} tokens for the loss")
    writer.close()
    with (folder / "validation.jsonl").open("w", encoding="utf-8") as file:
        for row in rows:
            line = json.dumps(row)
            file.write(f"{line}\n")


# ------------------------------------------------------------------------ the cache: tokenise once


@dataclass
class Prepared:
    """Everything that training needs of the data."""

    folder: Path  # its name is the cache key
    source_tokenizer: Any
    target_tokenizer: Any
    train: TokenizedPairs
    validation: TokenizedPairs
    validation_rows: list[tuple[str, str]]  # raw texts, in the order of `validation`
    summary: dict  # path, fingerprint, counts of kept and dropped pairs, share of unknown tokens

    def select_like_validation(self, log: Callable) -> None:
        """Leave out training pairs that are unlike validation: in their words or their lengths.

        A model learns from its data what to write about, and how much to leave out. With a small
        validation split no pair is left out, because the difference may be chance.
        """
        if len(self.validation) < MIN_VALIDATION_ROWS:
            return
        vocabularies = [len(self.source_tokenizer), len(self.target_tokenizer)]
        rows = like_validation(self.train, self.validation, vocabularies)
        self._keep(rows, "unlike validation", log)
        rows = without_short_targets(self.train.lengths, self.validation.lengths)
        self._keep(rows, "short target", log)

    def _keep(self, rows: np.ndarray, reason: str, log: Callable) -> None:
        """Keep these rows of `train`. Log and count the others under `reason`, of `REASONS`."""
        total = len(self.train)
        left_out = total - len(rows)
        if left_out == 0:
            return
        log(f"data: {left_out:,} of {total:,} pairs are left out: {REASONS[reason]}")
        counts = self.summary["counts"]
        counts[reason] = left_out
        counts["kept"] = len(rows)
        self.train = self.train.subset(rows)

    def describe(self) -> dict:
        """Facts about the data, as JSON types. `lengths` counts sentences of 0, 1, 2, … tokens."""
        tokens = {}
        lengths = {}
        for side, of_train in self.train.lengths.items():
            tokens[side] = int(of_train.sum())
            lengths[side] = np.bincount(of_train).tolist()
        return self.summary | {
            "vocabulary": {
                "source": len(self.source_tokenizer),
                "target": len(self.target_tokenizer),
            },
            "validation_rows": len(self.validation_rows),
            "tokens": tokens,
            "lengths": lengths,
        }


def find_and_prepare(config, cache: Path, log: Callable) -> tuple[Path, str, str]:
    """Prepare the data that the flags of train.py name.

    Returns the folder for `load_prepared`, and the absolute paths of data and tokenizer, so that a
    resumed run finds them from any working directory.
    """
    data = config.data
    if not data:
        data = default_path()
        log(f"data: no --data given, using {data}")
    data = absolute_path(data)
    settings = TextSettings.of(config)
    settings = replace(settings, tokenizer=absolute_path(settings.tokenizer))
    sizes_given = settings.source_vocab or settings.target_vocab
    if settings.tokenizer and sizes_given:
        log("note: --source_vocab and --target_vocab have no effect with --tokenizer")

    text = find_text(data, config.source, config.target, log)
    if is_sample(text):
        log(f"data: {SAMPLE_NOTICE}")
    for split, files in text.files.items():
        names = short(", ".join(file.name for file in files))
        log(f"data: {split} is {names}")
    for split in missing_splits(text):
        log(f"data: no {split} split; 1 % of the pairs are cut from train, by a hash of the pair")
    if split_to_score(text) == "validation":
        log("data: no test split; evaluate.py scores validation, and train keeps its rows")
    prepared = prepare(text, cache, settings, log)
    return prepared.folder, data, settings.tokenizer


def prepare(
    text: ParallelText, cache: Path, settings: TextSettings, log: Callable = print
) -> Prepared:
    """Clean and tokenise `text`, or read the result of an earlier call from `cache`.

    The cache key is a hash of the files' content and of every setting that changes the ids.
    Raises `UserError` if no pair is left or the cache cannot be written.
    """
    folder = cache / _cache_key(text, settings)
    try:
        prepared = _load_if_intact(folder)
        if prepared:
            log(
                f"data: {text.path} ({text.form}), tokenised earlier in {folder}; delete it if you "
                "have changed the code of the data"
            )
            log(describe_counts(Counter(prepared.summary["counts"])))
            return prepared
        with lock_folder(folder, log):
            # Another process may have made it while we waited for the lock.
            if not _load_if_intact(folder):
                make_way(folder, log)
                languages = f"{text.source}→{text.target}"
                log(f"data: {text.path} ({text.form}), {languages}; tokenising into {folder}")
                # A temporary folder, which is renamed to `folder` when it is complete.
                with new_folder(folder) as unfinished:
                    _clean_and_tokenise(text, unfinished, settings, log)
    except PermissionError as error:
        # The cache may belong to another user.
        raise UserError(
            f"cannot write to {cache}: {error.strerror}; choose another --run PATH/NAME"
        ) from None
    return load_prepared(folder)


def _load_if_intact(folder: Path) -> Prepared | None:
    """`load_prepared`, or None if there is no folder, or a damaged one."""
    try:
        return load_prepared(folder)
    except (OSError, EOFError, ValueError, LookupError, UserError):
        return None


def load_prepared(folder: Path) -> Prepared:
    """Read what `prepare` wrote to `folder`. The caller handles the errors of a damaged one."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    rows = []
    with (folder / "validation.jsonl").open(encoding="utf-8") as file:
        for line in file:
            source, target = json.loads(line)
            rows.append((source, target))
    validation = TokenizedPairs(folder / "validation")
    if len(rows) != len(validation):
        raise ValueError(f"validation.jsonl has {len(rows)} rows, not {len(validation)}")
    return Prepared(
        folder,
        source_tokenizer=load_tokenizer(str(folder / "tokenizer" / "source")),
        target_tokenizer=load_tokenizer(str(folder / "tokenizer" / "target")),
        train=TokenizedPairs(folder / "train"),
        validation=validation,
        validation_rows=rows,
        summary=summary,
    )


def _cache_key(text: ParallelText, settings: TextSettings) -> str:
    """A hash of everything that the token ids depend on: 16 hexadecimal digits."""
    facts = asdict(settings) | {
        "format": FORMAT,
        "form": text.form,
        "columns": [text.source, text.target],
        "data": text.fingerprint(),
        "tokenizer": tokenizer_key(settings.tokenizer),
    }
    content = json.dumps(facts, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


# ------------------------------------------------------------------------ batches


def default_tokens_per_batch(prepared: Prepared, device: torch.device) -> int:
    """4,096 tokens on a CPU, 16,384 on a GPU; with little data fewer, for 100 steps an epoch."""
    largest = 4096 if device.type == "cpu" else 16384
    tokens = int(prepared.train.lengths["target"].sum())
    # Below 1,024 tokens a step is mostly overhead.
    return min(largest, max(1024, tokens // 100))


class BucketSampler(Sampler[np.ndarray]):
    """Endless batches of pairs of similar length, within a budget of tokens, planned for all ranks.

    `tokens_per_batch` bounds the padded tokens of either side in one optimizer step, over all ranks
    and micro-batches. The pairs of a step are divided among `world_size` · `accumulate`
    micro-batches; iterating gives those of this rank. Every epoch has every pair once, in an order
    drawn from (seed, epoch). With the same data, seed and sizes the batches depend on the step
    alone, so a resumed run only sets `step`.
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
        self.source = lengths["source"] + 1  # (pairs,) tokens with eos
        self.target = lengths["target"] + 1  # (pairs,) tokens with bos or eos
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.accumulate = accumulate
        self.micro_batches = world_size * accumulate  # micro-batches of a step, over all ranks
        if len(self.source) < self.micro_batches:
            raise UserError(
                f"{len(self.source)} training pairs are too few for {world_size} processes × "
                f"{accumulate} micro-batches; use fewer"
            )
        # The pairs are put in order of length and cut into steps: step i has those from bounds[i]
        # up to bounds[i + 1]. An epoch takes the steps in random order. The bounds depend on the
        # lengths alone, so they are the same in every epoch.
        widths = np.maximum(self.source, self.target)
        self.bounds = _cut_batches(np.sort(widths), tokens_per_batch, self.micro_batches)
        self.step = 0  # optimizer steps that were iterated over; set it to continue from there
        # Both __iter__ and target_tokens read the plan of an epoch: the second finds it here.
        self._plan = lru_cache(maxsize=1)(self._draw_plan)

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of an epoch: every pair once, over all ranks."""
        return len(self.bounds) - 1

    def epoch_plan(self, epoch: int) -> Iterator[np.ndarray]:
        """The pairs of each step of an epoch, over all ranks."""
        pairs, steps = self._plan(epoch)
        for step in steps:
            first = self.bounds[step]
            end = self.bounds[step + 1]
            yield pairs[first:end]

    def _draw_plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs in order of length, (pairs,), and the steps in random order, (steps,)."""
        random = np.random.default_rng((self.seed, epoch))
        # Shuffle, then sort: pairs of equal lengths are in random order, so that batches differ
        # between epochs.
        pairs = np.arange(len(self.source), dtype=np.int32)
        pairs = random.permutation(pairs)
        by_length = _order_by_length(self.source[pairs], self.target[pairs])
        pairs = pairs[by_length]
        steps = random.permutation(self.steps_per_epoch)
        return pairs, steps

    def _steps_after(self, step: int) -> Iterator[np.ndarray]:
        """The pairs of each step after `step`, over all ranks, without end."""
        epoch, steps_done = divmod(step, self.steps_per_epoch)
        while True:
            yield from islice(self.epoch_plan(epoch), steps_done, None)
            epoch += 1
            steps_done = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        """This rank's micro-batches, from the current step on, without end."""
        for pairs in self._steps_after(self.step):
            self.step += 1
            for micro_batch in range(self.accumulate):
                # Every n-th pair, so that all n micro-batches of a step have similar lengths.
                first = micro_batch * self.world_size + self.rank
                yield pairs[first :: self.micro_batches]

    def target_tokens(self, step: int) -> Iterator[int]:
        """The target tokens of each step after `step`, over all ranks: divisors of the loss."""
        for pairs in self._steps_after(step):
            yield int(self.target[pairs].sum())

    def heaviest_steps(self) -> list[np.ndarray]:
        """The pairs, longest first, of the steps that need most memory.

        One for the layers, one for the logits and one for the attention matrices. If these fit in
        memory, all steps do.
        """
        order = _order_by_length(self.source, self.target)
        steps = np.split(order, self.bounds[1:-1])
        loads = []  # (steps, 3), each in its own unit
        for pairs in steps:
            source_width = int(self.source[pairs].max())
            target_width = int(self.target[pairs].max())
            layers = len(pairs) * (source_width + target_width)
            logits = int(self.target[pairs].sum())  # padding has none
            # A score of every position for every other.
            attention = len(pairs) * max(source_width, target_width) ** 2
            loads.append((layers, logits, attention))
        heaviest = np.argmax(loads, axis=0).tolist()
        heaviest = dict.fromkeys(heaviest)  # one step is often the heaviest in several ways
        longest_first = []
        for index in heaviest:
            pairs = steps[index]
            longest_first.append(pairs[::-1])
        return longest_first


def _order_by_length(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Indices, (pairs,), that sort the pairs so that neighbours are similar in both lengths.

    By the longer side first; then by how much the source is longer, rising and falling in turn. So
    the shorter side does not jump from one length to the next, and a batch that holds both has
    little padding. Pairs of equal lengths keep their order.
    """
    # (source, target): 3 1, 3 2, 3 3, 2 3, 1 3, then 1 4, 2 4, 3 4, 4 4, 4 3, 4 2, 4 1, then 5 1, …
    longer = np.maximum(source, target)
    difference = source - target
    zigzag = np.where(longer % 2, -difference, difference)
    return np.lexsort((zigzag, longer))  # the last key counts first


def _cut_batches(widths: np.ndarray, budget: int, smallest: int = 1) -> list[int]:
    """Cut sentence widths, (pairs,) and ascending, into batches with pairs · widest <= budget.

    Returns the bounds, one more than there are batches. No batch has fewer than `smallest` pairs,
    whatever the budget.

    >>> _cut_batches(np.array([2, 2, 3, 5]), budget=6)  # the batches 2 2, 3 and 5
    [0, 2, 3, 4]
    """
    bounds = [0]
    while bounds[-1] < len(widths):
        first = bounds[-1]
        largest = max(budget // int(widths[first]), smallest)  # if all were as short as the first
        candidates = widths[first : first + largest]
        # padded[i]: the tokens of the first i + 1 candidates, all padded to the last of them. It
        # rises with i.
        padded = candidates * np.arange(1, len(candidates) + 1)
        fitting = int(np.searchsorted(padded, budget, side="right"))
        end = first + max(fitting, smallest)
        bounds.append(min(end, len(widths)))
    # If the last batch is too small, it takes pairs from the one before, or joins it if that would
    # then be too small itself.
    if len(bounds) > 2 and bounds[-1] - bounds[-2] < smallest:
        bounds[-2] = bounds[-1] - smallest
        if bounds[-2] - bounds[-3] < smallest:
            del bounds[-2]
    return bounds


@dataclass
class Batch:
    """B pairs padded to S source and T target tokens, with N real target tokens.

    The target needs no padding mask. Its padding follows the sentence, so the causal mask hides it,
    and `target_positions` leaves out what the decoder predicts at padding.
    """

    src: torch.Tensor  # (B, S) ids; each row ends with eos
    src_pad: torch.Tensor  # (B, S) bool, True = padding
    tgt_in: torch.Tensor  # (B, T) the decoder's input (teacher forcing): bos, then the target
    tgt_out: torch.Tensor  # (N,) the tokens to predict, row after row: the target, then eos
    # (N,) where they are predicted: positions in the flattened (B · T) tgt_in
    target_positions: torch.Tensor
    source_tokens: int  # real tokens, eos included
    target_tokens: int  # N

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The arguments of `SummedLoss`."""
        return self.src, self.src_pad, self.tgt_in, self.target_positions, self.tgt_out

    @property
    def padded_tokens(self) -> int:
        """Tokens of both sides with their padding: B · (S + T)."""
        return self.src.numel() + self.tgt_in.numel()

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`. From pinned memory, the copy overlaps with computing."""
        return self._each_tensor(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """The same batch in pinned memory. The DataLoader calls it."""
        return self._each_tensor(lambda tensor: tensor.pin_memory())

    def _each_tensor(self, change: Callable) -> "Batch":
        tensors = {}
        for name, value in vars(self).items():
            if torch.is_tensor(value):
                tensors[name] = change(value)
        return replace(self, **tensors)


@dataclass
class Collate:
    """Pairs -> `Batch`."""

    source_ids: dict[str, int]  # {"pad": …, "bos": …, "eos": …}
    target_ids: dict[str, int]

    def __call__(self, pairs: tuple[Rows, Rows] | Sequence[tuple[Sequence[int], ...]]) -> Batch:
        if isinstance(pairs, tuple):  # by TokenizedPairs.take
            source, target = pairs
        else:
            sources, targets = zip(*pairs)
            source = flatten(sources)
            target = flatten(targets)
        src, src_pad = self.pad_sources(source)

        # Teacher forcing: the decoder reads bos and the target, and learns to predict the target
        # and eos. For a target of three tokens a b c:
        #     tgt_in   bos a b c
        #     tgt_out  a   b c eos
        inputs = add_token(target, self.target_ids["bos"], at_start=True)
        tgt_in, target_positions = pad(inputs, self.target_ids["pad"])
        tgt_out = add_token(target, self.target_ids["eos"]).ids
        return Batch(
            src=src,
            src_pad=src_pad,
            tgt_in=torch.from_numpy(tgt_in),
            tgt_out=torch.from_numpy(tgt_out),
            target_positions=torch.from_numpy(target_positions),
            source_tokens=int((~src_pad).sum()),
            target_tokens=len(tgt_out),
        )

    def pad_sources(self, sources: Rows | list[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Source ids -> (src, src_pad), each (B, S); eos is added to each row.

        The padding mask of all data is made here; decoding.py and fast/ derive theirs from it. It
        follows PyTorch: True marks padding, which attention ignores. (The `attention_mask` of
        Hugging Face is the opposite: 1 = keep.)
        """
        if not isinstance(sources, Rows):
            sources = flatten(sources)
        sources = add_token(sources, self.source_ids["eos"])
        src, positions = pad(sources, self.source_ids["pad"])
        # Set by the positions, not by `src == pad`: some tokenizers use one id for pad and eos.
        src_pad = np.ones(src.shape, bool)
        src_pad.ravel()[positions] = False
        return torch.from_numpy(src), torch.from_numpy(src_pad)


def collate_for(prepared: Any) -> Collate:
    """The `Collate` with the special ids of the tokenizers of a `Prepared` or a `Trained`."""
    source_ids = special_ids(prepared.source_tokenizer)
    target_ids = special_ids(prepared.target_tokenizer)
    return Collate(source_ids, target_ids)


def batches_of(
    pairs: Dataset, sampler: BucketSampler, collate: Collate, workers: int, device: torch.device
) -> Generator[Batch]:
    """The sampler's micro-batches on the device, without end. `close()` ends the workers."""
    loader = DataLoader(
        pairs,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=leave_signals_to_main,
    )
    # Now, not at the first batch: iter() draws a seed from torch's random generator, which by then
    # is set for dropout.
    on_host = iter(loader)
    batches = (batch.to(device) for batch in on_host)
    if device.type == "cuda":
        return _one_ahead(batches, device)
    return batches


def _one_ahead(batches: Iterator[Batch], device: torch.device) -> Generator[Batch]:
    """The batches; a thread prepares the next one while the GPU works on the last."""
    # One thread, because the DataLoader's iterator is not thread-safe.
    # Without set_device the thread would use GPU 0 on every rank.
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,)) as thread:
        next_batch = thread.submit(next, batches)
        while True:
            batch = next_batch.result()
            next_batch = thread.submit(next, batches)
            yield batch
