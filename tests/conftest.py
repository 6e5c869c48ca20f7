"""Shared by all tests: small models, toy data, and scripts run as a user runs them."""

import json
import multiprocessing
import os
import random
import re
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import hypothesis
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fast
import report

# Nothing is one of many processes, wherever the tests were started.
for name in (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    *filter(re.compile("SLURM_").match, os.environ),
):
    os.environ.pop(name, None)
# On the CPU wherever the tests run: a GPU rounds otherwise, and each rank would want its own. DEVICE=cuda asks for it.
if "DEVICE" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
if not os.access(os.path.expanduser("~"), os.W_OK):  # what is compiled needs a place
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", tempfile.mkdtemp())

# gloo would warn, in every process, of a machine whose own name does not resolve.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

# The same examples in every run, and no clock: what fails here fails for everybody, on a busy machine as on a quiet one.
hypothesis.settings.register_profile("course", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("course")

ROOT = Path(__file__).parent.parent
TINY = dict(
    d_model=32,
    nhead=4,
    num_encoder_layers=2,
    num_decoder_layers=2,
    dim_feedforward=64,
    max_length=64,
)
TINY_FLAGS = [
    "--d_model",
    "32",
    "--nhead",
    "4",
    "--num_encoder_layers",
    "1",
    "--num_decoder_layers",
    "1",
    "--dim_feedforward",
    "64",
    "--source_vocab",
    "300",
    "--target_vocab",
    "300",
]
THREADS = torch.get_num_threads()  # as the machine has them
HANGS = 1800  # seconds: a process that takes so long on any machine waits for something that never comes

keep_tensors_together = fast.keep_tensors_together


def pytest_configure(config) -> None:
    """It is for the whole of a process, and tests of memory share theirs with others: processes of their own do it alone."""
    fast.keep_tensors_together = lambda device: False


# ---------------------------------------------------------------- scripts in processes of their own


def run_script(
    *arguments, cwd: Path, threads: int = 1, stdin="", **environment
) -> subprocess.CompletedProcess:
    """`python script.py …` in `cwd`, as a user types it, with `stdin` on its standard input."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **environment}
    words = [sys.executable, str(ROOT / arguments[0]), *map(str, arguments[1:])]
    return subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, input=stdin, timeout=HANGS
    )


def run_code(code: str, *arguments, **environment) -> str:
    """What a short program prints, which ends well."""
    words = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, **environment}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def torchrun(count: int, *arguments, cwd: Path, own=("--standalone",)) -> subprocess.Popen:
    """A script under torchrun with `count` processes; `own`: flags for torchrun itself."""
    words = [sys.executable, "-m", "torch.distributed.run", *own, "--nproc_per_node", str(count)]
    # Without the "--", torchrun takes our --run for an abbreviation of its own --run-path.
    words += ["--", str(ROOT / arguments[0]), *map(str, arguments[1:])]
    # On the CPU wherever the tests run: a GPU for each is seldom there, and TF32 would round otherwise.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        words, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# To start Python and import everything takes five seconds. These processes are forked from one that has done it.
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    [
        "train",
        "evaluate",
        "translate",
        "tensorboard",
        "torch.utils.tensorboard",
        "transformers",
        "matplotlib.figure",
        "matplotlib.font_manager",
        "nltk.translate.bleu_score",
        "sacrebleu.metrics",
        "pyarrow.parquet",
    ]
)
os.environ["PYTHONPATH"] = str(ROOT)  # where the one they are forked from finds the scripts


class Forked:
    """`python script.py …` in a process of its own that has the imports behind it; `output` once it has ended.

    `first` is called in that process before the script: a function of a module, with its arguments.
    """

    def __init__(self, *arguments, cwd: Path, first: tuple[Callable, ...] = (), **environment):
        self.file = Path(cwd) / f"output-{secrets.token_hex(8)}.txt"
        call = (
            _run_forked,
            (list(map(str, arguments)), str(cwd), str(self.file), environment, first),
        )
        self.process = FORKING.Process(target=call[0], args=call[1])
        self.process.start()

    def wait(self) -> int:
        """The exit code; negative: the number of the signal that ended it."""
        self.process.join(HANGS)
        assert self.process.exitcode is not None, f"it still runs: {self.output}"
        return self.process.exitcode

    def wait_for(self, words: str) -> str:
        """The output as soon as it holds these words."""
        end = time.monotonic() + HANGS
        while words not in self.output:
            assert self.process.is_alive() and time.monotonic() < end, self.output
            time.sleep(0.05)
        return self.output

    @property
    def output(self) -> str:
        return self.file.read_text(encoding="utf-8") if self.file.exists() else ""


def _run_forked(arguments, cwd, file, environment, first) -> None:
    os.setsid()
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    sys.stdout, sys.stderr = (
        open(number, "w", encoding="utf-8", buffering=1, closefd=False) for number in (1, 2)
    )
    os.chdir(cwd)
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", **environment})
    torch.set_num_threads(1)
    if first:
        first[0](*first[1:])
    sys.argv = arguments
    runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")


def forked(*arguments, **options) -> str:
    """The output of a script that ends well."""
    script = Forked(*arguments, **options)
    assert script.wait() == 0, script.output
    return script.output


def free_port(count: int = 1) -> int:
    """The first of `count` ports that stay free until they are used: below those of the system's outgoing connections."""
    while True:
        port = 20_000 + secrets.randbelow(
            12_000
        )  # by chance, another in each process that runs tests
        with suppress(OSError), ExitStack() as opened:
            for number in range(port, port + count):
                opened.enter_context(socket.create_server(("127.0.0.1", number)))
            return port


def fork_ranks(count: int, *arguments, **options) -> list[Forked]:
    """`count` ranks, as torchrun would start them."""
    common = dict(WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    common |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    return [
        Forked(*arguments, RANK=str(rank), LOCAL_RANK=str(rank), **common, **options)
        for rank in range(count)
    ]


def forked_ranks(count: int, *arguments, **options) -> str:
    """The output of rank 0, when all end well and the others say nothing."""
    ranks = fork_ranks(count, *arguments, **options)
    codes = [rank.wait() for rank in ranks]
    assert codes == [0] * count, [rank.output for rank in ranks]
    assert not any(rank.output for rank in ranks[1:]), [rank.output for rank in ranks[1:]]
    return ranks[0].output


def in_this_process(*words) -> int | None:
    """Run a script as __main__ here, where the heavy imports are done; → its exit code (None: it came to its end)."""
    script, *flags = map(str, words)
    before, hook, handler = (
        sys.argv,
        threading.excepthook,
        signal.getsignal(signal.SIGINT),
    )  # which scripts take
    sys.argv = [script, *flags]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as leaving:
        return leaving.code
    finally:
        sys.argv, threading.excepthook = before, hook
        signal.signal(signal.SIGINT, handler)
    return None


class LargestTensor(TorchDispatchMode):
    """Remembers how many numbers the largest tensor had that was made inside."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = (x for x in tree_leaves(result) if torch.is_tensor(x) and x._base is None)
        self.numbers = max([self.numbers, *(x.numel() for x in made)])
        return result


# ---------------------------------------------------------------- data and runs


def records(run: Path, key: str = "train/loss") -> dict[int, float]:
    """Step → value, from metrics.jsonl; a step that stands there twice is an error."""
    lines = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    points = [(line["step"], line[key]) for line in lines if key in line]
    assert len(dict(points)) == len(points)
    return dict(points)


def write_pairs(
    folder: Path, pairs: list[tuple[str, str]], splits: dict[str, slice] | None = None
) -> Path:
    """Pairs as jsonl files, all in train or by `splits`."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in (splits or {"train": slice(None)}).items():
        lines = [
            json.dumps({"zh": source, "en": target}, ensure_ascii=False) + "\n"
            for source, target in pairs[part]
        ]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def reversed_digits(
    count: int, seed: int = 0, shortest: int = 3, longest: int = 7
) -> list[tuple[str, str]]:
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


def with_short_targets(folder: Path, train: int) -> Path:
    """So many training pairs, every fifth with a target of one word; validation's are so long that a quarter is left out."""
    pairs = reversed_digits(train + 250)
    pairs[:train:5] = [(source, target.split()[0]) for source, target in pairs[:train:5]]
    pairs[train:] = [(source, f"{target} {target}") for source, target in pairs[train:]]
    splits = {
        "train": slice(train),
        "validation": slice(train, train + 200),
        "test": slice(train + 200, None),
    }
    return write_pairs(folder, pairs, splits)


@pytest.fixture(scope="session")
def long_data(tmp_path_factory) -> Path:
    return with_short_targets(tmp_path_factory.mktemp("short"), 2000)


@pytest.fixture(scope="session")
def toy_run(toy_data, tmp_path_factory) -> Path:
    """A folder with runs/toy, a model that has learned to reverse."""
    folder = tmp_path_factory.mktemp("learned")
    flags = "--d_model 64 --nhead 4 --num_encoder_layers 2 --num_decoder_layers 2 --dim_feedforward 128 --dropout 0"
    flags += " --source_vocab 300 --target_vocab 300 --max_steps 500 --eval_every 100 --lr 0.003 --precision fp32"
    done = run_script("train.py", "--data", toy_data, *flags.split(), "--run", "toy", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "findfont" not in done.stderr  # no complaints about fonts that are not installed
    return folder


@pytest.fixture(scope="session")
def tiny_run(toy_data, tmp_path_factory) -> Path:
    """A run with checkpoints 15, 30 and 45 of a model of 32 positions."""
    folder = tmp_path_factory.mktemp("tiny")
    flags = [
        "--max_length",
        32,
        "--max_steps",
        45,
        "--eval_every",
        15,
        "--lr",
        0.01,
        "--run",
        "tiny",
    ]
    forked("train.py", "--data", toy_data, *TINY_FLAGS, *flags, cwd=folder)
    return folder / "runs" / "tiny"


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """Where the runs of a session lie beside each other, so that their data is tokenised once."""
    return tmp_path_factory.mktemp("place") / "runs"


@pytest.fixture
def here(place, tmp_path) -> Path:
    """The name of a run that was not there before."""
    return place / tmp_path.name


@pytest.fixture(scope="session")
def whole_run(long_data, place) -> Path:
    """24 steps of one process, whole batches, no dropout; from the 18th on with 1,500 of the 2,000 pairs."""
    from test_train import PLAIN, config, training

    return training.train(config(data=str(long_data), run=str(place / "whole"), **PLAIN))


def make_report(*runs: Path, out: Path, language: str = "en", **flags) -> str:
    """The page that report.py makes of these runs."""
    config = report.Config(out=str(out), language=language, **flags)
    config.runs = [str(run) for run in runs]
    report.report(config)
    return (out / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def without_drawing(monkeypatch) -> None:
    """For reports: pictures and fonts take most of the time."""
    monkeypatch.setattr("tools.reporting.page.Page.keep", lambda self, name, figure: b"")
    monkeypatch.setattr("tools.reporting.page.embedded", lambda text: "")


@pytest.fixture
def report_of(without_drawing, tmp_path) -> Callable[[Path], str]:
    """A run's folder → the page that report.py makes of it, less pictures; nothing is missing there."""

    def page_of(run: Path) -> str:
        page = make_report(run, out=tmp_path / "report")
        assert "What is missing" not in page
        return page

    return page_of


@pytest.fixture
def real_data() -> Path:
    """The course's data, where the environment says it is."""
    folder = os.environ.get("MINIDATASET")
    if not folder or not Path(folder).is_dir():
        pytest.skip("MINIDATASET names no directory")
    return Path(folder)


@pytest.fixture(autouse=True)
def _few_threads():
    """As many for every test, whatever the one before has set."""
    most = (
        1 if "PYTEST_XDIST_WORKER" in os.environ else 2
    )  # with a file of tests on each core, one core for each
    torch.set_num_threads(min(most, THREADS))


@pytest.fixture(autouse=True)
def _no_process_group_is_left():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
