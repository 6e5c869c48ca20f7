"""labs/wikitext/trigram.py: nltk's probabilities, on the same tokens as the language model."""

import json
import math
import os
import random
import re
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest
from helpers import refused
from nltk.lm import KneserNeyInterpolated
from nltk.util import everygrams

from labs.wikitext.__main__ import Config as TextConfig
from labs.wikitext.text import prepare
from labs.wikitext.trigram import DISCOUNTS, Config, Trigram, main


def text(count: int, seed: int) -> list[int]:
    """Ids 0 to 6 with some structure; 6 only at the end: most contexts with it are unseen."""
    draw = random.Random(seed)
    ids = [0]
    while len(ids) < count:
        ids.append((ids[-1] * 2 + draw.randrange(3)) % 6)
    return [*ids[:-1], 6]


def nltk_model(ids: list[int], discount: float) -> KneserNeyInterpolated:
    """nltk's own model of the same ring of ids, each id a word."""
    words = [str(id) for id in [*ids[-2:], *ids]]
    model = KneserNeyInterpolated(3, discount=discount)
    model.fit([everygrams(words, max_len=3)], vocabulary_text=words)
    return model


@pytest.mark.parametrize("discount", [0.1, 0.75, 1.0])
def test_every_probability_is_nltks_and_they_add_up_to_one(discount):
    ids = text(60, 1)
    ours, nltks = Trigram(ids), nltk_model(ids, discount)
    unseen = 0
    for a, b in product(range(7), repeat=2):
        p = [ours.probability(a, b, w, discount) for w in range(7)]
        expected = [nltks.score(str(w), (str(a), str(b))) for w in range(7)]
        assert p == pytest.approx(expected, abs=1e-14)
        assert sum(p) == pytest.approx(1, abs=1e-12)
        unseen += not nltks.counts[(str(a), str(b))].N()
    assert 0 < unseen < 49


def test_the_loss_is_that_of_a_plain_loop_over_nltk():
    train, test = text(200, 1), text(50, 2)
    nltks, history, total = nltk_model(train, 0.6), ["3", "3"], 0.0
    for id in map(str, test):
        total -= math.log(nltks.score(id, tuple(history[-2:])))
        history.append(id)
    assert Trigram(train).loss(test, eos=3, discount=0.6) == pytest.approx(total / 50)


def write_run(run: Path, data: Path, min_count: int) -> None:
    """What main() reads of a finished run."""
    settings = TextConfig(data=str(data), min_count=min_count)
    text = prepare(str(data), settings.split_ratios(), 0, min_count)
    (run / "eval").mkdir(parents=True, exist_ok=True)
    text.vocabulary.save(run)
    (run / "config.json").write_text(json.dumps(asdict(settings)))
    scores = {"perplexity": 3.5, "data_key": text.checksum()}
    (run / "eval/test.json").write_text(json.dumps(scores))


def test_the_discount_is_chosen_on_the_validation_text(tmp_path, monkeypatch, capsys):
    """Its sentences are new to the training text, those of the test are not."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(1)
    words = "abcdefgh"
    known = [" ".join(draw.choices(words, k=6)) for _ in range(20)]
    new = [" ".join(draw.choices(words, k=6)) for _ in range(60)]
    texts = {"train": [*known * 3, "rare"], "valid": new, "test": known * 3}
    (tmp_path / "text").mkdir()
    for split, lines in texts.items():
        (tmp_path / f"text/{split}.txt").write_text("\n".join(lines) + "\n")
    write_run(Path("runs/x"), tmp_path / "text", min_count=2)
    write_run(Path("runs/old"), tmp_path / "text", min_count=2)
    Path("runs/old/eval/test.json").write_text("damaged")
    os.utime("runs/old/eval/test.json", (1, 1))
    main(Config())  # the newest run
    printed = re.search(r"discount ([\d.]+) \(best on validation\)", capsys.readouterr().out)
    text = prepare(str(tmp_path / "text"), (0.8, 0.1, 0.1), 0, 2)
    trigram = Trigram(text.ids["train"].tolist())
    best = {}
    for split in ("validation", "test"):
        losses = [trigram.loss(text.ids[split].tolist(), text.vocabulary.eos, d) for d in DISCOUNTS]
        best[split] = DISCOUNTS[losses.index(min(losses))]
    assert float(printed[1]) == best["validation"] != best["test"]


def test_the_vocabulary_is_that_of_the_run(tmp_path, capsys):
    """Of a run with --init it is another one's, not that of the text."""
    (tmp_path / "a.txt").write_text("a b c\na b d\n" * 40)
    run = tmp_path / "run"
    write_run(run, tmp_path / "a.txt", min_count=1)
    (run / "vocabulary.txt").write_text("<eos>\n<unk>\na\nb\n")
    text = prepare(str(tmp_path / "a.txt"), (0.8, 0.1, 0.1), 0, 1, run=run)
    assert text.vocabulary.tokens == ["<eos>", "<unk>", "a", "b"]
    scores = {"perplexity": 3.5, "data_key": text.checksum()}
    (run / "eval/test.json").write_text(json.dumps(scores))
    main(Config(ckpt=str(run)))
    assert "test perplexity 3.50" in capsys.readouterr().out


def test_the_text_of_a_run_is_scored(tmp_path, capsys):
    lines = []
    for n in range(250):
        verb, month = "sailed" if n % 3 else "sank", "may" if n % 2 else "june"
        lines.append(f"the ship {verb} in {month} {n if n % 10 == 0 else n // 3}")
    data, run = tmp_path / "a.txt", tmp_path / "run"
    data.write_text("\n".join(lines) + "\n")
    with refused("is not a run of labs.wikitext, nor inside one"):
        main(Config(ckpt=str(run)))
    write_run(run, data, min_count=1)
    with refused("probability 0"):
        main(Config(ckpt=str(run)))
    write_run(run, data, min_count=2)
    capsys.readouterr()
    main(Config(ckpt=str(run)))
    perplexities = re.findall(r"perplexity (\d+\.\d+)", capsys.readouterr().out)
    model, default, best = map(float, perplexities)
    assert model == 3.5 and 1 < best <= default
    data.write_text("\n".join(lines[1:]) + "\n")
    with refused("the text is not the one that the run began with"):
        main(Config(ckpt=str(run)))
    (run / "eval/test.json").write_text('{"perplexity": 3.5')  # cut short
    with refused("eval/test.json is damaged; `--resume` the run"):
        main(Config(ckpt=str(run)))
