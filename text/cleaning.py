"""Raw rows -> clean training pairs and untouched validation and test rows, with counts.

    held_out = held_out_rows(text)                      # {"validation": [...], "test": [...]}
    for source, target in clean_pairs(text, held_out, 512, counts): ...

Also the choice of the training pairs that are like validation's (`train.py --select`).
"""

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np

from engine.telemetry import progress_bar
from text.reading import ParallelText

HELD_OUT_SHARE = 0.01  # of the distinct pairs, for each split that must be cut from train
CHANCE = 0.05  # smaller shares of the pairs, or gaps in their lengths, may be chance
UNLIKE_SHARE = 0.5  # at most this share of the training pairs is left out as unlike validation
LENGTH_RANGES = 5  # ranges of source length; pairs with short targets are left out in each
SHORT_SHARE = 0.5  # at most this share of a range is left out
MIN_VALIDATION_ROWS = 200  # validation rows that are needed to see how train differs
PRIOR_TOKENS = 2000  # pseudo-counts by train's frequencies, added to validation's counts
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


# ------------------------------------------------------------------------ selection


def like_validation(train, validation, vocabularies: list[int]) -> np.ndarray:
    """Which pairs of `train` to keep, (n,) row numbers: those written in the words of validation.

    Both are `data.TokenizedPairs`. A pair's score is the mean over a side's tokens of
    log(p_validation / p_train), both sides added: a cross-entropy difference (Moore & Lewis 2010,
    Axelrod et al. 2011) of single tokens. One half of validation gives its frequencies. The other
    half is scored, and the score that 99 % of its pairs reach is the threshold. Pairs of train
    below it are left out: at most `UNLIKE_SHARE` of all, and none if they are fewer than `CHANCE`.
    """
    known = validation.subset(np.arange(0, len(validation), 2))
    unseen = validation.subset(np.arange(1, len(validation), 2))
    gains = []  # of each side, (V,)
    for of_train, of_known in zip(_counts(train, vocabularies), _counts(known, vocabularies)):
        p_train = (of_train + 0.5) / (of_train + 0.5).sum()  # + 0.5: no token has p = 0
        # Smoothed towards train: a few thousand rows tell little about rare tokens.
        p_known = (of_known + PRIOR_TOKENS * p_train) / (of_known.sum() + PRIOR_TOKENS)
        gains.append(np.log(p_known / p_train))
    scores = _scores(train, gains)
    threshold = np.quantile(_scores(unseen, gains), 0.01)
    below = np.count_nonzero(scores < threshold)
    if below < CHANCE * len(train):
        return np.arange(len(train))
    return _without_last(np.argsort(-scores, kind="stable"), below, UNLIKE_SHARE)


def _counts(pairs, vocabularies: list[int]) -> list[np.ndarray]:
    """How often each token occurs, (V,) for each side."""
    counts = [np.zeros(size, np.int64) for size in vocabularies]
    for chunk in pairs.chunks():
        for total, rows, size in zip(counts, chunk, vocabularies):
            total += np.bincount(rows.ids, minlength=size)
    return counts


def _scores(pairs, gains: list[np.ndarray]) -> np.ndarray:
    """The mean gain of a pair's tokens on each side, both added: (pairs,)"""
    scores = []
    for chunk in pairs.chunks():
        means = []
        for (ids, lengths), gain in zip(chunk, gains):
            sums = np.append(0, np.cumsum(gain[ids]))  # sums[i]: of the first i tokens
            ends = np.cumsum(lengths)
            totals = sums[ends] - sums[ends - lengths]
            means.append(totals / np.maximum(lengths, 1))
        scores.append(sum(means))
    return np.concatenate(scores)


def without_short_targets(
    train: dict[str, np.ndarray], validation: dict[str, np.ndarray]
) -> np.ndarray:
    """Which pairs to keep, (n,) row numbers, so that targets are as long as in validation.

    Arguments are the lengths of "source" and "target", (pairs,) each. The measure is target tokens
    for each source token. `LENGTH_RANGES` ranges of source lengths, each with as many validation
    rows, are treated separately: in one, many short sentences would hide that the targets of long
    ones are too short. The pairs with the shortest targets for their sources go, at most
    `SHORT_SHARE` of a range.
    """
    if _ratio(validation) < (1 + CHANCE) * _ratio(train):
        return np.arange(len(train["source"]))
    shares = np.arange(1, LENGTH_RANGES) / LENGTH_RANGES
    bounds = np.quantile(validation["source"], shares)
    range_of_train = np.searchsorted(bounds, train["source"])  # (pairs,)
    range_of_validation = np.searchsorted(bounds, validation["source"])
    kept = []
    for number in range(LENGTH_RANGES):
        inside = range_of_validation == number
        wanted = _ratio({side: lengths[inside] for side, lengths in validation.items()})
        rows = np.flatnonzero(range_of_train == number)
        source, target = train["source"][rows], train["target"][rows]
        order = np.argsort(-target / source, kind="stable")  # the longest targets first
        ratios = np.cumsum(target[order]) / np.cumsum(source[order])  # of the first 1, 2, … pairs
        short = np.count_nonzero(ratios < wanted)
        kept.append(rows[_without_last(order, short, SHORT_SHARE)])
    return np.sort(np.concatenate(kept))


def _ratio(lengths: dict[str, np.ndarray]) -> float:
    """Target tokens for each source token; 0 without rows."""
    return lengths["target"].sum() / max(1, lengths["source"].sum())


def _without_last(order: np.ndarray, dropped: int, share: float) -> np.ndarray:
    """Row numbers in `order` without the last `dropped`, at most this share of all; sorted."""
    dropped = min(dropped, int(share * len(order)))
    return np.sort(order[: len(order) - dropped])
