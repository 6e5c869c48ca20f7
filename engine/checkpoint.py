"""Checkpoints that survive a kill and a full disk, and never run code when they are opened.

    save(folder, step, model.state_dict(), optimizer.state_dict(), {"best_loss": 3.1},
         best_step=step)
    newest = repair(folder)                                     # to resume
    model.load_state_dict(load_weights(resolve("runs/x")))      # to translate

runs/x/checkpoints/step-200/     model.safetensors  optimizer.pt  state.json  checksums.json
runs/x/checkpoints/best, last    symbolic links, each to one of the step-N folders

A checkpoint is intact if its tensors have the checksums in checksums.json, and state.json its own:
only the state of a step is ever written a second time.
"""

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from engine.errors import UserError
from engine.files import as_argument, as_json, atomic_write, wait_for_disk
from engine.telemetry import is_main

CONTENT = ["model.safetensors", "optimizer.pt"]  # what checksums.json lists
RESUMABLE = 2  # checkpoints that keep the optimizer's state: the newest, and one to fall back to
WEIGHT_SUFFIXES = [".safetensors", ".pt", ".pth", ".bin"]

# ---- write


def save(
    folder: Path,
    step: int,
    model_state: dict,
    optimizer_state: dict,
    state: dict,
    keep: int = 5,
    best_step: int | None = None,
) -> None:
    """Write `folder/step-N` completely or not at all. To be called by one process only (rank 0).

    `state` is a dict that can be written as JSON. The links `last` and `best` follow; the newest
    `keep` checkpoints and the best one stay. The optimizer's state, up to twice the size of the
    weights, stays in the newest two. Raises `UserError` if the disk is full or cannot be written
    to.

    A step is saved again only after a resume, before the first update: with the same weights and
    moments. Then only the state is written.
    """
    sealed_state = sealed({**state, "best_step": best_step, "step": step})
    checkpoint = folder / f"step-{step}"
    temporary = folder / f".tmp-step-{step}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_temporary(folder)
        if checkpoint.exists():
            atomic_write(checkpoint / "state.json", sealed_state)
        else:
            files = files_of(model_state, optimizer_state, sealed_state)
            temporary.mkdir()
            for name, content in files.items():
                (temporary / name).write_bytes(content)
                wait_for_disk(temporary / name)
            wait_for_disk(temporary)
            os.replace(temporary, checkpoint)
        _link(folder, step, best_step)
        wait_for_disk(folder)
        _remove_old(folder, best_step, keep)
    except OSError as error:
        reason = f"cannot write step-{step} in {folder}: {error.strerror or error}"
        remedy = f"fix this, then --resume {as_argument(folder.parent)}"
        raise UserError(f"{reason}; {remedy}") from error
    finally:
        _remove_temporary(folder)


def files_of(model_state: dict, optimizer_state: dict, sealed_state: str) -> dict[str, bytes]:
    """Name -> bytes of the four files.

    Everything becomes bytes before anything is written: a full disk then has one kind of error. The
    price is a second copy of the checkpoint in memory.
    """
    optimizer_file = io.BytesIO()
    torch.save(optimizer_state, optimizer_file)
    # safetensors refuses names that share storage (tied weights), and all names are to come back.
    tensors = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in model_state.items()
    }
    files = {
        "model.safetensors": safetensors.torch.save(tensors, metadata={"format": "pt"}),
        "optimizer.pt": optimizer_file.getbuffer(),
        "state.json": sealed_state.encode(),
    }
    checksums = {name: hashlib.sha256(files[name]).hexdigest() for name in CONTENT}
    return {**files, "checksums.json": as_json(checksums).encode()}


def sealed(state: dict) -> str:
    """The text of state.json: the state, and a checksum of it."""
    return as_json({**state, "checksum": hashlib.sha256(as_json(state).encode()).hexdigest()})


def write_checksums(folder: Path, names: list[str]) -> None:
    """checksums.json in `folder`: the hashes of these files, for `verify_files`."""
    hashes = {name: _hash_of(folder / name) for name in sorted(names)}
    atomic_write(folder / "checksums.json", as_json(hashes))


# ---- check


def steps(folder: Path) -> list[int]:
    """The steps that have a folder, ascending. Only a complete folder is named step-N."""
    names = (path.name for path in Path(folder).glob("step-*") if path.is_dir())
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-(0|[1-9][0-9]*)", name))


