"""Train the translation model with attention by hand; all other flags are those of train.py.

python -m labs.attention_op.train --attention cpp --max_steps 100

The weights are those of the stock model, so `python evaluate.py` scores such a run as any other.
"""

from dataclasses import dataclass

import model
import train
from engine.config import flag, parse_flags
from engine.errors import run_script
from labs.attention_op import use_in


@dataclass
class Config(train.Config):
    """The settings of train.py and one more."""

    attention: str = flag("python", "attention by hand (python|cpp|fused)", "Model", fixed=True)


def main(config: Config) -> None:
    """Training as train.py does it, with every attention layer of the model replaced."""

    def by_hand(translator: model.Translator) -> None:
        """Put the lab's attention into a new model."""
        use_in(translator, config.attention)

    model.CHANGES.append(by_hand)
    try:
        train.main(config)
    finally:
        model.CHANGES.remove(by_hand)


if __name__ == "__main__":
    settings = parse_flags(Config, "train the translation model with attention by hand")
    run_script(lambda: main(settings), train.SMALLER_PARTS)
