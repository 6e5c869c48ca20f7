"""Every benchmark runs at a tiny size, in this process, and counts and compares correctly."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import corpus as corpus_module
from benchmarks import decoding, gpu, training
from benchmarks.corpus import load_corpus, prepare_corpus
from benchmarks.peers import contest, turn
from benchmarks.peers.contest import TINY, choose, start
from benchmarks.peers.turn import Task
from engine.config import parse_flags
from engine.errors import UserError
from model import ModelConfig, training_flops
from tools.results import read_tables


class Ended(Exception):
    """Raised to leave an endless loop."""


@pytest.fixture(scope="module")
def folder(toy_data, tmp_path_factory):
    """The tokenised corpus."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "ROOT", tmp_path_factory.mktemp("root"))
        yield prepare_corpus(str(toy_data), vocabulary=300)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch, folder):
    """Contestants run in this process, and leave it as it was."""
    precision = torch.get_float32_matmul_precision()
    for module in ("engine.devices", "benchmarks.training"):
        monkeypatch.setattr(f"{module}.keep_freed_memory", lambda: None)
    for module in (training, decoding, gpu):
        monkeypatch.setattr(module, "in_new_process", lambda function, *args: function(*args))
    for module in (training, decoding):
        monkeypatch.setattr(module, "start", start_in_this_process)
    monkeypatch.setattr(training, "prepare_corpus", lambda data, vocabulary: folder)
    yield
    torch.set_float32_matmul_precision(precision)


def start_in_this_process(name, contestant, task):
    """As `contest.start`."""
    peer = importlib.import_module(f"benchmarks.peers.{contestant.module}")
    return getattr(peer, task.what)(replace(task, variant=contestant.variant))


def rows_of(file: Path) -> list[dict]:
    return json.loads(file.read_text(encoding="utf-8"))["rows"]


# ---------------------------------------------------------------- the contestants


def test_the_sample_is_the_same_in_every_process(folder):
    first, again = load_corpus(folder, pairs=50), load_corpus(folder, pairs=50)
    assert len(first.train) == 50
    for (source, target), (other_source, other_target) in zip(first.train, again.train):
        assert (source == other_source).all()
        assert (target == other_target).all()


def test_contestants_are_chosen_by_name():
    assert choose("marian, handout", training.CONTESTANTS) == ["marian", "handout"]
    for names in (training.ON_CPU, training.ON_GPU):
        assert choose(names, training.CONTESTANTS)
    for wrong in ("marion", "", ",", "marian,"):
        with pytest.raises(UserError, match="unknown; choose from handout"):
            choose(wrong, training.CONTESTANTS)
    config = training.Config(contestants="ours-fp32", baseline="marian")
    with pytest.raises(UserError, match="--baseline 'marian': unknown; choose from ours-fp32"):
        training.main(config)


def test_start_reads_the_figures_or_gives_the_reason(monkeypatch, capsys):
    monkeypatch.setattr(contest, "command", lambda code, task: ([sys.executable, "-c", code], None))
    assert start("good", """print('noise\\n{"speed": 1}')""", None) == {"speed": 1}
    assert start("broken", "import absent", None) is None
    assert "broken: left out, ModuleNotFoundError" in capsys.readouterr().out


def test_the_pages_have_columns_of_the_benchmarks():
    """A page shows some of them; hardware and commit stay in the files."""
    tables = [[key for key, _, _ in table["columns"]] for table in read_tables("performance")]
    programs = [*training.COLUMNS.values(), decoding.COLUMNS]
    shown = [table for table in tables if table[0] == "who"]
    assert shown
    for table in shown:
        made = set(table) - {"ratio"}  # of two rows, where a program does not make it itself
        assert any(made <= set(columns) for columns in programs), table


# ---------------------------------------------------------------- training


def test_peak_memory_is_found_where_proc_does_not_tell(tmp_path, monkeypatch):
    held = np.ones(2**27)  # 1 GiB
    assert turn.peak_gib() > 1
    monkeypatch.setattr(turn, "Path", lambda name: tmp_path / "status")
    assert 1 < turn.peak_gib() < 500  # no such file
    (tmp_path / "status").write_text("Name: python\n")
    assert 1 < turn.peak_gib() < 500
    del held


