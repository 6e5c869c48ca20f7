"""Two lessons: means over ranks, and the rows that each rank gets. N ranks, B rows, D features."""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from labs.collectives.common import all_gather_object, print_table, print_text
from labs.collectives.training import linear, synthetic

# ---------------------------------------------------------------- mean


def mean_of_means(total: float, count: float) -> float:
    """Each rank's mean weighs the same: wrong unless all counts are equal."""
    mean = torch.tensor(total / count, dtype=torch.float64)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def global_mean(total: float, count: float) -> float:
    """The mean over the elements of all ranks, on every rank: sum of totals / sum of counts."""
    both = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def ddp_gradient(x: torch.Tensor, y: torch.Tensor, loss_kind: str) -> torch.Tensor:
    """The gradient (D) of Σ (x·w − y)² / rows that DDP leaves on every rank, for x (B, D), y (B).

    DDP sums the gradients of the ranks and divides by N. Only with the third loss is that the
    gradient of the mean over all rows.
    """
    model = DistributedDataParallel(linear(x.shape[1]))
    squares = (model(x).squeeze(1) - y) ** 2  # (B)
    if loss_kind == "own mean":
        loss = squares.mean()
    elif loss_kind == "mean of means":
        # The handout's proposal. all_reduce changes the number behind autograd's back.
        loss = squares.mean()
        dist.all_reduce(loss.detach())
        loss = loss / dist.get_world_size()
    else:  # "own sum · N / rows of all"
        rows = torch.tensor(float(len(x)))
        dist.all_reduce(rows)
        loss = squares.sum() * dist.get_world_size() / rows
    loss.backward()
    return model.module.weight.grad[0].clone()


def single_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same on one process that has all rows."""
    model = linear(x.shape[1])
    ((model(x).squeeze(1) - y) ** 2).mean().backward()
    return model.weight.grad[0]


def uneven_share(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor, slice]:
    """x (B, D) and y (B) of all ranks, and the slice of this rank's 4 (rank + 1) rows."""
    x, y = synthetic(rows=2 * world_size * (world_size + 1), features=6, seed=3)
    return x, y, slice(2 * rank * (rank + 1), 2 * (rank + 1) * (rank + 2))


def lesson_mean() -> None:
    """mean: one loss and one accuracy, not one per process.

    Every process knows only its own rows and prints its own figures: that is where three losses
    come from. Sum totals and counts over the ranks, divide once, print on rank 0. Predict: three
    ranks are right in half of 32 rows each, the fourth in 4 of 4. Is the mean of the four right?
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    handout = [(16, 32), (17, 32), (15, 32), (18, 32)]
    rows = []
    for name, batch in (("handout", handout), ("a short last share", [*handout[:3], (4, 4)])):
        total = sum(right for right, _ in batch) / sum(count for _, count in batch)
        means = sum(right / count for right, count in batch) / len(batch)
        shares = " ".join(f"{right}/{count}" for right, count in batch)
        rows.append((name, shares, f"{total:.4f}", f"{means:.4f}"))
    columns = "batch|right/rows of each rank|sum / sum|mean of means"
    print_table("accuracy of 4 ranks, on paper", columns, rows)

    x, y, mine = uneven_share(rank, size)
    total, count = (y[mine] ** 2).sum().item(), len(y[mine])  # squared errors of w = 0
    shares = all_gather_object((rank, count, f"{total / count:.4f}"))
    print_table(f"N = {size}, unequal shares", "rank|rows|own loss", shares)
    rows = [
        ("sum / sum", f"{global_mean(total, count):.4f}"),
        ("wrong: mean of means", f"{mean_of_means(total, count):.4f}"),
        ("one process with all rows", f"{(y**2).mean():.4f}"),
    ]
    print_table("what rank 0 prints", "way|loss", rows)

    reference = single_gradient(x, y)
    rows = []
    for loss_kind in ("own mean", "mean of means", "own sum · N / rows of all"):
        gradient = ddp_gradient(x[mine], y[mine], loss_kind)
        error = (gradient - reference).norm() / reference.norm()
        rows.append(
            (loss_kind, f"{gradient.norm():.4f}", f"{reference.norm():.4f}", f"{error:.0e}")
        )
    columns = "loss of each rank|norm|norm on one process|relative error"
    print_table("gradient under DDP", columns, rows)
    print_text(
        "own mean: rows of a short share weigh more. mean of means: autograd does not see\n"
        "all_reduce, so the gradient is that of the own mean, divided by N once too often."
    )


# ---------------------------------------------------------------- sampler


def sampled_rows(rows: int, rank: int, world_size: int, drop_last: bool = False) -> list[int]:
    """The rows that DistributedSampler gives to `rank`, unshuffled."""
    sampler = DistributedSampler(range(rows), world_size, rank, shuffle=False, drop_last=drop_last)
    return list(sampler)


def strided_rows(rows: int, rank: int, world_size: int) -> list[int]:
    """Each row on exactly one rank: for scores, where no rank waits for another's step."""
    return list(range(rank, rows, world_size))


SPLITS = {
    "DistributedSampler": sampled_rows,
    "… with drop_last=True": partial(sampled_rows, drop_last=True),
    "range(rank, rows, N)": strided_rows,
}


def epoch_orders(epochs: int, set_epoch: bool) -> list[list[int]]:
    """The rows of rank 0 of 2 in each epoch, 8 rows shuffled."""
    sampler = DistributedSampler(range(8), 2, 0, seed=1)
    orders = []
    for epoch in range(epochs):
        if set_epoch:
            sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return orders


def lesson_sampler() -> None:
    """sampler: what DistributedSampler repeats or drops.

    It gives all ranks the same number of rows, so that no rank waits for a step that another one
    does not make. For that it repeats rows or drops some. Training tolerates it; a score does not.
    Ranks start at 0. Predict: 10 rows over 3 ranks. Which rows come twice?
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [(name, *(split(10, r, 3) for r in range(3))) for name, split in SPLITS.items()]
    print_table("10 rows over 3 ranks", "way|rank 0|rank 1|rank 2", rows)

    count = 3 * size + 1  # one more than can be shared equally
    right = [row > 0 for row in range(count)]
    rows = [("one process", count, f"{sum(right) / count:.4f}")]
    for name, split in SPLITS.items():
        mine = split(count, rank, size)
        accuracy = global_mean(sum(right[row] for row in mine), len(mine))
        rows.append((name, sum(all_gather_object(len(mine))), f"{accuracy:.4f}"))
    caption = f"accuracy with N = {size} and {count} rows, only row 0 being wrong"
    print_table(caption, "way|rows|accuracy", rows)

    rows = [
        ("with set_epoch(epoch)", *epoch_orders(3, set_epoch=True)),
        ("without", *epoch_orders(3, set_epoch=False)),
    ]
    print_table("8 rows, shuffled: rank 0 of 2", "loop|epoch 0|epoch 1|epoch 2", rows)
