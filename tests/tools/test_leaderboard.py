"""The table of the hand-ins: scores again, what is flagged, and hand-ins that cannot be scored."""

import csv
import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import reversed_digits, write_pairs

from engine.errors import UserError
from loading import load_trained
from text.reading import SAMPLE, find_text, fingerprint_of
from tools import leaderboard as module
from tools.leaderboard import (
    HEAD,
    LARGEST,
    Config,
    assess,
    leaderboard,
    parameters_in,
    plain,
    reason_of_end,
    run_in,
    weights_of,
)

NEEDED = ("config.json", "model.json", "data.json", "metrics.jsonl", "train.log", "tokenizer")


def hand_in(run: Path, folder: Path) -> Path:
    """What docs/evaluation.md#handing-in asks for, of this run; the folder."""
    weights = folder / "checkpoints" / "best" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    shutil.copy(run / "checkpoints" / "best" / "model.safetensors", weights)
    for name in NEEDED:
        copy = shutil.copytree if (run / name).is_dir() else shutil.copy
        copy(run / name, folder / name)
    return folder


def change(file: Path, **values) -> None:
    """Set values of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}), encoding="utf-8")


def claim(folder: Path, rows: str, score: float) -> None:
    """A score file as evaluate.py writes it."""
    (folder / "eval").mkdir(exist_ok=True)
    figures = {"rows": rows, "decoding": "greedy", "nltk": score}
    (folder / "eval" / "test-greedy.json").write_text(json.dumps(figures), encoding="utf-8")


def config_for(*words, **settings) -> Config:
    config = Config(**settings)
    config.handins = list(map(str, words))
    return config


def rows_of_table(folder: Path) -> dict[str, dict[str, str]]:
    """Name -> column -> cell, from leaderboard.csv."""
    with open(folder / "leaderboard.csv", encoding="utf-8-sig", newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


@pytest.fixture
def table_for(monkeypatch, tmp_path, toy_data):
    """A function: name -> (BLEU, translations) as if evaluate.py had found them, and the table."""

    def table_for(handins: Path, scores: dict[str, tuple[float, str]]) -> dict:
        def score_again(run: Path, weights: Path, config: Config) -> tuple[dict, bytes]:
            score, translations = scores[run.name]
            return {"nltk": score, "note": "", "rows": "these"}, translations.encode()

        monkeypatch.setattr(module, "score_again", score_again)
        monkeypatch.chdir(tmp_path)
        leaderboard(config_for(handins, data=str(toy_data)))
        return rows_of_table(tmp_path)

    return table_for


def test_evaluate_scores_every_hand_in_again(tiny_run, tmp_path, monkeypatch, capsys):
    """Nothing is mocked: one run as it was zipped, and one with the weights of another model."""
    pairs = reversed_digits(30)
    data = write_pairs(tmp_path / "data", pairs, {"train": slice(10), "test": slice(10, 30)})
    handins = tmp_path / "handins"
    good = hand_in(tiny_run, handins / "good" / "runs" / "tiny")
    change(good / "data.json", fingerprint=find_text(str(data)).fingerprint())
    claim(good, fingerprint_of(pairs[:10]), 99)
    change(hand_in(tiny_run, handins / "other") / "model.json", dim_feedforward=96)
    before = {path: path.stat().st_mtime_ns for path in handins.rglob("*")}

    monkeypatch.chdir(tmp_path)
    leaderboard(config_for(handins, data=str(data), split="train"))

    table = rows_of_table(tmp_path)
    assert list(table) == ["good", "other"]
    assert table["good"]["place"] == "1" and table["good"]["BLEU claimed"] == "99.00"
    assert 0 <= float(table["good"]["BLEU again"]) < 98
    assert "the model has learned these rows" in table["good"]["notes"]
    assert "the claimed score differs by +" in table["good"]["notes"]
    assert table["other"]["place"] == "–" and table["other"]["BLEU again"] == ""
    refusal = "model.safetensors does not contain the weights of this model"
    assert table["other"]["notes"].startswith(refusal)
    assert "same weights, curve, seed as good" in table["other"]["notes"]
    assert {path: path.stat().st_mtime_ns for path in handins.rglob("*")} == before
    output = capsys.readouterr().out
    assert "Traceback" not in output and "| 1 " in output
    assert (tmp_path / "leaderboard.md").read_text(encoding="utf-8").count("\n| ") == 4


def test_copies_are_named(tiny_run, tmp_path, table_for):
    """One who changes a weight's last bit still has the same translations."""
    names = ("alice", "bob", "carol", "dave")
    runs = {name: hand_in(tiny_run, tmp_path / "handins" / name) for name in names}
    for number, name in enumerate(("carol", "dave"), 1):
        weights = runs[name] / "checkpoints/best/model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= number
        weights.write_bytes(content)
        change(runs[name] / "config.json", seed=number + 1)
        (runs[name] / "metrics.jsonl").write_text(f'{{"step": 1, "train/loss": {number}}}\n')
    scores = {"alice": (9.0, "x"), "bob": (9.0, "x"), "carol": (9.0, "x"), "dave": (8.0, "y")}
    table = table_for(tmp_path / "handins", scores)
    notes = {name: row["notes"] for name, row in table.items()}
    assert "same weights, curve, translations, seed as bob" in notes["alice"]
    assert "same translations as carol" in notes["alice"]
    assert "same translations as alice, bob" in notes["carol"]
    assert "same" not in notes["dave"]
    assert [row["place"] for row in table.values()] == ["1", "1", "1", "4"]
    assert table["dave"]["seed"] == "3"


