"""The pipeline against one process that sees the whole batch.

This file, run as a script (see the end), is one of four processes that run all cases for 2, 3 and 4
ranks; the first writes down the results.
"""

import json
import os
import re
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT, Forked, forked_ranks
from helpers import refused, together

from engine import checkpoint
from engine.config import checked
from engine.distributed import World, process_grid
from engine.errors import UserError
from labs.pipeline import __main__ as lab
from labs.pipeline import data, mistakes, report, schedule, stages

STEPS = 6
CPU = torch.device("cpu")
SMALL = dict(
    d_model=16,
    nhead=2,
    dim_feedforward=32,
    num_layers=5,
    batch_size=8,
    micro_batches=4,
    build="by_hand",
)
# 13 sequences in batches of 8: the second batch has 5 rows, so that one micro-batch is short and
# one is empty.
TOY = dict(SMALL, sequences=13, optimizer="sgd", lr=0.1)
ADAM = dict(TOY, num_layers=9, optimizer="adamw", lr=1e-2)
V = dict(schedule="zbv", stages_per_rank=2)
TWICE = dict(TOY, batch_size=16, micro_batches=8)
CASES = {  # name: (ranks, settings); 9 and 5 layers do not divide
    "gpipe-2": (2, TOY),
    "gpipe-4": (4, ADAM),
    "1f1b-4": (4, dict(ADAM, schedule="1f1b")),
    "interleaved-4": (4, dict(ADAM, schedule="interleaved", stages_per_rank=2)),
    "zb-4": (4, dict(ADAM, schedule="zb", stages_per_rank=2)),
    "zbv-4": (4, {**ADAM, **V}),
    "traced-gpipe-3": (3, dict(TOY, build="traced", num_layers=4)),
    "traced-zbv-2": (2, {**TOY, **V, "build": "traced", "num_layers": 4}),
    "text-zb-3": (
        3,
        dict(TOY, schedule="zb", stages_per_rank=2, data="odd.txt", length=7, num_layers=7),
    ),
    "post-norm-2": (2, dict(TOY, post_norm=True, num_layers=3)),
    "gpipe-twice-2": (2, TWICE),
    "1f1b-twice-2": (2, dict(TWICE, schedule="1f1b")),
}


def begin(config: lab.Config, dtype=torch.float64):
    """The data and the whole model, the same in every process.

    In fp64: AdamW divides a gradient by its own size, which makes much of the rounding error of a
    gradient that is truly 0, such as that of a key's bias.
    """
    torch.set_default_dtype(dtype)
    sequences, vocabulary = data.load(config)
    torch.manual_seed(config.seed)
    return sequences, stages.LanguageModel(vocabulary, sequences.shape[1] - 1, config)


