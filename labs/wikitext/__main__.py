"""A Transformer language model on WikiText-2 or any text: GloVe embeddings, label smoothing, dynamic sampling, perplexity.

    python -m labs.wikitext                                            # /opt/wikitext-2, else the bundled sample
    python -m labs.wikitext --data novel.txt --glove glove.6B.50d.txt  # any text; GloVe vectors as the embedding
    python -m labs.wikitext --sampling dynamic                         # hard segments more often, see SegmentSampler
    python -m labs.wikitext --tokens subwords                          # byte-pair pieces instead of words
    torchrun --nproc_per_node 2 -m -- labs.wikitext                    # data parallel: the same batches and losses
    python -m labs.wikitext --resume runs/NAME --generate "The ship"   # goes on where it stopped; continues a text
    tensorboard --logdir runs                                          # curves, samples, confusion

Sizes in shape comments: B segments a step, S places in a segment, D model width, E embedding width, V vocabulary, N places
whose loss counts, T tokens of a text, M segments of the training text. Padding: `real` is False there.
"""

from dataclasses import dataclass

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Every setting of a run."""

    data: str = flag(
        "", "text file, or folder of text or parquet; /opt/wikitext-2, else the sample", "Data"
    )
    ratios: str = flag("0.8,0.1,0.1", "train, validation, test: how a missing split is cut", "Data")
    tokens: str = flag("words", "what a token is (words|subwords)", "Data")
    vocab: int = flag(
        0, "the most frequent N tokens; 0: by min_count; subwords: 4000", "Data", min=0
    )
    min_count: int = flag(3, "rarer words are <unk>, as in WikiText", "Data", min=1)
    segment: int = flag(
        64, "tokens in a training segment, and the most that is seen", "Data", min=2
    )
    pad: str = flag("right", "where a short segment is filled up (left|right)", "Data")

    d_model: int = flag(128, "model width", "Model", min=1)
    d_embedding: int = flag(0, "embedding width; 0: GloVe's, else d_model", "Model", min=0)
    nhead: int = flag(4, "attention heads", "Model", min=1)
    layers: int = flag(2, "encoder layers", "Model", min=1)
    dim_feedforward: int = flag(512, "width of the feed-forward layers", "Model", min=1)
    dropout: float = flag(0.3, "share of activations dropped", "Model", min=0, below=1)
    positions: str = flag("learned", "positional encoding (learned|sinusoidal)", "Model")
    glove: str = flag("", "text file of vectors that the embedding begins with", "Model")

    epochs: int = flag(
        0, "passes; 0: 2.4 million tokens' worth, 1 (dynamic: 6) to 30", "Training", min=0
    )
    embedding_share: float = flag(
        0.125, "share of steps, the first, that train embeddings only", "Training", min=0, below=1
    )
    batch: int = flag(32, "segments in a step, of all processes together", "Training", min=1)
    lr: float = flag(2e-3, "peak learning rate", "Training", above=0, below=10)
    warmup: int = flag(
        0, "steps of rising learning rate; 0: a tenth, at most 1000", "Training", min=0
    )
    weight_decay: float = flag(0.1, "of matrices, not of biases and norms", "Training", min=0)
    label_smoothing: float = flag(
        0.1, "share of probability spread over all tokens", "Training", min=0, below=1
    )
    clip: float = flag(0.5, "largest norm of the gradient; 0: not clipped", "Training", min=0)
    sampling: str = flag(
        "static", "segments: each once an epoch, or by loss (static|dynamic)", "Training"
    )
    sharpness: float = flag(
        1.0, "dynamic: how much the loss weighs, see SegmentSampler", "Training", min=0
    )
    resample_every: int = flag(
        1, "dynamic: epochs that one draw serves; the handout's 10", "Training", min=1
    )

    run: str = flag("", "name of the run (folder runs/NAME); the date and time", "Run")
    resume: str = flag("", "run folder to go on with", "Run")
    generate: str = flag(
        "", "text that the samples continue, besides some of the validation", "Run"
    )
    log_every: int = flag(20, "steps between lines of the log", "Run", min=1)
    precision: str = flag("auto", "number format (auto|fp32|bf16|fp16)", "Run")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "Run")
    seed: int = flag(1, "of weights, dropout and the order of segments", "Run", min=0)

    def __post_init__(self):
        if self.d_model % max(self.nhead, 1) or self.d_model % 2:
            raise UserError(
                f"--d_model {self.d_model} must be even and a multiple of --nhead {self.nhead}"
            )
        least = (
            3 if self.tokens == "words" else 300
        )  # a subword vocabulary holds the 256 single bytes
        if 0 < self.vocab < least:
            raise UserError(
                f"--vocab {self.vocab}: a vocabulary of {self.tokens} needs at least {least}"
            )
        if self.glove and self.tokens == "subwords":
            raise UserError(
                "--glove has vectors of words, --tokens subwords cuts words into pieces; leave one out"
            )
        if (
            not self.resume
            and self.sampling == "static"
            and (self.sharpness != 1 or self.resample_every != 1)
        ):
            raise UserError(
                "--sharpness and --resample_every belong to --sampling dynamic; give it, or leave them out"
            )
        self.split_ratios()

    def split_ratios(self) -> tuple[float, ...]:
        """(train, validation, test)"""
        try:
            ratios = tuple(float(word) for word in self.ratios.split(","))
        except ValueError:
            ratios = ()
        if (
            len(ratios) != 3
            or not all(ratio > 0 for ratio in ratios)
            or abs(sum(ratios) - 1) > 1e-6
        ):
            raise UserError(
                f"--ratios {self.ratios}: give three numbers above 0 that add up to 1, like 0.8,0.1,0.1"
            )
        return ratios


if (
    __name__ == "__main__"
):  # before the heavy imports, so that --help and a wrong flag answer at once
    config = parse_flags(Config, "train a language model; the result goes to runs/NAME")

import json
import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine import checkpoint, distributed, schedule
from engine.precision import choose_precision
from engine.run import INTERRUPTED, Run, saved_settings
from engine.telemetry import Meter, peak_memory_gib
from labs.wikitext.model import (
    LanguageModel,
    SmoothedLoss,
    confusion_figure,
    evaluate,
    gather_segments,
    generate,
    send,
)
from labs.wikitext.sampler import SegmentSampler
from labs.wikitext.text import Text, coverage, load_glove, prepare

MAY_CHANGE = {"data", "glove", "generate", "log_every", "precision", "device"}  # on --resume
TOKENS_IN_ALL = 2_400_000  # some minutes of a CPU core at the default sizes and six thousand words
CONFUSED = 12  # tokens in the confusion table


def main(config: Config) -> None:
    """One run, from the text to the test."""
    config = saved_settings(config, MAY_CHANGE)  # on --resume the run's own, its device among them
    world = distributed.start(config.device)
    device = world.device

    with Run.start(config, "wikitext", world, MAY_CHANGE) as run:
        # ---- text: rank 0 reads it for all, and settles what depends on it
        text, vectors, config = world.on_main(lambda: read_text(run.config))
        vocabulary = text.vocabulary

        # ---- model, optimiser, order of the segments
        torch.manual_seed(config.seed)
        model = LanguageModel(len(vocabulary.tokens), config)
        model.start_from_counts(text.ids["train"])
        if vectors is not None:
            model.embedding.weight.data.copy_(vectors)
        model.to(device)
        precision = choose_precision(device, config.precision, training=True, world=world)
        exact = choose_precision(
            device, "fp32"
        )  # for scores; on a recent GPU its products are TF32
        decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        rest = [
            parameter for parameter in model.parameters() if parameter.dim() < 2
        ]  # biases and norms
        groups = [
            dict(params=decayed, weight_decay=config.weight_decay),
            dict(params=rest, weight_decay=0.0),
        ]
        optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=(0.9, 0.98), fused=True
        )  # Vaswani et al. 2017
        sampler = SegmentSampler(
            len(text.ids["train"]),
            config.segment,
            config.sampling,
            config.sharpness,
            config.epochs,
            config.seed,
            device,
            config.resample_every,
        )
        steps_per_epoch = math.ceil(len(sampler.lengths) / config.batch)
        total_steps = config.epochs * steps_per_epoch
        embedding_steps = round(config.embedding_share * total_steps)
        rates = schedule.plan(config.lr, config.warmup, total_steps)
        meter = Meter(config.log_every)

        # ---- where the last checkpoint left off: epoch, batch of it, best validation loss
        progress = {"epoch": 0, "batch": 0, "best_loss": None}
        if run.state and run.state["key"] != text.key():
            raise UserError(
                f"--resume {run.folder}: vocabulary or text at {config.data} is not what the run began with; "
                "put it back, or start a new run"
            )
        if state := run.restore(model, optimizer, precision):
            sampler.load_state_dict(state["sampler"], world)
            progress = {name: state[name] for name in progress}

        def save(step: int, best: bool = False) -> None:
            """A checkpoint of this step; then the clock of the steps starts again."""
            state = progress | {"sampler": sampler.state_dict(world), "key": text.key()}
            run.save(step, model, optimizer, state, precision, best=best)
            meter.resume()

        def score(split: str, confused: Tensor | None = None) -> tuple[dict, Tensor]:
            """Unsmoothed loss in nats a token, perplexity (per word too where tokens are pieces), accuracy; table."""
            model.eval()
            ids = text.ids[split]
            with exact.autocast():
                sums, table = evaluate(
                    model,
                    ids,
                    vocabulary.eos,
                    config.segment,
                    config.pad,
                    world,
                    confused,
                    vocabulary.unk,
                )
            loss = sums["loss"] / len(
                ids
            )  # nats; at most 50 go into exp, here and below: it overflows at 710
            scores = {
                "loss": loss,
                "perplexity": math.exp(min(loss, 50)),
                "accuracy": sums["correct"] / len(ids),
            }
            if (
                vocabulary.unk is not None
            ):  # guessing <unk> everywhere is right for every sixth word of WikiText-2
                scores["accuracy_without_unk"] = sums["correct_known"] / max(
                    1, (ids != vocabulary.unk).sum().item()
                )
            if config.tokens == "subwords":
                scores["perplexity_per_word"] = math.exp(min(sums["loss"] / text.words[split], 50))
            return scores, table

        def log_step(step: int, smoothed: float, loss: float, norm: float) -> None:
            """This step's figures. The smoothed loss is what is minimised; only the unsmoothed one makes a perplexity."""
            rate, speed = (
                rates.learning_rate(step),
                meter.read().get("speed/tokens_per_second", 0.0),
            )
            values = {
                "train/smoothed_loss": smoothed,
                "train/loss": loss,
                "train/perplexity": math.exp(min(loss, 50)),
                "train/learning_rate": rate,
                "train/gradient_norm": norm,
            }
            values |= {"speed/tokens_per_second": speed} if speed else {}
            run.scalars(step, values | {"memory/peak_gib": peak_memory_gib(device)})
            run.log(
                f"step {step:>6,}  epoch {step / steps_per_epoch:5.2f}  loss {smoothed:.3f} smoothed, {loss:.3f} not  "
                f"lr {rate:.2e}  |gradient| {norm:.2f}  {speed:,.0f} tokens/s"
            )

        run.begin()
        if world.is_main:
            (run.folder / "vocabulary.txt").write_text(
                "\n".join(vocabulary.tokens) + "\n", encoding="utf-8"
            )
        for line in (*text.notes, precision.describe(), str(model)):
            run.log(line)
        segment = torch.ones(1, config.segment, dtype=torch.bool)  # all of it real
        # MATH: attention by plain matrix products, which the counter knows on every device.
        with (
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            model(segment.long(), segment)
        flops = (
            3 * counter.get_total_flops() // config.segment
        )  # backward costs twice what forward does
        run.log(
            f"model: {sum(p.numel() for p in model.parameters()):,} parameters, {flops:,} FLOPs a training token; "
            f"{len(sampler.lengths):,} segments, "
            f"{total_steps:,} steps in {config.epochs} epochs"
        )

        # ---- training
        smoothed_loss = None
        for epoch in range(progress["epoch"], config.epochs):
            batches = sampler.plan(epoch).split(config.batch)
            model.train()
            for number in range(progress["batch"], steps_per_epoch):
                step = epoch * steps_per_epoch + number + 1
                if smoothed_loss is None or step == embedding_steps + 1:
                    smoothed_loss = start_stage(
                        model, config, run, embedding_only=step <= embedding_steps
                    )
                # Learning rate and randomness are functions of the step: a resumed run draws what it would have drawn.
                for group in optimizer.param_groups:
                    group["lr"] = rates.learning_rate(step)
                world.set_seed(config.seed, step)

                # The batch: segments of the text, (B,), of which this rank computes every `size`th.
                segments = batches[number]
                tokens_of_step = sampler.lengths[segments].sum().item()  # of all ranks
                mine = segments[world.rank :: world.size]
                spans = sampler.spans(mine if len(mine) else segments[:1])
                # They stay on the CPU until the model sends on what it needs: no length has to be asked of the GPU.
                ids = text.ids["train"]
                tokens, targets, real = gather_segments(
                    ids, spans, vocabulary.eos, config.segment, config.pad
                )
                counted = real & (
                    len(mine) > 0
                )  # DDP wants a forward pass of a rank without a segment, too

                # Forward; loss.backward(); gradients clipped, optimizer.step() if they are finite, then
                # optimizer.zero_grad() for the next step: the last three are in precision.step, see engine/precision.py.
                with precision.autocast():
                    smoothed, losses = smoothed_loss(tokens, targets, real, counted)  # scalar, (N,)
                # × size undoes DDP's average: the gradient is that of one sum over all ranks, divided by all tokens.
                precision.backward(smoothed * world.size / tokens_of_step)
                trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
                norm = precision.step(optimizer, trained, config.clip, step)

                rows = send(counted.nonzero()[:, 0], device)  # (N,) the segment of each loss
                segment_losses = losses.new_zeros(len(spans)).index_add_(
                    0, rows, losses
                )  # (B,) summed over tokens
                sampler.record(mine, segment_losses[: len(mine)])
                meter.add(
                    0, tokens_of_step, config.batch * config.segment
                )  # 0: there is no source text
                meter.end_step()
                if step % config.log_every == 0 or step == total_steps:
                    precision.check_finite()
                    sums = world.sum(torch.stack([smoothed.detach(), losses.sum()]))
                    log_step(step, *(sums / tokens_of_step).tolist(), norm.item())
                progress["batch"] = number + 1
                if run.stop_asked():
                    save(step)
                    run.close(INTERRUPTED)
                    return

            # ---- validation
            step = (epoch + 1) * steps_per_epoch
            sampler.end_epoch(world, epoch)
            scores, _ = score("validation")
            improved = progress["best_loss"] is None or scores["loss"] < progress["best_loss"]
            best_loss = scores["loss"] if improved else progress["best_loss"]
            progress = {"epoch": epoch + 1, "batch": 0, "best_loss": best_loss}
            values = {f"validation/{name}": value for name, value in scores.items()}
            run.scalars(step, values | sampler.figures(epoch + 1))
            run.log(
                f"epoch {epoch + 1} of {config.epochs}: validation loss {scores['loss']:.4f}, "
                f"perplexity {scores['perplexity']:.2f}, accuracy {scores['accuracy']:.1%}"
                + (", the best so far" if improved else "")
            )
            if world.is_main:
                run.telemetry.text("samples", step, "\n\n".join(samples(model, text, config)))
            save(step, best=improved)

        # ---- test: the best weights, to the log, TensorBoard and <run>/test.json
        model.load_state_dict(
            world.on_main(lambda: checkpoint.load_weights(checkpoint.resolve(run.folder)))
        )
        ids = text.ids["test"]
        frequent = (
            ids.bincount(minlength=len(vocabulary.tokens))
            .topk(min(CONFUSED, len(ids.unique())))
            .indices
        )
        scores, table = score("test", frequent)
        run.log(
            "test: "
            + ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in scores.items())
        )
        if world.is_main:
            result = json.dumps(scores | {"tokens": len(ids)}, indent=2) + "\n"
            (run.folder / "test.json").write_text(result, encoding="utf-8")
            figure = confusion_figure(table, [vocabulary.tokens[id] for id in frequent])
            run.telemetry.figure("test/confusion", total_steps, figure)
            for line in samples(model, text, config):
                run.log("sample: " + line.replace("\n", " / "))
        result = {f"result/test_{name}": value for name, value in scores.items()}
        run.telemetry.hyperparameters(config, result)
        run.close("all epochs are done")


