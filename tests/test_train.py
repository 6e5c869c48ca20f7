"""Training is what a textbook's loop computes, and it survives being killed."""

import json
import math
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import sys
from dataclasses import replace
from itertools import count, islice
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import (
    ROOT,
    TINY_FLAGS,
    fork_ranks,
    forked,
    forked_ranks,
    records,
    reversed_digits,
    write_pairs,
)
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.parallel import DistributedDataParallel

import micro_batches
import model as model_py
import train as training
from data import BucketSampler, collate_for, load_prepared
from engine.config import parse_flags
from engine.distributed import World
from engine.errors import UserError
from engine.optimizer import OPTIMIZERS
from engine.precision import Precision
from engine.run import INTERRUPTED, Run
from engine.schedule import SCHEDULES, Schedule
from fast import build
from labs.attention_op import train as training_by_hand
from labs.attention_op.module import MultiHeadAttention
from loading import load_trained
from model import ModelConfig, SummedLoss, Translator


def use_loss(monkeypatch, loss_class: type) -> None:
    """Train with this loss, and without the kernels."""
    monkeypatch.setattr(
        training, "make_loss", lambda model, config, *_: loss_class(model, config.label_smoothing)
    )


# ---- what a run wrote ----

CURVES = ("train/loss", "valid/loss", "train/learning_rate", "train/gradient_norm")


def curve(run: Path, tag: str = "train/loss") -> dict[int, float]:
    """As `records`, from TensorBoard's files."""
    events = EventAccumulator(str(run)).Reload().Scalars(tag)
    assert len({event.step for event in events}) == len(events)
    return {event.step: event.value for event in events}


def weights(run: Path, checkpoint: str = "last") -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / "checkpoints" / checkpoint / "model.safetensors")


def saved_state(run: Path) -> dict:
    return json.loads((run / "checkpoints/last/state.json").read_text())


def log_of(run: Path) -> str:
    return (run / "train.log").read_text(encoding="utf-8")


def assert_same_run(run: Path, other: Path) -> None:
    """Bit for bit."""
    for key in CURVES:
        assert records(run, key) == records(other, key) and records(run, key)
        assert curve(run, key) == curve(other, key)
    first, second = weights(run), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def assert_same_weights(first: dict, second: dict, tolerance: float) -> None:
    """By the mean distance of each tensor's elements.

    Left out are the biases of the keys: softmax does not see them, so their gradient is rounding
    noise around 0, which Adam blows up to a whole step.
    """
    for name in first:
        pair = [weights[name].double() for weights in (first, second)]
        if name.endswith("in_proj_bias"):
            pair = [torch.cat([tensor.chunk(3)[i] for i in (0, 2)]) for tensor in pair]
        assert (pair[0] - pair[1]).abs().mean() < tolerance, name


def assert_close_run(run: Path, other: Path) -> None:
    """The same sums in another order, in fp32.

    They differ by a relative 1e-7 each, which 24 steps blow up to 1e-5 at most.
    """
    for key in ("train/loss", "valid/loss"):
        assert records(run, key) == pytest.approx(records(other, key), rel=1e-5)
        assert len(records(run, key)) > 2
    assert_same_weights(weights(run), weights(other), 1e-5)


# ---- runs in this process ----

# In fp32 on every machine, for these look at numbers.
SMALL = dict(
    max_steps=6, eval_every=3, log_every=2, tokens_per_batch=300, precision="fp32", device="cpu"
)


def config(kind=training.Config, **values) -> training.Config:
    tiny = dict(zip((flag[2:] for flag in TINY_FLAGS[::2]), map(int, TINY_FLAGS[1::2])))
    made = kind(**(tiny | SMALL | values))
    made.given = set(values)
    return made


@pytest.fixture(autouse=True)
def _blank_pictures(monkeypatch):
    """Each validation draws what the model attends to, which takes longer than these steps."""
    monkeypatch.setattr("tools.reporting.attention.picture", lambda attention: Figure())


@pytest.fixture(scope="module")
def few_pairs(tmp_path_factory) -> Path:
    """150 training pairs of the toy language and 10 for validation: a pass takes few steps."""
    splits = {"train": slice(0, 150), "validation": slice(150, 160)}
    return write_pairs(tmp_path_factory.mktemp("few"), reversed_digits(160), splits)


def resumed(run: Path, **values) -> training.Config:
    made = training.Config(resume=str(run), **values)
    made.given = {"resume", *values}
    return made


# ---- it is what a textbook's loop computes ----


def trained_by_hand(prepared, c: training.Config, ranks: int = 1, accumulate: int = 1):
    """`c.max_steps` steps of `ranks` processes, `accumulate` micro-batches each, in one process.

    Returns the model, and of each step the loss without label smoothing and the gradient's norm.
    """
    sizes = ModelConfig(
        len(prepared.source_tokenizer),
        len(prepared.target_tokenizer),
        c.d_model,
        c.nhead,
        c.num_encoder_layers,
        c.num_decoder_layers,
        c.dim_feedforward,
        c.dropout,
        c.norm_first,
    )
    torch.manual_seed(c.seed)
    model = Translator(sizes).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01
    )
    micro_batches = []
    for rank in range(ranks):
        sampler = BucketSampler(
            prepared.train.lengths,
            c.tokens_per_batch,
            seed=c.seed,
            rank=rank,
            world_size=ranks,
            accumulate=accumulate,
        )
        micro_batches.append(iter(sampler))
    collate = collate_for(prepared)
    figures = []
    for step in range(1, c.max_steps + 1):
        left = 1 - (step - 1) / c.max_steps
        optimizer.param_groups[0]["lr"] = c.lr * min(1, left / 0.3)
        smoothed = plain = tokens = 0
        for rank in range(ranks):
            mixed = np.random.SeedSequence((c.seed, step, rank)).generate_state(1, np.uint64)[0]
            torch.manual_seed(int(mixed))
            for _ in range(accumulate):
                batch = collate([prepared.train[row] for row in next(micro_batches[rank])])
                logits = model(batch.src, batch.src_pad, batch.tgt_in, batch.target_positions)
                log_probabilities = logits.log_softmax(-1)
                right = -log_probabilities.gather(1, batch.tgt_out[:, None]).sum()
                uniform = -log_probabilities.mean(-1).sum()
                smoothed += (1 - c.label_smoothing) * right + c.label_smoothing * uniform
                plain += right.item()
                tokens += len(batch.tgt_out)
        optimizer.zero_grad()
        (smoothed / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip)
        optimizer.step()
        figures.append((plain / tokens, norm.item()))
    return model, figures