def test_what_a_teacher_should_look_at_is_noted(tiny_run, tmp_path, table_for):
    names = ("halted", "killed", "honest", "boastful", "silent", "of_the_sample")
    runs = {name: hand_in(tiny_run, tmp_path / "handins" / name) for name in names}
    log = (runs["honest"] / "train.log").read_text(encoding="utf-8")
    assert "stopped after step 45: finished" in log
    stopped = log.replace(": finished", ": interrupted")
    (runs["halted"] / "train.log").write_text(stopped, encoding="utf-8")
    (runs["killed"] / "train.log").write_text(log.partition("stopped after")[0], encoding="utf-8")
    of_sample = find_text(str(SAMPLE)).fingerprint()
    change(runs["of_the_sample"] / "data.json", fingerprint={"train": of_sample["train"]})
    claim(runs["honest"], "these", 9.2)
    claim(runs["boastful"], "these", 9.4)
    claim(runs["silent"], "others", 9.0)
    scores = {name: (9.0, name) for name in names}
    table = table_for(tmp_path / "handins", scores)
    words = ("was interrupted", "does not say", "differs by +0.40", "no score", "bundled sample")
    noted = {word: [name for name in names if word in table[name]["notes"]] for word in words}
    without_score = ["halted", "killed", "silent", "of_the_sample"]
    assert list(noted.values()) == [
        ["halted"],
        ["killed"],
        ["boastful"],
        without_score,
        ["of_the_sample"],
    ]
    assert table["honest"]["data"].endswith(" pairs")


def test_a_resumed_run_is_not_interrupted(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("stopped after step 5: interrupted\nresumed after step 5\n")
    assert reason_of_end(log) == ""
    log.write_text(log.read_text() + "stopped after step 1,009: finished\n")
    assert reason_of_end(log) == "finished"


def damage(name: str, content: bytes):
    return lambda run: (run / name).write_bytes(content)


def link_out(run: Path) -> None:
    """As `unzip` restores it; reading it would never end."""
    (run / "train.log").unlink()
    (run / "train.log").symlink_to("/dev/zero")


def grow(run: Path) -> None:
    """A file that takes no room on the disk, and much in memory."""
    os.truncate(run / "metrics.jsonl", LARGEST + 1)


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda run: shutil.rmtree(run), "config.json, model.json, tokenizer missing"),
        (lambda run: (run / "model.json").unlink(), "model.json missing"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "model.safetensors missing"),
        (lambda run: shutil.copytree(run, run / "again"), "2 runs"),
        (link_out, "train.log is a link to a place outside the hand-in"),
        (grow, "metrics.jsonl has more than 100 MiB"),
        (lambda run: os.mkfifo(run / "eval"), "eval is neither a file nor a folder"),
        (
            damage("checkpoints/best/model.safetensors", b"\xff" * 99),
            "model.safetensors is damaged",
        ),
    ],
)
def test_a_hand_in_that_cannot_be_scored_is_a_row_with_the_reason(
    tiny_run, tmp_path, spoil, reason
):
    run = hand_in(tiny_run, tmp_path / "student" / "run")
    spoil(run)
    entry = assess(tmp_path / "student", Config(), [])
    assert entry.bleu is None
    assert reason in entry.notes[0] and entry.notes[0] == plain(entry.notes[0])


