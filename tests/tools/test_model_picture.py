"""The pictures in docs/ are those that the command draws."""

import re
from xml.etree import ElementTree

import pytest
from conftest import ROOT

from model import ModelConfig
from tools.model_picture import WORDS, picture

FILES = {"en": "model.svg", "zh": "model.zh-CN.svg"}


@pytest.mark.parametrize("language", WORDS)
def test_the_picture_is_the_one_that_the_command_draws(language):
    drawn = picture(ModelConfig(source_vocab=16_000, target_vocab=16_000), language)
    committed = (ROOT / "docs" / FILES[language]).read_text(encoding="utf-8")
    assert committed == drawn, "run python -m tools.model_picture, as its first lines say"


def test_the_sizes_are_those_of_the_model():
    sizes = ModelConfig(7, 9, d_model=12, nhead=3, num_encoder_layers=4, dim_feedforward=5)
    tree = ElementTree.fromstring(picture(sizes, "en"))
    texts = [element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("12 → 5 → 12") == 2 and "12 → 9" in texts
    assert "self-attention, 3 heads" in texts and "logits  (B, T, 9)" in texts
    assert "encoder × 4" in texts and "decoder × 3" in texts
    assert not re.search(r"256|1,024", "".join(texts))
