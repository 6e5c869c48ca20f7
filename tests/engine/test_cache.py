"""A cached folder is complete or absent, and two processes make it once."""

import os
import signal
import threading
from pathlib import Path

import pytest
from conftest import HANGS

from engine.cache import lock_folder, make_way, new_folder


def make(folder: Path, content: str) -> None:
    with lock_folder(folder), new_folder(folder) as building:
        (building / "a").write_text(content)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_a_folder_gets_its_name_when_it_is_complete(tmp_path):
    with lock_folder(tmp_path / "x"), new_folder(tmp_path / "x") as building:
        (building / "a").write_text("1")
        assert not (tmp_path / "x").exists()
    assert (tmp_path / "x" / "a").read_text() == "1" and names(tmp_path) == {"x"}


def test_nothing_is_left_of_a_failure(tmp_path):
    with pytest.raises(OSError) as caught, new_folder(tmp_path / "x"):
        raise OSError(28, "No space left on device")
    assert names(tmp_path) == set() and caught.value.place == str(tmp_path / "x")


def test_what_a_killed_process_leaves_is_replaced(tmp_path):
    child = os.fork()
    if not child:
        with lock_folder(tmp_path / "x"), new_folder(tmp_path / "x") as building:
            (building / "half").write_text("1")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert names(tmp_path) == {".building-x"}
    make(tmp_path / "x", "2")  # the lock has ended with its process
    assert names(tmp_path) == {"x"} and names(tmp_path / "x") == {"a"}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_damaged_folder_behind_a_link_is_left_alone(tmp_path, is_there):
    """As where students link to a cache that they cannot write."""
    shared = tmp_path / "shared"
    if is_there:
        shared.mkdir()
        (shared / "half").write_text("1")
    (tmp_path / "x").symlink_to(shared)
    log = []
    make_way(tmp_path / "x", log.append)
    make(tmp_path / "x", "2")
    assert not (tmp_path / "x").is_symlink() and names(tmp_path / "x") == {"a"}
    assert not is_there or names(shared) == {"half"}
    (line,) = log
    assert f"x links to {shared}, which is damaged or cannot be read" in line


def test_the_second_waits_for_the_first(tmp_path):
    log, waiting = [], threading.Event()

    def second():
        with lock_folder(tmp_path / "x", lambda line: (log.append(line), waiting.set())):
            log.append((tmp_path / "x").exists())

    thread = threading.Thread(target=second)
    with lock_folder(tmp_path / "x"), new_folder(tmp_path / "x"):
        thread.start()
        assert waiting.wait(HANGS)
    thread.join(HANGS)
    assert "another process is making" in log[0] and log[1:] == [True]
