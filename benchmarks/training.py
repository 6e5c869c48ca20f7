"""Training speed: this project, the handout's way and Hugging Face's MarianMTModel.

    python -m benchmarks.training                     # those of the page, three rounds
    python -m benchmarks.training --part limits       # the machine's limit, and how near we are
    python -m benchmarks.training --device cuda --preset big --tokens_per_batch 65536

All train a model of the same sizes with Adam (ours: AdamW with weight decay 0.01), the preset's
dropout (0.1; big: 0.3) and label smoothing 0.1, on the same token sequences, in batches of about
4,096 target tokens. benchmarks/peers/NAME.py says where a contestant differs. `peak_gib` is the
most memory that a process held.

The limit is a step that computes its matrix products alone, forward and backward, for real tokens.
All else comes on top: padding, attention scores, norms, dropout, softmax, the update.
"""

import timeit
from collections import Counter
from dataclasses import dataclass

import torch

from benchmarks.corpus import describe, load_corpus, prepare_corpus
from benchmarks.measuring import (
    Figures,
    Row,
    add_rows,
    check_table,
    hardware,
    in_new_process,
    measure,
)
from benchmarks.peers.contest import KEEP_MEMORY, SIZES, Contestant, choose, ours, start
from benchmarks.peers.turn import Task
from data import Prepared
from engine.config import flag, parse_flags
from engine.devices import choose_device
from engine.environment import commit
from engine.errors import UserError, run_script
from engine.memory import keep_freed_memory
from engine.precision import choose_precision
from model import ModelConfig, training_flops

OURS = ["fp32", "bf16", "fp16"]
CONTESTANTS = {
    "handout": Contestant("handout", "", "the handout's code", "讲义的写法"),
    "marian": Contestant(
        "marian",
        "",
        "`MarianMTModel`, plain loop, length buckets",
        "`MarianMTModel`，普通循环，按长度分桶",
    ),
    "marian-tuned": Contestant(
        "marian",
        "tuned",
        "`MarianMTModel`, with oneDNN and reused memory",
        "`MarianMTModel`，用 oneDNN 并复用内存",
        KEEP_MEMORY,
    ),
    **ours([*OURS, *(f"plain-{name}" for name in OURS), *(f"muon-{name}" for name in OURS)]),
}
ON_CPU = "marian,handout,marian-tuned,ours-fp32,ours-bf16"
ON_GPU = "marian,handout,marian-tuned,ours-plain-bf16,ours-bf16"
# Of the limits: number format, and which of ours trains in it.
FORMATS = {"fp32": (torch.float32, "ours-fp32"), "bf16": (torch.bfloat16, "ours-bf16")}
FIGURE = "target_tokens_per_second"
COLUMNS = {
    "speed": "who tokens ratio memory hardware commit".split(),
    "limits": "format limit share hardware commit".split(),
}


@dataclass
class Config:
    """Every setting of this benchmark."""

    part: str = flag("speed", "what to measure (speed|limits)", "What")
    contestants: str = flag(
        "", "who takes part, separated by commas; default: those of the page", "What"
    )
    baseline: str = flag("", "contestant that the ratios refer to; default: the first", "What")
    preset: str = flag("lab", "model size (lab|big|tiny)", "What")
    tokens_per_batch: int = flag(4096, "padded tokens per side in a step", "What", min=64)
    vocab: int = flag(16000, "tokens in each vocabulary", "What", min=300, max=60000)
    data: str = flag("", "data as in train.py; default: $MINIDATASET, else as in train.py", "What")
    device: str = flag("cpu", "cpu, cuda or cuda:N", "How")
    rounds: int = flag(3, "turns per contestant", "How", min=1)
    seconds: float = flag(20.0, "seconds measured per turn", "How", above=0)
    threads: int = flag(2, "compute threads per contestant", "How", min=1)
    json: str = flag("", "table in the form of docs/results/ that gets the rows", "How")


