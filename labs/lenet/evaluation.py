"""What a trained LeNet-5 is worth: its scores on unseen images, and the pictures of a run."""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.files import as_json, atomic_write
from engine.run import Run
from labs.lenet import pictures
from labs.lenet.mnist import DIGITS, Digits
from labs.lenet.model import LeNet5


@torch.inference_mode()
def logits_of(model: LeNet5, digits: Digits) -> Tensor:
    """The logits of all images, (N, 10). The model is in evaluation mode afterwards."""
    model.eval()
    logits = []
    for rows in torch.arange(len(digits)).split(1000):
        images, _ = digits[rows]
        logits.append(model(images))
    return torch.cat(logits)


def evaluate(model: LeNet5, digits: Digits) -> dict:
    """Loss in nats, accuracy and confusion matrix.

    confusion: 10 × 10 counts, rows the true digit, columns the answer.
    """
    logits, labels = logits_of(model, digits), digits.labels  # (N, 10), (N,)
    answers = logits.argmax(1)
    errors = (answers != labels).sum().item()
    # A pair (digit, answer) is one number below 100, so that one call counts all pairs.
    pairs = labels * DIGITS + answers
    confusion = pairs.bincount(minlength=DIGITS**2).view(DIGITS, DIGITS)
    return {
        "accuracy": 1 - errors / len(labels),
        "errors": errors,
        "images": len(labels),
        "loss": F.cross_entropy(logits, labels).item(),
        "confusion": confusion.tolist(),
    }


def draw_layers(run: Run, step: int, model: LeNet5, tests: Digits) -> None:
    """To TensorBoard: the filters, and what each layer makes of the first test image."""
    if run.world.is_main:
        image, _ = tests[0]
        run.telemetry.figure("filters", step, pictures.filters(model))
        run.telemetry.figure("feature maps", step, pictures.feature_maps(model, image))


def write_result(run: Run, step: int, model: LeNet5, tests: Digits, result: dict) -> None:
    """eval/test.json, the pictures beside it, two of them in TensorBoard, a log line."""
    folder = run.folder / "eval"
    folder.mkdir(exist_ok=True)
    atomic_write(folder / "test.json", as_json(result))
    image, _ = tests[0]
    figures = {
        "filters": pictures.filters(model),
        "feature-maps": pictures.feature_maps(model, image),
        "confusion": pictures.confusion(torch.tensor(result["confusion"])),
        "mistakes": pictures.mistakes(tests.images, tests.labels, logits_of(model, tests)),
    }
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=100)
    for name in ("confusion", "mistakes"):
        run.telemetry.figure(name, step, figures[name])
    run.telemetry.hyperparameters(run.config, {"result/accuracy": result["accuracy"]})
    run.log(
        f"test accuracy {result['accuracy']:.2%}: {result['errors']:,} errors in "
        f"{result['images']:,} test images ({result['data']}); pictures: {folder}"
    )
