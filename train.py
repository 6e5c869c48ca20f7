"""Train a Chinese→English Transformer; everything about the run goes to runs/<name>/.

python train.py                                    # zero flags work, on a CPU and on one GPU
CUDA_VISIBLE_DEVICES=1 python train.py             # choose a card
torchrun --nproc_per_node 2 train.py               # data parallel
python train.py --data my_corpus/ --max_minutes 60 # other data; an hour of training
python train.py --resume runs/NAME                 # go on exactly where it stopped
tensorboard --logdir runs                          # watch
"""

from dataclasses import asdict, dataclass

from engine.config import command, flag, parse_flags, save_config
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Every setting of a training run."""

    data: str = flag("", "directory, file or hub id; /opt/minidataset, else sample/", "Data")
    source: str = flag("zh", "language translated from", "Data")
    target: str = flag("en", "language translated to", "Data")
    tokenizer: str = flag("", "pretrained tokenizer for both sides; own ones are trained", "Data")
    source_vocab: int = flag(0, "tokens in the source vocabulary; 0: 8000, less for little text", "Data")
    target_vocab: int = flag(0, "tokens in the target vocabulary; 0: likewise", "Data")
    max_length: int = flag(512, "longest sentence, in tokens; longer pairs are dropped", "Data")
    workers: int = flag(0, "processes that load batches; 0: the training process itself", "Data")

    preset: str = flag("lab", "model size; the flags below change single sizes (lab|base|big)", "Model")
    d_model: int = flag(0, "model width; 0, here and below: as in the preset", "Model")
    nhead: int = flag(0, "attention heads", "Model")
    num_encoder_layers: int = flag(0, "", "Model")
    num_decoder_layers: int = flag(0, "", "Model")
    dim_feedforward: int = flag(0, "", "Model")
    dropout: float = flag(-1.0, "share of activations dropped; -1: as in the preset", "Model")
    norm_first: bool = flag(False, "layer norm before each sub-layer, not after it", "Model")
    attention: str = flag("", "own operator (python|recompute|cpp|triton); PyTorch's", "Model")

    epochs: int = flag(20, "passes over the data", "Training")
    max_steps: int = flag(0, "stop after so many optimiser steps; 0: by epochs", "Training")
    max_minutes: float = flag(0.0, "stop after so many minutes; 0: no limit", "Training")
    patience: int = flag(0, "stop after so many validations without a better loss; 0: never", "Training")
    tokens_per_batch: int = flag(0, "padded tokens a side in one optimiser step; 0: automatic", "Training")
    accumulate: int = flag(0, "micro-batches that a step is split into; 0: as few as the GPU holds", "Training")
    lr: float = flag(1e-3, "peak learning rate", "Training")
    warmup: int = flag(0, "steps of rising learning rate; 0: a tenth, at most 1000", "Training")
    label_smoothing: float = flag(0.1, "share of the probability spread over all tokens", "Training")
    clip: float = flag(1.0, "largest norm of the gradient; 0: not clipped", "Training")

    run: str = flag("", "name of the run (folder runs/NAME); the date and time", "Run")
    resume: str = flag("", "run folder to go on with", "Run")
    eval_every: int = flag(0, "steps between validations; 0: an epoch, within 250 to 1000", "Run")
    log_every: int = flag(20, "steps between lines of the log", "Run")
    precision: str = flag("auto", "number format (auto|fp32|bf16|fp16)", "Run")
    compile: bool = flag(False, "torch.compile the model", "Run")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "Run")
    seed: int = flag(1, "of weights, dropout and the order of pairs", "Run")

    def __post_init__(self):
        at_least = dict(source_vocab=0, target_vocab=0, max_length=8, workers=0, epochs=1, max_steps=0, max_minutes=0)
        at_least |= dict(
            patience=0, tokens_per_batch=0, accumulate=0, warmup=0, clip=0, eval_every=0, log_every=1, seed=0
        )
        for name, least in at_least.items():
            if not getattr(self, name) >= least:  # `not >=` catches nan too
                raise UserError(f"--{name} {getattr(self, name)} must be at least {least}")
            if getattr(self, name) >= 2**63:
                raise UserError(
                    f"--{name} {getattr(self, name)} is too large; 0 stands for no limit where there is one"
                )
        if not 0 < self.lr < 10 or not 0 <= self.label_smoothing < 1:
            raise UserError(f"--lr {self.lr} must be in (0, 10), --label_smoothing {self.label_smoothing} in [0, 1)")
        if self.attention not in ("", "python", "recompute", "cpp", "triton"):
            raise UserError(f"--attention {self.attention} is unknown; choose python, recompute, cpp or triton")
        if self.preset not in ("lab", "base", "big"):
            raise UserError(f"--preset {self.preset} is unknown; choose lab, base or big")
        for name in ("source_vocab", "target_vocab"):
            if 0 < getattr(self, name) < 300:
                raise UserError(
                    f"--{name} {getattr(self, name)} must be at least 300: 256 of them are the single bytes"
                )
        if self.source == self.target:
            raise UserError(f"--source and --target are both {self.source!r}; choose two languages")


if __name__ == "__main__":  # before the heavy imports, so that --help and a wrong flag answer at once
    config = parse_flags(Config, "train a translation model; the result goes to runs/NAME")

import contextlib
import json
import math
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from data import BucketSampler, Prepared, collate_for, load_prepared, prepare
from engine import checkpoint, distributed, schedule
from engine.allocator import keep_freed_memory
from engine.memory import fewest_parts
from engine.native import build
from engine.precision import Precision, choose_precision
from engine.run import (
    INTERRUPTED,
    after_restart,
    catch_signals,
    last_checkpoint,
    leave_signals_to_main,
    load_weights,
    lock,
    new_folder,
    saved_settings,
)
from engine.telemetry import GpuSampler, Log, Meter, Telemetry, measured_peak_flops, peak_memory_gib, progress
from fast import fused
from model import PRESETS, ModelConfig, SummedLoss, Translator, training_flops
from text.rows import default_path, find_text
from validation import Validation

# On --resume; anything else would make it another run.
MAY_CHANGE = {"epochs", "max_steps", "max_minutes", "patience", "workers", "device", "precision", "compile",
              "accumulate", "attention", "eval_every", "log_every"}  # fmt: skip


def train(config: Config) -> None:
    """One training run, from the data to the last checkpoint."""
    t = set_up(config)
    try:
        run_steps(t)
    finally:
        t.micro_batches = None  # ends the loader's processes, however the run ended: they do not listen to signals


def run_steps(t: "Training") -> None:
    """The loop."""
    config, world, plan, state = t.config, t.world, t.plan, t.state
    interrupted = catch_signals()
    begun = time.perf_counter() - 60 * state["minutes"]
    bar = progress(total=plan.total, initial=state["step"], unit="step", desc=t.run.name)
    why_stop = "all steps were done before" if state["step"] >= plan.total else None
    t.model.train()
    if state["step"] and state["step"] % t.eval_every == 0 and state["validated"] != state["step"]:
        save(t, best=validate(t, state["step"]))  # the run was interrupted when a validation was due
    while not why_stop:
        # Learning rate and randomness are functions of the step: a resumed run draws what it would have drawn anyway.
        step = state["step"] + 1
        for group in t.optimizer.param_groups:
            group["lr"] = plan.learning_rate(step)
        torch.manual_seed(world.seed(config.seed, step))

        # The gradient of the loss over every pair of this step, in all micro-batches and on all ranks.
        tokens = next(t.tokens_of_steps)
        for micro_batch in range(state["accumulate"]):
            waiting = time.perf_counter()
            batch = next(t.micro_batches).to(world.device)
            t.meter.add(batch, wait_seconds=time.perf_counter() - waiting)
            # DDP averages gradients over the ranks at the end of a backward pass; only the last one needs it.
            is_last = micro_batch == state["accumulate"] - 1
            with contextlib.nullcontext() if is_last or world.size == 1 else t.runner.no_sync():
                with t.precision.autocast():
                    loss = t.runner(batch.src, batch.src_pad, batch.tgt_in, batch.real, batch.tgt_out) / tokens
                # × size undoes DDP's average: the step's loss is one sum over all ranks, divided by all tokens.
                t.precision.backward(loss * world.size)
            t.window_loss += loss.detach()

        gradient_norm = t.precision.step(t.optimizer, t.parameters, config.clip, step)
        state["step"], state["window_steps"] = step, state["window_steps"] + 1
        t.meter.end_step()
        bar.update()

        # The slowest clock and anybody's signal count for all ranks, or they would part.
        stop_asked, state["minutes"] = world.maximum(interrupted(), (time.perf_counter() - begun) / 60)
        if plan.fit_time(step, state["minutes"], config.max_minutes):
            t.log(f"step {step:,}: {state['minutes']:.1f} minutes are gone; the learning rate falls from here on")
        why_stop = INTERRUPTED if stop_asked else reason_to_stop(step, plan, state, config)
        finished = why_stop and why_stop != INTERRUPTED

        if step % config.log_every == 0 or finished:
            log_step(t, step, gradient_norm)
        if finished or (step % t.eval_every == 0 and not why_stop):
            improved = validate(t, step)
            why_stop = why_stop or lost_patience(state, config)
            save(t, best=improved)
        elif why_stop:
            save(t)
    bar.close()
    close(t, why_stop)


@dataclass
class Training:
    """What the loop works with."""

    config: Config
    world: distributed.World
    run: Path
    locked: list  # the lock's file, open for as long as the run is ours
    log: Log
    precision: Precision
    prepared: Prepared
    model: Translator
    runner: torch.nn.Module  # the model with its loss, wrapped by DDP and torch.compile where they are used
    parameters: list
    optimizer: torch.optim.Optimizer
    plan: schedule.Schedule
    steps_per_epoch: int
    eval_every: int
    tokens_of_steps: object  # endless: the real target tokens of each step, over all ranks
    micro_batches: object  # endless: this rank's batches
    validation: Validation
    telemetry: Telemetry
    gpu: GpuSampler | None
    meter: "StepMeter"
    window_loss: torch.Tensor  # this rank's part of the losses since the last line of the log
    state: dict  # what a checkpoint needs beside weights and optimizer; see `set_up` and `save`


def set_up(config: Config) -> Training:
    """Everything before the first step: data, model, optimizer, and the checkpoint that a resumed run starts from."""
    model_sizes(config, 1, 1)  # sizes that cannot be are refused now, not after an hour of tokenising
    if config.resume:
        config = saved_settings(config, MAY_CHANGE)
    world = distributed.start(config.device)
    config = after_restart(config, world)
    languages = f"{config.source}-{config.target}"
    run = Path(config.resume) if config.resume else world.on_main(lambda: new_folder(config.run, languages))
    locked = []  # rank 0's alone: an open file does not travel
    world.on_main(lambda: locked.append(lock(run)))
    resumed = world.on_main(lambda: last_checkpoint(run)) if config.resume else None
    log = Log(run, enabled=world.is_main)
    if world.device.type == "cpu":
        keep_freed_memory()
    precision = choose_precision(world.device, config.precision, training=True)
    log(f"run: {run}" + (f", {world.size} processes" if world.size > 1 else ""))
    log(precision.describe())
    if hidden := distributed.hidden_gpus():
        log(f"note: {hidden}")
    prepared = prepare_data(config, run, world, log)
    sizes = model_sizes(config, len(prepared.source_tokenizer), len(prepared.target_tokenizer))

    torch.manual_seed(config.seed)
    model = Translator(sizes).to(world.device)
    if config.attention:  # the same weights, computed by hand
        from labs.attention_op import use_in

        use_in(model, config.attention)
    if fused.is_stock(model) and build.advice():
        log(f"note: {build.advice()}")
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    state = {"step": 0, "minutes": 0.0, "window_loss": [0.0], "window_steps": 0}
    state |= {"best_loss": None, "stale": 0, "validated": 0}  # "validated": the step of the last validation
    state |= {"world_size": 0, "accumulate": 0, "plan": 0}  # how the pairs of a step were dealt
    if resumed:
        state |= restore(resumed, run, prepared, model, optimizer, precision)
        log(f"resumed after step {state['step']:,} from {resumed}")

    # Kept in the settings: a run resumed on another device goes on with the same batches.
    config.tokens_per_batch = config.tokens_per_batch or default_tokens_per_batch(prepared, world.device)
    collate = collate_for(prepared, pad_multiple=16 if config.compile else 1)
    accumulate = config.accumulate or (state["accumulate"] if state["world_size"] == world.size else 0)
    accumulate = accumulate or micro_batches_that_fit(config, prepared, collate, model, precision, world)
    sampler = make_sampler(config, prepared, world, accumulate)
    sampler.load_state_dict({"step": state["step"]})
    if resumed and (state["world_size"], state["plan"]) != (world.size, sampler.plan_id):
        log(describe_change(state, sampler))
    losses = state["window_loss"]  # of each rank; of rank 0, if there were more or fewer ranks
    window_loss = losses[world.rank] if len(losses) == world.size else sum(losses) * world.is_main
    state |= {"world_size": world.size, "accumulate": accumulate, "plan": sampler.plan_id}
    plan = schedule.plan(config.lr, config.warmup, config.max_steps or config.epochs * sampler.steps_per_epoch)
    if resumed and not config.given & {"epochs", "max_steps", "max_minutes"}:
        plan = schedule.Schedule(**state["schedule"])
    log(f"model: {sum(p.numel() for p in parameters):,} parameters; {config.tokens_per_batch:,} tokens a step, "
        f"{sampler.steps_per_epoch:,} steps an epoch, {plan.total:,} steps in all"
        + (f" or {config.max_minutes:g} minutes" if config.max_minutes else "")
        + (f"; each step in {accumulate} micro-batches" if accumulate > 1 else ""))  # fmt: skip

    validation = Validation(model, prepared, collate, world, precision, config.target, config.tokens_per_batch)
    validation.rehearse()  # what would break after an hour breaks now
    if world.is_main:
        save_run(run, config, None if resumed else sizes, prepared)
    on_gpu = world.device.type == "cuda"
    loader = DataLoader(
        prepared.train,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=config.workers,
        pin_memory=on_gpu,
        worker_init_fn=leave_signals_to_main,
    )
    gpu = GpuSampler(world.device, say=log) if on_gpu and world.is_main else None
    if gpu:
        gpu.start()
    return Training(
        config=config, world=world, run=run, locked=locked, log=log, precision=precision, prepared=prepared, model=model,
        runner=wrap(SummedLoss(model, config.label_smoothing), config, world), parameters=parameters,
        optimizer=optimizer, plan=plan, steps_per_epoch=sampler.steps_per_epoch,
        eval_every=config.eval_every or min(1000, max(250, sampler.steps_per_epoch)),
        tokens_of_steps=sampler.target_tokens(state["step"]), micro_batches=iter(loader), validation=validation,
        telemetry=Telemetry(run, resume_step=state["step"] if config.resume else None, enabled=world.is_main), gpu=gpu,
        meter=StepMeter(sizes, config.log_every, measured_peak_flops(world.device, precision.dtype)),
        window_loss=torch.tensor(window_loss, device=world.device), state=state,
    )  # fmt: skip


def restore(resumed: Path, run: Path, prepared: Prepared, model: Translator, optimizer, precision: Precision) -> dict:
    """Weights, optimizer and scaler as the checkpoint has them; → its state."""
    optimizer_state, state = checkpoint.load_training_state(resumed)
    check_same_data(state, prepared, run)
    load_weights(model, resumed)
    optimizer.load_state_dict(optimizer_state)
    if state["scaler"]:  # empty if the run was not in fp16 until now
        precision.scaler.load_state_dict(state["scaler"])
    return state


def wrap(loss: SummedLoss, config: Config, world: distributed.World) -> torch.nn.Module:
    """The model's loss as the loop calls it: compiled if asked, and one of many under DDP."""
    runner = torch.compile(loss, dynamic=True) if config.compile else loss
    if world.size == 1:
        return runner
    # Gradients live in the buckets that travel, instead of being copied into them.
    return DistributedDataParallel(
        runner,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )


