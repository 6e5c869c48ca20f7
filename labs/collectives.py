"""Collectives by hand: seven small lessons, each a right way beside the wrong one, on several processes of this machine.

python -m labs.collectives                              # starts 3 processes itself (gloo, CPU); half a minute
python -m labs.collectives --lesson mean --processes 4  # one lesson, on so many processes
torchrun --nproc_per_node 2 -m labs.collectives         # the same on torchrun's processes

gather      the tensors of all ranks on one rank: ranks, devices, sub-groups
all_gather  … on every rank: unequal lengths, and what becomes of gradients
mean        one loss and one accuracy instead of one for each process; the right gradient
sampler     which rows DistributedSampler repeats or drops, and what that does to a score
scaling     batch size and learning rate on N processes: two right rules that are wrong together
ddp         DistributedDataParallel equals one process; how DataParallel differs
fp16        gradients that underflow, a loss scaler by hand, an overflow on one rank only

The tables are printed and, with a picture of `scaling`, written as Markdown. The last three lessons stand in
collectives_training.py.
"""

from dataclasses import dataclass

from engine.config import flag, nearest, parse_flags
from engine.errors import UserError, run_script

NAMES = ("gather", "all_gather", "mean", "sampler", "scaling", "ddp", "fp16")


@dataclass
class Config:
    """Which lesson, on how many processes."""

    lesson: str = flag("all", f"all, or one of {', '.join(NAMES)}", "Collectives")
    processes: int = flag(3, "processes to start; under torchrun: as many as torchrun has", "Collectives")
    port: int = flag(0, "TCP port where the processes meet; 0: a free one", "Collectives")
    out: str = flag("", "Markdown file; runs/collectives/LESSON.md", "Collectives")

    def __post_init__(self):
        if self.lesson not in (*NAMES, "all"):
            raise UserError(
                f"--lesson {self.lesson}: choose all or one of {', '.join(NAMES)}{nearest(self.lesson, [*NAMES])}"
            )
        if not 1 <= self.processes <= 64:
            raise UserError(f"--processes {self.processes} must be in 1 to 64")
        if not 0 <= self.port < 65536:
            raise UserError(f"--port {self.port} must be in 0 to 65535")


if __name__ == "__main__":
    config = parse_flags(Config, "collectives by hand, right and wrong")

import inspect
import os
import re
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from engine.distributed import World
from labs.collectives_report import (
    Table,
    attempt,
    everyone,
    join_world,
    launch,
    make_writable,
    markdown,
    plain,
    words,
)
from labs.collectives_training import lesson_ddp, lesson_fp16, lesson_scaling, linear, one_process, synthetic

# N ranks, L elements of one rank, B rows, D features.

# ---------------------------------------------------------------- gather


def rank_of(device: int, devices: list[int]) -> int:
    """The rank that drives GPU `device`, where rank r drives devices[r]. Collectives count in ranks, CUDA in devices."""
    return devices.index(device)


def gather_to(device: int, x: torch.Tensor, devices: list[int]) -> list[torch.Tensor] | None:
    """Every rank's `x` on the rank that drives `device`; None on the others, which may not give a list to gather in."""
    dst = rank_of(device, devices)
    received = [torch.empty_like(x) for _ in devices] if dist.get_rank() == dst else None
    dist.gather(x, received, dst=dst)
    return received


def gather_to_device_number(device: int, x: torch.Tensor, devices: list[int], group) -> list[torch.Tensor] | None:
    """Wrong: the device's number taken for a rank."""
    received = [torch.empty_like(x) for _ in devices] if devices[dist.get_rank()] == device else None
    dist.gather(x, received, dst=device, group=group)
    return received


def gather_with_lists_on(ranks: list[int], x: torch.Tensor, group=None) -> list[torch.Tensor] | None:
    """To rank 0, with a list to gather in on `ranks`: right only if these are [0]."""
    received = [torch.empty_like(x) for _ in range(dist.get_world_size())] if dist.get_rank() in ranks else None
    dist.gather(x, received, dst=0, group=group)
    return received


