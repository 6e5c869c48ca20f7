"""The translation model of "Attention Is All You Need" (Vaswani et al. 2017, arXiv:1706.03762).

    source ids → embedding · √D + positions → encoder → memory
                                                          ↓
    target ids → embedding · √D + positions → decoder → hidden → output projection → logits

The encoder and the decoder are PyTorch's `nn.Transformer`. This file adds what that class leaves
to its user: embeddings, positions, masks, the output projection and the loss.

Training, validation and decoding all run this code: what you change here is what runs. fast/
replaces only the inside of PyTorch's own encoder, decoder and output layer.

Sizes in shape comments:

    B  sentence pairs in a batch          D  width of the model (d_model)
    S  tokens of the longest source       V  size of the target vocabulary
    T  tokens of the longest target       N  target tokens in the batch that are not padding
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import UserError
from fast import can_slice, has_hooks, is_cross_entropy, linear_cross_entropy, use_kernels

# In evaluation PyTorch would compute an encoder layer with one fused function that bypasses its
# attention module: a change of such a module would take effect in training only.
torch.backends.mha.set_fastpath_enabled(False)

# Sizes that --preset chooses; "lab", the handout's, is the default of the flags themselves.
PRESETS: dict[str, dict[str, float]] = {
    "lab": dict(),
    # Vaswani et al. 2017, table 3
    "base": dict(d_model=512, num_encoder_layers=6, num_decoder_layers=6, dim_feedforward=2048),
    "big": dict(
        d_model=1024,
        nhead=16,
        num_encoder_layers=6,
        num_decoder_layers=6,
        dim_feedforward=4096,
        dropout=0.3,
    ),
}

# Parts of a `Translator` that --freeze names. Tied weights: the output projection is a part of
# the embeddings.
FREEZABLE: dict[str, tuple[str, ...]] = {
    "": (),
    "encoder": ("source_embedding", "transformer.encoder"),
    "embeddings": ("source_embedding", "target_embedding"),
}

# Fields of `ModelConfig` that may change with --init, because no weight depends on them.
NOT_IN_WEIGHTS = {"dropout"}

# Tokens that `sampled_cross_entropy` draws besides the targets.
OTHER_TOKENS = 2048


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a `Translator`. Raises `UserError` if they do not fit together."""

    source_vocab: int
    target_vocab: int
    d_model: int = 256
    nhead: int = 8
    num_encoder_layers: int = 3
    num_decoder_layers: int = 3
    dim_feedforward: int = 1024
    dropout: float = 0.1
    norm_first: bool = False
    max_length: int = 512  # positions: the longest sentence with its begin or end token

    @property
    def longest_sentence(self) -> int:
        """In tokens, without its begin or end token."""
        return self.max_length - 1

    def __post_init__(self):
        layers = ("num_encoder_layers", "num_decoder_layers")
        for name in ("d_model", "nhead", *layers, "dim_feedforward", "max_length"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)} must be at least 1")
        if not 0 <= self.dropout < 1:
            raise UserError(f"--dropout {self.dropout} must be at least 0 and below 1")
        if self.d_model % self.nhead or self.d_model % 2:
            raise UserError(
                f"--d_model {self.d_model} must be even and a multiple of --nhead {self.nhead}"
            )


def sizes_of(config, source_vocab: int, target_vocab: int) -> ModelConfig:
    """The sizes that train.py's settings of the same names ask for, with these vocabularies."""
    sizes = {}
    for field in fields(ModelConfig):
        if field.name not in ("source_vocab", "target_vocab") and hasattr(config, field.name):
            sizes[field.name] = getattr(config, field.name)
    return ModelConfig(source_vocab, target_vocab, **sizes)


