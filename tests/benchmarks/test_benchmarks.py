"""Every benchmark runs at toy size, in this process where it can, and counts and compares rightly."""

import importlib
import json
import re
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import train
from benchmarks import attention_op, data, decoding, gpu, recipes, time_to_bleu, training
from benchmarks import corpus as corpus_module
from benchmarks.corpus import SIDES, as_ids, as_words, load_corpus, read_corpus
from benchmarks.measuring import ROOT, Run, tokens_of, write_json
from benchmarks.peers import contest, marian, ours, toolkits
from benchmarks.peers.contest import TINY, Contestant, Task, choose, command, start
from data import Collate, TokenizedPairs
from engine.config import checked, parse_flags
from engine.errors import UserError
from engine.precision import choose_precision
from labs.attention_op import cpp
from model import ModelConfig, Translator, training_flops


class Ended(Exception):
    """In the place of the end of the process."""


def stop(_code):
    raise Ended


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of their own for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "ROOT", tmp_path_factory.mktemp("root"))
        yield


@pytest.fixture(scope="module")
def small(toy_data, cache):
    """50 training pairs and 20 test sentences."""
    return load_corpus(str(toy_data), vocab=300, pairs=50, test_rows=20, longest=30)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """What runs in processes of its own runs in this one, and leaves it as it was."""
    precision = torch.get_float32_matmul_precision()
    monkeypatch.setattr("engine.devices.keep_freed_memory", lambda: True)
    for module in (attention_op, data):
        monkeypatch.setattr(
            module,
            "in_new_process",
            lambda function, *arguments, **environment: function(*arguments),
        )
    monkeypatch.setattr(contest.os, "_exit", stop)
    for module in (training, decoding):
        monkeypatch.setattr(module, "start", start_here)
    yield
    torch.set_float32_matmul_precision(precision)


def start_here(name, contestant, task, timeout=0):
    """As `contest.start`, in this process."""
    task, figures = replace(task, **contestant.settings), {}
    peer = importlib.import_module(f"benchmarks.peers.{contestant.module}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contest, "report", figures.update)
        with suppress(Ended):
            getattr(peer, task.what)(task, read_corpus(task.corpus, task.rows))
    return figures | {"peak_gib": 1.0}


def figures_of(file) -> dict:
    return {
        run["contestant"]: run["figures"]
        for run in json.loads(file.read_text(encoding="utf-8"))["runs"]
    }


# ---------------------------------------------------------------- the corpus, the contestants


def test_words_say_the_same_as_ids_and_are_in_every_vocabulary(small):
    assert len(small.train) == 50 and len(small.test) == 20
    assert max(len(row) for pair in small.train + small.test for row in pair) <= 30
    lines = (small.folder / "train.tgt").read_text().splitlines()
    assert [row.tolist() for row in as_ids(lines)] == [target.tolist() for _, target in small.train]
    for side in ("src", "tgt"):
        words = set((small.folder / f"train.{side}").read_text().split())
        for name in (f"opennmt.{side}", f"dict.{side}.txt"):
            known = [line.split()[0] for line in (small.folder / name).read_text().splitlines()]
            assert words <= set(known) and len(known) == len(set(known)) == 300 - 3


def test_the_sample_is_always_the_same_and_cached(small, toy_data, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "write_corpus", lambda *_: pytest.fail("written again"))
    monkeypatch.setenv("MINIDATASET", str(toy_data))
    again = load_corpus(vocab=300, pairs=50, test_rows=20, longest=30)
    moved = load_corpus(
        str(shutil.copytree(toy_data, tmp_path / "moved")),
        vocab=300,
        pairs=50,
        test_rows=20,
        longest=30,
    )
    assert (again.data, moved.data) == (
        str(toy_data),
        str(tmp_path / "moved"),
    ) and moved.folder == again.folder
    assert [source.tolist() for source, _ in again.train] == [
        source.tolist() for source, _ in small.train
    ]


def test_contestants_are_chosen_by_name_and_left_out_with_one_line(monkeypatch, tmp_path, capsys):
    assert choose("marian,handout", training.CONTESTANTS) == ["marian", "handout"]
    for known, names in (
        (training, ("PEERS", "LADDER", "ON_GPU")),
        (decoding, ("EVERYBODY", "ON_GPU")),
    ):
        assert all(choose(getattr(known, name), known.CONTESTANTS) for name in names)
    with pytest.raises(UserError, match="unknown; choose from handout"):
        choose("marion", training.CONTESTANTS)
    monkeypatch.setattr(contest, "ENVIRONMENTS", tmp_path)
    assert start("fairseq", training.CONTESTANTS["fairseq"], Task("train", "")) is None
    assert "bash benchmarks/peers/install.sh fairseq" in capsys.readouterr().out


def test_a_process_of_its_own_reports_and_one_that_breaks_says_why(small, capsys):
    task = Task(
        "train", str(small.folder), seconds=0.05, threads=1, sizes=TINY, tokens_per_batch=64
    )
    figures = start("ours-fp32", Contestant("ours", {"variant": "fp32"}), task)
    assert figures["target_tokens_per_second"] > 0 and figures["peak_gib"] > 0
    assert start("broken", Contestant("absent"), task) is None
    assert re.search(
        "left out, it ended with 1: .*No module named benchmarks.peers.absent",
        capsys.readouterr().out,
    )


# ---------------------------------------------------------------- training


def test_the_clock_leaves_out_the_warm_up_and_the_last_step(monkeypatch):
    """Steps of 2 s and 100 target tokens: those of the warm-up and the one that begins when time is up do not count."""
    reported, now, held = {}, [0.0], count(1)
    monkeypatch.setattr(contest, "report", reported.update)
    monkeypatch.setattr(contest, "held_gib", lambda which: next(held))
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
        "step_gib": 1,
        "loss": 1.5,
    }


