"""Raw rows -> clean training pairs and untouched validation and test rows, with counts.

held_out = held_out_rows(text)                      # {"validation": [...], "test": [...]}
for source, target in clean_pairs(text, held_out, 512, counts): ...
"""

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np

from engine.telemetry import progress_bar
from text.reading import ParallelText

HELD_OUT_SHARE = 0.01  # of the distinct pairs, for each split that must be cut from train
LONGEST_TOKEN = 16  # characters; our own tokenizers learn no longer token

# For str.translate. Control characters become spaces; zero-width characters and marks of writing
# direction vanish, but not the joiners U+200C and U+200D, with which some scripts and emoji are
# spelled; lone surrogates (broken UTF-16) become the replacement character.
_CONTROL = [*range(0x20), *range(0x7F, 0xA0)]
_VANISH = [0x00AD, 0x200B, 0x200E, 0x200F, 0x2060, 0xFEFF]
_VANISH += [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_CLEANED: dict[int, str | None] = dict.fromkeys(_CONTROL, " ")
_CLEANED |= dict.fromkeys(_VANISH)  # None: removed
_CLEANED |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
_CLEANED[0x2581] = "_"  # ▁, which tokenizers write for a space: it would come back as one

REASONS = {
    "empty": "with an empty side",
    "identical": "with source = target",
    "held out": "moved to validation or test",
    "in validation or test": "with a side that is also in validation or test",
    "duplicate": "exact duplicates",
    "too long": "of --max_length tokens or more",
    "length ratio": "with very different lengths",
    "unlike validation": "unlike the validation pairs (--select)",
    "short target": "with a short target (--select)",
}


def normalise(text: str) -> str:
    """One line without control characters, with single spaces. Case and punctuation stay."""
    return " ".join(text.translate(_CLEANED).split())


def hash_of_pair(source: str, target: str) -> int:
    """64 bits that stand for a pair; the same in every process and on every machine."""
    content = f"{source}\0{target}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def split_of_pair(pair_hash: int, missing: list[str]) -> str:
    """The split of a training pair if the splits `missing` must be cut from train.

    It depends on the pair alone, not on a seed, the order or the rest of the data.
    """
    # The upper 44 of 64 bits: uniform in [0, 1), and exact, as a float holds 53 bits.
    place = (pair_hash >> 20) / 2**44
    if place < HELD_OUT_SHARE and "validation" in missing:
        return "validation"
    if HELD_OUT_SHARE <= place < 2 * HELD_OUT_SHARE and "test" in missing:
        return "test"
    return "train"


def split_to_score(text: ParallelText) -> str:
    """The split that evaluate.py scores: test, else validation, else a test cut from train."""
    if "test" not in text.files and "validation" in text.files:
        return "validation"
    return "test"


def missing_splits(text: ParallelText) -> list[str]:
    """The splits to cut from train: training needs validation, and scoring a split to score."""
    needed = ["validation"]
    if split_to_score(text) == "test":
        needed.append("test")
    return [split for split in needed if split not in text.files]


def held_out_rows(text: ParallelText) -> dict[str, list[tuple[str, str]]]:
    """The raw rows of validation and test, all and in order.

    `missing_splits` are cut from train, each pair once. Data with validation alone have no "test".
    """
    missing = missing_splits(text)
    rows = {split: list(text.pairs(split)) for split in text.files if split != "train"}
    # hash -> pair: keeps the order, drops repetitions
    cut: dict[str, dict] = {split: {} for split in missing}
    train = text.pairs("train") if missing and "train" in text.files else ()
    for row in progress_bar(train, desc="holding out", unit=" pairs", leave=False):
        pair = normalise_pair(row)
        pair_hash = hash_of_pair(*pair)
        split = split_of_pair(pair_hash, missing)
        if split != "train" and _flaw(*pair) is None:
            cut[split].setdefault(pair_hash, row)
    return rows | {split: list(pairs.values()) for split, pairs in cut.items()}


def clean_pairs(
    text: ParallelText, held_out: dict[str, list[tuple[str, str]]], max_length: int, counts: Counter
) -> Iterator[tuple[str, str]]:
    """Stream the pairs worth training on. Counts what is dropped, by a key of `REASONS`.

    Only hashes are remembered, about 100 bytes a pair: 26 million pairs fit into memory.
    """
    missing = missing_splits(text)
    held = [normalise_pair(row) for rows in held_out.values() for row in rows]
    held_sources = {source for source, _ in held}
    held_targets = {target for _, target in held}
    seen = set()
    for row in text.pairs("train"):
        source, target = normalise_pair(row)
        counts["read"] += 1
        reason = _flaw(source, target)
        if reason is None:
            pair_hash = hash_of_pair(source, target)
            if split_of_pair(pair_hash, missing) != "train":
                reason = "held out"
            elif source in held_sources or target in held_targets:
                reason = "in validation or test"
            elif pair_hash in seen:
                reason = "duplicate"
            # Over the limit, as our own tokenizers have no longer tokens, and slow to tokenise.
            # A pretrained tokenizer may have longer ones and lose a few pairs more than necessary.
            elif max(len(source), len(target)) > LONGEST_TOKEN * max_length:
                reason = "too long"
        if reason:
            counts[reason] += 1
        else:
            seen.add(pair_hash)
            yield source, target


def normalise_pair(row: tuple[str, str]) -> tuple[str, str]:
    """Both sides normalised."""
    return normalise(row[0]), normalise(row[1])


def absurd_ratio(source_tokens, target_tokens):
    """True if one side is too long to translate the other; of two numbers or two arrays."""
    shorter = np.minimum(source_tokens, target_tokens)
    longer = np.maximum(source_tokens, target_tokens)
    return longer > 4 * shorter + 10


def worth_keeping(
    source: np.ndarray, target: np.ndarray, max_length: int, counts: Counter
) -> np.ndarray:
    """Which pairs of these lengths, in tokens, to keep: (pairs,) bool.

    Adds to `counts` how many are kept, and how many are dropped for each reason.
    """
    # All arrays are (pairs,).
    too_long = np.maximum(source, target) >= max_length  # bos or eos needs one position
    lopsided = absurd_ratio(source, target)
    empty = np.minimum(source, target) == 0
    # The first reason that holds, else "kept".
    reasons = ["too long", "length ratio", "empty"]
    result = np.select([too_long, lopsided, empty], reasons, "kept")
    counts.update(result.tolist())
    return result == "kept"


def describe_counts(counts: Counter) -> str:
    """One line: rows read, dropped by reason, kept."""
    dropped = [f"{counts[key]:,} {words}" for key, words in REASONS.items() if counts[key]]
    return (
        f"train: {counts['read']:,} rows read; dropped {', '.join(dropped) or 'none'}; "
        f"{counts['kept']:,} kept"
    )


def _flaw(source: str, target: str) -> str | None:
    """What is wrong with a normalised pair, as a key of `REASONS`; None if nothing is."""
    if not source or not target:
        return "empty"
    # "1998" is its own translation; a sentence that was left untranslated is not.
    if source == target and any(character.isalpha() for character in source):
        return "identical"
    return None
