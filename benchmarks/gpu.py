"""One command for a machine with a CUDA GPU: is the arithmetic right there, and how fast is it?

    bash run.sh gpu
    python -m benchmarks.gpu --device cpu --presets tiny --minutes 0    # a rehearsal

parity     tests/fast/test_device.py: every number format against float64 on the CPU
training   benchmarks.training, plain and fast, in the formats of the card
decoding   benchmarks.decoding: random weights and 40 tokens a sentence
formats    sixty steps of train.py in every number format in which the card can train
cards      the same steps of train.py on one card and, over NCCL, on all of them
run        train.py for --minutes, with the flags in --train, then evaluate.py

Every command is printed before it runs. One that fails is reported at the end, the others run all
the same. The folder `--out` gets the runs, and log.txt with all that was printed.
"""

import math
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.measuring import ROOT, describe_machine, in_new_process
from benchmarks.peers.contest import SIZES, choose
from engine.config import flag, parse_flags
from engine.devices import choose_device, hidden_gpus
from engine.errors import UserError, run_script
from engine.memory import GIB
from engine.precision import choose_precision
from text.reading import absolute_path
from tools.reporting.reading import read_run

# Contestants, by the number format in which a card trains.
TRAINING = {
    "bf16": "ours-plain-bf16,ours-bf16,ours-muon-bf16,ours-fp16",
    "fp16": "ours-fp16,ours-muon-fp16",
    "fp32": "ours-plain-fp32,ours-fp32,ours-muon-fp32",
}
# Of a card that trains in the key, the formats in which it can train.
FORMATS = {"bf16": ("bf16", "fp16", "fp32"), "fp16": ("fp16", "fp32"), "fp32": ("fp32",)}
LIMIT = 900  # seconds for a command, in addition to --minutes
ALLOWED = 1e-2  # relative difference between the validation losses on one card and on all


@dataclass
class Config:
    """Every setting of this benchmark."""

    presets: str = flag("lab,big", "model sizes: lab, big, tiny; separated by commas", "What")
    tokens_per_batch: int = flag(
        0, "padded tokens per side in a step; 0: 65536 on 80 GB", "What", min=0
    )
    data: str = flag("", "data as in train.py; default: $MINIDATASET, else as in train.py", "What")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "How")
    minutes: float = flag(
        2.0, "minutes of training in the last stage; 0: no training", "How", min=0
    )
    train: str = flag("", "flags of train.py in the last stage, in quotes", "How")
    seconds: float = flag(8.0, "seconds measured per turn", "How", above=0)
    out: str = flag("runs/benchmarks/gpu", "folder for runs and log.txt", "How")


def main(config: Config) -> int:
    """Run every command. Returns the exit code."""
    # In this process the check would occupy memory of the GPU.
    device, described, dtype = in_new_process(look_at, config.device)
    if config.device == "auto" and device.type == "cpu":
        reason = hidden_gpus() or "PyTorch sees no GPU"
        raise UserError(f"{reason}; for a rehearsal: --device cpu --presets tiny --minutes 0")
    folder = Path(config.out).absolute() / time.strftime("%Y-%m-%d_%H-%M-%S")
    folder.mkdir(parents=True)
    failures = []
    with open(folder / "log.txt", "w", encoding="utf-8") as log:
        for line in (described, describe_machine()):
            print(line, flush=True)
            log.write(f"{line}\n")
        for command in commands(config, device, dtype, folder):
            if not run(command, LIMIT + 60 * config.minutes, log):
                failures.append(f"FAILED: {command}")
        failures += compare_cards(folder)
        outcome = "\n".join(["", *failures, f"{len(failures)} failed; see {folder}"])
        print(outcome)
        log.write(f"{outcome}\n")
    return 1 if failures else 0


def look_at(name: str) -> tuple[torch.device, str, str]:
    """The device, its description, and the number format in which it trains."""
    device = choose_device(name, 0)
    return device, choose_precision(device).describe(), choose_precision(device, training=True).name


