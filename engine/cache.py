"""Folders that are made once and kept: complete or absent, whenever the process is killed.

with lock_folder(folder):                      # another process may be making the same one
    if not is_intact(folder):
        make_way(folder, log)
        with new_folder(folder) as building:   # a temporary name; renamed when the block ends well
            (building / "ids").write_bytes(content)
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from engine.files import names_place, wait_for_disk


@contextmanager
def lock_folder(folder: Path, log: Callable = print) -> Iterator[None]:
    """Wait until no other process makes `folder`. A lock ends with the process that holds it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        log(f"another process is making {folder}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def make_way(folder: Path, log: Callable = print) -> None:
    """Remove a damaged `folder`. Of a link only the link: its target may belong to others."""
    if folder.is_symlink():
        log(
            f"data: {folder} links to {os.readlink(folder)}, which is damaged or cannot be read; "
            "a new folder replaces the link"
        )
        folder.unlink()
    elif folder.exists():
        log(f"data: {folder} is damaged and made again")
        shutil.rmtree(folder)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that gets the name `folder` when the block ends without an error.

    Call it inside `lock_folder`: then a temporary folder that exists was left by a killed process.
    """
    building = folder.with_name(f".building-{folder.name}")
    shutil.rmtree(building, ignore_errors=True)
    try:
        with names_place(folder):
            building.mkdir()
            yield building
            # Content first, name second: after a power cut the name stands for complete files.
            for path in building.rglob("*"):
                wait_for_disk(path)
            os.replace(building, folder)
            wait_for_disk(folder.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)
