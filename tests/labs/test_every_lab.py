"""A lab is a folder in labs/ with a `__main__.py`; what else must name it is checked here."""

import re
from pathlib import Path

import pytest
from conftest import ROOT


def labs(root: Path) -> list[str]:
    """The names of all labs: `python -m labs.NAME` starts each, without being registered."""
    return sorted(path.parent.name for path in root.glob("labs/*/__main__.py"))


def verb_of(lab: str, run_sh: str) -> str:
    """What follows `bash run.sh`: the lab's name, unless run.sh gives the module another one."""
    other = re.search(rf'(?m)^ +(\w+)\) exec "\$python" -m labs\.{lab} ', run_sh)
    return other[1] if other else lab


def missing_lines(root: Path, lab: str) -> list[str]:
    """File and line that must be added for this lab."""
    run_sh = (root / "run.sh").read_text(encoding="utf-8")
    verb = verb_of(lab, run_sh)
    missing = []
    verbs = re.search(r'(?m)^labs="(.*)"$', run_sh)[1]
    if verb not in verbs.split():
        missing.append(f'run.sh: add {verb} to the line  labs="{verbs}"')
    usage = re.search(r"(?m)^#   bash run\.sh ((?:\w+\|)+\w+)", run_sh)[1]
    if verb not in usage.split("|"):
        missing.append(f"run.sh: add {verb} to the line  #   bash run.sh {usage}")
    for name in ("README.md", "README.zh-CN.md"):
        page = f"labs/{lab}/{name}"
        if not (root / page).exists():
            missing.append(f"{page}: write this page")
        text = (root / name).read_text(encoding="utf-8")
        if not re.search(rf"(?m)^\| \[.*\]\({page}\) \| `bash run\.sh {verb}\b", text):
            row = f"| [{lab}]({page}) | `bash run.sh {verb}` | … | … |"
            missing.append(f"{name}: add to the table of the labs  {row}")
    return missing


@pytest.mark.parametrize("lab", labs(ROOT))
def test_every_lab_is_named_where_a_reader_looks(lab):
    missing = missing_lines(ROOT, lab)
    assert not missing, "\n".join(missing)


def test_no_lab_is_a_single_file():
    """Its pages would have no place beside it."""
    alone = [path.name for path in ROOT.glob("labs/*.py") if path.name != "__init__.py"]
    assert not alone, f"labs/{alone[0]}: move it to labs/{Path(alone[0]).stem}/__main__.py"


def test_a_new_lab_is_told_every_line_that_is_missing(tmp_path):
    for name in ("run.sh", "README.md", "README.zh-CN.md"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "labs/gru").mkdir(parents=True)
    (tmp_path / "labs/gru/__main__.py").touch()
    assert labs(tmp_path) == ["gru"]
    missing = missing_lines(tmp_path, "gru")
    assert [line.split(":")[0] for line in missing] == [
        "run.sh",
        "run.sh",
        "labs/gru/README.md",
        "README.md",
        "labs/gru/README.zh-CN.md",
        "README.zh-CN.md",
    ]
    for line in missing:
        file, _, text = line.partition("  ")
        file = tmp_path / file.split(":")[0]
        if "write this page" in line:
            file.touch()
            continue
        before = file.read_text(encoding="utf-8")
        if file.name == "run.sh":
            added = text.replace(text.rstrip('"'), text.rstrip('"') + " gru")
            if text.startswith("#"):
                added = f"{text}|gru"
            file.write_text(before.replace(text, added), encoding="utf-8")
        else:
            file.write_text(f"{before}\n{text}\n", encoding="utf-8")
    assert not missing_lines(tmp_path, "gru")
