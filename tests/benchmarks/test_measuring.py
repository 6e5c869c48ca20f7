"""Taking turns, counting, comparing, keeping."""

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from benchmarks import measuring as ms
from engine.errors import UserError
from engine.memory import held_gib

RUNS = [
    ms.Run("slow", 1, {"speed": 10.0, "gib": 1.0}, 1.0, 0.0),
    ms.Run("fast", 1, {"speed": 40.0}, 1.0, 0.0),
    ms.Run("slow", 2, {"speed": 20.0, "gib": 3.0}, 1.0, 0.5),
    ms.Run("fast", 2, {"speed": 50.0}, 1.0, 0.0),
]


@dataclass
class Config:
    out: str
    rounds: int = 2


def test_contestants_take_turns(tmp_path, capsys):
    order, out = [], str(tmp_path / "out.json")
    ms.measure(
        "test", ["a", "b"], Config(out), lambda name: order.append(name) or {"speed": 1.0}, "speed"
    )
    assert order == ["a", "b", "a", "b"]
    assert [(run.contestant, run.round) for run in ms.read_json(out)] == [
        ("a", 1),
        ("b", 1),
        ("a", 2),
        ("b", 2),
    ]
    assert capsys.readouterr().out.count("round") == 4


def test_one_who_cannot_take_part_is_asked_once(tmp_path):
    asked, out = [], str(tmp_path / "out.json")
    turn = lambda name: asked.append(name) or ({"speed": 1} if name == "a" else None)  # noqa: E731
    ms.measure("test", ["a", "absent"], Config(out, 3), turn, "speed")
    assert asked.count("absent") == 1 and len(ms.read_json(out)) == 3


def test_medians_and_ratios():
    slow, fast = ms.compare(RUNS, "speed", baseline="slow")
    assert (slow.median, slow.least, slow.most, slow.runs, slow.disturbed) == (15, 10, 20, 2, 1)
    assert fast.ratio == pytest.approx(3) and slow.ratio == 1
    assert slow.more == {"gib": 2} and fast.more == {}
    assert [row.ratio for row in ms.compare(RUNS, "speed", baseline="nobody")] == [None, None]


def test_table(capsys):
    ms.print_table(ms.compare(RUNS, "speed", baseline="slow"), "a title")
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 4 and len(set(map(len, lines))) == 1
    assert "3.00" in lines[3] and "1 disturbed" in lines[2]


def test_json_comes_back(tmp_path):
    ms.write_json(tmp_path / "new" / "file.json", RUNS, title="test")
    assert ms.read_json(tmp_path / "new" / "file.json") == RUNS
    content = json.loads((tmp_path / "new" / "file.json").read_text())
    assert content["title"] == "test" and content["machine"]["cores"] >= 1
    assert ms.read_json(tmp_path / "none.json") == []


def test_tokens_count_the_end_and_no_padding():
    assert ms.tokens_of([[5, 6], [], [7]]) == 3 + 1 + 2


def test_own_work_and_idle_time_are_not_the_others(monkeypatch):
    monkeypatch.setattr(ms, "read", lambda path: "cpu  300 20 30 9999 77 4 5 41 6 0\ncpu0 1\n")
    monkeypatch.setattr(
        os, "times", lambda: (0.5, 0.25, 1.0, 0.25, 99.0)
    )  # ours, our children's, the wall's
    monkeypatch.setattr(os, "sysconf", lambda name: 100)  # ticks a second
    assert ms.others_seconds() == 4.0 - 2.0
    monkeypatch.setattr(ms, "read", lambda path: "")
    assert ms.others_seconds() is None


def test_memory_grows_with_what_is_held():
    before = held_gib("VmRSS")
    held = mmap.mmap(-1, 2**28)  # new memory, whatever malloc has left over from other tests
    held[:: 2**12] = b"x" * len(held[:: 2**12])  # touch every page
    assert before + 0.24 < held_gib("VmRSS") <= held_gib() + 0.01  # read one after the other


def test_threads_are_pinned_to_cores():
    variables = ms.pinned(1)
    assert variables["OMP_NUM_THREADS"] == "1"
    assert "GOMP_CPU_AFFINITY" not in ms.pinned(1, pin=False)


def test_a_new_process_has_its_environment_and_this_one_keeps_its_own():
    assert ms.in_new_process(os.getenv, "BENCHMARK_WORD", BENCHMARK_WORD="there") == "there"
    assert "BENCHMARK_WORD" not in os.environ


SCRIPT = """
import signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1].partition("=")[2])
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
(folder / "begun").touch()
while not asked and "wait" in sys.argv[2]:
    time.sleep(0.01)
time.sleep(0.5 if asked else 0)  # longer than a parent waits that kills
(folder / "train.log").write_text("step 1\\n" + sys.argv[2].partition("=")[2] + "\\n")
"""


def test_a_training_that_was_stopped_is_no_result(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ms.call(str(script), {"run": tmp_path, "last": "next: evaluate"})
    with pytest.raises(UserError, match="did not end"):
        ms.call(str(script), {"run": tmp_path, "last": "to resume: python train.py --resume"})


def test_interrupted_it_waits_until_the_training_has_saved(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's `&` has it ignored
    flags = {"run": str(tmp_path), "last": "wait"}
    code += f"from benchmarks.measuring import call; call({str(script)!r}, {flags})"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ms.ROOT, start_new_session=True, stderr=subprocess.PIPE
    ) as process:
        while not (tmp_path / "begun").exists() and process.poll() is None:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert b"KeyboardInterrupt" in process.stderr.read()
    assert (tmp_path / "train.log").read_text() == "step 1\nwait\n"
