"""Collectives by hand: seven small lessons, each a right way beside the wrong one, on several processes of this machine.

python -m labs.collectives                              # starts 3 processes itself (gloo, CPU); half a minute
python -m labs.collectives --lesson mean --processes 4  # one lesson, on so many processes
python -m labs.collectives --lesson gather --gpu_devices 0 1 2 3 --target_device 1    # a process for each of these GPUs
torchrun --nproc_per_node 2 -m labs.collectives         # the same on torchrun's processes

gather      the tensors of all ranks on one rank: ranks, devices, sub-groups
all_gather  … on every rank: unequal lengths, and what becomes of gradients
mean        one loss and one accuracy instead of one for each process; the right gradient
sampler     which rows DistributedSampler repeats or drops, and what that does to a score
scaling     batch size and learning rate on N processes: two right rules that are wrong together
ddp         DistributedDataParallel equals one process; how DataParallel differs
fp16        gradients that underflow, a loss scaler by hand, an overflow on one rank only

The tables are printed and, with a picture of `scaling`, written as Markdown.
"""

from dataclasses import dataclass

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Which lesson, on how many processes."""

    lesson: str = flag(
        "all", "(all|gather|all_gather|mean|sampler|scaling|ddp|fp16)", "Collectives"
    )
    processes: int = flag(
        3, "to start; under torchrun: as many as torchrun has", "Collectives", min=1, max=32
    )
    gpu_devices: tuple = flag(
        (), "gather on these GPUs by NCCL, a process for each; without: by gloo", "Collectives"
    )
    target_device: int = flag(
        1, "the GPU (or what stands for it) that gather gathers to", "Collectives", min=0
    )
    port: int = flag(
        0, "TCP port where the processes meet; 0: a free one", "Collectives", min=0, max=65535
    )
    out: str = flag("", "Markdown file; runs/collectives/LESSON.md", "Collectives")


if __name__ == "__main__":
    config = parse_flags(Config, "collectives by hand, right and wrong")

import os
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing as mp

from labs.collectives.averaging import lesson_mean, lesson_sampler
from labs.collectives.gathering import lesson_all_gather, lesson_gather
from labs.collectives.report import launch, make_writable, teach
from labs.collectives.training import lesson_ddp, lesson_fp16, lesson_scaling

LESSONS = {
    "gather": lesson_gather,
    "all_gather": lesson_all_gather,
    "mean": lesson_mean,
    "sampler": lesson_sampler,
    "scaling": lesson_scaling,
    "ddp": lesson_ddp,
    "fp16": lesson_fp16,
}


def main(config: Config) -> None:
    """On torchrun's processes, or on processes started here."""
    lessons = LESSONS if config.lesson == "all" else {config.lesson: LESSONS[config.lesson]}
    under_torchrun = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    if under_torchrun and config.given & {"processes", "port"}:
        raise UserError(
            "--processes and --port are torchrun's here; give it --nproc_per_node and --master_port"
        )
    size = (
        config.processes
        if "processes" in config.given
        else len(config.gpu_devices) or config.processes
    )
    world_size = os.environ.get("WORLD_SIZE", "")  # torchrun's
    check_devices(config, int(world_size) if world_size.isdecimal() else size)
    if "gather" in lessons:
        gather = partial(lesson_gather, gpus=config.gpu_devices, target=config.target_device)
        lessons = lessons | {"gather": gather}
    out = Path(config.out or f"runs/collectives/{config.lesson}.md")
    make_writable(out)
    if under_torchrun:
        return teach(lessons, out)
    context, _store = launch(run_script, size, partial(teach, lessons, out), port=config.port)
    try:
        while not context.join():
            pass
    except mp.ProcessExitedException as error:  # that process has said why
        os._exit(error.exit_code if error.exit_code > 0 else 1)


def check_devices(config: Config, size: int) -> None:
    """One GPU of this machine for each of `size` processes, the target among them. Raises `UserError`."""
    gpus, there = config.gpu_devices, torch.cuda.device_count()
    typed = f"--gpu_devices {' '.join(map(str, gpus))}"
    if not set(gpus) <= set(range(there)):
        raise UserError(
            f"{typed}: this machine has {there} GPUs; leave the flag out, and gather runs on the CPU by gloo"
        )
    if gpus and not len(gpus) == len(set(gpus)) == size:
        raise UserError(f"{typed}: {size} processes need as many different GPUs")
    if config.target_device not in (devices := gpus or range(1, size + 1)):
        raise UserError(
            f"--target_device {config.target_device} must be one of {', '.join(map(str, devices))}"
        )


if __name__ == "__main__":
    run_script(lambda: main(config))
