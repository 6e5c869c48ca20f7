"""Check attention and GELU written by hand against PyTorch's, then time them.

python -m labs.attention_op                              # all that this machine can run
python -m labs.attention_op --backend cpp                # one implementation; the C++ one is built at first use
python -m labs.attention_op --seq 1024 --batch 1         # other sizes
python -m benchmarks.attention_op                        # the full measurement, with memory
"""

from dataclasses import dataclass

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Every setting of this lab."""

    backend: str = flag(
        "", "check this one only (python|recompute|cpp); all that run here", "Operators"
    )
    batch: int = flag(8, "rows", "Sizes", min=1)
    heads: int = flag(8, "attention heads", "Sizes", min=1)
    seq: int = flag(256, "queries, and keys, of a row", "Sizes", min=1)
    width: int = flag(64, "width of a head", "Sizes", min=1)
    turns: int = flag(5, "times everybody is timed", "Timing", min=1)
    seed: int = flag(1, "of the random inputs", "Timing", min=0)


if (
    __name__ == "__main__"
):  # before the heavy imports, so that --help and a wrong flag answer at once
    config = parse_flags(Config, "attention and GELU by hand, checked against PyTorch")

import statistics
import sys
import time
from functools import partial

import torch
import torch.nn.functional as F

from engine.memory import keep_freed_memory
from labs.attention_op import checks
from labs.attention_op.operators import ATTENTION_BACKENDS, GELU_BACKENDS, attention, gelu


def main(config: Config) -> None:
    """Checks, then times; exit code 1 if a check fails."""
    keep_freed_memory()  # as the training scripts do
    torch.manual_seed(config.seed)
    backends = usable(config.backend)
    right = check(backends)
    print(
        f"\nforward and backward, ms, median of {config.turns}; {torch.get_num_threads()} threads"
    )
    time_attention(config, backends)
    time_gelu(config, backends)
    if not right:
        print("a check has failed", file=sys.stderr)
        sys.exit(1)


def usable(wanted: str) -> list[str]:
    """The backends that run here. One that does not is named with its reason; if it is the one wanted, that is an error."""
    backends = []
    for backend in [wanted] if wanted else ATTENTION_BACKENDS:
        x = torch.zeros(1, 1, 1, 16)
        try:
            attention(x, x, x, backend=backend)
            backends.append(backend)
        except UserError as error:
            if wanted:
                raise
            print(f"{backend}: left out, {error}")
    return backends


def check(backends: list[str]) -> bool:
    """One line for each operator; → whether all are right."""
    print(
        f"\n{'largest error against PyTorch':<28}{'fp32 out':>10}{'gradient':>10}{'fp64 out':>10}{'gradient':>10}  gradcheck"
    )
    right = [check_attention(backend) for backend in backends]
    right += [
        check_gelu(backend, kind)
        for backend in backends
        if backend in GELU_BACKENDS
        for kind in ("none", "tanh")
    ]
    return all(right)


def check_attention(backend: str) -> bool:
    """Sizes that are no multiples of a block."""
    sizes = (3, 2, 37, 41, 16, 24)  # B, H, S, T, D, W
    errors = {
        dtype: checks.check_attention(backend, sizes, dtype)
        for dtype in (torch.float32, torch.float64)
    }
    derivative = checks.gradcheck_attention(backend)
    return check_line("attention", backend, checks.terms_of(sizes), errors, derivative)


def check_gelu(backend: str, kind: str) -> bool:
    """The same for one kind of GELU."""
    errors = {
        dtype: checks.check_gelu(backend, kind, dtype) for dtype in (torch.float32, torch.float64)
    }
    return check_line(
        f"gelu {kind}", backend, checks.GELU_TERMS, errors, checks.gradcheck_gelu(backend, kind)
    )


def check_line(operator: str, backend: str, terms: int, errors: dict, derivative: bool) -> bool:
    """Print the errors of one operator, by number format; → whether they are small enough."""
    small = all(
        max(pair) <= checks.allowed(backend, dtype, terms) for dtype, pair in errors.items()
    )
    right = small and derivative
    cells = "".join(f"{value:>10.1e}" for pair in errors.values() for value in pair)
    verdict = "passes" if derivative else "FAILS"
    print(
        f"{operator + ', ' + backend:<28}{cells:<40}  {verdict}{'' if right else '  WRONG'}",
        flush=True,
    )
    return right


def time_attention(config: Config, backends: list[str]) -> None:
    """Ours beside PyTorch's, no mask."""
    contestants = {"F.scaled_dot_product_attention": F.scaled_dot_product_attention}
    contestants |= {backend: partial(attention, backend=backend) for backend in backends}
    sizes = (config.batch, config.heads, config.seq, config.seq, config.width, config.width)
    print(f"attention (B, H, S, D) = {(config.batch, config.heads, config.seq, config.width)}")
    race(contestants, checks.random_inputs(sizes, torch.float32), config.turns)


def time_gelu(config: Config, backends: list[str]) -> None:
    """Ours beside PyTorch's, the exact one."""
    contestants = {"F.gelu": F.gelu}
    for backend in backends:
        if backend in GELU_BACKENDS:
            contestants[backend] = partial(gelu, backend=backend)
    # The hidden layer of a Transformer of this width: four times as wide.
    shape = (config.batch * config.seq, 4 * config.heads * config.width)
    print(f"gelu of {shape}")
    race(contestants, [torch.randn(shape)], config.turns)


def race(contestants: dict, inputs: list[torch.Tensor], turns: int) -> None:
    """In turns, so that a slow moment of the machine hits all alike; the first turn is not counted."""
    times = {name: [] for name in contestants}
    inputs = [x.requires_grad_() for x in inputs]
    for _ in range(turns + 1):
        for name, operator in contestants.items():
            begun = time.perf_counter()
            out = operator(*inputs)
            torch.autograd.grad(out, inputs, out.detach())
            times[name].append(1e3 * (time.perf_counter() - begun))
    for name, values in times.items():
        print(f"  {name:<36}{statistics.median(values[1:]):>10.2f}", flush=True)


if __name__ == "__main__":
    run_script(lambda: main(config))
