"""Find parallel text on disk, whatever its form: its files, and the split of each.

    text = find_text("/opt/minidataset")
    for source, target in text.pairs("train"): ...

The path may be a directory of parquet, arrow, json, csv or tsv files, a single such file, a
directory written by `save_to_disk`, or the name of a data set on the hub. A directory may also hold
pairs of files, one per language: `train.zh` with `train.en` (Moses), `X-src.zh.sgm` with
`X-ref.en.sgm` (WMT). text/formats.py reads them.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from filecmp import cmp
from itertools import chain, islice
from pathlib import Path

from engine.errors import UserError
from text.formats import PAIRED, Pairs, read_pairs, short

SAMPLE = Path(__file__).resolve().parents[1] / "sample"
KEYWORDS = {
    "train": ("train", "training", "训练", "訓練"),
    "validation": ("validation", "valid", "dev", "val", "验证", "驗證"),
    "test": ("test", "testing", "eval", "evaluation", "测试", "測試"),
}
FORMS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "tsv",
}
# If a directory holds several forms, the first of these is read: json beside a corpus mostly
# describes it, and sgm is a test set of WMT.
ORDER = ("parquet", "arrow", "csv", "tsv", "moses", "json", "sgm")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
NOT_DATA = ("config.json", "dataset_info.json", "dataset_infos.json", "state.json")
# Names of a Chinese column: by its language or country code, in English, in Chinese.
CHINESE = re.compile("(.*[^a-z])?(zh|chinese|cmn|cn(?![a-z]))|.*[中汉漢]")


@dataclass(frozen=True)
class ParallelText:
    """What `find_text` found: the files of each split and how to read them."""

    path: str  # as the user gave it
    form: str  # "parquet", "arrow", "json", "csv", "tsv", "moses", "sgm", "save_to_disk", "hub"
    source: str  # "zh"
    target: str  # "en"
    files: dict[str, list[Path]]  # split -> shards in order; if paired: source, target, source, …

    def pairs(self, split: str) -> Pairs:
        """All (source, target) texts of a split, in order. Raises `UserError` for a bad row."""
        if split not in self.files:
            raise UserError(
                f"{self.path} has no {split} split; add a file with {split} in its name"
            )
        files = self.files[split]
        count = 2 if self.form in PAIRED else 1  # files that are read together
        for first in range(0, len(files), count):
            shard = files[first : first + count]
            yield from read_pairs(self.form, shard, self.source, self.target)

    def fingerprint(self) -> dict[str, str]:
        """Of each split a hash of its files' contents, wherever they lie and whatever their names.

        Which columns are read is not part of it.
        """
        return {split: hash_of_files(files) for split, files in self.files.items()}


def hash_of_files(files: list[Path]) -> str:
    """32 hexadecimal digits of the contents, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.stat().st_size}\n".encode())  # where one ends and the next begins
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def default_path() -> str:
    """The course's `/opt/minidataset` where it exists, else the repository's own `sample/`."""
    course = "/opt/minidataset"
    return course if os.path.isdir(course) else str(SAMPLE)


def is_sample(text: ParallelText) -> bool:
    """Whether a file of the text is one of the bundled sample, or a copy of one."""
    of_sample = list(SAMPLE.glob("*.parquet"))
    files = chain.from_iterable(text.files.values())
    # Only files of the same size are read.
    return any(cmp(file, known, shallow=False) for file in files for known in of_sample)


# For log and card: what a score on the bundled sample is worth.
SAMPLE_NOTICE = "bundled sample, not WMT19: this score says only that the program works"


def absolute_path(path: str) -> str:
    """The path from the root; unchanged if nothing is there, as for the name of a hub data set."""
    if os.path.exists(os.path.expanduser(path)):
        # Not realpath: the target of a link may have another name. Not abspath: it takes the `..`
        # of `link/..` for the folder that holds the link.
        path = str(Path(os.getcwd(), os.path.expanduser(path)))
    if path != path.encode(errors="ignore").decode():
        raise UserError(f"the path {path!r} is not UTF-8; rename the folder")
    return path


def fingerprint_of(rows: list[tuple[str, str]]) -> str:
    """A hash of all texts, in order: scores are comparable if their rows have the same."""
    content = "".join(map(repr, rows)).encode()
    return hashlib.blake2b(content, digest_size=4).hexdigest()