def verify_files(folder: Path, optional: str = "") -> str | None:
    """None if all files in checksums.json have these checksums, else what is wrong.

    The file `optional` may be missing.
    """
    try:
        text = Path(folder, "checksums.json").read_bytes()
        recorded = json.loads(text)
        if text != as_json(recorded).encode():  # a changed byte of this file itself
            return "checksums.json is damaged"
        for name, digest in recorded.items():
            path = Path(folder, name)
            if name == optional and not path.exists():
                continue
            if _hash_of(path) != digest:
                return f"checksum of {name} differs"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, TypeError, AttributeError, RecursionError):  # no JSON, or no object
        return "checksums.json is damaged"
    return None


def verify(checkpoint: Path, to_resume: bool = False) -> str | None:
    """None if the checkpoint is intact, else what is wrong.

    Without optimizer.pt it is intact, but cannot be used `to_resume`.
    """
    if damage := verify_files(checkpoint, optional="optimizer.pt"):
        return damage
    recorded = json.loads(Path(checkpoint, "checksums.json").read_bytes())
    try:
        text = Path(checkpoint, "state.json").read_bytes()
        if text != sealed(load_state(checkpoint)).encode():
            return "state.json is damaged"
    except FileNotFoundError:
        return "state.json is missing"
    except OSError as error:
        return f"state.json cannot be read: {error.strerror}"
    except (ValueError, KeyError, AttributeError, RecursionError):  # no JSON, or no object
        return "state.json is damaged"
    if to_resume and not Path(checkpoint, "optimizer.pt").exists():
        return "its optimizer state was removed, to save space"
    if {*recorded, "optimizer.pt"} != {*CONTENT}:
        return "checksums.json is damaged"
    return None


# ---- find


def latest(folder: Path, to_resume: bool = False) -> Path:
    """The newest intact checkpoint in `folder`; the damaged ones that it skips are named on stderr.

    Changes nothing: a run may be writing there. Raises `UserError` if there is none.
    """
    damaged = []
    for step in reversed(steps(folder)):
        checkpoint = Path(folder) / f"step-{step}"
        damage = verify(checkpoint, to_resume)
        if damage:
            damaged.append(f"{checkpoint.name} ({damage})")
            continue
        for skipped in damaged:
            _print(f"checkpoint {skipped} is skipped; using {checkpoint.name}")
        return checkpoint
    reason = ", ".join(damaged) or "nothing is saved yet"
    raise UserError(
        f"no checkpoint in {folder} can be used: {reason}; train first, or give another folder"
    )


def repair(folder: Path) -> Path | None:
    """The checkpoint to resume from, None if nothing is saved. Only for the run that writes there.

    Corrects the links if a kill came before they were set. Damaged newer checkpoints are renamed to
    damaged-step-N: they must not count among those to fall back to.
    """
    if not steps(folder):
        return None
    newest = latest(folder, to_resume=True)
    step = int(newest.name.removeprefix("step-"))
    for damaged in steps(folder):
        if damaged > step:
            new_name = folder / f"damaged-step-{damaged}"
            shutil.rmtree(new_name, ignore_errors=True)
            os.replace(folder / f"step-{damaged}", new_name)
    _link(folder, step, load_state(newest)["best_step"])
    return newest


def resolve(path: str | Path, newest: bool = False) -> Path:
    """The absolute path of the checkpoint or weights file that `--ckpt` means.

    Of a run it is the best checkpoint, or the latest if nothing was validated or with `newest`.
    Raises `UserError` for a path that leads to none.
    """
    # Links above the checkpoint stay in the path: the folder `checkpoints` of a run may be one, to
    # a larger disk, and a run is found as a folder above its checkpoints.
    path = Path(path).absolute()
    if path.is_file() and path.suffix in WEIGHT_SUFFIXES:
        return path
    if not path.is_dir():
        what = "does not exist"
        if path.exists():
            what = f"is not a weights file ({' '.join(WEIGHT_SUFFIXES)})"
        raise UserError(
            f"{path} {what}; give a run directory, a checkpoint directory or a weights file"
        )
    choose = latest if newest else _best_or_latest
    if (path / "checkpoints").is_dir() or (path / "config.json").exists():
        return choose(path / "checkpoints")
    if steps(path):  # the folder checkpoints/ of a run
        return choose(path)
    checkpoint = path
    while checkpoint.is_symlink():  # such as `best`, to its step-N
        checkpoint = checkpoint.parent / checkpoint.readlink()
    if damage := verify(checkpoint):
        raise UserError(
            f"{path} is not an intact checkpoint ({damage}); give a run directory, which uses an "
            "intact one, or another checkpoint"
        )
    return checkpoint


