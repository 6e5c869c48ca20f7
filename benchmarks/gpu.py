"""One command for a machine with a CUDA GPU: is the arithmetic right there, and how fast is it?

    python -m benchmarks.gpu                                    # the report, to send back: runs/benchmarks/gpu.json
    python -m benchmarks.gpu --ckpt runs/NAME                   # decoding with a trained run too, at real lengths
    python -m benchmarks.gpu --device cpu --presets tiny --seconds 1 --tokens_per_batch 512      # a rehearsal

parity    loss, gradients and greedy outputs in every number format against float64 on the CPU; exit code 1 if one is wrong
training  benchmarks.training, plain and fast, in the formats of the card
decoding  benchmarks.decoding: random weights and exactly 40 tokens a sentence, with --ckpt its own lengths; plain and captured

All in processes of their own. What fails, for want of memory for instance, is reported and left out; the rest goes on.
A difference is relative: ‖result − wanted‖ / ‖wanted‖, for the loss, for all gradients as one vector, and for the gradient of
the parameter that is worst off. That last one may be ten times the limit: it can be a small sum of large numbers.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

import fast
from benchmarks import decoding as decoding_benchmark
from benchmarks import training as training_benchmark
from benchmarks.corpus import Corpus, load_corpus, read_corpus
from benchmarks.measuring import ROOT, Run, describe_machine, in_new_process, tokens_of, write_json
from benchmarks.peers.contest import LABEL_SMOOTHING, SIZES
from data import BucketSampler, Collate
from decoding import greedy, output_limit
from engine.config import flag, parse_flags
from engine.distributed import choose_device
from engine.errors import UserError, run_script
from engine.precision import Precision, choose_precision
from fast.captured import CapturedSteps
from fast.cross_entropy import LOGITS_AT_ONCE
from model import ModelConfig, SummedLoss, Translator, training_flops

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
TRAINING = {"bf16": ("plain-bf16", "bf16", "compiled-bf16", "fp16"), "fp16": ("fp16",), "fp32": ("plain-fp32", "fp32")}
DECODING = {name: (f"plain-{name}", f"captured-{name}") for name in TRAINING}  # by the format that the device takes
EPOCH_PAIRS = 432_000  # of the course's data
TARGETS = (  # on one H200: words in the contestant's name, figure, whether more is better, bound
    (("lab", "ours"), "tokens_per_second", True, 1.5e6),
    (("big", "bf16"), "model_flops_utilisation", True, 0.40),
    (("lab", "ours"), "seconds_432k_pairs", False, 20.0),
    (("lab", "40 tokens"), "seconds", False, 1.5),
    (("real lengths",), "seconds", False, 1.5),
)


@dataclass
class Config:
    """Every setting of this benchmark."""

    presets: str = flag("lab,big", "model sizes, with commas between", "What")
    tokens_per_batch: int = flag(65536, "padded tokens a side in a training step", "What", least=64)
    batch: int = flag(512, "sentences decoded at once", "What", least=1)
    ckpt: str = flag("", "trained run to decode with at real lengths", "What")
    data: str = flag("", "as train.py's --data; MINIDATASET, else as there", "What")
    vocab: int = flag(8000, "tokens in each vocabulary", "What", least=300, most=60000)
    sentences: int = flag(2001, "of the test split, the first so many", "What", least=1)
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "How")
    seconds: float = flag(20.0, "measured in each turn", "How", above=0)
    out: str = flag("runs/benchmarks/gpu.json", "file for the report", "How")

    def __post_init__(self):
        if unknown := set(self.presets.split(",")) - set(SIZES):
            raise UserError(f"--presets: unknown {', '.join(sorted(unknown))}; choose of {', '.join(SIZES)}")


def main(config: Config) -> int:
    """Check, measure, write, sum up; → the exit code."""
    device = choose_device(config.device, 0)
    precision, described = choose_precision(device, training=True).name, choose_precision(device).describe()
    corpus = load_corpus(config.data, config.vocab, test_rows=config.sentences)
    print(f"{described}\n{describe_machine()}\n{corpus.describe()}")
    checks: list[Check] = []
    for preset in config.presets.split(","):
        checks += in_new_process(check_all, preset, str(device), corpus.folder)
    runs: list[Run] = []

    def measure(benchmark, words: str, variants: tuple[str, ...], **settings) -> None:
        contestants = [f"ours-{name}" for name in variants if f"ours-{name}" in benchmark.CONTESTANTS]
        contestants = [
            name for name in contestants if device.type == "cuda" or not name.endswith(("fp16", "compiled-bf16"))
        ]
        turns = benchmark.main(benchmark.Config(
            contestants=",".join(contestants), device=str(device), data=config.data, vocab=config.vocab, rounds=1,
            seconds=config.seconds, out=str(Path(config.out).with_suffix(".part.json")), **settings,
        ))  # fmt: skip
        runs.extend(Run(f"{words}, {turn.contestant}", 1, turn.figures, turn.seconds, turn.others) for turn in turns)

    for preset in config.presets.split(","):
        sizes = dict(preset=preset, tokens_per_batch=config.tokens_per_batch)
        measure(training_benchmark, f"{preset} training", TRAINING[precision], **sizes)
    add_speeds(runs, corpus)
    for preset in config.presets.split(","):
        sizes = dict(preset=preset, sentences=config.sentences, batch=config.batch)
        variants = ("fp32",) if device.type == "cpu" else DECODING[precision]
        measure(decoding_benchmark, f"{preset} 40 tokens", variants, **sizes)
        if config.ckpt and preset == config.presets.split(",")[0]:
            sizes = dict(ckpt=config.ckpt, sentences=config.sentences, batch=config.batch)
            measure(decoding_benchmark, "real lengths", variants, **sizes)
    reached = targets(runs) if device.type == "cuda" else []
    write_json(ROOT / config.out, runs, device=described, settings=asdict(config), targets=reached, cuda=torch.version.cuda,
               checks=[asdict(check) | {"passed": check.passed} for check in checks])  # fmt: skip
    print("\n".join(["", described, *summary(checks, runs), *reached, f"written to {config.out}"]))
    return int(not all(check.passed for check in checks))


def add_speeds(runs: list[Run], corpus: Corpus) -> None:
    """What follows from the tokens a second of training: an epoch of the course's data, utilisation of the GPU."""
    tokens_of_epoch = sum(map(tokens_of, zip(*corpus.train))) * EPOCH_PAIRS / len(corpus.train)
    for run in runs:
        figures, preset = run.figures, run.contestant.split()[0]
        figures["seconds_432k_pairs"] = tokens_of_epoch / figures["tokens_per_second"]
        if "peak_tflops" in figures:
            target = figures["target_tokens_per_second"]
            sizes = ModelConfig(corpus.source_vocab, corpus.target_vocab, **SIZES[preset])
            flops = training_flops(sizes, figures["tokens_per_second"] - target, target)
            figures["model_flops_utilisation"] = flops / 1e12 / figures["peak_tflops"]


