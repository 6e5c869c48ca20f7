"""The numbers of a run: in TensorBoard and metrics.jsonl, on the terminal and in train.log.

    telemetry = Telemetry(run, resume_step)
    log = Log(run)
    telemetry.scalars(step, {"train/loss": 3.2, **meter.read()})
    log(f"step {step}: loss 3.2")
    telemetry.close()

Only rank 0 writes and prints. Nothing that a training step calls waits for the GPU: every function
takes numbers that are on the host already.
"""

import json
import math
import os
import re
import shutil
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.config import NO_BREAK, changed_names, given_names
from engine.errors import discard_output
from engine.files import atomic_write


def is_main() -> bool:
    """Whether this process prints and writes for the run: rank 0, or a process alone."""
    return int(os.environ.get("RANK", 0)) == 0


class Telemetry:
    """Scalars, texts and figures of one run folder. A resumed run continues its curves.

    If the curves cannot be written (a full disk), training continues without them, after one note.
    """

    def __init__(
        self, run: Path, resume_step: int | None = None, last_validation: int | None = None
    ):
        """`resume_step`: the step of the checkpoint from which the run resumes; later records go.

        `last_validation`: the step of the checkpoint's last validation, by default `resume_step`.
        Later validations are repeated, so their records go too.
        """
        # Stays None on the other ranks: every method returns at once.
        self.writer: Any = None
        if not is_main():
            return
        from torch.utils.tensorboard import SummaryWriter  # on demand: it takes a second

        self.last_step = resume_step or 0
        last_record = {}
        if resume_step is not None:
            if last_validation is None:
                last_validation = resume_step
            last_record = keep_records(run / "metrics.jsonl", resume_step, last_validation)
        is_finished = any(tag.startswith("result/") for tag in last_record)
        self.result_step = resume_step if is_finished else None
        # TensorBoard hides what was written at `purge_step` and later. It does so only from the
        # second mark in a folder on, so a new run sets one too, at step 0.
        purge_step = 0 if resume_step is None else resume_step + 1
        self.writer = SummaryWriter(str(run), purge_step=purge_step)
        # Line-buffered, so that kill -9 loses at most the current line.
        self.metrics_file = open(run / "metrics.jsonl", "a", buffering=1, encoding="utf-8")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add a point to the curve of each tag, and one line to metrics.jsonl.

        The line is {"step": …, "time": seconds since 1970, tag: value, …}; null stands for numbers
        that are not finite, which JSON does not have.
        """
        self.last_step = step

        def write() -> None:
            now = time.time()
            record: dict[str, float | None] = {"step": step, "time": now}
            for tag, value in values.items():
                value = float(value)
                # Not add_scalars: it makes a folder for every curve, which purge_step cannot reach.
                self.writer.add_scalar(tag, value, step, walltime=now)
                record[tag] = value if math.isfinite(value) else None
            self.metrics_file.write(json.dumps(record) + "\n")

        self._try(write)

    def text(self, tag: str, step: int, text: str) -> None:
        """Write a text (Markdown), such as sample translations."""
        self._try(lambda: self.writer.add_text(tag, text, step))

    def figure(self, tag: str, step: int, figure) -> None:
        """Write a matplotlib figure and close it."""
        self._try(lambda: self.writer.add_figure(tag, figure, step))

    def hyperparameters(self, config, results: dict[str, float | None]) -> None:
        """Write the settings that the user chose, and the results, to TensorBoard's HPARAMS page.

        A result that is None is left out. A finished run that is resumed does not write them again.
        """
        if self.writer is None or self.last_step == self.result_step:
            return
        from torch.utils.tensorboard.summary import hparams

        known = {tag: value for tag, value in results.items() if value is not None}
        chosen = given_names(config).union(changed_names(config))
        settings = {name: getattr(config, name) for name in sorted(chosen)}

        def write() -> None:
            # Not SummaryWriter.add_hparams: it makes a second run folder for these records.
            for summary in hparams(settings, known):
                self.writer.file_writer.add_summary(summary)

        self._try(write)
        self.scalars(self.last_step, known)

    def close(self) -> None:
        """Close both files. Afterwards every method returns at once."""

        def close_files() -> None:
            self.writer.close()
            self.metrics_file.close()

        self._try(close_files)
        self.writer = None

    def _try(self, write) -> None:
        if self.writer is None:
            return
        try:
            write()
            self.writer.flush()
        except Exception as error:  # also an earlier error of TensorBoard's thread
            self.writer = None
            print(
                f"note: curves can no longer be written ({error}); training continues without them",
                file=sys.stderr,
            )


def keep_records(path: Path, last_step: int, last_validation: int) -> dict:
    """Drop later records, and the last line if a kill cut it short; return the last record kept.

    A run that was killed between a validation and its checkpoint validates again: `last_validation`
    is the step of the last validation whose record stays.
    """
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    kept_lines = []
    last_record = {}
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            continue
        try:
            record = json.loads(line)
            is_validation = "valid/loss" in record
            end = last_validation if is_validation else last_step
            is_kept = record["step"] <= end and record["time"] > 0
        except (ValueError, TypeError, KeyError):
            continue
        if is_kept:
            kept_lines.append(line)
            last_record = record
    atomic_write(path, "".join(kept_lines))
    return last_record


class Log:
    """`log("…")` prints a line and appends it, with the time, to train.log of the run's folder."""

    def __init__(self, run: Path | None = None):
        self.path = run / "train.log" if run else None

    def __call__(self, message: str) -> None:
        if not is_main():
            return
        if self.path:
            try:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
            except OSError as error:
                message += f"\nnote: {self.path} can no longer be written: {error.strerror}"
                self.path = None
        try:
            if sys.stdout.isatty():
                width = shutil.get_terminal_size().columns
                message = "\n".join(fold(line, width) for line in message.split("\n"))
            tqdm.write(message)  # above a progress bar, if there is one
            sys.stdout.flush()  # to a file (a batch job), Python would keep lines back for long
        except OSError as error:
            # The reader of a pipe has left (`python train.py | head`), the terminal is gone, or the
            # disk is full. Training continues: train.log has every line.
            discard_output(error)


def fold(line: str, width: int) -> str:
    """A line as several of at most `width` columns, broken where two spaces separate its columns.

    A line without such columns is broken between words.
    """
    if len(line) <= width:
        return line
    if re.search(r"\S  +\S", line):
        line = re.sub(r"(?<=\S) (?=\S)", NO_BREAK, line)
    parts = textwrap.wrap(
        line,
        width,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(parts).replace(NO_BREAK, " ")


def progress_bar(iterable=None, **kwargs) -> tqdm:
    """A tqdm bar on rank 0 if standard error is a terminal; otherwise (batch jobs) a silent one."""
    disable = None if is_main() else True  # None: only where there is no terminal
    return tqdm(iterable, disable=disable, dynamic_ncols=True, **kwargs)