# Each unlike its default, and large enough to show after six steps.
BY_HAND = dict(
    log_every=1,
    lr=0.01,
    seed=7,
    label_smoothing=0.2,
    clip=0.5,
    num_encoder_layers=2,
    eval_every=6,
    optimizer="adamw",
    # Heads of 8, which fast/ leaves to PyTorch: it draws dropout in another way.
    nhead=4,
    dropout=0.1,
)


def assert_run_is(run: Path, model, figures, log_every: int = 1) -> None:
    """fp32 sums in another order; an element of the weights has moved by some 0.03.

    Logged are the mean of the losses since the last line, and the last gradient's norm.
    """
    losses, norms = (np.reshape(column, (-1, log_every)) for column in zip(*figures))
    means = losses.mean(1)
    assert list(records(run).values()) == pytest.approx(means.tolist(), rel=1e-4)
    perplexities = np.exp(means).tolist()
    assert list(records(run, "train/perplexity").values()) == pytest.approx(perplexities, rel=1e-3)
    logged = list(records(run, "train/gradient_norm").values())
    assert logged == pytest.approx(norms[:, -1].tolist(), rel=1e-4)
    assert norms[0, 0] > 0.5  # the clipping does something
    assert_same_weights(weights(run), model.state_dict(), 2e-5)


@pytest.mark.parametrize(
    "changed",
    [{}, {"norm_first": True, "log_every": 2}, {"nhead": 2, "dropout": 0.0}],
    ids=str,
)
def test_the_run_of_one_process_is_the_loop_by_hand(toy_data, here, changed):
    """With PyTorch's own operations; in the last case with those of fast/."""
    c = config(data=str(toy_data), run=str(here), **BY_HAND | changed)
    training.train(c)
    assert ("fast/ is not used" in log_of(here)) == (c.nhead == 4 or bool(build.why_not()))
    assert_run_is(here, *trained_by_hand(prepared_of(here), c), c.log_every)


def test_the_run_of_two_processes_is_the_loop_by_hand(toy_data, here, tmp_path):
    """Each with a dropout of its own, in two micro-batches."""
    c = config(data=str(toy_data), run=str(here), accumulate=2, **BY_HAND)
    flags = [f"--{name}={getattr(c, name)}" for name in vars(c) if name not in ("given", "resume")]
    output = forked_ranks(2, "train.py", *flags, cwd=tmp_path, first=(make_a_step_last_a_second,))
    # Gradients are sent once a step, not with each micro-batch; constants, which are buffers,
    # never.
    assert output.count("no_sync, buffers: False\n") == 6
    prepared = prepared_of(here)
    assert_run_is(here, *trained_by_hand(prepared, c, ranks=2, accumulate=2))
    # The speed counts the tokens of all ranks, though rank 0 sees only its own.
    lengths = prepared.train.lengths
    sampler = BucketSampler(lengths, 300, seed=7, world_size=2, accumulate=2)
    both = lengths["source"] + lengths["target"] + 1
    rows_of_rank_0 = list(islice(sampler, 12))
    for tag, of_pair in (("target_tokens", lengths["target"]), ("tokens", both)):
        of_rank_0 = [int((of_pair[rows] + 1).sum()) for rows in rows_of_rank_0]
        speeds = {step: 2 * sum(of_rank_0[2 * step - 2 : 2 * step]) for step in range(2, 7)}
        assert records(here, f"speed/{tag}_per_second") == speeds


def make_a_step_last_a_second() -> None:
    """Rank 0 prints each backward pass that sends no gradients, and whether buffers are sent."""
    import engine.meters

    class SteadyMeter(engine.meters.Meter):
        def __init__(self, _window, *arguments):
            self.now = 0.0
            super().__init__(1, *arguments, clock=lambda: self.now)

        def end_step(self):
            self.now += 1
            super().end_step()

    engine.meters.Meter = SteadyMeter
    no_sync = DistributedDataParallel.no_sync

    def noted(module):
        if os.environ["RANK"] == "0":
            print("no_sync, buffers:", module.broadcast_buffers)
        return no_sync(module)

    DistributedDataParallel.no_sync = noted


def prepared_of(run: Path):
    return load_prepared(run.parent / ".cache" / saved_state(run)["data_key"])


# ---- the same run, whatever it is split into ----

PLAIN = dict(max_steps=24, eval_every=8, log_every=3, dropout=0.0, lr=0.0003)
SAME = [word for name, value in (SMALL | PLAIN).items() for word in (f"--{name}", str(value))]


