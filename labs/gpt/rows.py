"""Tables of runs: each row is a run of labs.gpt in processes of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from labs.gpt.measure import cores

# What a run that fails prints, the most useful first: our own message (but not that another rank
# has ended), the signal that torchrun names, an exception.
REASONS = (
    r"^error(?: \(rank \d+\))?: (?!another process of this run)(.*)$",
    r"(Signal \d+ \(\w+\) received by PID \d+)",
    r"^(?:\[rank\d+\]: )?(\w+(?:Error|Exception): .*)$",
)


def run_row(flags: list[str], processes: int, run: Path, minutes: float) -> dict:
    """Train with these flags; returns the run's result.json, or {"failed": one line}.

    `minutes`: the row's time limit. All rows share the same cores among their processes.
    """
    shutil.rmtree(run, ignore_errors=True)
    launcher = ["-m"]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc_per_node", str(processes), "-m", "--"]
    command = [sys.executable, *launcher, "labs.gpt", "--run", str(run.resolve()), *flags]
    threads = max(1, cores() // processes)
    options = dict(env={**os.environ, "OMP_NUM_THREADS": str(threads)}, text=True)
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options
    ) as process:
        try:
            _, errors = process.communicate(timeout=minutes * 60)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its processes; after a kill they would go on
            process.communicate()
            return {"failed": f"not done after {minutes:g} minutes"}
    result = run / "result.json"
    if result.exists():
        return json.loads(result.read_text(encoding="utf-8"))
    return {"failed": reason(errors, process.returncode)}


def reason(errors: str, code: int) -> str:
    """A line that says why a run ended with this output and exit code."""
    for pattern in REASONS:
        found = re.search(pattern, errors, re.MULTILINE)
        if found:
            return found[1][:150].replace("|", "/")
    if code < 0:  # 9 mostly means that the memory was full
        return f"ended by signal {-code}"
    return "ended without a message"


def markdown_row(cells) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |\n"


def write_table(folder: Path, head: tuple, rows: list[list], outcomes: list[dict]) -> None:
    """Write table.md, and table.json with all figures of the runs."""
    text = markdown_row(head) + "|---" * len(head) + "|\n" + "".join(map(markdown_row, rows))
    (folder / "table.md").write_text(text, encoding="utf-8")
    text = json.dumps(outcomes, indent=2, ensure_ascii=False) + "\n"
    (folder / "table.json").write_text(text, encoding="utf-8")
