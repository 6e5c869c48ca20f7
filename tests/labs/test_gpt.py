"""Every layout of processes against one process; our GPT against Hugging Face's; planner and data.

This file, run as a script (see the end), forks four processes that train all cases in turn by the
lab's own `train`.
"""

import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import HANGS, ROOT, forked, forked_ranks, free_port
from helpers import handout_commands, handout_trainings, refused
from random_models import needs_compiler, unlimited
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from engine.config import parse_flags
from engine.distributed import World
from engine.precision import Precision
from labs.gpt import checkpoints, compare, generate, measure, pictures, plan, scales
from labs.gpt.__main__ import (
    Config,
    figures,
    handout_figures,
    resolved,
    sizes_of,
    time_left,
    train,
    verdict,
)
from labs.gpt.checkpoints import load_weights, newest
from labs.gpt.data import Data, prepare, read_documents
from labs.gpt.model import GPT, CausalSelfAttention, HuggingFaceGPT, initial_weight, mean_loss
from labs.gpt.parallel import Layout
from labs.gpt.sizes import PRESETS, get_model_size

STEPS, OVERFLOWS = 4, 3  # steps of a case; in fp16 the step whose gradients overflow
# 12 sequences per step: divisible by 2, 3 and 4. The vocabulary is divisible by none of them, so
# the parts of a weight differ in size.
BASE = dict(
    preset="toy",
    num_layers=3,
    seq_length=16,
    vocab_size=511,
    precision="fp32",
    max_steps=STEPS,
    log_every=1,
    eval_every=STEPS // 2,
    device="cpu",
)
CASES = {  # name: (processes, settings)
    "alone": (1, {}),
    "hf-ddp-2": (2, dict(model="hf", accumulate=2)),  # see `initial_weight_of_hf`
    "zero1-2": (2, dict(data_parallel="zero1", recompute=True)),
    "zero2-2-offload": (2, dict(data_parallel="zero2", offload=True, accumulate=3)),
    "pipe-3": (3, dict(pipe=3, accumulate=4, recompute=True)),  # not a multiple of 3
    "data-2-pipe-2": (4, dict(pipe=2, accumulate=1)),
    "zero1-2-pipe-2": (4, dict(pipe=2, data_parallel="zero1", accumulate=3)),
    "zero3-2-pipe-2": (4, dict(pipe=2, data_parallel="zero3", accumulate=3, recompute=True)),
    "pipe-2-tensor-2": (4, dict(pipe=2, tensor=2, accumulate=3)),
    "zero3-2-tensor-2": (4, dict(tensor=2, data_parallel="zero3", accumulate=2)),
    # A copy of the first run, ended in the middle, is resumed under another layout.
    "zero3-2-tensor-2 > 1": (1, {}),
    "pipe-2-tensor-2 > 1": (1, {}),
    "zero1-2 > data-2-tensor-2": (4, dict(tensor=2, data_parallel="ddp")),
    # All above compute in float64, which shows any mistake; these as users do.
    "fp32-alone": (1, {}),
    "bf16-zero3-2": (2, dict(data_parallel="zero3")),
    "bf16-pipe-2": (2, dict(pipe=2)),
    # One step overflows: see `choose_fp16`.
    "fp16-alone": (1, {}),
    "fp16-zero1-2": (2, dict(data_parallel="zero1")),
    "fp16-zero3-2": (2, dict(data_parallel="zero3")),
    "fp16-pipe-2": (2, dict(pipe=2)),
}
# Writing a checkpoint takes longer than the training; these are the ones that are read.
SAVED = ("zero1-2", "zero2-2-offload", "pipe-3", "pipe-2-tensor-2", "zero3-2-tensor-2")
# First word of a case's name: the run it agrees with, and the relative differences of losses and of
# gradient norms. bf16 has 8 bits, fp16 has 11; losses are means in which rounding errors cancel.
EXPECTED = {"bf16": ("fp32-alone", 3e-4, 3e-2), "fp16": ("fp16-alone", 1e-4, 1e-2)}
PAGE = ROOT / "labs/gpt/README.md"
SMALL = "--preset toy --num_layers 2 --seq_length 16 --vocab_size 300 --batch_size 4"
SMALL += " --max_steps 1 --keep 0"


def training_commands() -> dict[str, tuple[int, list[str]]]:
    """The commands of the page that train, at reduced size: name -> (processes, flags)."""
    found = {}
    for launcher, flags in handout_trainings(PAGE, "labs.gpt"):
        if "--plan" not in flags:
            name = f"command-{len(found)}"
            words = [*flags, *SMALL.split(), "--device", "cpu", "--run", name]
            found[name] = (2 if launcher == "torchrun" else 1, words)
    return found


def config_of(given=(), **settings) -> Config:
    """As `parse_flags` would make it."""
    config = Config(**settings)
    config.given = set(given)
    return config


def settings_of(name: str) -> Config:
    changes = {**BASE, **CASES[name][1], "keep": 2 if name in SAVED else 0}
    kind = name.split("-")[0]
    if kind in EXPECTED:
        changes["precision"] = kind
    if " > " in name:
        changes["resume"] = f"runs/{name}"
        given = ("accumulate", "tensor", "pipe", "data_parallel", "recompute", "keep")
        return config_of(given, **changes)
    return config_of(run=f"runs/{name}", **changes)


def losses(folder: Path) -> list[float]:
    """Loss and gradient norm of each step (None: it overflowed), and the last validation loss."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    by_step = {}
    for record in records:
        if "train/loss" in record:
            by_step[record["step"]] = [record["train/loss"], record["train/gradient_norm"]]
    return [*chain.from_iterable(by_step.values()), records[-1]["valid/loss"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder with the runs of all cases."""
    folder = tmp_path_factory.mktemp("gpt")
    write_table(folder / "wos")
    forked(__file__, free_port(len(CASES) + len(training_commands())), cwd=folder)
    return folder / "runs"


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("alone")])
def test_losses_are_those_of_one_process(runs, name):
    run, *tolerances = EXPECTED.get(name.split("-")[0], ("alone", 1e-9, 1e-9))
    found, expected = losses(runs / name), losses(runs / run)
    assert len(expected) == 2 * STEPS + 1
    for begin, tolerance in enumerate(tolerances):  # of the losses, of the norms
        torch.testing.assert_close(found[begin::2], expected[begin::2], rtol=tolerance, atol=0)
    log = (runs / name / "train.log").read_text()
    assert (" > " in name) == (f"resumed after step {STEPS // 2}" in log)


def test_fp16_leaves_out_the_step_that_overflows(runs):
    found, expected = losses(runs / "fp16-alone"), losses(runs / "fp32-alone")
    norm = 2 * OVERFLOWS - 1  # where that step's is
    assert [place for place, value in enumerate(found) if value is None] == [norm]
    for begin, tolerance in enumerate((1e-4, 1e-2)):
        torch.testing.assert_close(
            found[begin:norm:2], expected[begin:norm:2], rtol=tolerance, atol=0
        )


