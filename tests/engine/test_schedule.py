"""The learning rate: up, level, down to zero, and it ends with the steps or with the minutes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.schedule import (
    DECAY_SHARE,
    is_falling,
    is_validation_step,
    learning_rate,
    progress,
    share_of_fall,
    warmup_steps,
)


def rates(total: int, asked: int = 1000) -> list[float]:
    """Of all steps of a run that is limited by steps."""
    warmup = warmup_steps(asked, total)
    return [
        learning_rate(1.0, step, progress(step - 1, total), warmup) for step in range(1, total + 1)
    ]


def test_by_hand():
    assert rates(10) == pytest.approx([1, 1, 1, 1, 1, 1, 1, 1, 2 / 3, 1 / 3])
    assert rates(40)[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert rates(40, asked=2)[:3] == pytest.approx([0.5, 1, 1])
    assert rates(20_000)[499] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "asked, total, steps", [(1000, 29, 2), (1000, 30, 3), (1000, 5, 1), (3, 1000, 3), (7, 70, 7)]
)
def test_the_warm_up_is_at_most_a_tenth(asked, total, steps):
    assert warmup_steps(asked, total) == steps


def validations(total: int, eval_every: int, steps_per_epoch: int, first_total: int = 0) -> list:
    """The steps at which a run of `total` steps validates, after one of `first_total`."""
    steps = [first_total]
    for step in range(first_total + 1, total + 1):
        done, before = progress(step, total), progress(steps[-1], total)
        if is_validation_step(step, done, before, eval_every, steps_per_epoch):
            steps.append(step)
    return steps[1:]


def test_when_to_validate():
    assert validations(100, 40, 10) == [40, 80, 100]
    assert validations(283, 0, 60) == [48, 96, 144, 192, 240, 250, 283]  # the run on the sample
    assert validations(2400, 0, 300) == list(range(300, 2401, 300))  # once an epoch
    assert validations(2000, 0, 60) == list(range(250, 2001, 250))  # and not more often
    assert validations(1200, 0, 1000) == [200, 400, 600, 800, 1000, 1200]
    assert validations(600, 0, 1000) == [100, 200, 300, 400, 500, 600]
    # A finished run goes on to twice its length: no old share of the run counts.
    assert validations(1200, 0, 10**4, first_total=600) == [800, 1000, 1200]


@given(total=st.integers(26, 5000), steps_per_epoch=st.integers(1, 5000))
def test_a_curve_has_six_points(total, steps_per_epoch):
    assert len(validations(total, 0, steps_per_epoch)) >= 6


@given(total=st.integers(1, 5000), asked=st.integers(1, 5000))
def test_up_level_down(total, asked):
    shape = rates(total, asked)
    top = shape.index(max(shape))
    assert all(0 < rate <= 1 for rate in shape)  # the last step still learns
    assert shape[:top] == sorted(shape[:top]) and top <= max(1, total / 10)
    falling = shape[int(0.7 * total) + 1 :]
    assert falling == sorted(falling, reverse=True)
    assert total < 20 or max(shape) == 1


def test_the_rate_falls_in_the_last_part():
    assert not is_falling(0.0) and not is_falling(0.69)
    assert is_falling(0.71) and is_falling(1.0)
    assert share_of_fall("wsd") == pytest.approx(DECAY_SHARE, abs=0.01)


@given(seconds=st.lists(st.floats(0.2, 30), min_size=100, max_size=400))
def test_a_run_by_the_clock_ends_with_its_minutes(seconds):
    """The rate begins to fall when 70 % of the time is over, and reaches zero at the end.

    This holds whatever time the steps take.
    """
    limit, minutes, step = sum(seconds) / 60 * 0.9, 0.0, 0
    while progress(step, 10**6, minutes, limit) < 1:
        done = progress(step, 10**6, minutes, limit)
        rate = learning_rate(1.0, step + 1, done, 1000)
        assert rate <= (1 - done) / 0.3 + 1e-9
        if done < 0.7:
            assert rate >= min(1, (step + 1) / 1000)
        minutes += seconds[step] / 60
        step += 1
    assert minutes == pytest.approx(limit, abs=0.5 + 1e-9)


def test_a_slow_first_step_does_not_end_the_warm_up():
    """A step that compiles takes 10 of the 60 seconds: the rate still rises for 20 steps."""
    rising = [learning_rate(1.0, step, progress(step, 10**6, 10, 60), 1000) for step in (2, 10, 20)]
    assert rising == pytest.approx([0.1, 0.5, 1])


def test_the_end_that_comes_first_counts():
    assert progress(5, 10, minutes=1, max_minutes=10) == 0.5
    assert progress(1, 10, minutes=9, max_minutes=10) == 0.9
    assert progress(3, 10) == 0.3
    assert progress(12, 10) == 1.2  # a finished run, resumed with fewer steps
    assert learning_rate(1.0, 13, 1.2, 1) == 0
