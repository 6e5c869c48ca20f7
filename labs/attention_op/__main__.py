"""Check attention and GELU written by hand against PyTorch's, then time them.

python -m labs.attention_op                               # all three implementations
python -m labs.attention_op --backend fused               # one; C++ is compiled at first use
python -m labs.attention_op --seq_length 1024 --batch_size 1
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
from torch.nn.attention import sdpa_kernel

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from labs.attention_op import checks
from labs.attention_op.operators import BACKENDS, attention, gelu


@dataclass
class Config:
    """Every setting of this lab."""

    backend: str = flag("", "only this one (python|cpp|fused); default: all", "Operators")
    batch_size: int = flag(8, "sequences", "Sizes", min=1)
    nhead: int = flag(8, "attention heads", "Sizes", min=1)
    seq_length: int = flag(256, "tokens of a sequence: queries, and keys", "Sizes", min=1)
    d_model: int = flag(512, "width of the model: all heads side by side", "Sizes", min=1)
    turns: int = flag(5, "timed passes of each implementation", "Timing", min=1)
    seed: int = flag(1, "seed of the random inputs", "Timing", min=0)


def main(config: Config) -> None:
    """Check, then time. Raises `UserError` if a check fails."""
    if config.d_model % config.nhead:
        raise UserError(
            f"--d_model {config.d_model} cannot be divided among --nhead {config.nhead} heads"
        )
    keep_freed_memory()  # as the training scripts do
    torch.manual_seed(config.seed)
    backends = usable_backends(config.backend)
    right = check_all(backends)
    threads = torch.get_num_threads()
    print(
        f"\nforward and backward, threads: {threads}, medians of {config.turns} turns"
        "\nms: on the clock, which other programs slow down; CPU ms: of all threads together"
        "\nx: python's CPU time divided by this one, in the same turn"
        "\nMiB: kept from the forward for the backward pass, inputs included"
        f"\n{'':<18}{'ms':>9}{'CPU ms':>9}{'x':>7}{'MiB':>8}"
    )
    contestants = ["python", *(backend for backend in backends if backend != "python")]
    time_attention(config, contestants)
    time_gelu(config, contestants)
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


# (B, H, S, T, D, W) for each kernel of PyTorch: flash needs D = W.
CHECKED_SIZES = {"math": (3, 2, 37, 41, 16, 24), "flash": (3, 2, 37, 41, 24, 24)}


def check_all(backends: list[str]) -> bool:
    """Print a line per operator and kernel of PyTorch; return whether all are right."""
    print(
        "\nlargest error, relative to the largest number where that is above 1; for attention over"
        "\nno mask, padding, causal, and both. right: no error is above its limit, 2 x terms x eps"
        "\n(terms: how many are summed, one sum after the other, on the way to a gradient), and"
        "\ngradcheck finds the numerical derivatives."
    )
    titles = ("fp32 out", "gradient", "limit", "fp64 out", "gradient", "limit")
    print(f"{'':<18}{'PyTorch’s':<10}{''.join(f'{title:>9}' for title in titles)}  gradcheck")
    results = []
    for backend in backends:
        passed = checks.gradcheck_attention(backend)
        for kernel, sizes in CHECKED_SIZES.items():
            errors = partial(checks.check_attention, backend, kernel, sizes)
            terms = checks.terms_of(sizes)
            results.append(report(f"attention, {backend}", kernel, errors, terms, passed))
    for backend in backends:
        passed = checks.gradcheck_gelu(backend)
        errors = partial(checks.check_gelu, backend)
        results.append(report(f"gelu, {backend}", "F.gelu", errors, checks.GELU_TERMS, passed))
    return all(results)


def report(name: str, kernel: str, errors: Callable, terms: int, passed: bool) -> bool:
    """Print one operator's errors by number format, and whether it `passed` gradcheck.

    Returns whether it passed and its errors are small enough.
    """
    cells = ""
    right = passed
    for dtype in (torch.float32, torch.float64):
        pair = errors(dtype)
        limit = checks.allowed(dtype, terms)
        cells += "".join(f"{value:>9.1e}" for value in (*pair, limit))
        right = right and max(pair) <= limit
    gradcheck = "passes" if passed else "FAILS"
    print(f"{name:<18}{kernel:<10}{cells}  {gradcheck:<9}  {'right' if right else 'WRONG'}")
    return right


def time_attention(config: Config, backends: list[str]) -> None:
    """Ours beside PyTorch's two kernels, without a mask."""
    contestants = {backend: partial(attention, backend=backend) for backend in backends}
    for kernel in checks.KERNELS:
        contestants[f"PyTorch, {kernel}"] = partial(kernel_alone, kernel)
    head = config.d_model // config.nhead
    sizes = (
        config.batch_size,
        config.nhead,
        config.seq_length,
        config.seq_length,
        head,
        head,
    )
    shape = (config.batch_size, config.nhead, config.seq_length, head)
    print(f"attention (B, H, S, D) = {shape}")
    race(contestants, checks.random_inputs(sizes, torch.float32), config.turns)


def kernel_alone(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`F.scaled_dot_product_attention` by this kernel."""
    with sdpa_kernel(checks.KERNELS[kernel]):
        return F.scaled_dot_product_attention(q, k, v)


def time_gelu(config: Config, backends: list[str]) -> None:
    """Ours beside PyTorch's, on the hidden layer of a Transformer: four times the model's width."""
    contestants = {backend: partial(gelu, backend=backend) for backend in backends}
    contestants["F.gelu"] = F.gelu
    shape = (config.batch_size * config.seq_length, 4 * config.d_model)
    print(f"gelu of {shape}")
    race(contestants, [torch.randn(shape)], config.turns)


def race(contestants: dict[str, Callable], inputs: list[torch.Tensor], turns: int) -> None:
    """Time the contestants by turns, so that a slow moment of the machine hits all of them."""
    inputs = [x.requires_grad_() for x in inputs]
    times = {name: [] for name in contestants}  # (on the clock, of the CPU) in ms
    for turn in range(turns + 1):
        for name, operator in contestants.items():
            clock, cpu = time.perf_counter(), time.process_time()
            out = operator(*inputs)
            torch.autograd.grad(out, inputs, out.detach())
            spent = 1e3 * (time.perf_counter() - clock), 1e3 * (time.process_time() - cpu)
            if turn > 0:  # the first turn warms up
                times[name].append(spent)
    for name, own in times.items():
        clock, cpu = (statistics.median(values) for values in zip(*own))
        ratio = statistics.median(
            python_cpu / own_cpu for (_, python_cpu), (_, own_cpu) in zip(times["python"], own)
        )
        kept = kept_bytes(contestants[name], inputs) / 2**20
        print(f"  {name:<16}{clock:>9.2f}{cpu:>9.2f}{ratio:>7.2f}{kept:>8.1f}", flush=True)


def kept_bytes(operator: Callable, inputs: list[torch.Tensor]) -> int:
    """The memory of the tensors that autograd keeps from the forward for the backward pass.

    PyTorch's math kernel keeps the weights P in two places, as one memory, which counts once.
    """
    kept = {}  # address → bytes

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        """Count the memory behind a kept tensor, once."""
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        operator(*inputs)
    return sum(kept.values())


if __name__ == "__main__":
    settings = parse_flags(Config, "attention and GELU by hand, checked against PyTorch")
    run_script(lambda: main(settings))
