"""Pictures of a LeNet-5 (matplotlib figures): its filters, its feature maps, its mistakes.

`note` in each: a line below the picture that says that the digits are not MNIST, else ''.
"""

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure  # without pyplot: needs no screen, nothing has to be closed
from torch import Tensor

SHOWN_MISTAKES = 40


def new_figure(width: float, height: float, note: str) -> Figure:
    """An empty figure, in inches, with the note below it."""
    figure = Figure(figsize=(width, height), layout="constrained")
    if note:
        figure.supxlabel(note, fontsize=8, color="crimson")
    return figure


def tiles(maps: Tensor, columns: int) -> Tensor:
    """(N, H, W) maps as one picture, side by side with gaps of NaN."""
    count, height, width = maps.shape
    rows = max(1, -(-count // columns))
    framed = maps.new_full((rows * columns, height + 1, width + 1), float("nan"))
    framed[:count, :height, :width] = maps
    framed = framed.view(rows, columns, height + 1, width + 1)
    framed = framed.transpose(1, 2)  # (rows, H + 1, columns, W + 1)
    return framed.reshape(rows * (height + 1), columns * (width + 1))[:-1, :-1]


def show(axes, picture: Tensor, title: str, cmap="Greys", gap="white", **settings) -> None:
    """One picture without ticks; NaN is drawn in the colour `gap`."""
    colors = colormaps[cmap].with_extremes(bad=gap)
    axes.imshow(picture.numpy(), interpolation="nearest", cmap=colors, **settings)
    axes.set_title(title, fontsize=9, loc="left")
    axes.axis("off")


@torch.no_grad()
def filters(model, note: str = "") -> Figure:
    """The 5 × 5 weights of C1 and C3: red is positive, blue negative."""
    c1, c3 = model.c1[0].weight.cpu(), model.c3[0].weight.cpu()
    figure = new_figure(7, 4.1, note)
    top, bottom = figure.subplots(2, 1, height_ratios=[1, 3.2])
    limit = c1.abs().max().item()
    pictures = tiles(c1.flatten(0, 1), columns=6)
    show(top, pictures, "C1: 6 filters of the image", "RdBu_r", vmin=-limit, vmax=limit)
    limit = c3.abs().max().item()
    pictures = tiles(c3.transpose(0, 1).flatten(0, 1), columns=16)
    title = "C3: a column for each of 16 maps, a row for each map of S2"
    show(bottom, pictures, title, "RdBu_r", vmin=-limit, vmax=limit)
    return figure


@torch.no_grad()
def feature_maps(model, image: Tensor, note: str = "") -> Figure:
    """What each layer makes of one (1, 28, 28) image; each has its own grey scale, dark is high."""
    model.eval()
    outputs = {"input": image[None], **model.layers(image[None])}
    figure = new_figure(7, 9, note)
    heights = [4, 3, 2.4, 3, 2.4, 0.6, 0.6, 0.8]
    all_axes = figure.subplots(len(outputs), 1, height_ratios=heights)
    for axes, (name, output) in zip(all_axes, outputs.items()):
        maps = output[0].float().cpu()
        aspect = "equal"
        if maps.dim() == 1:  # a layer without pixels is drawn as one line
            maps = maps.view(1, 1, -1)
            aspect = "auto"
        title = "output: logits of 0 to 9" if name == "output" else name.upper()
        picture = tiles(maps, columns=min(len(maps), 8))
        show(axes, picture, title, gap="lightsteelblue", aspect=aspect)
    return figure


def confusion(counts: Tensor, note: str = "") -> Figure:
    """(10, 10) counts, rows the true digit. Only mistakes are coloured, or they would not show."""
    mistakes = counts.clone().fill_diagonal_(0)
    figure = new_figure(6, 5.4, note)
    axes = figure.subplots()
    darkest = max(1, 1.5 * mistakes.max().item())
    axes.imshow(mistakes.numpy(), cmap="Oranges", vmin=0, vmax=darkest)
    for digit, row in enumerate(counts.tolist()):
        for answer, count in enumerate(row):
            color = "grey" if digit == answer else "black"
            axes.text(answer, digit, count or "", ha="center", va="center", color=color)
    axes.set(xticks=range(10), yticks=range(10), xlabel="answer", ylabel="digit")
    errors, total = mistakes.sum().item(), counts.sum().item()
    title = f"{errors:,} errors in {total:,} images: {1 - errors / total:.2%} right"
    axes.set_title(title, fontsize=10)
    return figure


def mistakes(images: Tensor, wrong: list[dict], note: str = "") -> Figure:
    """The surest mistakes. images (N, 28, 28); wrong: image, digit, answer, probability of each."""
    shown = wrong[:SHOWN_MISTAKES]
    columns, caption = 8, 9  # caption: pixels above each image, for its words
    _, height, width = images.shape
    pictures = images[[mistake["image"] for mistake in shown]].float()
    space = torch.full((len(shown), caption, width), float("nan"))
    pictures = torch.cat([space, pictures], dim=1)  # (N, caption + 28, 28)
    figure = new_figure(8, 6.6, note)
    axes = figure.subplots()
    title = f"digit → answer, probability: the {len(shown)} surest of {len(wrong)} mistakes"
    show(axes, tiles(pictures, columns), title)
    for place, mistake in enumerate(shown):
        row, column = divmod(place, columns)
        words = f"{mistake['digit']} → {mistake['answer']}  {mistake['probability']:.1%}"
        axes.text(column * (width + 1), row * (caption + height + 1) + 7, words, fontsize=8)
    return figure
