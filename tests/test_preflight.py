"""`--check` finds what would spoil a run, and says what it costs."""

import json
import re
import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from conftest import in_this_process, reversed_digits, write_pairs
from test_train import config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data import Collate
from engine.errors import UserError
from text.reading import find_text
from tools.reporting import masks, preflight

SPLITS = {"train": slice(200, None), "validation": slice(100), "test": slice(100, 200)}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def _short(monkeypatch, tmp_path):
    """One step, in a folder without runs, on a machine without GPUs."""
    monkeypatch.setattr(preflight, "SECONDS", 0.0)
    monkeypatch.setattr(preflight, "hidden_gpus", lambda: None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pairs():
    return reversed_digits(700)


def warnings(capsys, data, **flags) -> list[str]:
    preflight.check(config(data=str(data), **flags))
    lines = capsys.readouterr().out.splitlines()
    found = [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
    assert lines[-1].startswith(f"check: this would run; {len(found) or 'no'} warning")
    return found


def word_tokenizer(folder, pairs, unknown: str) -> str:
    """Of whole Chinese numbers and English words, but not of this one."""
    words = {word for pair in pairs for word in " ".join(pair).split()} - {unknown}
    ids = {word: n for n, word in enumerate(["<unk>", "<s>", *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(ids, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(unk_token="<unk>", bos_token="<s>", eos_token="<s>", pad_token="<s>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return str(folder)


def test_good_data_gives_no_warning_and_the_costs_of_the_run(tmp_path, pairs, capsys):
    data = str(write_pairs(tmp_path / "x", pairs, SPLITS))
    preflight.check(config(data=data, tokens_per_batch=512, epochs=3, max_steps=0))
    out = capsys.readouterr().out
    assert "(json), 500 training pairs" in out and "check: this would run; no warnings" in out
    steps, total = re.search(r"([\d,]+) steps per epoch[^$]*for ([\d,]+) steps", out).groups()
    assert int(total) == 3 * int(steps) and 8 <= int(steps) <= 16  # about 10 tokens a side and pair
    assert not (tmp_path / "runs").exists()


WARNED = {  # name → what is done to the pairs, the splits, flags, the only warning
    "no validation split": (
        lambda p: p,
        {"train": slice(200, None), "test": slice(200)},
        {},
        "there is no validation",
    ),
    "30 % duplicates": (
        lambda p: p + p[200:414],
        SPLITS,
        {},
        "30% of the training pairs are dropped: exact duplicates",
    ),
    "sentences too long": (
        lambda p: p[:600] + [(a * 9, b * 9) for a, b in p[600:]],
        SPLITS,
        {"max_length": 32},
        "20% of the training pairs are dropped: longer than --max_length",
    ),
    "no Chinese": (
        lambda p: p[:600] + [("x" + b, b) for _, b in p[600:]],
        SPLITS,
        {},
        "20% of the texts under 'zh' have no",
    ),
    "too few minutes": (
        lambda p: p,
        SPLITS,
        {"max_minutes": 1e-9},
        "--max_minutes 1e-09 end before the first epoch",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_warns_of(name, tmp_path, pairs, capsys):
    spoil, splits, flags, said = WARNED[name]
    found = warnings(capsys, write_pairs(tmp_path / "x", spoil(pairs), splits), **flags)
    assert len(found) == 1 and found[0].startswith(said), found


@pytest.mark.parametrize("repeated, warned", [(9, 0), (11, 1)])  # beside 500: 1.8 and 2.2 %
def test_two_percent_are_worth_a_warning(repeated, warned, tmp_path, pairs, capsys):
    data = write_pairs(tmp_path / "x", pairs + pairs[200 : 200 + repeated], SPLITS)
    assert len(warnings(capsys, data)) == warned


@pytest.mark.parametrize(("sample", "least", "most"), [(50, 50, 100), (700, 500, 500)])
def test_a_large_data_set_is_looked_at_in_part(
    sample, least, most, tmp_path, pairs, capsys, monkeypatch
):
    """Of 2,800 rows 1,000 are read, with 500 distinct ones, of which at most two samples are tokenised."""
    monkeypatch.setattr(preflight, "ROWS", 1000)
    monkeypatch.setattr(preflight, "SAMPLE", sample)
    rows = [
        row
        for n in range(0, 500, 10)
        for row in pairs[200 + n : 210 + n] + pairs[200 + n : 204 + n]
    ]
    data = write_pairs(tmp_path / "x", pairs[:200] + rows * 4, SPLITS)
    taken = []
    real = preflight.prepare
    monkeypatch.setattr(
        preflight, "prepare", lambda text, *a, **k: taken.append(text.taken) or real(text, *a, **k)
    )
    found = warnings(capsys, data)
    assert len(found) == 1 and re.match(r"50% .* exact duplicates", found[0]), found
    assert least <= len(taken[0]["train"]) <= most and len(set(taken[0]["train"])) == len(
        taken[0]["train"]
    )


ENDED = {  # name → what is done to the pairs, flags, what the line says
    "languages swapped": (
        lambda p: [(b, a) for a, b in p],
        {},
        "swapped: 100% of the texts under 'en' are Chinese",
    ),
    "everything too long": (
        lambda p: [(a * 40, b * 40) for a, b in p],
        {"max_length": 16},
        "0 training pairs left",
    ),
}


@pytest.mark.parametrize("name", ENDED)
def test_ends_with_a_line_for(name, tmp_path, pairs):
    spoil, flags, said = ENDED[name]
    with pytest.raises(UserError, match=said):
        preflight.check(
            config(data=str(write_pairs(tmp_path / "x", spoil(pairs), SPLITS)), **flags)
        )


def test_swapped_languages_by_other_names_of_chinese(tmp_path, pairs):
    rows = [{"中文": target, "en": source} for source, target in pairs]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(UserError, match="swapped: 100% of the texts under 'en' are Chinese"):
        preflight.check(config(data=str(tmp_path / "train.jsonl"), source="中文"))


def test_a_run_that_is_there(tmp_path):
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/config.json").touch()
    with pytest.raises(UserError, match="run runs/a exists; choose another --run"):
        preflight.check(config(run="a"))


def test_rows_of_json_are_as_long_as_they_are_written(tmp_path, pairs):
    """Names of columns and escaped characters included: of 300 rows the whole is reckoned."""
    rows = [json.dumps({"translation": {"zh": source, "en": target}}) for source, target in pairs]
    (tmp_path / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    text = find_text(str(tmp_path / "train.jsonl"))
    assert preflight.rows_in(text, pairs[:300], 300) == pytest.approx(700, rel=0.03)


def test_a_full_disk(tmp_path, pairs, monkeypatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: Usage(2**40, 2**40, 2**20))
    with pytest.raises(UserError, match=r"0\.0 GiB free, the run needs about 0\.[1-9]"):
        preflight.check(config(data=str(write_pairs(tmp_path / "x", pairs, SPLITS)), d_model=512))


def test_a_budget_that_does_not_fit_the_memory(toy_data, monkeypatch):
    if not preflight.forget_peak():
        pytest.skip(
            "this system does not tell what a step needs, only the most that there ever was"
        )
    sizes = dict(d_model=512, dim_feedforward=4096, data=str(toy_data))
    monkeypatch.setattr(
        preflight, "memory_limit", lambda device: preflight.peak_of(lambda: None) + 0.6
    )
    preflight.check(config(**sizes, tokens_per_batch=64))
    preflight.check(config(**sizes, tokens_per_batch=100_000, accumulate=16))
    with pytest.raises(UserError, match=r"GiB of memory.*--tokens_per_batch"):
        preflight.check(config(**sizes, tokens_per_batch=100_000))


def test_a_tokenizer_that_does_not_know_the_characters(tmp_path, pairs, capsys):
    """One <unk> in a hundred tokens is a warning where it stands for many characters, and an end where it is more."""
    pairs = [
        (source, f"{target} {'x' * 60}" if n % 40 == 0 else target)
        for n, (source, target) in enumerate(pairs)
    ]
    data = write_pairs(tmp_path / "x", pairs, SPLITS)
    found = warnings(capsys, data, tokenizer=word_tokenizer(tmp_path / "t", pairs, "x" * 60))
    (line,) = found
    assert re.fullmatch(
        r"the tokenizer does not know [67]\.\d% of the characters of the target side", line
    )
    with pytest.raises(UserError, match=r"does not know .* of the tokens"):
        warnings(capsys, data, tokenizer=word_tokenizer(tmp_path / "u", pairs, "seven"))


@pytest.mark.parametrize(
    "cards, device, warned",
    [  # of each card: GiB in use, processes that are seen
        ([(39.2, 1), (0.4, 0)], "cuda:0", ["others use cuda:0; free: --device cuda:1"]),
        ([(39.2, 1), (0.4, 0)], "cuda:1", []),
        ([(39.2, 1), (0.4, 0)], "cpu", []),
        (
            [(30.0, 0), (9.0, 2)],
            "cuda:0",
            ["others use cuda:0; free: no card"],
        ),  # in a container only memory is seen
        (
            [(0.4, 1), (0.4, 0), (0.4, 0)],
            "cuda:0",
            ["others use cuda:0; free: --device cuda:1, --device cuda:2"],
        ),
    ],
)
def test_others_on_the_card(cards, device, warned, monkeypatch, capsys):
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid.removeprefix("GPU-cuda:")),
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(
            total=40 * 2**30, used=int(cards[card][0] * 2**30)
        ),
        nvmlDeviceGetComputeRunningProcesses=lambda card: [SimpleNamespace(pid=7)] * cards[card][1],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda card: SimpleNamespace(name="A100", uuid=card)
    )
    used, found = preflight.describe_cards(), []
    preflight.warn_of_others(torch.device(device), used, found.append)
    assert found == warned
    first = f"cuda:0: A100, {40 - cards[0][0]:.1f} of 40.0 GiB free, processes: {cards[0][1]}\n"
    assert capsys.readouterr().out.startswith(first)
    with pytest.raises(UserError, match="--device cuda:9"):
        preflight.check(config(device="cuda:9"))
    # Before this process takes memory of a card, which would be counted.
    assert capsys.readouterr().out.startswith(first)


def test_check_as_typed(toy_data, tmp_path, capsys):
    assert not in_this_process(
        "train.py", "--data", toy_data, "--check", "--d_model", "32", "--device", "cpu"
    )
    assert "check: this would run" in capsys.readouterr().out and not (tmp_path / "runs").exists()


def test_the_masks_shown_are_what_the_model_sees(capsys):
    """Of the second pair: no padding of the source, and nothing of the target that comes later (test_model.py)."""
    masks.explain_masks()
    text = capsys.readouterr().out
    shown = {}
    tables = r"^\S+ ((?:encoder self|decoder self|cross)-attention).*\n((?:  .*\n?)+)"
    for title, table in re.findall(tables, text, re.MULTILINE):
        rows = [re.findall(r"\b[01]\b", line) for line in table.splitlines()]
        shown[title] = torch.tensor(
            [[int(cell) for cell in row] for row in rows if len(row) == 4]
        ).bool()
    special = {"pad": 0, "bos": 1, "eos": 2}
    padding = Collate(special, special)(masks.PAIRS).src_pad[1].expand(4, 4)
    later = torch.ones(4, 4).triu(1).bool()
    expected = {
        "encoder self-attention": padding,
        "decoder self-attention": later,
        "cross-attention": padding,
    }
    assert shown.keys() == expected.keys() and all(
        torch.equal(shown[name], expected[name]) for name in expected
    )
    assert "in  B0  <s>     I       love    you\n  out B0  I       love    you     </s>" in text
