"""A golden record: what small runs computed at a known commit. A rewrite must still compute it.

python -m tests.golden             # run everything again, print the largest differences
python -m tests.golden plain fast  # only these
python -m tests.golden --write     # replace tests/golden.json

Each case is a command line on sample/, in fp32, with one thread. On the processor that wrote the
record all numbers are expected to be equal bit for bit, or within TOLERANCE if sums are in another
order; on another processor, within ELSEWHERE. Only steps before the learning rate decays are
compared. The idea is torchtitan's.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_suffix(".json")
# Relative, on the processor that wrote the record. Two processes and one differ by 2e-5 in the loss
# of step 42, by 5e-4 in its gradient norm.
TOLERANCE = {
    "loss": 1e-4,
    "validation_loss": 1e-4,
    "gradient_norm": 5e-3,
    "learning_rate": 1e-9,
    "validation_bleu": 0.2,
}
# On another one. AVX2 and AVX-512 differ by 2e-4 in the loss of step 42, by 8e-3 in its gradient
# norm and by 1e-2 in the validation loss after 300 steps.
ELSEWHERE = {
    "loss": 1e-3,
    "validation_loss": 5e-2,
    "gradient_norm": 5e-2,
    "learning_rate": 1e-9,
    "validation_bleu": 0.2,
}
STEPS = 60
LEVEL_STEPS = 42  # the learning rate decays in the last 30 % of a run
RESUMED_AT = 30
LEARNING_STEPS = 300  # of the run that translates; level as well, for it is planned for 430

SMALL = (
    "--d_model 64 --nhead 4 --num_encoder_layers 2 --num_decoder_layers 2 --dim_feedforward 128"
    " --source_vocab 512 --target_vocab 512 --tokens_per_batch 1000 --warmup 5 --lr 0.004"
    " --dropout 0 --log_every 1 --precision fp32 --device cpu"
)
SAMPLE = shlex.quote(str(ROOT / "sample"))  # the path may have a space
SHORT = f"{SMALL} --max_steps {STEPS} --eval_every {RESUMED_AT} --data {SAMPLE}"
LONG = f"{SMALL} --max_steps 430 --eval_every {LEARNING_STEPS} --data {SAMPLE}"
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node 2 --"

# Name → arguments of Python, and environment. CXX=none turns the compiled code in fast/ off.
RUNS = {
    "plain": (f"train.py {SHORT} --optimizer adamw", {"CXX": "none"}),
    "fast": (f"train.py {SHORT} --optimizer muon", {}),
    "accumulate": (f"train.py {SHORT} --optimizer adamw --accumulate 2", {}),
    "ddp": (f"{TORCHRUN} train.py {SHORT} --optimizer muon", {}),
    "fsdp2": (f"{TORCHRUN} train.py {SHORT} --optimizer adamw --shard", {}),
    "learned": (f"train.py {LONG} --optimizer muon", {}),
}
SEARCHES = {
    "greedy fp32": "--precision fp32",
    "beam fp32": "--precision fp32 --beam 4",
    "greedy int8": "--precision int8",
}
TAGS = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "gradient_norm": "train/gradient_norm",
}


# ---------------------------------------------------------------- measuring


def measure(folder: Path, names: list[str] = ()) -> dict:
    """Run all cases, or those of these names, in `folder`; returns what they computed."""
    runs = {name: case for name, case in RUNS.items() if not names or name in names}
    results = {"runs": {}, "hypotheses": {}}
    for name, (arguments, environment) in runs.items():
        run_python(f"{arguments} --run {name}", folder, **environment)
        validated = LEARNING_STEPS if name == "learned" else RESUMED_AT
        results["runs"][name] = read_run(folder / "runs" / name, LEVEL_STEPS, validated)
    if "fast" in runs:
        resumed = copy_as_interrupted(folder / "runs" / "fast", folder / "runs" / "resumed")
        run_python(f"train.py --resume {resumed}", folder)
        results["runs"]["resumed"] = read_run(resumed, LEVEL_STEPS, RESUMED_AT)
    if "learned" in runs:
        for name, flags in SEARCHES.items():
            results["hypotheses"][name] = translate(folder, flags)
    return results


def run_python(arguments: str, folder: Path, **environment) -> None:
    """One command line in `folder`, with one thread for each process. Raises `RuntimeError`."""
    print(f"python {arguments}", file=sys.stderr, flush=True)
    words = [str(ROOT / word) if word.endswith(".py") else word for word in shlex.split(arguments)]
    fixed = dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
    environment = {**os.environ, **fixed, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"python {arguments} failed:\n{done.stdout}\n{done.stderr}")


def read_run(run: Path, steps: int, validated: int = 0) -> dict:
    """The first `steps` values of each curve, and the validation after step `validated`."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    by_step = {}
    for line in map(json.loads, lines):
        by_step.setdefault(line["step"], {}).update(line)
    curves = {
        name: [by_step[step][tag] for step in range(1, steps + 1)] for name, tag in TAGS.items()
    }
    if validated:
        curves["validation_loss"] = by_step[validated]["valid/loss"]
        curves["validation_bleu"] = by_step[validated]["valid/bleu"]
    return curves


