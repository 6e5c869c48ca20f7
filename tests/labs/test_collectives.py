"""The lessons on collectives: run once on 3 processes, and what they found compared here."""

import functools
import json
import os
import random
import re
import socket
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import HANGS, run_script, torchrun
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import checked
from labs.collectives import __main__ as lab
from labs.collectives import averaging, gathering, report, training

SIZE = 3  # processes

# ---------------------------------------------------------------- without processes


def test_the_handouts_split_of_ten_rows_over_three_ranks():
    assert [averaging.sampled_rows(10, rank, 3) for rank in range(3)] == [
        [0, 3, 6, 9],
        [1, 4, 7, 0],
        [2, 5, 8, 1],
    ]
    dropped = [averaging.sampled_rows(10, rank, 3, drop_last=True) for rank in range(3)]
    assert dropped == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


@given(rows=st.integers(0, 50), size=st.integers(1, 9))
def test_strided_rows_are_each_row_once_and_even(rows, size):
    shares = [averaging.strided_rows(rows, rank, size) for rank in range(size)]
    assert sorted(row for share in shares for row in share) == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_without_set_epoch_all_epochs_have_one_order():
    told, untold = (
        averaging.epoch_orders(3, set_epoch=True),
        averaging.epoch_orders(3, set_epoch=False),
    )
    assert told[0] == untold[0] == untold[1] == untold[2]
    assert told[0] != told[1] != told[2]


def test_a_device_is_not_a_rank():
    assert (
        gathering.rank_of(1, [1, 2]) == 0
        and gathering.rank_of(2, [1, 2]) == 1
        and gathering.rank_of(0, [3, 0]) == 1
    )


def test_learning_rate_rules():
    assert training.scaled_lr(5e-5, 768, 192, "none") == 5e-5
    assert training.scaled_lr(5e-5, 768, 192, "sqrt") == pytest.approx(1e-4)
    assert training.scaled_lr(5e-5, 768, 192, "linear") == pytest.approx(2e-4)
    assert {training.scaled_lr(0.1, 64, 64, rule) for rule in ("none", "sqrt", "linear")} == {0.1}


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_scaling_settings_see_equally_many_rows_and_only_the_last_leaves_the_stable_range(size):
    features, runs = training.scaling_settings(size)
    assert len({batch * steps for _, batch, _, steps in runs}) == 1
    assert all(batch % size == 0 for _, batch, _, _ in runs)
    assert [lr < 2 / (1 + (features + 1) / batch) for _, batch, lr, _ in runs] == [
        True,
        True,
        False,
    ]


@settings(max_examples=50)
@given(
    overflows=st.lists(st.booleans(), max_size=30),
    interval=st.integers(1, 5),
    power=st.integers(-5, 20),
)
def test_the_scaler_by_hand_keeps_torchs_scales(overflows, interval, power):
    ours = training.LossScaler(2.0**power, interval)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**power, growth_interval=interval)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for overflow in overflows:
        before = weight.item()
        theirs.scale(weight.sum()).backward()
        if overflow:
            weight.grad.fill_(float("inf"))
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert ours.update(overflow) == (weight.item() != before)
        assert ours.scale == theirs.get_scale()


def test_fp16_gradients_underflow_without_a_scale_and_not_with_one():
    exact, zeros = training.train_half(torch.float32, None)
    assert exact < 1e-10 and zeros == 0
    plain, zeros = training.train_half(torch.float16, None)
    assert plain > 1e-3 and zeros > 0.5
    scaled, zeros = training.train_half(torch.float16, training.LossScaler())
    assert scaled < 1e-6 and zeros < 0.01
    half, zeros = training.train_half(torch.float16, training.LossScaler(), master=False)
    assert half > 5 * scaled and zeros < 0.01  # nothing underflows, but updates are rounded away
    assert "unscale FP16 gradients" in training.half_refused()


def test_the_scale_comes_down_from_an_overflow():
    scaler = training.LossScaler(scale=2.0**40)
    error, _ = training.train_half(torch.float16, scaler)
    assert error < 1e-6 and scaler.scale < 2.0**36


