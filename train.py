"""Train a Chinese→English Transformer. Everything about a run goes to runs/NAME/.

python train.py                                     # no flag is needed, on a CPU or one GPU
python train.py --data my_corpus/ --max_minutes 60  # other data; stop after an hour
CUDA_VISIBLE_DEVICES=1 python train.py              # choose a GPU
torchrun --nproc_per_node 2 train.py                # data parallel (DDP); with --shard: FSDP2
python train.py --resume runs/NAME                  # continue exactly where it stopped
"""

from dataclasses import asdict, dataclass
from typing import ClassVar

from engine.config import fill_in, flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Every setting of a run. Why the defaults are what they are: docs/training.md.

    --resume refuses to change those that are `fixed` and keeps the others unless they are given.
    Choices in a help text, such as (lab|base|big), are checked. A run whose config.json lacks a
    setting cannot be resumed: after adding one here, start a new run.
    """

    # ClassVar, so that it is not a flag itself: the names of the flags that the user set.
    given: ClassVar[set[str]]
    data: str = flag("", "directory, file or hub id; default: /opt/minidataset or sample/", "Data")
    source: str = flag("zh", "source language, as columns or files name it", "Data", fixed=True)
    target: str = flag("en", "target language, as columns or files name it", "Data", fixed=True)
    tokenizer: str = flag("", "pretrained tokenizer for both sides; default: train two", "Data")
    source_vocab: int = flag(
        0, "source vocabulary size; 0: automatic, 1000 to 16000", "Data", min=0, fixed=True
    )
    target_vocab: int = flag(
        0, "target vocabulary size; 0: automatic, 1000 to 16000", "Data", min=0, fixed=True
    )
    max_length: int = flag(
        512,
        "leave out pairs with this many tokens or more on a side",
        "Data",
        min=8,
        fixed=True,
    )
    select: bool = flag(
        True, "leave out pairs that are unlike the validation set", "Data", fixed=True
    )
    workers: int = flag(0, "DataLoader processes; 0: the main process", "Data", min=0, max=1000)

    preset: str = flag(
        "lab", "model size (lab|base|big); the flags below change it", "Model", fixed=True
    )
    d_model: int = flag(256, "model width", "Model", min=2, fixed=True)
    nhead: int = flag(8, "attention heads", "Model", min=1, fixed=True)
    num_encoder_layers: int = flag(3, "encoder layers", "Model", min=1, max=1000, fixed=True)
    num_decoder_layers: int = flag(3, "decoder layers", "Model", min=1, max=1000, fixed=True)
    dim_feedforward: int = flag(1024, "width of feed-forward layers", "Model", min=1, fixed=True)
    norm_first: bool = flag(
        False, "layer norm before each sub-layer (pre-norm)", "Model", fixed=True
    )
    dropout: float = flag(0.1, "dropout rate", "Model", min=0, below=1, fixed=True)

    epochs: int = flag(20, "passes over the data, without --max_steps", "Training", min=1)
    max_steps: int = flag(0, "stop after this many steps; 0: --epochs", "Training", min=0)
    max_minutes: float = flag(0.0, "stop after this many minutes; 0: no limit", "Training", min=0)
    patience: int = flag(
        0, "early stopping: validations without a lower loss; 0: off", "Training", min=0
    )
    tokens_per_batch: int = flag(
        0, "tokens per step and side, padding included; 0: automatic", "Training", min=0, fixed=True
    )
    accumulate: int = flag(
        0, "micro-batches per step; 0: as few as fit in GPU memory", "Training", min=0
    )
    optimizer: str = flag(
        "muon", "Muon with AdamW, or AdamW alone (muon|adamw)", "Training", fixed=True
    )
    lr: float = flag(
        0.0,
        "peak learning rate; 0: 0.002 (adamw: 0.001), less if wider",
        "Training",
        min=0,
        below=10,
        fixed=True,
    )
    warmup: int = flag(
        1000, "warm-up steps, at most a tenth of the run", "Training", min=1, fixed=True
    )
    label_smoothing: float = flag(0.1, "label smoothing", "Training", min=0, below=1, fixed=True)
    clip: float = flag(1.0, "largest gradient norm; 0: no clipping", "Training", min=0, fixed=True)

    run: str = flag("", "name of the run (runs/NAME); default: the time", "Run", fixed=True)
    resume: str = flag("", "run to continue", "Run")
    eval_every: int = flag(
        0, "steps between validations; 0: once per epoch, at least 250", "Run", min=0
    )
    log_every: int = flag(20, "steps between log lines", "Run", min=1)
    save_minutes: float = flag(10.0, "longest time between checkpoints, in minutes", "Run", above=0)
    keep: int = flag(5, "recent checkpoints to keep, besides the best", "Run", min=1)
    precision: str = flag("auto", "number format (auto|fp32|bf16|fp16)", "Run")
    compile: bool = flag(False, "torch.compile the model", "Run")
    fast: bool = flag(True, "faster code for PyTorch's own layers; false: PyTorch alone", "Run")
    shard: bool = flag(False, "shard weights, gradients and optimizer state (FSDP2)", "Run")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "Run")
    seed: int = flag(1, "seed of weights, dropout and data order", "Run", min=0, fixed=True)
    check: bool = flag(False, "only report whether it would work and what it would cost", "Run")

    def __post_init__(self):
        for name in ("source_vocab", "target_vocab"):
            if 0 < getattr(self, name) < 300:
                raise UserError(
                    f"--{name} {getattr(self, name)} must be at least 300: 256 tokens are bytes"
                )
        if self.source == self.target:
            raise UserError(f"--source and --target are both {self.source!r}; choose two languages")


# Before the heavy imports, so that --help and a wrong flag answer at once.
if __name__ == "__main__":
    settings = parse_flags(Config, "train a translation model; the result goes to runs/NAME")

import math
import shlex
import time
from functools import partial
from pathlib import Path

import torch

import fast
from data import (
    BucketSampler,
    Prepared,
    batches_of,
    collate_for,
    default_tokens_per_batch,
    find_and_prepare,
    load_prepared,
)
from engine import distributed, schedule
from engine.meters import Meter, measured_peak_flops, peak_memory_gib, perplexity
from engine.micro_batches import micro_batches_that_fit
from engine.optimizer import make_optimizer
from engine.precision import choose_precision
from engine.run import INTERRUPTED, Run, saved_settings
from engine.telemetry import progress_bar
from loading import save_description
from model import PRESETS, SummedLoss, Translator, sizes_of, training_flops
from validation import Validation


@dataclass
class State:
    """What a checkpoint keeps besides the weights and the optimizer's moments."""

    data_key: str  # names the token ids that the run is trained on
    step: int = 0
    minutes: float = 0.0  # of training, over all sessions
    last_validation: int = 0  # the step of the last validation
    best_loss: float | None = None  # the lowest validation loss, in nats per token
    best_bleu: float | None = None  # of the same validation, on rank 0
    bad_validations: int = 0  # validations since then


