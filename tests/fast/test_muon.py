"""Muon: PyTorch's own as the reference; nothing moves after a gradient that is not finite; a resumed one goes on alike."""

import pytest
import torch

from fast.muon import ADAMW, Muon, make_optimizer, orthogonal

SHAPES = [(8, 24), (24, 8), (8, 8), (8, 8)]


def weights_with_gradients(steps: int):
    """Matrices and vectors drawn from one seed, and `steps` gradients for each."""
    generator = torch.Generator().manual_seed(1)
    weights = [
        torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [*SHAPES, (8,)]
    ]
    gradients = [[torch.randn(w.shape, generator=generator) for w in weights] for _ in range(steps)]
    return weights[:4], weights[4:], gradients


def run(optimizers, weights, gradients):
    for step in gradients:
        for weight, gradient in zip(weights, step):
            weight.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    return [weight.detach().clone() for weight in weights]


def test_matrices_inside_are_muons_and_all_else_is_adamws():
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.TransformerEncoderLayer(8, 2))
    groups = make_optimizer("muon", model, model[1], 0.1, torch.float32).param_groups
    others, matrices = (group["params"] for group in groups)
    assert len(matrices) == 4 and all(weight.ndim == 2 for weight in matrices)
    assert {*map(id, others), *map(id, matrices)} == {*map(id, model.parameters())} and others[
        0
    ] is model[0].weight
    assert type(make_optimizer("adamw", model, model[1], 0.1, torch.float32)) is torch.optim.AdamW


@pytest.mark.parametrize("found_inf", [None, torch.tensor(0.0)])
def test_moves_as_pytorchs_muon_and_adamw(found_inf):
    matrices, others, gradients = weights_with_gradients(4)
    expected = run(
        [
            torch.optim.Muon(matrices, 1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, 1e-2, **ADAMW),
        ],
        [*matrices, *others],
        gradients,
    )
    matrices, others, gradients = weights_with_gradients(4)
    ours = Muon(matrices, others, 1e-2, torch.bfloat16)
    ours.found_inf = found_inf
    # Four updates of at most 0.2 · √24 · 0.01 each, in bf16 (8 bits), which round differently a few times.
    moved = run([ours], [*matrices, *others], gradients)
    torch.testing.assert_close(moved, expected, rtol=0, atol=3 * 4 * 0.01 * 2**-8)


def test_a_gradient_that_is_not_finite_moves_nothing():
    matrices, others, gradients = weights_with_gradients(2)
    optimizer = Muon(matrices, others, 1e-2, torch.float32)
    before = run([optimizer], [*matrices, *others], gradients[:1])
    optimizer.found_inf = torch.tensor(1.0)
    after = run([optimizer], [*matrices, *others], [[g * float("nan") for g in gradients[1]]])
    assert all(map(torch.equal, before, after))
    assert all(optimizer.state[weight]["exp_avg"].isfinite().all() for weight in matrices)


def test_a_saved_one_goes_on_alike():
    matrices, others, gradients = weights_with_gradients(4)
    whole = run([Muon(matrices, others, 1e-2, torch.float32)], [*matrices, *others], gradients)
    matrices, others, gradients = weights_with_gradients(4)
    first = Muon(matrices, others, 1e-2, torch.float32)
    run([first], [*matrices, *others], gradients[:2])
    second = Muon(matrices, others, 1.0, torch.float32)
    second.load_state_dict(first.state_dict())
    assert all(map(torch.equal, run([second], [*matrices, *others], gradients[2:]), whole))


def test_orthogonal():
    matrices = torch.randn(5, 16, 40, generator=torch.Generator().manual_seed(1))
    for drawn in (matrices, matrices.mT):
        made = orthogonal(drawn, torch.float32)
        singular = torch.linalg.svdvals(made)
        assert (
            singular.min() > 0.6 and singular.max() < 1.3
        )  # Jordan et al. 2024 name 0.7 and 1.2 for most
        turned = torch.linalg.svd(drawn, full_matrices=False)
        cosine = (made * (turned.U @ turned.Vh)).sum() / made.norm() / (5 * 16) ** 0.5
        assert cosine > 0.95  # the directions stay
        # Smaller than any number of fp16; three digits of it in five steps.
        torch.testing.assert_close(
            orthogonal(1e-9 * drawn, torch.float16).float(), made, rtol=0, atol=0.01
        )


def test_a_matrix_whose_gradient_vanishes_comes_to_rest():
    """A dead layer: one gradient, then zeros, until its momentum is far below fp32's squares."""
    matrices, others, gradients = weights_with_gradients(1)
    optimizer = Muon(matrices, others, 1e-2, torch.float32)
    optimizer.param_groups[1]["weight_decay"] = 0.0
    run([optimizer], [*matrices, *others], gradients)
    zeros = [torch.zeros_like(gradient) for gradient in gradients[0]]
    before = run([optimizer], [*matrices, *others], [zeros] * 1000)
    after = run([optimizer], [*matrices, *others], [zeros] * 1000)
    for old, new in zip(before[:4], after[:4]):
        assert new.isfinite().all()
        assert torch.equal(old, new)


def test_tiny_matrices_become_finite_updates():
    tiny = 1e-25 * torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(1))
    assert orthogonal(tiny, torch.float32).isfinite().all()