def test_tables_are_aligned_and_valid_markdown():
    table = report.Table(
        "caption", "a|long name", [(1, torch.tensor([1, 2])), (None, [torch.tensor([3])])]
    )
    assert table.plain() == "caption:\n  a  long name\n  1  [1, 2]\n  -  [3]"
    assert table.markdown().splitlines()[2:] == [
        "| a | long name |",
        "|---|---|",
        "| 1 | [1, 2] |",
        "| - | [3] |",
    ]
    assert report.Table("c", "x", [("a|b",)]).markdown().endswith("| a\\|b |")


# ---------------------------------------------------------------- on 3 processes


def uneven_cases() -> list[list[torch.Tensor]]:
    """A tensor of each rank, of lengths from 0: drawn alike on all ranks."""
    draw, numbers = random.Random(0), torch.Generator().manual_seed(0)
    formats, shapes = (torch.int64, torch.float32, torch.uint8, torch.float16), ((), (3,), (2, 2))
    cases = [
        ([0, 0, 0], (), torch.int64),
        ([0, 0, 5], (2,), torch.float32),
        ([1, 1, 1], (), torch.float32),
    ]
    for _ in range(20):
        cases.append(
            ([draw.randrange(9) for _ in range(SIZE)], draw.choice(shapes), draw.choice(formats))
        )
    return [
        [torch.randint(200, (length, *shape), generator=numbers).to(dtype) for length in lengths]
        for lengths, shape, dtype in cases
    ]


def wrong_uneven_gathers(rank: int) -> list[int]:
    """The cases that do not come out as they should on this rank."""
    gathered = [(gathering.all_gather_uneven(tensors[rank]), tensors) for tensors in uneven_cases()]
    same = [
        len(got) == SIZE
        and all(torch.equal(g, w) and g.dtype == w.dtype for g, w in zip(got, wanted))
        for got, wanted in gathered
    ]
    return [number for number, right in enumerate(same) if not right]


def a_rank(folder: str) -> None:
    """Everything that takes several processes."""
    # 8 seconds until a wrong call gives up, not 2: right calls among them must come through on a busy machine.
    gathering.attempt = functools.partial(report.attempt, seconds=8)
    world = report.join_world()
    figures = {"lessons": {}, "pictures": {}}
    for name, lesson in lab.LESSONS.items():
        for block in lesson(world):
            if isinstance(block, report.Table):
                figures["lessons"].setdefault(name, []).append(block.cells())
            elif isinstance(block, report.Picture):
                figures["pictures"][name] = block.curves
    x, y, mine = averaging.uneven_share(world.rank, world.size)
    reference = averaging.single_gradient(x, y)
    for how in ("own mean", "mean of means", "own sum · N / rows of all"):
        gradient = averaging.ddp_gradient(x[mine], y[mine], how)
        figures[f"gradient, {how}"] = report.everyone((gradient - reference).abs().max().item())
    own = averaging.ddp_gradient(x[mine], y[mine], "own mean")
    figures["too small"] = (
        own / averaging.ddp_gradient(x[mine], y[mine], "mean of means")
    ).tolist()
    figures["mean"] = averaging.global_mean(*[(16, 32), (17, 32), (4, 4)][world.rank])
    figures["mean of means"] = averaging.mean_of_means(*[(16, 32), (17, 32), (4, 4)][world.rank])
    gathered = gathering.gather_to(2, torch.tensor([world.rank]), list(range(1, world.size + 1)))
    figures["gathered"] = report.everyone(
        None if gathered is None else torch.cat(gathered).tolist()
    )
    figures["wrong uneven"] = report.everyone(wrong_uneven_gathers(world.rank))
    ddp, alone = training.train_classifier(20, world), training.train_classifier(20)
    figures["ddp weights"] = report.everyone((ddp[1] - alone[1]).abs().max().item())
    figures["ddp losses"] = max(abs(a - b) for a, b in zip(ddp[0], alone[0]))
    figures["moved"] = (alone[1] - training.train_classifier(0)[1]).abs().max().item()
    figures["alone"] = report.everyone(training.scaled_steps(world, together=False))
    figures["together"] = report.everyone(training.scaled_steps(world, together=True))
    if world.is_main:
        Path(folder, "figures.json").write_text(json.dumps(figures), encoding="utf-8")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> dict:
    """What the processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    context, _store = report.launch(a_rank, SIZE, str(folder))
    while not context.join():
        pass
    return json.loads((folder / "figures.json").read_text(encoding="utf-8"))


def outcomes(figures: dict, lesson: str, table: int, call: str) -> list[str]:
    """The last column of a lesson's table in the rows that begin with `call`: one for each rank."""
    found = [row[-1] for row in figures["lessons"][lesson][table][1:] if row[0].startswith(call)]
    assert len(found) == SIZE
    return found


