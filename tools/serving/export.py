"""`translate.py --export FORMAT DIR`: a folder that other programs translate with, tried at once on the run's test rows.

    ctranslate2   CTranslate2's model, in fp32 or fewer bits
    hf            weights as safetensors, for PyTorch without this project
    onnx          encoder and decoder step

Each has the tokenizers as `AutoTokenizer` reads them and a card, README.md, with the lines of Python that load it.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save

from data import Collate
from decoding import output_limit, search
from engine.errors import UserError
from loading import Trained
from text.bleu import corpus_bleu
from text.cleaning import held_out_rows, normalise, split_to_score
from text.reading import find_text
from text.subwords import decode, encode, special_ids
from tools.serving import need
from tools.serving.card import write_card

NEEDS = {"ctranslate2": ["ctranslate2"], "onnx": ["onnx", "onnxscript", "onnxruntime"], "hf": []}

Ids = list[list[int]]  # of sentences, without begin and end


def export(trained: Trained, kind: str, words: list[str], quantization: str, say: Callable) -> None:
    """Write the folder that `words` name, whole or not at all. Raises `UserError` if it has files, or cannot be written."""
    if len(words) != 1:
        raise UserError(
            f"--export {kind} needs one folder: python translate.py --export {kind} DIR"
        )
    need(f"--export {kind}", *NEEDS[kind])
    folder = Path(words[0]).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already; name a new folder")
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
        write(trained, kind, building, quantization, say)
        try:
            building.replace(folder)
        except OSError as error:  # a mount point
            raise UserError(f"cannot make {folder}: {error.strerror}; name a new folder") from None
    say(f"written to {folder}; how to use it: {folder}/README.md")


def write(trained: Trained, kind: str, folder: Path, quantization: str, say: Callable) -> None:
    """The model, its tokenizers and the card; `say` tells how the trial went."""
    trained.source_tokenizer.save_pretrained(folder / "source")
    trained.target_tokenizer.save_pretrained(folder / "target")
    if kind != "ctranslate2":  # which has a config.json of its own
        write_config(trained, folder)
    if kind == "hf":
        write_weights(trained, folder)
    elif kind == "ctranslate2":
        say(trial(trained, to_ctranslate2(trained, folder, quantization), 2001))
    else:
        from tools.serving.to_onnx import to_onnx

        say(trial(trained, to_onnx(trained, folder), 100))  # sentence by sentence
    write_card(trained, kind, folder)


def trial(trained: Trained, translate: Callable[[Ids], Ids], rows: int) -> str:
    """One line: how many of the run's first rows to score come out token for token as the model's greedy search has them."""
    config = trained.config
    try:
        text = find_text(config["data"], config["source"], config["target"])
        split = split_to_score(text)
        pairs = held_out_rows(text)[split][:rows]
    except UserError as error:
        return f"note: not tried, since the run's data cannot be read: {error}"
    if not pairs:
        return f"note: not tried, since {config['data']} has no {split} rows"
    longest = trained.model.config.max_length - 1
    sources = encode(trained.source_tokenizer, [normalise(source) for source, _ in pairs], longest)
    collate = Collate(special_ids(trained.source_tokenizer), special_ids(trained.target_tokenizer))
    pairs, sources = zip(*((pair, source) for pair, source in zip(pairs, sources) if source))
    found = search(trained.model, list(sources), collate)
    outputs = [hypotheses[0].tokens for hypotheses in found], translate(list(sources))
    same = sum(ours == theirs for ours, theirs in zip(*outputs))
    references, target = [reference for _, reference in pairs], trained.target_tokenizer
    ours, theirs = (corpus_bleu(references, decode(target, tokens)) for tokens in outputs)
    return (
        f"tried on {len(pairs):,} {split} rows of {config['data']}: {same:,} come out token for token as from the model; "
        f"BLEU {theirs:.2f}, the model's {ours:.2f}"
    )


def to_ctranslate2(trained: Trained, folder: Path, quantization: str) -> Callable[[Ids], Ids]:
    """Write the model; → a function that translates with it."""
    import ctranslate2

    from tools.serving.to_ctranslate2 import convert, name_special

    # Copies: to quantise, CTranslate2 scales them where they lie.
    weights = {name: tensor.numpy().copy() for name, tensor in trained.model.state_dict().items()}
    sizes = trained.model.config
    vocabularies = []
    tokenizers = trained.source_tokenizer, trained.target_tokenizer
    if len({*special_ids(tokenizers[1]).values()}) < 3:
        raise UserError(
            "CTranslate2 needs a tokenizer whose begin, end and pad tokens differ; use --export hf"
        )
    for tokenizer, size in zip(tokenizers, (sizes.source_vocab, sizes.target_vocab)):
        words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        words += [f"<unused {id}>" for id in range(len(tokenizer), size)]
        vocabularies.append(name_special(words, special_ids(tokenizer)))
    convert(weights, asdict(sizes), *vocabularies, folder, quantization or None)
    numbers = {word: id for id, word in enumerate(vocabularies[1])}

    def translate(sources: Ids) -> Ids:
        translator = ctranslate2.Translator(str(folder))
        lengths = torch.tensor([len(source) + 1 for source in sources])
        most = output_limit(lengths, sizes.max_length).tolist()  # as `search` has it
        words = [[vocabularies[0][id] for id in source] for source in sources]
        options = dict(
            beam_size=1,
            max_batch_size=64,
            max_input_length=0,
            min_decoding_length=0,
            max_decoding_length=max(most),
        )
        results = translator.translate_batch(words, **options)
        return [
            [numbers[word] for word in result.hypotheses[0]][:limit]
            for result, limit in zip(results, most)
        ]

    return translate


def write_weights(trained: Trained, folder: Path) -> None:
    """Every parameter once, and the positions, which a checkpoint of ours leaves out."""
    weights = {name: tensor.contiguous() for name, tensor in trained.model.state_dict().items()}
    weights.pop("output.weight")  # the target embedding's, tied
    data = save({**weights, "positions": trained.model.positions}, {"format": "pt"})
    (folder / "model.safetensors").write_bytes(data)  # save_file would let nobody else read it


def write_config(trained: Trained, folder: Path) -> None:
    """The sizes and the ids that the loader in the card reads."""
    source, target = special_ids(trained.source_tokenizer), special_ids(trained.target_tokenizer)
    ids = {
        "source_eos_token_id": source["eos"],
        "bos_token_id": target["bos"],
        "eos_token_id": target["eos"],
    }
    text = json.dumps(
        {"architectures": ["Translator"], **asdict(trained.model.config), **ids}, indent=2
    )
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
