"""How much memory a rank will need, computed before anything is allocated.

    python -m labs.gpt --plan --size 1.6b --gpus 4 --memory_gib 24

H hidden size, L layers, T sequence, V vocabulary. Bytes per weight, token and layer; a test
compares them with what autograd keeps.
"""

import itertools
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from engine.distributed import World
from engine.errors import UserError
from engine.memory import GIB
from labs.gpt.model import CHUNK
from labs.gpt.parallel import check_grid, is_sharded
from labs.gpt.sizes import Sizes

# What a block keeps for its backward pass, in bytes per token and unit of H, by (model, narrow).
# fp32: 4 × (x 1, norm 1, q k v 3, attention 1, x 1, norm 1, MLP 4, GELU 4). Under autocast both x
# stay in fp32, the rest takes 2 bytes. Hugging Face's GELU is several operations.
KEPT = {("own", False): 64, ("own", True): 36, ("hf", False): 112, ("hf", True): 60}
# Bytes per logit: itself, its log-softmax, and the gradients of both; 16-bit logits are widened.
LOGITS = {False: 12, True: 16}
KEPT_LOGITS = {False: 8, True: 6}  # the part that waits for the backward pass


@dataclass
class Need:
    """Bytes on the fullest rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    host: float  # in the memory of the machine, with --offload
    total: float  # at the fullest moment: less than the sum where gradients replace activations

    def __str__(self) -> str:
        names = ("weights", "gradients", "optimizer", "activations", "logits")
        parts = ", ".join(f"{name} {getattr(self, name) / GIB:.2f}" for name in names)
        return f"{self.total / GIB:.2f} GiB ({parts})"


def memory(config, sizes: Sizes, processes: int, narrow: bool) -> Need:
    """What the fullest rank needs. `narrow`: products in bf16 or fp16 (weights stay fp32)."""
    data = processes // (config.tensor * config.pipe)
    parts = config.tensor * (data if is_sharded(config) else 1)  # that a weight is cut into
    layers = -(-sizes.layers // config.pipe)  # rounded up: the rank that has most
    # The first stage; the last one has about as many.
    own = sizes.embedding_parameters + layers * sizes.block_parameters
    block = sizes.block_parameters / config.tensor
    ends = sizes.embedding_parameters / config.tensor
    matrix = 4 * sizes.vocabulary * sizes.hidden  # bytes of the tied matrix
    gathered = 2 if narrow else 4  # bytes per weight in computation

    # Weights, gradients and AdamW's two moments.
    weights = 4 * own / parts
    gradients = 4 * own / parts
    optimizer = 8 * own / parts
    if config.data_parallel == "zero2":  # all weights stay gathered until the backward pass
        weights += gathered * own / config.tensor
    elif config.data_parallel == "zero3":  # the current block, the next one, and the embedding
        weights += gathered * (2 * block + ends)
    elif narrow:  # autocast's copies
        weights += 2 * own / parts
    if parts > config.tensor or config.offload:  # before they are scattered
        gradients += 4 * (2 * block + ends)
    if config.data_parallel == "zero1":  # deals out whole matrices
        optimizer = max(8 * own / data, 2 * matrix)
    host = 0.0
    if config.offload:
        host = 16 * own / parts
        weights -= 4 * own / parts
        gradients -= 4 * own / parts
        optimizer = 0.0

    # Activations of the micro-batches that are under way.
    tokens = config.batch_size / (data * config.accumulate) * sizes.sequence
    in_flight = 1
    if config.pipe > 1:  # 1F1B keeps as many micro-batches as there are ranks, GPipe all
        in_flight = config.accumulate
        if config.schedule == "1f1b":
            in_flight = min(config.accumulate, config.pipe)
    # Sequence parallelism cuts everything, but the output of each norm is whole for a while.
    kept = KEPT[config.model, narrow] / config.tensor + 2 * gathered * (1 - 1 / config.tensor)
    again = 0.0  # the block that is being recomputed
    if config.recompute:
        again = tokens * sizes.hidden * kept
        kept = 4 / config.tensor
    micro_batch = tokens * sizes.hidden * layers * kept
    activations = in_flight * micro_batch + again

    # Logits of one micro-batch.
    logits = tokens * sizes.vocabulary * LOGITS[narrow] / config.tensor
    if config.pipe > 1 and not narrow:  # the last stage's output stays until its backward pass
        logits += 4 * tokens * sizes.vocabulary
    if config.pipe > 1 and config.schedule == "gpipe":  # the last stage keeps those of all
        logits += (in_flight - 1) * tokens * sizes.vocabulary * KEPT_LOGITS[narrow]
    if config.chunked_loss:  # a chunk's logits; gradients of hidden states and matrix
        logits = 4 * min(tokens, CHUNK) * sizes.vocabulary
        logits += 8 * tokens * sizes.hidden + matrix

    # The fullest moment is at the output, or at the embedding at the end of the backward pass.
    # Gradients are there all the time where they are added up, and in DDP's buckets.
    adds_up = config.accumulate > 1 or (data > 1 and config.data_parallel in ("ddp", "zero1"))
    # The tied matrix has a gradient as output, one as embedding, and then their sum.
    tied = matrix / config.tensor
    at_output = activations + logits + tied
    if config.pipe > 1 and config.schedule == "1f1b":
        # The first rank has the activations, the last one the logits and one micro-batch.
        at_output = max(activations, micro_batch + again + logits + tied)
    if adds_up:
        at_output += gradients
    at_embedding = gradients + activations / layers + (3 if adds_up else 2) * tied
    total = weights + optimizer + max(at_output, at_embedding)
    if config.pipe > 1:  # buffers for each micro-batch's input and its gradient
        buffers = 1 if config.pipe == 2 else 2
        total += 4 * tokens * sizes.hidden * config.accumulate * buffers
    return Need(weights, gradients, optimizer, activations, logits, host, total)


def device_memory(world: World) -> float:
    """Bytes that a rank may have: the free memory of its GPU, or its share of the machine's."""
    if world.device.type == "cuda":
        free = torch.cuda.mem_get_info(world.device)[0]
        return -world.maximum(-free)[0]  # the least, for all ranks alike
    return host_memory()


