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
from labs.wikitext.text import SAMPLE_NOTE, Text, Vocabulary
from tools.reporting.fonts import families

WINDOWS_AT_ONCE = 64  # rows of a batch that is scored
CONFUSED = 12  # tokens in the confusion table
SCORES = ("loss", "perplexity", "accuracy", "accuracy_without_unk")
SAMPLE_LENGTH = 40  # tokens


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
        first, first_counted, end = batch.unbind(1)  # (B,) each
        spans = list(zip(first.tolist(), end.tolist()))
        tokens, targets, attention_mask = gather_segments(ids, spans, vocabulary.eos, length)
        context = (first_counted - first).unsqueeze(1)  # (B, 1) tokens that only give context
        counted = attention_mask & (torch.arange(length) >= context)  # (B, S)
        logits = model(tokens, attention_mask, counted).float()  # (N, V)
        truth = send(targets[counted], device)  # (N,)
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


def most_frequent(ids: Tensor) -> Tensor:
    """The tokens of the confusion table, (K,)."""
    counts = ids.bincount()
    return counts.topk(min(CONFUSED, int((counts > 0).sum()))).indices


@torch.no_grad()
def generate(
    model: LanguageModel, prompts: list[Tensor], vocabulary: Vocabulary, length: int, seed: int
) -> list[list[int]]:
    """`length` sampled tokens after each prompt; <unk> is never sampled."""
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
        continued.append(ids[-length:])
    return continued


def samples(model: LanguageModel, text: Text, prompt: str, seed: int) -> list[str]:
    """Three beginnings from the validation text, and the user's, with the model's continuations."""
    vocabulary, validation = text.vocabulary, text.ids["validation"]
    starts = range(0, len(validation), max(8, len(validation) // 3))
    prompts = [validation[first : first + 8] for first in starts][:3]
    if prompt:
        prompts.insert(0, torch.tensor(vocabulary.encode(prompt), dtype=torch.int64))
    continued = generate(model, prompts, vocabulary, SAMPLE_LENGTH, seed)
    return [
        f"**{vocabulary.decode(prompt.tolist())}** {vocabulary.decode(words)}"
        for prompt, words in zip(prompts, continued)
    ]


def write_result(run: Run, step: int, text: Text, scores: dict) -> None:
    """The scores of the test text: to eval/test.json, the picture beside it, TensorBoard, the log.

    Only rank 0 calls it.
    """
    figures = ", ".join(f"{name.replace('_', ' ')} {scores[name]:.4f}" for name in SCORES)
    run.log(f"test: {figures}")
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
    figure = confusion_figure(names, counts)
    figure.savefig(folder / "confusion.png", dpi=100)
    run.telemetry.figure("test/confusion", step, figure)
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
