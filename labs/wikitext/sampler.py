"""Which segments of the training text an epoch visits: each once, or the hard ones more often."""

import torch
from torch import Tensor

from engine.distributed import World
from engine.schedule import DECAY_SHARE
from labs.wikitext.model import send


class SegmentSampler:
    """M segments of `segment` consecutive tokens (the last may be shorter); every epoch visits M of them.

    static: each segment once. dynamic: segment i is drawn with probability

        p_i = (1 − w) / M + w · exp(β ℓ_i) / Σ_j exp(β ℓ_j)
        w = 0 in the first epoch, else max(0, 1 − e / (0.7 · E))

    ℓ_i: the mean unsmoothed loss of its tokens, in nats, over its visits since the last draw (none: as it was; before any:
    the mean of the others);
    β: `sharpness`; e: epochs done; E: epochs in all. With β = 1 a segment's extra share is proportional to its perplexity.
    w falls from nearly 1 to 0 where the learning rate begins to fall: draws in the last 30 % of the epochs are static again.
    One draw serves `resample_every` epochs, in another order each; e is the first of them.

    A draw takes M segments by systematic resampling: i comes ⌊M p_i⌋ or ⌈M p_i⌉ times and M p_i times in expectation,
    so at w = 0 each comes exactly once. It is a function of (losses, seed, epoch), the same on all ranks.
    """

    def __init__(
        self,
        tokens: int,
        segment: int,
        sampling: str,
        sharpness: float,
        epochs: int,
        seed: int,
        device="cpu",
        resample_every: int = 1,
    ):
        self.starts = torch.arange(0, tokens, segment)  # (M,)
        self.lengths = (tokens - self.starts).clamp_max(segment)  # (M,)
        self.sampling, self.sharpness, self.epochs, self.seed = sampling, sharpness, epochs, seed
        self.resample_every = resample_every
        count = len(self.starts)
        self.losses = torch.full(
            (count,), float("nan"), dtype=torch.float64
        )  # ℓ; nan: never visited
        # Nats of the visits since the last draw, on this rank; on the GPU, because nobody asks before the next.
        self.sums = torch.zeros(count, dtype=torch.float64, device=device)
        self.visits = torch.zeros(count, dtype=torch.float64)

    def spans(self, segments: Tensor) -> list[tuple[int, int, int]]:
        """(B,) → for each the first token, the first whose loss counts (the same), and the end."""
        firsts, ends = (
            self.starts[segments].tolist(),
            (self.starts + self.lengths)[segments].tolist(),
        )
        return list(zip(firsts, firsts, ends))

    def draw_of(self, epoch: int) -> int:
        """The epoch (from 0) before which the segments of `epoch` were drawn."""
        return epoch - epoch % self.resample_every

    def weight(self, epoch: int) -> float:
        """w in epoch `epoch` (from 0)."""
        epoch = self.draw_of(epoch)
        if self.sampling == "static" or epoch == 0:
            return 0.0
        return max(0.0, 1 - epoch / ((1 - DECAY_SHARE) * self.epochs))

    def probabilities(self, epoch: int) -> Tensor:
        """p, (M,)"""
        uniform = torch.full_like(self.losses, 1 / len(self.losses))
        weight = self.weight(epoch)
        if weight == 0 or self.losses.isnan().all():
            return uniform
        losses = self.losses.nan_to_num(self.losses.nanmean().item())
        return (1 - weight) * uniform + weight * (self.sharpness * losses).softmax(0)

    def plan(self, epoch: int) -> Tensor:
        """The segments of this epoch in order, (M,)"""
        generator, segments = self.generator(self.draw_of(epoch)), torch.arange(len(self.losses))
        if self.weight(epoch) > 0:
            segments = systematic(
                self.probabilities(epoch), torch.rand((), generator=generator, dtype=torch.float64)
            )
        if epoch != self.draw_of(epoch):  # the same draw once more, in an order of its own
            generator = self.generator(epoch)
        return segments[torch.randperm(len(segments), generator=generator)]

    def generator(self, epoch: int) -> torch.Generator:
        """Random numbers of an epoch, the same in every process and after a resume."""
        # Not seed << 32 | epoch: the CPU's generator looks at 32 bits only. So seeds lie a million epochs apart.
        return torch.Generator().manual_seed((1_000_003 * self.seed + epoch) % 2**32)

    def record(self, segments: Tensor, sums: Tensor) -> None:
        """These segments (B,) were visited by this rank, and their tokens' losses add up to `sums` (B,)."""
        self.sums.index_add_(0, send(segments, self.sums.device), sums.double())
        self.visits.index_add_(0, segments, torch.ones(len(segments), dtype=torch.float64))

    def end_epoch(self, world: World, epoch: int = 0) -> None:
        """Before a draw the losses of all visits since the last one, on all ranks, become the recent ones."""
        if self.draw_of(epoch + 1) <= epoch:
            return
        sums, visits = self._over_ranks(world)
        self.losses = torch.where(visits > 0, sums / (visits * self.lengths), self.losses)
        self.sums.zero_()
        self.visits.zero_()

    def figures(self, epoch: int) -> dict[str, float]:
        """How far from uniform the next draw is: entropy in nats (uniform: ln M) and effective sample size (uniform: M)."""
        p = self.probabilities(epoch)
        return {
            "sampler/entropy": torch.special.entr(p).sum().item(),
            "sampler/effective_sample_size": 1 / p.square().sum().item(),
            "sampler/weight": self.weight(epoch),
        }

    def state_dict(self, world: World) -> dict:
        """As JSON; to be called by all ranks."""
        sums, visits = self._over_ranks(world)
        losses = [
            None if loss != loss else loss for loss in self.losses.tolist()
        ]  # JSON knows no nan
        return {"losses": losses, "sums": sums.tolist(), "visits": visits.tolist()}

    def load_state_dict(self, state: dict, world: World) -> None:
        """The sums of all ranks go to rank 0, for they are added up again."""
        losses = [float("nan") if loss is None else loss for loss in state["losses"]]
        self.losses = torch.tensor(losses, dtype=torch.float64)
        self.sums.copy_(torch.tensor(state["sums"], dtype=torch.float64) * world.is_main)
        self.visits = torch.tensor(state["visits"], dtype=torch.float64) * world.is_main

    def _over_ranks(self, world: World) -> tuple[Tensor, Tensor]:
        both = torch.stack([self.sums.cpu(), self.visits])
        if world.size > 1:
            both = world.sum(both.to(world.device)).cpu()
        return both[0], both[1]


def systematic(p: Tensor, shift: Tensor) -> Tensor:
    """M draws from p (M,) at the points shift, shift + 1, … of M times its distribution function; shift in [0, 1)."""
    points = torch.arange(len(p), dtype=torch.float64) + shift
    edges = (p / p.sum()).cumsum(0) * len(p)
    # i where edges[i − 1] ≤ point < edges[i]; clamped, for rounding may leave the last edge below the last point.
    return torch.searchsorted(edges, points, right=True).clamp_max(len(p) - 1)
