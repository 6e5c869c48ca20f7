"""Bad input of every kind ends in exit code 2 and one line, and leaves nothing half-written."""

import json
import os
import pickle
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
from conftest import TINY_FLAGS, in_this_process, reversed_digits, write_pairs

from data import load_prepared
from text.subwords import train_tokenizer

PAIRS = reversed_digits(90)
SPLITS = {"train": slice(0, 60), "validation": slice(60, 75), "test": slice(75, 90)}
TINY = [*TINY_FLAGS, "--max_length", "64"]
COMMANDS = {
    "train": [
        "train.py",
        *TINY,
        "--max_steps",
        "2",
        "--eval_every",
        "2",
        "--device",
        "cpu",
        "--run",
        "new",
    ],
    "resume": ["train.py", "--resume", "runs/good", "--max_steps", "4", "--device", "cpu"],
    "evaluate": ["evaluate.py", "--device", "cpu"],
    "translate": ["translate.py", "--device", "cpu"],
}
CHECKPOINT = Path("runs/good/checkpoints/step-2")


@dataclass
class Case:
    """A command in a folder that holds `pairs/` and the run `runs/good`, and words of the error."""

    command: str
    error: tuple
    prepare: Callable = lambda: None
    then: Callable = lambda: None
    environment: dict = field(default_factory=dict)
    takes_steps: bool = False  # before the error, so the files of the run may change


# ---- how the folder is spoiled


def in_file(path, content: str | bytes):
    """A function that writes `content` to `path`, folders included."""

    def write():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def rows(*pairs):
    """A function that writes these pairs to bad/train.jsonl."""
    lines = [json.dumps({"zh": source, "en": target}) + "\n" for source, target in pairs]
    return in_file("bad/train.jsonl", "".join(lines))


def damaged_parquet():
    os.mkdir("bad")
    columns = dict(zip(("zh", "en"), map(list, zip(*PAIRS * 20))))
    pyarrow.parquet.write_table(
        pyarrow.table(columns), "bad/train.parquet", compression="none", use_dictionary=False
    )
    content = Path("bad/train.parquet").read_bytes()
    Path("bad/train.parquet").write_bytes(content[:100] + b"?" * 300 + content[400:])


class Hostile:
    """A pickle of it makes a folder named `hacked` when it is opened."""

    def __reduce__(self):
        return os.mkdir, ("hacked",)


