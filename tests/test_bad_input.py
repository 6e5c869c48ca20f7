"""Every kind of bad input ends in exit code 2 and one line that says what is wrong, and leaves nothing half-written."""

import json
import os
import pickle
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
from conftest import HANGS, ROOT, TINY_FLAGS, in_this_process, reversed_digits, write_pairs

from data import load_prepared
from text.subwords import train_tokenizer

PAIRS = reversed_digits(90)
SPLITS = {"train": slice(0, 60), "validation": slice(60, 75), "test": slice(75, 90)}
COMMANDS = {
    "train": [
        "train.py",
        *TINY_FLAGS,
        "--max_length",
        "64",
        "--max_steps",
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
SILENT = socket.create_server(
    ("127.0.0.1", 0)
)  # takes connections and never answers, like a network that drops all
NO_ANSWER = f"http://127.0.0.1:{SILENT.getsockname()[1]}"


@dataclass
class Case:
    """What is typed in a folder that holds `pairs/` and the run `runs/good`, and words that the one line must hold."""

    command: str
    says: tuple
    prepare: Callable = lambda: None
    then: Callable = lambda: None
    process: bool = False  # a process of its own, as a user starts it; else inside this one, which has torch loaded
    environment: dict = field(default_factory=dict)
    slow: bool = False
    goes_on: bool = False  # the run takes steps before the fault comes, so its files may change


# How the folder is spoiled.


def in_file(path, content: str | bytes):
    """→ a function that writes `content` to `path`, folders included."""

    def write():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def lines(*rows, name="train.jsonl"):
    """→ a function that writes rows (dict: as JSON; str: as they are) to bad/<name>."""
    texts = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    return in_file(f"bad/{name}", "".join(text + "\n" for text in texts))


def rows(*pairs):
    return [{"zh": source, "en": target} for source, target in pairs]


def damaged_parquet():
    os.mkdir("bad")
    table = pyarrow.table(
        {"zh": [source for source, _ in PAIRS] * 20, "en": [target for _, target in PAIRS] * 20}
    )
    pyarrow.parquet.write_table(
        table, "bad/train.parquet", compression="none", use_dictionary=False
    )
    data = Path("bad/train.parquet").read_bytes()
    Path("bad/train.parquet").write_bytes(data[:100] + b"?" * 300 + data[400:])


class Hostile:
    """A pickle of it makes a folder named `hacked` when it is opened."""

    def __reduce__(self):
        return os.mkdir, ("hacked",)


def hostile_optimizer():
    """A pickle with code in a checkpoint whose checksums are right."""
    torch.save({"state": Hostile()}, CHECKPOINT / "optimizer.pt")
    recorded = json.loads((CHECKPOINT / "checksums.json").read_text())
    recorded["optimizer.pt"] = sha256((CHECKPOINT / "optimizer.pt").read_bytes()).hexdigest()
    (CHECKPOINT / "checksums.json").write_text(json.dumps(recorded, indent=2) + "\n")


def flip_a_bit():
    data = bytearray((CHECKPOINT / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (CHECKPOINT / "model.safetensors").write_bytes(data)


def change_the_data():
    with open("pairs/train.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"zh": "一", "en": "one"}) + "\n")


def another_script_s_run():
    shutil.copytree("runs/good/checkpoints", "runs/other/checkpoints", symlinks=True)
    Path("runs/other/config.json").write_text('{"lr": 0.1}')


def tokenizer_without_specials():
    tokenizer = train_tokenizer((source for source, _ in PAIRS), 300)
    tokenizer.pad_token = tokenizer.bos_token = None
    tokenizer.save_pretrained("half")


def small_disk(size: str, then=lambda: None):
    """→ a function that mounts a disk of `size` at disk/."""

    def mount():
        Path("disk").mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", os.path.abspath("disk")]
        try:
            mounted = subprocess.run(words, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("no `mount` on this machine")
        if mounted.returncode:
            pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
        then()

    return mount


def many_pairs():
    write_pairs(Path("many"), reversed_digits(20_000, longest=20))


def fill_disk(left: int) -> None:
    """A file that leaves `left` bytes of the disk."""
    free = shutil.disk_usage("disk").free
    with open("disk/filler", "wb") as file:
        file.write(bytes(free - left))


def run_on_small_disk(left: int):
    """→ a function that moves the run to a disk that has `left` bytes free after it."""

    def move():
        shutil.copytree("runs", "disk/runs", symlinks=True)
        fill_disk(left)

    return small_disk("4m", move)


def resume_works():
    """Once there is space again, the run goes on from its older checkpoint, which is whole."""
    assert os.readlink("disk/runs/good/checkpoints/last") == "step-2"
    os.remove("disk/filler")
    outcome = in_this_process(*COMMANDS["resume"], "--resume", "disk/runs/good")
    assert outcome is None
    assert os.readlink("disk/runs/good/checkpoints/last") == "step-4"


def not_hacked():
    assert not os.path.exists("hacked")


# (what is typed, words of the line): said by the flags themselves, before any file is looked at; the bounds of a flag, of
# which each script has one here, are tested in engine/test_config.py.
OUT_OF_BOUNDS = [
    ("train --d_model -1", "--d_model -1 must be at least"),
    ("train --max_minutes inf", "--max_minutes inf"),
    ("train --source_vocab 5", "--source_vocab 5 must be at least 300"),
    ("train --source zh --target zh", "--source and --target are both 'zh'"),
    ("train --preset huge", "lab, base or big"),
    ("train --precision fp8", "fp32, bf16 or fp16"),
    ("evaluate --split dev", "--split dev is unknown"),
    ("evaluate --beam 0", "--beam 0 must be at least 1"),
    ("translate --beam -2 一", "--beam -2 must be at least 1"),
    ("evaluate --beams=3", "did you mean --beam?"),
    ("translate --chpt x", "did you mean --ckpt?"),
]

CASES = {
    # The data.
    "missing path": Case("train --data nowhere", ("nowhere does not exist", "check the path")),
    "only a test split": Case(
        "train --data bad", ("bad", "no train split"), lines(*rows(*PAIRS), name="test.jsonl")
    ),
    "corrupted parquet": Case(
        "train --data bad", ("bad/train.parquet", "get it again"), damaged_parquet
    ),
    "a header alone": Case(
        "train --data bad", ("bad", "0 training pairs left"), lines("zh,en", name="train.csv")
    ),
    "rows all empty": Case(
        "train --data bad",
        ("0 training pairs left", "9 with an empty side"),
        lines(*rows(("", ""), ("  ", "\t"), ("\u3000", "one")) * 3),
    ),
    "one line without end": Case(
        "train --data bad",
        ("0 training pairs left", "1 longer than --max_length"),
        lines(*rows(("一" * 100_000, "one " * 25_000))),
    ),
    "one row": Case(
        "train --data bad",
        ("1 training pairs left", "at least 2 are needed"),
        lines(*rows(("一", "one"))),
    ),
    "source is target": Case(
        "train --data bad",
        ("0 training pairs left", "60 with source = target"),
        lines(*rows(*[(target, target) for _, target in PAIRS[:60]])),
    ),
    "no validation rows": Case(
        "train --data bad",
        ("bad: 5 pairs are too few to cut 1 % off for validation",),
        lines(*rows(*PAIRS[:5])),
    ),
    # Flags.
    "heads that do not divide": Case(
        "train --data pairs --nhead 5", ("--d_model 32", "a multiple of --nhead 5")
    ),
    "odd width": Case("train --data pairs --d_model 33 --nhead 3", ("--d_model 33 must be even",)),
    "more parts than pairs": Case(
        "train --data pairs --accumulate 500", ("60 training pairs", "500 micro-batches")
    ),
    "no GPU": Case(
        "train --data pairs --device cuda",
        ("--device cuda", "--device auto takes the CPU"),
        process=True,
        environment={"CUDA_VISIBLE_DEVICES": ""},
    ),
    # Going on.
    "resume of nothing": Case(
        "resume --resume runs/none", ("--resume runs/none: no such run", "ls runs")
    ),
    "resume with other data": Case(
        "resume --data pairs",
        ("runs/good", "not what the run began with", "put it back"),
        change_the_data,
    ),
    "resume with another model": Case(
        "resume --d_model 64", ("another --d_model (64, the run has 32)",)
    ),
    "resume from damage": Case(
        "resume", ("step-2 (checksum of model.safetensors differs)",), flip_a_bit
    ),
    "resume of a damaged config": Case(
        "resume",
        ("--resume runs/good: checksum of config.json differs",),
        in_file("runs/good/config.json", "{"),
    ),
    "a run that exists": Case(
        "train --data pairs --run good", ("run runs/good exists", "--resume runs/good")
    ),
    "hostile optimizer": Case(
        "resume", ("optimizer.pt", "would run code", "refused"), hostile_optimizer, not_hacked
    ),
    # What --ckpt names.
    "no runs": Case(
        "evaluate", ("no trained run in", "python train.py"), lambda: shutil.rmtree("runs")
    ),
    "no checkpoint": Case("evaluate --ckpt none", ("none does not exist", "give a run")),
    "empty checkpoint": Case(
        "translate --ckpt empty 一", ("empty is not a whole checkpoint",), lambda: os.mkdir("empty")
    ),
    "a text named .pt": Case(
        "evaluate --ckpt runs/good/notes.pt",
        ("notes.pt", "not a weights file"),
        in_file("runs/good/notes.pt", "to do: translate\n"),
    ),
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
        another_script_s_run,
    ),
    "a damaged model.json": Case(
        "evaluate --ckpt runs/good",
        ("runs/good: config.json or model.json is damaged",),
        in_file("runs/good/model.json", "{}"),
    ),
    # Tokenizers.
    "tokenizer without pad": Case(
        "train --data pairs --tokenizer half",
        ("half has no pad/bos token",),
        tokenizer_without_specials,
    ),
    "empty tokenizer": Case(
        "train --data pairs --tokenizer empty",
        ("empty: no tokenizer can be read",),
        lambda: os.mkdir("empty"),
    ),
    "tokenizer without a network": Case(
        "train --data pairs --tokenizer no/such",
        ("no/such: no such folder",),
        slow=True,
        process=True,
        environment={"HF_ENDPOINT": NO_ANSWER},
    ),
    # Places to write.
    "a run below a file": Case(
        "train --data pairs --run file.txt/x",
        ("cannot write to file.txt/x", "another --run"),
        in_file("file.txt", ""),
    ),
    "a run in /proc": Case(
        "train --data pairs --run /proc/x", ("cannot write to /proc/x", "choose another --run")
    ),
    "a name too long": Case(
        f"train --data pairs --run {'x' * 300}", ("cannot write", "File name too long")
    ),
    "disk full while tokenising": Case(
        "train --data many --run disk/new",
        ("cannot write", "/disk/.cache/", "free some space"),
        small_disk("1m", many_pairs),
        slow=True,
        process=True,
    ),
    "disk full when saving": Case(
        "resume --resume disk/runs/good",
        ("cannot write step-4", "No space left", "resume from step-2, which is whole"),
        run_on_small_disk(left=300_000),
        resume_works,
        process=True,
        goes_on=True,
    ),
    "disk full when resuming": Case(
        "resume --resume disk/runs/good",
        ("No space left on device", "free some space"),
        run_on_small_disk(left=0),
        resume_works,
        goes_on=True,
    ),
    # The rest.
    "half an environment": Case(
        "train --data pairs", ("WORLD_SIZE", "missing", "torchrun"), environment={"RANK": "0"}
    ),
    "no such split": Case(
        "evaluate --ckpt runs/good --split train --data bad",
        ("bad has no train split",),
        lines(*rows(*PAIRS), name="test.jsonl"),
    ),
}


def files_below(folder: Path) -> dict[str, bytes]:
    """Path → content; of a link, where it leads."""
    links = {path: os.readlink(path).encode() for path in folder.rglob("*") if path.is_symlink()}
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {str(path.relative_to(folder)): content for path, content in (files | links).items()}


def check_nothing_half_written(before: dict, after: dict, goes_on: bool) -> None:
    """What was there is as it was; what is new is no run, no torn file, and a cache only if it is whole."""
    for path in before:
        if not goes_on and not path.endswith("train.log"):
            assert after.get(path) == before[path], f"{path} has changed"
    for path in after.keys() - before.keys():
        assert os.path.basename(path) != "config.json", f"{path} makes a run that never began"
        assert not any(
            mark in path for mark in (".building-", ".tmp-", ".replaced-", ".new-", ".writable")
        ), path
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


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name.replace(" ", "-"), marks=[pytest.mark.slow] * case.slow)
        for name, case in CASES.items()
    ],
)
def test_bad_input(case, place, monkeypatch, capfd):
    case.prepare()
    name, *flags = shlex.split(case.command)
    words = [*COMMANDS[name], *flags]
    before = files_below(place)
    if case.process:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HOME": str(place / "hub"),
            **case.environment,
        }
        command = [sys.executable, str(ROOT / words[0]), *words[1:]]
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=HANGS
        )
        code, errors = done.returncode, done.stderr.decode()
    else:
        for variable, value in case.environment.items():
            monkeypatch.setenv(variable, value)
        capfd.readouterr()
        code, errors = in_this_process(*words), capfd.readouterr().err
    if (
        name == "translate"
    ):  # it says its device on standard error, for standard output is for translations
        errors = "".join(
            line for line in errors.splitlines(True) if not line.startswith("device: ")
        )
    assert code == 2, errors
    assert len(errors.splitlines()) == 1 and errors.startswith("error"), errors
    for word in case.says:
        assert word in errors, errors
    check_nothing_half_written(before, files_below(place), case.goes_on)
    case.then()


@pytest.mark.parametrize("command, words", OUT_OF_BOUNDS)
def test_a_flag_out_of_bounds(command, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    script, *flags = shlex.split(command)
    assert in_this_process(f"{script}.py", *flags) == 2
    errors = capfd.readouterr().err
    assert errors.startswith("error") and errors.count("\n") == 1 and words in errors
    assert not list(tmp_path.iterdir())


def test_a_line_without_end_among_good_ones_is_dropped_and_counted(place, capfd):
    lines(*rows(*PAIRS[:60], ("一" * 100_000, "one " * 25_000)))()
    shutil.copy("pairs/validation.jsonl", "bad")
    assert (
        in_this_process(*COMMANDS["train"], "--data", "bad", "--seed", "20240101") is None
    )  # a date is a good seed
    said = capfd.readouterr().out
    assert "61 rows read; dropped 1 longer than --max_length; 60 kept" in said
    assert "stopped after step 2: all steps are done" in said
