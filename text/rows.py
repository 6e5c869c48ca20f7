"""Find parallel text on disk, whatever its form, and stream its rows in flat memory.

    >>> from text.rows import default_path, find_text
    >>> text = find_text(default_path())
    >>> first_chunk = next(text.rows("train"))     # [("你好。", "Hello."), …], at most 10,000 pairs

Accepted without a flag: a directory of parquet, arrow, json, csv or tsv shards as `datasets.load_dataset` would read
it, a directory written by `save_to_disk`, one such file, or a hub id such as `wmt/wmt19`. A row holds the two texts as
`{"translation": {"zh": …, "en": …}}` or flat as `{"zh": …, "en": …}` (csv and tsv: flat only); other columns are left
alone, and a null becomes "". Also pairs of files, one a language: Moses's `train.zh` and `train.en`, and WMT's test sets,
`X-src.zh.sgm` and `X-ref.en.sgm` or one `.xml`. What the user can correct (a wrong path, a damaged file, …) raises a
one-line `UserError`.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UserError
from text.formats import read_chunks, short

# What the name of a Chinese column may hold: the code of the language or of the country, its name in English or in itself.
CHINESE = re.compile("(.*[^a-z])?(zh|chinese|cmn|cn(?![a-z]))|.*[中汉漢]")
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
    ".xml": "xml",
}
PAIRED = ("sgm", "moses")  # forms of two files
# Of a directory with several forms the first is read. sgm and xml are those of WMT's test sets, beside a corpus in another.
# A json file beside a corpus in yet another form mostly tells of it.
ORDER = ("parquet", "arrow", "csv", "tsv", "moses", "json", "sgm", "xml")
SAMPLE = Path(__file__).resolve().parents[1] / "sample"
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
NOT_DATA = {
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
}


@dataclass(frozen=True)
class ParallelText:
    """What `find_text` found: the files of each split and how to read them."""

    path: str  # as the user gave it
    form: str  # "parquet", "arrow", "save_to_disk", "json", "csv", "tsv", "xml", "sgm", "moses" or "hub"
    source: str  # "zh"
    target: str  # "en"
    files: dict[
        str, list[Path]
    ]  # split → its shards in order; of a paired form source, target, source, …

    def rows(self, split: str) -> Iterator[list[tuple[str, str]]]:
        """All (source, target) pairs of a split, file by file, in chunks of at most 10,000; UserError on a bad row."""
        if split not in self.files:
            raise UserError(
                f"{self.path} has no {split} split; add a file with {split} in its name"
            )
        files = self.files[split]
        together = 2 if self.form in PAIRED else 1
        for first in range(0, len(files), together):
            yield from read_chunks(
                self.form, files[first : first + together], self.source, self.target
            )

    def fingerprint(self) -> str:
        """Hex hash of all files' names and content: the same for a copy in another folder; any changed byte shows."""
        digest = hashlib.blake2b(digest_size=16)
        for split, files in self.files.items():
            for file in files:
                digest.update(
                    repr((self.form, self.source, self.target, split, file.name)).encode()
                )
                # The size keeps apart two files whose bytes, one after the other, are the same.
                digest.update(str(file.stat().st_size).encode() + b"\n")
                with file.open("rb") as stream:
                    while block := stream.read(1 << 22):
                        digest.update(block)
        return digest.hexdigest()


def default_path() -> str:
    """The course's `/opt/minidataset` where it exists, else the repository's own `sample/`."""
    course = "/opt/minidataset"
    return course if os.path.isdir(course) else str(SAMPLE)


def sample_notice(path: str) -> str:
    """For the log and the card: what a score on the bundled sample is worth; "" of all other data."""
    if Path(os.path.realpath(os.path.expanduser(path))).is_relative_to(SAMPLE):
        return "bundled sample, not WMT19: this score says only that the program works"
    return ""


