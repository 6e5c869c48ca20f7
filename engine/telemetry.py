"""The numbers of a run: to TensorBoard and to metrics.jsonl alike, to the terminal and to train.log.

    telemetry, log = Telemetry(run, resume_step), Log(run)
    telemetry.scalars(step, {"loss/train": 3.2, **meter.read(), **gpu.read()})
    log(f"step {step}: loss 3.2"); telemetry.close()

Rank 0 writes and speaks, the others keep silent. Nothing here that a step calls waits for the GPU: it all takes numbers
that are on the host already.
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

# TensorBoard sorts its charts by name. These are what a run is watched by: they come first, in this order.
FIRST = [  # unpacked tuples, or the formatter would give each name a line
    *(
        "train/loss",
        "valid/loss",
        "validation/loss",
        "test/loss",
        "valid/perplexity",
        "validation/perplexity",
    ),
    *(
        "valid/bleu",
        "test/accuracy",
        "train/learning_rate",
        "gpu/utilisation_percent",
        "cpu/utilisation_percent",
    ),
]


def is_main() -> bool:
    """True in the one process of a run that speaks and writes: rank 0, or a process that torchrun did not start."""
    return int(os.environ.get("RANK", 0)) == 0


class Telemetry:
    """Scalars, texts and figures of one run folder. A resumed run continues its curves without doubles.

    A curve that cannot be written must not end a training that can: it is said once, and the run goes on without curves.
    metrics.jsonl has no checksum, for nothing trains or scores by it; report.py leaves out what is no JSON, and says so.
    """

    def __init__(self, run: Path, resume_step: int | None = None, validated: int | None = None):
        """`validated`: step of the last validation in the checkpoint; later ones are made again."""
        self.writer = None  # None on the other ranks: then every method does nothing
        if not is_main():
            return
        from torch.utils.tensorboard import SummaryWriter  # here, because the import takes a second

        self.last_step = resume_step or 0
        last = {}
        if resume_step is not None:
            if validated is None:
                validated = resume_step
            last = _keep_records(run / "metrics.jsonl", resume_step, validated)
        self.result_step = resume_step if any(tag.startswith("result/") for tag in last) else None
        # TensorBoard hides what a killed run wrote from purge_step on. But it takes the first such mark of a folder for
        # the beginning, not for a restart, and hides nothing: so a fresh run sets one as well, at step 0.
        self.writer = SummaryWriter(
            str(run), purge_step=0 if resume_step is None else resume_step + 1
        )
        # Line by line out of this process, so that kill -9 loses the current one at most.
        self.metrics_file = open(run / "metrics.jsonl", "a", buffering=1, encoding="utf-8")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Write each value under its tag, and all of them as one line {"step": …, "time": seconds since 1970, …}."""
        self.last_step = step
        values = {tag: float(value) for tag, value in values.items()}

        def write() -> None:
            now = time.time()
            # One add_scalar per tag: add_scalars makes a folder for every curve, which purge_step does not reach.
            for tag, value in values.items():
                self.writer.add_scalar(shown_as(tag), value, step, walltime=now)
            # JSON knows no infinity (the gradient of an fp16 step that overflowed): null stands for it.
            finite = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
            self.metrics_file.write(json.dumps({"step": step, "time": now, **finite}) + "\n")

        self._try(write)

    def text(self, tag: str, step: int, text: str) -> None:
        """Write a text (Markdown), such as sample translations."""
        self._try(lambda: self.writer.add_text(tag, text, step))

    def figure(self, tag: str, step: int, figure) -> None:
        """Write a matplotlib figure and close it."""
        self._try(lambda: self.writer.add_figure(tag, figure, step))

    def hyperparameters(self, config, results: dict[str, float | None]) -> None:
        """Settings that differ from their defaults, and the results, for TensorBoard's HPARAMS page.

        Written once: not again when a finished run is resumed. A result that is None is left out.
        """
        if self.writer is None or self.last_step == self.result_step:
            return
        from torch.utils.tensorboard.summary import hparams

        results = {tag: value for tag, value in results.items() if value is not None}
        chosen = getattr(config, "given", set()).copy()
        chosen |= {f.name for f in fields(config) if getattr(config, f.name) != f.default}
        settings = {name: getattr(config, name) for name in sorted(chosen)}

        def write() -> None:
            # SummaryWriter.add_hparams would make a second run folder for these three records.
            for summary in hparams(settings, results):
                self.writer.file_writer.add_summary(summary)

        self._try(write)
        self.scalars(self.last_step, results)

    def close(self) -> None:
        """Finish both files; afterwards every method does nothing."""
        self._try(lambda: (self.writer.close(), self.metrics_file.close()))
        self.writer = None

    def _try(self, write) -> None:
        if self.writer is None:
            return
        try:
            write()
            self.writer.flush()
        except Exception as error:  # of the disk; TensorBoard's thread hands on its own here
            self.writer = None
            print(
                f"note: the curves cannot be written any more ({error}); the run goes on without",
                file=sys.stderr,
            )


