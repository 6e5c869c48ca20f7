"""LeNet-5 and its data set: the paper's sizes, every way to a batch, learning, exact resumption, refused mistakes."""

import gzip
import json
import os
import shutil
import struct
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Forked, forked_ranks, records
from helpers import refused
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from engine import checkpoint, distributed
from engine.config import as_json, atomic_write, checked, parse_flags
from engine.errors import UserError
from engine.run import Run
from engine.telemetry import shown_as
from labs.lenet import pictures
from labs.lenet.__main__ import Config, main
from labs.lenet.mnist import Digits, draw_digits, find_folder, rows_of_epoch
from labs.lenet.model import CONNECTIONS, LeNet5, PaperConvolution, PaperPooling, xavier


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def write_idx(path: Path, values: np.ndarray) -> None:
    content = (
        bytes([0, 0, 8, values.ndim])
        + struct.pack(f">{values.ndim}I", *values.shape)
        + values.tobytes()
    )
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
    """3,001 training images (no multiple of any batch) and 501 test images."""
    return write_mnist(tmp_path_factory.mktemp("mnist") / "files", 3001, 501)


class Killed(Exception):
    pass


def train(*flags, stop_at: int = 0, kill_at: int = 0) -> None:
    """The lab in this process; before step `stop_at` it is asked to stop, before `kill_at` it dies."""
    asked = iter(range(1, 10**9))

    def stop_asked(_run) -> bool:
        number = next(asked)
        if number == kill_at:
            raise Killed
        return number == stop_at

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "engine.distributed.keep_freed_memory", lambda: True
        )  # not in the process of all tests
        patch.setattr(Run, "stop_asked", stop_asked)
        patch.setattr(sys, "argv", ["lenet", "--device", "cpu", *map(str, flags)])
        main(parse_flags(Config))


# ---- the data set


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("inside", [".", "MNIST/raw"])
def test_reads_what_was_written(tmp_path, ending, inside):
    write_mnist(tmp_path / "root" / inside, 30, 20, ending)
    digits = Digits(find_folder(str(tmp_path / "root")), "test")
    images, labels = draw_digits(20, 2)
    assert len(digits) == 20
    for i in range(20):
        image, label = digits[i]
        assert image.shape == (1, 28, 28) and label == labels[i]
        assert torch.equal(image[0], torch.from_numpy(images[i]) / 255)


def test_the_last_images_are_held_out(data):
    digits = Digits(data, "train")
    first, last = digits.hold_out(1000)
    assert len(first) == 2001 and len(last) == 1000 and len(digits) == 3001
    assert torch.equal(torch.cat([first.images, last.images]), digits.images)
    assert torch.equal(torch.cat([first.labels, last.labels]), digits.labels)


def test_every_image_once_an_epoch_and_anew_each_time():
    epochs = [
        rows_of_epoch(1003, 100, seed, epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0), (1, 0))
    ]
    for rows in epochs:
        assert len(rows) == 11 and {len(batch) for batch in rows} == {91, 92}
        assert torch.equal(torch.cat(rows).sort().values, torch.arange(1003))
    first, next_epoch, other_seed, again = (torch.cat(rows) for rows in epochs)
    assert (
        torch.equal(first, again)
        and not torch.equal(first, next_epoch)
        and not torch.equal(first, other_seed)
    )


def test_without_mnist_digits_are_drawn(tmp_path, monkeypatch):
    """And tested on those held out, and the result says so."""
    monkeypatch.chdir(tmp_path)
    assert find_folder("") is None or Path("/opt/mnist").exists()
    monkeypatch.setattr("labs.lenet.mnist.DRAWN", {"train": (300, 1), "test": (200, 2)})
    train(
        "--data",
        "drawn",
        "--epochs",
        1,
        "--held_out",
        120,
        "--activation",
        "own-gelu",
        "--run",
        "x",
    )
    train("--resume", "runs/x")  # the same digits again
    log = Path("runs/x/train.log").read_text(encoding="utf-8")
    assert "https://ossci-datasets" in log and "errors in 120 drawn training images held out" in log
    assert "environment: " in log and "180 training and 120 " in log
    images, labels = draw_digits(300, 1)
    assert (
        set(labels) == set(range(10)) and images.max((1, 2)).min() > 150
    )  # no font without digits
    result = json.loads(Path("runs/x/eval/test.json").read_text(encoding="utf-8"))
    assert result["images"] == result["held_out"] == 120
    assert (
        np.sum(result["confusion"], 1).tolist() == np.bincount(labels[-120:], minlength=10).tolist()
    )


