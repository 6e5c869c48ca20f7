"""Translate text with a trained model.

python translate.py 今天天气怎么样？                        # the newest run
python translate.py --ckpt runs/NAME --beam 4 < zh.txt > en.txt
python translate.py                                       # on a terminal: a prompt
python translate.py --serve                               # a page in the browser
python translate.py --export ctranslate2 DIR              # the model, for another program
"""

from dataclasses import dataclass

from engine.config import checked, flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Every setting of a translation."""

    ckpt: str = flag("", "run, checkpoint folder or weights file; default: newest run", "Options")
    beam: int = flag(1, "beam size; 1: greedy", "Options", min=1, max=1000)
    length_penalty: float = flag(
        1.5, "larger: longer outputs; beam search only", "Options", min=0, max=10
    )
    precision: str = flag("auto", "(auto|fp32|bf16|fp16|int8); int8: faster on a CPU", "Options")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "Options")
    whole_lines: bool = flag(
        False, "do not cut lines into sentences: a line in one piece, as evaluate.py", "Options"
    )

    serve: bool = flag(False, "a page on this machine, until Ctrl-C", "The model elsewhere")
    port: int = flag(8000, "of the page; 0: a free one", "The model elsewhere", min=0, max=65535)
    export: str = flag(
        "", "write it to the folder TEXT for (ctranslate2|onnx|hf)", "The model elsewhere"
    )
    quantization: str = flag(
        "", "of ctranslate2's weights (int8|float16); default: fp32", "The model elsewhere"
    )

    def __post_init__(self):
        if self.precision == "int8" and (
            self.beam > 1 or self.serve
        ):  # the page shows what a beam finds
            asked = "--serve" if self.serve else f"--beam {self.beam}"
            raise UserError(f"--precision int8 decodes greedily; {asked} needs another --precision")
        if self.quantization and self.export != "ctranslate2":
            raise UserError("--quantization is for --export ctranslate2")


if (
    __name__ == "__main__"
):  # before the heavy imports, so that --help and a wrong flag answer at once
    config = parse_flags(
        Config, "translate arguments, or lines of standard input", positional="text"
    )

import sys
from functools import partial
from itertools import chain, islice

from decoding import translate_lines
from engine import distributed
from loading import load_for_decoding
from text.input import groups_of_lines
from text.sentences import join, sentences


def translate(config: Config) -> None:
    """Translate the arguments, the lines of standard input, or what is typed at a prompt."""
    if (config.export or config.serve) and distributed.several_asked():
        raise UserError(
            "--serve and --export take one process; start translate.py without torchrun and srun"
        )
    world = distributed.start(checked(config).device)
    # Not to standard output, which holds translations alone.
    note = partial(print, file=sys.stderr) if world.is_main else lambda _: None
    trained, precision, steps = load_for_decoding(config, 1, world, note)
    if config.export or config.serve:
        from tools import serving

        return serving.start(config, trained, precision, steps)
    sys.stdout.reconfigure(encoding="utf-8")  # as the input is, whatever the locale
    groups = groups_of_lines(config.text)
    while lines := world.on_main(lambda: next(groups, None)):  # of many processes one reads
        pieces = [[line] if config.whole_lines else sentences(line) for line in lines]
        with precision.autocast():
            translations = translate_lines(
                trained.model,
                trained.source_tokenizer,
                trained.target_tokenizer,
                list(chain(*pieces)),
                beam=config.beam,
                length_penalty=config.length_penalty,
                steps=steps,
                world=world,
            )
        if translations:
            texts = iter(translations.texts)
            print("\n".join(join(islice(texts, len(line))) for line in pieces), flush=True)
        if translations and translations.cut:
            longest = trained.model.config.max_length
            note(
                f"note: {translations.cut} sentences were cut to the model's limit of {longest} tokens"
            )
    world.stop()


if __name__ == "__main__":
    run_script(lambda: translate(config))
