"""Score a trained model: greedy decoding of the test split, else of validation → BLEU card.

    python evaluate.py                                       # the newest run, its own data
    python evaluate.py --ckpt runs/NAME --beam 4             # a run, a checkpoint folder or a weights file
    python evaluate.py --ckpt runs/NAME --average 5          # the mean of the weights of the last five checkpoints
    torchrun --nproc_per_node 2 evaluate.py --ckpt runs/NAME # each sentence once, shared out over the GPUs

The model reads the source only and writes a translation of its own; the reference is the raw text of the data set.
"""

from dataclasses import asdict, dataclass

from engine.config import checked, flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Every setting of an evaluation."""

    ckpt: str = flag("", "run, checkpoint folder or weights file; default: newest run", "What")
    data: str = flag("", "data to score; default: the run's own", "What")
    source: str = flag("", "column of --data to translate; default: as in the run", "What")
    target: str = flag("", "column of --data with the references; default: as in the run", "What")
    split: str = flag(
        "",
        "(test|validation|train); default: test, else validation, else cut",
        "What",
    )
    limit: int = flag(0, "score only the first N rows; 0: all", "What", min=0)
    average: int = flag(1, "average the weights of the last N checkpoints", "What", min=1)

    beam: int = flag(1, "beam size; 1: greedy, the graded way", "How", min=1, max=1000)
    length_penalty: float = flag(
        1.5, "larger: longer outputs; beam search only", "How", min=0, max=10
    )
    teacher_forced: bool = flag(
        False, "also print teacher-forced accuracy, which is NOT a BLEU", "How"
    )
    precision: str = flag(
        "auto", "(auto|fp32|bf16|fp16|int8); int8: fast greedy decoding on a CPU", "How"
    )
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "How")
    out: str = flag("", "file for the hypotheses, one per line", "How")

    def __post_init__(self):
        if self.precision == "int8" and self.beam > 1:
            raise UserError(
                f"--precision int8 decodes greedily; --beam {self.beam} needs another --precision"
            )


if (
    __name__ == "__main__"
):  # before the heavy imports, so that --help and a wrong flag answer at once
    config = parse_flags(Config, "BLEU of a trained model")

import os
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from data import Collate, began_with, cut_batches
from decoding import Translations, translate_lines
from engine import checkpoint, distributed
from engine.precision import Precision
from engine.telemetry import progress
from loading import Trained, choose_checkpoint, load_for_decoding
from model import Translator
from text.bleu import bleu_card
from text.cleaning import held_out_rows, missing_splits, normalise, split_to_score
from text.output import check_writable, keep_score, write_lines
from text.rows import find_text, fingerprint_of, sample_notice
from text.subwords import encode, special_ids


def evaluate(config: Config) -> None:
    """Load, translate, score, print; rank 0 alone prints."""
    world = distributed.start(checked(config).device)
    say = print if world.is_main else lambda *_: None
    trained, precision, steps = load_for_decoding(config, config.average, world, say)
    rows, scored = world.on_main(lambda: load_rows(config, trained))
    say(f"{trained.name}: {scored['data']}, split {scored['split']}, {len(rows):,} rows")
    if hidden := distributed.hidden_gpus():
        say(f"note: {hidden}")
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
    if translations:
        result = report(
            config, trained, scored, rows, translations, time.perf_counter() - begun, say
        )
        if config.out:
            write_lines(Path(config.out), translations.texts)
            say(f"hypotheses written to {config.out}, one a line")
        # With auto that of the device: scores differ a little between formats.
        result["precision"] = "int8" if config.precision == "int8" else precision.name
        keep_score(
            trained.run / "eval",
            name_of_score(config, trained, scored),
            result,
            translations.texts,
            say,
        )
    if config.teacher_forced:
        match = teacher_forced_match(trained, rows, world, precision)
        say(
            f"teacher-forced token match {match:.2f} % — NOT a BLEU and not comparable with one: at every position the "
            "model sees the reference before it"
        )
    world.stop()


def report(
    config: Config, trained: Trained, scored: dict, rows, translations: Translations, seconds, say
) -> dict:
    """Print the BLEU card and sample translations; → all figures."""
    references = [target for _, target in rows]
    card = bleu_card(references, translations.texts, trained.config["target"])
    settings = (
        "greedy"
        if config.beam == 1
        else f"beam {config.beam}, length penalty {config.length_penalty:g}"
    )
    settings += ", int8" * (config.precision == "int8")  # a text × False is ""
    note = f" ({scored['note']})" if scored["note"] else ""
    say(f"\nsplit      {scored['split']}{note}")
    if notice := sample_notice(scored["data"]):
        say(f"data       {notice}")
    say("\n".join(card.lines()))
    say(f"scored     {scored['data']}, split {scored['split']}, {len(rows):,} rows")
    say(
        f"decoding   {settings}; {len(rows) / seconds:,.1f} sentences/s, {translations.tokens / seconds:,.0f} tokens/s; "
        f"{translations.capped} outputs reached the length limit without ending"
    )
    if translations.cut:
        longest = trained.model.config.max_length
        say(f"note: {translations.cut} sources were cut to the model's limit of {longest} tokens")
    for (source, reference), text in zip(rows[:3], translations.texts):
        say(
            f"\n  source       {normalise(source)}\n  translation  {text}\n  reference    {normalise(reference)}"
        )
    say()
    result = scored | {"checkpoint": trained.name, "decoding": settings, "average": config.average}
    return (
        result
        | asdict(card)
        | {"capped": translations.capped, "seconds": seconds, "tokens": translations.tokens}
    )


def name_of_score(config: Config, trained: Trained, scored: dict) -> str:
    """The split and the search, and all that is not as by default: no other score's file is written over."""
    name = f"{scored['split']}-{'greedy' if config.beam == 1 else f'beam{config.beam}-lp{config.length_penalty:g}'}"
    name += f"-average{config.average}" * (config.average > 1) + f"-first{config.limit}" * bool(
        config.limit
    )
    name += f"-{config.precision}" * (config.precision != "auto")
    chosen, saved = (
        trained.checkpoint,
        checkpoint.steps(trained.run / "checkpoints"),
    )  # a run may be handed on without
    if (
        chosen.is_file()
        or not saved
        or chosen != choose_checkpoint(str(trained.run), config.average)
    ):
        name += f"-{chosen.parent.name if chosen.name == 'model.safetensors' else chosen.stem}"
    return name + f"-data-{scored['rows']}" * (not scored["own"])


