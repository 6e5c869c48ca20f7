"""Small translators and batches; all random numbers come from a seed."""

import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor

import decoding
from data import Collate
from fast import build
from model import ModelConfig, Translator

PAD, BOS, EOS = 0, 1, 2
IDS = {"pad": PAD, "bos": BOS, "eos": EOS}
COLLATE = Collate(IDS, IDS)
WORDS = 40  # in the source vocabulary
SIZES = dict(
    d_model=64,
    nhead=4,
    dim_feedforward=96,
    num_encoder_layers=2,
    num_decoder_layers=2,
    max_length=256,
)

OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
needs_compiler = pytest.mark.skipif(
    bool(build.why_not()), reason=f"no compiled functions here: {build.why_not()}"
)
unlimited = pytest.mark.skipif(  # else there is no region of memory for large tensors
    resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    or (OVERCOMMIT.exists() and OVERCOMMIT.read_text()[0] == "2"),
    reason="addresses are limited here",
)


def make_model(
    seed: int, words: int = WORDS, scale: float = 1.0, end: float = 0.0, **sizes
) -> Translator:
    """Weights times `scale`, so that choices differ; the higher `end`, the sooner sentences end."""
    torch.manual_seed(seed)
    model = Translator(ModelConfig(WORDS, words, **(SIZES | {"dropout": 0.0} | sizes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
            if (
                parameter.ndim == 1
            ):  # norms and biases begin alike; unlike, none can be taken for another
                parameter.add_(0.1 * torch.randn_like(parameter))
        if scale != 1:
            model.output.bias.normal_()
        model.output.bias[EOS] += end
    return model


def make_sources(seed: int, count: int, longest: int) -> list[list[int]]:
    """Sentences of 1 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, WORDS, (length,), generator=generator).tolist() for length in lengths]


def beam_search(
    model: Translator, src: Tensor, src_pad: Tensor, limits: Tensor, **options
) -> tuple[Tensor, Tensor]:
    """The best hypothesis of each sentence, (B, T), and its score, (B,)."""
    state = decoding.Decoder(model).start(src, src_pad)
    hypotheses, scores = decoding.beam_search(state, limits, BOS, EOS, **options)
    return hypotheses[:, 0], scores[:, 0]


def nearly_tie(exact: Translator, source: list[int], one: list[int], other: list[int]) -> bool:
    """Whether the words at which two outputs first differ are equally likely; `exact`: float64."""
    place = next(
        (i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other))
    )
    src, src_pad = COLLATE.pad_sources([source])
    with torch.no_grad():
        top = exact(src, src_pad, torch.tensor([[BOS, *other[:place]]]))[0, -1].topk(2).values
    return (top[0] - top[1] < 1e-3).item()


def make_batch(seed: int, count: int, longest: int) -> tuple[Tensor, Tensor]:
    """(B, S) sources, longest first, and their padding."""
    return COLLATE.pad_sources(sorted(make_sources(seed, count, longest), key=len, reverse=True))
