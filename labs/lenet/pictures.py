"""Pictures of a LeNet-5 (matplotlib figures): its filters, its feature maps, what it confuses, its mistakes."""

import torch
from matplotlib import colormaps
from matplotlib.figure import (
    Figure,
)  # without pyplot: needs no screen, and nothing has to be closed
from torch import Tensor

SHOWN_MISTAKES = 40


def tiles(maps: Tensor, columns: int) -> Tensor:
    """(N, H, W) pictures as one, side by side with a gap of NaN, which `strip` draws in a colour of its own."""
    count, height, width = maps.shape
    rows = max(1, -(-count // columns))
    framed = maps.new_full((rows * columns, height + 1, width + 1), float("nan"))
    framed[:count, :height, :width] = maps
    framed = framed.view(rows, columns, height + 1, width + 1).transpose(
        1, 2
    )  # (rows, H + 1, columns, W + 1)
    return framed.reshape(rows * (height + 1), columns * (width + 1))[:-1, :-1]


def strip(
    axes, picture: Tensor, title: str, cmap: str = "Greys", gap: str = "white", **settings
) -> None:
    """One picture without ticks."""
    axes.imshow(
        picture.numpy(),
        interpolation="nearest",
        cmap=colormaps[cmap].with_extremes(bad=gap),
        **settings,
    )
    axes.set_title(title, fontsize=9, loc="left")
    axes.axis("off")


@torch.no_grad()
def filters(model) -> Figure:
    """The 5 × 5 weights of C1 and of C3: red is positive, blue negative, white zero or (C3 of the paper) not connected."""
    c1, c3 = model.c1[0].weight.cpu(), model.c3[0]
    c3 = (c3.full_weight() if hasattr(c3, "full_weight") else c3.weight).cpu()
    figure = Figure(figsize=(7, 4.1), layout="constrained")
    first, second = figure.subplots(2, 1, height_ratios=[1, 3.2])
    c3_title = "C3: a column for each of 16 maps, a row for each map of S2 it sees"
    for axes, maps, columns, title in (
        (first, c1.flatten(0, 1), 6, "C1: 6 filters of the image"),
        (second, c3.transpose(0, 1).flatten(0, 1), 16, c3_title),
    ):
        limit = maps.abs().max().item()
        strip(axes, tiles(maps, columns), title, cmap="RdBu_r", vmin=-limit, vmax=limit)
    return figure


@torch.no_grad()
def feature_maps(model, image: Tensor) -> Figure:
    """What each layer makes of one (1, 28, 28) image; every layer has a grey scale of its own, dark is high."""
    model.eval()
    pictures = [("input", image.float().cpu(), 1)]
    for name, outputs in model.layers(image[None]).items():
        output = outputs[0].float().cpu()
        maps = (
            output if output.dim() == 3 else output.view(1, 1, -1)
        )  # a layer without pixels: one line
        pictures.append(
            (
                name.upper() if name != "output" else "output: logits of 0 to 9",
                maps,
                min(len(maps), 8),
            )
        )
    figure = Figure(figsize=(7, 9), layout="constrained")
    heights = [4, 3, 2.4, 3, 2.4, 0.6, 0.6, 0.8]
    for axes, (title, maps, columns) in zip(
        figure.subplots(len(pictures), 1, height_ratios=heights), pictures
    ):
        flat = maps.size(1) == 1
        strip(
            axes,
            tiles(maps, columns),
            title,
            gap="lightsteelblue",
            aspect="auto" if flat else "equal",
        )
    return figure


def confusion(counts: Tensor) -> Figure:
    """(10, 10) counts, rows the true digit; the colours show the mistakes only, for the diagonal would outshine them."""
    mistakes = counts.clone().fill_diagonal_(0)
    figure = Figure(figsize=(6, 5.4), layout="constrained")
    axes = figure.subplots()
    axes.imshow(mistakes.numpy(), cmap="Oranges", vmin=0, vmax=max(1, 1.5 * mistakes.max().item()))
    for digit, row in enumerate(counts.tolist()):
        for answer, count in enumerate(row):
            color = "grey" if digit == answer else "black"
            axes.text(answer, digit, count or "", ha="center", va="center", color=color)
    axes.set(xticks=range(10), yticks=range(10), xlabel="answer", ylabel="digit")
    errors, total = mistakes.sum().item(), counts.sum().item()
    axes.set_title(
        f"{errors:,} errors in {total:,} images: {1 - errors / total:.2%} right", fontsize=10
    )
    return figure


def mistakes(images: Tensor, wrong: list[dict]) -> Figure:
    """The surest mistakes: (N, 28, 28) images, and of each mistake its image, digit, answer and probability."""
    columns, height, width, room = (
        8,
        images.size(1),
        images.size(2),
        9,
    )  # room: pixels above each image, for its words
    shown = images[[mistake["image"] for mistake in wrong[:SHOWN_MISTAKES]]].float()
    shown = torch.cat(
        [torch.full((len(shown), room, width), float("nan")), shown], dim=1
    )  # (N, room + 28, 28)
    figure = Figure(figsize=(8, 6.6), layout="constrained")
    axes = figure.subplots()
    title = f"digit → answer, probability: the {len(shown)} surest of {len(wrong)} mistakes"
    strip(axes, tiles(shown, columns), title)
    for place, mistake in enumerate(wrong[:SHOWN_MISTAKES]):
        row, column = divmod(place, columns)
        words = f"{mistake['digit']} → {mistake['answer']}  {mistake['probability']:.1%}"
        axes.text(column * (width + 1), row * (room + height + 1) + room - 2, words, fontsize=8)
    return figure
