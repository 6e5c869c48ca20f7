"""evaluate.py and translate.py: what is scored, where it is kept, and streams, signals and places that are not as usual."""

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import HANGS, ROOT, TINY_FLAGS, forked, in_this_process, reversed_digits, write_pairs

from decoding import translate_lines
from engine import config as under_test
from engine.errors import UserError, run_script
from evaluate import Config

PAIRS = reversed_digits(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """runs/r, a run of two steps, with its data."""
    place = tmp_path_factory.mktemp("place")
    write_pairs(
        place / "data",
        PAIRS,
        {"train": slice(0, 90), "validation": slice(90, 95), "test": slice(95, 100)},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        flags = [
            "--data",
            "data",
            *TINY_FLAGS,
            "--max_length",
            64,
            "--max_steps",
            2,
            "--eval_every",
            1,
            "--run",
            "r",
        ]
        assert not in_this_process("train.py", *flags)
    return place


@pytest.fixture
def place(folder, monkeypatch):
    """The same, as the working directory, without scores."""
    monkeypatch.chdir(folder)
    for file in Path("runs/r/eval").glob("*"):
        file.unlink()
    return folder


@pytest.fixture
def evaluate(place, capsys):
    def evaluate(*flags) -> str:
        assert not in_this_process("evaluate.py", "--ckpt", "runs/r", *flags, "--device", "cpu")
        return capsys.readouterr().out

    return evaluate


@pytest.fixture
def refused(place, capsys):
    def refused(*flags) -> str:
        code, errors = (
            in_this_process("evaluate.py", *flags, "--device", "cpu"),
            capsys.readouterr().err,
        )
        assert code == 2 and errors.startswith("error: ") and errors.count("\n") == 1
        return errors

    return refused


def scores() -> dict[str, dict]:
    return {file.stem: json.loads(file.read_text()) for file in Path("runs/r/eval").glob("*.json")}


# What is scored.


def test_other_data_without_a_test_split_are_scored_whole(place, evaluate, refused):
    write_pairs(place / "flat", PAIRS[100:300])
    for data in ("flat/train.jsonl", "flat"):
        output = evaluate("--data", data, "--out", "out.txt")
        assert f"scored     {data}, split all, 200 rows" in output
        assert len(Path("out.txt").read_text().splitlines()) == 200
    ((name, score),) = scores().items()
    assert (
        name == f"all-greedy-data-{score['rows']}"
        and score["data"] == "flat"
        and score["sentences"] == 200
    )
    no_split = refused("--ckpt", "runs/r", "--data", "flat", "--split", "test")
    assert "flat has no test split (it has train); leave --split out" in no_split
    assert "split test, 5 rows" in evaluate(
        "--data", "data"
    )  # the run's own, whatever it is called
    assert "split test, 5 rows" in evaluate("--data", place / "data")


def test_columns_of_other_data(place, evaluate):
    Path("columns.tsv").write_text("English\tChinese\none\t一\ntwo\t二\n", encoding="utf-8")
    output = evaluate("--data", "columns.tsv", "--source", "Chinese", "--target", "English")
    assert "split all, 2 rows" in output and "reference    two" in output


def test_scores_of_different_things_have_different_names(evaluate, monkeypatch):
    penalties = []

    def spy(*arguments, **options):
        penalties.append(options["length_penalty"])
        return translate_lines(*arguments, **options)

    monkeypatch.setattr("decoding.translate_lines", spy)
    other = {"step-1": "step-2", "step-2": "step-1"}[Path("runs/r/checkpoints/best").resolve().name]
    evaluate()
    evaluate("--precision", "fp32")
    evaluate("--ckpt", f"runs/r/checkpoints/{other}")
    evaluate(
        "--ckpt",
        f"runs/r/checkpoints/{other}/model.safetensors",
        "--beam",
        2,
        "--length_penalty",
        0.3,
    )
    assert "mean of step-1, step-2" in evaluate("--average", 2)
    assert "split validation, 3 rows" in evaluate("--split", "validation", "--limit", 3)
    names = {"greedy", "greedy-fp32", f"greedy-{other}", f"beam2-lp0.3-{other}", "greedy-average2"}
    assert scores().keys() == {f"test-{name}" for name in names} | {"validation-greedy-first3"}
    assert (
        scores()[f"test-beam2-lp0.3-{other}"]["decoding"] == "beam 2, length penalty 0.3"
        and 0.3 in penalties
    )


# Where it is written.


def test_places_are_tried_before_the_decoding(place, refused, monkeypatch):
    monkeypatch.setattr("decoding.translate_lines", lambda *_, **__: pytest.fail("decoded"))
    ckpt = ("--ckpt", "runs/r")
    assert "File name too long" in refused(*ckpt, "--out", "x" * 300)
    assert "--out data cannot be written (Is a directory)" in refused(*ckpt, "--out", "data")
    assert "No such file" in refused(*ckpt, "--out", "none/x")


# Flags.


@pytest.mark.parametrize(
    "typed_name, meant",
    [
        ("batch_size", "tokens_per_batch"),
        ("batch", "tokens_per_batch"),
        ("learning-rate", "lr"),
        ("max_step", "max_steps"),
    ],
)
def test_flags_by_their_names_elsewhere(typed_name, meant):
    assert (
        under_test.nearest(typed_name, ["lr", "max_steps", "tokens_per_batch"], "--")
        == f"; did you mean --{meant}?"
    )
    assert under_test.nearest("batch", ["batch_size"], "--") == "; did you mean --batch_size?"


@pytest.mark.parametrize(
    ("path", "shown"), [("a\0b", "a.x00b"), (os.fsdecode(b"a\xff"), "a.udcff")]
)
def test_a_path_with_a_nul_or_with_bytes_that_are_not_utf8(path, shown):
    with pytest.raises(
        UserError, match=f"--out '{shown}' holds a NUL character, or is not UTF-8; rename it"
    ):
        under_test.checked(Config(out=path))


@pytest.mark.parametrize("name", ["train", "evaluate", "translate"])
def test_wrong_settings_made_in_python(name, monkeypatch):
    monkeypatch.setattr("engine.distributed.start", None)  # it does not get so far
    script = import_module(name)
    with pytest.raises(UserError, match="--precision fp8 is unknown; choose auto, fp32, bf16"):
        getattr(script, name)(script.Config(precision="fp8"))


@pytest.mark.parametrize("work", [lambda: torch.empty(2**50), lambda: np.ones(2**50)])
def test_out_of_memory(work, capsys):
    with pytest.raises(SystemExit):
        run_script(work)
    errors = capsys.readouterr().err
    assert errors.startswith("error: the machine's memory is full; ") and errors.count("\n") == 1


# Streams and signals.


def shell(command: str, place: Path) -> subprocess.CompletedProcess:
    words = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT))}/{command}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "latin-1"}
    return subprocess.run(
        ["bash", "-c", words], cwd=place, env=environment, capture_output=True, timeout=HANGS
    )


