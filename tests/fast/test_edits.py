"""A change of model.py acts in training and in decoding, with every kind of faster code."""

import math

import pytest
import torch
import torch.nn.functional as F
from edits import EDITS, edited
from random_models import BOS, COLLATE, EOS, needs_compiler
from torch import nn

import fast
from decoding import CachedDecoder, Decoder, search
from fast import build
from fast.layers import KernelDecoder, KernelEncoder

WORDS = 48
SIZES = dict(
    d_model=64,
    nhead=4,
    dim_feedforward=96,
    num_encoder_layers=2,
    num_decoder_layers=2,
    max_length=64,
    dropout=0.0,
)
NAMES = [edit.name for edit in EDITS]
STEPS = 3
has_int8 = not build.why_not() and build.has_vnni()


def make_model(name: str, scale: float = 2.0) -> nn.Module:
    """A model with large weights, so that a change of it shows in every token."""
    module = edited(name)
    torch.manual_seed(0)
    model = module.Translator(module.ModelConfig(WORDS, WORDS, **SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        bias = getattr(model.output, "bias", None)
        if bias is not None:
            bias[EOS] -= 3.0  # long translations
    return model


def make_batch(seed: int):
    """Four pairs with 20 source and 48 target tokens at most; some positions are padding."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(3, WORDS, (4, 20), generator=generator)
    tgt = torch.randint(8, WORDS, (4, 49), generator=generator)
    src_pad = torch.arange(20) >= torch.tensor([20, 13, 7, 1])[:, None]
    positions = torch.nonzero(torch.rand(4 * 48, generator=generator) < 0.8).squeeze(1)
    return src, src_pad, tgt[:, :-1], positions, tgt[:, 1:].flatten()[positions]


def train(model: nn.Module, loss_of, dtype: torch.dtype) -> list[float]:
    """The losses of a few steps of gradient descent."""
    weights = list(model.parameters())
    losses = []
    for step in range(STEPS):
        batch = make_batch(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            smoothed, plain = loss_of(*batch)
        losses += [smoothed.item(), plain.item()]
        gradients = torch.autograd.grad(smoothed / len(batch[-1]), weights, allow_unused=True)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients):
                if gradient is not None:
                    weight.sub_(gradient, alpha=0.01)
    return losses


def plain_loss(model: nn.Module):
    """The loss by its definition, from the logits that `forward` returns."""

    def loss_of(src, src_pad, tgt_in, positions, tgt_out):
        logits = model(src, src_pad, tgt_in).flatten(0, 1)[positions].float()
        smoothed, plain = (
            F.cross_entropy(logits, tgt_out, label_smoothing=smoothing, reduction="sum")
            for smoothing in (0.1, 0.0)
        )
        return smoothed, plain.detach()

    return loss_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_is_trained(name, dtype):
    model, other = make_model(name, scale=1.0).train(), make_model(name, scale=1.0).train()
    expected = train(other, plain_loss(other), dtype)
    fast.use_kernels(model, dtype)
    found = train(model, edited(name).SummedLoss(model, 0.1), dtype)
    # fp32 rounds by 6·10⁻⁸ in each of some thousand sums; bf16 by 2⁻⁹, here in both.
    assert found == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 1e-2)


def next_logits(model: nn.Module, source: list[int], tokens: list[int]) -> torch.Tensor:
    """By `forward`: logits (T, V) after each prefix of these tokens."""
    src, src_pad = COLLATE.pad_sources([source])
    prefixes = [[BOS, *tokens[:length]] for length in range(len(tokens) + 1)]
    if not type(model).__module__.endswith("no_causal_mask"):
        return model(src, src_pad, torch.tensor(prefixes[-1:]))[0]  # as in training, all at once
    return torch.stack([model(src, src_pad, torch.tensor([prefix]))[0, -1] for prefix in prefixes])


def chosen_tokens(hypothesis) -> list[int]:
    """What the search chose, the end token included."""
    return [*hypothesis.tokens, EOS] if hypothesis.ended else hypothesis.tokens


def lost_logits(model: nn.Module, source: list[int], hypothesis) -> torch.Tensor:
    """By how much each chosen token's logit is below the largest one, in standard deviations."""
    chosen = chosen_tokens(hypothesis)
    logits = next_logits(model, source, chosen)[: len(chosen)]
    below = logits.amax(-1) - logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    allowed = logits.masked_fill(logits < -1e6, math.nan)  # a forbidden token has no say
    return below / allowed.nan_to_num().std(-1)


SOURCES = [list(range(3, 26)), [30, 7, 41, 7]]
# Alone: some of the edits let translations depend on the padding of a batch.
ALONE = [[0], [1]]


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_it_is_what_greedy_search_decodes(name, compiled):
    model, notes = make_model(name).eval(), []
    decoder = Decoder(model, compiled=compiled, log=notes.append)
    (edit,) = (edit for edit in EDITS if edit.name == name)
    assert bool(decoder.replaced) == edit.fast, notes
    assert edit.fast or len(notes) == 1
    for source, (hypothesis,) in zip(SOURCES, search(decoder, SOURCES, COLLATE, batches=ALONE)):
        # The likeliest token everywhere, but for rounding in near ties.
        assert lost_logits(model, source, hypothesis).max() < 1e-3


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_it_is_what_beam_search_decodes(name):
    model = make_model(name).eval()
    found = search(Decoder(model), SOURCES, COLLATE, beam=3, nbest=3, batches=ALONE)
    for source, hypotheses in zip(SOURCES, found):
        for hypothesis in hypotheses:
            chosen = chosen_tokens(hypothesis)
            log_probabilities = next_logits(model, source, chosen).log_softmax(-1)
            score = sum(log_probabilities[place, token] for place, token in enumerate(chosen))
            assert hypothesis.score == pytest.approx(score.item() / len(chosen), abs=1e-3)


@pytest.mark.parametrize("name", ["nothing", "no mask at the source"])
@torch.inference_mode()
def test_padding_is_what_pytorch_makes_of_it(name):
    """In one batch: where a model looks at padding, C++ must not give it zeros."""
    model, notes = make_model(name).eval(), []
    together = dict(batches=[[0, 1]])
    found = search(Decoder(model, log=notes.append), SOURCES, COLLATE, **together)
    naive = Decoder(model, compiled=False)
    naive.replaced = {}
    expected = search(naive, SOURCES, COLLATE, **together)
    assert [one[0].tokens for one in found] == [one[0].tokens for one in expected]
    assert bool(notes) == (name != "nothing") or build.why_not()


@pytest.mark.skipif(not has_int8, reason="no compiler or no VNNI")
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_it_is_what_int8_decodes_or_refuses(name):
    from engine.errors import UserError

    model = make_model(name).eval()
    fp32 = Decoder(model)
    compiled = not any(type(part) is CachedDecoder for part in fp32.replaced.values())
    if not (fp32.replaced and compiled and fp32.output):
        with pytest.raises(UserError, match="--precision int8: "):
            Decoder(model, int8=True)
        return
    found = search(Decoder(model, int8=True), SOURCES, COLLATE, batches=ALONE)
    lost = torch.cat([lost_logits(model, *pair) for pair in zip(SOURCES, (h[0] for h in found))])
    # Rounding to 8 bits moves a logit by some percent; a choice differs in near ties.
    assert (lost > 0.5).float().mean() < 0.05


@needs_compiler
def test_matrices_that_grew_threefold_change_nothing():
    """After long training, with products in bf16: still the kernels, and no note."""
    model, notes = make_model("nothing"), []
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)
    fast.use_kernels(model, torch.bfloat16, notes.append)
    assert type(model.transformer.encoder) is KernelEncoder
    assert type(model.transformer.decoder) is KernelDecoder
    Decoder(model.eval(), log=notes.append)
    assert not notes


def test_every_edit_changes_the_model():
    """No edit of the list is one in name only."""
    batch = make_batch(0)[:3]
    same = []
    for name in NAMES[1:]:
        model, stock = make_model(name).eval(), make_model("nothing").eval()
        weights = model.state_dict()
        stock.load_state_dict(
            {
                key: weights.get(key, value)
                for key, value in stock.state_dict().items()
                if key not in weights or weights[key].shape == value.shape
            },
            strict=False,
        )
        with torch.no_grad():
            if torch.allclose(model(*batch), stock(*batch), atol=1e-4):
                same.append(name)
    # Dropout is off here, and three share or add weights without another formula.
    assert set(same) <= {
        "a hint that hides the mask",
        "a hint that hides a window",
        "dropout of words",
        "learned positions",
        "one embedding module",
        "one embedding matrix",
        "an output that is not tied",
        "an output without bias",
        "one layer more than the config says",
        "the signature of before",
    }