def shown_as(tag: str) -> str:
    """The name of a curve in TensorBoard: train/loss → "1 first/00 train loss"; most keep theirs."""
    return f"1 first/{FIRST.index(tag):02} {tag.replace('/', ' ')}" if tag in FIRST else tag


def _keep_records(path: Path, last_step: int, validated: int) -> dict:
    """Drop the records after `last_step` and the torn line of a killed run, by way of a new file; → the last one kept."""
    kept = []
    for line in (
        path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        if path.exists()
        else ()
    ):
        with suppress(ValueError, TypeError, KeyError):  # a torn line is no JSON, or no record
            record = json.loads(line)
            # A run killed between a validation and its checkpoint validates again.
            end = validated if "valid/loss" in record else last_step
            if record["step"] <= end and record["time"] > 0 and line.endswith("\n"):
                kept.append(line)
    atomic_write(path, "".join(kept))
    return json.loads(kept[-1]) if kept else {}


class Log:
    """`log("…")` prints a line (above a progress bar, if any) and appends it to <run>/train.log with the time."""

    def __init__(self, run: Path | None = None):
        self.path = run / "train.log" if run else None

    def __call__(self, message: str) -> None:
        if not is_main():
            return
        with suppress(
            BrokenPipeError
        ):  # `python train.py | head` goes on, and train.log has it all
            tqdm.write(message)
            sys.stdout.flush()  # in a batch job standard output is a file, and would show nothing for a long time
        try:
            if self.path:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
        except OSError as error:  # no reason to end a training
            tqdm.write(f"note: {self.path} cannot be written any more: {error.strerror}")
            self.path = None


def progress_bar(iterable=None, **kwargs) -> tqdm:
    """A tqdm bar; silent when standard error is no terminal (batch jobs) and on ranks other than 0."""
    return tqdm(
        iterable, disable=None if is_main() else True, dynamic_ncols=True, **kwargs
    )  # None: if no terminal


progress = progress_bar


class ProcessMeter:
    """How busy this process kept the CPU since the last look (100 %: one core), and the memory it holds now.

    The system counts both anyway, so nothing runs beside the training. Of many processes rank 0's.
    """

    def __init__(self):
        self.last = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """{} within a second of the last look: too short to mean anything."""
        now = time.perf_counter(), time.process_time()
        seconds, busy = (after - before for after, before in zip(now, self.last))
        if seconds < 1:
            return {}
        self.last = now
        return {
            "cpu/utilisation_percent": 100 * busy / seconds,
            "cpu/memory_gib": held_gib("VmRSS"),
        }


class GpuSampler(threading.Thread):
    """Asks NVML every `interval` seconds how busy, full and hot the GPU is and what power it draws; `read()`: averages.

    Without a GPU or without NVML (package nvidia-ml-py) it says so once, and `read()` gives {}.
    """

    def __init__(self, device="cuda", interval: float = 5.0, say=print):
        super().__init__(daemon=True, name="gpu-sampler")
        self.interval, self.samples, self.lock, self.ended = (
            interval,
            {},
            threading.Lock(),
            threading.Event(),
        )
        try:
            self.nvml, self.handle = nvml_of(device)
        except Exception as error:  # no package, no driver, no GPU, no permission: a run needs none of these figures
            say(f"no GPU figures will be recorded: {' '.join(str(error).split())}")
            self.ended.set()

    def run(self) -> None:
        """The thread: a sample every `interval` seconds, until `ended`."""
        while not self.ended.is_set():
            self._sample()
            self.ended.wait(self.interval)

    def _sample(self) -> None:
        nvml, handle = self.nvml, self.handle
        questions = {
            "gpu/utilisation_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "gpu/memory_gib": lambda: (
                nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB
            ),  # of all processes on it
            "gpu/power_watt": lambda: (
                nvml.nvmlDeviceGetPowerUsage(handle) / 1000
            ),  # NVML counts milliwatts
            "gpu/temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
        }
        for tag, question in questions.items():
            with suppress(
                nvml.NVMLError
            ):  # some cards, and slices of cards, do not answer every question
                value = question()
                with self.lock:
                    self.samples.setdefault(tag, []).append(value)

    def read(self) -> dict[str, float]:
        """Averages since the last `read()`; {} if there was no sample in between."""
        with self.lock:
            samples, self.samples = self.samples, {}
        return {tag: sum(values) / len(values) for tag, values in samples.items()}