class Translator(nn.Module):
    """Source and target token ids → logits over the target vocabulary.

    Where is padding masked? Masks are boolean, and True means "do not look at this position", as in
    nn.Transformer. (decoding.py calls another function of PyTorch, whose True means "look".)

    - Source padding: `src_pad` (B, S), made in data.py, is used in two attentions: the encoder's
      self-attention and the decoder's attention to the memory. Whoever forgets the second one
      lets translations depend on how long the other sentences of the batch are.
    - Future target tokens: `causal_mask` (T, T), in the decoder's self-attention. Position t sees
      the positions 0 … t, so that all T predictions can be trained in one pass.
    - Target padding stands at the end of a row. The causal mask hides it from all real tokens, so
      it needs no mask. The decoder's output at padding is never used: `target_positions` names
      all other positions.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.source_embedding = nn.Embedding(config.source_vocab, config.d_model)
        self.target_embedding = nn.Embedding(config.target_vocab, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.transformer = build_transformer(config)
        self.output = nn.Linear(config.d_model, config.target_vocab)
        # Tied weights (Press and Wolf 2017): the row of a token in the output projection is its
        # embedding. This saves V · D parameters, and both uses train them.
        self.output.weight = self.target_embedding.weight
        self.initialize()

        # Buffers move to the GPU with the model but are not trained. These two follow from the
        # sizes alone, so they are not stored in checkpoints (persistent=False).
        positions = sinusoids(config.max_length, config.d_model)
        self.register_buffer("positions", positions, persistent=False)
        # True above the diagonal: row t, the query, must not look at columns t + 1, t + 2, …
        square = torch.ones(config.max_length, config.max_length, dtype=torch.bool)
        self.register_buffer("causal_mask", square.triu(1), persistent=False)

    def initialize(self) -> None:
        """Set weights with which the first loss is near ln V, that of a uniform guess."""
        # nn.Embedding starts with N(0, 1). Logits are sums of D products with the tied weights;
        # they would be √D times too large, and the first loss would be near 80.
        std = self.config.d_model**-0.5
        nn.init.normal_(self.source_embedding.weight, std=std)
        nn.init.normal_(self.target_embedding.weight, std=std)
        nn.init.zeros_(self.output.bias)
        if self.config.norm_first:
            # Pre-norm carries the embedding of the input token through to the tied output, which
            # then predicts this very token again. A small gain of the last norm weakens that:
            # with 8 / √D the first loss is within 1 of ln V.
            gain = min(1.0, 8 / math.sqrt(self.config.d_model))
            nn.init.constant_(self.transformer.decoder.norm.weight, gain)

    def forward(
        self, src: Tensor, src_pad: Tensor, tgt_in: Tensor, target_positions: Tensor | None = None
    ) -> Tensor:
        """Logits (B, T, V) of the token that follows each target token.

        src (B, S): source ids; src_pad (B, S): True at padding; tgt_in (B, T): the begin token and
        the target. With `target_positions` (N,), which count in the flattened (B · T), it returns
        only the logits (N, V) of these positions.

        Change `hidden` or `logits` and not this line: training and decoding call those two.
        """
        return self.logits(self.hidden(src, src_pad, tgt_in, target_positions))

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, D) → (…, V). There is no softmax here: it is a part of the loss."""
        return self.output(hidden)

    def hidden(
        self, src: Tensor, src_pad: Tensor, tgt_in: Tensor, target_positions: Tensor | None = None
    ) -> Tensor:
        """The input of `logits`: (B, T, D), or (N, D) with `target_positions`.

        The arguments are those of `forward`.
        """
        memory = self.encode(src, src_pad)  # (B, S, D)
        hidden = self.decode(memory, src_pad, tgt_in)  # (B, T, D)
        if target_positions is None:
            return hidden
        # The output projection is the largest matrix product of the model: skip the padding.
        return hidden.flatten(0, 1).index_select(0, target_positions)  # (B·T, D) → (N, D)

    def encode(self, src: Tensor, src_pad: Tensor) -> Tensor:
        """Source ids (B, S) → memory (B, S, D)."""
        embedded = self.embed(self.source_embedding, src)
        return self.transformer.encoder(embedded, src_key_padding_mask=src_pad)

    def decode(self, memory: Tensor, src_pad: Tensor, tgt_in: Tensor, first: int = 0) -> Tensor:
        """Memory (B, S, D) and target ids (B, T) → hidden (B, T, D).

        The ids stand at the positions first, first + 1, … Training passes whole targets. Decoding
        passes one token at a time, to a decoder that has kept the keys and values of those before.
        """
        end = first + tgt_in.size(1)
        return self.transformer.decoder(
            self.embed(self.target_embedding, tgt_in, first),
            memory,
            tgt_mask=self.causal_mask[first:end, :end],
            # True would promise that the mask is causal; PyTorch would then not read it, and ignore
            # a change of yours.
            tgt_is_causal=False,
            memory_key_padding_mask=src_pad,
        )

    def embed(self, embedding: nn.Embedding, ids: Tensor, first: int = 0) -> Tensor:
        """Ids (B, T) at the positions first, first + 1, … → (B, T, D)."""
        end = self.check_length(ids, first)
        # Embeddings are N(0, 1/D); · √D makes them as large as the sinusoids (section 3.4).
        scaled = embedding(ids) * math.sqrt(self.config.d_model)
        return self.dropout(scaled + self.positions[first:end])

    def check_length(self, ids: Tensor, first: int = 0) -> int:
        """The position after the last of the ids (B, T); ValueError if there are too many."""
        length = first + ids.size(1)
        if length > self.config.max_length:
            raise ValueError(
                f"{length} tokens are more than the {self.config.max_length} positions of the model"
            )
        return length


