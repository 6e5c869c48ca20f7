"""A run of the version before: read, scored and gone on with.

old_run/ was stopped after step 14 of 24 by that version of train.py, with --d_model 8 --nhead 1 --num_encoder_layers 1
--num_decoder_layers 1 --dim_feedforward 8 --dropout 0 --source_vocab 300 --target_vocab 300 --max_length 64 --max_steps 24
--eval_every 6 --log_every 4 --tokens_per_batch 200 --precision fp32 --seed 3; its data are the first 90 of `reversed_digits`.
"""

import json
import shutil
from pathlib import Path

import pytest
from conftest import in_this_process, records, reversed_digits, write_pairs

from evaluate import Config, load_rows
from loading import load_trained

SPLITS = {"train": slice(0, 60), "validation": slice(60, 75), "test": slice(75, 90)}
# What that version wrote when the same run was not stopped: the losses that it minimised, and those of the validation.
LOSSES = {20: 6.108705520629883, 24: 6.0510053634643555}
VALIDATION = {18: 6.02840576171875, 24: 5.965558451990927}


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    """The run, with its data where its settings say that they are."""
    write_pairs(tmp_path / "pairs", reversed_digits(90), SPLITS)
    run = shutil.copytree(
        Path(__file__).parent / "old_run", tmp_path / "runs" / "old", symlinks=True
    )
    settings = json.loads((run / "config.json").read_text(encoding="utf-8"))
    (run / "config.json").write_text(
        json.dumps(settings | {"data": str(tmp_path / "pairs")}), encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    return run


def test_it_goes_on_where_it_stopped(old, capfd):
    assert in_this_process("train.py", "--resume", "runs/old") is None, capfd.readouterr().err
    said = capfd.readouterr().out
    assert (
        "resumed after step 14 from" in said and "stopped after step 24: all steps are done" in said
    )
    # Its next line, of step 16, holds the steps from 15 on: the losses before were saved in another way.
    smoothed = records(old, "train/smoothed_loss")
    assert {step: smoothed[step] for step in LOSSES} == pytest.approx(
        LOSSES, rel=1e-4
    )  # fp32, perhaps on another CPU
    assert {step: records(old, "valid/loss")[step] for step in VALIDATION} == pytest.approx(
        VALIDATION, rel=1e-4
    )
    assert sorted(records(old)) == [4, 8, 12, 16, 20, 24]
    settings = json.loads((old / "config.json").read_text(encoding="utf-8"))
    assert (settings["optimizer"], settings["dropout_after"]) == (
        "adamw",
        0,
    )  # flags that it did not have


def test_its_settings_as_a_settings_file_are_its_recipe(old):
    """Of flags that it did not have as well, and those given now win."""
    words = ["runs/old/config.json", "--run", "again", "--max_steps", "1", "--match_lengths"]
    assert in_this_process("train.py", *words) is None
    settings = json.loads(Path("runs/again/config.json").read_text(encoding="utf-8"))
    assert (settings["optimizer"], settings["dropout_after"]) == ("adamw", 0)
    assert (settings["match_domain"], settings["match_late"]) == (False, False)
    assert settings["match_lengths"] and settings["max_steps"] == 1


def test_its_best_checkpoint_stays(old, monkeypatch):
    monkeypatch.setattr("validation.Validation.__call__", lambda *_: (99.0, 0.0))
    assert in_this_process("train.py", "--resume", "runs/old", "--keep", "1") is None
    assert sorted(path.name for path in (old / "checkpoints").glob("step-*")) == [
        "step-12",
        "step-24",
    ]
    assert load_trained(old).name.endswith("step-12")


def test_it_is_scored_and_translates(old, capfd):
    trained = load_trained(old)
    assert (
        trained.name.endswith("step-12")
        and load_rows(Config(), trained)[0] == reversed_digits(90)[75:]
    )
    assert (
        in_this_process("evaluate.py", "--ckpt", "runs/old", "--average", "2", "--device", "cpu")
        is None
    )
    assert "mean of step-12, step-14" in capfd.readouterr().out
    assert (old / "eval/test-greedy-average2.json").exists()
    assert (
        in_this_process("translate.py", "--ckpt", "runs/old", "--device", "cpu", "一二三") is None
    )
    assert capfd.readouterr().out.count("\n") == 1
