"""`--check` finds what would spoil a run and estimates its cost; masks.py prints the true masks."""

import json
import math
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

import model
from data import Collate, TextSettings, prepare
from engine import memory
from engine.errors import UserError
from engine.precision import Precision
from text.reading import find_text
from tools import machine, preflight
from tools.reporting import masks

SPLITS = {"train": slice(200, None), "validation": slice(100), "test": slice(100, 200)}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def _short(monkeypatch, tmp_path):
    """Few small steps, in a folder without runs, on a machine without GPUs."""
    monkeypatch.setattr(machine, "SECONDS", 0.0)
    monkeypatch.setattr(machine, "SMALLEST_STEP", 128)
    monkeypatch.setattr(preflight, "hidden_gpus", lambda: None)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pairs():
    return reversed_digits(700)


def warnings(capsys, data, **flags) -> list[str]:
    """The warnings of `--check`."""
    preflight.check(config(data=str(data), **flags))
    lines = capsys.readouterr().out.splitlines()
    found = [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
    assert lines[-1].startswith(f"check: this would run; {len(found) or 'no'} warning")
    return found


# -------------------------------------------------------------------- costs


def test_good_data_give_no_warning_and_the_costs_of_the_run(tmp_path, pairs, capsys, monkeypatch):
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (7.5, 0, 0))
    flags = "--check --d_model 32 --tokens_per_batch 512 --epochs 3 --device cpu --data x".split()
    write_pairs(tmp_path / "x", pairs, SPLITS)
    assert not in_this_process("train.py", *flags)
    out = capsys.readouterr().out
    assert "(json), 500 training pairs" in out and "check: this would run; no warnings" in out
    steps, total = re.search(r"([\d,]+) steps per epoch[^$]*for ([\d,]+) steps", out).groups()
    assert int(total) == 3 * int(steps) and 6 <= int(steps) <= 12  # 10 tokens a side and pair
    assert "without validations (busy: load 7.5 on" in out
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (0.1, 9, 9))
    assert machine.describe_load() == ""
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (7.5, 9, 9))
    assert machine.describe_load() == ""


def settings(**changed):
    return config(**{"epochs": 3, "max_steps": 0, **changed})


@pytest.mark.parametrize(
    "changed, said",
    [
        (dict(), "about 7.5 min for 300 steps"),
        (dict(max_steps=50), "about 1.2 min for 50 steps"),
        (dict(epochs=5000), "about 8.7 days for 500,000 steps"),
        (dict(epochs=5000, max_minutes=30.0), "30 min (--max_minutes) for about 1,200 steps"),
        (dict(max_minutes=30.0), "about 7.5 min for 300 steps"),
    ],
)
def test_the_time_is_that_of_epochs_steps_or_minutes(changed, said):
    """An epoch has 100 steps and takes 2.5 minutes."""
    assert preflight.describe_time(settings(**changed), 100, 2.5) == said


def test_the_disk_that_a_run_needs(tmp_path, pairs, capsys, monkeypatch):
    """As much as its checkpoints take: 2 kept, the best and one being written; 3 with moments."""
    needed = []
    monkeypatch.setattr(
        preflight, "check_disk", lambda folder, needed_bytes: needed.append(needed_bytes)
    )
    data = write_pairs(tmp_path / "x", pairs, SPLITS)
    preflight.check(config(data=str(data), keep=2))
    out = capsys.readouterr().out
    parameters = int(re.search(r"([\d,]+) parameters", out)[1].replace(",", ""))
    weights = 4 * parameters
    assert preflight.RESUMABLE == 2
    assert needed[0] == pytest.approx(4 * weights + 3 * 2 * weights + 8 * 500 * 20, rel=0.02)


def test_the_vocabularies_of_a_sample_are_those_of_all_rows(tmp_path, pairs, capsys, monkeypatch):
    """A tenth of the rows do not have the words for a vocabulary of 1,000."""
    monkeypatch.setattr(preflight, "SAMPLE", 25)
    data = write_pairs(tmp_path / "x", pairs, SPLITS)
    preflight.check(config(data=str(data), source_vocab=900, target_vocab=1000))
    out = capsys.readouterr().out
    parameters = int(re.search(r"model: about ([\d,]+) parameters", out)[1].replace(",", ""))
    with torch.device("meta"):
        model = preflight.make_translator(preflight.sizes_of(config(), 900, 1000))
    assert parameters == sum(weight.numel() for weight in model.parameters())
    assert re.search(r"about [\d,]+ steps per epoch", out)


@pytest.mark.parametrize("seconds", [0.5, 30.0])
def test_the_speed_is_that_of_warm_undisturbed_steps(seconds, monkeypatch):
    """A step takes 0.1 s and 1 ms per token; the first and third of each size 9 s more."""
    now, sizes = [0.0], []
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def step(tokens: int) -> int:
        sizes.append(tokens)
        is_slow = sizes.count(tokens) in (1, 3)
        now[0] += 0.1 + tokens / 1000 + 9 * is_slow
        return tokens

    monkeypatch.setattr(machine, "SECONDS", seconds)
    speed = machine.measure_speed(step, 1024)
    largest = max(sizes)
    assert largest == (128 if seconds < 1 else 1024)
    assert speed == pytest.approx(largest / (0.1 + largest / 1000))


