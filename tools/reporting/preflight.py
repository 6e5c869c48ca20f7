"""`python train.py --check`: will the data, the device, the memory and the disk do, and what would the run cost?

Asked of the run's own code, on a sample of the rows, in about ten seconds. What cannot work ends with one line and exit code 2;
what works, but perhaps not as it was meant, is a line that begins with "warning".
"""

import fileinput
import os
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from data import (
    BucketSampler,
    Prepared,
    collate_for,
    default_tokens_per_batch,
    prepare,
    vocabulary_size,
)
from engine.checkpoint import RESUMABLE
from engine.devices import choose_device, hidden_gpus
from engine.distributed import several_asked
from engine.errors import UserError
from engine.memory import GIB, fewest_parts, forget_peak, held_gib
from engine.precision import Precision, choose_precision
from engine.run import folder_of
from engine.telemetry import nvml_of, peak_memory_gib
from text.cleaning import REASONS, missing_splits
from text.reading import CHINESE, ParallelText, default_path, find_text

ROWS = 500_000  # that are read, and compared for duplicates
SAMPLE = 5_000  # rows, up to twice as many, that are cleaned and tokenised
SECONDS = 2.0  # of steps that are tried
NOTABLE = 0.02  # share of the rows from which on something is worth a warning
USED = 0.1  # share of a GPU's memory that the driver and a screen do not reach


@dataclass(frozen=True)
class Sample(ParallelText):
    """Some rows of a text in place of all."""

    taken: dict[str, list[tuple[str, str]]]

    def pairs(self, split: str):
        """The rows that were taken."""
        yield from self.taken[split]

    def fingerprint(self) -> str:
        """Only has to be there: what is made of a sample is thrown away."""
        return "sample"


def check(config) -> None:
    """Print what there is to say about a run with train.py's `config`. Raises `UserError` for what cannot work."""
    if config.resume or several_asked():
        raise UserError(
            "--check looks at a new run of one process; leave --resume and torchrun out"
        )
    if config.run and (folder_of(config.run) / "config.json").exists():
        raise UserError(
            f"run {folder_of(config.run)} exists; choose another --run, or go on with --resume"
        )
    warnings = []
    used = describe_cards()
    device = choose_device(config.device, 0)
    precision = choose_precision(device, config.precision, training=True)
    print(precision.describe())
    warn_of_others(device, used, warnings.append)
    if hidden := hidden_gpus():
        warnings.append(hidden)

    text = find_text(config.data or default_path(), config.source, config.target)
    sample, pairs, duplicates = sample_of(text)
    check_languages(sample, warnings.append)
    for split in missing_splits(text):
        warnings.append(f"there is no {split} split; 1 % of the pairs are cut from train for it")
    with tempfile.TemporaryDirectory() as folder:
        sizes = [
            vocabulary_size(asked, pairs) for asked in (config.source_vocab, config.target_vocab)
        ]
        prepared = prepare(
            sample,
            Path(folder),
            source_vocab=sizes[0],
            target_vocab=sizes[1],
            tokenizer=config.tokenizer,
            max_length=config.max_length,
            log=lambda line: None,
        )
        if config.select:
            prepared.select_like_validation(lambda line: None)
        counts = prepared.summary["counts"]
        kept = counts["kept"] / counts["read"]
        shares = {
            reason: counts.get(reason, 0) / counts["read"]
            for reason in REASONS
            if reason != "held out"
        }
        left_out = {
            reason: shares.pop(reason) for reason in ("unlike validation", "short target")
        }  # on purpose
        for reason, share in (shares | {"duplicate": duplicates}).items():
            if share >= NOTABLE:
                warnings.append(f"{share:.0%} of the training pairs are dropped: {REASONS[reason]}")
        for side, texts in zip(("source", "target"), zip(*sample.taken["train"])):
            unknown = unknown_characters(getattr(prepared, f"{side}_tokenizer"), texts)
            if unknown > 0.01:
                warnings.append(
                    f"the tokenizer does not know {unknown:.1%} of the characters of the {side} side"
                )
        # As many lengths as the whole has pairs, those of the sample again and again: `pair % len(sample)` has its ids.
        pairs = round(kept * pairs)
        lengths = {
            side: np.resize(lengths, pairs) for side, lengths in prepared.train.lengths.items()
        }
        tokens = {side: int(lengths[side].sum()) + pairs for side in lengths}
        about = "about " * (len(sample.taken["train"]) < pairs)
        print(
            f"data: {text.path} ({text.form}), {about}{pairs:,} training pairs of {tokens['source'] / pairs:.1f} and "
            f"{tokens['target'] / pairs:.1f} tokens"
            + "".join(
                f", {share:.0%} left out: {REASONS[reason]}"
                for reason, share in left_out.items()
                if share
            )
        )
        whole = replace(prepared, train=SimpleNamespace(lengths=lengths))
        say_costs(config, prepared, whole, sum(tokens.values()), precision, warnings.append)
    for warning in warnings:
        print(f"warning: {warning}")
    print(f"check: this would run; {len(warnings) or 'no'} warning{'s' * (len(warnings) != 1)}")


