"""One command for a machine with a CUDA GPU: is the arithmetic right there, and how fast is it?

    bash run.sh gpu                                             # the report, to send back: runs/benchmarks/gpu.json
    python -m benchmarks.gpu --ckpt runs/NAME                   # decoding with a trained run too, at real lengths
    python -m benchmarks.gpu --device cpu --presets tiny --seconds 1 --tokens_per_batch 512 --minutes 0   # a rehearsal

parity     tests/fast/test_device.py: every number format against float64 on the CPU
training   benchmarks.training, plain and fast, in the formats of the card; CPU time, wait for data
decoding   benchmarks.decoding: random weights and exactly 40 tokens a sentence, with --ckpt its own lengths
operators  benchmarks.attention_op: attention and GELU by hand beside PyTorch's
cards      the same steps of train.py on one card and, over NCCL, on all of them: the same loss?
run        train.py for some minutes, then evaluate.py: a BLEU

About ten minutes on one card. Every stage is commands of their own; what fails is reported, and the rest goes on. Started again
at the same commit with the same settings, it does what failed or is missing.
"""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.measuring import ROOT, describe_machine, in_new_process, machine, shown, write_json
from benchmarks.peers.contest import SIZES, choose
from engine.config import flag, parse_flags
from engine.devices import choose_device, hidden_gpus
from engine.errors import UserError, run_script
from engine.precision import choose_precision
from engine.telemetry import GIB
from tools.reporting.reading import read_run

FORMATS = {
    "bf16": "plain-bf16 bf16 muon-bf16 fp16",
    "fp16": "fp16 muon-fp16",
    "fp32": "plain-fp32 fp32 muon-fp32",
}  # by what a card trains in
STEPS = 60  # of train.py in stage cards
LIMIT = 900  # seconds of a command, besides --minutes
ALLOWED = 1e-2  # relative difference of the validation losses on one card and on all
# What an H100 should reach in bf16 by reckoning, by file of a stage; nobody has seen it.
EXPECTED = {
    "lab-training": ("tokens_per_second", 2e6),
    "big-training": ("model_flops_utilisation", 0.45),
    "lab-decoding": ("sentences_per_second", 2001),
    "real-lengths": ("sentences_per_second", 2001),
}


@dataclass
class Config:
    presets: str = flag("lab,big", "model sizes, with commas between", "What")
    tokens_per_batch: int = flag(
        0, "padded tokens a side in a step; 0: 65536 on 80 GB", "What", min=0
    )
    ckpt: str = flag("", "trained run to decode with at real lengths", "What")
    data: str = flag("", "as train.py's --data; MINIDATASET, else as there", "What")
    device: str = flag(
        "auto", "device (auto|cpu|cuda); CUDA_VISIBLE_DEVICES chooses among cards", "How"
    )
    minutes: float = flag(2.0, "of stage run; 0: without it", "How", min=0)
    seconds: float = flag(8.0, "measured in each turn", "How", above=0)
    out: str = flag(
        "runs/benchmarks/gpu.json",
        "file for the report; the stages' own lie in a folder beside it",
        "How",
    )


def main(config: Config) -> int:
    """Do every stage, write, sum up; → the exit code."""
    device, described, taken = in_new_process(
        look_at, config.device
    )  # in this process it would hold the card
    out = ROOT / config.out
    if config.device == "auto" and device.type == "cpu":
        raise UserError(
            f"{hidden_gpus() or 'PyTorch sees no GPU'}; for a rehearsal: --device cpu --presets tiny"
        )
    facts = {
        "settings": asdict(config),
        "device": described,
        "cuda": torch.version.cuda,
        "commit": machine()["commit"],
    }
    print(f"{facts['device']}\n{describe_machine()}")
    folder = out.with_name(f"{out.stem}-stages")
    earlier = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    same = "dirty" not in str(facts["commit"]) and all(
        earlier.get(name) == fact for name, fact in facts.items()
    )
    done = (
        {name: stage for name, stage in earlier["stages"].items() if not stage["failed"]}
        if same
        else {}
    )
    if not done:
        shutil.rmtree(folder, ignore_errors=True)
    for name, commands in stages(config, device, taken, folder).items():
        print(f"\n{name}" + ": done before" * (name in done), flush=True)
        if name not in done:
            done[name] = run(commands, LIMIT + 60 * config.minutes)
        files = {
            file.stem: json.loads(file.read_text(encoding="utf-8"))
            for file in folder.glob("*.json")
        }
        write_json(out, [], **facts, stages=done, files=files)
    scores = [
        line
        for line in done.get("run", {"lines": []})["lines"]
        if re.match("(sacreBLEU|decoding)  ", line)
    ]
    seconds = ", ".join(f"{name} {stage['seconds']:.0f}" for name, stage in done.items())
    print("\n".join(["", *summary(files), *scores, f"seconds: {seconds}"]))
    runs = folder.glob("cards-*") if "cards" in done and not done["cards"]["failed"] else []
    losses = [read_run(run).series("valid/loss")[1][-1] for run in runs]
    apart = max(losses) / min(losses) - 1 if losses else 0.0
    failed = [
        f"FAILED {name}: {''.join(stage['lines'][-1:])}"
        for name, stage in done.items()
        if stage["failed"]
    ]
    failed += [
        f"FAILED cards: the validation losses are {apart:.1e} apart, {ALLOWED:.0e} allowed"
    ] * (apart > ALLOWED)
    print("\n".join(["", *failed, f"{len(done)} stages, {len(failed)} failed; written to {out}"]))
    return int(bool(failed))


