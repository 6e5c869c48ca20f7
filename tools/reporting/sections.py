"""The parts of a report: functions that add to the page. A table has one column for each run.

A row of a table is a label and where its value is: a place as `RunFiles.look_up` reads it, such a
place with a format, or a function of the run.
"""

from collections.abc import Callable

from engine.errors import UserError
from loading import load_trained
from text.bleu import sentence_scores
from text.cleaning import REASONS
from tools.reporting import figures
from tools.reporting.attention import picture
from tools.reporting.comparing import shared_results
from tools.reporting.page import Page
from tools.reporting.reading import Fact, RunFiles, rows_of
from validation import attention_of

EXAMPLES = 3  # of the best, the middle and the worst translations each
WIDEST = 20  # tokens of a sentence in a picture of attention, which fits the page


def name_of(run: RunFiles) -> Fact:
    """The head of a run's column."""
    return Fact(run.name, run.name, run.name)


def value_of(run: RunFiles, place: str | tuple[str, str] | Callable) -> Fact | str | None:
    """A cell of a table."""
    if callable(place):
        return place(run)
    return run.look_up(place) if isinstance(place, str) else run.look_up(*place)


def table(page: Page, runs: list[RunFiles], rows: dict, mark: set[int] = frozenset()) -> None:
    """Rows by label, and a column for each run; `mark`: numbers of rows to colour."""
    header = ["run", *map(name_of, runs)]
    cells = [[label, *(value_of(run, place) for run in runs)] for label, place in rows.items()]
    page.table(header, cells, mark)


# -------------------------------------------------------------------- the run


def summary(page: Page, runs: list[RunFiles]) -> None:
    """How the runs ended, their best figures, every BLEU, and what could not be read."""
    page.heading("Summary")
    for run in runs:
        if notice := run.notice():
            page.missing([(run.name, notice)])
    page.note("Hover over a number to see the file it is from.")
    rows = {
        "status": status,
        "time": RunFiles.seconds,
        "steps": last_step,
        "parameters": parameters,
        "last training loss": "metrics.jsonl#train/loss#last",
        "best validation loss": "metrics.jsonl#valid/loss#min",
        "best validation perplexity": "metrics.jsonl#valid/perplexity#min",
        "best validation BLEU (smoothed)": ("metrics.jsonl#valid/bleu#max", ".2f"),
        "test accuracy": ("metrics.jsonl#test/accuracy#last", ".2%"),
        "test errors": ("metrics.jsonl#test/errors#last", ",.0f"),
    }
    for name in dict.fromkeys(name for run in runs for name in run.results):
        rows[f"BLEU {name}"] = (f"{name}.json#nltk", ".2f")
    table(page, runs, rows)
    for run in runs:
        if run.missing:
            page.heading("What is missing", 3)
            page.missing([(run.name, *words) for words in dict.fromkeys(run.missing)])


def status(run: RunFiles) -> Fact | str:
    """Why it stopped, or that it runs."""
    if run.running:
        return "under way"
    message = run.final_message()
    if not message:
        return "no final message"
    return Fact(message, message, f"{run.name}/train.log")


def last_step(run: RunFiles) -> Fact | None:
    """The step it stopped after; an interrupted run is some steps ahead of its last record."""
    stopped_after = run.logged(r"stopped after step ([\d,]+)")
    if run.final_message() and stopped_after:
        return stopped_after
    if not run.records:
        return None
    step = run.records[-1]["step"]
    return Fact(step, f"{step:,}", f"{run.name}/metrics.jsonl#step#last")


def parameters(run: RunFiles) -> Fact | None:
    """The number of parameters."""
    return run.logged(r"(\d[\d,]*) parameters")


def environment(page: Page, runs: list[RunFiles]) -> None:
    """Machine and versions."""
    page.heading("Environment")
    keys = {
        "GPU": "gpu",
        "GPU memory (GiB)": "gpu_memory_gib",
        "driver": "driver",
        "CUDA": "cuda",
        "CPU": "cpu",
        "cores": "cores",
        "threads": "threads",
        "processes": "processes",
        "system": "system",
        "Python": "python",
        "torch": "torch",
        "commit": "commit",
    }
    rows = {label: lambda run, key=key: of_all_starts(run, key) for label, key in keys.items()}
    rows["begun"] = "environment.json#0.begun"
    table(page, runs, rows)


def of_all_starts(run: RunFiles, key: str) -> Fact | None:
    """A value of environment.json; where starts differ, all values in order."""
    values = list(dict.fromkeys(str(start.get(key) or "—") for start in run.environment))
    if len(values) < 2:
        return run.look_up(f"environment.json#-1.{key}")
    text = " → ".join(values)
    return Fact(text, text, f"{run.name}/environment.json#*.{key}")


def resumed_by(run: RunFiles) -> Fact | None:
    """The last command, if there were several."""
    return run.look_up("environment.json#-1.command") if len(run.environment) > 1 else None


