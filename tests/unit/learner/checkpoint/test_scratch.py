"""A rank's folder for uploads lasts as long as its process."""

import subprocess
import sys
from pathlib import Path

import pytest

from learner.checkpoint.scratch import Scratch

KILLED = "import os; from learner.checkpoint.scratch import Scratch; Scratch(); os._exit(1)"


def test_the_folder_of_a_rank_that_was_killed_goes_with_the_next_and_a_living_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    living = Scratch()
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    other = Scratch()
    assert set(tmp_path.iterdir()) == {living.folder, other.folder}
    living.close()
    other.close()
    assert list(tmp_path.iterdir()) == []
