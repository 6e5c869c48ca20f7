"""Continue a text with a trained model.

python -m labs.gpt.generate runs/NAME --prompt "In this paper" --temperature 0.8 --top_p 0.9
python -m labs.gpt.generate --ckpt runs/NAME/checkpoints/sharded-60    # as it wrote after 60 steps
"""

from dataclasses import dataclass

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """What to write, and with which model."""

    ckpt: str = flag(
        "",
        "run of labs.gpt, or one of its checkpoints; default: the newest run",
        "Generation",
        first_word=True,
    )
    prompt: str = flag("In this paper", "the beginning of the text", "Generation")
    max_new_tokens: int = flag(
        60, "stop after this many tokens, or earlier at the end of the text", "Generation", min=1
    )
    temperature: float = flag(
        0.8, "0: always the most probable token; 1: as the model says", "Generation", min=0, max=10
    )
    top_k: int = flag(0, "draw from the k most probable tokens; 0: from all", "Generation", min=0)
    top_p: float = flag(
        1.0,
        "draw from the fewest tokens that have this probability together; 1: from all",
        "Generation",
        above=0,
        max=1,
    )
    seed: int = flag(1, "seed of the draws", "Generation", min=0)


if __name__ == "__main__":
    config = parse_flags(Config, "continue a text with a trained model")

import sys
from functools import partial

import torch
from torch import Tensor, nn

from labs.gpt.checkpoints import choose, load_weights
from labs.gpt.data import load_tokenizer
from labs.gpt.model import GPT, HuggingFaceGPT


@torch.no_grad()
def generate(
    model: nn.Module, tokens: Tensor, config: Config, longest: int, end: int | None = None
) -> Tensor:
    """Token ids (1, T) → with at most `config.max_new_tokens` more; the last may be `end`.

    The model sees the last `longest` tokens: it has no more positions.
    """
    draw = torch.Generator().manual_seed(config.seed)
    for _ in range(config.max_new_tokens):
        logits = model(tokens[:, -longest:])[0, -1]  # (V,)
        probabilities = distribution(logits, config)
        new = torch.multinomial(probabilities, 1, generator=draw)
        tokens = torch.cat([tokens, new.unsqueeze(0)], dim=1)
        if new.item() == end:
            break
    return tokens


def distribution(logits: Tensor, config: Config) -> Tensor:
    """The probabilities from which the next token is drawn, (V,) → (V,).

    The temperature divides the logits. Then --top_k and --top_p leave the most probable tokens; the
    most probable one always stays (Holtzman et al. 2020 for top-p).
    """
    if config.temperature < 1e-6:  # smaller ones would make logits infinite
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()
    ranked, order = (logits / config.temperature).softmax(0).sort(descending=True, stable=True)
    before = ranked.cumsum(0) - ranked  # the probability of all tokens before this one
    keep = before < config.top_p
    if config.top_k:
        keep[config.top_k :] = False
    return torch.zeros_like(logits).scatter(0, order, ranked * keep)


def main(config: Config) -> None:
    """Load the model and print what it writes."""
    path = choose(config.ckpt, log=partial(print, file=sys.stderr))  # apart from its text
    run = path.parent.parent
    if not (run / "tokenizer").is_dir():
        raise UserError(f"{run} was trained on random ids and cannot write; train with --data")
    weights, sizes = load_weights(path)
    model: GPT | HuggingFaceGPT
    if any(name.startswith("h.") for name in weights):
        model = GPT(sizes)
    else:  # --model hf; its output and embedding are one matrix, saved once
        model = HuggingFaceGPT(sizes)
        weights["model.lm_head.weight"] = weights["model.transformer.wte.weight"]
    model.load_state_dict(weights)
    tokenizer = load_tokenizer(run / "tokenizer")
    ids = tokenizer(config.prompt, add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    tokens = torch.tensor([ids or [end]])
    tokens = generate(model.eval(), tokens, config, sizes.seq_length, end)
    print(tokenizer.decode(tokens[0].tolist(), skip_special_tokens=True))


if __name__ == "__main__":
    run_script(lambda: main(config))
