"""A step as one file: whole, inert, and refused with a sentence where there is nothing to write."""

import json
import re

import pytest
from typer.testing import CliRunner

from cluster.contracts.errors import ConfigError, StorageError
from deploy.cli import app
from deploy.viewer import export as exporting
from deploy.viewer.export import export
from tests.unit.cluster.contracts.rows import row
from tests.unit.deploy.viewer.run_files import write_run, write_trajectories

HOSTILE = "</script><script>alert(1)</script><!--"


@pytest.fixture
def folder(tmp_path):
    folder = write_run(tmp_path / "run")
    write_trajectories(folder, 3, [row(completion_text=HOSTILE)], [row(ticket_index=9, group_id="9")])
    write_trajectories(folder, 2, [row()])
    return folder


def _data(text: str) -> dict:
    return json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[0])


def test_the_last_step_is_written_with_all_its_tokens(folder, tmp_path):
    file = tmp_path / "step.html"
    assert export(str(folder), step=None, file=str(file)) == f"step 3 of run: 2 groups, 2 trajectories in {file}"
    data = _data(file.read_text())
    assert [(group["ticket"], group["before"], group["after"]) for group in data["groups"]] == [
        (7, None, 9),
        (9, 7, None),
    ]
    assert data["groups"][0]["tokens"]["0"]["ids"] == [3, 4, 5]
    assert data["groups"][0]["trajectories"][0]["text"] == HOSTILE


def test_text_cannot_end_the_script_that_holds_it(folder, tmp_path):
    file = tmp_path / "step.html"
    export(str(folder), step=3, file=str(file))
    text = file.read_text()
    assert "alert(1)" in text and "<script>alert(1)" not in text and text.count("<!--") == 0


def test_a_runs_name_is_text(folder, tmp_path):
    file = tmp_path / "step.html"
    export(str(folder.rename(tmp_path / "a<b>")), step=3, file=str(file))
    assert "<title>Step 3 of a&lt;b&gt; · treadwheel</title>" in file.read_text()


def test_a_file_that_would_grow_too_large_says_how_many_groups_it_leaves_out(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "_MOST_TOKENS", 2)
    file = tmp_path / "step.html"
    assert export(str(folder), step=3, file=str(file)).endswith("; 1 groups left out")
    assert _data(file.read_text())["num_left_out"] == 1


def test_a_step_that_is_not_there_and_a_file_that_cannot_be_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="step 5 is not recorded: there are trajectories of steps 2 to 3"):
        export(str(folder), step=5, file=str(tmp_path / "step.html"))
    with pytest.raises(StorageError, match=r"step\.html' cannot be written: No such file or directory"):
        export(str(folder), step=3, file=str(tmp_path / "no/step.html"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--step", "3"], "--step says which step --export writes"),
        (["run", "other", "--export", "step.html"], "--export writes a step of one run, and 2 were named"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments, said):
    refused = CliRunner().invoke(app, ["view", *arguments])
    assert refused.exit_code == 2 and said in refused.stderr
