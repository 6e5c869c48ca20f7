"""Text → token ids packed into full sequences; or random ids, as in the handout.

    data = load(config, sizes, Path("runs/.cache"), log)   # rank 0 fills the cache, all read it
    inputs, targets = data.batch("train", step)            # (B, T) each; targets: one token later

Of Web of Science (https://data.mendeley.com/datasets/9rw3vkcfy4/6) only the abstracts are read:
pre-training needs no labels.
"""

import csv
import functools
import hashlib
import io
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.errors import UserError
from labs.gpt.sizes import Sizes
from text.subwords import encode, train_tokenizer

ABSTRACT = "Abstract"  # the column of Web of Science's table
VALIDATE_EVERY = 20  # each 20th document is for validation
RANDOM_SEQUENCES = 256  # the handout's data_size
csv.field_size_limit(2**30)


@dataclass
class Data:
    """Two rows of token ids, cut into sequences; `tokenizer` is None for random ids."""

    ids: dict[str, np.ndarray]  # split → (N,), with an end token after every document
    sequence: int  # T
    batch_size: int  # B, of all processes together
    seed: int
    vocabulary: int
    key: str  # a hash: a resumed run must have the same data
    tokenizer: object = None

    def batches(self, split: str) -> int:
        """Full batches in an epoch; of validation at least one, with sequences repeated."""
        number = self.sequences(split) // self.batch_size
        return max(number, 1) if split == "validation" else number

    def sequences(self, split: str) -> int:
        """Full sequences in the text; each needs one more token, the last target."""
        return (len(self.ids[split]) - 1) // self.sequence

    def batch(self, split: str, step: int) -> tuple[Tensor, Tensor]:
        """Batch `step`, counted from 0: (B, T) inputs and targets.

        Training text comes in a new order each epoch, validation text in its own order.
        """
        epoch, number = divmod(step, self.batches(split))
        count = self.sequences(split)
        if split == "train":
            order = order_of_epoch(count, self.seed, epoch)
        else:  # np.resize repeats the sequences where a batch needs more than there are
            order = np.resize(np.arange(count), self.batches(split) * self.batch_size)
        chosen = order[number * self.batch_size : (number + 1) * self.batch_size]
        rows = [self.ids[split][row * self.sequence :][: self.sequence + 1] for row in chosen]
        rows = torch.from_numpy(np.stack(rows).astype(np.int64))  # (B, T + 1)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@functools.lru_cache(maxsize=1)
def order_of_epoch(sequences: int, seed: int, epoch: int) -> np.ndarray:
    """A random order of the sequences."""
    return np.random.default_rng((seed, epoch)).permutation(sequences)


def load(config, sizes: Sizes, cache: Path, log) -> Data:
    """The data that --data names; tokenised once, into a folder of the cache named by a hash.

    Raises `UserError` for data that cannot be read or are less than one batch.
    """
    if config.data == "random":
        log("data: random ids, not text: speed and memory are real, the loss shows no learning")
        return random_data(config, sizes)
    splits, note = read_documents(Path(config.data).expanduser())
    vocabulary = config.vocabulary or sizes.vocabulary
    digest = hashlib.sha256(f"{vocabulary}".encode())
    for documents in splits.values():
        digest.update("\0".join(documents).encode("utf-8", "surrogatepass") + b"\0\0")
    folder = cache / f"gpt-{digest.hexdigest()[:16]}"
    if not folder.is_dir():
        prepare(splits, vocabulary, folder)
    data = open_prepared(folder, config, sizes)
    counts = [
        f"{len(splits[split]):,} documents = {len(data.ids[split]):,} tokens for {split}"
        for split in splits
    ]
    log(f"data: {note}; {', '.join(counts)}; vocabulary {data.vocabulary:,}")
    return data