def test_gather_reaches_the_rank_of_the_device_only(figures):
    assert figures["gathered"] == [None, [0, 1, 2], None]


def test_wrong_gathers_fail_with_torchs_own_words(figures):
    on_dst, elsewhere = (
        "must be specified on destination rank",
        "must NOT be specified on non-destination ranks",
    )
    device = outcomes(figures, "gather", 1, "dst=1")
    assert elsewhere in device[0] and on_dst in device[1]
    everywhere = outcomes(figures, "gather", 1, "gather_list on every rank")
    assert "Timed out" in everywhere[0] and all(elsewhere in text for text in everywhere[1:])
    nowhere = outcomes(figures, "gather", 1, "gather_list on no rank")
    assert on_dst in nowhere[0] and all("Timed out" in text for text in nowhere[1:])


def test_a_subgroup_counts_its_own_ranks(figures):
    gathered = ["not in the group", "[5, 6] [7, 8]", "-"]
    assert (
        outcomes(figures, "gather", 2, "dst=1")
        == outcomes(figures, "gather", 2, "group_dst=0")
        == gathered
    )
    wrong = outcomes(figures, "gather", 2, "wrong: dst=0")
    assert all("Global rank 0 is not part of group" in text for text in wrong[1:])


def test_unequal_lengths_gathered_as_if_equal_are_lost(figures):
    right = outcomes(figures, "all_gather", 0, "right: lengths")
    assert right == ["[1, 1, 1] [2, 2] [3]"] * SIZE
    assert right == outcomes(figures, "all_gather", 0, "right, but pickled")
    dead = outcomes(figures, "all_gather", 0, "wrong: all_gather into N tensors like")
    assert not set(dead) & set(right)
    assert any("killed by signal 6" in text for text in dead), dead
    refused = outcomes(figures, "all_gather", 0, "wrong: all_gather into the true shapes")
    assert all("invalid tensor size" in text for text in refused)
    silent = outcomes(figures, "all_gather", 0, "wrong: gather into N tensors like rank 0's")[0]
    parts = re.findall(r"\[.*?\]", silent)
    assert [len(json.loads(part)) for part in parts] == [
        SIZE
    ] * SIZE  # no error, and more numbers than were sent


def test_uneven_gather_of_any_lengths(figures):
    assert figures["wrong uneven"] == [[]] * SIZE


def test_gradients_stop_at_all_gather(figures):
    none, own, whole = (row[1:] for row in figures["lessons"]["all_gather"][1][1:])
    assert none == ["-"] * SIZE and own == ["1.0", "2.0", "3.0"] and whole == ["6.0"] * SIZE


def test_mean_over_ranks(figures):
    assert figures["mean"] == (16 + 17 + 4) / (32 + 32 + 4)
    assert figures["mean of means"] == pytest.approx((16 / 32 + 17 / 32 + 4 / 4) / 3)
    right, wrong, one = (float(row[1]) for row in figures["lessons"]["mean"][2][1:])
    assert right == one != wrong


