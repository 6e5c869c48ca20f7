"""`translate.py --export FORMAT DIR`: a folder with which other programs translate.

    ctranslate2   CTranslate2's model, in fp32 or fewer bits; compared at once with the run's model
    hf            weights as safetensors, for PyTorch without this project

Both have the tokenizers as `AutoTokenizer` reads them, and a card, README.md, with Python code.
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

NEEDS = {"ctranslate2": ["ctranslate2"], "hf": []}

Ids = list[list[int]]  # of sentences, without begin and end
TRIAL_ROWS = 2001  # as many as newstest2017 has


def export(trained: Trained, kind: str, words: list[str], quantization: str, log: Callable) -> None:
    """Write the folder that `words` names, completely or not at all.

    Raises `UserError` if there are files in it, or if it cannot be written.
    """
    if len(words) != 1:
        raise UserError(
            f"--export {kind} needs one folder: python translate.py --export {kind} DIR"
        )
    need(f"--export {kind}", *NEEDS[kind])
    folder = Path(words[0]).resolve()
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
        if kind == "hf":
            write_config(trained, building)
            write_weights(trained, building)
        else:
            log(trial(trained, to_ctranslate2(trained, building, quantization)))
        write_card(trained, kind, building)
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
        return f"note: not tried, since the run's data cannot be read: {error}"
    longest = trained.model.config.max_length - 1
    sources = encode(trained.source_tokenizer, [normalise(source) for source, _ in pairs], longest)
    references = [reference for (_, reference), source in zip(pairs, sources) if source]
    sources = [source for source in sources if source]
    if not sources:
        return f"note: not tried, since {config['data']} has no {split} rows"
    collate = Collate(special_ids(trained.source_tokenizer), special_ids(target_tokenizer))
    expected = [found[0].tokens for found in search(trained.model, sources, collate)]
    found = translate(sources)
    same = sum(ours == theirs for ours, theirs in zip(expected, found))
    bleu = [corpus_bleu(references, decode(target_tokenizer, ids)) for ids in (found, expected)]
    return (
        f"tried on {len(sources):,} {split} rows of {config['data']}: {same:,} come out token for "
        f"token as from the model; BLEU {bleu[0]:.2f}, the model's {bleu[1]:.2f}"
    )


def to_ctranslate2(trained: Trained, folder: Path, quantization: str) -> Callable[[Ids], Ids]:
    """Write the model; returns a function that translates with it."""
    import ctranslate2

    from tools.serving.to_ctranslate2 import convert, name_special

    # Copies, because CTranslate2 scales them in place when it quantises.
    weights = {name: tensor.numpy().copy() for name, tensor in trained.model.state_dict().items()}
    sizes = trained.model.config
    if len({*special_ids(trained.target_tokenizer).values()}) < 3:
        raise UserError(
            "CTranslate2 needs a tokenizer whose begin, end and pad tokens differ; use --export hf"
        )
    vocabularies = []
    for tokenizer, size in (
        (trained.source_tokenizer, sizes.source_vocab),
        (trained.target_tokenizer, sizes.target_vocab),
    ):
        words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        words += [f"<unused {id}>" for id in range(len(tokenizer), size)]
        vocabularies.append(name_special(words, special_ids(tokenizer)))
    source_words, target_words = vocabularies
    convert(weights, asdict(sizes), source_words, target_words, folder, quantization or None)
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


def write_weights(trained: Trained, folder: Path) -> None:
    """Every parameter once, and the positions, which a checkpoint leaves out."""
    weights = {name: tensor.contiguous() for name, tensor in trained.model.state_dict().items()}
    del weights["output.weight"]  # tied to the target embedding
    weights["positions"] = trained.model.positions
    # Not save_file, whose file only its owner can read.
    (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))


def write_config(trained: Trained, folder: Path) -> None:
    """The sizes and the ids that the code in the card reads."""
    target = special_ids(trained.target_tokenizer)
    config = {
        "architectures": ["Translator"],
        **asdict(trained.model.config),
        "source_eos_token_id": special_ids(trained.source_tokenizer)["eos"],
        "bos_token_id": target["bos"],
        "eos_token_id": target["eos"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
