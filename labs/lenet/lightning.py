"""The same LeNet-5 with PyTorch Lightning: it brings the loop, the checkpoints and the curves.

pip install lightning
python -m labs.lenet.lightning               # /opt/mnist, else drawn digits
python -m labs.lenet.lightning --data DIR    # the folder with MNIST's four files
tensorboard --logdir runs
"""

import json
from dataclasses import dataclass
from pathlib import Path

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
    """Every setting of a run."""

    data: str = flag("", "folder with MNIST's files, or drawn; /opt/mnist, else drawn", "Data")
    epochs: int = flag(12, "passes over the training images", "Training", min=1)
    batch: int = flag(100, "images per step", "Training", min=1)
    lr: float = flag(2e-3, "peak learning rate", "Training", above=0, below=10)
    run: str = flag("lightning", "name of the run (runs/NAME)", "Run")
    seed: int = flag(1, "seed of weights and data order", "Run", min=0)


class Classifier(lightning.LightningModule):
    """What a step does; when it is done is the Trainer's business."""

    def __init__(self, lr: float):
        super().__init__()
        self.model, self.lr = LeNet5(), lr

    def training_step(self, batch, _):
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train/loss", loss)
        return loss  # Lightning calls zero_grad, backward and step

    def test_step(self, batch, _):
        images, labels = batch
        logits = self.model(images)
        self.log("test/loss", F.cross_entropy(logits, labels))
        self.log("test/accuracy", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        total = int(self.trainer.estimated_stepping_batches)
        warmup = schedule.warmup_steps(1000, total)

        def share_of_peak(step: int) -> float:
            progress = schedule.progress(step, total)
            return schedule.learning_rate(1.0, step + 1, progress, warmup)

        optimizer = AdamW(self.parameters(), self.lr)
        scheduler = LambdaLR(optimizer, share_of_peak)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(config: Config) -> dict:
    """Train, test and write runs/NAME/test.json. Returns its content."""
    folder = find_folder(config.data)
    if not folder:
        print(f"data: {DRAWN_NOTE}. For MNIST {HOW_TO_GET}")
    lightning.seed_everything(config.seed, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=config.epochs,
        devices=1,
        logger=TensorBoardLogger("runs", config.run, version=""),
        enable_model_summary=False,
    )
    classifier = Classifier(config.lr)
    batches = DataLoader(Digits(folder, "train"), config.batch, shuffle=True)
    trainer.fit(classifier, batches)
    (scores,) = trainer.test(classifier, DataLoader(Digits(folder, "test"), 1000))
    result = {**scores, "data": str(folder) if folder else DRAWN_NOTE}
    path = Path("runs") / config.run / "test.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    description = "train LeNet-5 with PyTorch Lightning; the result goes to runs/NAME"
    run_script(lambda: train(parse_flags(Config, description)))
