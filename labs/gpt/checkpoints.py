"""Checkpoints of a model that lies in pieces on many processes, by `torch.distributed.checkpoint`.

    python -m labs.gpt.checkpoints --ckpt runs/NAME        # the newest one → runs/NAME/model.safetensors

Every rank writes its own pieces, and a file of metadata tells which piece is where: so a run goes on under another layout
(FSDP × tensor parallel 2 × 2 → one process), each rank reading what it needs. runs/x/checkpoints/sharded-N/ holds the
pieces and state.json.
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

warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled"
)  # one process alone is meant to be alone


def save(folder: Path, step: int, layout, optimizer, state: dict, world: World) -> None:
    """Write folder/sharded-N, all ranks together; it gets its name when all is written. Of others the newest stay."""
    temporary, target = folder / f".tmp-sharded-{step}", folder / f"sharded-{step}"
    world.on_main(
        lambda: [shutil.rmtree(left, ignore_errors=True) for left in folder.glob(".tmp-sharded-*")]
    )
    tensors = {"model": detached(layout.weights), "optimizer": optimizer_tensors(layout, optimizer)}
    try:
        dcp.save(tensors, checkpoint_id=temporary)
    except (
        dcp.CheckpointException
    ) as error:  # a BaseException, not an `Exception`; raised on every rank
        world.on_main(lambda: shutil.rmtree(temporary, ignore_errors=True))
        reason = next(iter(error.failures.values()))[0]
        raise UserError(
            f"cannot write {temporary}: {reason}; free some space, then --resume"
        ) from None

    def finish() -> None:
        text = json.dumps({**state, "step": step, "sizes": asdict(layout.sizes)}, indent=2)
        (temporary / "state.json").write_text(text, encoding="utf-8")
        write_checksums(temporary, [path.name for path in temporary.iterdir()])
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)
        for old in list_checkpoints(folder)[: -layout.config.keep]:
            shutil.rmtree(old, ignore_errors=True)

    world.on_main(finish)


def restore(path: Path, layout, optimizer) -> None:
    """The weights and the optimiser's state, whatever layout wrote them."""
    tensors = {"model": detached(layout.weights), "optimizer": optimizer_tensors(layout, optimizer)}
    try:
        dcp.load(tensors, checkpoint_id=path)
    except (dcp.CheckpointException, RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"{path} does not fit this model or is damaged: {' '.join(str(error).split())[:200]}"
        ) from None
    inner(optimizer).state.update(
        {layout.weights[name]: state for name, state in tensors["optimizer"].items()}
    )


def load_state(path: Path) -> dict:
    """The step, the sizes of the model, and what the training noted beside them."""
    return json.loads((path / "state.json").read_text(encoding="utf-8"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    whole = [path for path in folder.glob("sharded-*") if (path / "state.json").exists()]
    return sorted(whole, key=lambda path: int(path.name.rpartition("-")[2]))


def newest(run: Path) -> Path | None:
    """The newest whole one; None if nothing was saved yet. Raises `UserError` if all are damaged."""
    damaged = []
    for path in reversed(list_checkpoints(run / "checkpoints")):
        if not (damage := verify_files(path)):
            for passed_over in damaged:
                print(f"checkpoint {passed_over}; using {path.name}", file=sys.stderr)
            return path
        damaged.append(f"{path.name} is damaged ({damage})")
    if damaged:
        raise UserError(f"no whole checkpoint in {run}: {', '.join(damaged)}; train again")
    return None


def detached(weights: dict) -> dict:
    """The same tensors without their history: what is saved and what is read into."""
    return {name: weight.detach() for name, weight in weights.items()}


def inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The one that holds states: with ZeRO-1 each rank has an AdamW for its share of the weights."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def optimizer_tensors(layout, optimizer) -> dict:
    """Name of the weight → AdamW's state of it, in the same pieces as the weight; zeros if it has not stepped yet."""
    optimizer, tensors = inner(optimizer), {}
    here = {weight for group in optimizer.param_groups for weight in group["params"]}
    for name, weight in layout.weights.items():
        if weight in here:
            place = "cpu" if layout.config.offload == "optimizer" else weight.device
            zeros = {
                key: torch.zeros_like(weight.detach(), device=place)
                for key in ("exp_avg", "exp_avg_sq")
            }
            # A fused AdamW counts its steps where the weight is.
            tensors[name] = optimizer.state.get(weight) or zeros | {
                "step": torch.zeros((), device=place)
            }
    return tensors


def load_weights(path: Path) -> tuple[dict[str, torch.Tensor], Sizes]:
    """All weights in one process, and the sizes of the model."""
    reader = dcp.FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    names = [name for name in entries if name.startswith("model.")]
    weights = {
        name.removeprefix("model."): torch.empty(
            entries[name].size, dtype=entries[name].properties.dtype
        )
        for name in names
    }
    dcp.load({"model": weights}, storage_reader=reader, no_dist=True)
    return weights, Sizes(**load_state(path)["sizes"])


def checkpoint_of(run: str) -> Path:
    """What --ckpt takes: a run or its name, or one of its checkpoints."""
    path = find_run(run)
    if not (path / ".metadata").exists():
        path = newest(path)
    elif damage := verify_files(path):
        raise UserError(f"{path} is damaged ({damage}); name another one, or the run")
    if path is None:
        raise UserError(f"{run} holds no checkpoint of this lab; train first, or name another run")
    return path


def newest_run() -> str:
    """The run of this lab that saved last. Raises `UserError` if there is none."""
    saved = [state.parent for state in Path("runs").glob("*/checkpoints/sharded-*/state.json")]
    if not saved:
        raise UserError(
            "runs/ holds no run of this lab with a checkpoint; train first, or give --ckpt"
        )
    return str(max(saved, key=lambda path: path.stat().st_mtime).parent.parent)


def convert(run: str) -> None:
    """The newest checkpoint of a run, or the one named, as a single file that needs none of this: RUN/model.safetensors."""
    import safetensors.torch

    run = find_run(run or newest_run())
    path = checkpoint_of(run)
    weights, sizes = load_weights(path)
    target = run / "model.safetensors"
    safetensors.torch.save_file(
        weights, target, metadata={"format": "pt", "sizes": json.dumps(asdict(sizes))}
    )
    print(f"{path} → {target}: {sum(w.numel() for w in weights.values()):,} parameters")


@dataclass
class Config:
    """Which run to convert."""

    ckpt: str = flag(
        "", "a run of labs.gpt, or one of its checkpoints; the newest run", "Conversion"
    )


if __name__ == "__main__":
    config = parse_flags(Config, "write the model of a run into one file, model.safetensors")
    run_script(lambda: convert(config.ckpt))
