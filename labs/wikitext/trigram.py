"""The baseline of the language model: interpolated Kneser–Ney trigrams on the same tokens.

python -m labs.wikitext.trigram NAME      # on the text of a finished run; default: the newest

Same vocabulary, <unk>, <eos> after every line and test tokens. The discount is chosen on the
validation text: nltk's default, 0.1, is far from the best.

nltk computes a probability by walking through all contexts of the training text: hours for a test
set. `Trigram` looks the same counts up in tables; the tests compare it with nltk.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config import flag, load_config, parse_flags
from engine.errors import UserError, run_script
from engine.run import find_run
from labs.wikitext.__main__ import Config as TextConfig
from labs.wikitext.text import VOCABULARY, find_data, prepare, run_of

DISCOUNTS = (0.1, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
NLTK_DEFAULT = 0.1


@dataclass
class Config:
    """Every setting of this baseline."""

    ckpt: str = flag(
        "", "finished run of labs.wikitext; default: the newest", "Text", first_word=True
    )


class Trigram:
    """The probabilities of nltk's `KneserNeyInterpolated(3, discount)`, from a text of ids.

    The text is counted as a ring, its last two tokens before its first. So every bigram has a
    predecessor, without which nltk's sum over the words that follow a token exceeds 1.
    """

    def __init__(self, ids: Sequence[int]):
        ring = [*ids[-2:], *ids]
        self.trigrams = Counter(zip(ring, ring[1:], ring[2:]))
        # Of a context (a, b): how often a word follows it, and how many different words do.
        self.context_times: Counter = Counter()
        self.context_words: Counter = Counter()
        # Of a bigram (b, w): how many different tokens stand before it.
        self.predecessors: Counter = Counter()
        # Of a token: in how many different trigrams it is the middle.
        self.middles: Counter = Counter()
        for (a, b, w), times in self.trigrams.items():
            self.context_times[a, b] += times
            self.context_words[a, b] += 1
            self.predecessors[b, w] += 1
            self.middles[b] += 1
        # Of a token: how many different tokens stand before and after it.
        self.before = Counter(w for _, w in self.predecessors)
        self.after = Counter(b for b, _ in self.predecessors)

    def probability(self, a: int, b: int, w: int, discount: float) -> float:
        """p(w | a b)."""
        unigram = self.before[w] / len(self.predecessors)
        bigram = interpolate(
            self.predecessors[b, w], self.middles[b], self.after[b], unigram, discount
        )
        times, words = self.context_times[a, b], self.context_words[a, b]
        return interpolate(self.trigrams[a, b, w], times, words, bigram, discount)

    def loss(self, ids: Sequence[int], eos: int, discount: float) -> float:
        """Nats per token of another text; infinite if a token has no probability."""
        context = [eos, eos, *ids]
        total = 0.0
        for a, b, w in zip(context, context[1:], ids):
            p = self.probability(a, b, w, discount)
            if p == 0:
                return math.inf
            total -= math.log(p)
        return total / len(ids)


def interpolate(count: int, total: int, words: int, shorter: float, discount: float) -> float:
    """(count − d) / total + d · words / total · shorter; `shorter` for an unseen context.

    The discount d that is taken off each of a context's different `words` is shared out by the
    probability in the shorter context.
    """
    if total == 0:
        return shorter
    return max(count - discount, 0) / total + discount * words / total * shorter


def read_scores(run: Path) -> tuple[int, float]:
    """The checksum of the text that a run was tested on, and its test perplexity."""
    file = run / "eval/test.json"
    if not file.exists():
        raise UserError(
            f"{run}: no eval/test.json there; name a run of labs.wikitext that has ended"
        )
    try:
        scores = json.loads(file.read_text(encoding="utf-8"))
        return scores["data_key"], scores["perplexity"]
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{file} is damaged; `--resume` the run, which tests it again") from None


def newest_run() -> Path:
    """The finished run of this lab in runs/ that was tested last."""
    tested = [
        file
        for file in Path("runs").glob("*/eval/test.json")
        if (file.parents[1] / VOCABULARY).exists()
    ]
    if not tested:
        raise UserError("no finished run of labs.wikitext in runs/; name one: --ckpt PATH/NAME")
    return max(tested, key=lambda file: file.stat().st_mtime).parents[1]


def best_discount(trigram: Trigram, validation: Sequence[int], eos: int) -> float:
    """The discount with the lowest loss on the validation text."""
    return min(DISCOUNTS, key=lambda discount: trigram.loss(validation, eos, discount))


def main(config: Config) -> None:
    """Count, choose the discount on the validation text, print the test perplexities."""
    run = run_of(find_run(config.ckpt)) if config.ckpt else newest_run()
    data_key, perplexity = read_scores(run)
    settings = load_config(TextConfig, run / "config.json")
    text = prepare(
        find_data(settings.data),
        settings.split_ratios(),
        settings.vocab_size,
        settings.min_count,
        settings.lowercase,
        run,
    )
    text.check(run, data_key)
    train, validation, test = (
        text.ids[split].tolist() for split in ("train", "validation", "test")
    )
    eos = text.vocabulary.eos
    trigram = Trigram(train)
    best = best_discount(trigram, validation, eos)
    print(f"{run}: test perplexity {perplexity:.2f}")
    for discount, name in ((NLTK_DEFAULT, "nltk's default"), (best, "best on validation")):
        loss = trigram.loss(test, eos, discount)
        if loss == math.inf:
            raise UserError(
                "some test tokens have probability 0, because the training text does not have "
                "them (<unk>, if no word is rare); train with a larger --min_count"
            )
        print(
            f"Kneser–Ney trigram, discount {discount} ({name}): test perplexity "
            f"{math.exp(loss):.2f}; the model's is {perplexity / math.exp(loss):.1%} of it"
        )


if __name__ == "__main__":
    settings = parse_flags(Config, "Kneser–Ney trigrams on the text of a language model")
    run_script(lambda: main(settings))
