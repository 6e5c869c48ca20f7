"""Random numbers as a function of (seed, epoch): a resumed run and every process repeat them."""

import torch


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """The generator of an epoch, on the CPU."""
    # Multiplied, because epoch 1 of seed 1 must not be epoch 0 of seed 2.
    return torch.Generator().manual_seed(1_000_003 * seed + epoch)
