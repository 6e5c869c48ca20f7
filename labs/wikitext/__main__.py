"""A Transformer language model on WikiText-2 or any text. Every run writes to runs/NAME/.

python -m labs.wikitext                                   # /opt/wikitext-2, else the bundled sample
python -m labs.wikitext --preset handout --glove glove.6B.50d.txt  # lower case, dynamic sampling
python -m labs.wikitext --data novel.txt --glove glove.6B.50d.txt  # any text; GloVe embeddings
python -m labs.wikitext --sampling dynamic                # hard segments more often
python -m labs.wikitext --resume NAME --prompt "The ship"  # continue training; continue a text
python -m labs.wikitext --init NAME --data novel.txt      # fine-tune a trained model on other text
python -m labs.wikitext.trigram NAME                      # the baseline: Kneser–Ney trigrams
torchrun --nproc_per_node 2 -m -- labs.wikitext           # data parallel (DDP): the same batches
tensorboard --logdir runs                                 # curves, samples, confusion table

Sizes in shape comments: B segments in a step, S tokens in a segment, V vocabulary, N tokens whose
loss counts. `attention_mask` is False at padding.
"""

from engine import distributed, schedule  # before PyTorch, whose threads read their settings once

# isort: split
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine import checkpoint
from engine.config import fill_in, flag, given_names, load_config, parse_flags
from engine.errors import UserError, run_script
from engine.layers import save_layers
from engine.meters import perplexity
from engine.precision import choose_precision
from engine.run import INTERRUPTED, Run, find_run, load_weights_into, saved_settings
from labs.wikitext.evaluation import SCORES, evaluate, samples, write_result
from labs.wikitext.glove import load_glove
from labs.wikitext.model import LanguageModel, SmoothedLoss, flops_per_token, unigram_entropy
from labs.wikitext.sampler import SegmentSampler, gather_segments
from labs.wikitext.text import Text, find_data, prepare, run_of

# The handout's settings; a flag on the command line overrides them. The segments are drawn anew
# every 10 epochs: 1 to 10 are static, 11 to 30 dynamic where the model overfits, 31 to 40 static
# again.
HANDOUT = {
    "lowercase": True,
    "dim_feedforward": 2048,
    "dropout": 0.1,
    "clip": 0.5,
    "label_smoothing": 0.1,
    "sampling": "dynamic",
    "resample_every": 10,
    "epochs": 40,
}
# With --init, these are the settings of the run that the weights are from.
INHERITED = (
    "lowercase",
    "seq_length",
    "d_model",
    "d_embedding",
    "nhead",
    "num_layers",
    "dim_feedforward",
    "positions",
)