def host_memory() -> float:
    """Bytes of a rank's share of the machine's memory, or of its container's."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no container, or "max": one without a limit
        limit = min(limit, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    return limit / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def check_fits(config, sizes: Sizes, world: World, precision: str) -> Need:
    """What the fullest rank needs. Raises `UserError` if that is more than there is."""
    need = memory(config, sizes, world.size, precision != "fp32")
    limit = device_memory(world)
    if need.total > limit:
        raise UserError(
            f"the model does not fit: it needs {need.total / GIB:.1f} GiB per rank and there are "
            f"{limit / GIB:.1f}; to see what fits, start one process with the same flags and "
            f"--plan --gpus {world.size} --memory_gib {limit / GIB:.1f}"
        )
    held = need.host + (need.total if world.device.type == "cpu" else 0)
    if need.host and held > host_memory():
        raise UserError(
            f"the model does not fit: --offload needs {held / GIB:.1f} GiB of the machine's memory "
            f"per rank and there are {host_memory() / GIB:.1f}; use a smaller --size"
        )
    return need


def techniques(config):
    """(name, changed settings) of the techniques to try, from none to all."""
    gpus = config.gpus
    small = {"recompute": True}
    less = "recompute"
    # Not every PyTorch and model has the chunked loss; see check_combinations.
    if hasattr(nn, "LinearCrossEntropyOptions") and config.model == "own" and not config.compile:
        small["chunked_loss"] = True
        less = "recompute, chunked loss"
    zero3 = {"data_parallel": "zero3"}
    yield f"data {gpus}", {}
    yield f"data {gpus}, {less}", small
    if gpus > 1:
        yield f"zero1 {gpus}", {"data_parallel": "zero1"}
        yield f"zero2 {gpus}", {"data_parallel": "zero2"}
        yield f"zero3 {gpus}", zero3
        yield f"zero3 {gpus}, {less}", {**zero3, **small}
    yield f"zero3 {gpus}, {less}, offload", {**zero3, **small, "offload": True}
    for parts in (2, 4, 8):
        if gpus % parts == 0:
            data = gpus // parts
            yield f"tensor {parts} × data {data}", {"tensor": parts}
            yield f"tensor {parts} × data {data}, recompute", {"tensor": parts, "recompute": True}
            yield f"pipe {parts} × data {data}", {"pipe": parts}
            yield f"pipe {parts} × data {data}, recompute", {"pipe": parts, "recompute": True}


def table(config, sizes: Sizes, narrow: bool) -> str:
    """A line per technique: what it needs, whether it fits, and how deep a model would fit.

    Micro-batches are of one sequence. With --offload the depth depends on the host.
    """
    columns = ("weights", "gradients", "optimizer", "activations", "logits", "total")
    products = "bf16 or fp16" if narrow else "fp32"
    lines = [
        f"{sizes.parameters:,} parameters: hidden {sizes.hidden}, {sizes.layers} layers, "
        f"{sizes.heads} heads, sequence {sizes.sequence}, vocabulary {sizes.vocabulary:,}; "
        f"{sizes.flops_per_token():,.0f} FLOPs a training token; batch {config.batch_size}",
        f"{config.gpus} card(s) of {config.memory_gib:g} GiB; {products} products, fp32 weights",
        f"{'GiB a card':41}" + "".join(f"{name:>12}" for name in columns),
    ]
    for name, changes in techniques(config):
        trial = trial_of(config, changes)
        try:
            check_grid(trial, sizes, config.gpus)
        except UserError as error:
            lines.append(f"{name:41}  {error}")
            continue
        need = memory(trial, sizes, config.gpus, narrow)
        line = f"{name:41}"
        for column in columns:
            line += f"{getattr(need, column) / GIB:12.2f}"
        line += "  fits" if need.total <= config.memory_gib * GIB else "  does not fit"
        if trial.offload:
            line += f"; {need.host / GIB:.1f} GiB of host memory a card"
        else:
            layers = most_layers(trial, sizes, config.gpus, config.memory_gib, narrow)
            billions = replace(sizes, layers=layers).parameters / 1e9
            line += f"; at most {layers} layers ({billions:.2f}B)"
        lines.append(line)
    return "\n".join(lines)


def trial_of(config, changes: dict):
    """The settings with a technique, and micro-batches of one sequence."""
    plain = {"data_parallel": "ddp", "tensor": 1, "pipe": 1, "offload": False}
    trial = replace(config, **{**plain, **changes})
    rows = config.batch_size * trial.tensor * trial.pipe // config.gpus
    return replace(trial, accumulate=max(1, rows))


def most_layers(trial, sizes: Sizes, processes: int, memory_gib: float, narrow: bool) -> int:
    """The most layers of this width that fit; 0 if not even one per stage fits."""
    for layers in itertools.count(trial.pipe, trial.pipe):
        need = memory(trial, replace(sizes, layers=layers), processes, narrow)
        if need.total > memory_gib * GIB:
            return layers - trial.pipe
