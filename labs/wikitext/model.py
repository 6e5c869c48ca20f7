"""The language model: an encoder under a causal mask; its loss, its scores and its samples.

B rows, S places, D model width, E embedding width, V vocabulary, H heads, N places whose loss counts, T tokens of a text.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.distributed import World
from labs.wikitext.text import Vocabulary
from model import sinusoids
from tools.reporting.fonts import families

WINDOWS_AT_ONCE = 64  # rows of a batch that is scored


class LanguageModel(nn.Module):
    """`nn.TransformerEncoder` that sees no later token; output weights tied to the embedding (Press and Wolf 2017)."""

    def __init__(self, vocabulary: int, sizes):
        """`sizes`: d_model, d_embedding, nhead, layers, dim_feedforward, dropout, positions, segment."""
        super().__init__()
        self.width, self.nhead, d_embedding = (
            sizes.d_model,
            sizes.nhead,
            sizes.d_embedding or sizes.d_model,
        )
        self.embedding = nn.Embedding(vocabulary, d_embedding)
        nn.init.normal_(self.embedding.weight, std=d_embedding**-0.5)
        self.up = (
            nn.Linear(d_embedding, self.width) if d_embedding != self.width else nn.Identity()
        )  # E → D
        self.down = (
            nn.Linear(self.width, d_embedding) if d_embedding != self.width else nn.Identity()
        )  # D → E
        if sizes.positions == "learned":
            self.positions = nn.Parameter(torch.randn(sizes.segment, self.width) * 0.02)
        else:
            self.register_buffer(
                "positions", sinusoids(sizes.segment, self.width), persistent=False
            )
        layer = nn.TransformerEncoderLayer(
            self.width,
            self.nhead,
            sizes.dim_feedforward,
            sizes.dropout,
            batch_first=True,
            norm_first=True,
        )
        norm = nn.LayerNorm(self.width)
        self.encoder = nn.TransformerEncoder(
            layer, sizes.layers, norm=norm, enable_nested_tensor=False
        )
        self.dropout = nn.Dropout(sizes.dropout)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        # Not part of the checkpoint. Triangle: True = may not be seen.
        triangle = torch.ones(sizes.segment, sizes.segment, dtype=torch.bool).triu(1)
        self.register_buffer("later", triangle, persistent=False)

    @torch.no_grad()
    def start_from_counts(self, ids: Tensor) -> None:
        """The output bias begins at the log frequency of each token, so the first loss is near the unigram entropy."""
        counts = ids.bincount(minlength=len(self.bias)).float() + 1
        self.bias.copy_((counts / counts.sum()).log())

    def embedding_parameters(self) -> list[nn.Parameter]:
        """What the first stage trains: embedding, its projection where sizes differ, and positions if they are learned."""
        positions = [self.positions] if isinstance(self.positions, nn.Parameter) else []
        return [self.embedding.weight, *self.up.parameters(), *positions]

    def forward(self, tokens: Tensor, real: Tensor, counted: Tensor | None = None) -> Tensor:
        """(B, S) ids, (B, S) False at padding → logits (B, S, V); or, with `counted` (B, S), only of those places: (N, V).

        Inputs may stay on the CPU: how many places count is then known without waiting for the GPU.
        """
        return F.linear(self.hidden(tokens, real, counted), self.embedding.weight, self.bias)

    def hidden(self, tokens: Tensor, real: Tensor, counted: Tensor | None = None) -> Tensor:
        """What the output projection sees: (B, S, E) or (N, E)."""
        length, device = tokens.size(1), self.bias.device
        # Counted from the first real token, so that padding on the left moves nothing.
        place = send((real.cumsum(1) - 1).clamp_min(0), device)  # (B, S)
        tokens = send(tokens, device)
        scaled = self.embedding(tokens) * math.sqrt(
            self.embedding.embedding_dim
        )  # (B, S, E) of variance 1
        x = self.dropout(self.up(scaled) + F.embedding(place, self.positions))  # (B, S, D)
        if real[:, 0].all():
            # Padding stands on the right, if anywhere: the triangle alone hides it from every real token.
            x = self.encoder(x, mask=self.later[:length, :length], is_causal=True)
        else:
            # A padded place may see itself: a row that may see nothing would be a row of nan.
            itself = torch.eye(length, dtype=torch.bool, device=device)
            unseen = (
                self.later[:length, :length] | ~send(real, device).unsqueeze(1)
            ) & ~itself  # (B, S, S)
            x = self.encoder(
                x, mask=unseen.repeat_interleave(self.nhead, 0)
            )  # (B·H, S, S), as torch wants it
        if counted is not None:  # (N, D): the largest product is made for them only
            x = x.flatten(0, 1).index_select(0, send(counted.flatten().nonzero()[:, 0], device))
        return self.down(self.dropout(x))


class SmoothedLoss(nn.Module):
    """A model and its two losses in one module, which is what DDP wraps."""

    def __init__(self, model: LanguageModel, smoothing: float):
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(
        self, tokens: Tensor, targets: Tensor, real: Tensor, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All (B, S) → the smoothed loss, summed, to be minimised; and the unsmoothed one of each token, (N,), to be shown."""
        weight, bias = self.model.embedding.weight, self.model.bias
        hidden, truth = (
            self.model.hidden(tokens, real, counted),
            send(targets[counted], bias.device),
        )  # (N, E), (N,)
        loss = F.cross_entropy(
            F.linear(hidden, weight, bias).float(), truth, reduction="none"
        )  # (N,): −log p(truth)
        # Smoothed: (1 − s) · loss + s · (−log p, averaged over the vocabulary) = loss + s · (logit of truth − mean logit).
        # That difference, `ahead`, is `hidden` times one vector a token: no second pass over the (N, V) logits.
        ahead = (hidden * (weight[truth] - weight.mean(0))).sum(-1) + bias[truth] - bias.mean()
        return (loss + self.smoothing * ahead).sum(), loss.detach()


