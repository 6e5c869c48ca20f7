"""Score a trained model: translate a split greedily and print the BLEU card.

    python evaluate.py                                       # the newest run, its own data
    python evaluate.py --ckpt runs/NAME --beam 4             # a run, a checkpoint or a weights file
    python evaluate.py --ckpt runs/NAME --average 5          # the mean of the last five checkpoints
    torchrun --nproc_per_node 2 evaluate.py --ckpt runs/NAME # each GPU translates a part

The model reads a source sentence and nothing else, and writes its own translation word by word.
The references are the raw text of the data set. Both facts make the score a BLEU; see
docs/evaluation.md on the number that the handout's `evaluate()` would give.
"""

from dataclasses import asdict, dataclass

from engine.config import checked, flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Every setting of an evaluation."""

    ckpt: str = flag("", "run, checkpoint folder or weights file; default: the newest run", "What")
    data: str = flag("", "data to score; default: the data of the run", "What")
    source: str = flag("", "source column of the data; default: as in the run", "What")
    target: str = flag("", "column with the references; default: as in the run", "What")
    split: str = flag(
        "", "(test|validation|train); default: test, or validation if there is no test", "What"
    )
    limit: int = flag(0, "score only the first N rows; 0: all rows", "What", min=0)
    average: int = flag(1, "average the weights of the last N checkpoints", "What", min=1)

    beam: int = flag(1, "beam size; 1: greedy search, which is graded", "How", min=1, max=1000)
    length_penalty: float = flag(
        1.5, "beam search: a larger value makes longer outputs", "How", min=0, max=10
    )
    teacher_forced: bool = flag(
        False, "also print the teacher-forced accuracy, which is NOT a BLEU", "How"
    )
    precision: str = flag(
        "auto", "(auto|fp32|bf16|fp16|int8); int8: faster greedy search on a CPU", "How"
    )
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "How")
    out: str = flag("", "file for the translations, one a line", "How")

    def __post_init__(self):
        if self.precision == "int8" and self.beam > 1:
            raise UserError(
                f"--precision int8 decodes greedily; --beam {self.beam} needs another --precision"
            )


# Before the imports that take seconds, so that --help and a wrong flag answer at once.
if __name__ == "__main__":
    config = parse_flags(Config, "print the BLEU of a trained model")

import errno
import json
import os
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from data import began_with, collate_for, cut_batches
from decoding import Translations, translate_lines
from engine import distributed
from engine.files import atomic_write
from engine.precision import Precision
from engine.telemetry import progress
from loading import Trained, choose_checkpoint, load_for_decoding
from model import Translator
from text.bleu import bleu_card
from text.cleaning import held_out_rows, missing_splits, normalise, split_to_score
from text.reading import find_text, fingerprint_of, sample_notice
from text.subwords import encode


def evaluate(config: Config) -> None:
    """Load the model, translate, score, print. All processes translate; rank 0 prints."""
    world = distributed.start(checked(config).device)
    log = print if world.is_main else lambda line: None
    trained, precision, steps = load_for_decoding(config, config.average, world, log)
    rows, scored = world.on_main(lambda: load_rows(config, trained))
    log(f"{trained.name}: {scored['data']}, split {scored['split']}, {len(rows):,} rows")
    if config.out:
        world.on_main(lambda: check_writable(Path(config.out)))

    begun = time.perf_counter()
    with precision.autocast():
        translations = translate_lines(
            trained.model,
            trained.source_tokenizer,
            trained.target_tokenizer,
            [source for source, _ in rows],
            beam=config.beam,
            length_penalty=config.length_penalty,
            world=world,
            steps=steps,
            progress=lambda batches: progress(batches, desc="translating", unit="batch"),
        )
    seconds = time.perf_counter() - begun

    if translations:  # None on all ranks but rank 0
        result = report(config, trained, scored, rows, translations, seconds, log)
        # Number formats round differently, and scores differ a little between them.
        result["precision"] = "int8" if config.precision == "int8" else precision.name
        name = name_of_score(config, trained, scored)
        save_score(trained.run / "eval", name, result, translations.texts, log)
        if config.out:
            Path(config.out).write_text(as_lines(translations.texts), encoding="utf-8")
            log(f"translations written to {config.out}, one a line")

    if config.teacher_forced:
        match = teacher_forced_match(trained, rows, world, precision)
        log(
            f"teacher-forced token match {match:.2f} % — NOT a BLEU and not comparable with one: "
            "at every position the model sees the reference before it"
        )
    world.stop()


# ---------------------------------------------------------------- which rows are scored


def load_rows(config: Config, trained: Trained) -> tuple[list[tuple[str, str]], dict]:
    """The raw (source, target) rows to score, and a description of them for the score file.

    The rule for the split: the one that --split names; without --split the data's test split, or
    their validation split if they have no test split. Data with neither: of the run's own data the
    rows that training cut from train and never saw; of any other data all rows.
    """
    run_columns = [trained.config["source"], trained.config["target"]]
    path = os.path.expanduser(config.data or trained.config["data"])
    columns = [config.source or run_columns[0], config.target or run_columns[1]]
    text = find_text(path, *columns)
    split = config.split or split_to_score(text)
    lacking = split in missing_splits(text)

    # Is this the data that the run was trained on? By its place, or by its content if it has moved.
    same_place = os.path.realpath(path) == os.path.realpath(trained.config["data"])
    same_place = same_place and columns == run_columns
    same_content = False
    if lacking or not same_place:  # comparing the content reads all files: only where it matters
        same_content = began_with(trained.checkpoint, trained.config, text)
    own = same_place or same_content

    cut = lacking and own
    if cut and not same_content:
        # A test split may have been there before, and these rows may have been trained on.
        note = f"note: {path} has changed since the training: the model may have learned these rows"
        print(note, file=sys.stderr)

    if cut:
        rows = held_out_rows(text)[split]
    elif split in text.files:
        rows = rows_of(text, [split])
    elif own or config.split:
        splits = ", ".join(text.files)
        raise UserError(f"{path} has no {split} split (it has {splits}); leave --split out")
    else:
        split = "all"
        rows = rows_of(text, list(text.files))
    rows = list(islice(rows, config.limit or None))
    if not rows:
        raise UserError(f"{path} has no rows in its {split} split; choose another --split")

    best = is_best(trained, config.average)
    note = note_on_split(split, own=own, cut=cut, asked=bool(config.split), best=best)
    described = dict(data=path, columns=columns, split=split, own=own, cut=cut, note=note)
    return rows, described | {"rows": fingerprint_of(rows)}


def rows_of(text, splits: list[str]):
    """All rows of these splits, in order."""
    for split in splits:
        yield from text.pairs(split)


def is_best(trained: Trained, average: int) -> bool:
    """Whether these weights are the run's best checkpoint, which its validation split chose."""
    best = trained.run / "checkpoints" / "best"
    chosen = trained.checkpoint
    folder = chosen.parent if chosen.is_file() else chosen
    return average == 1 and best.exists() and folder.samefile(best)


