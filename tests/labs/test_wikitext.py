"""The language model: its text, the model under its mask, the sampler, and whole runs."""

import json
import math
import os
import re
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from conftest import forked_ranks
from helpers import refused
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine import checkpoint
from engine.config import as_json, atomic_write, checked
from engine.distributed import World
from engine.precision import choose_precision
from engine.telemetry import shown_as
from labs.wikitext import __main__ as wikitext
from labs.wikitext.__main__ import Config
from labs.wikitext.model import (
    LanguageModel,
    SmoothedLoss,
    confusion_figure,
    evaluate,
    gather_segments,
    generate,
    windows,
)
from labs.wikitext.sampler import SegmentSampler, systematic
from labs.wikitext.text import (
    EOS,
    SPLITS,
    UNK,
    Vocabulary,
    coverage,
    load_glove,
    prepare,
    read_splits,
)

ALONE = World(0, 1, torch.device("cpu"))
RATIOS = (0.8, 0.1, 0.1)
TINY = dict(
    d_model=16,
    nhead=2,
    layers=1,
    dim_feedforward=32,
    segment=8,
    precision="fp32",
    device="cpu",
    min_count=1,
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def wiki(documents: int = 20, first: int = 0) -> str:
    """Text of WikiText's form: titles, a section, blank lines, <unk>."""
    body = " \n = Title {0} = \n \n The ship no.1 {0} sailed <unk> . \n \n = = Crew = = \n \n The crew of {0} was small . \n"
    return "".join(body.format(number) for number in range(first, first + documents))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def tiny_model(vocabulary: int = 11, **sizes) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(vocabulary, Config(**(TINY | dict(dropout=0.0) | sizes)))
    return model.double().eval()


# Text


def test_a_folder_without_train_cuts_it_from_validation_and_leaves_test_alone(tmp_path):
    write(tmp_path / "wiki.valid.tokens", wiki(20))
    write(tmp_path / "wiki.test.tokens", wiki(5, first=20))
    write(tmp_path / "README.md", "not a text")
    notes = []
    splits = read_splits(str(tmp_path), RATIOS, notes)
    assert splits["train"] + splits["validation"] == wiki(20).splitlines()
    assert splits["test"] == wiki(5, first=20).splitlines()
    assert splits["validation"][0] == " = Title 18 = "  # 8/9 of 20 documents, to the nearest
    assert (
        "validation is cut at documents: 88.9% train, 11.1% validation; test as it is" in notes[1]
    )


def test_a_folder_of_the_hub_is_read_without_its_readme_and_hidden_files(tmp_path):
    lines = [
        line and line + "\n" for line in wiki(9).splitlines()
    ]  # the hub's rows: with their ends, "" for none
    for split in ("train", "validation", "test"):
        pyarrow.parquet.write_table(
            pyarrow.table({"text": lines}), tmp_path / f"{split}-00000-of-00001.parquet"
        )
    for name in ("README.md", ".train.txt", "LICENSE.txt", "readme_zh.md"):
        write(tmp_path / name, "not a text")
    assert read_splits(str(tmp_path), RATIOS, []) == dict.fromkeys(SPLITS, wiki(9).splitlines())
    for file in tmp_path.glob("*.parquet"):  # then nothing is left
        file.unlink()
    with refused("no text file there"):
        read_splits(str(tmp_path), RATIOS, [])


@pytest.mark.parametrize(
    "text, kind",
    [
        (wiki(), "documents"),
        ("a b\nc d\n\n" * 20, "paragraphs"),
        ("a b c\n" * 20, "lines"),
    ],
)
def test_one_file_is_cut_by_ratio_and_nothing_is_lost(tmp_path, text, kind):
    notes = []
    splits = read_splits(str(write(tmp_path / "novel.txt", text)), (0.5, 0.25, 0.25), notes)
    assert [*splits["train"], *splits["validation"], *splits["test"]] == text.splitlines()
    sizes = [sum(len(line.split()) for line in lines) for lines in splits.values()]
    assert sizes == pytest.approx(
        [0.5 * sum(sizes), 0.25 * sum(sizes), 0.25 * sum(sizes)], rel=0.15
    )
    assert f"cut at {kind}" in notes[1]


def test_words_of_wikitext_stay_as_they_are_and_plain_text_is_cut_into_words_and_marks(tmp_path):
    text = prepare(str(write(tmp_path / "wiki.txt", wiki())), RATIOS, "words", 0, 1)
    assert {"no.1", "<unk>", "=", "."} <= set(text.vocabulary.tokens)
    file = write(tmp_path / "plain.txt", "The crew's ship (no. 5) sailed.\n你好。\n" * 40)
    plain = prepare(str(file), RATIOS, "words", 0, 1)
    assert {"crew's", "(", "5", ")", "sailed", ".", "你", "好", "。"} <= set(
        plain.vocabulary.tokens
    )
    assert (
        plain.vocabulary.decode(plain.vocabulary.encode(["The ship sailed."])[0])
        == "The ship sailed ."
    )


def test_every_line_ends_with_eos_and_the_rare_are_unknown(tmp_path):
    path = write(tmp_path / "a.txt", "a a b\n" * 16 + "a c x\n" * 2 + "a d x\n" * 2)
    text = prepare(str(path), RATIOS, "words", 0, 3)
    assert text.vocabulary.tokens == [
        "a",
        EOS,
        "b",
        UNK,
    ]  # the most frequent first; c, d and x are in no training line
    assert (
        text.vocabulary.decode(text.ids["validation"].tolist())
        == "a <unk> <unk> \n a <unk> <unk> \n"
    )
    assert text.words == {split: len(ids) for split, ids in text.ids.items()}
    most_frequent = prepare(str(path), RATIOS, "words", 3, 1)
    assert sorted(most_frequent.vocabulary.tokens) == sorted([UNK, EOS, "a"])


def test_subwords_know_everything_and_count_words_for_perplexity(tmp_path):
    text = prepare(str(write(tmp_path / "a.txt", wiki(60))), RATIOS, "subwords", 400, 1)
    line = "The ship no.1 7 sailed ."
    assert text.vocabulary.decode(text.vocabulary.encode([line])[0]) == line
    words = prepare(str(tmp_path / "a.txt"), RATIOS, "words", 0, 1)
    assert text.words == words.words
    assert text.vocabulary.tokens[text.vocabulary.eos] == EOS and UNK not in text.vocabulary.tokens
    lines = read_splits(str(tmp_path / "a.txt"), RATIOS, [])["test"]
    assert text.vocabulary.decode(text.ids["test"].tolist()).split() == " ".join(lines).split()


def test_glove_coverage_lower_case_and_scale(tmp_path):
    path = write(tmp_path / "g.txt", "the 1 2 3\nship -3 0 1\nShip 9 9 9\nother 5 5 5\n")
    tokens = ["The", "ship", UNK, EOS, "zebra"]
    vectors, found = load_glove(path, tokens)
    assert found.tolist() == [True, True, False, False, False]
    raw = torch.tensor([[1.0, 2, 3], [-3, 0, 1]])
    torch.testing.assert_close(vectors[:2], raw / raw.std(correction=0) / math.sqrt(3))
    assert vectors.shape == (5, 3) and vectors[2:].norm(dim=1).min() > 0
    assert coverage(found, torch.tensor([0, 0, 1, 3])) == (0.4, 0.75)


# Model


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("training", [False, True])
def test_a_future_token_changes_no_earlier_logit(positions, training):
    model = tiny_model(positions=positions).train(training)
    tokens, real = torch.randint(11, (2, 8)), torch.ones(2, 8, dtype=torch.bool)
    before = model(tokens, real)
    for place in range(8):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        after = model(changed, real)
        assert torch.equal(before[:, :place], after[:, :place])
        assert not torch.allclose(before[:, place], after[:, place])


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("training", [False, True])
def test_padding_on_either_side_changes_neither_loss_nor_gradient(positions, training):
    model, ids = tiny_model(positions=positions).train(training), torch.randint(11, (40,))
    spans = [(0, 0, 8), (8, 8, 13), (30, 30, 31)]
    found = []
    for length, pad in [(8, "right"), (8, "left")]:
        tokens, targets, real = gather_segments(ids, spans, eos=3, length=length, pad=pad)
        assert real.sum(1).tolist() == [8, 5, 1] and real[1, 0] == (pad == "right")
        tokens[~real] = torch.randint(11, (10,))  # whatever stands in the padding
        smoothed, losses = SmoothedLoss(model, 0.1)(tokens, targets, real, real)
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(smoothed, list(model.parameters()))]
        )
        assert gradient.isfinite().all()
        found.append((losses, gradient))
    alone = []
    for first, _, end in spans:  # each without any padding
        row = gather_segments(ids, [(first, first, end)], 3, end - first, "right")
        alone.append(SmoothedLoss(model, 0.1)(row[0], row[1], row[2], row[2])[1])
    torch.testing.assert_close(found[0][0].double(), torch.cat(alone).double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)  # the losses are in fp32