def test_the_clock_leaves_out_the_warm_up_and_the_last_step(monkeypatch):
    """Steps of 2 s and 100 target tokens."""
    now = [0.0]
    monkeypatch.setattr(turn, "peak_gib", lambda: 3)
    clock = turn.TrainingClock(6, now=lambda: now[0])
    while clock.starts(10, 100):
        now[0] += 2
    assert clock.figures() == {
        "steps": 3,
        "target_tokens_per_second": 50,
        "tokens_per_second": 55,
        "seconds_per_step": 2,
        "peak_gib": 3,
    }


@pytest.mark.parametrize("name", ["handout", "marian", "ours"])
def test_an_epoch_counts_every_real_token_once(name, folder, monkeypatch):
    """Neither padding nor begin tokens, but the end token, also of the source."""
    peer = importlib.import_module(f"benchmarks.peers.{name}")
    small = load_corpus(folder, pairs=50)
    expected = [sum(len(sentence) + 1 for sentence in side) for side in zip(*small.train)]
    counted = np.zeros(2, int)

    def starts(source, target):
        counted[:] += int(source), int(target)
        if counted[1] >= expected[1]:
            raise Ended
        return True

    monkeypatch.setattr(peer, "load_corpus", lambda folder: small)
    monkeypatch.setattr(peer, "TrainingClock", lambda *arguments: SimpleNamespace(starts=starts))
    with pytest.raises(Ended):
        peer.train(Task("train", "fp32", sizes=TINY, tokens_per_batch=512))
    assert counted.tolist() == expected


def test_training_and_limits(tmp_path, monkeypatch, capsys):
    config = training.Config(
        contestants="handout,marian,ours-plain-fp32,ours-muon-fp32,ours-fp32",
        preset="tiny",
        tokens_per_batch=64,
        rounds=1,
        seconds=0.01,
        json=str(tmp_path / "speed.json"),
    )
    names = config.contestants.split(",")
    assert [row.contestant for row in training.main(config)] == names
    rows = rows_of(tmp_path / "speed.json")
    assert [list(row) for row in rows] == [training.COLUMNS["speed"]] * len(names)
    assert rows[0]["ratio"] == "1.00"
    assert all(row["tokens"] > 0 for row in rows)

    training.main(replace(config, part="limits", json=str(tmp_path / "limits.json")))
    rows = rows_of(tmp_path / "limits.json")
    assert [row["format"] for row in rows] == list(training.FORMATS)
    assert list(rows[0]) == training.COLUMNS["limits"]
    assert "ours-fp32 reaches " in capsys.readouterr().out


def test_the_products_of_the_limit_are_those_of_the_model():
    sizes = ModelConfig(3000, 2000, **TINY | {"num_decoder_layers": 3, "dim_feedforward": 96})
    forward = sum(2 * rows * width * out for rows, width, out in training.products(sizes, 700, 900))
    assert 3 * forward == training_flops(sizes, 700, 900)


# ---------------------------------------------------------------- decoding


def test_a_trained_model_gives_all_contestants_the_same_outputs(tiny_run, tmp_path):
    pytest.importorskip("ctranslate2")
    names = ["ours-plain-fp32", "ours-fp32", "ctranslate2-float32"]
    config = decoding.Config(
        ckpt=str(tiny_run),
        limit=30,
        beam=3,
        # Without a penalty no longer output scores better, so both programs stop at the same step.
        length_penalty=0.0,
        rounds=1,
        contestants=",".join(names),
        json=str(tmp_path / "table.json"),
    )
    rows = decoding.main(config)
    assert [row.contestant for row in rows] == names
    for row in rows:
        assert row.figures["equal"] >= 0.9  # a tie may fall either way
        assert "bleu" in row.figures
    cells = rows_of(tmp_path / "table.json")
    assert [list(row) for row in cells] == [decoding.COLUMNS] * len(names)
    assert cells[0]["search"]["en"] == "beam 3"
    assert cells[0]["equal"] == "100.0 %"
    assert cells[2]["who"]["en"].startswith("CTranslate2 ")


def test_an_empty_source_leaves_out_its_reference_too(tiny_run, tmp_path):
    pairs = {"一二": "one two", "": "nothing", "三": "three"}
    lines = [json.dumps({"zh": source, "en": target}) for source, target in pairs.items()]
    (tmp_path / "test.jsonl").write_text("\n".join(lines))
    config = decoding.Config(ckpt=str(tiny_run), data=str(tmp_path), split="test")
    sentences = decoding.trained_model(config)
    assert len(sentences.sources) == 2
    assert sentences.references == ["one two", "three"]