def flip_a_bit():
    content = bytearray((CHECKPOINT / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (CHECKPOINT / "model.safetensors").write_bytes(content)


def run_of_another_script():
    shutil.copytree("runs/good/checkpoints", "runs/other/checkpoints", symlinks=True)
    Path("runs/other/config.json").write_text('{"lr": 0.1}')


def tokenizer_without_specials():
    tokenizer = train_tokenizer((source for source, _ in PAIRS), 300)
    tokenizer.pad_token = tokenizer.bos_token = None
    tokenizer.save_pretrained("half")


def small_disk(left: int):
    """A function that mounts a disk at disk/, copies runs/ to it and leaves `left` bytes free."""

    def mount():
        Path("disk").mkdir()
        words = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", os.path.abspath("disk")]
        if not shutil.which("mount") or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("a small disk cannot be mounted on this machine")
        shutil.copytree("runs", "disk/runs", symlinks=True)
        with open("disk/filler", "wb") as file:
            file.write(bytes(shutil.disk_usage("disk").free - left))

    return mount


def resume_works():
    """Once there is space again, the run continues from its older checkpoint, which is complete."""
    assert os.readlink("disk/runs/good/checkpoints/last") == "step-2"
    os.remove("disk/filler")
    assert in_this_process(*COMMANDS["resume"], "--resume", "disk/runs/good") is None
    assert os.readlink("disk/runs/good/checkpoints/last") == "step-4"


def not_hacked():
    assert not os.path.exists("hacked")


# ---- (command, words of the error). The flags themselves: before any file is looked at.
FLAGS = [
    ("train --source_vocab 5", "--source_vocab 5 must be at least 300"),
    ("train --source zh --target zh", "--source and --target are both 'zh'"),
    ("evaluate --split dev", "--split dev is unknown"),
    ("evaluate --beams=3", "did you mean --beam?"),
    ("translate --beam -2 一", "--beam -2 must be at least 1"),
]

CASES = {
    # The data.
    "missing path": Case("train --data nowhere", ("nowhere does not exist", "check the path")),
    "corrupted parquet": Case(
        "train --data bad", ("bad/train.parquet", "get it again"), damaged_parquet
    ),
    "a header alone": Case(
        "train --data bad",
        ("bad: 0 training pairs left", "at least 2"),
        in_file("bad/train.csv", "zh,en"),
    ),
    "rows all empty": Case(
        "train --data bad",
        ("0 training pairs left", "9 with an empty side"),
        rows(*[("", ""), ("  ", "\t"), ("\u3000", "one")] * 3),
    ),
    "no validation rows": Case(
        "train --data bad",
        ("bad: 5 pairs are too few to cut 1 % off for validation",),
        rows(*PAIRS[:5]),
    ),
    # Flags that do not go together, or not with this machine.
    "heads that do not divide": Case(
        "train --data pairs --nhead 5", ("--d_model 32", "a multiple of --nhead 5")
    ),
    "more parts than pairs": Case(
        "train --data pairs --accumulate 500", ("60 training pairs", "500 micro-batches")
    ),
    "no GPU": Case(
        "train --data pairs --device cuda",
        ("--device cuda", "--device auto"),
        environment={"CUDA_VISIBLE_DEVICES": ""},
    ),
    # Resuming.
    "resume of nothing": Case("resume --resume runs/none", ("--resume runs/none: no such run",)),
    "resume with another model": Case("resume --d_model 64", ("--d_model 64", "32")),
    "resume from damage": Case(
        "resume", ("step-2 (checksum of model.safetensors differs)",), flip_a_bit
    ),
    "resume of a damaged config": Case(
        "resume", ("runs/good/config.json is damaged",), in_file("runs/good/config.json", "{")
    ),
    "a run that exists": Case(
        "train --data pairs --run good", ("run runs/good exists", "--resume runs/good")
    ),
    # What --ckpt names.
    "no runs": Case(
        "evaluate", ("no trained run in", "python train.py"), lambda: shutil.rmtree("runs")
    ),
    "no checkpoint": Case("evaluate --ckpt none", ("none does not exist", "give a run")),
    "weights outside a run": Case(
        "evaluate --ckpt w.safetensors",
        ("w.safetensors is not inside a run",),
        in_file("w.safetensors", safetensors.torch.save({"a": torch.zeros(2)})),
    ),
    "hostile weights": Case(
        "translate --ckpt runs/good/x.pt 一",
        ("x.pt", "would run code", "refused"),
        in_file("runs/good/x.pt", pickle.dumps(Hostile())),
        not_hacked,
    ),
    "a run of another script": Case(
        "evaluate --ckpt runs/other",
        ("runs/other", "is not inside a run of train.py"),
        run_of_another_script,
    ),
    # Tokenizers.
    "tokenizer without pad": Case(
        "train --data pairs --tokenizer half",
        ("half has no pad/bos token",),
        tokenizer_without_specials,
    ),
    # Places to write.
    "a run below a file": Case(
        "train --data pairs --run file.txt/x",
        ("cannot write to file.txt/x", "another --run"),
        in_file("file.txt", ""),
    ),
    "a name too long": Case(
        f"train --data pairs --run {'x' * 300}", ("cannot write", "File name too long")
    ),
    "disk full while tokenising": Case(
        "train --data pairs --run disk/new",
        ("cannot write", "/disk/.cache/", "free some space"),
        small_disk(left=20_000),
    ),
    "disk full when saving": Case(
        "resume --resume disk/runs/good",
        ("cannot write step-4", "No space left", "--resume disk/runs/good"),
        small_disk(left=300_000),
        resume_works,
        takes_steps=True,
    ),
}


def files_below(folder: Path) -> dict[str, bytes]:
    """Path -> content; of a link, where it leads."""
    links = {path: os.readlink(path).encode() for path in folder.rglob("*") if path.is_symlink()}
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {str(path.relative_to(folder)): content for path, content in (files | links).items()}


def check_nothing_half_written(before: dict, after: dict, takes_steps: bool) -> None:
    """Old files are as they were; new ones are no run, no temporary file, no broken cache."""
    for path in before:
        if not takes_steps and not path.endswith("train.log"):
            assert after.get(path) == before[path], f"{path} has changed"
    for path in after.keys() - before.keys():
        assert os.path.basename(path) != "config.json", f"{path} makes a run that never began"
        temporary = (".building-", ".tmp-", ".replaced-", ".new-", ".writable")
        assert not any(mark in path for mark in temporary), path
    for cache in (*Path("runs/.cache").glob("[!.]*"), *Path("disk/.cache").glob("[!.]*")):
        load_prepared(cache)  # raises if it is half-written


@pytest.fixture(scope="module")
def good_run(tmp_path_factory):
    """A folder with data and a run of two steps."""
    folder = tmp_path_factory.mktemp("good")
    write_pairs(folder / "pairs", PAIRS, SPLITS)
    before = os.getcwd()
    os.chdir(folder)
    try:
        assert in_this_process(*COMMANDS["train"], "--data", "pairs", "--run", "good") is None
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def place(good_run, tmp_path, monkeypatch):
    """A copy of the good run to spoil, as the working directory."""
    shutil.copytree(good_run, tmp_path / "place", symlinks=True)
    monkeypatch.chdir(tmp_path / "place")
    yield tmp_path / "place"
    if os.path.ismount("disk"):
        subprocess.run(["umount", "-l", "disk"], check=True)


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, place, monkeypatch, capfd):
    case = CASES[name]
    case.prepare()
    for variable, value in case.environment.items():
        monkeypatch.setenv(variable, value)
    script, *flags = shlex.split(case.command)
    before = files_below(place)
    capfd.readouterr()
    code = in_this_process(*COMMANDS[script], *flags)
    errors = capfd.readouterr().err.splitlines(True)
    if script == "translate":  # it names its device on standard error: the output is translations
        errors = [line for line in errors if not line.startswith("device: ")]
    assert code == 2 and len(errors) == 1 and errors[0].startswith("error"), errors
    for words in case.error:
        assert words in errors[0], errors
    check_nothing_half_written(before, files_below(place), case.takes_steps)
    case.then()


@pytest.mark.parametrize("command, words", FLAGS)
def test_a_flag_out_of_bounds(command, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    script, *flags = shlex.split(command)
    assert in_this_process(f"{script}.py", *flags) == 2
    errors = capfd.readouterr().err
    assert errors.startswith("error") and errors.count("\n") == 1 and words in errors
    assert not list(tmp_path.iterdir())
