"""What a run looks at between training steps: validation loss, greedy BLEU, sample translations, cross-attention."""

import math
from contextlib import nullcontext

import numpy as np
import torch

import fast
from data import Collate, Prepared, cut_batches
from decoding import Translations, translate_lines
from engine.distributed import full_tensor
from engine.precision import Precision
from engine.run import Run
from model import SummedLoss, Translator, cross_attention
from text.bleu import corpus_bleu
from text.cleaning import normalise
from text.subwords import encode, special_ids
from tools.reporting.attention import Attention, in_words, picture

BLEU_ROWS = 500  # of the validation split, translated each time; evaluate.py does them all
SAMPLES = 3
WIDEST = 60  # tokens of a sentence in a picture of attention


class Validation:
    """The validation split, cut into batches of at most `tokens_per_batch` padded tokens per side."""

    def __init__(
        self,
        model: Translator,
        prepared: Prepared,
        collate: Collate,
        run: Run,
        precision: Precision,
        tokens_per_batch: int,
    ):
        self.model, self.prepared, self.collate = model, prepared, collate
        self.tokenizers = prepared.source_tokenizer, prepared.target_tokenizer
        self.run, self.world, self.precision = run, run.world, precision
        lengths = prepared.validation.lengths
        widths = np.maximum(lengths["source"], lengths["target"]) + 1
        order = np.lexsort((lengths["source"], lengths["target"]))  # by target, then by source
        bounds = cut_batches(widths[order], tokens_per_batch)
        self.batches = [order[first:last] for first, last in zip(bounds, bounds[1:])]
        # A rehearsal (shortest and longest batch, a translation): what would fail after an hour fails now.
        model = whole_copy(model)
        self.loss(model, [self.batches[0], self.batches[-1]])
        self.translate(model, self.prepared.validation_rows[:SAMPLES])
        corpus_bleu(["one"], ["one"], smooth=True)

    def __call__(self, step: int) -> tuple[float, float | None]:
        """Write the figures; → the loss, the same on every rank, and on rank 0 BLEU."""
        model = whole_copy(self.model)
        loss = self.loss(model, self.batches)
        rows = self.prepared.validation_rows[:BLEU_ROWS]
        bleu, translations = None, self.translate(model, rows)
        if translations:
            texts, references = translations.texts, [target for _, target in rows]
            # Smoothed, because a young model has no 4-gram right; evaluate.py's score is not.
            bleu = corpus_bleu(references, texts, smooth=True)
            perplexity = math.exp(min(loss, 50))  # past e^709 exp raises, and e^50 is as bad as any
            self.run.scalars(
                step, {"valid/loss": loss, "valid/perplexity": perplexity, "valid/bleu": bleu}
            )
            table = "".join(
                f"| {cell(source)} | {cell(text)} | {cell(reference)} |\n"
                for (source, reference), text in zip(rows[:SAMPLES], texts)
            )
            self.run.telemetry.text(
                "samples", step, "| source | translation | reference |\n|---|---|---|\n" + table
            )
            attention = attention_of(model, self.tokenizers, rows[0][0], texts[0])
            self.run.telemetry.figure("cross-attention", step, picture(attention))
            self.run.log(
                f"step {step:>6,}  validation loss {loss:.4f}  perplexity {perplexity:.1f}  "
                f"BLEU {bleu:.2f} (greedy, {len(rows)} rows, smoothed)  e.g. {texts[0][:80]!r}"
            )
        return loss, bleu

    @torch.inference_mode()
    def loss(self, model: Translator, batches: list[np.ndarray]) -> float:
        """Unsmoothed cross-entropy in nats per token; each rank does its share of the batches."""
        model.eval()
        loss_of = fast.loss(model, 0.0, self.precision.dtype) or SummedLoss(model, 0.0)
        totals = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for rows in batches[self.world.rank :: self.world.size]:
            batch = self.collate(self.prepared.validation.__getitems__(rows)).to(self.world.device)
            with self.precision.autocast():
                loss, _ = loss_of(batch.src, batch.src_pad, batch.tgt_in, batch.real, batch.tgt_out)
            totals[0] += loss
            totals[1] += batch.target_tokens
        loss, tokens = self.world.sum(totals).tolist()
        return loss / tokens

    def translate(self, model: Translator, rows: list[tuple[str, str]]) -> Translations | None:
        """Greedy translations of the rows, by all ranks, for rank 0; on a CPU in fp32, as evaluate.py does."""
        steps = fast.steps(model)  # in place of decoding.start; of the weights as they are now
        with self.precision.autocast() if self.world.device.type == "cuda" else nullcontext():
            return translate_lines(
                model,
                *self.tokenizers,
                [source for source, _ in rows],
                world=self.world,
                steps=steps,
            )


def whole_copy(model: Translator) -> Translator:
    """The model; of a sharded one a plain copy with all its weights, which the ranks make together."""
    if not hasattr(model, "unshard"):  # a method that fully_shard (FSDP2) adds
        return model
    copy = Translator(model.config).to(model.output.weight.device)
    copy.load_state_dict({name: full_tensor(weight) for name, weight in model.state_dict().items()})
    return copy


def attention_of(
    model: Translator, tokenizers: tuple, source: str, translation: str, widest=WIDEST
) -> Attention:
    """Which source words the last layer looked at for each word of the translation, of at most `widest` tokens a side."""
    texts, longest = (
        (normalise(source), translation),
        min(widest, model.config.max_length - 1),
    )  # and an end token
    ids = [
        encode(tokenizer, [text], longest + 1)[0] for tokenizer, text in zip(tokenizers, texts)
    ]  # + 1 shows a cut
    collate = Collate(*map(special_ids, tokenizers))
    batch = collate([[own[:longest] for own in ids]]).to(model.output.weight.device)
    weights = (
        cross_attention(model, batch.src, batch.src_pad, batch.tgt_in)[0].float().cpu().numpy()
    )  # (T, S)
    return in_words(*texts, tokenizers, ids, weights)


def cell(text: str) -> str:
    """Text that cannot break a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
