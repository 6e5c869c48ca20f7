"""The language model: an encoder under a causal mask; its loss, its scores and its samples.

B segments, S places in a segment, D model width, E embedding width, V vocabulary, H heads, N places
whose loss counts, T tokens of a text. `attention_mask` (B, S) is False at padding.
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
    """`nn.TransformerEncoder` that sees no later token.

    The output weights are those of the embedding (Press and Wolf 2017).
    """

    def __init__(self, vocabulary: int, sizes):
        """`sizes`: the fields of Config from d_model to positions, and segment."""
        super().__init__()
        width, d_embedding = sizes.d_model, sizes.d_embedding or sizes.d_model
        self.nhead = sizes.nhead
        self.embedding = nn.Embedding(vocabulary, d_embedding)
        nn.init.normal_(self.embedding.weight, std=d_embedding**-0.5)
        self.up, self.down = nn.Identity(), nn.Identity()
        if d_embedding != width:
            self.up = nn.Linear(d_embedding, width)  # E → D
            self.down = nn.Linear(width, d_embedding)  # D → E
        if sizes.positions == "learned":
            self.positions = nn.Parameter(torch.randn(sizes.segment, width) * 0.02)
        else:
            self.register_buffer("positions", sinusoids(sizes.segment, width), persistent=False)
        layer = nn.TransformerEncoderLayer(
            width,
            sizes.nhead,
            sizes.dim_feedforward,
            sizes.dropout,
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, sizes.layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.dropout = nn.Dropout(sizes.dropout)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        # (S, S): True where a place must not look. Not part of the checkpoint.
        causal_mask = torch.ones(sizes.segment, sizes.segment, dtype=torch.bool).triu(1)
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
        """(B, S) ids → logits (B, S, V); with `counted` (B, S) of those places only, (N, V).

        Inputs may stay on the CPU: how many places count is then known without waiting for the GPU.
        """
        length, device = tokens.size(1), self.bias.device
        # Positions count from the first real token, so that padding on the left moves nothing.
        place = send((attention_mask.cumsum(1) - 1).clamp_min(0), device)  # (B, S)
        embedded = self.embedding(send(tokens, device))  # (B, S, E)
        embedded = embedded * math.sqrt(self.embedding.embedding_dim)  # to variance 1
        x = self.dropout(self.up(embedded) + F.embedding(place, self.positions))  # (B, S, D)
        causal_mask = self.causal_mask[:length, :length]
        if attention_mask[:, 0].all():
            # Padding stands on the right, if anywhere: the causal mask alone hides it.
            x = self.encoder(x, mask=causal_mask, is_causal=True)
        else:
            # A padded place may see itself: a row that may see nothing would be a row of NaN.
            itself = torch.eye(length, dtype=torch.bool, device=device)
            padding = ~send(attention_mask, device).unsqueeze(1)  # (B, 1, S)
            mask = causal_mask | (padding & ~itself)  # (B, S, S)
            x = self.encoder(x, mask=mask.repeat_interleave(self.nhead, 0))  # mask (B·H, S, S)
        if counted is not None:
            # The largest matrix product is made for these N places only.
            places = counted.flatten().nonzero().squeeze(1)
            x = x.flatten(0, 1).index_select(0, send(places, device))  # (N, D)
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
        smoothed = F.cross_entropy(logits, truth, reduction="sum", label_smoothing=self.smoothing)
        with torch.no_grad():
            plain = F.cross_entropy(logits, truth, reduction="none")
        return smoothed, plain


def send(x: Tensor, device: torch.device) -> Tensor:
    """To the device; from pinned memory, so that the CPU does not wait for the copy."""
    if x.device == device:
        return x
    return x.pin_memory().to(device, non_blocking=True)


def gather_segments(
    ids: Tensor, spans: list[tuple[int, int]], eos: int, length: int, pad: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Segments of a text for (first, end) `spans`.

    Returns tokens, targets and attention mask, (B, length) each. Targets are the tokens from first
    to end − 1, the input is each one's predecessor; before the first token of a text stands <eos>.
    Padding, on the `pad` side, holds token 0.
    """
    tokens = torch.zeros(len(spans), length, dtype=torch.int64)
    targets = torch.zeros_like(tokens)
    attention_mask = torch.zeros_like(tokens, dtype=torch.bool)
    for row, (first, end) in enumerate(spans):
        size = end - first
        places = slice(length - size, length) if pad == "left" else slice(0, size)
        if first > 0:
            tokens[row, places] = ids[first - 1 : end - 1]
        else:
            tokens[row, places] = torch.cat([torch.tensor([eos]), ids[: end - 1]])
        targets[row, places] = ids[first:end]
        attention_mask[row, places] = True
    return tokens, targets, attention_mask