def copy_as_interrupted(run: Path, copy: Path) -> Path:
    """A copy of a finished run in which the checkpoint of step 30 is the last one."""
    shutil.copytree(run, copy, symlinks=True)
    shutil.rmtree(copy / "checkpoints" / f"step-{STEPS}")
    for name in ("last", "best"):
        (copy / "checkpoints" / name).unlink()
        (copy / "checkpoints" / name).symlink_to(f"step-{RESUMED_AT}")
    return copy


def translate(folder: Path, flags: str) -> list[str] | None:
    """The translations of the first 8 test sentences; None where the processor has no int8."""
    checkpoint = f"runs/learned/checkpoints/step-{LEARNING_STEPS}"
    command = f"evaluate.py --ckpt {checkpoint} --split test --limit 8 --device cpu --out out.txt"
    try:
        run_python(f"{command} {flags}", folder)
    except RuntimeError as error:
        if "--precision int8:" in str(error):
            return None
        raise
    return (folder / "out.txt").read_text(encoding="utf-8").splitlines()


# ---------------------------------------------------------------- comparing


def processor() -> str:
    """What rounding depends on: the processor, and PyTorch's version."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        found = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
        model = ", ".join(sorted(found)) or model
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def largest_difference(wanted, found, smallest: float) -> float:
    """The largest difference of two numbers or lists, relative to the larger, or to `smallest`."""
    if not isinstance(wanted, list):
        wanted, found = [wanted], [found]
    pairs = zip(wanted, found, strict=True)
    return max(abs(w - f) / max(abs(w), abs(f), smallest) for w, f in pairs)


def compare(record: dict, results: dict) -> list[str]:
    """Print a line for each case; returns the lines of those that differ by more than allowed."""
    same_processor = record["processor"] == processor()
    allowed = TOLERANCE if same_processor else ELSEWHERE
    if not same_processor:
        print(f"note: the record is of another processor or PyTorch: {record['processor']}")
    failures = []
    for name, curves in results["runs"].items():
        differences = {}
        for curve, values in curves.items():
            smallest = 1.0 if curve == "validation_bleu" else 1e-9
            differences[curve] = largest_difference(record["runs"][name][curve], values, smallest)
        line = ", ".join(f"{curve} {value:.1e}" for curve, value in differences.items())
        line = f"{name:<12} {line}"
        if any(value > allowed[curve] for curve, value in differences.items()):
            failures.append(line)
            line += "  DIFFERS"
        print(line)
    for name, texts in results["hypotheses"].items():
        wanted = record["hypotheses"][name]
        if texts is None or wanted is None:
            print(f"{name:<12} not compared: no int8 on this processor or on the recorded one")
            continue
        changed = [(w, f) for w, f in zip(wanted, texts, strict=True) if w != f]
        print(f"{name:<12} {len(changed)} of {len(wanted)} hypotheses differ")
        for was, now in changed:
            print(f"    was  {was}\n    now  {now}")
        if changed and same_processor:
            failures.append(f"{name}: {len(changed)} hypotheses differ")
    return failures


def as_text(record: dict) -> str:
    """JSON with a curve on each line, so that a difference can be read."""
    lines = []
    for name, value in record.items():
        if isinstance(value, str):
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
            continue
        entries = []
        for case, curves in value.items():
            text = json.dumps(curves, ensure_ascii=False)
            if isinstance(curves, dict):
                inner = [f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in curves.items()]
                text = "{\n" + ",\n".join(inner) + "}"
            entries.append(f"  {json.dumps(case)}: {text}")
        lines.append(f"{json.dumps(name)}: {{\n" + ",\n".join(entries) + "}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="compare small runs with tests/golden.json")
    parser.add_argument("names", nargs="*", help=f"only these of {', '.join(RUNS)}")
    parser.add_argument("--write", action="store_true", help="replace the record")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - RUNS.keys():
        parser.error(f"unknown case {', '.join(sorted(unknown))}")
    if arguments.write and arguments.names:
        parser.error("--write runs all cases; leave the names out")
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), arguments.names)
    if arguments.write:
        git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        origin = dict(command="python -m tests.golden --write", commit=commit)
        RECORD.write_text(as_text(origin | {"processor": processor()} | results), encoding="utf-8")
        print(f"written: {RECORD}")
        return
    failures = compare(json.loads(RECORD.read_text(encoding="utf-8")), results)
    if failures:
        sys.exit(f"{len(failures)} of the cases differ from the record")


if __name__ == "__main__":
    main()
