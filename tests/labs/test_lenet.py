"""LeNet-5 and its data set: the network, learning, exact resumption, refused mistakes."""

import gzip
import json
import re
import struct
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, forked_ranks, records
from helpers import handout_commands, refused
from matplotlib.figure import Figure
from torch import nn

from engine import checkpoint, distributed
from engine.config import parse_flags
from engine.run import Run
from engine.telemetry import Telemetry
from labs.lenet import convolution, lessons, mnist, pictures
from labs.lenet.__main__ import Config, State, log_choices, train
from labs.lenet.convolution import convolve_by_hand
from labs.lenet.evaluation import evaluate
from labs.lenet.mnist import Digits, draw_digits, find_folder, rows_of_epoch
from labs.lenet.model import LeNet5, flops_per_image

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seeded_without_mnist(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(mnist, "PLACES", ())


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    content = header + values.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder: Path, train: int, test: int, ending: str = "") -> Path:
    folder.mkdir(parents=True)
    for name, count, seed in (("train", train, 1), ("t10k", test, 2)):
        images, labels = draw_digits(count, seed)
        write_idx(folder / f"{name}-images-idx3-ubyte{ending}", images)
        write_idx(folder / f"{name}-labels-idx1-ubyte{ending}", labels.astype(np.uint8))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """1,001 images to train on (no multiple of the batch), 91 to validate, 301 to test."""
    return write_mnist(tmp_path_factory.mktemp("mnist") / "files", 1092, 301)


def lab(*flags, stop_at: int = 0) -> dict[str, list[int]]:
    """The lab in this process; at turn `stop_at` of the loop it is asked to stop. Returns the
    figures for TensorBoard, tag → steps: to draw them would take most of the time.
    """
    turns = iter(range(1, 10**9))
    drawn = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.devices.keep_freed_memory", lambda: True)
        patch.setattr(Telemetry, "figure", lambda _, tag, step, figure: drawn[tag].append(step))
        patch.setattr(Figure, "savefig", lambda _, path, dpi: path.touch())
        patch.setattr(Run, "stop_asked", lambda _: next(turns) == stop_at)
        patch.setattr(sys, "argv", ["lenet", "--device", "cpu", *map(str, flags)])
        train(parse_flags(Config))
    return drawn


def result_of(run: Path) -> dict:
    return json.loads((run / "eval" / "test.json").read_text(encoding="utf-8"))


# ---- the data set


@pytest.mark.parametrize("ending, inside", [("", "."), (".gz", "MNIST/raw")])
def test_reads_what_was_written(tmp_path, ending, inside):
    write_mnist(tmp_path / "root" / inside, 30, 20, ending)
    digits = Digits(find_folder(str(tmp_path / "root")), "test")
    images, labels = draw_digits(20, 2)
    assert len(digits) == 20
    image, label = digits[7]
    assert image.shape == (1, 28, 28) and label == labels[7]
    assert torch.equal(image[0], torch.from_numpy(images[7]) / 255)
    batch, _ = digits[torch.tensor([3, 7])]
    assert torch.equal(batch, torch.stack([digits[3][0], image]))


def test_the_last_twelfth_of_the_training_images_is_held_out(data):
    images, labels = draw_digits(1092, 1)
    train, validation = Digits(data, "train"), Digits(data, "validation")
    assert (len(train), len(validation)) == (1001, 91)
    for digits, rows in ((train, slice(0, 1001)), (validation, slice(1001, 1092))):
        assert torch.equal(digits.images, torch.from_numpy(images[rows]))
        assert torch.equal(digits.labels, torch.from_numpy(labels[rows]))


def test_every_image_once_per_epoch_in_another_order():
    keys = [(1, 0), (1, 1), (2, 0), (1, 0)]  # (seed, epoch)
    epochs = [rows_of_epoch(1003, 100, seed, epoch) for seed, epoch in keys]
    for rows in epochs:
        assert len(rows) == 11 and {len(batch) for batch in rows} == {91, 92}
        assert torch.equal(torch.cat(rows).sort().values, torch.arange(1003))
    first, next_epoch, other_seed, again = (torch.cat(rows) for rows in epochs)
    assert torch.equal(first, again)
    assert not torch.equal(first, next_epoch) and not torch.equal(first, other_seed)