def find_text(path: str, source: str = "zh", target: str = "en") -> ParallelText:
    """Look at what is at `path`, sort its files into splits and check the first rows of each; UserError if unusable."""
    path = os.fspath(path)
    root = Path(os.path.expanduser(path))
    if not path or not os.path.exists(root):
        form, files = "hub", _hub_files(path, source, target)
    elif root.is_file():
        form, files = _form_of(root, source), _split_files([(root.name, root)])
        if form is None:
            ends = f"{' '.join(FORMS)}, -src.{source}.sgm or .{source}"
            raise UserError(
                f"{path} is not a known type of file; its name must end in one of {ends}"
            )
    elif os.path.exists(root / "dataset_dict.json") or os.path.exists(root / "state.json"):
        form, files = "save_to_disk", _saved_files(root)
    else:
        form, files = _directory_files(root, source)
    if form in PAIRED:
        files = {
            split: [part for file in shards for part in (file, _partner(file, source, target))]
            for split, shards in files.items()
        }
    for file in (file for shards in files.values() for file in shards):
        # os.path.exists, not Path.exists: in a closed folder it says no instead of raising PermissionError.
        if not os.path.exists(file) or os.path.getsize(file) == 0:
            state = "empty (0 bytes)" if os.path.exists(file) else "missing"
            raise UserError(f"{file} is {state}; get it again or remove it")
    text = ParallelText(path, form, source, target, files)
    for split in files:
        # Wrong columns in the last split are an error now, not after an hour of reading the first.
        refuse_swapped(text, next(text.rows(split), []))
    return text


def refuse_swapped(text: ParallelText, rows: list[tuple[str, str]]) -> None:
    """Raises `UserError` if the column that is called Chinese is not, and the other one is. Chinese has its own characters."""
    chinese = [bool(CHINESE.match(name.lower())) for name in (text.source, text.target)]
    if sum(chinese) == 1 and rows:
        shares = [
            sum(bool(re.search("[\u4e00-\u9fff]", line)) for line in side) / len(rows)
            for side in zip(*rows)
        ]
        there, elsewhere = shares if chinese[0] else shares[::-1]
        if there < 0.5 < elsewhere:
            name, other = (text.source, text.target) if chinese[0] else (text.target, text.source)
            raise UserError(
                f"the languages are swapped: {elsewhere:.0%} of the texts under {other!r} are Chinese, "
                f"{there:.0%} of those under {name!r}; exchange the names in {text.path}"
            )


def fingerprint_of(rows: list[tuple[str, str]]) -> str:
    """A hash of all texts, in order: equal scores are of equal rows."""
    return hashlib.blake2b("".join(map(repr, rows)).encode(), digest_size=4).hexdigest()


# Which files, and which split each belongs to.


def _form_of(file: Path, source: str) -> str | None:
    """By its name; of two files that belong together the one with the sources stands for both."""
    if file.name.endswith(f"-src.{source}.sgm"):
        return "sgm"
    return FORMS.get(file.suffix.lower()) or ("moses" if file.suffix == f".{source}" else None)


def _partner(file: Path, source: str, target: str) -> Path:
    """Where the translations of a file of sources lie: train.zh → train.en, X-src.zh.sgm → X-ref.en.sgm."""
    if file.suffix == ".sgm":
        return file.with_name(f"{file.name.removesuffix(f'src.{source}.sgm')}ref.{target}.sgm")
    return file.with_suffix(f".{target}")


def _directory_files(root: Path, source: str) -> tuple[str, dict[str, list[Path]]]:
    def stop(error: OSError):
        raise UserError(f"cannot list {error.filename}: {error.strerror}; check its permissions")

    by_form: dict[str, list[tuple[str, Path]]] = {}
    packed: dict[str, Path] = {}
    for folder, subfolders, names in os.walk(root, onerror=stop, followlinks=True):
        visible = [name for name in subfolders if not name.startswith(".")]
        subfolders[:] = [name for name in visible if not _leads_back(root, Path(folder, name))]
        for file in (
            Path(folder, name)
            for name in names
            if not name.startswith(".") and name not in NOT_DATA
        ):
            unpacked = file.with_suffix("")
            if (
                file.suffix in PACKED
                and (form := _form_of(unpacked, source))
                and not unpacked.exists()
            ):
                packed[form] = file
            if form := _form_of(file, source):
                by_form.setdefault(form, []).append((str(file.relative_to(root)), file))
    form = next((form for form in ORDER if form in (by_form or packed)), None)
    if form in packed:
        raise UserError(f"{packed[form]} is compressed; unpack it first")
    if packed:
        print(f"not read, because compressed: {short(', '.join(map(str, packed.values())))}")
    if not form:
        raise UserError(
            f"{root} holds no parquet, arrow, json, csv or tsv file, nor one ending in .{source} beside its "
            "translation; point to the directory of the shards"
        )
    if len(by_form) > 1:
        print(f"{root} holds {', '.join(sorted(by_form))} files; only the {form} files are read")
    return form, _split_files(sorted(by_form[form], key=lambda named: _natural(named[0])))


