"""Minutes until a BLEU: this project, Marian (C++), OpenNMT-py, fairseq and Hugging Face's MarianMTModel, each with a recipe of
its own, on the same pairs, subwords and cores.

    bash benchmarks/peers/install.sh pymarian opennmt fairseq                          # once
    taskset -c 1 python -m benchmarks.time_to_bleu --data $MINIDATASET --minutes 60 --threads 1
    python -m benchmarks.time_to_bleu --data $MINIDATASET --contestants marian         # the rest of the table is kept

All have the model of the preset `lab` and the same tokens, there before the clock starts. Every `--every` steps each
translates the first 500 validation rows greedily, and its clock runs on meanwhile; BLEU is the one of train.py's curve. The
test split is not looked at. Not like for like: ours leaves out pairs unlike validation's (`--select`),
the others skip pairs of more than 126 tokens a side. Marian, OpenNMT-py and fairseq have no bf16 on
a CPU; the last two have oneDNN's products, whose factors are rounded. Marian translates with the mean of
its weights over time (its `--exponential-smoothing`). benchmarks/peers/toolkits.py says more.
"""

import json
import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.corpus import SIDES, as_words, load_corpus
from benchmarks.measuring import ROOT, call, describe_machine, markdown, pinned
from benchmarks.peers.contest import (
    ENVIRONMENTS,
    KEEP_MEMORY,
    TOOLKITS,
    Contestant,
    Task,
    choose,
    command,
)
from data import load_prepared
from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from model import PRESETS
from text.bleu import corpus_bleu
from text.subwords import decode
from tools.reporting.reading import read_run
from validation import BLEU_ROWS

GOALS = (1, 2, 3, 5)  # BLEU
OURS = {"ours": {}}  # flags of train.py
# As in marian-examples/transformer (WMT17), and with the rate of our former default, for so little time.
EXAMPLE = {"learn-rate": 3e-4, "lr-warmup": 16000, "lr-decay-inv-sqrt": 16000}
MARIAN = {
    "marian": EXAMPLE,
    "marian-lr-1e-3": {"learn-rate": 1e-3, "lr-warmup": 1000, "lr-decay-inv-sqrt": 1000},
}
# Peak rate and steps up to it: fairseq's recipe for IWSLT, and the rate of Marian's second. With dropout 0.1, where fairseq has
# 0.3: that is for many passes over little data, and here no pair is seen often enough to be learnt by heart.
RATES = {"": "5e-4 4000", "-lr-1e-3": "1e-3 1000"}
PEERS = {
    name + rate: replace(peer, settings=peer.settings | {"variant": RATES[rate]}, pin=False)
    for name, peer in {
        "hf": Contestant("marian", {"what": "learn"}, environment=KEEP_MEMORY),
        **TOOLKITS,
    }.items()
    for rate in RATES
}
EVERYBODY = (*OURS, *MARIAN, *PEERS)


@dataclass
class Config:
    data: str = flag("", "as train.py's --data", "What")
    contestants: str = flag("", "who takes part, with commas between; everybody", "What")
    vocab: int = flag(-1, "subwords of each side; -1: as train.py's", "What", min=-1, max=60000)
    minutes: float = flag(60.0, "of each", "How", above=0)
    every: int = flag(250, "steps between translations", "How", min=1)
    threads: int = flag(2, "compute threads", "How", min=1)
    out: str = flag(
        "runs/benchmarks/time_to_bleu.json", "file for all curves; the runs lie in runs/", "How"
    )


def main(config: Config) -> None:
    """Run who is named, add the curves to those there are, print the table."""
    print(f"minutes to a BLEU\n{describe_machine()}", flush=True)
    names, out = choose(config.contestants or ",".join(EVERYBODY), EVERYBODY), ROOT / config.out
    toolkits = {
        "pymarian" if name in MARIAN else PEERS[name].toolkit for name in {*names} - {*OURS}
    } - {""}
    if absent := sorted(
        toolkit for toolkit in toolkits if not (ENVIRONMENTS / toolkit / "complete").exists()
    ):
        raise UserError(
            f"to install what takes part: bash benchmarks/peers/install.sh {' '.join(absent)}"
        )
    corpus = load_corpus(config.data, vocab=config.vocab, pairs=10**9)
    kept = (
        json.loads(out.read_text())
        if out.exists()
        else {"tokens": corpus.folder.name, "curves": {}}
    )
    if kept["tokens"] != corpus.folder.name:
        raise UserError(f"{out} holds curves of other data or subwords; give another --out")
    for name in names:
        folder = ROOT / "runs" / f"{name}-{time.strftime('%Y-%m-%d_%H-%M-%S')}"  # beside the tokens
        kept["curves"][name] = (ours if name in OURS else peer)(config, folder, corpus, name)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(kept, indent=1))
    print(table(kept["curves"]))


def ours(config: Config, folder: Path, corpus, name: str) -> list[tuple[float, float]]:
    """train.py with its defaults, but for the flags of `name`; → (minutes, BLEU) of its validations."""
    flags, begun = (
        {"max_minutes": config.minutes, "epochs": 1000, "eval_every": config.every} | OURS[name],
        time.time(),
    )
    flags |= {"source_vocab": config.vocab, "target_vocab": config.vocab}
    call(
        "train.py",
        {"data": corpus.data, "run": folder} | flags,
        **pinned(config.threads, pin=False),
    )
    validations = (record for record in read_run(folder).records if "valid/bleu" in record)
    return [((record["time"] - begun) / 60, record["valid/bleu"]) for record in validations]


