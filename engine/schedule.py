"""The learning rate: linear warm-up, then a shape that ends at zero.

A run ends after a number of steps or of minutes. How much of it is done is its `progress`, from 0
to 1, and the rate is a function of (step, progress). `SCHEDULES` names the shapes.
"""

from collections.abc import Callable
from dataclasses import dataclass

WARMUP_SHARE = 0.1  # the part of a run in which the rate rises, at most
DECAY_SHARE = 0.3  # the last part of a run, in which the rate falls
FEWEST_WARMUP_STEPS = 20  # where a time limit ends the warm-up
VALIDATION_SHARE = 1 / 6  # of a run: automatic validations are not further apart
FEWEST_STEPS_BETWEEN = 250  # automatic validations, unless the run is short


def warmup_stable_decay(progress: float) -> float:
    """Constant, then linear decay to zero."""
    return (1 - progress) / DECAY_SHARE  # above 1 before the decay; `learning_rate` cuts it off


@dataclass(frozen=True)
class Schedule:
    """A shape of the learning rate. --help, the settings and the report take it from here."""

    shape: Callable[[float], float]  # progress → share of the peak, without the warm-up
    papers: tuple[str, ...]  # for the report's list of sources


SCHEDULES = {
    "wsd": Schedule(
        warmup_stable_decay,
        (
            "Hu et al. 2024, MiniCPM, arXiv:2404.06395",
            "Hägele et al. 2024, Scaling Laws Beyond Fixed Training Durations, arXiv:2405.18392",
        ),
    ),
}


def progress(step: int, total_steps: int, minutes: float = 0.0, max_minutes: float = 0.0) -> float:
    """The share of the run that is done, by steps or by time, whichever is further.

    At 1 the run ends. Without a time limit `max_minutes` is 0.
    """
    by_steps = step / total_steps
    by_time = minutes / max_minutes if max_minutes else 0.0
    return max(by_steps, by_time)


def warmup_steps(asked: int, total_steps: int) -> int:
    """The steps in which the rate rises: at most a tenth of the run's, at least one."""
    return max(1, min(asked, int(total_steps * WARMUP_SHARE)))


def learning_rate(
    peak: float, step: int, progress: float, warmup: int, schedule: str = "wsd"
) -> float:
    """The rate of update `step`, counted from 1, when `progress` of the run is done.

    It rises for `warmup` steps. Under a time limit it is at its peak after a tenth of the time, but
    not before 20 steps: a single slow step, such as one that compiles, must not end the warm-up.
    """
    by_time = min(progress / WARMUP_SHARE, step / FEWEST_WARMUP_STEPS)
    rising = max(step / warmup, by_time)
    return peak * max(0.0, min(1.0, rising, SCHEDULES[schedule].shape(progress)))


def is_falling(progress: float, schedule: str = "wsd") -> bool:
    """Whether the rate is on its way to zero."""
    return SCHEDULES[schedule].shape(progress) < 1


def share_of_fall(schedule: str) -> float:
    """The part of a run in which the rate falls."""
    return sum(is_falling((percent + 0.5) / 100, schedule) for percent in range(100)) / 100


def is_validation_step(
    step: int, progress: float, progress_before: float, eval_every: int, steps_per_epoch: int
) -> bool:
    """Whether to validate after `step`, when `progress` of the run is done.

    At the end, and every `eval_every` steps. If that is 0, once an epoch, but at least 250 steps
    apart; and where a sixth of the run has passed since the last validation, which began at
    `progress_before`: so a short run has a curve, too.
    """
    if progress >= 1:
        return True
    if eval_every:
        return step % eval_every == 0
    # Rounding must not put off a validation by a step.
    is_long_ago = progress - progress_before >= VALIDATION_SHARE - 1e-9
    return is_long_ago or step % max(FEWEST_STEPS_BETWEEN, steps_per_epoch) == 0
