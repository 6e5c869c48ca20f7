"""PyTorch's encoder and decoder with the kernels: the losses and gradients that PyTorch computes.

Models that were changed are in test_edits.py.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import (
    WORDS,
    make_model,
    needs_compiler,
)
from torch import nn

import fast
from fast import build
from fast.layers import KernelDecoder, KernelEncoder
from model import SummedLoss

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


def with_kernels(model, dtype=torch.float32) -> SummedLoss:
    """The loss of the same model, whose encoder and decoder now use the kernels."""
    notes = []
    fast.use_kernels(model, dtype, notes.append)
    assert not notes
    assert type(model.transformer.encoder) is KernelEncoder
    assert type(model.transformer.decoder) is KernelDecoder
    return SummedLoss(model, 0.1)


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
    if not len(batch[3]):
        return
    *exact_losses, exact = exact_results(model, batch)
    *plain_losses, _ = results(SummedLoss(model, 0.1, sliced=False), batch)
    *losses, gradients = results(with_kernels(model), batch)
    # Products over up to 96 numbers, norms and softmax in fp32 round by 6·10⁻⁸ · √96 = 6·10⁻⁷ each,
    # in a dozen sub-layers; errors of many tokens average out in the sums.
    assert losses == pytest.approx(exact_losses, rel=1e-6)
    assert plain_losses == pytest.approx(exact_losses, rel=1e-6)
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
    *_, plain = results(SummedLoss(model, 0.1, sliced=False), batch, bf16=True)
    *losses, gradients = results(with_kernels(model, torch.bfloat16), batch, bf16=True)
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

    plain = SummedLoss(copy.deepcopy(model), 0.1, sliced=False)
    ours = with_kernels(model)
    assert loss(ours, 1) == loss(ours, 1) != loss(ours, 2)
    found = torch.tensor([loss(ours, seed) for seed in range(40)])
    expected = torch.tensor([loss(plain, seed) for seed in range(40)])
    # Two means of 40 draws differ by √(2/40) = 0.22 standard deviations; four times that is 0.9.
    assert abs(found.mean() - expected.mean()) < 0.9 * expected.std()
    assert 0.5 < found.std() / expected.std() < 2  # two estimates with errors of 11 % each
    model.eval()
    plain.eval()
    assert loss(ours, 1) == loss(ours, 2) == pytest.approx(loss(plain, 1), rel=1e-6)


@needs_compiler
@torch.no_grad()
def test_every_dropout_of_the_model_is_drawn():
    model = make_model(0).train()
    batch = make_batch(0, 4, 30, 33)
    ours = with_kernels(model)
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
    """In float64 there are no kernels; the loss is still made in slices."""
    model = make_model(seed).double().train()
    batch = make_batch(seed, 3, 20, 25)
    *losses, gradients = results(SummedLoss(model, 0.1), batch)
    *exact_losses, exact = exact_results(model, batch)
    assert losses == pytest.approx(exact_losses, rel=1e-12)
    assert distance(gradients, exact) < 1e-12


# ---------------------------------------------------------------- what the kernels leave to PyTorch


def note_about(model, dtype=torch.float32) -> str:
    """The line for the one part that is not replaced."""
    lines = []
    fast.use_kernels(model, dtype, lines.append)
    (line,) = lines
    assert "\n" not in line
    return line


def test_sizes_and_formats_that_the_kernels_lack(monkeypatch):
    model = make_model(0)
    model.transformer.encoder = torch.nn.Identity()
    assert "torch.float16" in note_about(model, torch.float16)
    if not build.why_not():
        model.transformer.decoder.layers[1].linear1.double()
        assert "transformer.decoder is slower than it could be" in note_about(model)
    monkeypatch.setenv("CXX", "none")
    build.library.cache_clear()
    try:
        fresh = make_model(0)
        fresh.transformer.encoder = torch.nn.Identity()
        assert f"fast/ is not used ({build.why_not()})" in note_about(fresh)
    finally:
        build.library.cache_clear()


@needs_compiler
def test_a_part_that_is_changed_later_is_left_to_pytorch():
    """The kernels ask in every call: C++ would read foreign memory, or give NaN."""
    batch = make_batch(0, 2, 5, 7)
    for change in (torch.nn.Module.double, torch.nn.Module.bfloat16):
        model = make_model(0).train()
        loss_of = with_kernels(model)
        change(model)
        loss, _ = loss_of(*batch)
        loss.backward()
        assert torch.isfinite(loss)
    model = make_model(0).train()
    loss_of = with_kernels(model)
    seen = []
    layer = model.transformer.encoder.layers[1]
    layer.register_forward_hook(lambda *arguments: seen.append(arguments[0]))
    loss_of(*batch)
    assert seen == [layer]


def more_heads(layer):
    """An attribute that PyTorch reads at every call: heads of 8."""
    layer.self_attn.num_heads = 8


def fewer_inner(layer):
    """Structured pruning: 90 of 96 inner units stay."""
    layer.linear1.weight = nn.Parameter(layer.linear1.weight[:90].detach().clone())
    layer.linear1.bias = nn.Parameter(layer.linear1.bias[:90].detach().clone())
    layer.linear2.weight = nn.Parameter(layer.linear2.weight[:, :90].detach().clone())


def norm_registered_last(layer):
    norm = layer.norm1
    del layer.norm1
    layer.norm1 = norm


def another_norm(layer):
    layer.unused = nn.LayerNorm(64)


def one_norm_twice(layer):
    layer.norm2 = layer.norm1


def method_of_a_part(layer):
    forward = layer.linear1.forward
    layer.linear1.forward = lambda x: 0.5 * forward(x)


def method_of_the_layer(layer):
    block = layer._ff_block
    layer._ff_block = lambda x: 2 * block(x)


def buffer_in_place_of_a_weight(layer):
    del layer.norm1.weight
    layer.norm1.register_buffer("weight", torch.ones(1).expand(64))


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        more_heads,
        fewer_inner,
        norm_registered_last,
        another_norm,
        one_norm_twice,
        method_of_a_part,
        method_of_the_layer,
        buffer_in_place_of_a_weight,
    ],
)
@pytest.mark.parametrize("coder", ["encoder", "decoder"])
def test_changes_that_types_do_not_show(change, coder):
    """Sizes, names, methods and kinds of tensors are asked as well as types."""
    model = make_model(0).train()
    for layer in getattr(model.transformer, coder).layers:
        change(layer)
    batch = make_batch(0, 3, 9, 11)
    expected, _ = SummedLoss(model, 0.1, sliced=False)(*batch)
    fast.use_kernels(model, torch.float32)
    found, _ = SummedLoss(model, 0.1)(*batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    if coder == "decoder":
        assert not change.__name__.startswith(("more", "fewer", "method", "buffer")) or (
            fast.why_not_compiled(model.transformer.decoder)
        )


@needs_compiler
def test_masks_that_the_kernels_do_not_know():
    """Whatever the caller passes, the result is PyTorch's."""
    model = make_model(0).eval()
    encoder, decoder = model.transformer.encoder, model.transformer.decoder
    x, memory = torch.randn(2, 6, 64), torch.randn(2, 5, 64)
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    calls = [
        lambda: encoder(x, mask=causal),
        lambda: encoder(x, mask=causal, is_causal=True),
        lambda: encoder(x, src_key_padding_mask=torch.tensor([[0.0] * 6, [0.0] * 5 + [-9.0]])),
        lambda: decoder(x, memory),
        lambda: decoder(x, memory, tgt_mask=causal),
        lambda: decoder(x, memory, tgt_mask=causal, tgt_is_causal=True),
        lambda: decoder(x, memory, tgt_mask=causal | causal.T.roll(1, 0)),
        lambda: decoder(x, memory, tgt_mask=causal.float() * -9),
        lambda: decoder(x, memory, memory_mask=torch.eye(6, 5, dtype=torch.bool)),
        lambda: decoder(x, memory, tgt_key_padding_mask=causal[-2:].flip(0)),
        lambda: decoder(x[0], memory[0], tgt_mask=causal),
    ]
    with torch.no_grad():
        expected = [call() for call in calls]
        with_kernels(model)
        for number, (call, wanted) in enumerate(zip(calls, expected)):
            assert torch.allclose(call(), wanted, atol=1e-5, equal_nan=True), number


@needs_compiler
def test_what_pytorch_refuses_is_refused():
    loss_of = with_kernels(make_model(0, max_length=10))
    with pytest.raises(ValueError, match="12 tokens are more than the 10"):
        loss_of(*make_batch(0, 2, 5, 12))
    batch = list(make_batch(0, 2, 5, 7))
    batch[0] = batch[0] + WORDS
    with pytest.raises(IndexError):
        loss_of(*batch)


def test_random_numbers_are_as_they_were():
    """Asking whether the loss can be sliced draws none."""
    model = make_model(0)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert fast.can_slice(model.logits, model.output)
    assert torch.equal(torch.rand(2), expected)
