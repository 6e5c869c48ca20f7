"""The ladder, the limits and the memory benchmark: small, but real."""

import json

import pytest
import torch

from benchmarks import ladder, limits, memory
from engine.attention import BatchedAttention
from engine.cross_entropy import SlicedCrossEntropy
from engine.dropout import ByteDropout
from engine.native.training import Kernels
from model import ModelConfig, training_flops

SIZES = ModelConfig(3000, 2000, d_model=64, nhead=4, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=96)

SWITCHES = (ByteDropout, BatchedAttention, SlicedCrossEntropy, Kernels)


@pytest.fixture(autouse=True)
def switches():
    """As they were, afterwards."""
    precision = torch.get_float32_matmul_precision()
    yield
    for switch in SWITCHES:
        switch.enabled = True
    torch.set_float32_matmul_precision(precision)


def test_the_products_are_the_flops_that_are_counted():
    forward = sum(2 * rows * width * out for rows, width, out in limits.products(SIZES, 700, 900))
    assert 3 * forward == training_flops(SIZES, 700, 900)


def test_every_rung_learns_the_same(small, tiny_lab, monkeypatch):
    monkeypatch.setattr(ladder, "TOKENS_PER_BATCH", 100)
    figures = [ladder.climb(rung, small, seconds=0.01) for rung in range(len(ladder.RUNGS))]
    assert all(switch.enabled for switch in SWITCHES)
    losses = [figure["loss"] for figure in figures]
    assert losses[:-1] == pytest.approx([losses[0]] * (len(losses) - 1), rel=1e-5)
    assert losses[-1] == pytest.approx(losses[0], rel=0.01) and losses[-1] != losses[0]  # bf16
    assert all(figure["target_tokens_per_second"] > 0 for figure in figures)


def test_memory_is_measured_in_a_process_of_its_own(capfd):
    config = memory.Config(vocab=500, tokens=256, variant="ours fp32")
    found = memory.start("ours fp32", config)
    assert 0 < found["step_gib"] < found["process_gib"] < 3 and found["loss"] < 8
    assert json.dumps(found)
