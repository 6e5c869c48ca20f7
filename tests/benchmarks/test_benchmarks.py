"""Every benchmark runs at toy size, in this process where it can, and counts and compares rightly."""

import importlib
import json
import re
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import attention_op, data, decoding, gpu, gpu_parity, limits, scaling, telemetry, training
from benchmarks import corpus as corpus_module
from benchmarks.corpus import as_ids, load_corpus, read_corpus
from benchmarks.measuring import tokens_of
from benchmarks.peers import contest, ct2, install
from benchmarks.peers.contestants import Contestant, choose, start
from data import BucketSampler, Collate
from engine.errors import UserError
from model import PRESETS, ModelConfig, Translator, sinusoids, training_flops
from text.store import TokenizedPairs


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
    for place in ("engine.distributed.keep_freed_memory", "benchmarks.training.keep_freed_memory"):
        monkeypatch.setattr(place, lambda: True)
    for module in (training, gpu, attention_op, data):
        monkeypatch.setattr(module, "in_new_process", lambda function, *arguments, **environment: function(*arguments))
    monkeypatch.setattr(contest.os, "_exit", stop)
    for module in (training, decoding):
        monkeypatch.setattr(module, "start", start_here)
    yield
    torch.set_float32_matmul_precision(precision)


def start_here(name, contestant, threads, *arguments, timeout=0):
    """As `contestants.start`, in this process."""
    task, figures = contest.parse_task(contestant.command(*arguments)[3:]), {}
    corpus = read_corpus(task.corpus)
    corpus.test = corpus.test[: task.rows or None]
    peer = importlib.import_module(f"benchmarks.peers.{contestant.module}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contest, "report", figures.update)
        with suppress(Ended):
            getattr(peer, task.what)(task, corpus)
    return figures | {"peak_gib": 1.0}


def figures_of(file) -> dict:
    return {run["contestant"]: run["figures"] for run in json.loads(file.read_text(encoding="utf-8"))["runs"]}


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


def test_the_sample_is_always_the_same_and_cached(small, toy_data, monkeypatch):
    monkeypatch.setattr(corpus_module, "write_corpus", lambda *_: pytest.fail("written again"))
    monkeypatch.setenv("MINIDATASET", str(toy_data))
    again = load_corpus(vocab=300, pairs=50, test_rows=20, longest=30)
    assert [source.tolist() for source, _ in again.train] == [source.tolist() for source, _ in small.train]


def test_contestants_are_chosen_by_name_and_left_out_with_one_line(monkeypatch, tmp_path, capsys):
    assert choose("marian,handout", training.CONTESTANTS) == ["marian", "handout"]
    for known, names in ((training, ("PEERS", "LADDER", "ON_GPU")), (decoding, ("EVERYBODY", "ON_GPU"))):
        assert all(choose(getattr(known, name), known.CONTESTANTS) for name in names)
    with pytest.raises(UserError, match="unknown; choose from handout"):
        choose("marion", training.CONTESTANTS)
    monkeypatch.setattr(install, "BENCHMARKS", tmp_path)
    assert start("fairseq", training.CONTESTANTS["fairseq"], 1, "train") is None
    assert "python -m benchmarks.peers.install fairseq" in capsys.readouterr().out


def test_a_process_of_its_own_reports_and_one_that_breaks_says_why(small, capsys):
    arguments = ("train", "--corpus", small.folder, "--seconds", 0.05, "--preset", "tiny", "--tokens_per_batch", 64)
    figures = start("ours-fp32", Contestant("ours", "fp32"), 1, *arguments)
    assert figures["target_tokens_per_second"] > 0 and figures["peak_gib"] > 0
    assert start("broken", Contestant("handout", arguments=("--rows", "no")), 1, *arguments) is None
    assert "left out, it ended with 2: " in capsys.readouterr().out


def test_requirements():
    together, alone = install.read_requirements("torch==1\n# why\nnumpy\nold==2  # no-deps\n")
    assert together == ["torch==1", "numpy"] and alone == ["old==2"]
    for toolkit in install.TOOLKITS:
        together, _ = install.read_requirements((install.BENCHMARKS / f"requirements-{toolkit}.txt").read_text())
        assert together[0].startswith("torch==")


# ---------------------------------------------------------------- training


def test_the_clock_leaves_out_the_warm_up_and_the_last_step(monkeypatch):
    """Steps of 2 s and 100 target tokens: those of the warm-up and the one that begins when time is up do not count."""
    reported, now = {}, [0.0]
    monkeypatch.setattr(contest, "report", reported.update)
    clock = contest.TrainingClock(6, now=lambda: now[0], loss=1.5)
    with pytest.raises(Ended):
        for _ in range(20):
            clock.step(10, 100)
            now[0] += 2
    assert reported == {"steps": 3, "target_tokens_per_second": 50, "tokens_per_second": 55, "seconds_per_step": 2,
                        "target_tokens_per_step": 100, "loss": 1.5}  # fmt: skip


@pytest.mark.parametrize(
    "name, variant", [("handout", ""), ("marian", "tuned"), ("ours", "fp32"), ("ours", "random-plain-fp32")]
)
def test_an_epoch_counts_every_real_token_once(name, variant, small, monkeypatch):
    """Not the padding, not the begin token; on the source side the end token too."""
    peer, wanted = importlib.import_module(f"benchmarks.peers.{name}"), tokens_of(target for _, target in small.train)
    counted = []

    class Recorder:
        def __init__(self, _seconds):
            pass

        def step(self, source, target):
            counted.append((int(source), int(target)))
            if sum(target for _, target in counted) >= wanted:
                raise Ended

    monkeypatch.setattr(peer, "TrainingClock", Recorder)
    words = ["train", "--corpus", "", "--preset", "tiny", "--variant", variant, "--tokens_per_batch", "512"]
    with pytest.raises(Ended):
        peer.train(contest.parse_task(words), small)
    assert [sum(side) for side in zip(*counted)] == [tokens_of(source for source, _ in small.train), wanted]


def test_training_and_the_ladder(toy_data, cache, tmp_path, capsys):
    out = tmp_path / "out.json"
    settings = dict(
        preset="tiny", tokens_per_batch=128, vocab=300, data=str(toy_data), rounds=1, seconds=0.02, out=str(out)
    )
    training.main(training.Config(contestants="handout,marian-tuned,ours-bf16", **settings))
    assert list(figures_of(out)) == ["handout", "marian-tuned", "ours-bf16"]
    assert all(figures["target_tokens_per_second"] > 0 for figures in figures_of(out).values())
    assert "| ours-bf16" in capsys.readouterr().out
    training.main(training.Config("ladder", **settings))
    losses = {name: figures["loss"] for name, figures in figures_of(out).items()}
    exact = losses["ours-random-plain-fp32"]
    assert losses["ours-plain-fp32"] == losses["ours-random-plain-fp32"]
    assert losses["ours-fp32"] == pytest.approx(exact, rel=1e-5)
    assert losses["ours-bf16"] == pytest.approx(exact, rel=0.01) and losses["ours-bf16"] != exact
    with pytest.raises(UserError, match="sees no GPU"):
        training.main(training.Config(contestants="fairseq", device="cuda"))


def test_memory(tmp_path, monkeypatch):
    held = iter([1.0, 3.0] * len(training.VARIANTS))
    monkeypatch.setattr(training, "held_gib", lambda which="VmHWM": next(held))
    monkeypatch.setattr(training, "peak_memory_gib", lambda device: next(held))
    out = tmp_path / "memory.json"
    training.main(training.Config("memory", preset="tiny", tokens_per_batch=128, vocab=300, out=str(out)))
    assert {figures["step_gib"] for figures in figures_of(out).values()} == {2.0}
    assert list(figures_of(out)) == list(training.VARIANTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opennmt", "fairseq"])
def test_toolkits(name, small):
    if not install.is_installed(name):
        pytest.skip(f"python -m benchmarks.peers.install {name}")
    figures = start(name, training.CONTESTANTS[name], 1, "train", "--corpus", small.folder, "--seconds", 0.5)
    assert 0 < figures["target_tokens_per_step"] <= tokens_of(target for _, target in small.train)


# ---------------------------------------------------------------- decoding


def lively(export):
    """`export` with larger weights, so that what is read counts and outputs differ from sentence to sentence."""

    def larger(*arguments):
        file = (folder := export(*arguments)) / "weights.pt"
        state = torch.load(file)
        scale = {name: 1 if tensor.dim() < 2 else 4 if "attn" in name else 2.5 for name, tensor in state.items()}
        torch.save({name: tensor * scale[name] for name, tensor in state.items()}, file)
        return folder

    return larger


def test_who_has_the_same_weights_writes_the_same(toy_data, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "export", lively(decoding.export))
    names = ["handout", "marian", "ours-fp32", "ours-plain-fp32", "ours-plain-bf16"]
    for length in (12, 7):
        config = decoding.Config(",".join(names), data=str(toy_data), vocab=300, sentences=20, preset="tiny", length=length,
                                 rounds=1, seconds=0.01, batch=7, out=str(tmp_path / "out.json"))  # fmt: skip
        runs = decoding.main(config)
        assert [run.figures["tokens"] for run in runs] == [20 * length] * len(names)
    folder = load_corpus(str(toy_data), 300, test_rows=20).folder / "peers" / "random-tiny"
    outputs = {name: decoding.read_outputs(folder / f"{name}.txt") for name in names}
    assert len({tuple(row) for row in outputs["ours-fp32"]}) > 10  # else anybody could agree
    for name in names[:-1]:
        assert decoding.agreement(outputs[name], outputs["ours-fp32"])[0] >= 0.9, name  # a tie may fall either way


def test_a_trained_run_at_real_lengths(toy_data, cache, tmp_path, monkeypatch):
    config = dict(
        data=str(toy_data), source="zh", target="en", source_vocab=300, target_vocab=300, tokenizer="", max_length=512
    )
    trained = SimpleNamespace(config=config, run=tmp_path / "toy", name="toy",
                              model=Translator(ModelConfig(300, 300, **contest.TINY)))  # fmt: skip
    monkeypatch.setattr(decoding, "load_trained", lambda ckpt: trained)
    config = decoding.Config("ours-fp32", "toy", sentences=20, rounds=1, seconds=0.01, out=str(tmp_path / "out.json"))
    (run,) = decoding.main(config)
    assert run.figures["sentences"] == 20
    trained.model = Translator(ModelConfig(200, 300, **contest.TINY))
    with pytest.raises(UserError, match="other vocabularies"):
        decoding.main(config)
    trained.model = Translator(ModelConfig(300, 300, **contest.TINY | {"dim_feedforward": 32}))
    with pytest.raises(UserError, match="of the sizes of a preset"):
        decoding.main(config)


def test_agreement():
    assert decoding.agreement([[1, 2], [3]], [[1, 2], [3]]) == (1, 1)
    assert decoding.agreement([[1, 9, 3]], [[1, 2, 3]]) == (0, 1 / 4)  # one token before it, of three and the end
    assert decoding.agreement([[1]], [[1, 2]])[0] == 0


def test_what_a_pass_counts(small, monkeypatch, tmp_path):
    reported = []
    monkeypatch.setattr(contest, "report", reported.append)
    task = SimpleNamespace(length=0, seconds=0, outputs=str(tmp_path / "o"))
    contest.time_decoding(task, small, lambda: (2.0, [[7, 8]] * 20))
    task.length = 2
    contest.time_decoding(task, small, lambda: (2.0, [[7, 8]] * 20))
    assert [figures["tokens"] for figures in reported] == [60, 40]  # the end is a token where it may come
    assert reported[1]["tokens_per_second"] == 20 and reported[1]["sentences_per_second"] == 10
    assert decoding.read_outputs(tmp_path / "o") == [[7, 8]] * 20
    with pytest.raises(RuntimeError, match="1 to 2 tokens"):
        contest.time_decoding(task, small, lambda: [[1]] + [[7, 8]] * 19, warm=False)


def test_the_converted_model_has_our_words_and_positions(small):
    words = ct2.names(small.target_vocab, small.target_ids, "t")
    assert len(words) == len(set(words)) == small.target_vocab
    assert words[small.target_ids["eos"]] == "</s>" and words[200] == "t200"
    assert torch.allclose(torch.from_numpy(ct2.positions(50, 32)), sinusoids(50, 32), atol=1e-5)


# ---------------------------------------------------------------- limits, data, scaling, attention


def test_limits(toy_data, cache, tmp_path, capsys):
    sizes = ModelConfig(3000, 2000, d_model=64, nhead=4, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=96)
    forward = sum(2 * rows * width * out for rows, width, out in limits.products(sizes, 700, 900))
    assert 3 * forward == training_flops(sizes, 700, 900)
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"runs": [{"contestant": "ours-bf16", "round": 1, "seconds": 1, "figures":
                                         {"target_tokens_per_second": 5.0}}]}))  # fmt: skip
    limits.main(
        limits.Config("tiny", 64, 16, str(toy_data), str(out), rounds=1, threads=1, out=str(tmp_path / "limits.json"))
    )
    assert list(figures_of(tmp_path / "limits.json")) == ["fp32, MKL", "fp32, oneDNN", "bf16"]
    assert "ours-bf16: 5 target tokens/s" in capsys.readouterr().out


