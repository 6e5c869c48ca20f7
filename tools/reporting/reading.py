"""The files of a run, as far as they are there: what is missing or damaged is said, and the rest is read.

run = read_run("runs/NAME")
run.records                         # the lines of metrics.jsonl
run.figure("valid/loss", "min")     # Fact: a value with the place it is from
"""

import fcntl
import json
import math
import re
import shlex
import statistics
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from pathlib import Path

from engine.errors import UserError
from engine.run import find_run
from text.cleaning import held_out_rows
from text.rows import find_text, fingerprint_of

SUMMARIES = {"min": min, "max": max, "median": statistics.median, "last": lambda v: v[-1]}
PAUSE = (
    5  # minutes without a line in the log, and ten times the usual, from which the run stood still
)
STAMP = re.compile(
    r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.MULTILINE
)  # before every message of train.log


@dataclass(frozen=True)
class Fact:
    """A value on the page, as it is written there, and the place in the run's files that it is from."""

    value: object
    text: str
    source: str  # "FILE", "FILE#key.key" or "metrics.jsonl#tag#min"


@dataclass
class RunFiles:
    """One run. What a file does not tell is empty, and `missing` says so in words."""

    folder: Path
    name: str
    config: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)  # of train.py's runs: the sizes
    data: dict = field(default_factory=dict)  # of train.py's runs: what `Prepared.describe` told
    environment: list[dict] = field(default_factory=list)  # one a start of the script
    records: list[dict] = field(default_factory=list)
    log: str = ""
    results: dict[str, dict] = field(
        default_factory=dict
    )  # "eval/test-greedy" → what that .json holds
    hypotheses: dict[str, list[str]] = field(default_factory=dict)  # likewise, of the .txt
    pictures: list[Path] = field(default_factory=list)  # that the script itself left
    missing: list[tuple[str, ...]] = field(
        default_factory=list
    )  # the place, then words that a page can translate
    running: bool = False
    rows: dict[str, list] = field(default_factory=dict)  # see `rows_of`

    def series(self, tag: str) -> tuple[list[int], list[float]]:
        """Steps and values of a curve."""
        points = [
            (record["step"], record[tag]) for record in self.records if is_number(record.get(tag))
        ]
        return [step for step, _ in points], [value for _, value in points]

    def minutes(self, tag: str) -> list[float]:
        """When the points of `series` were written, in minutes since the first line; hours between two starts count."""
        times = [record["time"] for record in self.records if is_number(record.get(tag))]
        return [(time - self.records[0]["time"]) / 60 for time in times]

    def tags(self) -> list[str]:
        """Every curve of the run, in the order of its first point."""
        tags = dict.fromkeys(tag for record in self.records for tag in record)
        return [tag for tag in tags if tag not in ("step", "time") and self.series(tag)[1]]

    def figure(self, tag: str, summary: str, form: str = ",.4g") -> Fact | None:
        """One number of a curve: its min, max, mean, median or last."""
        values = self.series(tag)[1]
        if not values and tag.startswith("valid/"):  # as some labs call it
            return self.figure(tag.replace("valid/", "validation/"), summary, form)
        if not values:
            return None
        value = (
            mean_over_time(self.minutes(tag), values)
            if summary == "mean"
            else SUMMARIES[summary](values)
        )
        return Fact(value, format(value, form), f"{self.name}/metrics.jsonl#{tag}#{summary}")

    def fact(self, file: str, keys: tuple, form: str = "") -> Fact | None:
        """One value of a JSON file, e.g. `fact("environment.json", (-1, "torch"))`."""
        value = {
            "config.json": self.config,
            "model.json": self.model,
            "data.json": self.data,
            "environment.json": self.environment,
        }.get(file)
        value = self.results.get(file.removesuffix(".json")) if value is None else value
        try:
            for key in keys:
                value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
        if value is None or value == "":
            return None
        form = (
            "," if isinstance(value, int) and "g" in form else form
        )  # whole numbers keep all their digits
        text = format(value, form) if is_number(value) else str(value)
        return Fact(value, text, f"{self.name}/{file}#{'.'.join(map(str, keys))}")

    def seconds(self) -> Fact | None:
        """How long the run took, over all its starts; at least so long if it was killed, or is under way."""
        known = [
            session["seconds"] for session in self.environment if is_number(session.get("seconds"))
        ]
        total, source = sum(known), f"{self.name}/environment.json#seconds#sum"
        if known and len(known) == len(self.environment):
            return Fact(total, in_minutes(total), source)
        if (
            len(self.records) > 1 and "resumed after step" not in self.log
        ):  # the hours between two starts do not count
            total, source = (
                self.records[-1]["time"] - self.records[0]["time"],
                f"{self.name}/metrics.jsonl#time#span",
            )
        with suppress(
            OSError, ValueError, KeyError, TypeError
        ):  # a checkpoint knows the minutes of all starts
            saved = (
                60
                * json.loads((self.folder / "checkpoints/last/state.json").read_bytes())["minutes"]
            )
            total, source = max(
                (total, source), (saved, f"{self.name}/checkpoints/last/state.json#minutes")
            )
        return Fact(total, f"≥ {in_minutes(total)}", source) if total else None

    def scored(self, name: str) -> Path:
        """The checkpoint that a result is of; the run itself where the result names none, or a mean of several."""
        checkpoint = Path(
            str(self.results[name].get("checkpoint")).removesuffix("/model.safetensors")
        ).name
        return (
            self.folder / "checkpoints" / checkpoint
            if checkpoint.startswith("step-")
            else self.folder
        )

    def last_words(self) -> str:
        """Why it stopped, as the log says it; '' if it does not."""
        after = self.log.rpartition("resumed after step")[2]
        words = [line for line in messages(after) if line.startswith("stopped")]
        return words[-1] if words else ""

    def opening(self) -> str:
        """What the script said before its first step, without the model it printed."""
        lines = takewhile(
            lambda text: not text.startswith(("step", "epoch", "stopped")), messages(self.log)
        )
        elsewhere = ("", self.printed_model())  # on the page; so are the settings
        return "\n".join(
            text for text in lines if text not in elsewhere and not text.startswith("settings: ")
        )

    def logged(self, pattern: str) -> Fact | None:
        """The last number that the log tells in these words."""
        told = re.findall(pattern, self.log)
        return (
            Fact(int(told[-1].replace(",", "")), told[-1], f"{self.name}/train.log")
            if told
            else None
        )

    def printed_model(self) -> str:
        """The layers as a lab's script printed them into its log; ''."""
        printed = [text for text in messages(self.log) if re.match(r"(a block: )?\w+\(\n", text)]
        return printed[-1] if printed else ""


