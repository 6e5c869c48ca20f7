"""Training speed, side by side: this project, the handout's way and three toolkits; what fast/ brings, in time and memory.

    python -m benchmarks.training                                        # everybody, two rounds
    python -m benchmarks.training --part ladder                          # plain → fast, fp32 and bf16
    python -m benchmarks.training --part limits                          # matrix products alone, and the share ours reach
    python -m benchmarks.training --device cuda --preset big --tokens_per_batch 65536 --contestants ours-bf16,ours-plain-bf16

All train a model of the same sizes, with dropout and label smoothing 0.1 and Adam, on the same token sequences, in batches of
about 4,096 target tokens. benchmarks/peers/NAME.py says of each what is like for like and what is not. `peak_gib` is the most a
process held, `step_gib` what the steps took of it; on a GPU ours also tell what a step asks of it, as docs/cuda.md explains.

The limits are those of a step that did nothing but its matrix products, forward and backward, at their own sizes; all else comes
on top (attention scores, norms, dropout, softmax, the update). Model FLOPs utilisation is the other measure: counted FLOPs of a
step over what one large product of the same number format reaches. Both are told for ours of the last speed measured.
"""

import timeit
from collections import Counter
from dataclasses import dataclass

import torch

from benchmarks.corpus import Corpus, load_corpus
from benchmarks.measuring import ROOT, Row, compare, in_new_process, measure, read_json, tokens_of
from benchmarks.peers.contest import KEEP_MEMORY, SIZES, TOOLKITS, Contestant, Task, choose, start
from engine.config import flag, parse_flags
from engine.distributed import choose_device
from engine.errors import UserError, run_script
from model import ModelConfig, training_flops

OURS = (
    "random-plain-fp32 plain-fp32 plain-bf16 plain-fp16 fp32 bf16 fp16 muon-fp32 muon-bf16 muon-fp16"
).split()
CONTESTANTS = {
    "handout": Contestant("handout"),
    **TOOLKITS,
    "marian": Contestant("marian"),
    "marian-tuned": Contestant("marian", {"variant": "tuned"}, environment=KEEP_MEMORY),
    **{f"ours-{variant}": Contestant("ours", {"variant": variant}) for variant in OURS},
}
PEERS = "handout,opennmt,fairseq,marian,marian-tuned,ours-fp32,ours-bf16"
ON_GPU = "handout,marian,marian-tuned,ours-plain-bf16,ours-bf16"
LADDER = "ours-random-plain-fp32,ours-plain-fp32,ours-fp32,ours-plain-bf16,ours-bf16"
FORMATS = {  # of the limits: (number format, how fp32 products are computed, who of ours computes in it)
    "fp32, MKL": (torch.float32, "highest", ""),
    "fp32, oneDNN": (torch.float32, "medium", "ours-fp32"),
    "bf16": (torch.bfloat16, "medium", "ours-bf16"),
}
LARGE = 2048  # rows, columns and depth of the large product


@dataclass
class Config:
    part: str = flag("speed", "what to measure (speed|ladder|limits)", "What")
    contestants: str = flag("", "who takes part, with commas between; everybody", "What")
    baseline: str = flag("", "whose median the ratios are over; the first one", "What")
    preset: str = flag("lab", "model size (lab|big|tiny)", "What")
    tokens_per_batch: int = flag(4096, "padded tokens a side in a step", "What", min=64)
    vocab: int = flag(16000, "tokens in each vocabulary", "What", min=300, max=60000)
    data: str = flag("", "as train.py's --data; MINIDATASET, else as there", "What")
    device: str = flag("cpu", "cpu, cuda or cuda:N", "How")
    rounds: int = flag(2, "turns of each", "How", min=1)
    seconds: float = flag(20.0, "measured in each turn", "How", above=0)
    threads: int = flag(2, "compute threads of each", "How", min=1)
    out: str = flag("", "file for all turns; runs/benchmarks/PART.json", "How")


