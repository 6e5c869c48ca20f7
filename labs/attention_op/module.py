"""Multi-head attention as a module, and `use_in`, which puts it into a model.

B sequences, H heads, S queries, T keys, E width of the model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import UserError
from labs.attention_op.operators import as_bias, attention, check_backend

# In evaluation, PyTorch's encoder would call one fused function instead of its attention modules.
torch.backends.mha.set_fastpath_enabled(False)


class MultiHeadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` computed by this lab's operators, with the same parameters and names.

    The stock attention still answers where weights are asked for: `need_weights=True`, here not the
    default.
    """

    def __init__(self, *args, backend: str = "python", **options):
        """`args` and `options` are those of `nn.MultiheadAttention`."""
        super().__init__(*args, **options)
        self.choose(backend)

    def choose(self, backend: str) -> None:
        """Compute with this backend. Raises `UserError`."""
        check_backend("MultiHeadAttention", backend)
        if self.bias_k is not None or self.add_zero_attn or not self._qkv_same_embed_dim:
            raise UserError(
                "MultiHeadAttention: add_bias_kv, add_zero_attn, kdim and vdim are not supported"
            )
        self.backend = backend

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
        if need_weights:
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
        weights = self.in_proj_weight.chunk(3)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = map(F.linear, (query, key, value), weights, biases)
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


def use_in(model: nn.Module, backend: str) -> int:
    """Turn every `nn.MultiheadAttention` of a model into `MultiHeadAttention`; return how many.

    The modules and their parameters stay, so names, checkpoints and optimizers do too; only the
    class changes, and with it `forward`. C++ is compiled here, not in the first step. Raises
    `UserError`.
    """
    check_backend("use_in", backend)
    sample = torch.zeros(1, 1, 1, 1)
    attention(sample, sample, sample, backend=backend)  # compiles, if there is something to compile
    found = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    for module in found:
        if type(module) not in (nn.MultiheadAttention, MultiHeadAttention):
            raise UserError(
                f"use_in: {type(module).__name__} is an attention of its own, which would be lost"
            )
    if not found:
        raise UserError(f"use_in: {type(model).__name__} contains no nn.MultiheadAttention")
    for module in found:
        module.__class__ = MultiHeadAttention
        module.choose(backend)
    return len(found)
