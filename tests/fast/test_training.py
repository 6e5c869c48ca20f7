"""`fast.loss`: the losses and gradients of `SummedLoss`, or that class and a line that says why."""

import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import (
    OTHER_PARTS,
    OTHER_WEIGHTS,
    WORDS,
    layer_of,
    make_model,
    needs_compiler,
)
from torch import nn

import fast
from fast import build
from fast.training import KernelLoss, SlicedLoss, loss_is_known, why_not
from labs.attention_op import use_in
from model import SummedLoss, Translator

seeds = st.integers(0, 2**31)


def make_batch(seed, pairs, source, target):
    """Sources of different lengths, and a target of which some positions are padding."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(3, WORDS, (pairs, source), generator=generator)
    tgt = torch.randint(3, WORDS, (pairs, target + 1), generator=generator)
    src_pad = torch.arange(source) >= torch.randint(1, source + 1, (pairs, 1), generator=generator)
    target_positions = torch.nonzero(torch.rand(pairs * target, generator=generator) < 0.8).squeeze(
        1
    )
    return src, src_pad, tgt[:, :-1], target_positions, tgt[:, 1:].flatten()[target_positions]


def results(loss_of, batch, bf16=False):
    """Both losses, and every gradient of the first, in float64."""
    loss_of.model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        smoothed, plain = loss_of(*batch)
    smoothed.backward()
    assert not plain.requires_grad
    weights = loss_of.model.named_parameters()
    gradients = {name: weight.grad.double().clone() for name, weight in weights}
    return smoothed.item(), plain.item(), gradients


class ExactLoss(SummedLoss):
    """`SummedLoss`, which computes the softmax in fp32, in float64."""

    def forward(self, src, src_pad, tgt_in, target_positions, tgt_out):
        logits = self.model(src, src_pad, tgt_in, target_positions)
        smoothed, plain = (
            F.cross_entropy(logits, tgt_out, label_smoothing=smoothing, reduction="sum")
            for smoothing in (self.label_smoothing, 0.0)
        )
        return smoothed, plain.detach()


def exact_results(model, batch):
    """As `results` of PyTorch's own operations, in float64."""
    exact = type(model)(model.config).double().train(model.training)
    exact.load_state_dict(model.state_dict())
    return results(ExactLoss(exact, 0.1), batch)


def distance(found, expected):
    """‖found − expected‖ / ‖expected‖ of all gradients as one vector."""
    squares = sum(gradient.norm() ** 2 for gradient in expected.values())
    errors = sum((found[name] - expected[name]).norm() ** 2 for name in expected)
    return (errors / squares).sqrt()


