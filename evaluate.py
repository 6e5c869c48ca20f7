"""Score a trained model: translate a split greedily and print the BLEU card.

python evaluate.py                                       # the newest run, its own data
python evaluate.py runs/NAME --beam 4                    # a run, a checkpoint or a weights file
python evaluate.py runs/NAME --average 5                 # the mean of the last five checkpoints
torchrun --nproc_per_node 2 evaluate.py runs/NAME        # each process translates a part
python evaluate.py --quiet                               # the score alone; --json: all figures

The model reads a source sentence and nothing else, and writes its own translation token by token.
The references are the raw text of the data set. Both facts make the score a BLEU; see
docs/evaluation.md on the number that the handout's `evaluate()` would give.
"""

from dataclasses import dataclass

from engine.config import beside, checked, flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Every setting of an evaluation."""

    ckpt: str = flag(
        "",
        "run, checkpoint folder or weights file; default: the newest run",
        "What",
        first_word=True,
    )
    data: str = flag("", "data to score; default: the data of the run", "What")
    source: str = flag("", "source column of the data; default: as in the run", "What")
    target: str = flag("", "column with the references; default: as in the run", "What")
    split: str = flag(
        "",
        "split (test|validation|train); default: test, validation or cut from train",
        "What",
    )
    limit: int = flag(0, "score only the first N rows; 0: all rows", "What", min=0)
    average: int = flag(1, "average the weights of the last N checkpoints", "What", min=1)

    beam: int = flag(1, "beam size; 1: greedy search, as in the handout", "How", min=1, max=1000)
    length_penalty: float = flag(
        1.0, "beam search: a larger value makes longer outputs", "How", min=0, max=10
    )
    teacher_forced: bool = flag(
        False, "also print the teacher-forced accuracy, which is NOT a BLEU", "How"
    )
    precision: str = flag(
        "auto", "number format (auto|fp32|bf16|fp16|int8); int8: faster on a CPU", "How"
    )
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "How")
    fast: bool = flag(True, "faster code for PyTorch's own layers; false: PyTorch alone", "How")

    out: str = flag("", "file for the translations, one per line", "Output")
    quiet: bool = flag(False, "print the score alone", "Output")
    json: bool = flag(False, "print the figures as JSON, and all else on stderr", "Output")

    def __post_init__(self):
        # A --beam below 1 has an error of its own.
        if self.length_penalty != 1 and self.beam == 1:
            raise UserError("--length_penalty needs --beam 2 or larger")
        if self.quiet and self.json:
            raise UserError("--quiet and --json exclude each other; give one of them")


# Before the heavy imports, so that --help and a wrong flag answer at once.
if __name__ == "__main__":
    settings = parse_flags(Config, "print the BLEU of a trained model")

import errno
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from pathlib import Path

import torch

from data import collate_for
from engine import checkpoint, distributed
from engine.distributed import World
from engine.files import atomic_write
from engine.precision import Precision
from engine.telemetry import progress_bar
from loading import Trained, choose_checkpoint, load_for_decoding
from text.bleu import bleu_card, card_lines, labelled, note
from text.cleaning import held_out_rows, missing_splits, normalise, split_to_score
from text.reading import (
    SAMPLE_NOTICE,
    ParallelText,
    find_text,
    fingerprint_of,
    hash_of_files,
    is_sample,
)
from text.subwords import encode
from translation import Translations, translate_lines


def evaluate(config: Config) -> None:
    """Load the model, translate, score, print. All ranks translate; rank 0 scores and prints.

    Raises `UserError` for a model, data or places that cannot be used.
    """
    world = distributed.init(checked(config).device)
    log = log_of(config, world)
    trained, precision, decoder = load_for_decoding(config, config.average, world, log)
    scored = world.on_main(lambda: choose_rows(config, trained, log))
    log(f"{trained.name}: {scored.data}, split {scored.split}, {len(scored.rows):,} rows")
    if config.out:
        world.on_main(lambda: check_writable(Path(config.out)))

    # A translation is made from the source alone: the references are not passed on.
    begun = time.perf_counter()
    with precision.autocast():
        translations = translate_lines(
            decoder,
            trained.source_tokenizer,
            trained.target_tokenizer,
            scored.sources(),
            beam=config.beam,
            length_penalty=config.length_penalty,
            world=world,
            progress=lambda batches: progress_bar(batches, desc="translating", unit="batch"),
        )
    seconds = time.perf_counter() - begun
    match = None
    if config.teacher_forced:
        match = teacher_forced_match(trained, scored, world, precision)

    if translations is not None:  # rank 0 has received those of all ranks
        figures = print_card(config, trained, scored, translations, seconds, log)
        # Number formats round differently, and scores differ a little between them.
        figures["precision"] = "int8" if config.precision == "int8" else precision.name
        if match is not None:
            figures["teacher_forced"] = match
            log(
                f"teacher-forced token match {match:.2f} % — NOT a BLEU and not comparable with "
                "one: at every position the model sees the reference before it"
            )
        name = name_of_score(config, trained, scored)
        save_score(trained.run / "eval", name, figures, translations.texts, log)
        if config.out:
            Path(config.out).write_text(as_lines(translations.texts), encoding="utf-8")
            log(f"translations written to {config.out}, one per line")
        if config.quiet:
            print(f"{figures['nltk']:.2f}")
        if config.json:
            print(json.dumps(figures, indent=2))

    log(f"next: {beside('report.py')} {shlex.quote(str(trained.run))}")
    world.stop()


def log_of(config: Config, world: World) -> Callable[[str], None]:
    """A function that prints a line, unless only the score, or only figures, belong on stdout."""
    if config.quiet or not world.is_main:
        return lambda line: None
    return partial(print, file=sys.stderr) if config.json else print


# ---------------------------------------------------------------- which rows are scored


@dataclass
class Scored:
    """The rows to score, and what a reader of the score must know about them."""

    data: str  # path
    columns: list[str]  # source, target
    split: str  # "test", "validation", "train", or "all": data without test and validation
    note: str  # for the first line of the card, or ""
    is_run_data: bool  # whether the run was trained on these data
    is_sample: bool  # whether these are the bundled sample
    rows: list[tuple[str, str]]  # raw (source, reference)

    def sources(self) -> list[str]:
        """The texts to translate."""
        return [source for source, _ in self.rows]

    def references(self) -> list[str]:
        """The texts that translations are compared with."""
        return [reference for _, reference in self.rows]


def choose_rows(config: Config, trained: Trained, log: Callable = print) -> Scored:
    """Apply the rule for the split, and note for the card what it did.

    The first of these is scored:

    1. the split that --split names;
    2. the data's own test split;
    3. the data's own validation split (the course's data have no test split);
    4. the test rows that train.py cut from train and did not train on.

    Other data than those of the run have no such rows; if they have neither a test nor a validation
    split, all rows are scored. Raises `UserError` if there is no such split, or no rows in it.
    """
    # Without a flag, the data and columns are those of the training.
    run_columns = [trained.config["source"], trained.config["target"]]
    path = os.path.expanduser(config.data or trained.config["data"])
    columns = [config.source or run_columns[0], config.target or run_columns[1]]
    if columns[0] == columns[1]:
        raise UserError(f"--source and --target are both {columns[0]}; name two columns")
    text = find_text(path, columns[0], columns[1], log)
    split = config.split or split_to_score(text)  # the rule; train.py uses the same function

    # The data of the run: in the same place, or a copy anywhere.
    learned = fingerprint_of_training(trained.run)
    same_path = os.path.realpath(path) == os.path.realpath(trained.config["data"])
    is_run_data = columns == run_columns and (same_path or text.fingerprint() == learned)

    notes = []
    if columns == run_columns[::-1]:
        notes.append(f"the model translates from {run_columns[0]} to {run_columns[1]}")
    if split in text.files:
        rows = text.pairs(split)
        if split == "validation" and not config.split:
            notes.append("the data have no test split")
    elif is_run_data and split in missing_splits(text):
        rows = held_out_rows(text)[split]
        notes.append(f"cut from train: the data have no {split} split")
        # If the data had a test split before, nothing was cut, and these rows were learned.
        if text.fingerprint() != learned:
            notes.append("the data have changed: the model may have learned these rows")
    elif is_run_data or config.split:
        splits = ", ".join(text.files)
        raise UserError(f"{path} has no {split} split (it has {splits}); leave --split out")
    else:
        split = "all"
        rows = chain.from_iterable(text.pairs(name) for name in text.files)
        notes.append("the data have neither a test nor a validation split")

    roles = {split} if is_run_data else roles_in_training(text, split, learned)
    # The best of many checkpoints scores a little better on these rows than on new ones.
    if "validation" in roles and is_best(trained, config.average):
        notes.append("it also chose the checkpoint")
    if "train" in roles:
        notes.append("the model has learned these rows")

    rows = list(islice(rows, config.limit or None))
    if not rows:
        raise UserError(f"{path} has no rows in its {split} split; choose another --split")
    if not any(normalise(reference) for _, reference in rows):
        raise UserError(f"{path}: all {len(rows):,} references are empty; add them")
    return Scored(path, columns, split, "; ".join(notes), is_run_data, is_sample(text), rows)


def fingerprint_of_training(run: Path) -> dict[str, str]:
    """The fingerprint of the data that the run was trained on; {} if it is not known."""
    try:
        described = json.loads((run / "data.json").read_text(encoding="utf-8"))
        return dict(described["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):  # handed on without it, or damaged
        return {}


def roles_in_training(text: ParallelText, split: str, learned: dict[str, str]) -> set[str]:
    """The splits of the training data that the scored files are a copy of.

    Data of other splits, or of a single file, may hold one of them under another name.
    """
    scored = text.files if split == "all" else [split]
    contents = [hash_of_files(text.files[name]) for name in scored]
    return {role for role, content in learned.items() if content in contents}


def is_best(trained: Trained, average: int) -> bool:
    """Whether these weights are the run's best checkpoint, which its validation split chose."""
    checkpoints = trained.run / "checkpoints"
    if average > 1 or not checkpoint.steps(checkpoints):  # a run may be handed on without them
        return False
    # Not by the link `best`: some disks have no links.
    best_step = checkpoint.load_state(checkpoint.latest(checkpoints))["best_step"]
    chosen = trained.checkpoint
    folder = chosen.parent if chosen.is_file() else chosen
    return folder.resolve() == (checkpoints / f"step-{best_step}").resolve()


