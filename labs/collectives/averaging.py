"""Two lessons of `labs.collectives`: means over ranks, and the rows that each rank gets. N ranks, B rows, D features."""

import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from engine.distributed import World
from labs.collectives.report import Table, everyone, one_process
from labs.collectives.training import linear, synthetic

# ---------------------------------------------------------------- mean


def mean_of_means(total: float, count: float) -> float:
    """Wrong unless all counts are equal: each rank's mean weighs the same."""
    mean = torch.tensor(total / count, dtype=torch.float64)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def global_mean(total: float, count: float) -> float:
    """The mean over the elements of all ranks, on every rank: sum of sums / sum of counts."""
    both = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def ddp_gradient(x: torch.Tensor, y: torch.Tensor, how: str) -> torch.Tensor:
    """The gradient (D) of Σ (x·w − y)² / rows that DDP leaves on every rank, from this rank's x (B, D) and y (B).

    DDP adds up the ranks' gradients and divides by N. Only the last `how` makes that the mean over all rows.
    """
    model, size = DistributedDataParallel(linear(x.shape[1])), dist.get_world_size()
    squares = (model(x).squeeze(1) - y) ** 2  # (B)
    if how == "own mean":
        loss = squares.mean()
    elif how == "mean of means":  # the handout's proposal
        loss = squares.mean()
        dist.all_reduce(loss)  # changes the number, but autograd does not see it
        loss = loss / size
    else:  # "own sum · N / rows of all"
        rows = torch.tensor(float(len(x)))
        dist.all_reduce(rows)
        loss = squares.sum() * size / rows
    with warnings.catch_warnings():  # PyTorch warns of the second, rightly
        warnings.simplefilter("ignore", UserWarning)
        loss.backward()
    return model.module.weight.grad[0].clone()


def single_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same on one process that has all rows."""
    model = linear(x.shape[1])
    ((model(x).squeeze(1) - y) ** 2).mean().backward()
    return model.weight.grad[0]


def uneven_share(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor, slice]:
    """x (B, D) and y (B) of all ranks, and this rank's 4 (rank + 1) rows."""
    x, y = synthetic(rows=2 * size * (size + 1), features=6, seed=3)
    return x, y, slice(2 * rank * (rank + 1), 2 * (rank + 1) * (rank + 2))


def lesson_mean(world: World) -> list:
    """One loss and one accuracy, not one for each process.

    Every process knows its own rows and prints its own figures: that is where three losses come from. Add up sums and
    counts, divide once, print on rank 0.
    """
    shares = [(16, 32), (17, 32), (15, 32)]
    paper = []
    for name, batch in (
        ("handout", [*shares, (18, 32)]),
        ("a short last share", [*shares, (4, 4)]),
    ):
        right, wrong = (
            sum(r for r, _ in batch) / sum(n for _, n in batch),
            sum(r / n for r, n in batch) / 4,
        )
        paper.append((name, " ".join(f"{r}/{n}" for r, n in batch), f"{right:.4f}", f"{wrong:.4f}"))
    x, y, mine = uneven_share(world.rank, world.size)
    total, rows = (y[mine] ** 2).sum().item(), len(y[mine])  # the squared errors of w = 0
    here = everyone((world.rank, rows, f"{total / rows:.4f}"))
    printed = [
        ("sum / sum", f"{global_mean(total, rows):.4f}"),
        ("wrong: mean of means", f"{mean_of_means(total, rows):.4f}"),
        ("one process with all rows", f"{(y**2).mean():.4f}"),
    ]
    reference, gradients = single_gradient(x, y), []
    for how in ("own mean", "mean of means", "own sum · N / rows of all"):
        gradient = ddp_gradient(x[mine], y[mine], how)
        error = f"{(gradient - reference).norm() / reference.norm():.0e}"
        gradients.append((how, f"{gradient.norm():.4f}", f"{reference.norm():.4f}", error))
    return [
        Table(
            "accuracy of 4 ranks, on paper",
            "batch|right/rows of each rank|sum / sum|mean of means",
            paper,
        ),
        Table(f"here: N = {world.size}, unequal shares", "rank|rows|own loss", here),
        Table("and what rank 0 prints", "way|loss", printed),
        Table(
            "gradient under DDP",
            "loss of each rank|norm|norm on one process|relative error",
            gradients,
        ),
        "own mean: rows of a short share weigh more. mean of means: all_reduce is no part of the graph, so the gradient is\n"
        "that of the own mean, divided by N once too often. Averaging losses before backward() helps nothing.",
        *one_process(world, "all means agree"),
    ]


# ---------------------------------------------------------------- sampler


def sampled_rows(rows: int, rank: int, size: int, drop_last: bool = False) -> list[int]:
    """The rows that DistributedSampler gives to `rank`, unshuffled."""
    return list(DistributedSampler(range(rows), size, rank, shuffle=False, drop_last=drop_last))


def strided_rows(rows: int, rank: int, size: int) -> list[int]:
    """Each row on exactly one rank; shares differ by at most one row. For scores: no rank waits for another's step."""
    return list(range(rank, rows, size))


def accuracy_over(mine: list[int], right: list[bool]) -> tuple[float, int]:
    """Accuracy over the rows of all ranks, and how many rows that counted."""
    return global_mean(sum(right[row] for row in mine), len(mine)), sum(everyone(len(mine)))


def epoch_orders(epochs: int, set_epoch: bool) -> list[list[int]]:
    """The rows of rank 0 of 2 in each epoch, 8 rows shuffled."""
    sampler, orders = DistributedSampler(range(8), 2, 0, seed=1), []
    for epoch in range(epochs):
        if set_epoch:
            sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return orders


def lesson_sampler(world: World) -> list:
    """What DistributedSampler repeats or drops.

    It gives all ranks equally many rows, so that no rank waits for a step that another does not make. For that it repeats
    rows or drops some. Training bears it; a score does not. Ranks start at 0.
    """
    ways = {
        "DistributedSampler": sampled_rows,
        "… with drop_last=True": lambda rows, rank, size: sampled_rows(
            rows, rank, size, drop_last=True
        ),
        "range(rank, rows, N)": strided_rows,
    }
    splits = [(name, *(way(10, rank, 3) for rank in range(3))) for name, way in ways.items()]
    rows = 3 * world.size + 1  # one more than can be shared equally
    right = [row > 0 for row in range(rows)]
    scores = [("one process", rows, f"{sum(right) / rows:.4f}")]
    for name, way in ways.items():
        accuracy, counted = accuracy_over(way(rows, world.rank, world.size), right)
        scores.append((name, counted, f"{accuracy:.4f}"))
    orders = [
        (f"{'with' if told else 'without'} set_epoch(epoch)", *epoch_orders(3, told))
        for told in (True, False)
    ]
    return [
        Table("10 rows over 3 ranks", "way|rank 0|rank 1|rank 2", splits),
        Table(
            f"accuracy with N = {world.size} and {rows} rows, only row 0 being wrong",
            "way|rows|accuracy",
            scores,
        ),
        *one_process(world, "nothing is repeated or dropped"),
        Table("8 rows, shuffled: rank 0 of 2", "loop|epoch 0|epoch 1|epoch 2", orders),
    ]
