"""Shared by all tests: small models, toy data, runs and reports of them."""

import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
import torch
from processes import (  # noqa: F401  (for the tests, which import them from here)
    HANGS,
    ROOT,
    Forked,
    fork_ranks,
    forked,
    forked_ranks,
    free_port,
    in_this_process,
    run_code,
    run_script,
    torchrun,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fast

# A test process is no rank, also where the tests run in a SLURM job.
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
)
for name in list(os.environ):
    if name in RANK_VARIABLES or name.startswith("SLURM_"):
        del os.environ[name]
# On the CPU, for a GPU rounds otherwise; DEVICE=cuda asks for the GPU.
if "DEVICE" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Compiled code needs a folder that can be written to.
if not os.access(os.path.expanduser("~"), os.W_OK):
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", tempfile.mkdtemp())
# gloo warns, in every process, if the machine's own name does not resolve.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

# The same examples in every run, and no time limit: a busy machine passes as well.
hypothesis.settings.register_profile("course", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("course")

TINY = dict(
    d_model=32,
    nhead=4,
    num_encoder_layers=2,
    num_decoder_layers=2,
    dim_feedforward=64,
    max_length=64,
)
# Heads of 16, the narrowest that fast/ trains.
TINY_FLAGS = (
    "--d_model 32 --nhead 2 --num_encoder_layers 1 --num_decoder_layers 1 --dim_feedforward 64"
    " --source_vocab 300 --target_vocab 300 --dropout 0"
).split()
THREADS = torch.get_num_threads()

# pytest-xdist gives each free process the next file. These take longest, so they are started first:
# at the end no process is left alone with a long file.
LONGEST_FILES = [
    "test_train.py",
    "test_gpt.py",
    "test_many_processes.py",
    "test_evaluate.py",
    "test_readme.py",
    "test_collectives.py",
    "test_pipeline.py",
    "test_cuda.py",
    "test_attention_op.py",
    "test_report.py",
]

keep_tensors_together = fast.keep_tensors_together


def pytest_configure(config) -> None:
    """Leave the allocator of the test process alone: tests that measure memory share it."""
    fast.keep_tensors_together = lambda device: False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files first; all others keep their order."""
    ranks = {name: rank for rank, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that was created inside."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if torch.is_tensor(made) and made._base is None:
                self.numbers = max(self.numbers, made.numel())
        return result


# ---------------------------------------------------------------- data and runs


def records(run: Path, key: str = "train/loss") -> dict[int, float]:
    """Step -> value, from metrics.jsonl; each step may occur only once."""
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    points = [(line["step"], line[key]) for line in lines if key in line]
    assert len(dict(points)) == len(points)
    return dict(points)


def commands_of_section(section: str) -> list[str]:
    """Every `command` in a section of a page. In its table `--flags` are a command, too: behind
    the last one before them in their row, else behind the last one above the table."""
    found = []
    above = ""
    for line in section.splitlines():
        last = above
        for span in re.findall("`([^`]+)`", line):
            if span.startswith(("python ", "torchrun ")):
                last = span
                found.append(span)
            elif span.startswith("--") and line.startswith("|"):
                found.append(f"{last} {span}")
        if not line.startswith("|"):
            above = last
    return found


def write_pairs(
    folder: Path, pairs: list[tuple[str, str]], splits: dict[str, slice] | None = None
) -> Path:
    """Pairs as jsonl files, all in train or by `splits`."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in (splits or {"train": slice(None)}).items():
        rows = [{"zh": source, "en": target} for source, target in pairs[part]]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def reversed_digits(
    count: int, seed: int = 0, shortest: int = 3, longest: int = 7
) -> list[tuple[str, str]]:
    """A toy language: digits in Chinese, and the same digits in reverse order in English."""
    words = "zero one two three four five six seven eight nine".split()
    draw = random.Random(seed)
    pairs = {}
    while len(pairs) < count:
        digits = [draw.randrange(10) for _ in range(draw.randint(shortest, longest))]
        source = "".join("零一二三四五六七八九"[digit] for digit in digits)
        pairs[source] = " ".join(words[digit] for digit in reversed(digits))
    return list(pairs.items())


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory) -> Path:
    """2,000 training pairs of the toy language, and 100 each for validation and test."""
    splits = {"train": slice(0, 2000), "validation": slice(2000, 2100), "test": slice(2100, 2200)}
    return write_pairs(tmp_path_factory.mktemp("toy"), reversed_digits(2200), splits)


