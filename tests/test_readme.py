"""What the README and the pages in docs/ tell people to type: it exists, its flags are accepted, and the scripts run it."""

import importlib
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import HANGS, ROOT, TINY_FLAGS, forked
from torch.distributed.run import get_args_parser
from torch.distributed.run import parse_args as torchrun_arguments

import train
from engine.config import parse_flags
from engine.signals import SIGNALS

PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "sample/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "labs").glob("*/README*.md")),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LABS = {"lenet", "wikitext", "attention", "pipeline", "collectives", "gpt"}
# Modules that need a package of requirements-extras.txt.
EXTRAS = {"labs.lenet.lightning": "lightning"}
COMMAND = re.compile(
    r'(?:^| )((?:python|torchrun) \S.*|bash run\.sh[^"]*)"?$'
)  # what stands before it sets variables


def commands(page: str) -> list[str]:
    """Every command in a page: in its ```bash blocks, and `…` in its text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    typed = [line.split(" #")[0] for line in lines + spans]  # without its comment
    parts = [part.strip() for line in typed for part in re.split(r" [<>] |&&|;|\$\(", line)]
    matches = [COMMAND.search(part) for part in parts if "…" not in part]
    return [match[1] for match in matches if match]


def program_and_flags(command: str) -> tuple[str, list[str]]:
    """('train.py', its flags), ('labs.lenet', …) or ('run.sh', …), whether started by python, torchrun or bash."""
    launcher, *words = shlex.split(command)
    while launcher == "torchrun" and words and words[0].startswith("--") and words[0] != "--":
        words = (
            words[1:] if words[0] == "--standalone" else words[2:]
        )  # torchrun's own flag and its value
    while words and words[0] in ("-m", "--"):
        words = words[1:]
    return (words[0], [word for word in words[1:] if word != "--help"]) if words else ("", [])


def config_class(program: str):
    """The settings of a script or module; None if it takes no flags of ours."""
    module = program.removesuffix(".py")
    if (ROOT / module.replace(".", "/") / "__main__.py").exists():
        module += ".__main__"
    assert importlib.util.find_spec(module), f"{program} does not exist"
    return getattr(importlib.import_module(module), "Config", None)


def parse(program: str, flags: list[str], monkeypatch) -> None:
    """As the script does; a placeholder such as SEED or $seed stands for the flag's default."""
    config = config_class(program)
    words = []
    for word in flags:
        if re.fullmatch(r"\$\w+|[A-Z]+", word):
            if words and words[-1].startswith("--"):
                assert words.pop()[2:] in config.__dataclass_fields__, f"{program} {flags}"
        elif word != "--":
            words.append(word)
    if config is None:
        assert not words, f"{program} takes no flags"
        return
    monkeypatch.setattr(sys, "argv", [program, *words])
    parse_flags(config, positional={"translate.py": "text", "report.py": "runs"}.get(program))


def settings_file() -> str:
    """The settings.yaml that docs/training.md shows."""
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    return re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1]


def test_the_pages_name_every_script():
    programs = [program_and_flags(command)[0] for page in NAMES for command in commands(page)]
    assert len(programs) > 120 and programs.count("train.py") > 30
    scripts = {"train.py", "evaluate.py", "translate.py", "report.py", "run.sh"}
    assert scripts | {"labs.lenet", "benchmarks.training"} <= set(programs)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


