"""Figures of the GPU, the speed of training and the machine's peak."""

import sys
import threading
from itertools import accumulate, chain, cycle, repeat
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import HANGS

from engine import memory, meters

# ---------------------------------------------------------------- GpuSampler


class NVMLError(Exception):
    pass


def fake_nvml() -> SimpleNamespace:
    """Two cards in NVML's order.

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
    sampler = meters.GpuSampler("cuda:0")
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
    sampler, sampled = meters.GpuSampler("cuda", interval=0.0), threading.Event()
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
    sampler = meters.GpuSampler("cpu" if case == "device cpu" else "cuda", log=said.append)
    sampler.start()
    sampler.join()
    assert sampler.read() == {}
    assert (
        len(said) == 1
        and said[0].startswith("no GPU figures will be recorded")
        and "\n" not in said[0]
    )


# ---------------------------------------------------------------- ProcessMeter


def test_the_load_of_the_cpu_is_in_percent_of_a_core(monkeypatch):
    """Six seconds of work in four; half a second, which means too little; half of one in two."""
    monkeypatch.setattr(meters.time, "perf_counter", iter([10.0, 14.0, 14.5, 16.0]).__next__)
    monkeypatch.setattr(meters.time, "process_time", iter([3.0, 9.0, 9.5]).__next__)
    process = meters.ProcessMeter()
    assert process.read()["cpu/utilisation_percent"] == 150
    assert process.read() == {}
    assert process.read()["cpu/utilisation_percent"] == 25


# ---------------------------------------------------------------- Meter


@pytest.fixture
def clock() -> Mock:
    """`clock.return_value` is the time, in seconds."""
    return Mock(return_value=1000.0)


def test_meter_arithmetic_over_a_sliding_window(clock):
    meter = meters.Meter(2, 1000.0, lambda source, target: 10.0 * source, clock)
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
    meter = meters.Meter(50, 1.0, max, clock)
    meter.resume()  # a resumed run may validate before its first step, which is not counted
    clock.return_value += 60
    for seconds, pause in ((0, 0), (1, 3600), (1, 0)):
        clock.return_value += seconds
        meter.add(5, 5, 10)
        meter.end_step()
        clock.return_value += pause
        meter.resume()
    assert meter.read()["speed/tokens_per_second"] == pytest.approx(10)


# ---------------------------------------------------------------- the device


@pytest.mark.parametrize(
    "first",
    [
        pytest.param([], id="quiet"),
        # For half a second, more than the usual 0.2, another program has the processor.
        pytest.param([0.05, 0.1, 0.15, 0.2], id="disturbed"),
    ],
)
def test_measured_peak_is_that_of_the_fastest_products(monkeypatch, first):
    """By a clock of our own: the products take these seconds, then 0.03, 0.02, 0.03 …"""
    products = chain(first, cycle([0.03, 0.02]))
    waits = chain([0.0], chain.from_iterable((0.0, seconds) for seconds in products))
    monkeypatch.setattr(meters.time, "perf_counter", accumulate(waits).__next__)
    meters.measured_peak_flops.cache_clear()
    peak = meters.measured_peak_flops(torch.device("cpu"), torch.float32)
    assert peak == pytest.approx(2 * 1024**3 / 0.02, rel=1e-6)
    assert meters.measured_peak_flops(torch.device("cpu"), torch.float32) == peak  # kept
    meters.measured_peak_flops.cache_clear()


@pytest.mark.parametrize("platform, unit", [("linux", 2**10), ("darwin", 1)])
def test_peak_memory_of_the_process_is_in_gib(monkeypatch, platform, unit):
    monkeypatch.setattr(
        memory.Path, "read_text", Mock(return_value="VmRSS:\t1 kB\n")
    )  # all that gVisor tells
    monkeypatch.setattr(memory.sys, "platform", platform)
    monkeypatch.setattr(
        memory.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=3 * 2**30 // unit)
    )
    assert meters.peak_memory_gib(torch.device("cpu")) == 3


# ---------------------------------------------------------------- how long


@pytest.mark.parametrize(
    "minutes, shown",
    [
        (0, "0.0 min"),
        (9.94, "9.9 min"),
        (9.96, "10 min"),
        (119, "119 min"),
        (121, "2.0 h"),
        (3712.6, "2.6 days"),
        (47 * 60, "47.0 h"),
    ],
)
def test_a_duration_for_people(minutes, shown):
    assert meters.duration(minutes) == shown


def test_long_work_is_announced_every_half_minute_with_what_is_left():
    said, seconds = [], [0.0]
    announce = meters.Announcer("cleaning", 1000, said.append, clock=lambda: seconds[0])
    for done in range(1, 1001):
        seconds[0] += 0.1  # 100 s in all
        announce(done)
    assert said == [
        "cleaning: 30 % done, about 1.2 min left",
        "cleaning: 60 % done, about 0.7 min left",
        "cleaning: 90 % done, about 0.2 min left",
    ]
    seconds[0] += 30
    announce(1500)  # the total was too low
    assert said[3:] == ["cleaning: 1,500 done so far"]


def test_short_work_is_not_announced():
    said = []
    announce = meters.Announcer("cleaning", 10, said.append, clock=lambda: 5.0)
    announce(10)
    assert not said
