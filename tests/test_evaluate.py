"""Scoring: one hypothesis a row, in order, on any number of processes; raw references, honest labels."""

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY_FLAGS, forked, forked_ranks, reversed_digits, write_pairs

import fast
from data import collate_for
from decoding import Translations, beam_search, output_limit, plan_batches, search, translate_lines
from engine.distributed import World
from engine.errors import UserError
from engine.precision import choose_precision
from evaluate import Config, load_rows, report, save_score, teacher_forced_match
from loading import load_for_decoding, load_trained
from text.bleu import corpus_bleu
from text.subwords import encode

CPU = World(0, 1, torch.device("cpu"))


def evaluate(folder: Path, *flags) -> str:
    return forked("evaluate.py", *flags, cwd=folder)


def read_score(run: Path, name: str) -> dict:
    return json.loads((run / "eval" / f"{name}.json").read_text())


def references(toy_data: Path, split: str = "test") -> list[str]:
    lines = (toy_data / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["en"] for line in lines]


# ---------------------------------------------------------------- the card


def test_the_card_is_the_score_of_the_written_hypotheses(toy_run, toy_data):
    """The system test too: data → tokenizers → training → greedy decoding → BLEU, nothing mocked."""
    output = evaluate(toy_run, "--ckpt", "runs/toy", "--out", "hypotheses.txt", "--teacher_forced")
    hypotheses = (toy_run / "hypotheses.txt").read_text(encoding="utf-8").splitlines()
    card = read_score(toy_run / "runs/toy", "test-greedy")
    assert len(hypotheses) == 100 == card["sentences"]
    assert card["nltk"] > 95  # it has learned to reverse
    assert (card["decoding"], card["precision"]) == ("greedy", "fp32")
    assert card["nltk"] == pytest.approx(corpus_bleu(references(toy_data), hypotheses), abs=0.005)
    saved = (toy_run / "runs/toy/eval/test-greedy.txt").read_text(encoding="utf-8")
    assert saved.splitlines() == hypotheses
    words = ["nltk corpus_bleu", "scale 0–100", "nrefs:1|case:mixed", "chrF2", "brevity"]
    words += ["95 % interval", "sentences/s", "tokens/s", "length limit"]
    assert all(word in output for word in words)
    assert output.count("  reference  ") == 3

    # The teacher-forced number is labelled, and it is the one that is computed by hand.
    (line,) = (line for line in output.splitlines() if line.startswith("teacher-forced"))
    assert "NOT a BLEU and not comparable" in line
    trained = load_trained(str(toy_run / "runs/toy"))
    rows, _ = load_rows(Config(), trained)
    rate = teacher_forced_match(trained, rows, CPU, choose_precision(CPU.device))
    assert f"{rate:.2f}" in line
    right = total = 0
    for source, target in rows:  # one pair at a time
        (source,) = encode(trained.source_tokenizer, [source])
        (target,) = encode(trained.target_tokenizer, [target])
        batch = collate_for(trained)([(source, target)])
        logits = trained.model(batch.src, batch.src_pad, batch.tgt_in)[0]
        right += (logits.argmax(-1) == batch.tgt_out).sum().item()
        total += len(batch.tgt_out)
    assert rate == pytest.approx(100 * right / total, abs=0.2)


def test_two_processes_write_the_same_file(toy_run):
    evaluate(toy_run, "--out", "one.txt")
    output = forked_ranks(2, "evaluate.py", "--out", "many.txt", cwd=toy_run)
    assert (toy_run / "many.txt").read_bytes() == (toy_run / "one.txt").read_bytes()
    assert output.count("nltk corpus_bleu") == 1


def card_of(rows, texts, target="en", data="data") -> tuple[dict, str]:
    """The figures and the printed lines of these translations."""
    trained = SimpleNamespace(config={"target": target}, name="x")
    scored = {"data": str(data), "split": "test", "note": ""}
    lines = []
    translations = Translations(texts, 9, 3, 0)
    figures = report(Config(), trained, scored, rows, translations, 1.0, lines.append)
    return figures, "\n".join(lines)


