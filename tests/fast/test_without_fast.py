"""fast/ changes time and memory only: without it the lab trains and scores the same."""

import pytest
from conftest import TINY_FLAGS, in_this_process, records
from random_models import needs_compiler

from fast import CompiledDecoder, layers

FLAGS = [*TINY_FLAGS, "--d_model", 64, "--precision", "fp32", "--lr", 0.01, "--max_steps", 30]
FLAGS += ["--log_every", 1, "--eval_every", 30]


def translations(run, out, *flags) -> list[str]:
    """The hypotheses of evaluate.py for the first 50 rows."""
    words = [
        "evaluate.py",
        "--ckpt",
        run,
        "--limit",
        50,
        "--precision",
        "fp32",
        "--out",
        out,
        *flags,
    ]
    assert not in_this_process(*words)
    return out.read_text(encoding="utf-8").splitlines()


@needs_compiler
def test_the_lab_trains_and_scores_the_same_without_fast(toy_data, tmp_path, monkeypatch):
    used = []
    replace, compiled = layers.Stream.end, CompiledDecoder.forward
    monkeypatch.setattr(layers.Stream, "end", lambda self: used.append("train") or replace(self))
    monkeypatch.setattr(
        CompiledDecoder,
        "forward",
        lambda *given, **named: used.append("decode") or compiled(*given, **named),
    )
    monkeypatch.chdir(tmp_path)
    train = ["train.py", "--data", toy_data, *FLAGS, "--run"]
    assert not in_this_process(*train, "with")
    outputs = translations("with", tmp_path / "with.txt")
    assert set(used) == {"train", "decode"}

    used.clear()
    assert not in_this_process(*train, "without", "--fast", "false")
    plain_outputs = translations("with", tmp_path / "plain.txt", "--fast", "false")
    assert not used
    # Sums in another order round differently, and 30 steps carry the difference on. For BLEU a tie
    # between two tokens may fall either way.
    allowed = {
        "train/loss": 2e-3,
        "train/gradient_norm": 2e-3,
        "valid/loss": 2e-3,
        "valid/bleu": 0.05,
    }
    for key, difference in allowed.items():
        found, expected = (records(tmp_path / "runs" / run, key) for run in ("with", "without"))
        assert found == pytest.approx(expected, rel=difference, abs=1e-9), key
    assert len(outputs) == 50
    assert len(set(outputs)) > 5
    equal = sum(map(str.__eq__, outputs, plain_outputs))
    assert equal >= 49  # a tie may fall either way
