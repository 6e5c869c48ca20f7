"""Sizes of models: presets, parameters and operations, by the handout's formulas and by ours.

D width, L layers, T tokens of a sequence, V vocabulary.
"""

from dataclasses import dataclass

from torch import nn

from engine.errors import UserError


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, and what it is trained with unless a flag says otherwise."""

    d_model: int
    nhead: int
    num_layers: int
    seq_length: int
    vocab_size: int = 50_257  # GPT-2's; a tokenizer trained on the data has its own
    lr: float = 5e-4
    batch_size: int = 8  # sequences per step, of all processes together

    def __post_init__(self):
        if self.d_model % self.nhead:
            raise UserError(f"--d_model {self.d_model} must be divisible by --nhead {self.nhead}")

    @property
    def block_parameters(self) -> int:
        """Of one block: c_attn 3·D², c_proj D², MLP 8·D², and 13·D of biases and norms."""
        return 12 * self.d_model**2 + 13 * self.d_model

    @property
    def embedding_parameters(self) -> int:
        """Of tokens and positions: (V + T)·D."""
        return (self.vocab_size + self.seq_length) * self.d_model

    @property
    def parameters(self) -> int:
        """Of the whole model; the output is the embedding's matrix and counts once."""
        return (
            self.embedding_parameters + self.num_layers * self.block_parameters + 2 * self.d_model
        )

    def flops_per_token(self) -> float:
        """Operations per training token: W weights cost 2·W forward and 4·W backward.

        The embedding is a look-up, but the output multiplies by its matrix. Attention's own
        products cost 4·T·D per layer forward, 12·T·D in all (the masked half is counted, as in most
        papers). Recomputation is not counted: it does not advance training.
        """
        matrices = self.num_layers * 12 * self.d_model**2 + self.vocab_size * self.d_model
        return 6.0 * matrices + 12.0 * self.num_layers * self.seq_length * self.d_model


# Width, heads, layers, sequence. 124m to 1.5b are GPT-2's; 1.6b is the handout's row.
# In `wide` most memory goes to weights and the optimizer, in `deep` to activations: the sizes
# of the comparison table.
PRESETS = {
    "toy": Sizes(32, 4, 4, 32, vocab_size=512, lr=3e-3, batch_size=12),
    "mini": Sizes(192, 6, 4, 128, vocab_size=4096, lr=2e-3),
    "wide": Sizes(768, 12, 6, 128, vocab_size=4096, lr=6e-4),
    "deep": Sizes(256, 8, 24, 128, vocab_size=4096, lr=1e-3),
    "124m": Sizes(768, 12, 12, 1024, lr=6e-4),
    "355m": Sizes(1024, 16, 24, 1024, lr=3e-4),
    "774m": Sizes(1280, 20, 36, 1024, lr=2.5e-4),
    "1.5b": Sizes(1600, 25, 48, 1024, lr=2e-4),
    "1.6b": Sizes(1600, 32, 48, 1024, lr=5e-4),
}


def get_model_size(model: nn.Module) -> int:
    """The handout's formula, which goes module by module.

    In Hugging Face's model two modules, the embedding and `lm_head`, share a matrix: it counts
    twice. Our model has no `lm_head`.
    """
    return sum(p.numel() for module in model.modules() for p in module.parameters(recurse=False))


def get_tflops(model_numel: int, batch_size: int, seq_len: int, step_time: float) -> float:
    """The handout's formula. 8 = 2 forward + 4 backward + 2 recomputed; without recomputation: 6.

    It gets the number of parameters only, so attention's own products are missing.
    """
    return model_numel * batch_size * seq_len * 8 / 1e12 / (step_time + 1e-12)
