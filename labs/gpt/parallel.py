"""The model on a grid of processes, data × pipe × tensor, and one training step on it.

    check_grid(config, sizes, world.size)     # a grid that cannot be is refused, before anything is allocated
    layout = Layout(config, sizes, world, precision)
    share = layout.forward_backward(tokens, targets); norm = layout.clip(1.0)

Whatever the grid, losses and weights are those of one process that sees the whole batch. B sequences, T tokens, D hidden size.
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
from torch.nn.parallel import DistributedDataParallel
from torch.optim.adamw import adamw

from engine.distributed import World, distribute_like, full_tensor, process_grid
from engine.errors import UserError
from engine.precision import Precision
from labs.gpt.model import GPT, HuggingFaceGPT, initial_weight, mean_loss
from labs.gpt.sizes import Sizes

# The norm of the gradients on a grid of two sides takes two messages of one number each; PyTorch would warn of it.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb": 2, "zbv": 2}


def check_grid(config, sizes: Sizes, processes: int) -> int:
    """The number of processes along `data`. Raises `UserError` for a grid or a combination that cannot be."""
    tensor, pipe = config.tensor, config.pipe
    if processes % (tensor * pipe):
        raise UserError(
            f"{processes} processes are no grid with --tensor {tensor} × --pipe {pipe}; start a multiple of "
            f"{tensor * pipe}"
        )
    data = processes // (tensor * pipe)
    sharded = config.data_parallel in ("zero2", "zero3")
    stages = pipe * STAGES_PER_RANK[config.schedule]
    micro_batch, rest = divmod(config.batch_size, data * config.accumulate)
    checks = [
        (
            sizes.hidden % sizes.heads,
            f"--hidden {sizes.hidden} must be divisible by --heads {sizes.heads}",
        ),
        (sizes.heads % tensor, f"--tensor {tensor} does not divide the {sizes.heads} heads"),
        # FSDP2 cuts what a tensor-parallel rank has; PyTorch, asked for such a piece of a whole matrix, cuts it elsewhere.
        (
            sharded and tensor > 1 and data > 2 and sizes.vocabulary % tensor,
            f"--tensor {tensor} does not divide the "
            f"vocabulary of {sizes.vocabulary}, as {config.data_parallel} over {data} processes needs; take another, or ddp",
        ),
        (
            sizes.sequence % tensor,
            f"--tensor {tensor} does not divide a sequence of {sizes.sequence} tokens",
        ),
        (
            pipe > 1 and stages > sizes.layers,
            f"{sizes.layers} layers are no {stages} stages; use a smaller --pipe",
        ),
        (
            rest or not micro_batch,
            f"--batch_size {config.batch_size} does not divide into {data} × {config.accumulate} "
            "parts (data-parallel processes × --accumulate)",
        ),
        (
            config.schedule == "1f1b" and config.accumulate < pipe,
            f"--schedule 1f1b wants --accumulate of at least --pipe {pipe}, not {config.accumulate}",
        ),
        (
            stages > pipe > 1 and config.accumulate % pipe,
            f"--schedule {config.schedule} wants --accumulate to be a multiple of --pipe {pipe}, not {config.accumulate}",
        ),
        (
            tensor > 1 and pipe > 1,
            "--tensor and --pipe together are not built; use one of them, with data parallelism",
        ),
        (
            pipe > 1 and config.data_parallel != "ddp",
            f"--pipe goes with --data_parallel ddp, not {config.data_parallel}",
        ),
        (
            tensor > 1 and config.data_parallel == "zero1",
            "--tensor goes with --data_parallel ddp, zero2 or zero3",
        ),
        (
            config.offload == "parameters" and not sharded,
            "--offload parameters needs --data_parallel zero2 or zero3",
        ),
        (
            config.offload == "optimizer"
            and (sharded or tensor * pipe > 1 or config.data_parallel == "zero1"),
            "--offload optimizer needs --data_parallel ddp without --tensor and --pipe; for zero2 and zero3 use "
            "--offload parameters",
        ),
        (
            config.model == "hf"
            and (tensor * pipe > 1 or config.chunked_loss or config.recompute == "selective"),
            "--model hf knows neither --tensor nor --pipe nor --chunked_loss nor --recompute selective; use --model own",
        ),
        (
            config.chunked_loss and tensor * pipe > 1,
            "--chunked_loss goes with neither --tensor nor --pipe",
        ),
        (
            config.chunked_loss and not hasattr(nn, "LinearCrossEntropyOptions"),
            f"--chunked_loss needs a newer PyTorch than {torch.__version__}: that of requirements.txt",
        ),
        (
            config.chunked_loss and config.compile,
            "--chunked_loss and --compile do not go together in PyTorch 2.13",
        ),
        (
            config.precision == "fp16" and pipe > 1,
            "--precision fp16 with --pipe is not built; use bf16 or fp32",
        ),
        (
            pipe > 1
            and (config.recompute != "none" or config.compile)
            and config.schedule in ("zb", "zbv"),
            f"--schedule {config.schedule} cuts the backward pass in two and can neither recompute nor compile; use 1f1b",
        ),
    ]
    for wrong, message in checks:
        if wrong:
            raise UserError(message)
    return data


class Newest(dict):
    """Keeps one entry: in a validation a stage's output is needed until it is sent, and the last stage's are logits."""

    def __setitem__(self, key, value):
        self.clear()
        super().__setitem__(key, value)


class Layout:
    """This rank's part of the model, and how a step is computed with it.

    parts       the modules on this rank: the model, or the stages of a pipeline
    weights     name → parameter, a `DTensor` where it is cut; names as in the whole model
    """

    def __init__(self, config, sizes: Sizes, world: World, precision: Precision):
        self.config, self.sizes, self.world, self.precision = config, sizes, world, precision
        self.data = check_grid(config, sizes, world.size)
        self.grid = {"data": self.data, "pipe": config.pipe, "tensor": config.tensor}
        self.row = world.rank // (
            config.pipe * config.tensor
        )  # which part of a batch is this rank's
        sharded = config.data_parallel in ("zero2", "zero3")
        self.mesh = process_grid(world, **self.grid) if world.size > 1 or sharded else None
        self.schedule = self.ends = None
        with torch.device(
            "meta"
        ):  # nothing is allocated before it is known which part of a weight is needed here
            self.parts = self._parts()
        if config.tensor > 1:
            cut_for_tensor_parallelism(self.parts[0], self.mesh["tensor"])
        if sharded:
            shard(self.parts[0], self.mesh["data"], config, precision)
        for part in self.parts:
            part.to_empty(device="cpu" if config.offload == "parameters" else world.device)
        self.weights = self._weights()
        for name, weight in self.weights.items():
            set_whole(weight, initial_weight(name, weight.shape, sizes.layers, config.seed))
        if config.compile:
            for part in self.parts:
                for block in part.h.values():
                    block.compile()
        if config.pipe > 1:
            self._make_schedule()
        # DistributedDataParallel takes whole models; gradients of stages and of cut weights are averaged by hand.
        in_parts = config.tensor * config.pipe > 1
        self.by_hand = self.data > 1 and not sharded and in_parts
        self.runner = self.parts[0] if in_parts else world.data_parallel(self.parts[0])

    @property
    def stage_numbers(self) -> list[int]:
        """This rank's: in a loop over the ranks (0 1 0 1), or for ZB-V there and back (0 1 1 0)."""
        pipe, here = self.config.pipe, self.world.rank // self.config.tensor % self.config.pipe
        if self.config.schedule == "zbv":
            return [here, 2 * pipe - 1 - here]
        return [here + pipe * turn for turn in range(STAGES_PER_RANK[self.config.schedule])]

    @property
    def output_is_here(self) -> bool:
        """Whether the tied matrix is both embedding and output on this rank, in two stages (ZB-V)."""
        return len(self.parts) > 1 and self.parts[0].is_first and self.parts[-1].is_last

    def _parts(self) -> list[nn.Module]:
        config, sizes = self.config, self.sizes
        if config.model == "hf":
            return [HuggingFaceGPT(sizes, config.recompute)]
        if config.pipe == 1:
            return [GPT(sizes, config.recompute, config.chunked_loss)]
        stages = config.pipe * STAGES_PER_RANK[config.schedule]
        blocks = torch.arange(sizes.layers, device="cpu").tensor_split(stages)
        return [
            GPT(sizes, config.recompute, blocks=blocks[number].tolist())
            for number in self.stage_numbers
        ]

    def _weights(self) -> dict[str, nn.Parameter]:
        first, last = self.parts[0], self.parts[-1]
        if self.output_is_here:
            # Two parameters on the same memory: of one that two stages share, ZB-V's split backward pass loses gradients.
            last.wte.weight = nn.Parameter(first.wte.weight.detach())
        if self.config.model == "hf":
            first.model.tie_weights()  # which `to_empty` has undone
        # Reversed: of a name that both have (wte.weight, with ZB-V) the first stage's weight stays.
        return {
            name: weight
            for part in reversed(self.parts)
            for name, weight in part.named_parameters()
        }

    def _make_schedule(self) -> None:
        """The stages, told what they receive and send, and the order of their work."""
        config, sizes, device = self.config, self.sizes, self.world.device
        rows = self.config.batch_size // self.data // config.accumulate
        stages = config.pipe * STAGES_PER_RANK[config.schedule]
        tokens = torch.empty(rows, sizes.sequence, dtype=torch.long, device="meta")
        hidden = torch.empty(rows, sizes.sequence, sizes.hidden, device="meta", requires_grad=True)
        logits = torch.empty(
            rows, sizes.sequence, sizes.vocabulary, device="meta", requires_grad=True
        )
        if (
            self.precision.name != "fp32"
        ):  # products, and so the logits, are narrow; the residual stream is not
            logits = logits.to(self.precision.dtype)
        group = self.mesh["pipe"].get_group()
        self.stages = [
            pipelining.PipelineStage(
                part,
                number,
                stages,
                device,
                input_args=hidden if number else tokens,
                output_args=hidden if number < stages - 1 else logits,
                group=group,
            )
            for number, part in zip(self.stage_numbers, self.parts)
        ]
        if device.type == "cpu":
            for stage in (
                self.stages
            ):  # a greeting that NCCL wants; a ZB-V rank would greet itself, which gloo refuses
                stage._get_init_p2p_neighbors_ops = list
        schedule = SCHEDULES[config.schedule]
        single = issubclass(schedule, pipelining.schedules.PipelineScheduleSingle)
        stages = self.stages[0] if single else self.stages
        self.schedule = schedule(stages, config.accumulate, loss_fn=mean_loss)
        if (
            config.schedule != "zbv"
        ):  # the first and the last rank of a row hold a copy each of the tied matrix
            ranks = self.mesh.mesh.squeeze(-1)  # (data, pipe)
            for row in ranks.tolist():
                pair = dist.new_group([row[0], row[-1]])  # made by all, used by two
                if self.world.rank in (row[0], row[-1]):
                    self.ends = pair

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Gradients of the mean loss over the batch; (B, T) is this row's part of it.

        → this rank's share of that loss: summed over all ranks, it is the loss.
        """
        if self.schedule:
            loss = self._pipeline(tokens, targets, self.schedule.step)
            self._add_gradients_of_tied()
        else:
            micro_batches = list(
                zip(tokens.chunk(self.config.accumulate), targets.chunk(self.config.accumulate))
            )
            loss = torch.zeros((), device=self.world.device)
            for number, (x, y) in enumerate(micro_batches):
                # DDP averages over the ranks at the end of a backward pass; only the last one needs it.
                waits = number < len(micro_batches) - 1 and isinstance(
                    self.runner, DistributedDataParallel
                )
                with (
                    self.runner.no_sync() if waits else contextlib.nullcontext(),
                    self._loss_parallel(),
                ):
                    with self.precision.autocast():
                        part = full_tensor(self.runner(x, y)) / len(micro_batches)
                    self.precision.backward(part)
                loss += part.detach()
        if self.by_hand:
            for weight in self.weights.values():
                gradient = local(weight.grad)
                dist.all_reduce(gradient, group=self.mesh["data"].get_group())
                gradient /= self.data
        return loss / (self.data * self.config.tensor)

    def _add_gradients_of_tied(self) -> None:
        """The tied matrix works in the first stage and in the last; its gradient is the sum of both."""
        gradient = self.weights["wte.weight"].grad if "wte.weight" in self.weights else None
        if self.output_is_here:
            output = self.parts[-1].wte.weight
            gradient += output.grad
            output.grad = None
        elif self.ends is not None:
            dist.all_reduce(gradient, group=self.ends)

    def _pipeline(self, tokens: Tensor, targets: Tensor, run) -> Tensor:
        """The mean loss by `run`, which is the schedule's `step` or `eval`; 0 on all ranks but that of the last stage."""
        losses, has_first, has_last = (
            [],
            any(p.is_first for p in self.parts),
            any(p.is_last for p in self.parts),
        )
        with self.precision.autocast():
            run(
                *([tokens] if has_first else []),
                target=targets if has_last else None,
                losses=losses if has_last else None,
                return_outputs=False,
            )
        return (
            torch.stack(losses).mean().detach()
            if losses
            else torch.zeros((), device=self.world.device)
        )

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """This rank's share of the mean loss, for validation; leaves no gradients."""
        if (
            self.config.schedule == "zbv" and self.schedule
        ):  # its eval raises in PyTorch 2.13: a step, without its use
            loss = self._pipeline(tokens, targets, self.schedule.step)
            for part in self.parts:
                part.zero_grad()
        elif self.schedule:
            for (
                stage
            ) in self.stages:  # eval leaves out the backward pass, but would keep all for it
                stage.fwd_cache = Newest()
            with torch.no_grad():
                loss = self._pipeline(tokens, targets, self.schedule.eval)
            for stage in self.stages:
                stage.fwd_cache = {}
        else:
            micro_batches = zip(
                tokens.chunk(self.config.accumulate), targets.chunk(self.config.accumulate)
            )
            with torch.no_grad(), self._loss_parallel(), self.precision.autocast():
                loss = (
                    sum(full_tensor(self.parts[0](x, y)) for x, y in micro_batches)
                    / self.config.accumulate
                )
        return loss / (self.data * self.config.tensor)

    def _loss_parallel(self):
        """With tensor parallelism each rank has the logits of a part of the vocabulary; they are never gathered."""
        return loss_parallel() if self.config.tensor > 1 else contextlib.nullcontext()

    def clip(self, limit: float) -> Tensor:
        """Scale the gradients down to norm `limit` (0: leave them); → their norm before, the same on all ranks."""
        weights = self.weights
        if self.config.pipe == 1:
            norm = full_tensor(
                nn.utils.get_total_norm([weight.grad for weight in weights.values()])
            )
        else:  # the stages' norms together; the tied matrix counts once, though two ranks hold it
            is_copy = self.ends is not None and not self.parts[0].is_first
            gradients = [
                weight.grad
                for name, weight in weights.items()
                if not (is_copy and name == "wte.weight")
            ]
            square = nn.utils.get_total_norm(gradients) ** 2
            dist.all_reduce(square, group=self.mesh["pipe"].get_group())
            norm = square.sqrt()
        if limit:
            nn.utils.clip_grads_with_norm_(weights.values(), limit, norm)
        return norm


