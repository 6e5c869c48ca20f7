"""What a run was made on and with: runs/<name>/environment.json, one entry for each time the script was started."""

import os
import platform
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from engine.config import command
from engine.distributed import World
from engine.telemetry import GIB, nvml_of


def environment(world: World) -> dict:
    """Machine, versions, commit and command of this process; None for what cannot be found out."""
    facts = {"begun": time.strftime("%Y-%m-%d %H:%M:%S"), "seconds": None}  # seconds: written at the end
    facts |= {"command": f"{command()} {shlex.join(sys.argv[1:])}".strip(), "commit": None, "driver": None}
    facts |= {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    facts |= {"system": platform.platform(), "cpu": platform.processor(), "cores": os.cpu_count()}
    facts |= {"threads": torch.get_num_threads(), "processes": world.size, "gpu": None, "gpu_memory_gib": None}
    with suppress(OSError, subprocess.SubprocessError):  # "-dirty": files were changed since that commit
        words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        told = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=True)
        facts["commit"] = told.stdout.strip()
    with suppress(OSError, IndexError):  # Linux alone tells the processor's name so
        facts["cpu"] = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1].split("\n")[0]
    if world.device.type == "cuda":
        card = torch.cuda.get_device_properties(world.device)
        facts |= {"gpu": card.name, "gpu_memory_gib": round(card.total_memory / GIB, 1)}
        with suppress(Exception):  # no package, no permission: a run does not need it
            facts["driver"] = nvml_of(world.device)[0].nvmlSystemGetDriverVersion()
    return facts
