"""Which number format a device computes in, and why.

fp32 is always right; bf16 has fp32's range and needs nothing more; fp16 has a small range, so the loss is scaled up before the
backward pass and its gradients down again before the step (Micikevicius et al. 2018), and a step that overflowed is skipped.
"""

from pathlib import Path

import torch

from engine.distributed import full_tensor
from engine.errors import UserError


class Precision:
    """How to compute on one device: `with precision.autocast(): …`, then `backward`, then `step`."""

    def __init__(self, device: torch.device, name: str, reason: str):
        self.device, self.name, self.reason = device, name, reason
        self.scaler = torch.amp.GradScaler(
            device.type, enabled=name == "fp16"
        )  # does nothing unless it is fp16
        self.bad_step = torch.zeros(
            (), device=device
        )  # the first step with a non-finite gradient; 0: none

    @property
    def dtype(self) -> torch.dtype:
        """The format of matrix products."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.name]

    def autocast(self) -> torch.autocast:
        """Weights stay fp32; matrix products run in `dtype`."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.name != "fp32")

    def backward(self, loss: torch.Tensor) -> None:
        """Add the loss's gradients, scaled where fp16 needs it."""
        self.scaler.scale(loss).backward()

    def step(
        self, optimizer: torch.optim.Optimizer, parameters: list, clip: float, step: int
    ) -> torch.Tensor:
        """Clip, update the weights, clear the gradients; → the gradient's norm before clipping, still on the device.

        A gradient that is not finite updates nothing, nor does any step after it until `check_finite` is asked: the
        decision stays on the device, so that no step waits for it. fp16's overflows are the scaler's affair.
        """
        self.scaler.unscale_(optimizer)
        norm = full_tensor(
            torch.nn.utils.clip_grad_norm_(parameters, clip or float("inf"))
        )  # clip 0: only measure
        if not self.scaler.is_enabled():
            first = (self.bad_step == 0) & ~torch.isfinite(norm)
            self.bad_step = torch.where(first, float(step), self.bad_step)
            optimizer.found_inf = (
                self.bad_step > 0
            ).float()  # the fused optimizer reads it and skips the update
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def curves(self) -> dict[str, float]:
        """The scale of fp16's loss; {} in other formats."""
        if not self.scaler.is_enabled():
            return {}
        return {"train/loss_scale": self.scaler.get_scale()}

    def check_finite(self) -> None:
        """Stop the run if a step's gradient was not finite. Waits for the device: ask when logging, before saving."""
        if (
            self.scaler.is_enabled() and self.scaler.get_scale() < 2**-10
        ):  # from 2**16, halved by each overflow
            raise UserError(
                "the gradient overflows fp16 at every scale; start anew with a lower --lr or in fp32"
            )
        if self.bad_step.item():
            other = "" if self.name == "fp32" else ", or --resume this one with --precision fp32"
            raise UserError(
                f"step {int(self.bad_step.item())}: the loss or its gradient is not finite; the weights stay as "
                f"they were before. Start a new run with a lower --lr or a longer --warmup{other}"
            )

    def describe(self) -> str:
        """One line: the device, its precision and why."""
        on_gpu = self.device.type == "cuda"
        where = (
            torch.cuda.get_device_name(self.device)
            if on_gpu
            else f"{torch.get_num_threads()} threads"
        )
        return f"device: {self.device}, {where}; {self.name} ({self.reason})"


def choose_precision(
    device: torch.device, name: str = "auto", training: bool = False, world=None
) -> Precision:
    """The fastest format the device computes well in, or the one named. Raises `UserError` if it cannot.

    A CPU trains in bf16 where it has the instructions, and evaluates in fp32: scores are then the same on every machine.
    The ranks of a `world` agree on the format of the weakest: gradients scaled for fp16 must not be added to plain ones.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision(
            "high"
        )  # TF32 on Ampere and later; no effect on older cards
        # cuDNN's attention, PyTorch's first choice on an H100, makes a plan of some 30 ms for every shape: sentences have
        # hundreds of shapes.
        torch.backends.cuda.enable_cudnn_sdp(False)
        capability = torch.cuda.get_device_capability(device)
        best = "fp32", "this card has no tensor cores"
        if capability >= (8, 0):
            best = "bf16", "compute capability 8.0 or later has fast bf16"
        elif capability >= (7, 0):
            best = "fp16", "this card has fast fp16 but no bf16; the loss is scaled"
    else:
        # 'medium' sends fp32 products to oneDNN instead of MKL: the same rounding, and faster on AMD. On a CPU with
        # AMX, or an ARM one with bf16, it would compute them in bf16, so there the default stays.
        rounds, has_bf16 = {"amx_bf16", "bf16"} & {*_cpu_flags().split()}, "bf16" in _cpu_flags()
        torch.set_float32_matmul_precision("highest" if rounds else "medium")
        if name == "fp16":
            raise UserError("--precision fp16 needs a GPU; use fp32 or bf16 on the CPU")
        best = "fp32", "full precision" if has_bf16 else "this CPU has no bf16 instructions"
        if training and has_bf16:
            best = "bf16", "this CPU has bf16 instructions; the loss agrees with fp32 to 1 %"
    formats = ("bf16", "fp16", "fp32")  # best first, so the largest index is the weakest rank's
    weakest = formats[int(world.maximum(formats.index(best[0]))[0])] if world else best[0]
    best = best if weakest == best[0] else (weakest, "the weakest device of this run wants it")
    tf32 = "; its products are TF32" * (
        name == "fp32" and device.type == "cuda" and capability >= (8, 0)
    )
    return Precision(device, *(best if name == "auto" else (name, f"as asked{tf32}")))


def _cpu_flags() -> str:  # of x86 or ARM; "bf16" is in avx512_bf16, amx_bf16 and ARM's bf16
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
