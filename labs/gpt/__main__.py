"""Train a GPT on one process or many, with the techniques that make a large model fit or go faster.

python -m labs.gpt --data wos/                                  # Web of Science; CPU or one GPU
python -m labs.gpt --preset 1.6b --plan --gpus 4 --memory_gib 24  # what fits; allocates nothing
torchrun --nproc_per_node 2 -m -- labs.gpt --data_parallel zero3 --recompute
torchrun --nproc_per_node 4 -m -- labs.gpt --tensor 2           # 2 (data) × 2 (tensor)
torchrun --nproc_per_node 4 -m -- labs.gpt --pipe 4             # a pipeline of four stages
python -m labs.gpt --resume runs/NAME                           # continue, under any layout
python -m labs.gpt.compare                                      # the table of all techniques
python -m labs.gpt.scales --data wos/                           # the handout's table of scales

The loss is the mean over all tokens, in nats. Every sequence is full, so it is the mean over
processes and micro-batches.
"""

from dataclasses import asdict, dataclass, replace

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Every setting. `fixed`: --resume cannot change it. 0 is automatic where the help says so."""

    data: str = flag("random", "text file or folder; random: ids without meaning", "Data")
    vocab_size: int = flag(0, "tokens; 0: the preset's", "Data", min=0, fixed=True)
    init: str = flag(
        "",
        "fine-tune: run or checkpoint whose weights and tokenizer to begin with; with --model hf "
        "also a local GPT-2's folder",
        "Model",
        fixed=True,
    )

    preset: str = flag(
        "mini", "preset (toy|mini|wide|deep|124m|355m|774m|1.5b|1.6b)", "Model", fixed=True
    )
    model: str = flag(
        "own", "our model or Hugging Face's GPT2LMHeadModel (own|hf)", "Model", fixed=True
    )
    d_model: int = flag(0, "model width; 0: the preset's", "Model", min=0, max=2**16, fixed=True)
    nhead: int = flag(0, "attention heads; 0: the preset's", "Model", min=0, max=2**10, fixed=True)
    num_layers: int = flag(0, "blocks; 0: the preset's", "Model", min=0, max=2**20, fixed=True)
    seq_length: int = flag(
        0, "tokens in a sequence; 0: the preset's", "Model", min=0, max=2**20, fixed=True
    )

    batch_size: int = flag(
        0,
        "sequences per step, of all processes together; 0: the preset's",
        "Training",
        min=0,
        fixed=True,
    )
    epochs: int = flag(6, "passes over the data", "Training", min=1)
    max_steps: int = flag(0, "stop after this many steps; 0: use --epochs", "Training", min=0)
    max_minutes: float = flag(0.0, "stop after this many minutes; 0: no limit", "Training", min=0)
    lr: float = flag(
        0.0, "peak learning rate; 0: the preset's", "Training", min=0, below=10, fixed=True
    )

    precision: str = flag("auto", "of matrix products (auto|fp32|bf16|fp16)", "Techniques")
    accumulate: int = flag(
        0, "micro-batches per step; 0: 1, with --pipe twice its stages", "Techniques", min=0
    )
    recompute: bool = flag(False, "recompute activations in the backward pass", "Techniques")
    compile: bool = flag(False, "torch.compile each block", "Techniques")
    offload: bool = flag(
        False, "keep weights, gradients and optimizer in host memory; zero2, zero3", "Techniques"
    )

    data_parallel: str = flag(
        "ddp", "data parallelism; zero2, zero3: FSDP2 (ddp|zero1|zero2|zero3)", "Processes"
    )
    tensor: int = flag(1, "processes that share each matrix", "Processes", min=1, max=2**10)
    pipe: int = flag(1, "processes that share the layers", "Processes", min=1, max=2**10)

    plan: bool = flag(False, "only print what fits on the cards below", "Planner")
    gpus: int = flag(1, "cards", "Planner", min=1, max=2**14)
    memory_gib: float = flag(
        0.0,
        "memory of each card, also in training; 0: 24 in the plan, in training what there is",
        "Planner",
        min=0,
        max=2**12,
    )

    run: str = flag("", "name of the run (folder runs/NAME); default: the time", "Run")
    resume: str = flag("", "run folder to continue", "Run")
    eval_every: int = flag(
        0, "steps between validations; 0: an epoch (at least 50, at most 500)", "Run", min=0
    )
    log_every: int = flag(10, "steps between log lines", "Run", min=1)
    keep: int = flag(2, "newest checkpoints to keep; 0: save none", "Run", min=0)
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "Run")
    seed: int = flag(1, "seed of weights and data order", "Run", min=0, fixed=True)

    def __post_init__(self):
        trains_tokenizer = self.data != "random" and not self.init
        if 0 < self.vocab_size < 300 and trains_tokenizer:
            raise UserError(
                f"--vocab_size {self.vocab_size} must be at least 300: 256 are single bytes"
            )


# Before the heavy imports, so that --help and a wrong flag answer at once.
if __name__ == "__main__":
    config = parse_flags(Config, "train a GPT; the result goes to runs/NAME")

import math
import time
from pathlib import Path

import torch

import fast
from engine import distributed, schedule
from engine.files import as_json, atomic_write
from engine.layers import save_layers
from engine.memory import GIB
from engine.meters import perplexity
from engine.precision import choose_precision
from engine.run import INTERRUPTED, Run, saved_settings
from labs.gpt import checkpoints, measure, plan
from labs.gpt.data import Data, load, load_tokenizer, prepare
from labs.gpt.initial import Source, read_source, require_same_names, take_sizes
from labs.gpt.parallel import Layout, complete_model, make_layout, make_optimizer
from labs.gpt.sizes import PRESETS, Sizes, get_model_size, get_tflops

WARMUP = 1000  # steps, at most a tenth of the run
CLIP = 1.0  # largest norm of the gradient
SUCCESS_BELOW = 7.0  # the handout: a final loss below 7 is a successful training


@dataclass
class State:
    """What a checkpoint keeps besides the weights and the optimizer's moments."""

    data_key: str  # names the token ids that the run is trained on
    step: int = 0
    minutes: float = 0.0  # of training, over all sessions
    last_validation: int = 0  # the step of the last validation
    validation_loss: float | None = None
    metrics_bytes: int = 0  # length of metrics.jsonl, to which a resumed run cuts it


