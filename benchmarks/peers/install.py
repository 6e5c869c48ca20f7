"""Make the environments of the toolkits that the benchmarks compare with, one each: they do not agree on versions.

    python -m benchmarks.peers.install                  # all
    python -m benchmarks.peers.install fairseq          # one

benchmarks/requirements-NAME.txt → benchmarks/.envs/NAME. What stands there behind "# no-deps:" is installed last and without
what it asks for (a toolkit that asks for an older torch runs on the one above it all the same).
"""

import re
import subprocess
import sys
import venv
from pathlib import Path

from engine.errors import UserError, run_script

BENCHMARKS = Path(__file__).resolve().parents[1]
TOOLKITS = ("opennmt", "fairseq", "ctranslate2")


def python_of(name: str) -> Path:
    """The interpreter of a toolkit's environment, whether it exists or not."""
    return BENCHMARKS / ".envs" / name / "bin" / "python"


def is_installed(name: str) -> bool:
    """Whether the environment was made to its end."""
    return (BENCHMARKS / ".envs" / name / "complete").exists()


def main() -> None:
    """Each of the environments named, anew."""
    names = sys.argv[1:] or TOOLKITS
    if unknown := set(names) - set(TOOLKITS):
        raise UserError(f"no toolkit {', '.join(unknown)}; choose from {', '.join(TOOLKITS)}")
    for name in names:
        file, folder = BENCHMARKS / f"requirements-{name}.txt", BENCHMARKS / ".envs" / name
        alone = re.findall(r"(?m)^# no-deps: (\S+)$", file.read_text(encoding="utf-8"))
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python_of(name)), "-m", "pip", "install", "--quiet"]
        # No build isolation: what is compiled must be compiled against the torch that it will run with.
        for command in ([*pip, "-r", str(file)], [*pip, "--no-deps", "--no-build-isolation", *alone] if alone else []):
            if command and subprocess.run(command).returncode:
                raise UserError(f"pip cannot install {name}; what it said stands above. The benchmarks run without it")
        (folder / "complete").touch()
        print(f"{name}: installed in {folder}", flush=True)


if __name__ == "__main__":
    run_script(main)
