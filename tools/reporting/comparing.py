"""Does one run translate better than another? The paired bootstrap of runs or evaluations."""

import shlex
from collections import defaultdict

from engine.errors import UserError
from text.bleu import Compared, paired_bootstrap
from tools.reporting.reading import DATA_SET, SAMPLE_NOTE, RunFiles, rows_of
from tools.reporting.words import in_language


def shared_results(runs: list[RunFiles]) -> list[str]:
    """The evaluations of which every run has the translations."""
    names = runs[0].hypotheses if runs else []
    return [name for name in names if all(name in run.hypotheses for run in runs)]


def compare(runs: list[RunFiles]) -> tuple[str, list[Compared]]:
    """The paired bootstrap of the first evaluation that all runs share: its file and the figures.

    Of one run: of its evaluations of the same rows, greedy search first. Raises `UserError`.
    """
    if len(runs) == 1:
        return compare_evaluations(runs[0])
    for name in shared_results(runs):
        rows = rows_of(runs[0], name)
        if rows and all(rows_of(run, name) == rows for run in runs[1:]):
            references = [reference for _, reference in rows]
            systems = {run.name: run.hypotheses[name] for run in runs}
            return f"{name}.txt", paired_bootstrap(references, systems)
    raise UserError(
        why_no_rows(runs)
        or "the runs have no translations of the same rows; run evaluate.py with the same flags "
        "on each"
    )


def compare_evaluations(run: RunFiles) -> tuple[str, list[Compared]]:
    """The paired bootstrap of one run's evaluations of the same rows.

    If several sets of rows were evaluated more than once, the first of them is taken.
    """
    by_rows = defaultdict(list)
    for name in run.hypotheses:
        by_rows[run.results[name].get("rows")].append(name)
    names = next((names for names in by_rows.values() if len(names) > 1), [])
    rows = next(filter(None, (rows_of(run, name) for name in names)), [])
    names = [name for name in names if len(run.hypotheses[name]) == len(rows)]
    if len(names) < 2:
        command = f"python evaluate.py --ckpt {shlex.quote(str(run.folder))} --beam 5"
        raise UserError(
            why_no_rows([run])
            or f"--compare needs two runs, or two evaluations of one on the same rows: {command}"
        )
    systems = {name: run.hypotheses[name] for name in names}
    references = [reference for _, reference in rows]
    return str(run.folder), paired_bootstrap(references, systems)


def why_no_rows(runs: list[RunFiles]) -> str:
    """Why data sets could not be read, and what to do; "" if they could."""
    notes = [note for run in runs for note in run.missing if note[0] == DATA_SET]
    reasons = dict.fromkeys(reason.strip("`") for _, reason, *_ in notes)
    if not reasons:
        return ""
    return f"{'; '.join(reasons)}; put the data back, or run evaluate.py again on each"


def comparison_in_lines(runs: list[RunFiles]) -> str:
    """The paired bootstrap for the terminal: one line for each metric and system, and notes."""
    name, systems = compare(runs)
    lines = [
        f"{name}, paired bootstrap of 1,000 resamples; "
        "p: the probability that chance alone gives a difference at least this large, "
        "in this direction"
    ]
    for system in systems:
        p_value = "baseline" if system.p_value is None else f"p = {system.p_value:.4f}"
        interval = f"95 % [{system.low:.2f}, {system.high:.2f}]"
        lines.append(
            f"{system.metric:<6} {system.name:<30} {system.score:6.2f}  {interval}  {p_value}"
        )
    for run in runs:
        notes = [note for note in run.missing if "eval/" in note[0]]
        if run.is_of_sample():
            notes.append((SAMPLE_NOTE,))
        for note in notes:
            texts = [in_language(words, "en") for words in note]
            lines.append(f"note: {' · '.join([run.name, *texts])}")
    return "\n".join(lines)
