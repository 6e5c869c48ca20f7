"""Translations and their scores on disk: into the file that a user names, and among the files of a run."""

import contextlib
import errno
import json
import os
from pathlib import Path

from engine.config import atomic_write
from engine.errors import UserError


def check_writable(path: Path) -> None:
    """Fail before the decoding, not after it."""
    reason = (
        "" if path.name.isprintable() else "its name has a line end or another control character"
    )
    try:
        is_new = not os.path.lexists(path)
        if not reason and (
            is_new or path.is_file()
        ):  # a device or a pipe is not opened for a trial
            open(path, "a").close()
            if is_new:
                path.unlink()
    except OSError as error:
        reason = error.strerror
    if reason or path.is_dir() or not (is_new or os.access(path, os.W_OK)):
        reason = f" ({reason})" if reason else ""
        raise UserError(
            f"--out {path} cannot be written{reason}; choose a file in an existing folder of yours"
        )


def write_lines(path: Path, lines: list[str]) -> None:
    """One hypothesis a line; whole or not at all, where a file can be replaced by another."""
    text = "".join(line + "\n" for line in lines)
    if not os.path.lexists(path) or (
        path.is_file() and not path.is_symlink()
    ):  # no device, nor what a link leads to
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            atomic_write(path, text)
            return
        except OSError as error:  # the folder is not ours; perhaps the file itself can be written
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if error.errno in (
                errno.ENOSPC,
                errno.EDQUOT,
                errno.EIO,
            ):  # writing over the old file would only lose it
                raise
    path.write_text(text, encoding="utf-8")


def keep_score(folder: Path, name: str, result: dict, texts: list[str], say) -> None:
    """Write score and hypotheses into `folder`; say which score there is of other rows or another checkpoint."""
    for file in sorted(folder.glob("*.json")):
        with contextlib.suppress(
            OSError, ValueError, LookupError, TypeError
        ):  # damaged, or of an older version
            earlier = json.loads(file.read_text(encoding="utf-8"))
            same_rows = all(
                earlier[key] == result[key] for key in ("data", "columns", "split", "sentences")
            )
            if same_rows and earlier["rows"] != result["rows"]:
                say(f"note: these rows are not those that {file} is of: the data have changed")
            if file.stem == name and earlier["checkpoint"] != result["checkpoint"]:
                say(f"note: {file} was of {earlier['checkpoint']}, BLEU {earlier['nltk']:.2f}")
    try:
        folder.mkdir(exist_ok=True)
        write_lines(folder / f"{name}.txt", texts)
        write_lines(folder / f"{name}.json", [json.dumps(result, indent=2)])
        say(f"written to {folder}/{name}.json and .txt")
    except OSError as error:
        if error.errno not in (
            errno.EACCES,
            errno.EPERM,
            errno.EROFS,
        ):  # for reading only: the run, or its disk
            raise
        say(f"note: {folder} cannot be written to, so the score is not saved")
