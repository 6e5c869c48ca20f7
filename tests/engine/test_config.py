"""Flags say what was meant: spelled either way, from a file, with the nearest name for a slip; help fits a screen."""

import ast
import json
import resource
import statistics
from dataclasses import dataclass, fields

import pytest
from conftest import ROOT, run_script
from hypothesis import given
from hypothesis import strategies as st

from engine.config import flag, load_config, parse_flags, save_config
from engine.errors import UserError


@dataclass
class Config:
    data: str = flag("", "where it lies", "Data")
    max_steps: int = flag(0, "steps at most", "Training")
    lr: float = flag(1e-3, "peak learning rate", "Training")
    norm_first: bool = flag(False, "norm before", "Training")

    def __post_init__(self):
        if not self.max_steps >= 0:
            raise UserError(f"--max_steps {self.max_steps} must be at least 0")


@pytest.fixture
def parse(monkeypatch):
    def parse(*arguments, **options):
        monkeypatch.setattr("sys.argv", ["script.py", *map(str, arguments)])
        return parse_flags(Config, **options)

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
        return printed.err

    return refused


# ---------------------------------------------------------------- flags


def test_defaults(parse):
    config = parse()
    assert config == Config("", 0, 1e-3, False) and config.given == set()


@pytest.mark.parametrize("words", [
    ["--max_steps", "7", "--norm_first"], ["--max-steps", "7", "--norm-first"], ["--max-steps=7", "--norm_first=true"],
])  # fmt: skip
def test_flags_with_underscore_and_dash(parse, words):
    config = parse(*words)
    assert config.max_steps == 7 and config.norm_first is True and config.lr == 1e-3
    assert config.given == {"max_steps", "norm_first"}


def test_given_names_a_flag_even_with_its_default_value(parse):
    assert parse("--lr", "1e-3").given == {"lr"}


def test_a_value_that_looks_like_a_flag_is_not_given(parse):
    assert parse("--data=--lr=3").given == {"data"}


@pytest.mark.parametrize("word, nearest", [
    ("--max_step", "--max_steps"), ("--maxsteps", "--max_steps"), ("--norm-fist=1", "--norm_first"),
    ("--dat", "--data"),
])  # fmt: skip
def test_an_unknown_flag_suggests_the_nearest(refused, word, nearest):
    line = refused(word, "5")
    assert f"unknown flag {word.split('=')[0]}" in line and f"did you mean {nearest}?" in line


def test_an_abbreviation_is_no_flag(refused):
    assert "did you mean --max_steps?" in refused("--max_st", "5")


@pytest.mark.parametrize("words, said", [
    (["--qqq"], "unknown flag --qqq; see --help"), (["--lr", "fast"], "invalid float value: 'fast'"),
    (["--lr"], "expected one argument"), (["--norm_first=maybe"], "maybe"), (["hello"], "unexpected argument 'hello'"),
    (["--max_steps", "-1"], "--max_steps -1 must be at least 0"),
])  # fmt: skip
def test_other_mistakes(refused, words, said):
    assert said in refused(*words)


def test_positional_words(parse, refused):
    config = parse("今天", "--lr", "0.5", "你好 吗", "-", positional="text")
    assert config.text == ["今天", "你好 吗", "-"] and config.lr == 0.5 and config.given == {"lr"}
    assert parse(positional="text").text == []
    line = refused("--lrr", "1", positional="text")
    assert "did you mean --lr?" in line and "text that begins with - goes after --" in line


def test_words_after_two_dashes_are_text(parse):
    config = parse("一", "--lr", "2", "--", "-5度", "--lr", "--", positional="text")
    assert config.text == ["一", "-5度", "--lr", "--"] and config.lr == 2 and config.given == {"lr"}


# ---------------------------------------------------------------- settings files


