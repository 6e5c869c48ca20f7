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
from dataclasses import fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.config import NO_BREAK, changed_names, given_names
from engine.errors import discard_output

# TensorBoard sorts curves and pictures by the first part of their tags. What a run is judged by
# comes first, then pictures of the model (w_), data, speed and results (x_), and the hardware (y_).
FIRST = ("train", "valid", "test")
HARDWARE = ("cpu", "gpu", "memory")
# Several curves in one chart, on the page CUSTOM SCALARS; it shows those of its tags that exist.
# A run has an accuracy or a BLEU.
CHARTS = {
    "loss": ["Multiline", [r"^(train|valid|test)/loss$"]],
    "perplexity": ["Multiline", [r"^(train|valid|test)/perplexity$"]],
    "score": ["Multiline", [r"^(train|valid|test)/(accuracy|bleu)$"]],
}
# Groups of flags that change a result, for the page HPARAMS.
SETTINGS_THAT_MATTER = ("Model", "Training")


def tag_in_tensorboard(tag: str, is_picture: bool = False) -> str:
    """The name under which TensorBoard shows a curve, a picture or a text: "cpu/…" → "y_cpu/…"."""
    group = tag.partition("/")[0]
    if group in FIRST:
        return tag
    if group in HARDWARE:
        return f"y_{tag}"
    return f"w_{tag}" if is_picture else f"x_{tag}"


def is_main() -> bool:
    """Whether this process prints and writes for the run: rank 0, or a process alone."""
    return int(os.environ.get("RANK", 0)) == 0


class Telemetry:
    """Scalars, texts and figures of one run folder. A resumed run continues its curves.

    If the curves cannot be written (a full disk), training continues without them, after one note.
    """

    def __init__(self, run: Path, resume_step: int | None = None, length: int = 0):
        """`resume_step`: the step of the checkpoint from which the run resumes; later points go.

        `length`: what `sync` returned when that checkpoint was saved; later records go.
        """
        # Stays None on the other ranks: every method returns at once.
        self.writer: Any = None
        self.length = 0  # bytes of metrics.jsonl, up to the end of its last complete line
        if not is_main():
            return
        from torch.utils.tensorboard import SummaryWriter  # on demand: it takes a second

        self.last_step = resume_step or 0
        # TensorBoard hides what was written at `purge_step` and later. It does so only from the
        # second mark in a folder on, so a new run sets one too, at step 0.
        purge_step = 0 if resume_step is None else resume_step + 1
        self.writer = SummaryWriter(str(run), purge_step=purge_step)
        self._try(lambda: self.writer.add_custom_scalars({"training and validation": CHARTS}))
        # Line-buffered, so that kill -9 loses at most the current line.
        self.metrics_file = open(run / "metrics.jsonl", "a", buffering=1, encoding="utf-8")
        self.length = os.stat(self.metrics_file.fileno()).st_size
        if resume_step is not None:
            self.length = min(self.length, length)
            self.metrics_file.truncate(self.length)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add a point to the curve of each tag, and one line to metrics.jsonl.

        The line is {"step": …, "time": seconds since 1970, tag: value, …}; null stands for numbers
        that are not finite, which JSON does not have.
        """
        self.last_step = step

        def write() -> None:
            """One point of each curve."""
            now = time.time()
            record: dict[str, float | None] = {"step": step, "time": now}
            for tag, value in values.items():
                value = float(value)
                # Not add_scalars: it makes a folder for every curve, which purge_step cannot reach.
                self.writer.add_scalar(tag_in_tensorboard(tag), value, step, walltime=now)
                record[tag] = value if math.isfinite(value) else None
            line = json.dumps(record) + "\n"  # ASCII: as many bytes as characters
            self.metrics_file.write(line)
            self.length += len(line)

        self._try(write)

    def sync(self) -> int:
        """Wait until metrics.jsonl is on the disk; returns its length in bytes, for a checkpoint.

        0 on all ranks but rank 0.
        """
        self._try(lambda: os.fsync(self.metrics_file.fileno()))
        return self.length

    def text(self, tag: str, step: int, text: str) -> None:
        """Write a text (Markdown), such as sample translations."""
        tag = tag_in_tensorboard(tag, is_picture=True)
        self._try(lambda: self.writer.add_text(tag, text, step))

    def figure(self, tag: str, step: int, figure) -> None:
        """Write a matplotlib figure and close it."""
        tag = tag_in_tensorboard(tag, is_picture=True)
        self._try(lambda: self.writer.add_figure(tag, figure, step))

    def hyperparameters(self, config, results: dict[str, float | None]) -> None:
        """Write settings and results to TensorBoard's page HPARAMS.

        The settings are those of the model and the training, the seed, and what the user chose.
        A result that is None is left out.
        """
        if self.writer is None:
            return
        from torch.utils.tensorboard.summary import hparams

        known = {tag: value for tag, value in results.items() if value is not None}
        chosen = given_names(config).union(changed_names(config), {"seed"})
        settings = {
            field.name: getattr(config, field.name)
            for field in fields(config)
            if field.name in chosen or field.metadata.get("group") in SETTINGS_THAT_MATTER
        }
        shown = {tag_in_tensorboard(tag): value for tag, value in known.items()}

        def write() -> None:
            """The settings beside the results."""
            # Not SummaryWriter.add_hparams: it makes a second run folder for these records.
            for summary in hparams(settings, shown):
                self.writer.file_writer.add_summary(summary)

        self._try(write)
        self.scalars(self.last_step, known)

    def close(self) -> None:
        """Close both files. Afterwards every method returns at once."""

        def close_files() -> None:
            """TensorBoard's file and metrics.jsonl."""
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
