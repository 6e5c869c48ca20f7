"""MNIST as a `Dataset` of our own: reads the IDX files, plain or .gz.

Where MNIST is not at hand, digits are drawn instead, in the fonts that matplotlib brings along.
"""

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from engine.distributed import World
from engine.errors import UserError
from engine.seeds import epoch_generator

SIZE = 28  # pixels per side
DIGITS = 10  # classes
# Where MNIST is looked for without --data: /opt, beside the repository, where torchvision puts it.
PLACES = (Path("/opt/mnist"), Path(__file__).parents[3] / "mnist", Path("data"))
FILES = {"train": "train", "test": "t10k"}  # split → how its files' names begin
DRAWN = {"train": (10_000, 1), "test": (2_000, 2)}  # split → how many digits, seed
VALIDATION_SHARE = 12  # one in so many training images is held out
DRAWN_NOTE = "drawn digits, not MNIST: this score says only that the program works"
HOW_TO_GET = (
    "download the four .gz files of https://ossci-datasets.s3.amazonaws.com/mnist/ "
    "(train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, "
    "t10k-labels-idx1-ubyte.gz) and name their folder with --data"
)


class Digits(Dataset):
    """One split of MNIST, in memory as bytes (47 MB for 60,000 images), on `device` after `to`.

    `digits[i]` is (image, label), the image (1, 28, 28) float from 0 (paper) to 1 (ink). Without a
    folder the digits are drawn. MNIST has no validation images: they are the last twelfth of its
    training images, 5,000 of 60,000, which the split "train" does not have.
    """

    def __init__(self, folder: Path | None, split: str):
        files = "test" if split == "test" else "train"
        if folder is None:
            images, labels = draw_digits(*DRAWN[files])
        else:
            images, labels = read_split(folder, files)
        train_count = len(labels) - max(1, len(labels) // VALIDATION_SHARE)
        if split == "train":
            images, labels = images[:train_count], labels[:train_count]
        if split == "validation":
            images, labels = images[train_count:], labels[train_count:]
        self.images = torch.from_numpy(images)  # (N, 28, 28) bytes
        self.labels = torch.from_numpy(labels).long()  # (N,)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):
        """One image and its label; for a tensor of B indices (B, 1, 28, 28) and (B,)."""
        return self.images[index].unsqueeze(-3) / 255, self.labels[index]

    def checksum(self) -> int:
        """A checksum of the labels: it differs for other digits or another order.

        To be called before `to`, while the labels are on the CPU.
        """
        return zlib.crc32(self.labels.numpy().tobytes())

    def to(self, device: torch.device) -> None:
        """Move the images and labels to this device."""
        self.images, self.labels = self.images.to(device), self.labels.to(device)


def training_batches(
    digits: Digits, config, world: World, first_step: int
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Without end, from `first_step` on: this process's images (B, 1, 28, 28), its labels (B,), and
    the size of the batch of all processes together.
    """
    epoch, steps_done = divmod(first_step, math.ceil(len(digits) / config.batch_size))
    while True:
        batches = rows_of_epoch(len(digits), config.batch_size, config.seed, epoch)[steps_done:]
        of_this_process = [rows[world.rank :: world.size] for rows in batches]
        # batch_size=None: what the sampler gives is already a batch of rows, so that the data set
        # cuts it out with one indexing operation instead of one call per image.
        loader = DataLoader(digits, sampler=of_this_process, batch_size=None)
        for (images, labels), rows in zip(loader, batches):
            yield images, labels, len(rows)
        epoch, steps_done = epoch + 1, 0


def rows_of_epoch(count: int, batch_size: int, seed: int, epoch: int) -> tuple[Tensor, ...]:
    """The image numbers of every step of an epoch: a function of (seed, epoch), so that a resumed
    run repeats them. Batches differ by one image at most; there is no small last one.
    """
    order = torch.randperm(count, generator=epoch_generator(seed, epoch))
    return order.tensor_split(math.ceil(count / batch_size))


def find_folder(data: str) -> Path | None:
    """The folder with MNIST's files: `data`, or torchvision's MNIST/raw in it; else one of PLACES.

    None stands for drawn digits: for "drawn", and without `data` where all PLACES are empty.
    """
    if data == "drawn":
        return None
    for root in [Path(data).expanduser()] if data else PLACES:
        for folder in (root, root / "MNIST" / "raw", root / "raw"):
            if any(folder.glob("t*-images[-.]idx3-ubyte*")):
                return folder.resolve()
    if data:
        raise UserError(f"no MNIST files in {data}; {HOW_TO_GET}, or give --data drawn")
    return None


def read_split(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """(N, 28, 28) images and (N,) labels, as bytes. Raises `UserError` for damaged files."""
    images_file = find_file(folder, f"{FILES[split]}-images")
    labels_file = find_file(folder, f"{FILES[split]}-labels")
    images, labels = read_idx(images_file, 3), read_idx(labels_file, 1)
    if images.shape[1:] != (SIZE, SIZE):
        raise UserError(f"{images_file}: images are not {SIZE} × {SIZE} pixels; download it again")
    if len(images) != len(labels) or not len(labels):
        raise UserError(
            f"{folder}: {len(images):,} images but {len(labels):,} labels of the {split} split; "
            "download both files again"
        )
    if labels.max() >= DIGITS:
        raise UserError(f"{labels_file}: a label is {labels.max()}, not a digit; download it again")
    return images, labels


def find_file(folder: Path, name: str) -> Path:
    """The file that begins with `name`, plain before .gz: archives spell the rest in two ways."""
    # Some archives unpack to folders of these names.
    files = sorted(path for path in folder.glob(f"{name}[-.]idx?-ubyte*") if path.is_file())
    if not files:
        raise UserError(
            f"no {name}-idx?-ubyte(.gz) in {folder}; MNIST has four such files: name their folder "
            "with --data"
        )
    return files[0]


def read_idx(path: Path, axes: int) -> np.ndarray:
    """The bytes of an IDX file: magic number, a big-endian size per axis, then a byte per value."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}; download it again") from None
    header = 4 + 4 * axes
    magic = bytes([0, 0, 8, axes])  # 8: unsigned bytes
    if content[:4] != magic:
        raise UserError(
            f"{path} ({len(content):,} bytes) begins with {content[:4].hex(' ') or 'nothing'}; an "
            f"IDX file of {axes} axes begins with {magic.hex(' ')}; download it again"
        )
    if len(content) < header:
        raise UserError(
            f"{path} ends after {len(content)} of the {header} bytes of its header; "
            "download it again"
        )
    sizes = np.frombuffer(content, ">u4", axes, offset=4).tolist()
    if len(content) - header != math.prod(sizes):
        raise UserError(
            f"{path} holds {len(content) - header:,} values instead of "
            f"{' × '.join(map(str, sizes))}; download it again"
        )
    # A bytearray, because torch wants memory that can be written to.
    return np.frombuffer(bytearray(content), np.uint8, offset=header).reshape(sizes)


def draw_digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Printed digits, each in some font, turned (σ = 15°) and moved (up to 2 pixels).

    Returns (N, 28, 28) bytes and (N,) labels.
    """
    files = sorted(Path(get_data_path(), "fonts", "ttf").glob("DejaVuS*.ttf"))
    # The Display fonts have no digits.
    fonts = [ImageFont.truetype(str(file), 22) for file in files if "Display" not in file.name]
    random = np.random.default_rng(seed)
    labels = random.integers(0, DIGITS, count)
    images = np.empty((count, SIZE, SIZE), np.uint8)
    middle = SIZE / 2
    for number, label in enumerate(labels):
        picture = Image.new("L", (SIZE, SIZE))
        font = fonts[random.integers(len(fonts))]
        ImageDraw.Draw(picture).text((middle, middle), str(label), 255, font, anchor="mm")
        shift = tuple(random.uniform(-2, 2, 2))
        images[number] = picture.rotate(
            random.normal(0, 15), Image.Resampling.BILINEAR, translate=shift
        )
    return images, labels
