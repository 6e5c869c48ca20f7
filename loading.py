"""A trained model with what belongs to it, written and read: `load_trained("runs/NAME")`."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

import fast
from data import Prepared
from engine import checkpoint
from engine.distributed import World
from engine.errors import UserError
from engine.precision import Precision, choose_precision
from engine.run import find_run, load_weights_into
from model import ModelConfig, Translator
from text.subwords import load_tokenizer

MARKS = ("config.json", "model.json", "tokenizer")  # what a folder has if it is a run


@dataclass
class Trained:
    """Weights, tokenizers and settings of one run."""

    model: Translator
    source_tokenizer: object
    target_tokenizer: object
    config: dict  # the run's own settings
    run: Path
    name: str  # which checkpoint
    checkpoint: Path  # the same as a path; of an average the newest one in it


def choose_checkpoint(
    path: str = "", average: int = 1, say=print, runs: Path = Path("runs")
) -> Path:
    """What `--ckpt` names: a run (its best checkpoint), one of its checkpoints, a weights file; '' is the newest run.

    With an average, a run means its newest checkpoint. Raises `UserError` for a path that leads to none.
    """
    if not path:
        path = newest_run(runs)
        say(f"no --ckpt given, using the newest run: {path}")
    path = find_run(path, runs)
    chosen = checkpoint.resolve(path)
    if average > 1 and not chosen.is_dir():
        raise UserError(f"--average needs a run or a checkpoint folder, not the file {chosen}")
    if average > 1 and path.resolve() != chosen:  # `path` is a run, not one of its checkpoints
        chosen = checkpoint.latest(chosen.parent).resolve()
    return chosen


def load_trained(path: str | Path = "", average: int = 1, say=print) -> Trained:
    """The model that `choose_checkpoint` finds at `path`; with `average` > 1 the mean of that many up to it.

    Raises `UserError` for all that cannot be read.
    """
    chosen = choose_checkpoint(str(path), average, say)
    run = run_of(chosen)
    if (run / "checksums.json").exists() and (
        damage := checkpoint.verify_files(run)
    ):  # older versions wrote none
        raise UserError(f"{run}: {damage}; put the file back as it was, or train anew")
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        sizes = ModelConfig(**json.loads((run / "model.json").read_text(encoding="utf-8")))
        config["data"], config["source"], config["target"]  # KeyError if one is missing
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{run}: config.json or model.json is damaged, or of another script ({error})"
        ) from None
    tokenizers = {
        side: load_tokenizer(str(run / "tokenizer" / side)) for side in ("source", "target")
    }
    name = str(chosen)
    if average > 1:
        members = checkpoint.last_whole(chosen, average)
        weights, name = (
            mean_of(members),
            f"mean of {', '.join(member.name for member in members)} of {run}",
        )
    else:
        weights = checkpoint.load_weights(chosen)
    model = Translator(sizes)
    load_weights_into(model, weights, chosen)
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise UserError(
            f"{chosen} has weights that are not finite numbers; use an earlier checkpoint"
        )
    for side, size in (("source", sizes.source_vocab), ("target", sizes.target_vocab)):
        if len(tokenizers[side]) > size:
            raise UserError(
                f"{run}: its {side} tokenizer has {len(tokenizers[side])} tokens, but the model {size}; "
                "put back the one that the run was trained with"
            )
    return Trained(
        model.eval().requires_grad_(False),
        tokenizers["source"],
        tokenizers["target"],
        config,
        run,
        name,
        chosen,
    )


def mean_of(members: list[Path]) -> dict[str, Tensor]:
    """The mean of each parameter, summed in float64 and returned in its own type; integer buffers from the last one."""
    sums, expected, weights = {}, {}, {}
    for member in members:
        weights = checkpoint.load_weights(member)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
        expected = expected or shapes
        differing = sorted(
            name
            for name in expected.keys() | shapes.keys()
            if expected.get(name) != shapes.get(name)
        )
        if differing:
            reason = f"{differing[0]} is missing in one or differs in shape or type"
            raise UserError(
                f"cannot average {member} with {members[0]}: {reason}; average one run only"
            )
        for name, tensor in weights.items():
            if tensor.is_floating_point():
                sums[name] = sums.get(name, 0) + tensor.double()
    means = {name: (total / len(members)).to(weights[name].dtype) for name, total in sums.items()}
    return {**weights, **means}


def save_description(run: Path, sizes: ModelConfig, prepared: Prepared) -> None:
    """What `load_trained` needs beside the weights and config.json, and what report.py tells of the data."""
    (run / "checksums.json").unlink(
        missing_ok=True
    )  # first: a kill in between leaves no checksum of another file
    prepared.source_tokenizer.save_pretrained(run / "tokenizer" / "source")
    prepared.target_tokenizer.save_pretrained(run / "tokenizer" / "target")
    (run / "model.json").write_text(json.dumps(asdict(sizes), indent=2) + "\n", encoding="utf-8")
    (run / "data.json").write_text(
        json.dumps(prepared.describe(), ensure_ascii=False) + "\n", encoding="utf-8"
    )


def load_for_decoding(
    config, average: int, world: World, say
) -> tuple[Trained, Precision, Callable | None]:
    """What evaluate.py's and translate.py's flags name: the model on its device, its precision, and faster steps if any."""
    int8 = config.precision == "int8"
    precision = choose_precision(world.device, "fp32" if int8 else config.precision)
    # Rank 0 chooses for all: a run that still trains may have a new best checkpoint a moment later.
    chosen = world.on_main(lambda: choose_checkpoint(config.ckpt, average, say))
    trained = load_trained(chosen, average, say)
    trained.model.to(world.device)
    with precision.autocast():  # fast.steps asks whether it is on
        steps = fast.steps(trained.model, int8) if config.beam == 1 else None
    say(precision.describe() + ", weights and inputs of linear layers rounded to 8 bits" * int8)
    return trained, precision, steps


def run_of(path: Path) -> Path:
    """The run that a checkpoint belongs to: the nearest folder above it that looks like one."""
    for folder in (path, *path.absolute().parents):
        if all((folder / mark).exists() for mark in MARKS):
            return folder
    raise UserError(
        f"{path} is not inside a run of train.py (no folder above it has {', '.join(MARKS)})"
    )


def newest_run(runs: Path) -> str:
    """The run of train.py whose last checkpoint is the youngest; the other labs' runs lie beside them."""
    found = [folder.parent for folder in runs.glob("*/checkpoints") if checkpoint.steps(folder)]
    found = [run for run in found if all((run / mark).exists() for mark in MARKS)]
    if not found:
        raise UserError(
            f"no trained run in {runs.absolute()}; train one with `python train.py`, or name it by --ckpt"
        )
    return str(max(found, key=lambda run: (run / "checkpoints").stat().st_mtime))