def last_intact(checkpoint: Path, count: int, keep: int) -> list[Path]:
    """The `count` intact checkpoints up to and including this one in its folder, oldest first.

    Only the newest `keep` count: an older one is there because it was the best, and may be
    thousands of steps away from the others.
    """
    recent = [checkpoint.parent / f"step-{step}" for step in steps(checkpoint.parent)[-keep:]]
    candidates = []  # none for a weights file, or an older checkpoint
    if checkpoint in recent:
        up_to_it = recent[: recent.index(checkpoint) + 1]
        candidates = [folder for folder in up_to_it if verify(folder) is None]
    if not 1 <= count <= len(candidates):
        raise UserError(
            f"cannot average {count} checkpoints up to {checkpoint}: {len(candidates)} of the "
            f"newest {keep} are intact; ask for fewer, or train with a larger --keep"
        )
    return candidates[-count:]


# ---- read


def load_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a verified checkpoint or of a weights file, on the CPU.

    The names lose the prefixes that DDP and torch.compile add.
    """
    weights = load_tensors(path / "model.safetensors" if path.is_dir() else path)
    for key in ("model", "state_dict"):  # of other programs' checkpoints
        if isinstance(weights, dict) and isinstance(weights.get(key), dict):
            weights = weights[key]
    entries = weights.items() if isinstance(weights, dict) else []
    are_weights = all(isinstance(name, str) and isinstance(w, Tensor) for name, w in entries)
    if not entries or not are_weights:
        raise UserError(f"{path} contains no state_dict (names and tensors); give a weights file")
    return {re.sub(r"^(module\.|_orig_mod\.)+", "", name): tensor for name, tensor in entries}


def load_state(checkpoint: Path) -> dict:
    """The state of a verified checkpoint as `save` got it, with its step and the best one's."""
    state = json.loads((Path(checkpoint) / "state.json").read_bytes())
    del state["checksum"]
    return state


def load_tensors(path: Path):
    """Tensors and plain values of a safetensors or torch file.

    A pickle that asks for more is refused, not run.
    """
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of old formats before it refuses them
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; name another file"
        ) from error
    except Exception as error:  # given any other bytes the readers raise anything, even KeyError
        # An object that is not on torch's list of harmless ones, TorchScript, or a pickle not of
        # torch.save.
        unpickling = isinstance(error, pickle.UnpicklingError)
        plain_pickle = unpickling and path.read_bytes()[:1] == b"\x80"
        if plain_pickle or "GLOBAL" in str(error) or "TorchScript" in str(error):
            reason = (
                "contains more than tensors and would run code when opened, so it is refused; "
                "use .safetensors"
            )
        else:
            reason = "is empty, truncated or not a weights file; copy it again or use another file"
        raise UserError(f"{path} {reason}") from error


# ---- details


def _best_or_latest(folder: Path) -> Path:
    newest = latest(folder)
    best_step = load_state(newest)["best_step"]
    if best_step is None:  # nothing was validated yet
        return newest
    best = folder / f"step-{best_step}"
    if best != newest and (damage := verify(best)):
        _print(f"the best checkpoint, {best}, is damaged ({damage}); using the latest")
        return newest
    return best


def _hash_of(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def _remove_temporary(folder: Path) -> None:
    """What failed, or was left by a killed process: a run has one writer."""
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _link(folder: Path, last: int, best: int | None) -> None:
    """Point `last` and `best` to their checkpoints.

    A reader finds the old link or the new one, never none.
    """
    for name, step in {"last": last, "best": best}.items():
        if not (folder / f"step-{step}").is_dir():  # "step-None": nothing was validated yet
            continue
        new = folder / f".new-{name}"
        with suppress(OSError):  # exFAT, SMB and Google Drive have no links; training needs none
            new.unlink(missing_ok=True)
            new.symlink_to(f"step-{step}")  # relative, so that a run can be moved or copied
            os.replace(new, folder / name)


def _remove_old(folder: Path, best_step: int | None, keep: int) -> None:
    """Keep the newest `keep` checkpoints, the best one, and the optimizer's state of two."""
    newest_first = steps(folder)[::-1]
    with suppress(OSError):  # what cannot be removed need not stop the training
        for old in newest_first[RESUMABLE:]:
            (folder / f"step-{old}" / "optimizer.pt").unlink(missing_ok=True)
    for old in set(newest_first[max(keep, 1) :]) - {best_step}:
        # Rename first: a kill while its files are removed must not leave half a step-N.
        with suppress(OSError):
            os.replace(folder / f"step-{old}", folder / f".tmp-removed-step-{old}")


def _print(note: str) -> None:
    if is_main():  # of the processes of one run, one
        print(note, file=sys.stderr, flush=True)