def test_the_speed_counts_both_parts_of_a_run(toy_data, tmp_path, monkeypatch):
    """100 tokens/s with the whole vocabulary, in the last 30 %, and 200 before."""
    monkeypatch.setattr(model, "OTHER_TOKENS", 8)
    tokens_in_softmax = []

    def measure_speed(step, budget):
        step(budget)
        tokens_in_softmax.append(trial.loss_of.tokens_in_softmax)
        return 100.0 * len(tokens_in_softmax)

    monkeypatch.setattr(preflight, "measure_speed", measure_speed)
    text_settings = TextSettings(source_vocab=300, target_vocab=300)
    sample = prepare(find_text(str(toy_data)), tmp_path, text_settings)
    sizes = preflight.sizes_of(config(), 300, 300)
    precision = Precision(torch.device("cpu"), "fp32", "")
    trial = preflight.Trial(config(), sample, sizes, precision)
    assert trial.measure_speed(200) == pytest.approx(1 / (0.3 / 100 + 0.7 / 200), rel=0.01)
    assert tokens_in_softmax[0] == 300 > tokens_in_softmax[1]


def test_a_full_disk(tmp_path, pairs, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(2**40, 2**40, 2**20))
    with pytest.raises(UserError, match=r"0\.0 GiB free, the run needs about 0\.[1-9]"):
        preflight.check(config(data=str(write_pairs(tmp_path / "x", pairs, SPLITS)), d_model=512))


def test_a_budget_that_does_not_fit_the_memory(toy_data, monkeypatch):
    if not machine.forget_peak():
        pytest.skip("this system only reports the peak since the start of the process")
    limit = machine.peak_of(lambda: None) + 0.3
    monkeypatch.setattr(preflight, "memory_limit", lambda device: limit)
    sizes = dict(data=str(toy_data), dim_feedforward=1024, optimizer="adamw")
    preflight.check(config(**sizes, tokens_per_batch=64))
    with pytest.raises(UserError, match=r"GiB of memory.*--tokens_per_batch"):
        preflight.check(config(**sizes, tokens_per_batch=100_000))


# -------------------------------------------------------------------- data


def test_warnings_of_bad_data(tmp_path, pairs, capsys):
    """Of 600 rows, 100 repeat others, 150 are too long, 100 have no Chinese; no validation."""
    rows = pairs[:350]
    rows += [(source * 9, target * 9) for source, target in pairs[350:500]]
    rows[:100] = [(f"x{target}", target) for _, target in rows[:100]]
    rows += rows[100:200]
    splits = {"train": slice(None), "test": slice(100)}
    data = write_pairs(tmp_path / "x", rows, splits)
    write_pairs(data, pairs[500:], {"test": slice(None)})
    found = warnings(capsys, data, max_length=32, max_minutes=1e-9)
    expected = [
        r"20% of the texts under 'zh' have no Chinese character",
        r"there is no validation split",
        r"17% of the training pairs are dropped: exact duplicates",
        r"\d\d% of the training pairs are dropped: of --max_length tokens or more",
        r"--max_minutes 1e-09 ends before the first epoch",
    ]
    assert len(found) == len(expected)
    for pattern in expected:
        assert any(re.match(pattern, line) for line in found), (pattern, found)


def test_a_large_data_set_is_read_in_part(tmp_path, pairs, monkeypatch):
    """1,000 of 2,800 rows are read, 500 of them distinct; 50 to 100 are tokenised."""
    monkeypatch.setattr(preflight, "ROWS", 1000)
    monkeypatch.setattr(preflight, "SAMPLE", 50)
    rows = []
    for n in range(200, 700, 10):
        rows += pairs[n : n + 10] + pairs[n : n + 4]
    text = find_text(str(write_pairs(tmp_path / "x", pairs[:200] + rows * 4, SPLITS)))
    sample, _, duplicates = preflight.sample_of(text)
    taken = sample.taken["train"]
    assert 50 <= len(taken) <= 100 and len(set(taken)) == len(taken)
    assert duplicates == pytest.approx(0.5)


def test_a_sample_has_rows_of_every_kind(tmp_path, pairs, monkeypatch):
    """Every other row is its own translation: the sample must not hold one kind alone."""
    monkeypatch.setattr(preflight, "SAMPLE", 50)
    rows = [row for pair in pairs[:400] for row in (pair, (pair[0], pair[0]))]
    sample, _, _ = preflight.sample_of(find_text(str(write_pairs(tmp_path / "x", rows, SPLITS))))
    taken = sample.taken["train"]
    assert 0.3 < sum(source == target for source, target in taken) / len(taken) < 0.7


