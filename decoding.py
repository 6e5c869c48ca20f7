"""Greedy and beam search with a key/value cache, over the weights of a stock `nn.Transformer`.

    hypotheses = search(model, sources, collate, beam=1)      # lists of token ids in, lists of token ids out

A decoder layer needs, for one new token, only that token's query and the keys and values of all tokens up to it. The stock
layers recompute those at every step; here they are kept: a step projects one token, and only its attention grows with the length.
Letters in shape comments: B rows of a batch, K beams, S source tokens, T target tokens, D model width, V vocabulary,
H heads, W = D / H.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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

ROWS_PER_BATCH = 128  # sentences decoded at once on a CPU; a GPU takes four times as many
TOKENS_PER_BATCH = 2**18  # source tokens, padding included, that a GPU decodes at once
CHECK_EVERY = 8  # steps between looks at which rows are done on a GPU: each look waits for it


@dataclass
class Cache:
    """Keys and values of every decoder layer, each (B, H, tokens, W). The tokens' own grow, the source's stay."""

    model: Translator
    own_keys: list[Tensor]
    own_values: list[Tensor]
    source_keys: list[Tensor]
    source_values: list[Tensor]
    # (B, 1, 1, S) True = look here: `scaled_dot_product_attention` means the opposite of nn.Transformer
    source_mask: Tensor
    # Finished rows leave the batch when they are this share of it: earlier, moving the others would cost more.
    shrink_at: ClassVar[float] = 0.25

    def next_tokens(self, tokens: Tensor, position: int) -> Tensor:
        """Feed (B,) tokens at one position; → (B,) the likeliest next ones."""
        return step(self.model, self, tokens, position).argmax(-1)

    def append(
        self, index: int, position: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keep a layer's key and value of one position, (B, H, 1, W); → those of all positions up to it."""
        keys, values = self.own_keys[index], self.own_values[index]
        keys[:, :, position], values[:, :, position] = key[:, :, 0], value[:, :, 0]
        return keys[:, :, : position + 1], values[:, :, : position + 1]

    def select(self, rows: Tensor, source_too: bool = True) -> None:
        """Keep these rows, in this order. Beams of one sentence share a source, so reordering them leaves it alone."""
        self.own_keys = [keys.index_select(0, rows) for keys in self.own_keys]
        self.own_values = [values.index_select(0, rows) for values in self.own_values]
        if source_too:
            self.source_keys = [keys.index_select(0, rows) for keys in self.source_keys]
            self.source_values = [values.index_select(0, rows) for values in self.source_values]
            self.source_mask = self.source_mask.index_select(0, rows)


def start(model: Translator, src: Tensor, src_pad: Tensor, length: int, copies: int = 1) -> Cache:
    """Encode (B, S) and make room for `length` tokens; every row `copies` times."""
    memory = model.encode(src, src_pad)  # (B, S, D)
    cache = Cache(model, [], [], [], [], ~src_pad[:, None, None, :].repeat_interleave(copies, 0))
    for layer in model.transformer.decoder.layers:
        keys, values = project(layer.multihead_attn, memory, "kv")
        cache.source_keys.append(keys.repeat_interleave(copies, 0))
        cache.source_values.append(values.repeat_interleave(copies, 0))
        room = (src.size(0) * copies, keys.size(1), length, keys.size(3))
        cache.own_keys.append(keys.new_zeros(room))
        cache.own_values.append(values.new_zeros(room))
    return cache


def step(model: Translator, cache: Cache, tokens: Tensor, position: int) -> Tensor:
    """Feed (B,) tokens at one position; → logits (B, V) of the next ones. The cache grows by one token."""
    x = model.embed(model.target_embedding, tokens[:, None], position)  # (B, 1, D)
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
    # In fp32 even under autocast: bf16 has 8 significant bits, so different tokens would often get equal logits.
    with torch.autocast(x.device.type, enabled=False):
        return model.output(decoder.norm(x[:, 0].to(model.output.weight.dtype)))  # (B, V)


def attend_own(
    layer: nn.TransformerDecoderLayer, x: Tensor, cache: Cache, index: int, position: int
) -> Tensor:
    """Self-attention of the newest token over itself and all before it: (B, 1, D) → (B, 1, D)"""
    query, key, value = project(layer.self_attn, x, "qkv")  # (B, H, 1, W) each
    seen = F.scaled_dot_product_attention(query, *cache.append(index, position, key, value))
    return join_heads(layer.self_attn, seen)


