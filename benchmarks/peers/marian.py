"""Contestant "marian": Hugging Face's MarianMTModel with scaled-dot-product attention, in a plain loop over length buckets.

The loop uses the project's own `BucketSampler`, so batches are the same as ours; the model, its loss over padded logits and
Adam are what the library's user writes. `--variant tuned` adds one line, products by oneDNN (on a GPU TF32, and bf16 by
autocast); its caller adds the allocator's settings. To decode: `generate`, sentences sorted by length, its own cache.
Not like for like: Marian has no layer norm behind the last layer, and decodes with random weights of its own.
"""

import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel

from benchmarks.peers.contest import LABEL_SMOOTHING, LEARNING_RATE, TrainingClock, run_peer, time_decoding
from benchmarks.peers.handout import padded
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


@torch.inference_mode()
def decode(task, corpus) -> None:
    """`generate`, greedy, with weights of its own: they change nothing in the time of outputs of a given length."""
    if not task.length:
        raise RuntimeError("it has no trained weights, and so takes no part at real lengths")
    source, model = corpus.source_ids, build(task.sizes, corpus).eval().to(task.device)

    def once() -> list[list[int]]:
        outputs = [[]] * len(corpus.test)
        order = sorted(range(len(corpus.test)), key=lambda row: -len(corpus.test[row][0]))
        for rows in (order[first : first + task.batch] for first in range(0, len(order), task.batch)):
            sources = [[*corpus.test[row][0].tolist(), source["eos"]] for row in rows]
            src = padded(sources, source["pad"], len(sources[0])).to(task.device)
            generated = model.generate(
                input_ids=src, attention_mask=(src != source["pad"]).long(), num_beams=1, do_sample=False,
                min_new_tokens=task.length, max_new_tokens=task.length, use_cache=True,
            )  # fmt: skip
            for row, ids in zip(rows, generated[:, 1:].tolist()):  # the first is the begin token
                outputs[row] = ids
        return outputs

    time_decoding(task, corpus, once)


if __name__ == "__main__":
    run_peer(train, decode)