@pytest.fixture(scope="session")
def long_data(tmp_path_factory) -> Path:
    """2,010 training pairs, a fifth of them with a target of one word; the validation pairs are
    long. --select leaves 1,006, the last six of which fill a step of their own."""
    pairs = reversed_digits(2260)
    pairs[:2010:5] = [(source, target.split()[0]) for source, target in pairs[:2010:5]]
    pairs[2010:] = [(source, f"{target} {target}") for source, target in pairs[2010:]]
    splits = {
        "train": slice(2010),
        "validation": slice(2010, 2210),
        "test": slice(2210, None),
    }
    return write_pairs(tmp_path_factory.mktemp("short"), pairs, splits)


@pytest.fixture(scope="session")
def toy_run(toy_data, tmp_path_factory) -> Path:
    """A folder with runs/toy, a model that has learned to reverse."""
    folder = tmp_path_factory.mktemp("learned")
    flags = (
        "--d_model 64 --nhead 4 --num_encoder_layers 2 --num_decoder_layers 2"
        " --dim_feedforward 128 --dropout 0 --source_vocab 300 --target_vocab 300"
        " --max_steps 120 --eval_every 120 --lr 0.006 --precision fp32 --run toy"
    )
    forked("train.py", "--data", toy_data, *flags.split(), cwd=folder)
    return folder


@pytest.fixture(scope="session")
def tiny_run(toy_data, tmp_path_factory) -> Path:
    """A run with checkpoints 15, 30 and 45 of a model of 32 positions."""
    folder = tmp_path_factory.mktemp("tiny")
    flags = "--max_length 32 --max_steps 45 --eval_every 15 --lr 0.01 --precision fp32 --run tiny"
    forked("train.py", "--data", toy_data, *TINY_FLAGS, *flags.split(), cwd=folder)
    return folder / "runs" / "tiny"


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """The folder of several tests' runs, so that their data are tokenised once."""
    return tmp_path_factory.mktemp("place") / "runs"


@pytest.fixture
def here(place, tmp_path) -> Path:
    """A folder in `place` for the run of one test; it does not exist yet."""
    return place / tmp_path.name


@pytest.fixture(scope="session")
def whole_run(long_data, place) -> Path:
    """24 uninterrupted steps of one process, without accumulation or dropout."""
    from test_train import PLAIN, config, training

    return training.train(config(data=str(long_data), run=str(place / "whole"), **PLAIN))


def make_report(*runs: Path, out: Path, language: str = "en") -> str:
    """The page that report.py makes of these runs."""
    import report

    config = report.Config(out=str(out), language=language)
    config.runs = [str(run) for run in runs]
    report.report(config)
    return (out / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def without_drawing(monkeypatch) -> None:
    """Reports without pictures and fonts, which take most of the time."""
    monkeypatch.setattr("tools.reporting.figures.curves", lambda *_: b"")
    monkeypatch.setattr("tools.reporting.sections.picture", lambda attention: b"")
    monkeypatch.setattr("tools.reporting.page.Page.keep", lambda self, name, figure: b"")
    monkeypatch.setattr("tools.reporting.page.embedded", lambda text: "")


@pytest.fixture
def report_of(without_drawing, tmp_path) -> Callable[[Path], str]:
    """A function: a run's folder -> its report without pictures, in which nothing is missing."""

    def page_of(run: Path) -> str:
        page = make_report(run, out=tmp_path / "report")
        assert "What is missing" not in page
        return page

    return page_of


@pytest.fixture
def real_data() -> Path:
    """The course's data, in the folder that MINIDATASET names."""
    folder = os.environ.get("MINIDATASET")
    if not folder or not Path(folder).is_dir():
        pytest.skip("MINIDATASET names no directory")
    return Path(folder)


@pytest.fixture(autouse=True)
def _few_threads():
    """The same number of threads for every test: one if pytest-xdist runs a process per core."""
    most = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
    torch.set_num_threads(min(most, THREADS))


@pytest.fixture(autouse=True)
def _default_products():
    """PyTorch's own fp32 products: scripts change them for the rest of the process."""
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True)
def _no_process_group_is_left():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