def attend_source(layer: nn.TransformerDecoderLayer, x: Tensor, cache: Cache, index: int) -> Tensor:
    """Attention over the encoded source: (B, 1, D) → (B, 1, D)"""
    (query,) = project(layer.multihead_attn, x, "q")
    keys, values = cache.source_keys[index], cache.source_values[index]
    seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=cache.source_mask)
    return join_heads(layer.multihead_attn, seen)


def feed_forward(layer: nn.TransformerDecoderLayer, x: Tensor) -> Tensor:
    """(B, 1, D) → (B, 1, D)"""
    return layer.linear2(layer.activation(layer.linear1(x)))


def project(attention: nn.MultiheadAttention, x: Tensor, which: str) -> list[Tensor]:
    """(B, T, D) → the wanted ones of query, key, value, each (B, H, T, W).

    `nn.MultiheadAttention` keeps the three weights in one matrix, query on top: "qkv", "q" and "kv" are slices of it.
    """
    first, last = (
        "qkv".index(which[0]) * attention.embed_dim,
        ("qkv".index(which[-1]) + 1) * attention.embed_dim,
    )
    projected = F.linear(
        x, attention.in_proj_weight[first:last], attention.in_proj_bias[first:last]
    )
    heads = projected.unflatten(
        -1, (len(which), attention.num_heads, attention.head_dim)
    )  # (B, T, 1–3, H, W)
    return list(heads.permute(2, 0, 3, 1, 4))


