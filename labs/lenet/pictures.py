"""Pictures of a LeNet-5 (matplotlib figures): its filters, its feature maps, its mistakes."""

import math
from functools import partial

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure  # without pyplot: needs no screen, nothing has to be closed
from torch import Tensor, nn

SHOWN, IN_A_ROW = 60, 10  # misclassified digits


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
def filters(model) -> Figure:
    """The 5 × 5 weights of C1 and C3: red is positive, blue negative."""
    c1, c3 = model.c1[0].weight.cpu(), model.c3[0].weight.cpu()
    figure = Figure(figsize=(7, 4.1), layout="constrained")
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
def feature_maps(model, image: Tensor) -> Figure:
    """What each layer makes of one (1, 28, 28) image; each has its own grey scale, dark is high."""
    model.eval()
    outputs = {"input": image[None], **outputs_of_layers(model, image[None])}
    figure = Figure(figsize=(7, 9), layout="constrained")
    # Relative; a layer without pixels is one line.
    heights = [0.7 if output.dim() == 2 else 3.0 for output in outputs.values()]
    all_axes = figure.subplots(len(outputs), 1, height_ratios=heights)
    for axes, (name, output) in zip(all_axes, outputs.items()):
        maps = output[0].float().cpu()
        aspect = "equal"
        if maps.dim() == 1:
            maps = maps.view(1, 1, -1)
            aspect = "auto"
        title = "output: logits of 0 to 9" if name == "output" else name.upper()
        picture = tiles(maps, columns=min(len(maps), 8))
        show(axes, picture, title, gap="lightsteelblue", aspect=aspect)
    return figure


def outputs_of_layers(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """What each direct part of the model returns in one forward pass, by name and in order."""
    outputs = {}

    def keep(name: str, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        """After each forward pass of the layer `name`."""
        outputs[name] = output

    parts = model.named_children()
    hooks = [layer.register_forward_hook(partial(keep, name)) for name, layer in parts]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def confusion(counts: Tensor) -> Figure:
    """(10, 10) counts, rows the true digit. Only mistakes are coloured, or they would not show."""
    mistakes = counts.clone().fill_diagonal_(0)
    figure = Figure(figsize=(6, 5.4), layout="constrained")
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


def mistakes(images: Tensor, labels: Tensor, logits: Tensor) -> Figure:
    """The misclassified ones of N images, the most certain answers first.

    images (N, 28, 28), labels (N,), logits (N, 10). At most 60 are shown.
    """
    certainty, answers = logits.softmax(1).max(1)
    wrong = (answers != labels).nonzero().flatten()
    wrong = wrong[certainty[wrong].argsort(descending=True)][:SHOWN]
    rows = max(1, math.ceil(len(wrong) / IN_A_ROW))
    figure = Figure(figsize=(7, 0.4 + 0.85 * rows), layout="constrained")
    all_axes = figure.subplots(rows, IN_A_ROW, squeeze=False).flatten()
    for axes in all_axes:
        axes.axis("off")
    for axes, number in zip(all_axes, wrong.tolist()):
        axes.imshow(images[number].cpu().numpy(), cmap="Greys")
        title = f"{labels[number]} → {answers[number]}"
        axes.set_title(f"{title}  {certainty[number]:.0%}", fontsize=7, pad=2)
    figure.suptitle("digit → answer, and the probability of the answer", fontsize=9)
    return figure
