"""The language model: its text, the model under its mask, the sampler, and whole runs."""

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, forked_ranks
from helpers import handout_trainings, refused
from matplotlib.figure import Figure
from pyarrow.parquet import write_table

from engine import checkpoint
from engine.config import checked, parse_flags
from engine.distributed import World
from engine.telemetry import Telemetry
from labs.wikitext import __main__ as wikitext
from labs.wikitext import evaluation
from labs.wikitext import text as texts
from labs.wikitext.__main__ import HANDOUT, Config
from labs.wikitext.evaluation import (
    confusion_figure,
    evaluate,
    generate,
    positions_in_lines,
    token_loss_figure,
    token_losses,
    windows,
)
from labs.wikitext.glove import load_glove
from labs.wikitext.model import LanguageModel, SmoothedLoss, unigram_entropy
from labs.wikitext.sampler import SegmentSampler, gather_segments, systematic
from labs.wikitext.text import EOS, UNK, Vocabulary, find_data, prepare, read_lines, read_splits

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
RATIOS = (0.8, 0.1, 0.1)
TINY = dict(
    d_model=16,
    nhead=2,
    num_layers=1,
    dim_feedforward=32,
    seq_length=8,
    precision="fp32",
    device="cpu",
    min_count=1,
)


@pytest.fixture(autouse=True)
def _seeded_without_data(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(texts, "DATA_PLACES", ())


def wiki(documents: int = 20, first: int = 0) -> str:
    """Text of WikiText's form: titles, a section, blank lines, <unk>."""
    body = " \n = Title {0} = \n \n The ship no.1 {0} sailed <unk> . \n \n"
    body += " = = Crew = = \n \n The crew of {0} was small . \n"
    return "".join(body.format(number) for number in range(first, first + documents))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def tiny_model(vocabulary: int = 11, **sizes) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(vocabulary, Config(**(TINY | dict(dropout=0.0) | sizes)))
    return model.double().eval()


# ---- text


def test_a_folder_without_train_cuts_it_from_validation_and_leaves_test_alone(tmp_path):
    write(tmp_path / "wiki.valid.tokens", wiki(20))
    write(tmp_path / "wiki.test.tokens", wiki(5, first=20))
    for name in ("README.md", "LICENSE.txt", ".train.txt"):
        write(tmp_path / name, "not a text")
    notes = []
    splits = read_splits(str(tmp_path), RATIOS, notes)
    assert splits["train"] + splits["validation"] == wiki(20).splitlines()
    assert splits["test"] == wiki(5, first=20).splitlines()
    assert splits["validation"][0] == " = Title 18 = "  # 8/9 of 20 articles, to the nearest
    assert "validation is cut at articles: 88.9% train, 11.1% validation; test as it" in notes[-1]


def test_files_without_a_split_in_their_names_are_train_if_no_other_is(tmp_path):
    write(tmp_path / "novel.txt", wiki(20))
    write(tmp_path / "test.txt", wiki(5, first=20))
    notes = []
    splits = read_splits(str(tmp_path), RATIOS, notes)
    assert splits["train"] + splits["validation"] == wiki(20).splitlines()
    assert splits["test"] == wiki(5, first=20).splitlines()
    assert notes[0].startswith("data: train from novel.txt")


def test_a_link_keeps_its_suffix(tmp_path):
    write_table(pyarrow.table({"text": wiki().splitlines()}), tmp_path / "blob")
    (tmp_path / "train.parquet").symlink_to(tmp_path / "blob")
    data = find_data(str(tmp_path / "train.parquet"))
    assert sum(map(len, read_splits(data, RATIOS, []).values())) == len(wiki().splitlines())


@pytest.mark.parametrize("text, kind", [(wiki(), "articles"), ("a b c\n" * 20, "lines")])
def test_one_file_is_cut_by_ratio_and_nothing_is_lost(tmp_path, text, kind):
    notes = []
    splits = read_splits(str(write(tmp_path / "novel.txt", text)), (0.5, 0.25, 0.25), notes)
    assert [*splits["train"], *splits["validation"], *splits["test"]] == text.splitlines()
    sizes = [sum(len(line.split()) for line in lines) for lines in splits.values()]
    shares = [size / sum(sizes) for size in sizes]
    assert shares == pytest.approx([0.5, 0.25, 0.25], rel=0.15)
    assert f"cut at {kind}" in notes[1]


def test_wikitext_keeps_its_words_and_plain_text_is_cut_into_words_and_marks(tmp_path):
    path = write(tmp_path / "wiki.txt", wiki())
    assert {"no.1", "<unk>", "=", "The"} <= set(prepare(str(path), RATIOS, 0, 1).vocabulary.tokens)
    lower = prepare(str(path), RATIOS, 0, 1, lowercase=True).vocabulary
    assert "The" not in lower.tokens and lower.encode("THE") == lower.encode("the")
    file = write(tmp_path / "plain.txt", "The crew's ship (no. 5) sailed.\n你好。\n" * 40)
    plain = prepare(str(file), RATIOS, 0, 1).vocabulary
    assert {"crew's", "(", "5", ")", "sailed", ".", "你", "好", "。"} <= set(plain.tokens)
    assert plain.decode(plain.encode("The ship sailed.")) == "The ship sailed ."


def test_every_line_ends_with_eos_and_the_rare_are_unknown(tmp_path):
    path = write(tmp_path / "a.txt", "a a b\n" * 16 + "a c x\n" * 2 + "a d x\n" * 2)
    text = prepare(str(path), RATIOS, 0, 3)
    # The most frequent first; c, d and x are in no training line.
    assert text.vocabulary.tokens == ["a", EOS, "b", UNK]
    validation = text.vocabulary.decode(text.ids["validation"].tolist())
    assert validation == "a <unk> <unk> \n a <unk> <unk> \n"
    most_frequent = prepare(str(path), RATIOS, 3, 1)
    assert sorted(most_frequent.vocabulary.tokens) == sorted([UNK, EOS, "a"])


def test_a_literal_eos_is_no_second_word(tmp_path):
    path = write(tmp_path / "a.txt", f"a a {EOS} b\n" * 20)
    assert prepare(str(path), RATIOS, 0, 1).vocabulary.tokens == [EOS, "a", "b", UNK]


def test_lines_end_only_where_they_do_in_the_file(tmp_path):
    path = write(tmp_path / "a.txt", "one\u2028two\x0c\n\nthree\n")
    assert read_lines(path) == ["one\u2028two\x0c", "", "three"]
    table = tmp_path / "a.parquet"
    write_table(pyarrow.table({"text": ["", " = A = \n", "one\x85two\nthree\n", None]}), table)
    assert read_lines(table) == ["", " = A = ", "one\x85two", "three", ""]
    for column in ({"text": [1]}, {"words": ["one"]}):
        write_table(pyarrow.table(column), table)
        with refused("a.parquet has no column `text` of strings; give a text file"):
            read_lines(table)
    table.write_text("one")
    with refused("a.parquet is not a parquet file"):
        read_lines(table)


def test_glove_lower_case_and_scale(tmp_path):
    path = write(tmp_path / "g.txt", "the 1 2 3\nship -3 0 1\nShip 9 9 9\nother 5 5 5\n")
    tokens = ["The", "ship", UNK, EOS, "zebra"]
    vectors, found = load_glove(path, tokens)
    assert found.tolist() == [True, True, False, False, False]
    raw = torch.tensor([[1.0, 2, 3], [-3, 0, 1]])
    torch.testing.assert_close(vectors[:2], raw / raw.std(correction=0) / math.sqrt(3))
    assert vectors.shape == (5, 3) and vectors[2:].norm(dim=1).min() > 0


# ---- model


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_a_future_token_changes_no_earlier_logit(positions):
    model = tiny_model(positions=positions)
    tokens, attention_mask = torch.randint(11, (2, 8)), torch.ones(2, 8, dtype=torch.bool)
    before = model(tokens, attention_mask)
    for place in range(8):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        after = model(changed, attention_mask)
        assert torch.equal(before[:, :place], after[:, :place])
        assert not torch.allclose(before[:, place], after[:, place])


def test_padding_on_either_side_changes_neither_loss_nor_gradient():
    model, ids = tiny_model().train(), torch.randint(11, (40,))
    spans = [(0, 8), (8, 13), (30, 31)]
    found = []
    for pad in ("right", "left"):
        tokens, targets, attention_mask = gather_segments(ids, spans, 3, 8, pad)
        assert attention_mask.sum(1).tolist() == [8, 5, 1] and attention_mask[1, 0] == (
            pad == "right"
        )
        tokens[~attention_mask] = torch.randint(11, (10,))  # whatever stands in the padding
        smoothed, losses = SmoothedLoss(model, 0.1)(tokens, targets, attention_mask, attention_mask)
        gradients = torch.autograd.grad(smoothed, list(model.parameters()))
        found.append((losses, torch.cat([gradient.flatten() for gradient in gradients])))
    alone = []
    for first, end in spans:  # each without any padding
        tokens, targets, attention_mask = gather_segments(
            ids, [(first, end)], 3, end - first, "right"
        )
        alone.append(SmoothedLoss(model, 0.1)(tokens, targets, attention_mask, attention_mask)[1])
    torch.testing.assert_close(found[0][0].double(), torch.cat(alone).double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)  # the losses are in fp32


@pytest.mark.parametrize("d_embedding", [0, 50])
def test_the_first_loss_is_the_unigram_entropy(d_embedding):
    """The embedding is the output matrix too: large, it would predict the input token."""
    shares = 1 / torch.arange(1.0, 301.0)
    ids = shares.multinomial(8000, replacement=True)
    torch.manual_seed(0)
    model = LanguageModel(300, Config(d_embedding=d_embedding, dropout=0.0))
    model.start_from_counts(ids)
    tokens, targets, attention_mask = gather_segments(
        ids, [(first, first + 64) for first in range(0, 8000, 64)], 0, 64
    )
    with torch.no_grad():
        _, losses = SmoothedLoss(model, 0.1)(tokens, targets, attention_mask, attention_mask)
    counts = ids.bincount() / len(ids)
    entropy = -torch.special.xlogy(counts, counts).sum().item()
    assert unigram_entropy(ids) == pytest.approx(entropy)
    assert losses.mean().item() == pytest.approx(entropy, abs=0.1)


def test_the_smoothed_loss_is_pytorchs():
    model, tokens = tiny_model(), torch.randint(11, (3, 8))
    attention_mask = torch.ones(3, 8, dtype=torch.bool)
    targets = tokens.roll(-1, 1)
    smoothed, losses = SmoothedLoss(model, 0.1)(tokens, targets, attention_mask, attention_mask)
    logits = model(tokens, attention_mask).flatten(0, 1).float()
    expected = F.cross_entropy(logits, targets.flatten(), reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(smoothed, expected)
    torch.testing.assert_close(losses, F.cross_entropy(logits, targets.flatten(), reduction="none"))
    assert not losses.requires_grad


@pytest.mark.parametrize("tokens, length", [(1, 8), (30, 7)])
def test_windows_count_every_token_once_after_half_a_window(tokens, length):
    spans = windows(tokens, length)
    assert [place for _, first, end in spans for place in range(first, end)] == list(range(tokens))
    assert all(end - first <= length for first, _, end in spans)
    assert all(counted - first >= length // 2 or first == 0 for first, counted, _ in spans)


def test_scores_are_those_of_a_plain_loop_on_one_rank_and_two(monkeypatch):
    model, ids = tiny_model(), torch.randint(11, (61,))
    losses, right = [], []
    for place in range(61):  # one token at a time, with the context that its window gives
        first = next(first for first, counted, end in windows(61, 8) if counted <= place < end)
        context = torch.cat([torch.tensor([3]), ids])[first : place + 1]
        p = model(context[None], torch.ones(1, len(context), dtype=torch.bool))[0, -1].softmax(0)
        losses.append(-math.log(p[ids[place]].item()))
        if p.argmax() == ids[place]:
            right.append(ids[place].item())
    total = sum(losses)
    unk = right[0]
    vocabulary = SimpleNamespace(tokens=range(11), eos=3, unk=unk)
    monkeypatch.setattr(evaluation, "CONFUSED", 3)
    scores = evaluate(model, ids, vocabulary, ALONE)
    assert scores["loss"] == pytest.approx(total / 61, rel=1e-6)
    assert scores["perplexity"] == pytest.approx(math.exp(total / 61), rel=1e-6)
    assert scores["accuracy"] == len(right) / 61
    assert token_losses(model, ids, vocabulary) == pytest.approx(losses, rel=1e-5)
    known = 61 - ids.tolist().count(unk)
    assert scores["accuracy_without_unk"] == (len(right) - right.count(unk)) / known
    table = torch.tensor(scores["confusion"]["counts"])
    assert table.shape == (3, 4)
    assert scores["confusion"]["tokens"] == ids.bincount().topk(3).indices.tolist()
    assert table.sum(1).tolist() == ids.bincount().topk(3).values.tolist()
    monkeypatch.setattr(evaluation, "WINDOWS_AT_ONCE", 2)
    monkeypatch.setattr(World, "sum", lambda _, values: values)  # of this rank alone
    halves = []
    for rank in (0, 1):
        halves.append(evaluate(model, ids, vocabulary, World(rank, 2, CPU))["loss"])
    assert sum(halves) == pytest.approx(scores["loss"]) and min(halves) > 0


class Last(torch.nn.Module):
    """A model of which the next token is likely the one after the last: a, b, c, … in a ring."""

    def __init__(self, size: int, context: int):
        super().__init__()
        self.size = size
        self.causal_mask = torch.zeros(context, context)

    def forward(self, tokens, attention_mask):
        assert tokens.size(1) <= len(self.causal_mask)
        following = 2 + (tokens - 1) % (self.size - 2)  # of 2 to size − 1; 0 is <eos>, 1 <unk>
        return 2.0 * torch.nn.functional.one_hot(following, self.size)


def test_samples_continue_the_end_of_the_text_at_their_temperature():
    vocabulary = Vocabulary([EOS, UNK, *"abcdef"])
    model = Last(8, context=4)
    prompts = [torch.tensor([2, 3, 4, 5, 6, 5, 6, 7])] * 2000  # a b c d e d e f; then a
    first = [row[0] for row in generate(model, prompts, vocabulary, 1, seed=1)]
    expected = math.exp(2 / 0.8) / (math.exp(2 / 0.8) + 6)  # <unk> is never drawn
    assert first.count(2) / 2000 == pytest.approx(expected, abs=0.035)  # three deviations
    assert first.count(1) == 0


def test_samples_are_seeded_and_end_with_eos_or_the_limit():
    vocabulary = Vocabulary([EOS, UNK, *"abcdef"])
    model = tiny_model(8)
    prompts = [torch.tensor([0, 2, 3]), 2 + torch.arange(12) % 5] * 10  # the second is long
    first, again, other = (generate(model, prompts, vocabulary, 6, seed) for seed in (1, 1, 2))
    assert first == again != other
    ended = [row for row in first if row[-1] == vocabulary.eos]
    assert 0 < len(ended) < len(first)
    assert all(len(row) == 6 for row in first if row not in ended)
    assert all(row.index(vocabulary.eos) == len(row) - 1 for row in ended)
    text = texts.Text(vocabulary, {"validation": torch.arange(2, 8).repeat(40)}, [])
    for line in evaluation.samples(model, text, "a b", seed=1):
        assert line.startswith("**") and line.endswith((EOS, "…"))


# ---- sampler


def record(made: SegmentSampler, segments: torch.Tensor, losses: torch.Tensor) -> None:
    """A visit of these segments, in which every token of a segment has the same loss."""
    counted = torch.arange(8) < made.lengths[segments].unsqueeze(1)  # (B, S)
    made.record(segments, losses.repeat_interleave(made.lengths[segments]), counted)


def made_sampler(count: int = 7, **settings) -> SegmentSampler:
    defaults = dict(sampling="dynamic", epochs=10, seed=5, resample_every=1)
    config = SimpleNamespace(seq_length=8, **(defaults | settings))
    made = SegmentSampler(count * 8 - 3, config, CPU)
    record(made, torch.arange(count), torch.arange(count) / 2)
    return made


def test_the_weight_is_the_gap_between_training_and_validation():
    # Per token: 8 of each segment, 5 of the last.
    training_loss = (sum(8 * number / 2 for number in range(6)) + 5 * 3) / 53
    for gap, weight in ((0.5, 1 - math.exp(-0.5)), (-0.5, 0.0)):
        made = made_sampler()
        made.end_epoch(ALONE, 0, training_loss + gap)
        assert made.losses.tolist() == pytest.approx([number / 2 for number in range(7)])
        assert made.weight == pytest.approx(weight)
        powers = [math.exp(number / 2) for number in range(7)]
        expected = [(1 - weight) / 7 + weight * power / sum(powers) for power in powers]
        assert made.probabilities().tolist() == pytest.approx(expected)
        drawn = made.plan(1).bincount(minlength=7)
        assert ((drawn - 7 * torch.tensor(expected)).abs() < 1).all()
        assert made.figures()["sampler/different_segments"] == (drawn > 0).sum()


def test_systematic_draws_have_exactly_the_expected_counts():
    p = torch.tensor([0.5, 0.03, 0.0, 0.17, 0.3], dtype=torch.float64)
    draws = [systematic(p, torch.tensor((n + 0.5) / 1000)) for n in range(1000)]
    counts = torch.stack([draw.bincount(minlength=5) for draw in draws]).double()
    assert ((counts == (5 * p).floor()) | (counts == (5 * p).ceil())).all()
    torch.testing.assert_close(counts.mean(0), 5 * p, atol=2e-3, rtol=0)


def test_the_handouts_draws_are_static_dynamic_and_static_again():
    """Ten epochs each, in another order, and a draw goes by the losses of the last epoch."""
    config = Config(**{name: HANDOUT[name] for name in ("sampling", "resample_every", "epochs")})
    config.seq_length = 8
    made = SegmentSampler(50 * 8, config, CPU)
    plans = []
    for epoch in range(40):
        plan = made.plan(epoch)
        plans.append(plan)
        record(made, plan[:20], plan[:20] / 20 + epoch % 10)
        if epoch == 14:  # in the middle of an epoch, and of a draw
            saved = json.loads(json.dumps(made.state_dict(ALONE)))
            made = SegmentSampler(50 * 8, config, CPU)
            made.load_state_dict(saved, ALONE)
        record(made, plan[20:], plan[20:] / 20 + epoch % 10)
        made.end_epoch(ALONE, epoch, validation_loss=12.0)
        assert made.losses[plan[0]] == pytest.approx(plan[0].item() / 20 + epoch % 10)
    for first in (0, 10, 20, 30):
        draws = {tuple(plan.bincount(minlength=50).tolist()) for plan in plans[first : first + 10]}
        assert len(draws) == 1 and (draws == {(1,) * 50}) == (first in (0, 30))
        assert not torch.equal(plans[first], plans[first + 1])
    config.seed = 2
    assert not torch.equal(SegmentSampler(50 * 8, config, CPU).plan(0), plans[0])


def test_static_sampling_does_not_react():
    made = made_sampler(sampling="static")
    made.end_epoch(ALONE, 0, validation_loss=100.0)
    assert made.weight == 0 and made.plan(1).sort().values.tolist() == list(range(7))


def test_what_a_rank_computes_for_ddp_alone_is_no_visit():
    made = made_sampler()
    before = made.state_dict(ALONE)
    made.record(torch.tensor([3]), torch.zeros(0), torch.zeros(1, 8, dtype=torch.bool))
    assert made.state_dict(ALONE) == before


def test_a_resumed_epoch_counts_its_visits_once_on_any_number_of_ranks():
    saved = made_sampler().state_dict(ALONE)
    assert max(saved["sums"]) == 20 and set(saved["visits"]) == {1}  # 3 nats each, 5 tokens; …
    resumed = [made_sampler(), made_sampler()]
    for rank, sampler in enumerate(resumed):
        sampler.sums.zero_()
        sampler.visits.zero_()
        sampler.load_state_dict(saved, World(rank, 2, CPU))
    assert sum(sampler.sums for sampler in resumed).tolist() == saved["sums"]
    assert sum(sampler.visits for sampler in resumed).tolist() == saved["visits"]


# ---- whole runs


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Runs the lab in this process; before step `stop_before` it is asked to stop, as by a signal.

    Figures are not drawn: that would take most of the time.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Figure, "savefig", lambda _, path, dpi: path.touch())
    monkeypatch.setattr(Telemetry, "figure", lambda *words: None)
    for picture in ("confusion_figure", "token_loss_figure"):
        monkeypatch.setattr(evaluation, picture, lambda *words: Figure())
    # Not in the process of all tests.
    monkeypatch.setattr("engine.devices.keep_freed_memory", lambda: True)

    def run(stop_before: int = 10**9, **settings) -> Path:
        turns = iter(range(1, 10**9))
        monkeypatch.setattr(wikitext.Run, "stop_asked", lambda _: next(turns) >= stop_before)
        # The others have the sizes of a model that is there already.
        is_new = not {"resume", "init"} & settings.keys()
        defaults = TINY | dict(epochs=2) if is_new else {}
        config = checked(Config(**(defaults | settings)))
        config.given = set(defaults | settings)
        return wikitext.main(config)

    return run


def result_of(run: Path) -> dict:
    return json.loads((run / "eval/test.json").read_text(encoding="utf-8"))


def figures(run: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock and the machine."""
    clock = ("time", "memory/", "cpu/", "speed/")
    lines = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        lines.append({name: record[name] for name in record if not name.startswith(clock)})
    return lines


def test_a_run_that_was_interrupted_ends_as_one_that_was_not(lab, tmp_path):
    write(tmp_path / "text/a.txt", wiki(12))
    settings = dict(
        data="text", sampling="dynamic", epochs=3, batch_size=8, log_every=1, embedding_share=0.3
    )
    whole = lab(run="whole", **settings)
    assert max(line["step"] for line in figures(whole)) == 15  # 5 per epoch
    broken = lab(run="broken", stop_before=3, **settings)
    # To the end of an epoch, into the middle of a later one, to the end.
    for turns in (4, 7, 10**9):
        assert not (broken / "eval/test.json").exists()
        assert "--resume runs/broken" in (broken / "train.log").read_text()
        lab(resume=str(broken), stop_before=turns)
    assert figures(broken) == figures(whole)
    assert result_of(broken) == result_of(whole)
    ours, theirs = (checkpoint.load_weights(run / "checkpoints/last") for run in (broken, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_speed_is_that_of_the_steps_since_the_last_validation(lab, tmp_path, monkeypatch):
    """A log line that follows an epoch's end has steps of one epoch only."""
    seconds = [0.0]

    def step_of_one_second(*_):
        seconds[0] += 1

    monkeypatch.setattr(wikitext, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    monkeypatch.setattr(wikitext.distributed.World, "set_seed", step_of_one_second)
    write(tmp_path / "a.txt", wiki(12))
    folder = lab(run="x", data="a.txt", batch_size=8, log_every=3)  # 5 steps per epoch
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    speeds = [record["speed/tokens_per_second"] for record in records if "train/loss" in record]
    assert len(speeds) == 4 and max(speeds) < 1.5 * min(speeds)


def test_the_best_weights_are_tested(lab, tmp_path, monkeypatch):
    losses, seen = iter([1.0, 2.0, 0.0]), []  # of two validations and the test

    def judge(model, *_):
        seen.append({name: weight.clone() for name, weight in model.state_dict().items()})
        scores = dict.fromkeys(evaluation.SCORES, next(losses))
        return scores | {"confusion": {"tokens": ["a"], "counts": [[1, 0]]}}

    monkeypatch.setattr(wikitext, "evaluate", judge)
    write(tmp_path / "a.txt", wiki(12))
    lab(run="x", data="a.txt", epochs=2)
    first, second, tested = seen
    assert all(torch.equal(tested[name], first[name]) for name in tested)
    assert not all(torch.equal(tested[name], second[name]) for name in tested)


def test_the_first_stage_changes_nothing_but_embedding_and_positions(lab, tmp_path):
    write(tmp_path / "a.txt", wiki(12))
    settings = dict(data="a.txt", epochs=2, batch_size=8, d_embedding=6, embedding_share=0.5)
    run = lab(run="x", stop_before=2, **settings)
    changed, before = [], checkpoint.load_weights(run / "checkpoints/last")
    for turns in (4, 5):  # to step 4, to step 8; 5 steps per epoch, and stage 2 begins with step 6
        lab(resume=str(run), stop_before=turns)
        after = checkpoint.load_weights(run / "checkpoints/last")
        changed.append({name for name in after if not torch.equal(after[name], before[name])})
        before = after
    assert changed == [{"embedding.weight", "up.weight", "up.bias", "positions"}, set(after)]


def test_the_handouts_preset_writes_all_down(lab, tmp_path, report_of):
    """And flags that are given as well win; a finished run is resumed for its samples."""
    write(tmp_path / "a.txt", wiki(12))
    glove = write(tmp_path / "g.txt", "the 1 2 3 4\nship -3 0 1 4\n")
    # No dropout: attention is then one fused operation on a CPU, which the FLOP count has to see.
    settings = dict(
        data="a.txt", epochs=1, batch_size=8, log_every=1, dropout=0.0, glove=str(glove)
    )
    settings["embedding_share"] = 0.5
    run = lab(run="x", preset="handout", **settings)
    config = json.loads((run / "config.json").read_text())
    assert config["lowercase"] and config["sampling"] == "dynamic" and config["epochs"] == 1
    assert config["resample_every"] == 10 and config["dim_feedforward"] == 32
    before = checkpoint.load_weights(run / "checkpoints/last")
    log = (run / "train.log").read_text()
    assert "GloVe: 4 numbers per word, projected to 16; " in log
    assert log.index("stage: embedding and") < log.index("stage: all weights")
    scores = result_of(run)
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    table, names = scores["confusion"]["counts"], scores["confusion"]["tokens"]
    assert len(table) == len(names) == 12 and "the" in names and "The" not in names
    assert "confusion: the occurs" in log and (run / "eval/confusion.png").exists()
    wanted = {"train/smoothed_loss", "train/loss", "valid/perplexity", "sampler/weight"}
    assert wanted <= {name for line in figures(run) for name in line}
    page = report_of(run)
    assert "<code>MultiheadAttention</code>" in page and f'value="{scores["perplexity"]}"' in page
    assert "Pennington et al. 2014" in page and "data key" not in page
    matrices = [weight for name, weight in before.items() if name != "positions"]
    products = sum(weight.numel() for weight in matrices if weight.dim() == 2)
    products += 2 * config["num_layers"] * config["seq_length"] * config["d_model"]  # of attention
    assert f'FLOPs of a training token</dt><dd><data value="{6 * products}"' in page

    glove.unlink()  # a resumed run has its embedding already
    lab(resume="runs/x", prompt="The ship")
    with refused("--glove 'other.txt' would change a fixed setting"):
        lab(resume="runs/x", glove="other.txt")
    assert "sample: **the ship**" in (run / "train.log").read_text()


def test_the_commands_that_meet_the_handout(lab, tmp_path, monkeypatch):
    """Those of the page, on a dozen articles; one process stands for torchrun's two."""
    write(tmp_path / "DIR/text.txt", wiki(12))
    write(tmp_path / "FILE", "the 1 2 3 4\nship -3 0 1 4\n")
    commands = handout_trainings(ROOT / "labs/wikitext/README.md", "labs.wikitext")
    assert len(commands) == 12
    small = (
        "--d_model 8 --nhead 1 --num_layers 1 --seq_length 8 --batch_size 64 --device cpu".split()
    )
    monkeypatch.setattr(wikitext, "HANDOUT", HANDOUT | {"dim_feedforward": 8})
    for number, (_, flags) in enumerate(commands):
        if "--epochs" in flags:
            flags.remove("40")
            flags.insert(flags.index("--epochs") + 1, "3")
        else:
            flags = ["--epochs", "1", *flags]
        monkeypatch.setattr(sys, "argv", ["wikitext", "--run", str(number), *small, *flags])
        run = wikitext.main(parse_flags(Config))
        assert result_of(run)["tokens"] > 0
    assert Path("runs/NAME/eval/confusion.png").exists()


def test_the_bundled_sample_never_passes_as_wikitext(lab, monkeypatch, report_of):
    """The log, the result and the report say so; the log says where WikiText is."""
    rows = [("船", f"the ship {number} sailed .") for number in range(60)]
    sample = SimpleNamespace(pairs=lambda split: rows)
    monkeypatch.setattr(texts, "find_text", lambda *words: sample)
    run = lab(run="x", epochs=1)
    note = "bundled sample, not WikiText-2: this score says only that the program works"
    log = (run / "train.log").read_text(encoding="utf-8")
    assert f"data: {note}. For WikiText-2 download" in log and f"note: {note}" in log
    assert result_of(run)["data"] == note and note in report_of(run)


@pytest.mark.parametrize(
    "change", [lambda text: text.replace("ship", "boat"), lambda text: text + "the ship\n"]
)
def test_resume_with_another_text_is_refused(lab, tmp_path, change):
    write(tmp_path / "a.txt", wiki(12))
    lab(run="x", data="a.txt", stop_before=2)
    write(tmp_path / "a.txt", change(wiki(12)))
    with refused("the text is not the one that the run began with"):
        lab(resume="runs/x")


def test_learns_a_markov_text_to_its_entropy(lab, tmp_path):
    """One of two tokens follows each of six: no model does better than ln 2 per token."""
    states = torch.randint(1, 3, (12_000,)).cumsum(0) % 6
    words = ["\n", "a ", "b ", "c ", "d ", "e "]
    write(tmp_path / "markov.txt", "".join(words[state] for state in states.tolist()))
    settings = dict(epochs=4, seq_length=16, dropout=0.0, label_smoothing=0.0, embedding_share=0.0)
    run = lab(run="m", data="markov.txt", lr=0.01, d_model=32, **settings)
    assert result_of(run)["loss"] == pytest.approx(math.log(2), abs=0.06)


def test_two_processes_have_the_losses_of_one(lab, tmp_path):
    write(tmp_path / "text/train.txt", wiki(12))
    # Words in an order that the training text does not have: sampling reacts.
    write(tmp_path / "text/valid.txt", "small sailed . the crew = of The was ship\n" * 20)
    glove = write(tmp_path / "g.txt", "the 1 2 3 4\nship -3 0 1 4\n")
    # The width of GloVe's vectors is settled by the text, which rank 0 alone reads. The last batch
    # of an epoch has one segment: there is none for rank 1.
    settings = dict(data="text", epochs=2, glove=str(glove), dropout=0.0, log_every=1)
    settings |= dict(batch_size=2, lr=0.01, sampling="dynamic")
    one = lab(run="one", **settings)
    flags = []
    for name, value in (TINY | settings).items():
        flags += [f"--{name}", str(value)]
    forked_ranks(2, "labs/wikitext/__main__.py", "--run", "two", *flags, cwd=tmp_path)
    expected, two = figures(one), figures(Path("runs/two"))
    segments = json.loads((one / "checkpoints/last/state.json").read_text())["sampler"]["segments"]
    assert len(segments) % 2 == 1 and max(line.get("sampler/weight", 0) for line in expected) > 0
    assert len(expected) == len(two) > 10
    for ours, theirs in zip(two, expected):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


def test_a_run_begins_with_the_weights_and_vocabulary_of_another(lab, tmp_path):
    write(tmp_path / "a.txt", wiki(12))
    write(tmp_path / "b.txt", wiki(12, first=6).replace("ship", "boat"))
    first = lab(run="first", data="a.txt", epochs=1, dim_feedforward=16, lowercase=True)
    weights = checkpoint.load_weights(first / "checkpoints/last")
    own = dict(data="b.txt", epochs=1, device="cpu", precision="fp32")
    for number, source in enumerate(("first", "runs/first/checkpoints/last/model.safetensors")):
        second = lab(init=source, run=f"second{number}", lr=1e-9, **own)
        config = json.loads((second / "config.json").read_text())
        assert config["dim_feedforward"] == 16 and config["lowercase"]
        words = (second / "vocabulary.txt").read_text()
        assert words == (first / "vocabulary.txt").read_text() and "boat" not in words
        after = checkpoint.load_weights(second / "checkpoints/last")
        for name, weight in weights.items():
            torch.testing.assert_close(after[name], weight, rtol=1e-5, atol=1e-6)
    # A stopped run does not need the other one any more.
    stopped = lab(init="first", run="stopped", stop_before=3, **own)
    shutil.rmtree(first)
    lab(resume=str(stopped))
    assert result_of(stopped)["tokens"] > 0


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(d_model=32), "its --d_model is 16, so it cannot be 32; leave the flag out"),
        (dict(glove="g.txt"), "so --glove has no effect; leave the flag out"),
        (dict(init="other"), "other does not exist; give a run directory"),
        (dict(init="weights.pt"), "weights.pt is not a run of labs.wikitext, nor inside one"),
    ],
)
def test_weights_that_do_not_fit_are_refused(lab, tmp_path, settings, message):
    write(tmp_path / "a.txt", wiki(12))
    first = lab(run="first", data="a.txt", epochs=1)
    torch.save(checkpoint.load_weights(first / "checkpoints/last"), tmp_path / "weights.pt")
    config = checked(Config(**(dict(init="first", data="a.txt", run="x", device="cpu") | settings)))
    config.given = set(settings)
    with refused(message):
        wikitext.main(config)
    assert not Path("runs/x").exists()


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(ratios="0.8,0.3,0.1"), "three numbers above 0 that add up to 1"),
        (dict(ratios="0.8,nan,0.1"), "three numbers above 0 that add up to 1"),
        (dict(vocab_size=2), "needs at least 3"),
        (dict(data="nowhere"), "no such file or folder"),
        (dict(data="blank.txt"), "holds no text"),
        (dict(data="line.txt"), "too few to cut 3 splits"),
        (dict(data="short.txt", seq_length=64), "less than one --seq_length"),
        (dict(data="both"), "train is both wiki.train.raw, wiki.train.tokens; remove"),
        (dict(preset="handout"), "unpack https://nlp.stanford.edu/data/glove.6B.zip"),
        (dict(glove="broken.txt"), "not a file of vectors (line 2 has 2 numbers instead of 3)"),
        (dict(glove="empty.txt"), "not a file of vectors (it is empty)"),
        (dict(glove="header.txt"), "line 1 is not a word and its numbers; delete a header line"),
        (dict(glove="foreign.txt"), "none of its words is in the vocabulary"),
        (dict(glove="good.txt", d_embedding=7), "these GloVe vectors have 3 numbers"),
    ],
)
def test_mistakes_are_named_in_one_line(lab, tmp_path, settings, message):
    files = {
        "blank.txt": " \n\n",
        "line.txt": "a b c",
        "short.txt": "a b\n" * 10,
        "good.txt": "the 1 2 3\n",
        "broken.txt": "the 1 2 3\nship 1 2\n",
        "empty.txt": "",
        "header.txt": "1 3\nthe 1 2 3\n",
        "foreign.txt": "le 1 2\n",
        "wiki.txt": wiki(),
        "both/wiki.train.raw": wiki(),
        "both/wiki.train.tokens": wiki(),
    }
    for name, text in files.items():
        write(tmp_path / name, text)
    with refused(message):
        lab(**dict(data="wiki.txt", run="x") | settings)
    assert not Path("runs/x").exists()


def test_the_losses_of_a_text_are_set_in_lines():
    words = ["a" * 40, "b" * 36, "c", EOS, EOS, "d"]
    places = [(0, 0), (0, 41), (1, 0), (1, 2), (2, 0), (3, 0)]
    assert positions_in_lines(words) == places
    axes = token_loss_figure(words, [0.0, 1, 2, 3, 4, 20]).axes[0]
    assert [text.get_text() for text in axes.texts] == [*words[:3], "↵", "↵", "d"]
    darkness = [sum(text.get_bbox_patch().get_facecolor()[:3]) for text in axes.texts]
    assert darkness == sorted(darkness, reverse=True)


@pytest.mark.filterwarnings("error:Glyph")
def test_the_confusion_table_shows_chinese(tmp_path):
    figure = confusion_figure(["你", "$_$"], [[1, 0, 0], [0, 1, 0]])
    figure.savefig(tmp_path / "confusion.png")
