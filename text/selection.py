"""Which rows to use: training pairs that are like validation's, and rows from all over a split.

rows = like_validation(train, validation, [8000, 8000])  # numbers of the pairs to keep
"""

import numpy as np

from text.rows import TokenizedPairs

CHANCE = 0.05  # smaller shares of the pairs, or gaps in their lengths, may be chance
UNLIKE_SHARE = 0.5  # at most this share of the training pairs is left out as unlike validation
LENGTH_RANGES = 5  # ranges of source length; pairs with short targets are left out in each
SHORT_SHARE = 0.5  # at most this share of a range is left out
MIN_VALIDATION_ROWS = 200  # validation rows that are needed to see how train differs
PRIOR_TOKENS = 2000  # pseudo-counts by train's frequencies, added to validation's counts


def evenly_spaced(rows: list, count: int) -> list:
    """At most `count` rows at equal distances, because a file may hold several corpora in turn."""
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def like_validation(
    train: TokenizedPairs, validation: TokenizedPairs, vocabularies: list[int]
) -> np.ndarray:
    """Which pairs of `train` to keep, (n,) row numbers: those written in the words of validation.

    `vocabularies` are the numbers of source and target tokens. A pair's score is the mean over a
    side's tokens of log(p_validation / p_train), both sides added: a cross-entropy difference
    (Moore & Lewis 2010, Axelrod et al. 2011) of single tokens. One half of validation gives its
    frequencies. The other half is scored, and the score that 99 % of its pairs reach is the
    threshold. Pairs of train below it are left out: at most `UNLIKE_SHARE` of all, and none if they
    are fewer than `CHANCE`.
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


def _counts(pairs: TokenizedPairs, vocabularies: list[int]) -> list[np.ndarray]:
    """How often each token occurs, (V,) for each side."""
    counts = [np.zeros(size, np.int64) for size in vocabularies]
    for chunk in pairs.chunks():
        for total, rows, size in zip(counts, chunk, vocabularies):
            total += np.bincount(rows.ids, minlength=size)
    return counts


def _scores(pairs: TokenizedPairs, gains: list[np.ndarray]) -> np.ndarray:
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
