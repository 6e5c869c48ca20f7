"""The benchmark of weak scaling: its arithmetic of spans, and one real pair of processes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import scaling
from benchmarks.scaling import Config, describe_overlap, length, merge, overlap
from engine.errors import UserError

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))))


@given(SPANS, SPANS)
def test_spans_cover_what_their_points_do(one, other):
    """Held against sets of unit intervals."""
    points = [{second for start, end in spans for second in range(start, end)} for spans in (one, other)]
    merged = [merge(one), merge(other)]
    assert [length(spans) for spans in merged] == [len(points[0]), len(points[1])]
    assert overlap(*merged) == len(points[0] & points[1])


def test_two_processes_train_and_are_profiled(small, tmp_path):
    config = Config(steps=1, tokens=64, precision="fp32")
    picture = tmp_path / "step.png"
    figures = scaling.start(2, 0, small.folder, config, profile=str(picture))()
    assert figures["target_tokens_per_second"] > 0 and picture.stat().st_size > 1000
    assert figures["communication"] > 0 and 0 <= figures["both"] <= figures["backward"]
    assert "of it while the backward pass still ran" in describe_overlap(figures)


@pytest.mark.parametrize("settings", [{"processes": 1}, {"steps": 0}, {"tokens": 1}])
def test_settings_that_cannot_be(settings):
    with pytest.raises(UserError, match="must be at least"):
        Config(**settings)


def test_more_processes_than_cores(monkeypatch):
    monkeypatch.setattr(scaling.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("benchmarks.corpus.load_corpus", lambda data: None)
    with pytest.raises(UserError, match="may use 2 cores"):
        scaling.main(Config(processes=3))