def test_attention_by_hand_trains_the_same_model(whole_run, long_data, here, monkeypatch):
    seen = []
    make = training.make_translator
    monkeypatch.setattr(
        training, "make_translator", lambda sizes: seen.append(make(sizes)) or seen[-1]
    )
    by_hand = config(training_by_hand.Config, data=str(long_data), run=str(here), **PLAIN)
    training_by_hand.main(by_hand)
    layer = seen[-1].transformer.encoder.layers[0]
    assert type(layer.self_attn) is MultiHeadAttention
    assert not model_py.CHANGES  # the next model is the stock one
    assert_close_run(whole_run, here)


@pytest.mark.slow
def test_compiled_equals_plain(whole_run, long_data, here):
    training.train(config(data=str(long_data), run=str(here), compile=True, **PLAIN))
    # The compiler fuses and reorders within a step too.
    assert records(whole_run) == pytest.approx(records(here), rel=1e-4)


@pytest.mark.parametrize("part", ["loss", "translate", "attention_of"])
def test_a_fault_of_the_validation_comes_before_the_first_step(toy_data, here, monkeypatch, part):
    monkeypatch.setattr(training.Validation, part, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        training.train(config(data=str(toy_data), run=str(here)))
    assert not (here / "config.json").exists()  # no run has begun


def test_sizes_that_do_not_fit_together_are_an_error_before_the_data(here, monkeypatch):
    monkeypatch.setattr(training, "load_data", lambda *_: pytest.fail("tokenised"))
    with pytest.raises(UserError, match="nhead"):
        training.train(config(run=str(here), nhead=5))


def test_data_that_another_machine_has_prepared(here, monkeypatch):
    monkeypatch.setattr(training, "find_and_prepare", lambda *_: (here / "absent", "", ""))
    with pytest.raises(UserError, match="is not on this machine; runs/ must be on a disk that all"):
        training.train(config(run=str(here)))


class SumOfOneWeight(torch.nn.Module):
    """In place of the loss: hundreds of steps in a moment."""

    def __init__(self, model, *_):
        super().__init__()
        self.weight = model.output.weight

    def forward(self, *_):
        return self.weight.sum(), self.weight.sum().detach()


@pytest.fixture
def validated_steps(monkeypatch) -> list[int]:
    """The steps at which a run validates, in a moment: nothing is computed."""
    steps = []
    use_loss(monkeypatch, SumOfOneWeight)
    monkeypatch.setattr(
        training.Validation, "__call__", lambda _, step: steps.append(step) or (1.0, 0.0)
    )
    return steps


def test_an_epoch_ends_with_a_validation(toy_data, here, validated_steps):
    """With 60 tokens per step an epoch has more than 250 of them, and less than a sixth of all."""
    limits = dict(eval_every=0, max_steps=3000, log_every=3000, optimizer="adamw")
    training.train(config(data=str(toy_data), run=str(here), tokens_per_batch=60, **limits))
    steps_per_epoch = int(re.search(r"(\d+) steps per epoch", log_of(here))[1])
    assert 250 < steps_per_epoch < 500
    assert validated_steps == [*range(steps_per_epoch, 3000, steps_per_epoch), 3000]


def test_a_run_by_the_clock_has_six_validations(few_pairs, here, validated_steps, monkeypatch):
    """On a clock that goes by a second with every look: two minutes are fewer than 250 steps."""
    ticks = count()
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    limits = dict(max_steps=10**6, max_minutes=2.0, eval_every=0, log_every=1000)
    training.train(config(data=str(few_pairs), run=str(here), optimizer="adamw", **limits))
    assert len(validated_steps) == 6
    assert np.diff([0, *validated_steps]).max() < 22
    assert "1,000 steps or 0.2 minutes of warm-up" in log_of(here)
    assert "1,000,000 steps or 2 minutes in total" in log_of(here)


def test_the_clock_is_read_again_after_a_validation(few_pairs, here, monkeypatch):
    """One that lasts until the end of the run: no step is taken after it, and none repeats it."""
    now, steps = [0.0], []

    def tick() -> float:
        now[0] += 1
        return now[0]

    def validate(_, step):
        steps.append(step)
        now[0] += 50
        return 1.0, 0.0

    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=tick))
    monkeypatch.setattr(training.Validation, "__call__", validate)
    limits = dict(max_steps=1000, max_minutes=1.0, eval_every=12, log_every=1000)
    training.train(config(data=str(few_pairs), run=str(here), **limits))
    assert steps == [12] and "stopped after step 12: finished" in log_of(here)
    assert saved_state(here)["minutes"] < 1  # when its one checkpoint was saved


def test_a_save_that_lasts_until_the_end_is_followed_by_a_validation(few_pairs, here, monkeypatch):
    now, steps, save = [0.0], [], Run.save

    def tick() -> float:
        now[0] += 1
        return now[0]

    def slow_save(run, *words):
        now[0] += 50
        save(run, *words)

    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=tick))
    monkeypatch.setattr(Run, "save", slow_save)
    monkeypatch.setattr(
        training.Validation, "__call__", lambda _, step: steps.append(step) or (1.0, 0.0)
    )
    limits = dict(max_steps=1000, max_minutes=1.0, eval_every=1000, log_every=1000)
    training.train(config(data=str(few_pairs), run=str(here), save_minutes=0.2, **limits))
    assert len(steps) == 1 and f"stopped after step {steps[0]}: finished" in log_of(here)
    assert saved_state(here)["best_step"] == steps[0]


