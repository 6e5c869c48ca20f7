"""Contestant "opennmt": OpenNMT-py 3.5.1, its own trainer and its own greedy search.

It asks for torch < 2.3, spacy and fasttext: it runs on today's torch when `torch.load` reads pickles again, and without
the other two, which only text transforms use that are not used here.
Not like for like: 4,096 tokens a batch count the padded target; layer norm stands before each part (it has no other way); the
source has no end token (it is counted all the same).
"""

import importlib
import sys
import time
import types

from benchmarks.peers.contest import (
    DROPOUT,
    LAB,
    LABEL_SMOOTHING,
    LEARNING_RATE,
    TOKENS_PER_BATCH,
    TrainingClock,
    restore_torch_load,
    run_peer,
    time_decoding,
    work_folder,
)


def stub_absent() -> None:
    """Empty modules in the place of those that only text transforms use."""
    for absent in ("spacy", "fasttext"):
        sys.modules[absent] = types.ModuleType(absent)


def command(name: str, settings: dict) -> None:
    """`onmt_train` or `onmt_translate` with these options."""
    restore_torch_load()
    stub_absent()
    words = [f"onmt_{name}"]
    for option, value in settings.items():
        words += [f"-{option}"] if value is True else [f"-{option}", str(value)]
    sys.argv = words
    importlib.import_module(f"onmt.bin.{name}").main()


def training_settings(corpus, steps: int) -> dict:
    """The lab's model and the options of a training run; the corpus goes into a file, for it has no flag."""
    folder = work_folder(corpus, "opennmt")
    parts = {
        "path_src": str(corpus.folder / "train.src"),
        "path_tgt": str(corpus.folder / "train.tgt"),
        "transforms": [],
    }
    (folder / "settings.yaml").write_text(f"data: {{corpus: {parts}}}\n".replace("'", '"'), encoding="utf-8")
    vocabulary = corpus.folder / "opennmt"
    return {
        "config": folder / "settings.yaml", "save_model": folder / "model", "save_data": folder / "data",
        "src_vocab": f"{vocabulary}.src", "tgt_vocab": f"{vocabulary}.tgt", "src_vocab_size": corpus.source_vocab,
        "tgt_vocab_size": corpus.target_vocab, "vocab_size_multiple": 1, "overwrite": True,
        "encoder_type": "transformer", "decoder_type": "transformer", "position_encoding": True,
        "enc_layers": LAB["num_encoder_layers"], "dec_layers": LAB["num_decoder_layers"], "heads": LAB["nhead"],
        "hidden_size": LAB["d_model"], "word_vec_size": LAB["d_model"], "transformer_ff": LAB["dim_feedforward"],
        "dropout": DROPOUT, "attention_dropout": DROPOUT, "label_smoothing": LABEL_SMOOTHING, "optim": "adam",
        "adam_beta2": 0.98, "learning_rate": LEARNING_RATE, "decay_method": "none", "normalization": "tokens",
        "batch_type": "tokens", "batch_size": TOKENS_PER_BATCH, "batch_size_multiple": 1, "accum_count": 1,
        "bucket_size": 20000, "num_workers": 0, "train_steps": steps, "save_checkpoint_steps": steps,
        "valid_steps": 10**6, "report_every": 50, "world_size": 1, "seed": 1,
    }  # fmt: skip


def train(task, corpus) -> None:
    """Its own trainer, told the time by us."""
    import torch

    torch.set_num_threads(task.threads)
    stub_absent()
    from onmt.trainer import Trainer

    clock, accumulate = TrainingClock(task.seconds), Trainer._gradient_accumulation

    def timed_step(self, batches, *rest):
        source = sum(int(batch["srclen"].sum()) + len(batch["srclen"]) for batch in batches)
        target = sum(int((batch["tgt"][:, 1:, 0] != self.train_loss.padding_idx).sum()) for batch in batches)
        clock.step(source, target)
        return accumulate(self, batches, *rest)

    Trainer._gradient_accumulation = timed_step
    command("train", training_settings(corpus, steps=10**6))


def decode(task, corpus) -> None:
    """`onmt_translate` with the weights of three training steps."""
    import torch

    torch.set_num_threads(task.threads)
    folder = work_folder(corpus, "opennmt")
    if not (folder / "model_step_3.pt").exists():
        command("train", training_settings(corpus, steps=3))
    stub_absent()
    from onmt.inference_engine import InferenceEnginePY

    translate = InferenceEnginePY._translate
    lines = (corpus.folder / "test.src").read_text(encoding="utf-8").splitlines(keepends=True)[: len(corpus.test)]
    (folder / "test.src").write_text("".join(lines), encoding="utf-8")

    def timed_translate(self, batches):
        found = []

        def once():
            begun = time.perf_counter()
            found[:] = translate(self, batches)
            rows = [row[0].split() for row in found[1]]
            return time.perf_counter() - begun, [
                [int(word[1:]) if word[0] == "t" else 0 for word in row] for row in rows
            ]

        time_decoding(task, corpus, once, warm=False)
        return found

    InferenceEnginePY._translate = timed_translate
    limits = {"min_length": task.length, "max_length": task.length, "max_length_ratio": 0} if task.length else {}
    command("translate", {
        "model": folder / "model_step_3.pt", "src": folder / "test.src", "output": folder / "test.out", "beam_size": 1,
        "batch_size": task.batch, "batch_type": "sents", **limits,
    })  # fmt: skip


if __name__ == "__main__":
    run_peer(train, decode)
