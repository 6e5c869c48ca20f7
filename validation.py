"""What a run measures between training steps, on its validation split.

Validation loss, greedy BLEU, sample translations and a picture of the cross-attention.
"""

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch

from data import BucketSampler, Prepared, collate_for
from decoding import Decoder
from engine.distributed import full_tensor, is_sharded
from engine.meters import perplexity
from engine.precision import Precision
from engine.run import Run
from engine.tables import markdown_table, plain
from model import SummedLoss, Translator, make_translator
from text.bleu import corpus_bleu
from text.selection import evenly_spaced
from translation import Translations, translate_lines

# Of the validation split, evenly spaced, translated each time; evaluate.py scores all rows.
BLEU_ROWS = 500
SAMPLES = 3


class Validation:
    """The validation split, in batches of at most `tokens_per_batch` padded tokens per side.

    Making one is a rehearsal: what would fail in the first validation, an hour later, fails now.
    """

    def __init__(
        self,
        model: Translator,
        prepared: Prepared,
        run: Run,
        precision: Precision,
        tokens_per_batch: int,
        fast: bool = True,
    ):
        self.model = model
        self.fast = fast
        self.prepared = prepared
        self.collate = collate_for(prepared)
        self.tokenizers = (prepared.source_tokenizer, prepared.target_tokenizer)
        self.run = run
        self.world = run.world
        self.precision = precision
        sampler = BucketSampler(prepared.validation.lengths, tokens_per_batch)
        self.batches = list(sampler.epoch_plan(0))  # pairs of similar length together, each once

        plain_model = unsharded(model)
        # Every rank tries the batches that need most memory.
        tried = [batch for batch in sampler.heaviest_steps() for _ in range(self.world.size)]
        self.loss(plain_model, tried)
        self.translate(plain_model, self.prepared.validation_rows[:SAMPLES], run.log)
        corpus_bleu(["one"], ["one"], smooth=True)
        if self.world.is_main:
            self.attention_of(plain_model, *self.prepared.validation_rows[0])

    def __call__(self, step: int) -> tuple[float, float | None]:
        """Measure, and write curves, samples and a log line of this step; all ranks must call.

        Returns the loss, in nats per token and the same on every rank, and on rank 0 the BLEU.
        """
        model = unsharded(self.model)
        loss = self.loss(model, self.batches)
        # From all over the split: a file may hold several corpora in turn.
        rows = evenly_spaced(self.prepared.validation_rows, BLEU_ROWS)
        translations = self.translate(model, rows)
        if translations is None:  # another rank than 0
            return loss, None

        texts = translations.texts
        references = [target for _, target in rows]
        # Smoothed, because a young model has no 4-gram right; evaluate.py's score is not.
        bleu = corpus_bleu(references, texts, smooth=True)
        curves = {"valid/loss": loss, "valid/perplexity": perplexity(loss), "valid/bleu": bleu}
        self.run.scalars(step, curves)
        samples = [("source", "translation", "reference")]
        for (source, target), text in zip(rows[:SAMPLES], texts):
            samples.append((plain(source), plain(text), plain(target)))
        self.run.telemetry.text("valid/samples", step, markdown_table(samples))
        self.draw_attention(step, model, rows[0][0], texts[0])
        # Two lines, for a terminal of 80 columns.
        self.run.log(
            f"step {step:>5,}  validation loss {loss:.3f}  perplexity {perplexity(loss):.1f}  "
            f"BLEU {bleu:.2f} (smoothed)"
        )
        scored = f"{len(rows)} of {len(self.prepared.validation_rows):,} rows, evenly spaced"
        self.run.log(f"            {scored}; the first: {texts[0][:30]!r}")
        return loss, bleu

    def draw_attention(self, step: int, model: Translator, source: str, translation: str) -> None:
        """To TensorBoard: which source words the model looked at for each word."""
        from tools.reporting.attention import picture  # no part of the training

        attention = self.attention_of(model, source, translation)
        if attention is not None:
            self.run.telemetry.figure("valid/cross-attention", step, picture(attention))

    def attention_of(self, model: Translator, source: str, translation: str):
        """The `Attention` of one translation; None for a decoder without it."""
        from tools.reporting.attention import attention_of  # no part of the training

        model.eval()
        return attention_of(model, self.tokenizers, source, translation)

    @torch.inference_mode()
    def loss(self, model: Translator, batches: list[np.ndarray]) -> float:
        """Unsmoothed cross-entropy in nats per token; each rank does its share of the batches."""
        model.eval()
        loss_of = SummedLoss(model, 0.0, sliced=self.fast)
        totals = torch.zeros(2, dtype=torch.float64, device=self.world.device)  # loss, tokens
        for indices in batches[self.world.rank :: self.world.size]:
            batch = self.collate(self.prepared.validation.take(indices)).to(self.world.device)
            with self.precision.autocast():
                _, plain = loss_of(*batch.inputs)
            totals[0] += plain
            totals[1] += batch.target_tokens
        total, tokens = self.world.sum(totals).tolist()
        return total / tokens

    def translate(
        self, model: Translator, rows: list[tuple[str, str]], log: Callable = lambda line: None
    ) -> Translations | None:
        """Greedy translations of the rows by all ranks; None on all ranks but rank 0.

        On a CPU they are made in fp32, as evaluate.py does. `log` receives a note where decoding
        is slow.
        """
        decoder = Decoder(model, compiled=self.fast, log=log)  # with the weights as they are now
        on_gpu = self.world.device.type == "cuda"
        with self.precision.autocast() if on_gpu else nullcontext():
            return translate_lines(
                decoder,
                *self.tokenizers,
                [source for source, _ in rows],
                world=self.world,
            )


def unsharded(model: Translator) -> Translator:
    """The model; of a sharded one (FSDP2) a plain copy with all weights. All ranks must call."""
    if not is_sharded(model):
        return model
    copy = make_translator(model.config).to(next(model.parameters()).device)
    copy.load_state_dict({name: full_tensor(weight) for name, weight in model.state_dict().items()})
    return copy
