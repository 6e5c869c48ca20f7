"""Every layout of processes against one process; our GPT against Hugging Face's; the planner, the data, bad input.

This very file, run as a script (see the end), is one of four processes that train all cases in turn by the lab's own `train`.
"""

import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from conftest import Forked, fork_ranks, free_port, run_code
from helpers import refused, together
from random_models import needs_compiler, unlimited
from torch.utils.flop_counter import FlopCounterMode

from engine.checkpoint import write_checksums
from engine.precision import Precision, choose_precision
from labs.gpt import compare, generate, measure, plan
from labs.gpt.__main__ import Config, sizes_of, train
from labs.gpt.checkpoints import checkpoint_of, convert, load_weights, newest, optimizer_tensors
from labs.gpt.data import Data, load, read_documents
from labs.gpt.model import GPT, HuggingFaceGPT, initial_weight, mean_loss
from labs.gpt.parallel import Layout, check_grid
from labs.gpt.sizes import PRESETS, get_model_size, get_tflops
from text.subwords import train_tokenizer

STEPS, OVERFLOWS = 20, 14  # steps of a case; the one whose gradients overflow, in fp16
# 12 sequences a step: divisible by 2, 3 and 4; the vocabulary by none of them, so parts of a weight differ in size.
BASE = dict(
    size="toy",
    vocabulary=511,
    precision="fp32",
    max_steps=STEPS,
    log_every=1,
    eval_every=STEPS // 2,
    data_size=48,
    device="cpu",
)
CASES = {  # by name: the processes, and the settings
    "alone": (1, {}),
    "accumulate-offload-optimizer": (1, dict(accumulate=3, offload="optimizer")),
    "recompute": (1, dict(recompute="all")),
    "chunked-loss": (1, dict(chunked_loss=True, recompute="selective")),
    "offload-parameters": (1, dict(data_parallel="zero3", offload="parameters")),
    "hf-ddp-2": (2, dict(model="hf")),  # begins with the same weights: see `initial_weight_of_hf`
    "ddp-2": (2, dict(accumulate=2)),
    "ddp-3": (3, {}),
    "zero1-2": (2, dict(data_parallel="zero1")),
    "zero2-2": (2, dict(data_parallel="zero2", recompute="all")),
    "zero3-2": (2, dict(data_parallel="zero3")),
    "zero3-3": (3, dict(data_parallel="zero3", accumulate=2)),
    "tensor-2": (2, dict(tensor=2)),
    "pipe-2-gpipe": (2, dict(pipe=2, accumulate=4, schedule="gpipe")),
    "pipe-2-interleaved": (2, dict(pipe=2, accumulate=4, schedule="interleaved")),
    "pipe-2-zb": (2, dict(pipe=2, accumulate=4, schedule="zb")),
    "pipe-2-zbv": (2, dict(pipe=2, accumulate=4, schedule="zbv")),
    "pipe-4": (4, dict(pipe=4, accumulate=6, recompute="all")),  # no multiple of 4
    "data-2-pipe-2": (4, dict(pipe=2, accumulate=2)),
    "data-2-tensor-2": (4, dict(tensor=2)),
    "zero3-2-tensor-2": (4, dict(tensor=2, data_parallel="zero3", recompute="selective")),
    # A copy of the first run that ended in the middle goes on under another layout.
    "zero3-2-tensor-2 > 1": (1, {}),
    "alone > zero3-2-tensor-2": (4, dict(tensor=2, data_parallel="zero3")),
    "zero1-2 > pipe-2": (2, dict(pipe=2, accumulate=2)),
    # All of the above compute in float64, which shows any mistake; these in float32, as users do.
    "fp32-alone": (1, {}),
    "fp32-ddp-3": (3, {}),
    "fp32-zero3-2-tensor-2": (4, dict(tensor=2, data_parallel="zero3")),
    "fp32-pipe-2": (2, dict(pipe=2, accumulate=4)),
    "bf16-zero3-2": (2, dict(data_parallel="zero3")),
    "bf16-tensor-2": (2, dict(tensor=2)),
    "bf16-pipe-2": (2, dict(pipe=2, accumulate=4)),
    # One step overflows: see `choose_fp16`.
    "fp16-alone": (1, {}),
    "fp16-offload-optimizer": (1, dict(offload="optimizer")),
    "fp16-ddp-2": (2, {}),
    "fp16-zero1-2": (2, dict(data_parallel="zero1")),
    "fp16-zero3-2": (2, dict(data_parallel="zero3")),
    "fp16-tensor-2": (2, dict(tensor=2)),
}
# By the first word of its name: which run a case agrees with, and the relative difference of its losses and of the gradients'
# norms. bf16 rounds to 8 bits, fp16 to 11; losses are means over many tokens, in which rounding errors cancel.
EXPECTED = {
    "fp32": ("fp32-alone", 1e-4, 1e-4),
    "bf16": ("fp32-alone", 3e-4, 3e-2),
    "fp16": ("fp16-alone", 1e-4, 1e-2),
}
if not hasattr(torch.nn, "LinearCrossEntropyOptions"):  # before PyTorch 2.13; `check_grid` says so
    del CASES["chunked-loss"]


def config_of(given=(), **settings) -> Config:
    """As `parse_flags` would make it."""
    config = Config(**settings)
    config.given = set(given)
    return config


