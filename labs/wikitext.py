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

from dataclasses import asdict, dataclass

from engine.config import flag, parse_flags
from engine.errors import UserError, run_script


@dataclass
class Config:
    """Every setting of a run."""

    data: str = flag("", "text file or folder with some; /opt/wikitext-2, else the sample", "Data")
    ratios: str = flag("0.8,0.1,0.1", "train, validation, test: how a missing split is cut", "Data")
    tokens: str = flag("words", "what a token is (words|subwords)", "Data")
    vocab: int = flag(0, "the most frequent N tokens; 0: by min_count; subwords: 4000", "Data")
    min_count: int = flag(3, "rarer words are <unk>, as in WikiText", "Data")
    segment: int = flag(64, "tokens in a training segment, and the most that is seen", "Data")
    pad: str = flag("right", "where a short segment is filled up (left|right)", "Data")

    d_model: int = flag(128, "model width", "Model")
    d_embedding: int = flag(0, "embedding width, projected to d_model; 0: GloVe's, else d_model", "Model")
    nhead: int = flag(4, "attention heads", "Model")
    layers: int = flag(2, "encoder layers", "Model")
    dim_feedforward: int = flag(512, "", "Model")
    dropout: float = flag(0.3, "share of activations dropped", "Model")
    positions: str = flag("learned", "positional encoding (learned|sinusoidal)", "Model")
    glove: str = flag("", "text file of vectors that the embedding begins with", "Model")

    epochs: int = flag(0, "passes over the text; 0: 2.4 million tokens' worth, 1 to 30", "Training")
    embedding_share: float = flag(
        0.125, "share of the steps, the first, that train embedding and positions only", "Training"
    )
    batch: int = flag(32, "segments in a step, of all processes together", "Training")
    lr: float = flag(2e-3, "peak learning rate", "Training")
    warmup: int = flag(0, "steps of rising learning rate; 0: a tenth, at most 1000", "Training")
    weight_decay: float = flag(0.1, "", "Training")
    label_smoothing: float = flag(0.1, "share of the probability spread over all tokens", "Training")
    clip: float = flag(0.5, "largest norm of the gradient; 0: not clipped", "Training")
    sampling: str = flag("static", "segments: each once an epoch, or by loss (static|dynamic)", "Training")
    sharpness: float = flag(1.0, "dynamic: how much the loss weighs, see SegmentSampler", "Training")

    run: str = flag("", "name of the run (folder runs/NAME); the date and time", "Run")
    resume: str = flag("", "run folder to go on with", "Run")
    generate: str = flag("", "text that the samples continue, besides some of the validation", "Run")
    log_every: int = flag(20, "steps between lines of the log", "Run")
    precision: str = flag("auto", "number format (auto|fp32|bf16|fp16)", "Run")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "Run")
    seed: int = flag(1, "of weights, dropout and the order of segments", "Run")

    def __post_init__(self):
        at_least = dict(vocab=0, min_count=1, segment=2, d_model=1, d_embedding=0, nhead=1, layers=1, dim_feedforward=1)
        at_least |= dict(epochs=0, batch=1, warmup=0, weight_decay=0, clip=0, sharpness=0)
        for name, least in (at_least | dict(log_every=1, seed=0)).items():
            if not least <= getattr(self, name) < 2**31:  # which catches nan too
                raise UserError(f"--{name} {getattr(self, name)} must be a number from {least} on")
        for name in ("label_smoothing", "dropout", "embedding_share"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)} must be in [0, 1)")
        if not 0 < self.lr < 10:
            raise UserError(f"--lr {self.lr} must be in (0, 10)")
        choices = dict(tokens=("words", "subwords"), pad=("left", "right"), positions=("learned", "sinusoidal"))
        for name, allowed in (choices | dict(sampling=("static", "dynamic"))).items():
            if getattr(self, name) not in allowed:
                raise UserError(f"--{name} {getattr(self, name)} is unknown; choose {' or '.join(allowed)}")
        if self.d_model % self.nhead or self.d_model % 2:
            raise UserError(f"--d_model {self.d_model} must be even and a multiple of --nhead {self.nhead}")
        least = 3 if self.tokens == "words" else 300  # a subword vocabulary holds the 256 single bytes
        if 0 < self.vocab < least:
            raise UserError(f"--vocab {self.vocab}: a vocabulary of {self.tokens} needs at least {least}")
        self.split_ratios()

    def split_ratios(self) -> tuple[float, ...]:
        """(train, validation, test)"""
        try:
            ratios = tuple(float(word) for word in self.ratios.split(","))
        except ValueError:
            ratios = ()
        if len(ratios) != 3 or not all(ratio > 0 for ratio in ratios) or abs(sum(ratios) - 1) > 1e-6:
            raise UserError(f"--ratios {self.ratios}: give three numbers above 0 that add up to 1, like 0.8,0.1,0.1")
        return ratios


