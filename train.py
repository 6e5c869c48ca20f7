"""Train a Chinese→English Transformer. Everything about a run goes to runs/NAME/.

python train.py                                     # no flag is needed, on a CPU or one GPU
python train.py --data my_corpus/ --max_minutes 60  # other data; stop after an hour
CUDA_VISIBLE_DEVICES=1 python train.py              # choose a GPU
torchrun --nproc_per_node 2 train.py                # data parallel (DDP); with --shard: FSDP2
python train.py --resume runs/NAME                  # continue exactly where it stopped
python train.py --init runs/NAME --data my_corpus/  # fine-tune a trained model on other data
"""

from dataclasses import asdict, dataclass
from typing import ClassVar

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from engine.optimizer import OPTIMIZERS
from engine.schedule import SCHEDULES

# What helps when memory is full. --resume keeps --tokens_per_batch.
SMALLER_PARTS = (
    "give `--resume RUN --accumulate N` with twice the micro-batches of the line `steps:` in "
    "train.log, or begin anew with a smaller --tokens_per_batch"
)
BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
# "0.002 (muon), 0.001 (adamw)"
DEFAULT_RATES = ", ".join(f"{each.lr:g} ({name})" for name, each in OPTIMIZERS.items())


@dataclass
class Config:
    """Every setting of a run.

    Why the defaults are what they are: docs/results.md and docs/training.md#the-recipe.

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

    init: str = flag(
        "",
        "begin with the weights, tokenizers and sizes of this run, checkpoint or weights file",
        "Model",
        fixed=True,
    )
    freeze: str = flag(
        "",
        "weights that are not trained (encoder|embeddings); encoder: with the source embedding",
        "Model",
        fixed=True,
    )
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
        "muon", f"optimizer of the weights ({'|'.join(OPTIMIZERS)})", "Training", fixed=True
    )
    lr: float = flag(
        0.0,
        f"peak learning rate; 0: {DEFAULT_RATES}, less if wider",
        "Training",
        min=0,
        below=10,
        fixed=True,
    )
    schedule: str = flag(
        "wsd", f"shape of the learning rate ({'|'.join(SCHEDULES)})", "Training", fixed=True
    )
    warmup: int = flag(
        1000, "warm-up steps, at most a tenth of the run", "Training", min=1, fixed=True
    )
    label_smoothing: float = flag(0.1, "label smoothing", "Training", min=0, below=1, fixed=True)
    clip: float = flag(1.0, "largest gradient norm; 0: no clipping", "Training", min=0, fixed=True)

    run: str = flag("", "name of the run (runs/NAME); default: the time", "Run", fixed=True)
    resume: str = flag("", "run to continue", "Run")
    eval_every: int = flag(
        0, "steps between validations; 0: once per epoch, at least 6 per run", "Run", min=0
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
        # The help text lists choices (a|b), which are checked, only where there are several.
        if self.schedule not in SCHEDULES:
            raise UserError(f"--schedule {self.schedule} is unknown; choose {', '.join(SCHEDULES)}")


# Before the heavy imports, so that --help and a wrong flag answer at once.
if __name__ == "__main__":
    settings = parse_flags(Config, "train a translation model; the result goes to runs/NAME")

import math
import shlex
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

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
from engine.config import beside, given_names
from engine.distributed import World
from engine.meters import Meter, measured_peak_flops, peak_memory_gib, perplexity
from engine.optimizer import make_optimizer, trained_weights
from engine.precision import Precision, choose_precision
from engine.run import INTERRUPTED, Run, load_weights_into, saved_settings, with_values
from engine.telemetry import progress_bar
from loading import load_chosen, save_description, with_source
from micro_batches import micro_batches_that_fit
from model import (
    OTHER_TOKENS,
    PRESETS,
    ModelConfig,
    SummedLoss,
    Translator,
    freeze,
    make_loss,
    make_translator,
    sizes_of,
    training_flops,
)
from text.reading import SAMPLE_NOTICE
from validation import Validation


@dataclass
class State:
    """What a checkpoint keeps besides the weights and the optimizer's moments."""

    data_key: str  # names the token ids that the run is trained on
    step: int = 0
    minutes: float = 0.0  # of training, over all sessions; validating and saving included
    last_validation: int = 0  # the step of the last validation
    last_validation_minutes: float = 0.0  # `minutes` when it began
    best_loss: float | None = None  # the lowest validation loss, in nats per token
    best_bleu: float | None = None  # of the same validation, on rank 0
    bad_validations: int = 0  # validations since the one with the best loss

    def take(self, loss: float, bleu: float | None) -> bool:
        """Note the result of a validation; returns whether its loss is the best so far."""
        # Comparisons with NaN are False: as the best loss, it could never be improved on.
        improved = math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss)
        self.bad_validations += 1
        if improved:
            self.best_loss = loss
            self.best_bleu = bleu
            self.bad_validations = 0
        return improved


