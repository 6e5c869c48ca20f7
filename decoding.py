"""Greedy and beam search with a key/value cache.

    decoder = Decoder(model)                                   # with its current weights
    hypotheses = search(decoder, sources, collate, beam=5)     # lists of token ids in
    best = [sentence[0].tokens for sentence in hypotheses]     # lists of token ids out

A step calls `Translator.decode` and `Translator.logits` of model.py for one new token of every row,
so whatever you change there is decoded. Only PyTorch's `nn.TransformerDecoder` is replaced, in a
copy of the model that shares its weights. A decoder layer needs, for one new token, only that
token's query and the keys and values of all tokens up to it. The stock layers recompute those at
every step; `CachedDecoder` keeps them, and fast/ has the same in C++. A decoder of any other class
gets all tokens so far in every step: slow, but right for every model.

Letters in shape comments: B sentences, K hypotheses of each (greedy search has one), N = B·K rows
that the decoder sees, S source tokens, T target tokens, D model width, V vocabulary, H heads,
W = D / H.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fast
from data import Collate
from engine.errors import UserError
from model import Translator

# What is decoded at once. On a CPU each thread decodes a batch of its own, so memory grows with
# their number: for 2**15 tokens, the `lab` model keeps up to 0.5 GiB of keys and values.
ROWS_PER_BATCH = {"cpu": 128, "cuda": 512}  # hypotheses
TOKENS_PER_BATCH = {"cpu": 2**15, "cuda": 2**18}  # hypotheses × source tokens with their padding
CHECK_EVERY = 8  # on a GPU, steps between checks for finished sentences: each check waits for it
CACHE_ROOM = 32  # target tokens by which a cache grows when it is full


# ---------------------------------------------------------------- a decoder that keeps a cache


class CachedDecoder(nn.TransformerDecoder):
    """`nn.TransformerDecoder` for one token of each row a call; it keeps keys and values.

    Those of the target, (N, H, T, W), grow by one token each call. Those of the source,
    (B, H, S, W), stay as they are and serve all rows of a sentence.
    """

    # Greedy search drops finished rows once they are more than this share; not earlier, because
    # copying the others costs time.
    drop_at = 0.25
    length: int  # tokens so far
    own_keys: list[Tensor]  # of each layer
    own_values: list[Tensor]
    source_keys: list[Tensor]  # empty before the first token
    source_values: list[Tensor]
    # (B, 1, 1, S), True = look here: the opposite of the masks of nn.Transformer
    source_mask: Tensor | None

    @classmethod
    def of(cls, decoder: nn.TransformerDecoder) -> "CachedDecoder":
        """The same decoder, with the same weights, and an empty cache."""
        cached = cls.__new__(cls)
        cached.__dict__ = dict(decoder.__dict__)
        cached.length = 0
        cached.own_keys, cached.own_values = [], []
        cached.source_keys, cached.source_values = [], []
        return cached

    def empty(self) -> "CachedDecoder":
        """This decoder with a cache of its own, for another batch."""
        return CachedDecoder.of(self)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """The next token of each row, (N, 1, D) → (N, 1, D).

        tgt_mask (1, T): the row of this token. `memory` (B, S, D) and its padding are read with the
        first token only. Raises `NotImplementedError` for what a cache cannot know.
        """
        others = (memory_mask, tgt_key_padding_mask)
        if tgt_mask is None or memory_is_causal or any(mask is not None for mask in others):
            raise NotImplementedError("a cache needs tgt_mask, and no other mask but padding")
        if tgt_mask.dtype != torch.bool or tgt_mask.shape != (1, self.length + 1):
            raise NotImplementedError("a cache needs a boolean tgt_mask with one row")
        if not self.source_keys:
            self.keep_source(memory, memory_key_padding_mask)
        # With the hint PyTorch does not read the mask either.
        own_mask = None if tgt_is_causal else ~tgt_mask  # True = look here
        x = tgt
        for index, layer in enumerate(self.layers):
            if layer.norm_first:
                x = x + self.attend_own(layer, layer.norm1(x), own_mask, index)
                x = x + self.attend_source(layer, layer.norm2(x), index)
                x = x + _feed_forward(layer, layer.norm3(x))
            else:
                x = layer.norm1(x + self.attend_own(layer, x, own_mask, index))
                x = layer.norm2(x + self.attend_source(layer, x, index))
                x = layer.norm3(x + _feed_forward(layer, x))
        self.length += 1
        if self.norm is None:
            return x
        with torch.autocast(x.device.type, enabled=False):
            return self.norm(x.to(tgt.dtype))

    def keep_source(self, memory: Tensor, padding: Tensor | None) -> None:
        """Keys and values of the memory (B, S, D) in every layer."""
        self.source_mask = None if padding is None else ~padding[:, None, None, :]
        for layer in self.layers:
            keys, values = _project(layer.multihead_attn, memory, "kv")
            self.source_keys.append(keys)
            self.source_values.append(values)

    def attend_own(
        self, layer: nn.TransformerDecoderLayer, x: Tensor, mask: Tensor | None, index: int
    ) -> Tensor:
        """Attention of the newest token to itself and to those before it: (N, 1, D) → (N, 1, D)"""
        query, key, value = _project(layer.self_attn, x, "qkv")  # (N, H, 1, W) each
        keys, values = self.append(index, key, value)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return layer.dropout1(_join_heads(layer.self_attn, attended))

    def append(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's key and value of one token, (N, H, 1, W); returns all up to it."""
        if self.length == 0:
            self.own_keys.append(key[:, :, :0])
            self.own_values.append(value[:, :, :0])
        if self.length == self.own_keys[index].size(2):
            room = (0, 0, 0, CACHE_ROOM)
            self.own_keys[index] = F.pad(self.own_keys[index], room)
            self.own_values[index] = F.pad(self.own_values[index], room)
        keys, values = self.own_keys[index], self.own_values[index]
        keys[:, :, self.length] = key[:, :, 0]
        values[:, :, self.length] = value[:, :, 0]
        end = self.length + 1
        return keys[:, :, :end], values[:, :, :end]

    def attend_source(self, layer: nn.TransformerDecoderLayer, x: Tensor, index: int) -> Tensor:
        """Attention of the newest token to the source: (N, 1, D) → (N, 1, D)"""
        keys, values = self.source_keys[index], self.source_values[index]
        # The K rows of a sentence attend to one source as K queries: it need not be copied.
        together = x.reshape(keys.size(0), -1, x.size(2))  # (B, K, D)
        (query,) = _project(layer.multihead_attn, together, "q")  # (B, H, K, W)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=self.source_mask)
        return layer.dropout2(_join_heads(layer.multihead_attn, attended).reshape(x.shape))

    def select(self, rows: Tensor) -> None:
        """Keep these rows, (sentences, hypotheses): indices into the current rows.

        A line holds rows of one sentence, one of them perhaps several times. Sentences may be left
        out.
        """
        sentences_before = len(self.source_keys[0])
        rows_per_sentence = len(self.own_keys[0]) // sentences_before
        sentences = rows[:, 0] // rows_per_sentence
        rows = rows.flatten()
        self.own_keys = [keys.index_select(0, rows) for keys in self.own_keys]
        self.own_values = [values.index_select(0, rows) for values in self.own_values]
        if len(sentences) == sentences_before:
            return  # no sentence is left out
        self.source_keys = [keys.index_select(0, sentences) for keys in self.source_keys]
        self.source_values = [values.index_select(0, sentences) for values in self.source_values]
        if self.source_mask is not None:
            self.source_mask = self.source_mask.index_select(0, sentences)


