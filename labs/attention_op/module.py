"""Multi-head attention as a module, and how a model comes to use it.

B rows, H heads, S queries, T keys, E width of the model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import UserError
from labs.attention_op.operators import ATTENTION_BACKENDS, attention, check_backend


class MultiHeadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with the operators of this lab; parameters and their names are the same.

    For the rare calls that want the weights themselves (`need_weights=True`) the stock attention answers.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        backend: str = "python",
        device=None,
        dtype=None,
    ):
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        check_backend("MultiHeadAttention", backend, ATTENTION_BACKENDS)
        self.backend = backend
        # Out of training, the stock encoder layer calls a kernel of its own with this module's weights, and never the
        # module, unless a hook is attached: so here is one.
        self.register_forward_pre_hook(idle)

    def forward(
        self,
        query,
        key,
        value,
        key_padding_mask=None,
        need_weights=False,
        attn_mask=None,
        average_attn_weights=True,
        is_causal=False,
    ):
        """As the stock one: (B, S, E), (B, T, E), (B, T, E) if `batch_first` → (B, S, E), and None for the weights.

        `is_causal` promises that `attn_mask` is the triangle; the mask itself is then not read.
        """
        if need_weights:
            return super().forward(
                query,
                key,
                value,
                key_padding_mask,
                True,
                attn_mask,
                average_attn_weights,
                is_causal,
            )
        if query.dim() == 2:  # no batch axis
            pad = None if key_padding_mask is None else key_padding_mask[None]
            batch = 0 if self.batch_first else 1
            inputs = (x.unsqueeze(batch) for x in (query, key, value))
            out, _ = self.forward(*inputs, pad, False, attn_mask, is_causal=is_causal)
            return out.squeeze(batch), None
        projected = self.project(query, key, value)
        if not self.batch_first:
            projected = [x.transpose(0, 1) for x in projected]
        q, k, v = (
            x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected
        )  # (B, H, S or T, E/H)
        mask = combine(key_padding_mask, None if is_causal else attn_mask, self.num_heads)
        dropout = self.dropout if self.training else 0.0
        seen = attention(q, k, v, mask, is_causal, dropout, backend=self.backend)  # (B, H, S, E/H)
        seen = seen.transpose(1, 2).flatten(2)  # (B, S, E): heads side by side
        return self.out_proj(seen if self.batch_first else seen.transpose(0, 1)), None

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Inputs → queries, keys and values of all heads, (…, E) each."""
        if query is key is value and self._qkv_same_embed_dim:
            return list(
                F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            )  # one product for three
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [
            F.linear(x, weight, bias)
            for x, weight, bias in zip((query, key, value), weights, biases)
        ]


def combine(padding: Tensor | None, mask: Tensor | None, heads: int) -> Tensor | None:
    """(B, T) and (S, T) or (B·H, S, T), True = ignore or numbers to add → one mask, broadcastable to (B, H, S, T)"""
    if padding is not None:
        padding = padding[:, None, None]
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (-1, heads))
    if padding is None or mask is None:
        return mask if padding is None else padding
    if padding.dtype == mask.dtype == torch.bool:
        return padding | mask
    numbers = next(x for x in (padding, mask) if x.dtype != torch.bool)
    padding, mask = (
        torch.zeros_like(x, dtype=numbers.dtype).masked_fill_(x, -torch.inf)
        if x.dtype == torch.bool
        else x
        for x in (padding, mask)
    )
    return padding + mask


def use_in(model: nn.Module, backend: str) -> int:
    """Put a `MultiHeadAttention` of this backend in the place of every `nn.MultiheadAttention` in a model; → how many.

    It takes over the parameters themselves, so names, checkpoints and optimizers stay as they are; hooks stay behind. One
    default differs: a call that does not say `need_weights` gets None for the weights, where the stock attention computes
    them. Compiled operators are built here, not in the first step. Raises `UserError`.
    """
    check_backend("use_in", backend, ATTENTION_BACKENDS)
    places = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.MultiheadAttention)
    ]
    if not places:
        raise UserError(f"use_in: {type(model).__name__} has no nn.MultiheadAttention to replace")
    for name, module in places:
        if module.bias_k is not None or module.add_zero_attn:
            raise UserError(
                "use_in: attention with add_bias_kv or add_zero_attn is not for these operators"
            )
        if not name:
            raise UserError(
                "use_in: the model is the nn.MultiheadAttention itself; give the model that it is a part of"
            )
    sample = torch.zeros(1, 1, 1, 16, device=next(places[0][1].parameters()).device)
    attention(
        sample, sample, sample, backend=backend
    )  # builds what is to be built, and refuses a wrong device
    replacements = {
        module: with_parameters_of(module, backend) for _, module in places
    }  # one a module, however many places
    for name, module in places:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replacements[module])
    return len(replacements)


def with_parameters_of(stock: nn.MultiheadAttention, backend: str) -> MultiHeadAttention:
    """A `MultiHeadAttention` that computes with the very parameters of `stock`."""
    # On "meta" its own parameters take no memory and draw no random numbers.
    ours = MultiHeadAttention(
        stock.embed_dim,
        stock.num_heads,
        stock.dropout,
        stock.in_proj_bias is not None,
        stock.kdim,
        stock.vdim,
        stock.batch_first,
        backend,
        device="meta",
    )
    for name, parameter in stock.named_parameters(recurse=False):
        setattr(ours, name, parameter)
    ours.out_proj = stock.out_proj
    return ours.train(stock.training)


def idle(module: nn.Module, inputs: tuple) -> None:
    """Changes nothing."""
