"""A resumed run has one curve without doubles; other ranks are silent."""

import importlib
import json
import re
import sys
import time
from dataclasses import dataclass

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as PageAccumulator,
)
from tensorboard.summary.writer import event_file_writer
from tensorboard.util import tensor_util

from engine import telemetry as tm
from engine.config import flag

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


LENGTHS = {0: 0}  # step → length of metrics.jsonl after it, as its checkpoint would have it


def write(run, steps, resume_step=None, value=1.0) -> tm.Telemetry:
    telemetry = tm.Telemetry(run, resume_step, LENGTHS.get(resume_step, 0))
    for step in steps:
        telemetry.scalars(step, {"train/loss": value * step, "speed/tokens_per_second": 5})
        LENGTHS[step] = telemetry.sync()
    return telemetry


# ---------------------------------------------------------------- Telemetry


def test_a_resumed_run_leaves_one_curve_in_both_files(tmp_path):
    killed = write(tmp_path, range(1, 6))  # not closed
    killed.scalars(
        6, {f"tag {number}": number for number in range(1000)}
    )  # a line longer than any buffer
    killed.scalars(7, {"train/loss": 7.0})
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    write(tmp_path, range(4, 9), resume_step=3, value=2.0)
    resumed_once = [(1, 1.0), (2, 2.0), (3, 3.0)] + [(step, 2.0 * step) for step in range(4, 9)]
    assert curve(tmp_path, "train/loss") == resumed_once
    write(tmp_path, range(3, 6), resume_step=2, value=3.0).close()
    expected = [(1, 1.0), (2, 2.0), (3, 9.0), (4, 12.0), (5, 15.0)]
    assert curve(tmp_path, "train/loss") == expected
    assert [(record["step"], record["train/loss"]) for record in records(tmp_path)] == expected
    write(tmp_path, [1], resume_step=0).close()  # from the start
    assert curve(tmp_path, "train/loss") == [(1, 1.0)] and [
        record["step"] for record in records(tmp_path)
    ] == [1]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_resumed_run_keeps_what_was_written_when_its_checkpoint_was_saved(tmp_path):
    """Of one step, too: the validation after the save is repeated, so its record goes."""
    killed = write(tmp_path, range(1, 5))
    length = killed.sync()
    assert length == (tmp_path / "metrics.jsonl").stat().st_size
    killed.scalars(4, {"valid/loss": 1.0})
    resumed = tm.Telemetry(tmp_path, 4, length)
    resumed.scalars(4, {"valid/loss": 2.0})
    assert resumed.sync() == (tmp_path / "metrics.jsonl").stat().st_size
    assert [record.get("valid/loss") for record in records(tmp_path)] == [None] * 4 + [2.0]


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
    assert [step for step, _ in curve(tmp_path, "train/loss")] == [1, 2, 3, 4, 5, 6, 7]


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


@dataclass
class Config:
    lr: float = flag(0.1, "", "Training")
    layers: int = flag(6, "", "Model")
    data: str = flag("", "", "Data")
    workers: int = flag(0, "", "Data")
    device: str = flag("auto", "", "Run")
    seed: int = flag(1, "", "Run")


def test_hyperparameters_are_those_that_matter_the_seed_and_what_the_user_chose(tmp_path):
    """Also at their defaults: two runs can be compared in every column."""
    telemetry = write(tmp_path, [5])
    telemetry.hyperparameters(Config(data="corpus"), {"result/bleu": 30.0, "result/none": None})
    telemetry.close()
    telemetry.scalars(6, {"result/bleu": 1.0})  # after close: nothing, no error
    assert all(path.is_file() for path in tmp_path.iterdir())
    assert len(list(tmp_path.glob("events.*"))) == 1
    assert curve(tmp_path, "x_result/bleu") == [(5, 30.0)]
    hparams = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")

    def content(tag: str):
        events = EventAccumulator(str(tmp_path)).Reload()
        data = events.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content
        return hparams.HParamsPluginData.FromString(data)

    settings = content("session_start_info").session_start_info.hparams
    shown = {name: value.number_value or value.string_value for name, value in settings.items()}
    assert shown == {"lr": 0.1, "layers": 6, "data": "corpus", "seed": 1}
    metrics = content("experiment").experiment.metric_infos
    assert [metric.name.tag for metric in metrics] == ["x_result/bleu"]


def test_tensorboard_shows_training_and_validation_first_and_the_hardware_last(tmp_path):
    """It sorts by the first part of a tag."""
    telemetry = tm.Telemetry(tmp_path)
    curves = "speed/tokens_per_second cpu/memory_gib data/wait_share gpu/power_watt memory/peak_gib"
    telemetry.scalars(1, dict.fromkeys(["valid/loss", "train/loss", *curves.split()], 1.0))
    from matplotlib.figure import Figure

    for tag in ("filters", "valid/cross-attention"):
        telemetry.figure(tag, 1, Figure(figsize=(1, 1)))
    telemetry.text("valid/samples", 1, "text")
    telemetry.close()
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()
    groups = sorted({tag.partition("/")[0] for tag in tags["scalars"] + tags["images"]})
    assert groups == "train valid w_filters x_data x_speed y_cpu y_gpu y_memory".split()
    assert "valid/cross-attention" in tags["images"]
    assert "valid/samples/text_summary" in tags["tensors"]
    # The file that the report reads keeps the plain names.
    (record,) = records(tmp_path)
    assert "cpu/memory_gib" in record and "y_cpu/memory_gib" not in record


def test_training_and_validation_loss_are_in_one_chart(tmp_path):
    write(tmp_path, [1]).close()
    write(tmp_path, [3], resume_step=2).close()  # a resumed run has the chart, too
    layout_pb2 = importlib.import_module("tensorboard.plugins.custom_scalar.layout_pb2")
    events = EventAccumulator(str(tmp_path)).Reload()
    (event, *_) = events.Tensors("custom_scalars__config__")
    (text,) = tensor_util.make_ndarray(event.tensor_proto).flatten()
    layout = layout_pb2.Layout.FromString(text)
    (category,) = layout.category
    patterns = {chart.title: chart.multiline.tag[0] for chart in category.chart}
    losses = ["train/loss", "valid/loss", "test/loss", "train/smoothed_loss"]
    assert [tag for tag in losses if re.match(patterns["loss"], tag)] == losses[:3]
    # No run has a chart without curves: labs log an accuracy, train.py a BLEU.
    scores = ["valid/accuracy", "valid/bleu", "valid/bleurt"]
    assert [tag for tag in scores if re.match(patterns["score"], tag)] == scores[:2]


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
