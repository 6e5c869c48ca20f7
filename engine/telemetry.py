"""The numbers of a run: in TensorBoard and metrics.jsonl, on the terminal and in train.log.

    telemetry = Telemetry(run, resume_step)
    log = Log(run)
    telemetry.scalars(step, {"loss/train": 3.2, **meter.read(), **gpu.read()})
    log(f"step {step}: loss 3.2")
    telemetry.close()

Only rank 0 writes and prints. Nothing that a training step calls waits for the GPU: every function
takes numbers that are on the host already.
"""

import functools
import json
import math
import os
import sys
import threading
import time
from collections import Counter, deque
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

import torch
from tqdm import tqdm

from engine.files import atomic_write
from engine.memory import GIB, held_gib

# The curves to watch come first in TensorBoard, which sorts them by name.
FIRST = [
    "train/loss",
    "valid/loss",
    "validation/loss",
    "test/loss",
    "valid/perplexity",
    "validation/perplexity",
    "valid/bleu",
    "test/accuracy",
    "train/learning_rate",
    "gpu/utilisation_percent",
    "cpu/utilisation_percent",
]


def is_main() -> bool:
    """Whether this process prints and writes for the run: rank 0, or a process alone."""
    return int(os.environ.get("RANK", 0)) == 0


class Telemetry:
    """Scalars, texts and figures of one run folder. A resumed run continues its curves.

    If the curves cannot be written (a full disk), training continues without them, after one note.
    """

    def __init__(
        self, run: Path, resume_step: int | None = None, last_validation: int | None = None
    ):
        """`resume_step`: the step of the checkpoint from which the run resumes; later records go.

        `last_validation`: the step of the checkpoint's last validation, by default `resume_step`.
        Later validations are repeated, so their records go too.
        """
        self.writer = None  # stays None on the other ranks: every method returns at once
        if not is_main():
            return
        from torch.utils.tensorboard import SummaryWriter  # on demand: it takes a second

        self.last_step = resume_step or 0
        last_record = {}
        if resume_step is not None:
            if last_validation is None:
                last_validation = resume_step
            last_record = keep_records(run / "metrics.jsonl", resume_step, last_validation)
        is_finished = any(tag.startswith("result/") for tag in last_record)
        self.result_step = resume_step if is_finished else None
        # TensorBoard hides what was written at `purge_step` and later. It does so only from the
        # second mark in a folder on, so a new run sets one too, at step 0.
        purge_step = 0 if resume_step is None else resume_step + 1
        self.writer = SummaryWriter(str(run), purge_step=purge_step)
        # Line-buffered, so that kill -9 loses at most the current line.
        self.metrics_file = open(run / "metrics.jsonl", "a", buffering=1, encoding="utf-8")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add a point to the curve of each tag, and one line to metrics.jsonl.

        The line is {"step": …, "time": seconds since 1970, tag: value, …}; null stands for numbers
        that are not finite, which JSON does not have.
        """
        self.last_step = step

        def write() -> None:
            now = time.time()
            record: dict[str, float | None] = {"step": step, "time": now}
            for tag, value in values.items():
                value = float(value)
                # Not add_scalars: it makes a folder for every curve, which purge_step cannot reach.
                self.writer.add_scalar(shown_as(tag), value, step, walltime=now)
                record[tag] = value if math.isfinite(value) else None
            self.metrics_file.write(json.dumps(record) + "\n")

        self._try(write)

    def text(self, tag: str, step: int, text: str) -> None:
        """Write a text (Markdown), such as sample translations."""
        self._try(lambda: self.writer.add_text(tag, text, step))

    def figure(self, tag: str, step: int, figure) -> None:
        """Write a matplotlib figure and close it."""
        self._try(lambda: self.writer.add_figure(tag, figure, step))

    def hyperparameters(self, config, results: dict[str, float | None]) -> None:
        """Write the settings that the user chose, and the results, to TensorBoard's HPARAMS page.

        A result that is None is left out. A finished run that is resumed does not write them again.
        """
        if self.writer is None or self.last_step == self.result_step:
            return
        from torch.utils.tensorboard.summary import hparams

        known = {tag: value for tag, value in results.items() if value is not None}
        chosen = set(getattr(config, "given", ()))
        for setting in fields(config):
            if getattr(config, setting.name) != setting.default:
                chosen.add(setting.name)
        settings = {name: getattr(config, name) for name in sorted(chosen)}

        def write() -> None:
            # Not SummaryWriter.add_hparams: it makes a second run folder for these records.
            for summary in hparams(settings, known):
                self.writer.file_writer.add_summary(summary)

        self._try(write)
        self.scalars(self.last_step, known)

    def close(self) -> None:
        """Close both files. Afterwards every method returns at once."""
        self._try(lambda: (self.writer.close(), self.metrics_file.close()))
        self.writer = None

    def _try(self, write) -> None:
        if self.writer is None:
            return
        try:
            write()
            self.writer.flush()
        except Exception as error:  # also an earlier error of TensorBoard's thread
            self.writer = None
            print(
                f"note: curves can no longer be written ({error}); training continues without them",
                file=sys.stderr,
            )


def shown_as(tag: str) -> str:
    """The name of a curve in TensorBoard: train/loss becomes "1 first/00 train loss"."""
    if tag not in FIRST:
        return tag
    return f"1 first/{FIRST.index(tag):02} {tag.replace('/', ' ')}"


def keep_records(path: Path, last_step: int, last_validation: int) -> dict:
    """Drop later records, and the last line if a kill cut it short; return the last record kept.

    A run that was killed between a validation and its checkpoint validates again: `last_validation`
    is the step of the last validation whose record stays.
    """
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    kept_lines = []
    last_record = {}
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            continue
        try:
            record = json.loads(line)
            end = last_validation if "valid/loss" in record else last_step
            is_kept = record["step"] <= end and record["time"] > 0
        except (ValueError, TypeError, KeyError):
            continue
        if is_kept:
            kept_lines.append(line)
            last_record = record
    atomic_write(path, "".join(kept_lines))
    return last_record


class Log:
    """`log("…")` prints a line and appends it, with the time, to train.log of the run's folder."""

    def __init__(self, run: Path | None = None):
        self.path = run / "train.log" if run else None

    def __call__(self, message: str) -> None:
        if not is_main():
            return
        # The reader of a pipe may leave (`python train.py | head`); train.log has every line.
        with suppress(BrokenPipeError):
            tqdm.write(message)  # above a progress bar, if there is one
            sys.stdout.flush()  # to a file (a batch job), Python would keep lines back for long
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
        except OSError as error:
            tqdm.write(f"note: {self.path} can no longer be written: {error.strerror}")
            self.path = None