def read_text(config: Config) -> tuple[Text, Tensor | None, Config]:
    """The tokenised text, GloVe's vectors of its vocabulary if they are asked for, and the settings that hang on both."""
    if config.data:
        config.data = str(
            Path(config.data).expanduser().resolve()
        )  # --resume finds it from any directory
    text = prepare(
        config.data, config.split_ratios(), config.tokens, config.vocab, config.min_count
    )
    for split, ids in text.ids.items():
        if len(ids) < config.segment:
            raise UserError(
                f"the {split} text has {len(ids)} tokens, less than one --segment ({config.segment}); give more text"
            )
    vectors = None
    if config.glove:
        config.glove = str(Path(config.glove).expanduser().resolve())
        vectors, known = load_glove(Path(config.glove), text.vocabulary.tokens)
        if config.d_embedding not in (0, vectors.shape[1]):
            raise UserError(
                f"--d_embedding {config.d_embedding}: these GloVe vectors have {vectors.shape[1]} numbers; "
                "leave the flag out"
            )
        config.d_embedding = vectors.shape[1]
        types, running = coverage(known, text.ids["train"])
        text.notes.append(
            f"GloVe: {vectors.shape[1]} numbers a word, projected to {config.d_model}; {types:.1%} of the "
            f"vocabulary has a vector, {running:.1%} of the running tokens"
        )
    config.d_embedding = config.d_embedding or config.d_model
    fewest = (
        6 if config.sampling == "dynamic" else 1
    )  # the first epoch of dynamic sampling is like static
    config.epochs = config.epochs or min(
        30, max(fewest, round(TOKENS_IN_ALL / len(text.ids["train"])))
    )
    return text, vectors, config


