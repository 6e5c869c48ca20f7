import json

import numpy as np
from onnxruntime import InferenceSession
from transformers import AutoTokenizer


def greedy(encoder, decoder, src, bos, eos, longest):
    """Source ids with their end → target ids without theirs."""
    src_pad = np.zeros((1, len(src)), bool)  # True: padding
    source_keys, source_values = encoder.run(None, {"src": np.array([src]), "src_pad": src_pad})
    layers, _, heads, _, width = source_keys.shape
    keys = values = np.zeros((layers, 1, heads, 0, width), np.float32)
    tokens = [bos]
    while (len(tokens) < 2 or tokens[-1] != eos) and len(tokens) <= min(
        len(src) * 3 // 2 + 10, longest
    ):
        inputs = {"tokens": np.array(tokens[-1:]), "own_keys": keys, "own_values": values}
        inputs |= {"source_keys": source_keys, "source_values": source_values, "src_pad": src_pad}
        logits, keys, values = decoder.run(None, inputs)
        tokens.append(int(logits.argmax()))
    return [token for token in tokens[1:] if token != eos]


if __name__ == "__main__":
    source, target = (
        AutoTokenizer.from_pretrained(".", subfolder=side) for side in ("source", "target")
    )
    encoder, decoder = InferenceSession("encoder.onnx"), InferenceSession("decoder.onnx")
    config = json.load(open("config.json", encoding="utf-8"))
    plain = dict(add_special_tokens=False, split_special_tokens=True)  # "<s>" in a text is text
    for line in open(0, encoding="utf-8-sig", newline="\n"):
        line = " ".join(line.split())
        src = [
            *source.encode(line, **plain)[: config["max_length"] - 1],
            config["source_eos_token_id"],
        ]
        ids = greedy(
            encoder,
            decoder,
            src,
            config["bos_token_id"],
            config["eos_token_id"],
            config["max_length"],
        )
        print(target.decode(ids, skip_special_tokens=True) if line else "")