def train(config: Config) -> Path:
    """One training run, from the data to the last checkpoint. Returns its folder."""
    config = with_sizes(saved_settings(config))
    sizes_of(config, 1, 1)  # sizes that do not fit together are an error now, not after tokenising
    world = distributed.init(config.device)  # this process among those of torchrun
    languages = f"{config.source}-{config.target}"
    with Run(config, "translation", world, languages) as run:  # a new folder, or the one to resume
        log = run.log
        # The format of matrix products. The weights stay fp32: an update of a thousandth of a
        # weight would be rounded away in bf16, which has 8 bits.
        precision = choose_precision(world.device, config.precision, training=True, world=world)
        log(precision.describe())

        # -------- data, and a value for every automatic setting; nothing changes them afterwards
        prepared, config = load_data(config, run)
        sizes = sizes_of(config, len(prepared.source_tokenizer), len(prepared.target_tokenizer))
        config = resolve(config, sizes, prepared, precision, world)

        # -------- model, loss, optimizer
        # Every rank draws the same weights from the same seed, so none has to be sent.
        torch.manual_seed(config.seed)
        fast.keep_tensors_together(world.device)  # on a CPU: less memory, less time
        model = make_translator(sizes).to(world.device)
        if config.init and not run.saved_state:
            load_initial_weights(model, config, run)
        freeze(model, config.freeze)
        if config.shard:
            world.shard(model, log)
        loss_of = make_loss(model, config, precision.dtype, log)
        weights = trained_weights(model)
        # Muon is for the matrices of the hidden layers: those of model.transformer.
        optimizer = make_optimizer(
            config.optimizer, model, model.transformer, config.lr, precision.dtype
        )

        # -------- a resumed run continues with its weights, its moments and its step
        state = State(data_key=prepared.folder.name)
        saved_step = -1  # of the last checkpoint
        if saved := run.restore(model, optimizer, precision):
            state = State(**saved)
            saved_step = state.step

        # -------- the batches of each step
        sampler = BucketSampler(
            prepared.train.lengths,
            config.tokens_per_batch,
            seed=config.seed,
            rank=world.rank,
            world_size=world.size,
            accumulate=config.accumulate,
        )
        sampler.step = state.step  # the place in the data: batches depend on the step alone
        # A pair of long sentences weighs more than one of short ones, so a loss is a mean over
        # tokens; all ranks must divide by the same number, the tokens of the whole step.
        target_tokens = sampler.target_tokens(state.step)
        batches = batches_of(
            prepared.train, sampler, collate_for(prepared), config.workers, world.device
        )
        run.at_end.callback(batches.close)  # ends the DataLoader's processes

        # -------- the length of the run
        steps_per_epoch = sampler.steps_per_epoch
        total_steps = config.max_steps or config.epochs * steps_per_epoch
        progress_at = partial(
            schedule.progress, total_steps=total_steps, max_minutes=config.max_minutes
        )
        # A small rate first, because the optimizer's running means then rest on few gradients.
        warmup = schedule.warmup_steps(config.warmup, total_steps)
        log(str(model))
        log(describe_parameters(model))
        log(describe_steps(config, world, steps_per_epoch, total_steps, warmup))

        # -------- what would fail after an hour fails now; then the folder becomes a run
        tokens_per_micro_batch = config.tokens_per_batch // sampler.micro_batches
        validation = Validation(
            model, prepared, run, precision, tokens_per_micro_batch, fast=config.fast
        )
        run.record_start(config, precision)
        if world.is_main:
            save_description(run.folder, sizes, prepared, is_new=not config.resume)

        # -------- the loop
        # While the rate is level, an estimate of the loss is enough, and more steps fit into the
        # time. While it falls, which determines the result, the loss is exact.
        may_sample = isinstance(loss_of, SummedLoss) and not config.compile and loss_of.can_sample()
        flops_of = partial(training_flops, sizes)
        if may_sample:
            log(describe_sampling())
            flops_of = loss_of.flops
        if config.compile:
            # Batches have many shapes; without `dynamic` each would be compiled anew.
            loss_of = torch.compile(loss_of, dynamic=True)
        parallel_loss = world.data_parallel(loss_of)
        peak_flops = measured_peak_flops(world.device, precision.dtype)
        meter = Meter(config.log_every, peak_flops, flops_of)
        # In percent: what ends the run may be steps or minutes.
        bar = progress_bar(total=100, desc=run.folder.name, bar_format=BAR)
        losses: list[Tensor] = []  # of the steps since the last log line
        estimated = False  # whether one of them is an estimate
        saved_minutes = state.minutes
        session_began = time.perf_counter() - 60 * state.minutes
        model.train()  # dropout on
        while True:
            # Between two steps: how far is the run? Is it time to log, validate, save or stop?
            # All ranks take the latest clock, and all stop if one of them got a signal. Otherwise
            # one would leave the loop while the others wait for it.
            interrupted = run.stop_asked()
            state.minutes = world.maximum(minutes_since(session_began))[0]
            progress = progress_at(state.step, minutes=state.minutes)
            bar.update(100 * min(1.0, progress) - bar.n)

            progress_before = progress_at(
                state.last_validation, minutes=state.last_validation_minutes
            )
            is_validation_step = schedule.is_validation_step(
                state.step, progress, progress_before, config.eval_every, steps_per_epoch
            )
            # A resumed run may begin at a step that was validated before. After a signal there is
            # no time for a validation.
            validation_due = (
                is_validation_step and state.step > state.last_validation and not interrupted
            )
            improved = False
            if validation_due:
                state.last_validation = state.step
                state.last_validation_minutes = state.minutes
                loss, bleu = validation(state.step)
                improved = state.take(loss, bleu)
                model.train()

            late = state.minutes > saved_minutes + config.save_minutes
            if validation_due or (state.step > saved_step and (interrupted or late)):
                run.save(
                    state.step, model, optimizer, asdict(state), precision, improved, config.keep
                )
                saved_step = state.step
                saved_minutes = state.minutes
                meter.resume()
                continue  # validating and saving took time: look at the clock again

            stopped_early = 0 < config.patience <= state.bad_validations
            if interrupted or progress >= 1 or stopped_early:
                break

            # Random numbers depend on seed, step and rank, the learning rate on step and progress:
            # a resumed run repeats what an uninterrupted one would have drawn.
            step = state.step + 1
            learning_rate = schedule.learning_rate(
                config.lr, step, progress, warmup, config.schedule
            )
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            world.set_seed(config.seed, step)
            loss_of.sampled = may_sample and not schedule.is_falling(progress, config.schedule)

            # The loss of a step is the mean over its target tokens, those of all micro-batches and
            # ranks: each part sums its losses and divides by the number of all.
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
                        # Smoothing keeps the model from being too sure of itself. Only the loss
                        # without it makes a perplexity, so that one is logged.
                        smoothed, plain = parallel_loss(*batch.inputs)
                    # DDP divides the sum over the ranks by their number; × size undoes that.
                    precision.backward(smoothed / tokens * world.size)
                step_loss += plain / tokens
            # Clip the gradient, so that one odd batch cannot throw the weights far away; update
            # the weights; clear the gradient, which backward() would otherwise add to.
            gradient_norm = precision.step(optimizer, weights, config.clip, step)
            state.step = step
            losses.append(step_loss)  # still on the GPU: reading it here would wait for the step
            estimated = estimated or loss_of.sampled
            meter.end_step()

            if step % config.log_every == 0 or step == total_steps:
                # Only here does the loop wait for the GPU.
                curves = training_curves(
                    losses, learning_rate, gradient_norm, meter, precision, world
                )
                losses.clear()
                run.scalars(step, curves)
                minutes = minutes_since(session_began)
                done = progress_at(step, minutes=minutes)
                minutes_left = minutes * (1 - min(1.0, done)) / done
                log(step_line(step, step / steps_per_epoch, curves, minutes_left, estimated))
                estimated = False

        bar.close()
        if interrupted:
            reason = INTERRUPTED
        elif progress >= 1:
            reason = "finished"
        else:
            reason = f"{state.bad_validations} validation(s) without a better loss"
        run.close(reason, state.step)
        if not interrupted:
            announce_results(run, config, state)
        run.write_outcome(
            INTERRUPTED if interrupted else "finished",
            SAMPLE_NOTICE if prepared.summary["is_sample"] else "",
        )
        return run.folder


