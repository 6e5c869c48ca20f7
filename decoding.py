"""Greedy and beam search with a key/value cache, over the weights of a stock `nn.Transformer`.

    hypotheses = search(model, sources, collate, beam=5)   # lists of token ids in
    best = [sentence[0].tokens for sentence in hypotheses]  # lists of token ids out

A decoder layer needs, for one new token, only that token's query and the keys and values of all
tokens up to it. The stock layers recompute those at every step. Here they are kept in a cache: a
step projects one token, and only its attention grows with the length. `fast.start` takes the
same steps faster, in C++, behind the same three methods: `next_tokens`, `top_tokens`, `select`.
If you change model.py, `step` may no longer compute the same. This is noticed, and `Prefixes` then
calls model.py itself, without a cache.

Letters in shape comments: B sentences, K hypotheses of each (greedy search has one), N = B·K rows
that the decoder sees, S source tokens, T target tokens, D model width, V vocabulary, H heads,
W = D / H.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data import Collate
from engine.distributed import World
from model import Translator
from text.cleaning import normalise
from text.subwords import decode, encode, special_ids

# What is decoded at once. On a CPU each thread decodes a batch of its own, so memory grows with
# their number: for 2**15 tokens, the `lab` model keeps up to 0.5 GiB of keys and values.
ROWS_PER_BATCH = {"cpu": 128, "cuda": 512}  # hypotheses
TOKENS_PER_BATCH = {"cpu": 2**15, "cuda": 2**18}  # hypotheses × source tokens with their padding
CHECK_EVERY = 8  # on a GPU, steps between checks for finished sentences: each check waits for it
CACHE_ROOM = 32  # target tokens by which a cache grows when it is full
CHANGED = (
    "note: decoding is slow: model.py was changed, so every step computes all tokens anew; change "
    "`step` in decoding.py likewise"
)


# ---------------------------------------------------------------- one step of the decoder


@dataclass
class Cache:
    """Keys and values of every decoder layer, and the decoder's steps over them.

    Those of the target, (N, H, T, W), grow by one token each step. Those of the source,
    (B, H, S, W), stay as they are and serve all rows of a sentence.
    """

    model: Translator
    own_keys: list[Tensor]
    own_values: list[Tensor]
    source_keys: list[Tensor]
    source_values: list[Tensor]
    # (B, 1, 1, S), True = look here: the opposite of the masks of nn.Transformer
    source_mask: Tensor
    # Greedy search drops finished rows once they are this share; not earlier, because copying the
    # others costs time.
    drop_at: ClassVar[float] = 0.25

    def next_tokens(self, tokens: Tensor, position: int) -> Tensor:
        """Feed (N,) tokens at one position; returns the likeliest next ones, (N,)."""
        return step(self, tokens, position).argmax(-1)

    def top_tokens(self, tokens: Tensor, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Feed (N,) tokens at one position; returns the likeliest next ones of each, best first.

        Log-probabilities (N, C) and ids (N, C), with C = `count`, at most V.
        """
        log_probabilities = F.log_softmax(step(self, tokens, position), -1)
        return log_probabilities.topk(min(count, log_probabilities.size(1)))

    def append(
        self, index: int, position: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keep a layer's key and value of one position, (N, H, 1, W); returns all up to it."""
        if position == self.own_keys[index].size(2):
            room = (0, 0, 0, CACHE_ROOM)
            self.own_keys[index] = F.pad(self.own_keys[index], room)
            self.own_values[index] = F.pad(self.own_values[index], room)
        keys, values = self.own_keys[index], self.own_values[index]
        keys[:, :, position] = key[:, :, 0]
        values[:, :, position] = value[:, :, 0]
        length = position + 1
        return keys[:, :, :length], values[:, :, :length]

    def select(self, rows: Tensor) -> None:
        """Keep these rows, (sentences, hypotheses): indices into the current rows.

        A line holds rows of one sentence, one of them perhaps several times. Sentences may be left
        out.
        """
        rows_per_sentence = len(self.own_keys[0]) // len(self.source_mask)
        sentences = rows[:, 0] // rows_per_sentence
        rows = rows.flatten()
        self.own_keys = [keys.index_select(0, rows) for keys in self.own_keys]
        self.own_values = [values.index_select(0, rows) for values in self.own_values]
        if len(sentences) == len(self.source_mask):
            return  # no sentence is left out
        self.source_keys = [keys.index_select(0, sentences) for keys in self.source_keys]
        self.source_values = [values.index_select(0, sentences) for values in self.source_values]
        self.source_mask = self.source_mask.index_select(0, sentences)


@torch.inference_mode()
def start(model: Translator, src: Tensor, src_pad: Tensor) -> Cache:
    """Encode (B, S) sources; returns a cache with one row for each."""
    memory = model.encode(src, src_pad)  # (B, S, D)
    cache = Cache(
        model,
        own_keys=[],
        own_values=[],
        source_keys=[],
        source_values=[],
        source_mask=~src_pad[:, None, None, :],
    )
    for layer in model.transformer.decoder.layers:
        keys, values = project(layer.multihead_attn, memory, "kv")
        cache.source_keys.append(keys)
        cache.source_values.append(values)
        cache.own_keys.append(keys[:, :, :0])  # no target tokens yet
        cache.own_values.append(values[:, :, :0])
    return cache


def step(cache: Cache, tokens: Tensor, position: int) -> Tensor:
    """Feed (N,) tokens at one position; returns logits (N, V) of the next ones.

    The cache grows by one token.
    """
    model = cache.model
    x = model.embed(model.target_embedding, tokens[:, None], position)  # (N, 1, D)
    decoder = model.transformer.decoder
    for index, layer in enumerate(decoder.layers):
        if layer.norm_first:
            x = x + attend_own(layer, layer.norm1(x), cache, index, position)
            x = x + attend_source(layer, layer.norm2(x), cache, index)
            x = x + feed_forward(layer, layer.norm3(x))
        else:
            x = layer.norm1(x + attend_own(layer, x, cache, index, position))
            x = layer.norm2(x + attend_source(layer, x, cache, index))
            x = layer.norm3(x + feed_forward(layer, x))
    # In fp32 even under autocast: with bf16's 8 bits, different tokens often get equal logits.
    hidden = x[:, 0].to(model.output.weight.dtype)  # (N, D)
    with torch.autocast(x.device.type, enabled=False):
        return model.output(decoder.norm(hidden))  # (N, V)


def attend_own(
    layer: nn.TransformerDecoderLayer, x: Tensor, cache: Cache, index: int, position: int
) -> Tensor:
    """Self-attention of the newest token over itself and all before it: (N, 1, D) → (N, 1, D)"""
    query, key, value = project(layer.self_attn, x, "qkv")  # (N, H, 1, W) each
    keys, values = cache.append(index, position, key, value)
    attended = F.scaled_dot_product_attention(query, keys, values)
    return join_heads(layer.self_attn, attended)


def attend_source(layer: nn.TransformerDecoderLayer, x: Tensor, cache: Cache, index: int) -> Tensor:
    """Attention over the encoded source: (N, 1, D) → (N, 1, D)"""
    keys, values = cache.source_keys[index], cache.source_values[index]
    # The K rows of a sentence attend to one source as K queries, so that it need not be copied.
    together = x.reshape(keys.size(0), -1, x.size(2))  # (B, K, D)
    (query,) = project(layer.multihead_attn, together, "q")  # (B, H, K, W)
    attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=cache.source_mask)
    return join_heads(layer.multihead_attn, attended).reshape(x.shape)


