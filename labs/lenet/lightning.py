"""The same LeNet-5 with PyTorch Lightning: it brings the loop, the checkpoints and the devices.
The checkpoints are pickle files: do not open those of strangers.

pip install lightning
python -m labs.lenet.lightning --data DIR    # MNIST's files; else found or drawn as in labs.lenet
tensorboard --logdir runs                    # the same curves and pictures as those of labs.lenet
python report.py runs/NAME
"""

import copy

from engine import distributed, schedule
from engine.config import parse_flags
from engine.errors import UserError, run_script

try:
    import lightning
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger
except ImportError:
    raise SystemExit("error: this needs PyTorch Lightning: pip install lightning") from None

import torch.nn.functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from engine.run import Run
from labs.lenet.__main__ import Config
from labs.lenet.evaluation import draw_layers, evaluate, write_result
from labs.lenet.mnist import DRAWN_NOTE, HOW_TO_GET, Digits, find_folder
from labs.lenet.model import LeNet5


class Classifier(lightning.LightningModule):
    """What a step does; when it is done is the Trainer's business."""

    def __init__(self, config: Config):
        super().__init__()
        self.model, self.lr = LeNet5(config.activation), config.lr

    def training_step(self, batch, _):
        """Images (B, 1, 28, 28) and labels (B,) → the loss, in nats; Lightning does the rest."""
        images, labels = batch
        logits = self.model(images)  # (B, 10)
        loss = F.cross_entropy(logits, labels)
        self.log("train/loss", loss)
        self.log("train/accuracy", (logits.argmax(1) == labels).float().mean())
        return loss  # Lightning calls zero_grad, backward and step

    def validation_step(self, batch, _, dataloader_idx: int):
        """Loss and accuracy of a batch of one of the SPLITS; Lightning takes their means."""
        images, labels = batch
        logits = self.model(images)
        curves = {
            f"{SPLITS[dataloader_idx]}/loss": F.cross_entropy(logits, labels),
            f"{SPLITS[dataloader_idx]}/accuracy": (logits.argmax(1) == labels).float().mean(),
        }
        self.log_dict(curves, add_dataloader_idx=False)

    def configure_optimizers(self):
        """AdamW under the learning rate of labs.lenet: up, level, down to zero."""
        total = int(self.trainer.estimated_stepping_batches)
        warmup = schedule.warmup_steps(1000, total)

        def share_of_peak(step: int) -> float:
            """The learning rate of a step, as a share of the peak."""
            progress = schedule.progress(step, total)
            return schedule.learning_rate(1.0, step + 1, progress, warmup)

        optimizer = AdamW(self.parameters(), self.lr)
        scheduler = LambdaLR(optimizer, share_of_peak)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


SPLITS = ("valid", "test")  # of the loaders that `fit` evaluates after each epoch


class RunLogger(Logger):
    """Lightning's numbers to the run's files, so that TensorBoard and report.py find them."""

    name = version = ""  # Lightning makes no folders of these names

    def __init__(self, run: Run):
        super().__init__()
        self.lab_run = run

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Points of curves; Lightning counts steps from 0, the labs from 1."""
        curves = {name: value for name, value in metrics.items() if name != "epoch"}
        self.lab_run.scalars((step or 0) + 1, curves)

    def log_hyperparams(self, *words) -> None:
        """Nothing: the run's settings are in config.json."""


class EndOfEpoch(Callback):
    """Draws the layers after each epoch, and ends the training when the run is asked to stop."""

    def __init__(self, run: Run, tests: Digits):
        self.lab_run, self.tests = run, tests

    def on_train_epoch_end(self, trainer, classifier) -> None:
        """Filters and feature maps in TensorBoard, of a copy on the CPU, where the images are."""
        model = copy.deepcopy(classifier.model).cpu()
        draw_layers(self.lab_run, trainer.global_step, model, self.tests)

    def on_train_batch_end(self, trainer, *_) -> None:
        """Ctrl-C: Run has caught the signal."""
        trainer.should_stop = trainer.should_stop or self.lab_run.stop_asked()


def train(config: Config) -> dict:
    """Train, test, write the run's files. Returns the scores of the test images."""
    if config.resume:
        raise UserError(
            "--resume: Lightning's checkpoints are pickle files, which this lab does not open; "
            "start a new run"
        )
    world = distributed.init(config.device)
    with Run(config, "lightning", world) as run:
        folder = find_folder(config.data)
        config.data = str(folder or "drawn")
        if not folder:
            run.log(f"data: {DRAWN_NOTE}. For MNIST {HOW_TO_GET}")
        digits, validation, tests = (
            Digits(folder, split) for split in ("train", "validation", "test")
        )
        lightning.seed_everything(config.seed, verbose=False)
        classifier = Classifier(config)
        run.record_start(config)
        run.log(str(classifier.model))
        trainer = lightning.Trainer(
            accelerator=world.device.type,
            devices=1,
            max_epochs=config.epochs,
            log_every_n_steps=config.log_every,
            default_root_dir=run.folder,
            logger=RunLogger(run),
            callbacks=[EndOfEpoch(run, tests)],
        )
        trainer.fit(
            classifier,
            DataLoader(digits, config.batch_size, shuffle=True),
            [DataLoader(validation, 1000), DataLoader(tests, 1000)],
        )
        if trainer.interrupted or run.stop_asked():
            run.close("stopped by a signal, without a result", trainer.global_step)
            return {}
        model = classifier.model.cpu()
        result = evaluate(model, tests) | {"data": str(folder) if folder else DRAWN_NOTE}
        write_result(run, trainer.global_step, model, tests, result)
        run.close("finished", trainer.global_step)
        return result


if __name__ == "__main__":
    settings = parse_flags(Config, "train LeNet-5 with PyTorch Lightning")
    run_script(lambda: train(settings))
