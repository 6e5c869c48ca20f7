"""Raw rows → clean training pairs and untouched validation and test rows, with a count of everything dropped.

held_out = held_out_rows(text)                                 # {"validation": [...], "test": [...]}
for source, target in clean_pairs(text, held_out, 512, counts): ...
"""

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np

from engine.telemetry import progress
from text.reading import ParallelText

HELD_OUT_SHARE = 0.01  # of the distinct pairs, for each split that the data does not bring
CHANCE = 0.05  # a smaller share of the pairs, or gap in their lengths, may be chance between a few hundred rows
UNLIKE_SHARE = (
    0.5  # of the training pairs, at most, are dropped because they are unlike validation's
)
SHORT_SHARE = 0.25  # and then of the rest for their short targets
TELLING_ROWS = 200  # of validation, to tell how train differs from it
PRIOR_TOKENS = 2000  # pseudo-counts by train's frequencies, added to validation's counts
LONGEST_TOKEN = 16  # characters; our own tokenizers learn no longer token

# Zero-width characters vanish, lone surrogates (broken UTF-16) become the replacement character, and every other control
# character becomes a space. The joiners U+200C and U+200D stay: some scripts and emoji are spelled with them. U+2581 (▁) is
# what tokenizers write for a space and would come back as one, so it becomes the underscore that it looks like.
_VANISH = [
    0x00AD,
    0x200B,
    0x200E,
    0x200F,
    0x2060,
    0xFEFF,
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
]
_CLEANED = {code: " " for code in [*range(0x20), *range(0x7F, 0xA0)]}
_CLEANED |= (
    {code: None for code in _VANISH} | {code: "�" for code in range(0xD800, 0xE000)} | {0x2581: "_"}
)

REASONS = {
    "empty": "with an empty side",
    "identical": "with source = target",
    "held out": "moved to validation or test",
    "in validation or test": "with a side that is also in validation or test",
    "duplicate": "exact duplicates",
    "too long": "longer than --max_length",
    "length ratio": "with very different lengths",
    "unlike validation": "unlike validation's (--select)",
    "short target": "with a short target (--select)",
}


def normalise(text: str) -> str:
    """One line without control characters, single spaces inside and none outside. Case and punctuation stay."""
    return " ".join(text.translate(_CLEANED).split())


def fingerprint(source: str, target: str) -> int:
    """64 bits that stand for a pair; the same in every process and on every machine."""
    return int.from_bytes(blake2b(f"{source}\0{target}".encode(), digest_size=8).digest(), "little")


def side_of(pair_hash: int, missing: list[str]) -> str:
    """The split that a training pair belongs to when the splits `missing` must be cut from train.

    Depends on the pair alone, so a pair stays on its side whatever the seed, the order or the rest of the data.
    """
    place = (
        pair_hash >> 20
    ) / 2**44  # the upper 44 of 64 bits: uniform in [0, 1), and exact, as a float holds 53
    if place < HELD_OUT_SHARE and "validation" in missing:
        return "validation"
    if HELD_OUT_SHARE <= place < 2 * HELD_OUT_SHARE and "test" in missing:
        return "test"
    return "train"


def split_to_score(text: ParallelText) -> str:
    """The split that a score is of: the data's own test, else their own validation; with neither a test cut from train."""
    if "test" not in text.files and "validation" in text.files:
        return "validation"
    return "test"


def missing_splits(text: ParallelText) -> list[str]:
    """The splits that have to be cut from train: training needs a validation split, scoring one to score."""
    needed = {"validation": True, "test": split_to_score(text) == "test"}
    return [split for split in needed if needed[split] and split not in text.files]


def held_out_rows(text: ParallelText) -> dict[str, list[tuple[str, str]]]:
    """The raw rows of validation and test, every one and in order; `missing_splits` are cut from train (each pair once).

    Of data with a validation split alone there is no "test".
    """
    missing = missing_splits(text)
    rows = {split: list(text.pairs(split)) for split in text.files if split != "train"}
    cut = {split: {} for split in missing}  # hash -> pair: keeps the order, drops repetitions
    train = text.pairs("train") if missing and "train" in text.files else ()
    for row in progress(train, desc="holding out", unit=" pairs", leave=False):
        pair = normalise_pair(row)
        pair_hash = fingerprint(*pair)
        side = side_of(pair_hash, missing)
        if side != "train" and _flaw(*pair) is None:
            cut[side].setdefault(pair_hash, row)
    return rows | {split: list(pairs.values()) for split, pairs in cut.items()}