def test_the_rate_rises_for_as_many_steps_as_asked(few_pairs, here, monkeypatch):
    """The default would be a tenth of these steps, which is three."""
    use_loss(monkeypatch, SumOfOneWeight)
    limits = dict(max_steps=30, eval_every=30, log_every=1, warmup=2, lr=0.01)
    training.train(config(data=str(few_pairs), run=str(here), optimizer="adamw", **limits))
    rates = records(here, "train/learning_rate")
    assert [rates[step] for step in (1, 2, 3)] == pytest.approx([0.005, 0.01, 0.01])


def test_as_many_checkpoints_are_kept_as_asked(few_pairs, here, monkeypatch):
    losses = iter([2.0, 1.0, 3.0, 4.0])
    monkeypatch.setattr(training, "Validation", lambda *_, **__: lambda step: (next(losses), 0.0))
    training.train(config(data=str(few_pairs), run=str(here), max_steps=4, eval_every=1, keep=1))
    kept = sorted(path.name for path in (here / "checkpoints").iterdir())
    assert kept == ["best", "last", "step-2", "step-4"]


def test_what_a_reader_may_add_to_the_model(few_pairs, here, monkeypatch):
    """A matrix that no step uses, and a mask of numbers that are added."""

    def add(model: torch.nn.Module) -> None:
        model.transformer.unused = torch.nn.Linear(4, 4)
        model.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))

    monkeypatch.setattr(model_py, "CHANGES", [add])
    training.train(config(data=str(few_pairs), run=str(here), max_steps=2, eval_every=2))
    trained = load_trained(here).model
    assert trained.mask.isinf().any() and trained.transformer.unused.weight.isfinite().all()


def test_the_loss_is_sampled_until_the_rate_falls(few_pairs, here, monkeypatch):
    """Each rank draws its own tokens; the same ones after an interruption."""
    flops = []  # that the meter counts for so many tokens, at each log line

    class Recorded(training.Meter):
        def read(self, **options):
            flops.append(self.flops_of(100, 100))
            return super().read(**options)

    monkeypatch.setattr(training, "Meter", Recorded)
    monkeypatch.setattr(model_py, "OTHER_TOKENS", 60)
    settings = dict(data=str(few_pairs), max_steps=10, eval_every=5, log_every=1)
    unbroken = here.with_name("sampled")
    training.train(config(**settings, run=str(unbroken)))
    marked = ["loss ~" in line for line in log_of(unbroken).splitlines() if "  lr " in line]
    assert marked == [True] * 8 + [False] * 2
    assert max(flops[:8]) < flops[8] == flops[9]
    assert "marked ~, from all target tokens of a micro-batch" in " ".join(log_of(unbroken).split())

    # A mean of estimates and exact losses is an estimate.
    coarse = here.with_name("coarse")
    training.train(config(**settings | dict(log_every=3), run=str(coarse)))
    marked = ["loss ~" in line for line in log_of(coarse).splitlines() if "  lr " in line]
    assert marked == [True] * 3 + [False]

    with monkeypatch.context() as patch:
        interrupt_in(patch, 4)
        training.train(config(**settings, run=str(here)))
    training.train(resumed(here))
    assert_same_run(unbroken, here)

    monkeypatch.setattr(model_py, "OTHER_TOKENS", 10**6)
    whole = here.with_name("whole-vocabulary")
    training.train(config(**settings, run=str(whole)))
    assert "~" not in log_of(whole)
    # The first step has the same weights in both.
    estimate, exact = curve(unbroken)[1], curve(whole)[1]
    assert estimate != exact and estimate == pytest.approx(exact, rel=0.1)


def test_the_chosen_format_reaches_every_forward_pass(few_pairs, here, monkeypatch):
    seen, plain = [], training.SummedLoss.forward

    def forward(loss_of, *batch):
        seen.append(torch.is_autocast_enabled("cpu"))
        return plain(loss_of, *batch)

    use_loss(monkeypatch, SummedLoss)
    monkeypatch.setattr(training.SummedLoss, "forward", forward)
    training.train(config(data=str(few_pairs), run=str(here), max_steps=1, precision="bf16"))
    assert len(seen) > 2 and all(seen)


def test_validations_are_not_in_the_speed(toy_data, here, monkeypatch):
    """A step takes a second, a validation an hour."""
    now = [0.0]

    class Clocked(training.Meter):
        def __init__(self, *arguments):
            super().__init__(*arguments, clock=lambda: now[0])

        def end_step(self):
            now[0] += 1
            super().end_step()

    def validate(*_):
        now[0] += 3600
        return 1.0, 0.0

    monkeypatch.setattr(training, "Meter", Clocked)
    monkeypatch.setattr(training.Validation, "__call__", validate)
    training.train(config(data=str(toy_data), run=str(here), eval_every=2))
    assert min(records(here, "speed/tokens_per_second").values()) > 1


def test_a_step_that_does_not_fit_the_memory_is_split(toy_data, here, monkeypatch):
    """With a loss that pretends to run out of memory above 100 target tokens.

    Validation's batches are as small.
    """

    class Small(training.SummedLoss):
        def forward(self, src, src_pad, tgt_in, target_positions, tgt_out):
            if len(tgt_out) > 100 and self.training:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(src, src_pad, tgt_in, target_positions, tgt_out)

    def fit(make_loss, prepared, tokens_per_batch, precision, world):
        """As on a GPU."""
        gpu = SimpleNamespace(type="cuda")
        with monkeypatch.context() as patch:
            patch.setattr("data.Batch.to", lambda batch, device: batch)
            return micro_batches.micro_batches_that_fit(
                make_loss, prepared, tokens_per_batch, precision, replace(world, device=gpu)
            )

    use_loss(monkeypatch, Small)
    monkeypatch.setattr(training, "micro_batches_that_fit", fit)
    monkeypatch.setattr(training, "Validation", validation := Mock(side_effect=training.Validation))
    training.train(config(data=str(toy_data), run=str(here)))
    accumulate = json.loads((here / "config.json").read_text())["accumulate"]
    assert accumulate > 1
    assert validation.call_args.args[-1] == SMALL["tokens_per_batch"] // accumulate


