"""Write a model's weights for CTranslate2, a decoder in C++ that computes the same."""

from pathlib import Path

import numpy as np

from model import Translator


def convert(
    model: Translator,
    source_words: list[str],
    target_words: list[str],
    folder: Path,
    quantization: str | None = None,
) -> None:
    """Write a CTranslate2 model. The words are those that `name_special` returns."""
    from ctranslate2.specs import TransformerSpec

    sizes = model.config
    # Copies, because CTranslate2 scales them in place when it quantises.
    weights = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    layers = (sizes.num_encoder_layers, sizes.num_decoder_layers)
    # nn.Transformer has a norm after the last layer in either order; only the specification of
    # pre_norm has a place for it. The order of the layers is set below.
    spec = TransformerSpec.from_config(layers, sizes.nhead, pre_norm=True)
    for side, vocabulary in (("encoder", "source"), ("decoder", "target")):
        stack = getattr(spec, side)
        stack.pre_norm = sizes.norm_first
        embeddings = stack.embeddings[0] if side == "encoder" else stack.embeddings
        embeddings.weight = weights[f"{vocabulary}_embedding.weight"]
        stack.position_encodings.encodings = model.positions.numpy().copy()
        fill(stack.layer_norm, weights, f"transformer.{side}.norm")
        for index, layer in enumerate(stack.layer):
            fill_layer(layer, weights, f"transformer.{side}.layers.{index}", sizes.d_model)
    fill(spec.decoder.projection, weights, "output")
    spec.register_source_vocabulary(source_words)
    spec.register_target_vocabulary(target_words)
    spec.config.bos_token = "<s>"
    spec.config.eos_token = "</s>"
    spec.config.unk_token = "<pad>"
    spec.config.decoder_start_token = "<s>"
    spec.config.add_source_eos = True
    spec.validate()
    spec.optimize(quantization)
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))


def fill_layer(layer, weights: dict[str, np.ndarray], name: str, width: int) -> None:
    """One encoder or decoder layer."""
    attention = layer.self_attention
    # Query, key and value in one (3D, D) matrix, in both programs.
    attention.linear[0].weight = weights[f"{name}.self_attn.in_proj_weight"]
    attention.linear[0].bias = weights[f"{name}.self_attn.in_proj_bias"]
    fill(attention.linear[1], weights, f"{name}.self_attn.out_proj")
    norms = [attention.layer_norm, layer.ffn.layer_norm]
    if hasattr(layer, "attention"):
        cross = layer.attention
        weight = weights[f"{name}.multihead_attn.in_proj_weight"]
        bias = weights[f"{name}.multihead_attn.in_proj_bias"]
        cross.linear[0].weight, cross.linear[0].bias = weight[:width], bias[:width]
        cross.linear[1].weight, cross.linear[1].bias = weight[width:], bias[width:]
        fill(cross.linear[2], weights, f"{name}.multihead_attn.out_proj")
        norms.insert(1, cross.layer_norm)
    for number, norm in enumerate(norms, 1):  # norm1, norm2 and, in a decoder, norm3
        fill(norm, weights, f"{name}.norm{number}")
    fill(layer.ffn.linear_0, weights, f"{name}.linear1")
    fill(layer.ffn.linear_1, weights, f"{name}.linear2")


def fill(part, weights: dict[str, np.ndarray], name: str) -> None:
    """Weight and bias of a linear layer or a norm."""
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    if hasattr(part, "gamma"):
        part.gamma, part.beta = weight, bias
    else:
        part.weight, part.bias = weight, bias


def name_special(words: list[str], special: dict[str, int]) -> list[str]:
    """A vocabulary in which the special tokens have the names that `convert` gives them."""
    words = list(words)
    words[special["pad"]] = "<pad>"
    words[special["bos"]] = "<s>"
    words[special["eos"]] = "</s>"
    return words
