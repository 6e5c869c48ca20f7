"""Command-line flags from one dataclass: every field is a flag, with its help, bounds and choices.

@dataclass
class Config:
    lr: float = flag(1e-3, "peak learning rate", "Training", above=0, below=10)
    preset: str = flag("lab", "model size (lab|base|big)", "Model")     # (a|b): the choices

    ckpt: str = flag("", "run; default: the newest", "What", first_word=True)

config = parse_flags(Config)      # script.py --lr 3e-4, or: script.py settings.yaml --lr 3e-4
                                  # script.py runs/NAME, or: script.py --ckpt runs/NAME
"""

import argparse
import dataclasses
import difflib
import itertools
import json
import math
import operator
import os
import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

from engine import VERSION
from engine.errors import UserError, prepare_process, several_processes, stop

SETTINGS_BYTES = 2**16  # a settings file is no larger
LARGEST = 2**31 - 1  # whole number, where a flag has no other limit
LINE = 80  # columns of a terminal
NO_BREAK = "\u00a0"  # a space at which --help breaks no line
OTHER_NAMES = {  # what a flag is called in other programs
    "batch_size": "tokens_per_batch",
    "batch": "tokens_per_batch",
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "num_beams": "beam",
    "num_workers": "workers",
    "output": "out",
    "model": "ckpt",
    "checkpoint": "ckpt",
    "name": "run",
}
BOUNDS = {  # test, words, sign
    "min": (operator.ge, "at least", ">="),
    "above": (operator.gt, "above", ">"),
    "max": (operator.le, "at most", "<="),
    "below": (operator.lt, "below", "<"),
}
TRUE_WORDS = ("true", "yes", "1")
FALSE_WORDS = ("false", "no", "0")


def flag(
    default,
    help: str,
    group: str,
    *,
    min=None,
    above=None,
    max=None,
    below=None,
    fixed=False,
    first_word=False,
):
    """A dataclass field that is a command-line flag, listed under `group` in --help.

    Bounds: min ≤ value ≤ max, above < value < below. Where the help names choices as (a|b), the
    value must be one of them. A `fixed` setting stays the same when a run is resumed. The run that
    a command reads has `first_word`: `evaluate.py runs/NAME` means `evaluate.py --ckpt runs/NAME`.
    """
    if isinstance(default, int) and max is None and below is None:
        max = LARGEST  # catches a few zeros too many
    bounds = {"min": min, "above": above, "max": max, "below": below}
    metadata = {"help": help, "group": group, "fixed": fixed, "first_word": first_word, **bounds}
    return dataclasses.field(default=default, metadata=metadata)


def given_names(config) -> set[str]:
    """The settings that the user chose: by flags, or in Python those unlike their defaults."""
    return set(getattr(config, "given", changed_names(config)))


def changed_names(config) -> list[str]:
    """The settings that are unlike their defaults."""
    settings = dataclasses.fields(config)
    return [each.name for each in settings if getattr(config, each.name) != each.default]


def fill_in(config, preset: dict) -> None:
    """Set the values of a preset, except where the user chose others."""
    for name in preset.keys() - given_names(config):
        setattr(config, name, preset[name])


def parse_flags(config_class, description: str = "", positional: str | None = None):
    """Parse sys.argv into `config_class`; its attribute `given` names the flags that the user set.

    A first argument ending in .yaml or .json is read as the defaults. The first word that belongs
    to no flag is the value of the flag with `first_word`, if there is one. With `positional`, all
    other such words and all words after `--` are collected in `config.<positional>`; then the first
    word is a run, and a settings file is one, only if it exists. Without `positional` other words
    are an error. Mistakes print one line and exit with 2.
    """
    prepare_process()
    try:
        return _parse(config_class, description, positional, sys.argv[1:])
    except UserError as error:
        stop(str(error))


