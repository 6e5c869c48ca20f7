"""Command-line flags from one dataclass: every field is a flag, and its help stands beside its default.

@dataclass
class Config:
    lr: float = flag(1e-3, "peak learning rate", "Optimisation")

config = parse_flags(Config)              # script.py --lr 3e-4, or: script.py settings.yaml --lr 3e-4
"""

import dataclasses
import difflib
import json
import os
import sys
from pathlib import Path

from engine.errors import UserError, stop


def flag(default, help: str, group: str):
    """A dataclass field that is a command-line flag, listed under `group` in --help."""
    # HfArgumentParser hands the metadata to argparse, which knows "help" and nothing of ours: both travel in it.
    return dataclasses.field(default=default, metadata={"help": f"{group}\t{help}"})


def parse_flags(config_class, description: str = "", positional: str | None = None):
    """Parse sys.argv into `config_class`; its attribute `given` names the flags that the user set.

    A first argument ending in .yaml or .json is read as the defaults. With `positional`, words that belong to no flag
    and all words after `--` are collected in `config.<positional>`; without it they are an error. Mistakes print one
    line and exit with 2.
    """
    try:
        return _parse(config_class, description, positional, sys.argv[1:])
    except UserError as error:
        stop(str(error))


def _parse(config_class, description: str, positional: str | None, arguments: list[str]):
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message):  # argparse would print the whole usage first
            raise UserError(f"{message} (see --help)")

        def format_help(self):
            return format_help(config_class, description, positional)

    parser = Parser(config_class, allow_abbrev=False)
    names = [field.name for field in dataclasses.fields(config_class)]
    end = arguments.index("--") if positional and "--" in arguments else len(arguments)
    arguments, words_after = arguments[:end], arguments[end + 1 :]
    if arguments and arguments[0].endswith((".yaml", ".yml", ".json")):
        values = read_settings(Path(arguments.pop(0)))
        for name in values:
            if name not in names:
                raise UserError(f"unknown setting {name!r} in the settings file{nearest(str(name), names)}")
        # As flags before the others: so a value is checked and converted in one way, wherever it comes from.
        arguments = [f"--{name}={value}" for name, value in values.items() if value is not None] + arguments
    config, rest = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    for word in rest:
        if word.startswith("-") and len(word) > 1:
            advice = nearest(word.lstrip("-").split("=")[0], names, "--")
            advice += f"; {positional} that begins with - goes after --" if positional else ""
            raise UserError(f"unknown flag {word.split('=')[0]}{advice}")
    if rest and not positional:
        raise UserError(f"unexpected argument {rest[0]!r}; every setting is a flag (see --help)")
    if positional:
        setattr(config, positional, rest + words_after)
    words = {word[2:].split("=")[0].replace("-", "_") for word in arguments if word.startswith("--")}
    config.given = words & set(names)
    return config


def read_settings(path: Path) -> dict:
    """The settings in a YAML or JSON file (JSON is a subset of YAML)."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read settings file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"settings file {path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"settings file {path} must hold `name: value` lines")
    return values


def nearest(word: str, names: list[str], prefix: str = "") -> str:
    """'; did you mean --lr?' for the name closest to `word`, or '' when none is close."""
    close = difflib.get_close_matches(word.replace("-", "_"), names, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else f"; {prefix and 'see --help'}".rstrip("; ")


def format_help(config_class, description: str, positional: str | None) -> str:
    """One line a flag, by groups: name, default, help."""
    words = f" [{positional.upper()} …]" if positional else ""
    lines = [f"{command()} [--flag value …]{words}    {description}".rstrip()]
    last_group = None
    for field in dataclasses.fields(config_class):
        group, help = field.metadata["help"].split("\t")
        if group != last_group:
            lines.append(f"{group}:")
        default = "-" if field.default in ("", None) or field.default is False else field.default  # 0 is shown
        lines.append(f"  --{field.name:<19} {default!s:<6} {help}".rstrip())
        last_group = group
    return "\n".join(lines) + "\n"


def command() -> str:
    """What the user typed to start this script: `python train.py`, `python -m labs.lenet`, or torchrun with either."""
    module = getattr(sys.modules["__main__"], "__spec__", None)  # None for a script that is named by its file
    name = module.name.removesuffix(".__main__") if module else Path(sys.argv[0]).name
    if os.environ.get("WORLD_SIZE", "1") == "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return f"python -m {name}" if module else f"python {name}"
    # With the "--", or torchrun takes our --run and --resume for its own.
    return f"torchrun --nproc_per_node {os.environ['LOCAL_WORLD_SIZE']} {'-m -- ' if module else '-- '}{name}"


def save_config(config, path: Path) -> None:
    """Write the dataclass as JSON, what `load_config` reads again; whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(dataclasses.asdict(config), ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def load_config(config_class, path: Path):
    """The dataclass saved at `path`; unknown or missing settings are the user's affair, said in one line."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return config_class(**values)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; is {path.parent} a run of this script?") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged or of another script: {error}") from None
