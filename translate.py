"""Translate text with a trained model.

python translate.py 今天天气怎么样？                        # the newest run
python translate.py --ckpt runs/NAME --beam 4 < zh.txt > en.txt
python translate.py                                       # on a terminal: a prompt
"""

from dataclasses import dataclass

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Every setting of a translation."""

    ckpt: str = flag("", "run, checkpoint folder or weights file; default: newest run", "Options")
    beam: int = flag(1, "beam size; 1: greedy", "Options", least=1, most=1000)
    length_penalty: float = flag(0.6, "larger: longer outputs; beam search only", "Options", least=0, most=10)
    precision: str = flag("auto", "(auto|fp32|bf16|fp16|int8); int8: faster on a CPU", "Options")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "Options")
    captured: bool = flag(False, "decode with CUDA graphs on a GPU: faster, but new", "Options")

    def __post_init__(self):
        if self.precision == "int8" and self.beam > 1:
            raise UserError(f"--precision int8 decodes greedily; --beam {self.beam} needs another --precision")


if __name__ == "__main__":  # before the heavy imports, so that --help and a wrong flag answer at once
    config = parse_flags(Config, "translate arguments, or lines of standard input", positional="text")

import sys
from collections.abc import Iterator
from itertools import islice

from decoding import translate_lines
from engine import distributed
from loading import load_for_decoding

LINES_AT_ONCE = 2000  # of a file: enough to sort by length, few enough to see results soon


def translate(config: Config) -> None:
    """Translate the arguments, the lines of standard input, or what is typed at a prompt."""
    world = distributed.start(config.device)
    note = say_on_stderr if world.is_main else lambda _: None
    trained, precision, steps = load_for_decoding(config, 1, world, note)
    sys.stdout.reconfigure(encoding="utf-8")  # as the input is, whatever the locale
    groups = groups_of_lines(config.text)
    while lines := world.on_main(lambda: next(groups, None)):  # of many processes one reads
        with precision.autocast():
            translations = translate_lines(
                trained.model, trained.source_tokenizer, trained.target_tokenizer, lines,
                beam=config.beam, length_penalty=config.length_penalty, steps=steps, world=world,
            )  # fmt: skip
        if translations:
            print("\n".join(translations.texts), flush=True)
        if translations and translations.cut:
            longest = trained.model.config.max_length
            note(f"note: {translations.cut} sentences were cut to the model's limit of {longest} tokens")
    world.stop()


def groups_of_lines(texts: list[str]) -> Iterator[list[str]]:
    """What to translate, as much at once as is there."""
    if texts:
        yield texts
    elif sys.stdin.isatty():
        say_on_stderr("one sentence per line; an empty line ends the program")
        while line := prompt():
            yield [line]
    else:
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
        try:
            while group := list(islice(sys.stdin, LINES_AT_ONCE)):
                yield group
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not UTF-8 ({error.reason}); convert it with iconv first") from None


def prompt() -> str:
    """A line typed at the terminal; '' at its end."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def say_on_stderr(message: str) -> None:
    """Not to standard output, which holds translations alone."""
    print(message, file=sys.stderr)


if __name__ == "__main__":
    run_script(lambda: translate(config))