@pytest.mark.parametrize("name, content", [
    ("settings.yaml", "max_steps: 7\nlr: 3e-4\nnorm_first: true\ndata: 数据\n"),
    ("settings.yml", "max_steps: '7'\nlr: 0.0003\nnorm_first: yes\ndata: 数据\n"),
    ("settings.json", '{"max_steps": 7, "lr": 3e-4, "norm_first": true, "data": "数据"}'),
])  # fmt: skip
def test_a_settings_file_and_flags_over_it(parse, tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    config = parse(path)
    assert config == Config("数据", 7, 3e-4, True)
    assert config.given == {"data", "max_steps", "lr", "norm_first"}
    config = parse(path, "--max-steps", 8, "--norm_first=false")
    assert config == Config("数据", 8, 3e-4, False)


def test_settings_left_out_or_null_keep_their_defaults(parse, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("lr: 2\ndata:\n")
    config = parse(path, "--max_steps", 3)
    assert config == Config("", 3, 2.0, False) and config.given == {"lr", "max_steps"}


@pytest.mark.parametrize("value, text", [("2024-01-31", "2024-01-31"), ("17", "17"), ("''", "")])
def test_a_setting_has_the_type_of_its_flag(parse, tmp_path, value, text):
    # YAML takes the first for a date and the second for a number.
    path = tmp_path / "settings.yaml"
    path.write_text(f"data: {value}\n")
    assert parse(path).data == text


@pytest.mark.parametrize("content, said", [
    ("max_step: 7", "unknown setting 'max_step' in the settings file; did you mean max_steps?"),
    ("7: 7", "unknown setting 7"), ("- 7", "must hold `name: value` lines"), ("", "must hold `name: value` lines"),
    ("lr: [", "is not valid YAML"), ("lr: fast", "invalid float value: 'fast'"),
    ("max_steps: 2.5", "invalid int value"), ("max_steps: [1, 2]", "invalid int value"), ("max_steps: -3", "must be at least 0"),
])  # fmt: skip
def test_mistakes_in_a_settings_file(refused, tmp_path, content, said):
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    assert said in refused(path)


def test_a_settings_file_that_is_not_there(refused, tmp_path):
    path = tmp_path / "none.yaml"
    assert refused(path) == f"error: cannot read settings file {path}: No such file or directory\n"


# ---------------------------------------------------------------- saved settings


@given(st.builds(Config, st.text(), st.integers(0), st.floats(allow_nan=False), st.booleans()))
def test_saved_settings_come_back(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "config.json"
    save_config(config, path)
    assert load_config(Config, path) == config


@pytest.mark.parametrize("content", ["{", "[1]", '{"no_such": 1}', '{"max_steps": "many"}', '{"max_steps": -1}'])
def test_damaged_settings_are_said(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config.json is damaged or of another script|must be at least 0"):
        load_config(Config, tmp_path / "config.json")
    with pytest.raises(UserError, match=r"cannot read .*is .* a run of this script"):
        load_config(Config, tmp_path / "none.json")


# ---------------------------------------------------------------- help


def help_of(script, cwd) -> tuple[str, list[str], float]:
    """What --help prints, the modules that were imported for it, and the processor's seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = run_script(script, "--help", cwd=cwd, PYTHONPROFILEIMPORTTIME="1")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0
    imported = [line.rsplit("|", 1)[1].strip() for line in result.stderr.splitlines() if line.startswith("import time")]
    # Not the wall clock: on a busy machine it measures the others' work.
    return result.stdout, imported, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def groups_and_flags(script) -> tuple[list[str], list[str]]:
    """The groups and flags of a script's settings, read from its source: importing it would import torch."""
    tree = ast.parse((ROOT / script).read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Config").body
    settings = [node for node in body if isinstance(node, ast.AnnAssign)]
    groups = list(dict.fromkeys(node.value.args[2].value for node in settings))
    return groups, [node.target.id for node in settings]


@pytest.mark.parametrize("script", ["train.py", "evaluate.py", "translate.py"])
def test_help_fits_a_screen_in_groups_and_comes_at_once(script, tmp_path):
    runs = [help_of(script, tmp_path) for _ in range(3 if script == "train.py" else 1)]
    text, imported, _ = runs[0]
    lines = text.splitlines()
    assert len(lines) <= 48 and max(map(len, lines)) <= 100 and f"python {script}" in lines[0]
    groups, flags = groups_and_flags(script)
    assert [line[:-1] for line in lines[1:] if not line.startswith(" ")] == groups
    assert [line.split()[0] for line in lines if line.startswith("  --")] == [f"--{name}" for name in flags]
    assert "engine.config" in imported and "torch" not in imported
    assert statistics.median(seconds for _, _, seconds in runs) < 3


def test_help_shows_default_and_meaning(parse, capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--help", description="does something", positional="text")
    assert ended.value.code == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "python script.py [--flag value …] [TEXT …] does something",
        "Data:", "--data - where it lies",
        "Training:", "--max_steps 0 steps at most", "--lr 0.001 peak learning rate", "--norm_first - norm before",
    ]  # fmt: skip
    assert len(fields(Config)) == 4


def test_json_is_readable_as_it_was_written(tmp_path):
    save_config(Config(data="数据"), tmp_path / "config.json")
    text = (tmp_path / "config.json").read_text(encoding="utf-8")
    assert '"data": "数据"' in text and json.loads(text)["lr"] == 1e-3
