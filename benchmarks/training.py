"""Training speed, side by side: this project, the handout's way and three toolkits; what fast/ brings, in time and memory.

    bash benchmarks/peers/install.sh                                   # once: the toolkits' environments
    python -m benchmarks.training                                        # everybody, two rounds
    python -m benchmarks.training --contestants ours-fp32,marian --seconds 60
    python -m benchmarks.training --contestants marian --rounds 1 --append   # one more turn, beside the earlier ones
    python -m benchmarks.training --part ladder                          # plain → fast, fp32 and bf16
    python -m benchmarks.training --part memory --tokens_per_batch 8192 --vocab 32000
    python -m benchmarks.training --part limits                          # matrix products alone, and the share ours reach
    python -m benchmarks.training --device cuda --preset big --tokens_per_batch 65536 --contestants ours-bf16,ours-plain-bf16

All train a model of the same sizes, with dropout and label smoothing 0.1 and Adam, on the same token sequences, in batches of
about 4,096 target tokens. benchmarks/peers/NAME.py says of each what is like for like and what is not.

ladder   every rung has all tricks of those above it; before its clock starts it takes five steps without dropout on the same
         batches, and the loss after them must be the same but for rounding: a trick that changes it is a mistake
memory   three steps on a batch of sentences of 32 tokens: the most memory held, less what model, optimizer and batch hold
limits   a step that did nothing but its matrix products, forward and backward, at their own sizes; all else comes on top
         (attention scores, norms, dropout, softmax, the update). Model FLOPs utilisation is the other measure: counted FLOPs
         of a step over what one large product of the same number format reaches. Both for ours of the last speed measured
"""

import time
from collections import Counter
from dataclasses import dataclass

import torch

from benchmarks.corpus import Corpus, load_corpus
from benchmarks.measuring import ROOT, Row, compare, in_new_process, measure, pinned, read_json, tokens_of
from benchmarks.peers.contest import KEEP_MEMORY, OLD_LOAD, SIZES, Contestant, Task, choose, start
from benchmarks.peers.ours import make_trainer
from data import Batch
from engine.config import flag, parse_flags
from engine.distributed import choose_device
from engine.errors import UserError, run_script
from engine.memory import held_gib, keep_freed_memory
from engine.precision import Precision
from model import ModelConfig, training_flops

OURS = "random-plain-fp32 plain-fp32 plain-bf16 plain-fp16 fp32 bf16 fp16 captured-bf16".split()
CONTESTANTS = {
    "handout": Contestant("handout"),
    "opennmt": Contestant("opennmt", toolkit="opennmt", environment=OLD_LOAD),
    "fairseq": Contestant("fairseq", toolkit="fairseq", environment=OLD_LOAD),
    "marian": Contestant("marian"),
    "marian-tuned": Contestant("marian", {"variant": "tuned"}, environment=KEEP_MEMORY),
    **{f"ours-{variant}": Contestant("ours", {"variant": variant}) for variant in OURS},
}
PEERS = "handout,opennmt,fairseq,marian,marian-tuned,ours-fp32,ours-bf16"
ON_GPU = "handout,marian,marian-tuned,ours-plain-bf16,ours-bf16"
LADDER = "ours-random-plain-fp32,ours-plain-fp32,ours-fp32,ours-plain-bf16,ours-bf16"
VARIANTS = {  # of the memory benchmark: (plain, freed memory kept, precision)
    "plain, memory given back": (True, False, "fp32"),
    "plain fp32": (True, True, "fp32"),
    "ours fp32": (False, True, "fp32"),
    "ours bf16": (False, True, "bf16"),
}
FORMATS = {  # of the limits: (number format, how fp32 products are computed, who of ours computes in it)
    "fp32, MKL": (torch.float32, "highest", ""),
    "fp32, oneDNN": (torch.float32, "medium", "ours-fp32"),
    "bf16": (torch.bfloat16, "medium", "ours-bf16"),
}
LARGE = 2048  # rows, columns and depth of the large product
LENGTH = 32  # tokens of every sentence of the memory benchmark, about the mean of real ones


@dataclass
class Config:
    """Every setting of this benchmark."""

    part: str = flag("speed", "what to measure (speed|ladder|memory|limits)", "What")
    contestants: str = flag("", "who takes part, with commas between; everybody", "What")
    baseline: str = flag("", "whose median the ratios are over; the first one", "What")
    preset: str = flag("lab", "model size (lab|big|tiny)", "What")
    tokens_per_batch: int = flag(4096, "padded tokens a side in a step", "What", least=64)
    vocab: int = flag(16000, "tokens in each vocabulary", "What", least=300, most=60000)
    data: str = flag("", "as train.py's --data; MINIDATASET, else as there", "What")
    device: str = flag("cpu", "cpu, cuda or cuda:N", "How")
    rounds: int = flag(2, "turns of each", "How", least=1)
    seconds: float = flag(20.0, "measured in each turn", "How", above=0)
    threads: int = flag(2, "compute threads of each", "How", least=1)
    out: str = flag("", "file for all turns; runs/benchmarks/PART.json", "How")
    append: bool = flag(False, "add to the turns that are in --out", "How")