# ---------------------------------------------------------------- the card and its files


def print_card(
    config: Config,
    trained: Trained,
    scored: Scored,
    translations: Translations,
    seconds: float,
    log: Callable[[str], None],
) -> dict:
    """Print the BLEU card and three translations; return all figures, for the score file.

    `seconds` is the time that the translation took.
    """
    card = bleu_card(scored.references(), translations.texts)
    decoding = "greedy"
    if config.beam > 1:  # a search of your own needs a name here and in `name_of_score`
        decoding = f"beam {config.beam}, length penalty {config.length_penalty:g}"
    if config.precision == "int8":
        decoding += ", int8"

    # The first line says what was scored: without it no number means anything.
    about = f" ({scored.note})" if scored.note else ""
    lines = labelled("split", scored.split + about)
    if scored.is_sample:
        lines += labelled("data", SAMPLE_NOTICE)
    lines += card_lines(card)
    lines += labelled("scored", f"{scored.data}, split {scored.split}, {len(scored.rows):,} rows")
    lines += labelled(
        "decoding",
        f"{decoding}; {len(scored.rows) / seconds:,.1f} sentences/s, "
        f"{translations.tokens / seconds:,.0f} tokens/s; "
        f"{translations.capped} of {len(scored.rows):,} outputs reached the length limit "
        "without ending",
    )
    if translations.cut:
        longest = trained.model.config.longest_sentence
        lines += note(
            f"{translations.cut} sources were cut to the model's limit of {longest} tokens"
        )
    log("")
    for line in lines:
        log(line)
    for (source, reference), text in zip(scored.rows[:3], translations.texts):
        log(f"\n  source       {normalise(source)}")
        log(f"  translation  {text}")
        log(f"  reference    {normalise(reference)}")
    log("")

    return {
        "data": scored.data,
        "columns": scored.columns,
        "split": scored.split,
        "note": scored.note,
        "is_sample": scored.is_sample,
        "rows": fingerprint_of(scored.rows),  # scores can be compared if it is the same
        "checkpoint": trained.name,
        "average": config.average,
        "decoding": decoding,
        "seconds": seconds,
        "tokens": translations.tokens,
        "capped": translations.capped,
        **card,
    }


