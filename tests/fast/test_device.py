"""Every number format on this device against float64 on the CPU, fast/ against plain code.

    DEVICE=cuda PRESET=big python -m pytest -s tests/fast/test_device.py    # -s shows the figures

Without the variables a small model on the CPU. A difference is relative: ‖result − wanted‖ /
‖wanted‖, for the loss, for all gradients as one vector, and for the gradient of the parameter that
is worst off. That last one may be ten times the limit: it can be a small sum of large numbers.
"""

import os
from unittest.mock import patch

import pytest
import torch
from random_models import COLLATE
from random_models import SIZES as SMALL

import fast
from data import BucketSampler
from decoding import Decoder, greedy, output_limit
from engine.devices import choose_device
from engine.precision import Precision
from fast.cross_entropy import LOGITS_AT_ONCE
from model import PRESETS, ModelConfig, SummedLoss, Translator

DEVICE, PRESET = os.environ.get("DEVICE", "cpu"), os.environ.get("PRESET")
SIZES = PRESETS.get(PRESET, SMALL) | {"dropout": 0.0}
VOCABULARY, SMOOTHING = 8000 if PRESET in PRESETS else 50, 0.1
SLICE_ROWS = 100  # rows of a slice of logits: many, the last one smaller
# The twelve layers of preset big amplify rounding: fp32 differs by 2e-4, in preset lab by 1e-6.
AMPLIFIED = 10 if PRESET == "big" else 1
# Name: (weights, precision, fp32 products, limit of loss and gradients).
# The plain loss is summed in fp32 even in float64.
FORMATS = {
    "float64": (torch.float64, "fp32", "highest", 1e-6 * AMPLIFIED),
    "fp32": (torch.float32, "fp32", "highest", 1e-4 * AMPLIFIED),
    "TF32": (torch.float32, "fp32", "high", 1e-2),  # products of 11 significant bits
    "bf16": (torch.float32, "bf16", "highest", 5e-2),  # of 8
    "fp16": (torch.float32, "fp16", "highest", 1e-2),  # of 11
}
HERE = [name for name in FORMATS if DEVICE != "cpu" or name not in ("TF32", "fp16")]


def model_of(lively: bool = False) -> Translator:
    """In fp32 on the CPU; `lively`: weights so large that all tokens count and outputs are long."""
    torch.manual_seed(1)
    model = Translator(ModelConfig(VOCABULARY, VOCABULARY, **SIZES))
    with torch.no_grad():
        for weights in model.parameters() if lively else ():
            weights.mul_(3.0)
        model.output.bias[COLLATE.target_ids["eos"]] -= 5.0 * lively
    return model


