"""Is the arithmetic right on this device? Every number format against float64 on the CPU, fast/ and graphs against plain code.

A difference is relative: ‖result − wanted‖ / ‖wanted‖, for the loss, for all gradients as one vector, and for the gradient of
the parameter that is worst off. That last one may be ten times the limit: it can be a small sum of large numbers.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

import fast
from benchmarks.corpus import Corpus, read_corpus
from benchmarks.peers.contest import LABEL_SMOOTHING, SIZES
from data import BucketSampler, Collate
from decoding import greedy, output_limit
from engine.distributed import choose_device
from engine.precision import Precision
from fast.captured import CapturedSteps
from fast.cross_entropy import LOGITS_AT_ONCE
from fast.cuda_training import CapturedLoss
from model import ModelConfig, SummedLoss, Translator

TOKENS, BATCHES = 1024, 3  # of a side in a batch, and how many batches
SLICE_ROWS = 100  # so that the sliced cross-entropy has many slices, the last one smaller
SENTENCES, LONGEST = 64, 40  # of greedy search; tokens
NEAR_TIE = 1e-3  # fp32 logits this near may swap places when rounded otherwise
WORST = 10  # times the limit: what the worst parameter may differ
FORMATS = {  # name: (weights, precision, fp32 products, limit of loss and gradients, of a near tie between captured and plain)
    "float64": (torch.float64, "fp32", "highest", 1e-9, 0.0),
    "fp32": (torch.float32, "fp32", "highest", 1e-4, NEAR_TIE),
    "fp32 as TF32": (torch.float32, "fp32", "high", 1e-2, 0.05),  # products of 11 significant bits
    "bf16": (torch.float32, "bf16", "highest", 5e-2, 0.5),  # of 8
    "fp16": (torch.float32, "fp16", "highest", 1e-2, 0.05),  # of 11
}
ONLY_CUDA = ("fp32 as TF32", "fp16")


@dataclass
class Check:
    """One line of the report. nan passes nothing."""

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


def check_all(preset: str, device_name: str, folder: Path) -> list[Check]:
    """Every check of one size. Runs in a process of its own."""
    device, corpus = choose_device(device_name, 0), read_corpus(folder)
    torch.manual_seed(1)
    sizes = SIZES[preset] | {"dropout": 0.0}
    model = Translator(ModelConfig(corpus.source_vocab, corpus.target_vocab, **sizes))
    checks = []
    for kind in (check_losses, check_greedy, check_captured):
        try:
            for check in kind(model, device, corpus):
                check.name = f"{preset}: {check.name}"
                print(check.describe(), flush=True)
                checks.append(check)
        except Exception as error:  # who has a GPU for an hour wants all that does work
            note = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            checks.append(Check(f"{preset}: {kind.__name__}", {"failed": float("nan")}, 0.0, note))
            print(checks[-1].describe(), flush=True)
    return checks


def formats(device: torch.device) -> list[str]:
    """The names of those that the device has."""
    return [name for name in FORMATS if device.type == "cuda" or name not in ONLY_CUDA]


@contextmanager
def fp32_products(setting: str) -> Iterator[None]:
    """Inside, products of fp32 numbers are computed with this `torch.set_float32_matmul_precision`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


Gradients = tuple[float, dict[str, Tensor]]  # loss a token, gradient of each parameter in float64 on the CPU


def check_losses(model: Translator, device: torch.device, corpus: Corpus) -> Iterator[Check]:
    """Every format: plain against float64 on the CPU, then fast/ against plain on the device.

    `model` is in fp32 on the CPU, without dropout.
    """
    collate, sampler = Collate(corpus.source_ids, corpus.target_ids), BucketSampler(corpus.lengths, TOKENS, seed=1)
    batches = [collate([corpus.train[row] for row in rows]) for rows in islice(sampler, BATCHES)]
    plain_loss = lambda model, dtype: SummedLoss(model, LABEL_SMOOTHING)  # noqa: E731
    fast_loss = lambda model, dtype: fast.loss(model, LABEL_SMOOTHING, dtype)  # noqa: E731
    wanted = gradients(copy.deepcopy(model).double(), batches, "fp32", plain_loss)
    for name in formats(device):
        weights, precision, products, limit, _ = FORMATS[name]
        there = copy.deepcopy(model).to(device, weights)
        with fp32_products(products):
            plain = gradients(there, batches, precision, plain_loss)
            yield difference(f"{name}, against float64 on the CPU", plain, wanted, limit)
            faster = gradients(there, batches, precision, fast_loss)
            if faster:
                yield difference(f"{name}, fast against plain", faster, plain, limit)
            if name != "fp16":  # logits are in fp32 even for float64, and padding changes the order of their sum
                graphs = CapturedLoss(SummedLoss(there, LABEL_SMOOTHING), sampler.shapes())
                for _ in ("as it is", "captured", "replayed"):
                    captured = gradients(there, batches, precision, lambda *_, loss_of=graphs: loss_of)
                if device.type == "cuda" and not graphs.captured:
                    raise RuntimeError("a capture failed: see the note")
                yield difference(f"{name}, training by graphs against plain", captured, plain, max(limit, 1e-6))


