"""Contestants "opennmt" (OpenNMT-py 3.5.1) and "fairseq" (fairseq-fixed 0.12.3.1).

Both run on today's torch if `torch.load` reads pickles (`contest.OLD_LOAD`). OpenNMT-py imports
spacy and fasttext for text transforms that are not used here.
Not like for like: OpenNMT-py is pre-norm, it has nothing else; its source has no end token, which
is counted all the same. fairseq has no layer norm behind the last layer. Both fill a batch by the
padded tokens of its longer side, as ours does.

With `task.every` a toolkit trains without end, and every `task.every` steps its own greedy decoder
translates valid.src in the folder `task.outputs` into TIME.out. The variant is then "RATE STEPS":
the rate rises to RATE in STEPS steps and then falls as 1/√step.
"""

import itertools
import math
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.corpus import Corpus
from benchmarks.peers import contest
from benchmarks.peers.contest import LABEL_SMOOTHING, LEARNING_RATE, Task
from engine.files import atomic_write


def opennmt(task: Task, corpus: Corpus) -> None:
    """`onmt_train`"""
    for absent in ("spacy", "fasttext"):
        sys.modules[absent] = types.ModuleType(absent)
    from onmt.bin import train
    from onmt.trainer import Trainer

    folder = corpus.folder / "peers/opennmt"
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "settings.yaml"  # there is no flag for the corpus
    paths = f'path_src: "{corpus.folder}/train.src", path_tgt: "{corpus.folder}/train.tgt"'
    settings.write_text(f"data: {{corpus: {{{paths}, transforms: []}}}}\n", encoding="utf-8")

    sizes = task.sizes
    width, dropout = sizes["d_model"], sizes["dropout"]
    words = ["onmt_train", "-config", settings, "-save_data", folder / "data"]
    words += ["-src_vocab", corpus.folder / "opennmt.src"]
    words += ["-tgt_vocab", corpus.folder / "opennmt.tgt"]
    words += f"""
        -src_vocab_size {corpus.source_vocab} -tgt_vocab_size {corpus.target_vocab}
        -vocab_size_multiple 1 -overwrite -world_size 1 -seed 1
        -encoder_type transformer -decoder_type transformer -position_encoding
        -enc_layers {sizes["num_encoder_layers"]} -dec_layers {sizes["num_decoder_layers"]}
        -hidden_size {width} -word_vec_size {width} -heads {sizes["nhead"]}
        -transformer_ff {sizes["dim_feedforward"]}
        -dropout {dropout} -attention_dropout {dropout} -label_smoothing {LABEL_SMOOTHING}
        -batch_type tokens -batch_size {task.tokens_per_batch} -batch_size_multiple 1
        -accum_count 1 -bucket_size 20000 -num_workers 0 -normalization tokens
        -train_steps 1000000 -valid_steps 1000000 -report_every 50
        -optim adam -adam_beta2 0.98
    """.split()
    if task.every:
        rate, warmup = map(float, task.variant.split())
        noam = rate * math.sqrt(width * warmup)  # the factor for which the highest rate is `rate`
        words += ["-save_model", f"{task.outputs}/model"]
        words += f"""
            -decay_method noam -learning_rate {noam} -warmup_steps {int(warmup)}
            -max_grad_norm 1 -save_checkpoint_steps {task.every} -keep_checkpoint 1
        """.split()
    else:
        words += ["-save_model", folder / "model", "-save_checkpoint_steps", 1000000]
        words += ["-decay_method", "none", "-learning_rate", LEARNING_RATE]

    def tokens_of(trainer, batches) -> tuple[int, int]:
        padding = trainer.train_loss.padding_idx
        source = sum(int(batch["srclen"].sum()) + len(batch["srclen"]) for batch in batches)
        target = sum(int((batch["tgt"][:, 1:, 0] != padding).sum()) for batch in batches)
        return source, target

    def translate(trainer, step: int, sources: Path) -> str:
        from onmt.bin import translate

        outputs = sources.with_name("translated")
        model = f"{task.outputs}/model_step_{step}.pt"
        sys.argv = ["onmt_translate", "-model", model, "-src", str(sources), "-output"]
        sys.argv += [str(outputs), "-batch_size", str(task.batch)]
        sys.argv += "-beam_size 1 -max_length 500 -max_length_ratio 1.5".split()
        translate.main()
        return outputs.read_text(encoding="utf-8")

    watch(task, Trainer, "_gradient_accumulation", tokens_of, translate)
    sys.argv = list(map(str, words))
    train.main()