if __name__ == "__main__":  # before the heavy imports, so that --help and a wrong flag answer at once
    config = parse_flags(Config, "train a language model; the result goes to runs/NAME")

import json
import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from engine import checkpoint, distributed, schedule
from engine.allocator import keep_freed_memory
from engine.precision import Precision, choose_precision
from engine.run import INTERRUPTED, Run, saved_settings
from engine.telemetry import Meter, peak_memory_gib
from labs.wikitext_model import LanguageModel, SmoothedLoss, confusion_page, evaluate, gather_segments, generate
from labs.wikitext_sampler import SegmentSampler
from labs.wikitext_text import Text, coverage, load_glove, prepare

MAY_CHANGE = {"generate", "log_every", "precision", "device"}
TOKENS_IN_ALL = 2_400_000  # some minutes of a CPU core at the default sizes and six thousand words
CONFUSED = 12  # tokens in the confusion table


def main(config: Config) -> None:
    """One run, from the text to the test."""
    if config.resume:
        config = saved_settings(config, MAY_CHANGE)  # the device is one of them
    world = distributed.start(config.device)
    text = None
    if not config.resume:  # before there is a folder, so that a mistake leaves none
        # The settings, too: what depends on the text is settled on rank 0.
        text, config = world.on_main(lambda: (prepare_text(config), config))
    run = Run.start(config, "wikitext", world, MAY_CHANGE)
    t = set_up(run, text or world.on_main(lambda: prepare_text(run.config)))
    if run_epochs(t):
        test(t)
        run.close("all epochs are done")
    else:
        run.close(INTERRUPTED)


@dataclass
class Training:
    """What the loop works with."""

    run: Run
    text: Text
    precision: Precision
    exact: Precision  # for scores: fp32, whatever is trained in (products of a recent GPU are TF32)
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    sampler: SegmentSampler
    plan: schedule.Schedule
    meter: Meter
    state: dict  # "epoch", "batch" in it, "best_loss"; and the sampler's state when saved


def run_epochs(t: Training) -> bool:
    """The loop; false if a signal ended it."""
    config, world, state = t.run.config, t.run.world, t.state
    embedding_steps, runner = round(config.embedding_share * t.plan.total), None
    for epoch in range(state["epoch"], config.epochs):
        batches = t.sampler.plan(epoch).split(config.batch)
        t.meter.pause()
        t.model.train()
        for number in range(state["batch"], len(batches)):
            step = epoch * len(batches) + number + 1
            if runner is None or step == embedding_steps + 1:
                runner = start_stage(t, embedding_only=step <= embedding_steps)
            # Learning rate and randomness are functions of the step: a resumed run draws what it would have drawn.
            torch.manual_seed(world.seed(config.seed, step))
            train_step(t, runner, batches[number], step)
            state["batch"] = number + 1
            if t.run.stop_asked():
                save(t, step)
                return False
        t.sampler.end_epoch(world)
        improved = validate(t, epoch, step=(epoch + 1) * len(batches))
        state |= {"epoch": epoch + 1, "batch": 0}
        save(t, (epoch + 1) * len(batches), improved)
    return True


