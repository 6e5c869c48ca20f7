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


# Before the heavy imports, so that --help and a wrong flag answer at once.
if __name__ == "__main__":
    config = parse_flags(Config, "the report of one run or more", positional="runs")

import torch

from loading import load_trained
from model import ModelConfig, Translator, training_flops
from tools.reporting import sections, written
from tools.reporting.attention import Attention
from tools.reporting.comparing import comparison_in_lines
from tools.reporting.page import Page
from tools.reporting.reading import UNKNOWN, RunFiles, newest_run, read_runs, rows_of
from validation import attention_of


def report(config: Config) -> None:
    """Read the runs, add the sections in their order on the page, write the page."""
    runs = read_runs(config.runs or [newest_run()])
    if config.compare:
        print(comparison_in_lines(runs))
        return
    for run in runs:
        if run.model:
            describe_model(run)
    page = Page("Training report", config.language, config.out or runs[0].folder / "report")
    # The summary stands first, but lists what is missing, which the other sections find out.
    with page.later():
        written.process(page, runs)
        sections.environment(page, runs)
        sections.data(page, runs)
        sections.model(page, runs)
        written.positional_encoding(page, runs)
        sections.curves(page, runs)
        sections.hardware(page, runs)
        sections.speed(page, runs)
        sections.results(page, runs)
        sections.comparison(page, runs)
        shown = sections.translations(page, runs)
        sections.attention(page, runs, look, *shown)
        sections.own_pictures(page, runs)
        written.sources(page, runs)
        sections.settings(page, runs)
    sections.summary(page, runs)
    print(f"written to {page.write()}; report.md and {len(page.pictures)} pictures lie beside it")


def describe_model(run: RunFiles) -> None:
    """Layers, parameters and FLOPs of a run of train.py, computed from its sizes."""
    try:
        with torch.device("meta"):  # shapes without numbers
            model = Translator(ModelConfig(**run.model))
    except (TypeError, UserError):
        run.missing.append(("model.json", "damaged", UNKNOWN["model.json"]))
        return
    run.layers = str(model)
    run.parameters = sum(weight.numel() for weight in model.parameters())
    pairs = run.data.get("counts", {}).get("kept")
    if pairs:
        tokens = run.data["tokens"]
        # A source has its end token besides, a target its begin token.
        lengths = (tokens[side] / pairs + 1 for side in ("source", "target"))
        run.pair_flops = training_flops(model.config, *lengths)


def look(run: RunFiles, name: str, chosen: list[int]) -> list[Attention]:
    """Cross-attention of the scored checkpoint for its translations of these rows."""
    trained = load_trained(run.scored(name), log=lambda _: None)
    tokenizers = (trained.source_tokenizer, trained.target_tokenizer)
    rows = rows_of(run, name)
    return [
        attention_of(trained.model, tokenizers, rows[row][0], run.hypotheses[name][row])
        for row in chosen
    ]


if __name__ == "__main__":
    run_script(lambda: report(config))