def test_telemetry_is_on_and_off_in_turns(toy_data, tmp_path, monkeypatch, capsys):
    small = dict(d_model=32, nhead=4, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=64)
    monkeypatch.setitem(PRESETS, "lab", PRESETS["lab"] | small)
    monkeypatch.chdir(tmp_path)
    runs = telemetry.main(telemetry.Config(str(toy_data), steps=20, rounds=2, device="cpu", out="out.json"))
    assert [(run.contestant, run.round) for run in runs] == [("watched", 1), ("alone", 1), ("watched", 2), ("alone", 2)]
    out = capsys.readouterr().out
    assert re.findall(r"step +(\d+) ", out) == ["20", "60"] and re.search(r"watching costs -?\d+\.\d\d%", out)


def test_data_and_growth(toy_data, cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "ROOT", tmp_path)
    settings = dict(data=str(toy_data), vocab=300, preset="tiny", tokens_per_batch=256, steps=1, seconds=0.05, rounds=1)
    monkeypatch.setattr(data, "PAIRS", (200, 2000))
    for part in ("all", "growth"):
        data.main(data.Config(part, pairs=2000, out=f"{part}.json", **settings))
    figures = figures_of(tmp_path / "all.json")
    assert {"tokenising and writing", "middle of epoch 3", "loader, 16,384 tokens a batch"} <= set(figures)
    assert figures["reading"]["pairs"] == 2000
    figures = figures_of(tmp_path / "growth.json")
    assert list(figures) == ["200 pairs", "2,000 pairs", *(f"length {length}" for length in data.LENGTHS)]
    assert figures["length 16"]["predicted_ratio"] == 1 > figures["length 32"]["predicted_ratio"]