@pytest.mark.parametrize(
    "command",
    [
        "translate.py --ckpt runs/r 一二 >&-",
        "evaluate.py --ckpt runs/r --limit 2 <&-",
    ],
)
def test_closed_streams_and_a_terminal_in_latin_1(command, place):
    done = shell(command, place)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    assert done.stdout == b"" if ">&-" in command else b"scale 0\\u2013100" in done.stdout


def test_ctrl_c_during_the_imports(place):
    words = [sys.executable, "-X", "importtime", ROOT / "translate.py", "--ckpt", "runs/r"]
    # In the background of a script, pytest ignores Ctrl-C, and so would what it starts.
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listens
    )
    for line in process.stderr:
        if " torch." in line:  # a part of it, and much is to come
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HANGS)
    assert process.returncode == -signal.SIGINT and "Traceback" not in errors


def test_windows_is_told_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(SystemExit):
        under_test.parse_flags(object)
    assert "Linux, macOS or WSL" in capsys.readouterr().err


def as_on_macos() -> None:
    """Another name of the system, no mallopt, no /proc."""
    exists = Path.exists
    sys.platform = "darwin"
    del ctypes.CDLL.__getattr__
    Path.exists = lambda path: not str(path).startswith("/proc") and exists(path)


def test_training_and_scoring_without_what_only_linux_has(place):
    """The kernels are not used, and that is said."""
    flags = ["--data", "data", *TINY_FLAGS, "--max_steps", 2, "--run", "mac"]
    assert "the C++ functions need Linux" in forked(
        "train.py", *flags, cwd=place, first=(as_on_macos,)
    )
    assert "nltk corpus_bleu" in forked(
        "evaluate.py", "--ckpt", "runs/mac", cwd=place, first=(as_on_macos,)
    )
