"""Cells of a notebook, with the one that the page about Python shows. Its scripts run in test_pages.py."""

import re
import shutil
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.integration.commands import QUICKSTART, ROOT, SMALL, environment
from tests.pages import blocks_of

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """An empty one, but for what the page names."""
    for named in ("deploy/quickstart/model", "deploy/runs"):
        shutil.copytree(ROOT / named, tmp_path / named)
    return tmp_path


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
    (shown,) = (block for block in blocks_of("docs/python.md") if block.file == "my_functions.py")
    cells = [f"%%writefile {shown.file}\n{shown.text}", train, typed_in]
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
