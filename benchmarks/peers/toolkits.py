"""Contestants "opennmt" (OpenNMT-py 3.5.1) and "fairseq" (0.12, package fairseq-fixed 0.12.3.1), each by its own trainer.

Both run on today's torch when `torch.load` reads pickles again (`contest.OLD_LOAD`). OpenNMT-py asks for spacy and fasttext too,
which only text transforms use that are not used here.
Not like for like: a batch of OpenNMT-py is measured by its padded target, its layer norms stand before each part (it has no other
way), its source has no end token (it is counted all the same). fairseq counts the padded tokens of either side, as ours do; it
has no layer norm behind the last layer.
"""

import sys
import types
from collections.abc import Callable

import torch

from benchmarks.peers import contest


def opennmt(task, corpus) -> None:
    """`onmt_train`. The corpus goes into a file, for it has no flag."""
    for absent in ("spacy", "fasttext"):
        sys.modules[absent] = types.ModuleType(absent)
    from onmt.bin.train import main
    from onmt.trainer import Trainer

    folder, sizes, vocabulary = corpus.folder / "peers/opennmt", task.sizes, corpus.folder / "opennmt"
    folder.mkdir(parents=True, exist_ok=True)
    sides = {f"path_{side}": str(corpus.folder / f"train.{side}") for side in ("src", "tgt")} | {"transforms": []}
    (folder / "settings.yaml").write_text(f"data: {{corpus: {sides}}}\n".replace("'", '"'), encoding="utf-8")
    settings = {
        "config": folder / "settings.yaml", "save_model": folder / "model", "save_data": folder / "data",
        "src_vocab": f"{vocabulary}.src", "tgt_vocab": f"{vocabulary}.tgt", "src_vocab_size": corpus.source_vocab,
        "tgt_vocab_size": corpus.target_vocab, "vocab_size_multiple": 1,
        "encoder_type": "transformer", "decoder_type": "transformer",
        "enc_layers": sizes["num_encoder_layers"], "dec_layers": sizes["num_decoder_layers"], "heads": sizes["nhead"],
        "hidden_size": sizes["d_model"], "word_vec_size": sizes["d_model"], "transformer_ff": sizes["dim_feedforward"],
        "dropout": sizes["dropout"], "attention_dropout": sizes["dropout"], "label_smoothing": contest.LABEL_SMOOTHING,
        "optim": "adam", "adam_beta2": 0.98, "learning_rate": contest.LEARNING_RATE, "decay_method": "none",
        "normalization": "tokens", "batch_type": "tokens", "batch_size": task.tokens_per_batch,
        "batch_size_multiple": 1, "accum_count": 1, "bucket_size": 20000, "num_workers": 0, "train_steps": 10**6,
        "save_checkpoint_steps": 10**6, "valid_steps": 10**6, "report_every": 50, "world_size": 1, "seed": 1,
    }  # fmt: skip

    def tokens(trainer, batches) -> tuple[int, int]:
        source = sum(int(batch["srclen"].sum()) + len(batch["srclen"]) for batch in batches)
        return source, sum(int((batch["tgt"][:, 1:, 0] != trainer.train_loss.padding_idx).sum()) for batch in batches)

    words = ["onmt_train", "-overwrite", "-position_encoding"]
    words += [word for name, value in settings.items() for word in (f"-{name}", value)]
    run(task, main, words, Trainer, "_gradient_accumulation", tokens)


def fairseq(task, corpus) -> None:
    """`fairseq-preprocess`, once, and `fairseq-train`."""
    from fairseq.trainer import Trainer
    from fairseq_cli import preprocess, train

    folder, text, sizes = corpus.folder / "peers/fairseq", corpus.folder, task.sizes
    if not (folder / "data" / "test.src-tgt.tgt.idx").exists():
        sys.argv = ["fairseq-preprocess", "-s", "src", "-t", "tgt", "--srcdict", f"{text}/dict.src.txt", "--tgtdict",
                    f"{text}/dict.tgt.txt", "--trainpref", f"{text}/train", "--testpref", f"{text}/test", "--destdir",
                    f"{folder}/data", "--workers", "1"]  # fmt: skip
        preprocess.cli_main()
    words = ["fairseq-train", folder / "data", "--cpu", "-s", "src", "-t", "tgt", "--arch", "transformer"]
    for side in ("encoder", "decoder"):
        words += [f"--{side}-embed-dim", sizes["d_model"], f"--{side}-attention-heads", sizes["nhead"]]
        words += [f"--{side}-layers", sizes[f"num_{side}_layers"], f"--{side}-ffn-embed-dim", sizes["dim_feedforward"]]
    words += ["--dropout", sizes["dropout"], "--attention-dropout", sizes["dropout"], "--optimizer", "adam",
              "--adam-betas", "(0.9,0.98)", "--lr", contest.LEARNING_RATE, "--criterion", "label_smoothed_cross_entropy",
              "--label-smoothing", contest.LABEL_SMOOTHING, "--max-tokens", task.tokens_per_batch,
              "--required-batch-size-multiple", 1, "--max-update", 10**6, "--log-interval", 50, "--log-format", "simple",
              "--disable-validation", "--no-epoch-checkpoints", "--save-dir", folder / "model", "--num-workers", 0,
              "--seed", 1]  # fmt: skip

    def tokens(trainer, samples) -> tuple[int, int]:
        source = sum(int(sample["net_input"]["src_lengths"].sum()) for sample in samples)  # with the end token
        return source, sum(sample["ntokens"] for sample in samples)

    run(task, train.cli_main, words, Trainer, "train_step", tokens)


def run(task, main: Callable, words: list, trainer: type, method: str, tokens: Callable) -> None:
    """The toolkit's `main` with these words, told the time by us: `method` of its trainer takes a step over batches."""
    torch.set_num_threads(task.threads)
    clock, step = contest.TrainingClock(task.seconds), getattr(trainer, method)

    def timed_step(self, batches, *rest, **options):
        clock.step(*tokens(self, batches))
        return step(self, batches, *rest, **options)

    setattr(trainer, method, timed_step)
    sys.argv = list(map(str, words))
    main()


if __name__ == "__main__":
    contest.run_peer(opennmt, fairseq)