def peer(config: Config, folder: Path, corpus, name: str) -> list[tuple[float, float]]:
    """Another's training, until its time is over; its translations, in files named by their time, are scored then."""
    folder.mkdir(parents=True)
    prepared = load_prepared(corpus.folder.with_name(corpus.folder.name.split("-benchmark")[0]))
    sides = zip(
        prepared.validation_rows[:BLEU_ROWS], map(prepared.validation.__getitem__, range(BLEU_ROWS))
    )
    rows = [
        (text, tokens) for text, tokens in sides if all(map(len, tokens))
    ]  # OpenNMT-py skips an empty line
    for side, sentences in zip(SIDES, zip(*(tokens for _, tokens in rows))):
        (folder / f"valid.{side}").write_text(as_words(sentences, side))
    task = Task(
        "", str(corpus.folder), threads=config.threads, outputs=str(folder), every=config.every
    )
    if name in MARIAN:
        words, environment = (
            marian(config, folder, corpus, name),
            os.environ | pinned(config.threads, pin=False),
        )
    else:
        words, environment = command(PEERS[name], task)
    if name.startswith("fairseq"):  # its own files, before the clock starts
        first, _ = command(replace(PEERS[name], settings={"what": "binarise"}), task)
        subprocess.run(first, env=environment, capture_output=True, check=True)
    begun = time.time()
    with (
        open(folder / "log", "w") as log,
        suppress(subprocess.TimeoutExpired),
    ):  # killed: there is nothing to save
        done = subprocess.run(
            words, env=environment, stdout=log, stderr=log, timeout=60 * config.minutes
        )
        raise UserError(f"{name} ended with {done.returncode}; its lines are in {folder}/log")
    references = [reference for (_, reference), _ in rows]
    points = []
    for file in sorted(folder.glob("*.out")):
        ids = [
            [int(word[1:]) for word in line.split() if word[0] == "t"]
            for line in file.read_text().splitlines()
        ]
        score = corpus_bleu(
            references=references, hypotheses=decode(prepared.target_tokenizer, ids), smooth=True
        )
        points.append(((float(file.stem) - begun) / 60, score))
    return points


def marian(config: Config, folder: Path, corpus, name: str) -> list[str]:
    """The command of `marian train`, which hands its translations to a script that keeps them."""
    sizes = PRESETS["lab"]
    for side, vocabulary in zip(SIDES, (corpus.source_vocab, corpus.target_vocab)):
        tokens = ["</s>", "<unk>", *(f"{side[0]}{token}" for token in range(vocabulary))]
        (folder / f"vocab.{side}.yml").write_text(
            "".join(f'"{token}": {id}\n' for id, token in enumerate(tokens))
        )
    keep = folder / "keep.sh"
    keep.write_text('#!/bin/sh\ncp "$1" "$(dirname "$0")/$(date +%s.%N).out"\necho 0\n')
    keep.chmod(0o700)
    flags = {
        "type": "transformer",
        "dim-emb": sizes["d_model"],
        "transformer-heads": sizes["nhead"],
        "enc-depth": sizes["num_encoder_layers"],
        "dec-depth": sizes["num_decoder_layers"],
        "transformer-dim-ffn": sizes["dim_feedforward"],
        "transformer-dropout": 0.1,
        "label-smoothing": 0.1,
        "clip-norm": 5,
        "optimizer-params": "0.9 0.98 1e-09",
        "exponential-smoothing": 1e-4,
        **MARIAN[name],
        "train-sets": f"{corpus.folder}/train.src {corpus.folder}/train.tgt",
        "model": f"{folder}/model.npz",
        "vocabs": f"{folder}/vocab.src.yml {folder}/vocab.tgt.yml",
        "max-length": 127,
        "mini-batch": 1000,
        "mini-batch-words": 4096,
        "maxi-batch": 1000,
        "cpu-threads": config.threads,
        "workspace": 2000,
        "sync-sgd": "true",
        "valid-freq": config.every,
        "valid-sets": f"{folder}/valid.src {folder}/valid.tgt",
        "valid-metrics": "translation",
        "valid-script-path": keep,
        "valid-translation-output": f"{folder}/translated",
        "valid-mini-batch": 64,
        "beam-size": 1,
        "valid-max-length": 500,
        "max-length-factor": 3,
        "save-freq": 10**6,
        "disp-freq": 50,
        "seed": 1,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", *str(value).split())]
    return [ENVIRONMENTS / "pymarian/bin/python", "-m", "pymarian", "train", *words]


def table(curves: dict) -> str:
    """Markdown: the first time that each BLEU was reached, and the last BLEU."""
    cells = [["", *(f"{goal} BLEU" for goal in GOALS), "at the end"]]
    for name, points in curves.items():
        first = [
            next((f"{minutes:.1f} min" for minutes, bleu in points if bleu >= goal), "–")
            for goal in GOALS
        ]
        last = f"{points[-1][1]:.2f} after {points[-1][0]:.1f} min" if points else "–"
        cells.append([name, *first, last])
    return markdown(cells)


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "minutes to a BLEU")))
