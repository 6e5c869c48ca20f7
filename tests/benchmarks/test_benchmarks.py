"""Every benchmark runs at a tiny size, in this process, and counts and compares correctly."""

import importlib
import json
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import Transformer

from benchmarks import corpus as corpus_module
from benchmarks import decoding, gpu, measuring, time_to_bleu, training
from benchmarks.corpus import as_ids, as_words, load_corpus, read_corpus
from benchmarks.peers import contest, marian, toolkits
from benchmarks.peers.contest import SIZES, TINY, Task, choose, start
from engine.config import parse_flags
from engine.errors import UserError
from model import ModelConfig, training_flops


class Ended(Exception):
    """Raised instead of ending the process."""


def end(code):
    raise Ended


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """An empty cache for these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "ROOT", tmp_path_factory.mktemp("root"))
        yield


@pytest.fixture(scope="module")
def small(toy_data, cache):
    """50 training pairs and 20 test sentences."""
    return load_corpus(str(toy_data), vocab=300, pairs=50, test_rows=20, longest=30)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Contestants run in this process, and leave it as it was."""
    precision = torch.get_float32_matmul_precision()
    monkeypatch.setattr("engine.devices.keep_freed_memory", lambda: None)
    monkeypatch.setattr(contest.os, "_exit", end)
    for module in (training, decoding, gpu):
        monkeypatch.setattr(module, "in_new_process", lambda function, *args: function(*args))
    for module in (training, decoding):
        monkeypatch.setattr(module, "start", start_in_this_process)
    monkeypatch.setattr(measuring, "describe_machine", lambda: "")
    yield
    torch.set_float32_matmul_precision(precision)


