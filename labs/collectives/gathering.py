"""Two lessons of `labs.collectives`: every rank's tensor on one rank, and on every rank. N ranks, L elements of one rank."""

import os
import re
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from engine.distributed import World
from labs.collectives.report import Table, attempt, everyone, launch, one_process, words

# ---------------------------------------------------------------- gather


def rank_of(device: int, devices: list[int]) -> int:
    """The rank that drives GPU `device`, where rank r drives devices[r]. Collectives count in ranks, CUDA in devices."""
    return devices.index(device)


def gather_to(
    device: int, x: torch.Tensor, devices: list[int], group=None
) -> list[torch.Tensor] | None:
    """Every rank's `x` on the rank that drives `device`; None on the others, which may not give a list to gather in."""
    dst = rank_of(device, devices)
    received = [torch.empty_like(x) for _ in devices] if dist.get_rank() == dst else None
    dist.gather(x, received, dst=dst, group=group)
    return received


def gather_on_gpus(device: int, x: torch.Tensor, devices: list[int]) -> list[torch.Tensor] | None:
    """The same, each `x` on its rank's GPU: by NCCL. The tensors come back on the CPU, for the table."""
    torch.cuda.set_device(devices[dist.get_rank()])  # else every rank would take GPU 0
    received = gather_to(device, x.cuda(), devices, dist.new_group(backend="nccl"))
    return received and [part.cpu() for part in received]


def gather_to_device_number(
    device: int, x: torch.Tensor, devices: list[int], group
) -> list[torch.Tensor] | None:
    """Wrong: the device's number taken for a rank."""
    received = (
        [torch.empty_like(x) for _ in devices] if devices[dist.get_rank()] == device else None
    )
    dist.gather(x, received, dst=device, group=group)
    return received


def gather_with_lists_on(
    ranks: list[int], x: torch.Tensor, group=None
) -> list[torch.Tensor] | None:
    """To rank 0, with a list to gather in on `ranks`: right only if these are [0]."""
    received = (
        [torch.empty_like(x) for _ in range(dist.get_world_size())]
        if dist.get_rank() in ranks
        else None
    )
    dist.gather(x, received, dst=0, group=group)
    return received


def gather_in_subgroup(
    x: torch.Tensor, members: list[int], group, **destination
) -> list[torch.Tensor] | str | None:
    """`destination`: dst=<rank among all> or group_dst=<rank within the group>; members[0] expects the tensors."""
    if dist.get_rank() not in members:
        return "not in the group"
    received = [torch.empty_like(x) for _ in members] if dist.get_rank() == members[0] else None
    dist.gather(x, received, group=group, **destination)
    return received


def lesson_gather(world: World, gpus: tuple[int, ...] = (), target: int = 1) -> list:
    """Every rank's tensor on one rank.

    `dst` is a rank, not a GPU's number: with --gpu_devices 1 2, GPU 1 belongs to rank 0. Only the destination gives a list
    to gather in. The wrong calls below run in groups of their own that give up after 2 seconds. By default gloo gives up
    after half an hour.
    """
    handout = list(range(1, world.size + 1))  # its devices: GPU 0 is left to somebody else
    devices = list(gpus) or handout
    x = torch.arange(2) + 1 + 2 * devices[world.rank]
    received = gather_on_gpus(target, x, devices) if gpus else gather_to(target, x, devices)
    names = (dist.get_rank(), int(os.environ.get("LOCAL_RANK", 0)), dist.get_world_size())
    right = everyone((*names, devices[world.rank], x, received))
    by, device = ("NCCL", "GPU") if gpus else ("gloo, on the CPU", "stands for GPU")
    wrong = {
        "dst=1, the device's number": lambda group: gather_to_device_number(1, x, handout, group),
        "gather_list on every rank": lambda group: gather_with_lists_on(
            [*range(world.size)], x, group
        ),
        "gather_list on no rank": lambda group: gather_with_lists_on([], x, group),
    }
    outcomes = [
        (name, rank, text)
        for name, call in wrong.items()
        for rank, text in enumerate(attempt(call))
    ]
    blocks = [
        Table(
            f"right, by {by}: gather to device {target}, which is rank {rank_of(target, devices)}",
            f"get_rank()|LOCAL_RANK|get_world_size()|{device}|sent|received",
            right,
        ),
        Table("wrong, with the same tensors, by gloo", "call|rank|what happens", outcomes),
    ]
    if world.size < 3:
        return [*blocks, "A sub-group in which ranks count differently takes 3 processes to show."]
    members = list(range(1, world.size))
    group = dist.new_group(members)  # every rank makes this call, members or not
    calls = {
        "dst=1, rank among all": everyone(gather_in_subgroup(x, members, group, dst=1)),
        "group_dst=0, rank in the group": everyone(
            gather_in_subgroup(x, members, group, group_dst=0)
        ),
        "wrong: dst=0": attempt(lambda _: gather_in_subgroup(x, members, group, dst=0)),
    }
    rows = [
        (name, rank, members.index(rank) if rank in members else None, outcome)
        for name, outcomes in calls.items()
        for rank, outcome in enumerate(outcomes)
    ]
    return [
        *blocks,
        Table(f"sub-group of ranks {members}", "call|rank|rank in the group|what happens", rows),
    ]