def summary(checks: list["Check"], runs: list[Run]) -> list[str]:
    """One screen: what is wrong, and a line for every turn."""
    wrong = [check.describe() for check in checks if not check.passed]
    lines = [f"parity: {len(checks) - len(wrong)} of {len(checks)} checks passed", *wrong]
    for run in runs:
        shown = (
            "tokens_per_second",
            "seconds",
            "first_seconds",
            "model_flops_utilisation",
            "seconds_432k_pairs",
            "peak_gib",
        )
        figures = "  ".join(f"{name} {run.figures[name]:,.4g}" for name in shown if name in run.figures)
        lines.append(f"{run.contestant:<34} {figures}")
    return lines


def targets(runs: list[Run]) -> list[str]:
    """For each target, the best that was measured; targets that no turn was about are left out."""
    lines = []
    for words, figure, more, bound in TARGETS:
        about = [run for run in runs if figure in run.figures and all(word in run.contestant for word in words)]
        if about:
            best = (max if more else min)(about, key=lambda run: run.figures[figure])
            value, sign = best.figures[figure], "≥" if more else "≤"
            verdict = "reached" if (value >= bound if more else value <= bound) else "missed"
            lines.append(f"{figure} {value:,.4g} ({best.contestant}); target on an H200 {sign} {bound:,g}: {verdict}")
    return lines


# ---------------------------------------------------------------- parity


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


if __name__ == "__main__":
    settings = parse_flags(Config, "check and measure on a GPU")
    run_script(lambda: sys.exit(main(settings)))
