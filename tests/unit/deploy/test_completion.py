"""What Tab offers."""

import os
import subprocess
import sys

import pytest

from deploy.cli.completion import run_directories, run_files, run_files_and_directories, settings, variant_kinds


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    for name in ("deploy/runs/quickstart.yaml", "deploy/runs/gpu.yml", "deploy/notes.txt", "my.yaml", ".hidden/a.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for run in ("runs/a", "runs/sweep/b"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "run.yaml").touch()
    monkeypatch.chdir(tmp_path)


def test_run_files_and_the_folders_on_the_way():
    assert run_files("") == ["deploy/", "my.yaml", "runs/"]
    assert run_files("m") == ["my.yaml"]
    assert run_files("deploy/runs/q") == ["deploy/runs/quickstart.yaml"]


def test_an_only_folder_is_opened():
    assert run_files("dep") == ["deploy/runs/gpu.yml", "deploy/runs/quickstart.yaml"]


def test_run_directories_are_offered_whole_and_those_below_runs_first():
    assert run_directories("") == ["runs/a", "runs/sweep/", "deploy/", "runs/"]
    assert run_directories("runs/s") == ["runs/sweep/b"]


def test_what_is_evaluated_may_be_a_run_or_its_file():
    assert run_files_and_directories("") == ["runs/a", "runs/sweep/", "deploy/", "runs/", "my.yaml"]


def test_settings_are_offered_by_their_first_letters():
    assert settings("buffer.groups") == ["buffer.groups_per_step"]
    assert {"model", "buffer", "num_steps"} <= {*settings("")} and not any("." in name for name in settings(""))
    assert settings("buffer.groups_per_step=") == []


def test_nonsense_offers_nothing():
    assert run_files("no/such/folder/") == [] and run_directories("\udcff") == []


def test_kinds_of_variants():
    assert variant_kinds("rew") == ["rewards", "reward_shaping"]


def test_the_shell_is_offered_them_by_the_command():
    environment = {
        **os.environ,
        "_TREADWHEEL_COMPLETE": "complete_bash",
        "COMP_WORDS": "treadwheel info runs/a",
        "COMP_CWORD": "2",
    }
    command = [sys.executable, "-m", "deploy.cli"]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    asked = {**environment, "PYTHONPATH": root}
    told = subprocess.run(command, env=asked, capture_output=True, text=True, check=False)
    assert told.stdout.split() == ["runs/a"]


def test_the_help_imports_nothing_heavy():
    program = (
        "import sys\nfrom deploy.cli import app\ntry: app(['--help'])\n"
        "finally: print({'torch', 'ray', 'pyarrow', 'pydantic', 'transformers'} & set(sys.modules))"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    env = {**os.environ, "PYTHONPATH": root}
    told = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert "--show-completion" in told.stdout and told.stdout.endswith("set()\n")
