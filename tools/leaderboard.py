"""Score every hand-in of a folder again, and write a table of them.

    python -m tools.leaderboard HANDINS/                     # on /opt/minidataset
    python -m tools.leaderboard HANDINS/ --data DIR --split test

HANDINS/ has a folder for each student, and in it, at any depth, one run of train.py; what it needs
is in docs/evaluation.md#handing-in. evaluate.py scores each model, greedily and on the same rows.
After each the table is written to leaderboard.md and leaderboard.csv in the current folder; at the
end it is printed, too. A hand-in that cannot be scored is a row with the reason. Nothing is written
to HANDINS/.
"""

import csv
import hashlib
import io
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import safetensors

from engine import checkpoint
from engine.config import flag, parse_flags
from engine.errors import UserError, explain, run_script
from engine.files import atomic_write
from engine.run import INTERRUPTED
from engine.tables import markdown_table
from loading import FILES_OF_A_RUN, is_run_of_train
from text.cleaning import split_to_score
from text.reading import SAMPLE, SAMPLE_NOTICE, default_path, find_text, is_sample

EVALUATE = Path(__file__).parent.parent / "evaluate.py"
# evaluate.py reads these of a run; tokenizer is a folder.
FILES_FOR_SCORING = (*FILES_OF_A_RUN, "data.json")
# BLEU. Other number formats and processors give slightly other translations; int8 on a CPU scores
# 0.07 less than fp32 (docs/performance.md).
TOLERANCE = 0.3
LONGEST_TEXT = 200  # characters of a student's text in a cell
LARGEST = 100 * 2**20  # bytes of a file that is not weights
MINUTES = 30  # for scoring one hand-in
HEAD = ("place", "name", "BLEU again", "BLEU claimed", "parameters", "seed", "data", "notes")


@dataclass
class Config:
    """What the models are scored on."""

    handins: ClassVar[list[str]]  # the words on the command line
    data: str = flag("", "data to score on; default: /opt/minidataset or sample/", "What")
    source: str = flag("zh", "source column of the data", "What")
    target: str = flag("en", "column with the references", "What")
    split: str = flag("", "split (test|validation|train); default: test, else validation", "What")


@dataclass
class Entry:
    """A hand-in: its row of the table, and what shows that two of them are copies."""

    name: str
    bleu: float | None = None  # of the translations that were made here; None: no score
    claimed: float | None = None
    parameters: int | None = None
    seed: int | None = None
    data: str = ""
    notes: list[str] = field(default_factory=list)

    # Hashes; "" if there is nothing to compare.
    weights: str = ""
    curve: str = ""
    translations: str = ""


def leaderboard(config: Config) -> None:
    """Score all hand-ins; print the table and write it.

    Raises `UserError` if there are no hand-ins, or no rows to score on.
    """
    folders = folders_of_handins(config.handins)
    config.data = config.data or default_path()
    text = find_text(config.data, config.source, config.target)
    config.split = config.split or split_to_score(text)
    if config.split not in text.files:
        raise UserError(
            f"{config.data} has no {config.split} split (it has {', '.join(text.files)}); "
            "give --split or other --data"
        )
    of_sample = list(find_text(str(SAMPLE)).fingerprint().values())

    notice = f"; {SAMPLE_NOTICE}" if is_sample(text) else ""
    title = f"# Leaderboard\n\n{config.data}, split {config.split}, greedy decoding{notice}\n\n"
    entries: list[Entry] = []
    for number, folder in enumerate(folders, 1):
        entry = assess(folder, config, of_sample)
        outcome = "not scored" if entry.bleu is None else f"BLEU {entry.bleu:.2f}"
        print(f"{number}/{len(folders)}  {entry.name}: {outcome}", flush=True)
        entries.append(entry)
        # After each, so that little is lost if it is stopped.
        rows = [HEAD, *table_of(entries)]
        write(title, rows)

    # In the terminal the notes stand below: they would make the table too wide.
    print(f"\n{title}{markdown_table([row[:-1] for row in rows], padded=True)}\n")
    for entry in entries:
        for note in entry.notes + copies_of(entry, entries):
            print(f"{entry.name}: {note}")
    print("written to leaderboard.md and leaderboard.csv")


def write(title: str, rows: list[tuple]) -> None:
    """Write leaderboard.md and leaderboard.csv."""
    atomic_write(Path("leaderboard.md"), f"{title}{markdown_table(rows)}\n")
    table = io.StringIO()
    csv.writer(table).writerows(rows)
    # With a byte order mark, without which Excel takes the file for one in the machine's encoding.
    atomic_write(Path("leaderboard.csv"), f"\ufeff{table.getvalue()}")


