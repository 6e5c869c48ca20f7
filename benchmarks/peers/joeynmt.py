"""Contestant "joeynmt": JoeyNMT 2.3.0, its own trainer and its own greedy search.

Here stand only its settings and two clocks, put around its training step and its `predict`.
Not like for like: its 4,096 tokens a batch count padding and mix lengths; to decode it has no cache. Its batches come in the
order of the file.
"""

import json
import time
from pathlib import Path

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


def settings(task, corpus, updates: int) -> Path:
    """Its configuration file (JSON is YAML too); → the path."""
    folder = work_folder(corpus, "joeynmt")
    dropped = {"dropout": DROPOUT}
    width = LAB["d_model"]

    def stack(layers: int) -> dict:
        embeddings = {"embedding_dim": width, "scale": True, **dropped}
        return {"type": "transformer", "num_layers": layers, "num_heads": LAB["nhead"], "embeddings": embeddings,
                "hidden_size": width, "ff_size": LAB["dim_feedforward"], "layer_norm": "post", **dropped}  # fmt: skip

    def language(side: str) -> dict:
        return {"lang": side, "level": "word", "lowercase": False, "max_length": 128,
                "voc_file": str(corpus.folder / f"joeynmt.{side}")}  # fmt: skip

    special = {"unk_token": "<unk>", "unk_id": 0, "pad_token": "<pad>", "pad_id": 1, "bos_token": "<s>", "bos_id": 2,
               "eos_token": "</s>", "eos_id": 3}  # fmt: skip
    data = {"train": str(corpus.folder / "train"), "dev": str(folder / "dev"), "test": str(folder / "test"),
            "dataset_type": "plain", "src": language("src"), "trg": language("tgt"), "special_symbols": special}  # fmt: skip
    testing = {"n_best": 1, "beam_size": 1, "batch_size": task.batch, "batch_type": "sentence", "eval_metrics": [],
               "max_output_length": task.length or 100, "min_output_length": task.length or 1, "generate_unk": False}  # fmt: skip
    training = {"random_seed": 1, "optimizer": "adam", "adam_betas": [0.9, 0.98], "learning_rate": LEARNING_RATE,
                "scheduling": "noam", "learning_rate_factor": 0.5, "learning_rate_warmup": 4000,
                "normalization": "tokens", "loss": "crossentropy", "label_smoothing": LABEL_SMOOTHING,
                "batch_size": TOKENS_PER_BATCH, "batch_type": "token", "epochs": 1000, "updates": updates,
                "validation_freq": updates, "logging_freq": min(20, updates - 1), "overwrite": True, "shuffle": True,
                "print_valid_sents": [], "keep_best_ckpts": 1}  # fmt: skip
    model = {"initializer": "xavier_uniform", "embed_initializer": "xavier_uniform", "tied_embeddings": False,
             "tied_softmax": False, "encoder": stack(LAB["num_encoder_layers"]),
             "decoder": stack(LAB["num_decoder_layers"])}  # fmt: skip
    for side in ("src", "tgt"):
        lines = (corpus.folder / f"test.{side}").read_text(encoding="utf-8").splitlines(keepends=True)
        for name, count in (("test", len(corpus.test)), ("dev", 2)):  # it always wants to validate once
            (folder / f"{name}.{side}").write_text("".join(lines[:count]), encoding="utf-8")
    everything = {"name": "benchmark", "joeynmt_version": "2.3.0", "model_dir": str(folder / "model"), "use_cuda": False,
                  "fp16": False, "data": data, "testing": testing, "training": training, "model": model}  # fmt: skip
    path = folder / f"settings-{task.what}-{updates}.yaml"
    path.write_text(json.dumps(everything, indent=1), encoding="utf-8")
    return path


def start_training(task, corpus, updates: int) -> None:
    """`joeynmt train`, the model folder made anew."""
    from joeynmt.config import load_config
    from joeynmt.helpers import make_model_dir
    from joeynmt.training import train as joeynmt_train

    config = load_config(settings(task, corpus, updates))
    make_model_dir(Path(config["model_dir"]), overwrite=True)
    joeynmt_train(rank=0, world_size=None, cfg=config, skip_test=True)


def train(task, corpus) -> None:
    """Its own trainer, told the time by us."""
    from joeynmt.training import TrainManager

    clock, train_step = TrainingClock(task.seconds), TrainManager._train_step

    def timed_step(self, batch):
        clock.step(batch.src_mask.sum(), batch.ntokens)  # both with the end token, without padding
        return train_step(self, batch)

    TrainManager._train_step = timed_step
    start_training(task, corpus, updates=10**6)


def decode(task, corpus) -> None:
    """`joeynmt test` with the weights of two training steps."""
    from joeynmt import prediction
    from joeynmt.config import load_config

    restore_torch_load()
    folder = work_folder(corpus, "joeynmt")
    if not list((folder / "model").glob("*.ckpt")):
        start_training(task, corpus, updates=2)
    config = load_config(settings(task, corpus, updates=2))
    config["data"]["dev"] = None
    predict = prediction.predict

    def timed_predict(**options):
        found = []

        def once():
            begun = time.perf_counter()
            found[:] = predict(**options)
            seconds = time.perf_counter() - begun
            ends = {"<s>", "</s>", "<pad>"}
            return seconds, [
                [int(word[1:]) if word[0] == "t" else 0 for word in row if word not in ends] for row in found[3]
            ]

        time_decoding(task, corpus, once, warm=False)
        return tuple(found)

    prediction.predict = timed_predict
    prediction.test(config)


if __name__ == "__main__":
    run_peer(train, decode)