def commands(config: Config, device: torch.device, dtype: str, folder: Path) -> list[str]:
    """[NAME=VALUE …] and the words after `python`: first the checks, last what takes long."""
    on_gpu = device.type == "cuda"
    out = shlex.quote(str(folder))
    where = f"--device {device}"
    data = config.data or os.environ.get("MINIDATASET", "")
    if data:  # the commands run in another directory than ours
        where += f" --data {shlex.quote(absolute_path(data))}"
    tokens = config.tokens_per_batch or tokens_for(device)
    turns = f"{where} --vocab 8000 --rounds 1 --seconds {config.seconds}"
    train = f"-m benchmarks.training {turns} --tokens_per_batch {tokens}"
    train += f" --contestants {TRAINING[dtype] if on_gpu else 'ours-fp32'}"
    decode = f"-m benchmarks.decoding --device {device} --rounds 1 --limit 2001"
    decode += f" --contestants {f'ours-plain-{dtype}' if on_gpu else 'ours-fp32'}"

    presets = choose(config.presets, SIZES, "--presets")
    test = "-m pytest -q -s tests/fast/test_device.py"
    found = [f"PRESET={preset} DEVICE={device} {test}" for preset in presets]
    for preset in presets:
        found += [f"{train} --preset {preset}", f"{decode} --preset {preset}"]
    steps = f"train.py {where} --max_steps 60 --eval_every 60 --dropout 0 --run {out}"
    for name in FORMATS[dtype] if on_gpu else [dtype]:
        found.append(f"{steps}/steps-{name} --precision {name}")
    if on_gpu:
        cards = torch.cuda.device_count()
        steps = f"{steps}/cards"
        found.append(f"{steps}-1")
        if cards > 1:
            torchrun = f"-m torch.distributed.run --standalone --nproc_per_node {cards}"
            each_its_own = steps.replace(f"--device {device}", "--device cuda")
            found.append(f"{torchrun} -- {each_its_own}-all")
    if config.minutes:
        limit = f"--max_minutes {config.minutes}"
        found.append(f"train.py {where} {limit} --run {out}/run {config.train}".rstrip())
        found += [f"evaluate.py --ckpt {out}/run", f"evaluate.py --ckpt {out}/run --beam 5"]
    return found


def tokens_for(device: torch.device) -> int:
    """Tokens of a step that should fit, also for preset big: 65536 in 80 GB, 8192 in 11 GB."""
    if device.type != "cuda":
        return 512
    memory = torch.cuda.get_device_properties(device).total_memory / GIB
    return 2 ** min(16, int(math.log2(65536 * memory / 70)))


def run(command: str, limit: float, log) -> bool:
    """Run Python with a command of `commands`. Returns whether it succeeded."""
    words = shlex.split(command)
    variables = dict(word.split("=") for word in words if word[:1].isupper() and "=" in word)
    # `timeout` sends SIGTERM to a command that hangs, on which torchrun ends its processes.
    words = ["timeout", str(limit), sys.executable, *words[len(variables) :]]
    print(f"\npython {command}", flush=True)
    log.write(f"\npython {command}\n")
    left_out = False
    options = dict(
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
    )
    with subprocess.Popen(words, cwd=ROOT, env=os.environ | variables, **options) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
            left_out = left_out or ": left out" in line
    return process.returncode == 0 and not left_out


def compare_cards(folder: Path) -> list[str]:
    """A line if one card and all of them, over NCCL, did not come to the same validation loss."""
    runs = [folder / "cards-1", folder / "cards-all"]
    if not all(run.exists() for run in runs):
        return []
    losses = []
    for run in runs:
        _, measured = read_run(run).series("valid/loss")
        if not measured:
            return [f"FAILED: {run.name} has no validation loss: cards"]
        losses.append(measured[-1])
    difference = max(losses) / min(losses) - 1
    if difference <= ALLOWED:
        return []
    return [f"FAILED: validation losses differ by {difference:.1e}, allowed {ALLOWED:.0e}: cards"]


if __name__ == "__main__":
    run_script(lambda: sys.exit(main(parse_flags(Config, "check and measure on a GPU"))))
