"""The handout's toy sequences, and the batch of each step.

N sequences in all, B in a batch, S tokens that the model sees.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.seeds import epoch_generator
from labs.pipeline.stages import PADDING


def load(config) -> tuple[Tensor, int]:
    """The sequences (N, S+1) and the vocabulary size; sequence n is filled with n.

    A sequence has one token more than the model sees: the last target.
    """
    sequences = torch.arange(config.sequences).unsqueeze(1).expand(-1, config.seq_length + 1)
    return sequences, max(100, config.sequences)  # the handout's VOCAB_SIZE is 100


def batch_of_step(
    sequences: Tensor, step: int, batch_size: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step (counted from 1), (B, S) each: a function of seed and step.

    The last batch of an epoch may be short. Stages exchange tensors of one size, so it is filled
    up with rows of PADDING, which change neither the loss nor the gradient.
    """
    steps_per_epoch = math.ceil(len(sequences) / batch_size)
    epoch, number = divmod(step - 1, steps_per_epoch)
    order = torch.randperm(len(sequences), generator=epoch_generator(seed, epoch))
    rows = sequences[order[number * batch_size : (number + 1) * batch_size]]
    rows = F.pad(rows, (0, 0, 0, batch_size - len(rows)), value=PADDING)  # (B, S+1)
    # PADDING has no embedding: as an input it is token 0.
    return rows[:, :-1].clamp(min=0), rows[:, 1:]
