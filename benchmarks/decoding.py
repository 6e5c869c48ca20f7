"""Decoding speed: this project and CTranslate2 translate the same sentences with the same weights.

    pip install ctranslate2==4.8.5                                          # once
    python -m benchmarks.decoding --ckpt runs/NAME --data DIR --split test --beam 5
    python -m benchmarks.decoding            # random weights: 500 outputs of 40 tokens

Every turn is a new process. It loads the model, decodes 64 sentences to warm up, and then all:
token ids in, token ids out. Only that is timed. `peak_gib` is the most memory of the process.

CTranslate2 has several settings: workers × threads of each, and sentences per batch. Each is first
tried on every fourth sentence, and the fastest takes part. It sees the same limits and the same
length penalty, see benchmarks/peers/ct2.py. The rules of beam search for when to stop differ:
CTranslate2 stops when as many hypotheses have ended as the beam is wide, ours when, in addition,
no unfinished one scores better.
"""

import json
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import (
    Figures,
    Row,
    add_rows,
    check_table,
    hardware,
    in_new_process,
    measure,
)
from benchmarks.peers.contest import SIZES, Contestant, choose, ours, start
from benchmarks.peers.turn import Task
from data import collate_for
from decoding import output_limit
from engine.config import flag, parse_flags
from engine.devices import choose_device
from engine.environment import commit
from engine.errors import UserError, run_script
from evaluate import Config as Evaluation
from evaluate import choose_rows
from loading import load_trained
from model import ModelConfig, Translator, make_translator
from text.bleu import corpus_bleu
from text.cleaning import normalise
from text.subwords import decode, encode
from tools.serving.to_ctranslate2 import convert, name_special

OURS = ours(["fp32", "int8", "bf16", "plain-fp32", "plain-bf16", "plain-fp16"])
CT2 = {f"ctranslate2-{kind}": kind for kind in ("float32", "int8")}
ON_CPU = "ours-fp32,ctranslate2-float32,ours-int8,ctranslate2-int8"
ON_GPU = "ours-plain-bf16"
BATCHES = (32, 64, 128, 256)  # sentences, of CTranslate2
COLUMNS = "who search seconds tokens ratio bleu equal memory hardware commit".split()


@dataclass
class Config:
    """Every setting of this benchmark."""

    ckpt: str = flag("", "run, checkpoint or weights file; default: random weights", "What")
    data: str = flag("", "data as in evaluate.py", "What")
    split: str = flag(
        "", "split to score (test|validation|train); default: as in evaluate.py", "What"
    )
    limit: int = flag(0, "only the first N rows; 0: all, or 500 random ones", "What", min=0)
    preset: str = flag("lab", "model size without --ckpt (lab|big|tiny)", "What")
    beam: int = flag(1, "beam size; 1: greedy search", "What", min=1, max=1000)
    length_penalty: float = flag(1.0, "as in evaluate.py", "What", min=0, max=10)
    contestants: str = flag(
        "", "who takes part, separated by commas; default: those of the page", "How"
    )
    device: str = flag("cpu", "cpu, cuda or cuda:N", "How")
    threads: int = flag(2, "compute threads per contestant", "How", min=1)
    rounds: int = flag(3, "turns per contestant", "How", min=1)
    json: str = flag("", "table in the form of docs/results/ that gets the rows", "How")


@dataclass
class Sentences:
    """What all contestants decode, and with which weights."""

    model: Translator
    sources: list[list[int]]  # token ids without end token, none empty
    source_ids: dict[str, int]  # {"pad": …, "bos": …, "eos": …}
    target_ids: dict[str, int]
    target_tokenizer: Any = None
    references: list[str] = field(default_factory=list)  # texts; none for random weights


def main(config: Config) -> list[Row]:
    """Take turns and print the table."""
    # The device must exist. In this process the check would occupy memory of the GPU.
    in_new_process(choose_device, config.device, 0)
    check_table(config.json, COLUMNS)
    default = ON_CPU if config.device == "cpu" else ON_GPU
    names = choose(config.contestants or default, [*OURS, *CT2])
    sentences = trained_model(config) if config.ckpt else random_model(config)
    with tempfile.TemporaryDirectory() as folder:
        return race(config, names, sentences, Path(folder))


def trained_model(config: Config) -> Sentences:
    """A run and the rows that evaluate.py would score."""
    trained = load_trained(config.ckpt)
    scored = choose_rows(
        Evaluation(data=config.data, split=config.split, limit=config.limit), trained
    )
    longest = trained.model.config.longest_sentence
    lines = [normalise(source) for source in scored.sources()]
    sources = encode(trained.source_tokenizer, lines, longest)
    collate = collate_for(trained)
    return Sentences(
        trained.model,
        [source for source in sources if source],
        collate.source_ids,
        collate.target_ids,
        trained.target_tokenizer,
        [text for text, source in zip(scored.references(), sources) if source],
    )


def random_model(config: Config) -> Sentences:
    """Random weights; no output ends before its limit, 40 tokens."""
    torch.manual_seed(1)
    vocabulary = 16000
    special = {"pad": 0, "bos": 1, "eos": 2}
    model = make_translator(ModelConfig(vocabulary, vocabulary, **SIZES[config.preset])).eval()
    model.output.bias.data[special["eos"]] = -1e9
    sources = torch.randint(3, vocabulary, (config.limit or 500, 19)).tolist()
    return Sentences(model, sources, special, special)


