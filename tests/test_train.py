"""Training as a user runs it: it learns, it is the same on one process or many, and it survives being killed."""

import dataclasses
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY_FLAGS, run_ranks, run_script, write_pairs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train as training
from engine.errors import UserError
from engine.telemetry import shown_as
from model import ModelConfig, Translator, summed_loss
from text.rows import default_path, find_text

QUICK = ["--max_steps", "24", "--eval_every", "8", "--log_every", "3", "--tokens_per_batch", "300", "--warmup", "4"]


def records(run: Path, key: str = "train/loss") -> dict[int, float]:
    """Step → value, from metrics.jsonl; a step that stands there twice is an error."""
    found = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if key in record:
            assert record["step"] not in found
            found[record["step"]] = record[key]
    return found


def curve(run: Path, tag: str = "train/loss") -> dict[int, float]:
    """The same from TensorBoard's files."""
    events = EventAccumulator(str(run)).Reload().Scalars(shown_as(tag))
    assert len({event.step for event in events}) == len(events)
    return {event.step: event.value for event in events}


def weights(run: Path, checkpoint: str = "last") -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / "checkpoints" / checkpoint / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit."""
    for key in ("train/loss", "valid/loss", "train/learning_rate", "train/gradient_norm"):
        assert records(one, key) == records(other, key) and records(one, key)
        assert curve(one, key) == curve(other, key)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def assert_close_run(one: Path, other: Path) -> None:
    losses = [list(records(run).values()) for run in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) > 3
    assert records(one, "valid/loss") == pytest.approx(records(other, "valid/loss"), rel=1e-5)
    first, second = weights(one), weights(other)
    for name in first:
        if name.endswith("in_proj_bias"):
            # Softmax does not see a bias on the keys: its gradient is rounding noise around 0, which Adam divides by its
            # own size. It changes no output, so only the query and value parts are held against each other.
            first[name], second[name] = (
                torch.cat([tensor.chunk(3)[i] for i in (0, 2)]) for tensor in (first[name], second[name])
            )
        assert torch.allclose(first[name], second[name], rtol=1e-5, atol=1e-5), name


# In fp32 on every machine: these look at numbers.
SMALL = dict(max_steps=6, eval_every=3, log_every=2, tokens_per_batch=300, precision="fp32")


def config(**values) -> training.Config:
    tiny = dict(zip((flag[2:] for flag in TINY_FLAGS[::2]), map(int, TINY_FLAGS[1::2])))
    made = training.Config(**(tiny | SMALL | values))
    made.given = set(values)
    return made


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A run in this process: in a folder of its own, and without keeping its signal handlers."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


# ---- it learns ----


def test_learns_to_reverse_numbers(toy_run):
    """The system test: data → tokenizers → training → greedy decoding → BLEU, nothing mocked."""
    done = run_script("evaluate.py", cwd=toy_run)
    assert done.returncode == 0, done.stderr
    card = json.loads((toy_run / "runs/toy/eval/test-greedy.json").read_text())
    assert card["nltk"] > 95 and card["sentences"] == 100


def test_overfits_64_real_pairs_in_a_minute(tmp_path):
    """If it cannot learn 64 sentences by heart, a mask, the loss or the decoder is wrong."""
    text = find_text(os.environ.get("MINIDATASET") or default_path())
    rows = [row for row in next(text.rows("train")) if 8 <= len(row[0]) <= 40 and len(row[1]) <= 120][:68]
    data = write_pairs(tmp_path / "data", rows, {"train": slice(4, 68), "validation": slice(0, 2), "test": slice(2, 4)})
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
        512,
    ]
    flags += ["--dropout", 0, "--label_smoothing", 0, "--lr", 0.003, "--source_vocab", 800, "--target_vocab", 800]
    flags += ["--max_steps", 260, "--eval_every", 260, "--tokens_per_batch", 1024]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_script("train.py", "--data", data, *flags, "--run", "64", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run_script("evaluate.py", "--split", "train", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    card = json.loads((tmp_path / "runs/64/eval/train-greedy.json").read_text())
    assert card["sentences"] == 64 and card["nltk"] >= 95
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60  # seconds of CPU


# ---- the same run, whatever it is split into ----


def test_accumulated_gradients_equal_those_of_the_whole_batch(toy_data, here):
    """In float64, where nothing can hide: 1 × 4 and 2 × 2 parts, of uneven token counts."""
    t = training.set_up(config(data=str(toy_data), run="r"))
    collate, gradients = training.collate_for(t.prepared), []
    for world_size, accumulate in ((1, 1), (1, 4), (2, 2), (3, 1)):
        torch.manual_seed(0)
        model = Translator(ModelConfig(**(vars(t.model.config) | {"dropout": 0.0}))).double()
        for rank in range(world_size):
            sampler = training.BucketSampler(
                t.prepared.train.lengths, 300, rank=rank, world_size=world_size, accumulate=accumulate
            )
            tokens, rows = next(sampler.target_tokens(0)), iter(sampler)
            for _ in range(accumulate):
                batch = collate([t.prepared.train[row] for row in next(rows)])
                logits = model(batch.src, batch.src_pad, batch.tgt_in, batch.real)
                (F.cross_entropy(logits, batch.tgt_out, reduction="sum") / tokens).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert torch.allclose(gradient, other[name], rtol=1e-9, atol=1e-12), name


SAME = ["--dropout", "0", "--lr", "0.0003", "--precision", "fp32", *QUICK]


@pytest.fixture(scope="module")
def whole_run(toy_data, tmp_path_factory):
    """One process, whole batches, no dropout."""
    folder = tmp_path_factory.mktemp("whole")
    done = run_script("train.py", "--data", toy_data, *TINY_FLAGS, *SAME, "--run", "whole", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs/whole"


def test_accumulation_of_four_equals_one_batch(whole_run, toy_data, tmp_path):
    done = run_script("train.py", "--data", toy_data, *TINY_FLAGS, *SAME, "--accumulate", 4, "--run", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_close_run(whole_run, tmp_path / "runs/a")


def test_a_step_that_does_not_fit_the_memory_is_split(toy_data, here, monkeypatch):
    """With a loss that pretends to run out of memory above 100 target tokens."""
    t = training.set_up(config(data=str(toy_data), run="r"))
    assert t.state["accumulate"] == 1  # on a CPU nothing is tried

    class Small(training.SummedLoss):
        def forward(self, src, src_pad, tgt_in, real, tgt_out):
            if len(tgt_out) > 100:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(src, src_pad, tgt_in, real, tgt_out)

    monkeypatch.setattr(training, "SummedLoss", Small)
    gpu = dataclasses.replace(t.world, device=torch.device("meta"))
    monkeypatch.setattr("data.Batch.to", lambda batch, _device: batch)
    collate = training.collate_for(t.prepared)
    parts = training.micro_batches_that_fit(t.config, t.prepared, collate, t.model, t.precision, gpu)
    widest = training.make_sampler(t.config, t.prepared, t.world, 1).widest_step()
    tokens = t.prepared.train.lengths["target"][widest] + 1
    assert parts > 1 and tokens[::parts].sum() <= 100 < tokens[:: parts // 2].sum()
    assert all(weight.grad is None for weight in t.model.parameters())


def test_the_attention_lab_trains_the_same_model(whole_run, toy_data, tmp_path):
    words = ["--data", toy_data, *TINY_FLAGS, *SAME, "--attention", "python", "--run", "a"]
    done = run_script("train.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_close_run(whole_run, tmp_path / "runs/a")


@pytest.mark.parametrize("ranks, more", [(2, []), (3, ["--accumulate", "2"])])
def test_many_processes_equal_one(whole_run, toy_data, tmp_path, ranks, more):
    done = run_ranks(ranks, "train.py", "--data", toy_data, *TINY_FLAGS, *SAME, *more, "--run", "ddp", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_close_run(whole_run, tmp_path / "runs/ddp")
    assert done.stdout.count("run: runs/ddp") == 1  # rank 0 alone speaks


def test_loader_processes_change_nothing(whole_run, toy_data, tmp_path):
    done = run_script("train.py", "--data", toy_data, *TINY_FLAGS, *SAME, "--workers", 2, "--run", "w", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same_run(whole_run, tmp_path / "runs/w")


@pytest.mark.slow
def test_compiled_equals_plain(whole_run, toy_data, tmp_path):
    done = run_script("train.py", "--data", toy_data, *TINY_FLAGS, *SAME, "--compile", "--run", "c", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(records(whole_run).values()) == pytest.approx(list(records(tmp_path / "runs/c").values()), rel=1e-4)


# ---- killed and resumed ----


@pytest.fixture(scope="module")
def uninterrupted(toy_data, tmp_path_factory):
    """With dropout: the randomness must be resumed as well."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = run_script("train.py", "--data", toy_data, *TINY_FLAGS, *LONGER, "--run", "r", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