def train(config: Config) -> Path:
    """One training run, from the data to the last checkpoint. Returns its folder."""
    config = saved_settings(config)
    apply_preset(config)
    sizes_of(config, 1, 1)  # sizes that do not fit together are an error now, not after tokenising
    world = distributed.start(config.device)  # this process among those of torchrun
    kind = f"{config.source}-{config.target}"
    with Run(config, kind, world) as run:  # a new folder, or the one to resume
        config, log = run.config, run.log
        precision = choose_precision(world.device, config.precision, training=True, world=world)
        log(precision.describe())

        # -------- data
        prepared = load_data(config, run)
        state = State(data_key=prepared.folder.name)

        # -------- model, loss, optimizer
        sizes = sizes_of(config, len(prepared.source_tokenizer), len(prepared.target_tokenizer))
        torch.manual_seed(config.seed)
        fast.keep_tensors_together(world.device)  # on a CPU: less memory, less time
        model = Translator(sizes).to(world.device)
        if config.shard:
            world.shard(model, log)
        if config.fast and not config.compile:
            # On a CPU, PyTorch's encoder and decoder compute the same in less time.
            fast.use_kernels(model, precision.dtype, log)
        loss_of = SummedLoss(model, config.label_smoothing, sliced=config.fast)
        if not config.lr:
            config.lr = default_learning_rate(config)
        weights = list(model.parameters())
        optimizer = make_optimizer(
            config.optimizer,
            model,
            hidden_layers=model.transformer,
            lr=config.lr,
            dtype=precision.dtype,
        )

        # -------- a resumed run continues with its weights, its moments and its step
        if saved := run.restore(model, optimizer, precision):
            state = State(**saved)

        # -------- the batches of each step
        if not config.tokens_per_batch:
            config.tokens_per_batch = default_tokens_per_batch(prepared, world.device)
        collate = collate_for(prepared)
        sampler = sampler_for(config, prepared, world)
        if not config.accumulate:  # saved in config.json: a resumed run keeps what is found here
            config.accumulate = micro_batches_that_fit(
                loss_of, precision, prepared.train, sampler.heaviest_steps(), collate, world
            )
            sampler = sampler_for(config, prepared, world)
        sampler.step = state.step  # the place in the data: batches depend on the step alone
        target_tokens = sampler.target_tokens(state.step)  # of each step, on all ranks
        batches = batches_of(prepared.train, sampler, collate, config.workers, world.device)
        run.at_end.callback(batches.close)  # ends the DataLoader's processes

        # -------- the length of the run
        steps_per_epoch = sampler.steps_per_epoch
        total_steps = config.max_steps or config.epochs * steps_per_epoch
        warmup = schedule.warmup_steps(config.warmup, total_steps)
        eval_every = config.eval_every or max(250, steps_per_epoch)
        on_each = f" on each of {world.size} processes" if world.size > 1 else ""
        log(str(model))
        log(f"model: {sum(weight.numel() for weight in weights):,} parameters")
        log(
            f"steps: {config.tokens_per_batch:,} tokens each "
            f"in {config.accumulate} micro-batch(es){on_each}, "
            f"{steps_per_epoch:,} steps per epoch, {warmup:,} steps of warm-up, "
            f"{total_steps:,} steps in total"
            + (f" or {config.max_minutes:g} minutes" if config.max_minutes else "")
        )

        # -------- what would fail after an hour fails now; then the folder becomes a run
        validation = Validation(
            model,
            prepared,
            run,
            precision,
            config.tokens_per_batch // sampler.micro_batches,
            fast=config.fast,
        )
        if world.is_main:
            save_description(run.folder, sizes, prepared)
        run.begin(precision)

        # -------- the loop
        if config.compile:
            loss_of = torch.compile(loss_of, dynamic=True)
        parallel_loss = world.data_parallel(loss_of)
        peak_flops = measured_peak_flops(world.device, precision.dtype)
        meter = Meter(config.log_every, peak_flops, partial(training_flops, sizes))
        bar = progress_bar(total=total_steps, initial=state.step, desc=run.folder.name)
        losses = []  # of the steps since the last log line
        saved_minutes = state.minutes
        begun = time.perf_counter() - 60 * state.minutes
        model.train()
        while True:
            # Between two steps: how far is the run? Is it time to validate, save or stop?
            # All ranks use the latest clock, and all stop if one of them got a signal. Otherwise
            # one would leave the loop while the others wait for it.
            minutes = (time.perf_counter() - begun) / 60
            interrupted, state.minutes = world.maximum(run.interrupted(), minutes)
            progress = schedule.progress(state.step, total_steps, state.minutes, config.max_minutes)
            at_validation_step = progress >= 1 or state.step % eval_every == 0
            # Once only: a resumed run may begin at a step that was validated.
            validation_due = at_validation_step and state.step > state.last_validation
            improved = False
            if validation_due and not interrupted:
                loss, bleu = validation(state.step)
                # Comparisons with NaN are False: as the best loss, it could never be improved on.
                improved = math.isfinite(loss) and (
                    state.best_loss is None or loss < state.best_loss
                )
                state.last_validation = state.step
                state.bad_validations += 1
                if improved:
                    state.best_loss = loss
                    state.best_bleu = bleu
                    state.bad_validations = 0
                model.train()
            save_due = state.minutes > saved_minutes + config.save_minutes
            if validation_due or interrupted or save_due:
                run.save(
                    state.step,
                    model,
                    optimizer,
                    asdict(state),
                    precision,
                    best=improved,
                    keep=config.keep,
                )
                saved_minutes = state.minutes
                meter.resume()
            stopped_early = 0 < config.patience <= state.bad_validations
            if interrupted or progress >= 1 or stopped_early:
                break

            # Random numbers depend on seed, step and rank, the learning rate on step and progress.
            step = state.step + 1
            learning_rate = schedule.learning_rate(config.lr, step, progress, warmup)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            world.set_seed(config.seed, step)

            # The gradient of one loss: summed over all pairs of this step, on all ranks,
            # and divided by their number of target tokens.
            tokens = next(target_tokens)
            step_loss = torch.zeros((), device=world.device)
            for micro_batch in range(1, config.accumulate + 1):
                with meter.waiting():
                    batch = next(batches)
                meter.add(batch.source_tokens, batch.target_tokens, batch.padded_tokens)
                # DDP averages the gradients over the ranks, in the last backward pass only.
                is_last = micro_batch == config.accumulate
                with world.accumulate_gradients(parallel_loss, is_last):
                    with precision.autocast():
                        smoothed, plain = parallel_loss(*batch.inputs)
                    # × size: the average over the ranks becomes their sum.
                    precision.backward(smoothed / tokens * world.size)
                step_loss += plain / tokens
            # Clip the gradient, update the weights, clear the gradient.
            gradient_norm = precision.step(optimizer, weights, config.clip, step)
            state.step = step
            losses.append(step_loss)
            meter.end_step()
            bar.update()

            if step % config.log_every == 0 or step == total_steps:
                # Only here does the loop wait for the GPU.
                precision.check_finite()
                loss = world.sum(torch.stack(losses).mean()).item()
                losses.clear()
                curves = {
                    "train/loss": loss,
                    "train/perplexity": perplexity(loss),
                    "train/learning_rate": learning_rate,
                    "train/gradient_norm": gradient_norm.item(),
                    "memory/peak_gib": peak_memory_gib(world.device),
                }
                speed = meter.read(ranks=world.size)
                speed_shown = ""
                if speed:  # not after the first step
                    speed_shown = f"  {speed['speed/tokens_per_second']:,.0f} tokens/s"
                run.scalars(step, curves | speed | precision.curves())
                minutes = (time.perf_counter() - begun) / 60
                done = schedule.progress(step, total_steps, minutes, config.max_minutes)
                done = min(1.0, done)  # the last step may end after the minutes
                minutes_left = minutes * (1 - done) / done
                bar.total = round(step / done)  # steps, also where the minutes end the run
                log(
                    f"step {step:>6,}  epoch {step / steps_per_epoch:5.2f}  loss {loss:.4f}"
                    f"  lr {learning_rate:.2e}  |gradient| {gradient_norm.item():.2f}"
                    f"{speed_shown}  {minutes_left:,.1f} min left"
                )

        bar.close()
        if interrupted:
            reason = INTERRUPTED
        elif progress >= 1:
            reason = "finished"
        else:
            reason = f"{state.bad_validations} validation(s) without a better loss"
        run.close(reason, state.step)
        if not interrupted:
            results = {
                "result/best_validation_loss": state.best_loss,
                "result/validation_bleu": state.best_bleu,
            }
            run.telemetry.hyperparameters(config, results)
            log(f"next: python evaluate.py --ckpt {shlex.quote(str(run.folder))}")
        return run.folder