# ---- the model


def test_the_paper_s_sizes():
    """Every number of section II-B."""
    model = LeNet5("paper")
    counts = {
        name: sum(p.numel() for p in layer.parameters()) for name, layer in model.named_children()
    }
    assert counts.pop("output") == 850
    assert (
        counts == dict(c1=156, s2=12, c3=1516, s4=32, c5=48120, f6=10164)
        and sum(counts.values()) == 60_000
    )
    shapes = {
        name: tuple(output.shape[1:])
        for name, output in model.layers(torch.rand(2, 1, 28, 28)).items()
    }
    papers = dict(
        c1=(6, 28, 28),
        s2=(6, 14, 14),
        c3=(16, 10, 10),
        s4=(16, 5, 5),
        c5=(120,),
        f6=(84,),
        output=(10,),
    )
    assert shapes == papers


def test_c3_sees_the_connected_maps_only():
    layer, x = PaperConvolution(), torch.rand(2, 6, 14, 14)
    nn.init.normal_(layer.weight)
    kernels = iter(layer.weight)
    for to, origins in enumerate(CONNECTIONS):
        own = (
            sum(F.conv2d(x[:, [origin]], next(kernels)[None, None]) for origin in origins)[:, 0]
            + layer.bias[to]
        )
        torch.testing.assert_close(layer(x)[:, to], own)
    # The paper's words: six maps see three neighbours, six see four, three see four in pairs, one sees all; every map of S2
    # is seen by ten.
    assert sorted(map(len, CONNECTIONS)) == [3] * 6 + [4] * 9 + [6]
    assert len({tuple(sorted(origins)) for origins in CONNECTIONS}) == 16
    assert [sum(origin in origins for origins in CONNECTIONS) for origin in range(6)] == [10] * 6


def test_paper_pooling_is_a_weighted_sum():
    layer, x = PaperPooling(3), torch.rand(2, 3, 4, 6)
    layer.weight.data, layer.bias.data = torch.randn(3, 1, 1), torch.randn(3, 1, 1)
    for b, c, i, j in ((0, 0, 0, 0), (1, 2, 1, 2), (0, 1, 1, 0)):
        total = (
            x[b, c, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].sum() * layer.weight[c, 0, 0]
            + layer.bias[c, 0, 0]
        )
        torch.testing.assert_close(layer(x)[b, c, i, j], 1.7159 * torch.tanh(total * 2 / 3))