def data(page: Page, runs: list[RunFiles]) -> None:
    """The data set, the counts of its pairs and tokens, and why pairs were dropped."""
    page.heading("Data")
    rows = {
        "data set": "config.json#data",
        "pairs read": ("data.json#counts.read", ","),
        "pairs kept": ("data.json#counts.kept", ","),
    }
    for reason, words in REASONS.items():
        rows[words] = (f"data.json#counts.{reason}", ",")
    rows["validation rows"] = ("data.json#validation_rows", ",")
    rows["unknown tokens"] = ("data.json#unknown", ".2%")
    for side in ("source", "target"):
        for key in ("vocabulary", "tokens"):
            rows[f"{side} {key}"] = (f"data.json#{key}.{side}", ",")
    table(page, runs, rows)


def model(page: Page, runs: list[RunFiles]) -> None:
    """Parameters, FLOPs and print(model); the same layers of several runs once."""
    page.heading("Model")
    rows = {
        "parameters": parameters,
        "FLOPs of a training token": lambda run: run.logged(r"(\d[\d,]*) FLOPs a training token"),
        "FLOPs of a training image": lambda run: run.logged(r"(\d[\d,]*) FLOPs a training image"),
    }
    table(page, runs, rows)
    printed = {}
    for run in runs:
        printed.setdefault(run.printed_model(), run.name)
    for text, name in printed.items():
        if text:
            page.verbatim(Fact(None, text, f"{name}/train.log"))


# -------------------------------------------------------------------- training


def curves(page: Page, runs: list[RunFiles]) -> None:
    """A figure for each quantity, all runs in it."""
    panels = figures.panels_of(runs)
    if not panels:
        return
    page.heading("Training curves")
    if any(run.is_translation for run in runs):
        page.note(
            "Losses are in nats per token, without label smoothing unless it says so; "
            "validation BLEU is smoothed and of the first rows only."
        )
    drawn = {
        name: figures.curves(runs, name, tags, page.translate) for name, tags in panels.items()
    }
    page.figures(drawn)


def hardware(page: Page, runs: list[RunFiles]) -> None:
    """What nvidia-smi printed; utilisation, memory and power of GPU and CPU over the steps."""
    drawn = {f"hardware {run.name}": figures.hardware(run, page.translate) for run in runs}
    drawn = {name: figure for name, figure in drawn.items() if figure}
    tables = [run for run in runs if run.gpu_table]
    on_gpu = any(start.get("gpu") for run in runs for start in run.environment)
    if not (drawn or tables or on_gpu):
        return
    page.heading("Hardware use")
    for run in tables:
        page.heading(f"{run.name} nvidia-smi", 3)
        page.verbatim(Fact(None, run.gpu_table, f"{run.name}/nvidia-smi.txt"))
    if on_gpu and not tables:
        page.to_write(
            "Add what nvidia-smi shows during training: a screenshot (PNG) or nvidia-smi.txt "
            "in the run's folder appears in this report."
        )
    if drawn:
        page.note("100 % of the CPU is one core.")
        page.figures(drawn)
    rows = {}
    for device in ("gpu", "cpu"):
        for quantity in ("utilisation_percent", "memory_gib", "power_watt"):
            for summary in ("mean", "max"):
                label = f"{page.translate(summary)} {device.upper()} {page.translate(quantity)}"
                rows[label] = (f"metrics.jsonl#{device}/{quantity}#{summary}", ",.1f")
    table(page, runs, rows)


def speed(page: Page, runs: list[RunFiles]) -> None:
    """Medians over the run, and the peak memory."""
    page.heading("Speed")
    page.note("Medians over the run.")
    medians = {
        "tokens per second": ("speed/tokens_per_second", ",.0f"),
        "target tokens per second": ("speed/target_tokens_per_second", ",.0f"),
        "images per second": ("speed/images_per_second", ",.0f"),
        "model FLOPs utilisation": ("speed/model_flops_utilisation", ".1%"),
        "padding": ("data/padding_share", ".1%"),
        "waiting for data": ("data/wait_share", ".1%"),
    }
    rows = {label: (f"metrics.jsonl#{tag}#median", form) for label, (tag, form) in medians.items()}
    rows["peak memory (GiB)"] = ("metrics.jsonl#memory/peak_gib#max", ".2f")
    table(page, runs, rows)


# -------------------------------------------------------------------- results

CARD = {  # label → key in eval/*.json, and format
    "BLEU (nltk, graded)": ("nltk", ".2f"),
    "lower end of the interval": ("low", ".2f"),
    "upper end of the interval": ("high", ".2f"),
    "sacreBLEU": ("sacrebleu", ".2f"),
    "signature": ("signature", ""),
    "uncased": ("lowercase", ".2f"),
    "chrF2": ("chrf", ".2f"),
    "1-gram": ("precisions.0", ".1f"),
    "2-gram": ("precisions.1", ".1f"),
    "3-gram": ("precisions.2", ".1f"),
    "4-gram": ("precisions.3", ".1f"),
    "brevity penalty": ("brevity_penalty", ".3f"),
    "length ratio": ("ratio", ".3f"),
    "sentences": ("sentences", ","),
    "outputs cut at the length limit": ("capped", ","),
    "decoding": ("decoding", ""),
    "checkpoint": ("checkpoint", ""),
}


