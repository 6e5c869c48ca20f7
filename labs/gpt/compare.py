"""The table of the handout: every technique on this machine, the same data for each, with speed, memory and loss.

    python -m labs.gpt.compare                                   # what this machine has; three minutes on two CPU cores
    python -m labs.gpt.compare --size 124m --processes 1         # on a GPU
    python -m labs.gpt.compare --size 1.6b --processes 4 --data_size 64

Each row is a run of its own, in processes of its own; a row that is done is not done again, so after an interruption the same
command goes on. The table lies in runs/compare-SIZE-CARD/: table.md, table.json, table.png.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.config import flag, parse_flags
from engine.errors import run_script
from engine.telemetry import Log
from labs.gpt.measure import cores


@dataclass
class Config:
    """Every setting of the table."""

    size: str = flag("mini", "preset of labs.gpt (toy|mini|124m|355m|774m|1.5b|1.6b)", "Table")
    data: str = flag("random", "text file or folder, or random", "Table")
    data_size: int = flag(256, "sequences, with random data", "Table", min=1)
    batch_size: int = flag(
        0, "sequences a step, of all processes together; 0: as in the preset", "Table", min=0
    )
    steps: int = flag(12, "steps of each row", "Table", min=5)
    processes: int = flag(
        0, "at most; 0: 4 on a CPU, else the GPUs of this machine", "Table", min=0, max=64
    )
    precision: str = flag("fp32", "of the rows that do not say (fp32|bf16|fp16)", "Table")
    minutes: float = flag(10.0, "longest time of a row", "Table", above=0)
    folder: str = flag("", "where the table lies; runs/compare-SIZE-CARD", "Table")


@dataclass
class Row:
    """One line of the table: what to run, and why it comes out as it does."""

    name: str
    processes: int
    flags: str
    why_zh: str  # why it comes out so, in one sentence
    why: str


def ladder(most: int, gpu: bool) -> list[Row]:
    """One process, then two, then four; each row changes one thing."""
    rows = [
        Row("one process", 1, "", "基线：其他各行都与它比。", "The baseline of all rows."),
        Row(
            "Hugging Face",
            1,
            "--model hf",
            "GELU 由多个逐元素算子拼成，激活更多。",
            "Its GELU is made of many small operations, which also keep more activations.",
        ),
        Row(
            "bf16",
            1,
            "--precision bf16",
            "矩阵乘法用 16 位：有硬件指令才快；权重与优化器仍是 fp32。",
            "Products in 16 bits: fast where the hardware has them; weights and optimiser stay fp32.",
        ),
        *(
            [
                Row(
                    "fp16 + loss scaling",
                    1,
                    "--precision fp16",
                    "同 bf16，但范围小，所以要缩放损失。",
                    "As bf16, but of small range, so the loss is scaled.",
                )
            ]
            if gpu
            else []
        ),
        Row(
            "accumulate 4",
            1,
            "--accumulate 4",
            "激活只剩四分之一；小矩阵乘法的效率略低。",
            "A quarter of the activations; smaller products use the hardware less well.",
        ),
        Row(
            "recompute all",
            1,
            "--recompute all",
            "每层只留输入，反向时再算一遍前向：多约三分之一计算。",
            "A block keeps its input only and runs forward again: about a third more work.",
        ),
        Row(
            "recompute selective",
            1,
            "--recompute selective",
            "留下矩阵乘法的结果，只重算便宜的部分。",
            "Keeps what products gave and computes only the cheap parts again.",
        ),
        Row(
            "chunked loss",
            1,
            "--chunked_loss",
            "从不持有全部 logits，词表越大越省。",
            "Never holds all logits: the larger the vocabulary, the more it saves.",
        ),
        Row(
            "torch.compile",
            1,
            "--compile",
            "逐元素算子合并成一个核；头几步在编译。",
            "Merges element-wise operations into one kernel; the first steps compile.",
        ),
        Row(
            "offload optimizer",
            1,
            "--offload optimizer",
            "优化器状态在主机内存；CPU 上没有可搬的，只是对照。",
            "The optimiser's state in host memory; on a CPU there is nothing to move, for comparison only.",
        ),
        Row(
            "offload parameters",
            1,
            "--data_parallel zero3 --offload parameters",
            "权重、梯度与状态都在主机内存，一次取来一层；CPU 上只是对照。",
            "Weights, gradients and state in host memory, one block fetched at a time; on a CPU for comparison only.",
        ),
        Row(
            "DDP 2",
            2,
            "",
            "每个进程一半数据；反向时边算边平均梯度。",
            "Half of the data each; gradients are averaged while the backward pass runs.",
        ),
        Row(
            "ZeRO-1 2",
            2,
            "--data_parallel zero1",
            "优化器状态各存一半，更新后广播权重。",
            "Half of the optimiser's state each; new weights are broadcast after the step.",
        ),
        Row(
            "FSDP2 2, ZeRO-2",
            2,
            "--data_parallel zero2",
            "梯度与状态切分；前向收集的权重留到反向。",
            "Gradients and state are cut; weights gathered in the forward pass stay for the backward.",
        ),
        Row(
            "FSDP2 2, ZeRO-3",
            2,
            "--data_parallel zero3",
            "权重也切分，用前收集、用后即丢：最省内存，通信多一半。",
            "Weights are cut as well, gathered twice a step: least memory, half more communication.",
        ),
        Row(
            "tensor 2",
            2,
            "--tensor 2",
            "每层前向、反向各四次集合通信，都要等：需要 NVLink 那样快的线。",
            "Four collectives a block and direction, all waited for: it wants links as fast as NVLink.",
        ),
        Row(
            "pipe 2, GPipe",
            2,
            "--pipe 2 --accumulate 4 --schedule gpipe",
            "气泡 1/(4+1)；四个微批的激活都留着。",
            "Bubble 1/(4+1); keeps the activations of all four micro-batches.",
        ),
        Row(
            "pipe 2, 1F1B",
            2,
            "--pipe 2 --accumulate 4 --schedule 1f1b",
            "气泡相同，但最多留两个微批的激活。",
            "The same bubble, but at most two micro-batches are kept.",
        ),
        Row(
            "pipe 2, ZB-V",
            2,
            "--pipe 2 --accumulate 4 --schedule zbv",
            "反向拆成两半，权重梯度填进气泡；调度开销更大。",
            "The backward pass in two, weight gradients fill the bubble; more messages and bookkeeping.",
        ),
        Row(
            "DDP 4",
            4,
            "",
            "CPU 上进程比核多时，只是在抢核。",
            "On a CPU, more processes than cores only share the cores.",
        ),
        Row(
            "FSDP2 × tensor 2×2",
            4,
            "--data_parallel zero3 --tensor 2",
            "权重切成四份；两种通信都有。",
            "Weights in four parts; both kinds of communication.",
        ),
        Row(
            "data × pipe 2×2",
            4,
            "--pipe 2 --accumulate 2 --schedule 1f1b",
            "两条流水线，每步末平均梯度。",
            "Two pipelines, their gradients averaged at the end of a step.",
        ),
        Row(
            "pipe 4, 1F1B",
            4,
            "--pipe 4 --accumulate 4 --schedule 1f1b",
            "气泡 3/(4+3)：微批要远多于段数才划算。",
            "Bubble 3/(4+3): it pays with many more micro-batches than stages.",
        ),
    ]
    return [row for row in rows if row.processes <= most]


def run_row(row: Row, number: int, config: Config, folder: Path) -> dict:
    """The row's result.json, or {"failed": the last words of the run that had none}; and the words that ran it."""
    run = folder.resolve() / f"row-{number}"
    done = run / "outcome.json"
    torchrun = (
        f"-m torch.distributed.run --standalone --nproc_per_node {row.processes} -m --".split()
    )
    words = [
        sys.executable,
        *(torchrun if row.processes > 1 else ["-m"]),
        "labs.gpt",
        "--trace",
        "--run",
        str(run),
    ]
    settings = {
        "size": config.size,
        "data": config.data,
        "data_size": config.data_size,
        "precision": config.precision,
        "max_steps": config.steps,
        "eval_every": config.steps,
        "batch_size": config.batch_size,
        "keep": 0,
    }
    for name, value in settings.items():
        words += [f"--{name}", str(value)]
    words += row.flags.split()  # which come later, and so count
    outcome = json.loads(done.read_text(encoding="utf-8")) if done.exists() else {}
    if outcome.get("words") == words and "failed" not in outcome:
        return outcome
    shutil.rmtree(run, ignore_errors=True)  # of an interrupted row, or one of other settings
    # The same cores for all rows: processes share them.
    environment = {"OMP_NUM_THREADS": str(max(1, cores() // row.processes))} | os.environ
    result, pipes = run / "result.json", dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with subprocess.Popen(words, env=environment, text=True, **pipes) as process:
        try:
            said = process.communicate(timeout=config.minutes * 60)[1]
            if process.returncode < 0:
                said += f"\nerror: ended by signal {-process.returncode}"  # 9: mostly because the memory was full
        except subprocess.TimeoutExpired:
            process.terminate()  # on which torchrun ends its processes; a kill would leave them to the rows that follow
            process.communicate()
            result.unlink(missing_ok=True)
            said = f"error: not done after {config.minutes:g} minutes"
    outcome = (
        json.loads(result.read_text(encoding="utf-8"))
        if result.exists()
        else {"failed": last_words(said)}
    )
    outcome["words"] = words
    run.mkdir(exist_ok=True)
    done.write_text(json.dumps(outcome), encoding="utf-8")
    return outcome


def last_words(said: str) -> str:
    """Of what a run wrote to stderr, the line that tells why it ended: our own, else torchrun's, else the last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    ours = [
        found[1] for line in lines if (found := re.match(r"error(?: \(rank \d+\))?: (.*)", line))
    ]
    # That another process has ended is what the rest of the ranks say; who knows why says it otherwise.
    first = [line for line in ours if "another process of this run" not in line]
    signals = [
        found[0]
        for line in lines
        if (found := re.search(r"Signal \d+ \(\w+\) received by PID \d+", line))
    ]
    errors = [line for line in lines if re.search(r"\w+Error\b", line)]
    return (first or signals or errors or ours or lines or ["ended without a word"])[0][:150]


HEAD = [
    "技术 technique",
    "进程 processes",
    "tokens/s",
    "每步 step",
    "TFLOP/s",
    "MFU",
    "每进程内存 memory a rank",
    "通信 communication",
    "损失 loss",
    "为什么 why",
]


def table(rows: list[Row], outcomes: list[dict]) -> str:
    """Markdown; `outcomes` in the order of the rows, each {"failed": why} or its figures."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for row, got in zip(rows, outcomes):
        name = f"{row.name}" + (f"<br>`{row.flags}`" if row.flags else "")
        if "failed" in got:
            cells = [name, row.processes, *[""] * 7, got["failed"].replace("|", "/")]
        else:
            share = (
                "–" if got["communication_share"] is None else f"{got['communication_share']:.0%}"
            )
            cells = [
                name,
                row.processes,
                f"{got['tokens_per_second']:,.0f}",
                f"{got['step_seconds'] * 1000:,.0f} ms",
                f"{got['tflops']:.3g}",
                f"{got['mfu']:.1%}",
                f"{max(got['peak_gib']):.2f} GiB",
                share,
                f"{got['loss']:.4f}",
                f"{row.why_zh} {row.why}",
            ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[Row], outcomes: list[dict], path: Path) -> None:
    """Speed and memory, a bar for each row that ran."""
    from matplotlib.figure import Figure

    shown = [
        (f"{row.name} ({row.processes})", got)
        for row, got in zip(rows, outcomes)
        if "failed" not in got
    ][::-1]
    if not shown:
        return
    figure = Figure(figsize=(11, 0.35 * len(shown) + 1.2), layout="constrained")
    speed, memory = figure.subplots(1, 2, sharey=True)
    names = [name for name, _ in shown]
    speed.barh(names, [got["tokens_per_second"] for _, got in shown])
    speed.set_xlabel("tokens/s")
    memory.barh(names, [max(got["peak_gib"]) for _, got in shown], color="tab:orange")
    memory.set_xlabel("peak memory of the fullest rank, GiB")
    figure.savefig(path, dpi=100)


def main(config: Config) -> None:
    """Run the rows that are not there yet, each in processes of its own; write the table after each, and a picture."""
    import torch

    gpus = torch.cuda.device_count()
    most = config.processes or gpus or 4
    card = (
        torch.cuda.get_device_name().replace(" ", "-") if gpus else "cpu"
    )  # one home may serve unlike machines
    folder = Path(config.folder or f"runs/compare-{config.size}-{card}")
    folder.mkdir(parents=True, exist_ok=True)
    log = Log()
    rows, outcomes = ladder(most, gpus > 0), []
    for number, row in enumerate(rows):
        got = run_row(row, number, config, folder)
        outcomes.append(got)
        said = (
            got.get("failed")
            or f"{got['tokens_per_second']:,.0f} tokens/s, {max(got['peak_gib']):.2f} GiB"
        )
        log(f"{row.name:24} {row.processes}  {said}")
        # After each row, so that an interrupted table is there as far as it came.
        (folder / "table.md").write_text(table(rows, outcomes), encoding="utf-8")
        named = [
            {"technique": row.name, "flags": row.flags, **got} for row, got in zip(rows, outcomes)
        ]
        (folder / "table.json").write_text(
            json.dumps(named, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    draw(rows, outcomes, folder / "table.png")
    log(f"table: {folder / 'table.md'}")


if __name__ == "__main__":
    config = parse_flags(Config, "compare all techniques; a finished row is not done again")
    run_script(lambda: main(config))