def gradients(model: Translator, batches: list, precision_name: str, make_loss: Callable) -> Gradients | None:
    """Of the loss over all batches, where the model is and in its format; None if there is no such loss."""
    device, vocabulary, weights = model.output.weight.device, model.config.target_vocab, model.output.weight.dtype
    precision, tokens, total = Precision(device, precision_name, ""), sum(b.target_tokens for b in batches), 0.0
    # Low enough for a first step, which nothing has adapted yet.
    precision.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12, enabled=precision_name == "fp16")
    loss_of = make_loss(model.train(), weights if precision_name == "fp32" else precision.dtype)
    if loss_of is None:
        return None
    model.zero_grad()
    with patch.dict(LOGITS_AT_ONCE, {device.type: SLICE_ROWS * vocabulary}):
        for batch in (batch.to(device) for batch in batches):
            with precision.autocast():
                loss, _ = loss_of(batch.src, batch.src_pad, batch.tgt_in, batch.real, batch.tgt_out)
            precision.backward(loss / tokens)
            total += loss.item() / tokens
    scale = precision.scaler.get_scale()
    return total, {name: weight.grad.to("cpu", torch.float64) / scale for name, weight in model.named_parameters()}


def difference(name: str, result: Gradients, wanted: Gradients, limit: float) -> Check:
    """Relative, see the head of this file."""
    (loss, ours), (wanted_loss, theirs) = result, wanted
    apart = {key: (ours[key] - theirs[key]).norm().item() for key in theirs}
    sizes = {key: theirs[key].norm().item() for key in theirs}
    whole = sum(size**2 for size in sizes.values()) ** 0.5
    all_apart = sum(size**2 for size in apart.values()) ** 0.5 / whole
    shares = {key: apart[key] / max(sizes[key], 1e-6 * whole) for key in theirs}
    worst = max(shares, key=shares.get)
    differences = {"loss": abs(loss / wanted_loss - 1), "gradient": all_apart, "worst": shares[worst]}
    return Check(name, differences, limit, f"worst: {worst}")


def check_greedy(model: Translator, device: torch.device, corpus: Corpus) -> Iterator[Check]:
    """Cached against uncached in float64 on the device; fp32 there against fp32 on the CPU, equal but for near ties."""
    src, src_pad, limits, *ends = sources_of(corpus, LONGEST)
    inputs = (*(tensor.to(device) for tensor in (src, src_pad, limits)), *ends)
    wide = copy.deepcopy(model).to(device, torch.float64).eval()
    different = (greedy(wide, *inputs) != greedy_uncached(wide, *inputs)).any(1)
    yield Check("greedy in float64, cached against uncached", {"sentences": different.double().mean().item()}, 0.0)
    with fp32_products("highest"):
        there = greedy(copy.deepcopy(model).to(device).eval(), *inputs).cpu()
        here = greedy(copy.deepcopy(model).eval(), src, src_pad, limits, *ends, fast.steps(model))
    yield near_tie("greedy in fp32, against the CPU", model, src, src_pad, there, here, ends[0], NEAR_TIE)


def check_captured(model: Translator, device: torch.device, corpus: Corpus) -> Iterator[Check]:
    """Captured steps against plain ones on the device, in every format of decoding; twice, so that graphs are used again.

    Outputs are as long as the limits allow, so that several graphs take turns and rows leave.
    """
    src, src_pad, limits, *ends = sources_of(corpus, model.config.max_length)
    inputs = (*(tensor.to(device) for tensor in (src, src_pad, limits)), *ends)
    for name in formats(device):
        weights, precision, products, _, limit = FORMATS[name]
        there = copy.deepcopy(model).to(device, weights).eval()
        with fp32_products(products), Precision(device, precision, "").autocast():
            plain, steps = greedy(there, *inputs).cpu(), CapturedSteps(there)
            for turn in ("first", "second"):
                captured = greedy(there, *inputs, steps.start).cpu()
                if device.type == "cuda" and not steps.graphs:
                    raise RuntimeError("a capture failed: see the note")
                yield near_tie(
                    f"captured steps in {name}, {turn} time", model, src, src_pad, captured, plain, ends[0], limit
                )


def sources_of(corpus: Corpus, longest: int) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """(src, src_pad, limits, bos, eos) of test sentences, the longest first."""
    collate = Collate(corpus.source_ids, corpus.target_ids)
    src, src_pad = collate.pad_sources(sorted((source for source, _ in corpus.test[:SENTENCES]), key=len, reverse=True))
    return src, src_pad, output_limit((~src_pad).sum(1), longest), corpus.target_ids["bos"], corpus.target_ids["eos"]


@torch.inference_mode()
def greedy_uncached(model: Translator, src: Tensor, src_pad: Tensor, limits: Tensor, bos: int, eos: int) -> Tensor:
    """What `decoding.greedy` gives, every prefix decoded anew: (B, S) → (B, T)"""
    tokens = torch.full((len(src), 1), bos, device=src.device)
    done = torch.zeros(len(src), dtype=torch.bool, device=src.device)
    for position in range(int(limits.max())):
        newest = model(src, src_pad, tokens)[:, -1].argmax(-1).masked_fill(done, eos)  # (B,)
        tokens = torch.cat([tokens, newest[:, None]], 1)
        done |= (newest == eos) | (limits <= position + 1)
    return tokens[:, 1:]


def near_tie(name: str, model: Translator, src, src_pad, left: Tensor, right: Tensor, bos: int, limit: float) -> Check:
    """Equal outputs, but for logits that are equal to the limit."""
    gap = widest_gap(copy.deepcopy(model).double().eval(), src, src_pad, left, right, bos)
    note = f"{(left == right).all(1).double().mean():.1%} of {len(src)} sentences equal"
    return Check(name, {"near tie": gap}, limit, note)


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