# ---- killed and resumed ----

# With dropout: the random numbers must be resumed as well.
LONG = "--max_steps 24 --eval_every 12 --log_every 1 --tokens_per_batch 300 --precision fp32"
LONG = f"{LONG} --dropout 0.1".split()


@pytest.fixture(scope="session")
def uninterrupted(long_data, tmp_path_factory) -> tuple[Path, int]:
    """The run, and how many file operations it took, tokenising included."""
    folder = tmp_path_factory.mktemp("unbroken")
    flags = ["--data", long_data, *TINY_FLAGS, *LONG, "--run", folder / "run"]
    output = forked("train.py", *flags, cwd=folder, first=(count_file_operations,))
    return folder / "run", int(output.split("file operations: ")[1].split()[0])


@pytest.fixture(scope="session")
def uninterrupted_by_two(long_data, tmp_path_factory) -> Path:
    """The same by two processes."""
    folder = tmp_path_factory.mktemp("two")
    flags = ["--data", long_data, *TINY_FLAGS, *LONG, "--run", folder / "run"]
    forked_ranks(2, "train.py", *flags, cwd=folder)
    return folder / "run"


def count_file_operations(kill_at: int = 0) -> None:
    """Count what this process opens, renames and removes; kill it at operation `kill_at`.

    If the run ends before that, print the count.
    """
    seen, names = count(1), {"open", "os.rename", "os.mkdir", "os.symlink", "os.remove", "os.rmdir"}

    def hook(event, _arguments):
        if event in names and next(seen) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    import engine.run

    close = engine.run.Run.close

    def close_and_print(run, *words):
        close(run, *words)
        print("file operations:", next(seen))

    engine.run.Run.close = close_and_print


def signal_at_step(number: int, step: int, whole_group: bool = False, rank: str = "0") -> None:
    """Send a signal to this process, or to its group with the loader's processes.

    It comes after the first micro-batch of the step.
    """
    import engine.meters

    class DoomedMeter(engine.meters.Meter):
        steps_ended = 0
        is_sent = os.environ.get("RANK", "0") != rank

        def add(self, *tokens):
            super().add(*tokens)
            if self.steps_ended == step - 1 and not self.is_sent:
                self.is_sent = True
                print("workers:", len(multiprocessing.active_children()))
                os.killpg(0, number) if whole_group else os.kill(os.getpid(), number)

        def end_step(self):
            self.steps_ended += 1
            super().end_step()

    engine.meters.Meter = DoomedMeter


