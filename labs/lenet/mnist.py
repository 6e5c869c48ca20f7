"""MNIST as a data set of our own: reads the IDX files, plain or .gz, and cuts batches on the device or by a DataLoader.

Where MNIST is not at hand, digits are drawn instead, in the fonts that matplotlib brings along.

digits = Digits(find_folder("/opt/mnist"), "train").to(device)
for images, labels in batches(digits, rows_of_epoch(len(digits), batch=100, seed=1, epoch=0), device): …
"""

import copy
import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from engine.errors import UserError
from engine.run import leave_signals_to_main

SIZE, DIGITS = 28, 10  # pixels a side, classes
FILES = {"train": "train", "test": "t10k"}  # split → how its files' names begin
DRAWN = {
    "train": (10_000, 1),
    "test": (2_000, 2),
}  # split → how many digits are drawn, and the seed
HOW_TO_GET = (
    "download the four .gz files of https://ossci-datasets.s3.amazonaws.com/mnist/ (train-images-idx3-ubyte.gz, "
    "train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz) and name their folder with --data"
)


class Digits(Dataset):
    """One split of MNIST: `digits[i]` is (image, label), the image (1, 28, 28) float from 0 (paper) to 1 (ink).

    All pixels stay in memory as the bytes they are on disk (47 MB for 60,000 images), on `device` after `to`.
    Without a folder the digits are drawn.
    """

    def __init__(self, folder: Path | None, split: str):
        if folder is None:
            self.images, self.labels = map(torch.from_numpy, draw_digits(*DRAWN[split]))
            return
        paths = [
            find_file(folder, f"{FILES[split]}-{name}")
            for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
        ]
        self.images, self.labels = (
            torch.from_numpy(read_idx(path, axes)) for path, axes in zip(paths, (3, 1))
        )
        if tuple(self.images.shape[1:]) != (SIZE, SIZE):  # images (N, 28, 28)
            raise UserError(
                f"{paths[0]}: its images are not {SIZE} × {SIZE} pixels; download it again"
            )
        if len(self.images) != len(self.labels) or not len(self.labels):
            raise UserError(
                f"{folder}: {len(self.images):,} images but {len(self.labels):,} labels of the {split} "
                "split; download both files again"
            )
        if self.labels.max() >= DIGITS:
            raise UserError(
                f"{paths[1]}: a label is {self.labels.max()}, not a digit; download it again"
            )
        self.labels = self.labels.long()  # (N,)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):
        """One image and its label; or, for a tensor of B indices, all of them at once: (B, 1, 28, 28) and (B,)."""
        return self.images[index].unsqueeze(-3) / 255, self.labels[index]

    def hold_out(self, count: int) -> tuple["Digits", "Digits"]:
        """All but the last `count` images, and those. Raises `UserError` if nothing is left to train on."""
        if not 0 < count < len(self):
            raise UserError(
                f"--held_out {count:,}: there are {len(self):,} training images; hold out fewer"
            )
        first, last = copy.copy(self), copy.copy(self)
        first.images, last.images = self.images[:-count], self.images[-count:]
        first.labels, last.labels = self.labels[:-count], self.labels[-count:]
        return first, last

    def to(self, device: torch.device) -> "Digits":
        """Move the images and labels there."""
        self.images, self.labels = self.images.to(device), self.labels.to(device)
        return self


