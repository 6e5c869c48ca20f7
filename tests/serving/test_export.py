"""An exported model translates as the run does, in the program it was exported for, and its card says how."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANGS, fork_ranks, forked

import serving
from decoding import translate_lines
from engine.errors import UserError
from loading import load_trained
from serving.export import export
from text.subwords import load_tokenizer

PACKAGES = {"ctranslate2": ["ctranslate2"], "onnx": ["onnx", "onnxscript", "onnxruntime"], "hf": []}
LINES = ["一二三", "九八七六五四", "没见过的字 English", "", "零"]


@pytest.fixture(scope="module")
def run(toy_run) -> Path:
    """A run that has learned something, with a score for its card."""
    forked("evaluate.py", "--ckpt", toy_run / "runs/toy", "--limit", 50, cwd=toy_run)
    return toy_run / "runs/toy"


@pytest.mark.parametrize("kind, quantization", [("ctranslate2", ""), ("ctranslate2", "int8"), ("onnx", ""), ("hf", "")])
def test_the_lines_in_the_card_translate_as_the_run_does(run, tmp_path, kind, quantization):
    for package in PACKAGES[kind]:
        pytest.importorskip(package)
    said, folder, trained = [], tmp_path / "out", load_trained(run)
    export(trained, kind, [str(folder)], quantization, said.append)
    assert "how to use it" in said[-1]
    if kind != "hf":
        tried = re.search(
            r"tried on (\d+) test rows .*: (\d+) come out token for token .*BLEU (.*), the model's (.*)", said[0]
        )
        assert int(tried[1]) == 100 and int(tried[2]) >= (98 if quantization else 100)
        assert abs(float(tried[3]) - float(tried[4])) <= (2 if quantization else 0)
    card = (folder / "README.md").read_text(encoding="utf-8")
    (loader,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", loader], cwd=folder, input="\n".join(LINES), capture_output=True, text=True,
                          timeout=HANGS, env={**os.environ, "PYTHONPATH": "", "PYTHONIOENCODING": "utf-8"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = translate_lines(trained.model, trained.source_tokenizer, trained.target_tokenizer, LINES).texts
    same = list(map(str.__eq__, done.stdout.splitlines(), expected))
    assert len(same) == len(LINES) and sum(same) >= len(LINES) - bool(quantization)  # 8 bits may tip a close choice
    for fact in ("2,000 training pairs", "`max_steps 500`", " test | 50 | greedy | "):
        assert fact in card


def test_an_export_that_fails_leaves_nothing(run, tmp_path, monkeypatch):
    def break_off(*_):
        raise RuntimeError("no")

    monkeypatch.setattr("serving.export.write_card", break_off)  # the last file
    with pytest.raises(RuntimeError, match="no"):
        export(load_trained(run), "hf", [str(tmp_path / "out")], "", print)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [["--serve"], ["--export", "hf", "out"]])
def test_several_processes_are_refused(run, tmp_path, flags):
    ranks = fork_ranks(2, "translate.py", "--ckpt", run, "--device", "cpu", *flags, cwd=tmp_path)
    assert [rank.wait() for rank in ranks] == [2, 2] and not (tmp_path / "out").exists()
    for rank in ranks:
        assert re.fullmatch(r"error \(rank \d\): --serve and --export take one process; .*\n", rank.output), rank.output


def test_tokenizers_open_as_huggingface_has_them(run, tmp_path):
    export(load_trained(run), "hf", [str(tmp_path)], "", print)
    for side in ("source", "target"):
        assert (
            load_tokenizer(str(tmp_path / side)).get_vocab()
            == load_tokenizer(str(run / "tokenizer" / side)).get_vocab()
        )


def onto_a_mount_point(*_):
    raise OSError(errno.EBUSY, "Device or resource busy")


def test_a_mistake_is_one_line(run, tmp_path, monkeypatch):
    trained = load_trained(run)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work.txt").touch()
    monkeypatch.setattr(Path, "replace", onto_a_mount_point)
    for words, message in [
        ([], "needs one folder"),
        (["a", "b"], "needs one folder"),
        ([str(tmp_path / "mine")], "is there"),
        (["/proc/out"], "cannot write to /proc"),
        ([str(tmp_path / "mount")], "cannot make .*/mount: Device or resource busy; name a new folder"),
    ]:
        with pytest.raises(UserError, match=message):
            export(trained, "hf", words, "", print)
    monkeypatch.setattr(serving, "find_spec", lambda module: None)
    with pytest.raises(
        UserError, match=r"onnx needs onnx, onnxscript, onnxruntime; pip install -r requirements-extras\.txt"
    ):
        export(trained, "onnx", [str(tmp_path / "new")], "", print)
    assert not (tmp_path / "new").exists()
