"""What does watching a run cost? Short runs of train.py with its log, curves and samplers, in turns with runs without them.

    python -m benchmarks.telemetry                           # the sample, this machine's best device
    python -m benchmarks.telemetry --data DIR --steps 200 --rounds 20

All take the same steps on the same batches. What is asked for is less than two runs differ by: take many rounds.
"""

import tempfile
import time
from dataclasses import dataclass
from unittest.mock import patch

import train
from benchmarks.measuring import Row, measure
from engine.config import flag, parse_flags
from engine.errors import run_script
from engine.precision import Precision
from engine.telemetry import GpuSampler

WARM = 20  # steps before the clock starts


@dataclass
class Config:
    """Every setting of this benchmark."""

    data: str = flag("", "as train.py's --data", "What")
    steps: int = flag(100, "steps of a turn", "How", least=20)
    rounds: int = flag(10, "turns of each", "How", least=1)
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "How")
    out: str = flag("runs/benchmarks/telemetry.json", "file for all turns", "How")


def main(config: Config) -> list[Row]:
    """Take turns, print the table; → its rows."""
    rows = measure("what watching costs", ["watched", "alone"], config, lambda name: turn(config, name == "watched"),
                   "steps_per_second", baseline="alone", decimals=2)  # fmt: skip
    print(f"watching costs {1 - rows[0].ratio:.2%} of the time")
    return rows


def turn(config: Config, watched: bool) -> dict[str, float]:
    """Steps a second of one run, from the end of the warm-up to the last step; what follows that does not count."""
    times, step, sample = [], Precision.step, GpuSampler._sample if watched else lambda sampler: None

    def timed(*arguments):
        norm = step(*arguments)
        if len(times) in (WARM, WARM + config.steps):
            norm.item()  # what was only sent to a GPU belongs to this turn
        times.append(time.perf_counter())
        return norm

    with tempfile.TemporaryDirectory() as folder:
        settings = train.Config(data=config.data, device=config.device, max_steps=WARM + config.steps + 1, run=f"{folder}/run",
                                eval_every=10**9, log_every=20 if watched else 10**9)  # fmt: skip
        settings.given = set()
        with patch.object(Precision, "step", timed), patch.object(GpuSampler, "_sample", sample):
            train.train(settings)
    return {"steps_per_second": config.steps / (times[-1] - times[WARM])}


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "what log, curves and samplers cost")))