def _parse(config_class, description: str, positional: str | None, arguments: list[str]):
    fields = dataclasses.fields(config_class)
    names = [field.name for field in fields]
    words_after = []
    if positional and "--" in arguments:
        end = arguments.index("--")
        arguments, words_after = arguments[:end], arguments[end + 1 :]
    if {"--help", "-h"} & set(arguments):
        print(format_help(config_class, description, positional), end="")
        sys.exit(0)
    if "--version" in arguments:
        print(VERSION)
        sys.exit(0)
    if arguments and is_settings_file(arguments[0], must_exist=bool(positional)):
        file = Path(arguments[0])
        arguments = _as_flags(read_settings(file), names, file) + arguments[1:]
    run = first_word_of(config_class)
    if run or positional:
        arguments = _with_values(arguments, fields)
    parsed, words = _parser(fields).parse_known_args(arguments)
    _refuse_unknown_flags(words, names, positional)

    given = vars(parsed)
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(value)
    first = words[0] if words else ""
    if run and run not in given and first and (is_run(first) or not positional):
        given[run] = os.path.expanduser(words.pop(0))
    if words and not positional:
        raise UserError(f"unexpected argument {words[0]!r}; every setting is a flag (see --help)")
    config = checked(config_class(**given))
    config.given = set(given)
    if positional:
        setattr(config, positional, words + words_after)
    return config


def first_word_of(config_class) -> str | None:
    """The name of the flag whose value the first plain word is, or None."""
    for field in dataclasses.fields(config_class):
        if field.metadata["first_word"]:
            return field.name
    return None


def is_settings_file(word: str, must_exist: bool) -> bool:
    """Whether a first argument is read as a settings file."""
    if not word.endswith((".yaml", ".yml", ".json")):
        return False
    return not must_exist or os.path.isfile(word)


def is_run(word: str) -> bool:
    """Whether the word is the name or folder of a run, a checkpoint folder or a weights file."""
    if not word:
        return False
    # os.path, because Path.is_file raises an error for a text that is too long for a name.
    for path in (os.path.join("runs", word), os.path.expanduser(word)):
        if path.endswith((".safetensors", ".pt")) and os.path.isfile(path):
            return True
        names = ("config.json", "model.safetensors")
        if any(os.path.isfile(os.path.join(path, name)) for name in names):
            return True
    return False


def _parser(fields) -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for field in fields:
        if field.type is bool:  # --check, --check true or --check=false
            kind: dict[str, Any] = dict(type=_boolean, nargs="?", const=True)
        elif field.type is tuple:  # whole numbers: --gpu_devices 0 1 2
            kind = dict(type=int, nargs="+")
        elif field.type is str:  # the shell does not expand the ~ in --run=~/x
            kind = dict(type=os.path.expanduser)
        else:
            kind = dict(type=field.type)
        spellings = dict.fromkeys([field.name, field.name.replace("_", "-")])
        parser.add_argument(*(f"--{name}" for name in spellings), **kind)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        """Raise one line, where argparse would print the whole usage first."""
        raise UserError(f"{message} (see --help)")


def _boolean(word: str) -> bool:
    if word.lower() not in TRUE_WORDS + FALSE_WORDS:
        raise argparse.ArgumentTypeError(f"{word!r} is not true or false")
    return word.lower() in TRUE_WORDS


def _as_flags(settings: dict, names: list[str], file: Path) -> list[str]:
    """A settings file as flags, so that a value is checked in one way wherever it comes from."""
    for name in settings:
        if name not in names:
            raise UserError(f"unknown setting {name!r} in {file}{nearest(str(name), names)}")
    left_out = (None, "null", "~", "")  # JSON's null, then YAML's
    return [f"--{name}={value}" for name, value in settings.items() if value not in left_out]


def _with_values(arguments: list[str], fields) -> list[str]:
    """Turn `--compare runs/a` into `--compare=true runs/a`.

    argparse would take the run for the value of --compare.
    """
    switches = {f"--{field.name}" for field in fields if field.type is bool}
    result = []
    for word, after in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        is_switch = word.replace("-", "_").replace("__", "--", 1) in switches
        has_value = after.lower() in TRUE_WORDS + FALSE_WORDS
        if is_switch and not has_value:
            word += "=true"
        result.append(word)
    return result