def progress_bar(iterable=None, **kwargs) -> tqdm:
    """A tqdm bar on rank 0 if standard error is a terminal; otherwise (batch jobs) a silent one."""
    disable = None if is_main() else True  # None: only where there is no terminal
    return tqdm(iterable, disable=disable, dynamic_ncols=True, **kwargs)


progress = progress_bar


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
        self.samples = {}  # tag: values since the last `read`
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
        nvml = self.nvml
        functions = {
            "gpu/utilisation_percent": self._utilisation,
            "gpu/memory_gib": self._memory,
            "gpu/power_watt": self._power,
            "gpu/temperature_celsius": self._temperature,
        }
        for tag, function in functions.items():
            # Some cards, and slices of cards, do not support every question.
            with suppress(nvml.NVMLError):
                value = function()
                with self.lock:
                    self.samples.setdefault(tag, []).append(value)

    def _utilisation(self) -> float:
        return self.nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu

    def _memory(self) -> float:
        return self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used / GIB  # by all processes

    def _power(self) -> float:
        return self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1000  # milliwatts to watts

    def _temperature(self) -> float:
        return self.nvml.nvmlDeviceGetTemperature(self.handle, self.nvml.NVML_TEMPERATURE_GPU)

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

    def __init__(self, window=50, peak_flops=None, flops_of=None, clock=time.perf_counter):
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
        """Start the clock again after validating or saving, before the next batch is fetched."""
        self.last_time = self.clock()

    def read(self, ranks: int = 1) -> dict[str, float]:
        """Figures of the window; {} before the end of the second step.

        `ranks`: how many processes train; each is assumed to have the same share of the tokens.
        """
        if not self.steps:
            return {}
        total = sum(self.steps, Counter())
        seconds = max(total["seconds"], 1e-9)
        tokens = total["source"] + total["target"]
        figures = {
            "speed/tokens_per_second": ranks * tokens / seconds,
            "speed/target_tokens_per_second": ranks * total["target"] / seconds,
            "data/padding_share": 1 - tokens / max(total["padded"], 1),
            "data/wait_share": total["waiting"] / seconds,
        }
        if self.flops_of and self.peak_flops:
            flops = self.flops_of(total["source"], total["target"])
            figures["speed/model_flops_utilisation"] = flops / seconds / self.peak_flops
        return figures


@functools.cache
def measured_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one large matrix product on this device: the most that a model could reach.

    To be called before training.
    """
    size, seconds = (8192, 1.0) if device.type == "cuda" else (1024, 0.2)
    # Random numbers: products of zeros draw less power, and the GPU would run at a higher clock.
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    best = math.inf
    end = time.perf_counter() + seconds
    while True:
        begin = time.perf_counter()
        if begin >= end:
            break
        left @ right
        torch.get_device_module(device).synchronize(device)  # until here a GPU has only queued it
        best = min(best, time.perf_counter() - begin)
    if device.type == "cuda":
        # Leave no trace in the memory figures of the run.
        del left, right
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * size**3 / best  # a multiplication and an addition for each of size³ pairs


def peak_memory_gib(device: torch.device) -> float:
    """The most memory held so far: by tensors on the GPU, or by this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return held_gib()