def test_the_card_heeds_case_and_length():
    """And references come first: these hypotheses are too short and pay for it."""
    rows = [("一", "The Cat sat on the Mat in the Sun"), ("二", "He likes green Tea very much")]
    texts = ["The cat sat on the mat", "He likes green Tea"]
    card, printed = card_of(rows, texts)
    assert "3 outputs reached the length limit" in printed and "n-gram precisions" in printed
    assert card["nltk"] == pytest.approx(corpus_bleu([target for _, target in rows], texts))
    assert card["brevity_penalty"] < 1 and card["nltk"] < card["lowercase"] - 10


@pytest.mark.parametrize("data, times", [(ROOT / "sample", 1), ("/opt/minidataset", 0)])
def test_the_card_of_the_sample_says_so(data, times):
    _, printed = card_of([("一", "one")], ["one"], data=data)
    assert printed.count("bundled sample, not WMT19: this score says only that") == times


def test_a_chinese_target_is_scored_by_characters():
    card, _ = card_of([("a", "我们明天去北京。")], ["我们明天到北京。"], target="zh")
    assert "tok:zh|" in card["signature"]


@pytest.mark.parametrize("number, read_only", [(errno.EROFS, True), (errno.ENOSPC, False)])
def test_somebody_elses_run_is_scored_all_the_same(tmp_path, monkeypatch, number, read_only):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    lines = []
    full = contextlib.nullcontext() if read_only else pytest.raises(OSError)
    with full:
        save_score(tmp_path / "eval", "test-greedy", {}, [], lines.append)
    assert len(lines) == read_only and all("the score is not saved" in line for line in lines)


# ---------------------------------------------------------------- which rows


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
    config = {"data": str(toy_data), "source": "zh", "target": "en"}
    trained = SimpleNamespace(config=config, run=toy_data, checkpoint=toy_data)
    monkeypatch.setattr("evaluate.held_out_rows", None)  # would read all of train
    rows, scored = load_rows(Config(split=split), trained)
    assert [target for _, target in rows] == references(toy_data, split)
    assert (scored["data"], scored["split"]) == (str(toy_data), split)
    assert load_rows(Config(split=split, limit=7), trained)[0] == rows[:7]
    monkeypatch.setenv("HOME", str(toy_data.parent))  # the run's own data under another name
    assert load_rows(Config(split=split, data=f"~/{toy_data.name}"), trained) == (rows, scored)


def test_the_note_says_what_the_split_and_the_checkpoint_are(tiny_run):
    """Only the best checkpoint was chosen by the validation split."""
    best = (tiny_run / "checkpoints/best").resolve()
    (other, *_) = (path for path in tiny_run.glob("checkpoints/step-*") if path != best)
    chosen = "it also chose the checkpoint"
    learned = "the model has learned these rows"
    notes = {
        ("", "test", 1): "",
        ("", "validation", 1): chosen,
        ("checkpoints/best/model.safetensors", "validation", 1): chosen,
        (f"checkpoints/{other.name}", "validation", 1): "",
        ("", "validation", 2): "",  # the mean of two
        ("", "train", 1): learned,
    }
    for (named, split, average), expected in notes.items():
        trained = load_trained(tiny_run / named, average)
        _, scored = load_rows(Config(split=split, average=average, limit=5), trained)
        assert scored["note"] == expected, (named, split, average)


def first_line_of_card(output: str) -> str:
    """The line before the graded number."""
    lines = output.splitlines()
    (bleu,) = (place for place, line in enumerate(lines) if line.startswith("BLEU (nltk"))
    assert not lines[bleu - 2]
    return lines[bleu - 1]


