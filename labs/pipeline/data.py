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
from labs.pipeline.stages import NOTHING
from text.plain import read_lines


def load(config) -> tuple[Tensor, int]:
    """The sequences, (N, S+1) with NOTHING behind the end of a text, whose tokens are bytes; the size of the vocabulary."""
    if not config.data:
        length = config.length or 9  # the handout's: DATASET_LENGTH − 1 here, VOCAB_SIZE 100 below
        return torch.arange(config.sequences).unsqueeze(1).expand(-1, length + 1), max(
            100, config.sequences
        )
    content = read_text(Path(config.data).expanduser())
    if len(content) < 2:
        raise UserError(
            f"--data {config.data} holds {len(content)} bytes; a text needs at least two"
        )
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).int()
    length = config.length or 128
    rows = math.ceil(
        (len(tokens) - 1) / length
    )  # each token but the first is a target once; the last row may be short
    tokens = F.pad(tokens, (0, rows * length + 1 - len(tokens)), value=NOTHING)
    return tokens.unfold(0, length + 1, length), 256


def read_text(path: Path) -> bytes:
    """The bytes of a file, or of all .txt and .parquet files in a folder in the order of their names."""
    try:
        files = sorted([*path.glob("*.txt"), *path.glob("*.parquet")]) if path.is_dir() else [path]
        if not files:
            raise UserError(
                f"--data {path}: no .txt or .parquet file in this folder; give a text or a folder of them"
            )
        return b"".join(map(bytes_of, files))
    except OSError as error:
        raise UserError(
            f"--data {path}: {error.strerror}; give a text file or a folder of .txt files"
        ) from None


def bytes_of(file: Path) -> bytes:
    """A text file as it is; of one of the hub's parquet files the lines of its column `text`."""
    return (
        "\n".join([*read_lines(file), ""]).encode()
        if file.suffix == ".parquet"
        else file.read_bytes()
    )


@lru_cache(maxsize=1)
def order_of_epoch(rows: int, seed: int, epoch: int) -> Tensor:
    """All rows once, shuffled."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


def batch_of_step(
    sequences: Tensor, step: int, batch_size: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Token ids and targets, (B, S) each; every epoch in another order, a function of seed and step alone.

    The last batch of an epoch may be short: it is filled up with rows of NOTHING, which change neither loss nor
    gradient, since the stages exchange tensors of one size.
    """
    steps_per_epoch = math.ceil(len(sequences) / batch_size)
    epoch, number = divmod(step, steps_per_epoch)
    order = order_of_epoch(len(sequences), seed, epoch)
    rows = sequences[order[number * batch_size : (number + 1) * batch_size]].long()
    rows = F.pad(rows, (0, 0, 0, batch_size - len(rows)), value=NOTHING)  # (B, S+1)
    return rows[:, :-1].clamp(min=0), rows[
        :, 1:
    ]  # NOTHING has no embedding: as an input it is token 0
