"""The files of a run. What is missing or damaged is noted, and the rest is read.

run = read_run("runs/NAME")
run.look_up("metrics.jsonl#valid/loss#min")    # Fact: a value with the place it is from
run.look_up("eval/test-greedy.json#nltk:.2f")  # with the format of the text
run.look_up("environment.json#*.gpu")          # of all starts of the script
"""

import fcntl
import json
import re
import shlex
import statistics
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

import torch

from engine.errors import UserError
from engine.layers import Layer, layers_of
from engine.run import find_run
from model import ModelConfig, make_translator
from text.cleaning import held_out_rows
from text.reading import find_text, fingerprint_of
from tools.reporting.words import Words

SUMMARIES = {
    "min": min,
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
    "last": lambda values: values[-1],
}
LARGEST = 1e300
LONGEST_TEXT = 500  # characters of a value that is no number
NUMBER = r"\d[\d,]{0,25}"
FILES_OF_RUNS = ("config.json", "metrics.jsonl", "train.log", "hparams.yaml", "table.json")
STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.MULTILINE)  # of a message in train.log
# What is wrong with a file.
NOT_THERE = ("not there", "没有这个文件")
DAMAGED = ("damaged", "已损坏")
# File → what cannot be shown without it.
UNKNOWN: dict[str, Words] = {
    "config.json": ("the settings are unknown", "不知道设置"),
    "data.json": ("counts and lengths of the data are unknown", "不知道数据的数量与长度"),
    "environment.json": ("the machine is unknown", "不知道运行的机器"),
    "train.log": ("the messages of the run are unknown", "不知道运行时的输出"),
    "metrics.jsonl": ("there are no curves", "没有曲线"),
}
SAMPLE_NOTE = (
    "bundled sample, not WMT19: this score says only that the program works",
    "自带样例，不是 WMT19：得分只说明程序能运行",
)
# Of a share of the measured peak, here and in the tables of labs.gpt.
ABOVE_PEAK = (
    "above 100 %, so it is left out: other programs slowed the measurement of the peak",
    "超过 100 %，因此不显示：测量峰值时有其他程序在运行",
)
DATA_SET = ("data set", "数据集")
# Why a run stopped, as its log says.
WHY_STOPPED: dict[str, Words] = {
    "finished": ("finished", "正常结束"),
    "interrupted": ("interrupted", "被中断"),
}
NO_BETTER_LOSS = re.compile(r"(\d+) validation\(s\) without a better loss")
# Kinds of runs that are translation models, made by train.py.
TRANSLATION = ("translation", "attention_op")
# Of a score file: what is used by the program must have these types.
TYPES_OF_SCORES: dict[str, type] = {
    "data": str,
    "columns": list,
    "split": str,
    "rows": str,
    "checkpoint": str,
    "sentences": int,
    "average": int,
}
NO_TRANSLATIONS = ("so the translations are not shown", "所以不显示译文")


@dataclass(frozen=True)
class Fact:
    """A value, its text on the page, and its place in the run's files."""

    value: object
    text: str
    source: str  # "RUN/FILE", "RUN/FILE#key.key" or "RUN/metrics.jsonl#tag#min"
    is_code: bool = False  # a setting, a command, a name of a program


