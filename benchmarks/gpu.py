"""One command for a machine with a CUDA GPU: is everything right there, and how fast is it?

    python -m benchmarks.gpu                                    # all parts; the report is runs/benchmarks/gpu.json
    python -m benchmarks.gpu --ckpt runs/NAME                   # decoding with a trained run too, at real lengths
    python -m benchmarks.gpu --parts training --presets lab --precisions bf16 --tokens_per_batch 65536 --workers 4
    python -m benchmarks.gpu --device cpu --tiny --seconds 1 --tokens_per_batch 1024 --rows 128      # a rehearsal

parity    loss and gradients in every number format against float64 on the CPU (benchmarks/gpu_parity.py); exit code 1 on a FAIL
training  benchmarks/gpu_speed.py: the loop of train.py without its log: real source and target tokens a second, end token counted
decoding  greedy search over the test split: random weights and exactly 40 tokens a sentence, with --ckpt its own lengths;
          plain, captured (the graphs made in every pass, as evaluate.py does), and with the graphs kept from pass to pass
What fails, for want of memory for instance, is reported and left out; the rest goes on. With fp32, products are TF32 as in
train.py, and so is the peak that model FLOPs utilisation is a share of. On a CPU, peak_gib is the process's and never falls.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks.corpus import ROOT
from benchmarks.gpu_parity import Check, check_captured, check_greedy, check_losses
from benchmarks.gpu_speed import FIXED_LENGTH, WAYS, Bench, decode_random, decode_run, sources_of, train
from benchmarks.measuring import Run, describe_machine, write_json
from data import collate_for, prepare
from engine.allocator import keep_freed_memory
from engine.config import flag, parse_flags
from engine.distributed import choose_device
from engine.errors import UserError, run_script
from engine.precision import choose_precision
from model import PRESETS, ModelConfig, Translator
from text.rows import default_path, find_text
from trained import load_trained

PARTS = ("parity", "training", "decoding")
TARGETS = (  # on one H200: words in the contestant's name, figure, whether more is better, bound
    (("lab",), "tokens_per_second", True, 1.5e6),
    (("big", "bf16"), "model_flops_utilisation", True, 0.40),
    (("lab",), "seconds_432k_pairs", False, 20.0),
    (("lab", "40 tokens"), "pass_seconds", False, 1.5),
    (("lab", "real lengths"), "pass_seconds", False, 1.5),
)


@dataclass
class Config:
    """Every setting of this benchmark."""

    parts: str = flag(",".join(PARTS), "what to do, with commas between", "What")
    presets: str = flag("lab,big", "model sizes", "What")
    precisions: str = flag("auto,bf16,fp32", "number formats of training and decoding", "What")
    compile: str = flag("auto", "torch.compile beside eager (auto|yes|no); auto: on a GPU", "What")
    tokens_per_batch: str = flag("16384,65536", "padded tokens a side in a training step", "What")
    rows: str = flag("128,512,2048", "sentences decoded at once", "What")
    ckpt: str = flag("", "trained run to decode with at real lengths", "What")
    data: str = flag("", "as train.py's --data; MINIDATASET, else as there", "How")
    vocab: int = flag(0, "tokens in each vocabulary; 0: as train.py", "How")
    test_rows: int = flag(2001, "sentences to decode", "How")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "How")
    workers: int = flag(0, "as train.py's --workers", "How")
    seconds: float = flag(20.0, "measured in each turn", "How")
    warm_steps: int = flag(20, "training steps before the clock starts", "How")
    tiny: bool = flag(False, "a model of 32 places for every preset, to try the command", "How")
    out: str = flag("runs/benchmarks/gpu.json", "file for the report", "How")

    def __post_init__(self):
        for name, allowed in (("parts", PARTS), ("presets", PRESETS), ("compile", ("auto", "yes", "no"))):
            if unknown := set(words(getattr(self, name))) - set(allowed):
                raise UserError(f"--{name}: unknown {', '.join(sorted(unknown))}; choose of {', '.join(allowed)}")
        if not words(self.parts):
            raise UserError(f"--parts is empty; choose of {', '.join(PARTS)}")
        for name in ("tokens_per_batch", "rows"):
            if not all(word.isdecimal() and int(word) for word in words(getattr(self, name))):
                raise UserError(f"--{name} {getattr(self, name)} must be numbers from 1 on, with commas between")


def words(text: str) -> list[str]:
    """ "a,b" → ["a", "b"]"""
    return [word.strip() for word in text.split(",") if word.strip()]


def parity(bench: Bench) -> None:
    """Every check for every preset; those made before a failure count."""

    def keep(preset: str, checks: Iterator[Check]) -> None:
        for check in checks:
            check.name = f"{preset}: {check.name}"
            print(check.describe(), flush=True)
            bench.checks.append(check)

    collate = collate_for(bench.prepared)
    for preset in words(bench.config.presets):
        torch.manual_seed(1)
        model = Translator(bench.sizes(preset, dropout=0.0))
        checks = check_losses(model, bench.device, bench.prepared.train, collate, bench.compile)
        bench.attempt(f"{preset} parity of losses", partial(keep, preset, checks))
        checks = check_greedy(model, bench.device, bench.sources, collate)
        bench.attempt(f"{preset} parity of greedy search", partial(keep, preset, checks))
        checks = check_captured(model, bench.device, bench.sources, collate)
        bench.attempt(f"{preset} parity of captured steps", partial(keep, preset, checks))


def precisions(bench: Bench, training: bool) -> list[str]:
    """The formats asked for, each once: "auto" is one of the others."""
    chosen = {name: choose_precision(bench.device, name, training).name for name in words(bench.config.precisions)}
    print(", ".join(f"{name}: {format}" for name, format in chosen.items()))
    return list(dict.fromkeys(chosen.values()))


def training(bench: Bench) -> None:
    """Every preset, format, batch size, eager and compiled."""
    config = bench.config
    print(f"\ntraining; an epoch is {len(bench.prepared.train):,} pairs")
    modes = ("eager", "compiled") if bench.compile else ("eager",)
    settings = product(words(config.presets), precisions(bench, True), modes, map(int, words(config.tokens_per_batch)))
    bench.measure({" ".join(map(str, setting)): partial(train, bench, *setting) for setting in settings})


def decode(bench: Bench) -> None:
    """Random weights of every preset, then the trained run."""
    print(f"\ngreedy decoding of {len(bench.sources):,} sentences")
    ways = [*product(precisions(bench, False), map(int, words(bench.config.rows)), WAYS)]
    bench.measure({f"{preset} {precision} {rows} rows, {FIXED_LENGTH} tokens, {way}":
                   partial(decode_random, bench, preset, precision, rows, way)
                   for preset in words(bench.config.presets) for precision, rows, way in ways})  # fmt: skip
    if bench.config.ckpt:
        trained = load_trained(bench.config.ckpt)
        sizes = asdict(trained.model.config)
        preset = next((name for name in PRESETS if PRESETS[name].items() <= sizes.items()), "run")
        bench.measure({f"{preset} {precision} {rows} rows, real lengths, {way}":
                       partial(decode_run, bench, trained, precision, rows, way)
                       for precision, rows, way in ways})  # fmt: skip


def targets(runs: list[Run]) -> list[str]:
    """For each target, the best that was measured; targets that no turn was about are left out."""
    lines = []
    for name, figure, more, bound in TARGETS:
        found = [run for run in runs if figure in run.figures and all(word in run.contestant for word in name)]
        if found:
            best = (max if more else min)(found, key=lambda run: run.figures[figure])
            value, sign = best.figures[figure], "≥" if more else "≤"
            verdict = "reached" if (value >= bound if more else value <= bound) else "missed"
            lines.append(f"{figure} {value:,.4g} ({best.contestant}); target on an H200 {sign} {bound:,g}: {verdict}")
    return lines


def prepare_bench(config: Config) -> Bench:
    """Device, data and test sentences."""
    device = choose_device(config.device, 0)
    if device.type == "cpu":
        keep_freed_memory()
    text = find_text(str(config.data or os.environ.get("MINIDATASET") or default_path()))
    prepared = prepare(text, ROOT / "runs" / ".cache", source_vocab=config.vocab, target_vocab=config.vocab)
    tokenizers = {"src": prepared.source_tokenizer, "tgt": prepared.target_tokenizer}
    sources = sources_of(text, tokenizers, config.test_rows, ModelConfig(1, 1).max_length)
    compiled = config.compile == "yes" or (config.compile == "auto" and device.type == "cuda")
    return Bench(config, device, prepared, sources, compiled)


def write_report(bench: Bench, described: str) -> list[str]:
    """All that was found so far; → the lines about targets, none for a tiny model."""
    config, reached = bench.config, [] if bench.config.tiny else targets(bench.runs)
    checks = [asdict(check) | {"passed": check.passed} for check in bench.checks]
    write_json(ROOT / Path(config.out), bench.runs, device=described, settings=asdict(config), checks=checks,
               failures=bench.failures, targets=reached, cuda=torch.version.cuda)  # fmt: skip
    return reached


def main(config: Config) -> int:
    """Check, measure, write; → the exit code."""
    bench = prepare_bench(config)
    described = choose_precision(bench.device).describe()
    print(f"{described}\n{describe_machine()}")
    for name, part in {"parity": parity, "training": training, "decoding": decode}.items():
        if name in words(config.parts):
            try:
                part(bench)
            finally:  # a GPU that has failed for good takes the process along: what was found is kept
                reached = write_report(bench, described)
    print("\n" + "\n".join(reached))
    wrong = [check.name for check in bench.checks if not check.passed] + list(bench.failures)
    print(f"{len(wrong)} failed: {'; '.join(wrong)}" if wrong else "nothing failed", f"\nwritten to {config.out}")
    return int(not all(check.passed for check in bench.checks) or any("parity" in name for name in bench.failures))


if __name__ == "__main__":
    settings = parse_flags(Config, "check and measure on a GPU")
    run_script(lambda: sys.exit(main(settings)))
