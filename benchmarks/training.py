"""Training speed, side by side: this project, the handout's way and three toolkits.

    python -m benchmarks.training                     # all, two rounds
    python -m benchmarks.training --part ladder       # plain and fast, fp32 and bf16
    python -m benchmarks.training --part limits       # matrix products alone
    python -m benchmarks.training --device cuda --preset big --tokens_per_batch 65536

All train a model of the same sizes with Adam, dropout 0.1 and label smoothing 0.1, on the same
token sequences, in batches of about 4,096 target tokens. benchmarks/peers/NAME.py says where a
contestant differs. `peak_gib` is the most that a process held, `step_gib` what the steps added.

The limit is a step that computes its matrix products alone, forward and backward, at their own
sizes. All else comes on top: attention scores, norms, dropout, softmax, the update. Model FLOPs
utilisation compares with one large product of the same number format instead. Both are printed for
ours with the last speed that was measured.
"""

import timeit
from collections import Counter
from dataclasses import dataclass

import torch

from benchmarks.corpus import Corpus, load_corpus
from benchmarks.measuring import ROOT, Row, compare, in_new_process, measure, read_json, tokens_of
from benchmarks.peers.contest import KEEP_MEMORY, SIZES, TOOLKITS, Contestant, Task, choose, start
from engine.config import flag, parse_flags
from engine.devices import choose_device
from engine.errors import UserError, run_script
from model import ModelConfig, training_flops

OURS = (
    "plain-fp32",
    "plain-bf16",
    "plain-fp16",
    "fp32",
    "bf16",
    "fp16",
    "muon-fp32",
    "muon-bf16",
    "muon-fp16",
)
CONTESTANTS = {
    "handout": Contestant("handout"),
    **TOOLKITS,
    "marian": Contestant("marian"),
    "marian-tuned": Contestant("marian", {"variant": "tuned"}, environment=KEEP_MEMORY),
    **{f"ours-{variant}": Contestant("ours", {"variant": variant}) for variant in OURS},
}
PEERS = "handout,opennmt,fairseq,marian,marian-tuned,ours-fp32,ours-bf16"
ON_GPU = "handout,marian,marian-tuned,ours-plain-bf16,ours-bf16"
LADDER = "ours-plain-fp32,ours-fp32,ours-plain-bf16,ours-bf16"
# Of the limits: number format, how fp32 products are computed, which of ours computes in it.
FORMATS = {
    "fp32, MKL": (torch.float32, "highest", ""),
    "fp32, oneDNN": (torch.float32, "medium", "ours-fp32"),
    "bf16": (torch.bfloat16, "medium", "ours-bf16"),
}
LARGE = 2048  # rows, columns and depth of the large product


@dataclass
class Config:
    """Every setting of this benchmark."""

    part: str = flag("speed", "what to measure (speed|ladder|limits)", "What")
    contestants: str = flag("", "who takes part, separated by commas; default: all", "What")
    baseline: str = flag("", "contestant that the ratios refer to; default: the first", "What")
    preset: str = flag("lab", "model size (lab|big|tiny)", "What")
    tokens_per_batch: int = flag(4096, "padded tokens a side in a step", "What", min=64)
    vocab: int = flag(16000, "tokens in each vocabulary", "What", min=300, max=60000)
    data: str = flag("", "as in train.py; default: MINIDATASET, else as there", "What")
    device: str = flag("cpu", "cpu, cuda or cuda:N", "How")
    rounds: int = flag(2, "turns of each", "How", min=1)
    seconds: float = flag(20.0, "measured in each turn", "How", above=0)
    threads: int = flag(2, "compute threads of each", "How", min=1)
    out: str = flag("", "file for all turns; default: runs/benchmarks/PART.json", "How")


