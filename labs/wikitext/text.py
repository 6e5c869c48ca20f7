"""Text for the language model: files → splits → words → vocabulary → token ids.

text = prepare("/opt/wikitext-2", ratios=(0.8, 0.1, 0.1), vocab_size=0, min_count=3)
text.ids["train"]            # (T,) int64; every line ends with <eos>

WikiText's own form is the default: words stand between spaces, rare ones are `<unk>`, an article
begins with a line ` = title = `, and every line, an empty one too, ends with the token `<eos>`.
"""

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import UserError
from engine.files import atomic_write
from text.reading import absolute_path, find_text, split_of

ROOT = Path(__file__).parents[2]
# Where WikiText-2 is looked for without a flag: /opt, and beside the repository.
DATA_PLACES = (Path("/opt/wikitext-2"), ROOT.parent / "wikitext-2")
SAMPLE_NOTE = "bundled sample, not WikiText-2: this score says only that the program works"
HOW_TO_GET = (
    "download the parquet files of "
    "https://huggingface.co/datasets/Salesforce/wikitext/tree/main/wikitext-2-v1 "
    "and name their folder with --data"
)
SPLITS = ("train", "validation", "test")
SUFFIXES = (".txt", ".tokens", ".raw", ".parquet")
NOT_TEXT = ("copying", "licence", "license", "notice", "readme")  # documents that accompany a text
UNK, EOS = "<unk>", "<eos>"
VOCABULARY = "vocabulary.txt"  # the file of a run
# The title line of a WikiText article, ` = Title = `; ` = = Section = = ` is not one.
TITLE = re.compile(r"\s*= [^=].* =\s*")
# For text that nobody has tokenised: a Han character, a word, or a mark by itself.
WORDS = re.compile(
    r"<unk>|[\u4e00-\u9fff]|[^\W\u4e00-\u9fff]+(?:['’-][^\W\u4e00-\u9fff]+)*|[^\w\s]"
)
MARKS = ".,;:!?。，；：！？"


