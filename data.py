"""Clean pairs → token ids on disk → batches.

    text = find_text("/opt/minidataset")
    prepared = prepare(text, Path("runs/.cache"))                   # tokenizers and token store; the second time in no time
    sampler = BucketSampler(prepared.train.lengths, tokens_per_batch=4096)
    loader = DataLoader(prepared.train, batch_sampler=sampler, collate_fn=collate_for(prepared))

Tokenised once, before training, into flat arrays that are memory-mapped: 26 million pairs train in the memory of one batch.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Sampler

from engine.errors import UserError
from engine.telemetry import progress
from text.cleaning import absurd_ratio, clean_pairs, held_out_rows, missing_splits, normalise, report
from text.rows import ParallelText
from text.store import TokenizedPairs, TokenWriter
from text.subwords import encode, encode_flat, load_tokenizer, special_ids, train_tokenizer

FORMAT = 2  # of the token store; raise it when its content changes, and old caches are left alone
TOKENIZER_LINES = 200_000  # sentences that a tokenizer is trained on; more change little
CHUNK = 20_000  # sentences tokenised at once
VALIDATION_ROWS = 4000  # rows of validation used while training; evaluate.py scores all


@dataclass
class Prepared:
    """Everything that training needs of the data."""

    folder: Path
    source_tokenizer: object
    target_tokenizer: object
    train: TokenizedPairs
    validation: TokenizedPairs
    validation_rows: list[tuple[str, str]]  # raw, in the order of `validation`
    summary: dict  # counts, sizes


def prepare(
    text: ParallelText, cache: Path, *, source_vocab=0, target_vocab=0, tokenizer="", max_length=512, say=print
):
    """Tokenizers and token store of `text`, from the cache where it holds just these, else made now. → `Prepared`

    The cache key is a hash of the files' content and of every setting that changes the ids. Raises `UserError` when no
    pair is left.
    """
    settings = {
        "format": FORMAT,
        "data": text.fingerprint(),
        "source_vocab": source_vocab,
        "target_vocab": target_vocab,
    }
    settings |= {"tokenizer": _tokenizer_key(tokenizer), "max_length": max_length}
    key = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()
    folder = cache / key
    if (folder / "summary.json").exists() and _is_whole(folder):
        say(f"data: {text.path} ({text.form}), tokenised earlier in {folder}")
    else:
        if folder.exists():
            say(f"data: {folder} is damaged and is made again")
            shutil.rmtree(folder)
        say(f"data: {text.path} ({text.form}), {text.source}→{text.target}; tokenising into {folder}")
        _build(text, folder, source_vocab, target_vocab, tokenizer, max_length, say)
    return load_prepared(folder)


def load_prepared(folder: Path) -> Prepared:
    """What `prepare` left in `folder`."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lines = (folder / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [tuple(json.loads(line)) for line in lines]
    tokenizers = {side: load_tokenizer(str(folder / "tokenizer" / side)) for side in ("source", "target")}
    return Prepared(
        folder, tokenizers["source"], tokenizers["target"], TokenizedPairs(folder / "train"),
        TokenizedPairs(folder / "validation"), rows, summary,
    )  # fmt: skip


