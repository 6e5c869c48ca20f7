"""GPT-2 (Radford et al. 2019): learned positions, pre-norm, GELU, the output tied to the embedding. Read it beside nanoGPT.

    model = GPT(PRESETS["toy"])
    logits = model(tokens)                    # (B, T) → (B, T, V)
    loss = model(tokens, targets)             # the mean cross-entropy in nats

B sequences, T tokens, D hidden size, H heads, W = D / H, V vocabulary. The weights have GPT-2's names. There is no dropout:
every layout of processes would draw other random numbers, and their losses could not be compared.
"""

import zlib
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from labs.gpt.sizes import Sizes

# What selective recomputation keeps: the results of matrix products and of attention, which are dear; norms, GELU and sums
# are computed again.
KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
CHUNK = 512  # tokens whose logits are in memory at a time, with `chunked_loss`


class CausalSelfAttention(nn.Module):
    """Each token looks at itself and those before it, (B, T, D) → (B, T, D)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.head_size = sizes.hidden // sizes.heads
        self.c_attn = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.c_proj = nn.Linear(sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor, past: list[Tensor] | None = None) -> Tensor:
        """`past`: keys and values of the tokens before, (B, H, P, W) each; these tokens' are added."""
        # Query, key and value lie head by head (GPT-2 has all queries first): cut into equal parts, the rows of c_attn are
        # whole heads, as tensor parallelism wants them. H is then the number of heads on this rank.
        heads = self.c_attn(x).unflatten(2, (-1, 3, self.head_size))  # (B, T, H, 3, W)
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(3))  # (B, H, T, W) each
        if (
            past is not None
        ):  # generation: keys and values of the tokens before, to which these are added
            k, v = (
                [torch.cat(pair, dim=2) for pair in zip(past, (k, v))] if past else (k, v)
            )  # (B, H, P + T, W) each
            past[:] = k, v
        # A GPU's fused attention wants widths of whole eights: zeros, which add nothing to a product.
        if x.is_cuda and self.head_size % 8:
            q, k, v = (F.pad(part, (0, -self.head_size % 8)) for part in (q, k, v))
        # Behind a past comes one token at a time, which may see all keys: no mask.
        x = F.scaled_dot_product_attention(
            q, k, v, is_causal=q.shape[2] == k.shape[2], scale=self.head_size**-0.5
        )
        x = x[..., : self.head_size]  # (B, H, T, W)
        return self.c_proj(x.transpose(1, 2).flatten(2))  # (B, T, D)


class MLP(nn.Module):
    """Two layers with GPT-2's GELU between them, each token by itself, (B, T, D) → (B, T, D)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.c_fc = nn.Linear(sizes.hidden, 4 * sizes.hidden)
        self.c_proj = nn.Linear(4 * sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, 4·D) → (B, T, D)."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, a layer norm before each, their results added to what came in, (B, T, D) → (B, T, D)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(sizes.hidden), CausalSelfAttention(sizes)
        self.ln_2, self.mlp = nn.LayerNorm(sizes.hidden), MLP(sizes)

    def forward(self, x: Tensor, past: list[Tensor] | None = None) -> Tensor:
        """`past` as in the attention."""
        x = x + self.attn(self.ln_1(x), past=past)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The whole model; or, with `blocks`, the stage of a pipeline that has these: the first embeds, the last has the output.

    A weight has the same name in a stage as in the whole model.
    """

    def __init__(
        self,
        sizes: Sizes,
        recompute: str = "none",
        chunked_loss: bool = False,
        blocks: list | None = None,
    ):
        super().__init__()
        blocks = blocks or list(range(sizes.layers))
        self.recompute, self.chunked_loss = recompute, chunked_loss
        self.is_first, self.is_last = blocks[0] == 0, blocks[-1] == sizes.layers - 1
        if self.is_first or self.is_last:
            self.wte = nn.Embedding(
                sizes.vocabulary, sizes.hidden
            )  # tied: embedding and output are one matrix
        if self.is_first:
            self.wpe = nn.Embedding(sizes.sequence, sizes.hidden)
        self.h = nn.ModuleDict({str(number): Block(sizes) for number in blocks})
        if self.is_last:
            self.ln_f = nn.LayerNorm(sizes.hidden)

    def forward(
        self, x: Tensor, targets: Tensor | None = None, past: dict[str, list] | None = None
    ) -> Tensor:
        """Token ids (B, T), or what the stage before gives, (B, T, D) → logits, the mean loss, or (B, T, D)."""
        if self.is_first:
            seen = past["0"][0].shape[2] if past and past["0"] else 0  # tokens before these
            positions = torch.arange(seen, seen + x.shape[1], device=x.device)  # (T,)
            x = self.wte(x) + self.wpe(positions)  # (B, T, D)
        for number, block in self.h.items():
            if past is not None:
                x = block(x, past[number])
            elif self.recompute != "none" and torch.is_grad_enabled():
                x = recomputed(block, x, self.recompute == "selective")
            else:
                x = block(x)
        if not self.is_last:
            return x
        x = self.ln_f(x)
        if targets is not None and self.chunked_loss:
            # PyTorch's own, which makes, uses and drops the logits of a few tokens at a time. In fp32 at least: its loss has
            # the type of its inputs, and three digits are too few.
            wide = torch.promote_types(x.dtype, torch.float32)
            options = nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK)
            hidden, weight = x.flatten(0, 1).to(wide), self.wte.weight.to(wide)
            return F.linear_cross_entropy(hidden, weight, targets.flatten(), options=options)
        logits = F.linear(x, self.wte.weight)  # (B, T, V)
        return logits if targets is None else mean_loss(logits, targets)


def recomputed(block: nn.Module, x: Tensor, selective: bool) -> Tensor:
    """The block's output; what its backward pass needs is dropped and computed again (Chen et al. 2016), all or in part."""
    if not selective:
        return checkpoint(block, x, use_reentrant=False)
    return checkpoint(
        block,
        x,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, KEPT),
    )


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each next token, in nats; logits (B, T, V), targets (B, T)."""
    wide = torch.promote_types(
        logits.dtype, torch.float32
    )  # CUDA's autocast, unlike the CPU's, leaves them narrow
    return F.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten())


class HuggingFaceGPT(nn.Module):
    """The handout's `GPT2LMHeadModel` in the same place. Targets are shifted already, so its own loss is not asked for."""

    def __init__(self, sizes: Sizes, recompute: str = "none"):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_embd=sizes.hidden,
            n_layer=sizes.layers,
            n_head=sizes.heads,
            n_positions=sizes.sequence,
            vocab_size=sizes.vocabulary,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = GPT2LMHeadModel(config)
        if recompute == "all":
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def h(self) -> dict[str, nn.Module]:
        """Its blocks by number, as `GPT.h`."""
        return dict(self.model.transformer.h.named_children())

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Token ids (B, T) → logits (B, T, V), or the mean loss in nats if there are targets (B, T)."""
        logits = self.model(x).logits
        return logits if targets is None else mean_loss(logits, targets)


def initial_weight(name: str, shape: torch.Size, layers: int, seed: int) -> Tensor:
    """GPT-2's: N(0, 0.02²), what adds to the residual stream smaller by √(2·layers); biases 0, norms 1.

    Every weight has a seed of its own, so each layout of processes begins with the same model, and no rank ever holds more
    than one whole weight for it.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if ".ln_" in f".{name}":
        return torch.ones(shape)
    std = 0.02 / (2 * layers) ** 0.5 if "c_proj" in name else 0.02
    draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=draw).mul_(std)
