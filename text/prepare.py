"""Rows on disk → clean pairs → tokenizers and token ids, in a cache folder.

    prepared = prepare(find_text("/opt/minidataset"), Path("runs/.cache"))     # the second time in no time

Tokenised once, before training, into flat arrays that are memory-mapped: ids stay on disk, and the memory holds some
40 bytes a pair.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from engine.checkpoint import load_state, verify_files, write_checksums
from engine.errors import UserError
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
from text.formats import short
from text.rows import ParallelText, default_path, find_text, sample_notice
from text.store import TokenizedPairs, TokenWriter, flatten
from text.subwords import encode, encode_flat, load_tokenizer, tokenizer_key, train_tokenizer

# Version of the token store, part of its key: raise it when its content changes, and old caches are no longer read. Not
# when only the choice of validation rows changes: older runs, which look for their key, could not go on.
FORMAT = 2
TOKENIZER_LINES = 200_000  # sentences that a tokenizer is trained on; more change little
CHUNK = 20_000  # sentences tokenised at once
VALIDATION_ROWS = 4000  # rows of validation used while training, at most; evaluate.py scores all


@dataclass
class Prepared:
    """Everything that training needs of the data."""

    folder: Path
    source_tokenizer: object
    target_tokenizer: object
    train: TokenizedPairs
    validation: TokenizedPairs
    validation_rows: list[tuple[str, str]]  # raw, in the order of `validation`
    summary: dict  # counts, sizes

    def select_like_validation(self, say) -> None:
        """Leave out of `train` what is unlike validation: pairs in other words, and short targets.

        A model learns from its data what to write about, and how much to leave out. With a small
        validation split nothing is left out: the difference may be chance.
        """
        if len(self.validation) < TELLING_ROWS:
            return
        sizes = [len(self.source_tokenizer), len(self.target_tokenizer)]
        self._keep(like_validation(self.train, self.validation, sizes), "unlike validation", say)
        rows = without_short_targets(self.train.lengths, self.validation.lengths)
        self._keep(rows, "short target", say)

    def _keep(self, rows: np.ndarray, reason: str, say) -> None:
        """Keep these rows of `train`; log and count the others under a key of `REASONS`."""
        total = len(self.train)
        left_out = total - len(rows)
        if left_out == 0:
            return
        say(f"data: {left_out:,} of {total:,} pairs are left out: {REASONS[reason]}")
        self.summary["counts"].update({reason: left_out, "kept": len(rows)})
        self.train = self.train.only(rows)

    def describe(self) -> dict:
        """What a run keeps of its data, ready for JSON; `lengths`: how many training sentences have 0, 1, 2, … tokens."""
        lengths = {
            side: np.bincount(counts).tolist() for side, counts in self.train.lengths.items()
        }
        tokens = {side: int(counts.sum()) for side, counts in self.train.lengths.items()}
        vocabulary = {"source": len(self.source_tokenizer), "target": len(self.target_tokenizer)}
        facts = {name: self.summary[name] for name in ("path", "counts", "unknown")} | {
            "vocabulary": vocabulary
        }
        return facts | {
            "validation_rows": len(self.validation_rows),
            "tokens": tokens,
            "lengths": lengths,
        }


def prepare(
    text: ParallelText,
    cache: Path,
    *,
    source_vocab=-1,
    target_vocab=-1,
    tokenizer="",
    max_length=512,
    say=print,
):
    """Tokenizers and token store of `text`, from the cache where it holds just these, else made now. → `Prepared`

    The cache key is a hash of the files' content and of every setting that changes the ids. Raises `UserError` when no
    pair is left.
    """
    key = _key(text, source_vocab, target_vocab, tokenizer, max_length)
    folder = cache / key
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(cache, key, say)
        if folder.exists() and (
            damage := verify_files(folder)
        ):  # the caches of older versions have no checksums
            say(f"data: {folder} is made again: {damage}")
            shutil.rmtree(folder)
        if folder.exists():
            say(f"data: {text.path} ({text.form}), tokenised earlier in {folder}")
        else:
            say(
                f"data: {text.path} ({text.form}), {text.source}→{text.target}; tokenising into {folder}"
            )
            with made_whole(folder) as building:
                summary = _build(
                    text, building, source_vocab, target_vocab, tokenizer, max_length, say
                ) | {"key": key}
                told = json.dumps(summary, ensure_ascii=False, indent=1)
                (building / "summary.json").write_text(told, encoding="utf-8")
    except PermissionError as error:  # it may be somebody else's, whose runs lie in the same folder
        raise UserError(
            f"cannot write to {cache}: {error.strerror}; choose another --run PATH/NAME"
        ) from None
    return load_prepared(folder)


def find_and_prepare(config, cache: Path, say) -> tuple[Path, str, str]:
    """What train.py's flags name, prepared: → its folder; the data and the tokenizer as paths that are found from anywhere."""
    data = config.data or default_path()
    notice = sample_notice(data)
    given = "" if config.data else "no --data given, using "
    if notice:
        say(f"data: {given}{data}; {notice}")
    elif not config.data:
        say(f"data: {given}{data}")
    if config.tokenizer and (config.source_vocab > 0 or config.target_vocab > 0):
        say(
            "note: --source_vocab and --target_vocab have no effect: they are for tokenizers that are trained here"
        )
    if os.path.exists(os.path.expanduser(data)):  # else a hub name, or a mistake
        # Not realpath: a link's target may have another name. Nor abspath: `link/..` is where the link leads to.
        data = str(Path(os.getcwd(), os.path.expanduser(data)))
    tokenizer = (
        str(Path(config.tokenizer).absolute())
        if Path(config.tokenizer or "-").is_dir()
        else config.tokenizer
    )
    if (
        data != data.encode(errors="ignore").decode()
    ):  # of other bytes, which no file of the run could hold
        raise UserError(f"the path {data!r} is not UTF-8; rename the folder")
    text = find_text(data, config.source, config.target)
    for split, files in text.files.items():
        say(f"data: {split} is {short(', '.join(file.name for file in files))}")
    prepared = prepare(
        text,
        cache,
        source_vocab=config.source_vocab,
        target_vocab=config.target_vocab,
        tokenizer=tokenizer,
        max_length=config.max_length,
        say=say,
    )
    return prepared.folder, data, tokenizer


