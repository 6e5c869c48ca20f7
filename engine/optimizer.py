"""The optimizers of train.py by name. A new one is a function that makes it, and a row of
`OPTIMIZERS`.

Without PyTorch until an optimizer is made: `python train.py --help` reads the table, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ADAMW = {"betas": (0.9, 0.98), "weight_decay": 0.01, "fused": True}  # betas: Vaswani et al. 2017


def make_adamw(
    model: "torch.nn.Module", hidden_layers: "torch.nn.Module", lr: float, dtype: "torch.dtype"
) -> "torch.optim.Optimizer":
    """AdamW for all weights."""
    import torch

    return torch.optim.AdamW(trained_weights(model), lr, **ADAMW)


def make_muon(
    model: "torch.nn.Module", hidden_layers: "torch.nn.Module", lr: float, dtype: "torch.dtype"
) -> "torch.optim.Optimizer":
    """Muon for the matrices of `hidden_layers`, AdamW for the rest."""
    from engine.muon import Muon

    # The query, key and value projections of a layer are one matrix in PyTorch, and stay one.
    matrices = [weight for weight in trained_weights(hidden_layers) if weight.ndim == 2]
    chosen = set(map(id, matrices))
    others = [weight for weight in trained_weights(model) if id(weight) not in chosen]
    return Muon(matrices, others, lr, dtype, **ADAMW)


def trained_weights(module: "torch.nn.Module") -> list["torch.nn.Parameter"]:
    """The weights that are not frozen. The others get no gradient."""
    return [weight for weight in module.parameters() if weight.requires_grad]


@dataclass(frozen=True)
class Algorithm:
    """An optimizer. --help, the default rate and the report take it from here."""

    # (model, hidden_layers, lr, dtype) → the optimizer; see `make_optimizer`
    make: Callable
    lr: float  # peak learning rate: the best of those tried at width 256 (docs/training.md)
    papers: tuple[str, ...]  # for the report's list of sources


ADAMW_PAPER = "Loshchilov and Hutter 2019, AdamW, arXiv:1711.05101"
OPTIMIZERS = {
    "muon": Algorithm(
        make_muon,
        2e-3,
        (
            "Jordan et al. 2024, Muon, kellerjordan.github.io/posts/muon",
            "Liu et al. 2025, Muon is Scalable for LLM Training, arXiv:2502.16982",
            ADAMW_PAPER,
        ),
    ),
    "adamw": Algorithm(make_adamw, 1e-3, (ADAMW_PAPER,)),
}


def make_optimizer(
    name: str,
    model: "torch.nn.Module",
    hidden_layers: "torch.nn.Module",
    lr: float,
    dtype: "torch.dtype",
) -> "torch.optim.Optimizer":
    """The optimizer `name` of `OPTIMIZERS` for the weights of `model` that are not frozen.

    `hidden_layers` is the model without its embeddings and its output layer, the part for which
    Muon is made. Matrix products of the optimizer itself are computed in `dtype`.

    An optimizer must be fused or, as `Muon` does, heed its attribute `found_inf`: if this tensor is
    1, a gradient was not finite, and the step must change nothing, not even if it is the first one.
    In fp16 GradScaler sets it, otherwise `Precision.step`.
    """
    return OPTIMIZERS[name].make(model, hidden_layers, lr, dtype)