@dataclass
class RunFiles:
    """One run. What a file does not contain is empty, and `missing` says so in words."""

    folder: Path
    name: str
    config: dict = field(default_factory=dict)
    kind: str = ""  # the program that made it, such as "translation" or "gpt"
    data: dict = field(default_factory=dict)  # counts and lengths; only in runs of train.py
    environment: list[dict] = field(default_factory=list)  # one entry for each start of the script
    records: list[dict] = field(default_factory=list)  # lines of metrics.jsonl
    log: str = ""
    results: dict[str, dict] = field(default_factory=dict)  # "eval/test-greedy" → that .json
    hypotheses: dict[str, list[str]] = field(default_factory=dict)  # likewise, of the .txt
    pictures: list[Path] = field(default_factory=list)  # written by the script, or put there
    gpu_table: str = ""  # what nvidia-smi printed, if nvidia-smi.txt is there
    missing: list[tuple[Words, ...]] = field(default_factory=list)  # a place, then words on it
    running: bool = False
    rows: dict[str, list] = field(default_factory=dict)  # see `rows_of`
    layers: list[Layer] = field(default_factory=list)

    @property
    def is_translation(self) -> bool:
        """Whether train.py made it, so that evaluate.py can score it."""
        return self.kind in TRANSLATION

    @property
    def samples_the_softmax(self) -> bool:
        """Whether some of its training losses are estimates, as train.py notes."""
        return "training loss is an estimate" in " ".join(self.log.split())

    # ---------------------------------------------------------------- curves

    def series(self, tag: str) -> tuple[list[int], list[float]]:
        """Steps and values of a curve."""
        records = [record for record in self.records if is_number(record.get(tag))]
        return [record["step"] for record in records], [record[tag] for record in records]

    def tags(self) -> list[str]:
        """The names of all curves, in the order of their first points."""
        tags = dict.fromkeys(tag for record in self.records for tag in record)
        return [tag for tag in tags if tag not in ("step", "time") and self.series(tag)[1]]

    # ---------------------------------------------------------------- values

    def look_up(self, place: str) -> Fact | None:
        """The value at "FILE.json#key.key" or "metrics.jsonl#TAG#SUMMARY"; None if there is none.

        The key "-1" is the last entry of a list. ":FORMAT" at the end, as in an f-string, is the
        format of a number that is not whole. "train.log#WORDS" is the last number before the words.
        """
        file, *keys = place.split("#")
        keys[-1], _, form = keys[-1].partition(":")
        if file == "metrics.jsonl":
            return self.summary_of_curve(*keys, form)
        if file == "train.log":
            return self.logged(rf"({NUMBER}) {keys[0]}")
        if keys[0].startswith("*."):
            return self.of_all_starts(keys[0].removeprefix("*."))
        contents = {
            "config.json": self.config,
            "data.json": self.data,
            "environment.json": self.environment,
        }
        value = contents.get(file)
        if value is None:
            value = self.results.get(file.removesuffix(".json"))
        try:
            for key in keys[0].split("."):
                value = value[int(key) if isinstance(value, list) else key]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
        if value is None or value == "":
            return None
        # A setting is shown as a flag takes it.
        is_code = file == "config.json"
        text = str(value) if is_code else as_text(value, form)
        return Fact(value, text, f"{self.name}/{file}#{keys[0]}", is_code)

    def of_all_starts(self, key: str) -> Fact | None:
        """A value of environment.json; where starts of the script differ, all values in order."""
        values = list(dict.fromkeys(str(start.get(key) or "—") for start in self.environment))
        if len(values) < 2:
            return self.look_up(f"environment.json#-1.{key}")
        text = " → ".join(values)
        return Fact(text, text, f"{self.name}/environment.json#*.{key}")

    def summary_of_curve(self, tag: str, summary: str, form: str) -> Fact | None:
        """The min, max, mean, median or last value of a curve."""
        values = self.series(tag)[1]
        if not values:
            return None
        value = SUMMARIES[summary](values)
        return Fact(value, as_text(value, form), f"{self.name}/metrics.jsonl#{tag}#{summary}")

    def logged(self, pattern: str) -> Fact | None:
        """The last number in the log that matches the group of `pattern`."""
        found = re.findall(pattern, self.log)
        if not found:
            return None
        number = found[-1]
        return Fact(int(number.replace(",", "")), number, f"{self.name}/train.log")

    def seconds(self) -> Fact | None:
        """The duration over all starts; a lower bound if one was killed or is still running."""
        known = [s["seconds"] for s in self.environment if is_number(s.get("seconds"))]
        total, source = sum(known), f"{self.name}/environment.json#seconds#sum"
        if known and len(known) == len(self.environment):
            return Fact(total, in_minutes(total), source)
        state = "checkpoints/last/state.json"  # knows the minutes of all starts
        with suppress(OSError, ValueError, KeyError, TypeError):
            minutes = json.loads((self.folder / state).read_bytes())["minutes"]
            if is_number(minutes) and 60 * minutes > total:
                total, source = 60 * minutes, f"{self.name}/{state}#minutes"
        return Fact(total, f"≥ {in_minutes(total)}", source) if total else None

    def scored(self, name: str) -> Path:
        """The checkpoint of a result; the run if the result names none or a mean of several."""
        named = str(self.results[name].get("checkpoint")).removesuffix("/model.safetensors")
        checkpoint = Path(named).name
        return self.folder / "checkpoints" / checkpoint if is_step(checkpoint) else self.folder

    def is_of_sample(self) -> bool:
        """Whether it learned, or was scored on, the bundled sample."""
        used = [self.data, *self.results.values()]
        return self.is_translation and any(facts.get("is_sample") for facts in used)

    # ---------------------------------------------------------------- the log

    def final_message(self) -> str:
        """Why the run stopped, as its log says; "" if it does not."""
        latest = self.log.rpartition("resumed after step")[2]
        lines = [line for line in messages(latest) if line.startswith("stopped")]
        return lines[-1] if lines else ""

    def reason(self) -> str:
        """Why it stopped, without the step; "" if the log does not say."""
        return self.final_message().partition(": ")[2]

    def is_incomplete(self) -> bool:
        """Whether it ended too early: interrupted, killed, or with an error."""
        ended = self.reason() and not self.reason().startswith("interrupted")
        return bool(self.log) and not self.running and not ended

    def changed_settings(self) -> list[str]:
        """The settings that differ from their defaults, as its log says."""
        lines = [text for text in messages(self.log) if text.startswith("settings: ")]
        line = f" {lines[-1].removeprefix('settings: ')}" if lines else ""
        return [name for name, value in self.config.items() if f" {name} {value}, " in line]

    def printed_model(self) -> str:
        """print(model) as the script wrote it into its log; "" if it did not."""
        printed = [text for text in messages(self.log) if re.match(r"(a block: )?\w+\(\n", text)]
        return printed[-1] if printed else ""