def began_with(checkpoint: Path, config: dict, text: ParallelText) -> bool:
    """Whether the run of this checkpoint and these settings was made from just these files, wherever they lie now."""
    checkpoint = checkpoint.parent if checkpoint.is_file() else checkpoint
    with contextlib.suppress(
        OSError, ValueError, KeyError
    ):  # weights that lie alone, an older version
        settings = (
            config[name] for name in ("source_vocab", "target_vocab", "tokenizer", "max_length")
        )
        return load_state(checkpoint)["data_key"] == _key(text, *settings)
    return False


def load_prepared(folder: Path) -> Prepared:
    """What `prepare` left in `folder`."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lines = (folder / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [tuple(json.loads(line)) for line in lines]
    tokenizers = [load_tokenizer(str(folder / "tokenizer" / side)) for side in ("source", "target")]
    pairs = [TokenizedPairs(folder / split) for split in ("train", "validation")]
    return Prepared(folder, *tokenizers, *pairs, rows, summary)


@contextlib.contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A new folder that gets the name `folder` when it is complete; nothing is left of it when that fails.

    It is this process's alone: its name is drawn by chance (process ids repeat in containers), and its lock goes with the
    process, so that a later one sees what a killed one left behind.
    """
    building = folder.with_name(f".building-{folder.name}-{secrets.token_hex(4)}")
    building.mkdir()
    try:
        with open(building / ".lock", "w", encoding="utf-8") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield building
            files = [
                str(path.relative_to(building)) for path in building.rglob("*") if path.is_file()
            ]
            write_checksums(building, [name for name in files if name != ".lock"])
            with contextlib.suppress(
                OSError
            ):  # another run may have made the same just now: then that one is used
                os.replace(building, folder)
        with contextlib.suppress(
            OSError
        ):  # WSL renames no folder on a Windows drive while a file in it is open
            os.replace(building, folder)
        if damage := verify_files(folder):
            raise UserError(f"{folder}: {damage} just after it was written; check the disk")
    except OSError as error:
        if error.errno:  # numpy's have none, but words that `run_script` knows
            error.filename = error.filename or str(
                building
            )  # a write, unlike an open, does not say where
        raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _clear_leftovers(cache: Path, key: str, say) -> None:
    """Remove what killed processes left of their work, and wait for one that makes just what is wanted."""
    for building in cache.glob(".building-*"):
        with contextlib.suppress(OSError):  # gone by now, or somebody else's
            # Seconds since the last write: where locks do not reach another machine, this tells of its work.
            age = time.time() - max(
                path.stat().st_mtime for path in (building, *building.rglob("*"))
            )
            if not (building / ".lock").exists():  # of an older version, or made this very moment
                shutil.rmtree(building, ignore_errors=True) if age > 3600 else None
                continue
            with open(building / ".lock", "r+", encoding="utf-8") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(building, ignore_errors=True) if age > 600 else None
                except BlockingIOError:
                    if building.name.startswith(f".building-{key}-"):
                        say(
                            f"data: another process tokenises the same data into {building}; waiting for it"
                        )
                        fcntl.flock(file, fcntl.LOCK_EX)