@pytest.mark.parametrize(
    "ranks, seed, kills",
    [
        (1, 1, 3),
        *(
            pytest.param(ranks, seed, 10, marks=pytest.mark.slow)
            for seed in range(5)
            for ranks in (1, 2)
        ),
    ],
)
def test_killed_at_any_moment_and_resumed_is_the_same(
    uninterrupted, long_data, tmp_path, ranks, seed, kills, request
):
    """At random file operations (starting, tokenising, saving, logging), and within a step."""
    unbroken = uninterrupted[0] if ranks == 1 else request.getfixturevalue("uninterrupted_by_two")
    draw, run, killed = random.Random(seed), tmp_path / "run", 0
    ways = [
        (count_file_operations, draw.randrange(1, uninterrupted[1]))
        for _ in range(kills - kills // 3)
    ]
    steps = [draw.randrange(1, 15) for _ in range(kills // 3)]
    ways += [
        (signal_at_step, signal.SIGKILL, step, False, str(draw.randrange(ranks))) for step in steps
    ]
    draw.shuffle(ways)
    begin = ["--data", long_data, *TINY_FLAGS, *LONG, "--run", run]
    for way in [*ways, ()]:
        flags = ["--resume", run] if (run / "config.json").exists() else begin
        scripts = fork_ranks(ranks, "train.py", *flags, cwd=tmp_path, first=way)
        wait_for_any([script.process.sentinel for script in scripts])
        if any(script.process.exitcode == -signal.SIGKILL for script in scripts):
            for script in scripts:  # as torchrun does when one is gone
                script.process.kill()
        codes = {script.wait() for script in scripts}
        died = way and -signal.SIGKILL in codes
        killed += bool(died)
        # What is left to do may take fewer operations than the whole run. 2: the other rank was
        # gone.
        allowed = {-signal.SIGKILL, 2, 0} if died else {0}
        assert codes <= allowed, (way, [script.output for script in scripts])
    assert killed >= 1  # the first way always strikes: the whole run has more operations
    assert_same_run(unbroken, run)


def test_sigterm_saves_and_the_resumed_run_is_the_same(long_data, here, tmp_path):
    """The signal goes to every process, the loader's workers too, as that of Ctrl-C does.

    They still have to deliver most of the step's eight micro-batches: two are ready in each.
    """
    flags = ["--data", long_data, *TINY_FLAGS, *LONG, "--accumulate", 8, "--run"]
    unbroken = here.with_name("unbroken")
    forked("train.py", *flags, unbroken, cwd=tmp_path)
    signal_all = (signal_at_step, signal.SIGTERM, 20, True)
    output = forked("train.py", *flags, here, "--workers", 2, cwd=tmp_path, first=signal_all)
    # runpy, by which the test starts the script, puts its whole path into sys.argv.
    command = f"python {shlex.quote(str(ROOT / 'train.py'))} --resume {shlex.quote(str(here))}"
    assert f"stopped after step 20: interrupted\nto resume: {command}\n" in output
    assert "workers: 2\n" in output
    output += forked("train.py", "--resume", here, cwd=tmp_path)
    assert "resumed after step 20" in output
    assert_same_run(unbroken, here)


def test_printed_commands_can_be_typed_whatever_the_name_of_the_run(toy_data, here, capsys):
    folder = here / "it's 实验 $5"
    training.train(config(data=str(toy_data), run=str(folder)))
    interrupted = SimpleNamespace(log=print, started=0.0, folder=folder, gpu=None)
    Run.close(interrupted, INTERRUPTED)
    lines = capsys.readouterr().out.splitlines()
    with pytest.raises(UserError) as error:
        training.train(config(run=str(folder)))
    lines.append(str(error.value))
    commands = [
        shlex.split(words)[0]
        for line in lines
        for words in re.split("--(?:ckpt|resume) ", line)[1:]
    ]
    assert commands == [str(folder)] * 3


def test_the_commands_that_come_next_name_the_scripts_as_they_were_typed(
    few_pairs, here, monkeypatch
):
    """From another directory `python train.py` would not be found."""
    monkeypatch.setattr(sys, "argv", ["../the lab/train.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    folder = here / "it's 实验 $5"
    training.train(config(data=str(few_pairs), run=str(folder)))
    named = shlex.quote(str(folder))
    assert f"next: python '../the lab/evaluate.py' --ckpt {named}\n" in log_of(folder)
    assert f"then: python '../the lab/report.py' {named}\n" in log_of(folder)


@pytest.mark.parametrize("cut_after", [[], [2]])
def test_the_outcome_that_run_sh_reads(few_pairs, here, monkeypatch, tmp_path, cut_after):
    monkeypatch.setenv("RUN_OUTCOME", str(tmp_path / "outcome.json"))
    interrupt_in(monkeypatch, *cut_after)
    training.train(config(data=str(few_pairs), run=str(here)))
    assert json.loads((tmp_path / "outcome.json").read_text(encoding="utf-8")) == {
        "folder": str(here),
        "outcome": "interrupted" if cut_after else "finished",
        "device": "cpu",
        "notice": "",
    }


@pytest.mark.parametrize("select", [True, False])
def test_pairs_with_short_targets_are_left_out_of_the_run(select, long_data, here, monkeypatch):
    limits = dict(max_steps=10, eval_every=10)
    settings = config(data=str(long_data), run=str(here), select=select, **limits)
    batches_of, short = training.batches_of, []

    def watched(*arguments):
        for batch in batches_of(*arguments):
            # target tokens and an end: 2 of the short ones
            lengths = (batch.target_positions // batch.tgt_in.size(1)).bincount()
            short.append(int(lengths.min()) == 2)
            yield batch

    monkeypatch.setattr(training, "batches_of", watched)
    training.train(settings)
    assert len(short) == 10 and any(short) != select
    counts = json.loads((here / "data.json").read_text())["counts"]
    assert counts["kept"] == (1006 if select else 2010)
    assert counts.get("short target") == (1004 if select else None)


def test_a_finished_run_is_continued_only_to_a_later_end(toy_data, here, capsys):
    """At the level rate, until the rate falls again."""
    training.train(config(data=str(toy_data), run=str(here), eval_every=20))
    before, _ = weights(here), capsys.readouterr()
    training.train(resumed(here))
    output = capsys.readouterr().out
    assert "stopped after step 6: finished" in output and "  loss " not in output
    assert list(records(here, "result/best_validation_loss")) == [6]  # once
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(here).items())
    shutil.rmtree(here / "tokenizer")  # the run was copied in part
    training.train(resumed(here, max_steps=20, log_every=1, epochs=3))
    output = capsys.readouterr().out
    assert " 0 tok/s" not in output  # after the first step the speed is unknown
    assert (here / "tokenizer/target").exists()
    rates = records(here, "train/learning_rate")
    assert max(rates) == 20 and rates[7] == rates[14] == 0.002 and rates[20] < 0.0004


def test_a_run_without_its_checkpoints_says_that_it_starts_again(toy_data, here, capsys):
    training.train(config(data=str(toy_data), run=str(here)))
    shutil.rmtree(here / "checkpoints")
    training.train(resumed(here))
    assert "has no checkpoint: training starts at step 0 again" in capsys.readouterr().out


def test_other_data_than_before_is_refused(toy_data, long_data, here):
    training.train(config(data=str(toy_data), run=str(here)))
    with pytest.raises(UserError, match="is not what the run began with"):
        training.train(resumed(here, data=str(long_data)))


def interrupt_in(monkeypatch, *steps: int) -> None:
    """A signal comes in each of these steps, once."""
    left, set_seed = list(steps), World.set_seed

    def interrupted(world, seed, step):
        if step in left:
            left.remove(step)
            signal.raise_signal(signal.SIGTERM)
        set_seed(world, seed, step)

    monkeypatch.setattr(World, "set_seed", interrupted)


def test_a_validation_cut_off_by_a_signal_is_made_up_for(toy_data, here, monkeypatch):
    """Interrupted at the very step of a validation: saved first, validated after the resume."""
    interrupt_in(monkeypatch, 1)
    training.train(config(data=str(toy_data), run=str(here), max_steps=4, eval_every=1))
    assert records(here, "valid/loss") == {}
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("engine.run.Run.save", lambda *_, **__: 1 / 0)  # killed before it is saved
        training.train(resumed(here))
    training.train(resumed(here))
    assert list(records(here, "valid/loss")) == [1, 2, 3, 4]  # each once: see `records`


def test_a_validation_loss_that_is_not_finite_is_never_the_best(toy_data, here, monkeypatch):
    """NaN first: no later loss is smaller than NaN, yet the next one has to become the best."""
    losses = iter([math.nan, 3.0, math.inf, 4.0])
    monkeypatch.setattr(training, "Validation", lambda *_, **__: lambda step: (next(losses), 0.0))
    training.train(config(data=str(toy_data), run=str(here), max_steps=4, eval_every=1))
    state = saved_state(here)
    assert (state["best_loss"], state["best_step"], state["bad_validations"]) == (3.0, 2, 2)


def test_the_results_are_those_of_the_best_validation(few_pairs, here, monkeypatch):
    results = iter([(2.0, 5.0), (1.0, 4.0), (3.0, 6.0)])
    monkeypatch.setattr(training, "Validation", lambda *_, **__: lambda step: next(results))
    training.train(config(data=str(few_pairs), run=str(here), max_steps=3, eval_every=1))
    assert records(here, "result/best_validation_loss") == {3: 1.0}
    assert records(here, "result/validation_bleu") == {3: 4.0}


def test_the_loss_scale_is_resumed(toy_data, here, monkeypatch):
    """As in fp16 on a GPU, with a scale that doubles every second step."""

    def scaled(device, *_, **__):
        precision = Precision(device, "fp32", "for this test")
        precision.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        return precision

    monkeypatch.setattr(training, "choose_precision", scaled)
    training.train(config(data=str(toy_data), run=str(here), log_every=1, max_steps=3))
    training.train(resumed(here, max_steps=6))
    assert list(records(here, "train/loss_scale").values()) == [4, 8, 8, 16, 16, 32]


# ---- what a run writes and when it stops ----


def test_what_a_run_leaves(toy_data, here, monkeypatch):
    monkeypatch.chdir(toy_data.parent)
    training.train(config(data=toy_data.name, run=str(here), tokens_per_batch=0))
    saved = json.loads((here / "config.json").read_text())
    assert saved["max_steps"] == 6 and Path(saved["data"]) == toy_data
    # Automatic settings depend on the device; those of the first session are kept.
    assert saved["tokens_per_batch"] == 1024 and saved["accumulate"] == 1 and saved["lr"] == 0.002
    for name in ("model.json", "tokenizer/source/tokenizer.json", "tokenizer/target"):
        assert (here / name).exists()
    checkpoints = sorted(path.name for path in (here / "checkpoints").iterdir())
    assert checkpoints == ["best", "last", "step-3", "step-6"]
    assert "--shard" not in log_of(here)  # nobody asked
    assert "Translator(" in log_of(here)
    tags = EventAccumulator(str(here)).Reload().Tags()
    others = "train/perplexity x_speed/tokens_per_second x_speed/model_flops_utilisation"
    others += (
        " x_data/padding_share x_data/wait_share y_memory/peak_gib valid/perplexity valid/bleu"
    )
    assert {*CURVES, *others.split()} <= set(tags["scalars"])
    assert tags["images"] == ["valid/cross-attention"]
    assert "valid/samples/text_summary" in tags["tensors"]
    assert "_hparams_/experiment" in EventAccumulator(str(here)).Reload().summary_metadata
    ((step, best),) = records(here, "result/best_validation_loss").items()
    losses, scores = records(here, "valid/loss"), records(here, "valid/bleu")
    assert step == 6 and best == min(losses.values())
    assert records(here, "result/validation_bleu") == {6: scores[min(losses, key=losses.get)]}
    assert all(0 <= share < 0.5 for share in records(here, "data/padding_share").values())
    assert curve(here) == pytest.approx(records(here))


def test_stops_after_the_minutes(long_data, here, monkeypatch):
    """On a clock that goes by 0.15 seconds with every look.

    Two looks per step, the second for its log line, and one after each of three saves make 38 steps
    in 12 seconds.
    """
    ticks = count()
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * 0.15))
    bar = SimpleNamespace(n=0, close=lambda: None)
    bar.update = lambda change: vars(bar).update(n=bar.n + change)
    monkeypatch.setattr(training, "progress_bar", lambda **_: bar)
    limits = dict(max_steps=10**6, max_minutes=0.2, eval_every=10**6, log_every=1)
    training.train(config(data=str(long_data), run=str(here), save_minutes=0.05, keep=9, **limits))
    rates = list(records(here, "train/learning_rate").values())
    assert len(rates) == 38 and bar.n == pytest.approx(100)
    # It rises for 20 steps at least, is level, and falls from 70 % of the time on.
    assert rates[9] == pytest.approx(0.001) and rates[20:27] == [0.002] * 7 and rates[-1] < 0.0003
    saved = len([*(here / "checkpoints").glob("step-*")])
    assert saved == 4  # after each 3 of the 12 seconds, the end included
    assert "stopped after step 38: finished" in log_of(here)


def test_the_last_step_is_logged(few_pairs, here):
    training.train(config(data=str(few_pairs), run=str(here), max_steps=5, log_every=3))
    assert list(records(here)) == [3, 5]


def test_which_settings_were_chosen_stays_known():
    """TensorBoard's page of settings shows them, also where they are the defaults."""
    chosen = training.Config(preset="base", d_model=256)
    chosen.given = {"preset", "d_model"}
    filled = training.with_sizes(chosen)
    assert filled.given == chosen.given and filled is not chosen
    assert (filled.d_model, filled.nhead, filled.dim_feedforward) == (256, 8, 2048)
    assert chosen.dim_feedforward == 1024


def test_a_preset_does_not_change_a_resumed_run(few_pairs, here):
    sizes = dict(d_model=32, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=64)
    training.train(config(data=str(few_pairs), run=str(here), preset="base", **sizes))
    training.train(resumed(here, max_steps=7))
    assert saved_state(here)["step"] == 7


def test_minutes_are_counted_over_all_sessions(few_pairs, here, monkeypatch):
    ticks = count()
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * 0.6))
    training.train(config(data=str(few_pairs), run=str(here), max_steps=6))
    first = saved_state(here)["minutes"]
    training.train(resumed(here, max_steps=12))
    assert first > 0 and saved_state(here)["minutes"] == pytest.approx(2 * first, rel=0.2)


def test_the_minutes_left(few_pairs, here, monkeypatch):
    """On a clock that goes by a minute with every look: one look per step, one per log line."""
    ticks = count()
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * 60.0))
    limits = dict(max_steps=8, log_every=2, eval_every=8)
    training.train(config(data=str(few_pairs), run=str(here), **limits))
    left = [float(number) for number in re.findall(r"about ([-\d.]+) min left", log_of(here))]
    assert left == pytest.approx([9, 6, 3, 0])


