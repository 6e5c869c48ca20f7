"""Fine-tuning: begin with the weights and the tokenizer of another model (--init).

source = read_source("runs/NAME", "own")     # a run of labs.gpt, or one of its checkpoints
source = read_source("gpt2/", "hf")          # or a folder that holds a GPT-2 of Hugging Face
take_sizes(config, source)                   # the model gets the sizes of its weights
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from engine.errors import UserError
from engine.run import find_run
from labs.gpt import checkpoints
from labs.gpt.sizes import Sizes

SIZES = ("d_model", "nhead", "num_layers", "seq_length", "vocab_size")
SIZES_OF_HUGGING_FACE = ("n_embd", "n_head", "n_layer", "n_positions", "vocab_size")


@dataclass
class Source:
    """A trained model: where it is, its sizes, and the folder of its tokenizer, if it has one."""

    path: Path
    sizes: Sizes
    tokenizer: Path | None

    def weights(self, seq_length: int) -> dict[str, Tensor]:
        """All weights by name, complete on each rank, on the CPU.

        A model for shorter sequences gets the first `seq_length` of the learned positions.
        """
        if (self.path / "config.json").exists():
            from transformers import GPT2LMHeadModel

            model = GPT2LMHeadModel.from_pretrained(self.path, local_files_only=True)
            weights = {f"model.{name}": value for name, value in model.named_parameters()}
        else:
            weights, _ = checkpoints.load_weights(self.path)
        for name in weights:
            if name.endswith("wpe.weight"):
                weights[name] = weights[name][:seq_length]
        return weights


def read_source(init: str, kind: str) -> Source:
    """What `--init` names, for `--model kind`. Raises `UserError` if it cannot be used."""
    folder = find_run(init)
    if (folder / "config.json").exists() and not (folder / "checkpoints").exists():
        source = Source(folder, sizes_of_hugging_face(folder), None)
        if (folder / "tokenizer_config.json").exists():
            source.tokenizer = folder
        found = "hf"
    else:
        path = checkpoints.choose(init, log=partial(print, flush=True))
        names, sizes = checkpoints.names_of(path), Sizes(**checkpoints.read(path)["sizes"])
        tokenizer = path.parent.parent / "tokenizer"
        source = Source(path, sizes, tokenizer if tokenizer.is_dir() else None)
        found = "own" if any(name.startswith("h.") for name in names) else "hf"
    if found != kind:
        raise UserError(f"--init {init} is of --model {found}; give --model {found}")
    return source


def sizes_of_hugging_face(folder: Path) -> Sizes:
    """From the config.json of a GPT-2."""
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if saved["model_type"] != "gpt2":
            raise ValueError(f"model_type is {saved['model_type']}")
        return Sizes(*[saved[name] for name in SIZES_OF_HUGGING_FACE])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--init {folder} is no run of labs.gpt and no GPT-2 of Hugging Face ({error!r}); name "
            "one of them"
        ) from None


def take_sizes(config, source: Source) -> None:
    """The model's sizes are those of the weights; only --seq_length may be smaller.

    Raises `UserError` for a flag that asks for another size.
    """
    for name in SIZES:
        asked, there = getattr(config, name), getattr(source.sizes, name)
        shorter = name == "seq_length" and 0 < asked < there
        if asked and asked != there and not shorter:
            raise UserError(f"--{name} {asked}: the model of --init has {there}; leave it out")
        setattr(config, name, asked or there)


def require_same_names(weights: dict[str, Tensor], init: dict[str, Tensor], path: Path) -> None:
    """Raises `UserError` unless `init` has a value of the right shape for each of `weights`."""
    for name, weight in weights.items():
        if name not in init or init[name].shape != weight.shape:
            found = "none" if name not in init else tuple(init[name].shape)
            raise UserError(
                f"--init {path}: {name} must have the shape {tuple(weight.shape)}, not {found}; "
                "name the weights of a GPT-2"
            )