def folders_of_handins(words: list[str]) -> list[Path]:
    """The folder of each student. Raises `UserError` if there are none."""
    if len(words) != 1 or not Path(words[0]).is_dir():
        raise UserError(
            f"{' '.join(words) or 'no word'} names no folder; give the folder of the hand-ins"
        )
    folders = [path for path in Path(words[0]).iterdir() if path.is_dir()]
    # What macOS adds to a zip file.
    folders = [path for path in folders if not path.name.startswith((".", "__MACOSX"))]
    if not folders:
        raise UserError(f"{words[0]} has no folders; unzip each hand-in into one of its own")
    return sorted(folders)


def table_of(entries: list[Entry]) -> list[tuple]:
    """The rows of the table, best score first, those without a score last."""
    rows = []
    for entry in sorted(entries, key=lambda entry: (entry.bleu is None, -(entry.bleu or 0))):
        better = sum((other.bleu or 0) > (entry.bleu or 0) for other in entries)
        rows.append(
            (
                "–" if entry.bleu is None else better + 1,
                entry.name,
                "" if entry.bleu is None else f"{entry.bleu:.2f}",
                "" if entry.claimed is None else f"{entry.claimed:.2f}",
                "" if entry.parameters is None else f"{entry.parameters:,}",
                "" if entry.seed is None else entry.seed,
                entry.data,
                "; ".join(entry.notes + copies_of(entry, entries)),
            )
        )
    return rows


# ---------------------------------------------------------------- one hand-in


def assess(folder: Path, config: Config, of_sample: list[str]) -> Entry:
    """All about one hand-in; `of_sample` are the hashes of the bundled sample's splits."""
    entry = Entry(plain(folder.name))
    try:
        check_files(folder)
        run = run_in(folder)
        describe(entry, run, of_sample)
        weights = weights_of(run)
        entry.weights = hashlib.sha256(weights.read_bytes()).hexdigest()
        entry.parameters = parameters_in(weights)
        figures, translations = score_again(run, weights, config)
        entry.claimed = claimed_score(run, figures["rows"])
    except Exception as error:  # it may contain anything, and must not cost the others their rows
        reason = explain(error) or f"{type(error).__name__}: {error}"
        entry.notes.insert(0, plain(reason))
        return entry
    entry.bleu = figures["nltk"]
    entry.translations = hashlib.sha256(translations).hexdigest()
    if figures["note"]:  # such as that the model has learned these rows
        entry.notes.append(figures["note"])
    if entry.claimed is None:
        entry.notes.append("no score on these rows was handed in")
    elif abs(entry.claimed - entry.bleu) > TOLERANCE:
        entry.notes.append(f"the claimed score differs by {entry.claimed - entry.bleu:+.2f}")
    return entry


def check_files(folder: Path) -> None:
    """Raises `UserError` if reading a file of the hand-in could do harm.

    Such are a link to a place outside, a device or a pipe, and a file that is too large.
    """
    for path in folder.rglob("*"):
        target = path.resolve()
        name = path.relative_to(folder)
        if not target.is_relative_to(folder.resolve()):
            raise UserError(f"{name} is a link to a place outside the hand-in")
        if target.exists() and not (target.is_file() or target.is_dir()):
            raise UserError(f"{name} is neither a file nor a folder")
        is_weights = target.suffix == ".safetensors"
        if target.is_file() and not is_weights and target.stat().st_size > LARGEST:
            raise UserError(f"{name} has more than {LARGEST // 2**20} MiB")


def run_in(folder: Path) -> Path:
    """The run of train.py in a hand-in. Raises `UserError` if there is not exactly one."""
    missing = [name for name in FILES_OF_A_RUN if not any(folder.rglob(name))]
    if missing:
        raise UserError(f"{', '.join(missing)} missing")
    runs = [path.parent for path in folder.rglob("model.json") if is_run_of_train(path.parent)]
    if len(runs) != 1:
        raise UserError(f"it has {len(runs)} runs of train.py; leave one")
    return runs[0]


def weights_of(run: Path) -> Path:
    """The weights that were handed in, else those of the best checkpoint.

    Raises `UserError` if there are none.
    """
    for folder in (run, run / "checkpoints" / "best"):
        if (folder / "model.safetensors").is_file():
            return folder / "model.safetensors"
    if not checkpoint.steps(run / "checkpoints"):
        raise UserError("model.safetensors missing")
    return checkpoint.resolve(run) / "model.safetensors"


def parameters_in(weights: Path) -> int:
    """The number of trained values; the tied output projection counts once.

    Raises `UserError` if the file is damaged.
    """
    try:
        with safetensors.safe_open(weights, framework="numpy") as file:
            names = list(file.keys())
            shapes = {name: file.get_slice(name).get_shape() for name in names}
    except safetensors.SafetensorError as error:
        raise UserError(f"{weights.name} is damaged ({error})") from None
    return sum(math.prod(shape) for name, shape in shapes.items() if name != "output.weight")


