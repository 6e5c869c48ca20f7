"""The baseline of the language model: interpolated Kneser–Ney trigrams on the same tokens.

python -m labs.wikitext.trigram --run runs/NAME      # on the text of a finished run

Same vocabulary, <unk>, <eos> behind every line and test tokens. The discount is chosen on the
validation text: nltk's default, 0.1, is far from the best.

nltk computes a probability by walking through all contexts of the training text: hours for a test
set. `Trigram` holds the same counts in sorted arrays; the tests compare it with nltk.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy import ndarray

from engine.config import flag, load_config, parse_flags
from engine.errors import UserError, run_script
from engine.files import atomic_write
from engine.run import find_run
from labs.wikitext.__main__ import Config as TextConfig
from labs.wikitext.text import Text, find_data, prepare

DISCOUNTS = (0.1, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
NLTK_DEFAULT = 0.1


@dataclass
class Config:
    """Every setting of this baseline."""

    run: str = flag("", "finished run of labs.wikitext, to compare with its score", "Text")


class Trigram:
    """The probabilities of nltk's `KneserNeyInterpolated(3, discount)`, from a text of ids.

    The text is counted as a ring, its last two tokens before its first. So every bigram has a
    predecessor, without which nltk's sum over the words that follow a token exceeds 1.
    """

    def __init__(self, ids: ndarray, vocabulary: int):
        self.vocabulary = vocabulary
        a, b, w = triples(ring(ids))
        # One entry per distinct trigram, and how often it occurs.
        self.trigrams, self.times = np.unique(self._key(self._key(a, b), w), return_counts=True)
        contexts, last = np.divmod(self.trigrams, vocabulary)
        middle = contexts % vocabulary
        # One entry per distinct context a b: different words after it, and occurrences.
        self.contexts, place = np.unique(contexts, return_inverse=True)
        self.context_words = np.bincount(place)
        self.context_times = np.bincount(place, self.times)
        # Continuation counts: how many different tokens stand before a bigram or a token.
        self.bigrams, self.predecessors = np.unique(self._key(middle, last), return_counts=True)
        first, second = np.divmod(self.bigrams, vocabulary)
        self.unigram = np.bincount(second, minlength=vocabulary) / len(self.bigrams)
        # Of each token: different words after it, and distinct trigrams with it in the middle.
        self.followers = np.bincount(first, minlength=vocabulary)
        self.middles = np.bincount(middle, minlength=vocabulary)

    def probabilities(self, a: ndarray, b: ndarray, w: ndarray, discount: float) -> ndarray:
        """p(w | a b) for three arrays of one length; an unseen context backs off to the shorter."""
        counts = lookup(self.bigrams, self.predecessors, self._key(b, w))
        p = interpolate(counts, self.middles[b], self.followers[b], self.unigram[w], discount)
        context = self._key(a, b)
        counts = lookup(self.trigrams, self.times, self._key(context, w))
        total = lookup(self.contexts, self.context_times, context)
        words = lookup(self.contexts, self.context_words, context)
        return interpolate(counts, total, words, p, discount)

    def loss(self, ids: ndarray, eos: int, discount: float) -> float:
        """Nats a token of another text; infinite if a token has no probability."""
        p = self.probabilities(*triples(np.concatenate([[eos, eos], ids])), discount)
        return -np.log(p).mean() if (p > 0).all() else math.inf

    def _key(self, left: ndarray, right: ndarray) -> ndarray:
        # Three ids of up to two million fit into 63 bits.
        return left * np.int64(self.vocabulary) + right


def interpolate(
    counts: ndarray, total: ndarray, words: ndarray, shorter: ndarray, discount: float
) -> ndarray:
    """(count − d) / total + d · words / total · shorter; `shorter` where total is 0.

    The discount d that is taken off each of a context's different `words` is shared out by the
    probability in the shorter context.
    """
    divisor = np.maximum(total, 1)
    kept = np.maximum(counts - discount, 0) / divisor
    freed = np.where(total > 0, discount * words / divisor, 1)
    return kept + freed * shorter


def ring(ids: ndarray) -> ndarray:
    """The last two ids once more before the first."""
    return np.concatenate([ids[-2:], ids]).astype(np.int64)


def triples(ids: ndarray) -> tuple[ndarray, ndarray, ndarray]:
    """Every token but the first two, w, with the two before it: a, b, w."""
    return ids[:-2], ids[1:-1], ids[2:]


def lookup(keys: ndarray, values: ndarray, wanted: ndarray) -> ndarray:
    """The values of the wanted keys, 0 for those that are not in the sorted `keys`."""
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def main(config: Config) -> None:
    """Count, choose the discount, score; the result goes to eval/trigram.json of the run."""
    run = find_run(config.run)
    if not (run / "eval/test.json").exists():
        raise UserError(
            f"--run {run}: no eval/test.json there; name a run of labs.wikitext that has ended"
        )
    text = read_text(run)
    ids = {split: row.numpy() for split, row in text.ids.items()}
    eos = text.vocabulary.eos
    trigram = Trigram(ids["train"], len(text.vocabulary.tokens))
    best = min(DISCOUNTS, key=lambda discount: trigram.loss(ids["validation"], eos, discount))
    names = {NLTK_DEFAULT: "nltk's default", best: "best on validation"}
    scores = json.loads((run / "eval/test.json").read_text(encoding="utf-8"))
    model = scores["perplexity"]
    print(f"{run}: test perplexity {model:.2f}")
    perplexities = {}
    for discount, name in names.items():
        loss = trigram.loss(ids["test"], eos, discount)
        if loss == math.inf:
            raise UserError(
                "some test tokens have probability 0, because the training text does not have "
                "them (<unk>, if no word is rare); train with a larger --min_count"
            )
        perplexities[discount] = math.exp(loss)
        print(
            f"Kneser–Ney trigram, discount {discount} ({name}): test perplexity "
            f"{perplexities[discount]:.2f}; the model's is {model / perplexities[discount]:.1%} "
            "of it"
        )
    result = {"perplexity_by_discount": perplexities, "best_discount": best, "model": model}
    atomic_write(run / "eval/trigram.json", json.dumps(result, indent=1) + "\n")


def read_text(run: Path) -> Text:
    """The tokenised text of a finished run."""
    settings = load_config(TextConfig, run / "config.json")
    data = find_data(settings.data)
    text = prepare(
        data, settings.split_ratios(), settings.vocab, settings.min_count, settings.lowercase
    )
    words = "\n".join(text.vocabulary.tokens) + "\n"
    if words != (run / "vocabulary.txt").read_text(encoding="utf-8"):
        raise UserError(
            f"--run {run}: the text at {data} now gives another vocabulary; put it back"
        )
    return text


if __name__ == "__main__":
    settings = parse_flags(Config, "Kneser–Ney trigrams on the text of a language model")
    run_script(lambda: main(settings))