# ---------------------------------------------------------------- settings


def with_sizes(config: Config) -> Config:
    """The settings with the sizes of --init or --preset, except for those that flags set."""
    if config.resume:  # it has its sizes
        return config
    if config.init:
        return with_source(config)
    sizes = PRESETS[config.preset]
    chosen = given_names(config)
    return with_values(config, **{name: sizes[name] for name in sizes.keys() - chosen})


def resolve(
    config: Config, sizes: ModelConfig, prepared: Prepared, precision: Precision, world: World
) -> Config:
    """The settings with a value for each that was 0, automatic. config.json keeps these values.

    So a resumed run has the same ones, also on another machine. `eval_every` stays automatic: it
    depends on the length of the run, which may change.
    """
    tokens = config.tokens_per_batch or default_tokens_per_batch(prepared, world.device)

    def trial_loss() -> nn.Module:
        """Of a model for the trial alone."""
        return make_loss(make_translator(sizes).to(world.device), config, precision.dtype)

    accumulate = config.accumulate
    if not accumulate and config.shard and world.size > 1:
        accumulate = 1  # the ranks of a sharded model cannot be tried one by one
    if not accumulate:
        accumulate = micro_batches_that_fit(trial_loss, prepared, tokens, precision, world)
    return with_values(
        config,
        tokens_per_batch=tokens,
        accumulate=accumulate,
        lr=config.lr or default_learning_rate(config),
    )


