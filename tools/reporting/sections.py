"""The parts of a report, each a function that adds to the page; every table has one column a run."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.errors import UserError
from text.bleu import Compared, paired_bootstrap, sentence_scores
from text.cleaning import REASONS
from tools.reporting import figures
from tools.reporting.attention import picture
from tools.reporting.page import Page
from tools.reporting.reading import Fact, RunFiles, rows_of

MOST_COMPARED = 50_000  # rows: the paired bootstrap takes 72 kB of memory for each
SHOWN = 3  # best, middle and worst translations, so many of each


@dataclass
class Described:
    """What a script that knows the model tells of one run's."""

    layers: str  # as print(model) shows them
    parameters: int
    pair_flops: (
        float | None
    )  # operations of training on one pair of mean lengths; None: lengths unknown


def header(runs: list[RunFiles]) -> list:
    """The first row of a table: one column a run."""
    return ["run", *(Fact(run.name, run.name, run.name) for run in runs)]


def table(
    page: Page, runs: list[RunFiles], rows: dict[str, Callable], mark: set[int] = frozenset()
) -> None:
    """One row a label, one column a run."""
    page.table(header(runs), [[label, *map(of, runs)] for label, of in rows.items()], mark)


def summary(page: Page, runs: list[RunFiles], described: dict[str, Described]) -> None:
    """How the runs ended, their best figures and every BLEU; what could not be read."""
    page.heading("Summary")
    page.note("Hover over a number to see the file it is from.")
    rows = {
        "status": status,
        "time": RunFiles.seconds,
        "steps": last_step,
        "parameters": lambda run: parameters(run, described),
        "last training loss": partial(RunFiles.figure, tag="train/loss", summary="last"),
        "best validation loss": partial(RunFiles.figure, tag="valid/loss", summary="min"),
        "best validation perplexity": partial(
            RunFiles.figure, tag="valid/perplexity", summary="min"
        ),
        "best validation BLEU (smoothed)": partial(
            RunFiles.figure, tag="valid/bleu", summary="max", form=".2f"
        ),
        "test accuracy": partial(RunFiles.figure, tag="test/accuracy", summary="last", form=".2%"),
        "test errors": partial(RunFiles.figure, tag="test/errors", summary="last", form=",.0f"),
    }
    for name in dict.fromkeys(name for run in runs for name in run.results):
        rows[f"BLEU {name}"] = partial(
            RunFiles.fact, file=f"{name}.json", keys=("nltk",), form=".2f"
        )
    table(page, runs, rows)
    for run in runs:
        if run.missing:
            page.heading("What is missing", 3)
            page.missing([(run.name, *words) for words in dict.fromkeys(run.missing)])


def status(run: RunFiles) -> Fact | str:
    """The last words of its log, or that it is under way."""
    words = run.last_words()
    if run.running:
        return "under way"
    return Fact(words, words, f"{run.name}/train.log") if words else "no last words"


def last_step(run: RunFiles) -> Fact | None:
    """The step it stopped after, as the log says: an interrupted run is steps ahead of its last record. Else that one's."""
    if run.last_words() and (told := run.logged(r"stopped after step ([\d,]+)")):
        return told
    if not run.records:
        return None
    step = run.records[-1]["step"]
    return Fact(step, f"{step:,}", f"{run.name}/metrics.jsonl#step#last")


def parameters(run: RunFiles, described: dict[str, Described]) -> Fact | None:
    """Their number: of a model that can be built counted, else as the log says."""
    if run.name in described:
        count = described[run.name].parameters
        return Fact(count, f"{count:,}", f"computed from {run.name}/model.json")
    return run.logged(r"(\d[\d,]*) parameters")


def environment(page: Page, runs: list[RunFiles]) -> None:
    """Machines and versions of each run's starts; when and how it began, and the command that went on with it."""
    page.heading("Environment")

    def of(key: str, start: int = -1) -> Callable:
        return partial(RunFiles.fact, file="environment.json", keys=(start, key))

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
    rows = {label: partial(of_all_starts, key=key) for label, key in keys.items()}
    rows |= {"begun": of("begun", 0), "command": of("command", 0), "time": RunFiles.seconds}
    rows["resumed by"] = lambda run: of("command")(run) if len(run.environment) > 1 else None
    table(page, runs, rows)