def test_ddp_needs_the_global_count_for_the_right_gradient(figures):
    # Sums of at most 24 rows, each of 6 products, of numbers around 1 in fp32: 30 · 1.2e-7, and twice that to be safe.
    assert max(figures["gradient, own sum · N / rows of all"]) < 8e-6
    assert min(figures["gradient, own mean"]) > 1e-2
    assert min(figures["gradient, mean of means"]) > 1e-2
    assert figures["too small"] == pytest.approx([SIZE] * 6)


def test_the_handouts_accuracies(figures):
    handout, short = figures["lessons"]["mean"][0][1:]
    assert handout[2:] == ["0.5156", "0.5156"] and short[2:] == ["0.5200", "0.6250"]


def test_a_score_over_a_padded_sampler_counts_rows_twice(figures):
    true, padded, dropped, strided = (
        (int(row[1]), float(row[2])) for row in figures["lessons"]["sampler"][1][1:]
    )
    assert true == strided == (10, 0.9)
    assert padded == (12, round(10 / 12, 4))  # row 0, the wrong one, counts twice
    assert dropped == (9, round(8 / 9, 4))


def test_each_scaling_rule_is_right_and_both_together_diverge(figures):
    rule_1, rule_2, both = figures["lessons"]["scaling"][1][1:]
    assert float(rule_1[6]) < 1e-3 and float(rule_2[6]) < 1e-3 and float(both[6]) > 10
    # Relative, to one process. Each of up to 240 steps rounds a step of the weights, half an eps of 1.2e-7, and rounding
    # errors shrink with the loss: far fewer than 240 of them remain.
    assert float(rule_1[7]) <= 1.5e-5 and float(rule_2[7]) <= 1.5e-5
    for curve in figures["pictures"]["scaling"].values():
        assert curve[-1][0] == figures["pictures"]["scaling"]["rule 1: batch / N, lr"][-1][0]


def test_ddp_equals_one_process_after_20_steps(figures):
    # 20 steps, each from sums over 61 rows in two orders, times lr 0.2 and 10 for momentum 0.9: 20 · 61 · 6e-8 · 2 = 1.5e-4
    # at worst, far below what a wrong gradient moves (0.1).
    assert max(figures["ddp weights"]) < 1.5e-4 and figures["ddp losses"] < 1.5e-4
    assert figures["moved"] > 0.1


def test_data_parallel_gets_its_model_and_input_where_it_computes(monkeypatch):
    """With a GPU the lesson has ended in an error: DataParallel took the model there, and the input stayed."""

    class OnTheGpu(torch.nn.Module):
        """ "meta" is the GPU here: a second device, and like one it refuses tensors of the CPU."""

        def __init__(self, model):
            super().__init__()
            assert {parameter.device.type for parameter in model.parameters()} == {
                "meta"
            }  # as several GPUs demand
            self.forward = model.forward

    monkeypatch.setattr(training.nn, "DataParallel", OnTheGpu)
    monkeypatch.setattr(torch, "allclose", lambda ours, theirs, **_: ours.shape == theirs.shape)
    assert training.data_parallel_agrees("meta") is True
    monkeypatch.setattr(
        training.nn, "DataParallel", Mock(side_effect=RuntimeError("CUDA error: out of memory\n…"))
    )
    assert (
        training.data_parallel_agrees("meta") == "not tried: CUDA error: out of memory"
    )  # others have filled a GPU


def test_an_overflow_on_one_rank_skips_on_all_or_the_ranks_part(figures):
    assert figures["alone"] == [[6, 2.0**14], [6, 2.0**14], [5, 2.0**13]]
    assert figures["together"] == [[5, 2.0**13]] * SIZE


# ---------------------------------------------------------------- as a user runs it


def test_it_starts_its_own_processes_and_writes_markdown(tmp_path):
    lab = "labs/collectives/__main__.py"
    words = ("--lesson", "mean", "--processes", 2, "--out", "report/a.md")
    done = run_script(
        lab, *words, cwd=tmp_path, PYTHONIOENCODING="ascii"
    )  # what cannot be shown is spelled
    assert done.returncode == 0, done.stderr
    assert "=== mean: " in done.stdout and "what rank 0 prints" in done.stdout and not done.stderr
    written = (tmp_path / "report/a.md").read_text(encoding="utf-8")
    assert written.startswith("# Collectives: 2 process") and "## mean: " in written