def cut_for_tensor_parallelism(model: GPT, mesh) -> None:
    """Megatron's cut (Shoeybi et al. 2019; Korthikanti et al. 2022), two all-gathers and two reduce-scatters a block.

    Columns of the first matrix and rows of the second, so that nothing travels in between; norms work on a part of the
    sequence, embedding and loss on a part of the vocabulary.
    """
    into_rows = dict(input_layouts=Replicate(), use_local_output=True)
    model_plan = {
        "wte": RowwiseParallel(output_layouts=Shard(1), **into_rows),
        "wpe": RowwiseParallel(output_layouts=Shard(0), **into_rows),
        "ln_f": SequenceParallel(),
    }
    parallelize_module(model, mesh, model_plan)
    # The output is a product with the weight of `wte`, which is a DTensor; so its other factor must be one.
    parallelize_module(
        model.ln_f,
        mesh,
        PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
        ),
    )
    block_plan = {
        "ln_1": SequenceParallel(),
        "attn": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "attn.c_attn": ColwiseParallel(),
        "attn.c_proj": RowwiseParallel(output_layouts=Shard(1)),
        "ln_2": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.c_fc": ColwiseParallel(),
        "mlp.c_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.h.values():
        parallelize_module(block, mesh, block_plan)


def shard(model: nn.Module, mesh, config, precision: Precision) -> None:
    """FSDP2: each rank keeps its part of every weight, gradient and optimiser state, and gathers a block when it is due.

    zero2 keeps the gathered weights until the backward pass is done, zero3 drops them after each block.
    """
    narrow = (
        precision.dtype if precision.name != "fp32" else None
    )  # the type in which weights are gathered
    offloads = config.offload == "parameters"
    settings = dict(
        mesh=mesh,
        reshard_after_forward=config.data_parallel == "zero3",
        mp_policy=MixedPrecisionPolicy(
            param_dtype=narrow, reduce_dtype=torch.float32 if narrow else None
        ),
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if offloads
        else OffloadPolicy(),
    )
    for block in model.h.values():
        fully_shard(block, **settings)
    fully_shard(model, **settings)


def make_optimizer(layout: Layout) -> torch.optim.Optimizer:
    """AdamW as GPT-3 has it; matrices decay, biases and norms do not."""
    config, weights = layout.config, list(layout.weights.values())
    groups = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    settings = dict(lr=config.lr, betas=(0.9, 0.95), fused=True)
    if config.offload == "optimizer":
        return AdamWOnCPU(groups, **settings)
    if config.data_parallel == "zero1" and layout.data > 1:
        return ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, **settings)
    return torch.optim.AdamW(groups, **settings)


class AdamWOnCPU(torch.optim.AdamW):
    """The optimiser's state stays in host memory and the update is computed there (ZeRO-Offload, Ren et al. 2021).

    Weights and gradients travel to the CPU and new weights back: 12 bytes a weight and step, for 8 bytes a weight on the GPU.
    """

    @torch.no_grad()
    def step(self, closure=None):
        if getattr(self, "found_inf", None) is not None and self.found_inf.item():
            return  # fp16 overflowed: the step is skipped
        for group in self.param_groups:
            for weight in group["params"]:
                state, here = self.state[weight], weight.detach().cpu()
                if not state:
                    state.update(
                        step=torch.zeros(()),
                        exp_avg=torch.zeros_like(here),
                        exp_avg_sq=torch.zeros_like(here),
                    )
                adamw(
                    [here],
                    [weight.grad.cpu()],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [state["step"]],
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                weight.copy_(here)  # on the CPU it is the same memory


def local(tensor: Tensor) -> Tensor:
    """This rank's part of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def set_whole(weight: Tensor, value: Tensor) -> None:
    """Write this rank's part of `value` into `weight`, without a message: every rank has the whole value."""
    local(weight).copy_(local(distribute_like(value, weight)))
