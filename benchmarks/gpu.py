"""One command for a machine with a CUDA GPU: is the arithmetic right there, and how fast is it?

    bash run.sh gpu                                             # the report, to send back: runs/benchmarks/gpu.json
    python -m benchmarks.gpu --ckpt runs/NAME                   # decoding with a trained run too, at real lengths
    python -m benchmarks.gpu --again true                       # all stages anew; else those that are done are not repeated
    python -m benchmarks.gpu --device cpu --presets tiny --seconds 1 --tokens_per_batch 512 --minutes 0     # a rehearsal

parity     benchmarks.gpu_parity: every number format against float64 on the CPU; exit code 1 if one is wrong
step       benchmarks.cuda_step: host time, kernels and how busy the GPU is, plain and by CUDA graphs
training   benchmarks.training, plain, fast and captured, in the formats of the card
decoding   benchmarks.decoding: random weights and exactly 40 tokens a sentence, with --ckpt its own lengths; plain and captured
operators  benchmarks.attention_op: our Triton kernels beside PyTorch's
cards      the same steps of train.py on one card and, over NCCL, on all of them: the same loss?
run        train.py for some minutes, then evaluate.py: a BLEU

About ten minutes on one card. Every stage in processes of its own; what fails is reported, and the rest goes on.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks import attention_op as attention_benchmark
from benchmarks import cuda_step
from benchmarks import decoding as decoding_benchmark
from benchmarks import training as training_benchmark
from benchmarks.corpus import Corpus, load_corpus
from benchmarks.gpu_parity import Check, check_all
from benchmarks.measuring import ROOT, Run, commit, describe_machine, in_new_process, tokens_of, write_json
from benchmarks.peers.contest import SIZES
from engine.config import flag, parse_flags
from engine.distributed import choose_device
from engine.errors import UserError, run_script
from engine.precision import choose_precision
from model import ModelConfig, training_flops

TRAINING = {"bf16": ("plain-bf16", "bf16", "captured-bf16", "fp16"), "fp16": ("fp16",), "fp32": ("plain-fp32", "fp32")}
DECODING = {name: (f"plain-{name}", f"captured-{name}") for name in TRAINING}  # by the format that the device takes
EPOCH_PAIRS = 432_000  # of the course's data
STEPS = 60  # of train.py in stage cards
BUSY = 0.9  # share of the time in which a GPU computes that is not kept waiting
TARGETS = (  # on one H200: words in the contestant's name, figure, whether more is better, bound
    (("lab", "ours"), "tokens_per_second", True, 2e6),
    (("big", "bf16"), "model_flops_utilisation", True, 0.45),
    (("lab", "ours"), "seconds_432k_pairs", False, 12.0),
    (("lab", "40 tokens"), "seconds", False, 1.0),
    (("real lengths",), "seconds", False, 1.0),
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
    minutes: float = flag(2.0, "of stage run; 0: without it", "How", least=0)
    again: bool = flag(False, "repeat the stages that are done", "How")
    seconds: float = flag(8.0, "measured in each turn", "How", above=0)
    out: str = flag("runs/benchmarks/gpu.json", "file for the report", "How")

    def __post_init__(self):
        if unknown := set(self.presets.split(",")) - set(SIZES):
            raise UserError(f"--presets: unknown {', '.join(sorted(unknown))}; choose of {', '.join(SIZES)}")


class Report:
    """The file to send back: what every stage found, written after each of them."""

    def __init__(self, config: Config, facts: dict):
        self.path, self.facts, self.stages = ROOT / config.out, facts, {}
        settings = {name: value for name, value in asdict(config).items() if name not in ("again", "out")}
        self.facts |= {"settings": settings | {"commit": commit()}}
        if self.path.exists() and not config.again:
            earlier = json.loads(self.path.read_text(encoding="utf-8"))
            if earlier.get("settings") == self.facts["settings"] and earlier.get("device") == facts["device"]:
                self.stages = {name: found for name, found in earlier["stages"].items() if not found["error"]}

    def stage(self, name: str, work: Callable[[], list]) -> None:
        """Do it, unless it is done: → checks, turns or lines of text."""
        if name in self.stages:
            print(f"{name}: done before", flush=True)
            return
        print(f"\n{name}", flush=True)
        begun, found, error = time.perf_counter(), [], ""
        try:
            found = work()
        except (Exception, SystemExit) as problem:  # who has a GPU for an hour wants all that does work
            error = f"{type(problem).__name__}: {' '.join(str(problem).split())[-300:]}"
            print(error, flush=True)
        self.stages[name] = {"error": error, "seconds": time.perf_counter() - begun,
                             "checks": [asdict(item) | {"passed": item.passed} for item in found if isinstance(item, Check)],
                             "runs": [asdict(item) for item in found if isinstance(item, Run)],
                             "lines": [item for item in found if isinstance(item, str)]}  # fmt: skip
        self.write()

    def write(self, **facts) -> None:
        """All that is known so far."""
        self.facts |= {"checks": self.all("checks"), "stages": self.stages} | facts
        write_json(self.path, self.runs(), **self.facts)

    def all(self, kind: str) -> list:
        """The checks, runs or lines of all stages."""
        return [item for found in self.stages.values() for item in found[kind]]

    def runs(self) -> list[Run]:
        """Every turn."""
        return [Run(**run) for run in self.all("runs")]


def main(config: Config) -> int:
    """Check, measure, write, sum up; → the exit code."""
    device = choose_device(config.device, 0)
    described = choose_precision(device).describe()
    corpus = load_corpus(config.data, config.vocab, test_rows=config.sentences)
    print(f"{described}\n{describe_machine()}\n{corpus.describe()}")
    report = Report(config, {"device": described, "cuda": torch.version.cuda})
    for name, work in stages(config, device, corpus).items():
        report.stage(name, work)
    reached = targets(report.runs()) if device.type == "cuda" else []
    report.write(targets=reached)
    print("\n".join(["", described, *summary(report), *reached, f"written to {config.out}"]))
    return int(not all(check["passed"] for check in report.all("checks")))


def stages(config: Config, device: torch.device, corpus: Corpus) -> dict[str, Callable[[], list]]:
    """What there is to do, in order: first what is wrong, last what takes long."""
    todo, presets, on_gpu = {}, config.presets.split(","), device.type == "cuda"
    precision = choose_precision(device, training=True).name
    variants = DECODING[precision] if on_gpu else ("fp32",)
    for preset in presets:
        todo[f"{preset} parity"] = partial(in_new_process, check_all, preset, str(device), corpus.folder)
    for preset in presets if on_gpu else ():
        todo[f"{preset} step"] = partial(steps, config, preset)
    for preset in presets:
        todo[f"{preset} training"] = partial(
            training,
            config,
            device,
            corpus,
            TRAINING[precision],
            preset=preset,
            tokens_per_batch=config.tokens_per_batch,
        )
    sentences = dict(sentences=config.sentences, batch=config.batch)
    for preset in presets:
        words = f"{preset} 40 tokens"
        todo[f"{preset} decoding"] = partial(
            measure, config, device, decoding_benchmark, words, variants, preset=preset, **sentences
        )
    if config.ckpt:
        todo["real lengths"] = partial(
            measure, config, device, decoding_benchmark, "real lengths", variants, ckpt=config.ckpt, **sentences
        )
    if on_gpu:
        todo |= {"operators": partial(operators, config), "cards": partial(cards, config)}
    return todo | ({"run": partial(short_run, config)} if config.minutes else {})


# ---------------------------------------------------------------- stages


def measure(
    config: Config, device: torch.device, benchmark, words: str, variants: tuple[str, ...], **settings
) -> list[Run]:
    """One turn of each variant of ours in another benchmark."""
    names = [f"ours-{name}" for name in variants if f"ours-{name}" in benchmark.CONTESTANTS]
    names = [name for name in names if device.type == "cuda" or not ("captured" in name or name.endswith("fp16"))]
    turns = benchmark.main(benchmark.Config(
        contestants=",".join(names), device=str(device), data=config.data, vocab=config.vocab, rounds=1,
        seconds=config.seconds, out=str(Path(config.out).with_suffix(".part.json")), **settings,
    ))  # fmt: skip
    return [Run(f"{words}, {turn.contestant}", 1, turn.figures, turn.seconds, turn.others) for turn in turns]


def training(config: Config, device: torch.device, corpus: Corpus, variants: tuple[str, ...], **settings) -> list[Run]:
    """Also what follows from the tokens a second: an epoch of the course's data, utilisation of the GPU."""
    runs = measure(config, device, training_benchmark, f"{settings['preset']} training", variants, **settings)
    tokens_of_epoch = sum(map(tokens_of, zip(*corpus.train))) * EPOCH_PAIRS / len(corpus.train)
    for run in runs:
        figures, preset = run.figures, run.contestant.split()[0]
        figures["seconds_432k_pairs"] = tokens_of_epoch / figures["tokens_per_second"]
        if "peak_tflops" in figures:
            target = figures["target_tokens_per_second"]
            sizes = ModelConfig(corpus.source_vocab, corpus.target_vocab, **SIZES[preset])
            flops = training_flops(sizes, figures["tokens_per_second"] - target, target)
            figures["model_flops_utilisation"] = flops / 1e12 / figures["peak_tflops"]
    return runs


