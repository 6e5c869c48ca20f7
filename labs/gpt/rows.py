"""Tables of runs: each row is a run of labs.gpt in processes of its own."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from engine.environment import commit, cpu_name
from engine.errors import UserError
from engine.meters import cores
from engine.signals import caught_signals
from engine.tables import as_cell, markdown_row, markdown_table
from engine.telemetry import Log


class Table:
    """table.md in a folder of runs/, and table.json with all figures; they grow row by row.

    The folder is named for the table, the preset of its models, their precision and the card.
    """

    def __init__(self, name: str, preset: str, precision: str, head: tuple, about: str):
        hardware, card = cpu_name(), "cpu"
        if torch.cuda.is_available():
            hardware = torch.cuda.get_device_name()
            card = hardware.replace(" ", "-")
        # A line below the table: what was measured, and with what.
        self.about = f"{about}; {hardware}, torch {torch.__version__}, commit {commit()}"
        self.folder = Path(f"runs/{name}-{preset}-{precision}-{card}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.head = head
        self.rows = []
        self.outcomes = []
        self.log = Log()

    def train(self, flags: list[str], processes: int) -> dict:
        """Train the next row with these flags; returns the run's result.json, or {"failed": …}.

        Every row uses all cores, divided among its processes. A signal ends the row and the table.
        """
        run = self.folder / f"row-{len(self.rows)}"
        shutil.rmtree(run, ignore_errors=True)
        launcher = ["-m"]
        if processes > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone"]
            launcher += ["--nproc_per_node", str(processes), "-m", "--"]
        command = [sys.executable, *launcher, "labs.gpt", "--run", str(run.resolve()), *flags]
        threads = max(1, cores() // processes)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        output = run.with_suffix(".log")
        with open(output, "w", encoding="utf-8") as file, caught_signals() as stop_asked:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
            while process.poll() is None and not stop_asked():
                time.sleep(0.1)
            if stop_asked():
                process.terminate()  # torchrun ends its workers, which occupy the GPUs
                process.wait()
                raise UserError(f"interrupted; the rows so far are in {self.folder / 'table.md'}")
        result = run / "result.json"
        if result.exists():
            outcome = json.loads(result.read_text(encoding="utf-8"))
            if not outcome["interrupted"]:
                return outcome
        return {"failed": f"failed, see {output.name}"}

    def row_folders(self) -> list[Path]:
        """The folders of the runs so far; of a row that failed it may not exist."""
        return [self.folder / f"row-{number}" for number in range(len(self.rows))]

    def add(self, cells: list, outcome: dict) -> None:
        """Add a row to both files."""
        self.rows.append(cells)
        self.outcomes.append({self.head[0]: cells[0], self.head[1]: cells[1], **outcome})
        text = f"{markdown_table([self.head, *self.rows])}\n\n{self.about}\n"
        (self.folder / "table.md").write_text(text, encoding="utf-8")
        text = json.dumps(self.outcomes, indent=2, ensure_ascii=False) + "\n"
        (self.folder / "table.json").write_text(text, encoding="utf-8")
        self.log(markdown_row(map(as_cell, cells)))
