"""How much memory a rank will need, before anything is allocated. Bytes for a weight, a token, a layer; checked by a test.

    python -m labs.gpt --plan --size 1.6b --gpus 4 --memory_gib 24

H hidden size, L layers, T sequence, V vocabulary, N = tokens of one micro-batch on a rank.
"""

import itertools
import os
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from engine.distributed import World
from engine.errors import UserError
from engine.telemetry import GIB
from labs.gpt.parallel import STAGES_PER_RANK, check_grid
from labs.gpt.sizes import Sizes

# What a block keeps for its backward pass, bytes a token and unit of H. In fp32 4 × (x 1, norm 1, q k v 3, attention 1, x 1,
# norm 1, MLP 4, GELU 4); under autocast the two x stay in fp32 and the rest is in 2 bytes. Hugging Face writes the GELU out.
KEPT = {("own", False): 64, ("own", True): 36, ("hf", False): 112, ("hf", True): 60}
KEPT_SELECTIVE = {
    False: 44,
    True: 24,
}  # the input, and the results of products and attention: 10 × 4 or × 2
LOGITS = {
    False: 12,
    True: 16,
}  # a logit: itself, its log-softmax and their gradient; narrow ones are made wide as well
KEPT_LOGITS = {
    False: 8,
    True: 6,
}  # of these, what waits for the backward pass: the logit and its log-softmax


@dataclass
class Need:
    """Bytes on the fullest rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    host: float  # what offloading puts into the memory of the machine
    total: float  # at the fullest moment, not the sum: without accumulation gradients come as activations go

    def __str__(self) -> str:
        names = ("weights", "gradients", "optimizer", "activations", "logits")
        parts = ", ".join(f"{name} {getattr(self, name) / GIB:.2f}" for name in names)
        return f"{self.total / GIB:.2f} GiB ({parts})"


def memory(config, sizes: Sizes, processes: int, narrow: bool) -> Need:
    """What the fullest rank needs. `narrow`: matrix products in bf16 or fp16 (the weights themselves stay fp32)."""
    data = processes // (config.tensor * config.pipe)
    cut = config.tensor * (
        data if config.data_parallel in ("zero2", "zero3") else 1
    )  # into how many a weight is cut
    layers = -(-sizes.layers // config.pipe)  # of the rank that has most: rounded up
    here = (
        sizes.embedding_parameters + layers * sizes.block_parameters
    )  # the first stage; the last has about the same
    block, ends = sizes.block_parameters / config.tensor, sizes.embedding_parameters / config.tensor
    gathered = 2 if narrow else 4  # bytes a weight as it is computed with
    weights = 4 * here / cut  # fp32
    if config.data_parallel == "zero2":  # all are gathered until the backward pass is done
        weights += gathered * here / config.tensor
    elif (
        config.data_parallel == "zero3"
    ):  # the one at work, the next one on its way, and the embedding
        weights += gathered * (2 * block + ends)
    elif narrow:  # autocast's copies
        weights += 2 * here / cut
    gathers = cut > config.tensor or config.offload == "parameters"
    gradients = 4 * here / cut + (4 * (2 * block + ends) if gathers else 0)
    optimizer = 8 * here / cut  # AdamW's two moments, in fp32
    if config.data_parallel == "zero1":  # deals out whole matrices
        optimizer = 8 * max(here / data, sizes.vocabulary * sizes.hidden)
    host = 0.0
    if config.offload == "optimizer":  # on the way to the CPU and back: one matrix at a time
        host, optimizer = optimizer, 4.0 * sizes.vocabulary * sizes.hidden
    elif config.offload == "parameters":  # a weight, its gradient and its moments are 16 bytes
        host, weights, gradients, optimizer = (
            16 * here / cut,
            weights - 4 * here / cut,
            gradients - 4 * here / cut,
            0.0,
        )

    tokens = config.batch_size / (data * config.accumulate) * sizes.sequence
    in_flight = 1
    if config.pipe > 1:  # 1F1B lets in as many micro-batches as there are ranks, GPipe all of them
        in_flight = (
            config.accumulate if config.schedule == "gpipe" else min(config.accumulate, config.pipe)
        )
        if (
            STAGES_PER_RANK[config.schedule] == 2
        ):  # the first stage runs ahead, or (zb, zbv) gradients wait for W
            in_flight += (config.pipe - 1) / 2
            in_flight = (
                min(config.accumulate, in_flight) if config.schedule == "interleaved" else in_flight
            )
    # Sequence parallel: all is cut, but what norms give (selective: what the second products give) is whole for a while.
    whole = 2 * gathered * (1 - 1 / config.tensor)
    kept = KEPT[config.model, narrow] / config.tensor + whole
    in_step = {
        "none": kept,
        "selective": KEPT_SELECTIVE[narrow] / config.tensor + whole,
        "all": 4 / config.tensor,
    }
    micro_batch = tokens * sizes.hidden * layers * in_step[config.recompute]
    again = (
        tokens * sizes.hidden * kept * (config.recompute != "none")
    )  # of the block that is computed again
    activations = in_flight * micro_batch + again
    logits = tokens * sizes.vocabulary * LOGITS[narrow] / config.tensor
    if (
        config.pipe > 1 and not narrow
    ):  # the last stage's output stays until its backward pass is done
        logits += 4 * tokens * sizes.vocabulary
    if (
        config.pipe > 1 and config.schedule == "gpipe"
    ):  # the last stage keeps those of all, and their log-softmax
        logits += (in_flight - 1) * tokens * sizes.vocabulary * KEPT_LOGITS[narrow]
    if config.chunked_loss:  # gradients of hidden states and matrix instead
        logits = tokens * sizes.hidden * 8 + 4 * sizes.vocabulary * sizes.hidden
    # Gradients are there all the time where they are added up, and in DDP's buckets; else they come as activations go.
    adds_up = config.accumulate > 1 or (data > 1 and config.data_parallel in ("ddp", "zero1"))
    # The tied matrix gets a gradient as output, which waits for the one as embedding; then there is their sum as well.
    tied = 4 * sizes.vocabulary * sizes.hidden / config.tensor
    at_output = activations + logits + tied
    at_last = {"1f1b": 1, "interleaved": (config.pipe + 1) / 2}.get(
        config.schedule
    )  # micro-batches on the last rank
    if config.pipe > 1 and at_last:  # the first rank has the activations, the last the logits
        at_output = max(activations, at_last * micro_batch + again + logits + tied)
    at_output += gradients if adds_up else 0
    at_embedding = gradients + activations / layers + (3 if adds_up else 2) * tied
    total = weights + optimizer + max(at_output, at_embedding)
    if (
        config.pipe > 1
    ):  # PyTorch keeps a buffer for each micro-batch's input and its gradient, in every stage
        buffers = 2 * STAGES_PER_RANK[config.schedule] - (config.pipe == 2)
        total += 4 * tokens * sizes.hidden * config.accumulate * buffers
    return Need(weights, gradients, optimizer, activations, logits, host, total)


def device_memory(world: World) -> float:
    """Bytes that a rank may have: those that are free on its GPU, or its share of the machine's memory."""
    if world.device.type == "cuda":
        return -world.maximum(-torch.cuda.mem_get_info(world.device)[0])[
            0
        ]  # the least, for all ranks alike
    return host_memory()


