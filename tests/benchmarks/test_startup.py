"""The benchmark of start-up: reading importtime, and both scripts started for real."""

import json

import pytest

from benchmarks import startup
from benchmarks.startup import Config, import_seconds
from engine.errors import UserError


def test_import_seconds():
    lines = ["import time: self [us] | cumulative | imported package", "import time:       100 |        100 |   torch._C",
             "import time:       200 |        300 | torch", "import time:        50 |         50 | torch._dynamo.utils",
             "step 1  loss", "import time:  1000000 |    1000000 |     transformers.utils"]  # fmt: skip
    assert import_seconds(lines) == {"transformers": 1.0, "torch": 0.0003, "torch._dynamo": 5e-5}
    assert next(iter(import_seconds(lines))) == "transformers"


def test_a_start_that_fails_says_so(tmp_path):
    with pytest.raises(UserError, match="unknown flag --nonsense"):
        startup.start("train.py", "--nonsense", 1, cwd=tmp_path, until="never")


@pytest.mark.slow
def test_both_start_in_time(tmp_path, monkeypatch):
    out = tmp_path / "startup.json"
    startup.main(Config(rounds=1, out=str(out)))
    seconds = {run["contestant"]: run["figures"]["seconds"] for run in json.loads(out.read_text())["runs"]}
    assert seconds["train.py, first step"] < 8 and seconds["evaluate.py, first batch"] < 5
