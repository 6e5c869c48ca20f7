"""Any way of naming a trained model finds its weights, tokenizers and settings, or says why not."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine import checkpoint
from engine.distributed import World
from engine.errors import UserError
from loading import load_for_decoding, load_trained, mean_of, newest_run
from text.subwords import encode, special_ids


@pytest.fixture
def run(tiny_run, tmp_path) -> Path:
    """A copy of the run that a test may damage; its best checkpoint is the second of three."""
    copy = shutil.copytree(tiny_run, tmp_path / "runs" / "tiny", symlinks=True)
    (copy / "checkpoints" / "best").unlink()
    (copy / "checkpoints" / "best").symlink_to("step-30")
    newest = copy / "checkpoints" / "step-45"
    state = checkpoint.load_state(newest) | {"best_step": 30}
    (newest / "state.json").write_text(json.dumps(state))
    names = [name for name in checkpoint.CONTENT if (newest / name).exists()]
    checkpoint.write_checksums(newest, names)
    return copy


def has_mean_of(trained, *folders: Path) -> bool:
    """Whether the model has the mean weights of these checkpoints."""
    members = [checkpoint.load_weights(folder) for folder in folders]
    for name, weight in trained.model.state_dict().items():
        mean = sum(member[name].double() for member in members) / len(members)
        if not torch.equal(weight, mean.to(weight.dtype)):
            return False
    return True


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    "named, step",
    [
        (".", 30),
        ("checkpoints/best", 30),
        ("checkpoints/last", 45),
        ("checkpoints/step-15", 15),
        ("checkpoints/step-45/model.safetensors", 45),
    ],
)
def test_a_run_a_checkpoint_or_a_file(run, named, step):
    trained = load_trained(run / named)
    for other in (15, 30, 45):
        assert has_mean_of(trained, run / "checkpoints" / f"step-{other}") == (other == step)
    assert trained.run.samefile(run) and f"step-{step}" in trained.name
    assert not trained.model.training
    assert trained.config == json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert trained.model.config.d_model == 32 and trained.model.config.max_length == 32
    tokenizers = trained.source_tokenizer, trained.target_tokenizer
    for tokenizer in tokenizers:
        assert len(tokenizer) == 300 and special_ids(tokenizer) == {"pad": 0, "bos": 1, "eos": 2}
    source_ids, target_ids = (encode(tokenizer, ["一二"]) for tokenizer in tokenizers)
    assert source_ids != target_ids  # each side has its own


def test_a_file_of_weights_that_torch_saved(run):
    weights = checkpoint.load_weights(run / "checkpoints" / "step-45")
    prefixed = {f"module.{name}": weight for name, weight in weights.items()}
    torch.save({"model": prefixed}, run / "mine.pt")
    trained = load_trained(run / "mine.pt")
    assert has_mean_of(trained, run / "checkpoints" / "step-45")
    assert trained.name == str(run / "mine.pt")


def test_a_relative_name(run, monkeypatch):
    monkeypatch.chdir(run / "checkpoints")
    assert has_mean_of(load_trained("last"), run / "checkpoints" / "step-45")
    monkeypatch.chdir(run.parent.parent)  # the name stands for runs/tiny
    Path("tiny").mkdir()  # no run
    assert has_mean_of(load_trained("tiny"), run / "checkpoints" / "step-30")
    shutil.copytree(run, "q/r", symlinks=True)  # a name with a slash is a path
    assert load_trained("q/r").run.samefile("q/r")
    with pytest.raises(UserError, match="q/tiny does not exist"):
        load_trained("q/tiny")


def test_the_newest_run(run, monkeypatch):
    older = shutil.copytree(run, run.parent / "z-older", symlinks=True)
    (run.parent / "not-begun" / "checkpoints").mkdir(parents=True)
    other_lab = run.parent / "lenet"  # the newest, but it translates nothing
    (other_lab / "checkpoints" / "step-9").mkdir(parents=True)
    (other_lab / "config.json").write_text("{}")
    os.utime(older / "checkpoints", (1e9, 1e9))
    monkeypatch.chdir(run.parent.parent)
    lines = []
    assert load_trained(log=lines.append).run.samefile(run)
    assert lines == [f"no --ckpt given, using the newest run: {Path('runs/tiny')}"]
    os.utime(run / "checkpoints", (1e8, 1e8))
    assert newest_run() == str(Path("runs/z-older"))


def test_the_faster_decoder_is_in_8_bits_if_asked(run, monkeypatch):
    monkeypatch.setattr("loading.Decoder", lambda model, **options: options)
    flags = SimpleNamespace(ckpt=str(run), precision="int8", fast=True)
    lines = []
    _, precision, found = load_for_decoding(
        flags, 1, World(0, 1, torch.device("cpu")), lines.append
    )
    assert (
        found["int8"]
        and found["compiled"]
        and "rounded to 8 bits" in lines[-1]
        and precision.name == "fp32"
    )


# ---------------------------------------------------------------- means


@pytest.mark.parametrize(
    "named, steps",
    [
        (".", (30, 45)),
        ("checkpoints/last", (30, 45)),
        ("checkpoints/step-30", (15, 30)),
        ("checkpoints/best", (15, 30)),  # up to the one that is named
    ],
)
def test_the_mean_of_two(run, named, steps):
    folders = [run / "checkpoints" / f"step-{step}" for step in steps]
    trained = load_trained(run / named, average=2)
    assert has_mean_of(trained, *folders)
    assert trained.name.startswith(f"mean of {', '.join(folder.name for folder in folders)} of ")


def test_means_that_cannot_be_made(run):
    assert "mean of step-15, step-30, step-45 of" in load_trained(run, average=3).name
    for named, average in ((run, 4), (run / "checkpoints" / "step-15", 2)):
        message = f"cannot average {average} checkpoints up to .*; ask for fewer"
        with pytest.raises(UserError, match=message):
            load_trained(named, average=average)
    file = run / "checkpoints" / "step-45" / "model.safetensors"
    with pytest.raises(UserError, match="--average needs a run or a checkpoint folder, not"):
        load_trained(file, average=2)


@pytest.mark.parametrize(
    "other", [{"a": torch.zeros(3)}, {"a": torch.zeros(2).half()}, {"b": torch.zeros(2)}]
)
def test_unlike_weights_have_no_mean(tmp_path, other):
    files = [tmp_path / "first.pt", tmp_path / "second.pt"]
    for file, weights in zip(files, ({"a": torch.zeros(2)}, other)):
        torch.save(weights, file)
    with pytest.raises(UserError, match=r"cannot average .*second\.pt with .*first\.pt: their"):
        mean_of(files)


# ---------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize(
    "name, weight",
    [
        ("transformer.encoder.layers.0.linear1.weight", torch.zeros(3, 3)),  # another shape
        ("transformer.encoder.layers.0.linear1.weight", None),
        ("no.such.layer", torch.zeros(1)),
    ],
)
def test_weights_of_another_model_are_named(run, name, weight):
    weights = checkpoint.load_weights(run / "checkpoints" / "step-45")
    if weight is None:
        del weights[name]
    else:
        weights[name] = weight
    torch.save(weights, run / "other.pt")
    with pytest.raises(UserError) as error:
        load_trained(run / "other.pt")
    message = str(error.value)
    start = f"{run / 'other.pt'} does not contain the weights of this model: "
    assert message.startswith(start) and name in message
    assert "\n" not in message and len(message) < 500


def test_weights_that_are_not_finite(run):
    weights = checkpoint.load_weights(run / "checkpoints" / "step-45")
    weights["output.bias"][7] = float("nan")
    torch.save(weights, run / "nan.pt")
    with pytest.raises(UserError, match=r"nan\.pt has weights that are not finite"):
        load_trained(run / "nan.pt")


def test_a_tokenizer_of_another_run(run):
    sizes = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps(sizes | {"target_vocab": 299}))
    with pytest.raises(UserError, match="the target tokenizer has 300 tokens but the model 299"):
        load_trained(run)


@pytest.mark.parametrize(
    "file, content",
    [
        ("config.json", "{"),
        ("config.json", "{}"),
        ("config.json", "[]"),
        ("model.json", '{"layers": 3}'),
        ("model.json", '{"source_vocab": 300}'),
        ("tokenizer/target/tokenizer.json", "{"),
    ],
)
def test_damaged_settings(run, file, content):
    (run / file).write_text(content)
    reason = "config.json or model.json is damaged or of another script"
    if file.startswith("tokenizer"):
        reason = "no tokenizer can be read"
    with pytest.raises(UserError, match=reason):
        load_trained(run)
