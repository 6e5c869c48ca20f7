"""Greedy decoding on a GPU by a captured step: what `decoding.step` computes, without waiting for Python.

    captured = CapturedTranslator(model)
    output = captured.greedy(src, src_pad, limits, bos, eos)  # (B, S) → (B, T); None: it could not, take the plain way

A step is a hundred small kernels, which a GPU finishes sooner than Python asks for them. So they are asked for once, written
down as a CUDA graph, and replayed with a single call. A graph repeats the same kernels on the same addresses, hence:
 - a step goes from token to token: the likeliest token, who has ended and the position stay on the device;
 - what it reads and writes lies in `Buffers` that never move;
 - attention is over a whole stretch of the cache, and a mask hides what is not filled: a graph for 64 places, for 128, …;
 - rows that have ended leave when a quarter is left, to a graph for fewer rows; shapes are rounded up, so that graphs are few.
The first step of a shape runs as it is, and its graph must then find the same tokens. On a CPU all steps run as they are: so the
tests hold this file to `decoding.greedy`.
Memory: the weights once more; 2·layers·D·(L + S) numbers a row for the largest batch so far; logits and whatever else is
needed inside a step. Letters in shape comments as in `decoding`, L places in the cache, N ≤ B rows that go on.
"""

import copy
import math
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.graphs import Graphs, LateCount
from model import Translator