# ---------------------------------------------------------------- all_gather


def all_gather_equal(x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's `x` on every rank, if all have the shape of this rank's."""
    received = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(received, x)
    return received


def all_gather_uneven(x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's `x` (L, …) on every rank, L different: gather the lengths, pad to the longest, gather, cut."""
    lengths = torch.cat(all_gather_equal(torch.tensor([len(x)]))).tolist()
    padded = x.new_zeros(max(lengths), *x.shape[1:])
    padded[: len(x)] = x
    return [part[:length] for part, length in zip(all_gather_equal(padded), lengths)]


def all_gather_true_shapes(x: torch.Tensor, lengths: list[int], group) -> list[torch.Tensor]:
    """Wrong on gloo: a list of the true shapes, which PyTorch's documentation allows."""
    received = [x.new_empty(length) for length in lengths]
    dist.all_gather(received, x, group=group)
    return received


def with_gradient(x: torch.Tensor, world: World, how: str) -> torch.Tensor:
    """All ranks' `x` in a row, gathered with more or less of a gradient."""
    if how == "torch.distributed.nn.functional.all_gather":
        from torch.distributed.nn.functional import all_gather

        with (
            warnings.catch_warnings()
        ):  # 2.13 announces a successor, which older releases do not have
            warnings.simplefilter("ignore", FutureWarning)
            return torch.cat(list(all_gather(x)))
    received = all_gather_equal(x.detach())
    if how == "all_gather, own tensor put back":
        received[world.rank] = x
    return torch.cat(received)


def gradient_of_gathered(world: World, how: str) -> float | None:
    """x.grad on this rank if rank r's loss is (r + 1) · Σ of all x. The sum of all losses has the gradient Σ (r + 1)."""
    x = torch.ones(1, requires_grad=True)
    loss = (world.rank + 1) * with_gradient(x, world, how).sum()
    if loss.requires_grad:
        loss.backward()
    return None if x.grad is None else x.grad.item()


def victim(lengths: list[int], folder: str) -> None:
    """A process that gathers unequal lengths as if they were equal, and may die of it. Its last words go to `folder`."""
    rank = int(os.environ["RANK"])
    os.dup2(
        os.open(f"{folder}/{rank}.err", os.O_WRONLY | os.O_CREAT), 2
    )  # what gloo says before it ends the process
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    try:
        outcome = words(all_gather_equal(torch.full((lengths[rank],), rank + 1)))
    except RuntimeError as error:
        outcome = words(error)
    Path(folder, f"{rank}.out").write_text(outcome, encoding="utf-8")
    os._exit(0)


def fates(lengths: list[int]) -> list[str]:
    """What becomes of each `victim`. In processes of their own, because gloo's abort() cannot be caught."""
    with tempfile.TemporaryDirectory() as folder:
        context, _store = launch(victim, len(lengths), lengths, folder)
        for process in context.processes:
            process.join(
                600
            )  # it ends by gloo's own limit; to import PyTorch may take a busy machine long
            process.kill()
        outcomes = []
        for rank, process in enumerate(context.processes):
            out, err = Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")
            last = re.search(
                r"what\(\): +(?:\[.*?\] )?(.*)",
                err.read_text(encoding="utf-8") if err.exists() else "",
            )
            death = f"killed by signal {-(process.exitcode or 0)}: {last[1].split(' Is there')[0] if last else ''}"
            outcomes.append(out.read_text(encoding="utf-8") if out.exists() else death)
        return outcomes


def lesson_all_gather(world: World) -> list:
    """Every rank's tensor on every rank.

    Here rank r has N - r elements of value r + 1. No call compares the shapes of different ranks: gloo ends the process,
    breaks the connection, or returns numbers that nobody sent. Gradients do not pass through all_gather at all.
    """
    x = torch.full((world.size - world.rank,), world.rank + 1)
    lengths = list(range(world.size, 0, -1))
    calls = {
        "wrong: all_gather into N tensors like one's own": world.on_main(lambda: fates(lengths)),
        "wrong: all_gather into the true shapes": attempt(
            lambda g: all_gather_true_shapes(x, lengths, g)
        ),
        "wrong: gather into N tensors like rank 0's": attempt(
            lambda g: gather_with_lists_on([0], x, g)
        ),
        "right: lengths, pad, all_gather, cut": everyone(all_gather_uneven(x)),
        "right, but pickled: all_gather_object": everyone(everyone(x)),
    }
    rows = [(name, rank, text) for name, texts in calls.items() for rank, text in enumerate(texts)]
    ways = (
        "all_gather",
        "all_gather, own tensor put back",
        "torch.distributed.nn.functional.all_gather",
    )
    gradients = [(how, *everyone(gradient_of_gathered(world, how))) for how in ways]
    right, ranks = (
        sum(range(1, world.size + 1)),
        "|".join(f"rank {rank}" for rank in range(world.size)),
    )
    return [
        Table("unequal lengths", "call|rank|what happens", rows),
        *one_process(world, "all lengths are equal and every call is right"),
        Table(
            f"x.grad, rank r's loss being (r + 1) · Σ of all x; right: {right}",
            f"call|{ranks}",
            gradients,
        ),
    ]
