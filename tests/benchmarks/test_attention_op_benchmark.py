"""The benchmark of attention and GELU: a small measurement, a count of memory, and mistakes."""

import json
import os
import shutil

import pytest
import torch

from benchmarks import attention_op
from benchmarks.attention_op import Config, peak_mib
from engine.errors import UserError

can_build = shutil.which(os.environ.get("CXX", "c++")) and shutil.which("ninja")


@pytest.mark.skipif(not can_build, reason="no C++ compiler or no ninja")
def test_a_small_measurement(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(attention_op, "keep_freed_memory", lambda: None)  # the tests' process stays as it is
    out, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    attention_op.main(
        Config(lengths="8,16", tokens=32, heads=2, width=4, numbers="100", rounds=1, out=str(out), png=str(picture))
    )
    content = json.loads(out.read_text())
    names = {run["contestant"] for run in content["runs"]}
    assert {"attention ours cpp, 16", "attention PyTorch flash, 8", "gelu composed, 100"} <= names
    assert all(run["figures"]["ms"] > 0 for run in content["runs"])
    assert "| ours recompute |" in capsys.readouterr().out and picture.stat().st_size > 1000


def test_memory_is_counted():
    def pass_of(mib: int):
        return lambda: (torch.ones(mib * 2**18), torch.ones(mib * 2**18).sum())  # kept, and held for a moment

    assert abs(peak_mib(pass_of(64)) - 128) < 8


def test_a_wrong_contestant_stops_it(monkeypatch):
    monkeypatch.setattr(attention_op, "composed_attention", lambda q, k, v, causal: 2 * v + 0 * (q + k))
    with pytest.raises(UserError, match="composed does not give what PyTorch gives"):
        attention_op.check(Config(lengths="8", tokens=8, heads=1, width=4))


@pytest.mark.parametrize(
    "flags", [dict(lengths="8,x"), dict(lengths=""), dict(numbers="0"), dict(tokens=0), dict(rounds=0)]
)
def test_mistakes(flags):
    with pytest.raises(UserError, match=next(iter(flags))):
        Config(**flags)
