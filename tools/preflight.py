"""`python train.py --check`: would this run work, and what would it cost?

Answered by the run's own code on a sample of the rows. What cannot work ends with one line and exit
code 2. What works, but perhaps not as it was meant, is a line that begins with "warning".
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import fast
from data import (
    BucketSampler,
    Prepared,
    TextSettings,
    collate_for,
    default_tokens_per_batch,
    prepare,
)
from engine import schedule
from engine.checkpoint import RESUMABLE
from engine.devices import choose_device, hidden_gpus
from engine.distributed import several_asked
from engine.errors import UserError
from engine.memory import memory_limit
from engine.meters import duration, peak_memory_gib
from engine.optimizer import make_optimizer, trained_weights
from engine.precision import Precision, choose_precision
from engine.run import folder_of, refuse_begun
from micro_batches import fewest_micro_batches
from model import ModelConfig, freeze, make_loss, make_translator, sizes_of
from text.cleaning import REASONS, hash_of_pair, missing_splits
from text.reading import (
    ParallelText,
    chinese_side,
    count_rows,
    default_path,
    find_text,
    share_of_chinese,
)
from tools.machine import (
    check_disk,
    describe_gpus,
    describe_load,
    measure_speed,
    peak_of,
    warn_of_other_users,
)

ROWS = 500_000  # rows that are read and compared for duplicates
# Rows that are cleaned and tokenised, up to twice as many. Tokenizers of fewer rows divide unseen
# ones otherwise: of 432,103 rows, the steps of an epoch were 21 % too many with 5,000, now 1 %.
SAMPLE = 20_000
NOTABLE = 0.02  # a share of the rows that is worth a warning
UNKNOWN = 0.01  # a share of the characters that is worth a warning
ON_PURPOSE = ("unlike validation", "short target")  # pairs left out by --select


@dataclass(frozen=True)
class Sample(ParallelText):
    """Some rows of a text in place of all."""

    taken: dict[str, list[tuple[str, str]]]

    def pairs(self, split: str):
        """The rows that were taken from a split."""
        yield from self.taken[split]

    def fingerprint(self) -> dict[str, str]:
        """A constant: what is made of a sample is thrown away."""
        return {}


def check(config) -> None:
    """Print what a run with these settings would do. Raises `UserError` for what cannot work."""
    if config.resume or several_asked():
        raise UserError("--check is for a new run of one process; leave --resume and torchrun out")
    if config.run:
        refuse_begun(folder_of(config.run))
    load = describe_load()  # before this process adds to it
    warnings = []
    used = describe_gpus()
    device = choose_device(config.device, 0)
    precision = choose_precision(device, config.precision, training=True)
    print(precision.describe())
    warn_of_other_users(device, used, warnings.append)
    if hidden := hidden_gpus():
        warnings.append(hidden)

    text = find_text(config.data or default_path(), config.source, config.target)
    sample, count, duplicates = sample_of(text)
    check_languages(sample, warnings.append)
    for split in missing_splits(text):
        warnings.append(f"there is no {split} split; 1 % of the pairs are cut from train for it")
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_sample(config, sample, count, Path(folder))
        check_shares(prepared, duplicates, warnings.append)
        for side, texts in zip(("source", "target"), zip(*sample.taken["train"])):
            share = unknown_characters(getattr(prepared, f"{side}_tokenizer"), texts)
            if share > UNKNOWN:
                warnings.append(
                    f"the tokenizer does not know {share:.1%} of the characters of the {side} side"
                )
        counts = prepared.summary["counts"]
        pairs = round(count * counts["kept"] / counts["read"])
        # As many lengths as all rows would have: those of the sample, repeated.
        lengths = {side: np.resize(known, pairs) for side, known in prepared.train.lengths.items()}
        tokens = {side: int(lengths[side].sum()) + pairs for side in lengths}
        is_estimate = len(sample.taken["train"]) < count
        print(describe_data(text, prepared, pairs, tokens, is_estimate))
        all_pairs = replace(prepared, train=SimpleNamespace(lengths=lengths))
        vocabularies = [len(prepared.source_tokenizer), len(prepared.target_tokenizer)]
        if is_estimate and not config.tokenizer:
            # The few words of a sample give smaller vocabularies than all rows will.
            settings = TextSettings.of(config).for_pairs(count)
            vocabularies = [settings.source_vocab, settings.target_vocab]
        costs = Costs(config, prepared, all_pairs, vocabularies, precision, is_estimate)
        costs.report(load, warnings.append)
    for warning in warnings:
        print(f"warning: {warning}")
    plural = "" if len(warnings) == 1 else "s"
    print(f"check: this would run; {len(warnings) or 'no'} warning{plural}")


# -------------------------------------------------------------------- data


def sample_of(text: ParallelText) -> tuple[Sample, int, float]:
    """Distinct rows from all parts of the text, an estimate of how many there are in all, and the
    share of rows that repeat an earlier one."""
    seen = set()  # hashes
    taken = []
    read = 0
    every = 1
    for row in islice(text.pairs("train"), ROWS):
        read += 1
        row_hash = hash_of_pair(*row)
        if row_hash in seen:
            continue
        seen.add(row_hash)
        # By the hash, not by position: a file may hold two kinds of rows in turn.
        if row_hash % every == 0:
            taken.append(row)
        if len(taken) > 2 * SAMPLE:
            every *= 2
            taken = [row for row in taken if hash_of_pair(*row) % every == 0]
    if not read:
        raise UserError(f"{text.path}: the train split has no rows")
    splits = [split for split in text.files if split != "train"]
    held_out = {split: list(islice(text.pairs(split), SAMPLE)) for split in splits}
    rows = read if read < ROWS else max(read, count_rows(text))
    sample = Sample(**vars(text), taken=held_out | {"train": taken})
    return sample, rows * len(seen) // read, 1 - len(seen) / read


def prepare_sample(config, sample: Sample, count: int, folder: Path) -> Prepared:
    """The sample cleaned and tokenised, as the run would do it with `count` pairs."""
    settings = TextSettings.of(config).for_pairs(count)
    prepared = prepare(sample, folder, settings, log=lambda line: None)
    if config.select:
        prepared.select_like_validation(lambda line: None)
    return prepared


def check_languages(sample: Sample, warn: Callable) -> None:
    """Warn if texts of the Chinese side have no Chinese character."""
    side = chinese_side(sample)
    if side is None:
        return
    share = 1 - share_of_chinese(sample.taken["train"], side)
    if share > NOTABLE:
        name = (sample.source, sample.target)[side]
        warn(f"{share:.0%} of the texts under {name!r} have no Chinese character")


def check_shares(prepared: Prepared, duplicates: float, warn: Callable) -> None:
    """Warn if many pairs are dropped that the user may have wanted to keep."""
    counts = prepared.summary["counts"]
    for reason in REASONS:
        if reason == "held out" or reason in ON_PURPOSE:
            continue
        share = counts.get(reason, 0) / counts["read"]
        if reason == "duplicate":
            share = duplicates
        if share >= NOTABLE:
            warn(f"{share:.0%} of the training pairs are dropped: {REASONS[reason]}")


def unknown_characters(tokenizer, texts) -> float:
    """The share of the characters that become <unk>; one <unk> may stand for an entire sentence."""
    if tokenizer.unk_token_id is None or not tokenizer.is_fast:
        return 0.0
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
    tokens = zip(chain(*encoded["input_ids"]), chain(*encoded["offset_mapping"]))
    unknown = sum(end - start for token, (start, end) in tokens if token == tokenizer.unk_token_id)
    return unknown / max(1, sum(len("".join(text.split())) for text in texts))


def describe_data(
    text: ParallelText, prepared: Prepared, pairs: int, tokens: dict[str, int], is_estimate: bool
) -> str:
    """The data in one line."""
    about = "about " if is_estimate else ""
    line = (
        f"data: {text.path} ({text.form}), {about}{pairs:,} training pairs of "
        f"{tokens['source'] / pairs:.1f} and {tokens['target'] / pairs:.1f} tokens"
    )
    counts = prepared.summary["counts"]
    for reason in ON_PURPOSE:
        if counts.get(reason):
            line += f", {counts[reason] / counts['read']:.0%} left out: {REASONS[reason]}"
    return line


# -------------------------------------------------------------------- costs


@dataclass
class Costs:
    """What a run takes: steps, time, memory and disk."""

    config: Any
    sample: Prepared
    all_pairs: Prepared  # the lengths of all pairs, but no ids
    vocabularies: list[int]  # of source and target
    precision: Precision
    is_estimate: bool  # whether the sample is only a part of the rows

    def report(self, load: str, warn: Callable) -> None:
        """Print them. Raises `UserError` if memory or disk do not suffice.

        `load`: other processes.
        """
        config, precision = self.config, self.precision
        about = "about " if self.is_estimate else ""
        lengths = self.all_pairs.train.lengths
        tokens = sum(int(of_side.sum()) + len(of_side) for of_side in lengths.values())  # and ends
        sizes = sizes_of(config, *self.vocabularies)
        with torch.device("meta"):  # shapes without numbers
            parameters = sum(weight.numel() for weight in make_translator(sizes).parameters())
        check_disk(
            folder_of(config.run or "new").parent, disk_needed(parameters, tokens, config.keep)
        )

        budget = config.tokens_per_batch or default_tokens_per_batch(
            self.all_pairs, precision.device
        )
        sampler = BucketSampler(lengths, budget, seed=config.seed)
        steps_per_epoch = sampler.steps_per_epoch
        trial = Trial(config, self.sample, sizes, precision)
        micro_batches, peak = trial.measure_memory(sampler.heaviest_steps(), budget)
        speed = trial.measure_speed(max(1, budget // micro_batches))
        print(
            f"model: {about}{parameters:,} parameters; {budget:,} tokens per step in "
            f"{micro_batches} micro-batch(es), {about}{steps_per_epoch:,} steps per epoch"
        )
        minutes_per_epoch = tokens / speed / 60
        print(
            f"time: about {speed:,.0f} tokens/s: about {duration(minutes_per_epoch)} an epoch, "
            f"{describe_time(config, steps_per_epoch, minutes_per_epoch)}, without validations"
            + (f" ({load})" if load else "")
        )
        print(f"memory: about {peak:.1f} GiB of {memory_limit(precision.device):.1f} GiB")
        minutes = minutes_per_epoch * total_steps(config, steps_per_epoch) / steps_per_epoch
        if 0 < config.max_minutes < min(minutes_per_epoch, minutes):
            warn(
                f"--max_minutes {config.max_minutes:g} ends before the first epoch, "
                f"which takes about {duration(minutes_per_epoch)}"
            )
        if config.compile:
            warn("the time is that of training without --compile")


def disk_needed(parameters: int, tokens: int, keep: int) -> int:
    """Bytes of the checkpoints and of the cache of a run."""
    # Weights of all checkpoints, with the best one and the one being written; in the newest ones
    # two moments of the optimizer besides; all in fp32.
    checkpoints = 4 * parameters * (keep + 2 + 2 * (RESUMABLE + 1))
    ids_and_text = 8 * tokens
    return checkpoints + ids_and_text


def total_steps(config, steps_per_epoch: int) -> int:
    """The steps of a run that no time limit ends."""
    return config.max_steps or config.epochs * steps_per_epoch


def describe_time(config, steps_per_epoch: int, minutes_per_epoch: float) -> str:
    """The minutes of a run: "about 3.5 min for 283 steps", or those that end it."""
    steps = total_steps(config, steps_per_epoch)
    minutes = minutes_per_epoch * steps / steps_per_epoch
    if 0 < config.max_minutes < minutes:
        steps = round(steps * config.max_minutes / minutes)
        return f"{duration(config.max_minutes)} (--max_minutes) for about {steps:,} steps"
    return f"about {duration(minutes)} for {steps:,} steps"


class Trial:
    """A fresh model and optimizer that take training steps on the sample."""

    def __init__(self, config, sample: Prepared, sizes: ModelConfig, precision: Precision):
        self.config, self.precision, self.device = config, precision, precision.device
        self.pairs = sample.train
        self.collate = collate_for(sample)
        torch.manual_seed(config.seed)
        self.model = make_translator(sizes).to(self.device)
        freeze(self.model, config.freeze)
        self.loss_of = make_loss(self.model, config, precision.dtype)
        self.weights = trained_weights(self.model)
        # A rate of nearly 0: thousands of steps would not change the weights.
        self.optimizer = make_optimizer(
            config.optimizer, self.model, self.model.transformer, 1e-9, precision.dtype
        )

    def step(self, pairs: np.ndarray, update: bool = True) -> int:
        """One step on these pairs; returns its real tokens when it is computed."""
        rows = self.pairs.take(pairs % len(self.pairs))
        batch = self.collate(rows).to(self.device)
        with self.precision.autocast():
            loss, _ = self.loss_of(*batch.inputs)
        self.precision.backward(loss / batch.target_tokens)
        if update:
            norm = self.precision.step(self.optimizer, self.weights, self.config.clip, 1)
            norm.item()  # waits for the GPU
        else:
            self.optimizer.zero_grad()
        return batch.source_tokens + batch.target_tokens

    def measure_speed(self, budget: int) -> float:
        """Tokens per second over a whole run, in steps of at most `budget` tokens."""
        fast.keep_tensors_together(self.device)
        batches = {}  # by size

        def step(tokens: int) -> int:
            """A step on the next batch of this size."""
            if tokens not in batches:
                sampler = BucketSampler(self.pairs.lengths, tokens, seed=self.config.seed)
                batches[tokens] = iter(sampler)
            return self.step(next(batches[tokens]))

        exact = measure_speed(step, budget)
        if self.config.compile or not self.loss_of.can_sample():
            return exact
        self.loss_of.sampled = True
        sampled = measure_speed(step, budget)
        self.loss_of.sampled = False
        share = schedule.share_of_fall(self.config.schedule)
        return 1 / (share / exact + (1 - share) / sampled)

    def measure_memory(self, heaviest: list[np.ndarray], budget: int) -> tuple[int, float]:
        """The micro-batches of a step, and the GiB that the heaviest steps need.

        A GPU tries these steps, as the run would. For a CPU the need is estimated from smaller
        ones; raises `UserError` if its memory does not suffice.
        """
        if self.device.type == "cuda":
            return self.measure_gpu_memory(heaviest)
        micro_batches = self.config.accumulate or 1
        widest = heaviest[0][::micro_batches]
        # Pairs of similar length: the difference between many and few is what a pair needs. Without
        # the update, which needs the same for any number of pairs and would hide the difference.
        tokens = min(max(budget // 4, 1024), 2048)
        many = min(len(widest), max(2, len(widest) * tokens // budget))
        few = max(1, many // 4)
        self.step(widest[:1])
        low = peak_of(partial(self.step, widest[:few], update=False))
        high = peak_of(partial(self.step, widest[:many], update=False))
        of_a_pair = max(0.0, high - low) / max(1, many - few)
        high += (len(widest) - many) * of_a_pair
        peak = max(high, peak_of(partial(self.step, widest[:few])))
        limit = memory_limit(self.device)
        if peak > limit:
            raise UserError(
                f"a step of {budget:,} tokens in {micro_batches} micro-batch(es) needs about "
                f"{peak:.1f} GiB of memory, {limit:.1f} GiB are free; "
                "give fewer --tokens_per_batch or more --accumulate"
            )
        return micro_batches, peak

    def measure_gpu_memory(self, heaviest: list[np.ndarray]) -> tuple[int, float]:
        """The same for a GPU."""

        def try_steps(micro_batches: int) -> None:
            """Take the heaviest steps, divided into this many micro-batches."""
            # A trial that ran out of memory may have left a loss scaler half-way through a step.
            self.precision = Precision(self.device, self.precision.name, self.precision.reason)
            for pairs in heaviest:
                self.step(pairs[::micro_batches])

        micro_batches = self.config.accumulate or fewest_micro_batches(try_steps, self.device)
        torch.cuda.reset_peak_memory_stats(self.device)  # of the trials that failed
        try_steps(micro_batches)
        return micro_batches, peak_memory_gib(self.device)
