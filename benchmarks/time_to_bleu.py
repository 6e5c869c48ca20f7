"""Minutes until a BLEU: this project, Marian, OpenNMT-py, fairseq and transformers' MarianMTModel.

    bash benchmarks/peers/install.sh pymarian opennmt fairseq                          # once
    python -m benchmarks.time_to_bleu --data $MINIDATASET --minutes 60
    python -m benchmarks.time_to_bleu --data $MINIDATASET --contestants ours       # one curve anew

All train a model of the preset `lab` on the same pairs and tokens, which are there before the clock
starts. Every `--every` steps each translates the first 500 validation rows greedily, while its
clock runs on; BLEU is that of train.py's curve. The test split is not used.

Not like for like: ours leaves out pairs unlike the validation set (`--select`), the others pairs of
more than 126 tokens a side. Marian, OpenNMT-py and fairseq have no bf16 on a CPU; the last two have
oneDNN's products. Marian translates with the mean of its weights over time
(`--exponential-smoothing`). See also benchmarks/peers/toolkits.py.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.corpus import SIDES, Corpus, as_words, load_corpus
from benchmarks.measuring import ROOT, describe_machine, markdown, pinned
from benchmarks.peers.contest import (
    ENVIRONMENTS,
    KEEP_MEMORY,
    SIZES,
    TOOLKITS,
    Contestant,
    Task,
    choose,
    command,
    is_installed,
)
from data import Prepared, load_prepared
from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from text.bleu import corpus_bleu
from text.subwords import decode
from tools.reporting.reading import read_run
from validation import BLEU_ROWS

GOALS = (1, 2, 3, 5)  # BLEU
# The peers' learning rate rises to 0.001 in 1,000 steps, then falls as 1/√step. Their dropout is
# 0.1; fairseq's own 0.3 is for many passes over little data.
RATE = "1e-3 1000"
MARIAN = "marian-lr-1e-3"
PEERS = {
    "hf-lr-1e-3": Contestant(
        "marian", {"what": "learn", "variant": RATE}, environment=KEEP_MEMORY, pin=False
    )
}
for name, toolkit in TOOLKITS.items():
    settings = toolkit.settings | {"variant": RATE}
    PEERS[f"{name}-lr-1e-3"] = replace(toolkit, settings=settings, pin=False)
EVERYBODY = ("ours", MARIAN, *PEERS)
Curve = list[tuple[float, float]]  # (minutes, BLEU) of each validation


@dataclass
class Config:
    """Every setting of this benchmark."""

    data: str = flag("", "as in train.py", "What")
    contestants: str = flag("", "who takes part, separated by commas; default: all", "What")
    vocab: int = flag(0, "tokens in each vocabulary; 0: as in train.py", "What", min=0, max=60000)
    minutes: float = flag(60.0, "minutes for each", "How", above=0)
    every: int = flag(250, "steps between translations", "How", min=1)
    threads: int = flag(2, "compute threads", "How", min=1)
    out: str = flag("runs/benchmarks/time_to_bleu.json", "file for all curves", "How")


def main(config: Config) -> None:
    """Run the contestants, add their curves to the file, print the table."""
    print(f"minutes to a BLEU\n{describe_machine()}", flush=True)
    names = choose(config.contestants, EVERYBODY) or list(EVERYBODY)
    toolkits = {PEERS[name].toolkit for name in names if name in PEERS} - {""}
    if MARIAN in names:
        toolkits.add("pymarian")
    absent = sorted(toolkit for toolkit in toolkits if not is_installed(toolkit))
    if absent:
        raise UserError(
            f"{', '.join(absent)}: not installed; run: "
            f"bash benchmarks/peers/install.sh {' '.join(absent)}"
        )
    corpus = load_corpus(config.data, vocab=config.vocab, pairs=10**9)
    out = ROOT / config.out
    kept = {"tokens": corpus.folder.name, "curves": {}}
    if out.exists():
        kept = json.loads(out.read_text(encoding="utf-8"))
    if kept["tokens"] != corpus.folder.name:
        raise UserError(f"{out} has curves of other data or tokens; choose another --out")
    for name in names:
        folder = ROOT / "runs" / f"{name}-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
        train = train_ours if name == "ours" else train_peer
        kept["curves"][name] = train(config, folder, corpus, name)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    print(table(kept["curves"]))


def train_ours(config: Config, folder: Path, corpus: Corpus, name: str) -> Curve:
    """train.py with its default recipe."""
    flags = {
        "data": corpus.data,
        "run": folder,
        "max_minutes": config.minutes,
        "epochs": 1000,
        "eval_every": config.every,
        "source_vocab": config.vocab,
        "target_vocab": config.vocab,
    }
    words = [sys.executable, "train.py", *(f"--{name}={value}" for name, value in flags.items())]
    begun = time.time()
    subprocess.run(words, cwd=ROOT, env=os.environ | pinned(config.threads, pin=False), check=True)
    records = [record for record in read_run(folder).records if "valid/bleu" in record]
    return [((record["time"] - begun) / 60, record["valid/bleu"]) for record in records]


def train_peer(config: Config, folder: Path, corpus: Corpus, name: str) -> Curve:
    """Train until the time is over, then score the translations, whose files are named by time."""
    folder.mkdir(parents=True)
    prepared = load_prepared(corpus.folder.with_name(corpus.folder.name.split("-benchmark")[0]))
    references = write_sources(folder, prepared)
    environment = os.environ | pinned(config.threads, pin=False)
    if name == MARIAN:
        words = marian_command(config, folder, corpus)
    else:
        peer = PEERS[name]
        task = Task(
            "", str(corpus.folder), threads=config.threads, outputs=str(folder), every=config.every
        )
        if peer.settings["what"] == "fairseq":  # makes its own files before the clock starts
            first, environment = command(replace(peer, settings={"what": "binarise"}), task)
            subprocess.run(first, cwd=ROOT, env=environment, capture_output=True, check=True)
        words, environment = command(peer, task)
    begun = time.time()
    with open(folder / "log", "w", encoding="utf-8") as log:
        options = dict(cwd=ROOT, env=environment, stdout=log, stderr=log)
        with suppress(subprocess.TimeoutExpired):  # the process is killed: nothing to save
            process = subprocess.run(words, timeout=60 * config.minutes, **options)
            raise UserError(f"{name} ended with {process.returncode}; see {folder}/log")
    curve = []
    for file in sorted(folder.glob("*.out")):
        lines = file.read_text(encoding="utf-8").splitlines()
        ids = [[int(word[1:]) for word in line.split() if word[0] == "t"] for line in lines]
        hypotheses = decode(prepared.target_tokenizer, ids)
        bleu = corpus_bleu(references=references, hypotheses=hypotheses, smooth=True)
        curve.append(((float(file.stem) - begun) / 60, bleu))
    return curve


def write_sources(folder: Path, prepared: Prepared) -> list[str]:
    """Write valid.src and valid.tgt, the first rows of validation; return their references."""
    references, pairs = [], []
    rows = min(BLEU_ROWS, len(prepared.validation_rows))
    for row in range(rows):
        source, target = prepared.validation[row]
        if len(source) and len(target):  # OpenNMT-py skips an empty line
            references.append(prepared.validation_rows[row][1])
            pairs.append((source, target))
    for side, sentences in zip(SIDES, zip(*pairs)):
        (folder / f"valid.{side}").write_text(as_words(sentences, side), encoding="utf-8")
    return references


def marian_command(config: Config, folder: Path, corpus: Corpus) -> list[str]:
    """`marian train`, which gives its translations to a script that keeps them."""
    for side, vocabulary in zip(SIDES, (corpus.source_vocab, corpus.target_vocab)):
        tokens = ["</s>", "<unk>", *(f"{side[0]}{token}" for token in range(vocabulary))]
        lines = (f'"{token}": {number}\n' for number, token in enumerate(tokens))
        (folder / f"vocab.{side}.yml").write_text("".join(lines), encoding="utf-8")
    keep = folder / "keep.sh"
    keep.write_text('#!/bin/sh\ncp "$1" "$(dirname "$0")/$(date +%s.%N).out"\necho 0\n')
    keep.chmod(0o700)

    sizes = SIZES["lab"]
    rate, warmup = RATE.split()
    words = [ENVIRONMENTS / "pymarian/bin/python", "-m", "pymarian", "train"]
    words += ["--train-sets", corpus.folder / "train.src", corpus.folder / "train.tgt"]
    words += ["--valid-sets", folder / "valid.src", folder / "valid.tgt"]
    words += ["--vocabs", folder / "vocab.src.yml", folder / "vocab.tgt.yml"]
    words += ["--model", folder / "model.npz", "--valid-script-path", keep]
    words += ["--valid-translation-output", folder / "translated"]
    words += f"""
        --type transformer --dim-emb {sizes["d_model"]} --transformer-heads {sizes["nhead"]}
        --enc-depth {sizes["num_encoder_layers"]} --dec-depth {sizes["num_decoder_layers"]}
        --transformer-dim-ffn {sizes["dim_feedforward"]}
        --transformer-dropout 0.1 --label-smoothing 0.1 --clip-norm 5
        --optimizer-params 0.9 0.98 1e-09 --exponential-smoothing 0.0001
        --learn-rate {rate} --lr-warmup {warmup} --lr-decay-inv-sqrt {warmup}
        --max-length 127 --mini-batch 1000 --mini-batch-words 4096 --maxi-batch 1000
        --cpu-threads {config.threads} --workspace 2000 --sync-sgd true
        --valid-freq {config.every} --valid-metrics translation --valid-mini-batch 64
        --beam-size 1 --valid-max-length 500 --max-length-factor 3
        --save-freq 1000000 --disp-freq 50 --seed 1
    """.split()
    return list(map(str, words))


def table(curves: dict[str, Curve]) -> str:
    """Markdown: when each BLEU was first reached, and the last BLEU."""
    cells = [["", *(f"{goal} BLEU" for goal in GOALS), "at the end"]]
    for name, curve in curves.items():
        row = [name]
        for goal in GOALS:
            reached = [minutes for minutes, bleu in curve if bleu >= goal]
            row.append(f"{reached[0]:.1f} min" if reached else "–")
        row.append(f"{curve[-1][1]:.2f} after {curve[-1][0]:.1f} min" if curve else "–")
        cells.append(row)
    return markdown(cells)


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "minutes to a BLEU")))