@needs_compiler
@settings(max_examples=20)
@given(
    seeds,
    st.integers(1, 4),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from([16, 48, 96]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.booleans(),
)
def test_as_the_plain_loss_in_float64(
    seed, pairs, source, target, dim_feedforward, nhead, training, norm_first
):
    model = make_model(seed, dim_feedforward=dim_feedforward, nhead=nhead, norm_first=norm_first)
    model.train(training)
    batch = make_batch(seed, pairs, source, target)
    loss_of = fast.loss(model, 0.1, torch.float32)
    assert type(loss_of) is KernelLoss
    if not len(batch[3]):
        return
    *losses, gradients = results(loss_of, batch)
    *exact_losses, exact = exact_results(model, batch)
    # Products over up to 96 numbers, norms and softmax in fp32 round by 6·10⁻⁸ · √96 = 6·10⁻⁷ each,
    # in a dozen sub-layers; errors of many tokens average out in the sums.
    assert losses == pytest.approx(exact_losses, rel=1e-6)
    assert results(SummedLoss(model, 0.1), batch)[:2] == pytest.approx(exact_losses, rel=1e-6)
    # A gradient that is nearly 0, such as that of the keys' bias, has the rounding of the others.
    largest = max(gradient.norm() for gradient in exact.values())
    for name, gradient in exact.items():
        error = (gradients[name] - gradient).norm()
        assert error < 1e-5 * max(gradient.norm(), 0.1 * largest), name


@needs_compiler
@pytest.mark.parametrize("seed", range(2))
def test_bf16_rounds_no_more_than_the_plain_way(seed):
    model = make_model(seed, norm_first=seed % 2 == 1).train()
    batch = make_batch(seed, 4, 30, 33)
    *exact_losses, exact = exact_results(model, batch)
    *losses, gradients = results(fast.loss(model, 0.1, torch.bfloat16), batch, bf16=True)
    *_, plain = results(SummedLoss(model, 0.1), batch, bf16=True)
    # Every number is rounded by 2⁻⁹; errors of 100 tokens average out.
    assert losses == pytest.approx(exact_losses, rel=1e-3)
    assert distance(gradients, exact) < 1.5 * distance(plain, exact) < 0.1


@needs_compiler
def test_dropout_is_drawn_from_the_seed_and_unbiased():
    model = make_model(0, dropout=0.1, norm_first=True).train()
    batch = make_batch(0, 4, 30, 33)

    @torch.no_grad()
    def loss(loss_of, seed):
        torch.manual_seed(seed)
        return loss_of(*batch)[0].item()

    ours, plain = fast.loss(model, 0.1, torch.float32), SummedLoss(model, 0.1)
    assert loss(ours, 1) == loss(ours, 1) != loss(ours, 2)
    found = torch.tensor([loss(ours, seed) for seed in range(40)])
    expected = torch.tensor([loss(plain, seed) for seed in range(40)])
    # Two means of 40 draws differ by √(2/40) = 0.22 standard deviations; four times that is 0.9.
    assert abs(found.mean() - expected.mean()) < 0.9 * expected.std()
    assert 0.5 < found.std() / expected.std() < 2  # two estimates with errors of 11 % each
    model.eval()
    assert loss(ours, 1) == loss(ours, 2) == pytest.approx(loss(plain, 1), rel=1e-6)


@needs_compiler
@torch.no_grad()
def test_every_dropout_of_the_model_is_drawn():
    model = make_model(0).train()
    batch = make_batch(0, 4, 30, 33)
    ours = fast.loss(model, 0.1, torch.float32)
    attributes = {nn.Dropout: "p", nn.MultiheadAttention: "dropout"}
    dropouts = [module for module in model.modules() if type(module) in attributes]
    assert len(dropouts) == 1 + 2 * 4 + 2 * 6  # embedding; layers of encoder and decoder
    without = ours(*batch)[0].item()
    for module in dropouts:
        rate = attributes[type(module)]
        setattr(module, rate, 0.5)
        # Ten times the rounding of a sum.
        assert abs(ours(*batch)[0].item() / without - 1) > 1e-5, module
        module.eval()  # the rest of the model still trains
        assert ours(*batch)[0].item() == pytest.approx(without, rel=1e-6)
        module.train()
        setattr(module, rate, 0.0)


@pytest.mark.parametrize("seed", range(2))
def test_the_loss_for_a_gpu_on_a_cpu(seed):
    model = make_model(seed).double().train()
    batch = make_batch(seed, 3, 20, 25)
    *losses, gradients = results(SlicedLoss(model, 0.1, torch.float64), batch)
    *exact_losses, exact = exact_results(model, batch)
    assert losses == pytest.approx(exact_losses, rel=1e-12)
    assert distance(gradients, exact) < 1e-12


# ---------------------------------------------------------------- models that run their own code


def refusal(model, dtype=torch.float32) -> str:
    """The one line that says why there is no faster loss; the plain loss still works."""
    lines = []
    loss_of = fast.loss(model, 0.1, dtype, lines.append)
    assert type(loss_of) is SummedLoss
    (line,) = lines
    assert "\n" not in line
    if dtype != torch.float16:
        loss, _ = loss_of(*make_batch(0, 2, 5, 7))
        assert torch.isfinite(loss)
    return line


def put_linear2_into_a_container(model):
    layer_of(model).linear2 = nn.Sequential(layer_of(model).linear2)


def use_gelu(model):
    layer_of(model).activation = F.gelu


def nothing(*arguments):
    """A hook."""


@needs_compiler
@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda model: use_in(model, "python"), "not those of PyTorch"),
        (put_linear2_into_a_container, "not those of PyTorch"),
        *((change, "its layers or positions are different") for change in OTHER_PARTS),
        (use_gelu, "with ReLU"),
        (lambda model: model.double(), "not fp32"),
        (lambda model: layer_of(model).norm1.double(), "not fp32"),
        (lambda model: layer_of(model).linear1.register_forward_hook(nothing), "hook"),
        (lambda model: model.output.register_forward_pre_hook(nothing), "hook"),
        (lambda model: model.transformer.decoder.register_full_backward_hook(nothing), "hook"),
        *((change, "do not know") for change in OTHER_WEIGHTS),
    ],
)
def test_a_changed_model_takes_the_plain_way(change, reason):
    model = make_model(0)
    change(model)
    if reason == "not fp32":
        assert reason in why_not(model, torch.float32)
    else:
        assert reason in refusal(model)


