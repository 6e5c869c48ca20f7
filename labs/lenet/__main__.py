"""LeNet-5 (LeCun et al. 1998) on MNIST: lab 5, part 1. Everything about a run goes to runs/NAME/.

python -m labs.lenet                           # no flag is needed; without MNIST, digits are drawn
python -m labs.lenet --data DIR                # the folder with MNIST's four files, plain or .gz
python -m labs.lenet --activation gelu         # or one written by hand: labs.attention_op:gelu
python -m labs.lenet --resume runs/NAME        # continue; a finished run is tested again
torchrun --nproc_per_node 2 -m -- labs.lenet   # data parallel (DDP): the same batches
tensorboard --logdir runs                      # curves, filters, feature maps, confusion
python report.py runs/NAME                     # one page with curves, network, result, hardware

The result is that of the last epoch: nothing is chosen by the test images. The last twelfth of
the training images is held out for validation.
"""

from engine import distributed, schedule  # before PyTorch, whose threads read their settings once

# isort: split
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from engine.layers import save_layers
from engine.run import INTERRUPTED, Run, saved_settings
from engine.telemetry import Log
from labs.lenet.evaluation import draw_layers, evaluate, write_result
from labs.lenet.mnist import DRAWN_NOTE, HOW_TO_GET, Digits, find_folder, training_batches
from labs.lenet.model import LeNet5, check_activation, flops_per_image


@dataclass
class Config:
    """Every setting of a run. `fixed`: --resume cannot change it."""

    data: str = flag(
        "",
        "folder with MNIST's files, or drawn; default: mnist in /opt or beside the repository, "
        "or data, else drawn",
        "Data",
    )

    activation: str = flag("relu", "relu, gelu, or MODULE:FUNCTION of labs/", "Model", fixed=True)

    epochs: int = flag(12, "passes over the training images", "Training", min=1)
    batch_size: int = flag(
        100, "images per step, of all processes together", "Training", min=1, fixed=True
    )
    lr: float = flag(2e-3, "peak learning rate", "Training", above=0, below=10, fixed=True)

    run: str = flag("", "name of the run (runs/NAME); default: the time", "Run")
    resume: str = flag("", "run to continue", "Run")
    log_every: int = flag(100, "steps between log lines", "Run", min=1)
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "Run")
    seed: int = flag(1, "seed of weights and data order", "Run", min=0, fixed=True)


@dataclass
class State:
    """What a checkpoint keeps, beside the weights and the optimizer's moments."""

    data_key: int  # a checksum of the training labels
    step: int = 0
    last_validation: int = 0  # step of the last evaluation
    validation_errors: list[int] = field(default_factory=list)  # after each epoch
    test_errors: list[int] = field(default_factory=list)


