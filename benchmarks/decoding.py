"""Speed of greedy decoding: this project, the handout's way, Hugging Face's Marian, CTranslate2.

    python -m benchmarks.decoding                     # random weights, 40 tokens a sentence
    python -m benchmarks.decoding --ckpt runs/NAME    # a trained model at the lengths it chooses
    python -m benchmarks.decoding --device cuda --batch 512

All decode the same test sentences with the same weights (the handout's way the first few of them),
so their outputs are compared too. benchmarks/peers/NAME.py says of each what is like for like and
what is not. `first_seconds` is the first pass, which is not counted (but of the handout's).
"""

import shutil
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import torch

from benchmarks.corpus import Corpus, as_ids, load_corpus
from benchmarks.measuring import Row, in_new_process, measure, tokens_of
from benchmarks.peers.contest import SIZES, Contestant, Task, choose, start
from engine.config import flag, parse_flags
from engine.distributed import choose_device
from engine.errors import UserError, run_script
from loading import Trained, load_trained
from model import ModelConfig, Translator

OURS = "plain-fp32 fp32 plain-bf16 bf16 plain-fp16 int8".split()
KINDS = ("float32", "float32x2", "bfloat16", "int8", "int8x2", "int8_float32x2")
# Not pinned: CTranslate2's workers (x2: two of one thread) and our threads begin after the pinning,
# all on the first core.
CONTESTANTS = {
    "handout": Contestant("handout", {"rows": 64}),
    "marian": Contestant("marian"),
    **{
        f"ctranslate2-{kind}-64": Contestant("ct2", {"variant": kind}, "ctranslate2", pin=False)
        for kind in KINDS
    },
    **{f"ours-{variant}": Contestant("ours", {"variant": variant}, pin=False) for variant in OURS},
}
EVERYBODY = (
    "handout,marian,ctranslate2-float32-64,ctranslate2-float32x2-64,ctranslate2-int8x2-64,"
    "ours-fp32,ours-int8"
)
ON_GPU = "marian,ours-plain-bf16"


@dataclass
class Config:
    """What is measured, and how long."""

    contestants: str = flag("", "who takes part, with commas between; everybody", "What")
    ckpt: str = flag("", "trained run to decode with, at real lengths", "What")
    preset: str = flag("lab", "model size without --ckpt (lab|big|tiny)", "What")
    length: int = flag(40, "tokens of each output without --ckpt", "What", min=1, max=500)
    sentences: int = flag(500, "of the test split, the first so many", "What", min=1)
    vocab: int = flag(16000, "tokens in each vocabulary without --ckpt", "What", min=300, max=60000)
    data: str = flag("", "as train.py's --data; MINIDATASET, else as there", "What")
    device: str = flag("cpu", "cpu, cuda or cuda:N", "How")
    batch: int = flag(0, "sentences decoded at once by ours; 0: as evaluate.py", "How", min=0)
    rounds: int = flag(2, "turns of each", "How", min=1)
    seconds: float = flag(5.0, "measured in each turn; one pass at least", "How", above=0)
    threads: int = flag(2, "compute threads of each", "How", min=1)
    out: str = flag("runs/benchmarks/decoding.json", "file for all turns", "How")


def main(config: Config) -> list[Row]:
    """Take turns, print the tables; → the rows of speed."""
    in_new_process(
        choose_device, config.device, 0
    )  # which must be there; in this process it would hold the card
    names = choose(
        config.contestants or (EVERYBODY if config.device == "cpu" else ON_GPU), CONTESTANTS
    )
    if config.ckpt:
        trained, length = load_trained(config.ckpt), 0
        corpus = load_corpus(test_rows=config.sentences, run=trained.config)
        sizes = {
            name: getattr(trained.model.config, name) for name in (*SIZES["lab"], "norm_first")
        }
        weights, title = f"run-{trained.run.name}", f"real lengths, {trained.name}"
    else:
        trained, length, sizes = None, config.length, SIZES[config.preset]
        corpus = load_corpus(config.data, config.vocab, test_rows=config.sentences)
        weights, title = f"random-{config.preset}", f"{length} tokens a sentence, random weights"
    folder = export(corpus, sizes, weights, trained)
    task = Task(
        "decode",
        str(corpus.folder),
        config.seconds,
        config.threads,
        config.device,
        sizes,
        length=length,
        weights=str(folder),
    )

    def turn(name: str) -> dict | None:
        batch = config.batch if name.startswith("ours") else task.batch
        return start(
            name, CONTESTANTS[name], replace(task, batch=batch, outputs=str(folder / f"{name}.txt"))
        )

    reference = next(
        (name for name in ("ours-fp32", *names) if name in names and name != "marian"), names[0]
    )
    title = f"greedy decoding, {title}; {corpus.describe()}"
    rows = measure(title, names, config, turn, "tokens_per_second", reference)
    texts = {
        row.contestant: (folder / f"{row.contestant}.txt").read_text(encoding="utf-8")
        for row in rows
    }
    outputs = {
        name: [ids.tolist() for ids in as_ids(text.splitlines())] for name, text in texts.items()
    }
    print(f"\noutputs that are {reference}'s: sentences, tokens before the first difference")
    for name in outputs if reference in outputs else ():
        sentences, tokens = agreement(outputs[name], outputs[reference])
        print(f"  {name:<28} {sentences:6.1%} {tokens:6.1%}")
    return rows


def export(corpus: Corpus, sizes: dict, name: str, trained: Trained | None) -> Path:
    """The weights that all contestants load, of a trained run or random ones; → their folder."""
    folder = corpus.folder / "peers" / name
    vocabularies = (corpus.source_vocab, corpus.target_vocab)
    if trained:
        if (trained.model.config.source_vocab, trained.model.config.target_vocab) != vocabularies:
            raise UserError(f"{trained.run}: its data gives other vocabularies by now; put it back")
        shutil.rmtree(folder, ignore_errors=True)  # the run may have gone on since
    if not (folder / "weights.pt").exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(1)
        model = trained.model if trained else Translator(ModelConfig(*vocabularies, **sizes))
        torch.save(model.state_dict(), folder / "weights.pt")
    return folder


def agreement(outputs: list[list[int]], reference: list[list[int]]) -> tuple[float, float]:
    """Shares of equal sentences, and of equal tokens up to each sentence's first difference."""
    pairs = list(zip(outputs, reference))
    same = sum(left == right for left, right in pairs)
    prefix = sum(
        1 for pair in pairs for _ in takewhile(lambda tokens: tokens[0] == tokens[1], zip(*pair))
    )
    return same / len(pairs), (prefix + same) / tokens_of(row for _, row in pairs)


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, "compare decoding speed")))
