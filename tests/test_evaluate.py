"""Scoring: one hypothesis a row, raw references, honest labels, any number of processes."""

import errno
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY_FLAGS, forked, forked_ranks, reversed_digits, write_pairs

import evaluate as script
from data import collate_for
from decoding import Decoder, Hypothesis
from engine.checkpoint import save
from engine.distributed import World
from engine.errors import UserError
from engine.precision import choose_precision
from evaluate import (
    Config,
    Scored,
    choose_rows,
    name_of_score,
    print_card,
    save_score,
    teacher_forced_match,
)
from loading import load_trained
from model import Translator
from text.bleu import FIGURES, corpus_bleu
from text.reading import find_text, fingerprint_of
from text.subwords import encode
from translation import Translations, translate_lines

CPU = World(0, 1, torch.device("cpu"))
PAIRS = reversed_digits(1500)


@pytest.fixture
def evaluate(monkeypatch, capsys):
    """A function: evaluate.py in this process, in a folder; returns what it prints."""

    def evaluate(folder: Path, **settings) -> str:
        monkeypatch.chdir(folder)
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in settings.items()}
        script.evaluate(Config(device="cpu", **settings))
        return capsys.readouterr().out

    return evaluate


def read_score(run: Path, name: str) -> dict:
    return json.loads((run / "eval" / f"{name}.json").read_text())


def first_line_of_card(output: str) -> str:
    """What stands before the graded number: what was scored, perhaps in several lines."""
    lines = output.splitlines()
    (start,) = (place for place, line in enumerate(lines) if line.startswith("split  "))
    (bleu,) = (place for place, line in enumerate(lines) if line.startswith("BLEU (nltk)"))
    about = lines[start:bleu]
    if about[-1].startswith("data  "):  # the notice of the sample
        about.pop()
    assert not any(line[:1].strip() for line in about[1:])
    return " ".join(" ".join(about).split())


# ---------------------------------------------------------------- the card