LONGER = ["--max_steps", "300", "--eval_every", "25", "--log_every", "7", "--tokens_per_batch", "300"]


def start_training(folder: Path, *arguments, **options) -> subprocess.Popen:
    words = [sys.executable, str(ROOT / "train.py"), *map(str, arguments)]
    options |= dict(cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    """Until metrics.jsonl has reached it."""
    while process.poll() is None:
        if (run / "metrics.jsonl").exists() and max(records(run), default=0) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(process.communicate())


def test_sigterm_saves_and_the_resumed_run_is_the_same(uninterrupted, toy_data, tmp_path):
    process = start_training(tmp_path, "--data", toy_data, *TINY_FLAGS, *LONGER, "--run", "r")
    wait_for_step(tmp_path / "runs/r", 40, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "to go on: python train.py --resume runs/r" in output
    assert max(records(tmp_path / "runs/r")) < 300
    done = run_script("train.py", "--resume", "runs/r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same_run(uninterrupted / "runs/r", tmp_path / "runs/r")


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_resumed_is_the_same(uninterrupted, toy_data, tmp_path, kills):
    draw, run = random.Random(kills), tmp_path / "runs/r"
    steps_before_kill = 280 // kills
    killed = 0
    while True:
        started = (run / "config.json").exists()
        arguments = ["--resume", "runs/r"] if started else ["--data", toy_data, *TINY_FLAGS, *LONGER, "--run", "r"]
        process = start_training(tmp_path, *arguments)
        if killed == kills:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            break
        if draw.random() < 0.5:  # somewhere between the start of Python and the first steps
            time.sleep(draw.uniform(0.5, 6))
        else:  # in the middle of training, now and then while a checkpoint is being written
            done = max(records(run), default=0) if (run / "metrics.jsonl").exists() else 0
            try:
                wait_for_step(run, min(done + draw.randint(1, 2 * steps_before_kill), 290), process)
            except AssertionError:
                assert process.returncode == 0  # it was done before it could be killed
            time.sleep(draw.uniform(0, 0.1))
        process.kill()
        process.communicate()
        killed += 1
    assert_same_run(uninterrupted / "runs/r", run)


def test_a_longer_run_goes_on_from_a_finished_one(toy_data, tmp_path):
    first = run_script("train.py", "--data", toy_data, *TINY_FLAGS, *QUICK, "--run", "r", cwd=tmp_path)
    again = run_script("train.py", "--resume", "runs/r", cwd=tmp_path)
    assert first.returncode == again.returncode == 0 and "all steps were done before" in again.stdout
    more = run_script("train.py", "--resume", "runs/r", "--max_steps", 30, cwd=tmp_path)
    assert more.returncode == 0 and max(records(tmp_path / "runs/r")) == 30


@pytest.mark.parametrize("workers", [0, 2])
def test_a_signal_to_every_process_still_saves(toy_data, tmp_path, workers):
    """As torchrun, SLURM and Ctrl-C on a terminal send it: to the loader's workers too."""
    words = [
        "--data",
        toy_data,
        *TINY_FLAGS,
        "--max_steps",
        10**5,
        "--log_every",
        5,
        "--workers",
        workers,
        "--run",
        "r",
    ]
    process = start_training(tmp_path, *words, start_new_session=True)
    wait_for_step(tmp_path / "runs/r", 10, process)
    os.killpg(process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "to go on: " in output, errors
    assert (tmp_path / "runs/r/checkpoints/last/state.json").exists()


def test_a_validation_cut_off_by_a_signal_is_made_up_for(toy_data, here, monkeypatch):
    """Interrupted at the very step of a validation: saved first, validated when the run goes on."""
    monkeypatch.setattr(training, "catch_signals", lambda: lambda: True)
    training.train(config(data=str(toy_data), run="r", max_steps=4, eval_every=1))
    assert records(here / "runs/r", "valid/loss") == {}
    monkeypatch.setattr(training, "catch_signals", lambda: lambda: False)
    again = training.Config(resume="runs/r")
    again.given = {"resume"}
    training.train(again)
    assert list(records(here / "runs/r", "valid/loss")) == [1, 2, 3, 4]


def test_two_processes_do_not_write_to_one_run(toy_data, here):
    first = training.set_up(config(data=str(toy_data), run="r"))
    again = training.Config(resume="runs/r")
    again.given = {"resume"}
    with pytest.raises(UserError, match="being written by another process"):
        training.set_up(again)
    first.locked[0].close()
    assert training.set_up(again).run == first.run


def test_batches_stay_when_a_run_goes_on_elsewhere(toy_data, here):
    """The automatic size of a batch depends on the device, so the one chosen first is kept."""
    t = training.set_up(config(data=str(toy_data), run="r", tokens_per_batch=0))
    saved = json.loads((here / "runs/r/config.json").read_text())
    assert saved["tokens_per_batch"] == t.config.tokens_per_batch > 0
    assert Path(saved["data"]).is_absolute()


# ---- what a run writes and when it stops ----


def test_what_a_run_leaves(toy_data, here):
    training.train(config(data=str(toy_data), run="r"))
    run = here / "runs/r"
    assert json.loads((run / "config.json").read_text())["max_steps"] == 6
    for name in ("model.json", "metrics.jsonl", "train.log", "tokenizer/source/tokenizer.json", "tokenizer/target"):
        assert (run / name).exists()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["best", "last", "step-3", "step-6"]
    tags = EventAccumulator(str(run)).Reload().Tags()
    names = {"train/loss", "train/perplexity", "train/learning_rate", "train/gradient_norm", "speed/tokens_per_second",
             "data/padding_share", "data/wait_share", "speed/model_flops_utilisation", "memory/peak_gib", "valid/loss",
             "valid/perplexity", "valid/bleu"}  # fmt: skip
    assert {shown_as(name) for name in names} <= set(tags["scalars"])
    assert tags["images"] == ["cross-attention"] and "samples/text_summary" in tags["tensors"]
    assert "_hparams_/experiment" in EventAccumulator(str(run)).Reload().summary_metadata
    figures = next(json.loads(line) for line in (run / "metrics.jsonl").open() if '"data/padding_share"' in line)
    assert 0 <= figures["data/padding_share"] < 0.5 and 0 < figures["speed/model_flops_utilisation"] < 1.5
    assert curve(run) == pytest.approx(records(run))


def test_the_validation_loss_is_unsmoothed_and_per_token(toy_data, here):
    t = training.set_up(config(data=str(toy_data), run="r"))
    total = count = 0
    for index in range(len(t.prepared.validation)):
        batch = t.validation.collate([t.prepared.validation[index]])
        with torch.no_grad():
            total += summed_loss(t.model(batch.src, batch.src_pad, batch.tgt_in, batch.real), batch.tgt_out).item()
        count += batch.target_tokens
    assert t.validation.loss(t.validation.batches) == pytest.approx(total / count, rel=1e-5)
    assert total / count == pytest.approx(math.log(300), abs=1)


def test_the_learning_rate_is_logged_and_falls_to_nothing(toy_data, here):
    training.train(config(data=str(toy_data), run="r", max_steps=20, log_every=1, eval_every=20, warmup=5, lr=0.01))
    rates = list(records(here / "runs/r", "train/learning_rate").values())
    assert rates[:5] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01])
    assert max(rates) == 0.01 and 0 < rates[-1] < 0.002


def test_stops_after_the_minutes(toy_data, here):
    begun = time.perf_counter()
    training.train(config(data=str(toy_data), run="r", max_steps=10**6, max_minutes=0.1, eval_every=10**6, lr=0.001))
    assert 5 < time.perf_counter() - begun < 20
    rates = list(records(here / "runs/r", "train/learning_rate").values())
    # Near 0 on a quiet machine; where the speed changes in the middle, somewhere on the way down.
    assert max(rates) == pytest.approx(0.001) and rates[-1] < 0.0007
    assert "the learning rate falls from here on" in (here / "runs/r/train.log").read_text()


def test_early_stopping(toy_data, here, monkeypatch):
    losses = iter([3.0, 2.0, 2.5, 2.0, 1.0])
    monkeypatch.setattr(training.Validation, "run", lambda *_: next(losses))
    training.train(config(data=str(toy_data), run="r", max_steps=50, eval_every=5, patience=2))
    assert "step 20: 2 validations without a better loss" in (here / "runs/r/train.log").read_text()
    assert os.readlink(here / "runs/r/checkpoints/best") == "step-10"


def test_a_non_finite_loss_stops_before_the_update_and_names_the_step(toy_data, here, monkeypatch):
    steps, plain = iter(range(1, 100)), training.SummedLoss.forward
    spoiled = lambda *arguments: plain(*arguments) * (math.nan if next(steps) == 5 else 1.0)  # noqa: E731
    monkeypatch.setattr(training.SummedLoss, "forward", spoiled)
    with pytest.raises(UserError, match="step 5: the loss or its gradient is not finite"):
        training.train(config(data=str(toy_data), run="r", max_steps=50, eval_every=3, log_every=20))
    assert sorted(path.name for path in (here / "runs/r/checkpoints").glob("step-*")) == ["step-3"]


def test_a_hidden_gpu_or_none_trains_on_the_cpu(toy_data, tmp_path):
    done = run_script(
        "train.py", "--data", toy_data, *TINY_FLAGS, "--max_steps", 2, cwd=tmp_path, CUDA_VISIBLE_DEVICES="1"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("device: cpu, ") == 1


@pytest.mark.slow
def test_real_data_trains(real_data, tmp_path):
    done = run_script("train.py", "--data", real_data, "--max_steps", 3, "--run", "real", cwd=tmp_path, threads=2)
    assert done.returncode == 0, done.stderr
    assert "432,103 rows read" in done.stdout
