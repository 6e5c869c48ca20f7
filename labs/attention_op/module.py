"""Multi-head attention as a module, and `use_in`, which puts it into a model.

B rows, H heads, S queries, T keys, E width of the model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import UserError
from labs.attention_op.operators import ATTENTION_BACKENDS, as_bias, attention, check_backend


class MultiHeadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` computed by this lab's operators, with the same parameters and names.

    The stock attention still answers where weights are asked for (`need_weights=True`, here not the
    default) and where the inputs have no batch axis.
    """

    def __init__(self, *args, backend: str = "python", **options):
        """`args` and `options` are those of `nn.MultiheadAttention`."""
        super().__init__(*args, **options)
        check_backend("MultiHeadAttention", backend, ATTENTION_BACKENDS)
        if self.bias_k is not None or self.add_zero_attn:
            raise UserError("MultiHeadAttention: add_bias_kv and add_zero_attn are not supported")
        self.backend = backend
        # Outside training, nn.TransformerEncoderLayer bypasses its attention module and calls a
        # fused kernel with its weights, unless the module has a hook. This one changes nothing.
        self.register_forward_pre_hook(lambda module, inputs: None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, S, E), (B, T, E), (B, T, E) with `batch_first` → (B, S, E), and None for the weights.

        key_padding_mask (B, T) and attn_mask (S, T) or (B·H, S, T): True = ignore, or numbers to
        add. `is_causal` promises that attn_mask is the causal mask, which is then not read.
        """
        if need_weights or query.dim() == 2:
            return super().forward(
                query,
                key,
                value,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
            )
        mask = None
        if attn_mask is not None and not is_causal:
            mask = as_bias(attn_mask, query.dtype)
            if mask.dim() == 3:
                mask = mask.unflatten(0, (-1, self.num_heads))  # (B, H, S, T)
        if key_padding_mask is not None:
            padding = as_bias(key_padding_mask, query.dtype)[:, None, None]  # (B, 1, 1, T)
            mask = padding if mask is None else mask + padding
        projected = self.project(query, key, value)
        if not self.batch_first:
            projected = [x.transpose(0, 1) for x in projected]
        # (B, S or T, E) → (B, H, S or T, E/H)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, mask, is_causal, dropout, backend=self.backend)
        out = out.transpose(1, 2).flatten(2)  # (B, S, E): the heads side by side
        if not self.batch_first:
            out = out.transpose(0, 1)
        return self.out_proj(out), None

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """The inputs → queries, keys and values of all heads, (…, E) each."""
        if not self._qkv_same_embed_dim:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key is value:
            # one product instead of three
            return list(F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1))
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return list(map(F.linear, (query, key, value), weights, biases))


def use_in(model: nn.Module, backend: str) -> int:
    """Replace every `nn.MultiheadAttention` in a model by a `MultiHeadAttention`; return how many.

    The parameters themselves are kept, so names, checkpoints and optimisers stay valid. Hooks are
    lost, and `need_weights` is False where a call does not set it. C++ is compiled here, not in the
    first step. Raises `UserError`.
    """
    check_backend("use_in", backend, ATTENTION_BACKENDS)
    sample = torch.zeros(1, 1, 1, 1)
    attention(sample, sample, sample, backend=backend)  # compiles, if there is something to compile
    replacements = {}  # a module may stand in several places
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.MultiheadAttention):
                if child not in replacements:
                    replacements[child] = with_parameters_of(child, backend)
                setattr(parent, name, replacements[child])
    if not replacements:
        raise UserError(f"use_in: {type(model).__name__} contains no nn.MultiheadAttention")
    return len(replacements)


def with_parameters_of(stock: nn.MultiheadAttention, backend: str) -> MultiHeadAttention:
    """A `MultiHeadAttention` that shares the parameters of `stock`."""
    # On "meta" its own parameters take no memory and draw no random numbers.
    ours = MultiHeadAttention(
        stock.embed_dim,
        stock.num_heads,
        stock.dropout,
        stock.in_proj_bias is not None,
        stock.bias_k is not None,
        stock.add_zero_attn,
        stock.kdim,
        stock.vdim,
        stock.batch_first,
        device="meta",
        backend=backend,
    )
    for name, parameter in stock.named_parameters(recurse=False):
        setattr(ours, name, parameter)
    ours.out_proj = stock.out_proj
    return ours.train(stock.training)
