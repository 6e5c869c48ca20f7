"""LeNet-5 (LeCun et al. 1998, "Gradient-based learning applied to document recognition") on MNIST; lab 5, part 1.

python -m labs.lenet                               # ReLU and max pooling: what a student builds today; zero flags work
python -m labs.lenet --variant sigmoid             # sigmoid and average pooling: what textbooks call the classic LeNet
python -m labs.lenet --variant paper               # the paper's own: see `PaperPooling` and `PaperConvolution`
python -m labs.lenet --data DIR                    # the four MNIST files, plain or .gz, or the folder torchvision made
python -m labs.lenet --activation own-gelu         # with the GELU operator of labs/attention_op
python -m labs.lenet --held_out 10000              # to try settings: tested on the last 10,000 training images instead
python -m labs.lenet --resume runs/NAME            # go on where it stopped; a finished run is tested once more
torchrun --nproc_per_node 2 -m -- labs.lenet --run NAME   # data parallel: the same batches and losses
for seed in 1 2 3 4 5; do python -m labs.lenet --seed $seed --run lenet-$seed; done; grep accuracy runs/lenet-?/eval/test.json
python report.py runs/NAME                         # the report: one page with curves, network, result, hardware
tensorboard --logdir runs                          # curves, filters, feature maps, confusion matrix, mistakes, GPU use

The test images are never looked at to choose anything: the result is that of the last epoch. A run that was stopped ends
as one that was not, on a CPU bit for bit (on a GPU, sums in cuDNN may come in another order each time).
"""

from dataclasses import asdict, dataclass

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script

LEARNING_RATE = {
    "relu": 2e-3,
    "sigmoid": 5e-3,
    "paper": 2e-3,
}  # peak; checked with --held_out 10000


@dataclass
class Config:
    """Every setting of a run."""

    data: str = flag(
        "", "folder with MNIST's files, or drawn; /opt/mnist, else ./data, else drawn", "Data"
    )
    held_out: int = flag(
        0, "test on the last N training images, train on the others", "Data", min=0
    )
    dataloader: bool = flag(
        False, "batches through torch's DataLoader: the same ones, slower", "Data"
    )
    workers: int = flag(
        0, "processes of the DataLoader; 0: the training process itself", "Data", min=0
    )

    variant: str = flag("relu", "layers (relu|sigmoid|paper); see labs/lenet/model.py", "Model")
    activation: str = flag("relu", "of --variant relu (relu|gelu|own-gelu|own-gelu-cpp)", "Model")

    epochs: int = flag(12, "passes over the training images", "Training", min=1)
    batch: int = flag(100, "images in one optimiser step, over all processes", "Training", min=1)
    lr: float = flag(0.0, "peak learning rate; 0: that of the variant", "Training", min=0, below=10)

    run: str = flag("", "name of the run (folder runs/NAME); the date and time", "Run")
    resume: str = flag("", "run folder to go on with", "Run")
    log_every: int = flag(100, "steps between points of the training curves", "Run", min=1)
    compile: bool = flag(False, "torch.compile the forward and backward pass", "Run")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "Run")
    threads: int = flag(1, "CPU threads a process; the layers are too small for many", "Run", min=1)
    seed: int = flag(1, "of weights and the order of images", "Run", min=0)

    def __post_init__(self):
        if self.variant != "relu" and self.activation != "relu":
            raise UserError(
                f"--activation belongs to --variant relu; leave it out, for {self.variant} has its own"
            )
        if self.workers and not (self.dataloader or self.resume):
            raise UserError("--workers belongs to --dataloader; give it, or leave --workers out")


if (
    __name__ == "__main__"
):  # before the heavy imports, so that --help and a wrong flag answer at once
    config = parse_flags(Config, "LeNet-5 on MNIST; the result goes to runs/NAME")

import json
import math
import time
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from engine import distributed, schedule
from engine.precision import choose_precision
from engine.run import INTERRUPTED, Run, saved_settings
from engine.telemetry import progress
from labs.lenet import pictures
from labs.lenet.mnist import DIGITS, HOW_TO_GET, SIZE, Digits, batches, find_folder, rows_of_epoch
from labs.lenet.model import LeNet5, LossAndHits

MAY_CHANGE = {
    "data",
    "dataloader",
    "workers",
    "epochs",
    "log_every",
    "compile",
    "device",
    "threads",
}  # on --resume