def settings(name: str) -> Config:
    changes = {**BASE, **CASES[name][1]}
    if (kind := name.split("-")[0]) in ("bf16", "fp16"):
        changes["precision"] = kind
    if " > " in name:
        return config_of(
            given=("accumulate", "tensor", "pipe", "data_parallel"),
            resume=f"runs/{name}",
            **changes,
        )
    return config_of(run=f"runs/{name}", **changes)


def losses(folder: Path) -> list[float]:
    """Loss and norm of the gradient of each step (None: it overflowed), and the loss of the validation at the end."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = "train/loss", "train/gradient_norm"
    by_step = {
        record["step"]: [record[name] for name in names] for record in records if names[0] in record
    }
    return [*chain.from_iterable(by_step.values()), records[-1]["validation/loss"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder with the runs of all cases."""
    folder = tmp_path_factory.mktemp("gpt")
    port = free_port(len(CASES))  # one for each
    together([Forked(__file__, rank, port, cwd=folder) for rank in range(4)])
    return folder / "runs"


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("alone")])
def test_losses_are_those_of_one_process(runs, name):
    run, *tolerances = EXPECTED.get(name.split("-")[0], ("alone", 1e-9, 1e-9))
    found, expected = losses(runs / name), losses(runs / run)
    for begin, tolerance in enumerate(tolerances):  # of the losses, of the norms
        torch.testing.assert_close(found[begin::2], expected[begin::2], rtol=tolerance, atol=0)
    log = (runs / name / "train.log").read_text()
    assert (" > " in name) == (f"resumed after step {STEPS // 2}" in log)
    assert "(attn): " in log.partition("a block: ")[2]


def test_fp16_leaves_out_the_step_that_overflows(runs):
    found, expected = losses(runs / "fp16-alone"), losses(runs / "fp32-alone")
    norm = 2 * OVERFLOWS - 1  # where that step's is
    assert [place for place, value in enumerate(found) if value is None] == [norm]
    for begin, tolerance in enumerate((1e-4, 1e-2)):
        torch.testing.assert_close(
            found[begin:norm:2], expected[begin:norm:2], rtol=tolerance, atol=0
        )


def test_a_checkpoint_of_many_becomes_one_file(runs):
    convert(str(runs / "zero3-2-tensor-2"))
    weights = safetensors.torch.load_file(runs / "zero3-2-tensor-2" / "model.safetensors")
    expected, sizes = load_weights(newest(runs / "alone"))
    assert sizes == sizes_of(settings("alone")) and weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-5)