@pytest.fixture(scope="module")
def without_test(tmp_path_factory) -> Path:
    """A folder with runs/r and its data, which have no test split, as those of the course."""
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
    score = read_score(without_test / "runs/r", "validation-greedy")
    assert (score["split"], score["cut"], score["sentences"]) == ("validation", False, 40)
    trained = load_trained(str(without_test / "runs/r"))
    rows, _ = load_rows(Config(), trained)
    assert rows == reversed_digits(1540)[1500:]
    run = json.loads((without_test / "runs/r/data.json").read_text())
    assert run["counts"]["read"] == run["counts"]["kept"] == 1500
    with pytest.raises(UserError, match=r"no test split \(it has train, validation\); leave"):
        load_rows(Config(split="test"), trained)


def test_data_that_have_moved_still_chose_the_checkpoint(without_test, tmp_path):
    trained = load_trained(str(without_test / "runs/r"))
    moved = shutil.copytree(without_test / "data", tmp_path / "moved")
    _, scored = load_rows(Config(data=str(moved)), trained)
    assert scored["own"] and "it also chose the checkpoint" in scored["note"]
    rows = reversed_digits(50, seed=1)
    write_pairs(moved, rows, {"train": slice(0, 30), "validation": slice(30, 50)})
    found, scored = load_rows(Config(data=str(moved)), trained)  # other data
    assert found == rows[30:] and not scored["own"]
    assert scored["note"] == "the data have no test split"


def test_data_without_splits_are_scored_on_the_part_that_was_cut_off(tmp_path, capsys):
    pairs = reversed_digits(1500)
    data = write_pairs(tmp_path / "flat", pairs)
    flags = ["--data", data, *TINY_FLAGS, "--max_steps", 2, "--run", "r"]
    output = forked("train.py", *flags, cwd=tmp_path)
    assert "no validation split" in output and "no test split" in output
    first = first_line_of_card(evaluate(tmp_path, "--out", "out.txt"))
    assert first.startswith("split      test (cut from train: the data have neither ")
    trained = load_trained(str(tmp_path / "runs/r"))
    rows, _ = load_rows(Config(), trained)
    assert 3 <= len(rows) < 60 and set(rows) < set(pairs)
    assert len((tmp_path / "out.txt").read_text().splitlines()) == len(rows)

    moved = data.rename(tmp_path / "moved")
    found, scored = load_rows(Config(data=str(moved)), trained)
    assert found == rows and (scored["split"], scored["own"]) == ("test", True)
    alone = load_trained(str(trained.checkpoint / "model.safetensors"))
    assert load_rows(Config(data=str(moved)), alone)[0] == rows
    assert not capsys.readouterr().err
    write_pairs(data, pairs[1:])
    load_rows(Config(), trained)
    assert "has changed since the training" in capsys.readouterr().err
    write_pairs(moved, pairs[1:])  # these are other data
    found, scored = load_rows(Config(data=str(moved)), trained)
    assert found == pairs[1:] and (scored["split"], scored["own"]) == ("all", False)


def test_a_model_that_was_handed_on_without_its_checkpoints(tiny_run, tmp_path):
    left_out = shutil.ignore_patterns("checkpoints", "eval")
    given = shutil.copytree(tiny_run, tmp_path / "given", ignore=left_out)
    shutil.copy(tiny_run / "checkpoints/best/model.safetensors", given)
    output = evaluate(tmp_path, "--ckpt", "given/model.safetensors", "--split", "validation")
    assert first_line_of_card(output) == "split      validation"
    assert (given / "eval/validation-greedy-given.json").exists()
    # A checkpoint of which only the weights were copied.
    (given / "checkpoints/step-5").mkdir(parents=True)
    (given / "model.safetensors").rename(given / "checkpoints/step-5/model.safetensors")
    evaluate(tmp_path, "--ckpt", "given/checkpoints/step-5/model.safetensors", "--limit", 2)
    assert (given / "eval/test-greedy-first2-step-5.json").exists()


# ---------------------------------------------------------------- decoding with trained weights


