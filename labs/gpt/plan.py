"""What can work, decided before anything is allocated: the combination of flags, and the memory.

    python -m labs.gpt --plan --preset 1.6b --gpus 4 --memory_gib 24

Bytes per weight, token and layer; a test compares them with what autograd keeps.
"""

import bisect
import os
from dataclasses import dataclass, replace

import torch

from engine.distributed import World
from engine.errors import UserError
from engine.memory import GIB, memory_limit
from labs.gpt.sizes import Sizes

# What a block keeps for its backward pass: bytes per token and unit of width, by (model, narrow).
# fp32: 4 × (x 1, norm 1, q k v 3, attention 1, x 1, norm 1, MLP 4, GELU 4). Under autocast both x
# stay in fp32, the rest takes 2 bytes. Hugging Face's GELU is several operations.
KEPT = {("own", False): 64, ("own", True): 36, ("hf", False): 112, ("hf", True): 60}
# What a process needs on a CPU besides tensors, in bytes: buffers and code of oneDNN, buffers of
# gloo, and for each layer the objects of modules, of autograd and of FSDP2. Measured with 1 and 2
# processes of 4 to 200 layers: 0.045 to 0.075 GiB. A GPU's figures count tensors only.
PROCESS = 0.05 * GIB
PROCESS_LAYER = 0.4 * 2**20
# Bytes per logit: itself, its log-softmax, and the gradients of both; 16-bit logits are widened.
LOGITS = {False: 12, True: 16}


# -------- which settings work together


def is_sharded(config) -> bool:
    """Whether FSDP2 shards weights and gradients, too."""
    return config.data_parallel in ("zero2", "zero3")


