"""What does watching a run cost? One training, by train.py itself, in turns with its log, curves and samplers and without them.

    python -m benchmarks.telemetry                           # the sample, this machine's best device
    python -m benchmarks.telemetry --data DIR --steps 200 --rounds 20

Within one run, because two runs of the same code differ by more than what is asked for.
"""

import statistics
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import train
from benchmarks.measuring import Run, compare, describe_machine, print_table, write_json
from engine.config import flag, parse_flags
from engine.errors import run_script
from engine.precision import Precision
from engine.telemetry import GpuSampler, Meter


@dataclass
class Config:
    """Every setting of this benchmark."""

    data: str = flag("", "as train.py's --data", "What")
    steps: int = flag(100, "steps of a turn", "How", least=20)
    rounds: int = flag(10, "turns of each", "How", least=1)
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "How")
    out: str = flag("runs/benchmarks/telemetry.json", "file for all turns", "How")


class Over(Exception):
    """All turns are taken."""


def main(config: Config) -> list[Run]:
    """Train, print the table; → all turns."""
    runs, turn = [], {"steps": -config.steps, "tokens": 0, "watched": True, "begun": 0.0}  # the first turn warms up
    settings = train.Config(data=config.data, device=config.device, eval_every=10**9, epochs=10**6)
    settings.given, log_every = set(), settings.log_every
    count, step, end_step, sample = Meter.add, Precision.step, Meter.end_step, GpuSampler._sample

    def counted(meter, source_tokens, target_tokens, *more):
        turn["tokens"] += source_tokens + target_tokens
        if_watched(count)(meter, source_tokens, target_tokens, *more)

    def stepped(*arguments):
        result = step(*arguments)
        turn["steps"] += 1
        if turn["steps"] in (0, config.steps):
            result.item()  # what was only sent to a GPU belongs to this turn
            seconds, name = time.perf_counter() - turn["begun"], "watched" if turn["watched"] else "alone"
            if turn["steps"]:
                runs.append(Run(name, len(runs) // 2 + 1, {"tokens_per_second": turn["tokens"] / seconds}, seconds))
                turn["watched"] = not turn["watched"]
                settings.log_every = log_every if turn["watched"] else 10**9
            if len(runs) == 2 * config.rounds:
                raise Over
            turn.update(steps=0, tokens=0, begun=time.perf_counter())
        return result

    def if_watched(function):
        return lambda *arguments: function(*arguments) if turn["watched"] else None

    print(describe_machine(), flush=True)
    with (
        tempfile.TemporaryDirectory() as folder, patch.object(Meter, "add", counted), patch.object(Precision, "step", stepped),
        patch.object(Meter, "end_step", if_watched(end_step)), patch.object(GpuSampler, "_sample", if_watched(sample)),
        suppress(Over),
    ):  # fmt: skip
        settings.run = str(Path(folder) / "run")
        train.train(settings)
    write_json(config.out, runs, title="what watching a run costs")
    print_table(compare(runs, "tokens_per_second", "alone"), "tokens a second")
    speeds = [run.figures["tokens_per_second"] for run in runs]
    cost = statistics.median(1 - watched / alone for watched, alone in zip(speeds[::2], speeds[1::2]))
    print(f"watching costs {cost:.2%} of the time, the median of {config.rounds} pairs of turns")
    return runs


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "what log, curves and samplers cost")))
