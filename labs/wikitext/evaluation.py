"""What a trained language model is worth: its scores, its confusion table and its samples.

B windows, S tokens in a window, V vocabulary, N tokens whose loss counts, T tokens of a text, K
tokens in the confusion table.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.distributed import World
from engine.files import as_json, atomic_write
from engine.meters import perplexity
from engine.run import Run
from labs.wikitext.model import LanguageModel, send
from labs.wikitext.sampler import gather_segments
from labs.wikitext.text import EOS, SAMPLE_NOTE, Text, Vocabulary
from tools.reporting.fonts import families

WINDOWS_AT_ONCE = 64  # rows of a batch that is scored
CONFUSED = 12  # tokens in the confusion table
SCORES = ("loss", "perplexity", "accuracy", "accuracy_without_unk")
SAMPLE_LENGTH = 40  # tokens
TOKENS_SHOWN = 160  # of the test text, in the picture of losses
LINE_LENGTH = 78  # characters in a line of that picture


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
def evaluate(model: LanguageModel, ids: Tensor, vocabulary: Vocabulary, world: World) -> dict:
    """Scores of a text of T tokens and its confusion table. In fp32; all ranks must call.

    loss: nats per token. accuracy: share of the tokens that were the likeliest; without <unk>, over
    the other tokens: with a small vocabulary, always guessing <unk> is often right. confusion: the
    K most frequent tokens of the text, and counts (K, K + 1): how often token i was to be predicted
    and j was the likeliest; the last column is any other token.
    """
    model.eval()
    device = world.device
    length = model.causal_mask.size(0)
    # Sums over the tokens: loss in nats, correct guesses, correct guesses of known words.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    frequent = most_frequent(ids)
    # A token's row and column in the table; K is any other token.
    other = len(frequent)
    column = torch.full((len(vocabulary.tokens),), other)  # of each token, in the table
    column[frequent] = torch.arange(other)
    column = column.to(device)
    table = torch.zeros(other + 1, other + 1, dtype=torch.int64, device=device)
    batches = torch.tensor(windows(len(ids), length)).split(WINDOWS_AT_ONCE)
    for batch in batches[world.rank :: world.size]:
        logits, truth = predictions(model, ids, vocabulary, batch)  # (N, V), (N,)
        guess = logits.argmax(-1)
        right = guess == truth
        loss = F.cross_entropy(logits, truth, reduction="none").double()
        sums += torch.stack([loss.sum(), right.sum(), (right & (truth != vocabulary.unk)).sum()])
        # Each pair (token, prediction) as one number, so that one call counts them all.
        pairs = column[truth] * (other + 1) + column[guess]
        table += pairs.bincount(minlength=table.numel()).view_as(table)

    loss, correct, correct_known = world.sum(sums).tolist()
    return {
        "loss": loss / len(ids),
        "perplexity": perplexity(loss / len(ids)),
        "accuracy": correct / len(ids),
        "accuracy_without_unk": correct_known / max(1, (ids != vocabulary.unk).sum().item()),
        "confusion": {
            "tokens": [vocabulary.tokens[id] for id in frequent.tolist()],
            "counts": world.sum(table)[:other].tolist(),
        },
    }


def predictions(
    model: LanguageModel, ids: Tensor, vocabulary: Vocabulary, batch: Tensor
) -> tuple[Tensor, Tensor]:
    """The logits (N, V), in fp32, and the tokens (N,) that B of the `windows` (B, 3) count."""
    length = model.causal_mask.size(0)
    first, first_counted, end = batch.unbind(1)  # (B,) each
    spans = list(zip(first.tolist(), end.tolist()))
    tokens, targets, attention_mask = gather_segments(ids, spans, vocabulary.eos, length)
    context = (first_counted - first).unsqueeze(1)  # (B, 1) tokens that only give context
    counted = attention_mask & (torch.arange(length) >= context)  # (B, S)
    logits = model(tokens, attention_mask, counted).float()
    return logits, send(targets[counted], logits.device)


@torch.no_grad()
def token_losses(model: LanguageModel, ids: Tensor, vocabulary: Vocabulary) -> list[float]:
    """The loss of each token of a text, in nats, with the context that `evaluate` gives it."""
    model.eval()
    batch = torch.tensor(windows(len(ids), model.causal_mask.size(0)))
    return F.cross_entropy(*predictions(model, ids, vocabulary, batch), reduction="none").tolist()


def most_frequent(ids: Tensor) -> Tensor:
    """The tokens of the confusion table, (K,)."""
    counts = ids.bincount()
    return counts.topk(min(CONFUSED, int((counts > 0).sum()))).indices


@torch.no_grad()
def generate(
    model: LanguageModel, prompts: list[Tensor], vocabulary: Vocabulary, length: int, seed: int
) -> list[list[int]]:
    """Up to `length` sampled tokens after each prompt; <eos> ends it, <unk> is never sampled."""
    model.eval()
    context = model.causal_mask.size(0)  # tokens that the model sees at most
    generator = torch.Generator().manual_seed(seed)
    temperature = 0.8  # below 1: likely tokens become likelier
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
            if ids[-1] == vocabulary.eos:
                break
        continued.append(ids[1 + len(prompt) :])
    return continued


def samples(model: LanguageModel, text: Text, prompt: str, seed: int) -> list[str]:
    """Three beginnings from the validation text, then the user's, with the model's continuations.

    A continuation ends with <eos>, which the model predicted, or is cut after SAMPLE_LENGTH tokens.
    """
    vocabulary, validation = text.vocabulary, text.ids["validation"]
    starts = range(0, len(validation), max(8, len(validation) // 3))
    prompts = [validation[first : first + 8] for first in starts][:3]
    if prompt:
        prompts.append(torch.tensor(vocabulary.encode(prompt), dtype=torch.int64))
    continued = generate(model, prompts, vocabulary, SAMPLE_LENGTH, seed)
    lines = []
    for prompt, ids in zip(prompts, continued):
        has_ended = ids[-1] == vocabulary.eos
        words = vocabulary.decode(ids[:-1] if has_ended else ids)
        end = EOS if has_ended else "…"
        lines.append(f"**{vocabulary.decode(prompt.tolist())}** {words} {end}")
    return lines


def write_result(run: Run, step: int, model: LanguageModel, text: Text, scores: dict) -> None:
    """The scores of the test text: to eval/test.json, two pictures beside it, TensorBoard, the log.

    Only rank 0 calls it.
    """
    score_list = ", ".join(f"{name.replace('_', ' ')} {scores[name]:.4f}" for name in SCORES)
    run.log(f"test: {score_list}")
    if not run.config.data:
        run.log(f"note: {SAMPLE_NOTE}")
    result = {
        **scores,
        "tokens": len(text.ids["test"]),
        "vocabulary": len(text.vocabulary.tokens),
        "data": run.config.data or SAMPLE_NOTE,
        "data_key": text.checksum(),
    }
    folder = run.folder / "eval"
    folder.mkdir(exist_ok=True)
    atomic_write(folder / "test.json", as_json(result))
    names, counts = scores["confusion"]["tokens"], scores["confusion"]["counts"]
    shown = text.ids["test"][:TOKENS_SHOWN]
    words = [text.vocabulary.tokens[id] for id in shown.tolist()]
    figures = {
        "confusion": confusion_figure(names, counts),
        "token-loss": token_loss_figure(words, token_losses(model, shown, text.vocabulary)),
    }
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=100)
        run.telemetry.figure(f"test/{name}", step, figure)
    for number, row in enumerate(counts):
        guess = [*names, "another token"][row.index(max(row))]
        run.log(
            f"confusion: {names[number]} occurs {sum(row):,} times; predicted correctly "
            f"{row[number]:,} times, most often predicted: {guess}"
        )
    results = {f"result/test_{name}": scores[name] for name in SCORES}
    run.telemetry.hyperparameters(run.config, results)


def confusion_figure(names: list[str], counts: list[list[int]]):
    """The table (K, K + 1) as a matplotlib figure: the share of each guess in its row."""
    from matplotlib.figure import Figure

    table = torch.tensor(counts)
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
    return figure


def token_loss_figure(words: list[str], losses: list[float]):
    """A text as a matplotlib figure: each word on a colour, the darker the larger its loss."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    colors = ScalarMappable(Normalize(0, 10), colormaps["Reds"])
    places = positions_in_lines(words)
    line_count = places[-1][0] + 1
    figure = Figure(figsize=(8, 0.5 + 0.26 * line_count), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(0, LINE_LENGTH), ylim=(line_count, -1))
    axes.axis("off")
    fonts = ["DejaVu Sans Mono", *families("".join(words))]
    style = dict(family=fonts, size=8, parse_math=False)
    for word, loss, (line, column) in zip(words, losses, places):
        box = dict(facecolor=colors.to_rgba(loss), edgecolor="none", pad=1.5)
        ink = "white" if loss > 6 else "black"
        axes.text(column, line, shown_word(word), color=ink, bbox=box, **style)
    figure.colorbar(colors, ax=axes, label="loss in nats", aspect=8)
    return figure


def shown_word(word: str) -> str:
    """A word in the picture of losses."""
    return "↵" if word == EOS else word


def positions_in_lines(words: list[str]) -> list[tuple[int, int]]:
    """(line, column) of each word where a text is set in lines; <eos> ends a line, too."""
    places = []
    line = column = 0
    for word in words:
        size = len(shown_word(word)) + 1
        if column + size > LINE_LENGTH and column > 0:
            line, column = line + 1, 0
        places.append((line, column))
        column += size
        if word == EOS:
            line, column = line + 1, 0
    return places
