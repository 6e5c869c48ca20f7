"""The lessons on collectives: run once on 3 processes, and what they found compared here."""

import contextlib
import functools
import io
import json
import os
import re
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, forked_ranks
from helpers import handout_commands, refused

from labs.collectives import __main__ as lab
from labs.collectives import averaging, common, gathering, half_precision, lessons, ring, training

SIZE = 3  # processes

# ---------------------------------------------------------------- without processes


@pytest.mark.parametrize("rows, size", [(0, 3), (2, 3), (10, 3), (12, 4)])
def test_strided_rows_are_each_row_once_and_even(rows, size):
    shares = [averaging.strided_rows(rows, rank, size) for rank in range(size)]
    assert sorted(row for share in shares for row in share) == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("size", [2, 3, 6])
def test_scaling_settings_see_the_same_rows_and_only_the_last_leaves_the_stable_range(size):
    features, runs = training.scaling_settings(size)
    assert len({batch * steps for _, batch, _, steps in runs}) == 1
    assert all(batch % size == 0 for _, batch, _, _ in runs)
    stable = [rate < 2 / (1 + (features + 1) / batch) for _, batch, rate, _ in runs]
    assert stable == [True, True, False]


def test_the_scaler_by_hand_keeps_torchs_scales():
    """Ten good steps, single overflows, and two in a row; it grows after three good steps."""
    ours = half_precision.LossScaler(2.0**10, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for overflow in [False] * 10 + [True, False, False, True, True] + [False] * 4:
        before = weight.item()
        theirs.scale(weight.sum()).backward()
        if overflow:
            weight.grad.fill_(float("inf"))
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert ours.update(overflow) == (weight.item() != before)
        assert ours.scale == theirs.get_scale()


def test_the_scale_comes_down_from_an_overflow():
    scaler = half_precision.LossScaler(scale=2.0**40)
    run = half_precision.train_half(torch.float16, scaler)
    assert run.error < 1e-6 and scaler.scale < 2.0**36
    skipped = [scale for scale, _, was_made in run.steps if not was_made]
    assert skipped == [2.0**power for power in range(40, 40 - len(skipped), -1)]
    assert run.steps[len(skipped)][0] == skipped[-1] / 2


# ---------------------------------------------------------------- on 3 processes


def wrong_uneven_gathers() -> list[int]:
    """The cases of unequal lengths, some of them 0, whose result is wrong on this rank."""
    wrong = []
    cases = [
        ([0, 0, 0], (), torch.int64),
        ([0, 0, 5], (2,), torch.float32),
        ([3, 1, 8], (2, 2), torch.uint8),
        ([4, 4, 4], (3,), torch.float16),
    ]
    for number, (lengths, shape, dtype) in enumerate(cases):
        tensors = [torch.full((length, *shape), length, dtype=dtype) for length in lengths]
        gathered = gathering.all_gather_uneven(tensors[dist.get_rank()])
        same = [x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(gathered, tensors)]
        if len(gathered) != SIZE or not all(same):
            wrong.append(number)
    return wrong


def wrong_rings() -> list[str]:
    """The ways of `ring.py` whose result is wrong on this rank, also where chunks are unequal."""
    wrong = []
    rank = dist.get_rank()
    for size, length in ((2, 7), (SIZE, 1), (SIZE, 11), (SIZE, 24)):
        values = [torch.arange(length) * 10.0 + other for other in range(size)]
        total = sum(values)
        expected = {
            "reduce_scatter": total.tensor_split(size),
            "all_reduce": [total] * size,
            "all_reduce_at_rank_0": [total] * size,
            "broadcast": [values[0]] * size,
            "send": [values[0], values[0], *values[2:]],
        }
        for name, results in expected.items():
            if rank >= size:
                continue
            x = values[rank].clone()
            result = getattr(ring.Ring(size), name)(x)
            result = x if result is None else result
            if not torch.equal(result, results[rank]):
                wrong.append(f"{name} {size} {length}")
    return wrong


def seconds_by_cable() -> dict[str, float]:
    """Seconds of each way on all ranks, in sends, over a cable on which a send takes 0.3 seconds.

    So slow that a busy machine's delays do not matter.
    """
    ring.TURNS = 1
    link = 4 * ring.NUMBERS / 0.3
    seconds = {name: ring.measure(way, SIZE, link)[1] for name, (way, _, _) in ring.WAYS.items()}
    return {name: value / 0.3 for name, value in seconds.items()}


def run_on_a_rank(folder: str) -> None:
    """Everything that takes several processes."""
    ring.NUMBERS = 1000
    # A wrong call gives up after 5 seconds, not 2: right ones must come through on a busy machine.
    gathering.try_collective = functools.partial(common.try_collective, seconds=5)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        lessons.run_lessons(list(lessons.LESSONS), (), 1)
    figures = {"output": output.getvalue()}
    figures["wrong uneven"] = common.all_gather_object(wrong_uneven_gathers())
    figures["wrong rings"] = common.all_gather_object(wrong_rings())
    figures["seconds by cable"] = seconds_by_cable()
    if dist.get_rank() == 0:
        Path(folder, "figures.json").write_text(json.dumps(figures), encoding="utf-8")


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> dict:
    """What the processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    with common.processes(run_on_a_rank, SIZE, str(folder)) as context:
        while not context.join():
            pass
    return json.loads((folder / "figures.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tables(figures) -> dict[str, list[list[str]]]:
    """The rows of each printed table by its caption, without the column names."""
    found = re.findall(r"(?m)^(.*):\n\n((?:\|.*\n)+)", figures["output"])
    return {
        caption: [re.split(r" +\| +", line[2:-2].strip()) for line in lines.splitlines()[2:]]
        for caption, lines in found
    }


def outcomes(table: list[list[str]], call: str) -> list[str]:
    """The last column of the rows that begin with `call`: one for each rank."""
    found = [row[-1] for row in table if row[0].startswith(call)]
    assert len(found) == SIZE
    return found


def test_gather_reaches_the_rank_of_the_device_only(tables):
    table = tables["right, by gloo, on the CPU: gather to device 1, which is rank 0"]
    assert outcomes(table, "") == ["[3, 4] [5, 6] [7, 8]", "-", "-"]


def test_the_list_on_another_rank_than_dst_fails_with_torchs_own_words(tables):
    table = tables["wrong, with the same tensors, by gloo"]
    no_destination, destination, waiting = outcomes(table, "list on rank 0, but dst=1")
    assert "must NOT be specified on non-destination ranks" in no_destination
    assert "must be specified on destination rank" in destination
    assert "Timed out" in waiting


def test_a_subgroup_counts_its_own_ranks(tables):
    table = tables["sub-group of ranks [1, 2]"]
    gathered = ["not in the group", "[5, 6] [7, 8]", "-"]
    assert outcomes(table, "dst=1") == outcomes(table, "group_dst=0") == gathered
    wrong = outcomes(table, "wrong: dst=0")
    assert all("Global rank 0 is not part of group" in text for text in wrong[1:])


def test_unequal_lengths_gathered_as_if_equal_are_lost(figures, tables):
    assert figures["wrong uneven"] == [[]] * SIZE
    table = tables["unequal lengths"]
    right = outcomes(table, "right: lengths")
    assert right == ["[1, 1, 1] [2, 2] [3]"] * SIZE == outcomes(table, "right, but pickled")
    refusals = outcomes(table, "wrong: all_gather into the true shapes")
    assert all("invalid tensor size" in text for text in refusals)
    # no error, and more numbers than were sent
    silent = outcomes(table, "wrong: gather into N tensors like rank 0's")[0]
    assert [len(json.loads(part)) for part in re.findall(r"\[.*?\]", silent)] == [SIZE] * SIZE


def test_mean_over_ranks(tables):
    right, wrong, one = (float(row[1]) for row in tables["what rank 0 prints"])
    assert right == one != wrong
    handout, short = tables["accuracy of 4 ranks, on paper"]
    assert handout[2:] == ["0.5156", "0.5156"] and short[2:] == ["0.5200", "0.6250"]


def test_ddp_needs_the_global_count_for_the_right_gradient(tables):
    own, averaged, right = tables["gradient under DDP"]
    assert float(own[3]) > 1e-2 and float(averaged[3]) > 1e-2
    # Sums of at most 24 rows, each of 6 products of numbers near 1, in fp32: 30 · 1.2e-7, doubled.
    assert float(right[3]) < 8e-6
    # Averaging the losses divides the gradient once more by the number of ranks.
    assert float(own[1]) / float(averaged[1]) == pytest.approx(SIZE, rel=1e-3)


def test_a_score_over_a_padded_sampler_counts_rows_twice(tables):
    true, padded, dropped, strided = (
        (int(row[1]), float(row[2]))
        for row in tables["accuracy with N = 3 and 10 rows, only row 0 being wrong"]
    )
    assert true == strided == (10, 0.9)
    assert padded == (12, round(10 / 12, 4))  # row 0, the wrong one, counts twice
    assert dropped == (9, round(8 / 9, 4))
    assert tables["10 rows over 3 ranks"][0][1:] == ["[0, 3, 6, 9]", "[1, 4, 7, 0]", "[2, 5, 8, 1]"]
    with_epoch, without = (row[1:] for row in tables["8 rows, shuffled: rank 0 of 2"])
    assert len(set(with_epoch)) == 3 and len(set(without)) == 1


def test_each_scaling_rule_is_right_and_both_together_diverge(tables):
    rule_1, rule_2, both = tables["SGD, least squares, 144 features, N = 3"]
    assert float(rule_1[6]) < 1e-3 and float(rule_2[6]) < 1e-3
    [steps] = re.findall(r"^diverges after (\d+) steps$", both[6])
    # Both runs were ended there, with finite weights: the comparison says something.
    assert int(steps) < int(both[4]) and 0 < float(both[7]) <= 1.5e-5
    # Each of up to 240 steps rounds the weights by half an eps of 1.2e-7.
    assert float(rule_1[7]) <= 1.5e-5 and float(rule_2[7]) <= 1.5e-5
    table = tables["--batch_size 192 --lr 5e-5 on N processes"]
    assert table[2] == ["4", "48", "192", "768", "5.0e-05", "1.0e-04", "2.0e-04"]


def test_ddp_and_data_parallel_equal_one_process_after_20_steps(figures, tables):
    table = tables["loss on 3 devices and of one process, same batches"]
    losses = [tuple(map(float, row[1:])) for row in table]
    assert losses[-1][2] < 0.5 * losses[0][2]
    # 20 steps, each from sums over 61 rows in two orders, times rate 0.2 and 10 for momentum 0.9:
    # 20 · 61 · 6e-8 · 2 = 1.5e-4 at worst, far below what a wrong gradient moves.
    for ddp, data_parallel, single in losses:
        assert abs(ddp - single) < 1.5e-4 and abs(data_parallel - single) < 1.5e-4
    ddp, data_parallel = tables["weights after 20 steps"]
    assert ddp[1] == "21 20 20" and data_parallel[1] == "21 21 19"
    assert float(ddp[2]) < 1.5e-4 and float(data_parallel[2]) < 1.5e-4
    assert "the weights of DDP's ranks: 0.0e+00." in figures["output"]


def test_data_parallel_copies_the_weights_and_sums_their_gradients(monkeypatch):
    """A device sees its own rows and a copy of the weights; the first one has the gradient."""
    network = torch.nn.Linear(4, 2)
    seen = []
    network.register_forward_pre_hook(
        lambda module, inputs: seen.append((len(inputs[0]), module.weight is network_weight))
    )
    network_weight = network.weight
    x = torch.randn(10, 4)
    training.DataParallelByHand(network, 4)(x).square().sum().backward()
    assert seen == [(3, False), (3, False), (3, False), (1, False)]
    gradient = 2 * (x @ network.weight.T + network.bias).T @ x
    torch.testing.assert_close(network.weight.grad, gradient.detach())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert torch.nn.DataParallel(network).device_ids == []


def test_a_run_is_ended_where_its_loss_diverges_or_is_no_number():
    model = training.linear(2)
    for factor in (1e9, float("nan")):
        run = training.train(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            [(torch.ones(1, 2), torch.ones(1, 1))] * 5,
            lambda out, y, factor=factor: (factor * (out - y)).sum().abs(),
        )
        assert len(run.losses) == 1 and run.diverged
    assert not training.Training([2e6, 0.5], torch.zeros(1), 0.0).diverged


def test_through_the_first_device_of_data_parallel_pass_more_numbers(tables):
    """8 · 16 + 16 + 16 · 3 + 3 = 195 weights, 61 rows of 8 features and 3 classes, 3 devices."""
    table = tables["numbers that pass through the busiest device in a step, N = 3"]
    data_parallel, ddp = ((int(row[1]), int(row[3])) for row in table)
    rows = 61 - 21
    assert data_parallel == (2 * 195 + rows * (8 + 3), 2 * 195 + rows * 3)
    assert ddp == (260, 260)  # 2 · 2/3 · 195


def test_the_ring_computes_what_the_collectives_do(figures):
    assert figures["wrong rings"] == [[]] * SIZE
    [error] = re.findall(r"from dist.all_reduce by\n(\S+) of", figures["output"])
    assert float(error) < 3e-7  # two additions, each rounded by at most half an eps of 1.2e-7


def test_the_ring_sends_what_the_theory_says(tables):
    table = tables["x of 0.0038147 MiB, the fastest of 3 turns"]
    assert [row[1] for row in table] == ["2"] * 5 + ["3"] * 5
    for name, _, _, sent, theory, *_ in table:
        assert float(sent) == pytest.approx(float(theory), abs=0.002), name
    shares = {row[0]: row[4] for row in table[5:]}
    assert shares["all-reduce"] == "1.333" and shares["all-reduce at rank 0"] == "2.000"


def test_over_a_cable_the_ring_takes_the_time_of_the_theory(figures):
    """No less, on any machine; on a quiet one hardly more."""
    for name, sends in figures["seconds by cable"].items():
        theory = ring.WAYS[name][2](SIZE)
        assert sends > 0.98 * theory, name
    seconds = figures["seconds by cable"]
    assert seconds["all-reduce"] < seconds["all-reduce at rank 0"]


def test_batch_norm_depends_on_other_rows_and_ranks_and_layer_norm_does_not(tables):
    train, evaluation, layer = tables["one process, rows of N(0, 1)"]
    assert float(train[1]) > 0.5 and float(evaluation[1]) == float(layer[1]) == 0
    assert train[2].startswith("ValueError: Expected more than 1 value per channel")
    assert evaluation[2] == layer[2] == "a result"
    rows = tables["25 sorted rows over 3 ranks, beside one process"]
    batch, sync, layer = (tuple(map(float, row[1:])) for row in rows)
    # Sums of at most 25 rows and 16 features in fp32, in another order.
    assert batch[0] > 0.1 and sync[0] < 1e-5 and layer[0] < 1e-5
    assert batch[1] == sync[1] == layer[1] == 0  # equal weights on all ranks
    assert batch[2] > 0.01 and layer[2] == 0


def test_fp16_needs_a_scale_and_master_weights(tables):
    rows = {row[0]: row[1:] for row in tables["300 steps on small targets"]}
    zeros = {name: int(row[0].rstrip("%")) for name, row in rows.items()}
    errors = {name: float(row[1]) for name, row in rows.items()}
    assert errors["fp32"] < 1e-10 and zeros["fp32"] == 0
    assert errors["fp16"] > 1e-3 and zeros["fp16"] > 50
    assert errors["fp16, scaled"] < 1e-6 and zeros["fp16, scaled"] == 0
    assert errors[".half(), scaled"] > 5 * errors["fp16, scaled"]


def test_an_overflow_is_skipped_and_halves_the_scale_before_the_eyes_of_the_reader(figures, tables):
    table = tables["from a scale of 2^40, doubled after 100 good steps"]
    overflows = [row for row in table if row[2] in ("inf", "nan")]
    assert len(overflows) >= 5
    assert {row[3] for row in overflows} == {"skip the step, halve the scale"}
    assert [row[1] for row in overflows] == [f"2^{40 - number}" for number in range(len(overflows))]
    first_good, first_doubled, *_ = table[len(overflows) :]
    assert first_good[0] == str(len(overflows) + 1) and first_good[3] == "step"
    assert first_doubled[0] == str(len(overflows) + 100) and "double" in first_doubled[3]
    assert f"{len(overflows)} of 300 steps were skipped" in figures["output"]


# ---------------------------------------------------------------- as a user runs it


def test_the_commands_that_meet_the_handout(figures):
    """The fixture ran every lesson; the page's commands name them all."""
    commands = handout_commands(ROOT / "labs/collectives/README.md")
    assert {flags[0] for _, flags in commands} == {"--lesson"}
    assert {flags[1] for _, flags in commands} == set(lessons.LESSONS)
    for name in lessons.LESSONS:
        assert f"\n## {name}: " in figures["output"]


def test_it_starts_its_own_processes_and_runs_under_torchrun(tmp_path):
    lab.main(lab.Config(lesson="sampler", processes=2))
    output = forked_ranks(2, "labs/collectives/__main__.py", "--lesson", "sampler", cwd=tmp_path)
    assert output.count("## sampler") == 1 and "with N = 2" in output


def test_gpus_as_the_handout_types_them(monkeypatch):
    """What cannot run here: the GPU each rank takes, the backend, and the destination's rank."""
    monkeypatch.setattr(sys, "argv", "lab --gpu_devices 0 1 3 2 --target_device 3".split())
    config = lab.parse_flags(lab.Config)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    lab.check_devices(config, 4)
    with refused("3 processes need as many different GPUs"):
        lab.check_devices(config, 3)
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "new_group", lambda backend: backend)

    def gather(x, received, dst, group):
        calls.append((len(received), dst, group))

    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(dist, "gather", gather)
    gathering.gather_on_gpus(torch.arange(2), list(config.gpu_devices), destination=2)
    assert calls == [3, (4, 2, "nccl")]


