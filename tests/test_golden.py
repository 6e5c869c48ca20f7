"""The numbers of small runs are those of the golden record; see tests/golden.py."""

import json

import golden
import pytest


@pytest.mark.slow
def test_runs_compute_what_the_record_says(tmp_path):
    record = json.loads(golden.RECORD.read_text(encoding="utf-8"))
    failures = golden.compare(record, golden.measure(tmp_path))
    assert not failures, "\n".join(failures)