def test_padding_shares_by_hand():
    lengths = {"source": np.array([3, 3]), "target": np.array([3, 1])}  # 4 + 4 and 4 + 2 tokens with the end
    shares = data.padding_shares(lengths, BucketSampler(lengths, 100))
    assert shares == pytest.approx({"padding_source": 0, "padding_target": 2 / 8, "padding_both": 2 / 16})


def test_the_made_up_store_is_like_text(tmp_path):
    data.make_store(tmp_path / "store", 3000)
    store = TokenizedPairs(tmp_path / "store")
    assert len(store) == 3000 and 15 < store.lengths["source"].mean() < 30
    assert np.corrcoef(store.lengths["source"], store.lengths["target"])[0, 1] > 0.9


def test_attention_as_torch_counts_it():
    """The forward pass of the stock attention at two lengths, counted by torch."""
    model, counted = ModelConfig(50, 50, **contest.TINY | {"dropout": 0.0}), {}
    for length in (8, 24):
        ids = [3] * (length - 1)
        batch = Collate(data.IDS, data.IDS)([(ids, ids)])
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            Translator(model)(batch.src, batch.src_pad, batch.tgt_in, batch.real)
        counted[length] = counter.get_total_flops() / length
    ours = {length: data.flops_per_token(model, length) / 3 for length in counted}
    assert abs((counted[24] - counted[8]) / (ours[24] - ours[8]) - 1) < 0.01


