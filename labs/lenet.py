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
tensorboard --logdir runs                          # curves, filters, feature maps, confusion matrix, mistakes, GPU use

All three variants end in a linear layer, whose softmax gives the probabilities. The paper compares F6 with drawings of the
digits instead (radial basis functions), an output that only makes sense with its drawings and its own loss.
The test images are never looked at to choose anything: the result is that of the last epoch. A run that was stopped ends
as one that was not, on a CPU bit for bit (on a GPU, sums in cuDNN may come in another order each time).
"""

from dataclasses import asdict, dataclass

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script

LEARNING_RATE = {"relu": 2e-3, "sigmoid": 5e-3, "paper": 2e-3}  # peak; checked with --held_out 10000
OWN_GELU = {"own-gelu": "python", "own-gelu-cpp": "cpp"}  # --activation → backend of labs.attention_op.gelu


@dataclass
class Config:
    """Every setting of a run."""

    data: str = flag("", "folder with MNIST's four files; /opt/mnist, else ./data", "Data")
    held_out: int = flag(0, "test on so many of the last training images, train on the others", "Data")
    dataloader: bool = flag(False, "batches through torch's DataLoader: the same ones, slower", "Data")
    workers: int = flag(0, "processes of the DataLoader; 0: the training process itself", "Data")

    variant: str = flag("relu", "layers (relu|sigmoid|paper); see the top of labs/lenet.py", "Model")
    activation: str = flag("relu", "of --variant relu (relu|gelu|own-gelu|own-gelu-cpp)", "Model")

    epochs: int = flag(12, "passes over the training images", "Training")
    batch: int = flag(100, "images in one optimiser step, over all processes", "Training")
    lr: float = flag(0.0, "peak learning rate; 0: that of the variant", "Training")

    run: str = flag("", "name of the run (folder runs/NAME); the date and time", "Run")
    resume: str = flag("", "run folder to go on with", "Run")
    log_every: int = flag(100, "steps between points of the training curves", "Run")
    compile: bool = flag(False, "torch.compile the forward and backward pass", "Run")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "Run")
    threads: int = flag(1, "CPU threads a process; the layers are too small for many", "Run")
    seed: int = flag(1, "of weights and the order of images", "Run")

    def __post_init__(self):
        for name, least in dict(held_out=0, workers=0, epochs=1, batch=1, log_every=1, threads=1, seed=0).items():
            if not least <= getattr(self, name) < 2**31:
                raise UserError(f"--{name} {getattr(self, name)} must be at least {least}, and less than 2**31")
        if not 0 <= self.lr < 10:
            raise UserError(f"--lr {self.lr} must be in (0, 10), or 0 for the variant's own")
        if self.variant not in LEARNING_RATE:
            raise UserError(f"--variant {self.variant} is unknown; choose relu, sigmoid or paper")
        if self.activation not in ("relu", "gelu", *OWN_GELU):
            raise UserError(f"--activation {self.activation} is unknown; choose relu, gelu, own-gelu or own-gelu-cpp")
        if self.variant != "relu" and self.activation != "relu":
            raise UserError(f"--activation belongs to --variant relu; leave it out, for {self.variant} has its own")


if __name__ == "__main__":  # before the heavy imports, so that --help and a wrong flag answer at once
    config = parse_flags(Config, "LeNet-5 on MNIST; the result goes to runs/NAME")

import json
import time
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engine import distributed, schedule
from engine.allocator import keep_freed_memory
from engine.checkpoint import load_training_state
from engine.precision import Precision, choose_precision
from engine.run import INTERRUPTED, Run, last_checkpoint, saved_settings
from engine.telemetry import GpuSampler, progress
from labs import lenet_pictures as pictures
from labs.mnist import DIGITS, SIZE, Digits, batches, find_folder, rows_of_epoch

# B images, C maps of H × W pixels.
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's training pixels, where 0 is paper and 1 is ink
MAY_CHANGE = {"data", "dataloader", "workers", "epochs", "log_every", "compile", "device", "threads"}  # on --resume


# ---------------------------------------------------------------------------------------------------- model


class LeNet5(nn.Module):
    """(B, 1, 28, 28) images from 0 to 1 → (B, 10) logits. The layers have the paper's names: C1 S2 C3 S4 C5 F6."""

    def __init__(self, variant: str = "relu", activation: str = "relu"):
        super().__init__()
        paper = variant == "paper"
        squash = {"relu": lambda: own_activation(activation), "sigmoid": nn.Sigmoid, "paper": ScaledTanh}[variant]
        pool = {"relu": lambda _: nn.MaxPool2d(2), "sigmoid": lambda _: nn.AvgPool2d(2), "paper": PaperPooling}[variant]
        self.c1 = nn.Sequential(nn.Conv2d(1, 6, 5), squash())  # (B, 6, 28, 28), from images padded to 32 × 32
        self.s2 = pool(6)  # (B, 6, 14, 14)
        self.c3 = nn.Sequential(PaperConvolution() if paper else nn.Conv2d(6, 16, 5), squash())  # (B, 16, 10, 10)
        self.s4 = pool(16)  # (B, 16, 5, 5)
        # A 5 × 5 convolution of a 5 × 5 map sees all of it: a linear layer, and quicker as one.
        self.c5 = nn.Sequential(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), squash())  # (B, 120)
        self.f6 = nn.Sequential(nn.Linear(120, 84), squash())  # (B, 84)
        self.output = nn.Linear(84, DIGITS)  # (B, 10)
        if variant != "relu":
            self.apply(xavier if variant == "sigmoid" else as_in_the_paper)

    def forward(self, images: Tensor) -> Tensor:
        return list(self.layers(images).values())[-1]

    def layers(self, images: Tensor) -> dict[str, Tensor]:
        """What each layer gives, by name and in order: for pictures."""
        # Paper is added around the digit, so that strokes near the border reach the middle of some 5 × 5 field.
        x = (F.pad(images, [2] * 4) - MEAN) / DEVIATION  # (B, 1, 32, 32)
        found = {}
        for name, layer in self.named_children():
            found[name] = x = layer(x)
        return found


