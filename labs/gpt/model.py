"""GPT-2 (Radford et al. 2019): learned positions, pre-norm, GELU, tied output. Compare nanoGPT.

    model = GPT(PRESETS["toy"])
    logits = model(tokens)                    # (B, T) → (B, T, V)
    loss = model(tokens, targets)             # the mean cross-entropy in nats

B sequences, T tokens, D width, H heads, W = D / H, V vocabulary. The weights have GPT-2's
names. There is no dropout: every layout of processes would draw other random numbers, and their
losses could not be compared.
"""

import zlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labs.gpt.sizes import Sizes


class CausalSelfAttention(nn.Module):
    """Each token attends to itself and those before it, (B, T, D) → (B, T, D)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.head_size = sizes.d_model // sizes.nhead
        self.c_attn = nn.Linear(sizes.d_model, 3 * sizes.d_model)
        self.c_proj = nn.Linear(sizes.d_model, sizes.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        # Query, key and value lie head by head (GPT-2 has all queries first): equal parts of
        # c_attn's rows are then whole heads, as tensor parallelism needs. H: heads on this rank.
        heads = self.c_attn(x).unflatten(2, (-1, 3, self.head_size))  # (B, T, H, 3, W)
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(3))  # (B, H, T, W) each
        # A GPU's fused attention needs widths that are multiples of 8. Zeros change no product.
        if x.is_cuda and self.head_size % 8:
            q, k, v = (F.pad(part, (0, -self.head_size % 8)) for part in (q, k, v))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.head_size**-0.5)
        x = x[..., : self.head_size]  # (B, H, T, W)
        return self.c_proj(x.transpose(1, 2).flatten(2))  # (B, T, D)


class MLP(nn.Module):
    """Two layers with GPT-2's GELU between them, for each token, (B, T, D) → (B, T, D)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.c_fc = nn.Linear(sizes.d_model, 4 * sizes.d_model)
        self.c_proj = nn.Linear(4 * sizes.d_model, sizes.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, 4·D) → (B, T, D)."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each after a layer norm and added to its input, (B, T, D) → (B, T, D)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.ln_1 = nn.LayerNorm(sizes.d_model)
        self.attn = CausalSelfAttention(sizes)
        self.ln_2 = nn.LayerNorm(sizes.d_model)
        self.mlp = MLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The model; with `blocks` a stage of a pipeline: the first embeds, the last has the output.

    A weight has the same name in a stage as in the whole model.
    """

    def __init__(self, sizes: Sizes, recompute: bool = False, blocks: list[int] | None = None):
        super().__init__()
        blocks = blocks or list(range(sizes.num_layers))
        self.recompute = recompute
        self.is_first = blocks[0] == 0
        self.is_last = blocks[-1] == sizes.num_layers - 1
        if self.is_first or self.is_last:  # tied: embedding and output are one matrix
            self.wte = nn.Embedding(sizes.vocab_size, sizes.d_model)
        if self.is_first:
            self.wpe = nn.Embedding(sizes.seq_length, sizes.d_model)
        self.h = nn.ModuleDict({str(number): Block(sizes) for number in blocks})
        if self.is_last:
            self.ln_f = nn.LayerNorm(sizes.d_model)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Token ids (B, T), or the previous stage's (B, T, D) → logits, mean loss, or (B, T, D)."""
        if self.is_first:
            positions = torch.arange(x.shape[1], device=x.device)  # (T,)
            x = self.wte(x) + self.wpe(positions)  # (B, T, D)
        for block in self.h.values():
            if self.recompute and torch.is_grad_enabled():
                # Keep the block's input only; the backward pass runs it again (Chen et al. 2016).
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        if not self.is_last:
            return x
        x = self.ln_f(x)
        logits = F.linear(x, self.wte.weight)  # (B, T, V)
        return logits if targets is None else mean_loss(logits, targets)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the next token, in nats; logits (B, T, V), targets (B, T)."""
    # CUDA's autocast leaves logits in 16 bits; the loss needs 32.
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten())


class HuggingFaceGPT(nn.Module):
    """The handout's `GPT2LMHeadModel` behind the same interface. Targets are already shifted."""

    def __init__(self, sizes: Sizes, recompute: bool = False):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_embd=sizes.d_model,
            n_layer=sizes.num_layers,
            n_head=sizes.nhead,
            n_positions=sizes.seq_length,
            vocab_size=sizes.vocab_size,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = GPT2LMHeadModel(config)
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def h(self) -> dict[str, nn.Module]:
        """Its blocks by number, like `GPT.h`."""
        return dict(self.model.transformer.h.named_children())

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Token ids (B, T) → logits (B, T, V), or with targets (B, T) the mean loss in nats."""
        logits = self.model(x).logits
        return logits if targets is None else mean_loss(logits, targets)


def initial_weight(name: str, shape: torch.Size, layers: int, seed: int) -> Tensor:
    """GPT-2's: N(0, 0.02²), divided by √(2·layers) for c_proj; biases 0, norms 1.

    Every weight has its own seed, so every layout of processes begins with the same model, and no
    rank holds more than one full weight for it.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if ".ln_" in f".{name}":
        return torch.ones(shape)
    std = 0.02 / (2 * layers) ** 0.5 if "c_proj" in name else 0.02
    draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=draw).mul_(std)