def of_all_starts(run: RunFiles, key: str) -> Fact | None:
    """What environment.json says; where a run went on elsewhere, one value after another, each once."""
    told = dict.fromkeys(str(start.get(key) or "—") for start in run.environment)
    if len(told) < 2:
        return run.fact("environment.json", (-1, key))
    return Fact(text := " → ".join(told), text, f"{run.name}/environment.json#*.{key}")


def data(page: Page, runs: list[RunFiles]) -> None:
    """Counts, what was dropped, lengths; of a lab's run what its script said."""
    page.heading("Data")

    def of(*keys, form: str = ",") -> Callable:
        return partial(RunFiles.fact, file="data.json", keys=keys, form=form)

    rows = {
        "data set": partial(RunFiles.fact, file="config.json", keys=("data",)),
        "pairs read": of("counts", "read"),
        "pairs kept": of("counts", "kept"),
    }
    rows |= {words: of("counts", reason) for reason, words in REASONS.items()}
    rows |= {"validation rows": of("validation_rows"), "unknown tokens": of("unknown", form=".2%")}
    for side in ("source", "target"):
        rows |= {f"{page.say('vocabulary')} ({page.say(side)})": of("vocabulary", side)}
        rows |= {f"{page.say('tokens')} ({page.say(side)})": of("tokens", side)}
    table(page, runs, rows)
    for run in runs:
        if opening := run.opening():
            page.verbatim(Fact(None, opening, f"{run.name}/train.log"))
    if figure := figures.lengths(runs, page.say):
        page.figures({"sentence lengths": figure})


def model(page: Page, runs: list[RunFiles], described: dict[str, Described]) -> None:
    """Parameters, FLOPs and the printed layers; the same layers of several runs once."""
    page.heading("Model")

    def flops(run: RunFiles) -> Fact | None:
        value = described[run.name].pair_flops if run.name in described else None
        return value and Fact(
            value, f"{value / 1e9:,.3g} G", f"computed from {run.name}/model.json and data.json"
        )

    table(
        page,
        runs,
        {
            "parameters": lambda run: parameters(run, described),
            "FLOPs of a training pair": flops,
            "FLOPs of a training token": lambda run: run.logged(
                r"(\d[\d,]*) FLOPs a training token"
            ),
            "FLOPs of a training image": lambda run: run.logged(
                r"(\d[\d,]*) FLOPs a training image"
            ),
        },
    )
    layers = {
        run.name: described[run.name].layers if run.name in described else run.printed_model()
        for run in runs
    }
    for text in dict.fromkeys(filter(None, layers.values())):
        names = ", ".join(name for name in layers if layers[name] == text)
        source = (
            f"computed from {names}/model.json"
            if names.split(", ")[0] in described
            else f"{names}/train.log"
        )
        page.verbatim(Fact(None, text, source))


def curves(page: Page, runs: list[RunFiles]) -> None:
    """A figure for each quantity, all runs in it."""
    panels = figures.panels_of(runs)
    if not panels:
        return
    page.heading("Training curves")
    page.note(
        "Losses are in nats a token, without label smoothing unless it says so; validation BLEU is smoothed and "
        "of the first rows only."
    ) if any(run.model for run in runs) else None
    page.figures(
        {name: figures.curves(runs, name, tags, page.say) for name, tags in panels.items()}
    )
    page.keep("curves", figures.overview(runs, panels, page.say))