def main(config: Config) -> None:
    """One run, from the data to the result on the test images."""
    config = saved_settings(config, MAY_CHANGE)  # on --resume the run's own, its device among them
    world = distributed.start(config.device)
    device = world.device
    if device.type == "cpu":
        torch.set_num_threads(config.threads)

    with Run.start(config, "lenet", world, MAY_CHANGE) as run:
        config = run.config

        # ---- data
        digits, tests = read_digits(config)
        if config.data == "drawn":
            run.log(
                f"data: printed digits drawn here, easier than handwriting. For MNIST {HOW_TO_GET}"
            )
        check_sum = check_sum_of(digits, tests)
        steps_per_epoch = math.ceil(len(digits) / config.batch)
        if len(digits) // steps_per_epoch < world.size:
            raise UserError(
                f"--batch {config.batch} leaves no image for some of {world.size} processes; give more"
            )
        if not config.dataloader:  # its processes and its pinned memory need the images on the CPU
            digits.to(device)
        tests.to(device)

        # ---- model, optimiser
        torch.manual_seed(config.seed)
        model = LeNet5(config.variant, config.activation).to(device)
        parameters = list(model.parameters())
        parameter_count = sum(parameter.numel() for parameter in parameters)
        # An image goes forward: an operator that cannot be built or run on this device says so before the run begins.
        with (
            torch.no_grad(),
            FlopCounterMode(display=False) as counter,
        ):  # of convolutions and matrix products
            model(torch.zeros(1, 1, SIZE, SIZE, device=device))
        precision = choose_precision(
            device, "fp32"
        )  # bf16 makes layers this small no faster on a CPU
        optimizer = torch.optim.AdamW(
            parameters, lr=1.0, fused=True
        )  # its rate is set at every step
        config.lr = config.lr or LEARNING_RATE[config.variant]
        rates = schedule.plan(
            config.lr, 0, config.epochs * steps_per_epoch
        )  # 0: warm-up in a tenth of the steps
        fresh = {"step": 0, "window": [0.0, 0.0, 0.0], "check_sum": check_sum}
        state = run.restore(model, optimizer, precision) or fresh
        if (
            "schedule" in state
        ):  # of a resumed run; with other --epochs it goes on from the rate that it had reached
            saved = schedule.Schedule(**state["schedule"])
            rates = (
                saved if saved.total == rates.total else saved.extended(state["step"], rates.total)
            )
        if state["check_sum"] != check_sum:
            raise UserError(
                f"--resume {config.resume}: the images in {config.data} are others than the run began with; "
                "name their folder with --data, or start a new run"
            )
        loss_and_hits = LossAndHits(model)
        loss_and_hits = world.data_parallel(
            torch.compile(loss_and_hits) if config.compile else loss_and_hits
        )
        step = state["step"]
        # (3,): this rank's losses, hits, images since the curves' last point; rank 0 takes the sum that `save` wrote.
        window = torch.tensor(state["window"], device=device) * world.is_main

        def save() -> None:
            """A checkpoint; a point of the curves that is only half collected goes with it."""
            values = {
                "window": world.sum(window.clone()).tolist(),
                "check_sum": check_sum,
                "schedule": asdict(rates),
            }
            run.save(step, model, optimizer, values, precision)

        def draw_layers() -> None:
            """Learned filters, and what each layer makes of the first test image."""
            if world.is_main:
                run.telemetry.figure("filters", step, pictures.filters(model))
                run.telemetry.figure(
                    "feature maps", step, pictures.feature_maps(model, tests[0][0])
                )

        run.begin(gpu_seconds=1.0)
        run.log(precision.describe())
        run.log(str(model))
        run.log(
            f"LeNet-5 {config.variant}: {parameter_count:,} parameters, {3 * counter.get_total_flops():,} FLOPs a training "
            f"image (two thirds of them backward); {len(digits):,} training and "
            f"{len(tests):,} {tests_of(config)}, {steps_per_epoch:,} steps an epoch, {config.epochs} epochs"
        )
        if step == 0:
            draw_layers()  # as they are before learning

        # ---- training
        for epoch in range(step // steps_per_epoch, config.epochs):
            rows = rows_of_epoch(len(digits), config.batch, config.seed, epoch)[
                step - epoch * steps_per_epoch :
            ]
            own_rows = [batch[world.rank :: world.size] for batch in rows]
            loaded = batches(
                digits, own_rows, device, config.workers if config.dataloader else None
            )
            begun = time.perf_counter()
            model.train()
            for (images, labels), all_rows in zip(
                loaded, progress(rows, desc=f"epoch {epoch + 1}", leave=False)
            ):
                if run.stop_asked():
                    save()
                    run.close(INTERRUPTED)
                    return
                step += 1
                for group in optimizer.param_groups:
                    group["lr"] = rates.learning_rate(step)

                # Forward; loss.backward(); optimizer.step() if the gradient is finite, then optimizer.zero_grad() for the
                # next step: the last two are in precision.step, see engine/precision.py.
                loss, hits = loss_and_hits(images, labels)
                # The mean over the images of all ranks; × size undoes that DDP averages their gradients.
                precision.backward(loss * world.size / len(all_rows))
                norm = precision.step(optimizer, parameters, clip=0, step=step)

                window += torch.stack([loss.detach(), hits.float(), loss.new_full((), len(labels))])
                if step % config.log_every == 0 or step % steps_per_epoch == 0:
                    precision.check_finite()
                    # The means over the images since the last point, while the weights were changing.
                    *sums, count = world.sum(window).tolist()
                    window.zero_()
                    mean_loss, accuracy = (value / count for value in sums)
                    values = {
                        "train/loss": mean_loss,
                        "train/accuracy": accuracy,
                        "train/gradient_norm": norm.item(),
                    }
                    run.scalars(step, values | {"train/learning_rate": rates.learning_rate(step)})
                    run.log(f"step {step:>6,}  loss {mean_loss:.4f}  accuracy {accuracy:7.2%}")

            images_done = sum(map(len, rows))
            speed = images_done / (time.perf_counter() - begun)
            run.scalars(step, {"speed/images_per_second": speed})
            run.log(
                f"epoch {epoch + 1}/{config.epochs}: {images_done:,} images, {speed:,.0f} a second"
            )
            result = result_of(score(model, tests, world), tests.labels.cpu())
            run.scalars(
                step, {f"test/{name}": result[name] for name in ("loss", "accuracy", "errors")}
            )
            run.log(
                f"test: loss {result['loss']:.4f}, accuracy {result['accuracy']:.2%} "
                f"({result['errors']:,} errors in {len(tests):,})"
            )
            draw_layers()
            save()

        # ---- result: one line, eval/test.json with every mistake, and the pictures, in TensorBoard and as files
        scores = score(model, tests, world)  # of a finished run that is resumed, too
        if world.is_main:
            names = ("variant", "activation", "held_out", "epochs", "batch", "seed", "data")
            result = {name: getattr(config, name) for name in names} | {
                "parameters": parameter_count
            }
            result |= result_of(scores, tests.labels.cpu())
            folder = run.folder / "eval"
            folder.mkdir(exist_ok=True)
            (folder / "test.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            figures = {
                "filters": pictures.filters(model),
                "feature-maps": pictures.feature_maps(model, tests[0][0]),
                "confusion": pictures.confusion(torch.tensor(result["confusion"])),
                "mistakes": pictures.mistakes(tests.images.cpu(), result["mistakes"]),
            }
            for name, figure in figures.items():
                figure.savefig(folder / f"{name}.png", dpi=100)
            for name in ("confusion", "mistakes"):
                run.telemetry.figure(name, step, figures[name])
            run.telemetry.hyperparameters(config, {"result/accuracy": result["accuracy"]})
            run.log(
                f"test accuracy {result['accuracy']:.2%}: {result['errors']:,} errors in {result['images']:,} "
                f"{tests_of(config)}; which ones: {folder}"
            )
        run.close("all epochs are done")


def read_digits(config: Config) -> tuple[Digits, Digits]:
    """What to train on and what to test on."""
    folder = find_folder(config.data)
    config.data = str(
        folder or "drawn"
    )  # absolute, so that it is there from any directory on --resume
    digits = Digits(folder, "train")
    return digits.hold_out(config.held_out) if config.held_out else (digits, Digits(folder, "test"))


def check_sum_of(digits: Digits, tests: Digits) -> int:
    """A number that tells these images and labels from all others."""
    check_sum = 0
    for values in (digits.images, digits.labels, tests.images, tests.labels):
        check_sum = zlib.crc32(values.numpy(), check_sum)
    return check_sum


def tests_of(config: Config) -> str:
    """What the log calls the images of the result."""
    drawn = "drawn " if config.data == "drawn" else ""
    return drawn + ("training images held out" if config.held_out else "test images")


@torch.inference_mode()
def score(model: LeNet5, tests: Digits, world: distributed.World) -> Tensor:
    """(N, 10) log-probabilities of the test images, on the CPU, the same on every rank: each does its share."""
    model.eval()
    count, device = len(tests), world.device
    scores, times_seen = (
        torch.zeros(count, DIGITS, device=device),
        torch.zeros(count, device=device),
    )
    for rows in torch.arange(count, device=device)[world.rank :: world.size].split(1000):
        scores[rows] = model(tests[rows][0]).log_softmax(1)
        times_seen[rows] += 1
    assert (world.sum(times_seen) == 1).all(), "every test image counts exactly once"
    return world.sum(scores).cpu()  # every row is zeros on all ranks but one


def result_of(scores: Tensor, labels: Tensor) -> dict:
    """Accuracy, confusion matrix (rows: the true digit, columns: the answer) and the mistakes, surest ones first."""
    answers = scores.argmax(1)
    # Each pair (digit, answer) becomes one number below 100, so one call counts all pairs.
    confusion = torch.bincount(labels * DIGITS + answers, minlength=DIGITS**2).view(DIGITS, DIGITS)
    wrong = (answers != labels).nonzero().flatten()
    wrong = wrong[scores[wrong].amax(1).argsort(descending=True, stable=True)]
    mistakes = [
        {
            "image": i,
            "digit": int(labels[i]),
            "answer": int(answers[i]),
            "probability": round(scores[i].max().exp().item(), 4),
        }
        for i in wrong.tolist()
    ]
    return {
        "accuracy": 1 - len(wrong) / len(labels),
        "errors": len(wrong),
        "images": len(labels),
        "loss": F.nll_loss(scores, labels).item(),
        "confusion": confusion.tolist(),
        "mistakes": mistakes,
    }


if __name__ == "__main__":
    run_script(lambda: main(config))
