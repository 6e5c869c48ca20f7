"""What the pages tell people to type exists, takes its flags and runs; both languages agree."""

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import (
    ROOT,
    commands_of_section,
    forked,
    forked_ranks,
    in_this_process,
    reversed_digits,
    write_pairs,
)
from torch.distributed.run import parse_args as torchrun_arguments

import data
import model
from engine.config import parse_flags
from engine.meters import Meter
from engine.signals import SIGNALS

FOLDERS = ("", "docs", "sample", "labs/*")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md".lstrip("/")))
NAMES = [str(page.relative_to(ROOT)) for page in PAGES if page.name != "CHANGELOG.md"]
PAIRS = [name for name in NAMES if (ROOT / name.replace(".md", ".zh-CN.md")).exists()]
PROGRAMS = (
    "*.py",
    "run.sh",
    "engine/*.py",
    "fast/*.py",
    "text/*.py",
    "tools/**/*.py",
    "labs/**/*.py",
)
# Verb of run.sh -> program, where it is not labs.VERB.
VERBS = {"train": "train.py", "test": "", "gpu": "benchmarks.gpu", "attention": "labs.attention_op"}
RUN_SH = (ROOT / "run.sh").read_text(encoding="utf-8")
LABS = set(re.search(r'(?m)^labs="(.*)"$', RUN_SH)[1].split())
# Modules that need a package of requirements-extras.txt.
EXTRAS = {"labs.lenet.lightning": "lightning"}
# Variables may be set before a command.
COMMAND = re.compile(r'(?:^| )((?:python|torchrun) \S.*|bash run\.sh[^"]*)"?$')
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def read(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """What may follow # in a link to the page: its headings as GitHub changes them."""
    headings = re.findall("^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


# -------------------------------------------------------------------- two languages


def code_of(text: str) -> list[list[str]]:
    """The lines of all code blocks without comments; of a table or tree, the first column."""
    lines = [block.splitlines() for _, block in BLOCK.findall(text)]
    return [[re.split(r"#|\s{2,}", line.strip())[0].strip() for line in block] for block in lines]


def numbers_of(text: str) -> Counter:
    """Numbers of two digits or more outside code; "2 million" is 200 万, so these are left out."""
    text = re.sub(r"\d+ (?:million|万)", "", BLOCK.sub("", text))
    return Counter(re.findall(r"(?<![A-Za-z\d.])\d[\d.,]*\d", text))


@pytest.mark.parametrize("page", PAIRS)
def test_both_languages_have_the_same_headings_code_numbers_and_links(page):
    # The links of a page lead to pages and pictures in its language.
    english = read(page).replace(".zh-CN.", ".")
    chinese = read(page.replace(".md", ".zh-CN.md")).replace(".zh-CN.", ".")
    heading = re.compile("^#+ ", re.MULTILINE)
    links = re.compile(r"\]\(([^)#]+)")  # without anchors, which are headings
    prose = [BLOCK.sub("", text) for text in (english, chinese)]
    assert heading.findall(prose[0]) == heading.findall(prose[1])
    assert code_of(english) == code_of(chinese)
    assert numbers_of(english) == numbers_of(chinese)
    assert Counter(links.findall(english)) == Counter(links.findall(chinese))


@pytest.mark.parametrize("page", [name for name in NAMES if "zh-CN" not in name])
def test_english_pages_have_no_chinese_prose(page):
    """Example sentences in code are no prose; nor is the link to the Chinese page."""
    text = re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*zh-CN\.md\)", "", BLOCK.sub("", read(page)))
    chinese = re.findall("[\u4e00-\u9fff]+", text)
    assert not chinese


@pytest.mark.parametrize("page", [name for name in NAMES if "zh-CN" in name])
def test_chinese_paragraphs_are_not_wrapped(page):
    """A line break between two Chinese characters is shown as a gap."""
    assert not re.findall(
        "[\u3000-\u9fff\uff00-\uffef]\n[\u4e00-\u9fff]", BLOCK.sub("", read(page))
    )


# -------------------------------------------------------------------- commands and names


def commands(page: str) -> list[str]:
    """Every command in a page: in its bash blocks, and `…` in its text."""
    text = read(page)
    blocks = [block for language, block in BLOCK.findall(text) if language == "bash"]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`([^`]+)`", BLOCK.sub("", text))
    without_comments = [line.split(" #")[0] for line in lines + spans]
    parts = [p.strip() for line in without_comments for p in re.split(r" [<>] |&&|;|\$\(", line)]
    matches = [COMMAND.search(part) for part in parts if "…" not in part]
    return [match[1] for match in matches if match]


def program_and_flags(command: str) -> tuple[str, list[str]]:
    """("train.py", its flags), ("labs.lenet", …) or ("run.sh", …), whatever starts it."""
    launcher, *words = shlex.split(command)
    while launcher == "torchrun" and words and words[0].startswith("--") and words[0] != "--":
        # A flag of torchrun, and its value.
        words = words[2:]
    while words and words[0] in ("-m", "--"):
        words = words[1:]
    if not words:
        return "", []
    return words[0], [word for word in words[1:] if word != "--help"]


def program_of_run_sh(flags: list[str]) -> tuple[str, list[str]]:
    """What `bash run.sh` starts with these words."""
    verb = "train"
    if flags and flags[0] != "--":
        verb, *flags = flags
    assert verb in LABS | VERBS.keys(), verb
    return VERBS.get(verb, f"labs.{verb}"), flags


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
    parse_flags(
        config,
        positional={
            "translate.py": "text",
            "report.py": "runs",
            "tools.leaderboard": "handins",
        }.get(program),
    )


@pytest.mark.parametrize("page", NAMES)
def test_every_command_exists_and_takes_its_flags(page, tmp_path, monkeypatch):
    (tmp_path / "runs/NAME").mkdir(parents=True)
    (tmp_path / "runs/NAME/config.json").write_text('{"epochs": 3}', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for command in commands(page):
        program, flags = program_and_flags(command)
        if program == "run.sh":
            program, flags = program_of_run_sh(flags)
        if program == "pytest":
            assert (ROOT / flags[0]).exists(), command
        elif "/" in program:
            assert (ROOT / program).exists(), command
        elif program and importlib.util.find_spec(EXTRAS.get(program, "torch")):
            parse(program, flags, monkeypatch)


def test_the_pages_name_every_script():
    programs = {program_and_flags(command)[0] for page in NAMES for command in commands(page)}
    scripts = {"train.py", "evaluate.py", "translate.py", "report.py", "run.sh"}
    assert programs >= scripts | {"labs.lenet", "benchmarks.training"}


def test_torchrun_takes_no_flag_of_ours_for_its_own():
    for command in {command for page in NAMES for command in commands(page)}:
        program, flags = program_and_flags(command)
        if not command.startswith("torchrun ") or not program:
            continue
        started = torchrun_arguments(shlex.split(command)[1:])
        assert started.training_script == program, command
        ours = [word for word in started.training_script_args if word != "--"]
        assert ours == [word for word in flags if word != "--"], command


@pytest.mark.parametrize("page", NAMES)
def test_every_file_exists(page):
    text = read(page)
    # The page of a lab may leave out its folder.
    folders = [ROOT, (ROOT / page).parent, ROOT / "labs" / Path(page).stem]
    for name in re.findall(r"`(\w[\w/]*(?:\.py|\.cpp|\.h|/))`", text):
        exists = any((folder / name).exists() for folder in folders)
        assert exists or name.startswith(("runs/", "my_corpus/")), name  # the user makes these
    for link, anchor in re.findall(r"\]\((?!http)([^)#]+)#?([^)]*)\)", text):
        file = (ROOT / page).parent / link
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), f"{link}#{anchor}"
    for picture in re.findall(r'<img src="([^"]+)"', text):
        assert ((ROOT / page).parent / picture).exists(), picture
    files = (ROOT / "tests").rglob("test_*.py")
    tests = "".join(file.read_text(encoding="utf-8") for file in files)
    for name in re.findall(r"`(test_\w+)…?`", text):  # … stands for the rest of a name
        assert f"def {name}" in tests, name


def definition(file: str, name: str) -> str:
    """The source of a function, class, method or constant of a file, such as Class.method."""
    text = read(file)
    node = ast.parse(text)
    for part in name.split("."):
        found = [child for child in node.body if part in names_defined_by(child)]
        assert found, f"{file}: {name}"
        node = found[0]
    return ast.get_source_segment(text, node)


def names_defined_by(statement: ast.stmt) -> list[str]:
    """The names that a definition or an assignment makes."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.mark.parametrize("page", NAMES)
def test_every_definition_that_a_page_names_exists(page):
    """`file.py: name`; other code in the same cell of a table is a part of it."""
    for cell in re.split(r"\||\n", read(page)):
        spans = re.findall("`([^`]+)`", cell)
        places = [re.fullmatch(r"([\w/]+\.py): ([\w.]+)", span) for span in spans]
        for place in filter(None, places):
            source = definition(*place.groups())
            others = [span for span, other in zip(spans, places) if not other]
            assert all(other in source for other in others), cell


def test_the_pages_that_programs_name_exist():
    """`docs/page.md` in an error line or a comment, or `docs/page.md#heading`."""
    programs = [path for folder in PROGRAMS for path in ROOT.glob(folder)]
    named = set()
    for program in programs:
        text = program.read_text(encoding="utf-8")
        named |= set(re.findall(r"(docs/\w+\.md)(?:#([\w-]+))?", text))
    assert ("docs/troubleshooting.md", "gpu") in named
    for page, anchor in named:
        assert (ROOT / page).exists(), page
        assert not anchor or anchor in anchors(ROOT / page), f"{page}#{anchor}"


# -------------------------------------------------------------------- running them

# What no test runs as it is typed, and why. Every other command of every page is run at reduced
# size: by the tests below, or, if it is in the table of a lab's handout, by that lab's test.
NOT_RUN = {
    r"wmt/|google-bert/": "downloads from a hub",
    r"--nnodes|train\.py \$run": "needs several machines or SLURM",
    r"--precision int8": "needs a CPU with VNNI; tests/test_evaluate.py",
    r"--gpu_devices": "needs four GPUs; tests/labs/test_collectives.py",
    r"--serve": "a server does not end; tests/tools/serving/test_server.py",
    r"--init gpt2/": "needs GPT-2's weights; tests/labs/test_gpt.py fine-tunes a small GPT-2",
    r"gpt\.(compare|scales)": "trains many models; tests/labs/test_gpt.py makes small tables",
    r"^bash run\.sh": "installs; tests/test_faults_run_sh.py starts it with a recording Python",
    r"-m pytest": "these tests",
    r"tools\.results": "writes into docs/; tests/tools/test_results.py compares the pages",
    r"tools\.leaderboard": "needs hand-ins; tests/tools/test_leaderboard.py",
}
for pattern, package in {"--export": "ctranslate2", **EXTRAS}.items():
    if not importlib.util.find_spec(package):
        NOT_RUN[pattern] = f"{package} is not installed"


def is_run(command: str) -> bool:
    """Whether no pattern in NOT_RUN matches the command."""
    return not any(re.search(pattern, command) for pattern in NOT_RUN)


@pytest.mark.parametrize("page", ["docs/positional_encoding.md"])
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    """Blocks that begin with `import torch`; they check what the page says, or print it."""
    monkeypatch.chdir(tmp_path)
    blocks = [block for language, block in BLOCK.findall(read(page)) if language == "python"]
    blocks = [block for block in blocks if block.startswith("import torch\n")]
    assert blocks
    for block in blocks:
        exec(block, {})


SCRIPTS = ("train.py", "evaluate.py", "translate.py", "report.py")
QUICK_PAGES = ["docs/handout.md", "README.md", "docs/data.md", "docs/evaluation.md"]
SMALL = dict(d_model=32, nhead=4, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=64)
END_STEP = Meter.end_step


def runnable_commands() -> dict[str, list[str]]:
    """Page -> the commands that run here and that no page before it names.

    Those for several processes are under "torchrun".
    """
    pages = [*QUICK_PAGES, *(name for name in NAMES if "zh-CN" not in name)]
    found = {"torchrun": []}
    seen = set()
    for page in dict.fromkeys(pages):
        found[page] = []
        for command in commands(page):
            runs = program_and_flags(command)[0] in SCRIPTS
            if command in seen or not runs or not is_run(command):
                continue
            seen.add(command)
            key = "torchrun" if command.startswith("torchrun") else page
            found[key].append(command)
    return {page: commands for page, commands in found.items() if commands}


RUNNABLE = runnable_commands()


def make_small(steps: int, set_attribute=setattr) -> None:
    """Every model size is tiny, and a training is interrupted after a number of steps."""

    def end_step(meter: Meter) -> None:
        END_STEP(meter)
        meter.steps_taken = getattr(meter, "steps_taken", 0) + 1
        if meter.steps_taken == steps:
            signal.raise_signal(signal.SIGTERM)

    set_attribute(data, "default_path", lambda: "my_corpus")
    set_attribute(model, "PRESETS", dict.fromkeys(model.PRESETS, SMALL))
    set_attribute(Meter, "end_step", end_step)


def run_as_typed(command: str, folder: Path, steps: int = 2) -> None:
    """The command in `folder`, in this process; one under torchrun in forked processes."""
    # Data are in DIR, so the report goes elsewhere.
    typed = command.replace("~/", "").replace("--out DIR", "--out OUT")
    script, flags = program_and_flags(typed)
    if script == "evaluate.py":
        flags += ["--limit", "5"]
    if "--run" in flags:
        # The pages call every run NAME, but a run is never overwritten.
        flags[flags.index("--run") + 1] += f"-{len(os.listdir(folder / 'runs'))}"
    if "--help" in command:
        flags.append("--help")
    if "--workers" in flags:
        # More workers than cores make PyTorch warn, and ranks other than 0 print nothing.
        flags[flags.index("--workers") + 1] = "1"
    shutil.rmtree(folder / "exported", ignore_errors=True)
    if command.startswith("torchrun"):
        count = int(re.search(r"--nproc_per_node (\d+)", command)[1])
        forked_ranks(count, script, *flags, cwd=folder, first=(make_small, steps))
        return
    with pytest.MonkeyPatch.context() as patch:
        make_small(steps, patch.setattr)
        patch.chdir(folder)
        assert not in_this_process(script, *flags), command


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with data of the pages' names, and with tiny runs: NAME has five checkpoints, and
    A, B and lm are scored copies of it."""
    folder = tmp_path_factory.mktemp("readme")
    pairs = reversed_digits(2200)
    splits = {"train": slice(0, 2000), "validation": slice(2000, 2100), "test": slice(2100, 2200)}
    write_pairs(folder / "my_corpus", pairs, splits)
    for file in (folder / "my_corpus").iterdir():
        text = file.read_text(encoding="utf-8")
        file.write_text(re.sub(r'"zh": ("[^"]*")', r'\g<0>, "de": \1', text), encoding="utf-8")
    for name in ("sample", "minidataset", "DIR", "NEWS", "DIALOGUES"):
        (folder / name).symlink_to("my_corpus")
    lines = ["\t".join((*pair, *pair)) for pair in pairs]
    table = "\n".join(["zh\ten\tChinese\tEnglish", *lines])
    (folder / "pairs.tsv").write_text(table, encoding="utf-8")
    for part in ("src.zh", "ref.en"):
        (folder / f"newstest2019-zhen-{part}.sgm").write_text("<seg>1</seg>", encoding="utf-8")
    (folder / "runs").mkdir()
    run_as_typed("python train.py --data my_corpus --eval_every 1 --run first", folder, steps=5)
    (folder / "runs/first-0").rename(folder / "runs/NAME")
    for beam in (1, 4):
        run_as_typed(f"python evaluate.py --ckpt runs/NAME --beam {beam}", folder)
    shutil.copytree(folder / "runs/NAME/tokenizer/source", folder / "my_tokenizer")
    for name in ("A", "B", "OLD", "lm"):
        shutil.copytree(folder / "runs/NAME", folder / "runs" / name)
    shutil.copytree(folder / "runs/NAME", folder / "HANDED_IN", symlinks=True)
    return folder


def test_the_commands_that_meet_the_handout(place):
    """Those of the page; then what it says is there to be looked at."""
    for command in RUNNABLE["docs/handout.md"]:
        run_as_typed(command, place)
    [page] = place.glob("runs/*/report/report.html")
    run = page.parent.parent
    assert "(transformer): Transformer(" in (run / "train.log").read_text(encoding="utf-8")
    assert list(run.glob("events.out.tfevents.*"))
    for split in ("validation", "test"):
        score = json.loads((run / f"eval/{split}-greedy-first5.json").read_text("utf-8"))
        assert score["split"] == split and 0 <= score["nltk"] <= 100


@pytest.mark.parametrize("page", QUICK_PAGES[1:])
def test_the_commands_of_a_page_run(page, place):
    for command in RUNNABLE[page]:
        run_as_typed(command, place)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in RUNNABLE if page not in QUICK_PAGES])
def test_the_commands_of_a_long_page_run(page, place):
    for command in RUNNABLE[page]:
        run_as_typed(command, place)


# -------------------------------------------------------------------- the commands of the labs

# What each program gets behind the page's flags, so that it ends within seconds.
GPT_FLAGS = (
    "--preset toy --num_layers 4 --seq_length 16 --vocab_size 300 --batch_size 4 --max_steps 1"
)
TEXT_FLAGS = (
    "--epochs 1 --d_model 8 --nhead 1 --num_layers 1 --seq_length 8 --batch_size 256 --device cpu"
)
PIPELINE_FLAGS = "--d_model 16 --nhead 2 --dim_feedforward 32 --max_steps 2 --batch_size 8"
REDUCED = {
    "labs.attention_op": ["--seq_length", "8", "--turns", "1"],
    "labs.attention_op.exercise": ["--help"],  # an exercise that is not written yet exits with 1
    "labs.collectives": [],
    "labs.gpt": GPT_FLAGS.split(),
    "labs.gpt.generate": [],
    "labs.lenet": ["--epochs", "1"],
    "labs.lenet.convolution": [],
    "labs.lenet.lessons": [],
    "labs.lenet.lightning": ["--epochs", "1"],
    "labs.pipeline": PIPELINE_FLAGS.split(),
    "labs.pipeline.mistakes": [],
    "labs.wikitext": TEXT_FLAGS.split(),
    "labs.wikitext.trigram": [],
}
TRAIN = ("labs.gpt", "labs.lenet", "labs.pipeline", "labs.wikitext")
LAB_PAGES = [name for name in NAMES if re.fullmatch(r"labs/\w+/README\.md", name)]
LAB_PAGES += ["docs/positional_encoding.md"]


def small_labs() -> None:
    """Few drawn digits; no data of the machine."""
    from labs.lenet import mnist
    from labs.wikitext import text

    mnist.DRAWN = {"train": (300, 1), "test": (100, 2)}
    mnist.PLACES = text.DATA_PLACES = ()


def write_lab_data(folder: Path) -> None:
    """Small files under the names that the pages of the labs use."""
    articles = [
        f" \n = Title {number} = \n \n The ship {number} sailed . \n" for number in range(60)
    ]
    for name in ("wikitext-2/valid.txt", "wikitext-2/test.txt", "s500.txt", "DIR/a.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("".join(articles), encoding="utf-8")
    for name in ("FILE", "glove.6B.50d.top20k.txt"):
        (folder / name).write_text("the 1 2 3 4\nship -3 0 1 4\n", encoding="utf-8")
    abstracts = [f"In this paper we measure effect {number} of ships." for number in range(200)]
    (folder / "wos").mkdir()
    (folder / "wos/X.txt").write_text("\n".join(abstracts), encoding="utf-8")


def handout_table(page: str) -> str:
    """What a lab's page sets beside its handout; the lab's own test runs these commands."""
    tables = r"## (?:The handout, line by line|What the handout asks for)\n.*?(?=\n## |\Z)"
    table = re.search(tables, read(page), re.DOTALL)
    return table[0] if table else ""


def lab_commands(page: str) -> list[str]:
    """The page's commands that run here, each once; what reads a run comes behind what makes it.

    Those only in the table of the handout are left to the lab's own test.
    """
    table = handout_table(page)
    bash = [block for language, block in BLOCK.findall(read(page)) if language == "bash"]
    first_block = [line.split(" #")[0].strip() for line in "".join(bash[:1]).splitlines()]
    found = dict.fromkeys(
        command
        for command in commands(page)
        if program_and_flags(command)[0] in REDUCED
        and is_run(command)
        and (f"`{command}`" not in table or command in first_block)
    )

    def place_in_order(command: str) -> tuple[bool, ...]:
        return "runs/" in command, not command.startswith("torchrun"), "--keep 0" not in command

    return sorted(found, key=place_in_order)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in LAB_PAGES if lab_commands(page)])
def test_the_commands_of_a_lab_run(page, tmp_path):
    write_lab_data(tmp_path)
    if page.startswith("labs/lenet"):
        shutil.rmtree(tmp_path / "DIR")
    for command in lab_commands(page):
        program, flags = program_and_flags(command)
        flags = [re.sub(r"SEED|\$\w", "1", flag) for flag in flags if flag != "--"]
        if page.startswith("labs/lenet"):
            flags = ["drawn" if flag == "DIR" else flag for flag in flags]
        if "--init" in flags:  # the model has the sizes of its weights
            flags += ["--batch_size", "4", "--max_steps", "1"]
        elif "--resume" not in flags:
            flags += REDUCED[program]
        elif program == "labs.gpt":
            # It refuses to resume a finished run.
            flags += ["--max_steps", "2"]
        if program in TRAIN and "--resume" not in flags and "--plan" not in flags:
            # Every run has the name that other commands read, and replaces the run before.
            name = flags[flags.index("--run") + 1] if "--run" in flags else "NAME"
            shutil.rmtree(tmp_path / "runs" / name, ignore_errors=True)
            flags += ["--run", name]
        file = program.replace(".", "/")
        file += "/__main__.py" if (ROOT / file).is_dir() else ".py"
        processes = re.search(r"--nproc_per_node (\d+)", command)
        if processes:
            forked_ranks(int(processes[1]), file, *flags, cwd=tmp_path, first=(small_labs,))
        else:
            forked(file, *flags, cwd=tmp_path, first=(small_labs,))


# -------------------------------------------------------------------- the other modules

# What each program gets behind the page's flags, as above.
TRAINING_FLAGS = "--preset tiny --vocab 300 --tokens_per_batch 64 --seconds 0.1 --rounds 1"
MODULES = {
    "benchmarks.training": f"{TRAINING_FLAGS} --data my_corpus --contestants marian,ours-fp32",
    "benchmarks.decoding": "--preset tiny --limit 5 --rounds 1 --contestants ours-fp32",
    "tools.reporting.masks": "",
}


def module_commands(module: str) -> list[str]:
    """The commands of all pages that start the module, each once."""
    typed = dict.fromkeys(command for page in NAMES for command in commands(page))
    return [command for command in typed if program_and_flags(command)[0] == module]


def keep_files_here() -> None:
    """The benchmarks keep data and runs in this folder, not in the repository."""
    from benchmarks import measuring

    measuring.ROOT = Path.cwd()


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_the_commands_of_a_module_run(module, place):
    for command in module_commands(module):
        flags = program_and_flags(command)[1] + MODULES[module].split()
        file = f"{module.replace('.', '/')}.py"
        output = forked(file, *flags, cwd=place, first=(keep_files_here,))
        assert "left out" not in output, command


def test_every_command_is_run_or_there_is_a_reason():
    run = {command for found in RUNNABLE.values() for command in found}
    for module in MODULES:
        run.update(module_commands(module))
    for page in LAB_PAGES:
        run.update(lab_commands(page))
        run.update(commands_of_section(handout_table(page)))
    typed = {command: page for page in NAMES for command in commands(page)}
    assert not {command: typed[command] for command in typed.keys() - run if is_run(command)}
    for pattern in NOT_RUN:
        assert any(re.search(pattern, command) for command in typed), f"no page needs {pattern}"


def test_training_without_flags(place, capfd):
    """`python train.py` trains on the sample until it is interrupted."""
    run_as_typed("python train.py", place)
    output = "".join(capfd.readouterr())
    assert "stopped after step 2: interrupted" in output
    # runpy, by which the test starts the script, puts its whole path into sys.argv.
    script = shlex.quote(str(ROOT / "train.py"))
    assert f"to resume: python {script} --resume runs/" in output
    assert output.count("no --data given") == output.count("device: ") == 1


def test_the_example_in_python_runs_and_leaves_the_signals_as_they_were(place, monkeypatch):
    monkeypatch.chdir(place)
    example = dict(BLOCK.findall(read("docs/evaluation.md")))["python"]
    sizes = (
        "max_steps=2, d_model=32, nhead=4, num_encoder_layers=1, num_decoder_layers=1, device='cpu'"
    )
    before = [signal.getsignal(number) for number in SIGNALS]
    exec(example.replace("max_minutes=20", sizes), names := {})
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert names["folder"].is_dir() and len(names["translations"].texts) == 1
