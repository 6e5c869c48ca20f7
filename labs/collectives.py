"""Collectives by hand: seven small lessons, each a right way beside the wrong one, on several processes of this machine.

python -m labs.collectives                             # starts 3 processes itself (gloo, CPU); half a minute
python -m labs.collectives --lesson mean --processes 4 # one lesson, on so many processes
torchrun --nproc_per_node 2 -m labs.collectives        # the same on torchrun's processes

gather      the tensors of all ranks to one rank; ranks, devices and sub-groups
all_gather  to every rank; unequal lengths; what happens to gradients
mean        one loss and one accuracy instead of one per process; the right gradient
sampler     which rows DistributedSampler repeats or drops, and what that does to a score
scaling     batch size and learning rate on n processes; two right rules that are wrong together
ddp         DistributedDataParallel equals one process; how DataParallel differs
fp16        gradients that underflow, a loss scaler by hand, an overflow on one rank only

The tables are printed and written as Markdown, with the picture of `scaling`, to --out.
"""

from dataclasses import dataclass

from engine.config import flag, nearest, parse_flags
from engine.errors import UserError, run_script, stop

LESSONS = ("gather", "all_gather", "mean", "sampler", "scaling", "ddp", "fp16")


@dataclass
class Config:
    lesson: str = flag("all", f"all, or one of {', '.join(LESSONS)}", "Collectives")
    processes: int = flag(3, "processes to start; under torchrun: as many as torchrun has", "Collectives")
    port: int = flag(0, "TCP port where the processes meet; 0: a free one", "Collectives")
    out: str = flag("", "Markdown file; runs/collectives/LESSON.md", "Collectives")

    def __post_init__(self):
        if self.lesson not in (*LESSONS, "all"):
            known = nearest(self.lesson, [*LESSONS]) or f"; choose all or one of {', '.join(LESSONS)}"
            raise UserError(f"--lesson {self.lesson}: unknown{known}")
        if not 1 <= self.processes <= 64:
            raise UserError(f"--processes {self.processes} must be in 1 to 64")
        if not 0 <= self.port < 65536:
            raise UserError(f"--port {self.port} must be in 0 to 65535")
        self.out = self.out or f"runs/collectives/{self.lesson}.md"


if __name__ == "__main__":
    config = parse_flags(Config, "collectives by hand, right and wrong")

import copy
import inspect
import os
import re
import socket
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from engine.distributed import World, start

# N ranks, L elements of a rank, B rows of a batch, D features.

# ---------------------------------------------------------------- gather


def rank_of(device: int, devices: list[int]) -> int:
    """The rank that drives GPU `device`, when rank r drives devices[r]. Collectives count in ranks, CUDA in devices."""
    return devices.index(device)


def gather_to(device: int, x: torch.Tensor, devices: list[int]) -> list[torch.Tensor] | None:
    """Every rank's `x` on the rank that drives `device`; None on the others, which may not pass a list at all."""
    dst = rank_of(device, devices)
    received = [torch.empty_like(x) for _ in devices] if dist.get_rank() == dst else None
    dist.gather(x, received, dst=dst)
    return received


def gather_to_wrong(device: int, x: torch.Tensor, devices: list[int], group) -> list[torch.Tensor] | None:
    """The device's number taken for a rank."""
    received = [torch.empty_like(x) for _ in devices] if devices[dist.get_rank()] == device else None
    dist.gather(x, received, dst=device, group=group)
    return received


def gather_list_everywhere(x: torch.Tensor, group) -> list[torch.Tensor]:
    """Wrong: a list on every rank."""
    received = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.gather(x, received, dst=0, group=group)
    return received


def gather_list_nowhere(x: torch.Tensor, group) -> None:
    """Wrong: no list on the destination."""
    dist.gather(x, None, dst=0, group=group)


def gather_in_subgroup(x: torch.Tensor, members: list[int], group, **destination) -> list[torch.Tensor] | str | None:
    """`destination`: dst=<global rank> or group_dst=<rank within the group>; both name members[0] here."""
    if dist.get_rank() not in members:
        return "not in the group"
    received = [torch.empty_like(x) for _ in members] if dist.get_rank() == members[0] else None
    dist.gather(x, received, group=group, **destination)
    return received


