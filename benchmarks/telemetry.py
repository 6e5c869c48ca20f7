"""What does watching a run cost? A short run of train.py that adds up the time inside log, curves, meters and samplers.

    python -m benchmarks.telemetry              # the sample, this machine's best device; --data DIR, --steps 1000

Runs with and without them differ by more than they cost, so their own time is counted; of the sampler's thread, its computing. On
a GPU a log line also waits for the loss, which is not in it.
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

WATCHING = [(Log, "__call__"), (Telemetry, "scalars"), (Meter, "add"), (Meter, "end_step"), (Meter, "read"),
            (ProcessMeter, "read"), (GpuSampler, "read"), (GpuSampler, "_sample")]  # fmt: skip
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
            begun, result = clock(), method(*arguments, **flags)
            spent[name] += (clock() - begun) * (len(times) == 1)
            return result

        return call

    def timed(*arguments):
        norm = step(*arguments)
        if arguments[-1] in (WARM, WARM + config.steps):  # the step's number
            norm.item()  # what was only sent to a GPU belongs to the time before
            times.append(time.perf_counter())
        return norm

    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        for owner, name in WATCHING:  # none of them calls another
            clock = time.thread_time if name == "_sample" else time.perf_counter
            watched = counted(f"{owner.__name__}.{name}", getattr(owner, name), clock)
            patches.enter_context(patch.object(owner, name, watched))
        patches.enter_context(patch.object(Precision, "step", timed))
        train.train(train.Config(data=config.data, device=config.device, max_steps=WARM + config.steps + 1,
                                 run=f"{folder}/run", eval_every=10**9))  # fmt: skip
    seconds, share = times[1] - times[0], sum(spent.values()) / (times[1] - times[0])
    for name, value in spent.most_common():
        print(f"{name:20} {value * 1000:8.2f} ms  {value / seconds:.4%}")
    print(f"watching costs {share:.3%} of {seconds:.1f} s")
    return share


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "what log, curves and samplers cost")))
