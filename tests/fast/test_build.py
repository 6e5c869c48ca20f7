"""C++ is compiled once, kept, built anew where it is broken; without a compiler a line says why, and nothing else happens."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANGS, ROOT
from random_models import needs_compiler

from fast import build

SOURCE = 'extern "C" long number() { return NUMBER; }\n'
library = build.library.__wrapped__  # without what is remembered of the calls before


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A short C++ file, and a cache of compiled files of its own, the folder `cache`."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    path = tmp_path / "short.cpp"
    path.write_text(SOURCE)
    return path


def kept(source) -> list:
    """The compiled files; each has its hash beside it, and nothing half-made is left."""
    files = sorted((source.parent / "cache" / "fast").glob("*"))
    assert sorted(file.with_suffix(".sha256") for file in files[1::2]) == files[::2]
    return files[1::2]


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


def cut_short(file) -> None:
    """To load it would end the process by a bus error."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])


def planted(file) -> None:
    """A link to a file of somebody else's."""
    other = file.parents[2] / "other.so"
    other.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(other)


@needs_compiler
@pytest.mark.parametrize(
    "change", [cut_short, planted, lambda f: f.chmod(0o777), lambda f: f.write_text("x")]
)
def test_a_file_that_is_not_as_it_was_made_is_built_anew(source, change):
    build.compiled(source, ["-DNUMBER=7"])
    (file,) = kept(source)
    change(file)
    assert library(source, NUMBER="7").number() == 7 and kept(source) == [file]
    assert build.is_ours(file) and build.hash_of(file) == file.with_suffix(".sha256").read_text()


@needs_compiler
def test_a_folder_that_others_can_write_to_is_not_used(source, capsys):
    (source.parent / "cache" / "fast").mkdir(parents=True)
    (source.parent / "cache" / "fast").chmod(0o777)
    assert library(source, NUMBER="7").number() == 7 and not kept(source)
    assert capsys.readouterr().err.count("others can write to") == 1


def test_without_a_compiler_nothing_is_written(source, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "linux")
    for compiler, reason in (
        ("no-such-compiler -O1", "no compiler 'no-such-compiler'"),
        ("none", "CXX=none"),
    ):
        monkeypatch.setenv("CXX", compiler)
        assert library(source, NUMBER="7") is None and build.why_not() == reason
    monkeypatch.setattr(sys, "platform", "darwin")
    assert library(source, NUMBER="7") is None and build.why_not() == "the C++ functions need Linux"
    assert not kept(source) and capsys.readouterr() == (
        "",
        "",
    )  # whoever asked says so, in a line of its own


@needs_compiler
@pytest.mark.parametrize("case", ["the compiler fails", "the folder cannot be written"])
def test_what_fails_is_one_line(source, monkeypatch, capsys, case):
    if case == "the compiler fails":
        compiler = source.parent / "c++"
        compiler.write_text(
            "#!/bin/sh\necho 'some words' >&2; echo 'error: too old for this' >&2\nexit 1\n"
        )
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", shlex.quote(str(compiler)))
    else:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(source / "cache"))  # below a file
    assert library(source, NUMBER="7") is None
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("note: ") and printed.err.count("\n") == 1
    assert (
        "error: too old for this" if case == "the compiler fails" else "Not a directory"
    ) in printed.err


@pytest.mark.slow
@needs_compiler
def test_the_kernels_run_clean_under_sanitizers(tmp_path):
    """Their tests, hostile token ids among them, where the first access outside a tensor ends the process."""
    names = ("libasan.so", "libubsan.so")
    paths = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True) for name in names
    ]
    if not all(path.startswith("/") for path in paths):
        pytest.skip("g++ has no sanitizers here")
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(path.strip() for path in paths),
        "ASAN_OPTIONS": "detect_leaks=0",
        "CXX": "g++ -g -fsanitize=address,undefined -fno-sanitize-recover=undefined",
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
    }
    files = [
        Path(__file__).with_name(f"test_{name}.py")
        for name in ("kernels", "compiled_decoding", "training")
    ]
    words = [sys.executable, "-m", "pytest", "-x", "-p", "no:randomly", *files]
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
