"""labs/wikitext/trigram.py: the same formula as nltk's, normalised, on the same tokens as the language model."""

import json
import math
from collections import Counter
from dataclasses import asdict
from itertools import product

import numpy as np
import pytest
from helpers import refused
from nltk.lm import KneserNeyInterpolated
from nltk.util import everygrams

from labs.wikitext import trigram as benchmark
from labs.wikitext.__main__ import Config as TextConfig
from labs.wikitext.trigram import Config, Trigram, main, ring


def text(count: int, seed: int) -> np.ndarray:
    """Ids 0 to 6 with some structure; 6 only at the end, so that most contexts with it are unseen."""
    draw = np.random.default_rng(seed)
    ids = [0]
    while len(ids) < count:
        ids.append(int((ids[-1] * 2 + draw.integers(3)) % 6))
    return np.array([*ids[:-1], 6])


def nltk_model(ids: np.ndarray, discount: float) -> KneserNeyInterpolated:
    """nltk's own model of the same ring of ids, each id a word."""
    words = [str(id) for id in ring(ids)]
    model = KneserNeyInterpolated(3, discount=discount)
    model.fit([everygrams(words, max_len=3)], vocabulary_text=words)
    return model


def of_all_words(model: Trigram, a: int, b: int, discounts) -> np.ndarray:
    """p(w, a, b) of the 7 words w."""
    return model.probabilities(np.full(7, a), np.full(7, b), np.arange(7), discounts)


@pytest.mark.parametrize("discount", [0.1, 0.75, 1.0])
def test_every_probability_is_nltks_and_they_add_up_to_one(discount):
    ids = text(60, 1)
    ours, nltks = Trigram(ids, 7), nltk_model(ids, discount)
    unseen = 0
    for a, b in product(range(7), repeat=2):
        expected = [nltks.score(str(w), (str(a), str(b))) for w in range(7)]
        assert of_all_words(ours, a, b, discount) == pytest.approx(expected, abs=1e-14)
        assert ours.sum_of(a, b, discount) == pytest.approx(1, abs=1e-12)
        unseen += not nltks.counts[(str(a), str(b))].N()
    assert 0 < unseen < 49


def modified_kneser_ney(ids: np.ndarray):
    """p(w, a, b) by walking through all the counts; what `Trigram` does with sorted arrays."""
    words = [int(id) for id in ring(ids)]
    trigrams = Counter(zip(words, words[1:], words[2:]))
    bigrams = Counter(
        (b, w) for _, b, w in trigrams
    )  # by how many different tokens stand before them
    unigrams = Counter(w for _, w in bigrams)

    def level(counts: Counter, gram: tuple, shorter: float) -> float:
        n = Counter(counts.values())
        y = n[1] / (n[1] + 2 * n[2])
        discount = {k: max(0.0, k - (k + 1) * y * n[k + 1] / n[k]) for k in (1, 2, 3)}
        same = [count for other, count in counts.items() if other[:-1] == gram[:-1]]
        if not same:
            return shorter
        kept = counts[gram] - discount[min(counts[gram], 3)] if counts[gram] else 0
        return (kept + sum(discount[min(count, 3)] for count in same) * shorter) / sum(same)

    return lambda w, a, b: level(
        trigrams, (a, b, w), level(bigrams, (b, w), unigrams[w] / len(bigrams))
    )


def test_modified_kneser_ney_is_that_of_a_plain_loop_and_adds_up_to_one():
    ids = text(60, 1)
    ours, plain = Trigram(ids, 7), modified_kneser_ney(ids)
    discounts = ours.chen_goodman()
    assert len(set(discounts.flatten())) == 6
    for a, b in product(range(7), repeat=2):
        p = of_all_words(ours, a, b, discounts)
        assert p == pytest.approx([plain(w, a, b) for w in range(7)], abs=1e-14)
        assert p.sum() == pytest.approx(1, abs=1e-12)
    assert Trigram(np.array([0, 1, 2, 3]), 4).chen_goodman() is None  # no trigram is counted twice


def test_the_loss_is_that_of_a_plain_loop_over_nltk():
    train, test = text(200, 1), text(50, 2)
    nltks, history, total = nltk_model(train, 0.6), ["3", "3"], 0.0
    for id in map(str, test):
        total -= math.log(nltks.score(id, tuple(history[-2:])))
        history.append(id)
    assert Trigram(train, 7).loss(test, eos=3, discount=0.6) == pytest.approx(total / 50)


def test_a_text_is_scored_alone_and_beside_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = []
    for n in range(250):
        verb, month = "sailed" if n % 3 else "sank", "may" if n % 2 else "june"
        lines.append(f"the ship {verb} in {month} {n if n % 10 == 0 else n // 3}")
    (tmp_path / "a.txt").write_text("\n".join(lines) + "\n")
    main(Config(data="a.txt", min_count=2))
    alone = json.loads((tmp_path / "runs/trigram.json").read_text())
    default, best, *_ = alone["perplexity"].values()
    assert alone["tokens"] == 175 and 1 < best <= default
    assert "add up to 1 within" in capsys.readouterr().out

    run = tmp_path / "run"
    (run / "eval").mkdir(parents=True)
    settings = asdict(TextConfig(data="a.txt", min_count=2))
    (run / "config.json").write_text(json.dumps(settings))
    text, _ = benchmark.read_text(Config(data="a.txt", min_count=2))
    (run / "vocabulary.txt").write_text("\n".join(text.vocabulary.tokens) + "\n")
    (run / "eval/test.json").write_text(json.dumps({"perplexity": 3.5}))
    main(Config(run=str(run)))
    assert json.loads((run / "eval/trigram.json").read_text()) == alone | {"model": 3.5}
    (run / "vocabulary.txt").write_text("other\n")
    with refused("another vocabulary"):
        main(Config(run=str(run)))


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(run="nowhere"), "no eval/test.json there"),
        (dict(data="nowhere"), "no such file"),
        (dict(data="a.txt", min_count=1), "probability 0"),
    ],
)
def test_mistakes_are_named_in_one_line(tmp_path, monkeypatch, settings, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("".join(f"a b c word{number}\n" for number in range(50)))
    with refused(message):
        main(Config(**settings))
