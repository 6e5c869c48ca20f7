"""Contestant "marian": Hugging Face's MarianMTModel with scaled-dot-product attention, in a plain loop over length buckets.

The loop uses the project's own `BucketSampler`, so batches are the same as ours; the model, its loss over padded logits and
Adam are what the library's user writes. `--variant tuned` adds one line, products by oneDNN (on a GPU TF32, and bf16 by
autocast); its caller adds the allocator's settings. To decode: `generate`, sentences sorted by length, its own cache.
Not like for like: Marian has no layer norm behind the last layer; when it gets trained weights it is given ours.
"""

import math

import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel

from benchmarks.peers.contest import (
    LABEL_SMOOTHING,
    LEARNING_RATE,
    TrainingClock,
    run_peer,
    sorted_batches,
    time_decoding,
)
from benchmarks.peers.handout import cut, padded
from data import BucketSampler

IGNORED = -100  # the label of a padded place


def build(sizes: dict, corpus) -> MarianMTModel:
    """A model of these sizes."""
    source, target = corpus.source_ids, corpus.target_ids
    dropout = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), sizes["dropout"])
    config = MarianConfig(
        vocab_size=corpus.source_vocab, decoder_vocab_size=corpus.target_vocab, share_encoder_decoder_embeddings=False,
        d_model=sizes["d_model"], encoder_layers=sizes["num_encoder_layers"], decoder_layers=sizes["num_decoder_layers"],
        encoder_attention_heads=sizes["nhead"], decoder_attention_heads=sizes["nhead"],
        encoder_ffn_dim=sizes["dim_feedforward"], decoder_ffn_dim=sizes["dim_feedforward"], activation_function="relu",
        **dropout, max_position_embeddings=512,
        scale_embedding=True, tie_word_embeddings=False, attn_implementation="sdpa", forced_eos_token_id=None,
        pad_token_id=source["pad"], bos_token_id=target["bos"], eos_token_id=target["eos"],
        decoder_start_token_id=target["bos"],
    )  # fmt: skip
    return MarianMTModel(config)


def train(task, corpus) -> None:
    """Batches of similar length, loss over all places, the padded ones ignored."""
    tuned = task.variant == "tuned"
    if tuned:
        torch.set_float32_matmul_precision("medium")
    source, target = corpus.source_ids, corpus.target_ids
    model = build(task.sizes, corpus).to(task.device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORED, label_smoothing=LABEL_SMOOTHING)
    clock = TrainingClock(task.seconds)
    for batch in BucketSampler(corpus.lengths, task.tokens_per_batch):
        sources = [[*corpus.train[row][0].tolist(), source["eos"]] for row in batch]
        targets = [[target["bos"], *corpus.train[row][1].tolist(), target["eos"]] for row in batch]
        clock.step(sum(map(len, sources)), sum(map(len, targets)) - len(targets))
        src = padded(sources, source["pad"], max(map(len, sources))).to(task.device)
        tgt = padded(targets, target["pad"], max(map(len, targets))).to(task.device)
        labels = tgt[:, 1:].masked_fill(tgt[:, 1:] == target["pad"], IGNORED)
        attended = (src != source["pad"]).long()
        with torch.autocast("cuda", torch.bfloat16, enabled=tuned and task.device != "cpu"):
            logits = model(src, attention_mask=attended, decoder_input_ids=tgt[:, :-1], use_cache=False).logits
            loss = criterion(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


def load_weights(model: MarianMTModel, folder: str) -> None:
    """Fill it with the project's trained weights: the same computation, up to rounding."""
    ours = torch.load(f"{folder}/weights.pt")
    width = model.config.d_model

    def fill(part: nn.Module, name: str) -> None:
        part.load_state_dict({key: ours[f"{name}.{key}"] for key in ("weight", "bias")})

    def fill_attention(part: nn.Module, name: str) -> None:
        for index, projection in enumerate((part.q_proj, part.k_proj, part.v_proj)):
            rows = slice(index * width, (index + 1) * width)
            weight, bias = ours[f"{name}.in_proj_weight"][rows], ours[f"{name}.in_proj_bias"][rows]
            projection.load_state_dict({"weight": weight, "bias": bias})
        fill(part.out_proj, f"{name}.out_proj")

    for side, embedding in (("encoder", "source_embedding"), ("decoder", "target_embedding")):
        stack = getattr(model.model, side)
        stack.embed_tokens.weight.data.copy_(ours[f"{embedding}.weight"])
        stack.embed_positions.weight.data.copy_(interleaved_positions(stack.embed_positions.weight.shape))
        for index, layer in enumerate(stack.layers):
            name = f"transformer.{side}.layers.{index}"
            fill_attention(layer.self_attn, f"{name}.self_attn")
            norms = [layer.self_attn_layer_norm, layer.final_layer_norm]
            if side == "decoder":
                fill_attention(layer.encoder_attn, f"{name}.multihead_attn")
                norms.insert(1, layer.encoder_attn_layer_norm)
            for number, norm in enumerate(norms, 1):
                fill(norm, f"{name}.norm{number}")
            fill(layer.fc1, f"{name}.linear1")
            fill(layer.fc2, f"{name}.linear2")
        last = nn.LayerNorm(width)  # nn.Transformer has one more behind its last layer
        fill(last, f"transformer.{side}.norm")
        stack.layers[-1].final_layer_norm = nn.Sequential(stack.layers[-1].final_layer_norm, last)
    model.lm_head.weight.data.copy_(ours["output.weight"])
    model.final_logits_bias.copy_(ours["output.bias"])


def interleaved_positions(shape) -> torch.Tensor:
    """Sine and cosine in turns, as the paper has them; Marian has all sines first."""
    length, width = shape
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10000) / width))
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)  # (length, D)


@torch.inference_mode()
def decode(task, corpus) -> None:
    """`generate`, greedy."""
    source, target = corpus.source_ids, corpus.target_ids
    model = build(task.sizes, corpus).eval()
    if task.weights:
        load_weights(model, task.weights)
    model.to(task.device)

    def once() -> list[list[int]]:
        outputs = [[]] * len(corpus.test)
        for rows in sorted_batches(corpus, task.batch):
            sources = [[*corpus.test[row][0].tolist(), source["eos"]] for row in rows]
            src = padded(sources, source["pad"], len(sources[0])).to(task.device)
            limits = [task.length or len(ids) * 3 // 2 + 10 for ids in sources]
            generated = model.generate(
                input_ids=src, attention_mask=(src != source["pad"]).long(), num_beams=1, do_sample=False,
                min_new_tokens=task.length or None, max_new_tokens=max(limits), use_cache=True,
            )  # fmt: skip
            for row, ids, limit in zip(rows, generated[:, 1:].tolist(), limits):  # the first is the begin token
                outputs[row] = cut(ids, limit, target["eos"])
        return outputs

    time_decoding(task, corpus, once)


if __name__ == "__main__":
    run_peer(train, decode)
