"""What is only speed: the same results as the plain code, in less time. Read model.py and decoding.py first.

    fast.keep_tensors_together(device)                                                  # before there are any
    loss_of = fast.loss(model, 0.1, torch.bfloat16, log) or SummedLoss(model, 0.1)      # training
    steps = fast.steps(model) or partial(decoding.start, model)                         # greedy decoding

The doors; behind them, on a CPU, C++ compiled at the first use (build.py): training.py and cross_entropy.py over kernels.cpp,
decoding.py over decoding.cpp, and memory.cpp. On a GPU: cross_entropy.py. Where there is no faster way, a door gives None, and
the plain code runs.
"""

from collections.abc import Callable

import torch
from torch import nn

from engine.errors import UserError
from fast import build
from fast.decoding import CompiledSteps, agrees, is_possible
from fast.training import KernelLoss, SlicedLoss, is_known, why_not


def keep_tensors_together(device: torch.device) -> bool:
    """Keep a CPU's large tensors in one region of memory from now on, without holes (memory.cpp); whether that is done."""
    memory = build.library(build.FOLDER / "memory.cpp") if device.type == "cpu" else None
    return memory is not None and bool(memory.keep_tensors_together())


def loss(
    model: nn.Module, label_smoothing: float, dtype: torch.dtype, log: Callable = lambda line: None
) -> nn.Module | None:
    """A faster `SummedLoss(model, label_smoothing)` for matrix products in `dtype`, or None; `log` is told why."""
    if hasattr(model, "unshard"):  # FSDP2, where only `forward` gathers the weights
        log(
            "note: a sharded model trains by PyTorch's own operations: the faster ones in fast/ are not used"
        )
        return None
    if next(model.parameters()).device.type == "cuda":
        if dtype != torch.float16 and is_known(model):
            return SlicedLoss(model, label_smoothing, dtype)
        # The gradients of fp16, made before the loss is scaled up, would vanish.
        why = "fp16" if dtype == torch.float16 else "a model of other parts"
        log(f"note: all logits are in memory at once ({why})")
        return None
    reason = why_not(model, dtype)
    if reason:
        missing = build.why_not()
        advice = "; install g++" if missing.startswith("no compiler") else ""
        log(
            f"note: training is slower than it could be: the kernels in fast/ are not used ({missing or reason}{advice})"
        )
        return None
    return KernelLoss(model, label_smoothing, dtype)


def steps(model: nn.Module, int8: bool = False) -> Callable | None:
    """A faster `decoding.start` for greedy search with the weights as they are now, or None.

    `int8`: weights and inputs of linear layers rounded to 8 bits. Raises `UserError` where int8 is asked for and cannot be.
    """
    device = next(model.parameters()).device
    possible = (
        device.type == "cpu" and not torch.is_autocast_enabled("cpu") and is_possible(model, int8)
    )
    if possible and agrees(compiled := CompiledSteps(model), model):
        return CompiledSteps(model, int8).start if int8 else compiled.start
    if int8:
        raise UserError(
            f"--precision int8 needs a CPU with AVX-512 VNNI, g++, model.py as it is, sizes that are multiples of 16 "
            f"({device}{', ' * bool(build.why_not())}{build.why_not()}); use --precision fp32"
        )
    return None