@dataclass
class Config:
    """Every setting of a run. `fixed`: --resume cannot change it."""

    preset: str = flag(
        "plain", "the lab's settings or its handout's (plain|handout)", "Data", fixed=True
    )
    data: str = flag(
        "",
        "text file, or folder whose file names give the splits; default: wikitext-2 in /opt or "
        "beside the repository, or the sample",
        "Data",
    )
    ratios: str = flag(
        "0.8,0.1,0.1", "train, validation, test: how a missing split is cut", "Data", fixed=True
    )
    lowercase: bool = flag(False, "read the text in lower case, as GloVe 6B is", "Data", fixed=True)
    vocab_size: int = flag(
        0, "the most frequent N words; 0: by --min_count", "Data", min=0, fixed=True
    )
    min_count: int = flag(3, "rarer words are <unk>, as in WikiText", "Data", min=1, fixed=True)
    seq_length: int = flag(64, "tokens per segment, the longest context", "Data", min=2, fixed=True)
    pad: str = flag("right", "side on which a short segment is padded (left|right)", "Data")

    d_model: int = flag(128, "model width", "Model", min=1, fixed=True)
    d_embedding: int = flag(
        0, "embedding width; 0: that of GloVe, else d_model", "Model", min=0, fixed=True
    )
    nhead: int = flag(4, "attention heads", "Model", min=1, fixed=True)
    num_layers: int = flag(2, "encoder layers", "Model", min=1, fixed=True)
    dim_feedforward: int = flag(512, "width of the feed-forward layers", "Model", min=1, fixed=True)
    dropout: float = flag(0.3, "dropout rate", "Model", min=0, below=1, fixed=True)
    positions: str = flag(
        "learned", "positional encoding (learned|sinusoidal)", "Model", fixed=True
    )
    glove: str = flag(
        "", "text file of vectors with which the embedding begins", "Model", fixed=True
    )

    init: str = flag(
        "",
        "begin with the weights, vocabulary and sizes of this run, checkpoint or weights file",
        "Training",
        fixed=True,
    )
    epochs: int = flag(12, "passes over the text", "Training", min=1, fixed=True)
    embedding_share: float = flag(
        0.125,
        "share of the run, at its start, that trains only embedding and positions",
        "Training",
        min=0,
        below=1,
        fixed=True,
    )
    batch_size: int = flag(
        32, "segments per step, of all processes together", "Training", min=1, fixed=True
    )
    lr: float = flag(2e-3, "peak learning rate", "Training", above=0, below=10, fixed=True)
    warmup: int = flag(
        1000, "warm-up steps, at most a tenth of the run", "Training", min=1, fixed=True
    )
    weight_decay: float = flag(
        0.1, "of matrices, not of biases and norms", "Training", min=0, fixed=True
    )
    label_smoothing: float = flag(
        0.1, "share of probability spread over all words", "Training", min=0, below=1, fixed=True
    )
    clip: float = flag(0.5, "largest gradient norm; 0: no clipping", "Training", min=0, fixed=True)
    sampling: str = flag(
        "static",
        "segments: each once per epoch, or by loss (static|dynamic)",
        "Training",
        fixed=True,
    )
    resample_every: int = flag(
        1, "dynamic: epochs per draw; 10 in the handout", "Training", min=1, fixed=True
    )

    run: str = flag("", "name of the run (runs/NAME); default: the time", "Run")
    resume: str = flag("", "run to continue", "Run")
    prompt: str = flag("", "text that the samples continue, besides the validation text", "Run")
    log_every: int = flag(20, "steps between log lines", "Run", min=1)
    precision: str = flag("auto", "number format (auto|fp32|bf16|fp16)", "Run")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N", "Run")
    seed: int = flag(1, "seed of weights, dropout and data order", "Run", min=0, fixed=True)

    def __post_init__(self):
        if self.d_model % max(self.nhead, 1) or self.d_model % 2:
            raise UserError(
                f"--d_model {self.d_model} must be even and a multiple of --nhead {self.nhead}"
            )
        if 0 < self.vocab_size < 3:
            raise UserError(f"--vocab_size {self.vocab_size}: a vocabulary needs at least 3 words")
        self.split_ratios()

    def split_ratios(self) -> tuple[float, ...]:
        """(train, validation, test)."""
        try:
            ratios = tuple(float(word) for word in self.ratios.split(","))
        except ValueError:
            ratios = ()
        if len(ratios) != 3 or not (min(ratios) > 0 and abs(sum(ratios) - 1) < 1e-6):
            raise UserError(
                f"--ratios {self.ratios}: give three numbers above 0 that add up to 1, "
                "like 0.8,0.1,0.1"
            )
        return ratios


@dataclass
class State:
    """What a checkpoint keeps, beside the weights, the optimizer's moments and the sampler."""

    data_key: int  # a checksum of the text
    step: int = 0
    last_validation: int = 0  # step of the last validation
    best_loss: float | None = None