class Unscaled(Translator):
    """Without the factor √D."""

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


class Renamed(Translator):
    """With an argument that has no default."""

    def forward(self, src, src_pad, tgt_in, target_positions, factor):
        return factor * super().forward(src, src_pad, tgt_in, target_positions)


class WithoutWords(Translator):
    """With one source token in ten replaced, in training only."""

    def encode(self, src, src_pad):
        if self.training:
            src = src.masked_fill(torch.rand(src.shape) < 0.1, 0)
        return super().encode(src, src_pad)


@needs_compiler
@pytest.mark.parametrize("changed", [Unscaled, Uncovered, Cooled, WithoutWords])
@pytest.mark.parametrize("dropout", [0, 0.1])
def test_a_changed_model_py_takes_the_plain_way(changed, dropout):
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(0, dropout=dropout)
        model.__class__ = changed
        assert "model.py was changed" in refusal(model, dtype)
        assert model.training
        rates = {part.p for part in model.modules() if isinstance(part, nn.Dropout)}
        assert (
            rates == {dropout} and model.transformer.encoder.layers[0].self_attn.dropout == dropout
        )


@needs_compiler
def test_a_changed_signature_takes_the_plain_way():
    model = make_model(0)
    model.__class__ = Renamed
    assert "model.py was changed" in why_not(model, torch.float32)


@needs_compiler
def test_the_comparisons_leave_frozen_parts_in_evaluation_mode():
    model = make_model(0).train()
    model.transformer.encoder.eval()
    assert why_not(model, torch.float32) == ""
    assert fast.decoder(model)
    assert model.training and model.transformer.decoder.layers[0].training
    assert not model.transformer.encoder.layers[0].training


@needs_compiler
def test_the_comparison_leaves_random_numbers_as_they_were():
    model = make_model(0, dropout=0.1)
    before = torch.get_rng_state()
    assert why_not(model, torch.float32) == ""
    assert torch.equal(torch.get_rng_state(), before)


@needs_compiler
def test_sizes_and_formats_that_the_kernels_lack():
    assert "multiple of 16" in refusal(make_model(0, nhead=8))
    assert "multiple of 16" in refusal(make_model(0, dim_feedforward=50))
    assert "no kernels for torch.float16" in refusal(make_model(0), torch.float16)


def test_without_a_compiler(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "none")
    build.library.cache_clear()
    try:
        reason = "CXX=none" if sys.platform == "linux" else "the C++ functions need Linux"
        assert refusal(make_model(0)).endswith(f"fast/ is not used ({reason})")
    finally:
        build.library.cache_clear()
    assert capsys.readouterr() == ("", "")


@needs_compiler
def test_what_pytorch_refuses_is_refused():
    loss_of = fast.loss(make_model(0, max_length=10), 0.1, torch.float32)
    with pytest.raises(ValueError, match="11 tokens are more than the 10"):
        loss_of(*make_batch(0, 1, 5, 11))
    for place, wrong in ((0, WORDS), (2, -1), (4, WORDS)):  # of src, tgt_in and tgt_out
        batch = make_batch(0, 2, 5, 7)
        first = (0,) * batch[place].dim()
        batch[place][first] = wrong
        with pytest.raises(IndexError):
            loss_of(*batch)


def test_a_changed_loss_is_not_ignored(monkeypatch):
    """A reader may change the label smoothing, or return one value more."""

    def sharing_among_others(loss, src, src_pad, tgt_in, target_positions, tgt_out):
        log_p = loss.model(src, src_pad, tgt_in, target_positions).float().log_softmax(-1)
        plain = F.nll_loss(log_p, tgt_out, reduction="sum")
        others = (-log_p.sum(-1).sum() - plain) / (log_p.size(1) - 1)
        return torch.lerp(plain, others, loss.label_smoothing), plain

    def three(loss, *inputs):
        return (*stock(loss, *inputs), 0)

    stock = SummedLoss.forward
    assert loss_is_known()
    for forward in (sharing_among_others, three):
        monkeypatch.setattr(SummedLoss, "forward", forward)
        assert not loss_is_known() and why_not(make_model(0), torch.float32)
