"""LeNet-5 (LeCun et al. 1998) on MNIST: lab 5, part 1. Everything about a run goes to runs/NAME/.

python -m labs.lenet                           # no flag is needed: /opt/mnist, else drawn digits
python -m labs.lenet --data DIR                # the folder with MNIST's four files, plain or .gz
python -m labs.lenet --activation own-gelu     # with the GELU operator of labs/attention_op
python -m labs.lenet --held_out 10000          # to compare settings without the test images
python -m labs.lenet --resume runs/NAME        # continue; a finished run is tested again
torchrun --nproc_per_node 2 -m -- labs.lenet   # data parallel (DDP): the same batches
tensorboard --logdir runs                      # curves, filters, feature maps, mistakes
python report.py runs/NAME                     # one page with curves, network, result, hardware

The result is that of the last epoch: nothing is chosen by the test images.
"""

from engine import distributed, schedule  # before PyTorch, whose threads read their settings once

# isort: split
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script
from engine.run import INTERRUPTED, Run, saved_settings
from labs.lenet import pictures
from labs.lenet.mnist import DIGITS, DRAWN_NOTE, HOW_TO_GET, Digits, find_folder, training_batches
from labs.lenet.model import LeNet5, flops_per_image


@dataclass
class Config:
    """Every setting of a run. `fixed`: --resume cannot change it."""

    data: str = flag("", "folder with MNIST's files, or drawn; /opt/mnist, else drawn", "Data")
    held_out: int = flag(
        0, "test on the last N training images, train on the others", "Data", min=0, fixed=True
    )

    activation: str = flag(
        "relu", "activation function (relu|gelu|own-gelu|own-gelu-cpp)", "Model", fixed=True
    )

    epochs: int = flag(12, "passes over the training images", "Training", min=1)
    batch: int = flag(
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

    step: int = 0
    tested: int = 0  # step of the last test


def train(config: Config) -> Path:
    """One training run, from the data to the result on the test images. Returns its folder."""
    config = saved_settings(config)
    world = distributed.start(config.device)  # this process among those of torchrun
    device = world.device
    with Run.start(config, "lenet", world) as run:  # a new folder, or the one to resume
        config, log = run.config, run.log
        torch.set_num_threads(1)  # the layers are so small that threads would wait for each other

        # -------- data
        digits, tests, data_note = read_digits(config)
        if data_note:
            log(f"data: {data_note}. For MNIST {HOW_TO_GET}")
        steps_per_epoch = math.ceil(len(digits) / config.batch)
        total_steps = config.epochs * steps_per_epoch
        if len(digits) // steps_per_epoch < world.size:
            raise UserError(
                f"--batch {config.batch} is less than the {world.size} processes; give more images"
            )
        digits.to(device)
        tests.to(device)

        # -------- model, optimizer
        torch.manual_seed(config.seed)
        model = LeNet5(config.activation).to(device)
        parameter_count = sum(weight.numel() for weight in model.parameters())
        # One image there and back: an operator that does not run on this device says so now.
        flops = flops_per_image(model, device)
        warmup = schedule.warmup_steps(1000, total_steps)
        optimizer = torch.optim.AdamW(model.parameters(), config.lr, fused=True)

        # -------- a resumed run continues with its weights, moments and place in the data
        state = State()
        if saved := run.restore(model, optimizer):
            state = State(**saved)
        batches = training_batches(digits, config, world, state.step)

        # -------- what would fail after an hour fails now; then the folder becomes a run
        run.begin(gpu_seconds=1.0)
        log(f"device: {device}, fp32")
        log(str(model))
        log(
            f"LeNet-5: {parameter_count:,} parameters, "
            f"{flops:,} FLOPs a training image (forward and backward)"
        )
        log(
            f"{len(digits):,} training and {len(tests):,} test images, "
            f"{steps_per_epoch:,} steps per epoch, {config.epochs} epochs"
        )
        if state.step == 0:
            draw_layers(run, 0, model, tests, data_note)

        # -------- the loop
        runner = world.data_parallel(model)
        totals = torch.zeros(2, device=device)  # loss and correct answers since the last log line
        image_count = 0  # of all processes, since the last log line
        begun = time.perf_counter()
        model.train()
        while True:
            # Between two steps: is an epoch over? Test and save. Is the run asked to stop?
            interrupted = run.stop_asked()
            epoch_over = state.step > state.tested and state.step % steps_per_epoch == 0
            if epoch_over and not interrupted:
                result = evaluate(model, tests, world)
                state.tested = state.step
                curves = {f"test/{name}": result[name] for name in ("loss", "accuracy", "errors")}
                run.scalars(state.step, curves)
                log(
                    f"epoch {state.step // steps_per_epoch} of {config.epochs}: "
                    f"test loss {result['loss']:.4f}, accuracy {result['accuracy']:.2%}"
                )
                draw_layers(run, state.step, model, tests, data_note)
                model.train()
            if epoch_over or interrupted:
                run.save(state.step, model, optimizer, asdict(state))
                begun = time.perf_counter()
            if interrupted or state.step >= total_steps:
                break

            # Warm-up, level, then down to zero: a function of the step alone.
            step = state.step + 1
            progress = schedule.progress(state.step, total_steps)
            lr = schedule.learning_rate(config.lr, step, progress, warmup)
            for group in optimizer.param_groups:
                group["lr"] = lr

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
                    "train/learning_rate": lr,
                    "speed/images_per_second": speed,
                }
                run.scalars(step, curves)
                log(
                    f"step {step:>6,}  loss {mean_loss:.4f}  accuracy {accuracy:7.2%}"
                    f"  lr {lr:.2e}  {speed:,.0f} images/s"
                )
                totals.zero_()
                image_count = 0
                begun = time.perf_counter()

        if interrupted:
            run.close(INTERRUPTED, state.step)
        else:
            result = evaluate(model, tests, world)
            settings = ("activation", "held_out", "epochs", "batch", "seed")
            facts = {name: getattr(config, name) for name in settings}
            facts["data"] = data_note or config.data
            facts["parameters"] = parameter_count
            if world.is_main:
                write_result(run, state.step, model, tests, facts | result, data_note)
            run.close("finished", state.step)
        return run.folder