def test_a_damaged_checkpoint_is_passed_over(runs, tmp_path, capsys):
    shutil.copytree(runs / "zero3-3", tmp_path / "run")
    older, last = (tmp_path / f"run/checkpoints/sharded-{step}" for step in (STEPS // 2, STEPS))
    assert newest(tmp_path / "run") == last and len(list(last.glob("*.distcp"))) == 3
    for folder, piece in ((last, "__1_0.distcp"), (older, ".metadata")):
        content = bytearray((folder / piece).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / piece).write_bytes(content)
        with refused(f"checksum of {piece} differs"):
            checkpoint_of(str(folder))
        if folder is last:
            assert (
                newest(tmp_path / "run") == older
                and f"sharded-{STEPS} is damaged" in capsys.readouterr().err
            )
    with refused("no whole checkpoint"):
        newest(tmp_path / "run")


def test_a_checkpoint_of_another_lab_is_refused(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    write_checksums(tmp_path, ["state.json"])
    with refused("holds no checkpoint of this lab"):
        checkpoint_of(str(tmp_path))


@pytest.mark.parametrize("offload, place", [("none", "meta"), ("optimizer", "cpu")])
def test_states_are_read_to_where_adamw_wants_them(offload, place):
    weight = torch.nn.Parameter(torch.empty(2, device="meta"))
    layout = SimpleNamespace(weights={"weight": weight}, config=SimpleNamespace(offload=offload))
    states = optimizer_tensors(layout, torch.optim.AdamW([weight]))["weight"]
    places = {name: state.device.type for name, state in states.items()}
    assert places == dict.fromkeys(("exp_avg", "exp_avg_sq", "step"), place)


@pytest.mark.parametrize("name, processes", [("alone", 1), ("pipe-4", 4)])
def test_result_has_the_figures_of_the_table(runs, name, processes):
    result = json.loads((runs / name / "result.json").read_text())
    assert result["processes"] == processes == len(result["peak_gib"])
    assert result["parameters"] == sizes_of(settings(name)).parameters
    assert result["tokens_per_second"] * result["step_seconds"] == pytest.approx(12 * 32)


# ---- the model -------------------------------------------------------------------------------------------------------


def weights_from_hf(weights: dict[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """GPT-2's weights as Hugging Face has them → ours. Its Conv1D keeps a matrix transposed, (in, out)."""
    ours = {}
    for name, weight in weights.items():
        name = name.removeprefix("model.").removeprefix("transformer.")
        if name == "lm_head.weight":
            continue
        if "attn.c_" in name or "mlp.c_" in name:
            weight = weight.t() if weight.dim() == 2 else weight
        if "attn.c_attn" in name:  # (3, H, W, …) → (H, 3, W, …)
            weight = weight.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
        ours[name] = weight.contiguous()
    return ours


@pytest.fixture
def pair():
    """Hugging Face's model and ours with its weights."""
    torch.manual_seed(0)
    sizes = sizes_of(Config(size="toy"))
    theirs, ours = HuggingFaceGPT(sizes).double(), GPT(sizes).double()
    for weight in theirs.parameters():  # biases too, so that each is seen
        torch.nn.init.normal_(weight, std=0.1)
    ours.load_state_dict(weights_from_hf(theirs.state_dict(), sizes.heads))
    return theirs, ours, torch.randint(sizes.vocabulary, (2, sizes.sequence))


def test_logits_and_loss_are_those_of_hugging_face(pair):
    theirs, ours, tokens = pair
    torch.testing.assert_close(ours(tokens), theirs(tokens), rtol=1e-9, atol=1e-9)
    expected = theirs.model(tokens, labels=tokens).loss  # which shifts by itself
    torch.testing.assert_close(
        ours(tokens[:, :-1], tokens[:, 1:]), expected, rtol=1e-6, atol=0, check_dtype=False
    )


def test_cache_changes_nothing(pair):
    _, ours, tokens = pair
    past = {number: [] for number in ours.h}
    with torch.no_grad():
        pieces = [
            ours(piece, past=past) for piece in (tokens[:, :7], *tokens[:, 7:].split(1, dim=1))
        ]
        torch.testing.assert_close(torch.cat(pieces, dim=1), ours(tokens), rtol=1e-9, atol=1e-9)


def test_generation():
    torch.manual_seed(0)
    model, draw = GPT(sizes_of(Config(size="toy"))), torch.Generator().manual_seed(1)
    out = generate.generate(model, torch.tensor([[1, 2, 3]]), 100, 0, 1.0, draw, longest=32)
    assert out.shape == (1, 32)  # as long as there are positions
    with torch.no_grad():
        assert torch.equal(model(out[:, :-1])[:, 2:].argmax(-1), out[:, 3:])  # each the likeliest
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    drawn = {generate.choose(logits, 1.0, 0.7, draw).item() for _ in range(200)}
    assert drawn == {0, 1}  # 0.5 alone is no 0.7, 0.5 + 0.3 is


def test_sizes_of_the_handout():
    with torch.device("meta"):
        theirs, ours = HuggingFaceGPT(PRESETS["1.6b"]), GPT(PRESETS["1.6b"])
    assert get_model_size(theirs) == 1_638_022_400  # the tied matrix counted twice
    numbers = {sum(weights.numel() for weights in model.parameters()) for model in (theirs, ours)}
    assert numbers == {1_557_611_200} and PRESETS["1.6b"].parameters == 1_557_611_200
    assert get_tflops(10**9, 8, 1024, 2.0) == pytest.approx(10**9 * 8 * 1024 * 8 / 2e12)


def test_flops_are_those_that_pytorch_counts():
    sizes = PRESETS["124m"]
    with torch.device("meta"):
        model, tokens = GPT(sizes), torch.zeros(1, sizes.sequence, dtype=torch.long)
        plainly = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
        with FlopCounterMode(display=False) as counter, plainly:
            model(tokens, tokens).backward()
    assert counter.get_total_flops() == pytest.approx(
        sizes.flops_per_token() * sizes.sequence, rel=0.02
    )


# ---- the planner -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kind", ["own", "hf"])
def test_planned_activations_are_what_is_saved(kind, narrow):
    def saved(layers: int) -> int:
        """Bytes kept for the backward pass, without weights and their narrow copies."""
        sizes = replace(sizes_of(Config(size="toy")), hidden=128, sequence=256, layers=layers)
        model, seen = (GPT if kind == "own" else HuggingFaceGPT)(sizes), {}
        tokens = torch.zeros(4, 256, dtype=torch.long)

        def pack(tensor):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        narrowed = torch.autocast("cpu", torch.bfloat16, enabled=narrow)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), narrowed:
            loss = model(tokens, tokens)
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        copies = layers * 12 * 128**2 * 2 if narrow else 0
        assert loss.requires_grad
        return sum(size for place, size in seen.items() if place not in weights) - copies

    config = Config(size="toy", model=kind, batch_size=4)
    planned = [
        plan.memory(
            config, replace(sizes_of(config), hidden=128, sequence=256, layers=n), 1, narrow
        ).activations
        for n in (2, 6)
    ]
    assert saved(6) - saved(2) == pytest.approx(planned[1] - planned[0], rel=0.03)


LARGE_LOGITS = "--size mini --vocabulary 60000 --accumulate 8 --batch_size 16"


@needs_compiler
@unlimited
@pytest.mark.parametrize(
    "flags", [LARGE_LOGITS, pytest.param("--size 124m --batch_size 2", marks=pytest.mark.slow)]
)
def test_planned_memory_is_what_the_process_held(flags, tmp_path):
    flags += f" --data random --data_size 64 --precision fp32 --max_steps 3 --keep 0 --run {tmp_path}/run"
    lab = "import runpy; runpy.run_module('labs.gpt', run_name='__main__', alter_sys=True)"
    one_thread = {"OMP_NUM_THREADS": "1"}  # each has memory of its own
    run_code(lab, *shlex.split(flags), CUDA_VISIBLE_DEVICES="", **one_thread)
    log = (tmp_path / "run/train.log").read_text(encoding="utf-8")
    told = re.search(r"memory: (.*) GiB at most on a rank, (.*) planned", log)
    # 0.1 GiB: what PyTorch and oneDNN need beside tensors.
    assert float(told[1]) == pytest.approx(float(told[2]), rel=0.1, abs=0.1)


def test_plans_of_what_is_dealt_out_or_gathered_whole():
    """Zero1 hands out whole matrices; FSDP2 gathers a block's gradients on one card, too."""
    small = config_of(size="124m", data_parallel="zero1", batch_size=8)
    sizes = sizes_of(small)
    assert plan.memory(small, sizes, 8, True).optimizer >= 8 * sizes.vocabulary * sizes.hidden
    large = config_of(size="1.6b", data_parallel="zero3", offload="parameters")
    alone, two = (
        plan.memory(replace(large, batch_size=n), sizes_of(large), n, True).gradients
        for n in (1, 2)
    )
    assert alone == pytest.approx(two) and alone > 0


def test_plans_of_pipelines_are_of_the_fullest_rank():
    """GPipe's last rank keeps the logits of all micro-batches; 1F1B's activations and logits lie on different ranks."""
    config = config_of(size="124m", pipe=2, accumulate=8, batch_size=8)
    sizes = sizes_of(config)
    gpipe, other = (
        plan.memory(replace(config, schedule=name), sizes, 2, False) for name in ("gpipe", "1f1b")
    )
    logits = sizes.sequence * sizes.vocabulary * 4  # of a micro-batch
    assert gpipe.logits - other.logits == 7 * 2 * logits  # themselves and their log-softmax
    assert other.logits == 4 * logits  # both, and a gradient of each
    both = other.weights + other.optimizer + other.gradients + other.activations + other.logits
    tied, buffers = 4 * sizes.vocabulary * sizes.hidden, 8 * 4 * sizes.sequence * sizes.hidden
    assert other.total == both - other.activations / 2 + tied + buffers


def test_offloading_counts_the_memory_of_the_machine(monkeypatch):
    config = config_of(size="1.6b", data_parallel="zero3", offload="parameters", batch_size=1)
    world = SimpleNamespace(device=torch.device("cuda"), size=1, maximum=lambda number: [number])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    monkeypatch.setattr(plan, "host_memory", lambda: 16 * 2**30)
    with refused(
        "--offload parameters puts 23.2 GiB a rank into the machine's memory, and there are 16.0"
    ):
        plan.check_fits(config, sizes_of(config), world, "bf16")
    monkeypatch.setattr(plan, "host_memory", lambda: 32 * 2**30)
    assert plan.check_fits(config, sizes_of(config), world, "bf16").host > 0


def test_a_container_has_less_memory_than_its_machine(monkeypatch):
    told = iter(["max\n", f"{2**30}\n"])
    monkeypatch.setattr(Path, "read_text", lambda path: next(told))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert plan.host_memory() > 2**29 == plan.host_memory()


def test_plan_of_the_handout(capsys):
    train(config_of(size="1.6b", plan=True, gpus=4, memory_gib=24))
    said = capsys.readouterr().out.splitlines()
    lines = {line[:32].strip(): line[32:] for line in said}
    assert "  does not fit; at most" in lines["DDP 4"]
    assert "  fits" in lines["zero3"] and "  fits" in lines["tensor 4 × data 1"]
    gradients, optimizer = map(float, lines["DDP 4"].split()[1:3])
    assert gradients == pytest.approx(1_557_611_200 * 4 / 2**30, abs=0.01)
    assert optimizer == pytest.approx(2 * gradients, abs=0.02)
    assert "torchrun --nproc_per_node 4 -m -- labs.gpt --size 1.6b" in said[-1]


def test_a_plan_names_the_schedule_that_was_asked_for(capsys):
    train(config_of(size="124m", plan=True, gpus=2, schedule="gpipe"))
    assert "pipe 2 × data 1, gpipe " in capsys.readouterr().out


def test_a_plan_tries_what_can_be_tried_whatever_was_asked_for(capsys):
    for asked in (dict(offload="optimizer"), dict(model="hf")):
        train(config_of(["offload"], size="124m", plan=True, memory_gib=24, **asked))
        *_, plain, recomputed, offloaded, parameters, last = capsys.readouterr().out.splitlines()
        assert all("fits" in line for line in (plain, recomputed, offloaded, parameters))
        assert "host memory" in offloaded and "host memory" not in plain
        assert (
            last.startswith("the deepest without --offload: python -m labs.gpt")
            and last.count("--offload") == 1
        )


@pytest.mark.parametrize(
    "cards, why",
    [
        (dict(gpus=3), "no row can be run as it stands; give a --batch_size that the cards divide"),
        (dict(memory_gib=0.1), "no depth fits on these cards"),
    ],
)
def test_a_plan_without_a_proposal_says_why(capsys, cards, why):
    train(config_of(size="124m", plan=True, **cards))
    assert capsys.readouterr().out.splitlines()[-1] == why


@pytest.mark.parametrize("gpus", [1, 2])
def test_plan_for_cards_of_11_gib(capsys, gpus):
    """The handout's scales 1 and 2; what is proposed is the deepest of all that stays on the cards."""
    config = config_of(
        ["data"], size="1.6b", plan=True, gpus=gpus, memory_gib=11, precision="fp16", data="my data"
    )
    train(config)
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    layers = int(words[words.index("--layers") + 1])
    assert layers > 10 and words[words.index("--data") + 1] == "my data"
    trials = [
        plan.trial_of(config, changes)
        for _, changes in plan.techniques(config)
        if "offload" not in changes
    ]
    assert layers == max(
        plan.most_layers(trial, sizes_of(config), config, True) for trial in trials
    )


def test_the_loss_of_narrow_logits_is_computed_in_fp32():
    """As CUDA's autocast hands them over; on a CPU it widens them by itself."""
    torch.manual_seed(1)
    logits, targets = torch.randn(2, 3, 300).bfloat16(), torch.randint(300, (2, 3))
    loss = mean_loss(logits, targets)
    assert loss.dtype == torch.float32 and loss == mean_loss(logits.float(), targets)
    assert mean_loss(logits.double(), targets).dtype == torch.float64


# ---- data ------------------------------------------------------------------------------------------------------------


def write_table(folder: Path, rows: int = 60) -> Path:
    folder.mkdir(exist_ok=True)
    lines = ["Y1\tY2\tY\tDomain\tarea\tkeywords\tAbstract"]
    words = "we propose a method for the study of cells and networks in this paper".split()
    draw = np.random.default_rng(0)
    for number in range(rows):
        text = " ".join(draw.choice(words, 60))
        lines.append(f'5\t48\t120\tSecretLabel \tarea\tkey; words\t"{text} ""quoted"" {number}."')
    (folder / "Data1k.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_only_abstracts_are_read(tmp_path):
    splits, note = read_documents(write_table(tmp_path / "wos"))
    assert (len(splits["train"]), len(splits["validation"])) == (57, 3)
    assert splits["validation"][1].endswith('"quoted" 20.') and "SecretLabel" not in " ".join(
        splits["train"]
    )
    assert "labels and keywords are not read" in note


def test_another_tokenizer_in_the_same_folder_makes_other_data(tmp_path):
    config = config_of(
        data=str(write_table(tmp_path / "wos")), tokenizer=str(tmp_path / "tokenizer"), batch_size=2
    )
    keys = []
    for words in ("some words of a text", "others, not the same"):
        train_tokenizer([words], 300).save_pretrained(tmp_path / "tokenizer")
        keys.append(load(config, sizes_of(config), tmp_path / "cache", print).key)
    assert len(set(keys)) == 2


def test_what_is_a_table_and_where_its_lines_end(tmp_path):
    rows = [f"{n}\tfirst\u2028half\x85and\x0csecond {n}" for n in range(3)]
    (tmp_path / "a.txt").write_text("\n".join(["Y\tAbstract", *rows]) + "\n", encoding="utf-8")
    assert [
        text[-1] for texts in read_documents(tmp_path / "a.txt")[0].values() for text in texts
    ] == ["1", "2", "0"]
    (tmp_path / "novel.txt").write_text("\tChapter One\nIt was\na night.\n")
    assert sum(map(len, read_documents(tmp_path / "novel.txt")[0].values())) == 3
    (tmp_path / "README.md").write_text("about it\n\nand more")
    assert sum(map(len, read_documents(tmp_path)[0].values())) == 6  # of both files, without it
    (tmp_path / "b.tsv").write_text("a\tb\n1\t2\n")
    (tmp_path / "c.txt").write_text("a\tb\tabstract\n1\t2\tthree\n")
    for name, columns in (("b.tsv", "a, b"), ("c.txt", "a, b, abstract")):
        with refused(f"is a table without the column Abstract; it has {columns}"):
            read_documents(tmp_path / name)


@pytest.mark.parametrize(
    "text, found",
    [
        ("a\nb\nc\n\n", ["b", "c", "a"]),
        ("a b\n\nc\nd\n\ne\n", ["c\nd", "e", "a b"]),
        ("a\u2028b\x85\nc\nd\n", ["c", "d", "a\u2028b"]),
        ("a\n" * 99 + "\n" + "b\n = c\n", [*"a" * 94, "b", *"a" * 5, "= c"]),
    ],
)
def test_documents_are_lines_unless_blank_lines_part_them(tmp_path, text, found):
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    splits, _ = read_documents(tmp_path / "a.txt")
    assert splits["train"] + splits["validation"] == found


def test_the_hubs_parquet_files(tmp_path):
    for split in ("train", "validation", "test"):
        rows = {"text": ["", f" = {split} = \n", "", " b . \n"]}
        pyarrow.parquet.write_table(
            pyarrow.table(rows), tmp_path / f"{split}-00000-of-00001.parquet"
        )
    assert read_documents(tmp_path)[0] == {
        split: [f"= {split} = \n\n b ."] for split in ("train", "validation")
    }


def test_largest_x_of_the_archive(tmp_path):
    for name, count in (("WOS5736", 25), ("WOS11967", 50)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "X.txt").write_text(
            "\n".join(f"abstract {n}" + "\n" * (n == 9) for n in range(count))
        )
        (tmp_path / name / "Y.txt").write_text("1\n" * count)
    splits, _ = read_documents(tmp_path)
    assert sum(map(len, splits.values())) == 50 and all(
        t.startswith("abstract") for t in splits["train"]
    )


def test_wikitext_keeps_its_splits(tmp_path):
    train = " = A = \n\n text of a .\n\n = = part = = \n\n more .\n\n = B = \n\n b .\n"
    (tmp_path / "wiki.train.tokens").write_text(train)
    (tmp_path / "wiki.valid.tokens").write_text(" = C = \n\n c .\n")
    (tmp_path / "wiki.test.tokens").write_text(" = D = \n\n d .\n")
    splits, _ = read_documents(tmp_path)
    assert len(splits["train"]) == 2 and "more" in splits["train"][0]
    assert splits["validation"] == ["= C = \n\n c ."]


def test_only_whole_words_of_a_name_make_a_split(tmp_path):
    for name in ("train", "Old Testament", "The Devil's Dictionary", "book.valid", "testset"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")
    splits, note = read_documents(tmp_path)
    assert "1 of test are not read" in note
    assert splits == {
        "train": ["Old Testament", "The Devil's Dictionary", "train"],
        "validation": ["book.valid"],
    }


def test_a_run_that_its_minutes_end_says_so(tmp_path, monkeypatch):
    """Whether the clock ends it or the plan that was fitted to the clock."""
    monkeypatch.chdir(tmp_path)
    endless = dict(max_steps=10**6, log_every=10**6, eval_every=10**6)
    train(config_of(**{**BASE, **endless, "max_minutes": 0.02, "run": "a"}))
    assert "the 0.02 minutes are over" in Path("runs/a/train.log").read_text(encoding="utf-8")
    with refused("; give more --max_minutes"):
        train(config_of(["resume"], **{**BASE, "resume": "runs/a", "max_minutes": 0.02}))


def test_what_to_give_more_of_to_a_run_whose_plan_is_done(tmp_path, monkeypatch):
    """A plan that was fitted to the minutes wants more of them, though the clock has some left."""
    monkeypatch.chdir(tmp_path)
    last = newest(train(config_of(**{**BASE, "max_steps": 2, "max_minutes": 999, "run": "a"})))
    for by_time, more in ((False, "--max_steps"), (True, "--max_minutes")):
        state = json.loads((last / "state.json").read_text())
        state["schedule"]["by_time"] = by_time
        (last / "state.json").write_text(json.dumps(state))
        write_checksums(
            last, [path.name for path in last.iterdir() if path.name != "checksums.json"]
        )
        with refused(f"; give more {more}"):
            train(config_of(resume="runs/a"))


def test_batches():
    data = Data({"train": np.arange(101), "validation": np.arange(11)}, 5, 4, 1, 101, "key")
    seen = torch.cat([data.batch("train", step)[0] for step in range(data.batches("train"))])
    assert sorted(seen.flatten().tolist()) == list(range(100))
    tokens, targets = data.batch("train", 7)
    assert torch.equal(tokens + 1, targets)
    assert not torch.equal(
        data.batch("train", 0)[0], data.batch("train", data.batches("train"))[0]
    )  # another epoch
    assert data.batch("validation", 0)[0].shape == (4, 5)  # two sequences, each twice


def test_learns_from_text_and_writes(tmp_path, monkeypatch, capsys, report_of):
    monkeypatch.chdir(tmp_path)
    text = {
        **BASE,
        **dict(data=str(write_table(tmp_path / "wos")), max_steps=60, vocabulary=300, run="text"),
    }
    with refused("--prompt has no place for an answer"):
        train(config_of(**{**text, "prompt": "word " * 999, "run": "long"}))
    full = dcp.CheckpointException("", {0: (OSError("No space left on device"), None)})
    with (
        refused(": No space left on device; free some space, then --resume"),
        monkeypatch.context() as patch,
    ):
        patch.setattr(dcp, "save", Mock(side_effect=full))
        train(config_of(**{**text, "max_steps": 1, "run": "full"}))
    unsaved = train(
        config_of(**{**text, "max_steps": 1, "run": "unsaved", "keep": 0, "batch_size": 24})
    )
    assert "validation: 1 batches of 24 × 32 tokens, 18 of 18 sequences" in (
        unsaved / "train.log"
    ).read_text("utf-8")
    assert (unsaved / "result.json").exists() and not (unsaved / "checkpoints").exists()
    folder = train(config_of(**text))
    with refused("all is done; give more --max_steps"):
        train(config_of(resume=str(folder), epochs=99, given=("epochs",)))
    values = losses(folder)
    assert values[0] > 5.5 and values[-1] < 4.0
    assert "labels and keywords are not read" in capsys.readouterr().out
    generate.main(generate.Config(ckpt="text", tokens=8))  # runs/text
    assert len(capsys.readouterr().out.split()) >= 4
    (folder / "checkpoints/.tmp-sharded-61").mkdir()  # a save that was killed
    (tmp_path / "wos").rename(tmp_path / "moved")
    more = dict(resume=str(folder), data=str(tmp_path / "moved"), max_steps=90)
    with (
        monkeypatch.context() as patch,
        pytest.raises(ZeroDivisionError),
    ):  # ended before its first checkpoint
        patch.setattr(Layout, "forward_backward", Mock(side_effect=ZeroDivisionError))
        train(config_of(**more, given=("data", "max_steps")))
    train(config_of(resume=str(folder)))
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    rates = [record["train/learning_rate"] for record in records if "train/learning_rate" in record]
    assert rates[59] < rates[60] < rates[61] < rates[62] <= max(rates)  # up again, not in one jump
    convert("")  # the newest run
    assert (folder / "model.safetensors").exists() and not (
        folder / "checkpoints/.tmp-sharded-61"
    ).exists()
    events = (path.read_bytes() for path in folder.glob("events.out.tfevents.*"))
    assert b"sample/text_summary" in b"".join(events)
    flops = sizes_of(config_of(**text)).flops_per_token()
    assert f'FLOPs of a training token</th><td><data value="{flops:.0f}"' in report_of(folder)


def test_heads_of_any_width_are_padded_on_a_gpu_without_another_result(monkeypatch):
    torch.manual_seed(1)
    model = GPT(replace(PRESETS["toy"], hidden=40)).double()  # heads of 10
    tokens = torch.randint(512, (2, 32))
    plain, widths, attend = model(tokens), [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    noted = lambda q, *rest, **options: widths.append(q.shape[-1]) or attend(q, *rest, **options)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    torch.testing.assert_close(model(tokens), plain)
    assert set(widths) == {16}


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "processes, settings, message",
    [
        (2, dict(tensor=3), "2 processes are no grid with --tensor 3"),
        (8, dict(tensor=8), "--tensor 8 does not divide the 4 heads"),
        (8, dict(pipe=8, accumulate=8, batch_size=8), "4 layers are no 8 stages"),
        (4, dict(pipe=4, accumulate=4, schedule="zb"), "4 layers are no 8 stages"),
        (5, {}, "--batch_size 12 does not divide into 5"),
        (
            4,
            dict(pipe=4, accumulate=3),
            "--schedule 1f1b wants --accumulate of at least --pipe 4, not 3",
        ),
        (
            2,
            dict(pipe=2, accumulate=3, schedule="zb"),
            "--schedule zb wants --accumulate to be a multiple of --pipe 2, not 3",
        ),
        (4, dict(tensor=2, pipe=2, accumulate=2), "--tensor and --pipe together"),
        (
            2,
            dict(pipe=2, accumulate=2, data_parallel="zero3"),
            "--pipe goes with --data_parallel ddp",
        ),
        (2, dict(tensor=2, model="hf"), "--model hf"),
        (1, dict(offload="parameters"), "--offload parameters needs"),
        (
            6,
            dict(tensor=2, data_parallel="zero3"),
            "--tensor 2 does not divide the vocabulary of 511",
        ),
        (1, dict(hidden=30, heads=4), "--hidden 30 must be divisible by --heads 4"),
    ],
)
def test_a_grid_that_cannot_be(processes, settings, message):
    config = Config(**{**BASE, "batch_size": 12, **settings})
    with refused(message):
        check_grid(config, sizes_of(config), processes)


def test_the_grid_is_checked_for_the_precision_that_auto_means(tmp_path, monkeypatch):
    """On a card without bf16 that is fp16, which --pipe does not have."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "labs.gpt.__main__.check_grid", lambda config, *_: pytest.fail(config.precision)
    )
    with pytest.raises(pytest.fail.Exception, match=r"32$|16$"):
        train(config_of(**{**BASE, "precision": "auto"}))


def test_a_gradient_that_is_no_number_stays_out_of_the_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    norms = iter([1.0, math.inf])
    monkeypatch.setattr(Layout, "clip", lambda *_: torch.tensor(next(norms)))
    with refused("step 2: loss or gradient is not finite; start again with a lower --lr"):
        train(config_of(**{**BASE, "log_every": 99, "eval_every": 1, "run": "nan"}))
    assert newest(Path("runs/nan")).name == "sharded-1"


def test_validation_by_a_pipeline_keeps_nothing_for_a_backward_pass():
    layout, seen = object.__new__(Layout), []
    layout.config, layout.data, layout.parts = Config(), 1, []
    layout.world = SimpleNamespace(device=torch.device("cpu"))
    layout.precision = choose_precision(layout.world.device, "fp32")
    layout.stages = [SimpleNamespace(fwd_cache={})]

    def evaluate(**_):
        for part in range(3):
            layout.stages[0].fwd_cache[part] = "logits"
        seen.append((torch.is_grad_enabled(), dict(layout.stages[0].fwd_cache)))

    layout.schedule = SimpleNamespace(eval=evaluate)
    layout.loss(torch.ones(1, 1), torch.ones(1, 1))
    assert seen == [(False, {2: "logits"})] and type(layout.stages[0].fwd_cache) is dict


def test_bad_input_is_one_line_on_every_rank(tmp_path):
    for number, rank in enumerate(
        fork_ranks(2, "labs/gpt/__main__.py", "--size", "toy", "--tensor", 3, cwd=tmp_path)
    ):
        assert rank.wait() == 2 and rank.output.count("\n") == 1, rank.output
        assert rank.output.startswith(f"error (rank {number}): 2 processes are no grid")
    assert not (tmp_path / "runs").exists()


def test_a_size_that_cannot_fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("labs.gpt.plan.device_memory", lambda world: 2**34)
    with refused(
        "--layers 2000 --batch_size 8 --data 'my data' --model own --vocabulary 50257 --precision fp32"
    ):
        train(Config(size="1.6b", layers=2000, data="my data", precision="fp32", device="cpu"))
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "cores, processes, share", [(2, 1, 1), (8, 2, 1), (2, 2, 0.5), (1, 4, 0.125)]
)
def test_processes_that_share_cores_cannot_all_be_as_fast_as_one_alone(
    monkeypatch, cores, processes, share
):
    monkeypatch.setattr(measure, "cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert measure.share_of_cores(processes) == share


@pytest.mark.parametrize(
    "words, expected",
    [
        (
            "error (rank 1): another process of this run has ended\nerror (rank 0): does not fit: needs 9 GiB",
            "does not fit: needs",
        ),
        (
            "error (rank 0): another process of this run has ended\n error_file: <N/A>\n exitcode  : -9 (pid: 7)\n"
            "traceback : Signal 9 (SIGKILL) received by PID 7",
            "Signal 9 (SIGKILL) received by PID 7",
        ),
        ("", "ended without a word"),
    ],
)
def test_a_row_that_fails_says_why_in_one_line(words, expected):
    assert compare.last_words(words).startswith(expected)


def test_a_row_that_was_killed_says_so(tmp_path, monkeypatch):
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\necho some warning >&2\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    outcome = compare.run_row(
        compare.Row("a", 1, "", "", "fine"), 1, compare.Config(size="toy"), tmp_path
    )
    assert outcome["failed"] == "ended by signal 9"


def test_table_goes_on_after_a_row_that_fails(tmp_path, monkeypatch, capsys):
    rows = [
        compare.Row("bad", 1, "--tensor 3", "", "never"),
        compare.Row("good", 1, "", "", "fine"),
    ]
    monkeypatch.setattr(compare, "ladder", lambda most, gpu: rows)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = compare.Config(size="toy", steps=4, folder=str(tmp_path / "table"))
    compare.main(config)
    lines = (tmp_path / "table" / "table.md").read_text().splitlines()
    assert len(lines) == 4 and "tokens" in lines[0] and "no grid" in lines[2] and "GiB" in lines[3]
    assert (tmp_path / "table" / "table.png").stat().st_size > 1000
    assert not (tmp_path / "table" / "row-1" / "checkpoints").exists()
    written = (tmp_path / "table" / "row-1" / "result.json").stat().st_mtime
    failed = (tmp_path / "table" / "row-0" / "outcome.json").stat().st_mtime_ns
    compare.main(config)  # again: what is done is not done again, what failed is tried again
    assert (tmp_path / "table" / "row-1" / "result.json").stat().st_mtime == written
    assert (tmp_path / "table" / "row-0" / "outcome.json").stat().st_mtime_ns > failed


def processes_of(folder: Path) -> dict[int, str]:
    """By its number the command of each process that names the folder."""
    commands = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            commands[int(path.parent.name)] = path.read_text(errors="replace")
    assert commands
    return {number: command for number, command in commands.items() if str(folder) in command}


@pytest.mark.slow
def test_a_row_that_takes_too_long_leaves_nobody_behind(tmp_path):
    row = compare.Row("slow", 2, "--max_steps 1000000 --device cpu", "", "never")
    outcome = compare.run_row(row, 0, compare.Config(size="toy", minutes=0.5), tmp_path)
    assert outcome["failed"] == "not done after 0.5 minutes"
    assert not processes_of(tmp_path)


@pytest.mark.slow
def test_a_killed_rank_ends_its_row_and_the_table_goes_on(tmp_path, monkeypatch):
    rows = [
        compare.Row("endless", 2, "--max_steps 1000000", "", "never"),
        compare.Row("good", 2, "", "", "fine"),
    ]
    monkeypatch.setattr(compare, "ladder", lambda most, gpu: rows)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    log, killed = tmp_path / "row-0/train.log", []

    def kill() -> None:
        while not (log.exists() and "loss" in log.read_text()):  # until it is in its loop
            time.sleep(0.1)
        rank, *_ = (
            number
            for number, command in processes_of(log.parent).items()
            if "distributed.run" not in command
        )
        os.kill(rank, signal.SIGKILL)
        killed.append(rank)

    Thread(target=kill, daemon=True).start()
    compare.main(compare.Config(size="toy", folder=str(tmp_path)))
    bad, good = (tmp_path / "table.md").read_text().splitlines()[2:]
    assert f"Signal 9 (SIGKILL) received by PID {killed[0]}" in bad and "GiB" not in bad
    assert "GiB" in good and not processes_of(tmp_path)


def choose_fp16(device: torch.device, *_, **__) -> Precision:
    """fp16 as on a GPU, which `choose_precision` refuses on a CPU; for one step its scale is far too large."""
    precision, far = Precision(device, "fp16", ""), 2.0**32
    precision.scaler = torch.amp.GradScaler(
        device.type, growth_factor=far, backoff_factor=1 / far, growth_interval=OVERFLOWS - 1
    )
    return precision


def initial_weight_of_hf(name: str, shape: torch.Size, layers: int, seed: int) -> torch.Tensor:
    """Ours as Hugging Face's model has it: the way back of `weights_from_hf`."""
    turned = "c_" in name and len(shape) == 2
    weight = initial_weight(
        name.removeprefix("model.transformer."), shape[::-1] if turned else shape, layers, seed
    )
    if "c_attn" in name:  # (H, 3, W, …) → (3, H, W, …)
        weight = weight.unflatten(0, (PRESETS["toy"].heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return weight.t() if turned else weight


PATCHES = {
    "fp16": ("labs.gpt.__main__.choose_precision", choose_fp16),
    "hf": ("labs.gpt.parallel.initial_weight", initial_weight_of_hf),
}

if __name__ == "__main__":  # one of the four processes
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    for number, (name, (processes, _)) in enumerate(CASES.items()):
        ranks = [3] if processes == 1 else list(range(processes))  # 3 has least to do
        if rank not in ranks:
            continue
        while " > " in name and not Path(f"runs/{name}/ready").exists():
            time.sleep(0.1)
        place = dict(
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE=processes,
            LOCAL_WORLD_SIZE=processes,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port + number,
        )
        if processes > 1:
            os.environ.update({variable: str(value) for variable, value in place.items()})
        kind = name.split("-")[0]
        torch.set_default_dtype(torch.float32 if kind in EXPECTED else torch.float64)
        with patch(*PATCHES[kind]) if kind in PATCHES else nullcontext():
            train(settings(name))
        if rank == ranks[0]:
            for copy in (
                Path(f"runs/{later}") for later in CASES if later.startswith(f"{name} > ")
            ):
                shutil.copytree(f"runs/{name}", copy)
                shutil.rmtree(copy / f"checkpoints/sharded-{STEPS}")
                (copy / "ready").touch()
        for variable in place:
            os.environ.pop(variable, None)