def results(page: Page, runs: list[RunFiles]) -> None:
    """The BLEU cards, and the plain numbers of a lab's results."""
    names = list(dict.fromkeys(name for run in runs for name in run.results))
    if not names:
        return
    page.heading("Results")
    cards = [name for name in names if any("nltk" in run.results.get(name, {}) for run in runs)]
    if len(runs) == 1 and cards:  # side by side
        run = runs[0]
        lines = [
            [label, *(run.look_up(f"{name}.json#{key}", form) for name in cards)]
            for label, (key, form) in CARD.items()
        ]
        page.table(["", *cards], lines)
        names = [name for name in names if name not in cards]
    for name in names:
        page.heading(name, 3)
        scored = [run for run in runs if name in run.results]
        rows = CARD if name in cards else plain_values([run.results[name] for run in scored])
        rows = {label: (f"{name}.json#{key}", form) for label, (key, form) in rows.items()}
        table(page, scored, rows)


def plain_values(contents: list[dict]) -> dict[str, tuple[str, str]]:
    """The keys whose values fit one cell of a table; a list or a dict does not."""
    keys = dict.fromkeys(key for content in contents for key in content)
    return {
        key: (key, ",.6g")
        for key in keys
        if not any(isinstance(content.get(key), list | dict) for content in contents)
    }


def translations(page: Page, runs: list[RunFiles]) -> tuple[list[RunFiles], str, list[int]]:
    """The best, middle and worst translations of the first run, with those of the others.

    Returns the runs, the name of the result, and the row with the shortest source of each part.
    """
    runs = [run for run in runs if run.hypotheses]  # a lab's run has none
    name = next((name for name in shared_results(runs) if rows_of(runs[0], name)), "")
    if not name:
        return [], name, []
    rows = rows_of(runs[0], name)
    runs = [run for run in runs if rows_of(run, name) == rows]
    references = [reference for _, reference in rows]
    scores = [sentence_scores(references, run.hypotheses[name]) for run in runs]
    # Of equal scores the longer reference first: "Yes." is easily right.
    order = sorted(range(len(rows)), key=lambda row: (-scores[0][row], -len(references[row]), row))
    middle = max(0, len(order) // 2 - EXAMPLES // 2)
    parts = {
        "best": order[:EXAMPLES],
        "middle": order[middle : middle + EXAMPLES],
        "worst": order[-EXAMPLES:][::-1],
    }
    page.heading("Translations")
    page.heading(name, 3)
    page.note(
        "Scores of single sentences are sacreBLEU's sentence BLEU, for reading only: their mean "
        "is not the corpus BLEU."
    )
    file = runs[0].results[name].get("data", runs[0].config["data"])
    lines = []
    for part, numbers in parts.items():
        for row in numbers:
            line = [part, *(Fact(row, text, f"{file}#{row}") for text in rows[row])]
            for run, score in zip(runs, scores):
                source = f"{run.name}/{name}.txt#{row}"
                line.append(Fact(row, run.hypotheses[name][row], source))
                line.append(Fact(score[row], f"{score[row]:.1f}", f"computed from {source}"))
            lines.append(line)
    columns = [column for run in runs for column in (name_of(run), "score")]
    page.table(["", "source", "reference", *columns], lines)
    shortest = [min(part, key=lambda row: len(rows[row][0])) for part in parts.values()]
    return runs, name, shortest


def attention(page: Page, runs: list[RunFiles], name: str, rows: list[int]) -> None:
    """Cross-attention of the scored checkpoints for these rows of a result."""
    drawn = {}
    for run in runs:
        try:
            trained = load_trained(run.scored(name), log=lambda line: None)
        except UserError as error:
            run.missing.append(("Cross-attention", str(error)))
            continue
        tokenizers = (trained.source_tokenizer, trained.target_tokenizer)
        for number, row in enumerate(rows, 1):
            source, _ = rows_of(run, name)[row]
            translation = run.hypotheses[name][row]
            found = attention_of(trained.model, tokenizers, source, translation, WIDEST)
            drawn[f"attention {number} {run.name}"] = picture(found)
    if drawn:
        page.heading("Cross-attention")
        page.note("Columns: source; rows: translation. Darker: more attention of the last layer.")
        page.figures(drawn, "large")


def own_pictures(page: Page, runs: list[RunFiles]) -> None:
    """What the script drew itself, such as filters, and screenshots put into the run's folder."""
    pictures = {f"{run.name} {p.stem}": p.read_bytes() for run in runs for p in run.pictures}
    if pictures:
        page.heading("Pictures of the run")
        page.figures(pictures)


def settings(page: Page, runs: list[RunFiles]) -> None:
    """Every setting; marked where the runs differ."""
    names = list(dict.fromkeys(name for run in runs for name in run.config))
    if not names:
        return
    page.heading("Settings")
    may_differ = {"run", "resume", "seed"}
    mark = set()
    for number, name in enumerate(names):
        values = {str(run.config.get(name)) for run in runs}
        if name not in may_differ and len(values) > 1:
            mark.add(number)
    if mark:
        page.note("Only what differs between the runs is marked.")
    table(page, runs, {f"--{name}": f"config.json#{name}" for name in names}, mark)
