"""Write on from a text, with a trained model.

    python -m labs.gpt.generate --ckpt runs/NAME --prompt "In this paper" --tokens 60 --temperature 0.8 --top_p 0.9

The keys and values of the tokens before are kept (KV cache), so each new token is one step over one position.
"""

from dataclasses import dataclass

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """What to write, and with which model."""

    ckpt: str = flag(
        "", "a run of labs.gpt, or one of its checkpoints; the newest run", "Generation"
    )
    prompt: str = flag("In this paper", "the text to go on from", "Generation")
    tokens: int = flag(60, "new tokens", "Generation", min=1)
    temperature: float = flag(
        0.8, "0: always the likeliest; 1: as the model says", "Generation", min=0, max=10
    )
    top_p: float = flag(
        0.9, "draw from the likeliest that have this share together", "Generation", above=0, max=1
    )
    seed: int = flag(1, "of the draws", "Generation", min=0)


if __name__ == "__main__":
    config = parse_flags(Config, "write on from a text")

import torch
from torch import Tensor

from labs.gpt.checkpoints import checkpoint_of, load_weights, newest_run
from labs.gpt.model import GPT


@torch.no_grad()
def generate(
    model: GPT,
    tokens: Tensor,
    count: int,
    temperature: float,
    top_p: float,
    draw: torch.Generator,
    longest: int,
    end: int | None = None,
) -> Tensor:
    """Token ids (1, T) → the same with up to `count` more; ends at the token `end`, or when the sequence is full."""
    past = {number: [] for number in model.h}
    new = tokens  # what the model has not seen yet
    while count and tokens.shape[1] < longest:
        logits = model(new, past=past)[:, -1].float()  # (1, V)
        new = choose(logits, temperature, top_p, draw)  # (1, 1)
        tokens, count = torch.cat([tokens, new], dim=1), count - 1
        if end is not None and new.item() == end:
            break
    return tokens


def choose(logits: Tensor, temperature: float, top_p: float, draw: torch.Generator) -> Tensor:
    """The next token, (1, V) → (1, 1). Nucleus sampling (Holtzman et al. 2020): the unlikely tail is never drawn."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    shares, order = (logits / temperature).softmax(-1).sort(descending=True)
    shares[shares.cumsum(-1) - shares >= top_p] = (
        0  # a token stays if those before it do not fill the share
    )
    place = torch.multinomial(shares.cpu(), 1, generator=draw).to(order.device)
    return order.gather(-1, place)


def sample(model: GPT, tokenizer, prompt: str, config, longest: int) -> str:
    """`config` has tokens, temperature, top_p and seed."""
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    if len(ids) >= longest:
        raise UserError(
            f"the prompt has {len(ids)} tokens, the model's sequence is {longest}; give a shorter --prompt"
        )
    draw = torch.Generator().manual_seed(config.seed)
    tokens = torch.tensor([ids], device=next(model.parameters()).device)
    how = (config.tokens, config.temperature, config.top_p, draw, longest, tokenizer.eos_token_id)
    out = generate(model, tokens, *how)
    return tokenizer.decode(out[0].tolist(), skip_special_tokens=True)


def main(config: Config) -> None:
    """Load the model, print what it writes."""
    from transformers import AutoTokenizer

    path = checkpoint_of(config.ckpt or newest_run())
    folder = path.parent.parent / "tokenizer"
    if not folder.is_dir():
        raise UserError(
            f"{path.parent.parent} was trained on random ids; there is no text to write"
        )
    weights, sizes = load_weights(path)
    if not any(name.startswith("h.") for name in weights):
        raise UserError(f"{path} is a model of --model hf; only our own generates here")
    model = GPT(sizes)
    model.load_state_dict(weights)
    print(
        sample(
            model.eval(),
            AutoTokenizer.from_pretrained(folder),
            config.prompt,
            config,
            sizes.sequence,
        )
    )


if __name__ == "__main__":
    run_script(lambda: main(config))
