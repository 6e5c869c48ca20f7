"""Contestant "fairseq": fairseq 0.12 (package fairseq-fixed 0.12.3.1), its own trainer and its own generator.

It runs on today's torch when `torch.load` reads pickles again.
Not like for like: its --max-tokens 4096 counts the padded tokens of either side, as ours do. It has no layer norm behind the
last layer.
"""

import sys
import time
from argparse import Namespace

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


def binarise(corpus):
    """`fairseq-preprocess`, once; → its folder."""
    folder = work_folder(corpus, "fairseq")
    if not (folder / "data" / "test.src-tgt.tgt.idx").exists():
        from fairseq_cli.preprocess import cli_main

        text = corpus.folder
        sys.argv = ["fairseq-preprocess", "-s", "src", "-t", "tgt", "--srcdict", f"{text}/dict.src.txt", "--tgtdict",
                    f"{text}/dict.tgt.txt", "--trainpref", f"{text}/train", "--testpref", f"{text}/test", "--destdir",
                    f"{folder}/data", "--workers", "1"]  # fmt: skip
        cli_main()
    return folder


def start_training(task, corpus, updates: int) -> None:
    """`fairseq-train`"""
    import torch

    restore_torch_load()
    torch.set_num_threads(task.threads)
    folder = binarise(corpus)
    from fairseq_cli.train import cli_main

    sizes = []
    for side in ("encoder", "decoder"):
        sizes += [f"--{side}-embed-dim", LAB["d_model"], f"--{side}-attention-heads", LAB["nhead"],
                  f"--{side}-layers", LAB[f"num_{side}_layers"], f"--{side}-ffn-embed-dim", LAB["dim_feedforward"]]  # fmt: skip
    words = ["fairseq-train", folder / "data", "--cpu", "-s", "src", "-t", "tgt", "--arch", "transformer", *sizes,
             "--dropout", DROPOUT, "--attention-dropout", DROPOUT, "--optimizer", "adam", "--adam-betas", "(0.9,0.98)",
             "--lr", LEARNING_RATE, "--criterion", "label_smoothed_cross_entropy", "--label-smoothing", LABEL_SMOOTHING,
             "--max-tokens", TOKENS_PER_BATCH, "--required-batch-size-multiple", 1, "--max-update", updates,
             "--log-interval", 50, "--log-format", "simple", "--disable-validation", "--no-epoch-checkpoints",
             "--save-dir", folder / "model", "--num-workers", 0, "--seed", 1]  # fmt: skip
    sys.argv = list(map(str, words))
    cli_main()


def train(task, corpus) -> None:
    """Its own trainer, told the time by us."""
    from fairseq.trainer import Trainer

    clock, train_step = TrainingClock(task.seconds), Trainer.train_step

    def timed_step(self, samples, *rest, **options):
        source = sum(int(sample["net_input"]["src_lengths"].sum()) for sample in samples)  # with the end token
        clock.step(source, sum(sample["ntokens"] for sample in samples))
        return train_step(self, samples, *rest, **options)

    Trainer.train_step = timed_step
    start_training(task, corpus, updates=10**6)


def decode(task, corpus) -> None:
    """`fairseq-generate` with the weights of three training steps; its own post-processing and printing are not timed."""
    folder = work_folder(corpus, "fairseq")
    checkpoint = folder / "model" / "checkpoint_last.pt"
    if not checkpoint.exists():
        start_training(task, corpus, updates=3)
    import torch

    restore_torch_load()
    torch.set_num_threads(task.threads)
    from fairseq import checkpoint_utils

    models, _, fairseq_task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)])
    fairseq_task.load_dataset("test")
    for model in models:
        model.eval().prepare_for_inference_(Namespace(common=Namespace(), generation=Namespace()))
    lengths = {"min_len": task.length, "max_len_a": 0, "max_len_b": task.length} if task.length else {"max_len_a": 1.5}
    generator = fairseq_task.build_generator(models, Namespace(beam=1, **lengths))
    words = fairseq_task.target_dictionary

    def once():
        outputs = [[]] * len(fairseq_task.dataset("test"))  # always all of them, whatever --rows says
        batches = fairseq_task.get_batch_iterator(
            fairseq_task.dataset("test"), max_sentences=task.batch, required_batch_size_multiple=1
        ).next_epoch_itr(shuffle=False)
        begun = time.perf_counter()
        for sample in batches:
            found = fairseq_task.inference_step(generator, models, sample)
            for row, hypotheses in zip(sample["id"].tolist(), found):
                outputs[row] = hypotheses[0]["tokens"][:-1].tolist()  # without the end token
        seconds = time.perf_counter() - begun
        names = ([words[id] for id in row] for row in outputs)
        return seconds, [[int(name[1:]) if name[0] == "t" else 0 for name in row] for row in names]

    time_decoding(task, corpus, once)


if __name__ == "__main__":
    run_peer(train, decode)
