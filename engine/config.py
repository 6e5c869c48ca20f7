"""Command-line flags from one dataclass: every field is a flag; its help, bounds and choices stand beside its default.

@dataclass
class Config:
    lr: float = flag(1e-3, "peak learning rate", "Training", above=0, below=10)
    preset: str = flag("lab", "model size (lab|base|big)", "Model")     # the words in (a|b) are the choices

config = parse_flags(Config)              # script.py --lr 3e-4, or: script.py settings.yaml --lr 3e-4
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
import sys
from pathlib import Path

from engine.errors import UserError, prepare_process, stop
from engine.files import as_json, atomic_write, wait_for_disk  # noqa: F401

SETTINGS_BYTES = 2**16
OTHER_WORDS = {  # what a flag is called elsewhere
    "batch_size": "tokens_per_batch",
    "batch": "tokens_per_batch",
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "num_beams": "beam",
    "output": "out",
    "model": "ckpt",
    "checkpoint": "ckpt",
    "name": "run",
}
LARGEST = 2**31 - 1  # whole number, where a flag names no other limit
BOUNDS = {
    "min": (operator.ge, "at least", ">="),
    "above": (operator.gt, "above", ">"),  # test, words, sign
    "max": (operator.le, "at most", "<="),
    "below": (operator.lt, "below", "<"),
}
SAYS_TRUE, SAYS_FALSE = ("true", "yes", "1"), ("false", "no", "0")


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
):
    """A dataclass field that is a command-line flag, listed under `group` in --help.

    Bounds: min ≤ value ≤ max, above < value < below. Where the help names choices as (a|b), the
    value must be one of them. A `fixed` setting stays the same when a run is resumed.
    """
    if isinstance(default, int) and max is None and below is None:
        max = LARGEST  # catches a typo of some zeros too many
    bounds = {"min": min, "above": above, "max": max, "below": below}
    metadata = {"help": help, "group": group, "fixed": fixed, **bounds}
    return dataclasses.field(default=default, metadata=metadata)


def parse_flags(config_class, description: str = "", positional: str | None = None):
    """Parse sys.argv into `config_class`; its attribute `given` names the flags that the user set.

    A first argument ending in .yaml or .json is read as the defaults. With `positional`, words that belong to no flag
    and all words after `--` are collected in `config.<positional>`; without it they are an error. Mistakes print one
    line and exit with 2.
    """
    prepare_process()
    try:
        return _parse(config_class, description, positional, sys.argv[1:])
    except UserError as error:
        stop(str(error))


def _parse(config_class, description: str, positional: str | None, arguments: list[str]):
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    names = [field.name for field in dataclasses.fields(config_class)]
    for field in dataclasses.fields(config_class):
        kind = dict(
            type=os.path.expanduser if field.type is str else field.type
        )  # the shell expands no ~ in --run=~/x
        kind = (
            dict(type=_boolean, nargs="?", const=True) if field.type is bool else kind
        )  # --check, --norm_first=false
        kind = (
            dict(type=int, nargs="+") if field.type is tuple else kind
        )  # whole numbers: --gpu_devices 0 1 2
        parser.add_argument(
            f"--{field.name}", f"--{field.name.replace('_', '-')}", **kind
        )  # _ or - in the name
    end = arguments.index("--") if positional and "--" in arguments else len(arguments)
    arguments, words_after = arguments[:end], arguments[end + 1 :]
    if {"--help", "-h"} & set(arguments):
        print(format_help(config_class, description, positional), end="")
        sys.exit(0)
    if arguments and arguments[0].endswith((".yaml", ".yml", ".json")):
        values = read_settings(Path(arguments.pop(0)))
        if unknown := [name for name in values if name not in names]:
            raise UserError(
                f"unknown setting {unknown[0]!r} in the settings file{nearest(str(unknown[0]), names)}"
            )
        # As flags before the others: so a value is checked and converted in one way, wherever it comes from.
        arguments = [
            f"--{name}={value}" for name, value in values.items() if value is not None
        ] + arguments
    if positional:  # `--compare runs/a` → `--compare=true runs/a`, or argparse takes the run for the switch's value
        yes = [
            f"--{field.name.replace('_', '-')}"
            for field in dataclasses.fields(config_class)
            if field.type is bool
        ]
        arguments = [
            f"{word}=true"
            if word.replace("_", "-") in yes and after.lower() not in SAYS_TRUE + SAYS_FALSE
            else word
            for word, after in zip(arguments, [*arguments[1:], ""])
        ]
    parsed, rest = parser.parse_known_args(arguments)
    for word in rest:
        if word.startswith("-") and len(word) > 1:
            advice = nearest(word.lstrip("-").split("=")[0], names, "--")
            advice += f"; {positional} that begins with - goes after --" if positional else ""
            raise UserError(f"unknown flag {word.split('=')[0]}{advice}")
    if rest and not positional:
        raise UserError(f"unexpected argument {rest[0]!r}; every setting is a flag (see --help)")
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(parsed).items()
    }
    config = checked(config_class(**given))
    config.given = {*given}
    if positional:
        setattr(config, positional, rest + words_after)
    return config


class _Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print the whole usage first
        raise UserError(f"{message} (see --help)")


def _boolean(word: str) -> bool:
    if word.lower() not in SAYS_TRUE + SAYS_FALSE:
        raise argparse.ArgumentTypeError(f"{word!r} is not true or false")
    return word.lower() in SAYS_TRUE


def checked(config):
    """The same settings. Raises `UserError` for the first one outside the bounds or choices of its flag."""
    for field in dataclasses.fields(config):
        value, told = getattr(config, field.name), field.metadata
        if not isinstance(value, (int, float) if field.type is float else field.type):
            raise UserError(f"--{field.name} {value!r} must be of type {field.type.__name__}")
        if isinstance(value, str) and re.search(
            "[\0\ud800-\udfff]", value
        ):  # surrogates stand for other bytes
            raise UserError(
                f"--{field.name} {value!r} holds a NUL character, or is not UTF-8; rename it"
            )
        for number in value if isinstance(value, tuple) else [value]:
            if isinstance(number, int | float) and (bounds := _missed_bounds(number, told)):
                raise UserError(f"--{field.name} {number} must be {bounds}")
        in_help = field.type is str and re.search(
            r"\(([\w.-]+(?:\|[\w.-]+)+)\)", told["help"]
        )  # (a|b)
        choices = in_help[1].split("|") if in_help else []
        if choices and value not in (*choices, field.default):
            names = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise UserError(
                f"--{field.name} {value} is unknown; choose {names}{nearest(value, choices)}"
            )
    return config


def _missed_bounds(number: int | float, told) -> str:
    """'' for a number within the bounds of its flag, else the bounds in words: 'at least 1 and below 10'."""
    bounds = {name: told[name] for name in BOUNDS if told[name] is not None}
    finite = (
        -math.inf < number < math.inf
    )  # false for nan too, and right for whole numbers that no float can hold
    if finite and all(BOUNDS[name][0](number, bound) for name, bound in bounds.items()):
        return ""
    # The limit of every whole number goes without saying until it is hit.
    shown = [name for name, bound in bounds.items() if bound != LARGEST or number > LARGEST]
    return (
        " and ".join(f"{BOUNDS[name][1]} {bounds[name]:,}" for name in shown) or "a finite number"
    )


def read_settings(path: Path) -> dict:
    """The settings in a YAML or JSON file (JSON is a subset of YAML)."""
    import yaml

    try:
        if path.stat().st_size > SETTINGS_BYTES:
            raise UserError(
                f"settings file {path} is larger than {SETTINGS_BYTES:,} bytes; is it another file?"
            )
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read settings file {path}: {error.strerror}") from None
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: not UTF-8, a date that is none
        raise UserError(f"settings file {path} is not valid YAML: {error}") from None
    # Nested values would have no flag, and written out they can be a billion times the size of the file.
    if not isinstance(values, dict) or any(
        isinstance(value, dict | list | set) for value in values.values()
    ):
        raise UserError(f"settings file {path} must hold `name: value` lines")
    return values


def nearest(word: str, names: list[str], prefix: str = "") -> str:
    """'; did you mean --lr?' for the name closest to `word`; where none is close, a flag's help is named."""
    word = word.replace("-", "_")
    same = [OTHER_WORDS[word]] if OTHER_WORDS.get(word) in names else []
    close = same or difflib.get_close_matches(word, names, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else "; see --help" if prefix else ""


def format_help(config_class, description: str, positional: str | None) -> str:
    """One line a flag, by groups: name, default, help, bounds."""
    words = f" [{positional.upper()} …]" if positional else ""
    lines = [f"{command()} [--flag value …]{words}    {description}".rstrip()]
    for group, fields in itertools.groupby(
        dataclasses.fields(config_class), lambda field: field.metadata["group"]
    ):
        lines.append(f"{group}:")
        for field in fields:
            told, default = field.metadata, field.default
            default = (
                "-" if default in ("", (), None) or default is False else default
            )  # `is`: 0 == False, yet shown
            bounds = [
                f"{sign} {told[n]:g}"
                for n, (*_, sign) in BOUNDS.items()
                if told[n] not in (None, LARGEST)
            ]
            shown = f" [{', '.join(bounds)}]" if bounds else ""
            lines.append(f"  --{field.name:<19} {default!s:<6} {told['help']}{shown}".rstrip())
    return "\n".join(lines) + "\n"


def command() -> str:
    """What the user typed to start this script: `python train.py`, `python -m labs.lenet`, or torchrun with either."""
    module = getattr(
        sys.modules["__main__"], "__spec__", None
    )  # None for a script that is named by its file
    name = module.name.removesuffix(".__main__") if module else Path(sys.argv[0]).name
    if os.environ.get("WORLD_SIZE", "1") == "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return f"python -m {name}" if module else f"python {name}"
    # With the "--", or torchrun takes our --run and --resume for its own.
    return f"torchrun --nproc_per_node {os.environ['LOCAL_WORLD_SIZE']} {'-m -- ' if module else '-- '}{name}"


def load_config(config_class, path: Path):
    """The dataclass saved at `path`. Raises `UserError` for a file that is missing, damaged or of another script."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        config = config_class(**saved)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; is {path.parent} a run of this script?"
        ) from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged, or belongs to another script: {error}") from None
    lacking = [field.name for field in dataclasses.fields(config) if field.name not in saved]
    if lacking:
        names = ", ".join(f"--{name}" for name in lacking)
        print(f"note: {path} lacks {names}: as by default", file=sys.stderr, flush=True)
    return checked(config)