def train_alone(config: lab.Config, dtype=torch.float64):
    """One process, the whole batch at once, only autograd: the losses and the final weights."""
    sequences, model = begin(config, dtype)
    optimizer, losses = lab.make_optimizer(config, model.parameters()), []
    for step in range(1, STEPS + 1):
        tokens, target = data.batch_of_step(sequences, step, config.batch_size, config.seed)
        real = (target >= 0).any(1)  # without the rows that fill up a short batch
        logits = model(tokens[real]).flatten(0, 1)
        loss = F.cross_entropy(logits, target[real].flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


# ---- what the four processes do ------------------------------------------------------------------


def run_case(config: lab.Config, world: World) -> dict:
    """The same in a pipeline: losses of all ranks, weights, events and memory, on rank 0."""
    sequences, model = begin(config)
    pipeline = stages.Pipeline(model, config, world)
    optimizer, losses = lab.make_optimizer(config, pipeline.parameters.values()), []
    measured = report.Measured(world, pipeline)
    for step in range(1, STEPS + 1):
        tokens, target = data.batch_of_step(sequences, step, config.batch_size, config.seed)
        optimizer.zero_grad()
        pipeline.recorder.take()
        with measured.counting() if step == STEPS else nullcontext():
            loss = pipeline.forward_backward(tokens, target)
        losses.append(loss / int((target >= 0).sum()))
        optimizer.step()
    measured.add_step()
    measured.add_memory()
    weights, _ = lab.gather_model(pipeline, optimizer) or (None, None)
    return dict(
        losses=world.gather(losses), weights=weights, events=measured.steps, memory=measured.memory
    )


def places_in_a_grid(world: World) -> list | None:
    """Each rank's place in its column and in its row, on rank 0."""
    mesh = process_grid(world, data=1, pipe=3)
    return world.gather([dist.get_rank(mesh[side].get_group()) for side in ("data", "pipe")])


def run_trainings(rank: int, folder: Path) -> None:
    """Whole runs by `train`: ten steps at once; and five steps on two ranks, then five on four."""
    common = dict(SMALL, sequences=13, log_every=3, save_every=4, schedule="1f1b", dropout=0.0)
    runs = [
        (2, lab.Config(**common, max_steps=10, run="at-once")),
        (2, lab.Config(**common, max_steps=5, run="in-two")),
        (4, lab.Config(max_steps=10, resume="runs/in-two")),
    ]
    for number, (ranks, config) in enumerate(runs):
        if rank < ranks:
            os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
            config.given = {"max_steps"}
            with_group(number, rank, ranks, folder, lambda _, config=config: lab.train(config))


def with_group(name, rank: int, ranks: int, folder: Path, work):
    """Call `work(world)` in a process group of the first `ranks` processes."""
    if rank >= ranks:
        return None
    store = dist.FileStore(f"{folder}/group-{name}", ranks)
    hours = timedelta(minutes=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=hours)
    world = World(rank, ranks, CPU, store)
    lab.distributed.start = lambda _: world  # for `train`, which leaves the group itself
    result = work(world)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def run_process(rank: int, folder: Path) -> None:
    """One of the four: everything below runs in the same order everywhere."""
    results = {}
    for ranks in (2, 3, 4):

        def work(world, ranks=ranks):
            done = {}
            for name, (wanted, settings) in CASES.items():
                if wanted == ranks:
                    done[name] = run_case(lab.Config(**settings), world)
            if ranks == 3:
                done["grid"] = places_in_a_grid(world)
                done["wrong"] = world.gather(mistakes.rank_0_or_else(world))
                done["right"] = world.gather(mistakes.ask_the_stages(world))
            return done

        results |= with_group(f"of-{ranks}", rank, ranks, folder, work) or {}
    torch.set_default_dtype(torch.float32)
    run_trainings(rank, folder)
    if rank == 0:
        torch.save(results, folder / "results.pt")


# ---- the tests -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _single_precision():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict:
    """What the four processes found, by case; "folder" is where they ran."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "odd.txt").write_bytes(b"A text of 51 bytes: not a multiple of anything...\n!")
    together([Forked(__file__, rank, cwd=folder) for rank in range(4)])
    return {**torch.load(folder / "results.pt", weights_only=False), "folder": folder}


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_equals_one_process(ran, name, monkeypatch):
    monkeypatch.chdir(ran["folder"])
    _, settings = CASES[name]
    losses, weights = train_alone(lab.Config(**settings))
    # A loss sums up to 144 targets, each after 9 layers of about five sums over widths of 16 to
    # 100: 3,000 terms with fp64's eps (2.2e-16), and as many again in each of 6 steps: 4e-12. AdamW may
    # make 100 times that of a gradient near 0.
    for of_rank in ran[name]["losses"]:
        assert of_rank == pytest.approx(losses, rel=4e-10)
    assert losses[-1] < 0.95 * losses[0]
    assert ran[name]["weights"].keys() == weights.keys()
    for key, weight in weights.items():
        assert (ran[name]["weights"][key] - weight).norm() <= 4e-10 * weight.norm(), key


@pytest.mark.parametrize("name", CASES)
def test_the_order_has_the_bubble_of_the_papers(ran, name):
    ranks, settings = CASES[name]
    config = lab.Config(**settings)
    numbers = range(ranks * config.stages_per_rank), range(config.micro_batches)
    wanted = [(stage, part) for stage in numbers[0] for part in numbers[1]]
    (events,) = ran[name]["events"]
    done = {kind: [(e.stage, e.micro_batch) for e in events if e.kind == kind] for kind in "FBIW"}
    # Everything is computed once, by the rank that has the stage ...
    assert sorted(done["F"]) == sorted(done["B"] + done["I"]) == wanted
    assert sorted(done["I"]) == sorted(done["W"])
    assert all(e.stage in stages.stages_of_rank(e.rank, ranks, config) for e in events)
    # ... and in an order that is idle as the formulas say.
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
def test_formulas_hold_from_a_number_of_micro_batches(name, least):
    known = [schedule.bubble_in_theory(name, 4, 2, number) is not None for number in range(1, 9)]
    assert known == [number >= least for number in range(1, 9)]


def test_zb_v_is_never_idle_between_its_first_and_last_work(ran):
    order = schedule.order_of(ran["traced-zbv-2"]["events"][-1])
    events = schedule.simulate(order, lambda *_: 1.0)
    assert schedule.own_bubble_share(events, 2) == pytest.approx(0)


def test_activations_held_by_the_schedules(ran):
    """1F1B holds as many micro-batches as stages, GPipe all; zero bubble releases all."""
    peaks = {name: [peak for peak, _ in ran[name]["memory"]] for name in CASES}
    gpipe, one_forward_one_backward = peaks["gpipe-twice-2"], peaks["1f1b-twice-2"]
    # One micro-batch more would be half as much again, or twice.
    assert one_forward_one_backward[0] == pytest.approx(gpipe[0] * 2 / 8, rel=0.2)
    assert one_forward_one_backward[1] == pytest.approx(gpipe[1] * 1 / 8, rel=0.2)
    assert max(peaks["traced-zbv-2"]) < max(peaks["gpipe-2"])


def test_a_run_in_two_parts_equals_a_run_at_once(ran):
    """Bit for bit, although the second part ran on another number of processes."""
    parts = []
    for name in ("at-once", "in-two"):
        folder = checkpoint.latest(ran["folder"] / "runs" / name / "checkpoints")
        assert folder.name == "step-10"
        moments = checkpoint.load_tensors(folder / "optimizer.pt")
        parts.append((checkpoint.load_weights(folder), moments))
    (weights, moments), (other_weights, other_moments) = parts
    for key, weight in weights.items():
        assert torch.equal(other_weights[key], weight), key
        for name, moment in moments[key].items():
            assert torch.equal(other_moments[key][name], moment), key


def test_a_run_leaves_picture_curves_and_memory(ran, report_of):
    folder = ran["folder"] / "runs" / "at-once"
    assert (folder / "schedule.png").stat().st_size > 5000
    log = (folder / "train.log").read_text()
    assert "rank 1 (stage 1)" in log and "MiB" in log and "in theory 20.0%" in log
    assert "pipeline/bubble_share" in (folder / "metrics.jsonl").read_text()
    page = report_of(folder)
    assert "<h2>Training curves</h2>" in page and "LanguageModel(" in page
    sizes = re.search(r"sequences of (\d+) tokens, vocabulary (\d+)", log)
    length, vocabulary = map(int, sizes.groups())
    width, layers = SMALL["d_model"], SMALL["num_layers"]
    layer = 4 * width**2 + 2 * width * SMALL["dim_feedforward"] + 2 * length * width
    flops = 6 * (layers * layer + width * vocabulary)
    assert f'FLOPs of a training token</th><td><data value="{flops}"' in page


def test_grids(ran):
    assert ran["grid"] == [[0, 0], [0, 1], [0, 2]]
    mesh = process_grid(World(0, 1, CPU), data=1, pipe=1)
    assert mesh.mesh_dim_names == ("data", "pipe")
    for sizes in ({"data": 2}, {"data": 3, "pipe": 2}, {"data": -1, "pipe": -4}):
        with pytest.raises(UserError, match="4 processes do not form a grid of data"):
            process_grid(World(0, 4, CPU), **sizes)


@pytest.mark.parametrize("post_norm", [True, False])
def test_a_layer_equals_torchs_with_the_same_weights(post_norm):
    torch.manual_seed(0)
    names = dict(
        query_key_value="self_attn.in_proj_",
        out="self_attn.out_proj.",
        norm1="norm1.",
        norm2="norm2.",
        feedforward_0="linear1.",
        feedforward_2="linear2.",
    )
    ours = stages.Layer(lab.Config(**SMALL, post_norm=post_norm))
    theirs = torch.nn.TransformerEncoderLayer(
        16, 2, 32, 0.0, batch_first=True, norm_first=not post_norm
    )
    weights = {}
    for name, weight in ours.state_dict().items():
        part, kind = name.replace("feedforward.", "feedforward_").split(".")
        weights[names[part] + kind] = weight
    theirs.load_state_dict(weights)
    x, mask = torch.randn(2, 9, 16), torch.nn.Transformer.generate_square_subsequent_mask(9)
    torch.testing.assert_close(ours(x), theirs(x, src_mask=mask))


def handout_settings(**flags) -> lab.Config:
    """As the command line makes them."""
    config = lab.Config(preset="handout", build="by_hand", **flags)
    config.given = set(flags)
    return config.fill_in()


def test_the_handouts_preset_resumes_and_gives_way_to_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert handout_settings(lr=0.5).lr == 0.5 and handout_settings(lr=0.5).epochs == 200
    lab.train(handout_settings(max_steps=4, log_every=2, run="at-once"))
    recorded, now = [], schedule.Recorder._now
    monkeypatch.setattr(schedule.Recorder, "_now", lambda self: recorded.append(1) or now(self))
    lab.train(handout_settings(max_steps=2, log_every=2, run="parts"))
    assert len(recorded) == 2 * (2 + 2 + 1)  # one of two steps: 2 micro-batches, F, B and loss
    resumed = lab.Config(max_steps=4, resume="runs/parts")
    resumed.given = {"max_steps"}
    lab.train(resumed)
    at_once, parts = (
        checkpoint.load_weights(Path(f"runs/{name}/checkpoints/step-4"))
        for name in ("at-once", "parts")
    )
    assert all(torch.equal(at_once[name], parts[name]) for name in at_once)  # same dropout too
    assert "Dropout(p=0.1" in Path("runs/at-once/train.log").read_text()
    invalid = lab.Config(resume="runs/parts", micro_batches=3)
    invalid.given = {"micro_batches"}
    with refused("--micro_batches 3 does not divide --batch_size 4"):
        lab.train(invalid)
    with refused("is not the data that this run was started with"):
        Path("other.txt").write_text("another text")
        lab.train(lab.Config(resume="runs/parts", data="other.txt", max_steps=9))


# ---- the handout's mistakes ----------------------------------------------------------------------


def test_only_without_the_mask_a_later_token_changes_earlier_logits():
    for causal in (True, False):
        torch.manual_seed(0)
        model = stages.LanguageModel(50, 9, lab.Config(**SMALL, causal=causal))
        tokens = torch.randint(50, (2, 9))
        changed = tokens.clone()
        changed[:, 6] = (changed[:, 6] + 1) % 50
        assert torch.equal(model(tokens)[:, :6], model(changed)[:, :6]) == causal
    # No honest model predicts digits drawn by chance better than ln 10 = 2.303.
    assert mistakes.loss_on_random_digits(causal=False, steps=150) < 2.2
    assert mistakes.loss_on_random_digits(causal=True, steps=150) > 2.29


def test_rank_0_or_else_fails_on_the_middle_of_three_stages(ran):
    first, middle, last = ran["wrong"]
    assert first == "no loss" and "non-empty" in middle
    assert ran["right"] == [last] * 3 and last.startswith("loss")


def test_unequal_micro_batches_and_short_batches():
    mean_of_means, mean = mistakes.losses_of_unequal_parts()
    assert abs(mean_of_means - mean) > 0.01
    error, loss = mistakes.step_with_a_short_batch()
    assert "Expecting 4 arg_mbs but got 1" in error and 4 < loss < 5


def test_a_schedule_gets_only_what_torch_2_11_takes():
    sequences, model = begin(lab.Config(**SMALL))
    pipeline = stages.Pipeline(model, lab.Config(**SMALL), World(0, 1, CPU))
    step = pipeline.schedule.step

    def step_of_2_11(*args, target=None, losses=None, return_outputs=True, **for_the_model):
        assert not for_the_model  # 2.11 passes `loss_kwargs` on to the model, which fails
        return step(*args, target=target, losses=losses, return_outputs=return_outputs)

    pipeline.schedule.step = step_of_2_11
    assert pipeline.forward_backward(*data.batch_of_step(sequences, 1, 8, seed=1)) > 0


# ---- the parts -----------------------------------------------------------------------------------


def test_held_bytes_count_what_autograd_keeps_once():
    weight = torch.nn.Parameter(torch.ones(10))
    held = report.HeldBytes([weight])
    with held.counting():
        x = torch.ones(10, requires_grad=True)
        y = (
            x * weight
        ).exp()  # keeps x, and the weight, which is not counted; exp keeps its result
        z = y * y  # keeps y, which is counted already
    assert held.now == held.peak == 2 * 10 * 4
    z.sum().backward()
    del y, z
    assert held.now == 0 and held.peak == 80


def test_simulation_refuses_an_order_that_waits_for_itself():
    with pytest.raises(ValueError, match="waits"):
        schedule.simulate({0: [("B", 0, 0), ("F", 0, 0)]}, lambda *_: 1.0)


def test_text_becomes_sequences_that_lose_nothing(tmp_path):
    (tmp_path / "b.txt").write_bytes(bytes(range(100, 117)))
    (tmp_path / "a.txt").write_bytes(bytes(range(90, 100)))
    sequences, vocabulary = data.load(lab.Config(data=str(tmp_path), length=8))
    assert vocabulary == 256 and sequences.shape == (4, 9)
    targets = sequences[:, 1:]
    assert targets[targets >= 0].tolist() == list(range(91, 117))  # each but the first once
    assert sequences[:, 0].tolist() == [90, 98, 106, 114]


def test_an_epoch_shows_every_sequence_once():
    sequences = torch.arange(1, 14).unsqueeze(1).expand(-1, 4)
    epochs = []
    for steps in ((1, 2), (3, 4)):
        rows = [data.batch_of_step(sequences, step, 8, seed=3)[1][:, 0] for step in steps]
        epochs.append(torch.cat(rows).tolist())
        assert sorted(epochs[-1]) == [-1, -1, -1, *range(1, 14)]
    assert epochs[0] != epochs[1]


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, ranks, words",
    [
        (dict(micro_batches=0), 2, "--micro_batches 0"),
        (dict(batch_size=6), 2, "does not divide"),
        (dict(schedule="fifo"), 2, "choose gpipe, 1f1b"),
        (dict(schedule="interleaved"), 2, "--stages_per_rank 2"),
        (dict(schedule="zbv", stages_per_rank=3), 2, "two stages per process"),
        (dict(schedule="1f1b", stages_per_rank=2), 2, "one stage per process"),
        (dict(num_layers=3, schedule="zbv", stages_per_rank=2), 2, "more than --num_layers 3"),
        (dict(schedule="1f1b", micro_batches=2), 4, "as many micro-batches as stages, 4"),
        (dict(schedule="zb", batch_size=9, micro_batches=9), 4, "a multiple of 4"),
        (dict(nhead=5), 2, "multiple of --nhead 5"),
        (dict(data="nowhere.txt"), 2, "No such file"),
        (dict(data="."), 2, "has no .txt file"),
    ],
)
def test_mistakes_are_one_line(settings, ranks, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(words):
        config = checked(lab.Config(**settings))
        config.check(ranks)
        data.load(config)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused("smaller --lr"):
        lab.train(lab.Config(**SMALL, optimizer="sgd", lr=1e30, max_steps=5))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with refused("needs two processes"):
        lab.train(lab.Config())


def required_commands() -> list[str]:
    """The commands in the README's list of what the handout asks for."""
    page = (ROOT / "labs/pipeline/README.md").read_text(encoding="utf-8")
    section = page.partition("## What the handout asks for")[2].partition("\n## ")[0]
    return list(dict.fromkeys(re.findall(r"`((?:python|torchrun) [^`]+)`", section)))


def test_the_commands_that_meet_the_handout_run(tmp_path):
    """At reduced size: two steps, and the loss that rank 0 prints is the global one."""
    commands = required_commands()
    assert len(commands) == 3
    for number, command in enumerate(commands):
        if "mistakes" in command:  # tested above
            continue
        flags = command.partition("labs.pipeline")[2].split()
        flags = [flag for flag in flags if flag != "--"]
        flags += ["--max_steps", 3, "--log_every", 3, "--run", f"run-{number}"]
        output = forked_ranks(2, "labs/pipeline/__main__.py", *flags, cwd=tmp_path)
        assert "loss" in output and (tmp_path / f"runs/run-{number}/checkpoints/step-3").is_dir()
    log = (tmp_path / "runs/run-1/metrics.jsonl").read_text().splitlines()
    expected = sum(train_alone(lab.Config(), torch.float32)[0][:3]) / 3
    assert json.loads(log[0])["train/loss"] == pytest.approx(expected, abs=1e-4)


if __name__ == "__main__":  # one of the four processes
    run_process(int(sys.argv[1]), Path.cwd())