def describe_cards() -> list[bool]:
    """A line for every GPU that PyTorch sees, if NVML tells of it; → whether others use it. Before this process uses one."""
    used = []
    with suppress(Exception):  # no package, no driver, no permission
        for index in range(torch.cuda.device_count()):
            nvml, handle = nvml_of(torch.device("cuda", index))
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            processes = len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
            used.append(
                processes > 0 or memory.used > USED * memory.total
            )  # a container hides processes, not memory
            print(
                f"cuda:{index}: {torch.cuda.get_device_properties(index).name}, {(memory.total - memory.used) / GIB:.1f} of "
                f"{memory.total / GIB:.1f} GiB free, processes: {processes}"
            )
    return used


def warn_of_others(device: torch.device, used: list[bool], warn: Callable) -> None:
    """Warns if others use the run's own card; names those that nobody uses."""
    if device.type == "cuda" and used[device.index : device.index + 1] == [True]:
        free = [f"--device cuda:{index}" for index, others in enumerate(used) if not others]
        warn(f"others use {device}; free: {', '.join(free) or 'no card'}")


def sample_of(text: ParallelText) -> tuple[Sample, int, float]:
    """Distinct rows from all over what is read; about how many the text has; the share of rows that repeat an earlier one."""
    seen, taken, read, every = set(), [], 0, 1
    for row in islice(text.pairs("train"), ROWS):
        read += 1
        if hash(row) in seen:
            continue
        seen.add(hash(row))
        if len(seen) % every == 0:
            taken.append(row)
        if len(taken) > 2 * SAMPLE:
            taken = taken[::2]
            every *= 2
    if not read:
        raise UserError(f"{text.path}: the train split has no rows")
    held_out = {
        split: list(islice(text.pairs(split), SAMPLE)) for split in text.files if split != "train"
    }
    rows = read if read < ROWS else rows_in(text, taken, read)
    sample = Sample(**vars(text), taken=held_out | {"train": taken})
    return sample, rows * len(seen) // read, 1 - len(seen) / read


def rows_in(text: ParallelText, some: list[tuple[str, str]], read: int) -> int:
    """The number of training rows: parquet knows it, of another form the size of the files tells it roughly."""
    files = text.files["train"]
    if text.form == "parquet":
        import pyarrow.parquet

        return sum(pyarrow.parquet.read_metadata(file).num_rows for file in files)
    size = sum(file.stat().st_size for file in files)
    with files[0].open("rb") as file:
        # A row a line, not one array, alone or under "data". Names of columns and \u1234 for a character are much of it.
        if text.form == "json" and re.match(rb'\s*\{(?!\s*("data"\s*:|\n))', file.read(4096)):
            with fileinput.FileInput(files, mode="rb") as lines:
                return round(read * size / sum(map(len, islice(lines, read))))
    row_bytes = (
        sum(len("".join(row).encode()) for row in some) / len(some) + 2
    )  # with what stands between the texts
    return round(size / row_bytes)


