"""Subword tokenizers: trained on the training text, saved where `AutoTokenizer.from_pretrained` finds them.

Byte-pair encoding (Sennrich et al. 2016) over characters; a character too rare for the vocabulary is spelled in its UTF-8
bytes, so nothing is ever unknown, and decoding gives the text back letter for letter.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from engine.errors import UserError
from engine.telemetry import progress
from text.cleaning import LONGEST_TOKEN

SPACE = "▁"  # U+2581, which stands for a space at the head of a word
CHARACTERS_AT_ONCE = (
    2**22
)  # of the lines that are encoded together; the library takes some hundred bytes for each
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Chinese is written without spaces: a run of Han characters is one "word" that merges may divide as they like. Digits stand
# alone, so that a number is copied figure by figure; so does every punctuation mark. An English word, in between, stays whole.
PIECES = r"▁?\p{Han}+|▁?\p{N}|▁?[^\p{L}\p{M}\p{N}▁]"


def train_tokenizer(lines: Iterable[str], vocabulary: int):
    """A `PreTrainedTokenizerFast` of at most `vocabulary` tokens, the 256 bytes and pad/bos/eos included."""
    from tokenizers import Tokenizer, decoders, models, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = own_pre_tokenizer()
    room = vocabulary - len(BYTES)
    lines = list(lines)
    # At least half of the room, less the three special tokens, is left for merges; rarer characters are spelled in bytes.
    alphabet = commonest_characters(lines, room // 2)
    trainer = trainers.BpeTrainer(
        vocab_size=room,
        limit_alphabet=len(alphabet),
        initial_alphabet=alphabet,
        min_frequency=2,
        max_token_length=LONGEST_TOKEN,
        special_tokens=[PAD, BOS, EOS],
        show_progress=not progress().disable,
    )
    tokenizer.train_from_iterator(lines, trainer, len(lines))

    # The trainer knows no bytes: put them behind the special tokens and move the rest up.
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

    Chosen here because the library would choose among equally rare ones by chance, and no two runs would be alike.
    """
    counts = Counter(chain.from_iterable(lines))
    counts.pop(" ", None)
    counts[SPACE] = len(lines) * 10**6  # more than any character's: always the first
    return sorted(counts, key=lambda character: (-counts[character], character))[: max(limit, 1)]


def own_pre_tokenizer():
    """Cuts a text at its spaces, each of which becomes the ▁ of the word behind it, then around each of `PIECES`."""
    from tokenizers import Regex, pre_tokenizers

    spaces = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    return pre_tokenizers.Sequence([spaces, pre_tokenizers.Split(Regex(PIECES), "isolated")])


def load_tokenizer(name: str):
    """Any tokenizer that `open_tokenizer` opens; it must have pad, begin and end tokens, with ids the model has."""
    tokenizer = open_tokenizer(name)
    for token, id in special_ids(tokenizer, name).items():
        # Where ids are left out, the highest can exceed the number of tokens, which is the size of the embedding.
        if id >= len(tokenizer):
            raise UserError(
                f"tokenizer {name}: its {token} token has the id {id}, but it has {len(tokenizer)} tokens; "
                "choose one that leaves no ids out"
            )
    return tokenizer


def open_tokenizer(name: str):
    """Any tokenizer that `AutoTokenizer` knows, from a folder or by name.

    Never one that brings its own code: left to itself, transformers would ask on standard input whether to run it.
    """
    import huggingface_hub
    from transformers import AutoTokenizer

    failure, is_folder = None, Path(name).is_dir()
    if not is_folder:
        try:
            huggingface_hub.HfApi().model_info(name, timeout=4)
        except Exception as error:
            failure = error
    try:
        # Without a network it would try again for minutes; told to stay offline, it looks into its cache.
        tokenizer = AutoTokenizer.from_pretrained(
            name, local_files_only=failure is not None, trust_remote_code=False
        )
    except (
        Exception
    ) as error:  # of damaged files the libraries make whatever error it happens to lead to
        missing = "no such folder, and it cannot be loaded from the hub"
        what = "no tokenizer can be read from this folder" if is_folder else missing
        raise UserError(
            f"tokenizer {name}: {what} ({' '.join(str(failure or error).split())[:200]})"
        ) from None
    return tokenizer


def tokenizer_key(name: str) -> str:
    """A hub name stands for itself, a folder for its content."""
    if not name or not Path(name).is_dir():
        return name
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(path for path in Path(name).iterdir() if path.is_file()):
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):  # weights may lie beside it
                digest.update(block)
    return digest.hexdigest()


def special_ids(tokenizer, name: str = "") -> dict[str, int]:
    """{"pad": …, "bos": …, "eos": …}. BERT's [CLS] and [SEP] count as begin and end. Raises `UserError` if one is missing."""
    ids = {
        "pad": tokenizer.pad_token_id,
        "bos": tokenizer.bos_token_id
        if tokenizer.bos_token_id is not None
        else tokenizer.cls_token_id,
        "eos": tokenizer.eos_token_id
        if tokenizer.eos_token_id is not None
        else tokenizer.sep_token_id,
    }
    missing = [key for key, value in ids.items() if value is None]
    if missing:
        raise UserError(
            f"tokenizer {name} has no {'/'.join(missing)} token; choose one that has pad, bos and eos"
        )
    return ids


def encode(tokenizer, lines: Sequence[str], longest: int | None = None) -> list[list[int]]:
    """Token ids of each line, without begin and end, at most `longest`; the Rust library encodes lines in parallel."""
    groups = groups_of(lines, CHARACTERS_AT_ONCE)
    return [ids[:longest] for group in groups for ids in encode_together(tokenizer, group)]


def groups_of(lines: Sequence[str], characters: int) -> Iterator[list[str]]:
    """Lists of lines of at most this many characters; a longer line is alone in its list."""
    group, size = [], 0
    for line in lines:
        if group and size + len(line) > characters:
            yield group
            group, size = [], 0
        group.append(line)
        size += len(line)
    if group:
        yield group


def encode_together(tokenizer, lines: list[str]) -> list[list[int]]:
    """The ids of lines that are encoded at once."""
    # No limit of the tokenizer's own: over-long sentences are counted and dropped in one place, never cut here.
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.backend_tokenizer.encode_special_tokens = True  # "<s>" in a text is text
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(lines, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]
    return tokenizer(lines, add_special_tokens=False, split_special_tokens=True, verbose=False)[
        "input_ids"
    ]


def decode(tokenizer, rows: Sequence[Sequence[int]]) -> list[str]:
    """The text of each row of ids; special tokens are left out."""
    if not rows:  # which transformers would take for one empty row
        return []
    return [
        " ".join(line.split()) for line in tokenizer.batch_decode(rows, skip_special_tokens=True)
    ]