def join_heads(attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """(B, H, T, W) → (B, T, D)"""
    return attention.out_proj(x.transpose(1, 2).flatten(2))


@torch.inference_mode()
def greedy(
    model: Translator,
    src: Tensor,
    src_pad: Tensor,
    limits: Tensor,
    bos: int,
    eos: int,
    steps: Callable | None = None,
) -> Tensor:
    """The likeliest token at every step: (B, S) → (B, T) ids, padded with eos. `limits` (B,) caps each row's tokens.

    `steps`: called in place of `start`, as steps(src, src_pad, length), for a faster cache; see `fast.steps`.
    """
    longest = int(limits.max())
    cache = (steps or partial(start, model))(src, src_pad, longest)
    output = torch.full((len(src), longest), eos, device=src.device)
    rows = torch.arange(
        len(src), device=src.device
    )  # where the rows still in the batch stand in `output`
    tokens = torch.full_like(rows, bos)
    done = torch.zeros_like(rows, dtype=torch.bool)
    for position in range(longest):
        tokens = cache.next_tokens(tokens, position).masked_fill(done, eos)
        output[rows, position] = tokens
        done |= (tokens == eos) | (limits[rows] <= position + 1)
        if src.device.type == "cpu" or position % CHECK_EVERY == CHECK_EVERY - 1:
            going = torch.nonzero(~done).squeeze(1)
            if not len(going):
                break
            if len(going) < (1 - cache.shrink_at) * len(done):
                cache.select(going)
                rows, tokens, done = rows[going], tokens[going], done[going]
    return output


@torch.inference_mode()
def beam_search(
    model: Translator,
    src: Tensor,
    src_pad: Tensor,
    limits: Tensor,
    bos: int,
    eos: int,
    beam: int,
    length_penalty: float,
) -> tuple[Tensor, Tensor]:
    """`beam` hypotheses a sentence, best first: (B, S) → ids (B, K, T) padded with eos, and their scores (B, K).

    A hypothesis is scored by its log-probability divided by ((5 + length) / 6) ** length_penalty (Wu et al. 2016), its end
    token counted. One that ends while among the `beam` best is finished. A sentence is done when `beam` have finished and no
    unfinished one scores better than the best of them: weak ones that end early must not cut off a strong one. Beam 1: greedy.
    """
    batch, longest, device = len(src), int(limits.max()), src.device
    vocabulary = model.config.target_vocab
    cache = start(model, src, src_pad, longest, copies=beam)
    first_row = (
        torch.arange(batch, device=device)[:, None] * beam
    )  # (B, 1) of each sentence's rows in the cache
    scores = torch.full((batch, beam), -math.inf, device=device, dtype=model.output.bias.dtype)
    scores[:, 0] = 0  # the beams begin alike: let one live, or they would all stay alike
    alive = torch.full((batch, beam, longest), eos, device=device)
    finished, finished_scores = (
        alive.clone(),
        torch.full_like(scores, -math.inf),
    )  # the best `beam` so far
    count = torch.zeros(
        batch, dtype=torch.long, device=device
    )  # finished hypotheses of each sentence
    done = torch.zeros(batch, dtype=torch.bool, device=device)
    tokens = torch.full((batch, beam), bos, device=device)
    for position in range(longest):
        logits = step(model, cache, tokens.flatten(), position).view(batch, beam, vocabulary)
        total = scores[:, :, None] + F.log_softmax(logits, -1)  # (B, K, V)
        # 2·K candidates hold at least K that do not end: each beam can end in one way only.
        best, index = total.flatten(1).topk(2 * beam)  # (B, 2K)
        parent, token = index // vocabulary, index % vocabulary
        candidates = alive.gather(1, parent[:, :, None].expand(-1, -1, longest))  # (B, 2K, T)
        candidates[:, :, position] = token
        ends = token == eos
        in_beam = torch.arange(2 * beam, device=device) < beam
        at_limit = (limits == position + 1)[:, None]  # cut short: the beams count as they are
        stops = (ends | at_limit) & in_beam & ~done[:, None]
        penalty = ((5 + position + 1) / 6) ** length_penalty
        penalised = (best / penalty).masked_fill(~stops, -math.inf)
        pool_scores = torch.cat([finished_scores, penalised], 1)  # (B, 3K)
        finished_scores, keep = pool_scores.topk(beam)
        pool = torch.cat([finished, candidates], 1)  # (B, 3K, T)
        finished = pool.gather(1, keep[:, :, None].expand(-1, -1, longest))
        count += stops.sum(1)

        scores, keep = best.masked_fill(ends, -math.inf).topk(beam)  # (B, K) go on
        alive = candidates.gather(1, keep[:, :, None].expand(-1, -1, longest))
        tokens, parent = token.gather(1, keep), parent.gather(1, keep)
        cache.select((first_row + parent).flatten(), source_too=False)
        done |= ((count >= beam) & (finished_scores[:, 0] >= scores[:, 0] / penalty)) | (
            limits <= position + 1
        )
        if (device.type == "cpu" or position % CHECK_EVERY == CHECK_EVERY - 1) and bool(done.all()):
            break
    return finished, finished_scores


def output_limit(source_tokens: Tensor, max_length: int) -> Tensor:
    """The most tokens an output may have: 1.5 × source + 10 (references: some 1.2 ×), positions permitting."""
    return (source_tokens * 3 // 2 + 10).clamp(max=max_length)


@dataclass
class Hypotheses:
    """What `search` found, in the order of the sources."""

    tokens: list[list[int]]  # without begin and end
    capped: int  # outputs that reached the limit without ending


def plan_batches(
    lengths: list[int], rows: int, workers: int = 1, copies: int = 1
) -> list[list[int]]:
    """Sentence numbers in batches of similar length, longest first: what does not fit in memory fails at once.

    About `rows` sentences in a batch; where there are many, every worker gets as many batches, all of about one size.
    """
    order = sorted(
        (row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row]
    )
    share = math.ceil(len(order) / workers)  # sentences of a worker
    rows = max(1, math.ceil(share / max(1, round(share / rows))))  # in each of its batches
    batches, first = [], 0
    while first < len(order):
        fitting = max(1, TOKENS_PER_BATCH // copies // (lengths[order[first]] + 1))
        batches.append(order[first : first + min(rows, fitting)])
        first += len(batches[-1])
    return batches


def plan_for(
    model: Translator, lengths: list[int], beam: int = 1, ranks: int = 1
) -> list[list[int]]:
    """Batches for the model's device, of all ranks: on a CPU every thread decodes some of its own."""
    if next(model.parameters()).device.type == "cpu":
        return plan_batches(
            lengths, max(1, ROWS_PER_BATCH // beam), ranks * torch.get_num_threads()
        )
    return plan_batches(lengths, max(1, 4 * ROWS_PER_BATCH // beam), ranks, copies=beam)


def search(
    model: Translator,
    sources: list[list[int]],
    collate: Collate,
    *,
    beam: int = 1,
    length_penalty: float = 1.5,
    batches: list[list[int]] | None = None,
    steps: Callable | None = None,
    progress: Callable = iter,
) -> Hypotheses:
    """Translate token ids, without begin and end, into token ids. An empty source gives an empty output.

    `batches`: which rows to do (all by default); others come back empty. `progress` wraps them, as tqdm does.
    """
    device = next(model.parameters()).device
    model.eval()
    bos, eos = collate.target_ids["bos"], collate.target_ids["eos"]
    if batches is None:
        batches = plan_for(model, list(map(len, sources)), beam)

    def search_batch(rows: list[int]) -> tuple[list[list[int]], list[int]]:
        src, src_pad = (
            tensor.to(device) for tensor in collate.pad_sources([sources[row] for row in rows])
        )
        limits = output_limit((~src_pad).sum(1), model.config.max_length)
        if beam == 1:
            output = greedy(model, src, src_pad, limits, bos, eos, steps)
        else:
            output = beam_search(model, src, src_pad, limits, bos, eos, beam, length_penalty)[0][
                :, 0
            ]
        return output.tolist(), limits.tolist()

    hypotheses = Hypotheses([[] for _ in sources], 0)
    workers = min(torch.get_num_threads(), len(batches)) if device.type == "cpu" else 1
    outputs = map_in_threads(search_batch, batches, workers)
    for rows, (output, limits) in zip(progress(batches), outputs, strict=True):
        for row, tokens, limit in zip(rows, output, limits):
            ended = eos in tokens[:limit]
            hypotheses.tokens[row] = tokens[: tokens.index(eos)] if ended else tokens[:limit]
            hypotheses.capped += not ended
    return hypotheses


def map_in_threads(function: Callable, items: list, workers: int) -> Iterator:
    """`function` of each item, in order, by so many Python threads, which share out PyTorch's threads.

    Two batches with one thread each finish before one batch after the other with two: a decoding step is many small
    operations, most too small to divide. Python's global lock (GIL) is no hindrance: PyTorch's operations run without it.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    # Autocast is a thread's own affair: the workers are to have the caller's.
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def work(item):
        with torch.autocast("cpu", dtype, enabled=autocast):
            return function(item)

    threads, pool = torch.get_num_threads(), ThreadPoolExecutor(workers)
    torch.set_num_threads(max(1, threads // workers))  # for every Python thread begun from here on
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(
            cancel_futures=True
        )  # an error or Ctrl-C: the batches that wait are not begun
        torch.set_num_threads(threads)


@dataclass
class Translations:
    """Texts in the order of the lines, and what a reader should know of them."""

    texts: list[str]
    tokens: int  # produced, end tokens included
    capped: int  # outputs that reached the limit without ending
    cut: int  # sources longer than the model has positions, cut to fit


def translate_lines(
    model: Translator,
    source_tokenizer,
    target_tokenizer,
    lines: list[str],
    *,
    beam: int = 1,
    length_penalty: float = 1.5,
    world: World | None = None,
    steps: Callable | None = None,
    progress: Callable = iter,
) -> Translations | None:
    """Text → text, one output a line. With a `world` of many, the batches are shared out and rank 0 gets the whole."""
    longest = model.config.max_length - 1  # one place is left for the end token
    sources = encode(
        source_tokenizer, [normalise(line) for line in lines], longest + 1
    )  # one more shows what is cut
    cut = sum(len(source) > longest for source in sources)
    sources = [source[:longest] for source in sources]
    collate = Collate(special_ids(source_tokenizer), special_ids(target_tokenizer))
    batches = plan_for(model, list(map(len, sources)), beam, world.size if world else 1)
    if world:  # the plans of unlike machines differ
        batches = world.on_main(lambda plan=batches: plan)[world.rank :: world.size]
    hypotheses = search(
        model,
        sources,
        collate,
        beam=beam,
        length_penalty=length_penalty,
        batches=batches,
        steps=steps,
        progress=progress,
    )
    mine = [row for batch in batches for row in batch]
    texts = dict(zip(mine, decode(target_tokenizer, [hypotheses.tokens[row] for row in mine])))
    tokens = sum(len(hypotheses.tokens[row]) + 1 for row in mine)
    shares = (
        world.gather((texts, tokens, hypotheses.capped))
        if world
        else [(texts, tokens, hypotheses.capped)]
    )
    if shares is None:
        return None
    everything = {row: text for texts, _, _ in shares for row, text in texts.items()}
    texts = [everything[row] if source else "" for row, source in enumerate(sources)]
    return Translations(
        texts, sum(share[1] for share in shares), sum(share[2] for share in shares), cut
    )
