"""Byte dropout: the right share, the right mean, the right gradient, the stock one where it is not for."""

import pytest
import torch
from torch import nn

from engine.dropout import ByteDropout, drop_by_bytes


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_drops_the_share_and_keeps_the_mean(p, dtype):
    torch.manual_seed(1)
    out = drop_by_bytes(torch.ones(1000, 1001, dtype=dtype), p)
    share, rounded = (out == 0).double().mean().item(), round(p * 256) / 256
    assert out.dtype == dtype and abs(share - rounded) < 4 * (rounded * (1 - rounded) / 1e6) ** 0.5
    assert torch.allclose(out[out != 0].double(), torch.tensor(1 / (1 - rounded)).double(), rtol=2**-8)


def test_every_byte_of_a_draw_decides_on_its_own():
    torch.manual_seed(1)
    kept = (drop_by_bytes(torch.ones(2**20), 0.5) != 0).double().view(-1, 8)
    assert (kept.mean(0) - 0.5).abs().max() < 0.01  # also the highest of the eight, which holds the sign
    correlation = torch.corrcoef(kept.T) - torch.eye(8, dtype=torch.float64)
    assert correlation.abs().max() < 0.02


@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (9,), (3, 5, 7), (0, 4)])
def test_any_shape_and_its_gradient(shape):
    x = torch.randn(shape, requires_grad=True)
    out = drop_by_bytes(x, 0.5)
    assert out.shape == x.shape
    out.sum().backward()
    assert torch.equal(x.grad * x, out)  # what was dropped gets no gradient, the rest the scale


def test_the_same_seed_draws_the_same():
    x = torch.ones(100)
    draws = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        draws.append(drop_by_bytes(x, 0.5))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_a_view_is_not_written_to():
    x = torch.ones(4, 6)
    drop_by_bytes(x.T, 0.5)
    assert torch.equal(x, torch.ones(4, 6))


def test_nothing_is_dropped_in_evaluation_or_at_zero():
    x, layer = torch.randn(50), ByteDropout(0.5)
    assert torch.equal(layer.eval()(x), x) and torch.equal(ByteDropout(0.0).train()(x), x)


def test_switched_off_it_is_the_stock_dropout(monkeypatch):
    monkeypatch.setattr(ByteDropout, "enabled", False)
    x, results = torch.randn(50), []
    for layer in (ByteDropout(0.3), nn.Dropout(0.3)):
        torch.manual_seed(3)
        results.append(layer.train()(x))
    assert torch.equal(*results)
