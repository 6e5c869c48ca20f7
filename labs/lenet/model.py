"""LeNet-5 (LeCun et al. 1998) as it is built today, with max pooling and, by default, ReLU.

The paper has a scaled tanh, trained sums instead of pooling, only 60 of the 96 connections in C3,
and compares F6 with drawings of the digits. Here a linear layer ends the network: its softmax gives
the probabilities.
"""

import pkgutil
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from engine.errors import UserError
from labs.lenet.mnist import DIGITS, SIZE

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's training pixels, where 0 is paper and 1 is ink
ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU}


class LeNet5(nn.Module):
    """(B, 1, 28, 28) images from 0 to 1 → (B, 10) logits. Layer names are the paper's."""

    def __init__(self, activation: str = "relu"):
        super().__init__()
        activate = ACTIVATIONS.get(activation) or partial(FunctionLayer, activation)
        # Output shapes; C1 sees images padded to 32 × 32.
        self.c1 = nn.Sequential(nn.Conv2d(1, 6, 5), activate())  # (B, 6, 28, 28)
        self.s2 = nn.MaxPool2d(2)  # (B, 6, 14, 14)
        self.c3 = nn.Sequential(nn.Conv2d(6, 16, 5), activate())  # (B, 16, 10, 10)
        self.s4 = nn.MaxPool2d(2)  # (B, 16, 5, 5)
        # A 5 × 5 convolution of a 5 × 5 map sees all of it: a linear layer, and faster as one.
        self.c5 = nn.Sequential(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), activate())  # (B, 120)
        self.f6 = nn.Sequential(nn.Linear(120, 84), activate())  # (B, 84)
        self.output = nn.Linear(84, DIGITS)  # (B, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 1, 28, 28) with values from 0 to 1 → logits (B, 10)."""
        x = self.normalised(images)  # (B, 1, 32, 32)
        x = self.s2(self.c1(x))  # (B, 6, 14, 14)
        x = self.s4(self.c3(x))  # (B, 16, 5, 5)
        x = self.f6(self.c5(x))  # (B, 84)
        return self.output(x)

    def normalised(self, images: Tensor) -> Tensor:
        """(B, 1, 28, 28) images from 0 to 1 → (B, 1, 32, 32), of mean 0 and deviation 1."""
        # Paper is added around the digit, so that strokes near the border reach the middle of
        # some 5 × 5 field.
        return (F.pad(images, [2] * 4) - MEAN) / DEVIATION


def flops_per_image(model: LeNet5, device: torch.device) -> int:
    """FLOPs of convolutions and matrix products for one training image, counted in one pass.

    The backward pass costs twice the forward pass, once for the gradient of the weights and once
    for that of the input; but C1 needs no gradient of the image. With ReLU: 833,040 forward and
    1,430,880 backward, together 2,263,920.
    """
    was_training = model.training
    model.eval()  # a BatchNorm that you may add must not see this image
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 1, SIZE, SIZE, device=device)).sum().backward()
    model.zero_grad()
    model.train(was_training)
    return counter.get_total_flops()


def check_activation(model: LeNet5, device: torch.device) -> None:
    """Raises `UserError` unless the activation turns a tensor into one of the same shape."""
    activation = model.f6[1]
    x = torch.zeros(1, 1, device=device)
    try:
        shape = activation(x).shape
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"--activation: {activation} fails ({reason}); give a function of one tensor"
        ) from None
    if shape != x.shape:
        raise UserError(
            f"--activation: {activation} turns a tensor of shape {tuple(x.shape)} into "
            f"{tuple(shape)}; give a function that keeps the shape"
        )


class FunctionLayer(nn.Module):
    """A function of one tensor as a layer: the handout wants LeNet-5 with an operator of one's own.

    `name` is MODULE:FUNCTION, such as labs.attention_op:gelu. The module must lie in labs/, because
    the name may come from the settings of a run, and a stranger's run must not run code of its own.
    """

    def __init__(self, name: str):
        super().__init__()
        if not name.startswith("labs."):
            raise UserError(
                f"--activation {name} is unknown; choose relu, gelu or MODULE:FUNCTION of labs/"
            )
        try:
            self.function = pkgutil.resolve_name(name)
        except (ValueError, ImportError, AttributeError) as error:
            raise UserError(f"--activation {name}: {error}; give MODULE:FUNCTION") from None
        if not callable(self.function) or isinstance(self.function, type):
            raise UserError(
                f"--activation {name} is not a function; give MODULE:FUNCTION, of an "
                "autograd.Function its .apply"
            )
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """Any shape → the same shape."""
        return self.function(x)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return self.name
