"""Any text comes back exactly, from tokenizers of any size; nothing is cut or unknown."""

import json
from string import ascii_lowercase

import numpy as np
import pytest
import regex
from conftest import reversed_digits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.errors import UserError
from text import subwords
from text.cleaning import LONGEST_TOKEN, normalise
from text.subwords import (
    BOS,
    BYTES,
    EOS,
    PAD,
    commonest_characters,
    decode,
    encode,
    load_tokenizer,
    special_ids,
    train_tokenizer,
)

LINES = [text for pair in reversed_digits(300) for text in pair]
LINES += [
    "今天天气怎么样？",
    "价格是1998元，2024年涨到2024元。",
    "It's 2024, isn't it? <s> 50% of 1998…",
] * 5
LINES += ["internationalisationalism in internationalisationalism"] * 20
# Every script and symbol, with what could be taken for a token of our own.
TRAPS = [" ", *"<s> </s> <pad> <unk> <0x41> ▁ ▁▁ 1998 it's 👨\u200d👩\u200d👧 \0 �".split()]
any_text = st.lists(st.text(st.characters(), max_size=8) | st.sampled_from(TRAPS)).map("".join)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES, 600)


def round_trip(tokenizer, texts: list[str]) -> list[str]:
    return decode(tokenizer, encode(tokenizer, texts))


# ---------------------------------------------------------------- our own tokenizers


@settings(deadline=None, max_examples=100)
@given(any_text)
@example("a<s>b</s> <pad>")
@example("▁▂▃ x ▁ y")
@example("tokens such as <0xE4><0xBD> are letters")
@example("क्षि e\u0301 ไทย 한국어 עברית 𝒳 \U0010ffff")
def test_any_text_comes_back(tokenizer, text):
    ids = encode(tokenizer, [normalise(text)])[0]
    assert decode(tokenizer, [ids]) == [normalise(text)]
    # No special token stands in a text, whatever its letters.
    assert not set(ids) & set(special_ids(tokenizer).values())
    assert all(0 <= id < len(tokenizer) for id in ids)


@pytest.mark.parametrize("vocabulary", [300, 5000])
def test_the_size_is_a_bound(vocabulary):
    small = train_tokenizer(LINES, vocabulary)
    assert 3 + 256 < len(small) <= vocabulary
    assert len(small) == vocabulary or vocabulary == 5000  # so much text has no 5,000 pieces
    assert sorted(small.get_vocab().values()) == list(range(len(small)))
    assert round_trip(small, LINES) == LINES
    # Half of what is free is left for merges.
    single = [token for token in small.get_vocab() if len(token) == 1]
    assert len(single) <= max((vocabulary - 256) // 2, 1)


@pytest.mark.parametrize("lines", [[], [""], ["a"], [ascii_lowercase * 9 + " a"], ["好" * 50]])
def test_small_texts(lines):
    small = train_tokenizer(lines, 8000)
    assert 3 + 256 <= len(small) <= 320
    assert round_trip(small, ["", "好 a1", *lines]) == ["", "好 a1", *lines]


def test_digits_stand_alone(tokenizer):
    learned = [token for token in tokenizer.get_vocab() if token not in BYTES]
    with_digit = [token for token in learned if regex.search(r"\p{N}", token)]
    assert with_digit and all(len(token.removeprefix("▁")) == 1 for token in with_digit)
    tokens = tokenizer.convert_ids_to_tokens(encode(tokenizer, ["价格是1998元 2024"])[0])
    assert [token for token in tokens if token.strip("▁").isdigit()] == "1 9 9 8 ▁2 0 2 4".split()
    # Punctuation likewise: "2024," and "2024" begin alike.
    with_mark = [
        token for token in learned if regex.search(r"\p{P}", token) and token not in (PAD, BOS, EOS)
    ]
    assert with_mark and all(len(token.removeprefix("▁")) <= 1 for token in with_mark)


def test_words_are_learned_and_none_is_too_long(tokenizer, monkeypatch):
    learned = [token for token in tokenizer.get_vocab() if token not in BYTES]
    assert max(map(len, learned)) <= LONGEST_TOKEN == 16  # cleaning counts on it
    monkeypatch.setattr(subwords, "LONGEST_TOKEN", 100)
    # Only the bound prevented it.
    assert "▁internationalisationalism" in train_tokenizer(LINES, 600).get_vocab()
    assert "▁three" in learned and "天气" in "".join(token for token in learned if len(token) > 1)
    assert len(encode(tokenizer, ["three four five"])[0]) == 3


def test_training_is_deterministic():
    # Each once: the library would draw lots.
    lines = [chr(0x4E00 + number) + "a" for number in range(3000)]
    first, second = (train_tokenizer(iter(lines), 600).backend_tokenizer.to_str() for _ in range(2))
    assert first == second
    assert commonest_characters(["bca a", "b"], 3) == ["▁", "a", "b"]
    assert commonest_characters([], 5) == ["▁"]


def test_saved_and_loaded_by_transformers(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    texts = [*LINES, "鸞 <s> 👨\u200d👩\u200d👧 don't , 1998", ""]
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        assert encode(loaded, texts) == encode(tokenizer, texts)
        assert round_trip(loaded, texts) == texts
        assert special_ids(loaded) == special_ids(tokenizer) and len(loaded) == len(tokenizer)
    # As transformers itself would encode it, begin and end left out.
    plain = AutoTokenizer.from_pretrained(tmp_path)(LINES[:50], add_special_tokens=False)
    assert plain["input_ids"] == encode(tokenizer, LINES[:50])


# ---------------------------------------------------------------- special tokens


BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "今", "天", "weather", "##s", "the"]


@pytest.fixture
def bert(tmp_path):
    """A WordPiece tokenizer as BERT's, which calls begin and end [CLS] and [SEP]."""
    from transformers import BertTokenizerFast

    folder = tmp_path / "bert"
    ids = {token: index for index, token in enumerate(BERT)}
    BertTokenizerFast(vocab=ids).save_pretrained(folder)
    return load_tokenizer(str(folder))


def test_bert_tokens_count_as_begin_and_end(bert):
    assert bert.bos_token_id is None and bert.eos_token_id is None
    assert special_ids(bert) == {"pad": 0, "bos": 2, "eos": 3}
    words = ("今", "天", "the", "weather", "##s")
    assert encode(bert, ["今天 the weathers"]) == [[BERT.index(word) for word in words]]
    # These letters in a text begin and end nothing.
    assert not {2, 3} & set(encode(bert, ["[CLS] the [SEP]"])[0])
    assert decode(bert, [[2, 9, 7, 8, 3, 0]]) == ["the weathers"]


@pytest.mark.parametrize("unknown", [None, "[UNK]"])
def test_a_tokenizer_that_stops_at_unknown_words_is_refused(tmp_path, unknown):
    vocabulary = {word: id for id, word in enumerate(["[UNK]", PAD, BOS, EOS, "one", "two"])}
    if unknown is None:
        del vocabulary["[UNK]"]
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=unknown)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(tmp_path)
    if unknown:
        assert encode(load_tokenizer(str(tmp_path)), ["one three"]) == [[4, 0]]
        return
    with pytest.raises(UserError, match=r"cannot encode every text .*; choose one with an unknown"):
        load_tokenizer(str(tmp_path))


