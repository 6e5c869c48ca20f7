"""What the language model of `labs/wikitext.py` has to beat: nltk's interpolated Kneser–Ney trigram on the same tokens.

    python -m benchmarks.trigram --data wikitext-2             # the trigram alone
    python -m benchmarks.trigram --run runs/NAME               # on the text and vocabulary of a finished run, beside its score

Same vocabulary, same <unk>, same <eos> behind every line, same test tokens; every probability is normalised over the whole
vocabulary, which is checked. The discount is chosen on the validation text: nltk's default, 0.1, is far from the best.

nltk computes a probability by walking through all contexts of the training text: hours for a test set. `Trigram` holds the
same counts in sorted arrays; a sample of its probabilities is compared with nltk's own.
"""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script

DISCOUNTS = (0.1, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
NLTK_DEFAULT = 0.1
SUMMED = 500  # contexts whose probabilities are added up


@dataclass
class Config:
    """Every setting of this benchmark."""

    data: str = flag("", "as in labs.wikitext", "Text")
    ratios: str = flag("0.8,0.1,0.1", "as in labs.wikitext", "Text")
    vocab: int = flag(0, "as in labs.wikitext", "Text")
    min_count: int = flag(3, "as in labs.wikitext", "Text")
    run: str = flag("", "finished run of labs.wikitext: its text and vocabulary, its score beside", "Text")
    compare: int = flag(100, "test tokens on which nltk itself is asked, 0.1 s each", "How")
    out: str = flag("runs/benchmarks/trigram.json", "where the figures go", "How")

    def __post_init__(self):
        if self.compare < 0:
            raise UserError(f"--compare {self.compare} must be at least 0")


class Trigram:
    """Counts of a text of ids below `vocabulary`, and nltk's `KneserNeyInterpolated(3, discount)` from them.

    The text is counted as a ring, its last two tokens before its first. So every bigram has a predecessor, without which
    nltk's sum over the words that follow a token would be a little over 1.
    """

    def __init__(self, ids: np.ndarray, vocabulary: int):
        self.vocabulary = vocabulary
        a, b, w = triples(ring(ids))
        self.trigrams, self.times = np.unique(self._key(self._key(a, b), w), return_counts=True)
        contexts, last = np.divmod(self.trigrams, vocabulary)  # one entry a distinct trigram
        middle = contexts % vocabulary
        self.contexts, place, self.followers = np.unique(contexts, return_inverse=True, return_counts=True)
        self.context_times = np.bincount(place, self.times)
        # Continuation counts: how many different tokens stand before a bigram, and before a token.
        self.bigrams, self.predecessors = np.unique(self._key(middle, last), return_counts=True)
        first, second = np.divmod(self.bigrams, vocabulary)
        self.middles = np.bincount(middle, minlength=vocabulary)  # distinct trigrams with this token in the middle
        self.bigram_followers = np.bincount(first, minlength=vocabulary)
        self.unigram = np.bincount(second, minlength=vocabulary) / len(self.bigrams)

    def probabilities(self, a: np.ndarray, b: np.ndarray, w: np.ndarray, discount: float) -> np.ndarray:
        """p(w | a b) for three arrays of one length; a context that the text does not have leaves it to the shorter one."""
        middles = np.maximum(self.middles[b], 1)
        seen = self.middles[b] > 0
        p = (
            np.maximum(lookup(self.bigrams, self.predecessors, self._key(b, w)) - discount, 0) / middles
            + np.where(seen, discount * self.bigram_followers[b] / middles, 1) * self.unigram[w]
        )
        context = self._key(a, b)
        times = lookup(self.contexts, self.context_times, context)
        followers = lookup(self.contexts, self.followers, context)
        alpha = np.maximum(lookup(self.trigrams, self.times, self._key(context, w)) - discount, 0) / np.maximum(
            times, 1
        )
        gamma = np.where(times > 0, discount * followers / np.maximum(times, 1), 1)
        return alpha + gamma * p

    def loss(self, ids: np.ndarray, eos: int, discount: float) -> float:
        """Nats a token of another text; infinite if a token has no probability."""
        p = self.probabilities(*triples(np.concatenate([[eos, eos], ids])), discount)
        return -np.log(p).mean() if (p > 0).all() else math.inf

    def sum_of(self, a: int, b: int, discount: float) -> float:
        """Σ_w p(w | a b): 1 if all is right."""
        words = np.arange(self.vocabulary)
        return self.probabilities(np.full_like(words, a), np.full_like(words, b), words, discount).sum()

    def _key(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return left * np.int64(self.vocabulary) + right  # three ids of up to two million fit into 63 bits


def ring(ids: np.ndarray) -> np.ndarray:
    """The last two ids once more before the first."""
    return np.concatenate([ids[-2:], ids]).astype(np.int64)


def triples(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every token but the first two, w, with the two before it: a, b, w."""
    return ids[:-2], ids[1:-1], ids[2:]


def lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of the wanted keys, 0 for those that are not among the sorted `keys`."""
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def nltk_model(ids: np.ndarray, discount: float):
    """nltk's own model of the same ring of ids, each id a word."""
    from nltk.lm import KneserNeyInterpolated
    from nltk.util import everygrams

    words = [str(id) for id in ring(ids)]
    model = KneserNeyInterpolated(3, discount=discount)
    model.fit([everygrams(words, max_len=3)], vocabulary_text=words)
    return model


def largest_difference(trigram: Trigram, train: np.ndarray, test: np.ndarray, discount: float, count: int) -> float:
    """The largest |log p| apart from nltk over `count` test tokens, drawn with a fixed seed."""
    if not count:
        return 0.0
    model, places = nltk_model(train, discount), random.Random(0).sample(range(2, len(test)), min(count, len(test) - 2))
    apart = []
    for place in places:
        a, b, w = (int(id) for id in test[place - 2 : place + 1])
        ours = trigram.probabilities(*(np.array([id]) for id in (a, b, w)), discount)[0]
        apart.append(abs(math.log(ours) - math.log(model.score(str(w), (str(a), str(b))))))
    return max(apart)


def main(config: Config) -> None:
    """Count, choose the discount, check, score, write."""
    text = read_text(config)
    for line in text.notes:
        print(line)
    ids = {split: row.numpy() for split, row in text.ids.items()}
    vocabulary = text.vocabulary
    trigram = Trigram(ids["train"], len(vocabulary.tokens))
    validation = {discount: trigram.loss(ids["validation"], vocabulary.eos, discount) for discount in DISCOUNTS}
    for discount, loss in validation.items():
        print(f"discount {discount:<4}  validation perplexity {math.exp(loss):.2f}")
    best = min(validation, key=validation.get)
    losses = {discount: trigram.loss(ids["test"], vocabulary.eos, discount) for discount in (NLTK_DEFAULT, best)}
    if math.inf in losses.values():
        raise UserError("some test tokens have probability 0, for the training text does not have them (<unk> is one if "
                        "no word is rare); give a larger --min_count")  # fmt: skip

    a, b, _ = triples(ids["test"])
    places = random.Random(0).sample(range(len(a)), min(SUMMED, len(a)))
    off = max(abs(trigram.sum_of(a[place], b[place], best) - 1) for place in places)
    apart = largest_difference(trigram, ids["train"], ids["test"], best, config.compare)
    unseen = (lookup(trigram.contexts, trigram.context_times, a * len(vocabulary.tokens) + b) == 0).mean()
    print(f"check: probabilities of all words add up to 1 within {off:.1e} in {len(places)} test contexts, "
          f"{unseen:.0%} of which training never had; log p is nltk's within {apart:.1e} ({config.compare} tokens)")  # fmt: skip
    for discount, loss in losses.items():
        name = "nltk's default" if discount == NLTK_DEFAULT else "best on validation"
        print(f"Kneser–Ney trigram, discount {discount} ({name}): test perplexity {math.exp(loss):.2f}")
    figures = {"tokens": len(ids["test"]), "vocabulary": len(vocabulary.tokens), "discount": best}
    figures |= {"perplexity": math.exp(losses[best]), "perplexity_at_default": math.exp(losses[NLTK_DEFAULT])}
    if config.run:
        figures["model"] = score_of(Path(config.run), len(ids["test"]))
        print(f"{config.run}: test perplexity {figures['model']:.2f}, {figures['model'] / figures['perplexity']:.1%} "
              "of the trigram's")  # fmt: skip
    Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    Path(config.out).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def read_text(config: Config):
    """The tokenised text, by the flags or as a run has it."""
    from labs.wikitext_text import prepare

    settings = {name: getattr(config, name) for name in ("data", "ratios", "vocab", "min_count")} | {"tokens": "words"}
    if config.run:
        path = Path(config.run) / "config.json"
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"--run {config.run}: no readable config.json there; name a run of labs.wikitext") from None
    try:
        ratios = tuple(map(float, settings["ratios"].split(",")))
        text = prepare(settings["data"], ratios, settings["tokens"], settings["vocab"], settings["min_count"])
    except KeyError as error:
        raise UserError(f"--run {config.run}: its config.json has no {error}; name a run of labs.wikitext") from None
    except ValueError:
        raise UserError(f"--ratios {settings['ratios']}: give three numbers like 0.8,0.1,0.1") from None
    if config.run and "\n".join(text.vocabulary.tokens) + "\n" != vocabulary_of(Path(config.run)):
        raise UserError(
            f"--run {config.run}: the text at {settings['data']} gives another vocabulary by now; put it back"
        )
    return text


def vocabulary_of(run: Path) -> str:
    """The tokens of a run, one a line."""
    path = run / "vocabulary.txt"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def score_of(run: Path, tokens: int) -> float:
    """The test perplexity that a run wrote down, for as many test tokens."""
    path = run / "test.json"
    if not path.exists():
        raise UserError(f"--run {run}: no test.json in it yet; let the run end first")
    scores = json.loads(path.read_text(encoding="utf-8"))
    if scores["tokens"] != tokens:
        raise UserError(f"--run {run}: it was tested on {scores['tokens']} tokens, not on these {tokens}")
    return scores["perplexity"]


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "a Kneser–Ney trigram on the text of the language model")))