class ScaledTanh(nn.Module):
    """1.7159 tanh(2/3 x): ±1 stay ±1, where the curve bends most, and saturation lies beyond the targets (appendix A)."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.7159 * torch.tanh(2 / 3 * x)


class PaperPooling(nn.Module):
    """Sub-sampling as in the paper: the sum of 2 × 2 pixels, times a weight, plus a bias (one pair a map), squashed."""

    def __init__(self, maps: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full((maps, 1, 1), 0.25))  # to begin with it is the mean
        self.bias = nn.Parameter(torch.zeros(maps, 1, 1))
        self.squash = ScaledTanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.squash(4 * F.avg_pool2d(x, 2) * self.weight + self.bias)  # (B, C, H/2, W/2)


# Table I of the paper: the maps of S2 that each of the 16 maps of C3 sees. Three or four neighbours (in a ring), four in
# two pairs, or all: 60 connections instead of 96, so that maps must learn different things.
CONNECTIONS = [[(first + i) % 6 for i in range(width)] for width in (3, 4) for first in range(6)]
CONNECTIONS += [[0, 1, 3, 4], [1, 2, 4, 5], [0, 2, 3, 5], [0, 1, 2, 3, 4, 5]]


class PaperConvolution(nn.Module):
    """C3 of the paper: a 5 × 5 convolution from 6 maps to 16 with the connections of Table I only, 1,516 parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(60, 5, 5))
        self.bias = nn.Parameter(torch.zeros(16))
        # Where each kernel stands in the full weight (16 × 6, 5, 5). Zeros elsewhere: quicker than 16 small convolutions.
        places = [6 * to + origin for to, origins in enumerate(CONNECTIONS) for origin in origins]
        self.register_buffer("places", torch.tensor(places), persistent=False)

    def full_weight(self) -> Tensor:
        zeros = self.weight.new_zeros(96, 5, 5)
        return zeros.index_copy(0, self.places, self.weight).view(16, 6, 5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.full_weight(), self.bias)


def as_in_the_paper(layer: nn.Module) -> None:
    """Weights uniform in ± 2.4 / inputs (appendix A), so that sums begin in the middle part of the squashing function."""
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.uniform_(layer.weight, -1, 1).data.mul_(2.4 / layer.weight[0].numel())
    elif isinstance(layer, PaperConvolution):
        inputs = torch.tensor([25 * len(origins) for origins in CONNECTIONS for _ in origins]).view(60, 1, 1)
        nn.init.uniform_(layer.weight, -1, 1).data.mul_(2.4 / inputs)


