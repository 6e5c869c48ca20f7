"""Files that are complete or absent, whenever the process is killed or the power fails."""

import json
import os
from pathlib import Path


def as_json(value) -> str:
    """The text of a JSON file."""
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def atomic_write(path: Path, text: str) -> None:
    """Write atomically: a temporary file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.write_text(text, encoding="utf-8")
    wait_for_disk(temporary)
    os.replace(temporary, path)


def wait_for_disk(path: Path) -> None:
    """fsync: without it a power cut may leave a file of zeros.

    A new name needs it on its folder as well.
    """
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