def prepare_data(config: Config, run: Path, world: distributed.World, log: Log) -> Prepared:
    """Tokenizers and token store, made by rank 0 in the cache beside the runs; the other ranks wait, then read them."""

    def make() -> tuple[Path, str]:
        data = config.data or default_path()
        if not config.data:
            log(f"data: no --data given, so {data}")
        if Path(data).expanduser().exists():  # else a hub name, or a mistake
            data = str(Path(data).expanduser().resolve())  # found again from anywhere
        return prepare(
            find_text(data, config.source, config.target), run.parent / ".cache",
            source_vocab=config.source_vocab, target_vocab=config.target_vocab, tokenizer=config.tokenizer,
            max_length=config.max_length, say=log,
        ).folder, data  # fmt: skip

    folder, config.data = world.on_main(make)
    return load_prepared(folder)


def model_sizes(config: Config, source_vocab: int, target_vocab: int) -> ModelConfig:
    """The preset's sizes, changed by the flags that were given."""
    sizes = dict(PRESETS[config.preset])
    for name in sizes:
        value = getattr(config, name)
        if value < 0 and name != "dropout":
            raise UserError(f"--{name} {value} must be at least 1")
        if value > 0 or (name == "dropout" and value != -1):
            sizes[name] = value
    return ModelConfig(source_vocab, target_vocab, **sizes, norm_first=config.norm_first, max_length=config.max_length)


