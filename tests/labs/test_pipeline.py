"""The pipeline against one process that sees the whole batch.

This file, run as a script (see the end), is one of three processes that run all cases for 2 and 3
ranks; the first writes down the results.
"""

import json
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from itertools import islice
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT, Forked
from helpers import handout_commands, refused, together

from engine import checkpoint
from engine.config import checked, fill_in, parse_flags
from engine.distributed import World, process_grid
from engine.errors import UserError
from labs.pipeline import __main__ as lab
from labs.pipeline import data, mistakes, report, schedule, stages

STEPS = 4
PAGE = ROOT / "labs/pipeline/README.md"
CPU = torch.device("cpu")
SMALL = dict(
    sequences=12,
    seq_length=9,
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
TOY = dict(SMALL, sequences=13, optimizer="sgd", lr=0.2)
ADAM = dict(TOY, num_layers=9, optimizer="adamw", lr=1e-2)
V = dict(schedule="zbv", stages_per_rank=2)
TWICE = dict(TOY, batch_size=16, micro_batches=8)
CASES = {  # name: (ranks, settings); 5, 7 and 9 layers do not divide
    "gpipe-twice-2": (2, TWICE),
    "1f1b-twice-2": (2, dict(TWICE, schedule="1f1b")),
    "zb-2": (2, dict(TOY, schedule="zb")),
    "traced-zbv-2": (2, {**TOY, **V, "build": "traced", "num_layers": 4, "post_norm": True}),
    "zb-3": (3, dict(TOY, schedule="zb", stages_per_rank=2, num_layers=7)),
    "1f1b-3": (3, dict(ADAM, schedule="1f1b")),
    "interleaved-3": (3, dict(ADAM, schedule="interleaved", stages_per_rank=2)),
    "zbv-3": (3, {**ADAM, **V}),
}


def begin(config: lab.Config, dtype=torch.float64):
    """The data and the whole model, the same in every process.

    In fp64: AdamW divides a gradient by its own size, which makes much of the rounding error of a
    gradient that is truly 0, such as that of a key's bias.
    """
    torch.set_default_dtype(dtype)
    dataset, vocabulary = data.load(config)
    torch.manual_seed(config.seed)
    return dataset, stages.LanguageModel(vocabulary, config.seq_length, config)


def train_alone(config: lab.Config, dtype=torch.float64):
    """One process, the whole batch at once, only autograd: the losses and the final weights."""
    dataset, model = begin(config, dtype)
    optimizer, losses = lab.make_optimizer(config, model.parameters()), []
    batches = data.batches(dataset, 1, config.batch_size, config.seed)
    for tokens, target in islice(batches, STEPS):
        real = (target >= 0).any(1)  # without the rows that fill up a short batch
        logits = model(tokens[real]).flatten(0, 1)
        loss = F.cross_entropy(logits, target[real].flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


# ---- what the three processes do -----------------------------------------------------------------


def run_case(config: lab.Config, world: World) -> dict:
    """The same in a pipeline: losses of all ranks, weights, and events of the last step."""
    dataset, model = begin(config)
    pipeline = stages.Pipeline(model, config, world)
    optimizer, losses = lab.make_optimizer(config, pipeline.parameters.values()), []
    batches = data.batches(dataset, 1, config.batch_size, config.seed)
    for tokens, target in islice(batches, STEPS):
        optimizer.zero_grad()
        pipeline.recorder.take()
        loss = pipeline.forward_backward(tokens, target)
        losses.append(loss / int((target >= 0).sum()))
        optimizer.step()
    events = [
        event for of_rank in world.gather(pipeline.recorder.take()) or [] for event in of_rank
    ]
    weights, _ = lab.gather_model(pipeline, optimizer) or (None, None)
    return dict(losses=world.gather(losses), weights=weights, events=events)


def run_trainings(rank: int, folder: Path) -> None:
    """By `train`: ten steps at once; five on two ranks, then five on three; the page's commands."""
    common = dict(SMALL, sequences=13, log_every=3, save_every=4, schedule="1f1b")
    runs = [
        (2, lab.Config(**common, max_steps=10, run="at-once")),
        (2, lab.Config(**common, max_steps=5, run="in-two")),
        (3, lab.Config(max_steps=10, resume="runs/in-two")),
    ]
    for config in runs:
        config[1].given = {"max_steps"}
    for number, (module, flags) in enumerate(handout_commands(PAGE)):
        if module == "labs.pipeline":  # the mistakes are tested below
            flags = [word for word in flags if word != "--"]
            flags += ["--max_steps", "3", "--log_every", "3", "--run", f"command-{number}"]
            flags += ["--num_layers", "2"]
            with patch.object(sys, "argv", ["labs.pipeline", *flags]):
                runs.append((2, parse_flags(lab.Config)))
    for number, (ranks, config) in enumerate(runs):
        if rank < ranks:
            os.environ |= dict(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
            with_group(number, rank, ranks, folder, lambda _, config=config: lab.train(config))


def with_group(name, rank: int, ranks: int, folder: Path, work):
    """Call `work(world)` in a process group of the first `ranks` processes."""
    if rank >= ranks:
        return None
    store = dist.FileStore(f"{folder}/group-{name}", ranks)
    hours = timedelta(minutes=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=hours)
    world = World(rank, ranks, CPU, store)
    lab.distributed.init = lambda _: world  # for `train`, which leaves the group itself
    result = work(world)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def run_process(rank: int, folder: Path) -> None:
    """One of the three: everything below runs in the same order everywhere."""
    results = {}
    for ranks in (2, 3):

        def work(world, ranks=ranks):
            done = {}
            for name, (wanted, settings) in CASES.items():
                if wanted == ranks:
                    done[name] = run_case(lab.Config(**settings), world)
            if ranks == 3:
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
    """What the three processes found, by case; "folder" is where they ran."""
    folder = tmp_path_factory.mktemp("ranks")
    together([Forked(__file__, rank, cwd=folder) for rank in range(3)])
    return {**torch.load(folder / "results.pt", weights_only=False), "folder": folder}


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_equals_one_process(ran, name):
    losses, weights = train_alone(lab.Config(**CASES[name][1]))
    # A loss sums up to 144 targets, each after 9 layers of about five sums over widths of 16 to
    # 100: 3,000 terms with fp64's eps (2.2e-16), and as many again in each of 4 steps: 3e-12. AdamW
    # may make 100 times that of a gradient near 0.
    for of_rank in ran[name]["losses"]:
        assert of_rank == pytest.approx(losses, rel=4e-10)
    assert losses[-1] < 0.97 * losses[0]
    assert ran[name]["weights"].keys() == weights.keys()
    for key, weight in weights.items():
        assert (ran[name]["weights"][key] - weight).norm() <= 4e-10 * weight.norm(), key


@pytest.mark.parametrize("name", CASES)
def test_the_order_has_the_bubble_of_the_papers(ran, name):
    ranks, settings = CASES[name]
    config = lab.Config(**settings)
    numbers = range(ranks * config.stages_per_rank), range(config.micro_batches)
    wanted = [(stage, part) for stage in numbers[0] for part in numbers[1]]
    events = ran[name]["events"]
    done = {kind: [(e.stage, e.micro_batch) for e in events if e.kind == kind] for kind in "FBIW"}
    # Everything is computed once, by the rank that has the stage ...
    assert sorted(done["F"]) == sorted(done["B"] + done["I"]) == wanted
    assert sorted(done["I"]) == sorted(done["W"])
    assert all(e.stage in stages.stages_of_rank(e.rank, ranks, config) for e in events)
    # ... and in an order that is idle as the formulas say.
    simulated = schedule.simulate(events, lambda kind, _: 2.0 if kind == "B" else 1.0)
    theory = schedule.bubble_in_theory(
        config.schedule, ranks, config.stages_per_rank, config.micro_batches
    )
    assert theory is None or schedule.bubble_share(simulated, ranks) == pytest.approx(theory)
    assert (theory is None) == (name == "zbv-3")  # 4 micro-batches are too few


def test_a_new_schedule_has_no_conditions_and_no_formula():
    lab.Config(schedule="another").check(ranks=2)
    assert schedule.bubble_in_theory("another", 2, 1, 4) is None


@pytest.mark.parametrize(
    "name, held",
    [
        ("gpipe-twice-2", [8, 8]),
        ("1f1b-twice-2", [2, 1]),
        ("1f1b-3", [3, 2, 1]),
        ("zb-2", [2, 2]),
    ],
)
def test_activations_held_by_the_schedules(ran, name, held):
    """GPipe holds all micro-batches, 1F1B as many as there are stages from a rank on.

    ZB-H1 holds as many as there are ranks, on every rank.
    """
    events = ran[name]["events"]
    assert [schedule.most_held(events, rank) for rank in range(len(held))] == held


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
    assert "MiB" in log and "in theory 20.0%" in log and "rank 1 (stage 1)" in log
    assert "activations of at most 2 of 4 forward passes at a time, peak memory" in log
    assert "pipeline/bubble_share" in (folder / "metrics.jsonl").read_text()
    page = report_of(folder)
    assert " Training</h2>" in page and "<code>Linear</code>" in page


def test_the_commands_that_meet_the_handout_run(ran):
    """The loss that rank 0 logs is the global one."""
    assert len(handout_commands(PAGE)) == 3
    for number in (0, 1):
        assert (ran["folder"] / f"runs/command-{number}/checkpoints/step-3").is_dir()
    log = (ran["folder"] / "runs/command-1/metrics.jsonl").read_text().splitlines()
    expected = sum(train_alone(lab.Config(num_layers=2), torch.float32)[0][:3]) / 3
    assert json.loads(log[0])["train/loss"] == pytest.approx(expected, abs=1e-4)


def test_a_grid_has_a_place_for_every_process():
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


def test_the_handouts_preset_resumes_and_gives_way_to_flags(tmp_path, monkeypatch):
    def settings(**flags) -> lab.Config:
        config = lab.Config(preset="handout", build="by_hand", **flags)
        config.given = set(flags)
        fill_in(config, lab.HANDOUT)
        return config

    monkeypatch.chdir(tmp_path)
    assert settings(lr=0.5).lr == 0.5 and settings().epochs == 200 and settings().dropout == 0.1
    lab.train(settings(max_steps=4, log_every=2, run="at-once"))
    turns = iter(range(10**9))
    with monkeypatch.context() as patched:
        asked = nullcontext(lambda: next(turns) == 2)  # a signal after two steps
        patched.setattr("engine.run.caught_signals", lambda: asked)
        lab.train(settings(max_steps=4, log_every=2, run="parts"))
    log = Path("runs/parts/train.log")
    assert "stopped after step 2: interrupted" in log.read_text(encoding="utf-8")
    assert "bubble: not measured" in log.read_text(encoding="utf-8")
    assert "rank 0 (stage 0): 5,068 weights" in log.read_text(encoding="utf-8")
    lab.train(lab.Config(resume="runs/parts"))
    assert "stopped after step 4: finished" in log.read_text(encoding="utf-8")
    at_once, parts = (
        checkpoint.load_weights(Path(f"runs/{name}/checkpoints/step-4"))
        for name in ("at-once", "parts")
    )
    assert all(torch.equal(at_once[name], parts[name]) for name in at_once)  # same dropout too
    invalid = lab.Config(resume="runs/parts", preset="lab")
    invalid.given = {"preset"}
    with refused("--preset"):
        lab.train(invalid)
    invalid = lab.Config(resume="runs/parts", micro_batches=3)
    invalid.given = {"micro_batches"}
    with refused("--micro_batches 3 does not divide --batch_size 4"):
        lab.train(invalid)


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


def test_rank_0_or_else_fails_on_the_middle_of_three_stages(ran):
    first, middle, last = ran["wrong"]
    assert first == "no loss" and "non-empty" in middle
    assert ran["right"] == [last] * 3 and last.startswith("loss")


def test_unequal_micro_batches_and_short_batches():
    mean_of_means, mean = mistakes.losses_of_unequal_parts()
    assert abs(mean_of_means - mean) > 0.01
    error, loss = mistakes.step_with_a_short_batch()
    assert "Expecting 4 arg_mbs but got 1" in error and 4 < loss < 5


def test_an_epoch_shows_every_sequence_once():
    dataset = data.NLPDataset(13, 4)
    assert len(dataset) == 13 and dataset[5].tolist() == [5, 5, 5, 5]
    batches = list(islice(data.batches(dataset, 1, 8, seed=3), 6))
    epochs = []
    for steps in (batches[:2], batches[2:4], batches[4:]):
        epochs.append(torch.cat([target[:, 0] for _, target in steps]).tolist())
        assert sorted(epochs[-1]) == [-1, -1, -1, *range(13)]
    assert epochs[0] != epochs[1]
    # From any step on, they are those of a run at once.
    for done in (1, 2, 3):
        rest = islice(data.batches(dataset, done + 1, 8, seed=3), 6 - done)
        for (tokens, target), (expected_tokens, expected_target) in zip(rest, batches[done:]):
            assert torch.equal(tokens, expected_tokens)
            assert torch.equal(target, expected_target)


# ---- what the log says ---------------------------------------------------------------------------


def events_with_bubble(idle: float, kinds=("F", "B")) -> list[schedule.Event]:
    """One rank that works for a second, waits for `idle` seconds, and works again."""
    first, second = kinds
    return [
        schedule.Event(0, first, 0, 0, 0.0, 1.0),
        schedule.Event(0, second, 0, 0, 1 + idle, 2 + idle),
    ]


def test_activations_are_held_until_the_weights_have_their_gradients():
    kinds = [("F", 0), ("I", 0), ("F", 1), ("I", 1), ("W", 0), ("F", 2), ("B", 2), ("W", 1)]
    events = [schedule.Event(0, kind, 0, part, n, n + 1) for n, (kind, part) in enumerate(kinds)]
    assert schedule.most_held(events, rank=0) == 2
    assert schedule.most_held(events[:4], rank=0) == 2
    assert schedule.most_held(events, rank=1) == 0


def test_the_measured_bubble_is_the_median(tmp_path):
    # 2 s of work and idle for 0.5, 2 and 8: bubbles of 20 %, 50 % and 80 %.
    recorded = [events_with_bubble(idle) for idle in (8.0, 0.5, 2.0)]
    lines = []
    run = Mock(config=lab.Config(**SMALL), folder=tmp_path, log=lines.append)
    run.world = Mock(size=1, gather=lambda value: [value])
    pipeline = Mock(parameters={"w": torch.zeros(3)})
    report.report(pipeline, run, recorded, [10.0, 30.0, 20.0], step=3, peak_mib=12.3)
    assert "bubble: measured 50.0%, the median of 3 steps" in lines[0]
    assert "speed: 20 tokens/s" in lines[1]
    assert "at most 1 of 1 forward passes at a time, peak memory 12 MiB" in lines[2]
    (_, results), _ = run.telemetry.hyperparameters.call_args
    assert results == {"result/bubble_share": pytest.approx(0.5)}
    (_, _, figure), _ = run.telemetry.figure.call_args
    upper, lower = (axes.get_title(loc="left") for axes in figure.axes)
    assert upper.endswith("Ideal: bubble 0.0%") and lower == "Measured: bubble 50.0%"


def test_memory_is_counted_from_the_stage_on(monkeypatch):
    held = {"VmRSS": 1.0, "VmHWM": 3.0}
    forgotten = Mock(side_effect=lambda: held.update(VmHWM=1.5))
    monkeypatch.setattr(report.memory, "held_gib", held.get)
    monkeypatch.setattr(report, "peak_memory_gib", lambda _: held["VmHWM"])
    monkeypatch.setattr(report.memory, "forget_peak", forgotten)
    memory = report.Memory(CPU)
    held["VmHWM"] = 9.0  # the complete model
    memory.resume()
    held["VmHWM"] = 2.0
    assert memory.peak_mib() == 1024
    memory.pause()
    held["VmHWM"] = 9.0  # a checkpoint
    memory.resume()
    assert memory.peak_mib() == 1024
    held["VmHWM"] = 3.0
    assert memory.peak_mib() == 2048


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, ranks, words",
    [
        (dict(micro_batches=0), 2, "--micro_batches 0"),
        (dict(batch_size=6), 2, "does not divide"),
        (dict(schedule="fifo"), 2, "choose gpipe, 1f1b"),
        (dict(schedule="interleaved"), 2, "interleaved 2 or more"),
        (dict(schedule="zbv", stages_per_rank=3), 2, "zbv 2"),
        (dict(schedule="1f1b", stages_per_rank=2), 2, "1f1b need 1"),
        (dict(num_layers=3, schedule="zbv", stages_per_rank=2), 2, "more than --num_layers 3"),
        (dict(schedule="1f1b", micro_batches=2), 4, "as many micro-batches as stages, 4"),
        (dict(schedule="zb", batch_size=9, micro_batches=9), 4, "a multiple of 4"),
        (dict(nhead=5), 2, "multiple of --nhead 5"),
    ],
)
def test_mistakes_are_one_line(settings, ranks, words):
    with refused(words):
        checked(lab.Config(**settings)).check(ranks)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused("smaller --lr"):
        lab.train(lab.Config(**SMALL, optimizer="sgd", lr=1e30, max_steps=5))


if __name__ == "__main__":  # one of the three processes
    run_process(int(sys.argv[1]), Path.cwd())