def race(config: Config, names: list[str], sentences: Sentences, folder: Path) -> list[Row]:
    """Measure, compare the outputs, and add the rows to the table."""
    (folder / "sources.json").write_text(json.dumps(sentences.sources), encoding="utf-8")
    torch.save(sentences.model.state_dict(), folder / "weights.pt")
    task = Task(
        "decode",
        threads=config.threads,
        device=config.device,
        folder=str(folder),
        sizes=asdict(sentences.model.config),
        source_ids=sentences.source_ids,
        target_ids=sentences.target_ids,
        beam=config.beam,
        length_penalty=config.length_penalty,
    )
    contestants = {name: OURS[name] for name in names if name in OURS}
    for name in names:
        if name in CT2:
            export(sentences, folder / "ctranslate2")
            contestants[name] = fastest_setting(name, task)
    lengths = torch.tensor([len(source) + 1 for source in sentences.sources])
    limits = output_limit(lengths, sentences.model.config.max_length).tolist()
    baseline: list[list[int]] = []  # the outputs of the first contestant

    def turn(name: str) -> Figures | None:
        """One turn of a contestant; None if it could not run."""
        figures = start(name, contestants[name], task)
        if figures is None:
            return None
        outputs = json.loads((folder / "outputs.json").read_text(encoding="utf-8"))
        if not baseline:
            baseline.extend(outputs)
        # An output counts its end token, if it has one.
        tokens = sum(min(len(output) + 1, limit) for output, limit in zip(outputs, limits))
        same = sum(output == other for output, other in zip(outputs, baseline))
        figures["tokens_per_second"] = tokens / figures["seconds"]
        figures["equal"] = same / len(outputs)
        if sentences.references:
            texts = decode(sentences.target_tokenizer, outputs)
            figures["bleu"] = corpus_bleu(references=sentences.references, hypotheses=texts)
        return figures

    search = "greedy search" if config.beam == 1 else f"beam {config.beam}"
    title = f"{search}, {len(limits):,} sentences of {config.ckpt or 'random weights'}"
    rows = measure(title, names, turn, "tokens_per_second", config.rounds, names[0])
    machine = hardware(config.threads, config.device)
    add_rows(config.json, [as_cells(row, contestants, config.beam, machine) for row in rows])
    return rows


def export(sentences: Sentences, folder: Path) -> None:
    """Write the weights for CTranslate2; a token's name is its number."""
    if folder.exists():
        return
    sizes = sentences.model.config
    sources = name_special(list(map(str, range(sizes.source_vocab))), sentences.source_ids)
    targets = name_special(list(map(str, range(sizes.target_vocab))), sentences.target_ids)
    try:
        convert(sentences.model, sources, targets, folder)
    except ModuleNotFoundError:
        raise UserError(
            "CTranslate2 is not installed; pip install ctranslate2==4.8.5, "
            "or leave it out with --contestants"
        ) from None


def fastest_setting(name: str, task: Task) -> Contestant:
    """CTranslate2 with the setting that decodes every fourth sentence fastest."""
    from ctranslate2 import __version__ as version

    divisions = {(task.threads, 1), (1, task.threads)}
    settings = {}
    for workers, threads in sorted(divisions):
        for batch in BATCHES:
            kind = CT2[name]
            contestant = Contestant(
                "ct2",
                f"{kind} {workers} {threads} {batch}",
                f"CTranslate2 {version}, {kind}, {workers} × {threads} threads, batch {batch}",
                f"CTranslate2 {version}，{kind}，{workers} × {threads} 线程，每批 {batch} 句",
            )
            figures = start(name, contestant, replace(task, part=4))
            if figures is None:
                raise UserError(f"{name} cannot be measured here; leave it out with --contestants")
            print(f"{contestant.english}: {figures['seconds']:.2f} s for a quarter", flush=True)
            settings[contestant.variant] = (figures["seconds"], contestant)
    _, fastest = min(settings.values(), key=lambda setting: setting[0])
    return fastest


def as_cells(row: Row, contestants: dict[str, Contestant], beam: int, machine: dict) -> dict:
    """A row of the page."""
    contestant = contestants[row.contestant]
    figures = row.figures
    search = {"en": "greedy", "zh": "贪心"}
    if beam > 1:
        search = {"en": f"beam {beam}", "zh": f"束宽 {beam}"}
    return {
        "who": {"en": contestant.english, "zh": contestant.chinese},
        "search": search,
        "seconds": f"{figures['seconds']:.1f}",
        "tokens": round(figures["tokens_per_second"]),
        "ratio": f"{row.ratio:.2f}" if row.ratio else "–",
        "bleu": f"{figures['bleu']:.2f}" if "bleu" in figures else "–",
        "equal": f"{100 * figures['equal']:.1f} %",
        "memory": f"{figures['peak_gib']:.2f}",
        "hardware": machine,
        "commit": commit(),
    }


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "compare decoding speed")))