def windows(token_count: int, length: int) -> list[tuple[int, int, int]]:
    """(first, first counted, end) of overlapping windows that count every token once.

    Each token has at least half a window of context, except at the very beginning.
    """
    stride = length // 2
    spans = []
    for counted in range(0, token_count, stride):
        end = min(counted + stride, token_count)
        spans.append((max(0, end - length), counted, end))
    return spans


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    ids: Tensor,
    vocabulary: Vocabulary,
    length: int,
    pad: str,
    world: World,
    confused: Tensor,
) -> tuple[dict[str, float], Tensor]:
    """Scores of a text of T tokens, and the confusion table of the `confused` tokens, (K,).

    Scores: loss in nats per token, perplexity, accuracy, and accuracy without <unk>, over the other
    tokens: always guessing <unk> is right for every sixth word of WikiText-2. Table (K, K + 1): how
    often token i was to be predicted and j was the likeliest; the last column is any other token.
    """
    model.eval()
    device = world.device
    # Sums over the tokens: loss in nats, correct guesses, correct guesses of known words.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    # A token's row and column in the table; K is any other token.
    other = len(confused)
    place = torch.full((len(vocabulary.tokens),), other)
    place[confused] = torch.arange(other)
    place = place.to(device)
    table = torch.zeros(other + 1, other + 1, dtype=torch.int64, device=device)
    batches = torch.tensor(windows(len(ids), length)).split(WINDOWS_AT_ONCE)
    for batch in batches[world.rank :: world.size]:
        spans = [(first, end) for first, _, end in batch.tolist()]
        tokens, targets, attention_mask = gather_segments(ids, spans, vocabulary.eos, length, pad)
        # A window counts the last `count` of its real tokens.
        count = batch[:, 2] - batch[:, 1]
        tokens_to_the_end = attention_mask.flip(1).cumsum(1).flip(1)  # (B, S)
        counted = attention_mask & (tokens_to_the_end <= count.unsqueeze(1))
        logits = model(tokens, attention_mask, counted).float()  # (N, V)
        truth = send(targets[counted], device)  # (N,)
        guess = logits.argmax(-1)
        right = guess == truth
        loss = F.cross_entropy(logits, truth, reduction="none").double()
        sums += torch.stack([loss.sum(), right.sum(), (right & (truth != vocabulary.unk)).sum()])
        # Each pair of places as one number, so that one call counts them all.
        pairs = place[truth] * (other + 1) + place[guess]
        table += pairs.bincount(minlength=table.numel()).view_as(table)
    loss, correct, correct_known = world.sum(sums).tolist()
    scores = {
        "loss": loss / len(ids),
        "perplexity": math.exp(min(loss / len(ids), 50)),  # exp overflows at 710
        "accuracy": correct / len(ids),
        "accuracy_without_unk": correct_known / max(1, (ids != vocabulary.unk).sum().item()),
    }
    return scores, world.sum(table)[:other].cpu()


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: list[Tensor],
    vocabulary: Vocabulary,
    length: int,
    seed: int,
    temperature: float = 0.8,
) -> list[list[int]]:
    """`length` sampled tokens behind each prompt; <unk> is never sampled."""
    model.eval()
    context = model.causal_mask.size(0)  # tokens that the model sees at most
    generator = torch.Generator().manual_seed(seed)
    continued = []
    for prompt in prompts:
        ids = [vocabulary.eos, *prompt.tolist()]
        for _ in range(length):
            tokens = torch.tensor([ids[-context:]])
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
            logits = model(tokens, attention_mask)[0, -1].float().cpu()  # (V,)
            logits[vocabulary.unk] = -math.inf
            probabilities = (logits / temperature).softmax(-1)
            ids.append(probabilities.multinomial(1, generator=generator).item())
        continued.append(ids[-length:])
    return continued


def confusion_figure(table: Tensor, names: list[str], note: str):
    """The table (K, K + 1) as a matplotlib figure: the share of each guess in its row."""
    from matplotlib.figure import Figure

    shares = table / table.sum(1, keepdim=True).clamp_min(1)
    style = dict(family=families("".join(names)), parse_math=False)
    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shares.numpy(), vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axes.set_xticks(range(len(names) + 1), [*names, "(other)"], rotation=60, **style)
    axes.set_yticks(range(len(names)), names, **style)
    axes.set_xlabel("likeliest token of the model")
    axes.set_ylabel("token in the test text")
    figure.colorbar(image, label="share of the row")
    if note:
        figure.supxlabel(note, fontsize=8, color="crimson")
    return figure
