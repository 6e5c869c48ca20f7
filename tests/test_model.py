"""The model against a float64 reference written by hand; what modes must not change."""

import math
from dataclasses import asdict, replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import model as model_py
import train
from engine.errors import UserError
from model import (
    ModelConfig,
    SummedLoss,
    Translator,
    cross_attention,
    cross_entropy,
    sampled_cross_entropy,
    sinusoids,
    sizes_of,
    training_flops,
)
from train import Config

SOURCE_VOCAB, TARGET_VOCAB = 50, 60


def make_model(norm_first=False, dropout=0.0, dtype=torch.float64, **sizes) -> Translator:
    torch.manual_seed(0)
    sizes = TINY | dict(dropout=dropout, norm_first=norm_first) | sizes
    return Translator(ModelConfig(SOURCE_VOCAB, TARGET_VOCAB, **sizes)).to(dtype)


def make_batch(batch=3, source=7, target=6, padding=2):
    """Random ids; the last row's source ends in padding."""
    torch.manual_seed(1)
    src = torch.randint(3, SOURCE_VOCAB, (batch, source))
    src_pad = torch.zeros(batch, source, dtype=torch.bool)
    src_pad[-1, source - padding :] = True
    return src, src_pad, torch.randint(3, TARGET_VOCAB, (batch, target))


