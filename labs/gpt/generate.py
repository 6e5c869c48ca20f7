"""Continue a text with a trained model.

    python -m labs.gpt.generate --ckpt runs/NAME --prompt "In this paper" --temperature 0.8

Keys and values of earlier tokens are kept (KV cache), so each new token costs one position.
"""

from dataclasses import dataclass

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """What to write, and with which model."""

    ckpt: str = flag(
        "", "run of labs.gpt, or one of its checkpoints; default: the newest", "Generation"
    )
    prompt: str = flag("In this paper", "the beginning of the text", "Generation")
    tokens: int = flag(60, "number of new tokens", "Generation", min=1)
    temperature: float = flag(
        0.8, "0: always the most probable token; 1: as the model says", "Generation", min=0, max=10
    )
    top_p: float = flag(
        0.9,
        "draw from the most probable tokens with this total share",
        "Generation",
        above=0,
        max=1,
    )
    seed: int = flag(1, "seed of the draws", "Generation", min=0)


if __name__ == "__main__":
    config = parse_flags(Config, "continue a text with a trained model")

import torch
from torch import Tensor

from labs.gpt.checkpoints import checkpoint_of, load_weights, newest_run
from labs.gpt.model import GPT


@torch.no_grad()
def generate(model: GPT, tokens: Tensor, config, longest: int, end: int | None = None) -> Tensor:
    """Token ids (1, T) → with up to `config.tokens` more; stops at token `end`, or at `longest`."""
    draw = torch.Generator().manual_seed(config.seed)
    past = {number: [] for number in model.h}
    new = tokens  # what the model has not seen yet
    for _ in range(min(config.tokens, longest - tokens.shape[1])):
        logits = model(new, past=past)[:, -1].float()  # (1, V)
        new = choose(logits, config.temperature, config.top_p, draw)  # (1, 1)
        tokens = torch.cat([tokens, new], dim=1)
        if new.item() == end:
            break
    return tokens


def choose(logits: Tensor, temperature: float, top_p: float, draw: torch.Generator) -> Tensor:
    """The next token, (1, V) → (1, 1), by nucleus sampling (Holtzman et al. 2020)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    shares, order = (logits / temperature).softmax(-1).sort(descending=True)
    # A token stays if those before it do not reach the share.
    shares[shares.cumsum(-1) - shares >= top_p] = 0
    place = torch.multinomial(shares.cpu(), 1, generator=draw).to(order.device)
    return order.gather(-1, place)


def sample(model: GPT, tokenizer, config, longest: int) -> str:
    """The text that `model` writes after `config.prompt`; `longest`: positions of the model."""
    ids = tokenizer(config.prompt, add_special_tokens=False)["input_ids"]
    ids = ids or [tokenizer.eos_token_id]
    if len(ids) >= longest:
        raise UserError(
            f"the prompt has {len(ids)} tokens and the model {longest} positions; "
            "use a shorter --prompt"
        )
    tokens = torch.tensor([ids], device=next(model.parameters()).device)
    tokens = generate(model, tokens, config, longest, tokenizer.eos_token_id)
    return tokenizer.decode(tokens[0].tolist(), skip_special_tokens=True)


def main(config: Config) -> None:
    """Load the model and print what it writes."""
    from transformers import AutoTokenizer

    path = checkpoint_of(config.ckpt or newest_run())
    folder = path.parent.parent / "tokenizer"
    if not folder.is_dir():
        raise UserError(
            f"{path.parent.parent} was trained on random ids and cannot write text; "
            "train with --data"
        )
    weights, sizes = load_weights(path)
    if not any(name.startswith("h.") for name in weights):
        raise UserError(f"{path} is of --model hf; generation needs --model own")
    model = GPT(sizes)
    model.load_state_dict(weights)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    print(sample(model.eval(), tokenizer, config, sizes.sequence))


if __name__ == "__main__":
    run_script(lambda: main(config))