@pytest.mark.filterwarnings("ignore:There is an imbalance")
def test_on_gpus_the_lesson_runs_the_real_data_parallel(monkeypatch, capsys):
    """What cannot run here: which devices `nn.DataParallel` and DDP get, and its warnings."""
    given = []
    modules = []

    def data_parallel(network, device_ids):
        given.append(device_ids)
        warnings.warn("There is an imbalance between your GPUs.", stacklevel=1)
        return network

    def move(network, device):
        modules.append(device)
        return network

    monkeypatch.setattr(training.nn, "DataParallel", data_parallel)
    monkeypatch.setattr(training.nn.Module, "to", move)
    monkeypatch.setattr(dist, "new_group", lambda backend: None)
    monkeypatch.setattr(training, "LARGE", training.Sizes())
    with one_rank():
        training.lesson_ddp(gpus=(5, 3))
    assert given == [[5, 3]] * 2 and modules == ["cuda:5"] * 4
    output = capsys.readouterr().out
    assert output.count("PyTorch warns: There is an imbalance") == 1
    assert "written by hand" not in output and "ms a step" in output


def test_devices_that_do_not_fit_are_named_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with refused("--gpu_devices 0 1: this machine has 0 GPU(s)"):
        lab.main(lab.Config(gpu_devices=(0, 1), target_device=0))
    with refused("--target_device 4 must be one of 1, 2, 3"):
        lab.main(lab.Config(target_device=4))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with refused("start at least 2"):
        lab.main(lab.Config())


@contextlib.contextmanager
def one_rank():
    """A process group of this process alone."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fails_on_rank_1() -> None:
    """A rank that ends with an error while the others wait for it."""
    if dist.get_rank() == 1:
        os._exit(2)
    dist.barrier()


def test_sigterm_ends_the_ranks_too():
    with pytest.raises(SystemExit), common.processes(time.sleep, 2, 600) as context:
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)
    assert not any(process.is_alive() for process in context.processes)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_no_rank_waits_for_one_that_failed():
    with common.processes(fails_on_rank_1, 2) as context:
        with pytest.raises(Exception, match=r"terminated with|Connection"):
            while not context.join(timeout=30):
                pass
        assert not any(process.is_alive() for process in context.processes)