def test_the_lowest_memory_limit_of_the_control_groups_counts(tmp_path):
    job = tmp_path / "slurm" / "job"
    job.mkdir(parents=True)
    own = tmp_path / "own"
    assert memory.cgroup_limit(tmp_path, own) == math.inf
    own.write_text("1:cpu:/elsewhere\n0::/slurm/job\n")
    (tmp_path / "slurm" / "memory.max").write_text("max\n")
    assert memory.cgroup_limit(tmp_path, own) == math.inf
    (job / "memory.max").write_text("8000\n")
    assert memory.cgroup_limit(tmp_path, own) == 8000
    (tmp_path / "slurm" / "memory.max").write_text("5000\n")
    assert memory.cgroup_limit(tmp_path, own) == 5000


def test_swapped_languages_and_a_run_that_exists_are_one_line(tmp_path, pairs):
    rows = [{"中文": target, "en": source} for source, target in pairs]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(UserError, match="swapped: 100% of the texts under 'en' are Chinese"):
        preflight.check(config(data=str(tmp_path / "train.jsonl"), source="中文"))
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/config.json").touch()
    with pytest.raises(UserError, match="run runs/a exists; choose another --run"):
        preflight.check(config(run="a"))


def test_a_tokenizer_that_does_not_know_the_characters(tmp_path, pairs, capsys):
    """One <unk> in a hundred tokens is a warning where it stands for many characters."""
    unknown = "x" * 60
    words = {word for pair in pairs for word in " ".join(pair).split()}
    ids = {word: n for n, word in enumerate(["<unk>", "<s>", *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(ids, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(unk_token="<unk>", bos_token="<s>", eos_token="<s>", pad_token="<s>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(tmp_path / "t")
    for n in range(0, len(pairs), 40):
        pairs[n] = (pairs[n][0], f"{pairs[n][1]} {unknown}")
    data = write_pairs(tmp_path / "x", pairs, SPLITS)
    (line,) = warnings(capsys, data, tokenizer=str(tmp_path / "t"))
    pattern = r"the tokenizer does not know [67]\.\d% of the characters of the target side"
    assert re.fullmatch(pattern, line)


# -------------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    "gpus, device, warned",
    [  # of each GPU: GiB in use, processes that can be seen
        ([(39.2, 1), (0.4, 0)], "cuda:0", ["others use cuda:0; free: --device cuda:1"]),
        ([(39.2, 1), (0.4, 0)], "cuda:1", []),
        ([(39.2, 1), (0.4, 0)], "cpu", []),
        # In a container only the memory of others can be seen.
        ([(30.0, 0), (9.0, 2)], "cuda:0", ["others use cuda:0; free: no GPU"]),
    ],
)
def test_others_on_the_gpu(gpus, device, warned, monkeypatch, capsys):
    def memory(index):
        return SimpleNamespace(total=40 * 2**30, used=int(gpus[index][0] * 2**30))

    def properties(index):
        return SimpleNamespace(name="A100", uuid=index)

    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid.removeprefix("GPU-cuda:")),
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetComputeRunningProcesses=lambda index: [None] * gpus[index][1],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    used, found = machine.describe_gpus(), []
    machine.warn_of_other_users(torch.device(device), used, found.append)
    assert found == warned
    first = f"cuda:0: A100, {40 - gpus[0][0]:.1f} of 40.0 GiB free, processes: {gpus[0][1]}\n"
    assert capsys.readouterr().out.startswith(first)
    with pytest.raises(UserError, match="--device cuda:9"):
        preflight.check(config(device="cuda:9"))
    # Printed before this process takes memory of a GPU, which would be counted.
    assert capsys.readouterr().out.startswith(first)


# -------------------------------------------------------------------- masks


@pytest.mark.parametrize("language", ["zh", "en"])
def test_the_masks_shown_are_what_the_model_sees(language, capsys):
    """Of the second pair: no padding of the source, and no later position of the target."""
    masks.explain_masks(language)
    text = capsys.readouterr().out
    assert "in  B0  <s>     I       love    you\n  out B0  I       love    you     </s>" in text
    words = masks.CHINESE if language == "zh" else masks.ENGLISH
    chinese = set(re.findall("[\u4e00-\u9fff]", text)) - set("我爱你好")
    assert bool(chinese) == (language == "zh")
    special = {"pad": 0, "bos": 1, "eos": 2}
    padding = Collate(special, special)(masks.PAIRS).src_pad[1].expand(4, 4)
    causal = torch.ones(4, 4).triu(1).bool()
    for title, mask in (("encoder", padding), ("decoder", causal), ("cross", padding)):
        lines = text.partition(words[title])[2].splitlines()[2:6]
        shown = [[int(cell) for cell in re.findall(r"\b[01]\b", line)] for line in lines]
        assert torch.equal(torch.tensor(shown).bool(), mask), title
