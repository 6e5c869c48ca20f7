"""Tables of runs: each row is a run of labs.gpt in processes of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from labs.gpt.measure import cores


def run_row(flags: list[str], processes: int, run: Path, minutes: float) -> dict:
    """Train with these flags; returns the run's result.json, or {"failed": one line}.

    A row that has succeeded with the same flags is not run again. `minutes`: the row's time limit.
    """
    run = run.resolve()
    launcher = ["-m"]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc_per_node", str(processes), "-m", "--"]
    words = [sys.executable, *launcher, "labs.gpt", "--run", str(run), *flags]
    done = run / "outcome.json"
    if done.exists():
        outcome = json.loads(done.read_text(encoding="utf-8"))
        if outcome["words"] == words and "failed" not in outcome:
            return outcome
    shutil.rmtree(run, ignore_errors=True)  # of an interrupted row, or with other flags
    # Every row has the same cores, which its processes share.
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores() // processes))}
    options = dict(env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    result = run / "result.json"
    with subprocess.Popen(words, **options) as process:
        try:
            _, errors = process.communicate(timeout=minutes * 60)
            if process.returncode < 0:  # 9 mostly means that the memory was full
                errors += f"\nerror: ended by signal {-process.returncode}"
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its processes; after a kill they would go on
            process.communicate()
            result.unlink(missing_ok=True)
            errors = f"error: not done after {minutes:g} minutes"
    outcome = {"failed": reason(errors)}
    if result.exists():
        outcome = json.loads(result.read_text(encoding="utf-8"))
    outcome["words"] = words
    run.mkdir(parents=True, exist_ok=True)
    done.write_text(json.dumps(outcome), encoding="utf-8")
    return outcome


def reason(errors: str) -> str:
    """The line of a run's standard error that says why it ended.

    Our own message if there is one, else the signal that torchrun names, else the exception.
    """
    ours = re.findall(r"^error(?: \(rank \d+\))?: (.*)$", errors, re.MULTILINE)
    # That another process has ended is what the other ranks say.
    first = [line for line in ours if "another process of this run" not in line]
    signals = re.findall(r"Signal \d+ \(\w+\) received by PID \d+", errors)
    exceptions = re.findall(r"^(?:\[rank\d+\]: )?(\w+(?:Error|Exception): .*)$", errors, re.M)
    candidates = [*first, *signals, *exceptions, *ours, "ended without a message"]
    return candidates[0][:150].replace("|", "/")


def markdown_row(cells) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |\n"


def write_table(folder: Path, head: tuple, rows: list[list], outcomes: list[dict]) -> None:
    """Write table.md, and table.json with all figures of the runs."""
    text = markdown_row(head) + "|---" * len(head) + "|\n" + "".join(map(markdown_row, rows))
    (folder / "table.md").write_text(text, encoding="utf-8")
    text = json.dumps(outcomes, indent=2, ensure_ascii=False) + "\n"
    (folder / "table.json").write_text(text, encoding="utf-8")