def find_text(
    path: str, source: str = "zh", target: str = "en", log: Callable = print
) -> ParallelText:
    """Sort the files at `path` into splits and read the first rows of each.

    So a wrong column in the last split is an error now, not after an hour. Logs which files are not
    read, and why. Raises `UserError`.
    """
    path = os.fspath(path)
    root = Path(os.path.expanduser(path))
    if not path or not os.path.exists(root):
        form = "hub"
        files = hub_files(path, source, target, log)
    elif root.is_file():
        form = form_of(root, source)
        if form is None:
            endings = f"{' '.join(FORMS)}, .{source} or -src.{source}.sgm"
            raise UserError(f"{path}: unknown type of file; its name must end in {endings}")
        files = split_files([root], root.parent, log)
    elif (root / "dataset_dict.json").exists() or (root / "state.json").exists():
        form = "save_to_disk"
        files = saved_files(root, log)
    else:
        form, files = directory_files(root, source, log)
    if form in PAIRED:
        for split, shards in files.items():
            files[split] = []
            for file in shards:
                files[split] += [file, partner(file, source, target)]
    for shards in files.values():
        for file in shards:
            if not file.exists():
                raise UserError(f"{file} is missing; get it again")
            if file.stat().st_size == 0:
                raise UserError(f"{file} is empty (0 bytes); get it again or remove it")
    text = ParallelText(path, form, source, target, files)
    for split in files:
        refuse_swapped(text, list(islice(text.pairs(split), 1000)))
    return text


def refuse_swapped(text: ParallelText, rows: list[tuple[str, str]]) -> None:
    """Raise `UserError` if the column named Chinese is not Chinese, but the other one is."""
    side = chinese_side(text)
    if side is None or not rows:
        return
    share = share_of_chinese(rows, side)
    other_share = share_of_chinese(rows, 1 - side)
    if share < 0.5 < other_share:
        names = (text.source, text.target)
        raise UserError(
            f"the languages are swapped: {other_share:.0%} of the texts under {names[1 - side]!r} "
            f"are Chinese, {share:.0%} of those under {names[side]!r}; exchange the names in "
            f"{text.path}"
        )


def chinese_side(text: ParallelText) -> int | None:
    """The side, 0 or 1, whose column is named Chinese; None unless it is one of them."""
    chinese = [bool(CHINESE.match(name.lower())) for name in (text.source, text.target)]
    return chinese.index(True) if sum(chinese) == 1 else None


def share_of_chinese(rows: list[tuple[str, str]], side: int) -> float:
    """The share of the texts on this side that have a Chinese character."""
    found = sum(bool(re.search("[\u4e00-\u9fff]", row[side])) for row in rows)
    return found / len(rows)


def count_rows(text: ParallelText) -> int:
    """The number of training rows, bad ones included: exact for parquet and arrow, else lines."""
    files = text.files["train"]
    if text.form == "parquet":
        import pyarrow.parquet

        return sum(pyarrow.parquet.read_metadata(file).num_rows for file in files)
    if text.form in ("arrow", "save_to_disk", "hub"):
        from datasets import Dataset

        return sum(Dataset.from_file(str(file)).num_rows for file in files)
    lines = 0
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(2**22):
                lines += block.count(b"\n")
    return lines // 2 if text.form in PAIRED else lines


# ------------------------------------------------------------------------ files and splits


def form_of(file: Path, source: str) -> str | None:
    """The form of a file, by its name. Of two paired files the source stands for both."""
    if file.name.endswith(f"-src.{source}.sgm"):
        return "sgm"
    if file.suffix == f".{source}":
        return "moses"
    return FORMS.get(file.suffix.lower())


def partner(file: Path, source: str, target: str) -> Path:
    """Where the translations of a source file lie: train.zh -> train.en."""
    if file.suffix == ".sgm":
        stem = file.name.removesuffix(f"-src.{source}.sgm")
        return file.with_name(f"{stem}-ref.{target}.sgm")
    return file.with_suffix(f".{target}")


def directory_files(root: Path, source: str, log: Callable) -> tuple[str, dict[str, list[Path]]]:
    """The form that is read, and its files by split."""

    def refuse(error: OSError):
        """A folder that cannot be read is an error, not an empty one."""
        raise UserError(f"cannot list {error.filename}: {error.strerror}; check its permissions")

    by_form: dict[str, list[Path]] = {}
    visited = set()  # links may lead to a folder twice, or in a circle
    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        if os.path.realpath(folder) in visited:
            subfolders.clear()
            continue
        visited.add(os.path.realpath(folder))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in names:
            file = Path(folder, name)
            if name.startswith(".") or name in NOT_DATA:
                continue
            if form := form_of(file, source):
                by_form.setdefault(form, []).append(file)
            elif file.suffix.lower() in COMPRESSED:
                unpacked = file.with_suffix("")
                if form_of(unpacked, source) and not unpacked.exists():
                    raise UserError(f"{file} is compressed; unpack it, or move it elsewhere")
    form = next((form for form in ORDER if form in by_form), None)
    if form is None:
        raise UserError(
            f"{root} holds no parquet, arrow, json, csv or tsv file, nor one ending in .{source} "
            f"beside its translation; point to the directory of the shards, or name two text files "
            f"train.{source} and train.LANGUAGE"
        )
    if len(by_form) > 1:
        forms = ", ".join(sorted(by_form))
        log(f"data: {root} holds {forms} files; only the {form} files are read")
    return form, split_files(by_form[form], root, log)


