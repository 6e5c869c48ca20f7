"""Training pairs become like validation's, in words and lengths; no more of them go than must."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from text.rows import SIDES, TokenizedPairs, TokenWriter, flatten
from text.selection import (
    CHANCE,
    SHORT_SHARE,
    evenly_spaced,
    like_validation,
    without_short_targets,
)


def store(folder: Path, rows: list[list[int]]) -> TokenizedPairs:
    """Pairs that have these ids, of 400, on both sides."""
    writer = TokenWriter(folder, dict.fromkeys(SIDES, range(400)))
    for side in SIDES:
        writer.write(side, flatten(rows))
    writer.close()
    return TokenizedPairs(folder)


def test_evenly_spaced_rows():
    assert evenly_spaced(list(range(20)), 8) == [0, 2, 5, 7, 10, 12, 15, 17]
    assert evenly_spaced([1, 2], 8) == [1, 2]


COMMON, RARE, OTHER = 5, 100, 200  # ids


@pytest.mark.parametrize(
    "first, last",
    [
        # By the share of other words, not by their number.
        ([OTHER] * 2, [COMMON] * 10 + [OTHER] * 10),
        # A word that validation lacks is no reason by itself: its frequency there is not known.
        ([OTHER] * 20, [COMMON] * 19 + [RARE]),
    ],
    ids=["length", "prior"],
)
def test_which_pairs_go_first(tmp_path, first, last):
    """Of 600 pairs in other words than validation's, the half that may go."""
    validation = store(tmp_path / "validation", [[COMMON] * 19 + [OTHER]] + [[COMMON] * 20] * 299)
    train = store(tmp_path / "train", [[COMMON] * 20] * 100 + [first] * 300 + [last] * 200)
    kept = like_validation(train, validation, [400, 400])
    assert kept.tolist() == [*range(100), *range(400, 600)]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=40),
    st.floats(0.1, 9),
)
def test_the_shortest_targets_go_and_no_more_of_them_than_must(lengths, ratio):
    source, target = np.array(lengths).T
    validation = {"source": np.array([9.0]), "target": np.array([9 * ratio])}  # one range
    kept = without_short_targets({"source": source, "target": target}, validation)
    gone = np.setdiff1d(np.arange(len(lengths)), kept)
    assert kept.tolist() == sorted(kept) and len(gone) <= SHORT_SHARE * len(lengths)
    most_of_gone = max(target[gone] / source[gone], default=0)
    assert most_of_gone <= min(target[kept] / source[kept])
    enough = target[kept].sum() / source[kept].sum() >= ratio
    small_gap = target.sum() / source.sum() > ratio / (1 + CHANCE)
    assert enough or small_gap or len(gone) == int(SHORT_SHARE * len(lengths))
    if len(gone):  # with the last of them it would be too few
        back = [*kept, gone[np.argmax(target[gone] / source[gone])]]
        assert target[back].sum() / source[back].sum() < ratio


def test_long_pairs_with_short_targets_go_though_short_pairs_have_long_ones():
    source = np.repeat([10, 20, 30, 40, 50], 8)
    target = source.copy()
    target[source == 10] = 17
    target[source == 50] = [50, 20] * 4  # every second one is short
    # As long as their sources: in all ranges together, one of the short ones could stay.
    validation = {"source": source, "target": source}
    kept = without_short_targets({"source": source, "target": target}, validation)
    gone = np.setdiff1d(np.arange(len(source)), kept)
    assert gone.tolist() == [33, 35, 37, 39]


def test_a_gap_in_the_lengths_that_may_be_chance_leaves_all():
    train = {"source": np.full(100, 100), "target": np.repeat([100, 90], 50)}
    for length, kept in ((99, 100), (110, 50)):  # 4 % and 16 % more than in train
        validation = {"source": np.full(10, 100), "target": np.full(10, length)}
        assert len(without_short_targets(train, validation)) == kept
