"""What nvidia-smi shows is kept, and its absence or failure ends no run."""

import pytest

from engine import gpu_evidence
from engine.gpu_evidence import FILE, keep_nvidia_smi


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a stand-in nvidia-smi, this shell script, on PATH; → the folder for its output."""

    def put(script: str):
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin/nvidia-smi").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    return put


def test_each_call_adds_what_it_shows(nvidia_smi, tmp_path):
    nvidia_smi("echo '| 98%   Default | \u00e9'; printf '\\377\\n'")  # the last byte is not UTF-8
    assert keep_nvidia_smi(tmp_path, "step 20") and keep_nvidia_smi(tmp_path, "end")
    lines = (tmp_path / FILE).read_text(encoding="utf-8").splitlines()
    assert [line.split(" (")[0] for line in lines[::4]] == ["step 20", "end"]
    assert lines[1] == lines[5] == "| 98%   Default | é" and lines[2] == "\ufffd"


@pytest.mark.parametrize("script", [None, "echo no driver; exit 9", "exec /bin/sleep 60"])
def test_without_it_nothing_is_written(nvidia_smi, tmp_path, monkeypatch, script):
    monkeypatch.setattr(gpu_evidence, "LONGEST", 0.5)
    if script is not None:
        nvidia_smi(script)
    assert not keep_nvidia_smi(tmp_path, "end") and not (tmp_path / FILE).exists()


def test_a_folder_that_is_gone_ends_no_run(nvidia_smi, tmp_path):
    nvidia_smi("echo ok")
    assert not keep_nvidia_smi(tmp_path / "gone", "end")
