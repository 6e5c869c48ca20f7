"""Contestants "opennmt" (OpenNMT-py 3.5.1) and "fairseq" (0.12, package fairseq-fixed 0.12.3.1), each by its own trainer.

Both run on today's torch when `torch.load` reads pickles again (`contest.OLD_LOAD`). OpenNMT-py asks for spacy and fasttext too,
which only text transforms use that are not used here.
Not like for like: OpenNMT-py's layer norms stand before each part (it has no other way), its source has no end token (it is
counted all the same). fairseq has no layer norm behind the last layer. Both count the padded tokens of the longer side, as ours.

A task with `every` is to learn: at the rates of `variant` (the highest, the steps up to it; then it falls as 1/√step) they train
without end, and every so many steps their own greedy decoder translates valid.src, in the folder `outputs`, into TIME.out there.
"""

import itertools
import math
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.peers import contest
from engine.files import atomic_write


def opennmt(task, corpus) -> None:
    """`onmt_train`. The corpus goes into a file, for it has no flag."""
    for absent in ("spacy", "fasttext"):
        sys.modules[absent] = types.ModuleType(absent)
    from onmt.bin import train, translate
    from onmt.trainer import Trainer

    folder, sizes, vocabulary = (
        corpus.folder / "peers/opennmt",
        task.sizes,
        corpus.folder / "opennmt",
    )
    folder.mkdir(parents=True, exist_ok=True)
    sides = {f"path_{side}": str(corpus.folder / f"train.{side}") for side in ("src", "tgt")} | {
        "transforms": []
    }
    (folder / "settings.yaml").write_text(
        f"data: {{corpus: {sides}}}\n".replace("'", '"'), encoding="utf-8"
    )
    settings = {
        "config": folder / "settings.yaml",
        "save_model": folder / "model",
        "save_data": folder / "data",
        "src_vocab": f"{vocabulary}.src",
        "tgt_vocab": f"{vocabulary}.tgt",
        "src_vocab_size": corpus.source_vocab,
        "tgt_vocab_size": corpus.target_vocab,
        "vocab_size_multiple": 1,
        "encoder_type": "transformer",
        "decoder_type": "transformer",
        "enc_layers": sizes["num_encoder_layers"],
        "dec_layers": sizes["num_decoder_layers"],
        "heads": sizes["nhead"],
        "hidden_size": sizes["d_model"],
        "word_vec_size": sizes["d_model"],
        "transformer_ff": sizes["dim_feedforward"],
        "dropout": sizes["dropout"],
        "attention_dropout": sizes["dropout"],
        "label_smoothing": contest.LABEL_SMOOTHING,
        "optim": "adam",
        "adam_beta2": 0.98,
        "learning_rate": contest.LEARNING_RATE,
        "decay_method": "none",
        "normalization": "tokens",
        "batch_type": "tokens",
        "batch_size": task.tokens_per_batch,
        "batch_size_multiple": 1,
        "accum_count": 1,
        "bucket_size": 20000,
        "num_workers": 0,
        "train_steps": 10**6,
        "save_checkpoint_steps": 10**6,
        "valid_steps": 10**6,
        "report_every": 50,
        "world_size": 1,
        "seed": 1,
    }
    if task.every:
        rate, warmup = map(float, task.variant.split())
        settings |= {
            "decay_method": "noam",
            "learning_rate": rate * math.sqrt(sizes["d_model"] * warmup),
            "warmup_steps": int(warmup),
            "max_grad_norm": 1,
            "save_checkpoint_steps": task.every,
            "keep_checkpoint": 1,
            "save_model": f"{task.outputs}/model",
        }

    def translated(trainer, steps: int, sources: Path) -> str:
        """By its script, from the checkpoint of this step."""
        file = sources.with_name("translated")
        sys.argv = [
            "onmt_translate",
            "-model",
            f"{task.outputs}/model_step_{steps}.pt",
            "-src",
            str(sources),
            "-output",
            str(file),
            "-beam_size",
            "1",
            "-batch_size",
            str(task.batch),
            "-max_length",
            "500",
            "-max_length_ratio",
            "1.5",
        ]
        translate.main()
        return file.read_text()

    def tokens(trainer, batches) -> tuple[int, int]:
        source = sum(int(batch["srclen"].sum()) + len(batch["srclen"]) for batch in batches)
        return source, sum(
            int((batch["tgt"][:, 1:, 0] != trainer.train_loss.padding_idx).sum())
            for batch in batches
        )

    words = ["onmt_train", "-overwrite", "-position_encoding"]
    words += [word for name, value in settings.items() for word in (f"-{name}", value)]
    run(task, train.main, words, Trainer, "_gradient_accumulation", tokens, translated)


