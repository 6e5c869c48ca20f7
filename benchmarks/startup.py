"""How long until something happens: train.py to its first step, evaluate.py to its first decoded batch.

    python -m benchmarks.startup                             # trains one step on MINIDATASET, /opt/minidataset or sample/
    python -m benchmarks.startup --ckpt runs/NAME            # with that run's model for evaluate.py
    python -m benchmarks.startup --rounds 5 --out startup.json

Both as whole processes, as a user starts them; the data is tokenised already. The second table says which imports take the time
(`python -X importtime`, which itself slows imports down by about a third).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import compare, interleave, print_table, write_json
from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from text.rows import default_path

ROOT = Path(__file__).resolve().parents[1]
FIRST_STEP = r"step +1 .* loss"
READY = r".*, split test, "  # what evaluate.py says right before it decodes
SHOWN = 8  # packages in the table of imports


@dataclass
class Config:
    """Every setting of this benchmark."""

    data: str = flag("", "parallel text; MINIDATASET, else /opt/minidataset, else sample/", "What")
    ckpt: str = flag("", "run for evaluate.py; one of a single step is made on sample/", "What")
    rounds: int = flag(3, "starts of each", "How")
    out: str = flag("runs/benchmarks/startup.json", "where the figures go", "How")


def main(config: Config) -> None:
    """Measure, print, write."""
    data = str(Path(config.data or os.environ.get("MINIDATASET") or default_path()).resolve())
    ckpt = Path(config.ckpt).resolve() if config.ckpt else None
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        if not ckpt:
            start("train.py", "--data", ROOT / "sample", "--max_steps", 1, "--run", "made", cwd=folder, until=None)
            ckpt = folder / "runs" / "made"
        train(folder, data)  # which fills the cache
        contestants = {
            "train.py, first step": lambda: train(folder, data),
            "evaluate.py, first batch": lambda: evaluate(folder, ckpt),
        }
        runs = interleave(contestants, config.rounds, lambda name: contestants[name]())
        print_table(compare(runs, "seconds", more=["said_something"]), "s", decimals=2)
        shares = {
            "train.py": imports(folder, "train.py", "--data", data, "--log_every", 1, "--run", "i", until=FIRST_STEP),
            "evaluate.py": imports(folder, "evaluate.py", "--ckpt", ckpt, "--limit", 1, until=None),
        }
    print_imports(shares)
    write_json(config.out, runs, title="start-up", import_seconds=shares)


def train(folder: Path, data: str) -> dict:
    """Seconds to the line of the first step of a fresh run; the process is ended there."""
    shutil.rmtree(folder / "runs" / "first", ignore_errors=True)
    words = ("train.py", "--data", data, "--max_steps", 9, "--log_every", 1, "--run", "first")
    times = start(*words, cwd=folder, until=FIRST_STEP)[0]
    return {"seconds": times[-1], "said_something": times[0]}


def evaluate(folder: Path, ckpt: Path) -> dict:
    """Seconds until the first batch of the test split is decoded: until it says what it decodes, and what that took."""
    out = folder / "hypotheses.txt"
    limit = 128  # rows that are decoded at once
    times, lines = start("evaluate.py", "--ckpt", ckpt, "--limit", limit, "--out", out, cwd=folder, until=None)
    ready = next(seconds for seconds, line in zip(times, lines) if re.match(READY, line))
    name = f"test-greedy-first{limit}.json"
    decoding = json.loads((ckpt / "eval" / name).read_text(encoding="utf-8"))["seconds"]
    return {"seconds": ready + decoding, "said_something": times[0], "decoding": decoding}


def start(script: str, *arguments, cwd: Path, until: str | None, python=()) -> tuple[list[float], list[str]]:
    """When each line came, in seconds, and the lines, to the end of the process or to the line that matches `until`."""
    words = [sys.executable, *python, str(ROOT / script), *map(str, arguments)]
    begun = time.perf_counter()
    process = subprocess.Popen(
        words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    )
    times, lines = [], []
    for line in process.stdout:
        times.append(time.perf_counter() - begun)
        lines.append(line)
        if until and re.match(until, line):
            process.kill()
            break
    process.stdout.close()
    last = lines[-1].strip() if lines else "nothing"
    if process.wait() and not (until and re.match(until, last)):
        raise UserError(f"{' '.join(words)} failed; the last it said was: {last}")
    return times, lines


def imports(folder: Path, *words, until: str | None) -> dict[str, float]:
    """Seconds of importing by package, of a start of its own."""
    shutil.rmtree(folder / "runs" / "i", ignore_errors=True)
    return import_seconds(start(*words, cwd=folder, until=until, python=("-X", "importtime"))[1])


def import_seconds(lines: list[str]) -> dict[str, float]:
    """Lines of -X importtime → seconds by package without what it imports itself, costliest first; torch._dynamo by itself."""
    seconds = Counter()
    for line in lines:
        if found := re.match(r"import time: +(\d+) \| +\d+ \| *([\w.]+)", line):
            module = found[2]
            seconds["torch._dynamo" if module.startswith("torch._dynamo") else module.split(".")[0]] += int(found[1])
    return {name: microseconds / 1e6 for name, microseconds in seconds.most_common()}


def print_imports(shares: dict[str, dict[str, float]]) -> None:
    """The costliest packages of each script."""
    print("| script | all imports | " + " | ".join(["costliest"] * SHOWN) + " |")
    print("|---|---:|" + "---|" * SHOWN)
    for script, seconds in shares.items():
        costly = [f"{name} {value:.2f} s" for name, value in list(seconds.items())[:SHOWN]]
        print(f"| {script} | {sum(seconds.values()):.2f} s | " + " | ".join(costly) + " |")


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "seconds to the first step and to the first translation")))
