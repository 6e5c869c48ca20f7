"""The layers of a model as a table: name, type, output shape and parameters, as Keras prints them.

    save_layers(run.folder, model, images)    # layers.json; images: an input of one sample

Layers of the same kind that follow each other, as in a Transformer, are one row.
"""

import contextlib
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from engine.files import as_json, atomic_write

# Without weights, and their output has the shape of their input.
NOT_SHOWN = (nn.Dropout, nn.Identity)
# One row each, although they have parts: PyTorch calls no forward of their parts.
WHOLE = (nn.MultiheadAttention,)


@dataclass(frozen=True)
class Layer:
    """A row of the table."""

    name: str
    type: str
    shape: list  # the sizes of the output
    count: int  # layers in this row; their names differ where `name` has a *
    parameters: int  # of all of them; a weight that two layers share belongs to the first


def save_layers(folder: Path, model: nn.Module, *inputs) -> None:
    """Write layers.json into the folder of a run; rank 0 alone calls it."""
    # The table is for the report: a model that cannot be called this way is trained all the same.
    with contextlib.suppress(Exception):
        rows = layers_of(model, *inputs)
        atomic_write(folder / "layers.json", as_json([asdict(row) for row in rows]))


# With gradients, for without them PyTorch computes a whole encoder layer by one function.
@torch.enable_grad()
def layers_of(model: nn.Module, *inputs) -> list[Layer]:
    """A row for each layer, in the order of `model(*inputs)`, which is computed once."""
    rows: list[Layer] = []
    seen: set[nn.Module] = set()
    counted: set[int] = set()
    hooks = []
    parents: list[str] = []  # names of modules that are one row

    def add(name: str, module: nn.Module) -> None:
        """Note the module when it is called."""

        def record(module: nn.Module, arguments, output) -> None:
            """A row of the table: shapes and weights."""
            if module in seen:  # the model calls it several times
                return
            seen.add(module)
            output = output[0] if isinstance(output, tuple) else output
            weights = [w for w in module.parameters(recurse=is_whole) if id(w) not in counted]
            counted.update(map(id, weights))
            count = sum(weight.numel() for weight in weights)
            rows.append(Layer(name, type(module).__name__, list(output.shape), 1, count))

        is_whole = isinstance(module, WHOLE)
        if is_whole:
            parents.append(f"{name}.")
        hooks.append(module.register_forward_hook(record))

    for name, module in model.named_modules():
        has_own = any(True for _ in module.parameters(recurse=False))
        is_leaf = not any(True for _ in module.children())
        if isinstance(module, NOT_SHOWN) or name.startswith(tuple(parents)):
            continue
        if has_own or is_leaf:
            add(name or "(model)", module)
    was_training = model.training
    try:
        model.eval()(*inputs)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return joined(rows)


def joined(rows: list[Layer]) -> list[Layer]:
    """Rows whose names differ only in numbers, such as layers.0.norm and layers.1.norm, as one."""
    groups: dict[tuple, list[Layer]] = {}
    for row in rows:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", row.name)
        key = (pattern, row.type, tuple(row.shape), row.parameters)
        groups.setdefault(key, []).append(row)
    table = []
    for (pattern, *_), group in groups.items():
        row = group[0]
        if len(group) > 1:
            parameters = len(group) * row.parameters
            row = replace(row, name=pattern, count=len(group), parameters=parameters)
        table.append(row)
    return table
