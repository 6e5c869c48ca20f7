"""The handout's four mistakes, each as a pair: its version and the right one.

python -m labs.pipeline.mistakes                    # on the CPU; no data are needed

1. The mask is an argument that `Transformer.forward` never passes on to its layers.
2. `if rank == 0: … else: …` is right for two stages only.
3. The printed loss is a mean of the micro-batches' means.
4. The last batch of an epoch may be too short to be cut into micro-batches.

All four are in the handout's program, but none shows there: every sequence repeats one token, there
are two stages, and 12 equally long sequences are three whole batches. Each pair below shows one.
"""

import math
import os
from dataclasses import dataclass

from engine.config import flag, parse_flags
from engine.errors import run_script


@dataclass
class Config:
    """How long to train in the first pair."""

    max_steps: int = flag(600, "training steps of each model in the first pair", "Mistakes", min=1)


if __name__ == "__main__":
    config = parse_flags(Config, "run the handout's four mistakes beside the right versions")

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from engine.distributed import World
from labs.pipeline.__main__ import Config as TrainConfig
from labs.pipeline.data import batches, inputs_and_targets, load
from labs.pipeline.stages import PADDING, LanguageModel, Pipeline, summed_loss

CPU = torch.device("cpu")
DIGITS = 10
SMALL = dict(
    sequences=12,
    seq_length=9,
    batch_size=4,
    d_model=32,
    nhead=2,
    dim_feedforward=64,
    num_layers=3,
    build="by_hand",
)


def loss_on_random_digits(causal: bool, steps: int) -> float:
    """The loss of a two-layer model after training on digits drawn by chance, new ones every step.

    Nothing predicts the next digit, so ln 10 = 2.303 is the lowest loss that an honest model can
    reach. A model below it has seen the answer.
    """
    torch.manual_seed(1)
    model = LanguageModel(DIGITS, 16, TrainConfig(**SMALL | {"num_layers": 2, "causal": causal}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        sequences = torch.randint(DIGITS, (16, 17))
        logits = model(sequences[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    last = losses[-50:]
    return sum(last) / len(last)


def small_pipeline(world: World) -> tuple[Pipeline, torch.Tensor, torch.Tensor]:
    """A pipeline, and inputs and targets of its first step."""
    config = TrainConfig(**SMALL)
    dataset, vocabulary = load(config)
    torch.manual_seed(config.seed)
    model = LanguageModel(vocabulary, config.seq_length, config)
    return Pipeline(model, config, world), *next(batches(dataset, 1, config.batch_size, 1))


def rank_0_or_else(world: World) -> str:
    """The handout's step: rank 0 gives the inputs, every other rank expects the losses."""
    pipeline, tokens, target = small_pipeline(world)
    pipeline.target_count = target.numel()
    if world.rank == 0:
        pipeline.schedule.step(tokens)
        return "no loss"
    losses = []
    pipeline.schedule.step(target=target, losses=losses)
    try:
        return f"loss {torch.stack(losses).sum():.4f}"
    except RuntimeError as error:
        return f"ends with an error: {error}"


def ask_the_stages(world: World) -> str:
    """The right step: a rank asks whether it has the first or the last stage."""
    pipeline, tokens, target = small_pipeline(world)
    loss = pipeline.forward_backward(tokens, target)
    return f"loss {loss / target.numel():.4f}"


def run_rank(rank: int, folder: str) -> None:
    """One of three processes: both versions of the second pair; rank 0 prints all outcomes."""
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    world = World(rank, 3, CPU, store)
    for name, step in (("wrong", rank_0_or_else), ("right", ask_the_stages)):
        outcomes = world.gather(step(world))
        if outcomes:
            for number, outcome in enumerate(outcomes):
                print(f"   {name}, rank {number}: {outcome}")
    dist.destroy_process_group()


def losses_of_unequal_parts() -> tuple[float, float]:
    """(mean of the micro-batches' means, mean over all targets) of one batch with a short text."""
    torch.manual_seed(0)
    config = TrainConfig(**SMALL)
    model = LanguageModel(DIGITS, 9, config)
    sequences = torch.randint(DIGITS, (4, 10))
    target = sequences[:, 1:].clone()
    target[2:, 2:] = PADDING  # the second micro-batch has 4 real targets, the first 18
    logits = model(sequences[:, :-1])
    parts = list(zip(logits.split(2), target.split(2)))
    sums = [summed_loss(*part).item() for part in parts]
    counts = [int((part_target != PADDING).sum()) for _, part_target in parts]
    mean_of_means = sum(total / count for total, count in zip(sums, counts)) / len(parts)
    return mean_of_means, sum(sums) / sum(counts)


def step_with_a_short_batch() -> tuple[str, float]:
    """(the error of one row alone, the loss of that row in a filled-up batch)."""
    pipeline, _, _ = small_pipeline(World(0, 1, CPU))
    sequences = torch.randint(100, (1, 10))
    error = ""
    try:
        pipeline.schedule.step(sequences[:, :-1])
    except ValueError as refusal:
        error = str(refusal)
    loss = pipeline.forward_backward(*inputs_and_targets(sequences, batch_size=4))
    return error, loss / 9


def main(config: Config) -> None:
    """Run the four pairs."""
    print(
        f"1. The mask: loss on random digits, which no honest model gets below {math.log(10):.3f}"
    )
    print(
        f"   wrong, no mask:     {loss_on_random_digits(causal=False, steps=config.max_steps):.3f}"
    )
    print(
        f"   right, causal mask: {loss_on_random_digits(causal=True, steps=config.max_steps):.3f}"
    )
    print("2. Three stages, `if rank == 0: … else: …`: what each rank has after a step", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the three processes
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(folder,), nprocs=3)
    mean_of_means, mean = losses_of_unequal_parts()
    print("3. The loss of a batch whose micro-batches have 18 and 4 targets")
    print(f"   wrong, mean of means:         {mean_of_means:.4f}")
    print(f"   right, sum over all targets:  {mean:.4f}")
    error, loss = step_with_a_short_batch()
    print("4. One row left for the last batch, 4 micro-batches")
    print(f"   wrong, cut as it is:          ends with an error: {error}")
    print(f"   right, filled up:             loss {loss:.4f} of the one row")


if __name__ == "__main__":
    run_script(lambda: main(config))
