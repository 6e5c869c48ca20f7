"""Scoring: each row one hypothesis, in order, on any number of processes; the raw references; the honest labels."""

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import run_ranks, run_script, write_pairs

from data import Collate
from decoding import beam_search, output_limit, search
from engine.distributed import World
from evaluate import Config, load_rows, teacher_forced_match
from text.bleu import corpus_bleu
from text.subwords import encode, special_ids
from trained import load_trained

SIZES = ["--d_model", 64, "--nhead", 4, "--num_encoder_layers", 2, "--num_decoder_layers", 2, "--dim_feedforward", 128]


def evaluate(folder: Path, *flags) -> str:
    done = run_script("evaluate.py", *flags, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def references(toy_data: Path) -> list[str]:
    return [json.loads(line)["en"] for line in (toy_data / "test.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_card_is_the_score_of_the_written_hypotheses(toy_run, toy_data):
    output = evaluate(toy_run, "--ckpt", "runs/toy", "--out", "hypotheses.txt")
    hypotheses = (toy_run / "hypotheses.txt").read_text(encoding="utf-8").splitlines()
    card = json.loads((toy_run / "runs/toy/eval/test-greedy.json").read_text())
    assert len(hypotheses) == 100 == card["sentences"]
    assert card["nltk"] == pytest.approx(corpus_bleu(references(toy_data), hypotheses), abs=0.005)
    assert (toy_run / "runs/toy/eval/test-greedy.txt").read_text() == (toy_run / "hypotheses.txt").read_text()
    for words in ("nltk corpus_bleu", "scale 0–100", "sacreBLEU", "nrefs:1|case:mixed", "chrF2", "brevity", "greedy",
                  "95 % interval", "sentences/s", "tokens/s", "length limit"):  # fmt: skip
        assert words in output
    assert output.count("  reference  ") == 3 and "teacher" not in output


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_many_processes_write_the_same_file(toy_run, ranks):
    evaluate(toy_run, "--out", "one.txt")
    done = run_ranks(ranks, "evaluate.py", "--out", "many.txt", cwd=toy_run)
    assert done.returncode == 0, done.stderr
    assert (toy_run / "many.txt").read_bytes() == (toy_run / "one.txt").read_bytes()
    assert done.stdout.count("nltk corpus_bleu") == 1


def test_every_row_gets_a_hypothesis_whatever_is_in_it(toy_run, tmp_path):
    rows = [("一二三四", "four three two one"), ("", "nothing"), ("五", ""), (" \t\x00 ", "  "), ("一二三四", "again"),
            ("九" * 3000, "too long"), ("一\n二\u2028三", "three two one"), ("emoji 😀 \ufeff", "x")]  # fmt: skip
    data = write_pairs(tmp_path / "odd", rows, {"test": slice(None)})
    output = evaluate(toy_run, "--data", data, "--out", tmp_path / "out.txt")
    lines = (tmp_path / "out.txt").read_text(encoding="utf-8").split("\n")
    assert len(lines) == len(rows) + 1 and lines[-1] == ""
    assert lines[1] == lines[3] == "" and lines[0] == lines[4] != ""
    assert "1 sources are longer than the 512 tokens" in output
    assert not list((toy_run / "runs/toy/eval").glob("*odd*"))  # the run's own results are those on its own data


def test_the_score_does_not_depend_on_the_vocabulary(toy_data, tmp_path):
    """References are the data's own strings, so models with other vocabularies are held against the same ones."""
    for vocabulary in (300, 400):
        flags = [*SIZES, "--source_vocab", vocabulary, "--target_vocab", vocabulary, "--max_steps", 2]
        done = run_script("train.py", "--data", toy_data, *flags, "--run", f"v{vocabulary}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    os.chdir(tmp_path)
    rows = [load_rows(Config(), load_trained(f"runs/v{vocabulary}"))[0] for vocabulary in (300, 400)]
    assert rows[0] == rows[1] and [target for _, target in rows[0]] == references(toy_data)


def test_beams_find_likelier_sequences_than_greedy(toy_run):
    trained = load_trained(str(toy_run / "runs/toy"))
    collate = Collate(special_ids(trained.source_tokenizer), special_ids(trained.target_tokenizer))
    rows, _ = load_rows(Config(), trained)
    sources = encode(trained.source_tokenizer, [source for source, _ in rows])
    src, src_pad = collate.pad_sources(sources)
    limits = output_limit((~src_pad).sum(1), trained.model.config.max_length)
    ids = collate.target_ids["bos"], collate.target_ids["eos"]
    scores = {
        beam: beam_search(trained.model, src, src_pad, limits, *ids, beam, length_penalty=0.0)[1] for beam in (1, 4)
    }
    assert (scores[4] >= scores[1] - 1e-4).all()
    # And beam 1 is greedy, on trained weights too.
    greedy = search(trained.model, sources, collate)
    one, _ = beam_search(trained.model, src, src_pad, limits, *ids, 1, length_penalty=0.6)
    assert [row[: row.index(ids[1])] if ids[1] in row else row for row in one.tolist()] == greedy.tokens


def test_trained_weights_cached_greedy_equals_the_stock_model(toy_run):
    trained = load_trained(str(toy_run / "runs/toy"))
    model = trained.model.double()
    collate = Collate(special_ids(trained.source_tokenizer), special_ids(trained.target_tokenizer))
    sources = encode(trained.source_tokenizer, [source for source, _ in load_rows(Config(limit=40), trained)[0]])
    src, src_pad = collate.pad_sources(sources)
    output = torch.full((len(sources), 1), collate.target_ids["bos"])
    with torch.no_grad():
        for _ in range(40):
            output = torch.cat([output, model(src, src_pad, output)[:, -1].argmax(-1, keepdim=True)], 1)
    eos = collate.target_ids["eos"]
    limits = output_limit((~src_pad).sum(1), 512).tolist()
    expected = [row[: row.index(eos)] if eos in row[:n] else row[:n] for row, n in zip(output[:, 1:].tolist(), limits)]
    assert search(model, sources, collate, rows_per_batch=9).tokens == expected


def test_beam_average_split_and_limit(toy_run):
    evaluate(toy_run, "--beam", 4, "--limit", 20)
    card = json.loads((toy_run / "runs/toy/eval/test-beam4-lp0.6-first20.json").read_text())
    assert card["sentences"] == 20 and card["decoding"] == "beam 4, length penalty 0.6"
    assert "mean of step-300, step-400, step-500" in evaluate(toy_run, "--average", 3)
    assert "split validation, 100 rows" in evaluate(toy_run, "--split", "validation")
    assert "split train, 30 rows" in evaluate(toy_run, "--split", "train", "--limit", 30)


def test_teacher_forcing_is_labelled_and_flatters(toy_run):
    output = evaluate(toy_run, "--teacher_forced")
    line = next(line for line in output.splitlines() if line.startswith("teacher-forced"))
    assert "NOT a BLEU and not comparable" in line
    trained = load_trained(str(toy_run / "runs/toy"))
    rows, _ = load_rows(Config(), trained)
    world = World(0, 1, torch.device("cpu"))
    from engine.precision import choose_precision

    rate = teacher_forced_match(trained, rows, world, choose_precision(world.device))
    assert f"{rate:.2f}" in line
    collate = Collate(special_ids(trained.source_tokenizer), special_ids(trained.target_tokenizer))
    right = total = 0
    for source, target in rows:  # by hand, one pair at a time
        pair = encode(trained.source_tokenizer, [source])[0], encode(trained.target_tokenizer, [target])[0]
        batch = collate([pair])
        with torch.no_grad():
            logits = trained.model(batch.src, batch.src_pad, batch.tgt_in)[0]
        right += (logits.argmax(-1) == batch.tgt_out).sum().item()
        total += len(batch.tgt_out)
    assert rate == pytest.approx(100 * right / total, abs=0.2)


def test_data_without_splits_is_scored_on_the_part_that_was_cut_off(tmp_path):
    from conftest import reversed_digits

    pairs = reversed_digits(1500)
    data = write_pairs(tmp_path / "flat", pairs)
    done = run_script("train.py", "--data", data, *SIZES, "--max_steps", 2, "--run", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no validation split" in done.stdout and "no test split" in done.stdout
    evaluate(tmp_path, "--out", "out.txt")
    trained = load_trained(str(tmp_path / "runs/r"))
    rows, _ = load_rows(Config(), trained)
    assert 3 <= len(rows) < 60 and len((tmp_path / "out.txt").read_text().splitlines()) == len(rows)
    assert set(rows) < set(pairs)


@pytest.mark.slow
def test_real_test_split(real_data, tmp_path):
    """2,001 rows, one hypothesis each, with a model that has hardly begun."""
    flags = ["--data", real_data, "--max_steps", 2, "--source_vocab", 1000, "--target_vocab", 1000]
    assert run_script("train.py", *flags, "--run", "r", cwd=tmp_path, threads=2, timeout=600).returncode == 0
    evaluate(tmp_path, "--out", "out.txt")
    assert len((tmp_path / "out.txt").read_text(encoding="utf-8").splitlines()) == 2001
