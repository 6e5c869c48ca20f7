"""Check attention and GELU written by hand against PyTorch's, then time them.

python -m labs.attention_op                       # both implementations
python -m labs.attention_op --backend cpp         # one implementation; C++ is compiled at first use
python -m labs.attention_op --seq 1024 --batch 1  # other sizes
"""

from engine.memory import keep_freed_memory  # engine before PyTorch, as in every script

# isort: split
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from labs.attention_op import checks
from labs.attention_op.operators import BACKENDS, attention, gelu


@dataclass
class Config:
    """Every setting of this lab."""

    backend: str = flag("", "only this one (python|cpp); default: both", "Operators")
    batch: int = flag(8, "sequences", "Sizes", min=1)
    heads: int = flag(8, "attention heads", "Sizes", min=1)
    seq: int = flag(256, "queries, and keys, per row", "Sizes", min=1)
    width: int = flag(64, "width of a head", "Sizes", min=1)
    turns: int = flag(5, "timed passes of each implementation", "Timing", min=1)
    seed: int = flag(1, "seed of the random inputs", "Timing", min=0)


def main(config: Config) -> None:
    """Check, then time. Raises `UserError` if a check fails."""
    keep_freed_memory()  # as the training scripts do
    torch.manual_seed(config.seed)
    backends = usable_backends(config.backend)
    right = check_all(backends)
    threads = torch.get_num_threads()
    print(
        f"\nforward and backward in ms, median of {config.turns}, {threads} threads; "
        "MiB kept for the backward pass, inputs included"
    )
    time_attention(config, backends)
    time_gelu(config, backends)
    if not right:
        raise UserError("an operator differs from PyTorch's: see WRONG above")


def usable_backends(wanted: str) -> list[str]:
    """The backends that work on this machine. Raises `UserError` if the wanted one does not."""
    x = torch.zeros(1, 1, 1, 1)
    backends = []
    for backend in [wanted] if wanted else BACKENDS:
        try:
            attention(x, x, x, backend=backend)
        except UserError as error:
            if wanted:
                raise
            print(f"{backend} is left out: {error}")
        else:
            backends.append(backend)
    return backends


def check_all(backends: list[str]) -> bool:
    """Print one line per operator; return whether all are right."""
    titles = ("fp32 out", "gradient", "fp64 out", "gradient")
    print(f"\n{'largest error':<24}{''.join(f'{title:>10}' for title in titles)}  gradcheck")
    results = []
    for backend in backends:
        sizes = (3, 2, 37, 41, 16, 24)  # B, H, S, T, D, W
        errors = partial(checks.check_attention, backend, sizes)
        passed = checks.gradcheck_attention(backend)
        results.append(report(f"attention, {backend}", errors, checks.terms_of(sizes), passed))
    for backend in backends:
        errors = partial(checks.check_gelu, backend)
        passed = checks.gradcheck_gelu(backend)
        results.append(report(f"gelu, {backend}", errors, checks.GELU_TERMS, passed))
    return all(results)


def report(name: str, errors: Callable, terms: int, passed: bool) -> bool:
    """Print one operator's errors by number format, and whether it `passed` gradcheck.

    Returns whether it passed and its errors are small enough.
    """
    cells = ""
    right = passed
    for dtype in (torch.float32, torch.float64):
        pair = errors(dtype)
        cells += "".join(f"{value:>10.1e}" for value in pair)
        right = right and max(pair) <= checks.allowed(dtype, terms)
    verdict = "passes" if passed else "FAILS"
    print(f"{name:<24}{cells}  {verdict}{'' if right else '  WRONG'}", flush=True)
    return right


def time_attention(config: Config, backends: list[str]) -> None:
    """Ours beside PyTorch's, without a mask."""
    contestants = {"F.scaled_dot_product_attention": F.scaled_dot_product_attention}
    for backend in backends:
        contestants[backend] = partial(attention, backend=backend)
    sizes = (
        config.batch,
        config.heads,
        config.seq,
        config.seq,
        config.width,
        config.width,
    )
    print(f"attention (B, H, S, D) = {(config.batch, config.heads, config.seq, config.width)}")
    race(contestants, checks.random_inputs(sizes, torch.float32), config.turns)


def time_gelu(config: Config, backends: list[str]) -> None:
    """Ours beside PyTorch's, on the hidden layer of a Transformer: four times the model's width."""
    contestants = {"F.gelu": F.gelu}
    for backend in backends:
        contestants[backend] = partial(gelu, backend=backend)
    shape = (config.batch * config.seq, 4 * config.heads * config.width)
    print(f"gelu of {shape}")
    race(contestants, [torch.randn(shape)], config.turns)


def race(contestants: dict[str, Callable], inputs: list[torch.Tensor], turns: int) -> None:
    """Time the contestants by turns, so that a slow moment of the machine hits all of them."""
    inputs = [x.requires_grad_() for x in inputs]
    times = {name: [] for name in contestants}
    for _ in range(turns + 1):
        for name, operator in contestants.items():
            start = time.perf_counter()
            out = operator(*inputs)
            torch.autograd.grad(out, inputs, out.detach())
            times[name].append(1e3 * (time.perf_counter() - start))
    for name, values in times.items():
        median = statistics.median(values[1:])  # the first turn warms up
        kept = kept_bytes(contestants[name], inputs) / 2**20
        print(f"  {name:<32}{median:>10.2f} ms{kept:>8.1f} MiB", flush=True)


def kept_bytes(operator: Callable, inputs: list[torch.Tensor]) -> int:
    """The memory of the tensors that autograd keeps from the forward for the backward pass."""
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        operator(*inputs)
    return sum(kept)


if __name__ == "__main__":
    settings = parse_flags(Config, "attention and GELU by hand, checked against PyTorch")
    run_script(lambda: main(settings))