# What is done to every new model; labs/attention_op/train.py adds something.
CHANGES: list[Callable[[Translator], object]] = []


def make_translator(config: ModelConfig) -> Translator:
    """The model of all scripts: training, validation, evaluation, translation and --check.

    A class of your own goes here, instead of `Translator`.
    """
    model = Translator(config)
    for change in CHANGES:
        change(model)
    return model


def freeze(model: Translator, part: str) -> None:
    """From now on the weights of `part`, a name of `FREEZABLE`, get no gradient and no update."""
    for name in FREEZABLE[part]:
        model.get_submodule(name).requires_grad_(False)


def build_transformer(config: ModelConfig) -> nn.Transformer:
    """PyTorch's `nn.Transformer` with these sizes; all tensors are batch first."""
    layer_sizes = dict(
        d_model=config.d_model,
        nhead=config.nhead,
        dim_feedforward=config.dim_feedforward,
        dropout=config.dropout,
        norm_first=config.norm_first,
        batch_first=True,
    )
    # We make the encoder ourselves, because only its own constructor can switch nested tensors
    # off: they are a prototype, print a warning and change the shape of the output.
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**layer_sizes),
        config.num_encoder_layers,
        norm=nn.LayerNorm(config.d_model),
        enable_nested_tensor=False,
    )
    return nn.Transformer(
        **layer_sizes, num_decoder_layers=config.num_decoder_layers, custom_encoder=encoder
    )


def sinusoids(length: int, d_model: int) -> Tensor:
    """The positional encoding of section 3.5: (length, D).

    PE(p, 2i)     = sin(p / 10000^(2i/D))
    PE(p, 2i + 1) = cos(p / 10000^(2i/D))

    docs/positional_encoding.md shows why.
    """
    # In float64: float32 would round the large angles of late positions.
    position = torch.arange(length, dtype=torch.float64).unsqueeze(1)  # (length, 1)
    even = torch.arange(0, d_model, 2, dtype=torch.float64)  # 2i, (D/2,)
    frequency = torch.exp(even * (-math.log(10000.0) / d_model))  # 1 / 10000^(2i/D)
    angle = position * frequency  # (length, D/2)
    # Stacked (length, D/2, 2) and flattened, sine and cosine alternate.
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).float()