def steps(config: Config, preset: str) -> list:
    """Host time and kernels of a step, plain and captured; and who waits for whom."""
    found = []
    for captured in (False, True):
        name = f"{preset} step, {'captured' if captured else 'plain'}"
        task = cuda_step.Config(preset=preset, tokens=config.tokens_per_batch, vocab=config.vocab, captured=captured)
        begun = time.perf_counter()
        figures = in_new_process(cuda_step.measure, task)
        found.append(Run(name, 1, figures, time.perf_counter() - begun))
        busy = figures.get("gpu_busy", 1.0)
        if busy < BUSY:
            found.append(f"{name}: the GPU computes {busy:.0%} of the time, for the rest it waits for Python")
        if figures["wait_ms"] > 0.02 * figures["ms"]:
            found.append(f"{name}: {figures['wait_ms']:.2f} of {figures['ms']:.2f} ms are spent waiting for data")
    return found


def operators(config: Config) -> list[str]:
    """Our attention and GELU against PyTorch's, right and how fast: the table is in the file beside the report."""
    beside = str(Path(config.out).with_suffix(".operators.json"))
    settings = attention_benchmark.Config(
        lengths="64,1024", numbers="1048576", rounds=3, device=config.device, out=beside
    )
    attention_benchmark.main(settings)
    return [f"operators agree with PyTorch's; times in {beside}"]


