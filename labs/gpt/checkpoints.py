"""Checkpoints of a model that lies in pieces on many processes, by `torch.distributed.checkpoint`.

Every rank writes its own pieces, and a file of metadata says which piece is where. So a run can be
resumed under another layout (FSDP × tensor parallel 2 × 2 → one process): each rank reads what it
needs. runs/NAME/checkpoints/sharded-N/ has the pieces and state.json.
"""

import json
import os
import re
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.optim import ZeroRedundancyOptimizer

from engine.checkpoint import verify_files, write_checksums
from engine.errors import UserError
from engine.run import find_run
from labs.gpt.sizes import Sizes

# One process alone is meant to be alone.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def save(folder: Path, layout, optimizer, state: dict) -> None:
    """Write folder/sharded-N, all ranks together, and delete all but the newest --keep up to it.

    `state` is a dict for JSON and has the step N. The folder gets its name when it is complete.
    Raises `UserError` if it cannot be written.
    """
    world, name = layout.world, f"sharded-{state['step']}"
    temporary = folder / f".tmp-{name}"
    world.on_main(lambda: remove(folder.glob(".tmp-sharded-*")))
    try:
        dcp.save(tensors_of(layout, optimizer), checkpoint_id=temporary)
    except dcp.CheckpointException as error:  # not an `Exception`; raised on every rank
        world.on_main(lambda: remove([temporary]))
        reason = next(iter(error.failures.values()))[0]
        raise UserError(
            f"cannot write {temporary}: {reason}; free some space, then --resume"
        ) from None
    if world.is_main:
        scaler = layout.precision.scaler.state_dict()  # of fp16's loss; otherwise empty
        saved = {"state": state, "sizes": asdict(layout.sizes), "scaler": scaler}
        (temporary / "state.json").write_text(json.dumps(saved, indent=2), encoding="utf-8")
        write_checksums(temporary, [path.name for path in temporary.iterdir()])
        # A resumed run may save a step again, and a folder cannot be renamed onto a full one.
        replaced = folder / f"{temporary.name}-replaced"
        if (folder / name).exists():
            os.replace(folder / name, replaced)
        os.replace(temporary, folder / name)
        remove([replaced])
        # Checkpoints of later steps were skipped as damaged when the run was resumed: they do not
        # count.
        up_to_it = [path for path in list_checkpoints(folder) if step_of(path) <= state["step"]]
        remove(up_to_it[: -layout.config.keep])
    world.on_main(lambda: None)  # the others wait until it has its name


def remove(folders) -> None:
    """Delete folders with all they contain."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def restore(path: Path, layout, optimizer) -> None:
    """Load the weights, the optimizer's moments and the loss scale, whatever layout wrote them."""
    tensors = tensors_of(layout, optimizer)
    dcp.load(tensors, checkpoint_id=path)
    for name, moments in tensors["optimizer"].items():
        local_optimizer(optimizer).state[layout.weights[name]] = moments
    scaler = read(path)["scaler"]
    if scaler:  # empty if the run was not in fp16
        layout.precision.scaler.load_state_dict(scaler)


def tensors_of(layout, optimizer) -> dict[str, dict]:
    """What is saved and what is read into: weights and AdamW's state, by the weights' names.

    The state is sharded like its weight. Before the first step it is zero.
    """
    optimizer = local_optimizer(optimizer)
    own = {weight for group in optimizer.param_groups for weight in group["params"]}
    weights, moments = {}, {}
    for name, weight in layout.weights.items():
        weights[name] = weight.detach()
        if weight in own:
            moments[name] = optimizer.state.get(weight) or {
                "exp_avg": torch.zeros_like(weights[name]),
                "exp_avg_sq": torch.zeros_like(weights[name]),
                # A fused AdamW counts its steps where the weight is.
                "step": torch.zeros((), device=weight.device),
            }
    return {"model": weights, "optimizer": moments}


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds the moments: with ZeRO-1 each rank has its own for its share."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def read(path: Path) -> dict:
    """What `save` wrote beside the tensors: the state, the model's sizes and the loss scale."""
    return json.loads((path / "state.json").read_text(encoding="utf-8"))


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; a copy with another name is none."""
    name = re.compile(r"sharded-(0|[1-9][0-9]*)")
    folders = [path for path in folder.glob("sharded-*") if name.fullmatch(path.name)]
    return sorted(folders, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step N in the name sharded-N."""
    return int(checkpoint.name.removeprefix("sharded-"))


def newest(run: Path, log=print) -> Path | None:
    """The newest undamaged checkpoint; None if there is none. `UserError` if all are damaged."""
    damaged = []
    for path in reversed(list_checkpoints(run / "checkpoints")):
        damage = verify_files(path)
        if not damage:
            for skipped in damaged:
                log(f"checkpoint {skipped}; using {path.name}")
            return path
        damaged.append(f"{path.name} is damaged ({damage})")
    if damaged:
        raise UserError(f"no undamaged checkpoint in {run}: {', '.join(damaged)}; train again")
    return None


def choose(ckpt: str, log=print) -> Path:
    """The checkpoint that `ckpt` names: a run, of which the newest is taken, or a checkpoint.

    "" is the newest run in runs/. Raises `UserError` if there is none, or it is damaged.
    """
    if not ckpt:
        runs = [run for run in Path("runs").glob("*") if list_checkpoints(run / "checkpoints")]
        if not runs:
            raise UserError(
                "no run of labs.gpt in runs/; train one: python -m labs.gpt --data FILE, or name "
                "one with --ckpt"
            )
        ckpt = str(max(runs, key=lambda run: (run / "checkpoints").stat().st_mtime))
    path = find_run(ckpt)
    if (path / "state.json").exists():
        if damage := verify_files(path):
            raise UserError(f"{path} is damaged ({damage}); name another checkpoint")
        return path
    found = newest(path, log)
    if found is None:
        raise UserError(f"{ckpt} has no checkpoint of labs.gpt; name a run of it, or a checkpoint")
    return found


def names_of(path: Path) -> set[str]:
    """The names of a checkpoint's weights."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {name.removeprefix("model.") for name in entries if name.startswith("model.")}


def load_weights(path: Path) -> tuple[dict[str, torch.Tensor], Sizes]:
    """All weights in one process, and the model's sizes."""
    reader = dcp.FileSystemReader(path)
    weights = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if name.startswith("model."):
            empty = torch.empty(entry.size, dtype=entry.properties.dtype)
            weights[name.removeprefix("model.")] = empty
    dcp.load({"model": weights}, storage_reader=reader, no_dist=True)
    return weights, Sizes(**read(path)["sizes"])
