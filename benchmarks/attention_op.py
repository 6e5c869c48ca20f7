"""Time and peak memory of attention and GELU, forward and backward: PyTorch's, composed of its operations, and written by hand.

    python -m benchmarks.attention_op                                    # 64 to 4096 tokens a sequence, always 4096 in all
    python -m benchmarks.attention_op --lengths 128,512 --causal true    # other lengths, with the triangle
    python -m benchmarks.attention_op --png docs/attention_op.png        # with the picture

Contestants take turns. Every result is compared with PyTorch's before it is timed. Memory is counted in a process of its own:
the most it held during a forward and backward pass, less what it held with the inputs before.
"""

import ctypes
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measuring import Run, compare, describe_machine, interleave, write_json
from engine.allocator import keep_freed_memory
from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from labs.attention_op import ATTENTION_BACKENDS, attention, gelu
from labs.attention_op.checks import error, random_inputs

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = 1e-5  # sums of thousands of terms in fp32


@dataclass
class Config:
    """Every setting of this benchmark."""

    lengths: str = flag("64,256,1024,4096", "tokens of a sequence, as many queries as keys", "Sizes")
    tokens: int = flag(4096, "tokens in all: the number of sequences follows", "Sizes")
    heads: int = flag(8, "attention heads", "Sizes")
    width: int = flag(64, "width of a head", "Sizes")
    causal: bool = flag(False, "each token sees itself and the earlier ones", "Sizes")
    numbers: str = flag("65536,1048576,16777216", "numbers that GELU gets", "Sizes")
    rounds: int = flag(5, "turns of each", "How")
    out: str = flag("runs/benchmarks/attention_op.json", "where the figures go", "How")
    png: str = flag("", "where a picture goes", "How")
    memory: bool = flag(False, "only count memory, here, and print it as JSON (the benchmark calls itself so)", "How")

    def __post_init__(self):
        for name in ("lengths", "numbers"):
            if not all(word.strip().isdigit() and int(word) > 0 for word in getattr(self, name).split(",")):
                raise UserError(f"--{name} {getattr(self, name)} must be positive numbers with commas between")
        for name in ("tokens", "heads", "width", "rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)} must be at least 1")


def main(config: Config) -> None:
    """Measure, print, write."""
    torch.manual_seed(1)
    if config.memory:
        print(json.dumps({name: peak_mib(task) for name, task in tasks(config)}))
        return
    print(f"{describe_machine()}\n{torch.get_num_threads()} threads; {device()}", flush=True)
    memory = {} if device() == "cuda" else memory_of_child(config)
    keep_freed_memory()
    check(config)
    runs, groups = [], {}
    for name, task in tasks(config):
        groups.setdefault(name.split(", ", 1)[1], {})[name] = task
    for group in groups.values():  # one length after another; at each, the contestants take turns
        for task in group.values():
            task()  # the first time is not counted
        runs += interleave(group, config.rounds, lambda name, group=group: figures(group[name], memory.get(name)))
    write_json(
        ROOT / config.out, runs, title="attention and GELU, forward and backward", settings=vars(config) | {"given": []}
    )
    tables = {kind: table(runs, kind) for kind in ("attention", "gelu")}
    for kind, rows in tables.items():
        print_medians(kind, rows)
    if config.png:
        draw(tables["attention"], config.png)


def device() -> str:
    """Where it is measured."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def attentions(causal: bool) -> dict[str, Callable[..., Tensor]]:
    """Name → function of q, k, v."""
    named = {
        "PyTorch flash": pytorch_with(SDPBackend.FLASH_ATTENTION, causal),
        "PyTorch math": pytorch_with(SDPBackend.MATH, causal),
    }
    named["composed"] = lambda q, k, v: composed_attention(q, k, v, causal)
    for backend in ATTENTION_BACKENDS:
        if (backend != "cpp" or device() == "cpu") and (backend != "triton" or device() == "cuda"):
            named[f"ours {backend}"] = lambda q, k, v, b=backend: attention(q, k, v, causal=causal, backend=b)
    return named


def pytorch_with(backend: SDPBackend, causal: bool):
    """PyTorch's attention by one of its kernels."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def composed_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The formula as PyTorch operations, differentiated by PyTorch."""
    scores = q @ k.mT / math.sqrt(q.size(-1))
    if causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf
        )
    return scores.softmax(-1) @ v


def gelus() -> dict[str, Callable[[Tensor], Tensor]]:
    """Name → function of x."""
    named = {
        "PyTorch": F.gelu,
        "composed": lambda x: 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))),
        "ours python": gelu,
    }
    named["PyTorch tanh"] = lambda x: F.gelu(x, approximate="tanh")
    named["ours python tanh"] = lambda x: gelu(x, "tanh")
    if device() == "cpu":
        named["ours cpp"] = lambda x: gelu(x, backend="cpp")
        named["ours cpp tanh"] = lambda x: gelu(x, "tanh", "cpp")
    return named