def _build(text, folder, source_vocab, target_vocab, tokenizer, max_length, say) -> None:
    """Clean, train tokenizers, tokenise; in a temporary folder that gets its name when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.with_name(f".building-{folder.name}-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        held_out = held_out_rows(text)
        for split in missing_splits(text):
            say(f"data: no {split} split; {len(held_out[split]):,} pairs are cut from train by a hash of the pair")
        counts = Counter()
        lines = building / "clean.txt"  # source and target of a pair on two lines; no clean text holds a line break
        with open(lines, "w", encoding="utf-8") as file:
            for source, target in progress(
                clean_pairs(text, held_out, max_length, counts), desc="cleaning", unit=" pairs"
            ):
                file.write(f"{source}\n{target}\n")
                counts["kept"] += 1
        _require_pairs(text, counts, counts["kept"])
        sizes = [size or default_vocabulary(counts["kept"]) for size in (source_vocab, target_vocab)]
        tokenizers = _make_tokenizers(lines, counts["kept"], tokenizer, sizes, say)
        for side, one in tokenizers.items():
            one.save_pretrained(building / "tokenizer" / side)

        unknown = _write_train(lines, building / "train", tokenizers, max_length, counts)
        _require_pairs(text, counts, counts["kept"])
        if unknown > 0.01:
            raise UserError(
                f"tokenizer {tokenizer} does not know {unknown:.1%} of the tokens of {text.path}; choose one made for "
                f"{text.source} and {text.target}, or leave --tokenizer out"
            )
        rows = held_out["validation"][:VALIDATION_ROWS]
        if not rows:
            raise UserError(
                f"{text.path}: the validation split has no rows; add some, or remove the file to have it cut"
            )
        _write_validation(rows, building, tokenizers, max_length, say)
        lines.unlink()
        say(report(counts))
        say(f"tokens: source vocabulary {len(tokenizers['source']):,}, target vocabulary {len(tokenizers['target']):,}, "
            f"unknown {unknown:.2%}")  # fmt: skip
        files = {str(path.relative_to(building)): path.stat().st_size for path in building.rglob("*") if path.is_file()}
        summary = {"counts": dict(counts), "path": text.path, "key": folder.name, "unknown": unknown, "files": files}
        (building / "summary.json").write_text(json.dumps(summary, ensure_ascii=False, indent=1), encoding="utf-8")
        try:
            os.replace(building, folder)
        except OSError:  # another run made the same in the meantime
            if not _is_whole(folder):
                raise
    except OSError as error:
        error.filename = error.filename or str(building)  # a write, unlike an open, does not say where
        raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def default_vocabulary(pairs: int) -> int:
    """8,000 tokens, and fewer for little text, so that each is seen often enough to be learned."""
    return min(8000, max(1000, pairs // 5))


def _make_tokenizers(lines: Path, pairs: int, name: str, sizes: list[int], say) -> dict:
    if name:
        both = load_tokenizer(name)
        return {"source": both, "target": both}
    every = -(-pairs // TOKENIZER_LINES)
    tokenizers = {}
    for first, side, size in ((0, "source", sizes[0]), (1, "target", sizes[1])):
        say(f"tokens: training the {side} tokenizer on {-(-pairs // every):,} sentences")
        with open(lines, encoding="utf-8") as file:
            sample = (line.rstrip("\n") for line in islice(file, first, None, 2 * every))
            tokenizers[side] = train_tokenizer(sample, size)
    return tokenizers


def _write_train(lines: Path, folder: Path, tokenizers: dict, max_length: int, counts: Counter) -> float:
    """Tokenise the clean pairs, dropping the over-long and the lopsided. Returns the share of unknown tokens."""
    writer = TokenWriter(folder, {side: len(one) for side, one in tokenizers.items()})
    unknown = total = 0
    bar = progress(total=counts["kept"], desc="tokenising", unit=" pairs")
    counts["kept"] = 0
    with open(lines, encoding="utf-8") as file:
        while chunk := [line.rstrip("\n") for line in islice(file, 2 * CHUNK)]:
            encoded = {side: encode_flat(tokenizers[side], chunk[first::2]) for first, side in enumerate(tokenizers)}
            kept = _worth_keeping(*(lengths for _, lengths in encoded.values()), max_length, counts)
            for side, (ids, lengths) in encoded.items():
                ids = ids[np.repeat(kept, lengths)]
                writer.write_flat(side, ids, lengths[kept])
                unknown += int((ids == tokenizers[side].unk_token_id).sum()) if tokenizers[side].unk_token else 0
                total += len(ids)
            bar.update(len(kept))
    bar.close()
    writer.close()
    return unknown / max(total, 1)


def _worth_keeping(source: np.ndarray, target: np.ndarray, max_length: int, counts: Counter) -> np.ndarray:
    """Which pairs of these lengths to keep, (pairs,) bool; each of the others is counted under one reason."""
    too_long = np.maximum(source, target) >= max_length  # one place is left for begin or end
    lopsided = absurd_ratio(source, target) & ~too_long
    empty = (np.minimum(source, target) == 0) & ~too_long & ~lopsided
    kept = ~(too_long | lopsided | empty)
    for reason, pairs in {"too long": too_long, "length ratio": lopsided, "empty": empty, "kept": kept}.items():
        counts.update({reason: int(pairs.sum())} if pairs.any() else {})
    return kept


def _write_validation(rows, building: Path, tokenizers: dict, max_length: int, say) -> None:
    writer = TokenWriter(building / "validation", {side: len(one) for side, one in tokenizers.items()})
    for index, side in enumerate(("source", "target")):
        encoded = encode(tokenizers[side], [normalise(row[index]) for row in rows])
        long = sum(len(row) >= max_length for row in encoded)
        if long:
            say(f"validation: {long} {side} sentences are cut to {max_length - 1} tokens for the validation loss")
        writer.write(side, [row[: max_length - 1] for row in encoded])
    writer.close()
    with open(building / "validation.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _require_pairs(text: ParallelText, counts: Counter, kept: int) -> None:
    if kept < 2:
        raise UserError(f"{text.path}: {kept} training pairs left, two are the least; {report(counts)}")


def _tokenizer_key(name: str) -> str:
    """A hub name stands for itself, a folder for its content."""
    if not name or not Path(name).is_dir():
        return name
    files = sorted(path for path in Path(name).iterdir() if path.is_file())
    return hashlib.blake2b(b"".join(path.read_bytes() for path in files), digest_size=8).hexdigest()


def _is_whole(folder: Path) -> bool:
    """Whether every file still has the size it was written with."""
    try:
        files = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


class BucketSampler(Sampler[list[int]]):
    """Endless batches of pairs of similar length, under a budget of tokens, the same plan on every rank.

    `tokens_per_batch` bounds the padded tokens of either side in one optimiser step, over all ranks and micro-batches.
    Each step's pairs are dealt to `world_size` × `accumulate` micro-batches; this rank's come out one after another.
    Every epoch holds every pair once, in an order drawn from (seed, epoch). The place in it is a function of the step alone.
    """

    def __init__(self, lengths, tokens_per_batch, *, seed=0, rank=0, world_size=1, accumulate=1):
        # With the end token; in few bits, which halves the memory, and numpy sorts 16 bits at a time, in linear time.
        bits = np.min_scalar_type(-2 - max(int(side.max(initial=0)) for side in lengths.values()))
        self.source, self.target = (lengths[side].astype(bits) + bits.type(1) for side in ("source", "target"))
        self.parts = world_size * accumulate
        self.rank, self.world_size, self.accumulate, self.seed = rank, world_size, accumulate, seed
        if len(self.source) < self.parts:
            raise UserError(
                f"{len(self.source)} training pairs cannot be dealt to {world_size} processes × {accumulate} "
                "micro-batches; use fewer"
            )
        widths = np.maximum(self.source, self.target)
        self.bounds = cut_batches(np.sort(widths, kind="stable"), tokens_per_batch, self.parts)
        self.planned = (None, None, None)  # epoch, its pairs in order of length, its batches in order
        self.step = 0  # optimiser steps handed out so far

    def __len__(self) -> int:  # micro-batches of this rank in an epoch
        return self.steps_per_epoch * self.accumulate

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps, over all ranks, in which every pair comes once."""
        return len(self.bounds) - 1

    @property
    def plan_id(self) -> int:
        """A number that two samplers share if each of their steps has the same pairs, whoever gets which."""
        return zlib.crc32(np.asarray([self.seed, *self.bounds]).tobytes())

    def state_dict(self) -> dict:
        """The place in the endless row of batches: the optimiser steps handed out. The rest follows from lengths and seed."""
        return {"step": self.step}

    def load_state_dict(self, state: dict) -> None:
        """Go on after `state["step"]` optimiser steps, in whatever epoch that is."""
        self.step = state["step"]

    def epoch_plan(self, epoch: int) -> Iterator[np.ndarray]:
        """The pairs of each step of an epoch, over all ranks."""
        if self.planned[0] != epoch:
            random = np.random.default_rng((self.seed, epoch))
            # Equal lengths in random order, so batches are composed anew; the cuts stay, they depend on lengths alone.
            pairs = random.permutation(np.arange(len(self.source), dtype=np.int32))
            order = pairs[order_by_length(self.source[pairs], self.target[pairs])]
            self.planned = epoch, order, random.permutation(self.steps_per_epoch)
        _, order, batches = self.planned
        for batch in batches:
            yield order[self.bounds[batch] : self.bounds[batch + 1]]

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's micro-batches, from the current step on, without end."""
        while True:
            epoch, done = divmod(self.step, self.steps_per_epoch)
            for pairs in islice(self.epoch_plan(epoch), done, None):
                self.step += 1
                for micro_batch in range(self.accumulate):
                    yield pairs[micro_batch * self.world_size + self.rank :: self.parts].tolist()

    def widest_step(self) -> np.ndarray:
        """The pairs of the step that asks most of the memory: attention grows with pairs × length²."""
        widths = np.maximum(self.source, self.target)
        order = np.argsort(widths, kind="stable")
        longest = widths[order[np.asarray(self.bounds[1:]) - 1]].astype(float)
        step = int(np.argmax(np.diff(self.bounds) * longest**2))
        return order[self.bounds[step] : self.bounds[step + 1]]

    def target_tokens(self, step: int) -> Iterator[int]:
        """Real target tokens, over all ranks, of the steps after `step`: what a loss is divided by, known without asking."""
        while True:
            epoch, done = divmod(step, self.steps_per_epoch)
            for pairs in islice(self.epoch_plan(epoch), done, None):
                step += 1
                yield int(self.target[pairs].sum())


