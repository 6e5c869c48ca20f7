"""The benchmark for a GPU, rehearsed on a CPU: every part runs, and the checks fail when something is wrong."""

import json

import pytest
import torch

import decoding
from benchmarks import gpu, gpu_parity, gpu_speed
from benchmarks.gpu import Config
from data import collate_for, prepare
from engine import cross_entropy
from engine.errors import UserError
from fast import captured
from fast.captured import CapturedTranslator
from model import Translator
from text.rows import find_text

CPU = torch.device("cpu")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A cache of its own, and no allocator settings: this process has other tests to do."""
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "keep_freed_memory", lambda: True)
    return tmp_path


@pytest.fixture(scope="module")
def bench(toy_data, tmp_path_factory):
    prepared = prepare(find_text(str(toy_data)), tmp_path_factory.mktemp("cache"), source_vocab=300, target_vocab=300)
    sources = [prepared.train[row][0].tolist() for row in range(20)]
    torch.manual_seed(1)
    bench = gpu.Bench(Config(tiny=True), CPU, prepared, sources, compile=False)
    return bench, Translator(bench.sizes("lab", dropout=0.0)), collate_for(prepared)


def test_all_parts_run(here, toy_data, toy_run, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)  # it takes a minute
    config = Config(device="cpu", data=str(toy_data), vocab=300, tiny=True, seconds=0.1, warm_steps=1, test_rows=20,
                    tokens_per_batch="256", rows="8", precisions="fp32,bf16", presets="lab", compile="yes",
                    ckpt=str(toy_run / "runs" / "toy"), out="gpu.json")  # fmt: skip
    assert gpu.main(config) == 0
    report = json.loads((here / "gpu.json").read_text(encoding="utf-8"))
    assert report["failures"] == {} and all(check["passed"] for check in report["checks"])
    figures = {run["contestant"]: run["figures"] for run in report["runs"]}
    assert list(figures) == [
        *(f"lab {name} {mode} 256" for name in ("fp32", "bf16") for mode in ("eager", "compiled")),
        *(f"lab {name} 8 rows, 40 tokens, {way}" for name in ("fp32", "bf16") for way in gpu.WAYS),
        *(f"run {name} 8 rows, real lengths, {way}" for name in ("fp32", "bf16") for way in gpu.WAYS),
    ]
    speed = figures["lab fp32 eager 256"]
    assert speed["tokens_per_second"] > 0 and 0 < speed["data_wait_share"] < 1
    assert speed["seconds_432k_pairs"] == pytest.approx(speed["epoch_seconds"] * 432_000 / 2000)
    for way in gpu.WAYS:
        assert figures[f"lab fp32 8 rows, 40 tokens, {way}"]["tokens"] == 20 * 40
        tokens = figures[f"run fp32 8 rows, real lengths, {way}"]["tokens"]
        assert tokens == figures["run fp32 8 rows, real lengths, plain"]["tokens"]
        assert 20 < tokens < 20 * 20  # what a trained model says is short
    assert report["targets"] == [] and "nothing failed" in capsys.readouterr().out  # a tiny model has no targets


def test_losses_agree_in_every_format(bench):
    one, model, collate = bench
    checks = list(gpu_parity.check_losses(model, CPU, one.prepared.train, collate, compile=False))
    assert [check.name.split(",")[0] for check in checks] == [n for n in ("float64", "fp32", "bf16") for _ in range(2)]
    assert all(check.passed for check in checks), checks


def test_a_lost_slice_fails(bench, monkeypatch):
    monkeypatch.setattr(cross_entropy, "add_product", lambda total, left, right: total)
    one, model, collate = bench
    checks = list(gpu_parity.check_losses(model, CPU, one.prepared.train, collate, compile=False))
    assert [check.passed for check in checks] == [True, False] * 3


def test_wrong_greedy_search_fails(lively, monkeypatch):
    one, model, collate = lively
    assert all(check.passed for check in gpu_parity.check_greedy(model, CPU, one.sources, collate))
    right = decoding.attend_source
    monkeypatch.setattr(decoding, "attend_source", lambda *arguments: -right(*arguments))
    assert not any(check.passed for check in gpu_parity.check_greedy(model, CPU, one.sources, collate))


@pytest.fixture
def lively(bench):
    """Outputs that vary more than those of a fresh model."""
    one, model, collate = bench
    torch.manual_seed(2)
    with torch.no_grad():
        model = Translator(model.config)
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    yield one, model, collate
    CapturedTranslator.enabled = True


def test_captured_steps_agree_in_every_format(lively):
    one, model, collate = lively
    checks = list(gpu_parity.check_captured(model, CPU, one.sources, collate))
    assert [check.name.split(",")[0].split()[-1] for check in checks] == [
        n for n in ("float64", "fp32", "bf16") for _ in range(2)
    ]
    assert all(check.passed for check in checks), checks


def test_wrong_captured_steps_fail(lively, monkeypatch):
    one, model, collate = lively
    right = captured.attend_source
    monkeypatch.setattr(captured, "attend_source", lambda *arguments: -right(*arguments))
    assert not any(check.passed for check in gpu_parity.check_captured(model, CPU, one.sources, collate))


def test_captured_steps_that_cannot_be_are_a_failure(lively, monkeypatch, capsys):
    one, model, collate = lively
    monkeypatch.setattr(captured.CapturedTranslator, "step", None)
    with pytest.raises(RuntimeError, match="captured"):
        list(gpu_parity.check_captured(model, CPU, one.sources, collate))
    assert not CapturedTranslator.enabled and capsys.readouterr().err.startswith("note: ")
    with pytest.raises(RuntimeError, match="captured"):
        gpu_speed.time_search(one, model, one.sources, collate, "fp32", 8, "captured")


def test_targets_go_by_the_best_turn():
    turns = {"lab bf16 eager 16384": 1e6, "lab bf16 compiled 16384": 2e6, "big bf16 eager 16384": 9e6}
    runs = [gpu.Run(name, 1, {"tokens_per_second": speed}, 1.0) for name, speed in turns.items()]
    (line,) = gpu.targets(runs)
    assert "lab bf16 compiled" in line and line.endswith("≥ 1.5e+06: reached")
    (line,) = gpu.targets([gpu.Run("lab fp32 128 rows, 40 tokens", 1, {"pass_seconds": 1.6}, 1.0)])
    assert line.endswith("≤ 1.5: missed")


def test_nan_passes_nothing():
    assert not gpu_parity.Check("", {"loss": float("nan")}, 1.0).passed
    assert gpu_parity.Check("", {"loss": 1e-4, "worst": 9e-4}, 1e-4).passed


def test_what_fails_is_reported_and_the_rest_goes_on(bench, capsys):
    one, *_ = bench

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    one.measure({"full": full, "good": lambda: {"tokens_per_second": 1.0}})
    assert [run.contestant for run in one.runs] == ["good"] and "OutOfMemoryError" in one.failures["full"]
    assert "FAILED  full" in capsys.readouterr().out


@pytest.mark.parametrize(
    "setting", [{"parts": "parity,trainig"}, {"presets": "huge"}, {"rows": "0"}, {"compile": "so"}]
)
def test_a_wrong_setting_is_one_line(setting):
    with pytest.raises(UserError, match=f"--{next(iter(setting))}"):
        Config(**setting)