def send(x: Tensor, device: torch.device) -> Tensor:
    """To the device; from pinned memory, so that the CPU need not wait until the copy is made."""
    return x if x.device == device else x.pin_memory().to(device, non_blocking=True)


def gather_segments(
    ids: Tensor, spans: list[tuple[int, int, int]], eos: int, length: int, pad: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens first … end − 1 of a text as targets, each token's predecessor as input: (B, length) each, and `real`.

    Before the first token of a text stands <eos>. Padding, on the `pad` side, holds token 0, which nothing looks at.
    """
    tokens, targets = (torch.zeros(len(spans), length, dtype=torch.int64) for _ in range(2))
    real = torch.zeros(len(spans), length, dtype=torch.bool)
    for row, (first, _, end) in enumerate(spans):
        size = end - first
        places = slice(length - size, length) if pad == "left" else slice(0, size)
        before = (
            ids[first - 1 : end - 1] if first else torch.cat([torch.tensor([eos]), ids[: end - 1]])
        )
        tokens[row, places], targets[row, places], real[row, places] = before, ids[first:end], True
    return tokens, targets, real


def windows(tokens: int, length: int) -> list[tuple[int, int, int]]:
    """(first, first counted, end) of overlapping windows that count every token once, after half a window of context.

    The tokens at the very beginning have only what there is before them.
    """
    stride = length // 2
    ends = [min(first + stride, tokens) for first in range(0, tokens, stride)]
    return [
        (max(0, end - length), first, end) for first, end in zip(range(0, tokens, stride), ends)
    ]


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    ids: Tensor,
    eos: int,
    length: int,
    pad: str,
    world: World,
    confused: Tensor | None = None,
    unk: int | None = None,
) -> tuple[dict[str, float], Tensor]:
    """Sums over a text of T tokens, and a table of the `confused` tokens, (K,).

    Sums: "loss" in nats; tokens guessed right, "correct", and of those that are not `unk` alone, "correct_known".

    Table (K, K + 1): how often token i was to be predicted and j was the likeliest; the last column is any other token.
    """
    device, spans = world.device, windows(len(ids), length)
    shown = torch.empty(0, dtype=torch.int64) if confused is None else confused  # (K,)
    place = torch.full(
        (model.embedding.num_embeddings,), len(shown), dtype=torch.int64
    )  # K: any other token
    place[shown] = torch.arange(len(shown))
    place, sums = place.to(device), torch.zeros(3, dtype=torch.float64, device=device)
    table = torch.zeros(len(shown) + 1, len(shown) + 1, dtype=torch.int64, device=device)
    batches = [
        spans[first : first + WINDOWS_AT_ONCE] for first in range(0, len(spans), WINDOWS_AT_ONCE)
    ]
    for batch in batches[world.rank :: world.size]:
        tokens, targets, real = gather_segments(ids, batch, eos, length, pad)
        # Of its real tokens a window counts the last ones.
        left = real.flip(1).cumsum(1).flip(1)  # (B, S) real tokens from here on
        counts = torch.tensor([end - first for _, first, end in batch])
        counted = real & (left <= counts.unsqueeze(1))
        logits, truth = (
            model(tokens, real, counted).float(),
            send(targets[counted], device),
        )  # (N, V), (N,)
        guess = logits.argmax(-1)
        right, losses = guess == truth, F.cross_entropy(logits, truth, reduction="none")  # (N,)
        right_known = right if unk is None else right & (truth != unk)
        sums += torch.stack([losses.double().sum(), right.sum(), right_known.sum()])
        pairs = place[truth] * (len(shown) + 1) + place[guess]  # each pair as one number
        table += pairs.bincount(minlength=table.numel()).view_as(table)
    names = ("loss", "correct", "correct_known")
    return dict(zip(names, world.sum(sums).tolist())), world.sum(table)[: len(shown)].cpu()


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: list[Tensor],
    vocabulary: Vocabulary,
    length: int,
    seed: int,
    temperature: float = 0.8,
) -> list[list[int]]:
    """`length` sampled tokens behind each prompt; <unk> is never sampled. Prompts of different lengths are padded left."""
    model.eval()
    context = model.later.size(0)  # tokens that are seen at most
    generator = torch.Generator().manual_seed(seed)
    rows = [[vocabulary.eos, *prompt.tolist()] for prompt in prompts]
    for _ in range(length):
        seen = [row[-context:] for row in rows]
        longest = max(map(len, seen))
        tokens = torch.tensor([[0] * (longest - len(row)) + row for row in seen])
        real = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in seen])
        last = torch.zeros_like(real)
        last[:, -1] = True
        logits = model(tokens, real, last).float().cpu()  # (B, V)
        if vocabulary.unk is not None:
            logits[:, vocabulary.unk] = -math.inf
        drawn = (logits / temperature).softmax(-1).multinomial(1, generator=generator)
        for row, id in zip(rows, drawn.flatten().tolist()):
            row.append(id)
    return [row[-length:] for row in rows]


def confusion_figure(table: Tensor, names: list[str]):
    """The table (K, K + 1) as a matplotlib figure of shares in each row."""
    from matplotlib.figure import Figure

    shares = table / table.sum(1, keepdim=True).clamp_min(1)
    how = dict(family=families("".join(names)), parse_math=False)
    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shares.numpy(), vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axes.set_xticks(range(len(names) + 1), [*names, "(other)"], rotation=60, **how)
    axes.set_yticks(range(len(names)), names, **how)
    axes.set_xlabel("likeliest token of the model")
    axes.set_ylabel("token in the test text")
    figure.colorbar(image, label="share of the row")
    return figure
