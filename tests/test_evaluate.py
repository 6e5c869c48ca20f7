"""Scoring: each row one hypothesis, in order, on any number of processes; the raw references; the honest labels."""

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ROOT,
    TINY_FLAGS,
    forked,
    forked_ranks,
    reversed_digits,
    run_script,
    write_pairs,
)

import fast
from data import collate_for
from decoding import Translations, beam_search, output_limit, plan_batches, search, translate_lines
from engine.distributed import World
from engine.errors import UserError
from engine.precision import choose_precision
from evaluate import Config, load_rows, report, teacher_forced_match
from loading import load_for_decoding, load_trained
from text.bleu import corpus_bleu
from text.output import keep_score
from text.subwords import encode


def evaluate(folder: Path, *flags) -> str:
    return forked("evaluate.py", *flags, cwd=folder)


def references(toy_data: Path, split: str = "test") -> list[str]:
    return [
        json.loads(line)["en"]
        for line in (toy_data / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def test_the_card_is_the_score_of_the_written_hypotheses(toy_run, toy_data):
    """The system test too: data → tokenizers → training → greedy decoding → BLEU, nothing mocked."""
    output = evaluate(toy_run, "--ckpt", "runs/toy", "--out", "hypotheses.txt")
    hypotheses = (toy_run / "hypotheses.txt").read_text(encoding="utf-8").splitlines()
    card = json.loads((toy_run / "runs/toy/eval/test-greedy.json").read_text())
    assert (
        len(hypotheses) == 100 == card["sentences"] and card["nltk"] > 95
    )  # it has learned to reverse
    assert (card["decoding"], card["precision"]) == ("greedy", "fp32")
    assert card["nltk"] == pytest.approx(corpus_bleu(references(toy_data), hypotheses), abs=0.005)
    assert (toy_run / "runs/toy/eval/test-greedy.txt").read_text() == (
        toy_run / "hypotheses.txt"
    ).read_text()
    for words in (
        "nltk corpus_bleu",
        "scale 0–100",
        "sacreBLEU",
        "nrefs:1|case:mixed",
        "chrF2",
        "brevity",
        "greedy",
        "95 % interval",
        "sentences/s",
        "tokens/s",
        "length limit",
    ):
        assert words in output
    assert output.count("  reference  ") == 3 and "teacher" not in output


@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_many_processes_write_the_same_file(toy_run, ranks):
    evaluate(toy_run, "--out", "one.txt")
    output = forked_ranks(ranks, "evaluate.py", "--out", "many.txt", cwd=toy_run)
    assert (toy_run / "many.txt").read_bytes() == (toy_run / "one.txt").read_bytes()
    assert output.count("nltk corpus_bleu") == 1


def test_the_card_heeds_case(tmp_path):
    """And it is references first: these hypotheses are too short, and pay for it."""
    rows = [("一", "The Cat sat on the Mat in the Sun"), ("二", "He likes green Tea very much")]
    texts = ["The cat sat on the mat", "He likes green Tea"]
    trained = SimpleNamespace(config={"target": "en"}, run=tmp_path, name="x")
    scored, translations = (
        {"data": "data", "split": "test", "note": ""},
        Translations(texts, 9, 3, 0),
    )
    said = []
    card = report(
        Config(), trained, scored, rows, translations, 1.0, lambda *line: said.extend(line)
    )
    assert all(
        words in "\n".join(said)
        for words in ("3 outputs reached the length limit", "n-gram precisions")
    )
    assert card["nltk"] == pytest.approx(corpus_bleu([target for _, target in rows], texts))
    assert (
        card["decoding"] == "greedy"
        and card["brevity_penalty"] < 1
        and card["nltk"] < card["lowercase"] - 10
    )


@pytest.mark.parametrize("data, times", [(ROOT / "sample", 1), ("/opt/minidataset", 0)])
def test_the_card_of_the_sample_says_so(tmp_path, data, times):
    trained = SimpleNamespace(config={"target": "en"}, run=tmp_path, name="x")
    scored, rows, said = {"data": str(data), "split": "test", "note": ""}, [("一", "one")], []
    report(
        Config(),
        trained,
        scored,
        rows,
        Translations(["one"], 1, 0, 0),
        1.0,
        lambda *line: said.extend(line),
    )
    assert "\n".join(said).count("bundled sample, not WMT19: this score says only that") == times


def test_outputs_that_never_end_are_counted_over_all_ranks(tiny_run):
    trained = load_trained(str(tiny_run))
    trained.model.output.bias.data[2] = -1e9  # the end token
    world = SimpleNamespace(
        rank=0, size=1, on_main=lambda work: work(), gather=lambda share: [share, ({}, 7, 5)]
    )
    tools = trained.model, trained.source_tokenizer, trained.target_tokenizer
    assert translate_lines(*tools, ["一", "", "二三"], world=world).capped == 2 + 5


def test_a_chinese_target_is_scored_by_characters(tmp_path):
    trained = SimpleNamespace(config={"target": "zh"}, run=tmp_path, name="x")
    scored, rows = {"data": "data", "split": "test", "note": ""}, [("a", "我们明天去北京。")]
    card = report(
        Config(),
        trained,
        scored,
        rows,
        Translations(["我们明天到北京。"], 9, 0, 0),
        1.0,
        lambda *_: None,
    )
    assert "tok:zh|" in card["signature"]


def test_every_row_gets_a_hypothesis_whatever_is_in_it(toy_run, tmp_path):
    rows = [
        ("一二三四", "four three two one"),
        ("", "nothing"),
        ("五", ""),
        (" \t\x00 ", "  "),
        ("一二三四", "again"),
        ("九" * 3000, "too long"),
        ("一\n二\u2028三", "three two one"),
        ("emoji 😀 \ufeff", "x"),
    ]
    data = write_pairs(tmp_path / "odd", rows, {"test": slice(None)})
    output = evaluate(toy_run, "--data", data, "--out", tmp_path / "out.txt")
    lines = (tmp_path / "out.txt").read_text(encoding="utf-8").split("\n")
    assert len(lines) == len(rows) + 1 and lines[-1] == ""
    assert lines[1] == lines[3] == "" and lines[0] == lines[4] != ""
    assert "1 sources were cut to the model's limit of 512 tokens" in output


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_each_split_gives_its_own_raw_rows(toy_data, split, monkeypatch):
    trained = SimpleNamespace(config={"data": str(toy_data), "source": "zh", "target": "en"})
    monkeypatch.setattr("evaluate.held_out_rows", None)  # would read all of train
    rows, scored = load_rows(Config(split=split), trained)
    assert [target for _, target in rows] == references(toy_data, split)
    assert (scored["data"], scored["split"]) == (str(toy_data), split)
    assert load_rows(Config(split=split, limit=7), trained)[0] == rows[:7]
    monkeypatch.setenv("HOME", str(toy_data.parent))
    assert load_rows(Config(split=split, data=f"~/{toy_data.name}"), trained) == (
        rows,
        scored,
    )  # the run's own


def test_beams_find_likelier_sequences_than_greedy(toy_run):
    trained = load_trained(str(toy_run / "runs/toy"))
    collate, rows = collate_for(trained), load_rows(Config(), trained)[0]
    src, src_pad = collate.pad_sources(
        encode(trained.source_tokenizer, [source for source, _ in rows])
    )
    limits = output_limit((~src_pad).sum(1), trained.model.config.max_length)
    ids = collate.target_ids["bos"], collate.target_ids["eos"]
    one, four = (
        beam_search(trained.model, src, src_pad, limits, *ids, beam, 0.0)[1][:, 0]
        for beam in (1, 4)
    )
    # No theorem for one sentence: a beam may drop the greedy path for others that are likelier for a while.
    less = (one - four).clamp(min=0)  # 1e-4: rounding, where both find the same
    assert (less > 1e-4).sum() <= 3 and four.mean() >= one.mean() - 1e-4


def test_trained_weights_cached_greedy_equals_the_stock_model(toy_run):
    trained = load_trained(str(toy_run / "runs/toy"))
    model = trained.model.double()
    collate = collate_for(trained)
    sources = encode(
        trained.source_tokenizer, [source for source, _ in load_rows(Config(limit=40), trained)[0]]
    )
    src, src_pad = collate.pad_sources(sources)
    output = torch.full((len(sources), 1), collate.target_ids["bos"])
    with torch.no_grad():
        for _ in range(40):
            output = torch.cat(
                [output, model(src, src_pad, output)[:, -1].argmax(-1, keepdim=True)], 1
            )
    eos = collate.target_ids["eos"]
    limits = output_limit((~src_pad).sum(1), 512).tolist()
    expected = [
        row[: row.index(eos)] if eos in row[:n] else row[:n]
        for row, n in zip(output[:, 1:].tolist(), limits)
    ]
    assert (
        search(model, sources, collate, batches=plan_batches(list(map(len, sources)), 9)).tokens
        == expected
    )


def test_the_length_penalty_is_heeded(tiny_run):
    """Of a model that has learned little, whose long outputs are unlikely."""
    trained = load_trained(tiny_run)
    tools = trained.model, trained.source_tokenizer, trained.target_tokenizer
    lines = [source for source, _ in reversed_digits(30, seed=3)]
    short, long = (
        translate_lines(*tools, lines, beam=4, length_penalty=penalty) for penalty in (0.0, 5.0)
    )
    assert long.tokens > short.tokens and long.texts != short.texts


def test_ranks_on_unlike_machines_follow_one_plan(tiny_run):
    trained, plans, shares = load_trained(tiny_run), [], []
    tools, lines = (
        (trained.model, trained.source_tokenizer, trained.target_tokenizer),
        [str(n) for n in range(10, 80)],
    )
    for rank in (0, 1):
        torch.set_num_threads(1 + 3 * rank)  # which a fixture takes back
        world = SimpleNamespace(rank=rank, size=2, gather=shares.append)
        world.on_main = lambda work: plans.append(work()) or plans[0]
        translate_lines(*tools, lines, world=world)
    assert plans[0] != plans[1]
    assert sorted(row for texts, *_ in shares for row in texts) == [*range(len(lines))]


def test_int8_from_the_command_line(toy_run):
    try:
        fast.steps(load_trained(toy_run / "runs/toy").model, int8=True)
    except UserError as error:
        pytest.skip(str(error))
    output = evaluate(toy_run, "--precision", "int8")
    assert "rounded to 8 bits" in output and "greedy, int8" in output
    evaluate(toy_run)
    scores = [
        json.loads((toy_run / f"runs/toy/eval/{name}.json").read_text())["nltk"]
        for name in ("test-greedy", "test-greedy-int8")
    ]
    assert abs(scores[0] - scores[1]) < 3


def test_teacher_forcing_is_labelled_and_flatters(toy_run):
    output = evaluate(toy_run, "--teacher_forced")
    line = next(line for line in output.splitlines() if line.startswith("teacher-forced"))
    assert "NOT a BLEU and not comparable" in line
    trained = load_trained(str(toy_run / "runs/toy"))
    rows, _ = load_rows(Config(), trained)
    world = World(0, 1, torch.device("cpu"))
    rate = teacher_forced_match(trained, rows, world, choose_precision(world.device))
    assert f"{rate:.2f}" in line
    collate = collate_for(trained)
    right = total = 0
    for source, target in rows:  # by hand, one pair at a time
        pair = (
            encode(trained.source_tokenizer, [source])[0],
            encode(trained.target_tokenizer, [target])[0],
        )
        batch = collate([pair])
        with torch.no_grad():
            logits = trained.model(batch.src, batch.src_pad, batch.tgt_in)[0]
        right += (logits.argmax(-1) == batch.tgt_out).sum().item()
        total += len(batch.tgt_out)
    assert rate == pytest.approx(100 * right / total, abs=0.2)
    formats = []
    trained.model.output.register_forward_hook(
        lambda part, taken, logits: formats.append(logits.dtype)
    )
    teacher_forced_match(trained, rows[:9], world, choose_precision(world.device, "bf16"))
    assert set(formats) == {torch.float32}


def test_data_without_splits_is_scored_on_the_part_that_was_cut_off(tmp_path, capsys):
    pairs = reversed_digits(1500)
    data = write_pairs(tmp_path / "flat", pairs)
    output = forked(
        "train.py", "--data", data, *TINY_FLAGS, "--max_steps", 2, "--run", "r", cwd=tmp_path
    )
    assert "no validation split" in output and "no test split" in output
    first = first_line_of_card(evaluate(tmp_path, "--out", "out.txt"))
    assert first.startswith("split      test (cut from train: the data have neither ")
    trained = load_trained(str(tmp_path / "runs/r"))
    rows, _ = load_rows(Config(), trained)
    assert 3 <= len(rows) < 60 and len((tmp_path / "out.txt").read_text().splitlines()) == len(rows)
    assert set(rows) < set(pairs)
    moved = data.rename(tmp_path / "moved")
    found, scored = load_rows(Config(data=str(moved)), trained)
    assert found == rows and (scored["split"], scored["own"]) == ("test", True)
    alone = load_trained(str(trained.checkpoint / "model.safetensors"))  # of a whole checkpoint
    assert load_rows(Config(data=str(moved)), alone)[0] == rows
    assert not capsys.readouterr().err
    write_pairs(data, pairs[1:])
    load_rows(Config(), trained)
    assert "is not as the run found it" in capsys.readouterr().err
    write_pairs(moved, pairs[1:])  # these are other data
    found, scored = load_rows(Config(data=str(moved)), trained)
    assert found == pairs[1:] and (scored["split"], scored["own"]) == ("all", False)


def first_line_of_card(output: str) -> str:
    """The line before the graded number."""
    lines = output.splitlines()
    (bleu,) = (place for place, line in enumerate(lines) if line.startswith("BLEU (nltk"))
    assert not lines[bleu - 2]
    return lines[bleu - 1]


@pytest.fixture(scope="module")
def without_test(tmp_path_factory) -> Path:
    """A folder with runs/r and its data: like the course's, they have train and validation, and no test split."""
    folder = tmp_path_factory.mktemp("without_test")
    splits = {"train": slice(0, 1500), "validation": slice(1500, 1540)}
    data = write_pairs(folder / "data", reversed_digits(1540), splits)
    flags = ["--data", data, *TINY_FLAGS, "--max_steps", 2, "--run", "r"]
    output = forked("train.py", *flags, cwd=folder)
    assert "no test split; evaluate.py scores validation, and train keeps its rows" in output
    return folder


def test_data_without_a_test_split_are_scored_on_their_validation_split(without_test):
    output = evaluate(without_test)
    expected = "split      validation (the data have no test split; it also chose the checkpoint)"
    assert first_line_of_card(output) == expected and ", split validation, 40 rows" in output
    score = json.loads((without_test / "runs/r/eval/validation-greedy.json").read_text())
    assert (score["split"], score["cut"], score["sentences"]) == ("validation", False, 40)
    trained = load_trained(str(without_test / "runs/r"))
    rows, _ = load_rows(Config(), trained)
    assert rows == reversed_digits(1540)[1500:]
    run = json.loads((without_test / "runs/r/data.json").read_text())
    assert run["counts"]["read"] == run["counts"]["kept"] == 1500
    with pytest.raises(UserError, match="no test split; leave --split out to score validation"):
        load_rows(Config(split="test"), trained)


def test_moved_data_still_chose_the_checkpoint(without_test, tmp_path):
    trained = load_trained(str(without_test / "runs/r"))
    moved = shutil.copytree(without_test / "data", tmp_path / "moved")
    _, scored = load_rows(Config(data=str(moved)), trained)
    assert scored["own"] and "it also chose the checkpoint" in scored["note"]
    rows = reversed_digits(50, seed=1)
    write_pairs(moved, rows, {"train": slice(0, 30), "validation": slice(30, 50)})
    found, scored = load_rows(Config(data=str(moved)), trained)  # other data
    assert found == rows[30:] and not scored["own"]
    assert scored["note"] == "the data have no test split"


def test_the_first_line_of_the_card_names_the_split(tiny_run, tmp_path):
    run = shutil.copytree(tiny_run, tmp_path / "run")
    notes = {
        (): "test",
        ("--split", "test"): "test",
        ("--split", "validation"): "validation (it also chose the checkpoint)",
        ("--split", "train"): "train (the model has learned these rows)",
    }
    for flags, expected in notes.items():
        output = evaluate(tmp_path, "--ckpt", run, "--limit", 5, *flags)
        assert first_line_of_card(output) == f"split      {expected}"


def test_a_model_that_was_handed_on_without_its_checkpoints(tiny_run, tmp_path):
    given = shutil.copytree(
        tiny_run, tmp_path / "given", ignore=shutil.ignore_patterns("checkpoints", "eval")
    )
    shutil.copy(tiny_run / "checkpoints/best/model.safetensors", given)
    for number in (1, 2):
        evaluate(tmp_path, "--ckpt", "given/model.safetensors", "--limit", number)
        assert len(list((given / "eval").glob("test-greedy*.json"))) == number
        (given / "checkpoints").mkdir(exist_ok=True)  # an empty one is none
    (given / "checkpoints/step-5").mkdir()  # nor one of which only the weights were copied
    (given / "model.safetensors").rename(given / "checkpoints/step-5/model.safetensors")
    evaluate(tmp_path, "--ckpt", "given/checkpoints/step-5/model.safetensors", "--limit", 2)
    assert (given / "eval/test-greedy-first2-step-5.json").exists()


@pytest.mark.slow
def test_real_test_split(real_data, tmp_path):
    """2,001 rows, one hypothesis each, with a model that has hardly begun."""
    flags = ["--data", real_data, "--max_steps", 2, "--source_vocab", 1000, "--target_vocab", 1000]
    assert run_script("train.py", *flags, "--run", "r", cwd=tmp_path, threads=2).returncode == 0
    evaluate(tmp_path, "--out", "out.txt")
    assert len((tmp_path / "out.txt").read_text(encoding="utf-8").splitlines()) == 2001


def test_a_cpu_scores_in_fp32(toy_run, monkeypatch):
    monkeypatch.setattr("engine.precision._cpu_flags", lambda: "avx512_bf16 amx_bf16")
    settings = Config(ckpt=str(toy_run / "runs/toy"))
    _, precision, _ = load_for_decoding(settings, 1, World(0, 1, torch.device("cpu")), print)
    assert precision.name == "fp32"


@pytest.mark.parametrize(
    "number, note", [(errno.EACCES, "not saved"), (errno.EROFS, "not saved"), (errno.ENOSPC, "")]
)
def test_a_run_that_is_only_for_reading_is_scored_all_the_same(tmp_path, monkeypatch, number, note):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    said = []
    with (
        contextlib.nullcontext() if note else pytest.raises(OSError)
    ):  # a full disk is another matter
        keep_score(tmp_path / "eval", "test-greedy", {}, [], said.append)
    assert [note in line for line in said] == [True] * bool(note)
