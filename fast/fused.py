"""The training pass on a CPU: what `Translator.hidden` computes, with fewer passes over memory between the products.

    memory = fused.encode(model, src, src_pad, torch.bfloat16)          # the weights are those of the stock `nn.Transformer`
    hidden = fused.decode(model, memory, src_pad, tgt_in, torch.bfloat16)

At a model width of 256 a product over a few thousand tokens takes about as long as reading and writing its result a dozen
times, and that is what biases, dropout, residuals, norms, softmax and casts do one after another. Here everything between two
products is one kernel (`engine/native/training.py`), with its gradient.
N = B·S or B·T tokens, D model width. "Wide" is fp32, "narrow" the format of the products.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from engine.attention import BatchedAttention, additive
from engine.dropout import ByteDropout
from engine.native import training as native

# A layer made of other parts, or with hooks, is computed as it says itself.
PARTS = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.Linear, NonDynamicallyQuantizableLinear, nn.LayerNorm,
         BatchedAttention, ByteDropout}  # fmt: skip


def is_for(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the kernels compute this model in this format: the stock post-norm layers with ReLU, on a CPU with a compiler."""
    return is_stock(model) and not torch.compiler.is_compiling() and native.kernels(dtype) is not None


def is_stock(model: nn.Module) -> bool:
    """Whether the layers are the stock ones in fp32, post-norm with ReLU, with heads of whole vectors, on a CPU."""
    weight, sizes = model.output.weight, model.config
    layers = [*model.transformer.encoder.layers, *model.transformer.decoder.layers]
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and not sizes.norm_first
        and sizes.d_model // sizes.nhead % 16 == 0
        and BatchedAttention.enabled
        and all(layer.activation is F.relu for layer in layers)
        and all(
            type(part) in PARTS and not part._forward_hooks and not part._forward_pre_hooks
            for layer in layers
            for part in layer.modules()
        )
    )


def encode(model: nn.Module, src: Tensor, src_pad: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, S) → narrow memory (N, D)"""
    x, narrow = embed(model, model.source_embedding, src, dtype)
    mask = additive(src_pad, torch.float32)  # (B, S)
    encoder = model.transformer.encoder
    for layer in encoder.layers:
        own = layer.self_attn
        seen = attend_own(own, narrow, mask, len(src), causal=False)
        x, narrow = add_norm(x, seen, own.out_proj, layer.dropout1, layer.norm1)
        x, narrow = add_norm(x, widen(layer, narrow), layer.linear2, layer.dropout2, layer.norm2)
    return native.add_norm(x, None, None, encoder.norm, 0.0, dtype)[1]


def decode(model: nn.Module, memory: Tensor, src_pad: Tensor, tgt_in: Tensor, dtype: torch.dtype) -> Tensor:
    """Narrow (B·S, D), (B, S), (B, T) → wide hidden (B·T, D)"""
    x, narrow = embed(model, model.target_embedding, tgt_in, dtype)
    mask = additive(src_pad, torch.float32)  # (B, S)
    decoder, batch = model.transformer.decoder, len(tgt_in)
    for layer in decoder.layers:
        own, other = layer.self_attn, layer.multihead_attn
        seen = attend_own(own, narrow, None, batch, causal=True)
        x, narrow = add_norm(x, seen, own.out_proj, layer.dropout1, layer.norm1)
        seen = attend_source(other, narrow, memory, mask, batch)
        x, narrow = add_norm(x, seen, other.out_proj, layer.dropout2, layer.norm2)
        x, narrow = add_norm(x, widen(layer, narrow), layer.linear2, layer.dropout3, layer.norm3)
    return native.add_norm(x, None, None, decoder.norm, 0.0, dtype)[0]


def embed(model: nn.Module, embedding: nn.Embedding, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(B, T) → wide and narrow (N, D), as `Translator.embed`."""
    positions = model.positions[: model.check_length(ids)]
    return native.embed(embedding(ids), positions, math.sqrt(model.config.d_model), drop(model), dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """(N, in), (out, in) → (N, out) in the format of x, without a bias: the kernel that follows adds it."""
    return F.linear(x, weight.to(x.dtype))


def attend_own(attention: nn.MultiheadAttention, x: Tensor, mask: Tensor | None, batch: int, causal: bool) -> Tensor:
    """Self-attention without its last product: (N, D) → (N, D)"""
    qkv = linear(x, attention.in_proj_weight)  # (N, 3·D)
    return native.self_attention(qkv, attention.in_proj_bias, mask, batch, attention.num_heads, causal, drop(attention))


def attend_source(attention: nn.MultiheadAttention, x: Tensor, memory: Tensor, mask: Tensor, batch: int) -> Tensor:
    """Attention over the source without its last product: (B·T, D), (B·S, D), added mask (B, S) → (B·T, D)"""
    for_query, for_source = attention.in_proj_weight.split([attention.embed_dim, 2 * attention.embed_dim])
    q, kv = linear(x, for_query), linear(memory, for_source)
    return native.cross_attention(q, kv, attention.in_proj_bias, mask, batch, attention.num_heads, drop(attention))


def widen(layer: nn.Module, x: Tensor) -> Tensor:
    """The inner half of the feed-forward part: (N, D) → (N, feed-forward)"""
    return native.relu_dropout(linear(x, layer.linear1.weight), layer.linear1.bias, drop(layer))


def add_norm(
    x: Tensor, inner: Tensor, out: nn.Linear, dropout: nn.Dropout, norm: nn.LayerNorm
) -> tuple[Tensor, Tensor]:
    """The end of a sub-layer: its last product, dropout, residual and norm; → wide and narrow (N, D)"""
    p = dropout.p if dropout.training else 0.0
    return native.add_norm(x, linear(inner, out.weight), out.bias, norm, p, inner.dtype)


def drop(module: nn.Module) -> float:
    """The dropout of an attention, of a feed-forward part or of the embeddings, as things are."""
    p = module.dropout.p if isinstance(module.dropout, nn.Module) else module.dropout
    return p if module.training else 0.0