def train_step(t: Training, runner: torch.nn.Module, segments: Tensor, step: int) -> None:
    """One update from these segments of the text (B,), of which this rank computes every `size`th."""
    config, world = t.run.config, t.run.world
    for group in t.optimizer.param_groups:
        group["lr"] = t.plan.learning_rate(step)
    total = t.sampler.lengths[segments].sum().item()  # tokens of all ranks
    mine = segments[world.rank :: world.size]
    spans = t.sampler.spans(mine if len(mine) else segments[:1])
    tokens, targets, real = gather_segments(
        t.text.ids["train"], spans, t.text.vocabulary.eos, config.segment, config.pad
    )
    counted = real & (len(mine) > 0)  # DDP wants a forward pass of a rank without a segment, too
    tokens, targets, real, counted = (x.to(world.device) for x in (tokens, targets, real, counted))
    with t.precision.autocast():
        smoothed, losses = runner(tokens, targets, real, counted)  # scalar, (N,)
    # × size undoes DDP's average: the gradient is that of one sum over all ranks, divided by all tokens.
    t.precision.backward(smoothed * world.size / total)
    norm = t.precision.step(t.optimizer, [p for p in t.model.parameters() if p.requires_grad], config.clip, step)
    rows = counted.nonzero()[:, 0].cpu()
    t.sampler.record(mine, torch.zeros(len(spans)).index_add_(0, rows, losses.cpu())[: len(mine)])
    t.meter.update(0, total, config.batch * config.segment)
    if step % config.log_every == 0 or step == t.plan.total:
        log_step(t, step, norm, torch.stack([smoothed.detach(), losses.sum()]), total)


def log_step(t: Training, step: int, norm: Tensor, losses: Tensor, total: int) -> None:
    """This step's figures. The smoothed loss is what is minimised; only the unsmoothed one makes a perplexity."""
    t.precision.check_finite()
    smoothed, loss = (t.run.world.sum(losses.clone()) / total).tolist()
    figures, lr = t.meter.read(), t.plan.learning_rate(step)
    speed = figures.get("speed/tokens_per_second", 0.0)
    values = {"train/smoothed_loss": smoothed, "train/loss": loss, "train/perplexity": math.exp(min(loss, 50))}
    values |= {"train/learning_rate": lr, "train/gradient_norm": norm.item()}
    values |= {"speed/tokens_per_second": speed} if speed else {}
    t.run.telemetry.scalars(step, values | {"memory/peak_gib": peak_memory_gib(t.run.world.device)})
    epoch = step / t.plan.total * t.run.config.epochs
    t.run.log(f"step {step:>6,}  epoch {epoch:5.2f}  loss {smoothed:.3f} smoothed, {loss:.3f} not  lr {lr:.2e}  "
              f"|gradient| {norm.item():.2f}  {speed:,.0f} tokens/s")  # fmt: skip


def start_stage(t: Training, embedding_only: bool) -> torch.nn.Module:
    """Freeze all but embedding and positions, or nothing; → the loss as the loop calls it, one of many under DDP."""
    first = {id(parameter) for parameter in t.model.embedding_parameters()}
    for parameter in t.model.parameters():
        parameter.requires_grad_(not embedding_only or id(parameter) in first)
    t.run.log("stage: " + ("embedding and positions are trained" if embedding_only else "all weights are trained"))
    runner, device = SmoothedLoss(t.model, t.run.config.label_smoothing), t.run.world.device
    if t.run.world.size == 1:
        return runner
    return DistributedDataParallel(runner, device_ids=[device] if device.type == "cuda" else None)