def feed_forward(layer: nn.TransformerDecoderLayer, x: Tensor) -> Tensor:
    """(N, 1, D) → (N, 1, D)"""
    return layer.linear2(layer.activation(layer.linear1(x)))


def project(attention: nn.MultiheadAttention, x: Tensor, which: str) -> list[Tensor]:
    """(N, T, D) → the wanted ones of query, key and value, "qkv", "q" or "kv": (N, H, T, W) each.

    `nn.MultiheadAttention` keeps the three weights in one matrix, query on top.
    """
    first = "qkv".index(which[0]) * attention.embed_dim
    end = first + len(which) * attention.embed_dim
    weight = attention.in_proj_weight[first:end]
    bias = attention.in_proj_bias[first:end]
    heads = (len(which), attention.num_heads, attention.head_dim)
    projected = F.linear(x, weight, bias).unflatten(-1, heads)  # (N, T, 1 to 3, H, W)
    return list(projected.permute(2, 0, 3, 1, 4))


def join_heads(attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """(N, H, T, W) → (N, T, D)"""
    return attention.out_proj(x.transpose(1, 2).flatten(2))


# ---------------------------------------------------------------- one step of any model


def plain_start(model: Translator, log: Callable = lambda line: None) -> Callable:
    """`start` with this model; for a model that was changed `start_without_cache`, with a note."""
    begin = partial(start, model)
    if computes_the_same(begin, model):
        return begin
    log(CHANGED)
    return partial(start_without_cache, model)


@torch.inference_mode()
def computes_the_same(begin: Callable, model: Translator) -> bool:
    """Whether the steps after begin(src, src_pad) give the probabilities that model.py gives.

    A reader may have changed model.py. The log-probabilities of the likeliest next tokens are
    compared, for made-up sentences.
    """
    config = model.config
    device = next(model.parameters()).device
    length = min(12, config.max_length)
    ids = torch.arange(4 * length, device=device).view(4, length)
    src = ids % config.source_vocab
    tgt = ids % config.target_vocab
    lengths = torch.linspace(1, length, 4, device=device).long()
    src_pad = torch.arange(length, device=device) >= lengths[:, None]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no products rounded to TF32 or bf16
    with restoring_modes(model), torch.autocast(device.type, enabled=False):
        model.eval()
        expected = F.log_softmax(model(src, src_pad, tgt), -1)  # (4, T, V)
        try:
            steps = begin(src, src_pad)
            found = [steps.top_tokens(tgt[:, position], position, 64) for position in range(length)]
        except Exception:  # a layer of another kind has no weights of these names and shapes
            found = []
    torch.set_float32_matmul_precision(before)
    if not found:
        return False
    log_probabilities, best = (torch.stack(parts, 1) for parts in zip(*found))  # (4, T, C)
    expected = expected.gather(2, best)
    difference = (log_probabilities - expected).norm()
    spread = (expected - expected.mean(2, keepdim=True)).norm()
    # Rounding alone gives about 1e-6 of the spread. If both are nan, the weights are, and the steps
    # are not to blame.
    return not bool(difference > 0.02 * spread)


@contextmanager
def restoring_modes(model: nn.Module) -> Iterator[None]:
    """Afterwards every module is in training or evaluation mode again, as it was before.

    A part that does not learn may be in evaluation mode while the rest of the model trains.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@dataclass
class Prefixes:
    """The same steps without a cache: each feeds all tokens so far to `Translator.decode`.

    This is slow, but right for every model.
    """

    model: Translator
    memory: Tensor  # (N, S, D)
    src_pad: Tensor  # (N, S)
    tokens: Tensor  # (N, T) so far
    drop_at: ClassVar[float] = 0.0  # as in `Cache`: copying costs little here

    def next_tokens(self, tokens: Tensor, position: int) -> Tensor:
        """As in `Cache`."""
        return self.logits(tokens).argmax(-1)

    def top_tokens(self, tokens: Tensor, position: int, count: int) -> tuple[Tensor, Tensor]:
        """As in `Cache`."""
        log_probabilities = F.log_softmax(self.logits(tokens), -1)
        return log_probabilities.topk(min(count, log_probabilities.size(1)))

    def logits(self, tokens: Tensor) -> Tensor:
        """Append (N,) tokens; returns logits (N, V) of the next ones."""
        self.tokens = torch.cat([self.tokens, tokens[:, None]], 1)
        hidden = self.model.decode(self.memory, self.src_pad, self.tokens)[:, -1]  # (N, D)
        with torch.autocast(hidden.device.type, enabled=False):  # as in `step`
            return self.model.output(hidden.to(self.model.output.weight.dtype))

    def select(self, rows: Tensor) -> None:
        """As in `Cache`."""
        rows = rows.flatten()
        self.memory = self.memory.index_select(0, rows)
        self.src_pad = self.src_pad.index_select(0, rows)
        self.tokens = self.tokens.index_select(0, rows)


@torch.inference_mode()
def start_without_cache(model: Translator, src: Tensor, src_pad: Tensor) -> Prefixes:
    """Encode (B, S) sources; returns `Prefixes` with one row for each."""
    return Prefixes(model, model.encode(src, src_pad), src_pad, src.new_empty(len(src), 0))


# ---------------------------------------------------------------- the two searches


@torch.inference_mode()
def greedy(cache: Cache, limits: Tensor, bos: int, eos: int) -> Tensor:
    """The likeliest token at every step: ids (B, T), padded with eos.

    `limits`, (B,), are the most tokens that each sentence may have.
    """
    device = limits.device
    longest = int(limits.max())
    output = torch.full((len(limits), longest), eos, device=device)
    # A row of the cache for each sentence that is still decoded, and its row in `output`.
    sentences = torch.arange(len(limits), device=device)
    tokens = torch.full_like(sentences, bos)
    finished = torch.zeros_like(sentences, dtype=torch.bool)
    for position in range(longest):
        tokens = cache.next_tokens(tokens, position)
        tokens = tokens.masked_fill(finished, eos)
        output[sentences, position] = tokens
        at_limit = limits[sentences] == position + 1
        finished |= (tokens == eos) | at_limit
        if not should_check(position, device):
            continue
        active = torch.nonzero(~finished).squeeze(1)
        if len(active) == 0:
            break
        if len(active) < (1 - cache.drop_at) * len(finished):
            cache.select(active[:, None])
            sentences = sentences[active]
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
        return Hypotheses(take_hypotheses(self.tokens, index), scores), index

    def of_sentences(self, index: Tensor) -> "Hypotheses":
        """Those of some of the sentences."""
        return Hypotheses(self.tokens[index], self.scores[index])


def take_hypotheses(tokens: Tensor, index: Tensor) -> Tensor:
    """(B, M, T) and indices among the M, (B, K) → (B, K, T)"""
    index = index[:, :, None].expand(-1, -1, tokens.size(2))  # the same for all positions
    return tokens.gather(1, index)


@torch.inference_mode()
def beam_search(
    cache: Cache, limits: Tensor, bos: int, eos: int, beam: int, length_penalty: float
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
        candidates, parents = expand(cache, active, 2 * beam)
        ended = candidates.tokens[:, :, -1] == eos  # (B, 2K)
        at_limit = limits[sentences] == length  # (B,)
        penalty = length**length_penalty

        # Of the K best candidates, those that end, or are cut at the limit, may be finished ones.
        stopped = (ended | at_limit[:, None]) & ~done[:, None]
        scores = (candidates.scores / penalty).masked_fill(~stopped, -math.inf)
        newly_finished = Hypotheses(candidates.tokens[:, :beam], scores[:, :beam])
        finished = merge_finished(finished, newly_finished, eos)

        # The K best of those that have not ended stay active.
        width = active.scores.size(1)  # rows of a sentence in the cache: 1, then K
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
        cache.select(rows)
    # The searches for the others, if any, are done now, at the longest limit.
    output[sentences, :, :length] = finished.tokens[:, :, 1:]
    output_scores[sentences] = finished.scores
    return output, output_scores


def expand(cache: Cache, active: Hypotheses, count: int) -> tuple[Hypotheses, Tensor]:
    """The `count` likeliest continuations of each sentence's hypotheses by one token, best first.

    Returns them, scored by their log-probabilities, and the index of the active hypothesis that
    each continues, (B, C).
    """
    last_tokens = active.tokens[:, :, -1].flatten()  # (N,)
    position = active.tokens.size(2) - 1
    log_probabilities, ids = cache.top_tokens(last_tokens, position, count)  # (N, C)
    sums = active.scores[:, :, None] + log_probabilities.unflatten(0, active.scores.shape)
    sums = sums.flatten(1)  # (B, K·C)
    scores, index = sums.topk(min(count, sums.size(1)))  # (B, C)
    parents = index // ids.size(1)
    new_tokens = ids.view(len(sums), -1).gather(1, index)
    prefixes = take_hypotheses(active.tokens, parents)
    tokens = torch.cat([prefixes, new_tokens[:, :, None]], 2)  # one longer
    return Hypotheses(tokens, scores), parents


def merge_finished(finished: Hypotheses, newly_finished: Hypotheses, eos: int) -> Hypotheses:
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
    text: str = ""  # set by `translate_lines`


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
    model: Translator,
    sources: list[list[int]],
    collate: Collate,
    *,
    beam: int = 1,
    nbest: int = 0,
    length_penalty: float = 1.0,
    batches: list[list[int]] | None = None,
    begin: Callable | None = None,
    progress: Callable = iter,
) -> list[list[Hypothesis]]:
    """Translate token ids, without begin and end: the best hypotheses of each source, best first.

    Each source gets one hypothesis, or the `nbest` best, at most `beam`; an empty source gets an
    empty one. With `beam` 1 and no `nbest` the search is greedy and gives no scores.
    `batches`: which sources to translate, all by default; others get an empty hypothesis.
    `begin`: (src, src_pad) → a cache; `fast.start(model)`, or `plain_start(model)` by default.
    `progress` wraps the batches, as tqdm does.
    """
    device = next(model.parameters()).device
    model.eval()
    bos = collate.target_ids["bos"]
    eos = collate.target_ids["eos"]
    scored = beam > 1 or nbest > 0
    if batches is None:
        batches = plan_for(model, [len(source) for source in sources], beam)
    begin = begin or plain_start(model)

    def search_batch(batch: list[int]) -> list[list[Hypothesis]]:
        """The hypotheses of the sources with these indices."""
        src, src_pad = collate.pad_sources([sources[index] for index in batch])
        src, src_pad = src.to(device), src_pad.to(device)
        limits = output_limit((~src_pad).sum(1), model.config.max_length)
        cache = begin(src, src_pad)
        if not scored:
            ids = greedy(cache, limits, bos, eos)
            return to_hypotheses(ids[:, None], None, limits, eos)
        ids, scores = beam_search(cache, limits, bos, eos, beam, length_penalty)
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


# ---------------------------------------------------------------- text


@dataclass
class Translations:
    """The translations of lines, in their order, and facts about them."""

    texts: list[str]
    nbest: list[list[tuple[str, float | None]]]  # texts and scores of each line, best first
    tokens: int  # of `texts`, end tokens included
    capped: int  # how many of `texts` reached the limit without ending
    cut: int  # how many sources were cut, because the model has fewer positions


def translate_lines(
    model: Translator,
    source_tokenizer,
    target_tokenizer,
    lines: list[str],
    *,
    beam: int = 1,
    nbest: int = 0,
    length_penalty: float = 1.0,
    world: World | None = None,
    begin: Callable | None = None,
    progress: Callable = iter,
) -> Translations | None:
    """Translate lines of text; the options are those of `search`.

    With a `world` of several ranks each of them translates some of the batches. Rank 0 returns the
    translations of all lines, the others None.
    """
    longest = model.config.max_length - 1  # one place is left for the end token
    # One token more than fits shows which sources are cut.
    clean = [normalise(line) for line in lines]
    sources = encode(source_tokenizer, clean, longest + 1)
    cut = sum(len(source) > longest for source in sources)
    sources = [source[:longest] for source in sources]
    collate = Collate(special_ids(source_tokenizer), special_ids(target_tokenizer))
    lengths = [len(source) for source in sources]
    batches = plan_for(model, lengths, beam, ranks=world.size if world else 1)
    if world:
        # Rank 0 plans for all: machines with different numbers of threads would plan differently.
        batches = world.on_main(lambda: batches)[world.rank :: world.size]
    found = search(
        model,
        sources,
        collate,
        beam=beam,
        nbest=nbest,
        length_penalty=length_penalty,
        batches=batches,
        begin=begin,
        progress=progress,
    )
    # This rank's share of the sentences: index -> hypotheses, now with texts.
    own_share = {index: found[index] for batch in batches for index in batch}
    flat = [hypothesis for of_sentence in own_share.values() for hypothesis in of_sentence]
    texts = decode(target_tokenizer, [hypothesis.tokens for hypothesis in flat])
    for hypothesis, text in zip(flat, texts, strict=True):
        hypothesis.text = text
    shares = world.gather(own_share) if world else [own_share]
    if shares is None:
        return None
    for share in shares:
        for index, hypotheses in share.items():
            found[index] = hypotheses
    # An empty source is in no batch: its hypothesis is empty too, and does not count below.
    best = [hypotheses[0] for hypotheses, source in zip(found, sources) if source]
    return Translations(
        texts=[hypotheses[0].text for hypotheses in found],
        nbest=[[(one.text, one.score) for one in hypotheses] for hypotheses in found],
        tokens=sum(len(hypothesis.tokens) + hypothesis.ended for hypothesis in best),
        capped=sum(not hypothesis.ended for hypothesis in best),
        cut=cut,
    )
