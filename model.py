"""The translation model: embedding + sinusoidal positions + `nn.Transformer` + output projection (Vaswani et al. 2017).

Sizes in shape comments: B sentence pairs, S source tokens, T target tokens, D model width, V target vocabulary,
N real (not padding) target tokens. Padding masks are boolean, True = padding.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import UserError

PRESETS = {  # the handout's sizes; "base" and "big" of Vaswani et al. 2017
    "lab": dict(
        d_model=256,
        nhead=8,
        num_encoder_layers=3,
        num_decoder_layers=3,
        dim_feedforward=1024,
        dropout=0.1,
    ),
    "base": dict(
        d_model=512,
        nhead=8,
        num_encoder_layers=6,
        num_decoder_layers=6,
        dim_feedforward=2048,
        dropout=0.1,
    ),
    "big": dict(
        d_model=1024,
        nhead=16,
        num_encoder_layers=6,
        num_decoder_layers=6,
        dim_feedforward=4096,
        dropout=0.3,
    ),
}


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a `Translator`."""

    source_vocab: int
    target_vocab: int
    d_model: int = 256
    nhead: int = 8
    num_encoder_layers: int = 3
    num_decoder_layers: int = 3
    dim_feedforward: int = 1024
    dropout: float = 0.1
    norm_first: bool = False
    max_length: int = 512  # tokens in a sentence, begin or end included

    def __post_init__(self):
        sizes = (
            "d_model",
            "nhead",
            "num_encoder_layers",
            "num_decoder_layers",
            "dim_feedforward",
            "max_length",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)} must be at least 1")
        if not 0 <= self.dropout < 1:
            raise UserError(f"--dropout {self.dropout} must be at least 0 and below 1")
        if self.d_model % self.nhead or self.d_model % 2:
            raise UserError(
                f"--d_model {self.d_model} must be even and a multiple of --nhead {self.nhead}"
            )


def sizes_of(config, source_vocab: int, target_vocab: int) -> ModelConfig:
    """The preset's sizes, changed by those of the settings that were given: not 0, and for dropout not -1."""
    given = {name: getattr(config, name) for name in PRESETS[config.preset]}
    given = {
        name: value for name, value in given.items() if value != (-1 if name == "dropout" else 0)
    }
    sizes = PRESETS[config.preset] | given
    return ModelConfig(
        source_vocab,
        target_vocab,
        **sizes,
        norm_first=config.norm_first,
        max_length=config.max_length,
    )