def _refuse_unknown_flags(words: list[str], names: list[str], positional: str | None) -> None:
    """Raises `UserError` for the first unknown flag."""
    for index, word in enumerate(words):
        name = word.split("=")[0]
        # A Chinese input method makes —— of two hyphens, and － of one.
        bare = name.lstrip("-—–－")
        if word.startswith("-") and len(word) > 1:
            values = itertools.takewhile(str.isdigit, words[index + 1 :])
            advice = advice_on(bare, list(values), names, positional)
            if positional and bare != positional:
                advice += f"; write -- before {positional} that begins with -"
            raise UserError(f"unknown flag {name}{advice}")
        if bare != name and bare.replace("-", "_") in names:
            raise UserError(f"{name} has dashes of a Chinese input method; type --{bare}")


def advice_on(word: str, values: list[str], names: list[str], positional: str | None) -> str:
    """What to type in place of an unknown flag, as the end of a sentence.

    `values`: the numbers that follow it.
    """
    if word in ("gpu_devices", "gpus", "gpu") and values:
        start = command()
        if len(values) > 1:
            start = start.replace("python ", f"torchrun --nproc_per_node {len(values)} ", 1)
        return f"; choose GPUs by `CUDA_VISIBLE_DEVICES={','.join(values)} {start}`"
    if word == positional:
        return f"; give the {word} without a flag: `{command()} {word.upper()}`"
    return nearest(word, names, "--")


