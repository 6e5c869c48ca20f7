"""Memory: keep what the CPU's allocator has freed; how much this process holds, and may hold."""

import ctypes
import math
import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

GIB = 2**30

# Settings of mallopt(3), numbered as in malloc.h, with the values that we give them.
ALLOCATOR = {
    "M_MMAP_MAX": (-4, 0),  # no memory mapping for a single large tensor
    "M_TRIM_THRESHOLD": (-1, -1),  # never give memory back to the system
    "M_TOP_PAD": (-2, 256 * 2**20),  # bytes by which the heap grows at a time
}
# oneDNN compiles code for each shape of a matrix product and keeps 1,024 of them by default, half a
# megabyte each. Batches of sentences have ever new shapes, so only those of the last step pay.
CACHE_ENTRIES = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}


def keep_freed_memory() -> None:
    """Let `free` keep the memory for the next `malloc`. Call it before the first matrix product.

    By default glibc maps every tensor above 32 MiB anew: the kernel clears its pages when they are
    first used and takes them back when the tensor dies, a thousand times in a training step. The
    price: the process never shrinks below its peak. Without glibc nothing changes.
    """
    for name, entries in CACHE_ENTRIES.items():
        os.environ.setdefault(name, entries)
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for number, value in ALLOCATOR.values():
            mallopt(number, value)


def held_gib(which: str = "VmHWM") -> float:
    """GiB that this process holds now (`which` = "VmRSS") or has held at most ("VmHWM").

    Where /proc does not tell (macOS, gVisor) it is always the most.
    """
    size = size_in(Path("/proc/self/status"), which)
    if size is not None:
        return size / GIB
    # Second choice, because it includes what the parent process held: bytes on macOS, else KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def size_in(file: Path, name: str) -> int | None:
    """Bytes, by the line "name: 123 kB" of a file in /proc; None if the file or line is missing."""
    with suppress(OSError):
        text = file.read_text(encoding="utf-8", errors="replace")
        found = re.search(rf"{name}:\s+(\d+) kB", text)
        if found:
            return 1024 * int(found[1])
    return None


def forget_peak() -> bool:
    """Give freed memory back and let `held_gib("VmHWM")` start again. False where it cannot be."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak, see proc(5)
    except (OSError, AttributeError):
        return False
    return True


def memory_limit(device: torch.device) -> float:
    """GiB that this process can hold in all, with what it holds already."""
    if device.type == "cuda":
        return (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)) / GIB
    limit = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    free = size_in(Path("/proc/meminfo"), "MemAvailable")
    if free is not None:
        limit = free + int(held_gib("VmRSS") * GIB)
    return min(limit, cgroup_limit()) / GIB


def cgroup_limit(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float:
    """Bytes that a container or a job of SLURM may hold (control groups, version 2), or infinity.

    A group is a folder below `root`; `own` names ours. A folder above it may set a lower limit.
    """
    group = root
    with suppress(OSError):
        for line in own.read_text(encoding="utf-8").splitlines():
            if line.startswith("0::/"):  # the line of version 2
                group = root / line.removeprefix("0::/")
    limits = [math.inf]
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):  # no such file, or "max": no limit
            limits.append(int((folder / "memory.max").read_text(encoding="utf-8")))
        if folder == root:
            break
    return min(limits)
