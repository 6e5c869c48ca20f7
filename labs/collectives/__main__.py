"""Collectives by hand: nine small lessons, each a right way beside the wrong one.

python -m labs.collectives                              # starts 3 processes itself (gloo, CPU)
python -m labs.collectives --lesson mean --processes 4  # one lesson, on 4 processes
python -m labs.collectives --lesson gather --gpu_devices 0 1 2 3 --target_device 1
                                                        # a process for each of these GPUs (NCCL)
torchrun --nproc_per_node 2 -m labs.collectives         # on torchrun's processes

gather      the tensors of all ranks on one rank: ranks, devices, sub-groups
all_gather  … on every rank: unequal lengths
mean        one loss and one accuracy instead of one per process; the right gradient
sampler     which rows DistributedSampler repeats or drops, and what that does to a score
scaling     batch size and learning rate on N processes: two right rules that are wrong together
ddp         DistributedDataParallel and DataParallel beside one process
ring        all-reduce, reduce-scatter and broadcast from send and receive, and their cost
norm        BatchNorm depends on the other rows and ranks, LayerNorm does not
fp16        gradients that underflow or overflow, and a loss scaler by hand

The output is Markdown, for a report: python -m labs.collectives > collectives.md
"""

from dataclasses import dataclass

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Which lesson, on how many processes."""

    lesson: str = flag(
        "all",
        "(all|gather|all_gather|mean|sampler|scaling|ddp|ring|norm|fp16)",
        "Collectives",
    )
    processes: int = flag(3, "how many to start (not under torchrun)", "Collectives", min=2, max=32)
    gpu_devices: tuple = flag(
        (), "gather and ddp on these GPUs by NCCL, one process each; default: gloo", "Collectives"
    )
    target_device: int = flag(
        1, "number of the GPU (or of its stand-in on the CPU) that receives", "Collectives", min=0
    )


# Before the imports that take seconds, so that --help and a wrong flag answer at once.
if __name__ == "__main__":
    config = parse_flags(Config, "collectives by hand, right and wrong")

import os
from functools import partial

import torch
import torch.distributed as dist

from labs.collectives.common import processes
from labs.collectives.lessons import LESSONS, run_lessons


def main(config: Config) -> None:
    """The lessons, on torchrun's processes or on processes started here."""
    names = list(LESSONS) if config.lesson == "all" else [config.lesson]
    run = partial(run_lessons, names, config.gpu_devices, config.target_device)
    if "WORLD_SIZE" in os.environ:  # set by torchrun
        check_devices(config, int(os.environ["WORLD_SIZE"]))
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        run()
        dist.destroy_process_group()
        return
    world_size = len(config.gpu_devices) or config.processes
    check_devices(config, world_size)
    with processes(run, world_size) as context:
        while not context.join():
            pass


def check_devices(config: Config, world_size: int) -> None:
    """Two processes or more, one GPU of this machine for each. Raises `UserError`."""
    if world_size < 2:
        raise UserError("one process has nobody to communicate with; start at least 2")
    gpus = config.gpu_devices
    typed = f"--gpu_devices {' '.join(map(str, gpus))}"
    count = torch.cuda.device_count()
    if not set(gpus) <= set(range(count)):
        raise UserError(
            f"{typed}: this machine has {count} GPU(s); without the flag, gather runs on the CPU"
        )
    if gpus and not len(gpus) == len(set(gpus)) == world_size:
        raise UserError(f"{typed}: {world_size} processes need as many different GPUs")
    devices = gpus or range(1, world_size + 1)
    if config.target_device not in devices:
        known = ", ".join(map(str, devices))
        raise UserError(f"--target_device {config.target_device} must be one of {known}")


if __name__ == "__main__":
    run_script(lambda: main(config))
