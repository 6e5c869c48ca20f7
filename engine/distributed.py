"""One process or many: who am I, on which device, and the few collectives that the scripts need.

world = start("auto")                  # reads what torchrun or srun sets; alone when nothing is set
total = world.sum(torch.tensor([loss, count], dtype=torch.float64))
"""

import contextlib
import itertools
import math
import os
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import (
    TimeoutError as MeetingTimeout,
)  # the built-in one only from Python 3.11 on
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from engine.errors import UserError
from engine.memory import keep_freed_memory

JOIN = timedelta(minutes=5)  # for all processes of a run to be started, on all machines
ANSWER = timedelta(
    minutes=15
)  # for the slowest rank to come to a collective; then the others end with an error
WORK = timedelta(days=2)  # for what rank 0 does alone, such as tokenising a large data set


@dataclass(frozen=True)
class World:
    """This process among its peers. `size` 1 means there are none, and every collective returns at once."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store | None = field(
        default=None, compare=False
    )  # the ranks' common key-value store
    turns: itertools.count = field(
        default_factory=itertools.count, compare=False
    )  # numbers on_main's calls

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

    def on_main(self, work):
        """Rank 0's picklable result of `work()` on every rank; its `UserError` as well, so that all stop together."""
        result = mistake = None
        if self.is_main:
            try:
                result = work()
            except UserError as error:
                mistake = str(error)
        if self.size > 1:
            # The others wait at the store: in a collective they would give up on a rank 0 that works for long.
            done = f"on_main/{next(self.turns)}"
            self.store.set(done, "") if self.is_main else self.store.wait([done], WORK)
            box = [(result, mistake)]
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
            result, mistake = box[0]
        if mistake:
            raise UserError(mistake)
        return result

    def gather(self, value) -> list | None:
        """Every rank's value, in the order of ranks, on rank 0; None elsewhere."""
        if self.size == 1:
            return [value]
        turn = (
            f"gather/{next(self.turns)}"  # at the store, as above: shares of work may end far apart
        )
        self.store.set(f"{turn}/{self.rank}", "")
        self.store.wait([f"{turn}/{rank}" for rank in range(self.size)], WORK)
        boxes = [None] * self.size if self.is_main else None
        dist.gather_object(value, boxes, dst=0)
        return boxes

    def data_parallel(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module in DDP, which averages gradients in the backward pass; alone, or after `shard`, as it is."""
        if self.size == 1 or any(
            hasattr(part, "unshard") for part in module.modules()
        ):  # a method of FSDP2's
            return module
        # A gradient is a view into the bucket that is sent: no second copy. Without `device_ids` inputs stay where they
        # are: some are to stay on the CPU.
        parallel = DistributedDataParallel(module, gradient_as_bucket_view=True)
        parallel.broadcast_buffers = (
            False  # they are constants here, and not to be sent at every step
        )
        return parallel

    def accumulate_gradients(self, module: torch.nn.Module, last: bool):
        """A context for one micro-batch of a step: DDP averages the gradients in the last one only.

        Alone, and with FSDP2, which averages in every backward pass, it changes nothing.
        """
        if last or not isinstance(module, DistributedDataParallel):
            return contextlib.nullcontext()
        return module.no_sync()

    def shard(self, model: torch.nn.Module, log) -> bool:
        """Fully shard it (FSDP2, ZeRO-3): each process keeps its part of every weight. Alone: a note in `log`, and False.

        A layer of a `ModuleList` is gathered when it is due; what is left, tied weights too, is gathered together. Gradients
        are averaged and cut after each backward pass, also between micro-batches: whole ones would take the memory back.
        """
        if self.size == 1:
            log(
                "note: --shard has no effect: one process keeps the whole model; start several with torchrun"
            )
            return False
        from torch.distributed.device_mesh import (
            init_device_mesh,
        )  # here, because few scripts pay for the import
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.size,))
        layers = [
            layer
            for part in model.modules()
            if isinstance(part, torch.nn.ModuleList)
            for layer in part
        ]
        for part in [*layers, model]:
            fully_shard(part, mesh=mesh)
        return True

    def set_seed(self, seed: int, step: int) -> None:
        """Seed torch by the run's seed, the step and the rank: what a resumed step draws, it draws again."""
        # Not just shifted into place: of 64 bits torch's generator on the CPU looks at the lower 32 only.
        mixed = int(np.random.SeedSequence((seed, step, self.rank)).generate_state(1, np.uint64)[0])
        torch.default_generator.manual_seed(
            mixed
        )  # torch.manual_seed looks at absent devices too, ten times as long
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(mixed)

    def stop(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor, in pieces on the ranks (FSDP2), put together: all ranks must call; any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distribute_like(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a tensor that all have whole, cut like the DTensor `weight`; if that is whole, all of it."""
    if not hasattr(weight, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        tensor, weight.device_mesh, weight.placements, src_data_rank=None
    )  # None: no rank sends


def process_grid(world: World, **sizes: int):
    """The ranks as a `DeviceMesh`: data=2, pipe=4 has two rows of four; rank 5 is in row 1, column 1.

    `process_grid(…)["pipe"].get_group()` is the process group of this rank's row. Raises
    `UserError` if the sizes do not multiply to the number of processes.
    """
    from torch.distributed.device_mesh import init_device_mesh  # few scripts pay for the import

    if math.prod(sizes.values()) != world.size or min(sizes.values()) < 1:
        sides = " × ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(
            f"{world.size} processes do not form a grid of {sides}; start the product of the sizes"
        )
    if not dist.is_initialized():  # one process alone: a group of one, so that the same code runs
        store = dist.HashStore()
        dist.init_process_group(backend_for(world.device), store=store, rank=0, world_size=1)
    return init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def several_asked() -> bool:
    """Whether torchrun or srun started more processes than this one."""
    adopt_srun()
    return os.environ.get("WORLD_SIZE", "1") != "1"


def start(device_name: str = "auto") -> World:
    """Join the process group that torchrun or srun describes, if any, and choose this rank's device.

    Raises `UserError`: an environment that is half set or wrong, more ranks than GPUs, processes that do not find each
    other within `JOIN`.
    """
    adopt_srun()
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in variables if name not in os.environ]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        return World(0, 1, choose_device(device_name, 0))
    if missing:
        names = ", ".join(missing)
        raise UserError(
            f"{names} missing in the environment; start with torchrun, or unset RANK and WORLD_SIZE"
        )
    numbers = [os.environ[name] for name in variables if name != "MASTER_ADDR"]
    if not all(number.isdecimal() for number in numbers):
        told = ", ".join(numbers)
        raise UserError(
            f"RANK, WORLD_SIZE, LOCAL_RANK, MASTER_PORT must be numbers, not {told}; use torchrun"
        )
    rank, size, local_rank, _ = map(int, numbers)
    if rank >= size:
        raise UserError(
            f"RANK {rank} must be below WORLD_SIZE {size}; start with torchrun, or unset both"
        )
    device = choose_device(device_name, local_rank)
    return World(rank, size, device, join(rank, size, device) if size > 1 else None)


def join(rank: int, size: int, device: torch.device) -> dist.Store:
    """Meet the other processes at MASTER_ADDR:MASTER_PORT; → their common store."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        # By hand what init_process_group would do, because it has one timeout for this and for the collectives. In a
        # thread, because a foreign program that listens at the port and says nothing would be waited for without end.
        meeting = ThreadPoolExecutor(1).submit(
            lambda: next(rendezvous("env://", rank, size, timeout=JOIN))
        )
        store, _, _ = meeting.result(timeout=JOIN.total_seconds() + 5)
        if os.environ.get("LOCAL_WORLD_SIZE") == str(
            size
        ):  # on one machine all processes know which attempt this is
            # torchrun keeps its store when it restarts the processes: what the dead ones wrote there is not for these.
            store = dist.PrefixStore(
                f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store
            )
        dist.init_process_group(
            backend_for(device), store=store, rank=rank, world_size=size, timeout=ANSWER
        )
    except (MeetingTimeout, dist.DistError, RuntimeError, ValueError, OSError) as error:
        reason = (str(error).strip() or f"no answer for {JOIN}").splitlines()[0]
        if "EADDRINUSE" in str(error):
            reason = "the port is in use by another program; choose another: --master_port of torchrun, or MASTER_PORT"
        raise UserError(f"rank {rank} cannot meet the others at {place}: {reason}") from None
    return store


def backend_for(device: torch.device) -> str:
    """gloo carries CPU tensors (flags, Python objects), NCCL the gradients of GPUs."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def adopt_srun(environment=os.environ) -> None:
    """Where SLURM's srun started several tasks, set the variables that torchrun would have set.

    In a batch script outside srun there is one process, whatever the job asked for: SLURM_STEP_* are srun's own.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if (
        tasks == "1" or "RANK" in environment or "WORLD_SIZE" in environment
    ):  # alone, or torchrun under srun
        return
    names = (
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_NODELIST",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_JOB_ID",
    )
    if missing := [name for name in names if name not in environment]:
        raise UserError(
            f"srun started {tasks} tasks, but {', '.join(missing)} missing; use torchrun"
        )
    rank, local_rank, nodes, tasks_per_node, job = (environment[name] for name in names)
    environment.update(RANK=rank, WORLD_SIZE=tasks, LOCAL_RANK=local_rank)
    # "2(x3),1": three machines with 2 tasks, one with 1. The largest number stands for all machines.
    environment["LOCAL_WORLD_SIZE"] = str(
        max(map(int, re.findall(r"(\d+)(?:\(x\d+\))?", tasks_per_node)))
    )
    # The first machine of the list: of 'gpu[03-05,9],cpu1' gpu03, of 'rack[1-2]node[3-4]' rack1node3.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)[0]
    environment.setdefault("MASTER_ADDR", re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first))
    # Another port for each job and step, alike in all its tasks: 10,000–29,999, below what Linux gives to clients.
    step = int(environment.get("SLURM_STEP_ID", 0))
    environment.setdefault("MASTER_PORT", str(10_000 + (int(job) * 7 + step) % 20_000))


def choose_device(name: str, local_rank: int) -> torch.device:
    """'auto' is this rank's GPU, or the CPU on a machine without GPUs.

    Raises `UserError` for a device that is not there, and for GPUs that PyTorch cannot use.
    """
    if name not in ("auto", "cpu", "cuda") and not name.startswith("cuda:"):
        raise UserError(f"--device {name}: unknown device; choose auto, cpu, cuda or cuda:N")
    if name != "cpu" and not torch.cuda.is_available():
        reason = hidden_gpus()
        # Whoever hides the GPUs wants the CPU. For any other reason a run would take hours on the
        # CPU without anybody having asked for that.
        if reason and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            raise UserError(f"{reason}; or give --device cpu")
        if name != "auto":
            reason = reason or "PyTorch sees no GPU on this machine"
            raise UserError(f"--device {name}: {reason}; --device auto takes the CPU then")
        name = "cpu"
    if name == "cpu":
        keep_freed_memory()
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if ":" in name and os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            f"--device {name} gives all processes the same GPU; use `CUDA_VISIBLE_DEVICES=… torchrun …`"
        )
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    # With srun --gpus-per-task each task sees one card, its own; torchrun under SLURM shares out what it sees.
    by_srun = "SLURM_LOCALID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    own_card = (
        by_srun
        and count == 1
        and int(os.environ.get("SLURM_GPUS_ON_NODE", local_size)) >= local_size
    )
    if (
        ":" not in name and local_size > count and not own_card
    ):  # said by every rank, so that none waits for the others
        raise UserError(
            f"{local_size} processes but {count} visible GPU(s); start at most {count}, or --device cpu"
        )
    index = name.partition(":")[2] or str(0 if own_card else local_rank)
    if not index.isdecimal() or int(index) >= count:
        raise UserError(
            f"GPU {index} was asked for but {count} can be seen; use fewer processes or another --device"
        )
    device = torch.device("cuda", int(index))
    try:
        torch.cuda.set_device(device)  # without it NCCL puts every rank's buffers on GPU 0
        torch.cuda.synchronize(device)  # makes its context, for which there must be memory
    except RuntimeError as error:  # others have filled it, or have it for themselves
        raise UserError(
            f"GPU {index} cannot be used ({str(error).splitlines()[0]}); `nvidia-smi` shows who is on it and which "
            "are free: choose one with CUDA_VISIBLE_DEVICES=N"
        ) from None
    return device


# The oldest NVIDIA driver for each CUDA version that PyTorch 2.13 is built for: CUDA 13.0, which
# pip installs by default, and CUDA 12.6 (pytorch/pytorch, RELEASE.md; NVIDIA's CUDA release notes).
OLDEST_DRIVER = {13: 580, 12: 525}


def hidden_gpus(nvidia: Path = Path("/proc/driver/nvidia")) -> str | None:
    """One line if the machine has NVIDIA GPUs and PyTorch can use none of them, else None.

    The line says why, and how to mend it. `nvidia` is where the driver describes itself.
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
