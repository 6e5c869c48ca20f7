"""The model on a grid of processes, data × pipe × tensor, and one training step on it.

    check_grid(config, sizes, world.size)     # refuse what cannot work
    layout = Layout(config, sizes, world, precision)
    share = layout.forward_backward(tokens, targets)
    norm = layout.clip(1.0)

On every grid, losses and weights are those of one process that sees the whole batch.
B sequences, T tokens, D hidden size.
"""

import contextlib
import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from engine.distributed import World, distribute_like, full_tensor, process_grid
from engine.errors import UserError
from engine.precision import Precision
from labs.gpt.model import GPT, HuggingFaceGPT, initial_weight, mean_loss
from labs.gpt.sizes import Sizes

# PyTorch warns that the gradient norm on a grid of two sides takes two messages of one number each.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
WEIGHT_DECAY = 0.1  # of matrices, as GPT-3 (Brown et al. 2020, appendix B)


def check_grid(config, sizes: Sizes, processes: int) -> int:
    """The number of data-parallel processes. Raises `UserError` for settings that cannot work."""
    check_combinations(config)
    tensor, pipe, accumulate = config.tensor, config.pipe, config.accumulate
    if processes % (tensor * pipe):
        raise UserError(
            f"--tensor {tensor} × --pipe {pipe} does not divide {processes} processes; "
            f"start a multiple of {tensor * pipe}"
        )
    data = processes // (tensor * pipe)
    if sizes.hidden % sizes.heads:
        raise UserError(f"--hidden {sizes.hidden} must be divisible by --heads {sizes.heads}")
    if sizes.heads % tensor:
        raise UserError(f"--tensor {tensor} does not divide the {sizes.heads} heads")
    if sizes.sequence % tensor:
        raise UserError(f"--tensor {tensor} does not divide a sequence of {sizes.sequence} tokens")
    # FSDP2 shards what a tensor-parallel rank has; PyTorch cannot cut such a piece out of a full
    # matrix whose rows do not divide.
    if is_sharded(config) and tensor > 1 and data > 2 and sizes.vocabulary % tensor:
        raise UserError(
            f"--tensor {tensor} does not divide the vocabulary of {sizes.vocabulary}, as "
            f"--data_parallel {config.data_parallel} with {data} processes needs; use ddp"
        )
    if pipe > sizes.layers:
        raise UserError(f"--pipe {pipe} is more than the {sizes.layers} layers")
    if config.batch_size % (data * accumulate):
        raise UserError(
            f"--batch_size {config.batch_size} is not divisible by {data} × {accumulate} "
            "(data-parallel processes × --accumulate)"
        )
    if pipe > 1 and config.schedule == "1f1b" and accumulate < pipe:
        raise UserError(
            f"--schedule 1f1b needs --accumulate of at least --pipe {pipe}, not {accumulate}; "
            "use a larger --batch_size or --schedule gpipe"
        )
    return data


def check_combinations(config) -> None:
    """Raise `UserError` for techniques that do not work together, on any number of processes."""
    tensor, pipe = config.tensor > 1, config.pipe > 1
    sharded, zero1 = is_sharded(config), config.data_parallel == "zero1"
    hugging_face = config.model == "hf"
    refusals = [
        (tensor and pipe, "--tensor and --pipe do not work together; use one of them"),
        (
            pipe and config.data_parallel != "ddp",
            f"--data_parallel {config.data_parallel} does not work with --pipe; use ddp",
        ),
        (
            tensor and zero1,
            "--data_parallel zero1 does not work with --tensor; use ddp, zero2 or zero3",
        ),
        (config.offload and not sharded, "--offload needs --data_parallel zero2 or zero3"),
        (
            hugging_face and (tensor or pipe or config.chunked_loss),
            "--model hf does not work with --tensor, --pipe and --chunked_loss; use --model own",
        ),
        (
            config.chunked_loss and (tensor or pipe),
            "--chunked_loss does not work with --tensor and --pipe",
        ),
        (
            config.chunked_loss and config.compile,
            "--chunked_loss does not work with --compile in PyTorch 2.13",
        ),
        (
            config.chunked_loss and not hasattr(nn, "LinearCrossEntropyOptions"),
            f"--chunked_loss needs PyTorch 2.13; this is {torch.__version__}",
        ),
        (
            config.precision == "fp16" and pipe,
            "--precision fp16 does not work with --pipe; use bf16 or fp32",
        ),
    ]
    for refused, message in refusals:
        if refused:
            raise UserError(message)


def is_sharded(config) -> bool:
    """Whether FSDP2 shards weights and gradients, too."""
    return config.data_parallel in ("zero2", "zero3")