def test_checkpoints_of_different_layouts_have_the_same_weights(runs):
    pipe, sharded = (load_weights(newest(runs / name))[0] for name in ("pipe-3", "zero2-2-offload"))
    assert pipe.keys() == sharded.keys()
    for name, weight in pipe.items():
        assert (sharded[name] - weight).norm() <= 1e-6 * weight.norm(), name


def test_damaged_checkpoints(runs, tmp_path, capsys):
    shutil.copytree(runs / "zero2-2-offload", tmp_path / "run")
    older, last = (tmp_path / f"run/checkpoints/sharded-{step}" for step in (STEPS // 2, STEPS))
    assert newest(tmp_path / "run") == last and len(list(last.glob("*.distcp"))) == 2
    for folder, piece in ((last, "__1_0.distcp"), (older, ".metadata")):
        content = bytearray((folder / piece).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / piece).write_bytes(content)
        if folder is last:
            assert newest(tmp_path / "run") == older
            assert f"sharded-{STEPS} is damaged" in capsys.readouterr().out
    with refused("no undamaged checkpoint"):
        newest(tmp_path / "run")


def test_the_commands_that_meet_the_handout(runs, monkeypatch, capsys):
    """Those of the page: trainings at reduced size, the plan, and the flags of the two tables."""
    for name, (processes, flags) in training_commands().items():
        result = json.loads((runs / name / "result.json").read_text())
        assert result["steps"] == 1 and result["processes"] == len(result["peak_gib"]) == processes
        assert result["tokens_per_second"] * result["step_seconds"] == pytest.approx(4 * 16)
        assert result["data"] == ("wos/" if "wos/" in flags else "random ids")
    assert len(training_commands()) == 12
    plans = [flags for _, flags in handout_trainings(PAGE, "labs.gpt") if "--plan" in flags]
    for flags in plans:
        monkeypatch.setattr(sys, "argv", ["labs.gpt", *flags])
        train(parse_flags(Config))
    tables = [command for command in handout_commands(PAGE) if command[0] != "labs.gpt"]
    for module, flags in tables:
        monkeypatch.setattr(sys, "argv", [module, *flags])
        parse_flags(sys.modules[module].Config)
    assert {module for module, _ in tables} == {"labs.gpt.compare", "labs.gpt.scales"}
    assert "1,557,611,200 parameters" in capsys.readouterr().out


# ---- the model -----------------------------------------------------------------------------------


def weights_from_hf(weights: dict[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """GPT-2's weights as Hugging Face has them → ours. Its Conv1D keeps a matrix as (in, out)."""
    ours = {}
    for name, weight in weights.items():
        name = name.removeprefix("model.").removeprefix("transformer.")
        if name == "lm_head.weight":
            continue
        if ("attn.c_" in name or "mlp.c_" in name) and weight.dim() == 2:
            weight = weight.t()
        if "attn.c_attn" in name:  # (3, H, W, …) → (H, 3, W, …)
            weight = weight.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
        ours[name] = weight.contiguous()
    return ours


def test_logits_and_loss_are_those_of_hugging_face():
    torch.manual_seed(0)
    sizes = PRESETS["toy"]
    theirs, ours = HuggingFaceGPT(sizes).double(), GPT(sizes).double()
    for weight in theirs.parameters():  # biases too, so that each is seen
        torch.nn.init.normal_(weight, std=0.1)
    ours.load_state_dict(weights_from_hf(theirs.state_dict(), sizes.nhead))
    tokens = torch.randint(sizes.vocab_size, (2, sizes.seq_length))
    torch.testing.assert_close(ours(tokens), theirs(tokens), rtol=1e-9, atol=1e-9)
    expected = theirs.model(tokens, labels=tokens).loss  # which shifts by itself
    loss = ours(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0, check_dtype=False)


def model_with_positions() -> GPT:
    """A random model whose prediction depends strongly on all tokens and their positions."""
    torch.manual_seed(0)
    model = GPT(PRESETS["toy"])
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return model


def test_generation():
    model = model_with_positions()
    for temperature in (1e-39, 0):  # a logit / 1e-39 is infinite in fp32
        config = generate.Config(max_new_tokens=60, temperature=temperature)
        out = generate.generate(model, torch.tensor([[1, 2, 3]]), config, longest=32)
        assert out.shape == (1, 63)
    with torch.no_grad():
        assert torch.equal(model(out[:, :32])[:, 2:].argmax(-1), out[:, 3:33])
        for length in (33, 50, 62):  # of a long text the model sees the last 32 tokens
            seen = model(out[:, length - 32 : length])[0, -1]
            assert seen.argmax() == out[0, length]


def test_the_first_word_is_the_run(monkeypatch):
    for words in (["runs/a"], ["--ckpt", "runs/a"]):
        monkeypatch.setattr(sys, "argv", ["generate.py", *words, "--top_k", "5"])
        config = parse_flags(generate.Config)
        assert (config.ckpt, config.top_k) == ("runs/a", 5)


def test_a_text_ends_at_its_end_token():
    model = model_with_positions()
    config = generate.Config(max_new_tokens=20, temperature=0)
    start = torch.tensor([[1, 2, 3]])
    out = generate.generate(model, start, config, longest=32)[0].tolist()
    end = out[7]
    ended = generate.generate(model, start, config, longest=32, end=end)[0].tolist()
    assert ended == out[: out.index(end, 3) + 1] and len(ended) <= 8


def test_temperature_top_k_and_top_p():
    probabilities = torch.tensor([0.1, 0.5, 0.25, 0.15])
    logits = probabilities.log() + 3

    def drawn(**settings) -> torch.Tensor:
        found = generate.distribution(logits, generate.Config(**{"temperature": 1, **settings}))
        return found / found.sum()

    torch.testing.assert_close(drawn(), probabilities)
    torch.testing.assert_close(drawn(temperature=0), torch.tensor([0.0, 1, 0, 0]))
    squares = probabilities**2  # half the temperature doubles the logits
    torch.testing.assert_close(drawn(temperature=0.5), squares / squares.sum())
    two = torch.tensor([0, 0.5, 0.25, 0]) / 0.75
    torch.testing.assert_close(drawn(top_k=2), two)
    torch.testing.assert_close(drawn(top_k=99), probabilities)
    # The fewest tokens with this probability together, at least one.
    for top_p, kept in ((0.01, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.91, 4), (1, 4)):
        assert int((drawn(top_p=top_p) > 0).sum()) == kept, top_p
    torch.testing.assert_close(drawn(top_p=0.7), two)
    torch.testing.assert_close(drawn(top_p=0.9, top_k=2), two)
    # top-p counts the probabilities after the temperature.
    assert int((drawn(temperature=0.5, top_p=0.7) > 0).sum()) == 1


def test_initial_weights_are_gpt_2s():
    """Radford et al. 2019: the layers that add to the residual stream begin smaller by √(2·L)."""
    sizes = PRESETS["deep"]
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in GPT(sizes).named_parameters()}
    stds = {}
    for name in ("wte.weight", "wpe.weight", "h.3.attn.c_attn.weight", "h.3.mlp.c_fc.weight"):
        stds[name] = 0.02
    for name in ("h.3.attn.c_proj.weight", "h.3.mlp.c_proj.weight"):
        stds[name] = 0.02 / math.sqrt(2 * 24)
    for name, std in stds.items():
        weight = initial_weight(name, shapes[name], sizes.num_layers, seed=1)
        assert weight.std().item() == pytest.approx(std, rel=0.03), name
        assert abs(weight.mean().item()) < 0.05 * std
    for name in ("h.3.attn.c_proj.bias", "ln_f.bias"):
        assert not initial_weight(name, shapes[name], 24, seed=1).any()
    for name in ("h.3.ln_1.weight", "ln_f.weight"):
        assert (initial_weight(name, shapes[name], 24, seed=1) == 1).all()


def test_warm_up_steps_are_not_counted_in_the_speed(monkeypatch):
    clock = iter([0, 100, 200, 290, 300, 303, 400, 404, 500, 505])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(measure.time, "process_time", Mock(side_effect=[0, 9, 0, 9, *range(6)]))
    steps = measure.Steps(torch.device("cpu"))
    for count in range(5):
        steps.start()
        steps.end()
        if count == 0:
            assert (steps.median, steps.cpu_median) == (100, 9)  # there is no other
    assert (steps.median, steps.cpu_median) == (4, 1)


def test_a_share_above_the_peak_is_no_share():
    config, sizes = Config(preset="toy", batch_size=8), PRESETS["toy"]
    flops = sizes.flops_per_token() * 8 * sizes.seq_length
    assert figures(config, sizes, 1.0, 2 * flops)["share_of_peak"] == pytest.approx(0.5)
    assert figures(config, sizes, 1.0, 0.2 * flops)["share_of_peak"] is None
    assert (measure.percent(0.458), measure.percent(None)) == ("45.8%", "–")


def test_what_is_left_of_a_run_and_the_verdict():
    assert time_left(0.5, 100, 0).startswith("0.5 s for the last step, about 50 seconds")
    assert "about 50 minutes for the 100 steps" in time_left(30, 100, 0)
    assert "about 25.0 hours" in time_left(900, 100, 0)
    assert "about 10 minutes" in time_left(900, 100, 10)
    assert "below the handout's 7: success; guessing" in verdict(6.9, 4096, "wos")
    assert "ln 4096 = 8.32" in verdict(6.9, 4096, "wos")
    assert "not below the handout's 7: no success" in verdict(7.0, 4096, "wos")
    assert "success" not in verdict(6.9, 4096, "random")
    # With few tokens a guess is below 7.
    assert "costs ln 349 = 5.86, so a loss below the handout's 7 says" in verdict(5, 349, "wos")
    assert "success" not in verdict(5, 1096, "wos") and "success" in verdict(5, 1097, "wos")


def test_sizes_and_flops():
    with torch.device("meta"):
        theirs, ours = HuggingFaceGPT(PRESETS["1.6b"]), GPT(PRESETS["1.6b"])
    assert get_model_size(theirs) == 1_638_022_400  # the tied matrix counted twice
    assert get_model_size(ours) == 1_557_611_200
    for model in (theirs, ours):
        result = handout_figures(Config(batch_size=8, seq_length=1024), model, step_seconds=2.0)
        assert result["handout_parameters"] == get_model_size(model)
        tflops = get_model_size(model) * 8 * 1024 * 8 / 2e12
        assert result["handout_tflops"] == pytest.approx(tflops)
    numbers = {sum(weights.numel() for weights in model.parameters()) for model in (theirs, ours)}
    assert numbers == {1_557_611_200} and PRESETS["1.6b"].parameters == 1_557_611_200
    sizes = PRESETS["124m"]
    with torch.device("meta"):
        model, tokens = GPT(sizes), torch.zeros(1, sizes.seq_length, dtype=torch.long)
        plainly = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
        with FlopCounterMode(display=False) as counter, plainly:
            model(tokens, tokens).backward()
    flops = sizes.flops_per_token() * sizes.seq_length
    assert counter.get_total_flops() == pytest.approx(flops, rel=0.02)


def test_the_loss_of_narrow_logits_is_computed_in_fp32():
    """CUDA's autocast leaves them narrow."""
    torch.manual_seed(1)
    logits, targets = torch.randn(2, 3, 300).bfloat16(), torch.randint(300, (2, 3))
    loss = mean_loss(logits, targets)
    assert loss.dtype == torch.float32 and loss == mean_loss(logits.float(), targets)


def test_heads_of_any_width_are_padded_on_a_gpu_without_another_result(monkeypatch):
    torch.manual_seed(1)
    model = GPT(replace(PRESETS["toy"], d_model=40)).double()  # heads of 10
    tokens = torch.randint(512, (2, 32))
    plain, attend = model(tokens), Mock(wraps=torch.nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    torch.testing.assert_close(model(tokens), plain)
    assert {call.args[0].shape[-1] for call in attend.call_args_list} == {16}


# ---- the planner ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, precision", [("own", "fp32"), ("own", "bf16"), ("hf", "bf16")])
def test_planned_activations_are_what_autograd_keeps(kind, precision):
    def kept(layers: int) -> int:
        """Bytes kept for the backward pass, without weights and their narrow copies."""
        sizes = replace(PRESETS["toy"], d_model=64, seq_length=128, num_layers=layers)
        model, seen = (GPT if kind == "own" else HuggingFaceGPT)(sizes), {}
        tokens = torch.zeros(4, 128, dtype=torch.long)

        def pack(tensor):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        narrow = precision == "bf16"
        narrowed = torch.autocast("cpu", torch.bfloat16, enabled=narrow)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), narrowed:
            loss = model(tokens, tokens)
        assert loss.requires_grad  # keeps the graph
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        copies = layers * 12 * 64**2 * 2 if narrow else 0
        return sum(size for place, size in seen.items() if place not in weights) - copies

    def planned(layers: int) -> float:
        config = resolved(Config(preset="toy", model=kind, batch_size=4), 1, precision)
        sizes = replace(PRESETS["toy"], d_model=64, seq_length=128, num_layers=layers)
        return plan.memory(config, sizes, 1).activations

    assert kept(4) - kept(2) == pytest.approx(planned(4) - planned(2), rel=0.05)


def test_a_pipeline_has_as_many_micro_batches_in_flight_as_stages():
    def activations(accumulate: int) -> float:
        """Of micro-batches of two sequences."""
        settings = dict(preset="mini", pipe=4, accumulate=accumulate, batch_size=2 * accumulate)
        config = resolved(config_of(**settings), 4)
        return plan.memory(config, sizes_of(config), 4).activations

    assert activations(4) == activations(8) == activations(16)
    assert activations(4) == pytest.approx(4 * activations(1))


def test_zero_in_a_pipeline_keeps_a_stage_gathered():
    """PyTorch scatters weights and gradients again after the last micro-batch only."""

    def parts(**settings) -> plan.Need:
        config = resolved(config_of(preset="wide", precision="fp32", **settings), 4)
        return plan.memory(config, sizes_of(config), 4)

    alone, sharded = parts(pipe=2), parts(pipe=2, data_parallel="zero3")
    assert sharded.optimizer == pytest.approx(alone.optimizer / 2)
    assert sharded.weights == pytest.approx(1.5 * alone.weights)
    assert sharded.gradients == pytest.approx(1.5 * alone.gradients)


@needs_compiler
@unlimited
@pytest.mark.parametrize(
    "processes, flags", [(1, "--batch_size 4"), (2, "--batch_size 8 --pipe 2")]
)
def test_planned_memory_is_what_the_processes_held(tmp_path, processes, flags):
    flags += " --preset toy --vocab_size 100000 --seq_length 128"
    flags += " --precision fp32 --max_steps 2 --keep 0 --device cpu --run run"
    forked_ranks(processes, "labs/gpt/__main__.py", *flags.split(), cwd=tmp_path)
    result = json.loads((tmp_path / "runs/run/result.json").read_text(encoding="utf-8"))
    assert max(result["peak_gib"]) == pytest.approx(result["planned_gib"], rel=0.1, abs=0.1)
    parts = result["planned_parts"]
    assert parts["process"] == pytest.approx(0.05, abs=0.01) and parts["logits"] > 0.2


def test_memory_of_gpu_and_host(monkeypatch):
    config = config_of(
        preset="1.6b", data_parallel="zero3", offload=True, batch_size=1, accumulate=1
    )
    world = World(0, 1, torch.device("cuda"))
    limits = {"cuda": 1024, "cpu": 16}
    monkeypatch.setattr(plan, "memory_limit", lambda device: limits[device.type])
    with refused("it needs 23.21 GiB of host memory per rank and there are 16.00"):
        plan.check_fits(config, sizes_of(config), world)
    limits["cuda"] = 1
    with refused("GiB of GPU memory per rank and there are 1.00; to see what fits"):
        plan.check_fits(config, sizes_of(config), world)
    config.memory_gib = 0.5
    with refused("GiB of card memory per rank and there are 0.50; to see what fits"):
        plan.check_fits(config, sizes_of(config), world)


@pytest.mark.parametrize("pipe", [1, 2])
def test_the_deepest_model_that_fits(pipe, monkeypatch):
    config = resolved(Config(preset="toy", pipe=pipe), pipe)

    def need(layers: int) -> float:
        return plan.memory(config, replace(PRESETS["toy"], num_layers=layers), pipe).total / 2**30

    for layers in (pipe, 6 * pipe):
        for memory_gib in (need(layers), need(layers + pipe) - 1e-9):
            assert plan.most_layers(config, PRESETS["toy"], pipe, memory_gib) == layers
    assert plan.most_layers(config, PRESETS["toy"], pipe, need(pipe) - 1e-9) == 0
    monkeypatch.setattr(plan, "memory", tried := Mock(side_effect=plan.memory))
    assert plan.most_layers(config, PRESETS["toy"], pipe, 2**20) == 2**20
    assert tried.call_count <= 21  # by halving


def test_plan_of_the_handout(capsys):
    train(config_of(preset="1.6b", plan=True, gpus=4, memory_gib=24))
    printed = capsys.readouterr().out
    lines = {line[:33].strip(): line[33:] for line in printed.splitlines()}
    assert "  does not fit; at most" in lines["data 4"]
    assert "  fits" in lines["zero3 4"] and "  fits" in lines["tensor 4 × data 1"]
    gradients, optimizer = map(float, lines["data 4"].split()[1:3])
    assert gradients == pytest.approx(1_557_611_200 * 4 / 2**30, abs=0.01)
    assert optimizer == pytest.approx(2 * gradients, abs=0.02)
    assert "1,557,611,200 parameters" in printed and "FLOPs a training token" in printed
    # What cannot work is said once, with what to do.
    train(config_of(preset="124m", plan=True, gpus=3))
    printed = capsys.readouterr().out
    reason = "--batch_size 8 is not divisible by 3 copies of the model; give --batch_size 9"
    assert printed.count("--batch_size") == 2 and printed.strip().endswith(reason)
    train(config_of(preset="124m", plan=True, gpus=3, batch_size=9))
    assert "--batch_size" not in capsys.readouterr().out


# ---- data ----------------------------------------------------------------------------------------


def write_table(folder: Path) -> Path:
    """A folder with a table like Web of Science's, of 60 rows."""
    folder.mkdir(exist_ok=True)
    lines = ["Y1\tY2\tY\tDomain\tarea\tkeywords\tAbstract"]
    words = "we propose a method for the study of cells and networks in this paper".split()
    draw = np.random.default_rng(0)
    for number in range(60):
        text = " ".join(draw.choice(words, 60))
        lines.append(f'5\t48\t120\tSecretLabel \tarea\tkey; words\t"{text} ""quoted"" {number}."')
    (folder / "Data1k.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_only_abstracts_are_read(tmp_path):
    documents = read_documents(write_table(tmp_path / "wos"))
    assert len(documents) == 60 and documents[20].endswith('"quoted" 20.')
    assert "SecretLabel" not in " ".join(documents)
    table = tmp_path / "wos/Data1k.txt"
    text = table.read_text(encoding="utf-8")
    table.write_text(text.replace('20."', "20."), encoding="utf-8")
    with refused("Data1k.txt, line 22: '\t' expected after '\"'; in quotes, a quote is written"):
        read_documents(table)
    table.write_text(text.removesuffix('"\n'), encoding="utf-8")
    with refused("Data1k.txt, line 61: a quote is never closed; in quotes"):
        read_documents(table)
    table.write_text(text, encoding="utf-8")
    for name, count in (("WOS5736", 25), ("WOS11967", 50)):  # of the archive's the largest
        (tmp_path / name).mkdir()
        abstracts = "\n".join(f"abstract {number}" for number in range(count))
        (tmp_path / name / "X.txt").write_text(abstracts)
        (tmp_path / name / "Y.txt").write_text("1\n" * count)
    documents = read_documents(tmp_path)
    assert len(documents) == 50 and all(text.startswith("abstract") for text in documents)


def test_texts_of_lines(tmp_path):
    novel = tmp_path / "novel.txt"
    novel.write_text("\tChapter One\nIt was\u2028a\x85night.\n\nend\n", "utf-8")
    documents = read_documents(tmp_path)
    assert documents == ["Chapter One", "It was\u2028a\x85night.", "end"]
    novel.write_bytes(b"\xff\xfe")
    with refused("novel.txt cannot be read"):
        read_documents(tmp_path)
    with refused("nosuch: no such file or folder"):
        read_documents(tmp_path / "nosuch")
    (tmp_path / "table.csv").write_text("a,b\n")
    with refused("table.csv: name a .txt file"):
        read_documents(tmp_path / "table.csv")
    novel.write_text("one")
    with refused("fewer than two documents"):
        read_documents(novel)


def test_batches():
    data = Data({"train": np.arange(101), "validation": np.arange(11)}, 5, 4, 1, 101, "key")
    seen = torch.cat([data.batch("train", step)[0] for step in range(data.batches("train"))])
    assert sorted(seen.flatten().tolist()) == list(range(100))
    tokens, targets = data.batch("train", 7)
    assert torch.equal(tokens + 1, targets)
    other_epoch = data.batch("train", data.batches("train"))[0]
    assert not torch.equal(data.batch("train", 0)[0], other_epoch)
    assert data.batch("validation", 0)[0].shape == (4, 5)  # two sequences, each twice


@pytest.mark.parametrize("name", ["train.npy", "validation.npy", "tokenizer/tokenizer.json"])
def test_a_damaged_cache_is_made_again(tmp_path, name):
    text = dict(data=str(write_table(tmp_path / "wos")), vocab_size=300, batch_size=4)
    config, sizes, lines = config_of(preset="toy", **text), PRESETS["toy"], []
    folder = prepare(config, sizes, tmp_path / "cache", lines.append)
    written = (folder / name).read_bytes()
    for damaged in (written[:-100], b"", None):
        (folder / name).unlink()
        if damaged is not None:
            (folder / name).write_bytes(damaged)
        assert prepare(config, sizes, tmp_path / "cache", lines.append) == folder
        assert "is damaged and made again" in lines[-1]
        assert (folder / name).read_bytes() == written
    prepare(config, sizes, tmp_path / "cache", lines.append)
    assert "60 documents" in lines[-1]
    for file in (folder / name, folder):  # behind a link: damaged, then gone
        link = tmp_path / f"linked to {file.name}" / folder.name
        link.parent.mkdir()
        link.symlink_to(folder)
        file.rename(tmp_path / f"moved {file.name}")
        assert prepare(config, sizes, link.parent, lines.append) == link
        assert not link.is_symlink() and (link / name).read_bytes() == written
        assert "replaces the link" in lines[-1] and not file.exists()


def test_learns_from_text_and_writes(tmp_path, monkeypatch, capsys, report_of):
    monkeypatch.chdir(tmp_path)
    text = {**BASE, "data": str(write_table(tmp_path / "wos")), "vocab_size": 300}
    text |= dict(max_steps=40, eval_every=20)
    folder = train(config_of(**text, run="text"))
    with refused("this run is finished; to continue, increase --epochs"):
        train(config_of(resume=str(folder)))
    # The report takes such a number for the size of the model, so no other line may have one.
    log = (folder / "train.log").read_text(encoding="utf-8")
    assert (
        "s for the last step, about" in log
        and "so a loss below the handout's 7 says nothing here" in log
    )
    lines = [line for line in log.splitlines() if re.search(r"\d parameters", line)]
    assert lines and all(" model: own" in line for line in lines)
    values = losses(folder)
    assert values[0] > 5.5 and values[-1] < 4.5
    assert "60 documents" in capsys.readouterr().out
    generate.main(generate.Config(ckpt="text", max_new_tokens=8))  # runs/text
    assert len(capsys.readouterr().out.split()) >= 4
    (folder / "checkpoints/.tmp-sharded-41").mkdir()  # a save that was killed
    (folder / "checkpoints/sharded-40-copy").mkdir()
    other = dict(resume=str(folder), data="random", max_steps=42, given=("data", "max_steps"))
    with refused("--data random is not the data that this run was started with"):
        train(config_of(**other))
    (tmp_path / "wos").rename(tmp_path / "moved")
    more = other | {"data": str(tmp_path / "moved")}
    full = dcp.CheckpointException("", {0: (OSError("No space left on device"), None)})
    with (
        refused(": No space left on device; free some space, then --resume"),
        patch.object(dcp, "save", Mock(side_effect=full)),
    ):
        train(config_of(**more))
    train(config_of(**more))
    assert newest(folder).name == "sharded-42" and load_weights(newest(folder))[1].seq_length == 16
    assert not (folder / "checkpoints/.tmp-sharded-41").exists()
    flops = sizes_of(config_of(**text)).flops_per_token()
    page = report_of(folder)
    assert f'FLOPs of a training token</dt><dd><data value="{flops:.0f}"' in page
    assert "Radford et al. 2019" in page and "Shoeybi" not in page
    assert '<code>--lr</code></dt><dd><data value="0.003"' in page  # the preset's


def test_a_run_interrupted_before_its_validation_makes_up_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    turns = iter(range(10**9))
    with monkeypatch.context() as patched:
        # Asked to stop when all steps are done, just before the last validation.
        asked = nullcontext(lambda: next(turns) == STEPS)
        patched.setattr("engine.run.caught_signals", lambda: asked)
        folder = train(config_of(**BASE, run="stopped"))
    assert checkpoints.read(newest(folder))["state"]["last_validation"] == STEPS // 2
    train(config_of(resume=str(folder)))
    assert checkpoints.read(newest(folder))["state"]["last_validation"] == STEPS
    with refused("this run is finished"):
        train(config_of(resume=str(folder)))


def test_a_step_is_saved_again_before_its_old_checkpoint_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = train(config_of(**BASE, run="a"))
    last = newest(folder)
    removed = []
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda path, **_: removed.append(path))
    state = checkpoints.read(last)["state"] | {"last_validation": STEPS // 2}
    written = json.loads((last / "state.json").read_text()) | {"state": state}
    (last / "state.json").write_text(json.dumps(written))
    checkpoints.write_checksums(last, [path.name for path in last.iterdir()])
    train(config_of(resume=str(folder)))
    assert checkpoints.read(newest(folder))["state"]["last_validation"] == STEPS
    old = [path for path in removed if path.name.endswith("-replaced")]
    assert len(old) == 1 and checkpoints.read(old[0])["state"] == state


def test_what_is_not_saved_is_not_promised(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    turns = iter(range(10**9))
    with monkeypatch.context() as patched:
        patched.setattr("engine.run.caught_signals", lambda: nullcontext(lambda: next(turns) == 1))
        folder = train(config_of(**{**BASE, "keep": 0}, run="stopped"))
    log = (folder / "train.log").read_text(encoding="utf-8")
    assert "nothing was saved (--keep 0)" in log and "to resume" not in log
    train(config_of(resume=str(folder)))
    log = (folder / "train.log").read_text(encoding="utf-8")
    assert "has no checkpoint: starting at step 0" in log


def test_only_checkpoints_up_to_the_saved_one_count_as_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = train(config_of(**BASE, run="damaged"))  # saves steps 2 and 4
    (newest(folder) / "state.json").write_text("damaged")
    changes = dict(max_steps=3, keep=1)
    train(config_of(resume=str(folder), given=changes, **changes))
    assert newest(folder).name == "sharded-3"
    log = (folder / "train.log").read_text(encoding="utf-8")
    assert "checkpoint sharded-4 is damaged" in log and "using sharded-2" in log


def test_a_run_ends_with_its_minutes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    endless = dict(max_steps=10**6, log_every=10**6, eval_every=10**6, run="a")
    train(config_of(**{**BASE, **endless, "max_minutes": 0.01}))
    result = json.loads(Path("runs/a/result.json").read_text())
    assert result["minutes"] >= 0.01 and result["steps"] < 10**6 and 0 < result["loss"] < 7


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "processes, settings, message",
    [
        (2, dict(tensor=3), "--tensor 3 × --pipe 1 does not divide 2 processes"),
        (8, dict(tensor=8), "--tensor 8 does not divide the 4 heads"),
        (4, dict(pipe=4), "--pipe 4 is more than the 3 layers"),
        (5, {}, "--batch_size 12 is not divisible by 5"),
        (3, dict(pipe=3, accumulate=2), "--pipe 3 needs --accumulate of at least 3, not 2, or 1"),
        # The flag that cannot work is named first, whatever the number of processes.
        (1, dict(tensor=2, model="hf"), "--model hf does not work with --tensor"),
        (1, dict(offload=True), "--offload needs --data_parallel zero2 or zero3"),
        (6, dict(tensor=2, data_parallel="zero3"), "does not divide the vocabulary of 511"),
        (1, dict(d_model=30, nhead=4), "--d_model 30 must be divisible by --nhead 4"),
    ],
)
def test_a_grid_that_cannot_work(processes, settings, message):
    config = resolved(Config(**{**BASE, **settings}), processes)
    with refused(message):
        plan.check_grid(config, sizes_of(config), processes)


@pytest.mark.parametrize(
    "size, processes, pipe, expected", [("toy", 1, 1, 1), ("mini", 2, 2, 4), ("toy", 4, 4, 12)]
)
def test_a_pipeline_works_without_accumulate(size, processes, pipe, expected):
    config = resolved(Config(preset=size, pipe=pipe), processes)
    assert config.accumulate == expected
    plan.check_grid(config, sizes_of(config), processes)


def test_mistakes_end_before_there_is_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "memory_limit", lambda device: 16)
    with refused("the model does not fit: it needs"):
        train(Config(preset="1.6b", precision="fp32", device="cpu"))
    with refused("--tensor 1 × --pipe 2 does not divide 1 processes"):
        train(config_of(**{**BASE, "precision": "auto", "pipe": 2}))
    monkeypatch.setattr(CausalSelfAttention, "__init__", lambda self, _: nn.Module.__init__(self))
    with refused("parameters, model.py has "):
        train(config_of(**BASE))
    assert not Path("runs").exists()


def test_a_gradient_that_is_not_finite_stays_out_of_the_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    norms = iter([1.0, math.inf])
    monkeypatch.setattr(Layout, "gradient_norm", lambda _: torch.tensor(next(norms)))
    with refused("step 2: loss or gradient is not finite; start again with a lower --lr"):
        train(config_of(**{**BASE, "log_every": 99, "eval_every": 1, "run": "nan"}))
    assert newest(Path("runs/nan")).name == "sharded-1"


# ---- fine-tuning ---------------------------------------------------------------------------------


def first_loss(folder: Path) -> float:
    return losses(folder)[0]


def still(**settings) -> Config:
    """A run of one step that changes next to nothing, so that its weights can be compared."""
    small = dict(max_steps=1, eval_every=1, log_every=1, lr=1e-12, device="cpu", precision="fp32")
    return config_of(given=settings, **small | {"batch_size": 4} | settings)


def test_fine_tuning_begins_with_the_weights_and_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = {**BASE, "data": str(write_table(tmp_path / "wos")), "vocab_size": 300}
    before = train(config_of(**text, run="before"))
    words = "cells and networks in the method of this study".split()
    other = "\n".join(" ".join(words[number % 9 :] + words) for number in range(60))
    (tmp_path / "other.txt").write_text(other, encoding="utf-8")

    # The run's newest checkpoint, on other data: new optimizer, step 0, the sizes of the weights.
    after = train(still(init="before", data="other.txt", run="after"))
    weights, sizes = load_weights(newest(before))
    tuned, tuned_sizes = load_weights(newest(after))
    for name in ("d_model", "nhead", "num_layers", "seq_length", "vocab_size"):
        assert getattr(tuned_sizes, name) == getattr(sizes, name)
    for name, weight in weights.items():
        torch.testing.assert_close(tuned[name], weight, rtol=0, atol=1e-9)
    vocabularies = [
        json.loads((run / "tokenizer/tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        for run in (before, after)
    ]
    assert vocabularies[0] == vocabularies[1]
    assert checkpoints.read(newest(after))["state"]["step"] == 1
    # It is resumed without the run that it was fine-tuned from.
    before.rename(tmp_path / "moved")
    train(config_of(resume=str(after), max_steps=2, given=("max_steps",)))
    assert newest(after).name == "sharded-2"
    # One checkpoint of a run, for shorter sequences.
    first = tmp_path / "moved/checkpoints" / f"sharded-{STEPS // 2}"
    short = train(still(init=str(first), data="other.txt", seq_length=8, run="short"))
    weights, (tuned, sizes) = load_weights(first)[0], load_weights(newest(short))
    assert sizes.seq_length == 8
    positions = weights["wpe.weight"][:8]
    torch.testing.assert_close(tuned["wpe.weight"], positions, rtol=0, atol=1e-9)

    for settings, message in (
        (dict(d_model=64), "--d_model 64: the model of --init has 32; leave it out"),
        (dict(seq_length=32), "--seq_length 32: the model of --init has 16"),
        (dict(model="hf"), "is of --model own; give --model own"),
        (dict(init="nosuch"), "nosuch has no checkpoint of labs.gpt"),
    ):
        with refused(message):
            train(still(**{"init": str(first), "data": "other.txt", **settings}))


def test_a_run_that_saved_nothing_begins_with_init_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(config_of(**BASE, run="before"))
    after = train(still(init="before", keep=0, run="after", num_layers=3))
    fresh = train(still(preset="toy", num_layers=3, seq_length=16, vocab_size=511, run="fresh"))
    again = first_loss(after)
    assert again != first_loss(fresh)
    (after / "metrics.jsonl").unlink()
    train(config_of(resume=str(after)))
    assert first_loss(after) == again
    with refused("has no tokenizer, so it cannot read --data"):
        (tmp_path / "text.txt").write_text("one\ntwo", encoding="utf-8")
        train(still(init="before", data="text.txt"))


def test_a_local_gpt_2_of_hugging_face_is_fine_tuned_and_writes(tmp_path, monkeypatch, capsys):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    # As GPT-2's: bytes as characters, an end token, none for padding. Two rows of the embedding
    # have no token.
    vocabulary = {character: n for n, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = dict(bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    PreTrainedTokenizerFast(tokenizer_object=backend, **end).save_pretrained("gpt2")
    sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=259)
    config = GPT2Config(**sizes, bos_token_id=256, eos_token_id=256)
    theirs = GPT2LMHeadModel(config).eval()
    theirs.save_pretrained("gpt2")
    text = dict(data=str(write_table(tmp_path / "wos")), seq_length=16, model="hf")

    folder = train(still(init="gpt2", run="tuned", **text))
    tuned, sizes = load_weights(newest(folder))
    assert (sizes.vocab_size, sizes.seq_length, sizes.num_layers) == (259, 16, 2)
    for name, weight in theirs.named_parameters():
        if name == "transformer.wpe.weight":
            weight = weight[:16]
        torch.testing.assert_close(tuned[f"model.{name}"], weight.detach(), rtol=0, atol=1e-9)
    generate.main(generate.Config(ckpt="tuned", prompt="cell", temperature=0, max_new_tokens=6))
    tokens = torch.tensor([[vocabulary[character] for character in "cell"]])
    written = theirs.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=256)
    read = PreTrainedTokenizerFast.from_pretrained("gpt2").decode
    assert capsys.readouterr().out.endswith(read(written[0], skip_special_tokens=True) + "\n")
    with refused("is of --model hf; give --model hf"):
        train(still(init="gpt2", **{**text, "model": "own"}))
    file = Path("gpt2/config.json")
    file.write_text(file.read_text().replace('"gpt2"', '"bert"'))
    with refused("is no run of labs.gpt and no GPT-2 of Hugging Face"):
        train(still(init="gpt2", **text))


def test_the_newest_run_or_a_checkpoint_is_chosen(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with refused("no run of labs.gpt in runs/; train one"):
        checkpoints.choose("")
    for name in ("older", "newer"):
        train(config_of(**BASE, run=name))
    os.utime("runs/older/checkpoints", (1, 1))
    Path("runs/zzz/checkpoints/step-3").mkdir(parents=True)  # of another script
    assert checkpoints.choose("") == Path(f"runs/newer/checkpoints/sharded-{STEPS}")
    first = Path(f"runs/older/checkpoints/sharded-{STEPS // 2}")
    assert checkpoints.choose(str(first)) == first
    assert checkpoints.choose("older").name == f"sharded-{STEPS}"
    with refused("runs/newer was trained on random ids and cannot write"):
        generate.main(generate.Config())
    (first / "state.json").write_text("{}", encoding="utf-8")
    with refused("sharded-2 is damaged"):
        checkpoints.choose(str(first))


def test_a_card_has_no_more_memory_than_it_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure.Memory, "peak_gib", lambda _: 0.25)
    with refused("a process held 0.25 GiB, more than the card's --memory_gib 0.20"):
        train(config_of(**BASE, memory_gib=0.2, run="full"))
    train(config_of(**BASE, memory_gib=0.3, run="fits"))


# ---- tables --------------------------------------------------------------------------------------


def test_a_table_continues_after_a_row_that_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rows = [compare.Row("wrong", 1, "--tensor 3"), compare.Row("DDP", 2, "")]
    monkeypatch.setattr(compare, "ROWS", rows)
    compare.main(compare.Config(preset="toy", max_steps=5, processes=2))
    folder = Path("runs/compare-toy-fp32-cpu")
    _, _, wrong, right, _, about = (folder / "table.md").read_text().splitlines()
    assert "68,288 parameters" in about
    assert "| wrong<br>`--tensor 3` | 1 | failed, see row-0.log |" in wrong
    assert "--tensor 3 × --pipe 1 does not divide 1 processes" in (folder / "row-0.log").read_text()
    assert "| DDP | 2 |" in right and "GiB" in right
    assert json.loads((folder / "table.json").read_text())[1]["processes"] == 2
    for name in ("memory.png", "losses.png"):
        assert (folder / name).stat().st_size > 5000
    assert len(pictures.training_losses(folder / "row-1")) == 5
    assert pictures.training_losses(folder / "row-0") == []


def test_a_table_in_fp16(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with refused("--precision fp16"):  # a CPU lacks it
        compare.main(compare.Config(precision="fp16"))
    monkeypatch.setattr(compare, "choose_precision", Mock())
    train_row = Mock(return_value={"failed": ""})
    monkeypatch.setattr(compare.Table, "train", train_row)
    monkeypatch.setattr(compare, "pictures", Mock())
    compare.main(compare.Config(precision="fp16", processes=2))
    rows = [" ".join(call.args[0]) for call in train_row.call_args_list]
    assert len(rows) > 9 and all("--precision fp16" in flags for flags in rows)


def test_techniques_are_compared_with_row_1_and_with_ddp():
    def outcome(speed: float, memory: float, **changes) -> dict:
        result = dict(tokens_per_second=speed, peak_gib=[memory / 2, memory], device="cpu")
        result |= dict(cpu_seconds_per_step=1.5, tflops=0.1, share_of_peak=None, loss=6.0)
        return result | changes

    rows = {(row.name, row.processes): row for row in compare.ROWS}
    before, speeds = [], {}
    for name, processes, result in (
        ("one process", 1, outcome(100, 2)),
        ("DDP", 2, outcome(160, 2)),
        ("FSDP2, ZeRO-3", 2, outcome(80, 1)),
        ("DDP", 4, {"failed": "failed, see row-3.log"}),
        ("pipe, 1F1B", 4, outcome(50, 0.5, device="cuda", share_of_peak=0.25)),
    ):
        row = rows[name, processes]
        cells = compare.cells_of(row, result, before)
        assert len(cells) == len(compare.HEAD)
        before.append((row, result))
        speeds[name, processes] = cells[3:6] + cells[7:10]
    assert speeds["one process", 1] == ["1.00", "–", "1.50 s", "–", "2.00 GiB", "1.00"]
    assert speeds["FSDP2, ZeRO-3", 2] == ["0.80", "0.50", "1.50 s", "–", "1.00 GiB", "0.50"]
    assert speeds["pipe, 1F1B", 4] == ["0.50", "–", "–", "25.0%", "0.50 GiB", "0.25"]


@pytest.mark.parametrize("victim", ["table", "row"])
def test_a_signal_leaves_no_row_behind(victim, tmp_path, monkeypatch):
    """A row that was interrupted is no result, and none goes on computing without its table."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = (
        "from labs.gpt.rows import Table\n"
        "table = Table('compare', 'toy', 'fp32', ('loss',), '')\n"
        "flags = '--preset toy --max_steps 999999 --keep 0 --log_every 1'\n"
        "print(table.train(flags.split(), 1))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    log = tmp_path / "runs/compare-toy-fp32-cpu/row-0.log"

    def trains() -> bool:
        assert process.poll() is None
        return log.exists() and "step      2" in log.read_text()

    wait_for(trains)
    (row,) = children_of(process.pid)
    try:
        os.kill(process.pid if victim == "table" else row, signal.SIGTERM)
        output, _ = process.communicate(timeout=HANGS)
        wait_for(lambda: not Path(f"/proc/{row}").exists())
    finally:
        with suppress(ProcessLookupError):
            os.kill(row, signal.SIGKILL)
    assert "interrupted" in log.read_text()
    if victim == "row":
        assert output == "{'failed': 'failed, see row-0.log'}\n"


def wait_for(condition) -> None:
    end = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_scales_are_trained_or_planned(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    config = scales.Config(data="wos", preset="mini", memory_gib=0.25)
    planned = [scales.plan_scale(scale, config, "fp32", "cpu") for scale in scales.SCALES]
    settings = [row for row, _ in planned]
    # Each is the deepest model that fits, with what a process needs besides tensors.
    assert all(0.2 < need <= 0.25 for _, need in planned[:4])
    assert all(row["memory_gib"] == 0.25 for row in settings)
    layers = [row["num_layers"] for row in settings]
    # DDP holds the model on each card, two stages hold half of it each.
    assert layers[0] <= layers[1] < layers[2] and layers[0] < layers[3] and layers[4] == 48
    result = dict(loss=6.5, data="wos", peak_gib=[0.2, 0.1], minutes=1.5, parameters=7)
    result["vocab_size"] = 1500
    random_ids, few_tokens = {**result, "data": "random ids"}, {**result, "vocab_size": 300}
    outcomes = [result, {**result, "loss": 7.5}, {"failed": "one line"}, random_ids, few_tokens]
    rows = [scales.cells_of(scales.SCALES[0], settings[0], 0.2, outcome) for outcome in outcomes]
    with refused("--data wos: no such file or folder"):
        scales.main(config)
    assert [row[-1] for row in rows] == ["yes", "no", "–", "– (random ids)", "– (a guess passes)"]
    row = dict(zip(scales.HEAD, rows[0]))
    assert (row["vocabulary"], row["batch"], row["learning rate"]) == ("1,500", 8, "0.002")
    assert (row["steps"], row["minutes"], row["final loss"]) == (300, "1.5", "6.50")
    scales.main(scales.Config(memory_gib=0.001, precision="fp32"))  # nothing fits
    table = Path("runs/scales-mini-fp32-cpu/table.md").read_text(encoding="utf-8")
    lines = table.splitlines()[2:-2]
    assert len(lines) == 5 and all("| planned | " in line for line in lines)
    assert "| 1600 | 32 | 48 | 1024 | 50,257 |" in lines[4] and "needs 4 cards" in lines[4]


# ---- what the four processes do ------------------------------------------------------------------


def choose_fp16(device: torch.device, *_, **__) -> Precision:
    """fp16 as on a GPU (a CPU refuses it); for one step its scale is far too large."""
    precision, far = Precision(device, "fp16", ""), 2.0**32
    precision.scaler = torch.amp.GradScaler(
        device.type, growth_factor=far, backoff_factor=1 / far, growth_interval=OVERFLOWS - 1
    )
    return precision


def initial_weight_of_hf(name: str, shape: torch.Size, layers: int, seed: int) -> torch.Tensor:
    """Ours as Hugging Face's model has it: the reverse of `weights_from_hf`."""
    turned = "c_" in name and len(shape) == 2
    shape = shape[::-1] if turned else shape
    weight = initial_weight(name.removeprefix("model.transformer."), shape, layers, seed)
    if "c_attn" in name:  # (H, 3, W, …) → (3, H, W, …)
        weight = weight.unflatten(0, (PRESETS["toy"].nhead, 3, -1)).transpose(0, 1).flatten(0, 2)
    return weight.t() if turned else weight


PATCHES = {
    "fp16": ("labs.gpt.__main__.choose_precision", choose_fp16),
    "hf": ("labs.gpt.parallel.initial_weight", initial_weight_of_hf),
}


def run_cases(rank: int, port: int) -> None:
    """All cases in which this rank takes part, in turn."""
    torch.set_num_threads(1)
    cases = CASES | training_commands()
    for number, (name, (processes, settings)) in enumerate(cases.items()):
        ranks = [3] if processes == 1 else list(range(processes))  # 3 has least to do
        if rank not in ranks:
            continue
        while " > " in name and not Path(f"runs/{name}/ready").exists():
            time.sleep(0.1)
        place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=processes, LOCAL_WORLD_SIZE=processes)
        place |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port + number)
        if processes > 1:
            os.environ.update({variable: str(value) for variable, value in place.items()})
        kind = name.split("-")[0]
        as_users = kind in ("fp32", "command", *EXPECTED)
        torch.set_default_dtype(torch.float32 if as_users else torch.float64)
        # Measuring takes seconds in fp16, and has a test of its own.
        measure.measured_peak_flops = lambda *_: 1e12
        if name in CASES:
            config = settings_of(name)
        else:
            with patch.object(sys, "argv", ["labs.gpt", *settings]):
                config = parse_flags(Config)
        with patch(*PATCHES[kind]) if kind in PATCHES else nullcontext():
            train(config)
        if rank == ranks[0]:
            for later in CASES:
                if later.startswith(f"{name} > "):
                    copy = Path(f"runs/{later}")
                    shutil.copytree(f"runs/{name}", copy)
                    shutil.rmtree(copy / f"checkpoints/sharded-{STEPS}")
                    (copy / "ready").touch()
        for variable in place:
            os.environ.pop(variable, None)


if __name__ == "__main__":
    # Forked, so that the four import nothing again, not even what the model does on demand. One
    # that fails ends the others.
    importlib.import_module("transformers.models.gpt2.modeling_gpt2")
    torch.multiprocessing.start_processes(
        run_cases, (int(sys.argv[1]),), nprocs=4, start_method="fork"
    )