def clean_pairs(
    text: ParallelText, held_out: dict[str, list[tuple[str, str]]], max_length: int, counts: Counter
) -> Iterator[tuple[str, str]]:
    """Stream the pairs worth training on; what is dropped is counted by reason in `counts`.

    Only hashes are remembered (about 100 bytes a pair), so 26 million pairs need no more memory than that.
    """
    missing = missing_splits(text)
    held = [normalise_pair(row) for rows in held_out.values() for row in rows]
    held_sources, held_targets = {source for source, _ in held}, {target for _, target in held}
    seen = set()
    for row in text.pairs("train"):
        source, target = normalise_pair(row)
        counts["read"] += 1
        reason = _flaw(source, target)
        if reason is None:
            pair_hash = fingerprint(source, target)
            if side_of(pair_hash, missing) != "train":
                reason = "held out"
            elif source in held_sources or target in held_targets:
                reason = "in validation or test"
            elif pair_hash in seen:
                reason = "duplicate"
            # No token covers more than LONGEST_TOKEN characters: certainly over the limit, and
            # slow to tokenise.
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
    """True when one side is so much longer that the pair cannot be a translation; of two numbers or of two arrays."""
    shorter, longer = (
        np.minimum(source_tokens, target_tokens),
        np.maximum(source_tokens, target_tokens),
    )
    return longer > 4 * shorter + 10


def like_validation(train, validation, vocabularies: list[int]) -> np.ndarray:
    """Which pairs of `train` to keep, (n,) row numbers: those written in the words of validation.

    A pair's score is the mean of log p(token in validation) / p(token in train) over each side, both added: a cross-entropy
    difference (Moore & Lewis 2010, Axelrod et al. 2011), of single tokens. Half of validation gives the frequencies, the other
    half the bar, which 99 % of its pairs reach. Pairs under it go, at most `UNLIKE_SHARE` of all; none if under `CHANCE` do.
    """
    known, unseen = (validation.only(np.arange(first, len(validation), 2)) for first in (0, 1))
    gains = []
    for of_train, of_known in zip(_counts(train, vocabularies), _counts(known, vocabularies)):
        p_train = (of_train + 0.5) / (of_train + 0.5).sum()  # + 0.5: no token has p = 0
        p_known = (of_known + PRIOR_TOKENS * p_train) / (
            of_known.sum() + PRIOR_TOKENS
        )  # smoothed towards train
        gains.append(np.log(p_known / p_train))
    scores = _scores(train, gains)
    under = np.count_nonzero(scores < np.quantile(_scores(unseen, gains), 0.01))
    if under < CHANCE * len(train):
        return np.arange(len(train))
    return _without_last(np.argsort(-scores, kind="stable"), under, UNLIKE_SHARE)


def _counts(pairs, vocabularies: list[int]) -> list[np.ndarray]:
    """How often each token occurs, (V,) for each side."""
    counts = [np.zeros(size, np.int64) for size in vocabularies]
    for part in pairs.parts():
        for of_side, side, size in zip(counts, part, vocabularies):
            of_side += np.bincount(side.ids, minlength=size)
    return counts


def _scores(pairs, gains: list[np.ndarray]) -> np.ndarray:
    """The mean of the gains of a pair's tokens on each side, both added: (pairs,)."""
    scores = []
    for part in pairs.parts():
        means = []
        for (ids, lengths), gain in zip(part, gains):
            sums = np.append(0, np.cumsum(gain[ids]))  # sums[i]: of the first i tokens
            ends = np.cumsum(lengths)
            means.append((sums[ends] - sums[ends - lengths]) / np.maximum(lengths, 1))
        scores.append(sum(means))
    return np.concatenate(scores)


def without_short_targets(
    train: dict[str, np.ndarray], validation: dict[str, np.ndarray]
) -> np.ndarray:
    """Which pairs of train to keep, (n,) row numbers, so that they have as many target tokens for a source token as validation.

    Lengths of both sides by their names, (pairs,) each. The pairs with the shortest targets for their sources go first, and no
    more than `SHORT_SHARE` of all.
    """
    source, target = train["source"], train["target"]
    wanted = validation["target"].sum() / validation["source"].sum()
    order = np.argsort(-target / source, kind="stable")  # the longest targets first
    ratios = np.cumsum(target[order]) / np.cumsum(
        source[order]
    )  # of the first n pairs; falls with n
    if wanted < (1 + CHANCE) * ratios[-1]:
        return np.arange(len(order))
    return _without_last(order, np.count_nonzero(ratios < wanted), SHORT_SHARE)


def _without_last(order: np.ndarray, dropped: int, share: float) -> np.ndarray:
    """Row numbers in `order` without the last `dropped`, or this share of all if that is less; sorted."""
    return np.sort(order[: len(order) - min(dropped, int(share * len(order)))])


def report(counts: Counter) -> str:
    """One line: rows read, dropped by reason, kept."""
    dropped = ", ".join(f"{counts[key]:,} {words}" for key, words in REASONS.items() if counts[key])
    return (
        f"train: {counts['read']:,} rows read; dropped {dropped or 'none'}; {counts['kept']:,} kept"
    )


def _flaw(source: str, target: str) -> str | None:
    if not source or not target:
        return "empty"
    # "1998" → "1998" is a translation; a sentence that was left untranslated is not.
    if source == target and any(character.isalpha() for character in source):
        return "identical"
    return None
