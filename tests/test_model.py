"""The model against a from-scratch float64 reference, masks included, and what modes must not change."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from torch.utils.flop_counter import FlopCounterMode

from engine.errors import UserError
from model import (
    PRESETS,
    ModelConfig,
    SummedLoss,
    Translator,
    cross_attention,
    sizes_of,
    training_flops,
)
from train import Config

SOURCE_VOCAB, TARGET_VOCAB = 50, 60


def make_model(norm_first=False, dropout=0.0, dtype=torch.float64, **sizes) -> Translator:
    torch.manual_seed(0)
    config = ModelConfig(
        SOURCE_VOCAB, TARGET_VOCAB, **(TINY | dict(dropout=dropout, norm_first=norm_first) | sizes)
    )
    return Translator(config).to(dtype)


def make_batch(batch=3, source=7, target=6, padding=2):
    """Random ids; the last row's source ends in padding."""
    torch.manual_seed(1)
    src = torch.randint(3, SOURCE_VOCAB, (batch, source))
    src_pad = torch.zeros(batch, source, dtype=torch.bool)
    src_pad[-1, source - padding :] = True
    return src, src_pad, torch.randint(3, TARGET_VOCAB, (batch, target))


def attention_by_hand(module, query, memory, hidden):
    """Multi-head attention from its definition; `hidden` (B, T, S) is True where one may not look."""
    d, heads = module.embed_dim, module.num_heads
    q, k, v = (
        x @ module.in_proj_weight[i * d : (i + 1) * d].T + module.in_proj_bias[i * d : (i + 1) * d]
        for i, x in enumerate((query, memory, memory))
    )
    outputs = []
    for head in range(heads):
        part = slice(head * d // heads, (head + 1) * d // heads)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(d // heads)
        weights = scores.masked_fill(hidden, -math.inf).exp()
        outputs.append(weights / weights.sum(-1, keepdim=True) @ v[..., part])
    return module.out_proj(torch.cat(outputs, -1))


def logits_by_hand(model, src, src_pad, tgt_in):
    """The whole model written out, post-norm or pre-norm."""
    d = model.config.d_model

    def positions(ids):
        table = torch.zeros(ids.size(1), d, dtype=torch.float64)
        for p in range(ids.size(1)):
            for i in range(0, d, 2):
                table[p, i], table[p, i + 1] = (
                    math.sin(p / 10000 ** (i / d)),
                    math.cos(p / 10000 ** (i / d)),
                )
        return table

    def block(layer, x, sublayers):
        for norm, sublayer in sublayers:
            x = x + sublayer(norm(x)) if layer.norm_first else norm(x + sublayer(x))
        return x

    def feed_forward(layer):
        return lambda x: layer.linear2(F.relu(layer.linear1(x)))

    x = model.source_embedding.weight[src] * math.sqrt(d) + positions(src)
    source_hidden = src_pad[:, None, :]
    for layer in model.transformer.encoder.layers:

        def attend(x, layer=layer):
            return attention_by_hand(layer.self_attn, x, x, source_hidden)

        x = block(layer, x, [(layer.norm1, attend), (layer.norm2, feed_forward(layer))])
    memory = model.transformer.encoder.norm(x)
    length = tgt_in.size(1)
    future = torch.tensor([[j > i for j in range(length)] for i in range(length)])[None]
    y = model.target_embedding.weight[tgt_in] * math.sqrt(d) + positions(tgt_in)
    for layer in model.transformer.decoder.layers:

        def own(y, layer=layer):
            return attention_by_hand(layer.self_attn, y, y, future)

        def cross(y, layer=layer):
            return attention_by_hand(layer.multihead_attn, y, memory, source_hidden)

        y = block(
            layer, y, [(layer.norm1, own), (layer.norm2, cross), (layer.norm3, feed_forward(layer))]
        )
    return model.transformer.decoder.norm(y) @ model.target_embedding.weight.T + model.output.bias


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_logits_equal_a_reference_from_scratch(norm_first, training):
    """In evaluation without gradients PyTorch's encoder goes another way, one call a layer."""
    model = make_model(norm_first).train(training)
    torch.nn.init.normal_(model.output.bias)
    src, src_pad, tgt_in = make_batch()
    expected = logits_by_hand(model, src, src_pad, tgt_in)
    with torch.set_grad_enabled(training):
        logits = model(src, src_pad, tgt_in)
    assert torch.allclose(logits, expected, atol=1e-6)  # the table of sinusoids is float32


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("vocabulary", [1000, 8000])
def test_the_loss_begins_at_the_logarithm_of_the_vocabulary(norm_first, vocabulary):
    torch.manual_seed(0)
    model = Translator(ModelConfig(vocabulary, vocabulary, norm_first=norm_first)).eval()
    src, tgt_in = torch.randint(3, vocabulary, (8, 20)), torch.randint(3, vocabulary, (8, 20))
    batch = (
        src,
        torch.zeros(8, 20, dtype=torch.bool),
        tgt_in,
        torch.arange(160),
        torch.randint(3, vocabulary, (160,)),
    )
    with torch.no_grad():
        _, loss = SummedLoss(model, 0.1)(*batch)
    assert abs(loss.item() / 160 - math.log(vocabulary)) < 1


def test_real_positions_only():
    model = make_model()
    src, src_pad, tgt_in = make_batch()
    real = torch.tensor([0, 1, 5, 9])
    picked = model(src, src_pad, tgt_in, real)
    assert torch.equal(picked, model(src, src_pad, tgt_in).flatten(0, 1)[real])
    assert picked.shape == (4, TARGET_VOCAB)


def test_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for norm_first in (False, True):
            model = make_model(norm_first, dropout=0.1, dtype=torch.float32)
            src, src_pad, tgt_in = make_batch()
            model.train()(src, src_pad, tgt_in).sum().backward()
            with torch.inference_mode():
                model.eval()(src, src_pad, tgt_in)


def test_smoothed_loss_is_its_definition():
    model, (src, src_pad, tgt_in) = make_model(dtype=torch.float32), make_batch()
    real, target = torch.tensor([0, 1, 5, 9]), torch.tensor([3, 40, 59, 7])
    smoothed, plain = SummedLoss(model, 0.1)(src, src_pad, tgt_in, real, target)
    rows = model(src, src_pad, tgt_in, real).log_softmax(-1)
    assert torch.allclose(
        smoothed, -sum(0.9 * row[t] + 0.1 * row.mean() for row, t in zip(rows, target))
    )
    assert (
        torch.allclose(plain, -sum(row[t] for row, t in zip(rows, target)))
        and not plain.requires_grad
    )


def test_too_long_a_sentence_is_an_error():
    model = make_model()
    src = torch.full((1, TINY["max_length"] + 1), 3)
    with pytest.raises(ValueError, match="65 tokens are more than the 64"):
        model.encode(src, torch.zeros_like(src, dtype=torch.bool))


@pytest.mark.parametrize(
    "wrong", [dict(nhead=5), dict(d_model=0), dict(num_encoder_layers=0), dict(dropout=1.5)]
)
def test_wrong_sizes_are_named(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        ModelConfig(10, 10, **wrong)


def test_without_flags_the_model_is_the_handouts():
    assert sizes_of(Config(), 1, 1) == ModelConfig(1, 1, 256, 8, 3, 3, 1024, 0.1, False, 512)
    assert Config().label_smoothing == 0.1


@pytest.mark.parametrize("preset, millions, dropout", [("base", 65, 0.1), ("big", 213, 0.3)])
def test_presets_are_the_papers(preset, millions, dropout):
    """Table 3, where 37,000 tokens share one embedding."""
    unset = dict.fromkeys(PRESETS[preset], 0) | {"dropout": -1}
    config = SimpleNamespace(**unset, preset=preset, norm_first=False, max_length=64)
    with torch.device("meta"):
        model = Translator(sizes_of(config, 1, 37_000))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=0.04)
    assert model.dropout.p == dropout and model.config.nhead == model.config.d_model // 64
    assert model.config.num_encoder_layers == model.config.num_decoder_layers == 6


def test_counted_flops_are_those_of_the_products_with_weights():
    model = make_model(dtype=torch.float32, dim_feedforward=256, d_model=128)
    src, src_pad, tgt_in = make_batch(
        batch=4, source=2, target=2, padding=0
    )  # short: attention scores hardly count
    real = torch.arange(tgt_in.numel())
    with FlopCounterMode(display=False) as counter:
        SummedLoss(model, 0.0)(src, src_pad, tgt_in, real, tgt_in.flatten())[0].backward()
    flops = training_flops(model.config, src.numel(), tgt_in.numel())
    assert counter.get_total_flops() == pytest.approx(flops, rel=0.05)


def test_cross_attention_rows_sum_to_one_and_skip_padding():
    model = make_model(dtype=torch.float32).eval()
    src, src_pad, tgt_in = make_batch()
    weights = cross_attention(model, src, src_pad, tgt_in)
    assert weights.shape == (3, 6, 7)
    assert torch.allclose(weights.sum(-1), torch.ones(3, 6)) and not weights[-1, :, -2:].any()
    last = model.transformer.decoder.layers[-1].multihead_attn
    torch.nn.init.zeros_(last.in_proj_weight)  # it now looks everywhere alike
    uniform = cross_attention(model, src, src_pad, tgt_in)[0]
    assert torch.allclose(uniform, torch.full((6, 7), 1 / 7)) and weights.std() > 0.01


def test_another_rate_of_dropout_is_one_everywhere():
    """At 0 a pass in training is one in evaluation; at 1 nothing gets through but the biases, whatever is read."""
    model = Translator(ModelConfig(20, 20, 16, 2, 1, 1, 32, dropout=0.3))
    src, tgt_in = torch.randint(0, 20, (2, 3, 5), generator=torch.Generator().manual_seed(1))
    src_pad = torch.zeros_like(src, dtype=torch.bool)
    model.set_dropout(0.0)
    assert torch.equal(model.train()(src, src_pad, tgt_in), model.eval()(src, src_pad, tgt_in))
    model.set_dropout(1.0)
    assert torch.equal(model.train()(src, src_pad, tgt_in), model(19 - src, src_pad, 19 - tgt_in))
    attention = model.transformer.decoder.layers[0].multihead_attn
    query = torch.ones(1, 2, 16)
    assert torch.equal(attention(query, query, query)[0], attention(-query, -query, -query)[0])
