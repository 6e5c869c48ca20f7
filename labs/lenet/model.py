"""LeNet-5 in two variants: as built today, and with the layers of the paper of 1998.

Both end in a linear layer, whose softmax gives the probabilities. The paper compares F6 with
drawings of the digits instead (radial basis functions), which needs its drawings and its own loss.

B images, C maps of H × W pixels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from labs.lenet.mnist import DIGITS, SIZE

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's training pixels, where 0 is paper and 1 is ink


class LeNet5(nn.Module):
    """(B, 1, 28, 28) images from 0 to 1 → (B, 10) logits. Layer names are the paper's."""

    def __init__(self, variant: str = "relu", activation: str = "relu"):
        super().__init__()
        if variant == "paper":
            c3 = PaperConvolution()
            s2, s4 = PaperPooling(6), PaperPooling(16)
            squash = ScaledTanh
        else:
            c3 = nn.Conv2d(6, 16, 5)
            s2, s4 = nn.MaxPool2d(2), nn.MaxPool2d(2)
            squash = ACTIVATIONS[activation]
        # Output shapes; C1 sees images padded to 32 × 32.
        self.c1 = nn.Sequential(nn.Conv2d(1, 6, 5), squash())  # (B, 6, 28, 28)
        self.s2 = s2  # (B, 6, 14, 14)
        self.c3 = nn.Sequential(c3, squash())  # (B, 16, 10, 10)
        self.s4 = s4  # (B, 16, 5, 5)
        # A 5 × 5 convolution of a 5 × 5 map sees all of it: a linear layer, and faster as one.
        self.c5 = nn.Sequential(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), squash())  # (B, 120)
        self.f6 = nn.Sequential(nn.Linear(120, 84), squash())  # (B, 84)
        self.output = nn.Linear(84, DIGITS)  # (B, 10)
        if variant == "paper":
            self.apply(init_as_in_paper)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 1, 28, 28) with values from 0 to 1 → logits (B, 10)."""
        return self.layers(images)["output"]

    def layers(self, images: Tensor) -> dict[str, Tensor]:
        """The output of each layer, by name and in order: for pictures."""
        # Paper is added around the digit, so that strokes near the border reach the middle of
        # some 5 × 5 field.
        x = (F.pad(images, [2] * 4) - MEAN) / DEVIATION  # (B, 1, 32, 32)
        outputs = {}
        for name, layer in self.named_children():
            x = layer(x)
            outputs[name] = x
        return outputs


def flops_per_image(model: LeNet5, device: torch.device) -> int:
    """FLOPs of convolutions and matrix products for one training image, counted in one pass.

    The backward pass costs twice the forward pass, once for the gradient of the weights and once
    for that of the input; but C1 needs no gradient of the image. `relu`: 833,040 forward and
    1,430,880 backward, together 2,263,920.
    """
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 1, SIZE, SIZE, device=device)).sum().backward()
    model.zero_grad()
    return counter.get_total_flops()


class OwnGelu(nn.Module):
    """The GELU operator of labs/attention_op as a layer: its handout wants LeNet-5 trained with it."""

    def __init__(self, backend: str):
        super().__init__()
        from labs.attention_op import gelu

        self.gelu = gelu
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        return self.gelu(x, backend=self.backend)

    def extra_repr(self) -> str:
        return f"backend={self.backend!r}"


ACTIVATIONS = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "own-gelu": lambda: OwnGelu("python"),
    "own-gelu-cpp": lambda: OwnGelu("cpp"),
}


# -------------------------------------------------------------------------- the paper's own layers


class ScaledTanh(nn.Module):
    """1.7159 tanh(2/3 x): ±1 stay ±1, and saturation lies beyond the targets (appendix A)."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.7159 * torch.tanh(2 / 3 * x)


class PaperPooling(nn.Module):
    """Sub-sampling: the sum of 2 × 2 pixels, times a weight, plus a bias (one pair per map)."""

    def __init__(self, maps: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full((maps, 1, 1), 0.25))  # at first it is the mean
        self.bias = nn.Parameter(torch.zeros(maps, 1, 1))
        self.squash = ScaledTanh()

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C, H/2, W/2)."""
        return self.squash(4 * F.avg_pool2d(x, 2) * self.weight + self.bias)


# Table I of the paper: the maps of S2 that each of the 16 maps of C3 sees. Three or four neighbours
# (in a ring), four in two pairs, or all: 60 connections instead of 96, so that maps must learn
# different things.
CONNECTIONS = [[(first + i) % 6 for i in range(width)] for width in (3, 4) for first in range(6)]
CONNECTIONS += [[0, 1, 3, 4], [1, 2, 4, 5], [0, 2, 3, 5], [0, 1, 2, 3, 4, 5]]


class PaperConvolution(nn.Module):
    """C3 of the paper: a 5 × 5 convolution from 6 maps to 16 along the connections of Table I."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(60, 5, 5))  # one kernel per connection
        self.bias = nn.Parameter(torch.zeros(16))
        # The place of each kernel in the full weight (16 × 6, 5, 5), which is zero elsewhere: one
        # convolution with zeros is faster than 16 small ones.
        places = [6 * to + origin for to, origins in enumerate(CONNECTIONS) for origin in origins]
        self.register_buffer("places", torch.tensor(places), persistent=False)

    def full_weight(self) -> Tensor:
        """(16, 6, 5, 5), zeros where a map of C3 does not see a map of S2."""
        zeros = self.weight.new_zeros(16 * 6, 5, 5)
        return zeros.index_copy(0, self.places, self.weight).view(16, 6, 5, 5)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6, 14, 14) → (B, 16, 10, 10)."""
        return F.conv2d(x, self.full_weight(), self.bias)


def init_as_in_paper(layer: nn.Module) -> None:
    """Weights uniform in ± 2.4 / inputs (appendix A), so that units do not begin saturated."""
    if isinstance(layer, nn.Conv2d | nn.Linear):
        limit = 2.4 / layer.weight[0].numel()
        nn.init.uniform_(layer.weight, -limit, limit)
    elif isinstance(layer, PaperConvolution):
        inputs = [25 * len(origins) for origins in CONNECTIONS for _ in origins]
        nn.init.uniform_(layer.weight, -1, 1)
        layer.weight.data *= 2.4 / torch.tensor(inputs).view(60, 1, 1)
