"""The fewest micro-batches of a step that fit in a GPU's memory."""

from collections.abc import Callable

import torch

from data import BucketSampler, Prepared, collate_for
from engine.distributed import World
from engine.precision import Precision


def fewest_micro_batches(trial: Callable, device: torch.device, largest: int = 256) -> int:
    """The smallest power of two with which `trial` does not run out of a GPU's memory.

    `trial(n)` takes a step of n micro-batches. At most `largest`; raises the error of the last
    trial if that fails too. On a CPU it is 1: a CPU would swap instead of raising an error.
    """
    if device.type != "cuda":
        return 1
    micro_batches = 1
    while True:
        try:
            trial(micro_batches)
            return micro_batches
        except RuntimeError as error:
            # On a full GPU, cuBLAS and late-loaded kernels raise errors of their own.
            out_of_memory = "out of memory" in str(error) or "CUBLAS_STATUS" in str(error)
            if micro_batches >= largest or not out_of_memory:
                raise
        finally:
            # NCCL cannot use the memory that PyTorch's allocator keeps.
            torch.cuda.empty_cache()
        micro_batches *= 2


def micro_batches_that_fit(
    make_loss: Callable,
    prepared: Prepared,
    tokens_per_batch: int,
    precision: Precision,
    world: World,
) -> int:
    """The fewest micro-batches per step with which training fits in the GPU's memory.

    A power of two. Tried with the steps that need most and with the loss of a new model, which
    `make_loss()` returns and which is gone afterwards. All ranks get the same number. On a CPU it
    is 1.
    """
    if world.device.type != "cuda":
        return 1
    sampler = BucketSampler(prepared.train.lengths, tokens_per_batch, world_size=world.size)
    collate = collate_for(prepared)
    loss_of = make_loss()

    def try_heaviest_steps(micro_batches: int) -> None:
        """Gradients of one micro-batch of each step. Raises if memory does not suffice."""
        # As large as AdamW's two moments and the buckets that DDP sends.
        reserved = [torch.empty_like(weight) for weight in loss_of.parameters() for _ in range(3)]
        for pairs in sampler.heaviest_steps():
            first_micro_batch = pairs[:: micro_batches * world.size]
            batch = collate(prepared.train.take(first_micro_batch)).to(world.device)
            with precision.autocast():
                loss, _ = loss_of(*batch.inputs)
            loss.backward()
        del reserved

    micro_batches = fewest_micro_batches(try_heaviest_steps, world.device)
    return int(world.maximum(micro_batches)[0])