def check_grid(config, sizes: Sizes, processes: int) -> None:
    """Raises `UserError` for settings that cannot work together, or on this number of processes."""
    tensor, pipe, accumulate = config.tensor, config.pipe, config.accumulate
    zero = config.data_parallel
    data = max(1, processes // (tensor * pipe))
    mistakes = [
        (
            tensor > 1 and zero == "zero1",
            "--data_parallel zero1 does not work with --tensor; use ddp, zero2 or zero3",
        ),
        (
            config.offload and not is_sharded(config),
            "--offload needs --data_parallel zero2 or zero3",
        ),
        (
            config.model == "hf" and (tensor > 1 or pipe > 1),
            "--model hf does not work with --tensor and --pipe; use --model own",
        ),
        (
            processes % (tensor * pipe),
            f"--tensor {tensor} × --pipe {pipe} does not divide {processes} processes; "
            f"start a multiple of {tensor * pipe}",
        ),
        (sizes.nhead % tensor, f"--tensor {tensor} does not divide the {sizes.nhead} heads"),
        (
            sizes.seq_length % tensor,
            f"--tensor {tensor} does not divide a sequence of {sizes.seq_length} tokens",
        ),
        # FSDP2 shards what a tensor-parallel rank has; PyTorch cannot cut such a piece out of a
        # full matrix whose rows do not divide.
        (
            is_sharded(config) and tensor > 1 and data > 2 and sizes.vocab_size % tensor,
            f"--tensor {tensor} does not divide the vocabulary of {sizes.vocab_size}, as "
            f"--data_parallel {zero} with {data} processes needs; use ddp",
        ),
        (pipe > sizes.num_layers, f"--pipe {pipe} is more than the {sizes.num_layers} layers"),
        (
            config.batch_size % (data * accumulate),
            f"--batch_size {config.batch_size} is not divisible by {data} × {accumulate} "
            "(data-parallel processes × --accumulate)",
        ),
        (
            1 < accumulate < pipe,
            f"--pipe {pipe} needs --accumulate of at least {pipe}, not {accumulate}, or 1 for a "
            "pipeline in which one stage works at a time",
        ),
    ]
    for wrong, message in mistakes:
        if wrong:
            raise UserError(message)


# -------- the memory that a rank needs


@dataclass
class Need:
    """Bytes on the fullest rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    process: float  # besides tensors, on a CPU
    host: float  # in the memory of the machine, with --offload
    # At the fullest moment. This is not the sum: gradients may replace activations, and the tied
    # matrix has a second gradient.
    total: float

    def __str__(self) -> str:
        names = ("weights", "gradients", "optimizer", "activations", "logits")
        parts = ", ".join(f"{name} {getattr(self, name) / GIB:.2f}" for name in names)
        return f"{self.total / GIB:.2f} GiB ({parts})"


def memory(config, sizes: Sizes, processes: int, device_type: str = "cuda") -> Need:
    """What the fullest rank needs. Weights are fp32; products too, or else in 16 bits."""
    data = processes // (config.tensor * config.pipe)
    layers = -(-sizes.num_layers // config.pipe)  # rounded up: the rank that has most
    # The first stage; the last one has about as many.
    own = sizes.embedding_parameters + layers * sizes.block_parameters
    # The output and the embedding are one matrix. It has a gradient as each, and then their sum.
    tied = 4 * sizes.vocab_size * sizes.d_model / config.tensor

    weights, gradients, optimizer, host = bytes_of_weights(config, sizes, data, own)
    micro_batch, again, logits = bytes_of_micro_batch(config, sizes, data, layers)
    # The first stage, the fullest, holds up to `pipe` micro-batches at once.
    in_flight = min(config.accumulate, config.pipe)
    activations = in_flight * micro_batch + again

    # The fullest moment is at the output, or at the embedding at the end of the backward pass.
    at_output = activations + logits + tied
    if config.pipe > 1:  # the first rank has the activations, the last one the logits
        at_output = max(activations, micro_batch + again + logits + tied)
    at_embedding = gradients + activations / layers + 2 * tied
    # Gradients are there all the time where they are added up, and in DDP's buckets.
    if config.accumulate > 1 or (data > 1 and not is_sharded(config)):
        at_output += gradients
        at_embedding += tied
    total = weights + optimizer + max(at_output, at_embedding)
    if config.pipe > 1:  # buffers for each micro-batch's input and its gradient
        buffers = 1 if config.pipe == 2 else 2
        row = config.batch_size / data * sizes.seq_length * sizes.d_model
        total += 4 * row * buffers
    process = 0.0
    if device_type == "cpu":
        process = PROCESS + layers * PROCESS_LAYER
    return Need(weights, gradients, optimizer, activations, logits, process, host, total + process)


def bytes_of_weights(config, sizes: Sizes, data: int, own: int) -> tuple[float, ...]:
    """Of `own` weights, their gradients and AdamW's two moments; and what lies in host memory."""
    narrow = config.precision != "fp32"
    gathered = 2 if narrow else 4  # bytes per weight in computation
    block = sizes.block_parameters / config.tensor
    ends = sizes.embedding_parameters / config.tensor
    kept = own / config.tensor  # on this rank, of each of the four
    if is_sharded(config):
        kept /= data
    weights, gradients, optimizer, host = 4 * kept, 4 * kept, 8 * kept, 0.0
    if config.offload:
        weights, gradients, optimizer, host = 0.0, 0.0, 0.0, 16 * kept
    if config.data_parallel == "zero1":  # deals out whole matrices
        optimizer = 8 * max(own / data, sizes.vocab_size * sizes.d_model)

    gathers_a_stage = is_sharded(config) and config.pipe > 1
    if config.data_parallel == "zero2" or gathers_a_stage:
        # All weights stay gathered until the backward pass.
        weights += gathered * own / config.tensor
    elif config.data_parallel == "zero3":  # the current block, the next one, and the embedding
        weights += gathered * (2 * block + ends)
    elif narrow:  # autocast's copies
        weights += 2 * own / config.tensor
    if gathers_a_stage:
        # `PipelineStage` scatters a stage's gradients after its last micro-batch.
        gradients += gathered * own / config.tensor
    elif is_sharded(config) and (data > 1 or config.offload):  # before they are scattered
        gradients += 4 * (2 * block + ends)
    return weights, gradients, optimizer, host


def bytes_of_micro_batch(config, sizes: Sizes, data: int, layers: int) -> tuple[float, ...]:
    """Bytes of one micro-batch: activations that are kept, those of a recomputed block, logits."""
    narrow = config.precision != "fp32"
    tokens = config.batch_size / (data * config.accumulate) * sizes.seq_length
    # Each rank keeps 1 / tensor of everything. But the outputs of the two norms are gathered for
    # the products after them, and are kept whole: 2 × 4 bytes, or 2 × 2.
    kept = KEPT[config.model, narrow] / config.tensor
    kept += (4 if narrow else 8) * (1 - 1 / config.tensor)
    again = 0.0
    if config.recompute:
        again = tokens * sizes.d_model * kept
        kept = 4 / config.tensor
    logits = tokens * sizes.vocab_size * LOGITS[narrow] / config.tensor
    if config.pipe > 1 and not narrow:  # the last stage's output stays until its backward pass
        logits += 4 * tokens * sizes.vocab_size
    return tokens * sizes.d_model * layers * kept, again, logits


def check_fits(config, sizes: Sizes, world: World) -> Need:
    """What the fullest rank needs. Raises `UserError` if that is more than there is."""
    need = memory(config, sizes, world.size, world.device.type)
    on_host = need.host
    if config.memory_gib:
        require("card", need.total, config.memory_gib, world)
    if world.device.type == "cuda":
        require("GPU", need.total, memory_limit(world.device), world)
    else:
        on_host += need.total
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    require("host", on_host, memory_limit(torch.device("cpu")) / ranks_here, world)
    return need


def require(kind: str, needed: float, limit: float, world: World) -> None:
    """Raises `UserError` if a rank needs more bytes than the GiB it may have."""
    limit = -world.maximum(-limit)[0]  # the least, for all ranks alike
    if needed > limit * GIB:
        raise UserError(
            f"the model does not fit: it needs {needed / GIB:.2f} GiB of {kind} memory per rank "
            f"and there are {limit:.2f}; to see what fits, start one process with the same "
            f"flags and --plan --gpus {world.size} --memory_gib {limit:.2f}"
        )


# -------- the table of --plan

CARD_GIB = 24.0  # of a card for which no --memory_gib is given


def techniques(cards: int) -> dict[str, dict]:
    """The techniques to try: name → changed settings."""
    small = {"recompute": True}
    zero3 = {"data_parallel": "zero3"}
    rows = {f"data {cards}": {}, f"data {cards}, recompute": small}
    if cards > 1:
        for stage in (1, 2, 3):
            rows[f"zero{stage} {cards}"] = {"data_parallel": f"zero{stage}"}
        rows[f"zero3 {cards}, recompute"] = zero3 | small
    rows[f"zero3 {cards}, recompute, offload"] = zero3 | small | {"offload": True}
    for parts in (2, 4, 8):
        if cards % parts == 0:
            for side in ("tensor", "pipe"):
                name = f"{side} {parts} × data {cards // parts}"
                rows[name] = {side: parts}
                rows[f"{name}, recompute"] = {side: parts} | small
    return rows


def table(config, sizes: Sizes) -> str:
    """A line per technique: what it needs, whether it fits, and how deep a model would fit.

    Micro-batches are of one sequence. With --offload the depth depends on the host. The last lines
    say which techniques cannot work, and why.
    """
    memory_gib = config.memory_gib or CARD_GIB
    columns = ("weights", "gradients", "optimizer", "activations", "logits", "total")
    products = "fp32" if config.precision == "fp32" else "bf16 or fp16"
    lines = [
        f"{sizes.parameters:,} parameters: width {sizes.d_model}, {sizes.num_layers} layers, "
        f"{sizes.nhead} heads, sequence {sizes.seq_length}, vocabulary {sizes.vocab_size:,}; "
        f"{sizes.flops_per_token():,.0f} FLOPs a training token; batch {config.batch_size}",
        f"{config.gpus} card(s) of {memory_gib:g} GiB; {products} products, fp32 weights",
        f"{'GiB a card':33}" + "".join(f"{name:>12}" for name in columns),
    ]
    impossible: dict[str, list[str]] = {}  # reason → techniques
    for name, changes in techniques(config.gpus).items():
        plain = {"data_parallel": "ddp", "tensor": 1, "pipe": 1, "offload": False}
        trial = replace(config, **plain | changes)
        copies = config.gpus // (trial.tensor * trial.pipe)  # of the model
        trial.accumulate = max(1, config.batch_size // copies)
        line = f"{name:33}"
        if config.batch_size % copies:
            reason = (
                f"--batch_size {config.batch_size} is not divisible by {copies} copies of the "
                f"model; give --batch_size {config.batch_size + -config.batch_size % copies}"
            )
            impossible.setdefault(reason, []).append(name)
            continue
        try:
            check_grid(trial, sizes, config.gpus)
        except UserError as error:
            impossible.setdefault(str(error), []).append(name)
            continue
        need = memory(trial, sizes, config.gpus)
        for column in columns:
            line += f"{getattr(need, column) / GIB:12.2f}"
        line += "  fits" if need.total <= memory_gib * GIB else "  does not fit"
        if trial.offload:
            line += f"; {need.host / GIB:.1f} GiB of host memory a card"
        else:
            layers = most_layers(trial, sizes, config.gpus, memory_gib)
            billions = replace(sizes, num_layers=layers).parameters / 1e9
            line += f"; at most {layers} layers ({billions:.2f}B)"
        lines.append(line)
    for reason, names in impossible.items():
        lines.append(f"not possible: {'; '.join(names)}: {reason}")
    return "\n".join(lines)


def most_layers(
    config, sizes: Sizes, processes: int, memory_gib: float, device_type: str = "cuda"
) -> int:
    """The most layers of this width that fit; 0 if not even one per stage fits."""

    def too_many(layers: int) -> bool:
        """Whether this depth needs more memory than there is."""
        deeper = replace(sizes, num_layers=layers)
        return memory(config, deeper, processes, device_type).total > memory_gib * GIB

    depths = range(config.pipe, 2**20 + 1, config.pipe)
    return config.pipe * bisect.bisect_left(depths, True, key=too_many)
