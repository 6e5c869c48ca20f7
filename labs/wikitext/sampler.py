"""Segments of a text as tensors, and which of them an epoch of training visits."""

import torch
from torch import Tensor

from engine.distributed import World
from engine.schedule import DECAY_SHARE
from engine.seeds import epoch_generator
from labs.wikitext.model import send


class SegmentSampler:
    """M segments of consecutive tokens (the last may be shorter); every epoch visits M of them.

    static: each segment once. dynamic: segment i is drawn with probability

        p_i = (1 − w) / M + w · exp(ℓ_i) / Σ_j exp(ℓ_j)
        w = 0 in the first draw (e = 0), later max(0, 1 − e / (0.7 · E))

    ℓ_i: mean plain loss of its tokens, in nats, over its visits since the last draw; a segment
    without a visit keeps its ℓ. e: epochs done when the draw is made; E: epochs in all. So a
    segment's extra share is proportional to its perplexity. w falls from nearly 1 to 0 where the
    learning rate begins to fall: draws in the last 30 % of the epochs are static again. One draw
    serves `resample_every` epochs, each in another order.

    A draw takes M segments by systematic resampling: i comes ⌊M p_i⌋ or ⌈M p_i⌉ times and M p_i
    times in expectation, so at w = 0 each comes exactly once. It is a function of (losses, seed,
    epoch), the same on all ranks.
    """

    def __init__(self, token_count: int, config, device: torch.device):
        """`config`: segment, sampling, resample_every, epochs, seed."""
        self.starts = torch.arange(0, token_count, config.segment)  # (M,)
        self.lengths = (token_count - self.starts).clamp_max(config.segment)  # (M,)
        self.config = config
        count = len(self.starts)
        # ℓ. The first draw, with w = 0, visits every segment: then each has a loss.
        self.losses = torch.zeros(count, dtype=torch.float64)
        # Nats and visits since the last draw, of this rank. The nats stay on the GPU until then.
        self.sums = torch.zeros(count, dtype=torch.float64, device=device)
        self.visits = torch.zeros(count, dtype=torch.float64)

    def spans(self, segments: Tensor) -> list[tuple[int, int]]:
        """(B,) → the first token and the end of each segment."""
        firsts = self.starts[segments]
        return list(zip(firsts.tolist(), (firsts + self.lengths[segments]).tolist()))

    def draw_of(self, epoch: int) -> int:
        """The epoch (from 0) before which the segments of `epoch` were drawn."""
        return epoch - epoch % self.config.resample_every

    def weight(self, epoch: int) -> float:
        """w in epoch `epoch` (from 0)."""
        drawn = self.draw_of(epoch)
        if self.config.sampling == "static" or drawn == 0:
            return 0.0
        return max(0.0, 1 - drawn / ((1 - DECAY_SHARE) * self.config.epochs))

    def probabilities(self, epoch: int) -> Tensor:
        """p, (M,)."""
        weight, uniform = self.weight(epoch), 1 / len(self.losses)
        return (1 - weight) * uniform + weight * self.losses.softmax(0)

    def plan(self, epoch: int) -> Tensor:
        """The segments of this epoch in order, (M,)."""
        drawn = self.draw_of(epoch)
        generator = epoch_generator(self.config.seed, drawn)
        segments = torch.arange(len(self.losses))
        if self.weight(epoch) > 0:
            shift = torch.rand((), generator=generator, dtype=torch.float64)
            segments = systematic(self.probabilities(epoch), shift)
        if epoch != drawn:
            # The same draw in another order.
            generator = epoch_generator(self.config.seed, epoch)
        return segments[torch.randperm(len(segments), generator=generator)]

    def record(self, segments: Tensor, losses: Tensor, counted: Tensor) -> None:
        """This rank visited these segments, (B,); `losses` (N,) are of the tokens `counted`."""
        rows = counted.nonzero()[:, 0]  # (N,) the row of each loss
        self.sums.index_add_(0, send(segments[rows], self.sums.device), losses.double())
        self.visits.index_add_(0, segments, torch.ones(len(segments), dtype=torch.float64))

    def end_epoch(self, world: World, epoch: int) -> None:
        """Before the next draw, ℓ becomes the mean of all visits on all ranks since the last."""
        if self.draw_of(epoch + 1) <= epoch:
            return
        sums, visits = self.over_ranks(world)
        self.losses = torch.where(visits > 0, sums / (visits * self.lengths), self.losses)
        self.sums.zero_()
        self.visits.zero_()

    def figures(self, epoch: int) -> dict[str, float]:
        """How uniform a draw is: its weight w, and its effective sample size (at most M)."""
        p = self.probabilities(epoch)
        return {
            "sampler/effective_sample_size": 1 / p.square().sum().item(),
            "sampler/weight": self.weight(epoch),
        }

    def state_dict(self, world: World) -> dict:
        """As JSON. All ranks call it."""
        sums, visits = self.over_ranks(world)
        return {
            "losses": self.losses.tolist(),
            "sums": sums.tolist(),
            "visits": visits.tolist(),
        }

    def load_state_dict(self, state: dict, world: World) -> None:
        """The sums of all ranks go to rank 0, for they are added up again."""
        self.losses.copy_(torch.tensor(state["losses"], dtype=torch.float64))
        if world.is_main:
            self.sums.copy_(torch.tensor(state["sums"], dtype=torch.float64))
            self.visits.copy_(torch.tensor(state["visits"]))

    def over_ranks(self, world: World) -> tuple[Tensor, Tensor]:
        """Nats and visits of all ranks since the last draw."""
        both = torch.stack([self.sums, self.visits.to(self.sums.device)])
        sums, visits = world.sum(both).cpu()
        return sums, visits


def systematic(p: Tensor, shift: Tensor) -> Tensor:
    """M draws from p (M,): at shift, shift + 1, … of M times its distribution function.

    shift is in [0, 1).
    """
    points = torch.arange(len(p), dtype=torch.float64) + shift
    edges = (p / p.sum()).cumsum(0) * len(p)
    # i where edges[i − 1] ≤ point < edges[i]. Rounding may put the last edge below the last point.
    return torch.searchsorted(edges, points, right=True).clamp_max(len(p) - 1)


def gather_segments(
    ids: Tensor, spans: list[tuple[int, int]], eos: int, length: int, pad: str = "right"
) -> tuple[Tensor, Tensor, Tensor]:
    """Segments of a text for (first, end) `spans`.

    Returns tokens, targets and attention mask, (B, length) each. Targets are the tokens from first
    to end − 1, the input is each one's predecessor; before the first token of a text stands <eos>.
    Padding, on the `pad` side, holds token 0.
    """
    tokens = torch.zeros(len(spans), length, dtype=torch.int64)
    targets = torch.zeros_like(tokens)
    attention_mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, (first, end) in enumerate(spans):
        size = end - first
        columns = slice(length - size, length) if pad == "left" else slice(0, size)
        if first > 0:
            tokens[row, columns] = ids[first - 1 : end - 1]
        else:
            tokens[row, columns] = torch.cat([torch.tensor([eos]), ids[: end - 1]])
        targets[row, columns] = ids[first:end]
        attention_mask[row, columns] = True
    return tokens, targets, attention_mask
