"""What a step costs: time and memory; and how fast the machine could be."""

import os
import statistics
import time

import torch

from engine.distributed import World
from engine.memory import forget_peak, held_gib
from engine.meters import cores, measured_peak_flops, peak_memory_gib


class Steps:
    """Seconds of each step; the first two warm up and are not counted.

    Also this process's CPU time, in all its threads. On a CPU it tells how much work a step is,
    even while other programs use the cores.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.begun = 0.0
        self.cpu_begun = 0.0

    def start(self) -> None:
        """Call before a step."""
        self.begun = time.perf_counter()
        self.cpu_begun = time.process_time()

    def end(self) -> None:
        """Call after a step; waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds.append(time.perf_counter() - self.begun)
        self.cpu_seconds.append(time.process_time() - self.cpu_begun)

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds[2:] or self.seconds)

    @property
    def cpu_median(self) -> float:
        """CPU seconds of a step in this process; 0 if there was none."""
        return statistics.median(self.cpu_seconds[2:] or self.cpu_seconds or [0.0])


class Memory:
    """The most memory held since `Memory()`: by tensors on a GPU, by the process on a CPU.

    A process holds some 0.3 GiB of libraries before it has a model; that is not counted. What a
    process needs later besides tensors is: `plan.PROCESS`.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.before = 0.0
        if device.type == "cpu":
            forget_peak()  # where the system cannot, an earlier peak counts
            self.before = held_gib("VmRSS")
        else:
            torch.cuda.reset_peak_memory_stats(device)

    def peak_gib(self) -> float:
        """The peak in GiB."""
        return peak_memory_gib(self.device) - self.before


def percent(share: float | None) -> str:
    """A share as text; "–" if it is unknown."""
    return "–" if share is None else f"{share:.1%}"


def peak_flops(world: World, dtype: torch.dtype) -> float:
    """FLOP/s that matrix products reach on the devices of all ranks together.

    CPU ranks share the cores of a machine. They measure one at a time, or each would see only what
    the others leave. If they have more threads than there are cores, all at once reach only a part
    of what each reached alone.
    """
    if world.device.type != "cpu":
        peak = measured_peak_flops(world.device, dtype)
    else:
        for turn in range(world.size):
            if turn == world.rank:
                peak = measured_peak_flops(world.device, dtype)
            world.maximum(0.0)  # the others wait here
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        peak *= min(1.0, cores() / (processes * torch.get_num_threads()))
    return world.sum(torch.tensor(peak)).item()