def is_step(name: str) -> bool:
    """Whether a checkpoint's name is step-N."""
    return name.startswith("step-")


def messages(log: str) -> list[str]:
    """The messages of a log; one may have several lines."""
    return [text.rstrip("\n") for text in STAMP.split(log)]


def is_number(value) -> bool:
    """Whether it is a finite int or float that can be drawn, and no bool."""
    # Beyond that nothing can be drawn, and a whole number of 400 digits is no float.
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and -LARGEST < value < LARGEST


def as_text(value, form: str) -> str:
    """A value for the page: whole numbers with all digits, others in four or as `form` says."""
    if isinstance(value, list):
        return ", ".join(as_text(each, form) for each in value)
    if not is_number(value):
        text = str(value)
        return text if len(text) < LONGEST_TEXT else f"{text[:LONGEST_TEXT]} …"
    return f"{value:,}" if isinstance(value, int) else format(value, form or ",.4g")


def in_minutes(seconds: float) -> str:
    """Minutes with the unit, or seconds below 100."""
    return f"{seconds / 60:,.1f} min" if seconds >= 100 else f"{seconds:.0f} s"


# -------------------------------------------------------------------- reading


@dataclass
class TableFiles:
    """A table of labs.gpt: each row is a run of its own, or a plan, or has failed."""

    folder: Path
    name: str
    cells: list[list[str]]  # of table.md; the first row is the head
    rows: list[dict]  # of table.json: the figures of each run
    about: str  # the line below the table
    pictures: list[Path]
    runs: dict[int, RunFiles]  # row → its run, if there is one


