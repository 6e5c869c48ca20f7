"""Validation: the right loss, the right BLEU, a table that does not break."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_train import prepared_of

import validation
from engine.distributed import World
from engine.precision import choose_precision
from loading import load_trained
from model import Translator
from text.bleu import corpus_bleu
from tools.reporting.attention import attention_of
from translation import Translations
from validation import Validation


@pytest.fixture
def checked(tiny_run) -> Validation:
    """The validation of a model that has learned a little; `written` holds its curves."""
    trained, prepared, cpu = load_trained(tiny_run), prepared_of(tiny_run), torch.device("cpu")
    written = {}
    telemetry = SimpleNamespace(text=lambda *_: None, figure=lambda *_: None)
    run = SimpleNamespace(
        world=World(0, 1, cpu),
        log=lambda line: None,
        telemetry=telemetry,
        scalars=lambda step, values: written.update(values),
    )
    made = Validation(trained.model, prepared, run, choose_precision(cpu, "fp32"), 500)
    made.written = written
    return made


def test_the_loss_is_unsmoothed_and_per_token(checked):
    total = count = 0
    for index in range(len(checked.prepared.validation)):
        batch = checked.collate([checked.prepared.validation[index]])
        with torch.no_grad():
            logits = checked.model(batch.src, batch.src_pad, batch.tgt_in, batch.target_positions)
        total += F.cross_entropy(logits, batch.tgt_out, reduction="sum").item()
        count += batch.target_tokens
    loss, bleu = checked(7)  # fp32 sums in another order
    assert bleu == checked.written["valid/bleu"]
    assert loss == pytest.approx(total / count, rel=1e-5) and len(checked.batches) > 3
    assert checked.written["valid/perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)


def test_bleu_takes_the_raw_references_and_their_case(checked, monkeypatch):
    """The translations are too short, so swapped lists would give another score.

    No 4-gram matches, so that smoothing shows.
    """
    rows = [("一二", "The cat sat on the Mat in the Sun today"), ("三四", "He likes green tea")]
    texts = ["The cat sat upon the Mat in Sun", "He likes Tea"]
    checked.prepared.validation_rows[:] = rows
    monkeypatch.setattr(Validation, "translate", lambda *_: Translations(texts, [], 9, 0, 0))
    checked(7)
    references = [target for _, target in rows]
    bleu = checked.written["valid/bleu"]
    assert bleu == pytest.approx(corpus_bleu(references, texts, smooth=True))
    for other in (corpus_bleu(texts, references, smooth=True), corpus_bleu(references, texts)):
        assert abs(other - bleu) > 0.1


def test_rows_from_all_over_the_split_are_translated(checked, monkeypatch):
    asked, lines = [], []

    def translate(validation, model, rows):
        asked.append(rows)
        return Translations(["one"] * len(rows), [], 9, 0, 0)

    monkeypatch.setattr(validation, "BLEU_ROWS", 7)
    monkeypatch.setattr(Validation, "translate", translate)
    monkeypatch.setattr(checked.run, "log", lines.append)
    checked(7)
    rows = checked.prepared.validation_rows
    assert asked == [[rows[place * len(rows) // 7] for place in range(7)]]
    assert "(smoothed)" in lines[0]
    assert f"7 of {len(rows)} rows, evenly spaced" in lines[1]


def test_the_attention_picture_is_cut_to_what_the_model_can_read(checked):
    model = Translator(replace(checked.model.config, max_length=9)).eval()
    attention = attention_of(model, checked.tokenizers, "123456789" * 3, "987654321" * 3)
    assert max(attention.weights.shape) <= 9 and np.allclose(attention.weights.sum(1), 1, atol=1e-5)
    assert attention.source == f"{''.join(attention.source_words[:-1])} …"
    assert attention.translation == f"{''.join(attention.target_words[:-1])} …"
    assert attention_of(model, checked.tokenizers, "一二", "two one").source == "一二"


def test_a_decoder_without_attention_has_no_picture(checked, monkeypatch):
    drawn = []
    monkeypatch.setattr(checked.run.telemetry, "figure", lambda *values: drawn.append(values))
    checked(7)
    assert len(drawn) == 1

    def decode(model, memory, src_pad, tgt_in, first=0):
        return model.embed(model.target_embedding, tgt_in, first) + memory.mean(1, keepdim=True)

    monkeypatch.setattr(Translator, "decode", decode)
    checked(8)
    assert len(drawn) == 1


def test_validation_has_no_dropout(checked):
    checked.model.train()
    checked.loss(checked.model, checked.batches[:1])
    assert not checked.model.training


def test_every_rank_tries_the_heaviest_batches(checked, monkeypatch):
    tried = []

    def note(validation, _model, batches):
        tried.append(batches[validation.world.rank :: validation.world.size])

    monkeypatch.setattr(Validation, "loss", note)
    monkeypatch.setattr(Validation, "translate", lambda *_: None)
    parts = (checked.model, checked.prepared)
    for rank in (0, 1):
        run = SimpleNamespace(world=World(rank, 2, torch.device("cpu")), log=print)
        again = Validation(*parts, run, checked.precision, 500)
        lengths = checked.prepared.validation.lengths
        most_tokens, of_tried = (
            max(int(lengths["target"][rows].sum()) + len(rows) for rows in batches)
            for batches in (again.batches, tried.pop())
        )
        assert of_tried == most_tokens


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_validation_translates_in_fp32_on_a_cpu_and_in_the_runs_format_on_a_gpu(
    checked, monkeypatch, device
):
    """As evaluate.py does on each."""
    seen = []
    checked.precision = choose_precision(torch.device("cpu"), "bf16")
    checked.world = World(0, 1, SimpleNamespace(type=device))
    monkeypatch.setattr(
        "validation.translate_lines",
        lambda *_, **__: seen.append(torch.is_autocast_enabled("cpu")),
    )
    checked.translate(checked.model, [("一", "one")])
    assert seen == [device == "cuda"]