def validate(t: Training, epoch: int, step: int) -> bool:
    """Validation perplexity, samples and the sampler's figures; true if the loss is the best so far."""
    scores = score(t, "validation")
    improved = t.state["best_loss"] is None or scores["loss"] < t.state["best_loss"]
    if improved:
        t.state["best_loss"] = scores["loss"]
    values = {f"validation/{name}": value for name, value in scores.items()}
    t.run.telemetry.scalars(step, values | t.sampler.figures(epoch + 1))
    t.run.log(f"epoch {epoch + 1} of {t.run.config.epochs}: validation loss {scores['loss']:.4f}, "
              f"perplexity {scores['perplexity']:.2f}, accuracy {scores['accuracy']:.1%}"
              + (", the best so far" if improved else ""))  # fmt: skip
    t.run.telemetry.text("samples", step, "\n\n".join(sample(t)))
    return improved


def score(t: Training, split: str, confused: Tensor | None = None) -> dict:
    """Unsmoothed loss in nats a token, perplexity, accuracy; per word too where tokens are pieces of words."""
    ids, config = t.text.ids[split], t.run.config
    t.model.eval()
    with t.exact.autocast():
        sums, table = evaluate(t.model, ids, t.text.vocabulary.eos, config.segment, config.pad, t.run.world, confused)
    loss = sums["loss"] / len(ids)
    scores = {"loss": loss, "perplexity": math.exp(min(loss, 50)), "accuracy": sums["correct"] / len(ids)}
    if config.tokens == "subwords":
        scores["perplexity_per_word"] = math.exp(min(sums["loss"] / t.text.words[split], 50))
    return scores | ({"table": table} if confused is not None else {})


def sample(t: Training) -> list[str]:
    """Beginnings from the validation text, and the one asked for, each with what the model makes of it."""
    if not t.run.world.is_main:
        return []
    vocabulary, validation = t.text.vocabulary, t.text.ids["validation"]
    starts = range(0, len(validation), max(8, len(validation) // 3))
    prompts = [validation[first : first + 8] for first in starts][:3]
    if t.run.config.generate:
        prompts.insert(0, torch.tensor(vocabulary.encode([t.run.config.generate])[0], dtype=torch.int64))
    continued = generate(t.model, prompts, vocabulary, length=40, seed=t.run.config.seed)
    return [f"**{vocabulary.decode(p.tolist())}** {vocabulary.decode(c)}" for p, c in zip(prompts, continued)]


def test(t: Training) -> None:
    """The best weights on the test text: to the log, TensorBoard and <run>/test.json."""
    run, vocabulary = t.run, t.text.vocabulary
    best = run.world.on_main(lambda: checkpoint.load_weights(run.folder))
    t.model.load_state_dict(best)
    ids = t.text.ids["test"]
    frequent = ids.bincount(minlength=len(vocabulary.tokens)).topk(min(CONFUSED, len(ids.unique()))).indices
    scores = score(t, "test", frequent)
    table = scores.pop("table")
    run.log("test: " + ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in scores.items()))
    if run.world.is_main:
        (run.folder / "test.json").write_text(
            json.dumps(scores | {"tokens": len(ids)}, indent=2) + "\n", encoding="utf-8"
        )
        figure, page = confusion_page(table, [vocabulary.tokens[id] for id in frequent])
        run.telemetry.figure("test/confusion", t.plan.total, figure)
        run.telemetry.text("test/confusion", t.plan.total, page)
        for line in sample(t):
            run.log("sample: " + line.replace("\n", " / "))
    run.telemetry.hyperparameters(asdict(run.config), {f"result/test_{name}": value for name, value in scores.items()})


# Before the first step


def prepare_text(config: Config) -> Text:
    """The tokenised text; settings that depend on it are settled."""
    if config.data:
        config.data = str(Path(config.data).expanduser().resolve())  # found again from anywhere
    text = prepare(config.data, config.split_ratios(), config.tokens, config.vocab, config.min_count)
    for split, ids in text.ids.items():
        if len(ids) < config.segment:
            raise UserError(
                f"the {split} text has {len(ids)} tokens, less than one --segment ({config.segment}); give more text"
            )
    if config.glove:
        config.glove = str(Path(config.glove).expanduser().resolve())
        vectors, _ = load_glove(Path(config.glove), text.vocabulary.tokens)
        if config.d_embedding not in (0, vectors.shape[1]):
            raise UserError(f"--d_embedding {config.d_embedding}: these GloVe vectors have {vectors.shape[1]} numbers; "
                            "leave the flag out")  # fmt: skip
        config.d_embedding = vectors.shape[1]
    config.d_embedding = config.d_embedding or config.d_model
    config.epochs = config.epochs or min(30, max(1, round(TOKENS_IN_ALL / len(text.ids["train"]))))
    return text


def set_up(run: Run, text: Text) -> Training:
    """Model, optimizer and sampler, as the last checkpoint has them where the run goes on."""
    config, world = run.config, run.world
    if world.device.type == "cpu":
        keep_freed_memory()
    for line in text.notes:
        run.log(line)
    if world.is_main:
        (run.folder / "vocabulary.txt").write_text("\n".join(text.vocabulary.tokens) + "\n", encoding="utf-8")
    precision = choose_precision(world.device, config.precision, training=True)
    exact = choose_precision(world.device, "fp32")
    run.log(precision.describe())
    torch.manual_seed(config.seed)
    model = LanguageModel(len(text.vocabulary.tokens), config)
    model.start_from_counts(text.ids["train"])
    if config.glove:
        use_glove(model, text, config.glove, run.log)
    model.to(world.device)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() < 2]  # biases and norms
    groups = [dict(params=decayed, weight_decay=config.weight_decay), dict(params=rest, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.98), fused=True)
    tokens = len(text.ids["train"])
    sampler = SegmentSampler(tokens, config.segment, config.sampling, config.sharpness, config.epochs, config.seed)
    steps = config.epochs * math.ceil(len(sampler.lengths) / config.batch)
    run.log(f"model: {sum(p.numel() for p in model.parameters()):,} parameters; {len(sampler.lengths):,} segments, "
            f"{steps:,} steps in {config.epochs} epochs")  # fmt: skip
    t = Training(run, text, precision, exact, model, optimizer, sampler, schedule.plan(config.lr, config.warmup, steps),
                 Meter(config.log_every), {"epoch": 0, "batch": 0, "best_loss": None})  # fmt: skip
    if state := run.restore(model, optimizer):
        resume(t, state)
    return t