def load_rows(config: Config, trained: Trained) -> tuple[list[tuple[str, str]], dict]:
    """The raw (source, target) rows to score, and what they are: the run's own data unless --data says otherwise.

    Without --split `split_to_score` chooses; of other data with neither test nor validation all rows are scored.
    """
    path, columns = (
        os.path.expanduser(config.data or trained.config["data"]),
        [config.source, config.target],
    )
    columns = [
        column or trained.config[side] for column, side in zip(columns, ("source", "target"))
    ]
    own = os.path.realpath(path) == os.path.realpath(trained.config["data"])
    own &= columns == [trained.config["source"], trained.config["target"]]
    text = find_text(path, *columns)
    split = config.split or split_to_score(text)
    cut = split in missing_splits(text)  # from train
    # Asked only where it matters, since it reads every file: a test file that is there is a test file in any case.
    as_it_was = (cut or (not own and split != "test")) and began_with(
        trained.checkpoint, trained.config, text
    )
    if own and cut and not as_it_was:  # a test file may have been there
        print(
            f"note: {path} is not as the run found it: it may have learned these rows",
            file=sys.stderr,
        )
    own = own or as_it_was  # it has moved
    cut = cut and own
    if cut:
        rows = held_out_rows(text)[split]
    else:
        splits = [split]
        if split not in text.files:
            if own or config.split:
                advice = f"leave --split out to score {split_to_score(text)}"
                if not own and split_to_score(text) not in text.files:
                    advice = "leave --split out to score all rows"
                raise UserError(f"{path} has no {split} split; {advice}")
            split, splits = "all", list(text.files)
        rows = (row for part in splits for chunk in text.rows(part) for row in chunk)
    rows = list(islice(rows, config.limit or None))
    if not rows:
        raise UserError(f"{path} has no rows in its {split} split; choose another --split")
    described = dict(data=path, columns=columns, split=split, own=own, cut=cut)
    note = note_on_split(split, own, cut, chosen=not config.split)
    return rows, described | {"note": note, "rows": fingerprint_of(rows)}  # a hash


def note_on_split(split: str, own: bool, cut: bool, chosen: bool) -> str:
    """What a reader of the score must know of its split; `chosen`: by `split_to_score`, not by --split."""
    notes = []
    if cut:
        lacking = (
            "neither a test nor a validation split" if split == "test" else f"no {split} split"
        )
        notes.append(f"cut from train: the data have {lacking}")
    elif split == "all":
        notes.append("the data have neither a test nor a validation split")
    elif split == "validation" and chosen:
        notes.append("the data have no test split")
    if split == "validation" and own:
        notes.append("it also chose the checkpoint")
    if split == "train" and own:
        notes.append("the model has learned these rows")
    return "; ".join(notes)


@torch.inference_mode()
def teacher_forced_match(
    trained: Trained, rows, world: distributed.World, precision: Precision
) -> float:
    """Percent of reference tokens that are the likeliest one after the reference's own beginning.

    This is what an argmax over one forward pass measures. It is no translation: the answer up to here was given.
    """
    model: Translator = trained.model.eval()
    longest = model.config.max_length - 1
    sides = (trained.source_tokenizer, 0), (trained.target_tokenizer, 1)
    sources, targets = (
        encode(tokenizer, [normalise(row[side]) for row in rows], longest)
        for tokenizer, side in sides
    )
    pairs = sorted(zip(sources, targets), key=lambda pair: len(pair[1]))
    collate = Collate(special_ids(trained.source_tokenizer), special_ids(trained.target_tokenizer))
    widths = np.array([max(map(len, pair)) + 1 for pair in pairs])
    bounds = cut_batches(widths, 8192)  # padded tokens at once
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    for first, last in list(zip(bounds, bounds[1:]))[world.rank :: world.size]:
        batch = collate(pairs[first:last]).to(world.device)
        with precision.autocast():
            hidden = model.hidden(batch.src, batch.src_pad, batch.tgt_in, batch.real)
        chosen = model.output(hidden.float()).argmax(
            -1
        )  # in fp32, as when decoding: bf16 has many equal logits
        totals += torch.tensor([(chosen == batch.tgt_out).sum(), len(chosen)], device=world.device)
    right, total = world.sum(totals).tolist()
    return 100 * right / total


if __name__ == "__main__":
    run_script(lambda: evaluate(config))
