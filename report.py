"""Make the report of a run from its files: a page that opens without network, Markdown, pictures.

python report.py                                # the newest run -> runs/NAME/report/report.html
python report.py runs/NAME --language en --out DIR
python report.py runs/A runs/B                  # several runs on one page
python report.py runs/A runs/B --compare        # print whether B translates better than A
python report.py runs/A --compare               # the same for the evaluations of one run
"""

from dataclasses import dataclass
from typing import ClassVar

from engine.config import flag, parse_flags
from engine.errors import run_script


@dataclass
class Config:
    """Every setting of a report."""

    # ClassVar, so that it is not a flag: the arguments that belong to no flag.
    runs: ClassVar[list[str]]
    out: str = flag("", "folder of the report; report/ in the (first) run", "Options")
    language: str = flag("zh", "language of the page (zh|en)", "Options")
    compare: bool = flag(
        False,
        "print the paired bootstrap of the runs, or of one run's scores; no report",
        "Options",
    )


# Before the heavy imports, so that --help and a wrong flag answer at once.
if __name__ == "__main__":
    config = parse_flags(Config, "write the report of one or more runs", positional="runs")

from tools.reporting import sections, written
from tools.reporting.comparing import comparison_in_lines
from tools.reporting.page import Page
from tools.reporting.reading import newest_run, read_runs


def report(config: Config) -> None:
    """Read the runs, add the sections to the page in their order, write the page."""
    folders = config.runs
    if not folders:
        folders = [str(newest_run())]
        print(f"no run given, using the newest: {folders[0]}")
    runs = read_runs(folders)
    if config.compare:
        print(comparison_in_lines(runs))
        return
    # First, because the summary lists what could not be read or drawn.
    examples = sections.choose_examples(runs)
    attention = sections.draw_attention(examples)

    title = ("Training report", "实验报告")
    page = Page(title, config.language, config.out or runs[0].folder / "report")
    sections.summary(page, runs)
    written.process(page, runs)
    sections.environment(page, runs)
    sections.data(page, runs)
    sections.model(page, runs)
    written.positional_encoding(page, runs)
    sections.curves(page, runs)
    sections.hardware(page, runs)
    sections.speed(page, runs)
    sections.results(page, runs)
    sections.translations(page, examples)
    sections.attention(page, attention)
    sections.own_pictures(page, runs)
    written.sources(page, runs)
    sections.settings(page, runs)
    print(f"written to {page.write()}; report.md and {len(page.pictures)} pictures lie beside it")


if __name__ == "__main__":
    run_script(lambda: report(config))