def read_idx(path: Path, axes: int) -> np.ndarray:
    """The bytes of an IDX file with so many axes: magic number, big-endian sizes, then one byte a value."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}; download it again"
        ) from None
    header, magic = 4 + 4 * axes, bytes([0, 0, 8, axes])  # 8: unsigned bytes
    if content[:4] != magic or len(content) < header:
        raise UserError(
            f"{path} ({len(content):,} bytes) begins with {content[:4].hex(' ') or 'nothing'}; an IDX file of {axes} "
            f"axes begins with {magic.hex(' ')} and {axes} sizes; download it again"
        )
    sizes = np.frombuffer(content, ">u4", axes, offset=4).tolist()
    if len(content) - header != math.prod(sizes):
        raise UserError(
            f"{path} holds {len(content) - header:,} values instead of {' × '.join(map(str, sizes))}; "
            "download it again"
        )
    return np.frombuffer(bytearray(content), np.uint8, offset=header).reshape(
        sizes
    )  # bytearray: torch wants to write


def find_file(folder: Path, name: str) -> Path:
    """The file in `folder`, plain or .gz, also as some archives spell it (train-images.idx3-ubyte)."""
    for spelling in (name, name.replace("-idx", ".idx")):
        for path in (folder / spelling, folder / f"{spelling}.gz"):
            if path.is_file():
                return path
    raise UserError(
        f"no {name}(.gz) in {folder}; MNIST has four such files, give the folder that holds them with --data"
    )


def find_folder(data: str) -> Path | None:
    """Where the files lie: `data` itself or the MNIST/raw that torchvision makes in it; without it /opt/mnist or ./data.

    None stands for drawn digits: for "drawn", and for no `data` where both places are empty.
    """
    roots = [Path(data).expanduser()] if data else [Path("/opt/mnist"), Path("data")]
    for root in [] if data == "drawn" else roots:
        for folder in (root, root / "MNIST" / "raw", root / "raw"):
            if any(folder.glob("*-idx?-ubyte*")) or any(folder.glob("*.idx?-ubyte*")):
                return folder.resolve()
    if data in ("", "drawn"):
        return None
    raise UserError(f"no MNIST files in {data}; {HOW_TO_GET}, or give --data drawn")


def draw_digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Printed digits, each in some font, turned, slanted, stretched and moved: (N, 28, 28) bytes and (N,) labels."""
    files = sorted(Path(get_data_path(), "fonts", "ttf").glob("DejaVuS*.ttf"))
    fonts = [
        ImageFont.truetype(str(file), 22) for file in files if "Display" not in file.name
    ]  # which have no digits
    random = np.random.default_rng(seed)
    labels = random.integers(0, DIGITS, count)
    images = np.empty((count, SIZE, SIZE), np.uint8)
    for image, label in zip(images, labels):
        picture = Image.new("L", (SIZE, SIZE))
        font = fonts[random.integers(len(fonts))]
        ImageDraw.Draw(picture).text((SIZE / 2, SIZE / 2), str(label), 255, font, anchor="mm")
        matrix = np.eye(2) + random.normal(
            0, 0.2, (2, 2)
        )  # from a place in the result to one in the picture
        shift = SIZE / 2 - matrix @ (
            SIZE / 2 + random.uniform(-2, 2, 2)
        )  # the middle goes at most two pixels off
        affine = (*matrix[0], shift[0], *matrix[1], shift[1])
        image[:] = picture.transform(
            (SIZE, SIZE), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR
        )
    return images, labels


def rows_of_epoch(count: int, batch: int, seed: int, epoch: int) -> tuple[Tensor, ...]:
    """The image numbers of every step of an epoch, all different: a function of (seed, epoch), so a resumed run has the same.

    Batches differ by one image at most; there is no small last one.
    """
    # Neighbouring seeds lie a million epochs apart; the CPU's generator looks at 32 bits only.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**32)
    return torch.randperm(count, generator=generator).tensor_split(math.ceil(count / batch))


def batches(digits: Digits, rows: list[Tensor], device: torch.device, workers: int | None = None):
    """(images, labels) of each step's rows, on the device: cut out of the whole set there, or (`workers`) by a DataLoader.

    The first way is one indexing operation a batch. The DataLoader calls `digits[i]` once an image from Python, stacks
    the results and copies them to the device: the usual way, and the one for sets that do not fit into memory.
    """
    if workers is None:
        for chosen in (
            torch.cat(rows).to(device).split([len(chosen) for chosen in rows]) if rows else ()
        ):
            yield digits[chosen]
        return
    loader = DataLoader(
        digits,
        batch_sampler=[chosen.tolist() for chosen in rows],
        num_workers=workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=leave_signals_to_main,
    )
    for images, labels in loader:
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