def binarise(task: Task, corpus: Corpus) -> None:
    """`fairseq-preprocess`, once"""
    from fairseq_cli import preprocess

    folder = corpus.folder / "peers/fairseq/data"
    if not (folder / "test.src-tgt.tgt.idx").exists():
        sys.argv = "fairseq-preprocess -s src -t tgt --workers 1".split()
        for flag, name in (("train", "train"), ("test", "test")):
            sys.argv += [f"--{flag}pref", str(corpus.folder / name)]
        for flag, name in (("src", "dict.src.txt"), ("tgt", "dict.tgt.txt")):
            sys.argv += [f"--{flag}dict", str(corpus.folder / name)]
        sys.argv += ["--destdir", str(folder)]
        preprocess.cli_main()


def fairseq(task: Task, corpus: Corpus) -> None:
    """`fairseq-train`"""
    from fairseq.trainer import Trainer
    from fairseq_cli import train

    binarise(task, corpus)
    folder = corpus.folder / "peers/fairseq"
    sizes = task.sizes
    width, heads, wide = sizes["d_model"], sizes["nhead"], sizes["dim_feedforward"]
    words = ["fairseq-train", folder / "data", "--save-dir", folder / "model"]
    words += f"""
        --cpu -s src -t tgt --arch transformer --seed 1 --num-workers 0
        --encoder-layers {sizes["num_encoder_layers"]} --encoder-embed-dim {width}
        --encoder-attention-heads {heads} --encoder-ffn-embed-dim {wide}
        --decoder-layers {sizes["num_decoder_layers"]} --decoder-embed-dim {width}
        --decoder-attention-heads {heads} --decoder-ffn-embed-dim {wide}
        --dropout {sizes["dropout"]} --attention-dropout {sizes["dropout"]}
        --criterion label_smoothed_cross_entropy --label-smoothing {LABEL_SMOOTHING}
        --max-tokens {task.tokens_per_batch} --required-batch-size-multiple 1
        --max-update 1000000 --log-interval 50 --log-format simple
        --disable-validation --no-epoch-checkpoints
        --optimizer adam --adam-betas (0.9,0.98)
    """.split()
    if task.every:
        rate, warmup = task.variant.split()
        words += ["--lr", rate, "--lr-scheduler", "inverse_sqrt", "--warmup-updates", warmup]
        words += ["--no-save"]
    else:
        words += ["--lr", LEARNING_RATE]

    def tokens_of(trainer, samples) -> tuple[int, int]:
        source = sum(int(sample["net_input"]["src_lengths"].sum()) for sample in samples)
        return source, sum(sample["ntokens"] for sample in samples)  # both with their end tokens

    watch(task, Trainer, "train_step", tokens_of, partial(translate_by_fairseq, task))
    sys.argv = list(map(str, words))
    train.cli_main()


def translate_by_fairseq(task: Task, trainer, step: int, sources: Path) -> str:
    """What fairseq-interactive does, with the model as it is now."""
    from fairseq.dataclass.configs import GenerationConfig

    toolkit = trainer.task
    lines = sources.read_text(encoding="utf-8").splitlines()
    dataset = toolkit.build_dataset_for_inference(
        *toolkit.get_interactive_tokens_and_lengths(lines, str)
    )
    settings = GenerationConfig(beam=1, max_len_a=1.5, max_len_b=10)
    generator = toolkit.build_generator([trainer.model], settings)
    batches = toolkit.get_batch_iterator(dataset, max_sentences=task.batch)
    outputs = {}
    for sample in batches.next_epoch_itr(shuffle=False):
        found = toolkit.inference_step(generator, [trainer.model.eval()], sample)
        for row, hypotheses in zip(sample["id"].tolist(), found):
            outputs[row] = toolkit.target_dictionary.string(hypotheses[0]["tokens"])
    return "".join(f"{outputs[row]}\n" for row in range(len(outputs)))


def watch(task: Task, trainer: type, method: str, tokens_of: Callable, translate: Callable) -> None:
    """Let `method`, a training step of `trainer`, first take the time, or translate if due."""
    torch.set_num_threads(task.threads)
    if task.every:
        # Products by oneDNN: neither toolkit trains in bf16 on a CPU.
        torch.set_float32_matmul_precision("medium")
    clock = contest.TrainingClock(task.seconds)
    step = getattr(trainer, method)
    numbers = itertools.count()

    def watched_step(self, batches, *rest, **options):
        done = next(numbers)
        if not task.every:
            clock.step(*tokens_of(self, batches))
        elif done and done % task.every == 0:
            outputs = translate(self, done, Path(task.outputs, "valid.src"))
            # The time is taken after the translation, as for every contestant.
            atomic_write(Path(task.outputs, f"{time.time()}.out"), outputs)
        return step(self, batches, *rest, **options)

    setattr(trainer, method, watched_step)


if __name__ == "__main__":
    contest.run_peer(opennmt, binarise, fairseq)
