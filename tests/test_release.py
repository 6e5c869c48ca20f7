"""Version, packages and systems are the same wherever they are named."""

import re
import shutil
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT

from engine import VERSION


def read_yaml(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def packages_in(file: str) -> list[str]:
    """The lines of a requirements file, without comments."""
    lines = [line.split("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    return [line for line in lines if line]


def test_the_citation_has_the_version():
    citation = read_yaml("CITATION.cff")
    assert citation["version"] == VERSION
    assert citation["license"] in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_conda_installs_the_packages_of_pip():
    """Nothing is listed twice: conda's file names those of pip, which pip finds beside it."""
    [python, pip, of_pip] = read_yaml("environment.yml")["dependencies"]
    assert re.fullmatch(r"python=3\.1[0-4]", python) and pip == "pip"
    assert of_pip == {"pip": ["-r requirements.txt", "-c constraints.txt"]}


def test_pip_install_installs_what_the_scripts_need(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    (tmp_path / "engine").mkdir()
    for name in ("pyproject.toml", "requirements.txt", "engine/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    code = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_editable('.')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    [metadata] = tmp_path.glob("*.dist-info/METADATA")
    lines = metadata.read_text(encoding="utf-8").splitlines()
    assert f"Version: {VERSION}" in lines
    needed = [line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist" in line]
    assert sorted(needed) == sorted(packages_in("requirements.txt"))


def test_the_tests_run_on_the_first_and_last_python_and_on_both_systems():
    matrix = read_yaml(".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix == {"system": ["ubuntu-latest", "macos-latest"], "python": ["3.10", "3.14"]}
    claimed = f"Python {matrix['python'][0]} to {matrix['python'][1]}"
    assert claimed in (ROOT / "README.md").read_text(encoding="utf-8")
    assert claimed in (ROOT / "run.sh").read_text(encoding="utf-8")
