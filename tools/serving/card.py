"""The README.md of an exported model: what it is, data, recipe, BLEU, limits, and the lines of Python that load it."""

from contextlib import suppress
from pathlib import Path

from loading import Trained
from tools.reporting.reading import RunFiles, read_run
from validation import cell

LOADERS = Path(__file__).with_name("loaders")
PACKAGES = {
    "ctranslate2": "ctranslate2 transformers",
    "hf": "torch safetensors transformers",
    "onnx": "onnxruntime transformers",
}
RECIPE = (
    "preset",
    "epochs",
    "max_steps",
    "max_minutes",
    "tokens_per_batch",
    "optimizer",
    "lr",
    "warmup",
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

{source} → {target} 翻译模型，一次一句。Translates from {source} to {target}, sentence by sentence.
Transformer, {encoder} encoder and {decoder} decoder layers, width {width}, {parameters:,} parameters; from {checkpoint}.

## Use · 使用

`pip install {packages}`; in this folder, lines on standard input:

```python
{loader}```

Outside Python text: `source/` and `target/` are the tokenizers, and the end token goes behind the source{end}.

## Data · 数据

{data}

## Recipe · 训练

{recipe}

## BLEU

{bleu}

## Limits · 局限

- One sentence at a time, of at most {longest:,} tokens; it knows nothing of the sentences around it.
- It was trained on the data above and on nothing else: other kinds of text come out worse, names and numbers may be wrong,
  and what the data say wrongly or unfairly it may say too.
- BLEU compares words with one reference. It does not say whether a sentence is true or polite; a person should read what matters.
"""


def write_card(trained: Trained, kind: str, folder: Path) -> None:
    """Numbers come from the run's own files; what a run does not have is said."""
    config, sizes, run = trained.config, trained.model.config, read_run(trained.run)
    loader = (LOADERS / f"{kind}.py").read_text(encoding="utf-8")
    loader = loader.replace("max_input_length=512", f"max_input_length={sizes.max_length}")
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
        loader=loader.replace(
            "max_decoding_length=256", f"max_decoding_length={min(256, sizes.max_length)}"
        ),
        longest=sizes.max_length - 1,
        end=", which CTranslate2 adds itself" * (kind == "ctranslate2"),
        data=data_of(run),
        recipe=recipe_of(run, sizes.dropout),
        bleu=bleu_of(run, str(trained.checkpoint)),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def data_of(run: RunFiles) -> str:
    """Which data, how many pairs and tokens."""
    config, data = run.config, run.data
    name = f"`{Path(config['data']).name}`, columns {config['source']} and {config['target']}"
    if not data:
        return f"{name}; the run kept no counts."
    tokens = ", ".join(f"{count:,} {side} tokens" for side, count in data["tokens"].items())
    sizes = ", ".join(f"{count:,} {side}" for side, count in data["vocabulary"].items())
    pairs = f"{data['counts']['kept']:,} training pairs"
    return f"{name}: {pairs}, {tokens}; subword vocabularies: {sizes}."


def recipe_of(run: RunFiles, dropout: float) -> str:
    """The flags of the run and where it ran."""
    settings = [f"`{name} {run.config[name]}`" for name in RECIPE if name in run.config]
    places = dict.fromkeys(
        f"{session.get('gpu') or session.get('cpu')}, torch {session.get('torch')}"
        for session in run.environment
    )
    time = run.seconds()
    where = (
        f"\n{time.text if time else 'An unknown time'} on {'; '.join(places)}." if places else ""
    )
    return f"{', '.join(settings)}, `dropout {dropout}`.{where}"


def bleu_of(run: RunFiles, checkpoint: str) -> str:
    """A line for each score that evaluate.py left of this checkpoint."""
    lines = []
    for score in run.results.values():
        with suppress(KeyError):  # of an older version
            scored = Path(score["checkpoint"].removesuffix("/model.safetensors")).name
            if (
                scored != checkpoint.removesuffix("/model.safetensors").rpartition("/")[2]
            ):  # other weights, or a mean
                continue
            low, high, signature = score["low"], score["high"], cell(score["signature"])
            lines.append(
                f"| {Path(score['data']).name} {score['split']} | {score['sentences']:,} | {score['decoding']} | "
                f"{score['nltk']:.2f} ({low:.2f}–{high:.2f}) | {score['sacrebleu']:.2f} | {score['chrf']:.2f} | "
                f"`{signature}` |"
            )
    return "\n".join([HEAD, *lines]) if lines else "Not measured."
