"""Text → token ids packed into full sequences; or random ids, as in the handout.

    folder = prepare(config, sizes, Path("runs/.cache"), log)   # on rank 0
    data = load(config, sizes, folder, log)                     # on all ranks
    inputs, targets = data.batch("train", step)   # (B, T) each; targets: one token later

Of Web of Science (https://data.mendeley.com/datasets/9rw3vkcfy4/6) only the abstracts are read:
pre-training needs no labels.
"""

import csv
import functools
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.cache import lock_folder, make_way, new_folder
from engine.errors import UserError
from labs.gpt.sizes import Sizes
from text.subwords import encode, train_tokenizer

ABSTRACT = "Abstract"  # the column of Web of Science's table
VALIDATE_EVERY = 20  # every 20th document is for validation
RANDOM_SEQUENCES = 256  # the handout's data_size
csv.field_size_limit(2**30)


@dataclass
class Data:
    """Two rows of token ids, cut into sequences; `tokenizer` is None for random ids."""

    ids: dict[str, np.ndarray]  # split → (N,), with an end token after every document
    seq_length: int  # T
    batch_size: int  # B, of all processes together
    seed: int
    vocab_size: int
    key: str  # a hash: a resumed run must have the same data
    tokenizer: object = None

    def batches(self, split: str) -> int:
        """Full batches in an epoch; of validation at least one, with sequences repeated."""
        number = self.sequences(split) // self.batch_size
        return max(number, 1) if split == "validation" else number

    def sequences(self, split: str) -> int:
        """Full sequences in the text; each needs one more token, the last target."""
        return (len(self.ids[split]) - 1) // self.seq_length

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
        rows = [self.ids[split][row * self.seq_length :][: self.seq_length + 1] for row in chosen]
        rows = torch.from_numpy(np.stack(rows).astype(np.int64))  # (B, T + 1)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@functools.lru_cache(maxsize=1)
def order_of_epoch(sequences: int, seed: int, epoch: int) -> np.ndarray:
    """A random order of the sequences."""
    return np.random.default_rng((seed, epoch)).permutation(sequences)


def prepare(config, sizes: Sizes, cache: Path, log, tokenizer=None) -> Path | None:
    """Tokenise the text of --data into a folder of the cache, unless that was done before.

    Without a `tokenizer` one is trained on the text. Returns the folder, named by a hash; None for
    random ids. Raises `UserError` for data that cannot be read.
    """
    if config.data == "random":
        log("data: random ids, not text: speed and memory are real, the loss shows no learning")
        return None
    documents = read_documents(Path(config.data).expanduser())
    log(f"data: {config.data}: {len(documents):,} documents")
    settings = f"{sizes.vocab_size} {VALIDATE_EVERY}"
    if tokenizer:
        settings = f"{sorted(tokenizer.get_vocab().items())} {VALIDATE_EVERY}"
    digest = hashlib.sha256("\0".join([settings, *documents]).encode())
    folder = cache / f"gpt-{digest.hexdigest()[:16]}"
    with lock_folder(folder, log):
        if not is_intact(folder):
            make_way(folder, log)
            tokenise(documents, folder, sizes.vocab_size, tokenizer)
    return folder


def tokenise(documents: list[str], folder: Path, vocab_size: int, tokenizer=None) -> None:
    """Encode the documents; the folder appears when it is complete.

    Without a `tokenizer` one of `vocab_size` tokens is trained on the training text.
    """
    splits = {
        "train": [text for number, text in enumerate(documents) if number % VALIDATE_EVERY],
        "validation": documents[::VALIDATE_EVERY],
    }
    tokenizer = tokenizer or train_tokenizer(splits["train"], vocab_size)
    with new_folder(folder) as building:
        for split, texts in splits.items():
            ids = []
            for document in encode(tokenizer, texts):
                ids += [*document, tokenizer.eos_token_id]
            np.save(building / f"{split}.npy", np.array(ids, dtype=np.int32))
        tokenizer.save_pretrained(building / "tokenizer")


def is_intact(folder: Path) -> bool:
    """Whether the folder has all that `tokenise` writes."""
    try:
        read_folder(folder)
    except (OSError, EOFError, ValueError, UserError):
        return False
    return True