def main(config: Config) -> list[Row]:
    """Take turns, print the table; → its rows."""
    in_new_process(
        choose_device, config.device, 0
    )  # which must be there; in this process it would hold the card
    config.out = config.out or f"runs/benchmarks/{config.part}.json"
    if config.device != "cpu" and config.part == "limits":
        raise UserError("--part limits is measured on a CPU only")
    corpus = load_corpus(config.data, config.vocab)
    sizes = ModelConfig(corpus.source_vocab, corpus.target_vocab, **SIZES[config.preset])
    if config.part == "limits":
        return measure_limits(config, corpus, sizes)
    everybody = LADDER if config.part == "ladder" else PEERS if config.device == "cpu" else ON_GPU
    names = choose(config.contestants or everybody, CONTESTANTS)
    if config.device != "cpu" and (
        toolkits := [name for name in names if CONTESTANTS[name].toolkit]
    ):
        raise UserError(
            f"--device {config.device}: {', '.join(toolkits)} are measured on a CPU only; leave them out"
        )
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

    title = (
        f"training on {corpus.describe()}; in tokens_per_second the source's tokens are counted too"
    )
    return measure(
        title, names, config, turn, "target_tokens_per_second", config.baseline or names[0]
    )


def measure_limits(config: Config, corpus: Corpus, sizes: ModelConfig) -> list[Row]:
    """Both limits, and how near "ours" comes."""
    torch.set_num_threads(config.threads)
    sources, targets = (tokens_of(rows) for rows in zip(*corpus.train))
    target = config.tokens_per_batch
    source = round(target * sources / targets)
    flops = training_flops(sizes, source, target)

    def turn(name: str) -> dict[str, float]:
        dtype, setting, _ = FORMATS[name]
        torch.set_float32_matmul_precision(setting)
        shapes = Counter(products(sizes, source, target))
        seconds = sum(count * seconds_of(*shape, dtype) for shape, count in shapes.items())
        peak = 3 * 2 * LARGE**3 / seconds_of(LARGE, LARGE, LARGE, dtype)
        rate = target / seconds
        return {
            "target_tokens_per_second": rate,
            "gflops": flops / seconds / 1e9,
            "peak_gflops": peak / 1e9,
        }

    title = f"matrix products alone, {flops / target / 1e6:.1f} MFLOP a target token"
    rows = measure(title, FORMATS, config, turn, "target_tokens_per_second")
    speeds = compare(
        read_json((ROOT / config.out).with_name("speed.json")), "target_tokens_per_second"
    )
    medians = {row.contestant: row.median for row in speeds}
    for row in rows:
        if ours := medians.get(name := FORMATS[row.contestant][2]):
            utilisation = ours * flops / target / 1e9 / row.more["peak_gflops"]
            print(
                f"{name}: {ours:,.0f} target tokens/s, {ours / row.median:.0%} of the matrix products alone; "
                f"model FLOPs utilisation {utilisation:.0%}"
            )
    return rows


def products(sizes: ModelConfig, source: int, target: int) -> list[tuple[int, int, int]]:
    """(rows, in, out) of every linear map of a forward pass over so many tokens."""
    d, ff = sizes.d_model, sizes.dim_feedforward
    encoder = [(source, d, 3 * d), (source, d, d), (source, d, ff), (source, ff, d)]
    own, cross = (
        [(target, d, 3 * d), (target, d, d)],
        [(target, d, d), (source, d, 2 * d), (target, d, d)],
    )
    decoder = own + cross + [(target, d, ff), (target, ff, d)]
    return (
        encoder * sizes.num_encoder_layers
        + decoder * sizes.num_decoder_layers
        + [(target, d, sizes.target_vocab)]
    )


def seconds_of(rows: int, width: int, out: int, dtype: torch.dtype) -> float:
    """One linear map: the product forward and the two backward, the fastest of several times."""
    x, weight, gradient = (
        torch.randn(shape).to(dtype) for shape in ((rows, width), (out, width), (rows, out))
    )
    return min(
        timeit.repeat(
            lambda: (x @ weight.t(), gradient @ weight, gradient.t() @ x), number=1, repeat=5
        )
    )


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "compare training speed")))
