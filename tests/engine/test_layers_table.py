"""The table of layers: every weight once, shapes of one forward pass, equal layers in one row."""

import json

import pytest
import torch
from torch import nn

from engine.layers import layers_of, save_layers
from model import ModelConfig, Translator
from tools.reporting.reading import layers_of_translator


class Tied(nn.Module):
    """A tied embedding, an activation that is called twice, a bias of its own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.act = nn.ReLU()
        self.hidden = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(4, 10, bias=False)
        self.output.weight = self.embedding.weight
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, ids):
        x = self.act(self.hidden(self.act(self.embedding(ids))))
        return self.output(self.dropout(x)) + self.bias


def test_rows_are_in_the_order_of_computation_and_count_every_weight_once():
    model = Tied()
    rows = layers_of(model, torch.zeros(2, 3, dtype=torch.long))
    assert [(row.name, row.shape, row.parameters) for row in rows] == [
        ("embedding", [2, 3, 4], 40),
        ("act", [2, 3, 4], 0),
        ("hidden", [2, 3, 4], 20),
        ("output", [2, 3, 10], 0),
        ("(model)", [2, 3, 10], 10),
    ]
    assert model.training  # as before
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_translation_model(norm_first):
    sizes = ModelConfig(300, 310, d_model=32, nhead=4, norm_first=norm_first)
    rows = layers_of_translator(sizes)
    expected = sum(weight.numel() for weight in Translator(sizes).parameters())
    assert sum(row.parameters for row in rows) == expected
    by_name = {row.name: row for row in rows}
    attention = by_name["transformer.decoder.layers.*.multihead_attn"]
    assert attention.count == 3 and attention.shape == ["B", "T", 32]
    assert by_name["source_embedding"].shape == ["B", "S", 32]
    assert by_name["output"].shape == ["B", "T", 310] and by_name["output"].parameters == 310
    assert len(rows) < 20


def test_pytorchs_fast_path_hides_no_layer():
    torch.backends.mha.set_fastpath_enabled(True)
    try:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        rows = layers_of(nn.TransformerEncoder(layer, 2), torch.zeros(1, 3, 8))
    finally:
        torch.backends.mha.set_fastpath_enabled(False)
    assert [row.count for row in rows] == [2] * 5


def test_a_model_that_cannot_be_called_ends_no_training(tmp_path):
    save_layers(tmp_path, Tied(), "no ids")
    assert not (tmp_path / "layers.json").exists()
    save_layers(tmp_path, Tied(), torch.zeros(1, 1, dtype=torch.long))
    (first, *_) = json.loads((tmp_path / "layers.json").read_text(encoding="utf-8"))
    assert first == {
        "name": "embedding",
        "type": "Embedding",
        "shape": [1, 1, 4],
        "count": 1,
        "parameters": 40,
    }
