"""Two lessons: batch size and learning rate, DDP and DataParallel.

N ranks, B rows of a global batch, D features.
"""

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs.collectives.common import all_gather_object, print_table, print_text

# A mean loss above this ends a run: from here on it only grows, until everything is infinite and
# a comparison of two runs says nothing.
DIVERGED = 1e6


def linear(features: int) -> nn.Linear:
    """x·w with w = 0."""
    model = nn.Linear(features, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def synthetic(rows: int, features: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (B, D) and y (B) = x·w*, all normal. w* is the same for all seeds and about 1 long."""
    target = torch.randn(features, generator=torch.Generator().manual_seed(0)) / features**0.5
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))
    return x, x @ target


def flat_weights(model: nn.Module) -> torch.Tensor:
    """All parameters in one row."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@dataclass
class Training:
    """What `train` found."""

    losses: list[float]  # the mean loss of each step
    weights: torch.Tensor  # all of them in one row, at the end
    seconds: float  # of a step, the mean without the first

    @property
    def diverged(self) -> bool:
        """Whether the last loss was so large, or not a number, that the run was ended."""
        return not self.losses[-1] < DIVERGED


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    loss_of: Callable,
) -> Training:
    """A step for each batch x (B, D), y (B), unless the loss diverges before the last.

    Under DDP each rank computes its rows of the batch, otherwise this process computes all.
    `loss_of(outputs, y)` is a sum over rows.
    """
    distributed = isinstance(model, DistributedDataParallel)
    rank, size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    device = next(model.parameters()).device
    losses = []
    start = time.perf_counter()
    for x, y in batches:
        x, y = x.to(device), y.to(device)
        loss = loss_of(model(x[rank::size]), y[rank::size]) / len(x)
        # DDP averages the gradients of the ranks, whose shares may differ: so multiply by N.
        (loss * size).backward()
        optimizer.step()
        optimizer.zero_grad()

        loss = loss.detach().cpu()  # waits for the GPU
        if distributed:
            dist.all_reduce(loss)
        losses.append(loss.item())
        if not losses[-1] < DIVERGED:
            break
        if len(losses) == 1:
            start = time.perf_counter()
    seconds = (time.perf_counter() - start) / max(1, len(losses) - 1)
    return Training(losses, flat_weights(model).cpu(), seconds)


# ---------------------------------------------------------------- scaling


def scaled_learning_rate(
    learning_rate: float, batch: int, base_batch: int, rule: str = "linear"
) -> float:
    """The learning rate for `batch` rows, if `learning_rate` suits `base_batch`.

    "linear" is the rule for SGD (Goyal et al. 2017), "sqrt" the one for Adam (Malladi et al. 2022),
    as long as the batch is so small that its noise limits the rate. Goyal et al. do not start with
    the scaled rate: a gradual warm-up raises it from `learning_rate` in the first five epochs.
    """
    factor = batch / base_batch
    return learning_rate * {"none": 1.0, "sqrt": factor**0.5, "linear": factor}[rule]


def train_linear(
    features: int, batch: int, learning_rate: float, steps: int, distributed: bool
) -> Training:
    """SGD on least squares without noise."""
    model = linear(features)
    if distributed:
        model = DistributedDataParallel(model)
    return train(
        model,
        torch.optim.SGD(model.parameters(), learning_rate),
        (synthetic(batch, features, seed=step) for step in range(1, steps + 1)),
        lambda out, y: 0.5 * ((out.squeeze(1) - y) ** 2).sum(),
    )


def scaling_settings(world_size: int) -> tuple[int, list[tuple[str, int, float, int]]]:
    """D, and (name, global batch, learning rate, steps) of three runs that see the same rows.

    On normal data SGD is stable for rates below 2 / (1 + (D + 1) / B). While B is far below D, the
    limit grows with B: hence the linear rule. One process takes 0.6 of its limit.
    """
    features = 16 * world_size**2  # far more than rule 2's batch of 2 N² rows
    batch = 2 * world_size
    steps = 80 * world_size
    rate = 0.6 * 2 / (1 + (features + 1) / batch)
    scaled = scaled_learning_rate(rate, batch * world_size, batch)
    return features, [
        ("rule 1: batch / N, rate", batch, rate, steps),
        ("rule 2: batch, rate · N", batch * world_size, scaled, steps // world_size),
        ("wrong, both: batch / N, rate · N", batch, scaled, steps),
    ]


def lesson_scaling() -> None:
    """scaling: batch size and learning rate on N processes.

    Rule 1 divides the batch by N: the global batch stays, so the learning rate stays. Rule 2 keeps
    the batch of each process: the global batch is N times as large, so the learning rate may grow,
    after a gradual warm-up. The handout does both: the batch of one process with N times its rate.
    Predict: which of the three runs below diverges?
    """
    rows = []
    for n in (1, 2, 4, 8):
        rates = [
            scaled_learning_rate(5e-5, 192 * n, 192, rule) for rule in ("none", "sqrt", "linear")
        ]
        rows.append((n, 192 // n, 192, 192 * n, *(f"{rate:.1e}" for rate in rates)))
    print_table(
        "--batch_size 192 --lr 5e-5 on N processes",
        "N|rule 1: per rank|rule 2: per rank|global|lr none|lr sqrt|lr linear",
        rows,
    )

    size = dist.get_world_size()
    features, settings = scaling_settings(size)
    rows = []
    for name, batch, rate, steps in settings:
        ours = train_linear(features, batch, rate, steps, distributed=True)
        made = len(ours.losses)
        alone = train_linear(features, batch, rate, made, distributed=False)
        gap = (ours.weights - alone.weights).norm() / alone.weights.norm()
        last = f"diverges after {made} steps" if ours.diverged else f"{ours.losses[-1]:.1e}"
        run = (name, batch // size, batch, f"{rate:.4f}", steps)
        rows.append((*run, f"{ours.losses[0]:.2f}", last, f"{gap:.0e}"))
    columns = "setting|per rank|global batch|rate|steps|first loss|last loss|against one process"
    print_table(f"SGD, least squares, {features} features, N = {size}", columns, rows)
    print_text(
        "Last column: the relative difference of the weights to those of one process with that\n"
        "global batch and rate, after as many steps. A run is ended as diverging when its loss is\n"
        f"above {DIVERGED:g}."
    )


# ---------------------------------------------------------------- ddp


class DataParallelByHand(nn.Module):
    """The four steps of `nn.DataParallel`, which needs GPUs; here the CPU stands for each of them.

    In the backward pass each copy hands its gradient to the weights that it was copied from, where
    the gradients are summed.
    """

    def __init__(self, module: nn.Module, devices: int):
        super().__init__()
        self.module = module  # on the first device
        self.devices = devices

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs for all rows of x (B, D)."""
        outputs = []
        for share in x.chunk(self.devices):  # 1. scatter: the batch is split, by rows
            # 2. replicate: in every step each device gets the weights again.
            copies = {name: weight.clone() for name, weight in self.module.named_parameters()}
            # 3. apply: `nn.DataParallel` has a thread for each device.
            outputs.append(torch.func.functional_call(self.module, copies, (share,)))
        return torch.cat(outputs)  # 4. gather: the first device computes the loss of all rows


@dataclass
class Sizes:
    """Of the network and the batches of the lesson `ddp`."""

    features: int = 8
    hidden: int = 16
    classes: int = 3
    rows: int = 61  # of a global batch


# On GPUs, so that a step takes milliseconds: 34 million weights.
LARGE = Sizes(features=4096, hidden=8192, rows=1024)


def train_classifier(steps: int, wrap: Callable, sizes: Sizes) -> Training:
    """A small network, SGD with momentum.

    `wrap(network)` is what is trained: the network itself, under DDP, or in DataParallel.
    """
    torch.manual_seed(5)
    first = nn.Linear(sizes.features, sizes.hidden)
    model = wrap(nn.Sequential(first, nn.Tanh(), nn.Linear(sizes.hidden, sizes.classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    batches = []
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(sizes.rows, sizes.features, generator=generator)
        batches.append((x, x[:, : sizes.classes].argmax(dim=1)))
    return train(model, optimizer, batches, nn.CrossEntropyLoss(reduction="sum"))


def busiest_device(sizes: Sizes, devices: int) -> list[tuple]:
    """Rows for a table: how many numbers pass through the busiest device in a step, and why."""
    weights = (sizes.features + 1) * sizes.hidden + (sizes.hidden + 1) * sizes.classes
    others = devices - 1
    own_rows = len(torch.empty(sizes.rows).chunk(devices)[0])
    rows = sizes.rows - own_rows  # of the other devices
    out = others * weights + rows * (sizes.features + sizes.classes)
    back = others * weights + rows * sizes.classes
    ring = round(2 * others / devices * weights)
    return [
        ("DataParallel", out, "weights, rows, gradients of outputs", back, "gradients, outputs"),
        ("DDP", ring, "gradients in a ring", ring, "gradients: see the lesson ring"),
    ]


def lesson_ddp(gpus: tuple[int, ...] = ()) -> None:
    """ddp: DistributedDataParallel and DataParallel equal one process.

    All three train on the same global batches of 61 rows. DDP has a process for each share of the
    rows and averages the gradients. DataParallel is one process: it splits the batch, copies the
    weights to every device, gathers the outputs, computes the loss and sums the gradients.
    PyTorch's documentation warns: "It is recommended to use DistributedDataParallel, instead of
    this class, to do multi-GPU training, even if there is only a single node." Predict: how many
    times as many numbers pass through DataParallel's first device as through one of DDP, for 3
    devices and for 8?
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="nccl") if gpus else None

    def in_ddp(network: nn.Module) -> nn.Module:
        """Wrapped for one process on each GPU."""
        if gpus:
            network = network.to(f"cuda:{gpus[rank]}")
        return DistributedDataParallel(network, process_group=group)

    def in_data_parallel(network: nn.Module) -> nn.Module:
        """Wrapped for one process with all GPUs, or its imitation."""
        if gpus:
            return nn.DataParallel(network.to(f"cuda:{gpus[0]}"), device_ids=list(gpus))
        return DataParallelByHand(network, size)

    sizes = Sizes()
    ddp = train_classifier(20, in_ddp, sizes)
    copies = all_gather_object(ddp.weights)
    large_ddp = train_classifier(20, in_ddp, LARGE) if gpus else None
    if rank == 0:  # the others are one process, too
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data_parallel = train_classifier(20, in_data_parallel, sizes)
        alone = train_classifier(20, lambda network: network, sizes)
        print_comparison({"DDP": ddp, "DataParallel": data_parallel, "one process": alone}, sizes)
        between = max((weights - copies[0]).abs().max() for weights in copies)
        print_text(f"Largest difference between the weights of DDP's ranks: {between:.1e}.")
        columns = "way|sent|what|received|what"
        caption = "numbers that pass through the busiest device in a step"
        print_table(f"{caption}, N = {size}", columns, busiest_device(sizes, size))
        print_table(f"{caption}, N = 8", columns, busiest_device(sizes, 8))
        for warning in caught:
            print_text(f"PyTorch warns: {warning.message}")
        if gpus:
            large = train_classifier(20, in_data_parallel, LARGE)
            rows = [("DDP", large_ddp), ("DataParallel", large)]
            rows = [(name, f"{1e3 * run.seconds:.1f}") for name, run in rows]
            print_table(f"a network of 34 million weights on GPUs {gpus}", "way|ms a step", rows)
        else:
            print_text(
                "DataParallel is written by hand here: `nn.DataParallel` splits a batch over GPUs\n"
                "only. Without GPUs it calls the model itself. --gpu_devices 0 1 runs the real one."
            )
    dist.barrier()


def print_comparison(runs: dict[str, Training], sizes: Sizes) -> None:
    """Losses and weights of the three ways, the last of them on one process."""
    size = dist.get_world_size()
    print_table(
        f"loss on {size} devices and of one process, same batches",
        "step|" + "|".join(runs),
        [
            (step, *(f"{run.losses[step - 1]:.6f}" for run in runs.values()))
            for step in (1, 5, 10, 20)
        ],
    )
    batch = torch.arange(sizes.rows)
    shares = {
        "DDP": [len(batch[rank::size]) for rank in range(size)],
        "DataParallel": [len(share) for share in batch.chunk(size)],
    }
    rows = []
    for name, lengths in shares.items():
        gap = (runs[name].weights - runs["one process"].weights).abs().max()
        rows.append((name, " ".join(map(str, lengths)), f"{gap:.1e}"))
    columns = "way|rows of each device|largest difference to one process"
    print_table("weights after 20 steps", columns, rows)
