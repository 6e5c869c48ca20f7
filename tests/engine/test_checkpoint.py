"""After a kill, a full disk, a flipped bit or a hostile pickle an earlier checkpoint serves."""

import errno
import io
import os
import pickle
import shutil
import tempfile
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from engine import checkpoint as ck
from engine.errors import UserError

FILES = [*ck.CONTENT, "state.json", "checksums.json"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)  # has an integer buffer
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight


def trained() -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model.output(model.norm(model.embedding(torch.tensor([1, 2, 3])))).square().sum().backward()
        optimizer.step()
    return model, optimizer


MODEL, OPTIMIZER = trained()


def save(folder: Path, step: int, best_step: int | None = None, keep: int = 5, **state) -> Path:
    ck.save(folder, step, MODEL.state_dict(), OPTIMIZER.state_dict(), state, keep, best_step)
    return folder / f"step-{step}"


def equal(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right


class Hostile:
    """Unpickling this creates the file."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


# ---------------------------------------------------------------- round trip


def test_round_trip_is_bit_equal_and_gives_tied_weights_back_under_all_names(tmp_path):
    state = {"best_score": 31.5, "sampler": {"epoch": 2, "position": 17}, "note": "最好"}
    whole = torch.arange(12.0).reshape(3, 4)
    views = {"part": whole[1], "transposed": whole.T, "same": whole, "half": whole.bfloat16()}
    tensors = dict(MODEL.state_dict()) | views
    ck.save(tmp_path, 300, tensors, OPTIMIZER.state_dict(), state)
    checkpoint = tmp_path / "step-300"
    assert ck.verify(checkpoint) is None
    assert equal(ck.load_weights(checkpoint), tensors)
    assert equal(ck.load_tensors(checkpoint / "optimizer.pt"), OPTIMIZER.state_dict())
    assert ck.load_state(checkpoint) == state | {"step": 300, "best_step": None}


def test_links_are_relative_and_follow_the_saves(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    save(folder, 1, best_step=1)
    save(folder, 2, best_step=1)
    assert os.readlink(folder / "best") == "step-1"
    assert os.readlink(folder / "last") == "step-2"
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert ck.resolve(moved).name == "step-1"
    assert sorted(path.name for path in (moved / "checkpoints").iterdir()) == [
        "best",
        "last",
        "step-1",
        "step-2",
    ]


def test_a_disk_without_links_has_checkpoints_all_the_same(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2):
        save(folder, step, best_step=1)
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2"]
    assert (
        ck.resolve(tmp_path / "run") == folder / "step-1" and ck.repair(folder) == folder / "step-2"
    )


def test_keeps_the_newest_and_the_best(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step, best_step=2 if step > 1 else None, keep=3)
    assert ck.steps(tmp_path) == [2, 5, 6, 7]
    # The optimizer's state is twice the size of the weights: only those that a run may go on from
    # keep it.
    assert [
        step for step in ck.steps(tmp_path) if (tmp_path / f"step-{step}" / "optimizer.pt").exists()
    ] == [6, 7]
    assert all(ck.verify(tmp_path / f"step-{step}") is None for step in ck.steps(tmp_path))
    assert (
        ck.verify(tmp_path / "step-5", to_resume=True)
        == "its optimizer state was removed, to save space"
    )
    save(tmp_path, 8, best_step=8, keep=3)
    assert ck.steps(tmp_path) == [6, 7, 8] and not list(
        tmp_path.glob(".*")
    )  # the disk is free again


def test_a_run_goes_on_from_the_newest_that_has_all_and_its_links_are_set_anew(
    tmp_path, capsys, monkeypatch
):
    for step in (1, 2, 3):
        save(tmp_path, step, best_step=2 if step > 1 else None)
    for link in ("best", "last"):  # a kill came before they were set
        (tmp_path / link).unlink()
        (tmp_path / link).symlink_to("step-1")
    hashed, hash_of = [], ck._hash_of
    monkeypatch.setattr(ck, "_hash_of", lambda file: hashed.append(file.name) or hash_of(file))
    assert ck.repair(tmp_path) == tmp_path / "step-3" and capsys.readouterr().err == ""
    assert (
        ck.load_weights(tmp_path / "step-3") and hashed == ck.CONTENT
    )  # gigabytes, so each file once
    assert os.readlink(tmp_path / "best") == "step-2" and os.readlink(tmp_path / "last") == "step-3"
    for step in (2, 3):
        spoil(tmp_path / f"step-{step}" / "model.safetensors")
    removed = r"step-1 \(its optimizer state was removed, to save space\)"
    said = rf"^no checkpoint in .* can be used: step-3 .*, {removed}"
    with pytest.raises(UserError, match=said):
        ck.repair(tmp_path)
    assert ck.latest(tmp_path) == tmp_path / "step-1"  # to translate it does


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, keep=2)
    spoil(tmp_path / "step-30" / "model.safetensors")
    assert ck.repair(tmp_path) == tmp_path / "step-20"
    spoil(save(tmp_path, 25, keep=2) / "model.safetensors")
    assert ck.repair(tmp_path) == tmp_path / "step-20"  # still there to fall back on
    save(tmp_path, 30, keep=2)
    assert ck.steps(tmp_path) == [20, 30] and ck.verify(tmp_path / "step-30") is None
    spoil(tmp_path / "step-30" / "optimizer.pt")
    assert ck.repair(tmp_path) == tmp_path / "step-20"
    spoil(save(tmp_path, 35) / "optimizer.pt")
    assert ck.repair(tmp_path) == tmp_path / "step-20"  # with its optimizer's state
    kept_aside = {path.name for path in tmp_path.glob("damaged-*")}
    assert kept_aside == {"damaged-step-25", "damaged-step-30", "damaged-step-35"}


def test_reading_changes_nothing(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / ".tmp-step-2-7")  # a save of step 2 is at work
    before = sorted(path.name for path in tmp_path.iterdir())
    assert ck.latest(tmp_path) == ck.resolve(tmp_path) == tmp_path / "step-1"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_saving_a_step_again_changes_its_state_alone(tmp_path):
    """A resumed run may validate before its first update, and then has another state to save."""
    save(tmp_path, 1, round=1)
    weights = (tmp_path / "step-1" / "model.safetensors").stat()
    save(tmp_path, 1, best_step=1, round=2)
    assert ck.load_state(tmp_path / "step-1") == {"round": 2, "best_step": 1, "step": 1}
    assert ck.verify(tmp_path / "step-1") is None
    assert (tmp_path / "step-1" / "model.safetensors").stat().st_ino == weights.st_ino
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "last", "step-1"]


def test_steps_of_no_folder_and_of_strange_names(tmp_path):
    assert ck.steps(tmp_path / "none") == []
    for name in ("step-x", "step-", "step-007", "astep-1", ".tmp-step-4-1", "step-12"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-5").write_text("a file", encoding="utf-8")
    assert ck.steps(tmp_path) == [12]


# ---------------------------------------------------------------- errors and kills while saving

# Every call by which `save` changes the disk, in the order in which it may come.
STAGES = [
    (os, name) for name in ("mkdir", "replace", "rename", "fsync", "symlink", "unlink", "rmdir")
]
STAGES.append((Path, "write_bytes"))


def fail_at(monkeypatch, number: int, action) -> list[str]:
    """Let the call with this number, counted over all STAGES, do `action`.

    Returns the growing list of calls.
    """
    calls: list[str] = []

    def wrap(name, original):
        def call(*arguments, **keywords):
            calls.append(name)
            if len(calls) == number:
                if name == "write_bytes":
                    original(arguments[0], arguments[1][: len(arguments[1]) // 2])
                action()
            return original(*arguments, **keywords)

        return call

    for owner, name in STAGES:
        monkeypatch.setattr(owner, name, wrap(name, getattr(owner, name)))
    return calls


def disk_full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def stages(tmp_path):
    """Numbered folders with two checkpoints, until a save in one of them succeeds."""
    for number in count(1):
        folder = tmp_path / str(number)
        save(folder, 1)
        save(folder, 2, best_step=2)
        yield number, folder


def check_intact(folder: Path) -> None:
    """An earlier checkpoint serves, nothing damaged has a name, and the next save finds its way."""
    assert ck.latest(folder).name in ("step-2", "step-3")
    assert all(ck.verify(folder / f"step-{kept}") is None for kept in ck.steps(folder))
    assert ck.verify(folder / "best") is None
    save(folder, 4, best_step=2, keep=9)
    assert ck.latest(folder).name == "step-4"
    assert not list(folder.glob(".*"))


def test_all_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A power cut behind the renaming would otherwise leave a checkpoint of zeros."""
    calls = fail_at(monkeypatch, 0, disk_full)  # none fails
    save(tmp_path / "checkpoints", 1)
    named = calls.index("replace")
    assert (
        calls[:named] == ["mkdir"] * 2 + ["write_bytes", "fsync"] * 4 + ["fsync"]
        and "fsync" in calls[named:]
    )


@pytest.mark.parametrize("step", [3, 2], ids=["new step", "step again"])
def test_an_error_at_any_stage_leaves_an_earlier_checkpoint_intact(tmp_path, step):
    stopped = 0
    for number, folder in stages(tmp_path):
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = fail_at(monkeypatch, number, disk_full)
            try:
                save(folder, step, keep=2, best_step=2)
            except UserError as error:
                stopped += 1
                message = str(error)
                assert message.startswith(f"cannot write step-{step} in {folder}: No space left")
                assert message.endswith(f"; fix this, then --resume {folder.parent}")
        if len(calls) < number:
            break
        assert not list(folder.glob(".tmp-step-*"))
        check_intact(folder)
    assert stopped >= (11 if step == 3 else 4), calls


@pytest.mark.parametrize("step", [3, 2], ids=["new step", "step again"])
def test_a_kill_at_any_stage_leaves_an_earlier_checkpoint_intact(tmp_path, step):
    for number, folder in stages(tmp_path):
        child = os.fork()
        if child == 0:  # no `finally` and no `except` of `save` runs after this, as with kill -9
            try:
                fail_at(pytest.MonkeyPatch(), number, lambda: os._exit(9))
                save(folder, step, keep=2, best_step=2)
                os._exit(0)
            finally:
                os._exit(1)  # an error here is not for a second pytest
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
        assert ck.verify(ck.latest(folder)) is None  # to read; the writer settles what is half done
        ck.repair(folder)
        check_intact(folder)
    assert number > (15 if step == 3 else 8)


# ---------------------------------------------------------------- damage


def spoil(path: Path, share: float = 0.5, change: int = 0x20) -> None:
    """Change the byte at this share of the file, or, if `change` is 0, cut the file off there."""
    data = bytearray(path.read_bytes())
    offset = int(share * len(data))
    data[offset : offset + 1 if change else None] = [data[offset] ^ change] if change else b""
    path.write_bytes(data)


def truncate(path: Path) -> None:
    spoil(path, change=0)


@pytest.mark.parametrize(
    "damage, name",
    [
        (damage, name)
        for damage in (truncate, spoil, Path.unlink)
        for name in FILES
        if (damage, name)
        != (Path.unlink, "optimizer.pt")  # that is how old checkpoints are made smaller
    ],
)
def test_damage_is_seen_and_the_checkpoint_before_is_used(tmp_path, capsys, name, damage):
    save(tmp_path, 200)
    save(tmp_path, 300)
    damage(tmp_path / "step-300" / name)
    reason = ck.verify(tmp_path / "step-300")
    assert name in reason or name == "checksums.json"  # where a flipped bit may make another sum
    assert ck.latest(tmp_path) == tmp_path / "step-200"
    assert capsys.readouterr().err == f"checkpoint step-300 ({reason}) is skipped; using step-200\n"
    with pytest.raises(
        UserError, match=r"step-300 is not an intact checkpoint .*give a run directory"
    ):
        ck.resolve(tmp_path / "step-300")


@pytest.mark.parametrize(
    "text", ["", "[]", "3", '"x"', "null", "[" * 100_000, '{"state.json": 1}', '["optimizer.pt"]']
)
def test_checksums_that_are_no_table(tmp_path, text):
    checkpoint = save(tmp_path, 1)
    (checkpoint / "checksums.json").write_text(text, encoding="utf-8")
    assert ck.verify(checkpoint) == "checksums.json is damaged"


def test_an_empty_directory_is_passed_over_and_all_damaged_is_an_error(tmp_path, capsys):
    save(tmp_path, 1)
    (tmp_path / "step-2").mkdir()
    assert ck.latest(tmp_path).name == "step-1"
    assert "step-2 (checksums.json is missing) is skipped" in capsys.readouterr().err
    (tmp_path / "step-1" / "state.json").unlink()
    with pytest.raises(
        UserError, match=r"can be used: step-2 \(.*\), step-1 \(state.json is missing\)"
    ):
        ck.latest(tmp_path)
    with pytest.raises(UserError, match="nothing is saved yet"):
        ck.latest(tmp_path / "nothing")


@pytest.fixture(scope="module")
def whole_checkpoint(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("intact"), 1)


shares, changes = st.floats(0, 1, exclude_max=True), st.integers(0, 255)


@settings(max_examples=150, database=None)
@given(st.sampled_from(FILES), shares, changes)
def test_any_changed_byte_or_truncation_is_seen(whole_checkpoint, name, share, change):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(shutil.copytree(whole_checkpoint, Path(folder, "step-1")))
        spoil(checkpoint / name, share, change)
        assert ck.verify(checkpoint) is not None
        with pytest.raises(UserError):
            ck.resolve(checkpoint)


@settings(max_examples=150, database=None)
@given(shares, changes)
def test_damage_under_fitting_checksums_ends_in_a_user_error_or_in_plain_values(
    whole_checkpoint, share, change
):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("model.safetensors", "optimizer.pt"):
            path = Path(shutil.copy(whole_checkpoint / name, folder))
            spoil(path, share, change)
            try:
                weights = ck.load_weights(path)
            except UserError as error:
                assert "\n" not in str(error)
            else:
                assert all(isinstance(tensor, torch.Tensor) for tensor in weights.values())


# ---------------------------------------------------------------- weights files, also hostile ones


@pytest.mark.filterwarnings("ignore")  # torch's advice on the old formats made here
def test_no_code_runs_when_a_hostile_file_is_opened(tmp_path):
    trap = tmp_path / "trap"
    checkpoint = save(tmp_path / "checkpoints", 1)
    torch.save({"state": Hostile(trap)}, checkpoint / "optimizer.pt")
    ck.write_checksums(checkpoint, ck.CONTENT)  # what an attacker can do as well
    assert ck.verify(checkpoint) is None
    with pytest.raises(UserError, match="would run code when opened"):
        ck.load_tensors(checkpoint / "optimizer.pt")
    torch.save({"weight": Hostile(trap)}, tmp_path / "zip.pt")
    torch.save(
        {"weight": Hostile(trap)}, tmp_path / "legacy.bin", _use_new_zipfile_serialization=False
    )
    torch.save(nn.Linear(1, 1), tmp_path / "module.pth")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Hostile(trap)))
    torch.jit.script(nn.Linear(1, 1)).save(str(tmp_path / "script.pt"))
    for name in ("zip.pt", "legacy.bin", "module.pth", "plain.pt", "script.pt"):
        with pytest.raises(
            UserError, match=f"{name} contains more than tensors and would run code when opened"
        ):
            ck.load_weights(tmp_path / name)
    assert not trap.exists()
    pickle.loads(
        pickle.dumps(Hostile(trap))
    )  # the trap works: only so does this test mean anything
    assert trap.exists()