def test_mnist_is_found_without_a_flag(data, tmp_path, monkeypatch):
    monkeypatch.setattr(mnist, "PLACES", (tmp_path, data))
    assert find_folder("") == data
    assert find_folder("drawn") is None


# ---- the model


def test_flops_are_those_of_the_products():
    # Multiplications: 6 maps of 28 × 28 see 25 pixels, 16 of 10 × 10 see 6 · 25; then matrices.
    first = 6 * 28**2 * 25
    others = 16 * 10**2 * 150 + 400 * 120 + 120 * 84 + 84 * 10
    # A multiplication and an addition each: forward, gradient of weights, gradient of the input.
    # The first layer needs no gradient of the image.
    assert 2 * (2 * first + 3 * others) == 2_263_920
    model = LeNet5()
    assert flops_per_image(model, CPU) == 2_263_920
    assert all(weight.grad is None for weight in model.parameters())
    norm = nn.BatchNorm2d(6)
    model.c1.append(norm)
    flops_per_image(model, CPU)
    assert norm.training and not norm.running_mean.any() and norm.num_batches_tracked == 0


def test_images_are_normalised_and_padded_with_paper():
    model = LeNet5()
    assert sum(weight.numel() for weight in model.parameters()) == 61_706
    images = torch.rand(5, 1, 28, 28)
    padded = torch.full((5, 1, 32, 32), -0.1307 / 0.3081)
    padded[:, :, 2:-2, 2:-2] = (images - 0.1307) / 0.3081
    torch.testing.assert_close(model(images), nn.Sequential(*model.children())(padded))


GELU = "labs.attention_op:gelu"


