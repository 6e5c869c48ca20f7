"""The learning rate, a pure function of the step: up in a line, level, down in a line to zero.

A run ends after a number of steps or of minutes. The level part makes the second as easy as the first: when 70 % of the
minutes are spent the way down begins, sized by the steps done so far (the warmup–stable–decay shape; Hu et al. 2024,
Hägele et al. 2024). From that moment the rate is again a pure function of the step, and it is saved with the run.
"""

import math
from dataclasses import dataclass, replace

DECAY_SHARE = 0.3  # the last part of a run, in which the rate falls to zero
SPEED_KNOWN = 20  # steps after which a run knows how fast it is


@dataclass
class Schedule:
    """`total` steps; from `start` on `warmup` steps rising to `peak`, the last from `decay_start` on falling to 0."""

    peak: float
    warmup: int
    total: int
    decay_start: int
    first_step: int = 0  # since the start or the last resume; it compiles and fills caches: no measure of the speed
    first_minutes: float = 0.0  # at its end
    start: int = 0  # where the rise begins, and from which share of the peak
    start_share: float = 0.0
    by_time: bool = False  # `total` follows from the minutes of the run
    planned: int = 0  # the warm-up before it was fitted to the minutes

    def learning_rate(self, step: int) -> float:
        """The rate of update `step`, counted from 1."""
        rising = (
            self.start_share + (1 - self.start_share) * ((step - self.start) / self.warmup)
            if self.warmup
            else 1.0
        )
        falling = (self.total + 1 - step) / (
            self.total + 1 - self.decay_start
        )  # + 1: the last step still learns
        return self.peak * max(0.0, min(1.0, rising, falling))

    def extended(self, step: int, total: int) -> "Schedule":
        """The plan of a run that goes on after `step` to another end: the rate goes on where it was, up if it fell."""
        total = max(total, step)
        decay_start = min(
            max(step + 3, math.ceil(total * (1 - DECAY_SHARE))), total
        )  # + 3: after two more `fit_time`
        fell = step >= self.decay_start
        start, share = (
            (step, self.learning_rate(step) / self.peak) if fell else (self.start, self.start_share)
        )
        return replace(
            self,
            total=total,
            decay_start=decay_start,
            start=start,
            start_share=share,
            by_time=False,
        )

    def fit_time(self, step: int, minutes: float, max_minutes: float) -> bool:
        """Fit the plan to a run of `max_minutes`, after `step` steps took `minutes`; true if the way down begins now."""
        if not self.first_step:
            self.first_step, self.first_minutes = step, minutes
        if not max_minutes or step <= self.first_step or step >= self.decay_start:
            return False
        estimate = math.ceil(step + (max_minutes - minutes) / self.minutes_a_step(step, minutes))
        if (
            step <= SPEED_KNOWN
        ):  # the rate is still next to nothing, so a steeper rise makes no jump
            self.warmup = min(self.planned or self.warmup, max(SPEED_KNOWN, estimate // 10))
        resumed_now = self.first_step > 1 and step < min(
            self.first_step + SPEED_KNOWN, self.decay_start - 1
        )
        if minutes < (1 - DECAY_SHARE) * max_minutes or resumed_now:
            return False
        last = max(step + 1, estimate)
        self.by_time, self.total, self.decay_start = last < self.total, min(self.total, last), step
        return True

    def minutes_a_step(self, step: int, minutes: float) -> float:
        """Since the start or the last resume, which may be on another machine; before its second step, of all steps."""
        first, before = (
            (self.first_step, self.first_minutes) if step > self.first_step else (0, 0.0)
        )
        return max(minutes - before, 1e-9) / (step - first)

    def why_stop(self, step: int, minutes: float, max_minutes: float) -> str | None:
        """Why `step`, after `minutes`, was the last one, if it was."""
        last = step >= self.total
        by_time = max_minutes and (minutes >= max_minutes or (last and self.by_time))
        return (
            f"the {max_minutes:g} minutes are over"
            if by_time
            else "all steps are done"
            if last
            else None
        )

    def minutes_left(self, step: int, minutes: float, max_minutes: float) -> float:
        """An estimate, after `step` steps took `minutes`: what the steps need, or what is left of the time."""
        by_steps = (self.total - step) * self.minutes_a_step(step, minutes)
        return max(0.0, min(by_steps, max_minutes - minutes)) if max_minutes else by_steps


def plan(peak: float, warmup: int, total: int) -> Schedule:
    """A schedule of `total` steps; `warmup` 0 means a tenth of them, at most 1,000."""
    warmup = min(warmup or max(1, min(1000, total // 10)), total)
    return Schedule(
        peak, warmup, total, max(1, math.ceil(total * (1 - DECAY_SHARE))), planned=warmup
    )


def plan_of_run(config, steps_per_epoch: int, saved: dict | None) -> tuple[Schedule, list]:
    """The plan that flags of train.py ask for, and its end; of a resumed run what it `saved`, extended to another end."""
    end = [
        config.max_steps or f"{config.epochs} epochs",
        config.max_minutes,
    ]  # a list, as JSON gives it back
    total = config.max_steps or config.epochs * steps_per_epoch
    if not saved:
        return plan(config.lr, config.warmup, total), end
    asked = config.given & {"epochs", "max_steps", "max_minutes"}  # for checkpoints without `end`
    before, same = (
        Schedule(**saved["schedule"] | {"first_step": 0}),
        saved.get("end", None if asked else end) == end,
    )
    return before if same else before.extended(saved["step"], total), end


WARMUP_SHARE = 0.1  # the part of a run in which the rate rises, at most


def progress(step: int, total_steps: int, minutes: float = 0.0, max_minutes: float = 0.0) -> float:
    """The share of the run that is done, by steps or by time, whichever is further; from 1 on it ends.

    Without a time limit `max_minutes` is 0.
    """
    by_steps = step / total_steps
    by_time = minutes / max_minutes if max_minutes else 0.0
    return max(by_steps, by_time)


def learning_rate(peak: float, step: int, progress: float, warmup: int) -> float:
    """The rate of update `step`, counted from 1, when `progress` of the run is done.

    It rises over `warmup` steps. Where time is short it is at its peak after a tenth of the run, but never before
    20 steps: a single slow step, such as one that compiles, must not end the warm-up.
    """
    by_time = min(progress / WARMUP_SHARE, step / 20)
    rising = max(step / warmup, by_time)
    falling = (1 - progress) / DECAY_SHARE
    return peak * max(0.0, min(1.0, rising, falling))


def warmup_steps(asked: int, total_steps: int) -> int:
    """At most a tenth of the run's steps, at least one."""
    return max(1, min(asked, int(total_steps * WARMUP_SHARE)))
