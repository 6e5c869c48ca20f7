"""No import runs upward."""

import ast
import importlib
import os
import re
from itertools import chain
from pathlib import Path

import pytest
from conftest import ROOT

import engine

FOLDERS = ("engine", "fast", "text", "tools", "labs", "benchmarks")
NOUNS = {path.stem for path in ROOT.glob("*.py")}
SCRIPTS = {"train", "evaluate", "translate", "report"}
MAY_IMPORT = {
    "root": {"fast", "text", "engine", "tools", *NOUNS},
    "labs": {"labs", "fast", "text", "engine", "tools", *NOUNS} - SCRIPTS,
    "tools": {"tools", "fast", "text", "engine", *NOUNS} - SCRIPTS,
    "fast": {"fast", "engine"},
    "text": {"text", "engine"},
    "engine": {"engine"},
}


def files(folder: str) -> list[Path]:
    found = ROOT.glob("*.py") if folder == "root" else (ROOT / folder).rglob("*.py")
    return sorted(found)


def imports(tree: ast.AST) -> set[tuple[str, int]]:
    """(first part of what is imported, column of the import) in a file; column 0: at the top."""
    names = set()
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
        names |= {(module.split(".")[0], node.col_offset) for module in modules}
    return names


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_no_import_runs_upward(folder):
    upward = {
        (str(path.relative_to(ROOT)), module, column)
        for path in files(folder)
        for module, column in imports(ast.parse(path.read_text(encoding="utf-8")))
        if module in {*FOLDERS, *NOUNS, "tests"} - MAY_IMPORT[folder]
    }
    # attention by hand: the lab starts train.py, with another model
    assert upward - {("labs/attention_op/train.py", "train", 0)} == set()


def test_no_lab_imports_another():
    for path in files("labs"):
        lab = path.relative_to(ROOT / "labs").parts[0]
        named = re.findall(r"(?:from|import) labs\.(\w+)", path.read_text(encoding="utf-8"))
        assert set(named) <= {lab}, path


def test_the_engine_comes_before_pytorch():
    """It sets how PyTorch's threads wait; they read that setting only once."""
    scripts = [ROOT / f"{name}.py" for name in ("train", "evaluate", "translate", "report")]
    for path in (*scripts, *ROOT.glob("labs/*/__main__.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        names = [
            name
            for node in body
            for name, _ in imports(node)
            if name in {*FOLDERS, *NOUNS, "torch"}
        ]
        assert names[0] == "engine", path


@pytest.mark.parametrize("policy", [None, "ACTIVE"])
def test_the_engine_sets_how_threads_wait_unless_the_user_does(policy, monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # recorded, so that it is restored
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    importlib.reload(engine)
    assert ("GOMP_SPINCOUNT" in os.environ) == (policy is None)


def test_text_files_have_an_encoding():
    """The default is the machine's: GBK on a Chinese Windows. /proc is ASCII."""
    opens = re.compile(r"^open$|(?<!os)\.open$|\.(read|write)_text$")
    harmless = re.compile(r"encoding=|'[rwa]b'|/proc/|/sys/|devnull|'a'\)|\.lock")
    without = []
    for path in (path for folder in ("root", *FOLDERS) for path in files(folder)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not opens.search(ast.unparse(node.func)):
                continue
            if not harmless.search(ast.unparse(node)):
                without.append((str(path), node.lineno))
    assert without == []


def test_every_script_makes_its_model_by_one_function():
    """What model.CHANGES or another class does must act in training, scoring and --check alike."""
    elsewhere = []
    for path in chain.from_iterable(map(files, ("root", *FOLDERS))):
        name = str(path.relative_to(ROOT))
        if name == "model.py":
            continue
        if re.search(r"(?<![\w.])Translator\(", path.read_text(encoding="utf-8")):
            elsewhere.append(name)
    assert elsewhere == []
