"""Muon: PyTorch's own is the reference; ranks stay equal; gradients that are not finite."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from conftest import fork_ranks
from torch import nn

from engine import distributed, muon
from engine.distributed import full_tensor
from engine.muon import Muon, orthogonal
from engine.optimizer import ADAMW, OPTIMIZERS, make_optimizer
from engine.precision import Precision

SHAPES = [(8, 24), (24, 8), (8, 8), (8, 8)]
CPU = torch.device("cpu")


def weights_with_gradients(steps: int):
    """Matrices and vectors drawn from one seed, and `steps` gradients for each."""
    generator = torch.Generator().manual_seed(1)
    shapes = [*SHAPES, (8,)]
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    gradients = [[torch.randn(w.shape, generator=generator) for w in weights] for _ in range(steps)]
    return weights[:4], weights[4:], gradients


def take_steps(optimizers, weights, gradients):
    """One step for each list of gradients; returns copies of the weights."""
    for step in gradients:
        for weight, gradient in zip(weights, step):
            weight.grad = gradient.clone()
        for each in optimizers:
            each.step()
    return [weight.detach().clone() for weight in weights]


def test_muon_takes_the_matrices_inside_and_adamw_the_rest():
    model = nn.Sequential(nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2))
    groups = make_optimizer("muon", model, model[1], 0.1, torch.float32).param_groups
    others, matrices = (group["params"] for group in groups)
    assert len(matrices) == 4 and all(weight.ndim == 2 for weight in matrices)
    assert {*map(id, others), *map(id, matrices)} == {*map(id, model.parameters())}
    assert others[0] is model[0].weight
    assert type(make_optimizer("adamw", model, model[1], 0.1, torch.float32)) is torch.optim.AdamW


@pytest.mark.parametrize("found_inf", [None, torch.tensor(0.0)])
def test_a_matrix_without_a_gradient_stays(found_inf):
    matrices, others, [gradients] = weights_with_gradients(1)
    gradients[2] = None
    before = [matrix.detach().clone() for matrix in matrices]
    for weight, gradient in zip([*matrices, *others], gradients):
        weight.grad = gradient
    ours = Muon(matrices, others, 1e-2, torch.float32, **ADAMW)
    ours.found_inf = found_inf
    ours.step()
    moved = [not torch.equal(matrix, old) for matrix, old in zip(matrices, before)]
    assert moved == [True, True, False, True]


@pytest.mark.parametrize("found_inf", [None, torch.tensor(0.0)])
def test_moves_as_pytorchs_muon_and_adamw(found_inf):
    matrices, others, gradients = weights_with_gradients(4)
    theirs = torch.optim.Muon(matrices, 1e-2, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, 1e-2, **ADAMW)
    expected = take_steps([theirs, adamw], [*matrices, *others], gradients)
    matrices, others, gradients = weights_with_gradients(4)
    ours = Muon(matrices, others, 1e-2, torch.bfloat16, **ADAMW)
    ours.found_inf = found_inf
    moved = take_steps([ours], [*matrices, *others], gradients)
    # Four updates of at most 0.2 · √24 · 0.01 each, in bf16 (8 bits), which round differently.
    torch.testing.assert_close(moved, expected, rtol=0, atol=3 * 4 * 0.01 * 2**-8)


def test_a_gradient_that_is_not_finite_moves_nothing():
    matrices, others, gradients = weights_with_gradients(2)
    muon = Muon(matrices, others, 1e-2, torch.float32, **ADAMW)
    before = take_steps([muon], [*matrices, *others], gradients[:1])
    muon.found_inf = torch.tensor(1.0)
    nans = [gradient * float("nan") for gradient in gradients[1]]
    after = take_steps([muon], [*matrices, *others], [nans])
    assert all(map(torch.equal, before, after))
    assert all(muon.state[weight]["exp_avg"].isfinite().all() for weight in matrices)


def test_a_saved_one_continues_as_if_never_stopped():
    matrices, others, gradients = weights_with_gradients(4)
    muon = Muon(matrices, others, 1e-2, torch.float32, **ADAMW)
    expected = take_steps([muon], [*matrices, *others], gradients)
    matrices, others, gradients = weights_with_gradients(4)
    first = Muon(matrices, others, 1e-2, torch.float32, **ADAMW)
    take_steps([first], [*matrices, *others], gradients[:2])
    second = Muon(matrices, others, 1.0, torch.float32, **ADAMW)
    second.load_state_dict(first.state_dict())
    resumed = take_steps([second], [*matrices, *others], gradients[2:])
    assert all(map(torch.equal, resumed, expected))


def test_orthogonal():
    matrices = torch.randn(5, 16, 40, generator=torch.Generator().manual_seed(1))
    for drawn in (matrices, matrices.mT):
        made = orthogonal(drawn, torch.float32)
        singular = torch.linalg.svdvals(made)
        # Jordan et al. 2024 name 0.7 and 1.2 for most.
        assert singular.min() > 0.6 and singular.max() < 1.3
        u, _, vh = torch.linalg.svd(drawn, full_matrices=False)
        cosine = (made * (u @ vh)).sum() / made.norm() / (5 * 16) ** 0.5
        assert cosine > 0.95  # the directions stay
        # Smaller than any number of fp16.
        tiny = orthogonal(1e-9 * drawn, torch.float16).float()
        torch.testing.assert_close(tiny, made, rtol=0, atol=0.01)
    # The squares of these underflow in fp32.
    assert orthogonal(1e-25 * matrices, torch.float32).isfinite().all()
    assert not orthogonal(torch.zeros(1, 256, 256), torch.float32).any()


def test_a_matrix_whose_gradient_vanishes_comes_to_rest():
    """Also when the momentum has decayed so far that its square underflows in fp32."""
    matrices, others, gradients = weights_with_gradients(1)
    muon = Muon(matrices, others, 1e-2, torch.float32, **ADAMW)
    muon.param_groups[1]["weight_decay"] = 0.0
    before = take_steps([muon], [*matrices, *others], gradients)
    for weight in matrices:
        muon.state[weight]["exp_avg"] *= 1e-25
    zeros = [torch.zeros_like(gradient) for gradient in gradients[0]]
    after = take_steps([muon], [*matrices, *others], [zeros] * 5)
    assert all(map(torch.equal, before[:4], after[:4]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_first_step_that_is_not_finite_leaves_no_trace(name):
    """In fp16 this is ordinary: the first scale of the loss is often too large."""

    def weights_after_two_steps(skipped_before: int) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
        tested = make_optimizer(name, model, model[0], 0.01, torch.float32)
        for step in range(skipped_before + 2):
            is_bad = step < skipped_before
            for weight in model.parameters():
                weight.grad = torch.full_like(weight, math.nan) if is_bad else weight.detach().sin()
            tested.found_inf = torch.tensor(float(is_bad))
            tested.step()
        return [weight.detach() for weight in model.parameters()]

    assert all(map(torch.equal, weights_after_two_steps(1), weights_after_two_steps(0)))


# ---------------------------------------------------------------- several processes


def round_differently() -> None:
    """Make the matrix products of this process those of another machine."""
    # oneDNN and MKL read these before their first product; the result is the same on old machines,
    # so Muon's products are computed in fp64 as well.
    os.environ.update(ONEDNN_MAX_CPU_ISA="AVX2", MKL_ENABLE_INSTRUCTIONS="AVX2")
    exact = muon.orthogonal
    muon.orthogonal = lambda matrices, dtype: exact(matrices, torch.float64).to(dtype)


def compare_the_ranks() -> None:
    """In each of two processes: train with DDP and FSDP2, then compare the weights of both."""
    if os.environ["RANK"] == "1":
        round_differently()
    world = distributed.init("cpu")
    for sharded in (False, True):
        for name in ("muon", "adamw"):
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, dropout=0.0)
            # Three matrices of each shape: a share of two, and one of one.
            inside = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            model = nn.Sequential(nn.Linear(5, 8), inside)
            if sharded:
                world.shard(model, print)
            runner = world.data_parallel(model)
            weights = list(model.parameters())
            tested = make_optimizer(name, model, inside, 0.01, torch.float32)
            precision = Precision(CPU, "fp32", "")
            start = [full_tensor(weight.detach()).clone() for weight in weights]
            for step in range(1, 11):
                world.set_seed(1, step)  # other inputs on each rank
                runner(torch.randn(3, 2, 5)).pow(3).sum().backward()
                precision.step(tested, weights, 1.0, step)
            end = [full_tensor(weight.detach()) for weight in weights]
            assert not any(map(torch.equal, start, end))
            mine = torch.cat([weight.flatten() for weight in end])
            first = mine.clone()
            dist.broadcast(first, src=0)
            assert mine.isfinite().all()
            assert torch.equal(mine, first), f"{name}, sharded: {sharded}"
    world.stop()


def test_the_weights_of_all_ranks_stay_equal_bit_for_bit(tmp_path):
    """Also on unlike machines, whose matrix products round differently."""
    ranks = fork_ranks(2, "engine/__init__.py", cwd=tmp_path, first=(compare_the_ranks,))
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output for rank in ranks]
