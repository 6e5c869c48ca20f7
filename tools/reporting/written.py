"""The parts of the report that the handout wants in words: process, positional encoding, sources.

The program fills in what it knows. `Page.to_write` marks what the student must add.
"""

import inspect

import model
from tools.reporting.page import Page
from tools.reporting.reading import Fact, RunFiles
from tools.reporting.sections import resumed_by, table

MUON = "Jordan et al. 2024, Muon"
PAPERS = {  # paper → what it is used for, and where
    "Vaswani et al. 2017, Attention Is All You Need, arXiv:1706.03762": ("model", "model.py"),
    "PyTorch, torch.nn.Transformer": ("encoder and decoder layers", "model.py"),
    "Press and Wolf 2017, Using the Output Embedding, arXiv:1608.05859": (
        "output projection tied to the target embedding",
        "model.py",
    ),
    "Szegedy et al. 2016, Rethinking the Inception Architecture, arXiv:1512.00567": (
        "label smoothing",
        "model.py",
    ),
    "Loshchilov and Hutter 2019, AdamW, arXiv:1711.05101": ("optimizer", "engine/optimizer.py"),
    MUON: ("optimizer", "engine/optimizer.py"),
    "Hu et al. 2024, MiniCPM, arXiv:2404.06395": ("learning-rate schedule", "engine/schedule.py"),
    "Sennrich et al. 2016, subword units (BPE), arXiv:1508.07909": (
        "tokenizers",
        "text/subwords.py",
    ),
    "Papineni et al. 2002, BLEU; Bird et al., NLTK": ("score", "text/bleu.py"),
    "Post 2018, sacreBLEU, arXiv:1804.08771": ("score", "text/bleu.py"),
}


def process(page: Page, runs: list[RunFiles]) -> None:
    """What was done, from data to score, as far as the files tell."""
    page.heading("Process in brief")
    rows = {
        "data set": "config.json#data",
        "pairs kept": ("data.json#counts.kept", ","),
        "optimizer": "config.json#optimizer",
        "peak learning rate": ("config.json#lr", "g"),
        "tokens per step": ("config.json#tokens_per_batch", ","),
        "command": "environment.json#0.command",
        "resumed by": resumed_by,
        "scored split": lambda run: of_first_result(run, "split"),
        "decoding": lambda run: of_first_result(run, "decoding"),
        "scored checkpoint": lambda run: of_first_result(run, "checkpoint"),
    }
    table(page, runs, rows)
    page.to_write(
        "Describe in your own words what you did, which problems you met and how you solved them."
    )


def of_first_result(run: RunFiles, key: str) -> Fact | None:
    """A value of the graded result."""
    name = next(iter(run.results), "")
    return run.look_up(f"{name}.json#{key}") if name else None


def positional_encoding(page: Page, runs: list[RunFiles]) -> None:
    """The code of `model.sinusoids`, and why it is so."""
    if not any(run.is_translation for run in runs):
        return
    page.heading("Positional encoding")
    page.prose(
        "Self-attention treats all tokens alike: if the input is shuffled, the output is shuffled "
        "in the same way. So each position p gets a vector that is added to its embedding:"
    )
    page.verbatim(Fact(None, inspect.getsource(model.sinusoids).rstrip(), "model.py"))
    page.bullets(
        "Each pair of columns is a clock hand: the angle is p times a frequency. Frequencies fall "
        "in a geometric series, so fast pairs tell neighbours apart, slow ones distant positions.",
        "A shift by k positions rotates each pair by a fixed angle, whatever p is. A linear layer "
        'can therefore express "the token k places back".',
        "The inner product of two encodings depends on their distance alone.",
        "Embeddings are multiplied by the square root of the model width before the addition, so "
        "that both have the same scale. The encoding has no parameters and is not trained.",
    )
    page.to_write(
        "Explain the code line by line in your own words; docs/positional_encoding.md has the "
        "proofs and a picture."
    )


def sources(page: Page, runs: list[RunFiles]) -> None:
    """Papers and code that the run used, with a column for the student's words."""
    page.heading("Sources and own understanding")
    config = next((run.config for run in runs if run.is_translation), {})
    unused_purposes = set()
    if not config.get("label_smoothing"):
        unused_purposes.add("label smoothing")
    if config.get("tokenizer"):  # a pretrained one
        unused_purposes.add("tokenizers")
    lines = [["this repository", "all code", "README.md", "to be written"]]
    for paper, (purpose, file) in PAPERS.items():
        if paper == MUON and config.get("optimizer") != "muon":
            continue
        if config and purpose not in unused_purposes:
            lines.append([paper, purpose, file, "to be written"])
    page.table(["paper or code", "used for", "file", "your understanding"], lines)
    page.to_write(
        "Add everything else that you read or were given: web pages, other people's code, "
        "assistants. Code without a source in the report counts as copied."
    )