@pytest.mark.parametrize("page", NAMES)
def test_every_command_exists_and_takes_its_flags(page, tmp_path, monkeypatch):
    (tmp_path / "settings.yaml").write_text(settings_file(), encoding="utf-8")
    (tmp_path / "runs/NAME").mkdir(parents=True)
    (tmp_path / "runs/NAME/config.json").write_text('{"epochs": 3}', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for command in commands(page):
        program, flags = program_and_flags(command)
        if program == "run.sh":
            verb, flags = (flags[0], flags[1:]) if flags and flags[0] != "--" else ("train", flags)
            assert verb in {"train", "test", "gpu"} | LABS, command
            programs = {
                "train": "train.py",
                "test": "",
                "gpu": "benchmarks.gpu",
                "attention": "labs.attention_op",
            }
            program = programs.get(verb, f"labs.{verb}")
        if program == "pytest":
            assert (ROOT / flags[0]).exists(), command
        elif "/" in program:
            assert (ROOT / program).exists(), command
        elif program and importlib.util.find_spec(EXTRAS.get(program, "torch")):
            parse(program, flags, monkeypatch)


def test_torchrun_takes_no_flag_of_ours_for_its_own(monkeypatch):
    for command in (
        command for page in NAMES for command in commands(page) if command.startswith("torchrun ")
    ):
        program, flags = program_and_flags(command)
        if program and (
            "--shutdown_timeout" not in command or "shutdown" in get_args_parser().format_help()
        ):
            started = torchrun_arguments(shlex.split(command)[1:])
            words = [word for word in started.training_script_args if word != "--"]
            assert (started.training_script, words) == (
                program,
                [word for word in flags if word != "--"],
            ), command


@pytest.mark.parametrize("page", NAMES)
def test_every_file_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    folders = [
        ROOT,
        (ROOT / page).parent,
        ROOT / "labs" / Path(page).stem,
    ]  # a lab's page may leave out its folder
    for name in re.findall(r"`(\w[\w/]*(?:\.py|\.cpp|\.h|/))`", text):
        exists = any((folder / name).exists() for folder in folders)
        assert exists or name.startswith(("runs/", "my_corpus/")), name  # which the user makes
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert ((ROOT / page).parent / link).exists(), link
    tests = "".join(
        file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")
    )
    for name in re.findall(r"`(test_\w+)…?`", text):  # … stands for the rest of a name
        assert f"def {name}" in tests, name


@pytest.mark.parametrize(
    "name, words", [("epochs", r"default (\d+)\n"), ("keep", r"the newest (\d+)")]
)
def test_the_pages_name_the_defaults(name, words):
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    assert int(re.search(words, text)[1]) == getattr(train.Config(), name)


def test_the_page_names_the_flags_that_may_change():
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    named = re.search(r"flags may change on `--resume`: `(.*?)`\.", text, re.DOTALL)[1]
    assert set(re.findall(r"--(\w+)", named)) == {
        field.name
        for field in fields(train.Config)
        if not field.metadata["fixed"] and field.name not in ("resume", "check")
    }


@pytest.mark.parametrize("page", ["docs/positional_encoding.md", "labs/attention_op/README.md"])
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    """Blocks that begin with `import torch`; they check what the page says, or print it."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"```python\n(import torch\n.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL
    )
    assert blocks
    for block in blocks:
        exec(block, {})


# Running them.


def runnable(page: str) -> list[str]:
    """The commands of a page that one process can run on a CPU, without the network and the course's data."""
    scripts = tuple(f"python {name}.py" for name in ("train", "evaluate", "translate", "report"))
    elsewhere = re.compile(
        r"wmt/|~/|google-bert/|my_tokenizer/|--source |int8|--attention|--serve|\$|DIR"
    )
    return [
        command
        for command in dict.fromkeys(commands(page))
        if command.startswith(scripts) and not elsewhere.search(command)
    ]


@pytest.fixture(scope="module")
def place(toy_data, tmp_path_factory) -> Path:
    """A folder with runs/NAME, a tiny run with five checkpoints, and data under the names that the pages use."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "settings.yaml").write_text(settings_file(), encoding="utf-8")
    rows = "".join(f"第{number}行\tline {number}\n" for number in range(2000))
    (folder / "pairs.tsv").write_text("zh\ten\n" + rows, encoding="utf-8")
    for part in ("src.zh", "ref.en"):
        (folder / f"newstest2019-zhen-{part}.sgm").write_text("<seg>1</seg>", encoding="utf-8")
    for name in ("my_corpus", "sample"):
        (folder / name).symlink_to(toy_data)
    run_as_typed("python train.py --data my_corpus --max_steps 5 --eval_every 1 --run NAME", folder)
    return folder


def run_as_typed(command: str, folder: Path) -> None:
    """The command with a model, and a number of steps or rows, that take seconds."""
    _, script, *flags = shlex.split(command)
    if script == "train.py" and "--resume" not in flags:
        flags += [*TINY_FLAGS, "--max_length", 64]
        flags += ["--data", "my_corpus"] if "--data" not in flags else []
    if script == "train.py" and "--eval_every" not in flags:
        flags += ["--max_steps", 6, "--eval_every", 6]
    if script == "evaluate.py":
        flags += ["--limit", 5]
    flags += ["--device", "cpu"] if script != "report.py" else []
    forked(script, *flags, cwd=folder)


@pytest.mark.parametrize("command", runnable("README.md"))
def test_the_commands_of_the_readme_run(command, place):
    run_as_typed(command, place)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/training.md", "docs/data.md", "docs/evaluation.md"])
def test_the_commands_of_the_pages_run(page, place):
    for command in runnable(page):
        run_as_typed(command, place)


def test_the_example_in_python_runs_and_leaves_the_signals_as_they_were(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    example = re.search(
        r"```python\n(.*?)```", (ROOT / "docs/evaluation.md").read_text(encoding="utf-8"), re.DOTALL
    )[1]
    sizes = (
        "max_steps=2, d_model=32, nhead=4, num_encoder_layers=1, num_decoder_layers=1, device='cpu'"
    )
    before = [signal.getsignal(number) for number in SIGNALS]
    exec(example.replace("max_minutes=20", sizes), names := {})
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert names["folder"].is_dir() and len(names["translations"].texts) == 2
    assert "nltk corpus_bleu" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_without_flags(ranks, tmp_path):
    """`python train.py` and `torchrun --nproc_per_node 2 train.py`: the first steps, then Ctrl-C."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher = [str(Path(sys.executable).with_name("torchrun")), "--nproc_per_node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*launcher, str(ROOT / "train.py")],
        cwd=tmp_path,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    while not any(
        "train/loss" in file.read_text() for file in tmp_path.glob("runs/*/metrics.jsonl")
    ):
        assert process.poll() is None, process.communicate(timeout=HANGS)
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=HANGS)
    typed = "python train.py" if ranks == 1 else "torchrun --nproc_per_node 2 -- train.py"
    assert f"to resume: {typed} --resume runs/" in output
    assert output.count("no --data given") == output.count("device: ") == 1
