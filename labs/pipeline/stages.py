"""A decoder-only Transformer, its stages, and one training step of the pipeline they form.

M micro-batches of B sequences, S tokens, D model width, H heads, W = D / H, V vocabulary.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from engine.distributed import World, process_grid
from labs.pipeline.schedule import Recorder
from model import sinusoids

PADDING = -1  # where a sequence has no token; a target of PADDING does not count in the loss
# For a new one also change the help of --schedule and, where they apply, the conditions in
# `Config.check` (both in __main__.py) and the formulas of `bubble_in_theory` (schedule.py).
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


class Embedding(nn.Module):
    """Token ids → vectors with sinusoidal positions (Vaswani et al. 2017), (B, S) → (B, S, D)."""

    def __init__(self, vocabulary: int, d_model: int, longest: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, d_model)
        self.register_buffer("positions", sinusoids(longest, d_model), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) → (B, S, D)."""
        return self.tokens(tokens) + self.positions[: tokens.shape[1]]


class Layer(nn.Module):
    """Self-attention and a feed-forward network, pre-norm or `post_norm`, (B, S, D) → (B, S, D).

    Every layer makes its own causal mask. The handout's `Transformer.forward` has a parameter
    `mask`, but no caller passes one, and it would not reach the `TransformerBlock`s (these layers).
    """

    def __init__(self, config):
        super().__init__()
        width = config.d_model
        self.nhead = config.nhead
        self.causal = config.causal
        self.post_norm = config.post_norm
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
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
        """(B, S, D) → (B, S, D)."""
        heads = self.query_key_value(x).unflatten(2, (3, self.nhead, -1))  # (B, S, 3, H, W)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()  # (B, H, S, W) each
        values = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)  # (B, H, S, W)
        return self.out(values.transpose(1, 2).flatten(2))


class LanguageModel(nn.Module):
    """Token ids → logits of each next token, (B, S) → (B, S, V)."""

    def __init__(self, vocabulary: int, longest: int, config):
        super().__init__()
        self.embedding = Embedding(vocabulary, config.d_model, longest)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        # Post-norm layers end with a norm of their own.
        last_norm = nn.Identity() if config.post_norm else nn.LayerNorm(config.d_model)
        self.head = nn.Sequential(last_norm, nn.Linear(config.d_model, vocabulary))
        nn.init.normal_(self.head[1].weight, std=0.02)  # the loss begins near ln V

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) → (B, S, V)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Stage(nn.Module):
    """Consecutive layers of a `LanguageModel`; the first stage embeds, the last has the head.

    Parameters keep the names they have in the whole model.
    """

    def __init__(self, model: LanguageModel, layers: list[int]):
        super().__init__()
        self.embedding = model.embedding if layers[0] == 0 else nn.Identity()
        self.layers = nn.ModuleDict({str(number): model.layers[number] for number in layers})
        self.head = model.head if layers[-1] == len(model.layers) - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Token ids, or the previous stage's output → the next stage's input, or logits."""
        x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def summed_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy summed over the real targets; logits (B, S, V), target (B, S)."""
    return F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=PADDING, reduction="sum"
    )


def stages_of_rank(rank: int, ranks: int, config) -> list[int]:
    """The numbers of this rank's stages.

    Stages 0 to 5 lie on the ranks 0 1 2 0 1 2, in a loop; with ZB-V on 0 1 2 2 1 0, there and back.
    So rank 0 of 3 has stages 0 and 3, or 0 and 5.
    """
    if config.schedule == "zbv":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * turn for turn in range(config.stages_per_rank)]


def split_model(model: LanguageModel, parts: list[list[int]], example: Tensor, build: str) -> list:
    """The modules of all stages: traced by torch's `pipeline()`, or made by hand."""
    if build == "by_hand":
        return [Stage(model, layers) for layers in parts]
    cuts = {f"layers.{layers[0]}": pipelining.SplitPoint.BEGINNING for layers in parts[1:]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns about its own code
        pipe = pipelining.pipeline(model, mb_args=(example,), split_spec=cuts)
    return [pipe.get_stage_module(number) for number in range(len(parts))]


class Pipeline:
    """This rank's stages of the model, and the schedule that runs them."""

    def __init__(self, model: LanguageModel, config, world: World):
        self.world = world
        self.target_count = 0  # of the current batch, without padding
        self.recorder = Recorder(world.rank, world.device)
        # The layers of each stage; where they do not divide, the first stages have more.
        layers = torch.arange(len(model.layers))
        parts = [part.tolist() for part in layers.tensor_split(world.size * config.stages_per_rank)]
        rows = config.batch_size // config.micro_batches
        length = len(model.embedding.positions)
        example = torch.zeros(rows, length, dtype=torch.long)
        modules = split_model(model, parts, example, config.build)

        # A stage that knows the shapes it receives and sends need not find out by an extra pass.
        output = model.head[1]
        hidden = (rows, length, output.in_features)
        logits = (rows, length, output.out_features)
        group = process_grid(world, pipe=world.size)["pipe"].get_group()
        self.parameters = {}
        self.stages = []
        for number in stages_of_rank(world.rank, world.size, config):
            module = modules[number].to(world.device)
            self.parameters |= dict(module.named_parameters())
            is_last = number == len(parts) - 1
            # Not pipe.build_stage: with ZB-V a rank would send its own second stage a message.
            stage = pipelining.PipelineStage(
                module,
                number,
                len(parts),
                world.device,
                input_args=on_meta(hidden) if number else example.to("meta"),
                output_args=on_meta(logits if is_last else hidden),
                group=group,
            )
            self.recorder.watch(stage)
            self.stages.append(stage)
        # With ZB-V rank 0 has both the first and the last stage.
        self.has_first = any(stage.is_first for stage in self.stages)
        self.has_last = any(stage.is_last for stage in self.stages)

        schedule = SCHEDULES[config.schedule]
        single = issubclass(schedule, PipelineScheduleSingle)
        self.schedule = schedule(
            self.stages[0] if single else self.stages,
            config.micro_batches,
            loss_fn=self.recorder.watch_loss(self.share_of_mean_loss, len(parts) - 1),
            scale_grads=False,  # the loss of a micro-batch is already a share of the batch's loss
        )

    def share_of_mean_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """What a micro-batch adds to the mean loss of the whole batch."""
        return summed_loss(logits, target) / self.target_count

    def forward_backward(self, tokens: Tensor, target: Tensor) -> float:
        """Compute the gradients of the batch's mean loss. The schedule cuts it into micro-batches.

        `tokens`, `target`: (M · B, S), the same on all ranks. Returns the loss summed over the
        batch's targets, the same on all ranks.
        """
        device = self.world.device
        self.target_count = int((target != PADDING).sum())
        losses = []
        self.schedule.step(
            *([tokens.to(device)] if self.has_first else []),
            target=target.to(device) if self.has_last else None,
            losses=losses if self.has_last else None,
            return_outputs=False,
        )
        # Only the last stage knows the loss; the other ranks add 0.
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for share in losses:
            loss += share.detach()
        return self.world.sum(loss).item() * self.target_count


def on_meta(shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape without memory, for activations."""
    return torch.empty(shape, device="meta", requires_grad=True)
