"""The pipeline against one process that sees the whole batch.

This very file, run as a script (see the end), is one of four processes that run all cases for 2, 3 and 4 ranks; the first
writes down what they got.
"""

import json
import os
import re
import sys
from contextlib import nullcontext
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Forked, forked_ranks
from helpers import refused, together

from engine import checkpoint
from engine.config import checked
from engine.distributed import World
from engine.errors import UserError
from engine.run import Run
from labs.pipeline import __main__ as lab
from labs.pipeline import data, report, schedule, stages

STEPS = 6
SMALL = dict(
    d_model=16,
    nhead=2,
    dim_feedforward=32,
    num_layers=5,
    batch_size=8,
    micro_batches=4,
    build="by_hand",
)
# 13 sequences in batches of 8: the second batch has 5, so that one micro-batch is short and one is empty.
TOY = dict(SMALL, sequences=13, optimizer="sgd", lr=0.1)
SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("zb", 2),
    ("zbv", 2),
)  # with the stages of a rank
CASES = {  # by name: the ranks, and the settings; layers that do not divide
    "gpipe-2": (2, {**TOY, "schedule": "gpipe"}),
    "zbv-2": (2, {**TOY, "schedule": "zbv", "stages_per_rank": 2}),
    **{
        f"{name}-4": (
            4,
            {
                **TOY,
                "schedule": name,
                "stages_per_rank": turns,
                "num_layers": 9,
                "optimizer": "adamw",
                "lr": 1e-2,
            },
        )
        for name, turns in SCHEDULES
    },
    "zb1-2": (2, {**TOY, "schedule": "zb"}),
    "traced-gpipe-3": (3, {**TOY, "build": "traced", "num_layers": 4}),
    "traced-zbv-2": (
        2,
        {**TOY, "build": "traced", "schedule": "zbv", "stages_per_rank": 2, "num_layers": 4},
    ),
    "text-zb-3": (
        3,
        {
            **TOY,
            "schedule": "zb",
            "stages_per_rank": 2,
            "data": "odd.txt",
            "length": 7,
            "num_layers": 7,
        },
    ),
    "three-parts-2": (
        2,
        {
            **TOY,
            "schedule": "interleaved",
            "stages_per_rank": 2,
            "batch_size": 6,
            "micro_batches": 3,
        },
    ),
    "post-norm-2": (2, {**TOY, "post_norm": True, "build": "traced", "num_layers": 3}),
    "gpipe-twice-2": (2, {**TOY, "batch_size": 16, "micro_batches": 8}),
    "1f1b-twice-2": (2, {**TOY, "batch_size": 16, "micro_batches": 8, "schedule": "1f1b"}),
}


def begin(config: lab.Config, dtype=torch.float64):
    """The data and the whole model, the same in every process."""
    # In fp64, because AdamW divides a gradient by its own size, and so makes much of the rounding error of one that is 0 in
    # truth, such as that of a key's bias; and because fp32 would hide small mistakes.
    torch.set_default_dtype(dtype)
    sequences, vocab = data.load(config)
    torch.manual_seed(config.seed)
    return sequences, stages.LanguageModel(vocab, sequences.shape[1] - 1, config)


