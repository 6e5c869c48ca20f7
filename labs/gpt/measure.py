"""What a step cost: time, memory, and the share of it in which messages were under way."""

import os
import statistics
import time
from contextlib import contextmanager

import torch

from engine.memory import forget_peak, held_gib
from engine.telemetry import peak_memory_gib


class Steps:
    """Seconds of each step; the first ones warm up and are not counted."""

    def __init__(self, device: torch.device, warm_up: int = 2):
        self.device, self.warm_up = device, warm_up
        self.seconds = []
        self.last = None

    def start(self) -> None:
        """Before a step, and after anything that is no step (validation, saving)."""
        self.last = time.perf_counter()

    def end(self) -> None:
        """After a step; what was sent to a GPU is waited for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds[self.warm_up :] or self.seconds)


class Memory:
    """The most that was held since `Memory()`: by tensors on a GPU, by the whole process on a CPU.

    A process holds some 0.3 GiB of libraries before it has a model; that is left out here.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.before = 0.0
        if device.type == "cpu":
            forget_peak()  # where that cannot be done, it may be one of before
            self.before = held_gib("VmRSS")
        else:
            torch.cuda.reset_peak_memory_stats(device)

    def peak_gib(self) -> float:
        """The most GiB held so far; on a CPU above what the process held before it had a model."""
        return peak_memory_gib(self.device) - self.before


def cores() -> int:
    """The cores that this process may use."""
    return (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )  # macOS has it not


def share_of_cores(processes: int) -> float:
    """What a process gets of the cores that its threads could use, where so many processes share them."""
    return min(1.0, cores() / (processes * torch.get_num_threads()))


@contextmanager
def communication(result: dict, device: torch.device):
    """Inside, one step is traced; → result["communication_share"], the part of its time in which a message was under way.

    A rank that waits for the others counts as communicating: that is time lost to it as well. Messages that travel while
    the rank computes count too, so a large share is not always a loss.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        begin = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or []
        if any(word in event.name for word in ("gloo:", "nccl:", "ncclDevKernel"))
    ]
    result["communication_share"] = min(
        1.0, covered(spans) / 1e6 / seconds
    )  # the profiler counts microseconds


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of some spans of time."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total