def train(config: Config) -> Path:
    """One training run, from the text to the test. Returns its folder."""
    config = saved_settings(config)
    world = distributed.init(config.device)  # this process among those of torchrun
    device = world.device
    with Run(config, "wikitext", world) as run:  # a new folder, or the one to resume
        log = run.log

        # -------- text: rank 0 reads it for all, and sets the settings that depend on it
        text, vectors, config = world.on_main(lambda: read_text(run.config))
        vocabulary = text.vocabulary
        if run.saved_state:
            text.check(run.folder, run.saved_state["data_key"])

        # -------- model, optimizer, order of the segments
        torch.manual_seed(config.seed)
        model = LanguageModel(len(vocabulary.tokens), config)
        model.start_from_counts(text.ids["train"])
        if vectors is not None:
            model.embedding.weight.data.copy_(vectors)
        if config.init and run.saved_state is None:
            weights = checkpoint.load_weights(Path(config.init))
            load_weights_into(model, weights, Path(config.init))
        model.to(device)
        precision = choose_precision(device, config.precision, training=True, world=world)
        matrices = [weight for weight in model.parameters() if weight.dim() > 1]
        biases_and_norms = [weight for weight in model.parameters() if weight.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": biases_and_norms, "weight_decay": 0.0},
        ]
        # The betas of Vaswani et al. 2017.
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.98), fused=True)
        sampler = SegmentSampler(len(text.ids["train"]), config, device)
        steps_per_epoch = math.ceil(len(sampler.lengths) / config.batch_size)
        total_steps = config.epochs * steps_per_epoch
        embedding_steps = round(config.embedding_share * total_steps)
        warmup = schedule.warmup_steps(config.warmup, total_steps)

        # -------- a resumed run continues with its weights, moments and place in the text
        state = State(text.checksum())
        if saved := run.restore(model, optimizer, precision):
            sampler.load_state_dict(saved.pop("sampler"), world)
            state = State(**saved)

        # -------- the folder becomes a run
        if world.is_main:
            vocabulary.save(run.folder)  # before the settings: a run always has its vocabulary
        run.record_start(config, precision)
        if world.is_main:
            segment = text.ids["train"][None, : model.causal_mask.size(0)]  # (1, S)
            save_layers(run.folder, model, segment, torch.ones_like(segment, dtype=torch.bool))
        for line in (*text.notes, precision.describe(), str(model)):
            log(line)
        log(
            f"the loss of a guess: {math.log(len(vocabulary.tokens)):.3f} if all words are equally "
            f"likely, {unigram_entropy(text.ids['train']):.3f} by their frequency"
        )
        log(
            f"model: {sum(weight.numel() for weight in model.parameters()):,} parameters, "
            f"{flops_per_token(model, config.seq_length):,} FLOPs a training token; "
            f"{len(sampler.lengths):,} segments, {total_steps:,} steps in {config.epochs} epoch(s)"
        )

        # -------- the loop
        runner = None
        segments_of_epoch = None
        token_count = 0  # of all processes, since `begun`
        begun = time.perf_counter()
        while True:
            # Between two steps: is an epoch over? Validate and save. Is the run asked to stop?
            interrupted = run.stop_asked()
            epoch, step_of_epoch = divmod(state.step, steps_per_epoch)
            epoch_over = state.step > state.last_validation and step_of_epoch == 0
            improved = False
            if epoch_over and not interrupted:
                scores = evaluate(model, text.ids["validation"], vocabulary, world)
                sampler.end_epoch(world, epoch - 1, scores["loss"])
                improved = state.best_loss is None or scores["loss"] < state.best_loss
                state.last_validation = state.step
                if improved:
                    state.best_loss = scores["loss"]
                curves = {f"valid/{name}": scores[name] for name in SCORES}
                run.scalars(state.step, curves | sampler.figures())
                log(
                    f"epoch {epoch} of {config.epochs}: validation loss {scores['loss']:.4f}, "
                    f"perplexity {scores['perplexity']:.2f}, accuracy {scores['accuracy']:.1%}"
                    f"{', the best so far' if improved else ''}"
                )
                if world.is_main:
                    continued = samples(model, text, config.prompt, config.seed)
                    run.telemetry.text("samples", state.step, "\n\n".join(continued))
                    log(f"sample: {continued[-1]}".replace("\n", "/"))
            if epoch_over or interrupted:
                saved = asdict(state) | {"sampler": sampler.state_dict(world)}
                run.save(state.step, model, optimizer, saved, precision, improved)
                # The speed is that of training alone.
                token_count = 0
                begun = time.perf_counter()
            if interrupted or state.step >= total_steps:
                break

            # The handout's two stages: embedding and positions, then all weights.
            step = state.step + 1
            if runner is None or step == embedding_steps + 1:
                runner = start_stage(model, config, run, embedding_only=step <= embedding_steps)
                trained = [weight for weight in model.parameters() if weight.requires_grad]
            # Rate and random numbers depend on the step alone: a resumed run repeats them.
            progress = schedule.progress(state.step, total_steps)
            lr = schedule.learning_rate(config.lr, step, progress, warmup)
            for group in optimizer.param_groups:
                group["lr"] = lr
            world.set_seed(config.seed, step)

            # The batch: segments of the text, (B,), of which this rank takes every `size`th.
            if step_of_epoch == 0 or segments_of_epoch is None:
                segments_of_epoch = sampler.plan(epoch).split(config.batch_size)
            segments = segments_of_epoch[step_of_epoch]
            tokens_in_step = sampler.lengths[segments].sum().item()  # of all ranks
            local = segments[world.rank :: world.size]
            # DDP wants a forward pass of a rank without a segment, too; nothing of it counts.
            visited = local if len(local) else segments[:1]
            spans = sampler.spans(visited)
            # The batch stays on the CPU; the model sends what it needs to the GPU.
            tokens, targets, attention_mask = gather_segments(
                text.ids["train"], spans, vocabulary.eos, config.seq_length, config.pad
            )
            counted = attention_mask & (len(local) > 0)

            model.train()
            with precision.autocast():
                smoothed, losses = runner(tokens, targets, attention_mask, counted)  # scalar, (N,)
            # The mean over the tokens of all ranks. × size, because DDP averages the gradients.
            precision.backward(smoothed / tokens_in_step * world.size)
            # Clip the gradient, update the weights, clear the gradient.
            gradient_norm = precision.step(optimizer, trained, config.clip, step)
            state.step = step

            sampler.record(visited, losses, counted)
            token_count += tokens_in_step

            if step % config.log_every == 0 or step == total_steps:
                # Only here does the loop wait for the GPU.
                precision.check_finite()
                sums = world.sum(torch.stack([smoothed.detach(), losses.sum()]))
                # The smoothed loss is minimised; only the plain one makes a perplexity.
                smoothed_loss, loss = (sums / tokens_in_step).tolist()
                speed = token_count / (time.perf_counter() - begun)
                token_count = 0
                begun = time.perf_counter()
                norm = gradient_norm.item()
                curves = {
                    "train/smoothed_loss": smoothed_loss,
                    "train/loss": loss,
                    "train/perplexity": perplexity(loss),
                    "train/learning_rate": lr,
                    "train/gradient_norm": norm,
                    "speed/tokens_per_second": speed,
                }
                run.scalars(step, curves)
                log(
                    f"step {step:>6,}  epoch {step / steps_per_epoch:5.2f}"
                    f"  loss {smoothed_loss:.3f} smoothed, {loss:.3f} plain  lr {lr:.2e}"
                    f"  |gradient| {norm:.2f}  {speed:,.0f} tokens/s"
                )

        if interrupted:
            run.close(INTERRUPTED, state.step)
        else:
            # The checkpoint with the lowest validation loss, on the test text.
            weights = world.on_main(lambda: checkpoint.load_weights(checkpoint.resolve(run.folder)))
            model.load_state_dict(weights)
            scores = evaluate(model, text.ids["test"], vocabulary, world)
            if world.is_main:
                write_result(run, state.step, model, text, scores)
                for line in samples(model, text, config.prompt, config.seed):
                    log(f"sample: {line}".replace("\n", "/"))
            run.close("finished", state.step)
        return run.folder


