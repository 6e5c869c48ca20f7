"""Dropout whose mask costs a byte of randomness per number instead of a whole draw."""

import torch
from torch import Tensor, nn


class ByteDropout(nn.Dropout):
    """`nn.Dropout` that on a CPU draws eight decisions at a time; `p` is rounded to 256ths there (0.1 → 26/256 = 0.1016).

    The CPU generator makes one number after another: drawing is most of the cost of `nn.Dropout`, and of 64 random bits
    that one takes a single decision. What is kept is scaled by the rounded p, so the expectation is exact.
    """

    enabled = True  # False: the stock dropout everywhere, to compare with

    def forward(self, x: Tensor) -> Tensor:
        """Any shape → the same shape."""
        return drop_by_bytes(x, self.p) if self.training else x


def drop_by_bytes(x: Tensor, p: float) -> Tensor:
    """x with each number set to 0 with probability p, rounded to 256ths, and the others scaled to keep the mean."""
    zeros = round(p * 256)  # of the 256 values of a byte
    for_bytes = ByteDropout.enabled and x.device.type == "cpu" and not torch.compiler.is_compiling()
    if not for_bytes or not 0 < zeros < 256:
        return nn.functional.dropout(x, p)
    draws = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)  # all 64 bits
    keep = draws.view(torch.uint8)[: x.numel()].view(x.shape)
    # In place the comparison gives 0 and 1 as bytes; a boolean result would be converted one by one.
    keep = keep.ge_(zeros).to(x.dtype).mul_(256 / (256 - zeros))
    return x * keep