def binarise(task, corpus) -> None:
    """`fairseq-preprocess`, once."""
    from fairseq_cli import preprocess

    folder, text = corpus.folder / "peers/fairseq", corpus.folder
    if not (folder / "data" / "test.src-tgt.tgt.idx").exists():
        sys.argv = [
            "fairseq-preprocess",
            "-s",
            "src",
            "-t",
            "tgt",
            "--srcdict",
            f"{text}/dict.src.txt",
            "--tgtdict",
            f"{text}/dict.tgt.txt",
            "--trainpref",
            f"{text}/train",
            "--testpref",
            f"{text}/test",
            "--destdir",
            f"{folder}/data",
            "--workers",
            "1",
        ]
        preprocess.cli_main()


def fairseq(task, corpus) -> None:
    """`fairseq-train`."""
    from fairseq.dataclass.configs import GenerationConfig
    from fairseq.trainer import Trainer
    from fairseq_cli import train

    binarise(task, corpus)
    folder, sizes = corpus.folder / "peers/fairseq", task.sizes
    words = [
        "fairseq-train",
        folder / "data",
        "--cpu",
        "-s",
        "src",
        "-t",
        "tgt",
        "--arch",
        "transformer",
    ]
    for side in ("encoder", "decoder"):
        words += [
            f"--{side}-embed-dim",
            sizes["d_model"],
            f"--{side}-attention-heads",
            sizes["nhead"],
        ]
        words += [
            f"--{side}-layers",
            sizes[f"num_{side}_layers"],
            f"--{side}-ffn-embed-dim",
            sizes["dim_feedforward"],
        ]
    words += [
        "--dropout",
        sizes["dropout"],
        "--attention-dropout",
        sizes["dropout"],
        "--optimizer",
        "adam",
        "--adam-betas",
        "(0.9,0.98)",
        "--lr",
        contest.LEARNING_RATE,
        "--criterion",
        "label_smoothed_cross_entropy",
        "--label-smoothing",
        contest.LABEL_SMOOTHING,
        "--max-tokens",
        task.tokens_per_batch,
        "--required-batch-size-multiple",
        1,
        "--max-update",
        10**6,
        "--log-interval",
        50,
        "--log-format",
        "simple",
        "--disable-validation",
        "--no-epoch-checkpoints",
        "--save-dir",
        folder / "model",
        "--num-workers",
        0,
        "--seed",
        1,
    ]

    if task.every:
        rate, warmup = task.variant.split()
        words += [
            "--lr",
            rate,
            "--lr-scheduler",
            "inverse_sqrt",
            "--warmup-updates",
            warmup,
            "--no-save",
        ]

    def translated(trainer, steps: int, sources: Path) -> str:
        """As fairseq-interactive does, with the model as it stands."""
        toolkit, words, outputs = trainer.task, trainer.task.target_dictionary, {}
        encoded = toolkit.get_interactive_tokens_and_lengths(sources.read_text().splitlines(), str)
        dataset = toolkit.build_dataset_for_inference(*encoded)
        generator = toolkit.build_generator(
            [trainer.model], GenerationConfig(beam=1, max_len_a=1.5, max_len_b=10)
        )
        for sample in toolkit.get_batch_iterator(dataset, max_sentences=task.batch).next_epoch_itr(
            shuffle=False
        ):
            found = toolkit.inference_step(generator, [trainer.model.eval()], sample)
            outputs |= zip(
                sample["id"].tolist(), (words.string(best["tokens"]) for best, *_ in found)
            )
        return "".join(f"{outputs[row]}\n" for row in range(len(outputs)))

    def tokens(trainer, samples) -> tuple[int, int]:
        source = sum(
            int(sample["net_input"]["src_lengths"].sum()) for sample in samples
        )  # with the end token
        return source, sum(sample["ntokens"] for sample in samples)

    run(task, train.cli_main, words, Trainer, "train_step", tokens, translated)


def run(
    task,
    main: Callable,
    words: list,
    trainer: type,
    method: str,
    tokens: Callable,
    translated: Callable,
) -> None:
    """The toolkit's `main` with these words; before each step (`method` of its trainer) we take the time, or translate."""
    torch.set_num_threads(task.threads)
    if task.every:
        torch.set_float32_matmul_precision(
            "medium"
        )  # products by oneDNN; neither toolkit trains in bf16 on a CPU
    clock, step, steps = (
        contest.TrainingClock(task.seconds),
        getattr(trainer, method),
        itertools.count(),
    )

    def timed_step(self, batches, *rest, **options):
        done = next(steps)
        if not task.every:
            clock.step(*tokens(self, batches))
        elif done and done % task.every == 0:
            sources = Path(task.outputs, "valid.src")
            outputs = translated(self, done, sources)
            atomic_write(
                sources.with_name(f"{time.time()}.out"), outputs
            )  # the time behind it, as everybody's
        return step(self, batches, *rest, **options)

    setattr(trainer, method, timed_step)
    sys.argv = list(map(str, words))
    main()


if __name__ == "__main__":
    contest.run_peer(opennmt, binarise, fairseq)