def host_memory() -> float:
    """Bytes of a rank's share of the machine's memory, or of its container's."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no container, or "max": one without a limit
        limit = min(limit, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return limit / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def check_fits(config, sizes: Sizes, world: World, precision: str) -> Need:
    """What the fullest rank needs. Raises `UserError`, before anything is allocated, if that is more than there is."""
    need, limit = memory(config, sizes, world.size, precision != "fp32"), device_memory(world)
    if need.total > limit:
        given = (
            "layers",
            "hidden",
            "heads",
            "sequence",
            "batch_size",
            "data",
            "tokenizer",
            "model",
        )
        values = {name: getattr(config, name) for name in given}
        values |= {"vocabulary": sizes.vocabulary, "precision": precision}
        given = "".join(
            f" --{name} {shlex.quote(str(value))}" for name, value in values.items() if value
        )
        raise UserError(
            f"does not fit: needs {need.total / GIB:.1f} GiB a rank, there are {limit / GIB:.1f}; see what would: "
            f"python -m labs.gpt --plan --size {config.size} --gpus {world.size} --memory_gib {limit / GIB:.1f}{given}"
        )
    held = need.host + (need.total if world.device.type == "cpu" else 0)
    if need.host and held > host_memory():
        raise UserError(
            f"does not fit: --offload {config.offload} puts {held / GIB:.1f} GiB a rank into the machine's memory, "
            f"and there are {host_memory() / GIB:.1f}; give a smaller --size"
        )
    return need


def techniques(config):
    """Settings to try, from none to all: (name, what it changes)."""
    gpus = config.gpus
    yield "one process" if gpus == 1 else f"DDP {gpus}", {}
    # Else this PyTorch or this model cannot; see check_grid.
    chunks = (
        hasattr(nn, "LinearCrossEntropyOptions") and config.model == "own" and not config.compile
    )
    small = dict(recompute="all") | (dict(chunked_loss=True) if chunks else {})
    yield f"+ recompute all{', chunked loss' if chunks else ''}", small
    if gpus == 1:
        yield "+ offload optimizer", small | dict(offload="optimizer")
        yield (
            "+ offload parameters (FSDP2)",
            small | dict(data_parallel="zero3", offload="parameters"),
        )
        return
    for name in ("zero1", "zero2", "zero3"):
        yield name, dict(data_parallel=name)
    yield "zero3 + recompute all", small | dict(data_parallel="zero3")
    yield "zero3 + recompute + offload", small | dict(data_parallel="zero3", offload="parameters")
    for tensor in (n for n in (2, 4, 8) if gpus % n == 0):
        yield f"tensor {tensor} × data {gpus // tensor}", dict(tensor=tensor)
        yield (
            f"tensor {tensor} × data {gpus // tensor} + recompute",
            dict(tensor=tensor, recompute="all"),
        )
        if gpus > tensor:
            yield (
                f"tensor {tensor} × zero3 {gpus // tensor}",
                dict(tensor=tensor, data_parallel="zero3"),
            )
    for pipe in (n for n in (2, 4, 8) if gpus % n == 0):
        yield f"pipe {pipe} × data {gpus // pipe}, 1f1b", dict(pipe=pipe)
        yield f"pipe {pipe} × data {gpus // pipe} + recompute", dict(pipe=pipe, recompute="all")


def table(config, sizes: Sizes, narrow: bool) -> str:
    """One line a technique: what it needs with micro-batches of one sequence, whether it fits, and how deep a model would.

    The last line is the deepest that stays on the cards, with its command; with --offload the depth is the host's affair.
    """
    columns = ("weights", "gradients", "optimizer", "activations", "logits", "total")
    lines = [
        f"{sizes.parameters:,} parameters: hidden {sizes.hidden}, {sizes.layers} layers, {sizes.heads} heads, "
        f"sequence {sizes.sequence}, vocabulary {sizes.vocabulary:,}; batch {config.batch_size}",
        f"{config.gpus} card(s) of {config.memory_gib:g} GiB; {'bf16 or fp16' if narrow else 'fp32'} products, fp32 weights",
        f"{'GiB a card':32}" + "".join(f"{name:>13}" for name in columns),
    ]
    deepest = (0, "")
    for name, changes in techniques(config):
        name = name.replace("1f1b", config.schedule)
        trial = trial_of(config, changes)
        try:
            check_grid(trial, sizes, config.gpus)
        except UserError as error:
            lines.append(f"{name:32} {error}")
            continue
        need = memory(trial, sizes, config.gpus, narrow)
        fits = "fits" if need.total <= config.memory_gib * GIB else "does not fit"
        line = (
            f"{name:32}"
            + "".join(f"{getattr(need, column) / GIB:13.2f}" for column in columns)
            + f"  {fits}"
        )
        if trial.offload == "none":
            layers = most_layers(trial, sizes, config, narrow)
            line += (
                f"; at most {layers} layers ({replace(sizes, layers=layers).parameters / 1e9:.2f}B)"
            )
            command = command_of(
                config, changes | {"layers": layers, "accumulate": trial.accumulate}
            )
            deepest = max(deepest, (layers, command))
        else:  # how deep is the host's affair
            line += f"; {need.host / GIB:.1f} GiB of host memory a card"
        lines.append(line)
    layers, command = deepest
    last = f"the deepest without --offload: {command}" if layers else "no depth fits on these cards"
    if not command:
        last = "no row can be run as it stands; give a --batch_size that the cards divide"
    return "\n".join([*lines, last])


def trial_of(config, changes: dict):
    """The settings with a technique; the batch in micro-batches of one sequence."""
    trial = replace(
        config, **{"data_parallel": "ddp", "tensor": 1, "pipe": 1, "offload": "none"} | changes
    )
    return replace(
        trial, accumulate=max(1, config.batch_size * trial.tensor * trial.pipe // config.gpus)
    )


def command_of(config, changes: dict) -> str:
    """What trains with these settings, and with all else that the user gave."""
    given = sorted(
        config.given - {"plan", "gpus", "memory_gib", "data_parallel", "tensor", "pipe", "offload"}
    )
    settings = {"size": config.size} | {name: getattr(config, name) for name in given} | changes
    pairs = (
        (f"--{name}",) if value is True else (f"--{name}", str(value))
        for name, value in settings.items()
    )
    launcher = "python -m" if config.gpus == 1 else f"torchrun --nproc_per_node {config.gpus} -m --"
    return f"{launcher} labs.gpt {shlex.join(itertools.chain(*pairs))}"


def most_layers(trial, sizes: Sizes, config, narrow: bool) -> int:
    """How deep the model may be on these cards, at this width; 0 if not even one layer a stage fits."""
    step = trial.pipe * STAGES_PER_RANK[trial.schedule] if trial.pipe > 1 else 1
    for layers in itertools.count(step, step):
        if (
            memory(trial, replace(sizes, layers=layers), config.gpus, narrow).total
            > config.memory_gib * GIB
        ):
            return layers - step