def hardware(page: Page, runs: list[RunFiles]) -> None:
    """Use, memory (GiB) and power (W) of GPU and CPU: drawn over time, mean and highest in a table."""
    drawn = {f"hardware {run.name}": figures.hardware(run, page.say) for run in runs}
    drawn = {name: figure for name, figure in drawn.items() if figure}
    if not drawn:
        return
    page.heading("Hardware over time")
    page.note("100 % of the CPU is one core.")
    page.figures(drawn)
    rows = {}
    for device in ("gpu", "cpu"):
        for name, unit in (
            ("utilisation_percent", "%"),
            ("memory_gib", "GiB"),
            ("power_watt", "W"),
        ):
            for summary_name, words in (("mean", "mean"), ("max", "highest")):
                label = f"{device.upper()} {page.say(name)} ({unit}), {page.say(words)}"
                rows[label] = partial(
                    RunFiles.figure, tag=f"{device}/{name}", summary=summary_name, form=",.1f"
                )
    table(page, runs, rows)


def speed(page: Page, runs: list[RunFiles]) -> None:
    """Medians over the run, and the peak memory in GiB."""
    page.heading("Speed")
    tags = {
        "tokens per second": ("speed/tokens_per_second", ",.0f"),
        "target tokens per second": ("speed/target_tokens_per_second", ",.0f"),
        "images per second": ("speed/images_per_second", ",.0f"),
        "model FLOPs utilisation": ("speed/model_flops_utilisation", ".1%"),
        "padding": ("data/padding_share", ".1%"),
        "waiting for data": ("data/wait_share", ".1%"),
    }
    rows = {
        f"{page.say(label)} ({page.say('median')})": partial(
            RunFiles.figure, tag=tag, summary="median", form=form
        )
        for label, (tag, form) in tags.items()
    }
    rows["peak memory (GiB)"] = partial(
        RunFiles.figure, tag="memory/peak_gib", summary="max", form=".2f"
    )
    table(page, runs, rows)


def result(*keys, form: str = ".2f") -> Callable:
    """→ a function of a run and the `name` of a result: the value there."""
    return lambda run, name: run.fact(f"{name}.json", keys, form)


CARD = {
    "BLEU (nltk, graded)": result("nltk"),
    "lower end of the interval": result("low"),
    "upper end of the interval": result("high"),
    "sacreBLEU": result("sacrebleu"),
    "signature": result("signature"),
    "uncased": result("lowercase"),
    "chrF2": result("chrf"),
    **{f"{n}-gram": result("precisions", n - 1, form=".1f") for n in (1, 2, 3, 4)},
    "brevity penalty": result("brevity_penalty", form=".3f"),
    "length ratio": result("ratio", form=".3f"),
    "sentences": result("sentences", form=","),
    "outputs cut at the length limit": result("capped", form=","),
    "decoding": result("decoding"),
    "checkpoint": result("checkpoint"),
}


def results(page: Page, runs: list[RunFiles]) -> None:
    """The BLEU cards, of one run all side by side, of several one evaluation after another; of a lab the plain numbers."""
    names = dict.fromkeys(name for run in runs for name in run.results)
    cards = [name for name in names if any("nltk" in run.results.get(name, {}) for run in runs)]
    page.heading("Results") if names else None
    if len(runs) == 1 and cards:
        cells = [[label, *(of(runs[0], name) for name in cards)] for label, of in CARD.items()]
        page.table(["", *cards], cells)
    for name in names if len(runs) > 1 else [name for name in names if name not in cards]:
        page.heading(name, 3)
        shown = [run for run in runs if name in run.results]
        keys = dict.fromkeys(key for run in shown for key in run.results[name])
        plain = [key for key in keys if all(is_plain(run.results[name].get(key)) for run in shown)]
        rows = CARD if name in cards else {key: result(key, form=",.6g") for key in plain}
        table(page, shown, {label: partial(of, name=name) for label, of in rows.items()})


def is_plain(value) -> bool:
    """Something for one cell of a table; a list is not."""
    return value is None or isinstance(value, int | float | str)


def shared_results(runs: list[RunFiles]) -> list[str]:
    """The evaluations of which every run has the translations."""
    return [name for name in runs[0].hypotheses if all(name in run.hypotheses for run in runs)]


