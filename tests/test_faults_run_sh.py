"""run.sh with a Python that only writes down what it is asked: installation, signals, which run is evaluated."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import HANGS, ROOT

# Of the virtual environment and of the system alike; it makes environments by copying itself.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$@
in $PWD" >> "$LOG"
case "$*" in
    *ensurepip*) exit "${WITHOUT_ENSUREPIP:-0}" ;;
    *is_available*) exit "${WITHOUT_GPU:-0}" ;;
    *read_settings*) exec "$REAL_PYTHON" "$@" ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    *train.py*)
        [ -z "${TRAINS_FOR:-}" ] || { trap 'exit 0' TERM; touch started; for i in $(seq "$TRAINS_FOR"); do sleep 0.1; done; }
        while [ $# -gt 1 ]; do case "$1" in --run) folder="runs/$2" ;; --resume) folder="$2" ;; esac; shift; done
        mkdir -p "${folder:=runs/from_settings}"; echo "${LAST_LINE:-next: python evaluate.py}" > "$folder/train.log"
        exit "${CODE:-0}" ;;
esac
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A checkout in repo/, a fake python3 before all others, and home/, where the user is."""
    for folder in ("repo", "bin", "home"):
        (tmp_path / folder).mkdir()
    for name in ("run.sh", "requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / "repo")
    (tmp_path / "bin/python3").write_text(FAKE_PYTHON)
    (tmp_path / "bin/python3").chmod(0o755)
    for version in (10, 11, 12):
        (tmp_path / f"bin/python3.{version}").symlink_to("python3")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("REAL_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("VENV", raising=False)
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    return tmp_path


def run_sh(place: Path, *words, repo="repo", **environment) -> tuple[int, str, str]:
    """→ exit code, what was printed, and what Python was asked, a call a line."""
    done = subprocess.run(
        ["bash", f"../{repo}/run.sh", *words],
        cwd=place / "home",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    log = (place / "log").read_text() if (place / "log").exists() else ""
    (place / "log").unlink(missing_ok=True)
    return done.returncode, done.stdout + done.stderr, log


def test_installs_once_and_evaluates_the_run_that_it_trained(place):
    code, said, asked = run_sh(place)
    assert code == 0 and "5.3 GB" not in said  # the fake one says that torch is there
    assert "-m venv" in asked and "pip install" in asked and "--quiet" not in asked
    code, said, asked = run_sh(place, "--", "--data", "my_corpus")
    assert code == 0 and "-m pip" not in asked and "-m venv" not in asked
    name = asked.split("--run ")[1].split()[0]
    assert f"evaluate.py --ckpt runs/{name}\n" in asked and f"{place}/repo/train.py" in asked
    assert (place / f"home/runs/{name}/train.log").exists()  # seen from where the user is


def test_the_tested_versions_are_installed_and_again_when_they_change(place):
    asked = run_sh(place)[2]
    folder = place / "repo"
    assert f"-c {folder}/constraints.txt -r {folder}/requirements.txt\n" in asked
    with (folder / "constraints.txt").open("a") as file:
        file.write("tqdm==4.0.0\n")
    code, _, asked = run_sh(place)
    assert code == 0 and "pip install" in asked and "-m venv" not in asked
    assert "pip install" not in run_sh(place)[2]


def test_the_commands_that_it_prints_can_be_typed_wherever_it_lies(place):
    (place / "repo").rename(place / "my repo")
    said = run_sh(place, repo="my repo", VENV=f"{place}/it's")[1]
    typed = [shlex.split(words)[1] for words in re.findall(r"(?:source .*|python .*\.py)", said)]
    names = ("translate", "evaluate", "train")
    assert typed == [
        f"{place}/it's/bin/activate",
        *(f"{place}/my repo/{name}.py" for name in names),
    ]


def test_an_environment_elsewhere_is_seen_from_where_the_user_is(place):
    shutil.copy(ROOT / "requirements-dev.txt", place / "repo")
    code, _, asked = run_sh(place, "test", VENV="env")
    assert code == 0 and (place / "home/env/bin/python").exists() and f"in {place}/repo\n" in asked


def test_cd_that_says_where_it_goes(place):
    environment = {**os.environ, "CDPATH": f".:{place}"}
    subprocess.run(
        ["bash", "repo/run.sh", "lenet"], cwd=place, env=environment, check=True, timeout=HANGS
    )


@pytest.mark.parametrize("lab", ["lenet", "wikitext", "pipeline", "gpt"])
def test_a_labs_data_are_seen_from_where_the_user_is(place, lab):
    code, _, asked = run_sh(place, lab, "--", "--data", "digits")
    assert code == 0 and re.search(rf"labs\.{lab} .*--data digits\nin {place}/home\n", asked)


@pytest.mark.parametrize(
    "words, processes, asked_for",
    [
        ("attention", "", "-m labs.attention_op"),
        ("collectives", "", "-m labs.collectives"),
        ("gpt -- --lr 1", "", "-m labs.gpt --max_minutes 10 --lr 1"),
        ("gpt -- s.yaml", "", "-m labs.gpt s.yaml"),
        ("gpt -- --resume runs/a", "", "-m labs.gpt --resume runs/a"),
        ("gpt -- --plan", "", "-m labs.gpt --plan"),
        (
            "gpt",
            "3",
            "-m torch.distributed.run --standalone --nproc_per_node 3 -m -- labs.gpt --max_minutes 10",
        ),
        (
            "pipeline",
            "",
            "-m torch.distributed.run --standalone --nproc_per_node 2 -m -- labs.pipeline",
        ),
        ("pipeline", "1", "-m labs.pipeline"),
        (
            "pipeline",
            "3",
            "-m torch.distributed.run --standalone --nproc_per_node 3 -m -- labs.pipeline",
        ),
        ("gpu -- --minutes 1", "", "-m benchmarks.gpu --minutes 1"),
        ("test -- -x", "", "--no-loadscope-reorder -x"),
    ],
)
def test_the_verbs(place, words, processes, asked_for):
    shutil.copy(ROOT / "requirements-dev.txt", place / "repo")
    code, _, asked = run_sh(place, *words.split(), PROCESSES=processes)
    folder = "repo" if words.startswith("test") else "home"
    assert code == 0 and f"{asked_for}\nin {place}/{folder}\n" in asked


def test_an_unknown_verb(place):
    code, said, asked = run_sh(place, "train_all")
    assert code == 2 and said.startswith("error: unknown verb 'train_all'; use: ") and not asked


@pytest.mark.parametrize(
    "flags, folder",
    [
        (["--run", "a"], "runs/a"),
        (["--run=a"], "runs/a"),
        (["--resume", "runs/b"], "runs/b"),
        (["--lr", "1", "--resume=b"], "runs/b"),
        (["s.yaml"], "elsewhere/c"),
        (["s.yaml", "--run", "a"], "runs/a"),
        (["--run=~/elsewhere/c"], "{home}/elsewhere/c"),
    ],
)
def test_the_run_that_the_flags_name(place, flags, folder):
    for folder_there in ("runs/a", "runs/b", "elsewhere/c"):
        (place / "home" / folder_there).mkdir(parents=True)
        (place / "home" / folder_there / "train.log").write_text("next: python evaluate.py\n")
    (place / "home/s.yaml").write_text("lr: 1\nrun: elsewhere/c\n")
    code, _, asked = run_sh(place, "--", *flags, HOME=str(place / "home"))
    assert code == 0 and f"evaluate.py --ckpt {folder.format(home=place / 'home')}\n" in asked


@pytest.mark.parametrize(
    "flags, trains",
    [
        (["--data", "d"], "train.py --max_minutes 60 --data d --run [^ ]+"),
        (
            ["--lr", "1"],
            f"train.py --max_minutes {60 if os.path.isdir('/opt/minidataset') else 3.5} --lr 1 --run [^ ]+",
        ),
        (
            ["--data", "d", "--device", "cpu"],
            "train.py --max_minutes 60 --data d --device cpu --run [^ ]+",
        ),
        (["s.yaml", "--lr", "1"], "train.py s.yaml --lr 1 --run [^ ]+"),
        (["--resume", "runs/b"], "train.py --resume runs/b"),
    ],
)
def test_on_a_cpu_time_is_limited_unless_a_file_of_settings_or_a_run_says_how_long(
    place, flags, trains
):
    code, _, asked = run_sh(
        place, "--", *flags, **({} if "--device" in flags else {"WITHOUT_GPU": "1"})
    )
    assert code == 0 and re.search(rf"{trains}\n", asked) and "evaluate.py" in asked


@pytest.mark.parametrize("flag", ["--help", "--check"])
def test_nothing_is_evaluated_where_nothing_is_trained(place, flag):
    code, _, asked = run_sh(place, "--", flag)
    assert code == 0 and f"train.py {flag}\n" in asked and "evaluate.py" not in asked


def test_an_environment_that_was_not_finished_is_made_again(place):
    (place / "repo/.venv/bin").mkdir(parents=True)
    (place / "repo/.venv/bin/python").write_text(
        "#!/bin/sh\nexit 1\n"
    )  # as without ensurepip: it has no pip
    (place / "repo/.venv/bin/python").chmod(0o755)
    code, said, _ = run_sh(place, WITHOUT_ENSUREPIP="1")
    assert code == 2 and "python3-venv" in said and said.count("\n") == 1
    code, _, asked = run_sh(place)
    assert code == 0 and "-m venv" in asked and "evaluate.py" in asked


def test_the_versions_of_python_for_which_there_is_pytorch(place):
    asked = run_sh(place)[2]
    refused = re.search(r"ensurepip; sys\.exit\((.*)\)$", asked, re.MULTILINE)[1]
    versions = [(3, 9, 20), (3, 10, 0), (3, 14, 6), (3, 15, 0)]
    found = [eval(refused, {"sys": SimpleNamespace(version_info=version)}) for version in versions]
    assert found == [True, False, False, True]


def test_an_index_for_a_build_without_cuda(place):
    code, _, asked = run_sh(place, TORCH_INDEX_URL="https://mirror/cpu")
    assert code == 0 and "--index-url https://mirror/cpu torch==" in asked


# Under nohup SIGHUP is ignored by this process and by those it starts.
SIGNALS = [
    n
    for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    if signal.getsignal(n) != signal.SIG_IGN
]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_it_and_nothing_is_evaluated(place, number):
    process = subprocess.Popen(
        ["bash", "../repo/run.sh"], cwd=place / "home", env={**os.environ, "TRAINS_FOR": "3000"}
    )
    deadline = time.monotonic() + HANGS
    while not (place / "home/started").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=HANGS) == 128 + number
    assert "evaluate.py" not in (place / "log").read_text()


def test_a_half_trained_run_is_not_evaluated(place):
    code, said, asked = run_sh(place, LAST_LINE="to go on: python train.py --resume runs/x")
    assert code == 130 and "interrupted" in said and "evaluate.py" not in asked
    code, _, asked = run_sh(place, CODE="2")
    assert code == 2 and "evaluate.py" not in asked


NOTICE = "bundled sample, not WMT19: this score says only that the program works"


@pytest.mark.parametrize("log, last", [(f"data: sample; {NOTICE}", NOTICE), ("data: mine", "flag")])
def test_the_last_line_of_a_run_on_the_sample_says_so(place, log, last):
    code, output, _ = run_sh(place, LAST_LINE=log)
    assert code == 0 and last in output.rstrip().splitlines()[-1]
    assert output.count("bundled sample") == log.count("bundled sample")