def describe(entry: Entry, run: Path, of_sample: list[str]) -> None:
    """What the files of the run say: seed, data, curve, and how it ended."""
    seed = read_json(run / "config.json").get("seed")
    entry.seed = seed if isinstance(seed, int) else None

    data = read_json(run / "data.json")
    counts = data.get("counts")
    kept = counts.get("kept") if isinstance(counts, dict) else None
    pairs = f", {kept:,} pairs" if isinstance(kept, int) else ""
    entry.data = plain(Path(str(data.get("path", "?"))).name + pairs)
    learned = data.get("fingerprint")  # split -> hash
    if not data:
        entry.notes.append("data.json missing or damaged")
    elif isinstance(learned, dict) and any(part in of_sample for part in learned.values()):
        entry.notes.append("trained on the bundled sample")

    curve = losses(run / "metrics.jsonl")
    if curve:
        entry.curve = hashlib.sha256(repr(curve).encode()).hexdigest()
    else:
        entry.notes.append("metrics.jsonl missing or damaged")

    reason = reason_of_end(run / "train.log")
    if reason == INTERRUPTED:
        entry.notes.append("the run was interrupted")
    elif not reason:
        entry.notes.append("train.log does not say that the run ended")


def read_json(path: Path) -> dict:
    """The object in a JSON file; {} if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def losses(path: Path) -> list[tuple]:
    """(step, loss) of all log lines of the training; [] if the file is missing or damaged."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        return [(each["step"], each["train/loss"]) for each in records if "train/loss" in each]
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return []


def reason_of_end(log: Path) -> str:
    """Why the run stopped, as its log says; "" if it does not."""
    try:
        text = log.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    last_session = text.rpartition("resumed after step")[2]
    reason = re.search(r"stopped(?: after step [\d,]+)?: (.+)", last_session)
    return reason[1].strip() if reason else ""


def claimed_score(run: Path, rows: str) -> float | None:
    """The best greedy score of these rows that was handed in; `rows` is their fingerprint."""
    scores = []
    for file in (run / "eval").glob("*.json"):
        figures = read_json(file)
        score = figures.get("nltk")
        if not isinstance(score, (int, float)) or not 0 <= score <= 100:
            continue
        if figures.get("rows") == rows and figures.get("decoding") == "greedy":
            scores.append(float(score))
    return max(scores, default=None)


def score_again(run: Path, weights: Path, config: Config) -> tuple[dict, bytes]:
    """The figures of evaluate.py, and the translations, one per line.

    Another process, so that a model that takes all the memory ends only that one. It works in a
    temporary folder with links to the files, so that the student's score is not overwritten.
    Raises `UserError` with the reason if there is no score.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in FILES_FOR_SCORING:
            if (run / name).exists():
                (folder / name).symlink_to((run / name).resolve())
        (folder / "model.safetensors").symlink_to(weights.resolve())
        command = [sys.executable, EVALUATE, "--ckpt", folder / "model.safetensors"]
        for name in ("data", "source", "target", "split"):
            command += [f"--{name}", getattr(config, name)]
        try:
            done = subprocess.run(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=60 * MINUTES,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"evaluate.py took more than {MINUTES} minutes") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            reason = lines[-1].removeprefix("error: ").replace(f"{folder}/", "")
            if done.returncode < 0:
                reason = f"evaluate.py was ended by signal {-done.returncode} (9: memory is full)"
            raise UserError(reason)
        [scores] = (folder / "eval").glob("*.json")
        figures = json.loads(scores.read_text(encoding="utf-8"))
        return figures, scores.with_suffix(".txt").read_bytes()


def plain(text: str) -> str:
    """A student's text as one line without control characters or a spreadsheet's formula."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(printable.split()).lstrip("=+-@")[:LONGEST_TEXT]


# ---------------------------------------------------------------- two hand-ins


def copies_of(entry: Entry, entries: list[Entry]) -> list[str]:
    """Notes on what a hand-in has in common with others.

    An equal seed alone proves nothing: it is 1 unless the student sets it.
    """
    alike = defaultdict(list)  # what is the same -> names
    for other in entries:
        kinds = ("weights", "curve", "translations")
        same = [
            kind
            for kind in kinds
            if getattr(entry, kind) and getattr(entry, kind) == getattr(other, kind)
        ]
        if other is entry or not same:
            continue
        if entry.seed == other.seed:
            same.append("seed")
        alike[", ".join(same)].append(other.name)
    return [f"same {same} as {', '.join(names)}" for same, names in alike.items()]


def main() -> None:
    """Parse the command line and make the table."""
    config = parse_flags(Config, "score every hand-in of a folder again", positional="handins")
    run_script(lambda: leaderboard(config))


if __name__ == "__main__":
    main()
