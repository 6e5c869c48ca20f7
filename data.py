"""Token ids → batches.

prepared = prepare(find_text("/opt/minidataset"), Path("runs/.cache"))     # text/prepare.py: rows → token ids
sampler = BucketSampler(prepared.train.lengths, tokens_per_batch=4096)
batches = batches_of(prepared.train, sampler, collate_for(prepared), workers=0, device=torch.device("cpu"))
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from engine.errors import UserError
from engine.run import leave_signals_to_main
from text.prepare import Prepared
from text.store import Rows, flatten, places_of, starts_of
from text.subwords import special_ids


def default_tokens_per_batch(prepared: Prepared, device: torch.device) -> int:
    """4,096 tokens on a CPU, 16,384 on a GPU; less for little data, so that an epoch has about a hundred steps."""
    most = 4096 if device.type == "cpu" else 16384
    return int(min(most, max(1024, prepared.train.lengths["target"].sum() // 100)))


class BucketSampler(Sampler[np.ndarray]):
    """Endless batches of pairs of similar length, under a budget of tokens, the same plan on every rank.

    `tokens_per_batch` bounds the padded tokens of either side in one optimiser step, over all ranks and micro-batches.
    Each step's pairs are dealt to `world_size` × `accumulate` micro-batches; this rank's come out one after another.
    Every epoch holds every pair once, in an order drawn from (seed, epoch). The place in it is a function of the step alone.
    """

    def __init__(self, lengths, tokens_per_batch, *, seed=0, rank=0, world_size=1, accumulate=1):
        # Half the memory in the smallest type; numpy sorts 16-bit integers in linear time. Signed: order_by_length subtracts.
        longest = 1 + max(
            int(side.max(initial=0)) for side in lengths.values()
        )  # with the end token, as all below
        dtype = np.min_scalar_type(-longest - 1)  # a negative number asks for a signed type
        self.source, self.target = (
            lengths[side].astype(dtype) + dtype.type(1) for side in ("source", "target")
        )
        self.parts = world_size * accumulate  # micro-batches of a step, over all ranks
        self.rank, self.world_size, self.accumulate, self.seed = rank, world_size, accumulate, seed
        if len(self.source) < self.parts:
            raise UserError(
                f"{len(self.source)} training pairs are too few for {world_size} processes × {accumulate} "
                "micro-batches; use fewer"
            )
        widths = np.maximum(
            self.source, self.target
        )  # order_by_length's first key: the cuts below fit its order
        self.bounds = cut_batches(np.sort(widths, kind="stable"), tokens_per_batch, self.parts)
        self.planned = (
            None,
            None,
            None,
        )  # epoch, its pairs in order of length, its batches in order
        self.step = (
            0  # optimiser steps handed out so far, in whatever epoch; set it to go on from there
        )

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps, over all ranks, in which every pair comes once."""
        return len(self.bounds) - 1

    @property
    def plan_id(self) -> int:
        """A number that two samplers share if each of their steps has the same pairs, whoever gets which."""
        return zlib.crc32(np.asarray([self.seed, *self.bounds]).tobytes())

    def describe_change(self, state: dict) -> str:
        """What becomes of the order when a run goes on from `state` with other pairs, ranks or micro-batches; '' if nothing."""
        before = f"{state['world_size']} processes × {state['accumulate'] or '?'} micro-batches"
        change = f"note: {before} before, {self.world_size} × {self.accumulate} from now on"
        same_ranks = state["world_size"] == self.world_size
        if state["plan"] == self.plan_id or (
            same_ranks and not state["plan"]
        ):  # 0: nobody noted it
            return "" if same_ranks else f"{change}; every step keeps its pairs, shared out anew"
        return f"{change}; steps have other pairs: the order continues at step {self.step:,} of a new plan"

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

    def __iter__(self) -> Iterator[np.ndarray]:
        """This rank's micro-batches, from the current step on, without end."""
        while True:
            epoch, done = divmod(self.step, self.steps_per_epoch)
            for pairs in islice(self.epoch_plan(epoch), done, None):
                self.step += 1
                for micro_batch in range(self.accumulate):
                    yield pairs[micro_batch * self.world_size + self.rank :: self.parts]

    def steps_by_length(self) -> list[np.ndarray]:
        """The pairs of each step, the shortest first: the cuts, and so the lengths of a step, are the same in every epoch."""
        return np.split(order_by_length(self.source, self.target), self.bounds[1:-1])

    def heaviest_steps(self) -> list[np.ndarray]:
        """The pairs, the longest first, of the steps that ask most of the memory: for layers, logits, or attention by hand."""
        steps = self.steps_by_length()
        sides = [(self.source[step].astype(int), self.target[step].astype(int)) for step in steps]
        loads = [
            (len(s) * (s.max() + t.max()), t.sum(), len(s) * max(s.max(), t.max()) ** 2)
            for s, t in sides
        ]
        return [
            steps[heaviest][::-1] for heaviest in dict.fromkeys(np.argmax(loads, axis=0).tolist())
        ]

    def target_tokens(self, step: int) -> Iterator[int]:
        """Real target tokens, over all ranks, of the steps after `step`: what a loss is divided by, with no rank asked."""
        while True:
            epoch, done = divmod(step, self.steps_per_epoch)
            for pairs in islice(self.epoch_plan(epoch), done, None):
                step += 1
                yield int(self.target[pairs].sum())


