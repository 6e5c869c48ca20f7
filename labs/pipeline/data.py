"""The handout's toy sequences in a `Dataset`, and a `DataLoader` that gives the batch of each step.

B sequences in a batch, S tokens that the model sees.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from engine.seeds import epoch_generator
from labs.pipeline.stages import PADDING


class NLPDataset(Dataset):
    """The handout's: sequence n is `length` times the token n."""

    def __init__(self, size: int, length: int):
        self.data = [torch.full((length,), number) for number in range(size)]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


def load(config) -> tuple[NLPDataset, int]:
    """The data and the vocabulary size.

    A sequence has one token more than the model sees: the last target.
    """
    dataset = NLPDataset(config.sequences, config.seq_length + 1)
    return dataset, max(100, config.sequences)  # the handout's VOCAB_SIZE is 100


class BatchesOfSteps(Sampler[list[int]]):
    """The numbers of the sequences in each step's batch, from a step on (counted from 1).

    A function of seed and step, so that a resumed run goes on where it stopped. Every epoch has a
    new order; its last batch may be short. It never ends.
    """

    def __init__(self, sequences: int, first_step: int, batch_size: int, seed: int):
        self.sequences, self.first_step = sequences, first_step
        self.batch_size, self.seed = batch_size, seed

    def __iter__(self) -> Iterator[list[int]]:
        steps_per_epoch = math.ceil(self.sequences / self.batch_size)
        epoch, first = divmod(self.first_step - 1, steps_per_epoch)
        while True:
            generator = epoch_generator(self.seed, epoch)
            order = torch.randperm(self.sequences, generator=generator).tolist()
            for number in range(first, steps_per_epoch):
                yield order[number * self.batch_size :][: self.batch_size]
            epoch, first = epoch + 1, 0


def batches(
    dataset: Dataset, first_step: int, batch_size: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of each step from `first_step` on, (B, S) each, without end."""
    sampler = BatchesOfSteps(len(dataset), first_step, batch_size, seed)
    for rows in DataLoader(dataset, batch_sampler=sampler):  # (up to B, S+1)
        yield inputs_and_targets(rows, batch_size)


def inputs_and_targets(rows: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """At most B sequences (…, S+1) → inputs and targets, (B, S) each.

    Stages exchange tensors of one size, so a short batch is filled up with rows of PADDING, which
    change neither the loss nor the gradient.
    """
    rows = F.pad(rows, (0, 0, 0, batch_size - len(rows)), value=PADDING)  # (B, S+1)
    # PADDING has no embedding: as an input it is token 0.
    return rows[:, :-1].clamp(min=0), rows[:, 1:]