def start_in_this_process(name, contestant, task, timeout=0):
    """As `contest.start`."""
    task = replace(task, **contestant.settings)
    figures = {}
    peer = importlib.import_module(f"benchmarks.peers.{contestant.module}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contest, "report", figures.update)
        with suppress(Ended):
            getattr(peer, task.what)(task, read_corpus(task.corpus, task.rows))
    return figures


def figures_of(file: Path) -> dict:
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
    return {run["contestant"]: run["figures"] for run in runs}


# ---------------------------------------------------------------- the corpus, the contestants


def test_words_are_the_ids_and_in_every_vocabulary(small):
    assert (len(small.train), len(small.test)) == (50, 20)
    lines = (small.folder / "train.tgt").read_text().splitlines()
    assert [ids.tolist() for ids in as_ids(lines)] == [ids.tolist() for _, ids in small.train]
    for side in ("src", "tgt"):
        words = set((small.folder / f"train.{side}").read_text().split())
        for name in (f"opennmt.{side}", f"dict.{side}.txt"):
            known = [line.split()[0] for line in (small.folder / name).read_text().splitlines()]
            assert words <= set(known)
            assert len(known) == len(set(known)) == 300 - 3


def test_the_sample_is_made_once(small, toy_data, monkeypatch):
    monkeypatch.setattr(corpus_module, "write_corpus", None)
    monkeypatch.setenv("MINIDATASET", str(toy_data))
    again = load_corpus(vocab=300, pairs=50, test_rows=20, longest=30)
    assert again.data == str(toy_data)
    assert [ids.tolist() for ids, _ in again.train] == [ids.tolist() for ids, _ in small.train]


def test_contestants_are_chosen_by_name(monkeypatch, tmp_path, capsys):
    assert choose("marian, handout", training.CONTESTANTS) == ["marian", "handout"]
    for names in (training.PEERS, training.LADDER, training.ON_GPU):
        assert choose(names, training.CONTESTANTS)
    for names in (decoding.EVERYBODY, decoding.ON_GPU):
        assert choose(names, decoding.CONTESTANTS)
    with pytest.raises(UserError, match="marion: unknown; choose from handout"):
        choose("marion", training.CONTESTANTS)
    with pytest.raises(UserError, match="--device cuda: fairseq"):
        training.contestants_of(training.Config(contestants="fairseq", device="cuda"))
    monkeypatch.setattr(contest, "ENVIRONMENTS", tmp_path)
    assert start("fairseq", training.CONTESTANTS["fairseq"], Task("train", "")) is None
    assert "bash benchmarks/peers/install.sh fairseq" in capsys.readouterr().out


@pytest.mark.parametrize("preset", SIZES)
def test_sizes_are_complete(preset):
    assert SIZES[preset].keys() == TINY.keys()
    with torch.device("meta"):
        Transformer(**SIZES[preset], batch_first=True)


def test_start_reads_the_figures_or_gives_the_reason(monkeypatch, capsys):
    monkeypatch.setattr(contest, "command", lambda code, task: ([sys.executable, "-c", code], None))
    assert start("good", SimpleCode("""print('noise\\n{"speed": 1}')"""), None) == {"speed": 1}
    assert start("broken", SimpleCode("import absent"), None) is None
    assert "broken: left out, it ended with 1: ModuleNotFoundError" in capsys.readouterr().out
    assert start("slow", SimpleCode("while True: pass"), None, timeout=0.3) is None
    assert "slow: left out, no result after 0 s" in capsys.readouterr().out


class SimpleCode(str):
    """Python code in place of a contestant."""

    toolkit = ""


# ---------------------------------------------------------------- training


def test_the_clock_leaves_out_the_warm_up_and_the_last_step(monkeypatch):
    """Steps of 2 s and 100 target tokens."""
    reported = {}
    now = [0.0]
    monkeypatch.setattr(contest, "report", reported.update)
    monkeypatch.setattr(contest, "current_gib", lambda: 1)
    monkeypatch.setattr(contest, "peak_gib", lambda: 3)
    clock = contest.TrainingClock(6, now=lambda: now[0], loss=1.5)
    with pytest.raises(Ended):
        for _ in range(20):
            clock.step(10, 100)
            now[0] += 2
    assert reported == {
        "steps": 3,
        "target_tokens_per_second": 50,
        "tokens_per_second": 55,
        "seconds_per_step": 2,
        "target_tokens_per_step": 100,
        "step_gib": 2,
        "loss": 1.5,
    }


@pytest.mark.parametrize("name", ["handout", "marian", "ours"])
def test_an_epoch_counts_every_real_token_once(name, small, monkeypatch):
    """Neither padding nor begin tokens, but the end token, also of the source."""
    peer = importlib.import_module(f"benchmarks.peers.{name}")
    expected = [measuring.tokens_of(sentences) for sentences in zip(*small.train)]
    counted = np.zeros(2, int)

    def step(source, target):
        counted[:] += int(source), int(target)
        if counted[1] >= expected[1]:
            raise Ended

    monkeypatch.setattr(peer, "TrainingClock", lambda seconds: SimpleNamespace(step=step))
    with pytest.raises(Ended):
        peer.train(Task("train", "", sizes=TINY, variant="fp32", tokens_per_batch=512), small)
    assert counted.tolist() == expected


def test_training_and_limits(toy_data, cache, tmp_path, monkeypatch, capsys):
    config = training.Config(
        contestants="handout,marian,ours-plain-fp32,ours-muon-fp32,ours-fp32",
        preset="tiny",
        tokens_per_batch=64,
        vocab=300,
        data=str(toy_data),
        rounds=1,
        seconds=0.01,
        threads=1,
        out=str(tmp_path / "speed.json"),
    )
    training.main(config)
    figures = figures_of(tmp_path / "speed.json")
    assert list(figures) == config.contestants.split(",")
    assert all(contestant["target_tokens_per_second"] > 0 for contestant in figures.values())
    monkeypatch.setattr(training, "LARGE", 16)
    training.main(replace(config, part="limits", out=str(tmp_path / "limits.json")))
    assert list(figures_of(tmp_path / "limits.json")) == list(training.FORMATS)
    assert "ours-fp32: " in capsys.readouterr().out


def test_the_products_of_the_limit_are_those_of_the_model():
    sizes = ModelConfig(3000, 2000, **TINY | {"num_decoder_layers": 3, "dim_feedforward": 96})
    forward = sum(2 * rows * width * out for rows, width, out in training.products(sizes, 700, 900))
    assert 3 * forward == training_flops(sizes, 700, 900)


def test_a_toolkit_translates_after_every_second_step(tmp_path, monkeypatch):
    class Trainer:
        def step(self, batches):
            steps.append(batches)

    def translate(trainer, step: int, sources: Path) -> str:
        return f"{step} {len(steps)} {sources.name}"

    steps = []
    monkeypatch.setattr(toolkits, "time", SimpleNamespace(time=lambda: len(steps)))
    task = Task("", "", threads=torch.get_num_threads(), outputs=str(tmp_path), every=2)
    toolkits.watch(task, Trainer, "step", None, translate)
    for number in range(5):
        Trainer().step(number)
    outputs = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert outputs == {"2.out": "2 2 valid.src", "4.out": "4 4 valid.src"}
    assert steps == list(range(5))


def test_marian_translates_while_it_learns(small, tmp_path, monkeypatch):
    (tmp_path / "valid.src").write_text(as_words([source for source, _ in small.test], "src"))
    monkeypatch.setattr(marian, "BucketSampler", lambda *_: [range(3)] * 2)
    task = Task("learn", "", threads=1, sizes=TINY, variant="1e-3 10", every=2)
    marian.learn(replace(task, outputs=str(tmp_path)), small)
    (file,) = tmp_path.glob("*.out")
    assert len(file.read_text().splitlines()) == 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opennmt", "fairseq"])
def test_installed_toolkits(name, small):
    if not contest.is_installed(name):
        pytest.skip(f"bash benchmarks/peers/install.sh {name}")
    task = Task("train", str(small.folder), seconds=0.5, threads=1)
    figures = start(name, training.CONTESTANTS[name], task)
    total = measuring.tokens_of(target for _, target in small.train)
    assert 0 < figures["target_tokens_per_step"] <= total


# ---------------------------------------------------------------- decoding


def with_larger_weights(export):
    """`export`, with weights so large that outputs differ from sentence to sentence."""

    def export_larger(*arguments):
        folder = export(*arguments)
        state = torch.load(folder / "weights.pt")
        for name, tensor in state.items():
            if tensor.dim() > 1:
                tensor *= 4 if "attn" in name else 2.5
        torch.save(state, folder / "weights.pt")
        return folder

    return export_larger


def test_the_same_weights_give_the_same_outputs(toy_data, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "export", with_larger_weights(decoding.export))
    names = ["handout", "ours-fp32", "ours-plain-fp32", "marian"]
    config = decoding.Config(
        ",".join(names),
        data=str(toy_data),
        vocab=300,
        sentences=20,
        preset="tiny",
        length=7,
        rounds=1,
        seconds=0.01,
        batch=7,
        out=str(tmp_path / "out.json"),
    )
    assert [row.more["tokens"] for row in decoding.main(config)] == [20 * 7] * len(names)
    folder = load_corpus(str(toy_data), 300, test_rows=20).folder / "peers" / "random-tiny"
    outputs = {}
    for name in names:
        lines = (folder / f"{name}.txt").read_text().splitlines()
        outputs[name] = [ids.tolist() for ids in as_ids(lines)]
    assert len({tuple(ids) for ids in outputs["ours-fp32"]}) > 10
    for name in names[:-1]:  # marian has its own weights
        same, _ = decoding.agreement(outputs[name], outputs["ours-fp32"])
        assert same >= 0.9, name  # a tie may fall either way


def test_agreement():
    assert decoding.agreement([[1, 2], [3]], [[1, 2], [3]]) == (1, 1)
    # One token before the difference, of three and the end.
    assert decoding.agreement([[1, 9, 3]], [[1, 2, 3]]) == (0, 1 / 4)
    assert decoding.agreement([[1]], [[1, 2]])[0] == 0


def test_what_a_pass_counts(small, monkeypatch, tmp_path):
    reported = []
    monkeypatch.setattr(contest, "report", reported.append)
    task = SimpleNamespace(length=0, seconds=0, outputs=str(tmp_path / "outputs"))
    ticks = count(step=2)  # seconds
    monkeypatch.setattr(contest.time, "perf_counter", lambda: next(ticks))
    contest.time_decoding(task, small, lambda: [[7, 8]] * 20)
    task.length = 2
    contest.time_decoding(task, small, lambda: [[7, 8]] * 20)
    # The end counts where it may come.
    assert [figures["tokens"] for figures in reported] == [60, 40]
    assert reported[1]["tokens_per_second"] == 20
    assert (tmp_path / "outputs").read_text() == "t7 t8\n" * 20
    with pytest.raises(RuntimeError, match="1 to 2 tokens"):
        contest.time_decoding(task, small, lambda: [[1]] + [[7, 8]] * 19, warm=False)


# ---------------------------------------------------------------- minutes to a BLEU, GPU


def fake_process(words, timeout=None, check=False, **options):
    """In place of train.py or a peer, whose translations are the references."""
    flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    if "train.py" in words:
        lines = [{"step": step, "time": time.time(), "valid/bleu": step} for step in (1, 4)]
        Path(flags["run"]).mkdir(parents=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        Path(flags["run"], "metrics.jsonl").write_text(text)
        return
    if "benchmarks.peers.marian" in words or "benchmarks.peers.toolkits" in words:
        task = json.loads(words[-1])
        if task["what"] == "binarise":
            return
        folder = Path(task["outputs"])
        shutil.copy(folder / "valid.tgt", folder / f"{time.time()}.out")
    else:
        script = words[words.index("--valid-script-path") + 1]
        subprocess.check_call([script, words[words.index("--valid-sets") + 2]])
    raise subprocess.TimeoutExpired("", timeout)


def test_minutes_to_a_bleu(toy_data, cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(contest, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(time_to_bleu, "ROOT", tmp_path)
    processes = SimpleNamespace(run=fake_process, TimeoutExpired=subprocess.TimeoutExpired)
    config = time_to_bleu.Config(str(toy_data), vocab=300, minutes=0.05)
    with pytest.raises(UserError, match=r"install\.sh fairseq opennmt pymarian$"):
        time_to_bleu.main(config)
    for toolkit in ("pymarian", "opennmt", "fairseq"):
        (tmp_path / toolkit).mkdir()
        (tmp_path / toolkit / "complete").touch()
    monkeypatch.setattr(time_to_bleu, "subprocess", processes)
    time_to_bleu.main(replace(config, contestants="ours"))
    time_to_bleu.main(replace(config, contestants=",".join(time_to_bleu.EVERYBODY[1:])))
    rows = capsys.readouterr().out.splitlines()[-len(time_to_bleu.EVERYBODY) :]
    for name, row in zip(time_to_bleu.EVERYBODY, rows):
        cells = [cell.strip() for cell in row.split("|")]
        assert cells[1] == name
        if name == "ours":
            assert cells[5] == "–"
            assert cells[6].startswith("4.00 after")
        else:
            assert cells[2] == cells[5] != "–"
            assert float(cells[6].split()[0]) > 90  # smoothed: short sentences lose some
    with pytest.raises(UserError, match="other data or tokens; choose another --out"):
        time_to_bleu.main(replace(config, contestants="ours", vocab=310))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_commands_for_a_gpu_parse(device, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gpu, "tokens_for", lambda device: 512)
    folder = tmp_path / "with space"
    config = gpu.Config("tiny", data=str(folder))
    commands = gpu.commands(config, torch.device(device), "bf16", folder)
    programs = []
    for command in commands:
        words = command.replace("-m torch.distributed.run --standalone --nproc_per_node 2 -- ", "")
        words = words.replace(f"'{folder}'", "PATH").replace("-m ", "").split()
        programs.append(words[0])
        if words[0].startswith("PRESET="):
            continue
        monkeypatch.setattr("sys.argv", words)
        config = parse_flags(importlib.import_module(words[0].removesuffix(".py")).Config)
        if hasattr(config, "contestants"):
            module = importlib.import_module(words[0])
            assert choose(config.contestants, module.CONTESTANTS)
    assert programs.count("train.py") == (1 if device == "cpu" else 3)
    assert programs[-1] == "evaluate.py"


def test_a_failed_command_is_reported(tmp_path, monkeypatch, capsys):
    good = "A=1 -c 'import os; print(os.environ[\"A\"])'"
    bad = "-c 'raise SystemExit(3)'"
    left_out = "-c 'print(\"ours-fp32: left out\")'"
    monkeypatch.setattr(gpu, "commands", lambda *_: [good, bad, left_out])
    monkeypatch.setattr(gpu, "describe_machine", str)
    monkeypatch.setattr(gpu, "look_at", lambda device: (torch.device("cpu"), "a CPU", "fp32"))
    config = gpu.Config(device="cpu", out=str(tmp_path))
    assert gpu.main(config) == 1
    out = capsys.readouterr().out
    assert f"FAILED: {bad}\nFAILED: {left_out}\n2 failed" in out
    (log,) = tmp_path.glob("*/log.txt")
    assert f"python {good}\n1\n" in log.read_text()
    with pytest.raises(UserError, match="for a rehearsal: --device cpu"):
        gpu.main(replace(config, device="auto"))