def apply_preset(config: Config) -> None:
    """--preset base or big: its sizes, except for those that flags set. A resumed run has them."""
    if not config.resume:
        fill_in(config, PRESETS[config.preset])


def load_data(config: Config, run: Run) -> Prepared:
    """Token ids and tokenizers. Rank 0 makes them, in the cache beside the runs; all ranks read."""
    if config.max_minutes:
        run.log("note: preparing the data and the last validation are not part of --max_minutes")
    folder, config.data, config.tokenizer = run.world.on_main(
        lambda: find_and_prepare(config, run.cache, run.log)
    )
    try:
        prepared = load_prepared(folder)
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not on this machine; runs/ must be on a disk that all machines share"
        ) from None
    if config.select:
        prepared.select_like_validation(run.log)
    if run.saved_state and run.saved_state["data_key"] != prepared.folder.name:
        raise UserError(
            f"--resume {run.folder}: {config.data} or the tokenizer is not what the run began "
            "with; restore it, or start a new run"
        )
    return prepared


def sampler_for(config: Config, prepared: Prepared, world: distributed.World) -> BucketSampler:
    """The pairs of every step, and this rank's share of them."""
    return BucketSampler(
        prepared.train.lengths,
        config.tokens_per_batch,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
        accumulate=config.accumulate or 1,
    )


def default_learning_rate(config: Config) -> float:
    """The best measured at width 256 (docs/training.md); a wider model needs a lower rate."""
    peak = {"muon": 2e-3, "adamw": 1e-3}[config.optimizer]
    return peak * min(1, 256 / config.d_model)


def main(config: Config) -> None:
    """Train, or with --check only try whether it would work."""
    if config.check:
        from tools.preflight import check

        apply_preset(config)
        check(config)
    else:
        train(config)


if __name__ == "__main__":
    run_script(lambda: main(settings))