def default_accumulate(config, processes: int) -> int:
    """1; in a pipeline the fewest micro-batches that are twice as many as its stages.

    If the batch does not divide into so many, the most that it divides into.
    """
    if config.pipe == 1:
        return 1
    rows = max(1, config.batch_size * config.tensor * config.pipe // processes)
    divisors = [number for number in range(1, rows + 1) if rows % number == 0]
    return next((number for number in divisors if number >= 2 * config.pipe), rows)


class LatestOutput(dict):
    """Keeps the newest entry only. In validation a stage's older outputs have been sent already."""

    def __setitem__(self, key, value):
        self.clear()
        super().__setitem__(key, value)


class Layout:
    """This rank's part of the model, and how a step is computed with it.

    model     the model, or this rank's stage of a pipeline
    weights   name → parameter, a `DTensor` where it is sharded; names as in the whole model
    """

    def __init__(self, config, sizes: Sizes, world: World, precision: Precision):
        self.config, self.sizes, self.world, self.precision = config, sizes, world, precision
        self.data = check_grid(config, sizes, world.size)
        self.grid = {"data": self.data, "pipe": config.pipe, "tensor": config.tensor}
        self.row = world.rank // (config.pipe * config.tensor)  # its part of the batch
        self.mesh = None
        if world.size > 1 or is_sharded(config):
            self.mesh = process_grid(world, **self.grid)

        # Nothing is allocated until it is known which part of a weight this rank needs.
        with torch.device("meta"):
            self.model = self._make_model()
        if config.tensor > 1:
            parallelize_tensors(self.model, self.mesh["tensor"])
        if is_sharded(config):
            shard(self.model, self.mesh["data"], config, precision)
        self.model.to_empty(device="cpu" if config.offload else world.device)
        if config.model == "hf":
            self.model.model.tie_weights()  # `to_empty` has untied them
        self.weights = dict(self.model.named_parameters())
        for name, weight in self.weights.items():
            value = initial_weight(name, weight.shape, sizes.layers, config.seed)
            set_weight(weight, value)
        if config.compile:
            for block in self.model.h.values():
                block.compile()

        self.schedule = self.ends = None
        if config.pipe > 1:
            self._make_schedule()
        # DDP takes whole models: gradients of stages and tensor-parallel weights are averaged here.
        in_parts = config.tensor * config.pipe > 1
        self.averages_gradients = self.data > 1 and in_parts and not is_sharded(config)
        self.runner = self.model if in_parts else world.data_parallel(self.model)

    def _make_model(self) -> nn.Module:
        config, sizes = self.config, self.sizes
        if config.model == "hf":
            return HuggingFaceGPT(sizes, config.recompute)
        if config.pipe == 1:
            return GPT(sizes, config.recompute, config.chunked_loss)
        stages = torch.arange(sizes.layers, device="cpu").tensor_split(config.pipe)
        return GPT(sizes, config.recompute, blocks=stages[self.stage_number].tolist())

    @property
    def stage_number(self) -> int:
        """This rank's stage of the pipeline."""
        return self.world.rank // self.config.tensor % self.config.pipe

    def _make_schedule(self) -> None:
        """The stage with the shapes it receives and sends, and the order of the work."""
        config, sizes, device = self.config, self.sizes, self.world.device
        shape = (config.batch_size // self.data // config.accumulate, sizes.sequence)
        tokens = torch.empty(shape, dtype=torch.long, device="meta")
        hidden = torch.empty(*shape, sizes.hidden, device="meta", requires_grad=True)
        logits = torch.empty(*shape, sizes.vocabulary, device="meta", requires_grad=True)
        if self.precision.name != "fp32":  # products are in 16 bits; the residual stream is not
            logits = logits.to(self.precision.dtype)
        is_last = self.stage_number == config.pipe - 1
        self.stage = pipelining.PipelineStage(
            self.model,
            self.stage_number,
            config.pipe,
            device,
            input_args=hidden if self.stage_number else tokens,
            output_args=logits if is_last else hidden,
            group=self.mesh["pipe"].get_group(),
        )
        kinds = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
        self.schedule = kinds[config.schedule](self.stage, config.accumulate, loss_fn=mean_loss)
        # The first and the last rank of a row have a copy each of the tied matrix.
        for row in self.mesh.mesh.squeeze(-1).tolist():  # (data, pipe)
            pair = dist.new_group([row[0], row[-1]])  # all ranks must take part
            if self.world.rank in (row[0], row[-1]):
                self.ends = pair

    def part_of(self, batch: tuple) -> list[Tensor]:
        """This row's sequences of a batch, on the device."""
        return [ids.chunk(self.data)[self.row].to(self.world.device) for ids in batch]

    def micro_batches(self, tokens: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(B, T) each → `accumulate` pairs of equal size."""
        parts = self.config.accumulate
        return list(zip(tokens.chunk(parts), targets.chunk(parts)))

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradients of the mean loss over the batch; (B, T) each, this row's part.

        Returns this rank's share of that loss: the sum over all ranks is the loss.
        """
        if self.schedule:
            loss = self._run_pipeline(tokens, targets, self.schedule.step)
            if self.ends is not None:
                # The tied matrix works in the first and the last stage: its gradients are added.
                dist.all_reduce(self.weights["wte.weight"].grad, group=self.ends)
        else:
            loss = torch.zeros((), device=self.world.device)
            for number, (x, y) in enumerate(self.micro_batches(tokens, targets), start=1):
                last = number == self.config.accumulate
                with (
                    self.world.accumulate_gradients(self.runner, last=last),
                    self._loss_parallel(),
                ):
                    with self.precision.autocast():
                        part = full_tensor(self.runner(x, y)) / self.config.accumulate
                    self.precision.backward(part)
                loss += part.detach()
        if self.averages_gradients:
            for weight in self.weights.values():
                gradient = local(weight.grad)
                dist.all_reduce(gradient, group=self.mesh["data"].get_group())
                gradient /= self.data
        return loss / (self.data * self.config.tensor)

    def _run_pipeline(self, tokens: Tensor, targets: Tensor, run) -> Tensor:
        """The mean loss by the schedule's `step` or `eval`; 0 on all ranks but the last stage's."""
        losses = []
        last = self.model.is_last
        with self.precision.autocast():
            run(
                *([tokens] if self.model.is_first else []),
                target=targets if last else None,
                losses=losses if last else None,
                return_outputs=False,
            )
        if not last:
            return torch.zeros((), device=self.world.device)
        return torch.stack(losses).mean().detach()

    @torch.no_grad()
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """This rank's share of the mean loss, for validation; (B, T) each."""
        if self.schedule:
            self.stage.fwd_cache = LatestOutput()  # `eval` would keep all for a backward pass
            loss = self._run_pipeline(tokens, targets, self.schedule.eval)
            self.stage.fwd_cache = {}
        else:
            losses = []
            with self._loss_parallel(), self.precision.autocast():
                for x, y in self.micro_batches(tokens, targets):
                    losses.append(full_tensor(self.model(x, y)))
            loss = torch.stack(losses).mean()
        return loss / (self.data * self.config.tensor)

    def _loss_parallel(self):
        """With tensor parallelism the logits stay distributed over the vocabulary."""
        return loss_parallel() if self.config.tensor > 1 else contextlib.nullcontext()

    def clip(self, limit: float) -> Tensor:
        """Scale the gradients down to norm `limit`; returns the norm before, equal on all ranks."""
        weights = self.weights
        if self.config.pipe == 1:
            gradients = [weight.grad for weight in weights.values()]
            norm = full_tensor(nn.utils.get_total_norm(gradients))
        else:  # the tied matrix counts once, though two ranks have it
            is_copy = self.ends is not None and not self.model.is_first
            gradients = []
            for name, weight in weights.items():
                if not (is_copy and name == "wte.weight"):
                    gradients.append(weight.grad)
            square = nn.utils.get_total_norm(gradients) ** 2
            dist.all_reduce(square, group=self.mesh["pipe"].get_group())
            norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(weights.values(), limit, norm)
        return norm


def parallelize_tensors(model: GPT, mesh) -> None:
    """Tensor parallelism (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022).

    Columns of the first matrix and rows of the second, so that nothing travels in between: two
    all-gathers and two reduce-scatters per block. Norms work on a part of the sequence, embedding
    and loss on a part of the vocabulary.
    """
    into_rows = dict(input_layouts=Replicate(), use_local_output=True)
    model_plan = {
        "wte": RowwiseParallel(output_layouts=Shard(1), **into_rows),
        "wpe": RowwiseParallel(output_layouts=Shard(0), **into_rows),
        "ln_f": SequenceParallel(),
    }
    parallelize_module(model, mesh, model_plan)
    # The output multiplies by the weight of `wte`, a DTensor; so its other factor must be one.
    whole_sequence = PrepareModuleOutput(
        output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
    )
    parallelize_module(model.ln_f, mesh, whole_sequence)
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    block_plan = {
        "ln_1": SequenceParallel(),
        "attn": gather,
        "attn.c_attn": ColwiseParallel(),
        "attn.c_proj": RowwiseParallel(output_layouts=Shard(1)),
        "ln_2": SequenceParallel(),
        "mlp": gather,
        "mlp.c_fc": ColwiseParallel(),
        "mlp.c_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.h.values():
        parallelize_module(block, mesh, block_plan)


def shard(model: nn.Module, mesh, config, precision: Precision) -> None:
    """FSDP2: each rank keeps its part of every weight, and gathers a block when it is computed.

    zero2 keeps the gathered weights until the backward pass, zero3 drops them after each block.
    """
    mixed = MixedPrecisionPolicy()
    if precision.name != "fp32":  # gather weights in 16 bits, reduce gradients in 32
        mixed = MixedPrecisionPolicy(param_dtype=precision.dtype, reduce_dtype=torch.float32)
    offload = OffloadPolicy()
    if config.offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    reshard = config.data_parallel == "zero3"
    for part in [*model.h.values(), model]:
        fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=mixed,
            offload_policy=offload,
        )


def make_optimizer(layout: Layout) -> torch.optim.Optimizer:
    """AdamW with GPT-3's settings; biases and norms do not decay."""
    config, weights = layout.config, list(layout.weights.values())
    groups = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    settings = dict(lr=config.lr, betas=(0.9, 0.95), fused=True)
    if config.data_parallel == "zero1" and layout.data > 1:
        return ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, **settings)
    return torch.optim.AdamW(groups, **settings)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def set_weight(weight: Tensor, value: Tensor) -> None:
    """Write this rank's part of `value` into `weight`; every rank has the full value."""
    local(weight).copy_(local(distribute_like(value, weight)))