@dataclass
class Vocabulary:
    """The words that the model gives probabilities to: an id is a place in `tokens`."""

    tokens: list[str]
    marks: bool = False  # marks are separated from words; else words stand between spaces
    lowercase: bool = False

    def __post_init__(self):
        self.index = {token: id for id, token in enumerate(self.tokens)}
        self.eos, self.unk = self.index[EOS], self.index[UNK]

    def encode(self, line: str) -> list[int]:
        """The ids of a line, without <eos>."""
        words = cut_words(line, self.marks, self.lowercase)
        return [self.index.get(word, self.unk) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, with a line end for <eos>."""
        return " ".join("\n" if id == self.eos else self.tokens[id] for id in ids)

    def save(self, run: Path) -> None:
        """Write vocabulary.txt, one word per line."""
        atomic_write(run / VOCABULARY, "".join(f"{token}\n" for token in self.tokens))


@dataclass
class Text:
    """A tokenised corpus."""

    vocabulary: Vocabulary
    ids: dict[str, Tensor]  # split → (T,) int64
    notes: list[str]  # what was read and cut, for the log

    def check(self, run: Path, data_key: int) -> None:
        """Raises `UserError` unless this is the text of the run, whose checksum was `data_key`."""
        if self.checksum() != data_key:
            raise UserError(
                f"{run}: the text is not the one that the run began with; restore it, or start "
                "a new run"
            )

    def checksum(self) -> int:
        """Of the words and of the token ids of all splits."""
        result = zlib.crc32("\n".join(self.vocabulary.tokens).encode())
        for ids in self.ids.values():
            result = zlib.crc32(ids.numpy().tobytes(), result)
        return result


def prepare(
    path: str,
    ratios: tuple[float, ...],
    vocab_size: int,
    min_count: int,
    lowercase: bool = False,
    run: Path | None = None,
) -> Text:
    """Read, split and tokenise.

    `path` "": the sample. The vocabulary is that of `run`; without one, the `vocab_size` most
    frequent words, or with `vocab_size` 0 those seen at least `min_count` times.
    """
    notes: list[str] = []
    splits = read_splits(path, ratios, notes)
    marks = has_marks_on_words(splits["train"], notes)
    if run:
        tokens = read_vocabulary(run)
        notes.append(f"vocabulary: that of {run}")
    else:
        words = [cut_words(line, marks, lowercase) for line in splits["train"]]
        tokens = choose_words(words, vocab_size, min_count)
    vocabulary = Vocabulary(tokens, marks, lowercase)
    ids = {}
    for split, lines in splits.items():
        rows = [[*vocabulary.encode(line), vocabulary.eos] for line in lines]
        ids[split] = torch.tensor([id for row in rows for id in row], dtype=torch.int64)
    # Perplexities compare only where the share of <unk> is the same.
    unknown = {split: (ids[split] == vocabulary.unk).double().mean() for split in SPLITS}
    shares = ", ".join(f"{share:.1%} of {split}" for split, share in unknown.items())
    notes.append(f"vocabulary: {len(vocabulary.tokens):,} words; {UNK} is {shares}")
    notes.append("tokens: " + ", ".join(f"{len(ids[split]):,} {split}" for split in SPLITS))
    return Text(vocabulary, ids, notes)


def read_vocabulary(run: Path) -> list[str]:
    """The words of a run's vocabulary.txt, by id."""
    try:
        tokens = (run / VOCABULARY).read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {run / VOCABULARY} ({error}); restore it") from None
    if UNK not in tokens or EOS not in tokens or len(set(tokens)) < len(tokens):
        raise UserError(f"{run / VOCABULARY} is damaged; restore it, or start a new run")
    return tokens


def run_of(path: Path) -> Path:
    """The run of this lab that `path` is or lies in: a checkpoint or a weights file, say."""
    for folder in (path, *path.absolute().parents):
        if (folder / VOCABULARY).exists():
            return folder
    raise UserError(
        f"{path} is not a run of labs.wikitext, nor inside one (no folder has {VOCABULARY}); "
        "name a run, its checkpoint or the weights file in it"
    )


# -------- files and splits


def read_splits(path: str, ratios: tuple[float, ...], notes: list[str]) -> dict[str, list[str]]:
    """The lines of each split; of the bundled sample without a path."""
    if not path:
        notes.append(f"data: {SAMPLE_NOTE}. For WikiText-2 {HOW_TO_GET}")
        pairs = find_text(str(ROOT / "sample"), "zh", "en")
        return {split: [en for _, en in pairs.pairs(split)] for split in SPLITS}
    splits = {}
    for split, files in find_files(Path(path)).items():
        splits[split] = [line for file in files for line in read_lines(file)]
        names = ", ".join(file.name for file in files)
        notes.append(f"data: {split or 'text'} from {names} in {files[0].parent}")
        if not any(line.strip() for line in splits[split]):
            raise UserError(f"{path}: {names} holds no text; give a file with text")
    return cut_missing(splits, ratios, notes)


def find_data(data: str) -> str:
    """The absolute path of `data`; without it the first of DATA_PLACES, else "": the sample."""
    if data:
        return absolute_path(data)
    return next((str(place) for place in DATA_PLACES if place.is_dir()), "")


def find_files(path: Path) -> dict[str, list[Path]]:
    """Split → its text files, in order of name.

    Files whose names tell no split are the training text, unless another file is called train. If
    no name tells a split, the only key is "".
    """
    if path.is_file():
        return {"": [path]}
    if not path.is_dir():
        raise UserError(
            f"--data {path}: no such file or folder; give a text file, or a folder of them"
        )
    files_of: dict[str, list[Path]] = {}
    for file in sorted(path.iterdir()):
        is_text = file.suffix in SUFFIXES and file.stem.lower() not in NOT_TEXT
        if file.is_file() and is_text and not file.name.startswith("."):
            files_of.setdefault(split_of(file.name) or "", []).append(file)
    if not files_of:
        raise UserError(
            f"--data {path}: no text file there ({' '.join(SUFFIXES)}); give a text file"
        )
    named = {split: files_of[split] for split in SPLITS if split in files_of}
    for split, files in named.items():
        if len({file.suffix for file in files}) > 1:  # the same text in two forms
            names = ", ".join(file.name for file in files)
            raise UserError(f"--data {path}: {split} is both {names}; remove all but one kind")
    if named and "train" not in named and "" in files_of:
        return {"train": files_of[""], **named}
    return named or files_of  # a notes.txt beside train.txt is not part of the text


def read_lines(file: Path) -> list[str]:
    """The lines of a text file, or of the column `text` of a parquet file.

    Hugging Face offers WikiText as parquet only. A row there is a line, or a text of several.
    """
    if file.suffix == ".parquet":
        return [line for row in read_column(file) for line in lines_of(row or "")]
    try:
        return lines_of(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; give another text file") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 (byte {error.start}); convert it first, e.g. with iconv"
        ) from None


def lines_of(text: str) -> list[str]:
    """The lines, at least one; not `splitlines`, which also cuts at U+2028 and form feeds."""
    return text.removesuffix("\n").split("\n")


def read_column(file: Path) -> list[str | None]:
    """The column `text` of a parquet file. Raises `UserError` if there is none."""
    import pyarrow.parquet

    no_column = UserError(
        f"{file} has no column `text` of strings; give a text file, or a parquet file with that "
        "column"
    )
    try:
        if "text" not in pyarrow.parquet.read_schema(file).names:
            raise no_column
        rows = pyarrow.parquet.read_table(file, columns=["text"]).column("text").to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{file} is not a parquet file ({str(error)[:80]}); download it again"
        ) from None
    if not all(isinstance(row, str | None) for row in rows):
        raise no_column
    return rows


