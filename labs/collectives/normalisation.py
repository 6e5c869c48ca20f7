"""A lesson: BatchNorm, whose result depends on the other rows and ranks, and LayerNorm.

N ranks, B rows, D features.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs.collectives.common import all_gather_object, print_table, print_text, short_repr
from labs.collectives.training import flat_weights

FEATURES = 8


class AllReduce(torch.autograd.Function):
    """A sum over ranks that autograd sees; `dist.all_reduce` alone changes numbers behind it.

    Every rank's x is in every rank's result, so the gradient of x is the sum of their gradients.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, on every rank."""
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' gradients."""
        total = grad.clone()
        dist.all_reduce(total)
        return total


class SyncBatchNormByHand(nn.BatchNorm1d):
    """`nn.SyncBatchNorm`, which runs on GPUs only: the moments of the rows of all ranks.

    In training; the running averages, which evaluation would use, are left out.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, D) → (B, D)"""
        ones = x.new_ones(len(x), 1)
        totals = AllReduce.apply(torch.cat([x, x * x, ones], dim=1).sum(dim=0))  # (2 D + 1)
        mean, mean_square = (totals[:-1] / totals[-1]).chunk(2)
        variance = mean_square - mean**2
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


NORMS = {
    "BatchNorm": nn.BatchNorm1d,
    "SyncBatchNorm": SyncBatchNormByHand,
    "LayerNorm": nn.LayerNorm,
}


def network(norm: type[nn.Module]) -> nn.Sequential:
    """D features → 3 classes, with this norm in the middle; the same weights for each norm."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 16), norm(16), nn.Tanh(), nn.Linear(16, 3))


def gradient_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rows: int) -> torch.Tensor:
    """The gradient of the mean loss over `rows` rows, of which this process has x (B, D), y (B)."""
    ranks = dist.get_world_size() if isinstance(model, DistributedDataParallel) else 1
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    (loss * ranks / rows).backward()  # DDP divides by the number of ranks
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def change_of_row_0(norm: nn.Module) -> float:
    """How much the output of row 0 changes when the other 7 rows are replaced."""
    x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(1))
    other = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(2))
    other[0] = x[0]
    return (norm(x)[0] - norm(other)[0]).abs().max().item()


def outcome_of_one_row(norm: nn.Module) -> str:
    """What a batch of one row gives: a result or an error."""
    try:
        norm(torch.ones(1, FEATURES))
    except ValueError as error:
        return short_repr(error)
    return "a result"


def lesson_norm() -> None:
    """norm: BatchNorm depends on the other rows, LayerNorm does not.

    BatchNorm takes the mean of each feature over the rows of a batch; LayerNorm takes the mean of
    each row over its features. Predict: which of them gives a row another result when the batch is
    divided among ranks?
    """
    layers = {
        "BatchNorm, train()": nn.BatchNorm1d(FEATURES),
        "BatchNorm, eval()": nn.BatchNorm1d(FEATURES).eval(),
        "LayerNorm": nn.LayerNorm(FEATURES),
    }
    rows = [
        (name, f"{change_of_row_0(layer):.2f}", outcome_of_one_row(layer))
        for name, layer in layers.items()
    ]
    columns = "layer|row 0 changes by, if the other rows change|a batch of one row"
    print_table("one process, rows of N(0, 1)", columns, rows)

    rank, size = dist.get_rank(), dist.get_world_size()
    count = 8 * size + 1  # the ranks' shares differ
    # Rows in an order, as in files sorted by class: the ranks' means differ.
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(3))
    x = x[x[:, 0].argsort()]
    y = x[:, :3].argmax(dim=1)
    mine = slice(rank * count // size, (rank + 1) * count // size)
    rows = []
    for name, norm in NORMS.items():
        alone = nn.BatchNorm1d if norm is SyncBatchNormByHand else norm
        expected = gradient_of(network(alone), x, y, count)
        model = DistributedDataParallel(network(norm))
        gradient = gradient_of(model, x[mine], y[mine], count)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        error = (gradient - expected).norm() / expected.norm()
        weights = all_gather_object(flat_weights(model))
        buffers = all_gather_object(torch.cat([torch.zeros(1), *running_means(model)]))
        rows.append(
            (
                name,
                f"{error:.0e}",
                f"{largest_difference(weights):.2f}",
                f"{largest_difference(buffers):.2f}",
            )
        )
    columns = "norm under DDP|gradient: relative error|weights|running means"
    print_table(f"{count} sorted rows over {size} ranks, beside one process", columns, rows)
    print_text(
        "gradient: compared with one process that has all rows. The last columns: the largest\n"
        "difference between ranks, after a step. DDP averages gradients, so the weights stay\n"
        "equal; each rank's BatchNorm sees its own rows only, and a checkpoint of rank 0 holds\n"
        "rank 0's running means."
    )


def running_means(model: nn.Module) -> list[torch.Tensor]:
    """The running averages that BatchNorm would use in evaluation."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("running_mean")]


def largest_difference(tensors: list[torch.Tensor]) -> float:
    """Between the first tensor and the others."""
    return max((tensor - tensors[0]).abs().max().item() for tensor in tensors)
