"""The same LeNet-5 with PyTorch Lightning: it brings the loop, the checkpoints and the curves.

pip install lightning
python -m labs.lenet.lightning --data DIR    # MNIST's files; else found or drawn as in labs.lenet
tensorboard --logdir runs                    # runs/lightning/version_N
"""

from dataclasses import dataclass

from engine import schedule
from engine.config import flag, parse_flags
from engine.errors import run_script

try:
    import lightning
    from lightning.pytorch.loggers import TensorBoardLogger
except ImportError:
    raise SystemExit("error: this needs PyTorch Lightning: pip install lightning") from None

import torch.nn.functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from labs.lenet.mnist import DRAWN_NOTE, HOW_TO_GET, Digits, find_folder
from labs.lenet.model import LeNet5


@dataclass
class Config:
    """The settings that Lightning's program shares with labs.lenet."""

    data: str = flag("", "folder with MNIST's files, or drawn; default: as in labs.lenet", "Data")
    epochs: int = flag(12, "passes over the training images", "Training", min=1)
    batch: int = flag(100, "images per step", "Training", min=1)
    lr: float = flag(2e-3, "peak learning rate", "Training", above=0, below=10)
    seed: int = flag(1, "seed of weights and data order", "Run", min=0)


class Classifier(lightning.LightningModule):
    """What a step does; when it is done is the Trainer's business."""

    def __init__(self, lr: float):
        super().__init__()
        self.model, self.lr = LeNet5(), lr

    def training_step(self, batch, _):
        """Images (B, 1, 28, 28) and labels (B,) → the loss, in nats; Lightning does the rest."""
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train/loss", loss)
        return loss  # Lightning calls zero_grad, backward and step

    def test_step(self, batch, _):
        """Log loss and accuracy of a batch; Lightning takes the means over all batches."""
        images, labels = batch
        logits = self.model(images)  # (B, 10)
        self.log("test/loss", F.cross_entropy(logits, labels))
        self.log("test/accuracy", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        """AdamW under the learning rate of labs.lenet: up, level, down to zero."""
        total = int(self.trainer.estimated_stepping_batches)
        warmup = schedule.warmup_steps(1000, total)

        def share_of_peak(step: int) -> float:
            progress = schedule.progress(step, total)
            return schedule.learning_rate(1.0, step + 1, progress, warmup)

        optimizer = AdamW(self.parameters(), self.lr)
        scheduler = LambdaLR(optimizer, share_of_peak)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(config: Config) -> dict[str, float]:
    """Train, then print and return the loss and the accuracy on the test images."""
    folder = find_folder(config.data)
    if not folder:
        print(f"data: {DRAWN_NOTE}. For MNIST {HOW_TO_GET}")
    lightning.seed_everything(config.seed, verbose=False)
    logger = TensorBoardLogger("runs", "lightning")
    trainer = lightning.Trainer(max_epochs=config.epochs, devices=1, logger=logger)
    classifier = Classifier(config.lr)
    trainer.fit(classifier, DataLoader(Digits(folder, "train"), config.batch, shuffle=True))
    (scores,) = trainer.test(classifier, DataLoader(Digits(folder, "test"), 1000))
    return scores


if __name__ == "__main__":
    settings = parse_flags(Config, "train LeNet-5 with PyTorch Lightning")
    run_script(lambda: train(settings))
