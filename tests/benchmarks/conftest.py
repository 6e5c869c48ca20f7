"""A small corpus in the tokens of the toy language, and small models."""

import pytest

from benchmarks import corpus as corpus_module
from benchmarks.peers import contest

TINY_LAB = dict(d_model=32, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=64)


@pytest.fixture(scope="session")
def small(toy_data, tmp_path_factory):
    """50 training pairs and 20 test sentences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "ROOT", tmp_path_factory.mktemp("root"))
        yield corpus_module.load_corpus(str(toy_data), vocab=300, pairs=50, test_rows=20, longest=30)


@pytest.fixture
def tiny_lab(monkeypatch):
    """The contestants of this process with a model of 32 places instead of 256."""
    for name, value in TINY_LAB.items():
        monkeypatch.setitem(contest.LAB, name, value)
