"""A lesson: reduce-scatter, all-reduce and broadcast, made of send and receive alone.

N ranks in a ring: rank r sends to rank r + 1 and receives from rank r − 1, the last one sends to 0.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from labs.collectives.common import all_gather_object, print_table, print_text

PIECES = 8  # of a broadcast: while a rank passes one on, the next arrives
NUMBERS = 2**19  # of the tensor that is timed, in fp32: 2 MiB
LINK = 12.5e6  # bytes per second, 100 Mbit/s: so slow that copies in memory hardly count
TURNS = 3  # the fastest counts, because other programs can only slow a turn down


class Ring:
    """The first `size` ranks. `sent` counts the numbers that this rank sends.

    With a `link` in bytes per second, messages wait as they would if a cable of that speed led into
    and out of each rank.
    """

    def __init__(self, size: int, link: float = 0.0):
        self.size = size
        self.link = link
        self.rank = dist.get_rank()
        self.sent = 0
        self.received_at = time.perf_counter()  # when the last message was complete

    def exchange(
        self,
        outgoing: torch.Tensor | None = None,
        to: int = 0,
        incoming: torch.Tensor | None = None,
        source: int = 0,
    ) -> None:
        """Send one tensor and receive another at the same time; either may be left out.

        If all ranks waited until their message has arrived before they receive, none would ever
        receive: a deadlock. Hence `isend`, which returns at once.
        """
        sending = None
        if outgoing is not None:
            time.sleep(self.seconds(outgoing))
            sending = dist.isend(outgoing, to % self.size)
            self.sent += outgoing.numel()
        if incoming is not None:
            dist.recv(incoming, source % self.size)
            # Messages of several ranks come in one after the other.
            complete = self.received_at + self.seconds(incoming)
            time.sleep(max(0.0, complete - time.perf_counter()))
            self.received_at = time.perf_counter()
        if sending is not None:
            sending.wait()

    def seconds(self, x: torch.Tensor) -> float:
        """How long x is on the cable."""
        return x.nbytes / self.link if self.link else 0.0

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """x (L) of each rank → the sum of all ranks' chunk number `rank`. Overwrites x.

        x is cut into N chunks. In each of N − 1 steps a rank passes on the partial sum that it
        received last, with its own chunk added: (N − 1)/N of x in all.
        """
        chunks = x.tensor_split(self.size)  # views of x
        for step in range(self.size - 1):
            outgoing = chunks[(self.rank - step - 1) % self.size]
            partial_sum = chunks[(self.rank - step - 2) % self.size]
            received = torch.empty_like(partial_sum)
            self.exchange(outgoing, self.rank + 1, received, self.rank - 1)
            partial_sum += received
        return chunks[self.rank]

    def all_gather(self, x: torch.Tensor) -> None:
        """Chunk r of x (L) is complete on rank r → all chunks on all ranks, in place."""
        chunks = x.tensor_split(self.size)
        for step in range(self.size - 1):
            outgoing = chunks[(self.rank - step) % self.size]
            incoming = chunks[(self.rank - step - 1) % self.size]
            self.exchange(outgoing, self.rank + 1, incoming, self.rank - 1)

    def all_reduce(self, x: torch.Tensor) -> None:
        """x (L) ← the sum of all ranks' x, in place. Each rank sends 2(N − 1)/N of x."""
        self.reduce_scatter(x)
        self.all_gather(x)

    def all_reduce_at_rank_0(self, x: torch.Tensor) -> None:
        """The same by way of rank 0, which receives N − 1 times x, adds, and sends as much."""
        if self.rank > 0:
            self.exchange(outgoing=x, to=0)
            self.exchange(incoming=x, source=0)
            return
        received = torch.empty_like(x)
        for other in range(1, self.size):
            self.exchange(incoming=received, source=other)
            x += received
        for other in range(1, self.size):
            self.exchange(outgoing=x, to=other)

    def broadcast(self, x: torch.Tensor) -> None:
        """x (L) ← rank 0's x, in place. A rank passes on a piece while it receives the next."""
        pieces = [None, *x.tensor_split(PIECES), None]
        for passed_on, next_piece in zip(pieces, pieces[1:]):
            outgoing = passed_on if self.rank < self.size - 1 else None
            incoming = next_piece if self.rank > 0 else None
            self.exchange(outgoing, self.rank + 1, incoming, self.rank - 1)

    def send(self, x: torch.Tensor) -> None:
        """Rank 0 sends x to rank 1: the unit of the times."""
        if self.rank == 0:
            self.exchange(outgoing=x, to=1)
        elif self.rank == 1:
            self.exchange(incoming=x, source=0)