def train(config: Config) -> Path | None:
    """One run, from the data to the last checkpoint. Returns its folder."""
    config = saved_settings(config)
    source = None
    if config.init and not (config.resume and has_checkpoint(config.resume)):
        source = read_source(config.init, config.model)
        take_sizes(config, source)
    fill_in_sizes(config)  # config.json and the report then have them
    check_formula(config, sizes_of(config))
    if config.plan:
        print(plan.table(resolved(config, config.gpus), sizes_of(config)))
        return None

    # -------- every rank refuses what cannot work, before anything is allocated
    world = distributed.init(config.device)
    # The ranks agree on a format here; one that refused earlier would leave the others waiting.
    precision = choose_precision(world.device, config.precision, training=True, world=world)
    settings = resolved(config, world.size, precision.name)
    plan.check_grid(settings, sizes_of(config), world.size)
    plan.check_fits(settings, sizes_of(config), world)
    with Run(config, "gpt", world) as run:  # a new folder, or the one to resume
        config, log = settings, run.log
        log(precision.describe())
        checkpoint = None
        if config.resume:
            checkpoint = world.on_main(lambda: checkpoints.newest(run.folder, log))

        # -------- data: rank 0 prepares them in the cache, then all read them
        sizes = sizes_of(config)
        tokenizer = None
        if config.init and config.data != "random":
            # A resumed run has a copy: what it was fine-tuned from may be gone.
            tokenizer = load_tokenizer(tokenizer_folder(source, run.folder))
        folder = world.on_main(lambda: prepare(config, sizes, run.cache, log, tokenizer))
        data = load(config, sizes, folder, log)
        # A small text may have fewer tokens than the preset's vocabulary.
        sizes = replace(sizes, vocab_size=data.vocab_size)
        plan.check_grid(config, sizes, world.size)
        for split in ("train", "validation"):
            log(
                f"{split}: {data.batches(split):,} batches of {config.batch_size} × "
                f"{sizes.seq_length} tokens from {data.sequences(split):,} sequences"
            )
        state = State(data_key=data.key)

        # -------- this rank's part of the model, and its optimizer
        need = plan.check_fits(config, sizes, world)
        # On a CPU large tensors share one region of memory: the heap's holes cannot be planned.
        fast.keep_tensors_together(world.device)
        memory = measure.Memory(world.device)
        init = None
        if source:
            init = source.weights(sizes.seq_length)
            require_same_names(weights_of_model(config, sizes), init, source.path)
            log(f"init: weights of {source.path}; new optimizer, step 0")
        layout = make_layout(config, sizes, world, precision, init)
        optimizer = make_optimizer(layout)
        if config.offload:
            # Gradients are on the CPU, so fp16's scale is made there, too.
            precision.scaler.scale(torch.zeros(()))
        grid = " × ".join(f"{side} {size}" for side, size in layout.grid.items())
        log(f"a block: {next(iter(layout.model.h.values()))}")
        if world.is_main:
            with torch.device("meta"):  # without memory for the weights
                whole = complete_model(replace(config, recompute=False), sizes)
            tokens, _ = data.batch("train", 0)
            save_layers(run.folder, whole, tokens[:1].to("meta"))
        log(
            f"model: {config.model}, {sizes.parameters:,} parameters, "
            f"{sizes.flops_per_token():,.0f} FLOPs a training token; "
            f"{config.data_parallel} on {grid}"
        )
        log(f"memory: {need} planned on the fullest rank")

        # -------- a resumed run continues with its weights, its moments and its step
        if checkpoint:
            run.saved_state = checkpoints.read(checkpoint)["state"]
            state = State(**run.saved_state)
            if state.data_key != data.key:
                raise UserError(
                    f"--resume {run.folder}: --data {config.data} is not the data that this run "
                    "was started with; restore it, or start a new run"
                )
            checkpoints.restore(checkpoint, layout, optimizer)
            log(f"resumed after step {state.step:,} from {checkpoint}")
        elif config.resume:
            log(f"{run.folder} has no checkpoint: starting at step 0")

        # -------- the length of the run; then the folder becomes a run
        steps_per_epoch = data.batches("train")
        total_steps = config.max_steps or config.epochs * steps_per_epoch
        eval_every = config.eval_every or min(500, max(50, steps_per_epoch))
        warmup = schedule.warmup_steps(WARMUP, total_steps)
        done = schedule.progress(state.step, total_steps, state.minutes, config.max_minutes)
        if done >= 1 and state.last_validation == state.step:
            raise UserError(
                f"--resume {run.folder}: this run is finished; to continue, increase --epochs, "
                "--max_steps or --max_minutes"
            )
        # As they were given: another number of processes resolves them anew.
        run.record_start(run.config, precision)
        if world.is_main and data.tokenizer:
            data.tokenizer.save_pretrained(run.folder / "tokenizer")
        log(f"{total_steps:,} steps in total, {steps_per_epoch:,} per epoch")

        # -------- the loop
        peak_flops = measure.peak_flops(world, precision.dtype)
        steps = measure.Steps(world.device)
        first_step = state.step
        losses = []  # of the steps since the last log line
        loss = None
        saved_step = state.step
        begun = time.perf_counter() - 60 * state.minutes
        while True:
            # Between two steps: is it time to validate, save or stop?
            # The slowest clock and any rank's signal count for all ranks, or they would part.
            minutes = (time.perf_counter() - begun) / 60
            interrupted = run.stop_asked()
            state.minutes, peak = world.maximum(minutes, memory.peak_gib())
            if config.memory_gib and peak > config.memory_gib:
                raise UserError(
                    f"step {state.step}: a process held {peak:.2f} GiB, more than the card's "
                    f"--memory_gib {config.memory_gib:.2f}; use fewer layers or another technique"
                )
            progress = schedule.progress(state.step, total_steps, state.minutes, config.max_minutes)
            at_validation_step = progress >= 1 or state.step % eval_every == 0
            validation_due = at_validation_step and state.step > state.last_validation
            if validation_due and not interrupted:
                state.validation_loss = validate(layout, data)
                state.last_validation = state.step
                curves = {
                    "valid/loss": state.validation_loss,
                    "valid/perplexity": perplexity(state.validation_loss),
                }
                run.scalars(state.step, curves)
                log(
                    f"step {state.step:>6,}  validation loss {state.validation_loss:.4f}"
                    f"  perplexity {perplexity(state.validation_loss):,.1f}"
                )
            save_due = validation_due or (interrupted and state.step > saved_step)
            if config.keep and save_due:
                state.metrics_bytes = run.telemetry.sync()
                checkpoints.save(run.folder / "checkpoints", layout, optimizer, asdict(state))
                saved_step = state.step
            if interrupted or progress >= 1:
                break

            # The batch depends on the step alone, the learning rate on progress too.
            step = state.step + 1
            learning_rate = schedule.learning_rate(config.lr, step, progress, warmup)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            tokens, targets = layout.part_of(data.batch("train", step - 1))
            steps.start()
            losses.append(layout.forward_backward(tokens, targets))
            gradient_norm = layout.step(optimizer, CLIP, step)
            steps.end()
            state.step = step
            if step == first_step + 2:  # the first step also warms up
                minutes = config.max_minutes and config.max_minutes - state.minutes
                log(f"time: {time_left(steps.seconds[-1], total_steps - step, minutes)}")

            if step % config.log_every == 0 or step == total_steps:
                precision.check_finite()
                loss = world.sum(torch.stack(losses).mean()).item()
                losses.clear()
                speed = figures(config, sizes, steps.median, peak_flops)
                curves = {
                    "train/loss": loss,
                    "train/perplexity": perplexity(loss),
                    "train/learning_rate": learning_rate,
                    "train/gradient_norm": gradient_norm.item(),
                    "speed/tokens_per_second": speed["tokens_per_second"],
                    "memory/peak_gib": memory.peak_gib(),
                }
                if speed["share_of_peak"] is not None:
                    curves["speed/model_flops_utilisation"] = speed["share_of_peak"]
                run.scalars(step, curves)
                log(
                    f"step {step:>6,}  loss {loss:.4f}  lr {learning_rate:.2e}"
                    f"  |gradient| {gradient_norm.item():.2f}"
                    f"  {speed['tokens_per_second']:,.0f} tokens/s  {state.minutes:.1f} min"
                )

        # -------- what it took
        if losses:  # the clock or a signal ended the run between two log lines
            loss = world.sum(torch.stack(losses).mean()).item()
        peaks = world.gather(memory.peak_gib())
        cpu_seconds = world.sum(torch.tensor(steps.cpu_median)).item()
        if world.is_main and steps.seconds:
            result = figures(config, sizes, steps.median, peak_flops)
            result |= handout_figures(config, whole, steps.median)
            result |= {
                "data": "random ids" if config.data == "random" else config.data,
                "steps": state.step,
                "interrupted": interrupted,
                "minutes": state.minutes,
                "loss": loss,
                "validation_loss": state.validation_loss,
                "processes": world.size,
                "device": world.device.type,
                "precision": precision.name,
                "peak_gib": peaks,
                "planned_gib": need.total / GIB,
                "planned_parts": {name: size / GIB for name, size in asdict(need).items()},
                "cpu_seconds_per_step": cpu_seconds,
                "vocab_size": sizes.vocab_size,
                "verdict": verdict(loss, sizes.vocab_size, config.data),
            }
            atomic_write(run.folder / "result.json", as_json(result))
            log(f"result: {result['verdict']}")
            log(f"memory: at most {max(peaks):.2f} GiB on a rank; {need.total / GIB:.2f} planned")
            log(
                f"speed: {result['tokens_per_second']:,.0f} tokens/s, "
                f"{result['step_seconds'] * 1000:.0f} ms a step; {result['tflops']:.3f} TFLOP/s, "
                f"{measure.percent(result['share_of_peak'])} of the measured peak (the handout's "
                f"formulas: {result['handout_parameters']:,} weights, "
                f"{result['handout_tflops']:.3f} TFLOP/s)"
            )
        reason = "finished"
        if interrupted:
            reason = INTERRUPTED if config.keep else "interrupted; nothing was saved (--keep 0)"
        run.close(reason, state.step)
        return run.folder


