"""The training pass on a GPU by CUDA graphs: what the plain loss computes, without waiting for Python.

A step of a small model is some 800 kernels, which a GPU finishes sooner than Python asks for them. So forward and backward pass
are written down once as a CUDA graph, and replayed with a single call (fast/captured.py says how that works). A graph has one
shape, and the batches have hundreds: each is padded up to one of the few of `shapes_of`. What is added has no part in the loss,
and so no gradient.
B sentence pairs, S source and T target tokens, N real target tokens of a batch; B', S', T', N' of a graph.
"""

import math
import sys

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fast.captured import Graphs

IGNORED = -100  # `F.cross_entropy` leaves out such targets
Shape = tuple[int, int, int, int]  # B', S', T', N'


def shapes_of(sampler, padding: float = 0.08) -> list[Shape]:
    """Few shapes for the micro-batches of a `data.BucketSampler`, that add at most this share of places.

    Steps that are neighbours by length share one.
    """
    shapes, places, steps = (
        [],
        0,
        0,
    )  # places (padding too) of the steps that share the last shape; how many
    for pairs in sampler.steps_by_length():
        source, target = (side[pairs].astype(int) for side in (sampler.source, sampler.target))
        tokens = max(target[part :: sampler.parts].sum() for part in range(sampler.parts))
        shape = (math.ceil(len(pairs) / sampler.parts), source.max(), target.max(), tokens)
        own = shape[0] * (shape[1] + shape[2])
        b, s, t, n = map(max, shape, shapes[-1] if shapes else shape)
        if shapes and (steps + 1) * b * (s + t) <= (1 + padding) * (places + own):
            shapes[-1], places, steps = (b, s, t, n), places + own, steps + 1
        else:
            shapes, places, steps = [*shapes, shape], own, 1
    return [tuple(map(int, shape)) for shape in shapes]


class CapturedLoss(nn.Module):
    """`plain`, a `SummedLoss`, with a graph for every shape. The gradients it leads to are ready when the loss is.

    The first batch of a shape is computed as it is, the second is captured. If a capture fails, all are computed as they are,
    with a note; so they are on a CPU, where the tests hold this file to the plain loss.
    """

    def __init__(self, plain: nn.Module, shapes: list[Shape]):
        super().__init__()
        self.plain, self.shapes = (
            plain,
            sorted(shapes, key=lambda shape: shape[0] * (shape[1] + shape[2])),
        )
        self.weights = list(plain.parameters())
        # The same memory as leaves of their own: gradients of the weights themselves would be gathered on the stream on which
        # the step began, and a capture must not touch another stream.
        self.leaves = {
            name: weight.detach().requires_grad_() for name, weight in plain.named_parameters()
        }
        device = self.weights[0].device
        self.graphs = Graphs(device) if device.type == "cuda" else None
        self.inputs: dict[Shape, tuple[Tensor, ...]] = {}  # of every shape that has come up
        self.captured: dict[Shape, torch.cuda.CUDAGraph] = {}
        # What a pass leaves, the same for all graphs: gradients of the weights, both losses.
        self.gradients = [torch.empty_like(weight) for weight in self.weights]
        self.losses = torch.empty(2, device=device)
        self.dropout = plain.model.dropout.p  # the rate that the graphs hold

    def forward(self, src: Tensor, src_pad: Tensor, tgt_in: Tensor, real: Tensor, tgt_out: Tensor):
        """(B, S), (B, S), (B, T), (N,), (N,) → the loss to minimise and the unsmoothed one, scalars."""
        sizes = (*src.shape, tgt_in.size(1), len(real))
        shape = next((shape for shape in self.shapes if all(map(int.__le__, sizes, shape))), None)
        if shape is None or not torch.is_grad_enabled():
            return self.plain(src, src_pad, tgt_in, real, tgt_out)
        if self.dropout != (p := self.plain.model.dropout.p):
            self.dropout, self.inputs, self.captured = (
                p,
                {},
                {},
            )  # other kernels: each shape once as it is again
            self.graphs = self.graphs and Graphs(src.device)
            torch.cuda.empty_cache()  # what the old ones held: a capture takes nothing back
        first_time = shape not in self.inputs
        if first_time:
            self.inputs[shape] = empty_inputs(shape, src.device)
        fill(self.inputs[shape], src, src_pad, tgt_in, real, tgt_out)
        return GradientsAtOnce.apply(self, shape, first_time, *self.weights)

    def compute(self, shape: Shape, first_time: bool) -> None:
        """Losses and gradients of the inputs of this shape."""
        if self.graphs and not first_time and shape not in self.captured:
            self.capture(shape)
        if shape in self.captured:
            self.captured[shape].replay()
            return
        try:
            return self.run(shape)
        except torch.OutOfMemoryError:  # the memory of the graphs is nobody else's
            if not self.captured:
                raise
        self.give_up("there is no memory for another shape beside them")
        self.run(shape)

    def run(self, shape: Shape) -> None:
        """The kernels themselves: no number in here comes from the GPU."""
        with torch.enable_grad():
            losses = functional_call(self.plain, self.leaves, self.inputs[shape])
            gradients = torch.autograd.grad(losses[0], list(self.leaves.values()))
        torch._foreach_copy_(self.gradients, list(gradients))
        torch.stack([loss.detach() for loss in losses], out=self.losses)

    def capture(self, shape: Shape) -> None:
        """Write down the kernels of this shape; or none from now on, if that fails."""
        # Autocast has kept nothing of an earlier pass: else the graph would hold weights that have grown old.
        torch.clear_autocast_cache()
        failure = ""
        try:
            with self.graphs.stream_of_its_own():
                self.captured[shape] = self.graphs.capture(lambda: self.run(shape))
        except RuntimeError as error:  # too little memory, too
            failure = f"a capture failed ({' '.join(str(error).split())[:200]})"
        finally:
            torch.clear_autocast_cache()  # nor may what belongs to the graph be used outside
        if failure:  # out here, where the error holds no tensors any more
            self.give_up(failure)

    def give_up(self, reason: str) -> None:
        """No graphs from now on; what they held is for the steps to come."""
        self.graphs, self.captured = None, {}
        torch.cuda.empty_cache()
        print(
            f"note: training goes on without CUDA graphs, more slowly, because {reason}",
            file=sys.stderr,
        )