def name_of_score(config: Config, trained: Trained, scored: Scored) -> str:
    """The name of the score file: the split, the search, and the settings that change the score.

    So evaluations with other settings do not overwrite each other's scores.
    """
    name = f"{scored.split}-greedy"
    if config.beam > 1:
        name = f"{scored.split}-beam{config.beam}-lp{config.length_penalty:g}"
    if config.average > 1:
        name += f"-average{config.average}"
    if config.limit:
        name += f"-first{config.limit}"
    if config.precision != "auto":
        name += f"-{config.precision}"
    chosen = trained.checkpoint
    if not is_default(trained, config.average):
        if chosen.name == "model.safetensors":  # as in every checkpoint: its folder has the name
            name += f"-{chosen.parent.name}"
        else:
            name += f"-{chosen.stem}"
    if not scored.is_run_data:
        name += f"-data-{fingerprint_of(scored.rows)}"
    return name


def is_default(trained: Trained, average: int) -> bool:
    """Whether these weights are those that `--ckpt RUN` takes."""
    if not checkpoint.steps(trained.run / "checkpoints"):  # a run may be handed on without them
        return False
    return trained.checkpoint == choose_checkpoint(str(trained.run), average)


def save_score(
    folder: Path, name: str, figures: dict, texts: list[str], log: Callable[[str], None]
) -> None:
    """Write NAME.json, the figures, and NAME.txt, the translations, into `folder`."""
    try:
        folder.mkdir(exist_ok=True)
        atomic_write(folder / f"{name}.txt", as_lines(texts))
        atomic_write(folder / f"{name}.json", json.dumps(figures, indent=2) + "\n")
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
        raise UserError(
            f"--out {path} cannot be written ({error.strerror}); choose another file"
        ) from None