def has_checkpoint(run: str) -> bool:
    """Whether a run has saved something: if not, a resumed one begins with --init again."""
    return bool(checkpoints.list_checkpoints(Path(run) / "checkpoints"))


def fill_in_sizes(config: Config) -> None:
    """Replace what is automatic (0) by the values of --preset, also the batch and learning rate."""
    for name, value in asdict(PRESETS[config.preset]).items():
        if not getattr(config, name):
            setattr(config, name, value)


def sizes_of(config: Config) -> Sizes:
    """The preset, changed by flags."""
    changes = {}
    for name in ("d_model", "nhead", "num_layers", "seq_length", "vocab_size"):
        if getattr(config, name):
            changes[name] = getattr(config, name)
    return replace(PRESETS[config.preset], **changes)


def check_formula(config: Config, sizes: Sizes) -> None:
    """Raises `UserError` unless sizes.py counts the parameters that a model of one block has."""
    sizes = replace(sizes, num_layers=1)
    count = sum(weight.numel() for weight in weights_of_model(config, sizes).values())
    if sizes.parameters != count:
        raise UserError(
            f"for one block sizes.py counts {sizes.parameters:,} parameters, model.py has "
            f"{count:,}; change block_parameters and flops_per_token in sizes.py"
        )


def weights_of_model(config: Config, sizes: Sizes) -> dict[str, torch.Tensor]:
    """The names and shapes of all weights, without memory for them."""
    with torch.device("meta"):
        return dict(complete_model(config, sizes).named_parameters())


