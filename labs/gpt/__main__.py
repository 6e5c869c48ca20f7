"""Train a GPT, on one process or on many, with every technique that makes a large model fit or go faster.

python -m labs.gpt --data wos/                                      # Web of Science; one process, CPU or GPU
python -m labs.gpt --size 1.6b --plan --gpus 4 --memory_gib 24      # what would fit; nothing is allocated
torchrun --nproc_per_node 2 -m -- labs.gpt --data_parallel zero3 --recompute all
torchrun --nproc_per_node 4 -m -- labs.gpt --tensor 2               # 2 (data) × 2 (tensor)
torchrun --nproc_per_node 4 -m -- labs.gpt --pipe 4 --accumulate 8 --schedule 1f1b
python -m labs.gpt --resume runs/NAME                               # go on, also under another layout
python -m labs.gpt.compare                                          # the table of all techniques

The loss is the mean over all tokens in nats. Every sequence is full, so the mean over processes and micro-batches is it.
"""

from dataclasses import asdict, dataclass, replace

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Every setting of a run."""

    data: str = flag("random", "text file or folder, or random: ids drawn by chance", "Data")
    data_size: int = flag(256, "sequences, with --data random", "Data", min=1)
    tokenizer: str = flag("", "a tokenizer's folder or name; one is trained on the data", "Data")
    vocabulary: int = flag(0, "tokens; 0, here and below: as in the preset", "Data", min=0)

    size: str = flag("mini", "preset (toy|mini|124m|355m|774m|1.5b|1.6b)", "Model")
    model: str = flag("own", "ours, or Hugging Face's GPT2LMHeadModel (own|hf)", "Model")
    hidden: int = flag(0, "width", "Model", min=0, max=2**16)
    heads: int = flag(0, "attention heads", "Model", min=0, max=2**10)
    layers: int = flag(0, "blocks", "Model", min=0, max=2**20)
    sequence: int = flag(0, "tokens in a sequence", "Model", min=0, max=2**20)

    batch_size: int = flag(0, "sequences a step, of all processes together", "Training", min=0)
    epochs: int = flag(6, "passes over the data", "Training", min=1)
    max_steps: int = flag(0, "stop after so many steps; 0: by epochs", "Training", min=0)
    max_minutes: float = flag(0.0, "stop after so many minutes; 0: no limit", "Training", min=0)
    lr: float = flag(0.0, "peak learning rate", "Training", min=0, below=10)
    warmup: int = flag(0, "steps of rising rate; 0: a tenth, at most 1000", "Training", min=0)
    weight_decay: float = flag(
        0.1, "of matrices, not of biases and norms", "Training", min=0, below=10
    )
    clip: float = flag(1.0, "largest norm of the gradient; 0: not clipped", "Training", min=0)

    precision: str = flag("auto", "of matrix products (auto|fp32|bf16|fp16)", "Techniques")
    accumulate: int = flag(
        1, "micro-batches of a step; with --pipe those under way", "Techniques", min=1
    )
    recompute: str = flag(
        "none", "activations made again, not kept (none|all|selective)", "Techniques"
    )
    chunked_loss: bool = flag(False, "never hold all logits", "Techniques")
    compile: bool = flag(False, "torch.compile each block", "Techniques")
    offload: str = flag(
        "none", "what lies in host memory (none|optimizer|parameters)", "Techniques"
    )

    data_parallel: str = flag(
        "ddp", "what is cut; zero2, zero3 are FSDP2 (ddp|zero1|zero2|zero3)", "Processes"
    )
    tensor: int = flag(1, "processes that share each matrix", "Processes", min=1, max=2**10)
    pipe: int = flag(1, "processes that share the layers", "Processes", min=1, max=2**10)
    schedule: str = flag("1f1b", "order in a pipeline (gpipe|1f1b|interleaved|zb|zbv)", "Processes")

    plan: bool = flag(
        False, "only tell what would fit below; with --tokenizer give --vocabulary", "Planner"
    )
    gpus: int = flag(1, "cards", "Planner", min=1, max=2**14)
    memory_gib: float = flag(24.0, "of each card", "Planner", above=0, max=2**12)

    run: str = flag("", "name of the run (folder runs/NAME); the date and time", "Run")
    resume: str = flag("", "run folder to go on with", "Run")
    eval_every: int = flag(0, "steps between validations; 0: an epoch, 50 to 500", "Run", min=0)
    log_every: int = flag(10, "steps between lines of the log", "Run", min=1)
    keep: int = flag(2, "newest checkpoints that stay; 0: nothing is saved", "Run", min=0)
    trace: bool = flag(False, "trace one step: what share of it is communication", "Run")
    prompt: str = flag("In this paper", "what samples go on from", "Run")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "Run")
    seed: int = flag(1, "of weights and the order of sequences", "Run", min=0)

    def __post_init__(self):
        if 0 < self.vocabulary < 300 and self.data != "random":
            raise UserError(
                f"--vocabulary {self.vocabulary} must be at least 300: 256 tokens are the single bytes"
            )


if (
    __name__ == "__main__"
):  # before the heavy imports, so that --help and a wrong flag answer at once
    config = parse_flags(Config, "train a GPT; the result goes to runs/NAME")

import contextlib
import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import torch

import fast
from engine import distributed, schedule
from engine.precision import choose_precision
from engine.run import INTERRUPTED, Run, saved_settings
from engine.telemetry import GIB, measured_peak_flops
from labs.gpt import checkpoints, measure, plan
from labs.gpt.data import load
from labs.gpt.generate import sample
from labs.gpt.parallel import Layout, check_grid, make_optimizer
from labs.gpt.sizes import PRESETS, Sizes, get_model_size, get_tflops

# On --resume; all of the layout, since a checkpoint can be read in any pieces.
MAY_CHANGE = {
    "data",
    "epochs",
    "max_steps",
    "max_minutes",
    "precision",
    "accumulate",
    "recompute",
    "chunked_loss",
    "compile",
    "offload",
    "data_parallel",
    "tensor",
    "pipe",
    "schedule",
    "eval_every",
    "log_every",
    "keep",
    "trace",
    "prompt",
    "device",
}


def sizes_of(config: Config) -> Sizes:
    """The preset, changed by flags."""
    given = {
        name: getattr(config, name)
        for name in ("hidden", "heads", "layers", "sequence", "vocabulary")
    }
    return replace(PRESETS[config.size], **{name: value for name, value in given.items() if value})


def train(config: Config) -> Path | None:
    """One run, from the data to the last checkpoint; → its folder."""
    config = saved_settings(config, MAY_CHANGE)
    sizes = sizes_of(config)
    config.lr, config.batch_size = config.lr or sizes.lr, config.batch_size or sizes.batch_size
    if config.plan:
        print(plan.table(config, sizes, narrow=config.precision != "fp32"))
        return None

    # -------- what cannot be is refused here, by every rank, before anything is allocated
    world = distributed.start(config.device)
    # The ranks agree on the format, so all have joined: one refused sooner would have left the others waiting.
    precision = choose_precision(world.device, config.precision, training=True, world=world)
    known = (
        replace(sizes, vocabulary=0) if config.tokenizer else sizes
    )  # the tokenizer's is known with the data
    check_grid(replace(config, precision=precision.name), known, world.size)
    plan.check_fits(config, known, world, precision.name)
    with Run.start(config, "gpt", world, MAY_CHANGE) as run:
        config, log = run.config, run.log
        log(precision.describe())
        checkpoint = (
            world.on_main(lambda: checkpoints.newest(run.folder)) if config.resume else None
        )

        # -------- data: made by rank 0 in the cache beside the runs; the others wait, then read it
        world.on_main(lambda: load(config, sizes, run.cache, log) and None)  # None: nothing to send
        data = load(config, sizes, run.cache, log=lambda line: None)
        sizes = replace(sizes, vocabulary=data.vocabulary)
        need = plan.check_fits(config, sizes, world, precision.name)
        for split in ("train", "validation"):
            used, whole = data.batches(split) * config.batch_size, data.sequences(split)
            log(
                f"{split}: {data.batches(split):,} batches of {config.batch_size} × {sizes.sequence} tokens, "
                f"{min(used, whole):,} of {whole:,} sequences"
            )

        # -------- this rank's part of the model, and its optimiser; and all as it was, where a run goes on
        fast.keep_tensors_together(
            world.device
        )  # on a CPU: else the heap has holes, which are not planned
        memory = measure.Memory(world.device)
        layout = Layout(config, sizes, world, precision)
        optimizer = make_optimizer(layout)
        if (
            config.offload == "parameters"
        ):  # fp16's scale is made on the CPU, as gradients: from the GPU it may be late
            precision.scaler.scale(torch.zeros(()))
        state = {"step": 0, "minutes": 0.0}
        if checkpoint:
            run.state = checkpoints.load_state(checkpoint)
            if run.state["data_key"] != data.key:
                raise UserError(
                    f"--resume {run.folder}: the data is not what the run began with; put it back"
                )
            checkpoints.restore(checkpoint, layout, optimizer)
            state |= {name: run.state[name] for name in state}
            if run.state["scaler"]:  # else it had another --precision
                precision.scaler.load_state_dict(run.state["scaler"])
            log(f"resumed after step {state['step']:,} from {checkpoint}")
        timetable, state["end"] = schedule.plan_of_run(config, data.batches("train"), run.state)
        if 0 < config.max_minutes <= state["minutes"]:
            raise UserError(f"--resume {run.folder}: its minutes are over; give more --max_minutes")
        if state["step"] >= timetable.total:
            more = (
                "--max_minutes"
                if timetable.by_time
                else "--max_steps"
                if config.max_steps
                else "--epochs"
            )
            raise UserError(f"--resume {run.folder}: all is done; give more {more}")
        grid = " × ".join(f"{side} {size}" for side, size in layout.grid.items())
        log(f"a block: {next(iter(layout.parts[0].h.values()))}")
        log(
            f"model: {config.model}, {sizes.parameters:,} parameters, {sizes.flops_per_token():,.0f} FLOPs a training token; "
            f"{config.data_parallel} on {grid}; {timetable.total:,} steps"
        )
        log(f"memory: {need} planned on the fullest rank")
        eval_every = config.eval_every or min(500, max(50, data.batches("train")))
        can_sample = data.tokenizer and config.model == "own" and config.tensor * config.pipe == 1
        can_sample = can_sample and config.data_parallel in (
            "ddp",
            "zero1",
        )  # else no rank has the whole model
        if (
            can_sample
            and len(data.tokenizer(config.prompt, add_special_tokens=False)["input_ids"])
            >= sizes.sequence
        ):
            raise UserError(
                f"--prompt has no place for an answer in {sizes.sequence} tokens; give a shorter one"
            )
        if world.is_main and data.tokenizer:
            data.tokenizer.save_pretrained(run.folder / "tokenizer")
        run.begin()

        # -------- the loop
        peak_flops = measured_peak_flops(world.device, precision.dtype)
        if (
            world.device.type == "cpu"
        ):  # processes that take turns on a core have each measured all of it
            peak_flops *= measure.share_of_cores(
                int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
            )
        peak_flops = world.sum(torch.tensor(peak_flops)).item()
        tokens_per_step = config.batch_size * sizes.sequence
        steps, traced = measure.Steps(world.device), {}
        trace_step = state["step"] + 4 if config.trace and world.size > 1 else None
        window_loss, window_steps = torch.zeros((), device=world.device), 0
        learning_rate = 0.0

        def part_of(batch: tuple) -> list:
            """This row's sequences of a batch, on the device."""
            return [ids.chunk(layout.data)[layout.row].to(world.device) for ids in batch]

        def validate(step: int) -> None:
            """Validation loss and a sample."""
            batches = data.batches("validation")
            losses = [
                layout.loss(*part_of(data.batch("validation", number))).double()
                for number in range(batches)
            ]
            loss = world.sum(torch.stack(losses).mean()).item()
            run.scalars(
                step, {"validation/loss": loss, "validation/perplexity": math.exp(min(loss, 50))}
            )
            log(
                f"step {step:>6,}  validation loss {loss:.4f}  perplexity {math.exp(min(loss, 50)):,.1f}"
            )
            if can_sample and world.is_main:
                how = SimpleNamespace(tokens=40, temperature=0.8, top_p=0.9, seed=config.seed)
                run.telemetry.text(
                    "sample",
                    step,
                    sample(layout.parts[0], data.tokenizer, config.prompt, how, sizes.sequence),
                )
            state["validation_loss"] = loss

        def save(step: int) -> None:
            extra = {
                "schedule": asdict(timetable),
                "scaler": precision.scaler.state_dict(),
                "data_key": data.key,
            }
            checkpoints.save(
                run.folder / "checkpoints", step, layout, optimizer, state | extra, world
            )

        begun = time.perf_counter() - state["minutes"] * 60
        why_stop = None
        steps.start()
        while not why_stop:
            step = state["step"] + 1
            learning_rate = timetable.learning_rate(step)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            tokens, targets = part_of(data.batch("train", step - 1))
            with (
                measure.communication(traced, world.device)
                if step == trace_step
                else contextlib.nullcontext()
            ):
                window_loss += layout.forward_backward(tokens, targets)
                precision.scaler.unscale_(optimizer)
                gradient_norm = layout.clip(config.clip)
                # Before it is in the weights; the step is waited for anyway. fp16's overflows are the scaler's affair.
                if not (precision.scaler.is_enabled() or gradient_norm.isfinite()):
                    raise UserError(
                        f"step {step}: loss or gradient is not finite; start again with a lower --lr"
                    )
                precision.scaler.step(optimizer)
                precision.scaler.update()
                optimizer.zero_grad(set_to_none=True)
            steps.end()
            state["step"], window_steps = step, window_steps + 1

            # The slowest clock and anybody's signal count for all ranks, or they would part.
            stop_asked, state["minutes"] = world.maximum(
                run.interrupted(), (time.perf_counter() - begun) / 60
            )
            timetable.fit_time(step, state["minutes"], config.max_minutes)
            finished = timetable.why_stop(step, state["minutes"], config.max_minutes)
            why_stop = finished or (INTERRUPTED if stop_asked else None)

            if step % config.log_every == 0 or why_stop:
                precision.check_finite()
                loss = world.sum(window_loss / window_steps).item()
                speed = tokens_per_step / steps.median
                run.scalars(
                    step,
                    {
                        "train/loss": loss,
                        "train/perplexity": math.exp(min(loss, 50)),
                        "train/learning_rate": learning_rate,
                        "train/gradient_norm": gradient_norm.item(),
                        "speed/tokens_per_second": speed,
                        "memory/peak_gib": memory.peak_gib(),
                        "speed/model_flops_utilisation": sizes.flops_per_token()
                        * speed
                        / peak_flops,
                    },
                )
                log(
                    f"step {step:>6,}  loss {loss:.4f}  lr {learning_rate:.2e}  |gradient| {gradient_norm.item():.2f}  "
                    f"{speed:,.0f} tokens/s  {state['minutes']:.1f} min"
                )
                window_loss, window_steps = torch.zeros_like(window_loss), 0
            if why_stop != INTERRUPTED and (step % eval_every == 0 or why_stop):
                validate(step)
            if config.keep and (step % eval_every == 0 or why_stop):
                save(step)
            steps.start()

        # -------- what it took
        peaks = world.gather(memory.peak_gib())
        shares = world.gather(traced.get("communication_share", 0.0))
        if world.is_main:
            result = report(config, sizes, layout, steps.median, peak_flops, loss, state)
            result |= {
                "processes": world.size,
                "peak_gib": peaks,
                "planned_gib": need.total / GIB,
                "communication_share": sum(shares) / len(shares) if traced else None,
                "device": world.device.type,
                "precision": precision.name,
            }
            (run.folder / "result.json").write_text(
                json.dumps(result, indent=2) + "\n", encoding="utf-8"
            )
            log(
                f"memory: {max(peaks):.2f} GiB at most on a rank, {need.total / GIB:.2f} planned for its tensors"
            )
            log(
                f"speed: {result['tokens_per_second']:,.0f} tokens/s, {result['step_seconds'] * 1000:.0f} ms a step; "
                f"{result['tflops']:.3f} TFLOP/s, {result['mfu']:.1%} of what these devices can do "
                f"(the handout's formula says {result['handout_tflops']:.3f})"
            )
        run.close(why_stop, state["step"])
        return run.folder


def report(
    config: Config,
    sizes: Sizes,
    layout: Layout,
    seconds: float,
    peak_flops: float,
    loss: float,
    state: dict,
) -> dict:
    """The figures of the table."""
    tokens = config.batch_size * sizes.sequence
    flops = sizes.flops_per_token() * tokens / seconds
    # The handout counts the tied embedding twice; a rank that has only a part of the model cannot count at all.
    twice = sizes.parameters + sizes.vocabulary * sizes.hidden
    if config.model == "hf" and layout.world.size == 1:
        twice = get_model_size(layout.parts[0])
    return {
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tflops": flops / 1e12,
        "mfu": flops / peak_flops,
        "handout_parameters": twice,
        "handout_tflops": get_tflops(twice, config.batch_size, sizes.sequence, seconds),
        "parameters": sizes.parameters,
        "steps": state["step"],
        "loss": loss,
        "validation_loss": state.get("validation_loss"),
    }


if __name__ == "__main__":
    run_script(lambda: train(config))
