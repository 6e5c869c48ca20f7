"""Two lessons: every rank's tensor on one rank, and on every rank.

N ranks, L elements of one rank.
"""

import os

import torch
import torch.distributed as dist

from labs.collectives.common import (
    all_gather_object,
    print_table,
    print_text,
    try_collective,
)

# ---------------------------------------------------------------- gather


def gather(
    x: torch.Tensor, list_on: int, group=None, **destination: int
) -> list[torch.Tensor] | None:
    """Every rank's `x` on one rank: dst=(its rank among all) or group_dst=(its rank in the group).

    Only the destination may pass a list to gather into. Right only if `list_on` is its rank.
    """
    received = None
    if dist.get_rank() == list_on:
        received = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.gather(x, received, group=group, **destination)
    return received


def gather_on_gpus(x: torch.Tensor, gpus: list[int], destination: int) -> list[torch.Tensor] | None:
    """The same by NCCL, each `x` on its rank's GPU. The result is copied to the CPU."""
    torch.cuda.set_device(gpus[dist.get_rank()])  # otherwise every rank would use GPU 0
    group = dist.new_group(backend="nccl")
    received = gather(x.cuda(), destination, group, dst=destination)
    return None if received is None else [part.cpu() for part in received]


def lesson_gather(gpus: tuple[int, ...] = (), target: int = 1) -> None:
    """gather: the tensors of all ranks on one rank.

    `dst` is a rank, not the number of a GPU: with --gpu_devices 1 2, GPU 1 belongs to rank 0. Only
    the destination passes a list to gather into. The wrong call below runs in a group that gives up
    after 2 seconds; by default gloo gives up after half an hour. Predict: two ranks make a mistake.
    What does the third one say?
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    # The handout leaves GPU 0 to somebody else. Without --gpu_devices these numbers stand for GPUs.
    devices = list(gpus) or list(range(1, size + 1))
    destination = devices.index(target)
    x = torch.arange(2) + 1 + 2 * devices[rank]
    if gpus:
        backend, device = "NCCL", "GPU"
        received = gather_on_gpus(x, devices, destination)
    else:
        backend, device = "gloo, on the CPU", "stands for GPU"
        received = gather(x, destination, dst=destination)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    print_table(
        f"right, by {backend}: gather to device {target}, which is rank {destination}",
        f"get_rank()|LOCAL_RANK|get_world_size()|{device}|sent|received",
        all_gather_object((rank, local_rank, size, devices[rank], x, received)),
    )
    # The mistake that the handout warns of: `dst` is a rank, not the number of a GPU.
    other = (destination + 1) % size
    name = f"list on rank {destination}, but dst={other}"
    wrong = {name: lambda group: gather(x, destination, group, dst=other)}
    print_outcomes("wrong, with the same tensors, by gloo", wrong)
    if size < 3:
        print_text("Start 3 processes to see a sub-group, in which ranks count differently.")
        return
    members = list(range(1, size))
    group = dist.new_group(members)  # every rank makes this call, members or not

    def gather_in_subgroup(**destination: int):
        """`gather` within the group; ranks outside it do not call."""
        return gather(x, 1, group, **destination) if rank in members else "not in the group"

    calls = {
        "dst=1, rank among all": lambda _: gather_in_subgroup(dst=1),
        "group_dst=0, rank in the group": lambda _: gather_in_subgroup(group_dst=0),
        "wrong: dst=0": lambda _: gather_in_subgroup(dst=0),
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


def all_gather_equal(x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's `x` on every rank, if all have the same shape."""
    received = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(received, x)
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


def lesson_all_gather() -> None:
    """all_gather: the tensors of all ranks on every rank.

    Rank r has N - r elements of value r + 1. No collective compares the shapes of different ranks:
    gloo refuses, or returns numbers that nobody sent. It may even abort the process, which no `try`
    catches. The handout's all_gather, whose N buffers have the shape of the rank's own tensor, does
    that, so it is not run here. Predict: what stands where rank 0 expects more than a rank sent?
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((size - rank,), rank + 1)
    lengths = list(range(size, 0, -1))
    calls = {
        "wrong: all_gather into the true shapes": lambda g: all_gather_true_shapes(x, lengths, g),
        "wrong: gather into N tensors like rank 0's": lambda g: gather(x, 0, g, dst=0),
        "right: lengths, pad, all_gather, cut": lambda _: all_gather_uneven(x),
        "right, but pickled: all_gather_object": lambda _: all_gather_object(x),
    }
    print_outcomes("unequal lengths", calls)
