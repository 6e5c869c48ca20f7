"""An exported model translates as the run does, in the program that it was exported for."""

import errno
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import HANGS

from decoding import Decoder
from engine.errors import UserError
from loading import load_trained
from text.subwords import load_tokenizer, special_ids
from tools.serving.export import export, write_card
from translate import Config, translate
from translation import translate_lines

pytest.importorskip("ctranslate2")
LINES = ["一二三", "九八七六五四", "没见过的字 English", "", "零"]
# A byte order mark, all kinds of spaces, names of special tokens, more tokens than positions.
ODD_LINES = ["\ufeff一二三", "四\u3000五\t六 \u00a0七", "一</s>二", "一\r二", "一二" * 300]
ODD_LINES += ["一\u200b二\u00ad三", "一\x07二", "\u2581一\u202e二\u2066三"]


def test_the_lines_in_the_card_translate_as_the_run_does(tiny_run, tmp_path):
    logged, folder, trained = [], tmp_path / "out", load_trained(tiny_run)
    export(trained, str(folder), "", logged.append)
    assert re.search("tried on 100 test rows .*: 100 outputs are identical", logged[0])
    assert "how to use it" in logged[-1]
    assert logged[0] in (folder / "README.md").read_text(encoding="utf-8")
    lines = ODD_LINES + LINES
    tokenizers = (trained.source_tokenizer, trained.target_tokenizer)
    assert (
        translated(folder, lines)
        == translate_lines(Decoder(trained.model), *tokenizers, lines).texts
    )
    for side in ("source", "target"):
        exported, own = (
            load_tokenizer(str(place / side)) for place in (folder, tiny_run / "tokenizer")
        )
        assert exported.get_vocab() == own.get_vocab()


def test_positions_of_your_own_are_exported(tiny_run, tmp_path):
    logged, trained = [], load_trained(tiny_run)
    trained.model.positions.copy_(trained.model.positions.flip(1))
    export(trained, str(tmp_path / "out"), "", logged.append)
    assert re.search("tried on 100 test rows .*: 100 outputs are identical", logged[0])


def test_int8_takes_a_quarter_of_the_disk(tiny_run, tmp_path):
    """What it computes depends on the processor's instructions."""
    sizes = []
    for quantization in ("", "int8"):
        folder, logged = tmp_path / f"out{quantization}", []
        export(load_trained(tiny_run), str(folder), quantization, logged.append)
        assert "tried on 100 test rows" in logged[0]
        sizes.append((folder / "model.bin").stat().st_size)
    assert sizes[1] < 0.5 * sizes[0]


def translated(folder: Path, lines: list[str]) -> list[str]:
    """What the lines of Python in the card make of these lines."""
    (loader,) = re.findall(
        r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    done = subprocess.run(
        [sys.executable, "-c", loader],
        cwd=folder,
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=HANGS,
        env={**os.environ, "PYTHONPATH": "", "PYTHONIOENCODING": "gbk"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_empty_translation_stays_empty(tiny_run, tmp_path):
    """With a model that ends each one at once."""
    logged, trained = [], load_trained(tiny_run)
    trained.model.output.bias[special_ids(trained.target_tokenizer)["eos"]] += 1000
    export(trained, str(tmp_path / "out"), "", logged.append)
    assert "100 outputs are identical" in logged[0]


def with_gelu(model):
    for layer in [*model.transformer.encoder.layers, *model.transformer.decoder.layers]:
        layer.activation = torch.nn.functional.gelu
        layer.activation_relu_or_gelu = 2  # of the encoder's fast path in PyTorch


def without_a_norm(model):
    model.transformer.encoder.norm = torch.nn.Identity()


def scaled_differently(model):
    encode = model.encode
    model.encode = lambda *arguments: encode(*arguments) * 1.1


@pytest.mark.parametrize("change", [with_gelu, without_a_norm, scaled_differently])
@pytest.mark.parametrize("data_are_there", [True, False])
def test_a_model_that_ctranslate2_computes_otherwise_is_refused(
    tiny_run, tmp_path, change, data_are_there
):
    trained = load_trained(tiny_run)
    change(trained.model)
    if not data_are_there:
        trained.config = trained.config | {"data": str(tmp_path / "gone")}
    with pytest.raises(UserError, match=r"the original model\.py alone; nothing is exported"):
        export(trained, str(tmp_path / "out"), "int8", print)
    assert not list(tmp_path.iterdir())


def test_without_its_data_a_run_is_compared_on_made_up_sources(tiny_run, tmp_path):
    logged, trained = [], load_trained(tiny_run)
    trained.config = trained.config | {"data": str(tmp_path / "gone")}
    export(trained, str(tmp_path / "out"), "", logged.append)
    line = r"tried on 200 made-up sources, .*gone does not exist.*: (\d+) outputs are identical"
    assert int(re.match(line, logged[0])[1]) >= 195
    assert "BLEU" not in logged[0]


def test_an_export_that_fails_leaves_nothing(tiny_run, tmp_path, monkeypatch):
    def break_off(*_):
        raise RuntimeError("no")

    monkeypatch.setattr("tools.serving.export.write_card", break_off)  # the last file
    with pytest.raises(RuntimeError, match="no"):
        export(load_trained(tiny_run), str(tmp_path / "out"), "", print)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("asked", [dict(serve=True), dict(export="out")])
def test_several_processes_and_texts_are_refused(asked, monkeypatch):
    config = Config(**asked)
    config.text = ["一"]
    with pytest.raises(UserError, match="--serve and --export take no text"):
        translate(config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    config.text = []
    with pytest.raises(UserError, match="--serve and --export take one process; start"):
        translate(config)


def test_the_card_asks_for_as_many_tokens_as_the_model_has_places(tiny_run, tmp_path):
    trained = load_trained(tiny_run)
    for places in (64, 512, 1024):
        trained.model.config = replace(trained.model.config, max_length=places)
        write_card(trained, "tried", tmp_path)
        card = (tmp_path / "README.md").read_text(encoding="utf-8")
        assert re.search(rf"max_decoding_length={places}\b", card)
        assert re.search(rf"max_input_length={places}\b", card)


def onto_a_mount_point(*_):
    raise OSError(errno.EBUSY, "Device or resource busy")


@pytest.mark.parametrize(
    "folder, message",
    [
        (".", "exists already"),
        ("/proc/out", "cannot write to /proc"),
        ("mount", "cannot make .*/mount: Device or resource busy; name a new folder"),
    ],
)
def test_a_folder_that_cannot_be_is_one_line(tiny_run, tmp_path, monkeypatch, folder, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work.txt").touch()
    monkeypatch.setattr(Path, "replace", onto_a_mount_point)
    with pytest.raises(UserError, match=message):
        export(load_trained(tiny_run), folder, "", print)
    assert [file.name for file in tmp_path.iterdir()] == ["work.txt"]


def test_a_package_that_is_missing_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    message = r"--export needs ctranslate2; pip install -r requirements-extras\.txt$"
    with pytest.raises(UserError, match=message):
        export(None, "new", "", print)
