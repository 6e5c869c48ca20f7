"""Checkpoints that survive a kill, a full disk and a flipped bit, and never run code when they are opened.

runs/x/checkpoints/step-200/     model.safetensors  optimizer.pt  state.json  checksums.json
runs/x/checkpoints/best, last    symbolic links, each to one of the step-N folders

save(folder, step, model.state_dict(), optimizer.state_dict(), {"best_score": 31.2}, best_step=step)
newest = mend(folder); load_tensors(newest / "optimizer.pt"); load_state(newest)   # to resume
model.load_state_dict(load_weights(resolve("runs/x")))             # to translate
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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from engine.config import as_json, atomic_write, wait_for_disk
from engine.errors import UserError
from engine.telemetry import is_main

CONTENT = [
    "model.safetensors",
    "optimizer.pt",
    "state.json",
]  # the files that checksums.json vouches for
RESUMABLE = 2  # checkpoints that keep the optimizer's state: the newest, and one to fall back on
WEIGHT_SUFFIXES = [".safetensors", ".pt", ".pth", ".bin"]


def save(
    folder: Path,
    step: int,
    model_state: dict,
    optimizer_state: dict,
    state: dict,
    keep: int = 5,
    best_step: int | None = None,
) -> None:
    """Write `folder/step-N` whole or not at all, re-point `last` and `best`, and keep the newest `keep` and the best.

    `state` is any JSON: best score, sampler position, scaler… The optimizer's state, up to twice the size of the
    weights, stays in the newest `RESUMABLE` only. To be called by one process only (rank 0).
    """
    checkpoint, temporary = folder / f"step-{step}", folder / f".tmp-step-{step}-{os.getpid()}"
    # Everything becomes bytes first and then goes to disk in one way, so that a full disk has one kind of error.
    # The price is a second copy of the checkpoint in host memory for as long as the writing takes.
    optimizer_file = io.BytesIO()
    torch.save(optimizer_state, optimizer_file)
    # safetensors refuses names that share storage (tied weights), and loading must give every name back: copy each.
    tensors = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in model_state.items()
    }
    files = {
        "model.safetensors": safetensors.torch.save(tensors, metadata={"format": "pt"}),
        "optimizer.pt": optimizer_file.getbuffer(),
        "state.json": as_json({**state, "step": step, "best_step": best_step}).encode(),
    }
    files["checksums.json"] = as_json(
        {name: hashlib.sha256(files[name]).hexdigest() for name in CONTENT}
    ).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _settle_replaced(folder)
        for leftover in folder.glob(
            ".tmp-*"
        ):  # a run has one writer, so these are of runs killed in the middle
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir()
        for name, content in files.items():
            (temporary / name).write_bytes(content)
            wait_for_disk(temporary / name)
        wait_for_disk(temporary)
        if (
            checkpoint.exists()
        ):  # a resumed run does a step again, and a folder cannot be renamed onto a full one
            os.replace(checkpoint, folder / f".replaced-{checkpoint.name}")
        os.replace(temporary, checkpoint)
        _link(folder, step, best_step)
        wait_for_disk(folder)
        _settle_replaced(folder)
        _remove_old(folder, {step, best_step}, keep)
    except OSError as error:
        _settle_replaced(folder)
        whole = next(_whole(folder), None)
        remedy = (
            f"resume from {whole.name}, which is whole"
            if whole
            else "begin anew: no earlier checkpoint is whole"
        )
        reason = f"cannot write step-{step} in {folder}: {error.strerror or error}"
        raise UserError(f"{reason}; fix this, then {remedy}") from error
    finally:
        for leftover in folder.glob(
            ".tmp-*"
        ):  # what failed or is old; what was saved has its final name
            shutil.rmtree(leftover, ignore_errors=True)


def steps(folder: Path) -> list[int]:
    """The steps that have a folder, ascending. A folder gets the name step-N only once all its files are written."""
    names = (path.name for path in Path(folder).glob("step-*") if path.is_dir())
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-(0|[1-9][0-9]*)", name))


def write_checksums(folder: Path, names: list[str]) -> None:
    """checksums.json, the hashes of these files in `folder`, for `verify_files`; whole or not at all."""
    atomic_write(
        folder / "checksums.json",
        as_json({name: _hash_of(folder / name) for name in sorted(names)}),
    )


def verify_files(folder: Path, may_miss: str = "") -> str | None:
    """None if every file that checksums.json names is exactly as it was written, else a few words on what is wrong."""
    try:
        text = Path(folder, "checksums.json").read_bytes()
        recorded = json.loads(text)
        # Comparing with what we would write shows any changed byte of this file too, even a space turned into a tab.
        if text != as_json(recorded).encode():
            return "checksums.json is damaged"
        for name, digest in recorded.items():
            if (name != may_miss or Path(folder, name).exists()) and _hash_of(
                Path(folder, name)
            ) != digest:
                return f"checksum of {name} differs"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ):  # no JSON, not UTF-8, no table, nested without end
        return "checksums.json is damaged"
    return None


def verify(checkpoint: Path, to_resume: bool = False) -> str | None:
    """None if the checkpoint is as it was saved (optimizer.pt may be gone), else what is wrong or, `to_resume`, missing."""
    if damage := verify_files(checkpoint, may_miss="optimizer.pt"):
        return damage
    recorded = json.loads(Path(checkpoint, "checksums.json").read_bytes())
    if to_resume and not ("optimizer.pt" in recorded and Path(checkpoint, "optimizer.pt").exists()):
        return "its optimizer state was removed, to save space"
    return (
        None if {*recorded, "optimizer.pt"} == {*CONTENT} else "checksums.json is damaged"
    )  # or unlisted


def latest(folder: Path, to_resume: bool = False) -> Path:
    """The newest whole checkpoint in `folder`; every damaged one that is passed over is named in one line.

    Changes nothing: a run may be writing there.
    """
    damaged = []
    for checkpoint in (Path(folder) / f"step-{step}" for step in reversed(steps(folder))):
        if not (damage := verify(checkpoint, to_resume)):
            for passed_over in (
                damaged if is_main() else []
            ):  # of the processes of one run, one speaks
                print(
                    f"checkpoint {passed_over} is passed over; using {checkpoint.name}",
                    file=sys.stderr,
                    flush=True,
                )
            return checkpoint
        damaged.append(f"{checkpoint.name} ({damage})")
    reason = ", ".join(damaged) or "nothing is saved yet"
    raise UserError(
        f"no checkpoint in {folder} can be used: {reason}; train first, or give another folder"
    )


def mend(folder: Path) -> Path | None:
    """What a run goes on from, None if nothing was saved; links are set anew: a kill may have come before they were."""
    _settle_replaced(folder)
    if not steps(folder):
        return None
    newest = latest(folder, to_resume=True)
    _put_damaged_aside(folder, int(newest.name[5:]))
    _link(folder, int(newest.name[5:]), load_state(newest)["best_step"])
    return newest


def resolve(path: str | Path) -> Path:
    """The checkpoint or weights file `--ckpt` names, of a run its best checkpoint, else its latest; or `UserError`."""
    path = Path(path)
    if path.is_file() and path.suffix in WEIGHT_SUFFIXES:
        if (
            path.name in CONTENT
            and (path.parent / "state.json").exists()
            and (damage := verify(path.parent))
        ):
            raise UserError(
                f"{path} belongs to a checkpoint that is not whole ({damage}); use another one"
            )
        return path
    if not path.is_dir():
        what = (
            f"is not a weights file ({' '.join(WEIGHT_SUFFIXES)})"
            if path.exists()
            else "does not exist"
        )
        raise UserError(
            f"{path} {what}; give a run directory, a checkpoint directory or a weights file"
        )
    is_folder_of_run = (path / "checkpoints").is_dir() or (path / "config.json").exists()
    folder = path / "checkpoints" if is_folder_of_run else path
    if not is_folder_of_run and not steps(folder):  # nor is it a run's checkpoints/
        if damage := verify(path.resolve()):
            whole = next(_whole(path.resolve().parent), None)
            advice = (
                f"use {whole}, which is whole"
                if whole
                else "give a run directory or another checkpoint"
            )
            raise UserError(f"{path} is not a whole checkpoint ({damage}); {advice}")
        return path.resolve()  # from a link such as `best` to its step-N
    newest = latest(folder)
    best_step = load_state(newest)["best_step"]
    best = (
        newest if best_step is None else folder / f"step-{best_step}"
    )  # None: nothing was validated yet
    if best != newest and (damage := verify(best)):
        if is_main():
            print(
                f"{best} is no whole checkpoint ({damage}), so not the best but the latest is used",
                file=sys.stderr,
            )
        best = newest
    return best.resolve()


def load_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint that was verified or of a weights file, on the CPU, without prefixes of DDP and compile."""
    weights = load_tensors(path / "model.safetensors" if path.is_dir() else path)
    for key in ["model", "state_dict"]:
        if isinstance(weights, dict) and isinstance(weights.get(key), dict):
            weights = weights[key]
    entries = weights.items() if isinstance(weights, dict) else []
    if not entries or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in entries
    ):
        raise UserError(f"{path} contains no state_dict (names and tensors); give a weights file")
    # DistributedDataParallel puts "module." before each name and torch.compile "_orig_mod.", in either order.
    return {re.sub(r"^(module\.|_orig_mod\.)+", "", name): tensor for name, tensor in entries}


