"""CUDA code on a machine without a GPU: fake tensors in a process of its own (tests/cuda/), kernels compiled for cards that are
not there. What this cannot show is in docs/cuda.md."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import HANGS

import fast
from data import BucketSampler, Collate, batches_of, one_ahead
from fast import build, cuda_training
from fast.cuda_training import CapturedLoss, shapes_of
from model import ModelConfig, SummedLoss, Translator
from text.store import Rows

HERE, CPU = Path(__file__).parent / "cuda", torch.device("cpu")
IDS = {"pad": 0, "bos": 1, "eos": 2}
SIZES = dict(
    d_model=32, nhead=4, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=64, dropout=0.0
)
WRONG = ["wrong device", "question", "slow copy"]  # on purpose
MAY_WAIT = ("decode", "validation")


@pytest.fixture(scope="session")
def checked(tmp_path_factory) -> dict[str, dict]:
    """What tests/cuda/checks.py found, by name."""
    if torch.version.cuda or build.why_not():
        pytest.skip("needs a PyTorch built for CPUs, and g++")
    guard = tmp_path_factory.mktemp("guard") / "guard.so"
    folder = Path(torch.__file__).parent
    words = [
        *build.compiler(),
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-isystem",
        folder / "include",
        HERE / "guard.cpp",
    ]
    words += [f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu", "-o", guard]
    subprocess.run(words, check=True)
    environment = {
        **os.environ,
        "CUDA_GUARD": str(guard),
        "PYTHONPATH": str(HERE.parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, HERE / "checks.py"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


# ---------------------------------------------------------------- fake tensors


def test_everything_on_the_gpu_and_no_waiting(checked):
    faults = {
        name: [line["error"], line["mixed"], [] if name.startswith(MAY_WAIT) else line["waits"]]
        for name, line in checked.items()
        if name not in WRONG
    }
    assert len(faults) == 26 and {name: found for name, found in faults.items() if any(found)} == {}
    assert all(
        len(line["waits"]) <= 3 for name, line in checked.items() if name.startswith("decode")
    )  # of 9 steps


def test_the_pretence_notices_what_is_wrong(checked):
    device, question, copy = (checked[name] for name in WRONG)
    assert device["error"].startswith("FakeTensorDeviceMismatchError")
    assert "_local_scalar_dense" in question["waits"][0] and "_to_copy" in copy["waits"][-1]


# ---------------------------------------------------------------- data


class Pairs:
    """As text.store.TokenizedPairs, with random tokens."""

    def __init__(self, count: int = 600, vocabulary: int = 50):
        random = np.random.default_rng(3)
        lengths = np.clip(random.lognormal(2, 0.6, (2, count)), 1, 40).astype(int)
        self.lengths = dict(zip(("source", "target"), lengths))
        self.tokens = {
            side: [random.integers(3, vocabulary, n) for n in self.lengths[side]]
            for side in self.lengths
        }

    def __getitems__(self, rows) -> tuple[Rows, Rows]:
        return tuple(
            Rows(np.concatenate([self.tokens[side][row] for row in rows]), self.lengths[side][rows])
            for side in ("source", "target")
        )


def set_up(**sizes) -> tuple[Translator, BucketSampler, Iterator]:
    """A small model without dropout, a sampler and batches of made-up pairs."""
    torch.manual_seed(0)
    model, pairs = Translator(ModelConfig(50, 50, **SIZES | sizes)).train(), Pairs()
    sampler = BucketSampler(pairs.lengths, 600, seed=1)
    return model, sampler, batches_of(pairs, sampler, Collate(IDS, IDS), 0, CPU)


def inputs_of(batch) -> tuple:
    return batch.src, batch.src_pad, batch.tgt_in, batch.real, batch.tgt_out


def test_batches_come_in_order_from_the_thread(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    pulled = []
    ahead = one_ahead((pulled.append(n) or n for n in range(10**6)), torch.device("cuda", 0))
    assert [next(ahead) for _ in range(5)] == list(range(5))
    ahead.close()  # the thread ends with it
    assert 5 <= len(pulled) <= 6


@pytest.mark.parametrize("ranks, accumulate", [(1, 1), (2, 1), (2, 3)])
def test_every_micro_batch_fits_a_shape_with_little_padding(ranks, accumulate):
    pairs, added, plain = Pairs(), 0, 0
    for rank in range(ranks):
        sampler = BucketSampler(
            pairs.lengths, 600, seed=1, rank=rank, world_size=ranks, accumulate=accumulate
        )
        shapes = shapes_of(sampler)
        assert len(shapes) < sampler.steps_per_epoch
        batches = batches_of(pairs, sampler, Collate(IDS, IDS), 0, CPU)
        for batch in (next(batches) for _ in range(2 * sampler.steps_per_epoch)):
            sizes = (*batch.src.shape, batch.tgt_in.size(1), len(batch.real))
            fitting = [shape for shape in shapes if all(map(int.__le__, sizes, shape))]
            places = [b * (s + t) for b, s, t, _ in [sizes, *fitting]]
            plain, added = plain + places[0], added + min(places[1:]) - places[0]
    # A micro-batch may be narrower than its step, whose shape it has: the bound is that of whole steps.
    assert added <= (0.08 if ranks * accumulate == 1 else 0.4) * plain


# ---------------------------------------------------------------- training by CUDA graphs, as they are


@pytest.mark.parametrize("norm_first", [False, True])
def test_captured_training_has_the_losses_and_gradients_of_plain_training(norm_first):
    """fp32 sums of some thousand terms, in another order: 1e-5 of the whole is ten times what is seen."""
    model, sampler, batches = set_up(
        num_encoder_layers=2, num_decoder_layers=2, norm_first=norm_first
    )
    plain = SummedLoss(model, 0.1)
    captured = CapturedLoss(plain, shapes_of(sampler))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in (next(batches) for _ in range(20)):
        inputs, results = inputs_of(batch), []
        for loss_of in (plain, captured):
            optimizer.zero_grad()
            losses = loss_of(*inputs)
            (losses[0] / batch.target_tokens).backward()
            results.append(
                (*losses, torch.cat([weight.grad.flatten() for weight in model.parameters()]))
            )
        for wanted, got in zip(*results):
            assert (got - wanted).norm() <= 1e-5 * wanted.norm()
        optimizer.step()  # the weights change in place: the next pass must see it
    assert captured.inputs and not losses[1].requires_grad
    with torch.no_grad():
        assert torch.equal(captured(*inputs)[0], plain(*inputs)[0])


class Refuses:
    """Graphs whose capture breaks a rule."""

    def stream_of_its_own(self):
        return nullcontext()

    def capture(self, step):
        raise RuntimeError("operation not permitted when stream is capturing")


def test_training_goes_on_as_it_is_if_a_capture_fails(capsys):
    model, sampler, batches = set_up()
    captured, inputs = (
        CapturedLoss(SummedLoss(model, 0.1), shapes_of(sampler)),
        inputs_of(next(batches)),
    )
    captured.graphs = Refuses()
    losses = [captured(*inputs)[0].item() for _ in range(3)]
    assert len(set(losses)) == 1 and captured.graphs is None
    error = capsys.readouterr().err
    assert error.startswith("note: training goes on without CUDA graphs") and error.count("\n") == 1
    assert "not permitted" in error


def test_a_shape_for_which_the_graphs_leave_no_memory_is_computed_without_them(monkeypatch, capsys):
    model, sampler, batches = set_up()
    captured, run = CapturedLoss(SummedLoss(model, 0.1), shapes_of(sampler)), CapturedLoss.run
    captured.captured[0, 0, 0, 0] = object()  # of another shape

    def crowded(self, shape):
        if self.captured:
            raise torch.OutOfMemoryError("CUDA out of memory")
        run(self, shape)

    monkeypatch.setattr(CapturedLoss, "run", crowded)
    inputs = inputs_of(next(batches))
    assert captured(*inputs)[0].item() == pytest.approx(captured.plain(*inputs)[0].item(), rel=1e-5)
    assert not captured.captured and "goes on without CUDA graphs" in capsys.readouterr().err
    monkeypatch.setattr(
        CapturedLoss, "run", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    )
    with pytest.raises(torch.OutOfMemoryError):  # no fault of theirs
        captured(*inputs)


@pytest.mark.parametrize("graphs", [None, object()])
def test_graphs_do_not_outlive_their_dropout(graphs, monkeypatch):
    """Nor does their pool, which cannot be captured into without them; and where there are none, none come."""
    monkeypatch.setattr(cuda_training, "Graphs", lambda device: object())
    model, sampler, batches = set_up(dropout=0.1)
    captured, old = CapturedLoss(SummedLoss(model, 0.1), shapes_of(sampler)), object()
    captured.graphs = graphs
    for p, kept in ((0.1, True), (0.0, False)):
        model.set_dropout(p)
        captured.inputs[0, 0, 0, 0] = captured.captured[0, 0, 0, 0] = (
            old  # of a shape that does not come up
        )
        captured(*inputs_of(next(batches)))
        assert ((0, 0, 0, 0) in captured.captured) == ((0, 0, 0, 0) in captured.inputs) == kept
        assert (captured.graphs is graphs) == (kept or graphs is None)


def test_captured_training_is_for_gpus_and_says_so():
    model, said = set_up()[0], []
    assert not fast.can_capture(model, torch.bfloat16, log=said.append)
    assert said == [
        "note: --captured has no effect: it needs a GPU, bf16 or fp32, and neither --compile nor --shard"
    ]


# ---------------------------------------------------------------- torch.compile


def test_the_loss_is_one_graph_for_all_shapes():
    """As train.py --compile has it, but for the compiler itself."""
    model, sampler, _ = set_up()
    batches = batches_of(Pairs(), sampler, Collate(IDS, IDS, pad_multiple=16), 0, CPU)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(SummedLoss(model, 0.1), dynamic=True, backend=backend, fullgraph=True)
    for number, batch in enumerate(next(batches) for _ in range(18)):
        model.set_dropout(0.1 * (number >= 12))
        compiled(*inputs_of(batch))[0].backward()
        assert 1 <= len(graphs) <= (2 if number < 12 else 3)  # one more where dropout begins


def test_no_row_of_a_padded_batch_is_all_padding():
    """A CPU's softmax makes zeros of such a row; other kernels make nan, and the gradients of all rows with it."""
    inputs = cuda_training.empty_inputs((4, 6, 5, 12), torch.device("cpu"))
    src_pad = torch.tensor([[False, False, True], [False, False, False]])
    ids, places = torch.ones(2, 3, dtype=torch.long), torch.arange(6)
    cuda_training.fill(inputs, ids, src_pad, ids, places, torch.ones(6, dtype=torch.long))
    assert not inputs[1].all(1).any() and torch.equal(inputs[1][:2, :3], src_pad)