def cut_missing(
    splits: dict[str, list[str]], ratios: tuple[float, ...], notes: list[str]
) -> dict[str, list[str]]:
    """All three splits. Missing ones are cut from train, else from validation, else from test.

    The text that is cut is shared among its own split and the missing ones by `ratios` of (train,
    validation, test), in the order of the text, at the article boundary nearest to each ratio.
    """
    missing = [split for split in SPLITS if split not in splits]
    if not missing:
        notes.append("splits: all three have files of their own, so --ratios has no effect")
        return splits
    source = next(split for split in ("train", "validation", "test", "") if split in splits)
    parts = [split for split in SPLITS if split in missing or split == source]
    weights = [ratios[SPLITS.index(split)] for split in parts]
    shares = [weight / sum(weights) for weight in weights]
    name = source or "the text"
    cut, kind = cut_text(splits.pop(source), shares, name)
    note = ", ".join(f"{share:.1%} {split}" for split, share in zip(parts, shares))
    for split in splits:
        note += f"; {split} as it is"
    notes.append(f"splits: {name} is cut at {kind}: {note}")
    return {**dict(zip(parts, cut)), **splits}


def cut_text(lines: list[str], shares: list[float], name: str) -> tuple[list[list[str]], str]:
    """The lines in parts of about these shares of the words, and what they were cut at."""
    starts, kind = boundaries(lines, len(shares))
    if len(starts) < len(shares):
        raise UserError(
            f"{name} has {len(lines)} lines, too few to cut {len(shares)} splits; give more lines"
        )
    words_before = [0, *accumulate(len(line.split()) for line in lines)]
    cuts = [0]
    for number, share in enumerate(accumulate(shares[:-1]), start=1):
        wanted = share * words_before[-1]
        choice = [start for start in starts if start > cuts[-1]]
        # Each later split needs an article of its own.
        later_splits = len(shares) - number - 1
        choice = choice[: len(choice) - later_splits]
        cuts.append(min(choice, key=lambda start: abs(words_before[start] - wanted)))
    cuts.append(len(lines))
    return [lines[first:end] for first, end in zip(cuts, cuts[1:])], kind


def boundaries(lines: list[str], parts: int) -> tuple[list[int], str]:
    """Where articles begin, and "articles"; with too few titles every line, and "lines"."""
    titles = [number for number, line in enumerate(lines) if TITLE.fullmatch(line)]
    if len(titles) > parts:
        return [0, *titles[1:]], "articles"  # lines before the first title belong to it
    return list(range(len(lines))), "lines"


# -------- words and vocabulary


def has_marks_on_words(lines: list[str], notes: list[str]) -> bool:
    """Whether marks stand right after words, as in plain text; WikiText puts a space between."""
    words = [word for line in lines for word in line.split() if len(word) > 1]
    share = sum(word[-1] in MARKS for word in words) / max(len(words), 1)
    # "H." and "U.S." are under 1 % of WikiText; in plain text every tenth word ends with a mark.
    if share < 0.02:
        return False
    notes.append(f"words: {share:.0%} end with a mark, so words and marks are separated")
    return True


def cut_words(line: str, marks: bool, lowercase: bool) -> list[str]:
    """The words of a line; with `marks`, marks that stand after words are words of their own."""
    if lowercase:
        line = line.lower()
    return WORDS.findall(line) if marks else line.split()


def choose_words(rows: list[list[str]], size: int, min_count: int) -> list[str]:
    """<eos>, <unk> and the words seen at least `min_count` times, the most frequent first.

    If `size` is above 0, the `size` most frequent tokens, with those two among them.
    """
    counts = Counter(word for row in rows for word in row)
    unknown = counts.pop(UNK, 0)
    ends = counts.pop(EOS, 0)  # where the text itself has the word <eos>
    by_count = sorted(counts, key=lambda word: (-counts[word], word))
    kept = [word for word in by_count if counts[word] >= min_count]
    if size:
        kept = by_count[: size - 2]  # <eos> and <unk> are among the `size`
    counts[EOS] = ends + len(rows)
    counts[UNK] = unknown + sum(counts[word] for word in by_count[len(kept) :])
    return sorted([*kept, EOS, UNK], key=lambda word: (-counts[word], word))
