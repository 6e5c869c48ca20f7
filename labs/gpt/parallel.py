"""The model on a grid of processes, data × pipe × tensor, and one training step on it.

    layout = make_layout(config, sizes, world, precision)
    optimizer = make_optimizer(layout)
    share = layout.forward_backward(tokens, targets)
    norm = layout.step(optimizer, clip=1.0, step=1)

On every grid, losses and weights are those of one process that sees the whole batch.
B sequences, T tokens, D width.
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
from labs.gpt.plan import is_sharded
from labs.gpt.sizes import Sizes

# PyTorch warns that the gradient norm on a grid of two sides takes two messages of one number each.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
WEIGHT_DECAY = 0.1  # of matrices, as GPT-3 (Brown et al. 2020, appendix B)


class Layout:
    """This rank's part of the model, and how a step is computed with it.

    model     the model, or this rank's stage of a pipeline
    weights   name → parameter, a `DTensor` where it is sharded; names as in the complete model

    The grid of 8 processes with --pipe 4, or with --tensor 4, has two rows:

        row 0   ranks 0 1 2 3   a copy of the model in four parts, the first half of each batch
        row 1   ranks 4 5 6 7   another copy, the second half
    """

    def __init__(self, config, sizes: Sizes, world: World, precision: Precision, init=None):
        """`init`: weights to begin with by name, complete on each rank; None: GPT-2's random."""
        self.config, self.sizes, self.world, self.precision = config, sizes, world, precision
        # Ranks that hold one copy of the model together; `data` copies, of which ours is `row`.
        ranks_per_model = config.pipe * config.tensor
        self.data = world.size // ranks_per_model
        self.row = world.rank // ranks_per_model
        self.grid = {"data": self.data, "pipe": config.pipe, "tensor": config.tensor}
        self.mesh = None
        if world.size > 1 or is_sharded(config):
            self.mesh = process_grid(world, **self.grid)

        # Nothing is allocated until it is known which part of a weight this rank needs.
        with torch.device("meta"):
            self.model = self.make_model()
        if config.tensor > 1:
            parallelize_tensors(self.model, self.mesh["tensor"])
        if is_sharded(config):
            shard(self.model, self.mesh["data"], config, precision)
        self.model.to_empty(device="cpu" if config.offload else world.device)
        if config.model == "hf":
            self.model.model.tie_weights()  # `to_empty` has untied them
        self.weights = dict(self.model.named_parameters())
        for name, weight in self.weights.items():
            if init is None:
                value = initial_weight(name, weight.shape, sizes.num_layers, config.seed)
            else:
                value = init[name]
            set_weight(weight, value)
        if config.compile:
            for block in self.model.h.values():
                block.compile()
        self.runner = self.model  # in DDP, unless a rank has a part of the model
        if ranks_per_model == 1:
            self.runner = world.data_parallel(self.model)

    def make_model(self) -> nn.Module:
        """What this rank computes: the complete model."""
        return complete_model(self.config, self.sizes)

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
        loss = torch.zeros((), device=self.world.device)
        for number, (x, y) in enumerate(self.micro_batches(tokens, targets), start=1):
            last = number == self.config.accumulate
            with self.world.accumulate_gradients(self.runner, last), self.loss_parallel():
                with self.precision.autocast():
                    part = full_tensor(self.runner(x, y)) / self.config.accumulate
                self.precision.backward(part)
            loss += part.detach()
        if self.config.tensor > 1 and not is_sharded(self.config):
            self.average_gradients()
        return loss / (self.data * self.config.tensor)

    def average_gradients(self) -> None:
        """Over the copies of the model. DDP cannot: it needs a complete model on every rank."""
        if self.data > 1:
            for weight in self.weights.values():
                gradient = local(weight.grad)
                dist.all_reduce(gradient, group=self.mesh["data"].get_group())
                gradient /= self.data

    @torch.no_grad()
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """This rank's share of the mean loss, for validation; (B, T) each."""
        losses = []
        with self.loss_parallel(), self.precision.autocast():
            for x, y in self.micro_batches(tokens, targets):
                losses.append(full_tensor(self.model(x, y)))
        return torch.stack(losses).mean() / (self.data * self.config.tensor)

    def loss_parallel(self):
        """With tensor parallelism the logits stay distributed over the vocabulary."""
        return loss_parallel() if self.config.tensor > 1 else contextlib.nullcontext()

    def gradient_norm(self) -> Tensor:
        """The norm of all gradients, equal on all ranks."""
        gradients = [weight.grad for weight in self.weights.values()]
        return full_tensor(nn.utils.get_total_norm(gradients))

    def step(self, optimizer: torch.optim.Optimizer, clip: float, step: int) -> Tensor:
        """Clip the gradient, update the weights, clear the gradient; returns the norm before.

        Raises `UserError` for a gradient that is not finite; in fp16 GradScaler skips the step.
        """
        scaler = self.precision.scaler
        scaler.unscale_(optimizer)
        norm = self.gradient_norm()
        if not scaler.is_enabled() and not norm.isfinite():
            raise UserError(
                f"step {step}: loss or gradient is not finite; start again with a lower --lr"
            )
        nn.utils.clip_grads_with_norm_(self.weights.values(), clip, norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return norm


class NewestEntry(dict):
    """A dict that drops its entry when it gets the next one."""

    def __setitem__(self, key, value):
        self.clear()
        super().__setitem__(key, value)


class Pipeline(Layout):
    """The blocks in stages, each on a rank of its own; micro-batches flow through them.

    The first stage embeds and the last one has the output: each has a copy of the tied matrix.
    """

    def __init__(self, config, sizes: Sizes, world: World, precision: Precision, init=None):
        self.number = world.rank // config.tensor % config.pipe  # of this rank's stage
        super().__init__(config, sizes, world, precision, init)
        # The shapes that a stage receives and sends. Between blocks a tensor-parallel rank has a
        # part of each sequence.
        rows, length = config.batch_size // self.data // config.accumulate, sizes.seq_length
        part = (rows, length // config.tensor, sizes.d_model)
        tokens = torch.empty(rows, length, dtype=torch.long, device="meta")
        hidden = torch.empty(part, device="meta", requires_grad=True)
        logits = torch.empty(rows, length, sizes.vocab_size, device="meta", requires_grad=True)
        if precision.name != "fp32":  # products are in 16 bits; the residual stream is not
            logits = logits.to(precision.dtype)
        self.stage = pipelining.PipelineStage(
            self.model,
            self.number,
            config.pipe,
            world.device,
            input_args=tokens if self.model.is_first else hidden,
            output_args=logits if self.model.is_last else hidden,
            group=self.mesh["pipe"].get_group(),
        )
        # 1F1B needs a micro-batch for each stage. With only one micro-batch, one stage works at a
        # time, and 1F1B refuses that.
        kind = pipelining.Schedule1F1B if config.accumulate > 1 else pipelining.ScheduleGPipe
        self.schedule = kind(self.stage, config.accumulate, loss_fn=self.scaled_loss)
        # A process group for the first and the last stage of each copy of the model, for each part
        # of their tied matrix. All ranks must take part in making each group.
        self.ends = None
        for row in self.mesh.mesh:  # (pipe, tensor)
            for first, last in zip(row[0].tolist(), row[-1].tolist()):
                ends = dist.new_group([first, last])
                if world.rank in (first, last):
                    self.ends = ends
        if precision.scaler.is_enabled():
            # Only the last stage scales a loss. This sets up the scale in all stages, where their
            # gradients are.
            weight = next(iter(self.weights.values()))
            precision.scaler.scale(torch.zeros((), device=weight.device))

    def make_model(self) -> GPT:
        """This rank's stage."""
        stages = torch.arange(self.sizes.num_layers, device="cpu").tensor_split(self.config.pipe)
        return GPT(self.sizes, self.config.recompute, blocks=stages[self.number].tolist())

    def scaled_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a micro-batch, scaled up in fp16; (B, T, V) and (B, T)."""
        return self.precision.scaler.scale(full_tensor(mean_loss(logits, targets)))

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As in `Layout`; the last stage has the loss."""
        loss = self.run(self.schedule.step, tokens, targets)
        if self.ends is not None:  # two copies of the tied matrix: their gradients are added
            tied = self.weights["wte.weight"]
            if isinstance(tied, DTensor):  # the embedding's gradient may be a complete matrix
                tied.grad = tied.grad.redistribute(placements=tied.placements)
            dist.all_reduce(local(tied.grad), group=self.ends)
        if not is_sharded(self.config):
            self.average_gradients()
        if self.precision.scaler.is_enabled():
            self.share_overflow()
        return loss

    def share_overflow(self) -> None:
        """If a gradient of one stage overflowed, all stages must skip the step.

        Every GradScaler sees only its own stage. 0 × the norm of all gradients is 0, or NaN if one
        of them is not finite: added to a gradient, it is a sign that every scaler finds.
        """
        gradient = local(next(iter(self.weights.values())).grad)
        gradient += 0 * self.gradient_norm()

    @torch.no_grad()
    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As in `Layout`; the last stage has the loss."""
        # `eval` keeps the outputs of all micro-batches for a backward pass that never comes. In the
        # last stage these are logits, more than training needs. Only the newest one is read again.
        self.stage.fwd_cache = NewestEntry()
        loss = self.run(self.schedule.eval, tokens, targets)
        self.stage.fwd_cache = {}
        return loss

    def run(self, step_or_eval, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss by a method of the schedule; 0 on all ranks but the last stage's."""
        inputs = [tokens] if self.model.is_first else []
        ends = {}
        if self.model.is_last:
            ends = {"target": targets, "losses": []}
        with self.precision.autocast(), self.loss_parallel():
            step_or_eval(*inputs, **ends, return_outputs=False)
        if not self.model.is_last:
            return torch.zeros((), device=self.world.device)
        loss = torch.stack(ends["losses"]).mean().detach() / self.precision.scaler.get_scale()
        return loss / (self.data * self.config.tensor)

    def gradient_norm(self) -> Tensor:
        """The norm over all stages. The tied matrix counts once, though two ranks have it."""
        gradients = []
        for name, weight in self.weights.items():
            if name != "wte.weight" or self.model.is_first:
                gradients.append(weight.grad)
        square = full_tensor(nn.utils.get_total_norm(gradients)) ** 2
        dist.all_reduce(square, group=self.mesh["pipe"].get_group())
        return square.sqrt()


def complete_model(config, sizes: Sizes) -> nn.Module:
    """The model that --model names, not cut into stages."""
    kind = HuggingFaceGPT if config.model == "hf" else GPT
    return kind(sizes, config.recompute)


def make_layout(config, sizes: Sizes, world: World, precision: Precision, init=None) -> Layout:
    """The layout that the flags ask for, on this rank. For `init` see `Layout`."""
    kind = Pipeline if config.pipe > 1 else Layout
    return kind(config, sizes, world, precision, init)


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
    # A stage of a pipeline has some of them only.
    has = {name for name, _ in model.named_children()}
    parallelize_module(model, mesh, {name: model_plan[name] for name in model_plan if name in has})
    if model.is_last:
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
            part, mesh=mesh, reshard_after_forward=reshard, mp_policy=mixed, offload_policy=offload
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
        copies = layout.mesh["data"].get_group()  # the ranks that have the same weights
        return ZeroRedundancyOptimizer(
            groups, optimizer_class=torch.optim.AdamW, process_group=copies, **settings
        )
    return torch.optim.AdamW(groups, **settings)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def set_weight(weight: Tensor, value: Tensor) -> None:
    """Write this rank's part of `value` into `weight`; every rank has the full value."""
    local(weight).copy_(local(distribute_like(value, weight)))
