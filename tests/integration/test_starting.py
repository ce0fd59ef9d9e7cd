"""Folders to begin with train as they are, offline, from where a user stands."""

import json
import sys

import pytest

from deploy.starting import KINDS
from tests.integration.commands import ROOT, run

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.acceptance, pytest.mark.timeout(1800)]
LEARNED = {"tools": "environment/with_multiplication/called"}
"""Metrics that rise within a few steps."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_to_begin_with_trains_as_it_is(kind, tmp_path):
    env = {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "deploy.cli"]
    begun = run(*command, "init", "mine", "--kind", kind, env=env, cwd=tmp_path)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    steps = [] if kind in LEARNED else ["num_steps=2", "evaluation.prompts=null"]
    trained = run(*command, "train", "run.yaml", *steps, env=env, cwd=tmp_path / "mine")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    logged = [json.loads(line) for line in (tmp_path / f"mine/runs/{kind}/metrics.jsonl").read_text().splitlines()]
    assert [line["policy_version"] for line in logged if "reward/mean" in line][:2] == [1, 2]
    if kind in LEARNED:
        assert logged[0][LEARNED[kind]] < 0.4 and logged[-1][LEARNED[kind]] > 0.8
