"""Three lessons of `labs.collectives` on training: batch size and learning rate, DDP, fp16 with a loss scaler."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from engine.distributed import World
from labs.collectives.report import Picture, Table, everyone, one_process, words

# N ranks, B rows of a global batch, D features.


def linear(features: int) -> nn.Linear:
    """x·w with w = 0."""
    model = nn.Linear(features, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def synthetic(rows: int, features: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (B, D) and y (B) = x·w*, all normal; w* the same for all `seed`s and of length about 1."""
    target = torch.randn(features, generator=torch.Generator().manual_seed(0)) / features**0.5
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))
    return x, x @ target


# ---------------------------------------------------------------- scaling


def scaled_lr(lr: float, batch: int, base_batch: int, rule: str) -> float:
    """The learning rate for `batch` rows, where `lr` is right for `base_batch`; `rule` is none, sqrt or linear.

    linear suits SGD (Goyal et al. 2017), sqrt Adam (Malladi et al. 2022), as long as the batch is so small that its noise
    sets the limit.
    """
    factor = batch / base_batch
    return lr * {"none": 1.0, "sqrt": factor**0.5, "linear": factor}[rule]


def train_linear(features: int, batch: int, lr: float, steps: int, world: World | None = None):
    """SGD on least squares without noise: → (loss of every batch, w at the end).

    With a `world` under DDP, each rank on its rows of the global batch; without, on all of them in this process.
    """
    module = linear(features)
    model = DistributedDataParallel(module) if world else module
    optimizer, losses = torch.optim.SGD(module.parameters(), lr), []
    for step in range(steps):
        x, y = synthetic(batch, features, seed=step + 1)
        if world:
            x, y = x[world.rank :: world.size], y[world.rank :: world.size]
        loss = (
            0.5 * ((model(x).squeeze(1) - y) ** 2).mean()
        )  # equal shares: DDP's average is the mean of all rows
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((world.sum(loss.detach()) / world.size if world else loss.detach()).item())
    return losses, module.weight.detach()[0]