class GradientsAtOnce(torch.autograd.Function):
    """A loss whose gradients come with it: backward only has to multiply them with that of the loss itself."""

    @staticmethod
    def forward(
        ctx, owner: CapturedLoss, shape: Shape, first_time: bool, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """→ the loss to minimise and the unsmoothed one"""
        ctx.owner = owner
        owner.compute(shape, first_time)
        smoothed, unsmoothed = owner.losses.clone().unbind()
        ctx.mark_non_differentiable(unsmoothed)
        return smoothed, unsmoothed

    @staticmethod
    def backward(ctx, upstream: Tensor, _):
        """New tensors, because the next pass overwrites the old ones."""
        return None, None, None, *torch._foreach_mul(ctx.owner.gradients, upstream)


def empty_inputs(shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
    """What `fill` fills."""
    b, s, t, n = shape
    sizes = {"src": (b, s), "src_pad": (b, s), "tgt_in": (b, t), "real": (n,), "tgt_out": (n,)}
    return tuple(
        torch.empty(size, dtype=torch.bool if name == "src_pad" else torch.long, device=device)
        for name, size in sizes.items()
    )


def fill(
    inputs: tuple[Tensor, ...],
    src: Tensor,
    src_pad: Tensor,
    tgt_in: Tensor,
    real: Tensor,
    tgt_out: Tensor,
) -> None:
    """A batch into the upper left corner of inputs that may be larger; the rest is token 0, seen by nobody who counts."""
    (rows, length), width = src.shape, tgt_in.size(1)
    all_src, all_pad, all_tgt_in, all_real, all_tgt_out = inputs
    all_src.zero_()[:rows, :length] = src
    all_pad.fill_(True)[:rows, :length] = src_pad
    all_pad[rows:] = (
        False  # rows that may see nothing would be rows of nan, and so would the gradients
    )
    all_tgt_in.zero_()[:rows, :width] = tgt_in
    all_real.zero_()[: len(real)] = real + real // width * (
        all_tgt_in.size(1) - width
    )  # places in longer rows
    all_tgt_out.fill_(IGNORED)[: len(real)] = tgt_out
