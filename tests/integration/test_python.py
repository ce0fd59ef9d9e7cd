"""The page about Python, as a reader follows it: as a script, and in a notebook."""

import re
import shutil
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.integration.commands import QUICKSTART, ROOT, SMALL, environment, run

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]
SCRIPT, TABLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.MULTILINE | re.DOTALL)
(CELL,) = re.findall(r"^```\n(%%writefile.*?)^```", (ROOT / "docs/python.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path) -> Path:
    """An empty one, but for what the page names."""
    for named in ("deploy/quickstart/model", "deploy/runs"):
        shutil.copytree(ROOT / named, tmp_path / named)
    return tmp_path


def shortened(script: str) -> str:
    given = '["run_dir=runs/script"]'
    assert given in script
    return script.replace(given, repr(["run_dir=runs/script", "num_steps=4", *SMALL]))


def test_a_script_trains_by_a_judge_of_its_own_and_reads_what_the_run_did(folder):
    (folder / "my_script.py").write_text(shortened(SCRIPT))
    (folder / "tables.py").write_text(TABLES)
    for script in ("my_script.py", "tables.py"):
        ran = run(sys.executable, script, env={"PYTHONPATH": str(ROOT)}, cwd=folder)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "equal" in ran.stdout and "num_steps=4" in ran.stdout


def test_cells_of_a_notebook_train_and_a_callback_stops_them(folder, monkeypatch):
    monkeypatch.setattr("os.environ", {**environment(), "PYTHONPATH": str(ROOT)})
    train = f"""
import treadwheel
from my_functions import judge
run_file, settings = {QUICKSTART!r}, {["run_dir=runs/cells", *SMALL]}
run = treadwheel.train(run_file, settings, judge=judge, callbacks=[lambda step, metrics: step == 2])
print(run.num_steps, [each.step for each in run.checkpoints])
"""
    typed_in = "def typed(*, completion): return 0.0\ntreadwheel.train(run_file, settings, judge=typed)"
    cells = [CELL, train, typed_in]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=None, allow_errors=True, resources={"metadata": {"path": folder}}
    )
    client.execute()
    _, trained, refused = notebook.cells
    printed = "".join(each.text for each in trained.outputs if each.output_type == "stream")
    *_, (steps, saved) = re.findall(r"^(\d+) \[(\d+)\]$", printed, re.MULTILINE)
    assert int(steps) < 80 and saved == steps
    assert "%%writefile" in refused.outputs[-1].evalue