def save_run(run: Path, config: Config, sizes: ModelConfig | None, prepared: Prepared) -> None:
    """What evaluate.py and --resume need beside the weights; config.json comes last and makes the folder a run.

    Without `sizes` the settings alone: a run that goes on keeps its model and its tokenizers.
    """
    if sizes:
        for side, tokenizer in (("source", prepared.source_tokenizer), ("target", prepared.target_tokenizer)):
            tokenizer.save_pretrained(run / "tokenizer" / side)
        (run / "model.json").write_text(json.dumps(asdict(sizes), indent=2) + "\n", encoding="utf-8")
    save_config(config, run / "config.json")


def describe_change(state: dict, sampler: BucketSampler) -> str:
    """What becomes of the order of the pairs when a run goes on with more or fewer processes."""
    change = f"note: {state['world_size']} processes before, {sampler.world_size} from here on"
    if state["plan"] == sampler.plan_id:
        return f"{change}; every step has the pairs it would have had, dealt out anew"
    # A step needs a pair for every process, so the smallest ones were cut in another place.
    return f"{change}; small batches are cut anew: the order goes on at step {state['step']:,} of the new plan"


def check_same_data(state: dict, prepared: Prepared, run: Path) -> None:
    """A run goes on with the very data and tokenizers it began with."""
    if state["data_key"] != prepared.summary["key"]:
        raise UserError(
            f"--resume {run}: the data at {prepared.summary['path']} is not what the run began with; put it back, or "
            "start a new run"
        )


