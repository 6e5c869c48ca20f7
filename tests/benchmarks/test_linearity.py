"""The benchmark of linear cost: its FLOPs, and a small run of both parts."""

import json

from torch.utils.flop_counter import FlopCounterMode

from benchmarks import linearity
from benchmarks.linearity import VOCAB, Config, flops_per_token
from data import Collate
from model import PRESETS, ModelConfig, Translator, training_flops

TINY = dict(d_model=32, nhead=4, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=64, dropout=0.0)


def test_flops_grow_with_the_length():
    model = ModelConfig(8000, 8000, **PRESETS["lab"])
    assert flops_per_token(model, 0) == training_flops(model, 1, 1)
    # 3 + 2·3 attentions, two products of 256 places, each forward and twice backward, over 100 tokens more.
    assert flops_per_token(model, 200) - flops_per_token(model, 100) == 9 * 2 * (2 * 256) * 3 * 100


def test_attention_as_torch_counts_it():
    """The forward pass of the stock attention at two lengths, counted by torch."""
    model, counted = ModelConfig(50, 50, **TINY), {}
    for length in (8, 24):
        ids = [3] * (length - 1)
        batch = Collate(linearity.IDS, linearity.IDS)([(ids, ids)])
        with FlopCounterMode(display=False) as counter:
            Translator(model)(batch.src, batch.src_pad, batch.tgt_in, batch.real)
        counted[length] = counter.get_total_flops() / length
    ours = {length: flops_per_token(model, length) / 3 for length in counted}
    assert abs((counted[24] - counted[8]) / (ours[24] - ours[8]) - 1) < 0.01


def test_both_parts_run(tmp_path, capsys, monkeypatch):
    out = tmp_path / "linearity.json"
    monkeypatch.setattr(linearity, "keep_freed_memory", lambda: True)  # this process has other tests to do
    config = Config("all", "200,400", "16,32", tokens_per_batch=256, steps=2, rounds=1, out=str(out))
    linearity.main(config, sizes=TINY)
    runs = {run["contestant"]: run["figures"] for run in json.loads(out.read_text())["runs"]}
    assert list(runs) == ["200 pairs", "400 pairs", "length 16", "length 32"]
    assert runs["length 16"]["predicted_ratio"] == 1 and runs["length 32"]["predicted_ratio"] < 1
    assert VOCAB == 8000 and "predicted_ratio" in capsys.readouterr().out
