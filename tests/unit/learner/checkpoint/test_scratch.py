"""A rank's folder for uploads lasts as long as its process."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from learner.checkpoint import scratch
from learner.checkpoint.scratch import Scratch

KILLED = "import os; from learner.checkpoint.scratch import Scratch; Scratch(); os._exit(1)"


@pytest.fixture(autouse=True)
def own_tempdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_the_folder_of_a_rank_that_was_killed_goes_with_the_next_and_a_living_ones_stays(tmp_path: Path):
    living = Scratch()
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    other = Scratch()
    assert set(tmp_path.iterdir()) == {living.folder, other.folder}
    living.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_rank_removed_before_it_was_locked_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    locks, lock = list[int](), fcntl.flock

    def lock_late(descriptor: int, how: int) -> None:
        if not locks:
            (folder,) = tmp_path.iterdir()
            folder.rmdir()
        locks.append(descriptor)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    own = Scratch()
    assert own.folder.is_dir()
    assert locks == [own._lock] * 2, "the first one was closed"
    own.close()


def test_folders_that_cannot_be_locked_are_an_error(monkeypatch: pytest.MonkeyPatch):
    def refuse(descriptor: int, how: int) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="cannot be locked; set TMPDIR"):
        Scratch()


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (link := tmp_path / "treadwheel-checkpoint-x").symlink_to(tmp_path / "elsewhere")
    assert scratch._locked(link) is None