def use_glove(model: LanguageModel, text: Text, path: str, log) -> None:
    """Begin with these vectors, and say how much of the text they cover."""
    vectors, found = load_glove(Path(path), text.vocabulary.tokens)
    with torch.no_grad():
        model.embedding.weight.copy_(vectors)
    types, running = coverage(found, text.ids["train"])
    log(f"GloVe: {vectors.shape[1]} numbers a word, projected to {model.width}; {types:.1%} of the vocabulary has a vector, "
        f"{running:.1%} of the running tokens")  # fmt: skip


def save(t: Training, step: int, best: bool = False) -> None:
    """A checkpoint of this step."""
    t.meter.pause()
    t.precision.check_finite()
    extra = {
        "sampler": t.sampler.state_dict(t.run.world),
        "key": t.text.key(),
        "scaler": t.precision.scaler.state_dict(),
    }
    t.run.save(step, t.model, t.optimizer, t.state | extra, best=best)


def resume(t: Training, state: dict) -> None:
    """Go on with the checkpoint's state, given that the text is still what the run began with."""
    if state["key"] != t.text.key():
        raise UserError(f"--resume {t.run.folder}: vocabulary or text at {t.run.config.data} is not what the run began "
                        "with; put it back, or start a new run")  # fmt: skip
    t.sampler.load_state_dict(state["sampler"], t.run.world)
    if state["scaler"]:
        t.precision.scaler.load_state_dict(state["scaler"])
    t.state |= {name: state[name] for name in t.state}


if __name__ == "__main__":
    run_script(lambda: main(config))