class SummedLoss(nn.Module):
    """A translator and its loss in one module, for DDP and torch.compile, which wrap modules.

    `sampled`: estimate it with `sampled_cross_entropy` where that saves time.
    """

    def __init__(self, model: Translator, label_smoothing: float, sliced: bool = True):
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing
        self.sliced = sliced
        self.sampled = False
        self.is_usual = is_cross_entropy(cross_entropy)  # fast/ computes no other loss
        self.tokens_in_softmax = model.config.target_vocab  # of the last call

    def flops(self, source_tokens: int, target_tokens: int) -> float:
        """`training_flops` of this number of tokens, with a softmax like that of the last call."""
        sizes = self.model.config
        return training_flops(sizes, source_tokens, target_tokens, self.tokens_in_softmax)

    def has_shortcut(self) -> bool:
        """Whether neither `cross_entropy` nor `logits` was changed: then the loss needs less work.

        The logits must be the product with the output layer's weights and nothing else.
        """
        if not self.is_usual or has_hooks(self.model):
            return False
        return can_slice(self.model.logits, self.model.output)

    def can_sample(self) -> bool:
        """Whether an estimate saves time: on a CPU, with a large vocabulary."""
        is_large = self.model.config.target_vocab > 4 * OTHER_TOKENS
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        return is_large and on_cpu and self.has_shortcut()

    def forward(
        self,
        src: Tensor,
        src_pad: Tensor,
        tgt_in: Tensor,
        target_positions: Tensor,
        tgt_out: Tensor,
    ):
        """Cross-entropy in nats, summed over the N target tokens: (smoothed, plain).

        tgt_out (N,): the tokens to predict at `target_positions` (N,). Train on the first; the
        second has no gradient, and exp(second / N) is the perplexity.

        It is a sum and not a mean, because only the caller knows the number of tokens of all
        micro-batches and ranks to divide by. A mean of means would weigh short batches too much.
        """
        output = self.model.output
        self.tokens_in_softmax = self.model.config.target_vocab
        if self.sampled and self.can_sample():
            hidden = self.model.hidden(src, src_pad, tgt_in, target_positions)  # (N, D)
            smoothed, plain, self.tokens_in_softmax = sampled_cross_entropy(
                hidden, output.weight, output.bias, tgt_out, self.label_smoothing, self.sliced
            )
        elif self.sliced and self.has_shortcut():
            # The same numbers as below, without all N · V logits in memory at once.
            hidden = self.model.hidden(src, src_pad, tgt_in, target_positions)  # (N, D)
            smoothed, plain = linear_cross_entropy(
                hidden, output.weight, output.bias, tgt_out, self.label_smoothing
            )
        else:
            logits = self.model(src, src_pad, tgt_in, target_positions)  # (N, V)
            smoothed, plain = cross_entropy(logits, tgt_out, self.label_smoothing)
        # A further term of the loss belongs here: add it, summed over the tokens, to the first.
        return smoothed, plain


def make_loss(
    model: Translator,
    config,
    dtype: torch.dtype,
    log: Callable[[str], None] = lambda line: None,
) -> SummedLoss:
    """The loss of train.py with these settings; products are computed in `dtype`."""
    if config.fast and not config.compile:
        # On a CPU, PyTorch's encoder and decoder compute the same in less time. All else in this
        # file runs as it is written.
        use_kernels(model, dtype, log)
    loss_of = SummedLoss(model, config.label_smoothing, sliced=config.fast)
    if config.fast and not loss_of.is_usual:
        log("note: all logits are in memory at once: cross_entropy in model.py was changed")
    return loss_of


