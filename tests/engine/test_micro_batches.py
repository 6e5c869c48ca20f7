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

from engine import micro_batches as module
from engine.micro_batches import fewest_micro_batches, micro_batches_that_fit

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
    """Notes the rows of each batch, and how many tensors of `reserved` there are meanwhile."""

    def __init__(self, reserved: list):
        super().__init__(3, 2)
        self.reserved = reserved
        self.calls = []

    def forward(self, rows):
        alive = sum(tensor() is not None for tensor in self.reserved)
        self.calls.append((rows.tolist(), alive))
        return self.weight.sum() + self.bias.sum(), None


@pytest.fixture
def loss_of(monkeypatch) -> Loss:
    """Steps of fewer than 4 micro-batches do not fit."""
    empty_like, reserved = torch.empty_like, []

    def noted(tensor):
        made = empty_like(tensor)
        reserved.append(weakref.ref(made))
        return made

    monkeypatch.setattr(torch, "empty_like", noted)

    def fewest(trial, device):
        for micro_batches in (1, 2, 4):
            trial(micro_batches)
        return 4

    monkeypatch.setattr(module, "fewest_micro_batches", fewest)
    return Loss(reserved)


def fit(loss_of: Loss, others_need: int = 0) -> int:
    """As one of two ranks, with two steps of 16 and 8 pairs."""

    def collate(rows):
        return SimpleNamespace(to=lambda device: SimpleNamespace(inputs=[rows]))

    world = SimpleNamespace(
        size=2, device=torch.device("cpu"), maximum=lambda found: [max(found, others_need)]
    )
    pairs = SimpleNamespace(take=lambda rows: rows)
    precision = SimpleNamespace(autocast=nullcontext)
    steps = [np.arange(16), np.arange(8)]
    return micro_batches_that_fit(loss_of, precision, pairs, steps, collate, world)


def test_a_trial_needs_as_much_as_training(loss_of):
    """This rank's share of a step; three more tensors for each weight. No gradient is left."""
    assert fit(loss_of) == 4
    shares = [list(range(count)[:: 2 * parts]) for parts in (1, 2, 4) for count in (16, 8)]
    assert loss_of.calls == [(share, 6) for share in shares]
    assert all(weight.grad is None for weight in loss_of.parameters())


def test_all_ranks_get_the_number_of_the_rank_that_needs_most(loss_of):
    assert fit(loss_of, others_need=8) == 8


def test_a_sharded_model_is_not_tried(loss_of, monkeypatch):
    monkeypatch.setattr("engine.micro_batches.is_sharded", lambda module: module is loss_of)
    assert fit(loss_of) == 1 and not loss_of.calls
