"""The training contest: who takes part, what is counted."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import training
from benchmarks.measuring import tokens_of
from benchmarks.peers import contest, contestants, install
from benchmarks.peers.contestants import Contestant, choose, start
from benchmarks.training import CONTESTANTS
from engine.errors import UserError


def test_everybody_or_those_named():
    assert choose("", CONTESTANTS) == list(CONTESTANTS)
    assert choose("marian,handout", CONTESTANTS) == ["marian", "handout"]
    with pytest.raises(UserError, match="unknown; choose from handout"):
        choose("marion", CONTESTANTS)


def test_without_its_environment_a_toolkit_is_left_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(install, "ENVIRONMENTS", tmp_path)
    assert start("fairseq", CONTESTANTS["fairseq"], 1, "train") is None
    assert "python -m benchmarks.peers.install fairseq" in capsys.readouterr().out


def test_one_that_breaks_is_left_out_with_its_last_word(small, capsys):
    assert start("ours", Contestant("ours", "fp7"), 1, "train", "--corpus", small.folder) is None
    out = capsys.readouterr().out
    assert "left out" in out and "fp7" in out and len(out.splitlines()) == 1


def test_requirements():
    together, alone = install.read_requirements("torch==1\n# why\nnumpy\nold==2  # no-deps\n")
    assert together == ["torch==1", "numpy"] and alone == ["old==2"]


@pytest.mark.parametrize("toolkit", install.TOOLKITS)
def test_every_toolkit_pins_its_torch_first(toolkit):
    together, _ = install.read_requirements((install.BENCHMARKS / f"requirements-{toolkit}.txt").read_text())
    assert together[0].startswith("torch==")


class Ended(Exception):
    pass


def stop(_code):
    raise Ended


def test_the_clock_leaves_out_the_warm_up_and_the_last_step(monkeypatch):
    """Steps of 2 s and 100 target tokens: the three of the warm-up and the one that begins when time is up do not count."""
    reported, times = [], iter(range(0, 100, 2))
    monkeypatch.setattr(contest, "report", reported.append)
    monkeypatch.setattr(contest.os, "_exit", stop)
    clock = contest.TrainingClock(6, now=lambda: next(times))
    with pytest.raises(Ended):
        for _ in range(20):
            clock.step(10, 100)
    (figures,) = reported
    assert figures["steps"] == 3
    assert figures["target_tokens_per_second"] == 50 and figures["tokens_per_second"] == 55
    assert figures["seconds_per_step"] == 2 and figures["target_tokens_per_step"] == 100


@pytest.mark.parametrize("name", ["handout", "tutorial", "marian", "ours"])
def test_an_epoch_counts_every_real_token_once(name, small, tiny_lab, monkeypatch):
    """Not the padding, not the begin token; on the source side the end token too."""
    peer, wanted = importlib.import_module(f"benchmarks.peers.{name}"), tokens_of(target for _, target in small.train)
    counted = []

    class Recorder:
        def __init__(self, _seconds):
            pass

        def step(self, source, target):
            counted.append((int(source), int(target)))
            if sum(target for _, target in counted) >= wanted:
                raise Ended

    monkeypatch.setattr(peer, "TrainingClock", Recorder)
    precision = torch.get_float32_matmul_precision()
    try:
        with pytest.raises(Ended):
            peer.train(SimpleNamespace(seconds=1, variant="fp32", threads=1), small)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert [sum(side) for side in zip(*counted)] == [tokens_of(source for source, _ in small.train), wanted]


def test_one_turn_as_a_user_starts_it(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(training, "load_corpus", lambda data: small)
    monkeypatch.setattr(contestants, "describe_machine", lambda: "machine")
    config = training.Config(contestants="ours-fp32", rounds=1, seconds=0.1, threads=1, out=str(tmp_path / "t.json"))
    training.main(config)
    (run,) = json.loads((tmp_path / "t.json").read_text())["runs"]
    assert run["figures"]["target_tokens_per_second"] > 0 and run["figures"]["peak_gib"] > 0
    assert "| ours-fp32" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["joeynmt", "opennmt", "fairseq"])
def test_toolkits(name, small):
    if not install.is_installed(name):
        pytest.skip(install.how_to_install(name))
    figures = start(name, CONTESTANTS[name], 1, "train", "--corpus", small.folder, "--seconds", 0.5)
    assert figures["target_tokens_per_second"] > 0
    assert figures["target_tokens_per_step"] <= tokens_of(target for _, target in small.train)
