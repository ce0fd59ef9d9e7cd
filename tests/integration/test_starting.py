"""A folder to begin with learns as it is, offline, from where a user stands. All kinds train in test_pages.py."""

import json
import sys

import pytest

from tests.integration.commands import ROOT, run

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.acceptance, pytest.mark.timeout(1800)]


def test_a_model_of_a_folder_to_begin_with_learns_to_call_its_tool(tmp_path):
    env = {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "deploy.cli"]
    begun = run(*command, "init", "mine", "--kind", "tools", env=env, cwd=tmp_path)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    trained = run(*command, "train", "run.yaml", env=env, cwd=tmp_path / "mine")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    logged = [json.loads(line) for line in (tmp_path / "mine/runs/tools/metrics.jsonl").read_text().splitlines()]
    called = "environment/with_multiplication/called"
    assert logged[0][called] < 0.4 and logged[-1][called] > 0.8
