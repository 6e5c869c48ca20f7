"""Contestant "opennmt": OpenNMT-py 3.5.1, its own trainer.

It asks for torch < 2.3, spacy and fasttext: it runs on today's torch when `torch.load` reads pickles again (`contest.OLD_LOAD`),
and without the other two, which only text transforms use that are not used here.
Not like for like: the tokens of a batch count the padded target; layer norm stands before each part (it has no other way); the
source has no end token (it is counted all the same).
"""

import sys
import types

from benchmarks.peers import contest


def train(task, corpus) -> None:
    """`onmt_train`, told the time by us."""
    import torch

    torch.set_num_threads(task.threads)
    for absent in ("spacy", "fasttext"):
        sys.modules[absent] = types.ModuleType(absent)
    from onmt.bin.train import main
    from onmt.trainer import Trainer

    clock, accumulate = contest.TrainingClock(task.seconds), Trainer._gradient_accumulation

    def timed_step(self, batches, *rest):
        source = sum(int(batch["srclen"].sum()) + len(batch["srclen"]) for batch in batches)
        target = sum(int((batch["tgt"][:, 1:, 0] != self.train_loss.padding_idx).sum()) for batch in batches)
        clock.step(source, target)
        return accumulate(self, batches, *rest)

    Trainer._gradient_accumulation = timed_step
    words = ["onmt_train", "-overwrite"]
    for option, value in settings(task, corpus).items():
        words += [f"-{option}"] if value is True else [f"-{option}", str(value)]
    sys.argv = words
    main()


def settings(task, corpus) -> dict:
    """The model's sizes and the options of a training run; the corpus goes into a file, for it has no flag."""
    folder, sizes, vocabulary = contest.work_folder(corpus, "opennmt"), task.sizes, corpus.folder / "opennmt"
    sides = {f"path_{side}": str(corpus.folder / f"train.{side}") for side in ("src", "tgt")} | {"transforms": []}
    (folder / "settings.yaml").write_text(f"data: {{corpus: {sides}}}\n".replace("'", '"'), encoding="utf-8")
    return {
        "config": folder / "settings.yaml", "save_model": folder / "model", "save_data": folder / "data",
        "src_vocab": f"{vocabulary}.src", "tgt_vocab": f"{vocabulary}.tgt", "src_vocab_size": corpus.source_vocab,
        "tgt_vocab_size": corpus.target_vocab, "vocab_size_multiple": 1,
        "encoder_type": "transformer", "decoder_type": "transformer", "position_encoding": True,
        "enc_layers": sizes["num_encoder_layers"], "dec_layers": sizes["num_decoder_layers"], "heads": sizes["nhead"],
        "hidden_size": sizes["d_model"], "word_vec_size": sizes["d_model"], "transformer_ff": sizes["dim_feedforward"],
        "dropout": sizes["dropout"], "attention_dropout": sizes["dropout"], "label_smoothing": contest.LABEL_SMOOTHING,
        "optim": "adam", "adam_beta2": 0.98, "learning_rate": contest.LEARNING_RATE, "decay_method": "none",
        "normalization": "tokens", "batch_type": "tokens", "batch_size": task.tokens_per_batch,
        "batch_size_multiple": 1, "accum_count": 1, "bucket_size": 20000, "num_workers": 0, "train_steps": 10**6,
        "save_checkpoint_steps": 10**6, "valid_steps": 10**6, "report_every": 50, "world_size": 1, "seed": 1,
    }  # fmt: skip


if __name__ == "__main__":
    contest.run_peer(train)