def alone(config: lab.Config, dtype=torch.float64):
    """One process, the whole batch at once, nothing but autograd: → the losses and the weights in the end."""
    sequences, model = begin(config, dtype)
    optimizer, losses = lab.make_optimizer(config, model.parameters()), []
    for step in range(STEPS):
        tokens, target = data.batch_of_step(sequences, step, config.batch_size, config.seed)
        real = (target >= 0).any(1)  # the rows that fill up a short batch are left out here
        loss = F.cross_entropy(
            model(tokens[real]).flatten(0, 1), target[real].flatten(), ignore_index=-1
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


# ---- what the processes do -------------------------------------------------------------------------------------------


def run_case(config: lab.Config, world: World) -> dict:
    """The same in a pipeline; what it was, on rank 0."""
    sequences, model = begin(config)
    pipeline = stages.Pipeline(model, config, world)
    optimizer, losses = lab.make_optimizer(config, pipeline.parameters.values()), []
    measured = report.Measured(world, pipeline)
    for step in range(STEPS):
        tokens, target = data.batch_of_step(sequences, step, config.batch_size, config.seed)
        optimizer.zero_grad()
        pipeline.recorder.take()
        with measured.counting() if step == STEPS - 1 else nullcontext():
            loss = pipeline.forward_backward(tokens, target)
        losses.append(loss / int((target >= 0).sum()))
        optimizer.step()
    measured.add_step()
    measured.add_memory()
    weights, _ = lab.whole(pipeline, optimizer) or (None, None)
    return dict(
        losses=world.gather(losses), weights=weights, events=measured.steps, memory=measured.memory
    )


def as_in_the_handout(world: World) -> list[str] | None:
    """`if rank == 0: … else: …` with three stages: what each rank gets, on rank 0."""
    config = lab.Config(**SMALL)
    sequences, model = begin(config)
    pipeline = stages.Pipeline(model, config, world)
    tokens, target = data.batch_of_step(sequences, 0, config.batch_size, config.seed)
    pipeline.targets, outcome = target.numel(), "none"
    if world.rank == 0:
        pipeline.schedule.step(tokens)
    else:
        losses = []
        pipeline.schedule.step(target=target, losses=losses)
        try:
            outcome = f"loss {torch.stack(losses).mean():.4f}"
        except RuntimeError as error:
            outcome = str(error)
    return world.gather(outcome)


def a_short_batch_as_it_is(world: World) -> str | None:
    """The last of 13 sequences in batches of 4, not filled up, cut into 4 micro-batches: the message on rank 0."""
    config = lab.Config(**SMALL, sequences=13)
    sequences, model = begin(config)
    pipeline = stages.Pipeline(model, config, world)
    if world.is_main:  # the others would wait for what rank 0 never sends
        with pytest.raises(ValueError) as error:
            pipeline.schedule.step(sequences[12:, :-1])
        return str(error.value)
    return None


def places_in_a_grid(world: World) -> list | None:
    """Of each rank, in its column and in its row, on rank 0."""
    mesh = stages.grid(world, data=1, pipe=3)
    return world.gather([dist.get_rank(mesh[side].get_group()) for side in ("data", "pipe")])


def run_trainings(world_rank: int, folder: Path) -> None:
    """Whole runs by `train`: ten steps at once, and five and then five more, also on another number of processes."""
    common = dict(SMALL, sequences=13, log_every=3, save_every=4, schedule="1f1b")
    runs = [
        (2, lab.Config(**common, max_steps=10, run="at-once")),
        (2, lab.Config(**common, max_steps=5, run="in-two")),
        (2, lab.Config(max_steps=10, resume="runs/in-two")),
        (2, lab.Config(**common, max_steps=5, run="wider")),
        (4, lab.Config(max_steps=10, resume="runs/wider")),
    ]
    for number, (ranks, config) in enumerate(runs):
        if world_rank < ranks:
            os.environ |= dict(
                RANK=str(world_rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(world_rank)
            )
            config.given = {"max_steps"}
            with_group(
                number, world_rank, ranks, folder, lambda _, config=config: lab.train(config)
            )


def with_group(name, rank: int, ranks: int, folder: Path, work):
    """Call `work(world)` in a process group of the first `ranks` processes; the others go on."""
    if rank >= ranks:
        return None
    store = dist.FileStore(f"{folder}/group-{name}", ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=30)
    )
    world = World(rank, ranks, torch.device("cpu"), store)
    lab.distributed.start = lambda _: world  # for `train`, which leaves the group itself
    result = work(world)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def process(rank: int, folder: Path) -> None:
    """One of the four: everything below runs in the same order everywhere."""
    results = {}
    for ranks in (2, 3, 4):

        def work(world, ranks=ranks):
            done = {
                name: run_case(lab.Config(**settings), world)
                for name, (wanted, settings) in CASES.items()
                if wanted == ranks
            }
            if ranks == 3:
                done |= {"grid": places_in_a_grid(world)}
                done |= {
                    "handout": as_in_the_handout(world),
                    "short batch": a_short_batch_as_it_is(world),
                }
            return done

        results |= with_group(f"of-{ranks}", rank, ranks, folder, work) or {}
    torch.set_default_dtype(torch.float32)
    run_trainings(rank, folder)
    if rank == 0:
        torch.save(results, folder / "results.pt")


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _single_precision():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict:
    """What the four processes got, by case; "folder" is where they ran."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "odd.txt").write_bytes(b"A text of 51 bytes: not a multiple of anything...\n!")
    together([Forked(__file__, rank, cwd=folder) for rank in range(4)])
    return {**torch.load(folder / "results.pt", weights_only=False), "folder": folder}


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_equals_one_process(ran, name, monkeypatch):
    monkeypatch.chdir(ran["folder"])
    _, settings = CASES[name]
    losses, weights = alone(lab.Config(**settings))
    # A loss sums up to 144 targets behind 9 layers of about five sums over widths of 16 to 100: 3,000 terms, an eps of fp64
    # (2.2e-16) each, and as many again in each of 6 steps: 4e-12. What AdamW makes of a gradient near 0 may be 100 times that.
    for of_rank in ran[name]["losses"]:  # the loss of the whole batch is known to every rank
        assert of_rank == pytest.approx(losses, rel=4e-10)
    assert losses[-1] < 0.9 * losses[0]
    assert ran[name]["weights"].keys() == weights.keys()
    for key, weight in weights.items():
        assert (ran[name]["weights"][key] - weight).norm() <= 4e-10 * weight.norm(), key


@pytest.mark.parametrize("name", CASES)
def test_the_order_has_the_bubble_of_the_papers(ran, name):
    ranks, settings = CASES[name]
    config = lab.Config(**settings)
    wanted = {
        (stage, part)
        for stage in range(ranks * config.stages_per_rank)
        for part in range(config.micro_batches)
    }
    (events,) = ran[name]["events"]
    done = {kind: [(e.stage, e.micro_batch) for e in events if e.kind == kind] for kind in "FBIW"}
    assert sorted(done["F"]) == sorted(done["B"] + done["I"]) == sorted(wanted)
    assert sorted(done["I"]) == sorted(done["W"])
    assert all(e.stage in stages.stages_of_rank(e.rank, ranks, config) for e in events)
    # That was: everything is computed once. And in an order that idles as the formulas say.
    simulated = schedule.simulate(
        schedule.order_of(events), lambda kind, _: 2.0 if kind == "B" else 1.0
    )
    theory = schedule.bubble_in_theory(
        config.schedule, ranks, config.stages_per_rank, config.micro_batches
    )
    assert theory is None or schedule.bubble_share(simulated, ranks) == pytest.approx(theory)
    assert (theory is None) == (name == "zbv-4")  # 4 micro-batches are too few


@pytest.mark.parametrize(
    "name, least", [("gpipe", 1), ("1f1b", 1), ("interleaved", 4), ("zb", 4), ("zbv", 7)]
)
def test_formulas_hold_from_so_many_micro_batches_on(name, least):
    known = [schedule.bubble_in_theory(name, 4, 2, number) is not None for number in range(1, 9)]
    assert known == [number >= least for number in range(1, 9)]


def test_zb_v_is_never_idle_between_its_first_and_last_work(ran):
    order = schedule.order_of(ran["zbv-2"]["events"][-1])
    assert schedule.own_bubble_share(schedule.simulate(order, lambda *_: 1.0), 2) == pytest.approx(
        0
    )


def peaks(ran: dict, name: str) -> list[int]:
    """Bytes that each rank held at most."""
    return [peak for peak, _ in ran[name]["memory"]]


def test_1f1b_holds_the_activations_of_as_many_micro_batches_as_stages_gpipe_of_all(ran):
    gpipe, one_forward_one_backward = (
        peaks(ran, name) for name in ("gpipe-twice-2", "1f1b-twice-2")
    )
    # One micro-batch more would be half as much again, or twice; what is kept once, whatever the schedule, is far less.
    assert one_forward_one_backward[0] == pytest.approx(gpipe[0] * 2 / 8, rel=0.2)
    assert one_forward_one_backward[1] == pytest.approx(gpipe[1] * 1 / 8, rel=0.2)


def test_zero_bubble_lets_go_of_everything_after_a_step(ran):
    assert max(peaks(ran, "zb1-2") + peaks(ran, "zbv-2")) < max(peaks(ran, "gpipe-2"))


def losses_of(folder: Path, name: str) -> dict[int, float]:
    """Step → loss of a run's lines, but for those whose window is another one where a run ended at step 5."""
    lines = map(
        json.loads,
        (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines(),
    )
    return {
        line["step"]: line["train/loss"]
        for line in lines
        if "train/loss" in line and line["step"] not in (5, 6)
    }


def test_a_run_in_two_parts_equals_a_run_at_once(ran):
    parts = {}
    for name in ("at-once", "in-two", "wider"):
        folder = checkpoint.latest(ran["folder"] / "runs" / name / "checkpoints")
        assert folder.name == "step-10"
        parts[name] = (
            checkpoint.load_weights(folder),
            checkpoint.load_tensors(folder / "optimizer.pt"),
        )
    for name in (
        "in-two",
        "wider",
    ):  # each layer is computed whole, whatever the ranks: the same sums in one order
        for key, weight in parts["at-once"][0].items():
            assert torch.equal(parts[name][0][key], weight), (name, key)
        for key, states in parts["at-once"][1].items():
            assert all(torch.equal(parts[name][1][key][which], states[which]) for which in states)
        assert losses_of(ran["folder"], name) == pytest.approx(
            losses_of(ran["folder"], "at-once"), rel=1e-5
        )


def test_a_run_leaves_picture_curves_and_memory(ran, report_of):
    folder = ran["folder"] / "runs" / "at-once"
    assert (folder / "schedule.png").stat().st_size > 5000
    log = (folder / "train.log").read_text()
    assert "rank 1 (stage 1)" in log and "MiB" in log and "in theory 20.0%" in log
    assert "pipeline/bubble_share" in (folder / "metrics.jsonl").read_text()
    page = report_of(folder)
    assert "<h2>Training curves</h2>" in page and "LanguageModel(" in page
    tokens, vocab = map(
        int, re.search(r"sequences of (\d+) tokens, vocabulary (\d+)", log).groups()
    )
    config = json.loads((folder / "config.json").read_text())
    layer = (
        4 * config["d_model"] ** 2
        + 2 * config["d_model"] * config["dim_feedforward"]
        + 2 * tokens * config["d_model"]
    )
    flops = 6 * (config["num_layers"] * layer + config["d_model"] * vocab)
    assert f'FLOPs of a training token</th><td><data value="{flops}"' in page


# ---- grids -----------------------------------------------------------------------------------------------------------


def test_a_grid_of_many_and_of_one(ran):
    assert ran["grid"] == [[0, 0], [0, 1], [0, 2]]
    mesh = stages.grid(World(0, 1, torch.device("cpu")), data=1, pipe=1)
    assert (
        mesh.mesh_dim_names == ("data", "pipe")
        and dist.get_world_size(mesh["data"].get_group()) == 1
    )


@pytest.mark.parametrize(
    "sizes", [{"data": 2}, {"data": 3, "pipe": 2}, {"data": -1, "pipe": -4}, {"data": 0}]
)
def test_a_grid_that_does_not_fit(sizes):
    with pytest.raises(UserError, match="4 processes do not form a grid of data"):
        stages.grid(World(0, 4, torch.device("cpu")), **sizes)


# ---- the handout's model and settings --------------------------------------------------------------------------------


@pytest.mark.parametrize("post_norm", [True, False])
def test_a_layer_is_torchs_own_of_the_same_weights(post_norm):
    torch.manual_seed(0)
    config = lab.Config(**SMALL, post_norm=post_norm)
    names = dict(
        query_key_value="self_attn.in_proj",
        out="self_attn.out_proj",
        norm1="norm1",
        norm2="norm2",
        feedforward_0="linear1",
        feedforward_2="linear2",
    )
    ours = stages.Layer(config)
    theirs = torch.nn.TransformerEncoderLayer(
        16, 2, 32, 0.0, batch_first=True, norm_first=not post_norm
    )
    weights = {}
    for name, weight in ours.state_dict().items():
        part, kind = name.replace("feedforward.", "feedforward_").split(".")
        weights[names[part] + ("_" if part == "query_key_value" else ".") + kind] = weight
    theirs.load_state_dict(weights)
    x, mask = torch.randn(2, 9, 16), torch.nn.Transformer.generate_square_subsequent_mask(9)
    torch.testing.assert_close(ours(x), theirs(x, src_mask=mask))


def test_the_handouts_preset_learns_goes_on_and_gives_way_to_flags(tmp_path, monkeypatch):
    def settings(**flags):
        config = lab.Config(preset="handout", build="by_hand", **flags)
        config.given = set(flags)
        return config.fill_in()

    monkeypatch.chdir(tmp_path)
    assert (
        settings(lr=0.5).lr == 0.5
        and settings(lr=0.5).epochs == 200
        and settings(lr=0.5).momentum == 0
    )
    lab.train(settings(max_steps=4, run="whole"))
    lab.train(settings(max_steps=2, run="parts"))
    resumed = lab.Config(max_steps=4, resume="runs/parts")
    resumed.given = {"max_steps"}
    lab.train(resumed)
    whole, parts = (
        checkpoint.load_weights(Path(f"runs/{name}/checkpoints/step-4"))
        for name in ("whole", "parts")
    )
    assert all(
        torch.equal(whole[name], parts[name]) for name in whole
    )  # the dropped activations are the same
    log = Path("runs/whole/train.log").read_text()
    assert "Dropout(p=0.1" in log and "tokens/s, the median of" in log


def test_only_the_steps_of_lines_are_watched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    looks, now = [], schedule.Recorder._now
    monkeypatch.setattr(
        schedule.Recorder, "_now", lambda recorder: looks.append(1) or now(recorder)
    )
    lab.train(lab.Config(**TOY, max_steps=8, log_every=4))
    assert len(looks) == 2 * 4 * (2 + 2 + 1)  # two steps, 4 micro-batches, three pieces of work


def test_the_speed_after_a_resume_leaves_out_the_steps_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lab.train(lab.Config(**TOY, max_steps=4, log_every=4, run="whole"))
    monkeypatch.setattr(
        Run, "stop_asked", lambda run: not run.state
    )  # the first step is the last, between two lines
    lab.train(lab.Config(**TOY, max_steps=4, log_every=4, run="parts"))
    monkeypatch.setattr(
        lab, "time", SimpleNamespace(perf_counter=count().__next__)
    )  # a second between two looks at it
    lab.train(lab.Config(resume="runs/parts"))
    lines = [json.loads(line) for line in Path("runs/parts/metrics.jsonl").read_text().splitlines()]
    [speed] = [
        line["speed/tokens_per_second"] for line in lines if "speed/tokens_per_second" in line
    ]
    length = data.load(lab.Config(**TOY))[0].shape[1] - 1
    assert speed == (5 + 8 + 5) * length  # sequences of steps 2 to 4
    assert losses_of(tmp_path, "parts") == losses_of(tmp_path, "whole") != {}  # of all four


# ---- the handout's mistakes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_without_the_mask_a_later_token_changes_earlier_logits(causal):
    torch.manual_seed(0)
    model = stages.LanguageModel(50, 9, lab.Config(**SMALL, causal=causal))
    tokens = torch.randint(50, (2, 9))
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 50
    before, after = model(tokens)[:, :6], model(changed)[:, :6]
    assert torch.equal(before, after) == causal


def test_rank_0_or_else_fails_on_the_middle_of_three_stages(ran):
    first, middle, last = ran["handout"]
    assert first == "none" and last.startswith("loss")
    assert "non-empty" in middle


def test_the_mean_of_micro_batch_means_is_not_the_loss_of_a_short_batch():
    torch.manual_seed(0)
    sequences = torch.randint(50, (5, 10))
    tokens, target = data.batch_of_step(
        sequences, 0, 8, seed=0
    )  # 5 rows of 8: 2, 2, 1 and 0 in micro-batches of 2
    model = stages.LanguageModel(50, 9, lab.Config(**SMALL))
    real = (target >= 0).any(1)
    logits = model(tokens)
    right = F.cross_entropy(logits[real].flatten(0, 1), target[real].flatten())
    parts = list(zip(logits.split(2), target.split(2)))
    ours = sum(stages.summed_loss(*part) for part in parts) / 45
    assert ours.item() == pytest.approx(
        right.item(), rel=45 * 1.2e-7
    )  # an eps of fp32 for each target
    means = torch.stack([stages.summed_loss(*part) / (part[1] >= 0).sum() for part in parts])
    assert means.isnan().any()  # the empty one
    assert abs(means[:3].mean() - right) > 1e-4


def test_the_handouts_last_batch_may_be_too_short_to_cut(ran):
    assert "Expecting 4 arg_mbs but got 1" in ran["short batch"]


def test_a_schedule_is_given_nothing_but_what_torch_2_11_takes():
    config = lab.Config(**SMALL)
    sequences, model = begin(config)
    pipeline = stages.Pipeline(model, config, World(0, 1, torch.device("cpu")))
    step = pipeline.schedule.step

    def step_of_2_11(*args, target=None, losses=None, return_outputs=True, **for_the_model):
        assert (
            not for_the_model
        )  # there `loss_kwargs` was handed on to the model, which knows no such argument
        return step(*args, target=target, losses=losses, return_outputs=return_outputs)

    pipeline.schedule.step = step_of_2_11
    assert pipeline.forward_backward(*data.batch_of_step(sequences, 0, 8, seed=1)) > 0


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_held_bytes_count_what_autograd_keeps_once():
    weight = torch.nn.Parameter(torch.ones(10))
    held = report.HeldBytes([weight])
    with held.counting():
        x = torch.ones(10, requires_grad=True)
        y = (x * weight).exp()  # keeps x, and the weight which is not counted; exp keeps its result
        z = y * y  # keeps y, which is counted already
    assert held.now == held.peak == 2 * 10 * 4
    z.sum().backward()
    del y, z
    assert held.now == 0 and held.peak == 80
    with held.counting():
        y = (x * weight).exp()
    del y  # without a backward pass: the graph goes, and what it kept
    assert held.now == 0


def test_simulation_refuses_an_order_that_waits_for_itself():
    with pytest.raises(ValueError, match="waits"):
        schedule.simulate({0: [("B", 0, 0), ("F", 0, 0)]}, lambda *_: 1.0)


def test_text_becomes_sequences_that_lose_nothing(tmp_path):
    (tmp_path / "b.txt").write_bytes(bytes(range(100, 117)))
    (tmp_path / "a.txt").write_bytes(bytes(range(90, 100)))
    sequences, vocab = data.load(lab.Config(data=str(tmp_path), length=8))
    assert vocab == 256 and sequences.shape == (4, 9)
    assert sequences[:, 1:][sequences[:, 1:] >= 0].tolist() == list(
        range(91, 117)
    )  # each but the first once
    assert sequences[:, 0].tolist() == [90, 98, 106, 114]
    rows = pyarrow.table({"text": ["", " = A = \n", " b \n"]})  # as the hub has them
    pyarrow.parquet.write_table(rows, tmp_path / "c.parquet")
    assert data.read_text(tmp_path / "c.parquet") == b"\n = A = \n b \n"
    assert data.read_text(tmp_path) == bytes(range(90, 117)) + b"\n = A = \n b \n"


def test_an_epoch_shows_every_sequence_once():
    sequences = torch.arange(1, 14).unsqueeze(1).expand(-1, 4)
    for epoch in (0, 1):
        rows = torch.cat(
            [data.batch_of_step(sequences, 2 * epoch + step, 8, seed=3)[1] for step in (0, 1)]
        )
        assert sorted(rows[:, 0].tolist()) == [-1, -1, -1, *range(1, 14)]
    assert not torch.equal(
        data.batch_of_step(sequences, 0, 8, 3)[1], data.batch_of_step(sequences, 2, 8, 3)[1]
    )


@pytest.mark.parametrize("layers, count", [(8, 3), (7, 4), (4, 4), (5, 1)])
def test_layers_are_shared_out_evenly(layers, count):
    parts = stages.layers_of_stages(layers, count)
    assert [layer for part in parts for layer in part] == list(range(layers)) and len(
        parts
    ) == count
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, ranks, words",
    [
        (dict(micro_batches=0), 2, "--micro_batches 0"),
        (dict(batch_size=6), 2, "does not divide"),
        (dict(schedule="fifo"), 2, "choose gpipe, 1f1b"),
        (dict(schedule="interleaved"), 2, "--stages_per_rank 2"),
        (dict(schedule="zbv"), 2, "--stages_per_rank 2"),
        (dict(schedule="zbv", stages_per_rank=3), 2, "two stages a rank"),
        (dict(schedule="1f1b", stages_per_rank=2), 2, "one stage a rank"),
        (dict(num_layers=3), 4, "more than --num_layers 3"),
        (dict(num_layers=3, schedule="zbv", stages_per_rank=2), 2, "more than --num_layers 3"),
        (dict(schedule="1f1b", micro_batches=2), 4, "as many micro-batches as stages, 4"),
        (
            dict(schedule="zb", batch_size=9, micro_batches=9),
            4,
            "equal rounds; give --micro_batches 3",
        ),
        (dict(nhead=5), 2, "multiple of --nhead 5"),
        (dict(data="nowhere.txt"), 2, "No such file"),
        (dict(data="."), 2, "no .txt or .parquet file"),
    ],
)
def test_mistakes_are_one_line(settings, ranks, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(words):
        config = checked(lab.Config(**settings))
        config.check(ranks)
        data.load(config)


def test_a_run_that_goes_on_is_checked_as_a_whole(ran, monkeypatch):
    monkeypatch.chdir(ran["folder"])
    config = lab.Config(resume="runs/at-once", micro_batches=3)  # the run has --batch_size 8
    config.given = {"micro_batches"}
    with refused("--micro_batches 3 does not divide --batch_size 8"):
        lab.train(config)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = lab.Config(**SMALL, optimizer="sgd", lr=1e30, max_steps=5)
    with refused("smaller --lr"):
        lab.train(config)


def test_the_loss_that_is_printed_is_the_global_one(tmp_path):
    output = forked_ranks(2, "labs/pipeline/__main__.py", cwd=tmp_path)
    lines = [line for line in output.splitlines() if line.startswith("step")]
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert len(losses) == 30 and losses[-1] < 0.1
    # A mean over all targets of the three batches, of equal size, till then.
    assert losses[0] == pytest.approx(sum(alone(lab.Config(), torch.float32)[0][:3]) / 3, abs=1e-4)


def test_one_process_alone(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    lab.train(lab.Config(epochs=2, schedule="zbv", stages_per_rank=2, build="by_hand"))
    out, errors = capfd.readouterr()
    assert "step      6" in out and not errors


def test_one_process_under_torchrun_is_a_mistake(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with refused("needs two processes"):
        lab.train(lab.Config())


if __name__ == "__main__":  # one of the four processes
    process(int(sys.argv[1]), Path.cwd())