def main(config: Config) -> list[Row]:
    """Take turns and print the table."""
    # The device must exist. In this process the check would occupy memory of the GPU.
    in_new_process(choose_device, config.device, 0)
    if not config.out:
        config.out = f"runs/benchmarks/{config.part}.json"
    if config.device != "cpu" and config.part == "limits":
        raise UserError("--part limits needs --device cpu")
    names = contestants_of(config)
    corpus = load_corpus(config.data, config.vocab)
    sizes = ModelConfig(corpus.source_vocab, corpus.target_vocab, **SIZES[config.preset])
    if config.part == "limits":
        return measure_limits(config, corpus, sizes)
    task = Task(
        "train",
        str(corpus.folder),
        config.seconds,
        config.threads,
        config.device,
        SIZES[config.preset],
        config.tokens_per_batch,
    )

    def turn(name: str) -> dict | None:
        figures = start(name, CONTESTANTS[name], task, timeout=240 + 4 * config.seconds)
        if figures and "peak_tflops" in figures:
            target = figures["target_tokens_per_second"]
            flops = training_flops(sizes, figures["tokens_per_second"] - target, target)
            figures["model_flops_utilisation"] = flops / 1e12 / figures["peak_tflops"]
        return figures

    title = f"training on {corpus.describe()}; tokens_per_second counts both sides"
    baseline = config.baseline or names[0]
    return measure(title, names, config, turn, "target_tokens_per_second", baseline)


def contestants_of(config: Config) -> list[str]:
    """Who takes part. Raises `UserError` for unknown names, and for toolkits on a GPU."""
    if config.contestants:
        names = choose(config.contestants, CONTESTANTS)
    elif config.part == "ladder":
        names = choose(LADDER, CONTESTANTS)
    else:
        names = choose(PEERS if config.device == "cpu" else ON_GPU, CONTESTANTS)
    toolkits = [name for name in names if CONTESTANTS[name].toolkit]
    if config.device != "cpu" and toolkits:
        raise UserError(
            f"--device {config.device}: {', '.join(toolkits)} can be measured on a CPU only; "
            "leave them out"
        )
    return names


def measure_limits(config: Config, corpus: Corpus, sizes: ModelConfig) -> list[Row]:
    """Measure the products in each number format; print what share of the limit ours reaches."""
    torch.set_num_threads(config.threads)
    sources, targets = (tokens_of(sentences) for sentences in zip(*corpus.train))
    target = config.tokens_per_batch  # tokens of a step
    source = round(target * sources / targets)
    flops = training_flops(sizes, source, target)

    def turn(name: str) -> dict[str, float]:
        dtype, setting, _ = FORMATS[name]
        torch.set_float32_matmul_precision(setting)
        shapes = Counter(products(sizes, source, target))
        seconds = sum(count * seconds_of(*shape, dtype) for shape, count in shapes.items())
        peak = 3 * 2 * LARGE**3 / seconds_of(LARGE, LARGE, LARGE, dtype)
        return {
            "target_tokens_per_second": target / seconds,
            "gflops": flops / seconds / 1e9,
            "peak_gflops": peak / 1e9,
        }

    figure = "target_tokens_per_second"
    title = f"matrix products alone, {flops / target / 1e6:.1f} MFLOP per target token"
    rows = measure(title, FORMATS, config, turn, figure)
    speeds = compare(read_json((ROOT / config.out).with_name("speed.json")), figure)
    medians = {row.contestant: row.median for row in speeds}
    for row in rows:
        _, _, name = FORMATS[row.contestant]
        if name in medians:
            speed = medians[name]
            utilisation = speed * flops / target / 1e9 / row.more["peak_gflops"]
            print(
                f"{name}: {speed:,.0f} target tokens/s, "
                f"{speed / row.median:.0%} of the matrix products alone; "
                f"model FLOPs utilisation {utilisation:.0%}"
            )
    return rows


def products(sizes: ModelConfig, source: int, target: int) -> list[tuple[int, int, int]]:
    """(rows, in, out) of every linear layer in a forward pass over these numbers of tokens."""
    d, ff = sizes.d_model, sizes.dim_feedforward
    encoder = [(source, d, 3 * d), (source, d, d), (source, d, ff), (source, ff, d)]
    decoder = [(target, d, 3 * d), (target, d, d)]  # self-attention
    decoder += [(target, d, d), (source, d, 2 * d), (target, d, d)]  # attention over the source
    decoder += [(target, d, ff), (target, ff, d)]
    output = [(target, d, sizes.target_vocab)]
    return sizes.num_encoder_layers * encoder + sizes.num_decoder_layers * decoder + output


def seconds_of(rows: int, width: int, out: int, dtype: torch.dtype) -> float:
    """The forward product of one linear layer and the two backward, the fastest of five times."""
    x = torch.randn(rows, width).to(dtype)
    weight = torch.randn(out, width).to(dtype)
    gradient = torch.randn(rows, out).to(dtype)
    compute = lambda: (x @ weight.t(), gradient @ weight, gradient.t() @ x)  # noqa: E731
    return min(timeit.repeat(compute, number=1, repeat=5))


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "compare training speed")))
