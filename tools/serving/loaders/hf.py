import json

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

source, target = (
    AutoTokenizer.from_pretrained(".", subfolder=side) for side in ("source", "target")
)
config, weights = json.load(open("config.json", encoding="utf-8")), load_file("model.safetensors")
plain = dict(add_special_tokens=False, split_special_tokens=True)  # "<s>" in a text is text
layers = config["num_encoder_layers"], config["num_decoder_layers"]
options = dict(
    dim_feedforward=config["dim_feedforward"], norm_first=config["norm_first"], batch_first=True
)
model = torch.nn.Transformer(config["d_model"], config["nhead"], *layers, **options).eval()
model.load_state_dict(
    {name[12:]: weight for name, weight in weights.items() if name.startswith("transformer.")}
)


def embed(side, ids):
    return (
        weights[f"{side}_embedding.weight"][ids] * config["d_model"] ** 0.5
        + weights["positions"][: len(ids)]
    )


@torch.inference_mode()
def translate(line):
    src = [*source.encode(line, **plain)[: config["max_length"] - 1], config["source_eos_token_id"]]
    tgt = [config["bos_token_id"]]
    memory = model.encoder(embed("source", src))
    longest = min(len(src) * 3 // 2 + 10, config["max_length"])
    while (len(tgt) < 2 or tgt[-1] != config["eos_token_id"]) and len(tgt) <= longest:
        mask = model.generate_square_subsequent_mask(len(tgt))
        hidden = model.decoder(embed("target", tgt), memory, tgt_mask=mask)
        logits = weights["target_embedding.weight"] @ hidden[-1] + weights["output.bias"]
        tgt.append(int(logits.argmax()))
    return target.decode(tgt, skip_special_tokens=True)


for line in open(0, encoding="utf-8-sig", newline="\n"):
    line = " ".join(line.split())
    print(translate(line) if line else "")