def test_outputs_that_never_end_are_counted_over_all_ranks(tiny_run):
    trained = load_trained(str(tiny_run))
    trained.model.output.bias.data[2] = -1e9  # the end token
    world = SimpleNamespace(
        rank=0, size=1, on_main=lambda work: work(), gather=lambda share: [share, ({}, 7, 5)]
    )
    tools = trained.model, trained.source_tokenizer, trained.target_tokenizer
    assert translate_lines(*tools, ["一", "", "二三"], world=world).capped == 2 + 5


def test_beams_find_likelier_sequences_than_greedy(toy_run):
    trained = load_trained(str(toy_run / "runs/toy"))
    collate, rows = collate_for(trained), load_rows(Config(), trained)[0]
    sources = encode(trained.source_tokenizer, [source for source, _ in rows])
    src, src_pad = collate.pad_sources(sources)
    limits = output_limit((~src_pad).sum(1), trained.model.config.max_length)
    ids = collate.target_ids["bos"], collate.target_ids["eos"]
    one, four = (
        beam_search(trained.model, src, src_pad, limits, *ids, beam, 0.0)[1][:, 0]
        for beam in (1, 4)
    )
    # No theorem for one sentence: a beam may drop the greedy path for likelier beginnings.
    less = (one - four).clamp(min=0)  # 1e-4: rounding, where both find the same
    assert (less > 1e-4).sum() <= 3 and four.mean() >= one.mean() - 1e-4


def test_cached_greedy_search_equals_the_stock_model(toy_run):
    trained = load_trained(str(toy_run / "runs/toy"))
    model, collate = trained.model.double(), collate_for(trained)
    lines = [source for source, _ in load_rows(Config(limit=40), trained)[0]]
    sources = encode(trained.source_tokenizer, lines)
    src, src_pad = collate.pad_sources(sources)
    output = torch.full((len(sources), 1), collate.target_ids["bos"])
    for _ in range(40):
        following = model(src, src_pad, output)[:, -1].argmax(-1, keepdim=True)
        output = torch.cat([output, following], 1)
    eos = collate.target_ids["eos"]
    limits = output_limit((~src_pad).sum(1), 512).tolist()
    expected = [
        row[: row.index(eos)] if eos in row[:limit] else row[:limit]
        for row, limit in zip(output[:, 1:].tolist(), limits)
    ]
    batches = plan_batches([len(source) for source in sources], 9)
    assert search(model, sources, collate, batches=batches).tokens == expected


def test_the_length_penalty_is_heeded(tiny_run):
    """With a model that has learned little, whose long outputs are unlikely."""
    trained = load_trained(tiny_run)
    tools = trained.model, trained.source_tokenizer, trained.target_tokenizer
    lines = [source for source, _ in reversed_digits(30, seed=3)]
    short, long = (
        translate_lines(*tools, lines, beam=4, length_penalty=penalty) for penalty in (0.0, 5.0)
    )
    assert long.tokens > short.tokens and long.texts != short.texts


def test_ranks_on_unlike_machines_follow_one_plan(tiny_run):
    trained, plans, shares = load_trained(tiny_run), [], []
    tools = trained.model, trained.source_tokenizer, trained.target_tokenizer
    lines = [str(number) for number in range(10, 80)]
    for rank in (0, 1):
        torch.set_num_threads(1 + 3 * rank)  # which a fixture sets back
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
    assert read_score(toy_run / "runs/toy", "test-greedy-int8")["nltk"] > 92


def test_teacher_forcing_compares_logits_in_fp32(tiny_run):
    trained, formats = load_trained(tiny_run), []
    rows, _ = load_rows(Config(limit=9), trained)
    trained.model.output.register_forward_hook(lambda *call: formats.append(call[-1].dtype))
    teacher_forced_match(trained, rows, CPU, choose_precision(CPU.device, "bf16"))
    assert set(formats) == {torch.float32}


def test_a_cpu_scores_in_fp32(tiny_run, monkeypatch):
    monkeypatch.setattr("engine.precision._cpu_flags", lambda: "avx512_bf16 amx_bf16")
    _, precision, _ = load_for_decoding(Config(ckpt=str(tiny_run)), 1, CPU, print)
    assert precision.name == "fp32"