class Translator(nn.Module):
    """Source and target token ids → logits over the target vocabulary."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.source_embedding = nn.Embedding(config.source_vocab, config.d_model)
        self.target_embedding = nn.Embedding(config.target_vocab, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.transformer = build_transformer(config)
        self.output = nn.Linear(
            config.d_model, config.target_vocab
        )  # logits: the loss has the softmax
        self.output.weight = self.target_embedding.weight  # tied (Press and Wolf 2017)

        # With N(0, 1), the default, a tied output starts at a loss near 90 instead of ln V: logits are √D times too large.
        nn.init.normal_(self.source_embedding.weight, std=config.d_model**-0.5)
        nn.init.normal_(self.target_embedding.weight, std=config.d_model**-0.5)
        nn.init.zeros_(self.output.bias)
        if config.norm_first:
            # Pre-norm carries the input token's embedding through to the tied output, which then bets on that very token;
            # a small gain before the output keeps that bet low: by 8 / √D the first loss is within 1 of ln V.
            nn.init.constant_(
                self.transformer.decoder.norm.weight, min(1.0, 8 / math.sqrt(config.d_model))
            )
        # Not learned, made anew from the sizes: not in the checkpoint. Triangle: True = the row must not look there.
        self.register_buffer(
            "positions", sinusoids(config.max_length, config.d_model), persistent=False
        )
        triangle = torch.ones(config.max_length, config.max_length, dtype=torch.bool).triu(1)
        self.register_buffer("causal_mask", triangle, persistent=False)

    def forward(
        self, src: Tensor, src_pad: Tensor, tgt_in: Tensor, real: Tensor | None = None
    ) -> Tensor:
        """(B, S), (B, S), (B, T) → logits (B, T, V); with `real`, flat positions (N,), only theirs: (N, V)."""
        return self.output(self.hidden(src, src_pad, tgt_in, real))

    def hidden(
        self, src: Tensor, src_pad: Tensor, tgt_in: Tensor, real: Tensor | None = None
    ) -> Tensor:
        """What the output projection sees: (B, T, D); with `real` (N, D)."""
        hidden = self.decode(self.encode(src, src_pad), src_pad, tgt_in)  # (B, T, D)
        # The projection is the largest product of the model: spend it on real tokens only.
        return hidden if real is None else hidden.flatten(0, 1).index_select(0, real)

    def encode(self, src: Tensor, src_pad: Tensor) -> Tensor:
        """(B, S) → memory (B, S, D)"""
        return self.transformer.encoder(
            self.embed(self.source_embedding, src), src_key_padding_mask=src_pad
        )

    def decode(self, memory: Tensor, src_pad: Tensor, tgt_in: Tensor) -> Tensor:
        """(B, S, D), (B, S), (B, T) → hidden (B, T, D)"""
        length = tgt_in.size(1)
        return self.transformer.decoder(
            self.embed(self.target_embedding, tgt_in),
            memory,
            # `tgt_is_causal` is a hint that the mask is the triangle, and lets PyTorch take a faster kernel.
            tgt_mask=self.causal_mask[:length, :length],
            tgt_is_causal=True,
            memory_key_padding_mask=src_pad,
        )

    def embed(self, embedding: nn.Embedding, ids: Tensor, first: int = 0) -> Tensor:
        """(B, T) ids standing at positions first, first + 1, … → (B, T, D)"""
        end = self.check_length(ids, first)
        # √D brings the embeddings, N(0, 1/D), to the scale of the sinusoids (section 3.4 of the paper).
        return self.dropout(
            embedding(ids) * math.sqrt(self.config.d_model) + self.positions[first:end]
        )

    def set_dropout(self, p: float) -> None:
        """Another rate of dropout everywhere, from now on."""
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = p
            elif isinstance(
                module, nn.MultiheadAttention
            ):  # keeps its rate as a number, not as an nn.Dropout
                module.dropout = p

    def check_length(self, ids: Tensor, first: int = 0) -> int:
        """The position behind the last of (B, T) ids that begin at `first`; `ValueError` if there are not so many."""
        length = first + ids.size(1)
        if length > self.config.max_length:
            raise ValueError(
                f"{length} tokens are more than the {self.config.max_length} this model has positions for"
            )
        return length


def build_transformer(config: ModelConfig) -> nn.Transformer:
    """The stock `nn.Transformer` of these sizes."""
    sizes = dict(dim_feedforward=config.dim_feedforward, dropout=config.dropout, batch_first=True)
    sizes |= dict(d_model=config.d_model, nhead=config.nhead, norm_first=config.norm_first)
    layer, norm = nn.TransformerEncoderLayer(**sizes), nn.LayerNorm(config.d_model)
    # Nested tensors (a prototype) would warn and change shapes; the constructor of nn.Transformer cannot switch them off.
    encoder = nn.TransformerEncoder(
        layer, config.num_encoder_layers, norm, enable_nested_tensor=False
    )
    return nn.Transformer(
        **sizes, num_decoder_layers=config.num_decoder_layers, custom_encoder=encoder
    )


def sinusoids(length: int, d_model: int) -> Tensor:
    """(length, D): position p has sin(p / 10000^(2i/D)) at 2i and the cosine at 2i + 1 (section 3.5 of the paper)."""
    position = torch.arange(length, dtype=torch.float64).unsqueeze(
        1
    )  # (length, 1); fp32 would blur large angles
    frequency = torch.exp(
        torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / d_model)
    )  # (D/2,)
    angle = position * frequency  # (length, D/2)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).float()  # (length, D)


class SummedLoss(nn.Module):
    """A translator and its loss in one module: what DDP and `torch.compile` wrap, because its output is the loss."""

    def __init__(self, model: Translator, label_smoothing: float):
        super().__init__()
        self.model, self.label_smoothing = model, label_smoothing

    def forward(self, src: Tensor, src_pad: Tensor, tgt_in: Tensor, real: Tensor, tgt_out: Tensor):
        """(B, S), (B, S), (B, T), (N,), (N,) → cross-entropy in nats summed over N tokens: to minimise, and to report.

        The first has label smoothing and a gradient; exp(second / N) is the perplexity.
        """
        log_p = self.model(src, src_pad, tgt_in, real).float().log_softmax(-1)  # (N, V)
        plain = F.nll_loss(log_p, tgt_out, reduction="sum")
        # Label smoothing mixes in the loss of a target spread evenly over the vocabulary. F.cross_entropy would give the
        # mixture alone, and the plain loss, asked for after it, would need a second softmax.
        evenly = -(
            log_p.mean(-1) * (tgt_out >= 0)
        ).sum()  # negative: no target, see fast/cuda_training.py
        return torch.lerp(plain, evenly, self.label_smoothing), plain.detach()


def training_flops(config: ModelConfig, source_tokens: int, target_tokens: int) -> float:
    """Floating-point operations of a forward and backward pass over so many tokens, matrix products with weights only.

    A product with W weights costs 2·W per token forward (multiply, add) and 4·W backward (gradients of its input and of the
    weights). Attention scores are left out: under 5 % at the lengths of sentences. A source's end, a target's begin are tokens.
    """
    d, ff = config.d_model, config.dim_feedforward
    encoder = config.num_encoder_layers * (4 * d * d + 2 * d * ff)
    # Self-attention 4·d², query and output of cross 2·d²; its keys and values once for every source token.
    decoder = config.num_decoder_layers * (6 * d * d + 2 * d * ff)
    cross_keys_and_values = config.num_decoder_layers * 2 * d * d
    output = d * config.target_vocab
    return 6.0 * (
        source_tokens * (encoder + cross_keys_and_values) + target_tokens * (decoder + output)
    )


@torch.no_grad()
def cross_attention(model: Translator, src: Tensor, src_pad: Tensor, tgt_in: Tensor) -> Tensor:
    """Where the last decoder layer looks: (B, T, S) weights, averaged over heads, each row summing to 1."""
    attention = model.transformer.decoder.layers[-1].multihead_attn
    seen = {}
    # The stock layer asks for no weights; catch what it attends with and ask again.
    hook = attention.register_forward_pre_hook(
        lambda _, inputs: seen.update(query=inputs[0], memory=inputs[1])
    )
    try:
        model.decode(model.encode(src, src_pad), src_pad, tgt_in)
    finally:
        hook.remove()
    return attention(
        seen["query"], seen["memory"], seen["memory"], key_padding_mask=src_pad, need_weights=True
    )[1]
