"""C++ is compiled once and kept; without a compiler one line says why."""

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANGS, ROOT
from random_models import needs_compiler

from engine.devices import cpuinfo
from fast import build

SOURCE = 'extern "C" long number() { return NUMBER; }\n'
library = build.library.__wrapped__  # without the cache of earlier calls


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A short C++ file, and a cache of compiled files of its own, the folder `cache`."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    path = tmp_path / "short.cpp"
    path.write_text(SOURCE)
    return path


def kept(source) -> list:
    """The files in the cache: nothing half-made is left."""
    return sorted((source.parent / "cache" / "fast").glob("*"))


@needs_compiler
def test_compiled_once_and_kept_one_file_for_each_version(source, monkeypatch):
    assert library(source, NUMBER="7").number() == 7
    (file,) = kept(source)
    written = file.stat().st_mtime_ns
    assert library(source, NUMBER="7").number() == 7
    assert kept(source) == [file] and file.stat().st_mtime_ns == written
    assert library(source, NUMBER="8").number() == 8
    source.write_text(SOURCE + "// changed")
    library(source, NUMBER="7")
    monkeypatch.setattr(build, "processor", lambda: "another one, with the same home folder")
    library(source, NUMBER="7")
    monkeypatch.setenv("CXX", "env g++")
    library(source, NUMBER="7")
    assert len(kept(source)) == 5


@needs_compiler
def test_another_version_of_the_compiler_compiles_again(source, monkeypatch):
    compiler = source.parent / "c++"
    monkeypatch.setenv("CXX", shlex.quote(str(compiler)))
    for version in (12, 13, 13):
        compiler.write_text(
            f'#!/bin/sh\nif [ "$1" = --version ]; then echo {version}; else exec g++ "$@"; fi\n'
        )
        compiler.chmod(0o755)
        assert library(source, NUMBER="7").number() == 7
    assert len(kept(source)) == 2


def test_without_a_compiler_nothing_is_written(source, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    compilers = {
        "no-such-compiler -O1": "no compiler 'no-such-compiler'; install g++",
        "none": "CXX=none",
        'g++ "': 'CXX=g++ ": No closing quotation',
    }
    for compiler, reason in compilers.items():
        monkeypatch.setenv("CXX", compiler)
        assert library(source, NUMBER="7") is None and build.why_not() == reason
    monkeypatch.setattr(sys, "platform", "darwin")
    assert library(source, NUMBER="7") is None and build.why_not() == "the C++ functions need Linux"
    assert not kept(source)
    assert capsys.readouterr() == ("", "")  # the caller prints the reason


# Writes half a file to the path behind -o, which comes last.
BROKEN = """#!/bin/sh
for last; do :; done
if [ "$last" != --version ]; then echo half > "$last"; fi
echo 'some words' >&2; echo 'error: too old for this' >&2
exit 1
"""


@needs_compiler
@pytest.mark.parametrize(
    "reason",
    ["error: too old for this", "Not a directory", "cannot find -lnone", "false ended with 1"],
)
def test_a_failure_leaves_one_line_and_no_file(source, monkeypatch, capsys, reason):
    if reason == "Not a directory":
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(source / "cache"))  # below a file
    elif reason == "cannot find -lnone":
        monkeypatch.setenv("CXX", "g++ -lnone")
    elif reason == "false ended with 1":
        monkeypatch.setenv("CXX", "false")
    else:
        compiler = source.parent / "c++"
        compiler.write_text(BROKEN)
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", shlex.quote(str(compiler)))
    assert library(source, NUMBER="7") is None
    assert not kept(source)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("note: ") and err.count("\n") == 1 and reason in err


@pytest.mark.slow
@needs_compiler
def test_the_kernels_run_clean_under_sanitizers(tmp_path):
    """Their tests, hostile token ids too; the first access outside a tensor ends the process."""
    names = ("libasan.so", "libubsan.so")
    paths = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True) for name in names
    ]
    if not all(path.startswith("/") for path in paths):
        pytest.skip("g++ has no sanitizers here")
    run_tests_of_kernels(
        tmp_path,
        LD_PRELOAD=" ".join(path.strip() for path in paths),
        ASAN_OPTIONS="detect_leaks=0",
        CXX="g++ -g -fsanitize=address,undefined -fno-sanitize-recover=undefined",
    )


# Replaces -march=native, which comes after all options of CXX.
FOR_ANOTHER = """#!/bin/bash
exec g++ "${@/-march=native/-march=PROCESSOR}"
"""


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86 processor")
@pytest.mark.parametrize("name, flag", [("x86-64", "sse2"), ("haswell", "avx2")])
def test_the_kernels_are_right_on_processors_without_avx512(name, flag, tmp_path):
    """Vectors of 4 and of 8 numbers, on whatever processor this is."""
    if flag not in cpuinfo().split():
        pytest.skip(f"this processor has no {flag}")
    compiler = tmp_path / "c++"
    compiler.write_text(FOR_ANOTHER.replace("PROCESSOR", name))
    compiler.chmod(0o755)
    run_tests_of_kernels(tmp_path, CXX=shlex.quote(str(compiler)))


def run_tests_of_kernels(folder: Path, **variables: str) -> None:
    """Run them in a process with these variables; what is compiled goes to `folder`."""
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), **variables}
    files = [
        Path(__file__).with_name(f"test_{name}.py")
        for name in ("kernels", "kernel_layers", "compiled_decoding")
    ]
    words = [sys.executable, "-m", "pytest", "-x", "-p", "no:randomly", *files]
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
