"""The lessons by name."""

import inspect

import torch
import torch.distributed as dist

from labs.collectives.averaging import lesson_mean, lesson_sampler
from labs.collectives.common import print_text
from labs.collectives.gathering import lesson_all_gather, lesson_gather
from labs.collectives.half_precision import lesson_fp16
from labs.collectives.normalisation import lesson_norm
from labs.collectives.ring import lesson_ring
from labs.collectives.training import lesson_ddp, lesson_scaling

LESSONS = {
    "gather": lesson_gather,
    "all_gather": lesson_all_gather,
    "mean": lesson_mean,
    "sampler": lesson_sampler,
    "scaling": lesson_scaling,
    "ddp": lesson_ddp,
    "ring": lesson_ring,
    "norm": lesson_norm,
    "fp16": lesson_fp16,
}


def run_lessons(names: list[str], gpus: tuple[int, ...], target: int) -> None:
    """The lessons of these names on this rank; rank 0 prints.

    gpus: for the lessons `gather` and `ddp`; target: the GPU that `gather` gathers on.
    """
    print_text(f"# Collectives: {dist.get_world_size()} processes, torch {torch.__version__}")
    for name in names:
        title, _, text = inspect.getdoc(LESSONS[name]).partition("\n\n")
        print_text(f"## {title}")
        if text:
            print_text(text)
        if name == "gather":
            lesson_gather(gpus, target)
        elif name == "ddp":
            lesson_ddp(gpus)
        else:
            LESSONS[name]()
