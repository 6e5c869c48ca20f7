"""Every method that a run used is cited, none that it did not."""

from pathlib import Path

import pytest

import train
from engine.optimizer import OPTIMIZERS
from engine.schedule import SCHEDULES
from tools.reporting import references as refs
from tools.reporting.reading import RunFiles

WSD = set(SCHEDULES["wsd"].papers)
ADAMW = set(OPTIMIZERS["adamw"].papers)
TRANSLATION = {refs.TRANSFORMER, refs.TORCH_TRANSFORMER, refs.TIED, refs.BLEU, *WSD}
SCORED = {"nltk": 1, "interval": [0, 1], "chrf": 2}


def cited(
    kind: str, results: dict | None = None, session: dict | None = None, log: str = "", **config
) -> set:
    run = RunFiles(Path("r"), "r", kind=kind, config=config, results=results or {}, log=log)
    run.environment = [{"processes": 1, "precision": "fp32", **(session or {})}]
    return {reference for reference, _, _ in refs.references_of(run)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_papers_of_an_optimizer_are_those_of_its_table(name):
    assert cited("translation", optimizer=name, tokenizer="x") == TRANSLATION | set(
        OPTIMIZERS[name].papers
    )


@pytest.mark.parametrize(
    "settings, more",
    [
        ({}, {refs.BPE}),
        ({"tokenizer": "x", "dropout": 0.1}, {refs.DROPOUT}),
        ({"tokenizer": "x", "label_smoothing": 0.1}, {refs.SMOOTHING}),
        ({"tokenizer": "x", "label_smoothing": 0.0, "clip": 1.0}, {refs.CLIPPING}),
        ({"tokenizer": "x", "norm_first": True, "compile": True}, {refs.PRE_NORM, refs.COMPILE}),
        ({"tokenizer": "x", "select": True}, {refs.SELECTION, refs.SELECTION_OF_PAIRS}),
        ({"tokenizer": "x", "log": train.describe_sampling()}, {refs.SAMPLED}),
        ({"tokenizer": "x", "session": {"processes": 2}}, {refs.DDP}),
        ({"tokenizer": "x", "session": {"processes": 2}, "shard": True}, {refs.FSDP}),
        ({"tokenizer": "x", "session": {"precision": "bf16"}}, {refs.MIXED_PRECISION}),
        (
            {"tokenizer": "x", "results": {"eval/test-greedy": SCORED}},
            {refs.SACREBLEU, refs.BOOTSTRAP, refs.CHRF},
        ),
        (
            {
                "tokenizer": "x",
                "results": {"b": {"nltk": 1, "ter": 2, "decoding": "beam 4, length penalty 1"}},
            },
            {refs.SACREBLEU, refs.TER, refs.LENGTH_PENALTY},
        ),
    ],
)
def test_a_translation_cites_what_its_settings_and_scores_used(settings, more):
    assert cited("translation", optimizer="adamw", **settings) == TRANSLATION | ADAMW | more


@pytest.mark.parametrize(
    "kind, settings, expected",
    [
        ("lenet", {"activation": "relu"}, {refs.LENET, *ADAMW, *WSD}),
        ("lenet", {"activation": "labs.x:gelu"}, {refs.LENET, refs.GELU, *ADAMW, *WSD}),
        ("lightning", {}, {refs.LENET, refs.LIGHTNING, *ADAMW, *WSD}),
        ("wikitext", {"data": "my.txt"}, {refs.TRANSFORMER, refs.TIED, *ADAMW, *WSD}),
        (
            "wikitext",
            {"data": "/opt/wikitext-2", "glove": "g.txt"},
            {refs.TRANSFORMER, refs.TIED, refs.WIKITEXT, refs.GLOVE, *ADAMW, *WSD},
        ),
        ("pipeline", {"schedule": "zbv"}, {refs.TRANSFORMER, refs.ZERO_BUBBLE, *ADAMW}),
        ("pipeline", {"schedule": "gpipe", "optimizer": "sgd"}, {refs.TRANSFORMER, refs.GPIPE}),
        ("", {}, set()),
    ],
)
def test_the_labs(kind, settings, expected):
    assert cited(kind, **settings) == expected


def test_an_optimizer_of_a_lab_is_not_taken_for_one_of_train(monkeypatch):
    monkeypatch.setitem(refs.OPTIMIZERS, "sgd", refs.OPTIMIZERS["muon"])
    settings = {"schedule": "gpipe", "optimizer": "sgd"}
    assert cited("pipeline", **settings) == {refs.TRANSFORMER, refs.GPIPE}


GPT = {refs.GPT2, refs.GPT3, refs.GELU, refs.TIED, refs.CLIPPING, *ADAMW, *WSD}


@pytest.mark.parametrize(
    "processes, settings, more",
    [
        (1, {}, set()),
        (2, {"data_parallel": "ddp"}, {refs.DDP}),
        (2, {"data_parallel": "zero1"}, {refs.ZERO}),
        (
            2,
            {"data_parallel": "zero3", "recompute": True},
            {refs.ZERO, refs.FSDP, refs.RECOMPUTATION},
        ),
        (2, {"data_parallel": "ddp", "tensor": 2}, {refs.MEGATRON, refs.SEQUENCE_PARALLEL}),
        (4, {"data_parallel": "ddp", "pipe": 2, "accumulate": 4}, {refs.PIPEDREAM, refs.DDP}),
        (2, {"pipe": 2, "accumulate": 1}, {refs.GPIPE}),
        (1, {"model": "hf"}, {refs.TRANSFORMERS}),
    ],
)
def test_a_gpt(processes, settings, more):
    session = {"processes": processes}
    assert cited("gpt", session=session, data="random", **settings) == GPT | more


def test_damaged_settings_cite_nothing_wrong_and_end_in_no_error():
    odd = [[], {}, "x", 10**400, None, True]
    for value in odd:
        names = ("optimizer", "schedule", "tensor", "pipe", "data", "activation", "processes")
        settings = dict.fromkeys(names, value)
        for kind in (*refs.USES, "another"):
            cited(kind, session={"processes": value, "precision": value}, **settings)