def test_a_start_that_fails_says_so(tmp_path):
    with pytest.raises(UserError, match="unknown flag --nonsense"):
        data.start("train.py", "--nonsense", 1, cwd=tmp_path, until="never")


@pytest.mark.slow
def test_start_up_in_time(tmp_path):
    data.main(data.Config("startup", rounds=1, out=str(tmp_path / "out.json")))
    seconds = {name: figures["seconds"] for name, figures in figures_of(tmp_path / "out.json").items()}
    assert seconds["train.py, first step"] < 8 and seconds["evaluate.py, first batch"] < 5


@pytest.mark.slow
@pytest.mark.parametrize("epochs_done", [0.0, 2.0, 2.5])
def test_ten_million_pairs_start_in_five_seconds(tmp_path, epochs_done):
    data.make_store(tmp_path / "store", 10**7)
    assert data.start_epoch(tmp_path / "store", epochs_done)["seconds"] < 5


@pytest.mark.slow
def test_real_data_is_tokenised_at_25_000_pairs_a_second(real_data, tmp_path):
    stages = data.stages_of(corpus_module.text_at(str(real_data)), 8000, tmp_path / "s")
    assert {name: stage() for name, stage in stages.items()}["tokenising and writing"]["pairs_per_second"] > 25_000


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))))


