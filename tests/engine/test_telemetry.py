"""One curve without doubles after a kill and a resume;

Silence on other ranks; figures that are what they say.
"""

import importlib
import json
import sys
import threading
import time
from dataclasses import make_dataclass
from itertools import accumulate, chain, cycle, repeat
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import HANGS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as PageAccumulator,
)
from tensorboard.summary.writer import event_file_writer
from tensorboard.util import tensor_util

from engine import memory
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
    write(tmp_path, range(3, 6), resume_step=2, value=3.0).close()
    expected = [(1, 1.0), (2, 2.0), (3, 9.0), (4, 12.0), (5, 15.0)]
    assert curve(tmp_path, "loss/train") == expected
    assert [(record["step"], record["loss/train"]) for record in records(tmp_path)] == expected
    write(tmp_path, [1], resume_step=0).close()  # from the start
    assert curve(tmp_path, "loss/train") == [(1, 1.0)] and [
        record["step"] for record in records(tmp_path)
    ] == [1]
    assert not list(tmp_path.glob("*.tmp"))


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
    assert list(tm.progress(range(3))) == [0, 1, 2]
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
    assert list(tm.progress(range(3))) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with tm.progress(total=2, desc="epoch") as bar:
        bar.update(2)
        tm.Log()("above the bar")
    captured = capsys.readouterr()
    assert "epoch" in captured.err
    assert "above the bar" in captured.out


# ---------------------------------------------------------------- GpuSampler


class NVMLError(Exception):
    pass


def fake_nvml() -> SimpleNamespace:
    """Two cards in NVML's order;

    CUDA sees the second one only, as its device 0. The second card tells no power.
    """
    utilisation = {"b": chain([50, 100], repeat(20))}
    cards, places = (
        {"GPU-aaaa": "a", "GPU-bbbb": "b"},
        {"00000000:0a:00.0": "a", "00000000:b1:00.0": "b"},
    )
    refuse = Mock(side_effect=NVMLError("not found, or not supported"))
    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetPowerUsage=refuse,
        nvmlDeviceGetHandleByUUID=lambda uuid: cards.get(uuid) or refuse(),
        nvmlDeviceGetHandleByPciBusId=places.__getitem__,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=next(utilisation[handle])),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=3 * 2**30),
        nvmlDeviceGetTemperature=lambda handle, sensor: 61,
    )


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())

    def see(uuid):
        properties = SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=0xB1, pci_device_id=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return see


@pytest.mark.parametrize("uuid", ["bbbb", "the uuid of a MIG slice"])
def test_sampler_finds_its_card_and_averages(nvml, uuid):
    nvml(uuid)
    sampler = tm.GpuSampler("cuda:0")
    sampler.sample()
    sampler.sample()
    expected = {
        "gpu/utilisation_percent": 75.0,
        "gpu/memory_gib": 3.0,
        "gpu/temperature_celsius": 61.0,
    }
    assert sampler.read() == expected
    assert sampler.read() == {}
    sampler.sample()
    assert sampler.read()["gpu/utilisation_percent"] == 20.0


def test_sampler_runs_beside_the_training_and_ends(nvml, monkeypatch):
    nvml("bbbb")
    sampler, sampled = tm.GpuSampler("cuda", interval=0.0), threading.Event()
    sample = sampler.sample
    monkeypatch.setattr(sampler, "sample", lambda: (sample(), sampled.set()))
    sampler.start()
    assert sampled.wait(HANGS)
    assert sampler.read()["gpu/memory_gib"] == 3.0 and sampler.daemon
    sampler.ended.set()
    sampler.join()


@pytest.mark.parametrize("case", ["no package", "no driver", "no GPU", "device cpu"])
def test_sampler_without_a_gpu_says_one_line_and_gives_nothing(monkeypatch, case):
    fake = fake_nvml()
    monkeypatch.setitem(sys.modules, "pynvml", None if case == "no package" else fake)
    if case == "no driver":
        monkeypatch.setattr(
            fake, "nvmlInit", Mock(side_effect=NVMLError("NVML Shared\nLibrary Not Found"))
        )
    said = []
    sampler = tm.GpuSampler("cpu" if case == "device cpu" else "cuda", log=said.append)
    sampler.start()
    sampler.join()
    assert sampler.read() == {}
    assert (
        len(said) == 1
        and said[0].startswith("no GPU figures will be recorded")
        and "\n" not in said[0]
    )


# ---------------------------------------------------------------- Meter


@pytest.fixture
def clock() -> Mock:
    """`clock.return_value` is the time, in seconds."""
    return Mock(return_value=1000.0)


def test_meter_arithmetic_over_a_sliding_window(clock):
    meter = tm.Meter(2, 1000.0, lambda source, target: 10.0 * source, clock)
    # The first step holds start-up and compilation, the second leaves the window below.
    for seconds, tokens in ((500, 2), (100, 20)):
        assert meter.read() == {}
        clock.return_value += seconds
        meter.add(tokens // 2, tokens // 2, tokens)
        meter.end_step()
    assert meter.read()["speed/tokens_per_second"] == pytest.approx(0.2)
    for seconds, source_tokens, target_tokens in ((1, 60, 40), (3, 120, 80)):
        for _ in range(2):  # micro-batches
            with meter.waiting():
                clock.return_value += seconds / 8
            meter.add(source_tokens // 2, target_tokens // 2, 100)
        clock.return_value += seconds * 6 / 8
        meter.end_step()
    expected = {
        "speed/tokens_per_second": 300 / 4,
        "speed/target_tokens_per_second": 120 / 4,
        "data/padding_share": 1 - 300 / 400,
        "data/wait_share": 1 / 4,
        "speed/model_flops_utilisation": 1800 / 4 / 1000,
    }
    assert meter.read() == pytest.approx(expected)


def test_meter_leaves_out_pauses(clock):
    meter = tm.Meter(clock=clock)
    for seconds, pause in ((0, 0), (1, 3600), (1, 0)):
        clock.return_value += seconds
        meter.add(5, 5, 10)
        meter.end_step()
        clock.return_value += pause
        meter.resume()
    assert meter.read()["speed/tokens_per_second"] == pytest.approx(10)
    assert "speed/model_flops_utilisation" not in meter.read()


# ---------------------------------------------------------------- the device


def test_measured_peak_is_the_best_of_many_products(monkeypatch):
    """By a clock of our own, first looked at for the end:

    The products take 0.03, 0.02, 0.03 … seconds.
    """
    waits = chain([0.0], cycle([0.0, 0.03, 0.0, 0.02]))
    monkeypatch.setattr(tm.time, "perf_counter", accumulate(waits).__next__)
    tm.measured_peak_flops.cache_clear()
    peak = tm.measured_peak_flops(torch.device("cpu"), torch.float32)
    assert peak == pytest.approx(2 * 1024**3 / 0.02, rel=1e-6)
    assert tm.measured_peak_flops(torch.device("cpu"), torch.float32) == peak  # kept
    tm.measured_peak_flops.cache_clear()


@pytest.mark.parametrize("platform, unit", [("linux", 2**10), ("darwin", 1)])
def test_peak_memory_of_the_process_is_in_gib(monkeypatch, platform, unit):
    monkeypatch.setattr(
        memory.Path, "read_text", Mock(return_value="VmRSS:\t1 kB\n")
    )  # all that gVisor tells
    monkeypatch.setattr(memory.sys, "platform", platform)
    monkeypatch.setattr(
        memory.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=3 * 2**30 // unit)
    )
    assert tm.peak_memory_gib(torch.device("cpu")) == 3