def split_files(files: list[Path], root: Path, log: Callable) -> dict[str, list[Path]]:
    """Sort files into splits by a keyword in the file's name, else in the nearest folder's."""
    named = {}
    for file in sorted(files, key=lambda file: natural(str(file.relative_to(root)))):
        named[str(file.relative_to(root))] = [file]
    return sort_into_splits(named, log)


def sort_into_splits(named: dict[str, list[Path]], log: Callable) -> dict[str, list[Path]]:
    """The files under each name, by the split that the name tells.

    Names with no keyword are train if no other name is, and are not read otherwise.
    """
    splits: dict[str, list[Path]] = {split: [] for split in KEYWORDS}
    unnamed = []
    for name, files in named.items():
        parts = reversed(Path(name).parts)  # of a path, the file's name first
        found = [split for split in map(split_of, parts) if split]
        if found:
            splits[found[0]] += files
        else:
            unnamed.append(name)
    names = short(", ".join(unnamed))
    if not splits["train"]:
        splits["train"] = [file for name in unnamed for file in named[name]]
        if len(unnamed) > 1:  # a newstest2019 may be among them
            log(f"data: no name contains train, so all of these are read as train: {names}")
    elif unnamed:
        log(f"data: not read, as no name contains train, validation or test: {names}")
    return {split: files for split, files in splits.items() if files}


def split_of(name: str) -> str | None:
    """The one split whose keyword is a word of the name: newstest-dev.tsv -> "validation"."""
    # Chinese has no spaces: 中英训练集 is not one word.
    words = re.findall("[^\\W\\d_\u4e00-\u9fff]+|训练|訓練|验证|驗證|测试|測試", name.lower())
    words = {re.sub("(data)?(set)?$", "", word) for word in words}  # testset, traindata
    splits = [split for split, keywords in KEYWORDS.items() if words & {*keywords}]
    return splits[0] if len(splits) == 1 else None  # "train-test-corpus" tells nothing


def natural(name: str) -> list:
    """A key for sorting: shards 1, 2, 10. Odd places hold numbers, so int never meets str."""
    parts: list = re.split(r"(\d+)", name)
    parts[1::2] = map(int, parts[1::2])
    return parts


def saved_files(root: Path, log: Callable) -> dict[str, list[Path]]:
    """The arrow files of a folder written by `save_to_disk`, by split.

    Read from its json files, because `datasets` (version 5.2) cannot load an empty set.
    """
    named = {}
    try:
        if (root / "dataset_dict.json").exists():
            splits = json.loads((root / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            folders = {name: root / name for name in splits}
        else:
            state = json.loads((root / "state.json").read_text(encoding="utf-8"))
            folders = {state["_split"] or "train": root}
        for name, folder in folders.items():
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            named[name] = [folder / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{root} was not fully written by save_to_disk: {short(error)}; save it again"
        ) from error
    for name, files in named.items():
        if not files:
            raise UserError(f"{root}: {name} has no rows; save it with rows, or without {name}")
        for file in files:
            if not file.exists():
                raise UserError(f"{file} is missing; save {root} again")
    return sort_into_splits(named, log)


def cached_files(dataset_dict, log: Callable) -> dict[str, list[Path]]:
    """The arrow files behind each split, under our names: "dev" is validation."""
    named = {}
    for name, dataset in dataset_dict.items():
        named[name] = [Path(cached["filename"]) for cached in dataset.cache_files]
    return sort_into_splits(named, log)


def hub_files(path: str, source: str, target: str, log: Callable) -> dict[str, list[Path]]:
    """The arrow files that `load_dataset` leaves in its cache for a name on the hub."""
    # data/train.csv looks like a hub id, owner/name, but is a file that is missing.
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) or form_of(Path(path), source):
        raise UserError(f"{path or '(an empty path)'} does not exist; check the path")
    import huggingface_hub
    from datasets import load_dataset

    try:
        # Without a network load_dataset would retry for half a minute. With HF_HUB_OFFLINE it does
        # not try, and finds what an earlier call downloaded.
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            huggingface_hub.HfApi().dataset_info(path, timeout=10)
        for configuration in (f"{source}-{target}", f"{target}-{source}"):
            with contextlib.suppress(ValueError):  # there is no such configuration
                return cached_files(load_dataset(path, configuration), log)
        return cached_files(load_dataset(path), log)
    except Exception as error:
        raise UserError(
            f"{path} does not exist on disk, and the hub cannot be reached or does not have it "
            f"({type(error).__name__}: {short(error)}); HF_ENDPOINT=https://hf-mirror.com uses a "
            "mirror, HF_HUB_OFFLINE=1 an earlier download"
        ) from error
