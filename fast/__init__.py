"""The same results as the plain code in less time. Read model.py and decoding.py first.

    fast.keep_tensors_together(device)                       # before the first tensor is made
    loss_of = fast.loss(model, 0.1, torch.bfloat16, log)     # as SummedLoss(model, 0.1)
    begin = fast.start(model)                                # as decoding.start
    search(model, sources, collate, beam=5, begin=begin)

Where no faster way exists, `loss` and `start` return the plain code.
On a CPU they use C++, compiled at its first use (build.py): training.py and cross_entropy.py call
kernels.cpp, decoding.py calls decoding.cpp, and memory.cpp places large tensors.
On a GPU only cross_entropy.py is used.
"""

from collections.abc import Callable

import torch
from torch import nn

from decoding import computes_the_same, plain_start
from engine.distributed import is_sharded
from engine.errors import UserError
from fast import build, decoding, training
from fast.decoding import CompiledDecoder
from fast.training import KernelLoss, SlicedLoss, is_known, loss_is_known
from model import SummedLoss


def keep_tensors_together(device: torch.device) -> bool:
    """From now on keep a CPU's large tensors in one region of memory, see memory.cpp.

    Returns whether that is possible.
    """
    if device.type != "cpu":
        return False
    memory = build.library(build.FOLDER / "memory.cpp")
    return memory is not None and bool(memory.keep_tensors_together())


def loss(
    model: nn.Module, label_smoothing: float, dtype: torch.dtype, log: Callable = lambda line: None
) -> nn.Module:
    """`SummedLoss(model, label_smoothing)`, or the same computed faster, with products in `dtype`.

    `log` receives the reason why there is no faster one.
    """
    plain = SummedLoss(model, label_smoothing)
    if is_sharded(model):  # FSDP2 gathers the weights in `forward` only
        log("note: a sharded model trains with PyTorch's own operations, without those in fast/")
        return plain
    if next(model.parameters()).device.type == "cuda":
        if dtype == torch.float16:
            # SlicedLoss computes gradients before the loss is scaled up: they would vanish.
            log("note: all logits are in memory at once (fp16)")
            return plain
        if not is_known(model) or not loss_is_known():
            log("note: all logits are in memory at once (model.py was changed)")
            return plain
        return SlicedLoss(model, label_smoothing, dtype)
    reason = training.why_not(model, dtype)
    if not reason:
        return KernelLoss(model, label_smoothing, dtype)
    log(f"note: training is slower than it could be: fast/ is not used ({reason})")
    return plain


def start(model: nn.Module, int8: bool = False, log: Callable = lambda line: None) -> Callable:
    """The fastest start of decoding with the current weights: (src, src_pad) → a cache.

    The arguments and errors are those of `decoder`. `log` receives a note where decoding is slow.
    """
    compiled = decoder(model, int8, log)
    return compiled.start if compiled else plain_start(model, log)


def decoder(
    model: nn.Module, int8: bool = False, log: Callable = lambda line: None
) -> CompiledDecoder | None:
    """Decoding in C++ with the current weights, or None where that is not possible.

    int8: round weights and inputs of linear layers to 8 bits; raises `UserError` where that is not
    possible. Where the result is None on a CPU, `log` receives the reason.
    """
    device = next(model.parameters()).device
    if device.type != "cpu":
        reason = f"the device is {device}"
    elif torch.is_autocast_enabled("cpu"):
        reason = "the precision is not fp32"
    else:
        reason = decoding.why_not(model, int8)
    if not reason:
        compiled = CompiledDecoder(model)
        if computes_the_same(compiled.start, model):
            return CompiledDecoder(model, int8=True) if int8 else compiled
        reason = "model.py was changed: it computes something else"
    if int8:
        raise UserError(
            "--precision int8 needs Linux, g++, a CPU with AVX-512 VNNI, model.py as it is and "
            f"sizes that are multiples of 16, but {reason}; use --precision fp32"
        )
    if device.type == "cpu":
        log(f"note: decoding is slower than it could be: fast/ is not used ({reason})")
    return None
