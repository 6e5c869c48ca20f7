"""The README.md of an exported model: data, training, BLEU, limits, and Python code to use it."""

from pathlib import Path

from loading import Trained
from tools.reporting.reading import RunFiles, read_run
from validation import cell

LOADERS = Path(__file__).with_name("loaders")
PACKAGES = {
    "ctranslate2": "ctranslate2 transformers",
    "hf": "torch safetensors transformers",
}
SETTINGS = (
    "preset",
    "epochs",
    "max_steps",
    "max_minutes",
    "tokens_per_batch",
    "optimizer",
    "lr",
    "warmup",
    "dropout",
    "dropout_after",
    "label_smoothing",
    "clip",
    "precision",
    "seed",
)
HEAD = """| data | sentences | search | nltk (95 %) | sacreBLEU | chrF2 | signature |
|---|---|---|---|---|---|---|"""
CARD = """---
language: [{source}, {target}]
pipeline_tag: translation
---
# {name}

Translates single sentences from {source} to {target}.
Transformer, {encoder} encoder and {decoder} decoder layers, width {width}, {parameters:,}
parameters; from {checkpoint}.

## Use

`pip install {packages}`; in this folder, lines on standard input:

```python
{loader}```

From another language than Python: `source/` and `target/` are the tokenizers, and the end token
follows the source{end}.

## Data

{data}

## Training

{training}

## BLEU

{bleu}

## Limits

- One sentence at a time, of at most {longest:,} tokens, without the sentences around it.
- It was trained on the data above only: other kinds of text come out worse, names and numbers may
  be wrong, and what is wrong or unfair in the data may be repeated.
- BLEU compares words with one reference. It does not tell whether a sentence is true or polite; a
  person should read what matters.
"""


def write_card(trained: Trained, kind: str, folder: Path) -> None:
    """Write README.md from the files of the run."""
    config, sizes, run = trained.config, trained.model.config, read_run(trained.run)
    loader = (LOADERS / f"{kind}.py").read_text(encoding="utf-8")
    longest_output = min(256, sizes.max_length)
    loader = loader.replace("max_input_length=512", f"max_input_length={sizes.max_length}")
    loader = loader.replace("max_decoding_length=256", f"max_decoding_length={longest_output}")
    card = CARD.format(
        source=config["source"],
        target=config["target"],
        name=run.name,
        packages=PACKAGES[kind],
        encoder=sizes.num_encoder_layers,
        decoder=sizes.num_decoder_layers,
        width=sizes.d_model,
        parameters=sum(weight.numel() for weight in trained.model.parameters()),
        checkpoint=trained.checkpoint.name,
        loader=loader,
        longest=sizes.max_length - 1,
        end=", which CTranslate2 adds itself" if kind == "ctranslate2" else "",
        data=data_of(run),
        training=training_of(run),
        bleu=bleu_of(run, trained.checkpoint.name),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def data_of(run: RunFiles) -> str:
    """The data set, and the numbers of its pairs and tokens."""
    config, data = run.config, run.data
    name = f"`{Path(config['data']).name}`, columns {config['source']} and {config['target']}"
    if not data:
        return f"{name}; the run kept no counts."
    tokens = ", ".join(f"{count:,} {side} tokens" for side, count in data["tokens"].items())
    sizes = ", ".join(f"{count:,} {side}" for side, count in data["vocabulary"].items())
    pairs = f"{data['counts']['kept']:,} training pairs"
    return f"{name}: {pairs}, {tokens}; subword vocabularies: {sizes}."


def training_of(run: RunFiles) -> str:
    """The settings of the run, and where it ran."""
    settings = ", ".join(f"`{name} {run.config[name]}`" for name in SETTINGS if name in run.config)
    machines = dict.fromkeys(
        f"{start.get('gpu') or start.get('cpu')}, torch {start.get('torch')}"
        for start in run.environment
    )
    if not machines:
        return settings
    time = run.seconds()
    return f"{settings}.\n{time.text if time else 'An unknown time'} on {'; '.join(machines)}."


def bleu_of(run: RunFiles, checkpoint: str) -> str:
    """A table of the scores that evaluate.py wrote for this checkpoint."""
    lines = []
    for score in run.results.values():
        scored = str(score.get("checkpoint")).removesuffix("/model.safetensors")
        if Path(scored).name != checkpoint:  # other weights, or a mean of several
            continue
        cells = [
            f"{Path(score['data']).name} {score['split']}",
            f"{score['sentences']:,}",
            score["decoding"],
            f"{score['nltk']:.2f} ({score['low']:.2f}–{score['high']:.2f})",
            f"{score['sacrebleu']:.2f}",
            f"{score['chrf']:.2f}",
            f"`{cell(score['signature'])}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([HEAD, *lines]) if lines else "Not measured."
