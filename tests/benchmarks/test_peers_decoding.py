"""The decoding contest: who has the same weights writes the same outputs."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from benchmarks import decoding
from benchmarks.decoding import CONTESTANTS, agreement, export_random, read_outputs
from benchmarks.peers import contest, ct2, install, ours
from benchmarks.peers.contestants import start

LENGTH = 12


@pytest.fixture
def weights(small, tiny_lab, tmp_path):
    """Random weights, made larger so that what is read counts and outputs differ from sentence to sentence."""
    torch.manual_seed(1)
    model = ours.build(small)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4 if "attn" in name else 2.5)
        model.output.bias[small.target_ids["eos"]] += 2  # some outputs end by themselves
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    return tmp_path


def outputs_of(name, small, weights, monkeypatch, length, variant="fp32"):
    """What a contestant of this process decodes, without taking its time."""
    found, peer = [], importlib.import_module(f"benchmarks.peers.{name}")
    monkeypatch.setattr(peer, "time_decoding", lambda task, corpus, once, warm=True: found.extend(once()))
    task = SimpleNamespace(
        weights=str(weights), length=length, batch=7, threads=1, variant=variant, outputs="", seconds=0
    )
    precision = torch.get_float32_matmul_precision()
    with monkeypatch.context() as patch:
        patch.setattr("decoding.output_limit", importlib.import_module("decoding").output_limit)  # put back afterwards
        peer.decode(task, small)
    torch.set_float32_matmul_precision(precision)
    return found


@pytest.mark.parametrize("length", [LENGTH, 0])
def test_same_weights_same_outputs(small, weights, monkeypatch, length):
    reference = outputs_of("ours", small, weights, monkeypatch, length)
    assert len(reference) == len(small.test)
    assert len({tuple(row) for row in reference}) > 10  # else anybody could agree
    if length:
        assert {len(row) for row in reference} == {length}
    else:
        assert len({len(row) for row in reference}) > 2
    for name in ("handout", "tutorial", "marian"):
        sentences, tokens = agreement(outputs_of(name, small, weights, monkeypatch, length), reference)
        assert sentences >= 0.9 and tokens >= 0.9, name  # a tie may fall either way in fp32


def test_agreement():
    assert agreement([[1, 2], [3]], [[1, 2], [3]]) == (1, 1)
    same, tokens = agreement([[1, 9, 3]], [[1, 2, 3]])
    assert same == 0 and tokens == 1 / 4  # one token before the difference, of three and the end
    assert agreement([[1]], [[1, 2]])[0] == 0


def test_outputs_of_another_length_are_refused(small, monkeypatch):
    monkeypatch.setattr(contest, "report", lambda figures: None)
    task = SimpleNamespace(length=3, seconds=0, outputs="")
    contest.time_decoding(task, small, lambda: [[1, 2, 3]] * len(small.test), warm=False)
    with pytest.raises(RuntimeError, match="2 to 3 tokens"):
        contest.time_decoding(task, small, lambda: [[1, 2]] + [[1, 2, 3]] * (len(small.test) - 1), warm=False)


def test_the_end_counts_as_a_token_where_it_may_come(small, monkeypatch, tmp_path):
    reported = []
    monkeypatch.setattr(contest, "report", reported.append)
    once = lambda: (2.0, [[7, 8]] * len(small.test))  # noqa: E731
    for length in (0, 2):
        contest.time_decoding(SimpleNamespace(length=length, seconds=0, outputs=str(tmp_path / "o")), small, once)
    count = len(small.test)
    assert [figures["tokens"] for figures in reported] == [3 * count, 2 * count]
    assert reported[1]["tokens_per_second"] == count and reported[1]["sentences_per_second"] == count / 2
    assert read_outputs(tmp_path / "o") == [[7, 8]] * count


def test_words_of_the_converted_model(small):
    words = ct2.names(small.target_vocab, small.target_ids, "t")
    assert len(words) == len(set(words)) == small.target_vocab
    assert words[small.target_ids["eos"]] == "</s>" and words[200] == "t200"


def test_positions_of_the_converted_model():
    from model import sinusoids

    assert torch.allclose(torch.from_numpy(ct2.positions(50, 32)), sinusoids(50, 32), atol=1e-5)


@pytest.mark.slow
def test_the_converted_model_decodes_alike(small):
    """CTranslate2 in fp32, with weights that make each output another one."""
    if not install.is_installed("ctranslate2"):
        pytest.skip(install.how_to_install("ctranslate2"))
    folder = export_random(small)
    state = torch.load(folder / "weights.pt")
    torch.save({k: v * (4 if "attn" in k and v.dim() > 1 else 1) for k, v in state.items()}, folder / "weights.pt")
    found = {}
    for name in ("ours-fp32", "handout", "ctranslate2-float32-64"):
        arguments = ("--corpus", small.folder, "--seconds", 0, "--length", LENGTH, "--weights", folder)
        start(name, CONTESTANTS[name], 1, "decode", *arguments, "--outputs", folder / f"{name}.txt")
        found[name] = read_outputs(folder / f"{name}.txt")
    assert len({tuple(row) for row in found["ours-fp32"]}) > 10
    assert agreement(found["ctranslate2-float32-64"], found["ours-fp32"])[0] >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", decoding.OWN_WEIGHTS)
def test_toolkits(name, small):
    if not install.is_installed(name):
        pytest.skip(install.how_to_install(name))
    figures = start(name, CONTESTANTS[name], 1, "decode", "--corpus", small.folder, "--seconds", 0, "--length", LENGTH)
    assert figures["tokens"] == LENGTH * len(small.test)
