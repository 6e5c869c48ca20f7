"""`fast.loss`: the losses and gradients of the plain model, or None with a line that says why."""

import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import OTHER_WEIGHTS, WORDS, layer_of, make_model, needs_compiler
from torch import nn

import fast
from fast import build
from fast.training import KernelLoss, SlicedLoss, why_not
from labs.attention_op import use_in
from model import SummedLoss, Translator

seeds = st.integers(0, 2**31)


def make_batch(seed, pairs, source, target):
    """Sources of different lengths, and a target of which some positions are not real."""
    generator = torch.Generator().manual_seed(seed)
    src, tgt = (
        torch.randint(3, WORDS, (pairs, length), generator=generator)
        for length in (source, target + 1)
    )
    src_pad = torch.arange(source) >= torch.randint(1, source + 1, (pairs, 1), generator=generator)
    real = torch.nonzero(torch.rand(pairs * target, generator=generator) < 0.8).squeeze(1)
    return src, src_pad, tgt[:, :-1], real, tgt[:, 1:].flatten()[real]


def results(loss_of, batch, bf16=False):
    """Both losses, and every gradient of the first, in float64."""
    model = loss_of.model
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss, unsmoothed = loss_of(*batch)
    loss.backward()
    assert not unsmoothed.requires_grad
    return (
        loss.item(),
        unsmoothed.item(),
        {name: p.grad.double().clone() for name, p in model.named_parameters()},
    )


class ExactLoss(SummedLoss):
    """In float64 to the end; the plain loss itself takes logits in float32."""

    def forward(self, src, src_pad, tgt_in, real, tgt_out):
        logits = self.model(src, src_pad, tgt_in, real)
        smoothed = F.cross_entropy(
            logits, tgt_out, label_smoothing=self.label_smoothing, reduction="sum"
        )
        return smoothed, F.cross_entropy(logits.detach(), tgt_out, reduction="sum")


def exact_results(model, batch):
    """As `results` of the plain way, in float64."""
    exact = type(model)(model.config).double().train(model.training)
    exact.load_state_dict(model.state_dict())
    return results(ExactLoss(exact, 0.1), batch)


def distance(found, wanted):
    """Of all gradients together, relative."""
    squares = sum(gradient.norm() ** 2 for gradient in wanted.values())
    return (sum((found[name] - wanted[name]).norm() ** 2 for name in wanted) / squares).sqrt()


@needs_compiler
@settings(max_examples=12, deadline=None)
@given(
    seeds,
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 70),
    st.integers(1, 96),
    *[st.booleans()] * 2,
)
def test_as_the_plain_loss_in_float64(
    seed, pairs, source, target, feedforward, training, norm_first
):
    model = make_model(seed, dim_feedforward=feedforward, norm_first=norm_first).train(training)
    batch = make_batch(seed, pairs, source, target)
    loss_of = fast.loss(model, 0.1, torch.float32)
    assert type(loss_of) is KernelLoss
    if not len(batch[3]):
        return
    *losses, gradients = results(loss_of, batch)
    *exact_losses, exact = exact_results(model, batch)
    # Products over up to 96 numbers, norms and softmax in fp32 round by 6·10⁻⁸ · √96 = 6·10⁻⁷ each, in a dozen of sub-layers;
    # errors of many tokens average out in the sums.
    assert losses == pytest.approx(exact_losses, rel=1e-6)
    assert results(SummedLoss(model, 0.1), batch)[:2] == pytest.approx(exact_losses, rel=1e-6)
    assert distance(gradients, exact) < 5e-6


@needs_compiler
@pytest.mark.parametrize("seed", range(4))
def test_bf16_rounds_no_more_than_the_plain_way(seed):
    model, batch = make_model(seed, norm_first=seed % 2 == 1).train(), make_batch(seed, 4, 30, 33)
    *exact_losses, exact = exact_results(model, batch)
    *losses, gradients = results(fast.loss(model, 0.1, torch.bfloat16), batch, bf16=True)
    *_, plain = results(SummedLoss(model, 0.1), batch, bf16=True)
    assert losses == pytest.approx(
        exact_losses, rel=1e-3
    )  # 2⁻⁹ in every number, averaged over 100 tokens
    assert distance(gradients, exact) < 1.5 * distance(plain, exact) < 0.1


@needs_compiler
@pytest.mark.parametrize("norm_first", [False, True])
def test_dropout_is_drawn_from_the_seed_and_unbiased(norm_first):
    model, batch = (
        make_model(0, dropout=0.1, norm_first=norm_first).train(),
        make_batch(0, 4, 30, 33),
    )

    @torch.no_grad()
    def loss(loss_of, seed):
        torch.manual_seed(seed)
        return loss_of(*batch)[0].item()

    ours, plain = fast.loss(model, 0.1, torch.float32), SummedLoss(model, 0.1)
    assert loss(ours, 1) == loss(ours, 1) != loss(ours, 2)
    found, wanted = (
        torch.tensor([loss(loss_of, seed) for seed in range(40)]) for loss_of in (ours, plain)
    )
    # Two means of 40 draws differ by √(2/40) = 0.22 standard deviations; four times that is 0.9.
    assert abs(found.mean() - wanted.mean()) < 0.9 * wanted.std()
    assert 0.5 < found.std() / wanted.std() < 2  # a ratio of two estimates of 11 % each
    model.eval()
    assert loss(ours, 1) == loss(ours, 2) == pytest.approx(loss(plain, 1), rel=1e-6)


