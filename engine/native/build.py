"""C++ files of this folder, compiled at first use and called through ctypes: no Python headers, no build system, two seconds.

    kernels = library("training", NARROW="float")     # None without a compiler: callers then have a plain way
    call(kernels.embed, x, 16, 0.5)                   # tensors, ints and floats; the caller answers for shapes and formats

The compiled file stays in TORCH_EXTENSIONS_DIR (~/.cache/torch_extensions unless set), one for each version of the source, of the
compiler's command and of the processor. `CXX` names the compiler; `CXX=none` does without.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from torch import Tensor

FOLDER = Path(__file__).parent
# No -ffast-math: it would also let the whole process round small numbers to 0.
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]


@functools.cache
def library(name: str, **defined: str) -> ctypes.CDLL | None:
    """The functions of NAME.cpp with these macros defined, or None where they cannot be had; `why_not` then says why."""
    if why_not():
        return None
    try:
        return ctypes.CDLL(str(compiled(name, [f"-D{macro}={value}" for macro, value in defined.items()])))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        print(f"note: {name}.cpp does not compile here, so PyTorch's own operations are used: "
              f"{detail.strip().splitlines()[0]}", file=sys.stderr)  # fmt: skip
        return None


def why_not() -> str:
    """Why there can be no compiled functions here; empty if there can."""
    if sys.platform != "linux":
        return "they are for Linux"
    return "" if shutil.which(compiler()) else f"no compiler {compiler()!r}; install g++"


def compiler() -> str:
    """The C++ compiler's command."""
    return os.environ.get("CXX", "g++")


def compiled(name: str, macros: list[str]) -> Path:
    """The shared object of NAME.cpp, built unless it is there. Raises `CalledProcessError` or `OSError`."""
    command = [compiler(), *FLAGS, *macros, str(FOLDER / f"{name}.cpp")]
    sources = [path.read_bytes() for path in (FOLDER / f"{name}.cpp", *sorted(FOLDER.glob("*.h")))]
    version = hashlib.sha256(repr((sources, command[:-1], processor())).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    file = cache / f"{name}_{version}.so"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            new = f"{scratch}/new.so"
            subprocess.run([*command, "-o", new], check=True, capture_output=True, text=True)
            os.replace(new, file)  # whole at once: processes that build it together do not meet half of it
    return file


def processor() -> str:
    """What `-march=native` looks at: a home folder may be shared by machines of several kinds."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *sorted({line for line in cpuinfo.splitlines() if line.startswith(wanted)})])


def call(function, *arguments: Tensor | ctypes.Structure | int | float | None) -> None:
    """Call a C function: a tensor or structure goes as its address, None as null, ints with 64 bits."""
    function(*map(for_c, arguments))


def for_c(argument: Tensor | ctypes.Structure | int | float | None):
    """An argument as C has it."""
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    return ctypes.c_void_p(None) if argument is None else ctypes.c_int64(argument)
