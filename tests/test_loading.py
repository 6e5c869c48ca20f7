"""Whatever way a trained model is named, its weights, tokenizers and settings are found, or it is said why not."""

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
from loading import load_for_decoding, load_trained, newest_run
from text.subwords import encode, special_ids


@pytest.fixture
def run(tiny_run, tmp_path) -> Path:
    """A copy of the run that a test may spoil; its best checkpoint is the second of three."""
    copy = shutil.copytree(tiny_run, tmp_path / "runs" / "tiny", symlinks=True)
    (copy / "checkpoints" / "best").unlink()
    (copy / "checkpoints" / "best").symlink_to("step-30")
    newest = copy / "checkpoints" / "step-45"
    (newest / "state.json").write_text(
        json.dumps(checkpoint.load_state(newest) | {"best_step": 30})
    )
    checkpoint.write_checksums(
        newest, [name for name in checkpoint.CONTENT if (newest / name).exists()]
    )
    return copy


def same_weights(trained, *folders: Path) -> bool:
    """The model has the mean weights of these checkpoints."""
    members, found = (
        [checkpoint.load_weights(folder) for folder in folders],
        trained.model.state_dict(),
    )
    means = {
        name: sum(member[name].double() for member in members) / len(members) for name in members[0]
    }
    return all(torch.equal(found[name], mean.to(found[name].dtype)) for name, mean in means.items())


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    "named, step",
    [
        (".", 30),
        ("checkpoints", 30),
        ("checkpoints/best", 30),
        ("checkpoints/last", 45),
        ("checkpoints/step-15", 15),
        ("checkpoints/step-45", 45),
        ("checkpoints/step-45/model.safetensors", 45),
    ],
)
def test_a_run_a_checkpoint_or_a_file(run, named, step):
    trained = load_trained(run / named)
    for other in (15, 30, 45):
        assert same_weights(trained, run / "checkpoints" / f"step-{other}") == (other == step)
    assert trained.run.samefile(run) and f"step-{step}" in trained.name
    assert not trained.model.training
    assert trained.config == json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert trained.model.config.d_model == 32 and trained.model.config.max_length == 32
    for tokenizer in (trained.source_tokenizer, trained.target_tokenizer):
        assert len(tokenizer) == 300 and special_ids(tokenizer) == {"pad": 0, "bos": 1, "eos": 2}
    assert encode(trained.source_tokenizer, ["一二"]) != encode(
        trained.target_tokenizer, ["一二"]
    )  # not mixed up


def test_a_file_of_weights_that_torch_saved(run):
    weights = checkpoint.load_weights(run / "checkpoints" / "step-45")
    torch.save(
        {"model": {f"module.{name}": tensor for name, tensor in weights.items()}}, run / "mine.pt"
    )
    trained = load_trained(run / "mine.pt")
    assert same_weights(trained, run / "checkpoints" / "step-45") and trained.name == str(
        run / "mine.pt"
    )


def test_a_relative_name(run, monkeypatch):
    monkeypatch.chdir(run / "checkpoints")
    assert same_weights(load_trained("last"), run / "checkpoints" / "step-45")
    monkeypatch.chdir(run.parent.parent)  # the name stands for runs/tiny
    Path("tiny").mkdir()  # no run
    assert same_weights(load_trained("tiny"), run / "checkpoints" / "step-30")


def test_the_newest_run(run, monkeypatch):
    older = shutil.copytree(run, run.parent / "z-older", symlinks=True)
    (run.parent / "not-begun" / "checkpoints").mkdir(parents=True)
    other_lab = run.parent / "lenet"  # the youngest, but it translates nothing
    (other_lab / "checkpoints" / "step-9").mkdir(parents=True)
    (other_lab / "config.json").write_text("{}")
    os.utime(older / "checkpoints", (1e9, 1e9))
    monkeypatch.chdir(run.parent.parent)
    said = []
    trained = load_trained(say=said.append)
    assert trained.run.samefile(run) and said == [
        f"no --ckpt given, using the newest run: {Path('runs/tiny')}"
    ]
    os.utime(run / "checkpoints", (1e8, 1e8))
    assert newest_run(Path("runs")) == str(Path("runs/z-older"))


@pytest.mark.parametrize("beam, faster", [(1, "steps"), (2, None)])
def test_faster_steps_are_for_greedy_search(run, monkeypatch, beam, faster):
    monkeypatch.setattr("fast.steps", lambda *_: "steps")
    flags = SimpleNamespace(ckpt=str(run), precision="int8", beam=beam)
    said = []
    assert load_for_decoding(flags, 1, World(0, 1, torch.device("cpu")), said.append)[2] == faster
    assert "rounded to 8 bits" in said[-1]


# ---------------------------------------------------------------- averages


@pytest.mark.parametrize(
    "named, steps",
    [
        (".", (30, 45)),
        ("checkpoints", (30, 45)),
        ("checkpoints/last", (30, 45)),
        ("checkpoints/step-45", (30, 45)),
        ("checkpoints/step-30", (15, 30)),
        ("checkpoints/best", (15, 30)),  # up to the one that is named
    ],
)
def test_the_mean_of_two(run, named, steps):
    folders = [run / "checkpoints" / f"step-{step}" for step in steps]
    trained = load_trained(run / named, average=2)
    assert same_weights(trained, *folders)
    assert trained.name.startswith(f"mean of {', '.join(folder.name for folder in folders)} of ")


def test_the_mean_of_more_than_there_are(run):
    assert "mean of step-15, step-30, step-45 of" in load_trained(run, average=3).name
    for named, average in ((run, 4), (run / "checkpoints" / "step-15", 2)):
        with pytest.raises(
            UserError, match=f"cannot average {average} checkpoints up to .*; ask for fewer"
        ):
            load_trained(named, average=average)


def test_a_file_has_no_predecessors(run):
    with pytest.raises(
        UserError, match="--average needs a run or a checkpoint folder, not the file"
    ):
        load_trained(run / "checkpoints" / "step-45" / "model.safetensors", average=2)


# ---------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("transformer.encoder.layers.0.linear1.weight", torch.zeros(3, 3)),  # another shape
        ("transformer.encoder.layers.0.linear1.weight", None),
        ("no.such.layer", torch.zeros(1)),
    ],
)
def test_weights_of_another_model_are_named(run, name, tensor):
    weights = checkpoint.load_weights(run / "checkpoints" / "step-45") | {name: tensor}
    torch.save(
        {name: tensor for name, tensor in weights.items() if tensor is not None}, run / "other.pt"
    )
    with pytest.raises(UserError) as error:
        load_trained(run / "other.pt")
    message = str(error.value)
    assert (
        message.startswith(f"{run / 'other.pt'} does not contain the weights of this model: ")
        and name in message
    )
    assert "\n" not in message and len(message) < 500


DAMAGES = [
    ("config.json", "{"),
    ("config.json", "{}"),
    ("config.json", "[]"),
    ("model.json", ""),
    ("model.json", '{"layers": 3}'),
    ("model.json", '{"source_vocab": 300}'),
]


@pytest.mark.parametrize("file, content", [*DAMAGES, ("tokenizer/target/tokenizer.json", "{")])
def test_damaged_settings(run, file, content):
    (run / file).write_text(content)
    with pytest.raises(UserError, match=f"tiny: checksum of {file} differs; put the file back"):
        load_trained(run)
    (run / "checksums.json").unlink()  # as in a run of the version before
    settings = file in ("config.json", "model.json")
    reason = (
        "config.json or model.json is damaged, or of another script"
        if settings
        else "no tokenizer can be read"
    )
    with pytest.raises(UserError, match=reason):
        load_trained(run)
