"""Three lessons: batch size and learning rate, DDP and DataParallel, fp16 with a loss scaler.

N ranks, B rows of a global batch, D features.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs.collectives.common import all_gather_object, print_table, print_text


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


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    loss_of: Callable,
) -> tuple[list[float], torch.Tensor]:
    """A step for each batch x (B, D), y (B); returns the mean losses and the weights.

    Under DDP each rank computes its rows of the batch, otherwise this process computes all.
    `loss_of(outputs, y)` is a sum over rows.
    """
    distributed = isinstance(model, DistributedDataParallel)
    rank, size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    losses = []
    for x, y in batches:
        loss = loss_of(model(x[rank::size]), y[rank::size]) / len(x)
        # DDP averages the gradients of the ranks, whose shares may differ: so multiply by N.
        (loss * size).backward()
        optimizer.step()
        optimizer.zero_grad()

        loss = loss.detach()
        if distributed:
            dist.all_reduce(loss)
        losses.append(loss.item())
    return losses, flat_weights(model)


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
) -> tuple[list[float], torch.Tensor]:
    """SGD on least squares without noise; returns the loss of every batch and the weights."""
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
        losses, weights = train_linear(features, batch, rate, steps, distributed=True)
        _, expected = train_linear(features, batch, rate, steps, distributed=False)
        gap = (weights - expected).norm() / expected.norm()
        run = (name, batch // size, batch, f"{rate:.4f}", steps)
        rows.append((*run, f"{losses[0]:.2f}", f"{losses[-1]:.1e}", f"{gap:.0e}"))
    columns = "setting|per rank|global batch|rate|steps|first loss|last loss|against one process"
    print_table(f"SGD, least squares, {features} features, N = {size}", columns, rows)
    print_text(
        "Last column: the relative difference of the weights to those of one process with that\n"
        "global batch and rate."
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


def train_classifier(steps: int, wrap: Callable) -> tuple[list[float], torch.Tensor]:
    """A small network, SGD with momentum, 61 rows per step; returns the losses and the weights.

    `wrap(network)` is what is trained: the network itself, under DDP, or in DataParallel.
    """
    torch.manual_seed(5)
    model = wrap(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    batches = []
    for step in range(1, steps + 1):
        x = torch.randn(61, 8, generator=torch.Generator().manual_seed(step))
        batches.append((x, x[:, :3].argmax(dim=1)))
    return train(model, optimizer, batches, nn.CrossEntropyLoss(reduction="sum"))


def lesson_ddp() -> None:
    """ddp: DistributedDataParallel and DataParallel equal one process.

    All three train on the same global batches of 61 rows. DDP has a process for each share of the
    rows and averages the gradients. DataParallel is one process: it splits the batch, copies the
    weights to every device, gathers the outputs, computes the loss and sums the gradients.
    """
    size = dist.get_world_size()
    runs = {
        "DDP": train_classifier(20, DistributedDataParallel),
        "DataParallel": train_classifier(20, lambda module: DataParallelByHand(module, size)),
        "one process": train_classifier(20, lambda module: module),
    }
    print_table(
        f"loss on {size} devices and of one process, same batches",
        "step|" + "|".join(runs),
        [
            (step, *(f"{losses[step - 1]:.6f}" for losses, _ in runs.values()))
            for step in (1, 5, 10, 20)
        ],
    )
    batch = torch.arange(61)
    shares = {
        "DDP": [len(batch[rank::size]) for rank in range(size)],
        "DataParallel": [len(share) for share in batch.chunk(size)],
    }
    _, expected = runs["one process"]
    rows = []
    for name, lengths in shares.items():
        gap = (runs[name][1] - expected).abs().max()
        rows.append((name, " ".join(map(str, lengths)), f"{gap:.1e}"))
    columns = "way|rows of each device|largest difference to one process"
    print_table("weights after 20 steps", columns, rows)

    _, weights = runs["DDP"]
    between = max((other - weights).abs().max() for other in all_gather_object(weights))
    print_text(
        f"Largest difference between the weights of DDP's ranks: {between:.1e}.\n"
        "DataParallel is written by hand here: `nn.DataParallel` splits a batch over GPUs\n"
        "only. Without GPUs it calls the model itself."
    )


# ---------------------------------------------------------------- fp16


@dataclass
class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018) with torch.amp.GradScaler's defaults."""

    scale: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, overflow: bool) -> bool:
        """After a backward pass: adapt the scale; return whether to make the step."""
        if overflow:
            self.scale /= 2
            self.good_steps = 0
            return False
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0
        return True