def main(config: Config) -> list[Row]:
    """Take turns, print the table; → its rows."""
    choose_device(config.device, 0)  # which must be there
    config.out = config.out or f"runs/benchmarks/{config.part}.json"
    if config.device != "cpu" and config.part in ("memory", "limits"):
        raise UserError(f"--part {config.part} is measured on a CPU only")
    if config.part == "memory":
        return measure_memory(config)
    corpus = load_corpus(config.data, config.vocab)
    sizes = ModelConfig(corpus.source_vocab, corpus.target_vocab, **SIZES[config.preset])
    if config.part == "limits":
        return measure_limits(config, corpus, sizes)
    everybody = LADDER if config.part == "ladder" else PEERS if config.device == "cpu" else ON_GPU
    names = choose(config.contestants or everybody, CONTESTANTS)
    if config.device != "cpu" and (toolkits := [name for name in names if CONTESTANTS[name].toolkit]):
        raise UserError(f"--device {config.device}: {', '.join(toolkits)} are measured on a CPU only; leave them out")
    task = Task("train", str(corpus.folder), config.seconds, config.threads, config.device, SIZES[config.preset],
                config.tokens_per_batch, parity=config.part == "ladder")  # fmt: skip

    def turn(name: str) -> dict | None:
        figures = start(name, CONTESTANTS[name], task, timeout=240 + 4 * config.seconds)
        if figures and "peak_tflops" in figures:
            target = figures["target_tokens_per_second"]
            flops = training_flops(sizes, figures["tokens_per_second"] - target, target)
            figures["model_flops_utilisation"] = flops / 1e12 / figures["peak_tflops"]
        return figures

    more = "tokens_per_second seconds_per_step target_tokens_per_step peak_gib loss model_flops_utilisation".split()
    title = f"training on {corpus.describe()}; in tokens_per_second the source's tokens are counted too"
    baseline = config.baseline or names[0]
    return measure(title, names, config, turn, "target_tokens_per_second", baseline=baseline, more=more)


def measure_memory(config: Config) -> list[Row]:
    """Every variant once: memory does not scatter."""
    sizes = ModelConfig(config.vocab, config.vocab, **SIZES[config.preset])
    config.rounds = 1

    def turn(name: str) -> dict[str, float]:
        return in_new_process(peak_of_step, name, sizes, config.tokens_per_batch, **pinned(config.threads))

    title = f"GiB above model, optimizer and batch; {config.tokens_per_batch:,} tokens, vocabulary {config.vocab:,}"
    baseline = next(iter(VARIANTS))
    return measure(title, VARIANTS, config, turn, "step_gib", baseline=baseline, more=["process_gib"], decimals=2)


def peak_of_step(name: str, sizes: ModelConfig, tokens: int) -> dict[str, float]:
    """Three steps of one variant; → GiB. Runs in a process of its own."""
    plain, kept, precision = VARIANTS[name]
    torch.set_float32_matmul_precision("medium")
    if kept:
        keep_freed_memory()
    take_step = make_trainer(sizes, Precision(torch.device("cpu"), precision, ""), plain)
    ids = torch.randint(sizes.target_vocab, (max(1, tokens // LENGTH), LENGTH))
    pad = torch.zeros_like(ids, dtype=torch.bool)
    batch = Batch(ids, pad, ids, ids.flatten(), torch.arange(ids.numel()), ids.numel(), ids.numel())
    before = held_gib("VmRSS")
    for _ in range(3):
        take_step(batch)
    return {"step_gib": held_gib() - before, "process_gib": held_gib()}


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
        return {"target_tokens_per_second": rate, "gflops": flops / seconds / 1e9, "peak_gflops": peak / 1e9}

    title = f"matrix products alone, {flops / target / 1e6:.1f} MFLOP a target token"
    rows = measure(title, FORMATS, config, turn, "target_tokens_per_second", more=["gflops", "peak_gflops"])
    speeds = compare(read_json((ROOT / config.out).with_name("speed.json")), "target_tokens_per_second")
    medians = {row.contestant: row.median for row in speeds}
    for row in rows:
        if ours := medians.get(name := FORMATS[row.contestant][2]):
            utilisation = ours * flops / target / 1e9 / row.more["peak_gflops"]
            print(f"{name}: {ours:,.0f} target tokens/s, {ours / row.median:.0%} of the matrix products alone; "
                  f"model FLOPs utilisation {utilisation:.0%}")  # fmt: skip
    return rows


def products(sizes: ModelConfig, source: int, target: int) -> list[tuple[int, int, int]]:
    """(rows, in, out) of every linear map of a forward pass over so many tokens."""
    d, ff = sizes.d_model, sizes.dim_feedforward
    encoder = [(source, d, 3 * d), (source, d, d), (source, d, ff), (source, ff, d)]
    own = [(target, d, 3 * d), (target, d, d)]
    cross = [(target, d, d), (source, d, 2 * d), (target, d, d)]
    decoder = own + cross + [(target, d, ff), (target, ff, d)]
    layers = encoder * sizes.num_encoder_layers + decoder * sizes.num_decoder_layers
    return [*layers, (target, d, sizes.target_vocab)]


def seconds_of(rows: int, width: int, out: int, dtype: torch.dtype) -> float:
    """One linear map: the product forward and the two backward, the fastest of several times."""
    x, weight, gradient = (torch.randn(shape).to(dtype) for shape in ((rows, width), (out, width), (rows, out)))
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        _ = x @ weight.t(), gradient @ weight, gradient.t() @ x
        times.append(time.perf_counter() - begun)
    return min(times)


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "compare training speed")))
