"""Which device a process uses, and why PyTorch cannot use a GPU that is there."""

import os
import re
import shlex
import sys
from pathlib import Path

import torch

from engine.errors import UserError, several_processes
from engine.memory import keep_freed_memory

# The oldest NVIDIA driver for each CUDA version that PyTorch 2.13 is built for: CUDA 13.0, which
# pip installs by default, and CUDA 12.6 (pytorch/pytorch, RELEASE.md; NVIDIA's CUDA release notes).
OLDEST_DRIVER = {13: 580, 12: 525}


def cpuinfo() -> str:
    """What Linux knows about the processor, one line a fact; empty on other systems.

    With FAST_CPU=avx2 (see engine/__init__.py), without what newer processors than that can do.
    """
    path = Path("/proc/cpuinfo")
    facts = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if as_avx2():
        facts = re.sub(r"\b(avx512|avx10|avx_vnni|amx)\w*", "", facts)
    return facts


def as_avx2() -> bool:
    """Whether the user wants the processor used as one that has AVX2 and nothing newer."""
    return os.environ.get("FAST_CPU") == "avx2"


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of this process, by the flag --device: auto, cpu, cuda or cuda:N.

    "auto" is the GPU with the number `local_rank`, or the CPU on a machine without GPUs. Raises
    `UserError` for a device that is not there, and for GPUs that PyTorch cannot use.
    """
    if name == "mps":
        raise UserError(
            "--device mps: Apple's GPU has no float64, in which losses are summed here, and was "
            "never tried; use --device cpu"
        )
    if name not in ("auto", "cpu", "cuda") and not name.startswith("cuda:"):
        raise UserError(f"--device {name}: unknown device; choose auto, cpu, cuda or cuda:N")
    if name == "cpu" or not torch.cuda.is_available():
        check_cpu_is_wanted(name)
        keep_freed_memory()
        return torch.device("cpu")

    index = choose_gpu(name, local_rank)
    device = torch.device("cuda", index)
    try:
        # Without it NCCL puts the buffers of every rank on GPU 0.
        torch.cuda.set_device(device)
        # Creates the CUDA context, for which there must be memory.
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"GPU {index} cannot be used ({reason}); `nvidia-smi` shows who is on it and which are "
            "free: choose one with CUDA_VISIBLE_DEVICES=N"
        ) from None
    return device


def check_cpu_is_wanted(name: str) -> None:
    """Raise `UserError` if a process that will use the CPU was to use a GPU."""
    if name == "cpu":
        return
    reason = hidden_gpus()
    # Whoever hides the GPUs wants the CPU. For any other reason a training would take hours on the
    # CPU although nobody asked for that.
    if reason and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        raise UserError(f"{reason}; or give --device cpu")
    if name != "auto":
        reason = reason or "PyTorch sees no GPU on this machine"
        raise UserError(f"--device {name}: {reason}; --device auto would use the CPU")


def choose_gpu(name: str, local_rank: int) -> int:
    """The number of this process's GPU among those that it sees."""
    count = torch.cuda.device_count()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if name.startswith("cuda:"):
        if several_processes():
            raise UserError(
                f"--device {name} gives all processes the same GPU; "
                "use `CUDA_VISIBLE_DEVICES=… torchrun …`"
            )
        number = name.partition(":")[2]
    elif sees_its_own_gpu_only(count, local_size):
        number = "0"
    elif local_size > count:
        # Every rank raises this, so that none waits for the others.
        raise UserError(
            f"{local_size} processes but {count} visible GPU(s); "
            f"start at most {count}, or --device cpu"
        )
    else:
        number = str(local_rank)
    if not number.isdecimal() or int(number) >= count:
        raise UserError(
            f"GPU {number} was requested, but {count} can be seen; "
            "use fewer processes or another --device"
        )
    return int(number)


def sees_its_own_gpu_only(count: int, local_size: int) -> bool:
    """Whether SLURM gives each process on this machine one GPU of its own (--gpus-per-task)."""
    # torchrun within a SLURM job shares out the GPUs that it sees.
    started_by_srun = "SLURM_LOCALID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    gpus_on_machine = int(os.environ.get("SLURM_GPUS_ON_NODE", local_size))
    return started_by_srun and count == 1 and gpus_on_machine >= local_size


def hidden_gpus(nvidia: Path = Path("/proc/driver/nvidia")) -> str | None:
    """One line if the machine has NVIDIA GPUs and PyTorch can use none of them, else None.

    The line says why, and how to fix it. `nvidia` is where the driver describes itself.
    """
    gpus = len(list(nvidia.glob("gpus/*")))
    if not gpus or torch.cuda.is_available():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    first = visible.split(",")[0].strip()  # CUDA stops at the first one that is not there
    is_there = first.isdecimal() and int(first) < gpus
    if not is_there and not first.startswith(("GPU-", "MIG-")):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides all {gpus} GPU(s) of this machine"

    unusable = f"PyTorch {torch.__version__} can use none of the {gpus} GPU(s) of this machine"
    cuda = int((torch.version.cuda or "0").split(".")[0])  # 0: a build for CPUs
    driver = driver_version(nvidia) or OLDEST_DRIVER[13]
    if driver < OLDEST_DRIVER[12]:
        newest = OLDEST_DRIVER[13]
        return f"{unusable}: the NVIDIA driver {driver} is too old; update it to {newest} or later"
    if cuda == 0 or driver < OLDEST_DRIVER.get(cuda, 0):
        reason = "it is a build for CPUs"
        if cuda:
            reason = f"its CUDA {torch.version.cuda} needs a newer driver than {driver}"
        build = "cu126" if driver < OLDEST_DRIVER[13] else "cu130"
        wanted = f"{torch.__version__.split('+')[0]}+{build}"
        install = f"{shlex.quote(sys.executable)} -m pip install torch=={wanted}"
        index = f"https://download.pytorch.org/whl/{build}"
        return f"{unusable}: {reason}; type `{install} --index-url {index}`"
    return (
        f"{unusable}: this process has no access to them; a container needs --gpus all (Docker) or "
        "--nv (Apptainer), a batch job has to request a GPU"
    )


def driver_version(nvidia: Path) -> int | None:
    """The major version of the NVIDIA driver, such as 580; None if it is not known."""
    try:
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 …"
        found = re.search(r"\b(\d+)\.\d+", (nvidia / "version").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return int(found[1]) if found else None
