"""Two small lessons on building a network, each a right way beside the wrong ones.

python -m labs.lenet.lessons                       # both
python -m labs.lenet.lessons --lesson containers

relu        F.relu is a function, nn.ReLU a layer
containers  nn.Sequential, nn.ModuleList, nn.ModuleDict and a list of Python

The output is Markdown, for a report.
"""

from dataclasses import dataclass

from engine.config import flag, parse_flags
from engine.errors import run_script


@dataclass
class Config:
    """Which lesson."""

    lesson: str = flag("all", "(all|relu|containers)", "Lessons")


# Before the heavy imports, so that --help and a wrong flag answer at once.
if __name__ == "__main__":
    settings = parse_flags(Config, "how to build a network, right and wrong")

import inspect
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 60  # of training in the lesson on containers
SIDE = 8  # pixels per side of its images


def symptom(action: Callable) -> str:
    """The first line of the error that `action` raises; what it returns if it raises none."""
    try:
        return f"no error; returns {type(action()).__name__}"
    except Exception as error:  # whatever PyTorch raises is the lesson
        first_line = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {first_line}"[:110]


# ---- relu


class WithFunction(nn.Module):
    """`F.relu` is called in `forward`."""

    def __init__(self, convolution: nn.Module):
        super().__init__()
        self.convolution = convolution

    def forward(self, images: Tensor) -> Tensor:
        """(B, 1, H, W) → (B, 4, H − 4, W − 4)."""
        return F.relu(self.convolution(images))


class LayerCalledLikeAFunction(WithFunction):
    """Wrong: `nn.ReLU(x)` makes a layer, with `x` as its argument `inplace`."""

    def forward(self, images: Tensor) -> Tensor:
        """Returns a layer, not a tensor."""
        return nn.ReLU(self.convolution(images))


def lesson_relu() -> None:
    """`F.relu` is a function, `nn.ReLU` a layer

    Both compute max(0, x) and have no weights. A function is called with a tensor, in `forward`;
    a layer is first made, in `__init__`, and then called.
    """
    torch.manual_seed(0)
    images = torch.rand(2, 1, 12, 12)
    convolution = nn.Conv2d(1, 4, 5)
    with_function = WithFunction(convolution)
    with_layer = nn.Sequential(convolution, nn.ReLU())
    difference = (with_function(images) - with_layer(images)).abs().max().item()
    print(f"largest difference between the two: {difference:g}\n")
    print("print(model) shows a layer, but no function:\n")
    for model in (with_function, with_layer):
        print("".join(f"    {line}\n" for line in str(model).splitlines()))
    following = nn.Conv2d(4, 8, 5)
    wrong = LayerCalledLikeAFunction(convolution)
    print_symptoms(
        {
            "`F.ReLU(x)`, as in the handout": lambda: F.ReLU(images),
            "`nn.Sequential(conv, F.relu)`": lambda: nn.Sequential(convolution, F.relu),
            "`return nn.ReLU(x)` in `forward`": lambda: wrong(images),
            "… and the layer that follows": lambda: following(wrong(images)),
        }
    )


# ---- containers


class Layers(nn.Module):
    """Three linear layers and ReLUs, held by `container`; an output layer beside it."""

    def __init__(self, container: Callable):
        super().__init__()
        layers = [nn.Flatten()]
        for _ in range(3):
            layers += [nn.Linear(SIDE * SIDE, SIDE * SIDE), nn.ReLU()]
        self.layers = container(layers)
        self.output = nn.Linear(SIDE * SIDE, 2)

    def forward(self, images: Tensor) -> Tensor:
        """(B, SIDE, SIDE) → logits (B, 2)."""
        x = images
        for layer in in_order(self.layers):  # a Sequential could be called: self.layers(x)
            x = layer(x)
        return self.output(x)


CONTAINERS = {
    "`nn.Sequential(*layers)`": lambda layers: nn.Sequential(*layers),
    "`nn.ModuleList(layers)`": nn.ModuleList,
    "`nn.ModuleDict(layers by name)`": lambda layers: nn.ModuleDict(
        {f"layer{number}": layer for number, layer in enumerate(layers)}
    ),
    "`layers`, a list of Python": list,
}


def lesson_containers() -> None:
    """`nn.Sequential`, `nn.ModuleList`, `nn.ModuleDict` and a list of Python

    A module knows the layers that are its attributes, or inside a container of `nn`. It does not
    look into a list: the optimizer, `.to(device)` and `state_dict` never see layers in there.
    Nothing fails, and the loss falls a little, because the output layer learns.
    """
    rows = []
    for name, container in CONTAINERS.items():
        torch.manual_seed(0)
        model = Layers(container)
        before = [weight.clone() for weight in weights_of(model)]
        loss = trained_loss(model)
        pairs = zip(before, weights_of(model))
        changed = sum(not torch.equal(old, new) for old, new in pairs)
        count = sum(weight.numel() for weight in model.parameters())
        rows.append(f"| {name} | {count:,} | {len(model.state_dict())} | {changed} | {loss:.3f} |")
    print(
        "| the layers are in | parameters | entries of state_dict | weights changed, of 6 | loss |"
    )
    print("|---|---:|---:|---:|---:|")
    print("\n".join(rows))
    print()
    images = torch.rand(2, SIDE, SIDE)
    layers = [nn.Flatten(), nn.Linear(SIDE * SIDE, 2)]
    print_symptoms(
        {
            "`nn.Sequential(*layers)(x)`": lambda: nn.Sequential(*layers)(images),
            "`nn.ModuleList(layers)(x)`": lambda: nn.ModuleList(layers)(images),
            "an optimizer for a model with a list only": lambda: torch.optim.SGD(
                only_a_list().parameters(), lr=0.1
            ),
        }
    )


def only_a_list() -> nn.Module:
    """A module whose layers are all in a list."""
    model = nn.Module()
    model.layers = [nn.Linear(3, 3)]
    return model


def in_order(layers) -> Iterable[nn.Module]:
    """The layers of a container; iterating over a `ModuleDict` would give their names."""
    return layers.values() if isinstance(layers, nn.ModuleDict) else layers


def weights_of(model: Layers) -> list[Tensor]:
    """Weights and biases of the three hidden layers, wherever they are kept."""
    return [weight for layer in in_order(model.layers) for weight in layer.parameters()]


def trained_loss(model: Layers) -> float:
    """The loss after STEPS steps on images whose class is their brighter half."""
    images = torch.rand(256, SIDE, SIDE)
    halves = images.unflatten(2, (2, SIDE // 2)).mean((1, 3))  # (256, 2) left and right
    labels = halves.argmax(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


# ---- output


def print_symptoms(actions: dict[str, Callable]) -> None:
    """A table: what is written, and what happens."""
    print("| written | what happens |")
    print("|---|---|")
    for written, action in actions.items():
        print(f"| {written} | {symptom(action)} |")
    print()


LESSONS = {"relu": lesson_relu, "containers": lesson_containers}


def main(config: Config) -> None:
    """Print the lessons."""
    torch.set_num_threads(1)
    names = list(LESSONS) if config.lesson == "all" else [config.lesson]
    for name in names:
        title, _, text = str(inspect.getdoc(LESSONS[name])).partition("\n\n")
        print(f"## {title}\n")
        print(f"{text}\n")
        LESSONS[name]()


if __name__ == "__main__":
    run_script(lambda: main(settings))