def gather_in_subgroup(x: torch.Tensor, members: list[int], group, **destination) -> list[torch.Tensor] | str | None:
    """`destination`: dst=<rank among all> or group_dst=<rank within the group>; members[0] expects the tensors."""
    if dist.get_rank() not in members:
        return "not in the group"
    received = [torch.empty_like(x) for _ in members] if dist.get_rank() == members[0] else None
    dist.gather(x, received, group=group, **destination)
    return received


def lesson_gather(world: World) -> list:
    """Every rank's tensor on one rank.

    `dst` is a rank, not a GPU's number: with --gpu_devices 1 2, GPU 1 belongs to rank 0. Only the destination gives a list
    to gather in. The wrong calls below run in groups of their own that give up after 2 seconds. By default gloo gives up
    after half an hour.
    """
    devices = list(range(1, world.size + 1))  # as in the handout: GPU 0 is left to somebody else
    x = torch.arange(2) + 1 + 2 * devices[world.rank]
    right = everyone((world.rank, devices[world.rank], x, gather_to(1, x, devices)))
    wrong = {"dst=1, the device's number": lambda group: gather_to_device_number(1, x, devices, group),
             "gather_list on every rank": lambda group: gather_with_lists_on([*range(world.size)], x, group),
             "gather_list on no rank": lambda group: gather_with_lists_on([], x, group)}  # fmt: skip
    outcomes = [(name, rank, text) for name, call in wrong.items() for rank, text in enumerate(attempt(call))]
    blocks = [Table(f"right: gather to GPU 1, which is rank {rank_of(1, devices)}", "rank|GPU|sent|received", right),
              Table("wrong, with the same tensors", "call|rank|what happens", outcomes)]  # fmt: skip
    if world.size < 3:
        return [*blocks, "A sub-group in which ranks count differently takes 3 processes to show."]
    members = list(range(1, world.size))
    group = dist.new_group(members)  # every rank makes this call, members or not
    calls = {"dst=1, rank among all": everyone(gather_in_subgroup(x, members, group, dst=1)),
             "group_dst=0, rank in the group": everyone(gather_in_subgroup(x, members, group, group_dst=0)),
             "wrong: dst=0": attempt(lambda _: gather_in_subgroup(x, members, group, dst=0))}  # fmt: skip
    rows = [(name, rank, members.index(rank) if rank in members else None, outcome)
            for name, outcomes in calls.items() for rank, outcome in enumerate(outcomes)]  # fmt: skip
    return [*blocks, Table(f"sub-group of ranks {members}", "call|rank|rank in the group|what happens", rows)]


# ---------------------------------------------------------------- all_gather


