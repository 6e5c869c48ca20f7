"""run.sh with a Python that only records its calls: installation, signals, the evaluated run."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import HANGS, ROOT

# Of the virtual environment and of the system; it makes environments by copying itself.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$@
in $PWD" >> "$LOG"
case "$*" in
    *importlib.metadata*) exit "${WITHOUT_TORCH:-0}" ;;
    *ensurepip*) exit "${WITHOUT_ENSUREPIP:-0}" ;;
    *is_available*) exit "${WITHOUT_GPU:-0}" ;;
    *json.load*) exec "$REAL_PYTHON" "$@" ;;
    *"--index-url $UNREACHABLE"*) exit 1 ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    *train.py*)
        if [ -n "${TRAINS_FOR:-}" ]; then
            trap 'exit 0' TERM
            touch started
            for i in $(seq "$TRAINS_FOR"); do sleep 0.1; done
        fi
        [ "${OUTCOME-finished}" = "" ] || cat > "$RUN_OUTCOME" <<END
{"folder": "${FOLDER:-runs/made}", "outcome": "${OUTCOME:-finished}",
 "device": "${DEVICE:-auto}", "notice": "${NOTICE:-}"}
END
        echo "$RUN_OUTCOME" > outcome
        exit "${CODE:-0}" ;;
esac
"""
# GPUS: its lines of "driver, compute capability"; old drivers know only the driver's version.
FAKE_NVIDIA_SMI = """#!/usr/bin/env bash
[ -n "$GPUS" ] || { echo "No devices were found"; exit 6; }
case "$*" in *compute_cap*) [ -z "$OLD_NVIDIA_SMI" ] || exit 2 ;; esac
echo "$GPUS"
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A checkout in repo/, home/, where the user is, and a fake python3 and nvidia-smi on PATH."""
    for folder in ("repo", "bin", "home"):
        (tmp_path / folder).mkdir()
    for name in ("run.sh", "requirements.txt", "requirements-dev.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / "repo")
    for name, script in (("python3", FAKE_PYTHON), ("nvidia-smi", FAKE_NVIDIA_SMI)):
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    for version in range(10, 15):  # no other Python of this machine is found
        (tmp_path / f"bin/python3.{version}").symlink_to("python3")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("REAL_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("UNREACHABLE", "nowhere")
    of_the_fakes = ("DEVICE", "FOLDER", "CODE", "OUTCOME", "NOTICE", "TRAINS_FOR", "WITHOUT_TORCH")
    of_the_fakes += ("WITHOUT_ENSUREPIP", "WITHOUT_GPU", "GPUS", "OLD_NVIDIA_SMI")
    for name in ("VENV", "TORCH_INDEX_URL", "PROCESSES", *of_the_fakes):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run_sh(place: Path, *words, repo="repo", **environment) -> tuple[int, str, str]:
    """The exit code, the output, and Python's calls, one a line."""
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


# ---------------------------------------------------------------- installation


def test_installs_once_and_evaluates_the_run_that_it_trained(place):
    code, _, calls = run_sh(place)
    folder = place / "repo"
    assert code == 0 and "-m venv" in calls and "--index-url" not in calls
    assert f"-c {folder}/constraints.txt -r {folder}/requirements.txt\n" in calls
    code, _, calls = run_sh(place, "--", "--data", "my_corpus")
    assert code == 0 and "-m pip" not in calls and "-m venv" not in calls
    assert f"evaluate.py --ckpt runs/made --device auto\nin {place}/home\n" in calls
    assert f"{folder}/train.py --data my_corpus\n" in calls
    with (folder / "constraints.txt").open("a") as file:  # other versions are installed again
        file.write("tqdm==4.0.0\n")
    calls = run_sh(place)[2]
    assert "pip install" in calls and "-m venv" not in calls


PYTORCH = "https://download.pytorch.org/whl"


@pytest.mark.parametrize(
    "gpus, index",
    [
        ("580.65.06, 8.0", None),
        ("580.65.06, 8.0\n580.65.06, 7.0", f"{PYTORCH}/cu126"),  # a V100 beside an A100
        ("579.10, 9.0", f"{PYTORCH}/cu126"),
        ("525.60.13, 8.6", f"{PYTORCH}/cu126"),
        ("", f"{PYTORCH}/cpu"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the builds of Linux")
def test_the_build_of_pytorch_fits_driver_and_gpu(place, gpus, index):
    code, printed, calls = run_sh(place, "lenet", WITHOUT_TORCH="1", GPUS=gpus)
    assert code == 0 and "-r " in calls
    expected = [index] if index else []
    assert re.findall(r"--index-url (\S+) torch==[\d.]+\n", calls) == expected
    assert ("No NVIDIA GPU is found" in printed) == (gpus == "")


@pytest.mark.skipif(sys.platform != "linux", reason="the builds of Linux")
def test_drivers_that_no_build_fits(place):
    for gpus, old in (("470.57.02", "1"), ("570.10, 12.0", "")):
        code, printed, calls = run_sh(place, WITHOUT_TORCH="1", GPUS=gpus, OLD_NVIDIA_SMI=old)
        (line,) = (line for line in printed.splitlines() if line.startswith("error"))
        assert code == 2 and f"the NVIDIA driver {gpus[:3]} is too old for PyTorch; update" in line
        assert "pip install" not in calls and f"TORCH_INDEX_URL={PYTORCH}/cpu bash" in line
        assert line.endswith("run.sh -- --device cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="the builds of Linux")
def test_an_index_that_cannot_be_reached_and_one_that_the_user_names(place):
    unreachable = f"{PYTORCH}/cpu"
    code, printed, calls = run_sh(place, "lenet", WITHOUT_TORCH="1", UNREACHABLE=unreachable)
    assert code == 0 and f"note: {unreachable} cannot be used; pip's default index" in printed
    assert "-r " in calls and "labs.lenet" in calls
    shutil.rmtree(place / "repo/.venv")
    environment = {"WITHOUT_TORCH": "1", "GPUS": "470.57.02, 8.0"}
    code, _, calls = run_sh(place, "lenet", TORCH_INDEX_URL="https://mirror/cpu", **environment)
    assert code == 0 and "--index-url https://mirror/cpu torch==" in calls


def test_an_environment_that_was_not_finished_is_made_again(place):
    (place / "repo/.venv/bin").mkdir(parents=True)
    (place / "repo/.venv/bin/python").write_text("#!/bin/sh\nexit 1\n")  # it has no pip
    (place / "repo/.venv/bin/python").chmod(0o755)
    code, printed, _ = run_sh(place, WITHOUT_ENSUREPIP="1")
    assert code == 2 and "python3-venv" in printed and printed.count("\n") == 1
    code, _, calls = run_sh(place)
    assert code == 0 and "-m venv" in calls and "evaluate.py" in calls


def test_an_environment_that_cannot_be_written_is_one_line(place):
    """Even root, for whom no folder is read-only, cannot open a folder as a file."""
    shared = place / "opt/my venv"
    assert run_sh(place, VENV=str(shared))[0] == 0
    (shared / ".lock").unlink()
    (shared / ".lock").mkdir()
    assert run_sh(place, VENV=str(shared))[0] == 0  # requirements.txt is installed there
    for verb in ("test", "gpu"):
        code, printed, calls = run_sh(place, verb, VENV=str(shared))
        assert code == 2 and not calls and printed.count("\n") == 1
        assert printed.startswith(f"error: requirements-dev.txt is not installed in {shared}, ")
        command = re.search("type `(.*?)` once, or type `unset VENV` for an environment", printed)
        assert shlex.split(command[1]) == [f"VENV={shared}", "bash", "run.sh", "test"]
    (place / "repo/.venv").write_text("a file")
    code, printed, calls = run_sh(place)
    assert code == 2 and not calls and printed.count("\n") == 1
    assert f"not installed in {place}/repo/.venv" in printed and "set VENV to a folder" in printed


# ---------------------------------------------------------------- paths and verbs


def test_the_printed_commands_can_be_typed_from_anywhere(place):
    (place / "repo").rename(place / "my repo")
    printed = run_sh(place, repo="my repo", VENV=f"{place}/it's")[1]
    typed = [shlex.split(words)[1] for words in re.findall(r"(?:source .*|python .*\.py)", printed)]
    names = ("translate", "evaluate", "report", "train")
    scripts = [f"{place}/my repo/{name}.py" for name in names]
    assert typed == [f"{place}/it's/bin/activate", *scripts]


def test_the_verbs(place):
    torchrun = "-m torch.distributed.run --nproc_per_node"
    commands = {
        ("attention", ""): "-m labs.attention_op",
        ("lenet -- --data digits", ""): "-m labs.lenet --data digits",
        ("wikitext", ""): "-m labs.wikitext",
        ("collectives mean", ""): "-m labs.collectives mean",
        ("gpt -- --lr 1", ""): "-m labs.gpt --max_minutes 10 --lr 1",
        ("gpt", "3"): f"{torchrun} 3 -m -- labs.gpt --max_minutes 10",
        ("pipeline", ""): f"{torchrun} 2 -m -- labs.pipeline",
        ("pipeline", "1"): "-m labs.pipeline",
        ("gpu -- --minutes 1", ""): "-m benchmarks.gpu --minutes 1",
        ("test -- -x", ""): "--no-loadscope-reorder -x",
    }
    for (words, processes), expected in commands.items():
        code, _, calls = run_sh(place, *words.split(), PROCESSES=processes, VENV="env")
        folder = "repo" if words.startswith("test") else "home"
        assert code == 0 and f"{expected}\nin {place}/{folder}\n" in calls, words
    assert (place / "home/env/bin/python").exists()  # relative to where the user is
    code, printed, calls = run_sh(place, "train_all")
    assert code == 2 and not calls
    assert printed.startswith("error: unknown verb 'train_all'; use: ")


def test_help_installs_nothing(place):
    for word in ("--help", "-h", "help"):
        code, printed, calls = run_sh(place, word)
        assert code == 0 and not calls and not (place / "repo/.venv").exists()
        lines = printed.splitlines()
        assert max(map(len, lines)) <= 80 and lines[-1] == "is made there."
        for verb in ("test", "lenet", "wikitext", "attention", "pipeline", "collectives", "gpt"):
            assert re.search(rf"run\.sh.*\b{verb}\b", printed)


def test_through_links(place):
    """A link to run.sh in another folder, and a link to that link."""
    (place / "links/deep").mkdir(parents=True)
    (place / "links/deep/first.sh").symlink_to("../../repo/run.sh")  # from where the link lies
    (place / "links/run.sh").symlink_to(place / "links/deep/first.sh")
    code, _, calls = run_sh(place, repo="links")
    assert code == 0 and f"-r {place}/repo/requirements.txt" in calls
    assert f"{place}/repo/train.py\n" in calls and (place / "repo/.venv").exists()


# ---------------------------------------------------------------- training, then evaluation


@pytest.mark.parametrize("folder", ["runs/a", "elsewhere/my run", "runs/实验 一"])
def test_the_run_that_was_trained_is_evaluated(place, folder):
    code, _, calls = run_sh(place, FOLDER=folder, LC_ALL="C")
    assert code == 0 and f"evaluate.py --ckpt {folder} --device auto\n" in calls
    left = Path((place / "home/outcome").read_text().strip())
    assert left.is_absolute() and not left.exists()


def test_where_nothing_was_trained_nothing_is_evaluated(place):
    """A settings file may say `check: true`."""
    code, printed, calls = run_sh(place, "--", "s.yaml", OUTCOME="")
    assert code == 0 and "evaluate.py" not in calls and "Next:" not in printed


def test_evaluation_uses_the_device_of_the_training(place):
    calls = run_sh(place, "--", "--device", "cuda:1", DEVICE="cuda:1")[2]
    assert re.search("evaluate.py --ckpt [^ ]+ --device cuda:1\n", calls)


def test_on_a_cpu_time_is_limited_unless_a_settings_file_or_a_run_says_how_long(place):
    minutes = 60 if os.path.isdir("/opt/minidataset") else 3.5
    commands = {
        "--data d": "train.py --max_minutes 60 --dropout 0 --data d",
        "--lr 1": f"train.py --max_minutes {minutes} --dropout 0 --lr 1",
        "s.yaml --lr 1": "train.py s.yaml --lr 1",
        "--resume runs/b": "train.py --resume runs/b",
    }
    for flags, expected in commands.items():
        code, _, calls = run_sh(place, "--", *flags.split(), WITHOUT_GPU="1")
        assert code == 0 and re.search(f"{expected}\n", calls) and "evaluate.py" in calls, flags
    calls = run_sh(place, "--", "--device", "cpu")[2]
    assert f"train.py --max_minutes {minutes} --dropout 0 --device cpu" in calls
    assert "--max_minutes" not in run_sh(place)[2]  # on a GPU
    for flag in ("--help", "--check"):
        code, _, calls = run_sh(place, "--", flag)
        assert code == 0 and f"train.py {flag}\n" in calls and "evaluate.py" not in calls


# Under nohup SIGHUP is ignored by this process and by those it starts.
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
SIGNALS = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_it_and_nothing_is_evaluated(place, number):
    environment = {**os.environ, "TRAINS_FOR": "3000"}
    process = subprocess.Popen(["bash", "../repo/run.sh"], cwd=place / "home", env=environment)
    deadline = time.monotonic() + HANGS
    while not (place / "home/started").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=HANGS) == 128 + number
    assert "evaluate.py" not in (place / "log").read_text()


def test_a_run_that_was_interrupted_or_failed_is_not_evaluated(place):
    code, printed, calls = run_sh(place, OUTCOME="interrupted")
    assert code == 130 and "interrupted" in printed and "evaluate.py" not in calls
    code, _, calls = run_sh(place, CODE="2")
    assert code == 2 and "evaluate.py" not in calls
    assert not Path((place / "home/outcome").read_text().strip()).exists()


def test_the_last_line_of_a_run_on_the_sample_says_so(place):
    notice = "bundled sample, not WMT19: this score says only that the program works"
    code, printed, _ = run_sh(place, NOTICE=notice)
    assert code == 0 and notice == printed.rstrip().splitlines()[-1]
    assert "bundled sample" not in run_sh(place)[1]