def cross_entropy(logits: Tensor, tgt_out: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Logits (N, V) and the right tokens (N,) → summed cross-entropy, (smoothed, plain).

    Label smoothing ε (section 5.4): the target is the right token with probability 1 - ε, and with
    ε a token drawn uniformly from the vocabulary, so

        smoothed = (1 - ε) · plain + ε · uniform

    `F.cross_entropy(label_smoothing=ε)` would return only that; the plain loss, which we report,
    would then cost a second softmax.
    """
    log_p = logits.float().log_softmax(-1)
    plain = F.nll_loss(log_p, tgt_out, reduction="sum")
    uniform = -log_p.mean(-1).sum()
    return torch.lerp(plain, uniform, label_smoothing), plain.detach()


def sampled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    tgt_out: Tensor,
    label_smoothing: float,
    sliced: bool = True,
) -> tuple[Tensor, Tensor, int]:
    """An estimate of `cross_entropy` from some of the tokens: (smoothed, plain, how many tokens).

    hidden (N, D), weight (V, D), bias (V,), tgt_out (N,). The sum of the softmax runs over all
    targets and over `OTHER_TOKENS` others, drawn uniformly, each of which stands for several (Jean
    et al. 2015, arXiv:1412.2007).
    """
    vocabulary = len(weight)
    is_target = torch.zeros(vocabulary, dtype=torch.bool)
    is_target[tgt_out] = True
    targets = is_target.nonzero().squeeze(1)
    others = (~is_target).nonzero().squeeze(1)
    drawn = others[torch.randperm(len(others))[:OTHER_TOKENS]]
    rows = torch.cat([targets, drawn])  # (C,)
    # exp(logit + ln k) = k · exp(logit): a drawn token counts for k tokens.
    correction = torch.zeros(len(rows))
    if len(drawn):
        correction[len(targets) :] = math.log(len(others) / len(drawn))
    place = torch.empty(vocabulary, dtype=torch.long)  # of a token among the rows
    place[rows] = torch.arange(len(rows))
    part = (weight.index_select(0, rows), bias[rows] + correction)  # of the output layer
    if sliced:
        estimate, plain = linear_cross_entropy(hidden, *part, place[tgt_out], 0.0)
    else:
        estimate, plain = cross_entropy(F.linear(hidden, *part), place[tgt_out], 0.0)
    # Label smoothing needs no softmax: smoothed = plain + ε · (logit of the target - mean logit).
    with torch.autocast(hidden.device.type, enabled=False):
        of_targets = (hidden * F.embedding(tgt_out, weight)).sum() + bias[tgt_out].sum()
        of_all = hidden.sum(0) @ weight.mean(0) + len(hidden) * bias.mean()
    smoothed = estimate + label_smoothing * (of_targets - of_all)
    return smoothed, plain, len(rows)


def training_flops(
    config: ModelConfig, source_tokens: int, target_tokens: int, tokens_in_softmax: int = 0
) -> float:
    """Floating-point operations of one forward and backward pass over this number of tokens.

    Only matrix products with weights count. W weights cost 2 · W per token forward (multiply and
    add) and 4 · W backward (the gradients of the inputs and of the weights). Attention scores are
    left out: at the lengths of sentences they are below 5 %.
    """
    d_squared = config.d_model**2
    feed_forward = 2 * config.d_model * config.dim_feedforward
    # Self-attention has four D × D matrices: query, key, value and output.
    encoder_weights = config.num_encoder_layers * (4 * d_squared + feed_forward)
    # Cross-attention applies its query and output to target tokens, its key and value to sources.
    decoder_weights = config.num_decoder_layers * (6 * d_squared + feed_forward)
    memory_weights = config.num_decoder_layers * 2 * d_squared
    output_weights = config.d_model * (tokens_in_softmax or config.target_vocab)
    source = source_tokens * (encoder_weights + memory_weights)
    target = target_tokens * (decoder_weights + output_weights)
    return (2.0 + 4.0) * (source + target)


@torch.no_grad()
def cross_attention(
    model: Translator, src: Tensor, src_pad: Tensor, tgt_in: Tensor
) -> Tensor | None:
    """The weights with which the last decoder layer attends to the source: (B, T, S).

    They are averaged over the heads; each row sums to 1. None if `decode` calls no
    `nn.MultiheadAttention` over the source's positions, as in some decoders of one's own.
    """
    memory = model.encode(src, src_pad)
    calls = []

    def record(attention: nn.Module, inputs: tuple, named: dict) -> None:
        """Before a call: keep its arguments. In self-attention query and key are one tensor."""
        query = inputs[0] if inputs else named["query"]
        key = inputs[1] if len(inputs) > 1 else named["key"]
        if key is not query and key.shape[:2] == src.shape:
            calls.append((attention, inputs, named))

    # The decoder layers discard the attention weights: record the calls of the attentions in a
    # normal pass, and repeat the last one.
    hooks = [
        part.register_forward_pre_hook(record, with_kwargs=True)
        for part in model.modules()
        if isinstance(part, nn.MultiheadAttention)
    ]
    try:
        model.decode(memory, src_pad, tgt_in)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        return None
    attention, inputs, named = calls[-1]
    _, weights = attention(*inputs, **named | {"need_weights": True})
    return weights
