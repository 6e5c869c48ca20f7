"""Two lessons: every rank's tensor on one rank, and on every rank.

N ranks, L elements of one rank.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from labs.collectives.common import (
    all_gather_object,
    print_table,
    print_text,
    try_collective,
)

# ---------------------------------------------------------------- gather


def gather_to(
    device: int, x: torch.Tensor, devices: list[int], group=None
) -> list[torch.Tensor] | None:
    """Every rank's `x` on the rank that drives GPU `device`, where rank r drives devices[r].

    Collectives count in ranks, CUDA counts in devices. All other ranks get None: they must not pass
    a list to gather into.
    """
    destination = devices.index(device)
    received = None
    if dist.get_rank() == destination:
        received = [torch.empty_like(x) for _ in devices]
    dist.gather(x, received, dst=destination, group=group)
    return received


def gather_on_gpus(device: int, x: torch.Tensor, devices: list[int]) -> list[torch.Tensor] | None:
    """The same by NCCL, each `x` on its rank's GPU. The result is copied to the CPU."""
    torch.cuda.set_device(devices[dist.get_rank()])  # otherwise every rank would use GPU 0
    received = gather_to(device, x.cuda(), devices, dist.new_group(backend="nccl"))
    return None if received is None else [part.cpu() for part in received]


def gather_with_lists_on(
    ranks: list[int], x: torch.Tensor, group=None, dst: int = 0
) -> list[torch.Tensor] | None:
    """To rank `dst`, with a list to gather into on `ranks`. Right only if ranks == [dst]."""
    received = None
    if dist.get_rank() in ranks:
        received = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.gather(x, received, dst=dst, group=group)
    return received


def gather_in_subgroup(
    x: torch.Tensor, members: list[int], group, **destination
) -> list[torch.Tensor] | str | None:
    """To members[0]. `destination` is dst=(rank among all) or group_dst=(rank in the group)."""
    if dist.get_rank() not in members:
        return "not in the group"
    received = None
    if dist.get_rank() == members[0]:
        received = [torch.empty_like(x) for _ in members]
    dist.gather(x, received, group=group, **destination)
    return received


def lesson_gather(gpus: tuple[int, ...] = (), target: int = 1) -> None:
    """gather: the tensors of all ranks on one rank.

    `dst` is a rank, not the number of a GPU: with --gpu_devices 1 2, GPU 1 belongs to rank 0. Only
    the destination passes a list to gather into. The wrong calls below run in groups that give up
    after 2 seconds; by default gloo gives up after half an hour.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    # The handout leaves GPU 0 to somebody else. Without --gpu_devices these numbers stand for GPUs.
    handout = list(range(1, size + 1))
    devices = list(gpus) or handout
    x = torch.arange(2) + 1 + 2 * devices[rank]
    if gpus:
        backend, device = "NCCL", "GPU"
        received = gather_on_gpus(target, x, devices)
    else:
        backend, device = "gloo, on the CPU", "stands for GPU"
        received = gather_to(target, x, devices)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    print_table(
        f"right, by {backend}: gather to device {target}, which is rank {devices.index(target)}",
        f"get_rank()|LOCAL_RANK|get_world_size()|{device}|sent|received",
        all_gather_object((rank, local_rank, size, devices[rank], x, received)),
    )
    wrong = {
        "dst=1, the device's number": lambda group: gather_with_lists_on([0], x, group, dst=1),
        "gather_list on every rank": lambda group: gather_with_lists_on([*range(size)], x, group),
        "gather_list on no rank": lambda group: gather_with_lists_on([], x, group),
    }
    print_outcomes("wrong, with the same tensors, by gloo", wrong)
    if size < 3:
        print_text("Start 3 processes to see a sub-group, in which ranks count differently.")
        return
    members = list(range(1, size))
    group = dist.new_group(members)  # every rank makes this call, members or not
    calls = {
        "dst=1, rank among all": lambda _: gather_in_subgroup(x, members, group, dst=1),
        "group_dst=0, rank in the group": lambda _: gather_in_subgroup(
            x, members, group, group_dst=0
        ),
        "wrong: dst=0": lambda _: gather_in_subgroup(x, members, group, dst=0),
    }
    print_outcomes(f"sub-group of ranks {members}", calls)


def print_outcomes(caption: str, calls: dict) -> None:
    """Try each call on all ranks and print what it returns or raises."""
    rows = [
        (name, rank, outcome)
        for name, call in calls.items()
        for rank, outcome in enumerate(try_collective(call))
    ]
    print_table(caption, "call|rank|what happens", rows)


# ---------------------------------------------------------------- all_gather


def all_gather_equal(x: torch.Tensor, group=None) -> list[torch.Tensor]:
    """Every rank's `x` on every rank, if all have the same shape."""
    received = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(received, x, group=group)
    return received


def all_gather_uneven(x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's `x` (L, …) on every rank: gather lengths, pad to the longest, gather, cut."""
    lengths = torch.cat(all_gather_equal(torch.tensor([len(x)]))).tolist()
    padded = x.new_zeros(max(lengths), *x.shape[1:])
    padded[: len(x)] = x
    return [part[:length] for part, length in zip(all_gather_equal(padded), lengths)]


def all_gather_true_shapes(x: torch.Tensor, lengths: list[int], group) -> list[torch.Tensor]:
    """Wrong on gloo: a list of the true shapes, which PyTorch's documentation allows."""
    received = [x.new_empty(length) for length in lengths]
    dist.all_gather(received, x, group=group)
    return received


def gather_with_gradient(x: torch.Tensor, how: str) -> torch.Tensor:
    """All ranks' `x` in a row, with more or less of a gradient."""
    if how == "all_gather_single":
        return functional.all_gather_single(x, gather_dim=0, group=dist.group.WORLD)
    received = all_gather_equal(x.detach())
    if how == "all_gather, own tensor put back":
        received[dist.get_rank()] = x
    return torch.cat(received)


def gradient_of_gathered(how: str) -> float | None:
    """x.grad on this rank, where the loss of rank r is (r + 1) · Σ of all x.

    The sum of all losses has the gradient Σ (r + 1), the right answer.
    """
    x = torch.ones(1, requires_grad=True)
    loss = (dist.get_rank() + 1) * gather_with_gradient(x, how).sum()
    if loss.requires_grad:
        loss.backward()
    return None if x.grad is None else x.grad.item()


def lesson_all_gather() -> None:
    """all_gather: the tensors of all ranks on every rank.

    Rank r has N - r elements of value r + 1. No collective compares the shapes of different ranks:
    gloo refuses, or returns numbers that nobody sent. Or it aborts the process, which no `try`
    catches: so does the handout's all_gather into N tensors like the own one, which is not run
    here. And no gradient passes through all_gather.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((size - rank,), rank + 1)
    lengths = list(range(size, 0, -1))
    calls = {
        "wrong: all_gather into the true shapes": lambda g: all_gather_true_shapes(x, lengths, g),
        "wrong: gather into N tensors like rank 0's": lambda g: gather_with_lists_on([0], x, g),
        "right: lengths, pad, all_gather, cut": lambda _: all_gather_uneven(x),
        "right, but pickled: all_gather_object": lambda _: all_gather_object(x),
    }
    print_outcomes("unequal lengths", calls)
    ways = ("all_gather", "all_gather, own tensor put back", "all_gather_single")
    print_table(
        f"x.grad, rank r's loss being (r + 1) · Σ of all x; right: {sum(range(1, size + 1))}",
        "call|" + "|".join(f"rank {rank}" for rank in range(size)),
        [(how, *all_gather_object(gradient_of_gathered(how))) for how in ways],
    )
