"""Minutes until a BLEU: this project and Hugging Face's MarianMTModel.

    python -m benchmarks.time_to_bleu --data $MINIDATASET --minutes 60
    python -m benchmarks.time_to_bleu --data $MINIDATASET --contestants ours       # one of them

Both train a model of the preset `lab` on the same corpus, which is tokenised before the clock
starts. Every `--every` steps each translates the first 500 validation rows greedily, while
its clock runs on; BLEU is that of train.py's curve. The test split is not used.

Not like for like: ours uses Muon without dropout, the other Adam with dropout 0.1. Ours leaves out
pairs unlike the validation set (`--select`), the other pairs of more than 126 tokens a side.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.corpus import (
    data_path,
    load_corpus,
    prepare_corpus,
    validation_rows,
)
from benchmarks.measuring import (
    ROOT,
    add_rows,
    check_table,
    describe_machine,
    hardware,
)
from benchmarks.peers.contest import KEEP_MEMORY, SIZES, Contestant, choose, command
from benchmarks.peers.turn import Task
from data import Prepared
from engine.config import flag, parse_flags
from engine.environment import commit
from engine.errors import UserError, run_script
from engine.tables import markdown_table
from text.bleu import corpus_bleu
from text.subwords import decode
from tools.reporting.reading import read_run

GOALS = {"one": 1, "three": 3, "five": 5}  # BLEU
CONTESTANTS = {
    "ours": ("this project, `--dropout 0`", "本项目，`--dropout 0`"),
    "marian": ("`MarianMTModel`, Adam, length buckets", "`MarianMTModel`，Adam，按长度分桶"),
}
COLUMNS = ["who", *GOALS, "end", "hardware", "commit"]
Curve = list[tuple[float, float]]  # (minutes, BLEU) of each validation


@dataclass
class Config:
    """Every setting of this benchmark."""

    data: str = flag("", "as in train.py; default: MINIDATASET, else as there", "What")
    contestants: str = flag("", "who takes part, separated by commas; default: all", "What")
    vocab: int = flag(0, "tokens in each vocabulary; 0: as in train.py", "What", min=0, max=60000)
    minutes: float = flag(60.0, "minutes for each", "How", above=0)
    every: int = flag(250, "steps between translations", "How", min=1)
    threads: int = flag(2, "compute threads", "How", min=1)
    json: str = flag("", "table in the form of docs/results/ that gets the rows", "How")

    def __post_init__(self):
        if 0 < self.vocab < 300:
            raise UserError(f"--vocab {self.vocab} must be at least 300: 256 tokens are bytes")


def main(config: Config) -> None:
    """Run the contestants, print the table."""
    print(f"minutes to a BLEU\n{describe_machine()}", flush=True)
    check_table(config.json, COLUMNS)
    names = choose(config.contestants or ",".join(CONTESTANTS), CONTESTANTS)
    corpus = load_corpus(prepare_corpus(config.data, config.vocab), pairs=10**9)
    cells = [["", *(f"{goal} BLEU" for goal in GOALS.values()), "at the end"]]
    for name in names:
        folder = ROOT / "runs" / f"{name}-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
        train = train_ours if name == "ours" else train_marian
        row = as_cells(config, name, train(config, folder, corpus))
        add_rows(config.json, [row])
        cells.append([name, *(row[goal] for goal in GOALS), row["end"]])
    print(markdown_table(cells, padded=True))


def train_ours(config: Config, folder: Path, corpus: Prepared) -> Curve:
    """train.py as run.sh calls it on a CPU: so short a run needs no dropout."""
    flags = {
        "data": data_path(config.data),
        "device": "cpu",
        "run": folder,
        "max_minutes": config.minutes,
        "epochs": 1000,
        "dropout": 0.0,
        "eval_every": config.every,
        "source_vocab": config.vocab,
        "target_vocab": config.vocab,
    }
    words = [sys.executable, "train.py", *(f"--{name}={value}" for name, value in flags.items())]
    threads = {"OMP_NUM_THREADS": str(config.threads)}
    begun = time.time()
    code = subprocess.run(words, cwd=ROOT, env=os.environ | threads).returncode
    if code:
        raise UserError(f"train.py ended with {code}; see above")
    records = [record for record in read_run(folder).records if "valid/bleu" in record]
    return [((record["time"] - begun) / 60, record["valid/bleu"]) for record in records]


def train_marian(config: Config, folder: Path, corpus: Prepared) -> Curve:
    """Train until the time is over, then score the translations, whose files are named by time."""
    folder.mkdir(parents=True)
    contestant = Contestant("marian", environment=KEEP_MEMORY)
    task = Task(
        "learn",
        threads=config.threads,
        folder=str(corpus.folder),
        sizes=SIZES["lab"],
        outputs=str(folder),
        every=config.every,
    )
    words, environment = command(contestant, task)
    begun = time.time()
    with open(folder / "log", "w", encoding="utf-8") as log:
        options = dict(cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            process = subprocess.run(words, timeout=60 * config.minutes, **options)
        except subprocess.TimeoutExpired:  # the process is killed: nothing to save
            pass
        else:
            raise UserError(f"marian ended with {process.returncode}; see {folder}/log")
    _, references = validation_rows(corpus)
    curve = []
    for file in sorted(folder.glob("*.json")):
        outputs = json.loads(file.read_text(encoding="utf-8"))
        hypotheses = decode(corpus.target_tokenizer, outputs)
        bleu = corpus_bleu(references=references, hypotheses=hypotheses, smooth=True)
        curve.append(((float(file.stem) - begun) / 60, bleu))
    return curve


def as_cells(config: Config, name: str, curve: Curve) -> dict:
    """A row of the page: when each BLEU was first reached, and the last BLEU."""
    english, chinese = CONTESTANTS[name]
    cells = {"who": {"en": english, "zh": chinese}}
    for key, goal in GOALS.items():
        reached = [minutes for minutes, bleu in curve if bleu >= goal]
        cells[key] = f"{reached[0]:.1f}" if reached else "–"
    cells["end"] = f"{curve[-1][1]:.2f}, {curve[-1][0]:.1f} min" if curve else "–"
    cells["hardware"] = hardware(config.threads)
    cells["commit"] = commit()
    return cells


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "minutes to a BLEU")))