def lesson_gather(world: World) -> list:
    """Every rank's tensor on one rank.

    `dst` is a rank, not a GPU's number: with --gpu_devices 1 2, GPU 1 is driven by rank 0. Only the destination has a list
    to receive in. The wrong calls run in groups of their own that give up after 2 seconds; by default a rank that waits
    for a call that never comes waits for half an hour.
    """
    devices = list(range(1, world.size + 1))  # as in the handout: the first card is left to somebody else
    x = torch.arange(2) + 1 + 2 * devices[world.rank]
    right = everyone((world.rank, devices[world.rank], x, gather_to(devices[0], x, devices)))
    wrong = {
        "dst=1, the device's number": lambda group: gather_to_wrong(devices[0], x, devices, group),
        "gather_list on every rank": lambda group: gather_list_everywhere(x, group),
        "gather_list on no rank": lambda group: gather_list_nowhere(x, group),
    }
    outcomes = [(name, rank, text) for name, call in wrong.items() for rank, text in enumerate(attempt(call))]
    blocks = [
        Table(f"right: gather to device 1, which is rank {rank_of(1, devices)}", "rank|device|sent|received", right),
        Table("wrong, on the same tensors", "call|rank|what happens", outcomes),
    ]
    if world.size < 3:
        return [*blocks, "A sub-group that differs from the whole needs 3 processes."]
    members = list(range(1, world.size))
    group = dist.new_group(members)  # called by every rank, members or not
    rows = [
        ("dst=1 (global rank)", everyone(gather_in_subgroup(x, members, group, dst=1))),
        ("group_dst=0 (rank in the group)", everyone(gather_in_subgroup(x, members, group, group_dst=0))),
        ("wrong: dst=0", attempt(lambda _: gather_in_subgroup(x, members, group, dst=0))),
    ]
    rows = [(name, rank, dist.get_group_rank(group, rank) if rank in members else None, outcome)
            for name, outcomes in rows for rank, outcome in enumerate(outcomes)]  # fmt: skip
    return [*blocks, Table(f"sub-group of ranks {members}", "call|global rank|group rank|what happens", rows)]


# ---------------------------------------------------------------- all_gather


def all_gather_equal(x: torch.Tensor, group=None) -> list[torch.Tensor]:
    """Every rank's `x` on every rank. Right only if all have the same shape: `x` is taken as the model of all."""
    received = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(received, x, group=group)
    return received


def all_gather_lengths(x: torch.Tensor) -> list[int]:
    """L of every rank."""
    return torch.cat(all_gather_equal(torch.tensor([len(x)]))).tolist()