def test_the_card_is_the_score_of_the_written_hypotheses(toy_run, toy_data, evaluate):
    """The system test too: data → tokenizers → training → greedy decoding → BLEU, nothing mocked.

    Two processes print one card and write the same file.
    """
    output = evaluate(toy_run, out="hypotheses.txt", teacher_forced=True)
    hypotheses = (toy_run / "hypotheses.txt").read_text(encoding="utf-8").splitlines()
    lines = (toy_data / "test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    card = read_score(toy_run / "runs/toy", "test-greedy")
    assert len(hypotheses) == 100 == card["sentences"]
    assert card["rows"] == fingerprint_of([(row["zh"], row["en"]) for row in rows])
    assert card["nltk"] > 60  # it has learned to reverse
    assert (card["decoding"], card["precision"]) == ("greedy", "fp32")
    references = [row["en"] for row in rows]
    assert card["nltk"] == pytest.approx(corpus_bleu(references, hypotheses), abs=0.005)
    saved = (toy_run / "runs/toy/eval/test-greedy.txt").read_text(encoding="utf-8")
    assert saved.splitlines() == hypotheses
    words = ["nltk corpus_bleu", "scale 0–100", "nrefs:1|case:mixed", "chrF2", "brevity"]
    words += ["95 % interval", "sentences/s", "tokens/s", "length limit"]
    assert all(word in " ".join(output.split()) for word in words)
    card_only = output[output.index("\nsplit ") : output.index("  source  ")]
    paths = [str(toy_data), str(toy_run)]  # are not broken
    assert all(
        len(line) <= 80 for line in card_only.splitlines() if not any(p in line for p in paths)
    )
    next_command = output.splitlines()[-1]
    assert re.fullmatch(r"next: python \S*report\.py \S*runs/toy", next_command)
    assert output.count("  reference  ") == 3

    ranks = forked_ranks(2, "evaluate.py", "--out", "2.txt", "--teacher_forced", cwd=toy_run)
    assert (toy_run / "2.txt").read_bytes() == (toy_run / "hypotheses.txt").read_bytes()
    assert ranks.count("nltk corpus_bleu") == 1
    assert teacher_forced_line(ranks) == teacher_forced_line(output)


def teacher_forced_line(output: str) -> str:
    (line,) = (line for line in output.splitlines() if line.startswith("teacher-forced"))
    return line


def test_the_teacher_forced_number_is_right_and_no_bleu(tiny_run, evaluate, monkeypatch):
    def logits(model, hidden):
        """As a reader may change it: the end token, 2, is never predicted."""
        return model.output(hidden).index_fill(-1, torch.tensor([2]), -1e9)

    monkeypatch.setattr(Translator, "logits", logits)
    output = evaluate(tiny_run, ckpt=tiny_run, limit=40, teacher_forced=True)
    line = teacher_forced_line(output)
    assert "NOT a BLEU and not comparable" in line
    trained = load_trained(tiny_run)
    right = total = 0
    for source, target in choose_rows(Config(limit=40), trained).rows:  # one pair at a time
        (source,) = encode(trained.source_tokenizer, [source])
        (target,) = encode(trained.target_tokenizer, [target])
        batch = collate_for(trained)([(source, target)])
        logits = trained.model(batch.src, batch.src_pad, batch.tgt_in)[0]
        right += (logits.argmax(-1) == batch.tgt_out).sum().item()
        total += len(batch.tgt_out)
    assert float(line.split()[3]) == pytest.approx(100 * right / total, abs=0.2)
    saved = read_score(tiny_run, "test-greedy-first40")["teacher_forced"]
    assert f"match {saved:.2f} %" in line


def test_teacher_forcing_compares_logits_in_fp32(tiny_run):
    trained, formats = load_trained(tiny_run), []
    scored = choose_rows(Config(limit=9), trained)
    trained.model.output.register_forward_hook(lambda *call: formats.append(call[-1].dtype))
    teacher_forced_match(trained, scored, CPU, choose_precision(CPU.device, "bf16"))
    assert set(formats) == {torch.float32}


def test_the_next_command_names_the_script_as_it_was_typed(toy_run, evaluate, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["../the lab/evaluate.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    output = evaluate(toy_run, ckpt="runs/toy", limit=5)
    assert output.splitlines()[-1].startswith("next: python '../the lab/report.py' ")


def card_of(scored: Scored, texts: list[str]) -> tuple[dict, str]:
    """The figures and the printed lines of these translations: 9 tokens in half a second."""
    lines = []
    trained = SimpleNamespace(name="x")
    translations = Translations(texts, [], 9, 3, 0)
    figures = print_card(Config(), trained, scored, translations, 0.5, lines.append)
    return figures, "\n".join(lines)


def scored(rows: list[tuple[str, str]], is_sample=False) -> Scored:
    return Scored("data", ["zh", "en"], "test", "", True, is_sample, rows)


def test_the_card_heeds_case_length_and_speed():
    """References come first: these hypotheses are too short and pay for it."""
    rows = [("一", "The Cat sat on the Mat in the Sun"), ("二", "He likes green Tea very much")]
    texts = ["The cat sat on the mat", "He likes green Tea"]
    card, printed = card_of(scored(rows), texts)
    printed = " ".join(printed.split())
    assert "3 of 2 outputs reached the length limit" in printed and "n-gram precisions" in printed
    assert "4.0 sentences/s, 18 tokens/s" in printed
    assert card["nltk"] == pytest.approx(corpus_bleu([target for _, target in rows], texts))
    assert card["brevity_penalty"] < 1 and card["nltk"] < card["lowercase"] - 10


@pytest.mark.parametrize("is_sample", [True, False])
def test_the_card_of_the_sample_says_so(is_sample):
    figures, printed = card_of(scored([("一", "one")], is_sample), ["one"])
    notice = "bundled sample, not WMT19: this score says only that"
    assert (notice in " ".join(printed.split())) == figures["is_sample"] == is_sample


def test_a_copy_of_the_sample_is_called_the_sample(run_of, tmp_path):
    copy = shutil.copytree(ROOT / "sample", tmp_path / "my corpus")
    trained = run_of("train test")
    assert choose_rows(Config(data=str(copy), limit=1), trained).is_sample
    assert not choose_rows(Config(), trained).is_sample


@pytest.mark.parametrize("quiet", [True, False])
def test_the_score_alone_and_the_figures_for_programs(tiny_run, tmp_path, evaluate, quiet):
    run = shutil.copytree(tiny_run, tmp_path / "run", symlinks=True)
    shutil.rmtree(run / "eval", ignore_errors=True)
    data = tmp_path / "pairs"
    data.mkdir()
    lines = ["zh\ten", *map("\t".join, PAIRS[:9])]
    (data / "pairs.tsv").write_text("\n".join(lines), encoding="utf-8")
    (data / "stats.json").write_text("{}")  # is not read, which is logged
    output = evaluate(tmp_path, ckpt=run, data=data, quiet=quiet, json=not quiet)
    (score,) = run.glob("eval/*.json")
    saved = json.loads(score.read_text(encoding="utf-8"))
    if quiet:
        assert output == f"{saved['nltk']:.2f}\n"
    else:
        assert json.loads(output) == saved
        assert [figure.name for figure in FIGURES if figure.name not in saved] == []


@pytest.mark.parametrize(
    "settings, error",
    [
        ({"length_penalty": 0.5}, "--length_penalty needs --beam 2 or larger"),
        ({"quiet": True, "json": True}, "--quiet and --json exclude each other"),
    ],
)
def test_flags_that_do_not_go_together(settings, error):
    with pytest.raises(UserError, match=error):
        Config(**settings)


# ---------------------------------------------------------------- which rows


@pytest.fixture
def run_of(tmp_path):
    """A function: a run trained on data with these splits, as far as `choose_rows` looks at it."""

    def run_of(splits: str, checkpoint="best", unchanged=True) -> SimpleNamespace:
        rows = {"train": slice(1400), "validation": slice(1400, 1450), "test": slice(1450, 1500)}
        write_pairs(tmp_path / "data", PAIRS, {split: rows[split] for split in splits.split()})
        checkpoints = tmp_path / "run/checkpoints"
        for step in (1, 2):
            save(checkpoints, step, model_state={}, optimizer_state={}, state={}, best_step=1)
        fingerprint = find_text(str(tmp_path / "data")).fingerprint()
        if not unchanged:
            fingerprint["train"] = "of other data"
        data = json.dumps({"fingerprint": fingerprint})
        (tmp_path / "run/data.json").write_text(data, encoding="utf-8")
        return SimpleNamespace(
            config={"data": str(tmp_path / "data"), "source": "zh", "target": "en"},
            run=tmp_path / "run",
            checkpoint=(checkpoints / checkpoint).resolve(),
            name="x",
        )

    return run_of


CHOSEN = "it also chose the checkpoint"
LEARNED = "the data have changed: the model may have learned these rows"


@pytest.mark.parametrize(
    "splits, asked, card",
    [
        ("train validation test", "", "test"),
        ("train test", "", "test"),
        ("train validation", "", f"validation (the data have no test split; {CHOSEN})"),
        ("train", "", "test (cut from train: the data have no test split)"),
        ("train validation test", "validation", f"validation ({CHOSEN})"),
        ("train validation test", "train", "train (the model has learned these rows)"),
        (
            "train test",
            "validation",
            f"validation (cut from train: the data have no validation split; {CHOSEN})",
        ),
    ],
)
def test_the_rule_for_the_split_and_what_the_card_says(run_of, splits, asked, card):
    trained = run_of(splits)
    scored = choose_rows(Config(split=asked), trained)
    _, printed = card_of(scored, ["one"] * len(scored.rows))
    assert first_line_of_card(printed) == f"split {card}"
    split = card.split()[0]
    rows = {"train": PAIRS[:1400], "validation": PAIRS[1400:1450], "test": PAIRS[1450:]}
    if "cut from train" in card:
        assert 3 <= len(scored.rows) < 60 and set(scored.rows) < set(rows["train"])
    else:
        assert scored.rows == rows[split]
    assert choose_rows(Config(split=asked, limit=3), trained).rows == scored.rows[:3]


@pytest.mark.parametrize(
    "checkpoint, average, note",
    [
        ("best/model.safetensors", 1, CHOSEN),
        ("step-2", 1, ""),
        ("best", 2, ""),  # the mean of two
    ],
)
def test_only_the_best_checkpoint_was_chosen_by_validation(run_of, checkpoint, average, note):
    trained = run_of("train validation test", checkpoint)
    assert choose_rows(Config(split="validation", average=average), trained).note == note


def test_the_best_checkpoint_is_known_where_the_disk_has_no_links(run_of):
    trained = run_of("train validation test")
    (trained.run / "checkpoints/best").unlink()
    assert choose_rows(Config(split="validation"), trained).note == CHOSEN


LEARNED_ROWS = "the model has learned these rows"
NEITHER = "the data have neither a test nor a validation split"


@pytest.mark.parametrize(
    "rows, asked, note, is_run_data",
    [
        # A file of the run's data under another name; its content tells what it was used for.
        ({"corpus": slice(1400)}, "", f"{NEITHER}; {LEARNED_ROWS}", False),
        ({"newstest": slice(1400)}, "", f"{NEITHER}; {LEARNED_ROWS}", False),
        ({"my-test": slice(1400)}, "", LEARNED_ROWS, False),
        ({"news": slice(1400, 1450)}, "", f"{NEITHER}; {CHOSEN}", False),
        # The whole, with other names.
        (
            {"a-train": slice(1400), "b-dev": slice(1400, 1450), "c-eval": slice(1450, 1500)},
            "validation",
            CHOSEN,
            True,
        ),
        # Other rows; the checkpoint was not chosen by this validation split.
        ({"train": slice(9), "validation": slice(9, 19)}, "validation", "", False),
        ({"train": slice(9), "test": slice(9, 19)}, "train", "", False),
    ],
)
def test_copies_are_known_by_their_content(run_of, tmp_path, rows, asked, note, is_run_data):
    trained = run_of("train validation test")
    other = write_pairs(tmp_path / "other", PAIRS, rows)
    scored = choose_rows(Config(data=str(other), split=asked), trained)
    assert (scored.note, scored.is_run_data) == (note, is_run_data)


def test_a_renamed_copy_of_a_single_file_is_the_data_of_the_run(run_of, tmp_path):
    """The rows that were cut from it are scored, and no row that was learned."""
    trained = run_of("train")
    other = write_pairs(tmp_path / "other", PAIRS, {"corpus": slice(1400)})
    scored = choose_rows(Config(data=str(other / "corpus.jsonl")), trained)
    assert scored.is_run_data and scored.note.startswith("cut from train")
    assert scored.rows == choose_rows(Config(), trained).rows


def test_references_that_are_all_empty(run_of, tmp_path):
    other = write_pairs(tmp_path / "other", [("一", ""), ("二", " \u200b")])
    with pytest.raises(UserError, match="other: all 2 references are empty; add them"):
        choose_rows(Config(data=str(other)), run_of("train test"))


def test_the_other_direction_is_noted(run_of):
    trained = run_of("train test")
    note = choose_rows(Config(source="en", target="zh"), trained).note
    assert note == "the model translates from zh to en"
    with pytest.raises(UserError, match="--source and --target are both zh"):
        choose_rows(Config(target="zh"), trained)


def test_a_split_that_is_missing_is_an_error_and_changed_data_are_noted(run_of):
    with pytest.raises(UserError, match=r"no test split \(it has train, validation\); leave"):
        choose_rows(Config(split="test"), run_of("train validation"))


def test_rows_cut_from_changed_data_are_noted(run_of):
    assert LEARNED in choose_rows(Config(), run_of("train", unchanged=False)).note


def test_data_without_splits_are_scored_on_the_part_that_was_cut_off(
    tmp_path, evaluate, monkeypatch
):
    data = write_pairs(tmp_path / "flat", PAIRS)
    output = forked(
        "train.py", "--data", data, *TINY_FLAGS, "--max_steps", 2, "--run", "r", cwd=tmp_path
    )
    assert "no validation split" in output and "no test split" in output
    first = first_line_of_card(evaluate(tmp_path))
    assert first == "split test (cut from train: the data have no test split)"
    trained = load_trained(tmp_path / "runs/r")
    scored = choose_rows(Config(), trained)
    counts = json.loads((tmp_path / "runs/r/data.json").read_text())["counts"]
    assert 3 <= len(scored.rows) < 60 and counts["kept"] <= 1500 - len(scored.rows)

    moved = data.rename(tmp_path / "moved")
    monkeypatch.setattr("data.FORMAT", 0)  # the data of a run outlive their cache
    alone = load_trained(trained.checkpoint / "model.safetensors")
    for loaded in (trained, alone):
        found = choose_rows(Config(data=str(moved)), loaded)
        assert (found.rows, found.split, found.is_run_data) == (scored.rows, "test", True)
    write_pairs(moved, PAIRS[1:])  # these are other data
    found = choose_rows(Config(data=str(moved)), trained)
    assert (found.rows, found.split, found.is_run_data) == (PAIRS[1:], "all", False)


def test_other_data_with_other_columns(tiny_run, tmp_path, evaluate):
    content = "English\tChinese\n" + "".join(
        f"{target}\t{source}\n" for source, target in PAIRS[:9]
    )
    (tmp_path / "pairs.tsv").write_text(content, encoding="utf-8")
    columns = {"source": "Chinese", "target": "English"}
    output = evaluate(tmp_path, ckpt=tiny_run, data="pairs.tsv", **columns)
    assert first_line_of_card(output).startswith("split all (the data have neither a test nor")
    assert "scored pairs.tsv, split all, 9 rows" in " ".join(output.split())
    (score,) = tiny_run.glob("eval/all-greedy-data-*.json")
    assert score.stem.endswith(json.loads(score.read_text())["rows"])


def test_every_row_gets_a_hypothesis_whatever_is_in_it(tiny_run, tmp_path, evaluate):
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
    output = evaluate(tmp_path, ckpt=tiny_run, data=data, out="out.txt")
    lines = (tmp_path / "out.txt").read_text(encoding="utf-8").split("\n")
    assert len(lines) == len(rows) + 1 and lines[-1] == ""
    assert lines[1] == lines[3] == "" and lines[0] == lines[4] != ""
    output = " ".join(output.split())
    assert "1 sources were cut to the model's limit of 31 tokens" in output
    assert "note: 2 references are empty, and no translation matches these" in output


# ---------------------------------------------------------------- where scores are written


def test_scores_of_different_things_have_different_names(tiny_run):
    best = (tiny_run / "checkpoints/best").resolve().name
    other = next(step for step in ("step-15", "step-30") if step != best)
    rows = scored(PAIRS[:3])
    names = set()
    for named, settings in (
        (".", {}),
        (".", {"precision": "fp32"}),
        (f"checkpoints/{other}", {}),
        (f"checkpoints/{other}/model.safetensors", {"beam": 2, "length_penalty": 0.3}),
        (".", {"average": 2, "limit": 3}),
    ):
        trained = load_trained(tiny_run / named, settings.get("average", 1))
        names.add(name_of_score(Config(**settings), trained, rows))
    expected = ["greedy", "greedy-fp32", f"greedy-{other}", f"beam2-lp0.3-{other}"]
    assert names == {f"test-{name}" for name in [*expected, "greedy-average2-first3"]}


def test_a_model_that_was_handed_on_without_its_checkpoints(tiny_run, tmp_path, evaluate):
    left_out = shutil.ignore_patterns("checkpoints", "eval")
    given = shutil.copytree(tiny_run, tmp_path / "given", ignore=left_out)
    shutil.copy(tiny_run / "checkpoints/best/model.safetensors", given)
    output = evaluate(tmp_path, ckpt="given/model.safetensors", split="validation", limit=2)
    assert first_line_of_card(output) == "split validation"
    assert (given / "eval/validation-greedy-first2-given.json").exists()
    # Or with one of them, moved.
    shutil.copytree(tiny_run / "checkpoints/best", given / "step-30")
    evaluate(tmp_path, ckpt="given/step-30", split="validation", limit=2)
    assert (given / "eval/validation-greedy-first2-step-30.json").exists()


@pytest.mark.parametrize("number, read_only", [(errno.EROFS, True), (errno.ENOSPC, False)])
def test_somebody_elses_run_is_scored_all_the_same(tmp_path, monkeypatch, number, read_only):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    lines = []
    if read_only:
        save_score(tmp_path / "eval", "test-greedy", {}, [], lines.append)
        assert "the score is not saved" in lines[0]
    else:
        with pytest.raises(OSError):
            save_score(tmp_path / "eval", "test-greedy", {}, [], lines.append)


def test_places_are_tried_before_the_decoding(tiny_run, evaluate, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "translate_lines", lambda *_, **__: pytest.fail("decoded"))
    for out, reason in (("x" * 300, "File name too long"), (".", "Is a directory")):
        with pytest.raises(UserError, match=rf"--out .* cannot be written \({reason}\); choose"):
            evaluate(tmp_path, ckpt=tiny_run, out=out)


def test_a_pipe_is_not_opened_before_the_translations_are_there(tmp_path, monkeypatch):
    """Its reader would take the closing for the end."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(script, "open", lambda *_: pytest.fail("opened"), raising=False)
    script.check_writable(tmp_path / "pipe")


# ---------------------------------------------------------------- decoding on several ranks, int8


def test_outputs_that_never_end_are_counted_over_all_ranks(tiny_run):
    trained = load_trained(tiny_run)
    trained.model.output.bias.data[2] = -1e9  # the end token
    tools = Decoder(trained.model), trained.source_tokenizer, trained.target_tokenizer

    def gather(share):
        """As if rank 1 had translated the other lines."""
        others = {0, 2, 3} - share.keys()
        assert others
        return [share, {row: [Hypothesis([5, 6], ended=False, text="text")] for row in others}]

    world = SimpleNamespace(rank=0, size=2, on_main=lambda work: work(), gather=gather)
    translations = translate_lines(*tools, ["一", "", "二三", "四五六"], world=world)
    assert translations.capped == 3 and translations.tokens > 3 * 3
    assert translations.texts[1] == "" and "text" in translations.texts


def test_ranks_on_unlike_machines_follow_one_plan(tiny_run):
    trained, plans, shares = load_trained(tiny_run), [], []
    tools = Decoder(trained.model), trained.source_tokenizer, trained.target_tokenizer
    lines = [str(number) for number in range(10, 80)]
    for rank in (0, 1):
        torch.set_num_threads(1 + 3 * rank)  # which a fixture sets back
        world = SimpleNamespace(rank=rank, size=2, gather=shares.append)
        world.on_main = lambda work: plans.append(work()) or plans[0]
        translate_lines(*tools, lines, world=world)
    assert plans[0] != plans[1]
    assert sorted(row for share in shares for row in share) == [*range(len(lines))]


def test_the_length_penalty_is_heeded(tiny_run):
    """With a model that has learned little, whose long outputs are unlikely."""
    trained = load_trained(tiny_run)
    tools = Decoder(trained.model), trained.source_tokenizer, trained.target_tokenizer
    lines = [source for source, _ in reversed_digits(30, seed=3)]
    short, long = (
        translate_lines(*tools, lines, beam=4, length_penalty=penalty) for penalty in (0.0, 5.0)
    )
    assert long.tokens > short.tokens and long.texts != short.texts


def test_the_search_is_the_one_that_the_flags_name(tiny_run, evaluate, monkeypatch, tmp_path):
    asked = []

    def translate(*arguments, beam, length_penalty, **_):
        asked.append((arguments[-1], beam, length_penalty))
        return Translations(["one"] * 4, [], 8, 0, 0)

    monkeypatch.setattr(script, "translate_lines", translate)
    output = evaluate(tmp_path, ckpt=tiny_run, limit=4, beam=2, length_penalty=0.3)
    sources = [source for source, _ in reversed_digits(2200)[2100:2104]]
    assert asked == [(sources, 2, 0.3)] and "beam 2, length penalty 0.3" in output


def test_the_mean_of_the_last_checkpoints_is_scored(tiny_run, evaluate, tmp_path):
    evaluate(tmp_path, ckpt=tiny_run, limit=20, average=2, out="mean.txt")
    trained = load_trained(tiny_run, average=2)
    assert read_score(tiny_run, "test-greedy-average2-first20")["checkpoint"] == trained.name
    sources = [source for source, _ in reversed_digits(2200)[2100:2120]]
    tools = (Decoder(trained.model), trained.source_tokenizer, trained.target_tokenizer)
    expected = translate_lines(*tools, sources).texts
    assert (tmp_path / "mean.txt").read_text(encoding="utf-8").splitlines() == expected


def test_int8_from_the_command_line(toy_run, evaluate):
    try:
        Decoder(load_trained(toy_run / "runs/toy").model, int8=True)
    except UserError as error:
        pytest.skip(str(error))
    output = evaluate(toy_run, precision="int8")
    assert "rounded to 8 bits" in output and "greedy, int8" in output
    assert read_score(toy_run / "runs/toy", "test-greedy-int8")["nltk"] > 55
    evaluate(toy_run, precision="int8", beam=4)
    assert read_score(toy_run / "runs/toy", "test-beam4-lp1-int8")["nltk"] > 55


def test_teacher_forcing_cuts_and_cleans(tiny_run):
    trained = load_trained(tiny_run)
    fp32 = choose_precision(CPU.device, "fp32")

    def match(rows):
        return teacher_forced_match(trained, scored(rows), CPU, fp32)

    assert 0 <= match([("一" * 3000, "one " * 3000)]) <= 100
    assert match([(" 一\u200b", "one \u200b two\x00")]) == match([("一", "one two")])


def test_format_and_decoder_reach_the_translation(tiny_run, evaluate, monkeypatch, tmp_path):
    seen = []
    hidden = Translator.hidden

    def translate(decoder, *_, **__):
        seen.append((torch.is_autocast_enabled("cpu"), decoder))
        return Translations(["one"] * 4, [], 8, 0, 0)

    def noted_hidden(model, *batch):
        seen.append(torch.is_autocast_enabled("cpu"))
        return hidden(model, *batch)

    monkeypatch.setattr(script, "translate_lines", translate)
    monkeypatch.setattr("loading.Decoder", lambda *_, **__: "the decoder")
    monkeypatch.setattr(Translator, "hidden", noted_hidden)
    evaluate(tmp_path, ckpt=tiny_run, limit=4, precision="bf16", teacher_forced=True)
    assert seen == [(True, "the decoder"), True]


@pytest.mark.parametrize("ends_at_once", [True, False])
def test_end_tokens_count_where_there_is_one(tiny_run, ends_at_once):
    """One that reaches its limit, 1.5 · source + 10 tokens, has none; nor has an empty line."""
    trained = load_trained(tiny_run)
    tokenizers = (trained.source_tokenizer, trained.target_tokenizer)
    trained.model.output.bias.data[2] = 1e9 if ends_at_once else -1e9
    found = translate_lines(Decoder(trained.model), *tokenizers, ["一", "", "二三"])
    lengths = [len(ids) + 1 for ids in encode(trained.source_tokenizer, ["一", "二三"])]
    limits = [int(1.5 * length) + 10 for length in lengths]
    assert found.tokens == (2 if ends_at_once else sum(limits))


def test_another_column_of_the_same_data(tmp_path):
    columns = {"zh": "数", "en": "number", "fr": "nombre"}
    rows = [{name: f"{word} {n}" for name, word in columns.items()} for n in range(9)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"data": str(tmp_path), "source": "zh", "target": "en"}
    trained = SimpleNamespace(config=settings, run=tmp_path)
    assert choose_rows(Config(), trained).is_run_data
    assert not choose_rows(Config(target="fr"), trained).is_run_data