def batches_of(
    pairs, sampler: BucketSampler, collate: Callable, workers: int, device
) -> Iterator["Batch"]:
    """The sampler's micro-batches on the device, without end. Only its `close()` ends the loader's processes."""
    loader = DataLoader(
        pairs,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=leave_signals_to_main,
    )
    # iter(loader) runs here, not at the first batch: it draws from torch's generator, which within a step is dropout's.
    batches = (batch.to(device) for batch in loader)
    return one_ahead(batches, device) if device.type == "cuda" else batches


def one_ahead(batches: Iterator["Batch"], device: torch.device) -> Iterator["Batch"]:
    """The batches, each made and sent to the GPU by a thread while the one before it is computed with."""
    # Without set_device the thread would take GPU 0, on every rank.
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,)) as thread:
        coming = thread.submit(next, batches)
        while True:
            batch = coming.result()
            coming = thread.submit(next, batches)
            yield batch


def order_by_length(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """An order of the pairs in which neighbours are alike in both lengths; pairs of equal lengths keep theirs.

    By the longer side; within it by how much the source is longer, rising and falling in turn. So where one length ends
    and the next begins there is no leap on the other side, and a batch that holds both has little padding.
    """
    longer, difference = np.maximum(source, target), source - target
    return np.lexsort(
        (np.where(longer % 2, -difference, difference), longer)
    )  # the last key counts first


def cut_batches(widths: np.ndarray, budget: int, smallest: int = 1) -> list[int]:
    """Cut a row of sentence widths so that pairs × widest ≤ budget in each piece. → the bounds, len(pieces) + 1

    No piece has fewer than `smallest` pairs, whatever the budget.
    """
    bounds = [0]
    while bounds[-1] < len(widths):
        most = max(
            budget // int(widths[bounds[-1]]), smallest
        )  # if all were as narrow as the first
        widest = np.maximum.accumulate(
            widths[bounds[-1] : bounds[-1] + most]
        )  # of the first 1, 2, 3, … pairs
        fits = int(np.searchsorted(widest * np.arange(1, len(widest) + 1), budget, side="right"))
        bounds.append(min(len(widths), bounds[-1] + max(fits, smallest)))
    if (
        len(bounds) > 2 and bounds[-1] - bounds[-2] < smallest
    ):  # the rest is too small to stand alone
        bounds[-2] = bounds[-1] - smallest  # so it takes pairs from the piece before it,
        if (
            bounds[-2] - bounds[-3] < smallest
        ):  # or all of them, if that would then be too small itself
            del bounds[-2]
    return bounds


@dataclass
class Batch:
    """B pairs padded to S source and T target tokens. `src_pad`, the padding mask (True = padding), is made here alone.

    No target padding mask: padding stands behind the sentence, and the causal mask keeps what is behind out of sight.
    """

    src: torch.Tensor  # (B, S) ids, each row ends with eos
    src_pad: torch.Tensor  # (B, S) True = padding
    tgt_in: torch.Tensor  # (B, T) bos, then the target: what the decoder is given (teacher forcing)
    tgt_out: (
        torch.Tensor
    )  # (N,) what it is to predict, row after row: the target, then eos; no padding
    real: torch.Tensor  # (N,) the places in the flattened (B·T) tgt_in that predict them: see train.py --explain_masks
    source_tokens: int  # real tokens, end included
    target_tokens: int

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; from pinned memory the copy overlaps with computing."""
        return Batch(
            **{
                n: v.to(device, non_blocking=True) if torch.is_tensor(v) else v
                for n, v in vars(self).items()
            }
        )

    def pin_memory(self) -> "Batch":
        """Called by the DataLoader."""
        return Batch(
            **{name: v.pin_memory() if torch.is_tensor(v) else v for name, v in vars(self).items()}
        )


@dataclass
class Collate:
    """Pairs → `Batch`. Lengths are padded to a multiple of `pad_multiple`, `longest` at most: fewer shapes for a compiler."""

    source_ids: dict[str, int]  # {"pad": …, "bos": …, "eos": …}
    target_ids: dict[str, int]
    pad_multiple: int = 1
    longest: int = 2**31

    def __call__(
        self, pairs: tuple[Rows, Rows] | list[tuple[Sequence[int], Sequence[int]]]
    ) -> Batch:
        source, target = (
            pairs if isinstance(pairs, tuple) else map(flatten, zip(*pairs))
        )  # a tuple: by __getitems__
        src, src_pad = self.pad_sources(source)
        lengths = target.lengths + 1  # with begin or end
        width = self._round_up(lengths.max())
        real = places_of(
            lengths, np.arange(len(lengths)) * width
        )  # (N,): row r has the places r·T, r·T + 1, …
        tgt_in = np.full((len(lengths), width), self.target_ids["pad"], np.int64)
        tgt_in.ravel()[real] = insert(target, self.target_ids["bos"], before=True)
        tgt_out = insert(target, self.target_ids["eos"])
        tensors = (torch.from_numpy(array) for array in (tgt_in, tgt_out, real))
        return Batch(
            src, src_pad, *tensors, int(source.lengths.sum()) + len(source.lengths), len(real)
        )

    def pad_sources(self, sources: Rows | list[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Source ids, end token added → (src, src_pad), each (B, S)."""
        rows = sources if isinstance(sources, Rows) else flatten(sources)
        lengths = rows.lengths + 1
        width = self._round_up(lengths.max())
        real = places_of(lengths, np.arange(len(lengths)) * width)
        src = np.full((len(lengths), width), self.source_ids["pad"], np.int64)
        src_pad = np.ones(src.shape, bool)
        src.ravel()[real], src_pad.ravel()[real] = insert(rows, self.source_ids["eos"]), False
        return torch.from_numpy(src), torch.from_numpy(src_pad)

    def _round_up(self, width: np.int64) -> int:
        return min(math.ceil(width / self.pad_multiple) * self.pad_multiple, self.longest)


def insert(rows: Rows, token: int, before: bool = False) -> np.ndarray:
    """The ids with one more token at the end of each row, or at its beginning: (N,) → (N + rows,)"""
    result = np.full(
        len(rows.ids) + len(rows.lengths), token, np.int64
    )  # what the ids leave over stays `token`
    places = places_of(
        rows.lengths, starts_of(rows.lengths + 1)[:-1] + int(before)
    )  # one further on, if `before`
    result[places] = rows.ids
    return result


def collate_for(prepared: Prepared, pad_multiple: int = 1, longest: int = 2**31) -> Collate:
    """The `Collate` that knows the special ids of these tokenizers."""
    return Collate(
        *map(special_ids, (prepared.source_tokenizer, prepared.target_tokenizer)),
        pad_multiple,
        longest,
    )
