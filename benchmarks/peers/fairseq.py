"""Contestant "fairseq": fairseq 0.12 (package fairseq-fixed 0.12.3.1), its own trainer.

It runs on today's torch when `torch.load` reads pickles again (`contest.OLD_LOAD`).
Not like for like: its --max-tokens counts the padded tokens of either side, as ours do. It has no layer norm behind the last
layer.
"""

import sys

from benchmarks.peers import contest


def train(task, corpus) -> None:
    """`fairseq-train`, told the time by us."""
    import torch
    from fairseq.trainer import Trainer
    from fairseq_cli.train import cli_main

    torch.set_num_threads(task.threads)
    clock, train_step = contest.TrainingClock(task.seconds), Trainer.train_step

    def timed_step(self, samples, *rest, **options):
        source = sum(int(sample["net_input"]["src_lengths"].sum()) for sample in samples)  # with the end token
        clock.step(source, sum(sample["ntokens"] for sample in samples))
        return train_step(self, samples, *rest, **options)

    Trainer.train_step = timed_step
    folder, sizes = binarise(corpus), task.sizes
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
    sys.argv = list(map(str, words))
    cli_main()


def binarise(corpus):
    """`fairseq-preprocess`, once; → its folder."""
    folder, text = contest.work_folder(corpus, "fairseq"), corpus.folder
    if not (folder / "data" / "test.src-tgt.tgt.idx").exists():
        from fairseq_cli.preprocess import cli_main

        sys.argv = ["fairseq-preprocess", "-s", "src", "-t", "tgt", "--srcdict", f"{text}/dict.src.txt", "--tgtdict",
                    f"{text}/dict.tgt.txt", "--trainpref", f"{text}/train", "--testpref", f"{text}/test", "--destdir",
                    f"{folder}/data", "--workers", "1"]  # fmt: skip
        cli_main()
    return folder


if __name__ == "__main__":
    contest.run_peer(train)