def summary(files: dict[str, dict]) -> list[str]:
    """A line for each table of speed: who is fastest; if that is less than expected, what its training steps wait for."""
    lines = []
    for name, file in files.items():
        every = [
            (run["contestant"], run["figures"])
            for run in file["runs"]
            if "tokens_per_second" in run["figures"]
        ]
        for contestant, got in sorted(every, key=lambda run: -run[1]["tokens_per_second"])[:1]:
            lines.append(f"{name}: {contestant} {got['tokens_per_second']:,.0f} tokens/s")
            figure, expected = EXPECTED.get(name, ("tokens_per_second", 0))
            if got.get(figure, 0) >= expected:
                continue
            lines[-1] += (
                f"; {figure} {shown(got.get(figure, 0))}, where an H100 should have {shown(expected)}"
            )
            if "cpu_ms" in got:
                step, cpu, wait = (
                    f"{ms:.1f}"
                    for ms in (1e3 * got["seconds_per_step"], got["cpu_ms"], got["wait_ms"])
                )
                lines[-1] += f"; a step of {step} ms has {cpu} of CPU, and waits {wait} for data"
    return lines


def look_at(name: str) -> tuple[torch.device, str, str]:
    """The device, in words, and the format that it trains in."""
    device = choose_device(name, 0)
    return device, choose_precision(device).describe(), choose_precision(device, training=True).name


def stages(config: Config, device: torch.device, taken: str, folder: Path) -> dict[str, list[str]]:
    """The commands of every stage, in order: first what is wrong, last what takes long. They write into the folder."""
    on_gpu = device.type == "cuda"
    training = ",".join(f"ours-{name}" for name in (FORMATS[taken] if on_gpu else "fp32").split())
    decoding = f"ours-plain-{taken}" if on_gpu else "ours-fp32"
    data, out = config.data or os.environ.get("MINIDATASET", ""), shlex.quote(str(folder))
    data, ckpt = (
        os.path.abspath(path) if os.path.exists(path) else path for path in (data, config.ckpt)
    )
    where = f"--device {device}" + f" --data {shlex.quote(data)}" * bool(data)
    turns = f"{where} --vocab 8000 --rounds 1 --seconds {config.seconds}"
    decode = f"benchmarks.decoding {turns} --contestants {decoding} --batch 512 --sentences 2001"
    train, tokens = f"train.py {where}", config.tokens_per_batch or tokens_for(device)
    train_all = f"benchmarks.training {turns} --tokens_per_batch {tokens} --contestants {training}"
    checks, speeds = {}, {}
    for preset in choose(config.presets, SIZES, "--presets"):
        checks[f"{preset} parity"] = [
            f"PRESET={preset} DEVICE={device} pytest -s tests/fast/test_device.py"
        ]
        of = f"--preset {preset} --out {out}/{preset}"
        speeds[f"{preset} training"] = [f"{train_all} {of}-training.json"]
        speeds[f"{preset} decoding"] = [f"{decode} {of}-decoding.json"]
    if ckpt:
        speeds["real lengths"] = [
            f"{decode} --ckpt {shlex.quote(ckpt)} --out {out}/real-lengths.json"
        ]
    if on_gpu:
        sizes = f"--lengths 64 1024 --numbers {2**20} --rounds 3 --device {device} --out {out}/operators.json"
        speeds["operators"] = [f"benchmarks.attention_op {sizes}"]
        steps = f"--device cuda --max_steps {STEPS} --eval_every {STEPS} --dropout 0"
        cards, launch = (
            torch.cuda.device_count(),
            "torch.distributed.run --standalone --nproc_per_node",
        )
        speeds["cards"] = [f"{train} {steps} --run {out}/cards-1"]
        if cards > 1:
            speeds["cards"] += [f"{launch} {cards} -- {train} {steps} --run {out}/cards-{cards}"]
    if config.minutes:
        speeds["run"] = [
            f"{train} --max_minutes {config.minutes} --run {out}/run",
            f"evaluate.py --ckpt {out}/run",
            f"evaluate.py --ckpt {out}/run --beam 5",
        ]
    return checks | speeds


def tokens_for(device: torch.device) -> int:
    """Tokens of a step for which there should be memory, of preset big too: 65536 in 80 GB, 32768 in 40, 8192 in 11."""
    memory = (
        torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else 80
    )
    return 2 ** min(16, int(math.log2(65536 * memory / 70)))


def run(commands: list[str], limit: float) -> dict:
    """Python with each command, [NAME=value …] script or module, flags; to the first that fails; → what came of it."""
    begun, lines, code = time.perf_counter(), [], 0
    for words in map(shlex.split, commands):
        variables = dict(word.split("=") for word in words if re.match("[A-Z]+=", word))
        words = words[len(variables) :]
        for path in (path for name, path in zip(words, words[1:]) if name in ("--run", "--out")):
            shutil.rmtree(
                path, ignore_errors=True
            )  # of an attempt that failed: its figures are not of this one
            Path(path).unlink(missing_ok=True)
        words = words if words[0].endswith(".py") else ["-m", *words]
        options = dict(
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
        )
        with subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=os.environ | variables, **options
        ) as process:
            # Who has a GPU for an hour wants all that does work. Killed, torchrun would leave its processes.
            timer = threading.Timer(
                limit, process.terminate if "torch.distributed.run" in words else process.kill
            )
            timer.start()
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip())
            timer.cancel()
        if code := process.returncode:
            break
    lost = [line for line in lines if ": left out" in line]
    lines += [] if code else lost  # the last line is what is told of a failure
    return {
        "failed": bool(code or lost),
        "seconds": time.perf_counter() - begun,
        "lines": lines[-200:],
    }


if __name__ == "__main__":
    run_script(lambda: sys.exit(main(parse_flags(Config, "check and measure on a GPU"))))