def scaling_settings(size: int) -> tuple[int, list[tuple[str, int, float, int]]]:
    """D, and (name, global batch, learning rate, steps) of three runs that see equally many rows.

    On normal data SGD is stable for lr < 2 / (1 + (D + 1) / B). While B is far below D the batch's noise sets this limit,
    and it grows with B: that is what the linear rule rests on. One process takes 0.6 of the limit.
    """
    features, batch, steps = (
        16 * size**2,
        2 * size,
        80 * size,
    )  # even rule 2's batch, 2 N², is far below D = 16 N²
    lr = 0.6 * 2 / (1 + (features + 1) / batch)
    larger = scaled_lr(lr, batch * size, batch, "linear")
    return features, [
        ("rule 1: batch / N, lr", batch, lr, steps),
        ("rule 2: batch, lr · N", batch * size, larger, steps // size),
        ("wrong, both: batch / N, lr · N", batch, lr * size, steps),
    ]


def lesson_scaling(world: World) -> list:
    """Batch size and learning rate on N processes.

    Rule 1 divides the batch by N: the global batch stays, so the learning rate stays. Rule 2 keeps the batch of each
    process: the global batch is N times as large, so the learning rate may be larger. Both at once, as in the handout:
    the batch of one process with N times its learning rate.
    """
    rules = []
    for n in (1, 2, 4, 8):
        larger = [
            f"{scaled_lr(5e-5, 192 * n, 192, rule):.1e}" for rule in ("none", "sqrt", "linear")
        ]
        rules.append(
            (
                n,
                192 // n,
                192 // n * n,
                "5.0e-05",
                192,
                192 * n,
                *larger,
                192 // n * n,
                f"{5e-5 * n:.1e}",
            )
        )
    features, settings = scaling_settings(world.size)
    rows, curves = [], {}
    for name, batch, lr, steps in settings:
        losses, weights = train_linear(features, batch, lr, steps, world)
        _, alone = train_linear(features, batch, lr, steps)
        curves[name] = [((step + 1) * batch, loss) for step, loss in enumerate(losses)]
        gap = (weights - alone).norm() / alone.norm()
        rows.append(
            (
                name,
                batch // world.size,
                batch,
                f"{lr:.4f}",
                steps,
                f"{losses[0]:.2f}",
                f"{losses[-1]:.1e}",
                f"{gap:.0e}",
            )
        )
    return [
        Table(
            "--batch_size 192 --lr 5e-5 on N processes (1: rule 1, 2: rule 2)",
            "N|1: per rank|global|lr|2: per rank|global|lr none|lr sqrt|lr linear|wrong, both: global|lr",
            rules,
        ),
        Table(
            f"SGD, least squares, {features} features, N = {world.size}",
            "setting|per rank|global batch|lr|steps|first loss|last loss|w against one process",
            rows,
        ),
        "The last column is the relative difference of the weights to one process with that global batch and lr.",
        *one_process(world, "all three are the same"),
        Picture(f"SGD, N = {world.size}: loss of the batch", "rows seen", "loss", curves),
    ]


# ---------------------------------------------------------------- ddp


def train_classifier(steps: int, world: World | None = None) -> tuple[list[float], torch.Tensor]:
    """A small network, SGD with momentum, 61 rows a step: → (loss of every global batch, all weights in a row)."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    model = DistributedDataParallel(module) if world else module
    rank, size = (world.rank, world.size) if world else (0, 1)
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9), []
    for step in range(steps):
        x = torch.randn(61, 8, generator=torch.Generator().manual_seed(step))
        y = x[:, :3].argmax(dim=1)
        loss = nn.functional.cross_entropy(model(x[rank::size]), y[rank::size], reduction="sum")
        optimizer.zero_grad()
        (loss * size / len(x)).backward()  # DDP divides by N; 61 rows are uneven shares
        optimizer.step()
        loss = loss.detach()
        losses.append((world.sum(loss) if world else loss).item() / len(x))
    return losses, torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def data_parallel_agrees(device: str) -> bool | str:
    """Whether DataParallel gives the model's own output; in words, if others have filled one of the GPUs."""
    # Made where DataParallel works: it takes the model to the first GPU, and asks that the model be there already if there
    # are several. Each GPU multiplies fewer rows, perhaps in another order: 4 terms in fp32 are within 1e-5 all the same.
    try:
        model, x = nn.Linear(4, 4, device=device), torch.randn(6, 4, device=device)
        return torch.allclose(nn.DataParallel(model)(x), model(x), atol=1e-5)
    except RuntimeError as error:
        return f"not tried: {str(error).splitlines()[0]}"


def lesson_ddp(world: World) -> list:
    """DistributedDataParallel equals one process; how DataParallel differs."""
    steps = 20
    losses, weights = train_classifier(steps, world)
    alone_losses, alone = train_classifier(steps)
    rows = [
        (step, f"{losses[step - 1]:.6f}", f"{alone_losses[step - 1]:.6f}")
        for step in (1, 5, 10, 20)
    ]
    gap = (weights - alone).abs().max().item()
    apart = max((other - weights).abs().max().item() for other in everyone(weights))
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    same = world.on_main(lambda: data_parallel_agrees(device))  # which takes all GPUs
    differ = [
        ("processes", "one, with a thread for each GPU", "one for each GPU"),
        ("machines", "one", "one or many"),
        (
            "model",
            "copied from the first GPU to all, every step",
            "copied once; equal steps keep it equal",
        ),
        ("batch", "cut up by the first GPU", "each process loads its own share"),
        (
            "gradients",
            "added up on the first GPU",
            "averaged by all_reduce during the backward pass",
        ),
        ("outputs and loss", "collected on the first GPU", "stay where they are"),
        ("--batch_size means", "the global batch", "what the script makes of it: see `scaling`"),
    ]
    return [
        Table(
            f"loss under DDP with N = {world.size} and of one process, same global batch",
            "step|DDP|one process",
            rows,
        ),
        f"Weights after {steps} steps: largest difference {gap:.1e} to one process, {apart:.1e} between ranks.",
        Table("the two", "what|DataParallel|DistributedDataParallel", differ),
        f"DataParallel without a GPU only calls the model (same output here: {same}).",
    ]


# ---------------------------------------------------------------- fp16


@dataclass
class LossScaler:
    """The dynamic loss scale (Micikevicius et al. 2018) with the defaults of torch.amp.GradScaler."""

    scale: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, overflow: bool) -> bool:
        """After a backward pass: halve after an overflow, double after many good steps; → whether to make the step."""
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.scale /= 2
        elif self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0
        return not overflow


def on_any_rank(overflow: bool) -> bool:
    """Whether any rank overflowed: all ranks make the step, or none."""
    largest = torch.tensor(float(overflow))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return bool(largest)