def tokenizer_folder(source: Source | None, run: Path) -> Path:
    """Of --init; a resumed run has a copy. Raises `UserError` for a model of random ids."""
    folder = source.tokenizer if source else run / "tokenizer"
    if folder is None:
        raise UserError(
            f"--init {source.path} has no tokenizer, so it cannot read --data; leave "
            "--data out, or name a model that was trained on text"
        )
    return folder


def resolved(config: Config, processes: int, precision: str = "") -> Config:
    """The settings with every automatic value (0) replaced, and with the format chosen."""
    settings = replace(config, precision=precision or config.precision)
    fill_in_sizes(settings)
    if not config.accumulate:
        settings.accumulate = 1
        if config.pipe > 1:  # the fewest equal micro-batches, at least twice as many as the stages
            rows = max(1, settings.batch_size * config.tensor * config.pipe // processes)
            enough = [n for n in range(2 * config.pipe, rows) if rows % n == 0]
            settings.accumulate = min(enough, default=rows)
    return settings


def validate(layout: Layout, data: Data) -> float:
    """The mean loss of the validation text, the same on all ranks."""
    losses = []
    for number in range(data.batches("validation")):
        batch = layout.part_of(data.batch("validation", number))
        losses.append(layout.loss(*batch).double())
    return layout.world.sum(torch.stack(losses).mean()).item()


def figures(config: Config, sizes: Sizes, step_seconds: float, peak_flops: float) -> dict:
    """Size and speed, by our formulas."""
    tokens = config.batch_size * sizes.seq_length
    flops = sizes.flops_per_token() * tokens / step_seconds
    return {
        "parameters": sizes.parameters,
        "step_seconds": step_seconds,
        "tokens_per_second": tokens / step_seconds,
        "tflops": flops / 1e12,
        # Above 1 the peak is none: the product that measures it was disturbed by other programs,
        # or the CPU has no instructions for it (bf16).
        "share_of_peak": flops / peak_flops if flops <= peak_flops else None,
    }


def handout_figures(config: Config, model: torch.nn.Module, step_seconds: float) -> dict:
    """Size and speed of the complete model, by the handout's formulas."""
    count = get_model_size(model)
    tflops = get_tflops(count, config.batch_size, config.seq_length, step_seconds)
    return {"handout_parameters": count, "handout_tflops": tflops}


def time_left(step_seconds: float, steps: int, minutes: float) -> str:
    """How long the rest of the run takes, for the log; at most `minutes`, if that is not 0."""
    seconds = step_seconds * steps
    if minutes:
        seconds = min(seconds, 60 * minutes)
    text = f"about {seconds / 60:,.0f} minutes"
    if seconds < 90:
        text = f"about {seconds:.0f} seconds"
    elif seconds > 2 * 3600:
        text = f"about {seconds / 3600:,.1f} hours"
    return (
        f"{step_seconds:.1f} s for the last step, {text} for the {steps:,} steps that are left; to "
        "end it sooner: --max_steps or --max_minutes"
    )


def verdict(loss: float, vocab_size: int, data: str) -> str:
    """The handout's threshold, and what the loss is compared with."""
    text = f"training loss {loss:.2f} at the end (mean of the last steps)"
    if data == "random":
        return f"{text}; random ids, so it says nothing"
    guess = math.log(vocab_size)
    if guess < SUCCESS_BELOW:
        return (
            f"{text}; guessing among the {vocab_size:,} tokens costs ln {vocab_size} = "
            f"{guess:.2f}, so a loss below the handout's {SUCCESS_BELOW:g} says nothing here"
        )
    relation = "below" if loss < SUCCESS_BELOW else "not below"
    success = "success" if loss < SUCCESS_BELOW else "no success"
    return (
        f"{text}, {relation} the handout's {SUCCESS_BELOW:g}: {success}; guessing among the "
        f"{vocab_size:,} tokens costs ln {vocab_size} = {guess:.2f}"
    )


if __name__ == "__main__":
    run_script(
        lambda: train(config),
        when_full="give a larger --accumulate or --recompute, or begin anew with a smaller model",
    )