def load_state(checkpoint: Path) -> dict:
    """The state of a checkpoint that was verified, as it was given to `save`, with its step and the best one's."""
    state, best = (
        json.loads((Path(checkpoint) / "state.json").read_bytes()),
        Path(checkpoint).parent / "best",
    )
    if "best_step" not in state:  # an older version had the link alone
        state["best_step"] = (
            int(best.resolve().name.removeprefix("step-")) if best.exists() else None
        )
    return state


def last_whole(checkpoint: Path, count: int) -> list[Path]:
    """The `count` whole checkpoints up to and including this one in its folder, oldest first."""
    whole = list(_whole(checkpoint.parent))
    whole = (
        whole[whole.index(checkpoint) :] if checkpoint in whole else []
    )  # a weights file has nothing before it
    if not 1 <= count <= len(whole):
        raise UserError(
            f"cannot average {count} checkpoints up to {checkpoint}: {len(whole)} are whole; ask for fewer"
        )
    return whole[:count][::-1]


def load_tensors(path: Path):
    """Tensors and plain values of a safetensors or torch file; what else a pickle asks for is refused, never run."""
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # torch warns of a pickle's version before it refuses the pickle
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; name another file"
        ) from error
    except (
        Exception
    ) as error:  # given any other bytes, the readers may raise anything, even KeyError
        # A function or class that is not on torch's list of harmless ones, TorchScript, or a pickle not of torch.save:
        plain_pickle = (
            isinstance(error, pickle.UnpicklingError) and path.read_bytes()[:1] == b"\x80"
        )
        if plain_pickle or "GLOBAL" in str(error) or "TorchScript" in str(error):
            reason = "contains more than tensors and would run code when opened, so it is refused; use .safetensors"
        else:
            reason = "is empty, truncated or not a weights file; copy it again or use another file"
        raise UserError(f"{path} {reason}") from error


