"""C++ files, compiled at first use and called through ctypes: no Python headers, no build system, a few seconds.

    kernels = library(FOLDER / "kernels.cpp", NARROW="float")     # None without a compiler: callers then take the plain way
    call(kernels.embed, x, 16, 0.5)  # tensors, ints and floats; the caller answers for shapes and formats

The compiled file stays in TORCH_EXTENSIONS_DIR/fast (~/.cache/torch_extensions/fast unless set), one for each version of the
source, of PyTorch, of the compiler's command and of the processor, with its hash beside it; only files are loaded that nobody
else could have written. `CXX` names the compiler; `CXX=none` does without.
"""

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

FOLDER, TORCH = Path(__file__).parent, Path(torch.__file__).parent
# No -ffast-math: it would also let the whole process round small numbers to 0.
FLAGS = [
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
]


@functools.cache
def library(source: Path, **defined: str) -> ctypes.CDLL | None:
    """The functions of this file with these macros defined, or None where nothing can be compiled."""
    if why_not():
        return None
    try:
        return ctypes.CDLL(
            str(compiled(source, [f"-D{macro}={value}" for macro, value in defined.items()]))
        )
    except (
        OSError,
        RuntimeError,
        subprocess.CalledProcessError,
    ) as error:  # RuntimeError: there is no home folder
        print(
            f"note: {source.name} could not be compiled, so slower PyTorch code is used: "
            f"{reason_of(error)}",
            file=sys.stderr,
        )
        return None


def reason_of(error: Exception) -> str:
    """Why compiling or loading failed, in one line: the compiler's first error."""
    lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
    first = lines[0] if lines else "no reason given"
    return next((line for line in lines if "error" in line), first)


def why_not() -> str:
    """Why there can be no compiled functions here; empty if there can."""
    if sys.platform != "linux":
        return "the C++ functions need Linux"
    if compiler() == ["none"]:
        return "CXX=none"
    return "" if shutil.which(compiler()[0]) else f"no compiler {compiler()[0]!r}"


def compiler() -> list[str]:
    """The C++ compiler's command."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def compiled(source: Path, macros: list[str]) -> Path:
    """The shared object of this file, built unless it is there. Raises `CalledProcessError`, `RuntimeError` or `OSError`."""
    command = [*compiler(), *FLAGS, *macros]
    paths = [f"-I{FOLDER}", str(source)]
    texts = [path.read_bytes() for path in (source, *sorted(FOLDER.glob("*.h")))]
    if b"#include <c10/" in texts[0] or b"#include <ATen/" in texts[0]:
        paths += [f"-isystem{TORCH / 'include'}", f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    version = hashlib.sha256(
        repr((texts, command, torch.__version__, processor())).encode()
    ).hexdigest()[:12]
    cache = own_folder(
        Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
        / "fast"
    )
    file, digest = cache / f"{source.stem}_{version}.so", cache / f"{source.stem}_{version}.sha256"
    # It may be missing, planted or damaged.
    if not (
        is_ours(file) and is_ours(digest) and hash_of(file) == digest.read_text(errors="replace")
    ):
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            new = Path(scratch)
            told = dict(
                capture_output=True, text=True, errors="replace", env=os.environ | {"LC_ALL": "C"}
            )
            subprocess.run(
                [*command, *paths, "-o", new / "new.so"], check=True, **told
            )  # in English
            (new / "new.sha256").write_text(hash_of(new / "new.so"))
            for made in new.iterdir():
                made.chmod(0o700)  # whatever the umask
            # Each is whole at once. Processes that build it together may part file and hash; then it is built once more.
            os.replace(new / "new.so", file)
            os.replace(new / "new.sha256", digest)
    return file


def own_folder(folder: Path) -> Path:
    """This folder, made if need be; a new private one where others could put their own code into it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if is_ours(folder):
        return folder
    print(
        f"note: others can write to {folder}, so compiled functions are not kept there",
        file=sys.stderr,
    )
    private = Path(tempfile.mkdtemp(prefix="compiled-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return private


def is_ours(path: Path) -> bool:
    """Whether this is a file or folder, not a link, of this user's that nobody else can write to."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return (
        status.st_uid == os.geteuid()
        and not stat.S_ISLNK(status.st_mode)
        and not status.st_mode & 0o022
    )


def hash_of(file: Path) -> str:
    """Hex digest of the content."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def processor() -> str:
    """What `-march=native` looks at: a home folder may be shared by machines of several kinds."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(
        [
            platform.machine(),
            *sorted({line for line in cpuinfo.splitlines() if line.startswith(wanted)}),
        ]
    )


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
