"""The same results in less time. Nothing here need be read to understand the lab.

    fast.keep_tensors_together(device)          # before the model is made
    fast.use_kernels(model, torch.bfloat16)     # PyTorch's encoder and decoder get another forward
    fast.linear_cross_entropy(hidden, …)        # the loss, without all logits in memory
    fast.CompiledDecoder.of(decoder)            # decoding in C++, see decoding.py of the root

model.py uses this folder, which knows PyTorch only. It replaces modules that are exactly
PyTorch's, `nn.TransformerEncoder`, `nn.TransformerDecoder` and `nn.Linear`; all others, and
everything that model.py says, run as they are written. `--fast false` does without it.

On a CPU it is C++, compiled at its first use (build.py): layers.py and cross_entropy.py call
kernels.cpp, decoding.py calls decoding.cpp, and memory.cpp places large tensors. On a GPU only
cross_entropy.py is used.
"""

import torch

from fast import build
from fast.cross_entropy import can_slice, is_cross_entropy, linear_cross_entropy
from fast.decoding import CompiledDecoder, CompiledEncoder, CompiledOutput
from fast.decoding import why_not as why_not_compiled
from fast.layers import coders, has_hooks, use_kernels

__all__ = [
    "CompiledDecoder",
    "CompiledEncoder",
    "CompiledOutput",
    "can_slice",
    "coders",
    "has_hooks",
    "is_cross_entropy",
    "keep_tensors_together",
    "linear_cross_entropy",
    "use_kernels",
    "why_not_compiled",
]


def keep_tensors_together(device: torch.device) -> bool:
    """From now on keep a CPU's large tensors in one region of memory, see memory.cpp.

    Returns whether that is possible.
    """
    if device.type != "cpu":
        return False
    memory = build.library(build.FOLDER / "memory.cpp")
    return memory is not None and bool(memory.keep_tensors_together())