def checked(config):
    """The same settings. Raises `UserError` for one outside its flag's type, bounds or choices."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        allowed = (int, float) if field.type is float else field.type
        if not isinstance(value, allowed):
            raise UserError(f"--{field.name} {value!r} must be of type {field.type.__name__}")
        if isinstance(value, str):
            _check_text(field, value)
        for number in value if isinstance(value, tuple) else [value]:
            if isinstance(number, int | float):
                _check_number(field, number)
    return config


def _check_text(field, value: str) -> None:
    if re.search("[\0\ud800-\udfff]", value):  # surrogates stand for bytes that are not UTF-8
        raise UserError(
            f"--{field.name} {value!r} holds a NUL character, or is not UTF-8; rename it"
        )
    listed = re.search(r"\(([\w.-]+(?:\|[\w.-]+)+)\)", field.metadata["help"])  # (a|b)
    if not listed:
        return
    choices = listed[1].split("|")
    if value not in (*choices, field.default):
        names = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise UserError(
            f"--{field.name} {value} is unknown; choose {names}{nearest(value, choices)}"
        )


def _check_number(field, number: int | float) -> None:
    limits = {name: field.metadata[name] for name in BOUNDS if field.metadata[name] is not None}
    finite = -math.inf < number < math.inf  # false for NaN; right for integers beyond all floats
    if finite and all(BOUNDS[name][0](number, limit) for name, limit in limits.items()):
        return
    # The limit of all whole numbers is mentioned only where it is exceeded.
    shown = [name for name, limit in limits.items() if limit != LARGEST or number > LARGEST]
    words = [f"{BOUNDS[name][1]} {limits[name]:,}" for name in shown]
    raise UserError(f"--{field.name} {number} must be {' and '.join(words) or 'a finite number'}")


def read_settings(path: Path) -> dict:
    """The settings in a YAML or JSON file."""
    import yaml

    try:
        if path.stat().st_size > SETTINGS_BYTES:
            raise UserError(
                f"settings file {path} is larger than {SETTINGS_BYTES:,} bytes; is it another file?"
            )
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            values = json.loads(text)
        else:
            # Every value as it is written: YAML would read a run named 010 as 8, and no as false.
            values = yaml.load(text, Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"cannot read settings file {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, no date
        raise UserError(f"settings file {path} is not valid YAML or JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"settings file {path} must hold `name: value` lines")
    if any(isinstance(value, dict | list | set) for value in values.values()):
        raise UserError(f"settings file {path} must hold `name: value` lines")
    return values


def nearest(word: str, names: list[str], prefix: str = "") -> str:
    """'; did you mean --lr?' for the name closest to `word`.

    If none is close, '; see --help' for a flag.
    """
    word = word.replace("-", "_")
    close = difflib.get_close_matches(word, names, n=1)
    if OTHER_NAMES.get(word) in names:
        close = [OTHER_NAMES[word]]
    if close:
        advice = f"; did you mean {prefix}{close[0]}?"
        if (word, close[0]) == ("batch_size", "tokens_per_batch"):
            advice += " It counts tokens, about 25 a sentence"
        return advice
    return "; see --help" if prefix else ""


def format_help(config_class, description: str, positional: str | None) -> str:
    """Name, default, help and bounds of each flag, by groups, in lines of 80 columns."""
    usage = f"{command()} [SETTINGS.yaml] [--flag{NO_BREAK}value{NO_BREAK}…]"
    if first_word_of(config_class):
        usage += " [RUN]"
    if positional:
        usage += f" [{positional.upper()}{NO_BREAK}…]"
    lines = textwrap.wrap(
        usage,
        LINE,
        subsequent_indent=" " * 4,
        break_long_words=False,  # a path stays whole, so that it can be copied
        break_on_hyphens=False,
    )
    if description:
        lines.append(f"  {description}")
    fields = dataclasses.fields(config_class)
    widest = max(len(field.name) for field in fields)
    for group, of_group in itertools.groupby(fields, lambda field: field.metadata["group"]):
        lines.append(f"{group}:")
        for field in of_group:
            default = field.default
            if default in ("", (), None) or default is False:  # `is`: 0 == False, yet is shown
                default = "-"
            bounds = [
                f"{sign}{NO_BREAK}{field.metadata[name]:,}"
                for name, (_, _, sign) in BOUNDS.items()
                if field.metadata[name] not in (None, LARGEST)
            ]
            shown = f" [{f',{NO_BREAK}'.join(bounds)}]" if bounds else ""
            columns = f"  --{field.name:<{widest}}  {default!s:<5}  "
            wrapped = textwrap.wrap(
                f"{field.metadata['help']}{shown}".replace("|", "| "),  # long choices may be broken
                LINE,
                initial_indent=columns,
                subsequent_indent=" " * len(columns),
                break_on_hyphens=False,
            )
            lines += [line.replace("| ", "|") for line in wrapped]
    return "\n".join(lines).replace(NO_BREAK, " ") + "\n"


def command() -> str:
    """How the user started this script: `python train.py`, `python -m labs.lenet`, torchrun.

    The path of the script is as it was typed, so that the command works from the same directory.
    """
    module = getattr(sys.modules["__main__"], "__spec__", None)  # None for a script's file
    name = module.name.removesuffix(".__main__") if module else shlex.quote(sys.argv[0])
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if not by_torchrun or not several_processes():
        return f"python -m {name}" if module else f"python {name}"
    # Without the "--", torchrun would take our --run for one of its own flags.
    module_flag = "-m " if module else ""
    return f"torchrun --nproc_per_node {os.environ['LOCAL_WORLD_SIZE']} {module_flag}-- {name}"


def beside(script: str) -> str:
    """The command of another script, in the folder of the one that the user started."""
    if getattr(sys.modules["__main__"], "__spec__", None):  # `python -m …` works in this folder
        return f"python {script}"
    # In an interactive Python the first argument is empty.
    return f"python {shlex.quote(str(Path(sys.argv[0] or script).with_name(script)))}"


def load_config(config_class, path: Path):
    """The dataclass saved at `path`.

    Raises `UserError` for a file that is missing, damaged or of another script.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        config = config_class(**saved)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; is {path.parent} a run of this script?"
        ) from None
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path} is damaged, or of another script or version: {error}; start a new run"
        ) from None
    try:
        checked(config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    for field in dataclasses.fields(config):
        if field.name not in saved:
            raise UserError(
                f"{path} is of another version: it lacks --{field.name}; start a new run"
            )
    return config
