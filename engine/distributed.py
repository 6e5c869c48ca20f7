"""One process or many: who am I, on which device, and the few collectives that the scripts need.

world = init("auto")           # reads what torchrun or srun sets; one process if nothing is set
total = world.sum(torch.tensor([loss, count], dtype=torch.float64))
"""

import contextlib
import itertools
import math
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout  # the built-in one from Python 3.11 on
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from engine.devices import choose_device
from engine.errors import UserError, several_processes

# How long to wait for all processes of a run to start, on all machines.
JOIN = timedelta(minutes=5)
# How long a collective waits for the slowest rank, before all end with an error.
ANSWER = timedelta(minutes=15)
# How long the others wait while rank 0 works alone, for example tokenises a large data set.
WORK = timedelta(days=2)

# The process groups, kept until the process ends. PyTorch 2.13 can deadlock when DDP is the last to
# hold gloo's group: its destructor waits for gloo's threads without releasing Python's global lock
# (GIL), and such a thread needs the lock to free the tensors of the last collective.
KEPT_GROUPS: list[dist.ProcessGroup] = []


@dataclass(frozen=True)
class World:
    """This process among all processes of the run.

    With `size` 1 there are no others, and every collective returns at once.
    """

    rank: int
    size: int
    device: torch.device
    # The key-value store that all ranks share; None if there are no others.
    store: dist.Store = field(default=None, compare=False)
    # Numbers the calls of `on_main` and `gather`, the same on all ranks.
    calls: itertools.count = field(default_factory=itertools.count, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add the tensors of all ranks, in place; every rank gets the sum."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def maximum(self, *values: float) -> list[float]:
        """The largest of each value over all ranks.

        Sent from the CPU: it does not wait for the GPU.
        """
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def on_main(self, work):
        """Call `work()` on rank 0 only; every rank gets its result, which must be picklable.

        If it raises `UserError`, every rank raises it.
        """
        result = None
        mistake = None
        if self.is_main:
            try:
                result = work()
            except UserError as error:
                mistake = str(error)
        if self.size > 1:
            # The others wait at the store, because a collective would time out.
            done = f"on_main/{next(self.calls)}"
            if self.is_main:
                self.store.set(done, "")
            else:
                self.store.wait([done], WORK)
            box = [(result, mistake)]
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
            result, mistake = box[0]
        if mistake:
            raise UserError(mistake)
        return result

    def gather(self, value) -> list | None:
        """Every rank's value, in the order of ranks, on rank 0; None on the others."""
        if self.size == 1:
            return [value]
        # At the store, as above: the ranks may finish their work at very different times.
        call = f"gather/{next(self.calls)}"
        self.store.set(f"{call}/{self.rank}", "")
        self.store.wait([f"{call}/{rank}" for rank in range(self.size)], WORK)
        values = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, dst=0)
        return values

    def data_parallel(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module in DDP, which averages the gradients during the backward pass.

        A single process and a sharded model need no DDP: they get the module itself.
        """
        if self.size == 1 or is_sharded(module):
            return module
        # Gradients are views into the buckets that are sent, which saves a copy. Without
        # `device_ids` the inputs stay on their devices: some belong on the CPU.
        parallel = DistributedDataParallel(module, gradient_as_bucket_view=True)
        # Our buffers are constants.
        parallel.broadcast_buffers = False
        return parallel

    def accumulate_gradients(self, module: torch.nn.Module, last: bool):
        """A context for one micro-batch: DDP averages the gradients in the last one of a step only.

        FSDP2 averages in every backward pass.
        """
        if last or not isinstance(module, DistributedDataParallel):
            return contextlib.nullcontext()
        return module.no_sync()

    def shard(self, model: torch.nn.Module, log) -> None:
        """Shard the model (FSDP2, that is ZeRO-3): each process keeps its part of every weight.

        Each layer of a `ModuleList` is gathered when it is needed; all other weights are gathered
        together. Gradients are averaged and sharded after each backward pass, also between
        micro-batches, because complete gradients would take back the memory that sharding saves.
        In a single process it does nothing but log a note.
        """
        if self.size == 1:
            log(
                "note: --shard has no effect: one process keeps the whole model; "
                "start several with torchrun"
            )
            return
        # Imported on demand, because few runs pay for it.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.size,))
        for module in model.modules():
            if isinstance(module, torch.nn.ModuleList):
                for layer in module:
                    fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def set_seed(self, seed: int, step: int) -> None:
        """Seed the generators by seed, step and rank: a resumed step repeats its draws.

        Python's and NumPy's generators are seeded, too: a changed model may use them.
        """
        # Mixed and not added up: the generator on the CPU uses only the lower 32 of 64 bits.
        sequence = np.random.SeedSequence((seed, step, self.rank))
        mixed = int(sequence.generate_state(1, np.uint64)[0])
        random.seed(mixed)
        np.random.seed(mixed % 2**32)
        # torch.manual_seed seeds every kind of device and takes ten times as long.
        torch.default_generator.manual_seed(mixed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(mixed)

    def stop(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether FSDP2 has sharded the module or a part of it: it adds the method `unshard`."""
    return any(hasattr(part, "unshard") for part in module.modules())


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The complete tensor of a DTensor (all ranks must call this); any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distribute_like(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a complete tensor, divided as the DTensor `weight` is.

    If `weight` is an ordinary tensor, the complete one. Every rank holds `tensor`, so nothing is
    sent.
    """
    if not hasattr(weight, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh = weight.device_mesh
    return distribute_tensor(tensor, mesh, weight.placements, src_data_rank=None)


def process_grid(world: World, **sizes: int):
    """The ranks as a `DeviceMesh`: data=2, pipe=4 has two rows of four ranks.

    `process_grid(…)["pipe"].get_group()` is the process group of this rank's row. Raises
    `UserError` if the sizes do not multiply to the number of processes.
    """
    from torch.distributed.device_mesh import init_device_mesh  # few scripts pay for the import

    if math.prod(sizes.values()) != world.size or min(sizes.values()) < 1:
        sides = " × ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(
            f"{world.size} processes do not form a grid of {sides}; "
            "start as many as the product of the sizes"
        )
    if not dist.is_initialized():
        # A group of one process, so that the same code runs in a single process.
        store = dist.HashStore()
        dist.init_process_group(backend_for(world.device), store=store, rank=0, world_size=1)
    mesh = init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    KEPT_GROUPS.extend(mesh.get_all_groups())
    return mesh


def several_asked() -> bool:
    """Whether torchrun or srun started more processes than this one."""
    adopt_srun()
    return several_processes()


def init(device_name: str = "auto") -> World:
    """Join the process group that torchrun or srun describes, if any; choose this rank's device.

    Raises `UserError` for an environment that is incomplete or wrong, for more ranks than GPUs, and
    for processes that do not find each other within `JOIN`.
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
        found = ", ".join(numbers)
        raise UserError(
            f"RANK, WORLD_SIZE, LOCAL_RANK, MASTER_PORT must be numbers, not {found}; use torchrun"
        )
    rank, size, local_rank, _ = map(int, numbers)
    if rank >= size:
        raise UserError(
            f"RANK {rank} must be below WORLD_SIZE {size}; start with torchrun, or unset both"
        )
    device = choose_device(device_name, local_rank)
    store = join(rank, size, device) if size > 1 else None
    return World(rank, size, device, store)


def join(rank: int, size: int, device: torch.device) -> dist.Store:
    """Meet the other processes at MASTER_ADDR:MASTER_PORT; return the store that all share."""

    def meet() -> dist.Store:
        """Wait until all processes are there."""
        store, _, _ = next(rendezvous("env://", rank, size, timeout=JOIN))
        return store

    try:
        # init_process_group has a single timeout for the meeting and for the collectives, so the
        # meeting is ours. In a thread, because it would wait for ever for another program that
        # listens at the port and does not answer.
        meeting = ThreadPoolExecutor(1).submit(meet)
        # A little longer than the timeout of `rendezvous`, whose message says more.
        store = meeting.result(timeout=1.1 * JOIN.total_seconds())
        if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
            # When torchrun restarts the processes it keeps its store, with the keys of the dead
            # ones. On one machine all processes know how often it did.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
            store = dist.PrefixStore(f"attempt {attempt}", store)
        backend = backend_for(device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=ANSWER)
        KEPT_GROUPS.append(dist.group.WORLD)
    except (FutureTimeout, dist.DistError, RuntimeError, ValueError, OSError) as error:
        reason = (str(error).strip() or f"no answer for {JOIN}").splitlines()[0]
        if "EADDRINUSE" in str(error):
            reason = (
                "the port is in use by another program; choose another: --master_port of torchrun, "
                "or MASTER_PORT"
            )
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(f"rank {rank} cannot connect to the others at {place}: {reason}") from None
    return store


def backend_for(device: torch.device) -> str:
    """gloo carries CPU tensors (flags, Python objects), NCCL the gradients of GPUs."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def adopt_srun(environment=os.environ) -> None:
    """Where SLURM's srun started several tasks, set the variables that torchrun would have set.

    A batch script outside srun is one process, however many tasks the job asked for: only srun sets
    the variables SLURM_STEP_*.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    started_by_torchrun = "RANK" in environment or "WORLD_SIZE" in environment
    if tasks == "1" or started_by_torchrun:
        return
    names = (
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_NODELIST",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_JOB_ID",
    )
    missing = [name for name in names if name not in environment]
    if missing:
        raise UserError(
            f"srun started {tasks} tasks, but {', '.join(missing)} missing; use torchrun"
        )
    rank, local_rank, nodes, tasks_per_node, job = (environment[name] for name in names)
    environment["RANK"] = rank
    environment["WORLD_SIZE"] = tasks
    environment["LOCAL_RANK"] = local_rank
    # "2(x3),1": three machines with 2 tasks, one with 1. We take the largest for all machines.
    counts = re.findall(r"(\d+)(?:\(x\d+\))?", tasks_per_node)
    environment["LOCAL_WORLD_SIZE"] = str(max(int(count) for count in counts))
    environment.setdefault("MASTER_ADDR", first_machine(nodes))
    # A port for each job and step, the same in all its tasks: 10,000 to 29,999, below the ports
    # that Linux gives to clients.
    step = int(environment.get("SLURM_STEP_ID", 0))
    environment.setdefault("MASTER_PORT", str(10_000 + (int(job) * 7 + step) % 20_000))


def first_machine(nodes: str) -> str:
    """The first name of SLURM's list: "gpu03" of "gpu[03-05,9],cpu1"."""
    # Brackets are replaced by their first number; the commas that remain separate machines.
    without_brackets = re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", nodes)
    return without_brackets.split(",")[0]