def torch_bytes(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


WEIGHTS = {"layer.weight": torch.arange(4.0), "steps": torch.tensor(3)}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello world",
        b"{}",
        b"\x00" * 100,
        bytes(range(256)),
        torch_bytes(WEIGHTS)[:200],
        torch_bytes([1, 2]),
    ]
    + [
        torch_bytes(value)
        for value in ({}, {"epoch": 3}, {"model": {"a": 1}}, torch.zeros(3), {1: torch.zeros(1)})
    ],
)
def test_a_file_that_holds_no_weights_is_one_line(tmp_path, suffix, content):
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)) as error:
        ck.load_weights(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "wrap", [lambda w: w, lambda w: {"model": w, "epoch": 3}, lambda w: {"state_dict": w}]
)
@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_wrappings_and_prefixes_are_taken_off(tmp_path, wrap, prefix):
    weights = WEIGHTS | {"encoder.module.weight": torch.zeros(1)}  # inside a name it stays
    torch.save(wrap({prefix + name: tensor for name, tensor in weights.items()}), tmp_path / "w.pt")
    assert equal(ck.load_weights(tmp_path / "w.pt"), weights)


# ---------------------------------------------------------------- resolve


# How each name leads to its checkpoint: tests/test_loading.py.


def test_a_damaged_best_gives_way_to_the_latest(tmp_path, capsys):
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3):
        save(folder, step, best_step=2 if step > 1 else None)
    spoil(folder / "step-2" / "model.safetensors")
    assert ck.resolve(tmp_path / "run") == folder / "step-3"
    assert "step-2, is damaged (checksum of model.safetensors differs)" in capsys.readouterr().err
    (folder / "best").unlink()
    assert ck.resolve(tmp_path / "run") == folder / "step-3"
    assert "using the latest" in capsys.readouterr().err


