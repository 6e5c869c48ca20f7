"""Text → token ids packed into sequences; or random ids, as in the handout.

    data = load(config, sizes, Path("runs/.cache"), log)       # by rank 0: made once, then read from the cache
    tokens, targets = data.batch("train", step)                # (B, T) each; targets are the tokens one place later

Of Web of Science (https://data.mendeley.com/datasets/9rw3vkcfy4/6) only the abstracts are read: pre-training needs no labels.
"""

import csv
import functools
import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data import flatten
from engine.cache import lock_folder, new_folder
from engine.errors import UserError
from labs.gpt.sizes import Sizes
from text.plain import NO_TEXT, TITLE, read_lines, split_of
from text.subwords import encode, open_tokenizer, tokenizer_key, train_tokenizer

SUFFIXES = (".txt", ".tokens", ".raw", ".md", ".tsv", ".parquet")
ABSTRACT = "Abstract"  # the column of Web of Science's table
VALIDATE_EVERY = 20  # of the documents, each 20th is for validation
csv.field_size_limit(2**30)


@dataclass
class Data:
    """Two rows of token ids, cut into sequences; `tokenizer` is None for random ids."""

    ids: dict[str, np.ndarray]  # split → (N,), every document with an end token behind it
    sequence: int  # T
    batch_size: int  # B, of all processes together
    seed: int
    vocabulary: int
    key: str  # a hash: a run goes on with just these
    tokenizer: object = None

    def batches(self, split: str) -> int:
        """Whole batches in an epoch. The validation text may be short of one: then its sequences come again."""
        number = self.sequences(split) // self.batch_size
        return max(number, 1) if split == "validation" else number

    def sequences(self, split: str) -> int:
        """Whole sequences in the text; each needs one token more, the last target."""
        return (len(self.ids[split]) - 1) // self.sequence

    def batch(self, split: str, step: int) -> tuple[Tensor, Tensor]:
        """Batch `step` (from 0): training text in a new order each epoch, validation text as it stands."""
        epoch, number = divmod(step, self.batches(split))
        if split == "train":
            order = order_of_epoch(self.sequences(split), self.seed, epoch)
        else:
            # It begins at the front again where a batch needs more sequences than there are.
            order = np.resize(
                np.arange(self.sequences(split)), self.batches(split) * self.batch_size
            )
        chosen = order[number * self.batch_size : (number + 1) * self.batch_size]
        # One token more than T, so that each token has a next one.
        rows = [self.ids[split][row * self.sequence :][: self.sequence + 1] for row in chosen]
        rows = torch.from_numpy(np.stack(rows).astype(np.int64))  # (B, T + 1)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@functools.lru_cache(maxsize=1)
def order_of_epoch(sequences: int, seed: int, epoch: int) -> np.ndarray:
    """All sequences once, shuffled."""
    return np.random.default_rng((seed, epoch)).permutation(sequences)


def load(config, sizes: Sizes, cache: Path, log) -> Data:
    """The data that the settings name. Tokenising is done once; the result lies in `cache`, which is named by its content."""
    if config.data == "random":
        return random_data(config, sizes)
    splits, note = read_documents(Path(config.data).expanduser())
    recipe = json.dumps([tokenizer_key(config.tokenizer), config.vocabulary or sizes.vocabulary])
    digest = hashlib.sha256(recipe.encode())
    for documents in splits.values():
        digest.update("\0".join(documents).encode("utf-8", "surrogatepass") + b"\0\0")
    folder = cache / f"gpt-{digest.hexdigest()[:16]}"
    if not (folder / "tokenizer").is_dir():
        prepare(config, splits, config.vocabulary or sizes.vocabulary, folder)
    data = open_prepared(folder, config, sizes)
    counts = ", ".join(
        f"{len(splits[s]):,} documents = {len(data.ids[s]):,} tokens for {s}" for s in splits
    )
    log(f"data: {note}; {counts}; vocabulary {data.vocabulary:,}")
    return data


def open_prepared(folder: Path, config, sizes: Sizes) -> Data:
    """What `prepare` left in the folder. Raises `UserError` if it is less than a batch."""
    from transformers import AutoTokenizer

    ids = {
        split: np.load(folder / f"{split}.npy", mmap_mode="r") for split in ("train", "validation")
    }
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
    data = Data(
        ids, sizes.sequence, config.batch_size, config.seed, len(tokenizer), folder.name, tokenizer
    )
    if data.sequences("validation") < 1 or data.batches("train") < 1:
        raise UserError(
            f"{config.data}: {len(ids['train']):,} tokens to train on and {len(ids['validation']):,} to validate are less than "
            f"a batch of {config.batch_size} × {sizes.sequence}; give more text, or a smaller --batch_size or --sequence"
        )
    return data