def main(config: Config) -> list[Row]:
    """Take turns and print the table."""
    # The device must exist. In this process the check would occupy memory of the GPU.
    in_new_process(choose_device, config.device, 0)
    if config.device != "cpu" and config.part == "limits":
        raise UserError("--part limits needs --device cpu")
    default = ON_CPU if config.device == "cpu" else ON_GPU
    names = choose(config.contestants or default, CONTESTANTS)
    if config.baseline:
        choose(config.baseline, names, "--baseline")
    check_table(config.json, COLUMNS[config.part])
    corpus = load_corpus(prepare_corpus(config.data, config.vocab))
    if config.part == "limits":
        return measure_limits(config, corpus)
    return measure_speed(config, corpus, names)


def measure_speed(config: Config, corpus: Prepared, names: list[str]) -> list[Row]:
    """All contestants in turns; the rows of the page."""
    sizes = sizes_of(config, corpus)

    def turn(name: str) -> Figures | None:
        """One turn of a contestant; None if it could not run."""
        figures = train_once(config, corpus, name)
        if figures and "peak_tflops" in figures:
            target = figures[FIGURE]
            flops = training_flops(sizes, figures["tokens_per_second"] - target, target)
            figures["model_flops_utilisation"] = flops / 1e12 / figures["peak_tflops"]
        return figures

    title = f"training on {describe(corpus)}"
    rows = measure(title, names, turn, FIGURE, config.rounds, config.baseline or names[0])
    cells = []
    for row in rows:
        contestant = CONTESTANTS[row.contestant]
        cells.append(
            {
                "who": {"en": contestant.english, "zh": contestant.chinese},
                "tokens": round(row.figures[FIGURE]),
                "ratio": f"{row.ratio:.2f}" if row.ratio else "–",
                "memory": f"{row.figures['peak_gib']:.1f}",
                "hardware": hardware(config.threads, config.device),
                "commit": commit(),
            }
        )
    add_rows(config.json, cells)
    return rows


def sizes_of(config: Config, corpus: Prepared) -> ModelConfig:
    """The sizes of the model that all train."""
    vocabularies = (len(corpus.source_tokenizer), len(corpus.target_tokenizer))
    return ModelConfig(*vocabularies, **SIZES[config.preset])


def train_once(config: Config, corpus: Prepared, name: str) -> Figures | None:
    """A turn of one contestant."""
    task = Task(
        "train",
        threads=config.threads,
        device=config.device,
        folder=str(corpus.folder),
        sizes=SIZES[config.preset],
        seconds=config.seconds,
        tokens_per_batch=config.tokens_per_batch,
    )
    return start(name, CONTESTANTS[name], task)


# ---------------------------------------------------------------- the limit of the machine


def measure_limits(config: Config, corpus: Prepared) -> list[Row]:
    """In each number format the products alone and the training of ours, in turns."""
    torch.set_num_threads(config.threads)
    keep_freed_memory()  # as training does; otherwise the products wait for cleared pages
    target = config.tokens_per_batch  # tokens of a step
    lengths = {side: (of_side + 1).sum() for side, of_side in corpus.train.lengths.items()}
    source = round(target * lengths["source"] / lengths["target"])
    sizes = sizes_of(config, corpus)
    shapes = Counter(products(sizes, source, target))

    def turn(name: str) -> Figures | None:
        """One turn of a contestant; None if it could not run."""
        if name not in FORMATS:
            return train_once(config, corpus, name)
        dtype, _ = FORMATS[name]
        choose_precision(torch.device("cpu"), name, training=True)  # products as in training
        seconds = sum(count * seconds_of(*shape, dtype) for shape, count in shapes.items())
        return {FIGURE: target / seconds}

    flops = training_flops(sizes, source, target)
    title = f"matrix products alone, {flops / target / 1e6:.1f} MFLOP per target token"
    names = [name for limit, (_, trained) in FORMATS.items() for name in (limit, trained)]
    rows = measure(title, names, turn, FIGURE, config.rounds)
    speeds = {row.contestant: row.figures[FIGURE] for row in rows}
    cells = []
    for name, (_, trained) in FORMATS.items():
        if trained not in speeds:  # it failed, and a line says why
            continue
        share = f"{speeds[trained] / speeds[name]:.0%}"
        print(f"{trained} reaches {share} of the matrix products alone")
        cells.append(
            {
                "format": name,
                "limit": round(speeds[name]),
                "share": share.replace("%", " %"),
                "hardware": hardware(config.threads),
                "commit": commit(),
            }
        )
    add_rows(config.json, cells)
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