def _leads_back(root: Path, folder: Path) -> bool:
    """Whether this is a link to a folder that it lies in: following it would read every file again and again."""
    if not folder.is_symlink():
        return False
    above = [
        Path(os.path.realpath(parent)) for parent in folder.parents if parent.is_relative_to(root)
    ]
    return any(parent.is_relative_to(os.path.realpath(folder)) for parent in above)


def _natural(name: str) -> list:
    """For sorting: part-2 before part-10. Odd places hold the numbers, so that an int never meets a str."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", name))]


def _split_of(name: str) -> str | None:
    # Chinese has no spaces: 中英训练集 is not one word.
    words = re.findall("[^\\W\\d_\u4e00-\u9fff]+|训练|訓練|验证|驗證|测试|測試", name.lower())
    words = {re.sub("(data)?(set)?$", "", word) for word in words}  # testset, traindata
    splits = [split for split, keywords in KEYWORDS.items() if words & {*keywords}]
    return splits[0] if len(splits) == 1 else None  # "train-test-corpus" says nothing


def _split_files(named: list[tuple[str, Path]]) -> dict[str, list[Path]]:
    """Sort (name, file) into splits by the keyword in the file's name, else in a folder's, the nearest first."""
    splits: dict[str | None, list[Path]] = {split: [] for split in (*KEYWORDS, None)}
    for name, file in named:
        *folders, last = Path(name).parts
        of_parts = [_split_of(part) for part in (last, *reversed(folders))]
        splits[next((split for split in of_parts if split), None)].append(file)
    unnamed = splits.pop(None)
    if not splits["train"]:
        splits["train"] = unnamed
        if len(unnamed) > 1:  # a newstest2019 may be among them
            names = short(", ".join(file.name for file in unnamed))
            print(f"no file's name contains train, so all are read as train: {names}")
    elif unnamed:
        # As load_dataset does: next to train.csv, a newstest2019.csv must not end up among the training pairs.
        names = short(", ".join(str(file) for file in unnamed))
        print(
            f"not read, because their names contain no split (train, validation or test): {names}"
        )
    return {split: files for split, files in splits.items() if files}


def _saved_files(root: Path) -> dict[str, list[Path]]:
    try:
        named, listed = [], root / "dataset_dict.json"
        folders = (
            json.loads(listed.read_text(encoding="utf-8"))["splits"] if listed.exists() else [""]
        )
        for folder in folders:
            state = json.loads((root / folder / "state.json").read_text(encoding="utf-8"))
            name = folder or state.get("_split") or "data"
            named += [(name, root / folder / shard["filename"]) for shard in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{root} was not fully written by save_to_disk: {short(error)}; save it again"
        ) from error
    return _split_files(named)


def _hub_files(path: str, source: str, target: str) -> dict[str, list[Path]]:
    # data/train.csv looks like a hub id, owner/name, but is a file that is missing.
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) or _form_of(Path(path), source):
        raise UserError(f"{path or '(an empty path)'} does not exist; check the path")
    import datasets
    import huggingface_hub

    failure = None
    try:
        huggingface_hub.HfApi().dataset_info(path, timeout=10)
    except Exception as error:
        failure = error
    # Without a network load_dataset would retry for half a minute; told to stay offline, it looks into its cache.
    with _offline() if failure else contextlib.nullcontext():
        for config in (f"{source}-{target}", f"{target}-{source}", None):
            try:
                splits = datasets.load_dataset(path, config)
                shards = [
                    (split, shard) for split, rows in splits.items() for shard in rows.cache_files
                ]
                return _split_files([(split, Path(shard["filename"])) for split, shard in shards])
            except Exception as error:
                # A ValueError: there is no such config.
                if config is None or not isinstance(error, ValueError):
                    failure = failure or error
                    break
    reason = f"{type(failure).__name__}: {short(failure)}"
    raise UserError(
        f"{path} does not exist on disk, and the hub cannot be reached or does not have it ({reason})"
    )


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Inside, `datasets` and `huggingface_hub` send no request; afterwards they do as before."""
    import datasets
    import huggingface_hub

    holders = (datasets.config, huggingface_hub.constants)
    before = [holder.HF_HUB_OFFLINE for holder in holders]
    for holder in holders:
        holder.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder.HF_HUB_OFFLINE = value
