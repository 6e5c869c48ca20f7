"""Muon: an optimizer for the matrices in the hidden layers of a model."""

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.distributed import distribute_like, full_tensor

# Momentum: Jordan et al. 2024. Weight decay: in short runs 0.01, 0.1 and 1.0 were worse; in runs
# of 8 and 20 epochs 0.01 was as good (docs/results/more-recipe.json).
MUON = {"momentum": 0.95, "weight_decay": 0.3}
# Of the elements of an update, at a learning rate of 1: about that of AdamW (Liu et al. 2025).
UPDATE_RMS = 0.2


class Muon(torch.optim.AdamW):
    """Muon for `matrices`, AdamW for `others`, in one optimizer with one learning rate.

    Muon (Jordan et al. 2024) moves a matrix by its momentum, a running mean of its gradients, made
    orthogonal: the update is equally long in all directions, also in those that AdamW hardly moves.
    It is scaled to the usual size of AdamW's updates (`UPDATE_RMS`).

    `torch.optim.Muon` gives the same result, but takes one matrix after another, always in bf16,
    and knows neither `found_inf` nor ranks. This class takes matrices of one shape together, in the
    format of the run, and divides them among the ranks. With PyTorch's a training step of the lab
    model takes 1.37 times as long: 1.24 s for Muon and AdamW in place of 0.32 s (CPU time of one
    core, Intel Xeon with AVX-512 but no bf16, torch 2.13, steps of 4,060 tokens, in turns on a
    shared machine, 2026-11-28).
    """

    param_groups: list[dict]  # of torch.optim.Optimizer
    # In fp16, GradScaler then passes `found_inf` to us instead of waiting for the GPU to read it.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[nn.Parameter],
        lr: float,
        dtype: torch.dtype,
        **adamw,
    ):
        super().__init__(others, lr, **adamw)
        self.add_param_group({"params": matrices, **MUON})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update every weight from its gradient, unless the tensor `found_inf` is set and not 0."""
        others, muon = self.param_groups
        self.param_groups = [others]
        super().step()  # AdamW, for the others alone
        self.param_groups = [others, muon]

        by_shape = defaultdict(list)
        for weight in muon["params"]:
            if weight.grad is not None:  # as AdamW: the step may not have used this weight
                by_shape[weight.shape].append(weight)
        for weights in by_shape.values():
            self.update(weights, muon)

    def update(self, weights: list[nn.Parameter], group: dict) -> None:
        """One step of Muon for matrices of one shape. It may overwrite their gradients."""
        means = [self.momentum_of(weight) for weight in weights]
        gradients = [weight.grad for weight in weights]
        rate = group["lr"]
        # A step that must change nothing: found_inf is 1, on the device, so we cannot branch on it.
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:
            # The mean moves towards itself, and the weight by 0.
            pairs = zip(means, gradients)
            gradients = [torch.where(found_inf > 0, mean, gradient) for mean, gradient in pairs]
            rate = rate * (found_inf == 0)

        torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
        torch._foreach_lerp_(gradients, means, group["momentum"])  # Nesterov's look-ahead
        matrices = torch.stack([full_tensor(gradient) for gradient in gradients])
        updates = orthogonal_by_all_ranks(matrices, self.dtype).float()
        # The elements of an orthogonal matrix have RMS 1 / √(longer side).
        updates *= UPDATE_RMS * math.sqrt(max(weights[0].shape)) * rate
        torch._foreach_mul_(weights, 1 - group["weight_decay"] * rate)
        updates = [distribute_like(update, weight) for update, weight in zip(updates, weights)]
        torch._foreach_sub_(weights, updates)

    def momentum_of(self, weight: nn.Parameter) -> Tensor:
        """The running mean of its gradients; AdamW's names, so that checkpoints look alike."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)  # AdamW's load_state_dict expects it
            state["exp_avg"] = torch.zeros_like(weight)
        return state["exp_avg"]


def orthogonal_by_all_ranks(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """As `orthogonal`: (n, rows, columns) → the same shape in `dtype`. All ranks must call it.

    Each rank computes a share of the n and sends it to the others. This is faster, and it keeps the
    weights equal: if every rank computed all, processors that round differently would drift apart.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return orthogonal(matrices, dtype)
    size = dist.get_world_size()
    # Every rank sends the same number of matrices; zeros fill the last shares.
    share = math.ceil(len(matrices) / size)
    padding = matrices.new_zeros(share * size - len(matrices), *matrices.shape[1:])
    shares = torch.cat([matrices, padding]).chunk(size)
    mine = orthogonal(shares[dist.get_rank()], dtype).contiguous()
    results = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(results, mine)
    return torch.cat(results)[: len(matrices)]


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """The same (n, rows, columns) with singular values near 1, in `dtype`.

    Five Newton–Schulz steps. Each applies an odd polynomial to all singular values at once:
    x ← 3.4445 x − 4.7750 x xᵀ x + 2.0315 (x xᵀ)² x (Jordan et al. 2024). Most singular values
    become 0.7 to 1.2. Those below 0.2 % of the matrix's norm stay smaller: a step multiplies a
    small one by 3.4445.
    """
    if matrices.size(1) > matrices.size(2):  # x xᵀ is then of the shorter side
        return orthogonal(matrices.mT, dtype).mT
    # Momentum whose norm is below the bound gives a small update, not a unit one: a layer without
    # gradients comes to rest. Without the bound, squares that underflow would divide by zero.
    norms = matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-12)
    x = (matrices / norms).to(dtype)  # divide first: a small gradient is 0 in fp16
    for _ in range(5):
        square = x @ x.mT  # (n, rows, rows)
        # baddbmm(a, b, c) = beta · a + alpha · b @ c
        polynomial = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x
