"""Time and peak memory of attention and GELU, forward and backward: PyTorch's, composed of its operations, and written by hand.

    python -m benchmarks.attention_op                                    # 64 to 4096 tokens a sequence, always 4096 in all
    python -m benchmarks.attention_op --lengths 128 512 --numbers 1000   # other lengths

Contestants take turns; `python -m labs.attention_op` says whether they agree. Memory is counted on a CPU alone, in a process of
its own: the most it held during a forward and backward pass, less what it held with the inputs before.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measuring import in_new_process, measure
from benchmarks.peers.contest import wait_for_gpu
from engine.config import flag, parse_flags
from engine.distributed import choose_device
from engine.errors import run_script
from engine.memory import forget_peak, held_gib
from labs.attention_op.checks import random_inputs
from labs.attention_op.operators import ATTENTION_BACKENDS, GELU_BACKENDS, attention, gelu

TOKENS, HEADS, WIDTH = (
    4096,
    8,
    64,
)  # tokens in all, so that the number of sequences follows; the width is a head's


@dataclass
class Config:
    lengths: tuple = flag(
        (64, 256, 1024, 4096), "tokens of a sequence, as many queries as keys", "Sizes", min=1
    )
    numbers: tuple = flag((65536, 1048576, 16777216), "numbers that GELU gets", "Sizes", min=1)
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "How")
    rounds: int = flag(5, "turns of each", "How", min=1)
    out: str = flag("runs/benchmarks/attention_op.json", "where the figures go", "How")


def main(config: Config) -> None:
    """Memory first, then the turns."""
    torch.manual_seed(1)
    # Before CUDA is begun. Without arenas for threads all freed memory can be given back.
    on_gpu = config.device.startswith("cuda") or (
        config.device == "auto" and torch.cuda.is_available()
    )
    memory = {} if on_gpu else in_new_process(peaks, config, MALLOC_ARENA_MAX="1")
    passes = dict(tasks(config, choose_device(config.device, 0)))
    turn = lambda name: milliseconds(passes[name]) | memory.get(name, {})  # noqa: E731
    measure("attention and GELU, forward and backward", passes, config, turn, "ms")


def attentions(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """Name → function of q, k, v."""

    def pytorch(kernel: SDPBackend) -> Callable[..., Tensor]:
        return lambda *qkv: sdpa_kernel(kernel)(F.scaled_dot_product_attention)(*qkv)

    if device.type == "cpu":
        named = {"PyTorch flash": pytorch(SDPBackend.FLASH_ATTENTION)}
    else:  # flash attention on a GPU knows no fp32
        named = {"PyTorch efficient": pytorch(SDPBackend.EFFICIENT_ATTENTION)}
    named["PyTorch math"] = pytorch(SDPBackend.MATH)
    named["composed"] = lambda q, k, v: (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v
    return named | {f"ours {name}": partial(attention, backend=name) for name in ATTENTION_BACKENDS}


def gelus() -> dict[str, Callable[[Tensor], Tensor]]:
    """Name → function of x."""
    named = {
        "PyTorch": F.gelu,
        "composed": lambda x: 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))),
    }
    return named | {f"ours {name}": partial(gelu, backend=name) for name in GELU_BACKENDS}


def tasks(config: Config, device: torch.device) -> Iterator[tuple[str, Callable[[], tuple]]]:
    """(name "attention CONTESTANT, LENGTH" or "gelu CONTESTANT, NUMBERS", a forward and backward pass)"""
    for length in config.lengths:
        sizes = max(1, TOKENS // length), HEADS, length, length, WIDTH, WIDTH
        inputs = [x.requires_grad_() for x in random_inputs(sizes, torch.float32, device)]
        grad = torch.randn_like(inputs[-1])  # the output has the shape of the values
        for name, operator in attentions(device).items():
            yield (
                f"attention {name}, {length}",
                partial(forward_and_backward, operator, inputs, grad),
            )
    for count in config.numbers:
        inputs, grad = (
            [torch.randn(count, device=device, requires_grad=True)],
            torch.randn(count, device=device),
        )
        for name, operator in gelus().items():
            yield f"gelu {name}, {count}", partial(forward_and_backward, operator, inputs, grad)


def forward_and_backward(
    operator: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor
) -> tuple:
    """Both passes once; → output and gradients."""
    out = operator(*inputs)
    return out, *torch.autograd.grad(out, inputs, grad)


def milliseconds(task: Callable[[], tuple]) -> dict[str, float]:
    """One turn: after one pass that does not count, as many as fit a quarter of a second, at least one."""
    task()
    wait_for_gpu()
    passes, seconds, begun = 0, 0.0, time.perf_counter()
    while seconds <= 0.25:
        task()
        wait_for_gpu()
        passes, seconds = passes + 1, time.perf_counter() - begun
    return {"ms": 1e3 * seconds / passes}


def peaks(config: Config) -> dict[str, dict[str, float]]:
    """Peak memory of every task on the CPU. Runs in a process of its own."""
    return {name: peak(task) for name, task in tasks(config, torch.device("cpu"))}


def peak(task: Callable[[], tuple]) -> dict[str, float]:
    """What a pass needs beside its inputs, its results included; {} where that cannot be counted."""
    task()  # buffers that libraries keep are there from now on
    if not forget_peak():
        return {}
    before = held_gib("VmRSS")
    task()
    return {"peak_mib": (held_gib("VmHWM") - before) * 1024}


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "time and memory of attention and GELU")))