@pytest.mark.parametrize(
    "name, variant",
    [
        ("handout", ""),
        ("marian", "tuned"),
        ("ours", "fp32"),
        ("ours", "random-plain-fp32"),
    ],
)
def test_an_epoch_counts_every_real_token_once(name, variant, small, monkeypatch):
    """Not the padding, not the begin token; on the source side the end token too."""
    peer, wanted = (
        importlib.import_module(f"benchmarks.peers.{name}"),
        tokens_of(target for _, target in small.train),
    )
    counted = np.zeros(2, int)

    def step(source, target):
        counted[:] += int(source), int(target)
        if counted[1] >= wanted:
            raise Ended

    monkeypatch.setattr(peer, "TrainingClock", lambda _seconds: SimpleNamespace(step=step))
    with pytest.raises(Ended):
        peer.train(Task("train", "", sizes=TINY, variant=variant, tokens_per_batch=512), small)
    assert [*counted] == [tokens_of(source for source, _ in small.train), wanted]


def test_training_and_the_ladder(toy_data, cache, tmp_path, capsys):
    settings = dict(
        preset="tiny", tokens_per_batch=128, vocab=300, data=str(toy_data), rounds=1, seconds=0.02
    )
    training.main(training.Config("ladder", **settings, out=str(tmp_path / "out.json")))
    assert "| ours-bf16" in capsys.readouterr().out
    figures = figures_of(tmp_path / "out.json")
    assert list(figures) == training.LADDER.split(",")
    assert all(contestant["target_tokens_per_second"] > 0 for contestant in figures.values())
    with pytest.raises(UserError, match="--device cuda: "):
        training.main(training.Config(contestants="fairseq", device="cuda"))


