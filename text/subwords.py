"""Subword tokenizers, trained on the training text and saved for `AutoTokenizer.from_pretrained`.

Byte-pair encoding (Sennrich et al. 2016) over characters. A character too rare for the vocabulary
is spelled in its UTF-8 bytes, so nothing is ever unknown, and decoding gives the text back exactly.

    tokenizer = train_tokenizer(lines, 8000)
    encode(tokenizer, ["今天天气很好。"])         # [[1063, 894, 271]]
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from engine.errors import UserError
from text.cleaning import LONGEST_TOKEN
from text.rows import SIDES

# The special tokens: padding, and the begin and end of a sentence, which data.py adds.
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "▁"  # U+2581, which stands for a space at the head of a word
# Where a text is cut before merges are learned. Chinese has no spaces: a run of Han characters is
# one "word", which merges may divide as they like. Digits stand alone, so that numbers are copied
# figure by figure; so do punctuation marks. What is left between these is an English word.
PIECES = r"▁?\p{Han}+|▁?\p{N}|▁?[^\p{L}\p{M}\p{N}▁]"
# Words and characters that hardly any vocabulary has.
UNUSUAL = ["qzxjvkw", "𪚥", "🜲"]
# Of the lines that are encoded together; the library takes some hundred bytes for each.
CHARACTERS_AT_ONCE = 2**22


def train_tokenizer(lines: Iterable[str], vocabulary: int):
    """A `PreTrainedTokenizerFast` of at most `vocabulary` tokens.

    They include the 256 bytes, pad, bos and eos.
    """
    from tokenizers import Tokenizer, decoders, models, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = own_pre_tokenizer()
    room = vocabulary - len(BYTES)
    lines = list(lines)
    # At least half of the room is left for merges; rarer characters are spelled in bytes.
    alphabet = commonest_characters(lines, room // 2)
    trainer = trainers.BpeTrainer(
        vocab_size=room,
        limit_alphabet=len(alphabet),
        initial_alphabet=alphabet,
        min_frequency=2,
        max_token_length=LONGEST_TOKEN,
        special_tokens=[PAD, BOS, EOS],
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(lines, trainer, len(lines))

    # The trainer knows no bytes: put them after the special tokens and move the rest up.
    learned = json.loads(tokenizer.to_str())["model"]
    order = sorted(learned["vocab"], key=learned["vocab"].get)
    order = order[:3] + BYTES + order[3:]  # 3: pad, bos, eos
    merges = [tuple(merge) for merge in learned["merges"]]
    vocab = {token: index for index, token in enumerate(order)}
    tokenizer.model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True)
    # Bytes become characters first, then ▁ becomes a space again.
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def commonest_characters(lines: list[str], limit: int) -> list[str]:
    """The `limit` most frequent characters; the sign for the space is one of them.

    The library would choose among equally rare ones by chance, and no two runs would be alike.
    """
    counts = Counter(chain.from_iterable(lines))
    counts.pop(" ", None)
    counts[SPACE] = len(lines) * 10**6  # more than any character's: always the first
    commonest = sorted(counts, key=lambda character: (-counts[character], character))
    return commonest[: max(limit, 1)]


def own_pre_tokenizer():
    """Cuts a text before each space, which becomes a ▁, then around each of `PIECES`."""
    from tokenizers import Regex, pre_tokenizers

    spaces = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    return pre_tokenizers.Sequence([spaces, pre_tokenizers.Split(Regex(PIECES), "isolated")])


def load_tokenizer(name: str):
    """Any tokenizer that `AutoTokenizer` knows, from a folder or by name.

    Code that comes with a tokenizer is never run. Raises `UserError` if it cannot be read, or lacks
    a pad, begin or end token.
    """
    import huggingface_hub
    from transformers import AutoTokenizer

    is_folder = Path(name).is_dir()
    failure = None
    if not is_folder:
        try:
            huggingface_hub.HfApi().model_info(name, timeout=4)
        except Exception as error:
            failure = error
    try:
        # Without a network it would retry for minutes; local_files_only looks into the cache.
        # trust_remote_code=False: by default it would ask on standard input.
        tokenizer = AutoTokenizer.from_pretrained(
            name, local_files_only=failure is not None, trust_remote_code=False
        )
    except Exception as error:  # of damaged files the libraries raise what they happen to meet
        what = "no such folder, and it cannot be loaded from the hub"
        remedy = "; if the hub is out of reach, set HF_ENDPOINT=https://hf-mirror.com, a mirror"
        if is_folder:
            what = "no tokenizer can be read from this folder"
            remedy = ""
        reason = " ".join(str(failure or error).split())[:200]
        raise UserError(f"tokenizer {name}: {what} ({reason}){remedy}") from None
    for token, id in special_ids(tokenizer, name).items():
        # If ids are left out, the highest can exceed the number of tokens, which is the size of
        # the embedding.
        if id >= len(tokenizer):
            raise UserError(
                f"tokenizer {name}: its {token} token has the id {id}, but it has {len(tokenizer)} "
                "tokens; choose one that leaves no ids out"
            )
    try:
        encode(tokenizer, UNUSUAL)
    except Exception as error:  # the library has no class for it
        raise UserError(
            f"tokenizer {name} cannot encode every text ({error}); choose one with an unknown token"
        ) from None
    return tokenizer


def load_tokenizers(name: str) -> dict:
    """The tokenizer of each side: `name` is the folder `tokenizer` of a run, or one for both."""
    sides = {side: Path(name) / side for side in SIDES}
    if all(folder.is_dir() for folder in sides.values()):
        return {side: load_tokenizer(str(folder)) for side, folder in sides.items()}
    return dict.fromkeys(SIDES, load_tokenizer(name))


def tokenizer_key(name: str) -> str:
    """A hub name stands for itself, a folder for its content."""
    if not name or not Path(name).is_dir():
        return name
    digest = hashlib.blake2b(digest_size=8)
    files = [path for path in Path(name).rglob("*") if path.is_file()]  # of both sides
    for file in sorted(files):
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):  # weights may lie beside it
                digest.update(block)
    return digest.hexdigest()


def special_ids(tokenizer, name: str = "") -> dict[str, int]:
    """{"pad": …, "bos": …, "eos": …}. Raises `UserError` if one is missing.

    BERT's [CLS] and [SEP] count as begin and end.
    """
    ids = {
        "pad": tokenizer.pad_token_id,
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
    }
    if ids["bos"] is None:
        ids["bos"] = tokenizer.cls_token_id
    if ids["eos"] is None:
        ids["eos"] = tokenizer.sep_token_id
    missing = [token for token, id in ids.items() if id is None]
    if missing:
        raise UserError(
            f"tokenizer {name} has no {'/'.join(missing)} token; "
            "choose one that has pad, bos and eos"
        )
    return ids


def encode(tokenizer, lines: Sequence[str], longest: int | None = None) -> list[list[int]]:
    """Token ids of each line, without begin and end, at most `longest`."""
    encoded = []
    for group in groups_of(lines, CHARACTERS_AT_ONCE):
        encoded += encode_batch(tokenizer, group)
    return [ids[:longest] for ids in encoded]


def groups_of(lines: Sequence[str], characters: int) -> Iterator[list[str]]:
    """Lists of lines of at most this many characters; a longer line is alone in its list."""
    group: list[str] = []
    size = 0
    for line in lines:
        if group and size + len(line) > characters:
            yield group
            group, size = [], 0
        group.append(line)
        size += len(line)
    if group:
        yield group


def encode_batch(tokenizer, lines: list[str]) -> list[list[int]]:
    """The ids of lines that are encoded at once, in parallel by the Rust library."""
    if not tokenizer.is_fast:
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return tokenizer(lines, **options)["input_ids"]
    backend = tokenizer.backend_tokenizer
    # Over-long sentences are counted and dropped in data.py, never cut by the tokenizer.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # "<s>" in a text is text
    return [encoding.ids for encoding in backend.encode_batch_fast(lines, add_special_tokens=False)]


def decode(tokenizer, rows: Sequence[Sequence[int]]) -> list[str]:
    """The text of each row of ids; special tokens are left out."""
    if not rows:  # transformers would take it for one empty row
        return []
    lines = tokenizer.batch_decode(rows, skip_special_tokens=True)
    return [" ".join(line.split()) for line in lines]
