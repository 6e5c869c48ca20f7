"""The batched attention gives what the stock one gives: outputs, gradients, masks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from engine.attention import BatchedAttention


def twins(width, heads, dtype=torch.float64, dropout=0.0):
    """A stock attention and a batched one with the same weights."""
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True, dtype=dtype)
    nn.init.normal_(stock.in_proj_bias)
    fast = BatchedAttention(width, heads, dropout=dropout, batch_first=True, dtype=dtype)
    fast.load_state_dict(stock.state_dict())
    return stock, fast


def padding(rows, length, seed=0):
    """(rows, length) True = padding, at least one real token in each row."""
    real = torch.randint(1, length + 1, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return torch.arange(length) >= real


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def results(attention, query, memory, **masks):
    """Output and all gradients."""
    query, memory = query.clone().requires_grad_(), memory.clone().requires_grad_()
    key = query if memory.numel() == 0 else memory
    attention.zero_grad()
    out, weights = attention(query, key, key, need_weights=False, **masks)
    assert weights is None
    out.sin().sum().backward()
    return [out, query.grad, *(p.grad for p in attention.parameters())] + ([memory.grad] if key is memory else [])


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.sampled_from([(4, 1), (12, 3), (8, 8)]), st.booleans()
)
def test_as_the_stock_attention_in_float64(rows, queries, keys, sizes, mask_is_float):
    stock, fast = twins(*sizes)
    query, memory = torch.randn(rows, queries, sizes[0]).double(), torch.randn(rows, keys, sizes[0]).double()

    def as_given(mask):
        return torch.zeros(mask.shape).double().masked_fill(mask, -torch.inf) if mask_is_float else mask

    cases = [
        (query, torch.empty(0), dict(attn_mask=as_given(causal(queries)), is_causal=True)),
        (query, torch.empty(0), dict(key_padding_mask=as_given(padding(rows, queries)))),
        (query, torch.empty(0), dict(key_padding_mask=padding(rows, queries), attn_mask=causal(queries))),
        (query, memory, dict(key_padding_mask=as_given(padding(rows, keys)))),
        (query, memory, {}),
    ]
    for *tensors, masks in cases:
        for plain, ours in zip(results(stock, *tensors, **masks), results(fast, *tensors, **masks)):
            assert torch.allclose(plain, ours, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_inside_the_stock_layers(layer):
    torch.manual_seed(0)
    stock = layer(16, 4, 32, dropout=0.0, batch_first=True)
    x, memory, pad = torch.randn(3, 6, 16), torch.randn(3, 5, 16), padding(3, 5)
    if layer is nn.TransformerEncoderLayer:
        inputs, masks = (memory,), dict(src_key_padding_mask=pad)
    else:
        inputs = (x, memory)
        masks = dict(tgt_mask=causal(6), tgt_is_causal=True, memory_key_padding_mask=pad)
    plain = stock(*inputs, **masks)
    for module in stock.modules():
        if type(module) is nn.MultiheadAttention:
            module.__class__ = BatchedAttention
    assert torch.allclose(stock(*inputs, **masks), plain, atol=1e-6)


def test_dropout_drops_weights_and_keeps_the_mean():
    _, fast = twins(8, 2, torch.float32, dropout=0.25)
    x = torch.randn(1, 3, 8).expand(20000, 3, 8).contiguous()
    fast.train()
    torch.manual_seed(1)
    noisy = fast(x, x, x, need_weights=False)[0]
    clean = fast.eval()(x, x, x, need_weights=False)[0]
    assert noisy.std(0).min() > 1e-3  # every row draws its own
    assert torch.allclose(noisy.mean(0), clean[0], atol=0.02)


@pytest.mark.parametrize("call", [dict(need_weights=True), dict(attn_mask=torch.zeros(4, 3, 3))])
def test_what_it_is_not_for_goes_the_stock_way(call):
    stock, fast = twins(8, 2, torch.float32)
    x = torch.randn(2, 3, 8)
    for plain, ours in zip(stock(x, x, x, **call), fast(x, x, x, **call)):
        assert torch.equal(plain, ours)


@pytest.mark.parametrize("options", [dict(bias=False), dict(add_bias_kv=True), dict(add_zero_attn=True)])
def test_uncommon_attentions_go_the_stock_way(options):
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(8, 2, batch_first=True, **options)
    x = torch.randn(2, 3, 8)
    plain = stock(x, x, x, need_weights=False)[0]
    stock.__class__ = BatchedAttention
    assert torch.equal(stock(x, x, x, need_weights=False)[0], plain)
    assert torch.allclose(stock(x[0], x[0], x[0], need_weights=False)[0], plain[0], atol=1e-6)  # no batch axis


def test_a_causal_hint_without_its_mask_is_refused_as_ever():
    _, fast = twins(8, 2, torch.float32)
    x = torch.randn(2, 3, 8)
    with pytest.raises(RuntimeError, match="attn_mask"):
        fast(x, x, x, need_weights=False, is_causal=True)


def test_bfloat16_autocast_is_close():
    stock, fast = twins(32, 4, torch.float32)
    x = torch.randn(4, 10, 32)
    exact = stock(x, x, x, need_weights=False)[0]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = fast(x, x, x, need_weights=False, key_padding_mask=padding(4, 10) & False)[0]
    assert rounded.dtype == torch.bfloat16 and torch.allclose(rounded.float(), exact, atol=0.03)
