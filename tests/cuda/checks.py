"""What runs on CUDA, with fake tensors: `python tests/cuda/checks.py [NAME …]`.

Prints a line of JSON for every check. "error": what went wrong, or empty; "waits": operations for
which the CPU waits; "mixed": operations with tensors on two devices.
"""

import json
import sys
import traceback
from functools import partial
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import patch

from pretend import CUDA, GPU, forget  # isort: skip  (before torch)
import torch

import decoding
import model as model_py
from data import BucketSampler, Collate, batches_of
from engine.distributed import World
from engine.optimizer import make_optimizer
from engine.precision import Precision
from fast import can_slice
from labs.attention_op import attention, gelu, use_in
from model import ModelConfig, SummedLoss, Translator, cross_attention
from text.rows import flatten
from validation import Validation

model_py.is_cross_entropy = lambda loss_of: True  # fake tensors have no numbers to compare

IDS = {"pad": 0, "bos": 1, "eos": 2}
SIZES = dict(
    d_model=64,
    nhead=4,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dim_feedforward=64,
    max_length=64,
)
WORLD = World(0, 1, CUDA)
LENGTHS = ((5, 7), (3, 2), (8, 4), (6, 6), (2, 3), (4, 9))
SENTENCES = [[list(range(3, 3 + length)) for length in pair] for pair in LENGTHS]


class Pairs:
    """In place of data.TokenizedPairs."""

    lengths: ClassVar = {
        side: flatten([pair[i] for pair in SENTENCES]).lengths
        for i, side in enumerate(("source", "target"))
    }

    def take(self, rows):
        return tuple(flatten([SENTENCES[row][side] for row in rows]) for side in (0, 1))

    __getitems__ = take


def make(**sizes) -> Translator:
    with CUDA:
        return Translator(ModelConfig(50, 50, **SIZES | sizes))


def batches(tokens: int = 24, accumulate: int = 1):
    # Without the thread that prepares the next batch: fake tensors belong to this one.
    with patch("data._one_ahead", lambda batches, device: batches):
        sampler = BucketSampler(Pairs.lengths, tokens, accumulate=accumulate)
        return batches_of(Pairs(), sampler, Collate(IDS, IDS), 0, CUDA)


def on_gpu() -> list:
    """src, src_pad, limits of a batch."""
    batch = next(batches())
    return [batch.src, batch.src_pad, batch.src.new_full((len(batch.src),), 9)]


# ---------------------------------------------------------------- training


def train(
    dtype: str,
    steps: int = 1,
    use_fast: bool = False,
    accumulate: int = 1,
    attention: str = "",
    optimizer: str = "muon",
    **sizes,
) -> None:
    """Steps as in train.py. attention: the implementation of the lab attention_op."""
    model = make(**sizes).train()
    precision = Precision(CUDA, dtype, "")
    if attention:
        use_in(model, attention)
    loss_of = SummedLoss(model, 0.1, sliced=use_fast)
    weights = list(model.parameters())
    optimizer = make_optimizer(optimizer, model, model.transformer, 1e-3, precision.dtype)
    source = batches(accumulate=accumulate)
    total = torch.zeros((), device=CUDA)
    forget()
    for step in range(1, steps + 1):
        for _ in range(accumulate):
            batch = next(source)
            with precision.autocast():
                smoothed, plain = loss_of(*batch.inputs)
            precision.backward(smoothed / batch.target_tokens)
            total += plain / batch.target_tokens
        assert all(weight.grad.is_cuda for weight in weights)
        assert all(weight.grad.dtype is torch.float32 for weight in weights)
        norm = precision.step(optimizer, weights, 1.0, step)
    assert norm.is_cuda
    assert smoothed.dtype is torch.float32


def loss_in_slices() -> None:
    """Not in fp16, and not for logits that are more than the output layer."""
    model = make()
    for dtype, expected in ((torch.bfloat16, True), (torch.float16, False)):
        with torch.autocast("cuda", dtype):
            assert can_slice(model.logits, model.output) is expected
    assert not can_slice(lambda hidden: model.output(hidden) / 2, model.output)


def validation_loss() -> None:
    """The loss of a split, between training steps."""
    validation = object.__new__(Validation)
    validation.model = make()
    validation.fast = True
    validation.prepared = SimpleNamespace(validation=Pairs())
    validation.collate = Collate(IDS, IDS)
    validation.world = WORLD
    validation.precision = Precision(CUDA, "bf16", "")
    with torch.no_grad():  # fake tensors do not support inference mode
        Validation.loss.__wrapped__(validation, validation.model, [[0, 1, 2], [3, 4, 5]])


def attention_picture() -> None:
    model, batch = make().eval(), next(batches())
    weights = cross_attention(model, batch.src, batch.src_pad, batch.tgt_in)
    assert weights.shape == (*batch.tgt_in.shape, batch.src.size(1)) and weights.is_cuda


# ---------------------------------------------------------------- decoding


def decode(how: str, **sizes) -> None:
    model, (src, src_pad, limits) = make(**sizes).eval().requires_grad_(False), on_gpu()
    with torch.autocast("cuda", torch.bfloat16):
        # Whether two ways agree, and which rows leave the batch, are questions of numbers.
        with patch.object(decoding.Decoder, "why_no_agreement", lambda decoder: ""):
            state = decoding.Decoder(model).start(src, src_pad)
        with patch.object(decoding, "CHECK_EVERY", 10**9):
            if how == "beam":
                result = decoding.beam_search(state, limits, 1, 2, 4, 0.6)[0]
            else:
                result = decoding.greedy(state, limits, 1, 2)
    assert result.is_cuda and result.dtype is torch.long


# ---------------------------------------------------------------- labs


