"""AdamW for every weight, or Muon for the matrices inside the Transformer and AdamW for the rest."""

import math
from collections import defaultdict

import torch
from torch import Tensor, nn

from engine.distributed import distribute_like, full_tensor

ADAMW = {"betas": (0.9, 0.98), "weight_decay": 0.01, "fused": True}  # betas: Vaswani et al. 2017


def make_optimizer(
    name: str, model: nn.Module, inside: nn.Module, lr: float, dtype: torch.dtype
) -> torch.optim.AdamW:
    """AdamW, or for `name` "muon" Muon in `dtype` for the matrices of `inside`: `model` less embeddings and output."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr, **ADAMW)
    matrices = {
        weight: None for weight in inside.parameters() if weight.ndim == 2
    }  # q, k, v of a layer are one
    return Muon(
        [*matrices], [weight for weight in model.parameters() if weight not in matrices], lr, dtype
    )


class Muon(torch.optim.AdamW):
    """A matrix moves by its momentum (a running mean of gradients) made orthogonal (Jordan et al. 2024), others as by AdamW.

    An orthogonal update moves all directions of a matrix alike, also those that AdamW hardly moves. It is scaled to the
    usual size of AdamW's (RMS 0.2; Liu et al. 2025), so both share a rate. `torch.optim.Muon` computes the same, one
    matrix after another and with a wait for the GPU; here matrices of one shape go together, and nothing waits.
    """

    _step_supports_amp_scaling = (
        True  # fp16's scaler hands us `found_inf` and need not wait for the GPU either
    )

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[nn.Parameter],
        lr: float,
        dtype: torch.dtype,
    ):
        super().__init__(others, lr, **ADAMW)
        self.add_param_group({"params": matrices, "momentum": 0.95})  # as in Jordan et al.
        self.dtype = dtype  # of the products of `orthogonal`

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update every weight from its gradient; none where `found_inf`, if it is set, is not 0."""
        others, group = self.param_groups
        self.param_groups = [others]  # AdamW's step is for these alone
        super().step()
        self.param_groups = [others, group]
        shapes = defaultdict(list)
        for weight in group["params"]:
            shapes[weight.shape].append(weight)
        for (rows, columns), weights in shapes.items():
            for weight in weights:
                if not self.state[
                    weight
                ]:  # under AdamW's names, as its load_state_dict looks for `step`
                    self.state[weight].update(
                        step=torch.tensor(0.0), exp_avg=torch.zeros_like(weight)
                    )
            means = [self.state[weight]["exp_avg"] for weight in weights]
            gradients = [weight.grad for weight in weights]
            skip = getattr(
                self, "found_inf", None
            )  # a tensor on the device: 1 if this step must change nothing
            if (
                skip is not None
            ):  # then each mean takes the gradient's place: moved towards itself, it stays
                gradients = [torch.where(skip > 0, *pair) for pair in zip(means, gradients)]
            torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
            torch._foreach_lerp_(
                gradients, means, group["momentum"]
            )  # Nesterov's look-ahead, in the gradients' place
            rate = group["lr"] if skip is None else group["lr"] * (skip == 0)
            updates = orthogonal(torch.stack([*map(full_tensor, gradients)]), self.dtype).float()
            updates *= (
                -0.2 * math.sqrt(max(rows, columns)) * rate
            )  # an orthogonal matrix has RMS 1 / √(longer side)
            torch._foreach_mul_(weights, 1 - group["weight_decay"] * rate)
            torch._foreach_add_(weights, [*map(distribute_like, updates, weights)])


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, rows, columns) → in `dtype` the same with singular values near 1 (0.7 to 1.2), by five Newton–Schulz steps.

    Each step is an odd polynomial of the singular values that the matrix products apply to all of them at once.
    """
    if matrices.size(1) > matrices.size(2):  # so that x xᵀ, below, is of the shorter side
        return orthogonal(matrices.mT, dtype).mT
    # Momentum that fades out below this norm gives updates that fade out, too. With a bound where
    # the squares underflow (elements of 1e-19), the norm would be 0 and the quotient huge.
    norms = matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-12)
    x = (matrices / norms).to(dtype)  # in this order, because a small gradient is 0 in fp16
    for _ in range(
        5
    ):  # x ← 3.4445 x − 4.7750 x³ + 2.0315 x⁵, x³ standing for x xᵀ x (Jordan et al. 2024)
        square = x @ x.mT  # (n, rows, rows)
        polynomial = torch.baddbmm(
            square, square, square, beta=-4.7750, alpha=2.0315
        )  # beta · 1st + alpha · 2nd @ 3rd
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x
