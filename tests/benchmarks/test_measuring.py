"""Taking turns, comparing, keeping."""

import os
from dataclasses import dataclass

import pytest

from benchmarks import measuring as ms

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


def test_contestants_take_turns_and_who_cannot_is_asked_once(tmp_path, capsys):
    asked = []

    def turn(name):
        asked.append(name)
        return None if name == "absent" else {"speed": 1.0}

    config = Config(str(tmp_path / "new" / "out.json"))
    ms.measure("title", ["a", "absent", "b"], config, turn, "speed")
    assert asked == ["a", "absent", "b", "a", "b"]
    kept = ms.read_json(config.out)
    assert [(run.contestant, run.round) for run in kept] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert capsys.readouterr().out.count("round") == 4
    assert ms.read_json(tmp_path / "none.json") == []


def test_medians_and_ratios_in_a_table(capsys):
    slow, fast = ms.compare(RUNS, "speed", baseline="slow")
    assert (slow.median, slow.least, slow.most, slow.runs, slow.disturbed) == (15, 10, 20, 2, 1)
    assert slow.ratio == 1
    assert fast.ratio == pytest.approx(3)
    assert slow.more == {"gib": 2}
    assert fast.more == {}
    assert [row.ratio for row in ms.compare(RUNS, "speed", baseline="nobody")] == [None, None]
    ms.print_table([slow, fast], "a title")
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 4
    assert len(set(map(len, lines))) == 1
    assert "3.00" in lines[3]
    assert "1 disturbed" in lines[2]


def test_own_work_and_idle_time_are_not_of_others(monkeypatch):
    monkeypatch.setattr(ms, "read", lambda path: "cpu  300 20 30 9999 77 4 5 41 6 0\ncpu0 1\n")
    # ours, our children's, the wall clock's
    monkeypatch.setattr(os, "times", lambda: (0.5, 0.25, 1.0, 0.25, 99.0))
    monkeypatch.setattr(os, "sysconf", lambda name: 100)  # ticks per second
    assert ms.seconds_of_others() == 4.0 - 2.0
    monkeypatch.setattr(ms, "read", lambda path: "")
    assert ms.seconds_of_others() is None
