"""Checkpoints of a model that lies in pieces on many processes, by `torch.distributed.checkpoint`.

    python -m labs.gpt.checkpoints --ckpt runs/NAME   # the newest one → runs/NAME/model.safetensors

Every rank writes its own pieces, and a file of metadata says which piece is where. So a run can be
resumed under another layout (FSDP × tensor parallel 2 × 2 → one process): each rank reads what it
needs. runs/x/checkpoints/sharded-N/ has the pieces and state.json.
"""

import json
import os
import shutil
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.optim import ZeroRedundancyOptimizer

from engine.checkpoint import verify_files, write_checksums
from engine.config import flag, parse_flags
from engine.distributed import World
from engine.errors import UserError, run_script
from engine.run import find_run
from labs.gpt.sizes import Sizes

# One process alone is meant to be alone.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def save(folder: Path, step: int, layout, optimizer, state: dict, world: World) -> None:
    """Write folder/sharded-N, all ranks together, and delete all but the newest --keep.

    The folder gets its name when it is complete. Raises `UserError` if it cannot be written.
    """
    temporary, target = folder / f".tmp-sharded-{step}", folder / f"sharded-{step}"
    world.on_main(lambda: remove(folder.glob(".tmp-sharded-*")))
    tensors = {"model": detached(layout.weights), "optimizer": optimizer_tensors(layout, optimizer)}
    try:
        dcp.save(tensors, checkpoint_id=temporary)
    except dcp.CheckpointException as error:  # not an `Exception`; raised on every rank
        world.on_main(lambda: remove([temporary]))
        reason = next(iter(error.failures.values()))[0]
        raise UserError(
            f"cannot write {temporary}: {reason}; free some space, then --resume"
        ) from None
    if world.is_main:
        text = json.dumps({**state, "step": step, "sizes": asdict(layout.sizes)}, indent=2)
        (temporary / "state.json").write_text(text, encoding="utf-8")
        write_checksums(temporary, [path.name for path in temporary.iterdir()])
        remove([target])
        os.replace(temporary, target)
        remove(list_checkpoints(folder)[: -layout.config.keep])
    world.on_main(lambda: None)  # the others wait until it has its name


def remove(folders) -> None:
    """Delete folders with all they contain."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def restore(path: Path, layout, optimizer) -> None:
    """Load the weights and the optimizer's moments, whatever layout wrote them."""
    tensors = {"model": detached(layout.weights), "optimizer": optimizer_tensors(layout, optimizer)}
    try:
        dcp.load(tensors, checkpoint_id=path)
    except (dcp.CheckpointException, RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"{path} does not fit this model or is damaged: {' '.join(str(error).split())[:200]}"
        ) from None
    for name, moments in tensors["optimizer"].items():
        inner(optimizer).state[layout.weights[name]] = moments


def load_state(path: Path) -> dict:
    """The step, the model's sizes, and the other values saved with them."""
    return json.loads((path / "state.json").read_text(encoding="utf-8"))


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    complete = [path for path in folder.glob("sharded-*") if (path / "state.json").exists()]
    return sorted(complete, key=lambda path: int(path.name.rpartition("-")[2]))


def newest(run: Path) -> Path | None:
    """The newest undamaged checkpoint; None if there is none. `UserError` if all are damaged."""
    damaged = []
    for path in reversed(list_checkpoints(run / "checkpoints")):
        damage = verify_files(path)
        if not damage:
            for skipped in damaged:
                print(f"checkpoint {skipped}; using {path.name}", file=sys.stderr)
            return path
        damaged.append(f"{path.name} is damaged ({damage})")
    if damaged:
        raise UserError(f"no undamaged checkpoint in {run}: {', '.join(damaged)}; train again")
    return None


def detached(weights: dict) -> dict:
    """The same tensors without their history: what is saved and what is read into."""
    return {name: weight.detach() for name, weight in weights.items()}


def inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds the moments: with ZeRO-1 each rank has its own for its share."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def optimizer_tensors(layout, optimizer) -> dict:
    """Weight name → AdamW's state of it, sharded like the weight; zeros before the first step."""
    optimizer = inner(optimizer)
    own = {weight for group in optimizer.param_groups for weight in group["params"]}
    tensors = {}
    for name, weight in layout.weights.items():
        if weight not in own:
            continue
        state = optimizer.state.get(weight)
        if not state:
            place = "cpu" if layout.config.offload == "optimizer" else weight.device
            state = {
                "exp_avg": torch.zeros_like(weight.detach(), device=place),
                "exp_avg_sq": torch.zeros_like(weight.detach(), device=place),
                # A fused AdamW counts its steps where the weight is.
                "step": torch.zeros((), device=place),
            }
        tensors[name] = state
    return tensors


def load_weights(path: Path) -> tuple[dict[str, torch.Tensor], Sizes]:
    """All weights in one process, and the model's sizes."""
    reader = dcp.FileSystemReader(path)
    weights = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if name.startswith("model."):
            empty = torch.empty(entry.size, dtype=entry.properties.dtype)
            weights[name.removeprefix("model.")] = empty
    dcp.load({"model": weights}, storage_reader=reader, no_dist=True)
    return weights, Sizes(**load_state(path)["sizes"])


def checkpoint_of(run: str) -> Path:
    """The checkpoint that --ckpt names: a run (its newest), or one of its checkpoints."""
    path = find_run(run)
    if not (path / ".metadata").exists():
        path = newest(path)
    elif damage := verify_files(path):
        raise UserError(f"{path} is damaged ({damage}); name another one, or the run")
    if path is None:
        raise UserError(f"{run} has no checkpoint of this lab; train first, or name another run")
    return path


def newest_run() -> str:
    """The run of this lab that saved last. Raises `UserError` if there is none."""
    saved = [state.parent for state in Path("runs").glob("*/checkpoints/sharded-*/state.json")]
    if not saved:
        raise UserError(
            "runs/ has no run of this lab with a checkpoint; train first, or name one with --ckpt"
        )
    return str(max(saved, key=lambda path: path.stat().st_mtime).parent.parent)


def convert(run: str) -> None:
    """Write the checkpoint that `run` names as one file, RUN/model.safetensors."""
    import safetensors.torch

    run = find_run(run or newest_run())
    path = checkpoint_of(run)
    weights, sizes = load_weights(path)
    target = run / "model.safetensors"
    about = {"format": "pt", "sizes": json.dumps(asdict(sizes))}
    safetensors.torch.save_file(weights, target, metadata=about)
    print(f"{path} → {target}: {sum(w.numel() for w in weights.values()):,} parameters")


@dataclass
class Config:
    """Which run to convert."""

    ckpt: str = flag(
        "", "run of labs.gpt, or one of its checkpoints; default: the newest", "Conversion"
    )


if __name__ == "__main__":
    config = parse_flags(Config, "write the model of a run into one file, model.safetensors")
    run_script(lambda: convert(config.ckpt))