def test_a_special_id_beyond_the_number_of_tokens_is_refused(tmp_path):
    from transformers import BertTokenizerFast

    folder = tmp_path / "holes"
    ids = {token: index for index, token in enumerate(BERT)}
    ids["[SEP]"] = len(BERT)  # 11 ids, of which 3 is no token's
    BertTokenizerFast(vocab=ids).save_pretrained(folder)
    with pytest.raises(UserError, match="eos token has the id 10, but it has 10 tokens; choose"):
        load_tokenizer(str(folder))


# ---------------------------------------------------------------- nothing is cut


def test_long_lines_are_encoded_in_groups_and_cut(tokenizer, monkeypatch):
    lines = ["一二三 four", "", "五" * 50, "four five", "一"]
    plain = encode(tokenizer, lines)
    monkeypatch.setattr(subwords, "CHARACTERS_AT_ONCE", 12)
    assert encode(tokenizer, lines) == plain and encode(tokenizer, []) == []
    assert encode(tokenizer, lines, 3) == [ids[:3] for ids in plain]


@pytest.mark.parametrize("which", ["own", "bert"])
def test_nothing_is_truncated_or_padded(tmp_path, bert, capfd, which):
    loaded = train_tokenizer(LINES, 300) if which == "own" else bert
    text = "the " * 100
    whole = encode(loaded, [text, "the"])
    loaded.model_max_length = 8
    loaded.backend_tokenizer.enable_truncation(4)
    loaded.backend_tokenizer.enable_padding(length=16)
    assert encode(loaded, [text, "the"]) == whole and len(whole[0]) >= 100 and len(whole[1]) < 16
    # A call sets the same from outside.
    loaded(["the the"], truncation=True, padding="max_length", max_length=5)
    assert encode(loaded, [text, "the"]) == whole
    loaded.save_pretrained(tmp_path / "small")
    settings = json.loads((tmp_path / "small" / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 8
    assert encode(load_tokenizer(str(tmp_path / "small")), [text, "the"]) == whole
    assert "longer than" not in capfd.readouterr().err


# ---------------------------------------------------------------- mistakes


def test_a_tokenizer_that_brings_code_is_refused_without_a_question(tmp_path, monkeypatch):
    train_tokenizer(["一二三 four five"] * 20, 300).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["code.Planted", "code.Planted"]}
    settings["tokenizer_class"] = "Planted"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    hacked = str(tmp_path / "hacked")
    (tmp_path / "code.py").write_text(f"open({hacked!r}, 'w')\nclass Planted: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(UserError, match="no tokenizer can be read"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "hacked").exists()


def test_any_damage_to_a_tokenizer_is_one_line(tmp_path):
    train_tokenizer(["一二三 four five"] * 20, 300).save_pretrained(tmp_path)
    content, random = (tmp_path / "tokenizer.json").read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(20):
        spoiled = bytearray(content)
        spoiled[random.integers(len(content))] ^= 1 << random.integers(8)
        (tmp_path / "tokenizer.json").write_bytes(spoiled)
        try:
            load_tokenizer(str(tmp_path))
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 2  # the others changed a letter of a token


def test_no_tokenizer_there(tmp_path):
    with pytest.raises(
        UserError, match=r"tokenizer .*none: no such folder, and it cannot be loaded from the hub"
    ):
        load_tokenizer(str(tmp_path / "none"))
