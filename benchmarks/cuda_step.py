"""What a training step asks of a GPU: host time, kernels, waits. A GPU whose step takes less than the host's waits for Python.

    python -m benchmarks.cuda_step                               # the lab model, 16,384 tokens
    python -m benchmarks.cuda_step --captured                    # by CUDA graphs, see fast/cuda_training.py
    python -m benchmarks.cuda_step --preset big --precision fp16

The loop is train.py's: batches one step ahead, seeds, autocast, backward, clipping, optimiser. Kernels and waits are counted
only where a library that counts the calls of the CUDA runtime is preloaded: it exports the numbers `COUNTED` as `shim_counts`.
docs/cuda.md has the figures of such a library that does nothing else, so host time there is as if the GPU were infinitely fast.
"""

import ctypes
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import fast
from benchmarks.data import IDS, make_store
from benchmarks.measuring import ROOT, write_json
from benchmarks.peers.contest import SIZES
from benchmarks.peers.ours import make_trainer
from data import BucketSampler, Collate, batches_of
from engine.config import flag, parse_flags
from engine.distributed import World, choose_device
from engine.errors import UserError, run_script
from engine.precision import choose_precision
from engine.telemetry import peak_memory_gib
from model import ModelConfig
from text.store import TokenizedPairs

PAIRS, WARM = 40_000, 5
BUSY = 0.9  # share of the time in which a GPU computes that is not kept waiting
COUNTED = ("launches", "gemms", "graph_launches", "memcpys", "h2d", "d2h", "d2d", "memsets", "syncs", "events", "mallocs",
           "host_allocs", "bad_captures")  # fmt: skip


@dataclass
class Config:
    """Every setting of this benchmark."""

    preset: str = flag("lab", "model size (lab|big|tiny)", "What")
    tokens: int = flag(16384, "padded tokens a side in a step", "What", least=512)
    vocab: int = flag(8000, "tokens in each vocabulary", "What", least=10)
    precision: str = flag("auto", "number format (auto|fp32|bf16|fp16)", "What")
    optimizer: str = flag("muon", "as train.py's (muon|adamw)", "What")
    captured: bool = flag(False, "forward and backward pass by CUDA graphs", "What")
    steps: int = flag(20, "measured; each shape has been captured before", "How", least=1)
    out: str = flag("runs/benchmarks/cuda_step.json", "file for the figures", "How")


def counts() -> dict[str, int]:
    """Calls of the CUDA runtime since the process began; {} if nobody counts."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "shim_counts"):
        return {}
    return dict(zip(COUNTED, (ctypes.c_longlong * len(COUNTED)).in_dll(library, "shim_counts")))


def main(config: Config) -> None:
    """Measure, print, say who waits for whom, write."""
    figures = measure(config)
    for name, value in figures.items():
        print(f"{name:<16}{value:10.2f}")
    if figures.get("gpu_busy", 1.0) < BUSY:
        print(f"the GPU computes {figures['gpu_busy']:.0%} of the time, for the rest it waits for Python")
    if figures["wait_ms"] > 0.02 * figures["ms"]:
        print(f"{figures['wait_ms']:.2f} of {figures['ms']:.2f} ms are spent waiting for data")
    write_json(ROOT / config.out, [], settings=asdict(config), figures=figures)


def measure(config: Config) -> dict[str, float]:
    """Times in ms, of one step; calls of the CUDA runtime in a step where they are counted; `gpu_busy`, where it can be known."""
    device = choose_device("auto", 0)
    if device.type != "cuda":
        raise UserError("benchmarks.cuda_step needs a GPU")
    world, precision = World(0, 1, device), choose_precision(device, config.precision, training=True)
    with tempfile.TemporaryDirectory() as folder:
        make_store(Path(folder) / "store", PAIRS, vocab=config.vocab)
        pairs = TokenizedPairs(Path(folder) / "store")
    sampler, wrap = BucketSampler(pairs.lengths, config.tokens, seed=1), lambda loss: loss
    if config.captured:
        wrap = lambda loss: fast.captured_loss(loss, precision.dtype, sampler, print) or loss  # noqa: E731
    sizes = ModelConfig(config.vocab, config.vocab, **SIZES[config.preset])
    take_step = make_trainer(sizes, precision, config.captured, wrap, config.optimizer)
    batches, waited = batches_of(pairs, sampler, Collate(IDS, IDS), 0, device), 0.0

    def step(number: int) -> None:
        nonlocal waited
        world.set_seed(1, number)
        begun = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - begun
        take_step(batch)

    warm = 2 * sampler.steps_per_epoch if config.captured else WARM  # each shape once as it is, then captured
    for number in range(warm):
        step(number)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # a wait that PyTorch knows of is an error from here on
    torch.cuda.reset_peak_memory_stats()
    before, waited, begun, cpu = counts(), 0.0, time.perf_counter(), time.process_time()
    for number in range(config.steps):
        step(warm + number)
    cpu, waiting = time.process_time() - cpu, waited
    torch.cuda.set_sync_debug_mode("default")
    after = counts()
    torch.cuda.synchronize()
    times = {"ms": time.perf_counter() - begun, "cpu_ms": cpu, "wait_ms": waiting}
    figures = {name: 1e3 * value / config.steps for name, value in times.items()}
    figures |= {name: (after[name] - before[name]) / config.steps for name in before}
    return figures | gpu_share(lambda: step(warm + config.steps)) | {"peak_gib": peak_memory_gib(device)}


def gpu_share(step: Callable[[], None], steps: int = 5) -> dict[str, float]:
    """Kernels of a step, and the share of the time in which one ran; {} where the profiler sees none."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    on_gpu = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    spans = [event.time_range for event in on_gpu if not event.is_user_annotation]  # a name spans its kernels
    if not spans:
        return {}
    whole = max(span.end for span in spans) - min(span.start for span in spans)
    return {"kernels": len(spans) / steps, "gpu_busy": sum(span.elapsed_us() for span in spans) / whole}


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "what a training step asks of a GPU")))