def test_our_gelu_is_torchs_in_the_network():
    ours, theirs = LeNet5(GELU), LeNet5("gelu")
    theirs.load_state_dict(ours.state_dict())
    images, results = torch.rand(5, 1, 28, 28), []
    for model in (ours, theirs):
        y = model(images)
        results.append([y, *torch.autograd.grad(y.logsumexp(1).sum(), list(model.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_a_part_that_forward_does_not_call_is_no_layer():
    model = LeNet5().eval()
    image = torch.rand(1, 28, 28)
    expected = model(image[None])
    model.loss = nn.CrossEntropyLoss()
    assert torch.equal(model(image[None]), expected)
    assert len(pictures.feature_maps(model, image).axes) == 1 + 7  # the image and the layers


def test_the_picture_of_the_filters_shows_every_weight():
    model = LeNet5()
    # Rows: maps of S2, columns: maps of C3.
    shown = pictures.filters(model).axes[1].images[0].get_array()
    for to, origin in product(range(16), range(6)):
        tile = shown[6 * origin : 6 * origin + 5, 6 * to : 6 * to + 5]
        assert torch.equal(torch.tensor(tile), model.c3[0].weight[to, origin])


def test_the_grid_shows_the_mistakes_with_the_most_certain_first():
    images = torch.arange(80, dtype=torch.uint8).view(80, 1, 1).expand(80, 28, 28)
    labels = torch.zeros(80, dtype=torch.int64)
    logits = torch.zeros(80, 10)
    logits[:, 0] = 9.0  # right
    for number, certainty in ((3, 1.0), (7, 5.0), (5, 3.0)):
        logits[number, 0], logits[number, 4] = 0.0, certainty
    axes = [each for each in pictures.mistakes(images, labels, logits).axes if each.images]
    assert [int(each.images[0].get_array()[0, 0]) for each in axes] == [7, 5, 3]
    assert all(each.get_title().startswith("0 → 4") for each in axes)
    wrong = torch.ones(80, dtype=torch.int64)
    assert len(pictures.mistakes(images, wrong, logits).axes) == 60
    assert pictures.mistakes(images[:1], labels[:1], logits[:1]).axes  # none to show


def test_a_convolution_by_hand_is_pytorchs():
    image, kernel, bias = torch.rand(9, 7), torch.rand(5, 5), torch.rand(())
    expected = F.conv2d(image[None, None], kernel[None, None], bias[None])[0, 0]
    torch.testing.assert_close(convolve_by_hand(image, kernel, bias), expected)


def table_of(text: str) -> dict[str, list[str]]:
    """First cell → the others, of all tables in a Markdown text."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in rows}


def test_the_lesson_on_relu_shows_its_symptoms(capsys):
    lessons.main(lessons.Config(lesson="relu"))
    printed = capsys.readouterr().out
    assert "difference between the two: 0\n" in printed
    found = table_of(printed)
    assert found["`F.ReLU(x)`, as in the handout"][0].startswith("AttributeError")
    assert found["`nn.Sequential(conv, F.relu)`"][0].endswith("is not a Module subclass")
    assert found["`return nn.ReLU(x)` in `forward`"] == ["no error; returns ReLU"]
    assert "got (ReLU, " in found["… and the layer that follows"][0]


def test_the_lesson_on_containers_shows_what_a_list_hides(capsys):
    lessons.main(lessons.Config(lesson="containers"))
    found = table_of(capsys.readouterr().out)
    sequential, module_list, module_dict, plain = (found[name] for name in lessons.CONTAINERS)
    assert sequential == module_list == module_dict
    assert sequential[:3] == ["12,610", "8", "6"] and plain[:3] == ["130", "2", "0"]
    assert float(sequential[3]) < 0.1 < 0.5 < float(plain[3])
    assert found["`nn.ModuleList(layers)(x)`"][0].startswith("NotImplementedError")
    only_list = found["an optimizer for a model with a list only"][0]
    assert only_list.endswith("empty parameter list")


# ---- training

FLAGS = ["--epochs", 2, "--batch_size", 25, "--log_every", 10]  # 41 steps per epoch


@pytest.fixture(scope="module")
def whole_run(data, tmp_path_factory) -> Path:
    """A folder with runs/whole: two epochs without interruption."""
    folder = tmp_path_factory.mktemp("lenet")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        drawn = lab("--data", data, *FLAGS, "--run", "whole")
    per_epoch, at_the_end = [0, 41, 82], [82]
    assert drawn == {
        **{"filters": per_epoch, "feature maps": per_epoch},
        **{"confusion": at_the_end, "mistakes": at_the_end},
    }
    return folder


def test_learns_and_writes_all_down(data, whole_run, report_of):
    run = whole_run / "runs" / "whole"
    result = result_of(run)
    assert result["accuracy"] > 0.8 and result["images"] == 301 and result["data"] == str(data)
    assert result["errors"] == round((1 - result["accuracy"]) * 301)
    counts = np.array(result["confusion"])
    assert counts.sum() - counts.trace() == result["errors"]
    assert (counts.sum(1) == np.bincount(draw_digits(301, 2)[1], minlength=10)).all()
    log = (run / "train.log").read_text(encoding="utf-8")
    assert f"{result['accuracy']:.2%}: {result['errors']} errors in 301 test images ({data})" in log
    assert list(records(run, "train/loss")) == [10, 20, 30, 40, 41, 50, 60, 70, 80, 82]
    assert list(records(run, "test/accuracy")) == [41, 82]
    assert records(run, "test/accuracy")[82] == result["accuracy"]
    assert list(records(run, "valid/accuracy")) == [41, 82]
    names = {path.stem for path in (run / "eval").glob("*.png")}
    assert names == {"filters", "feature-maps", "confusion", "mistakes"}
    model = LeNet5()
    model.load_state_dict(checkpoint.load_weights(run / "checkpoints/last"))
    held_out = evaluate(model, Digits(data, "validation"))
    assert held_out["images"] == 91
    assert records(run, "valid/loss")[82] == pytest.approx(held_out["loss"], rel=1e-5)
    page = report_of(run)
    assert "<code>Conv2d</code>" in page and f">{result['errors']}</data>" in page
    assert "LeCun et al. 1998" in page and "Radford" not in page
    assert 'FLOPs of a training image</dt><dd><data value="2263920"' in page


def test_the_log_says_what_a_choice_by_the_test_images_would_have_shown():
    lines = []
    log_choices(lines.append, State(0, validation_errors=[5, 2, 2, 3], test_errors=[9, 7, 4, 6]))
    assert lines[0].startswith("test errors: 6 after the last epoch, which is the result; 7 after")
    assert "after epoch 2, the best by the validation images; 4 after the best by" in lines[0]


def test_the_convolution_of_a_run_by_hand(whole_run, monkeypatch, capsys):
    monkeypatch.chdir(whole_run)
    convolution.main(convolution.Config(filter=3, row=10, column=12))  # of the newest run
    printed = capsys.readouterr().out
    by_hand = re.search(r"sum of the 25 products .* = (\S+)", printed)[1]
    assert f"F.conv2d at row 10, column 12: {by_hand}\n" in printed
    assert float(re.search(r"largest difference (\S+)", printed)[1]) < 1e-5
    monkeypatch.chdir(whole_run.parent)
    with refused("no finished run of labs.lenet in runs/"):
        convolution.main(convolution.Config())


def test_a_stopped_run_ends_as_the_whole_one(data, whole_run, monkeypatch):
    monkeypatch.chdir(whole_run)
    lab("--data", data, *FLAGS, "--run", "parts", stop_at=21)
    run, whole = Path("runs/parts"), Path("runs/whole")
    assert checkpoint.load_state(run / "checkpoints/last")["step"] == 20
    lab("--resume", run)
    assert "resumed after step 20" in (run / "train.log").read_text(encoding="utf-8")
    for tag in ("train/loss", "test/loss", "test/accuracy"):
        assert records(run, tag) == records(whole, tag) != {}  # bit for bit
    assert "test errors: " in (run / "train.log").read_text(encoding="utf-8")
    states = [checkpoint.load_state(folder / "checkpoints/last") for folder in (run, whole)]
    for name in ("validation_errors", "test_errors"):
        assert states[0][name] == states[1][name] and len(states[0][name]) == 2
    ours, theirs = (checkpoint.load_weights(folder / "checkpoints/last") for folder in (run, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_commands_that_meet_the_handout(tmp_path, monkeypatch):
    """Those of the page, with 60 images and one epoch."""
    monkeypatch.chdir(tmp_path)
    write_mnist(tmp_path / "DIR", 60, 20)
    programs = defaultdict(list)
    for module, flags in handout_commands(ROOT / "labs/lenet/README.md"):
        programs[module].append(flags)
    assert programs["labs.lenet.lightning"] == [["--data", "DIR"]]  # its own test runs it
    [flags] = programs["labs.lenet"]
    lab(*flags, "--epochs", 1)
    assert Path("runs/NAME/eval/test.json").exists()


def test_drawn_digits_never_pass_as_mnist(tmp_path, monkeypatch, report_of):
    """The log, the result and the report say so; the log says where MNIST is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mnist, "DRAWN", {"train": (300, 1), "test": (200, 2)})
    lab("--epochs", 1, "--run", "x")
    note = "drawn digits, not MNIST: this score says only that the program works"
    run = Path("runs/x")
    log = (run / "train.log").read_text(encoding="utf-8")
    assert f"data: {note}. For MNIST download the four .gz files of https://ossci" in log
    assert f"in 200 test images ({note})" in log
    assert result_of(run)["data"] == note and note in report_of(run)
    images, _ = draw_digits(300, 1)
    assert images.max((1, 2)).min() > 150  # no font without digits


@pytest.mark.slow
def test_two_processes_train_alike(data, tmp_path, monkeypatch):
    """41 steps: differences of rounding grow with every step."""
    monkeypatch.chdir(tmp_path)
    flags = ["--data", data, "--batch_size", 25, "--epochs", 1, "--log_every", 5]
    lab(*flags, "--run", "one")
    two = [*flags, "--device", "cpu", "--run", "two"]
    forked_ranks(2, "labs/lenet/__main__.py", *two, cwd=tmp_path)
    for tag in ("train/loss", "train/accuracy", "test/loss", "test/accuracy"):
        one, two = (records(Path("runs") / name, tag) for name in ("one", "two"))
        assert one == pytest.approx(two, rel=1e-4) and one
    assert result_of(Path("runs/two"))["images"] == 301


def test_lightning_learns_the_same_and_writes_the_same_files(
    data, tmp_path, monkeypatch, report_of
):
    pytest.importorskip("lightning")
    from labs.lenet import lightning

    monkeypatch.chdir(tmp_path)
    drawn = defaultdict(list)
    monkeypatch.setattr("engine.devices.keep_freed_memory", lambda: True)
    monkeypatch.setattr(Telemetry, "figure", lambda _, tag, step, figure: drawn[tag].append(step))
    # After 2 epochs the accuracy is 0.80 to 0.85, by the seed; after 6 it is 0.95 to 0.97.
    settings = dict(data=str(data), epochs=6, batch_size=25, device="cpu", log_every=10)
    scores = lightning.train(Config(run="x", **settings))
    assert scores["accuracy"] > 0.9
    run = Path("runs/x")
    ends = [41 * epoch for epoch in range(1, 7)]
    for tag in ("valid/accuracy", "test/accuracy", "test/loss"):
        assert list(records(run, tag)) == ends, tag
    assert list(records(run, "test/accuracy").values())[-1] == pytest.approx(scores["accuracy"])
    assert drawn["filters"] == drawn["feature maps"] == ends
    assert result_of(run) == scores
    page = report_of(run)
    assert "(c1): Sequential(" in page and f">{scores['errors']}<" in page
    environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    assert environment[0]["torch"] == torch.__version__ and environment[0]["seconds"] > 0
    with refused("--resume: Lightning's checkpoints are pickle files"):
        lightning.train(Config(resume="runs/x"))


# ---- mistakes


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    "ending, damage, words",
    [
        ("", lambda images, labels: labels.unlink(), "no train-labels-idx?-ubyte(.gz) in"),
        ("", lambda images, labels: (images.unlink(), images.mkdir()), "no train-images-idx?-ub"),
        ("", lambda images, labels: images.write_bytes(b"<!DOCTYPE"), "begins with 3c 21 44 4f"),
        ("", lambda images, labels: truncate(images, 23_535), "23,519 values instead of 30 × 28"),
        ("", lambda images, labels: write_idx(labels, np.zeros(29, np.uint8)), "but 29 labels"),
        ("", lambda images, labels: write_idx(labels, np.full(30, 10, np.uint8)), "a label is 10"),
        (".gz", lambda images, labels: truncate(images, 1000), "Compressed file ended"),
    ],
)
def test_damaged_files_are_refused(tmp_path, ending, damage, words):
    folder = write_mnist(tmp_path / "files", 30, 20, ending)
    damage(folder / f"train-images-idx3-ubyte{ending}", folder / f"train-labels-idx1-ubyte{ending}")
    with refused(words) as error:
        Digits(find_folder(str(folder)), "train")
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--data nowhere", "no MNIST files in nowhere"),
        ("--batch_size 1 --data {data}", "has 1 image(s) for 2 processes"),
        ("--resume runs/whole --activation gelu", "would change a fixed setting"),
        ("--activation tanh --data {data}", "choose relu, gelu or MODULE:FUNCTION of labs/"),
        ("--activation labs.lenet:tanh --data {data}", "has no attribute 'tanh'; give MODULE"),
        ("--activation labs.lenet.model:LeNet5 --data {data}", "is not a function; give MODULE"),
        ("--activation labs.attention_op:attention --data {data}", "fails (attention() missing 2"),
        ("--activation labs.attention_op:use_in --data {data}", "fails (use_in() missing 1"),
        ("--activation labs.lenet.model:torch.Tensor.sum --data {data}", "(1, 1) into ()"),
        ("--resume runs/whole --data drawn", "not the data that this run was started with"),
    ],
)
def test_mistakes_leave_all_as_it_was(data, whole_run, monkeypatch, flags, words):
    monkeypatch.chdir(whole_run)
    if "processes" in words:
        two = distributed.World(0, 2, CPU)
        monkeypatch.setattr(distributed, "init", lambda device: two)
        monkeypatch.setattr(distributed.World, "on_main", lambda world, work: work())
        monkeypatch.setattr(distributed.World, "maximum", lambda world, *values: list(values))
    before = sorted(whole_run.rglob("*"))
    with refused(words):
        lab(*flags.format(data=data).split())
    assert sorted(whole_run.rglob("*")) == before
