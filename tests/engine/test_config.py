"""Flags say what was meant: spelled either way, from a file, within bounds; help in 80 columns."""

import math
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from importlib import import_module

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from engine.config import checked, flag, format_help, load_config, parse_flags
from engine.errors import UserError
from engine.files import as_json, atomic_write


@dataclass
class Config:
    data: str = flag("", "where it lies", "Data")
    preset: str = flag("lab", "model size (lab|base|big)", "Data")
    max_steps: int = flag(0, "steps at most", "Training", min=0)
    lr: float = flag(1e-3, "peak learning rate", "Training", above=0, below=10)
    share: float = flag(0.5, "of the data", "Training", min=0, max=1)
    anything: float = flag(0.0, "any number", "Training")
    norm_first: bool = flag(False, "norm before", "Training")


@pytest.fixture
def parse(monkeypatch):
    def parse(*arguments, **options):
        monkeypatch.setattr(sys, "argv", ["script.py", *map(str, arguments)])
        monkeypatch.setattr(
            sys.modules["__main__"], "__spec__", None
        )  # as if not run by `python -m`
        return parse_flags(options.pop("config_class", Config), **options)

    return parse


@pytest.fixture
def refused(parse, capsys):
    """The one line that a mistake prints."""

    def refused(*arguments, **options):
        with pytest.raises(SystemExit) as ended:
            parse(*arguments, **options)
        printed = capsys.readouterr()
        assert ended.value.code == 2 and printed.out == ""
        assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
        return printed.err.removeprefix("error: ").rstrip("\n")

    return refused


# ---------------------------------------------------------------- flags


def test_given_are_the_flags_that_were_typed(parse):
    assert parse() == Config() and parse().given == set()
    assert parse("--lr", "1e-3").given == {"lr"}  # though it is the default
    assert parse("--data=--lr=3").given == {"data"}


@pytest.mark.parametrize(
    "words",
    [
        ["--max_steps", "7", "--norm_first"],
        ["--max-steps", "7", "--norm-first"],
        ["--max-steps=7", "--norm_first=true"],
    ],
)
def test_flags_with_underscore_and_dash(parse, words):
    config = parse(*words)
    assert config == Config(max_steps=7, norm_first=True) and config.given == {
        "max_steps",
        "norm_first",
    }


@pytest.mark.parametrize(
    "words, said",
    [
        (["--max_step", "5"], "unknown flag --max_step; did you mean --max_steps?"),
        (["--max_st", "5"], "unknown flag --max_st; did you mean --max_steps?"),
        (["--norm-fist=1"], "unknown flag --norm-fist; did you mean --norm_first?"),
        (["--dat", "5"], "unknown flag --dat; did you mean --data?"),
        (["--qqq"], "unknown flag --qqq; see --help"),
        (["--lr", "fast"], "invalid float value: 'fast'"),
        (["--lr"], "expected one argument"),
        (["--norm_first=maybe"], "'maybe' is not true or false"),
        (["--max_steps", "2.5"], "invalid int value: '2.5'"),
        (["hello"], "unexpected argument 'hello'"),
    ],
)
def test_mistakes_in_flags(refused, words, said):
    assert said in refused(*words)


def test_positional_words(parse, refused):
    config = parse("今天", "--lr", "0.5", "你好 吗", "-", positional="text")
    assert config.text == ["今天", "你好 吗", "-"] and config.lr == 0.5 and config.given == {"lr"}
    assert parse(positional="text").text == []
    # A switch takes no word but yes or no.
    config = parse("--norm-first", "一", "--norm_first", "--lr", "2", positional="text")
    assert (config.text, config.norm_first, config.lr) == (["一"], True, 2)
    config = parse("二", "--norm_first", "no", positional="text")
    assert (config.text, config.norm_first) == (["二"], False)
    line = refused("--lrr", "1", positional="text")
    assert "did you mean --lr?" in line and "write -- before text that begins with -" in line
    config = parse("一", "--lr", "2", "--", "-5度", "--lr", "--", positional="text")
    assert config.text == ["一", "-5度", "--lr", "--"] and config.lr == 2 and config.given == {"lr"}