def read_folder(folder: Path) -> tuple[dict[str, np.ndarray], Any]:
    """What `tokenise` wrote: split → ids, and the tokenizer."""
    ids = {}
    for split in ("train", "validation"):
        ids[split] = np.load(folder / f"{split}.npy", mmap_mode="r")
    return ids, load_tokenizer(folder / "tokenizer")


def load_tokenizer(folder: Path):
    """The tokenizer in a folder. GPT-2's has an end token, but none for padding: none is needed.

    Raises `UserError` if it cannot be read or has no end token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of damaged files the library raises what it happens to meet
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder}: no tokenizer can be read from this folder ({reason})") from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"{folder}: this tokenizer has no end token (eos); choose one that has")
    return tokenizer


def load(config, sizes: Sizes, folder: Path | None, log) -> Data:
    """The data in the folder that `prepare` returned.

    Raises `UserError` if they are less than a batch.
    """
    if folder is None:
        return random_data(config, sizes)
    ids, tokenizer = read_folder(folder)
    log(
        f"data: {len(ids['train']):,} tokens for training, {len(ids['validation']):,} for "
        f"validation; vocabulary {len(tokenizer):,}"
    )
    vocab_size = len(tokenizer)
    if config.init:  # its embedding may have rows that the tokenizer does not use
        vocab_size = sizes.vocab_size
        if len(tokenizer) > vocab_size:
            raise UserError(
                f"--init {config.init}: the tokenizer has {len(tokenizer):,} tokens, the model "
                f"{vocab_size:,}; they do not belong together"
            )
    shape = (sizes.seq_length, config.batch_size, config.seed)
    data = Data(ids, *shape, vocab_size, folder.name, tokenizer)
    if data.sequences("validation") < 1 or data.batches("train") < 1:
        raise UserError(
            f"{config.data}: {len(ids['train']):,} tokens for training and "
            f"{len(ids['validation']):,} for validation are less than a batch of "
            f"{config.batch_size} × {sizes.seq_length}; use more text, or a smaller --batch_size "
            "or --seq_length"
        )
    return data


def random_data(config, sizes: Sizes) -> Data:
    """The handout's: ids drawn evenly. There is nothing to learn; it measures speed and memory."""
    draw = np.random.default_rng(config.seed)
    kind = np.uint16 if sizes.vocab_size <= 2**16 else np.int32
    ids = {}
    for split, sequences in (("train", RANDOM_SEQUENCES), ("validation", 1)):
        length = max(sequences, config.batch_size) * sizes.seq_length + 1
        ids[split] = draw.integers(sizes.vocab_size, size=length, dtype=kind)
    key = f"random-{config.seed}"
    return Data(ids, sizes.seq_length, config.batch_size, config.seed, sizes.vocab_size, key)


def read_documents(path: Path) -> list[str]:
    """The documents of a .txt file, or of all those of a folder."""
    if not path.exists():
        raise UserError(f"--data {path}: no such file or folder")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.txt") if file.is_file())
        if not files:
            raise UserError(f"--data {path}: no .txt file in this folder; name another one")
        # Web of Science has X.txt in several folders, beside files of labels. The largest one
        # contains the others.
        abstracts = [file for file in files if file.name == "X.txt"]
        if abstracts:
            files = [max(abstracts, key=lambda file: file.stat().st_size)]
    documents = []
    for file in files:
        documents += [text.strip() for text in read_file(file) if text.strip()]
    if len(documents) < 2:
        raise UserError(f"--data {path} has fewer than two documents; use more text")
    return documents


def read_file(file: Path) -> list[str]:
    """The abstracts of Web of Science's table, or the lines of any other text."""
    if file.suffix != ".txt":
        raise UserError(f"--data {file}: name a .txt file, a folder of them, or `random`")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--data {file} cannot be read ({error}); name a UTF-8 text file") from None
    lines = text.split("\n")  # not splitlines: U+2028 and the like stand within a line
    if ABSTRACT not in lines[0].split("\t"):
        return lines
    # Undoes quotes. Strict: a quote that is never closed would join all documents after it.
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t", strict=True)
    abstracts = []
    line = 2  # where the next row begins; text in quotes may have several lines
    try:
        for row in table:
            abstracts.append(row[ABSTRACT] or "")
            line = table.line_num + 1
    except csv.Error as error:
        reason = "a quote is never closed" if "unexpected end" in str(error) else error
        raise UserError(
            f"--data {file}, line {line}: {reason}; in quotes, a quote is written twice"
        ) from None
    return abstracts