def default_learning_rate(config: Config) -> float:
    """The best measured at width 256 (docs/training.md); a wider model needs a lower rate."""
    return OPTIMIZERS[config.optimizer].lr * min(1, 256 / config.d_model)


# ---------------------------------------------------------------- parts of the run


def load_data(config: Config, run: Run) -> tuple[Prepared, Config]:
    """Token ids and tokenizers, and the settings with absolute paths to their sources.

    Rank 0 makes the ids, in the cache beside the runs; all ranks read them.
    """
    if config.max_minutes:
        run.log("note: preparing the data and the last validation are not part of --max_minutes")
    if config.init and run.saved_state:  # the run that it began with may be gone
        config = with_values(config, tokenizer=str(run.folder / "tokenizer"))
    folder, data, tokenizer = run.world.on_main(
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
            f"--resume {run.folder}: {data} or the tokenizer is not what the run began "
            "with; restore it, or start a new run"
        )
    return prepared, with_values(config, data=data, tokenizer=tokenizer)


def load_initial_weights(model: Translator, config: Config, run: Run) -> None:
    """Fine-tuning: the weights of --init into the model, in place of the random ones."""
    # Rank 0 chooses for all: a run that still trains may get a new best checkpoint in between.
    chosen = Path(run.world.on_main(lambda: config.init))
    trained = load_chosen(chosen)
    load_weights_into(model, trained.model.state_dict(), chosen)
    run.log(f"init: weights of {trained.name}; new optimizer, step 0")


