"""Shared by all tests: small models, toy data, and scripts run as a user runs them."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
TINY = dict(d_model=32, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=64, max_length=64)
TINY_FLAGS = ["--d_model", "32", "--nhead", "4", "--num_encoder_layers", "1", "--num_decoder_layers", "1",
              "--dim_feedforward", "64", "--source_vocab", "300", "--target_vocab", "300"]  # fmt: skip


def run_script(
    *arguments, cwd: Path, timeout: float = 300, threads: int = 1, **environment
) -> subprocess.CompletedProcess:
    """`python script.py …` in `cwd`, as a user types it."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **environment}
    words = [sys.executable, str(ROOT / arguments[0]), *map(str, arguments[1:])]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def run_ranks(count: int, *arguments, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess:
    """The same under torchrun with `count` processes."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    # Without the "--", torchrun takes our --run for an abbreviation of its own --run-path.
    words += ["--", str(ROOT / arguments[0]), *map(str, arguments[1:])]
    # On the CPU wherever the tests run: a GPU for each is seldom there, and TF32 would round otherwise.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def write_pairs(folder: Path, pairs: list[tuple[str, str]], splits: dict[str, slice] | None = None) -> Path:
    """Pairs as jsonl files, all in train or by `splits`."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in (splits or {"train": slice(None)}).items():
        lines = [json.dumps({"zh": source, "en": target}, ensure_ascii=False) + "\n" for source, target in pairs[part]]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def reversed_digits(count: int, seed: int = 0, shortest: int = 3, longest: int = 7) -> list[tuple[str, str]]:
    """A toy language: the digits as Chinese words, and the same in reverse order as English ones."""
    words = "zero one two three four five six seven eight nine".split()
    draw, pairs = random.Random(seed), {}
    while len(pairs) < count:
        digits = [draw.randrange(10) for _ in range(draw.randint(shortest, longest))]
        source = "".join("零一二三四五六七八九"[digit] for digit in digits)
        pairs[source] = " ".join(words[digit] for digit in reversed(digits))
    return list(pairs.items())


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory) -> Path:
    """2,000 reversed numbers for training, 100 each to validate and test."""
    splits = {"train": slice(0, 2000), "validation": slice(2000, 2100), "test": slice(2100, 2200)}
    return write_pairs(tmp_path_factory.mktemp("toy"), reversed_digits(2200), splits)


@pytest.fixture(scope="session")
def toy_run(toy_data, tmp_path_factory) -> Path:
    """A folder with runs/toy, a model that has learned to reverse."""
    folder = tmp_path_factory.mktemp("learned")
    flags = [
        "--d_model",
        128,
        "--nhead",
        4,
        "--num_encoder_layers",
        2,
        "--num_decoder_layers",
        2,
        "--dim_feedforward",
        256,
    ]
    flags += ["--source_vocab", 300, "--target_vocab", 300, "--max_steps", 500, "--eval_every", 100, "--lr", 0.002]
    done = run_script("train.py", "--data", toy_data, *flags, "--dropout", 0, "--run", "toy", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def real_data() -> Path:
    """The course's data, where the environment says it is."""
    folder = os.environ.get("MINIDATASET")
    if not folder or not Path(folder).is_dir():
        pytest.skip("MINIDATASET names no directory")
    return Path(folder)


@pytest.fixture(autouse=True)
def _few_threads():
    most = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2  # with a file of tests on each core, one core for each
    torch.set_num_threads(min(most, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def _no_process_group_is_left():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