def attention_by_hand(module, query, memory, mask):
    """Multi-head attention from its definition; `mask` (B, T, S) is True where one may not look."""
    d, heads = module.embed_dim, module.num_heads
    weights_of = module.in_proj_weight.split(d)
    biases_of = module.in_proj_bias.split(d)
    inputs = (query, memory, memory)
    q, k, v = (x @ w.T + b for x, w, b in zip(inputs, weights_of, biases_of))
    outputs = []
    for head in range(heads):
        part = slice(head * d // heads, (head + 1) * d // heads)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(d // heads)
        weights = scores.masked_fill(mask, -math.inf).exp()
        outputs.append(weights / weights.sum(-1, keepdim=True) @ v[..., part])
    return module.out_proj(torch.cat(outputs, -1))


def positions_by_hand(length, d):
    """The two equations of section 3.5, one number at a time."""
    table = torch.zeros(length, d, dtype=torch.float64)
    for p in range(length):
        for i in range(0, d, 2):
            table[p, i] = math.sin(p / 10000 ** (i / d))
            table[p, i + 1] = math.cos(p / 10000 ** (i / d))
    return table


def layer_by_hand(layer, x, own_mask, memory=None, memory_mask=None):
    """One encoder layer, or with a memory one decoder layer; post-norm or pre-norm."""

    def add(x, norm, sublayer):
        return x + sublayer(norm(x)) if layer.norm_first else norm(x + sublayer(x))

    x = add(x, layer.norm1, lambda x: attention_by_hand(layer.self_attn, x, x, own_mask))
    norms = [layer.norm2]
    if memory is not None:
        norms.append(layer.norm3)
        cross = layer.multihead_attn
        x = add(x, layer.norm2, lambda x: attention_by_hand(cross, x, memory, memory_mask))
    return add(x, norms[-1], lambda x: layer.linear2(F.relu(layer.linear1(x))))


def logits_by_hand(model, src, src_pad, tgt_in):
    """The whole model from its definition."""
    d, padding = model.config.d_model, src_pad[:, None, :]
    memory = model.source_embedding.weight[src] * math.sqrt(d) + positions_by_hand(src.size(1), d)
    for layer in model.transformer.encoder.layers:
        memory = layer_by_hand(layer, memory, padding)
    memory = model.transformer.encoder.norm(memory)

    length = tgt_in.size(1)
    future = torch.tensor([[j > i for j in range(length)] for i in range(length)])[None]
    y = model.target_embedding.weight[tgt_in] * math.sqrt(d) + positions_by_hand(length, d)
    for layer in model.transformer.decoder.layers:
        y = layer_by_hand(layer, y, future, memory, padding)
    return model.transformer.decoder.norm(y) @ model.target_embedding.weight.T + model.output.bias


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_logits_equal_a_reference_from_scratch(norm_first, training):
    """Without gradients, in evaluation, PyTorch's encoder takes another path: one call a layer."""
    model = make_model(norm_first).train(training)
    torch.nn.init.normal_(model.output.bias)
    src, src_pad, tgt_in = make_batch()
    expected = logits_by_hand(model, src, src_pad, tgt_in)
    with torch.set_grad_enabled(training):
        logits = model(src, src_pad, tgt_in)
    assert torch.allclose(logits, expected, atol=1e-6)  # the table of sinusoids is float32


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_first_loss_is_the_logarithm_of_the_vocabulary(norm_first):
    torch.manual_seed(0)
    model = Translator(ModelConfig(1000, 1000, norm_first=norm_first)).eval()
    src, tgt_in, tgt_out = torch.randint(3, 1000, (3, 8, 20))
    src_pad = torch.zeros(8, 20, dtype=torch.bool)
    with torch.no_grad():
        _, loss = SummedLoss(model, 0.1)(src, src_pad, tgt_in, torch.arange(160), tgt_out.flatten())
    assert abs(loss.item() / 160 - math.log(1000)) < 1


def test_smoothed_loss_is_its_definition():
    model, (src, src_pad, tgt_in) = make_model(dtype=torch.float32), make_batch()
    target_positions, target = torch.tensor([0, 1, 5, 9]), torch.tensor([3, 40, 59, 7])
    smoothed, plain = SummedLoss(model, 0.1)(src, src_pad, tgt_in, target_positions, target)
    rows = model(src, src_pad, tgt_in, target_positions).log_softmax(-1)
    expected = -sum(0.9 * row[t] + 0.1 * row.mean() for row, t in zip(rows, target))
    assert torch.allclose(smoothed, expected) and smoothed.requires_grad
    assert torch.allclose(plain, -sum(row[t] for row, t in zip(rows, target)))
    assert not plain.requires_grad


@pytest.mark.parametrize("sliced", [True, False])
def test_sampled_cross_entropy_estimates_the_whole_one(sliced, monkeypatch):
    """Its gradient is right on average; with all tokens drawn it is the whole one."""
    torch.manual_seed(1)
    weight = (torch.randn(200, 16) / 4).requires_grad_()
    bias = torch.randn(200, requires_grad=True)
    hidden = torch.randn(60, 16, requires_grad=True)
    target = torch.randint(0, 50, (60,))
    inputs = (hidden, weight, bias)
    expected = cross_entropy(F.linear(*inputs), target, 0.1)
    gradient = torch.autograd.grad(expected[0], inputs)

    monkeypatch.setattr(model_py, "OTHER_TOKENS", 200)
    smoothed, plain, count = sampled_cross_entropy(*inputs, target, 0.1, sliced)
    assert count == 200
    torch.testing.assert_close((smoothed, plain), expected)
    torch.testing.assert_close(torch.autograd.grad(smoothed, inputs), gradient)

    monkeypatch.setattr(model_py, "OTHER_TOKENS", 60)
    total = torch.zeros_like(weight)
    for _ in range(400):
        smoothed, plain, count = sampled_cross_entropy(*inputs, target, 0.1, sliced)
        total += torch.autograd.grad(smoothed, weight)[0]
    assert count == 60 + len(target.unique()) and not plain.requires_grad
    assert (total / 400 - gradient[1]).norm() < 0.1 * gradient[1].norm()


def test_the_loss_is_sampled_only_where_the_logits_are_one_product(monkeypatch):
    model, (src, src_pad, tgt_in) = make_model(dtype=torch.float32), make_batch()
    batch = (src, src_pad, tgt_in, torch.arange(18), tgt_in.flatten())
    loss_of = SummedLoss(model, 0.1)
    whole = loss_of(*batch)
    assert loss_of.tokens_in_softmax == TARGET_VOCAB and not loss_of.can_sample()  # a small one
    loss_of.sampled = True
    torch.testing.assert_close(loss_of(*batch), whole)

    monkeypatch.setattr(model_py, "OTHER_TOKENS", 8)
    assert loss_of.can_sample()
    loss_of(*batch)
    assert loss_of.tokens_in_softmax == 8 + len(tgt_in.unique()) < TARGET_VOCAB
    skipped = TARGET_VOCAB - loss_of.tokens_in_softmax
    saved = training_flops(model.config, 21, 18) - loss_of.flops(21, 18)
    assert saved == 6 * 18 * model.config.d_model * skipped

    model.logits = lambda hidden: model.output(hidden) / 2
    changed = SummedLoss(model, 0.1)(*batch)
    torch.testing.assert_close(loss_of(*batch), changed)


def focal(logits, tgt_out, label_smoothing):
    """Lin et al. 2017: what is right already counts less."""
    log_p = logits.float().log_softmax(-1).gather(1, tgt_out[:, None])
    return -((1 - log_p.exp()) ** 2 * log_p).sum(), -log_p.sum().detach()


@pytest.mark.parametrize(
    "loss",
    [
        focal,
        lambda logits, tgt_out, smoothing: cross_entropy(logits / 2, tgt_out, smoothing),
        lambda logits, tgt_out, smoothing: cross_entropy(logits, tgt_out, 0.0),
        lambda logits, tgt_out, smoothing: cross_entropy(
            logits[tgt_out > 3], tgt_out[tgt_out > 3], 0.1
        ),
    ],
    ids=["focal", "temperature", "no smoothing", "without special tokens"],
)
def test_a_changed_loss_is_what_is_trained(loss, monkeypatch):
    """Also where the softmax would be sampled."""
    model, (src, src_pad, tgt_in) = make_model(dtype=torch.float32), make_batch()
    batch = (src, src_pad, tgt_in, torch.arange(18), tgt_in.flatten())
    monkeypatch.setattr(model_py, "OTHER_TOKENS", 8)
    assert SummedLoss(model, 0.1).can_sample()
    expected = loss(model(src, src_pad, tgt_in).flatten(0, 1), tgt_in.flatten(), 0.1)
    monkeypatch.setattr(model_py, "cross_entropy", loss)
    loss_of = SummedLoss(model, 0.1)
    loss_of.sampled = True
    torch.testing.assert_close(loss_of(*batch), expected)
    settings = SimpleNamespace(fast=True, compile=False, label_smoothing=0.1)
    notes = []
    model_py.make_loss(model, settings, torch.float32, notes.append)
    assert "cross_entropy in model.py was changed" in notes[-1]


def test_the_loss_is_fp32_under_autocast():
    model, (src, src_pad, tgt_in) = make_model(dtype=torch.float32), make_batch()
    loss_of = SummedLoss(model, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        smoothed, plain = loss_of(src, src_pad, tgt_in, torch.arange(18), tgt_in.flatten())
    assert smoothed.dtype == plain.dtype == torch.float32


def test_late_positions_are_as_exact_as_early_ones():
    expected = positions_by_hand(512, 32).float()
    assert torch.allclose(sinusoids(512, 32), expected, rtol=0, atol=1e-6)


def test_embeddings_begin_as_large_as_the_sinusoids():
    torch.manual_seed(0)
    model = Translator(ModelConfig(1000, 1000))
    for embedding in (model.source_embedding, model.target_embedding):
        assert embedding.weight.std().item() == pytest.approx(256**-0.5, rel=0.02)
    assert not model.output.bias.any()


def test_embeddings_are_dropped_out_too():
    """Section 5.4 of the paper."""
    model = make_model(dropout=0.5, dtype=torch.float32).train()
    embedded = model.embed(model.target_embedding, torch.full((40, 60), 3))
    assert (embedded == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_too_long_a_sentence_is_an_error():
    model = make_model()
    src = torch.full((1, TINY["max_length"] + 1), 3)
    with pytest.raises(ValueError, match="65 tokens are more than the 64"):
        model.encode(src, torch.zeros_like(src, dtype=torch.bool))


@pytest.mark.parametrize(
    "wrong",
    [
        dict(nhead=5),
        dict(d_model=0),
        dict(d_model=33, nhead=3),
        dict(num_encoder_layers=0),
        dict(dropout=1.5),
        dict(dropout=1.0),
    ],
)
def test_wrong_sizes_are_named(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        ModelConfig(10, 10, **wrong)


def test_without_flags_the_model_is_the_handouts():
    assert sizes_of(Config(), 1, 1) == ModelConfig(
        source_vocab=1,
        target_vocab=1,
        d_model=256,
        nhead=8,
        num_encoder_layers=3,
        num_decoder_layers=3,
        dim_feedforward=1024,
        dropout=0.1,
        norm_first=False,
        max_length=512,
    )
    assert Config().label_smoothing == 0.1


def test_every_setting_of_the_model_reaches_it():
    asked = dict(
        d_model=24,
        nhead=3,
        num_encoder_layers=1,
        num_decoder_layers=2,
        dim_feedforward=40,
        dropout=0.2,
        norm_first=True,
        max_length=50,
    )
    sizes = asdict(sizes_of(Config(**asked), 7, 9))
    assert {name: sizes[name] for name in asked} == asked
    assert (sizes["source_vocab"], sizes["target_vocab"]) == (7, 9)


@pytest.mark.parametrize("preset, millions, dropout", [("base", 65, 0.1), ("big", 213, 0.3)])
def test_presets_are_the_papers(preset, millions, dropout, monkeypatch):
    """Table 3, where 37,000 tokens share one embedding; flags change a preset."""
    seen = Mock(side_effect=UserError("before anything is made"))
    monkeypatch.setattr(train, "sizes_of", seen)

    def sizes(**settings) -> ModelConfig:
        """What `train(Config(preset=…))` and `python train.py --preset …` train."""
        made_in_python = Config(preset=preset, **settings)
        by_flags = Config(preset=preset, **settings)
        by_flags.given = {"preset", *settings}
        found = []
        for config in (made_in_python, by_flags):
            with pytest.raises(UserError):
                train.train(config)
            found.append(sizes_of(seen.call_args.args[0], 1, 37_000))
        assert found[0] == found[1]
        return found[0]

    with torch.device("meta"):
        model = Translator(sizes())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=0.04)
    assert model.dropout.p == dropout
    assert sizes(dropout=0.2, nhead=4) == replace(model.config, dropout=0.2, nhead=4)


def test_counted_flops_are_those_of_the_products_with_weights():
    model = make_model(dtype=torch.float32, dim_feedforward=256, d_model=128)
    # Short sentences, so that attention scores hardly count.
    src, src_pad, tgt_in = make_batch(batch=4, source=2, target=2, padding=0)
    target_positions = torch.arange(tgt_in.numel())
    with FlopCounterMode(display=False) as counter:
        SummedLoss(model, 0.0)(src, src_pad, tgt_in, target_positions, tgt_in.flatten())[
            0
        ].backward()
    flops = training_flops(model.config, src.numel(), tgt_in.numel())
    assert counter.get_total_flops() == pytest.approx(flops, rel=0.05)


def test_cross_attention_rows_sum_to_one_and_skip_padding():
    model = make_model(dtype=torch.float32).eval()
    src, src_pad, tgt_in = make_batch()
    weights = cross_attention(model, src, src_pad, tgt_in)
    assert weights.shape == (3, 6, 7)
    assert torch.allclose(weights.sum(-1), torch.ones(3, 6)) and not weights[-1, :, -2:].any()
    last = model.transformer.decoder.layers[-1].multihead_attn
    torch.nn.init.zeros_(last.in_proj_weight)  # now all positions weigh the same
    uniform = cross_attention(model, src, src_pad, tgt_in)[0]
    assert torch.allclose(uniform, torch.full((6, 7), 1 / 7)) and weights.std() > 0.01


def test_cross_attention_of_other_decoders():
    """One that sees a changed memory, and one without attention modules, which has no weights."""
    src, src_pad, tgt_in = make_batch()

    class Louder(Translator):
        def decode(self, memory, *rest):
            return super().decode(2 * memory, *rest)

    class Mean(Translator):
        def decode(self, memory, src_pad, tgt_in, first=0):
            embedded = self.embed(self.target_embedding, tgt_in, first)
            return embedded + memory.mean(1, keepdim=True)

    config = make_model().config
    louder, usual = Louder(config).eval(), Translator(config).eval()
    usual.load_state_dict(louder.state_dict())
    weights = cross_attention(louder, src, src_pad, tgt_in)
    assert torch.allclose(weights.sum(-1), torch.ones(3, 6))
    assert not torch.allclose(weights, cross_attention(usual, src, src_pad, tgt_in))
    assert cross_attention(Mean(config).eval(), src, src_pad, tgt_in) is None


def test_cross_attention_repeats_the_call_of_the_decoder():
    """Here by names, and with a mask that hides the first position."""
    src, src_pad, tgt_in = make_batch()

    class Own(Translator):
        def __init__(self, config):
            super().__init__(config)
            self.attention = nn.MultiheadAttention(config.d_model, 2, batch_first=True)

        def decode(self, memory, src_pad, tgt_in, first=0):
            query = self.embed(self.target_embedding, tgt_in, first)
            mask = torch.zeros(query.size(1), memory.size(1), dtype=torch.bool)
            mask[:, 0] = True
            return self.attention(query=query, key=memory, value=memory, attn_mask=mask)[0]

    weights = cross_attention(Own(make_model().config).eval(), src, src_pad, tgt_in)
    assert not weights[..., 0].any() and torch.allclose(weights.sum(-1), torch.ones(3, 6))


def test_a_changed_attention_module_acts_in_evaluation_too():
    """PyTorch's fused encoder would pass it by."""
    model = make_model().eval()
    called = []

    class Noted(nn.MultiheadAttention):
        def forward(self, *inputs, **options):
            called.append(self)
            return super().forward(*inputs, **options)

    for layer in model.transformer.encoder.layers:
        layer.self_attn.__class__ = Noted
    with torch.no_grad():
        model.encode(torch.tensor([[3, 4]]), torch.tensor([[False, True]]))
    assert len(called) == len(model.transformer.encoder.layers)


def test_a_change_is_done_to_every_new_model(monkeypatch):
    monkeypatch.setattr(model_py, "CHANGES", [lambda model: model.register_buffer("mark", None)])
    model = model_py.make_translator(ModelConfig(40, 40, **TINY))
    assert "mark" in model._buffers
