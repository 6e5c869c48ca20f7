"""A decoder-only Transformer, its cutting into stages, and a step of the pipeline that they make.

B sequences in a micro-batch, S tokens, D model width, H heads, W = D / H, V vocabulary.
"""

import math
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from engine import distributed
from engine.errors import UserError
from labs.pipeline.schedule import Recorder
from model import sinusoids

NOTHING = -1  # where a sequence has no token; as a target it counts neither in the loss nor in the number of targets
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


class Embedding(nn.Module):
    """Token ids → vectors with sinusoidal positions (Vaswani et al. 2017), (B, S) → (B, S, D)."""

    def __init__(self, vocab: int, d_model: int, longest: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab, d_model)
        self.register_buffer("positions", sinusoids(longest, d_model), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) → (B, S, D)."""
        return self.tokens(tokens) + self.positions[: tokens.shape[1]]


class Layer(nn.Module):
    """Self-attention and a feed-forward net, a layer norm before each (or behind, `post_norm`), (B, S, D) → (B, S, D).

    The mask is made in here: a mask handed down through the stages can be forgotten on the way, as in the handout:
    its `Transformer` takes one and gives none to its `TransformerBlock`s, which are these layers.
    """

    def __init__(self, config):
        super().__init__()
        self.nhead, self.causal, self.post_norm, width = (
            config.nhead,
            config.causal,
            config.post_norm,
            config.d_model,
        )
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feedforward = nn.Sequential(
            nn.Linear(width, config.dim_feedforward),
            nn.ReLU(),
            nn.Linear(config.dim_feedforward, width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) → (B, S, D)."""
        if self.post_norm:
            x = self.norm1(x + self.dropout(self.attention(x)))
            return self.norm2(x + self.dropout(self.feedforward(x)))
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.feedforward(self.norm2(x)))

    def attention(self, x: Tensor) -> Tensor:
        """(B, S, D) → (B, S, D); H heads of width W = D / H."""
        heads = self.query_key_value(x).unflatten(2, (3, self.nhead, -1))  # (B, S, 3, H, W)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()  # (B, H, S, W) each
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)  # (B, H, S, W)
        return self.out(seen.transpose(1, 2).flatten(2))


class LanguageModel(nn.Module):
    """Token ids → logits of each next token, (B, S) → (B, S, V); `config` has the sizes.

    With dropout the processes draw other random numbers than one process alone; without it all of them agree.
    """

    def __init__(self, vocab: int, longest: int, config):
        super().__init__()
        self.embedding = Embedding(vocab, config.d_model, longest)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        last_norm = (
            nn.Identity() if config.post_norm else nn.LayerNorm(config.d_model)
        )  # post-norm: the layer's own
        self.head = nn.Sequential(
            last_norm, nn.Linear(config.d_model, vocab)
        )  # the handout's `out_linear`
        nn.init.normal_(self.head[1].weight, std=0.02)  # so that the loss begins at ln V

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) → (B, S, V)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Stage(nn.Module):
    """Some consecutive layers of a `LanguageModel`, the first stage with its embedding, the last one with its head.

    Every parameter keeps the name that it has in the whole model.
    """

    def __init__(self, model: LanguageModel, layers: list[int]):
        super().__init__()
        self.embedding = model.embedding if layers[0] == 0 else nn.Identity()
        self.layers = nn.ModuleDict({str(number): model.layers[number] for number in layers})
        self.head = model.head if layers[-1] == len(model.layers) - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """What the stage before gives, or token ids → what the next one takes, or logits."""
        x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def summed_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy summed over the real targets; logits (B, S, V), target (B, S)."""
    return F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=NOTHING, reduction="sum"
    )


def layers_of_stages(num_layers: int, stages: int) -> list[list[int]]:
    """The layers' numbers, shared out in order; where they do not divide, the first stages have one more."""
    return [part.tolist() for part in torch.arange(num_layers).tensor_split(stages)]


def stages_of_rank(rank: int, ranks: int, config) -> list[int]:
    """In a loop over the ranks (0 1 2 0 1 2), or for ZB-V there and back (0 1 2 2 1 0)."""
    if config.schedule == "zbv":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * turn for turn in range(config.stages_per_rank)]