def all_gather_equal(x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's `x` on every rank, if all have the shape of this rank's."""
    received = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(received, x)
    return received


def all_gather_uneven(x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's `x` (L, …) on every rank, L different: gather the lengths, pad to the longest, gather, cut."""
    lengths = torch.cat(all_gather_equal(torch.tensor([len(x)]))).tolist()
    padded = x.new_zeros(max(lengths), *x.shape[1:])
    padded[: len(x)] = x
    return [part[:length] for part, length in zip(all_gather_equal(padded), lengths)]


def all_gather_true_shapes(x: torch.Tensor, lengths: list[int], group) -> list[torch.Tensor]:
    """Wrong on gloo: a list of the true shapes, which PyTorch's documentation allows."""
    received = [x.new_empty(length) for length in lengths]
    dist.all_gather(received, x, group=group)
    return received


def with_gradient(x: torch.Tensor, world: World, how: str) -> torch.Tensor:
    """All ranks' `x` in a row, gathered with more or less of a gradient."""
    if how == "torch.distributed.nn.functional.all_gather":
        from torch.distributed.nn.functional import all_gather

        with warnings.catch_warnings():  # 2.13 announces a successor, which older releases do not have
            warnings.simplefilter("ignore", FutureWarning)
            return torch.cat(list(all_gather(x)))
    received = all_gather_equal(x.detach())
    if how == "all_gather, own tensor put back":
        received[world.rank] = x
    return torch.cat(received)


def gradient_of_gathered(world: World, how: str) -> float | None:
    """x.grad on this rank if rank r's loss is (r + 1) · Σ of all x. The sum of all losses has the gradient Σ (r + 1)."""
    x = torch.ones(1, requires_grad=True)
    loss = (world.rank + 1) * with_gradient(x, world, how).sum()
    if loss.requires_grad:
        loss.backward()
    return None if x.grad is None else x.grad.item()


def victim(lengths: list[int], folder: str) -> None:
    """A process that gathers unequal lengths as if they were equal, and may die of it. Its last words go to `folder`."""
    rank = int(os.environ["RANK"])
    os.dup2(os.open(f"{folder}/{rank}.err", os.O_WRONLY | os.O_CREAT), 2)  # what gloo says before it ends the process
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    try:
        outcome = words(all_gather_equal(torch.full((lengths[rank],), rank + 1)))
    except RuntimeError as error:
        outcome = words(error)
    Path(folder, f"{rank}.out").write_text(outcome, encoding="utf-8")
    os._exit(0)


def fates(lengths: list[int]) -> list[str]:
    """What becomes of each `victim`. In processes of their own, because gloo's abort() cannot be caught."""
    with tempfile.TemporaryDirectory() as folder:
        context, _store = launch(victim, len(lengths), lengths, folder)
        for process in context.processes:
            process.join(60)
            process.kill()
        found = []
        for rank, process in enumerate(context.processes):
            out, err = Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")
            last = re.search(r"what\(\): +(?:\[.*?\] )?(.*)", err.read_text(encoding="utf-8") if err.exists() else "")
            death = f"killed by signal {-(process.exitcode or 0)}: {last[1].split(' Is there')[0] if last else ''}"
            found.append(out.read_text(encoding="utf-8") if out.exists() else death)
        return found


def lesson_all_gather(world: World) -> list:
    """Every rank's tensor on every rank.

    Here rank r has N - r elements of value r + 1. No call compares the shapes of different ranks: gloo ends the process,
    breaks the connection, or returns numbers that nobody sent. Gradients do not pass through all_gather at all.
    """
    x = torch.full((world.size - world.rank,), world.rank + 1)
    lengths = list(range(world.size, 0, -1))
    calls = {"wrong: all_gather into N tensors like one's own": world.on_main(lambda: fates(lengths)),
             "wrong: all_gather into the true shapes": attempt(lambda g: all_gather_true_shapes(x, lengths, g)),
             "wrong: gather into N tensors like rank 0's": attempt(lambda g: gather_with_lists_on([0], x, g)),
             "right: lengths, pad, all_gather, cut": everyone(all_gather_uneven(x)),
             "right, but pickled: all_gather_object": everyone(everyone(x))}  # fmt: skip
    rows = [(name, rank, text) for name, texts in calls.items() for rank, text in enumerate(texts)]
    ways = ("all_gather", "all_gather, own tensor put back", "torch.distributed.nn.functional.all_gather")
    gradients = [(how, *everyone(gradient_of_gathered(world, how))) for how in ways]
    right, ranks = sum(range(1, world.size + 1)), "|".join(f"rank {rank}" for rank in range(world.size))
    return [Table("unequal lengths", "call|rank|what happens", rows),
            *one_process(world, "all lengths are equal and every call is right"),
            Table(f"x.grad, rank r's loss being (r + 1) · Σ of all x; right: {right}", f"call|{ranks}", gradients)]  # fmt: skip


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
    for name, batch in (("handout", [*shares, (18, 32)]), ("a short last share", [*shares, (4, 4)])):
        right, wrong = sum(r for r, _ in batch) / sum(n for _, n in batch), sum(r / n for r, n in batch) / 4
        paper.append((name, " ".join(f"{r}/{n}" for r, n in batch), f"{right:.4f}", f"{wrong:.4f}"))
    x, y, mine = uneven_share(world.rank, world.size)
    total, rows = (y[mine] ** 2).sum().item(), len(y[mine])  # the squared errors of w = 0
    here = everyone((world.rank, rows, f"{total / rows:.4f}"))
    printed = [("sum / sum", f"{global_mean(total, rows):.4f}"), ("wrong: mean of means", f"{mean_of_means(total, rows):.4f}"),
               ("one process with all rows", f"{(y**2).mean():.4f}")]  # fmt: skip
    reference, gradients = single_gradient(x, y), []
    for how in ("own mean", "mean of means", "own sum · N / rows of all"):
        gradient = ddp_gradient(x[mine], y[mine], how)
        error = f"{(gradient - reference).norm() / reference.norm():.0e}"
        gradients.append((how, f"{gradient.norm():.4f}", f"{reference.norm():.4f}", error))
    return [
        Table("accuracy of 4 ranks, on paper", "batch|right/rows of each rank|sum / sum|mean of means", paper),
        Table(f"here: N = {world.size}, unequal shares", "rank|rows|own loss", here),
        Table("and what rank 0 prints", "way|loss", printed),
        Table("gradient under DDP", "loss of each rank|norm|norm on one process|relative error", gradients),
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
    ways = {"DistributedSampler": sampled_rows,
            "… with drop_last=True": lambda rows, rank, size: sampled_rows(rows, rank, size, drop_last=True),
            "range(rank, rows, N)": strided_rows}  # fmt: skip
    splits = [(name, *(way(10, rank, 3) for rank in range(3))) for name, way in ways.items()]
    rows = 3 * world.size + 1  # one more than can be shared equally
    right = [row > 0 for row in range(rows)]
    scores = [("one process", rows, f"{sum(right) / rows:.4f}")]
    for name, way in ways.items():
        accuracy, counted = accuracy_over(way(rows, world.rank, world.size), right)
        scores.append((name, counted, f"{accuracy:.4f}"))
    orders = [(f"{'with' if told else 'without'} set_epoch(epoch)", *epoch_orders(3, told)) for told in (True, False)]
    return [
        Table("10 rows over 3 ranks", "way|rank 0|rank 1|rank 2", splits),
        Table(f"accuracy with N = {world.size} and {rows} rows, only row 0 being wrong", "way|rows|accuracy", scores),
        *one_process(world, "nothing is repeated or dropped"),
        Table("8 rows, shuffled: rank 0 of 2", "loop|epoch 0|epoch 1|epoch 2", orders),
    ]


# ---------------------------------------------------------------- the script

LESSONS = dict(zip(NAMES, (lesson_gather, lesson_all_gather, lesson_mean, lesson_sampler, lesson_scaling, lesson_ddp,
                           lesson_fp16)))  # fmt: skip


def teach(config: Config, out: Path) -> None:
    """The lessons, on this rank; rank 0 prints and writes them."""
    world = join_world()
    chapters = [f"# Collectives: {world.size} process(es), gloo, CPU, torch {torch.__version__}"]
    for name in NAMES if config.lesson == "all" else [config.lesson]:
        blocks = LESSONS[name](world)
        title, _, text = inspect.getdoc(LESSONS[name]).partition("\n\n")
        if world.is_main:
            print("\n\n".join([f"=== {name}: {title}", *([text] if text else []), plain(blocks)]), "\n\n", flush=True)
            chapters.append(
                f"## {name}: {title}\n\n{text}\n\n{markdown(blocks, out.with_name(f'{out.stem}-{name}.png'))}"
            )
    if world.is_main:
        out.write_text("\n\n".join(chapters) + "\n", encoding="utf-8")
        print(f"written as Markdown: {out}")
    dist.destroy_process_group()


def teach_rank(config: Config, out: Path) -> None:
    """`teach` in a process that `main` started."""
    run_script(lambda: teach(config, out))


def main(config: Config) -> None:
    """On torchrun's processes, or on processes started here."""
    out = Path(config.out or f"runs/collectives/{config.lesson}.md")
    make_writable(out)
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        if config.given & {"processes", "port"}:
            raise UserError("--processes and --port are torchrun's here; give it --nproc_per_node and --master_port")
        return teach(config, out)
    context, _store = launch(teach_rank, config.processes, config, out, port=config.port)
    try:
        while not context.join():
            pass
    except mp.ProcessExitedException as error:  # that process has said why
        os._exit(error.exit_code if error.exit_code > 0 else 1)


if __name__ == "__main__":
    run_script(lambda: main(config))