@dataclass
class Reading:
    beam: int = flag(1, "beam size", "What", min=1)
    ckpt: str = flag("", "the run", "What", first_word=True)
    all: bool = flag(False, "everything", "What")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A working directory with runs/a, a checkpoint, a weights file and a folder that is no run."""
    for file in ("runs/a/config.json", "c/step-1/model.safetensors", "w.pt", "今天/x"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", [["x"], ["--ckpt", "x"], ["--all", "x"], ["--beam", "2", "x"]])
def test_the_first_word_is_the_run(parse, words):
    """Also one that does not exist, about which the command says more."""
    assert parse(*words, config_class=Reading).ckpt == "x"
    assert "ckpt" in parse(*words, config_class=Reading).given


def test_a_second_run_is_a_mistake(refused):
    for words, unexpected in ((["x", "y"], "y"), (["x", "--ckpt", "y"], "x"), ([""], "")):
        line = refused(*words, config_class=Reading)
        assert line.startswith(f"unexpected argument {unexpected!r}")


@pytest.mark.parametrize("word", ["a", "runs/a", "c/step-1", "w.pt"])
def test_of_free_words_the_first_is_the_run_if_it_is_one(parse, runs, word):
    options = dict(config_class=Reading, positional="text")
    config = parse(word, "a", **options)
    assert (config.ckpt, config.text) == (word, ["a"])
    config = parse("--all", word, "--", word, **options)
    assert (config.ckpt, config.text, config.all) == (word, [word], True)
    config = parse("--ckpt", "b", word, **options)
    assert (config.ckpt, config.text) == ("b", [word])


@pytest.mark.parametrize("word", ["今天", "b", "x.pt", "", "很" * 300, "a\nb"])
def test_a_text_that_is_no_run_stays_a_text(parse, runs, word):
    config = parse(word, "a", config_class=Reading, positional="text")
    assert (config.ckpt, config.text) == ("", [word, "a"])


def test_a_text_that_ends_like_a_settings_file_stays_a_text(parse, tmp_path):
    assert parse("请先打开 config.json", positional="text").text == ["请先打开 config.json"]
    (tmp_path / "s.yaml").write_text("lr: 0.5\n")
    assert parse(tmp_path / "s.yaml", "一", positional="text").lr == 0.5


@pytest.mark.parametrize(
    "words, said",
    [
        (["--text", "一"], "--text; give the text without a flag: `python script.py TEXT`"),
        (["——lr", "1"], "——lr has dashes of a Chinese input method; type --lr"),
        (["－－max－steps=1"], "unexpected argument"),
        (["－－lr=1"], "type --lr"),
        (
            ["--gpu_devices", "0", "1"],
            "`CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 script.py`",
        ),
        (["--gpu_devices", "3", "--lr", "1"], "`CUDA_VISIBLE_DEVICES=3 python script.py`"),
    ],
)
def test_advice_is_right(refused, words, said):
    positional = "text" if "--text" in words else None
    assert said in refused(*words, positional=positional)


def test_flags_of_the_handout(monkeypatch, capsys):
    """python multi_gpu_train.py --gpu_devices 0 1 --batch_size 192 --num_workers 8"""
    for words, said in (
        ("--num_workers 8", "did you mean --workers?"),
        ("--batch_size 192", "did you mean --tokens_per_batch? It counts tokens, about 25 a"),
    ):
        monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
        with pytest.raises(SystemExit):
            parse_flags(import_module("train").Config)
        assert said in capsys.readouterr().err


def test_a_dash_begins_a_chinese_text(parse):
    assert parse("——他说", positional="text").text == ["——他说"]


def test_version(parse, capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--version")
    assert ended.value.code == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", capsys.readouterr().out)


# ---------------------------------------------------------------- bounds and choices


@pytest.mark.parametrize(
    "name, value, must_be",
    [
        ("lr", "20.0", "above 0 and below 10"),
        ("lr", "10.0", "above 0 and below 10"),
        ("lr", "0.0", "above 0 and below 10"),
        ("lr", "nan", "above 0 and below 10"),
        ("lr", "inf", "above 0 and below 10"),
        ("share", "1.01", "at least 0 and at most 1"),
        ("share", "-0.5", "at least 0 and at most 1"),
        ("max_steps", "-1", "at least 0"),
        ("max_steps", "2147483648", "at least 0 and at most 2,147,483,647"),
        ("anything", "nan", "a finite number"),
        ("anything", "-inf", "a finite number"),
    ],
)
def test_a_number_out_of_bounds(refused, name, value, must_be):
    assert refused(f"--{name}={value}") == f"--{name} {value} must be {must_be}"


@given(st.integers(), st.floats(), st.floats(), st.floats())
def test_what_the_bounds_let_through(max_steps, lr, share, anything):
    right = 0 <= max_steps < 2**31 and 0 < lr < 10 and 0 <= share <= 1 and math.isfinite(anything)
    try:
        assert checked(Config(max_steps=max_steps, lr=lr, share=share, anything=anything)) and right
    except UserError:
        assert not right


def test_choices_are_the_words_of_the_help(parse, refused):
    assert parse("--preset", "big").preset == "big"
    assert refused("--preset", "x") == "--preset x is unknown; choose lab, base or big"
    assert (
        refused("--preset", "bass")
        == "--preset bass is unknown; choose lab, base or big; did you mean base?"
    )


def test_a_default_is_a_choice_even_if_the_help_does_not_name_it():
    @dataclass
    class Optional:
        attention: str = flag("", "own operator (python|cpp); PyTorch's", "Model")

    assert checked(Optional()).attention == ""
    with pytest.raises(UserError, match="--attention c is unknown; choose python or cpp"):
        checked(Optional("c"))


# ---------------------------------------------------------------- settings files


@pytest.mark.parametrize(
    "name, content",
    [
        ("settings.yaml", "max_steps: 7\nlr: 3e-4\nnorm_first: true\ndata: 数据\n"),
        (
            "settings.yml",
            "max_steps: '7'\nlr: 0.0003\nnorm_first: yes\ndata: 数据\nshare:\n",
        ),  # null: the default
        ("settings.json", '{"max_steps": 7, "lr": 3e-4, "norm_first": true, "data": "数据"}'),
    ],
)
def test_a_settings_file_and_flags_over_it(parse, tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    config = parse(path)
    assert config == Config("数据", max_steps=7, lr=3e-4, norm_first=True)
    assert config.given == {"data", "max_steps", "lr", "norm_first"}
    config = parse(path, "--max-steps", 8, "--norm_first=false")
    assert config == Config("数据", max_steps=8, lr=3e-4)


@pytest.mark.parametrize("text", ["2024-01-31", "17", "010", "1.10", "1_0", "1:30", "no", ""])
def test_a_setting_is_read_as_it_is_written(parse, tmp_path, text):
    # YAML takes most of them for a date, a number or false.
    path = tmp_path / "settings.yaml"
    for value in (f"'{text}'", text):
        path.write_text(f"data: {value}\n")
        assert parse(path).data == text


def test_a_json_file_may_be_indented_with_tabs(parse, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text('{\n\t"data": "x",\n\t"lr": null\n}\n')
    assert parse(path) == Config("x")


def test_a_path_below_home_wherever_it_stands(parse, tmp_path, monkeypatch):
    """bash writes it out in `--data ~/x` alone."""
    monkeypatch.setenv("HOME", "/home/li")
    (tmp_path / "settings.yaml").write_text("data: ~/x y\n")
    for words in (["--data=~/x y"], ["--data", "~/x y"], [tmp_path / "settings.yaml"]):
        assert parse(*words).data == "/home/li/x y"
    assert [parse("--data", name).data for name in ("x~/y", "./~/x")] == ["x~/y", "./~/x"]


@pytest.mark.parametrize(
    "content, said",
    [
        ("max_step: 7", "settings.yaml; did you mean max_steps?"),
        ("7: 7", "unknown setting '7'"),
        ("- 7", "must hold `name: value` lines"),
        ("", "must hold `name: value` lines"),
        ("lr: [", "is not valid YAML"),
        ("lr: fast", "invalid float value: 'fast'"),
        ("max_steps: [1, 2]", "must hold `name: value` lines"),
        ("max_steps: -3", "--max_steps -3 must be at least 0"),
    ],
)
def test_mistakes_in_a_settings_file(refused, tmp_path, content, said):
    path = tmp_path / "settings.yaml"
    assert refused(path) == f"cannot read settings file {path}: No such file or directory"
    path.write_text(content)
    assert said in refused(path)


# ---------------------------------------------------------------- saved settings


numbers = st.floats(allow_nan=False, allow_infinity=False)
lr = st.floats(0, 10, exclude_min=True, exclude_max=True)


@given(
    st.builds(
        Config,
        st.text(),
        st.sampled_from(["lab", "base"]),
        st.integers(0, 2**31 - 1),
        lr,
        st.floats(0, 1),
        numbers,
        st.booleans(),
    )
)
def test_saved_settings_come_back(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_text(as_json(asdict(config)), encoding="utf-8")  # without the fsync of each example
    assert load_config(Config, path) == config


def test_saved_settings_are_readable(tmp_path):
    atomic_write(tmp_path / "config.json", as_json(asdict(Config(data="数据"))))
    assert '"data": "数据"' in (tmp_path / "config.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "config.json is damaged, or"),
        ("[1]", "config.json is damaged, or"),
        ('{"no_such": 1}', "no_such"),
        ('{"max_steps": "many"}', "config.json: --max_steps 'many' must be of type int"),
        ('{"max_steps": -1}', "must be at least 0"),
        ('{"lr": NaN}', "must be above 0"),
        ('{"preset": "x"}', "choose lab"),
        ('{"data": "pairs"}', r"another version: it lacks --.*; start a new run"),
    ],
)
def test_damaged_settings_are_reported(tmp_path, content, said):
    with pytest.raises(UserError, match=r"cannot read .*is .* a run of this script"):
        load_config(Config, tmp_path / "config.json")
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=said):
        load_config(Config, tmp_path / "config.json")


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("script", ["train", "evaluate", "translate"])
def test_help_fits_80_columns_in_groups(script):
    result = subprocess.run(
        [sys.executable, f"{script}.py", "--help"],
        cwd=ROOT,  # the first line shows the script's path as it was typed
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0 and "torch" not in result.stderr  # its import takes seconds
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and f"{script}.py [SETTINGS.yaml]" in lines[0]
    flags = fields(import_module(script).Config)
    groups = dict.fromkeys(flag.metadata["group"] for flag in flags)  # each once
    assert [line[:-1] for line in lines[1:] if not line.startswith(" ")] == [*groups]
    column = lines[3].index("  -  ") + len(
        "  -      "
    )  # of the meanings; a broken line goes on there
    assert all(line[column - 1] == " " != line[column] for line in lines if line.startswith("  --"))
    broken = [line for line in lines[2:] if line.startswith("   ")]
    assert all(line.index(line.strip()) == column for line in broken)
    assert [line.split()[0] for line in lines if line.startswith("  --")] == [
        f"--{flag.name}" for flag in flags
    ]


def test_help_breaks_a_long_usage_between_its_parts(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/student/course/work/translation/main/script.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    usage = format_help(Config, "", "text").splitlines()[:2]
    assert usage == [
        "python /home/student/course/work/translation/main/script.py [SETTINGS.yaml]",
        "    [--flag value …] [TEXT …]",
    ]
    assert all(len(line) <= 80 for line in usage)


def test_help_shows_default_meaning_and_bounds(parse, capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--help", description="does something", positional="text")
    assert ended.value.code == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "python script.py [SETTINGS.yaml] [--flag value …] [TEXT …]",
        "does something",
        "Data:",
        "--data - where it lies",
        "--preset lab model size (lab|base|big)",
        "Training:",
        "--max_steps 0 steps at most [>= 0]",
        "--lr 0.001 peak learning rate [> 0, < 10]",
        "--share 0.5 of the data [>= 0, <= 1]",
        "--anything 0.0 any number",
        "--norm_first - norm before",
    ]


def test_a_long_list_of_choices_is_broken_between_two():
    choices = "|".join(f"choice_{number}" for number in range(12))

    @dataclass
    class Many:
        which: str = flag("choice_1", f"one of them ({choices})", "Model")

    lines = format_help(Many, "", None).splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line.endswith(("|", ")")) for line in lines[3:])
    words = "".join(line.strip() for line in lines[3:])
    assert choices.endswith(words.removesuffix(")"))


def test_large_bounds_are_shown_in_full():
    @dataclass
    class Large:
        layers: int = flag(2, "blocks", "Model", min=1, max=2**20)

    assert "blocks [>= 1, <= 1,048,576]" in format_help(Large, "", None)
