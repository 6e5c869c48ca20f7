"""What a machine can do, measured for `--check`: GPUs, memory, disk, and the speed of a step."""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from engine.errors import UserError
from engine.memory import GIB, forget_peak, held_gib
from engine.meters import nvml_of

IN_USE = 0.1  # share of a GPU's memory that the driver and a screen do not need
SMALLEST_STEP = 1024  # tokens
SECONDS = 8.0  # for all steps that are timed
LEAST_STEPS, MOST_STEPS = 3, 9  # of which the median is taken


# -------------------------------------------------------------------- speed


def measure_speed(step: Callable[[int], int], budget: int) -> float:
    """Tokens per second of training.

    `step(tokens)` takes one training step of about this number of tokens, waits until it is
    computed and returns its exact number. Sizes grow towards `budget` as far as time allows,
    because small steps are slower per token. The first step of each size is not counted: it
    compiles, allocates and fills caches. The result is a median, because another process may delay
    a step.
    """
    begun = time.perf_counter()

    def speed_of(tokens: int) -> float:
        """Tokens per second of one step."""
        before = time.perf_counter()
        real = step(tokens)
        return real / (time.perf_counter() - before)

    tokens = min(SMALLEST_STEP, budget)
    while True:
        step(tokens)
        speeds = [speed_of(tokens)]
        larger = min(4 * tokens, budget)
        left = SECONDS - (time.perf_counter() - begun)
        if tokens == budget or (1 + LEAST_STEPS) * larger / speeds[0] > left:
            break
        tokens = larger
    while len(speeds) < LEAST_STEPS or (
        len(speeds) < MOST_STEPS and time.perf_counter() - begun < SECONDS
    ):
        speeds.append(speed_of(tokens))
    return statistics.median(speeds)


def describe_load() -> str:
    """A warning if other processes use the CPU, so that a measured time is too long; else ""."""
    load = os.getloadavg()[0]  # of the whole machine, whatever part of it is ours
    cores = os.cpu_count() or 1
    # This process itself has just been importing, which is up to a sixth of the last minute.
    if load < 0.2 + 0.25 * cores:
        return ""
    return f"busy: load {load:.1f} on {cores} core(s), so a quiet machine needs less"


# -------------------------------------------------------------------- GPUs


def describe_gpus() -> list[bool]:
    """Print a line for every GPU that PyTorch sees; returns whether other processes use each.

    Nothing where NVML does not answer. To be called before this process itself uses a GPU.
    """
    used = []
    with suppress(Exception):  # no package, no driver, no permission
        for index in range(torch.cuda.device_count()):
            nvml, handle = nvml_of(torch.device("cuda", index))
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            processes = len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
            # In a container other processes are hidden; their memory is not.
            used.append(processes > 0 or memory.used > IN_USE * memory.total)
            free = (memory.total - memory.used) / GIB
            print(
                f"cuda:{index}: {torch.cuda.get_device_properties(index).name}, "
                f"{free:.1f} of {memory.total / GIB:.1f} GiB free, processes: {processes}"
            )
    return used


def warn_of_other_users(device: torch.device, used: list[bool], warn: Callable) -> None:
    """Warn if others use the GPU of the run, and name those that nobody uses."""
    if device.type != "cuda" or used[device.index : device.index + 1] != [True]:
        return
    free = [f"--device cuda:{index}" for index, others in enumerate(used) if not others]
    warn(f"others use {device}; free: {', '.join(free) or 'no GPU'}")


# -------------------------------------------------------------------- memory and disk


def peak_of(work: Callable) -> float:
    """The most GiB that this process holds during `work()`; not on Linux: that it ever held."""
    forget_peak()
    work()
    return held_gib()


def check_disk(folder: Path, needed: int) -> None:
    """Raise `UserError` if `folder` (it need not exist) is read-only or lacks `needed` bytes."""
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    if not os.access(existing, os.W_OK):
        raise UserError(f"cannot write to {existing}; choose another --run PATH/NAME")
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"the disk of {existing} has {free / GIB:.1f} GiB free, "
            f"the run needs about {needed / GIB:.1f} GiB; "
            "free some space, give a smaller --keep, or choose another --run PATH/NAME"
        )
    print(f"disk: about {needed / GIB:.1f} GiB of {free / GIB:.1f} GiB free")