def mean_over_time(minutes: list[float], values: list[float]) -> float:
    """Each value counts for the time since the one before, the first and one after a pause for the usual time."""
    spans = [
        max(0.0, after - before) for before, after in zip(minutes, minutes[1:])
    ]  # a clock may be put back
    usual = statistics.median(spans or [1]) or 1
    spans = [usual, *(usual if is_pause(span, usual) else span for span in spans)]
    return sum(span * value for span, value in zip(spans, values)) / sum(spans)


def is_pause(span: float, usual: float) -> bool:
    """Whether the run stood still in these minutes between two lines of the log, as between two starts."""
    return span > max(PAUSE, 10 * usual)


def messages(log: str) -> list[str]:
    """The messages of a log; one may have several lines."""
    return [text.rstrip("\n") for text in STAMP.split(log)]


def is_number(value) -> bool:
    """A finite int or float; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def in_minutes(seconds: float) -> str:
    """Minutes, or seconds if they are less than 100, with the unit."""
    return f"{seconds / 60:,.1f} min" if seconds >= 100 else f"{seconds:.0f} s"


def read_runs(folders: list) -> list[RunFiles]:
    """Several runs; those of the same name go by their path."""
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    for run in runs:
        run.name = run.name if names.count(run.name) == 1 else str(run.folder)
    return runs


def read_run(folder: str | Path) -> RunFiles:
    """Everything in runs/NAME. Raises `UserError` only for what is no run at all."""
    folder = find_run(folder)
    run = RunFiles(folder, folder.resolve().name)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run; `ls runs` shows what there is")
    if not any(
        (run.folder / name).exists() for name in ("config.json", "metrics.jsonl", "train.log")
    ):
        raise UserError(f"{folder} is no run: it has no config.json, metrics.jsonl or train.log")
    run.config = read_json(run, "config.json", dict, "the settings are unknown")
    if "target" in run.config:  # a run of train.py
        run.model = read_json(run, "model.json", dict, "the sizes of the model are unknown")
        lost = "counts and lengths of the data are unknown"
        run.data = read_json(run, "data.json", dict, lost)
        if run.data and not all(
            isinstance(run.data.get(name), dict) for name in ("counts", "tokens", "lengths")
        ):
            run.data = run.missing.append(("data.json", "damaged", lost)) or {}
    run.environment = read_json(run, "environment.json", list, "the machine is unknown")
    run.environment = [session for session in run.environment if isinstance(session, dict)]
    run.records = read_records(run)
    if (
        run.model
        and run.records
        and run.config.get("label_smoothing")
        and "train/smoothed_loss" not in run.tags()
    ):
        run.missing.append(
            ("train/loss, train/perplexity", "of an older version: these are of the smoothed loss")
        )
    run.log = read_text(run, "train.log", "what it said is unknown")
    results = [
        path
        for form in ("test.json", "result.json", "eval/*.json")
        for path in run.folder.glob(form)
    ]
    # What is graded comes first: the test rows, and of them greedy search.
    for path in sorted(
        results, key=lambda path: ("test" not in path.stem, "greedy" not in path.stem, path.stem)
    ):
        name = path.relative_to(run.folder).with_suffix("").as_posix()
        if result := read_json(run, f"{name}.json", dict, "that result is left out"):
            run.results[name] = result
            if path.with_suffix(".txt").exists():
                run.hypotheses[name] = read_text(run, f"{name}.txt", "").split("\n")[:-1]
            elif run.model:
                run.missing.append(
                    (f"{name}.txt", "not there", "so the translations are not shown")
                )
            best, scored = (run.folder / "checkpoints/best").resolve().name, run.scored(name).name
            # The name of a result tells a checkpoint that was not the best one when it was scored.
            if (
                best.startswith("step-")
                and scored.startswith("step-")
                and scored != best
                and scored not in name
            ):
                why = "of an earlier checkpoint than the best; run evaluate.py again"
                run.missing.append((f"{name}.json", scored, why))
    if not run.results and (run.model or not run.last_words()):  # some labs make none
        way = (
            ("this makes one", f"python evaluate.py --ckpt {shlex.quote(str(folder))}")
            if run.model
            else ()
        )
        run.missing.append(("eval/", "no result yet", *way))
    run.pictures = sorted([*run.folder.glob("*.png"), *run.folder.glob("eval/*.png")])
    run.running = is_locked(run.folder / ".lock")
    if run.running:
        run.missing.append((".lock", "the run is still under way: these are its figures so far"))
    elif run.log and not run.last_words():
        run.missing.append(
            ("train.log", "no last words: the run was killed, or ended with an error")
        )
    return run


def read_json(run: RunFiles, name: str, kind: type, lost: str):
    """What the file holds; an empty `kind` if it is missing or damaged, and a word about it."""
    try:
        value = json.loads((run.folder / name).read_text(encoding="utf-8"))
        if isinstance(value, kind):
            return value
        run.missing.append((name, "damaged", lost))
    except FileNotFoundError:
        run.missing.append((name, "not there", lost))
    except (OSError, ValueError, RecursionError):
        run.missing.append((name, "damaged", lost))
    return kind()


def read_text(run: RunFiles, name: str, lost: str) -> str:
    """A file of the run; "" if it is not there, and `run.missing` says what is `lost` by it."""
    try:
        return (run.folder / name).read_bytes().decode("utf-8", errors="replace")
    except OSError:
        run.missing.append((name, "not there", lost))
        return ""


def read_records(run: RunFiles) -> list[dict]:
    """The lines of metrics.jsonl that can be read; of a killed run the last one may be torn."""
    records, damaged = [], 0
    for line in read_text(run, "metrics.jsonl", "there are no curves").splitlines():
        try:
            record = json.loads(line)
            if is_number(record["step"]) and is_number(record["time"]):
                records.append(record)
                continue
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        damaged += bool(line.strip())
    if damaged:
        run.missing.append(("metrics.jsonl", str(damaged), "damaged lines are left out"))
    return records


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a run, that is, writes to it now."""
    try:
        with open(path, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:  # an old run, or a file system without locks
        return False


def rows_of(run: RunFiles, name: str) -> list[tuple[str, str]]:
    """The raw (source, target) rows of a result, from the data set; [] if it is not there as it was, which is noted."""
    if name not in run.rows:
        try:
            run.rows[name] = read_rows(run, name)
        except (UserError, OSError, KeyError) as error:
            run.missing.append(("data set", str(error), "so the translations are not shown"))
            run.rows[name] = []
    return run.rows[name]


def read_rows(run: RunFiles, name: str) -> list[tuple[str, str]]:
    """The rows that a result is of; UserError if the data set is gone, or was not what was scored."""
    result, lines = run.results[name], len(run.hypotheses[name])
    data, split = result.get("data") or run.config.get("data", ""), result.get("split", "test")
    of_hub = (
        data == run.config.get("data") and not Path(data).is_absolute()
    )  # other names are not asked for there
    if not (of_hub or Path(data).exists()):
        raise UserError(f"{data} is not on this disk")
    text = find_text(
        data, *result.get("columns", (run.config.get("source", ""), run.config["target"]))
    )
    parts = {"train": ["train"], "all": list(text.files)}.get(
        split, []
    )  # "all": of data without that split
    read = chain.from_iterable(chunk for part in parts for chunk in text.rows(part))
    # Older scores may be of a "test" that is no longer cut from train.
    rows = list(islice(read, lines)) if parts else held_out_rows(text).get(split, [])
    is_first_part = parts or "first" in name  # evaluate.py --limit
    if lines > len(rows) or (lines < len(rows) and not is_first_part):
        raise UserError(f"{name}.txt has {lines:,} lines, the data set {len(rows):,} rows")
    rows = rows[:lines]
    if result.get("rows", known := fingerprint_of(rows)) != known:
        raise UserError(f"{name} is of other rows than {data} has")
    return rows


def newest_run(runs: Path = Path("runs")) -> Path:
    """The run, of any script, that was written to last."""
    folders = [path.parent for path in runs.glob("*/metrics.jsonl")]
    if not folders:
        raise UserError(f"no run in {runs.absolute()}; name one: python report.py PATH/NAME")
    return max(folders, key=lambda folder: (folder / "metrics.jsonl").stat().st_mtime)