def default_tokens_per_batch(prepared: Prepared, device: torch.device) -> int:
    """4,096 tokens on a CPU, 16,384 on a GPU; less for little data, so that an epoch has about a hundred steps."""
    most = 4096 if device.type == "cpu" else 16384
    return int(min(most, max(1024, prepared.train.lengths["target"].sum() // 100)))


def make_sampler(config: Config, prepared: Prepared, world: distributed.World, accumulate: int) -> BucketSampler:
    """This rank's share of every step's pairs."""
    return BucketSampler(
        prepared.train.lengths, config.tokens_per_batch, seed=config.seed,
        rank=world.rank, world_size=world.size, accumulate=accumulate,
    )  # fmt: skip


def micro_batches_that_fit(config, prepared, collate, model, precision: Precision, world: distributed.World) -> int:
    """As few as the fullest GPU has memory for, tried on the longest pairs; 1 on a CPU, where the system would swap."""
    if world.device.type == "cpu":
        return 1
    widest = make_sampler(config, prepared, world, accumulate=1).widest_step()
    summed = SummedLoss(model, config.label_smoothing)

    def trial(parts: int) -> None:
        # What will be there beside the gradients: the optimizer's two averages, and the buckets that DDP sends.
        held = [torch.empty_like(weight) for weight in model.parameters() for _ in range(3)]
        batch = collate([prepared.train[int(row)] for row in widest[:: parts * world.size]]).to(world.device)
        with precision.autocast():
            loss = summed(batch.src, batch.src_pad, batch.tgt_in, batch.real, batch.tgt_out)
        loss.backward()
        del held

    parts = world.maximum(fewest_parts(trial, most=len(widest)))[0]
    model.zero_grad(set_to_none=True)
    return int(parts)


def reason_to_stop(step: int, plan: schedule.Schedule, state: dict, config: Config) -> str | None:
    """Why this step was the last, if it was."""
    if step >= plan.total:
        return "all steps are done"
    if config.max_minutes and state["minutes"] >= config.max_minutes:
        return f"the {config.max_minutes:g} minutes are over"
    return None


def lost_patience(state: dict, config: Config) -> str | None:
    """Early stopping: why, if it is time."""
    if config.patience and state["stale"] >= config.patience:
        return f"{state['stale']} validations without a better loss"
    return None


class StepMeter:
    """Adds up the micro-batches of a step for `Meter`."""

    def __init__(self, sizes: ModelConfig, window: int, peak_flops: float):
        self.sizes, self.meter = sizes, Meter(window, peak_flops)
        self._clear()

    def _clear(self) -> None:
        self.source = self.target = self.places = 0
        self.wait = 0.0

    def add(self, batch, wait_seconds: float) -> None:
        """One micro-batch of this rank, and how long the loop waited for it."""
        self.source += batch.source_tokens
        self.target += batch.target_tokens
        self.places += batch.src.numel() + batch.tgt_in.numel()
        self.wait += wait_seconds

    def end_step(self) -> None:
        """The optimizer has stepped."""
        flops = training_flops(self.sizes, self.source, self.target)
        self.meter.update(self.source, self.target, self.places, self.wait, flops)
        self._clear()


def log_step(t: Training, step: int, gradient_norm: torch.Tensor) -> None:
    """The figures since the last line, to the log, TensorBoard and metrics.jsonl. No step in between waits for the GPU."""
    t.precision.check_finite()
    loss = t.world.sum(t.window_loss.clone()).item() / t.state["window_steps"]
    lr, figures = t.plan.learning_rate(step), t.meter.meter.read()
    speed = figures.get("speed/tokens_per_second", 0.0) * t.world.size  # ranks have equal shares
    figures |= {"speed/tokens_per_second": speed} if speed else {}
    values = {"train/loss": loss, "train/perplexity": math.exp(min(loss, 50)), "train/learning_rate": lr}
    values |= {
        "train/gradient_norm": gradient_norm.item(),
        **figures,
        "memory/peak_gib": peak_memory_gib(t.world.device),
    }
    if t.precision.scaler.is_enabled():
        values["train/loss_scale"] = t.precision.scaler.get_scale()
    t.telemetry.scalars(step, values | (t.gpu.read() if t.gpu else {}))
    left = (t.plan.total - step) * t.state["minutes"] / step
    if t.config.max_minutes:
        left = min(left, t.config.max_minutes - t.state["minutes"])
    t.log(f"step {step:>6,}  epoch {step / t.steps_per_epoch:5.2f}  loss {loss:.4f}  lr {lr:.2e}  "
          f"|gradient| {values['train/gradient_norm']:.2f}  {speed:,.0f} tokens/s  {left:,.1f} min left")  # fmt: skip
    t.window_loss.zero_()
    t.state["window_steps"] = 0


def validate(t: Training, step: int) -> bool:
    """Validation loss, BLEU and samples; true if the loss is the best so far."""
    t.meter.meter.pause()
    loss = t.validation.run(step, t.log, t.telemetry)
    improved = t.state["best_loss"] is None or loss < t.state["best_loss"]
    if improved:
        t.state["best_loss"] = loss
    t.state["validated"] = step
    t.state["stale"] = 0 if improved else t.state["stale"] + 1
    t.model.train()
    return improved


def save(t: Training, best: bool = False) -> None:
    """A checkpoint of this step, by rank 0."""
    t.meter.meter.pause()
    t.precision.check_finite()
    # The losses since the last line of the log go along, so that the resumed run writes the same line.
    t.state["window_loss"] = t.world.gather(t.window_loss.item())
    extra = {
        "schedule": asdict(t.plan),
        "scaler": t.precision.scaler.state_dict(),
        "data_key": t.prepared.summary["key"],
    }
    if t.world.is_main:
        folder = t.run / "checkpoints"
        checkpoint.save(
            folder, t.state["step"], t.model.state_dict(), t.optimizer.state_dict(), t.state | extra, best=best
        )
    t.meter.meter.resume()


def close(t: Training, why_stop: str) -> None:
    """The last words: what to type next."""
    t.log(f"stopped after step {t.state['step']:,}: {why_stop}")
    if why_stop == INTERRUPTED:
        t.log(f"to go on: {command()} --resume {t.run}")
    else:
        t.telemetry.hyperparameters(asdict(t.config), {"result/best_validation_loss": t.state["best_loss"]})
        t.log(f"next: python evaluate.py --ckpt {t.run}")
    t.telemetry.close()
    t.world.stop()


if __name__ == "__main__":
    run_script(lambda: train(config))
