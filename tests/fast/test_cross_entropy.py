"""The sliced cross-entropy gives what the plain one gives, and holds a fraction of the memory."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import cross_entropy as under_test
from engine.cross_entropy import SlicedCrossEntropy, linear_cross_entropy


def problem(tokens, width, vocabulary, dtype=torch.float64, scale=1.0):
    torch.manual_seed(0)
    hidden = (scale * torch.randn(tokens, width, dtype=dtype)).requires_grad_()
    weight = torch.randn(vocabulary, width, dtype=dtype).requires_grad_()
    bias = torch.randn(vocabulary, dtype=dtype).requires_grad_()
    return (hidden, weight, bias), torch.randint(0, vocabulary, (tokens,))


def loss_and_gradients(function, tensors, target, smoothing, factor=0.37):
    loss = function(*tensors, target, smoothing)
    return loss, *torch.autograd.grad(factor * loss, tensors)


def plain(hidden, weight, bias, target, smoothing):
    return F.cross_entropy(F.linear(hidden, weight, bias), target, label_smoothing=smoothing, reduction="sum")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 8), st.integers(2, 40), st.sampled_from([0.0, 0.1, 0.9]), st.integers(1, 300))
def test_as_the_plain_one_in_float64(tokens, width, vocabulary, smoothing, at_once):
    tensors, target = problem(tokens, width, vocabulary)
    expected = loss_and_gradients(plain, tensors, target, smoothing)
    with mock.patch.dict(under_test.LOGITS_AT_ONCE, cpu=at_once):  # a slice may be one row
        found = loss_and_gradients(linear_cross_entropy, tensors, target, smoothing)
    for one, other in zip(expected, found):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-11)


def test_float32_and_a_gradient_check():
    tensors, target = problem(300, 16, 1000, torch.float32)
    for one, other in zip(*(loss_and_gradients(f, tensors, target, 0.1) for f in (plain, linear_cross_entropy))):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)
    tensors, target = problem(5, 3, 7)
    assert torch.autograd.gradcheck(lambda *three: linear_cross_entropy(*three, target, 0.2), tensors)


def test_extreme_logits_stay_finite():
    tensors, target = problem(20, 8, 50, torch.float32, scale=1e4)
    for value in loss_and_gradients(linear_cross_entropy, tensors, target, 0.0):
        assert torch.isfinite(value).all()


def test_no_tokens():
    (hidden, weight, bias), target = problem(0, 4, 10)
    loss = linear_cross_entropy(hidden, weight, bias, target, 0.1)
    loss.backward()
    assert loss.item() == 0 and not weight.grad.any() and not bias.grad.any()


def test_bfloat16_is_close_and_keeps_float32_gradients_of_the_weights():
    tensors, target = problem(2000, 32, 500, torch.float32, scale=0.3)
    expected = loss_and_gradients(plain, tensors, target, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        found = loss_and_gradients(linear_cross_entropy, tensors, target, 0.1)
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-3)
    for one, other in zip(expected[1:], found[1:]):
        assert other.dtype == torch.float32 and (one - other).norm() < 0.01 * one.norm()


@pytest.mark.parametrize("off", ["switch", "fp16"])
def test_the_plain_way_where_it_must(off, monkeypatch):
    def refuse(*_):
        raise AssertionError("the sliced way was taken")

    monkeypatch.setattr(SlicedCrossEntropy, "apply", refuse)
    dtype = torch.float16 if off == "fp16" else torch.float32
    monkeypatch.setattr(SlicedCrossEntropy, "enabled", off == "fp16")
    tensors, target = problem(10, 4, 20, dtype)
    assert torch.isfinite(linear_cross_entropy(*tensors, target, 0.1))


def test_the_logits_are_never_all_in_memory():
    """Every tensor that the loss makes is smaller than a quarter of all the logits."""
    tensors, target = problem(4000, 8, 5000, torch.float32)  # 20 million logits
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            largest = max([largest, *(t.numel() for t in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(t))])
            return out

    with mock.patch.dict(under_test.LOGITS_AT_ONCE, cpu=2**20), Watch():
        linear_cross_entropy(*tensors, target, 0.1).backward()
    assert 0 < largest <= 2**20


def test_targets_that_are_no_tokens_are_refused():
    tensors, target = problem(3, 16, 7, torch.float32)
    for wrong in (7, -1, 10**12):
        target[1] = wrong
        with pytest.raises(IndexError):
            linear_cross_entropy(*tensors, target, 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_another_format(dtype):
    """Only weights in fp32 go to the kernels, under autocast too."""
    tensors, target = problem(30, 16, 70, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*tensors, target, 0.1)
    assert loss.item() == pytest.approx(plain(*(x.double() for x in tensors), target, 0.1).item(), rel=0.02)


def test_after_inference_mode():
    tensors, target = problem(30, 16, 70, torch.float32)
    with torch.inference_mode():
        first = linear_cross_entropy(*tensors, target, 0.1)
    assert linear_cross_entropy(*tensors, target, 0.1).item() == first.item()
