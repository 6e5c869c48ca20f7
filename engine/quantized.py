"""Linear layers in 8-bit integers, for a CPU that decodes with weights that stay as they are.

Weights are rounded once, with a scale for every output: w ≈ scale · q, q in −127…127. Inputs are rounded at every call
("dynamic" quantisation): in fast/compiled.cpp with a scale for every row; here, by PyTorch's product for where that
does not compile, with one for the whole batch. They are multiplied as integers, and the product is scaled back to fp32. An
integer product does up to four times the multiplications of an fp32 one in the same time, and a weight is a byte to read
instead of four. What it costs is measured, not assumed: score the same checkpoint with and without.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from engine.errors import UserError

DESCRIPTION = "int8 decoding: weights and inputs of linear layers rounded to 8 bits, the rest in 16 or 32"


def check_int8(device: torch.device, beam: int = 1) -> None:
    """Raise `UserError` where decoding in int8 is not to be had."""
    if device.type != "cpu":
        raise UserError(f"--precision int8 is for the CPU, not for {device}; use bf16 or fp16, or --device cpu")
    if beam > 1:
        raise UserError(f"--precision int8 decodes greedily; --beam {beam} needs another --precision")
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise UserError("--precision int8: this build of PyTorch has no 8-bit products (FBGEMM); use fp32")


def pack_int8(weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
    """(out, in), (out,) → a function (rows, in) → (rows, out), all fp32 outside. Safe to call from several threads."""
    scale = (weight.abs().amax(1) / 127).clamp(min=1e-12).double()  # (out,); a row of zeros needs a scale as well
    with warnings.catch_warnings():
        # PyTorch means to replace its quantised tensors one day, but has no other product this fast so far.
        warnings.filterwarnings("ignore", message=".*quantize_per_channel", category=UserWarning)
        rounded = torch.quantize_per_channel(weight, scale, torch.zeros_like(scale, dtype=torch.long), 0, torch.qint8)
    chosen = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"  # the one whose use from several threads is tested
    try:
        packed = torch.ops.quantized.linear_prepack(rounded, bias)
    finally:
        torch.backends.quantized.engine = chosen
    # Without VNNI two products of full 8-bit inputs overflow their 16-bit sum: round the inputs to 7 bits there.
    reduce_range = not torch.cpu._is_vnni_supported()
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, reduce_range)
