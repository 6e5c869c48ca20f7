"""Greedy decoding on a GPU by captured steps: what `decoding.step` computes, without waiting for Python.

    cache = CapturedSteps(model).start(src, src_pad, longest)
    tokens = cache.next_tokens(tokens, position)

A step is a hundred small kernels, which a GPU finishes sooner than Python asks for them. So they are asked for once, written
down as a CUDA graph, and replayed with a single call. A graph repeats the same kernels on the same addresses, hence:
 - what a step reads and writes lies in `Buffers` that never move, for shapes rounded up, so that graphs are few;
 - attention is over a whole stretch of the cache, and a mask hides what is not filled: a graph for 64 places, for 128, …;
 - rows that have ended leave to a graph for fewer rows.
The first step of a shape runs as it is, and its graph must then choose the same tokens. If a capture fails, all steps run as
they are, with a note; so they do on a CPU, where the tests hold this file to `decoding.greedy`.
Letters in shape comments as in `decoding`; L places in the cache, N rows of a graph.
"""

import copy
import gc
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

MOST_SHAPES = 16  # of buffers, a few graphs each; then all are forgotten
# Either can do with a mask and a single query, whatever the sizes; cuDNN would make a plan for every shape.
ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def round_up(count: int, least: int) -> int:
    """The next power of two, from `least` on."""
    return max(least, 1 << (count - 1).bit_length())


class Buffers:
    """All that a step reads and writes for batches of one shape, and the graphs for it."""

    def __init__(
        self, config, rows: int, source: int, length: int, dtype: torch.dtype, device: torch.device
    ):
        cache = (config.num_decoder_layers, 2, rows, config.nhead)  # keys and values of every layer
        width = config.d_model // config.nhead
        self.own = torch.zeros(*cache, length, width, dtype=dtype, device=device)
        self.source = torch.zeros(*cache, source, width, dtype=dtype, device=device)
        # 0 = look here, -inf = do not; added to the scores. Rows beyond a batch see all of a source of zeros: to see
        # nothing would give nan.
        self.own_mask = torch.zeros(length, dtype=dtype, device=device)
        self.source_mask = torch.zeros(rows, 1, 1, source, dtype=dtype, device=device)
        self.tokens, self.chosen = torch.zeros(
            2, rows, dtype=torch.long, device=device
        )  # (N,) each
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.graphs = {}  # by rows and stretch

    def begin(self, src_pad: Tensor) -> None:
        """A new batch; its keys and values come after this."""
        rows, width = src_pad.shape
        for numbers in (
            self.own,
            self.source,
        ):  # a masked place counts times 0, but 0 times NaN is NaN
            numbers.zero_()
        self.own_mask.fill_(-math.inf)
        self.source_mask.fill_(-math.inf)
        self.source_mask[rows:] = 0
        self.source_mask[:rows, 0, 0, :width].masked_fill_(~src_pad, 0)