def all_gather_uneven(x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's `x` (L, …) on every rank, L different: the lengths first, padded to the longest, gathered, cut."""
    lengths = all_gather_lengths(x)
    padded = x.new_zeros(max(lengths), *x.shape[1:])
    padded[: len(x)] = x
    return [part[:length] for part, length in zip(all_gather_equal(padded), lengths)]


def all_gather_true_shapes(x: torch.Tensor, lengths: list[int], group) -> list[torch.Tensor]:
    """Wrong with gloo: a list of the true shapes. NCCL's documentation allows it."""
    received = [x.new_empty(length) for length in lengths]
    dist.all_gather(received, x, group=group)
    return received


def gather_uneven_wrong(x: torch.Tensor, group) -> list[torch.Tensor] | None:
    """Wrong: rank 0, which has the most, receives in tensors of its own shape."""
    received = [torch.empty_like(x) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(x, received, dst=0, group=group)
    return received


def gathered_gradients(world: World) -> list[tuple]:
    """(how, gradient of x) where rank r's loss is (r + 1) · Σ of the gathered x: over all losses Σ (r + 1) is right."""
    weight, rows = world.rank + 1, []
    for how in ("all_gather", "all_gather, own part put back", "torch.distributed.nn.functional.all_gather"):
        x = torch.ones(1, requires_grad=True)
        if how.startswith("torch"):
            with warnings.catch_warnings():  # 2.13 announces another name for it, which 2.11 does not have
                warnings.simplefilter("ignore", FutureWarning)
                from torch.distributed.nn.functional import all_gather

                received = list(all_gather(x))
        else:
            received = all_gather_equal(x.detach())
        if "own part" in how:
            received[world.rank] = x
        total = weight * torch.cat(received).sum()
        if total.requires_grad:
            total.backward()
        rows.append((how, None if x.grad is None else x.grad.item()))
    return rows


def victim(lengths: list[int], folder: str) -> None:
    """A process that calls all_gather as for equal lengths, and may die of it: its last words go to `folder`."""
    rank = int(os.environ["RANK"])
    os.dup2(os.open(f"{folder}/{rank}.err", os.O_WRONLY | os.O_CREAT), 2)  # what gloo's C++ says before it ends us
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    try:
        outcome = words(all_gather_equal(torch.full((lengths[rank],), rank + 1)))
    except RuntimeError as error:
        outcome = words(error)
    Path(folder, f"{rank}.out").write_text(outcome, encoding="utf-8")
    os._exit(0)


def outcomes_of_victims(lengths: list[int]) -> list[str]:
    """What becomes of each rank when lengths differ. In processes made for it: no `except` catches gloo's abort()."""
    with tempfile.TemporaryDirectory() as folder:
        context, store = launch(victim, len(lengths), lengths, folder)
        outcomes = []
        for rank, process in enumerate(context.processes):
            process.join(30)
            if process.exitcode is None:
                process.kill()
            out, err = Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")
            last = re.search(r"what\(\): +(.*)", err.read_text() if err.exists() else "")
            death = f"killed by signal {-(process.exitcode or 0)}: {words(Exception(last[1] if last else ''))}"
            outcomes.append(out.read_text(encoding="utf-8") if out.exists() else death)
        del store
    return outcomes


def lesson_all_gather(world: World) -> list:
    """Every rank's tensor on every rank.

    Shapes must be equal, and nothing checks it for you: here rank r holds N - r elements of value r + 1. gloo ends the
    process, reports a broken connection, or fills in bytes that nobody sent, by chance. NCCL differs again.
    """
    x = torch.full((world.size - world.rank,), world.rank + 1)
    lengths = all_gather_lengths(x)
    outcomes = [("wrong: all_gather into N tensors like one's own", world.on_main(lambda: outcomes_of_victims(lengths))),
                ("wrong: all_gather into the true shapes", attempt(lambda g: all_gather_true_shapes(x, lengths, g))),
                ("wrong: gather into N tensors like rank 0's", attempt(lambda g: gather_uneven_wrong(x, g))),
                ("right: lengths, pad, all_gather, cut", everyone(all_gather_uneven(x))),
                ("right, slower: all_gather_object", everyone(everyone(x)))]  # fmt: skip
    rows = [(name, rank, text) for name, texts in outcomes for rank, text in enumerate(texts)]
    gradients = [(how, *(values[i][1] for values in everyone(gathered_gradients(world))))
                 for i, (how, _) in enumerate(gathered_gradients(world))]  # fmt: skip
    ranks = "|".join(f"x.grad on rank {rank}" for rank in range(world.size))
    right = sum(range(1, world.size + 1))
    return [
        Table("unequal lengths", "call|rank|what happens", rows),
        Table(
            f"gradients: rank r's loss is (r + 1) · Σ gathered x; the right one is {right}", f"how|{ranks}", gradients
        ),
        "all_gather gives numbers without a history: gradients end there. A contrastive loss over all ranks needs the last.",
    ]


# ---------------------------------------------------------------- mean


def mean_of_means(total: float, count: float) -> float:
    """Wrong unless all counts are equal: every rank's mean weighs the same."""
    mean = torch.tensor(total / count, dtype=torch.float64)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def global_mean(total: float, count: float) -> float:
    """The mean over all ranks' elements: sum of sums / sum of counts, the same number on every rank."""
    both = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def ddp_gradient(x: torch.Tensor, y: torch.Tensor, how: str) -> torch.Tensor:
    """The gradient (D) that DDP leaves on every rank for Σ (x·w − y)² / count, this rank's rows being x (L, D), y (L).

    DDP sums the ranks' gradients and divides by N. That is the mean over rows only if `how` is 'global'.
    """
    size = dist.get_world_size()
    model = DistributedDataParallel(linear(x.shape[1]))
    squares = (model(x).squeeze(1) - y) ** 2  # (L)
    if how == "own mean":
        loss = squares.mean()
    elif how == "averaged loss":  # the handout's proposal
        loss = squares.mean()
        dist.all_reduce(loss)  # invisible to autograd: the value changes, its history stays this rank's
        loss = loss / size
    else:
        count = torch.tensor(float(len(x)))
        dist.all_reduce(count)
        loss = squares.sum() * size / count
    with warnings.catch_warnings():  # PyTorch warns of 'averaged loss', rightly
        warnings.simplefilter("ignore", UserWarning)
        loss.backward()
    return model.module.weight.grad[0].clone()


def single_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same on one process that has all rows."""
    model = linear(x.shape[1])
    ((model(x).squeeze(1) - y) ** 2).mean().backward()
    return model.weight.grad[0]


def lesson_mean(world: World) -> list:
    """One loss and one accuracy, not one per process.

    Every process prints what it sees, its own share: that is where three losses come from. Add up sums and counts, divide
    once, print on rank 0.
    """
    handout = [(16, 32), (17, 32), (15, 32), (18, 32)]
    rows = []
    for name, shares in (("handout, 4 × 32 rows", handout), ("last batch short", [*handout[:3], (4, 4)])):
        right, wrong = sum(r for r, _ in shares) / sum(n for _, n in shares), sum(r / n for r, n in shares) / 4
        rows.append((name, " ".join(f"{r}/{n}" for r, n in shares), f"{right:.4f}", f"{wrong:.4f}"))
    correct, count = (4, 4) if world.rank == world.size - 1 else handout[world.rank % 4]
    own = f"{correct / count:.4f}"
    here = (f"{global_mean(correct, count):.4f}", f"{mean_of_means(correct, count):.4f}")
    printed = [(rank, *row) for rank, row in enumerate(everyone((f"{correct}/{count}", own, *here)))]

    x, y = synthetic(rows=2 * world.size * (world.size + 1), features=6, seed=3)
    first = world.rank * (world.rank + 1) * 2  # rank r has 4 (r + 1) rows
    mine = slice(first, first + 4 * (world.rank + 1))
    reference = single_gradient(x, y)
    gradients = []
    for how in ("own mean", "averaged loss", "global"):
        gradient = ddp_gradient(x[mine], y[mine], how)
        gap = f"{(gradient - reference).norm() / reference.norm():.1e}"
        gradients.append((how, f"{gradient.norm():.4f}", f"{reference.norm():.4f}", gap))
    return [
        Table("on paper", "case|right/rows of each rank|sum / sum|mean of means", rows),
        Table("here: what each rank would print alone, and after all_reduce", "rank|right/rows|own|sum / sum|mean of means",
              printed),
        f"Rank 0 prints the one that counts: accuracy {here[0]}.",
        Table("gradient under DDP, rank r with 4 (r + 1) rows", "loss|its norm|one process|relative difference", gradients),
        "own mean: rows of short shares weigh more. averaged loss: all_reduce is invisible to autograd, so the gradient is "
        "only divided by N once more. global: Σ of own losses · N / count of all.",
    ]  # fmt: skip


# ---------------------------------------------------------------- sampler


def sampled_rows(rows: int, rank: int, size: int, drop_last: bool = False) -> list[int]:
    """The rows DistributedSampler gives to `rank`, unshuffled."""
    return list(DistributedSampler(range(rows), size, rank, shuffle=False, drop_last=drop_last))


def strided_rows(rows: int, rank: int, size: int) -> list[int]:
    """Each row on exactly one rank; shares differ by one at most. For scores, where no step waits for the others."""
    return list(range(rank, rows, size))


def accuracy_over(mine: list[int], right: list[bool]) -> tuple[float, int]:
    """Accuracy over all ranks' rows, and how many rows were counted."""
    correct = sum(right[row] for row in mine)
    return global_mean(correct, len(mine)), int(sum(everyone(len(mine))))


def epoch_orders(epochs: int, set_epoch: bool) -> list[list[int]]:
    """Rank 0's rows of 8 in each epoch, shuffled."""
    sampler, orders = DistributedSampler(range(8), 2, 0, seed=1), []
    for epoch in range(epochs):
        if set_epoch:
            sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return orders


def lesson_sampler(world: World) -> list:
    """What DistributedSampler repeats or drops.

    Every rank gets equally many rows, so rows are repeated or dropped. Training bears that; a score does not. Ranks
    start at 0.
    """
    ways = {"DistributedSampler": lambda rows, rank, size: sampled_rows(rows, rank, size),
            "drop_last=True": lambda rows, rank, size: sampled_rows(rows, rank, size, drop_last=True),
            "range(rank, rows, N)": strided_rows}  # fmt: skip
    splits = [(name, *(way(10, rank, 3) for rank in range(3))) for name, way in ways.items()]
    rows = 3 * world.size + 1  # one more than can be shared equally
    right = [row > 0 for row in range(rows)]  # a model that is wrong on row 0 only
    scores = [("true", rows, f"{sum(right) / rows:.4f}")]
    for name, way in ways.items():
        accuracy, counted = accuracy_over(way(rows, world.rank, world.size), right)
        scores.append((name, counted, f"{accuracy:.4f}"))
    orders = [(f"{'with' if told else 'without'} set_epoch", *epoch_orders(3, told)) for told in (True, False)]
    return [
        Table("10 rows over 3 ranks", "way|rank 0|rank 1|rank 2", splits),
        Table(f"accuracy over {world.size} ranks, {rows} rows, only row 0 wrong", "way|rows counted|accuracy", scores),
        *alone(world, "nothing is repeated or dropped, so the accuracies agree"),
        Table("rank 0 of 2, 8 rows, shuffled", "loop|epoch 0|epoch 1|epoch 2", orders),
        "Without set_epoch every epoch has the first one's order, silently.",
    ]


# ---------------------------------------------------------------- scaling


def scaled_lr(lr: float, batch: int, base_batch: int, rule: str) -> float:
    """The learning rate for `batch` rows, where `lr` was right for `base_batch`.

    linear: SGD (Goyal et al. 2017); sqrt: Adam (Malladi et al. 2022); none. Rules of thumb, for batches far below the one
    where noise stops to matter.
    """
    factor = batch / base_batch
    return lr * {"none": 1.0, "sqrt": factor**0.5, "linear": factor}[rule]


def train(global_batch: int, lr: float, steps: int, world: World | None = None) -> tuple[list[float], torch.Tensor]:
    """SGD on noiseless least squares: → |w − w*| before every step and at the end, and w.

    With a `world` under DDP, each rank taking its rows of the global batch; without, all of it in this process.
    """
    D = 128
    model, target = linear(D), torch.randn(D, generator=torch.Generator().manual_seed(0)) / D**0.5
    weight = model.weight
    model = DistributedDataParallel(model) if world else model
    optimizer, distances = torch.optim.SGD(model.parameters(), lr), []
    for step in range(steps):
        distances.append((weight.detach()[0] - target).norm().item())
        x = torch.randn(global_batch, D, generator=torch.Generator().manual_seed(step + 1))  # (B, D)
        x = x[world.rank :: world.size] if world else x
        optimizer.zero_grad()
        (0.5 * (model(x).squeeze(1) - x @ target) ** 2).mean().backward()
        optimizer.step()
    return [*distances, (weight.detach()[0] - target).norm().item()], weight.detach()[0]


def scaling_settings(size: int) -> list[tuple[str, int, float, int]]:
    """(name, global batch, learning rate, steps); all but the last but one see the same number of rows.

    SGD on Gaussian least squares is stable for lr < 2 / (1 + (D + 1) / B): while B is small against D the limit is set by
    the batch's noise and grows with B, which is what the linear rule rests on.
    """
    batch, steps = 2 * size, 240
    lr = 0.6 * 2 / (1 + 129 / batch)
    return [("rule 1: batch / N, lr", batch, lr, steps),
            ("rule 2: batch, lr · N", batch * size, scaled_lr(lr, batch * size, batch, "linear"), steps // size),
            ("both: batch / N, lr · N", batch, lr * size, steps)]  # fmt: skip


def lesson_scaling(world: World) -> list:
    """Batch size and learning rate on N processes.

    Rule 1 divides the batch by N: the global batch stays, so the learning rate stays. Rule 2 keeps the batch per process:
    the global batch is N times as large, so the learning rate may be. Both together: the batch of one process, N times
    its learning rate.
    """
    rules = []
    for n in (1, 2, 4, 8):
        kept = [f"{scaled_lr(5e-5, 192 * n, 192, rule):.1e}" for rule in ("none", "sqrt", "linear")]
        rules.append((n, 192 // n, 192 // n * n, "5.0e-05", 192 * n, *kept, f"{192 // n * n} at {5e-5 * n:.1e}"))
    rows, curves = [], {}
    for name, batch, lr, steps in scaling_settings(world.size):
        distances, weights = train(batch, lr, steps, world)
        _, alone_weights = train(batch, lr, steps)
        curves[name] = [(step * batch, distance) for step, distance in enumerate(distances)]
        gap = (weights - alone_weights).norm() / alone_weights.norm()
        rows.append((name, batch // world.size, batch, f"{lr:.4f}", steps, f"{distances[0]:.2f}", f"{distances[-1]:.2g}",
                     f"{gap:.0e}"))  # fmt: skip
    columns = (
        "setting|per rank|global batch|lr|steps|distance at first|at the end|against one process of that batch and lr"
    )
    return [
        Table("--batch_size 192 --lr 5e-5 (Adam) on N processes", "N|rule 1: per rank|global|lr|rule 2: global|lr none|"
              "lr sqrt|lr linear|both, wrong: global, lr", rules),
        Table(f"SGD, least squares, {world.size} processes: |w - w*|", columns, rows),
        *alone(world, "all settings are the same one"),
        Picture("distance to the solution", "rows seen", "|w - w*|", curves),
    ]  # fmt: skip


# ---------------------------------------------------------------- ddp


def train_classifier(steps: int, world: World | None = None) -> tuple[list[float], torch.Tensor]:
    """A small network on a seeded task, SGD with momentum: → the loss of every global batch, and all weights in a row."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    parameters = list(model.parameters())
    model = DistributedDataParallel(model) if world else model
    optimizer, losses = torch.optim.SGD(parameters, lr=0.2, momentum=0.9), []
    for step in range(steps):
        x = torch.randn(60, 8, generator=torch.Generator().manual_seed(step))
        y = x[:, :3].argmax(dim=1)
        rank, size = (world.rank, world.size) if world else (0, 1)
        loss = nn.functional.cross_entropy(model(x[rank::size]), y[rank::size], reduction="sum")
        optimizer.zero_grad()
        (loss * size / len(x)).backward()  # DDP divides by N
        optimizer.step()
        loss = loss.detach()
        losses.append((world.sum(loss) if world else loss).item() / len(x))
    return losses, torch.cat([p.detach().flatten() for p in parameters])


def time_data_parallel(steps: int = 20) -> float:
    """Milliseconds of a DataParallel training step over all GPUs of this machine."""
    model = nn.DataParallel(nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda())
    x = torch.randn(4096, 1024, device="cuda")
    for step in range(steps + 3):
        if step == 3:  # the first ones warm up
            torch.cuda.synchronize()
            begin = time.perf_counter()
        model(x).square().mean().backward()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1000


def lesson_ddp(world: World) -> list:
    """DistributedDataParallel equals one process; how DataParallel differs."""
    steps = 20
    losses, weights = train_classifier(steps, world)
    alone_losses, alone_weights = train_classifier(steps)
    rows = [(step, f"{losses[step - 1]:.6f}", f"{alone_losses[step - 1]:.6f}") for step in (1, 5, 10, 20)]
    gap, spread = (weights - alone_weights).abs().max().item(), world.maximum(*weights.tolist())
    apart = (torch.tensor(spread) - weights).abs().max().item()
    model, x = nn.Linear(4, 4), torch.randn(6, 4)
    same = torch.equal(nn.DataParallel(model)(x), model(x))
    gpus = torch.cuda.device_count()
    timing = f"{time_data_parallel():.2f} ms a step on {gpus} GPUs" if gpus > 1 and world.is_main else (
        f"not timed: it needs 2 GPUs, this machine shows {gpus}")  # fmt: skip
    differ = [("processes", "one, a thread per GPU (one Python lock)", "one per GPU"),
              ("machines", "one", "one or many"),
              ("model", "copied from GPU 0 to all, every step", "copied once; equal steps keep it equal"),
              ("batch", "the whole batch, cut up on GPU 0", "each process loads its own share"),
              ("gradients", "added up on GPU 0", "averaged by all_reduce, during the backward pass"),
              ("outputs, loss", "collected on GPU 0: more memory there", "stay where they are"),
              ("batch size in the script", "global", "of one process")]  # fmt: skip
    return [
        Table(f"loss of {world.size} processes and of one, same global batch", "step|DDP|one process", rows),
        f"Weights after {steps} steps: largest difference {gap:.1e} to one process, {apart:.1e} between ranks.",
        Table("the two", "|DataParallel|DistributedDataParallel", differ),
        f"DataParallel without GPUs only calls the model (outputs equal: {same}). DataParallel here: {timing}.",
    ]


# ---------------------------------------------------------------- fp16


@dataclass
class LossScaler:
    """The dynamic loss scale (Micikevicius et al. 2018) with the defaults of torch.amp.GradScaler."""

    scale: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, overflow: bool) -> bool:
        """After a backward pass: halve after an overflow, double after many good steps. → whether the step is made."""
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.scale /= 2
        elif self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0
        return not overflow


def on_any_rank(overflow: bool) -> bool:
    """Whether any rank overflowed: a step is made by all ranks or by none."""
    found = torch.tensor(float(overflow))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def train_half(number_format: torch.dtype, scaler: LossScaler | None, steps: int = 300) -> tuple[float, float]:
    """Least squares with small targets: → error at the end over that of w = 0, and the share of gradients that were 0.

    Matrix products in `number_format`; master weights and their update in fp32, because fp16 loses an update below
    1/2048 of the weight.
    """
    x, y = synthetic(rows=64, features=16, seed=7)
    y, w, zeros = y[:, None] * 1e-3, torch.zeros(16, 1), []  # (B, 1), (D, 1)
    for _ in range(steps):
        half = w.to(number_format, copy=True).requires_grad_()
        error = (x.to(number_format) @ half).float() - y
        loss = error.square().mean() * 1e-3  # one term of several, say
        (loss * (scaler.scale if scaler else 1.0)).backward()
        zeros.append((half.grad == 0).float().mean().item())
        gradient = half.grad.float() / (scaler.scale if scaler else 1.0)
        if scaler is None or scaler.update(overflow=not gradient.isfinite().all()):
            w -= 200 * gradient
    return ((x @ w - y).square().mean() / y.square().mean()).item(), sum(zeros) / len(zeros)


def scaled_steps(world: World, together: bool, steps: int = 6) -> tuple[int, float]:
    """(steps made, last scale) when the last rank's fp16 gradient is too large once.

    Each rank holds other parameters, as in FSDP or tensor parallelism. Under DDP the averaged gradient carries one
    rank's inf to all.
    """
    scaler, made = LossScaler(scale=2.0**14), 0
    for step in range(steps):
        gradient = torch.tensor(8.0 if step == 2 and world.rank == world.size - 1 else 1.0, dtype=torch.float16)
        overflow = not (gradient * scaler.scale).isfinite()  # the largest fp16 number is 65504
        made += scaler.update(on_any_rank(overflow) if together else overflow)
    return made, scaler.scale


def lesson_fp16(world: World) -> list:
    """fp16 gradients and a loss scaler by hand.

    fp16 ends at 6e-8 below and 65504 above. The loss is multiplied before the backward pass, the gradient divided in fp32
    after it; a step whose gradient overflowed is skipped and the scale halved.
    """
    values = [1e-3, 1e-5, 1e-7, 1e-8]
    half = [torch.tensor(value).half() for value in values]
    shown = [(f"{value:.0e}", f"{h.item():.2e}", f"{(torch.tensor(value) * 2**16).half().float().item() / 2**16:.2e}")
             for value, h in zip(values, half)]  # fmt: skip
    one = torch.tensor(1.0)
    runs = {"fp32": (torch.float32, None), "fp16": (torch.float16, None), "fp16, scaled": (torch.float16, LossScaler())}
    trained = []
    for name, (number_format, scaler) in runs.items():
        error, zeros = train_half(number_format, scaler)
        trained.append((name, f"{zeros:.0%}", f"{error:.1e}", f"{scaler.scale:g}" if scaler else "-"))
    pairs = everyone((*scaled_steps(world, together=False), *scaled_steps(world, together=True)))
    return [
        Table("a gradient in fp16", "true|in fp16|scaled by 65536, and back in fp32", shown),
        f"A weight of 1 plus 1e-4: {(one.half() + 1e-4).item()} in fp16, {(one + 1e-4).item():.4f} in fp32 (master weights).",
        Table("300 steps on small targets", "format|gradients that are 0|error, w = 0 being 1|last scale", trained),
        Table("an overflow on the last rank in step 2 of 6", "rank|wrong, alone: steps made|scale|right, together: steps made|"
              "scale", [(rank, *pair) for rank, pair in enumerate(pairs)]),
        *alone(world, "no rank can part from another"),
    ]  # fmt: skip


# ---------------------------------------------------------------- shared by the lessons


def linear(features: int) -> nn.Linear:
    """x·w with w = 0."""
    model = nn.Linear(features, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def synthetic(rows: int, features: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (B, D) and y (B) = x·w*."""
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(rows, features, generator=generator), torch.randn(features, generator=generator)
    return x, x @ target


def everyone(value) -> list:
    """Every rank's picklable value, on every rank."""
    boxes = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, copy.deepcopy(value))
    return boxes


def attempt(call, seconds: float = 2) -> list[str]:
    """What `call(group)` comes to on every rank: its result or its error. A group of its own dies with it, not the run's."""
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    try:
        outcome = words(call(group))
    except (RuntimeError, ValueError) as error:
        outcome = words(error)
    dist.barrier()  # nobody leaves while another still waits
    return everyone(outcome)


def alone(world: World, consequence: str) -> list[str]:
    """What one process cannot show."""
    return [f"With one process {consequence}; start more to see the difference."] if world.size == 1 else []


def words(value) -> str:
    """One short line for a table: tensors as lists, errors without source paths and addresses."""
    if isinstance(value, Exception):
        text = re.sub(
            r"\[(enforce fail at )?/[^\]]*\] ?|<torch[^>]*>|This is typically.*|Is there a dist.*", "", str(value)
        )
        text = re.sub(r"\[[\d.:a-f]+\]:\d+", "a peer", text.splitlines()[0] if text else "")
        kind = type(value).__name__
        return f"{kind}: {text}".strip() if kind != "Exception" else text.strip()
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return " ".join(str(part.tolist()) for part in value)
    return "-" if value is None else str(value)


@dataclass
class Table:
    """A caption, column names between |, and rows."""

    caption: str
    columns: str
    rows: list[tuple]

    def cells(self) -> list[list[str]]:
        """All cells as text, the column names first."""
        return [self.columns.split("|"), *([words(cell) for cell in row] for row in self.rows)]

    def plain(self) -> str:
        """Aligned columns."""
        widths = [max(map(len, column)) for column in zip(*self.cells())]
        lines = [
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in self.cells()
        ]
        return "\n".join([self.caption + ":", *lines])

    def markdown(self) -> str:
        """A Markdown table."""
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self.cells()]
        lines.insert(1, "|" + "---|" * len(self.cells()[0]))
        return "\n".join([f"**{self.caption}**", "", *lines])


@dataclass
class Picture:
    """Curves of (x, y) points by name, y on a logarithmic scale; only in the Markdown file."""

    caption: str
    x: str
    y: str
    curves: dict[str, list[tuple[float, float]]]

    def save(self, path: Path) -> None:
        """Write a PNG."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
        for name, points in self.curves.items():
            axes.plot(*zip(*points), label=name)
        axes.set(xlabel=self.x, ylabel=self.y, yscale="log", title=self.caption)
        axes.legend()
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


# ---------------------------------------------------------------- processes


def launch(work, size: int, *arguments, port: int = 0):
    """Start `work(*arguments)` in `size` processes with the variables that torchrun would set; → their handle and the store.

    The store (a small server of names and addresses) lives here, as torchrun's lives in its agent. Keep it until all are done.
    """
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}; give another port, or leave the flag out") from None
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    variables = dict(WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE=True)
    return mp.start_processes(
        run_rank, (variables, work, arguments), size, join=False, start_method="spawn"
    ), store  # fmt: skip


def run_rank(rank: int, variables: dict, work, arguments: tuple) -> None:
    """A process of `launch`."""
    os.environ.update({name: str(value) for name, value in dict(variables, RANK=rank, LOCAL_RANK=rank).items()})
    work(*arguments)


def teach(config: Config) -> None:
    """All lessons on this rank; rank 0 prints and writes them."""
    torch.set_num_threads(1)
    world = start("cpu")
    if world.size == 1:  # engine's World needs no group then; the calls below do
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    chapters = [
        f"# Collectives on {world.size} process{'es' * (world.size > 1)} (gloo, CPU), torch {torch.__version__}"
    ]
    out = Path(config.out)
    world.on_main(lambda: make_folder(out))
    for name in LESSONS if config.lesson == "all" else [config.lesson]:
        lesson = globals()[f"lesson_{name}"]
        blocks = lesson(world)
        title, _, text = inspect.getdoc(lesson).partition("\n\n")
        if world.is_main:
            plain = [
                block.plain() if isinstance(block, Table) else block
                for block in blocks
                if not isinstance(block, Picture)
            ]
            print("\n\n".join([f"=== {name}: {title}", *([text] if text else []), *plain]), end="\n\n\n", flush=True)
            chapters.append(markdown(name, title, text, blocks, out))
    if world.is_main:
        out.write_text("\n\n".join(chapters) + "\n", encoding="utf-8")
        print(f"written to {out}")
    dist.destroy_process_group()


def make_folder(out: Path) -> None:
    """The place for the report, before the work."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; choose another file") from None


def markdown(name: str, title: str, text: str, blocks: list, out: Path) -> str:
    """A lesson as a chapter; its picture goes beside the file."""
    parts = [f"## {name}: {title}", text]
    for block in blocks:
        if isinstance(block, Picture):
            path = out.with_name(f"{out.stem}-{name}.png")
            block.save(path)
            parts.append(f"![{block.caption}]({path.name})")
        else:
            parts.append(block.markdown() if isinstance(block, Table) else block)
    return "\n\n".join(part for part in parts if part)


def teach_rank(config: Config) -> None:
    """`teach` with our way to end on a mistake."""
    run_script(lambda: teach(config))


def main(config: Config) -> None:
    """On torchrun's processes, or on processes of our own."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        if config.given & {"processes", "port"}:
            raise UserError(
                "--processes and --port are torchrun's affair here; give it --nproc_per_node and --master_port"
            )
        return teach(config)
    context, _store = launch(teach_rank, config.processes, config, port=config.port)
    try:
        while not context.join():
            pass
    except mp.ProcessExitedException as error:  # it has said why
        sys.stdout.flush()
        os._exit(error.exit_code if error.exit_code > 0 else 1)
    except mp.ProcessRaisedException as error:
        stop(str(error), code=1)


if __name__ == "__main__":
    run_script(lambda: main(config))