def note_on_split(split: str, own: bool, cut: bool, asked: bool, best: bool) -> str:
    """What a reader of the score must know about the split; the first line of the card shows it.

    own: the data of the run; cut: from train; asked: by --split; best: see `is_best`.
    """
    notes = []
    if cut and split == "test":
        notes.append("cut from train: the data have neither a test nor a validation split")
    elif cut:
        notes.append(f"cut from train: the data have no {split} split")
    elif split == "all":
        notes.append("the data have neither a test nor a validation split")
    elif split == "validation" and not asked:
        notes.append("the data have no test split")
    # The best of many checkpoints on these rows: a little too good to be the score on new rows.
    if own and split == "validation" and best:
        notes.append("it also chose the checkpoint")
    if own and split == "train":
        notes.append("the model has learned these rows")
    return "; ".join(notes)


# ---------------------------------------------------------------- the card and its files


def report(
    config: Config,
    trained: Trained,
    scored: dict,
    rows: list[tuple[str, str]],
    translations: Translations,
    seconds: float,
    log,
) -> dict:
    """Print the BLEU card and three translations; return all figures, for the score file."""
    references = [target for _, target in rows]
    card = bleu_card(references, translations.texts)
    decoding = "greedy"
    if config.beam > 1:
        decoding = f"beam {config.beam}, length penalty {config.length_penalty:g}"
    if config.precision == "int8":
        decoding += ", int8"

    note = f" ({scored['note']})" if scored["note"] else ""
    log(f"\nsplit      {scored['split']}{note}")
    if notice := sample_notice(scored["data"]):
        log(f"data       {notice}")
    for line in card.lines():
        log(line)
    log(f"scored     {scored['data']}, split {scored['split']}, {len(rows):,} rows")
    log(
        f"decoding   {decoding}; {len(rows) / seconds:,.1f} sentences/s, "
        f"{translations.tokens / seconds:,.0f} tokens/s; "
        f"{translations.capped} outputs reached the length limit without ending"
    )
    if translations.cut:
        longest = trained.model.config.max_length
        log(f"note: {translations.cut} sources were cut to the model's limit of {longest} tokens")
    for (source, reference), text in zip(rows[:3], translations.texts):
        log(f"\n  source       {normalise(source)}")
        log(f"  translation  {text}")
        log(f"  reference    {normalise(reference)}")
    log("")

    result = scored | {"checkpoint": trained.name, "decoding": decoding}
    result |= {"average": config.average, "capped": translations.capped}
    result |= {"seconds": seconds, "tokens": translations.tokens}
    return result | asdict(card)