@pytest.mark.parametrize("content", [b"[]", b"\xff\xfe", b'{"counts": 3, "seed": []}', b"[" * 9999])
@pytest.mark.parametrize("score", [float("nan"), 10**400])
def test_damaged_descriptions_cost_no_score(tiny_run, tmp_path, table_for, content, score):
    run = hand_in(tiny_run, tmp_path / "handins" / "student")
    for name in ("data.json", "metrics.jsonl", "train.log"):
        (run / name).write_bytes(content)
    claim(run, "these", score)
    row = table_for(tmp_path / "handins", {"student": (9.0, "x")})["student"]
    assert (row["BLEU again"], row["BLEU claimed"]) == ("9.00", "")
    assert "metrics.jsonl missing or damaged" in row["notes"]


def test_a_leaderboard_that_is_stopped_keeps_what_it_has(tiny_run, tmp_path, table_for):
    for name in ("alice", "bob", "carol"):
        hand_in(tiny_run, tmp_path / "handins" / name)

    class StoppedAtCarol(dict):
        def __missing__(self, name):
            raise KeyboardInterrupt

    scores = {"alice": (8.0, "x"), "bob": (9.0, "x")}
    with pytest.raises(KeyboardInterrupt):
        table_for(tmp_path / "handins", StoppedAtCarol(scores))
    stopped = rows_of_table(tmp_path)
    assert list(stopped) == ["bob", "alice"] and "as bob" in stopped["alice"]["notes"]
    assert (tmp_path / "leaderboard.md").read_text(encoding="utf-8").count("\n| ") == 4
    table = table_for(tmp_path / "handins", {**scores, "carol": (7.0, "y")})
    assert list(table) == ["bob", "alice", "carol"] and "carol" in table["bob"]["notes"]
    assert table["bob"]["notes"].count("curve") == 2


def test_a_name_is_no_formula_and_controls_no_terminal():
    assert plain("=HYPERLINK(1)\x1b[2J\nrow") == "HYPERLINK(1) [2J row"


def test_the_parameters_are_those_of_the_model(tiny_run):
    model = load_trained(tiny_run).model
    expected = sum(weight.numel() for weight in model.parameters())
    assert parameters_in(weights_of(tiny_run)) == expected


def test_a_run_without_the_best_link_uses_its_checkpoints(tiny_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "run", symlinks=True)
    (tmp_path / "run/checkpoints/best").unlink()
    assert weights_of(run_in(tmp_path)).parent.name.startswith("step-")


def test_without_hand_ins_or_rows_it_is_one_line(toy_data, tmp_path):
    with pytest.raises(UserError, match="no folders"):
        leaderboard(config_for(tmp_path))
    with pytest.raises(UserError, match="names no folder"):
        leaderboard(config_for(tmp_path / "missing"))
    (tmp_path / "student").mkdir()
    write_pairs(tmp_path / "student" / "data", reversed_digits(5))
    data = str(tmp_path / "student" / "data")
    with pytest.raises(UserError, match="no test split"):
        leaderboard(config_for(tmp_path, data=data, split="test"))


def test_the_head_has_a_name_for_every_column(tiny_run, tmp_path, table_for):
    hand_in(tiny_run, tmp_path / "handins" / "student")
    row = table_for(tmp_path / "handins", {"student": (9.0, "x")})["student"]
    assert tuple(row) == HEAD and None not in row.values()
