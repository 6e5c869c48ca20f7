"""What a run was made with: machine, versions, commit and command."""

import platform
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from engine.config import command
from engine.devices import cpuinfo
from engine.distributed import World
from engine.memory import GIB
from engine.meters import cores, nvml_of
from engine.precision import Precision


def environment(world: World, precision: Precision | None = None) -> dict:
    """One session of a run, for environment.json. A fact that cannot be found out is None."""
    facts = {
        "begun": time.strftime("%Y-%m-%d %H:%M:%S"),
        "seconds": None,  # written when the session ends
        "command": f"{command()} {shlex.join(sys.argv[1:])}".strip(),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": None,
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "processes": world.size,
        "precision": precision.name if precision else None,
        "gpu": None,
        "gpu_memory_gib": None,
    }
    if world.device.type == "cuda":
        card = torch.cuda.get_device_properties(world.device)
        facts["gpu"] = card.name
        facts["gpu_memory_gib"] = round(card.total_memory / GIB, 1)
        with suppress(Exception):  # no package, no permission: a run does not need it
            nvml, _ = nvml_of(world.device)
            facts["driver"] = nvml.nvmlSystemGetDriverVersion()
    return facts


def commit() -> str | None:
    """The commit of this code; with "-dirty" if files were changed since."""
    with suppress(OSError, subprocess.SubprocessError):
        # Of a copy without its own history, git would name the commit of a repository around it.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("describe", "--always", "--dirty", "--exclude=*")
    return None


def git(*words: str) -> str:
    """What git answers, asked in the folder of this file. Raises `SubprocessError`."""
    answer = subprocess.run(
        ["git", *words],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=5,
        check=True,
    )
    return answer.stdout.strip()


def cpu_name() -> str:
    """The processor's name: Linux has it in /proc only."""
    with suppress(IndexError):
        return cpuinfo().split("model name\t: ")[1].split("\n")[0]
    return platform.processor()