@pytest.mark.parametrize(
    "optimizer, width, peak",
    [("muon", 256, 2e-3), ("muon", 512, 1e-3), ("adamw", 32, 1e-3), ("adamw", 1024, 2.5e-4)],
)
def test_the_rate_where_none_is_given(optimizer, width, peak):
    settings = training.Config(optimizer=optimizer, d_model=width)
    assert training.default_learning_rate(settings) == peak


def test_help_and_default_rate_come_from_the_tables(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit):
        parse_flags(training.Config)
    words = capsys.readouterr().out
    assert f"({'|'.join(OPTIMIZERS)})" in words and f"({'|'.join(SCHEDULES)})" in words
    assert "0.002 (muon), 0.001 (adamw)" in " ".join(words.split())
    with pytest.raises(UserError, match="--schedule cosin is unknown; choose wsd"):
        training.Config(schedule="cosin")


def test_the_schedule_reaches_the_optimizer(few_pairs, here, monkeypatch):
    half = Schedule(lambda progress: 0.5, ())
    monkeypatch.setitem(SCHEDULES, "half", half)
    training.train(config(data=str(few_pairs), run=str(here), schedule="half", log_every=1))
    assert set(records(here, "train/learning_rate").values()) == {0.001}


def test_the_line_of_a_step_fits_a_terminal():
    curves = {
        "train/loss": 9.1234,
        "train/learning_rate": 0.00123,
        "speed/tokens_per_second": 99_999.0,
    }
    line = training.step_line(9999, 19.99, curves, 119.0, estimated=True)
    assert len(line) <= 80 and line.endswith("  99,999 tok/s  about 119 min left")