def read_all(folders: list) -> tuple[list[RunFiles], list[TableFiles]]:
    """The runs and the tables among these folders."""
    places = [find_run(folder).resolve() for folder in folders]
    for folder, place in zip(folders, places):
        if places.count(place) > 1:
            raise UserError(f"{folder} is named twice; name every run once")
    is_table = [(place / "table.json").exists() for place in places]
    tables = [read_table(find_run(folder)) for folder, table in zip(folders, is_table) if table]
    return read_runs([folder for folder, table in zip(folders, is_table) if not table]), tables


def read_table(folder: Path) -> TableFiles:
    """table.md and table.json, and the runs row-N beside them. Raises `UserError`."""
    try:
        rows = json.loads((folder / "table.json").read_text(encoding="utf-8"))
        lines = (folder / "table.md").read_text(encoding="utf-8").splitlines()
        cells = [cells_of(line) for line in lines if line.startswith("|")]
        del cells[1]  # the line under the head
        if len(cells) != len(rows) + 1 or not all(isinstance(row, dict) for row in rows):
            raise ValueError("table.md and table.json have different rows")
    except (OSError, ValueError, IndexError, TypeError) as error:
        raise UserError(f"{folder} has no table that can be read: {error}") from None
    runs = {}
    for number, row in enumerate(cells[1:]):
        if (folder / f"row-{number}" / "metrics.jsonl").exists():
            runs[number] = read_run(folder / f"row-{number}")
            runs[number].name = " · ".join(cell.partition("<br>")[0] for cell in row[:2])
    pictures = sorted(folder.glob("*.png"))
    return TableFiles(folder, folder.resolve().name, cells, rows, lines[-1], pictures, runs)


def cells_of(line: str) -> list[str]:
    """The cells of a line of a table in Markdown."""
    cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return [cell.strip().replace("\\|", "|").replace("\\\\", "\\") for cell in cells]


def read_runs(folders: list) -> list[RunFiles]:
    """Several runs; those of the same name are called by their paths."""
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.folder)
    return runs


