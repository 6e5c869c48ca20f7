"""How fast a training is, how long work will take, and how busy the CPU and the GPU are."""

import functools
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import contextmanager, suppress

import torch

from engine.memory import GIB, held_gib


def perplexity(loss: float) -> float:
    """exp(loss). The loss is capped at 50: e^50 is as bad as any, and exp overflows at 710."""
    return math.exp(min(loss, 50))


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def duration(minutes: float) -> str:
    """For people: "3.5 min", "48 min", "5.2 h" or "3.1 days"."""
    if minutes < 9.95:
        return f"{minutes:.1f} min"
    if minutes < 120:
        return f"{minutes:.0f} min"
    if minutes < 48 * 60:
        return f"{minutes / 60:.1f} h"
    return f"{minutes / 60 / 24:,.1f} days"


class Announcer:
    """Log lines about work that takes long, at most one in half a minute.

    announce = Announcer("cleaning", 1000, log)
    for done in range(1000):
        announce(done)                                 # cleaning: 45 % done, about 2.1 min left

    A progress bar shows more, but neither in a pipe nor in train.log.
    """

    INTERVAL = 30.0  # seconds

    def __init__(self, work: str, total: int, log: Callable, clock=time.monotonic):
        self.work = work
        self.total = total
        self.log = log
        self.clock = clock
        self.begun = clock()
        self.last = self.begun  # when a line was logged

    def __call__(self, done: int) -> None:
        """`done` of `total` are done, in all."""
        now = self.clock()
        if now - self.last < self.INTERVAL:
            return
        self.last = now
        if not 0 < done <= self.total:  # the total was an estimate
            self.log(f"{self.work}: {done:,} done so far")
            return
        share = done / self.total
        left = (now - self.begun) / 60 * (1 - share) / share
        self.log(f"{self.work}: {100 * share:.0f} % done, about {duration(left)} left")


class ProcessMeter:
    """How busy this process has kept the CPU (100 %: one core), and the memory that it holds.

    With several processes, rank 0's figures.
    """

    def __init__(self):
        self.last_time = time.perf_counter()
        self.last_busy = time.process_time()

    def read(self) -> dict[str, float]:
        """The averages since the last `read`; {} within a second of it, which means too little."""
        now = time.perf_counter()
        seconds = now - self.last_time
        if seconds < 1:
            return {}
        busy = time.process_time()
        share = (busy - self.last_busy) / seconds
        self.last_time = now
        self.last_busy = busy
        return {"cpu/utilisation_percent": 100 * share, "cpu/memory_gib": held_gib("VmRSS")}


class GpuSampler(threading.Thread):
    """A thread that asks NVML every `interval` seconds how busy, full and hot the GPU is.

    Without a GPU or without NVML (package nvidia-ml-py) it logs one line, and `read()` returns {}.
    """

    def __init__(self, device="cuda", interval: float = 5.0, log=print):
        super().__init__(daemon=True, name="gpu-sampler")
        self.interval = interval
        self.samples: dict[str, list[float]] = {}  # tag: values since the last `read`
        self.lock = threading.Lock()
        self.ended = threading.Event()
        try:
            self.nvml, self.handle = nvml_of(device)
        except Exception as error:  # no package, no driver, no GPU, no permission
            reason = " ".join(str(error).split())
            log(f"no GPU figures will be recorded: {reason}")
            self.ended.set()

    def run(self) -> None:
        """The thread: a sample every `interval` seconds, until `ended`."""
        while not self.ended.is_set():
            self.sample()
            self.ended.wait(self.interval)

    def sample(self) -> None:
        """Ask NVML once and keep its answers until the next `read`."""
        nvml, handle = self.nvml, self.handle
        functions = {
            "gpu/utilisation_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            # By all processes.
            "gpu/memory_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
            # Milliwatts to watts.
            "gpu/power_watt": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu/temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
        }
        for tag, function in functions.items():
            # Some cards, and slices of cards, do not support every question.
            with suppress(nvml.NVMLError):
                value = function()
                with self.lock:
                    self.samples.setdefault(tag, []).append(value)

    def read(self) -> dict[str, float]:
        """Averages since the last `read()`; {} if there was no sample in between."""
        with self.lock:
            samples = self.samples
            self.samples = {}
        return {tag: sum(values) / len(values) for tag, values in samples.items()}


