"""Make the environments of the toolkits that the benchmarks compare with, one each: they do not agree on versions.

    python -m benchmarks.peers.install                  # all
    python -m benchmarks.peers.install fairseq          # one

benchmarks/requirements-NAME.txt → benchmarks/.envs/NAME. In such a file a line that ends in "# no-deps" is installed last and
without what it asks for (a toolkit that asks for an older torch runs on the one above it all the same).
"""

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


def read_requirements(text: str) -> tuple[list[str], list[str]]:
    """The lines of a requirements file → those installed with what they ask for, and those installed without."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    alone = [line.split("#")[0].strip() for line in lines if line.endswith("# no-deps")]
    return [line.strip() for line in lines if not line.endswith("# no-deps")], alone


def main() -> None:
    """Each of the environments named, anew."""
    names = sys.argv[1:] or TOOLKITS
    if unknown := set(names) - set(TOOLKITS):
        raise UserError(f"no toolkit {', '.join(unknown)}; choose from {', '.join(TOOLKITS)}")
    for name in names:
        together, alone = read_requirements((BENCHMARKS / f"requirements-{name}.txt").read_text(encoding="utf-8"))
        folder = BENCHMARKS / ".envs" / name
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python_of(name)), "-m", "pip", "install", "--quiet"]
        # No build isolation: what is compiled must be compiled against the torch that it will run with.
        for command in ([*pip, *together], [*pip, "--no-deps", "--no-build-isolation", *alone] if alone else []):
            if command and subprocess.run(command).returncode:
                raise UserError(f"pip cannot install {name}; what it said stands above. The benchmarks run without it")
        (folder / "complete").touch()
        print(f"{name}: installed in {folder}", flush=True)


if __name__ == "__main__":
    run_script(main)
