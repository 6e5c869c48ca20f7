"""The lab's data: the handout's toy sequences or a text, and the batch of each step.

N sequences in all, B in a batch, S tokens that the model sees.
"""

import math
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import UserError
from labs.pipeline.stages import PADDING


def load(config) -> tuple[Tensor, int]:
    """The sequences (N, S+1) and the vocabulary size; a text's tokens are its bytes.

    A sequence has one token more than the model sees: the last target. The end of a text is filled
    with PADDING. Raises `UserError` for a text that is missing or too short.
    """
    if not config.data:
        length = config.length or 9  # the handout: DATASET_LENGTH 10, of which 9 are inputs
        sequences = torch.arange(config.sequences).unsqueeze(1).expand(-1, length + 1)
        return sequences, max(100, config.sequences)  # the handout's VOCAB_SIZE is 100
    content = read_text(Path(config.data).expanduser())
    if len(content) < 2:
        raise UserError(f"--data {config.data} has {len(content)} bytes; a text needs at least two")
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).int()
    length = config.length or 128
    rows = math.ceil((len(tokens) - 1) / length)  # each token but the first is a target once
    tokens = F.pad(tokens, (0, rows * length + 1 - len(tokens)), value=PADDING)
    return tokens.unfold(0, length + 1, length), 256


def read_text(path: Path) -> bytes:
    """The bytes of a file, or of all .txt files in a folder, in the order of their names."""
    try:
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"--data {path}: this folder has no .txt file; name another")
        return b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise UserError(
            f"--data {path}: {error.strerror}; name a text file or a folder of .txt files"
        ) from None


@lru_cache(maxsize=1)
def order_of_epoch(rows: int, seed: int, epoch: int) -> Tensor:
    """A random order of the rows."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


def batch_of_step(
    sequences: Tensor, step: int, batch_size: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step (counted from 1), (B, S) each: a function of seed and step.

    The last batch of an epoch may be short. Stages exchange tensors of one size, so it is filled
    up with rows of PADDING, which change neither the loss nor the gradient.
    """
    steps_per_epoch = math.ceil(len(sequences) / batch_size)
    epoch, number = divmod(step - 1, steps_per_epoch)
    order = order_of_epoch(len(sequences), seed, epoch)
    rows = sequences[order[number * batch_size : (number + 1) * batch_size]].long()
    rows = F.pad(rows, (0, 0, 0, batch_size - len(rows)), value=PADDING)  # (B, S+1)
    # PADDING has no embedding: as an input it is token 0.
    return rows[:, :-1].clamp(min=0), rows[:, 1:]
