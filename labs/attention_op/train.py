"""Train the translation model with attention by hand; all other flags are those of train.py.

python -m labs.attention_op.train --attention cpp --max_steps 100

The weights are those of the stock model, so `python evaluate.py` scores such a run as any other.
"""

from dataclasses import dataclass

import train
from engine.config import flag, parse_flags
from engine.errors import run_script
from labs.attention_op import use_in
from model import Translator


@dataclass
class Config(train.Config):
    """The settings of train.py and one more."""

    attention: str = flag("python", "attention by hand (python|cpp|fused)", "Model", fixed=True)


def main(config: Config) -> None:
    """Training as train.py does it, with every attention layer of the model replaced."""

    def translator_by_hand(sizes) -> Translator:
        model = Translator(sizes)
        use_in(model, config.attention)
        return model

    train.Translator = translator_by_hand
    train.main(config)


if __name__ == "__main__":
    settings = parse_flags(Config, "train the translation model with attention by hand")
    run_script(lambda: main(settings))
