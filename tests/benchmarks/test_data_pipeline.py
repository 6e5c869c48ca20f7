"""The benchmark of the data side: its made-up store, what it times, and that the start of an epoch stays small."""

import json

import numpy as np
import pytest

from benchmarks import data_pipeline
from benchmarks.data_pipeline import Config, make_store, padding_shares, start_epoch, time_stages
from data import BucketSampler, TokenizedPairs
from text.rows import find_text


def test_the_made_up_store_is_like_text(tmp_path):
    make_store(tmp_path / "store", 3000)
    store = TokenizedPairs(tmp_path / "store")
    assert len(store) == 3000 and 15 < store.lengths["source"].mean() < 30
    assert np.corrcoef(store.lengths["source"], store.lengths["target"])[0, 1] > 0.9
    assert store[2999][0].min() >= 3 and store[2999][0].max() < 8000


def test_padding_shares_by_hand():
    lengths = {"source": np.array([3, 3]), "target": np.array([3, 1])}  # 4 + 4 and 4 + 2 tokens with the end
    shares = padding_shares(lengths, BucketSampler(lengths, 100))
    assert shares == pytest.approx({"padding_source": 0, "padding_target": 2 / 8, "padding_both": 2 / 16})


def test_stages_run_in_order(toy_data, tmp_path):
    figures = {name: stage() for name, stage in time_stages(find_text(str(toy_data)), 300, tmp_path / "s").items()}
    assert [turn["pairs"] for turn in figures.values()] == [2000, 2000, 2000, 2000]
    assert len(TokenizedPairs(tmp_path / "s" / "train")) == 2000


def test_the_parts_write_their_figures(toy_data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "figures.json"
    data_pipeline.main(Config("all", str(toy_data), 300, pairs=2000, seconds=0.1, rounds=1, out=str(out)))
    names = {run["contestant"] for run in json.loads(out.read_text())["runs"]}
    assert {"tokenising and writing", "epoch 1", "middle of epoch 3", "loader, 4,096 tokens a batch"} <= names
    assert "padding_both" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("epochs_done", [0.0, 2.0, 2.5])
def test_ten_million_pairs_start_in_five_seconds(tmp_path, epochs_done):
    make_store(tmp_path / "store", 10**7)
    figures = data_pipeline.in_new_process(start_epoch, tmp_path / "store", epochs_done)
    assert figures["seconds"] < 5 and figures["growth_gib"] < 0.75


@pytest.mark.slow
def test_real_data_is_tokenised_at_25_000_pairs_a_second(real_data, tmp_path):
    stages = time_stages(find_text(str(real_data)), 8000, tmp_path / "s")
    figures = {name: stage() for name, stage in stages.items()}
    assert figures["tokenising and writing"]["pairs_per_second"] > 25_000
