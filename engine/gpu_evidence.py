"""Evidence that a run trained on a GPU: what `nvidia-smi` shows meanwhile, for the report."""

import subprocess
from datetime import datetime
from pathlib import Path

FILE = "nvidia-smi.txt"
LONGEST = 20  # seconds; on a machine whose driver was not loaded nvidia-smi takes about two


def keep_nvidia_smi(folder: Path, when: str) -> bool:
    """Append the output of `nvidia-smi` to nvidia-smi.txt in `folder`; return whether it was there.

    `when` is the heading, such as "step 200". To be called by rank 0 while its process holds the
    GPU. Without nvidia-smi, or if it fails, nothing is written and nothing is raised: no run is to
    end for want of a picture.
    """
    try:
        shown = subprocess.run(
            ["nvidia-smi"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=LONGEST,
            check=True,
        )
        time = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        with (folder / FILE).open("a", encoding="utf-8") as file:
            file.write(f"{when} ({time})\n{shown.stdout.rstrip()}\n\n")
    except (OSError, subprocess.SubprocessError):
        return False
    return True