def train_half(
    dtype: torch.dtype, scaler: LossScaler | None, steps: int = 300, master_weights: bool = True
) -> tuple[float, float]:
    """Least squares with small targets; returns the last error and the share of zero gradients.

    The error is relative to that of w = 0. Products and gradients are in `dtype`. The weights are
    in fp32, or without `master_weights` in `dtype` too, as after `model.half()`.
    """
    # 1e-3 and 4e-3 make gradients so small that fp16 rounds most of them to 0. The gradient is
    # 2 · 4e-3 · mean(error · x); times the rate of 50 a step is 0.4 · mean(error · x).
    x, y = synthetic(rows=64, features=16, seed=7)
    y = y[:, None] * 1e-3  # (B, 1)
    weight = torch.zeros(16, 1)  # (D, 1)
    zero_shares = []
    for _ in range(steps):
        scale = scaler.scale if scaler else 1.0
        rounded = weight.to(dtype, copy=True).requires_grad_()

        error = (x.to(dtype) @ rounded).float() - y
        loss = error.square().mean() * 4e-3
        (loss * scale).backward()

        zero_shares.append((rounded.grad == 0).float().mean().item())
        gradient = rounded.grad.float() / scale
        if scaler is None or scaler.update(overflow=not gradient.isfinite().all()):
            weight -= 50 * gradient
            if not master_weights:
                weight = weight.to(dtype).float()
    relative_error = (x @ weight - y).square().mean() / y.square().mean()
    return relative_error.item(), sum(zero_shares) / steps


def lesson_fp16() -> None:
    """fp16: gradients that underflow, and a loss scaler by hand.

    fp16 holds nothing below 6e-8 or above 65504. The loss is multiplied before the backward pass
    and the gradient divided after it, in fp32; a step whose gradient overflowed is skipped and the
    scale halved. `model.half()`, the same as `model.to(torch.float16)`, needs that too, and also
    rounds every update of a weight to 11 bits.
    """
    rows = []
    for value in (1e-3, 1e-5, 1e-7, 1e-8):
        plain = torch.tensor(value).half().item()
        scaled = (torch.tensor(value) * 2**16).half().item() / 2**16
        rows.append((f"{value:.0e}", f"{plain:.2e}", f"{scaled:.2e}"))
    columns = "true|in fp16|times 65536 in fp16, divided in fp32"
    print_table("a gradient in fp16", columns, rows)
    half = (torch.ones((), dtype=torch.float16) + 1e-4).item()
    single = (torch.ones(()) + 1e-4).item()
    print_text(f"A weight of 1 plus 1e-4 is {half:.4f} in fp16 and {single:.4f} in fp32.")

    runs = {
        "fp32": (torch.float32, None, True),
        "fp16": (torch.float16, None, True),
        "fp16, scaled": (torch.float16, LossScaler(), True),
        ".half()": (torch.float16, None, False),
        ".half(), scaled": (torch.float16, LossScaler(), False),
    }
    rows = []
    for name, (dtype, scaler, master_weights) in runs.items():
        error, zeros = train_half(dtype, scaler, master_weights=master_weights)
        rows.append((name, f"{zeros:.0%}", f"{error:.0e}", f"{scaler.scale:g}" if scaler else "-"))
    columns = "format|gradients that are 0|error, w = 0 being 1|last scale"
    print_table("300 steps on small targets", columns, rows)
