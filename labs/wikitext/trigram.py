"""The baseline of the language model: interpolated Kneser–Ney trigrams on the same tokens.

python -m labs.wikitext.trigram --data wikitext-2    # the trigrams alone
python -m labs.wikitext.trigram --run runs/NAME      # on the text of a run, beside its score

Same vocabulary, <unk>, <eos> behind every line and test tokens; every probability is normalised
over the whole vocabulary, which is checked. nltk's trigram has one discount, which is chosen on the
validation text: nltk's default, 0.1, is far from the best. The modified one (Chen and Goodman 1999)
has six, by a formula from the counts, and nothing is chosen.

nltk computes a probability by walking through all contexts of the training text: hours for a test
set. `Trigram` holds the same counts in sorted arrays; the tests compare it with nltk.
"""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.config import flag, load_config, parse_flags
from engine.errors import UserError, run_script
from engine.files import atomic_write
from labs.wikitext.__main__ import Config as TextConfig
from labs.wikitext.text import SAMPLE_NOTE, Text, find_data, prepare

DISCOUNTS = (0.1, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
NLTK_DEFAULT = 0.1
CHECKED = 500  # contexts whose probabilities are added up


@dataclass
class Config:
    """Every setting of this baseline."""

    data: str = flag("", "as in labs.wikitext", "Text")
    min_count: int = flag(3, "as in labs.wikitext", "Text", min=1)
    run: str = flag("", "finished run of labs.wikitext, to compare with its score", "Text")


class Trigram:
    """Kneser–Ney's probabilities, plain or modified, from the counts of a text of ids.

    `discount`, in all methods: one number d, for nltk's `KneserNeyInterpolated(3, d)`; or (2, 3),
    what is taken off bigrams and trigrams that are counted once, twice, more often.

    The text is counted as a ring, its last two tokens before its first. So every bigram has a
    predecessor, without which nltk's sum over the words that follow a token exceeds 1.
    """

    def __init__(self, ids: np.ndarray, vocabulary: int):
        self.vocabulary = vocabulary
        a, b, w = triples(ring(ids))
        self.trigrams, self.times = np.unique(self._key(self._key(a, b), w), return_counts=True)
        # One entry per distinct trigram.
        contexts, last = np.divmod(self.trigrams, vocabulary)
        middle = contexts % vocabulary
        # place: the context of each trigram.
        self.contexts, self.place = np.unique(contexts, return_inverse=True)
        self.context_times = np.bincount(self.place, self.times)
        # Continuation counts: how many different tokens stand before a bigram or a token.
        self.bigrams, self.predecessors = np.unique(self._key(middle, last), return_counts=True)
        self.first, second = np.divmod(self.bigrams, vocabulary)
        # Distinct trigrams with this token in the middle.
        self.middles = np.bincount(middle, minlength=vocabulary)
        self.unigram = np.bincount(second, minlength=vocabulary) / len(self.bigrams)

    def probabilities(self, a: np.ndarray, b: np.ndarray, w: np.ndarray, discount) -> np.ndarray:
        """p(w | a b) for three arrays of one length; an unseen context backs off to the shorter."""
        of_bigrams, of_trigrams = np.broadcast_to(discount, (2, 3))
        counts = lookup(self.bigrams, self.predecessors, self._key(b, w))
        freed = np.bincount(
            self.first, taken_off(self.predecessors, of_bigrams), minlength=self.vocabulary
        )
        p = interpolate(counts, of_bigrams, self.middles[b], freed[b], self.unigram[w])
        context = self._key(a, b)
        counts = lookup(self.trigrams, self.times, self._key(context, w))
        total = lookup(self.contexts, self.context_times, context)
        freed = np.bincount(self.place, taken_off(self.times, of_trigrams))
        return interpolate(counts, of_trigrams, total, lookup(self.contexts, freed, context), p)

    def chen_goodman(self) -> np.ndarray | None:
        """The six discounts of modified Kneser–Ney, (2, 3); None if too few n-grams are rare.

        D_k = k − (k + 1) · Y · n_{k+1} / n_k,  Y = n_1 / (n_1 + 2 n_2)
        n_k: how many n-grams are counted k times (Chen and Goodman 1999, equation 26).
        """
        discounts = np.empty((2, 3))
        for row, counts in enumerate((self.predecessors, self.times)):
            n = np.bincount(counts, minlength=5)[:5].astype(float)
            if not n[1:4].all():
                return None
            y = n[1] / (n[1] + 2 * n[2])
            discounts[row] = [k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3)]
        return discounts.clip(min=0)

    def loss(self, ids: np.ndarray, eos: int, discount) -> float:
        """Nats a token of another text; infinite if a token has no probability."""
        p = self.probabilities(*triples(np.concatenate([[eos, eos], ids])), discount)
        return -np.log(p).mean() if (p > 0).all() else math.inf

    def sum_of(self, a: int, b: int, discount) -> float:
        """Σ_w p(w | a b): 1 if all is right."""
        words = np.arange(self.vocabulary)
        return self.probabilities(
            np.full_like(words, a), np.full_like(words, b), words, discount
        ).sum()

    def _key(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        # Three ids of up to two million fit into 63 bits.
        return left * np.int64(self.vocabulary) + right


def taken_off(counts: np.ndarray, discounts: np.ndarray) -> np.ndarray:
    """The discount of each count: of 0 nothing, of 1, 2 and more discounts[0], [1] and [2]."""
    return np.concatenate([[0.0], discounts])[np.minimum(counts, 3)]


def interpolate(counts, discounts, total, freed, shorter) -> np.ndarray:
    """Discounted counts as shares of their context's `total`; what that freed is shared out by
    `shorter`, p in the shorter context.
    """
    divisor = np.maximum(total, 1)  # total is 0 for a context that the text does not have
    freed_share = np.where(total > 0, freed / divisor, 1)
    return (counts - taken_off(counts, discounts)) / divisor + freed_share * shorter


def ring(ids: np.ndarray) -> np.ndarray:
    """The last two ids once more before the first."""
    return np.concatenate([ids[-2:], ids]).astype(np.int64)


def triples(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every token but the first two, w, with the two before it: a, b, w."""
    return ids[:-2], ids[1:-1], ids[2:]


def lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of the wanted keys, 0 for those that are not in the sorted `keys`."""
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def main(config: Config) -> None:
    """Count, choose the discount, check, score, write."""
    text, settings = read_text(config)
    ids = {split: row.numpy() for split, row in text.ids.items()}
    size, eos = len(text.vocabulary.tokens), text.vocabulary.eos
    trigram = Trigram(ids["train"], size)
    best = min(DISCOUNTS, key=lambda discount: trigram.loss(ids["validation"], eos, discount))
    models = {
        f"discount {NLTK_DEFAULT} (nltk's default)": NLTK_DEFAULT,
        f"discount {best} (best on validation)": best,
    }
    modified = trigram.chen_goodman()
    if modified is not None:
        models["modified"] = modified
    perplexities = {}
    for name, discount in models.items():
        perplexities[name] = math.exp(trigram.loss(ids["test"], eos, discount))
    if math.inf in perplexities.values():
        raise UserError(
            "some test tokens have probability 0, because the training text does not have them "
            "(<unk>, if no word is rare); give a larger --min_count"
        )
    check_sums(trigram, ids["test"], list(models.values()))

    result = {"tokens": len(ids["test"]), "vocabulary": size, "perplexity": perplexities}
    result["data"] = SAMPLE_NOTE if text.sample else settings.data
    model_perplexity = None
    out = Path("runs/trigram.json")
    if config.run:
        out = Path(config.run) / "eval" / "trigram.json"
        scores = json.loads(out.with_name("test.json").read_text(encoding="utf-8"))
        model_perplexity = scores["perplexity"]
        result["model"] = model_perplexity
        print(f"{config.run}: test perplexity {model_perplexity:.2f}")
    for name, perplexity in perplexities.items():
        line = f"Kneser–Ney trigram, {name}: test perplexity {perplexity:.2f}"
        if model_perplexity:
            line += f"; the model's is {model_perplexity / perplexity:.1%} of it"
        print(line)
    out.parent.mkdir(exist_ok=True)
    atomic_write(out, json.dumps(result, ensure_ascii=False, indent=1) + "\n")


def check_sums(trigram: Trigram, ids: np.ndarray, discounts: list) -> None:
    """Print how far the probabilities over the vocabulary are from adding up to 1."""
    a, b, _ = triples(ids)
    places = random.Random(0).sample(range(len(a)), min(CHECKED, len(a)))
    sums = [trigram.sum_of(a[n], b[n], discount) for discount in discounts for n in places]
    error = max(abs(total - 1) for total in sums)
    print(f"probabilities add up to 1 within {error:.1e} in {len(places)} test contexts")


def read_text(config: Config) -> tuple[Text, TextConfig]:
    """The tokenised text, by the flags or as a finished run has it, and its settings."""
    settings = TextConfig(data=config.data, min_count=config.min_count)
    run = Path(config.run)
    if config.run:
        if not (run / "eval/test.json").exists():
            raise UserError(
                f"--run {run}: no eval/test.json there; name a run of labs.wikitext that has ended"
            )
        settings = load_config(TextConfig, run / "config.json")
    settings.data = find_data(settings.data)
    text = prepare(
        settings.data,
        settings.split_ratios(),
        settings.vocab,
        settings.min_count,
        settings.lowercase,
    )
    words = "\n".join(text.vocabulary.tokens) + "\n"
    if config.run and words != (run / "vocabulary.txt").read_text(encoding="utf-8"):
        raise UserError(
            f"--run {run}: the text at {settings.data} now gives another vocabulary; put it back"
        )
    for line in text.notes:
        print(line)
    return text, settings


if __name__ == "__main__":
    run_script(
        lambda: main(parse_flags(Config, "Kneser–Ney trigrams on the text of the language model"))
    )
