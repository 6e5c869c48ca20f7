"""The language model: an encoder under a causal mask, and its loss.

B segments, S tokens in a segment, D model width, E embedding width, V vocabulary, H heads, N tokens
whose loss counts. `attention_mask` (B, S) is False at padding.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model import sinusoids


class LanguageModel(nn.Module):
    """`nn.TransformerEncoder` that sees no later token.

    The output weights are those of the embedding (Press and Wolf 2017).
    """

    def __init__(self, vocabulary: int, sizes):
        """`sizes`: the fields of Config from d_model to positions, and seq_length."""
        super().__init__()
        width, d_embedding = sizes.d_model, sizes.d_embedding or sizes.d_model
        self.nhead = sizes.nhead
        self.embedding = nn.Embedding(vocabulary, d_embedding)
        # As in GPT-2. The output weights are the same matrix: with much larger ones the untrained
        # model would predict its own input token.
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.up, self.down = nn.Identity(), nn.Identity()
        if d_embedding != width:
            self.up = nn.Linear(d_embedding, width)  # E → D
            self.down = nn.Linear(width, d_embedding)  # D → E
        if sizes.positions == "learned":
            self.positions = nn.Parameter(torch.randn(sizes.seq_length, width) * 0.02)
        else:
            self.register_buffer("positions", sinusoids(sizes.seq_length, width), persistent=False)
        layer = nn.TransformerEncoderLayer(
            width,
            sizes.nhead,
            sizes.dim_feedforward,
            sizes.dropout,
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, sizes.num_layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.dropout = nn.Dropout(sizes.dropout)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        # (S, S): True where a token must not look. Not part of the checkpoint.
        causal_mask = torch.ones(sizes.seq_length, sizes.seq_length, dtype=torch.bool).triu(1)
        self.register_buffer("causal_mask", causal_mask, persistent=False)

    @torch.no_grad()
    def start_from_counts(self, ids: Tensor) -> None:
        """Output bias = log frequency of each token: the first loss is then the unigram entropy."""
        counts = ids.bincount(minlength=len(self.bias)).float() + 1
        self.bias.copy_((counts / counts.sum()).log())

    def embedding_parameters(self) -> list[nn.Parameter]:
        """What the first stage trains: embedding, its projection, and learned positions."""
        parameters = [self.embedding.weight, *self.up.parameters()]
        if isinstance(self.positions, nn.Parameter):
            parameters.append(self.positions)
        return parameters

    def forward(
        self, tokens: Tensor, attention_mask: Tensor, counted: Tensor | None = None
    ) -> Tensor:
        """(B, S) ids → logits (B, S, V); with `counted` (B, S) of those tokens only, (N, V).

        Inputs may stay on the CPU: how many tokens count is then known without waiting for the GPU.
        """
        length, device = tokens.size(1), self.bias.device
        # Positions count from the first real token, so that padding on the left moves nothing.
        position = send((attention_mask.cumsum(1) - 1).clamp_min(0), device)  # (B, S)
        embedded = self.embedding(send(tokens, device))  # (B, S, E)
        embedded = embedded * math.sqrt(self.embedding.embedding_dim)
        x = self.dropout(self.up(embedded) + F.embedding(position, self.positions))  # (B, S, D)
        causal_mask = self.causal_mask[:length, :length]
        if attention_mask[:, 0].all():
            # Padding stands on the right, if anywhere: the causal mask alone hides it.
            x = self.encoder(x, mask=causal_mask, is_causal=True)
        else:
            # A padding token may see itself: a row that may see nothing would be a row of NaN.
            itself = torch.eye(length, dtype=torch.bool, device=device)
            padding = ~send(attention_mask, device).unsqueeze(1)  # (B, 1, S)
            mask = causal_mask | (padding & ~itself)  # (B, S, S)
            x = self.encoder(x, mask=mask.repeat_interleave(self.nhead, 0))  # mask (B·H, S, S)
        if counted is not None:
            # The largest matrix product is made for these N tokens only.
            kept = counted.flatten().nonzero().squeeze(1)
            x = x.flatten(0, 1).index_select(0, send(kept, device))  # (N, D)
        x = self.down(self.dropout(x))  # (…, E)
        return F.linear(x, self.embedding.weight, self.bias)


class SmoothedLoss(nn.Module):
    """A model and its two losses in one module, which is what DDP wraps."""

    def __init__(self, model: LanguageModel, smoothing: float):
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(
        self, tokens: Tensor, targets: Tensor, attention_mask: Tensor, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All inputs (B, S) → the smoothed loss, summed, and the plain loss of each token, (N,)."""
        logits = self.model(tokens, attention_mask, counted).float()  # (N, V)
        truth = send(targets[counted], logits.device)  # (N,)
        log_probabilities = logits.log_softmax(-1)  # (N, V)
        plain = F.nll_loss(log_probabilities, truth, reduction="none")  # (N,)
        # The target is 1 − s for the right word, and s shared among all words.
        spread = -log_probabilities.mean(-1)  # (N,) the loss against equal shares
        smoothed = ((1 - self.smoothing) * plain + self.smoothing * spread).sum()
        return smoothed, plain.detach()


def send(x: Tensor, device: torch.device) -> Tensor:
    """To the device; from pinned memory, so that the CPU does not wait for the copy."""
    if x.device == device:
        return x
    return x.pin_memory().to(device, non_blocking=True)


def unigram_entropy(ids: Tensor) -> float:
    """Nats per token of a text (T,) for a model that knows only how frequent each word is in it."""
    counts = ids.bincount().double()
    shares = counts[counts > 0] / len(ids)
    return -(shares * shares.log()).sum().item()


def flops_per_token(model: LanguageModel, length: int) -> int:
    """FLOPs of matrix products per training token; the backward pass costs twice the forward pass.

    The model's input are ids, so that every product has both gradients.
    """
    attention_mask = torch.ones(1, length, dtype=torch.bool)
    # MATH: attention by plain matrix products, which the counter knows on every device.
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(attention_mask.long(), attention_mask)
    return 3 * counter.get_total_flops() // length
