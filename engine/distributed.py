"""One process or many: who am I, on which device, and the few collectives that the scripts need.

world = start("auto")                  # reads what torchrun sets; alone when nothing is set
total = world.sum(torch.tensor([loss, count], dtype=torch.float64))
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from engine.errors import UserError


@dataclass(frozen=True)
class World:
    """This process among its peers. `size` 1 means there are none, and every collective returns at once."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum over all ranks, the same on each."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def maximum(self, *values: float) -> list[float]:
        """The largest of each value over all ranks. Travels on the CPU, so it does not wait for the GPU."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def from_main(self, value):
        """Rank 0's value of any picklable object, on every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def on_main(self, work):
        """Rank 0's result of `work()` on every rank; its `UserError` as well, so that all stop together."""
        result = mistake = None
        if self.is_main:
            try:
                result = work()
            except UserError as error:
                mistake = str(error)
        result, mistake = self.from_main((result, mistake))
        if mistake:
            raise UserError(mistake)
        return result

    def gather(self, value) -> list | None:
        """Every rank's value, in the order of ranks, on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        boxes = [None] * self.size if self.is_main else None
        dist.gather_object(value, boxes, dst=0)
        return boxes

    def stop(self) -> None:
        """Leave the process group."""
        if self.size > 1:
            dist.destroy_process_group()


def start(device_name: str = "auto") -> World:
    """Join the process group that torchrun describes, if any, and choose this rank's device."""
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in variables if name not in os.environ]
    if len(missing) == len(variables) or ("RANK" in missing and "WORLD_SIZE" in missing):
        return World(0, 1, choose_device(device_name, 0))
    if missing:
        raise UserError(
            f"the environment of a multi-process run is half set: {', '.join(missing)} missing; start with "
            "`torchrun --nproc_per_node N script.py`, or unset RANK and WORLD_SIZE"
        )
    words = [os.environ[name] for name in variables[:3]]
    if not all(word.isdecimal() for word in words):
        raise UserError(
            f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers, not {', '.join(words)}; start with torchrun, or unset them"
        )
    rank, size, local_rank = map(int, words)
    device = choose_device(device_name, local_rank)
    if size == 1:
        return World(0, 1, device)
    # gloo carries CPU tensors (flags, Python objects), NCCL the gradients of GPUs. The long timeout covers rank 0
    # preparing a large data set while the others wait.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=2))
    return World(rank, size, device)


def choose_device(name: str, local_rank: int) -> torch.device:
    """'auto' is this rank's GPU where there is one, else the CPU. Raises `UserError` for a device that is not there."""
    if name not in ("auto", "cpu", "cuda") and not name.startswith("cuda:"):
        raise UserError(f"--device {name}: unknown device; choose auto, cpu, cuda or cuda:N")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = hidden_gpus() or "PyTorch sees no GPU on this machine"
        raise UserError(f"--device {name}: {reason}; leave the flag out to train on the CPU")
    count = torch.cuda.device_count()
    if ":" in name and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"--device {name} names one GPU for all processes; use `CUDA_VISIBLE_DEVICES=… torchrun …` instead"
        )
    index = name.partition(":")[2] or str(local_rank)
    if not index.isdigit() or int(index) >= count:
        raise UserError(f"GPU {index} was asked for but {count} can be seen; use fewer processes or another --device")
    device = torch.device("cuda", int(index))
    torch.cuda.set_device(device)  # without it NCCL puts every rank's buffers on GPU 0
    return device


def hidden_gpus(proc: Path = Path("/proc/driver/nvidia/gpus")) -> str | None:
    """One line if the machine has NVIDIA cards and PyTorch can use none of them, with the reason; else None."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = len(list(proc.iterdir())) if proc.is_dir() else 0
    if not cards or torch.cuda.is_available():
        return None
    if visible is None:
        return (
            f"PyTorch {torch.__version__} can use none of the {cards} GPU(s) of this machine: its driver is too old for "
            f"CUDA {torch.version.cuda} (see `nvidia-smi`), or this is a build for CPUs"
        )
    return f"CUDA_VISIBLE_DEVICES={visible!r} hides all {cards} GPU(s) of this machine"
