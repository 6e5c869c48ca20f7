"""What a run says about its machine and its code."""

import subprocess

from engine import environment


def test_a_copy_inside_another_repository_has_no_commit(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)

    lab = tmp_path / "lab"
    lab.mkdir()
    (lab / "environment.py").touch()
    monkeypatch.setattr(environment, "__file__", str(lab / "environment.py"))
    git("init")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    git(*identity, "commit", "--allow-empty", "-m", "notes of a student")
    assert environment.commit() is None
    git("add", ".")
    git(*identity, "commit", "-m", "the lab")
    head = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True)
    assert head.stdout.decode().startswith(environment.commit())
