"""A folder to begin with is whole: its run file is one, and its own test passes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.rollouts.mixture import open_prompts
from deploy import starting
from deploy.cli import app
from deploy.config.loading import load

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=starting.KINDS)
def begun(request, tmp_path, monkeypatch) -> Path:
    begun = CliRunner().invoke(app, ["init", str(tmp_path / "mine"), "--kind", request.param])
    assert begun.exit_code == 0 and "treadwheel train run.yaml" in begun.output
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path / "mine"


def test_its_run_file_names_what_is_there(begun):
    config = load("run.yaml")
    assert (Path(config.model.path) / "config.json").exists()
    assert len(open_prompts(config.prompts, field="prompts")) >= 8
    if config.evaluation.prompts:
        assert len(open_prompts(config.evaluation.prompts, field="prompts")) == config.evaluation.num_prompts


def test_its_run_file_names_the_model_wherever_treadwheel_is_installed(tmp_path, monkeypatch):
    strange = tmp_path / "my #1: tools" / "model"
    monkeypatch.setitem(starting._MODELS, "MODEL", strange)
    starting.start(str(tmp_path / "mine"), kind="math")
    assert load(tmp_path / "mine/run.yaml").model.path == str(strange)


def assert_its_own_test_passes(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0 and "passed" in ran.stdout, ran.stdout + ran.stderr


def test_its_own_test_passes(begun):
    assert_its_own_test_passes(begun)


def test_the_test_of_mathematics_takes_what_its_page_says_the_judge_compares(tmp_path):
    """Seen before: a fraction failed it, and an answer in LaTeX was an error."""
    starting.start(str(tmp_path), kind="math")
    with (tmp_path / "prompts.jsonl").open("a", encoding="utf-8") as rows:
        for answer in ("1/3", "\\frac{1}{2}", 0):
            rows.write(json.dumps({"messages": [{"role": "user", "content": "?"}], "answer": answer}) + "\n")
    assert_its_own_test_passes(tmp_path)


def test_its_page_names_each_of_its_files(begun):
    page = (begun / "README.md").read_text()
    named = {file.name for file in begun.iterdir() if f"`{file.name}`" in page}
    assert {file.name for file in begun.iterdir()} - named <= {
        "README.md",
        "__pycache__",
        *(f.name for f in begun.glob("test_*")),
    }


@pytest.mark.parametrize(("kind", "says"), [("judge", "not an empty folder"), ("poem", "choose agent, code, judge")])
def test_nothing_is_written_over_and_a_kind_that_is_not_there_is_refused(tmp_path, kind, says):
    (tmp_path / "run.yaml").write_text("mine")
    refused = CliRunner().invoke(app, ["init", str(tmp_path), "--kind", kind])
    assert refused.exit_code == 2 and says in refused.output
    assert (tmp_path / "run.yaml").read_text() == "mine"
