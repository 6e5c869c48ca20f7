"""From lines of text to lines of text, by `search` of decoding.py; several ranks share the work.

translations = translate_lines(Decoder(model), source_tokenizer, target_tokenizer, lines)
"""

from collections.abc import Callable
from dataclasses import dataclass

from data import Collate
from decoding import Decoder, plan_for, search
from engine.distributed import World
from text.cleaning import normalise
from text.subwords import decode, encode, special_ids


@dataclass
class Translations:
    """The translations of lines, in their order, and facts about them."""

    texts: list[str]
    # Texts and scores of each line, best first: at least one; greedy search gives no scores.
    nbest: list[list[tuple[str, float | None]]]
    tokens: int  # of `texts`, end tokens included
    capped: int  # how many of `texts` reached the limit without ending
    cut: int  # how many sources were cut, because the model has fewer positions


def translate_lines(
    decoder: Decoder,
    source_tokenizer,
    target_tokenizer,
    lines: list[str],
    *,
    beam: int = 1,
    nbest: int = 0,
    length_penalty: float = 1.0,
    world: World | None = None,
    progress: Callable = iter,
) -> Translations | None:
    """Translate lines of text; the options are those of `search`.

    With a `world` of several ranks each of them translates some of the batches. Rank 0 returns the
    translations of all lines, the others None.
    """
    model = decoder.model
    longest = model.config.longest_sentence
    # One token more than fits shows which sources are cut.
    clean = [normalise(line) for line in lines]
    sources = encode(source_tokenizer, clean, longest + 1)
    cut = sum(len(source) > longest for source in sources)
    sources = [source[:longest] for source in sources]
    collate = Collate(special_ids(source_tokenizer), special_ids(target_tokenizer))
    lengths = [len(source) for source in sources]
    batches = plan_for(model, lengths, beam, ranks=world.size if world else 1)
    if world:
        # Rank 0 plans for all: machines with different numbers of threads would plan differently.
        batches = world.on_main(lambda: batches)[world.rank :: world.size]
    found = search(
        decoder,
        sources,
        collate,
        beam=beam,
        nbest=nbest,
        length_penalty=length_penalty,
        batches=batches,
        progress=progress,
    )
    # This rank's share of the sentences: index -> hypotheses, now with texts.
    own_share = {index: found[index] for batch in batches for index in batch}
    flat = [hypothesis for of_sentence in own_share.values() for hypothesis in of_sentence]
    texts = decode(target_tokenizer, [hypothesis.tokens for hypothesis in flat])
    for hypothesis, text in zip(flat, texts, strict=True):
        hypothesis.text = text
    shares = world.gather(own_share) if world else [own_share]
    if shares is None:
        return None
    for share in shares:
        for index, hypotheses in share.items():
            found[index] = hypotheses
    # An empty source is in no batch: its hypothesis is empty too, and does not count below.
    best = [hypotheses[0] for hypotheses, source in zip(found, sources) if source]
    return Translations(
        texts=[hypotheses[0].text for hypotheses in found],
        nbest=[[(one.text, one.score) for one in hypotheses] for hypotheses in found],
        tokens=sum(len(hypothesis.tokens) + hypothesis.ended for hypothesis in best),
        capped=sum(not hypothesis.ended for hypothesis in best),
        cut=cut,
    )
