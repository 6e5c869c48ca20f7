"""Make the report of a run, from the files that it left: a page that opens without network, Markdown, PNG pictures.

python report.py                                   # the newest run of any script → runs/NAME/report/report.html
python report.py runs/NAME --language en --out DIR # this one, in English, somewhere else
python report.py runs/A runs/B                     # several runs on one page
python report.py runs/A runs/B --compare           # only print whether B translates better than A: paired bootstrap
python report.py runs/A --compare                  # the same of a run's evaluations: greedy or beam search
"""

from dataclasses import dataclass

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Every setting of a report."""

    out: str = flag("", "folder of the report; report/ in the (first) run", "Options")
    language: str = flag("zh", "language of the page (zh|en)", "Options")
    compare: bool = flag(
        False, "only print the paired bootstrap of the runs, or of one run's scores", "Options"
    )


if (
    __name__ == "__main__"
):  # before the heavy imports, so that --help and a wrong flag answer at once
    config = parse_flags(Config, "the report of one run or more", positional="runs")

import torch

from loading import load_trained
from model import ModelConfig, Translator, training_flops
from tools.reporting import sections
from tools.reporting.attention import Attention
from tools.reporting.page import Page
from tools.reporting.reading import RunFiles, newest_run, read_runs, rows_of
from validation import attention_of


def report(config: Config) -> None:
    """Read the runs; add the sections in the order they are read in; write the page."""
    runs = read_runs(config.runs or [newest_run()])
    if config.compare:
        print(sections.comparison_in_lines(runs))
        return
    described = {run.name: description for run in runs if (description := describe(run))}
    page = Page("Training report", config.language, config.out or runs[0].folder / "report")
    with page.later():  # the summary says what is missing, which the sections behind it find out
        sections.environment(page, runs)
        sections.data(page, runs)
        sections.model(page, runs, described)
        sections.curves(page, runs)
        sections.hardware(page, runs)
        sections.speed(page, runs)
        sections.results(page, runs)
        sections.comparison(page, runs)
        shown = sections.translations(page, runs)
        sections.attention(page, runs, look, *shown)
        sections.own_pictures(page, runs)
        sections.settings(page, runs)
    sections.summary(page, runs, described)
    print(f"written to {page.write()}; report.md and {len(page.pictures)} pictures lie beside it")


def describe(run: RunFiles) -> sections.Described | None:
    """The model of a run of train.py; None for a lab's, whose script prints its own into the log."""
    try:
        with torch.device("meta"):  # shapes without numbers
            model = Translator(ModelConfig(**run.model))
        pairs, tokens = run.data.get("counts", {}).get("kept"), run.data.get("tokens")
        flops = pairs and training_flops(
            model.config, tokens["source"] / pairs + 1, tokens["target"] / pairs + 1
        )
    except (TypeError, KeyError, UserError):
        return run.model and run.missing.append(
            ("model.json", "damaged", "the sizes of the model are unknown")
        )
    return sections.Described(
        str(model), sum(weights.numel() for weights in model.parameters()), flops
    )


def look(run: RunFiles, name: str, chosen: list[int]) -> list[Attention]:
    """Where the checkpoint that was scored looks for its translations of these rows."""
    trained = load_trained(run.scored(name), say=lambda _: None)
    tokenizers, rows = (trained.source_tokenizer, trained.target_tokenizer), rows_of(run, name)
    return [
        attention_of(trained.model, tokenizers, rows[row][0], run.hypotheses[name][row])
        for row in chosen
    ]


if __name__ == "__main__":
    run_script(lambda: report(config))