def check_languages(sample: Sample, warn: Callable) -> None:
    """Chinese is known by its characters: whether all of that side has some."""
    names = (sample.source, sample.target)
    chinese = [bool(CHINESE.match(name.lower())) for name in names]
    if sum(chinese) != 1:
        return
    side = chinese.index(True)
    texts = [row[side] for row in sample.taken["train"]]
    without = sum(not re.search("[\u4e00-\u9fff]", text) for text in texts) / len(texts)
    if without > NOTABLE:
        warn(f"{without:.0%} of the texts under {names[side]!r} have no Chinese character")


def unknown_characters(tokenizer, texts) -> float:
    """The share of the characters that <unk> stands for. One <unk> may stand for a whole sentence, so tokens tell less."""
    if tokenizer.unk_token_id is None or not tokenizer.is_fast:
        return 0.0
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
    tokens = zip(chain(*encoded["input_ids"]), chain(*encoded["offset_mapping"]))
    unknown = sum(end - start for token, (start, end) in tokens if token == tokenizer.unk_token_id)
    return unknown / max(1, sum(len("".join(text.split())) for text in texts))


def say_costs(
    config, sample: Prepared, whole: Prepared, tokens: int, precision: Precision, warn: Callable
) -> None:
    """Steps, time, memory and disk; `whole` has lengths alone. Raises `UserError` if memory or disk do not suffice."""
    from model import Translator, sizes_of

    device = precision.device
    sizes = sizes_of(config, len(sample.source_tokenizer), len(sample.target_tokenizer))
    with torch.device("meta"):  # shapes without numbers
        parameters = sum(weight.numel() for weight in Translator(sizes).parameters())
    # Weights of all checkpoints, the best and the one being written too; in the newest two averages at most; all in fp32.
    checkpoints = 4 * parameters * (config.keep + 2 + 2 * (RESUMABLE + 1))
    check_disk(
        folder_of(config.run or "new").parent, checkpoints + 8 * tokens
    )  # ids, and the text while they are made

    budget = config.tokens_per_batch or default_tokens_per_batch(whole, device)
    sampler = BucketSampler(whole.train.lengths, budget, seed=config.seed)
    speed, peak, parts = try_steps(config, sample, sizes, precision, sampler, budget)
    epoch = tokens / speed / 60  # minutes
    steps = config.max_steps or config.epochs * sampler.steps_per_epoch
    minutes = epoch * steps / sampler.steps_per_epoch
    print(
        f"model: {parameters:,} parameters; {budget:,} tokens per step in {parts} parts, "
        f"{sampler.steps_per_epoch:,} steps per epoch"
    )
    print(
        f"time: about {speed:,.0f} tokens/s: {epoch:,.1f} min an epoch, {minutes:,.1f} min for "
        f"{steps:,} steps, without validations"
    )
    print(f"memory: about {peak:.1f} GiB of {memory_limit(device):.1f} GiB")
    if 0 < config.max_minutes < min(epoch, minutes):
        warn(
            f"--max_minutes {config.max_minutes:g} end before the first epoch, which takes {epoch:,.0f}"
        )
    if config.compile:
        warn("the time is of the plain training, without --compile")


