"""Who takes part in a benchmark, and how a turn is started in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

import torch

from benchmarks.measuring import ROOT, Figures
from benchmarks.peers.turn import Task
from engine.errors import UserError
from model import PRESETS, ModelConfig

TINY = {  # to try a command
    "d_model": 32,
    "nhead": 2,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "dim_feedforward": 64,
    "dropout": 0.1,
}
DEFAULTS = {name: getattr(ModelConfig, name) for name in TINY}
SIZES = {name: DEFAULTS | PRESETS[name] for name in ("lab", "big")} | {"tiny": TINY}
LABEL_SMOOTHING = 0.1
LEARNING_RATE = 1e-4
# By default glibc gives large blocks back to the system and takes them again page by page.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


@dataclass(frozen=True)
class Contestant:
    """How to start one of the files in this folder, and its name in a table."""

    module: str  # benchmarks/peers/MODULE.py
    variant: str = ""
    english: str = ""
    chinese: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def ours(variants: Iterable[str]) -> dict[str, Contestant]:
    """This project, in several number formats."""
    return {
        f"ours-{variant}": Contestant(
            "ours", variant, f"this project, {variant}", f"本项目，{variant}"
        )
        for variant in variants
    }


def choose(names: str, known: Iterable[str], flag: str = "--contestants") -> list[str]:
    """ "a,b" → ["a", "b"]. Raises `UserError` for an unknown name, and for none."""
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in known:
            raise UserError(f"{flag} {name!r}: unknown; choose from {','.join(known)}")
    return chosen


def command(contestant: Contestant, task: Task) -> tuple[list[str], dict[str, str]]:
    """The command and the environment variables that start a contestant on a task."""
    job = json.dumps(asdict(replace(task, variant=contestant.variant)))
    words = [sys.executable, "-m", f"benchmarks.peers.{contestant.module}", job]
    threads = {
        "OMP_NUM_THREADS": str(task.threads),
        "MKL_NUM_THREADS": str(task.threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return words, os.environ | threads | contestant.environment


def start(name: str, contestant: Contestant, task: Task) -> Figures | None:
    """The figures of one turn. If there are none, a line says why."""
    words, environment = command(contestant, task)
    process = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    messages = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
    print(f"{name}: left out, {messages[-1]}", flush=True)
    return None


def wait_for_gpu() -> None:
    """Wait until the GPU has finished, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
