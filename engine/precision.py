"""Which number format a device computes in, and why.

fp32 is always right. bf16 has fp32's range and needs nothing more. fp16 has a small range: the loss
is scaled up before the backward pass and its gradients down again before the step, and a step that
overflowed is skipped (Micikevicius et al. 2018, arXiv:1710.03740).
"""

import torch

from engine.devices import cpuinfo
from engine.distributed import full_tensor
from engine.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BEST_FIRST = ("bf16", "fp16", "fp32")
SMALLEST_SCALE = 2**-10  # of fp16's loss: from 2**16, halved by each overflow


class Precision:
    """How to compute on one device: `with precision.autocast(): …`, `backward`, then `step`."""

    def __init__(self, device: torch.device, name: str, reason: str):
        self.device = device
        self.name = name
        self.reason = reason
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        # The first step with a gradient that is not finite; 0: none. On the device, so that no step
        # waits.
        self.bad_step = torch.zeros((), device=device)

    @property
    def dtype(self) -> torch.dtype:
        """The format of matrix products."""
        return DTYPES[self.name]

    def autocast(self) -> torch.autocast:
        """Weights stay fp32; matrix products run in `dtype`."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.name != "fp32")

    def backward(self, loss: torch.Tensor) -> None:
        """Add the loss's gradients, scaled where fp16 needs it."""
        self.scaler.scale(loss).backward()

    def step(
        self, optimizer: torch.optim.Optimizer, parameters: list, clip: float, step: int
    ) -> torch.Tensor:
        """Clip the gradient, update the weights, clear the gradient.

        Returns the gradient's norm before clipping, still on the device; with `clip` 0 it is only
        measured. A gradient that is not finite updates nothing, nor does any later step;
        `check_finite` then ends the run. In fp16 the GradScaler skips steps that overflow.
        """
        self.scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip or float("inf"))
        norm = full_tensor(norm)
        if not self.scaler.is_enabled():
            first = (self.bad_step == 0) & ~torch.isfinite(norm)
            self.bad_step = torch.where(first, float(step), self.bad_step)
            # The fused optimizer reads it and skips the update.
            optimizer.found_inf = (self.bad_step > 0).float()
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
        """Raises `UserError` if a step's gradient was not finite. Waits for the device."""
        if self.scaler.is_enabled() and self.scaler.get_scale() < SMALLEST_SCALE:
            raise UserError(
                "the gradient overflows fp16 at every scale; start a new run with a lower --lr "
                "or in fp32"
            )
        if self.bad_step.item():
            other = "" if self.name == "fp32" else ", or --resume this one with --precision fp32"
            raise UserError(
                f"step {int(self.bad_step.item())}: the loss or its gradient is not finite; the "
                "weights stay as they were before. Start a new run with a lower --lr or a longer "
                f"--warmup{other}"
            )

    def describe(self) -> str:
        """One line: the device, its precision and why."""
        if self.device.type == "cuda":
            hardware = torch.cuda.get_device_name(self.device)
        else:
            threads = torch.get_num_threads()
            hardware = f"{threads} thread" if threads == 1 else f"{threads} threads"
        return f"device: {self.device}, {hardware}; {self.name} ({self.reason})"


def choose_precision(
    device: torch.device, name: str = "auto", training: bool = False, world=None
) -> Precision:
    """The format `name`; for "auto" the fastest one that the device computes well in.

    Raises `UserError` for fp16 on a CPU.

    A CPU trains in bf16 where it has the instructions, and evaluates in fp32: scores are then the
    same on every machine. Also sets PyTorch's global precision of fp32 products, and on a GPU turns
    cuDNN's attention off. The ranks of a `world` agree on the format of the weakest: gradients
    scaled for fp16 must not be added to plain ones.
    """
    if device.type == "cuda":
        best, reason = _best_on_gpu(device)
    else:
        best, reason = _best_on_cpu(training)
        if name == "fp16":
            raise UserError("--precision fp16 needs a GPU; use fp32 or bf16 on the CPU")
    if world:
        weakest = BEST_FIRST[int(world.maximum(BEST_FIRST.index(best))[0])]
        if weakest != best:
            best, reason = weakest, "the weakest device of this run wants it"
    if name == "auto":
        return Precision(device, best, reason)
    reason = "as asked"
    if name == "fp32" and device.type == "cuda" and _has_tf32(device):
        reason = "as asked; its products are TF32"
    return Precision(device, name, reason)


def _best_on_gpu(device: torch.device) -> tuple[str, str]:
    # TF32 on Ampere and later; no effect on older cards.
    torch.set_float32_matmul_precision("high")
    # cuDNN's attention, PyTorch's first choice on an H100, plans anew for every new shape, and
    # batches of sentences have many shapes.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if _has_tf32(device):
        return "bf16", "compute capability 8.0 or later has fast bf16"
    if torch.cuda.get_device_capability(device) >= (7, 0):
        return "fp16", "this card has fast fp16 but no bf16; the loss is scaled"
    return "fp32", "this card has no tensor cores"


def _has_tf32(device: torch.device) -> bool:
    """Ampere and later cards have TF32 and bf16."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _best_on_cpu(training: bool) -> tuple[str, str]:
    flags = cpuinfo()
    # 'medium' sends fp32 products to oneDNN instead of MKL: the same rounding, and faster on AMD.
    # With AMX, or on an ARM CPU with bf16, oneDNN would then compute them in bf16, so there the
    # default stays.
    would_round = {"amx_bf16", "bf16"} & set(flags.split())
    torch.set_float32_matmul_precision("highest" if would_round else "medium")
    if "bf16" not in flags:  # as a substring: avx512_bf16 and amx_bf16 contain it
        return "fp32", "this CPU has no bf16 instructions"
    if training:
        return "bf16", "this CPU has bf16 instructions; the loss agrees with fp32 to 1 %"
    return "fp32", "full precision"