class CapturedCache:
    """The state of one batch, as `decoding.Cache`."""

    shrink_at: ClassVar[float] = 0.25

    def __init__(self, steps: "CapturedSteps", buffers: Buffers):
        self.steps, self.buffers, self.filled = steps, buffers, 0

    def next_tokens(self, tokens: Tensor, position: int) -> Tensor:
        """Feed (B,) tokens at one position; → (B,) the likeliest next ones."""
        buffers, self.filled = self.buffers, position + 1
        buffers.tokens[: len(tokens)] = tokens
        buffers.position.fill_(position)
        length = min(round_up(position + 1, 64), len(buffers.own_mask))
        self.steps.advance(buffers, min(round_up(len(tokens), 8), len(buffers.tokens)), length)
        return buffers.chosen[: len(tokens)].clone()

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order: they move to be the first ones."""
        buffers = self.buffers
        buffers.source_mask[: len(rows)] = buffers.source_mask.index_select(0, rows)
        for own, source in zip(
            buffers.own.flatten(0, 1), buffers.source.flatten(0, 1)
        ):  # one by one: less memory
            own[: len(rows), :, : self.filled] = own[:, :, : self.filled].index_select(0, rows)
            source[: len(rows)] = source.index_select(0, rows)


class CapturedSteps:
    """A model's weights as they are now, for greedy decoding on a GPU; later changes of the model do not reach it."""

    @torch.no_grad()
    def __init__(self, model: nn.Module):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.device = model.output.weight.device
        device = self.device.type
        self.dtype = (
            torch.get_autocast_dtype(device)
            if torch.is_autocast_enabled(device)
            else model.output.weight.dtype
        )
        for part in self.model.transformer.decoder.modules():
            if isinstance(part, nn.Linear | nn.MultiheadAttention):
                part.to(self.dtype)  # once; autocast would do it at every step
        self.buffers: dict[tuple[int, int, int], Buffers] = {}  # by shape
        self.graphs = Graphs(self.device) if device == "cuda" else None

    def start(self, src: Tensor, src_pad: Tensor, length: int) -> CapturedCache:
        """Encode (B, S), under the caller's autocast, with room for `length` tokens."""
        shape = (round_up(len(src), 8), round_up(src.size(1), 32), round_up(length, 64))
        if shape not in self.buffers:
            if len(self.buffers) >= MOST_SHAPES or self.is_crowded():
                self.buffers = {}
                if self.graphs:  # a pool whose graphs are gone cannot be captured into again
                    self.graphs = Graphs(self.device)
            self.buffers[shape] = Buffers(self.model.config, *shape, self.dtype, self.device)
        buffers = self.buffers[shape]
        buffers.begin(src_pad)
        memory = self.model.encode(src, src_pad)  # (B, S, D)
        with torch.autocast(self.device.type, enabled=False):
            for layer, both in zip(self.model.transformer.decoder.layers, buffers.source):
                heads = project(layer.multihead_attn, memory, "kv")  # (B, S, 2, H, W)
                both[:, : len(src), :, : src.size(1)] = heads.permute(2, 0, 3, 1, 4)
        return CapturedCache(self, buffers)

    def is_crowded(self) -> bool:
        """Whether little memory is left. Batches come longest first, so the buffers that there are will hardly be used again."""
        if not self.graphs or self.device.type == "cpu":
            return False
        free, whole = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(
            self.device
        )  # PyTorch's own
        return free < whole / 4

    def advance(self, buffers: Buffers, rows: int, length: int) -> None:
        """One step: as it is the first time, and by its graph from then on."""
        if not self.graphs:
            self.step(buffers, rows, length)
            return
        with self.graphs.stream_of_its_own():
            if (rows, length) in buffers.graphs:
                buffers.graphs[rows, length].replay()
                return
            self.step(buffers, rows, length)
            chosen = buffers.chosen[:rows].clone()
            try:
                graph = self.graphs.capture(lambda: self.step(buffers, rows, length))
                graph.replay()  # the same step once more
                if int((buffers.chosen[:rows] != chosen).sum()) > max(
                    1, rows // 100
                ):  # a near tie may round otherwise
                    raise RuntimeError("a captured step chose other tokens than the step itself")
                buffers.graphs[rows, length] = graph
            except RuntimeError as error:
                self.graphs = None
                self.step(
                    buffers, rows, length
                )  # once more: a wrong graph may have left wrong keys and values
                reason = " ".join(str(error).split())[:200]
                print(
                    f"note: CUDA graphs failed ({reason}); decoding continues without them, more slowly",
                    file=sys.stderr,
                )

    def step(self, buffers: Buffers, rows: int, length: int) -> None:
        """From one token to the next, all on the device: no number in here differs between two steps of a shape."""
        model, decoder = self.model, self.model.transformer.decoder
        buffers.own_mask.index_fill_(0, buffers.position, 0)
        own_mask, source_mask = (
            buffers.own_mask[:length].view(1, 1, 1, length),
            buffers.source_mask[:rows],
        )
        with torch.autocast(self.device.type, enabled=False), sdpa_kernel(ATTENTION):
            x = model.target_embedding(buffers.tokens[:rows]) * math.sqrt(
                model.config.d_model
            )  # (N, D), full precision
            x = x + model.positions.index_select(0, buffers.position)
            for layer, own, source in zip(decoder.layers, buffers.own, buffers.source):
                own, source = own[:, :rows, :, :length], source[:, :rows]  # (2, N, H, L or S, W)
                x = add_and_norm(layer, layer.norm1, x, attend_own, own, own_mask, buffers.position)
                x = add_and_norm(layer, layer.norm2, x, attend_source, source, source_mask)
                x = add_and_norm(layer, layer.norm3, x, feed_forward)
            buffers.chosen[:rows] = model.output(decoder.norm(x)).argmax(-1)  # (N,)


