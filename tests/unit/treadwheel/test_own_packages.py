"""A folder called `actors` beside a script is neither imported in our place, nor silently lost."""

import subprocess
import sys
from pathlib import Path

import pytest

from treadwheel.own_packages import NAMES

ROOT = Path(__file__).parents[3]


def said(folder: Path, script: str) -> str:
    """Of a script in `folder`, which Python searches first."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, str(folder / "script.py")]
    env = {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_the_same_name_beside_a_script_is_not_taken_for_ours(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong one')")
    assert said(tmp_path, "import treadwheel; print(treadwheel.RunConfig.__name__)") == "RunConfig\n"


def test_one_that_was_imported_before_is_named_with_the_way_out(tmp_path):
    (tmp_path / "actors").mkdir()
    (tmp_path / "actors" / "__init__.py").write_text("")
    told = said(tmp_path, "import actors, treadwheel")
    assert f"is imported as 'actors' ({tmp_path}/actors/__init__.py)" in told and "rename it" in told