def as_lines(texts: list[str]) -> str:
    """The content of a file with one text per line."""
    return "".join(f"{text}\n" for text in texts)


# ---------------------------------------------------------------- the teacher-forced accuracy

PAIRS_AT_ONCE = 16  # few, because their logits take pairs · tokens · vocabulary · 4 bytes


@torch.inference_mode()
def teacher_forced_match(
    trained: Trained, scored: Scored, world: World, precision: Precision
) -> float:
    """The percentage of reference tokens that the model ranks first, given those before them.

    This is what the argmax of one forward pass measures. It is not a translation, because the
    right answer up to each position was given to the model. docs/evaluation.md says more.
    """
    model = trained.model
    longest = model.config.longest_sentence
    sources = [normalise(source) for source in scored.sources()]
    targets = [normalise(reference) for reference in scored.references()]
    source_ids = encode(trained.source_tokenizer, sources, longest)
    target_ids = encode(trained.target_tokenizer, targets, longest)
    pairs = sorted(zip(source_ids, target_ids), key=lambda pair: len(pair[1]))  # less padding

    collate = collate_for(trained)
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)  # right tokens, all tokens
    # Rank r takes the batches r, r + world size, …
    for first in range(world.rank * PAIRS_AT_ONCE, len(pairs), world.size * PAIRS_AT_ONCE):
        batch = collate(pairs[first : first + PAIRS_AT_ONCE]).to(world.device)
        # The decoder reads the reference here, shifted by the begin token, not its own output.
        with precision.autocast():
            hidden = model.hidden(
                batch.src, batch.src_pad, batch.tgt_in, batch.target_positions
            )  # (N, D)
        # Logits in fp32, as in decoding: in bf16 many of them are equal.
        predicted = model.logits(hidden.float()).argmax(-1)  # (N,)
        totals[0] += (predicted == batch.tgt_out).sum()
        totals[1] += len(predicted)
    right, total = world.sum(totals).tolist()
    return 100 * right / total


if __name__ == "__main__":
    run_script(lambda: evaluate(settings), when_full="give a smaller --beam")
