"""C++ files, compiled at first use and called through ctypes: no Python headers, no build system, two seconds.

    kernels = library(FOLDER / "kernels.cpp", NARROW="float")     # None without a compiler: callers then take the plain way
    call(kernels.embed, x, 16, 0.5)  # tensors, ints and floats; the caller answers for shapes and formats

The compiled file stays in TORCH_EXTENSIONS_DIR (~/.cache/torch_extensions unless set), one for each version of the source, of the
compiler's command and of the processor. `CXX` names the compiler; `CXX=none` does without.
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

from torch import Tensor

FOLDER = Path(__file__).parent
WHOLE = b"whole"  # the last bytes of a compiled file: one that is cut short would end the process when it is loaded
# No -ffast-math: it would also let the whole process round small numbers to 0.
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]


@functools.cache
def library(source: Path, **defined: str) -> ctypes.CDLL | None:
    """The functions of this file with these macros defined, or None where they cannot be had."""
    if why_not():
        return None
    macros = [f"-D{macro}={value}" for macro, value in defined.items()]
    try:
        file = compiled(source, macros)
        try:
            return ctypes.CDLL(str(file))
        except OSError:  # of another C library, or damaged: once more
            file.unlink()
            return ctypes.CDLL(str(compiled(source, macros)))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # RuntimeError: there is no home folder
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[0] if lines else "no reason given")
        print(f"note: PyTorch's own operations do what {source.name} would do faster: {reason}", file=sys.stderr)
        return None


def why_not() -> str:
    """Why there can be no compiled functions here; empty if there can."""
    if sys.platform != "linux":
        return "they are for Linux"
    if compiler() == ["none"]:
        return "CXX=none"
    return "" if shutil.which(compiler()[0]) else f"no compiler {compiler()[0]!r}"


def compiler() -> list[str]:
    """The C++ compiler's command."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def compiled(source: Path, macros: list[str]) -> Path:
    """The shared object of this file, built unless it is there. Raises `CalledProcessError`, `RuntimeError` or `OSError`."""
    command = [*compiler(), *FLAGS, *macros, f"-I{FOLDER}", str(source)]
    texts = [path.read_bytes() for path in (source, *sorted(FOLDER.glob("*.h")))]
    version = hashlib.sha256(repr((texts, command[:-2], processor())).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    file = cache / f"{source.stem}_{version}.so"
    if not file.exists() or not file.read_bytes().endswith(WHOLE):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            new = f"{scratch}/new.so"
            subprocess.run([*command, "-o", new], check=True, capture_output=True, text=True)
            with open(new, "ab") as end:
                end.write(WHOLE)
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
