"""Text for the language model: files → splits at document boundaries → vocabulary → token ids; GloVe vectors for them.

    text = prepare("/opt/wikitext-2", ratios=(0.8, 0.1, 0.1), tokens="words", vocab=0, min_count=3)
    text.ids["train"]            # (T,) int64; every line ends with <eos>
    vectors, known = load_glove(Path("glove.6B.50d.txt"), text.vocabulary.tokens)

WikiText's own form is the default: words stand between spaces, rare ones are `<unk>`, a document begins with a line
` = title = `, and every line, an empty one too, ends with the token `<eos>`.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import UserError
from text.plain import NO_TEXT, TITLE, read_lines, split_of
from text.rows import find_text
from text.subwords import decode, encode, train_tokenizer

DEFAULT = Path("/opt/wikitext-2")
SAMPLE = Path(__file__).parent.parent.parent / "sample"
SPLITS = ("train", "validation", "test")
SUFFIXES = (".txt", ".tokens", ".raw", ".md", ".parquet")
UNK, EOS = "<unk>", "<eos>"
# For text that nobody has tokenised: a Han character, a word, or a mark by itself.
WORDS = re.compile(
    r"<unk>|[\u4e00-\u9fff]|[^\W\u4e00-\u9fff]+(?:['’-][^\W\u4e00-\u9fff]+)*|[^\w\s]"
)
SUBWORDS = 4000  # tokens in a subword vocabulary, unless asked otherwise


@dataclass
class Vocabulary:
    """The events that a model gives probabilities to: a token's id is its place in `tokens`. There is no padding token."""

    tokens: list[str]
    marks: bool = False  # words and marks are taken apart; else words stand between spaces
    tokenizer: object = None  # of subwords; None: tokens are words

    def __post_init__(self):
        self.index = {token: id for id, token in enumerate(self.tokens)}
        self.eos, self.unk = self.index[EOS], self.index.get(UNK)

    def encode(self, lines: list[str]) -> list[list[int]]:
        """Ids of each line, without <eos>."""
        if self.tokenizer:
            return encode(self.tokenizer, lines)
        return [
            [self.index.get(word, self.unk) for word in cut_words(line, self.marks)]
            for line in lines
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, with a line end for <eos>."""
        if not self.tokenizer:
            return " ".join("\n" if id == self.eos else self.tokens[id] for id in ids)
        rows = [[]]
        for id in ids:
            rows.append([]) if id == self.eos else rows[-1].append(id)
        return "\n".join(decode(self.tokenizer, [row])[0] if row else "" for row in rows)


@dataclass
class Text:
    """A tokenised corpus."""

    vocabulary: Vocabulary
    ids: dict[str, Tensor]  # split → (T,) int64
    words: dict[
        str, int
    ]  # split → its words, one <eos> a line among them: what perplexity per word divides by
    notes: list[str] = field(default_factory=list)  # what was read and cut, for the log

    def key(self) -> str:
        """A hash of the vocabulary and all three splits: a run goes on with just these."""
        digest = hashlib.sha256("\n".join(self.vocabulary.tokens).encode())
        for split in SPLITS:
            digest.update(
                f"\n{split} {len(self.ids[split])}\n".encode() + self.ids[split].numpy().tobytes()
            )
        return digest.hexdigest()[:16]


def prepare(path: str, ratios: tuple[float, ...], tokens: str, vocab: int, min_count: int) -> Text:
    """Read, split and tokenise. `tokens`: "words" or "subwords"; `vocab` 0: every word seen `min_count` times."""
    notes = []
    splits = read_splits(path, ratios, notes)
    marks = has_marks_on_words(splits["train"], notes)
    words = {split: [cut_words(line, marks) for line in lines] for split, lines in splits.items()}
    if tokens == "words":
        vocabulary = Vocabulary(choose_words(words["train"], vocab, min_count), marks)
    else:
        vocabulary = subword_vocabulary(splits["train"], vocab or SUBWORDS)
    ids = {split: stream(vocabulary, lines) for split, lines in splits.items()}
    notes.append(
        f"vocabulary: {len(vocabulary.tokens):,} {tokens}" + unknown_shares(vocabulary, ids)
    )
    counts = {split: sum(len(line) + 1 for line in lines) for split, lines in words.items()}
    notes.append("tokens: " + ", ".join(f"{len(ids[split]):,} {split}" for split in SPLITS))
    return Text(vocabulary, ids, counts, notes)


def stream(vocabulary: Vocabulary, lines: list[str]) -> Tensor:
    """All lines as one row of ids, (T,), each with <eos> behind it."""
    rows, eos = vocabulary.encode(lines), vocabulary.eos
    return torch.tensor([id for row in rows for id in [*row, eos]], dtype=torch.int64)


def unknown_shares(vocabulary: Vocabulary, ids: dict[str, Tensor]) -> str:
    """How much of each split is <unk>; perplexities compare only where this is the same."""
    if vocabulary.unk is None:
        return ""
    shares = [
        f"{(ids[split] == vocabulary.unk).double().mean():.1%} of {split}" for split in SPLITS
    ]
    return f"; {UNK} is " + ", ".join(shares)


# Files and splits


def read_splits(path: str, ratios: tuple[float, ...], notes: list[str]) -> dict[str, list[str]]:
    """The lines of train, validation and test; `notes` gets a line on where they come from."""
    if not path and not DEFAULT.exists():
        notes.append(f"data: no --data and no {DEFAULT}, so the English side of the bundled sample")
        return sample_splits()
    files_of = find_files(Path(path).expanduser() if path else DEFAULT)
    splits = {
        split: [line for file in files for line in read_lines(file)]
        for split, files in files_of.items()
    }
    notes.append(
        f"data: {path or DEFAULT}: "
        + ", ".join(file.name for files in files_of.values() for file in files)
    )
    for split, lines in splits.items():
        if not any(line.strip() for line in lines):
            raise UserError(
                f"{path or DEFAULT}: the text of {split or 'these files'} is empty; give a file with text"
            )
    return cut_missing(splits, ratios, notes)


def sample_splits() -> dict[str, list[str]]:
    """The English sentences of the bundled parallel text, a line each."""
    text = find_text(str(SAMPLE), "zh", "en")
    return {split: [en for chunk in text.rows(split) for _, en in chunk] for split in SPLITS}


def find_files(path: Path) -> dict[str, list[Path]]:
    """Split → its text files, in order of name; "" stands for files whose names tell no split."""
    if path.is_file():
        return {"": [path]}
    if not path.is_dir():
        raise UserError(
            f"--data {path}: no such file or folder; give a text file, or a folder with some"
        )
    files = sorted(
        file
        for file in path.iterdir()
        if file.is_file()
        and file.suffix in SUFFIXES
        and not file.name.startswith(".")
        and not file.stem.lower().startswith(NO_TEXT)
    )
    if not files:
        raise UserError(
            f"--data {path}: no text file there ({' '.join(SUFFIXES)}); give a text file, or its folder"
        )
    files_of = {}
    for file in files:
        files_of.setdefault(split_of(file), []).append(file)
    named = {split: files_of[split] for split in SPLITS if split in files_of}
    return named or files_of  # notes beside train.txt are no training text


def cut_missing(
    splits: dict[str, list[str]], ratios: tuple[float, ...], notes: list[str]
) -> dict[str, list[str]]:
    """All three splits: a missing one is cut from train; train itself from validation, else from whatever there is.

    The text that is cut is shared among its own split and the missing ones as `ratios` say of (train, validation, test),
    in the order of the text, at the document boundary nearest to each ratio.
    """
    missing = [split for split in SPLITS if split not in splits]
    if not missing:
        return splits
    source = next(split for split in ("train", "validation", "test", "") if split in splits)
    parts = [split for split in SPLITS if split in missing or split == source]
    weights = [ratios[SPLITS.index(split)] for split in parts]
    cut, kind = cut_text(
        splits.pop(source), [weight / sum(weights) for weight in weights], source or "the text"
    )
    shares = ", ".join(
        f"{weight / sum(weights):.1%} {split}" for split, weight in zip(parts, weights)
    )
    kept = ", ".join(f"{split} as it is" for split in splits)
    notes.append(
        f"splits: {source or 'the text'} is cut at {kind}: {shares}" + (f"; {kept}" if kept else "")
    )
    return {**dict(zip(parts, cut)), **splits}


def cut_text(lines: list[str], shares: list[float], name: str) -> tuple[list[list[str]], str]:
    """The lines in consecutive parts of about these shares of the words, and what they were cut at."""
    starts, kind = boundaries(lines, len(shares))
    if len(starts) < len(shares):
        raise UserError(
            f"{name} has {len(lines)} lines, too few to cut {len(shares)} splits from; give more text"
        )
    words_before = [0, *accumulate(len(line.split()) for line in lines)]
    cuts = [0]
    for begun, share in enumerate(
        accumulate(shares[:-1]), 2
    ):  # splits that have begun, with this one
        choice = [start for start in starts if start > cuts[-1]]
        choice = choice[
            : len(choice) - (len(shares) - begun)
        ]  # each later split needs a document of its own
        cuts.append(
            min(choice, key=lambda start: abs(words_before[start] - share * words_before[-1]))
        )
    cuts.append(len(lines))
    return [lines[first:end] for first, end in zip(cuts, cuts[1:])], kind


def boundaries(lines: list[str], parts: int) -> tuple[list[int], str]:
    """Where documents begin; in a text with too few titles paragraphs, and in one without paragraphs lines."""
    titles = [number for number, line in enumerate(lines) if TITLE.fullmatch(line)]
    blank = [not line.strip() for line in lines]
    paragraphs = [n for n in range(len(lines)) if not blank[n] and (n == 0 or blank[n - 1])]
    for starts, kind in ((titles, "documents"), (paragraphs, "paragraphs")):
        if len(starts) > parts:
            return [0, *starts[1:]], kind  # lines before the first title or paragraph belong to it
    return list(range(len(lines))), "lines"


# Tokens and vocabulary


def has_marks_on_words(lines: list[str], notes: list[str]) -> bool:
    """Whether marks stand right behind words, as in any plain text; WikiText has a space before them."""
    words = [word for line in lines for word in line.split() if len(word) > 1]
    share = sum(word[-1] in ".,;:!?。，；：！？" for word in words) / max(len(words), 1)
    if (
        share < 0.02
    ):  # "H." and "U.S." are under 1 % of WikiText; in plain text every tenth word has a mark behind it
        return False
    notes.append(
        f"words: {share:.0%} end with a mark, so this text is cut into words and marks here"
    )
    return True


def cut_words(line: str, marks: bool) -> list[str]:
    """The words of a line; with `marks` they stand behind words, and are cut off as words of their own."""
    return WORDS.findall(line) if marks else line.split()


def choose_words(rows: list[list[str]], size: int, min_count: int) -> list[str]:
    """<eos>, <unk> and the words seen `min_count` times, or the `size` most frequent tokens; the most frequent first."""
    counts = Counter(word for row in rows for word in row)
    counts.update({EOS: len(rows), UNK: 0})
    always = (EOS, UNK)
    kept = [word for word, count in counts.items() if size or count >= min_count or word in always]
    kept = set(
        sorted(kept, key=lambda word: (word not in always, -counts[word], word))[: size or None]
    )
    counts[UNK] += sum(count for word, count in counts.items() if word not in kept)
    return sorted(kept, key=lambda word: (-counts[word], word))


def subword_vocabulary(lines: list[str], size: int) -> Vocabulary:
    """Byte-pair pieces (see text/subwords.py) and <eos>; nothing is unknown."""
    tokenizer = train_tokenizer(lines, size)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    tokens[tokenizer.eos_token_id] = EOS
    return Vocabulary(tokens, tokenizer=tokenizer)


# GloVe


def load_glove(path: Path, tokens: list[str]) -> tuple[Tensor, Tensor]:
    """Vectors (V, G) of these tokens and whether the file has them (V,); a word it lacks is looked up in lower case.

    The file is text: a word and its G numbers a line, as https://nlp.stanford.edu/projects/glove/ has it (Pennington et
    al. 2014). The vectors found are scaled to variance 1/G; tokens without one get N(0, 1/G) of a fixed seed.
    """
    wanted = {form for token in tokens for form in (token, token.lower())} - {UNK, EOS}
    table, size = read_vectors(path, wanted)
    rows = [
        table.get(token, table.get(token.lower())) if token not in (UNK, EOS) else None
        for token in tokens
    ]
    known = torch.tensor([row is not None for row in rows])
    if not known.any():
        raise UserError(
            f"--glove {path}: none of its words is in the vocabulary; is it of this language?"
        )
    vectors = (
        torch.randn(len(tokens), size, generator=torch.Generator().manual_seed(0)) * size**-0.5
    )
    read = torch.tensor([row for row in rows if row is not None])  # (of the known, G)
    vectors[known] = read / read.std(correction=0).clamp_min(1e-8) * size**-0.5
    return vectors, known


def read_vectors(path: Path, wanted: set[str]) -> tuple[dict[str, list[float]], int]:
    """word → its numbers, for the wanted words, and how many numbers a word has."""
    table, size = {}, 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                words = line.rstrip().split(" ")
                if number == 1 and len(words) == 2 and all(map(str.isdecimal, words)):
                    continue  # word2vec's text form begins with the sizes
                size = size or len(words) - 1
                if size < 2 or len(words) <= size:
                    raise ValueError(
                        f"line {number} has {len(words) - 1} numbers instead of {size or 'some'}"
                    )
                word = " ".join(
                    words[:-size]
                )  # a few words of the largest files have spaces within
                if word in wanted and word not in table:
                    table[word] = [float(value) for value in words[-size:]]
    except OSError as error:
        raise UserError(
            f"--glove {path}: {error.strerror}; give a text file such as glove.6B.50d.txt"
        ) from None
    except ValueError as error:  # not UTF-8 is one of them
        raise UserError(
            f"--glove {path} is no file of vectors ({error}); unpack the .zip, or fetch it again"
        ) from None
    return table, size


def coverage(known: Tensor, ids: Tensor) -> tuple[float, float]:
    """Shares of the vocabulary (types) and of the text (running tokens) that have a vector."""
    return known.double().mean().item(), known[ids].double().mean().item()
