"""Taking turns, comparing, adding rows to a table."""

import json
import sys

import pytest

from benchmarks import measuring as ms
from engine.errors import UserError


def test_contestants_take_turns_and_who_cannot_is_asked_once(capsys):
    asked = []

    def turn(name):
        asked.append(name)
        return None if name == "absent" else {"speed": 1.0}

    rows = ms.measure("title", ["a", "absent", "b"], turn, "speed", rounds=2)
    assert asked == ["a", "absent", "b", "a", "b"]
    assert [row.contestant for row in rows] == ["a", "b"]
    assert capsys.readouterr().out.count("round") == 4
    with pytest.raises(UserError, match="no contestant could be measured"):
        ms.measure("title", ["absent"], turn, "speed", rounds=2)


def test_medians_and_ratios_in_a_table():
    turns = {
        "slow": [{"speed": 10.0, "gib": 1.0}, {"speed": 20.0, "gib": 3.0}],
        "fast": [{"speed": 40.0}, {"speed": 50.0}],
    }
    slow, fast = ms.compare(turns, "speed", baseline="slow")
    assert (slow.figures, slow.least, slow.most, slow.turns) == ({"speed": 15, "gib": 2}, 10, 20, 2)
    assert slow.ratio == 1
    assert fast.ratio == 3
    assert [row.ratio for row in ms.compare(turns, "speed", baseline="nobody")] == [None, None]
    lines = ms.as_table([slow, fast], "speed").splitlines()
    assert len(lines) == 4
    assert len(set(map(len, lines))) == 1
    assert "3.00" in lines[3]


def test_rows_are_added_to_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks/x.py", "--json", "t.json"])
    file = tmp_path / "folder" / "t.json"
    ms.add_rows("", [{"who": "a"}])
    for who in ("a", "b"):
        ms.check_table(str(file), ["who"])
        ms.add_rows(str(file), [{"who": who}])
    table = json.loads(file.read_text())
    assert table["rows"] == [{"who": "a"}, {"who": "b"}]
    assert table["columns"] == [["who", "who", "who"]]
    assert len(table["commands"]) == 1
    assert table["commands"][0].endswith("--json t.json")
    with pytest.raises(UserError, match="has the columns who, not seconds"):
        ms.check_table(str(file), ["seconds"])
    for content in ("not json", "[1]", "{}", '{"columns": [1]}'):
        file.write_text(content)
        with pytest.raises(UserError, match="is not a table like those in docs/results/"):
            ms.check_table(str(file), ["who"])


@pytest.mark.parametrize(
    ("flags", "words"), [("avx2 avx512f", "AVX-512"), ("sse avx2", "AVX2 only"), ("sse", "")]
)
def test_the_hardware_of_a_row(flags, words, monkeypatch):
    monkeypatch.setattr(ms, "cpuinfo", lambda: f"flags : {flags}\n\nprocessor : 1 amx_bf16")
    monkeypatch.setattr(ms, "cpu_name", lambda: "A CPU")
    assert ms.hardware(1)["en"] == "1 core, A CPU" + (f" ({words})" if words else "")
    assert ms.hardware(2)["zh"].startswith("2 核，A CPU")
