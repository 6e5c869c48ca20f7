"""What does watching a run cost? A short run of train.py that adds up the time inside log, curves, meters and samplers.

    python -m benchmarks.telemetry                           # the sample, this machine's best device
    python -m benchmarks.telemetry --data DIR --steps 200

Runs with and without them, in turns, differ by more than they cost, so it is their own time that is counted: of the training
thread with its waiting, of the sampler's thread what it computes.
"""

import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

import train
from engine.config import flag, parse_flags
from engine.errors import run_script
from engine.precision import Precision
from engine.telemetry import GpuSampler, Log, Meter, ProcessMeter, Telemetry

WATCHING = {  # none of them calls another
    Log: ["__call__"], Telemetry: ["scalars", "text", "figure"], Meter: ["add", "end_step", "read"],
    ProcessMeter: ["read"], GpuSampler: ["read", "_sample"],
}  # fmt: skip
WARM = 20  # steps before the clock starts


@dataclass
class Config:
    """Every setting of this benchmark."""

    data: str = flag("", "as train.py's --data", "What")
    steps: int = flag(200, "steps that count", "How", least=20)
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "How")


def main(config: Config) -> float:
    """Print each method's time; → the share of the training time that all take."""
    spent, times, step = Counter(), [], Precision.step  # times: when the clock started and stopped

    def counted(name, method, clock):
        def call(*arguments, **flags):
            begun = clock()
            try:
                return method(*arguments, **flags)
            finally:
                spent[name] += (clock() - begun) * (len(times) == 1)

        return call

    def timed(precision, optimizer, parameters, clip, number):
        norm = step(precision, optimizer, parameters, clip, number)
        if number in (WARM, WARM + config.steps):
            norm.item()  # what was only sent to a GPU belongs to the time before
            times.append(time.perf_counter())
        return norm

    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        for owner, names in WATCHING.items():
            for name in names:
                clock = time.thread_time if name == "_sample" else time.perf_counter
                call = counted(f"{owner.__name__}.{name}", getattr(owner, name), clock)
                patches.enter_context(patch.object(owner, name, call))
        patches.enter_context(patch.object(Precision, "step", timed))
        settings = train.Config(data=config.data, device=config.device, max_steps=WARM + config.steps + 1,
                                run=f"{folder}/run", eval_every=10**9)  # fmt: skip
        train.train(settings)
    seconds = times[1] - times[0]
    for name, value in spent.most_common():
        print(f"{name:20} {value * 1000:8.2f} ms  {value / seconds:.4%}")
    print(f"watching costs {sum(spent.values()) / seconds:.3%} of {seconds:.1f} s")
    return sum(spent.values()) / seconds


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "what log, curves and samplers cost")))
