"""The C++ operators: built at first use, known to PyTorch as `torch.ops.attention_op.*`.

The library stays in TORCH_EXTENSIONS_DIR (~/.cache/torch_extensions unless set), one for each version of the source, of PyTorch
and of the processor's instructions: later processes only load it, and need no compiler.
"""

import fcntl
import functools
import hashlib
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import UserError

SOURCE = Path(__file__).with_name("operators.cpp")
BUILD = "the C++ operators cannot be built"
LOAD = "the C++ operators cannot be loaded"
WITHOUT = "or choose 'python'"


def cpp_gelu(x: Tensor, approximate: str) -> Tensor:
    """`gelu` in C++."""
    check_device("gelu", x)
    return library().gelu(x, approximate == "tanh")


def cpp_attention(
    q, k, v, bias, causal: bool, scale: float, dropout: float, seed: Tensor | None
) -> Tensor:
    """`attention` in C++."""
    check_device("attention", q)
    return library().attention(q, k, v, bias, causal, scale, dropout, seed)[0]


def check_device(operator: str, x: Tensor) -> None:
    """Raises `UserError` off the CPU."""
    if x.device.type not in ("cpu", "meta"):
        raise UserError(
            f"{operator}: 'cpp' is for the CPU, not for {x.device}; choose 'python', or --device cpu"
        )


@torch.compiler.assume_constant_result
def built() -> bool:
    """Build and register, once in a process; a compiler that traces a model is not to look inside."""
    return load() is not None


def library():
    """`torch.ops.attention_op`, with everything PyTorch has to know about it."""
    built()
    return torch.ops.attention_op


@functools.cache
def load() -> Path:
    """Build the library unless it is there, load and register it; → its file."""
    flags = compiler_flags()
    file = library_file(flags)
    try:
        if not file.exists():
            build(file, flags)
        torch.ops.load_library(file)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{LOAD}: {reason}; remove {file.parent} to have them built anew, {WITHOUT}"
        ) from None
    register()
    return file


def library_file(flags: list[str]) -> Path:
    """Where the library of this source, this PyTorch and these flags is, or will be."""
    from torch.utils import cpp_extension  # slow to import

    version = hashlib.sha256(
        repr((SOURCE.read_bytes(), torch.__version__, flags)).encode()
    ).hexdigest()[:12]
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    return root / f"attention_op_{version}" / f"attention_op_{version}.so"


def compiler_flags() -> list[str]:
    """Optimise, for several cores, and for the vectors that PyTorch itself uses on this processor."""
    # -fopenmp for the compiler only: linked, it could bring a second OpenMP beside PyTorch's own, with threads of its own.
    flags = ["-O3"] + (["-fopenmp"] if sys.platform == "linux" else [])
    vectors = {
        "AVX2": ["-mavx2", "-mfma", "-mf16c"],
        "AVX512": ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mf16c"],
    }
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in vectors:
        flags += [
            *vectors[capability],
            f"-DCPU_CAPABILITY={capability}",
            f"-DCPU_CAPABILITY_{capability}",
        ]
    return flags


def build(file: Path, flags: list[str]) -> None:
    """Compile and link; one process builds while the others that were started with it wait. Raises `UserError`.

    The file appears when it is whole: a build that is killed leaves nothing that the next process takes for a library.
    """
    from torch.utils import cpp_extension

    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise UserError(
            f"{BUILD}: no compiler {compiler!r}; install g++ 11 or later or set CXX, {WITHOUT}"
        )
    if not cpp_extension.is_ninja_available():
        raise UserError(f"{BUILD}: no ninja; `pip install ninja`, {WITHOUT}")
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.parent / "mine", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go of by the kernel, however the process ends
        if file.exists():  # another process has built it meanwhile
            return
        scratch = file.parent / "scratch"
        # What a killed build has left, PyTorch's own lock file too, for which it would wait for ever.
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        print(
            "building the C++ operators; this takes some ten seconds, once",
            file=sys.stderr,
            flush=True,
        )
        try:
            # PyTorch writes this one path into the linker's command without quotes.
            cpp_extension.TORCH_LIB_PATH = shlex.quote(str(Path(torch.__file__).with_name("lib")))
            # A library, not a module of Python: it registers itself with PyTorch when it is loaded.
            cpp_extension.load(
                file.stem,
                [str(SOURCE)],
                extra_cflags=flags,
                build_directory=str(scratch),
                is_python_module=False,
            )
        except RuntimeError as error:
            lines = str(error).splitlines()
            reason = next(
                (
                    line
                    for line in lines
                    if re.search("error", line, re.I) and "Error building" not in line
                ),
                lines[0],
            )
            raise UserError(
                f"{BUILD} with {compiler}: {reason.strip()}; g++ 11 or later is needed, {WITHOUT}"
            ) from None
        os.replace(
            scratch / file.name, file
        )  # loaded already, and the same file to the system: it is not loaded twice
        shutil.rmtree(scratch, ignore_errors=True)


def register() -> None:
    """Shapes for `torch.compile`, which traces without data, and the backward passes."""
    define = torch.library

    @define.register_fake("attention_op::gelu")
    def _(x, tanh):
        return x.new_empty(x.shape)

    @define.register_fake("attention_op::gelu_backward")
    def _(grad, x, tanh):
        return x.new_empty(x.shape)

    @define.register_fake("attention_op::attention")
    def _(q, k, v, bias, causal, scale, dropout, seed):
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        return q.new_empty(*q.shape[:3], v.size(3)), q.new_empty(*q.shape[:3], 2, dtype=wide)

    @define.register_fake("attention_op::attention_backward")
    def _(grad, q, k, v, bias, out, log_sum, causal, scale, dropout, seed):
        return tuple(x.new_empty(x.shape) for x in (q, k, v))

    define.register_autograd("attention_op::gelu", gelu_backward, setup_context=keep_for_gelu)
    define.register_autograd(
        "attention_op::attention", attention_backward, setup_context=keep_for_attention
    )
    for operator in ("gelu_backward", "attention_backward"):
        define.register_autograd(f"attention_op::{operator}", refuse_second_derivative)


def keep_for_gelu(ctx, inputs: tuple, output: Tensor) -> None:
    """For the backward pass: x."""
    x, ctx.tanh = inputs
    ctx.save_for_backward(x)


def gelu_backward(ctx, grad: Tensor):
    """→ the gradients of x and of `tanh`, which has none."""
    return torch.ops.attention_op.gelu_backward(grad, *ctx.saved_tensors, ctx.tanh), None


def keep_for_attention(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    """For the backward pass: the inputs, the output and ℓ."""
    q, k, v, bias, ctx.causal, ctx.scale, ctx.dropout, seed = inputs
    ctx.save_for_backward(q, k, v, bias, *output, seed)
    ctx.mark_non_differentiable(output[1])  # ℓ is for the backward pass


def attention_backward(ctx, grad: Tensor, _):
    """→ the gradients of q, k and v; the mask and the settings have none."""
    *tensors, seed = ctx.saved_tensors
    settings = ctx.causal, ctx.scale, ctx.dropout
    grads = torch.ops.attention_op.attention_backward(grad, *tensors, *settings, seed)
    return *grads, None, None, None, None, None


def refuse_second_derivative(ctx, *grads):
    """The backward operators have no backward pass of their own."""
    raise RuntimeError("the C++ operators can be differentiated once; take PyTorch's own for more")
