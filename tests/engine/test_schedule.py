"""The learning rate's shape for any plan, and plans that end with the minutes."""

import math
from dataclasses import asdict, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.schedule import SPEED_KNOWN, Schedule, plan, plan_of_run

peaks = st.floats(1e-6, 1.0)
plans = st.builds(plan, peaks, st.integers(0, 600), st.integers(1, 2000))


def rates_of(schedule: Schedule) -> list[float]:
    """Of every step, and of two after the last."""
    return [schedule.learning_rate(step) for step in range(1, schedule.total + 3)]


# ---------------------------------------------------------------- shape


@given(peaks, st.integers(0, 3000), st.integers(1, 100_000))
def test_the_plan(peak, warmup, total):
    schedule = plan(peak, warmup, total)
    assert (schedule.peak, schedule.total) == (peak, total)
    assert schedule.warmup == min(total, warmup or max(1, min(1000, total // 10)))
    assert (
        schedule.decay_start == pytest.approx(0.7 * total, abs=1)
        and 1 <= schedule.decay_start <= total
    )


@given(plans)
def test_up_level_down(schedule):
    peak, warmup, total, start = (
        schedule.peak,
        schedule.warmup,
        schedule.total,
        schedule.decay_start,
    )
    rates = rates_of(schedule)
    assert all(0 < rate <= peak for rate in rates[:total]) and rates[total:] == [0, 0]
    for step, rate in enumerate(rates[:start], 1):
        assert rate == pytest.approx(peak * step / warmup if step < warmup else peak, rel=1e-12)
    if warmup <= start:
        # From the peak at `start` in equal steps; the one that would follow the last is 0.
        fall = peak / (total + 1 - start)
        for step in range(start, total + 1):
            assert rates[step - 1] == pytest.approx(
                peak - (step - start) * fall, rel=1e-9, abs=1e-12 * peak
            )
        assert rates[total - 1] == pytest.approx(fall)


def test_by_hand():
    schedule = plan(1.0, 4, 10)
    assert rates_of(schedule) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    assert Schedule(2.0, 0, 4, 4).learning_rate(1) == 2.0  # no warm-up


# ---------------------------------------------------------------- minutes


def simulate(
    seconds_of, max_minutes: float, schedule: Schedule
) -> tuple[float, list[float], int | None]:
    """The training loop: minutes used, the rate of each step, the step at which the way down began."""
    step, minutes, rates, down = 0, 0.0, [], None
    while step < schedule.total and minutes < max_minutes:
        step += 1
        rates.append(schedule.learning_rate(step))
        minutes += seconds_of(step, minutes / max_minutes) / 60
        if schedule.fit_time(step, minutes, max_minutes):
            assert down is None  # once only
            down = step
    return minutes, rates, down


SPEEDS = {
    "constant": lambda step, share: 0.2,
    "slow first step": lambda step, share: 60.0 if step == 1 else 0.2,
    "long and short batches": lambda step, share: (0.1, 0.3, 0.15, 0.25)[step % 4],
    "validation every 100 steps": lambda step, share: 20.0 if step % 100 == 0 else 0.2,
    "slower by and by": lambda step, share: 0.2 + 0.04 * share,
    "faster by and by": lambda step, share: 0.2 - 0.04 * share,
    "a halt": lambda step, share: 30.0 if step == 2000 else 0.2,
}


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("warmup", [0, 50])
def test_a_run_ends_with_its_minutes_and_its_rate(speed, warmup):
    minutes, rates, down = simulate(SPEEDS[speed], 20, plan(1.0, warmup, 1_000_000))
    assert 0.9 * 20 <= minutes <= 1.1 * 20
    assert rates[-1] < 0.1 and max(rates) == 1.0
    assert rates[down - 1] == 1.0 and all(
        after < before for before, after in pairwise(rates[down:])
    )


def test_steps_that_end_first_are_not_stretched():
    schedule = plan(1.0, 10, 500)
    before = replace(schedule)
    minutes, rates, down = simulate(lambda step, share: 0.2, 20, schedule)
    assert len(rates) == 500 and down is None and minutes < 2
    assert replace(schedule, first_step=0, first_minutes=0.0) == before


def test_a_warm_up_fitted_to_the_minutes_makes_no_jump():
    _, rates, _ = simulate(lambda step, share: 0.2, 10, plan(1.0, 0, 1_000_000))
    assert all(abs(after - before) <= 2 / SPEED_KNOWN for before, after in pairwise(rates[:-1]))


@pytest.mark.parametrize(
    "asked, first, seconds, minutes, fitted",
    [
        (
            0,
            0.2,
            0.2,
            10,
            300,
        ),  # 3,000 of a million steps fit: a warm-up of 1,000 would take a third of the run
        (0, 0.2, 0.2, 20, 600),
        (0, 5.0, 0.2, 20, 597),
        (0, 60.0, 0.2, 20, 570),  # a slow first step costs its own time alone
        (30, 0.2, 0.2, 20, 30),  # never lengthened
        (1000, 10.0, 10.0, 10, SPEED_KNOWN),  # nor shorter than the steps that measure
    ],
)
def test_a_warm_up_that_the_minutes_allow(asked, first, seconds, minutes, fitted):
    schedule = plan(1.0, asked, 1_000_000)
    simulate(lambda step, share: first if step == 1 else seconds, minutes, schedule)
    assert schedule.warmup == pytest.approx(fitted, abs=1)


def test_a_slow_step_while_the_speed_is_measured_does_not_cut_the_warm_up():
    schedule = plan(1.0, 0, 1_000_000)
    simulate(lambda step, share: 2.0 if step == 2 else 0.2, 10, schedule)
    assert schedule.warmup == pytest.approx(
        203, abs=1
    )  # by the average of 19; by the slow one alone it would be 30


def test_without_a_limit_nothing_is_fitted():
    schedule = plan(1.0, 0, 1000)
    before = replace(schedule)
    assert not any(schedule.fit_time(step, 1e6 * step, 0) for step in range(1, 1001))
    assert replace(schedule, first_step=0, first_minutes=0.0) == before


def test_the_end_and_the_estimate_of_it():
    schedule = plan(1.0, 0, 10)
    assert (
        schedule.why_stop(9, 5.0, 0) is None
        and schedule.why_stop(10, 5.0, 0) == "all steps are done"
    )
    assert (
        schedule.why_stop(3, 1.9, 2) is None
        and schedule.why_stop(3, 2.0, 2) == "the 2 minutes are over"
    )
    assert [schedule.minutes_left(4, 2.0, limit) for limit in (0, 2.5, 1)] == [3, 0.5, 0]
    by_time = replace(schedule, by_time=True)  # its last step is where the minutes were to end
    assert by_time.why_stop(10, 1.9, 2) == "the 2 minutes are over"
    assert by_time.extended(10, 12).why_stop(12, 1.9, 2) == "all steps are done"


def test_a_halt_that_takes_all_the_minutes_leaves_a_rate():
    schedule = plan(1.0, 1, 100)
    assert not schedule.fit_time(1, 0.1, 1) and schedule.fit_time(10, 10.0, 1)
    assert schedule.learning_rate(10) == 1 and schedule.total == 11


@settings(max_examples=30)
@given(st.floats(0.05, 1), st.lists(st.floats(0, 100), min_size=5, max_size=5))
def test_on_the_way_down_the_rate_is_a_function_of_the_step_alone(seconds, later):
    schedule, step = plan(1e-3, 0, 100_000), 0
    while not schedule.fit_time(step, step * seconds / 60, 1):
        step += 1
    saved, rates = replace(schedule), rates_of(schedule)
    for offset, minutes in enumerate(later, 1):  # whatever the clock says now
        assert not schedule.fit_time(step + offset, minutes, 1)
    assert schedule == saved and rates_of(schedule) == rates


@pytest.mark.parametrize("step, limit", [(8000, 110), (9000, 120)])
def test_minutes_given_late_are_fitted_too(step, limit):
    """A run of 10,000 steps, 80 a minute, that goes on on its way down: it still ends with a rate near 0."""
    schedule = plan(1.0, 0, 10_000).extended(step, 10_000)
    while not schedule.why_stop(step, step / 80, limit):
        step += 1
        rate = schedule.learning_rate(step)
        schedule.fit_time(step, step / 80, limit)
    assert step / 80 == pytest.approx(limit, rel=0.01) and rate < 0.01


@pytest.mark.parametrize("speeds", [(400, 100), (100, 400), (100, 100)])
@pytest.mark.parametrize("interrupted", [0.1, 60, 83.9, 84.5])
def test_a_run_that_goes_on_at_another_speed_ends_with_its_minutes(speeds, interrupted):
    """As on other cards; interrupted on its level part, or on its way down, which is planned already."""
    config = SimpleNamespace(
        lr=1.0, warmup=0, epochs=1, max_steps=10**6, max_minutes=120, given=set()
    )
    schedule, end = plan_of_run(config, 10, None)
    step, minutes = 0, 0.0
    for speed, until in zip(speeds, (interrupted, math.inf)):
        while not schedule.why_stop(step, minutes, 120) and minutes < until:
            step, minutes = step + 1, minutes + (step == 0) + (1 + 0.5 * (-1) ** step) / speed
            schedule.fit_time(step, minutes, 120)
        falls = step >= schedule.decay_start
        schedule, _ = plan_of_run(
            config, 10, {"schedule": asdict(schedule), "end": end, "step": step}
        )
    assert falls and (interrupted == 84.5 or minutes == pytest.approx(120, rel=0.01))
    assert interrupted == 84.5 or schedule.learning_rate(step) < 0.02


def test_steps_that_are_done_before_the_minutes_are_not_called_minutes():
    schedule = plan(1.0, 0, 10_000).extended(9000, 10_000)
    for step in range(9000, 10_000):
        schedule.fit_time(step, step / 80, 130)
    assert schedule.why_stop(10_000, 125, 130) == "all steps are done"


@given(plans, st.integers(1, 2000), st.integers(1, 4000))
def test_a_run_that_goes_on_to_another_end_has_no_jump_in_its_rate(schedule, step, total):
    step = min(step, schedule.total)
    longer = schedule.extended(step, total)
    assert longer.total == max(total, step) and longer.learning_rate(step + 1) <= schedule.peak
    if longer.total > step:
        before, after = schedule.learning_rate(step), longer.learning_rate(step + 1)
        steepest = schedule.peak * max(
            1 / schedule.warmup, 1 / (longer.total + 1 - longer.decay_start)
        )
        assert abs(after - before) <= steepest * (1 + 1e-9)