def train_half(
    number_format: torch.dtype, scaler: LossScaler | None, steps: int = 300, master: bool = True
) -> tuple[float, float]:
    """Least squares with small targets: → error at the end, that of w = 0 being 1, and the share of gradients that were 0.

    Products and gradients in `number_format`; the weights and their update in fp32 (master weights), or without `master` in
    `number_format` too, as after `model.half()`.
    """
    # 1e-3 and 4e-3: gradients so small that fp16 rounds most to 0; times 50 they are steps of 0.4 · mean(error · x).
    x, y = synthetic(rows=64, features=16, seed=7)
    y, w, zeros = y[:, None] * 1e-3, torch.zeros(16, 1), []  # (B, 1), (D, 1)
    for _ in range(steps):
        scale = scaler.scale if scaler else 1.0
        rounded = w.to(number_format, copy=True).requires_grad_()
        error = (x.to(number_format) @ rounded).float() - y
        (error.square().mean() * 4e-3 * scale).backward()
        zeros.append((rounded.grad == 0).float().mean().item())
        gradient = rounded.grad.float() / scale
        if scaler is None or scaler.update(overflow=not gradient.isfinite().all()):
            w -= 50 * gradient
            w = w if master else w.to(number_format).float()
    return ((x @ w - y).square().mean() / y.square().mean()).item(), sum(zeros) / len(zeros)


def half_refused() -> str:
    """What torch.amp.GradScaler says to the fp16 gradients of a `model.half()`."""
    model = linear(4).half()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 4).half()).sum()).backward()
    try:
        scaler.unscale_(torch.optim.SGD(model.parameters(), 0.1))
    except ValueError as error:
        return words(error)
    return "nothing"


def scaled_steps(world: World, together: bool, steps: int = 6) -> tuple[int, float]:
    """(steps made, scale at the end) where the last rank's gradient is too large once.

    Each rank holds other parameters, as in FSDP or tensor parallelism: DDP's average would carry the inf to all ranks.
    """
    scaler, made = LossScaler(scale=2.0**14), 0
    for step in range(steps):
        gradient = torch.tensor(
            8.0 if step == 2 and world.rank == world.size - 1 else 1.0, dtype=torch.float16
        )
        overflow = not (gradient * scaler.scale).isfinite()
        made += scaler.update(on_any_rank(overflow) if together else overflow)
    return made, scaler.scale


def lesson_fp16(world: World) -> list:
    """fp16 gradients and a loss scaler by hand.

    fp16 holds nothing below 6e-8 or above 65504. The loss is multiplied before the backward pass and the gradient divided
    after it, in fp32; a step whose gradient overflowed is skipped and the scale halved. `model.half()`, the same as
    `model.to(torch.float16)`, needs that too, and rounds every update of a weight to 11 bits besides.
    """
    numbers = []
    for value in (1e-3, 1e-5, 1e-7, 1e-8):
        plain, scaled = (
            torch.tensor(value).half().item(),
            (torch.tensor(value) * 2**16).half().item() / 2**16,
        )
        numbers.append((f"{value:.0e}", f"{plain:.2e}", f"{scaled:.2e}"))
    sums = [
        f"{(torch.tensor(1.0, dtype=dtype) + 1e-4).item():.4f}"
        for dtype in (torch.float16, torch.float32)
    ]
    half = torch.float16
    runs = {
        "fp32": (torch.float32, None),
        "fp16": (half, None),
        "fp16, scaled": (half, LossScaler()),
        ".half()": (half, None),
        ".half(), scaled": (half, LossScaler()),
    }
    trained = []
    for name, (number_format, scaler) in runs.items():
        error, zeros = train_half(number_format, scaler, master=".half()" not in name)
        trained.append(
            (name, f"{zeros:.0%}", f"{error:.1e}", f"{scaler.scale:g}" if scaler else "-")
        )
    pairs = everyone((*scaled_steps(world, together=False), *scaled_steps(world, together=True)))
    return [
        Table("a gradient in fp16", "true|in fp16|times 65536 in fp16, divided in fp32", numbers),
        f"A weight of 1 plus 1e-4 is {sums[0]} in fp16 and {sums[1]} in fp32: the weights stay in fp32.",
        Table(
            "300 steps on small targets",
            "format|gradients that are 0|error, w = 0 being 1|last scale",
            trained,
        ),
        f"torch.amp.GradScaler on the gradients of .half(): {half_refused()}",
        Table(
            "6 steps, an overflow on the last rank in the third",
            "rank|wrong, each for itself: steps made|scale|right, all_reduce: steps made|scale",
            [(rank, *pair) for rank, pair in enumerate(pairs)],
        ),
        *one_process(world, "no rank can part from another"),
    ]
