"""Is the arithmetic of a device right? Loss, gradients and greedy search there against float64 on the CPU, same weights.

    for check in check_losses(model, device, prepared.train, collate, compile=False):
        print(check.describe())

For `benchmarks.gpu`. A difference is relative: ‖found − wanted‖ / ‖wanted‖, for the loss, for all gradients as one vector, and
for the gradient of the parameter that is worst off. That last one may be ten times the limit: it can be a small sum of large
numbers.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from unittest.mock import patch

import torch
from torch import Tensor

from data import BucketSampler, Collate, TokenizedPairs
from decoding import greedy, output_limit, pack
from engine.cross_entropy import LOGITS_AT_ONCE, SlicedCrossEntropy
from engine.precision import Precision
from fast.captured import CapturedTranslator
from model import SummedLoss, Translator

TOKENS, BATCHES = 1024, 3  # of a side in a batch, and how many batches
SLICE_ROWS = 100  # so that the sliced cross-entropy has many slices, the last one smaller
SENTENCES, LONGEST = 64, 40  # of greedy search; tokens
NEAR_TIE = 1e-3  # logits this near may swap places when rounded otherwise
NEAR_TIES = {
    "float64": 0.0,
    "fp32": NEAR_TIE,
    "fp32 as TF32": 0.05,
    "bf16": 0.5,
    "fp16": 0.05,
}  # captured against plain
CAPTURED_SENTENCES = 300  # of captured steps: enough for rows to leave
WORST = 10  # times the limit: what the worst parameter may differ
FORMATS = {  # name: (weights, precision, fp32 products, limit)
    "float64": (torch.float64, "fp32", "highest", 1e-9),
    "fp32": (torch.float32, "fp32", "highest", 1e-4),
    "fp32 as TF32": (torch.float32, "fp32", "high", 1e-2),  # products of 11 significant bits
    "bf16": (torch.float32, "bf16", "highest", 5e-2),  # of 8
    "fp16": (torch.float32, "fp16", "highest", 1e-2),  # of 11
}
ONLY_CUDA = ("fp32 as TF32", "fp16")

Gradients = tuple[float, dict[str, Tensor]]  # loss a token, gradient of each parameter in float64 on the CPU


@dataclass
class Check:
    """One line of the table. nan passes nothing."""

    name: str
    differences: dict[str, float]
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether every difference is within its limit."""
        return all(value <= self.limit * (WORST if name == "worst" else 1) for name, value in self.differences.items())

    def describe(self) -> str:
        """One line."""
        values = "  ".join(f"{name} {value:.1e}" for name, value in self.differences.items())
        return f"{'PASS' if self.passed else 'FAIL'}  {self.name:<52}  limit {self.limit:.0e}  {values}  {self.note}"


def check_losses(
    model: Translator, device: torch.device, pairs: TokenizedPairs, collate: Collate, compile: bool
) -> Iterator[Check]:
    """Every format: plain against float64 on the CPU, then sliced (and compiled) against plain on the device.

    `model` is in fp32 on the CPU, without dropout.
    """
    sampler = BucketSampler(pairs.lengths, TOKENS, seed=1)
    batches = [collate([pairs[row] for row in rows]) for rows in islice(sampler, BATCHES)]
    wanted = gradients(copy.deepcopy(model).double(), batches, "fp32", sliced=False)
    formats = [name for name in FORMATS if device.type == "cuda" or name not in ONLY_CUDA]
    for name in formats:
        yield from check_format(name, model, device, batches, wanted, compile)


def check_format(
    name: str, model, device: torch.device, batches: list, wanted: Gradients, compile: bool
) -> Iterator[Check]:
    """One number format on the device."""
    weights, precision, products, limit = FORMATS[name]
    there = copy.deepcopy(model).to(device, weights)
    with fp32_products(products):
        plain = gradients(there, batches, precision, sliced=False)
        yield difference(f"{name}, against float64 on the CPU", plain, wanted, limit)
        if name != "fp16":  # which never slices
            sliced = gradients(there, batches, precision, sliced=True)
            yield difference(f"{name}, sliced cross-entropy against plain", sliced, plain, limit)
        if compile and name != "float64":
            compiled = gradients(there, batches, precision, sliced=True, compile=True)
            yield difference(f"{name}, compiled against eager", compiled, plain, limit)


class fp32_products:
    """Inside, products of fp32 numbers are computed with `setting` of `torch.set_float32_matmul_precision`."""

    def __init__(self, setting: str):
        self.setting = setting

    def __enter__(self):
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.setting)

    def __exit__(self, *error):
        torch.set_float32_matmul_precision(self.before)


def gradients(model: Translator, batches: list, precision_name: str, sliced: bool, compile: bool = False) -> Gradients:
    """Of the loss over all batches, where the model is and in its format."""
    device, vocabulary = model.output.weight.device, model.config.target_vocab
    precision, tokens, loss = Precision(device, precision_name, ""), sum(b.target_tokens for b in batches), 0.0
    # Low enough for a first step, which nothing has adapted yet.
    precision.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12, enabled=precision_name == "fp16")
    runner = SummedLoss(model.train(), label_smoothing=0.1)
    if compile:
        torch.compiler.reset()  # code is compiled a few times at most, then runs eager without a word
        runner = torch.compile(runner, dynamic=True)
    model.zero_grad()
    slices = patch.dict(LOGITS_AT_ONCE, {device.type: SLICE_ROWS * vocabulary})
    with slices, patch.object(SlicedCrossEntropy, "enabled", sliced):
        for batch in (batch.to(device) for batch in batches):
            with precision.autocast():
                part = runner(batch.src, batch.src_pad, batch.tgt_in, batch.real, batch.tgt_out) / tokens
            precision.backward(part)
            loss += part.item()
    scale = precision.scaler.get_scale()
    return loss, {name: one.grad.to("cpu", torch.float64) / scale for name, one in model.named_parameters()}