def add_and_norm(
    layer: nn.Module, norm: nn.LayerNorm, x: Tensor, sublayer: Callable, *arguments
) -> Tensor:
    """A sublayer with its residual, in full precision, and its norm before or after."""
    if layer.norm_first:
        return x + sublayer(layer, norm(x), *arguments)
    return norm(x + sublayer(layer, x, *arguments))


def project(attention: nn.MultiheadAttention, x: Tensor, which: str) -> Tensor:
    """(…, D) → (…, 1–3, H, W): the wanted ones of query, key and value, "qkv", "q" or "kv"."""
    first, last = (
        "qkv".index(which[0]) * attention.embed_dim,
        ("qkv".index(which[-1]) + 1) * attention.embed_dim,
    )
    weight, bias = attention.in_proj_weight[first:last], attention.in_proj_bias[first:last]
    return F.linear(x.to(weight.dtype), weight, bias).unflatten(
        -1, (-1, attention.num_heads, attention.head_dim)
    )


def attend(attention: nn.MultiheadAttention, query: Tensor, both: Tensor, mask: Tensor) -> Tensor:
    """Query (N, H, W), keys and values (2, N, H, L, W), mask (1 or N, 1, 1, L) → (N, D)"""
    seen = F.scaled_dot_product_attention(query.unsqueeze(2), *both, attn_mask=mask)  # (N, H, 1, W)
    return attention.out_proj(seen.flatten(1))


def attend_own(layer: nn.Module, x: Tensor, both: Tensor, mask: Tensor, position: Tensor) -> Tensor:
    """Self-attention of the newest token, whose key and value join the cache: (N, D) → (N, D)"""
    query, *new = project(layer.self_attn, x, "qkv").unbind(1)  # (N, H, W) each
    for cache, key_or_value in zip(both, new):
        cache.index_copy_(2, position, key_or_value.unsqueeze(2))
    return attend(layer.self_attn, query, both, mask)


def attend_source(layer: nn.Module, x: Tensor, both: Tensor, mask: Tensor) -> Tensor:
    """Attention over the encoded source: (N, D) → (N, D)"""
    return attend(
        layer.multihead_attn, project(layer.multihead_attn, x, "q").squeeze(1), both, mask
    )


def feed_forward(layer: nn.Module, x: Tensor) -> Tensor:
    """(N, D) → (N, D)"""
    return layer.linear2(layer.activation(layer.linear1(x.to(layer.linear1.weight.dtype))))


class Graphs:
    """A stream and memory for graphs that are never replayed at the same time and keep no result in memory of their own.

    Throw them away all at once, and this with them: they share the work space of the stream's matrix products.
    """

    failed: ClassVar[list] = []  # graphs whose capture failed: the allocator may still ask them

    def __init__(self, device: torch.device):
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    @contextmanager
    def stream_of_its_own(self) -> Iterator[None]:
        """Inside, the GPU's work goes to this stream: after all that the caller's has been given, before what it will be."""
        callers = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(callers)
        try:
            # Of a thread that has not chosen the device too, as the server's.
            with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
                yield
        finally:
            callers.wait_stream(self.stream)

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The kernels that `step` asks for, as a graph.

        `torch.cuda.graph` would empty the allocator's cache every time, and not put right what a failure leaves.
        """
        graph = torch.cuda.CUDAGraph()
        self.stream.synchronize()  # what went wrong before is not to look like a failure of the capture
        try:
            with no_collection(), random_state_kept(self.stream.device_index):
                # Other threads, of a data loader for instance, may do what they like meanwhile.
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        except BaseException:
            Graphs.failed.append(graph)
            with suppress(
                Exception
            ):  # else the allocator thinks for ever that a capture is on, and keeps its pool
                torch._C._cuda_endAllocateToPool(self.stream.device_index, self.pool)
                torch._C._cuda_releasePool(self.stream.device_index, self.pool)
            with suppress(
                Exception
            ):  # a capture that ran out of memory may have ended well, and would keep its pool
                graph.reset()
            raise
        return graph


@contextmanager
def no_collection() -> Iterator[None]:
    """Without Python's garbage collection, which might give back to CUDA what may not be given back during a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def random_state_kept(device_index: int) -> Iterator[None]:
    """A failed capture leaves a random state that is of no use, and no dropout would work any more: then an earlier copy."""
    generator = torch.cuda.default_generators[device_index]
    copy_of_state = generator.clone_state()
    try:
        yield
    except BaseException:
        generator.graphsafe_set_state(copy_of_state)
        raise
