"""`translate.py --export DIR`: a folder with which CTranslate2, a decoder in C++, translates.

It has the weights, in fp32 or fewer bits, the tokenizers as `AutoTokenizer` reads them, and a card,
README.md, with the Python code that translates.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from data import collate_for
from decoding import Decoder, output_limit, search
from engine.errors import UserError
from loading import Trained
from text.bleu import corpus_bleu
from text.cleaning import held_out_rows, normalise, split_to_score
from text.reading import find_text
from text.subwords import decode, encode, special_ids
from tools.serving.to_ctranslate2 import convert, name_special

Ids = list[list[int]]  # of sentences, without begin and end
TRIAL_ROWS = 2001  # as many as newstest2017 has
LOADER = Path(__file__).with_name("loader.py")
CARD = """# {name}

Translates single sentences from {source} to {target}, of at most {longest:,} tokens.
A Transformer of {parameters:,} parameters, trained on {data}: other kinds of text come out worse.

`pip install ctranslate2 transformers`; in this folder, lines on standard input:

```python
{loader}```

From another language than Python: `source/` and `target/` are the tokenizers. CTranslate2 adds the
end token of the source itself.

The export was {trial}.
"""


def export(trained: Trained, path: str, quantization: str, log: Callable) -> None:
    """Write the folder, completely or not at all.

    Raises `UserError` if there are files in it, or if it cannot be written.
    """
    try:
        import ctranslate2  # noqa: F401
    except ImportError:
        raise UserError(
            "--export needs ctranslate2; pip install -r requirements-extras.txt"
        ) from None
    folder = Path(path).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already; name a new folder")
    trained.model.cpu().float()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(prefix=".exporting-", dir=folder.parent)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder.parent}: {error.strerror}; choose another folder"
        ) from None
    with beside:
        building = Path(beside.name) / folder.name
        building.mkdir()
        trained.source_tokenizer.save_pretrained(building / "source")
        trained.target_tokenizer.save_pretrained(building / "target")
        result = trial(trained, to_ctranslate2(trained, building, quantization))
        log(result)
        write_card(trained, result, building)
        try:
            building.replace(folder)
        except OSError as error:  # a mount point
            raise UserError(f"cannot make {folder}: {error.strerror}; name a new folder") from None
    log(f"written to {folder}; how to use it: {folder}/README.md")


def trial(trained: Trained, translate: Callable[[Ids], Ids]) -> str:
    """One line: how many test rows `translate` and the model translate alike, and both BLEUs."""
    config, target_tokenizer = trained.config, trained.target_tokenizer
    try:
        text = find_text(config["data"], config["source"], config["target"])
        split = split_to_score(text)
        pairs = held_out_rows(text)[split][:TRIAL_ROWS]
    except UserError as error:
        return f"not tried, since the run's data cannot be read: {error}"
    longest = trained.model.config.max_length - 1
    sources = encode(trained.source_tokenizer, [normalise(source) for source, _ in pairs], longest)
    references = [reference for (_, reference), source in zip(pairs, sources) if source]
    sources = [source for source in sources if source]
    if not sources:
        return f"not tried, since {config['data']} has no {split} rows"
    expected = [
        found[0].tokens for found in search(Decoder(trained.model), sources, collate_for(trained))
    ]
    found = translate(sources)
    same = sum(ours == theirs for ours, theirs in zip(expected, found))
    bleu = [corpus_bleu(references, decode(target_tokenizer, ids)) for ids in (found, expected)]
    return (
        f"tried on {len(sources):,} {split} rows of {config['data']}: {same:,} outputs are "
        f"identical to the model's; BLEU {bleu[0]:.2f}, the model's {bleu[1]:.2f}"
    )


def to_ctranslate2(trained: Trained, folder: Path, quantization: str) -> Callable[[Ids], Ids]:
    """Write the model; returns a function that translates with it."""
    import ctranslate2

    sizes = trained.model.config
    if len({*special_ids(trained.target_tokenizer).values()}) < 3:
        raise UserError("CTranslate2 needs a tokenizer whose begin, end and pad tokens differ")
    vocabularies = []
    for tokenizer, size in (
        (trained.source_tokenizer, sizes.source_vocab),
        (trained.target_tokenizer, sizes.target_vocab),
    ):
        words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        words += [f"<unused {id}>" for id in range(len(tokenizer), size)]
        vocabularies.append(name_special(words, special_ids(tokenizer)))
    source_words, target_words = vocabularies
    convert(trained.model, source_words, target_words, folder, quantization or None)
    target_ids = {word: id for id, word in enumerate(target_words)}

    def translate(sources: Ids) -> Ids:
        translator = ctranslate2.Translator(str(folder))
        lengths = torch.tensor([len(source) + 1 for source in sources])
        limits = output_limit(lengths, sizes.max_length).tolist()  # as `search` has them
        results = translator.translate_batch(
            [[source_words[id] for id in source] for source in sources],
            beam_size=1,
            max_batch_size=64,
            max_input_length=0,
            min_decoding_length=0,
            max_decoding_length=max(limits),
        )
        hypotheses = [[target_ids[word] for word in result.hypotheses[0]] for result in results]
        return [ids[:limit] for ids, limit in zip(hypotheses, limits)]

    return translate


def write_card(trained: Trained, trial: str, folder: Path) -> None:
    """Write README.md. `trial`: what came of it."""
    config, sizes = trained.config, trained.model.config
    loader = LOADER.read_text(encoding="utf-8")
    for limit in ("max_input_length", "max_decoding_length"):
        loader = loader.replace(f"{limit}=512", f"{limit}={sizes.max_length}")
    card = CARD.format(
        name=trained.name,
        source=config["source"],
        target=config["target"],
        longest=sizes.max_length - 1,
        parameters=sum(weight.numel() for weight in trained.model.parameters()),
        data=config["data"],
        loader=loader,
        trial=trial,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