def read_run(folder: str | Path) -> RunFiles:
    """Everything in runs/NAME. Raises `UserError` only for a folder that is no run."""
    folder = find_run(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run; `ls runs` shows what there is")
    if not any((folder / name).exists() for name in FILES_OF_RUNS):
        raise UserError(f"{folder} is not a run: it contains none of {', '.join(FILES_OF_RUNS)}")
    run = RunFiles(folder, folder.resolve().name)
    if not (folder / "config.json").exists() and (folder / "hparams.yaml").exists():
        read_lightning(run)
        return run
    run.config = read_json(run, "config.json", dict)
    starts = read_json(run, "environment.json", list)
    run.environment = [start for start in starts if isinstance(start, dict)]
    run.kind = kind_of(run)
    if run.is_translation:
        run.data = read_json(run, "data.json", dict)
    run.layers = layers_of_run(run)
    run.records = read_records(run)
    leave_out_impossible_utilisation(run)
    run.log = read_text(run, "train.log")
    read_results(run)
    run.pictures = sorted([*run.folder.glob("*.png"), *run.folder.glob("eval/*.png")])
    if (run.folder / "nvidia-smi.txt").exists():
        run.gpu_table = read_text(run, "nvidia-smi.txt").rstrip("\n")
    run.running = is_locked(run.folder / ".lock")
    if run.running:
        why = (
            "the run is still under way: these are its figures so far",
            "训练仍在进行，以下是到目前为止的数字",
        )
        run.missing.append((".lock", why))
    elif run.log and not run.final_message():
        why = (
            "no final message: the run was killed, or ended with an error",
            "日志中没有结束记录：训练被强行终止，或因错误结束",
        )
        run.missing.append(("train.log", why))
    return run


def kind_of(run: RunFiles) -> str:
    """The program that made the run, as it has saved it."""
    kinds = [start["kind"] for start in run.environment if isinstance(start.get("kind"), str)]
    return kinds[-1] if kinds else ""


def layers_of_run(run: RunFiles) -> list[dict]:
    """The layers that the run has saved, or those of a translation model of the saved sizes."""
    try:
        if (run.folder / "layers.json").exists():
            saved = json.loads((run.folder / "layers.json").read_text(encoding="utf-8"))
            layers = [Layer(**row) for row in saved]
            assert all(is_number(layer.parameters) for layer in layers)
            return layers
        if run.is_translation:
            sizes = json.loads((run.folder / "model.json").read_text(encoding="utf-8"))
            return layers_of_translator(ModelConfig(**sizes))
    except Exception:  # whatever a damaged file or a changed model.py raises
        run.missing.append((("layers", "网络各层"), DAMAGED))
    return []


def layers_of_translator(sizes: ModelConfig) -> list[Layer]:
    """The layers of a translation model; sizes of a batch are letters, as in model.py."""
    letters = {3: "B", 7: "S", 5: "T"}  # no other size of a model is one of these
    with torch.device("meta"):  # computes shapes only
        source = torch.zeros(3, 7, dtype=torch.long)
        target = torch.zeros(3, 5, dtype=torch.long)
        rows = layers_of(make_translator(sizes), source, source == 0, target)
    return [replace(row, shape=[letters.get(n, n) for n in row.shape]) for row in rows]


def read_lightning(run: RunFiles) -> None:
    """A run of PyTorch Lightning: its curves, from TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run.kind = "lightning"
    events = EventAccumulator(str(run.folder), size_guidance={"scalars": 0}).Reload()
    by_step: dict[int, dict] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            by_step.setdefault(event.step, {"step": event.step})[tag] = event.value
    run.records = [by_step[step] for step in sorted(by_step)]
    run.pictures = sorted(run.folder.glob("*.png"))


def handout_first(path: Path) -> tuple:
    """A key for sorting results: the run's own data, then test, then greedy search."""
    name = path.stem
    return "-data-" in name, not name.startswith("test-"), "greedy" not in name, name


def read_results(run: RunFiles) -> None:
    """The scores and hypotheses of evaluate.py, or the results of a lab.

    First comes the one that the handout asks for.
    """
    files = [*run.folder.glob("result.json"), *run.folder.glob("eval/*.json")]
    files.sort(key=handout_first)
    best = (run.folder / "checkpoints/best").resolve().name
    for path in files:
        name = path.relative_to(run.folder).with_suffix("").as_posix()
        result = read_json(run, f"{name}.json", dict)
        if not result:
            continue
        wrong = [
            key
            for key, kind in TYPES_OF_SCORES.items()
            if key in result and not isinstance(result[key], kind)
        ]
        if wrong:
            run.missing.append((f"{name}.json", DAMAGED, ", ".join(wrong)))
            continue
        run.results[name] = result
        if path.with_suffix(".txt").exists():
            run.hypotheses[name] = read_text(run, f"{name}.txt").split("\n")[:-1]
        elif run.is_translation:
            run.missing.append((f"{name}.txt", NOT_THERE, NO_TRANSLATIONS))
        scored = run.scored(name).name
        # The name of a result contains a checkpoint that was not the best one when it was scored.
        if is_step(best) and is_step(scored) and scored != best and scored not in name:
            why = (
                "of an earlier checkpoint than the best; run evaluate.py again",
                "这个结果属于较早的检查点，不是最好的；请重新运行 evaluate.py",
            )
            run.missing.append((f"{name}.json", scored, why))
    no_result = ("no result yet", "还没有评测结果")
    if run.is_translation and not run.results:
        command = f"`python evaluate.py --ckpt {shlex.quote(str(run.folder))}`"
        run.missing.append(("eval/", no_result, ("this makes one", "评测的命令"), command))
    elif not run.results and not run.final_message():
        # A lab that has not ended; some labs make no result.
        run.missing.append(("eval/", no_result))


def read_json(run: RunFiles, name: str, kind: type):
    """The content of a file; an empty `kind` if it is missing or damaged, which is noted."""
    problem = DAMAGED
    try:
        content = json.loads((run.folder / name).read_text(encoding="utf-8"))
        if isinstance(content, kind):
            return content
    except FileNotFoundError:
        problem = NOT_THERE
    except (OSError, ValueError):
        pass
    why = UNKNOWN.get(name, ("that result is left out", "略去这个结果"))
    run.missing.append((name, problem, why))
    return kind()


def read_text(run: RunFiles, name: str) -> str:
    """The text of a file; "" if it is not there, which is noted."""
    try:
        return (run.folder / name).read_bytes().decode("utf-8", errors="replace")
    except OSError:
        run.missing.append((name, NOT_THERE, UNKNOWN.get(name, "")))
        return ""


def read_records(run: RunFiles) -> list[dict]:
    """The readable lines of metrics.jsonl. A killed run may leave a torn last line."""
    records, damaged = [], 0
    for line in read_text(run, "metrics.jsonl").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        step = record.get("step") if isinstance(record, dict) else None
        if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53:
            records.append(record)
        else:
            damaged += 1
    if damaged:
        why = (f"{damaged} damaged line(s) left out", f"有 {damaged} 行损坏，已略去")
        run.missing.append(("metrics.jsonl", why))
    return records


def leave_out_impossible_utilisation(run: RunFiles) -> None:
    """Remove a curve that exceeds 100 %: other processes disturbed the measurement of the peak."""
    tag = "speed/model_flops_utilisation"
    if max(run.series(tag)[1], default=0) > 1:
        run.missing.append((tag, ABOVE_PEAK))
        for record in run.records:
            record.pop(tag, None)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a run, that is, writes to it now."""
    try:
        with open(path, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False


def rows_of(run: RunFiles, name: str) -> list[tuple[str, str]]:
    """The raw (source, target) rows of a result; [] if the data are gone, which is noted."""
    if name not in run.rows:
        try:
            run.rows[name] = read_rows(run, name)
        except (UserError, OSError, KeyError) as error:
            run.missing.append((DATA_SET, f"`{error}`", NO_TRANSLATIONS))
            run.rows[name] = []
    return run.rows[name]


def read_rows(run: RunFiles, name: str) -> list[tuple[str, str]]:
    """The rows that were scored. Raises `UserError` if the data set is gone or has other rows."""
    result = run.results[name]
    lines = len(run.hypotheses[name])
    if lines != result["sentences"]:
        raise UserError(f"{name}.txt has {lines:,} lines, {result['sentences']:,} were scored")
    data = result["data"]
    # Only the run's own data are looked for on the hub.
    is_of_hub = data == run.config.get("data") and not Path(data).is_absolute()
    if not is_of_hub and not Path(data).exists():
        raise UserError(f"{data} is not on this disk")
    text = find_text(data, *result["columns"])
    split = result["split"]
    if split == "train":
        rows = text.pairs("train")
    elif split == "all":  # of data that have neither validation nor test rows
        rows = chain.from_iterable(map(text.pairs, text.files))
    else:
        rows = held_out_rows(text).get(split, [])
    scored = list(islice(rows, lines))  # evaluate.py --limit scores the first ones
    if result["rows"] != fingerprint_of(scored):
        raise UserError(f"{name} was computed on other rows than those in {data}")
    return scored


def newest_run(runs: Path = Path("runs")) -> Path:
    """The run or table, of any script, that was written to last."""
    files = [file for name in ("metrics.jsonl", "table.json") for file in runs.glob(f"*/{name}")]
    files += runs.glob("lightning/*/hparams.yaml")
    if not files:
        raise UserError(f"no run in {runs.absolute()}; name one: python report.py PATH/NAME")
    return max(files, key=lambda file: file.stat().st_mtime).parent
