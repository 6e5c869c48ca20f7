"""Training speed, side by side: this project, the handout's and the tutorial's way, and four toolkits.

    python -m benchmarks.peers.install                                   # once: the toolkits' environments
    python -m benchmarks.training                                        # everybody, two rounds
    python -m benchmarks.training --contestants ours-fp32,marian --seconds 60
    python -m benchmarks.training --contestants marian --rounds 1 --append   # one more turn, beside the earlier ones

All train the lab's model (width 256, 8 heads, 3 + 3 layers, feed-forward 1024, dropout and label smoothing 0.1, Adam) on the
same token sequences, about 4,096 target tokens a batch, in a process of their own with the same threads on the same cores,
one after another in turns. Counted are real tokens: end token yes, padding no. benchmarks/peers/NAME.py says of each what is
like for like and what is not.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.corpus import load_corpus
from benchmarks.measuring import compare, print_table
from benchmarks.peers.contestants import KEEP_MEMORY, ROOT, Contestant, choose, start, take_turns
from engine.config import flag, parse_flags
from engine.errors import run_script

CONTESTANTS = {
    "handout": Contestant("handout"),
    "tutorial": Contestant("tutorial"),
    "joeynmt": Contestant("joeynmt", toolkit="joeynmt"),
    "opennmt": Contestant("opennmt", toolkit="opennmt"),
    "fairseq": Contestant("fairseq", toolkit="fairseq"),
    "marian": Contestant("marian"),
    "marian-tuned": Contestant("marian", "tuned", environment=KEEP_MEMORY),
    "ours-fp32": Contestant("ours", "fp32"),
    "ours-bf16": Contestant("ours", "bf16"),
}


@dataclass
class Config:
    """Every setting of this benchmark."""

    contestants: str = flag("", "who takes part, with commas between; everybody", "Benchmark")
    baseline: str = flag("handout", "whose median the ratios are over", "Benchmark")
    rounds: int = flag(2, "turns of each", "Benchmark")
    seconds: float = flag(20.0, "measured in each turn", "Benchmark")
    threads: int = flag(2, "compute threads of each", "Benchmark")
    data: str = flag("", "as train.py's --data; MINIDATASET, else as there", "Benchmark")
    out: str = flag("runs/benchmarks/training.json", "file for all turns", "Benchmark")
    append: bool = flag(False, "add to the turns that are in --out", "Benchmark")


def main(config: Config) -> None:
    """Take turns, print the table."""
    names = choose(config.contestants, CONTESTANTS)
    corpus = load_corpus(config.data)
    print(corpus.describe())
    arguments = ("train", "--corpus", corpus.folder, "--seconds", config.seconds)
    runs = take_turns(
        "training, real tokens a second", names, config.rounds,
        lambda name: start(name, CONTESTANTS[name], config.threads, *arguments, timeout=120 + 4 * config.seconds),
        ROOT / Path(config.out), config.append, corpus=corpus.describe(), threads=config.threads,
    )  # fmt: skip
    more = ["tokens_per_second", "seconds_per_step", "target_tokens_per_step", "peak_gib"]
    print("\nreal target tokens a second; in tokens_per_second the source's are counted too")
    print_table(compare(runs, "target_tokens_per_second", config.baseline, more), "tokens/s")


if __name__ == "__main__":
    settings = parse_flags(Config, "compare training speed")
    run_script(lambda: main(settings))
