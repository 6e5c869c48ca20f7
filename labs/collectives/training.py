"""Three lessons: batch size and learning rate, DDP against one process, fp16 with a loss scaler.

N ranks, B rows of a global batch, D features.
"""

from collections.abc import Callable
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
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    loss_of: Callable,
    distributed: bool,
) -> tuple[list[float], torch.Tensor]:
    """A step for each batch x (B, D), y (B); returns the mean losses and the weights.

    Distributed: under DDP, each rank on its rows of the batch. Otherwise all rows in this process.
    `loss_of(outputs, y)` is a sum over rows.
    """
    model = DistributedDataParallel(module) if distributed else module
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
    return losses, flat_weights(module)


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
    module = linear(features)
    return train(
        module,
        torch.optim.SGD(module.parameters(), learning_rate),
        [synthetic(batch, features, seed=step) for step in range(1, steps + 1)],
        lambda out, y: 0.5 * ((out.squeeze(1) - y) ** 2).sum(),
        distributed,
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


def train_classifier(steps: int, distributed: bool) -> tuple[list[float], torch.Tensor]:
    """A small network, SGD with momentum, 61 rows per step; returns the losses and the weights."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    batches = []
    for step in range(1, steps + 1):
        x = torch.randn(61, 8, generator=torch.Generator().manual_seed(step))
        batches.append((x, x[:, :3].argmax(dim=1)))
    loss_of = nn.CrossEntropyLoss(reduction="sum")
    return train(module, optimizer, batches, loss_of, distributed)


def lesson_ddp() -> None:
    """ddp: DistributedDataParallel equals one process.

    Both train on the same global batches of 61 rows; the shares of the ranks differ.
    """
    losses, weights = train_classifier(20, distributed=True)
    expected_losses, expected = train_classifier(20, distributed=False)
    rows = [
        (step, f"{losses[step - 1]:.6f}", f"{expected_losses[step - 1]:.6f}")
        for step in (1, 5, 10, 20)
    ]
    caption = f"loss under DDP with N = {dist.get_world_size()} and of one process, same batches"
    print_table(caption, "step|DDP|one process", rows)
    gap = (weights - expected).abs().max().item()
    between = max((other - weights).abs().max().item() for other in all_gather_object(weights))
    print_text(
        f"Weights after 20 steps: largest difference to one process {gap:.1e}, "
        f"between ranks {between:.1e}."
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
    # 1e-3 and 4e-3 make gradients so small that fp16 rounds most of them to 0. A rate of 50 makes
    # steps of 0.4 · mean(error · x) of them.
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


def steps_with_overflow(together: bool, steps: int = 6) -> tuple[int, float]:
    """(steps made, last scale), where the gradient of the last rank is too large in the third step.

    Each rank holds other parameters, as in FSDP or tensor parallelism. (DDP's average would carry
    the inf to all ranks.) Together: all ranks make a step or none does.
    """
    scaler = LossScaler(scale=2.0**14)
    steps_made = 0
    for step in range(steps):
        too_large = step == 2 and dist.get_rank() == dist.get_world_size() - 1
        gradient = torch.tensor(8.0 if too_large else 1.0, dtype=torch.float16) * scaler.scale
        overflow = (~gradient.isfinite()).float()
        if together:
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        steps_made += scaler.update(bool(overflow))
    return steps_made, scaler.scale


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

    alone, together = (steps_with_overflow(together) for together in (False, True))
    rows = [(rank, *row) for rank, row in enumerate(all_gather_object((*alone, *together)))]
    print_table(
        "6 steps, an overflow on the last rank in the third",
        "rank|wrong, each for itself: steps made|scale|right, all_reduce: steps made|scale",
        rows,
    )