@given(SPANS, SPANS)
def test_spans_cover_what_their_points_do(left, right):
    """Held against sets of unit intervals."""
    points = [{second for start, end in spans for second in range(start, end)} for spans in (left, right)]
    merged = [scaling.merge(left), scaling.merge(right)]
    assert [scaling.length(spans) for spans in merged] == [len(points[0]), len(points[1])]
    assert scaling.overlap(*merged) == len(points[0] & points[1])


def test_scaling(small, tmp_path, monkeypatch, capsys):
    def start_here(size, core, corpus, config, profile=""):
        task = dict(corpus=str(corpus), core=core, profile="", steps=1, tokens=64, precision="fp32", preset="tiny")
        scaling.work(task)
        line = capsys.readouterr().out.splitlines()[-1]
        return lambda: json.loads(line)

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(scaling, "load_corpus", lambda data: small)
    monkeypatch.setattr(scaling.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(scaling.os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(scaling, "start", start_here)
    scaling.main(scaling.Config(rounds=1, steps=1, out=str(tmp_path / "out.json")))
    assert list(figures_of(tmp_path / "out.json")) == ["1 process", "2 together", "2 apart"]
    with pytest.raises(UserError, match="may use 2 cores"):
        scaling.main(scaling.Config(processes=3))


@pytest.mark.slow
def test_two_processes_train_and_are_profiled(small, tmp_path):
    config = scaling.Config(steps=1, tokens=64, precision="fp32", preset="tiny")
    picture = tmp_path / "step.png"
    figures = scaling.start(2, 0, small.folder, config, profile=str(picture))()
    assert figures["target_tokens_per_second"] > 0 and picture.stat().st_size > 1000
    assert figures["communication"] > 0 and 0 <= figures["both"] <= figures["backward"]


def test_attention_op(tmp_path, capsys, monkeypatch):
    out, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    settings = dict(
        lengths="8,16", tokens=32, heads=2, width=4, numbers="100", rounds=1, out=str(out), png=str(picture)
    )
    clock = iter(range(10**6))
    monkeypatch.setattr(attention_op.time, "perf_counter", lambda: next(clock))  # a second for each pass
    attention_op.main(attention_op.Config(**settings, device="cpu"))
    assert {"attention PyTorch flash, 8", "gelu composed, 100"} <= set(figures_of(out))
    assert all(figures["ms"] == 1000 for figures in figures_of(out).values())
    assert "| ours recompute |" in capsys.readouterr().out and picture.stat().st_size > 1000
    monkeypatch.setattr(attention_op, "composed_attention", lambda q, k, v, causal: 2 * v + 0 * (q + k))
    with pytest.raises(UserError, match="composed does not give what PyTorch gives"):
        attention_op.main(attention_op.Config(**settings, device="cpu"))
    with pytest.raises(UserError, match="--lengths 8,x must be positive"):
        attention_op.Config(lengths="8,x")


def test_memory_of_a_pass_is_counted():
    def pass_of(mib: int):
        return lambda: (torch.ones(mib * 2**18), torch.ones(mib * 2**18).sum())  # kept, and held for a moment

    assert abs(attention_op.peak_mib(pass_of(64)) - 128) < 8


# ---------------------------------------------------------------- GPU, rehearsed on a CPU


def test_the_gpu_benchmark(toy_data, cache, tmp_path, capsys):
    config = gpu.Config("tiny", 256, 8, data=str(toy_data), vocab=300, sentences=20, device="cpu", seconds=0.02, minutes=0,
                        out=str(tmp_path / "gpu.json"))  # fmt: skip
    assert gpu.main(config) == 0
    report = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert len(report["checks"]) > 10 and all(check["passed"] for check in report["checks"])
    figures = figures_of(tmp_path / "gpu.json")
    assert figures["tiny 40 tokens, ours-fp32"]["tokens"] == 20 * 40
    assert all(figures[name]["seconds_432k_pairs"] > 0 for name in figures if "training" in name)
    assert "checks passed" in capsys.readouterr().out
    assert gpu.main(config) == 0 and "tiny training: done before" in capsys.readouterr().out
    with pytest.raises(UserError, match="--presets: unknown huge"):
        gpu.Config(presets="huge")


def test_wrong_arithmetic_fails(small, monkeypatch):
    monkeypatch.setattr("decoding.attend_source", lambda layer, x, *_: -x)
    monkeypatch.setattr("fast.captured.attend_source", lambda layer, x, *_: x)
    checks = {check.name.split(": ", 1)[1]: check for check in gpu_parity.check_all("tiny", "cpu", small.folder)}
    assert checks["fp32, fast against plain"].passed
    assert not any(check.passed for name, check in checks.items() if name.startswith(("greedy in float64", "captured")))
    assert not gpu_parity.Check("", {"loss": float("nan")}, 1.0).passed
    assert gpu_parity.Check("", {"loss": 1e-4, "worst": 9e-4}, 1e-4).passed


def test_what_fails_is_reported_and_the_rest_goes_on(small, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_parity, "check_losses", full)
    full.__name__ = "check_losses"
    first, *others = gpu_parity.check_all("tiny", "cpu", small.folder)
    assert not first.passed and "OutOfMemoryError" in first.note and all(check.passed for check in others)


def test_targets_go_by_the_best_turn():
    turns = {"lab training, ours-bf16": 1e6, "lab training, ours-compiled-bf16": 2e6, "big training, ours-bf16": 9e6}
    (line,) = gpu.targets([gpu.Run(name, 1, {"tokens_per_second": speed}, 1.0) for name, speed in turns.items()])
    assert "ours-compiled-bf16" in line and line.endswith("≥ 2e+06: reached")
    (line,) = gpu.targets([gpu.Run("lab 40 tokens, ours-bf16", 1, {"seconds": 1.6}, 1.0)])
    assert line.endswith("≤ 1: missed")