def own_attention() -> None:
    q, k, v = (
        torch.randn(2, 3, length, 16, device=CUDA, requires_grad=True) for length in (5, 7, 7)
    )
    hidden = torch.zeros(2, 1, 1, 7, dtype=torch.bool, device=CUDA)
    out = attention(q, k, v, mask=hidden, dropout=0.1)
    assert out.is_cuda and all(g.is_cuda for g in torch.autograd.grad(out.sum(), (q, k, v)))


def own_gelu() -> None:
    x = torch.randn(4, 5, device=CUDA, requires_grad=True)
    assert torch.autograd.grad(gelu(x).sum(), x)[0].is_cuda


def step_of(loss_of, parameters: list, precision: Precision, *inputs) -> torch.Tensor:
    optimizer = torch.optim.AdamW(parameters, fused=True)
    forget()
    with precision.autocast():
        loss, second = loss_of(*inputs)
    precision.backward(loss)
    precision.step(optimizer, parameters, 1.0, 1)
    return second


def lenet() -> None:
    from labs.lenet.model import LeNet5

    with CUDA:
        model = LeNet5()
        images, labels = torch.zeros(8, 1, 28, 28), torch.zeros(8, dtype=torch.long)
    loss_of = lambda: (torch.nn.functional.cross_entropy(model(images), labels), None)  # noqa: E731
    step_of(loss_of, list(model.parameters()), Precision(CUDA, "fp32", ""))


def wikitext(pad: str, stage: str) -> None:
    from labs.wikitext.model import LanguageModel, SmoothedLoss
    from labs.wikitext.sampler import SegmentSampler, gather_segments

    sizes = SimpleNamespace(
        d_model=16,
        d_embedding=8,
        nhead=2,
        num_layers=1,
        dim_feedforward=16,
        dropout=0.1,
        positions="learned",
        seq_length=8,
        sampling="dynamic",
        resample_every=1,
        epochs=10,
        seed=5,
    )
    with CUDA:
        model = LanguageModel(30, sizes)
    model.requires_grad_(stage == "all")
    for parameter in model.embedding_parameters():
        parameter.requires_grad_()
    sampler = SegmentSampler(61, sizes, CUDA)
    mine = torch.tensor([0, 3, 7])
    tokens, targets, real = gather_segments(torch.arange(61) % 30, sampler.spans(mine), 3, 8, pad)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses = step_of(
        SmoothedLoss(model, 0.1), trained, Precision(CUDA, "bf16", ""), tokens, targets, real, real
    )
    sampler.record(mine, losses, real)


def pipeline() -> None:
    from labs.pipeline.stages import LanguageModel, Stage, summed_loss

    sizes = dict(d_model=16, nhead=2, dim_feedforward=16, num_layers=2)
    config = SimpleNamespace(**sizes, causal=True, dropout=0.0, post_norm=False)
    with CUDA:
        model = LanguageModel(30, 8, config)
        tokens = torch.zeros(4, 8, dtype=torch.long)
    first, last = Stage(model, [0]), Stage(model, [1])
    loss_of = lambda: (summed_loss(last(first(tokens)), tokens), None)  # noqa: E731
    step_of(loss_of, list(model.parameters()), Precision(CUDA, "fp32", ""))


def gpt() -> None:
    """A step and a validation in two micro-batches, without the loop, which times every step."""
    from labs.gpt.__main__ import Config
    from labs.gpt.parallel import Layout, make_optimizer
    from labs.gpt.sizes import Sizes

    sizes = Sizes(d_model=16, nhead=2, num_layers=2, seq_length=8, vocab_size=30)
    precision = Precision(CUDA, "bf16", "")
    layout = Layout(Config(batch_size=4, accumulate=2, lr=1e-3), sizes, WORLD, precision)
    optimizer = make_optimizer(layout)
    tokens = torch.zeros(4, 8, dtype=torch.long, device=CUDA)
    forget()
    loss = layout.forward_backward(tokens, tokens)
    norm = layout.gradient_norm()
    optimizer.step()
    assert loss.is_cuda and norm.is_cuda and layout.loss(tokens, tokens).is_cuda
    assert all(weight.is_cuda and weight.grad.is_cuda for weight in layout.weights.values())


CHECKS = {
    "train bf16 fast": partial(train, "bf16", steps=2, use_fast=True),
    "train fp32 pre-norm": partial(train, "fp32", optimizer="adamw", norm_first=True),
    "train fp16 accumulate": partial(train, "fp16", accumulate=2),
    "train own attention": partial(train, "bf16", attention="python"),
    "loss in slices": loss_in_slices,
    "validation loss": validation_loss,
    "attention picture": attention_picture,
    "decode greedy": partial(decode, "greedy"),
    "decode beam pre-norm": partial(decode, "beam", norm_first=True),
    "operator attention": own_attention,
    "operator gelu": own_gelu,
    "train lenet": lenet,
    "train wikitext": partial(wikitext, "right", "all"),
    "train wikitext embedding": partial(wikitext, "left", "embedding"),
    "train pipeline": pipeline,
    "train gpt bf16": gpt,
}


def main() -> None:
    for name in sys.argv[1:] or CHECKS:
        error = ""
        watch = None
        try:
            with GPU() as watch:
                CHECKS[name]()
        except Exception as problem:
            frames = traceback.extract_tb(problem.__traceback__)
            frames = [frame for frame in frames if "site-packages" not in frame.filename]
            lines = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames]
            message = " ".join(str(problem).split())[:200]
            error = f"{type(problem).__name__}: {message}; {' < '.join(lines[:-5:-1])}"
        facts = {"name": name, "error": error, "waits": [], "mixed": []}
        if watch:
            facts |= {"waits": watch.waits, "mixed": watch.mixed}
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