def _build(text, building, source_vocab, target_vocab, tokenizer, max_length, say) -> dict:
    """Clean, train tokenizers, tokenise, into this folder; → what there is to know about it."""
    if tokenizer:
        load_tokenizer(tokenizer)  # a wrong name is said now, not after the cleaning
    held_out = held_out_rows(text)
    if not held_out["validation"] and "validation" in text.files:
        raise UserError(
            f"{text.path}: the validation split has no rows; add rows, or remove the file: then it is cut from train"
        )
    for split in missing_splits(text):
        say(
            f"data: no {split} split; {len(held_out[split]):,} pairs are cut from train by a hash of the pair"
        )
    if split_to_score(text) == "validation":
        say("data: no test split; evaluate.py scores validation, and train keeps its rows")
    counts = Counter()
    lines = (
        building / "clean.txt"
    )  # source and target of a pair on two lines; no clean text holds a line break
    with open(lines, "w", encoding="utf-8") as file:
        for source, target in progress(
            clean_pairs(text, held_out, max_length, counts), desc="cleaning", unit=" pairs"
        ):
            file.write(f"{source}\n{target}\n")
            counts["kept"] += 1
    _require_pairs(text, counts)
    sizes = [vocabulary_size(asked, counts["kept"]) for asked in (source_vocab, target_vocab)]
    tokenizers = _make_tokenizers(lines, counts["kept"], tokenizer, sizes, say)
    for side, tokenizer_of_side in tokenizers.items():
        tokenizer_of_side.save_pretrained(building / "tokenizer" / side)

    unknown = _write_train(lines, building / "train", tokenizers, max_length, counts)
    _require_pairs(text, counts)
    if unknown > 0.01:
        raise UserError(
            f"tokenizer {tokenizer} does not know {unknown:.1%} of the tokens of {text.path}; choose a tokenizer "
            f"made for {text.source} and {text.target}, or leave --tokenizer out"
        )
    held, count = held_out["validation"], min(len(held_out["validation"]), VALIDATION_ROWS)
    # From all over: corpora stand one behind another.
    rows = [held[number * len(held) // count] for number in range(count)]
    if not rows:
        few = f"{counts['kept']:,} pairs are too few to cut 1 % off for validation; add pairs, or a validation file"
        raise UserError(f"{text.path}: {few}")
    _write_validation(rows, building, tokenizers, max_length, say)
    lines.unlink()
    say(report(counts))
    say(
        f"tokens: source vocabulary {len(tokenizers['source']):,}, target vocabulary {len(tokenizers['target']):,}, "
        f"unknown {unknown:.2%}"
    )
    return {"counts": dict(counts), "path": text.path, "unknown": unknown}


def vocabulary_size(asked: int, pairs: int) -> int:
    """Tokens of a vocabulary. -1: 16,000, fewer for little text, so that each is seen often enough to be learned.

    0, the default of older runs: the same rule, but at most 8,000.
    """
    return asked if asked > 0 else min(16000 if asked else 8000, max(1000, pairs // 5))


def _make_tokenizers(lines: Path, pairs: int, name: str, sizes: list[int], say) -> dict:
    if name:
        both = load_tokenizer(name)
        return {"source": both, "target": both}
    every = math.ceil(pairs / TOKENIZER_LINES)  # each so many-th pair is read
    tokenizers = {}
    for first, side, size in ((0, "source", sizes[0]), (1, "target", sizes[1])):
        say(f"tokens: training the {side} tokenizer on {math.ceil(pairs / every):,} sentences")
        with open(lines, encoding="utf-8") as file:
            sample = (
                line.rstrip("\n") for line in islice(file, first, None, 2 * every)
            )  # a pair has two lines
            tokenizers[side] = train_tokenizer(sample, size)
    return tokenizers


def _write_train(
    lines: Path, folder: Path, tokenizers: dict, max_length: int, counts: Counter
) -> float:
    """Tokenise the clean pairs, dropping the over-long and the lopsided. Returns the share of unknown tokens."""
    writer = TokenWriter(folder, {side: len(tokenizer) for side, tokenizer in tokenizers.items()})
    unknown = total = 0
    bar = progress(total=counts["kept"], desc="tokenising", unit=" pairs")
    counts["kept"] = 0
    with open(lines, encoding="utf-8") as file:
        while chunk := [line.rstrip("\n") for line in islice(file, 2 * CHUNK)]:
            encoded = {
                side: encode_flat(tokenizers[side], chunk[first::2])
                for first, side in enumerate(tokenizers)
            }
            kept = _worth_keeping(*(lengths for _, lengths in encoded.values()), max_length, counts)
            for side, (ids, lengths) in encoded.items():
                ids = ids[np.repeat(kept, lengths)]
                writer.write(side, ids, lengths[kept])
                unknown += (
                    int((ids == tokenizers[side].unk_token_id).sum())
                    if tokenizers[side].unk_token
                    else 0
                )
                total += len(ids)
            bar.update(len(kept))
    bar.close()
    writer.close()
    return unknown / max(total, 1)


def _worth_keeping(
    source: np.ndarray, target: np.ndarray, max_length: int, counts: Counter
) -> np.ndarray:
    """Which pairs of these lengths to keep, (pairs,) bool; each of the others is counted under one reason."""
    too_long = np.maximum(source, target) >= max_length  # one place is left for begin or end
    lopsided = absurd_ratio(source, target) & ~too_long
    empty = (np.minimum(source, target) == 0) & ~too_long & ~lopsided
    kept = ~(too_long | lopsided | empty)
    for reason, pairs in {
        "too long": too_long,
        "length ratio": lopsided,
        "empty": empty,
        "kept": kept,
    }.items():
        counts.update({reason: int(pairs.sum())} if pairs.any() else {})  # adds; no entries of 0
    return kept


def _write_validation(rows, building: Path, tokenizers: dict, max_length: int, say) -> None:
    writer = TokenWriter(
        building / "validation", {side: len(tokenizer) for side, tokenizer in tokenizers.items()}
    )
    for index, side in enumerate(("source", "target")):
        encoded = encode(tokenizers[side], [normalise(row[index]) for row in rows], max_length)
        if long := sum(len(row) >= max_length for row in encoded):
            say(
                f"validation: {long} {side} sentences are cut to {max_length - 1} tokens for the validation loss"
            )
        writer.write(side, *flatten([row[: max_length - 1] for row in encoded]))
    writer.close()
    with open(building / "validation.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _require_pairs(text: ParallelText, counts: Counter) -> None:
    if counts["kept"] < 2:
        raise UserError(
            f"{text.path}: {counts['kept']} training pairs left, at least 2 are needed; {report(counts)}"
        )


def _key(
    text: ParallelText, source_vocab: int, target_vocab: int, tokenizer: str, max_length: int
) -> str:
    settings = {
        "format": FORMAT,
        "data": text.fingerprint(),
        "source_vocab": source_vocab,
        "target_vocab": target_vocab,
        "tokenizer": tokenizer_key(tokenizer),
        "max_length": max_length,
    }
    if split_to_score(text) == "validation":
        # Older caches of such data lack the pairs that were cut for a test split; all other caches stay as good as they were.
        settings["test_cut"] = False
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()
