"""An exported model translates as the run does, in the program that it was exported for."""

import errno
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import HANGS, forked

from decoding import translate_lines
from engine.errors import UserError
from loading import load_trained
from text.subwords import load_tokenizer, special_ids
from tools import serving
from tools.reporting.reading import RunFiles
from tools.serving.card import bleu_of, write_card
from tools.serving.export import NEEDS, export
from translate import Config, translate

LINES = ["一二三", "九八七六五四", "没见过的字 English", "", "零"]
# A byte order mark, all kinds of spaces, names of special tokens, more tokens than positions.
ODD_LINES = ["\ufeff一二三", "四\u3000五\t六 \u00a0七", "一</s>二", "一\r二", "一二" * 300]


@pytest.fixture(scope="module")
def run(tiny_run, tmp_path_factory) -> Path:
    """A run with a score for its card."""
    folder = tmp_path_factory.mktemp("exported")
    run = shutil.copytree(tiny_run, folder / "runs" / "tiny", symlinks=True)
    forked("evaluate.py", "--ckpt", run, "--limit", 50, cwd=folder)
    return run


@pytest.mark.parametrize("kind", ["ctranslate2", "hf"])
def test_the_lines_in_the_card_translate_as_the_run_does(run, tmp_path, kind):
    for package in NEEDS[kind]:
        pytest.importorskip(package)
    logged, folder, trained = [], tmp_path / "out", load_trained(run)
    export(trained, kind, [str(folder)], "", logged.append)
    assert "how to use it" in logged[-1]
    if kind == "ctranslate2":
        assert re.search("tried on 100 test rows .*: 100 come out token for token", logged[0])
    card = (folder / "README.md").read_text(encoding="utf-8")
    for fact in ("2,000 training pairs", "`max_steps 45`", " test | 50 | greedy | "):
        assert fact in card
    lines = ODD_LINES + LINES
    tokenizers = (trained.source_tokenizer, trained.target_tokenizer)
    assert translated(folder, lines) == translate_lines(trained.model, *tokenizers, lines).texts


def test_int8_takes_a_quarter_of_the_disk(run, tmp_path):
    """What it computes depends on the processor's instructions."""
    pytest.importorskip("ctranslate2")
    sizes = []
    for quantization in ("", "int8"):
        folder, logged = tmp_path / f"out{quantization}", []
        export(load_trained(run), "ctranslate2", [str(folder)], quantization, logged.append)
        assert "tried on 100 test rows" in logged[0]
        sizes.append((folder / "model.bin").stat().st_size)
    assert sizes[1] < 0.5 * sizes[0]


def translated(folder: Path, lines: list[str]) -> list[str]:
    """What the lines of Python in the card make of these lines."""
    (loader,) = re.findall(
        r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    done = subprocess.run(
        [sys.executable, "-c", loader],
        cwd=folder,
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=HANGS,
        env={**os.environ, "PYTHONPATH": "", "PYTHONIOENCODING": "gbk"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_empty_translation_stays_empty(run, tmp_path):
    """With a model that ends each one at once."""
    pytest.importorskip("ctranslate2")
    logged, trained = [], load_trained(run)
    trained.model.output.bias[special_ids(trained.target_tokenizer)["eos"]] += 1000
    export(trained, "ctranslate2", [str(tmp_path / "out")], "", logged.append)
    assert "100 come out token for token" in logged[0]


def test_an_export_that_fails_leaves_nothing(run, tmp_path, monkeypatch):
    def break_off(*_):
        raise RuntimeError("no")

    monkeypatch.setattr("tools.serving.export.write_card", break_off)  # the last file
    with pytest.raises(RuntimeError, match="no"):
        export(load_trained(run), "hf", [str(tmp_path / "out")], "", print)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("asked", [dict(serve=True), dict(export="hf")])
def test_several_processes_are_refused(asked, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="--serve and --export take one process; start"):
        translate(Config(**asked))


def test_tokenizers_open_as_huggingface_has_them(run, tmp_path):
    export(load_trained(run), "hf", [str(tmp_path)], "", print)
    for side in ("source", "target"):
        exported, own = (
            load_tokenizer(str(folder / side)) for folder in (tmp_path, run / "tokenizer")
        )
        assert exported.get_vocab() == own.get_vocab()


def test_the_card_asks_for_no_more_tokens_than_the_model_has_places(run, tmp_path):
    trained = load_trained(run)
    for places, most in ((64, 64), (512, 256)):
        trained.model.config = replace(trained.model.config, max_length=places)
        write_card(trained, "ctranslate2", tmp_path)
        card = (tmp_path / "README.md").read_text(encoding="utf-8")
        assert re.search(rf"max_decoding_length={most}\b", card)


def test_the_interval_stands_beside_the_score_that_it_is_of():
    score = {"data": "d", "split": "test", "sentences": 5, "decoding": "greedy", "signature": "s"}
    score |= {
        "nltk": 10,
        "low": 9,
        "high": 11,
        "sacrebleu": 20,
        "chrf": 30,
        "checkpoint": "r/checkpoints/step-2",
    }
    scores = {
        "eval/test-greedy": score,
        "eval/test-greedy-step-1": score | {"checkpoint": "r/checkpoints/step-1"},
    }
    names, _, line = bleu_of(RunFiles(Path("r"), "r", results=scores), "step-2").splitlines()
    cells = dict(zip(names.split(" | "), line.split(" | ")))
    assert cells["nltk (95 %)"] == "10.00 (9.00–11.00)" and cells["sacreBLEU"] == "20.00"


def onto_a_mount_point(*_):
    raise OSError(errno.EBUSY, "Device or resource busy")


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "needs one folder"),
        (["a", "b"], "needs one folder"),
        (["."], "exists already"),
        (["/proc/out"], "cannot write to /proc"),
        (["mount"], "cannot make .*/mount: Device or resource busy; name a new folder"),
    ],
)
def test_a_folder_that_cannot_be_is_one_line(run, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work.txt").touch()
    monkeypatch.setattr(Path, "replace", onto_a_mount_point)
    with pytest.raises(UserError, match=message):
        export(load_trained(run), "hf", words, "", print)
    assert [file.name for file in tmp_path.iterdir()] == ["work.txt"]


@pytest.mark.parametrize(
    "start, needs",
    [
        (
            lambda: export(None, "ctranslate2", ["new"], "", print),
            "ctranslate2 needs ctranslate2",
        ),
        (
            lambda: serving.start(
                SimpleNamespace(serve=True, export="", text=[]), None, None, None
            ),
            "--serve needs fastapi, uvicorn",
        ),
    ],
)
def test_a_package_that_is_missing_is_one_line(monkeypatch, start, needs):
    monkeypatch.setattr(serving, "find_spec", lambda module: None)
    with pytest.raises(UserError, match=rf"{needs}; pip install -r requirements-extras\.txt$"):
        start()
