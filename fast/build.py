"""C++ files, compiled at their first use and called through ctypes.

    kernels = library(FOLDER / "kernels.cpp", NARROW="float")   # None if nothing can be compiled
    call(kernels.embed, x, 16, 0.5)                             # tensors, ints and floats

Neither Python's headers nor a build system is needed, and a file takes a few seconds. The result is
kept in TORCH_EXTENSIONS_DIR/fast (default: ~/.cache/torch_extensions/fast), one file for each
version of the source, of PyTorch, of the compiler and its command, and of the processor.
The environment variable CXX names the compiler; CXX=none does without. FAST_CPU=avx2 compiles for
processors without AVX-512.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.devices import as_avx2, cpuinfo

FOLDER = Path(__file__).parent
TORCH = Path(torch.__file__).parent
# No -ffast-math: it would make the whole process round small numbers to 0.
FLAGS = "-O3 -std=c++17 -fopenmp -fno-math-errno -fno-trapping-math -shared -fPIC"
OUTPUT: dict[str, Any] = dict(capture_output=True, text=True, errors="replace")


@functools.cache
def library(source: Path, **macros: str) -> ctypes.CDLL | None:
    """The functions of a C++ file compiled with these macros, or None if that is not possible."""
    if why_not():
        return None
    try:
        return ctypes.CDLL(str(compiled(source, **macros)))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        reason = reason_of(error)
    note = f"note: {source.name} could not be compiled, so slower PyTorch code is used: {reason}"
    print(note, file=sys.stderr)
    return None


def reason_of(error: Exception) -> str:
    """Why compiling or loading failed, in one line: the first error of compiler or linker."""
    message = str(error)
    if isinstance(error, subprocess.CalledProcessError):
        message = error.stderr.strip() or f"{error.cmd[0]} ended with {error.returncode}"
    lines = message.splitlines()
    # The linker's own errors come before the line "collect2: error: ld returned 1 exit status".
    errors = [line for line in lines if "error:" in line or "ld: " in line]
    return (errors or lines or ["no reason given"])[0]


def why_not() -> str:
    """Why C++ cannot be compiled on this machine; empty if it can."""
    if sys.platform != "linux":
        return "the C++ functions need Linux"
    try:
        command = compiler()
    except ValueError as error:
        return f"CXX={os.environ['CXX']}: {error}"
    if command == ["none"]:
        return "CXX=none"
    if not shutil.which(command[0]):
        return f"no compiler {command[0]!r}; install g++"
    return ""


def compiler() -> list[str]:
    """The C++ compiler's command. Raises `ValueError` for a quote that is never closed."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def compiled(source: Path, **macros: str) -> Path:
    """The shared library made of this file, built if it is not in the cache.

    Raises `CalledProcessError` if the compiler fails, `OSError` if the cache cannot be used,
    `RuntimeError` if there is no home folder.
    """
    command = [*compiler(), *FLAGS.split(), "-march=haswell" if as_avx2() else "-march=native"]
    command += [f"-D{macro}={value}" for macro, value in macros.items()]
    code = source.read_text(encoding="utf-8")
    headers = [header.read_text(encoding="utf-8") for header in sorted(FOLDER.glob("*.h"))]
    # `module load` changes what is behind a command.
    compiler_version = subprocess.run([*compiler(), "--version"], check=True, **OUTPUT).stdout
    versions = (code, headers, command, compiler_version, torch.__version__, processor())
    digest = hashlib.sha256(repr(versions).encode()).hexdigest()[:12]

    default = "~/.cache/torch_extensions"
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(default).expanduser()) / "fast"
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.mkdir(mode=0o700, exist_ok=True)
    file = cache / f"{source.stem}_{digest}.so"
    if file.exists():
        return file

    command += [f"-I{FOLDER}", str(source)]
    if "#include <c10/" in code or "#include <ATen/" in code:
        command += [f"-isystem{TORCH / 'include'}", f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        new = Path(scratch) / file.name
        english = os.environ | {"LC_ALL": "C"}
        subprocess.run([*command, "-o", new], check=True, env=english, **OUTPUT)
        with new.open("rb") as written:
            os.fsync(written.fileno())  # a file that a power failure cut short would crash us
        os.replace(new, file)  # several processes may build it at once: the last one wins
    return file


def has_vnni() -> bool:
    """Whether the processor has AVX-512 VNNI: products of 8-bit integers."""
    return "avx512_vnni" in cpuinfo().split()


def processor() -> str:
    """What `-march=native` depends on: machines of several kinds may share a home folder."""
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = {line for line in cpuinfo().splitlines() if line.startswith(wanted)}
    return "\n".join([platform.machine(), *sorted(lines)])


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below `number`."""
    return -(-number // multiple) * multiple


def call(function, *arguments: Tensor | ctypes.Structure | int | float | None) -> None:
    """Call a C function. The caller is responsible for shapes and formats.

    A tensor or structure is passed as its address, None as a null pointer, an int as int64_t, a
    float as double.
    """
    function(*map(for_c, arguments))


def for_c(argument: Tensor | ctypes.Structure | int | float | None):
    """The ctypes form of one argument of `call`."""
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    return ctypes.c_int64(argument)
