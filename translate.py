"""Translate text with a trained model.

python translate.py 今天天气怎么样？                        # the newest run
python translate.py runs/NAME --beam 4 < zh.txt > en.txt   # a run, by its name or folder
python translate.py                                       # on a terminal: a prompt
python translate.py --serve                               # a page in the browser
python translate.py --export DIR                          # the model, for CTranslate2
"""

from dataclasses import dataclass
from typing import ClassVar

from engine.config import checked, flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Every setting of a translation."""

    # ClassVar, so that it is not a flag: the arguments that belong to no flag.
    text: ClassVar[list[str]]
    ckpt: str = flag(
        "",
        "run, checkpoint folder or weights file; default: newest run",
        "Options",
        first_word=True,
    )
    beam: int = flag(1, "beam size; 1: greedy", "Options", min=1, max=1000)
    length_penalty: float = flag(
        1.0, "beam search: a larger value makes longer outputs", "Options", min=0, max=10
    )
    nbest: int = flag(
        0, "print the N best of each whole line: number ||| text ||| score", "Options", min=0
    )
    precision: str = flag(
        "auto", "number format (auto|fp32|bf16|fp16|int8); int8: faster on a CPU", "Options"
    )
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "Options")
    fast: bool = flag(True, "faster code for PyTorch's own layers; false: PyTorch alone", "Options")
    whole_lines: bool = flag(
        False, "translate each line in one piece, as evaluate.py does", "Options"
    )

    serve: bool = flag(False, "serve a web page until Ctrl-C", "Serving and export")
    port: int = flag(
        8000, "port of the web page; 0: a free one", "Serving and export", min=0, max=65535
    )
    export: str = flag("", "export the model for CTranslate2 to this folder", "Serving and export")
    quantization: str = flag(
        "", "format of the exported weights (int8|float16); default: fp32", "Serving and export"
    )

    def __post_init__(self):
        # A --beam below 1 has an error of its own.
        if self.nbest > max(self.beam, 0):
            raise UserError(f"--nbest {self.nbest} needs --beam {self.nbest} or larger")
        if self.quantization and not self.export:
            raise UserError("--quantization is for --export")
        if self.port != 8000 and not self.serve:
            raise UserError("--port is for --serve")
        # The page asks for the beam size itself.
        if self.length_penalty != 1 and self.beam == 1 and not self.serve:
            raise UserError("--length_penalty needs --beam 2 or larger")


# Before the heavy imports, so that --help and a wrong flag answer at once.
if __name__ == "__main__":
    settings = parse_flags(
        Config, "translate arguments, or lines of standard input", positional="text"
    )

import sys
from functools import partial
from itertools import islice

from engine import distributed
from loading import load_for_decoding
from text.input import groups_of_lines
from text.sentences import join, sentences
from translation import translate_lines


def translate(config: Config) -> None:
    """Translate the arguments, the lines of standard input, or what is typed at a prompt.

    Every line in gives one line out, or up to N with --nbest N. Of several ranks rank 0 reads and
    prints, and all translate. Standard output receives translations alone; everything else goes to
    standard error.
    """
    if config.export or config.serve:
        if config.export and config.serve:
            raise UserError("--serve and --export exclude each other; give one of them")
        if config.text:
            raise UserError("--serve and --export take no text; leave it out")
        if distributed.several_asked():
            raise UserError(
                "--serve and --export take one process; start translate.py without torchrun or srun"
            )
    world = distributed.init(checked(config).device)
    note = partial(print, file=sys.stderr) if world.is_main else lambda line: None
    trained, precision, decoder = load_for_decoding(config, 1, world, note)
    if config.export:
        from tools.serving.export import export

        return export(trained, config.export, config.quantization, note)
    if config.serve:
        from tools.serving.server import serve

        return serve(trained, precision, decoder, config)

    # As the input is, whatever the locale.
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    whole_lines = config.whole_lines or config.nbest > 0  # a line has one score
    lines_done = 0
    groups = groups_of_lines(config.text)
    while lines := world.on_main(lambda: next(groups, None)):
        # The model has learned from single sentences, so a paragraph is cut into its sentences.
        pieces = [[line] if whole_lines else sentences(line) for line in lines]
        with precision.autocast():
            translations = translate_lines(
                decoder,
                trained.source_tokenizer,
                trained.target_tokenizer,
                [sentence for line in pieces for sentence in line],
                beam=config.beam,
                length_penalty=config.length_penalty,
                nbest=config.nbest,
                world=world,
            )
        if translations is not None:  # rank 0 has received those of all ranks
            if config.nbest:
                print_nbest(translations.nbest, first=lines_done)
            else:
                texts = iter(translations.texts)
                for line in pieces:
                    print(join(islice(texts, len(line))))
            sys.stdout.flush()
            if translations.cut:
                longest = trained.model.config.longest_sentence
                note(
                    f"note: {translations.cut} sentences were cut to the model's limit of "
                    f"{longest} tokens"
                )
        lines_done += len(lines)
    world.stop()


def print_nbest(nbest: list, first: int) -> None:
    """Print each line's number (from 0), texts and scores, best first, in the format of Moses."""
    for number, hypotheses in enumerate(nbest, first):
        for text, score in hypotheses:
            # Significant digits: a large --length_penalty makes scores tiny.
            print(f"{number} ||| {text} ||| {score:.5g}")


if __name__ == "__main__":
    run_script(lambda: translate(settings), when_full="give a smaller --beam")
