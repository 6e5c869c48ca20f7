"""The fused training pass gives the losses and gradients of the plain model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import BatchedAttention
from engine.native import build
from engine.native.training import Kernels
from fast import fused
from model import ModelConfig, SummedLoss, Translator

needs_compiler = pytest.mark.skipif(bool(build.why_not()), reason=f"no compiled functions here: {build.why_not()}")
SIZES = dict(d_model=64, nhead=4, dim_feedforward=100, num_encoder_layers=2, num_decoder_layers=2)


def make_model(dropout=0.0, **sizes) -> Translator:
    torch.manual_seed(0)
    return Translator(ModelConfig(97, 89, dropout=dropout, **(SIZES | sizes))).train()


def make_batch(pairs, source, target):
    """Sources of different lengths, and a target of which some positions are not real."""
    torch.manual_seed(1)
    src, tgt = torch.randint(3, 97, (pairs, source)), torch.randint(3, 89, (pairs, target + 1))
    lengths = torch.randint(1, source + 1, (pairs, 1))
    real = torch.nonzero(torch.rand(pairs * target) < 0.8).squeeze(1)
    return src, torch.arange(source) >= lengths, tgt[:, :-1], real, tgt[:, 1:].flatten()[real]


def loss_and_gradients(model, batch, enabled, bf16=False):
    """The summed loss and every gradient, in float64."""
    model.zero_grad()
    Kernels.enabled = enabled
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = SummedLoss(model, label_smoothing=0.1)(*batch)
        loss.backward()
    finally:
        Kernels.enabled = True
    return loss.item(), {name: p.grad.double().clone() for name, p in model.named_parameters()}


def distance(found, wanted):
    """Of all gradients together, relative."""
    return (
        sum((found[name] - wanted[name]).norm() ** 2 for name in wanted) / sum(g.norm() ** 2 for g in wanted.values())
    ) ** 0.5


@needs_compiler
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 70))
def test_as_the_plain_model(pairs, source, target):
    model, batch = make_model(), make_batch(pairs, source, target)
    assert fused.is_for(model, torch.float32)
    found = loss_and_gradients(model, batch, enabled=True)
    wanted = loss_and_gradients(model.double(), batch, enabled=False)
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert distance(found[1], wanted[1]) < 2e-6


@needs_compiler
def test_bf16_rounds_no_more_than_the_plain_way():
    model, batch = make_model(), make_batch(4, 30, 33)
    exact = loss_and_gradients(make_model().double(), batch, enabled=False)
    ours, plain = (loss_and_gradients(model, batch, enabled, bf16=True) for enabled in (True, False))
    assert ours[0] == pytest.approx(exact[0], rel=1e-3)
    assert distance(ours[1], exact[1]) < 1.5 * distance(plain[1], exact[1]) < 0.1


@needs_compiler
def test_dropout_is_drawn_from_the_seed_and_unbiased():
    model, batch = make_model(dropout=0.1), make_batch(4, 30, 33)

    def loss(seed):
        torch.manual_seed(seed)
        return loss_and_gradients(model, batch, enabled=True)[0]

    assert loss(1) == loss(1) != loss(2)
    model.eval()
    without = loss(1)
    assert without == loss(2)
    model.train()
    mean = sum(map(loss, range(20))) / 20
    plain = []
    for seed in range(20):
        torch.manual_seed(seed)
        plain.append(loss_and_gradients(model, batch, enabled=False)[0])
    spread = torch.tensor(plain).std().item()
    assert abs(mean - sum(plain) / 20) < 1.5 * spread  # four standard errors of the difference


@needs_compiler
@pytest.mark.parametrize(
    "reason",
    [
        "norm_first",
        "narrow heads",
        "switched off",
        "float64",
        "own attention",
        "fp16",
        "compiling",
        "hook",
        "gelu",
        "plain attention",
    ],
)
def test_the_plain_way_where_it_must(reason, monkeypatch):
    model, dtype = make_model(), torch.float32
    if reason == "norm_first":
        model = make_model(norm_first=True)
    elif reason == "narrow heads":
        model = make_model(nhead=8)
    elif reason == "switched off":
        monkeypatch.setattr(Kernels, "enabled", False)
    elif reason == "float64":
        model = model.double()
    elif reason == "own attention":
        from labs.attention_op import use_in

        use_in(model, "python")
    elif reason == "fp16":
        dtype = torch.float16
    elif reason == "hook":
        model.transformer.encoder.layers[1].linear1.register_forward_hook(lambda *_: None)
    elif reason == "gelu":
        model.transformer.decoder.layers[0].activation = torch.nn.functional.gelu
    elif reason == "plain attention":
        monkeypatch.setattr(BatchedAttention, "enabled", False)
    else:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not fused.is_for(model, dtype)
    if reason not in ("fp16", "compiling"):
        batch = make_batch(2, 5, 7)
        assert torch.isfinite(SummedLoss(model, 0.1)(*batch))


@needs_compiler
def test_no_dropout_as_a_whole_number():
    assert loss_and_gradients(make_model(dropout=0), make_batch(2, 5, 7), enabled=True)[0] == pytest.approx(
        loss_and_gradients(make_model(), make_batch(2, 5, 7), enabled=True)[0]
    )


@needs_compiler
def test_too_long_a_sentence_is_refused():
    model = make_model(max_length=10)
    with pytest.raises(ValueError, match="11 tokens are more than the 10"):
        SummedLoss(model, 0.1)(*make_batch(1, 5, 11))