def prepare(splits: dict[str, list[str]], vocabulary: int, folder: Path) -> None:
    """Train the tokenizer and encode the documents; the folder appears when it is complete."""
    tokenizer = train_tokenizer(splits["train"], vocabulary)
    kind = np.uint16 if len(tokenizer) <= 2**16 else np.int32
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".gpt-"))
    try:
        for split, documents in splits.items():
            ids = []
            for document in encode(tokenizer, documents):
                ids += [*document, tokenizer.eos_token_id]
            np.save(building / f"{split}.npy", np.array(ids, dtype=kind))
        tokenizer.save_pretrained(building / "tokenizer")
        with suppress(OSError):  # another run has made the same folder in the meantime
            os.replace(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def open_prepared(folder: Path, config, sizes: Sizes) -> Data:
    """Read what `prepare` wrote. Raises `UserError` if it is less than a batch."""
    from transformers import AutoTokenizer

    ids = {}
    for split in ("train", "validation"):
        ids[split] = np.load(folder / f"{split}.npy", mmap_mode="r")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
    data = Data(
        ids,
        sizes.sequence,
        config.batch_size,
        config.seed,
        len(tokenizer),
        folder.name,
        tokenizer,
    )
    if data.sequences("validation") < 1 or data.batches("train") < 1:
        raise UserError(
            f"{config.data}: {len(ids['train']):,} tokens for training and "
            f"{len(ids['validation']):,} for validation are less than a batch of "
            f"{config.batch_size} × {sizes.sequence}; use more text, or a smaller --batch_size or "
            "--sequence"
        )
    return data


def random_data(config, sizes: Sizes) -> Data:
    """The handout's: ids drawn evenly. There is nothing to learn; it measures speed and memory."""
    draw = np.random.default_rng(config.seed)
    kind = np.uint16 if sizes.vocabulary <= 2**16 else np.int32
    ids = {}
    for split, sequences in (("train", RANDOM_SEQUENCES), ("validation", 1)):
        length = max(sequences, config.batch_size) * sizes.sequence + 1
        ids[split] = draw.integers(sizes.vocabulary, size=length, dtype=kind)
    key = f"random-{config.seed}"
    return Data(ids, sizes.sequence, config.batch_size, config.seed, sizes.vocabulary, key)


def read_documents(path: Path) -> tuple[dict[str, list[str]], str]:
    """{"train": texts, "validation": texts} of a file or folder, and a line on what was read."""
    if not path.exists():
        raise UserError(
            f"--data {path} does not exist; name a text file, a folder of them, or `random`"
        )
    files = [path]
    if path.is_dir():
        # The archive has X.txt in several folders; the largest contains the others. Beside each
        # lie files of labels.
        files = sorted(path.rglob("X.txt"), key=lambda file: file.stat().st_size)[-1:]
        files = files or sorted(file for file in path.rglob("*.txt") if file.is_file())
    if not files:
        raise UserError(f"--data {path} has no .txt file; name a folder with text in it")
    documents, kinds = [], set()
    for file in files:
        texts, kind = read_file(file)
        documents += texts
        kinds.add(kind)
    splits = {
        "train": [text for n, text in enumerate(documents) if n % VALIDATE_EVERY],
        "validation": documents[::VALIDATE_EVERY],
    }
    if not splits["train"]:
        raise UserError(f"--data {path} has fewer than two documents; use more text")
    return splits, f"{path}: {', '.join(sorted(kinds))}"


def read_file(file: Path) -> tuple[list[str], str]:
    """The documents of a file and their kind: rows of Web of Science's table, or lines."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text; convert it, or name another file") from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; name another file") from None
    lines = text.split("\n")  # not splitlines: U+2028 and the like stand within a line
    columns = lines[0].split("\t")
    if ABSTRACT in columns and len(columns) > 1:
        rows = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t")  # undoes the quotes
        texts = [row[ABSTRACT].strip() for row in rows if row[ABSTRACT]]
        return texts, "abstracts of Web of Science, labels and keywords are not read"
    if len(columns) > 2 and len(lines) > 1 and lines[1].count("\t") == len(columns) - 1:
        raise UserError(
            f"{file} is a table without the column {ABSTRACT}; it has {', '.join(columns)[:100]}"
        )
    texts = [line.strip() for line in lines if line.strip()]
    if file.name == "X.txt":
        return texts, "abstracts of Web of Science, labels are not read"
    return texts, "lines"
