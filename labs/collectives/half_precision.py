"""A lesson: fp16 with a loss scaler. B rows, D features."""

from dataclasses import dataclass

import torch

from labs.collectives.common import print_table, print_text
from labs.collectives.training import synthetic


@dataclass
class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018) with torch.amp.GradScaler's defaults."""

    scale: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, overflow: bool) -> bool:
        """After a backward pass: adapt the scale; return whether to make the step."""
        if overflow:
            self.scale /= 2
            self.good_steps = 0
            return False
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0
        return True


@dataclass
class HalfRun:
    """What `train_half` found."""

    error: float  # at the end, relative to that of w = 0
    zero_share: float  # of gradients that are exactly 0
    # Of each step: the scale, the largest scaled gradient, and whether the step was made.
    steps: list[tuple[float, float, bool]]


def train_half(
    dtype: torch.dtype, scaler: LossScaler | None, steps: int = 300, master_weights: bool = True
) -> HalfRun:
    """Least squares with small targets.

    Products and gradients are in `dtype`. The weights are in fp32, or without `master_weights` in
    `dtype` too, as after `model.half()`.
    """
    # 1e-3 and 4e-3 make gradients so small that fp16 rounds most of them to 0. The gradient is
    # 2 · 4e-3 · mean(error · x); times the rate of 50 a step is 0.4 · mean(error · x).
    x, y = synthetic(rows=64, features=16, seed=7)
    y = y[:, None] * 1e-3  # (B, 1)
    weight = torch.zeros(16, 1)  # (D, 1)
    zero_shares = []
    history = []
    for _ in range(steps):
        scale = scaler.scale if scaler else 1.0
        rounded = weight.to(dtype, copy=True).requires_grad_()

        error = (x.to(dtype) @ rounded).float() - y
        loss = error.square().mean() * 4e-3
        (loss * scale).backward()

        zero_shares.append((rounded.grad == 0).float().mean().item())
        gradient = rounded.grad.float() / scale
        makes_step = scaler is None or scaler.update(overflow=not gradient.isfinite().all())
        history.append((scale, rounded.grad.abs().max().item(), makes_step))
        if makes_step:
            weight -= 50 * gradient
            if not master_weights:
                weight = weight.to(dtype).float()
    relative_error = (x @ weight - y).square().mean() / y.square().mean()
    return HalfRun(relative_error.item(), sum(zero_shares) / steps, history)


def changes_of_scale(run: HalfRun) -> list[tuple]:
    """The first step, and those after which the scale is another: number, scale, gradient, why."""
    rows = []
    scales_after = [scale for scale, _, _ in run.steps[1:]]
    for number, (step, after) in enumerate(zip(run.steps, scales_after), 1):
        scale, largest, was_made = step
        outcome = "step"
        if not was_made:
            outcome = "skip the step, halve the scale"
        elif after > scale:
            outcome = "step, then double the scale"
        elif number > 1 and run.steps[number - 2][2]:
            continue  # one more good step
        rows.append((number, f"2^{torch.tensor(scale).log2():.0f}", f"{largest:g}", outcome))
    return rows


def lesson_fp16() -> None:
    """fp16: gradients that underflow or overflow, and a loss scaler by hand.

    fp16 holds nothing below 6e-8 or above 65504. The loss is multiplied before the backward pass
    and the gradient divided after it, in fp32; a step whose gradient overflowed is skipped and the
    scale halved. `model.half()`, the same as `model.to(torch.float16)`, needs that too, and also
    rounds every update of a weight to 11 bits. Predict: a run begins with a scale that is far too
    large. How many steps does it lose?
    """
    rows = []
    for value in (1e-3, 1e-5, 1e-7, 1e-8):
        plain = torch.tensor(value).half().item()
        scaled = (torch.tensor(value) * 2**16).half().item() / 2**16
        rows.append((f"{value:.0e}", f"{plain:.2e}", f"{scaled:.2e}"))
    columns = "true|in fp16|times 65536 in fp16, divided in fp32"
    print_table("a gradient in fp16", columns, rows)
    half = (torch.ones((), dtype=torch.float16) + 1e-4).item()
    single = (torch.ones(()) + 1e-4).item()
    print_text(f"A weight of 1 plus 1e-4 is {half:.4f} in fp16 and {single:.4f} in fp32.")

    runs = {
        "fp32": (torch.float32, None, True),
        "fp16": (torch.float16, None, True),
        "fp16, scaled": (torch.float16, LossScaler(), True),
        ".half()": (torch.float16, None, False),
        ".half(), scaled": (torch.float16, LossScaler(), False),
    }
    rows = []
    for name, (dtype, scaler, master_weights) in runs.items():
        run = train_half(dtype, scaler, master_weights=master_weights)
        scale = f"{scaler.scale:g}" if scaler else "-"
        rows.append((name, f"{run.zero_share:.0%}", f"{run.error:.0e}", scale))
    columns = "format|gradients that are 0|error, w = 0 being 1|last scale"
    print_table("300 steps on small targets", columns, rows)

    scaler = LossScaler(scale=2.0**40, growth_interval=100)
    run = train_half(torch.float16, scaler)
    columns = "step|scale|largest scaled gradient|what the scaler does"
    print_table(
        "from a scale of 2^40, doubled after 100 good steps", columns, changes_of_scale(run)
    )
    skipped = sum(not was_made for _, _, was_made in run.steps)
    print_text(f"{skipped} of 300 steps were skipped; the error at the end is {run.error:.0e}.")