def test_epochs_are_passes_over_the_pairs(few_pairs, here):
    limits = dict(max_steps=0, epochs=4, tokens_per_batch=500, accumulate=2)
    training.train(config(data=str(few_pairs), run=str(here), **limits))
    steps = int(re.search(r"(\d+) steps per epoch", log_of(here))[1])
    assert steps > 2 and f"stopped after step {4 * steps}: finished" in log_of(here)


@pytest.mark.parametrize("cut_after", [[], [5, 8]])
def test_early_stopping(toy_data, here, monkeypatch, cut_after):
    """Also over two resumptions, and with a validation that was due when the run was cut off."""
    losses = iter([3.0, 2.0, 2.5, 2.0, 1.0])
    monkeypatch.setattr(training.Validation, "__call__", lambda *_: (next(losses), 0.0))
    interrupt_in(monkeypatch, *cut_after)
    limits = dict(max_steps=50, eval_every=2, patience=2)
    training.train(config(data=str(toy_data), run=str(here), **limits))
    for _ in [*cut_after, "once more"]:
        training.train(resumed(here))
    stopped = "stopped after step 8: 2 validation(s) without a better loss"
    assert log_of(here).count(stopped) == 2 and next(losses) == 1.0
    assert os.readlink(here / "checkpoints/best") == "step-4"


def test_a_non_finite_loss_stops_before_the_update_and_names_the_step(toy_data, here, monkeypatch):
    steps, plain = count(1), training.SummedLoss.forward

    def spoiled(loss_of, *batch):
        factor = math.nan if loss_of.label_smoothing and next(steps) == 5 else 1.0
        return tuple(loss * factor for loss in plain(loss_of, *batch))

    use_loss(monkeypatch, SummedLoss)
    monkeypatch.setattr(training.SummedLoss, "forward", spoiled)
    with pytest.raises(UserError, match="step 5: the loss or its gradient is not finite"):
        training.train(
            config(data=str(toy_data), run=str(here), max_steps=50, eval_every=3, log_every=20)
        )
    assert sorted(path.name for path in (here / "checkpoints").glob("step-*")) == ["step-3"]


def test_what_is_no_part_of_the_minutes_is_said_before_preparing():
    said = []

    def prepare(function):
        raise UserError("preparing")

    world = SimpleNamespace(on_main=prepare)
    run = SimpleNamespace(log=said.append, cache=None, world=world)
    for minutes in (0.0, 2.0):
        with pytest.raises(UserError, match="preparing"):
            training.load_data(config(max_minutes=minutes), run)
    note = "note: preparing the data and the last validation are not part of --max_minutes"
    assert said == [note]