@pytest.mark.parametrize(
    "variant, name, activation, pool",
    [
        ("relu", "relu", nn.ReLU, nn.MaxPool2d),
        ("sigmoid", "relu", nn.Sigmoid, nn.AvgPool2d),
        ("relu", "gelu", nn.GELU, nn.MaxPool2d),
        ("relu", "own-gelu", nn.GELU, nn.MaxPool2d),
        pytest.param("relu", "own-gelu-cpp", nn.GELU, nn.MaxPool2d, marks=pytest.mark.slow),
    ],
)
def test_equals_the_same_layers_in_a_row(variant, name, activation, pool):
    """torch's own layers, with padding by paper (which normalising makes −0.42) done by hand."""
    torch.manual_seed(3)
    layers = [
        nn.Conv2d(1, 6, 5),
        activation(),
        pool(2),
        nn.Conv2d(6, 16, 5),
        activation(),
        pool(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        activation(),
        nn.Linear(120, 84),
        activation(),
        nn.Linear(84, 10),
    ]
    plain = nn.Sequential(*layers)
    if variant == "sigmoid":
        plain.apply(xavier)
    torch.manual_seed(3)
    model = LeNet5(variant, name)
    images = torch.rand(5, 1, 28, 28)
    padded = torch.full((5, 1, 32, 32), -0.1307 / 0.3081)
    padded[:, :, 2:-2, 2:-2] = (images - 0.1307) / 0.3081
    results = []
    for network, x in ((model, images), (plain, padded)):
        y = network(x)
        results.append([y, *torch.autograd.grad(y.logsumexp(1).sum(), list(network.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_the_paper_s_weights_begin_near_chance():
    images, labels = map(torch.from_numpy, draw_digits(200, 1))
    loss = F.cross_entropy(LeNet5("paper")(images[:, None] / 255), labels.long())
    # Logits of ± 0.06; weights ten times as large give 0.1, a network that saturates.
    assert abs(loss - np.log(10)) < 0.05


# ---- pictures


def test_filters_show_every_weight():
    model = LeNet5("paper")
    shown = (
        pictures.filters(model).axes[1].images[0].get_array()
    )  # rows: maps of S2, columns: maps of C3
    for to, origin in product(range(16), range(6)):
        tile = shown[6 * origin : 6 * origin + 5, 6 * to : 6 * to + 5]
        assert torch.equal(torch.tensor(tile), model.c3[0].full_weight()[to, origin])


@pytest.mark.parametrize("count", [0, 1, 60])
def test_any_number_of_mistakes_is_drawn(count):
    wrong = [dict(image=i, digit=i % 10, answer=1, probability=0.9) for i in range(count)]
    axes = pictures.mistakes(torch.zeros(100, 28, 28, dtype=torch.uint8), wrong).axes[0]
    assert len(axes.texts) == min(count, 40) and f"{count} mistakes" in axes.get_title(loc="left")


# ---- training

FLAGS = ["--epochs", 2, "--batch", 25, "--log_every", 40]


@pytest.fixture(scope="module")
def whole_run(data, tmp_path_factory) -> Path:
    """A folder with runs/whole: two epochs without interruption."""
    folder = tmp_path_factory.mktemp("lenet")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train("--data", data, *FLAGS, "--run", "whole")
    return folder


def test_learns_drawn_digits_and_writes_all_down(whole_run, report_of):
    run = whole_run / "runs" / "whole"
    result = json.loads((run / "eval" / "test.json").read_text(encoding="utf-8"))
    assert result["accuracy"] > 0.95 and result["images"] == 501
    assert result["errors"] == len(result["mistakes"]) == round((1 - result["accuracy"]) * 501)
    counts = np.array(result["confusion"])
    assert counts.sum() == 501 and counts.sum() - counts.trace() == result["errors"]
    assert (counts.sum(1) == np.bincount(draw_digits(501, 2)[1], minlength=10)).all()
    log = (run / "train.log").read_text(encoding="utf-8")
    assert (
        f"test accuracy {result['accuracy']:.2%}: {result['errors']} errors in 501 test images"
        in log
    )
    assert "(c1): Sequential(" in log  # the network's layers
    assert json.loads((run / "config.json").read_text())["lr"] == 0.002
    assert list(records(run, "train/loss")) == [40, 80, 120, 121, 160, 200, 240, 242]
    assert list(records(run, "test/accuracy")) == [121, 242]
    assert records(run, "test/accuracy")[242] == result["accuracy"]
    events = EventAccumulator(str(run), size_guidance={"images": 0}).Reload()
    tags = {shown_as(tag) for tag in ("train/loss", "train/accuracy", "test/loss", "test/accuracy")}
    assert tags <= set(events.Tags()["scalars"])
    steps = {tag: [event.step for event in events.Images(tag)] for tag in events.Tags()["images"]}
    assert steps == {
        "filters": [0, 121, 242],
        "feature maps": [0, 121, 242],
        "confusion": [242],
        "mistakes": [242],
    }
    assert {path.name for path in (run / "eval").glob("*.png")} == {
        "filters.png",
        "feature-maps.png",
        "confusion.png",
        "mistakes.png",
    }
    page = report_of(run)
    assert "(c1): Sequential(" in page and f">{result['errors']}</data>" in page
    # Multiplications: 6 maps of 28 × 28 see 25 pixels, 16 of 10 × 10 see 6 · 25; then three matrices.
    products = 6 * 28**2 * 25 + 16 * 10**2 * 150 + 400 * 120 + 120 * 84 + 84 * 10
    assert f'FLOPs of a training image</th><td><data value="{6 * products}"' in page


def test_more_epochs_go_on_from_the_rate_that_a_run_had(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train("--data", data, *FLAGS, "--epochs", 1, "--run", "short")
    train("--resume", "runs/short", "--epochs", 2, "--log_every", 1)
    rates = records(Path("runs/short"), "train/learning_rate")
    assert rates[121] < rates[122] < 0.2 * max(rates.values()) and rates[242] < 0.1 * max(
        rates.values()
    )


def test_a_stopped_and_a_killed_run_ends_as_the_whole_one(data, whole_run, monkeypatch):
    monkeypatch.chdir(whole_run)
    train("--data", data, *FLAGS, "--run", "parts", stop_at=51)
    run = Path("runs/parts")
    assert checkpoint.load_state(run / "checkpoints/last")["step"] == 50
    with pytest.raises(Killed):
        train(
            "--resume", run, kill_at=111
        )  # at step 160: what it did since the end of the epoch, step 121, is lost
    train("--resume", run, "--dataloader", "true")
    log = (run / "train.log").read_text(encoding="utf-8")
    assert (
        "--resume runs/parts" in log
        and "resumed after step 50" in log
        and "resumed after step 121" in log
    )
    for tag in (
        "train/loss",
        "train/accuracy",
        "train/gradient_norm",
        "test/loss",
        "test/accuracy",
    ):
        assert records(run, tag) == records(Path("runs/whole"), tag) != {}  # bit for bit
    ours, theirs = (
        checkpoint.load_weights(folder / "checkpoints/last") for folder in (run, Path("runs/whole"))
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_command_stops_at_sigterm(data, tmp_path):
    flags = ["--data", data, "--epochs", 10_000, "--log_every", 1, "--run", "x"]
    lab = Forked("labs/lenet/__main__.py", *flags, cwd=tmp_path)
    lab.wait_for("\nstep")
    lab.process.terminate()
    assert lab.wait() == 0 and "--resume runs/x" in lab.output


@pytest.mark.slow
def test_two_processes_train_alike(data, tmp_path, monkeypatch):
    """20 steps: differences of rounding grow with every step."""
    monkeypatch.chdir(tmp_path)
    flags = ["--data", data, "--held_out", 2501, "--batch", 25, "--epochs", 1, "--log_every", 5]
    train(*flags, "--run", "one")
    forked_ranks(
        2, "labs/lenet/__main__.py", *flags, "--device", "cpu", "--run", "two", cwd=tmp_path
    )
    for tag in (
        "train/loss",
        "train/accuracy",
        "train/gradient_norm",
        "test/loss",
        "test/accuracy",
    ):
        one, two = (records(Path("runs") / name, tag) for name in ("one", "two"))
        assert one == pytest.approx(two, rel=1e-4) and one
    assert json.loads(Path("runs/two/eval/test.json").read_text())["images"] == 2501


def test_a_resumed_run_keeps_its_device_and_threads(tmp_path, monkeypatch):
    seen = []
    alone = distributed.World(0, 1, torch.device("cpu"))
    monkeypatch.setattr(distributed, "start", lambda device: seen.append(device) or alone)
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    atomic_write(
        tmp_path / "config.json",
        as_json(asdict(Config(data="nowhere", device="cuda:1", threads=3))),
    )
    monkeypatch.setattr(sys, "argv", ["lenet", "--resume", str(tmp_path)])
    with refused("no MNIST files in nowhere; download the four .gz files of https://"):
        main(parse_flags(Config))
    assert seen == ["cuda:1", 3]


def test_an_operator_that_cannot_run_here_leaves_no_folder(data, tmp_path, monkeypatch):
    def refuse(x, **settings):
        raise UserError("gelu: backend='cpp' is for the CPU")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("labs.attention_op.gelu", refuse, raising=False)
    with refused("is for the CPU"):
        train("--data", data, "--activation", "own-gelu-cpp")
    assert not list(Path("runs").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["relu", "sigmoid", "paper"])
def test_compiled_equals_plain(data, tmp_path, monkeypatch, variant):
    monkeypatch.chdir(tmp_path)
    for name in ("false", "true"):
        train(
            "--data",
            data,
            "--variant",
            variant,
            "--epochs",
            1,
            "--log_every",
            10,
            "--compile",
            name,
            "--run",
            name,
        )
    plain, compiled = (records(Path("runs") / name, "train/loss") for name in ("false", "true"))
    assert plain.keys() == compiled.keys() and abs(plain[10] - compiled[10]) < 1e-4
    assert abs(plain[31] - compiled[31]) < 0.02 * plain[31] + 1e-3


@pytest.mark.slow
def test_real_digits(tmp_path, monkeypatch):
    """One epoch is enough for 97.5 %."""
    if not os.environ.get("MNIST"):
        pytest.skip("MNIST names no folder")
    monkeypatch.chdir(tmp_path)
    train("--data", os.environ["MNIST"], "--epochs", 1, "--run", "real")
    assert json.loads(Path("runs/real/eval/test.json").read_text())["accuracy"] > 0.975


# ---- mistakes


@pytest.mark.parametrize(
    "ending, damage, words",
    [
        ("", lambda images, labels: labels.unlink(), "no train-labels-idx1-ubyte(.gz) in"),
        (
            "",
            lambda images, labels: shutil.copy(labels, images),
            "begins with 00 00 08 01; an IDX file of 3 axes",
        ),
        (
            "",
            lambda images, labels: images.write_bytes(b"<!DOCTYPE html>"),
            "begins with 3c 21 44 4f",
        ),
        ("", lambda images, labels: images.write_bytes(b""), "begins with nothing"),
        (
            "",
            lambda images, labels: images.write_bytes(images.read_bytes()[:-1]),
            "23,519 values instead of 30 × 28",
        ),
        (
            "",
            lambda images, labels: images.write_bytes(images.read_bytes() + b"0"),
            "23,521 values instead of 30 × 28 × 28",
        ),
        (
            "",
            lambda images, labels: write_idx(labels, np.zeros(29, np.uint8)),
            "30 images but 29 labels of the train split",
        ),
        ("", lambda images, labels: write_idx(labels, np.full(30, 10, np.uint8)), "a label is 10"),
        (
            "",
            lambda images, labels: write_idx(images, np.zeros((30, 32, 32), np.uint8)),
            "not 28 × 28",
        ),
        (
            ".gz",
            lambda images, labels: images.write_bytes(images.read_bytes()[:1000]),
            "Compressed file ended",
        ),
        (".gz", lambda images, labels: images.write_bytes(b"not compressed"), "Not a gzipped file"),
        (
            ".gz",
            lambda images, labels: images.write_bytes(images.read_bytes()[:500] + bytes(1000)),
            "cannot read",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, ending, damage, words):
    folder = write_mnist(tmp_path / "files", 30, 20, ending)
    damage(folder / f"train-images-idx3-ubyte{ending}", folder / f"train-labels-idx1-ubyte{ending}")
    with refused(words) as error:
        Digits(find_folder(str(folder)), "train")
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(variant="lenet"), "--variant lenet is unknown"),
        (dict(epochs=0), "--epochs 0"),
        (dict(variant="paper", activation="gelu"), "belongs to --variant relu"),
        (dict(workers=1), "belongs to --dataloader"),
    ],
)
def test_bad_flags_are_refused(settings, words):
    with refused(words):
        checked(Config(**settings))


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--data nowhere", "no MNIST files in nowhere"),
        ("--batch 1 --data {data}", "no image for some of 2 processes"),
        (
            "--resume runs/whole --variant paper",
            "with another --variant ('paper', the run has 'relu')",
        ),
        ("--resume runs/whole --data {other}", "are others than the run began with"),
        ("--resume runs/none", "no such run"),
        ("--resume runs/whole --data {relabelled}", "are others than the run began with"),
        ("--held_out 3001 --data {data}", "--held_out 3,001: there are 3,001 training images"),
    ],
)
def test_mistakes_leave_all_as_it_was(data, tmp_path, whole_run, monkeypatch, flags, words):
    other = write_mnist(tmp_path / "other", 10, 10)
    relabelled = Path(
        shutil.copytree(data, tmp_path / "relabelled")
    )  # one label of a test image is changed
    labels = (draw_digits(501, 2)[1] + (np.arange(501) == 7)) % 10
    write_idx(relabelled / "t10k-labels-idx1-ubyte", labels.astype(np.uint8))
    monkeypatch.chdir(whole_run)
    if "processes" in words:
        two = distributed.World(0, 2, torch.device("cpu"))
        monkeypatch.setattr(distributed, "start", lambda device: two)
        monkeypatch.setattr(distributed.World, "on_main", lambda world, work: work())
        monkeypatch.setattr(distributed.World, "maximum", lambda world, *values: list(values))

    def files() -> dict[Path, bytes]:  # the log has a line on every attempt to go on
        return {
            path: path.read_bytes()
            for path in whole_run.rglob("*")
            if path.is_file() and path.name != "train.log"
        }

    before = files()
    with refused(words):
        train(*flags.format(data=data, other=other, relabelled=relabelled).split())
    assert files() == before