def _feed_forward(layer: nn.TransformerDecoderLayer, x: Tensor) -> Tensor:
    """(N, 1, D) → (N, 1, D)"""
    inner = layer.dropout(layer.activation(layer.linear1(x)))
    return layer.dropout3(layer.linear2(inner))


def _project(attention: nn.MultiheadAttention, x: Tensor, which: str) -> list[Tensor]:
    """(N, T, D) → the wanted ones of query, key and value, "qkv", "q" or "kv": (N, H, T, W) each.

    `nn.MultiheadAttention` keeps the three weights in one matrix, query on top.
    """
    first = "qkv".index(which[0]) * attention.embed_dim
    end = first + len(which) * attention.embed_dim
    weight = attention.in_proj_weight[first:end]
    bias = None if attention.in_proj_bias is None else attention.in_proj_bias[first:end]
    heads = (len(which), attention.num_heads, attention.head_dim)
    projected = F.linear(x, weight, bias).unflatten(-1, heads)  # (N, T, 1 to 3, H, W)
    return list(projected.permute(2, 0, 3, 1, 4))


def _join_heads(attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """(N, H, T, W) → (N, T, D)"""
    return attention.out_proj(x.transpose(1, 2).flatten(2))


# ---------------------------------------------------------------- the steps of a batch


class DecoderState(Protocol):
    """What a search asks of the decoder of one batch."""

    drop_at: float  # greedy search drops finished rows once they are more than this share

    def next_tokens(self, tokens: Tensor, position: int) -> Tensor:
        """Feed (N,) tokens at one position; returns the likeliest next ones, (N,)."""

    def top_tokens(self, tokens: Tensor, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Feed (N,) tokens at one position; returns the likeliest next ones of each, best first.

        Log-probabilities (N, C) and ids (N, C), with C = `count`, at most V.
        """

    def select(self, rows: Tensor) -> None:
        """Keep these rows, (sentences, hypotheses); see `CachedDecoder.select`."""


class Steps:
    """One token a step by `decode` of a model whose decoders keep keys and values."""

    def __init__(
        self,
        model: Translator,
        decoders: list[nn.Module],
        output: fast.CompiledOutput | None,
        src: Tensor,
        src_pad: Tensor,
    ):
        self.model = model
        self.decoders = decoders
        self.output = output
        self.memory = model.encode(src, src_pad)  # (N, S, D)
        self.src_pad = src_pad  # (N, S)
        self.drop_at = decoders[0].drop_at

    def hidden(self, tokens: Tensor, position: int) -> Tensor:
        """Feed (N,) tokens at one position; returns the input of `logits`, (N, D)."""
        hidden = self.model.decode(self.memory, self.src_pad, tokens[:, None], position)[:, 0]
        if position == 0:
            # The decoders have kept what they need of the memory, and to copy that of the remaining
            # rows after every step would cost up to a tenth of it. Should `decode` need it for
            # anything else, NaN shows it: see `why_no_agreement`.
            nothing = self.memory.new_full((1, 1, 1), math.nan)
            self.memory = nothing.expand(self.memory.shape)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, D) → (N, V), in fp32 even under autocast: in bf16 different tokens often tie."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.model.logits(hidden.to(next(self.model.parameters()).dtype))

    def next_tokens(self, tokens: Tensor, position: int) -> Tensor:
        """See `DecoderState`."""
        hidden = self.hidden(tokens, position)
        if self.output:
            return self.output.largest(hidden)
        return self.logits(hidden).argmax(-1)

    def top_tokens(self, tokens: Tensor, position: int, count: int) -> tuple[Tensor, Tensor]:
        """See `DecoderState`."""
        hidden = self.hidden(tokens, position)
        if self.output:
            return self.output.most_probable(hidden, count)
        log_probabilities = F.log_softmax(self.logits(hidden), -1)
        return log_probabilities.topk(min(count, log_probabilities.size(1)))

    def select(self, rows: Tensor) -> None:
        """See `DecoderState`."""
        for decoder in self.decoders:
            decoder.select(rows)
        self.src_pad = self.src_pad.index_select(0, rows.flatten())
        self.memory = self.memory[:1].expand(rows.numel(), -1, -1)


class Prefixes(Steps):
    """The same steps without a cache: `hidden` of all tokens so far, for models of any class."""

    def __init__(self, model: Translator, src: Tensor, src_pad: Tensor):
        self.model = model
        self.output = None
        self.src = src  # (N, S)
        self.src_pad = src_pad  # (N, S)
        self.tokens = src.new_empty(len(src), 0)  # (N, T) so far
        self.drop_at = 0.0  # copying costs little here

    def hidden(self, tokens: Tensor, position: int) -> Tensor:
        """See `Steps`."""
        self.tokens = torch.cat([self.tokens, tokens[:, None]], 1)
        return self.model.hidden(self.src, self.src_pad, self.tokens)[:, -1]

    def select(self, rows: Tensor) -> None:
        """See `DecoderState`."""
        rows = rows.flatten()
        self.src = self.src.index_select(0, rows)
        self.src_pad = self.src_pad.index_select(0, rows)
        self.tokens = self.tokens.index_select(0, rows)


# ---------------------------------------------------------------- which steps a model can take


class Decoder:
    """A model made ready to decode with its current weights; after a training step make a new one.

    `compiled`: use the C++ of fast/ for the model's encoder, decoder and output layer where it can
    compute them. `int8`: C++ rounds weights and inputs of linear layers to 8 bits; raises
    `UserError` where that is not possible. `log` receives a note where decoding is slower than it
    could be.
    """

    def __init__(
        self,
        model: Translator,
        *,
        compiled: bool = True,
        int8: bool = False,
        log: Callable[[str], None] = lambda line: None,
    ):
        self.model = model
        self.output: fast.CompiledOutput | None = None
        decoders = [part for part in model.modules() if isinstance(part, nn.TransformerDecoder)]
        # PyTorch's modules, and those that stand in their place while decoding.
        self.replaced: dict[nn.Module, nn.Module] = {}
        reason = _why_no_cache(model, decoders)
        if not reason:
            self.replaced = {decoder: CachedDecoder.of(decoder) for decoder in decoders}
            reason = self.why_no_agreement()
        if reason:
            self.replaced = {}
            log(f"note: decoding is slow: every step computes all tokens anew ({reason})")
        on_cpu = next(model.parameters()).device.type == "cpu"
        if not reason and on_cpu and (compiled or int8):
            reason = self.compile()
            reason = self.undo_cpp_if_wrong(decoders) or reason
            if int8 and not reason:
                reason = self.compile(int8=True)
            if reason:
                log(f"note: decoding is slower than it could be: {reason}")
        if int8 and (reason or not on_cpu):
            reason = reason or "the device is not a CPU"
            raise UserError(
                f"--precision int8: {reason}; it needs Linux, g++, a CPU with AVX-512 VNNI, "
                "PyTorch's own layers and sizes that are multiples of 16; use --precision fp32"
            )

    def undo_cpp_if_wrong(self, decoders: list[nn.TransformerDecoder]) -> str:
        """Take PyTorch's operations again if C++ gives other results; returns why.

        The compiled encoder computes nothing for padding: a model whose `encode` or `decode` looks
        at padding sees zeros there.
        """
        reason = self.why_no_agreement()
        if reason:
            self.replaced = {decoder: CachedDecoder.of(decoder) for decoder in decoders}
            self.output = None
            reason = "fast/ is not used (C++ gives other results; does the model look at padding?)"
        return reason

    def compile(self, int8: bool = False) -> str:
        """Take C++ for each part that it can compute; returns the first reason against one."""
        if torch.is_autocast_enabled("cpu"):
            return "fast/ is not used (the precision is not fp32)"
        reasons = []
        for name, part in fast.coders(self.model):
            reason = fast.why_not_compiled(part, int8)
            if reason:
                reasons.append(f"fast/ is not used for {name} ({reason})")
            elif isinstance(part, nn.TransformerEncoder):
                self.replaced[part] = fast.CompiledEncoder.of(part, int8)
            else:
                self.replaced[part] = fast.CompiledDecoder.of(part, int8)
        output = self.model.output
        reason = fast.why_not_compiled(output, int8)
        with _comparing(self.model):
            is_sliceable = fast.can_slice(self.model.logits, output)
        if not reason and not is_sliceable:
            reason = "`logits` does more than to call it"
        if reason:
            reasons.append(f"fast/ is not used for output ({reason})")
        else:
            self.output = fast.CompiledOutput(output, int8)
        return reasons[0] if reasons else ""

    @torch.inference_mode()
    def start(self, src: Tensor, src_pad: Tensor) -> DecoderState:
        """Encode (B, S) sources; returns the steps of their decoding, with one row for each."""
        if not self.replaced:
            return Prefixes(self.model, src, src_pad)
        parts = {
            part: part_here if isinstance(part, nn.TransformerEncoder) else part_here.empty()
            for part, part_here in self.replaced.items()
        }
        decoders = [part for part in parts.values() if isinstance(part, nn.TransformerDecoder)]
        return Steps(_with_parts(self.model, parts), decoders, self.output, src, src_pad)

    @torch.inference_mode()
    def why_no_agreement(self) -> str:
        """Why steps with a cache are not the model's own; empty if they are.

        Whatever happens inside the decoder, a cache gives the same. But a reader may have written a
        `decode` that looks at several positions at once or at the memory, or changed `hidden`.
        Made-up sentences are decoded in both ways, and every number is compared. In the middle rows
        change places, as in beam search, and one is dropped.
        """
        model = self.model
        device = next(model.parameters()).device
        length = min(12, model.config.max_length)
        ids = torch.arange(4 * length, device=device).view(4, length)
        src = ids % model.config.source_vocab
        tgt = ids % model.config.target_vocab
        lengths = torch.linspace(1, length, 4, device=device).long()
        src_pad = torch.arange(length, device=device) >= lengths[:, None]
        kept = torch.tensor([[3], [0], [1]], device=device)  # (sentences, hypotheses)
        with _comparing(model):
            prefixes = Prefixes(model, src, src_pad)
            steps = self.start(src, src_pad)
            for position in range(length):
                expected = prefixes.hidden(tgt[:, position], position)
                try:
                    found = steps.hidden(tgt[:, position], position)
                    if position == length // 2:
                        steps.select(kept)
                except Exception as error:
                    return f"`decode` with one token ends with {type(error).__name__}: {error}"
                if not _same_numbers(found, expected):
                    return "`decode` of one token is not the end of `hidden` of all tokens"
                if position == length // 2:
                    prefixes.select(kept)
                    tgt = tgt[kept.flatten()]
        return ""


def _why_no_cache(model: Translator, decoders: list[nn.TransformerDecoder]) -> str:
    """Why `CachedDecoder` cannot stand for the decoders of this model; empty if it can."""
    if "first" not in inspect.signature(model.decode).parameters:
        return "`decode` has no argument `first`"
    stock = [module for _, module in fast.coders(model)]
    if not decoders:
        return "the model has no nn.TransformerDecoder"
    for decoder in decoders:
        if decoder not in stock:
            return f"{type(decoder).__name__} is not nn.TransformerDecoder itself"
        for layer in decoder.layers:
            if type(layer) is not nn.TransformerDecoderLayer:
                return f"{type(layer).__name__} is not nn.TransformerDecoderLayer itself"
            for attention in (layer.self_attn, layer.multihead_attn):
                if type(attention) is not nn.MultiheadAttention:
                    return f"{type(attention).__name__} is not nn.MultiheadAttention itself"
                if attention.bias_k is not None or attention.add_zero_attn:
                    return "an attention has additional keys"
                if attention.in_proj_weight is None or not attention.batch_first:
                    return "an attention has other sizes or (T, B, D) inputs"
            called = (decoder, layer, layer.self_attn, layer.multihead_attn)
            if any(fast.has_hooks(module) for module in called):
                return "the decoder has a hook"
    return ""


def _with_parts(module: nn.Module, parts: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy of a model with other modules in the place of some; it shares all weights."""
    if module in parts:
        return parts[module]
    children = {
        name: None if child is None else _with_parts(child, parts)
        for name, child in module._modules.items()
    }
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    copy: nn.Module = object.__new__(type(module))
    copy.__dict__ = module.__dict__ | {"_modules": children}
    return copy


def _same_numbers(found: Tensor, expected: Tensor) -> bool:
    """Whether they differ by rounding only, row by row: (N, D), (N, D).

    Rounding alone gives about 1e-6 of the largest number of a row.
    """
    if found.shape != expected.shape:
        return False
    limits = 1e-3 * expected.abs().amax(-1, keepdim=True)
    # If both are nan, the weights are, and the steps are not to blame.
    both_nan = found.isnan() & expected.isnan()
    return bool((((found - expected).abs() <= limits) | both_nan).all())


@contextmanager
def _comparing(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode and in full precision.

    Afterwards every module is in training or evaluation mode as before: a part that does not learn
    may be in evaluation mode while the rest of the model trains.
    """
    device = next(model.parameters()).device.type
    modes = {module: module.training for module in model.modules()}
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no products rounded to TF32 or bf16
    try:
        with torch.autocast(device, enabled=False):
            model.eval()
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for module, training in modes.items():
            module.training = training


# ---------------------------------------------------------------- the two searches


@torch.inference_mode()
def greedy(state: DecoderState, limits: Tensor, bos: int, eos: int) -> Tensor:
    """The likeliest token at every step: ids (B, T), padded with eos.

    `limits`, (B,), are the most tokens that each sentence may have.
    """
    device = limits.device
    longest = int(limits.max())
    output = torch.full((len(limits), longest), eos, device=device)
    # A row of the state for each sentence that is still decoded, and its row in `output`.
    sentences = torch.arange(len(limits), device=device)
    tokens = torch.full_like(sentences, bos)
    finished = torch.zeros_like(sentences, dtype=torch.bool)
    for position in range(longest):
        tokens = state.next_tokens(tokens, position)
        tokens = tokens.masked_fill(finished, eos)
        output[sentences, position] = tokens
        finished |= (tokens == eos) | (limits == position + 1)
        if not should_check(position, device):
            continue
        active = torch.nonzero(~finished).squeeze(1)
        if len(active) == 0:
            break
        if len(active) < (1 - state.drop_at) * len(finished):
            state.select(active[:, None])
            sentences = sentences[active]
            limits = limits[active]
            tokens = tokens[active]
            finished = finished[active]
    return output


@dataclass
class Hypotheses:
    """M hypotheses of each of B sentences, as beam search extends them together."""

    tokens: Tensor  # (B, M, 1 + T) ids; the first one is bos
    scores: Tensor  # (B, M)

    def best(self, count: int) -> tuple["Hypotheses", Tensor]:
        """The `count` best of each sentence, best first, and their indices among the M, (B, K)."""
        scores, index = self.scores.topk(min(count, self.scores.size(1)))
        return Hypotheses(_take_hypotheses(self.tokens, index), scores), index

    def of_sentences(self, index: Tensor) -> "Hypotheses":
        """The hypotheses of some of the sentences."""
        return Hypotheses(self.tokens[index], self.scores[index])


def _take_hypotheses(tokens: Tensor, index: Tensor) -> Tensor:
    """(B, M, T) and indices among the M, (B, K) → (B, K, T)"""
    index = index[:, :, None].expand(-1, -1, tokens.size(2))  # the same for all positions
    return tokens.gather(1, index)


@torch.inference_mode()
def beam_search(
    state: DecoderState, limits: Tensor, bos: int, eos: int, beam: int, length_penalty: float
) -> tuple[Tensor, Tensor]:
    """The K = `beam` best hypotheses of each sentence, best first.

    Returns ids (B, K, T), padded with eos, and scores (B, K): log-probability divided by
    length ** length_penalty, the end token counted; -inf where there are fewer than K. With a
    penalty of 1 that is the mean per token, whatever the length (Koehn and Knowles 2017).

    Of the continuations of each step, those that end while they are among the K best are finished;
    those that end further down are dropped. The K best of the rest stay active. The search for a
    sentence is done when K hypotheses have finished and the best of them scores at least as well as
    every active one does at its present length: weak hypotheses that end early must not cut off a
    strong one. `limits` as in `greedy`, which this equals with K = 1.
    """
    device = limits.device
    count = len(limits)
    longest = int(limits.max())
    output = torch.full((count, beam, longest), eos, device=device)
    output_scores = torch.full((count, beam), -math.inf, dtype=torch.float64, device=device)

    # The search for each sentence starts with one active hypothesis, which has no tokens yet and
    # the log-probability 0, and with K empty places for finished ones.
    sentences = torch.arange(count, device=device)  # their rows in `output`
    done = torch.zeros(count, dtype=torch.bool, device=device)
    begin = torch.full((count, 1, 1), bos, device=device)
    active = Hypotheses(begin, output_scores.new_zeros(count, 1))
    finished = Hypotheses(begin.expand(-1, beam, -1), output_scores)

    for length in range(1, longest + 1):
        # Each of the K active hypotheses has one continuation that ends it, by eos. So at most K of
        # the 2·K best candidates have ended, and at least K can go on.
        candidates, parents = _expand(state, active, 2 * beam)
        ended = candidates.tokens[:, :, -1] == eos  # (B, 2K)
        at_limit = limits[sentences] == length  # (B,)
        penalty = length**length_penalty

        # Of the K best candidates, those that end, or are cut at the limit, may be finished ones.
        stopped = (ended | at_limit[:, None]) & ~done[:, None]
        scores = (candidates.scores / penalty).masked_fill(~stopped, -math.inf)
        newly_finished = Hypotheses(candidates.tokens[:, :beam], scores[:, :beam])
        finished = _merge_finished(finished, newly_finished, eos)

        # The K best of those that have not ended stay active.
        width = active.scores.size(1)  # rows of a sentence: 1, then K
        scores = candidates.scores.masked_fill(ended, -math.inf)
        active, chosen = Hypotheses(candidates.tokens, scores).best(beam)
        first_rows = width * torch.arange(len(sentences), device=device)
        rows = first_rows[:, None] + parents.gather(1, chosen)  # (B, K), to keep in the cache

        has_all = finished.scores[:, -1] > -math.inf
        best_is_finished = finished.scores[:, 0] >= active.scores[:, 0] / penalty
        done |= at_limit | (has_all & best_is_finished)
        if should_check(length - 1, device) and done.any():
            output[sentences[done], :, :length] = finished.tokens[done, :, 1:]
            output_scores[sentences[done]] = finished.scores[done]
            remaining = torch.nonzero(~done).squeeze(1)
            active = active.of_sentences(remaining)
            finished = finished.of_sentences(remaining)
            sentences = sentences[remaining]
            rows = rows[remaining]
            done = done[remaining]
            if len(sentences) == 0:
                break
        state.select(rows)
    # The searches for the others, if any, are done now, at the longest limit.
    output[sentences, :, :length] = finished.tokens[:, :, 1:]
    output_scores[sentences] = finished.scores
    return output, output_scores


def _expand(state: DecoderState, active: Hypotheses, count: int) -> tuple[Hypotheses, Tensor]:
    """The `count` likeliest continuations of each sentence's hypotheses by one token, best first.

    Returns them, scored by their log-probabilities, and the index of the active hypothesis that
    each continues, (B, C).
    """
    last_tokens = active.tokens[:, :, -1].flatten()  # (N,)
    position = active.tokens.size(2) - 1
    log_probabilities, ids = state.top_tokens(last_tokens, position, count)  # (N, C)
    sums = active.scores[:, :, None] + log_probabilities.unflatten(0, active.scores.shape)
    sums = sums.flatten(1)  # (B, K·C)
    scores, index = sums.topk(min(count, sums.size(1)))  # (B, C)
    parents = index // ids.size(1)
    new_tokens = ids.view(len(sums), -1).gather(1, index)
    prefixes = _take_hypotheses(active.tokens, parents)
    tokens = torch.cat([prefixes, new_tokens[:, :, None]], 2)  # one longer
    return Hypotheses(tokens, scores), parents


def _merge_finished(finished: Hypotheses, newly_finished: Hypotheses, eos: int) -> Hypotheses:
    """The best of both, as many as there are places; the earlier ones are one token shorter."""
    padded = F.pad(finished.tokens, (0, 1), value=eos)
    tokens = torch.cat([padded, newly_finished.tokens], 1)
    scores = torch.cat([finished.scores, newly_finished.scores], 1)
    best, _ = Hypotheses(tokens, scores).best(finished.scores.size(1))
    return best


def should_check(position: int, device: torch.device) -> bool:
    """Whether to check, after this step, which sentences are done."""
    return device.type == "cpu" or (position + 1) % CHECK_EVERY == 0


# ---------------------------------------------------------------- many sentences


def output_limit(source_tokens: Tensor, max_length: int) -> Tensor:
    """The most tokens an output may have: 1.5 × source + 10, as far as positions reach.

    References have about 1.2 tokens for each of the source.
    """
    return (source_tokens * 3 // 2 + 10).clamp(max=max_length)


@dataclass
class Hypothesis:
    """One output for a source."""

    tokens: list[int]  # without begin and end
    score: float | None = None  # see `beam_search`; greedy search has none
    ended: bool = True  # False: it was cut at the limit
    text: str = ""  # set by translation.py


def plan_batches(
    lengths: list[int], batch_size: int, tokens_per_batch: int, workers: int = 1
) -> list[list[int]]:
    """Indices of sentences in batches of similar length, of about `batch_size` sentences each.

    A batch of long sentences is smaller: at most `tokens_per_batch` tokens, padding included.
    Longest first, so that what does not fit in memory fails at once. With many sentences, every
    worker gets the same number of batches. Empty sentences are in no batch.
    """
    order = [index for index, length in enumerate(lengths) if length]
    order.sort(key=lambda index: -lengths[index])
    share = math.ceil(len(order) / workers)  # sentences of a worker
    batches_of_worker = max(1, round(share / batch_size))
    batch_size = max(1, math.ceil(share / batches_of_worker))
    batches = []
    first = 0
    while first < len(order):
        longest = lengths[order[first]] + 1  # with its end token
        fitting = max(1, tokens_per_batch // longest)
        batch = order[first : first + min(batch_size, fitting)]
        batches.append(batch)
        first += len(batch)
    return batches


def plan_for(
    model: Translator, lengths: list[int], beam: int = 1, ranks: int = 1
) -> list[list[int]]:
    """Batches of the size that suits the model's device, for all ranks."""
    device = next(model.parameters()).device.type
    workers = ranks
    if device == "cpu":
        workers *= torch.get_num_threads()  # every thread decodes batches of its own
    batch_size = max(1, ROWS_PER_BATCH[device] // beam)
    return plan_batches(lengths, batch_size, TOKENS_PER_BATCH[device] // beam, workers)


def search(
    decoder: Decoder,
    sources: list[list[int]],
    collate: Collate,
    *,
    beam: int = 1,
    nbest: int = 0,
    length_penalty: float = 1.0,
    batches: list[list[int]] | None = None,
    progress: Callable = iter,
) -> list[list[Hypothesis]]:
    """Translate token ids, without begin and end: the best hypotheses of each source, best first.

    Each source gets one hypothesis, or the `nbest` best, at most `beam`; an empty source gets an
    empty one. With `beam` 1 and no `nbest` the search is greedy and gives no scores.
    `batches`: which sources to translate, all by default; others get an empty hypothesis.
    `progress` wraps the batches, as tqdm does.
    """
    model = decoder.model
    device = next(model.parameters()).device
    model.eval()
    bos = collate.target_ids["bos"]
    eos = collate.target_ids["eos"]
    scored = beam > 1 or nbest > 0
    if batches is None:
        batches = plan_for(model, [len(source) for source in sources], beam)

    def search_batch(batch: list[int]) -> list[list[Hypothesis]]:
        """The hypotheses of the sources with these indices."""
        src, src_pad = collate.pad_sources([sources[index] for index in batch])
        src, src_pad = src.to(device), src_pad.to(device)
        limits = output_limit((~src_pad).sum(1), model.config.max_length)
        state = decoder.start(src, src_pad)
        if not scored:
            ids = greedy(state, limits, bos, eos)
            return to_hypotheses(ids[:, None], None, limits, eos)
        ids, scores = beam_search(state, limits, bos, eos, beam, length_penalty)
        count = max(1, nbest)
        return to_hypotheses(ids[:, :count], scores[:, :count], limits, eos)

    found = [[Hypothesis([], 0.0 if scored else None)] for _ in sources]
    workers = 1
    if device.type == "cpu":
        workers = min(torch.get_num_threads(), len(batches))
    outputs = map_in_threads(search_batch, batches, workers)
    for batch, hypotheses in zip(progress(batches), outputs, strict=True):
        for index, of_sentence in zip(batch, hypotheses, strict=True):
            found[index] = of_sentence
    return found


def to_hypotheses(
    ids: Tensor, scores: Tensor | None, limits: Tensor, eos: int
) -> list[list[Hypothesis]]:
    """The hypotheses of each sentence, cut at their end tokens, or at the sentence's limit.

    Takes ids (B, K, T), scores (B, K), if there are any, and limits (B,).
    """
    if scores is None:
        scores_of_all = [[None] * ids.size(1)] * len(ids)
    else:
        scores_of_all = scores.tolist()
    found = []
    for tokens_of_each, scores_of_each, limit in zip(ids.tolist(), scores_of_all, limits.tolist()):
        hypotheses = []
        for tokens, score in zip(tokens_of_each, scores_of_each):
            if score == -math.inf:  # fewer than K have finished
                continue
            tokens = tokens[:limit]
            ended = eos in tokens
            if ended:
                tokens = tokens[: tokens.index(eos)]
            hypotheses.append(Hypothesis(tokens, score, ended))
        found.append(hypotheses)
    return found


def map_in_threads(function: Callable, items: list, workers: int) -> Iterator:
    """`function` of each item, in order, by `workers` Python threads that share PyTorch's threads.

    Two batches side by side, with one thread each, finish sooner than one after the other with two
    threads: a decoding step is many small operations, most too small to divide. Python's global
    lock (GIL) does not hinder them: PyTorch's operations run without it.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    # Autocast is thread-local: copy the caller's setting.
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def work(item):
        """Call the function with the caller's autocast."""
        with torch.autocast("cpu", dtype, enabled=autocast):
            return function(item)

    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers)
    torch.set_num_threads(max(1, threads // workers))  # for Python threads that start from now on
    try:
        yield from pool.map(work, items)
    finally:
        # After an error or Ctrl-C, batches that have not begun are dropped.
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
