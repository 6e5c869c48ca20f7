"""Fine-tuning begins with another run's model, and trains only what is not frozen."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import forked_ranks, records, reversed_digits, write_pairs
from test_train import (
    SMALL,
    assert_close_run,
    assert_same_run,
    config,
    few_pairs,  # noqa: F401  (a fixture)
    log_of,
    resumed,
    saved_state,
    training,
    weights,
)

from engine.errors import UserError
from engine.optimizer import OPTIMIZERS
from loading import load_trained

FROZEN = {
    "": (),
    "encoder": ("source_embedding.", "transformer.encoder."),
    # The output projection has the weights of the target embedding.
    "embeddings": ("source_embedding.", "target_embedding.", "output.weight"),
}


@pytest.fixture(scope="module")
def source(place, few_pairs) -> Path:  # noqa: F811
    """A run of six steps, with a model that is not of the default sizes."""
    flags = dict(max_length=32, norm_first=True, lr=0.01)
    return training.train(config(data=str(few_pairs), run=str(place / "source"), **flags))


@pytest.fixture(scope="module")
def other_data(tmp_path_factory) -> Path:
    """Longer sentences, and a word that the source has never seen."""
    pairs = reversed_digits(160, seed=1, shortest=6, longest=9)
    pairs = [(f"{zh}人", f"{en} people") for zh, en in pairs]
    splits = {"train": slice(0, 150), "validation": slice(150, 160)}
    return write_pairs(tmp_path_factory.mktemp("other"), pairs, splits)


@pytest.mark.parametrize("named", ["", "checkpoints/best", "checkpoints/best/model.safetensors"])
def test_a_run_begins_with_the_model_of_its_source(source, few_pairs, here, named):  # noqa: F811
    almost_0 = 1e-12
    flags = dict(init=str(source / named), lr=almost_0, max_steps=1, eval_every=1)
    training.train(config(data=str(few_pairs), run=str(here), **flags))
    first = records(here, "valid/loss")[1]
    assert first == pytest.approx(saved_state(source)["best_loss"], rel=1e-6)
    assert re.search(r"init: weights of .*/step-\d; new optimizer, step 0", log_of(here)) or named
    tuned, before = load_trained(here), load_trained(source)
    assert tuned.model.config == before.model.config
    assert tuned.target_tokenizer.get_vocab() == before.target_tokenizer.get_vocab()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("part", FROZEN)
def test_frozen_weights_stay_and_all_others_change(source, other_data, here, part, optimizer):
    flags = dict(init=str(source), freeze=part, optimizer=optimizer)
    training.train(config(data=str(other_data), run=str(here), **flags))
    before, after = weights(source, "best"), weights(here)
    assert before.keys() == after.keys()
    trained = 0
    for name in before:
        is_frozen = name.startswith(FROZEN[part])
        assert torch.equal(before[name], after[name]) == is_frozen, name
        if not is_frozen and name != "output.weight":  # counted as target_embedding.weight
            trained += before[name].numel()
    total = sum(value.numel() for name, value in before.items() if name != "output.weight")
    assert f"model: {total:,} parameters, {trained:,} of them trained" in log_of(here)


def test_resumed_without_its_source_it_is_the_same(source, other_data, here, monkeypatch):
    """Its data are tokenised again, with its own copy of the tokenizers."""
    copy = shutil.copytree(source, here / "source", symlinks=True)
    flags = dict(data=str(other_data), init=str(copy), freeze="encoder", dropout=0.1)
    whole = training.train(config(run=str(here / "whole"), **flags))
    with monkeypatch.context() as patched:
        patched.setattr(training.Run, "stop_asked", lambda run: step_of(run) >= 4)
        cut = training.train(config(run=str(here / "cut"), **flags))
    assert saved_state(cut)["step"] == 4
    shutil.rmtree(copy)
    shutil.rmtree(here / ".cache")
    training.train(resumed(cut))
    assert_same_run(whole, cut)


def test_its_settings_begin_the_same_run_again(source, other_data, here):
    """As `train.py runs/NAME/config.json`, where every setting is given."""
    flags = dict(data=str(other_data), init=str(source), freeze="embeddings")
    first = training.train(config(run=str(here / "first"), **flags))
    settings = json.loads((first / "config.json").read_text()) | {"run": str(here / "again")}
    again = training.train(config(**settings))
    assert_same_run(first, again)


def step_of(run) -> int:
    """The last step that the run has logged: it logs every second one."""
    points = records(run.folder) if hasattr(run, "telemetry") else {}
    return max(points, default=0)


def test_processes_and_shards_train_the_same(source, other_data, here, tmp_path):
    """Also without the kernels of fast/."""
    flags = dict(data=str(other_data), init=str(source), freeze="encoder", lr=0.0003, eval_every=2)
    one = training.train(config(run=str(here / "one"), **flags))
    plain = training.train(config(run=str(here / "plain"), fast=False, **flags))
    assert_close_run(one, plain)
    words = [f"--{name}={value}" for name, value in (SMALL | flags).items()]
    for name, extra in {"ddp": [], "fsdp2": ["--shard", "--accumulate=2"]}.items():
        run = here / name
        forked_ranks(2, "train.py", *words, *extra, "--run", run, cwd=tmp_path)
        assert_close_run(one, run)
        for weight, value in weights(run).items():
            if weight.startswith(FROZEN["encoder"]):
                assert torch.equal(value, weights(source, "best")[weight])


def test_check_answers_for_the_sources_model(source, other_data, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("tools.machine.SECONDS", 0.0)
    monkeypatch.setattr("tools.machine.SMALLEST_STEP", 128)
    monkeypatch.chdir(tmp_path)
    training.main(config(data=str(other_data), init=str(source), freeze="encoder", check=True))
    out = capsys.readouterr().out
    total = re.search(r"model: ([\d,]+) parameters", log_of(source))[1]
    assert f"model: {total} parameters" in out and "check: this would run" in out


@pytest.mark.parametrize(
    "flags, reason",
    [
        (dict(init="runs/missing"), "runs/missing does not exist"),
        (dict(d_model=64), "its --d_model is 32, so it cannot be 64; leave the flag out"),
        (dict(norm_first=False), "its --norm_first is True"),
        (dict(tokenizer="gpt2"), "cannot be those of --tokenizer gpt2; leave the flag out"),
        (dict(preset="base"), "its --d_model is 32, so it cannot be 512"),
        (dict(target_vocab=400), "its --target_vocab is 300, so it cannot be 400"),
        (dict(freeze="decoder"), "--freeze decoder is unknown; choose encoder or embeddings"),
    ],
)
def test_what_does_not_go_with_a_source_is_one_line(source, other_data, here, flags, reason):
    asked = dict(data=str(other_data), run=str(here), init=str(source)) | flags
    with pytest.raises(UserError) as error:
        training.train(config(**asked))
    assert reason in str(error.value) and "\n" not in str(error.value)
    assert not here.exists()


def test_a_resumed_run_cannot_begin_with_another_model(source):
    with pytest.raises(UserError, match=r"--init .* would change a fixed setting"):
        training.train(resumed(source, init=str(source)))