def test_smoothed_and_unsmoothed_loss_are_those_of_torch():
    model = tiny_model()
    tokens, targets, real = gather_segments(
        torch.randint(11, (40,)), [(0, 0, 8), (8, 8, 13)], 3, 8, "right"
    )
    smoothed, losses = SmoothedLoss(model, 0.2)(tokens, targets, real, real)
    logits, truth = model(tokens, real)[real].float(), targets[real]
    expected = F.cross_entropy(logits, truth, label_smoothing=0.2, reduction="sum")
    torch.testing.assert_close(smoothed.float(), expected)
    torch.testing.assert_close(losses, F.cross_entropy(logits, truth, reduction="none"))


@pytest.mark.parametrize("tokens, length", [(1, 8), (8, 8), (29, 8), (30, 7)])
def test_windows_count_every_token_once_after_half_a_window(tokens, length):
    spans = windows(tokens, length)
    assert [place for _, first, end in spans for place in range(first, end)] == list(range(tokens))
    assert all(end - first <= length for first, _, end in spans)
    assert all(counted - first >= length // 2 or first == 0 for first, counted, _ in spans)


@pytest.mark.parametrize("pad", ["left", "right"])
def test_perplexity_is_that_of_a_plain_loop_on_one_rank_and_two(pad, monkeypatch):
    model, ids = tiny_model(), torch.randint(11, (61,))
    total, right = 0.0, []
    for place in range(61):  # one token at a time, with the context that its window gives
        first = next(first for first, counted, end in windows(61, 8) if counted <= place < end)
        context = torch.cat([torch.tensor([3]), ids])[first : place + 1]
        p = model(context[None], torch.ones(1, len(context), dtype=torch.bool))[0, -1].softmax(0)
        total -= math.log(p[ids[place]].item())
        right += [ids[place].item()] if p.argmax() == ids[place] else []
    confused = ids.bincount(minlength=11).topk(3).indices
    sums, table = evaluate(model, ids, 3, 8, pad, ALONE, confused, unk=right[0])
    assert math.exp(sums["loss"] / 61) == pytest.approx(math.exp(total / 61), rel=1e-6)
    assert sums["correct"] == len(right) and sums["correct_known"] == len(right) - right.count(
        right[0]
    )
    assert (
        table.shape == (3, 4)
        and table.sum(1).tolist() == ids.bincount(minlength=11)[confused].tolist()
    )
    monkeypatch.setattr("labs.wikitext.model.WINDOWS_AT_ONCE", 2)
    monkeypatch.setattr(World, "sum", lambda _, values: values)  # of this rank alone
    halves = [
        evaluate(model, ids, 3, 8, pad, World(rank, 2, torch.device("cpu")))[0]["loss"]
        for rank in (0, 1)
    ]
    assert sum(halves) == pytest.approx(sums["loss"]) and min(halves) > 0


def test_the_loss_begins_near_the_unigram_entropy():
    ids = torch.tensor([0] * 900 + [1] * 90 + [2] * 10)[torch.randperm(1000)]
    model = tiny_model(3, d_embedding=6)
    model.start_from_counts(ids)
    shares = ids.bincount().double() / 1000
    sums, _ = evaluate(model, ids, 1, 8, "right", ALONE)
    assert sums["loss"] / 1000 == pytest.approx(-(shares * shares.log()).sum().item(), abs=0.2)


def test_samples_are_seeded_and_have_no_unknown_word(tmp_path):
    vocabulary = prepare(str(write(tmp_path / "a.txt", wiki(30))), RATIOS, "words", 0, 2).vocabulary
    model = tiny_model(len(vocabulary.tokens))
    prompts = [torch.tensor([0, 1, 2]), torch.arange(12) % 5]  # the second is longer than a segment
    first, again, other = (generate(model, prompts, vocabulary, 20, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert all(len(row) == 20 and vocabulary.tokens.index(UNK) not in row for row in first)


# Sampler


def sampler(
    count: int = 7, sampling: str = "dynamic", sharpness: float = 1.0, epochs: int = 10, **settings
):
    made = SegmentSampler(count * 8 - 3, 8, sampling, sharpness, epochs, seed=5, **settings)
    made.record(torch.arange(count), torch.arange(count) * 8.0 / 2 * (made.lengths / 8))
    made.end_epoch(ALONE)
    return made


def test_probabilities_follow_the_formula():
    made = sampler(sharpness=0.7)
    assert made.losses.tolist() == pytest.approx([number / 2 for number in range(7)])
    for epoch in range(10):
        weight = 0.0 if epoch == 0 else max(0.0, 1 - epoch / 7)
        powers = [math.exp(0.7 * number / 2) for number in range(7)]
        expected = [(1 - weight) / 7 + weight * power / sum(powers) for power in powers]
        assert made.probabilities(epoch).tolist() == pytest.approx(expected)


def test_systematic_draws_have_exactly_the_expected_counts():
    p = torch.tensor([0.5, 0.03, 0.0, 0.17, 0.3], dtype=torch.float64)
    draws = [systematic(p, torch.tensor((n + 0.5) / 1000)) for n in range(1000)]
    counts = torch.stack([draw.bincount(minlength=5) for draw in draws]).double()
    assert ((counts == (5 * p).floor()) | (counts == (5 * p).ceil())).all()
    torch.testing.assert_close(counts.mean(0), 5 * p, atol=2e-3, rtol=0)


def test_plans_are_static_at_the_beginning_and_again_at_the_end():
    made, static = sampler(500), sampler(500, "static")
    everything = list(range(500))
    for epoch in range(10):
        assert sorted(static.plan(epoch).tolist()) == everything
        assert (sorted(made.plan(epoch).tolist()) == everything) == (epoch == 0 or epoch >= 7)
        assert torch.equal(made.plan(epoch), made.plan(epoch))
    assert not torch.equal(static.plan(0), static.plan(1))
    far = SegmentSampler(500 * 8 - 3, 8, "static", 1.0, 10, seed=5 + 4096)
    assert not torch.equal(static.plan(0), far.plan(0))
    sizes = [made.figures(epoch)["sampler/effective_sample_size"] for epoch in range(1, 8)]
    assert sizes == sorted(sizes) and sizes[-1] == pytest.approx(500)
    assert made.figures(7)["sampler/entropy"] == pytest.approx(math.log(500))


def test_one_draw_serves_as_many_epochs_as_asked():
    made = SegmentSampler(50 * 8, 8, "dynamic", 1.0, 12, seed=5, resample_every=3)
    draws = []
    for epoch in range(12):
        made.record(plan := made.plan(epoch), 8 * (plan / 20 + epoch % 3))
        draws.append(plan)
        made.end_epoch(ALONE, epoch)
        if epoch == 4:  # in the middle of a draw: what it saw waits for the next
            assert made.losses[7] == pytest.approx(7 / 20 + 1)
            made.load_state_dict(json.loads(json.dumps(made.state_dict(ALONE))), ALONE)
    for first in (0, 3, 6, 9):
        counts = {tuple(plan.bincount(minlength=50).tolist()) for plan in draws[first : first + 3]}
        assert len(counts) == 1 and (counts == {(1,) * 50}) == (first in (0, 9))  # w = 0
        assert not torch.equal(draws[first], draws[first + 1])
    assert made.weight(5) == made.weight(3) == pytest.approx(1 - 3 / 8.4)


# Whole runs


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Runs the lab in this process; `stop_after` steps it is asked to stop, as by a signal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "engine.distributed.keep_freed_memory", lambda: True
    )  # not in the process of all tests

    def run(stop_after: int = 10**9, **settings) -> Path:
        steps = iter(range(1, 10**9))
        monkeypatch.setattr(wikitext.Run, "stop_asked", lambda _: next(steps) >= stop_after)
        config = checked(
            Config(**settings if "resume" in settings else TINY | dict(epochs=2) | settings)
        )
        config.given = set(settings)
        wikitext.main(config)
        return Path(settings.get("resume") or f"runs/{settings['run']}")

    return run


def figures(run: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock and the machine."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clock = ("time", "memory/", "cpu/", "speed/")
    return [
        {name: value for name, value in line.items() if not name.startswith(clock)}
        for line in lines
    ]


def test_a_run_that_was_interrupted_ends_as_one_that_was_not(lab, tmp_path):
    write(tmp_path / "text/a.txt", wiki(12))
    settings = dict(
        data="text", sampling="dynamic", epochs=4, batch=8, log_every=1, embedding_share=0.3
    )
    whole = lab(run="whole", **settings)
    assert max(line["step"] for line in figures(whole)) == 20  # 5 an epoch
    broken = lab(run="broken", stop_after=2, **settings)
    for steps in (
        3,
        6,
        10**9,
    ):  # to the end of an epoch, into the middle of a later one, to the end
        assert not (broken / "test.json").exists()
        assert "--resume runs/broken" in (broken / "train.log").read_text()
        lab(resume=str(broken), stop_after=steps)
    assert figures(broken) == figures(whole)
    assert (broken / "test.json").read_text() == (whole / "test.json").read_text()
    ours, theirs = (
        checkpoint.load_weights(run / "checkpoints" / "last") for run in (broken, whole)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_seed_drops_other_activations(lab, tmp_path, monkeypatch):
    def same_weights(*sizes):
        torch.manual_seed(0)
        return LanguageModel(*sizes)

    monkeypatch.setattr(wikitext, "LanguageModel", same_weights)
    monkeypatch.setattr(SegmentSampler, "plan", lambda self, _: torch.arange(len(self.starts)))
    write(tmp_path / "a.txt", wiki(12))
    losses = []
    for seed, dropout in product((1, 2), (0.3, 0.0)):
        settings = dict(run=f"{seed}-{dropout}", seed=seed, dropout=dropout)
        losses.append(
            figures(lab(data="a.txt", epochs=1, log_every=1, stop_after=1, **settings))[0][
                "train/loss"
            ]
        )
    assert losses[0] != losses[2] and losses[1] == losses[3]


def test_scores_are_in_fp32_where_training_chooses_a_shorter_format(lab, tmp_path, monkeypatch):
    write(tmp_path / "a.txt", wiki(12))
    settings = dict(data="a.txt", epochs=1, precision="fp32")
    expected = (lab(run="here", **settings) / "test.json").read_text()

    def as_on_a_gpu(device, name="auto", training=False, world=None):
        return choose_precision(device, "bf16" if name == "auto" else name, training)

    monkeypatch.setattr(wikitext, "choose_precision", as_on_a_gpu)
    assert (lab(run="there", **settings) / "test.json").read_text() == expected


def test_the_best_weights_are_tested(lab, tmp_path, monkeypatch):
    losses, seen = iter([1.0, 2.0, 0.0]), []  # of two validations and the test

    def judge(model, ids, eos, length, pad, world, confused, unk):
        seen.append({name: weight.clone() for name, weight in model.state_dict().items()})
        table = None if confused is None else torch.eye(len(confused), len(confused) + 1)
        return dict(loss=next(losses), correct=0, correct_known=0), table

    monkeypatch.setattr(wikitext, "evaluate", judge)
    write(tmp_path / "a.txt", wiki(12))
    lab(run="x", data="a.txt", epochs=2)
    *validated, tested = seen
    assert [
        all(torch.equal(tested[name], weights[name]) for name in tested) for weights in validated
    ] == [True, False]


def test_a_run_goes_on_on_its_own_device(lab, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(wikitext.distributed, "start", lambda device: asked.append(device) or ALONE)
    atomic_write(tmp_path / "config.json", as_json(asdict(Config(data="nowhere", device="cuda:1"))))
    for flags in (dict(), dict(device="cpu")):
        with refused("no such file"):
            lab(resume=".", **flags)
    assert asked == ["cuda:1", "cpu"]


def test_the_first_stage_changes_nothing_but_embedding_and_positions(lab, tmp_path):
    write(tmp_path / "a.txt", wiki(12))
    run = lab(
        run="x", data="a.txt", epochs=2, batch=8, d_embedding=6, embedding_share=0.5, stop_after=1
    )
    changed, before = [], checkpoint.load_weights(run / "checkpoints" / "last")
    for steps in (2, 5):  # 5 steps an epoch: the second stage begins with step 6
        after = checkpoint.load_weights(
            lab(resume=str(run), stop_after=steps) / "checkpoints" / "last"
        )
        changed.append({name for name in after if not torch.equal(after[name], before[name])})
        before = after
    assert changed == [{"embedding.weight", "up.weight", "up.bias", "positions"}, set(after)]


def test_what_a_run_writes_and_a_finished_one_is_resumed_for_its_samples(lab, tmp_path, report_of):
    write(tmp_path / "a.txt", wiki(12))
    glove = write(tmp_path / "g.txt", "the 1 2 3 4\nship -3 0 1 4\n")
    # No dropout: attention then runs as one fused operation on a CPU, which the count of FLOPs has to see through.
    run = lab(run="x", data="a.txt", epochs=1, log_every=1, dropout=0.0, glove=str(glove))
    before = checkpoint.load_weights(run / "checkpoints" / "last")
    log = (run / "train.log").read_text()
    assert re.search(
        r"GloVe: 4 numbers a word, projected to 16; [\d.]+% of the vocabulary has a vector", log
    )
    assert "(encoder): TransformerEncoder(" in log  # the network's layers
    scores = json.loads((run / "test.json").read_text())
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    tags = EventAccumulator(str(run)).Reload().Tags()
    assert "test/confusion" in tags["images"]
    assert "samples/text_summary" in tags["tensors"]
    wanted = {
        "train/smoothed_loss",
        "train/loss",
        "train/learning_rate",
        "train/gradient_norm",
        "validation/perplexity",
        "validation/accuracy",
        "sampler/entropy",
        "sampler/effective_sample_size",
        "speed/tokens_per_second",
    }
    assert set(map(shown_as, wanted)) <= set(tags["scalars"])
    page = report_of(run)
    assert "(encoder): TransformerEncoder(" in page and f'value="{scores["perplexity"]}"' in page
    config = json.loads((run / "config.json").read_text())
    matrices = (
        weight.numel()
        for name, weight in before.items()
        if weight.dim() == 2 and name != "positions"
    )
    scores_and_sums = (
        2 * config["layers"] * config["segment"] * config["d_model"]
    )  # of attention: S · D each, a layer
    assert (
        f'FLOPs of a training token</th><td><data value="{6 * (sum(matrices) + scores_and_sums)}"'
        in page
    )
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    lab(
        resume="runs/x",
        data="b.txt",
        glove=str(glove.rename(tmp_path / "h.txt")),
        generate="The ship",
    )
    assert "sample: **The ship**" in (run / "train.log").read_text()
    after = checkpoint.load_weights(run / "checkpoints" / "last")
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


@pytest.mark.parametrize("sampling, epochs", [("static", 1), ("dynamic", 6)])
def test_a_long_text_is_read_as_often_as_its_sampling_wants(
    tmp_path, monkeypatch, sampling, epochs
):
    monkeypatch.setattr(
        wikitext, "TOKENS_IN_ALL", 100
    )  # fewer than the text has, as with the whole of WikiText-2
    _, _, config = wikitext.read_text(
        Config(data=str(write(tmp_path / "a.txt", wiki())), segment=8, sampling=sampling)
    )
    assert config.epochs == epochs


def test_subwords_are_scored_per_word_as_well(lab, tmp_path):
    write(tmp_path / "a.txt", wiki(30))
    scores = json.loads(
        (
            lab(run="x", data="a.txt", tokens="subwords", vocab=300, epochs=1) / "test.json"
        ).read_text()
    )
    words = sum(
        len(line.split()) + 1 for line in read_splits("a.txt", RATIOS, [])["test"]
    )  # <eos> counts as one
    assert scores["tokens"] > words
    assert scores["perplexity_per_word"] == pytest.approx(
        math.exp(scores["loss"] * scores["tokens"] / words)
    )


def test_resume_with_another_vocabulary_is_refused(lab, tmp_path):
    write(tmp_path / "a.txt", wiki(12))
    lab(run="x", data="a.txt", stop_after=2)
    write(tmp_path / "a.txt", wiki(12).replace("ship", "boat"))
    with refused("not what the run began with"):
        lab(resume="runs/x")


def test_learns_a_markov_text_to_its_entropy(lab, tmp_path):
    """Five words and <eos>; the next depends on the last only, so no model can do better than the chain's entropy rate."""
    torch.manual_seed(1)
    words = [EOS, "a", "b", "c", "d", "e"]
    chain = (2.5 * torch.randn(6, 6)).softmax(1).double()
    chain[0, 0] = 0  # no empty lines
    chain /= chain.sum(1, keepdim=True)
    state, states = 0, []
    for _ in range(24_000):
        state = int(chain[state].multinomial(1))
        states.append(state)
    text = " ".join("\n" if state == 0 else words[state] for state in states)
    write(tmp_path / "markov.txt", "\n".join(line.strip() for line in text.split("\n")[:-1]) + "\n")
    run = lab(
        run="m",
        data="markov.txt",
        epochs=4,
        d_model=32,
        segment=16,
        dropout=0.0,
        lr=0.01,
        label_smoothing=0.0,
        embedding_share=0.0,
    )
    stationary = torch.linalg.matrix_power(chain, 200)[0]
    entropy = -(stationary[:, None] * torch.special.xlogy(chain, chain)).sum().item()
    scores = json.loads((run / "test.json").read_text())
    # Three standard errors of a mean over the 2,400 tokens of the test. The words' frequencies alone would give 0.84 more.
    assert scores["loss"] == pytest.approx(entropy, abs=0.06)


def test_two_processes_have_the_losses_of_one(lab, tmp_path):
    write(tmp_path / "a.txt", wiki(12))
    glove = write(tmp_path / "g.txt", "the 1 2 3 4\nship -3 0 1 4\n")
    # epochs 0 and the width of GloVe's vectors are settled by the text, which rank 0 alone reads.
    settings = dict(
        data="a.txt",
        epochs=0,
        glove=str(glove),
        batch=7,
        dropout=0.0,
        sampling="dynamic",
        log_every=1,
    )
    one = lab(run="one", **settings)
    flags = [
        word for name, value in (TINY | settings).items() for word in (f"--{name}", str(value))
    ]
    forked_ranks(2, "labs/wikitext/__main__.py", "--run", "two", *flags, cwd=tmp_path)
    expected, two = figures(one), figures(Path("runs/two"))
    assert len(expected) == len(two) > 40
    for ours, theirs in zip(two[:40], expected):  # differences of rounding grow with every step
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(ratios="0.8,0.3,0.1"), "three numbers above 0 that add up to 1"),
        (dict(ratios="0.8,0.2"), "three numbers"),
        (dict(ratios="a,b,c"), "three numbers"),
        (dict(d_model=10, nhead=4), "multiple of --nhead"),
        (dict(tokens="subwords", vocab=100), "needs at least 300"),
        (dict(embedding_share=-0.1), "--embedding_share -0.1 must be at least 0 and below 1"),
        (dict(vocab=2), "needs at least 3"),
        (dict(data="nowhere"), "no such file or folder"),
        (dict(data="empty"), "no text file there"),
        (dict(data="blank.txt"), "is empty"),
        (dict(data="latin.txt"), "is not UTF-8"),
        (dict(data="line.txt"), "too few to cut 3 splits"),
        (dict(data="short.txt", segment=64), "less than one --segment"),
        (dict(glove="good.txt", tokens="subwords"), "--glove has vectors of words"),
        (dict(resample_every=10), "belong to --sampling dynamic"),
        (dict(glove="nowhere.txt"), "No such file"),
        (dict(glove="broken.txt"), "no file of vectors (line 2 has 2 numbers instead of 3)"),
        (dict(glove="words.txt"), "no file of vectors"),
        (dict(glove="foreign.txt"), "none of its words is in the vocabulary"),
        (dict(glove="good.txt", d_embedding=7), "these GloVe vectors have 3 numbers"),
    ],
)
def test_mistakes_are_named_in_one_line(lab, tmp_path, settings, message):
    (tmp_path / "empty").mkdir()
    for name, text in {
        "blank.txt": " \n\n",
        "line.txt": "a b c",
        "short.txt": "a b\n" * 10,
        "good.txt": "the 1 2 3\n",
        "broken.txt": "the 1 2 3\nship 1 2\n",
        "words.txt": "the one two\n",
        "foreign.txt": "le 1 2\n",
        "wiki.txt": wiki(),
    }.items():
        write(tmp_path / name, text)
    (tmp_path / "latin.txt").write_bytes("caf\xe9 \n".encode("latin-1"))
    with refused(message):
        lab(**dict(data="wiki.txt", run="x") | settings)
    assert not Path("runs/x").exists()


# Real data


def test_wikitext_has_the_tokens_that_everybody_counts():
    folder = os.environ.get("WIKITEXT")
    if not folder or not Path(folder).is_dir():
        pytest.skip("WIKITEXT names no directory")
    if (Path(folder) / "train.txt").exists():
        pytest.skip("this copy has a train split")
    text = prepare(folder, RATIOS, "words", 0, 3)
    assert (
        len(text.ids["train"]) + len(text.ids["validation"]) == 217_646
        and len(text.ids["test"]) == 245_569
    )
    glove = sorted(Path(os.environ.get("GLOVE", "/nowhere")).glob("*.txt"))
    if glove:
        types, running = coverage(
            load_glove(glove[0], text.vocabulary.tokens)[1], text.ids["train"]
        )
        assert 0.9 < types < 1 and 0.8 < running < 0.9  # <unk> and <eos> have no vector


def test_the_bundled_sample_needs_no_flag(monkeypatch, tmp_path):
    monkeypatch.setattr("labs.wikitext.text.DEFAULT", tmp_path / "none")
    text = prepare("", RATIOS, "words", 0, 3)
    assert "the English side of the bundled sample" in text.notes[0]
    assert len(text.ids["train"]) > 50_000


def test_the_key_tells_every_change_of_vocabulary_and_splits(tmp_path):
    text = prepare(str(write(tmp_path / "a.txt", wiki())), RATIOS, "words", 0, 1)
    assert prepare(str(tmp_path / "a.txt"), RATIOS, "words", 0, 1).key() == text.key()
    others = [replace(text, vocabulary=Vocabulary([*text.vocabulary.tokens[:-1], "other"]))]
    for split, ids in text.ids.items():
        others.append(replace(text, ids=text.ids | {split: torch.cat([ids[:-1], ids[-1:] + 1])}))
    moved = {
        "train": text.ids["train"][:-1],
        "validation": torch.cat([text.ids["train"][-1:], text.ids["validation"]]),
    }
    others.append(replace(text, ids=text.ids | moved))
    assert len({text.key(), *(other.key() for other in others)}) == 6


@pytest.mark.filterwarnings("error:Glyph")
def test_the_confusion_table_shows_chinese(tmp_path):
    confusion_figure(torch.eye(2, 3), ["你", "$_$"]).savefig(tmp_path / "confusion.png")