def cards(config: Config) -> list:
    """The same run on one card and on all: the same loss, and how much faster."""
    count, results = torch.cuda.device_count(), {}
    for processes in sorted({1, count}):
        begun, name = time.perf_counter(), f"gpu-cards-{processes}"
        launch = (
            ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes, "--"]
            if processes > 1
            else []
        )
        folder = train(config, launch, name, "--max_steps", STEPS, "--eval_every", STEPS, "--dropout", 0)
        scalars = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        figures = {key: value for line in scalars for key, value in line.items()}
        results[processes] = Run(f"train.py on {processes} card(s)", 1, {"loss": figures["valid/loss"],
            "tokens_per_second": figures.get("speed/tokens_per_second", 0.0)}, time.perf_counter() - begun)  # fmt: skip
    if count == 1:
        return [*results.values(), "one card: NCCL had nothing to do"]
    apart = abs(results[count].figures["loss"] / results[1].figures["loss"] - 1)
    return [*results.values(), Check(f"validation loss on {count} cards against one", {"loss": apart}, 1e-2)]


def short_run(config: Config) -> list[Run]:
    """A training of some minutes and its BLEU."""
    begun = time.perf_counter()
    folder = train(config, [], "gpu-run", "--max_minutes", config.minutes)
    call("evaluate.py", "--ckpt", folder)
    scores = json.loads(max((folder / "eval").glob("*.json"), key=os.path.getmtime).read_text(encoding="utf-8"))
    numbers = {name: value for name, value in scores.items() if isinstance(value, int | float)}
    return [Run(f"train.py for {config.minutes:g} minutes, evaluate.py", 1, numbers, time.perf_counter() - begun)]


def train(config: Config, launch: list, name: str, *flags) -> Path:
    """A run of train.py under this name, in the place of an earlier one; → its folder."""
    folder = (ROOT / config.out).parent / name
    if folder.exists():
        folder.rename(folder.with_name(f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"))
    data = config.data or os.environ.get("MINIDATASET", "")
    words = [*launch, ROOT / "train.py", "--run", folder, "--device", config.device, *flags]
    call(*words, *(["--data", data] if data else []))
    return folder


def call(*words) -> None:
    """Python with these words; raises with its last line if it fails."""
    done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{words[0]}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")


# ---------------------------------------------------------------- summary


def summary(report: Report) -> list[str]:
    """One screen: what is wrong, and a line for every turn."""
    checks = [
        Check(**{key: value for key, value in check.items() if key != "passed"}) for check in report.all("checks")
    ]
    wrong = [check.describe() for check in checks if not check.passed]
    lines = [f"parity: {len(checks) - len(wrong)} of {len(checks)} checks passed", *wrong]
    lines += [f"FAILED {name}: {found['error']}" for name, found in report.stages.items() if found["error"]]
    shown = ("tokens_per_second", "seconds", "first_seconds", "model_flops_utilisation", "seconds_432k_pairs", "peak_gib",
             "ms", "cpu_ms", "kernels", "gpu_busy", "loss", "sacrebleu")  # fmt: skip
    for run in report.runs():
        figures = "  ".join(f"{name} {run.figures[name]:,.4g}" for name in shown if name in run.figures)
        lines.append(f"{run.contestant:<34} {figures}")
    return lines + report.all("lines")


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


if __name__ == "__main__":
    settings = parse_flags(Config, "check and measure on a GPU")
    run_script(lambda: sys.exit(main(settings)))