def xavier(layer: nn.Module) -> None:
    """Glorot & Bengio 2010; with torch's smaller default a network of sigmoids learns nothing for epochs."""
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)


def own_activation(name: str) -> nn.Module:
    """ReLU, torch's GELU, or the GELU operator of labs/attention_op."""
    if name not in OWN_GELU:
        return {"relu": nn.ReLU, "gelu": nn.GELU}[name]()
    try:
        from labs.attention_op import gelu
    except ImportError as error:
        raise UserError(f"--activation {name} needs labs/attention_op: {error}; use --activation gelu") from None
    return Function(gelu, approximate="none", backend=OWN_GELU[name])


class Function(nn.Module):
    """A function with fixed keyword arguments, as a layer."""

    def __init__(self, function, **settings):
        super().__init__()
        self.function, self.settings = function, settings

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **self.settings)


class LossAndHits(nn.Module):
    """What a step computes: the summed cross-entropy in nats, and how many digits are right."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(images)  # (B, 10)
        return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()


# ---------------------------------------------------------------------------------------------------- training


@dataclass
class Training:
    """What the loop works with."""

    config: Config
    world: distributed.World
    run: Run
    digits: Digits
    tests: Digits
    model: LeNet5
    runner: nn.Module  # the model with its loss, compiled and wrapped by DDP where they are used
    precision: Precision
    optimizer: torch.optim.Optimizer
    plan: schedule.Schedule
    steps_per_epoch: int
    gpu: GpuSampler | None
    window: Tensor  # (3,) this rank's losses, hits and images since the last point of the curves
    state: dict  # of a checkpoint: step, window (of all ranks), and a check sum of the data


def main(config: Config) -> None:
    """One run, from the data to the result on the test images."""
    t = set_up(config)
    if not t.state["step"]:
        draw_layers(t)  # as they are before learning
    while t.state["step"] < t.plan.total:
        if not run_epoch(t):
            save(t)
            t.run.close(INTERRUPTED)
            return
        log_test(t, scores_of_tests(t))
        draw_layers(t)
        save(t)
    finish(t)


def run_epoch(t: Training) -> bool:
    """The steps of this epoch that are not done yet; false if a signal came before the last one."""
    config, world, state = t.config, t.world, t.state
    epoch, done = divmod(state["step"], t.steps_per_epoch)
    rows = rows_of_epoch(len(t.digits), config.batch, config.seed, epoch)[done:]
    own_rows = [some[world.rank :: world.size] for some in rows]
    fetched = batches(t.digits, own_rows, world.device, config.workers if config.dataloader else None)
    parameters, begun = list(t.model.parameters()), time.perf_counter()
    t.model.train()
    for (images, labels), all_rows in zip(fetched, progress(rows, desc=f"epoch {epoch + 1}", leave=False)):
        if t.run.stop_asked():
            return False
        step = state["step"] = state["step"] + 1
        for group in t.optimizer.param_groups:
            group["lr"] = t.plan.learning_rate(step)
        loss, hits = t.runner(images, labels)
        # The mean over the images of all ranks; × size undoes that DDP averages the gradients of the ranks.
        t.precision.backward(loss * world.size / len(all_rows))
        norm = t.precision.step(t.optimizer, parameters, clip=0, step=step)
        t.window += torch.stack([loss.detach(), hits.float(), loss.new_full((), len(labels))])
        if step % config.log_every == 0 or step % t.steps_per_epoch == 0:
            log_window(t, norm)
    speed = sum(map(len, rows)) / (time.perf_counter() - begun)
    t.run.telemetry.scalars(step, {"speed/images_per_second": speed})
    t.run.log(f"epoch {epoch + 1}/{config.epochs}: {sum(map(len, rows)):,} images, {speed:,.0f} a second")
    return True


def set_up(config: Config) -> Training:
    """Everything before the first step: data, model, optimizer, and the checkpoint that a resumed run starts from."""
    if config.resume:
        config = saved_settings(config, MAY_CHANGE)
    world = distributed.start(config.device)
    if world.device.type == "cpu":
        torch.set_num_threads(config.threads)
        keep_freed_memory()
    read = []  # rank 0 reads first and speaks for all if the files are damaged
    world.on_main(lambda: read.extend(read_data(config)))
    digits, tests, check_sum = read or read_data(config)
    steps_per_epoch = -(-len(digits) // config.batch)
    if len(digits) // steps_per_epoch < world.size:
        raise UserError(f"--batch {config.batch} is less than an image for each of {world.size} processes; give more")
    model = fresh_model(config, world.device)

    run = Run.start(config, "lenet", world, MAY_CHANGE)
    config = run.config
    precision = choose_precision(world.device, "fp32")  # bf16 makes layers this small no faster on a CPU
    run.log(precision.describe())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)
    state = run.restore(model, optimizer) or {"step": 0, "window": [0.0, 0.0, 0.0], "check_sum": check_sum}
    total = config.epochs * steps_per_epoch
    run.log(f"LeNet-5 {config.variant}: {sum(p.numel() for p in model.parameters()):,} parameters; {len(digits):,} training "
            f"and {len(tests):,} {tests_of(config)}, {steps_per_epoch:,} steps an epoch, {config.epochs} epochs")  # fmt: skip
    on_gpu = world.device.type == "cuda"
    gpu = GpuSampler(world.device, interval=1.0, say=run.log) if on_gpu and world.is_main else None
    if gpu:
        gpu.start()
    if not config.dataloader:  # whose processes and pinned memory want them on the CPU
        digits.to(world.device)
    return Training(
        config=config, world=world, run=run, digits=digits, tests=tests.to(world.device), model=model,
        runner=wrap(LossAndHits(model), config, world), precision=precision, optimizer=optimizer,
        plan=schedule.plan(config.lr or LEARNING_RATE[config.variant], 0, total), steps_per_epoch=steps_per_epoch, gpu=gpu,
        window=torch.tensor(state["window"], device=world.device) * world.is_main, state=state,
    )  # fmt: skip


def read_data(config: Config) -> tuple[Digits, Digits, int]:
    """What to train on, what to test on, and a number that tells them from other data."""
    folder = find_folder(config.data)
    digits = Digits(folder, "train")
    digits, tests = digits.hold_out(config.held_out) if config.held_out else (digits, Digits(folder, "test"))
    check_sum = 0
    for values in (digits.images, digits.labels, tests.images, tests.labels):
        check_sum = zlib.crc32(values.numpy(), check_sum)
    found = last_checkpoint(Path(config.resume)) if config.resume else None
    if found and load_training_state(found)[1]["check_sum"] != check_sum:
        raise UserError(f"--resume {config.resume}: the images in {folder} are others than the run began with; "
                        "name their folder with --data, or start a new run")  # fmt: skip
    config.data = str(folder)  # found again from anywhere
    return digits, tests, check_sum


def fresh_model(config: Config, device: torch.device) -> LeNet5:
    """Untrained, but tried once: an operator that cannot be built or run on the device says so before there is a folder."""
    torch.manual_seed(config.seed)
    model = LeNet5(config.variant, config.activation).to(device)
    with torch.no_grad():
        model(torch.zeros(1, 1, SIZE, SIZE, device=device))
    return model


def tests_of(config: Config) -> str:
    """What the log calls the images of the result."""
    return "training images held out" if config.held_out else "test images"


def wrap(loss: LossAndHits, config: Config, world: distributed.World) -> nn.Module:
    """The loss as the loop calls it: compiled if asked, and one of many under DDP."""
    runner = torch.compile(loss) if config.compile else loss
    if world.size == 1:
        return runner
    return DistributedDataParallel(runner, device_ids=[world.device] if world.device.type == "cuda" else None)


def log_window(t: Training, gradient_norm: Tensor) -> None:
    """A point of the training curves: the mean over the images since the last one, while the weights were changing."""
    t.precision.check_finite()
    loss, hits, images = t.world.sum(t.window).tolist()
    t.window.zero_()
    step = t.state["step"]
    figures = {"train/loss": loss / images, "train/accuracy": hits / images}
    figures |= {"train/gradient_norm": gradient_norm.item(), "train/learning_rate": t.plan.learning_rate(step)}
    t.run.telemetry.scalars(step, {**figures, **(t.gpu.read() if t.gpu else {})})
    t.run.log(f"step {step:>6,}  loss {loss / images:.4f}  accuracy {hits / images:7.2%}")


def save(t: Training) -> None:
    """A checkpoint; a point of the curves that is only half collected goes with it."""
    t.precision.check_finite()
    t.state["window"] = t.world.sum(t.window.clone()).tolist()
    t.run.save(t.state["step"], t.model, t.optimizer, t.state)


# ---------------------------------------------------------------------------------------------------- testing


@torch.inference_mode()
def scores_of_tests(t: Training) -> Tensor:
    """(N, 10) log-probabilities of the test images, on the CPU, the same on every rank: each does its share."""
    t.model.eval()
    count, device = len(t.tests), t.world.device
    scores, times_seen = torch.zeros(count, DIGITS, device=device), torch.zeros(count, device=device)
    for rows in torch.arange(count, device=device)[t.world.rank :: t.world.size].split(1000):
        scores[rows] = t.model(t.tests[rows][0]).log_softmax(1)
        times_seen[rows] += 1
    assert (t.world.sum(times_seen) == 1).all(), "every test image counts exactly once"
    return t.world.sum(scores).cpu()


def log_test(t: Training, scores: Tensor) -> None:
    """A point of the test curves."""
    labels = t.tests.labels.cpu()
    errors, loss = (scores.argmax(1) != labels).sum().item(), F.nll_loss(scores, labels).item()
    accuracy = 1 - errors / len(labels)
    t.run.telemetry.scalars(t.state["step"], {"test/loss": loss, "test/accuracy": accuracy, "test/errors": errors})
    t.run.log(f"test: loss {loss:.4f}, accuracy {accuracy:.2%} ({errors:,} errors in {len(labels):,})")


def draw_layers(t: Training) -> None:
    """Learned filters, and what each layer makes of the first test image."""
    if t.world.is_main:
        t.run.telemetry.figure("filters", t.state["step"], pictures.filters(t.model))
        t.run.telemetry.figure("feature maps", t.state["step"], pictures.feature_maps(t.model, t.tests[0][0]))


def finish(t: Training) -> None:
    """The result: one line, eval/test.json with every mistake, and the pictures, in TensorBoard and as files."""
    scores = scores_of_tests(t)
    if t.world.is_main:
        result = result_of(t, scores)
        folder = t.run.folder / "eval"
        folder.mkdir(exist_ok=True)
        (folder / "test.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        figures = {
            "filters": pictures.filters(t.model),
            "feature-maps": pictures.feature_maps(t.model, t.tests[0][0]),
            "confusion": pictures.confusion(torch.tensor(result["confusion"])),
            "mistakes": pictures.mistakes(t.tests.images.cpu(), result["mistakes"]),
            "curves": pictures.curves(t.run.folder / "metrics.jsonl"),
        }
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.png", dpi=100)
        for name in ("confusion", "mistakes"):
            t.run.telemetry.figure(name, t.state["step"], figures[name])
        t.run.telemetry.hyperparameters(asdict(t.config), {"result/accuracy": result["accuracy"]})
        t.run.log(f"test accuracy {result['accuracy']:.2%}: {result['errors']:,} errors in {result['images']:,} "
                  f"{tests_of(t.config)}; which ones: {folder}")  # fmt: skip
    t.run.close("all epochs are done")


def result_of(t: Training, scores: Tensor) -> dict:
    """Accuracy, confusion matrix (rows: the true digit, columns: the answer) and the mistakes, surest ones first."""
    labels, answers = t.tests.labels.cpu(), scores.argmax(1)
    confusion = torch.bincount(labels * DIGITS + answers, minlength=DIGITS**2).view(DIGITS, DIGITS)
    wrong = (answers != labels).nonzero().flatten()
    wrong = wrong[scores[wrong].amax(1).argsort(descending=True, stable=True)]
    mistakes = [
        {"image": i, "digit": int(labels[i]), "answer": int(answers[i]), "probability": round(scores[i].max().exp().item(), 4)}
        for i in wrong.tolist()
    ]  # fmt: skip
    names = ("variant", "activation", "held_out", "epochs", "batch", "seed", "data")
    return {
        "accuracy": 1 - len(wrong) / len(labels), "errors": len(wrong), "images": len(labels),
        "loss": F.nll_loss(scores, labels).item(), "parameters": sum(p.numel() for p in t.model.parameters()),
        **{name: getattr(t.config, name) for name in names},
        "confusion": confusion.tolist(), "mistakes": mistakes,
    }  # fmt: skip


if __name__ == "__main__":
    run_script(lambda: main(config))
