"""Files that are complete or absent, whenever the process is killed or the power fails."""

import contextlib
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path


def as_json(value) -> str:
    """The text of a JSON file."""
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


@contextlib.contextmanager
def names_place(place: Path) -> Iterator[None]:
    """Errors get an attribute `place`, for the one line on a full disk: few of them name a file."""
    try:
        yield
    except Exception as error:
        error.place = str(place)  # type: ignore[attr-defined]
        raise


def atomic_write(path: Path, text: str) -> None:
    """Write atomically: a temporary file, fsync, rename."""
    # With the number of this process: two may write the same file at once.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with names_place(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            wait_for_disk(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def as_argument(run: Path) -> str:
    """The folder as --resume takes it, quoted for the shell."""
    place = str(run)
    if "/" not in place:
        place = f"./{place}"  # a bare name would be looked for in runs/
    return shlex.quote(place)


def wait_for_disk(path: Path) -> None:
    """fsync: without it a power cut may leave a file of zeros.

    A new name needs it on its folder as well.
    """
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