def tasks(config: Config):
    """(name "attention CONTESTANT, LENGTH" or "gelu CONTESTANT, NUMBERS", a forward and backward pass)"""
    for length in map(int, config.lengths.split(",")):
        sizes = max(1, config.tokens // length), config.heads, length, length, config.width, config.width
        inputs = [x.requires_grad_() for x in random_inputs(sizes, torch.float32, device())]
        for name, operator in attentions(config.causal).items():
            yield f"attention {name}, {length}", forward_and_backward(operator, inputs)
    for count in map(int, config.numbers.split(",")):
        inputs = [torch.randn(count, device=device(), requires_grad=True)]
        for name, operator in gelus().items():
            yield f"gelu {name}, {count}", forward_and_backward(operator, inputs)


def forward_and_backward(operator: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], tuple]:
    """A function that runs both passes once; → output and gradients."""
    grad = torch.randn_like(inputs[-1])  # the output has the shape of the values

    def run():
        out = operator(*inputs)
        return out, *torch.autograd.grad(out, inputs, grad)

    return run


def check(config: Config) -> None:
    """All contestants agree, or there is nothing to time."""
    length = int(config.lengths.split(",")[0])
    q, k, v = random_inputs((2, config.heads, length, length, config.width, config.width), torch.float32, device())
    for contestants, inputs in ((attentions(config.causal), [q, k, v]), (gelus(), [q])):
        inputs = [x.requires_grad_() for x in inputs]
        results = {}
        for name, operator in contestants.items():
            out = operator(*inputs)
            results[name] = out, *torch.autograd.grad(out, inputs, inputs[-1].detach())
        for name, result in results.items():
            first = next(iter(results.values())) if not name.endswith("tanh") else results["PyTorch tanh"]
            if max(map(error, result, first)) > ALLOWED:
                raise UserError(f"{name} does not give what PyTorch gives; nothing is timed")


def figures(task: Callable[[], tuple], mib: float | None) -> dict[str, float]:
    """One turn: as many passes as fit a quarter of a second, at least one."""
    passes, begun = 0, time.perf_counter()
    while True:
        task()
        passes += 1
        if device() == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        if seconds > 0.25:
            break
    return {"ms": 1e3 * seconds / passes} | ({} if mib is None else {"peak_mib": mib})


def memory_of_child(config: Config) -> dict[str, float]:
    """Peak memory of every task, in MiB."""
    words = [sys.executable, "-m", "benchmarks.attention_op", "--memory", "true", "--causal", str(config.causal)]
    for name in ("lengths", "tokens", "heads", "width", "numbers"):
        words += [f"--{name}", str(getattr(config, name))]
    # Without arenas for threads all freed memory can be given back.
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, "MALLOC_ARENA_MAX": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"memory cannot be counted: {(done.stderr.strip().splitlines() or ['the process was killed'])[-1]}"
        )
    return json.loads(done.stdout)


def peak_mib(task: Callable[[], tuple]) -> float | None:
    """What a pass needs beside its inputs; None where Linux's /proc is missing. The results count too."""
    task()  # buffers that libraries keep are there from now on
    with trimmed_memory() as reset:
        if not reset:
            return None
        before = proc_status("VmRSS")
        result = task()
        peak = proc_status("VmHWM")
        del result
    return (peak - before) / 1024


@contextmanager
def trimmed_memory():
    """Freed memory is given back and the high-water mark set to what is held now; → whether that worked."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        yield False
    else:
        yield True


def proc_status(field: str) -> int:
    """A field of /proc/self/status, in KiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1])


def table(runs: list[Run], kind: str) -> dict[str, dict[int, tuple[float, float | None]]]:
    """contestant → size → (median ms, peak MiB)"""
    rows = {}
    for row in compare(runs, "ms", more=["peak_mib"]):
        name, size = row.contestant.rsplit(", ", 1)
        if name.startswith(kind):
            rows.setdefault(name.removeprefix(kind + " "), {})[int(size)] = row.median, row.more.get("peak_mib")
    return rows


def print_medians(kind: str, rows: dict) -> None:
    """ms / MiB for every contestant and size, as Markdown."""
    sizes = list(next(iter(rows.values())))
    print(f"\n| {kind}: ms / MiB | " + " | ".join(f"{size:,}" for size in sizes) + " |\n|---|" + "---:|" * len(sizes))
    for name, figures in rows.items():
        cells = [
            f"{ms:,.{1 if ms >= 1 else 3}f} / " + ("–" if mib is None else f"{mib:,.0f}")
            for ms, mib in figures.values()
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


def draw(rows: dict, file: str) -> None:
    """Time and memory over the length, both axes logarithmic."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise UserError("--png needs matplotlib; pip install matplotlib, or leave --png away") from None
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    for name, figures in rows.items():
        for axis, index in zip(axes, (0, 1)):
            points = [(size, values[index]) for size, values in figures.items() if values[index]]
            if points:
                axis.plot(*zip(*points), marker="o", label=name, linestyle="-" if name.startswith("ours") else "--")
    for axis, title in zip(axes, ("forward and backward, ms", "peak memory beside the inputs, MiB")):
        axis.set(xscale="log", yscale="log", xlabel="tokens of a sequence", title=title)
        axis.grid(alpha=0.3)
        axis.set_xticks(sizes := list(next(iter(rows.values()))), [str(size) for size in sizes])
        axis.minorticks_off()
    axes[0].legend(fontsize=8)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    settings = parse_flags(Config, "time and memory of attention and GELU")
    run_script(lambda: main(settings))