# Name -> method, what the busiest rank sends in units of x, and the time in units of one `send`.
WAYS: dict[str, tuple[Callable, Callable, Callable]] = {
    "send": (Ring.send, lambda n: 1, lambda n: 1),
    "reduce-scatter": (Ring.reduce_scatter, lambda n: (n - 1) / n, lambda n: (n - 1) / n),
    "all-reduce": (Ring.all_reduce, lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1) / n),
    "all-reduce at rank 0": (
        Ring.all_reduce_at_rank_0,
        lambda n: n - 1,
        lambda n: 2 * (n - 1),
    ),
    "broadcast": (Ring.broadcast, lambda n: 1, lambda n: (PIECES + n - 2) / PIECES),
}


def measure(way: Callable, size: int, link: float) -> tuple[float, float]:
    """(what the busiest rank sends in units of x, seconds until the last rank has ended)."""
    seconds = []
    for _ in range(TURNS):
        ring = Ring(size, link)
        x = torch.ones(NUMBERS)
        dist.barrier()
        start = ring.received_at = time.perf_counter()
        if ring.rank < size:
            way(ring, x)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return max(all_gather_object(ring.sent)) / NUMBERS, min(seconds)


def lesson_ring() -> None:
    """ring: all-reduce, reduce-scatter and broadcast from send and receive.

    Predict: each of N ranks has a gradient of 2 MiB. How many MiB does a rank send in an
    all-reduce if the ranks stand in a ring, and how many does rank 0 send if all others send it
    theirs and it sends back the sum?
    """
    mebibytes = 4 * NUMBERS / 2**20
    rows = []
    for size in range(2, dist.get_world_size() + 1):
        for name, (way, share, factor) in WAYS.items():
            sent, by_cable = measure(way, size, LINK)
            _, by_memory = measure(way, size, link=0.0)
            if name == "send":
                unit = by_cable
            shares = (f"{mebibytes * sent:.1f}", f"{sent:.3f}", f"{share(size):.3f}")
            times = (f"{1e3 * by_cable:.0f}", f"{by_cable / unit:.2f}", f"{factor(size):.2f}")
            rows.append((name, size, *shares, *times, f"{1e3 * by_memory:.0f}"))
    columns = "way|N|MiB sent|sent / x|in theory|ms by cable|cable / send|in theory|ms by memory"
    print_table(f"x of {mebibytes:g} MiB, the fastest of {TURNS} turns", columns, rows)
    print_text(
        "MiB sent: by the rank that sends most; counted. 2(N - 1)/N stays below 2 for any number\n"
        "of ranks; by way of rank 0 it grows with N. by cable: every message waits as if a cable\n"
        f"of {LINK / 12.5e4:.0f} Mbit/s led to each rank; in theory nothing else takes time.\n"
        "by memory: without waiting; the ranks share the cores of one machine."
    )

    x = torch.randn(1001, generator=torch.Generator().manual_seed(dist.get_rank()))
    expected = x.clone()
    dist.all_reduce(expected)
    Ring(dist.get_world_size()).all_reduce(x)
    error = (x - expected).abs().max() / expected.abs().max()
    print_text(
        "The ring's all-reduce of 1001 random numbers per rank differs from dist.all_reduce by\n"
        f"{error:.0e} of the largest."
    )