LOOK_EVERY = 4  # steps between looks at how many rows go on
SHRINK_AT = 0.25  # share of rows left at which the others leave
ROWS_ENCODED = 256  # sentences encoded at once: neighbours in length, so that they need little padding
SHARE_OF_MEMORY = 0.5  # of what is free, for a batch
MOST_SHAPES = 32  # of batches, a few graphs each
# Either can do with a mask and a single query, whatever the sizes; cuDNN would make a plan for every shape.
KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def round_rows(rows: int) -> int:
    """8, 16, …, 128, 256, then multiples of 256."""
    return max(8, 1 << (rows - 1).bit_length()) if rows <= 256 else -(-rows // 256) * 256


def stretch(places: int) -> int:
    """64, 128, 256, …"""
    return max(64, 1 << (places - 1).bit_length())


class Buffers:
    """All that a step reads and writes for batches of one shape, and the graphs for it."""

    def __init__(self, room: Tensor, cache: tuple[int, ...], source: int, length: int):
        """`cache` is (layers, 2, B, H, 1, W), of the keys and values of one place; `room` holds those of all."""
        layers, _, rows, heads, _, width = cache
        whole, device = dict(dtype=torch.long, device=room.device), room.device
        self.length, self.graphs = length, {}  # by rows and stretch
        self.tokens, self.limits = torch.zeros(2, rows, **whole)  # (B,) each
        self.output, self.places = torch.zeros(rows, length, **whole), torch.arange(rows, **whole)  # row → its output
        self.done = torch.zeros(rows, dtype=torch.bool, device=device)
        self.position, self.eos = torch.zeros(2, 1, **whole)  # (1,) each
        # 0 = look here, -inf = do not; added to the scores.
        self.own_mask = torch.zeros(length, dtype=room.dtype, device=device)
        self.source_mask = torch.zeros(rows, 1, 1, source, dtype=room.dtype, device=device)
        end, place = math.prod(cache) * length, math.prod(cache)
        self.own = room[:end].view(layers, 2, rows, heads, length, width)
        self.source = room[end : end + place * source].view(layers, 2, rows, heads, source, width)

    def begin(self, src_pad: Tensor, limits: Tensor, bos: int, eos: int) -> None:
        """A new batch. Rows beyond it have ended, and see all of a source of zeros: to see nothing gives nan."""
        rows, width = src_pad.shape
        for tensor, value in ((self.tokens, bos), (self.eos, eos), (self.output, eos), (self.position, 0), (self.own, 0),
                              (self.source, 0), (self.own_mask, -math.inf), (self.source_mask, 0)):  # fmt: skip
            tensor.fill_(value)
        self.limits[:rows] = limits
        self.source_mask[:rows] = -math.inf
        self.source_mask[:rows, 0, 0, :width].masked_fill_(~src_pad, 0)
        self.places.copy_(torch.arange(len(self.places), device=self.places.device))
        self.done.copy_(self.places >= rows)

    def shrink(self, rows: int, fewer: int, filled: int) -> None:
        """Of the first `rows` those that go on move to be among the first `fewer`, with `filled` places of cache."""
        order = self.done[:rows].byte().argsort(stable=True)[:fewer]
        for tensor in (self.tokens, self.limits, self.places, self.done, self.source_mask):
            tensor[:fewer] = tensor.index_select(0, order)
        for own, source in zip(self.own.flatten(0, 1), self.source.flatten(0, 1)):  # one by one: that needs less memory
            own[:fewer, :, :filled] = own[:, :, :filled].index_select(0, order)
            source[:fewer] = source.index_select(0, order)


class CapturedTranslator:
    """A model's weights as they are now, for greedy decoding on a GPU; later changes of the model do not reach it."""

    wanted = False  # True: greedy search on a GPU takes it; the scripts' --captured
    enabled = True  # False: every step in the plain way; so it is once this one has failed

    @staticmethod
    def suits(model: Translator) -> bool:
        """On a GPU if wanted, unless the weights are being trained: nothing that fails here is to cost a training run.

        The same on every rank, for they all plan the same batches.
        """
        weights = list(model.parameters())
        return CapturedTranslator.wanted and weights[0].is_cuda and not any(weight.requires_grad for weight in weights)

    @torch.no_grad()
    def __init__(self, model: Translator):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.device = model.output.weight.device
        self.dtype = self.wanted_dtype()
        for part in self.model.transformer.decoder.modules():
            if isinstance(part, (nn.Linear, nn.MultiheadAttention)):
                part.to(self.dtype)  # once; autocast would do it at every step
        self.graphs = Graphs(self.device) if self.device.type == "cuda" else None
        self.room = torch.empty(0, dtype=self.dtype, device=self.device)  # for the caches of all shapes, one at a time
        self.buffers: dict[tuple[int, int, int], Buffers] = {}  # by shape
        self.lock = threading.Lock()  # one batch at a time

    def wanted_dtype(self) -> torch.dtype:
        """Of matrix products: autocast's or the weights'."""
        device = self.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.model.output.weight.dtype

    @torch.inference_mode()
    def greedy(self, src: Tensor, src_pad: Tensor, limits: Tensor, bos: int, eos: int) -> Tensor | None:
        """As `decoding.greedy`. None when switched off, under another autocast, and, with a note, after any failure."""
        if not self.enabled or self.dtype != self.wanted_dtype():
            return None
        try:
            with self.lock, self.graphs.stream_of_its_own() if self.graphs else nullcontext():
                rows = self.most_rows(src.size(1), int(limits.max()))
                return in_parts(partial(self.decode, bos=bos, eos=eos), rows, src, src_pad, limits, eos)
        except Exception as error:  # whatever it is, the plain way may do
            CapturedTranslator.enabled = False
            self.buffers, self.room = {}, None
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            print(f"note: decoding goes on in the plain way, more slowly, because captured steps failed ({reason})",
                  file=sys.stderr)  # fmt: skip
            return None

    def most_rows(self, source: int, longest: int) -> int:
        """How many rows of such a batch a share of the GPU's free memory is good for."""
        if not self.graphs:
            return sys.maxsize
        config = self.model.config
        row = self.numbers(1, source + 32, longest + 64) * self.dtype.itemsize + 3 * 4 * config.target_vocab
        encoding = 4 * ROWS_ENCODED * source * (8 * config.d_model + 2 * config.dim_feedforward)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        ours = self.room.numel() * self.room.element_size()
        free = torch.cuda.mem_get_info(self.device)[0] + unused + ours
        rows = max(8, int((SHARE_OF_MEMORY * free - encoding) / row))
        return rows // 256 * 256 or 1 << (rows.bit_length() - 1)  # rounded down to what `round_rows` leaves alone

    def numbers(self, rows: int, source: int, length: int) -> int:
        """In the keys and values of all decoder layers."""
        return 2 * self.model.config.num_decoder_layers * self.model.config.d_model * rows * (source + length)

    def decode(self, src: Tensor, src_pad: Tensor, limits: Tensor, bos: int, eos: int) -> Tensor:
        """(B, S) → (B, T)"""
        longest, rows, count = int(limits.max()), round_rows(len(src)), LateCount(self.device)
        buffers = self.buffers_for(rows, -(-src.size(1) // 32) * 32, -(-longest // 64) * 64)
        buffers.begin(src_pad, limits, bos, eos)
        self.encode(src, src_pad, buffers)
        for position in range(longest):
            self.advance(buffers, rows, min(stretch(position + 1), buffers.length))
            if position % LOOK_EVERY == LOOK_EVERY - 1:
                going = count.look(~buffers.done[:rows])  # rather too many than too few: who has ended stays so
                if going == 0:
                    break
                if going and (fewer := round_rows(going)) <= SHRINK_AT * rows:
                    buffers.shrink(rows, fewer, position + 1)
                    rows = fewer
        return buffers.output[: len(src), :longest].clone()

    def buffers_for(self, rows: int, source: int, length: int) -> Buffers:
        """Those of this shape, made if there are none. The caches of all shapes lie in the same room."""
        config, numbers = self.model.config, self.numbers(rows, source, length)
        if len(self.buffers) >= MOST_SHAPES:
            self.buffers = {}
        if numbers > len(self.room):
            self.buffers, self.room = {}, self.room[:0].clone()  # the graphs know the old addresses; free them first
            self.room = torch.empty(numbers, dtype=self.dtype, device=self.device)
        if (rows, source, length) not in self.buffers:
            cache = (config.num_decoder_layers, 2, rows, config.nhead, 1, config.d_model // config.nhead)
            self.buffers[rows, source, length] = Buffers(self.room, cache, source, length)
        return self.buffers[rows, source, length]

    def encode(self, src: Tensor, src_pad: Tensor, buffers: Buffers) -> None:
        """Fill the source's keys and values, under the caller's autocast."""
        lengths = (~src_pad).sum(1).tolist()
        for first in range(0, len(src), ROWS_ENCODED):
            few = slice(first, min(first + ROWS_ENCODED, len(src)))
            longest = max(lengths[few])
            memory = self.model.encode(src[few, :longest], src_pad[few, :longest])  # (rows, S, D)
            with torch.autocast(self.device.type, enabled=False):
                for layer, both in zip(self.model.transformer.decoder.layers, buffers.source):
                    heads = project(layer.multihead_attn, memory, "kv")  # (rows, S, 2, H, W)
                    both[:, few, :, :longest] = heads.permute(2, 0, 3, 1, 4)

    def advance(self, buffers: Buffers, rows: int, length: int) -> None:
        """One step: as it is the first time, and by its graph from then on."""
        graph = buffers.graphs.get((rows, length))
        if graph:
            graph.replay()
        elif not self.graphs:
            self.step(buffers, rows, length)
        else:
            state = buffers.tokens, buffers.done, buffers.position
            before = [tensor.clone() for tensor in state]
            self.step(buffers, rows, length)
            wanted = buffers.tokens[:rows].clone()
            graph = self.graphs.capture(lambda: self.step(buffers, rows, length))
            for tensor, value in zip(state, before):
                tensor.copy_(value)
            graph.replay()  # the same step once more
            if int((buffers.tokens[:rows] != wanted).sum()) > max(1, rows // 100):  # a near tie may round otherwise
                raise RuntimeError("a captured step found other tokens than the step itself")
            buffers.graphs[rows, length] = graph

    def step(self, buffers: Buffers, rows: int, length: int) -> None:
        """From one token to the next, all on the device: no number in here differs between two steps of a shape."""
        model, decoder = self.model, self.model.transformer.decoder
        tokens, done = buffers.tokens[:rows], buffers.done[:rows]
        buffers.own_mask.index_fill_(0, buffers.position, 0)
        own_mask, source_mask = buffers.own_mask[:length].view(1, 1, 1, length), buffers.source_mask[:rows]
        with torch.autocast(self.device.type, enabled=False), sdpa_kernel(KERNELS):
            x = model.target_embedding(tokens) * math.sqrt(model.config.d_model)  # (N, D), in full precision
            x = x + model.positions.index_select(0, buffers.position)
            for layer, own, source in zip(decoder.layers, buffers.own, buffers.source):
                own, source = own[:, :rows, :, :length], source[:, :rows]  # (2, N, H, L or S, W)
                x = add_and_norm(layer, layer.norm1, x, attend_own, own, own_mask, buffers.position)
                x = add_and_norm(layer, layer.norm2, x, attend_source, source, source_mask)
                x = add_and_norm(layer, layer.norm3, x, feed_forward)
            likeliest = model.output(decoder.norm(x)).argmax(-1)  # (N,)
        tokens.copy_(torch.where(done, buffers.eos, likeliest))
        buffers.output.index_put_((buffers.places[:rows], buffers.position), tokens)
        buffers.position.add_(1)
        done.logical_or_((tokens == buffers.eos) | (buffers.limits[:rows] <= buffers.position))


def in_parts(decode: Callable, rows: int, src: Tensor, src_pad: Tensor, limits: Tensor, eos: int) -> Tensor:
    """`decode` of at most so many rows at once: (B, S) → (B, T)"""
    longest, rows = int(limits.max()), min(rows, len(src))
    found = [decode(*part) for part in zip(src.split(rows), src_pad.split(rows), limits.split(rows))]
    return torch.cat([F.pad(output, (0, longest - output.size(1)), value=eos) for output in found])


def add_and_norm(layer: nn.Module, norm: nn.LayerNorm, x: Tensor, sublayer: Callable, *arguments) -> Tensor:
    """A sublayer with its residual, in full precision, and its norm before or after."""
    if layer.norm_first:
        return x + sublayer(layer, norm(x), *arguments)
    return norm(x + sublayer(layer, x, *arguments))


def project(attention: nn.MultiheadAttention, x: Tensor, which: str) -> Tensor:
    """(…, D) → (…, 1–3, H, W): the wanted ones of query, key and value, "qkv", "q" or "kv"."""
    first, last = "qkv".index(which[0]) * attention.embed_dim, ("qkv".index(which[-1]) + 1) * attention.embed_dim
    weight, bias = attention.in_proj_weight[first:last], attention.in_proj_bias[first:last]
    return F.linear(x.to(weight.dtype), weight, bias).unflatten(-1, (-1, attention.num_heads, attention.head_dim))


def attend(attention: nn.MultiheadAttention, query: Tensor, both: Tensor, mask: Tensor) -> Tensor:
    """Query (N, H, W), keys and values (2, N, H, L, W), mask (1 or N, 1, 1, L) → (N, D)"""
    seen = F.scaled_dot_product_attention(query.unsqueeze(2), *both, attn_mask=mask)  # (N, H, 1, W)
    return attention.out_proj(seen.flatten(1))


def attend_own(layer: nn.Module, x: Tensor, both: Tensor, mask: Tensor, position: Tensor) -> Tensor:
    """Self-attention of the newest token, whose key and value join the cache: (N, D) → (N, D)"""
    query, *new = project(layer.self_attn, x, "qkv").unbind(1)  # (N, H, W) each
    for cache, one in zip(both, new):
        cache.index_copy_(2, position, one.unsqueeze(2))
    return attend(layer.self_attn, query, both, mask)


def attend_source(layer: nn.Module, x: Tensor, both: Tensor, mask: Tensor) -> Tensor:
    """Attention over the encoded source: (N, D) → (N, D)"""
    return attend(layer.multihead_attn, project(layer.multihead_attn, x, "q").squeeze(1), both, mask)


def feed_forward(layer: nn.Module, x: Tensor) -> Tensor:
    """(N, D) → (N, D)"""
    return layer.linear2(layer.activation(layer.linear1(x.to(layer.linear1.weight.dtype))))