def read_digits(config: Config) -> tuple[Digits, Digits, str]:
    """The images to train on, those to test on, and a note if they are not MNIST, else ''."""
    folder = find_folder(config.data)
    # An absolute path, so that --resume finds it from any directory.
    config.data = str(folder or "drawn")
    digits = Digits(folder, "train")
    if config.held_out:
        digits, tests = digits.hold_out(config.held_out)
    else:
        tests = Digits(folder, "test")
    return digits, tests, "" if folder else DRAWN_NOTE


@torch.inference_mode()
def evaluate(model: LeNet5, tests: Digits, world: distributed.World) -> dict:
    """Loss in nats, accuracy, confusion matrix and mistakes on the test images, on every process.

    confusion: 10 × 10 counts, rows the true digit, columns the answer; mistakes: surest first.
    """
    model.eval()
    rows_of_this_process = torch.arange(len(tests))[world.rank :: world.size]
    # Log-probabilities, (N, 10); each process fills in its rows, and the sum has them all.
    scores = torch.zeros(len(tests), DIGITS, device=world.device)
    for rows in rows_of_this_process.split(1000):
        images, _ = tests[rows]
        scores[rows] = model(images).log_softmax(1)
    scores, labels = world.sum(scores).cpu(), tests.labels.cpu()
    answers = scores.argmax(1)
    # A pair (digit, answer) is one number below 100, so that one call counts all pairs.
    pairs = labels * DIGITS + answers
    confusion = pairs.bincount(minlength=DIGITS**2).view(DIGITS, DIGITS)
    wrong = (answers != labels).nonzero().flatten()
    wrong = wrong[scores[wrong].amax(1).argsort(descending=True, stable=True)]
    mistakes = [
        {
            "image": image,
            "digit": int(labels[image]),
            "answer": int(answers[image]),
            "probability": round(scores[image].max().exp().item(), 4),
        }
        for image in wrong.tolist()
    ]
    return {
        "accuracy": 1 - len(wrong) / len(labels),
        "errors": len(wrong),
        "images": len(labels),
        "loss": F.nll_loss(scores, labels).item(),
        "confusion": confusion.tolist(),
        "mistakes": mistakes,
    }


def draw_layers(run: Run, step: int, model: LeNet5, tests: Digits, data_note: str) -> None:
    """To TensorBoard: the filters, and what each layer makes of the first test image."""
    if run.world.is_main:
        image, _ = tests[0]
        run.telemetry.figure("filters", step, pictures.filters(model, data_note))
        run.telemetry.figure("feature maps", step, pictures.feature_maps(model, image, data_note))


def write_result(
    run: Run, step: int, model: LeNet5, tests: Digits, result: dict, data_note: str
) -> None:
    """eval/test.json with every mistake, the pictures beside it and in TensorBoard, a log line."""
    folder = run.folder / "eval"
    folder.mkdir(exist_ok=True)
    (folder / "test.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    image, _ = tests[0]
    counts, wrong = torch.tensor(result["confusion"]), result["mistakes"]
    figures = {
        "filters": pictures.filters(model, data_note),
        "feature-maps": pictures.feature_maps(model, image, data_note),
        "confusion": pictures.confusion(counts, data_note),
        "mistakes": pictures.mistakes(tests.images.cpu(), wrong, data_note),
    }
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=100)
    for name in ("confusion", "mistakes"):
        run.telemetry.figure(name, step, figures[name])
    run.telemetry.hyperparameters(run.config, {"result/accuracy": result["accuracy"]})
    held_out = "held-out training" if run.config.held_out else "test"
    run.log(
        f"test accuracy {result['accuracy']:.2%}: {result['errors']:,} errors in "
        f"{result['images']:,} {held_out} images; which ones: {folder}"
    )
    if data_note:
        run.log(f"note: {data_note}")


if __name__ == "__main__":
    settings = parse_flags(Config, "train LeNet-5 on MNIST; the result goes to runs/NAME")
    run_script(lambda: train(settings))
