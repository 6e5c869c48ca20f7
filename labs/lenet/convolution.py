"""One 5 × 5 convolution of LeNet-5 by hand: the 25 products of one place, then a whole map.

python -m labs.lenet.convolution                       # the newest run of labs.lenet
python -m labs.lenet.convolution NAME --row 8 --column 14 --filter 3
"""

from dataclasses import dataclass
from pathlib import Path

from engine.config import flag, load_config, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Which filter of C1, and which place of the first test image."""

    ckpt: str = flag("", "run of labs.lenet; default: the newest", "What", first_word=True)
    filter: int = flag(0, "filter of C1", "What", min=0, max=5)
    row: int = flag(8, "row of the feature map", "What", min=0, max=27)
    column: int = flag(14, "column of the feature map", "What", min=0, max=27)


# Before the heavy imports, so that --help and a wrong flag answer at once.
if __name__ == "__main__":
    settings = parse_flags(Config, "one convolution by hand, beside PyTorch's")

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import checkpoint
from engine.run import find_run, load_weights_into
from labs.lenet.__main__ import Config as RunConfig
from labs.lenet.mnist import Digits, find_folder
from labs.lenet.model import LeNet5


def convolve_by_hand(image: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """What `nn.Conv2d` does with one image (H, W) and one filter (K, K): (H − K + 1, W − K + 1).

    Each value is the sum of the products of the filter and the piece of the image under it.
    """
    size = len(kernel)
    height, width = image.shape[0] - size + 1, image.shape[1] - size + 1
    output = torch.empty(height, width)
    for row in range(height):
        for column in range(width):
            piece = image[row : row + size, column : column + size]
            output[row, column] = (piece * kernel).sum() + bias
    return output


def newest_run() -> Path:
    """The finished run of this lab in runs/ that was tested last."""
    # No other lab draws these; Lightning's runs have no `last`.
    tested = [
        file
        for file in Path("runs").glob("*/eval/mistakes.png")
        if (file.parents[1] / "checkpoints/last").exists()
    ]
    if not tested:
        raise UserError("no finished run of labs.lenet in runs/; name one: --ckpt PATH/NAME")
    return max(tested, key=lambda file: file.stat().st_mtime).parents[1]


def as_text(numbers: Tensor) -> list[str]:
    """The rows of a matrix with two digits after the point."""
    return [" ".join(f"{number:6.2f}" for number in row) for row in numbers.tolist()]


@torch.no_grad()
def main(config: Config) -> None:
    """Print the piece of the image, the filter, their products, the sum, and PyTorch's result."""
    run = find_run(config.ckpt) if config.ckpt else newest_run()
    settings = load_config(RunConfig, run / "config.json")
    model = LeNet5(settings.activation)
    chosen = checkpoint.resolve(run)
    load_weights_into(model, checkpoint.load_weights(chosen), chosen)
    image, label = Digits(find_folder(settings.data), "test")[0]
    padded = model.normalised(image[None])[0, 0]  # (32, 32)
    convolution = model.c1[0]
    kernel, bias = convolution.weight[config.filter, 0], convolution.bias[config.filter]

    piece = padded[config.row : config.row + 5, config.column : config.column + 5]
    print(f"{chosen}, first test image (a {label}), C1 filter {config.filter}")
    print(f"{'the image at this place':<37}{'the filter':<37}their products")
    for row in zip(as_text(piece), as_text(kernel), as_text(piece * kernel)):
        print("   ".join(row))
    total = (piece * kernel).sum()
    print(f"sum of the 25 products {total:.4f} + bias {bias:.4f} = {total + bias:.4f}")

    by_hand = convolve_by_hand(padded, kernel, bias)
    pytorchs = F.conv2d(padded[None, None], kernel[None, None], bias[None])[0, 0]
    place = f"at row {config.row}, column {config.column}"
    print(f"PyTorch's F.conv2d {place}: {pytorchs[config.row, config.column]:.4f}")
    difference = (by_hand - pytorchs).abs().max()
    print(f"all {by_hand.numel()} places by two loops: largest difference {difference:.1e}")


if __name__ == "__main__":
    run_script(lambda: main(settings))