def _whole(folder: Path) -> Iterator[Path]:
    """The whole checkpoints, the newest first."""
    return (
        path
        for step in reversed(steps(folder))
        if verify(path := Path(folder) / f"step-{step}") is None
    )


def _hash_of(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def _settle_replaced(folder: Path) -> None:
    """Remove a step-N that was replaced; or, if the new one never came (a kill in between), give it its name back."""
    for replaced in folder.glob(".replaced-step-*"):
        checkpoint = folder / replaced.name.removeprefix(".replaced-")
        with suppress(OSError):  # the folder may be somebody else's, and only for reading
            shutil.rmtree(replaced) if checkpoint.exists() else replaced.rename(checkpoint)


def _put_damaged_aside(folder: Path, step: int) -> None:
    """Rename the damaged checkpoints newer than this step: they would count among those that are kept."""
    for newer in [found for found in steps(folder) if found > step]:
        checkpoint, aside = folder / f"step-{newer}", folder / f"damaged-step-{newer}"
        if not verify(checkpoint):  # whole: only its optimizer's state is gone
            continue
        with suppress(OSError):  # what cannot be renamed is no reason to stop the training
            shutil.rmtree(aside, ignore_errors=True)  # of an earlier fall
            os.replace(checkpoint, aside)
            said = f"checkpoint {checkpoint.name} is damaged and now called {aside.name}"
            print(f"{said}; it may be deleted", file=sys.stderr, flush=True)


def _link(folder: Path, last: int, best: int | None) -> None:
    """Point `last` and `best` to their checkpoints. Whoever looks finds the old one or the new one, never none."""
    for name, step in {"last": last, "best": best}.items():
        if (folder / f"step-{step}").is_dir():  # "step-None": nothing was validated yet
            with suppress(
                OSError
            ):  # exFAT, SMB and Google Drive have no links; no training needs these
                (folder / f".new-{name}").unlink(missing_ok=True)
                (folder / f".new-{name}").symlink_to(
                    f"step-{step}"
                )  # relative, so that a run may be moved or copied
                os.replace(folder / f".new-{name}", folder / name)


def _remove_old(folder: Path, spared: set[int | None], keep: int) -> None:
    newest_first = steps(folder)[::-1]
    for old in newest_first[RESUMABLE:]:
        with suppress(OSError):  # what cannot be removed is no reason to stop the training
            (folder / f"step-{old}" / "optimizer.pt").unlink(missing_ok=True)
    for old in set(newest_first[max(keep, 1) :]) - spared:
        with suppress(
            OSError
        ):  # only out of sight, for `save` to sweep: a kill halfway leaves no half step-N
            os.replace(folder / f"step-{old}", folder / f".tmp-removed-step-{old}")
