"""A resumed run has one curve without doubles; other ranks are silent."""

import importlib
import json
import sys
import time
from dataclasses import make_dataclass

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as PageAccumulator,
)
from tensorboard.summary.writer import event_file_writer
from tensorboard.util import tensor_util

from engine import telemetry as tm

# TensorBoard reads event files by name, "…SECONDS.HOST.PROCESS.NUMBER". Here starts may share a
# second: 9 comes after 10.
event_file_writer._global_uid = event_file_writer.AtomicCounter(10**6)


def records(run) -> list[dict]:
    return [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def curve(run, tag: str) -> list[tuple[int, float]]:
    """The points of a curve, which both of TensorBoard's readers must show alike."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    points = [(event.step, event.value) for event in events.Scalars(tag)]
    page = PageAccumulator(str(run), tensor_size_guidance={"scalars": 0}).Reload()
    assert [
        (event.step, tensor_util.make_ndarray(event.tensor_proto).item())
        for event in page.Tensors(tag)
    ] == points
    return points


def write(run, steps, resume_step=None, value=1.0) -> tm.Telemetry:
    telemetry = tm.Telemetry(run, resume_step=resume_step)
    for step in steps:
        telemetry.scalars(step, {"loss/train": value * step, "speed/tokens_per_second": 5})
    return telemetry


# ---------------------------------------------------------------- Telemetry


def test_a_resumed_run_leaves_one_curve_in_both_files(tmp_path):
    killed = write(tmp_path, range(1, 6))  # not closed
    killed.scalars(
        6, {f"tag {number}": number for number in range(1000)}
    )  # a line longer than any buffer
    killed.scalars(7, {"loss/train": 7.0})
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    write(tmp_path, range(4, 9), resume_step=3, value=2.0)
    resumed_once = [(1, 1.0), (2, 2.0), (3, 3.0)] + [(step, 2.0 * step) for step in range(4, 9)]
    assert curve(tmp_path, "loss/train") == resumed_once
    write(tmp_path, range(3, 6), resume_step=2, value=3.0).close()
    expected = [(1, 1.0), (2, 2.0), (3, 9.0), (4, 12.0), (5, 15.0)]
    assert curve(tmp_path, "loss/train") == expected
    assert [(record["step"], record["loss/train"]) for record in records(tmp_path)] == expected
    write(tmp_path, [1], resume_step=0).close()  # from the start
    assert curve(tmp_path, "loss/train") == [(1, 1.0)] and [
        record["step"] for record in records(tmp_path)
    ] == [1]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_validation_that_is_repeated_has_one_record(tmp_path):
    tag = "valid/loss"
    killed = write(tmp_path, range(1, 5))
    for step in (2, 4):
        killed.scalars(step, {tag: 1.0})
    tm.Telemetry(tmp_path, resume_step=4, last_validation=2).close()  # saved before validating
    assert [record["step"] for record in records(tmp_path) if tag in record] == [2]
    assert [record["step"] for record in records(tmp_path) if tag not in record] == [1, 2, 3, 4]


def test_torn_ends_of_both_files_are_dropped(tmp_path):
    write(tmp_path, range(1, 6)).close()
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('nonsense\n{"step": 6, "time": 1')
    events = next(tmp_path.glob("events.*"))
    events.write_bytes(events.read_bytes()[:-7])
    write(tmp_path, [6, 7], resume_step=5).close()
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    # Of the torn event file the last record is lost (here a value of step 5), and the new file is
    # read all the same.
    assert [step for step, _ in curve(tmp_path, "loss/train")] == [1, 2, 3, 4, 5, 6, 7]


def test_another_rank_is_silent_and_creates_nothing(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    telemetry = tm.Telemetry(tmp_path / "run", resume_step=3)
    telemetry.scalars(1, {"loss": 1.0})
    telemetry.text("sample", 1, "text")
    telemetry.figure("attention", 1, None)
    telemetry.hyperparameters(None, {"hparam/bleu": 1.0})
    telemetry.close()
    tm.Log(tmp_path / "run")("nothing")
    assert list(tm.progress_bar(range(3))) == [0, 1, 2]
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "values, given, shown",
    [
        (
            (0.2, 6, True),
            {"layers"},
            {"lr": 0.2, "layers": 6, "tied": 1},
        ),  # not as by default, or typed
        ((0.3, 6, False), None, {"lr": 0.3}),  # settings made in Python
    ],
)
def test_hyperparameters(tmp_path, values, given, shown):
    config = make_dataclass(
        "Config", [("lr", float, 0.1), ("layers", int, 6), ("tied", bool, False)]
    )(*values)
    if given:
        config.given = given
    telemetry = write(tmp_path, [5])
    telemetry.hyperparameters(config, {"hparam/bleu": 30.0})
    telemetry.close()
    telemetry.scalars(6, {"hparam/bleu": 1.0})  # after close: nothing, no error
    assert (
        all(path.is_file() for path in tmp_path.iterdir())
        and len(list(tmp_path.glob("events.*"))) == 1
    )
    assert curve(tmp_path, "hparam/bleu") == [(5, 30.0)]
    hparams = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    content = (
        EventAccumulator(str(tmp_path)).Reload().SummaryMetadata("_hparams_/session_start_info")
    )
    settings = hparams.HParamsPluginData.FromString(
        content.plugin_data.content
    ).session_start_info.hparams
    assert {name: value.number_value for name, value in settings.items()} == shown


def test_a_curve_that_cannot_be_written_ends_no_training(tmp_path, monkeypatch, capsys):
    telemetry = write(tmp_path / "run", [1])

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(telemetry.writer, "add_scalar", full)
    for step in (2, 3):
        telemetry.scalars(step, {"loss": 1.0})
    telemetry.close()
    note = capsys.readouterr().err
    assert (
        note.count("\n") == 1
        and "No space left on device" in note
        and len(records(tmp_path / "run")) == 1
    )


# ---------------------------------------------------------------- Log and progress


def test_log_prints_and_appends_with_the_time(tmp_path, capsys):
    for message in ("first 训练", "second"):
        tm.Log(tmp_path)(message)
    tm.Log()("to the terminal only")
    assert capsys.readouterr().out == "first 训练\nsecond\nto the terminal only\n"
    lines = (tmp_path / "train.log").read_text(encoding="utf-8").splitlines()
    assert [line[20:] for line in lines] == ["first 训练", "second"]
    assert time.strptime(lines[0][:19], "%Y-%m-%d %H:%M:%S")


def test_progress_shows_a_bar_on_a_terminal_only(capsys, monkeypatch):
    assert list(tm.progress_bar(range(3))) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with tm.progress_bar(total=2, desc="epoch") as bar:
        bar.update(2)
        tm.Log()("above the bar")
    captured = capsys.readouterr()
    assert "epoch" in captured.err
    assert "above the bar" in captured.out


def test_a_long_line_is_broken_between_its_columns():
    line = "step     20  epoch 0.12  loss 5.123  12,345 tokens/s  |gradient| 1.23"
    assert tm.fold(line, 100) == line
    assert tm.fold(line, 50).split("\n") == [
        "step     20  epoch 0.12  loss 5.123",
        "    12,345 tokens/s  |gradient| 1.23",
    ]
    assert tm.fold("a line of words is broken", 12).split("\n") == [
        "a line of",
        "    words is",
        "    broken",
    ]


def test_lines_are_broken_on_a_terminal_only(tmp_path, capsys, monkeypatch):
    line = "word " * 30
    log = tm.Log(tmp_path)
    log(line)
    assert capsys.readouterr().out == line + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    log(line)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and max(map(len, printed)) <= 80
    for kept in (tmp_path / "train.log").read_text(encoding="utf-8").splitlines():
        assert kept[20:] == line
