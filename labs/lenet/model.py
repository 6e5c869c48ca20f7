"""LeNet-5 in three variants: as one builds it today, as textbooks tell it, and as the paper of 1998 has it.

All three end in a linear layer, whose softmax gives the probabilities. The paper compares F6 with drawings of the digits
instead (radial basis functions), an output that only makes sense with its drawings and its own loss.

B images, C maps of H × W pixels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labs.lenet.mnist import DIGITS

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's training pixels, where 0 is paper and 1 is ink


class LeNet5(nn.Module):
    """(B, 1, 28, 28) images from 0 to 1 → (B, 10) logits. The layers have the paper's names: C1 S2 C3 S4 C5 F6."""

    def __init__(self, variant: str = "relu", activation: str = "relu"):
        super().__init__()
        paper = variant == "paper"
        squash = {"relu": ACTIVATIONS[activation], "sigmoid": nn.Sigmoid, "paper": ScaledTanh}[
            variant
        ]
        pool = {
            "relu": lambda _: nn.MaxPool2d(2),
            "sigmoid": lambda _: nn.AvgPool2d(2),
            "paper": PaperPooling,
        }[variant]
        self.c1 = nn.Sequential(
            nn.Conv2d(1, 6, 5), squash()
        )  # (B, 6, 28, 28), from images padded to 32 × 32
        self.s2 = pool(
            6
        )  # (B, 6, 14, 14); only the paper's pooling, which has weights, needs the number of maps
        self.c3 = nn.Sequential(
            PaperConvolution() if paper else nn.Conv2d(6, 16, 5), squash()
        )  # (B, 16, 10, 10)
        self.s4 = pool(16)  # (B, 16, 5, 5)
        # A 5 × 5 convolution of a 5 × 5 map sees all of it: a linear layer, and quicker as one.
        self.c5 = nn.Sequential(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), squash())  # (B, 120)
        self.f6 = nn.Sequential(nn.Linear(120, 84), squash())  # (B, 84)
        self.output = nn.Linear(84, DIGITS)  # (B, 10)
        if variant != "relu":
            self.apply(xavier if variant == "sigmoid" else as_in_the_paper)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 1, 28, 28) with values from 0 to 1 → logits (B, 10)."""
        return self.layers(images)["output"]

    def layers(self, images: Tensor) -> dict[str, Tensor]:
        """What each layer gives, by name and in order: for pictures."""
        # Paper is added around the digit, so that strokes near the border reach the middle of some 5 × 5 field.
        x = (F.pad(images, [2] * 4) - MEAN) / DEVIATION  # (B, 1, 32, 32)
        outputs = {}
        for name, layer in self.named_children():
            outputs[name] = x = layer(x)
        return outputs


class LossAndHits(nn.Module):
    """What a step computes: the summed cross-entropy in nats, and how many digits are right."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, 1, 28, 28), labels (B,) → two numbers."""
        logits = self.model(images)  # (B, 10)
        return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()


class OwnGelu(nn.Module):
    """The GELU operator of labs/attention_op as a layer."""

    def __init__(self, backend: str):
        super().__init__()
        from labs.attention_op import gelu

        self.gelu, self.backend = gelu, backend

    def forward(self, x: Tensor) -> Tensor:
        return self.gelu(x, approximate="none", backend=self.backend)

    def extra_repr(self) -> str:
        return f"backend={self.backend!r}"


ACTIVATIONS = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "own-gelu": lambda: OwnGelu("python"),
    "own-gelu-cpp": lambda: OwnGelu("cpp"),
}


def xavier(layer: nn.Module) -> None:
    """Glorot & Bengio 2010; with torch's smaller default a network of sigmoids learns nothing for epochs."""
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)


# ---------------------------------------------------------------------------------------------- the paper's own layers


class ScaledTanh(nn.Module):
    """1.7159 tanh(2/3 x): ±1 stay ±1, where the curve bends most, and saturation lies beyond the targets (appendix A)."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.7159 * torch.tanh(2 / 3 * x)


class PaperPooling(nn.Module):
    """Sub-sampling as in the paper: the sum of 2 × 2 pixels, times a weight, plus a bias (one pair a map), squashed."""

    def __init__(self, maps: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full((maps, 1, 1), 0.25))  # to begin with it is the mean
        self.bias = nn.Parameter(torch.zeros(maps, 1, 1))
        self.squash = ScaledTanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.squash(4 * F.avg_pool2d(x, 2) * self.weight + self.bias)  # (B, C, H/2, W/2)


# Table I of the paper: the maps of S2 that each of the 16 maps of C3 sees. Three or four neighbours (in a ring), four in
# two pairs, or all: 60 connections instead of 96, so that maps must learn different things.
CONNECTIONS = [[(first + i) % 6 for i in range(width)] for width in (3, 4) for first in range(6)]
CONNECTIONS += [[0, 1, 3, 4], [1, 2, 4, 5], [0, 2, 3, 5], [0, 1, 2, 3, 4, 5]]


class PaperConvolution(nn.Module):
    """C3 of the paper: a 5 × 5 convolution from 6 maps to 16 with the connections of Table I only, 1,516 parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(60, 5, 5))  # a kernel for each connection
        self.bias = nn.Parameter(torch.zeros(16))
        # Where each kernel stands in the full weight (16 × 6, 5, 5). Zeros elsewhere: quicker than 16 small convolutions.
        places = [6 * to + origin for to, origins in enumerate(CONNECTIONS) for origin in origins]
        self.register_buffer("places", torch.tensor(places), persistent=False)

    def full_weight(self) -> Tensor:
        """(16, 6, 5, 5), zeros where a map of C3 does not see one of S2."""
        zeros = self.weight.new_zeros(16 * 6, 5, 5)
        return zeros.index_copy(0, self.places, self.weight).view(16, 6, 5, 5)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6, 14, 14) → (B, 16, 10, 10)."""
        return F.conv2d(x, self.full_weight(), self.bias)


def as_in_the_paper(layer: nn.Module) -> None:
    """Weights uniform in ± 2.4 / inputs (appendix A), so that sums begin in the middle part of the squashing function."""
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.uniform_(layer.weight, -1, 1).data.mul_(2.4 / layer.weight[0].numel())
    elif isinstance(layer, PaperConvolution):
        inputs = torch.tensor([25 * len(origins) for origins in CONNECTIONS for _ in origins]).view(
            60, 1, 1
        )
        nn.init.uniform_(layer.weight, -1, 1).data.mul_(2.4 / inputs)