# ---------------------------------------------------------------- what is logged


def describe_parameters(model: Translator) -> str:
    """One line: the number of parameters, and how many of them are trained."""
    total = sum(weight.numel() for weight in model.parameters())
    trained = sum(weight.numel() for weight in trained_weights(model))
    return f"model: {total:,} parameters, {trained:,} of them trained"


def describe_steps(
    config: Config, world: World, steps_per_epoch: int, total_steps: int, warmup: int
) -> str:
    """One line: what a step is, and how many there will be."""
    on_each = f" on each of {world.size} processes" if world.size > 1 else ""
    or_minutes = ""
    or_share = ""
    if config.max_minutes:
        or_minutes = f" or {config.max_minutes:g} minutes"
        or_share = f" or {config.max_minutes * schedule.WARMUP_SHARE:g} minutes"
    return (
        f"steps: {config.tokens_per_batch:,} tokens each "
        f"in {config.accumulate} micro-batch(es){on_each}, {steps_per_epoch:,} steps per epoch, "
        f"{warmup:,} steps{or_share} of warm-up, {total_steps:,} steps{or_minutes} in total"
    )


def describe_sampling() -> str:
    """One line: why a loss is marked with ~."""
    return (
        "note: until the learning rate falls, the training loss is an estimate, marked ~, from all "
        f"target tokens of a micro-batch and {OTHER_TOKENS:,} others of the vocabulary"
    )


def training_curves(
    losses: list[Tensor],
    learning_rate: float,
    gradient_norm: Tensor,
    meter: Meter,
    precision: Precision,
    world: World,
) -> dict[str, float]:
    """The figures of the steps since the last log line; all ranks must call."""
    precision.check_finite()
    # A rank has the sum over its own pairs, divided by the tokens of all: together, the mean.
    loss = world.sum(torch.stack(losses).mean()).item()
    curves = {
        "train/loss": loss,
        "train/perplexity": perplexity(loss),
        "train/learning_rate": learning_rate,
        "train/gradient_norm": gradient_norm.item(),
        "memory/peak_gib": peak_memory_gib(world.device),
    }
    return curves | meter.read(ranks=world.size) | precision.curves()


def step_line(
    step: int, epoch: float, curves: dict[str, float], minutes_left: float, estimated: bool
) -> str:
    """The line of a step, for a terminal of 80 columns."""
    loss = f"{curves['train/loss']:.3f}"
    if estimated:
        loss = f"~{curves['train/loss']:.2f}"
    speed = ""
    if "speed/tokens_per_second" in curves:  # not after the first step
        speed = f"  {curves['speed/tokens_per_second']:,.0f} tok/s"
    digits = 0 if minutes_left >= 10 else 1
    return (
        f"step {step:>5,}  epoch {epoch:.1f}  loss {loss}"
        f"  lr {curves['train/learning_rate']:.1e}{speed}"
        f"  about {minutes_left:,.{digits}f} min left"
    )


def announce_results(run: Run, config: Config, state: State) -> None:
    """The results beside the settings in TensorBoard (HPARAMS), and the commands that come next."""
    results = {
        "result/best_validation_loss": state.best_loss,
        "result/validation_bleu": state.best_bleu,
    }
    run.telemetry.hyperparameters(config, results)
    folder = shlex.quote(str(run.folder))
    run.log(f"next: {beside('evaluate.py')} --ckpt {folder}")
    run.log(f"then: {beside('report.py')} {folder}")


def minutes_since(began: float) -> float:
    """Minutes since a time of `time.perf_counter`."""
    return (time.perf_counter() - began) / 60


def main(config: Config) -> None:
    """Train, or with --check only try whether it would work."""
    if config.check:
        from tools.preflight import check

        check(with_sizes(config))
    else:
        train(config)


if __name__ == "__main__":
    run_script(lambda: main(settings), SMALLER_PARTS)