def test_resolve_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(save(tmp_path, 1))
    assert ck.resolve(".") == tmp_path / "step-1"


@pytest.mark.parametrize(
    "name, reason",
    [
        ("absent", "does not exist; give a run directory"),
        ("notes.txt", "is not a weights file"),
        ("run", "no checkpoint in .* can be used: nothing is saved yet"),
        ("empty", "not an intact checkpoint .*give a run directory"),
    ],
)
def test_resolve_of_what_is_not_there(tmp_path, name, reason):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=reason):
        ck.resolve(tmp_path / name)


def names_of(paths) -> list[str]:
    return [path.name for path in paths]


def test_the_last_intact_ones_up_to_a_checkpoint(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
    truncate(tmp_path / "step-3" / "model.safetensors")
    fourth = tmp_path / "step-4"
    assert names_of(ck.last_intact(fourth, 3, keep=5)) == ["step-1", "step-2", "step-4"]
    assert names_of(ck.last_intact(fourth, 2, keep=5)) == ["step-2", "step-4"]
    for wanted in (0, 4):
        with pytest.raises(UserError, match=f"cannot average {wanted} .*: 3 of the newest 5 are"):
            ck.last_intact(fourth, wanted, keep=5)
    with pytest.raises(UserError, match="0 of the newest 5 are intact"):
        ck.last_intact(fourth / "model.safetensors", 2, keep=5)


def test_a_best_checkpoint_of_long_ago_is_in_no_mean(tmp_path):
    """It is kept beside the newest ones, and may be thousands of steps away from them."""
    for step in (100, 4000, 4010, 4020):
        save(tmp_path, step, best_step=100, keep=3)
    assert ck.steps(tmp_path) == [100, 4000, 4010, 4020]
    newest = tmp_path / "step-4020"
    assert names_of(ck.last_intact(newest, 3, keep=3)) == ["step-4000", "step-4010", "step-4020"]
    with pytest.raises(UserError, match=r"cannot average 4 .*: 3 of the newest 3 are intact"):
        ck.last_intact(newest, 4, keep=3)


def test_checkpoints_on_another_disk(tmp_path):
    """Where runs/x/checkpoints is a link, a checkpoint still lies in the run."""
    save(tmp_path / "scratch", 1)
    save(tmp_path / "scratch", 2, best_step=1)
    folder = tmp_path / "run" / "checkpoints"
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "scratch")
    assert ck.resolve(tmp_path / "run") == ck.resolve(folder / "best") == folder / "step-1"
    assert ck.resolve(folder / "last") == folder / "step-2"
    assert ck.resolve(tmp_path / "run", newest=True) == folder / "step-2"
    assert ck.repair(folder) == folder / "step-2"
