"""A trained model and what belongs to it, loaded and saved.

trained = load_trained("runs/NAME")    # its best checkpoint, with both tokenizers and the settings
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from data import Prepared
from decoding import Decoder
from engine import checkpoint
from engine.cache import new_folder
from engine.config import given_names
from engine.distributed import World
from engine.errors import UserError
from engine.files import atomic_write, names_place
from engine.precision import Precision, choose_precision
from engine.run import find_run, load_weights_into, with_values
from model import NOT_IN_WEIGHTS, PRESETS, ModelConfig, Translator, make_translator
from text.subwords import load_tokenizer, tokenizer_key

# A folder that has all of these is a run of train.py.
FILES_OF_A_RUN = ("config.json", "model.json", "tokenizer")


@dataclass
class Trained:
    """The weights, tokenizers and settings of one run."""

    model: Translator  # in evaluation mode; on the CPU until `load_for_decoding` moves it
    source_tokenizer: Any  # of transformers
    target_tokenizer: Any
    config: dict  # the settings of the run
    run: Path
    name: str  # the checkpoint or the mean, for people
    checkpoint: Path  # a folder or a weights file; the newest one of a mean


def load_trained(path: str | Path = "", average: int = 1, log: Callable = print) -> Trained:
    """Load what `--ckpt` names; see `choose_checkpoint` and `load_chosen`."""
    return load_chosen(choose_checkpoint(str(path), average, log), average)


def load_chosen(chosen: Path, average: int = 1) -> Trained:
    """Load this checkpoint folder or weights file, and what belongs to it.

    With `average` > 1 the weights are the mean of this number of checkpoints, the last of which is
    the chosen one. Raises `UserError` for everything that cannot be read.
    """
    run = run_of(chosen)
    config, sizes = load_settings(run)
    source_tokenizer = load_tokenizer(str(run / "tokenizer" / "source"))
    target_tokenizer = load_tokenizer(str(run / "tokenizer" / "target"))
    check_tokenizer(run, "source", source_tokenizer, sizes.source_vocab)
    check_tokenizer(run, "target", target_tokenizer, sizes.target_vocab)

    if average > 1:
        members = checkpoint.last_intact(chosen, average, config["keep"])
        weights = mean_of(members)
        name = f"mean of {', '.join(member.name for member in members)} of {run}"
    else:
        weights = checkpoint.load_weights(chosen)
        name = str(chosen)
    model = make_translator(sizes)
    load_weights_into(model, weights, chosen)
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise UserError(f"{chosen} has weights that are not finite; use an earlier checkpoint")
    model.eval().requires_grad_(False)
    return Trained(model, source_tokenizer, target_tokenizer, config, run, name, chosen)


def load_for_decoding(
    config, average: int, world: World, log: Callable
) -> tuple[Trained, Precision, Decoder]:
    """Load what the flags of evaluate.py and translate.py name.

    Returns the model on its device, its precision, and the `Decoder` that searches with it.
    """
    int8 = config.precision == "int8"
    precision = choose_precision(world.device, "fp32" if int8 else config.precision)
    # Rank 0 chooses for all: a run that still trains may get a new best checkpoint in between.
    chosen = world.on_main(lambda: choose_checkpoint(config.ckpt, average, log))
    trained = load_chosen(chosen, average)
    trained.model.to(world.device)
    with precision.autocast():  # a Decoder asks whether it is on
        decoder = Decoder(trained.model, compiled=config.fast, int8=int8, log=log)
    rounded = ", weights and inputs of linear layers rounded to 8 bits" if int8 else ""
    log(f"{precision.describe()}{rounded}")
    return trained, precision, decoder


# ---------------------------------------------------------------- which checkpoint


def choose_checkpoint(path: str = "", average: int = 1, log: Callable = print) -> Path:
    """The checkpoint folder or weights file that `--ckpt` names.

    `path` is a run (its best checkpoint is taken, or its newest one for a mean), a checkpoint
    folder or a weights file; "" is the newest run in runs/. Raises `UserError` for any other path.
    """
    if not path:
        path = newest_run()
        log(f"no --ckpt given, using the newest run: {path}")
    # The mean of a run ends with its newest checkpoint, not with its best one.
    chosen = checkpoint.resolve(find_run(path), newest=average > 1)
    if average > 1 and not chosen.is_dir():
        raise UserError(f"--average needs a run or a checkpoint folder, not the file {chosen}")
    return chosen


def newest_run() -> str:
    """The run of train.py with the newest checkpoint; the runs of other labs lie beside them."""
    runs = Path("runs")
    folders = [folder for folder in runs.glob("*/checkpoints") if checkpoint.steps(folder)]
    folders = [folder for folder in folders if is_run_of_train(folder.parent)]
    if not folders:
        raise UserError(
            f"no trained run in {runs.absolute()}; train one with `python train.py`, "
            "or name it with --ckpt"
        )
    return str(max(folders, key=lambda folder: folder.stat().st_mtime).parent)


def run_of(path: Path) -> Path:
    """The run that a checkpoint belongs to: the nearest folder above it that is a run."""
    for folder in (path, *path.absolute().parents):
        if is_run_of_train(folder):
            return folder
    files = ", ".join(FILES_OF_A_RUN)
    raise UserError(f"{path} is not inside a run of train.py (no folder above it has {files})")


def is_run_of_train(folder: Path) -> bool:
    """Whether train.py made this folder."""
    return all((folder / name).exists() for name in FILES_OF_A_RUN)


# ---------------------------------------------------------------- its parts


def load_settings(run: Path) -> tuple[dict, ModelConfig]:
    """The settings of a run, and the sizes of its model."""
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        sizes = ModelConfig(**json.loads((run / "model.json").read_text(encoding="utf-8")))
        for name in ("data", "source", "target", "keep"):
            config[name]  # KeyError if it is missing
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{run}: config.json or model.json is damaged or of another script ({error}); "
            "restore it, or train again"
        ) from None
    return config, sizes


def check_tokenizer(run: Path, side: str, tokenizer, vocabulary: int) -> None:
    """Raise `UserError` for a tokenizer with ids that the model has no embedding for."""
    if len(tokenizer) > vocabulary:
        raise UserError(
            f"{run}: the {side} tokenizer has {len(tokenizer)} tokens but the model {vocabulary}; "
            "restore the tokenizer that the run was trained with"
        )


def mean_of(members: list[Path]) -> dict[str, Tensor]:
    """The mean of each weight over these checkpoints, summed in float64, in the weight's own type.

    Averaging the last checkpoints smooths the noise of single steps (Vaswani et al. 2017, 6.1).
    """
    first = checkpoint.load_weights(members[0])
    shapes = {name: (weight.shape, weight.dtype) for name, weight in first.items()}
    sums = {name: weight.double() for name, weight in first.items()}
    for member in members[1:]:
        weights = checkpoint.load_weights(member)
        if {name: (weight.shape, weight.dtype) for name, weight in weights.items()} != shapes:
            raise UserError(
                f"cannot average {member} with {members[0]}: their weights differ in name, shape "
                "or type; average checkpoints of one run"
            )
        for name, weight in weights.items():
            sums[name] += weight
    return {name: (total / len(members)).to(first[name].dtype) for name, total in sums.items()}


# ---------------------------------------------------------------- another run begins with it


def with_source(config):
    """The settings of train.py with what --init brings: its tokenizers, sizes and languages.

    Flags may change what no weight depends on, and the languages if the new data have other names
    for them.
    Raises `UserError` for a flag that asks for another model.
    """
    chosen = choose_checkpoint(config.init)
    run = run_of(chosen)
    settings, sizes = load_settings(run)
    tokenizer = str(run.absolute() / "tokenizer")

    given = given_names(config)
    asked = {name: getattr(config, name) for name in given}
    if "preset" in given:
        asked = PRESETS[config.preset] | asked
    brought = asdict(sizes)
    for name in sorted(asked.keys() & brought.keys() - NOT_IN_WEIGHTS):
        is_automatic = name.endswith("_vocab") and asked[name] == 0
        if asked[name] != brought[name] and not is_automatic:
            raise UserError(
                f"--init {config.init}: its --{name} is {brought[name]!r}, so it cannot be "
                f"{asked[name]!r}; leave the flag out"
            )
    if config.tokenizer and tokenizer_key(config.tokenizer) != tokenizer_key(tokenizer):
        raise UserError(
            f"--init {config.init} brings its tokenizers, so they cannot be those of --tokenizer "
            f"{config.tokenizer}; leave the flag out"
        )
    brought |= {"source": settings["source"], "target": settings["target"]}
    values = {}
    for name, value in brought.items():
        if name not in given and hasattr(config, name):
            values[name] = value
    values |= {"source_vocab": 0, "target_vocab": 0}  # the tokenizers have their sizes
    return with_values(config, init=str(chosen), tokenizer=tokenizer, **values)


# ---------------------------------------------------------------- saved


def save_description(
    run: Path, sizes: ModelConfig, prepared: Prepared, is_new: bool = True
) -> None:
    """Save what `load_trained` needs beside weights and config.json, and what report.py shows.

    For a resumed run, only missing files are written: a full disk must not destroy those it has.
    """
    files = {
        "model.json": json.dumps(asdict(sizes), indent=2),
        "data.json": json.dumps(prepared.describe(), ensure_ascii=False),
    }
    tokenizers = run / "tokenizer"
    with names_place(run):
        if is_new:  # the folder that --run names may hold something of that name
            shutil.rmtree(tokenizers, ignore_errors=True)
        if not tokenizers.exists():
            with new_folder(tokenizers) as folder:
                prepared.source_tokenizer.save_pretrained(folder / "source")
                prepared.target_tokenizer.save_pretrained(folder / "target")
        for name, text in files.items():
            if is_new or not (run / name).exists():
                atomic_write(run / name, text + "\n")
