"""A file is complete or absent, also if two processes write it at once."""

from engine import files


def test_two_processes_may_write_a_file_at_once(tmp_path, monkeypatch):
    path = tmp_path / "score.json"
    wait_for_disk = files.wait_for_disk

    def other_process_writes(temporary):
        monkeypatch.setattr(files, "wait_for_disk", wait_for_disk)
        with monkeypatch.context() as other:
            other.setattr("os.getpid", lambda: 1)
            files.atomic_write(path, "theirs")
        assert path.read_text() == "theirs" and temporary.read_text() == "ours"
        wait_for_disk(temporary)

    monkeypatch.setattr(files, "wait_for_disk", other_process_writes)
    files.atomic_write(path, "ours")
    assert path.read_text() == "ours" and list(tmp_path.iterdir()) == [path]