def nvml_of(device: torch.device) -> tuple:
    """NVML and its handle of torch's device: by UUID, for NVML counts all cards and knows no CUDA_VISIBLE_DEVICES.

    Raises one exception or another where there is no package, no driver, no permission or no such card.
    """
    import pynvml as nvml

    nvml.nvmlInit()
    properties = torch.cuda.get_device_properties(device)
    try:
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
    except (
        nvml.NVMLError
    ):  # a slice of a card (MIG) has a UUID of its own: then by the card's place on the PCI bus
        place = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        return nvml, nvml.nvmlDeviceGetHandleByPciBusId(place)


class Meter:
    """Speed over the last `window` steps only, so that warm-up, validation and saving do not dilute it.

    The clock starts at the end of the first step. That step is not counted: it compiles and fills caches.
    `flops_of(source_tokens, target_tokens)` counts a step's floating-point operations, `peak_flops` is what the
    device could do per second.
    """

    def __init__(self, window=50, peak_flops=None, flops_of=None, clock=time.perf_counter):
        self.steps = deque(maxlen=window)  # a dictionary of sums for each step
        self.peak_flops = peak_flops
        self.flops_of = flops_of
        self.clock = clock
        self.last_time = None  # seconds; None before the end of the first step
        self.step = Counter()  # sums over the micro-batches of the current step

    def add(self, source_tokens: int, target_tokens: int, places: int) -> None:
        """Count one micro-batch: real tokens of each side, and `places` with padding, of both sides."""
        self.step["source"] += source_tokens
        self.step["target"] += target_tokens
        self.step["places"] += places

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
        """Start the clock again, after validating or saving and before the next batch is fetched."""
        self.last_time = self.clock()

    def read(self, ranks: int = 1) -> dict[str, float]:
        """Figures of the window, {} before the end of the second step. All ranks have equal shares of the tokens."""
        if not self.steps:
            return {}
        total = sum(self.steps, Counter())
        seconds = max(total["seconds"], 1e-9)
        tokens = total["source"] + total["target"]
        figures = {
            "speed/tokens_per_second": ranks * tokens / seconds,
            "speed/target_tokens_per_second": ranks * total["target"] / seconds,
            "data/padding_share": 1 - tokens / max(total["places"], 1),
            "data/wait_share": total["waiting"] / seconds,
        }
        if self.flops_of and self.peak_flops:
            flops = self.flops_of(total["source"], total["target"])
            figures["speed/model_flops_utilisation"] = flops / seconds / self.peak_flops
        return figures


@functools.cache
def measured_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one large matrix product on this device: what a perfect model could reach. Call it before training."""
    size, seconds = (8192, 1.0) if device.type == "cuda" else (1024, 0.2)
    # Random numbers, not zeros: multiplying zeros draws less power, and the GPU then clocks higher than it ever will.
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best_seconds, end = float("inf"), time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        left @ right
        torch.get_device_module(device).synchronize(
            device
        )  # on a GPU the product is only queued until here
        best_seconds = min(best_seconds, time.perf_counter() - begun)
    del left, right
    if device.type == "cuda":  # leave no trace in the memory figures of the run
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * size**3 / best_seconds  # a multiplication and an addition for each of size³ pairs


def peak_memory_gib(device: torch.device) -> float:
    """The most memory held so far: by tensors on the GPU, or by this process on the CPU."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else held_gib()