def order_by_length(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """An order of the pairs in which neighbours are alike in both lengths; pairs of equal lengths keep theirs.

    By the longer side; within it by how much the source is longer, rising and falling in turn. So where one length ends
    and the next begins there is no leap on the other side, and a batch that holds both has little padding.
    """
    longer, difference = np.maximum(source, target), source - target
    return np.lexsort((np.where(longer % 2, -difference, difference), longer))


def cut_batches(widths: np.ndarray, budget: int, smallest: int = 1) -> list[int]:
    """Cut a row of sentence widths so that pairs × widest ≤ budget in each piece. → the bounds, len(pieces) + 1

    No piece has fewer than `smallest` pairs, whatever the budget.
    """
    bounds = [0]
    while bounds[-1] < len(widths):
        most = max(budget // int(widths[bounds[-1]]), smallest)  # if all were as narrow as the first
        window = np.maximum.accumulate(widths[bounds[-1] : bounds[-1] + most])
        fits = int(np.searchsorted(window * np.arange(1, len(window) + 1), budget, side="right"))
        bounds.append(min(len(widths), bounds[-1] + max(fits, smallest)))
    if len(bounds) > 2 and bounds[-1] - bounds[-2] < smallest:  # the rest is too small to stand alone
        bounds[-2] = bounds[-1] - smallest
        if bounds[-2] - bounds[-3] < smallest:
            del bounds[-2]
    return bounds


@dataclass
class Batch:
    """B pairs padded to S source and T target tokens. Masks are boolean, True = padding: made here and nowhere else.

    No target padding mask: padding stands behind the sentence, and the causal mask keeps what is behind out of sight.
    """

    src: torch.Tensor  # (B, S) ids, each row ends with eos
    src_pad: torch.Tensor  # (B, S) True = padding
    tgt_in: torch.Tensor  # (B, T) begins with bos
    tgt_out: torch.Tensor  # (N,) the N real tokens to predict, row after row
    real: torch.Tensor  # (N,) where they stand in the flattened (B·T) positions
    source_tokens: int  # real tokens, end included
    target_tokens: int

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; from pinned memory the copy overlaps with computing."""
        moved = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if torch.is_tensor(value)
        }
        return Batch(**(vars(self) | moved))

    def pin_memory(self) -> "Batch":
        """Called by the DataLoader."""
        return Batch(**{name: v.pin_memory() if torch.is_tensor(v) else v for name, v in vars(self).items()})


@dataclass
class Collate:
    """Pairs → `Batch`. Lengths are padded up to a multiple of `pad_multiple`: fewer shapes for a compiler."""

    source_ids: dict[str, int]  # {"pad": …, "bos": …, "eos": …}
    target_ids: dict[str, int]
    pad_multiple: int = 1

    def __call__(self, pairs: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
        sources, targets = zip(*pairs)
        src, src_pad = self.pad_sources(sources)
        width = self._round_up(max(map(len, targets)) + 1)
        tgt_in = np.full((len(targets), width), self.target_ids["pad"], np.int64)
        tgt_out = tgt_in.copy()
        is_real = np.zeros(tgt_in.shape, bool)
        for row, target in enumerate(targets):
            length = len(target)
            tgt_in[row, 0], tgt_in[row, 1 : length + 1] = self.target_ids["bos"], target
            tgt_out[row, :length], tgt_out[row, length] = target, self.target_ids["eos"]
            is_real[row, : length + 1] = True
        real = np.flatnonzero(is_real)
        tensors = (src, src_pad, *map(torch.from_numpy, (tgt_in, tgt_out.ravel()[real], real)))
        return Batch(*tensors, int((~src_pad).sum()), len(real))

    def pad_sources(self, sources) -> tuple[torch.Tensor, torch.Tensor]:
        """Source ids, end token added → (src, src_pad), each (B, S)."""
        width = self._round_up(max(map(len, sources)) + 1)
        src = np.full((len(sources), width), self.source_ids["pad"], np.int64)
        src_pad = np.ones(src.shape, bool)
        for row, source in enumerate(sources):
            length = len(source)
            src[row, :length], src[row, length] = source, self.source_ids["eos"]
            src_pad[row, : length + 1] = False
        return torch.from_numpy(src), torch.from_numpy(src_pad)

    def _round_up(self, width: int) -> int:
        return -(-width // self.pad_multiple) * self.pad_multiple


def collate_for(prepared: Prepared, pad_multiple: int = 1) -> Collate:
    """The `Collate` that knows the special ids of these tokenizers."""
    return Collate(special_ids(prepared.source_tokenizer), special_ids(prepared.target_tokenizer), pad_multiple)