def name_of_score(config: Config, trained: Trained, scored: dict) -> str:
    """The name of the score file: the split, the search, and all that is not the default.

    So scores of different things never overwrite each other.
    """
    name = f"{scored['split']}-greedy"
    if config.beam > 1:
        name = f"{scored['split']}-beam{config.beam}-lp{config.length_penalty:g}"
    if config.average > 1:
        name += f"-average{config.average}"
    if config.limit:
        name += f"-first{config.limit}"
    if config.precision != "auto":
        name += f"-{config.precision}"
    chosen = trained.checkpoint
    # A file of weights may lie in a run that was handed on without its checkpoints.
    if chosen.is_file() or chosen != choose_checkpoint(str(trained.run), config.average):
        name += f"-{chosen.parent.name if chosen.name == 'model.safetensors' else chosen.stem}"
    if not scored["own"]:
        name += f"-data-{scored['rows']}"
    return name


def save_score(folder: Path, name: str, result: dict, texts: list[str], log) -> None:
    """Write NAME.json, the figures, and NAME.txt, the translations, into `folder`."""
    try:
        folder.mkdir(exist_ok=True)
        atomic_write(folder / f"{name}.txt", as_lines(texts))
        atomic_write(folder / f"{name}.json", json.dumps(result, indent=2) + "\n")
    except OSError as error:
        # Somebody else's run can be scored too. A full disk, however, is an error.
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        log(f"note: {folder} cannot be written to, so the score is not saved")
    else:
        log(f"written to {folder}/{name}.json and .txt")


def check_writable(path: Path) -> None:
    """Raise `UserError` now rather than after the translation. A new file is created empty."""
    try:
        is_pipe_or_device = path.exists() and not path.is_file() and not path.is_dir()
        if not is_pipe_or_device:  # the reader of a pipe would see it closed
            open(path, "a").close()
    except OSError as error:
        reason = error.strerror
        message = f"--out {path} cannot be written ({reason}); choose another file"
        raise UserError(message) from None


def as_lines(texts: list[str]) -> str:
    """The content of a file with one text a line."""
    return "".join(f"{text}\n" for text in texts)


# ---------------------------------------------------------------- the number that is no BLEU


@torch.inference_mode()
def teacher_forced_match(
    trained: Trained, rows: list[tuple[str, str]], world: distributed.World, precision: Precision
) -> float:
    """The percentage of reference tokens that the model ranks first, given those before them.

    This is what the argmax of one forward pass measures. It is not a translation, because the
    right answer up to each position was given to the model. docs/evaluation.md says more.
    """
    model: Translator = trained.model.eval()
    longest = model.config.max_length - 1  # one position is for the begin or end token
    sources = [normalise(source) for source, _ in rows]
    targets = [normalise(target) for _, target in rows]
    pairs = list(
        zip(
            encode(trained.source_tokenizer, sources, longest),
            encode(trained.target_tokenizer, targets, longest),
        )
    )
    pairs.sort(key=lambda pair: len(pair[1]))  # similar lengths together: less padding
    widths = np.array([max(len(source), len(target)) + 1 for source, target in pairs])
    bounds = cut_batches(widths, budget=8192)  # in padded tokens
    batches = list(zip(bounds, bounds[1:]))

    collate = collate_for(trained)
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)  # right tokens, all tokens
    for first, last in batches[world.rank :: world.size]:
        batch = collate(pairs[first:last]).to(world.device)
        with precision.autocast():
            hidden = model.hidden(batch.src, batch.src_pad, batch.tgt_in, batch.real)  # (N, D)
        # Logits in fp32, as in decoding: in bf16 many of them are equal.
        predicted = model.output(hidden.float()).argmax(-1)  # (N,)
        totals[0] += (predicted == batch.tgt_out).sum()
        totals[1] += len(predicted)
    right, total = world.sum(totals).tolist()
    return 100 * right / total


if __name__ == "__main__":
    run_script(lambda: evaluate(config))