def difference(name: str, found: Gradients, wanted: Gradients, limit: float) -> Check:
    """Relative, see the head of this file."""
    (loss, ours), (wanted_loss, theirs) = found, wanted
    apart = {key: (ours[key] - theirs[key]).norm().item() for key in theirs}
    sizes = {key: theirs[key].norm().item() for key in theirs}
    whole = sum(size**2 for size in sizes.values()) ** 0.5
    all_apart = sum(one**2 for one in apart.values()) ** 0.5 / whole
    shares = {key: apart[key] / max(sizes[key], 1e-6 * whole) for key in theirs}
    worst = max(shares, key=shares.get)
    differences = {"loss": abs(loss / wanted_loss - 1), "gradient": all_apart, "worst": shares[worst]}
    return Check(name, differences, limit, f"worst: {worst}")


def check_greedy(
    model: Translator, device: torch.device, sources: list[list[int]], collate: Collate
) -> Iterator[Check]:
    """Cached against uncached in float64 on the device; fp32 there against fp32 on the CPU, equal but for near ties."""
    bos, eos = collate.target_ids["bos"], collate.target_ids["eos"]
    src, src_pad = collate.pad_sources(sources[:SENTENCES])
    limits = output_limit((~src_pad).sum(1), LONGEST)
    inputs = tuple(tensor.to(device) for tensor in (src, src_pad, limits))
    wide = copy.deepcopy(model).to(device, torch.float64).eval()
    different = (greedy(wide, *inputs, bos, eos) != greedy_uncached(wide, *inputs, bos, eos)).any(1)
    yield Check("greedy in float64, cached against uncached", {"sentences": different.double().mean().item()}, 0.0)
    with fp32_products("highest"):
        there = greedy(copy.deepcopy(model).to(device).eval(), *inputs, bos, eos).cpu()
        here = greedy(model.eval(), src, src_pad, limits, bos, eos, pack(model))
    gap = widest_gap(copy.deepcopy(model).double(), src, src_pad, there, here, bos)
    note = f"{(there == here).all(1).double().mean():.1%} of {len(src)} sentences equal; the difference is of logits"
    yield Check("greedy in fp32, against the CPU", {"near tie": gap}, NEAR_TIE, note)


def check_captured(
    model: Translator, device: torch.device, sources: list[list[int]], collate: Collate
) -> Iterator[Check]:
    """Captured steps against plain ones on the device, in every format of decoding; twice, so that graphs are used again.

    Outputs are as long as the limits allow, so that several graphs take turns and rows leave.
    """
    bos, eos = collate.target_ids["bos"], collate.target_ids["eos"]
    src, src_pad = collate.pad_sources(sorted(sources[:CAPTURED_SENTENCES], key=len, reverse=True))
    limits = output_limit((~src_pad).sum(1), model.config.max_length)
    inputs, wide = tuple(tensor.to(device) for tensor in (src, src_pad, limits)), copy.deepcopy(model).double().eval()
    for name in [name for name in FORMATS if device.type == "cuda" or name not in ONLY_CUDA]:
        weights, precision, products, _ = FORMATS[name]
        there = copy.deepcopy(model).to(device, weights).eval()
        with fp32_products(products), Precision(device, precision, "").autocast():
            plain, captured = greedy(there, *inputs, bos, eos).cpu(), CapturedTranslator(there)
            for turn in ("first", "second"):
                found = captured.greedy(*inputs, bos, eos)
                if found is None:
                    raise RuntimeError("the captured step failed: see the note")
                note = f"{(found.cpu() == plain).all(1).double().mean():.1%} of {len(src)} sentences equal"
                gap = widest_gap(wide, src, src_pad, found.cpu(), plain, bos)
                yield Check(f"captured steps in {name}, {turn} time", {"near tie": gap}, NEAR_TIES[name], note)


@torch.inference_mode()
def greedy_uncached(model: Translator, src: Tensor, src_pad: Tensor, limits: Tensor, bos: int, eos: int) -> Tensor:
    """What `decoding.greedy` finds, every prefix decoded anew: (B, S) → (B, T)"""
    tokens = torch.full((len(src), 1), bos, device=src.device)
    done = torch.zeros(len(src), dtype=torch.bool, device=src.device)
    for position in range(int(limits.max())):
        newest = model(src, src_pad, tokens)[:, -1].argmax(-1).masked_fill(done, eos)  # (B,)
        tokens = torch.cat([tokens, newest[:, None]], 1)
        done |= (newest == eos) | (limits <= position + 1)
    return tokens[:, 1:]


@torch.inference_mode()
def widest_gap(wide: Translator, src: Tensor, src_pad: Tensor, left: Tensor, right: Tensor, bos: int) -> float:
    """Where outputs (B, T) first differ: how far apart the logits of the two tokens are in float64, at most. 0: all equal."""
    widest = 0.0
    for row in (left != right).any(1).nonzero().flatten().tolist():
        position = int((left[row] != right[row]).nonzero()[0])
        prefix = torch.cat([torch.tensor([bos]), left[row, :position]])
        logits = wide(src[row : row + 1], src_pad[row : row + 1], prefix[None])[0, -1]  # (V,)
        widest = max(widest, float((logits[left[row, position]] - logits[right[row, position]]).abs()))
    return widest
