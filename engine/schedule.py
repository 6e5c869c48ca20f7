"""The learning rate: linear warm-up, a constant plateau, linear decay to zero.

The warmup-stable-decay shape (Hu et al. 2024, arXiv:2404.06395; Hägele et al. 2024,
arXiv:2405.18392). A run ends after a number of steps or of minutes. How much of it is done is its
`progress`, from 0 to 1, and the rate is a function of (step, progress).
"""

WARMUP_SHARE = 0.1  # the part of a run in which the rate rises, at most
DECAY_SHARE = 0.3  # the last part of a run, in which the rate falls
FEWEST_WARMUP_STEPS = 20  # where a time limit ends the warm-up


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


def learning_rate(peak: float, step: int, progress: float, warmup: int) -> float:
    """The rate of update `step`, counted from 1, when `progress` of the run is done.

    It rises for `warmup` steps. Under a time limit it is at its peak after a tenth of the time, but
    not before 20 steps: a single slow step, such as one that compiles, must not end the warm-up.
    """
    by_time = min(progress / WARMUP_SHARE, step / FEWEST_WARMUP_STEPS)
    rising = max(step / warmup, by_time)
    falling = (1 - progress) / DECAY_SHARE
    return peak * max(0.0, min(1.0, rising, falling))
