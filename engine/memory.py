"""Memory: a CPU's is kept for the next step and bounded; work that is too large for a GPU's is done in parts."""

import ctypes
import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

GIB = 2**30
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # numbers of malloc.h, see mallopt(3)
# oneDNN keeps the code it made for a shape of matrices: 1,024 shapes, half a megabyte each. Without fast/'s kernels
# batches of sentences have ever new shapes, and only those of one step are worth keeping: so many.
CACHES = {
    "LRU_CACHE_CAPACITY": "128",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
}  # entries; PyTorch's and oneDNN's own


def keep_freed_memory() -> None:
    """From now on `free` keeps what `malloc` once got, where the C library is glibc.

    By default every tensor above 32 MiB is a mapping of its own: the kernel clears its pages when they are first touched and
    takes them back when the tensor dies, a thousand times a step. The price: the process never shrinks below its peak. To be
    called before the first matrix product, when the caches of shapes get their size.
    """
    for name, entries in CACHES.items():
        os.environ.setdefault(name, entries)
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        # No mappings of their own, no giving back (-1: never), heap grows by 256 MiB.
        for setting, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 256 * 2**20)):
            mallopt(setting, value)


def held_gib(which: str = "VmHWM") -> float:
    """GiB of this process: now (`which` VmRSS), at most (VmHWM); where /proc does not tell (macOS, gVisor), at most.

    Not by `ru_maxrss` where it can be helped: that counts what the parent process held, too. "kB" in /proc are KiB.
    """
    with suppress(OSError, TypeError):
        return (
            int(
                re.search(
                    rf"{which}:\s+(\d+)", Path("/proc/self/status").read_text(errors="replace")
                )[1]
            )
            / 2**20
        )
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, else KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def forget_peak() -> bool:
    """From here on VmHWM is the most held since, freed memory given back first; False where that cannot be (not Linux)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's code for this, proc(5)
    except (OSError, AttributeError):
        return False
    return True


def fewest_parts(trial, device: torch.device, largest: int = 256) -> int:
    """The smallest power of two, at most `largest`, so that `trial(parts)` does not run out of a GPU's memory.

    Raises what the last trial raised if none does. 1 on a CPU: it would swap, and nothing would tell.
    """
    parts = 1
    while device.type == "cuda":
        try:
            trial(parts)
            return parts
        except RuntimeError as error:  # on a full card also of a kernel that is loaded late, or of cuBLAS's work space
            if parts >= largest or not (
                "out of memory" in str(error) or "CUBLAS_STATUS" in str(error)
            ):
                raise
        finally:  # while the handler runs, the error holds the trial's tensors; NCCL cannot have what PyTorch keeps
            torch.cuda.empty_cache()
        parts *= 2
    return parts


def micro_batches_that_fit(loss_of, precision, pairs, heaviest_steps, collate, world) -> int:
    """The fewest micro-batches per step (a power of two) with which training fits in the GPU's memory.

    Tried with the steps that need most: `heaviest_steps`, each a list of indices into `pairs`. All ranks get the
    same number. On a CPU and for a sharded model (FSDP2), whose ranks cannot be tried alone, it is 1.
    """
    weights = list(loss_of.parameters())
    if any(hasattr(module, "unshard") for module in loss_of.modules()):
        return 1

    def try_heaviest_steps(parts: int) -> None:
        # As large as AdamW's two moments and the buckets that DDP sends.
        reserved = [torch.empty_like(weight) for weight in weights for _ in range(3)]
        for step in heaviest_steps:
            part = pairs.__getitems__(step[:: parts * world.size])
            batch = collate(part).to(world.device)
            with precision.autocast():
                loss, _ = loss_of(*batch.inputs)
            loss.backward()
        del reserved

    parts = fewest_parts(try_heaviest_steps, world.device)
    for weight in weights:
        weight.grad = None
    return int(world.maximum(parts)[0])