def made_up(count: int, seed: int = 1) -> list[tuple[list[int], list[int]]]:
    """Pairs of random sentences of 3 to 30 tokens."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 31, (count, 2), generator=draw).tolist()
    return [
        tuple(torch.randint(4, VOCABULARY, (n,), generator=draw).tolist() for n in pair)
        for pair in lengths
    ]


@pytest.fixture
def moved(request):
    """(the model on the device in the format, its precision, the format's name, the limit)"""
    weights, precision, products, limit = FORMATS[request.param]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(products)
    torch.backends.cuda.enable_cudnn_sdp(
        False
    )  # as choose_precision does: the attention that training has
    device = choose_device(DEVICE, 0)
    model = model_of("greedy" in request.node.name).to(device, weights)
    yield model, Precision(device, precision, ""), request.param, limit
    torch.set_float32_matmul_precision(before)


# ---------------------------------------------------------------- loss and gradients


PAIRS = made_up(200)
LENGTHS = {side: [len(pair[i]) for pair in PAIRS] for i, side in enumerate(("source", "target"))}
SAMPLER = BucketSampler(
    {side: torch.tensor(lengths).numpy() for side, lengths in LENGTHS.items()}, 1024, seed=1
)
BATCHES = [COLLATE([PAIRS[row] for row in rows]) for _, rows in zip(range(3), SAMPLER)]


def gradients(model: Translator, precision: Precision, loss_of) -> tuple[float, dict]:
    """(loss a token, gradient of each parameter in float64 on the CPU), over all batches."""
    # Low enough for a first step, which nothing has adapted yet.
    precision.scaler = torch.amp.GradScaler(
        precision.device.type, init_scale=2.0**12, enabled=precision.name == "fp16"
    )
    tokens, total = sum(batch.target_tokens for batch in BATCHES), 0.0
    model.train().zero_grad()
    with patch.dict(LOGITS_AT_ONCE, {precision.device.type: SLICE_ROWS * VOCABULARY}):
        for batch in (batch.to(precision.device) for batch in BATCHES):
            with precision.autocast():
                loss, _ = loss_of(
                    batch.src, batch.src_pad, batch.tgt_in, batch.target_positions, batch.tgt_out
                )
            precision.backward(loss / tokens)
            total += loss.item() / tokens
    scale = precision.scaler.get_scale()
    return total, {
        name: weight.grad.to("cpu", torch.float64) / scale
        for name, weight in model.named_parameters()
    }


def check(what: str, result: tuple, wanted: tuple, limit: float) -> None:
    (loss, ours), (wanted_loss, theirs) = result, wanted
    apart = {name: (ours[name] - theirs[name]).norm().item() for name in theirs}
    sizes = {name: theirs[name].norm().item() for name in theirs}
    whole, all_apart = (
        sum(value**2 for value in values.values()) ** 0.5 for values in (sizes, apart)
    )
    worst = max(apart[name] / max(sizes[name], 1e-6 * whole) for name in apart)
    # A loss is a mean over thousands of tokens, where rounding averages out: a tenth of the limit.
    loss_apart = abs(loss / wanted_loss - 1) * (10 if limit > 1e-3 else 1)
    off = {"loss": loss_apart, "gradient": all_apart / whole, "worst": worst / 10}
    print(
        f"{what}, limit {limit:.0e}: "
        + ", ".join(f"{name} {value:.1e}" for name, value in off.items())
    )
    assert all(value <= limit for value in off.values()), what  # nan passes nothing


@pytest.fixture(scope="module")
def exact() -> tuple[float, dict]:
    model = model_of().double()
    return gradients(
        model,
        Precision(torch.device("cpu"), "fp32", ""),
        SummedLoss(model, SMOOTHING, sliced=False),
    )


@pytest.mark.parametrize("moved", HERE, indirect=True)
def test_losses_and_gradients(moved, exact):
    model, precision, name, limit = moved
    plain = SummedLoss(model, SMOOTHING, sliced=False)
    wanted = gradients(model, precision, plain)
    check(f"{name} against float64", wanted, exact, limit)
    fast.use_kernels(model, precision.dtype)
    check(f"{name}, fast", gradients(model, precision, SummedLoss(model, SMOOTHING)), wanted, limit)


# ---------------------------------------------------------------- greedy decoding


def greedy_outputs(model, device: torch.device) -> torch.Tensor:
    """Of 64 sentences, on this device."""
    src, src_pad = COLLATE.pad_sources(
        sorted((source for source, _ in made_up(64, seed=2)), key=len, reverse=True)
    )
    src, src_pad = src.to(device), src_pad.to(device)
    limits = output_limit((~src_pad).sum(1), 40)
    ids = COLLATE.target_ids
    decoder = Decoder(model.to(device), compiled=False)
    return greedy(decoder.start(src, src_pad), limits, ids["bos"], ids["eos"]).cpu()


@pytest.mark.skipif(
    DEVICE == "cpu", reason="what the CPU gives is held against the stock model in test_decoding.py"
)
@pytest.mark.parametrize("moved", ["float64"], indirect=True)
def test_greedy_decoding_is_the_cpus(moved):
    model, precision, *_ = moved
    outputs = greedy_outputs(model.eval(), precision.device)
    assert torch.equal(outputs, greedy_outputs(model, torch.device("cpu")))
