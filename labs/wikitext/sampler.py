"""Segments of a text as tensors, and which of them an epoch of training visits."""

import math

import torch
from torch import Tensor

from engine.distributed import World
from engine.schedule import DECAY_SHARE
from engine.seeds import epoch_generator
from labs.wikitext.model import send


class SegmentSampler:
    """M segments of consecutive tokens (the last may be shorter); every epoch visits M of them.

    static: each segment once. dynamic: before every `resample_every` epochs, M segments are drawn,
    segment i with probability

        p_i = (1 − w) / M + w · exp(ℓ_i) / Σ_j exp(ℓ_j)

    1 − w is the share of normal sampling. It falls when the model overfits:

        w = max(0, 1 − PPL_train / PPL_valid)

    but w = 0 in the first draw, and again in the last 30 % of the epochs, in which the learning
    rate falls. ℓ_i: mean plain loss of the segment's tokens, in nats, in the last epoch that
    visited it. PPL_train: perplexity over the whole training text, from these ℓ; they were measured
    in training, that is, with dropout and while the weights were changing.

    A draw takes M segments by systematic resampling: i comes ⌊M p_i⌋ or ⌈M p_i⌉ times and M p_i
    times in expectation, so at w = 0 each comes exactly once. All ranks make the same draws.
    """

    def __init__(self, token_count: int, config, device: torch.device):
        """`config`: seq_length, sampling, resample_every, epochs, seed."""
        self.starts = torch.arange(0, token_count, config.seq_length)  # (M,)
        self.lengths = (token_count - self.starts).clamp_max(config.seq_length)  # (M,)
        self.config = config
        count = len(self.starts)
        self.segments = torch.arange(count)  # the current draw, (M,)
        self.weight = 0.0  # w of the current draw
        # ℓ. The first draw, with w = 0, visits every segment: then each has a loss.
        self.losses = torch.zeros(count, dtype=torch.float64)
        # Nats and visits in this epoch, of this rank. The nats stay on the GPU until its end.
        self.sums = torch.zeros(count, dtype=torch.float64, device=device)
        self.visits = torch.zeros(count, dtype=torch.float64)

    def spans(self, segments: Tensor) -> list[tuple[int, int]]:
        """(B,) → the first token and the end of each segment."""
        firsts = self.starts[segments]
        return list(zip(firsts.tolist(), (firsts + self.lengths[segments]).tolist()))

    def plan(self, epoch: int) -> Tensor:
        """The segments of this epoch (from 0) in order, (M,): the draw, shuffled anew."""
        generator = epoch_generator(self.config.seed, epoch)
        return self.segments[torch.randperm(len(self.segments), generator=generator)]

    def record(self, segments: Tensor, losses: Tensor, counted: Tensor) -> None:
        """This rank visited these segments, (B,); `losses` (N,) are of the tokens `counted`."""
        visited = counted.any(1)  # (B,) false for what a rank computes only because DDP wants it
        rows = counted.nonzero()[:, 0]  # (N,) the row of each loss
        self.sums.index_add_(0, send(segments[rows], self.sums.device), losses.double())
        self.visits.index_add_(0, segments, visited.double())

    def end_epoch(self, world: World, epoch: int, validation_loss: float) -> None:
        """After epoch `epoch` (from 0): the new losses, and where one is due, the next draw.

        `validation_loss`: nats per token after this epoch. All ranks call it.
        """
        sums, visits = self.over_ranks(world)
        self.losses = torch.where(visits > 0, sums / (visits * self.lengths), self.losses)
        self.sums.zero_()
        self.visits.zero_()
        is_due = (epoch + 1) % self.config.resample_every == 0
        if self.config.sampling == "dynamic" and is_due:
            self.weight = self.weight_after(epoch + 1, validation_loss)
            self.segments = self.draw(epoch + 1)

    def weight_after(self, epochs_done: int, validation_loss: float) -> float:
        """w of a draw that is made when `epochs_done` epochs are done."""
        if epochs_done >= (1 - DECAY_SHARE) * self.config.epochs:
            return 0.0
        training_loss = (self.losses * self.lengths).sum().item() / self.lengths.sum().item()
        return max(0.0, 1 - math.exp(training_loss - validation_loss))

    def probabilities(self) -> Tensor:
        """p, (M,)."""
        uniform = 1 / len(self.losses)
        return (1 - self.weight) * uniform + self.weight * self.losses.softmax(0)

    def draw(self, epoch: int) -> Tensor:
        """The segments of a draw made before `epoch`, in ascending order, (M,)."""
        if self.weight == 0:
            return torch.arange(len(self.losses))
        generator = epoch_generator(self.config.seed, epoch)
        shift = torch.rand((), generator=generator, dtype=torch.float64)
        return systematic(self.probabilities(), shift)

    def figures(self) -> dict[str, float]:
        """Of the current draw: its weight w, and how many different segments it visits."""
        return {
            "sampler/weight": self.weight,
            "sampler/different_segments": len(self.segments.unique()),
        }

    def state_dict(self, world: World) -> dict:
        """As JSON. All ranks call it."""
        sums, visits = self.over_ranks(world)
        return {
            "segments": self.segments.tolist(),
            "weight": self.weight,
            "losses": self.losses.tolist(),
            "sums": sums.tolist(),
            "visits": visits.tolist(),
        }

    def load_state_dict(self, state: dict, world: World) -> None:
        """The sums of all ranks go to rank 0, for they are added up again."""
        self.segments = torch.tensor(state["segments"])
        self.weight = state["weight"]
        self.losses.copy_(torch.tensor(state["losses"], dtype=torch.float64))
        if world.is_main:
            self.sums.copy_(torch.tensor(state["sums"], dtype=torch.float64))
            self.visits.copy_(torch.tensor(state["visits"]))

    def over_ranks(self, world: World) -> tuple[Tensor, Tensor]:
        """Nats and visits of all ranks in this epoch."""
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