@needs_compiler
@torch.no_grad()
def test_every_dropout_of_the_model_is_drawn():
    model, batch = make_model(0).train(), make_batch(0, 4, 30, 33)
    ours, kinds = (
        fast.loss(model, 0.1, torch.float32),
        {nn.Dropout: "p", nn.MultiheadAttention: "dropout"},
    )
    rates = [(module, kinds[type(module)]) for module in model.modules() if type(module) in kinds]
    assert len(rates) == 1 + 2 * 4 + 2 * 6  # embedding; layers of the encoder and of the decoder
    without = ours(*batch)[0].item()
    for module, rate in rates:
        setattr(module, rate, 0.5)
        assert abs(ours(*batch)[0].item() / without - 1) > 1e-5, (
            module
        )  # ten times the rounding of a sum
        module.eval()  # alone: the model still trains
        assert ours(*batch)[0].item() == pytest.approx(without, rel=1e-6)
        module.train()
        setattr(module, rate, 0.0)
    assert ours(*batch)[0].item() == pytest.approx(without, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_for_a_gpu_computed_here(seed):
    """`SlicedLoss` is the same on every device; `benchmarks.gpu` checks it on a GPU."""
    model, batch = make_model(seed).double().train(), make_batch(seed, 3, 20, 25)
    *losses, gradients = results(SlicedLoss(model, 0.1, torch.float64), batch)
    *exact_losses, exact = exact_results(model, batch)
    assert losses == pytest.approx(exact_losses, rel=1e-12) and distance(gradients, exact) < 1e-12


def refusal(model, dtype=torch.float32) -> str:
    """The one line that says why there is no faster loss; the plain one still computes."""
    said = []
    assert (
        fast.loss(model, 0.1, dtype, said.append) is None and len(said) == 1 and "\n" not in said[0]
    )
    if dtype != torch.float16:
        loss, _ = SummedLoss(model, 0.1)(*make_batch(0, 2, 5, 7))
        assert torch.isfinite(loss)
    return said[0]


@needs_compiler
@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda model: use_in(model, "python"), "not those of PyTorch"),
        (
            lambda model: setattr(
                layer_of(model), "linear2", nn.Sequential(layer_of(model).linear2)
            ),
            "not those of PyTorch",
        ),
        (lambda model: setattr(layer_of(model), "activation", F.gelu), "with ReLU"),
        (lambda model: model.double(), "not fp32"),
        (lambda model: layer_of(model).linear1.register_forward_hook(lambda *_: None), "hook"),
        (lambda model: model.output.register_forward_pre_hook(lambda *_: None), "hook"),
        (
            lambda model: model.transformer.decoder.register_full_backward_hook(lambda *_: None),
            "hook",
        ),
        *((change, "do not know") for change in OTHER_WEIGHTS),
    ],
)
def test_a_changed_model_takes_the_plain_way(change, reason):
    model = make_model(0)
    assert fast.loss(model, 0.1, torch.float32)
    change(model)
    assert reason in refusal(model)


class Unscaled(Translator):
    """As a reader who tries what √D is for would change model.py."""

    def embed(self, embedding, ids, first=0):
        return embedding(ids) + self.positions[first : first + ids.size(1)]


class Uncovered(Translator):
    """Without the padding mask of the source."""

    def decode(self, memory, src_pad, tgt_in):
        return super().decode(memory, torch.zeros_like(src_pad), tgt_in)


class Cooled(Translator):
    """With a temperature."""

    def forward(self, *batch):
        return super().forward(*batch) / 16


@needs_compiler
@pytest.mark.parametrize("changed", [Unscaled, Uncovered, Cooled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_changed_model_py_takes_the_plain_way(changed, dtype):
    model = make_model(0)
    model.__class__ = changed
    assert "model.py was changed" in refusal(model, dtype) and model.training


def test_one_weight_of_another_format():
    model = make_model(0)
    layer_of(model).norm1.double()
    assert "not fp32" in why_not(model, torch.float32)


@needs_compiler
def test_sizes_that_are_not_for_the_kernels():
    assert "multiple of 16" in refusal(make_model(0, nhead=8))


def test_formats_that_are_not_for_the_kernels():
    assert "not compiled" in refusal(make_model(0), torch.float16) or build.why_not()


def test_without_a_compiler(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "none")
    build.library.cache_clear()
    try:
        assert refusal(make_model(0)).endswith("is not used (CXX=none)") or sys.platform != "linux"
        assert fast.loss(make_model(0), 0.1, torch.float32) is None  # `log` may be left out
    finally:
        build.library.cache_clear()
    assert capsys.readouterr() == ("", "")


@needs_compiler
def test_what_pytorch_refuses_is_refused():
    loss_of = fast.loss(make_model(0, max_length=10), 0.1, torch.float32)
    with pytest.raises(ValueError, match="11 tokens are more than the 10"):
        loss_of(*make_batch(0, 1, 5, 11))
    for place, wrong in (
        (0, WORDS),
        (2, -1),
        (4, WORDS),
    ):  # a source, an input and an output token that is none
        batch = make_batch(0, 2, 5, 7)
        batch[place][(0,) * batch[place].dim()] = wrong
        with pytest.raises(IndexError):
            loss_of(*batch)