def prepare(config, splits: dict[str, list[str]], vocabulary: int, folder: Path) -> None:
    """Train or load the tokenizer, encode the documents; the folder gets its name when all is written."""
    tokenizer = (
        named_tokenizer(config.tokenizer)
        if config.tokenizer
        else train_tokenizer(splits["train"], vocabulary)
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder), new_folder(folder) as building:
        for split, documents in splits.items():
            ids, lengths = flatten(encode(tokenizer, documents))
            # Where a document ends, the next may begin.
            ids = np.insert(ids, np.cumsum(lengths), tokenizer.eos_token_id)
            np.save(
                building / f"{split}.npy",
                ids.astype(np.uint16 if len(tokenizer) <= 2**16 else np.int32),
            )
        tokenizer.save_pretrained(building / "tokenizer")


def named_tokenizer(name: str):
    """By hub name or folder. Raises `UserError` if it cannot be read or has no end token."""
    tokenizer = open_tokenizer(name)
    if tokenizer.eos_token_id is None:
        raise UserError(f"--tokenizer {name} has no end token; choose one that has, such as gpt2")
    return tokenizer


def random_data(config, sizes: Sizes) -> Data:
    """The handout's: ids drawn evenly, `data_size` sequences. There is nothing to learn; it measures speed and memory."""
    draw = np.random.default_rng(config.seed)
    size = max(config.data_size, config.batch_size) * sizes.sequence + 1
    kind = np.uint16 if sizes.vocabulary <= 2**16 else np.int32
    ids = {
        "train": draw.integers(sizes.vocabulary, size=size, dtype=kind),
        "validation": draw.integers(
            sizes.vocabulary, size=config.batch_size * sizes.sequence + 1, dtype=kind
        ),
    }
    key = f"random-{config.seed}-{config.data_size}"
    return Data(ids, sizes.sequence, config.batch_size, config.seed, sizes.vocabulary, key)


def read_documents(path: Path) -> tuple[dict[str, list[str]], str]:
    """{"train": texts, "validation": texts} of a file or folder, and one line on what was read."""
    if not path.exists():
        raise UserError(
            f"--data {path} does not exist; give a text file, a folder of them, or `random`"
        )
    files = [path]
    if path.is_dir():
        files = sorted(
            file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()
        )
        files = [file for file in files if not file.stem.lower().startswith(NO_TEXT)]
        files = [
            file
            for file in files
            if not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
    if abstracts := [file for file in files if file.name == "X.txt"]:
        # Web of Science's folders: the largest one contains the others. Beside X.txt lie labels.
        files = [max(abstracts, key=lambda file: file.stat().st_size)]
    if not files:
        raise UserError(
            f"--data {path} holds no {' '.join(SUFFIXES)} file; give a folder with text in it"
        )
    documents, notes = {}, set()
    for file in files:
        split = split_of(file) or "train"
        texts, note = read_file(file)
        notes.add(note)
        documents.setdefault(split, []).extend(texts)
    note = f"{path}: {', '.join(sorted(notes))}"
    if not documents.get("train"):  # only test.txt, or only valid.txt: what there is
        documents = {"train": [text for texts in documents.values() for text in texts]}
    if "validation" not in documents:
        texts = documents["train"]
        rest = [text for number, text in enumerate(texts) if number % VALIDATE_EVERY]
        documents = {"train": rest, "validation": texts[::VALIDATE_EVERY]}
    if not documents["train"] or not documents["validation"]:
        raise UserError(f"{path} has too few documents to train and to validate on; give more text")
    note += f"; {len(documents['test']):,} of test are not read" if "test" in documents else ""
    return {split: documents[split] for split in ("train", "validation")}, note


def read_file(file: Path) -> tuple[list[str], str]:
    """The documents of one file: rows of a table, articles under WikiText's titles, paragraphs, or lines."""
    try:
        # Of the hub's parquet files the column `text`.
        text = (
            "\n".join(read_lines(file))
            if file.suffix == ".parquet"
            else file.read_text(encoding="utf-8-sig")
        )
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text; convert it, or name another file") from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    header = text.partition("\n")[0].split("\t")
    second = text.split("\n", 2)[1:2]
    is_table = len(header) > 2 and any(row.count("\t") == len(header) - 1 for row in second)
    # Else it is a line with a tab in it.
    if len(header) > 1 and (ABSTRACT in header or is_table or file.suffix.lower() == ".tsv"):
        if ABSTRACT not in header:
            raise UserError(
                f"{file} is a table without the column {ABSTRACT}; it has {', '.join(header)[:100]}"
            )
        rows = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t")  # undoes the quotes
        texts = [row[ABSTRACT].strip() for row in rows if row[ABSTRACT]]
        return texts, "abstracts of Web of Science, their labels and keywords are not read"
    lines = text.rstrip("\n").split("\n")  # not at U+2028 and its like, which stand within a line
    titles = [n for n, line in enumerate(lines) if TITLE.fullmatch(line)]
    if titles:
        parts, kind = (
            ["\n".join(lines[a:b]) for a, b in zip([0, *titles], [*titles, len(lines)])],
            "articles",
        )
    elif (
        text.strip().count("\n\n") * 100 >= len(lines) and file.name != "X.txt"
    ):  # a stray blank line parts no lines
        parts, kind = text.split("\n\n"), "paragraphs"
    else:
        parts, kind = lines, "lines"
    if file.name == "X.txt":
        kind = "abstracts of Web of Science, their labels are not read"
    return [part.strip() for part in parts if part.strip()], kind