def try_steps(
    config, sample: Prepared, sizes, precision: Precision, sampler, budget: int
) -> tuple[float, float, int]:
    """→ real tokens a second, GiB that the heaviest steps need, the parts in which a step fits the memory.

    Steps of a fresh model on the sample, each of twice as many tokens as the last, until `SECONDS` are over. Raises
    `UserError` if a CPU's memory does not hold a step of the whole budget, which is reckoned from smaller ones; a GPU tries
    it, as the run would.
    """
    import fast
    from engine.optimizer import make_optimizer
    from model import SummedLoss, Translator

    device, collate = precision.device, collate_for(sample)
    torch.manual_seed(config.seed)
    model = Translator(sizes).to(device)
    loss_of = fast.loss(model, config.label_smoothing, precision.dtype) or SummedLoss(
        model, config.label_smoothing
    )
    parameters = list(model.parameters())
    optimizer = make_optimizer(config.optimizer, model, model.transformer, 1e-9, precision.dtype)

    def step(pairs: np.ndarray, update: bool = True) -> int:
        """→ real tokens, when all is computed."""
        batch = collate(sample.train.__getitems__(pairs % len(sample.train))).to(device)
        with precision.autocast():
            loss, _ = loss_of(batch.src, batch.src_pad, batch.tgt_in, batch.real, batch.tgt_out)
        precision.backward(loss / batch.target_tokens)
        if update:
            precision.step(optimizer, parameters, config.clip, 1).item()  # which waits for the GPU
        optimizer.zero_grad()
        return batch.source_tokens + batch.target_tokens

    heaviest, parts, on_gpu = (
        sampler.heaviest_steps(),
        config.accumulate or 1,
        device.type == "cuda",
    )
    if on_gpu and not config.accumulate:
        parts = fewest_parts(lambda parts: [step(pairs[::parts]) for pairs in heaviest], device)
        torch.cuda.reset_peak_memory_stats(device)  # of the trials that failed
    widest, budget = heaviest[0][::parts], max(1, budget // parts)
    for pairs in heaviest if on_gpu else [widest[:1]]:  # warms up
        step(pairs[::parts])
    begun, tokens = time.perf_counter(), min(128, budget)
    while True:
        pairs, last = next(iter(BucketSampler(sample.train.lengths, tokens))), time.perf_counter()
        real = step(pairs)
        seconds = time.perf_counter() - last
        if tokens == budget or time.perf_counter() - begun + 2 * seconds > SECONDS:
            break
        tokens = min(2 * tokens, budget)
    if on_gpu:
        return real / seconds, peak_memory_gib(device), parts

    # Of the widest step's pairs, alike in length, as many as there is time for, and fewer: the difference is what a pair needs.
    # Without the update, whose own memory, of one size for any number of pairs, would hide it.
    many = min(len(widest), max(2, len(widest) * max(tokens, 1024) // budget))
    few = max(1, many // 4)
    low, high = (peak_of(partial(step, widest[:pairs], update=False)) for pairs in (few, many))
    high += (len(widest) - many) * max(0.0, high - low) / max(1, many - few)
    peak, limit = max(high, peak_of(partial(step, widest[:few]))), memory_limit(device)
    if peak > limit:
        raise UserError(
            f"a step of {budget * parts:,} tokens in {parts} parts needs about {peak:.1f} GiB of memory, "
            f"{limit:.1f} GiB are free; give fewer --tokens_per_batch or more --accumulate"
        )
    return real / seconds, peak, parts


def peak_of(work: Callable) -> float:
    """The most GiB that this process holds during `work()`; not on Linux: that it ever held."""
    forget_peak()
    work()
    return held_gib()


def memory_limit(device: torch.device) -> float:
    """GiB that this process can hold in all, what it holds now included."""
    if device.type == "cuda":
        return (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)) / GIB
    limit = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    with suppress(OSError, TypeError):  # Linux tells what is free
        free = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
        limit = int(free[1]) * 1024 + int(held_gib("VmRSS") * GIB)
    with suppress(OSError, ValueError):  # of a container; "max" without one
        limit = min(limit, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return limit / GIB


def check_disk(folder: Path, needed: int) -> None:
    """Raises `UserError` if the disk of this folder, which may not exist yet, has no room or cannot be written to."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK):
        raise UserError(f"cannot write to {there}; choose another --run PATH/NAME")
    free = shutil.disk_usage(there).free
    if free < needed:
        raise UserError(
            f"the disk of {there} has {free / GIB:.1f} GiB free, the run needs about {needed / GIB:.1f} GiB; free "
            "some space, give a smaller --keep, or choose another --run PATH/NAME"
        )
    print(f"disk: about {needed / GIB:.1f} GiB of {free / GIB:.1f} GiB free")
