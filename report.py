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
    ckpt: str = flag("", "a run, as its first word", "Options")
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
from tools.reporting.reading import newest_run, read_all

TITLES = {
    "translation": (
        "Training a Transformer that translates",
        "实验报告：训练 Transformer 翻译模型",
    ),
    "lenet": ("LeNet-5 on handwritten digits", "实验报告：用 LeNet-5 识别手写数字"),
    "lightning": ("LeNet-5 with PyTorch Lightning", "实验报告：用 PyTorch Lightning 训练 LeNet-5"),
    "wikitext": ("A language model on WikiText", "实验报告：在 WikiText 上训练语言模型"),
    "gpt": ("Training a GPT in parallel", "实验报告：GPT 的并行训练"),
    "pipeline": ("Pipeline parallelism", "实验报告：流水线并行"),
    "attention_op": ("Attention by hand", "实验报告：手写注意力算子"),
}


def report(config: Config) -> None:
    """Read the runs, add the sections to the page in their order, write the page."""
    folders = config.runs
    if config.ckpt:
        folders = [config.ckpt, *folders]
    if not folders:
        folders = [str(newest_run())]
        print(f"no run given, using the newest: {folders[0]}")
    runs, tables = read_all(folders)
    if config.compare:
        print(comparison_in_lines(runs))
        return
    # First, because the summary lists what could not be read or drawn.
    examples = sections.choose_examples(runs)
    attention = sections.draw_attention(examples)

    rows = [run for table in tables for run in table.runs.values()]
    kinds = {run.kind for run in [*runs, *rows]}
    title = ("Training report", "实验报告")
    if len(kinds) == 1:
        title = TITLES.get(kinds.pop(), title)
    folder = (runs or tables)[0].folder
    page = Page(title, config.language, config.out or folder / "report")
    sections.cover(page, runs)
    if runs:
        sections.summary(page, runs)
    sections.environment(page, [*runs, *rows[:1]])
    if runs:
        sections.settings(page, runs)
        sections.data(page, runs)
        sections.model(page, runs)
        sections.curves(page, runs)
        sections.hardware(page, runs)
        sections.speed(page, runs)
        sections.results(page, runs)
        sections.translations(page, examples)
        sections.attention(page, attention)
        sections.own_pictures(page, runs)
    for table in tables:
        sections.comparison(page, table)
    sections.observations(page)
    written.positional_encoding(page, runs)
    sections.conclusion(page)
    written.sources(page, [*runs, *rows])
    print(f"written to {page.write()}; report.md and {len(page.pictures)} pictures lie beside it")


if __name__ == "__main__":
    run_script(lambda: report(config))