def nvml_of(device: torch.device) -> tuple:
    """NVML and its handle of the device. Raises if there is no package, driver, permission or card.

    By UUID, because NVML counts all cards and does not know CUDA_VISIBLE_DEVICES.
    """
    import pynvml as nvml

    nvml.nvmlInit()
    properties = torch.cuda.get_device_properties(device)
    try:
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
    except nvml.NVMLError:
        # A slice of a card (MIG) has a UUID of its own; the place on the PCI bus is the card's.
        domain, bus, slot = (
            properties.pci_domain_id,
            properties.pci_bus_id,
            properties.pci_device_id,
        )
        return nvml, nvml.nvmlDeviceGetHandleByPciBusId(f"{domain:08x}:{bus:02x}:{slot:02x}.0")


class Meter:
    """The speed of training over the last `window` steps.

    The clock starts at the end of the first step. That step is not counted: it compiles and fills
    caches. `flops_of(source_tokens, target_tokens)` counts a step's floating-point operations,
    `peak_flops` is what the device could do per second.
    """

    def __init__(self, window, peak_flops, flops_of, clock=time.perf_counter):
        self.steps = deque(maxlen=window)  # a dictionary of sums for each step
        self.peak_flops = peak_flops
        self.flops_of = flops_of
        self.clock = clock
        self.last_time = None  # seconds; None before the end of the first step
        self.step = Counter()  # sums over the micro-batches of the current step

    def add(self, source_tokens: int, target_tokens: int, padded_tokens: int) -> None:
        """Count one micro-batch: real tokens, and those of both sides together with padding."""
        self.step["source"] += source_tokens
        self.step["target"] += target_tokens
        self.step["padded"] += padded_tokens

    @contextmanager
    def waiting(self):
        """The time inside is spent waiting for data."""
        begun = self.clock()
        yield
        self.step["waiting"] += self.clock() - begun

    def end_step(self) -> None:
        """The optimizer has updated the weights."""
        now = self.clock()
        if self.last_time is not None:
            self.step["seconds"] = now - self.last_time
            self.steps.append(self.step)
        self.last_time = now
        self.step = Counter()

    def resume(self) -> None:
        """Leave out the time since the last step: validating and saving are not training."""
        if self.last_time is not None:
            self.last_time = self.clock()

    def read(self, ranks: int = 1) -> dict[str, float]:
        """Figures of the window; {} before the end of the second step.

        `ranks`: how many processes train; each is assumed to have the same share of the tokens.
        """
        if not self.steps:
            return {}
        total: Counter[str] = sum(self.steps, Counter())
        seconds = max(total["seconds"], 1e-9)
        tokens = total["source"] + total["target"]
        flops = self.flops_of(total["source"], total["target"])
        return {
            "speed/tokens_per_second": ranks * tokens / seconds,
            "speed/target_tokens_per_second": ranks * total["target"] / seconds,
            "data/padding_share": 1 - tokens / max(total["padded"], 1),
            "data/wait_share": total["waiting"] / seconds,
            "speed/model_flops_utilisation": flops / seconds / self.peak_flops,
        }


@functools.cache
def measured_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one large matrix product on this device: the most that a model could reach.

    To be called before training. Other programs can only slow a product down, so the fastest one
    counts. Five measurements must come within 5 % of it; until then more are made, up to five
    times as many.
    """
    size, seconds = (8192, 1.0) if device.type == "cuda" else (1024, 0.2)
    # Random numbers: products of zeros draw less power, and the GPU would run at a higher clock.
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    times: list[float] = []  # seconds of each product
    begun = time.perf_counter()
    while True:
        before = time.perf_counter()
        fastest = [taken for taken in times if taken < 1.05 * min(times)]
        limit = seconds if len(fastest) >= 5 else 5 * seconds
        if before - begun >= limit:
            break
        left @ right
        torch.get_device_module(device).synchronize(device)  # until here a GPU has only queued it
        times.append(time.perf_counter() - before)
    if device.type == "cuda":
        # Leave no trace in the memory figures of the run.
        del left, right
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * size**3 / min(times)  # a multiplication and an addition for each of size³ pairs


def peak_memory_gib(device: torch.device) -> float:
    """The most memory held so far: by tensors on the GPU, or by this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return held_gib()