def apply_preset(config: Config) -> None:
    """--preset handout: its settings, except for those that flags set. It needs GloVe vectors."""
    if config.preset == "handout":
        fill_in(config, HANDOUT)
        if not config.glove and not config.init:
            raise UserError(
                "--preset handout begins with GloVe vectors; unpack "
                "https://nlp.stanford.edu/data/glove.6B.zip and give --glove glove.6B.50d.txt"
            )


def start_from(config: Config) -> None:
    """--init: the sizes of the model that the run begins with, and where its weights are."""
    chosen = checkpoint.resolve(find_run(config.init)).absolute()
    source = load_config(Config, run_of(chosen) / "config.json")
    given = given_names(config)
    for name in INHERITED:
        asked, value = getattr(config, name), getattr(source, name)
        if name in given and asked != value:
            raise UserError(
                f"--init {config.init}: its --{name} is {value!r}, so it cannot be {asked!r}; "
                "leave the flag out"
            )
        setattr(config, name, value)
    useless = given & {"glove", "vocab_size", "min_count"}
    if useless:
        raise UserError(
            f"--init {config.init} brings its vocabulary and embedding, so --{min(useless)} has no "
            "effect; leave the flag out"
        )
    config.init = str(chosen)


def read_text(config: Config) -> tuple[Text, Tensor | None, Config]:
    """The text, the GloVe vectors of its vocabulary, and the settings that depend on both.

    A resumed run has its vocabulary and its embedding already.
    """
    config.data = find_data(config.data)
    of_run = Path(config.resume) if config.resume else None
    if config.init and not of_run:
        of_run = run_of(Path(config.init))
    text = prepare(
        config.data,
        config.split_ratios(),
        config.vocab_size,
        config.min_count,
        config.lowercase,
        of_run,
    )
    for split, ids in text.ids.items():
        if len(ids) < config.seq_length:
            raise UserError(
                f"the {split} text has {len(ids)} tokens, less than one --seq_length "
                f"({config.seq_length}); give more text"
            )
    vectors = None
    if config.glove and not of_run:
        config.glove = str(Path(config.glove).expanduser().resolve())
        vectors, known = load_glove(Path(config.glove), text.vocabulary.tokens)
        width = vectors.shape[1]
        if config.d_embedding not in (0, width):
            raise UserError(
                f"--d_embedding {config.d_embedding}: these GloVe vectors have {width} numbers; "
                "leave the flag out"
            )
        config.d_embedding = width
        types = known.double().mean().item()
        running = known[text.ids["train"]].double().mean().item()
        text.notes.append(
            f"GloVe: {width} numbers per word, projected to {config.d_model}; {types:.1%} of the "
            f"vocabulary has a vector, {running:.1%} of the running tokens"
        )
    return text, vectors, config


def start_stage(
    model: LanguageModel, config: Config, run: Run, embedding_only: bool
) -> torch.nn.Module:
    """Freeze what the stage does not train; model and loss in one module, for this rank."""
    first = {id(weight) for weight in model.embedding_parameters()}
    for weight in model.parameters():
        weight.requires_grad_(not embedding_only or id(weight) in first)
    trained = "embedding and positions are trained" if embedding_only else "all weights are trained"
    run.log(f"stage: {trained}")
    # DDP asks at its construction which weights are frozen.
    return run.world.data_parallel(SmoothedLoss(model, config.label_smoothing))


def main(config: Config) -> Path:
    """Train, with the settings of the preset and of --init; a resumed run has them already."""
    if not config.resume:
        apply_preset(config)
        if config.init:
            start_from(config)
    return train(config)


if __name__ == "__main__":
    settings = parse_flags(Config, "train a language model; the result goes to runs/NAME")
    run_script(lambda: main(settings))