def start_stage(
    model: LanguageModel, config: Config, run: Run, embedding_only: bool
) -> torch.nn.Module:
    """The handout's 预训练 (all but embedding and positions frozen) or 微调 (nothing frozen); → model and loss in one."""
    first = {id(parameter) for parameter in model.embedding_parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(not embedding_only or id(parameter) in first)
    run.log(
        "stage: "
        + ("embedding and positions are trained" if embedding_only else "all weights are trained")
    )
    return run.world.data_parallel(
        SmoothedLoss(model, config.label_smoothing)
    )  # DDP asks here what is frozen


def samples(model: LanguageModel, text: Text, config: Config) -> list[str]:
    """Beginnings from the validation text, and the one asked for, each with what the model makes of it."""
    vocabulary, validation = text.vocabulary, text.ids["validation"]
    starts = range(0, len(validation), max(8, len(validation) // 3))
    prompts = [validation[first : first + 8] for first in starts][:3]
    if config.generate:
        prompts.insert(0, torch.tensor(vocabulary.encode([config.generate])[0], dtype=torch.int64))
    continued = generate(model, prompts, vocabulary, length=40, seed=config.seed)
    return [
        f"**{vocabulary.decode(p.tolist())}** {vocabulary.decode(c)}"
        for p, c in zip(prompts, continued)
    ]


if __name__ == "__main__":
    run_script(lambda: main(config))
