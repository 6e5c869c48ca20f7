"""What runs/ takes on the disk, and what of it can go; nothing is deleted without --delete.

python -m tools.reporting.space                                   # every run and cache with its size, and what could go
python -m tools.reporting.space --delete                          # older checkpoints, and caches that no checkpoint is of
python -m tools.reporting.space runs/NAME --optimizer --delete    # optimizer states too: then the run cannot be gone on with

Of each run the newest and the best checkpoint stay. A run that is under way keeps everything, and so do the caches.
"""

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine import checkpoint
from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from tools.reporting.reading import is_locked


@dataclass
class Config:
    """What may go."""

    delete: bool = flag(False, "delete what is listed as what could go", "Options")
    optimizer: bool = flag(False, "optimizer states too; such a run cannot be resumed", "Options")


def main(config: Config) -> None:
    """List, and delete if asked to."""
    runs = [Path(run) for run in config.runs] or sorted(
        path.parent for path in Path("runs").glob("*/config.json")
    )
    could_go = {
        run: [] if is_locked(run / ".lock") else old_parts(run, config.optimizer) for run in runs
    }
    if not config.runs:
        used = {key_of(state) for state in Path("runs").glob("*/checkpoints/*/state.json")}
        busy = any(map(is_locked, Path("runs").glob("*/.lock")))  # one that only tokenises yet, too
        for cache in sorted(path for path in Path("runs/.cache").glob("*") if path.is_dir()):
            could_go[cache] = [] if busy or cache.name in used else [cache]
    for folder, parts in could_go.items():
        names = ", ".join(
            "all of it" if part == folder else str(part.relative_to(folder)) for part in parts
        )
        note = f"; {sum(map(mib, parts)):,.1f} MiB could go: {names}" if parts else ""
        print(f"{mib(folder):>9,.1f} MiB  {folder}{note}")
    every = [part for parts in could_go.values() for part in parts]
    total = f"{sum(map(mib, could_go)):>9,.1f} MiB  in all; {sum(map(mib, every)):,.1f} MiB"
    for part in every if config.delete else []:
        before = part.parent.stat().st_mtime  # by which translate.py knows the newest run
        shutil.rmtree(part) if part.is_dir() else part.unlink()
        os.utime(part.parent, (before, before))
    print(f"{total} {'deleted' if config.delete else 'could go, with --delete'}")


def old_parts(run: Path, optimizer: bool) -> list[Path]:
    """Folders of checkpoints that are neither the newest nor the best, leftovers of kills; optimizer states if wanted."""
    folder = run / "checkpoints"
    if not (run / "config.json").exists():
        raise UserError(f"{run} is no run: it has no config.json; `ls runs` lists the runs")
    try:
        kept = {checkpoint.latest(folder), checkpoint.resolve(run)}
    except UserError:  # none is whole: nothing is known to be worth less than another
        return [*folder.glob(".tmp-*")]
    kept = {path.name for path in kept}
    parts = [
        folder / f"step-{step}" for step in checkpoint.steps(folder) if f"step-{step}" not in kept
    ]
    states = [folder / name / "optimizer.pt" for name in sorted(kept) if optimizer]
    return [*parts, *folder.glob(".tmp-*"), *(path for path in states if path.exists())]


def key_of(state: Path) -> str | None:
    """The cache that a checkpoint's data are from."""
    with suppress(OSError, ValueError, AttributeError):
        return json.loads(state.read_bytes()).get("data_key")


def mib(path: Path) -> float:
    """What a file, or all in a folder, takes."""
    files = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    return sum(file.lstat().st_size for file in files) / 2**20


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "what runs/ takes on the disk", positional="runs")))
