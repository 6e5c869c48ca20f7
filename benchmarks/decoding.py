"""Speed of greedy decoding, side by side: this project, the handout's and the tutorial's way, four toolkits and CTranslate2.

    python -m benchmarks.peers.install                          # once: the toolkits' environments
    python -m benchmarks.decoding                               # random weights, exactly 40 tokens a sentence
    python -m benchmarks.decoding --ckpt runs/NAME              # a trained model at the lengths it chooses
    python -m benchmarks.decoding --contestants ours-fp32,ctranslate2-int8 --rounds 3

All decode the same 500 test sentences with the lab's model (the slow ones the first few of them), each in a process of its own
with the same threads on the same cores, in turns. The project, the handout, the tutorial, Marian and CTranslate2 have the very
same weights, so their outputs are compared too; the other toolkits have random ones of the same sizes and take part only at the
fixed length. benchmarks/peers/NAME.py says of each what is like for like and what is not.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.corpus import Corpus, corpus_of_run, load_corpus
from benchmarks.measuring import compare, print_table
from benchmarks.peers.contestants import ROOT, Contestant, choose, start, take_turns
from engine.config import flag, parse_flags
from engine.errors import UserError, run_script


def ctranslate2_contestants() -> dict[str, Contestant]:
    """Every compute type, at 64 and 128 sentences at once; x2: two workers of one thread.

    Not pinned: its workers are threads begun after the pinning, and would all compute on the first core.
    """
    kinds = ("float32", "int8_float32", "int8", "int8_bfloat16", "bfloat16", "float32x2", "int8x2", "int8_float32x2")
    return {
        f"ctranslate2-{kind}-{batch}": Contestant(
            "ct2", kind, "ctranslate2", arguments=("--batch", str(batch)), pin=False
        )
        for kind in kinds
        for batch in (64, 128)
    }


CONTESTANTS = {
    "handout": Contestant("handout", arguments=("--rows", "64")),
    "tutorial": Contestant("tutorial", arguments=("--rows", "50")),
    "joeynmt": Contestant("joeynmt", toolkit="joeynmt"),
    "opennmt": Contestant("opennmt", toolkit="opennmt"),
    "fairseq": Contestant("fairseq", toolkit="fairseq"),
    "marian": Contestant("marian"),
    **ctranslate2_contestants(),
    # 0: as many sentences at once as evaluate.py takes. Two batches are decoded in two threads, which are not pinned.
    **{
        f"ours-{kind}": Contestant("ours", kind, arguments=("--batch", "0"), pin=False)
        for kind in ("fp32", "bf16", "int8")
    },
}
OWN_WEIGHTS = ("joeynmt", "opennmt", "fairseq")  # cannot be given ours
REFERENCE = "ours-fp32"  # whose outputs the others' are compared with


@dataclass
class Config:
    """Every setting of this benchmark."""

    contestants: str = flag("", "who takes part, with commas between; everybody", "Benchmark")
    ckpt: str = flag("", "trained run to decode with, at real lengths", "Benchmark")
    baseline: str = flag(REFERENCE, "whose median the ratios are over", "Benchmark")
    length: int = flag(40, "tokens of each output without --ckpt", "Benchmark")
    sentences: int = flag(500, "of the test split, the first so many", "Benchmark")
    rounds: int = flag(2, "turns of each", "Benchmark")
    seconds: float = flag(5.0, "measured in each turn; one pass at least", "Benchmark")
    threads: int = flag(2, "compute threads of each", "Benchmark")
    data: str = flag("", "as train.py's --data; MINIDATASET, else as there", "Benchmark")
    out: str = flag("runs/benchmarks/decoding.json", "file for all turns", "Benchmark")
    append: bool = flag(False, "add to the turns that are in --out", "Benchmark")


def export_random(corpus: Corpus) -> Path:
    """Random weights of the lab's sizes, the same for all who can take them; → their folder."""
    from benchmarks.peers.ours import build

    folder = corpus.folder / "peers" / "random"
    if not (folder / "weights.pt").exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(1)
        torch.save(build(corpus).state_dict(), folder / "weights.pt")
    return folder