def test_a_contestant_that_cannot_decode_is_left_out(monkeypatch, tmp_path):
    """Also if the ratios should refer to it."""

    def start_all_but_int8(name, contestant, task):
        return None if "int8" in name else start_in_this_process(name, contestant, task)

    monkeypatch.setattr(decoding, "start", start_all_but_int8)
    config = decoding.Config(
        preset="tiny",
        limit=2,
        rounds=1,
        threads=1,
        contestants="ours-int8,ours-plain-fp32",
        json=str(tmp_path / "table.json"),
    )
    decoding.main(config)
    (row,) = rows_of(tmp_path / "table.json")
    assert row["ratio"] == "–"


@pytest.mark.parametrize("beam", [1, 2])
def test_random_weights_decode_up_to_the_limit_in_both_programs(beam):
    pytest.importorskip("ctranslate2")
    names = "ours-plain-fp32,ctranslate2-float32"
    config = decoding.Config(
        preset="tiny", limit=5, beam=beam, rounds=1, threads=1, contestants=names
    )
    for row in decoding.main(config):
        tokens = row.figures["tokens_per_second"] * row.figures["seconds"]
        assert tokens == pytest.approx(5 * 40)
        assert row.figures["equal"] >= 0.8


# ---------------------------------------------------------------- GPU


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_commands_for_a_gpu_parse(device, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gpu, "tokens_for", lambda device: 512)
    place = tmp_path / "with space"
    place.mkdir()
    monkeypatch.chdir(tmp_path)  # the commands run elsewhere
    config = gpu.Config("tiny", data=place.name, train="--preset base --dropout 0.2")
    commands = gpu.commands(config, torch.device(device), "bf16", place)
    programs = []
    trained = []  # the settings of each training
    for command in commands:
        words = command.replace("-m torch.distributed.run --standalone --nproc_per_node 2 -- ", "")
        words = words.replace(f"'{place}'", "PATH").replace("-m ", "").split()
        programs.append(words[0])
        if words[0].startswith("PRESET="):
            continue
        monkeypatch.setattr("sys.argv", words)
        config = parse_flags(importlib.import_module(words[0].removesuffix(".py")).Config)
        if words[0] == "benchmarks.training":
            assert choose(config.contestants, training.CONTESTANTS)
        if words[0] == "benchmarks.decoding":
            assert choose(config.contestants, decoding.OURS)
        if words[0] == "train.py":
            trained.append(config)
    # The formats; then, on GPUs, one of them and both; last the run.
    formats = ["bf16"] if device == "cpu" else ["bf16", "fp16", "fp32", "auto", "auto"]
    assert [config.precision for config in trained] == [*formats, "auto"]
    assert all(config.max_steps == 60 for config in trained[:-1])
    assert (trained[-1].preset, trained[-1].dropout) == ("base", 0.2)
    on_both = [command for command in commands if "torch.distributed.run" in command]
    assert all("--device cuda " in command for command in on_both)
    assert programs[-1] == "evaluate.py"


def test_a_failed_command_is_reported(tmp_path, monkeypatch, capsys):
    good = "A=1 -c 'import os; print(os.environ[\"A\"])'"
    bad = "-c 'raise SystemExit(3)'"
    left_out = "-c 'print(\"ours-fp32: left out\")'"
    monkeypatch.setattr(gpu, "commands", lambda *_: [good, bad, left_out])
    monkeypatch.setattr(gpu, "describe_machine", str)
    monkeypatch.setattr(gpu, "look_at", lambda device: (torch.device("cpu"), "a CPU", "fp32"))
    monkeypatch.chdir(tmp_path)
    config = gpu.Config(device="cpu", out="here")
    assert gpu.main(config) == 1
    out = capsys.readouterr().out
    assert f"FAILED: {bad}\nFAILED: {left_out}\n2 failed" in out
    (log,) = tmp_path.glob("here/*/log.txt")
    assert f"python {good}\n1\n" in log.read_text()
    with pytest.raises(UserError, match="for a rehearsal: --device cpu"):
        gpu.main(replace(config, device="auto"))
