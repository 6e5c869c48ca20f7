"""Continue a text with a trained model.

python -m labs.gpt.generate --ckpt runs/NAME --prompt "In this paper" --temperature 0.8
"""

from dataclasses import dataclass

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """What to write, and with which model."""

    ckpt: str = flag("", "run of labs.gpt; its newest checkpoint is used", "Generation")
    prompt: str = flag("In this paper", "the beginning of the text", "Generation")
    max_new_tokens: int = flag(60, "number of new tokens", "Generation", min=1)
    temperature: float = flag(
        0.8, "0: always the most probable token; 1: as the model says", "Generation", min=0, max=10
    )
    seed: int = flag(1, "seed of the draws", "Generation", min=0)


if __name__ == "__main__":
    config = parse_flags(Config, "continue a text with a trained model")

import sys
from functools import partial

import torch
from torch import Tensor

from engine.run import find_run
from labs.gpt.checkpoints import load_weights, newest
from labs.gpt.model import GPT


@torch.no_grad()
def generate(model: GPT, tokens: Tensor, config: Config, longest: int) -> Tensor:
    """Token ids (1, T) → with `config.max_new_tokens` more. The model sees the last `longest` of them."""
    draw = torch.Generator().manual_seed(config.seed)
    for _ in range(config.max_new_tokens):
        logits = model(tokens[:, -longest:])[0, -1]  # (V,)
        if config.temperature < 1e-6:  # smaller ones would make logits infinite
            new = logits.argmax(keepdim=True)
        else:
            new = torch.multinomial((logits / config.temperature).softmax(0), 1, generator=draw)
        tokens = torch.cat([tokens, new.unsqueeze(0)], dim=1)
    return tokens


def main(config: Config) -> None:
    """Load the model and print what it writes."""
    from transformers import AutoTokenizer

    run = find_run(config.ckpt)
    path = newest(run, log=partial(print, file=sys.stderr))  # apart from the text that it writes
    if path is None:
        raise UserError(f"--ckpt {config.ckpt!r} has no checkpoint of labs.gpt; name such a run")
    if not (run / "tokenizer").is_dir():
        raise UserError(f"{run} was trained on random ids and cannot write; train with --data")
    weights, sizes = load_weights(path)
    if not any(name.startswith("h.") for name in weights):
        raise UserError(f"{run} is of --model hf; generation needs --model own")
    model = GPT(sizes)
    model.load_state_dict(weights)
    tokenizer = AutoTokenizer.from_pretrained(run / "tokenizer")
    ids = tokenizer(config.prompt, add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([ids or [tokenizer.eos_token_id]])
    tokens = generate(model.eval(), tokens, config, sizes.seq_length)
    print(tokenizer.decode(tokens[0].tolist(), skip_special_tokens=True))


if __name__ == "__main__":
    run_script(lambda: main(config))
