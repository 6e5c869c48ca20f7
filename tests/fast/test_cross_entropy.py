"""The sliced cross-entropy gives what the plain one gives, and holds a fraction of the memory."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import LargestTensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fast import cross_entropy as under_test
from fast.cross_entropy import can_slice, linear_cross_entropy

seeds = st.integers(0, 2**31)


def problem(seed, tokens, width, vocabulary, dtype=torch.float64, scale=1.0):
    """[hidden, weight, bias] and targets; `scale` multiplies the hidden states."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (tokens, width), (vocabulary, width), (vocabulary,)
    tensors = [torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes]
    tensors[0] *= scale
    target = torch.randint(vocabulary, (tokens,), generator=generator)
    return [x.requires_grad_() for x in tensors], target


def sliced(tensors, target, smoothing, bf16=False):
    """Smoothed and plain loss, and the three gradients of 0.37 times the first."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        losses = linear_cross_entropy(*tensors, target, smoothing)
    return *losses, *torch.autograd.grad(0.37 * losses[0], tensors)


def plain(tensors, target, smoothing):
    """As `sliced`, by PyTorch's own operations."""
    logits = F.linear(*tensors)
    losses = [
        F.cross_entropy(logits, target, label_smoothing=share, reduction="sum")
        for share in (smoothing, 0.0)
    ]
    return *losses, *torch.autograd.grad(0.37 * losses[0], tensors)


@settings(max_examples=40)
@given(
    seeds,
    st.integers(0, 30),
    st.integers(1, 8),
    st.integers(2, 40),
    st.sampled_from([0.0, 0.1, 0.9]),
    st.integers(1, 300),
)
def test_as_the_plain_one_in_float64(seed, tokens, width, vocabulary, smoothing, at_once):
    tensors, target = problem(seed, tokens, width, vocabulary)
    with mock.patch.dict(under_test.LOGITS_AT_ONCE, cpu=at_once):  # a slice may be one row
        results = sliced(tensors, target, smoothing)
    for found, expected in zip(results, plain(tensors, target, smoothing), strict=True):
        # At most 30 · 40 terms of size 10, each rounded by 10⁻¹⁶: 10⁻¹² if none cancels.
        assert torch.allclose(found, expected, rtol=1e-11, atol=1e-11)


def test_only_the_smoothed_loss_has_a_gradient():
    tensors, target = problem(0, 5, 3, 7)
    smoothed, unsmoothed = linear_cross_entropy(*tensors, target, 0.2)
    assert smoothed.requires_grad
    assert not unsmoothed.requires_grad
    with torch.no_grad():
        again, _ = linear_cross_entropy(*tensors, target, 0.2)
    assert torch.equal(again, smoothed)


@pytest.mark.parametrize("compiled", [True, False])
def test_fp32_with_the_kernel_and_without(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(under_test.kernels, "compiled", lambda dtype: None)
    tensors, target = problem(0, 300, 16, 1000, torch.float32)
    exact = plain([x.detach().double().requires_grad_() for x in tensors], target, 0.1)
    for found, expected in zip(sliced(tensors, target, 0.1), exact):
        # Sums of 300 or 1,000 terms, each rounded by 6·10⁻⁸: by the norm √1000 · 6·10⁻⁸ = 2·10⁻⁶,
        # with room for parts that are added separately and nearly cancel.
        assert (found - expected).norm() < 1e-5 * expected.norm()


def test_bf16_products_and_fp32_gradients_of_the_weights():
    tensors, target = problem(0, 2000, 32, 500, torch.float32, scale=0.3)
    results = sliced(tensors, target, 0.1, bf16=True)
    exact = plain(tensors, target, 0.1)
    # Inputs and logits are rounded by 2⁻⁹ each, 0.3 % together; in a sum over 2,000 tokens these
    # errors average out.
    for found, expected in zip(results[:2], exact[:2]):
        assert found.item() == pytest.approx(expected.item(), rel=1e-3)
    for found, expected in zip(results[2:], exact[2:]):
        assert found.dtype == torch.float32
        assert (found - expected).norm() < 0.01 * expected.norm()


def test_weights_that_are_not_fp32():
    """They do not go to the kernels."""
    tensors, target = problem(0, 30, 16, 70, torch.bfloat16)
    loss, _ = linear_cross_entropy(*tensors, target, 0.1)
    exact, *_ = plain([x.detach().double().requires_grad_() for x in tensors], target, 0.1)
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)  # sums in bf16, of 8 bits


def test_a_forbidden_token_leaves_the_plain_loss_exact():
    """Its logit makes the smoothed loss enormous; the plain one is exact."""
    tensors, target = problem(0, 40, 16, 70, torch.float32)
    with torch.no_grad():
        tensors[2][7] = -1e9
    target[target == 7] = 8
    _, found, *_ = sliced(tensors, target, 0.1)
    _, expected, *_ = plain([x.detach().double().requires_grad_() for x in tensors], target, 0.1)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_extreme_logits_stay_finite():
    tensors, target = problem(0, 20, 8, 50, torch.float32, scale=1e4)
    assert all(torch.isfinite(value).all() for value in sliced(tensors, target, 0.0))


def test_the_logits_are_never_all_in_memory():
    tensors, target = problem(0, 4000, 8, 5000, torch.float32)  # 20 million logits
    with mock.patch.dict(under_test.LOGITS_AT_ONCE, cpu=2**20), LargestTensor() as made:
        linear_cross_entropy(*tensors, target, 0.1)[0].backward()
    assert 0 < made.numbers <= 2**20


@pytest.mark.parametrize("wrong", [7, -1, 10**12])
def test_targets_outside_the_vocabulary_are_refused(wrong):
    tensors, target = problem(0, 3, 16, 7, torch.float32)
    target[1] = wrong
    with pytest.raises(IndexError):
        linear_cross_entropy(*tensors, target, 0.1)


def test_after_inference_mode():
    """The memory that all calls share must serve both."""
    tensors, target = problem(0, 30, 16, 70, torch.float32)
    with torch.inference_mode():
        first, _ = linear_cross_entropy(*tensors, target, 0.1)
    assert sliced(tensors, target, 0.1)[0].item() == first.item()


# ---------------------------------------------------------------- when it is the loss of a model


class Observed(nn.Linear):
    """A class of one's own."""


def test_only_a_plain_output_layer_is_sliced():
    output = nn.Linear(16, 70)
    assert can_slice(lambda hidden: output(hidden), output)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert can_slice(output.forward, output)
    others = [
        lambda hidden: output(hidden) / 2,
        lambda hidden: output(hidden * 1.0),
        lambda hidden: output(hidden).clone(),
        lambda hidden: output(hidden).mul_(2),
        lambda hidden: nn.Linear(16, 70)(hidden),
        lambda hidden: F.linear(hidden, output.weight),
        lambda hidden: output(hidden) + output(hidden),
        lambda hidden: output(torch.zeros(1, 16)),
        lambda hidden: output(F.dropout(hidden, 0.1)),
    ]
    assert not any(can_slice(logits, output) for logits in others)
    with torch.autocast("cpu", torch.float16):
        assert not can_slice(output.forward, output)
    without_bias, own = nn.Linear(16, 70, bias=False), Observed(16, 70)
    assert not can_slice(without_bias.forward, without_bias)
    assert not can_slice(own.forward, own)
    output.register_forward_hook(lambda module, inputs, result: result * 2)
    assert not can_slice(lambda hidden: output(hidden), output)
