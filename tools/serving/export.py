"""`translate.py --export DIR`: a folder with which CTranslate2, a decoder in C++, translates.

It has the weights, in fp32 or fewer bits, the tokenizers as `AutoTokenizer` reads them, and a card,
README.md, with the Python code that translates.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data import collate_for
from decoding import Decoder, output_limit, search
from engine.errors import UserError
from loading import Trained
from model import SummedLoss
from text.bleu import corpus_bleu
from text.cleaning import held_out_rows, normalise, split_to_score
from text.reading import find_text
from text.subwords import decode, encode, special_ids
from tools.serving.to_ctranslate2 import convert, name_special

Ids = list[list[int]]  # of sentences, without begin and end
TRIAL_ROWS = 2001  # as many as newstest2017 has
LOSS_ROWS = 200  # of these, for the comparison of losses
LOSS_TOLERANCE = 1e-3  # nats per token; rounding in fp32 makes less than a hundredth of it
MADE_UP_ROWS = 200  # where the data of the run are gone
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
        trial = Trial(trained)
        # The formulas are compared in fp32: fewer bits change every number a little.
        trial.require_same_losses(to_ctranslate2(trained, Path(beside.name) / ".fp32", ""))
        result = trial.describe(to_ctranslate2(trained, building, quantization))
        log(result)
        write_card(trained, result, building)
        try:
            building.replace(folder)
        except OSError as error:  # a mount point
            raise UserError(f"cannot make {folder}: {error.strerror}; name a new folder") from None
    log(f"written to {folder}; how to use it: {folder}/README.md")


class Trial:
    """The run's own translations, for a comparison with those of an exported model."""

    def __init__(self, trained: Trained):
        self.trained = trained
        self.collate = collate_for(trained)
        self.references: list[str] = []
        longest = trained.model.config.longest_sentence
        try:
            split, pairs = rows_to_score(trained)
            texts = [normalise(source) for source, _ in pairs]
            sources = encode(trained.source_tokenizer, texts, longest)
            self.references = [text for (_, text), source in zip(pairs, sources) if source]
            self.sources = [source for source in sources if source]
            self.rows = f"{split} rows of {trained.config['data']}"
        except UserError as error:
            self.sources = made_up_sources(trained)
            self.rows = f"made-up sources, as the run's data cannot be read ({error})"
        found = search(Decoder(trained.model), self.sources, self.collate)
        self.expected = [hypotheses[0].tokens for hypotheses in found]

    def require_same_losses(self, exported: "Exported") -> None:
        """Raise `UserError` if the exported model gives the run's translations other losses."""
        loss_of = SummedLoss(self.trained.model, 0.0)
        longest = self.trained.model.config.max_length - 2  # beside the begin and end tokens
        targets = [target[:longest] for target in self.expected]
        pairs = list(zip(self.sources, targets))[:LOSS_ROWS]
        differences = []  # nats per token
        for (source, target), theirs in zip(pairs, exported.losses(pairs)):
            batch = self.collate([(np.array(source), np.array(target))])
            _, ours = loss_of(*batch.inputs)  # nats
            differences.append(abs(float(ours) - theirs) / (len(target) + 1))
        largest = np.max(differences)
        if not largest <= LOSS_TOLERANCE:  # also NaN
            raise UserError(
                f"CTranslate2 would translate otherwise than this model: its loss differs by "
                f"{largest:.2g} nats per token. It knows the layers of the original model.py "
                "alone; nothing is exported"
            )

    def describe(self, exported: "Exported") -> str:
        """One line: how many outputs are alike and, of rows with references, both BLEUs."""
        found = exported.translate(self.sources)
        same = sum(ours == theirs for ours, theirs in zip(self.expected, found))
        line = (
            f"tried on {len(self.sources):,} {self.rows}: {same:,} outputs are identical to the "
            "model's"
        )
        if not self.references:
            return line
        tokenizer = self.trained.target_tokenizer
        bleu = [
            corpus_bleu(self.references, decode(tokenizer, ids)) for ids in (found, self.expected)
        ]
        return f"{line}; BLEU {bleu[0]:.2f}, the model's {bleu[1]:.2f}"


def rows_to_score(trained: Trained) -> tuple[str, list[tuple[str, str]]]:
    """The split that evaluate.py scores, and its first raw rows. Raises `UserError` without any."""
    config = trained.config
    text = find_text(config["data"], config["source"], config["target"])
    split = split_to_score(text)
    pairs = held_out_rows(text)[split][:TRIAL_ROWS]
    if not any(normalise(source) for source, _ in pairs):
        raise UserError(f"no {split} rows")
    return split, pairs


def made_up_sources(trained: Trained) -> Ids:
    """Random tokens, none of them special; the same in every call."""
    special = {*special_ids(trained.source_tokenizer).values()}
    ids = [id for id in range(len(trained.source_tokenizer)) if id not in special]
    random = np.random.default_rng(0)
    longest = min(30, trained.model.config.longest_sentence)
    lengths = random.integers(1, longest + 1, MADE_UP_ROWS)
    return [random.choice(ids, length).tolist() for length in lengths]


@dataclass
class Exported:
    """A model in the folder, as CTranslate2 computes it."""

    folder: Path
    source_words: list[str]  # by id
    target_words: list[str]
    max_length: int

    def translate(self, sources: Ids) -> Ids:
        """Greedy translations."""
        import ctranslate2

        translator = ctranslate2.Translator(str(self.folder))
        lengths = torch.tensor([len(source) + 1 for source in sources])
        limits = output_limit(lengths, self.max_length).tolist()  # as `search` has them
        results = translator.translate_batch(
            in_words(sources, self.source_words),
            beam_size=1,
            max_batch_size=64,
            max_input_length=0,
            min_decoding_length=0,
            max_decoding_length=max(limits),
        )
        target_ids = {word: id for id, word in enumerate(self.target_words)}
        hypotheses = [[target_ids[word] for word in result.hypotheses[0]] for result in results]
        return [ids[:limit] for ids, limit in zip(hypotheses, limits)]

    def losses(self, pairs: list[tuple[list[int], list[int]]]) -> list[float]:
        """The loss of each target, its end token included, in nats."""
        import ctranslate2

        sources, targets = zip(*pairs)
        results = ctranslate2.Translator(str(self.folder)).score_batch(
            in_words(sources, self.source_words),
            in_words(targets, self.target_words),
            max_batch_size=64,
            max_input_length=0,
        )
        return [-sum(result.log_probs) for result in results]


def in_words(sentences: Sequence[list[int]], words: list[str]) -> list[list[str]]:
    """Token ids as the words by which CTranslate2 knows them."""
    return [[words[id] for id in sentence] for sentence in sentences]


def to_ctranslate2(trained: Trained, folder: Path, quantization: str) -> Exported:
    """Write the model to the folder. Raises `UserError` for one with other weights."""
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
    try:
        convert(trained.model, *vocabularies, folder, quantization or None)
    except (KeyError, AttributeError) as error:
        raise UserError(
            f"this model has not all weights ({error}): CTranslate2 knows the layers of the "
            "original model.py alone; nothing is exported"
        ) from None
    return Exported(folder, *vocabularies, sizes.max_length)


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
        longest=sizes.longest_sentence,
        parameters=sum(weight.numel() for weight in trained.model.parameters()),
        data=config["data"],
        loader=loader,
        trial=trial,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