def train(config: Config) -> Path:
    """One training run, from the data to the result on the test images. Returns its folder."""
    config = saved_settings(config)
    world = distributed.init(config.device)  # this process among those of torchrun
    device = world.device
    with Run(config, "lenet", world) as run:  # a new folder, or the one to resume
        config, log = run.config, run.log
        torch.set_num_threads(1)  # the layers are so small that threads would wait for each other

        # -------- data
        folder = find_folder(config.data)
        # An absolute path, so that --resume finds it from any directory.
        config.data = str(folder or "drawn")
        if not folder:
            log(f"data: {DRAWN_NOTE}. For MNIST {HOW_TO_GET}")
        digits, validation, tests = (
            Digits(folder, split) for split in ("train", "validation", "test")
        )
        steps_per_epoch = math.ceil(len(digits) / config.batch_size)
        total_steps = config.epochs * steps_per_epoch
        smallest = len(digits) // steps_per_epoch  # an epoch's batches are of nearly equal size
        if smallest < world.size:
            raise UserError(
                f"--batch_size {config.batch_size}: the smallest batch has {smallest} image(s) for "
                f"{world.size} processes; give a larger --batch_size"
            )
        data_key = digits.checksum()
        for split in (digits, validation, tests):
            split.to(device)

        # -------- model, optimizer
        torch.manual_seed(config.seed)
        model = LeNet5(config.activation).to(device)
        parameter_count = sum(weight.numel() for weight in model.parameters())
        check_activation(model, device)
        flops = flops_per_image(model, device)
        warmup = schedule.warmup_steps(1000, total_steps)
        optimizer = torch.optim.AdamW(model.parameters(), config.lr, fused=True)

        # -------- a resumed run continues with its weights, moments and place in the data
        state = State(data_key)
        if saved := run.restore(model, optimizer):
            state = State(**saved)
            if state.data_key != data_key:
                raise UserError(
                    f"--resume {run.folder}: --data {config.data} is not the data that this run "
                    "was started with; restore it, or start a new run"
                )
        batches = training_batches(digits, config, world, state.step)

        # -------- the folder becomes a run
        run.record_start(config, gpu_seconds=1.0)
        on_gpu = device.type == "cuda"
        log(f"device: {device}, fp32{', convolutions in TF32 where it has that' if on_gpu else ''}")
        log(str(model))
        if world.is_main:
            image, _ = tests[0]
            save_layers(run.folder, model, image[None])
        log(
            f"LeNet-5: {parameter_count:,} parameters, "
            f"{flops:,} FLOPs a training image (forward and backward)"
        )
        log(
            f"{len(digits):,} training, {len(validation):,} validation and {len(tests):,} test "
            f"images, {steps_per_epoch:,} steps per epoch, {config.epochs} epoch(s)"
        )
        if state.step == 0:
            draw_layers(run, 0, model, tests)

        # -------- the loop
        runner = world.data_parallel(model)
        totals = torch.zeros(2, device=device)  # loss and correct answers since the last log line
        image_count = 0  # of all processes, since the last log line
        begun = time.perf_counter()
        model.train()
        while True:
            # Between two steps: is an epoch over? Evaluate and save. Is the run asked to stop?
            interrupted = run.stop_asked()
            epoch_over = state.step > state.last_validation and state.step % steps_per_epoch == 0
            if epoch_over and not interrupted:
                held_out, result = evaluate(model, validation), evaluate(model, tests)
                state.last_validation = state.step
                state.validation_errors.append(held_out["errors"])
                state.test_errors.append(result["errors"])
                run.scalars(
                    state.step,
                    {
                        "valid/loss": held_out["loss"],
                        "valid/accuracy": held_out["accuracy"],
                        "test/loss": result["loss"],
                        "test/accuracy": result["accuracy"],
                        "test/errors": result["errors"],
                    },
                )
                log(
                    f"epoch {state.step // steps_per_epoch} of {config.epochs}: "
                    f"validation loss {held_out['loss']:.4f}, accuracy {held_out['accuracy']:.2%}; "
                    f"test loss {result['loss']:.4f}, accuracy {result['accuracy']:.2%}"
                )
                draw_layers(run, state.step, model, tests)
                model.train()
            if epoch_over or interrupted:
                run.save(state.step, model, optimizer, asdict(state))
                begun = time.perf_counter()
            if interrupted or state.step >= total_steps:
                break

            # Warm-up, level, then down to zero: a function of the step alone.
            step = state.step + 1
            progress = schedule.progress(state.step, total_steps)
            learning_rate = schedule.learning_rate(config.lr, step, progress, warmup)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate

            # This process has its share of a batch of `batch_size` images.
            images, labels, batch_size = next(batches)
            logits = runner(images)  # (B, 10)
            loss_sum = F.cross_entropy(logits, labels, reduction="sum")
            # The mean over the whole batch. × size, because DDP averages the gradients.
            loss = loss_sum / batch_size * world.size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step = step

            correct = (logits.argmax(1) == labels).sum()
            totals += torch.stack([loss_sum.detach(), correct])
            image_count += batch_size
            if step % config.log_every == 0 or step % steps_per_epoch == 0:
                # Means since the last line, while the weights were changing.
                # Only here does the loop wait for the GPU.
                mean_loss, accuracy = (world.sum(totals) / image_count).tolist()
                speed = image_count / (time.perf_counter() - begun)
                curves = {
                    "train/loss": mean_loss,
                    "train/accuracy": accuracy,
                    "train/learning_rate": learning_rate,
                    "speed/images_per_second": speed,
                }
                run.scalars(step, curves)
                log(
                    f"step {step:>6,}  loss {mean_loss:.4f}  accuracy {accuracy:7.2%}"
                    f"  lr {learning_rate:.2e}  {speed:,.0f} images/s"
                )
                totals.zero_()
                image_count = 0
                begun = time.perf_counter()

        if interrupted:
            run.close(INTERRUPTED, state.step)
        else:
            result = evaluate(model, tests)
            result["data"] = str(folder) if folder else DRAWN_NOTE
            result["parameters"] = parameter_count
            if world.is_main:
                write_result(run, state.step, model, tests, result)
                log_choices(log, state)
            run.close("finished", state.step)
        return run.folder


def log_choices(log: Log, state: State) -> None:
    """Test errors of the last epoch, and of those that validation or test images would choose."""
    validation, test = state.validation_errors, state.test_errors
    best = validation.index(min(validation))  # the first of equals
    log(
        f"test errors: {test[-1]:,} after the last epoch, which is the result; "
        f"{test[best]:,} after epoch {best + 1}, the best by the validation images; "
        f"{min(test):,} after the best by the test images, a choice that would be cheating"
    )


if __name__ == "__main__":
    settings = parse_flags(Config, "train LeNet-5 on MNIST; the result goes to runs/NAME")
    run_script(lambda: train(settings))