def translations(page: Page, runs: list[RunFiles]) -> tuple[str, list[int]]:
    """The best, middle and worst of the first run, all runs side by side; → the result, and the first row of each part."""
    runs = [run for run in runs if run.hypotheses] or runs  # a lab's has none
    name = next((name for name in shared_results(runs) if rows_of(runs[0], name)), "")
    rows = rows_of(runs[0], name) if name else []
    runs = [run for run in runs if rows and rows_of(run, name) == rows]  # the same data set
    if not runs:
        return name, []
    references = [reference for _, reference in rows]
    scores = [
        sentence_scores(references, run.hypotheses[name], run.config["target"]) for run in runs
    ]
    # Of equal scores the longer ones: "Yes." is soon right.
    order = sorted(range(len(rows)), key=lambda row: (-scores[0][row], -len(references[row]), row))
    middle = max(0, len(order) // 2 - SHOWN // 2)
    parts = {
        "best": order[:SHOWN],
        "middle": order[middle : middle + SHOWN],
        "worst": order[-SHOWN:][::-1],
    }
    page.heading("Translations")
    page.heading(name, 3)
    page.note(
        "Scores of single sentences are sacreBLEU's sentence BLEU, for reading only: the mean of them is not the "
        "corpus BLEU."
    )
    lines, data = [], runs[0].results[name].get("data", runs[0].config["data"])
    for part, row in ((part, row) for part, numbers in parts.items() for row in numbers):
        line = [part, *(Fact(row, text, f"{data}#{row}") for text in rows[row])]
        for run, score in zip(runs, scores):
            source = f"{run.name}/{name}.txt#{row}"
            line.append(Fact(row, run.hypotheses[name][row], source))
            line.append(Fact(score[row], f"{score[row]:.1f}", f"computed from {source}"))
        lines.append(line)
    systems = [cell for run in runs for cell in (Fact(run.name, run.name, run.name), "score")]
    page.table(["", "source", "reference", *systems], lines)
    return name, [numbers[0] for numbers in parts.values()]


def attention(page: Page, runs: list[RunFiles], look: Callable, name: str, rows: list[int]) -> None:
    """Tables for these rows of a result; `look(run, name, rows)` gives the weights."""
    drawn, runs = {}, [run for run in runs if name in run.hypotheses]
    for run in runs:
        if not rows or not run.model or rows_of(run, name) != rows_of(runs[0], name):
            continue
        try:
            drawn[run.name] = look(run, name, rows)
        except UserError as error:
            run.missing.append(("Cross-attention", str(error)))
    if drawn:
        page.heading("Cross-attention")
        page.note(
            "Columns: source; rows: translation. The darker, the more the last layer looked there."
        )
    for run_name, sentences in drawn.items():
        page.heading(f"{run_name} {name}", 3)
        for number, sentence in enumerate(sentences, 1):
            page.note(sentence.source)
            page.attention(sentence, f"attention {number} {run_name}", picture(sentence))


def compare(runs: list[RunFiles]) -> tuple[str, list[Compared]]:
    """Paired bootstrap of the first evaluation that all runs share: → its file and the figures. Raises `UserError`.

    Of one run: of all its evaluations of the same rows, greedy search first.
    """
    if len(runs) == 1:
        return compare_scores(runs[0])
    for name in shared_results(runs):
        rows = rows_of(runs[0], name) if len(runs[0].hypotheses[name]) <= MOST_COMPARED else []
        if rows and all(rows_of(run, name) == rows for run in runs[1:]):
            references = [reference for _, reference in rows]
            systems = {run.name: run.hypotheses[name] for run in runs}
            return f"{name}.txt", paired_bootstrap(references, systems, runs[0].config["target"])
    raise UserError(
        why_no_rows(runs)
        or f"the runs have no translations of the same rows, at most {MOST_COMPARED:,}; run "
        "evaluate.py with the same flags on each"
    )


def why_no_rows(runs: list[RunFiles]) -> str:
    """Why data sets could not be read again, if so, and what to do."""
    why = dict.fromkeys(words[1] for run in runs for words in run.missing if words[0] == "data set")
    return f"{'; '.join(why)}; put the data back, or run evaluate.py again on each" if why else ""


def compare_scores(run: RunFiles) -> tuple[str, list[Compared]]:
    """The paired bootstrap of one run's evaluations on the same rows; UserError if there is one only."""
    names = [
        name for name, lines in run.hypotheses.items() if len(lines) <= MOST_COMPARED
    ]  # greedy search first
    names = [
        name for name in names if run.results[name].get("rows") == run.results[names[0]].get("rows")
    ]
    rows = next(filter(None, (rows_of(run, name) for name in names)), []) if len(names) > 1 else []
    names = [name for name in names if len(run.hypotheses[name]) == len(rows)]  # others lost lines
    if len(names) < 2:
        raise UserError(
            why_no_rows([run])
            or "--compare needs two runs, or two evaluations of one on the same rows: python "
            f"evaluate.py --ckpt {shlex.quote(str(run.folder))} --beam 4"
        )
    systems = {name: run.hypotheses[name] for name in names}
    return str(run.folder), paired_bootstrap(
        [reference for _, reference in rows], systems, run.config["target"]
    )


def comparison(page: Page, runs: list[RunFiles]) -> None:
    """The paired bootstrap of several translation runs."""
    runs = [run for run in runs if run.model]  # a lab's translates nothing
    if len(runs) < 2:
        return
    try:
        name, systems = compare(runs)
    except UserError as error:
        page.heading("Paired bootstrap")
        page.missing([("--compare", str(error))])
        return
    page.heading("Paired bootstrap")
    page.note(
        "As sacreBLEU does it: both systems on the same resampled rows. p counts one direction: under 0.025 the difference "
        "is hardly chance."
    )
    source = f"computed from {name} of {', '.join(run.name for run in runs)}"

    def number(value: float | None, form: str) -> Fact | None:
        return None if value is None else Fact(value, format(value, form), source)

    page.table(
        [
            "metric",
            "run",
            "score",
            "lower end of the interval",
            "upper end of the interval",
            "p-value",
        ],
        [
            [
                system.metric,
                Fact(system.name, system.name, system.name),
                number(system.score, ".2f"),
                number(system.low, ".2f"),
                number(system.high, ".2f"),
                number(system.p_value, ".4f"),
            ]
            for system in systems
        ],
    )


def settings(page: Page, runs: list[RunFiles]) -> None:
    """Every setting; marked where the runs differ."""
    names = list(dict.fromkeys(name for run in runs for name in run.config))
    if not names:
        return
    page.heading("Settings")
    own = {"run", "resume", "seed"}
    mark = {
        n
        for n, name in enumerate(names)
        if name not in own and len({str(run.config.get(name)) for run in runs}) > 1
    }
    page.note("Only what differs between the runs is marked.") if mark else None
    rows = {f"--{name}": partial(RunFiles.fact, file="config.json", keys=(name,)) for name in names}
    table(page, runs, rows, mark)


def own_pictures(page: Page, runs: list[RunFiles]) -> None:
    """What the lab's script drew itself: filters, confusion matrix, schedule."""
    if pictures := {
        f"{run.name} {path.stem}": path.read_bytes() for run in runs for path in run.pictures
    }:
        page.heading("Pictures of the run")
        page.figures(pictures)


def comparison_in_lines(runs: list[RunFiles]) -> str:
    """The paired bootstrap for the terminal: one line a metric and system, and what is to be known of the scores."""
    name, systems = compare(runs)
    lines = [
        f"{name}, paired bootstrap of 1,000 resamples; p: how often chance alone gives so much in this direction"
    ]
    for system in systems:
        p_value = "compared with" if system.p_value is None else f"p = {system.p_value:.4f}"
        interval = f"95 % [{system.low:.2f}, {system.high:.2f}]"
        lines.append(
            f"{system.metric:<6} {system.name:<30} {system.score:6.2f}  {interval}  {p_value}"
        )
    lines += [
        f"note: {run.name} · {' · '.join(told)}"
        for run in runs
        for told in run.missing
        if "eval/" in told[0]
    ]
    return "\n".join(lines)