def test_it_runs_under_torchrun(tmp_path):
    process = torchrun(2, "labs/collectives/__main__.py", "--lesson", "gather", cwd=tmp_path)
    output, errors = process.communicate(timeout=HANGS)
    assert process.returncode == 0, errors
    assert output.count("=== gather") == 1 and "A sub-group" in output  # which takes 3 processes
    assert (tmp_path / "runs/collectives/gather.md").exists()


def test_one_process_says_what_it_cannot_show(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        torch, "set_num_threads", lambda count: None
    )  # this process has other tests to run

    def drawn(world) -> list:
        """A picture."""
        return [report.Picture("Curves", "x", "y", {"a": [(0, 1.0), (1, 2.0)]})]

    lessons = {name: lab.LESSONS[name] for name in ("mean", "sampler", "fp16")} | {"drawn": drawn}
    report.teach(lessons, tmp_path / "a.md")
    said = capsys.readouterr().out
    assert (
        "With one process all means agree" in said
        and "nothing is repeated" in said
        and "no rank can part" in said
    )
    assert "![Curves](a-drawn.png)" in (tmp_path / "a.md").read_text(encoding="utf-8")
    assert (tmp_path / "a-drawn.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "settings, environment, message",
    [
        (dict(lesson="gathr"), {}, "did you mean gather?"),
        (dict(processes=0), {}, "--processes 0 must be at least 1 and at most 32"),
        (dict(port="TAKEN"), {}, "Address already in use; give another"),
        (dict(out="/proc/none/a.md"), {}, "--out /proc/none/a.md: No such file or directory"),
        (
            dict(gpu_devices=(0, 1), target_device=0),
            {},
            "--gpu_devices 0 1: this machine has 0 GPUs",
        ),
        (dict(target_device=4), {}, "--target_device 4 must be one of 1, 2, 3"),
        (dict(processes=2), dict(RANK="0", WORLD_SIZE="2"), "give it --nproc_per_node"),
        (dict(), dict(RANK="0", WORLD_SIZE="2"), "missing in the environment"),
    ],
)
def test_mistakes_are_named_in_one_line(settings, environment, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as taken, refused(message):
        settings = {
            name: taken.getsockname()[1] if value == "TAKEN" else value
            for name, value in settings.items()
        }
        config = checked(lab.Config(**settings))
        config.given = set(settings)
        lab.main(config)


def test_gpus_as_the_handout_types_them(monkeypatch):
    """What cannot run here: which GPU each rank takes, by which backend, and to which rank the tensors go."""
    monkeypatch.setattr(sys, "argv", "lab --gpu_devices 0 1 3 2 --target_device 3".split())
    config = lab.parse_flags(lab.Config)
    assert config.gpu_devices == (0, 1, 3, 2) and "processes" not in config.given
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    lab.check_devices(config, 4)
    with refused("3 processes need as many different GPUs"):
        lab.check_devices(config, 3)
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "new_group", lambda backend: backend)
    monkeypatch.setattr(
        dist, "gather", lambda x, received, dst, group: calls.append((len(received), dst, group))
    )
    gathering.gather_on_gpus(3, torch.arange(2), list(config.gpu_devices))
    assert calls == [3, (4, 2, "nccl")]


def quits_on_rank_1() -> None:
    """A rank that ends with a mistake while the others wait for it."""
    world = report.join_world()
    if not world.is_main:
        os._exit(2)
    dist.barrier()


def test_no_rank_waits_for_one_that_ended_with_a_mistake():
    context, _store = report.launch(quits_on_rank_1, 2)
    with pytest.raises((mp.ProcessExitedException, mp.ProcessRaisedException)):
        while not context.join(timeout=30):
            pass
    assert not any(process.is_alive() for process in context.processes)
