"""The fewest micro-batches that fit in a GPU's memory, or the error itself."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import micro_batches as module
from data import Collate
from engine.distributed import World
from micro_batches import fewest_micro_batches, micro_batches_that_fit
from text.rows import flatten

CUDA = torch.device("cuda")


def device_of(size: int, work: int, seen: list):
    def trial(micro_batches: int) -> None:
        seen.append(micro_batches)
        if -(-work // micro_batches) > size:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return trial


@given(st.integers(1, 1000), st.integers(1, 5000))
def test_the_fewest_powers_of_two(size, work):
    seen = []
    micro_batches = fewest_micro_batches(device_of(size, work, seen), CUDA, largest=8192)
    assert -(-work // micro_batches) <= size and (
        micro_batches == 1 or -(-work // (micro_batches // 2)) > size
    )
    assert seen == [2**i for i in range(len(seen))] and seen[-1] == micro_batches


def test_what_never_fits_is_an_error():
    seen = []
    with pytest.raises(torch.OutOfMemoryError):
        fewest_micro_batches(device_of(0, 10, seen), CUDA, largest=8)
    assert seen == [1, 2, 4, 8]


@pytest.mark.parametrize(
    "words",
    [  # of errors that are no OutOfMemoryError
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_full_card_has_other_words_for_it(words):
    trial = Mock(side_effect=[RuntimeError(words), None])
    assert fewest_micro_batches(trial, CUDA) == 2


@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("shapes (1, 2) and (3, 4)")])
def test_other_errors_are_not_taken_for_it(error):
    with pytest.raises(type(error)):
        fewest_micro_batches(Mock(side_effect=error), CUDA)


class Loss(torch.nn.Linear):
    """Notes the source lengths of each batch, and how many reserved tensors there are meanwhile."""

    def __init__(self, reserved: list):
        super().__init__(3, 2)
        self.reserved = reserved
        self.calls = []

    def forward(self, src, src_pad, *_):
        alive = sum(tensor() is not None for tensor in self.reserved)
        self.calls.append(((~src_pad).sum(1).tolist(), alive))
        return self.weight.sum() + self.bias.sum(), None


class Pairs:
    """24 pairs: `number` tokens on both sides of pair `number`, counted from 1."""

    def __init__(self):
        lengths = np.arange(1, 25, dtype=np.int32)
        self.lengths = {"source": lengths, "target": lengths}

    def take(self, indices):
        rows = flatten([[3] * (index + 1) for index in indices])
        return rows, rows


@pytest.fixture
def loss_of(monkeypatch) -> Loss:
    """Steps of fewer than 4 micro-batches do not fit."""
    empty_like, reserved = torch.empty_like, []

    def noted(tensor):
        made = empty_like(tensor)
        reserved.append(weakref.ref(made))
        return made

    monkeypatch.setattr(torch, "empty_like", noted)
    ids = {"pad": 0, "bos": 1, "eos": 2}
    monkeypatch.setattr(module, "collate_for", lambda prepared: Collate(ids, ids))

    def fewest(trial, device):
        for micro_batches in (1, 2, 4):
            trial(micro_batches)
        return 4

    monkeypatch.setattr(module, "fewest_micro_batches", fewest)
    return Loss(reserved)


def fit(loss_of: Loss, others_need: int = 0) -> int:
    """As one of two ranks, with a device that says it is a GPU."""

    class PretendedGpu(World):
        def maximum(self, found):
            return [max(found, others_need)]

    device = SimpleNamespace(type="cuda")
    batch_to = "data.Batch.to"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_to, lambda batch, device: batch)
        prepared = SimpleNamespace(train=Pairs())
        precision = SimpleNamespace(autocast=nullcontext)
        world = PretendedGpu(0, 2, device)
        return micro_batches_that_fit(lambda: loss_of, prepared, 200, precision, world)


def test_a_trial_needs_as_much_as_training(loss_of):
    """This rank's share of the heaviest step; three more tensors for each weight."""
    assert fit(loss_of) == 4
    # The most padded tokens that fit 200, longest first: of the widths 19 to 25, eos included.
    widest = [lengths for lengths, _ in loss_of.calls[: len(loss_of.calls) // 3]]
    assert all(alive == 6 for _, alive in loss_of.calls)
    parts = len(loss_of.calls) // 3
    for number, lengths in enumerate(widest):
        assert lengths == sorted(lengths, reverse=True)
        for trial, micro_batches in enumerate((1, 2, 4)):
            share, _ = loss_of.calls[trial * parts + number]
            assert share == lengths[::micro_batches]
    assert max(len(lengths) * lengths[0] for lengths in widest) > 60  # half of a step of 200


def test_all_ranks_get_the_number_of_the_rank_that_needs_most(loss_of):
    assert fit(loss_of, others_need=8) == 8


def test_a_cpu_tries_nothing():
    world = World(0, 1, torch.device("cpu"))
    assert micro_batches_that_fit(None, None, 200, None, world) == 1