def test_what_a_step_asks_of_a_gpu(small, monkeypatch):
    """The loop of it, on a CPU."""
    for name in ("synchronize", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    taken, batches = [], iter(range(100))
    figures = ours.ask_of_gpu(taken.append, batches, steps=4)
    assert taken == list(range(3 + 4)) and set(figures) == {"cpu_ms", "wait_ms"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opennmt", "fairseq"])
def test_toolkits(name, small):
    if not (contest.ENVIRONMENTS / name / "complete").exists():
        pytest.skip(f"bash benchmarks/peers/install.sh {name}")
    figures = start(
        name, training.CONTESTANTS[name], Task("train", str(small.folder), seconds=0.5, threads=1)
    )
    assert 0 < figures["target_tokens_per_step"] <= tokens_of(target for _, target in small.train)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opennmt", "fairseq"])
def test_toolkits_learn_and_translate_without_end(name, small, tmp_path):
    """Three sentences by heart, in the order of valid.src."""
    if not (contest.ENVIRONMENTS / name / "complete").exists():
        pytest.skip(f"bash benchmarks/peers/install.sh {name}")
    corpus = shutil.copytree(
        small.folder, tmp_path / "corpus", ignore=shutil.ignore_patterns("peers")
    )
    pairs = sorted(small.train, key=lambda pair: len(pair[1]))[:3]
    for side, sentences in zip(SIDES, zip(*pairs)):
        (corpus / f"train.{side}").write_text(as_words(sentences, side) * 100)
        (tmp_path / f"valid.{side}").write_text(as_words(sentences[::-1], side))
    sizes, outputs = TINY | {"dropout": 0.0}, str(tmp_path)
    task = Task(
        "", str(corpus), threads=1, sizes=sizes, tokens_per_batch=512, outputs=outputs, every=50
    )
    settings = contest.TOOLKITS[name].settings | {"variant": "1e-2 50"}
    words, environment = command(
        replace(contest.TOOLKITS[name], settings=settings, pin=False), task
    )
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(words, cwd=ROOT, env=environment, stderr=log) as process,
    ):
        translations, learnt = [], False
        while process.poll() is None and len(translations) < 40:
            translations = [file.read_text() for file in tmp_path.glob("*.out")]
            if learnt := (tmp_path / "valid.tgt").read_text() in translations:
                break
            time.sleep(0.2)
        process.kill()
    assert learnt


def test_a_toolkit_is_asked_to_translate_and_its_time_is_when_it_is_done(tmp_path, monkeypatch):
    class Trainer:
        def step(self, batches):
            steps.append(batches)

    def translated(trainer, done: int, sources: Path) -> str:
        now[0] += 10
        return f"{done} {len(steps)} {sources.name}"

    steps, now = [], [0]
    monkeypatch.setattr(toolkits, "time", SimpleNamespace(time=lambda: now[0]))
    monkeypatch.setattr("sys.argv", [])
    task = Task("", "", threads=torch.get_num_threads(), outputs=str(tmp_path), every=2)
    toolkits.run(
        task,
        lambda: [Trainer().step(number) for number in range(5)],
        [],
        Trainer,
        "step",
        None,
        translated,
    )
    told = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert told == {"10.out": "2 2 valid.src", "20.out": "4 4 valid.src"} and steps == list(
        range(5)
    )


# ---------------------------------------------------------------- decoding


def lively(export):
    """`export` with larger weights, so that what is read counts and outputs differ from sentence to sentence."""

    def larger(*arguments):
        file = (folder := export(*arguments)) / "weights.pt"
        state = torch.load(file)
        scale = {
            name: 1 if tensor.dim() < 2 else 4 if "attn" in name else 2.5
            for name, tensor in state.items()
        }
        torch.save({name: tensor * scale[name] for name, tensor in state.items()}, file)
        return folder

    return larger


def test_who_has_the_same_weights_writes_the_same(toy_data, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "export", lively(decoding.export))
    names = ["handout", "ours-fp32", "ours-plain-fp32", "ours-plain-bf16", "marian"]
    for length in (12, 7):
        config = decoding.Config(
            ",".join(names),
            data=str(toy_data),
            vocab=300,
            sentences=20,
            preset="tiny",
            length=length,
            rounds=1,
            seconds=0.01,
            batch=7,
            out=str(tmp_path / "out.json"),
        )
        assert [row.more["tokens"] for row in decoding.main(config)] == [20 * length] * len(names)
    folder = load_corpus(str(toy_data), 300, test_rows=20).folder / "peers" / "random-tiny"
    texts = {name: (folder / f"{name}.txt").read_text().splitlines() for name in names}
    outputs = {name: [ids.tolist() for ids in as_ids(text)] for name, text in texts.items()}
    assert len({tuple(row) for row in outputs["ours-fp32"]}) > 10  # else anybody could agree
    for name in names[:-2]:  # marian has weights of its own
        assert decoding.agreement(outputs[name], outputs["ours-fp32"])[0] >= 0.9, (
            name
        )  # a tie may fall either way


def test_a_trained_run_at_real_lengths(toy_data, cache, tmp_path, monkeypatch):
    config = dict(data=str(toy_data), source="zh", target="en", tokenizer="", max_length=512)
    config |= dict(source_vocab=300, target_vocab=300)
    sizes = TINY | {"dim_feedforward": 32, "norm_first": True}  # no preset's
    trained = SimpleNamespace(
        config=config,
        run=tmp_path / "toy",
        name="toy",
        model=Translator(ModelConfig(300, 300, **sizes)),
    )
    monkeypatch.setattr(decoding, "load_trained", lambda ckpt: trained)
    config = decoding.Config(
        "ours-fp32", "toy", sentences=20, rounds=1, seconds=0.01, out=str(tmp_path / "out.json")
    )
    (row,) = decoding.main(config)
    assert row.more["sentences"] == 20
    trained.model = Translator(ModelConfig(200, 300, **TINY))
    with pytest.raises(UserError, match="other vocabularies"):
        decoding.main(config)


def test_agreement():
    assert decoding.agreement([[1, 2], [3]], [[1, 2], [3]]) == (1, 1)
    assert decoding.agreement([[1, 9, 3]], [[1, 2, 3]]) == (
        0,
        1 / 4,
    )  # one token before it, of three and the end
    assert decoding.agreement([[1]], [[1, 2]])[0] == 0


def test_what_a_pass_counts(small, monkeypatch, tmp_path):
    reported = []
    monkeypatch.setattr(contest, "report", reported.append)
    task = SimpleNamespace(length=0, seconds=0, outputs=str(tmp_path / "o"))
    ticks = count(step=2)  # seconds: two readings of the clock to a pass, one between passes
    monkeypatch.setattr(contest.time, "perf_counter", lambda: next(ticks))
    contest.time_decoding(task, small, lambda: [[7, 8]] * 20)
    task.length = 2
    contest.time_decoding(task, small, lambda: [[7, 8]] * 20)
    assert [figures["tokens"] for figures in reported] == [
        60,
        40,
    ]  # the end is a token where it may come
    assert reported[1]["tokens_per_second"] == 20 and reported[1]["sentences_per_second"] == 10
    assert (tmp_path / "o").read_text() == "t7 t8\n" * 20
    with pytest.raises(RuntimeError, match="1 to 2 tokens"):
        contest.time_decoding(task, small, lambda: [[1]] + [[7, 8]] * 19, warm=False)


# ---------------------------------------------------------------- limits, data, attention, minutes to a BLEU


def test_limits(toy_data, cache, tmp_path, monkeypatch, capsys):
    sizes = ModelConfig(
        3000,
        2000,
        d_model=64,
        nhead=4,
        num_encoder_layers=2,
        num_decoder_layers=3,
        dim_feedforward=96,
    )
    forward = sum(2 * rows * width * out for rows, width, out in training.products(sizes, 700, 900))
    assert 3 * forward == training_flops(sizes, 700, 900)
    monkeypatch.setattr(training, "LARGE", 16)
    out = tmp_path / "limits.json"
    write_json(
        tmp_path / "speed.json", [Run("ours-bf16", 1, {"target_tokens_per_second": 5.0}, 1.0)]
    )
    training.main(
        training.Config(
            "limits",
            preset="tiny",
            tokens_per_batch=64,
            data=str(toy_data),
            rounds=1,
            threads=1,
            out=str(out),
        )
    )
    assert list(figures_of(out)) == ["fp32, MKL", "fp32, oneDNN", "bf16"]
    assert "ours-bf16: 5 target tokens/s" in capsys.readouterr().out


def test_data_and_growth(toy_data, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "ROOT", tmp_path)  # of the token cache
    monkeypatch.setattr(data, "PAIRS", (200, 2000))
    monkeypatch.setattr(data, "LAB", ModelConfig(data.GROWTH_VOCAB, data.GROWTH_VOCAB, **TINY))
    monkeypatch.setattr(data, "TOKENS", 256)
    config = data.Config(
        "all",
        str(toy_data),
        vocab=300,
        pairs=2000,
        steps=1,
        seconds=0.05,
        rounds=1,
        out=str(tmp_path),
    )
    data.main(config)
    epoch, loader = (figures_of(tmp_path / f"{part}.json") for part in ("epoch", "loader"))
    assert list(epoch) == list(data.STARTS) and "loader, 16,384 tokens a batch" in loader
    data.main(replace(config, part="growth"))
    assert list(figures_of(tmp_path / "growth.json")) == ["200 pairs", "2,000 pairs"]
    lengths = figures_of(tmp_path / "growth-length.json")
    assert list(lengths) == [f"length {length}" for length in data.LENGTHS]
    assert lengths["length 16"]["predicted_ratio"] == 1 > lengths["length 32"]["predicted_ratio"]


def test_the_made_up_store_is_like_text(tmp_path):
    data.make_store(tmp_path / "store", 3000)
    store = TokenizedPairs(tmp_path / "store")
    assert len(store) == 3000 and 15 < store.lengths["source"].mean() < 30
    assert np.corrcoef(store.lengths["source"], store.lengths["target"])[0, 1] > 0.9


def test_attention_as_torch_counts_it():
    """The forward pass of the stock attention at two lengths, counted by torch."""
    model, counted = ModelConfig(50, 50, **TINY | {"dropout": 0.0}), {}
    for length in (8, 24):
        ids = [3] * (length - 1)
        batch = Collate(data.IDS, data.IDS)([(ids, ids)])
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            Translator(model)(batch.src, batch.src_pad, batch.tgt_in, batch.real)
        counted[length] = counter.get_total_flops() / length
    ours = {length: data.flops_per_token(model, length) / 3 for length in counted}
    assert abs((counted[24] - counted[8]) / (ours[24] - ours[8]) - 1) < 0.01


def test_attention_op(tmp_path, capsys, monkeypatch):
    try:
        cpp.load()
    except UserError as error:  # no compiler
        pytest.skip(str(error))
    out = tmp_path / "figures.json"
    settings = dict(lengths=(8, 16), numbers=(100,), rounds=1, out=str(out))
    for name, value in dict(TOKENS=32, HEADS=2, WIDTH=4).items():
        monkeypatch.setattr(attention_op, name, value)
    clock = iter(range(10**6))
    monkeypatch.setattr(
        attention_op.time, "perf_counter", lambda: next(clock)
    )  # a second for each pass
    attention_op.main(attention_op.Config(**settings, device="cpu"))
    assert {"attention PyTorch flash, 8", "gelu composed, 100"} <= set(figures_of(out))
    assert all(figures["ms"] == 1000 for figures in figures_of(out).values())
    assert "\n| attention ours recompute, 16 " in capsys.readouterr().out
    with pytest.raises(UserError, match="--lengths 0 must be at least 1"):
        checked(attention_op.Config(lengths=(8, 0)))


def test_memory_of_a_pass_is_counted():
    def pass_of(mib: int):
        return lambda: (
            torch.ones(mib * 2**18),
            torch.ones(mib * 2**18).sum(),
        )  # kept, and held for a moment

    peak = attention_op.peak(pass_of(64))
    assert not peak or abs(peak["peak_mib"] - 128) < 8  # {}: the system does not tell


def peer(words, timeout=None, **_):
    """In the place of a peer's process: one validation, whose translations are the references, and training for ever."""
    if words[2].startswith("benchmarks.peers"):
        task = json.loads(words[3])
        folder, store = Path(task["outputs"]), Path(task["corpus"], "binarised")
        if task["what"] == "binarise":
            return store.touch()
        assert task["what"] != "fairseq" or store.exists()
        assert words[2].endswith("marian") or words[0].split("/")[-3] == task["what"]
        assert task["variant"] == ("5e-4 4000" if words[2].endswith("marian") else "1e-3 1000")
        (folder / f"{time.time()}.out").write_text(
            (folder / "valid.tgt").read_text().replace("\n", " <unk> </s>\n")
        )
    else:
        assert len(Path(words[words.index("--train-sets") + 1]).read_text().splitlines()) == 2000
        script, references = (
            words[words.index("--valid-script-path") + 1],
            words[words.index("--valid-sets") + 2],
        )
        subprocess.run([script, references], check=True)
    raise subprocess.TimeoutExpired("", timeout)


def test_minutes_to_a_bleu(toy_data, cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(time_to_bleu, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(time_to_bleu, "ROOT", tmp_path)  # of the runs
    config, begun = (
        time_to_bleu.Config(str(toy_data), "marian", vocab=300, minutes=0.05),
        time.time(),
    )

    def call(script, flags, **_):
        """In the place of train.py."""
        monkeypatch.setattr(
            "sys.argv", [script, *(f"--{name}={value}" for name, value in flags.items())]
        )
        settings = parse_flags(train.Config)
        assert (settings.max_minutes, settings.data) == (0.05, str(toy_data))
        assert settings.select and settings.target_vocab == 300
        points = [
            {"step": 1, "time": begun + 60 * minute, "valid/bleu": minute} for minute in (1, 2, 4)
        ]
        Path(settings.run).mkdir()
        lines = [json.dumps(point) + "\n" for point in [{"step": 0, "time": begun}, *points]]
        Path(settings.run, "metrics.jsonl").write_text("".join(lines))

    processes = SimpleNamespace(run=peer, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(time_to_bleu, "subprocess", processes)
    monkeypatch.setattr(time_to_bleu, "call", call)
    monkeypatch.setattr(
        time_to_bleu, "time", SimpleNamespace(time=lambda: begun, strftime=time.strftime)
    )
    with pytest.raises(UserError, match=r"install\.sh fairseq opennmt pymarian$"):
        time_to_bleu.main(replace(config, contestants=""))
    for toolkit in ("pymarian", "opennmt", "fairseq"):
        (tmp_path / toolkit).mkdir()
        (tmp_path / toolkit / "complete").touch()
    load = time_to_bleu.load_prepared

    def with_an_empty_source(folder):
        """As validation may have: it is scored by nobody's translation."""
        prepared = load(folder)
        pairs = [prepared.validation[row] for row in range(len(prepared.validation_rows))]
        return replace(prepared, validation=[([], pairs[0][1]), *pairs[1:]])

    monkeypatch.setattr(time_to_bleu, "load_prepared", with_an_empty_source)
    names = ("marian", "hf", "opennmt-lr-1e-3", "fairseq-lr-1e-3", "ours")
    for name in names:
        time_to_bleu.main(replace(config, contestants=name))
    assert all(
        "" not in file.read_text().splitlines() for file in (tmp_path / "runs").glob("*/valid.src")
    )
    rows = [
        re.split(" *[|] *", line) for line in capsys.readouterr().out.splitlines()[-len(names) :]
    ]
    for name, row in zip(names[:4], rows):
        minutes, final = row[2], row[6].split()  # smoothed: short sentences lose some
        assert (
            row[1:6] == [name, *[minutes] * 4]
            and float(final[0]) > 90
            and " ".join(final[2:]) == minutes
        )
    for name, row in zip(names[4:], rows[4:]):
        assert row[1:7] == [name, "1.0 min", "2.0 min", "4.0 min", "–", "4.00 after 4.0 min"]
    with pytest.raises(UserError, match="other data or subwords; give another --out"):
        time_to_bleu.main(replace(config, contestants="ours", vocab=310))
    with pytest.raises(UserError, match="unknown; choose from ours,marian"):
        time_to_bleu.main(replace(config, contestants="mario"))


def test_marian_mt_learns_and_translates_without_end(small, tmp_path, monkeypatch):
    """A few sentences by heart, cut at their end, in the order of valid.src; `every` steps apart."""
    pairs = sorted(small.train, key=lambda pair: len(pair[1]))[:3]
    (tmp_path / "valid.src").write_text(as_words([source for source, _ in pairs], "src"))
    monkeypatch.setattr(marian, "BucketSampler", lambda *_: [range(3)] * 80)  # which ends
    sizes = TINY | {"dropout": 0.0}
    task = Task(
        "learn", "", threads=1, sizes=sizes, variant="2e-2 10", outputs=str(tmp_path), every=40
    )
    marian.learn(task, replace(small, train=pairs))
    _, last = sorted(tmp_path.glob("*.out"), key=lambda file: float(file.stem))
    assert last.read_text() == as_words([target for _, target in pairs], "tgt")


# ---------------------------------------------------------------- GPU, rehearsed on a CPU


def test_the_gpu_benchmark_sums_up_and_says_what_is_slow():
    def file(**figures) -> dict:
        return {
            "runs": [
                {"contestant": "slow", "figures": {"tokens_per_second": 1.0}},
                {"contestant": "fast", "figures": figures},
                {"contestant": "other", "figures": {}},
            ]
        }

    step = dict(tokens_per_second=1e6, seconds_per_step=0.01, cpu_ms=9.0, wait_ms=0.2)
    files = {
        "lab-training": file(**step),
        "big-training": file(**step, model_flops_utilisation=0.5),
        "lab-decoding": file(tokens_per_second=8e4, sentences_per_second=1e3),
        "operators": {"runs": []},
    }
    assert gpu.summary(files) == [
        "lab-training: fast 1,000,000 tokens/s; tokens_per_second 1,000,000, where an H100 should have 2,000,000; "
        "a step of 10.0 ms has 9.0 of CPU, and waits 0.2 for data",
        "big-training: fast 1,000,000 tokens/s",
        "lab-decoding: fast 80,000 tokens/s; sentences_per_second 1,000, where an H100 should have 2,001",
    ]


def test_the_gpu_benchmark(toy_data, tmp_path, monkeypatch, capsys):
    """Every command of a GPU's stages can be given; a stage that fails is reported, and the rest goes on."""
    config = gpu.Config(
        "tiny", 512, "runs/x", data=str(toy_data), device="cpu", out=str(tmp_path / "gpu.json")
    )
    started = []

    @contextmanager
    def process(words, env, **_):
        """In the place of a process: notes the flags as the program reads them."""
        program, flags = (
            (words[2], words[3:]) if words[1] == "-m" else (words[1].removesuffix(".py"), words[2:])
        )
        if program == "torch.distributed.run":
            program, *flags = flags[flags.index("--") + 1 :]
            program = program.removesuffix(
                ".py"
            )  # without the repository's path, which may hold a space
        monkeypatch.setattr("sys.argv", [program, *flags])
        if program != "pytest":
            parse_flags(
                importlib.import_module(program + ".__main__" * program.startswith("labs")).Config
            )
        if program == "train":
            (folder := Path(flags[flags.index("--run") + 1])).mkdir(parents=True)
            record = {"step": 60, "time": 1.0, "valid/loss": 2.0 + 0.1 * started.count("train")}
            (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        started.append(program)
        code = int(program == "benchmarks.attention_op")
        said = ["ours-fp32: left out, it ended with 1\n"] * (program == "benchmarks.training") + [
            "done\n"
        ]
        ended = lambda: pytest.fail("ended at once")  # noqa: E731
        yield SimpleNamespace(stdout=said, returncode=code, kill=ended, terminate=ended)

    monkeypatch.setattr(gpu.subprocess, "Popen", process)
    monkeypatch.setattr(gpu.torch.cuda, "device_count", lambda: 2)
    stages = gpu.stages
    monkeypatch.setattr(
        gpu,
        "stages",
        lambda config, _, taken, folder: stages(config, torch.device("cuda", 0), taken, folder),
    )
    monkeypatch.setattr(gpu, "in_new_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(
        gpu, "choose_precision", lambda *_, **__: choose_precision(torch.device("cpu"))
    )
    monkeypatch.setattr("benchmarks.measuring.machine", dict)
    monkeypatch.setattr(gpu, "machine", lambda: {"commit": "1"})
    monkeypatch.setattr(gpu, "describe_machine", str)
    assert gpu.main(config) == 1
    assert (
        started.count("train") == 3
        and started.count("benchmarks.decoding") == 2
        and started[-1] == "evaluate"
    )
    told = capsys.readouterr().out
    assert "FAILED operators: done" in told and "FAILED tiny training: ours-fp32: left out" in told
    assert "FAILED cards: the validation losses are 5.0e-02 apart" in told
    first = list(started)
    (tmp_path / "gpu-stages/operators.json").write_text(
        "{}"
    )  # of the stage that fails the second time, too
    gpu.main(config)  # what failed is done again, the rest kept
    assert started[len(first) :] == [
        "benchmarks.training",
        "benchmarks.attention_op",
    ]
    reported = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert {"tiny parity", "cards", "run"} <= set(reported["stages"]) and not reported["files"]
    monkeypatch.setattr(gpu, "machine", lambda: {"commit": "2"})
    gpu.main(config)
    assert started[len(first) + 2 :] == first
    monkeypatch.setattr(gpu, "choose_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(gpu, "hidden_gpus", lambda: None)
    with pytest.raises(UserError, match="PyTorch sees no GPU; for a rehearsal: --device cpu"):
        gpu.main(gpu.Config())
    with pytest.raises(UserError, match="--presets huge: unknown"):
        gpu.main(gpu.Config("huge", 512, device="cpu"))


def test_a_finished_recipe_is_not_run_again(toy_data, tmp_path, monkeypatch, capsys):
    def call(script: str, flags: dict) -> None:  # in this process, which has imported torch
        monkeypatch.setattr(
            "sys.argv", [script, *(f"--{name}={value}" for name, value in flags.items())]
        )
        module = importlib.import_module(script.removesuffix(".py"))
        (module.train if script == "train.py" else module.evaluate)(parse_flags(module.Config))

    tiny = dict(d_model=16, nhead=2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=16)
    tiny |= dict(lr=9, eval_every=1)  # the loss rises: the best checkpoint is not the last
    monkeypatch.setitem(recipes.RECIPES, "default", tiny)
    monkeypatch.setattr(recipes, "call", call)
    config = recipes.Config(str(toy_data), steps=3, rows="default", out=str(tmp_path))
    recipes.main(config)
    monkeypatch.setattr(recipes, "call", None)
    recipes.main(config)
    (row,) = json.loads((tmp_path / "results.json").read_text())
    assert (row["row"], row["max_steps"], row["seed"], row["steps"]) == ("default", 3, 1, 3)
    assert row["loss_per_token"] == min(loss for _, loss in row["losses"]) < row["losses"][-1][1]
    assert row["loss_per_character"] < row["loss_per_token"] and 0 <= row["low"] <= row["high"]
    cells = re.split(" *[|] *", capsys.readouterr().out.splitlines()[-1])
    assert cells[1:6] == ["default", "3 steps", "1", "3", f"{row['tokens_per_second']:,.0f}"]
    (tmp_path / "results.json").unlink()
    shutil.rmtree(
        tmp_path / "default-3steps-1" / "checkpoints"
    )  # as if it had been killed before the first one
    called = Mock(side_effect=UserError)
    monkeypatch.setattr(recipes, "call", called)
    with pytest.raises(UserError):
        recipes.main(config)
    resumed = {"resume": str(tmp_path / "default-3steps-1"), "data": str(toy_data)}
    assert called.call_args.args == ("train.py", resumed)
    (tmp_path / "results.json").write_text(json.dumps([row]))
    with pytest.raises(UserError, match="rows of other data; give another --out"):
        recipes.main(replace(config, data="sample"))
    with pytest.raises(UserError, match="--rows plain2: unknown"):
        recipes.main(replace(config, rows="plain2"))