def grid(world: distributed.World, **sizes: int) -> DeviceMesh:
    """The ranks as a grid: grid(world, data=2, pipe=4) has two rows of four, and rank 5 is in row 1, column 1.

    `grid(…)["pipe"].get_group()` is the process group of this rank's row. Raises `UserError` if the sizes do not fit.
    """
    if math.prod(sizes.values()) != world.size or min(sizes.values()) < 1:
        sides = " × ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(
            f"{world.size} processes do not form a grid of {sides}; start the product of the sizes"
        )
    if not dist.is_initialized():  # alone: a group of one, so that the same code runs
        backend = distributed.backend_for(world.device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


class Pipeline:
    """This rank's stages of the model, and the schedule that runs them."""

    def __init__(self, model: LanguageModel, config, world: distributed.World):
        self.world = world
        self.group = grid(world, pipe=world.size).get_group(
            "pipe"
        )  # stages want one, also of one process alone
        self.targets = 0  # of the batch that is being worked on
        example = torch.zeros(
            config.batch_size // config.micro_batches,
            len(model.embedding.positions),
            dtype=torch.long,
        )
        parts = layers_of_stages(len(model.layers), world.size * config.stages_per_rank)
        mine = stages_of_rank(world.rank, world.size, config)
        if config.build == "traced":
            cuts = {f"layers.{part[0]}": pipelining.SplitPoint.BEGINNING for part in parts[1:]}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch's own, about itself
                pipe = pipelining.pipeline(model, mb_args=(example,), split_spec=cuts)
            modules = [pipe.get_stage_module(number) for number in mine]
        else:
            modules = [Stage(model, parts[number]) for number in mine]
        # Not pipe.build_stage: with ZB-V its two neighbouring stages on one rank would send themselves a message and wait.
        self.stages = [
            self._stage(module, number, len(parts), example.shape, model)
            for number, module in zip(mine, modules)
        ]
        self.parameters = {
            name: weight for module in modules for name, weight in module.named_parameters()
        }
        # Which rank has the first stage and which the last is asked of the stages: with ZB-V rank 0 has both.
        self.has_first = any(stage.is_first for stage in self.stages)
        self.has_last = any(stage.is_last for stage in self.stages)
        self.recorder = Recorder(world.rank, world.device)
        for stage in self.stages:
            self.recorder.watch(stage)
            if world.device.type == "cpu":
                # A greeting of neighbours that NCCL wants. In torch 2.11 a ZB-V rank would greet itself, which gloo refuses.
                stage._get_init_p2p_neighbors_ops = list  # which returns [], no messages
        schedule = SCHEDULES[config.schedule]
        self.schedule = schedule(
            self.stages[0]
            if issubclass(schedule, pipelining.schedules.PipelineScheduleSingle)
            else self.stages,
            config.micro_batches,
            loss_fn=self.recorder.watch_loss(self.share_of_mean_loss, len(parts) - 1),
            scale_grads=False,  # True would divide by the number of micro-batches; the loss is a share already
        )

    def _stage(self, module: nn.Module, number: int, stages: int, shape, model: LanguageModel):
        """Told what it receives and sends, a stage need not find out in the first step, by a pass of its own."""
        tokens, width = (
            torch.empty(shape, dtype=torch.long, device="meta"),
            model.head[1].in_features,
        )
        hidden = torch.empty(*shape, width, device="meta", requires_grad=True)  # (B, S, D)
        logits = torch.empty(
            *shape, model.head[1].out_features, device="meta", requires_grad=True
        )  # (B, S, V)
        return pipelining.PipelineStage(
            module.to(self.world.device),
            number,
            stages,
            self.world.device,
            input_args=hidden if number else tokens,
            output_args=hidden if number < stages - 1 else logits,
            group=self.group,
        )

    def share_of_mean_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """What a micro-batch adds to the mean loss of the whole batch."""
        return summed_loss(logits, target) / self.targets

    def forward_backward(self, tokens: Tensor, target: Tensor) -> float:
        """Gradients of the mean loss of the whole batch; → the loss summed over its targets, the same on all ranks."""
        # An attribute, because the schedules of torch 2.11 hand no further argument on to the loss.
        self.targets = int((target != NOTHING).sum())
        losses = []
        self.schedule.step(
            *([tokens.to(self.world.device)] if self.has_first else []),
            target=target.to(self.world.device) if self.has_last else None,
            losses=losses if self.has_last else None,
            return_outputs=False,
        )
        # Only the last stage knows the loss; all others add 0.
        loss = (
            torch.stack(losses).sum().detach().double()
            if losses
            else torch.zeros((), dtype=torch.float64)
        )
        return self.world.sum(loss.to(self.world.device)).item() * self.targets
