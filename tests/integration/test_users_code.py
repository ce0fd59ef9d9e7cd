"""A user's own modules are found where the command is run, and never stand for a package of Python's or ours."""

import subprocess
from pathlib import Path

import pytest

from cluster.record.run_directory import RunDirectory
from cluster.sinks.jsonl import read_steps
from tests.integration.commands import ROOT, environment

TRAP = "raise SystemExit(f'{__name__} was taken from the working directory')\n"
JUDGE = """
import json, os

def judge(*, prompt, completion, columns):
    return {"reward": float(columns["answer"] in completion), "sees_token": "HF_TOKEN" in os.environ}
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("json", "yaml", "actors", "cluster", "learner", "deploy"):
        (tmp_path / f"{name}.py").write_text(TRAP)
    (tmp_path / "my_rewards.py").write_text(JUDGE)
    return tmp_path


def treadwheel(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    quickstart = ROOT / "deploy/runs/quickstart.yaml"
    overrides = (
        "num_steps=1",
        "buffer.groups_per_step=4",
        "evaluation.prompts=null",
        "reward.judge=my_rewards:judge",
        f"model.path={ROOT / 'deploy/quickstart/model'}",
    )
    return subprocess.run(
        [environment()["PATH"].partition(":")[0] + "/treadwheel", command, str(quickstart), "run_dir=run", *overrides],
        cwd=folder,
        env=environment() | {"HF_TOKEN": "secret", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.slow
def test_actors_find_a_users_judge_and_are_not_misled(folder):
    result = treadwheel("train", folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert read_steps(RunDirectory(str(folder / "run")))[1]["reward/sees_token"] == 0.0
