"""Train a Chinese→English Transformer; everything about the run goes to runs/<name>/.

python train.py                                    # works without flags, on a CPU or one GPU
CUDA_VISIBLE_DEVICES=1 python train.py             # choose a card
torchrun --nproc_per_node 2 train.py               # data parallel
python train.py --data my_corpus/ --max_minutes 60 # other data; an hour of training
python train.py --resume runs/NAME                 # continue exactly where it stopped
"""

from dataclasses import asdict, dataclass

from engine.config import checked, flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Every setting of a training run; reasons: docs/training.md. `before`: what runs older than the flag did."""

    data: str = flag("", "directory, file or hub id; default: /opt/minidataset or sample/", "Data")
    source: str = flag("zh", "source language", "Data")
    target: str = flag("en", "target language", "Data")
    tokenizer: str = flag("", "pretrained tokenizer for both sides; default: train two", "Data")
    source_vocab: int = flag(
        -1, "source vocabulary, 300 at least; -1: 16000 or fewer", "Data", min=-1
    )
    target_vocab: int = flag(
        -1, "target vocabulary, 300 at least; -1: the same rule", "Data", min=-1
    )
    max_length: int = flag(
        512, "longest sentence in tokens, end included; longer dropped", "Data", min=8
    )
    select: bool = flag(True, "leave out pairs unlike the validation set", "Data")
    workers: int = flag(0, "processes that load batches; 0: none extra", "Data", min=0, max=1000)

    preset: str = flag("lab", "model size (lab|base|big); the flags below change it", "Model")
    d_model: int = flag(0, "model width; 0 here and below: from the preset", "Model", min=0)
    nhead: int = flag(0, "attention heads", "Model", min=0)
    num_encoder_layers: int = flag(0, "encoder layers", "Model", min=0, max=1000)
    num_decoder_layers: int = flag(0, "decoder layers", "Model", min=0, max=1000)
    dim_feedforward: int = flag(0, "width of the feed-forward layers", "Model", min=0)
    dropout: float = flag(-1.0, "dropout rate; -1: from the preset", "Model", min=-1, below=1)
    dropout_after: int = flag(
        -1, "passes before dropout; -1: 10, or 0 with a --dropout", "Model", min=-1
    )
    norm_first: bool = flag(False, "layer norm before each sub-layer (pre-norm)", "Model")
    attention: str = flag("", "attention by hand (python|recompute|cpp)", "Model")

    epochs: int = flag(20, "passes over the data", "Training", min=1)
    max_steps: int = flag(0, "stop after this many steps; 0: use --epochs", "Training", min=0)
    max_minutes: float = flag(0.0, "stop after this many minutes; 0: no limit", "Training", min=0)
    patience: int = flag(
        0, "early stopping: validations without a better loss; 0: off", "Training", min=0
    )
    tokens_per_batch: int = flag(
        0, "tokens per step on each side, with padding; 0: automatic", "Training", min=0
    )
    accumulate: int = flag(
        0, "micro-batches per step; 0: as few as fit in GPU memory", "Training", min=0
    )
    optimizer: str = flag("muon", "muon: for matrices, AdamW for the rest (muon|adamw)", "Training")
    lr: float = flag(
        0.0, "peak rate; 0: 0.002 (adamw: 0.001), less if wider", "Training", min=0, below=10
    )
    warmup: int = flag(
        0, "warm-up steps, cut to fit minutes; 0: a tenth, at most 1000", "Training", min=0
    )
    label_smoothing: float = flag(0.1, "label smoothing", "Training", min=0, below=1)
    clip: float = flag(1.0, "gradient clipping: largest norm; 0: off", "Training", min=0)

    run: str = flag("", "name of the run (folder runs/NAME); default: the time", "Run")
    resume: str = flag("", "run folder to continue", "Run")
    eval_every: int = flag(0, "steps between validations; 0: an epoch, 250 to 1000", "Run", min=0)
    log_every: int = flag(20, "steps between log lines", "Run", min=1)
    save_minutes: float = flag(
        10.0, "minutes between checkpoints, besides those of validations", "Run", above=0
    )
    keep: int = flag(5, "newest checkpoints that are kept, besides the best", "Run", min=1)
    precision: str = flag("auto", "number format (auto|fp32|bf16|fp16)", "Run")
    compile: bool = flag(False, "torch.compile the model", "Run")
    shard: bool = flag(
        False, "share weights, gradients and moments out between processes (FSDP2)", "Run"
    )
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "Run")
    seed: int = flag(1, "seed of weights, dropout and data order", "Run", min=0)
    check: bool = flag(False, "only say whether it will work and what it would cost", "Run")
    explain_masks: bool = flag(False, "only show the masks of a toy batch", "Run")

    def __post_init__(self):
        for name in ("source_vocab", "target_vocab"):
            if 0 < getattr(self, name) < 300:
                raise UserError(
                    f"--{name} {getattr(self, name)} must be at least 300: 256 tokens are single bytes"
                )
        if self.source == self.target:
            raise UserError(f"--source and --target are both {self.source!r}; choose two languages")


if (
    __name__ == "__main__"
):  # before the heavy imports, so that --help and a wrong flag answer at once
    config = parse_flags(Config, "train a translation model; the result goes to runs/NAME")

import math
import shlex
import time
from functools import partial
from pathlib import Path

import torch

import fast
from data import (
    BucketSampler,
    batches_of,
    collate_for,
    default_tokens_per_batch,
    find_and_prepare,
    load_prepared,
)
from engine import distributed, schedule
from engine.memory import fewest_parts
from engine.optimizer import make_optimizer
from engine.precision import choose_precision
from engine.run import INTERRUPTED, Run, saved_settings
from engine.telemetry import Meter, measured_peak_flops, peak_memory_gib, progress
from loading import save_description
from model import SummedLoss, Translator, sizes_of, training_flops
from tools.reporting.preflight import only_asked
from validation import Validation

# Flags that --resume may change; any other would make it another run.
MAY_CHANGE = {
    "data",
    "tokenizer",
    "epochs",
    "max_steps",
    "max_minutes",
    "patience",
    "workers",
    "device",
    "precision",
    "compile",
    "shard",
    "accumulate",
    "attention",
    "eval_every",
    "log_every",
    "save_minutes",
    "keep",
}


def train(config: Config) -> Path:
    """One training run, from the data to the last checkpoint; → its folder."""
    config = checked(
        saved_settings(config, MAY_CHANGE)
    )  # on --resume the run's: the device is one of them
    sizes_of(config, 1, 1)  # reject wrong sizes now, not after an hour of tokenising
    world = distributed.start(
        config.device
    )  # this process among those of torchrun: world.rank of world.size
    with Run.start(config, f"{config.source}-{config.target}", world, MAY_CHANGE) as run:
        config, log = (
            run.config,
            run.log,
        )  # run.state: what the last checkpoint saved; None in a fresh run
        precision = choose_precision(world.device, config.precision, training=True, world=world)
        log(precision.describe())

        # -------- data: made by rank 0 in the cache beside the runs; the other ranks wait, then read it
        folder, config.data, config.tokenizer = world.on_main(
            lambda: find_and_prepare(config, run.cache, log)
        )
        prepared = load_prepared(folder)
        if config.select:
            prepared.select_like_validation(log)
        if run.state and run.state["data_key"] != prepared.summary["key"]:
            raise UserError(
                f"{run.folder}: {config.data} or the tokenizer is not what the run began with; put it back"
            )

        # -------- model, loss, optimiser; a resumed run restores them
        sizes = sizes_of(config, len(prepared.source_tokenizer), len(prepared.target_tokenizer))
        torch.manual_seed(config.seed)
        fast.keep_tensors_together(world.device)  # on a CPU: less memory, less time
        model = Translator(sizes).to(world.device)
        if config.attention:  # the same weights, computed by hand
            from labs.attention_op import use_in

            use_in(model, config.attention)
        sharded = config.shard and world.shard(model, log)
        loss_of = (
            None
            if config.compile
            else fast.loss(model, config.label_smoothing, precision.dtype, log)
        )
        loss_of = loss_of or SummedLoss(
            model, config.label_smoothing
        )  # plain: also what --compile wraps
        parameters = list(model.parameters())
        if config.dropout_after < 0:  # who asks for a rate wants to see what it does
            config.dropout_after = 0 if config.dropout >= 0 else 10
        config.lr = config.lr or {"muon": 2e-3, "adamw": 1e-3}[config.optimizer] * min(
            1, 256 / sizes.d_model
        )
        optimizer = make_optimizer(
            config.optimizer, model, model.transformer, config.lr, precision.dtype
        )
        state = {
            "step": 0,
            "minutes": 0.0,  # of all sessions
            "saved": 0.0,  # minutes at the last checkpoint
            "best_loss": None,
            "best_bleu": None,
            "validated": 0,  # step of the last validation
            "stale": 0,  # validations since the best one
            "world_size": world.size,
            "accumulate": 0,
            "plan": 0,  # BucketSampler.plan_id
            # [smoothed, plain] losses since the last log line, a pair for each rank
            "window": {"steps": 0, "losses": [[0.0, 0.0]]},
        }
        state |= run.restore(model, optimizer, precision) or {}

        # -------- the pairs of each step, in this rank's micro-batches; a resumed run goes on with the same ones
        config.tokens_per_batch = config.tokens_per_batch or default_tokens_per_batch(
            prepared, world.device
        )
        collate = collate_for(
            prepared, pad_multiple=16 if config.compile else 1, longest=config.max_length
        )
        sampler_of = partial(
            BucketSampler,
            tokens_per_batch=config.tokens_per_batch,
            seed=config.seed,
            rank=world.rank,
            world_size=world.size,
        )

        def try_heaviest_steps(accumulate: int) -> None:
            """Run out of memory now, if ever. `_held`: as large as AdamW's two averages and the buckets DDP sends."""
            _held = [torch.empty_like(weight) for weight in parameters for _ in range(3)]
            for pairs in sampler_of(prepared.train.lengths).heaviest_steps():
                batch = collate(prepared.train.__getitems__(pairs[:: accumulate * world.size])).to(
                    world.device
                )
                with precision.autocast():
                    loss, _ = loss_of(
                        batch.src, batch.src_pad, batch.tgt_in, batch.real, batch.tgt_out
                    )
                loss.backward()

        accumulate = config.accumulate or (
            state["accumulate"] if state["world_size"] == world.size else 0
        )
        if (
            not accumulate
        ):  # neither asked for nor known from before: as few as fit, on all ranks alike
            accumulate = (
                1
                if sharded
                else int(world.maximum(fewest_parts(try_heaviest_steps, world.device))[0])
            )
            model.zero_grad(set_to_none=True)
        sampler = sampler_of(prepared.train.lengths, accumulate=accumulate)
        sampler.step = state["step"]
        if note := sampler.describe_change(state):
            log(note)
        state.update(world_size=world.size, accumulate=accumulate, plan=sampler.plan_id)
        micro_batches = batches_of(prepared.train, sampler, collate, config.workers, world.device)
        run.at_end.callback(micro_batches.close)  # ends the loader's processes
        tokens_of_steps = sampler.target_tokens(state["step"])
        steps_per_epoch = sampler.steps_per_epoch

        plan, state["end"] = schedule.plan_of_run(
            config, steps_per_epoch, run.state
        )  # of the learning rate
        log(
            f"model: {sum(p.numel() for p in parameters):,} parameters; {config.tokens_per_batch:,} tokens per step, "
            f"in {sampler.parts} part(s), {steps_per_epoch:,} steps per epoch, {plan.total:,} steps in total"
            + (f" or {config.max_minutes:g} minutes" if config.max_minutes else "")
        )

        # -------- what would break after an hour breaks now; from here on the folder is a run
        validation = Validation(
            model, prepared, collate, run, precision, config.tokens_per_batch // sampler.parts
        )
        if world.is_main and not run.state:
            save_description(run.folder, sizes, prepared)
        run.begin()

        # -------- the loop
        runner = world.data_parallel(
            torch.compile(loss_of, dynamic=True) if config.compile else loss_of
        )
        meter = Meter(config.log_every, measured_peak_flops(world.device, precision.dtype))
        bar = progress(total=plan.total, initial=state["step"], unit="step", desc=run.folder.name)
        eval_every = config.eval_every or min(1000, max(250, steps_per_epoch))
        # [smoothed, plain] loss summed since the log's last line, by rank; resumed with other ranks, rank 0 takes all.
        sums, window_steps = state["window"]["losses"], state["window"]["steps"]
        mine = (
            sums[world.rank]
            if len(sums) == world.size
            else [sum(pair) * world.is_main for pair in zip(*sums)]
        )
        window_loss = torch.tensor(mine, device=world.device)  # (2,)

        def log_step(step: int, norm: float) -> None:
            """The figures since the last line. No step in between waits for the GPU."""
            precision.check_finite()
            smoothed, loss = (
                world.sum(window_loss.clone()) / window_steps
            ).tolist()  # a clone: it sums in place
            figures = meter.read(ranks=world.size)
            speed, lr = figures.get("speed/tokens_per_second", 0.0), plan.learning_rate(step)
            values = {
                "train/loss": loss,
                "train/perplexity": math.exp(min(loss, 50)),
                "train/smoothed_loss": smoothed,
            }
            values |= {"train/learning_rate": lr, "train/gradient_norm": norm}
            values |= (
                {"train/loss_scale": precision.scaler.get_scale()}
                if precision.scaler.is_enabled()
                else {}
            )
            run.scalars(step, values | figures | {"memory/peak_gib": peak_memory_gib(world.device)})
            left = plan.minutes_left(step, state["minutes"], config.max_minutes)
            bar.total = round(
                step * (1 + left / state["minutes"])
            )  # makes tqdm's own estimate equal `left`
            log(
                f"step {step:>6,}  epoch {step / steps_per_epoch:5.2f}  loss {loss:.4f}  lr {lr:.2e}  "
                f"|gradient| {norm:.2f}  {speed:,.0f} tokens/s  {left:,.1f} min left"
            )

        def validate(step: int) -> bool:
            """Validation loss, BLEU and samples; true if the loss is the best so far."""
            loss, bleu = validation(step)
            # A loss that is not finite is never the best one: no later loss would be smaller than NaN.
            improved = math.isfinite(loss) and (
                state["best_loss"] is None or loss < state["best_loss"]
            )
            state.update(validated=step, stale=0 if improved else state["stale"] + 1)
            if improved:
                state.update(best_loss=loss, best_bleu=bleu)
            model.train()
            return improved

        def save(best: bool = False) -> None:
            """A checkpoint of this step, with all that a resumed run needs to write the same lines."""
            state.update(
                saved=state["minutes"], schedule=asdict(plan), data_key=prepared.summary["key"]
            )
            state["window"] = {"steps": window_steps, "losses": world.gather(window_loss.tolist())}
            run.save(state["step"], model, optimizer, state, precision, best=best, keep=config.keep)
            meter.resume()  # the speed is that of steps alone, without this and the validation before

        begun, step, limit = (
            time.perf_counter() - 60 * state["minutes"],
            state["step"],
            config.max_minutes,
        )
        why_stop = plan.why_stop(step, state["minutes"], limit)
        if step and state["validated"] != step and (why_stop or step % eval_every == 0):
            save(best=validate(step))  # the run was interrupted when a validation was due
        model.train()
        while not why_stop and (
            config.patience == 0 or state["stale"] < config.patience
        ):  # else early stopping
            # Learning rate and randomness are functions of the step: a resumed run draws what it would have drawn anyway.
            step = state["step"] + 1
            for group in optimizer.param_groups:
                group["lr"] = plan.learning_rate(step)
            world.set_seed(config.seed, step)
            model.set_dropout(
                sizes.dropout if step > config.dropout_after * steps_per_epoch else 0.0
            )

            # The gradient of the loss over every pair of this step, in all micro-batches and on all ranks.
            tokens = next(tokens_of_steps)
            for micro_batch in range(accumulate):
                waiting = time.perf_counter()
                batch = next(micro_batches)
                places = batch.src.numel() + batch.tgt_in.numel()  # tokens and padding
                meter.add(
                    batch.source_tokens, batch.target_tokens, places, time.perf_counter() - waiting
                )
                # DDP averages gradients over the ranks while a backward pass runs; only the last one of a step needs it.
                is_last = micro_batch == accumulate - 1
                with world.accumulate_gradients(runner, is_last):
                    with precision.autocast():
                        smoothed, plain = runner(
                            batch.src, batch.src_pad, batch.tgt_in, batch.real, batch.tgt_out
                        )
                    # × size undoes DDP's average: the step's loss is one sum over all ranks, divided by all tokens.
                    precision.backward(smoothed / tokens * world.size)
                window_loss += torch.stack((smoothed, plain)).detach() / tokens

            gradient_norm = precision.step(
                optimizer, parameters, config.clip, step
            )  # clips, updates, clears
            state["step"] = step
            window_steps += 1
            meter.end_step(partial(training_flops, sizes))
            bar.update()

            # The minutes of all sessions. The slowest clock and any rank's signal count for all, or they would part.
            stop_asked, state["minutes"] = world.maximum(
                run.interrupted(), (time.perf_counter() - begun) / 60
            )
            if plan.fit_time(
                step, state["minutes"], limit
            ):  # true once, when 70 % of --max_minutes are over
                log(
                    f"step {step:,}: {state['minutes']:.1f} minutes used; the learning rate falls from now on"
                )
            finished = plan.why_stop(step, state["minutes"], limit)  # the reason, or None
            why_stop = finished or (INTERRUPTED if stop_asked else None)

            if step % config.log_every == 0 or finished:
                log_step(step, gradient_norm.item())
                window_loss, window_steps = torch.zeros_like(window_loss), 0
            if finished or (step % eval_every == 0 and not why_stop):
                save(best=validate(step))
            elif (
                why_stop or state["minutes"] >= state["saved"] + config.save_minutes
            ):  # interrupted: no validating now
                save()

        bar.close()
        run.close(why_stop or f"{state['stale']} validations without a better loss", state["step"])
        if why_stop != INTERRUPTED:
            results = {
                "result/best_validation_loss": state["best_loss"],
                "result/validation_bleu": state["best_bleu"],
            }
            run.telemetry.hyperparameters(
                config, {tag: value for tag, value in results.items() if value is not None}
            )
            log(f"next: python evaluate.py --ckpt {shlex.quote(str(run.folder))}")
        return run.folder


if __name__ == "__main__":
    run_script(
        lambda: only_asked(config) or train(config)
    )  # --check and --explain_masks are answered, nothing trained