def export_run(corpus: Corpus, trained) -> Path:
    """A trained run's weights, which must have the lab's sizes; → their folder."""
    from benchmarks.peers.contest import LAB

    sizes = vars(trained.model.config)
    other = {name: sizes[name] for name, value in LAB.items() if sizes[name] != value}
    if other or sizes["norm_first"] or (sizes["source_vocab"], sizes["target_vocab"]) != vocabularies(corpus):
        raise UserError(
            f"{trained.run}: the contestants are of the lab's sizes; train it with --preset lab and no others"
        )
    folder = corpus.folder / "peers" / f"run-{trained.run.name}"
    shutil.rmtree(folder, ignore_errors=True)  # the run may have gone on since
    folder.mkdir(parents=True)
    torch.save(trained.model.state_dict(), folder / "weights.pt")
    return folder


def vocabularies(corpus: Corpus) -> tuple[int, int]:
    """Tokens on the source and on the target side."""
    return corpus.source_vocab, corpus.target_vocab


def agreement(outputs: list[list[int]], reference: list[list[int]]) -> tuple[float, float]:
    """Shares of equal sentences, and of equal tokens up to the first difference of each sentence."""
    pairs = list(zip(outputs, reference))
    same = sum(left == right for left, right in pairs) / len(pairs)
    prefix = sum(next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right))) + (left == right)
                 for left, right in pairs)  # fmt: skip
    return same, prefix / sum(len(right) + 1 for _, right in pairs)


def read_outputs(path: Path) -> list[list[int]]:
    """What a contestant wrote with --outputs."""
    return [list(map(int, line.split())) for line in path.read_text(encoding="utf-8").splitlines()]


def print_agreement(names: list[str], folder: Path) -> None:
    """How far everybody's outputs are those of the reference."""
    if not (folder / f"{REFERENCE}.txt").exists():
        return
    reference = read_outputs(folder / f"{REFERENCE}.txt")
    print(f"\noutputs that are {REFERENCE}'s: sentences, tokens before the first difference")
    for name in names:
        if name not in OWN_WEIGHTS and (folder / f"{name}.txt").exists():
            sentences, tokens = agreement(read_outputs(folder / f"{name}.txt"), reference)
            print(f"  {name:<28} {sentences:6.1%} {tokens:6.1%}")


def main(config: Config) -> None:
    """Take turns, print the tables."""
    names = choose(config.contestants, CONTESTANTS)
    if config.ckpt:
        from trained import load_trained

        trained = load_trained(config.ckpt)
        corpus, length = corpus_of_run(trained.config, test_rows=config.sentences), 0
        weights, title = export_run(corpus, trained), f"greedy decoding at real lengths, {trained.name}"
        names = [name for name in names if name not in OWN_WEIGHTS]
    else:
        corpus, length = load_corpus(config.data, test_rows=config.sentences), config.length
        weights, title = export_random(corpus), f"greedy decoding, {length} tokens a sentence, random weights"
    print(corpus.describe())
    outputs = weights / "outputs"
    outputs.mkdir(exist_ok=True)

    def turn(name: str) -> dict | None:
        arguments = ("--corpus", corpus.folder, "--seconds", config.seconds, "--length", length, "--weights", weights,
                     "--outputs", outputs / f"{name}.txt")  # fmt: skip
        return start(name, CONTESTANTS[name], config.threads, "decode", *arguments)

    out = ROOT / Path(config.out)
    runs = take_turns(
        title, names, config.rounds, turn, out, config.append, corpus=corpus.describe(), threads=config.threads
    )
    print(f"\n{title}")
    more = ["sentences_per_second", "seconds", "tokens", "sentences", "peak_gib"]
    print_table(compare(runs, "tokens_per_second", config.baseline, more), "tokens/s")
    print_agreement(list(dict.fromkeys(run.contestant for run in runs)), outputs)


if __name__ == "__main__":
    settings = parse_flags(Config, "compare decoding speed")
    run_script(lambda: main(settings))
