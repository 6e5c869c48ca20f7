"""Attention over short sequences on a CPU as two plain batched products.

B rows, T queries, S keys, D model width, H heads, W = D / H.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.dropout import drop_by_bytes


class BatchedAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention`, same weights, faster on a CPU at the lengths of sentences.

    There the kernels behind `F.scaled_dot_product_attention` are made for long sequences, and with dropout they draw a random
    number for every weight.
    """

    enabled = True  # False: the stock attention everywhere, to compare with

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None,
                average_attn_weights=True, is_causal=False):  # fmt: skip
        """As the stock one: (B, T, D), (B, S, D), (B, S, D) → (B, T, D), and None for the weights."""
        takes_masks = not is_causal if attn_mask is None else attn_mask.dim() == 2
        if need_weights or key is not value or not takes_masks or not self._is_for(query):
            return super().forward(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights,
                                   is_causal)  # fmt: skip
        if query is key:
            q, k, v = self._heads(query, 0, 3)
        else:
            (q,), (k, v) = self._heads(query, 0, 1), self._heads(key, 1, 3)
        # One product for all heads of all rows; the softmax makes 0 of what may not be seen.
        scores = torch.baddbmm(self._bias(q, key_padding_mask, attn_mask), q, k.mT, alpha=self.head_dim**-0.5)
        weights = scores.softmax(-1)  # (B·H, T, S)
        if self.training:
            weights = drop_by_bytes(weights, self.dropout)
        seen = torch.bmm(weights, v).unflatten(0, (-1, self.num_heads)).transpose(1, 2).flatten(2)  # (B, T, D)
        return self.out_proj(seen), None

    def _is_for(self, query: Tensor) -> bool:
        """Whether this is the common case; for all others there is the stock attention."""
        usual = self.batch_first and self._qkv_same_embed_dim and self.in_proj_bias is not None
        extras = self.bias_k is not None or self.add_zero_attn
        return self.enabled and query.device.type == "cpu" and query.dim() == 3 and usual and not extras

    def _heads(self, x: Tensor, first: int, last: int) -> Tensor:
        """(B, T, D) → those of query 0, key 1, value 2 from first to last: (last − first, B·H, T, W)"""
        rows = slice(first * self.embed_dim, last * self.embed_dim)
        projected = F.linear(x, self.in_proj_weight[rows], self.in_proj_bias[rows])
        split = projected.unflatten(-1, (last - first, self.num_heads, self.head_dim))  # (B, T, last − first, H, W)
        return split.permute(2, 0, 3, 1, 4).flatten(1, 2)

    def _bias(self, q: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor:
        """0 where a key may be seen and far below where not: broadcastable to (B·H, T, S)."""
        bias = q.new_zeros(1, 1, 1)
        if key_padding_mask is not None:  # (B, S) → (B·H, 1, S)
            bias = bias + additive(key_padding_mask, q.dtype).repeat_interleave(self.num_heads, 0).unsqueeze(1)
        if attn_mask is not None:  # (T, S)
            bias = bias + additive(attn_mask, q.dtype)
        return bias


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask, boolean (True = may not be seen) or additive already, as numbers to add to the scores.

    Half of the lowest number instead of -inf: a row that may see nothing then sees all alike, and is no row of nan.
    """
    lowest = torch.finfo(dtype).min / 2
    if mask.is_floating_point():
        return mask.to(dtype).clamp_min(lowest)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, lowest)
